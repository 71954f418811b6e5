# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""MotrixLab's FastSAC agent (``motrix-rl-builtin`` 0.4.0) over an EnvPool task instead of its own simulator, in turns.

Agent and replay are the released ones; what stands here is what they need of its simulator: the environment.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.peers import PeerUnavailableError
from benchmarks.peers.motrixlab import DISTRIBUTION, _import
from torchrl_ext.envs import EnvPoolEnv

PACKAGE = "motrix_rl_builtin.fastsac"


@dataclass(kw_only=True)
class StepResult:
    """One step as ``FastSacStepResult`` has it: observations after resets, the truncated rows before them."""

    obs: torch.Tensor
    critic_obs: torch.Tensor
    reward: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    final_obs: Any
    info: dict[str, Any] = field(default_factory=dict)


class EnvPoolStreams:
    """The training streams of one task, with the methods that MotrixLab asks of its ``FastSacEnvWrap``.

    Args:
        options (dict): keywords of :class:`~torchrl_ext.envs.EnvPoolEnv`.

    Keyword Args:
        actor_keys (list of str): observations of the actor, side by side.
        critic_keys (list of str): observations of the critics, side by side.
        device (torch.device): where results go; the trainer's own wrapper puts them on the learner's.
    """

    def __init__(
        self, options: dict[str, Any], *, actor_keys: list[str], critic_keys: list[str], device: torch.device
    ) -> None:
        self.env = EnvPoolEnv(**options)
        self.device, self.num_envs = device, self.env.batch_size[0]
        self._keys = (actor_keys, critic_keys)
        outcome = {key: torch.zeros(self.num_envs, 1, dtype=torch.bool) for key in ("terminated", "truncated")}
        self._outcome = TensorDict({"reward": torch.zeros(self.num_envs, 1), **outcome}, batch_size=[self.num_envs])
        self._row = TensorDict({"next": self._outcome}, batch_size=[self.num_envs])
        self._bound: Any = None
        self._returns = torch.zeros(self.num_envs)
        self._ended: list[float] = []

    @property
    def widths(self) -> tuple[int, int, int]:
        """Features of the actor's and the critics' observations and of an action."""
        spec = self.env.observation_spec
        actor, critic = (sum(spec[key].shape[-1] for key in keys) for keys in self._keys)
        return actor, critic, self.env.action_spec.shape[-1]

    @property
    def action_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Half width and middle of the action box, as MotrixLab's trainers compute them."""
        low, high = (bound[0].float() for bound in (self.env.action_spec.space.low, self.env.action_spec.space.high))
        return (high - low) / 2.0, (high + low) / 2.0

    def reset(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Opens the pool; returns the observations of actor and critics."""
        self.env.reset()
        self._bound = self.env.bind_row(self._row)
        return self._observe(self.env.current_observation())

    def step(self, actions: torch.Tensor) -> StepResult:
        """Steps all streams and resets those that ended."""
        finals = self.env.step_into(actions, self._bound)
        reward, terminated, truncated = (
            self._outcome[key].reshape(-1) for key in ("reward", "terminated", "truncated")
        )
        # MotrixLab bootstraps from every truncation, and a row that is both has ended for good.
        truncated = truncated & ~terminated
        self._returns += reward
        final_obs = None
        if finals is not None:
            self._ended += self._returns[finals.streams].tolist()
            self._returns[finals.streams] = 0.0
            cut = truncated[finals.streams]
            if bool(cut.any()):
                actor, critic = self._observe(finals.observations[cut], move=False)
                rows = types.SimpleNamespace(policy=actor, value_or_policy=critic)
                final_obs = types.SimpleNamespace(env_ids=finals.streams[cut], obs=rows)
        obs, critic_obs = self._observe(self.env.current_observation())
        return StepResult(
            obs=obs,
            critic_obs=critic_obs,
            reward=reward.clone().to(self.device),
            terminated=terminated.clone().to(self.device),
            truncated=truncated.to(self.device),
            final_obs=final_obs,
        )

    def pop_episodes(self) -> list[float]:
        """Returns of the episodes that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _observe(self, data: Any, *, move: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        # ``cat`` copies, which the borrowed observation needs.
        actor, critic = (torch.cat([data[key] for key in keys], -1) for keys in self._keys)
        return (actor.to(self.device), critic.to(self.device)) if move else (actor, critic)


class SyncTrainer:
    """``sync.train.Trainer._run_loop`` without its panel: one step, into the replay, ``num_updates`` gradient steps.

    Other than there, truncated rows bring their final observations, which the released loop leaves out.
    """

    name = "synchronous: step, extend_batch, update, as motrix_rl_builtin.fastsac.sync, plus final observations"

    def __init__(self, agent: Any, env: EnvPoolStreams) -> None:
        self.agent, self._env = agent, env
        self._payload = _import(f"{PACKAGE}.async_impl.transport.ring").FinalObsPayload
        self._steps = 0

    def start(self) -> None:
        """Resets the streams."""
        self.agent.set_train_mode()
        self._obs, self._critic_obs = self._env.reset()

    def advance(self) -> int:
        """Takes one vector step and its gradient steps; returns the rows that came."""
        agent, cfg = self.agent, self.agent.cfg
        warming = self._steps < cfg.learning_starts
        if warming:
            actions = torch.empty(agent.num_envs, agent.act_dim, device=agent.device).uniform_(-1.0, 1.0)
            actions = actions * agent.actor.action_scale + agent.actor.action_bias
        else:
            actions = agent.act(self._obs, deterministic=False)
        result = self._env.step(actions)
        final, payload = result.final_obs, None
        if final is not None:
            payload = self._payload(final.env_ids, final.obs.policy, final.obs.value_or_policy)
        row = (self._obs, self._critic_obs, actions, result.reward, result.terminated.long(), result.truncated.long())
        agent.rb.extend_batch(*(value.unsqueeze(0) for value in row), final_payloads=[payload])
        self._obs, self._critic_obs = result.obs, result.critic_obs
        self._steps += 1
        if not warming:
            agent.update(cfg.num_updates)
        return agent.num_envs

    def pop_episodes(self) -> list[float]:
        """Returns of the episodes that ended since the last call."""
        return self._env.pop_episodes()

    def close(self) -> None:
        """Ends the pool's threads."""
        self._env.env.close()


def make_agent(env: EnvPoolStreams, values: dict[str, Any], device: torch.device) -> Any:
    """Builds the released agent, with its replay and final observations on.

    Raises:
        PeerUnavailableError: if the package cannot be imported here, or is another release.
    """
    config, agents = _import(f"{PACKAGE}.config"), _import(f"{PACKAGE}.agent")
    scale, bias = env.action_range
    try:
        cfg = config.FastSacAgentCfg(**values)
        return agents.FastSacAgent(
            *env.widths,
            env.num_envs,
            cfg,
            device,
            action_scale=scale,
            action_bias=bias,
            final_obs_bootstrap=True,
        )
    except TypeError as error:
        raise PeerUnavailableError(f"the installed {DISTRIBUTION} takes other options ({error}).") from error
