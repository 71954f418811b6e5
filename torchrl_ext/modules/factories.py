# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Wraps the FastSAC networks as the TensorDict modules that collectors and losses take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDict, TensorDictParams
from tensordict.nn import InteractionType, TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torchrl.data import Composite, TensorSpec
from torchrl.modules import ProbabilisticActor

from torchrl_ext.modules.action_bounds import action_bounds
from torchrl_ext.modules.fast_sac import C51CriticNet, FastSACActorNet
from torchrl_ext.modules.keyed import KeyedModule
from torchrl_ext.modules.squashed_normal import SquashedNormal


def make_fast_sac_actor(
    action_spec: TensorSpec,
    *,
    observation_dim: int,
    in_keys: Sequence[NestedKey] = ("observation",),
    action_key: NestedKey = "action",
    hidden_size: int = 512,
    log_std_min: float = -5.0,
    log_std_max: float = 0.0,
    init_std: float | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> ProbabilisticActor:
    """Builds the FastSAC policy: :class:`FastSACActorNet` followed by a :class:`SquashedNormal`.

    The module acts on what it reads: give it the normalised keys of :class:`EmpiricalNormalization`
    and act through :func:`make_fast_sac_policy`. It draws by default; under
    ``ExplorationType.DETERMINISTIC`` the action is the centre of the box plus its half-range times
    ``tanh(loc)``.

    Args:
        action_spec (TensorSpec): ``env.action_spec``, batched or not, or the composite that holds it.

    Keyword Args:
        observation_dim (int): features of all ``in_keys`` together.
        in_keys (sequence of NestedKey): observations, concatenated in this order. Defaults to
            ``("observation",)``.
        action_key (NestedKey): where the action is written, shape ``[..., A]``. Defaults to ``"action"``.
        hidden_size, log_std_min, log_std_max, init_std, device, dtype: as in :class:`FastSACActorNet`.

    Returns:
        ProbabilisticActor: writes ``"loc"``, ``"scale"`` and the action.

    Raises:
        ValueError: if the action space is not a finite box; no module is built.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded
        >>> actor = make_fast_sac_actor(Bounded(-1.0, 1.0, shape=(2,)), observation_dim=3, hidden_size=32)
        >>> actor(TensorDict(observation=torch.randn(4, 3), batch_size=[4]))["action"].shape
        torch.Size([4, 2])
    """
    low, high = action_bounds(action_spec, action_key=action_key)
    net = FastSACActorNet(
        observation_dim,
        low.numel(),
        hidden_size=hidden_size,
        log_std_min=log_std_min,
        log_std_max=log_std_max,
        init_std=init_std,
        device=device,
        dtype=dtype,
    )
    leaf = action_spec.get(action_key) if isinstance(action_spec, Composite) else action_spec
    single = leaf[(0,) * (leaf.ndim - 1)]
    return ProbabilisticActor(
        KeyedModule(net, in_keys=list(in_keys), out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        out_keys=[action_key],
        spec=Composite({action_key: single}).to(low.device if device is None else device),
        distribution_class=SquashedNormal,
        distribution_kwargs=_bound_kwargs(low, high, device=device, dtype=dtype),
        default_interaction_type=InteractionType.RANDOM,
    )


def _bound_kwargs(
    low: torch.Tensor, high: torch.Tensor, *, device: torch.device | str | None, dtype: torch.dtype | None
) -> dict[str, float] | TensorDictParams:
    if (low == low[0]).all() and (high == high[0]).all():
        return {"low": low[0].item(), "high": high[0].item()}
    # Plain tensors in a dict would stay behind when the actor moves to another device.
    bounds = TensorDict({"low": low, "high": high}).to(device, dtype or torch.get_default_dtype())
    return TensorDictParams(bounds, no_convert=True)


def make_fast_sac_critic(
    *,
    observation_dim: int,
    action_dim: int,
    in_keys: Sequence[NestedKey] = ("observation",),
    action_key: NestedKey = "action",
    out_key: NestedKey = "state_action_logits",
    num_critics: int = 2,
    hidden_size: int = 768,
    num_atoms: int = 101,
    v_min: float = -20.0,
    v_max: float = 20.0,
    pad_to: int = 1,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> TensorDictModule:
    """Builds the FastSAC critics: one :class:`C51CriticNet` for all of them.

    Keyword Args:
        observation_dim (int): features of all ``in_keys`` together; may differ from the actor's.
        action_dim (int): length of an action vector.
        in_keys (sequence of NestedKey): observations, concatenated in this order. Defaults to
            ``("observation",)``.
        action_key (NestedKey): where the action is read. Defaults to ``"action"``.
        out_key (NestedKey): where the logits are written, shape ``[..., num_critics, num_atoms]``. Defaults
            to ``"state_action_logits"``.
        num_critics, hidden_size, num_atoms, v_min, v_max, pad_to, device, dtype: as in
            :class:`C51CriticNet`.

    Returns:
        TensorDictModule: reads ``in_keys`` and the action, writes the logits.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> critic = make_fast_sac_critic(observation_dim=3, action_dim=2, hidden_size=32)
        >>> td = TensorDict(observation=torch.randn(4, 3), action=torch.randn(4, 2), batch_size=[4])
        >>> critic(td)["state_action_logits"].shape
        torch.Size([4, 2, 101])
    """
    net = C51CriticNet(
        observation_dim,
        action_dim,
        num_critics=num_critics,
        hidden_size=hidden_size,
        num_atoms=num_atoms,
        v_min=v_min,
        v_max=v_max,
        pad_to=pad_to,
        device=device,
        dtype=dtype,
    )
    return KeyedModule(net, in_keys=[*in_keys, action_key], out_keys=[out_key])


def make_fast_sac_policy(actor: ProbabilisticActor, normalizer: TensorDictModuleBase | None = None) -> TensorDictModule:
    """Chains a normaliser and an actor into a policy that reads raw observations and writes the action only.

    Nothing is copied: the policy acts with the current weights and statistics of its parts.

    Args:
        actor (ProbabilisticActor): from :func:`make_fast_sac_actor`.
        normalizer (TensorDictModuleBase, optional): an :class:`EmpiricalNormalization` that writes the keys
            the actor reads. Defaults to ``None``: the actor reads the observations themselves.

    Returns:
        TensorDictModule: what a collector takes; normalised observations, ``loc`` and ``scale`` stay inside.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded
        >>> actor = make_fast_sac_actor(Bounded(-1.0, 1.0, shape=(2,)), observation_dim=3, hidden_size=32)
        >>> policy = make_fast_sac_policy(actor)
        >>> sorted(policy(TensorDict(observation=torch.randn(4, 3), batch_size=[4])).keys())
        ['action', 'observation']
    """
    modules = [actor] if normalizer is None else [normalizer, actor]
    return TensorDictSequential(*modules, selected_out_keys=actor.dist_sample_keys)
