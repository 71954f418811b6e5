# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""A ring in shared host memory that has no name."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchrl_ext.data import RowLayout
from torchrl_ext.data.layout import FOLLOWED
from torchrl_ext.transport.cursors import CURSOR_BYTES, Cursor, Cursors
from torchrl_ext.transport.segment import Segment

__all__ = ["HostRing"]

_PAGE = 4096


class HostRing:
    """The memory of a ring between processes of one host; see :mod:`torchrl_ext.transport.ring` for the contract.

    It is one :class:`~torchrl_ext.transport.segment.Segment`: send it to a spawned process as an argument.

    Args:
        layout (RowLayout): of a row, with derived successors.
        capacity (int): slots, at least 2.
        num_streams (int): rows of a slot.

    Keyword Args:
        final_capacity (int, optional): final observations that the arena holds, at least ``num_streams``. Defaults to
            four times as many.

    Raises:
        ValueError: on impossible sizes.
        MemoryError: when that much memory is not free, stating both; nothing is left allocated.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_ext.data import RowLayout
        >>> from torchrl_ext.transport import HostConsumer, HostProducer, HostRing
        >>> example = TensorDict({"observation": torch.zeros(3), "next": {"observation": torch.zeros(3)}}, [])
        >>> ring = HostRing(RowLayout.from_tensordict(example), capacity=8, num_streams=2)
        >>> producer, consumer = HostProducer(ring), HostConsumer(ring)
        >>> for step in range(3):
        ...     slot = producer.reserve()
        ...     _ = slot["observation"].fill_(step)
        ...     producer.publish()
        >>> with consumer.read_span() as span:
        ...     span.view()["observation"][:, 0, 0].tolist()
        [0.0, 1.0, 2.0]
        >>> consumer.read_span() is None
        True
    """

    def __init__(
        self, layout: RowLayout, capacity: int, num_streams: int, *, final_capacity: int | None = None
    ) -> None:
        finals = 4 * num_streams if final_capacity is None else final_capacity
        if capacity < 2 or num_streams < 1 or finals < num_streams or not layout.derives:
            raise ValueError(
                "HostRing: capacity must be at least 2, num_streams at least 1, final_capacity at least num_streams "
                f"and the layout's successors derived, got {capacity}, {num_streams}, {finals} and "
                f"{'derived' if layout.derives else 'stored'} ones. Nothing was allocated."
            )
        segment = Segment(_Parts.nbytes(layout, capacity, num_streams, finals), "HostRing")
        self._open(segment, layout, capacity, num_streams, finals)
        self.parts.cursors()[Cursor.LIMIT] = 2**62
        self.parts.final.fill_(FOLLOWED)

    def _open(self, segment: Segment, layout: RowLayout, capacity: int, num_streams: int, finals: int) -> None:
        self._segment = segment
        self.layout, self.capacity, self.num_streams, self.final_capacity = layout, capacity, num_streams, finals
        self.parts = _Parts(segment, layout, capacity, num_streams, finals)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self._segment, self.layout.to_dict(), self.capacity, self.num_streams, self.final_capacity)


def _attach(segment: Segment, layout: dict, capacity: int, num_streams: int, finals: int) -> HostRing:
    ring = HostRing.__new__(HostRing)
    ring._open(segment, RowLayout.from_dict(layout), capacity, num_streams, finals)
    return ring


class _Parts:
    """The views of a segment: counters, ended streams of each slot, arena, tail, rows."""

    def __init__(self, segment: Segment, layout: RowLayout, capacity: int, num_streams: int, finals: int) -> None:
        offsets = self._offsets(layout, capacity, num_streams, finals)
        self._memory = segment.memory
        parts = [segment.bytes[start:stop] for start, stop in zip(offsets[:-1], offsets[1:], strict=True)]
        ended = parts[1].numpy().view(np.int32)[: capacity * (num_streams + 1)].reshape(capacity, num_streams + 1)
        #: int32 ``[capacity]``: how many streams of a slot have a final observation; ``[capacity, n]``: which.
        self.counts, self.ended = ended[:, 0], ended[:, 1:]
        width = layout.successor_bytes
        self.arena = parts[2][: finals * width].view(finals, width)
        self.tail = parts[3][: num_streams * width].view(num_streams, width)
        size = capacity * num_streams * layout.row_bytes
        self.rows = parts[4][:size].view(capacity, num_streams, layout.row_bytes)
        self.final = self.rows.view(torch.int32)[..., layout.final_offset // 4]

    def cursors(self) -> Cursors:
        """Returns the counters, for one end."""
        return Cursors(memoryview(self._memory))

    @staticmethod
    def _offsets(layout: RowLayout, capacity: int, num_streams: int, finals: int) -> list[int]:
        width = layout.successor_bytes
        sizes = [CURSOR_BYTES, 4 * capacity * (num_streams + 1), finals * width, num_streams * width]
        sizes.append(capacity * num_streams * layout.row_bytes)
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // _PAGE) * _PAGE)
        return offsets

    @classmethod
    def nbytes(cls, layout: RowLayout, capacity: int, num_streams: int, finals: int) -> int:
        """Returns the size of the segment."""
        return cls._offsets(layout, capacity, num_streams, finals)[-1]
