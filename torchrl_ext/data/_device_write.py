# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Writing to a storage on a CUDA device without waiting for it.

The host knows heads and tails, because it issues every write; what depends on data (which rows are cut, whether a
pending successor is the next first observation) is decided by masks on the device. The one question that a mask cannot
answer is whether the side table overflows, because that must raise before anything is written: the host keeps a lower
bound of the room left and asks the device only when that bound is used up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from tensordict import NestedKey

from torchrl_ext.data import _fused as fused
from torchrl_ext.data._block import (
    CUT,
    FINALS,
    HEAD,
    HOLES,
    NEWEST,
    PENDING,
    RESERVED,
    TAIL,
    UNKNOWN,
    SlotBlock,
)
from torchrl_ext.data._slot_write import copy_rows, put_packed
from torchrl_ext.data.fields import next_of
from torchrl_ext.data.final_obs import common_head
from torchrl_ext.data.grouping import group_rows
from torchrl_ext.data.handles import SlotHandle
from torchrl_ext.data.layout import FOLLOWED, HOLE, NO_SUCCESSOR
from torchrl_ext.data.packing import Ends, PackedRun, Run, cuts, differ, pack_successors
from torchrl_ext.data.positions import newest_state

if TYPE_CHECKING:
    from torchrl_ext.data.storages import SlotStorage


def write_run_on_device(block: SlotBlock, run: Run | PackedRun, columns: slice) -> SlotHandle:
    """Writes a checked run; the same outcome as :func:`torchrl_ext.data._slot_write.write_run`."""
    if isinstance(run, PackedRun) and _is_plain(block, run, columns):
        return _append(block, run, columns)
    layout, host = block.layout, block.np_positions
    block.settled_at = None
    num_steps = run.rows.shape[0] if isinstance(run, PackedRun) else run.num_steps
    first = host[HEAD, columns].copy()
    # With a whole lap or more the newest row dies in this write, and its successor with it.
    may_promote = num_steps < block.capacity and bool((host[NEWEST, columns] == PENDING).any())
    promoted = _unequal_pending(block, run, columns, first) if may_promote else None
    listed = masked = successors = tail = None
    if isinstance(run, PackedRun):
        tail = run.tail
        listed = _listed(block, run, columns, first, num_steps)
        most = 0 if listed is None else listed.most
    else:
        masked = cuts(run)
        successors = run.successors if layout.derives else None
        most = 0 if successors is None else num_steps
    if layout.derives:
        _ensure_room(block, min(most, block.capacity) + may_promote, columns, num_steps, promoted, masked)
    # Rows whose cut has no entry are marked in the row itself.
    marks = masked if successors is None else None
    copy_rows(block, run, Ends(None, None, None, marks), columns, num_steps, first, common_head(first))
    if promoted is not None:
        _promote(block, promoted, columns, first)
    if listed is not None:
        listed.write(block)
    elif masked is not None and successors is not None:
        _write_masked(block, successors, masked, columns, num_steps)
    block.heads[:, columns].add_(num_steps)
    host[: RESERVED + 1, columns] += num_steps
    block.sampleable = None
    if successors is not None:
        tail = pack_successors(layout, {key: leaf[-1] for key, leaf in successors.items()})
    _write_newest(block, tail, columns)
    heads = host[HEAD]
    if (heads == heads[0]).all() and (host[NEWEST] == UNKNOWN).all():
        block.settled_at = int(heads[0])
    return SlotHandle(first, num_steps, columns, block.capacity)


def _is_plain(block: SlotBlock, run: PackedRun, columns: slice) -> bool:
    """Whether all rows are one copy and the host knows the rest: no pending successors before or after, no wrap."""
    at = block.settled_at
    return (
        at is not None
        and run.tail is None
        and columns.stop - columns.start == block.num_streams
        and at % block.capacity + run.rows.shape[0] <= block.capacity
    )


