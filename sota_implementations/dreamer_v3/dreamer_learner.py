# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The update: TorchRL's losses, optimizer and stepper, and the latents that come back from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from dreamer_networks import Networks
from dreamer_optimizer import GraphedOptimizer, TargetInGraph
from dreamer_settings import LearnerSettings, NetworkSettings
from tensordict import TensorDictBase
from torchrl.modules import RSSMRolloutV3
from torchrl.objectives import (
    DreamerV3ActorLoss,
    DreamerV3Loss,
    DreamerV3ModelLoss,
    DreamerV3ValueLoss,
    ValueEstimators,
)
from torchrl.trainers.algorithms import DreamerV3OptimizationStepper

__all__ = ["Learner"]


class Learner:
    """Takes updates from sampled windows.

    Args:
        networks (Networks): on the device.
        settings (LearnerSettings): of the update.
        sizes (NetworkSettings): of the networks.

    Keyword Args:
        pixels (bool): whether observations are images, which are reconstructed as they are and not in symlog space.
        device (torch.device): of the networks.
    """

    def __init__(
        self,
        networks: Networks,
        settings: LearnerSettings,
        sizes: NetworkSettings,
        *,
        pixels: bool,
        device: torch.device,
    ) -> None:
        self.networks, self.device = networks, device
        model_loss = DreamerV3ModelLoss(
            networks.world_model,
            num_reward_bins=sizes.bins,
            free_bits=settings.free_bits,
            kl_mode="separate",
            lambda_dynamic=settings.dynamic_weight,
            lambda_representation=settings.representation_weight,
            unimix=sizes.unimix,
            lambda_continue=1.0,
            continue_target_scale=1 - 1 / settings.continuation_horizon,
            reco_symlog=not pixels,
            global_average=False,
            detach_output=False,
        )
        model_loss.set_keys(pixels="observation", reco_pixels="reco_pixels")
        actor_loss = DreamerV3ActorLoss(
            networks.actor,
            networks.value,
            networks.imagination,
            continuation_model=networks.continuation,
            imagination_horizon=settings.imagination_horizon,
            entropy_bonus=settings.entropy,
            use_reinforce=True,
            return_normalization_rate=settings.return_rate,
        )
        actor_loss.make_value_estimator(ValueEstimators.TDLambda, gamma=settings.gamma, lmbda=settings.lmbda)
        value_loss = DreamerV3ValueLoss(
            networks.value,
            value_loss="two_hot",
            num_value_bins=sizes.bins,
            actor_loss=actor_loss,
            slow_critic_regularization=settings.slow_critic_weight,
        )
        self.loss = DreamerV3Loss(
            model_loss,
            actor_loss,
            value_loss,
            replay_value_loss_weight=settings.replay_value_weight,
            continuation_horizon=settings.continuation_horizon,
            lmbda=settings.lmbda,
        ).to(device)
        self.optimizer = GraphedOptimizer(
            list(self.loss.parameters()),
            lr=settings.lr,
            agc=settings.adaptive_grad_clip,
            eps=settings.optimizer_eps,
            warmup_steps=settings.warmup_steps,
        )
        self._target = TargetInGraph(value_loss, self.optimizer, tau=settings.slow_critic_tau)
        self.stepper = DreamerV3OptimizationStepper(
            self.loss,
            self.optimizer,
            self._target,
            compile_train_step=False if settings.compile_scan else settings.compile,
            cudagraph=settings.cuda_graph,
            rssm_scan_unroll=settings.scan_unroll,
            mixed_precision=settings.mixed_precision,
        )
        if settings.compile_scan:
            for module in networks.world_model.modules():
                if isinstance(module, RSSMRolloutV3):
                    module.compile_rollout("scan", unroll=settings.scan_unroll)
            # Of the imagined steps; in place, so that checkpoints have the same names.
            networks.policy.estimator.prior.compile(dynamic=False)
        self._warm = not any(self.stepper.resolve(device))

    @property
    def num_parameters(self) -> int:
        """Numbers that the optimizer changes."""
        return sum(parameter.numel() for group in self.optimizer.param_groups for parameter in group["params"])

    @property
    def is_warm(self) -> bool:
        """Whether :meth:`warm_up` was called, or need not be."""
        return self._warm

    def warm_up(self, sample: TensorDictBase) -> None:
        """Compiles and captures the update; nothing is learnt. Collection and write-back must rest meanwhile."""
        self.stepper.warmup(_transitions(sample))
        self._capture()
        self._warm = True

    def _capture(self) -> None:
        if self.stepper.resolve(self.device)[1]:
            self.optimizer.capture(self._target.launch)

    def update(self, sample: TensorDictBase) -> tuple[TensorDictBase, torch.Tensor, torch.Tensor]:
        """Takes one update.

        Args:
            sample (TensorDictBase): windows ``[B, T + 1]`` on the learner's device; the last row of each gives nothing
                but its handle.

        Returns:
            tuple: detached metrics, and the latents after each step, ``[B, T, S]`` and ``[B, T, D]``: the context of
            the rows ``1`` to ``T``.
        """
        transitions = _transitions(sample)
        metrics = self.stepper.step(None, transitions)
        context = transitions.get("replay_context")
        return metrics, context.get("state"), context.get("belief")

    def state_dict(self) -> dict[str, Any]:
        """Returns parameters, targets, statistics of returns, and the optimizer's state."""
        return {"loss": dict(self.loss.state_dict()), "stepper": self.stepper.state_dict()}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` for a state of other networks; changes nothing."""
        own = self.loss.state_dict()
        shapes = {key: tuple(value.shape) for key, value in own.items() if isinstance(value, torch.Tensor)}
        given = {key: tuple(value.shape) for key, value in state["loss"].items() if isinstance(value, torch.Tensor)}
        if shapes != given:
            wrong = sorted(key for key in shapes.keys() | given.keys() if shapes.get(key) != given.get(key))
            raise ValueError(f"networks must have the sizes that were saved, got others at {wrong[:3]}")
        stepper, parts = state["stepper"], self.stepper.state_dict()
        missing = sorted(set(parts) - set(stepper))
        if missing:
            raise ValueError(f"the state must have the parts {sorted(parts)}, got none of {missing}")
        groups = [[group["params"] for group in part["optimizer"]["param_groups"]] for part in (parts, stepper)]
        if groups[0] != groups[1] or "state" not in stepper["optimizer"]:
            raise ValueError("the optimizer must be that of the networks that were saved, got another")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`; rates, discounts and the other options are the constructor's.

        Raises:
            KeyError, ValueError: for a state of other networks, or one that is not whole. Nothing was changed.
        """
        self.check_state_dict(state)
        stepper, mine = state["stepper"], self.loss.state_dict()
        # TorchRL keeps options among what it saves.
        options = {key: mine[key] for key in mine if key.endswith(("_value_estimator.gamma", "_value_estimator.lmbda"))}
        groups = self.optimizer.state_dict()["param_groups"]
        for group, saved in zip(groups, stepper["optimizer"]["param_groups"], strict=True):
            group["step"] = saved["step"]
        self.loss.load_state_dict({**state["loss"], **options})
        self.stepper.load_state_dict({**stepper, "optimizer": {**stepper["optimizer"], "param_groups": groups}})
        if self._warm:
            self._capture()


def _transitions(sample: TensorDictBase) -> TensorDictBase:
    return sample.exclude("index", "index_generation")[:, :-1]
