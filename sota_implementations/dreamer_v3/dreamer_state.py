# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Everything a run goes on from, in one file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dreamer_learner import Learner

from torchrl_ext.data import SlotReplayBuffer
from torchrl_ext.trainers import (
    UpdateGovernor,
    load_checkpoint,
    random_state,
    restore_random_state,
    save_checkpoint,
)

__all__ = ["Counters", "RunState"]

KIND = "torchrl_ext.dreamer_v3/1"


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
        num_envs (int): and so is one of another number of streams.
    """

    task: str
    num_envs: int
    learner: Learner
    governor: UpdateGovernor
    replay: SlotReplayBuffer
    counters: Counters = field(default_factory=Counters)
    collector: dict[str, Any] = field(default_factory=dict)
    """Of the collector; empty before a checkpoint was loaded or saved."""

    def save(self, path: Path, *, history: dict[str, Any], with_replay: bool) -> Path:
        """Writes a checkpoint atomically; of the rows only those that live."""
        state = {
            "task": self.task,
            "counters": vars(self.counters),
            "learner": self.learner.state_dict(),
            "governor": self.governor.state_dict(),
            "replay": self.replay.state_dict() if with_replay else None,
            "collector": self.collector,
            "random": random_state(),
            "history": history,
        }
        return save_checkpoint(path, state, kind=KIND)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Continues from a checkpoint, or from the ``last.pt`` of a run's folder, and returns its history.

        The streams of the replay are cut, because its environments are gone: a new episode's first observation is
        never taken for a successor. Without a replay in the checkpoint the warm-up gate closes again.

        Raises:
            FileNotFoundError, ValueError: if there is no such file, or it is damaged or of another run. The state may
                have been loaded in part.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "checkpoints" / "last.pt"
        state = load_checkpoint(path, kind=KIND)
        try:
            self._load(state)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            reason = str(error).strip("'\"")
            raise ValueError(f"resume_from: {path} must be a checkpoint of this configuration: {reason}") from error
        return state["history"]

    def _load(self, state: dict[str, Any]) -> None:
        if state["task"] != self.task:
            raise ValueError(f"env.task must be {state['task']!r} as saved, got {self.task!r}")
        streams = state["collector"]["num_streams"]
        if streams != self.num_envs:
            raise ValueError(f"env.num_envs must be {streams} as saved, got {self.num_envs}")
        self.counters = Counters(**state["counters"])
        self.learner.load_state_dict(state["learner"])
        self.governor.load_state_dict(state["governor"])
        if state["replay"] is None:
            self.governor.rearm(self.counters.frames)
        else:
            self.replay.load_state_dict(state["replay"])
            self.replay.end_streams()
        self.collector = state["collector"]
        restore_random_state(state["random"])
