# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Everything a DreamerV3 run goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.run_state import RunState

__all__ = ["DreamerState"]


@dataclass(kw_only=True)
class DreamerState(RunState):
    """See :class:`common.run_state.RunState`.

    Args:
        num_envs (int): a checkpoint of another number of streams is foreign, also without a replay.
    """

    kind = "torchrl_ext.dreamer_v3/1"
    source_key = "collector"

    num_envs: int

    def check(self, state: Mapping[str, Any]) -> None:
        """See :class:`common.run_state.RunState`."""
        super().check(state)
        streams = state["collector"]["num_streams"]
        if streams != self.num_envs:
            raise ValueError(f"env.num_envs must be {streams} as saved, got {self.num_envs}. Nothing was changed.")
