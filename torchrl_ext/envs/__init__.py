# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Environments."""

from __future__ import annotations

from torchrl_ext.envs._envpool_streams import Finals
from torchrl_ext.envs._rows import BoundRow
from torchrl_ext.envs.envpool import EnvPoolEnv

__all__ = ["BoundRow", "EnvPoolEnv", "Finals"]
