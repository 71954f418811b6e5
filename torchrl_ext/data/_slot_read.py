# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""How a storage gives rows out by index: copies with their successors, or views."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from torchrl_ext.data._block import SlotBlock
from torchrl_ext.data._gather import gather_successors

if TYPE_CHECKING:
    from torchrl_ext.data.storages import SlotStorage


def split_index(index: torch.Tensor, num_streams: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns slots and streams of an index ``[..., 2]``, or ``[...]`` when there is one stream."""
    if index.dim() and index.shape[-1] == 2 and (index.dim() > 1 or num_streams > 1):
        return index[..., 0], index[..., 1]
    if num_streams == 1:
        return index, torch.zeros_like(index)
    raise IndexError(
        f"SlotStorage: index must be int64 [..., 2] (slot, stream) for {num_streams} streams, got {list(index.shape)}. "
        "Nothing was changed."
    )


def read(storage: SlotStorage, index: Any) -> TensorDict:
    """Implements :meth:`SlotStorage.get` for everything but keys."""
    block = storage.block
    if isinstance(index, (list, range, np.ndarray)):
        index = torch.as_tensor(np.asarray(index))
    if isinstance(index, torch.Tensor) and index.dtype == torch.bool:
        index = index.nonzero(as_tuple=True)
    if isinstance(index, torch.Tensor) and index.dim() == 1:
        # Slots with all their streams, as stock components address a two-dimensional storage.
        streams = torch.arange(block.num_streams, device=index.device)
        index = torch.broadcast_tensors(index.unsqueeze(-1), streams)
        return _read_rows(block, *index)
    if isinstance(index, torch.Tensor) and index.dim() > 1:
        return _read_rows(block, *split_index(index, block.num_streams))
    if isinstance(index, tuple) and all(isinstance(i, (torch.Tensor, np.ndarray)) for i in index) and len(index) == 2:
        return _read_rows(block, *torch.broadcast_tensors(*(torch.as_tensor(i) for i in index)))
    # As in stock storages, slices see the slots that hold rows.
    return storage._storage[: block.used_slots()][index]


def _read_rows(block: SlotBlock, slot: torch.Tensor, stream: torch.Tensor) -> TensorDict:
    slot, stream = slot.to(block.device, torch.int64), stream.to(block.device, torch.int64)
    if not block.on_device and slot.numel():
        # On CUDA the bounds would cost a synchronisation; there the gather itself asserts them.
        for name, value, size in (("slot", slot, block.capacity), ("stream", stream, block.num_streams)):
            if int(value.min()) < 0 or int(value.max()) >= size:
                raise IndexError(
                    f"SlotStorage: {name} must be in [0, {size}), got from {int(value.min())} to {int(value.max())}."
                )
    at = (slot * block.num_streams + stream).flatten()
    rows = block.words.index_select(0, at).view(torch.uint8)
    layout = block.layout
    leaves = layout.leaves(rows, layout.fields)
    if layout.derives:
        successors = gather_successors(block, at, stream.flatten(), rows)
        leaves.update((("next", *(k if isinstance(k, tuple) else (k,))), v) for k, v in successors.items())
    return layout.assemble(leaves, rows.shape[:1], rows.device).reshape(slot.shape)
