# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What a collector tells a worker process at its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchrl.envs.utils import ExplorationType

from torchrl_ext.collectors._row_plan import RowPlan

__all__ = ["WorkerOptions"]


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Settings of a worker.

    Args:
        plan (RowPlan): of a row.
        num_streams (int): streams of all workers.
        tails (bool): whether each step's successors are pushed with it.
        random_steps (int): how many steps, from the next one on, have random actions.
        seed (int, optional): base seed of all streams.
        policy_device (torch.device, optional): of the policy's inputs.
        exploration_type (ExplorationType): in force while the policy acts.
        compile_policy, cudagraph_policy (dict, optional): options of each, where wanted.
        map_timeout (float): seconds to wait for the ring's handle.
        index (int): of the worker.
        first_stream (int): global number of its first stream.
        epoch (int): how often streams began anew before.
        static_seed (bool): passed to the environment with its seed.
    """

    plan: RowPlan
    num_streams: int
    tails: bool
    random_steps: int
    seed: int | None
    policy_device: torch.device | None
    exploration_type: ExplorationType
    compile_policy: dict[str, Any] | None
    cudagraph_policy: dict[str, Any] | None
    map_timeout: float
    index: int = 0
    first_stream: int = 0
    epoch: int = 0
    static_seed: bool = False
