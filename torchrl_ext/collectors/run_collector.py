# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Collects time-major runs from any TorchRL environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torchrl.envs import EnvBase

from torchrl_ext.collectors.episodes import EpisodeTracker
from torchrl_ext.collectors.policies import Policy, record_keys, record_layout
from torchrl_ext.data import RowLayout


class RunCollector:
    """The interface of :class:`PackedRunCollector` over ``step_and_maybe_reset``: runs are TensorDicts ``[K, N]``.

    Exact       ``("next", obs)`` of a row that ends an episode is its final observation, the next root the reset
                observation, as TorchRL has it; ``SlotStorage.extend_batch`` keeps both.
    Ownership   a run belongs to the caller.

    Args:
        env (EnvBase): with batch size ``[n]``, such as a ``SerialEnv`` or a ``ParallelEnv``. The collector resets it
            (:meth:`start`) and closes it.
        policy (callable): reads observations ``[n]`` on ``policy_device`` and writes ``"action"``, ``[n, A]``.

    Keyword Args:
        observation_keys (sequence of NestedKey): what is stored. The policy may read any observation.
        num_steps (int): steps ``K`` of a run. Defaults to 1.
        policy_device (torch.device, optional): where the policy's inputs go. Defaults to the environment's.

    Raises:
        ValueError: if ``num_steps`` is below 1 or the environment has no single batch dimension.
    """

    rows: int
    """Rows collected since construction."""
    episodes: EpisodeTracker
    """Returns and lengths of ended episodes; :meth:`EpisodeTracker.pop` empties it."""
    layout: RowLayout
    """Of a record."""

    def __init__(
        self,
        env: EnvBase,
        policy: Policy,
        *,
        observation_keys: Sequence[NestedKey],
        num_steps: int = 1,
        policy_device: torch.device | str | None = None,
    ) -> None:
        if num_steps < 1:
            raise ValueError(f"RunCollector: num_steps must be >= 1, got {num_steps}.")
        if len(env.batch_size) != 1:
            raise ValueError(
                f"RunCollector: the environment must have batch size [n], got {list(env.batch_size)}; "
                "wrap it in a SerialEnv."
            )
        self.env, self.policy, self.num_steps = env, policy, num_steps
        self.num_streams = env.batch_size.numel()
        self.layout = record_layout(env, observation_keys)
        self.rows, self.episodes = 0, EpisodeTracker(self.num_streams)
        self._keys = record_keys(observation_keys)
        self._observation_keys = list(env.observation_spec.keys(True, True))
        self._policy_device = None if policy_device is None else torch.device(policy_device)
        self._root: Any = None

    def start(self) -> None:
        """Resets every stream unless that was done; :meth:`collect` does it too. The first reset may take long."""
        if self._root is None:
            self._root = self.env.reset()
            self.episodes.restart()

    def restart(self) -> None:
        """Resets every stream before the next run. Cut the replay's streams too (``end_streams``)."""
        self._root = None

    def collect(self, policy: Policy | None = None) -> TensorDict:
        """Collects ``K`` steps of all streams.

        Args:
            policy (callable, optional): acts in this run. Defaults to the collector's.

        Returns:
            TensorDict: ``[K, N]``, the keys of :attr:`layout` and the successors under ``"next"``.
        """
        act = self.policy if policy is None else policy
        self.start()
        rows = []
        for _ in range(self.num_steps):
            self._root.set("action", self._act(act, self._root))
            row, self._root = self.env.step_and_maybe_reset(self._root)
            outcome = row.get("next")
            done = outcome.get("done")
            for flag in ("terminated", "truncated"):
                # "done" alone means termination in TorchRL.
                if outcome.get(flag, None) is None:
                    outcome.set(flag, done.clone() if flag == "terminated" else torch.zeros_like(done))
            # A clone, because a ParallelEnv may write its next step into the same shared memory.
            rows.append(row.select(*self._keys).clone())
            self.episodes.add(outcome.get("reward")[..., 0].cpu().numpy(), done[..., 0].cpu().numpy())
        self.rows += self.num_steps * self.num_streams
        return torch.stack(rows)

    @torch.no_grad()
    def _act(self, act: Policy, root: TensorDictBase) -> torch.Tensor:
        observation = root.select(*self._observation_keys)
        if self._policy_device is not None:
            observation = observation.to(self._policy_device)
        action = act(observation).get("action")
        return action if self.env.device is None else action.to(self.env.device)

    def observations(self, run: TensorDict) -> TensorDict:
        """Returns the rows of a run for statistics: the run itself."""
        return run

    def close(self) -> None:
        """Closes the environment."""
        if not self.env.is_closed:
            self.env.close()
