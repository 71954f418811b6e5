# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What is written down: scalars to TorchRL's loggers and to one JSONL file, and the points of the learning curve."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl.record.loggers import get_logger

from torchrl_ext.record import custom_scalars_layout

SERIES = ("train", "eval")


class Records:
    """Writes each line of metrics to all places at once.

    ``metrics.jsonl`` has one object per line (``frames`` and the metrics); ``csv/scalars/`` one file per metric with
    lines ``frames,value``; ``tensorboard/`` the event file. Values must be numbers already: reading them from a device
    is the caller's decision.

    Args:
        folder (Path): of the run.
        backends (sequence of str): among ``"csv"`` and ``"tensorboard"``.
        history (Mapping, optional): the points of a run that goes on, see :attr:`history`.
    """

    history: dict[str, list[list[float]]]
    """Per series (``"train"``, ``"eval"``) points ``[frames, seconds, mean return]``."""

    def __init__(self, folder: Path, backends: Sequence[str], history: Mapping[str, Any] | None = None) -> None:
        self.history = {name: list((history or {}).get(name, [])) for name in SERIES}
        self._loggers = [get_logger(backend, str(folder), backend) for backend in backends]
        for logger in self._loggers:
            if hasattr(logger.experiment, "add_custom_scalars"):
                logger.experiment.add_custom_scalars(custom_scalars_layout())
        self._file = open(folder / "metrics.jsonl", "a", encoding="ascii")

    def write(self, metrics: Mapping[str, float], *, frames: int) -> None:
        """Writes numbers under names such as ``"train/return"``, at a number of collected rows."""
        if not metrics:
            return
        self._file.write(json.dumps({"frames": frames, **metrics}) + "\n")
        self._file.flush()
        for logger in self._loggers:
            for name, value in metrics.items():
                logger.log_scalar(name, value, step=frames)

    def point(self, series: str, *, frames: int, seconds: float, value: float) -> None:
        """Adds a point to the learning curve."""
        self.history[series].append([float(frames), float(seconds), float(value)])

    def best(self) -> float:
        """Returns the best mean return of an evaluation, minus infinity before the first."""
        return max((point[2] for point in self.history["eval"]), default=-float("inf"))

    def close(self) -> None:
        """Closes all files; may be called twice."""
        for logger in self._loggers:
            # TorchRL's loggers have no common way to close; TensorBoard's writer buffers.
            close = getattr(logger.experiment, "close", None)
            if close is not None:
                close()
        self._loggers = []
        self._file.close()
