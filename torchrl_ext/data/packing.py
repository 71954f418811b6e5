# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Runs: what a caller hands to a storage, checked and turned into rows, cuts and final observations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_leaf_nontensor, unravel_key

from torchrl_ext.data._row_words import row_words
from torchrl_ext.data.fields import next_of
from torchrl_ext.data.layout import FOLLOWED, NO_SUCCESSOR, RowLayout

__all__ = ["PackedRun"]

#: Any of these flags ends an episode at its row.
END_KEYS = (("next", "done"), ("next", "terminated"), ("next", "truncated"))
_SAME_SIZE_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class PackedRun:
    """``K`` consecutive steps of ``N`` streams as bytes of one layout: what rings carry and storages copy.

    The producer vouches for the content: which rows are cuts is not looked up again in the rows, because reading one
    byte of each row would cost as much as copying them. :meth:`RowLayout.pack` makes a consistent run.

    Attributes:
        layout (RowLayout): of every row; must equal the storage's.
        rows (torch.Tensor): uint8 ``[K, N, row_bytes]``. The hidden int32 ``final`` of a row is ``-1``, or ``-2`` where
            an episode ends and its final observation is not given (allowed for terminated rows only).
        final_rows (torch.Tensor, optional): int64 ``[M]`` on the CPU, ascending ``k * N + n``: the rows that are not
            followed by their true successor.
        finals (torch.Tensor, optional): uint8 ``[M, >= successor_bytes]`` on the device of ``rows``: the successors of
            ``final_rows``.
        tail (torch.Tensor, optional): uint8 ``[N, >= successor_bytes]``: the successor of each stream's last row.
            Without it that row is sampleable once the stream's next row is written.
    """

    layout: RowLayout
    rows: torch.Tensor
    final_rows: torch.Tensor | None = None
    finals: torch.Tensor | None = None
    tail: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """``(K, N)``."""
        return self.rows.shape[0], self.rows.shape[1]

    def view(self) -> TensorDict:
        """Returns the rows as a TensorDict ``[K, N]`` of zero-copy views (without ``next`` observations)."""
        return self.layout.view(self.rows)

    def cpu(self) -> PackedRun:
        """Returns the run in host memory; waits for the device where it is not there already."""
        parts = (None if part is None else part.cpu() for part in (self.finals, self.tail))
        return PackedRun(self.layout, self.rows.cpu(), self.final_rows, *parts)


@dataclass
class Run:
    """A checked run of separate fields: ``leaves`` of the layout, successors by root key when the run carries them."""

    leaves: dict[NestedKey, torch.Tensor]
    successors: dict[NestedKey, torch.Tensor] | None
    num_steps: int
    num_streams: int
    device: torch.device

    @property
    def first(self) -> dict[NestedKey, torch.Tensor]:
        """The first observation of each stream, by next key."""
        keys = self.leaves if self.successors is None else self.successors
        return {key: self.leaves[key][0] for key in keys if key in self.leaves}


