# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The streams of one EnvPool task on the host: pool, newest observation, outcome of the last step.

EnvPool resets an ended stream by itself on the next step, ignores that stream's action there and, on DMC, repeats the
old reward: a row that never happened. So ended streams are reset before they are stepped; EnvPool then gives the same
reset observation and does not reset again.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_ext.envs._envpool_specs import ActionBuffer, ObservationBuffer
from torchrl_ext.envs._envpool_task import EnvPoolTask
from torchrl_ext.envs._rows import BoundRow


class Finals(NamedTuple):
    """What :meth:`EnvPoolEnv.step_into` returns when episodes ended; both own their memory."""

    streams: torch.Tensor
    """Streams that ended, ``int64 [m]``, ascending."""
    observations: TensorDict
    """Their true final observations, batch size ``[m]``, in the same order."""


class PoolStreams:
    """Steps and resets streams; everything it shows is overwritten by the next call.

    Args:
        task (EnvPoolTask): the task.

    Keyword Args:
        flatten (bool): concatenate the observation arrays.
        dtype (torch.dtype): dtype of floating observations and actions.
    """

    stage_seconds: dict[str, float]
    """Seconds since construction by stage: ``pool`` is EnvPool's own step."""
    outcome: TensorDict
    """``reward``, ``terminated``, ``truncated``, ``done``, each ``[n, 1]``; the flags of a reset stream are False."""

    def __init__(self, task: EnvPoolTask, *, flatten: bool, dtype: torch.dtype) -> None:
        n = task.num_envs
        self.observation = ObservationBuffer(
            task.spec.state_array_spec, num_envs=n, flatten=flatten, dtype=dtype, task_id=task.task_id
        )
        self.action = ActionBuffer(task.spec.action_array_spec, num_envs=n, dtype=dtype, task_id=task.task_id)
        self.stage_seconds = {"pool": 0.0}
        self._task = task
        self._limit = task.max_episode_steps
        # EnvPool builds its specs anew on every access.
        self._info_has_termination = task.info_has_termination
        self._pool: Any = None
        flags = {key: torch.zeros(n, 1, dtype=torch.bool) for key in ("terminated", "truncated", "done")}
        self.outcome = TensorDict({"reward": torch.zeros(n, 1), **flags}, batch_size=[n]).lock_()
        self._reward, self._terminated, self._truncated, self._done = (
            self.outcome[key].numpy()[:, 0] for key in ("reward", "terminated", "truncated", "done")
        )
        self._root = self.observation.data.to_dict()
        self._next = {**self._root, **self.outcome.to_dict()}
        self._action_example = self.action.spec.zero()

    @property
    def is_open(self) -> bool:
        """Whether a pool runs; it was reset when it was opened."""
        return self._pool is not None

    def open(self, seed: int) -> None:
        """Opens the pool and resets every stream."""
        self._pool = self._task.open(seed)
        self.restart(None)

    def close(self) -> None:
        """Ends the pool's threads; may be called twice."""
        self._pool = None

    def check_open(self, where: str) -> None:
        """Raises RuntimeError where nothing was reset yet."""
        if self._pool is None:
            raise RuntimeError(
                f"EnvPoolEnv.{where}: all streams must have been reset since construction, set_seed or close, got "
                "none; call reset() first."
            )

    def check_steppable(self, where: str, streams: np.ndarray | None = None) -> None:
        """Raises RuntimeError if one of ``streams`` (default: all) cannot be stepped."""
        self.check_open(where)
        if np.count_nonzero(self._done):
            ended = np.flatnonzero(self._done) if streams is None else streams[self._done[streams]]
            if len(ended):
                raise RuntimeError(
                    f"EnvPoolEnv.{where}: streams must be reset after they ended, got ended streams {ended.tolist()}; "
                    "no stream was stepped, use step_and_maybe_reset or reset them."
                )

    def step(self, action: torch.Tensor, streams: np.ndarray | None = None) -> None:
        """Steps ``streams`` (int32 ids, all by default); the others keep observation and flags, with reward 0."""
        self.check_steppable("step", streams)
        self.action.write(action)
        self._exchange(streams)

    def bind_row(self, row: TensorDictBase) -> BoundRow:
        """See :meth:`EnvPoolEnv.bind_row`."""
        return BoundRow(row, root=self._root, action=self._action_example, following=self._next, owner=self)

    def step_into(self, action: torch.Tensor, row: TensorDictBase | BoundRow) -> Finals | None:
        """See :meth:`EnvPoolEnv.step_into`."""
        self.check_steppable("step_into")
        bound = row if isinstance(row, BoundRow) else self.bind_row(row)
        if bound.owner is not self:
            raise ValueError(
                "EnvPoolEnv.step_into: row must be bound by the environment that steps, got one bound by another; "
                "nothing was stepped or written, call bind_row of this one."
            )
        array = self.action.write(action)
        # Only now: a call that raises must leave the row as it was.
        bound.write_root(array)
        self._exchange(None)
        bound.write_next()
        if not np.count_nonzero(self._done):
            return None
        streams = np.flatnonzero(self._done)
        index = torch.from_numpy(streams)
        finals = Finals(index, self.observation.data[index])
        self.restart(streams.astype(np.int32))
        return finals

    def restart(self, streams: np.ndarray | None) -> None:
        """Resets ``streams`` (int32 ids, all for None), ended or not; each goes on with its own random numbers."""
        observation, _ = self._pool.reset(streams)
        self.observation.write(observation, streams)
        rows = slice(None) if streams is None else streams
        for flag in (self._terminated, self._truncated, self._done):
            flag[rows] = False

    def _exchange(self, streams: np.ndarray | None) -> None:
        begun = time.perf_counter()
        self._pool.send(self.action.message(streams))
        observation, reward, terminated, truncated, info = self._pool.recv()
        self.stage_seconds["pool"] += time.perf_counter() - begun
        self.observation.write(observation, streams)
        if self._info_has_termination:
            terminated = terminated | info["terminated"].astype(bool)
        rows = slice(None) if streams is None else streams
        if streams is None:
            np.greater_equal(info["elapsed_step"], self._limit, out=self._truncated)
            np.logical_or(self._truncated, truncated, out=self._truncated)
        else:
            self._reward.fill(0.0)
            self._truncated[streams] = truncated | (info["elapsed_step"] >= self._limit)
        self._reward[rows] = reward
        self._terminated[rows] = terminated
        np.logical_or(self._terminated, self._truncated, out=self._done)
