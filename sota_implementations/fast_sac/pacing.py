# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""How many gradient steps are taken now, and how many rows may come meanwhile."""

from __future__ import annotations

from settings import Settings

from torchrl_ext.trainers import UpdateGovernor


class Pacing:
    """The pace of a run.

    In turns every step that is due is taken at once. Asynchronously a block of at most ``publish_every`` steps is, so
    that weights go out in between; ``strict`` holds the workers back by credit, ``free`` takes a block whenever it can.

    Args:
        settings (Settings): of the run.

    Keyword Args:
        asynchronous (bool): whether workers collect meanwhile.
        empty_at (int): rows of the run when its replay was empty. Defaults to 0.
    """

    def __init__(self, settings: Settings, *, asynchronous: bool, empty_at: int = 0) -> None:
        self._options, self._asynchronous, self._empty_at = settings.collector, asynchronous, empty_at
        self._rows_per_step, self._total = settings.env.num_envs, settings.total_frames

    def credit(self, frames: int, *, behind: int) -> int | None:
        """Returns how many rows may be collected in all, given those at hand and the gradient steps they still owe."""
        options = self._options
        if options.governor == "free" and self._asynchronous:
            return self._total
        held = behind > options.publish_every and not self.is_young(frames)
        ahead = 0 if held else options.max_ahead
        limit = frames + ahead * self._rows_per_step
        return limit if self._total is None else min(limit, self._total)

    def due(self, governor: UpdateGovernor, frames: int) -> int:
        """Returns the gradient steps to take now."""
        if not self._asynchronous:
            return governor.due(frames)
        if self.is_young(frames):
            return 0
        if self._options.governor == "free":
            return self._options.publish_every if governor.is_open(frames) else 0
        return min(governor.due(frames), self._options.publish_every)

    def is_young(self, frames: int) -> bool:
        """Whether there may be nothing to sample: workers tell what follows the newest rows with the next ones."""
        return self._asynchronous and frames - self._empty_at < 2 * self._rows_per_step
