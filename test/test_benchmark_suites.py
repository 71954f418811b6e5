# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The pytest-benchmark suites: their workloads, and how one candidate of a comparison is measured."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # torchrl's wheel installs a package named ``benchmarks`` as well

from benchmarks import cases, suites  # noqa: E402 (the path above must be set first)
from benchmarks.suites import Comparisons, Workload, measure, why_skipped  # noqa: E402
from benchmarks.timing import Candidate  # noqa: E402

CPU = torch.device("cpu")
THEMES = ("replay", "write_back", "rings", "collectors")
WORKLOADS = [
    workload for theme in THEMES for workload in importlib.import_module(f"benchmarks.test_{theme}_benchmark").WORKLOADS
]


def comparison(config: str, **overrides) -> cases.Comparison:
    idle = Candidate(lambda _: None)
    fields = {"config": config, "ours": idle, "limit_name": "memcpy", "limit": idle, "peer_name": "peer 1.0"}
    return cases.Comparison(**{**fields, **overrides})


class TestWorkloads:
    """Contract: every case is in the full suite, the short one has small sizes, and no two have one name."""

    def test_names_are_unique(self):
        names = [str(workload) for workload in WORKLOADS]
        assert len(set(names)) == len(names)

    def test_names_need_no_quoting(self):
        assert all(set(str(workload)) <= {*map(chr, range(128))} - set(" ,:[]()|&;'") for workload in WORKLOADS)

    def test_cases_are_those_that_there_are(self):
        full = {workload.case for workload in WORKLOADS if "full" in workload.suites}
        assert full == set(cases.CASES) - {"fast_sac_update"}  # a learner, not a component

    def test_the_short_suite_has_small_sizes_and_no_case_of_seconds(self):
        short = [workload for workload in WORKLOADS if "short" in workload.suites]
        assert {workload.size for workload in short} <= {None, "small", "tiny"}
        assert "collector_rate" not in {workload.case for workload in short}
        assert {workload.case for workload in short if "cpu" in workload.devices} >= {
            "ingest", "sample", "sample_nstep", "ensemble_sample", "prioritized", "routed_extend", "write_back",
            "dreamer_replay_path", "ring_host_drain", "ring_push", "weight_sync",
        }  # fmt: skip

    @pytest.mark.parametrize("case", ["ingest", "sample", "sample_nstep", "ring_host_drain", "ring_push"])
    def test_configurations_are_those_that_a_case_yields(self, case):
        named = [w.config for w in WORKLOADS if (w.case, w.size) == (case, "small") and "cpu" in w.devices]
        sizes = dataclasses.replace(suites.SIZES["tiny"], name="small")  # the same names, sooner
        assert [made.config for made in cases.load(case)(CPU, [sizes])] == named

    def test_the_short_suite_has_the_small_table_of_priorities(self):
        named = [w.config for w in WORKLOADS if (w.case, w.size) == ("prioritized", "tiny")]
        assert [made.config for made in cases.load("prioritized")(CPU, [suites.SIZES["tiny"]])] == named


class TestComparisons:
    """Contract: a case's comparisons are built once when taken in order, again when taken backwards, one at a time."""

    @pytest.fixture
    def built(self, monkeypatch):
        log: list[str] = []

        def case(device: torch.device, sizes: list) -> Iterator[cases.Comparison]:
            try:
                for config in ("a", "b", "c"):
                    log.append(config)
                    yield comparison(config)
            finally:
                log.append("end")

        monkeypatch.setitem(cases.CASES, "fake", f"{__name__}:fake")
        monkeypatch.setattr(sys.modules[__name__], "fake", case, raising=False)
        return log

    def test_in_order_each_is_built_once(self, built):
        comparisons = Comparisons(CPU)
        for config in ("a", "a", "c", "c"):
            assert comparisons.get(Workload("fake", config)).config == config
        assert built == ["a", "b", "c"]
        comparisons.close()
        assert built[-1] == "end"

    def test_backwards_it_is_built_again(self, built):
        comparisons = Comparisons(CPU)
        comparisons.get(Workload("fake", "b"))
        assert comparisons.get(Workload("fake", "a")).config == "a"
        assert built == ["a", "b", "c", "end", "a"]

    def test_the_one_before_is_gone(self, built):
        comparisons = Comparisons(CPU)
        first = weakref.ref(comparisons.get(Workload("fake", "a")))
        comparisons.get(Workload("fake", "b"))
        gc.collect()
        assert first() is None

    def test_a_name_that_the_case_does_not_yield(self, built):
        with pytest.raises(LookupError, match="'fake' yields no configuration 'd' on cpu; it yields 'a', 'b', 'c'"):
            Comparisons(CPU).get(Workload("fake", "d"))
        assert built == ["a", "b", "c", "end"]

    def test_a_missing_peer_is_skipped_with_its_reason(self):
        assert why_skipped(comparison("a", peer_missing="it is not installed."), "peer") == "it is not installed."
        assert why_skipped(comparison("a"), "peer") == "This case has no peer."
        assert why_skipped(comparison("a"), "ours") is None


