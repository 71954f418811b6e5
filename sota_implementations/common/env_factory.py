# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Makes the environments of a run: EnvPool's, or any TorchRL environment, one process or one per stream."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torchrl.data import TensorSpec
from torchrl.envs import (
    CatTensors,
    Compose,
    DoubleToFloat,
    EnvBase,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)

from common.setting_groups import EnvSettings
from torchrl_ext.envs import EnvPoolEnv

__all__ = ["choose_backend", "make_env"]


def choose_backend(settings: EnvSettings) -> str:
    """Resolves ``backend=auto``: EnvPool when it is installed and has the task, else DMC's ids, else Gymnasium."""
    if settings.backend != "auto":
        return settings.backend
    gym_knows = importlib.util.find_spec("gymnasium") is not None and _gym_has(settings.task)
    if importlib.util.find_spec("envpool") is not None:
        import envpool

        # What neither knows goes to EnvPool, whose error names the nearest tasks.
        return "envpool" if settings.task in envpool.list_all_envs() or not gym_knows else "gym"
    if not gym_knows and importlib.util.find_spec("dm_control") is not None:
        return "dm_control"
    if gym_knows:
        return "gym"
    raise ValueError(
        f"env.task must be known to an installed backend, got {settings.task!r} with neither EnvPool nor dm_control "
        "installed and unknown to Gymnasium; install the extra with `pip install torchrl_ext[sota]`."
    )


def make_env(settings: EnvSettings, *, num_envs: int, seed: int, num_threads: int | None, evaluate: bool) -> EnvBase:
    """Makes ``num_envs`` streams with batch size ``[num_envs]``, on the host.

    Args:
        settings (EnvSettings): the task.

    Keyword Args:
        num_envs (int): streams.
        seed (int): base seed; EnvPool's stream ``i`` gets ``seed + i``, TorchRL derives one seed per stream.
        num_threads (int, optional): EnvPool's threads.
        evaluate (bool): of an evaluation; it never starts processes and is not pinned.

    Raises:
        ImportError: if the backend is not installed.
        ValueError: if the task or an option is unknown to it.
    """
    backend = choose_backend(settings)
    limit = settings.max_episode_steps
    if not evaluate and settings.train_episode_steps is not None:
        limit = settings.train_episode_steps
    if backend == "envpool":
        return EnvPoolEnv(
            settings.task,
            num_envs=num_envs,
            num_threads=num_threads,
            thread_affinity_offset=None if evaluate else settings.thread_affinity_offset,
            seed=seed,
            max_episode_steps=limit,
            options=settings.options,
        )
    make_one = partial(_make_one, backend, settings.task, limit, dict(settings.options or {}))
    if backend == "factory":
        function = _factory(settings.task)
        signature, options = inspect.signature(function), dict(settings.options or {})
        batched = "num_envs" in signature.parameters
        if batched:
            options["num_envs"] = num_envs
        try:
            signature.bind(**options)
        except TypeError as error:
            raise ValueError(
                f"env.options must be arguments of {settings.task!r}, got {settings.options}: {error}; "
                "nothing was started."
            ) from error
        if batched:
            env = _adapted(function(**options), backend, limit)
            if tuple(env.batch_size) != (num_envs,):
                env.close()
                raise ValueError(
                    f"env.task {settings.task!r} must return an environment of batch size [{num_envs}], got "
                    f"{list(env.batch_size)}; nothing was started."
                )
            env.set_seed(seed)
            return env
    parallel = settings.workers == "parallel" and not evaluate and num_envs > 1
    # Serial environments are made in this process, where a wrong task raises its own error.
    env = (ParallelEnv if parallel else SerialEnv)(num_envs, make_one)
    env.set_seed(seed)
    return env


def _make_one(backend: str, task: str, max_episode_steps: int | None, options: dict[str, Any]) -> EnvBase:
    make = {"gym": _make_gym, "dm_control": _make_dmc, "factory": _make_custom}[backend]
    return _adapted(make(task, options), backend, max_episode_steps)


def _adapted(env: EnvBase, backend: str, max_episode_steps: int | None) -> EnvBase:
    """Makes doubles floats, flattens DMC's observations and ends episodes after so many steps."""
    transforms: list[Any] = []
    leaves = list(env.observation_spec.keys(True, True))
    if backend == "dm_control":
        transforms.append(_flatten(env))
        leaves = ["observation"]
    doubles: list[Any] = [key for key in leaves if backend == "dm_control" or _is_double(env.observation_spec[key])]
    if _is_double(env.reward_spec):
        doubles.append("reward")
    actions = ["action"] if _is_double(env.action_spec) else []
    if doubles or actions:
        transforms.append(DoubleToFloat(in_keys=doubles, in_keys_inv=actions))
    if max_episode_steps is not None:
        transforms.append(StepCounter(max_steps=max_episode_steps))
    return TransformedEnv(env, Compose(*transforms)) if transforms else env


def _is_double(spec: TensorSpec) -> bool:
    return spec.dtype == torch.float64


def _flatten(env: EnvBase) -> CatTensors:
    spec = env.observation_spec
    # EnvPool flattens in the same way: in the order of the task, scalars as one feature.
    keys = list(spec.keys(True, True))
    return CatTensors(in_keys=keys, out_key="observation", dim=-1, sort=False)


def _gym_has(task: str) -> bool:
    import gymnasium

    return task in gymnasium.registry or ":" in task


def _make_gym(task: str, options: dict[str, Any]) -> EnvBase:
    import gymnasium
    from torchrl.envs import GymEnv, set_gym_backend

    try:
        with set_gym_backend("gymnasium"):
            return GymEnv(task, **options)
    except (gymnasium.error.Error, TypeError) as error:
        raise ValueError(f"env.task must be a task of Gymnasium that can be made, got {task!r}: {error}") from error


def _make_dmc(task: str, options: dict[str, Any]) -> EnvBase:
    try:
        from dm_control import suite
    except ImportError as error:
        raise ImportError(f"env.backend=dm_control needs dm_control, got {error}; `pip install dm-control`.") from error
    from torchrl.envs import DMControlEnv

    wanted = task.split("-v")[0].replace("_", "").replace("-", "").lower()
    known = {f"{domain}{name}".replace("_", "").lower(): (domain, name) for domain, name in suite.ALL_TASKS}
    if wanted not in known:
        raise ValueError(f"env.task must be a task of dm_control such as WalkerWalk-v1, got {task!r}.")
    return DMControlEnv(*known[wanted], **options)


def _make_custom(task: str, options: dict[str, Any]) -> EnvBase:
    return _factory(task)(**options)


def _factory(task: str) -> Callable[..., EnvBase]:
    module, _, name = task.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a script's path begins at its own folder
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"env.task must be an importable module:function, got {task!r}: {error}.") from error
