# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Options and fixtures of the benchmark suites; ``test_*_benchmark.py`` beside this file are the benchmarks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

# TorchRL reads it when it is imported: its extension is built for one torch release and warns with any other.
os.environ.setdefault("RL_WARNINGS", "0")

import pytest
import torch

from benchmarks.suites import ROUNDS, SUITES, Comparisons, Workload, measure, why_skipped

#: Adapters, cases and scripts hold no tests, and importing all of them for examples would start slowly.
collect_ignore_glob = ["cases/*", "peers/*", "[!t]*.py", "timing.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of the suites."""
    group = parser.getgroup("benchmarks of torchrl_ext")
    group.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (%(default)s)")
    group.addoption("--suite", choices=SUITES, default="short", help="short: small sizes, few rounds (%(default)s)")
    group.addoption("--rounds", type=int, help="timed calls of each candidate, instead of the suite's")
    group.addoption("--threads", type=int, default=1, help="torch threads on the CPU (%(default)s)")


def pytest_configure(config: pytest.Config) -> None:
    """Refuses what could measure nothing."""
    if config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda needs a CUDA build of torch and a visible GPU; this process has none.")
    counts = (config.getoption("--threads"), config.getoption("--rounds"))
    if any(count is not None and count < 1 for count in counts):
        raise pytest.UsageError("--threads and --rounds must be at least 1.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what belongs to the other suite."""
    suite, kept, dropped = config.getoption("--suite"), [], []
    for item in items:
        workload = item.callspec.params.get("workload") if isinstance(item, pytest.Function) else None
        (kept if workload is None or suite in workload.suites else dropped).append(item)
    items[:] = kept
    if dropped:
        config.hook.pytest_deselected(items=dropped)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where to measure."""
    torch.set_num_threads(request.config.getoption("--threads"))
    logging.getLogger("torchrl").setLevel(logging.WARNING)  # a line for each storage of each peer otherwise
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def comparisons(device: torch.device) -> Iterator[Comparisons]:
    """The comparisons of all benchmarks, one alive at a time."""
    comparisons = Comparisons(device)
    yield comparisons
    comparisons.close()


@pytest.fixture
def compare(
    request: pytest.FixtureRequest, benchmark: object, comparisons: Comparisons, device: torch.device
) -> Callable[[Workload, str], None]:
    """Measures one candidate of a workload, in one group with the others; skips with the reason what cannot run."""
    suite, rounds = request.config.getoption("--suite"), request.config.getoption("--rounds")

    def run(workload: Workload, candidate: str) -> None:
        benchmark.group = f"{workload.case}: {workload.config}, {device.type}"
        if device.type not in workload.devices:
            pytest.skip(f"This workload is measured with --device {' or '.join(workload.devices)} only.")
        comparison = comparisons.get(workload)
        if (reason := why_skipped(comparison, candidate)) is not None:
            pytest.skip(reason)
        timed = rounds or workload.rounds or ROUNDS[suite]
        measure(benchmark, comparison, candidate, device=device, rounds=timed)

    return run
