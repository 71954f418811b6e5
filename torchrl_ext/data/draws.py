# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Uniform draws over the sampleable rows of all streams."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from torchrl_ext.data._block import HEAD, NEWEST, RESERVED, TAIL, UNKNOWN, SlotBlock
from torchrl_ext.data.positions import live_holes, sampleable_range

_WIDE = 2**62


@dataclass
class Draw:
    """Rows that were drawn.

    Attributes:
        at (torch.Tensor): int64 ``[B]``, flat rows ``slot * N + stream``.
        room (torch.Tensor): int64 ``[B]``: the row ``k`` steps later is sampleable too iff ``room > k * unit``.
        unit (int): what one step counts in ``room``.
        stream (torch.Tensor): int64 ``[B]``.
        slot (torch.Tensor): int64 ``[B]``.
        generation (torch.Tensor): int64 ``[B]``.
    """

    at: torch.Tensor
    room: torch.Tensor
    unit: int
    stream: torch.Tensor
    slot: torch.Tensor
    generation: torch.Tensor

    def __len__(self) -> int:
        return len(self.at)


def even_range(block: SlotBlock) -> tuple[int, int] | None:
    """Returns the sampleable steps when they are the same in all streams of a host block without holes, else None."""
    positions = block.np_positions
    head, newest, tail = positions[HEAD], positions[NEWEST], positions[TAIL]
    if (head != head[0]).any() or (tail != tail[0]).any() or (positions[RESERVED] != head).any():
        return None
    unknown = newest == UNKNOWN
    if block.layout.derives and unknown.any():
        if not unknown.all():
            return None
        high = int(head[0]) - 1
    else:
        high = int(head[0])
    low = max(int(tail[0]), int(head[0]) - block.capacity)
    if (block.np_hole_step >= low).any():
        return None
    return low, max(low, high)


def draw_even(block: SlotBlock, low: int, high: int, count: int, generator: torch.Generator | None) -> Draw:
    """Draws from streams in step: flat rows are then one range modulo the ring, and need no division."""
    num, size = block.num_streams, block.capacity * block.num_streams
    total = (high - low) * num
    ordinal = torch.randint(total, (count,), generator=generator).numpy()
    at = ordinal + low % block.capacity * num
    wrapped = at >= size
    at -= wrapped * np.int64(size)
    # NumPy divides by a scalar in SIMD; torch does not.
    slot = np.floor_divide(at, num)
    parts = (at, total - ordinal, at - slot * num, slot, wrapped + np.int64(low // block.capacity))
    at, room, stream, slot, generation = (torch.from_numpy(part) for part in parts)
    return Draw(at, room, num, stream, slot, generation)


def uniform_ordinals(block: SlotBlock, total: torch.Tensor, count: int, generator: torch.Generator | None):
    """Draws int64 ``[count]`` below ``total`` (a 0-d tensor) without reading it back from a CUDA device.

    On CUDA a 62-bit number modulo ``total`` is taken; its bias is below ``total / 2**62``.
    """
    if block.device.type == "cpu":
        return torch.randint(int(total), (count,), generator=generator)
    device = block.device if generator is None else generator.device
    wide = torch.randint(_WIDE, (count,), generator=generator, device=device)
    return wide.to(block.device, non_blocking=True) % total


def locate(
    block: SlotBlock, low: torch.Tensor, counts: torch.Tensor, ordinal: torch.Tensor, high: torch.Tensor
) -> Draw:
    """Turns ordinals over all sampleable rows (stream by stream) into rows."""
    ends = counts.cumsum(0)
    stream = torch.searchsorted(ends, ordinal, right=True).clamp_(max=block.num_streams - 1)
    return place(block, low, high, stream, ordinal - (ends - counts)[stream])


def place(block: SlotBlock, low: torch.Tensor, high: torch.Tensor, stream: torch.Tensor, offset: torch.Tensor) -> Draw:
    """Turns the ``offset``-th sampleable row of a stream into a row, stepping over holes."""
    step = low[stream] + offset
    for hole in live_holes(block, low).unbind(-1):  # ascending; as many as the table has places, one by default
        step += (hole[stream] <= step).long()
    slot = step.remainder(block.capacity)
    generation = step.div(block.capacity, rounding_mode="floor")
    return Draw(slot * block.num_streams + stream, high[stream] - step, 1, stream, slot, generation)


def sampleable_counts(block: SlotBlock) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns ``low``, ``high`` and how many rows of each stream can be sampled, int64 ``[N]`` each."""
    low, high = sampleable_range(block)
    holes = live_holes(block, low) < high.unsqueeze(-1)
    return low, high, high - low - holes.sum(-1)
