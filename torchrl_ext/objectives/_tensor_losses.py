# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The FastSAC losses as functions of tensors, for compilers and CUDA graphs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor, nn
from torchrl.objectives.utils import _reduce

from torchrl_ext.modules.normalizer import EmpiricalNormalization
from torchrl_ext.modules.squashed_normal import SquashedNormal
from torchrl_ext.objectives._rows import actor_rows, alpha_rows, bellman_target, critic_rows, value_rows
from torchrl_ext.objectives.fast_sac import FastSACLoss


class Transition(NamedTuple):
    """A replayed batch as tensors; observations as :attr:`TensorLosses.keys` lists them, not normalised."""

    observations: tuple[Tensor, ...]
    next_observations: tuple[Tensor, ...]
    action: Tensor
    reward: Tensor
    terminated: Tensor
    discount: Tensor
    """``[B]``, or 0-d: the loss's own ``gamma``."""
    weight: Tensor | None


class Networks(NamedTuple):
    """What computes; in the structure of the loss's own networks."""

    actor: nn.Module
    critic: nn.Module
    frozen_critic: nn.Module
    """The critic without gradients of its own."""
    target: nn.Module


def why_not_tensors(loss: FastSACLoss, normalizer: nn.Module | None) -> str | None:
    """Returns why a loss cannot be computed from tensors, None when it can."""
    actor, critic = loss.actor_network, loss.qvalue_network
    steps = list(getattr(actor, "module", ()))
    if loss.reduction == "none":
        return "reduction='none' has no single loss"
    if len(steps) != 2 or not _calls_a_module(steps[0]) or not _is_squashed(steps[1]):
        return "the actor is not one module of tensors followed by a SquashedNormal"
    if not _calls_a_module(critic) or len(critic.out_keys) != 1:
        return "the critics are not one module of tensors"
    if "target_qvalue_network_params" not in loss._modules:
        return "delay_qvalue=False has no target critics"
    if normalizer is not None and type(normalizer) is not EmpiricalNormalization:
        return f"the normaliser is a {type(normalizer).__name__}"
    return None


def _is_squashed(step: nn.Module) -> bool:
    return getattr(step, "distribution_class", None) is SquashedNormal


def _calls_a_module(step: nn.Module) -> bool:
    # Of tensordict's own modules the named attribute is what they call, too.
    return isinstance(getattr(step, "module", None), nn.Module) and not hasattr(step.module, "in_keys")


def networks_of(loss: FastSACLoss) -> Networks:
    """Returns the loss's own networks."""
    twins = loss._twins
    return Networks(
        loss.actor_network.module[0].module,
        loss.qvalue_network.module,
        twins["frozen_qvalue_network"].module,
        twins["target_qvalue_network"].module,
    )