def _append(block: SlotBlock, run: PackedRun, columns: slice) -> SlotHandle:
    # The common write of a learner on a GPU, where each host call that is saved counts.
    start, num_steps = cast(int, block.settled_at), run.rows.shape[0]
    first = block.np_positions[HEAD].copy()
    listed = _listed(block, run, columns, first, num_steps)
    if listed is not None:
        _ensure_room(block, listed.most, columns, num_steps, None, None)
    put_packed(block, run.rows, start % block.capacity, columns)
    if listed is not None:
        listed.write(block)
    block.heads.add_(num_steps)
    block.np_positions[: RESERVED + 1] += num_steps
    block.settled_at = start + num_steps
    block.sampleable = None
    return SlotHandle(first, num_steps, columns, block.capacity)


def _newest_rows(block: SlotBlock, columns: slice, heads: np.ndarray) -> torch.Tensor:
    """Flat rows before the heads; a view of an arange where streams are in step, so that no index is uploaded."""
    if (heads == heads[0]).all():
        start = int(heads[0] - 1) % block.capacity * block.num_streams
        return torch.arange(start + columns.start, start + columns.stop, device=block.device)
    rows = (heads - 1) % block.capacity * block.num_streams + np.arange(columns.start, columns.stop)
    return torch.from_numpy(rows).to(block.device, non_blocking=True)


