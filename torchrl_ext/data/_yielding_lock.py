# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""A lock for work that is done in chunks beside others who want to get in."""

from __future__ import annotations

import os
import threading
from collections import deque

_yield_core = getattr(os, "sched_yield", lambda: None)


class YieldingLock:
    """A re-entrant lock that tells who waits, so that long work can let them in between its chunks.

    Releasing a plain lock and taking it again at once starves whoever waits: the waiter wakes up too late. Here the
    one that works in chunks calls :meth:`let_others` between them.

    Roles      Everybody enters it with ``with``; whoever holds it in chunks also calls :meth:`let_others`.
    Ordering   Those who wait when :meth:`let_others` is called have had the lock when it returns.
    """

    #: Seconds after which those who wait are left behind; they were killed or debugged, and work must go on.
    PATIENCE = 1.0

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> YieldingLock:
        if not self._lock.acquire(blocking=False):
            entered = threading.Event()
            self._waiting.append(entered)
            try:
                self._lock.acquire()
            finally:
                self._waiting.remove(entered)
                entered.set()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def let_others(self) -> None:
        """Waits, without the lock, until those who wait for it now have entered."""
        # One that has just woken up on this core would wait for the end of our time slice, several milliseconds.
        _yield_core()
        for entered in tuple(self._waiting):
            entered.wait(self.PATIENCE)
