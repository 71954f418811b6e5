# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Uniform draws over the sampleable rows of all streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import numpy as np
import torch

from torchrl_ext.data._block import HEAD, NEWEST, RESERVED, TAIL, UNKNOWN, SlotBlock
from torchrl_ext.data.positions import live_holes, sampleable_range

_WIDE = 2**62

#: NumPy arrays on the host, where they cost less, or tensors.
Array = TypeVar("Array", bound=torch.Tensor | np.ndarray)


@dataclass
class Draw(Generic[Array]):
    """Rows that were drawn, as tensors or (on the host) as NumPy arrays.

    Attributes:
        at (torch.Tensor): ``[B]``, flat rows ``slot * N + stream``; int64, or int32 on the host where rows are few.
        room (torch.Tensor): like ``at``: the row ``k`` steps later is sampleable too iff ``room > k * unit``.
        unit (int): what one step counts in ``room``.
        stream (torch.Tensor): like ``at``.
        slot (torch.Tensor): like ``at``.
        generation (torch.Tensor): int64 ``[B]``.
    """

    at: Array
    room: Array
    unit: int
    stream: Array
    slot: Array
    generation: Array

    def __len__(self) -> int:
        return len(self.at)

    def numpy(self) -> Draw[np.ndarray]:
        """The same draw as NumPy arrays, for the host."""
        if isinstance(self.at, np.ndarray):
            return cast("Draw[np.ndarray]", self)
        at, room, unit, stream, slot, generation = cast("Draw[torch.Tensor]", self)._parts()
        return Draw(at.numpy(), room.numpy(), unit, stream.numpy(), slot.numpy(), generation.numpy())

    def torch(self) -> Draw[torch.Tensor]:
        """The same draw as tensors."""
        if isinstance(self.at, torch.Tensor):
            return cast("Draw[torch.Tensor]", self)
        at, room, unit, stream, slot, generation = cast("Draw[np.ndarray]", self)._parts()
        convert = torch.from_numpy
        return Draw(convert(at), convert(room), unit, convert(stream), convert(slot), convert(generation))

    def _parts(self) -> tuple[Array, Array, int, Array, Array, Array]:
        return self.at, self.room, self.unit, self.stream, self.slot, self.generation


@dataclass
class Lockstep:
    """Sampleable rows of a host block whose streams stand at the same step: ``low <= step < high`` in all of them.

    ``known`` lists the streams whose newest row, at step ``high``, is sampleable too; None when that is no stream.
    """

    low: int
    high: int
    known: np.ndarray | None


def lockstep(block: SlotBlock) -> Lockstep | None:
    """Returns the sampleable rows when all streams of a host block are in step and have no holes, else None.

    The answer is kept until the next write where no other process can write.
    """
    if block.sampleable is None or block.kind in ("shared", "file"):
        block.sampleable = (_lockstep(block),)
    return block.sampleable[0]


def _lockstep(block: SlotBlock) -> Lockstep | None:
    positions = block.np_positions
    head, tail = positions[HEAD], positions[TAIL]
    first = int(head[0])
    if (head != first).any() or (tail != tail[0]).any() or (positions[RESERVED] != first).any():
        return None
    low = max(int(tail[0]), first - block.capacity)
    if block.may_have_holes:
        return None
    known = None
    if block.layout.derives and first > low:
        newest = positions[NEWEST] != UNKNOWN
        if not newest.all():
            known = np.flatnonzero(newest)
            known = known if len(known) else None
            return Lockstep(low, first - 1, known)
    return Lockstep(low, first, None)


def draw_lockstep(block: SlotBlock, rows: Lockstep, count: int, generator: torch.Generator | None) -> Draw[np.ndarray]:
    """Draws from streams in step: flat rows are then one range modulo the ring, and need no search."""
    num, size = block.num_streams, block.capacity * block.num_streams
    base = (rows.high - rows.low) * num
    known = rows.known
    extra = 0 if known is None else len(known)
    # Half as wide numbers cost half as much, here and in all that follows.
    dtype = torch.int32 if block.rows.shape[0] < 2**31 else torch.int64
    ordinal = torch.randint(base + extra, (count,), generator=generator, dtype=dtype).numpy()
    if known is not None:
        newest = np.flatnonzero(ordinal >= base)
        ordinal[newest] = base + known[ordinal[newest] - base]
    at = modulo(ordinal + rows.low % block.capacity * num, size)
    # NumPy divides by a scalar in SIMD; torch does not.
    slot = np.floor_divide(at, num)
    stream = at - slot * num
    room = base - ordinal
    if known is not None:
        is_known = np.zeros(num, dtype=ordinal.dtype)
        is_known[known] = num
        room += is_known[stream]
    generation = (slot < rows.low % block.capacity) + np.int64(rows.low // block.capacity)
    return Draw(at, room, num, stream, slot, generation)


def modulo(rows: np.ndarray, size: int) -> np.ndarray:
    """Returns ``rows % size`` for ``0 <= rows < 2 * size``: as unsigned numbers, the smaller of both candidates."""
    unsigned = np.uint32 if rows.dtype == np.int32 else np.uint64
    return np.minimum(rows.view(unsigned), (rows - size).view(unsigned)).view(rows.dtype)


def uniform_ordinals(
    block: SlotBlock, total: torch.Tensor, count: int, generator: torch.Generator | None
) -> torch.Tensor:
    """Draws int64 ``[count]`` below ``total`` (a 0-d tensor) without reading it back from a CUDA device.

    On CUDA a 62-bit number modulo ``total`` is taken; its bias is below ``total / 2**62``.
    """
    if not block.on_device:
        return torch.randint(int(total), (count,), generator=generator)
    device = block.device if generator is None else generator.device
    wide = torch.randint(_WIDE, (count,), generator=generator, device=device)
    return wide.to(block.device, non_blocking=True) % total


def locate(
    block: SlotBlock, low: torch.Tensor, counts: torch.Tensor, ordinal: torch.Tensor, high: torch.Tensor
) -> Draw[torch.Tensor]:
    """Turns ordinals over all sampleable rows (stream by stream) into rows."""
    ends = counts.cumsum(0)
    stream = torch.searchsorted(ends, ordinal, right=True).clamp_(max=block.num_streams - 1)
    return place(block, low, high, stream, ordinal - (ends - counts)[stream])


def place(
    block: SlotBlock, low: torch.Tensor, high: torch.Tensor, stream: torch.Tensor, offset: torch.Tensor
) -> Draw[torch.Tensor]:
    """Turns the ``offset``-th sampleable row of a stream into a row, stepping over holes."""
    step = low[stream] + offset
    if block.may_have_holes:
        # The i-th hole is stepped over by whoever is at or behind it after the i before it were.
        holes = live_holes(block, low)
        behind = holes - torch.arange(holes.shape[-1], device=holes.device)
        step += (behind[stream] <= step.unsqueeze(-1)).sum(-1)
    slot = step.remainder(block.capacity)
    generation = step.div(block.capacity, rounding_mode="floor")
    return Draw(slot * block.num_streams + stream, high[stream] - step, 1, stream, slot, generation)


def sampleable_counts(block: SlotBlock) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns ``low``, ``high`` and how many rows of each stream can be sampled, int64 ``[N]`` each."""
    low, high = sampleable_range(block)
    counts = high - low
    if block.may_have_holes:
        counts = counts - (live_holes(block, low) < high.unsqueeze(-1)).sum(-1)
    return low, high, counts
