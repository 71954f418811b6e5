# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What follows the gradients of a FastSAC step: clipping, AdamW, targets, working copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrl_ext.trainers._adamw import Group, adamw, clip, groups_of, make_state
from torchrl_ext.trainers._working_copies import WorkingCopy

if TYPE_CHECKING:
    from torchrl_ext.trainers.fast_sac_learner import FastSACLearner


class ParameterUpdates:
    """Applies gradients of working copies to a learner's parameters, through its optimizers or their compiled rule.

    Args:
        learner (FastSACLearner): whose optimizers, ``tau`` and ``max_grad_norm``.
        actor, critic, target (WorkingCopy): of its networks.
    """

    def __init__(self, learner: FastSACLearner, actor: WorkingCopy, critic: WorkingCopy, target: WorkingCopy) -> None:
        self._learner = learner
        self._actor, self._critic, self._target = actor, critic, target
        self._tau, self._max_norm = learner.tau, learner.max_grad_norm
        # In the order of the critics' parameters, which is that of the loss's own lists.
        self._targets = [tensor.detach() for tensor in target.masters]
        self._rule: Callable[..., None] | None = None

    def bind(self) -> None:
        """Looks up the state of the optimizers, which loading replaces; makes it where there is none."""
        for optimizer in (self._learner.critic_optimizer, self._learner.actor_optimizer):
            make_state(optimizer)
            # Schedulers warn unless they saw a call of ``step``, which graphs do not make.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        self._critic_groups = groups_of(self._learner.critic_optimizer)
        self._actor_groups = groups_of(self._learner.actor_optimizer)

    def compile(self, settings: dict[str, Any] | None) -> None:
        """Compiles what follows the gradients; ``None`` goes through the optimizers themselves."""
        self._rule = None if settings is None else torch.compile(_descend, **settings)
        self._copy = _refresh if settings is None else torch.compile(_refresh, **settings)

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes all working copies anew, whoever changed the parameters."""
        networks = (self._actor, self._critic, self._target)
        masters = (self._actor_groups[0].parameters, self._critic_groups[0].parameters, self._targets)
        copies = [copy for network in networks for copy in network.copies]
        if copies:
            sources = [own[number] for network, own in zip(networks, masters, strict=True) for number in network.copied]
            self._copy(copies, sources)

    def critic(self, gradients: list[Tensor]) -> None:
        """Steps critics and temperature, then the targets."""
        optimizer, groups = self._learner.critic_optimizer, self._critic_groups
        self._apply(optimizer, groups, gradients, self._critic, targets=self._targets, target=self._target)

    def actor(self, gradients: list[Tensor]) -> None:
        """Steps the actor."""
        self._apply(self._learner.actor_optimizer, self._actor_groups, gradients, self._actor, targets=[], target=None)

    def _apply(
        self,
        optimizer: torch.optim.AdamW,
        groups: list[Group],
        gradients: list[Tensor],
        network: WorkingCopy,
        *,
        targets: list[Tensor],
        target: WorkingCopy | None,
    ) -> None:
        copies = [*network.copies, *([] if target is None else target.copies)]
        sources = [groups[0].parameters[number] for number in network.copied]
        sources += [] if target is None else [targets[number] for number in target.copied]
        if self._rule is not None:
            self._rule(groups, gradients, targets, copies, sources, self._tau, self._max_norm)
            return
        count = len(groups[0].parameters)
        own = _like(groups[0].parameters, gradients[:count])
        clip(own, self._max_norm)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter, gradient in zip(parameters, [*own, *gradients[count:]], strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _follow(groups[0], targets, copies, sources, self._tau)

    def changed(self) -> list[Tensor]:
        """Returns every tensor that a step changes in place, working copies excepted."""
        changed = list(self._targets)
        for group in (*self._critic_groups, *self._actor_groups):
            changed += [*group.parameters, *group.means, *group.squares, *group.steps]
        return changed


def _descend(
    groups: list[Group],
    gradients: list[Tensor],
    targets: list[Tensor],
    copies: list[Tensor],
    sources: list[Tensor],
    tau: float,
    max_norm: float | None,
) -> None:
    """AdamW, targets and copies of one network, and AdamW of the temperature where that is a second group."""
    count = len(groups[0].parameters)
    own = _like(groups[0].parameters, gradients[:count])
    clip(own, max_norm)
    adamw(groups[0], own)
    for group in groups[1:]:
        adamw(group, gradients[count:])
    _follow(groups[0], targets, copies, sources, tau)


def _follow(group: Group, targets: list[Tensor], copies: list[Tensor], sources: list[Tensor], tau: float) -> None:
    if targets:
        torch._foreach_lerp_(targets, group.parameters, tau)
    if copies:
        _refresh(copies, sources)


def _refresh(copies: list[Tensor], sources: list[Tensor]) -> None:
    torch._foreach_copy_(copies, sources)


def _like(masters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Returns gradients of working copies in the shapes and dtypes of the masters."""
    made = []
    for master, gradient in zip(masters, gradients, strict=True):
        for dim, size in enumerate(master.shape):
            gradient = gradient.narrow(dim, 0, size)
        # Fused optimizers read gradients as if they were dense.
        made.append(gradient.to(master.dtype).contiguous())
    return made
