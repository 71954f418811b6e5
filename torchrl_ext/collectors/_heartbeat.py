# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Tells a stopped or stuck process from a busy one."""

from __future__ import annotations

import time
from typing import Any

from torchrl_ext.transport.segment import Segment

__all__ = ["Heartbeat"]


class Heartbeat:
    """A number that one process moves and another one watches.

    A process that was stopped, or waits for ever, is alive and silent. Beat in the loop that must go on, not in a
    thread beside it. Pass the object to the worker's process; each process counts its own silence.

    Args:
        memory (memoryview, optional): at least 8 bytes, shared and aligned to 8, zeroed; such an object cannot be
            passed on. Defaults to a segment of its own.

    Examples:
        >>> heartbeat = Heartbeat()
        >>> heartbeat.beat()
        >>> heartbeat.silent_for()
        0.0
        >>> heartbeat.silent_for() < 1.0
        True
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        self._open(Segment(8, "Heartbeat") if memory is None else None, memory)

    def _open(self, segment: Segment | None, memory: memoryview | None) -> None:
        self._segment = segment
        whole = memoryview(segment.memory) if segment is not None else memory
        assert whole is not None
        self._count = whole[:8].cast("B").cast("q")
        self._seen, self._since = int(self._count[0]), time.monotonic()

    def beat(self) -> None:
        """Says that the process goes on; one process beats, from one thread."""
        self._count[0] += 1

    def silent_for(self) -> float:
        """Returns the seconds since a beat was last seen here, 0 when one is new; ask more often than you judge."""
        now, count = time.monotonic(), self._count[0]
        if count != self._seen:
            self._seen, self._since = count, now
        return now - self._since

    def reset(self) -> None:
        """Counts silence from now on, as for a process that has just been started."""
        self._seen, self._since = self._count[0], time.monotonic()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._segment is None:
            raise TypeError("Heartbeat: memory must be a segment of its own to be passed on, got a memoryview.")
        return _attach, (self._segment,)


def _attach(segment: Segment) -> Heartbeat:
    heartbeat = Heartbeat.__new__(Heartbeat)
    heartbeat._open(segment, None)
    return heartbeat
