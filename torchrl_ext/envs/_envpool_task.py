# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What EnvPool says about one task, and how a pool of it is opened.

Step limit  EnvPool reports a termination on the limit step as truncation only. Where a task has no other clock than
            that limit, the pool is opened without one and the caller counts (``limit_in_pool`` is False).
            The other families read it or also end on clocks of their own, which only the pool can tell from a
            termination: they keep the limit, and a step that is both is reported as truncation unless
            ``info["terminated"]`` (MuJoCo Playground, Atari) says more.
Seeds       one per stream, ``seed + stream id``. EnvPool's own default is 42 for everyone, so it is never used.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from packaging.version import Version

MIN_ENVPOOL = "1.2.5"
NO_LIMIT = 2**31 - 1
"""``max_episode_steps`` of a pool that never truncates."""

# Measured per task class: observations, rewards and ends are the same with and without the pool's limit.
# Playground is not among them: AlohaHandOver's dynamics read the limit.
_ONE_CLOCK = (
    "envpool.box2d",
    "envpool.classic_control",
    "envpool.minigrid",
    "envpool.mujoco.dmc",
    "envpool.mujoco.gym",
    "envpool.mujoco.metaworld",
    "envpool.mujoco.myosuite",
    "envpool.mujoco.robotics",
    "envpool.toy_text",
)

_KEYWORDS = {
    "num_envs": "num_envs",
    "batch_size": "num_envs",
    "num_threads": "num_threads",
    "thread_affinity_offset": "thread_affinity_offset",
    "seed": "seed",
    "env_seed": "seed",
    "max_episode_steps": "max_episode_steps",
}
_FIXED = ("max_num_players", "gym_reset_return_info", "base_path")
# EnvPool's ``make`` takes these besides the task's own configuration.
_RENDER_OPTIONS = ("from_pixels", "render_mode", "render_env_id", "render_width", "render_height", "render_camera_id")


