# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What a panel shows at one moment, and how it comes about from counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchrl_ext.record.panel_frame import clean, clock, number

if TYPE_CHECKING:
    from torchrl_ext.record.system_metrics import SystemSample

__all__ = ["LEARNING", "Counts", "Curves", "PanelState", "Rates", "fraction_done", "plain_line"]

#: Points kept of a curve; a longer one loses every second of its points.
_MOST_POINTS = 1024
#: The number, and the key, of the view that shows curves.
LEARNING = 4


@dataclass(frozen=True)
class Counts:
    """Where the run stands."""

    frames: int = 0
    updates: int = 0
    seconds: float = 0.0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class PanelState:
    """All that a frame is drawn from: the same state at the same size gives the same frame."""

    title: str
    counts: Counts = Counts()
    total_frames: int | None = None
    time_budget: float | None = None
    frame_rate: float = 0.0
    update_rate: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    stages: Mapping[str, float] = field(default_factory=dict)
    """Mean seconds of a step by the path of a stage."""
    messages: Sequence[str] = ()
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """Points ``(frames, value)`` by series."""
    system: SystemSample | None = None
    system_error: str = ""
    view: int = 1
    style: str = "blocks"
    stopping: bool = False

    @property
    def done(self) -> float:
        """Fraction of the run that is done, 0..1."""
        return fraction_done(self.counts, self.total_frames, self.time_budget)

    @property
    def left(self) -> str:
        """The time left as text."""
        return _left(self.counts, self.done)


class Rates:
    """Frames and updates per second over the last two seconds, but for the first rate, which comes sooner."""

    def __init__(self) -> None:
        self._from: tuple[float, int, int] | None = None
        self.frames = self.updates = 0.0
        self.updates_per_frame: float | None = None

    def measure(self, now: float, frames: int, updates: int) -> None:
        """Takes the counters at a time in seconds."""
        if self._from is None:
            self._from = (now, frames, updates)
            return
        since, frames_then, updates_then = self._from
        # Shorter spans show noise.
        if now - since >= (2.0 if self.frames or self.updates else 0.2):
            rows, steps = frames - frames_then, updates - updates_then
            self.frames, self.updates = rows / (now - since), steps / (now - since)
            self.updates_per_frame = steps / rows if rows > 0 else self.updates_per_frame
            self._from = (now, frames, updates)


class Curves:
    """Points of learning curves, bounded in number."""

    def __init__(self) -> None:
        self._points: dict[str, deque[tuple[float, float]]] = {}

    def add(self, series: str, frames: float, value: float) -> None:
        """Adds a point; what is not a finite number is left out."""
        if number(value) is None or number(frames) is None:
            return
        points = self._points.setdefault(series, deque())
        points.append((float(frames), float(value)))
        if len(points) > _MOST_POINTS:
            # The last one stays: it is the newest value that is shown.
            self._points[series] = deque(list(points)[::-2][::-1])

    def snapshot(self) -> dict[str, list[tuple[float, float]]]:
        """Returns a copy."""
        return {series: list(points) for series, points in list(self._points.items())}


def fraction_done(counts: Counts, total_frames: int | None, time_budget: float | None) -> float:
    """Returns the fraction of the budget that is used up first."""
    parts = (
        counts.frames / total_frames if total_frames else 0.0,
        counts.seconds / time_budget if time_budget else 0.0,
    )
    return min(1.0, max(parts))


def _left(counts: Counts, done: float) -> str:
    return "?" if done <= 0 or counts.seconds <= 0 else clock(counts.seconds * (1 - done) / done)


def plain_line(counts: Counts, rates: Rates, done: float) -> str:
    """Returns the line that stands for a frame where there is no terminal."""
    return clean(
        f"{100 * done:5.1f} %  {counts.frames:,} frames  {rates.frames:,.0f} frames/s  {counts.updates:,} updates  "
        f"{rates.updates:,.1f} updates/s  {clock(counts.seconds)} elapsed  {_left(counts, done)} left  {counts.note}"
    ).rstrip()
