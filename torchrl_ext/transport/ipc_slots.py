# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The newest value of a publisher, in device memory that another process maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torchrl_ext.transport.cursors import CURSOR_BYTES, Cursor, Cursors
from torchrl_ext.transport.device_memory import DeviceMemory, MappedMemory
from torchrl_ext.transport.segment import Segment

__all__ = ["CudaSeqlockSlots", "CudaSlotReader", "CudaSlotsHandle"]

_STARTED, _FINISHED = Cursor.TAIL_STARTED, Cursor.TAIL_FINISHED


@dataclass(frozen=True)
class CudaSlotsHandle:
    """What another process needs to read :class:`CudaSeqlockSlots`; see :meth:`CudaSeqlockSlots.export`.

    Attributes:
        nbytes (int): of a value.
        uuid (str): of the GPU.
        storage (tuple): torch's CUDA IPC handle.
        counters (Segment, optional): of the slots; None where the reader has it already.
    """

    nbytes: int
    uuid: str
    storage: tuple[Any, ...]
    counters: Segment | None


class CudaSeqlockSlots:
    """The contract of :class:`SeqlockSlots`, with the slots in the publisher's device memory.

    Roles      One publisher, which owns the memory; readers are :class:`CudaSlotReader` in other processes.
    State      ``started`` and ``finished`` in host memory, as there; version ``v`` lies in slot ``v % 2``.
    Publish    ``started`` moves before the copy is enqueued on the current stream; ``finished`` moves in :meth:`poll`
               once an event behind the copy is done. So nothing is visible before it is true, the host never waits, and
               no reader's stream waits for an event of this process.
    Full       ``publish`` returns None and changes nothing while the last version's copy is under way.
    Empty      As there.
    Death      As there.
    Lifetime   The memory must outlive its readers. It is freed once :meth:`forget` was called for every export.

    One thread at a time, outside of CUDA graph captures.

    Args:
        nbytes (int): of a value, at least 1.

    Keyword Args:
        device (torch.device): a CUDA device.
        counters (Segment, optional): a zeroed one of ``CURSOR_BYTES`` at least, for ``started`` and ``finished``.
            Defaults to one of its own.

    Raises:
        ValueError: for less, or for another device. Nothing was allocated.
    """

    def __init__(self, nbytes: int, *, device: torch.device, counters: Segment | None = None) -> None:
        if nbytes < 1 or device.type != "cuda":
            raise ValueError(
                f"CudaSeqlockSlots: nbytes must be at least 1 and device a CUDA device, got {nbytes} and {device}. "
                "Nothing was allocated."
            )
        self.nbytes = nbytes
        self._counters = Segment(CURSOR_BYTES, "CudaSeqlockSlots") if counters is None else counters
        self._cursors = Cursors(memoryview(self._counters.memory))
        stride = -(-nbytes // 512) * 512
        self._memory = DeviceMemory(2 * stride, device)
        self.device = self._memory.bytes.device
        self._slots = _slots(self._memory.bytes, nbytes)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(self.device))  # behind what zeroed the memory
        self._under_way = self._floor = 0

    @property
    def version(self) -> int:
        """The newest version that readers see, 0 before the first."""
        return self._cursors[_FINISHED]

    @property
    def busy(self) -> bool:
        """Whether a version is under way, as of the last :meth:`poll`."""
        return self._under_way != 0

    def continue_from(self, version: int) -> None:
        """Gives the next value a version above ``version`` at least."""
        self._floor = version

    def export(self) -> CudaSlotsHandle:
        """Returns a handle that exactly one other process opens exactly once, since torch counts users by it.

        Pass it as an argument to a process that is being spawned, as one passes a :class:`Segment`.
        """
        return CudaSlotsHandle(self.nbytes, self._memory.uuid, self._memory.export(), self._counters)

    def forget(self, handle: CudaSlotsHandle) -> None:
        """Counts one user less, whose process has ended; without it the memory is never freed."""
        self._memory.forget(handle.storage)

    def publish(self, value: torch.Tensor) -> int | None:
        """Enqueues the copy of ``value`` on the current stream; never waits.

        Args:
            value (torch.Tensor): uint8 ``[nbytes]`` on the device; may be overwritten later in stream order.

        Returns:
            int: its version, visible once a later :meth:`poll` finds the copy complete; None while the last one is
            under way, when nothing was done.
        """
        if not self.poll():
            return None
        cursors = self._cursors
        version = max(cursors[_FINISHED], self._floor) + 1
        cursors[_STARTED] = version
        cursors.fence()  # readers see that the slot is begun before any byte of it changes
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self._copied)
        self._slots[version % 2].copy_(value)
        self._copied.record(stream)
        self._under_way = version
        return version

    def poll(self) -> bool:
        """Shows the version under way if its copy is complete; returns whether none is under way any more."""
        if self._under_way:
            if not self._copied.query():
                return False
            self._show()
        return True

    def wait(self) -> int:
        """Blocks until the version under way is complete, shows it and returns the newest version."""
        if self._under_way:
            self._copied.synchronize()
            self._show()
        return self.version

    def newest(self) -> torch.Tensor | None:
        """Returns the slot of the newest visible version: it is overwritten by the next but one publication."""
        version = self.version
        return self._slots[version % 2] if version else None

    def _show(self) -> None:
        self._cursors.fence()
        self._cursors[_FINISHED] = self._under_way
        self._under_way = 0


