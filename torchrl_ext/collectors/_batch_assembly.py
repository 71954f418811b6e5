# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Puts spans of several workers together to batches, as TorchRL's collectors give them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from torchrl_ext.collectors._delivery import Delivery
from torchrl_ext.collectors._replay_drain import ReplayDrain
from torchrl_ext.collectors._ring_worker import RingWorker
from torchrl_ext.collectors._run_batch import RunBatch
from torchrl_ext.data import RowLayout

__all__ = ["BatchAssembly"]

#: Seconds between two looks at empty rings: the first, and the longest in it.
_PAUSE, _LONGEST = 1e-4, 10


class BatchAssembly:
    """Waits for the rows of a batch and copies them together.

    Roles      The thread that iterates. The workers' lock is held while spans are read, not while rows are waited for.
    State      Runs of single workers that are not complete yet; the number of the newest batch.
    Ordering   A batch of all streams has the same steps of each; a run of one worker has its steps in order.
    Empty      Waits, looking after the workers' lives.
    Death      A worker that dies without telling the successors of its last row is told as dead.

    Args:
        delivery (Delivery): reads and counts spans.
        layout (RowLayout): of a row.

    Keyword Args:
        num_steps (int): of a batch, where so many are left.
        device (torch.device, optional): of a batch. Defaults to the host.
    """

    def __init__(self, delivery: Delivery, layout: RowLayout, *, num_steps: int, device: torch.device | None) -> None:
        self._delivery, self._workers, self._credit = delivery, delivery.workers, delivery.credit
        self._layout, self._num_steps, self._device = layout, num_steps, device or torch.device("cpu")
        self._partial: dict[int, tuple[RunBatch, int, int]] = {}  # by worker: the run, its steps filled and in all
        #: The number of the newest batch, -1 before the first.
        self.count = -1

    def of_all(self) -> TensorDict:
        """Returns ``[K, N]`` of all streams."""
        wanted = self._ask()
        steps = max(wanted.values())
        batch = RunBatch(self._layout, steps, self._workers.num_streams, self._device)
        self._take(wanted, lambda worker, left: self._fill(batch, worker, steps - left, left, columns=worker.columns))
        return batch.tensordict()

    def into_replay(self, drain: ReplayDrain, hook: Callable[[Any], None] | None) -> None:
        """Has the steps of a batch written into a replay."""
        self._take(self._ask(), lambda worker, left: drain.drain_worker(worker, left, hook))

    def of_any(self) -> TensorDict:
        """Returns ``[K, n]``, the first run of one worker that is complete; the others go on filling theirs."""
        self._credit.ask(
            {
                worker.options.index: worker.steps - self.partial_steps(worker) + self._num_steps
                for worker in self._workers
            }
        )
        pause = 1
        while True:
            rows = 0
            with self._workers.lock:
                for worker in self._workers.in_turn():
                    index, run = worker.options.index, self._partial.get(worker.options.index)
                    if run is None:
                        steps = min(self._num_steps, self._credit.steps_left(worker))
                        if not steps:
                            continue
                        run = RunBatch(self._layout, steps, worker.num_streams, self._device), 0, steps
                    batch, filled, steps = run
                    taken = self._fill(batch, worker, filled, steps - filled, columns=slice(0, worker.num_streams))
                    rows += taken
                    self._partial[index] = (batch, filled + taken, steps)
                    if filled + taken == steps:
                        del self._partial[index]
                        self._delivery.look_around()
                        return batch.tensordict()
                self._delivery.look_around()
            pause = 1 if rows else min(2 * pause, _LONGEST)
            if not rows:
                time.sleep(pause * _PAUSE)

    def partial_steps(self, worker: RingWorker) -> int:
        """Returns the steps of a worker that were read for a run which is not complete."""
        _, filled, _ = self._partial.get(worker.options.index, (None, 0, 0))
        return filled

    def drop_partial(self, worker: RingWorker) -> int:
        """Drops the run of a worker that is not complete; returns its steps."""
        filled = self.partial_steps(worker)
        self._partial.pop(worker.options.index, None)
        return filled

    def _ask(self) -> dict[int, int]:
        """Asks for the steps of a batch and returns them by worker."""
        found = {
            worker.options.index: min(self._num_steps, self._credit.steps_left(worker)) for worker in self._workers
        }
        # After uneven drains some blocks have less to go, or nothing; batches are never uneven.
        wanted = {index: steps for index, steps in found.items() if steps}
        self._credit.ask({index: self._workers[index].steps + steps for index, steps in wanted.items()})
        return wanted

    def _take(self, wanted: dict[int, int], take: Callable[[RingWorker, int], int]) -> None:
        """Calls ``take`` with workers and the steps that they lack, which returns steps, until none is lacking."""
        pause = 1
        while wanted:
            rows = 0
            with self._workers.lock:
                for index in list(wanted):
                    taken = take(self._workers[index], wanted[index])
                    rows += taken
                    wanted[index] -= taken
                    if not wanted[index]:
                        del wanted[index]
                self._delivery.look_around()
            pause = 1 if rows else min(2 * pause, _LONGEST)
            if wanted and not rows:
                time.sleep(pause * _PAUSE)

    def _fill(self, batch: RunBatch, worker: RingWorker, first: int, steps: int, *, columns: slice) -> int:
        """Copies up to so many steps of a worker into a batch; returns how many."""
        span = self._delivery.read(worker, steps, tail=True)
        if span is None:
            return 0
        deadline = time.monotonic() + self._workers.stall_timeout
        while span.run.tail is None:
            # The worker overwrote the tail while we read it: its next step, which shows the same, is about to come.
            alive = worker.is_alive()
            span.run.tail = worker.consumer.tail_of(span.first_step + span.num_steps - 1)
            if span.run.tail is None and not alive:
                worker.check(self._workers.stall_timeout)  # raises
            if time.monotonic() > deadline:
                raise TimeoutError(f"RingCollector: {worker.name} must tell the successors of its last step.")
        batch.add(span.run, first, columns)
        return self._delivery.commit(worker, span)
