# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The learner of FastSAC: one gradient step, its optimizers and its counter."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl._utils import logger as torchrl_logger
from torchrl.data.replay_buffers import ReplayBuffer

from torchrl_ext.modules import EmpiricalNormalization, make_fast_sac_policy
from torchrl_ext.objectives import FastSACLoss
from torchrl_ext.trainers._state_check import check_like, check_optimizer
from torchrl_ext.trainers.fast_sac_stepper import FastSACStepper, NotCapturedError


class FastSACLearner:
    """Owns what a FastSAC gradient step changes: networks, targets, temperature, statistics, optimizers, counter.

    One step is: normalise, critic loss and temperature loss in one backward pass, AdamW, target update, and every
    ``policy_frequency`` steps the actor loss and its AdamW. The temperature has no weight decay (decay pulls it to 1).
    Nothing is read back from the device.

    On CUDA     with ``cuda_graph`` steps are captured by :class:`~torchrl_ext.trainers.FastSACStepper`, one launch a
                step or less, sampling included. Where that is impossible they are eager, and one line of the log says
                why.
    Ownership   the batch of an eager :meth:`update` gets the normalised observations written into it. The metrics are
                owned by the caller.
    Order       :meth:`observe` counts collected rows once; replayed rows are never counted.
    Processes   the policy reads the learner's own parameters. Publish a copy to other processes.

    Args:
        loss (FastSACLoss): with its networks on the learner's device, reading what ``normalizer`` writes.
        normalizer (EmpiricalNormalization, optional): of the observations. Defaults to ``None``.

    Keyword Args:
        critic_lr, actor_lr, alpha_lr (float): learning rates; see :meth:`set_learning_rates`.
        betas (tuple of float): AdamW's. Defaults to ``(0.9, 0.95)`` (FastSAC, arXiv 2512.01996).
        weight_decay (float): of critics and actor. Defaults to ``1e-3``.
        tau (float): step of the target critics towards the critics. Defaults to ``0.1``.
        policy_frequency (int): critic steps per actor step. Defaults to ``4``.
        max_grad_norm (float, optional): limit of the gradient norm of each network. Defaults to ``None``.
        autocast (torch.dtype, optional): dtype of matrix products, such as ``torch.bfloat16``. Defaults to ``None``.
        cuda_graph (bool): on CUDA, replay steps as graphs, captured when they are first needed. No effect on other
            devices. Defaults to ``False``.
        compile (bool or dict): whether captured steps are compiled by Inductor, which takes more than a minute where
            its cache has nothing; a dictionary gives Inductor's options. Defaults to ``False``.
        steps_per_graph (int, optional): gradient steps of one launch where so many are due, a multiple of
            ``policy_frequency``, which is the default.

    Raises:
        ValueError: if an option is out of range.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded
        >>> from torchrl_ext.modules import make_fast_sac_actor, make_fast_sac_critic
        >>> from torchrl_ext.objectives import FastSACLoss
        >>> actor = make_fast_sac_actor(Bounded(-1.0, 1.0, shape=(2,)), observation_dim=3, hidden_size=32)
        >>> critic = make_fast_sac_critic(observation_dim=3, action_dim=2, hidden_size=32)
        >>> learner = FastSACLearner(FastSACLoss(actor, critic), critic_lr=3e-4, actor_lr=3e-4, alpha_lr=3e-4)
        >>> batch = learner.policy(TensorDict(observation=torch.randn(4, 3), batch_size=[4]))
        >>> batch["next"] = batch.clone().update({"reward": torch.ones(4, 1), "terminated": torch.zeros(4, 1).bool()})
        >>> metrics = learner.update(batch)
        >>> learner.updates, "loss_critic" in metrics
        (1, True)
    """

    def __init__(
        self,
        loss: FastSACLoss,
        normalizer: EmpiricalNormalization | None = None,
        *,
        critic_lr: float,
        actor_lr: float,
        alpha_lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 1e-3,
        tau: float = 0.1,
        policy_frequency: int = 4,
        max_grad_norm: float | None = None,
        autocast: torch.dtype | None = None,
        cuda_graph: bool = False,
        compile: bool | dict[str, Any] = False,
        steps_per_graph: int | None = None,
    ) -> None:
        if policy_frequency < 1 or not 0 < tau <= 1 or (max_grad_norm is not None and max_grad_norm <= 0):
            raise ValueError(
                "FastSACLearner: policy_frequency must be >= 1, tau in (0, 1] and max_grad_norm positive, got "
                f"{policy_frequency}, {tau} and {max_grad_norm}."
            )
        self.loss, self.normalizer = loss, normalizer
        self.tau, self.policy_frequency, self.max_grad_norm = tau, policy_frequency, max_grad_norm
        self.autocast = autocast
        self.updates = 0
        self._critic: list[Tensor] = [*loss.critic_parameters()]
        self._actor: list[Tensor] = [*loss.actor_parameters()]
        self._target = loss.target_parameters()
        self.device = self._actor[0].device
        self.cuda_graph = cuda_graph and self.device.type == "cuda"
        # Fused: a third of the time of the for-each version on a CPU.
        options: dict[str, Any] = {"betas": tuple(betas), "fused": True, "capturable": self.cuda_graph}
        groups = [{"params": self._critic, "lr": self._rate(critic_lr), "weight_decay": weight_decay}]
        if alpha := loss.alpha_parameters():
            groups.append({"params": alpha, "lr": self._rate(alpha_lr), "weight_decay": 0.0})
        self.critic_optimizer = torch.optim.AdamW(groups, **options)
        rate = self._rate(actor_lr)
        self.actor_optimizer = torch.optim.AdamW(self._actor, lr=rate, weight_decay=weight_decay, **options)
        self.policy: TensorDictModule = make_fast_sac_policy(loss.actor_network, normalizer)
        self._metrics: dict[str, Tensor] = {}
        self._stepper: FastSACStepper | None = None
        if self.cuda_graph:
            try:
                self._stepper = FastSACStepper(self, compile=compile, steps_per_graph=steps_per_graph)
            except NotCapturedError as reason:
                self._give_up(reason)

    def _rate(self, value: float) -> Any:
        # A graph reads its learning rates from memory.
        return torch.tensor(float(value), device=self.device) if self.cuda_graph else value

    def _give_up(self, reason: NotCapturedError) -> None:
        torchrl_logger.warning(f"FastSACLearner: gradient steps are eager, because {reason}.")
        self._stepper = None

    def set_learning_rates(
        self, *, critic: float | None = None, actor: float | None = None, alpha: float | None = None
    ) -> None:
        """Changes learning rates from the next step on; captured graphs follow.

        The schedulers of :mod:`torch.optim.lr_scheduler` do the same: build them on ``critic_optimizer`` (whose second
        group is the temperature) and ``actor_optimizer``.

        Keyword Args:
            critic, actor, alpha (float, optional): the new rates. Default to ``None``: unchanged. ``alpha`` has no
                effect on a fixed temperature.

        Raises:
            ValueError: if a rate is negative. Nothing was changed.
        """
        for name, value in (("critic", critic), ("actor", actor), ("alpha", alpha)):
            if value is not None and not value >= 0:
                raise ValueError(
                    f"FastSACLearner: the learning rate {name} must be >= 0, got {value}. Nothing was changed."
                )
        groups = [self.critic_optimizer.param_groups[0], self.actor_optimizer.param_groups[0]]
        groups += self.critic_optimizer.param_groups[1:]
        for group, value in zip(groups, (critic, actor, alpha), strict=False):
            if value is not None and isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            elif value is not None:
                group["lr"] = value

    def observe(self, run: TensorDictBase) -> None:
        """Counts every collected row once in the observation statistics.

        Args:
            run (TensorDictBase): rows with raw observations at the root, any batch shape, on any device.
        """
        if self.normalizer is None:
            return
        rows = run.select(*self.normalizer.in_keys)
        self.normalizer.update(rows.to(self.device, non_blocking=self.device.type == "cuda"))

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Takes one gradient step.

        Args:
            batch (TensorDictBase): ``[B]`` replayed transitions with raw observations, as of
                :class:`~torchrl_ext.data.SlotReplayBuffer`, on the learner's device.

        Returns:
            dict[str, Tensor]: detached, on the device, none of them reused: ``loss_critic``, ``loss_alpha``, ``alpha``
            and ``loss_actor`` (of the newest actor step), 0-d; ``entropy``, ``q_target`` and ``td_error``, ``[B]``.
        """
        if self._stepper is not None:
            try:
                self._stepper.step(batch, done=self.updates)
                self.updates += 1
                return self._stepper.metrics()
            except NotCapturedError as reason:
                self._give_up(reason)
        self._advance(batch)
        return dict(self._metrics)

    def prepare(self, replay: ReplayBuffer) -> None:
        """Compiles and captures the steps of :meth:`update_from` ahead of time; nothing is learnt, no draw is used up.

        What Inductor compiles, a minute or more, serves every replay with rows of the same layout and batches of the
        same size: a small one with a few rows will do while the real one is still empty. Without graphs, or with a
        replay that cannot be sampled inside one, there is nothing to do.

        Args:
            replay (ReplayBuffer): with rows to sample.
        """
        if self._stepper is not None:
            try:
                self._stepper.prepare(replay)
            except NotCapturedError as reason:
                self._give_up(reason)

    def update_from(self, replay: ReplayBuffer, updates: int) -> dict[str, Tensor]:
        """Samples and takes ``updates`` gradient steps; returns the metrics of the last one (none for 0).

        Raises:
            ValueError: for a negative number. No step was taken.
        """
        if updates < 0:
            raise ValueError(
                f"FastSACLearner.update_from: updates must not be negative, got {updates}. No step was taken."
            )
        left = updates
        while left and self._stepper is not None:
            try:
                taken = self._stepper.launch(replay, left, done=self.updates)
            except NotCapturedError as reason:
                self._give_up(reason)
                break
            self.updates += taken
            left -= taken
        if updates and not left and self._stepper is not None:
            return self._stepper.metrics()
        for _ in range(left):
            self._advance(replay.sample())
        return dict(self._metrics) if updates else {}

    def _advance(self, batch: TensorDictBase) -> None:
        with_actor = (self.updates + 1) % self.policy_frequency == 0
        self._metrics.update(self._step(batch, with_actor))
        self.updates += 1

    def _step(self, batch: TensorDictBase, with_actor: bool) -> dict[str, Tensor]:
        loss = self.loss
        if self.normalizer is not None:
            batch = self.normalizer.normalize_transition(batch)
        with self._casting():
            loss_critic, critic = loss.critic_loss(batch)
        loss_alpha, temperature = loss.alpha_loss(batch, log_prob=critic["next_log_prob"])
        self.critic_optimizer.zero_grad()
        (loss_critic + loss_alpha).backward()
        self._clip(self._critic)
        self.critic_optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self._target, self._critic, self.tau)
        metrics = {
            "loss_critic": loss_critic.detach(),
            "loss_alpha": loss_alpha.detach(),
            "alpha": temperature["alpha"],
            "entropy": temperature["entropy"],
            "q_target": critic["target_value"],
            "td_error": critic["td_error"],
        }
        if with_actor:
            with self._casting():
                loss_actor, _ = loss.actor_loss(batch)
            self.actor_optimizer.zero_grad()
            loss_actor.backward()
            self._clip(self._actor)
            self.actor_optimizer.step()
            metrics["loss_actor"] = loss_actor.detach()
        return metrics

    def _casting(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def _clip(self, parameters: list[Tensor]) -> None:
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)

    def state_dict(self) -> dict[str, Any]:
        """Returns all that a gradient step depends on, generators excepted. Tensors are the learner's own."""
        return {
            "loss": dict(self.loss.state_dict()),
            "normalizer": None if self.normalizer is None else dict(self.normalizer.state_dict()),
            "critic_optimizer": self.critic_optimizer.state_dict(),
            "actor_optimizer": self.actor_optimizer.state_dict(),
            "updates": self.updates,
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` unless :meth:`load_state_dict` would take the state; changes nothing."""
        mine = self.state_dict()
        if set(state) != set(mine) or not isinstance(state["updates"], int):
            raise ValueError(
                f"FastSACLearner: the state must have the parts {sorted(mine)}, got {sorted(map(str, state))}. "
                "Nothing was changed."
            )
        for name in ("loss", "normalizer"):
            check_like(f"FastSACLearner: {name}", mine[name], state[name])
        own, saved = self.loss.support, state["loss"]["support"].to(self.device)
        # Not bit for bit: another machine may have rounded an atom in another way.
        if not torch.allclose(own, saved, rtol=0.0, atol=1e-5 * (self.loss.v_max - self.loss.v_min)):
            raise ValueError(
                f"FastSACLearner: the atoms must be those of the saved critics, from {float(saved[0]):g} to "
                f"{float(saved[-1]):g}, got from {self.loss.v_min:g} to {self.loss.v_max:g}. Nothing was changed."
            )
        for name in ("critic_optimizer", "actor_optimizer"):
            check_optimizer(f"FastSACLearner: {name}", getattr(self, name), state[name])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict` on any device; learning rates and the other options are the constructor's.

        Raises:
            ValueError: if the state has other parts, shapes or dtypes, or its critics other atoms. Nothing was changed.
        """
        self.check_state_dict(state)
        mine, options = self.loss.state_dict(), ["support", "gamma", "target_entropy"]
        options += ["log_alpha"] if self.loss.fixed_alpha else []
        self.loss.load_state_dict({**state["loss"], **{name: mine[name] for name in options}})
        if self.normalizer is not None:
            self.normalizer.load_state_dict(state["normalizer"])
        for name in ("critic_optimizer", "actor_optimizer"):
            optimizer = getattr(self, name)
            # The moments are the state; what the caller asked for stays as asked.
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state[name]["state"], "param_groups": groups})
        self.updates = state["updates"]
        if self._stepper is not None:
            self._stepper.reset()  # graphs hold the optimizers' old moments
