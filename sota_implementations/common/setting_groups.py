# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Groups of settings that every script has, as frozen dataclasses that refuse nonsense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from common.parsing import require


@dataclass(frozen=True, kw_only=True)
class EnvSettings:
    """Which environment, and how many streams of it."""

    task: str
    """EnvPool's, Gymnasium's or DMC's id; for ``backend=factory`` a ``module:function``."""
    backend: Literal["auto", "envpool", "gym", "dm_control", "factory"]
    num_envs: int
    num_threads: int | None
    """EnvPool's threads; None is one per stream, at most the usable cores."""
    thread_affinity_offset: int | None
    max_episode_steps: int | None
    """Agent steps after which an episode is truncated; None is the task's own limit."""
    train_episode_steps: int | None
    """The same for training alone; None is ``max_episode_steps``. Evaluations see the task as it is."""
    workers: Literal["serial", "parallel"]
    """Of other backends than EnvPool: all streams in one process, or one process each."""
    options: dict[str, Any] | None
    """Further options of the task; for a factory its keyword arguments."""

    def __post_init__(self) -> None:
        require(self.num_envs >= 1, "env.num_envs", ">= 1", self.num_envs)
        require(self.num_threads is None or self.num_threads >= 1, "env.num_threads", ">= 1 or null", self.num_threads)


@dataclass(frozen=True, kw_only=True)
class CollectorSettings:
    """The worker processes of a collector, and when learning starts."""

    learning_starts: int
    """Rows below which there is no update."""
    max_ahead: int
    """Vector steps that may be collected before the updates of the rows at hand are done."""
    publish_every: int
    """Updates between two publications of the weights."""
    num_workers: int
    policy_device: str
    """Where workers act; ``learner`` is the learner's device."""
    policy_threads: int
    """Of torch in each worker."""
    transport: Literal["auto", "host", "ipc"]
    ring_slots: int | None
    stall_timeout: float
    max_restarts: int
    """Dead workers that are started anew before the run gives up."""

    def __post_init__(self) -> None:
        for name in ("learning_starts", "max_ahead", "publish_every", "num_workers", "policy_threads"):
            require(getattr(self, name) >= 1, f"collector.{name}", ">= 1", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """Evaluation in an environment of its own, with the mode of the policy."""

    episodes: int
    every: int | None
    """Rows between evaluations; None evaluates at the end only."""
    max_steps: int
    """Steps after which an episode that has not ended is counted as it is."""
    num_threads: int | None
    """EnvPool's."""

    def __post_init__(self) -> None:
        require(self.episodes >= 1, "eval.episodes", ">= 1", self.episodes)
        require(self.every is None or self.every >= 1, "eval.every", ">= 1 or null", self.every)
        require(self.max_steps >= 1, "eval.max_steps", ">= 1", self.max_steps)


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """What is written down, and where."""

    every: int
    """Rows between two lines of metrics."""
    print_every: float
    """Seconds between two printed lines when the output is not a terminal."""
    backends: list[Literal["csv", "tensorboard"]]

    def __post_init__(self) -> None:
        require(self.every >= 1, "log.every", ">= 1", self.every)
        require(self.print_every > 0, "log.print_every", "positive", self.print_every)


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When ``last.pt`` is written besides the end."""

    every: float | None
    """Seconds; None writes it at the end only."""
    replay: bool
    """Whether it contains the replay."""

    def __post_init__(self) -> None:
        require(self.every is None or self.every > 0, "checkpoint.every", "positive or null", self.every)
