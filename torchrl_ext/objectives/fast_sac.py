# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The FastSAC loss: soft actor-critic with categorical critics."""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch
from torch import Tensor, nn
from torchrl.data import TensorSpec
from torchrl.modules.distributions.utils import rsample_and_log_prob

from torchrl_ext.objectives._rows import actor_rows, bellman_target, critic_rows, value_rows
from torchrl_ext.objectives._temperature import TemperatureLossModule


class FastSACLoss(TemperatureLossModule):
    r"""Soft actor-critic with C51 critics (FastSAC, arXiv 2512.01996; SAC, arXiv 1812.05905).

    With ``a' ~ pi(s')``, the discount ``c`` of the row and ``m = 1 - terminated``, the target is the law of
    ``r + c m (Z_target(s', a') - alpha log pi(a'|s'))`` projected on the atoms (arXiv 1707.06887, eq. 7), and

    .. math::
        L_{critic} = \sum_q CE(target_q, Z_q(s, a)),\quad L_{actor} = \alpha \log\pi(a|s) - Q(s, a),\quad
        L_{\alpha} = -\alpha (\log\pi + \bar H)

    with ``a ~ pi(s)``, averaged over the batch, weighted by ``"priority_weight"`` (``[*B]`` or ``[*B, 1]``) when
    present. Each loss has gradients for its own parameters only.

    Bootstrap   only ``("next", "terminated")`` masks it: a truncated row bootstraps from the observation in
                ``"next"``, which must be the final one of its episode. ``done`` and ``truncated`` are not read.
    Discount    ``"discount"`` (the ``gamma ** k`` of an n-step sampler) when the batch has it, else
                ``gamma ** steps_to_next_obs`` when it has that (``MultiStepTransform``), else ``gamma``.
    Entropy     densities are taken per unit of the action box mapped to [-1, 1], so temperature, target
                entropy and bonus do not depend on the units of the action (needs the spec).
    Device      nothing is read back and shapes are static: losses can be compiled and captured in CUDA graphs.

    Args:
        actor_network (ProbabilisticTensorDictSequential): the policy, as of ``make_fast_sac_actor``.
        qvalue_network (TensorDictModule): all critics in one module, writing logits ``[*B, Q, atoms]``, as of
            ``make_fast_sac_critic``. Its observations may differ from the actor's.

    Keyword Args:
        support (Tensor, optional): the evenly spaced atoms. Defaults to ``None``: ``qvalue_network.module.support``.
        action_spec (TensorSpec, optional): the action box. Defaults to ``None``: ``actor_network.spec``.
        target_reduction ("min", "mean" or "own"): what critics bootstrap from: per row the distribution of the
            critic with the smallest expectation, the average of all, or each its own. Defaults to ``"own"``.
        policy_reduction ("min" or "mean"): how the actor reads several critics. Defaults to ``"mean"``.
        gamma (float): discount of one step. Defaults to ``0.97``.
        target_entropy (float or "auto"): nats; ``"auto"`` is ``-target_entropy_ratio * A``. Defaults to ``"auto"``.
        target_entropy_ratio (float): see above. Defaults to ``0.5``.
        alpha_init (float): temperature at the start. Defaults to ``1e-3``.
        min_alpha, max_alpha (float, optional): limits of the temperature. Default to ``None``.
        fixed_alpha (bool): keeps the temperature at ``alpha_init``, which may then be 0; ``loss_alpha`` is 0 and
            has no gradient. Defaults to ``False``.
        delay_qvalue (bool): whether target critics are separate (``SoftUpdate``). Defaults to ``True``.
        reduction ("mean", "sum" or "none"): over the batch. Defaults to ``"mean"``.

    Raises:
        ValueError: if an option is unknown or out of range, or atoms or action spec are needed and not known.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded
        >>> from torchrl.objectives import SoftUpdate
        >>> from torchrl_ext.modules import make_fast_sac_actor, make_fast_sac_critic
        >>> actor = make_fast_sac_actor(Bounded(-1.0, 1.0, shape=(2,)), observation_dim=3, hidden_size=32)
        >>> critic = make_fast_sac_critic(observation_dim=3, action_dim=2, hidden_size=32)
        >>> loss = FastSACLoss(actor, critic)
        >>> updater = SoftUpdate(loss, tau=0.1)
        >>> batch = actor(TensorDict(observation=torch.randn(4, 3), batch_size=[4]))
        >>> batch["next"] = batch.clone().update({"reward": torch.ones(4, 1), "terminated": torch.zeros(4, 1).bool()})
        >>> value, metadata = loss.critic_loss(batch)
        >>> value.backward()
        >>> loss.alpha_loss(batch, log_prob=metadata["next_log_prob"])[0].backward()
        >>> loss.actor_loss(batch)[0].backward()
        >>> updater.step()
        >>> sorted(loss(batch).keys())
        ['alpha', 'entropy', 'loss_actor', 'loss_alpha', 'loss_critic']
    """

    out_keys = ["loss_actor", "loss_critic", "loss_alpha", "alpha", "entropy"]
    _schedulable_buffers = frozenset({"gamma", "target_entropy"})

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        qvalue_network: TensorDictModule,
        *,
        support: Tensor | None = None,
        action_spec: TensorSpec | None = None,
        target_reduction: Literal["min", "mean", "own"] = "own",
        policy_reduction: Literal["min", "mean"] = "mean",
        gamma: float = 0.97,
        target_entropy: float | Literal["auto"] = "auto",
        target_entropy_ratio: float = 0.5,
        alpha_init: float = 1e-3,
        min_alpha: float | None = None,
        max_alpha: float | None = None,
        fixed_alpha: bool = False,
        delay_qvalue: bool = True,
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> None:
        super().__init__()
        for name, value, choices in (
            ("target_reduction", target_reduction, ("min", "mean", "own")),
            ("policy_reduction", policy_reduction, ("min", "mean")),
            ("reduction", reduction, ("mean", "sum", "none")),
        ):
            if value not in choices:
                raise ValueError(f"FastSACLoss: {name} must be one of {choices}, got {value!r}.")
            setattr(self, name, value)
        self.convert_to_functional(actor_network, "actor_network", create_target_params=False)
        self.convert_to_functional(qvalue_network, "qvalue_network", create_target_params=delay_qvalue)
        self.set_keys(action=actor_network.dist_sample_keys[-1], state_action_logits=qvalue_network.out_keys[-1])

        device = next(self.parameters()).device
        self._init_value(support, gamma=gamma, device=device)
        self._init_temperature(
            alpha_init=alpha_init, min_alpha=min_alpha, max_alpha=max_alpha, fixed_alpha=fixed_alpha, device=device
        )
        self._init_entropy(
            getattr(actor_network, "spec", None) if action_spec is None else action_spec,
            action_key=self.tensor_keys.action,
            target_entropy=target_entropy,
            target_entropy_ratio=target_entropy_ratio,
            device=device,
        )
        self._bind("actor_network", "qvalue_network")

    def actor_parameters(self) -> list[nn.Parameter]:
        """Parameters of ``loss_actor``."""
        return list(self.actor_network_params.parameters())

    def critic_parameters(self) -> list[nn.Parameter]:
        """Parameters of ``loss_critic``."""
        return list(self.qvalue_network_params.parameters())

    def target_parameters(self) -> list[Tensor]:
        """Target tensors in the order of :meth:`critic_parameters`.

        ``torch._foreach_lerp_(loss.target_parameters(), loss.critic_parameters(), tau)`` under ``no_grad`` is
        ``SoftUpdate(loss, tau=tau).step()`` at a tenth of its host time; keep the lists.
        """
        target = self._modules.get("target_qvalue_network_params", self.qvalue_network_params)
        source = self.qvalue_network_params.items(True, True)
        return [target.get(key).data for key, value in source if isinstance(value, nn.Parameter)]

    def critic_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross entropy of the critics to their targets, summed over critics.

        Args:
            tensordict (TensorDictBase): batch ``[*B]``: the action and the critics' observations, and in ``"next"`` the
                observations of both, reward and terminated (``[*B, 1]``, as ``discount`` when present).

        Returns:
            tuple[Tensor, dict[str, Tensor]]: the loss, and detached, ``[*B]`` each: ``td_error`` (the cross entropy),
            ``next_log_prob`` (reusable by :meth:`alpha_loss`) and ``target_value`` (the target's expectation).

        Raises:
            KeyError, ValueError: if an entry is missing or has a wrong shape. No loss was computed.
        """
        with torch.no_grad():
            target, target_value, next_log_prob = self._target(tensordict)
        action = tensordict.get(self.tensor_keys.action)
        logits = self._logits(self.qvalue_network, tensordict, action)
        per_row = critic_rows(target, logits)
        metadata = {"td_error": per_row.detach(), "next_log_prob": next_log_prob, "target_value": target_value}
        return self._reduced(per_row, tensordict), metadata

    def actor_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Temperature times log-probability minus the critics' value of a fresh action.

        Args:
            tensordict (TensorDictBase): batch ``[*B]`` with the observations of actor and critics.

        Returns:
            tuple[Tensor, dict[str, Tensor]]: the loss, and ``log_prob`` and ``q_value``, ``[*B]``, detached.
        """
        action, log_prob = self._act(tensordict)
        logits = self._logits(self._twins["frozen_qvalue_network"], tensordict, action)
        value = value_rows(logits, self.support, reduction=self.policy_reduction)
        metadata = {"log_prob": log_prob.detach(), "q_value": value.detach()}
        return self._reduced(actor_rows(self.alpha, log_prob, value), tensordict), metadata

    def alpha_loss(
        self, tensordict: TensorDictBase, *, log_prob: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Temperature loss, stationary where the policy's entropy is ``target_entropy`` (arXiv 1812.05905, eq. 18).

        Args:
            tensordict (TensorDictBase): batch ``[*B]`` with the actor's observations.

        Keyword Args:
            log_prob (Tensor, optional): ``[*B]``, from the metadata of another loss; saves a pass of the actor.
                Defaults to ``None``: of actions drawn here.

        Returns:
            tuple[Tensor, dict[str, Tensor]]: the loss, and ``alpha`` (0-d) and ``entropy`` (``[*B]``), detached.
        """
        if log_prob is None:
            with torch.no_grad():
                log_prob = self._act(tensordict)[1]
        log_prob = log_prob.detach()
        loss = self._reduced(self._alpha_rows(log_prob), tensordict)
        return loss, {"alpha": self.alpha, "entropy": -log_prob}

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Computes all losses and writes the priority (``"td_error"``, ``[*B]``) into the batch.

        Args:
            tensordict (TensorDictBase): as for :meth:`critic_loss` and :meth:`actor_loss`.

        Returns:
            TensorDictBase: the ``out_keys``, 0-d, or ``[*B]`` with ``reduction="none"``.
        """
        loss_critic, critic_metadata = self.critic_loss(tensordict)
        loss_actor, actor_metadata = self.actor_loss(tensordict)
        loss_alpha, alpha_metadata = self.alpha_loss(tensordict, log_prob=actor_metadata["log_prob"])
        tensordict.set(self.tensor_keys.priority, critic_metadata["td_error"])
        alpha, entropy = alpha_metadata["alpha"], alpha_metadata["entropy"]
        if self.reduction == "none":
            alpha = alpha.expand(tensordict.batch_size)
        else:
            entropy = entropy.mean()
        values = (loss_actor, loss_critic, loss_alpha, alpha, entropy)
        return TensorDict(dict(zip(self._out_keys, values, strict=True)), batch_size=alpha.shape)

    def _target(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        next_td, keys = tensordict.get("next"), self.tensor_keys
        reward = self._column(next_td, keys.reward)
        bootstrap = self._discount(tensordict) * self._column(next_td, keys.terminated).logical_not()
        action, log_prob = self._act(next_td)
        logits = self._logits(self._twins["target_qvalue_network"], next_td, action)
        target, value = bellman_target(
            logits,
            log_prob,
            reward,
            bootstrap,
            self.alpha,
            self.support,
            reduction=self.target_reduction,
            v_min=self.v_min,
            v_max=self.v_max,
        )
        return target, value, log_prob

    def _act(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        # On a selection: loc and scale are not to be written into a batch that belongs to the replay.
        dist = self.actor_network.get_dist(tensordict.select(*self.actor_network.in_keys))
        action, log_prob = rsample_and_log_prob(dist)
        return action, log_prob + self._log_volume if self._log_volume else log_prob
