# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The learning curve as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw_curve(history: Mapping[str, Sequence[Sequence[float]]], path: Path, *, title: str) -> None:
    """Draws mean returns over frames and over wall-clock time, side by side.

    Args:
        history (Mapping): per series points ``[frames, seconds, mean return]``.
        path (Path): of the PNG.

    Keyword Args:
        title (str): above both plots.
    """
    # The figure's own canvas: pyplot would pick a display and keep state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    styles = {"train": {"alpha": 0.5, "label": "training episodes"}, "eval": {"marker": "o", "label": "evaluation"}}
    axes = figure.subplots(1, 2, sharey=True)
    for axis, column, scale, label in ((axes[0], 0, 1.0, "frames"), (axes[1], 1, 60.0, "minutes of training")):
        for name, style in styles.items():
            points = history.get(name, ())
            if points:
                axis.plot([point[column] / scale for point in points], [point[2] for point in points], **style)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean return")
    if any(history.get(name) for name in styles):
        axes[0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
