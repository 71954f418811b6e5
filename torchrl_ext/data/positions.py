# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Where streams stand: liveness, generations and holes, computed from two counters per stream."""

from __future__ import annotations

import numpy as np
import torch

from torchrl_ext.data._block import CUT, HEAD, NEWEST, PENDING, RESERVED, TAIL, UNKNOWN, SlotBlock
from torchrl_ext.data.layout import FOLLOWED


def live_range(block: SlotBlock) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first live step and the head of each stream, int64 ``[N]`` on the device of the block."""
    positions = block.positions
    return torch.maximum(positions[TAIL], positions[RESERVED] - block.capacity), positions[HEAD]


def sampleable_range(block: SlotBlock) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the steps ``low <= step < high`` whose successor is known, holes not taken out."""
    low, head = live_range(block)
    high = head - (newest_state(block) == UNKNOWN).long() if block.layout.derives else head
    return low, torch.maximum(low, high)


def newest_state(block: SlotBlock) -> torch.Tensor:
    """Returns ``NEWEST`` of each stream, int64 ``[N]``, with cut rows told apart from unknown ones."""
    positions = block.positions
    if not block.on_device:
        return positions[NEWEST]
    slot = (positions[HEAD] - 1).remainder(block.capacity)
    rows = slot * block.num_streams + torch.arange(block.num_streams, device=block.device)
    cut = (positions[HEAD] > positions[TAIL]) & (block.final[rows] != FOLLOWED)
    return torch.where((positions[NEWEST] == UNKNOWN) & cut, CUT, positions[NEWEST])


def live_holes(block: SlotBlock, low: torch.Tensor) -> torch.Tensor:
    """Returns the live holes of each stream in ascending order, int64 ``[N, H]``, unused places at the end (2**62)."""
    holes = block.hole_step
    return torch.where(holes >= low.unsqueeze(-1), holes, 2**62).sort(-1).values


def holes_from(block: SlotBlock, stream: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Returns how many holes of their streams lie at or behind live steps, int64 like ``step``."""
    return (block.hole_step[stream] >= step.unsqueeze(-1)).sum(-1)


def generation_of(block: SlotBlock, slot: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
    """Returns ``last step written // capacity`` of rows, ``-1`` where no live row is (out of range included)."""
    capacity, num_streams = block.capacity, block.num_streams
    low, head = live_range(block)
    inside = (slot >= 0) & (slot < capacity) & (stream >= 0) & (stream < num_streams)
    stream = stream.clamp(0, num_streams - 1)
    last = head[stream] - 1
    step = last - (last - slot).remainder(capacity)
    live = inside & (step >= low[stream]) & (step >= 0)
    return torch.where(live, step.div(capacity, rounding_mode="floor"), -1)


def next_lap(position: torch.Tensor, capacity: int) -> torch.Tensor:
    """Returns positions rounded up to the start of a lap: no old handle can name a row written from there on."""
    return (position + capacity - 1) // capacity * capacity


def snapshot(block: SlotBlock) -> np.ndarray:
    """Returns a copy of the positions of a host block, to be compared by :func:`undisturbed`."""
    return block.np_positions.copy()


def undisturbed(
    block: SlotBlock, before: np.ndarray, index: torch.Tensor, generation: torch.Tensor, n_steps: int
) -> bool:
    """Tells whether rows read since ``before`` were safe from writers in other processes.

    A row is safe when it still lives and no step reserved by now overwrites it. In a stream that was written or cut
    meanwhile, the rows whose return may have reached the newest two are not: the successor of the newest changes with
    every write and cut, and the one before it counts as the newest while a write hides that. Where it was
    hidden all the time, by a writer that goes on or was killed, nobody read it and the others' successors are settled.
    """
    now = block.np_positions
    slot, stream = index.cpu().numpy().T
    step = generation.cpu().numpy() * block.capacity + slot
    # Just before it publishes, a writer tells of its newest row: the pending successor is not that of the row before.
    early = (before[RESERVED] != before[HEAD]) & (before[NEWEST] == PENDING) & block.layout.derives
    busy = (now != before).any(0) | early
    kept = step >= np.maximum(now[TAIL, stream], now[RESERVED, stream] - block.capacity)
    return bool((kept & (~busy[stream] | (step + n_steps + 1 < before[HEAD, stream]))).all())
