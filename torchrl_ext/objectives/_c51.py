# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The categorical Bellman projection of C51 (arXiv 1707.06887, eq. 7)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def project_categorical(
    probs: Tensor, shift: Tensor, scale: Tensor, support: Tensor, *, v_min: float, v_max: float
) -> Tensor:
    r"""Projects the distribution of ``shift + scale * Z`` back onto the atoms of ``Z``.

    Mass that lands between two atoms is shared by distance, so the total is kept and, away from the
    edges of the support, so is the expectation; mass beyond an edge goes to the last atom:

    .. math::
        (\Phi p)_i = \sum_j p_j \left[1 - \frac{|[s + c z_j]_{z_0}^{z_{n-1}} - z_i|}{\Delta z}\right]_0^1

    Two ``scatter_add`` instead of the ``n x n`` kernel above; shapes are static and nothing is read back.

    Args:
        probs (Tensor): probabilities of the atoms, floating dtype, shape ``[*lead, *batch, n]``.
        shift (Tensor): ``s``, the reward part of the target, shape ``[*batch]``.
        scale (Tensor): ``c``, the masked discount, shape ``[*batch]``, non-negative.
        support (Tensor): the atoms, evenly spaced from ``v_min`` to ``v_max``, shape ``[n]`` with ``n >= 2``.

    Keyword Args:
        v_min (float): the first atom, once more as a number: reading it from a CUDA tensor would wait.
        v_max (float): the last atom.

    Returns:
        Tensor: projected probabilities, shape and dtype of ``probs``. A row with a non-finite shift
        or scale comes back non-finite, and no index leaves the support.

    Examples:
        >>> import torch
        >>> support = torch.tensor([0.0, 1.0, 2.0])
        >>> probs, shift, scale = torch.tensor([0.0, 1.0, 0.0]), torch.tensor(0.25), torch.tensor(1.0)
        >>> project_categorical(probs, shift, scale, support, v_min=0.0, v_max=2.0)
        tensor([0.0000, 0.7500, 0.2500])
    """
    last = support.shape[0] - 1
    atoms = torch.addcmul(shift.unsqueeze(-1), scale.unsqueeze(-1), support).clamp(v_min, v_max)
    position = (atoms - v_min) * (last / (v_max - v_min))
    # The left neighbour never is the last atom, so the right one always exists: an atom exactly on an
    # edge or on a neighbour needs no case of its own. The integer clamp also guards a NaN, whose cast is
    # undefined, from becoming an index.
    lower = position.floor().long().clamp_(0, last - 1)
    weight = (position - lower).clamp(0.0, 1.0)
    upper_mass = probs * weight
    index = lower.expand_as(probs)
    projected = torch.zeros_like(probs).scatter_add(-1, index, probs - upper_mass)
    return projected.scatter_add(-1, index + 1, upper_mass)


def expectation(probs: Tensor, support: Tensor) -> Tensor:
    """Returns the mean of each distribution, ``[..., n] -> [...]``."""
    # Not ``probs @ support``: autocast would compute that in bf16, far too coarse for a value.
    return (probs * support).sum(-1)


def select_target(probs: Tensor, support: Tensor, *, reduction: Literal["min", "mean", "own"]) -> Tensor:
    """Reduces the next-state distributions of several critics to what each of them bootstraps from.

    Args:
        probs (Tensor): probabilities, shape ``[Q, *batch, n]``.
        support (Tensor): the atoms, shape ``[n]``.

    Keyword Args:
        reduction ("min", "mean" or "own"): per row the distribution with the smallest expectation; the
            average distribution; or all of them, each critic its own.

    Returns:
        Tensor: shape ``[Q, *batch, n]`` for ``"own"``, else ``[1, *batch, n]``.
    """
    if reduction == "own" or probs.shape[0] == 1:
        return probs
    if reduction == "mean":
        return probs.mean(0, keepdim=True)
    # r + c * E[Z] grows with E[Z], so the order before the projection is the order after it (but for
    # mass cut off at the edges), and only one distribution needs to be projected.
    index = expectation(probs, support).argmin(0, keepdim=True)
    return probs.gather(0, index.unsqueeze(-1).expand(1, *probs.shape[1:]))
