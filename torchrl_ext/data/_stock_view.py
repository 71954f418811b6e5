# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What TorchRL's buffers, samplers and writers see of a slot storage: one head, or an error that names our part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torchrl.data import TensorStorage

from torchrl_ext.data import _slot_io as io
from torchrl_ext.data._block import HEAD, RESERVED, TAIL, SlotBlock

if TYPE_CHECKING:
    pass


class StockView(TensorStorage):
    """The interface of :class:`torchrl.data.TensorStorage` that stock parts use, answered from positions."""

    capacity: int
    num_streams: int
    _block: SlotBlock | None
    _content_revision: int

    @property
    def supports_conditional_update(self) -> bool:
        """Raises ``RuntimeError``: TorchRL's conditional update passes slots without streams."""
        raise RuntimeError(
            "SlotStorage: update_if_present of a stock ReplayBuffer cannot name streams (it passes the first index "
            "column only); use SlotReplayBuffer. Nothing was written."
        )

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Writes as a stock TorchRL writer does (``set_cursor``), or changes the content of rows in place.

        Changing content does not change identity: generations, heads and cuts stay.

        Raises:
            RuntimeError: when a stock writer's cursor is not where all streams stand, or it keeps generations of its
                own. Nothing was written; use :class:`~torchrl_ext.data.SlotWriter`.
        """
        if isinstance(data, list):
            raise TypeError("SlotStorage: data must be a TensorDict, got a list. Nothing was written; stack it first.")
        if set_cursor:
            io.write_by_cursor(self, cursor, data)
        else:
            io.write_content(self, cursor, data)
            self._bump_mutation_revision()

    def _rand_given_ndim(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        from torchrl_ext.data.samplers import draw_index

        index = draw_index(self, batch_size, self._rng)
        return index[:, 0], index[:, 1]

    def _even_length(self, asked: str) -> int:
        positions = self.block.np_positions
        low, high = np.maximum(positions[TAIL], positions[RESERVED] - self.capacity), positions[HEAD]
        if (high != high[0]).any() or (low != low[0]).any():
            raise RuntimeError(
                f"SlotStorage: {asked} needs all streams at the same step, got heads from {high.min()} to "
                f"{high.max()}; use TransitionSampler or SequenceSampler with SlotReplayBuffer. Nothing was changed."
            )
        return int(high[0] - low[0])

    @property
    def shape(self) -> torch.Size:
        """``[live slots, N]``, for stock samplers; raises ``RuntimeError`` while streams stand at different steps."""
        return torch.Size([self._even_length("a stock sampler"), self.num_streams])

    @property
    def _total_shape(self) -> torch.Size:
        return torch.Size([self.capacity, self.num_streams])

    @property
    def _len(self) -> int:
        return len(self)

    @property
    def _len_along_dim0(self) -> int:
        return self._even_length("a stock component") if self.initialized else 0

    @property
    def _last_cursor_index(self) -> int | None:
        if self._block is None or not len(self):
            return None
        self._even_length("a stock sampler")
        return (int(self._block.np_positions[HEAD, 0]) - 1) % self.capacity

    @property
    def _mutation_revision(self) -> int:
        # Changes with every write, in every process, without a counter that writes would have to bump.
        heads = 0 if self._block is None else int(self._block.np_positions[HEAD].sum())
        return heads + self._content_revision

    def _bump_mutation_revision(self) -> None:
        self._content_revision += 1

    @property
    def _slot_generations(self) -> None:
        return None

    @_slot_generations.setter
    def _slot_generations(self, value: torch.Tensor) -> None:
        raise RuntimeError(
            "SlotStorage: a stock writer must not keep its own generation table (generations are arithmetic here); "
            "use SlotWriter."
        )

    def _max_size_along_dim0(self, *, single_data: Any = None, batched_data: Any = None) -> int:
        return self.capacity

    def contains(self, item: Any) -> torch.Tensor | bool:
        """Tells which rows live (see :meth:`generation_of`)."""
        index = torch.as_tensor(item)
        live = self.generation_of(index) >= 0
        return live if live.dim() else bool(live)

    def flatten(self) -> TensorStorage:
        """Returns a copy of the live rows as a one-dimensional stock storage, successors attached."""
        slots = torch.arange(self._even_length("flatten"), device=self.device)
        return TensorStorage(self.get(slots).flatten(0, 1))
