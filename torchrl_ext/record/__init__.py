# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What a run shows of itself: the machine's load, the time of its stages, and the panel that draws them."""

from __future__ import annotations

from torchrl_ext.record.panel import Panel
from torchrl_ext.record.system_metrics import CpuSample, GpuSample, SystemMetrics, SystemSample
from torchrl_ext.record.tensorboard_layout import custom_scalars_layout
from torchrl_ext.record.timing import StageTimer, StageTotal

__all__ = [
    "CpuSample",
    "GpuSample",
    "Panel",
    "StageTimer",
    "StageTotal",
    "SystemMetrics",
    "SystemSample",
    "custom_scalars_layout",
]
