# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""MotrixLab's FastSAC gradient step (``motrix-rl-builtin`` 0.4.0) as a peer: its own agent, replay and compilation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from benchmarks.peers import PeerUnavailableError
from benchmarks.peers.motrixlab import _import


def build_agent(
    *,
    streams: int,
    slots: int,
    observation: int,
    critic_observation: int,
    action: int,
    batch_size: int,
    num_updates: int,
    actor_hidden: int,
    critic_hidden: int,
    fast: bool,
    device: torch.device,
    runs: Iterable[tuple[torch.Tensor, ...]],
) -> Any:
    """Returns a ``FastSacAgent`` whose replay holds ``runs``; ``update(num_updates)`` takes gradient steps.

    ``fast`` compiles it and lets it multiply in bfloat16, as its defaults do.

    Raises:
        PeerUnavailableError: if the package cannot be imported here.
    """
    config, agents = _import("motrix_rl_builtin.fastsac.config"), _import("motrix_rl_builtin.fastsac.agent")
    try:
        settings = config.FastSacAgentCfg(
            actor_learning_rate=3e-4,
            critic_learning_rate=3e-4,
            alpha_learning_rate=3e-4,
            weight_decay=1e-3,
            max_grad_norm=0.0,
            actor_hidden_dim=actor_hidden,
            critic_hidden_dim=critic_hidden,
            num_q_networks=2,
            use_layer_norm=True,
            use_tanh=True,
            log_std_max=0.0,
            log_std_min=-5.0,
            num_atoms=101,
            v_min=-20.0,
            v_max=20.0,
            gamma=0.97,
            tau=0.125,
            alpha_init=1e-3,
            use_autotune=True,
            target_entropy_ratio=0.0,
            buffer_size=slots,
            num_steps=1,
            batch_size=batch_size,
            learning_starts=10,
            policy_frequency=4,
            num_updates=num_updates,
            obs_normalization=True,
            compile=fast,
            amp=fast,
            amp_dtype="bf16",
        )
        agent = agents.FastSacAgent(observation, critic_observation, action, streams, settings, device)
    except TypeError as error:
        raise PeerUnavailableError(f"the installed peer takes other options ({error}).") from error
    agent.set_train_mode()
    for fields in runs:
        agent.rb.extend_batch(*fields)
    return agent
