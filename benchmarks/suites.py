# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Which comparisons the benchmark suites measure, and how pytest-benchmark measures one candidate of them.

A :class:`Workload` names one configuration of a case in ``cases/``, which builds it. The names are written down because
pytest has to know them before anything is built; a case that no longer yields one ends the benchmark with a sentence.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

import torch

from benchmarks import cases
from benchmarks.presets import SIZES
from benchmarks.timing import Candidate, synchronizer

CANDIDATES = ("ours", "peer", "limit")
Suite = Literal["short", "full"]
SUITES: tuple[Suite, ...] = ("short", "full")
WARMUP_ROUNDS = 3
#: Timed calls of a candidate.
ROUNDS = {"short": 31, "full": 101}
VERSIONS = ("torch", "torchrl", "tensordict", "numpy")


@dataclass(frozen=True)
class Workload:
    """One configuration of a case.

    Args:
        case (str): name in ``benchmarks.cases.CASES``.
        config (str): ``Comparison.config``, as the case yields it.
        size (str, optional): name of the preset that the case is given; ``None`` where its sizes are its own.
        suites (tuple of str): the suites that measure it.
        devices (tuple of str): the devices it exists on.
        rounds (int, optional): timed calls, where those of the suite would take minutes.
    """

    case: str
    config: str
    size: str | None = "small"
    suites: tuple[Suite, ...] = SUITES
    devices: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
    rounds: int | None = None

    def __str__(self) -> str:
        # Part of a test's id, by which two revisions are compared: no characters that a shell or pytest -k would read.
        words = "".join(c if c.isalnum() or c in "._" else " " for c in self.config).split()
        return "-".join([self.case, *words])


class Comparisons:
    """Builds comparisons on demand, one alive at a time.

    A case is a generator whose comparisons live until the next one is asked for, so benchmarks that take a case's
    workloads in its order build each of them once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._source: tuple[str, str | None] | None = None
        self._generator: Iterator[cases.Comparison] | None = None
        self._current: cases.Comparison | None = None

    def get(self, workload: Workload) -> cases.Comparison:
        """Returns the comparison of a workload.

        Raises:
            LookupError: if the case yields no such configuration; the message lists those that it yields.
        """
        source = (workload.case, workload.size)
        started = self._source == source
        if started and self._current is not None and self._current.config == workload.config:
            return self._current
        if not started:
            self._start(*source)
        passed = self._advance(workload.config)
        if self._current is None and started:  # it came earlier
            self._start(*source)
            passed = self._advance(workload.config)
        if self._current is None:
            self.close()
            raise LookupError(
                f"benchmarks: case {workload.case!r} yields no configuration {workload.config!r} on "
                f"{self._device.type}; it yields {', '.join(map(repr, passed)) or 'none'}."
            )
        return self._current

    def _start(self, case: str, size: str | None) -> None:
        self.close()
        sizes = [] if size is None else [SIZES[size]]
        self._source, self._generator = (case, size), iter(cases.load(case)(self._device, sizes))

    def _advance(self, config: str) -> list[str]:
        """Makes the next comparison of this name the current one; returns the names that it passed."""
        passed: list[str] = []
        while self._generator is not None:
            self._current = None  # its storages must be gone before the next ones are made
            self._current = next(self._generator, None)
            if self._current is None or self._current.config == config:
                break
            passed.append(self._current.config)
        return passed

    def close(self) -> None:
        """Ends what the current comparison keeps alive (worker processes, storages)."""
        generator, self._generator, self._current, self._source = self._generator, None, None, None
        if generator is not None:
            generator.close()  # type: ignore[attr-defined]


def why_skipped(comparison: cases.Comparison, name: str) -> str | None:
    """Returns one sentence when a comparison has no candidate of this name, else ``None``."""
    if name == "peer" and comparison.peer is None:
        return comparison.peer_missing or "This case has no peer."
    if name == "limit" and comparison.limit is None:
        return "This case has no limit."
    return None


def measure(benchmark: Any, comparison: cases.Comparison, name: str, *, device: torch.device, rounds: int) -> None:
    """Times one candidate with the ``benchmark`` fixture and describes it in ``benchmark.extra_info``."""
    candidate: Candidate = getattr(comparison, name)
    synchronize = synchronizer(device)

    def prepare() -> tuple[tuple[Any], dict[str, Any]]:
        argument = None if candidate.fresh is None else candidate.fresh()
        synchronize()  # work left over from the call before is not timed
        return (argument,), {}

    def call(argument: Any) -> None:
        # The result is dropped inside the timer: giving an output's memory back is part of its price.
        candidate.run(argument)
        synchronize()  # a CUDA call returns before it is done

    benchmark.pedantic(call, setup=prepare, rounds=rounds, warmup_rounds=min(WARMUP_ROUNDS, rounds), iterations=1)
    names = {"ours": "torchrl_ext", "peer": comparison.peer_name, "limit": comparison.limit_name}
    benchmark.extra_info.update(
        candidate=name,
        what=names[name],
        config=comparison.config,
        bytes=comparison.bytes_moved,
        sizes=dict(comparison.extra),
        device=device.type,
        hardware=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        threads=torch.get_num_threads(),
        versions={package: metadata.version(package) for package in VERSIONS},
    )
