# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The trainer: rows come in, the gradient steps that are due are taken, again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common.env_factory import choose_backend
from common.run_state import RunState
from common.training_run import TrainingRun
from pacing import Pacing
from sources import AsyncSource, make_source
from utils import make_eval_env, make_governor, make_learner, make_replay, make_train_env


@dataclass(kw_only=True)
class FastSACState(RunState):
    """What a FastSAC run goes on from."""

    kind = "torchrl_ext.fast_sac/1"


class Run(TrainingRun):
    """One training run of FastSAC."""

    name, label = "fast_sac", "FastSAC"

    def build(self, made: contextlib.ExitStack) -> dict[str, Any] | None:
        """See :class:`TrainingRun`."""
        settings = self.settings
        env = make_train_env(settings)
        made.callback(_close, env)
        learner = make_learner(settings, env, self.device)
        self.source = make_source(settings, env, learner)
        made.callback(self.source.close)
        replay = make_replay(settings, self.source.layout, self.device)
        self.state = FastSACState(
            task=settings.env.task, learner=learner, governor=make_governor(settings), replay=replay
        )
        history = None if settings.resume_from is None else self.state.load(settings.resume_from)
        # Workers start from the weights of the checkpoint.
        saved, frames = self.state.source, self.counters.frames
        empty_at = self.state.governor.state_dict()["base_rows"]
        warm_up = empty_at + settings.collector.learning_starts - frames
        self.source.fill(replay, warm_up=warm_up, counted=saved.get("frames", 0))
        self.source.load_state_dict(saved, frames=frames)
        self.pacing = Pacing(settings, asynchronous=isinstance(self.source, AsyncSource), empty_at=empty_at)
        self.eval_env, self.eval_policy = make_eval_env(settings), learner.policy
        made.callback(_close, self.eval_env)
        return history

    def announcement(self, overrides: list[str]) -> list[str]:
        """See :class:`TrainingRun`."""
        settings = self.settings
        env, learner, counters = settings.env, settings.learner, self.counters
        per_row = learner.updates_per_step / env.num_envs
        gate = settings.collector.learning_starts
        lines = [
            f"{self.title}: {env.task} ({choose_backend(env)}), {env.num_envs} streams, {self.device}",
            f"overrides: {' '.join(overrides) or 'none'}",
            f"update ratio: {learner.updates_per_step:g} gradient steps per vector step of {env.num_envs} rows, "
            f"{per_row:g} per row, {per_row * learner.batch_size:g} replayed rows per collected row; none below "
            f"{gate} rows, where {settings.collector.warm_up_actions} actions are taken",
        ]
        if settings.total_frames is not None:
            expected = self.state.governor.expected(settings.total_frames)
            lines.append(f"expected updates: {expected} after {settings.total_frames} frames")
        else:
            lines.append(
                f"expected updates: {per_row:g} per row after warm-up, for {settings.time_budget:g} s of training"
            )
        if settings.resume_from is not None:
            lines.append(
                f"resumed from {settings.resume_from}: {counters.frames} frames, {self.state.governor.updates} "
                f"updates, {len(self.state.replay)} rows in the replay"
            )
        return [*lines, f"writes to {self.folder}"]

    def constants(self) -> dict[str, float]:
        """See :class:`TrainingRun`."""
        return {"utd/requested": self.settings.learner.updates_per_step / self.settings.env.num_envs}

    def begin(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Resets the streams (EnvPool loads the models of 1,024 robots in about 40 s) and compiles gradient steps (80 s
        the first time), side by side where the streams are in worker processes.
        """
        first, total = self.counters.frames + self.settings.env.num_envs, self.settings.total_frames
        self.source.credit(first if total is None else min(first, total))
        self._prepare()
        self.counters.frames += self.source.start(should_stop)

    def is_done(self) -> bool:
        """See :class:`TrainingRun`; rows that cannot be sampled owe no update."""
        frames, total = self.counters.frames, self.settings.total_frames
        return super().is_done() or (total is not None and frames >= total and self.pacing.is_young(frames))

    def _prepare(self) -> None:
        learner, settings = self.state.learner, self.settings
        if learner.cuda_graph:
            # There are no rows yet; compiled code does not care what they hold, nor how many there are.
            layout, slots = self.source.layout, settings.learner.n_steps + 2
            replay = make_replay(settings, layout, self.device, capacity=slots)
            rows = torch.zeros(slots, settings.env.num_envs, layout.row_bytes, dtype=torch.uint8)
            replay.extend_batch(layout.view(rows))
            learner.prepare(replay)

    def step(self) -> dict[str, torch.Tensor]:
        """Stores what was collected, takes the gradient steps that are due; returns the metrics of the last one."""
        state, source, pacing = self.state, self.source, self.pacing
        learning = state.governor.is_open(state.counters.frames)
        source.credit(pacing.credit(state.counters.frames, behind=state.governor.due(state.counters.frames)))
        rows, total = 0, self.settings.total_frames
        if total is None or state.counters.frames < total:  # else updates are owed alone
            with self.time.stage(source.stage):
                rows = source.feed(learnt=state.learner.updates > 0, learning=learning)
        state.counters.frames += rows
        due = pacing.due(state.governor, state.counters.frames)
        if not rows and not due:
            source.publish(state.learner.updates)  # what had to wait for the weights before
            self.time.wait()
            return {}
        with self.time.learning():
            metrics = self._update(due)
        state.governor.count(due)
        with self.time.stage("publish"):
            source.publish(state.learner.updates)
        return metrics

    def _update(self, due: int) -> dict[str, torch.Tensor]:
        learner, replay, metrics = self.state.learner, self.state.replay, {}
        if learner.cuda_graph and due:
            # Sampling is part of the graph.
            with self.time.updating(due):
                return learner.update_from(replay, due)
        for _ in range(due):
            with self.time.stage("sample"):
                batch = replay.sample()
            with self.time.updating(1):
                metrics = learner.update(batch)
        return metrics

    def episodes(self) -> tuple[list[float], list[int]]:
        """See :class:`TrainingRun`."""
        return self.source.episodes()

    def measures(self, *, keep: bool) -> dict[str, float]:
        """See :class:`TrainingRun`."""
        return self.source.metrics(keep=keep)

    def source_state(self) -> dict[str, Any]:
        """See :class:`TrainingRun`."""
        return self.source.state_dict()


def _close(env: Any) -> None:
    if not env.is_closed:
        env.close()
