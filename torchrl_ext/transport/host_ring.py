# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""A ring in shared host memory that has no name."""

from __future__ import annotations

from typing import Any

from torchrl_ext.data import RowLayout
from torchrl_ext.data.layout import FOLLOWED
from torchrl_ext.transport.cursors import Cursor
from torchrl_ext.transport.parts import RingParts, RingShape
from torchrl_ext.transport.segment import Segment

__all__ = ["HostRing"]


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
        >>> record = TensorDict({"observation": torch.zeros(2), "next": {"observation": torch.zeros(2)}}, [])
        >>> ring = HostRing(RowLayout.from_tensordict(record), capacity=4, num_streams=3)
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
        RingShape.check("HostRing", layout, capacity, num_streams, finals)
        shape = RingShape(layout, capacity, num_streams, finals)
        self._open(Segment(shape.control_bytes + shape.data_bytes, "HostRing"), shape)
        self.parts.cursors()[Cursor.LIMIT] = 2**62
        self.parts.final.fill_(FOLLOWED)

    def _open(self, segment: Segment, shape: RingShape) -> None:
        self.segment, self.shape = segment, shape
        self.layout, self.capacity, self.num_streams = shape.layout, shape.capacity, shape.num_streams
        self.parts = RingParts(shape, segment, segment.bytes[shape.control_bytes :])

    @staticmethod
    def nbytes_for(layout: RowLayout, capacity: int, num_streams: int, *, final_capacity: int | None = None) -> int:
        """Returns the size of a ring before anything is allocated."""
        finals = 4 * num_streams if final_capacity is None else final_capacity
        shape = RingShape(layout, capacity, num_streams, finals)
        return shape.control_bytes + shape.data_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.segment, self.shape)


def _attach(segment: Segment, shape: RingShape) -> HostRing:
    ring = HostRing.__new__(HostRing)
    ring._open(segment, shape)
    return ring
