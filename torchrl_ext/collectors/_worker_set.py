# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The workers of a collector as a set: started, looked after, started anew and ended together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from threading import RLock

from torchrl._utils import logger as torchrl_logger

from torchrl_ext.collectors._collected import Collected
from torchrl_ext.collectors._ring_worker import Refused, RingWorker
from torchrl_ext.collectors._worker_blueprint import WorkerBlueprint
from torchrl_ext.collectors.transport_choice import TransportChoice

__all__ = ["WorkerSet"]

#: Seconds between two looks at the workers' lives where nothing waits.
_LOOK_EVERY = 0.5


class WorkerSet:
    """The :class:`RingWorker` objects of one collector.

    Roles      The learner's thread, or the one that drains in the background: whoever reads spans, sets credit, polls
               weights or starts a worker holds ``lock``, which is the collector's only one.
    State      The workers; the transport they ended up with; the seeds of the next life; the restarts that are left;
               what is known about delivered rows.
    Ordering   A worker is started anew only when everything that it published was read.
    Death      :meth:`look_after` raises, or starts the worker anew where restarts are left.
    Lifetime   From :meth:`make` to :meth:`end`, which lets go of rings and boards at once.

    Args:
        blueprint (WorkerBlueprint): of the workers.
        transport (TransportChoice): the one to begin with.

    Keyword Args:
        boot_timeout (float): seconds until a worker must be ready.
        stall_timeout (float): seconds that a worker may be silent.
        max_restarts (int): dead workers that are started anew.
    """

    def __init__(
        self,
        blueprint: WorkerBlueprint,
        transport: TransportChoice,
        *,
        boot_timeout: float,
        stall_timeout: float,
        max_restarts: int,
    ) -> None:
        self.lock, self.transport, self.scheme = RLock(), transport, blueprint.scheme
        self.num_streams = blueprint.streams.num_streams
        #: What is known about delivered rows.
        self.collected = Collected(len(blueprint.streams.row.metric_keys), self.lock)
        self.boot_timeout, self.stall_timeout = boot_timeout, stall_timeout
        #: Of the streams when they begin anew: the base seed, how often that happened with it, how it is passed on.
        self.seed, self.epoch, self.static_seed = blueprint.options.seed, 0, False
        self._blueprint: WorkerBlueprint | None = blueprint
        self._restarts_left = max_restarts
        self._members: list[RingWorker] = []
        self._turn, self._looked = -1, time.monotonic()

    def __iter__(self) -> Iterator[RingWorker]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: int) -> RingWorker:
        return self._members[index]

    def in_turn(self) -> list[RingWorker]:
        """Returns the workers, another one first each time, so that none is forgotten where not all are served."""
        self._turn = (self._turn + 1) % len(self._members)
        return self._members[self._turn :] + self._members[: self._turn]

    # Start

    def make(self) -> None:
        """Makes rings and workers; nothing is started."""
        assert self._blueprint is not None
        self._members = self._blueprint.make(self.transport.kind)

    def boot(self) -> None:
        """Starts the workers and waits until all are ready; in host memory where device memory was not insisted on.

        Raises:
            RuntimeError, RingPeerDied, TimeoutError: when one does not become ready.
        """
        try:
            self._start()
        except Refused as refusal:
            if self.transport.reason == "it was asked for":
                raise RuntimeError(f"RingCollector: transport 'ipc' cannot be had: {refusal}.") from refusal
            self._stop(5.0)
            self.transport = TransportChoice("host", f"a worker could not map device memory ({refusal})")
            self.make()
            self._start()

    def _start(self) -> None:
        self.collected.boards = [worker.board for worker in self._members]
        deadline = time.monotonic() + self.boot_timeout
        for worker in self._members:
            worker.start()
        if self.scheme is not None and not self.scheme.synchronized_on_sender:
            self.scheme.connect()  # only now: with transport="ipc" it waits for them
        for worker in self._members:
            worker.wait_until_ready(deadline)

    # Life

    def poll_weights(self) -> bool:
        """Shows weights to the workers; returns whether everything that was sent can be seen."""
        return self.scheme is None or self.scheme.poll()

    def is_look_due(self) -> bool:
        """Whether the workers' lives were not looked at for a while; the look counts as taken."""
        now = time.monotonic()
        due = now - self._looked > _LOOK_EVERY
        if due:
            self._looked = now
        return due

    def look_after(self, worker: RingWorker) -> None:
        """Starts a dead worker anew, unless something that it published is to be read first.

        Raises:
            RuntimeError, RingPeerDied: for a dead worker where no restart is left.
            TimeoutError: for a silent one.
        """
        try:
            worker.check(self.stall_timeout)
        except RuntimeError:  # a dead worker; a silent one is a TimeoutError
            if worker.consumer.fill:
                return
            if self._restarts_left < 1:
                raise
            self._restart(worker)

    def _restart(self, worker: RingWorker) -> None:
        torchrl_logger.warning(f"RingCollector: {worker.process.failure()}; {worker.name} is started anew.")
        self._restarts_left -= 1
        self.epoch += 1  # seeds that no stream had
        deadline = time.monotonic() + self.boot_timeout
        # Weights that come through the memory of a device are handed over while the worker waits for them.
        worker.restart(deadline, seed=self.seed, epoch=self.epoch, meanwhile=self.poll_weights)

    def wait_until_quiet(self, worker: RingWorker) -> None:
        """Waits until a worker without credit rests; a dead one rests where a restart is left for it."""
        try:
            worker.wait_until_quiet(self.stall_timeout)
        except RuntimeError:
            if self._restarts_left < 1:
                raise

    # End

    def end(self, timeout: float) -> None:
        """Ends every worker, by force after so many seconds, then the weights' channels; frees the memory now, not when
        garbage is collected."""
        self._stop(timeout)
        if self.scheme is not None:
            self.scheme.shutdown()
        self.collected.let_go()
        self._members, self.scheme, self._blueprint = [], None, None

    def _stop(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for worker in self._members:
            worker.ask_to_end()
        for worker in self._members:
            worker.stop(max(deadline - time.monotonic(), 0.0))