class TensorLosses:
    """Computes what :class:`FastSACLoss` computes, noise given, of tensors alone.

    Args:
        loss (FastSACLoss): whose options, atoms and temperature count, as they are at each call where they are tensors.
        normalizer (EmpiricalNormalization, optional): of the observations.
        networks (Networks): what computes.

    Keyword Args:
        autocast (torch.dtype, optional): of matrix products. Defaults to ``None``.
    """

    def __init__(
        self,
        loss: FastSACLoss,
        normalizer: EmpiricalNormalization | None,
        networks: Networks,
        *,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._loss, self._networks, self._autocast = loss, networks, autocast
        self._target_reduction, self._policy_reduction = loss.target_reduction, loss.policy_reduction
        self._reduction, self._log_volume = loss.reduction, loss._log_volume
        self._v_min, self._v_max = loss.v_min, loss.v_max
        self._log_alpha, self._target_entropy, self._support = loss.log_alpha, loss.target_entropy, loss.support
        self._log_alpha_range = loss._log_alpha_range
        self._device_type = loss.support.device.type
        bounds = loss.actor_network.module[1].distribution_kwargs
        self._low, self._high = bounds.get("low", -1.0), bounds.get("high", 1.0)
        self._plan_inputs(loss, normalizer)

    def _plan_inputs(self, loss: FastSACLoss, normalizer: EmpiricalNormalization | None) -> None:
        normalised: dict[NestedKey, tuple[int, NestedKey]] = {}
        if normalizer is not None:
            pairs = zip(normalizer.in_keys, normalizer.out_keys, strict=True)
            normalised = {out: (index, key) for index, (key, out) in enumerate(pairs)}
        action = unravel_key(loss.tensor_keys.action)
        actor_keys = [unravel_key(key) for key in loss.actor_network.module[0].in_keys]
        critic_keys = [unravel_key(key) for key in loss.qvalue_network.in_keys]
        read = list(dict.fromkeys(key for key in (*actor_keys, *critic_keys) if key != action))
        #: What is read from a batch and from its ``"next"``.
        self.keys: list[NestedKey] = [normalised[key][1] if key in normalised else key for key in read]
        self._scales: list[tuple[Tensor, Tensor] | None] = []
        for key in read:
            if normalizer is None or key not in normalised:
                self._scales.append(None)
                continue
            index = normalised[key][0]
            start, shape = sum(normalizer._sizes[:index]), normalizer.shapes[index]
            part = slice(start, start + shape.numel())
            # Views: the normaliser keeps its memory, so these follow it.
            self._scales.append((normalizer.loc[part].view(shape), normalizer.inv_scale[part].view(shape)))
        self._clamp = None if normalizer is None else normalizer.clamp
        self._dtype = None if normalizer is None else normalizer.dtype
        self._actor_inputs = [read.index(key) for key in actor_keys]
        #: Position of each input of the critics; None is the action.
        self._critic_inputs = [None if key == action else read.index(key) for key in critic_keys]

    # ------------------------------------------------------------------ reading

    def read(self, batch: TensorDictBase | Transition) -> Transition:
        """Returns the tensors of a batch, views of it; what was read already stays as it is.

        Raises:
            KeyError, ValueError: as the loss raises them, and ``ValueError`` for a batch with a loss mask or of more
                than one dimension.
        """
        if isinstance(batch, Transition):
            return batch
        loss, keys, nxt = self._loss, self._loss.tensor_keys, batch.get("next")
        masks = [key for key in loss._loss_mask_keys() if batch.get(key, None) is not None]
        if masks or batch.ndim != 1:
            raise ValueError(
                f"TensorLosses: the batch must be [B] without a mask, got {list(batch.shape)} and {masks}."
            )
        weight = batch.get(keys.priority_weight, None)
        if weight is not None and weight.ndim == 2:
            weight = loss._column(batch, keys.priority_weight)
        return Transition(
            tuple(batch.get(key) for key in self.keys),
            tuple(nxt.get(key) for key in self.keys),
            batch.get(keys.action),
            loss._column(nxt, keys.reward),
            loss._column(nxt, keys.terminated),
            loss._discount(batch),
            weight,
        )

    def noise(self, batch: Transition) -> Tensor:
        """Draws the noise of one action per row, as the policy's distribution would."""
        return torch.randn(batch.action.shape, dtype=torch.float32, device=batch.action.device)

    # ------------------------------------------------------------------ losses

    def critic(self, batch: Transition, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of critic and temperature loss, and metrics ``[3 + 3 B]``.

        The metrics are the two losses and the temperature, then per row the entropy, the target's expectation and the
        cross entropy; all detached.
        """
        alpha = self._alpha()
        with torch.no_grad():
            seen = self._observe(batch.next_observations)
            with self._casting():
                action, log_prob = self._act(seen, noise)
                logits = self._logits(self._networks.target, seen, action)
            target, value = bellman_target(
                logits,
                log_prob,
                batch.reward,
                batch.discount * batch.terminated.logical_not(),
                alpha,
                self._support,
                reduction=self._target_reduction,
                v_min=self._v_min,
                v_max=self._v_max,
            )
        with self._casting():
            logits = self._logits(self._networks.critic, self._observe(batch.observations), batch.action)
        rows = critic_rows(target, logits)
        loss_critic = self._reduced(rows, batch)
        if self._log_alpha.requires_grad:
            loss_alpha = self._reduced(alpha_rows(self._log_alpha, log_prob, self._target_entropy), batch)
        else:
            loss_alpha = torch.zeros_like(loss_critic)
        scalars = torch.stack([loss_critic.detach(), loss_alpha.detach(), alpha])
        return loss_critic + loss_alpha, torch.cat([scalars, -log_prob, value, rows.detach()])

    def actor(self, batch: Transition, noise: Tensor) -> Tensor:
        """Returns the actor loss."""
        seen = self._observe(batch.observations)
        with self._casting():
            action, log_prob = self._act(seen, noise)
            logits = self._logits(self._networks.frozen_critic, seen, action)
        value = value_rows(logits, self._support, reduction=self._policy_reduction)
        return self._reduced(actor_rows(self._alpha(), log_prob, value), batch)

    def _alpha(self) -> Tensor:
        log_alpha = self._log_alpha.detach()
        return (log_alpha if self._log_alpha_range is None else log_alpha.clamp(*self._log_alpha_range)).exp()

    def _observe(self, raw: tuple[Tensor, ...]) -> list[Tensor]:
        seen = []
        for value, scale in zip(raw, self._scales, strict=True):
            if scale is not None:
                value = ((value - scale[0]) * scale[1]).to(self._dtype)
                value = value if self._clamp is None else value.clamp(-self._clamp, self._clamp)
            seen.append(value)
        return seen

    def _act(self, seen: list[Tensor], noise: Tensor) -> tuple[Tensor, Tensor]:
        loc, scale = self._networks.actor(*[seen[index] for index in self._actor_inputs])
        dist = SquashedNormal(loc, scale, low=self._low, high=self._high)
        pre_tanh = dist._pre_tanh(noise)
        action, log_prob = dist._squash(pre_tanh), dist._score(noise, pre_tanh)
        return action, log_prob + self._log_volume if self._log_volume else log_prob

    def _logits(self, network: nn.Module, seen: list[Tensor], action: Tensor) -> Tensor:
        logits: Tensor = network(*[action if index is None else seen[index] for index in self._critic_inputs])
        return logits.movedim(-2, 0)

    def _reduced(self, rows: Tensor, batch: Transition) -> Tensor:
        return _reduce(rows, self._reduction, weights=batch.weight)

    def _casting(self) -> Any:
        # Without its cache: casts of one capture must not be kept for the next.
        enabled = self._autocast is not None
        return torch.autocast(self._device_type, dtype=self._autocast, enabled=enabled, cache_enabled=False)
