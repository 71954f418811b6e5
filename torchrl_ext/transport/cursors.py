# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Counters that two processes share without a lock."""

from __future__ import annotations

import threading
from typing import Final

__all__ = ["CURSOR_BYTES", "Cursor", "Cursors"]

#: A counter has a cache line of its own, so that its writer does not slow down the reader of another one.
_LINE = 64


class Cursor:
    """Which counter; each has one writer. Plain numbers, because a member of an enum takes longer than its counter."""

    ISSUED: Final = 0
    """Producer: slots written."""
    READ: Final = 1
    """Consumer: slots given back."""
    LIMIT: Final = 2
    """Consumer: slots that may be written at all, the credit."""
    FINALS_ISSUED: Final = 3
    """Producer: final observations written."""
    FINALS_READ: Final = 4
    """Consumer: final observations given back."""
    TAIL_STARTED: Final = 5
    """Producer: the step whose tail is being written, plus one."""
    TAIL_FINISHED: Final = 6
    """Producer: the step whose tail is complete, plus one."""
    PRODUCER_CLOSED: Final = 7
    CONSUMER_CLOSED: Final = 8


CURSOR_BYTES = _LINE * (Cursor.CONSUMER_CLOSED + 1)


class Cursors:
    """The shared counters, and the fence that orders them against the memory that they speak of.

    Ordering   An aligned 8-byte load or store is one machine access on x86-64 and arm64, so a counter is never torn.
               What is written before :meth:`fence` is seen by whoever reads a counter stored after it and fences
               before looking. On x86-64 plain stores keep their order already; on arm64 the fence makes them.

    Use one object per end and thread.

    Args:
        memory (memoryview): at least ``CURSOR_BYTES`` bytes, shared, aligned to 8.
    """

    def __init__(self, memory: memoryview) -> None:
        self._counters = memory[:CURSOR_BYTES].cast("q")[:: _LINE // 8]
        self._gate = threading.Lock()
        self._gate.acquire()

    def fence(self) -> None:
        """Orders all memory accesses before it against all after it.

        Releasing and taking a lock is a full barrier on both architectures; nobody else knows this one, so it never
        waits, and no lock is shared between processes, where it would be lost with a killed owner.
        """
        try:
            self._gate.release()
        finally:
            # Also after an interrupt in between, or this end could not even close any more. Without waiting: where the
            # lock was not released, it is held.
            self._gate.acquire(False)

    def __getitem__(self, cursor: int) -> int:
        return self._counters[cursor]

    def __setitem__(self, cursor: int, value: int) -> None:
        self._counters[cursor] = value

    def release(self) -> None:
        """Lets go of the memory, so that its mapping can be closed."""
        self._counters.release()
