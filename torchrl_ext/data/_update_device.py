# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Applying an update to rows on a CUDA device: all decisions by masks, nothing is read back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchrl_ext.data._block import SlotBlock
from torchrl_ext.data._update_fused import can_update, update_fused
from torchrl_ext.data._words import as_words, word_columns
from torchrl_ext.data.positions import live_range
from torchrl_ext.data.write_back import REJECTED, STALE, SUPERSEDED, UPDATED, Update, WriteBackResult

if TYPE_CHECKING:
    from torchrl_ext.data.storages import SlotStorage


def update_on_device(storage: SlotStorage, update: Update, counts: torch.Tensor) -> WriteBackResult:
    """Writes the patch into the rows that live, on the current stream.

    Args:
        storage (SlotStorage): on a CUDA device.
        update (Update): with tensors there.
        counts (torch.Tensor): int64 ``[4]`` there: how many rows met each fate, added up.
    """
    with storage._lock, storage._order:
        block = storage.block
        storage._bump_mutation_revision()
        if can_update(block, update):
            return update_fused(block, update, counts)
        codes, rows = _decide(block, update)
        # Losers and dead handles write to the sink: leaving them out would need their number on the host.
        target = torch.where(codes == UPDATED, rows, block.sink)
        for field, value in update.patch if update.version is None else [*update.patch, update.version]:
            word_columns(block, field).index_copy_(0, target, as_words(field, value))
        counts.scatter_add_(0, codes, torch.ones_like(codes))
    return update.result(codes)


def _decide(block: SlotBlock, update: Update) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a code and a flat row for each handle; the sink for those that are dead."""
    slot, stream = update.slot, update.stream
    capacity, num_streams = block.capacity, block.num_streams
    low, head = live_range(block)
    inside = (slot >= 0) & (slot < capacity) & (stream >= 0) & (stream < num_streams)
    ids = torch.where(inside, stream, 0)
    # Clipped, so that no product overflows into the range of live steps: no lap after the head's has begun.
    laps = head.div(capacity, rounding_mode="floor")[ids] + 1
    step = torch.minimum(update.generation.clamp(min=-1), laps) * capacity + slot
    live = inside & (step >= low[ids]) & (step < head[ids])
    rows = torch.where(live, slot * num_streams + stream, block.sink)
    loser_code, accepted = SUPERSEDED, None
    order = None
    if update.version is not None:
        loser_code = REJECTED
        field, incoming = update.version
        order = incoming.argsort(stable=True)
        stored = block.layout.leaves(block.rows, [field])[field.key].index_select(0, rows).flatten()
        accepted = incoming > stored if update.require_newer else incoming >= stored
    codes = torch.where(_wins(rows, order), UPDATED, loser_code)
    if accepted is not None:
        codes = torch.where(accepted, codes, REJECTED)
    return torch.where(live, codes, STALE), rows


def _wins(rows: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Returns which row is the last of ``order`` (None: as they come) among those with the same number."""
    ordered, by_row = (rows if order is None else rows[order]).sort(stable=True)
    last = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=last[:-1])
    at = by_row if order is None else order[by_row]
    return torch.empty_like(last).scatter_(0, at, last)
