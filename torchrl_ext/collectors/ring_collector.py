# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""A TorchRL collector whose workers push packed rows through rings."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict
from torchrl._utils import logger as torchrl_logger
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from torchrl_ext.collectors import _collector_setup as setup
from torchrl_ext.collectors._batch_assembly import BatchAssembly
from torchrl_ext.collectors._collected import Collected
from torchrl_ext.collectors._collector_state import CollectorState
from torchrl_ext.collectors._credit import UNBOUNDED, Credit
from torchrl_ext.collectors._delivery import Delivery
from torchrl_ext.collectors._replay_drain import DrainThread, ReplayDrain
from torchrl_ext.collectors._stream_plan import StreamPlan
from torchrl_ext.collectors._worker_blueprint import WorkerBlueprint
from torchrl_ext.collectors._worker_options import WorkerOptions
from torchrl_ext.collectors._worker_set import WorkerSet
from torchrl_ext.collectors.transport_choice import Transport, TransportChoice, choose_transport
from torchrl_ext.data import RowLayout, SlotReplayBuffer
from torchrl_ext.weight_update import SeqlockWeightSyncScheme

__all__ = ["RingCollector"]


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
            the streams of the worker. The first one is called in this process too, for its specs; without
            ``num_streams`` so is each other one, for its batch size.
        policy (callable, optional): reads observations and writes ``"action"`` in place, such as a TensorDictModule.
            Workers act with copies. Defaults to random actions.

    Keyword Args:
        policy_factory (callable, optional): makes the policy in each worker instead, and in this process for its keys.
        frames_per_batch (int): rows of a batch, a multiple of the streams.
        total_frames (int, optional): rows in all, a multiple of the streams; exactly so many are collected. Defaults to
            -1, no end.
        num_workers (int, optional): processes. Defaults to the number of factories.
        num_streams (int, optional): streams of all workers, split evenly. Defaults to what the factories make.
        replay_buffer (SlotReplayBuffer, optional): is filled; iteration yields None then. It needs as many streams.
        batches ("all" or "any"): whether a batch is ``[K, N]`` of all streams, or ``[K, n]`` of whichever worker has
            one first (equal workers, and no replay, only). Defaults to ``"all"``.
        run_ahead (bool, optional): whether workers go on, as far as their rings reach, while a batch is looked at; with
            False, without a replay only, a batch is acted by the weights that were sent before it was asked for.
            Defaults to True.
        init_random_frames (int, optional): the first rows, rounded up to a step of all streams, have random actions,
            and zeros for what else of the policy's outputs is kept.
        observation_keys (sequence of NestedKey, optional): what is kept. Defaults to all observations.
        extra_keys (sequence of NestedKey, optional): kept beside them: ``"is_init"``, ``("collector", "traj_ids")``,
            ``("collector", "policy_version")``, outputs of the policy. Defaults to ``traj_ids`` and all outputs of the
            policy in batches, to nothing in replay.
        metric_keys (sequence of NestedKey): outcomes of a step whose last value is told of each episode.
        policy_device (torch.device, optional): where workers run the policy; ``"cuda"`` is this process's current
            device, or the first one that ``worker_env`` lets workers see. Defaults to the host.
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
        setup.check_numbers(
            {
                "init_random_frames": (init_random_frames, 0),
                "ring_slots": (ring_slots, 2),
                "max_restarts": (max_restarts, 0),
                "num_threads": (num_threads, 1),
            },
            {"boot_timeout": boot_timeout, "stall_timeout": stall_timeout},
        )
        setup.check_choices(
            policy,
            policy_factory,
            batches=batches,
            run_ahead=run_ahead,
            max_restarts=max_restarts,
            replay_buffer=replay_buffer,
        )
        named_here = "CUDA_VISIBLE_DEVICES" not in (worker_env or {})
        acting_device = setup.device_of(policy_device, current=named_here)
        storing_device = setup.device_of(storing_device)
        streams = StreamPlan(
            create_env_fn,
            policy,
            policy_factory=policy_factory,
            num_workers=num_workers,
            num_streams=num_streams,
            observation_keys=observation_keys,
            extra_keys=extra_keys,
            metric_keys=metric_keys,
            batch=replay_buffer is None,
        )
        self.policy, self.layout, widths = streams.policy, streams.row.layout, streams.widths
        self.num_workers, self.num_streams = len(widths), streams.num_streams
        whole = batches == "all"
        unit = setup.frames_unit(widths, whole=whole)
        setup.check_frames("frames_per_batch", frames_per_batch, unit)
        if total_frames != -1:
            setup.check_frames("total_frames", total_frames, self.num_streams)
        self.requested_frames_per_batch, self.total_frames = frames_per_batch, total_frames
        self.init_random_frames = init_random_frames or 0  # a Trainer of TorchRL asks for it
        self.replay_buffer = replay_buffer
        storage = setup.check_storage(replay_buffer, self.layout, self.num_streams)
        target_device = setup.target_device(storage, storing_device)

        slot_bytes = max(widths) * self.layout.row_bytes
        capacity = setup.ring_capacity(ring_slots, slot_bytes)
        #: The transport of the rows and the reason for it.
        self.transport: TransportChoice = choose_transport(
            transport, storing_device=target_device, policy_device=acting_device, slot_bytes=slot_bytes
        )
        if self.transport.kind == "host":
            setup.check_memory(self.layout, capacity, widths)
        scheme = setup.make_scheme(weight_sync_schemes, self.policy, len(widths))
        self._weight_sync_schemes = {} if scheme is None else {"policy": scheme}
        options = WorkerOptions(
            plan=streams.row,
            num_streams=self.num_streams,
            tails=storage is None,
            random_steps=-(-(init_random_frames or 0) // self.num_streams),
            seed=seed,
            policy_device=acting_device,
            exploration_type=exploration_type,
            compile_policy=setup.options_of(compile_policy),
            cudagraph_policy=setup.options_of(cudagraph_policy),
            map_timeout=boot_timeout,
        )
        self._workers = WorkerSet(
            WorkerBlueprint(
                streams=streams,
                options=options,
                capacity=capacity,
                device=target_device,
                scheme=scheme,
                cores=cores,
                num_threads=num_threads,
                output_dir=output_dir,
                worker_env=worker_env,
            ),
            self.transport,
            boot_timeout=boot_timeout,
            stall_timeout=stall_timeout,
            max_restarts=max_restarts,
        )
        #: Episodes, stages and policy lag of what was delivered.
        self.collected: Collected = self._workers.collected
        steps = UNBOUNDED if total_frames == -1 else total_frames // self.num_streams
        self._credit = Credit(self._workers, total_steps=steps, run_ahead=run_ahead)
        self._delivery = Delivery(self._workers, self._credit)
        self._drain = None if replay_buffer is None else ReplayDrain(replay_buffer, self._delivery)
        self._background = DrainThread()
        self._any, self._num_steps = not whole, frames_per_batch // unit
        self._assembly = BatchAssembly(self._delivery, self.layout, num_steps=self._num_steps, device=target_device)
        self._state = CollectorState(self._delivery, self._assembly, level=whole and replay_buffer is None)
        self._boot()

    def _boot(self) -> None:
        self._workers.make()
        self._owner, self._closed = os.getpid(), False
        try:
            self._workers.boot()
        except BaseException:
            self.shutdown(timeout=1.0)
            raise
        self.transport = self._workers.transport
        torchrl_logger.info(f"RingCollector: transport {self.transport.kind!r}, because {self.transport.reason}.")

    # Credit

    def hold_at(self, frames: int | None) -> None:
        """Lets workers go on until so many rows were collected in all, rounded down to a step; None lifts the limit.

        It is the credit by which an update ratio or a warm-up is kept exactly.
        """
        self._background.raise_error()
        self._credit.hold_at(frames)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Has every worker rest between two steps meanwhile. What they pushed can be drained."""
        self._check_open()
        with self._credit.pause():
            yield

    def _go(self) -> None:
        self._check_open()
        self._credit.begin()

    def _check_open(self) -> None:
        self._background.raise_error()
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
        if self._drain is None:
            raise RuntimeError("RingCollector: drain must have a replay_buffer, got none; iterate the collector.")
        self._go()
        return self._drain.drain(max_rows, self.post_collect_hook)

    @property
    def _frames(self) -> int:
        return self._delivery.frames  # read by TorchRL's ``stats``, as the next one

    @property
    def _iter(self) -> int:
        return self._assembly.count

    def iterator(self) -> Iterator[TensorDict | None]:
        """Yields batches, or None where a replay is filled, until ``total_frames`` were collected."""
        try:
            while self.total_frames == -1 or self._frames < self.total_frames:
                self._check_open()
                if self.pre_collect_hook is not None:
                    self.pre_collect_hook()
                batch = self._next_batch()
                self._assembly.count += 1
                if self.post_collect_hook is not None and batch is not None:
                    self.post_collect_hook(batch)
                yield batch
        except (Exception, KeyboardInterrupt):
            self.shutdown(timeout=1.0)
            raise

    def _next_batch(self) -> TensorDict | None:
        if self._drain is not None:
            self._assembly.into_replay(self._drain, self.post_collect_hook)
            return None
        return self._assembly.of_any() if self._any else self._assembly.of_all()

    def __iter__(self) -> Iterator[TensorDict | None]:
        self._iteration_started = True
        yield from self.iterator()

    def __len__(self) -> int:
        if not self._any or self.total_frames == -1:
            return super().__len__()
        return -(self.total_frames // self.num_streams // -self._num_steps) * self.num_workers

    def start(self) -> None:
        """Drains into the replay from a thread of this process, for notebooks; ends with :meth:`shutdown`.

        What ends the thread is raised by the next call that drains, pauses, holds, sends weights, seeds or starts. A
        learner that captures CUDA graphs calls :meth:`drain` itself instead.
        """
        if self._drain is None:
            raise RuntimeError("RingCollector: start must have a replay_buffer, got none.")
        self._go()
        self._background.start(self.drain)

    # Weights

    def _send_weights_scheme(self, **sending: Any) -> None:
        self._background.raise_error()  # of start(), where the learner may call nothing else
        with self._workers.lock:  # which that thread holds while it polls
            super()._send_weights_scheme(**sending)

    @property
    def policy_version(self) -> int:
        """The newest version of the policy that workers can see; 0 where it has no weights."""
        return 0 if self._workers.scheme is None else self._workers.scheme.version

    def weights_arrived(self) -> bool:
        """Whether everything that ``update_policy_weights_`` sent can be seen by the workers; never waits."""
        with self._workers.lock:
            return self._workers.poll_weights()

    # Seeds and state

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Begins all streams anew: the block that begins with global stream ``i`` is seeded with ``seed + i``.

        That goes to ``set_seed`` of the worker's environment, and to the generators that its policy draws from. An
        :class:`~torchrl_ext.envs.EnvPoolEnv` so gives each global stream ``i`` the seed ``seed + i``; TorchRL's batched
        environments derive those of their further streams. The same seed gives the same rows where weights do not
        change meanwhile. Rows that were not delivered are dropped, and streams are cut.

        Args:
            seed (int): of stream 0.
            static_seed (bool, optional): passed to the environments. Defaults to False.

        Returns:
            int: ``seed + num_streams``, the next one.
        """
        self._check_open()
        self._state.set_seed(seed, static_seed)
        return seed + self.num_streams

    def state_dict(self) -> OrderedDict:
        """Returns the counters and seeds, after a shutdown those of then; replay, weights and optimisers are saved by
        their owners."""
        return self._state.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on counting from a state; episodes begin anew with seeds of a new epoch, and streams are cut.

        Raises:
            ValueError: for a state of another number of streams, or one that lacks a counter. Nothing was changed.
        """
        self._check_open()
        self._state.load_state_dict(state_dict)

    # Workers

    @property
    def fill(self) -> list[int]:
        """Steps that wait in each ring."""
        with self._workers.lock:  # a thread that drains reads the same counters
            return [worker.consumer.fill for worker in self._workers]

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Ends every worker, by force after ``timeout`` seconds (default 5), and frees the rings; may be called twice.

        In a forked copy of the process it does nothing.

        Args:
            timeout (float, optional): seconds; as many before, where the thread of :meth:`start` does not end.
            close_env, raise_on_error (bool, optional): for TorchRL's interface; workers always close their own.
        """
        if self._closed or os.getpid() != self._owner:
            return
        timeout = 5.0 if timeout is None else timeout
        self._background.stop(timeout)
        self._closed = True
        self._state.keep()
        self._workers.end(timeout)
        self._weight_sync_schemes = {}

    def __del__(self) -> None:
        if not self.__dict__.get("_closed", True):
            self.shutdown(timeout=0.0)

    def __repr__(self) -> str:
        return f"RingCollector(num_workers={self.num_workers}, num_streams={self.num_streams})"
