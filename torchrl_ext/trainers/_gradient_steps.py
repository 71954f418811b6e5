# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Gradient steps of FastSAC from tensors, launch by launch: what a CUDA graph records."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl._utils import logger as torchrl_logger

from torchrl_ext.objectives._tensor_losses import Networks, TensorLosses, Transition, networks_of, why_not_tensors
from torchrl_ext.trainers._counter_draws import CounterDraws, counter_draws, normal_noise
from torchrl_ext.trainers._parameter_updates import ParameterUpdates
from torchrl_ext.trainers._working_copies import WorkingCopy

if TYPE_CHECKING:
    from torchrl_ext.trainers.fast_sac_learner import FastSACLearner


class NotCapturedError(RuntimeError):
    """Steps cannot be captured; the message is the reason. Parameters, optimizers and generators are as before."""


class Draws(NamedTuple):
    """All that is random in a step."""

    batch: Transition
    noise: Tensor
    """Of the next actions, ``[B, A]``."""
    actor_noise: Tensor | None
    """Of the actor's own actions; None in a step without the actor."""


class GradientSteps:
    """Base of :class:`FastSACStepper`: losses, parameter updates and metrics of one step.

    Args:
        learner (FastSACLearner): whose networks and optimizers.

    Keyword Args:
        compile (bool or dict): see :class:`FastSACStepper`.
        most (int): steps of one launch at most.

    Raises:
        NotCapturedError: if the loss has no form in tensors.
    """

    def __init__(self, learner: FastSACLearner, *, compile: bool | dict[str, Any], most: int) -> None:
        loss, dtype = learner.loss, learner.autocast
        reason = why_not_tensors(loss, learner.normalizer)
        if reason is not None:
            raise NotCapturedError(reason)
        self.device, self._loss, self._frequency = learner.device, loss, learner.policy_frequency
        own = networks_of(loss)
        actor, critic, target = (WorkingCopy(network, dtype) for network in (own.actor, own.critic, own.target))
        if any(
            [*map(id, copy.masters)] != [*map(id, parameters)]
            for copy, parameters in ((actor, loss.actor_parameters()), (critic, loss.critic_parameters()))
        ):
            raise NotCapturedError("parameters of the networks are tied or in another order than the loss lists them")
        networks = Networks(actor.network, critic.network, critic.frozen(), target.network)
        self.losses = TensorLosses(loss, learner.normalizer, networks, autocast=dtype)
        self.updates = ParameterUpdates(learner, actor, critic, target)
        self._actor_leaves = actor.parameters
        self._critic_leaves = [*critic.parameters, *loss.alpha_parameters()]
        self._compile(compile)
        # Where noise is drawn; None leaves it to torch.
        self._counter = counter_draws(self.device, most)
        self._metrics = torch.empty(0, device=self.device)
        # By kind of graph: whether it samples. Each kind has its own batch size.
        self._buffers: dict[bool, Tensor] = {}
        self._has_actor_loss = False
        self._said: set[str] = set()

    def _compile(self, options: bool | dict[str, Any]) -> None:
        self.compiled = bool(options) or options == {}
        self._critic_loss: Callable[..., Any] = self.losses.critic
        self._actor_loss: Callable[..., Any] = self.losses.actor
        self.updates.compile(None)
        if self.compiled:
            # Tuned elementwise kernels and reductions: 0.93 -> 0.83 ms per step on an H200 at batch 8192.
            tuned = options if isinstance(options, dict) else {"max_autotune_pointwise": True}
            # Inductor's own graphs would be graphs inside ours.
            inductor = {"triton.cudagraphs": False, **tuned}
            settings: dict[str, Any] = {"dynamic": False, "fullgraph": True, "options": inductor}
            self._critic_loss = torch.compile(self.losses.critic, **settings)
            self._actor_loss = torch.compile(self.losses.actor, **settings)
            self.updates.compile(settings)

    def metrics(self) -> dict[str, Tensor]:
        """Returns the metrics of the last step, in memory of the caller's: one copy, no kernel, no waiting."""
        size = (self._metrics.numel() - 4) // 3
        flat = self._metrics.clone()
        names = ("loss_critic", "loss_alpha", "alpha")
        made = {name: flat[number] for number, name in enumerate(names)}
        entropy, q_target, td_error = flat[3:-1].view(3, size)
        made.update(entropy=entropy, q_target=q_target, td_error=td_error)
        if self._has_actor_loss:
            made["loss_actor"] = flat[-1]
        return made

    def _is_actors_turn(self, done: int) -> bool:
        return (done + 1) % self._frequency == 0

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            torchrl_logger.info(f"FastSACStepper: {what}.")

    def _take_one(
        self,
        inside: bool,
        sample: Callable[[int], TensorDictBase | Transition],
        with_actor: bool,
        counters: list[CounterDraws],
    ) -> None:
        """Takes a step launch by launch, of whose draws ``counters`` say where they stand."""
        for counter in counters:
            counter.place()
        draws = self._draw(sample, with_actor)
        for counter in counters:
            counter.advance(1)
            counter.launched(1)
        self._choose_metrics(inside, draws.batch)
        self.updates.refresh()
        self._take(draws)

    def _draw(self, sample: Callable[[int], TensorDictBase | Transition], with_actor: bool, turn: int = 0) -> Draws:
        """Draws a step, which is the one with number ``turn`` of its launch; ``sample`` takes that number."""
        batch = self.losses.read(sample(turn))
        if self._counter is not None:
            drawn = normal_noise(self._counter.seats[turn], batch.action.shape, 1 + with_actor)
            return Draws(batch, drawn[0], drawn[1] if with_actor else None)
        noise = self.losses.noise(batch)
        return Draws(batch, noise, self.losses.noise(batch) if with_actor else None)

    def _take(self, draws: Draws) -> None:
        self._loss.limit_alpha()
        total, metrics = self._critic_loss(draws.batch, draws.noise)
        gradients = torch.autograd.grad(total, self._critic_leaves)
        with torch.no_grad():
            self._metrics[:-1].copy_(metrics)
            self.updates.critic(list(gradients))
        if draws.actor_noise is not None:
            loss = self._actor_loss(draws.batch, draws.actor_noise)
            gradients = torch.autograd.grad(loss, self._actor_leaves)
            with torch.no_grad():
                self._metrics[-1].copy_(loss)
                self.updates.actor(list(gradients))

    def _choose_metrics(self, inside: bool, batch: Transition | None = None) -> None:
        """Makes the memory of one kind of graph current, allocating it for an example; the actor's loss goes along."""
        if batch is not None:
            size = 3 * len(batch.reward) + 4
            if inside not in self._buffers or self._buffers[inside].numel() != size:
                self._buffers[inside] = torch.zeros(size, device=self.device)
        chosen = self._buffers[inside]
        if chosen is not self._metrics:
            if self._metrics.numel():
                chosen[-1:].copy_(self._metrics[-1:])
            self._metrics = chosen
