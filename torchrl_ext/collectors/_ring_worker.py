# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""A collector's worker as the collector sees it: process, ring, credit, life."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchrl_ext.collectors._board import Board, Counter
from torchrl_ext.collectors._spawn import Payload
from torchrl_ext.collectors._worker import collect
from torchrl_ext.collectors._worker_options import WorkerOptions
from torchrl_ext.collectors._worker_process import WorkerProcess
from torchrl_ext.transport import CudaIpcConsumer, CudaIpcRing, HostConsumer, HostRing, RingExport, RingPeerDied
from torchrl_ext.transport.consumer import RingConsumer

__all__ = ["Refused", "RingWorker"]

#: Seconds between two calls of what is done while a worker starts.
_LOOK_EVERY = 0.05


class Refused(RuntimeError):  # noqa: N818  # no error where another transport will do
    """The worker could not map the ring."""


class RingWorker:
    """One worker: a block of streams, a ring, a process.

    Args:
        ring (HostRing or CudaIpcRing): made by the caller.
        board (Board): its companion.
        columns (slice): its streams among those of all workers.
        options (WorkerOptions): for the process.

    Keyword Args:
        target (mapping): the other arguments of :func:`collect`.
        device (torch.device, optional): where spans are copied to.
        process (mapping): keyword arguments of :class:`WorkerProcess`.
    """

    def __init__(
        self,
        ring: HostRing | CudaIpcRing,
        board: Board,
        columns: slice,
        options: WorkerOptions,
        *,
        target: Mapping[str, Any],
        device: torch.device | None,
        process: Mapping[str, Any],
    ) -> None:
        self.columns, self.board, self.options = columns, board, options
        self.name = f"collector-{options.index}"
        self._ring, self._target, self._settings = ring, dict(target), dict(process)
        self._process: WorkerProcess | None = None
        self._exported: RingExport | None = None
        if isinstance(ring, CudaIpcRing):
            self.consumer: RingConsumer = CudaIpcConsumer(ring, is_alive=self.is_alive)
        else:
            self.consumer = HostConsumer(ring, is_alive=self.is_alive, device=device)
        #: Slots that were read but never delivered, and steps of a run that is gone on with: the credit counts without
        #: the first and with the second.
        self.dropped = self.earlier = 0
        self._random_steps, self._payload = options.random_steps, self._pack()
        self.grant(0)

    @property
    def num_streams(self) -> int:
        """Streams of this worker."""
        return self.columns.stop - self.columns.start

    @property
    def steps(self) -> int:
        """Steps delivered in all, those before a resume included."""
        return self.consumer.read - self.dropped + self.earlier

    def _pack(self) -> Payload:
        arguments = {**self._target, "ring": self._ring, "board": self.board, "options": self.options}
        return Payload(collect, arguments, where="RingCollector")

    def start(self) -> None:
        """Starts the process; :meth:`wait_until_ready` is the other half."""
        self.board.heartbeat.reset()
        self._process = WorkerProcess(self._payload, name=self.name, **self._settings)
        if isinstance(self._ring, CudaIpcRing):
            self._exported = self._ring.export()
            self._process.send(self._exported)

    def wait_until_ready(self, deadline: float, meanwhile: Callable[[], Any] | None = None) -> None:
        """Waits until the worker has its environment and policy, calling ``meanwhile`` over and over.

        Raises:
            Refused: when it could not map the ring.
            RuntimeError, RingPeerDied, TimeoutError: see :meth:`WorkerProcess.recv`.
        """
        while meanwhile is not None and time.monotonic() < deadline and not self.process.poll(_LOOK_EVERY):
            meanwhile()
        left = max(deadline - time.monotonic(), 0.0)
        answer, reason = self.process.recv(left, what="that its environment and policy are ready")
        if answer == "refused":
            raise Refused(reason)
        self.board.heartbeat.reset()

    @property
    def process(self) -> WorkerProcess:
        """The running process."""
        if self._process is None:
            raise RuntimeError(f"RingCollector: worker {self.name!r} must have been started.")
        return self._process

    def is_alive(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.is_alive()

    def grant(self, steps: int) -> None:
        """Lets the worker go on until it delivered so many steps in all."""
        self._granted = steps
        self.consumer.grant(min(steps + self.dropped - self.earlier, 2**62))

    def check(self, stall_timeout: float) -> None:
        """Raises when the worker is dead, or alive and silent."""
        silent = self.board.heartbeat.silent_for()
        if silent > stall_timeout and self.is_alive():
            raise TimeoutError(
                f"RingCollector: {self.name} (pid {self.process.pid}) must make a step or wait for room within "
                f"stall_timeout={stall_timeout} s, it has been silent for {silent:.1f} s; {self.process.failure()}."
            )
        while not self.is_alive():
            self.process.recv(0.0)  # raises what is known, once there are no more messages

    def command(self, command: str, value: Any) -> None:
        """Has the worker do something between two steps; :meth:`wait_for` waits for it."""
        self.process.send((command, value))
        self.board.counters[Counter.COMMANDS] += 1

    def wait_for(self, command: str, timeout: float) -> None:
        """Waits until a command, the last one, is done."""
        done = ("done", self.board.counters[Counter.COMMANDS])
        while self.process.recv(timeout, what=f"that it has done {command!r}") != done:
            pass  # the late answer to an earlier one, for which nobody waited any more

    def wait_until_quiet(self, timeout: float) -> None:
        """Waits until the worker waits for room, as it does without credit."""
        deadline, counters = time.monotonic() + timeout, self.board.counters
        # Of two more looks in vain one at least began after the credit was taken away.
        enough = counters[Counter.LOOKS] + 2
        while counters[Counter.LOOKS] < enough:
            self.check(timeout)
            if time.monotonic() > deadline:
                raise TimeoutError(f"RingCollector: {self.name} must come to rest within {timeout} s.")
            time.sleep(1e-4)

    def drop_unread(self, timeout: float) -> None:
        """Gives back what was pushed and not delivered, also what is on its way to the device.

        The worker must be at rest, or dead: what a dead one left incomplete is dropped when it is started anew.

        Raises:
            TimeoutError: when what was pushed is not complete after so many seconds.
        """
        before, deadline = self.consumer.read, time.monotonic() + timeout
        try:
            with suppress(RingPeerDied):
                while self.consumer.unread:
                    if (span := self.consumer.read_span(tail=False)) is not None:
                        span.commit()
                    elif time.monotonic() > deadline:
                        raise TimeoutError(f"RingCollector: {self.name} must complete its rows within {timeout} s.")
                    else:
                        time.sleep(1e-4)
        finally:
            self.dropped += self.consumer.read - before

    def count_from(self, steps: int) -> None:
        """Goes on counting delivered steps from a number; nothing may be unread."""
        self.dropped, self.earlier = self.consumer.read, steps

    def begin_anew(self, *, seed: int | None, epoch: int, static_seed: bool) -> None:
        """Has the worker, which is at rest, seed and reset its streams; ``wait_for("seed", ...)`` waits for it."""
        self.options = replace(self.options, seed=seed, epoch=epoch, static_seed=static_seed)
        self.command("seed", (seed, epoch, static_seed, self._random_left))

    @property
    def _random_left(self) -> int:
        # By what was delivered: a random step that was dropped is acted again.
        return max(self._random_steps - self.steps, 0)

    def restart(
        self, deadline: float, *, seed: int | None, epoch: int, meanwhile: Callable[[], Any] | None = None
    ) -> None:
        """Starts another process for the same streams after this one has ended and what it published was read.

        ``meanwhile`` is called over and over until it is ready.

        When that one does not become ready it is dead as well, and may be started anew in its turn.
        """
        self.process.close()
        self._forget()
        self.dropped += self.consumer.restart()
        self.grant(self._granted)
        self.options = replace(self.options, seed=seed, epoch=epoch, random_steps=self._random_left)
        self._payload.close()
        self._payload = self._pack()
        self.board.counters[Counter.COMMANDS] = 0
        self.start()
        try:
            self.wait_until_ready(deadline, meanwhile)
        except BaseException:
            self.process.kill()  # it would step, and say that it is ready, when nobody expects it
            raise

    def _forget(self) -> None:
        if self._exported is not None and isinstance(self._ring, CudaIpcRing):
            self._ring.forget(self._exported)
            self._exported = None

    def ask_to_end(self) -> None:
        """Closes the ring: the worker ends at its next step."""
        self.consumer.close()

    def stop(self, timeout: float) -> None:
        """Ends the process, by force where it takes too long, and frees what belongs to it."""
        if self._process is not None:
            self._process.stop(timeout)
            self._process.close()
            self._forget()
        self._payload.close()
        self.consumer.forget_peer()


def output_path(folder: Path | None, index: int) -> Path | None:
    """Returns the file of a worker's output, in a folder that is made where it is missing."""
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"collector-{index}.log"
