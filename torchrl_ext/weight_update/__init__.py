# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The newest policy weights for worker processes: whole, in place and without waiting."""

from __future__ import annotations

from torchrl_ext.weight_update.seqlock_scheme import SeqlockWeightSyncScheme
from torchrl_ext.weight_update.weight_layout import WeightLayout, WeightLeaf

__all__ = ["SeqlockWeightSyncScheme", "WeightLayout", "WeightLeaf"]
