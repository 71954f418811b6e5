# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What a run tells of itself: numbers to the panel and to files, at an interval each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from common.evaluation import Evaluation
from common.learner_time import LearnerTime
from common.progress import Progress
from common.records import Records
from common.run_state import Counters


class Telling:
    """Merges what is measured into the panel's numbers and the lines of the log.

    Log        every ``log.every`` rows; the only time that the device is read.
    Panel      what the host knows, more often than that; counters at every step.

    Args:
        name (str): of the script, in errors.
        progress (Progress): the panel, or plain lines.
        time (LearnerTime): of the learner's loop.
    """

    records: Records
    """Set before anything is logged."""

    def __init__(self, name: str, progress: Progress, time: LearnerTime) -> None:
        self._name, self.progress, self.time = name, progress, time
        self._values: dict[str, float] = {}
        self._stages: dict[str, float] = {}
        self._returns: list[float] = []
        self._lengths: list[int] = []
        self._note = ""

    def keep(self, values: Mapping[str, float]) -> None:
        """Shows numbers until others of the same name come."""
        self._values |= values

    def episodes(self, counters: Counters, returns: Sequence[float], lengths: Sequence[int]) -> None:
        """Hears of training episodes that ended."""
        counters.episodes += len(returns)
        self._returns += returns
        self._lengths += lengths
        if self._returns:
            self._values["train/return"] = _mean(self._returns)
            self._note = f"return {self._values['train/return']:,.1f}"

    def look(self, measures: Mapping[str, float]) -> None:
        """Shows what was measured on the host, however seldom it is logged."""
        self._keep_times(times := self.time.metrics("panel"))
        self._values |= {**measures, **times}

    def _keep_times(self, times: Mapping[str, float]) -> None:
        self._stages |= self.time.stages(times)

    def show(self, counters: Counters, updates: int) -> None:
        """Shows where the run stands."""
        self.progress.update(
            seconds=counters.seconds,
            frames=counters.frames,
            updates=updates,
            metrics=self._values,
            stages=self._stages,
            note=self._note,
        )

    def log(
        self, counters: Counters, updates: int, metrics: Mapping[str, torch.Tensor], measures: Mapping[str, float]
    ) -> None:
        """Writes a line of metrics, and the points of the curves.

        Args:
            counters (Counters): where the run stands.
            updates (int): taken.
            metrics (Mapping[str, Tensor]): of the newest update; they are read here.
            measures (Mapping[str, float]): other numbers.

        Raises:
            RuntimeError: if a metric of the update is not finite. Nothing was written.
        """
        values = self.check(updates, metrics)
        if self._returns:
            values |= {"train/return": _mean(self._returns), "train/length": _mean(self._lengths)}
            self._add_point("train", counters, values["train/return"])
            self._returns, self._lengths = [], []
        for name, value in values.items():
            if "loss" in name:
                self.progress.point(name, counters.frames, value)
        self._keep_times(times := self.time.metrics("log"))
        values |= {**measures, **times}
        values |= {"updates": updates, "episodes": counters.episodes, "seconds": counters.seconds}
        self._values |= values
        self.records.write(values, frames=counters.frames)

    def check(self, updates: int, metrics: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Returns the metrics of the newest update as numbers, which waits for the device.

        Raises:
            RuntimeError: if one is not finite.
        """
        values = {f"learner/{name}": float(value.float().mean()) for name, value in metrics.items()}
        lost = [name for name, value in values.items() if not math.isfinite(value)]
        if lost:
            raise RuntimeError(
                f"{self._name}: metrics must be finite, got none at {lost} after {updates} updates; "
                "training was stopped and the last checkpoint kept."
            )
        return values

    def evaluation(self, counters: Counters, result: Evaluation) -> bool:
        """Writes an evaluation; returns whether it is the best one."""
        best = self.records.best()
        values = {"eval/return": result.mean, "eval/length": result.mean_length, "eval/worst": min(result.returns)}
        self.records.write(values, frames=counters.frames)
        self._values["eval/return"] = result.mean
        self._add_point("eval", counters, result.mean)
        self.progress.say(
            f"evaluation at {counters.frames} frames: mean return {result.mean:.1f} over {len(result.returns)} "
            f"episodes (worst {min(result.returns):.1f}, best {max(result.returns):.1f})"
        )
        return result.mean > best

    def _add_point(self, series: str, counters: Counters, value: float) -> None:
        self.records.point(series, frames=counters.frames, seconds=counters.seconds, value=value)
        self.progress.point(f"{series}/return", counters.frames, value)


def _mean(values: Sequence[Any]) -> float:
    return sum(values) / len(values)
