# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What the user sees: plain lines."""

from __future__ import annotations

import logging
import sys
import time

from torchrl._utils import logger as torchrl_logger

__all__ = ["Progress"]


class Progress:
    """Fraction done, rates and time left; no escape byte is written, also not by TorchRL's own logger.

    Keyword Args:
        total_frames (int): rows at which the run ends.
        print_every (float): seconds between two lines.
    """

    def __init__(self, *, total_frames: int, print_every: float) -> None:
        self._total_frames, self._print_every = total_frames, print_every
        self._last: tuple[float, int, int] | None = None
        # TorchRL's own formatter colours its lines, in files and pipes too.
        self._handlers = [(handler, handler.formatter) for handler in torchrl_logger.handlers]
        for handler, _ in self._handlers:
            handler.setFormatter(logging.Formatter("%(asctime)s [%(name)s] %(message)s"))

    def say(self, text: str) -> None:
        """Writes one line."""
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def update(self, *, seconds: float, frames: int, updates: int, note: str, final: bool = False) -> None:
        """Shows where the run stands, if it is time.

        Keyword Args:
            seconds (float): of training.
            frames (int): rows collected.
            updates (int): taken.
            note (str): what else to show, such as the newest return.
            final (bool): shows it in any case. Defaults to ``False``.
        """
        now = time.monotonic()
        if self._last is None:
            self._last = now, frames, updates
        since, frames_then, updates_then = self._last
        span = now - since
        if span < self._print_every and not final:
            return
        self._last = now, frames, updates
        done = frames / self._total_frames
        # Updates lag behind rows in the warm-up, and are what takes time: an estimate, no promise.
        left = "?" if done <= 0 else _clock(seconds * (1 - done) / done)
        per_frame, per_update = ((frames - frames_then) / span, (updates - updates_then) / span) if span else (0.0, 0.0)
        text = f"{100 * done:5.1f} %  {frames:,} frames  {per_frame:,.0f} frames/s  {updates:,} updates  "
        self.say(f"{text}{per_update:,.1f} updates/s  {_clock(seconds)} elapsed  {left} left  {note}".rstrip())

    def close(self) -> None:
        """Gives TorchRL's logger its format back; may be called twice."""
        for handler, formatter in self._handlers:
            handler.setFormatter(formatter)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
