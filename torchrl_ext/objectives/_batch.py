# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What the FastSAC loss reads from a batch: keys, shapes, discount, weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDictBase, TensorDictParams, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_ext.objectives._bound import BoundLossModule


class BatchLossModule(BoundLossModule):
    """Base of :class:`~torchrl_ext.objectives.FastSACLoss` that knows the batch and nothing of the losses.

    All checks look at keys and shapes, never at values: those may still be in flight on a device.
    """

    @dataclass
    class _AcceptedKeys:
        """Keys of ``set_keys``. Reward, done and terminated are given without their ``"next"``."""

        action: NestedKey = "action"
        state_action_logits: NestedKey = "state_action_logits"
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"
        discount: NestedKey = "discount"
        steps_to_next_obs: NestedKey = "steps_to_next_obs"
        priority: NestedKey = "td_error"
        priority_weight: NestedKey = "priority_weight"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys

    gamma: Tensor
    support: Tensor
    actor_network: TensorDictModuleBase
    actor_network_params: TensorDictParams
    target_actor_network_params: TensorDictParams
    qvalue_network: TensorDictModuleBase
    qvalue_network_params: TensorDictParams
    target_qvalue_network_params: TensorDictParams

    def _init_value(self, support: Tensor | None, *, gamma: float, device: torch.device) -> None:
        if support is None:
            support = getattr(getattr(self.qvalue_network, "module", None), "support", None)
        if support is None:
            raise ValueError("FastSACLoss: support must be given when qvalue_network.module has none.")
        self.register_buffer("support", support.to(device))
        self.register_buffer("gamma", torch.tensor(float(gamma), device=device))
        # Once more as numbers: reading them from a CUDA tensor in a loss would wait for the device.
        self.v_min, self.v_max = support[0].item(), support[-1].item()

    def _set_in_keys(self) -> None:
        keys = self.tensor_keys
        critic_keys = (key for key in self.qvalue_network.in_keys if key != keys.action)
        observations = list(dict.fromkeys([*self.actor_network.in_keys, *critic_keys]))
        nexts = [unravel_key(("next", key)) for key in (*observations, keys.reward, keys.terminated)]
        self.in_keys = [keys.action, *observations, *nexts]

    def _column(self, tensordict: TensorDictBase, key: NestedKey) -> Tensor:
        """Returns a ``[*B, 1]`` entry as ``[*B]``."""
        value = tensordict.get(key, None)
        if value is None:
            raise KeyError(f"FastSACLoss: key {key!r} must be in the batch, got {sorted(map(str, tensordict.keys()))}.")
        if value.shape != (*tensordict.batch_size, 1):
            raise ValueError(
                f"FastSACLoss: key {key!r} must have shape {[*tensordict.batch_size, 1]}, got {list(value.shape)}; "
                "no loss was computed."
            )
        return value.squeeze(-1)

    def _discount(self, tensordict: TensorDictBase) -> Tensor:
        """Returns what the bootstrap is multiplied by, ``[*B]`` or 0-d; the order of preference is public."""
        keys = self.tensor_keys
        if tensordict.get(keys.discount, None) is not None:
            return self._column(tensordict, keys.discount)
        if tensordict.get(keys.steps_to_next_obs, None) is not None:
            return self.gamma ** self._column(tensordict, keys.steps_to_next_obs)
        return self.gamma

    def _logits(self, network: TensorDictModuleBase, tensordict: TensorDictBase, action: Tensor) -> Tensor:
        """Returns logits ``[Q, *B, atoms]`` of ``action`` in the observations of a batch."""
        # On a selection: a batch may belong to a replay, and nothing but the priority is written to it.
        inputs = tensordict.select(*network.in_keys, strict=False).set(self.tensor_keys.action, action)
        logits = network(inputs).get(self.tensor_keys.state_action_logits)
        batch, atoms = tensordict.batch_size, self.support.shape[0]
        if logits.shape[:-2] != batch or logits.shape[-1] != atoms:
            raise ValueError(
                f"FastSACLoss: the critics must write logits of shape [*batch, critics, atoms] with batch {[*batch]} "
                f"and atoms {atoms}, got {list(logits.shape)}; no loss was computed."
            )
        return logits.movedim(-2, 0)

    def _reduced(self, per_row: Tensor, tensordict: TensorDictBase) -> Tensor:
        """Reduces ``[*B]`` by TorchRL's rules (masks included) with the importance weights of the batch."""
        key = self.tensor_keys.priority_weight
        weights = tensordict.get(key, None)
        if weights is not None and weights.shape != per_row.shape:
            weights = self._column(tensordict, key)
        return self._reduce_loss(per_row, tensordict, weights=weights)
