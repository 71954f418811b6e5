# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Base against head: the order of the runs, the interval of a ratio, and the verdict."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # torchrl's wheel installs a package ``benchmarks`` too

from benchmarks.revision_report import compare_samples, exit_status, render
from benchmarks.revision_statistics import Ratio, ratio_of_medians, run_order, verdict


def runs(
    seed: int, *, scale: float = 1.0, count: int = 4, rounds: int = 31, between: float = 0.01
) -> list[list[float]]:
    """Times around ``scale`` ms: each run has a level of its own, and rounds vary by 5 % around it."""
    rng = np.random.default_rng(seed)
    levels = scale * (1.0 + between * rng.standard_normal((count, 1)))
    return (1e-3 * levels * (1.0 + 0.05 * rng.standard_normal((count, rounds)))).tolist()


class TestOrder:
    """Contract: pairs of neighbours, mirrored in turns, so that a steady drift falls on both sides alike."""

    def test_it_is_a_b_b_a(self):
        assert run_order(1) == ["base", "head"]
        assert run_order(3) == ["base", "head", "head", "base", "base", "head"]

    def test_an_even_number_of_pairs_gives_both_the_same_mean_place(self):
        order = run_order(4)
        places = [[i for i, side in enumerate(order) if side == name] for name in ("base", "head")]
        assert sum(places[0]) == sum(places[1])

    def test_no_pairs_are_refused(self):
        with pytest.raises(ValueError, match="at least 1, got 0"):
            run_order(0)


class TestRatio:
    """Contract: head over base by medians; the interval holds the truth as often as it should, counts whole runs as
    units, and is the same for the same data."""

    def test_the_value_is_the_ratio_of_the_medians_of_all_rounds(self):
        ratio = ratio_of_medians([[1.0, 2.0], [9.0]], [[3.0], [5.0, 100.0]])
        assert ratio.value == 5.0 / 2.0

    def test_constant_times_give_an_interval_without_width(self):
        assert ratio_of_medians([[2.0] * 3] * 2, [[3.0] * 5] * 2) == Ratio(1.5, 1.5, 1.5)

    def test_the_same_data_gives_the_same_interval(self):
        assert ratio_of_medians(runs(0), runs(1)) == ratio_of_medians(runs(0), runs(1))

    def test_scaling_head_scales_all_three(self):
        base, head = runs(0), runs(1)
        one, three = (ratio_of_medians(base, (factor * np.array(head)).tolist()) for factor in (1.0, 3.0))
        assert (three.value, three.low, three.high) == pytest.approx((3 * one.value, 3 * one.low, 3 * one.high))

    def test_equal_sides_are_inside_the_interval(self):
        hits = 0
        for seed in range(100):
            ratio = ratio_of_medians(runs(2 * seed), runs(2 * seed + 1), resamples=200)
            hits += ratio.low <= 1.0 <= ratio.high
        assert hits >= 75  # 95 in theory; four pairs make a percentile bootstrap too narrow

    def test_runs_that_differ_widen_the_interval(self):
        widths = []
        for between in (0.0, 0.1):
            ratio = ratio_of_medians(runs(3, between=between), runs(4, between=between))
            widths.append(ratio.high - ratio.low)
        assert widths[1] > 3 * widths[0]

    def test_an_outlier_among_rounds_moves_little(self):
        head = [[*run[:-1], 50.0] for run in runs(1)]
        assert ratio_of_medians(runs(0), head).value == pytest.approx(1.0, abs=0.05)

    @pytest.mark.parametrize(
        ("base", "head", "message"),
        [
            ([[1.0]], [[1.0], [1.0]], "as many runs, got 1 and 2"),
            ([], [], "as many runs, got 0 and 0"),
            ([[1.0]], [[]], "times above 0"),
            ([[1.0, 0.0]], [[1.0]], "times above 0"),
            ([[float("nan")]], [[1.0]], "times above 0"),
        ],
    )
    def test_nonsense_is_refused(self, base, head, message):
        with pytest.raises(ValueError, match=message):
            ratio_of_medians(base, head)


class TestVerdict:
    """Contract: slower and faster only when the whole interval is past the threshold."""

    @pytest.mark.parametrize(
        ("low", "high", "expected"),
        [
            (1.06, 1.20, "slower"),
            (1.05, 1.20, "unclear"),
            (0.99, 1.20, "unclear"),
            (0.97, 1.04, "same"),
            (0.70, 0.94, "faster"),
            (0.70, 0.96, "unclear"),
            (0.50, 2.00, "unclear"),
        ],
    )
    def test_at_five_per_cent(self, low, high, expected):
        assert verdict(Ratio((low + high) / 2, low, high), threshold=0.05) == expected

    def test_ten_per_cent_slower_is_found_and_one_per_cent_is_not(self):
        found = [verdict(ratio_of_medians(runs(s), runs(s + 50, scale=1.1, between=0.005))) for s in range(10)]
        missed = [verdict(ratio_of_medians(runs(s), runs(s + 50, scale=1.01, between=0.005))) for s in range(10)]
        assert found.count("slower") >= 8
        assert "slower" not in missed


class TestReport:
    """Contract: one line for each benchmark that any run measured; what one side lacks is said, never dropped."""

    def test_lines_and_counts(self):
        base = [{"benchmarks/test_a.py::slow": [1.0] * 3, "benchmarks/test_a.py::gone": [1.0]} for _ in range(2)]
        head = [{"benchmarks/test_a.py::slow": [2.0] * 3, "benchmarks/test_a.py::new": [1.0]} for _ in range(2)]
        lines = compare_samples(base, head, threshold=5.0)
        assert [(line.name.split("::")[1], line.verdict) for line in lines] == [
            ("gone", "not measured in head"),
            ("new", "not measured in base"),
            ("slow", "slower"),
        ]
        text = render(lines, "Title.", threshold=5.0)
        assert "| `test_a.py::slow` | 1000 | 2000 | 2.000 | 2.000 to 2.000 | **slower** |" in text
        assert "| `test_a.py::gone` | 1000 | - | - | - | **not measured in head** |" in text
        assert text.endswith(
            "1 slower, 0 faster, 0 same, 0 unclear, 2 on one side only. Slower: the whole interval is above 1.05.\n"
        )

    def test_a_benchmark_that_some_runs_of_head_lack_is_not_compared(self):
        (line,) = compare_samples([{"a": [1.0]}, {"a": [1.0]}], [{"a": [1.0]}, {}], threshold=5.0)
        assert (line.ratio, line.verdict) == (None, "not measured in head")

    def test_where_nothing_was_compared_the_status_does_not_say_that_head_is_as_fast(self):
        """With one benchmark that base measures now and then there is not one ratio."""
        now_and_then = compare_samples([{"a": [1.0]}, {}], [{"a": [1.0]}, {"a": [1.0]}], threshold=5.0)
        assert (now_and_then[0].verdict, exit_status(now_and_then)) == ("not measured in base", 2)
        same = [{"b": [1.0] * 9}] * 2
        assert exit_status([*now_and_then, *compare_samples(same, same, threshold=5.0)]) == 0
        gone = compare_samples([{"c": [1.0]}], [{}], threshold=5.0)
        assert exit_status([*now_and_then, *gone]) == 1
