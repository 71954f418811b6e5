# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Environment steps per second of a collector.

``collector_rate``  so many rows from one worker process of :class:`RingCollector` in a replay buffer. The limit is the
                    bare loop: the same EnvPool task and network in one process, rows thrown away. The peer is TorchRL's
                    ``MultiAsyncCollector`` with the same environment and a shared buffer. Measured beside them, where
                    it is installed: MotrixLab's collector, drained into its own replay. All candidates collect as
                    many rows per call, as many as the bare loop makes in ``COLLECTOR_SECONDS`` (3.0); each is alive
                    and at rest while another one is timed. The pool has ``COLLECTOR_ENV_THREADS`` (2) threads.

One call takes seconds: ``python benchmarks/compare.py collector_rate --rounds 5``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks.cases import Comparison
from benchmarks.peers import PeerUnavailableError, motrixlab, motrixlab_collector, torchrl_collector
from benchmarks.presets import ReplaySizes
from benchmarks.timing import Candidate
from torchrl_ext.collectors import RingCollector
from torchrl_ext.data import SlotReplayBuffer, SlotStorage
from torchrl_ext.envs import EnvPoolEnv

SECONDS = float(os.environ.get("COLLECTOR_SECONDS", "3.0"))
ENV_THREADS = int(os.environ.get("COLLECTOR_ENV_THREADS", "2"))
REPLAY_SLOTS = 1024
CALIBRATION = 0.3
#: Between two drains, as a learner has its own work in between; a few steps less than a ring holds.
DRAIN_EVERY_S = 1e-2


@dataclass(frozen=True)
class Task:
    """An EnvPool task and how many streams of it."""

    name: str
    streams: int
    observation: int
    action: int


TASKS = (
    Task("HalfCheetah-v4", 64, 17, 6),
    Task("HalfCheetah-v4", 16, 17, 6),
    Task("Pendulum-v1", 64, 3, 1),
)


def collector_rate(device: torch.device, sizes: Sequence[ReplaySizes]) -> Iterator[Comparison]:
    """Collects as many rows as the bare loop makes in a few seconds; the sizes are the tasks' own."""
    if device.type != "cpu":
        raise ValueError("collector_rate is measured with --device cpu.")
    try:
        import envpool  # noqa: F401
    except ImportError as error:
        needs = "collector_rate needs EnvPool, which comes with the extra 'sota' and needs Python 3.11 or newer."
        raise ValueError(needs) from error
    for task in TASKS:
        with contextlib.ExitStack() as alive:
            yield _rates(task, alive)


def _rates(task: Task, alive: contextlib.ExitStack) -> Comparison:
    bare = alive.enter_context(contextlib.closing(_Bare(task)))
    bare.collect(10 * task.streams)
    rows = bare.rows_in(SECONDS)
    extra: dict[str, Any] = {"rows": rows, "env_threads": ENV_THREADS}
    options: dict[str, Any] = {"num_envs": task.streams, "num_threads": ENV_THREADS, "seed": 0}
    make_env = functools.partial(EnvPoolEnv, task.name, **options)
    ours = alive.enter_context(contextlib.closing(_Ring(task, make_env, extra)))
    peer, missing = None, None
    try:
        theirs = torchrl_collector.SharedReplayCollector(
            make_env, _policy(task), streams=task.streams, slots=REPLAY_SLOTS
        )
        alive.callback(theirs.close)
        peer = Candidate(_metered(theirs.collect, rows, extra, "peer_rows_s"))
    except PeerUnavailableError as error:
        missing = str(error)
    others = {}
    with contextlib.suppress(PeerUnavailableError):
        ringed = motrixlab_collector.RingedCollector(
            {"task_id": task.name, **options}, _network(task), slots=REPLAY_SLOTS, drain_every=DRAIN_EVERY_S
        )
        alive.callback(ringed.close)
        others[motrixlab.name("Collector, drained by its Learner")] = Candidate(
            _metered(ringed.collect, rows, extra, "motrixlab_rows_s")
        )
    return Comparison(
        config=f"{task.name}, {task.streams} streams",
        ours=Candidate(_metered(ours.collect, rows, extra, "ours_rows_s")),
        limit_name="bare loop: EnvPool and the network in one process, no replay",
        limit=Candidate(_metered(bare.collect, rows, extra, "limit_rows_s")),
        peer_name=torchrl_collector.name(),
        peer=peer,
        peer_missing=missing,
        others=others,
        extra=extra,
    )


