# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Returns and lengths of the episodes that streams end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Episode(NamedTuple):
    """One episode that ended."""

    stream: int
    episode_return: float
    """Sum of rewards, undiscounted."""
    length: int
    """Agent steps."""


class EpisodeTracker:
    """Adds rewards up per stream, in float64 on the host.

    Args:
        num_streams (int): streams ``n``.

    Examples:
        >>> import numpy as np
        >>> tracker = EpisodeTracker(2)
        >>> tracker.add(np.array([1.0, 2.0]), np.array([False, False]))
        >>> tracker.add(np.array([1.0, 2.0]), np.array([False, True]))
        >>> tracker.pop()
        [Episode(stream=1, episode_return=4.0, length=2)]
    """

    def __init__(self, num_streams: int) -> None:
        self._returns = np.zeros(num_streams, dtype=np.float64)
        self._lengths = np.zeros(num_streams, dtype=np.int64)
        self._ended: list[Episode] = []

    def add(self, reward: np.ndarray, done: np.ndarray) -> None:
        """Adds one step of all streams: rewards and ends, ``[n]`` each."""
        self._returns += reward
        self._lengths += 1
        if np.count_nonzero(done):
            ended = np.flatnonzero(done)
            for stream in ended.tolist():
                self._ended.append(Episode(stream, float(self._returns[stream]), int(self._lengths[stream])))
            self._returns[ended] = 0.0
            self._lengths[ended] = 0

    def pop(self) -> list[Episode]:
        """Returns the episodes that ended since the last call, oldest first."""
        ended, self._ended = self._ended, []
        return ended

    def restart(self) -> None:
        """Forgets the episodes that go on, as after a reset of all streams."""
        self._returns.fill(0.0)
        self._lengths.fill(0)
