# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What a worker tells beside its rows: that it goes on, where its time goes, and the episodes that ended."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from torchrl_ext.collectors._heartbeat import Heartbeat
from torchrl_ext.transport.segment import Segment

__all__ = ["Board", "Counter", "EndedEpisodes"]

_LINE = 64


class Counter(IntEnum):
    """Numbers with one writer each, a cache line apart from those of the other writer."""

    BEATS = 0
    """Worker: see :class:`Heartbeat`."""
    STEPS = 1
    """Worker: steps since it began."""
    LOOKS = 2
    """Worker: looks for room or credit that found none."""
    TRAJECTORIES = 3
    """Worker: trajectories begun by its streams, all lives together."""
    COMMANDS = 8
    """Parent: messages that the worker should read."""


class EndedEpisodes(NamedTuple):
    """Episodes that ended, by the order of their final observations."""

    returns: np.ndarray
    """float64 ``[M]``, undiscounted."""
    lengths: np.ndarray
    """int64 ``[M]``, agent steps; 0 where a stream was reset in the middle."""
    metrics: np.ndarray
    """float64 ``[M, metrics]``, of the last step."""


class Board:
    """Shared memory of one worker and its parent.

    Roles      The worker writes, the parent reads, but for the counters named as the parent's.
    Publish    An episode's entry is written before the step that ended it is published, and read after it was seen: it
               is a companion of the ring's arena of final observations, place by place.
    Ordering   The ring's. Counters and seconds are single aligned words, read at any time.
    Full       As the arena: the ring refuses the step.
    Lifetime   As long as a process has it mapped.

    Args:
        stages (sequence of str): names whose seconds are summed up.
        final_capacity (int): places of the ring's arena.
        num_metrics (int): numbers told of each episode.
    """

    def __init__(self, stages: Sequence[str], final_capacity: int, num_metrics: int) -> None:
        self._shape = (tuple(stages), final_capacity, num_metrics)
        self._open(Segment(self._nbytes(*self._shape), "Board"))

    @staticmethod
    def _nbytes(stages: Sequence[str], final_capacity: int, num_metrics: int) -> int:
        return 2 * _LINE + 8 * len(stages) + 8 * final_capacity * (2 + num_metrics)

    def _open(self, segment: Segment) -> None:
        stages, finals, metrics = self._shape
        self._segment = segment
        self.stages = stages
        words = np.frombuffer(segment.memory, dtype=np.int64)
        start = 2 * _LINE // 8
        #: int64, by :class:`Counter`.
        self.counters = memoryview(segment.memory)[: 2 * _LINE].cast("q")
        self.heartbeat = Heartbeat(memoryview(segment.memory)[:8])
        #: float64 ``[stages]``, summed up since the worker began.
        self.seconds = memoryview(segment.memory)[8 * start : 8 * (start + len(stages))].cast("d")
        start += len(stages)
        self._lengths = words[start : start + finals]
        numbers = words[start + finals : start + finals * (2 + metrics)].view(np.float64)
        self._returns, self._metrics = numbers[:finals], numbers[finals:].reshape(finals, metrics)
        self._finals = finals

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self._segment, self._shape)

    def write(self, first: int, returns: np.ndarray, lengths: np.ndarray, metrics: np.ndarray | None) -> None:
        """Writes the episodes that go with final observations from number ``first`` on."""
        at = np.arange(first, first + len(returns)) % self._finals
        self._returns[at], self._lengths[at] = returns, lengths
        if metrics is not None:
            self._metrics[at] = metrics

    def read(self, first: int, count: int) -> EndedEpisodes:
        """Returns copies of ``count`` episodes from final observation number ``first`` on."""
        at = np.arange(first, first + count) % self._finals
        return EndedEpisodes(self._returns[at], self._lengths[at], self._metrics[at])


def _attach(segment: Segment, shape: tuple[tuple[str, ...], int, int]) -> Board:
    board = Board.__new__(Board)
    board._shape = shape
    board._open(segment)
    return board
