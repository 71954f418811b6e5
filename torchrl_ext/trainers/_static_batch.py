# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The memory from which captured steps read a batch that is given to them."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_ext.objectives._tensor_losses import Transition


class StaticBatch:
    """A batch whose memory stays: others of the same shapes are copied into it.

    Args:
        batch (Transition): the first one, which is copied.
    """

    def __init__(self, batch: Transition) -> None:
        self.batch = _rebuilt(batch, [leaf.clone() for leaf in _tensors(batch)])

    def take(self, batch: Transition) -> bool:
        """Copies a batch; returns False, with nothing changed, if it has other shapes."""
        own, fresh = _tensors(self.batch), _tensors(batch)
        if [leaf.shape for leaf in own] != [leaf.shape for leaf in fresh]:
            return False
        torch._foreach_copy_(own, fresh)
        return True


def _tensors(batch: Transition) -> list[Tensor]:
    leaves = [*batch.observations, *batch.next_observations, *batch[2:]]
    return [leaf for leaf in leaves if leaf is not None]


def _rebuilt(batch: Transition, leaves: list[Tensor]) -> Transition:
    count = len(batch.observations)
    weight = None if batch.weight is None else leaves[-1]
    action, reward, terminated, discount = leaves[2 * count : 2 * count + 4]
    return Transition(
        tuple(leaves[:count]), tuple(leaves[count : 2 * count]), action, reward, terminated, discount, weight
    )
