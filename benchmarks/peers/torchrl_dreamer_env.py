# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""One stream of an EnvPool task as TorchRL's DreamerV3 recipe takes it: ``env.backend=custom``, ``env.factory``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Bounded, Composite, OneHot, TensorSpec, Unbounded
from torchrl.envs import EnvBase

from torchrl_ext.envs import EnvPoolEnv


class OneStream(EnvBase):
    """A single environment, without a batch: EnvPool's with one stream.

    What the actor gives is treated as our script does: features are clipped to [-1, 1] and scaled to the box of the
    task, a discrete action is one-hot.

    Args:
        task (str): of EnvPool.

    Keyword Args:
        seed (int, optional): of the stream.
        max_episode_steps (int, optional): of an episode. Defaults to the task's own.
        options (Mapping, optional): further options of the task.
    """

    def __init__(
        self,
        task: str,
        *,
        seed: int | None,
        max_episode_steps: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(device="cpu", batch_size=[])
        self.pool = pool = EnvPoolEnv(
            task, num_envs=1, num_threads=1, seed=seed, max_episode_steps=max_episode_steps, options=options
        )
        self.observation_spec = Composite({key: spec[0] for key, spec in pool.observation_spec.items()}, shape=[])
        self._discrete = not pool.action_spec.dtype.is_floating_point
        self.action_spec = _actor_spec(pool.action_spec)
        if not self._discrete:
            self._low, self._high = pool.action_spec.space.low, pool.action_spec.space.high
        self.reward_spec = Unbounded((1,), dtype=torch.float32)
        self.done_spec = Composite({key: spec[0] for key, spec in pool.done_spec.items()}, shape=[])

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.pool._reset()
        return self._owned()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = tensordict.get("action").unsqueeze(0)
        if self._discrete:
            action = action.argmax(-1).to(self.pool.action_spec.dtype)
        else:
            action = self._low + (action.clamp(-1.0, 1.0) + 1.0) / 2.0 * (self._high - self._low)
        # Not through the environment of all streams, whose TensorDicts cost one stream more than its step.
        self.pool._streams.step(action, None)
        return self._owned(self.pool._streams.outcome)

    def _owned(self, *outcome: TensorDictBase) -> TensorDict:
        parts = (self.pool._streams.observation.data, *outcome)
        return TensorDict({key: value[0].clone() for part in parts for key, value in part.items()}, [], device="cpu")

    def _set_seed(self, seed: int | None) -> None:
        self.pool.set_seed(seed)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Ends the pool; may be called twice."""
        self.pool.close()
        self.is_closed = True


def _actor_spec(spec: TensorSpec) -> TensorSpec:
    if spec.dtype.is_floating_point:
        return Bounded(-1.0, 1.0, spec.shape[1:], dtype=spec.dtype)
    return OneHot(spec.space.n, dtype=torch.float32)


def make(*, seed: int | None, env_index: int, num_envs: int, task: str, **options: Any) -> OneStream:
    """The factory that the recipe imports by name, in each of its worker processes."""
    return OneStream(task, seed=seed, **options)