@dataclass(frozen=True, kw_only=True)
class EnvPoolTask:
    """One validated task; :meth:`resolve` builds it, :meth:`open` makes its pools."""

    task_id: str
    num_envs: int
    num_threads: int
    thread_affinity_offset: int
    """First core of the pool's threads, -1 when they are not pinned."""
    max_episode_steps: int
    """Agent steps after which an episode is truncated."""
    limit_in_pool: bool
    options: Mapping[str, Any]
    family: str
    """EnvPool's import path of the task, such as ``envpool.mujoco.dmc``."""
    spec: Any
    """EnvPool's ``EnvSpec`` of the task."""

    @classmethod
    def resolve(
        cls,
        task_id: str,
        *,
        num_envs: int,
        num_threads: int | None = None,
        thread_affinity_offset: int | None = None,
        max_episode_steps: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> EnvPoolTask:
        """Checks the arguments of :class:`~torchrl_ext.envs.EnvPoolEnv` and asks EnvPool about the task.

        Raises:
            ImportError: if EnvPool is missing or too old.
            ValueError: if an argument is out of range, or the task or an option unknown. No thread was started.
        """
        if num_threads is None:
            num_threads = max(1, min(num_envs, _usable_cores()))
        _require_at_least("num_envs", num_envs, 1)
        _require_at_least("num_threads", num_threads, 1)
        if thread_affinity_offset is not None:
            _require_at_least("thread_affinity_offset", thread_affinity_offset, 0)
        if max_episode_steps is not None:
            _require_at_least("max_episode_steps", max_episode_steps, 1)
        envpool = import_envpool()
        family = _family(envpool, task_id)
        options = dict(options or {})
        _check_options(envpool, task_id, options)
        spec = envpool.make_spec(task_id, num_envs=num_envs, **options)
        if spec.config.max_num_players > 1 or len(spec.action_array_spec) != 3:
            raise ValueError(
                f"EnvPoolEnv: task {task_id!r} must have one player and one action array, got "
                f"{spec.config.max_num_players} players and actions {list(spec.action_array_spec)[2:]}; "
                "drive it through envpool.make instead."
            )
        return cls(
            task_id=task_id,
            num_envs=num_envs,
            num_threads=num_threads,
            thread_affinity_offset=-1 if thread_affinity_offset is None else thread_affinity_offset,
            max_episode_steps=max_episode_steps or int(spec.config.max_episode_steps),
            limit_in_pool=not family.startswith(_ONE_CLOCK),
            options=options,
            family=family,
            spec=spec,
        )

    @property
    def info_has_termination(self) -> bool:
        """Whether only ``info["terminated"]`` tells a termination that falls on the limit step."""
        return self.limit_in_pool and "info:terminated" in self.spec.state_array_spec

    def open(self, seed: int) -> Any:
        """Opens a pool whose stream ``i`` has the seed ``seed + i``; takes up to seconds for large MuJoCo models."""
        pool = import_envpool().make_gymnasium(
            self.task_id,
            num_envs=self.num_envs,
            num_threads=self.num_threads,
            thread_affinity_offset=self.thread_affinity_offset,
            seed=stream_seeds(seed, self.num_envs),
            max_episode_steps=self.max_episode_steps if self.limit_in_pool else NO_LIMIT,
            **self.options,
        )
        with warnings.catch_warnings():
            # EnvPool caches this gymnasium space on first use, and gymnasium warns about its bounds' precision.
            warnings.simplefilter("ignore")
            _ = pool.observation_space
        return pool


def stream_seeds(seed: int, num_envs: int) -> list[int]:
    """Returns ``seed + stream id`` for each stream, wrapped into the int32 that EnvPool takes.

    Example:
        >>> stream_seeds(7, 3), stream_seeds(2**31 - 1, 2)
        ([7, 8, 9], [2147483647, -2147483648])
    """
    # TorchRL's seeds go up to 2**32 - 1; the wrap is one to one there, so no two streams share a seed.
    return [(seed + stream + 2**31) % 2**32 - 2**31 for stream in range(num_envs)]


def import_envpool() -> ModuleType:
    """Imports EnvPool on first use, so that the package works without it."""
    try:
        import envpool
    except ImportError as err:
        raise ImportError(
            f"EnvPoolEnv: EnvPool >= {MIN_ENVPOOL} must be importable, got {err}; "
            "install it with `pip install torchrl_ext[sota]`."
        ) from err
    version = getattr(envpool, "__version__", "0")
    if Version(version) < Version(MIN_ENVPOOL):
        raise ImportError(
            f"EnvPoolEnv: EnvPool must be >= {MIN_ENVPOOL} (older releases reset and report ends differently), got "
            f"{version}; upgrade it with `pip install -U torchrl_ext[sota]`."
        )
    return envpool


def _family(envpool: ModuleType, task_id: str) -> str:
    known = envpool.list_all_envs()
    if task_id not in known:
        close = difflib.get_close_matches(str(task_id), known, n=3)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "envpool.list_all_envs() names them all."
        raise ValueError(
            f"EnvPoolEnv: task_id must be a task of EnvPool {envpool.__version__}, got {task_id!r}; {hint}"
        )
    from envpool.registration import registry

    return registry.specs[task_id][0]


def _check_options(envpool: ModuleType, task_id: str, options: Mapping[str, Any]) -> None:
    for name in options:
        if name in _KEYWORDS:
            raise ValueError(
                f"EnvPoolEnv: options must not hold {name!r}, which is the keyword {_KEYWORDS[name]!r}; pass it there."
            )
    known = {*envpool.make_spec(task_id).config._fields, *_RENDER_OPTIONS}.difference(_KEYWORDS, _FIXED)
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(
            f"EnvPoolEnv: options must be options of EnvPool's {task_id!r}, got {unknown}; it knows {sorted(known)}."
        )


def _require_at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= NO_LIMIT:
        raise ValueError(f"EnvPoolEnv: {name} must be an int >= {least}, got {value!r}; no pool was opened.")


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