def check_run(
    layout: RowLayout,
    run: TensorDictBase,
    *,
    where: str,
    extra: Literal["raise", "drop"],
    num_streams: int | None = None,
    records: bool = False,
) -> Run:
    """Checks batch size, keys, shapes and dtypes of a run; raises before anything is written.

    With ``records`` the batch is one of ``[M]`` records, checked as ``M`` steps of one stream; errors count records.
    """
    if not isinstance(run, TensorDictBase):
        raise TypeError(
            f"{where}: run must be a TensorDict of batch size [K, N] or a PackedRun, got {type(run).__name__}. "
            "Nothing was written; stack the steps along dim 0."
        )
    names = run.names if run._has_names() else None
    if names is not None and "time" in names and names.index("time") != 0:
        raise ValueError(
            f"{where}: time must be the first dimension, got names {names}. "
            "Nothing was written; pass [N, T] data to extend()."
        )
    if run.batch_dims == 1 and num_streams in (None, 1) and not records:
        run = run.unsqueeze(-1)
    if records:
        shape = torch.Size([*run.shape, 1])
    elif run.batch_dims != 2 or run.shape[0] < 1 or num_streams not in (None, run.shape[1]):
        wanted = "N" if num_streams is None else num_streams
        raise ValueError(
            f"{where}: run must have batch size [K, {wanted}] with K >= 1, got {list(run.batch_size)}. "
            "Nothing was written."
        )
    else:
        shape = run.shape
    num_steps, streams = shape
    successor_keys = {next_of(key): key for key in layout.next_keys} if layout.derives else {}
    leaves: dict[NestedKey, torch.Tensor] = {}
    successors: dict[NestedKey, torch.Tensor] = {}
    fields = layout.by_key
    for key, leaf in run.items(True, True, is_leaf=is_leaf_nontensor):
        key = unravel_key(key)
        root = successor_keys.get(key)
        field = fields.get(key if root is None else root)
        if field is None:
            if extra == "raise":
                raise KeyError(
                    f"{where}: key {key!r} must be one of {list(fields)}. Nothing was written; "
                    "extra='drop' ignores unknown keys."
                )
            continue
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"{where}: key {key!r} must be a tensor, got {type(leaf).__name__}. Nothing was written.")
        if leaf.requires_grad:
            leaf = leaf.detach()  # memory of rows has no history
        if records:
            leaf = leaf.unsqueeze(1)
        if leaf.dtype != field.dtype or leaf.shape != (num_steps, streams, *field.shape):
            raise ValueError(
                f"{where}: key {key!r} must be {field.dtype} of shape {[num_steps, streams, *field.shape]}, got "
                f"{leaf.dtype} of shape {list(leaf.shape)}. Nothing was written."
            )
        (leaves if root is None else successors)[key if root is None else root] = leaf
    missing = [key for key in fields if key not in leaves]
    if successors and len(successors) < len(layout.next_keys):
        partly = [next_of(key) for key in layout.next_keys if key not in successors]
        raise ValueError(
            f"{where}: the run must carry all successors or none, got none at {partly}. Nothing was written."
        )
    if missing:
        raise KeyError(f"{where}: the run must have the keys {missing}, got {_names(run)}. Nothing was written.")
    if not layout.derives:
        successors = {key: leaves[next_of(key)] for key in layout.next_keys if next_of(key) in leaves}
    device = next(iter(leaves.values())).device
    checked = Run(leaves, successors or None, num_steps, streams, device)
    _check_ends(layout, checked, where, records=records)
    return checked


def _names(run: TensorDictBase) -> list[NestedKey]:
    return [unravel_key(key) for key in run.keys(True, True)]


def _check_ends(layout: RowLayout, run: Run, where: str, *, records: bool) -> None:
    if run.successors is not None or not layout.derives:
        return
    end = ends(run)
    terminated = run.leaves.get(("next", "terminated"))
    if end is None:
        return
    lacking = end if terminated is None else end & ~_any(terminated)
    # The check reads the flags back, on CUDA by a host synchronisation: runs without successors are for packed data.
    if bool(lacking.any()):
        k, n = lacking.nonzero()[0].tolist()
        row = f"record {k}" if records else f"the row at step {k}, stream {n}"
        raise ValueError(
            f"{where}: a row that is truncated (done without terminated) must come with its final observation, got "
            f"none for {row}. Nothing was written; pass the keys {list(map(next_of, layout.next_keys))}."
        )


def _any(flag: torch.Tensor) -> torch.Tensor:
    if flag.dim() == 2 or flag.shape[2:].numel() == 1:
        return flag.reshape(flag.shape[:2]).bool()
    return flag.flatten(2).any(-1)


def ends(run: Run) -> torch.Tensor | None:
    """Returns bool ``[K, N]``, true where a flag ends an episode; None when the run has no flag."""
    end = None
    for key in END_KEYS:
        flag = run.leaves.get(key)
        if flag is not None:
            end = _any(flag) if end is None else end | _any(flag)
    return end


def differ(a: torch.Tensor, b: torch.Tensor, batch_dims: int) -> torch.Tensor:
    """Returns where two tensors differ in any bit, over all but the first ``batch_dims`` dims (NaN payloads count)."""
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if a.dim() > batch_dims:
        a, b = a.flatten(batch_dims), b.flatten(batch_dims)
    wide = _fits_words(a) and _fits_words(b) and a.dim() > batch_dims
    dtype = torch.int64 if wide else _SAME_SIZE_INT[a.dtype.itemsize]
    unequal = a.view(dtype) != b.view(dtype)
    return unequal if unequal.dim() == batch_dims else unequal.any(-1)


