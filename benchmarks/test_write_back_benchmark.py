# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Many streams: routed writes, results written back, and the replay work of a DreamerV3 update; beside TorchRL."""

from __future__ import annotations

import pytest

from benchmarks.suites import CANDIDATES, Workload

FULL = ("full",)
CPU, CUDA = ("cpu",), ("cuda",)

WORKLOADS = (
    Workload("routed_extend", "64 streams, in order", size=None),
    Workload("routed_extend", "64 streams, shuffled", size=None),
    Workload("routed_extend", "256 streams, in order", size=None, suites=FULL),
    Workload("routed_extend", "256 streams, shuffled", size=None, suites=FULL),
    Workload("write_back", "2048 rows, 32 MiB, cpu storage", size=None, devices=CPU),
    Workload("write_back", "2048 rows, 32 MiB, cuda storage", size=None, devices=CUDA),
    Workload("write_back", "prefetched sample beside an update, eventual", size=None, suites=FULL, devices=CPU),
    Workload("write_back", "prefetched sample beside an update, ordered", size=None, suites=FULL, devices=CPU),
    Workload(
        "write_back", "32 MiB patch behind a busy learner stream, cpu storage", size=None, suites=FULL, devices=CUDA
    ),
    Workload("dreamer_replay_path", "walker, 16 streams, 16x64", size=None),
    Workload("dreamer_replay_path", "pixel, 64 streams, 32x64", size=None, suites=FULL),
)


@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_write_back(compare, workload, candidate):
    """One write of records or of results."""
    compare(workload, candidate)
