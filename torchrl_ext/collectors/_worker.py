# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What runs in a collector's worker process, from its arguments to its end."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any, cast

import torch
from torchrl.envs import EnvBase
from torchrl.envs.utils import set_exploration_type

from torchrl_ext.collectors._board import Board
from torchrl_ext.collectors._row_plan import RowPlan
from torchrl_ext.collectors._worker_loop import WorkerLoop
from torchrl_ext.collectors._worker_options import WorkerOptions
from torchrl_ext.collectors._worker_policy import WorkerPolicy
from torchrl_ext.transport import CudaIpcProducer, CudaIpcRing, HostProducer, HostRing, RingClosed
from torchrl_ext.transport.producer import RingProducer

__all__ = ["collect"]


def collect(
    channel: Any,
    *,
    create_env_fn: Callable[[], EnvBase],
    policy: Any,
    policy_factory: Callable[[], Any] | None,
    ring: HostRing | CudaIpcRing,
    board: Board,
    weights: Any,
    options: WorkerOptions,
) -> None:
    """Steps an environment until the consumer closes the ring; the target of a worker process."""
    _spare_searches()
    producer: RingProducer
    if isinstance(ring, CudaIpcRing):
        if not channel.poll(options.map_timeout):
            raise TimeoutError(f"RingCollector: the ring's handle must arrive within {options.map_timeout} s.")
        try:
            _use_device(options.policy_device)
            ring.open(channel.recv())
            producer = CudaIpcProducer(ring)
        except Exception as error:
            channel.send(("refused", f"{type(error).__name__}: {error}"))
            return
    else:
        _use_device(options.policy_device)
        producer = HostProducer(ring)
    env = create_env_fn()
    try:
        made = policy_factory() if policy_factory is not None else policy
        acting = WorkerPolicy(made, env, weights, options)
        _check_same(env, acting.example, options, ring)
        channel.send(("ready", None))
        loop = WorkerLoop(channel, env, acting, producer, board, options)
        with torch.no_grad(), set_exploration_type(options.exploration_type), suppress(RingClosed):
            loop.run()
    finally:
        if not env.is_closed:
            env.close()


def _spare_searches() -> None:
    # tensordict looks for pandas on the import path for every output of a module, a tenth of a millisecond where it is
    # not installed. That it is not is remembered here, in a process that is the worker's alone.
    if importlib.util.find_spec("pandas") is None:
        sys.modules.setdefault("pandas", cast(ModuleType, None))


def _use_device(device: torch.device | None) -> None:
    # Graphs are captured, and memory is page-locked, on the current device; another one than the policy's would cost a
    # context, too.
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)


def _check_same(env: EnvBase, policy: Any, options: WorkerOptions, ring: HostRing | CudaIpcRing) -> None:
    plan, count = options.plan, max(env.batch_size.numel(), 1)
    found = RowPlan.of(
        env,
        policy,
        observation_keys=plan.observation_keys,
        extra_keys=plan.extra_keys,
        metric_keys=plan.metric_keys,
        batch=False,
    ).layout
    if found != ring.layout or count != ring.num_streams:
        raise ValueError(
            f"RingCollector: the environment of worker {options.index} must have {ring.num_streams} streams and rows "
            f"of layout {ring.layout.digest[:12]} ({list(ring.layout.by_key)}), got {count} and {found.digest[:12]} "
            f"({list(found.by_key)}). Nothing was collected."
        )
