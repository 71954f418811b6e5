# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Everything a run goes on from: saved whole, and loaded whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torchrl_ext.data import SlotReplayBuffer
from torchrl_ext.trainers import (
    UpdateGovernor,
    load_checkpoint,
    random_state,
    restore_random_state,
    save_checkpoint,
)


class Learner(Protocol):
    """What is saved of a learner."""

    def state_dict(self) -> dict[str, Any]:
        """All that an update depends on."""

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` unless :meth:`load_state_dict` would take the state; changes nothing."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`."""


@dataclass
class Counters:
    """Where a run stands."""

    frames: int = 0
    """Rows collected."""
    episodes: int = 0
    """Training episodes that ended."""
    seconds: float = 0.0
    """Of training."""


@dataclass(kw_only=True)
class RunState:
    """The parts of a run that a checkpoint holds. Environments are not among them: episodes begin anew.

    Args:
        task (str): a checkpoint of another task is foreign.
        learner (Learner): with its optimizers.
        governor (UpdateGovernor): of updates per row.
        replay (SlotReplayBuffer): saved where it is asked for.
    """

    kind: ClassVar[str]
    """What a checkpoint says that it is."""
    source_key: ClassVar[str] = "source"
    """The name of :attr:`source` in a checkpoint."""

    task: str
    learner: Learner
    governor: UpdateGovernor
    replay: SlotReplayBuffer
    counters: Counters = field(default_factory=Counters)
    source: dict[str, Any] = field(default_factory=dict)
    """Of where the rows come from; empty before a checkpoint was loaded or saved."""

    def save(
        self,
        path: Path,
        *,
        history: dict[str, Any],
        with_replay: bool,
        should_hurry: Callable[[], bool] = lambda: False,
    ) -> Path:
        """Writes a checkpoint atomically; of the rows only those that live, none when it should hurry."""
        state = {
            "task": self.task,
            "counters": vars(self.counters),
            "learner": self.learner.state_dict(),
            "governor": {**self.governor.state_dict(), "owed": self.governor.due(self.counters.frames)},
            "replay": None,
            self.source_key: self.source,
            "random": random_state(),
            "history": history,
        }
        if with_replay and not should_hurry():
            with contextlib.suppress(InterruptedError):
                whole = {**state, "replay": self.replay.state_dict()}
                return save_checkpoint(path, whole, kind=self.kind, should_stop=should_hurry)
        return save_checkpoint(path, state, kind=self.kind)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Continues from a checkpoint, or from the ``last.pt`` of a run's folder, and returns its history.

        The streams of the replay are cut, because its environments are gone: a new episode's first observation is
        never taken for a successor. Without a replay in the checkpoint the warm-up gate closes again. Another update
        ratio, or gate, counts from there on.

        Raises:
            FileNotFoundError, ValueError: if there is no such file, or it is damaged or of another run. Nothing was
                changed.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "checkpoints" / "last.pt"
        state = load_checkpoint(path, kind=self.kind)
        try:
            return self._load(state)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = str(error).strip("'\"")
            raise ValueError(f"resume_from: {path} must be a checkpoint of this configuration: {reason}") from error

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` for what another configuration saved; changes nothing."""
        if state["task"] != self.task:
            raise ValueError(f"env.task must be {state['task']!r} as saved, got {self.task!r}. Nothing was changed.")

    def _load(self, state: dict[str, Any]) -> dict[str, Any]:
        self.check(state)
        counters, source, history = Counters(**state["counters"]), state[self.source_key], state["history"]
        for name, part in (("history", history), (self.source_key, source)):
            if not isinstance(part, dict):
                raise ValueError(f"{name} must be a dictionary, got a {type(part).__name__}. Nothing was changed.")
        here = random_state()
        restore_random_state(state["random"])  # which checks it
        restore_random_state(here)
        self.learner.check_state_dict(state["learner"])
        governor = UpdateGovernor(1, rows_per_step=1)
        governor.load_state_dict(state["governor"])
        owed = state["governor"].get("owed")  # checkpoints of before lack it
        if not (owed is None or (isinstance(owed, int) and owed >= 0)):
            raise ValueError(f"governor: owed must be a number of updates, got {owed!r}. Nothing was changed.")
        if state["replay"] is not None:
            # The replay checks its own state; it is the only part that can refuse from here on.
            self.replay.load_state_dict(state["replay"])
            self.replay.end_streams()
        self.learner.load_state_dict(state["learner"])
        self.governor.load_state_dict(state["governor"])
        if state["replay"] is None:
            self.governor.rearm(counters.frames)
        elif owed is not None:
            self.governor.settle(counters.frames, owed)  # ratio and gate may be others
        self.counters, self.source = counters, source
        restore_random_state(state["random"])
        return history


def prepare_place(folder: Path) -> None:
    """Removes what killed runs had begun to write into a folder of checkpoints, if there is one.

    Raises:
        OSError: for a place that would refuse the first checkpoint, hours later perhaps. Nothing was changed.
    """
    if not folder.exists():
        return
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise OSError(f"{folder} must be a folder that can be written to; nothing was started.")
    for path in folder.glob(".*.pt.*.partial"):
        number = path.suffixes[-2][1:]
        if number.isdecimal() and not _is_another_process(int(number)):
            path.unlink(missing_ok=True)


def _is_another_process(number: int) -> bool:
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        return True
    return number != os.getpid()
