# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Where the fields of a record go in its row: the canonical order, and the rules of alignment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from tensordict import NestedKey, unravel_key

from torchrl_ext.data.fields import Field, as_tuple, is_next, next_of

#: Root and ``next`` carry these in TorchRL's data without being observations.
_NOT_OBSERVED = ("done", "terminated", "truncated", "is_init", "_reset")
_FINAL_BYTES = 4
_WORD = 16


class RowPlan(NamedTuple):
    """What a :class:`~torchrl_ext.data.RowLayout` is made of."""

    fields: tuple[Field, ...]
    next_keys: tuple[NestedKey, ...]
    next_obs: Literal["derive", "store"]
    successor_bytes: int
    final_offset: int
    row_bytes: int


def plan_row(
    leaves: Mapping[NestedKey, tuple[torch.dtype, torch.Size]],
    next_obs: Literal["derive", "store"],
    next_keys: Sequence[NestedKey] | None,
) -> RowPlan:
    """Places fields of the given dtypes and shapes; the order of ``leaves`` does not matter.

    Raises:
        ValueError, KeyError: see :meth:`RowLayout.from_tensordict`.
    """
    if next_obs not in ("derive", "store"):
        raise ValueError(f"RowLayout: next_obs must be 'derive' or 'store', got {next_obs!r}.")
    names = _observed(leaves) if next_keys is None else tuple(dict.fromkeys(map(unravel_key, next_keys)))
    if next_keys is None and not names and not any(map(is_next, leaves)):
        next_obs = "store"  # bare records: there is no successor to derive
    if next_obs == "derive" and not names:
        raise ValueError(
            "RowLayout: next_obs='derive' needs a key whose successor is meant, got none present both at the root "
            f"and under 'next' among {sorted(leaves, key=str)}; pass next_keys= or next_obs='store'."
        )
    for key in names:
        if key not in leaves or is_next(key):
            raise KeyError(
                f"RowLayout: next key {key!r} must be a field at the root, got fields {sorted(leaves, key=str)}."
            )
    derived = set(names) if next_obs == "derive" else set()
    successors = {next_of(name) for name in derived}
    leaves = {key: leaf for key, leaf in leaves.items() if key not in successors}

    def order(key: NestedKey) -> tuple[int, tuple[str, ...]]:
        return -_nbytes(*leaves[key]), as_tuple(key)

    fields: list[Field] = []
    successor_bytes = _align(_place(sorted(derived, key=order), leaves, 0, fields), _WORD)
    others = sorted((key for key in leaves if key not in derived), key=order)
    final_offset = _align(_place(others, leaves, successor_bytes, fields), _FINAL_BYTES)
    row_bytes = _align(final_offset + _FINAL_BYTES, _WORD)
    ordered = tuple(sorted(names, key=order))
    return RowPlan(tuple(fields), ordered, next_obs, successor_bytes, final_offset, row_bytes)


def _observed(leaves: Mapping[NestedKey, tuple[torch.dtype, torch.Size]]) -> tuple[NestedKey, ...]:
    roots = [key for key in leaves if not is_next(key) and as_tuple(key)[-1] not in _NOT_OBSERVED]
    return tuple(key for key in roots if next_of(key) in leaves)


def _place(
    keys: Iterable[NestedKey],
    leaves: Mapping[NestedKey, tuple[torch.dtype, torch.Size]],
    offset: int,
    fields: list[Field],
) -> int:
    """Appends fields one behind the other; returns where the last one ends."""
    for key in keys:
        dtype, shape = leaves[key]
        size = _nbytes(dtype, shape)
        if size == 0:
            raise ValueError(f"RowLayout: key {key!r} must hold at least one element, got shape {shape}.")
        offset = _align(offset, _WORD if size >= _WORD else dtype.itemsize)
        fields.append(Field(key, dtype, torch.Size(shape), offset))
        offset += size
    return offset


def _nbytes(dtype: torch.dtype, shape: torch.Size) -> int:
    return math.prod(shape) * dtype.itemsize


def _align(offset: int, to: int) -> int:
    return -(-offset // to) * to
