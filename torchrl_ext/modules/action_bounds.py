# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Reads the box a squashed policy acts in from a TorchRL action spec."""

from __future__ import annotations

from tensordict import NestedKey
from torch import Tensor
from torchrl.data import Bounded, Composite, TensorSpec


def action_bounds(spec: TensorSpec, *, action_key: NestedKey = "action") -> tuple[Tensor, Tensor]:
    """Returns the bounds of one action vector, whatever the batch shape of its spec.

    Args:
        spec (TensorSpec): the action spec, shape ``[*batch, A]``, or a :class:`~torchrl.data.Composite` that
            holds it at ``action_key``.

    Keyword Args:
        action_key (NestedKey): where the action is in a composite spec. Defaults to ``"action"``.

    Returns:
        tuple[Tensor, Tensor]: low and high, shape ``[A]``, the dtype of the spec.

    Raises:
        ValueError: if the spec is not a box of floating numbers with finite ``low < high`` (a discrete
            space, for one), or if the bounds differ along its batch dimensions.

    Examples:
        >>> from torchrl.data import Bounded
        >>> action_bounds(Bounded(-1.0, 1.0, shape=(16, 2)))
        (tensor([-1., -1.]), tensor([1., 1.]))
    """
    leaf = spec.get(action_key, None) if isinstance(spec, Composite) else spec
    must = f"action_bounds: the action spec at key {action_key!r} must be a Bounded spec of a floating dtype with shape"
    if not isinstance(leaf, Bounded) or not leaf.dtype.is_floating_point or leaf.ndim == 0:
        came = "nothing" if leaf is None else f"{type(leaf).__name__} of {leaf.dtype} and shape {list(leaf.shape)}"
        raise ValueError(f"{must} [..., A], got {came}; FastSAC drives continuous actions only.")
    low, high = (bound.expand(leaf.shape).reshape(-1, leaf.shape[-1]) for bound in (leaf.space.low, leaf.space.high))
    if not (low.isfinite().all() and high.isfinite().all() and (low < high).all()):
        raise ValueError(
            f"{must} [..., A] and finite low < high, got low {low[0].tolist()} and high {high[0].tolist()}; "
            "give the environment finite bounds (torchrl.envs.ActionScaling or a spec override)."
        )
    if not ((low == low[0]).all() and (high == high[0]).all()):
        raise ValueError(f"{must} [..., A] and equal bounds along its batch dimensions, got bounds that differ.")
    return low[0].clone(), high[0].clone()