class CudaSlotReader:
    """The reading end of :class:`CudaSeqlockSlots`, in another process; make it with ``open``."""

    def __init__(self, memory: torch.Tensor, nbytes: int, counters: Segment) -> None:
        self.nbytes, self.device = nbytes, memory.device
        self._slots = _slots(memory, nbytes)
        self._counters = counters
        self._cursors = Cursors(memoryview(counters.memory))
        self._copied = torch.cuda.Event()
        self._seen = 0

    @classmethod
    def open(cls, handle: CudaSlotsHandle, *, counters: Segment | None = None) -> CudaSlotReader:
        """Maps the slots. The handle is spent: another process, or this one again, needs another export.

        Args:
            handle (CudaSlotsHandle): from :meth:`CudaSeqlockSlots.export` in another process.

        Keyword Args:
            counters (Segment, optional): where the handle has none.

        Raises:
            RuntimeError: when this process does not see the GPU, or the memory cannot be mapped.
            ValueError: without counters.
        """
        counters = handle.counters if counters is None else counters
        if counters is None:
            raise ValueError("CudaSlotReader: counters must come with the handle or beside it, got none.")
        return cls(MappedMemory(handle.uuid, handle.storage).bytes, handle.nbytes, counters)

    @property
    def version(self) -> int:
        """The newest complete version, 0 before the first."""
        return self._cursors[_FINISHED]

    def rewind(self) -> None:
        """Forgets what was read: the next :meth:`read` returns the newest version again."""
        self._seen = 0

    def read(self, out: torch.Tensor, *, attempts: int = 8) -> int | None:
        """Copies the newest version into ``out`` when it is newer than the last one read.

        Waits for its own copy on the current stream, and so for what was enqueued there before.

        Args:
            out (torch.Tensor): uint8 ``[nbytes]`` on the device; after None its content is undefined.

        Keyword Args:
            attempts (int, optional): copies at most, where the publisher overtakes each. Defaults to 8.

        Returns:
            int: the version, or None when nothing is newer or every copy was overtaken.
        """
        cursors = self._cursors
        for _ in range(attempts):
            version = cursors[_FINISHED]
            if version == self._seen:
                return None
            cursors.fence()
            out.copy_(self._slots[version % 2])
            self._copied.record(torch.cuda.current_stream(self.device))
            self._copied.synchronize()  # the second look counts only once the copy is complete
            cursors.fence()
            if cursors[_STARTED] - version <= 1:
                self._seen = version
                return version
        return None


def _slots(memory: torch.Tensor, nbytes: int) -> list[torch.Tensor]:
    stride = memory.numel() // 2
    return [memory[:nbytes], memory[stride : stride + nbytes]]
