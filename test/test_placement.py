# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Core sets: how they are read and shared out."""

from __future__ import annotations

import logging
import os

import pytest
from torchrl._utils import logger as torchrl_logger

from torchrl_ext.collectors.placement import parse_cores, spread_cores


class TestParseCores:
    """Contract: inclusive ranges and numbers; what is not available is dropped and logged once; nonsense is refused."""

    @pytest.mark.parametrize(
        ("spec", "cores"),
        [
            ("0:5,7", {0, 1, 2, 3, 4, 5, 7}),
            ("3", {3}),
            ("2:2", {2}),
            (" 1 , 0:1 ", {0, 1}),
        ],
    )
    def test_ranges_include_both_ends(self, spec, cores):
        """case 42"""
        assert parse_cores(spec, available=range(8)) == cores

    def test_none_is_left_untouched(self):
        """case 42"""
        assert parse_cores(None) is None

    @pytest.mark.parametrize("spec", ["6:9", "6:999999999999", "6,7,99"])
    def test_cores_out_of_range_are_dropped_with_one_line(self, spec, monkeypatch):
        """case 42"""
        lines: list[logging.LogRecord] = []
        monkeypatch.setattr(torchrl_logger, "warning", lambda *parts: lines.append(parts[0] % parts[1:]))
        assert parse_cores(spec, available=range(8)) == {6, 7}
        assert lines == [f"parse_cores: of '{spec}' only the cores [6, 7] are available."]

    def test_available_are_those_of_this_process_by_default(self):
        assert parse_cores("0:100000") == os.sched_getaffinity(0)

    @pytest.mark.parametrize("spec", ["", "a", "3:1", "-1", "1:", ":1", "1,,2", "0:4:2", "1.5", "\u0661"])
    def test_what_cannot_be_read_is_refused(self, spec):
        with pytest.raises(ValueError, match="parse_cores: spec must be cores and ascending ranges"):
            parse_cores(spec, available=range(8))

    def test_no_core_left_is_refused(self):
        with pytest.raises(ValueError, match=r"must name one of the cores \[0, 1\] at least, got '5:6'"):
            parse_cores("5:6", available=range(2))


class TestSpreadCores:
    """Contract: blocks that do not overlap and leave nothing out; one core each where there are fewer than workers."""

    @pytest.mark.parametrize("workers", [1, 2, 3, 7])
    def test_blocks_are_disjoint_complete_and_even(self, workers):
        cores = {0, 2, 4, 5, 6, 9, 11}
        blocks = spread_cores(cores, workers)
        sizes = [len(block) for block in blocks]
        assert set().union(*blocks) == cores and sum(sizes) == len(cores) and max(sizes) - min(sizes) <= 1

    def test_fewer_cores_than_workers_are_shared_evenly(self):
        assert spread_cores({4, 7}, 4) == [{4}, {7}, {4}, {7}]

    def test_none_leaves_every_worker_untouched(self):
        assert spread_cores(None, 3) == [None] * 3

    @pytest.mark.parametrize(("cores", "workers"), [([], 1), ([1], 0), (None, 0)])
    def test_no_core_or_no_worker_is_refused(self, cores, workers):
        with pytest.raises(ValueError, match="spread_cores: num_workers must be at least 1 and cores not empty"):
            spread_cores(cores, workers)
