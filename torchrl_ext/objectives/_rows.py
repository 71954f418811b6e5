# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The arithmetic of the FastSAC losses: tensors in, one number per row out.

:class:`~torchrl_ext.objectives.FastSACLoss` and :class:`~torchrl_ext.objectives._tensor_losses.TensorLosses` both
compute with these functions and differ only in how they call networks and read a batch.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from torchrl_ext.objectives._c51 import expectation, project_categorical, select_target


def bellman_target(
    logits: Tensor,
    log_prob: Tensor,
    reward: Tensor,
    bootstrap: Tensor,
    alpha: Tensor,
    support: Tensor,
    *,
    reduction: Literal["min", "mean", "own"],
    v_min: float,
    v_max: float,
) -> tuple[Tensor, Tensor]:
    """Returns the projected law of the soft return and its expectation.

    Args:
        logits (Tensor): of the target critics in the next state, ``[Q, *B, atoms]``.
        log_prob (Tensor): of the next action, ``[*B]``.
        reward (Tensor): ``[*B]``.
        bootstrap (Tensor): discount, 0 where the episode terminated, ``[*B]``.
        alpha (Tensor): temperature, 0-d.
        support (Tensor): the atoms.

    Keyword Args:
        reduction ("min", "mean" or "own"): see :func:`select_target`.
        v_min, v_max (float): first and last atom.

    Returns:
        tuple[Tensor, Tensor]: ``[Q or 1, *B, atoms]`` and, averaged over its critics, ``[*B]``.
    """
    probs = select_target(logits.softmax(-1), support, reduction=reduction)
    shift = reward - bootstrap * alpha * log_prob
    target = project_categorical(probs, shift, bootstrap, support, v_min=v_min, v_max=v_max)
    return target, expectation(target, support).mean(0)


def critic_rows(target: Tensor, logits: Tensor) -> Tensor:
    """Returns the cross entropy of critics ``[Q, *B, atoms]`` to their target, summed over critics, ``[*B]``."""
    return -(target * logits.log_softmax(-1)).sum((0, -1))


def value_rows(logits: Tensor, support: Tensor, *, reduction: Literal["min", "mean"]) -> Tensor:
    """Returns what an actor reads from critics ``[Q, *B, atoms]``, ``[*B]``."""
    values = expectation(logits.softmax(-1), support)
    return values.amin(0) if reduction == "min" else values.mean(0)


def actor_rows(alpha: Tensor, log_prob: Tensor, value: Tensor) -> Tensor:
    """Returns the actor loss of each row."""
    return alpha * log_prob - value


def alpha_rows(log_alpha: Tensor, log_prob: Tensor, target_entropy: Tensor) -> Tensor:
    """Returns the temperature loss of each row (arXiv 1812.05905, eq. 18)."""
    return -log_alpha.exp() * (log_prob + target_entropy)
