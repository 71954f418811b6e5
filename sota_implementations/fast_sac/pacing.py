# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""How many gradient steps are taken now, how many rows may come meanwhile, and who waits for whom."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch
from settings import Settings

from torchrl_ext.trainers import UpdateGovernor

#: Blocks of gradient steps that may be enqueued on a device before the first of them is done.
_BLOCKS_AHEAD = 2
_PAUSE = 2e-4


class Pacing:
    """The pace of a run.

    In turns every step that is due is taken at once. Asynchronously a block of at most ``publish_every`` steps is, so
    that weights go out in between; ``strict`` holds the workers back by credit, ``free`` takes a block whenever it can.

    Args:
        settings (Settings): of the run.

    Keyword Args:
        asynchronous (bool): whether workers collect meanwhile.
        device (torch.device): of the learner.
    """

    def __init__(self, settings: Settings, *, asynchronous: bool, device: torch.device) -> None:
        self._options, self._asynchronous, self._device = settings.collector, asynchronous, device
        self._rows_per_step, self._total = settings.env.num_envs, settings.total_frames
        self._blocks: deque[torch.cuda.Event] = deque()
        self._since, self._waited, self._learnt = time.monotonic(), 0.0, 0.0

    def credit(self, frames: int, *, behind: int) -> int | None:
        """Returns how many rows may be collected in all, given those at hand and the gradient steps they still owe."""
        options = self._options
        if options.governor == "free" and self._asynchronous:
            return self._total
        held = behind > options.publish_every and not self._is_young(frames)
        ahead = 0 if held else options.max_ahead
        limit = frames + ahead * self._rows_per_step
        return limit if self._total is None else min(limit, self._total)

    def due(self, governor: UpdateGovernor, frames: int) -> int:
        """Returns the gradient steps to take now."""
        if not self._asynchronous:
            return governor.due(frames)
        if self._is_young(frames):
            return 0
        if self._options.governor == "free":
            return self._options.publish_every if governor.is_open(frames) else 0
        return min(governor.due(frames), self._options.publish_every)

    def _is_young(self, frames: int) -> bool:
        """Whether there may be nothing to sample: what follows the newest rows is known with the next ones."""
        return frames < 2 * self._rows_per_step

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Goes around a block of gradient steps: the host does not run far ahead of a device."""
        begun = time.monotonic()
        yield
        if self._asynchronous and self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._blocks.append(event)
            if len(self._blocks) > _BLOCKS_AHEAD:
                self._blocks.popleft().synchronize()
        self._learnt += time.monotonic() - begun

    def wait(self) -> None:
        """Waits a moment for rows."""
        time.sleep(_PAUSE)
        self._waited += _PAUSE

    def metrics(self) -> dict[str, float]:
        """Returns the shares of time since the last call."""
        if not self._asynchronous:
            return {}
        now = time.monotonic()
        span = max(now - self._since, 1e-9)
        values = {"learner/busy_share": self._learnt / span, "learner/wait_share": self._waited / span}
        self._since, self._waited, self._learnt = now, 0.0, 0.0
        return values
