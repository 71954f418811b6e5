# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Rings and weights between a worker and a learner; beside MotrixLab."""

from __future__ import annotations

import pytest

from benchmarks.suites import CANDIDATES, Workload

FULL = ("full",)
CPU, CUDA = ("cpu",), ("cuda",)

WORKLOADS = (
    Workload("ring_host_drain", "small"),
    Workload("ring_host_drain", "small, 4 collectors", devices=CPU),
    Workload("ring_host_drain", "large", size="large", suites=FULL),
    Workload("ring_host_drain", "large, 4 collectors", size="large", suites=FULL, devices=CPU),
    Workload("ring_ipc_drain", "small", devices=CUDA),
    Workload("ring_ipc_drain", "small, no ends", devices=CUDA),
    Workload("ring_ipc_drain", "large", size="large", suites=FULL, devices=CUDA),
    Workload("ring_ipc_drain", "large, no ends", size="large", suites=FULL, devices=CUDA),
    Workload("ring_ipc_drain", "medium", size=None, suites=FULL, devices=CUDA),
    Workload("ring_ipc_drain", "medium, no ends", size=None, suites=FULL, devices=CUDA),
    Workload("ring_push", "small", devices=CPU),
    Workload("ring_push", "large", size="large", suites=FULL, devices=CPU),
    Workload("ring_push", "small, cpu fields", devices=CUDA),
    Workload("ring_push", "small, cuda fields", devices=CUDA),
    Workload("ring_push", "large, cpu fields", size="large", suites=FULL, devices=CUDA),
    Workload("ring_push", "large, cuda fields", size="large", suites=FULL, devices=CUDA),
    Workload("weight_sync", "1 MB actor", size=None),
    Workload("weight_sync", "1 MB actor, busy publisher", size=None, suites=FULL, devices=CPU),
    Workload("weight_sync", "108 MB actor", size=None, suites=FULL, devices=CUDA),
)


@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_rings(compare, workload, candidate):
    """One drain, push or snapshot."""
    compare(workload, candidate)
