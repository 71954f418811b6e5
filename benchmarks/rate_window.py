# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Steady rates of a training run, by its own counters: from an early update on, for so many seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

STARTED = time.monotonic()
"""Of this process, nearly."""


class _Mark(NamedTuple):
    moment: float
    frames: int
    updates: int
    excluded: float


class RateWindow:
    """A window of a run, which is told where the run stands once per turn of its loop.

    Args:
        seconds (float): how long it is, without what is excluded.

    Keyword Args:
        device (torch.device): of the learner; its work counts where it is done, not where it is launched.
        after (int): updates before it begins. Defaults to 1.
        limit (float, optional): seconds after the start of the process when it ends, come what may.
    """

    def __init__(self, seconds: float, *, device: torch.device, after: int = 1, limit: float | None = None) -> None:
        self._seconds, self._device, self._after, self._limit = seconds, device, max(after, 1), limit
        self._excluded = 0.0
        self._begin: _Mark | None = None
        self._last: _Mark | None = None
        self.over = False
        """Whether it has ended."""

    def tick(self, frames: int, updates: int) -> bool:
        """Hears of the counters of the run; returns whether the window has ended, for the first time or earlier."""
        if self.over:
            return True
        if self._begin is None:
            if updates >= self._after:
                self._begin = self._last = self._mark(frames, updates)
        else:
            now = time.monotonic()
            self._last = _Mark(now, frames, updates, self._excluded)
            if now - self._begin.moment - (self._excluded - self._begin.excluded) >= self._seconds:
                self._last, self.over = self._mark(frames, updates), True
        if self._limit is not None and time.monotonic() - STARTED >= self._limit:
            self.over = True
        return self.over

    def _mark(self, frames: int, updates: int) -> _Mark:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return _Mark(time.monotonic(), frames, updates, self._excluded)

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Goes around what does not count, such as an evaluation."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self._excluded += time.monotonic() - begun

    def result(self) -> dict[str, Any]:
        """Returns what was counted between the two marks, and the rates; Nones where no update was taken."""
        begin, end = self._begin, self._last
        if begin is None or end is None:
            nothing = ("env_steps", "updates", "seconds", "env_steps_per_second", "updates_per_second", "begun_s")
            return dict.fromkeys(nothing)
        seconds = end.moment - begin.moment - (end.excluded - begin.excluded)
        steps, updates = end.frames - begin.frames, end.updates - begin.updates
        return {
            "env_steps": steps,
            "updates": updates,
            "seconds": round(seconds, 3),
            "env_steps_per_second": round(steps / seconds, 2) if seconds else None,
            "updates_per_second": round(updates / seconds, 3) if seconds else None,
            "begun_s": round(begin.moment - STARTED, 1),
        }
