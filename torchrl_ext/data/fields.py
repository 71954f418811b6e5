# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""One leaf of a record: its nested key, and where its bytes are in a row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from tensordict import NestedKey, unravel_key

__all__ = ["Field"]


def as_tuple(key: NestedKey) -> tuple[str, ...]:
    """Returns a nested key as a tuple, also when it is a plain string."""
    key = unravel_key(key)
    return (key,) if isinstance(key, str) else key


def is_next(key: NestedKey) -> bool:
    """Tells whether a key lives under ``"next"``."""
    return isinstance(key, tuple) and key[0] == "next"


def next_of(key: NestedKey) -> tuple[str, ...]:
    """Returns the key under ``"next"`` that holds the successor of ``key``."""
    return ("next", *as_tuple(key))


@dataclass(frozen=True)
class Field:
    """One leaf of a row: where its bytes are and what they mean."""

    key: NestedKey
    dtype: torch.dtype
    shape: torch.Size
    offset: int

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the leaf in one row."""
        return self.numel * self.dtype.itemsize

    @cached_property
    def numel(self) -> int:
        """Elements of the leaf in one row."""
        return math.prod(self.shape)

    @cached_property
    def start(self) -> int:
        """The offset counted in elements of the leaf's dtype."""
        return self.offset // self.dtype.itemsize
