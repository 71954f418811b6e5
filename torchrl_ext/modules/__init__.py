# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Networks, the squashed policy distribution and the observation normaliser."""

from __future__ import annotations

from torchrl_ext.modules.action_bounds import action_bounds
from torchrl_ext.modules.factories import make_fast_sac_actor, make_fast_sac_critic, make_fast_sac_policy
from torchrl_ext.modules.fast_sac import C51CriticNet, FastSACActorNet
from torchrl_ext.modules.keyed import KeyedModule
from torchrl_ext.modules.normalizer import EmpiricalNormalization
from torchrl_ext.modules.squashed_normal import SquashedNormal

__all__ = [
    "C51CriticNet",
    "EmpiricalNormalization",
    "FastSACActorNet",
    "KeyedModule",
    "SquashedNormal",
    "action_bounds",
    "make_fast_sac_actor",
    "make_fast_sac_critic",
    "make_fast_sac_policy",
]
