# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Bars of seconds are those of contracts, which hold where a core is free; on a machine in use they are longer."""

from __future__ import annotations

import os
from pathlib import Path


def slowness() -> float:
    """How many times longer than with a core to itself a process may take, 1 on a free machine.

    By those who want a core now as well: the mean of the last minute follows a burst of work late.
    """
    mean, *_, tasks, _ = Path("/proc/loadavg").read_text().split()
    return max(1.0, max(float(mean), int(tasks.split("/")[0])) / len(os.sched_getaffinity(0)))
