# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What a collector knows about the rows it delivered."""

from __future__ import annotations

from collections import deque
from threading import RLock

import numpy as np
import torch
from tensordict import TensorDict

from torchrl_ext.collectors._board import Board, Counter, EndedEpisodes

__all__ = ["Collected"]


#: Runs with ended episodes, and versions, that are kept for whoever asks; nobody has to.
_KEPT = 1 << 16


class Collected:
    """Episodes, stage times and policy lag, since they were last asked for: of the newest 65,536 runs that ended any,
    and the newest 65,536 versions.

    Whoever adds holds the lock; whoever asks waits for it.

    Args:
        num_metrics (int): numbers told of each episode.
        lock (RLock, optional): held by whoever delivers rows. Defaults to one that nobody else has.
    """

    boards: list[Board]
    """Of the workers."""

    def __init__(self, num_metrics: int, lock: RLock | None = None) -> None:
        self._num_metrics, self._lock = num_metrics, RLock() if lock is None else lock
        self.boards = []
        self._last_timings: list[dict[str, float]] | None = None
        self._episodes: deque[tuple[int, np.ndarray, EndedEpisodes]] = deque(maxlen=_KEPT)
        self._lag_sum, self._lag_max, self._lag_rows = 0, 0, 0
        self._rows_of: dict[int, int] = {}

    def add_episodes(self, worker: int, streams: np.ndarray, ended: EndedEpisodes) -> None:
        """Adds what ended with some rows; entries of length 0 are resets in the middle."""
        self._episodes.append((worker, streams, ended))

    def add_versions(self, versions: np.ndarray, newest: int, num_streams: int) -> None:
        """Adds steps by the version of the policy that acted, and the newest one meanwhile."""
        behind = newest - versions
        for version in versions.tolist():
            self._rows_of[version] = self._rows_of.get(version, 0) + num_streams
        while len(self._rows_of) > _KEPT:
            del self._rows_of[next(iter(self._rows_of))]
        self._lag_sum += int(behind.sum()) * num_streams
        self._lag_max = max(self._lag_max, int(behind.max()))
        self._lag_rows += len(behind) * num_streams

    def pop_episodes(self) -> TensorDict:
        """Returns the episodes that ended since the last call, oldest first for each worker.

        Returns:
            TensorDict: ``[M]`` with ``stream``, ``length`` and ``worker`` (int64), ``return`` (float64, undiscounted)
            and ``metrics`` (float64 ``[M, metrics]``).
        """
        with self._lock:
            taken, self._episodes = self._episodes, deque(maxlen=_KEPT)
        none = EndedEpisodes(np.zeros(0), np.zeros(0, np.int64), np.zeros((0, self._num_metrics)))
        streams = np.concatenate([np.zeros(0, np.int64), *(streams for _, streams, _ in taken)])
        workers = np.concatenate([np.zeros(0, np.int64), *(np.full(len(s), worker) for worker, s, _ in taken)])
        parts = [none, *(ended for _, _, ended in taken)]
        returns, lengths, metrics = (np.concatenate(list(column)) for column in zip(*parts, strict=True))
        whole = lengths > 0
        fields = {"stream": streams, "length": lengths, "worker": workers, "return": returns, "metrics": metrics}
        values = {name: torch.from_numpy(np.ascontiguousarray(value[whole])) for name, value in fields.items()}
        return TensorDict(values, [int(whole.sum())])

    def timings(self) -> list[dict[str, float]]:
        """Returns the mean seconds of each stage per step, by worker, over its life."""
        if self._last_timings is not None:
            return self._last_timings
        found = []
        for board in self.boards:
            steps = max(int(board.counters[Counter.STEPS]), 1)
            mean = {name: float(board.seconds[at]) / steps for at, name in enumerate(board.stages)}
            # Not every environment tells the parts of its step.
            found.append({name: value for name, value in mean.items() if value or "/" not in name})
        return found

    def let_go(self) -> None:
        """Keeps what is known and lets go of the workers' memory."""
        self._last_timings, self.boards = self.timings(), []

    def pop_versions(self) -> dict[int, int]:
        """Returns how many rows since the last call each version of the policy acted in."""
        with self._lock:
            taken, self._rows_of = self._rows_of, {}
        return taken

    def pop_policy_lag(self) -> tuple[float, int]:
        """Returns by how many published versions the policies of the rows since the last call were behind when the rows
        were delivered: mean and maximum; zeros without rows."""
        with self._lock:
            mean = self._lag_sum / self._lag_rows if self._lag_rows else 0.0
            most, self._lag_sum, self._lag_max, self._lag_rows = self._lag_max, 0, 0, 0
        return mean, most
