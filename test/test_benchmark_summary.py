# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The README's table of measured figures is what the reports give."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # torchrl's wheel installs a package ``benchmarks`` too

from benchmarks import cases, summary

ROWS = (("ingest", "cpu", "large"),)
TEXT = f"above\n{summary.BEGIN}\nold\n{summary.END}\nbelow\n"


def record(**overrides) -> dict:
    fields = {
        "case": "ingest",
        "device": "cpu",
        "config": "large",
        "ours_ms": 1.5,
        "peer": "motrix 0.4.0 extend",
        "peer_ms": 3.0,
        "limit_ms": 1.25,
        "ratio_peer": 2.0,
        "ratio_limit": 1.2,
        "extra": {"hardware": "x86_64"},
    }
    return {**fields, **overrides}


def write(path: Path, *records: dict) -> None:
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in records))


class TestReadme:
    """Contract: the table in the repository is never typed or out of date."""

    def test_the_table_is_what_the_reports_give(self):
        assert summary.main(["--check"]) == 0, "run make bench-summary"

    def test_it_fits_on_a_screen_and_names_every_case_that_make_bench_measures(self):
        assert 12 <= len(summary.ROWS) <= 20
        named = {case for case, _, _ in summary.ROWS}
        assert named == set(cases.CASES)
        assert {device for _, device, _ in summary.ROWS} == {"cpu", "cuda"}


class TestNewest:
    """Contract: the newest date wins, and within a date the last line."""

    def test_the_newest_date_wins_whatever_the_order_of_names(self, tmp_path):
        write(tmp_path / "2026-11-30-b.jsonl", record(ours_ms=1.0))
        write(tmp_path / "2026-12-01-a.jsonl", record(ours_ms=2.0))
        write(tmp_path / "2025-12-31-z.jsonl", record(ours_ms=3.0))
        (found,) = summary.newest(tmp_path).values()
        assert (found.record["ours_ms"], found.date) == (2.0, "2026-12-01")

    def test_within_a_date_the_last_line_wins(self, tmp_path):
        write(tmp_path / "2026-11-30-a.jsonl", record(ours_ms=1.0), record(ours_ms=2.0))
        assert summary.newest(tmp_path)["ingest", "cpu", "large"].record["ours_ms"] == 2.0
        write(tmp_path / "2026-11-30-b.jsonl", record(ours_ms=3.0))
        assert summary.newest(tmp_path)["ingest", "cpu", "large"].record["ours_ms"] == 3.0

    def test_devices_and_configurations_are_apart(self, tmp_path):
        write(tmp_path / "2026-11-30-a.jsonl", record(), record(device="cuda"), record(config="small"))
        assert len(summary.newest(tmp_path)) == 3

    @pytest.mark.parametrize(
        "line",
        ["{", "[]", '{"case": "ingest"}', json.dumps(record(config=["large"])), json.dumps(record(extra=None))],
    )
    def test_a_line_that_is_no_record_is_named(self, tmp_path, line):
        (tmp_path / "2026-11-30-a.jsonl").write_text(f"{json.dumps(record())}\n{line}\n")
        with pytest.raises(summary.SummaryError, match=r"2026-11-30-a\.jsonl, line 2 is no record"):
            summary.newest(tmp_path)

    def test_a_file_without_a_date_is_named(self, tmp_path):
        write(tmp_path / "ingest.jsonl", record())
        with pytest.raises(summary.SummaryError, match="ingest.jsonl must be named"):
            summary.newest(tmp_path)


class TestTable:
    """Contract: a row says time, peer, limit and where it is from, also where ours loses or nothing was measured."""

    def cells(self, tmp_path: Path, **overrides) -> list[str]:
        write(tmp_path / "2026-11-30-replay-cpu.jsonl", record(**overrides))
        row = summary.table(summary.newest(tmp_path), ((overrides.get("case", "ingest"), "cpu", "large"),))
        return [cell.strip() for cell in row.splitlines()[2].strip("|").split("|")]

    def test_a_row(self, tmp_path):
        (tmp_path / "2026-11-30-replay.md").write_text("")
        assert self.cells(tmp_path) == [
            "`ingest`",
            "large",
            "CPU, x86_64",
            "1.50 ms",
            "motrix 3.00 ms (**2.00**)",
            "1.20",
            "[2026-11-30](benchmarks/reports/2026-11-30-replay.md)",
        ]

    def test_without_a_page_the_lines_are_linked(self, tmp_path):
        assert self.cells(tmp_path)[-1] == "[2026-11-30](benchmarks/reports/2026-11-30-replay-cpu.jsonl)"

    def test_seconds_and_losses(self, tmp_path):
        cells = self.cells(tmp_path, ours_ms=3235.1, peer_ms=1234.5, ratio_peer=0.38159)
        assert cells[3:5] == ["3.24 s", "motrix 1.23 s (**0.382**)"]

    def test_what_was_not_measured(self, tmp_path):
        nothing = {"peer_ms": None, "ratio_peer": None, "ratio_limit": None}
        assert self.cells(tmp_path, **nothing)[4:6] == ["-", "-"]
        missing = {"extra": {"hardware": "x86_64", "peer_missing": "it does not load."}}
        assert self.cells(tmp_path, **nothing, **missing)[4] == "not measurable"

    def test_a_row_that_no_report_has_is_named(self, tmp_path):
        with pytest.raises(summary.SummaryError, match="no report has ingest / cpu / large"):
            summary.table(summary.newest(tmp_path), ROWS)


class TestCommand:
    """Contract: only what is between the markers is written; ``--check`` writes nothing."""

    @pytest.fixture
    def options(self, tmp_path, monkeypatch):
        monkeypatch.setattr(summary.table, "__defaults__", (ROWS,))
        write(tmp_path / "2026-11-30-a.jsonl", record())
        readme = tmp_path / "README.md"
        readme.write_text(TEXT)
        return readme, ["--reports", str(tmp_path), "--readme", str(readme)]

    def test_write_then_check(self, options, capsys):
        readme, arguments = options
        assert summary.main([*arguments, "--check"]) == 1
        assert capsys.readouterr().err == (
            "summary.py: the README's table is not what the reports give; run make bench-summary.\n"
        )
        assert readme.read_text() == TEXT
        assert summary.main(arguments) == 0
        written = readme.read_text()
        assert written.startswith(f"above\n{summary.BEGIN}\n| case |") and written.endswith(f"{summary.END}\nbelow\n")
        assert "old" not in written and "1.50 ms" in written
        assert summary.main([*arguments, "--check"]) == 0
        assert summary.main(arguments) == 0 and readme.read_text() == written

    @pytest.mark.parametrize("text", ["none", summary.BEGIN, f"{summary.END}{summary.BEGIN}", TEXT + TEXT])
    def test_markers_must_be_there_once(self, options, capsys, text):
        readme, arguments = options
        readme.write_text(text)
        assert summary.main(arguments) == 2
        assert "once each" in capsys.readouterr().err and readme.read_text() == text
