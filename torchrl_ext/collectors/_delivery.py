# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Spans of a collector's workers on their way to the learner: read, counted, given back."""

from __future__ import annotations

from torchrl_ext.collectors._credit import Credit
from torchrl_ext.collectors._ring_worker import RingWorker
from torchrl_ext.collectors._worker_set import WorkerSet
from torchrl_ext.transport import RingPeerDied, Span

__all__ = ["Delivery"]


class Delivery:
    """Reads spans, and counts what was delivered when they are given back.

    Roles      Whoever holds the workers' lock.
    State      The rows that were delivered, ``frames``.
    Ordering   What goes with rows, episodes and versions, is told when they are committed; slots are given back last.
    Death      A dead worker is looked after once everything that it published was read.

    Args:
        workers (WorkerSet): who push.
        credit (Credit): which of them are done.
    """

    def __init__(self, workers: WorkerSet, credit: Credit) -> None:
        self.workers, self.credit, self._collected = workers, credit, workers.collected
        #: Rows delivered in all, those before a resume included.
        self.frames = 0

    def read(self, worker: RingWorker, steps: int, *, tail: bool) -> Span | None:
        """Returns at most so many steps of a worker, None when there are none or it was started anew.

        Raises:
            RuntimeError, RingPeerDied: for a dead worker, see :meth:`WorkerSet.look_after`.
        """
        try:
            return worker.consumer.read_span(steps, tail=tail)
        except RingPeerDied:
            self.workers.look_after(worker)
            return None

    def commit(self, worker: RingWorker, span: Span) -> int:
        """Counts a span's rows, with their episodes and versions, and gives its slots back; returns its steps."""
        first_final, steps, scheme = worker.consumer.finals, span.num_steps, self.workers.scheme
        rows = span.run.final_rows
        count = 0 if rows is None else len(rows)
        if count:
            streams = rows.numpy() % worker.num_streams + worker.columns.start  # type: ignore[union-attr]
            self._collected.add_episodes(worker.options.index, streams, worker.board.read(first_final, count))
        newest = 0 if scheme is None else scheme.versions[worker.options.index]
        self._collected.add_versions(span.versions, newest, worker.num_streams)
        span.commit()
        self.frames += steps * worker.num_streams
        return steps

    def look_around(self) -> None:
        """Shows weights and, every now and then, looks after workers that have nothing to read but should; never waits.

        Raises:
            RuntimeError, RingPeerDied, TimeoutError: see :meth:`WorkerSet.look_after`.
        """
        workers = self.workers
        workers.poll_weights()
        if workers.is_look_due():
            for worker in workers:
                worker.consumer.poll()
                if not worker.consumer.fill and self.credit.steps_left(worker):
                    workers.look_after(worker)
