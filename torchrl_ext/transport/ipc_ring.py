# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""A ring whose rows lie in the memory of one CUDA device, mapped by both processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from torchrl_ext.data import RowLayout
from torchrl_ext.data.layout import FOLLOWED
from torchrl_ext.data.sizing import free_bytes, gigabytes
from torchrl_ext.transport.cursors import Cursor
from torchrl_ext.transport.device_memory import DeviceMemory, MappedMemory
from torchrl_ext.transport.parts import RingParts, RingShape
from torchrl_ext.transport.segment import Segment

__all__ = ["CudaIpcRing", "RingExport"]


@dataclass(frozen=True)
class RingExport:
    """What a worker needs to map a :class:`CudaIpcRing`: send it once to each process that will open it, and call
    :meth:`CudaIpcRing.forget` when that process has ended."""

    uuid: str
    memory: tuple[Any, ...]
    events: tuple[bytes, ...]


class CudaIpcRing:
    """The memory of a ring on one CUDA device, owned by the consumer's process.

    See :mod:`torchrl_ext.transport.ring` for the contract. Counters and the lists of ended streams lie in host memory,
    which travels as an argument to the spawned process, as a :class:`HostRing` does; rows, final observations and
    tails lie on the device and are mapped there by :meth:`open`. A slot is published once it is issued and the
    consumer's query of its event says that the copy is done. Neither side's streams ever wait for the other process.

    Args:
        layout (RowLayout): of a row, with derived successors.
        capacity (int): slots, at least 2.
        num_streams (int): rows of a slot.

    Keyword Args:
        device (torch.device): of the rows.
        final_capacity (int, optional): final observations that the arena holds, at least ``num_streams``. Defaults to
            four times as many.
        tails (bool, optional): whether slots have room for a tail. Defaults to False: a newest row is then sampleable
            once the next row is written.

    Raises:
        ValueError: on impossible sizes, or another device.
        MemoryError: when that much memory is not free, stating both; nothing is left allocated.
    """

    def __init__(
        self,
        layout: RowLayout,
        capacity: int,
        num_streams: int,
        *,
        device: torch.device | str,
        final_capacity: int | None = None,
        tails: bool = False,
    ) -> None:
        finals = 4 * num_streams if final_capacity is None else final_capacity
        RingShape.check("CudaIpcRing", layout, capacity, num_streams, finals)
        shape = RingShape(layout, capacity, num_streams, finals, capacity if tails else 0)
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"CudaIpcRing: device must be a CUDA device, got {device}. Nothing was allocated.")
        free = free_bytes("cuda", device=device)
        if shape.data_bytes > free:
            raise MemoryError(
                f"CudaIpcRing: {gigabytes(shape.data_bytes)} are needed on {device}, {gigabytes(free)} are free. "
                "Nothing was allocated."
            )
        self._set(shape, Segment(shape.control_bytes, "CudaIpcRing"))
        self._memory: DeviceMemory | MappedMemory = DeviceMemory(shape.data_bytes, device)
        self._bind(self._memory.bytes)
        self.parts.cursors()[Cursor.LIMIT] = 2**62
        self.parts.final.fill_(FOLLOWED)
        self.events = [torch.cuda.Event(interprocess=True) for _ in range(capacity)]
        for event in self.events:
            event.record(torch.cuda.current_stream(device))  # a handle exists once an event was recorded
        torch.cuda.current_stream(device).synchronize()

    def _set(self, shape: RingShape, segment: Segment) -> None:
        self.segment, self.shape = segment, shape
        self.layout, self.capacity, self.num_streams = shape.layout, shape.capacity, shape.num_streams

    def _bind(self, data: torch.Tensor) -> None:
        self.device = data.device
        self.parts = RingParts(self.shape, self.segment, data)

    def export(self) -> RingExport:
        """Returns what one other process needs to :meth:`open` the ring, once; for the owner."""
        memory = cast(DeviceMemory, self._memory)
        return RingExport(memory.uuid, memory.export(), tuple(event.ipc_handle() for event in self.events))

    def forget(self, exported: RingExport) -> None:
        """Says that the process that had this export has ended; without that its memory would never be freed."""
        cast(DeviceMemory, self._memory).forget(exported.memory)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.segment, self.shape)

    def open(self, exported: RingExport) -> None:
        """Maps the device's part, in the process that was given the ring as an argument.

        Raises:
            RuntimeError: when no visible device has the ring's UUID, or the handle cannot be opened there.
        """
        self._memory = MappedMemory(exported.uuid, exported.memory)
        self._bind(self._memory.bytes)
        self.events = [torch.cuda.Event.from_ipc_handle(self.device, handle) for handle in exported.events]


def _attach(segment: Segment, shape: RingShape) -> CudaIpcRing:
    ring = CudaIpcRing.__new__(CudaIpcRing)
    ring._set(shape, segment)
    return ring
