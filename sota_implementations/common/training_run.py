# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The loop of a training run: rows come in, the updates that are due are taken, and all of it is told and saved."""

from __future__ import annotations

import abc
import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torchrl.envs import EnvBase

from common.curves import draw_curve
from common.devices import EVAL_SEED_OFFSET, prepare
from common.evaluation import evaluate
from common.learner_time import LearnerTime
from common.loop_control import Every, StopSignal
from common.progress import Progress
from common.records import Records
from common.run_state import Counters, RunState, prepare_place
from common.telling import Telling
from torchrl_ext.envs import EnvPoolEnv

#: Seconds between two looks of the panel at what is measured.
_LOOK_EVERY = 2.0


class TrainingRun(abc.ABC):
    """One run: built from its settings, trained, evaluated, closed.

    A script says how it is built (:meth:`build`), what a step is (:meth:`step`) and where episodes end
    (:meth:`episodes`); :meth:`build` sets :attr:`state`, :attr:`eval_env` and :attr:`eval_policy`.

    Args:
        settings (Any): everything that it depends on.
        folder (Path): where it writes.

    Keyword Args:
        title (str): of the panel and the first line.
        overrides (list of str): of the command line, to be echoed.

    Raises:
        ValueError, KeyError, ImportError, OSError, MemoryError: for what cannot be; nothing is left running.
    """

    name: ClassVar[str]
    """In errors."""
    label: ClassVar[str]
    """In titles."""

    state: RunState
    eval_env: EnvBase
    eval_policy: Callable[[Any], Any]

    def __init__(self, settings: Any, folder: Path, *, title: str, overrides: list[str]) -> None:
        self.settings, self.folder, self.title = settings, folder, title
        self.time_budget: float | None = getattr(settings, "time_budget", None)
        self.device = prepare(settings.device, threads=settings.torch_threads, seed=settings.seed)
        self.time = LearnerTime(self.device)
        prepare_place(folder / "checkpoints")
        with contextlib.ExitStack() as made:
            # Before the workers, which inherit its way of standard output.
            self.progress = Progress(
                title=title,
                folder=folder,
                total_frames=settings.total_frames,
                time_budget=self.time_budget,
                print_every=settings.log.print_every,
                devices=[self.device],
            )
            made.callback(self.progress.close)
            self.telling = Telling(self.name, self.progress, self.time)
            history = self.build(made)
            self.records = self.telling.records = Records(folder, settings.log.backends, history)
            made.callback(self.records.close)
            self.telling.keep(self.constants())
            for line in self.announcement(overrides):
                self.progress.say(line)
            self._made = made.pop_all()

    # What a script is

    @abc.abstractmethod
    def build(self, made: contextlib.ExitStack) -> dict[str, Any] | None:
        """Makes the parts of the run and gives the stack what closes each; returns the history of a resumed run."""

    @abc.abstractmethod
    def announcement(self, overrides: list[str]) -> list[str]:
        """Returns the first lines: what is to be expected, and what was overridden."""

    @abc.abstractmethod
    def step(self) -> Mapping[str, torch.Tensor]:
        """Stores what was collected, takes updates that are due; returns the metrics of the last one, if any."""

    @abc.abstractmethod
    def episodes(self) -> tuple[list[float], list[int]]:
        """Returns and lengths of the training episodes that ended since the last call."""

    def begin(self, should_stop: Callable[[], bool] = lambda: False) -> None:  # noqa: B027  # not every run has to
        """Waits for what takes long and is no training, or until it is asked to stop."""

    def constants(self) -> dict[str, float]:
        """Returns numbers for the panel that stay."""
        return {}

    def measures(self, *, keep: bool) -> dict[str, float]:
        """Returns numbers on the host for panel (``keep``) and log."""
        return {}

    def source_state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of where the rows come from."""
        return {}

    def conclusions(self) -> list[str]:
        """Returns lines of the report."""
        return []

    # Training

    @property
    def counters(self) -> Counters:
        """Where the run stands."""
        return self.state.counters

    def train(self, stop: StopSignal) -> None:
        """Collects and learns until a budget is used up or a signal came."""
        settings, counters = self.settings, self.counters
        should_log = Every(settings.log.every, counters.frames)
        should_evaluate = Every(settings.eval.every, counters.frames)
        should_save = Every(settings.checkpoint.every, counters.seconds)
        should_look = Every(_LOOK_EVERY, counters.seconds)
        if not self.is_done():
            self.begin(lambda: stop.count > 0 or self.progress.should_quit)
        started = time.monotonic() - counters.seconds
        metrics: Mapping[str, torch.Tensor] = {}
        while not stop.count and not self.is_done():
            metrics = self.step() or metrics
            counters.seconds = time.monotonic() - started
            if should_log(counters.frames):
                self.log(metrics)
            if should_evaluate(counters.frames) and not self.is_done():
                self.telling.check(self.state.governor.updates, metrics)  # lost numbers are no best policy
                self.evaluate(stop)
                counters.seconds = time.monotonic() - started
            if should_save(counters.seconds):
                self.telling.check(self.state.governor.updates, metrics)  # a good checkpoint must not be overwritten
                self.save(with_replay=settings.checkpoint.replay, should_hurry=lambda: stop.count > 1)
                should_save.begin_anew(time.monotonic() - started)
            if should_look(counters.seconds):
                self.look()
            self.show()
            if self.progress.should_quit and not stop.count:
                signal.raise_signal(signal.SIGINT)  # q is one Ctrl-C
        self.log(metrics)
        self.show()

    def is_done(self) -> bool:
        """Whether a budget is used up, and no update is owed for its rows."""
        frames, total = self.counters.frames, self.settings.total_frames
        if total is not None and frames >= total:
            return not self.state.governor.due(frames)
        return self.time_budget is not None and self.counters.seconds >= self.time_budget

    def log(self, metrics: Mapping[str, torch.Tensor]) -> None:
        """Writes a line of metrics; the only time that the device is read."""
        self.telling.episodes(self.counters, *self.episodes())
        measures = self.measures(keep=False)
        self.telling.log(self.counters, self.state.governor.updates, metrics, measures)

    def look(self) -> None:
        """Has the panel know what is measured on the host, however seldom it is logged."""
        self.telling.episodes(self.counters, *self.episodes())
        self.telling.look(self.measures(keep=True))

    def show(self) -> None:
        """Has the panel know where the run stands."""
        self.telling.show(self.counters, self.state.governor.updates)

    # Telling

    def evaluate(self, stop: StopSignal) -> float | None:
        """Evaluates, logs, keeps the best checkpoint; returns the mean return, None when a signal came."""
        settings, counters = self.settings, self.counters
        result = evaluate(
            self.eval_env,
            self.eval_policy,
            seed=settings.seed + EVAL_SEED_OFFSET,
            max_steps=settings.eval.max_steps,
            device=self.device,
            should_stop=lambda: stop.count > 0 or self.progress.should_quit,
        )
        # Its pool's threads and memory are not needed until the next one.
        if isinstance(self.eval_env, EnvPoolEnv):
            self.eval_env.close()
        if result is None:
            return None
        if self.telling.evaluation(counters, result):
            self._save_as("best", with_replay=False)
        return result.mean

    def report(self, final_return: float | None) -> None:
        """Says what was reached."""
        counters, governor, say = self.counters, self.state.governor, self.progress.say
        expected = governor.expected(counters.frames)
        ratio = governor.updates / expected if expected else 1.0
        say(
            f"updates: {governor.updates} measured, {expected} expected for {counters.frames} frames "
            f"(ratio {ratio:.4f})"
        )
        for line in self.conclusions():
            say(line)
        reached = "not evaluated" if final_return is None else f"final mean return {final_return:.1f}"
        say(f"{reached}; {counters.frames} frames, {counters.seconds:.1f} s of training, {self.folder}")

    # Saving, and the end

    def save(self, *, with_replay: bool, should_hurry: Callable[[], bool] = lambda: False) -> None:
        """Writes ``last.pt`` and the learning curve; the replay is left out when it should hurry, now or meanwhile."""
        self._save_as("last", with_replay=with_replay, should_hurry=should_hurry)
        title = f"{self.label}, {self.settings.env.task}"
        draw_curve(self.records.history, self.folder / "learning_curve.png", title=title)

    def _save_as(self, name: str, *, with_replay: bool, should_hurry: Callable[[], bool] = lambda: False) -> None:
        self.state.source = self.source_state()
        path = self.folder / "checkpoints" / f"{name}.pt"
        self.state.save(path, history=self.records.history, with_replay=with_replay, should_hurry=should_hurry)

    def close(self) -> None:
        """Ends threads and processes, closes files; may be called twice."""
        self._made.close()
