# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Rows of worker processes: drained into a replay, held back by credit, acted by weights whose age is known."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchrl.envs.utils import ExplorationType

from common.setting_groups import CollectorSettings
from torchrl_ext.collectors import RingCollector

_PAUSE = 1e-3
#: Publications whose updates are remembered; rows of older ones are not on their way any more.
_VERSIONS = 4096


class RingFeed:
    """A collector's rows, and what is told of it.

    Args:
        policy (nn.Module): whose weights are published.
        publish_every (int): updates between two publications, at least.
    """

    stage = "drain"
    """The learner's time that it takes."""

    def __init__(self, policy: nn.Module, *, publish_every: int) -> None:
        self._policy, self._publish_every = policy, publish_every
        self._updates = self._published = self._first = 0
        self._updates_at: dict[int, int] = {}
        self._lag_rows = self._lag_sum = 0
        #: Rows that the collector counts beside those of the run.
        self._beside = 0
        self.collector: RingCollector | None = None

    def attach(self, collector: RingCollector, *, updates: int = 0) -> None:
        """Takes a collector, whose workers wait for credit.

        Keyword Args:
            updates (int): that the weights have seen with which its workers start. Defaults to 0.
        """
        self.collector = collector
        self._updates = self._published = self._first = updates
        collector.hold_at(0)

    @property
    def _ring(self) -> RingCollector:
        assert self.collector is not None
        return self.collector

    def begin(self, at_most: int | None, should_stop: Callable[[], bool] = lambda: False) -> int:
        """Waits until every worker made a step that may make one, or until it is asked to stop; returns how many rows
        came.

        Args:
            at_most (int, optional): rows that may be collected in all, those before a resume included.
        """
        ring, found = self._ring, 0
        # They may stand at different steps, when they were saved so.
        before: list[int] = ring.state_dict()["steps"]
        limit = max(before) + 1
        if at_most is not None:
            limit = min(limit, (at_most + self._beside) // ring.num_streams)
        ring.hold_at(limit * ring.num_streams)
        while self._is_awaited(before, limit) and not should_stop():
            found += ring.drain()
            time.sleep(_PAUSE)
        return found

    def _is_awaited(self, before: list[int], limit: int) -> bool:
        now = self._ring.state_dict()["steps"]
        return any(step == first < limit for step, first in zip(now, before, strict=True))

    def drain(self) -> int:
        """Puts what workers pushed into the replay; returns how many rows."""
        if rows := self._ring.drain():
            for version, count in self._ring.collected.pop_versions().items():
                self._lag_sum += count * max(self._updates - self._updates_at.get(version, self._first), 0)
                self._lag_rows += count
        return rows

    def credit(self, frames: int | None) -> None:
        """Lets rows be collected up to a number in all, those before a resume included; None takes the limit away."""
        self._ring.hold_at(None if frames is None else frames + self._beside)

    def publish(self, updates: int) -> None:
        """Tells how many updates the weights have seen; they go out when it is time and the last ones arrived."""
        self._updates, ring = updates, self._ring
        # One at a time, so that it is known which version these weights will be.
        if updates - self._published >= self._publish_every and ring.weights_arrived():
            version = ring.policy_version + 1
            self._updates_at[version] = self._published = updates
            ring.update_policy_weights_(self._policy)
            while len(self._updates_at) > _VERSIONS:
                del self._updates_at[next(iter(self._updates_at))]

    def episodes(self) -> tuple[list[float], list[int]]:
        """Returns and lengths of the episodes that ended since the last call."""
        ended = self._ring.collected.pop_episodes()
        return ended["return"].tolist(), ended["length"].tolist()

    def metrics(self, *, keep: bool = False) -> dict[str, float]:
        """Returns milliseconds of the stages of a worker's step, what waits in the rings, and the policy's lag.

        Keyword Args:
            keep (bool): goes on with the mean of the lag. Defaults to ``False``.
        """
        stages = self._ring.collected.timings()
        known = [name for name in stages[0] if all(name in stage for stage in stages)]
        values = {f"collector/{name}_ms": 1e3 * sum(stage[name] for stage in stages) / len(stages) for name in known}
        fill = self._ring.fill
        values["collector/ring_fill"] = sum(fill) / len(fill)
        if self._lag_rows:
            values["collector/policy_lag_updates"] = self._lag_sum / self._lag_rows
        if not keep:
            self._lag_sum = self._lag_rows = 0
        return values

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return dict(self._ring.state_dict())

    def load_state_dict(self, state: dict[str, Any], *, frames: int) -> None:
        """Goes on from a checkpoint, if there is one: episodes begin anew, and streams are cut.

        Keyword Args:
            frames (int): rows of the run so far, which may have been collected without workers.
        """
        ring = self._ring
        if state:
            ring.load_state_dict(state)
        beside = int(ring.stats()["frames"]) - frames
        # Up to a step of all streams: a limit is rounded down to one, and the last row must not be missing.
        self._beside = -(-beside // ring.num_streams) * ring.num_streams

    def close(self) -> None:
        """Ends the workers; may be called twice."""
        if self.collector is not None:
            self.collector.shutdown()


def ring_options(settings: CollectorSettings, learner_device: torch.device) -> dict[str, Any]:
    """Returns what the settings say of a :class:`RingCollector`, which explores."""
    device = settings.policy_device
    return {
        "num_workers": settings.num_workers,
        "policy_device": learner_device if device == "learner" else device,
        "exploration_type": ExplorationType.RANDOM,
        "transport": settings.transport,
        "ring_slots": settings.ring_slots,
        "num_threads": settings.policy_threads,
        "stall_timeout": settings.stall_timeout,
        "max_restarts": settings.max_restarts,
    }