class FakeBenchmark:
    """What :func:`measure` uses of pytest-benchmark's fixture."""

    def __init__(self) -> None:
        self.extra_info: dict = {}
        self.calls: list[tuple[int, int]] = []

    def pedantic(self, target, *, setup, rounds, warmup_rounds, iterations):
        assert iterations == 1
        self.calls.append((rounds, warmup_rounds))
        for _ in range(rounds + warmup_rounds):
            arguments, keywords = setup()
            assert target(*arguments, **keywords) is None  # an output is given back inside the timer


class TestMeasure:
    """Contract: inputs are made outside the timed call, the synchronisation is inside, and the record says what ran."""

    def test_inputs_and_synchronisation(self, monkeypatch):
        log: list[str] = []
        monkeypatch.setattr(suites, "synchronizer", lambda device: lambda: log.append("synchronise"))
        candidate = Candidate(lambda value: log.append(value) or "output", lambda: log.append("fresh") or "run")
        benchmark = FakeBenchmark()
        measure(benchmark, comparison("a", ours=candidate), "ours", device=CPU, rounds=1)
        assert benchmark.calls == [(1, 1)]
        assert log == ["fresh", "synchronise", "run", "synchronise"] * 2

    def test_the_record(self):
        benchmark = FakeBenchmark()
        made = comparison("a", bytes_moved=64, extra={"streams": 2})
        measure(benchmark, made, "limit", device=CPU, rounds=5)
        info = benchmark.extra_info
        assert benchmark.calls == [(5, suites.WARMUP_ROUNDS)]
        assert (info["candidate"], info["what"], info["bytes"], info["sizes"]) == (
            "limit",
            "memcpy",
            64,
            {"streams": 2},
        )
        assert (info["device"], info["versions"]["torch"]) == ("cpu", torch.__version__)
        assert json.loads(json.dumps(info)) == info


class TestPytest:
    """Contract: the suites run under pytest-benchmark, and `make test` does not collect them."""

    @staticmethod
    def pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
        # A worker of xdist would measure nothing.
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-o", "addopts=-ra", "-p", "no:cacheprovider", *arguments],
            cwd=ROOT,
            env={**env, "RL_WARNINGS": "0"},
            capture_output=True,
            text=True,
            timeout=100,
        )

    def test_one_workload_end_to_end(self, tmp_path):
        pytest.importorskip("pytest_benchmark", reason="pytest-benchmark comes with the extra 'bench'.")
        report = tmp_path / "report.json"
        done = self.pytest(
            "benchmarks/test_rings_benchmark.py", "-k", "1-MB-actor or small-no-ends", f"--benchmark-json={report}"
        )
        assert done.returncode == 0, done.stdout
        assert "This case has no peer." in done.stdout and "measured with --device cuda only" in done.stdout
        ours, limit = json.loads(report.read_text())["benchmarks"]
        assert ours["group"] == limit["group"] == "weight_sync: 1 MB actor, cpu"
        assert len(ours["stats"]["data"]) == suites.ROUNDS["short"]
        assert (ours["extra_info"]["candidate"], limit["extra_info"]["candidate"]) == ("ours", "limit")

    def test_the_tests_do_not_collect_benchmarks(self):
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert 'testpaths = ["test", "torchrl_ext"]' in text
