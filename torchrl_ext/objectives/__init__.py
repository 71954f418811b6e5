# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Losses."""

from __future__ import annotations

from torchrl_ext.objectives.fast_sac import FastSACLoss

__all__ = ["FastSACLoss"]
