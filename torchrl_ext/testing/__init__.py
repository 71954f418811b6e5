# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Environments whose every field says where it comes from, for tests of whatever carries their data."""

from __future__ import annotations

from torchrl_ext.testing.envs import CountingEnv

__all__ = ["CountingEnv"]
