# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The report of ``compare_revisions.py``: one line for each benchmark, Markdown, and what it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.revision_statistics import Ratio, ratio_of_medians, verdict

#: Times of each round, by benchmark.
Samples = dict[str, list[float]]

_FAILURES = ("slower", "not measured in head")


@dataclass(frozen=True)
class Line:
    """One benchmark of the report; ``ratio`` is ``None`` where only one side measured it."""

    name: str
    base_ms: float | None
    head_ms: float | None
    ratio: Ratio | None
    verdict: str


def compare_samples(base: Sequence[Samples], head: Sequence[Samples], *, threshold: float) -> list[Line]:
    """Returns one line for each benchmark that any run measured, by name.

    Args:
        base (sequence of dict): for each run, seconds of each round by benchmark, in order of time.
        head (sequence of dict): as many.
        threshold (float): per cent.
    """
    lines = []
    for name in sorted({name for run in (*base, *head) for name in run}):
        old, new = ([run[name] for run in runs if run.get(name)] for runs in (base, head))
        ratio, word = None, "not measured in head" if len(old) == len(base) else "not measured in base"
        if len(old) == len(base) and len(new) == len(head):
            ratio = ratio_of_medians(old, new)
            word = verdict(ratio, threshold=threshold / 100)
        lines.append(Line(name, _median_ms(old), _median_ms(new), ratio, word))
    return lines


def render(lines: Sequence[Line], title: str, *, threshold: float) -> str:
    """Returns the report, Markdown that ends with a newline."""
    counts = {word: sum(line.verdict == word for line in lines) for word in ("slower", "faster", "same", "unclear")}
    missing = len(lines) - sum(counts.values())
    rows = [
        f"{title}",
        "",
        "| benchmark | base ms | head ms | head / base | 95 % interval | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for line in lines:
        times = ["-" if ms is None else f"{ms:.4g}" for ms in (line.base_ms, line.head_ms)]
        ratio = ["-", "-"]
        if line.ratio is not None:
            ratio = [f"{line.ratio.value:.3f}", f"{line.ratio.low:.3f} to {line.ratio.high:.3f}"]
        word = f"**{line.verdict}**" if line.verdict in _FAILURES else line.verdict
        name = line.name.removeprefix("benchmarks/").replace("|", "\\|")
        rows.append(f"| `{name}` | {' | '.join([*times, *ratio, word])} |")
    told = ", ".join(f"{count} {word}" for word, count in counts.items())
    rows += ["", f"{told}, {missing} on one side only. Slower: the whole interval is above {1 + threshold / 100:g}."]
    return "\n".join(rows) + "\n"


def exit_status(lines: Sequence[Line]) -> int:
    """Returns 1 when a benchmark is slower in head or no longer runs there, 2 when none was compared, else 0."""
    if any(line.verdict in _FAILURES for line in lines):
        return 1
    return 0 if any(line.ratio is not None for line in lines) else 2


def _median_ms(runs: Sequence[Sequence[float]]) -> float | None:
    values = sorted(value for run in runs for value in run)
    middle = len(values) // 2
    return 500 * (values[middle] + values[-middle - 1]) if values else None
