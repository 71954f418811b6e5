# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The entropy temperature of soft actor-critic losses: its parameter, its limits, its target."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from tensordict import NestedKey
from torch import Tensor, nn
from torchrl.data import TensorSpec

from torchrl_ext.modules.action_bounds import action_bounds
from torchrl_ext.objectives._batch import BatchLossModule
from torchrl_ext.objectives._rows import alpha_rows


class TemperatureLossModule(BatchLossModule):
    """Base that owns ``log_alpha`` (a parameter, or a buffer when fixed), ``target_entropy`` and the entropy's unit."""

    log_alpha: Any
    target_entropy: Tensor

    def _init_temperature(
        self,
        *,
        alpha_init: float,
        min_alpha: float | None,
        max_alpha: float | None,
        fixed_alpha: bool,
        device: torch.device,
    ) -> None:
        limits = [limit for limit in (min_alpha, alpha_init, max_alpha) if limit is not None]
        if limits != sorted(limits) or limits[0] < 0 or (limits[0] == 0 and not (fixed_alpha and len(limits) == 1)):
            raise ValueError(
                "FastSACLoss: 0 < min_alpha <= alpha_init <= max_alpha must hold (0 only with fixed_alpha=True), got "
                f"{min_alpha}, {alpha_init} and {max_alpha}."
            )
        log_alpha = torch.tensor(float(alpha_init), dtype=torch.float64).log().to(device, torch.get_default_dtype())
        self.fixed_alpha = fixed_alpha
        if fixed_alpha:
            self.register_buffer("log_alpha", log_alpha)
        else:
            self.log_alpha = nn.Parameter(log_alpha)
        low, high = (None if limit is None else math.log(limit) for limit in (min_alpha, max_alpha))
        self._log_alpha_range = None if low is None and high is None else (low, high)

    def _init_entropy(
        self,
        spec: TensorSpec | None,
        *,
        action_key: NestedKey,
        target_entropy: float | Literal["auto"],
        target_entropy_ratio: float,
        device: torch.device,
    ) -> None:
        # log p(action) + log_volume is the log-density of the same draw in the box mapped to [-1, 1].
        self._log_volume = 0.0
        if spec is not None:
            low, high = action_bounds(spec, action_key=action_key)
            self._log_volume = (0.5 * (high - low)).double().log().sum().item()
        if target_entropy == "auto":
            if spec is None:
                raise ValueError(
                    "FastSACLoss: target_entropy='auto' needs action_spec or an actor with a spec, got none."
                )
            target_entropy = -target_entropy_ratio * low.numel()
        self.register_buffer("target_entropy", torch.tensor(float(target_entropy), device=device))

    @property
    def alpha(self) -> Tensor:
        """The temperature inside its limits, 0-d, detached."""
        log_alpha = self.log_alpha.detach()
        return (log_alpha if self._log_alpha_range is None else log_alpha.clamp(*self._log_alpha_range)).exp()

    def alpha_parameters(self) -> list[nn.Parameter]:
        """The log temperature, none when fixed. Its optimizer needs ``weight_decay=0``: decay pulls it to 1."""
        return [] if self.fixed_alpha else [self.log_alpha]

    def limit_alpha(self) -> None:
        """Puts the log temperature back inside its limits, in place."""
        if self._log_alpha_range is not None and not self.fixed_alpha:
            with torch.no_grad():
                # In place: past a limit, a clamp in the graph would stop the gradient for good.
                self.log_alpha.clamp_(*self._log_alpha_range)

    def _alpha_rows(self, log_prob: Tensor) -> Tensor:
        """Returns the temperature loss of each row."""
        if self.fixed_alpha:
            return torch.zeros_like(log_prob)
        self.limit_alpha()
        return alpha_rows(self.log_alpha, log_prob, self.target_entropy)
