# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What the user sees: a progress bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from torchrl._utils import logger as torchrl_logger


class Progress:
    """Fraction done, rates and time left of a run that ends by frames or by time, whichever comes first.

    On a terminal the bar is redrawn at every :meth:`update`, at most ten times a second. Otherwise one plain line is
    written every ``print_every`` seconds, with no escape byte, also by TorchRL's own logger.

    Keyword Args:
        total_frames (int, optional): rows at which the run ends.
        time_budget (float, optional): seconds at which it ends.
        print_every (float): seconds between plain lines.
    """

    def __init__(self, *, total_frames: int | None, time_budget: float | None, print_every: float) -> None:
        self._total_frames, self._time_budget = total_frames, time_budget
        self._print_every = print_every
        self._last_line = self._last_draw = -float("inf")
        self._rate_from: tuple[float, int, int] | None = None
        self._rates = (0.0, 0.0)
        self._bar: Any = None
        # TorchRL's own formatter colours its lines, in files and pipes too.
        self._handlers = [(handler, handler.formatter) for handler in torchrl_logger.handlers]
        for handler, _ in self._handlers:
            handler.setFormatter(logging.Formatter("%(asctime)s [%(name)s] %(message)s"))
        if sys.stdout.isatty():
            self._open_bar()

    def _open_bar(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        # One line on any terminal: a wrapped bar would leave its parts behind.
        text = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis"))
        self._bar = Progress(BarColumn(bar_width=10), text, auto_refresh=False)
        self._task = self._bar.add_task("", total=1.0)
        self._bar.start()

    def say(self, text: str) -> None:
        """Writes one line, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    def update(self, *, seconds: float, frames: int, updates: int, note: str, final: bool = False) -> None:
        """Shows where the run stands.

        Keyword Args:
            seconds (float): of training.
            frames (int): rows collected.
            updates (int): gradient steps.
            note (str): what else to show, such as the newest return.
            final (bool): shows it whenever the last one was. Defaults to ``False``.
        """
        now = time.monotonic()
        interval, last = (0.1, self._last_draw) if self._bar is not None else (self._print_every, self._last_line)
        if now - last < interval and not final:
            return
        done = self._fraction(seconds, frames)
        self._measure(now, frames, updates)
        left = "?" if done <= 0 or seconds <= 0 else _clock(seconds * (1 - done) / done)
        per_frame, per_update = self._rates
        if self._bar is not None:
            self._last_draw = now
            # 80 columns with the bar.
            text = f"{100 * done:3.0f}%  {_short(frames)} frames {_short(per_frame)}/s  "
            text += f"{_short(updates)} updates {_short(per_update)}/s  {left} left  {note}"
            self._bar.update(self._task, completed=done, description=text, refresh=True)
        else:
            self._last_line = now
            text = f"{100 * done:5.1f} %  {frames:,} frames  {per_frame:,.0f} frames/s  {updates:,} updates  "
            self.say(f"{text}{per_update:,.1f} updates/s  {_clock(seconds)} elapsed  {left} left  {note}".rstrip())

    def _fraction(self, seconds: float, frames: int) -> float:
        parts = [frames / self._total_frames if self._total_frames else 0.0]
        parts.append(seconds / self._time_budget if self._time_budget else 0.0)
        return min(1.0, max(parts))

    def _measure(self, now: float, frames: int, updates: int) -> None:
        if self._rate_from is None:
            self._rate_from = (now, frames, updates)
            return
        since, frames_then, updates_then = self._rate_from
        # Over two seconds, but for the first rate: a bar that is redrawn often would show noise.
        if now - since >= (2.0 if any(self._rates) else 0.2):
            self._rates = (frames - frames_then) / (now - since), (updates - updates_then) / (now - since)
            self._rate_from = (now, frames, updates)

    def close(self) -> None:
        """Leaves the terminal as it was; may be called twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        for handler, formatter in self._handlers:
            handler.setFormatter(formatter)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _short(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= 10 * size:
            return f"{number / size:.1f}{unit}"
    return f"{number:,.0f}"
