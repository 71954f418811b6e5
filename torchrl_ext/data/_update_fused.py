# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Launching the kernels of updates where they apply."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import torch

from torchrl_ext.data._block import SlotBlock
from torchrl_ext.data._fused import geometry_of, has_triton
from torchrl_ext.data._words import as_words
from torchrl_ext.data.write_back import Update, WriteBackResult

_LANES = 256
_BLOCK = 1024


@lru_cache(maxsize=1)
def _kernels() -> ModuleType:
    # Triton comes with CUDA builds of torch only; importing it takes a while, so only device storages do.
    from torchrl_ext.data import _update_kernels as kernels

    return kernels


def can_update(block: SlotBlock, update: Update) -> bool:
    """Whether the kernels can apply an update."""
    return block.device.type == "cuda" and update.version is None and len(update) > 0 and has_triton()


def update_fused(block: SlotBlock, update: Update, counts: torch.Tensor) -> WriteBackResult:
    """Applies an update in one launch and one more per field, and adds the outcome to ``counts``."""
    kernels, count, device = _kernels(), len(update), block.device
    if block.owner is None:
        # 8 bytes for each row of the ring, kept from the first update on. The number 0 bids for nothing yet.
        block.owner = torch.zeros(1 + block.side_start, dtype=torch.int64, device=device)
        block.owner[0] = 1
    rows = torch.empty(count, dtype=torch.int64, device=device)
    masks = torch.empty(2, count, dtype=torch.uint8, device=device)
    kernels.claim[(-(-count // _LANES),)](
        update.slot,
        update.stream,
        update.generation,
        update.slot.stride(0),
        update.stream.stride(0),
        update.generation.stride(0),
        block.positions,
        geometry_of(block),
        block.owner,
        rows,
        count,
        BLOCK=_LANES,
    )
    last = len(update.patch) - 1
    for number, (field, value) in enumerate(update.patch):
        source = as_words(field, value, most=8)
        width = source.dtype.itemsize
        words = field.nbytes // width
        kernels.write[(count,)](
            rows,
            block.owner,
            source,
            block.rows.view(source.dtype),
            masks[0],
            masks[1],
            counts,
            block.layout.row_bytes // width,
            field.offset // width,
            WORDS=words,
            BLOCK=min(_BLOCK, 1 << (words - 1).bit_length()),
            LAST=number == last,
        )
    updated, superseded = masks.view(torch.bool).view(2, *update.shape).unbind(0)
    return WriteBackResult(updated=updated, superseded=superseded, batch_size=update.shape)
