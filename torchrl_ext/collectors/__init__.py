# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Collectors of time-major runs."""

from __future__ import annotations

from torchrl_ext.collectors.episodes import Episode, EpisodeTracker
from torchrl_ext.collectors.packed_run_collector import PackedRunCollector
from torchrl_ext.collectors.placement import parse_cores, spread_cores
from torchrl_ext.collectors.policies import UniformPolicy, record_layout
from torchrl_ext.collectors.ring_collector import RingCollector
from torchrl_ext.collectors.run_collector import RunCollector
from torchrl_ext.collectors.transport_choice import TransportChoice, choose_transport

__all__ = [
    "Episode",
    "EpisodeTracker",
    "PackedRunCollector",
    "RingCollector",
    "RunCollector",
    "TransportChoice",
    "UniformPolicy",
    "choose_transport",
    "parse_cores",
    "record_layout",
    "spread_cores",
]