def _network(task: Task) -> nn.Module:
    return nn.Sequential(
        nn.Linear(task.observation, 256),
        nn.Tanh(),
        nn.Linear(256, 256),
        nn.Tanh(),
        nn.Linear(256, task.action),
        nn.Tanh(),
    )


def _policy(task: Task) -> TensorDictModule:
    return TensorDictModule(_network(task), in_keys=["observation"], out_keys=["action"])


def _metered(collect: Callable[[int], None], rows: int, extra: dict[str, Any], name: str) -> Callable[[object], None]:
    """Returns the timed call, which also keeps the median of its own rows per second in the report."""
    rates: list[float] = []

    def run(_: object) -> None:
        start = time.perf_counter()
        collect(rows)
        rates.append(rows / (time.perf_counter() - start))
        extra[name] = round(statistics.median(rates), 1)

    return run


class _Bare:
    """The least that anybody must do: act, step, forget."""

    def __init__(self, task: Task) -> None:
        import envpool

        self._streams, self._network = task.streams, _network(task)
        self._pool = envpool.make(
            task.name, env_type="gymnasium", num_envs=task.streams, num_threads=ENV_THREADS, seed=0
        )
        self._observation, _ = self._pool.reset()
        specs = self._pool.spec.action_array_spec
        name = next(name for name in specs if name not in ("env_id", "players.env_id"))
        self._action = np.zeros((task.streams, task.action), dtype=specs[name].dtype)
        # Given the ids, the pool need not infer them in every step: ``step`` would.
        ids = np.arange(task.streams, dtype=np.int32)
        self._message = {name: self._action, "env_id": ids, "players.env_id": ids}

    @torch.inference_mode()
    def collect(self, rows: int) -> None:
        """Steps until there were so many rows."""
        pool, network, action, message = self._pool, self._network, self._action, self._message
        observation = self._observation
        for _ in range(rows // self._streams):
            action[...] = network(torch.from_numpy(observation.astype(np.float32, copy=False))).numpy()
            pool.send(message)
            observation = pool.recv()[0]
        self._observation = observation

    def rows_in(self, seconds: float) -> int:
        """Returns how many rows, whole steps, are made in so many seconds."""
        steps, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < min(CALIBRATION, seconds):
            self.collect(10 * self._streams)
            steps += 10
        return max(1, round(steps * seconds / elapsed)) * self._streams

    def close(self) -> None:
        """Ends the pool's threads."""
        self._pool = None


class _Ring:
    """A :class:`RingCollector` that rests at its credit between two calls."""

    def __init__(self, task: Task, make_env: Callable[[], EnvPoolEnv], extra: dict[str, Any]) -> None:
        self._extra, self._rows = extra, 0
        self._collector = RingCollector(
            make_env,
            _policy(task),
            frames_per_batch=task.streams,
            replay_buffer=SlotReplayBuffer(storage=SlotStorage(REPLAY_SLOTS, task.streams)),
        )
        self._collector.hold_at(0)

    def collect(self, rows: int) -> None:
        """Grants so many rows and drains them."""
        collector, wanted = self._collector, self._rows + rows
        collector.hold_at(wanted)
        while self._rows < wanted:
            time.sleep(DRAIN_EVERY_S)
            self._rows += collector.drain()
        stages = collector.collected.timings()[0]
        # Without "wait": it counts the rest between two calls.
        self._extra["ours_stages_us"] = {key: round(s * 1e6, 1) for key, s in stages.items() if key != "wait"}

    def close(self) -> None:
        """Ends the worker."""
        self._collector.shutdown()
