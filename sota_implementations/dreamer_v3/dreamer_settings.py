# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The configuration as frozen dataclasses that refuse nonsense. Defaults live in ``config/`` alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from common.parsing import parse, require
from common.setting_groups import CheckpointSettings, CollectorSettings, EnvSettings, EvalSettings, LogSettings


@dataclass(frozen=True, kw_only=True)
class RecurrentCollectorSettings(CollectorSettings):
    """The worker processes, whose policy remembers."""

    cudagraph_policy: bool | None
    """Whether workers act by one CUDA graph per step. None is: where they act on a GPU."""

    def captures_on(self, device: torch.device) -> bool:
        """Whether workers that act on a device capture their step.

        Raises:
            ValueError: if they should and cannot.
        """
        on_gpu = device.type == "cuda"
        if self.cudagraph_policy is None:
            return on_gpu
        holds = on_gpu or not self.cudagraph_policy
        require(holds, "collector.cudagraph_policy", f"null or false where workers act on {device}", True)
        return self.cudagraph_policy


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """Sizes of the replay."""

    capacity: int
    """Slots per stream."""
    device: str | None
    """None is the learner's device."""
    online: bool
    """Windows that were just completed first, each once; then uniform ones."""
    prefetch: int | None
    """Batches drawn ahead, which do not wait for the latents of the updates meanwhile. None is 1 where a replay on the
    host feeds a learner on a device, which would wait for it; else 0."""

    visibility: str
    """Whether a batch that is drawn waits for the latents of the update before: ``ordered``, ``eventual``."""

    def __post_init__(self) -> None:
        known = ("ordered", "eventual")
        require(self.visibility in known, "replay.visibility", f"one of {known}", self.visibility)
        require(self.prefetch is None or self.prefetch >= 0, "replay.prefetch", "null or >= 0", self.prefetch)


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """Sizes of the networks."""

    belief: int
    """Features of the deterministic state."""
    categoricals: int
    classes: int
    """Of each categorical; the stochastic state has categoricals * classes features."""
    hidden: int
    blocks: int
    """Of the block-diagonal recurrent layer; they divide ``belief``."""
    unimix: float
    dynamics_layers: int
    prior_layers: int
    posterior_layers: int
    encoder_layers: int
    decoder_layers: int
    reward_layers: int
    actor_layers: int
    value_layers: int
    decoder_sizes: list[int] | None
    """Features of each part of a flat observation, which gets a head of its own (clipped apart); None is one head."""
    bins: int
    """Of the two-hot distributions of rewards and values."""
    norm_eps: float
    min_std: float
    max_std: float
    image_depth: int
    image_mults: list[int]
    image_kernel: int
    image_blocks: int

    def __post_init__(self) -> None:
        require(
            self.belief >= 1 and self.belief % self.blocks == 0,
            "networks.belief",
            f"a multiple of networks.blocks = {self.blocks}",
            self.belief,
        )
        require(0 <= self.unimix < 1, "networks.unimix", "in [0, 1)", self.unimix)
        require(0 < self.min_std <= self.max_std, "networks.min_std", "in (0, max_std]", self.min_std)


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """The update."""

    batch_size: int
    """Windows of an update."""
    seq_len: int
    """Steps of a window; one more row is sampled, whose latents are refreshed."""
    train_ratio: float
    """Replayed steps per collected step: updates per step are train_ratio / (batch_size * seq_len)."""
    lr: float
    warmup_steps: int
    """Updates until the learning rate is reached."""
    adaptive_grad_clip: float
    optimizer_eps: float
    imagination_horizon: int
    continuation_horizon: float
    gamma: float
    lmbda: float
    return_rate: float
    """Of the moving quantiles that scale returns."""
    entropy: float
    slow_critic_weight: float
    slow_critic_tau: float
    replay_value_weight: float
    free_bits: float
    dynamic_weight: float
    representation_weight: float
    mixed_precision: bool
    """bfloat16 on CUDA."""
    compile: bool | None
    """None is: on CUDA. The update is compiled, with the recurrence as one scan."""
    compile_scan: bool
    """Compiles the recurrence and the imagined step alone instead, which is done in less time than all."""
    cuda_graph: bool | None
    """None is: on CUDA."""
    scan_unroll: int

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len", "imagination_horizon", "scan_unroll"):
            require(getattr(self, name) >= 1, f"learner.{name}", ">= 1", getattr(self, name))
        require(not (self.compile and self.compile_scan), "learner.compile", "null or false with compile_scan", True)
        require(self.train_ratio > 0, "learner.train_ratio", "positive", self.train_ratio)
        require(self.lr > 0, "learner.lr", "positive", self.lr)
        require(self.continuation_horizon > 1, "learner.continuation_horizon", "> 1", self.continuation_horizon)

    @property
    def updates_per_row(self) -> float:
        """Updates per collected row."""
        return self.train_ratio / (self.batch_size * self.seq_len)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a run depends on."""

    seed: int
    device: str
    torch_threads: int | None
    total_frames: int
    """Rows to collect, those before a resume included."""
    resume_from: str | None
    env: EnvSettings
    collector: RecurrentCollectorSettings
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
        streams, window = self.env.num_envs, self.learner.seq_len + 1
        require(
            self.total_frames >= 1 and self.total_frames % streams == 0,
            "total_frames",
            f"a positive multiple of env.num_envs = {streams}",
            self.total_frames,
        )
        require(
            self.collector.num_workers <= streams,
            "collector.num_workers",
            f"at most env.num_envs = {streams}",
            self.collector.num_workers,
        )
        require(
            self.replay.capacity > window,
            "replay.capacity",
            f"more than learner.seq_len + 1 = {window}",
            self.replay.capacity,
        )
        # So that at least one stream has a window.
        fewest, most = streams * (window + 1), streams * self.replay.capacity
        require(
            fewest <= self.collector.learning_starts <= most,
            "collector.learning_starts",
            f"between env.num_envs * (learner.seq_len + 2) = {fewest} and env.num_envs * replay.capacity = {most}",
            self.collector.learning_starts,
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Settings:
        """Builds and checks the settings of a resolved Hydra configuration; raises ``ValueError``."""
        return parse(cls, values)
