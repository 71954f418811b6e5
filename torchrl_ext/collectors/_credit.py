# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""How far each worker of a collector may go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torchrl_ext.collectors._ring_worker import RingWorker
from torchrl_ext.collectors._worker_set import WorkerSet

__all__ = ["UNBOUNDED", "Credit"]

#: Steps, or rows, without an end.
UNBOUNDED = 2**61


class Credit:
    """The steps that each worker may deliver in all: as many as the strictest of four limits allows.

    Roles      Whoever calls the collector, in any thread: the set's lock is held by each method.
    State      The limits: all frames, ``hold_at``, what a batch asked for (where nobody runs ahead), and a pause.
               Nothing is granted before :meth:`begin` or :meth:`ask`.
    Ordering   A worker asks for credit before each step, so what it published when it came to rest is all there is.
               Credit counts delivered steps: those that were dropped are granted again.
    Full       A lower limit takes nothing back that was pushed.

    Args:
        workers (WorkerSet): whose credit.

    Keyword Args:
        total_steps (int): of each worker in all, :data:`UNBOUNDED` for no end.
        run_ahead (bool): whether workers go on when nothing was asked for.
    """

    def __init__(self, workers: WorkerSet, *, total_steps: int, run_ahead: bool) -> None:
        self._workers, self._total_steps, self._run_ahead = workers, total_steps, run_ahead
        self._started, self._pauses = False, 0
        self._limit_frames: int | None = None
        self._asked: Mapping[int, int] = {}

    def begin(self) -> None:
        """Lets workers step from now on."""
        if self._started:
            return
        with self._workers.lock:
            self._started = True
            self._grant()

    def ask(self, steps: Mapping[int, int]) -> None:
        """Asks for steps: how far workers, by their index, may go without running ahead; the others stay."""
        with self._workers.lock:
            self._asked, self._started = steps, True
            self._grant()

    def forget_asked(self) -> None:
        """Takes back what was asked for; workers notice when credit is next granted."""
        self._asked = {}

    def hold_at(self, frames: int | None) -> None:
        """Sets how many rows may be collected in all, rounded down to a step; None lifts the limit."""
        with self._workers.lock:
            self._limit_frames = frames
            if self._started:
                self._grant()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Has every worker rest between two steps meanwhile; several pauses may overlap."""
        workers = self._workers
        with workers.lock:
            self._pauses += 1
        try:
            with workers.lock:
                self._grant()
                for worker in workers:
                    workers.wait_until_quiet(worker)
            yield
        finally:
            with workers.lock:
                self._pauses -= 1
                if self._started:
                    self._grant()

    def steps_left(self, worker: RingWorker) -> int:
        """Returns the steps that a worker has still to deliver."""
        return max(self._total_steps - worker.steps, 0)

    def _grant(self) -> None:
        steps = self._total_steps
        if self._limit_frames is not None:
            steps = min(steps, self._limit_frames // self._workers.num_streams)
        for worker in self._workers:
            own = steps
            if self._pauses:
                own = worker.steps
            elif not self._run_ahead:
                own = min(steps, self._asked.get(worker.options.index, worker.steps))
            worker.grant(own)
