# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Where rows come from: steps of this process, or workers that never wait for the learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from common.env_factory import make_env
from common.ring_feed import RingFeed, ring_options
from settings import Settings
from torchrl.envs import EnvBase
from utils import observation_keys

from torchrl_ext.collectors import (
    PackedRunCollector,
    RingCollector,
    RunCollector,
    UniformPolicy,
    record_layout,
)
from torchrl_ext.data import RowLayout, SlotReplayBuffer
from torchrl_ext.envs import EnvPoolEnv
from torchrl_ext.trainers import FastSACLearner

__all__ = ["AsyncSource", "Source", "SyncSource", "make_source"]


class Source(Protocol):
    """Fills the replay and tells of episodes."""

    stage: str
    """The learner's time that :meth:`feed` takes."""

    def fill(self, replay: SlotReplayBuffer, *, warm_up: int, counted: int) -> None:
        """Takes the replay that is to be filled.

        Keyword Args:
            warm_up (int): rows to come before the gate opens.
            counted (int): rows that its collector will count from, see :meth:`load_state_dict`.
        """

    def start(self, should_stop: Callable[[], bool] = lambda: False) -> int:
        """Resets the streams, which may take long; returns how many rows came with it, fewer when asked to stop."""

    def feed(self, *, learnt: bool, learning: bool) -> int:
        """Puts new rows into the replay and the observation statistics; returns how many, perhaps none."""

    def credit(self, frames: int | None) -> None:
        """Lets rows be collected up to a number in all; None takes the limit away."""

    def publish(self, updates: int) -> None:
        """Tells how many gradient steps the weights have seen."""

    def episodes(self) -> tuple[list[float], list[int]]:
        """Returns and lengths of the episodes that ended since the last call."""

    def metrics(self, *, keep: bool = False) -> dict[str, float]:
        """Numbers since the last call that did not ``keep`` them."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""

    def load_state_dict(self, state: dict[str, Any], *, frames: int) -> None:
        """Goes on from a checkpoint, at so many rows: episodes begin anew."""

    def close(self) -> None:
        """Ends threads and processes."""


class SyncSource:
    """Steps all streams between gradient steps."""

    stage = "collect"

    def __init__(self, settings: Settings, env: EnvBase, learner: FastSACLearner) -> None:
        options: dict[str, Any] = {
            "observation_keys": _stored_keys(settings, env),
            "num_steps": settings.collector.steps_per_run,
            "policy_device": learner.device,
        }
        kind = PackedRunCollector if isinstance(env, EnvPoolEnv) else RunCollector
        self.collector: PackedRunCollector | RunCollector = kind(env, learner.policy, **options)  # type: ignore[arg-type]
        self.layout: RowLayout = self.collector.layout
        self._learner = learner
        self._uniform = UniformPolicy(env.action_spec) if settings.collector.warm_up_actions == "uniform" else None
        self._rows = settings.env.num_envs * settings.collector.steps_per_run
        self._replay: SlotReplayBuffer | None = None

    def fill(self, replay: SlotReplayBuffer, *, warm_up: int, counted: int) -> None:
        """See :class:`Source`."""
        self._replay = replay

    def start(self, should_stop: Callable[[], bool] = lambda: False) -> int:
        """See :class:`Source`."""
        self.collector.start()
        return 0

    def feed(self, *, learnt: bool, learning: bool) -> int:
        """See :class:`Source`."""
        assert self._replay is not None
        # Only a policy that never learnt leaves the warm-up to uniform actions.
        warm_up = self._uniform if not learning and not learnt else None
        run: Any = self.collector.collect(warm_up)
        self._learner.observe(self.collector.observations(run))
        self._replay.extend_batch(run)
        return self._rows

    def credit(self, frames: int | None) -> None:
        """Nothing to do: a step is taken when it is asked for."""

    def publish(self, updates: int) -> None:
        """Nothing to do: the policy reads the learner's own parameters."""

    def episodes(self) -> tuple[list[float], list[int]]:
        """See :class:`Source`."""
        ended = self.collector.episodes.pop()
        return [episode.episode_return for episode in ended], [episode.length for episode in ended]

    def metrics(self, *, keep: bool = False) -> dict[str, float]:
        """See :class:`Source`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Source`."""
        return {}

    def load_state_dict(self, state: dict[str, Any], *, frames: int) -> None:
        """See :class:`Source`."""

    def close(self) -> None:
        """See :class:`Source`."""
        self.collector.close()


class AsyncSource(RingFeed):
    """Drains the rings of worker processes, and publishes weights to them by gradient steps elapsed."""

    def __init__(self, settings: Settings, env: EnvBase, learner: FastSACLearner) -> None:
        super().__init__(learner.policy, publish_every=settings.collector.publish_every)
        self._settings, self._learner = settings, learner
        self._keys = _stored_keys(settings, env)
        self.layout = record_layout(env, self._keys)
        env.close()

    def fill(self, replay: SlotReplayBuffer, *, warm_up: int, counted: int) -> None:
        """See :class:`Source`; starts the workers."""
        settings, options = self._settings, self._settings.collector
        threads, share = settings.env.num_threads, options.env_threads
        if share is None and threads is not None:
            share = max(1, threads // options.num_workers)
        factory = partial(make_env, settings.env, seed=settings.seed, num_threads=share, evaluate=False)
        # Only a policy that never learnt leaves the warm-up to uniform actions.
        is_uniform = options.warm_up_actions == "uniform" and warm_up > 0 and not self._learner.updates
        random_until = counted + warm_up if is_uniform else None
        collector = RingCollector(
            factory,
            self._learner.policy,
            num_streams=settings.env.num_envs,
            frames_per_batch=settings.env.num_envs,
            replay_buffer=replay,
            observation_keys=self._keys,
            init_random_frames=random_until,
            cores=options.cores,
            seed=settings.seed,
            post_collect_hook=self._learner.observe,
            **ring_options(options, self._learner.device),
        )
        self.attach(collector, updates=self._learner.updates)

    def start(self, should_stop: Callable[[], bool] = lambda: False) -> int:
        """Waits for the first step of every stream."""
        return self.begin(self._settings.total_frames, should_stop)

    def load_state_dict(self, state: dict[str, Any], *, frames: int) -> None:
        """See :class:`Source`; a seed is the command line's."""
        super().load_state_dict({**state, "seed": self._settings.seed} if state else state, frames=frames)

    def feed(self, *, learnt: bool, learning: bool) -> int:
        """See :class:`Source`."""
        return self.drain()


def _stored_keys(settings: Settings, env: EnvBase) -> Sequence[Any]:
    actor_keys, critic_keys = observation_keys(env, settings.env)
    return list(dict.fromkeys([*actor_keys, *critic_keys]))


def make_source(settings: Settings, env: EnvBase, learner: FastSACLearner) -> SyncSource | AsyncSource:
    """Makes the source that the settings ask for: ``async: null`` is asynchronous on CUDA."""
    wanted = settings.run_async
    if wanted is None:
        wanted = learner.device.type == "cuda" and torch.cuda.is_available()
    return AsyncSource(settings, env, learner) if wanted else SyncSource(settings, env, learner)
