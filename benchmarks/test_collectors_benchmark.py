# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Rows of a collector in a replay; beside TorchRL. A call takes seconds, so only the full suite has them."""

from __future__ import annotations

import pytest

from benchmarks.suites import CANDIDATES, Workload

TASKS = ("HalfCheetah-v4, 64 streams", "HalfCheetah-v4, 16 streams", "Pendulum-v1, 64 streams")
WORKLOADS = tuple(
    Workload("collector_rate", task, size=None, suites=("full",), devices=("cpu",), rounds=3) for task in TASKS
)


@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_collectors(compare, workload, candidate):
    """As many rows as a bare loop makes in ``COLLECTOR_SECONDS``."""
    pytest.importorskip("envpool", reason="EnvPool comes with the extra 'sota' and needs Python 3.11 or newer.")
    compare(workload, candidate)
