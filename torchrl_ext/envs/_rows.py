# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Borrowed rows, resolved once: which array goes into which leaf."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

Pairs = list[tuple[np.ndarray, np.ndarray]]


class BoundRow:
    """The leaves of one row, checked and paired with what :meth:`EnvPoolEnv.step_into` writes there.

    Looking leaves up costs more than writing them, so a worker binds each slot of its ring once. The row's memory
    lives as long as this object.

    Args:
        row (TensorDictBase): views of any stride, on the host.

    Keyword Args:
        root (Mapping[str, Any]): tensors, nested as in ``row``, to be written before the step.
        action (torch.Tensor): a tensor of the action's shape and dtype.
        following (Mapping[str, Any]): as ``root``, to be written under ``"next"`` after the step.
        owner (object): whose observations and outcomes are written.

    Raises:
        ValueError: if a leaf has another shape, dtype or device than what is to be written there.
    """

    __slots__ = ("_action", "_following", "_root", "owner")

    def __init__(
        self,
        row: TensorDictBase,
        *,
        root: Mapping[str, Any],
        action: torch.Tensor,
        following: Mapping[str, Any],
        owner: object,
    ) -> None:
        self.owner = owner
        self._root = _pair(row, root, ())
        self._action = [target for target, _ in _pair(row, {"action": action}, ())]
        next_row = row.get("next", None)
        self._following = [] if next_row is None else _pair(next_row, following, ("next",))

    def write_root(self, action: np.ndarray) -> None:
        """Writes the present observation and the action that answers it."""
        for target, source in self._root:
            np.copyto(target, source)
        for target in self._action:
            np.copyto(target, action)

    def write_next(self) -> None:
        """Writes what the step gave."""
        for target, source in self._following:
            np.copyto(target, source)


def _pair(row: TensorDictBase, sources: Mapping[str, Any], prefix: tuple[str, ...]) -> Pairs:
    pairs: Pairs = []
    # One pass over the row costs a tenth of a ``get`` for each source.
    for key, target in row.items():
        source = sources.get(key)
        if source is None:
            continue
        if isinstance(source, Mapping):
            pairs += _pair(target, source, (*prefix, key))
            continue
        # ``copyto`` would broadcast and cast without a word.
        if target.shape != source.shape or target.dtype != source.dtype or target.device.type != "cpu":
            raise ValueError(
                f"EnvPoolEnv.step_into: row key {(*prefix, key) if prefix else key!r} must have shape "
                f"{list(source.shape)} and dtype {source.dtype} on the cpu, got {list(target.shape)} and "
                f"{target.dtype} on {target.device}; nothing was stepped or written."
            )
        pairs.append((target.numpy(), source.numpy()))
    return pairs
