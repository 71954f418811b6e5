# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""A TorchRL environment over EnvPool, in which every row is a true transition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Categorical, Composite, TensorSpec, Unbounded
from torchrl.data.utils import DEVICE_TYPING
from torchrl.envs import EnvBase

from torchrl_ext.envs._envpool_streams import Finals, PoolStreams
from torchrl_ext.envs._envpool_task import EnvPoolTask
from torchrl_ext.envs._rows import BoundRow


class EnvPoolEnv(EnvBase):
    """``num_envs`` streams of one `EnvPool <https://envpool.readthedocs.io>`_ task, stepped together.

    Two ways in: the TorchRL one (``reset``, ``step``, ``step_and_maybe_reset``, ``rollout``, collectors), and
    :meth:`step_into`, which writes straight into a row of a ring or a storage.

    Streams     stream ``i`` has the seed ``seed + i`` and is bit for bit the single environment of that seed.
    Ends        ``terminated`` and ``truncated`` are told apart and both may be true; ``done`` is either. A termination
                on the limit step is both (except Highway, Jumanji, GFootball, Procgen, ViZDoom and Pgx, whose own
                clocks cannot be told from it: truncation only).
    Resets      ``("next", obs)`` of an ended stream is its true final observation, the next root its reset
                observation. EnvPool's own auto-reset, which ignores an action, is never used: a stream that ended
                must be reset before it is stepped again.
    Ownership   what ``reset`` and ``step`` return is never written again. :meth:`current_observation` is a view.
    Lifetime    the pool is opened by the first ``reset`` and again after ``set_seed`` or ``close``, so constructing
                an environment for its specs is cheap.

    Args:
        task_id (str): any single-player task of ``envpool.list_all_envs()``.

    Keyword Args:
        num_envs (int): number of streams ``n``; the batch size is ``[n]``.
        num_threads (int, optional): threads of the pool. Default: ``n``, at most the usable cores.
        thread_affinity_offset (int, optional): pin thread ``k`` to core ``offset + k``. Default: not pinned.
        seed (int, optional): base seed. Default: drawn from torch's global generator.
        dtype (torch.dtype): ``torch.float32`` (default) or ``torch.float64``, of floating observations and actions;
            EnvPool's float64 is cast once. Rewards are always float32, pixels uint8.
        max_episode_steps (int, optional): agent steps after which an episode is truncated. Default: the task's own.
        flatten_obs (bool, optional): concatenate the observation arrays into ``"observation"``, in the order in
            which EnvPool declares them (for DMC walkers: orientations, height, velocity), scalars as width 1.
            Default: for DMC states only. Otherwise an only array is ``"observation"`` and several keep EnvPool's
            names (MuJoCo Playground: ``"state"``, ``"privileged_state"``).
        options (Mapping[str, Any], optional): further EnvPool options of the task, such as ``frame_skip``.
        device (torch.device, optional): where ``reset`` and ``step`` put their results. Default: ``"cpu"``.

    Raises:
        ImportError: if EnvPool >= 1.2.5 is missing (extra ``sota``).
        ValueError: if the task or an option is unknown, or an argument out of range.

    Example:
        >>> env = EnvPoolEnv("Pendulum-v1", num_envs=3, num_threads=1, seed=0, max_episode_steps=4)
        >>> data = env.rollout(6, break_when_any_done=False)
        >>> data["next", "truncated"][0, :, 0].tolist()
        [False, False, False, True, False, False]
        >>> env.close()
    """

    def __init__(
        self,
        task_id: str,
        *,
        num_envs: int,
        num_threads: int | None = None,
        thread_affinity_offset: int | None = None,
        seed: int | None = None,
        dtype: torch.dtype = torch.float32,
        max_episode_steps: int | None = None,
        flatten_obs: bool | None = None,
        options: Mapping[str, Any] | None = None,
        device: DEVICE_TYPING | None = "cpu",
    ) -> None:
        task = EnvPoolTask.resolve(
            task_id,
            num_envs=num_envs,
            num_threads=num_threads,
            thread_affinity_offset=thread_affinity_offset,
            max_episode_steps=max_episode_steps,
            options=options,
        )
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"EnvPoolEnv: dtype must be torch.float32 or torch.float64, got {dtype}.")
        super().__init__(device=device, batch_size=[num_envs])
        if flatten_obs is None:
            flatten_obs = task.family == "envpool.mujoco.dmc" and "obs:pixels" not in task.spec.state_array_spec
        self._task = task
        self._streams = PoolStreams(task, flatten=flatten_obs, dtype=dtype)
        flag = Categorical(2, shape=(num_envs, 1), dtype=torch.bool, device=device)
        self.observation_spec = self._placed(self._streams.observation.spec)
        self.action_spec = self._placed(self._streams.action.spec)
        self.reward_spec = Unbounded((num_envs, 1), dtype=torch.float32, device=device)
        self.done_spec = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=(num_envs,), device=device
        )
        self._set_seed(seed)

    @property
    def task_id(self) -> str:
        """EnvPool's name of the task."""
        return self._task.task_id

    @property
    def max_episode_steps(self) -> int:
        """Agent steps after which an episode is truncated; ``2**31 - 1`` where the task has no limit."""
        return self._task.max_episode_steps

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Seconds spent since construction, by stage of a step: ``"pool"`` is EnvPool itself."""
        return self._streams.stage_seconds

    def current_observation(self) -> TensorDict:
        """Returns what the policy should look at next: batch size ``[n]``, on the host, no copy.

        It holds until the next step or reset and is always the same object. Clone what must live longer.
        """
        self._streams.check_open("current_observation")
        return self._streams.observation.data

    def bind_row(self, row: TensorDictBase) -> BoundRow:
        """Resolves the leaves of a row that :meth:`step_into` will fill many times, such as a slot of a ring.

        Args:
            row (TensorDictBase): as for :meth:`step_into`. Its leaves must not be replaced afterwards, and their
                memory lives as long as the result.

        Returns:
            BoundRow: to be passed to :meth:`step_into` of this environment.

        Raises:
            ValueError: if a leaf has a wrong shape, dtype or device.
        """
        return self._streams.bind_row(row)

    def step_into(self, action: torch.Tensor, row: TensorDictBase | BoundRow) -> Finals | None:
        """Steps every stream, writes the transition into ``row`` and resets the streams that ended.

        Args:
            action (torch.Tensor): as ``action_spec`` says, on any device.
            row (TensorDictBase or BoundRow): batch size ``[n]``, host views of any stride: the observation keys (the
                observation that ``action`` answers), ``"action"``, ``("next", "reward")``, ``("next", "terminated")``,
                ``("next", "truncated")``, ``("next", "done")``, each ``[n, 1]``, and ``("next", obs)`` (the true
                successor). Keys that ``row`` lacks are skipped, keys that are not named here left alone. A row from
                :meth:`bind_row` is faster.

        Returns:
            Finals, optional: the final observations of the streams that ended, None when none did.

        Raises:
            RuntimeError: before the first ``reset``, or while a stream that ``step`` ended waits for its reset.
            ValueError: if ``action`` or a leaf of ``row`` has a wrong shape, dtype or device, or another environment
                bound the row. Nothing was stepped or written.

        Example:
            >>> env = EnvPoolEnv("Pendulum-v1", num_envs=2, num_threads=1, seed=0, max_episode_steps=2)
            >>> first = env.reset()
            >>> row = env.fake_tensordict()
            >>> env.step_into(torch.zeros(2, 1), row) is None, bool((row["observation"] == first["observation"]).all())
            (True, True)
            >>> env.step_into(torch.zeros(2, 1), row).streams
            tensor([0, 1])
            >>> env.close()
        """
        return self._streams.step_into(action, row)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        # TorchRL's "_step" mask (rollouts until all are done) names the streams to step; the others stand still.
        self._streams.step(tensordict["action"], _masked(tensordict.get("_step", None)))
        return self._owned(self._streams.observation.data, self._streams.outcome)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        streams = _masked(None if tensordict is None else tensordict.get("_reset", None))
        if self._streams.is_open or streams is not None:
            self._streams.check_open("reset")
            if streams is None or len(streams):
                self._streams.restart(streams)
        else:
            self._streams.open(self._seed)
            self.is_closed = False
        return self._owned(self._streams.observation.data)

    def _set_seed(self, seed: int | None) -> None:
        self._seed = int(torch.randint(2**31, ())) if seed is None else int(seed)
        # EnvPool cannot reseed a pool.
        self._streams.close()

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Ends the pool's threads; may be called twice. A later ``reset`` opens a fresh pool with the same seeds."""
        self._streams.close()
        self.is_closed = True

    def _placed(self, spec: TensorSpec) -> TensorSpec:
        return spec if self.device is None else spec.to(self.device)

    def _owned(self, *parts: TensorDict) -> TensorDict:
        result = TensorDict({}, batch_size=self.batch_size, device=self.device)
        for part in parts:
            result.update(part.clone())
        return result

    def __repr__(self) -> str:
        return f"EnvPoolEnv({self.task_id!r}, num_envs={self._task.num_envs}, device={self.device})"


def _masked(mask: torch.Tensor | None) -> np.ndarray | None:
    """Returns the ids (int32) of the streams that a mask ``[n]`` or ``[n, 1]`` selects, None when all or no mask."""
    if mask is None or mask.all():
        return None
    return np.flatnonzero(mask.reshape(-1).cpu().numpy()).astype(np.int32)