def _places(block: SlotBlock, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """The pending place of each stream of a block: its number in the stream's ring, and its flat row."""
    place = block.positions[FINALS, columns] % block.final_capacity
    stream = torch.arange(columns.start, columns.stop, device=block.device)
    return place, block.side_start + stream * block.final_capacity + place


def _unequal_pending(block: SlotBlock, run: Run | PackedRun, columns: slice, heads: np.ndarray) -> torch.Tensor:
    """bool ``[n]``: streams whose pending successor is not the first observation of the run."""
    layout = block.layout
    if layout.derives:
        rows = block.successor_words.index_select(0, _places(block, columns)[1]).view(torch.uint8)
        known = layout.leaves(rows, layout.prefix)
    else:
        rows = block.words.index_select(0, _newest_rows(block, columns, heads)).view(torch.uint8)
        leaves = layout.leaves(rows, [layout.by_key[next_of(key)] for key in layout.next_keys])
        known = {key: leaves[next_of(key)] for key in layout.next_keys}
    if isinstance(run, PackedRun):
        observed = layout.leaves(run.rows[0], [layout.by_key[key] for key in known])
    else:
        observed = run.first
    unequal = torch.zeros(columns.stop - columns.start, dtype=torch.bool, device=block.device)
    for key, leaf in known.items():
        if key in observed:
            unequal |= differ(leaf, observed[key].to(block.device, non_blocking=True), 1)
    return unequal & (block.positions[NEWEST, columns] == PENDING)


def _promote(block: SlotBlock, promoted: torch.Tensor, columns: slice, heads: np.ndarray) -> None:
    rows = _newest_rows(block, columns, heads)
    place, _ = _places(block, columns)
    final = block.final.index_select(0, rows)
    value = place.int() if block.layout.derives else torch.full_like(final, NO_SUCCESSOR)
    block.final.index_copy_(0, rows, torch.where(promoted, value, final))
    if not block.layout.derives:
        return
    steps = torch.from_numpy(heads - 1).to(block.device, non_blocking=True)
    _own_places(block, columns, place.unsqueeze(0), torch.where(promoted, steps, -1).unsqueeze(0))
    block.positions[FINALS, columns] += promoted


def _own_places(block: SlotBlock, columns: slice, place: torch.Tensor, steps: torch.Tensor) -> None:
    # Steps of a stream only grow, so a maximum writes the new owner, and -1 writes nothing.
    table = block.final_step[columns]
    table.scatter_reduce_(1, place.T, steps.T.contiguous(), "amax")


def _write_masked(
    block: SlotBlock,
    successors: Mapping[NestedKey, torch.Tensor],
    cut: torch.Tensor,
    columns: slice,
    num_steps: int,
) -> None:
    """Stores the successors of cut rows; those of the others go to the sink row."""
    layout, dropped = block.layout, max(num_steps - block.capacity, 0)
    cut = cut[dropped:].to(block.device)
    kept = len(cut)
    rank = cut.long().cumsum(0) - 1
    place = (block.positions[FINALS, columns] + rank.clamp(min=0)) % block.final_capacity
    stream = torch.arange(columns.start, columns.stop, device=block.device)
    side = torch.where(cut, block.side_start + stream * block.final_capacity + place, block.sink)
    packed = pack_successors(layout, {key: leaf[dropped:].flatten(0, 1) for key, leaf in successors.items()})
    words = packed.to(block.device, non_blocking=True).view(block.words.dtype)
    block.successor_words.index_copy_(0, side.flatten(), words)
    heads = block.positions[HEAD, columns]
    steps = heads + torch.arange(dropped, num_steps, device=block.device).unsqueeze(-1)
    rows = steps % block.capacity * block.num_streams + stream
    # Every row of the run is ours, so its hidden ``final`` can be written densely.
    value = torch.where(cut, place, FOLLOWED).int()
    block.final.index_copy_(0, rows.flatten(), value.flatten())
    _own_places(block, columns, place, torch.where(cut, steps, -1).view(kept, -1))
    block.positions[FINALS, columns] += cut.sum(0)


class _Listed:
    """Final observations that a packed run lists on the host: where they go, but for the places only a device knows."""

    def __init__(self, finals: torch.Tensor, numbers: np.ndarray, most: int) -> None:
        self._finals = finals
        #: int64 ``[5, M]``: stream, step, rank in its stream, row of the finals, whether the last of its stream.
        self.numbers = numbers
        self.most = most  # of one stream

    def write(self, block: SlotBlock) -> None:
        if fused.available(block):
            fused.write_finals(block, self.numbers, self._finals, once=self.most == 1)
            return
        stream, steps, rank, order, _ = torch.from_numpy(self.numbers).to(block.device, non_blocking=True)
        place = (block.positions[FINALS][stream] + rank) % block.final_capacity
        entry = stream * block.final_capacity + place
        words = self._finals[:, : block.layout.successor_bytes].to(block.device, non_blocking=True)
        words = words[order].contiguous().view(block.words.dtype)
        block.successor_words.index_copy_(0, block.side_start + entry, words)
        rows = steps % block.capacity * block.num_streams + stream
        block.final.index_copy_(0, rows, place.int())
        block.final_step.view(-1).index_copy_(0, entry, steps)
        block.positions[FINALS].index_add_(0, stream, torch.ones_like(stream))


def _listed(block: SlotBlock, run: PackedRun, columns: slice, first: np.ndarray, num_steps: int) -> _Listed | None:
    if run.final_rows is None or not run.final_rows.shape[0] or not block.layout.derives:
        return None
    finals = cast(torch.Tensor, run.finals)  # a checked run has as many as rows are listed
    step, stream = np.divmod(run.final_rows.numpy(), columns.stop - columns.start)
    if num_steps <= block.capacity and np.bincount(stream).max() == 1:
        # Mostly no stream ends twice in a run, and there is nothing to sort.
        numbers = np.empty((5, len(stream)), dtype=np.int64)
        numbers[0], numbers[1], numbers[2] = stream, step, 0
        numbers[3], numbers[4] = np.arange(len(stream)), 1
        numbers[0] += columns.start
        numbers[1] += first.take(stream)
        return _Listed(finals, numbers, 1)
    kept = np.flatnonzero(step >= num_steps - block.capacity)
    if not len(kept):
        return None
    groups = group_rows(stream[kept], columns.stop - columns.start)
    order, rank = kept[groups.order], groups.rank[groups.order]
    stream = stream[order]
    last = np.append(stream[1:] != stream[:-1], True)
    numbers = np.stack([stream + columns.start, first[stream] + step[order], rank, order, last])
    return _Listed(finals, numbers, int(rank.max()) + 1)


def _ensure_room(
    block: SlotBlock,
    most: int,
    columns: slice,
    num_steps: int,
    promoted: torch.Tensor | None,
    masked: torch.Tensor | None,
) -> None:
    """Raises before writing when ``most`` new entries in one stream might not fit and indeed do not."""
    if not most or block.final_capacity > block.capacity:  # with a place for every row and one more, nothing overflows
        return
    if block.room < most:
        # The only wait for the device in a write: once per final_capacity / most writes, or when the table is full.
        low = torch.maximum(block.positions[TAIL], block.positions[HEAD] - block.capacity)
        live = (block.final_step >= low.unsqueeze(-1)).sum(-1)
        block.room = block.final_capacity - 1 - int(live.max())
    if block.room < most:
        low = torch.maximum(block.positions[TAIL], block.positions[HEAD] + num_steps - block.capacity)[columns]
        live = (block.final_step[columns] >= low.unsqueeze(-1)).sum(-1)
        if masked is not None:
            live = live + masked[max(num_steps - block.capacity, 0) :].sum(0).to(block.device)
        else:
            live = live + (most - (promoted is not None))
        if promoted is not None:
            live = live + promoted
        needed = int(live.max()) + 1
        if needed > block.final_capacity:
            raise full_side_table(block, needed)
        block.room = 0
        return
    block.room -= most


def full_side_table(block: SlotBlock, needed: int) -> RuntimeError:
    """Returns the error of a side table that would overflow."""
    return RuntimeError(
        f"SlotStorage: the side table must hold {needed} entries per stream, it has final_capacity="
        f"{block.final_capacity} and {block.kind} memory cannot grow. Nothing was changed; build the storage "
        "with a larger final_capacity."
    )


def _write_newest(block: SlotBlock, tail: torch.Tensor | None, columns: slice) -> None:
    host, derives = block.np_positions, block.layout.derives
    if tail is None and derives:
        # What no row says is UNKNOWN; nothing to do where that is what the device has already.
        if (host[NEWEST, columns] != UNKNOWN).any():
            block.positions[NEWEST, columns] = UNKNOWN
            host[NEWEST, columns] = UNKNOWN
        return
    rows = _newest_rows(block, columns, host[HEAD, columns])
    block.positions[NEWEST, columns] = torch.where(block.final.index_select(0, rows) == FOLLOWED, PENDING, CUT)
    host[NEWEST, columns] = PENDING
    if tail is not None and derives:
        tail = tail[:, : block.layout.successor_bytes].to(block.device, non_blocking=True).contiguous()
        block.successor_words.index_copy_(0, _places(block, columns)[1], tail.view(block.words.dtype))


def cut_streams_on_device(storage: SlotStorage, columns: slice) -> None:
    """Implements :meth:`SlotStorage.end_streams`; waits for the device, because cuts are rare and must not overflow."""
    block = storage.block
    host, heads = block.np_positions, block.np_positions[HEAD, columns]
    state = newest_state(block)[columns]
    promoted = state == PENDING
    lost = (state == UNKNOWN) & torch.from_numpy(heads > host[TAIL, columns]).to(block.device)
    low = torch.maximum(block.positions[TAIL], block.positions[HEAD] - block.capacity)[columns]
    if block.layout.derives:
        _ensure_room(block, 1, columns, 0, promoted, torch.zeros(1, len(heads), dtype=torch.bool))
    holes = (block.hole_step[columns] >= low.unsqueeze(-1)).sum(-1) + lost
    if int((holes * lost).max()) > block.hole_capacity:
        raise RuntimeError(
            f"SlotStorage: a stream must have at most {block.hole_capacity} live rows that were cut before their "
            "successor was known. Nothing was changed; give packed runs a tail."
        )
    _promote(block, promoted, columns, heads)
    rows = _newest_rows(block, columns, heads)
    block.final.index_copy_(0, rows, torch.where(lost, HOLE, block.final.index_select(0, rows)).int())
    place = (block.positions[HOLES, columns] % block.hole_capacity).unsqueeze(-1)
    steps = torch.where(lost, torch.from_numpy(heads - 1).to(block.device), -1).unsqueeze(-1)
    block.hole_step[columns].scatter_reduce_(1, place, steps, "amax")
    block.positions[HOLES, columns] += lost
    block.positions[NEWEST, columns] = torch.where(promoted | lost, CUT, state)
    host[NEWEST, columns] = CUT
    block.sampleable = block.settled_at = None
    block.newest_holes[columns] = np.where(lost.cpu().numpy(), heads - 1, block.newest_holes[columns])
