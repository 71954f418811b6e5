# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What the user sees: the panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torchrl._utils import logger as torchrl_logger

from torchrl_ext.record import Panel, SystemMetrics


class Progress:
    """The panel of a run, with TorchRL's log lines in the same manner.

    Keyword Args:
        title (str): of the panel.
        folder (Path): of the run; what workers print while the panel is shown goes to ``output.log`` there.
        total_frames (int, optional): rows at which the run ends.
        time_budget (float, optional): seconds at which it ends.
        print_every (float): seconds between plain lines.
        devices (sequence of torch.device): whose load is shown.
    """

    def __init__(
        self,
        *,
        title: str,
        folder: Path,
        total_frames: int | None,
        time_budget: float | None,
        print_every: float,
        devices: Sequence[torch.device],
    ) -> None:
        # TorchRL's own formatter colours its lines, in files and pipes too.
        self._handlers = [(handler, handler.formatter) for handler in torchrl_logger.handlers]
        for handler, _ in self._handlers:
            handler.setFormatter(logging.Formatter("%(asctime)s [%(name)s] %(message)s"))
        self.panel = Panel(
            title=title,
            total_frames=total_frames,
            time_budget=time_budget,
            print_every=print_every,
            sampler=SystemMetrics(devices=devices).sample if sys.stdout.isatty() else None,
            output=folder / "output.log",
        )
        self.panel.start()
        self.say, self.update, self.point = self.panel.say, self.panel.update, self.panel.point

    @property
    def should_quit(self) -> bool:
        """Whether the user pressed q."""
        return self.panel.should_quit

    def close(self) -> None:
        """Leaves the terminal as it was; may be called twice."""
        self.panel.stop()
        for handler, formatter in self._handlers:
            handler.setFormatter(formatter)
