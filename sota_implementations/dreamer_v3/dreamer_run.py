# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""One run: rows come in, the updates that are due are taken, latents go back, again."""

from __future__ import annotations

import contextlib
import math
import time
from functools import partial
from pathlib import Path

import torch
from dreamer_envs import OBSERVATION, carry, evaluate, make_env, spaces_of
from dreamer_learner import Learner
from dreamer_networks import make_networks
from dreamer_progress import Progress
from dreamer_replay import ROW_KEYS, WriteBacks, make_replay, row_layout
from dreamer_settings import Settings
from dreamer_shared import (
    EVAL_SEED_OFFSET,
    Every,
    Records,
    StopSignal,
    draw_curve,
    make_device,
    mean,
    seed_everything,
)
from dreamer_state import Counters, RunState
from tensordict import TensorDictBase
from torchrl.envs.utils import ExplorationType

from torchrl_ext.collectors import RingCollector
from torchrl_ext.trainers import UpdateGovernor

__all__ = ["Run"]

_PAUSE = 2e-4


class Run:
    """A training run: built from its settings, trained, evaluated, closed.

    Args:
        settings (Settings): everything that it depends on.
        folder (Path): where it writes.

    Keyword Args:
        title (str): of its first line.
        overrides (list of str): of the command line, to be echoed.

    Raises:
        ValueError, ImportError, FileNotFoundError, MemoryError: for what cannot be; nothing is left running.
    """

    def __init__(self, settings: Settings, folder: Path, *, title: str, overrides: list[str]) -> None:
        self.settings, self.folder, self.title = settings, folder, title
        self.device = make_device(settings.device)
        if settings.torch_threads is not None:
            torch.set_num_threads(settings.torch_threads)
        if self.device.type == "cuda":
            # What autocast leaves in float32 goes through tensor cores too.
            torch.set_float32_matmul_precision("high")
        seed_everything(settings.seed)
        self.governor = make_governor(settings)
        self._note, self._metrics = "", None
        with contextlib.ExitStack() as made:
            self.progress = Progress(total_frames=settings.total_frames, print_every=settings.log.print_every)
            made.callback(self.progress.close)
            self.eval_env = make_env(settings.env, num_envs=settings.eval.episodes, seed=settings.seed)
            made.callback(self._close_eval_env)
            spaces = spaces_of(self.eval_env, settings.env)
            networks = make_networks(settings.networks, spaces, self.device)
            self.policy = networks.policy
            carry(self.eval_env, self.policy.carried)
            self.learner = Learner(
                networks, settings.learner, settings.networks, pixels=spaces.pixels, device=self.device
            )
            layout = row_layout(self.eval_env, self.policy.latents)
            self.replay = make_replay(settings, layout, self.device)
            made.callback(self.replay.shutdown)
            self.write_backs = WriteBacks(self.replay)
            self.state = RunState(
                task=settings.env.task,
                num_envs=settings.env.num_envs,
                learner=self.learner,
                governor=self.governor,
                replay=self.replay,
            )
            history = None if settings.resume_from is None else self.state.load(settings.resume_from)
            # Workers start from the weights of the checkpoint.
            self.collector = self._make_collector()
            made.callback(self.collector.shutdown)
            if self.state.collector:
                # It begins new episodes and cuts the streams.
                self.collector.load_state_dict(self.state.collector)
            self.records = Records(folder, settings.log.backends, history)
            made.callback(self.records.close)
            self._made = made.pop_all()
        self._announce(overrides)

    def _make_collector(self) -> RingCollector:
        settings, options = self.settings, self.settings.collector
        collector = RingCollector(
            partial(make_env, settings.env, seed=settings.seed, carried=self.policy.carried),
            self.policy,
            num_workers=options.num_workers,
            num_streams=settings.env.num_envs,
            frames_per_batch=settings.env.num_envs,
            replay_buffer=self.replay,
            observation_keys=[OBSERVATION],
            extra_keys=ROW_KEYS,
            exploration_type=ExplorationType.RANDOM,
            transport=options.transport,
            ring_slots=options.ring_slots,
            num_threads=options.policy_threads,
            seed=settings.seed,
            stall_timeout=options.stall_timeout,
            max_restarts=options.max_restarts,
        )
        collector.hold_at(0)
        return collector

    def _announce(self, overrides: list[str]) -> None:
        settings, say = self.settings, self.progress.say
        env, learner = settings.env, settings.learner
        say(
            f"{self.title}: {env.task}, {env.num_envs} streams, {self.learner.num_parameters:,} parameters, "
            f"{self.device}"
        )
        say(f"overrides: {' '.join(overrides) or 'none'}")
        say(
            f"train ratio: {learner.train_ratio:g} replayed steps per collected step, in batches of "
            f"{learner.batch_size} x {learner.seq_len}: {learner.updates_per_row:g} updates per step; none below "
            f"{settings.collector.learning_starts} steps"
        )
        say(
            f"expected updates: {self.governor.expected(settings.total_frames)} after {settings.total_frames} frames "
            f"({settings.total_frames} x {learner.train_ratio:g} / {learner.batch_size * learner.seq_len} = "
            f"{settings.total_frames * learner.updates_per_row:g} less those of the warm-up)"
        )
        if settings.resume_from is not None:
            say(
                f"resumed from {settings.resume_from}: {self.counters.frames} frames, {self.governor.updates} updates, "
                f"{len(self.replay)} rows in the replay"
            )
        say(f"writes to {self.folder}")

    @property
    def counters(self) -> Counters:
        """Where the run stands."""
        return self.state.counters

    # Training

    def train(self, stop: StopSignal) -> None:
        """Collects and learns until all frames and their updates are done or a signal came."""
        settings, counters = self.settings, self.counters
        should_log = Every(settings.log.every, counters.frames)
        should_evaluate = Every(settings.eval.every, counters.frames)
        should_save = Every(settings.checkpoint.every, counters.seconds)
        started = time.monotonic() - counters.seconds
        while not stop.count and not self._is_done():
            self.step()
            counters.seconds = time.monotonic() - started
            if should_log(counters.frames):
                self._log()
            if should_evaluate(counters.frames) and not self._is_done():
                self.evaluate(stop)
            if should_save(counters.seconds):
                self.save(with_replay=settings.checkpoint.replay)
            self._show()
        self._log()
        self._show(final=True)

    def step(self) -> None:
        """Stores what was collected, and takes at most ``publish_every`` of the updates that are due."""
        settings, counters, governor = self.settings, self.counters, self.governor
        rows = self.collector.drain()
        counters.frames += rows
        due = governor.due(counters.frames)
        # Workers go on while the updates of one vector step are taken, and wait when more are owed.
        ahead = settings.collector.max_ahead if due <= max(1, math.ceil(governor.ratio)) else 0
        limit = counters.frames + ahead * settings.env.num_envs
        self.collector.hold_at(min(limit, settings.total_frames))
        if not rows and not due:
            time.sleep(_PAUSE)
            return
        for _ in range(min(due, settings.collector.publish_every)):
            self._metrics = self.update()
            governor.count()
        if due:
            self.collector.update_policy_weights_(self.policy)

    def update(self) -> TensorDictBase:
        """Takes one update and submits its latents; returns its metrics."""
        shape = (self.settings.learner.batch_size, self.settings.learner.seq_len + 1)
        if not self.learner.is_warm:
            self.write_backs.settle()
            with self.collector.pause():
                self.learner.warm_up(self.replay.sample())
        sample = self.replay.sample()
        assert tuple(sample.shape) == shape
        metrics, state, belief = self.learner.update(sample)
        self.write_backs.submit(sample, state, belief)
        return metrics

    def _is_done(self) -> bool:
        frames = self.counters.frames
        return frames >= self.settings.total_frames and not self.governor.due(frames)

    # Telling

    def _log(self) -> None:
        counters = self.counters
        # The only reads of the device; a log interval apart.
        metrics = {} if self._metrics is None else self._metrics
        values = {f"learner/{name}": float(value.float().mean()) for name, value in metrics.items()}
        lost = [name for name, value in values.items() if not math.isfinite(value)]
        if lost:
            raise RuntimeError(
                f"dreamer_v3: metrics must be finite, got none at {lost} after {self.governor.updates} updates; "
                "training was stopped and the last checkpoint kept."
            )
        ended = self.collector.collected.pop_episodes()
        counters.episodes += len(ended)
        if len(ended):
            value = mean(ended["return"].tolist())
            values["train/return"], values["train/length"] = value, mean(ended["length"].tolist())
            self.records.point("train", frames=counters.frames, seconds=counters.seconds, value=value)
            self._note = f"return {value:,.1f}"
        lag, _ = self.collector.collected.pop_policy_lag()
        values |= self.write_backs.metrics()
        values |= {
            "collector/policy_lag": lag,
            "train_ratio": self.train_ratio,
            "updates": self.governor.updates,
            "episodes": counters.episodes,
            "seconds": counters.seconds,
        }
        self.records.write(values, frames=counters.frames)

    @property
    def train_ratio(self) -> float:
        """Replayed steps per collected step so far, those of the warm-up left out."""
        learner, counted = self.settings.learner, self.counters.frames - self.governor.warm_up_rows
        replayed = self.governor.updates * learner.batch_size * learner.seq_len
        return replayed / counted if counted > 0 else 0.0

    def _show(self, *, final: bool = False) -> None:
        counters, updates = self.counters, self.governor.updates
        self.progress.update(
            seconds=counters.seconds, frames=counters.frames, updates=updates, note=self._note, final=final
        )

    def evaluate(self, stop: StopSignal) -> float | None:
        """Evaluates, logs, keeps the best checkpoint; returns the mean return, None when a signal came."""
        settings, counters = self.settings, self.counters
        returns = evaluate(
            self.eval_env,
            self.policy,
            seed=settings.seed + EVAL_SEED_OFFSET,
            max_steps=settings.eval.max_steps,
            device=self.device,
            in_keys=self.policy.in_keys,
            should_stop=lambda: stop.count > 0,
        )
        if returns is None:
            return None
        value, best = mean(returns), self.records.best()
        self.records.write({"eval/return": value, "eval/worst": min(returns)}, frames=counters.frames)
        self.records.point("eval", frames=counters.frames, seconds=counters.seconds, value=value)
        self.progress.say(
            f"evaluation at {counters.frames} frames: mean return {value:.1f} over {len(returns)} episodes "
            f"(worst {min(returns):.1f}, best {max(returns):.1f})"
        )
        if value > best:
            self._save_as("best", with_replay=False)
        return value

    def report(self, final_return: float | None) -> None:
        """Says what was reached."""
        counters, governor, say = self.counters, self.governor, self.progress.say
        expected = governor.expected(counters.frames)
        share = governor.updates / expected if expected else 1.0
        say(
            f"updates: {governor.updates} measured, {expected} expected for {counters.frames} frames "
            f"(ratio {share:.4f})"
        )
        say(f"train ratio: {self.train_ratio:.2f} measured, {self.settings.learner.train_ratio:g} set")
        rows = self.write_backs.rows
        say(f"write-back: {self.write_backs.submitted} updates, rows {', '.join(f'{n} {c}' for n, c in rows.items())}")
        reached = "not evaluated" if final_return is None else f"final mean return {final_return:.1f}"
        say(f"{reached}; {counters.frames} frames, {counters.seconds:.1f} s of training, {self.folder}")

    # Saving

    def save(self, *, with_replay: bool) -> None:
        """Writes ``last.pt`` and the learning curve."""
        self._save_as("last", with_replay=with_replay)
        title = f"DreamerV3, {self.settings.env.task}"
        draw_curve(self.records.history, self.folder / "learning_curve.png", title=title)

    def _save_as(self, name: str, *, with_replay: bool) -> None:
        self.write_backs.settle()  # what is saved has all latents
        self.state.collector = dict(self.collector.state_dict())
        path = self.folder / "checkpoints" / f"{name}.pt"
        self.state.save(path, history=self.records.history, with_replay=with_replay)

    # End

    def _close_eval_env(self) -> None:
        if not self.eval_env.is_closed:
            self.eval_env.close()

    def close(self) -> None:
        """Ends threads and processes, closes files; may be called twice.

        Raises:
            RuntimeError: if a write-back failed that nothing waited for. Everything is closed then.
        """
        try:
            self.write_backs.settle()
        finally:
            self._made.close()


def make_governor(settings: Settings) -> UpdateGovernor:
    """Makes the governor: ``train_ratio / (batch_size * seq_len)`` updates per row, counted by vector steps."""
    streams = settings.env.num_envs
    return UpdateGovernor(
        settings.learner.updates_per_row * streams,
        rows_per_step=streams,
        learning_starts=settings.collector.learning_starts,
    )
