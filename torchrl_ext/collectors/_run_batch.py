# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Puts spans of several workers together to one batch, as TorchRL's collectors give it."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from torchrl_ext.data import PackedRun, RowLayout

__all__ = ["RunBatch"]


class RunBatch:
    """``K`` steps of ``N`` streams and their successors, filled block by block.

    Args:
        layout (RowLayout): of a row.
        num_steps (int): ``K``.
        num_streams (int): ``N``.
        device (torch.device): of the batch.
    """

    def __init__(self, layout: RowLayout, num_steps: int, num_streams: int, device: torch.device) -> None:
        self._layout, self._device = layout, device
        shape = (num_steps, num_streams)
        self._rows = torch.empty(*shape, layout.row_bytes, dtype=torch.uint8, device=device)
        self._successors = torch.empty(*shape, layout.successor_bytes, dtype=torch.uint8, device=device)

    def add(self, run: PackedRun, first: int, columns: slice) -> None:
        """Copies a run with its tail to steps ``first`` and following of some streams."""
        assert run.tail is not None
        width, (steps, streams) = self._layout.successor_bytes, run.shape
        self._rows[first : first + steps, columns].copy_(run.rows, non_blocking=True)
        successors = self._successors[first : first + steps, columns]
        successors[:-1].copy_(run.rows[1:, :, :width], non_blocking=True)
        successors[-1].copy_(run.tail[:, :width], non_blocking=True)
        if run.final_rows is not None and run.finals is not None:
            at, finals = run.final_rows.to(self._device), run.finals[:, :width].to(self._device)
            successors[at // streams, at % streams] = finals

    def tensordict(self) -> TensorDict:
        """Returns the batch ``[K, N]``: zero-copy views of its own memory, successors under ``"next"``."""
        batch = self._layout.view(self._rows)
        batch.get("next").update(self._layout.view_successors(self._successors))
        for flag in ("done", "terminated", "truncated"):
            # A stream that ended was reset before its next step.
            batch.set(flag, torch.zeros_like(batch.get(("next", flag))))
        batch.names = ["time", None]
        return batch
