# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What follows the gradients: clipping, AdamW, targets, working copies."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Group(NamedTuple):
    """One parameter group of AdamW with its state, as :class:`torch.optim.AdamW` keeps it."""

    parameters: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]
    lr: Tensor | float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def make_state(optimizer: torch.optim.AdamW) -> None:
    """Makes the state that the optimizer would make at its first step, where there is none."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }


def groups_of(optimizer: torch.optim.AdamW) -> list[Group]:
    """Returns the groups of an optimizer; the tensors are its own."""
    made = []
    for group in optimizer.param_groups:
        state = [optimizer.state[parameter] for parameter in group["params"]]
        means, squares, steps = ([entry[name] for entry in state] for name in ("exp_avg", "exp_avg_sq", "step"))
        parameters = [parameter.detach() for parameter in group["params"]]
        options: dict[str, Any] = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        made.append(Group(parameters, means, squares, steps, **options))
    return made


def clip(gradients: list[Tensor], max_norm: float | None) -> None:
    """Scales gradients in place as :func:`torch.nn.utils.clip_grad_norm_` does."""
    if max_norm is not None:
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def adamw(group: Group, gradients: list[Tensor]) -> None:
    """AdamW of elementary operations, which a compiler makes one kernel of; the rule of :class:`torch.optim.AdamW`.

    The fused kernel of torch gives each block of the device 65,536 elements, which leaves most of a large device
    without work for networks of a million parameters.
    """
    beta1, beta2 = group.betas
    torch._foreach_add_(group.steps, 1)
    step = group.steps[0]
    # As exponentials: a compiler computes these anew for every element, where a power would cost more than the rest.
    scale = group.lr / (1 - (step * math.log(beta1)).exp())
    root = (1 - (step * math.log(beta2)).exp()).sqrt()
    torch._foreach_mul_(group.means, beta1)
    torch._foreach_add_(group.means, gradients, alpha=1 - beta1)
    torch._foreach_mul_(group.squares, beta2)
    torch._foreach_addcmul_(group.squares, gradients, gradients, 1 - beta2)
    update = torch._foreach_sqrt(group.squares)
    torch._foreach_div_(update, root)
    torch._foreach_add_(update, group.eps)
    update = torch._foreach_div(group.means, update)
    torch._foreach_mul_(update, scale)
    torch._foreach_mul_(group.parameters, 1 - group.lr * group.weight_decay)
    torch._foreach_sub_(group.parameters, update)
