# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Replay: writing a packed run, sampling transitions and windows; beside MotrixLab and TorchRL."""

from __future__ import annotations

import pytest

from benchmarks.suites import CANDIDATES, Workload

FULL = ("full",)
CUDA = ("cuda",)

WORKLOADS = (
    Workload("ingest", "small"),
    Workload("ingest", "small, no ends", devices=CUDA),
    Workload("ingest", "large", size="large", suites=FULL),
    Workload("ingest", "large, no ends", size="large", suites=FULL, devices=CUDA),
    Workload("sample", "small"),
    Workload("sample", "large", size="large", suites=FULL),
    Workload("sample_nstep", "small"),
    Workload("sample_nstep", "large", size="large", suites=FULL),
    Workload("ensemble_sample", "1 streams", size=None, suites=FULL),
    Workload("ensemble_sample", "64 streams", size=None),
    Workload("ensemble_sample", "256 streams", size=None, suites=FULL),
    Workload("ensemble_sample", "walker", size=None, suites=FULL),
    Workload("ensemble_sample", "pixel", size=None, suites=FULL),
    Workload("prioritized", "4096 rows", size="tiny"),
    Workload("prioritized", "4096 rows, with update", size="tiny"),
    Workload("prioritized", "1048576 rows", suites=FULL),
    Workload("prioritized", "1048576 rows, with update", suites=FULL),
)


@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_replay(compare, workload, candidate):
    """One write or one sample."""
    compare(workload, candidate)
