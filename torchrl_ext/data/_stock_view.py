# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What TorchRL's buffers, samplers and writers see of a slot storage: one head, or an error that names our part."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase, unravel_key
from torchrl.data import TensorStorage

from torchrl_ext.data._block import HEAD, RESERVED, TAIL
from torchrl_ext.data._position_view import PositionView
from torchrl_ext.data._row_draws import draw_index
from torchrl_ext.data._slot_read import split_index
from torchrl_ext.data._yielding_lock import YieldingLock

if TYPE_CHECKING:
    from torchrl_ext.data.storages import SlotStorage


class StockView(PositionView):
    """The interface of :class:`torchrl.data.TensorStorage` that stock parts use, answered from positions."""

    _content_revision: int
    _lock: YieldingLock
    _order: contextlib.AbstractContextManager

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
        with self._lock:
            if set_cursor:
                write_by_cursor(self, cursor, data)
                return
            with self._order:
                write_content(self, cursor, data)
            self._bump_mutation_revision()

    def _rand_given_ndim(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        # A stock buffer holds no lock of the storage, and what a draw finds out about positions is kept.
        with self._lock, self._order:
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
        if 0 < high[0] - low[0] < self.capacity and low[0] % self.capacity:
            raise RuntimeError(
                f"SlotStorage: {asked} needs all live rows in the leading slots, got live steps from {low[0]} to "
                f"{high[0] - 1}, because a write is under way or its writer was killed; use TransitionSampler or "
                "SequenceSampler with SlotReplayBuffer. Nothing was changed."
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


def write_by_cursor(storage: SlotStorage, cursor: Any, data: Any) -> None:
    """Lets a stock writer write where it believes its cursor is, when all streams do stand there."""
    for buffer in storage._attached_entities:
        writer = getattr(buffer, "_writer", None)
        if writer is not None and writer.tracks_generations and writer._storage is storage:
            if type(writer).__module__.split(".")[0] == "torchrl":
                storage._slot_generations = None  # raises: two tables of generations would disagree
    if not isinstance(data, TensorDictBase):
        raise TypeError(f"SlotStorage: data must be a TensorDict, got {type(data).__name__}. Nothing was written.")
    single = isinstance(cursor, int) or (isinstance(cursor, torch.Tensor) and cursor.dim() == 0)
    if single:
        data = data.unsqueeze(0)
    if "index" in data.keys() and (storage.layout is None or "index" not in storage.layout.by_key):
        data = data.exclude("index")  # a mark of TorchRL's TensorDict writers, not part of a record
    first = int(cursor) if single else int(cursor[0])
    heads = np.zeros(1, np.int64) if storage._block is None else storage.block.np_positions[HEAD]
    if (heads % storage.capacity != first).any() or (heads != heads[0]).any():
        raise RuntimeError(
            f"SlotStorage: a stock writer may write only while all streams stand at its cursor {first}, got slots "
            f"{np.unique(heads % storage.capacity).tolist()}. Nothing was written; use SlotWriter."
        )
    storage.extend_batch(data)


def write_content(storage: SlotStorage, index: Any, data: Any) -> None:
    """Changes stored fields of rows in place, leaving positions and cuts alone."""
    if not isinstance(data, TensorDictBase):
        raise TypeError(f"SlotStorage: data must be a TensorDict, got {type(data).__name__}. Nothing was written.")
    block = storage.block
    if isinstance(index, torch.Tensor) and index.dim() > 1:
        index = split_index(index, block.num_streams)
    views = block.layout.leaves(block.ring, block.layout.fields)
    checked = {}
    for key, leaf in data.items(True, True):
        view = views.get(unravel_key(key))
        if view is None:
            raise KeyError(f"SlotStorage: key {key!r} must be one of {list(views)}. Nothing was written.")
        if leaf.dtype != view.dtype:
            raise ValueError(f"SlotStorage: key {key!r} must be {view.dtype}, got {leaf.dtype}. Nothing was written.")
        try:
            checked[unravel_key(key)] = leaf.expand(view[index].shape)
        except RuntimeError as error:
            raise ValueError(
                f"SlotStorage: key {key!r} must have shape {list(view[index].shape)}, got {list(leaf.shape)}. "
                "Nothing was written."
            ) from error
    for key, leaf in checked.items():
        views[key][index] = leaf.to(block.device)
