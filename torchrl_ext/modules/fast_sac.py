# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The networks of FastSAC (arXiv 2512.01996): a squashed-normal actor and one module for all C51 critics.

Both are pyramids of ``Linear - LayerNorm - SiLU`` with widths ``h, h/2, h/4``. They read several
observation tensors (concatenated), so actor and critics may see different things.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _widths(where: str, hidden_size: int) -> tuple[int, int, int]:
    if hidden_size < 4 or hidden_size % 4:
        raise ValueError(f"{where}: hidden_size must be a positive multiple of 4, got {hidden_size}.")
    return hidden_size, hidden_size // 2, hidden_size // 4


def _at_least_float32(tensor: Tensor) -> Tensor:
    # Under bf16 autocast a head returns bf16, too coarse for log-probabilities and logits.
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _padded(tensors: tuple[Tensor, ...], pad: int) -> Tensor:
    if pad:
        tensors = (*tensors, tensors[-1].new_zeros(*tensors[-1].shape[:-1], pad))
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)


class FastSACActorNet(nn.Module):
    r"""Maps observations to the parameters of a :class:`~torchrl_ext.modules.SquashedNormal`.

    ``log_std = log_std_min + (log_std_max - log_std_min) * (tanh(y) + 1) / 2``, hence always inside its
    range. Both heads start with zero weights: the first policy is ``tanh(Normal(0, init_std))`` in every
    state, independent of the scale of the observations.

    Args:
        observation_dim (int): features of all observations together.
        action_dim (int): ``A``, the length of an action vector.

    Keyword Args:
        hidden_size (int): width of the first layer, a multiple of 4. Defaults to ``512``.
        log_std_min (float): smallest log standard deviation of the pre-tanh normal. Defaults to ``-5.0``.
        log_std_max (float): largest log standard deviation. Defaults to ``0.0``.
        init_std (float, optional): standard deviation before training, strictly inside the range. Defaults
            to ``None``: the middle of the range in log space (0.082 with the defaults).
        device (torch.device, optional): where the parameters are made. Defaults to torch's default.
        dtype (torch.dtype, optional): dtype of the parameters. Defaults to torch's default.

    Raises:
        ValueError: if ``hidden_size`` is not a multiple of 4, ``log_std_min`` is above ``log_std_max`` or
            ``init_std`` is outside the range.

    Examples:
        >>> import torch
        >>> net = FastSACActorNet(5, 2, hidden_size=32, init_std=0.5)
        >>> loc, scale = net(torch.randn(7, 5))
        >>> loc.shape, round(float(scale[0, 0]), 3)
        (torch.Size([7, 2]), 0.5)
    """

    def __init__(
        self,
        observation_dim: int,
        action_dim: int,
        *,
        hidden_size: int = 512,
        log_std_min: float = -5.0,
        log_std_max: float = 0.0,
        init_std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not log_std_min <= log_std_max:
            raise ValueError(
                f"FastSACActorNet: log_std_min must not be above log_std_max, got [{log_std_min}, {log_std_max}]."
            )
        kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        layers: list[nn.Module] = []
        width = observation_dim
        for next_width in _widths("FastSACActorNet", hidden_size):
            layers += [nn.Linear(width, next_width, **kwargs), nn.LayerNorm(next_width, **kwargs), nn.SiLU()]
            width = next_width
        self.trunk = nn.Sequential(*layers)
        self.head = nn.Linear(width, 2 * action_dim, **kwargs)  # loc and log_std in one product
        self.log_std_min = log_std_min
        self.log_std_max = log_std_max
        self.action_dim, self.pad = action_dim, 0
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        if init_std is not None:
            lowest, highest = math.exp(log_std_min), math.exp(log_std_max)
            if not lowest < init_std < highest:
                raise ValueError(
                    f"FastSACActorNet: init_std must be strictly between exp(log_std_min) = {lowest:.3g} and "
                    f"exp(log_std_max) = {highest:.3g}, got {init_std}."
                )
            level = 2 * (math.log(init_std) - log_std_min) / (log_std_max - log_std_min) - 1
            nn.init.constant_(self.head.bias[action_dim:], math.atanh(level))

    def forward(self, *observations: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``loc`` and ``scale`` (a standard deviation), each ``[..., A]`` and at least float32."""
        out = _at_least_float32(self.head(self.trunk(_padded(observations, self.pad))))
        loc, log_std = out[..., : 2 * self.action_dim].chunk(2, -1)
        log_std = self.log_std_min + 0.5 * (self.log_std_max - self.log_std_min) * (log_std.tanh() + 1)
        return loc, log_std.exp()


class BatchedLinear(nn.Module):
    """``num`` linear layers in one batched product: ``[num, B, in] -> [num, B, out]``.

    Initialised like ``num`` separate :class:`~torch.nn.Linear`. The last ``pad`` inputs are a zero padding
    of the caller's: their rows start at zero and get zero gradients for ever.
    """

    bias_apart = False
    """Adds the bias to the product, which a compiler fuses with what follows, instead of starting from it."""

    def __init__(self, num: int, in_features: int, out_features: int, *, pad: int = 0, **kwargs: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, in_features + pad, out_features, **kwargs))
        self.bias = nn.Parameter(torch.empty(num, 1, out_features, **kwargs))
        bound = 1 / math.sqrt(in_features)
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)[:, in_features:].zero_()
            self.bias.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Applies layer ``i`` to ``x[i]``."""
        return torch.bmm(x, self.weight) + self.bias if self.bias_apart else torch.baddbmm(self.bias, x, self.weight)


class BatchedLayerNorm(nn.Module):
    """``num`` layer norms over the last dimension, each with its own affine: ``[num, B, D] -> [num, B, D]``."""

    def __init__(self, num: int, features: int, **kwargs: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num, 1, features, **kwargs))
        self.bias = nn.Parameter(torch.zeros(num, 1, features, **kwargs))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises each row of ``x[i]`` with affine ``i``."""
        return torch.addcmul(self.bias, F.layer_norm(x, x.shape[-1:]), self.weight)


class C51CriticNet(nn.Module):
    """``num_critics`` categorical Q networks as one module of batched layers.

    Each returns logits over ``num_atoms`` returns, evenly spaced on ``[v_min, v_max]`` (C51, arXiv
    1707.06887). One batched product per layer costs one kernel launch for all critics.

    Args:
        observation_dim (int): features of all observations together.
        action_dim (int): ``A``, the length of an action vector.

    Keyword Args:
        num_critics (int): ``Q``, at least 1. Defaults to ``2``.
        hidden_size (int): width of the first layer, a multiple of 4. Defaults to ``768``.
        num_atoms (int): atoms of the return distribution, at least 2. Defaults to ``101``.
        v_min (float): smallest return that can be represented. Defaults to ``-20.0``.
        v_max (float): largest return that can be represented. Defaults to ``20.0``.
        pad_to (int): the input is padded with zeros to a multiple of this; 8 keeps bf16 tensor cores
            aligned on a GPU (and changes the shape of the first weight), 1 pads nothing. Defaults to ``1``.
        device (torch.device, optional): where the parameters are made. Defaults to torch's default.
        dtype (torch.dtype, optional): dtype of the parameters. Defaults to torch's default.

    Raises:
        ValueError: if a count is too small, ``hidden_size`` no multiple of 4, or ``v_min >= v_max``.

    Examples:
        >>> import torch
        >>> net = C51CriticNet(5, 2, hidden_size=32, pad_to=8)
        >>> net(torch.randn(7, 5), torch.randn(7, 2)).shape
        torch.Size([7, 2, 101])
    """

    def __init__(
        self,
        observation_dim: int,
        action_dim: int,
        *,
        num_critics: int = 2,
        hidden_size: int = 768,
        num_atoms: int = 101,
        v_min: float = -20.0,
        v_max: float = 20.0,
        pad_to: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (("num_critics", num_critics, 1), ("num_atoms", num_atoms, 2), ("pad_to", pad_to, 1)):
            if value < least:
                raise ValueError(f"C51CriticNet: {name} must be at least {least}, got {value}.")
        if not v_min < v_max:
            raise ValueError(f"C51CriticNet: v_min must be below v_max, got [{v_min}, {v_max}].")
        kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_critics, self.num_atoms, self.v_min, self.v_max = num_critics, num_atoms, v_min, v_max
        width = observation_dim + action_dim
        self.pad = -width % pad_to
        layers: list[nn.Module] = []
        for index, next_width in enumerate(_widths("C51CriticNet", hidden_size)):
            pad = 0 if index else self.pad
            layers.append(BatchedLinear(num_critics, width, next_width, pad=pad, **kwargs))
            layers += [BatchedLayerNorm(num_critics, next_width, **kwargs), nn.SiLU()]
            width = next_width
        self.layers = nn.Sequential(*layers, BatchedLinear(num_critics, width, num_atoms, **kwargs))

    @property
    def support(self) -> Tensor:
        """The atoms, shape ``[num_atoms]``, on the CPU: no buffer, so it is in no state and has no target copy."""
        return torch.linspace(self.v_min, self.v_max, self.num_atoms)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Scores observations and the action, given in this order, each ``[*batch, features]``.

        Returns:
            Tensor: logits ``[*batch, Q, num_atoms]``, at least float32: a view of a ``[Q, ...]`` tensor, so
            that ``movedim(-2, 0)`` costs nothing.
        """
        x = _padded(inputs, self.pad)
        batch = x.shape[:-1]
        first = cast(BatchedLinear, self.layers[0])
        if first.bias_apart:
            x = x.to(first.weight.dtype)  # once, before it is expanded to all critics
        logits = self.layers(x.reshape(-1, x.shape[-1]).expand(self.num_critics, -1, -1))
        logits = _at_least_float32(logits).view(self.num_critics, *batch, logits.shape[-1])
        return logits[..., : self.num_atoms].movedim(0, -2)
