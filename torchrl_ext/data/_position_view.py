# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Where the rows of a storage are: heads and tails, what lives, generations, row numbers."""

from __future__ import annotations

import numpy as np
import torch
from torchrl.data import TensorStorage

from torchrl_ext.data import positions as pos
from torchrl_ext.data._block import HEAD, RESERVED, TAIL, UNCOUNTED, Kind, SlotBlock
from torchrl_ext.data._slot_read import split_index


class PositionView(TensorStorage):
    """The part of :class:`~torchrl_ext.data.SlotStorage` that answers from positions and reads no row."""

    capacity: int
    num_streams: int
    device: torch.device
    _block: SlotBlock | None
    _kind: Kind

    @property
    def block(self) -> SlotBlock:
        """The allocation; raises ``RuntimeError`` before the layout is known."""
        if self._block is None:
            raise RuntimeError("SlotStorage: nothing was written and no layout was given; write a run first.")
        return self._block

    @property
    def head(self) -> torch.Tensor:
        """int64 ``[N]``, a copy: the next step to write of each stream."""
        return self._position(HEAD)

    @property
    def tail(self) -> torch.Tensor:
        """int64 ``[N]``, a copy: the oldest step that may live of each stream."""
        return self._position(TAIL)

    def _position(self, row: int) -> torch.Tensor:
        if self._block is None:
            return torch.zeros(self.num_streams, dtype=torch.int64)
        return self._block.positions[row].clone()

    def live_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``low`` and ``high``, int64 ``[N]`` each: step ``s`` of a stream lives iff ``low <= s < high``."""
        low, high = pos.live_range(self.block)
        return low, high.clone()

    def generation_of(self, index: torch.Tensor) -> torch.Tensor:
        """Returns the generation of rows, ``-1`` where no live row is.

        Args:
            index (torch.Tensor): int64 ``[..., 2]`` (slot, stream); ``[...]`` slots when there is one stream. Indices
                out of range name no row.

        Returns:
            torch.Tensor: int64 ``[...]`` on the device of ``index``. The same answer in every process.
        """
        slot, stream = split_index(index, self.num_streams)
        if self._block is None:
            return torch.full_like(slot, -1)
        return pos.generation_of(self._block, slot.to(self.device), stream.to(self.device)).to(slot.device)

    def ravel(self, index: torch.Tensor) -> torch.Tensor:
        """Returns flat row numbers ``slot * N + stream`` of indices ``[..., 2]``."""
        slot, stream = split_index(index, self.num_streams)
        return slot * self.num_streams + stream

    def unravel(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns indices ``[..., 2]`` of flat row numbers."""
        slot = rows.div(self.num_streams, rounding_mode="floor")
        return torch.stack([slot, rows - slot * self.num_streams], -1)

    @property
    def write_count(self) -> int:
        """Rows written since creation or the last :meth:`empty` that reset it, overwritten ones included."""
        if self._block is None:
            return 0
        positions = self._block.np_positions
        return int((positions[HEAD] - positions[UNCOUNTED]).sum())

    @property
    def has_other_writers(self) -> bool:
        """Whether another process may write while this one reads (shared memory and mapped files)."""
        return self._kind in ("shared", "file")

    def num_finals(self) -> int:
        """Returns how many final observations live in the side table."""
        if self._block is None:
            return 0
        low, _ = pos.live_range(self._block)
        return int((self._block.final_step >= low.unsqueeze(-1)).sum())

    def __len__(self) -> int:
        """Returns the number of live rows of all streams."""
        if self._block is None:
            return 0
        # The host copy of heads and tails answers without asking a CUDA device.
        positions = self._block.np_positions
        low = np.maximum(positions[TAIL], positions[RESERVED] - self.capacity)
        return int(np.maximum(positions[HEAD] - low, 0).sum())  # more than a lap may be reserved
