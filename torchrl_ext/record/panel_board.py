# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Where the training thread leaves what the panel's thread draws."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchrl_ext.record.panel_frame import clean
from torchrl_ext.record.panel_state import LEARNING, Counts, Curves, PanelState, Rates, fraction_done, plain_line

if TYPE_CHECKING:
    from torchrl_ext.record.system_metrics import SystemSample

__all__ = ["PanelBoard"]

#: Messages kept for the Overview.
_MESSAGES = 200


class PanelBoard:
    """The newest numbers of a run.

    Writers    the training thread: counters, metrics and stages are replaced or merged in single steps of the
               interpreter, without a lock, since it does so at every step; messages and points under ``lock``.
    Readers    the panel's thread alone.

    Args:
        title (str): of the run.
        total_frames (int, optional): rows at which the run ends.
        time_budget (float, optional): seconds at which it ends.
        style (str): of bars, see :data:`~torchrl_ext.record.spectrum.STYLES`.
    """

    def __init__(self, title: str, total_frames: int | None, time_budget: float | None, style: str) -> None:
        self.lock = threading.RLock()
        self.should_quit = False
        self.counts: tuple[int, int, float, str] | None = None
        self.metrics: dict[str, float] = {}
        self.stages: Mapping[str, float] = {}
        self.curves = Curves()
        self.system: SystemSample | None = None
        self.system_error = ""
        self._title, self._total_frames, self._time_budget, self._style = title, total_frames, time_budget, style
        self._rates = Rates()
        self._messages: deque[str] = deque(maxlen=_MESSAGES)
        self._unsaid: deque[str] = deque()

    def say(self, text: str) -> None:
        """Keeps the lines of a text for the Overview and for :meth:`take_unsaid`."""
        lines = [clean(line) for line in text.split("\n")]
        with self.lock:
            self._messages += lines
            self._unsaid += lines

    def take_unsaid(self) -> list[str]:
        """Returns the lines that were said since the last call."""
        with self.lock:
            lines = list(self._unsaid)
            self._unsaid.clear()
        return lines

    def state(self, now: float, view: int) -> PanelState:
        """Returns what is to be shown at a time in seconds."""
        counts = self._measure(now)
        metrics = dict(self.metrics)
        if self._rates.updates_per_frame is not None:
            metrics.setdefault("utd/measured", self._rates.updates_per_frame)
        with self.lock:
            messages = tuple(self._messages)
            curves = self.curves.snapshot() if view == LEARNING else {}
        return PanelState(
            title=self._title,
            counts=counts,
            total_frames=self._total_frames,
            time_budget=self._time_budget,
            frame_rate=self._rates.frames,
            update_rate=self._rates.updates,
            metrics=metrics,
            stages=dict(self.stages),
            messages=messages,
            curves=curves,
            system=self.system,
            system_error=self.system_error,
            view=view,
            style=self._style,
            stopping=self.should_quit,
        )

    def line(self, now: float) -> str:
        """Returns the plain line of a time in seconds."""
        counts = self._measure(now)
        return plain_line(counts, self._rates, fraction_done(counts, self._total_frames, self._time_budget))

    def _measure(self, now: float) -> Counts:
        if self.counts is None:
            return Counts()
        counts = Counts(*self.counts)
        self._rates.measure(now, counts.frames, counts.updates)
        return counts
