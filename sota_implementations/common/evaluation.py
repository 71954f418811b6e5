# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Episodes with the mode of the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What the episodes gave; all numbers are over episodes."""

    returns: list[float]
    """Undiscounted."""
    lengths: list[int]
    """Agent steps."""

    @property
    def mean(self) -> float:
        """Mean return."""
        return sum(self.returns) / len(self.returns)

    @property
    def mean_length(self) -> float:
        """Mean length."""
        return sum(self.lengths) / len(self.lengths)


@torch.no_grad()
def evaluate(
    env: EnvBase,
    policy: Callable[[TensorDictBase], TensorDictBase],
    *,
    seed: int,
    max_steps: int,
    device: torch.device,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Runs one episode in each stream.

    Every stream's first episode counts, the later ones do not: counting the first ``n`` to end would prefer short
    episodes. The seed is set anew, so that evaluations of one run start from the same states, and the global
    generators are left as they were.

    Args:
        env (EnvBase): with batch size ``[episodes]``, on the host.
        policy (callable): reads observations on ``device``, writes ``"action"``.

    Keyword Args:
        seed (int): of the environment.
        max_steps (int): an episode that has not ended by then is counted as it is.
        device (torch.device): of the policy.
        should_stop (callable): asked at every step; None is returned when it says yes.

    Returns:
        Evaluation, optional: one return and one length per stream.
    """
    forked = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked), set_exploration_type(ExplorationType.DETERMINISTIC):
        torch.manual_seed(seed)  # of what a policy draws in its mode too, such as latents
        env.set_seed(seed)
        keys = list(env.observation_spec.keys(True, True))
        root = env.reset()
        total = torch.zeros(env.batch_size, dtype=torch.float64)
        length = torch.zeros(env.batch_size, dtype=torch.int64)
        alive = torch.ones(env.batch_size, dtype=torch.bool)
        for _ in range(max_steps):
            if should_stop():
                return None
            action = policy(root.select(*keys).to(device)).get("action")
            root.set("action", action if env.device is None else action.to(env.device))
            row, root = env.step_and_maybe_reset(root)
            total += row["next", "reward"].reshape(-1).cpu() * alive
            length += alive
            alive &= ~row["next", "done"].reshape(-1).cpu()
            if not alive.any():
                break
    return Evaluation(returns=total.tolist(), lengths=length.tolist())
