# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""One run: rows come in, the updates that are due are taken, latents go back, again."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import Any

import torch
from common.devices import EVAL_SEED_OFFSET
from common.ring_feed import RingFeed, ring_options
from common.training_run import TrainingRun
from dreamer_envs import OBSERVATION, make_env, spaces_of
from dreamer_learner import Learner
from dreamer_networks import make_networks
from dreamer_replay import ROW_KEYS, WriteBacks, make_replay, row_layout
from dreamer_settings import Settings
from dreamer_state import DreamerState
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_ext.collectors import RingCollector
from torchrl_ext.trainers import UpdateGovernor

__all__ = ["Run", "make_governor"]


class Run(TrainingRun):
    """One training run of DreamerV3."""

    name, label = "dreamer_v3", "DreamerV3"

    def build(self, made: contextlib.ExitStack) -> dict[str, Any] | None:
        """See :class:`TrainingRun`."""
        settings, device = self.settings, self.device
        self.governor = make_governor(settings)
        self.eval_env = _make_eval_env(settings)
        made.callback(_close, self.eval_env)
        spaces = spaces_of(self.eval_env, settings.env)
        networks = make_networks(settings.networks, spaces, device)
        self.policy, self.eval_policy = networks.policy, networks.policy.twin()
        self.learner = Learner(networks, settings.learner, settings.networks, pixels=spaces.pixels, device=device)
        self.replay = make_replay(settings, row_layout(self.eval_env, self.policy.latents), device)
        made.callback(self.replay.shutdown)
        self.write_backs = WriteBacks(self.replay)
        self.state = DreamerState(
            task=settings.env.task,
            num_envs=settings.env.num_envs,
            learner=self.learner,
            governor=self.governor,
            replay=self.replay,
        )
        history = None if settings.resume_from is None else self.state.load(settings.resume_from)
        self.feed = RingFeed(self.policy, publish_every=1)
        made.callback(self.feed.close)
        # Workers start from the weights of the checkpoint.
        self.feed.attach(self._make_collector(), updates=self.governor.updates)
        # It begins new episodes and cuts the streams.
        self.feed.load_state_dict(self.state.source, frames=self.counters.frames)
        return history

    def _make_collector(self) -> RingCollector:
        settings = self.settings
        options = ring_options(settings.collector, self.device)
        return RingCollector(
            partial(make_env, settings.env, seed=settings.seed, num_threads=settings.env.num_threads, evaluate=False),
            self.policy,
            num_streams=settings.env.num_envs,
            frames_per_batch=settings.env.num_envs,
            replay_buffer=self.replay,
            observation_keys=[OBSERVATION],
            extra_keys=ROW_KEYS,
            seed=settings.seed,
            cudagraph_policy=settings.collector.captures_on(torch.device(options["policy_device"])),
            **options,
        )

    def announcement(self, overrides: list[str]) -> list[str]:
        """See :class:`TrainingRun`."""
        settings, governor = self.settings, self.governor
        env, learner, frames = settings.env, settings.learner, settings.total_frames
        lines = [
            f"{self.title}: {env.task}, {env.num_envs} streams, {self.learner.num_parameters:,} parameters, "
            f"{self.device}",
            f"overrides: {' '.join(overrides) or 'none'}",
            f"train ratio: {learner.train_ratio:g} replayed steps per collected step, in batches of "
            f"{learner.batch_size} x {learner.seq_len}: {learner.updates_per_row:g} updates per step; none below "
            f"{settings.collector.learning_starts} steps",
            f"expected updates: {governor.expected(frames)} after {frames} frames "
            f"({frames} x {learner.train_ratio:g} / {learner.batch_size * learner.seq_len} = "
            f"{frames * learner.updates_per_row:g} less those of the warm-up)",
        ]
        if settings.resume_from is not None:
            lines.append(
                f"resumed from {settings.resume_from}: {self.counters.frames} frames, {governor.updates} updates, "
                f"{len(self.replay)} rows in the replay"
            )
        return [*lines, f"writes to {self.folder}"]

    # Training

    def step(self) -> dict[str, torch.Tensor]:
        """Stores what was collected, and takes at most ``publish_every`` of the updates that are due."""
        settings, counters, governor = self.settings, self.counters, self.governor
        with self.time.stage("drain"):
            rows = self.feed.drain()
        counters.frames += rows
        due = governor.due(counters.frames)
        # Workers go on while the updates of one vector step are taken, and wait when more are owed; where one update is
        # worth several steps, those of the next one are made meanwhile.
        ahead = 0
        if due <= max(1, math.ceil(governor.ratio)):
            ahead = settings.collector.max_ahead * max(1, math.ceil(1 / governor.ratio))
        limit = counters.frames + ahead * settings.env.num_envs
        self.feed.credit(min(limit, settings.total_frames))
        if not rows and not due:
            self.feed.publish(governor.updates)  # what had to wait for the weights before
            self.time.wait()
            return {}
        metrics: TensorDictBase | None = None
        with self.time.learning():
            for _ in range(min(due, settings.collector.publish_every)):
                metrics = self.update()
                governor.count()
        with self.time.stage("publish"):
            self.feed.publish(governor.updates)
        return {} if metrics is None else dict(metrics.items())

    def update(self) -> TensorDictBase:
        """Takes one update and submits its latents; returns its metrics."""
        shape = (self.settings.learner.batch_size, self.settings.learner.seq_len + 1)
        if not self.learner.is_warm:
            self.write_backs.settle()
            with self.feed.collector.pause():
                self.learner.warm_up(self.replay.sample())
        with self.time.stage("sample"):
            sample = self.replay.sample()
        assert tuple(sample.shape) == shape
        with self.time.updating(1):
            metrics, state, belief = self.learner.update(sample)
        with self.time.stage("write_back"):
            self.write_backs.submit(sample, state, belief)
        return metrics

    # Telling

    @property
    def train_ratio(self) -> float:
        """Replayed steps per collected step since the warm-up, the last one where there were several."""
        learner, gate = self.settings.learner, self.governor.state_dict()
        counted = self.counters.frames - gate["base_rows"] - self.governor.warm_up_rows
        replayed = (self.governor.updates - gate["base_updates"]) * learner.batch_size * learner.seq_len
        return replayed / counted if counted > 0 else 0.0

    def constants(self) -> dict[str, float]:
        """See :class:`TrainingRun`."""
        learner = self.settings.learner
        return {"utd/requested": learner.updates_per_row, "train_ratio/requested": learner.train_ratio}

    def episodes(self) -> tuple[list[float], list[int]]:
        """See :class:`TrainingRun`."""
        return self.feed.episodes()

    def measures(self, *, keep: bool) -> dict[str, float]:
        """See :class:`TrainingRun`."""
        told = self.feed.metrics(keep=keep) | self.write_backs.metrics(keep=keep)
        return told | {"train_ratio": self.train_ratio}

    def conclusions(self) -> list[str]:
        """See :class:`TrainingRun`."""
        rows = ", ".join(f"{name} {count}" for name, count in self.write_backs.rows.items())
        return [
            f"train ratio: {self.train_ratio:.2f} measured, {self.settings.learner.train_ratio:g} set",
            f"write-back: {self.write_backs.submitted} updates, rows {rows}",
        ]

    # Saving, and the end

    def source_state(self) -> dict[str, Any]:
        """See :class:`TrainingRun`."""
        self.write_backs.settle()  # what is saved has all latents
        return self.feed.state_dict()

    def close(self) -> None:
        """Ends threads and processes, closes files; may be called twice.

        Raises:
            RuntimeError: if a write-back failed that nothing waited for. Everything is closed then.
        """
        try:
            self.write_backs.settle()
        finally:
            super().close()


def make_governor(settings: Settings) -> UpdateGovernor:
    """Makes the governor: ``train_ratio / (batch_size * seq_len)`` updates per row, counted by vector steps."""
    streams = settings.env.num_envs
    return UpdateGovernor(
        settings.learner.updates_per_row * streams,
        rows_per_step=streams,
        learning_starts=settings.collector.learning_starts,
    )


def _make_eval_env(settings: Settings) -> EnvBase:
    episodes, threads = settings.eval.episodes, settings.eval.num_threads
    seed = settings.seed + EVAL_SEED_OFFSET
    return make_env(settings.env, num_envs=episodes, seed=seed, num_threads=threads, evaluate=True)


def _close(env: EnvBase) -> None:
    if not env.is_closed:
        env.close()
