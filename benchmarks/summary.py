# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Writes the README's table of measured figures from the reports, so that no figure is typed by hand.

    python benchmarks/summary.py            # rewrites the block between the two markers
    python benchmarks/summary.py --check    # exit status 1 when the block is not what the reports give

The reports are the JSON lines of ``compare.py`` in ``reports/``, named ``YYYY-MM-DD-*.jsonl``. Where several have the
same case, device and configuration, the newest date wins, and within a date the last line of the last file by name.
Standard library only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "benchmarks" / "reports"
README = ROOT / "README.md"
BEGIN, END = "<!-- bench-summary:begin -->", "<!-- bench-summary:end -->"
DATE = re.compile(r"\d{4}-\d{2}-\d{2}(?=-)")

#: Case, device and configuration.
Key = tuple[str, str, str]

#: The rows of the table: each case at its main size. What is slower than its peer is shown like the rest.
ROWS: tuple[Key, ...] = (
    ("ingest", "cpu", "large"),
    ("ingest", "cuda", "large"),
    ("sample", "cpu", "large"),
    ("sample", "cuda", "large"),
    ("sample_nstep", "cpu", "large"),
    ("routed_extend", "cpu", "64 streams, in order"),
    ("ensemble_sample", "cpu", "64 streams"),
    ("ensemble_sample", "cuda", "64 streams"),
    ("write_back", "cpu", "2048 rows, 32 MiB, cpu storage"),
    ("write_back", "cuda", "2048 rows, 32 MiB, cuda storage"),
    ("dreamer_replay_path", "cpu", "pixel, 64 streams, 32x64"),
    ("dreamer_replay_path", "cuda", "pixel, 64 streams, 32x64"),
    ("prioritized", "cpu", "1048576 rows"),
    ("ring_host_drain", "cpu", "large"),
    ("ring_ipc_drain", "cuda", "large"),
    ("ring_push", "cpu", "large"),
    ("weight_sync", "cpu", "1 MB actor, busy publisher"),
    ("weight_sync", "cuda", "108 MB actor"),
    ("fast_sac_update", "cuda", "large"),
    ("collector_rate", "cpu", "HalfCheetah-v4, 64 streams"),
)


class SummaryError(RuntimeError):
    """The table cannot be made or placed; the message is one sentence."""


@dataclass(frozen=True)
class Measured:
    """One line of a report and where it stands."""

    record: Mapping[str, Any]
    date: str
    report: Path


def newest(reports: Path) -> dict[Key, Measured]:
    """Reads all reports of a folder; returns the line that counts for each case, device and configuration.

    Raises:
        SummaryError: if a file name has no date or a line is not a record of ``compare.py``.
    """
    found: dict[Key, Measured] = {}
    dated = []
    for path in sorted(reports.glob("*.jsonl")):
        if (named := DATE.match(path.name)) is None:
            raise SummaryError(f"{path.name} must be named YYYY-MM-DD-*.jsonl.")
        dated.append((named.group(), path))
    for date, path in sorted(dated, key=lambda pair: pair[0]):  # stable: by name within a date
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                key = (record["case"], record["device"], record["config"])
                complete = {"ours_ms", "peer", "peer_ms", "ratio_peer", "ratio_limit"} <= set(record)
                complete &= all(isinstance(part, str) for part in key) and isinstance(record["extra"], dict)
            except (ValueError, KeyError, TypeError):
                complete = False
            if not complete:
                raise SummaryError(f"{path.name}, line {number} is no record of compare.py.")
            found[key] = Measured(record, date, path)
    return found


def table(measured: Mapping[Key, Measured], rows: Sequence[Key] = ROWS) -> str:
    """Returns the Markdown between the markers, which ends with a newline.

    Raises:
        SummaryError: if a row is in no report.
    """
    lines = [
        "| case | size | device | ours | peer (ours is so many times faster) | times the hardware limit | measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for key in rows:
        if key not in measured:
            raise SummaryError(f"no report has {' / '.join(key)}; correct ROWS in summary.py or measure it.")
        lines.append(f"| {' | '.join(_cells(measured[key]))} |")
    return "\n".join(lines) + "\n"


def replace_block(readme: str, block: str) -> str:
    """Returns the text with what is between the markers replaced.

    Raises:
        SummaryError: if the markers are not there once each, in order.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise SummaryError(f"the README must have {BEGIN} and behind it {END}, once each.")
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{block}{END}{rest.split(END)[1]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes or checks the block; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write the README's table of measured figures from the reports.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the block is out of date")
    parser.add_argument("--reports", type=Path, default=REPORTS, help="default: benchmarks/reports")
    parser.add_argument("--readme", type=Path, default=README, help="default: README.md")
    args = parser.parse_args(argv)
    try:
        old = args.readme.read_text(encoding="utf-8")
        new = replace_block(old, table(newest(args.reports)))
    except (OSError, SummaryError) as error:
        return _fail(str(error), 2)
    if args.check:
        return 0 if new == old else _fail("the README's table is not what the reports give; run make bench-summary.", 1)
    if new != old:
        args.readme.write_text(new, encoding="utf-8")
    return 0


def _cells(measured: Measured) -> list[str]:
    record = measured.record
    hardware = record["extra"].get("hardware", record["device"])
    device = hardware if record["device"] == "cuda" else f"CPU, {hardware}"
    limit = record["ratio_limit"]
    return [
        f"`{record['case']}`",
        record["config"],
        device,
        _time(record["ours_ms"]),
        _peer(record),
        "-" if limit is None else _digits(limit),
        f"[{measured.date}]({_page(measured.report)})",
    ]


def _peer(record: Mapping[str, Any]) -> str:
    if record["ratio_peer"] is None:
        return "not measurable" if record["extra"].get("peer_missing") else "-"
    return f"{record['peer'].split()[0]} {_time(record['peer_ms'])} (**{_digits(record['ratio_peer'])}**)"


def _time(ms: float | None) -> str:
    if ms is None:
        return "-"
    return f"{_digits(ms / 1e3)} s" if ms >= 1e3 else f"{_digits(ms)} ms"


def _digits(value: float) -> str:
    """Three significant digits."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def _page(report: Path) -> str:
    """The Markdown report that explains a file of lines, else the file: the one whose name begins the file's."""
    pages = [page for page in report.parent.glob("*.md") if f"{report.stem}-".startswith(f"{page.stem}-")]
    page = max(pages, key=lambda path: len(path.stem), default=report)
    return f"benchmarks/reports/{page.name}"


def _fail(message: str, status: int) -> int:
    sys.stderr.write(f"summary.py: {message}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
