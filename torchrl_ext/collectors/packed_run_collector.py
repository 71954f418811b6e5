# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Collects packed runs from EnvPool: each step is written once, straight into the row that the replay copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

from torchrl_ext.collectors.episodes import EpisodeTracker
from torchrl_ext.collectors.policies import Policy, record_layout
from torchrl_ext.data import PackedRun, RowLayout
from torchrl_ext.data.layout import FOLLOWED
from torchrl_ext.envs import EnvPoolEnv, Finals


class PackedRunCollector:
    """Steps all streams of an :class:`~torchrl_ext.envs.EnvPoolEnv` and hands out :class:`~torchrl_ext.data.PackedRun`.

    Exact       every row has its true successor: the next row, or for the last row of an episode its final
                observation, which is kept apart. No reset observation stands in, no row is wasted.
    Ownership   a run is borrowed: its rows and tail are overwritten by the next :meth:`collect`. A host storage has
                copied them when ``extend_batch`` returns.
    Cost        no allocation per step but the policy's; the environment's own loop is ``EnvPoolEnv.step_into``.

    Args:
        env (EnvPoolEnv): on the host. The collector resets it (:meth:`start`) and closes it.
        policy (callable): reads observations ``[n]`` on ``policy_device`` and writes ``"action"``, ``[n, A]``.

    Keyword Args:
        observation_keys (sequence of NestedKey): what is stored. The policy may read any observation.
        num_steps (int): steps ``K`` of a run. Defaults to 1.
        policy_device (torch.device, optional): where the policy's inputs go. Defaults to the host.

    Raises:
        ValueError: if ``num_steps`` is below 1.

    Examples:
        >>> from torchrl_ext.collectors import PackedRunCollector, UniformPolicy
        >>> from torchrl_ext.data import SlotReplayBuffer, SlotStorage
        >>> from torchrl_ext.envs import EnvPoolEnv
        >>> env = EnvPoolEnv("Pendulum-v1", num_envs=3, num_threads=1, seed=0)
        >>> collector = PackedRunCollector(
        ...     env, UniformPolicy(env.action_spec), observation_keys=["observation"], num_steps=4
        ... )
        >>> replay = SlotReplayBuffer(storage=SlotStorage(100, num_streams=3, layout=collector.layout), batch_size=8)
        >>> handle = replay.extend_batch(collector.collect())
        >>> len(replay), collector.rows
        (12, 12)
        >>> collector.close()
    """

    rows: int
    """Rows collected since construction."""
    episodes: EpisodeTracker
    """Returns and lengths of ended episodes; :meth:`EpisodeTracker.pop` empties it."""
    layout: RowLayout
    """Of every row."""

    def __init__(
        self,
        env: EnvPoolEnv,
        policy: Policy,
        *,
        observation_keys: Sequence[NestedKey],
        num_steps: int = 1,
        policy_device: torch.device | str | None = None,
    ) -> None:
        if num_steps < 1:
            raise ValueError(f"PackedRunCollector: num_steps must be >= 1, got {num_steps}.")
        self.env, self.policy, self.num_steps = env, policy, num_steps
        self.num_streams = env.batch_size.numel()
        self.layout = record_layout(env, observation_keys)
        self.rows, self.episodes = 0, EpisodeTracker(self.num_streams)
        device = torch.device("cpu" if policy_device is None else policy_device)
        self._policy_device = None if device.type == "cpu" else device
        self._bytes = torch.zeros(num_steps, self.num_streams, self.layout.row_bytes, dtype=torch.uint8)
        # Which rows are cut is told beside the rows, never in them.
        self._bytes.view(torch.int32)[..., self.layout.final_offset // 4].fill_(FOLLOWED)
        view = self.layout.view(self._bytes)
        self._bound = [env.bind_row(row) for row in view.unbind(0)]
        self._reward = view["next", "reward"][..., 0].numpy()
        self._done = view["next", "done"][..., 0].numpy()
        self._tail = torch.zeros(self.num_streams, self.layout.successor_bytes, dtype=torch.uint8)
        self._tail_leaves = self.layout.leaves(self._tail, self.layout.prefix)
        self._started = False

    def start(self) -> None:
        """Resets every stream unless that was done; :meth:`collect` does it too. The first reset may take long."""
        if not self._started:
            self.env.reset()
            self.episodes.restart()
            self._started = True

    def restart(self) -> None:
        """Resets every stream before the next run. Cut the replay's streams too (``end_streams``)."""
        self._started = False

    def collect(self, policy: Policy | None = None) -> PackedRun:
        """Collects ``K`` steps of all streams.

        Args:
            policy (callable, optional): acts in this run. Defaults to the collector's.

        Returns:
            PackedRun: ``[K, N]``, borrowed (see the class), with final observations and tail.
        """
        act = self.policy if policy is None else policy
        self.start()
        ended: list[tuple[int, Finals]] = []
        for step, row in enumerate(self._bound):
            finals = self.env.step_into(self._act(act), row)
            self.episodes.add(self._reward[step], self._done[step])
            if finals is not None:
                ended.append((step, finals))
        self.rows += self.num_steps * self.num_streams
        observation = self.env.current_observation()
        for key, leaf in self._tail_leaves.items():
            leaf.copy_(observation.get(key))
        if not ended:
            return PackedRun(self.layout, self._bytes, tail=self._tail)
        final_rows, packed = self._pack(ended)
        last_step, last = ended[-1]
        if last_step == self.num_steps - 1:
            # Those streams were reset: what follows their last row is its final observation.
            self._tail[last.streams] = packed[-len(last.streams) :]
        return PackedRun(self.layout, self._bytes, final_rows, packed, self._tail)

    @torch.no_grad()
    def _act(self, act: Policy) -> torch.Tensor:
        # A shallow copy: the environment's own tensordict is locked, and its tensors are only read.
        observation: TensorDictBase = self.env.current_observation().copy()
        if self._policy_device is not None:
            observation = observation.to(self._policy_device)
        return act(observation).get("action")

    def _pack(self, ended: list[tuple[int, Finals]]) -> tuple[torch.Tensor, torch.Tensor]:
        final_rows = torch.cat([step * self.num_streams + finals.streams for step, finals in ended])
        observations = TensorDict.cat([finals.observations for _, finals in ended])
        packed = torch.zeros(len(final_rows), self.layout.successor_bytes, dtype=torch.uint8)
        for key, leaf in self.layout.leaves(packed, self.layout.prefix).items():
            leaf.copy_(observations.get(key))
        return final_rows, packed

    def observations(self, run: PackedRun) -> TensorDict:
        """Returns the rows of a run as a TensorDict ``[K, N]`` of views, for statistics."""
        return run.view()

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()
