# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Drains rings into a replay, when asked or from a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from torchrl_ext.collectors._credit import UNBOUNDED
from torchrl_ext.collectors._delivery import Delivery
from torchrl_ext.collectors._ring_worker import RingWorker
from torchrl_ext.data import SlotReplayBuffer

__all__ = ["DrainThread", "ReplayDrain"]

#: Seconds until the thread looks again where nothing came.
_PAUSE = 1e-3


class ReplayDrain:
    """Copies what workers published into a replay, one copy per span; never waits for them.

    Roles      One thread at a time, by the workers' lock.
    Ordering   A stream that began anew is cut before its first row is written. A span is committed behind its copy,
               and, whatever the hook does, exactly once.
    Death      See :class:`Delivery`. What raises before a span was written leaves it to be read again.

    Args:
        replay (SlotReplayBuffer): is filled.
        delivery (Delivery): reads and counts the rows.
    """

    def __init__(self, replay: SlotReplayBuffer, delivery: Delivery) -> None:
        self._replay, self._workers, self._delivery = replay, delivery.workers, delivery

    def drain(self, max_rows: int | None, hook: Callable[[Any], None] | None) -> int:
        """Writes at most so many rows, but at least one step of a worker, where there are any; returns how many."""
        left = UNBOUNDED if max_rows is None else max_rows
        rows = 0
        with self._workers.lock:
            for worker in self._workers.in_turn():
                if not rows or left - rows >= worker.num_streams:
                    steps = max(1, (left - rows) // worker.num_streams)
                    rows += self.drain_worker(worker, steps, hook) * worker.num_streams
            self._delivery.look_around()
        return rows

    def drain_worker(self, worker: RingWorker, steps: int, hook: Callable[[Any], None] | None) -> int:
        """Writes up to so many steps of a worker and shows each span to the hook; returns the steps."""
        replay, delivery, taken = self._replay, self._delivery, 0
        while taken < steps and (span := delivery.read(worker, steps - taken, tail=False)) is not None:
            try:
                if span.begins:
                    replay.end_streams(worker.columns)
                replay.extend_batch(span.run, streams=worker.columns)
            except BaseException:
                span.release()  # nothing was written
                raise
            try:
                if hook is not None:
                    hook(span.view())
            finally:
                taken += delivery.commit(worker, span)  # the rows are written, whatever the hook does
        return taken


class DrainThread:
    """Drains over and over in a thread of this process, for notebooks.

    Roles      The learner's thread starts and ends it, and learns of its error.
    Death      An error ends the thread and is kept until :meth:`raise_error`; then it may be started again.
    Lifetime   From :meth:`start` to :meth:`stop`, or to an error; a daemon, which does not outlive the process.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._ending = False

    def start(self, drain: Callable[[], int]) -> None:
        """Calls ``drain``, which returns rows, from now on; does nothing while that is so already."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(drain,), name="ring-drain", daemon=True)
            self._thread.start()

    def stop(self, timeout: float) -> None:
        """Ends the thread and waits for it, unless it is the one that calls."""
        self._ending, thread = True, self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def raise_error(self) -> None:
        """Raises, once, what ended the thread."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _run(self, drain: Callable[[], int]) -> None:
        while not self._ending:
            try:
                rows = drain()
            except BaseException as error:
                if not self._ending:
                    self.error, self._thread = error, None
                return
            if not rows:
                time.sleep(_PAUSE)
