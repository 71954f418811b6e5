# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Draws the evaluations of several training runs, ours and peers', in one figure.

Example:
    ``python benchmarks/draw_runs.py ours=outputs/fast_sac/go1/RUN MotrixLab=FOLDER --out curves.png``
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path


def draw(runs: Sequence[str], path: Path) -> None:
    """Draws the evaluations of runs, each ``LABEL=FOLDER`` with a ``metrics.jsonl``, over minutes and over frames."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    for color, run in enumerate(runs):
        label, _, folder = run.partition("=")
        seconds, points = 0.0, []
        for line in (Path(folder) / "metrics.jsonl").read_text(encoding="ascii").splitlines():
            values = json.loads(line)
            # Our script writes an evaluation right after the line that tells the time.
            seconds = values.get("seconds", seconds)
            if "eval/return" in values:
                points.append((seconds / 60.0, values["frames"], values["eval/return"]))
        for axis, column in zip(axes, (0, 1), strict=True):
            axis.plot([p[column] for p in points], [p[2] for p in points], "o-", color=f"C{color}", label=label, ms=3)
    for axis, name in zip(axes, ("minutes of training", "frames"), strict=True):
        axis.set_xlabel(name)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean return of evaluations")
    axes[0].legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="LABEL=FOLDER", help="folders with a metrics.jsonl")
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    options = parser.parse_args()
    for run in options.runs:
        if not (Path(run.partition("=")[2]) / "metrics.jsonl").is_file():
            parser.error(f"each run must be LABEL=FOLDER with a metrics.jsonl in the folder, got {run!r}.")
    draw(options.runs, options.out)


if __name__ == "__main__":
    main()
