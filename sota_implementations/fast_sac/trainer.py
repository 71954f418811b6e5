# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The trainer: rows come in, the gradient steps that are due are taken, again."""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path

import torch
from curves import draw_curve
from env_factory import choose_backend
from evaluation import evaluate
from pacing import Pacing
from progress import Progress
from records import Records
from run_state import RunState
from settings import Settings
from sources import AsyncSource, make_source
from utils import (
    EVAL_SEED_OFFSET,
    Every,
    StopSignal,
    make_device,
    make_eval_env,
    make_governor,
    make_learner,
    make_replay,
    make_train_env,
    mean,
    seed_everything,
)


class Run:
    """One training run: built from its settings, trained, evaluated, closed."""

    def __init__(self, settings: Settings, folder: Path, *, title: str, overrides: list[str]) -> None:
        self.settings, self.folder, self.title = settings, folder, title
        device = make_device(settings.device)
        if settings.torch_threads is not None:
            torch.set_num_threads(settings.torch_threads)
        if device.type == "cuda":
            # What autocast leaves in float32 goes through tensor cores too.
            torch.set_float32_matmul_precision("high")
        seed_everything(settings.seed)
        self.progress = Progress(
            title=title,
            folder=folder,
            total_frames=settings.total_frames,
            time_budget=settings.time_budget,
            print_every=settings.log.print_every,
            devices=[device],
        )
        try:
            self._build(device)
        except BaseException:
            self.progress.close()  # so that what is wrong is said on the terminal
            raise
        self._note = ""
        per_row = settings.learner.updates_per_step / settings.env.num_envs
        self._values: dict[str, float] = {"utd/requested": per_row}
        self._announce(overrides)

    def _build(self, device: torch.device) -> None:
        settings = self.settings
        env = make_train_env(settings)
        learner = make_learner(settings, env, device)
        self.source = make_source(settings, env, learner)
        replay = make_replay(settings, self.source.layout, device)
        self.state = RunState(task=settings.env.task, learner=learner, governor=make_governor(settings), replay=replay)
        history = None if settings.resume_from is None else self.state.load(settings.resume_from)
        # Workers start from the weights of the checkpoint, and from the panel's way of standard output.
        self.source.fill(replay)
        self.source.load_state_dict(self.state.source)
        self.pacing = Pacing(settings, asynchronous=isinstance(self.source, AsyncSource), device=device)
        self.eval_env = make_eval_env(settings)
        self.records = Records(self.folder, settings.log.backends, history)

    def _announce(self, overrides: list[str]) -> None:
        settings, say = self.settings, self.progress.say
        env, learner, counters = settings.env, settings.learner, self.state.counters
        say(f"{self.title}: {env.task} ({choose_backend(env)}), {env.num_envs} streams, {self.state.device}")
        say(f"overrides: {' '.join(overrides) or 'none'}")
        per_row = learner.updates_per_step / env.num_envs
        gate = settings.collector.learning_starts
        say(
            f"update ratio: {learner.updates_per_step:g} gradient steps per vector step of {env.num_envs} rows, "
            f"{per_row:g} per row, {per_row * learner.batch_size:g} replayed rows per collected row; none below "
            f"{gate} rows, where {settings.collector.warm_up_actions} actions are taken"
        )
        if settings.total_frames is not None:
            expected = self.state.governor.expected(settings.total_frames)
            say(f"expected updates: {expected} after {settings.total_frames} frames")
        else:
            say(f"expected updates: {per_row:g} per row after warm-up, for {settings.time_budget:g} s of training")
        if settings.resume_from is not None:
            say(
                f"resumed from {settings.resume_from}: {counters.frames} frames, {self.state.governor.updates} "
                f"updates, {len(self.state.replay)} rows in the replay"
            )
        say(f"writes to {self.folder}")

    def train(self, stop: StopSignal) -> None:
        """Collects and learns until a budget is used up or a signal came."""
        settings, counters = self.settings, self.state.counters
        should_log = Every(settings.log.every, counters.frames)
        should_evaluate = Every(settings.eval.every, counters.frames)
        should_save = Every(settings.checkpoint.every, counters.seconds)
        # Before the clock: EnvPool needs about 40 s to load the models of 1,024 robots.
        self.source.start()
        started = time.monotonic() - counters.seconds
        metrics: dict[str, torch.Tensor] = {}
        while not stop.count and not self._is_done():
            metrics = self.step() or metrics
            counters.seconds = time.monotonic() - started
            if should_log(counters.frames):
                self._log(metrics)
            if should_evaluate(counters.frames) and not self._is_done():
                self.evaluate(stop)
                counters.seconds = time.monotonic() - started
            if should_save(counters.seconds):
                self.save(with_replay=settings.checkpoint.replay)
            self._show()
            if self.progress.should_quit and not stop.count:
                signal.raise_signal(signal.SIGINT)  # q is one Ctrl-C
        self._log(metrics)
        self._show()

    def step(self) -> dict[str, torch.Tensor]:
        """Stores what was collected, takes the gradient steps that are due; returns the metrics of the last one."""
        state, source, pacing = self.state, self.source, self.pacing
        learning = state.governor.is_open(state.counters.frames)
        source.credit(pacing.credit(state.counters.frames, behind=state.governor.due(state.counters.frames)))
        rows = source.feed(learnt=state.learner.updates > 0, learning=learning)
        state.counters.frames += rows
        due = pacing.due(state.governor, state.counters.frames)
        if not rows and not due:
            pacing.wait()
            return {}
        with pacing.learning():
            metrics = state.learner.update_from(state.replay, due)
        state.governor.count(due)
        source.publish(state.learner.updates)
        return metrics

    def _is_done(self) -> bool:
        settings, counters = self.settings, self.state.counters
        by_frames = settings.total_frames is not None and counters.frames >= settings.total_frames
        if by_frames and self.state.governor.due(counters.frames):
            return False  # none is lost at the end
        return by_frames or (settings.time_budget is not None and counters.seconds >= settings.time_budget)

    def _log(self, metrics: dict[str, torch.Tensor]) -> None:
        counters = self.state.counters
        # The only reads of the device; a log interval apart, so that they cost nothing.
        values = {f"learner/{name}": float(value.float().mean()) for name, value in metrics.items()}
        lost = [name for name, value in values.items() if not math.isfinite(value)]
        if lost:
            raise RuntimeError(
                f"fast_sac: metrics must be finite, got none at {lost} after {self.state.governor.updates} updates; "
                "training was stopped and the last checkpoint kept."
            )
        returns, lengths = self.source.episodes()
        counters.episodes += len(returns)
        if returns:
            value = mean(returns)
            values["train/return"] = value
            values["train/length"] = mean(lengths)
            self.records.point("train", frames=counters.frames, seconds=counters.seconds, value=value)
            self.progress.point("train/return", counters.frames, value)
            self._note = f"return {value:,.1f}"
        values |= self.source.metrics() | self.pacing.metrics()
        values |= {"updates": self.state.governor.updates, "episodes": counters.episodes, "seconds": counters.seconds}
        self._values |= values
        self.records.write(values, frames=counters.frames)

    def _show(self) -> None:
        counters, updates = self.state.counters, self.state.governor.updates
        self.progress.update(
            seconds=counters.seconds, frames=counters.frames, updates=updates, metrics=self._values, note=self._note
        )

    def evaluate(self, stop: StopSignal) -> float | None:
        """Evaluates, logs, keeps the best checkpoint; returns the mean return, None when a signal came."""
        settings, counters = self.settings, self.state.counters
        result = evaluate(
            self.eval_env,
            self.state.learner.policy,
            seed=settings.seed + EVAL_SEED_OFFSET,
            max_steps=settings.eval.max_steps,
            device=self.state.device,
            should_stop=lambda: stop.count > 0 or self.progress.should_quit,
        )
        # Its pool's threads and memory are not needed until the next one.
        if hasattr(self.eval_env, "task_id"):
            self.eval_env.close()
        if result is None:
            return None
        best = self.records.best()
        values = {"eval/return": result.mean, "eval/length": result.mean_length, "eval/worst": min(result.returns)}
        self.records.write(values, frames=counters.frames)
        self._values["eval/return"] = result.mean
        self.progress.point("eval/return", counters.frames, result.mean)
        self.records.point("eval", frames=counters.frames, seconds=counters.seconds, value=result.mean)
        self.progress.say(
            f"evaluation at {counters.frames} frames: mean return {result.mean:.1f} over {len(result.returns)} "
            f"episodes (worst {min(result.returns):.1f}, best {max(result.returns):.1f})"
        )
        if result.mean > best:
            self._save_as("best", with_replay=False)
        return result.mean

    def save(self, *, with_replay: bool) -> None:
        """Writes ``last.pt`` and the learning curve."""
        self._save_as("last", with_replay=with_replay)
        draw_curve(self.records.history, self.folder / "learning_curve.png", title=f"FastSAC, {self.settings.env.task}")

    def _save_as(self, name: str, *, with_replay: bool) -> None:
        path = self.folder / "checkpoints" / f"{name}.pt"
        self.state.source = self.source.state_dict()
        self.state.save(path, history=self.records.history, with_replay=with_replay)

    def report(self, final_return: float | None) -> None:
        """Says what was reached."""
        counters, governor = self.state.counters, self.state.governor
        expected = governor.expected(counters.frames)
        ratio = governor.updates / expected if expected else 1.0
        self.progress.say(
            f"updates: {governor.updates} measured, {expected} expected for {counters.frames} frames "
            f"(ratio {ratio:.4f})"
        )
        reached = "not evaluated" if final_return is None else f"final mean return {final_return:.1f}"
        self.progress.say(f"{reached}; {counters.frames} frames, {counters.seconds:.1f} s of training, {self.folder}")

    def close(self) -> None:
        """Ends threads and processes, closes files; may be called twice."""
        self.progress.close()
        self.source.close()
        if not self.eval_env.is_closed:
            self.eval_env.close()
        self.records.close()
