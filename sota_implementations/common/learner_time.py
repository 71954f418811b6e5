# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Where the learner's time goes: busy or waiting, and by the first-level stages of its loop."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from torchrl_ext.record import StageTimer, StageTotal

#: First-level stages of a learner's loop, in order; a run tells of those that it has.
STAGES = ("collect", "drain", "sample", "update", "write_back", "publish")
#: Blocks of updates that may be enqueued on a device before the first of them is done.
_BLOCKS_AHEAD = 2
_PAUSE = 2e-4


class _Mark(NamedTuple):
    """Everything that is counted, at a moment."""

    moment: float
    learnt: float = 0.0
    waited: float = 0.0
    updates: int = 0
    entries: int = 0
    stages: dict[str, StageTotal] = {}  # never changed


class LearnerTime:
    """Times a learner's loop without waiting for its device, and keeps the host from running far ahead of it.

    Args:
        device (torch.device): of the learner. What is sampled and updated is timed there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._timer = StageTimer(STAGES, device=device, device_stages=("sample", "update"))
        self.stage = self._timer
        """Makes the context of a stage: ``with time.stage("drain"): ...``."""
        self._blocks: deque[torch.cuda.Event] = deque()
        self._learnt = self._waited = 0.0
        self._updates = self._entries = 0
        self._marks = dict.fromkeys(("log", "panel"), _Mark(time.monotonic()))

    @contextlib.contextmanager
    def updating(self, updates: int) -> Iterator[None]:
        """Goes around one entry of the stage ``"update"``, which takes so many updates."""
        self._updates += updates
        self._entries += 1
        with self._timer("update"):
            yield

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Goes around a block of updates: the host does not run far ahead of a device."""
        begun = time.monotonic()
        yield
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._blocks.append(event)
            if len(self._blocks) > _BLOCKS_AHEAD:
                self._blocks.popleft().synchronize()
        self._learnt += time.monotonic() - begun

    def wait(self) -> None:
        """Waits a moment for rows."""
        begun = time.monotonic()
        time.sleep(_PAUSE)
        self._waited += time.monotonic() - begun

    def metrics(self, reader: Literal["log", "panel"]) -> dict[str, float]:
        """Returns shares of the time since a reader asked last, and milliseconds of an entry of each stage and of an
        update (``"learner/update_ms"``). Busy is a CUDA device with updates, and on the CPU the loop with a block.
        """
        last = self._marks[reader]
        now = _Mark(time.monotonic(), self._learnt, self._waited, self._updates, self._entries, self._timer.totals())
        self._marks[reader] = now
        span = max(now.moment - last.moment, 1e-9)
        values = {
            "learner/busy_share": (now.learnt - last.learnt) / span,
            "learner/wait_share": (now.waited - last.waited) / span,
        }
        for name, total in now.stages.items():
            before = last.stages.get(name, StageTotal(0.0, 0))
            if entries := total.entries - before.entries:
                values[f"learner/{name}_ms"] = 1e3 * (total.seconds - before.seconds) / entries
        if updates := now.updates - last.updates:
            # Some entries may not be measured, or not yet: it is their mean that is split.
            values["learner/update_ms"] = (
                values.get("learner/update_ms", float("nan")) * (now.entries - last.entries) / updates
            )
            if self._device.type == "cuda" and (busy := values["learner/update_ms"]) == busy:
                # The host only launches them.
                values["learner/busy_share"] = busy / 1e3 * updates / span
        return {name: value for name, value in values.items() if value == value}

    @staticmethod
    def stages(metrics: dict[str, float]) -> dict[str, float]:
        """Returns the seconds of the stages among metrics, in order, for a panel."""
        return {name: metrics[f"learner/{name}_ms"] / 1e3 for name in STAGES if f"learner/{name}_ms" in metrics}
