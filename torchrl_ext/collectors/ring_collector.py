# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""A TorchRL collector whose workers push packed rows through rings."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict
from torch import nn
from torchrl._utils import logger as torchrl_logger
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from torchrl_ext.collectors import _collector_setup as setup
from torchrl_ext.collectors._board import Board
from torchrl_ext.collectors._collected import Collected
from torchrl_ext.collectors._ring_worker import Refused, RingWorker, output_path
from torchrl_ext.collectors._row_plan import RowPlan
from torchrl_ext.collectors._run_batch import RunBatch
from torchrl_ext.collectors._worker import STAGES, WorkerOptions
from torchrl_ext.collectors.placement import parse_cores
from torchrl_ext.collectors.transport_choice import Transport, TransportChoice, choose_transport
from torchrl_ext.data import RowLayout, SlotReplayBuffer
from torchrl_ext.transport import CudaIpcRing, HostRing, RingPeerDied, Span
from torchrl_ext.weight_update import SeqlockWeightSyncScheme

__all__ = ["RingCollector"]

_UNBOUNDED = 2**61
_PAUSE = 1e-4
#: Seconds between two looks at the workers' lives where nothing waits.
_LOOK_EVERY = 0.5


class RingCollector(BaseCollector):
    """Collects with worker processes that never wait for the learner, nor it for them.

    Each worker steps a block of streams and pushes packed rows into a ring of its own; blocks advance independently.
    Iterate the collector for batches, or give it a :class:`~torchrl_ext.data.SlotReplayBuffer` and call :meth:`drain`
    in the learner's loop.

    Roles      The learner's thread calls everything here; workers run :func:`torchrl_ext.collectors._worker.collect`.
    State      One ring, one weight channel and one board (heartbeat, seconds, episodes) per worker.
    Publish    See :mod:`torchrl_ext.transport.ring`. Episode statistics and the version of the policy that acted
               arrive with their rows.
    Ordering   Rows of a stream arrive in order. A CUDA replay is written on the current stream, so every sample that
               was enqueued before a drain, also inside a captured graph, reads the rows of before, and every later
               one those of after.
    Full       A worker whose ring is full, or that has no credit, does not step; it goes on taking weights.
    Empty      :meth:`drain` returns 0; iteration waits, looking after the workers' lives.
    Death      A dead worker raises :class:`~torchrl_ext.transport.RingPeerDied` (an exception in it: ``RuntimeError``
               with its text) once what it published was read; one that is alive and silent for ``stall_timeout``
               raises ``TimeoutError``. Workers do not outlive this process.
    Lifetime   Workers start here and wait; they step from the first iteration, :meth:`drain` or :meth:`start` on, and
               end with :meth:`shutdown`.

    Args:
        create_env_fn (callable or sequence of callable): makes a TorchRL environment of batch size ``[n]`` or ``[]``,
            in the worker; one for each worker, or one for all. With ``num_streams`` it is called with ``num_envs=``
            the streams of the worker. The first one is called in this process too, for its specs.
        policy (callable, optional): reads observations and writes ``"action"`` in place, such as a TensorDictModule.
            Workers act with copies. Defaults to random actions.

    Keyword Args:
        policy_factory (callable, optional): makes the policy in each worker instead.
        frames_per_batch (int): rows of a batch, a multiple of the streams.
        total_frames (int, optional): rows in all, a multiple of the streams; exactly so many are collected. Defaults to
            -1, no end.
        num_workers (int, optional): processes. Defaults to the number of factories.
        num_streams (int, optional): streams of all workers, split evenly. Defaults to what the factories make.
        replay_buffer (SlotReplayBuffer, optional): is filled; iteration yields None then. It needs as many streams.
        batches ("all" or "any"): whether a batch is ``[K, N]`` of all streams, or ``[K, n]`` of whichever worker has
            one first (equal workers only). Defaults to ``"all"``.
        run_ahead (bool, optional): whether workers go on, as far as their rings reach, while a batch is looked at; with
            False a batch is acted by the weights that were sent before it was asked for. Defaults to True.
        init_random_frames (int, optional): the first rows, rounded up to a step of all streams, have random actions.
        observation_keys (sequence of NestedKey, optional): what is kept. Defaults to all observations.
        extra_keys (sequence of NestedKey, optional): kept beside them: ``"is_init"``, ``("collector", "traj_ids")``,
            ``("collector", "policy_version")``, outputs of the policy. Defaults to ``traj_ids`` and all outputs of the
            policy in batches, to nothing in replay.
        metric_keys (sequence of NestedKey): outcomes of a step whose last value is told of each episode.
        policy_device (torch.device, optional): where workers run the policy. Defaults to the host.
        storing_device (torch.device, optional): of batches. Defaults to the host.
        exploration_type (ExplorationType): in force in the workers. Defaults to ``RANDOM``.
        compile_policy, cudagraph_policy (bool or dict): as in TorchRL's collectors.
        weight_sync_schemes (dict, optional): ``{"policy": SeqlockWeightSyncScheme(...)}``, for its options.
        transport ("auto", "host" or "ipc"): see :func:`choose_transport`. Defaults to ``"auto"``.
        ring_slots (int, optional): steps that a ring holds. Defaults to 64, or what fits in 256 MiB.
        cores (str, collection of int, or sequence of these, optional): cores for the workers, or for each; see
            :func:`parse_cores`. Defaults to those of this process.
        num_threads (int): of torch in each worker. Defaults to 1.
        seed (int, optional): base seed, see :meth:`set_seed`.
        boot_timeout (float): seconds until a worker must be ready. Defaults to 300.
        stall_timeout (float): seconds that a worker may be silent. Defaults to 60.
        max_restarts (int): dead workers that are started anew, with a replay only; their streams are cut. Defaults
            to 0.
        output_dir (path, optional): folder for the workers' output. Defaults to temporary files.
        worker_env (mapping, optional): environment variables of the workers.
        pre_collect_hook (callable, optional): called before each batch.
        post_collect_hook (callable, optional): called with each batch; with a replay, with each run of a worker after
            it was written, as borrowed views ``[K, n]`` without successors (for statistics of observations).

    Raises:
        ValueError, KeyError, TypeError, MemoryError: for what cannot be, before a process is started.
        RuntimeError, RingPeerDied, TimeoutError: when a worker does not become ready, with its text.

    Examples:
        >>> from torchrl_ext.collectors import RingCollector
        >>> from torchrl_ext.testing import CountingEnv
        >>> collector = RingCollector(lambda: CountingEnv(3), frames_per_batch=12, total_frames=24)
        >>> [tuple(batch.shape) for batch in collector]
        [(4, 3), (4, 3)]
        >>> collector.shutdown()
    """

    layout: RowLayout
    """Of every row: what a storage for this collector is made with."""

    def __init__(
        self,
        create_env_fn: Callable[..., EnvBase] | Sequence[Callable[..., EnvBase]],
        policy: Any = None,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        policy_factory: Callable[[], Any] | None = None,
        num_workers: int | None = None,
        num_streams: int | None = None,
        replay_buffer: SlotReplayBuffer | None = None,
        batches: Literal["all", "any"] = "all",
        run_ahead: bool = True,
        init_random_frames: int | None = None,
        observation_keys: Sequence[NestedKey] | None = None,
        extra_keys: Sequence[NestedKey] | None = None,
        metric_keys: Sequence[NestedKey] = (),
        policy_device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        compile_policy: bool | dict[str, Any] = False,
        cudagraph_policy: bool | dict[str, Any] = False,
        weight_sync_schemes: Mapping[str, SeqlockWeightSyncScheme] | None = None,
        transport: Transport = "auto",
        ring_slots: int | None = None,
        cores: str | Collection[int] | Sequence[str | Collection[int]] | None = None,
        num_threads: int = 1,
        seed: int | None = None,
        boot_timeout: float = 300.0,
        stall_timeout: float = 60.0,
        max_restarts: int = 0,
        output_dir: str | Path | None = None,
        worker_env: Mapping[str, str] | None = None,
        pre_collect_hook: Callable[[], None] | None = None,
        post_collect_hook: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__(pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook)
        self._closed = True  # for __del__, should what follows raise
        self._workers: list[RingWorker] = []
        if policy is not None and policy_factory is not None:
            raise ValueError("RingCollector: policy and policy_factory must not both be given. Nothing was started.")
        if batches not in ("all", "any"):
            raise ValueError(f"RingCollector: batches must be 'all' or 'any', got {batches!r}. Nothing was started.")
        if max_restarts and replay_buffer is None:
            raise ValueError("RingCollector: max_restarts must come with a replay_buffer. Nothing was started.")
        self._policy_device, self._storing_device = setup.device_of(policy_device), setup.device_of(storing_device)
        self._boot_timeout, self._stall_timeout, self._restarts_left = boot_timeout, stall_timeout, max_restarts
        self._batches, self._run_ahead = batches, run_ahead
        self.policy = policy_factory() if policy_factory is not None else policy

        factories = setup.EnvFactories(create_env_fn, num_workers, num_streams)
        env = factories.example()
        try:
            env = factories.with_primers(self.policy, env)
            travelling = setup.policy_for_workers(self.policy)
            plan = RowPlan.of(
                env,
                travelling,
                observation_keys=observation_keys,
                extra_keys=extra_keys,
                metric_keys=metric_keys,
                batch=replay_buffer is None,
            )
            factories.count_streams(max(env.batch_size.numel(), 1))
        finally:
            setup.close_env(env)
        self.layout, columns = plan.layout, factories.columns
        self.num_workers, self.num_streams = len(columns), columns[-1].stop
        widths = [block.stop - block.start for block in columns]
        unit = self.num_streams if batches == "all" or replay_buffer is not None else widths[0]
        if unit != self.num_streams and len(set(widths)) > 1:
            raise ValueError(
                f"RingCollector: batches='any' must come with equal workers, got {widths} streams. Nothing was started."
            )
        setup.check_frames("frames_per_batch", frames_per_batch, unit)
        if total_frames != -1:
            setup.check_frames("total_frames", total_frames, self.num_streams)
        self.requested_frames_per_batch, self.total_frames = frames_per_batch, total_frames
        self._steps_per_batch = frames_per_batch // unit
        self.replay_buffer = replay_buffer
        storage = setup.check_storage(replay_buffer, self.layout, self.num_streams)
        device = self._storing_device
        if storage is not None and storage.device is not None:
            device = setup.device_of(storage.device)
        self._target_device = device if device is not None and device.type == "cuda" else None

        slot_bytes = max(widths) * self.layout.row_bytes
        capacity = setup.ring_capacity(ring_slots, slot_bytes)
        #: The transport of the rows and the reason for it.
        self.transport: TransportChoice = choose_transport(
            transport,
            storing_device=self._target_device,
            policy_device=self._policy_device,
            slot_bytes=slot_bytes,
        )
        if self.transport.kind == "host":
            setup.check_memory(self.layout, capacity, widths)
        scheme = self._make_scheme(weight_sync_schemes, self.policy, len(widths))
        self._scheme, self._weight_updater = scheme, None
        self._weight_sync_schemes = {} if scheme is None else {"policy": scheme}

        self._frames, self._iter, self._epoch, self._seed = 0, -1, 0, seed
        self._started, self._paused = False, False
        self._asked: dict[int, int] = {}  # how far each worker may go without run_ahead
        self._limit_frames: int | None = None
        self._lock, self._turn = threading.RLock(), -1
        self._partial: dict[int, tuple[RunBatch, int, int]] = {}  # of batches='any'
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._looked = time.monotonic()
        #: Episodes, stages and policy lag of what was delivered.
        self.collected = Collected(len(metric_keys))
        random_steps = self._random_steps = -(-(init_random_frames or 0) // self.num_streams)
        stages = STAGES

        def make(kind: str) -> list[RingWorker]:
            return [
                RingWorker(
                    _make_ring(kind, self.layout, capacity, widths[index], self._target_device, tails=storage is None),
                    Board(stages, 4 * widths[index], len(metric_keys)),
                    columns[index],
                    WorkerOptions(
                        index=index,
                        first_stream=columns[index].start,
                        num_streams=self.num_streams,
                        plan=plan,
                        tails=storage is None,
                        random_steps=random_steps,
                        seed=seed,
                        epoch=0,
                        policy_device=self._policy_device,
                        exploration_type=exploration_type,
                        compile_policy=_options_of(compile_policy),
                        cudagraph_policy=_options_of(cudagraph_policy),
                        map_timeout=boot_timeout,
                    ),
                    target={
                        "create_env_fn": factories.factories[index],
                        "policy": None if policy_factory is not None else travelling,
                        "policy_factory": policy_factory,
                        "weights": None if scheme is None else scheme.for_worker(index),
                    },
                    device=self._target_device,
                    process={
                        "output": output_path(None if output_dir is None else Path(output_dir), index),
                        "env": worker_env,
                        "cores": _cores_of(cores, index),
                        "num_threads": num_threads,
                    },
                )
                for index in range(len(widths))
            ]

        self._make_workers = make
        self._boot()

    # Start

    @staticmethod
    def _make_scheme(
        schemes: Mapping[str, SeqlockWeightSyncScheme] | None, policy: Any, num_workers: int
    ) -> SeqlockWeightSyncScheme | None:
        has_weights = isinstance(policy, nn.Module) and any(True for _ in (*policy.parameters(), *policy.buffers()))
        if schemes is not None:
            scheme = schemes.get("policy")
            if list(schemes) != ["policy"] or not isinstance(scheme, SeqlockWeightSyncScheme) or not has_weights:
                raise TypeError(
                    "RingCollector: weight_sync_schemes must be {'policy': SeqlockWeightSyncScheme(...)} for a module "
                    f"with weights, got {dict(schemes)} for {type(policy).__name__}. Nothing was started."
                )
        elif has_weights:
            scheme = SeqlockWeightSyncScheme()
        else:
            return None
        scheme.init_on_sender(model_id="policy", model=policy, num_workers=num_workers)
        return scheme

    def _boot(self) -> None:
        self._workers = self._make_workers(self.transport.kind)
        self._closed = False
        try:
            try:
                self._start_workers()
            except Refused as refusal:
                if self.transport.reason == "it was asked for":
                    raise RuntimeError(f"RingCollector: transport 'ipc' cannot be had: {refusal}.") from refusal
                self._stop_workers(5.0)
                self.transport = TransportChoice("host", f"a worker could not map device memory ({refusal})")
                self._workers = self._make_workers("host")
                self._start_workers()
        except BaseException:
            self.shutdown(timeout=1.0)
            raise
        torchrl_logger.info(f"RingCollector: transport {self.transport.kind!r}, because {self.transport.reason}.")

    def _start_workers(self) -> None:
        self.collected.boards = [worker.board for worker in self._workers]
        deadline = time.monotonic() + self._boot_timeout
        for worker in self._workers:
            worker.start()
        if self._scheme is not None and not self._scheme.synchronized_on_sender:
            self._scheme.connect()  # only now: with transport="ipc" it waits for them
        for worker in self._workers:
            worker.wait_until_ready(deadline)

    # Credit

    def _grant(self) -> None:
        """Tells every worker how far it may go."""
        steps = _UNBOUNDED if self.total_frames == -1 else self.total_frames // self.num_streams
        if self._limit_frames is not None:
            steps = min(steps, self._limit_frames // self.num_streams)
        for worker in self._workers:
            own = steps
            if self._paused:
                own = worker.steps
            elif not self._run_ahead and self.replay_buffer is None:
                own = min(steps, self._asked.get(worker.options.index, worker.steps))
            worker.grant(own)

    def hold_at(self, frames: int | None) -> None:
        """Lets workers go on until so many rows were collected in all, rounded down to a step; None lifts the limit.

        It is the credit by which an update ratio or a warm-up is kept exactly.
        """
        self._limit_frames = frames
        if self._started:
            self._grant()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Has every worker rest between two steps meanwhile. What they pushed can be drained."""
        self._check_open()
        outer, self._paused = self._paused, True
        try:
            self._grant()
            for worker in self._workers:
                worker.wait_until_quiet(self._stall_timeout)
            yield
        finally:
            self._paused = outer
            if not self._closed and self._started:
                self._grant()

    def _go(self) -> None:
        self._check_open()
        if not self._started:
            self._started = True
            self._grant()

    def _check_open(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._closed:
            raise RuntimeError("RingCollector: it must not have been shut down.")

    # Delivery

    def drain(self, max_rows: int | None = None) -> int:
        """Copies what workers published into the replay; never waits for them.

        One copy per span. On a CUDA replay it is enqueued on the current stream. Call it from the thread that samples.

        Args:
            max_rows (int, optional): at most so many, but at least one step of a worker. Defaults to all.

        Returns:
            int: rows that were written.

        Raises:
            RuntimeError, RingPeerDied, TimeoutError: see the class; and ``RuntimeError`` without a replay.
        """
        if self.replay_buffer is None:
            raise RuntimeError("RingCollector: drain must have a replay_buffer, got none; iterate the collector.")
        self._go()
        left = _UNBOUNDED if max_rows is None else max_rows
        rows = 0
        with self._lock:
            for worker in self._in_turn():
                if not rows or left - rows >= worker.num_streams:
                    rows += self._drain_worker(worker, max(1, (left - rows) // worker.num_streams))
        self._after_delivery()
        return rows

    def _in_turn(self) -> list[RingWorker]:
        # Another worker is the first one each time, so that with max_rows none is forgotten.
        self._turn = (self._turn + 1) % len(self._workers)
        return self._workers[self._turn :] + self._workers[: self._turn]

    def _drain_worker(self, worker: RingWorker, steps: int) -> int:
        """Writes up to so many steps of a worker; returns the rows."""
        assert self.replay_buffer is not None
        taken = 0
        while taken < steps and (span := self._read(worker, steps - taken, tail=False)) is not None:
            try:
                if span.begins:
                    self.replay_buffer.end_streams(worker.columns)
                self.replay_buffer.extend_batch(span.run, streams=worker.columns)
            except BaseException:
                span.release()  # nothing was written
                raise
            try:
                if self.post_collect_hook is not None:
                    self.post_collect_hook(span.view())
            finally:
                taken += self._commit(worker, span)  # the rows are written, whatever the hook does
        return taken * worker.num_streams

    def _read(self, worker: RingWorker, steps: int, *, tail: bool) -> Span | None:
        try:
            return worker.consumer.read_span(steps, tail=tail)
        except RingPeerDied:
            if self._restarts_left < 1:
                worker.check(self._stall_timeout)  # raises with what is known: code, output, traceback
            self._restart(worker)
            return None

    def _commit(self, worker: RingWorker, span: Span) -> int:
        first_final, steps, versions = worker.consumer.finals, span.num_steps, span.versions
        rows = span.run.final_rows
        count = 0 if rows is None else len(rows)
        if count:
            streams = rows.numpy() % worker.num_streams + worker.columns.start  # type: ignore[union-attr]
            self.collected.add_episodes(worker.options.index, streams, worker.board.read(first_final, count))
        newest = 0 if self._scheme is None else self._scheme.versions[worker.options.index]
        self.collected.add_versions(versions, newest, worker.num_streams)
        span.commit()
        self._frames += steps * worker.num_streams
        return steps

    def _restart(self, worker: RingWorker) -> None:
        reason = worker.process.failure()
        torchrl_logger.warning(f"RingCollector: {reason}; {worker.name} is started anew.")
        self._restarts_left -= 1
        self._epoch += 1
        worker.restart(time.monotonic() + self._boot_timeout, seed=self._seed, epoch=self._epoch)
        self._grant()

    def _after_delivery(self) -> None:
        if self._scheme is not None:
            self._scheme.poll()
        now = time.monotonic()
        if now - self._looked > _LOOK_EVERY:
            self._looked = now
            for worker in self._workers:
                worker.consumer.poll()
                if not worker.consumer.fill and not self._is_done(worker):
                    self._look_after(worker)

    def _look_after(self, worker: RingWorker) -> None:
        try:
            worker.check(self._stall_timeout)
        except RuntimeError:  # a dead worker; a silent one is a TimeoutError
            if self._restarts_left < 1:
                raise
            self._restart(worker)

    def _is_done(self, worker: RingWorker) -> bool:
        return not self._steps_left(worker)

    # Iteration

    def iterator(self) -> Iterator[TensorDict | None]:
        """Yields batches, or None where a replay is filled, until ``total_frames`` were collected."""
        try:
            while self.total_frames == -1 or self._frames < self.total_frames:
                self._check_open()
                if self.pre_collect_hook is not None:
                    self.pre_collect_hook()
                batch = self._next_batch()
                self._iter += 1
                if self.post_collect_hook is not None and batch is not None:
                    self.post_collect_hook(batch)
                yield batch
        except (Exception, KeyboardInterrupt):
            self.shutdown(timeout=1.0)
            raise

    def _next_batch(self) -> TensorDict | None:
        if self._batches == "any" and self.replay_buffer is None:
            return self._any_batch()
        wanted = {
            worker.options.index: min(self._steps_per_batch, self._steps_left(worker)) for worker in self._workers
        }
        # After uneven drains some blocks have less to go, or nothing; batches are never uneven.
        wanted = {index: steps for index, steps in wanted.items() if steps}
        steps = max(wanted.values())
        self._asked = {index: self._workers[index].steps + more for index, more in wanted.items()}
        self._started = True
        self._grant()
        batch = None
        if self.replay_buffer is None:
            batch = RunBatch(self.layout, steps, self.num_streams, self._target_device or torch.device("cpu"))
        pause = _PAUSE
        while wanted:
            rows = 0
            with self._lock:
                for index in list(wanted):
                    worker = self._workers[index]
                    if batch is None:
                        taken = self._drain_worker(worker, wanted[index]) // worker.num_streams
                    else:
                        taken = self._fill(batch, worker, steps - wanted[index], wanted[index], columns=worker.columns)
                    rows += taken
                    wanted[index] -= taken
                    if not wanted[index]:
                        del wanted[index]
            self._after_delivery()
            pause = _PAUSE if rows else min(2 * pause, 10 * _PAUSE)
            if wanted and not rows:
                time.sleep(pause)
        return None if batch is None else batch.tensordict()

    def _any_batch(self) -> TensorDict:
        """The first run of one worker that is complete; the others go on filling theirs."""
        for worker in self._workers:
            _, filled, _ = self._partial.get(worker.options.index, (None, 0, 0))
            self._asked[worker.options.index] = worker.steps - filled + self._steps_per_batch
        self._started = True
        self._grant()
        pause = _PAUSE
        while True:
            rows = 0
            for worker in self._in_turn():
                index = worker.options.index
                batch, filled, steps = self._partial.get(index) or (None, 0, 0)
                if batch is None:
                    steps = min(self._steps_per_batch, self._steps_left(worker))
                    if not steps:
                        continue
                    batch = RunBatch(self.layout, steps, worker.num_streams, self._target_device or torch.device("cpu"))
                taken = self._fill(batch, worker, filled, steps - filled, columns=slice(0, worker.num_streams))
                rows += taken
                self._partial[index] = (batch, filled + taken, steps)
                if filled + taken == steps:
                    del self._partial[index]
                    self._after_delivery()
                    return batch.tensordict()
            self._after_delivery()
            pause = _PAUSE if rows else min(2 * pause, 10 * _PAUSE)
            if not rows:
                time.sleep(pause)

    def _steps_left(self, worker: RingWorker) -> int:
        if self.total_frames == -1:
            return _UNBOUNDED
        return self.total_frames // self.num_streams - worker.steps

    def _fill(self, batch: RunBatch, worker: RingWorker, first: int, steps: int, *, columns: slice) -> int:
        """Copies up to so many steps of a worker into a batch; returns how many."""
        span = self._read(worker, steps, tail=True)
        if span is None:
            return 0
        deadline = time.monotonic() + self._stall_timeout
        while span.run.tail is None:
            # The worker overwrote the tail while we read it: its next step, which shows the same, is about to come.
            alive = worker.is_alive()
            span.run.tail = worker.consumer.tail_of(span.first_step + span.num_steps - 1)
            if span.run.tail is None and not alive:
                worker.check(self._stall_timeout)  # raises
            if time.monotonic() > deadline:
                raise TimeoutError(f"RingCollector: {worker.name} must tell the successors of its last step.")
        batch.add(span.run, first, columns)
        return self._commit(worker, span)

    def __iter__(self) -> Iterator[TensorDict | None]:
        self._iteration_started = True
        yield from self.iterator()

    # Background

    def start(self) -> None:
        """Drains into the replay from a thread of this process, for notebooks; ends with :meth:`shutdown`.

        A learner that captures CUDA graphs calls :meth:`drain` itself instead.
        """
        if self.replay_buffer is None:
            raise RuntimeError("RingCollector: start must have a replay_buffer, got none.")
        self._go()
        if self._thread is None:
            self._thread = threading.Thread(target=self._drain_on, name="ring-drain", daemon=True)
            self._thread.start()

    def _drain_on(self) -> None:
        while not self._closed:
            try:
                rows = self.drain()
            except BaseException as error:
                if not self._closed:
                    self._error, self._thread = error, None
                return
            if not rows:
                time.sleep(10 * _PAUSE)

    # Seeds and state

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Begins all streams anew: global stream ``i`` has seed ``seed + i``, a policy draws by its worker's first one.

        The same seed gives the same rows where weights do not change meanwhile. Rows that were not delivered are
        dropped, and streams are cut.

        Args:
            seed (int): of stream 0.
            static_seed (bool, optional): passed to the environments. Defaults to False.

        Returns:
            int: the next seed that no stream has.
        """
        self._seed, self._epoch = seed, 0
        self._begin_anew(static_seed=static_seed)
        return seed + self.num_streams

    def _begin_anew(self, *, static_seed: bool = False, random_steps: int | None = None) -> None:
        self._check_open()
        with self._lock, self.pause():
            for worker in self._workers:
                _, filled, _ = self._partial.pop(worker.options.index, (None, 0, 0))
                self._frames -= filled * worker.num_streams
                worker.dropped += filled
                worker.drop_unread()
                worker.options = replace(worker.options, seed=self._seed, epoch=self._epoch)
                worker.command("seed", (self._seed, self._epoch, static_seed, random_steps))
            for worker in self._workers:
                worker.wait_for("seed", self._boot_timeout)

    def state_dict(self) -> OrderedDict:
        """Returns the counters and seeds; replay, weights and optimisers are saved by their owners."""
        return OrderedDict(
            frames=self._frames,
            iter=self._iter,
            seed=self._seed,
            epoch=self._epoch,
            num_streams=self.num_streams,
            steps=[worker.steps for worker in self._workers],
            versions={} if self._scheme is None else self._scheme.versions,
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on counting from a state; episodes begin anew with seeds of a new epoch, and streams are cut.

        Raises:
            ValueError: for a state of another number of streams. Nothing was changed.
        """
        if state_dict["num_streams"] != self.num_streams:
            raise ValueError(
                f"RingCollector: the state must be of {self.num_streams} streams, got {state_dict['num_streams']}. "
                "Nothing was changed."
            )
        self._seed, self._epoch = state_dict["seed"], state_dict["epoch"] + 1
        steps = state_dict["steps"]
        if len(steps) != self.num_workers:  # other blocks: each goes on from the same step
            steps = [state_dict["frames"] // self.num_streams] * self.num_workers
        with self._lock:
            left = max(self._random_steps - state_dict["frames"] // self.num_streams, 0)
            self._begin_anew(random_steps=left)
            for worker, count in zip(self._workers, steps, strict=True):
                worker.count_from(count)
                worker.act_randomly_for(left)
            self._frames = sum(worker.steps * worker.num_streams for worker in self._workers)
            self._iter = state_dict["iter"]
            self._asked.clear()
            if self._started:
                self._grant()

    # Statistics

    @property
    def policy_version(self) -> int:
        """The newest version of the policy that workers can see; 0 where it has no weights."""
        return 0 if self._scheme is None else self._scheme.version

    def weights_arrived(self) -> bool:
        """Whether everything that ``update_policy_weights_`` sent can be seen by the workers; never waits."""
        return self._scheme is None or self._scheme.poll()

    @property
    def fill(self) -> list[int]:
        """Steps that wait in each ring."""
        return [worker.consumer.fill for worker in self._workers]

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    # End

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Ends every worker, by force after ``timeout`` seconds (default 5), and frees the rings; may be called twice.

        Args:
            timeout (float, optional): seconds.
            close_env, raise_on_error (bool, optional): for TorchRL's interface; workers always close their own.
        """
        if self._closed:
            return
        self._closed = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self._stall_timeout)
        self._stop_workers(5.0 if timeout is None else timeout)
        if self._scheme is not None:
            self._scheme.shutdown()
        # Memory is freed now, not when garbage is collected.
        self.collected.let_go()
        self._workers, self._scheme, self._weight_sync_schemes = [], None, {}
        del self._make_workers

    def _stop_workers(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for worker in self._workers:
            worker.ask_to_end()
        for worker in self._workers:
            worker.stop(max(deadline - time.monotonic(), 0.0))

    def __del__(self) -> None:
        if not self.__dict__.get("_closed", True):
            self.shutdown(timeout=0.0)

    def __repr__(self) -> str:
        return f"RingCollector(num_workers={self.num_workers}, num_streams={self.num_streams})"


def _make_ring(
    kind: str, layout: RowLayout, capacity: int, width: int, device: torch.device | None, *, tails: bool
) -> HostRing | CudaIpcRing:
    if kind == "ipc":
        assert device is not None
        return CudaIpcRing(layout, capacity, width, device=device, tails=tails)
    return HostRing(layout, capacity, width)


def _options_of(value: bool | dict[str, Any]) -> dict[str, Any] | None:
    return dict(value) if isinstance(value, Mapping) else ({} if value else None)


def _cores_of(cores: Any, index: int) -> Collection[int] | None:
    if isinstance(cores, Sequence) and not isinstance(cores, str) and not all(isinstance(c, int) for c in cores):
        cores = cores[index]
    return parse_cores(cores) if isinstance(cores, str) or cores is None else cores
