# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The configuration as frozen dataclasses that refuse nonsense. Defaults live in ``config/`` alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from common import setting_groups as groups
from common.parsing import parse, require
from common.setting_groups import CheckpointSettings, CollectorSettings, EvalSettings, LogSettings


@dataclass(frozen=True, kw_only=True)
class EnvSettings(groups.EnvSettings):
    """Which environment, how many streams of it, and what is seen of it."""

    actor_keys: list[str] | None
    """Observations of the actor; None takes ``state`` where the task is asymmetric, else ``observation``."""
    critic_keys: list[str] | None
    """Observations of the critics; None takes ``privileged_state`` where the task is asymmetric."""


@dataclass(frozen=True, kw_only=True)
class FastSACCollectorSettings(CollectorSettings):
    """How rows are collected; what workers have matters with ``async`` only."""

    steps_per_run: int
    """Vector steps between two blocks of updates, in turns; workers push each step as it comes."""
    warm_up_actions: Literal["policy", "uniform"]
    """Who acts until then: the policy as initialised, or uniform draws from the action box."""
    governor: Literal["strict", "free"]
    """Exactly ``updates_per_step``, workers held back by ``max_ahead``; or as many as the learner can take."""
    cores: str | None
    """For the workers, such as ``0:11``."""
    env_threads: int | None
    """EnvPool's threads in each worker; None divides ``env.num_threads`` among them.

    While the policy of one worker acts, the others' environments have its cores: more threads than cores keep all of
    them busy.
    """

    def __post_init__(self) -> None:
        require(self.steps_per_run >= 1, "collector.steps_per_run", ">= 1", self.steps_per_run)
        threads = self.env_threads
        require(threads is None or threads >= 1, "collector.env_threads", ">= 1 or null", threads)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """Sizes of the replay."""

    capacity: int
    """Slots per stream."""
    final_capacity: int | None
    """Final observations per stream; None is 1/64 of the slots. On CUDA it cannot grow: short episodes need more."""
    device: str | None
    """None is the learner's device."""

    def __post_init__(self) -> None:
        require(self.capacity >= 2, "replay.capacity", ">= 2", self.capacity)


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """Sizes of the networks and the range of returns."""

    actor_hidden: int
    critic_hidden: int
    num_critics: int
    num_atoms: int
    v_min: float
    v_max: float
    init_std: float | None
    log_std_min: float
    log_std_max: float
    normalize: bool
    """Normalise observations by the statistics of collected rows."""
    observation_clamp: float | None
    """Limit of a normalised observation."""
    pad_to: int


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """The gradient step."""

    batch_size: int
    updates_per_step: float
    """Gradient steps per vector step (``num_envs`` rows)."""
    n_steps: int
    gamma: float
    tau: float
    policy_frequency: int
    critic_lr: float
    actor_lr: float
    alpha_lr: float
    betas: list[float]
    weight_decay: float
    max_grad_norm: float | None
    target_reduction: Literal["min", "mean", "own"]
    policy_reduction: Literal["min", "mean"]
    alpha_init: float
    min_alpha: float | None
    target_entropy_ratio: float
    autocast: Literal["bf16"] | None
    cuda_graph: bool
    """On CUDA: one launch per gradient step."""
    compile: bool
    """On CUDA: Inductor compiles captured steps."""

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, "learner.batch_size", ">= 1", self.batch_size)
        ratio = self.updates_per_step
        require(0 < ratio < math.inf, "learner.updates_per_step", "positive and finite", ratio)
        require(self.n_steps >= 1, "learner.n_steps", ">= 1", self.n_steps)
        require(0 <= self.gamma <= 1, "learner.gamma", "in [0, 1]", self.gamma)
        within = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(within, "learner.betas", "two numbers in [0, 1)", self.betas)
        for name in ("critic_lr", "actor_lr", "alpha_lr", "weight_decay"):
            require(getattr(self, name) >= 0, f"learner.{name}", ">= 0", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a run depends on."""

    seed: int
    device: str
    torch_threads: int | None
    total_frames: int | None
    """Rows to collect, those before a resume included."""
    time_budget: float | None
    """Seconds of training, those before a resume included."""
    resume_from: str | None
    run_async: bool | None
    """``async`` in the configuration: workers collect while the learner learns; None is: on CUDA."""
    env: EnvSettings
    collector: FastSACCollectorSettings
    replay: ReplaySettings
    networks: NetworkSettings
    learner: LearnerSettings
    eval: EvalSettings
    log: LogSettings
    checkpoint: CheckpointSettings

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**31, "seed", "in [0, 2**31)", self.seed)
        threads = self.torch_threads
        require(threads is None or threads >= 1, "torch_threads", ">= 1 or null", threads)
        require(
            self.total_frames is not None or self.time_budget is not None,
            "total_frames or time_budget",
            "set",
            "null for both",
        )
        require(self.total_frames is None or self.total_frames >= 1, "total_frames", ">= 1", self.total_frames)
        require(self.time_budget is None or self.time_budget > 0, "time_budget", "positive", self.time_budget)
        per_run = self.env.num_envs * self.collector.steps_per_run
        if self.total_frames is not None and self.total_frames % per_run:
            below = self.total_frames // per_run * per_run
            near = f"{below} or {below + per_run}" if below else f"{per_run}"
            must = f"a multiple of num_envs * steps_per_run = {per_run} ({near})"
            require(False, "total_frames", must, self.total_frames)
        room = self.replay.capacity * self.env.num_envs
        require(
            self.collector.learning_starts <= room,
            "collector.learning_starts",
            f"at most replay.capacity * env.num_envs = {room}",
            self.collector.learning_starts,
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Settings:
        """Builds and checks the settings of a resolved Hydra configuration; raises ``ValueError``."""
        # "async" is a word of Python's own.
        return parse(cls, {"run_async" if key == "async" else key: value for key, value in values.items()})