def _fits_words(tensor: torch.Tensor) -> bool:
    """Whether the last dim is made of aligned int64 words, of which there are fewer to compare."""
    size = tensor.dtype.itemsize
    lengths = (tensor.shape[-1:] or (1,))[0], tensor.storage_offset(), *tensor.stride()[:-1]
    return tensor.stride()[-1:] == (1,) and all(length * size % 8 == 0 for length in lengths)


def cuts(run: Run) -> torch.Tensor:
    """Returns bool ``[K, N]``: rows of the run that are not followed by their true successor.

    A row is cut by its flags, or because the observation after it is not the one its step returned (a reset that no
    flag announces). The last row of a stream is cut by its flags only: what follows it is not known yet.
    """
    cut = ends(run)
    if cut is None:
        cut = torch.zeros(run.num_steps, run.num_streams, dtype=torch.bool, device=run.device)
    if run.successors is not None and run.num_steps > 1:
        for key, successor in run.successors.items():
            observation = run.leaves.get(key)
            if observation is not None:
                cut[:-1] |= differ(successor[:-1], observation[1:], 2)
    return cut


def write_rows(layout: RowLayout, run: Run, rows: torch.Tensor, steps: slice) -> None:
    """Writes the fields of some steps into packed rows ``[len(steps), N, row_bytes]``; :func:`write_marks` follows."""
    if row_words(layout).write(rows, [run.leaves[field.key][steps] for field in layout.fields]):
        return
    # On their way from a device to the host, nothing would keep a reader from looking at rows before they are there.
    for key, view in layout.leaves(rows, layout.fields).items():
        view.copy_(run.leaves[key][steps], non_blocking=rows.is_cuda)


def pack_successors(layout: RowLayout, leaves: Mapping[NestedKey, torch.Tensor]) -> torch.Tensor:
    """Packs successors by root key, batch dim first, into uint8 ``[M, successor_bytes]``."""
    first = next(iter(leaves.values()))
    rows = torch.zeros(first.shape[0], layout.successor_bytes, dtype=torch.uint8, device=first.device)
    for key, view in layout.leaves(rows, layout.prefix).items():
        view.copy_(leaves[key])
    return rows


@dataclass
class Ends:
    """What a run says about successors: final observations, the pending one, and rows whose cut has none to keep."""

    final_rows: torch.Tensor | None
    finals: torch.Tensor | None
    tail: torch.Tensor | None
    marks: torch.Tensor | None
    """bool ``[K, N]``: rows whose hidden ``final`` is ``NO_SUCCESSOR``; None when there is none."""


def find_ends(layout: RowLayout, run: Run) -> Ends:
    """Finds the cuts of a run and packs the successors that the next row will not show.

    On CUDA the cut rows are counted on the host, one synchronisation; storages on CUDA use masks instead.
    """
    if not layout.derives or run.successors is None:
        return Ends(None, None, None, cuts(run))
    at = cuts(run).flatten().nonzero().squeeze(-1)
    successors = {key: leaf.flatten(0, 1)[at] for key, leaf in run.successors.items()}
    finals = pack_successors(layout, successors)
    tail = pack_successors(layout, {key: leaf[-1] for key, leaf in run.successors.items()})
    return Ends(at.cpu(), finals, tail, None)


def write_marks(layout: RowLayout, rows: torch.Tensor, marks: torch.Tensor | None) -> None:
    """Writes the hidden ``final`` of rows ``[K, N, row_bytes]``: ``NO_SUCCESSOR`` at marks, else ``FOLLOWED``."""
    final = rows.view(torch.int32)[..., layout.final_offset // 4]
    final.fill_(FOLLOWED)
    if marks is not None:
        final.masked_fill_(marks.to(rows.device), NO_SUCCESSOR)


def pack_run(layout: RowLayout, run: TensorDictBase, *, extra: Literal["raise", "drop"]) -> PackedRun:
    """Implements :meth:`RowLayout.pack`."""
    checked = check_run(layout, run, where="pack", extra=extra)
    found = find_ends(layout, checked)
    shape = (checked.num_steps, checked.num_streams, layout.row_bytes)
    rows = torch.zeros(shape, dtype=torch.uint8, device=checked.device)
    write_rows(layout, checked, rows, slice(None))
    write_marks(layout, rows, found.marks)
    return PackedRun(layout, rows, found.final_rows, found.finals, found.tail)
