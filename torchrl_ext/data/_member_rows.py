# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Rows of several members: sorted by member once, put back in order, and told apart when several name one record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchrl_ext.data.grouping import group_rows


def check_integers(where: str, **values: torch.Tensor) -> None:
    """Raises ``TypeError`` unless all tensors hold integers."""
    for name, value in values.items():
        if value.dtype == torch.bool or value.dtype.is_floating_point or value.dtype.is_complex:
            raise TypeError(f"{where}: {name} must hold integers, got {value.dtype}. Nothing was changed.")


class MemberGroups:
    """Rows by member: one sort for all of them, then one span of the sorted rows per member.

    Args:
        ids (torch.Tensor): integers ``[M]``, the member of each row.
        num_members (int): members.
        where (str): for errors.

    Raises:
        TypeError, ValueError: when ids are no integers or not in ``[0, num_members)``.

    Attributes:
        counts (list of int): rows of each member.
    """

    def __init__(self, ids: torch.Tensor, num_members: int, where: str) -> None:
        check_integers(where, **{"member ids": ids})
        ids = ids.long()
        # A group of its own takes the ids out of range, so that finding them costs no synchronisation on CUDA.
        inside = (ids >= 0) & (ids < num_members)
        groups = group_rows(torch.where(inside, ids, num_members), num_members + 1)
        # The host decides which members are called, so on CUDA the counts are read back: once per call.
        *self.counts, outside = groups.counts.tolist()
        if outside:
            raise ValueError(
                f"{where}: member ids must be in [0, {num_members}), got {outside} others, from {int(ids.min())} to "
                f"{int(ids.max())}. Nothing was changed."
            )
        # Rows of one member are in order as they are.
        self._order = None if max(self.counts) == len(ids) else groups.order
        self._permutations: dict[tuple[torch.device, bool], torch.Tensor] = {}

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """Yields the members that have rows, and where theirs are among the sorted rows."""
        start = 0
        for number, count in enumerate(self.counts):
            if count:
                yield number, slice(start, start + count)
            start += count

    def sort(self, rows: Any) -> Any:
        """Returns the rows (a tensor or a TensorDict ``[M, ...]``) sorted by member, in arrival order inside each."""
        if self._order is None:
            return rows
        return rows[self._permutation(self._order, rows.device)]

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
        """Puts sorted rows ``[M, ...]`` back into the order of the ids."""
        if self._order is None:
            return rows
        return rows.index_select(0, self._permutation(self._order, rows.device, inverse=True))

    def join(self, parts: Sequence[torch.Tensor], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Puts what the members gave, ``[K]`` each and in the order of the spans, back into the order of the ids."""
        moved = [part.to(device, dtype) for part in parts]
        return self.restore(torch.cat(moved)) if moved else torch.empty(0, dtype=dtype, device=device)

    def _permutation(self, order: torch.Tensor, device: torch.device | None, *, inverse: bool = False) -> torch.Tensor:
        key = (device or order.device, inverse)
        if key not in self._permutations:
            if inverse:
                order = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
            self._permutations[key] = order.to(key[0])
        return self._permutations[key]


def own_generations(rows: torch.Tensor, generation: torch.Tensor) -> torch.Tensor:
    """Returns the generations that a write gave to its rows, from those that stand there after it.

    Each later row of the same write that took the place of an earlier one has raised the generation by one.

    Args:
        rows (torch.Tensor): int64 ``[M]``, where the rows were written, in the order of writing.
        generation (torch.Tensor): int64 ``[M]``, the generations after the write.
    """
    # On CUDA this synchronises: only a writer knows whether it wrote a place twice, and TorchRL's do not tell.
    distinct, group = rows.unique(return_inverse=True)
    if len(distinct) == len(rows):
        return generation
    groups = group_rows(group, len(distinct))
    return generation - (groups.counts[group] - 1 - groups.rank)


def superseded_rows(rows: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Returns bool ``[M]``: live rows after which another live one names the same record."""
    # Dead rows share a key that no record has.
    ordered, order = torch.where(live, rows, -1).sort(stable=True)
    again = torch.zeros_like(live)
    again[:-1] = ordered[1:] == ordered[:-1]
    superseded = torch.empty_like(live)
    superseded[order] = again
    return superseded & live
