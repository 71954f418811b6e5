# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Fields of packed rows as the widest aligned words, or as one item each: fewer elements to copy, every bit of them."""

from __future__ import annotations

import numpy as np
import torch

from torchrl_ext.data._block import SlotBlock, items
from torchrl_ext.data.fields import Field

_WORDS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def word_bytes(field: Field, most: int = 16) -> int:
    """Returns the size of the widest words, ``most`` at most, that make up a field."""
    return next(size for size in _WORDS if size <= most and field.offset % size == field.nbytes % size == 0)


def word_columns(block: SlotBlock, field: Field) -> torch.Tensor:
    """Returns a field of all rows of a block, side table and sink included, as words ``[rows, W]``."""
    width = word_bytes(field)
    first = field.offset // width
    return block.rows.view(_WORDS[width])[:, first : first + field.nbytes // width]


def as_words(field: Field, value: torch.Tensor, most: int = 16) -> torch.Tensor:
    """Returns values ``[M, *field.shape]`` as words ``[M, W]``, copied where they do not lie so in memory."""
    width, value = word_bytes(field, most), value.contiguous()
    if value.data_ptr() % width:
        value = value.clone()
    return value.view(len(value), field.shape.numel()).view(torch.uint8).view(_WORDS[width])


def item_column(block: SlotBlock, field: Field) -> np.ndarray:
    """Returns a field of all rows of a host block as items ``[rows]``."""
    return items(block.np_rows[:, field.offset : field.offset + field.nbytes])


def as_items(field: Field, value: torch.Tensor) -> np.ndarray:
    """Returns host values ``[M, *field.shape]`` as items ``[M]``."""
    return items(value.contiguous().view(len(value), field.shape.numel()).view(torch.uint8).numpy())
