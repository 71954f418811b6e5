# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What both rings are made of: counters and lists in host memory, rows where the transport has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchrl_ext.data import RowLayout
from torchrl_ext.transport.cursors import CURSOR_BYTES, Cursors
from torchrl_ext.transport.segment import Segment

__all__ = ["RingParts", "RingShape"]

_PAGE = 4096
#: Numbers of a slot.
_HEADER = 4


@dataclass(frozen=True)
class RingShape:
    """Sizes of a ring.

    Args:
        layout (RowLayout): of a row, with derived successors.
        capacity (int): slots, at least 2.
        num_streams (int): rows of a slot.
        final_capacity (int): final observations that the arena holds, at least ``num_streams``.
        tails (int): successors kept of the newest row of each stream: one for all steps, or one for each slot.
    """

    layout: RowLayout
    capacity: int
    num_streams: int
    final_capacity: int
    tails: int = 1

    def __reduce__(self) -> tuple[Any, ...]:
        sizes = (self.capacity, self.num_streams, self.final_capacity, self.tails)
        return _shape, (self.layout.to_dict(), *sizes)

    @staticmethod
    def check(what: str, layout: RowLayout, capacity: int, num_streams: int, finals: int) -> None:
        """Raises ``ValueError`` for sizes of which no ring can be made."""
        if capacity < 2 or num_streams < 1 or finals < num_streams or not layout.derives:
            raise ValueError(
                f"{what}: capacity must be at least 2, num_streams at least 1, final_capacity at least num_streams "
                f"and the layout's successors derived, got {capacity}, {num_streams}, {finals} and "
                f"{'derived' if layout.derives else 'stored'} ones. Nothing was allocated."
            )

    @property
    def control_bytes(self) -> int:
        """Size of counters and lists."""
        return _pages(CURSOR_BYTES) + _pages(4 * (self.capacity * _HEADER + self.final_capacity))

    @property
    def _data_sizes(self) -> list[int]:
        width = self.layout.successor_bytes
        return [
            _pages(self.final_capacity * width),
            _pages(self.tails * self.num_streams * width),
            self.capacity * self.num_streams * self.layout.row_bytes,
        ]

    @property
    def data_bytes(self) -> int:
        """Size of arena, tails and rows."""
        return sum(self._data_sizes)


class RingParts:
    """The views of a ring's memory.

    Args:
        shape (RingShape): of the ring.
        control (Segment): counters, then the numbers of each slot and place; at least ``control_bytes``.
        data (torch.Tensor): uint8 ``[data_bytes]``, arena, tails, rows.
    """

    def __init__(self, shape: RingShape, control: Segment, data: torch.Tensor) -> None:
        self._memory = control.memory
        width, streams = shape.layout.successor_bytes, shape.num_streams
        start = _pages(CURSOR_BYTES)
        numbers = control.bytes[start : shape.control_bytes].numpy().view(np.int32)
        headers = numbers[: shape.capacity * _HEADER].reshape(shape.capacity, _HEADER)
        #: int32 ``[capacity]``: how many streams of a slot have a final observation; whether its streams began anew;
        #: whether its own tail was given; who acted in it.
        self.counts, self.begins, self.has_tail, self.versions = headers.T
        #: int64 ``[capacity]``: ``counts`` and ``begins`` of a slot as one number, which is 0 in most of them.
        self.breaks = headers.view(np.int64)[:, 0]
        #: int32 ``[final_capacity]``: whose the final observation at each place of the arena is.
        self.ended = numbers[shape.capacity * _HEADER :][: shape.final_capacity]
        arena, tails, rows = data[: shape.data_bytes].split(shape._data_sizes)
        self.arena = arena[: shape.final_capacity * width].view(shape.final_capacity, width)
        self.tails = tails[: shape.tails * streams * width].view(shape.tails, streams, width)
        self.rows = rows.view(shape.capacity, streams, shape.layout.row_bytes)
        self.final = self.rows.view(torch.int32)[..., shape.layout.final_offset // 4]

    def cursors(self) -> Cursors:
        """Returns the counters, for one end."""
        return Cursors(memoryview(self._memory))


def _shape(layout: dict[str, Any], *sizes: int) -> RingShape:
    return RingShape(RowLayout.from_dict(layout), *sizes)


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
