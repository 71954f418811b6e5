# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Draws of rows with replacement, uniform or by weights of streams, and what is said where nothing can be drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchrl_ext.data._block import SlotBlock
from torchrl_ext.data._moves import arrived, moved
from torchrl_ext.data.draws import Draw, draw_lockstep, locate, lockstep, place, sampleable_counts, uniform_ordinals

if TYPE_CHECKING:
    from torchrl_ext.data.storages import SlotStorage

EMPTY = "sample: the storage must hold a row whose successor is known, got {}. Nothing was changed; write to it first."


def refuse_empty(block: SlotBlock) -> None:
    """Raises ``RuntimeError`` when no row of a block on a device can be drawn."""
    # Of two rows behind the holes of a stream one surely has its successor; only below that a device is asked.
    if block.longest < 2:
        block.catch_up()
    if block.longest < 2 and not int(sampleable_counts(block)[2].sum()):
        raise RuntimeError(EMPTY.format("none"))


def draw_uniform(storage: SlotStorage, batch_size: int, generator: torch.Generator | None) -> Draw:
    """Draws rows uniformly over all sampleable rows."""
    block = storage.block
    if not block.on_device:
        rows = lockstep(block)
        if rows is not None:
            if rows.low == rows.high and rows.known is None:
                raise RuntimeError(EMPTY.format("none"))
            return draw_lockstep(block, rows, batch_size, generator)
    low, high, counts = sampleable_counts(block)
    total = counts.sum()
    if block.on_device:
        refuse_empty(block)
    elif not int(total):
        raise RuntimeError(EMPTY.format("none"))
    return locate(block, low, counts, uniform_ordinals(block, total, batch_size, generator), high)


def draw_index(storage: SlotStorage, batch_size: int, generator: torch.Generator | None) -> torch.Tensor:
    """Draws (slot, stream) int64 ``[B, 2]`` for stock samplers."""
    if not storage.initialized:
        raise RuntimeError(EMPTY.format("an empty storage"))
    drawn = draw_uniform(storage, batch_size, generator).torch()
    return torch.stack([drawn.slot, drawn.stream], -1).long()


def draw_weighted(
    storage: SlotStorage, batch_size: int, generator: torch.Generator | None, weights: torch.Tensor
) -> Draw:
    """Draws streams in proportion to weights float64 ``[N]``, then rows of them uniformly."""
    block = storage.block
    if len(weights) != block.num_streams:
        raise ValueError(
            f"TransitionSampler: stream_weights must have one number per stream ({block.num_streams}), got "
            f"{len(weights)}. Nothing was drawn."
        )
    if block.on_device:
        refuse_empty(block)
    low, high, counts = sampleable_counts(block)
    ends = (moved(weights, block.device) * (counts > 0)).cumsum(0)
    if not block.on_device and not float(ends[-1]):
        raise RuntimeError(EMPTY.format("none in a stream of positive weight"))
    device = block.device if generator is None else generator.device
    unit = arrived(torch.rand(2, batch_size, dtype=torch.float64, generator=generator, device=device), block.device)
    stream = torch.searchsorted(ends, unit[0] * ends[-1], right=True).clamp_(max=block.num_streams - 1)
    return place(block, low, high, stream, (unit[1] * counts[stream]).long())
