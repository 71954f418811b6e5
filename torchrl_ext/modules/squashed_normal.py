# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""A diagonal normal squashed by ``tanh`` into action bounds, scored without inverting ``tanh``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints
from torch.nn import functional as F

_LOG_2 = math.log(2.0)
_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


class SquashedNormal(D.Distribution):
    r"""Distribution of ``low + (high - low) * (tanh(u) + 1) / 2`` with ``u ~ Normal(loc, scale)``.

    The last dimension is the event. The density is that of the action itself, so it contains the
    Jacobian of the bounds (``-sum(log((high - low) / 2))``), as in
    :class:`~torch.distributions.TransformedDistribution`. Source: SAC, arXiv 1812.05905, appendix C,
    eq. 26, with the logarithm of the Jacobian written as

    .. math::
        \log(1 - \tanh^2 u) = 2 (\log 2 - u - \mathrm{softplus}(-2u)),

    which stays finite, and has finite gradients, where ``1 - tanh(u) ** 2`` rounds to zero.

    No argument is validated by value: that would read the device and stall a CUDA stream.

    Args:
        loc (Tensor): mean of ``u``, floating dtype, shape ``[..., A]``.
        scale (Tensor): standard deviation of ``u``, positive, shape ``[..., A]``.

    Keyword Args:
        low (float or Tensor): lower bound of the action, scalar or shape ``[A]``. Defaults to ``-1.0``.
        high (float or Tensor): upper bound of the action, scalar or shape ``[A]``. Defaults to ``1.0``.

    Examples:
        >>> import torch
        >>> dist = SquashedNormal(torch.full((2, 3), 20.0), torch.full((2, 3), 0.1))
        >>> action, log_prob = dist.rsample_and_log_prob()
        >>> action.shape, log_prob.shape, bool(log_prob.isfinite().all())
        (torch.Size([2, 3]), torch.Size([2]), True)
    """

    arg_constraints = {"loc": constraints.real_vector, "scale": constraints.positive}
    has_rsample = True
    num_params = 2

    def __init__(self, loc: Tensor, scale: Tensor, *, low: float | Tensor = -1.0, high: float | Tensor = 1.0) -> None:
        self.loc = loc
        self.scale = scale
        self.low: Any = low
        self.high: Any = high
        # Most action spaces are [-1, 1]; they skip the affine map and its Jacobian altogether.
        self._unit = not isinstance(low, Tensor) and not isinstance(high, Tensor) and low == -1 and high == 1
        super().__init__(loc.shape[:-1], loc.shape[-1:], validate_args=False)

    @property
    def support(self) -> constraints.Constraint:
        """The closed box between the bounds."""
        return constraints.independent(constraints.interval(self.low, self.high), 1)

    def expand(self, batch_shape: Sequence[int], _instance: SquashedNormal | None = None) -> SquashedNormal:
        """Returns the same distribution with batch shape ``batch_shape``."""
        shape = (*batch_shape, *self.event_shape)
        return type(self)(self.loc.expand(shape), self.scale.expand(shape), low=self.low, high=self.high)

    @property
    def deterministic_sample(self) -> Tensor:
        """The action of ``u = loc``, shape ``[..., A]``: what ``ExplorationType.DETERMINISTIC`` acts with."""
        return self._squash(self.loc)

    @property
    def median(self) -> Tensor:
        """The per-dimension median, which a monotone map keeps: equal to :attr:`deterministic_sample`."""
        return self._squash(self.loc)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draws actions of shape ``[*sample_shape, ..., A]`` with pathwise gradients."""
        return self._squash(self._pre_tanh(self._noise(sample_shape)))

    def rsample_and_log_prob(self, sample_shape: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Draws actions and scores the very ``u`` they were made from.

        Args:
            sample_shape (sequence of int): leading dimensions of the draw. Defaults to ``()``.

        Returns:
            tuple[Tensor, Tensor]: actions ``[*sample_shape, ..., A]`` and log-densities
            ``[*sample_shape, ...]``, both with pathwise gradients.
        """
        noise = self._noise(sample_shape)
        pre_tanh = self._pre_tanh(noise)
        return self._squash(pre_tanh), self._score(noise, pre_tanh)

    def log_prob(self, value: Tensor) -> Tensor:
        """Scores actions that :meth:`rsample_and_log_prob` did not draw in the same call.

        ``tanh`` is inverted, so an action on a bound is scored as the nearest number inside it.

        Args:
            value (Tensor): actions, shape ``[..., A]``.

        Returns:
            Tensor: log-densities, shape ``[...]``.
        """
        if not self._unit:
            value = (value - 0.5 * (self.high + self.low)) / self._half_range()
        limit = 1.0 - torch.finfo(value.dtype).eps
        pre_tanh = value.clamp(-limit, limit).atanh()
        return self._score((pre_tanh - self.loc) / self.scale, pre_tanh)

    def _noise(self, sample_shape: Sequence[int]) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        return torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)

    def _pre_tanh(self, noise: Tensor) -> Tensor:
        return torch.addcmul(self.loc, self.scale, noise)

    def _half_range(self) -> float | Tensor:
        return 0.5 * (self.high - self.low)

    def _squash(self, pre_tanh: Tensor) -> Tensor:
        action = pre_tanh.tanh()
        if self._unit:
            return action
        # Rounding of the affine map must not leave the spec by one unit in the last place.
        action = 0.5 * (self.high + self.low) + self._half_range() * action
        return action.clamp(min=self.low).clamp(max=self.high)

    def _score(self, noise: Tensor, pre_tanh: Tensor) -> Tensor:
        log_jacobian = 2.0 * (_LOG_2 - pre_tanh - F.softplus(-2.0 * pre_tanh))
        log_prob = -0.5 * noise.square() - self.scale.log() - _LOG_SQRT_2PI - log_jacobian
        if not self._unit:
            half_range = self._half_range()
            log_prob = log_prob - (half_range.log() if isinstance(half_range, Tensor) else math.log(half_range))
        return log_prob.sum(-1)
