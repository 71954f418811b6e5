# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""An environment of one's own, for docs/first_run.rst."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase


class ReachEnv(EnvBase):
    """Points in the plane, one per stream. The action accelerates, the reward is minus the distance from a goal."""

    batch_locked = True

    def __init__(self, num_envs, length=100):
        super().__init__(batch_size=[num_envs])
        self.length = length
        flag = Categorical(2, shape=(num_envs, 1), dtype=torch.bool)
        self.observation_spec = Composite(observation=Unbounded((num_envs, 6)), shape=(num_envs,))
        self.action_spec = Bounded(-1.0, 1.0, shape=(num_envs, 2))
        self.reward_spec = Unbounded((num_envs, 1))
        self.done_spec = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=(num_envs,))
        self.state = torch.zeros(num_envs, 6)  # position, velocity, goal
        self.steps = torch.zeros(num_envs, 1, dtype=torch.int64)

    def _reset(self, tensordict=None):
        ended = None if tensordict is None else tensordict.get("_reset", None)
        ended = torch.ones_like(self.steps, dtype=torch.bool) if ended is None else ended.view(self.steps.shape)
        fresh = torch.cat([torch.zeros_like(self.state[:, :4]), torch.rand_like(self.state[:, 4:]) * 2 - 1], -1)
        self.state = torch.where(ended, fresh, self.state)
        self.steps = torch.where(ended, 0, self.steps)
        no = torch.zeros_like(ended)
        data = {"observation": self.state.clone(), "done": no, "terminated": no.clone(), "truncated": no.clone()}
        return TensorDict(data, self.batch_size)

    def _step(self, tensordict):
        position, velocity, goal = self.state.split(2, -1)
        velocity = 0.9 * velocity + 0.1 * tensordict["action"].clamp(-1, 1)
        position = position + 0.2 * velocity
        self.state, self.steps = torch.cat([position, velocity, goal], -1), self.steps + 1
        truncated = self.steps >= self.length
        reward = -(position - goal).norm(dim=-1, keepdim=True)
        data = {"observation": self.state.clone(), "reward": reward, "done": truncated, "truncated": truncated.clone()}
        return TensorDict({**data, "terminated": torch.zeros_like(truncated)}, self.batch_size)

    def _set_seed(self, seed):
        torch.manual_seed(seed)


def make_env(num_envs, length=100):
    return ReachEnv(num_envs, length)
