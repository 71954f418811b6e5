# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What an ensemble asks of its members, whatever they are."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn.utils import _set_dispatch_td_nn_modules
from torchrl.data import ReplayBuffer
from torchrl.envs.transforms import Compose, Transform

from torchrl_ext.data._member_samples import Drawn

Masks = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Bool ``[K]`` each: the rows updated, superseded and (with versions) rejected by version."""


class Member(ABC):
    """What an ensemble asks of a member.

    Rows are numbered flat: ``slot * N + stream``, which is the slot in a one-dimensional storage. Updates are keyword
    arguments of ``update_if_present`` for the rows of one member: ``index`` and ``generation`` int64 ``[K]``, ``patch``
    a dict of ``[K, *feature]``, ``version`` a number or ``[K]``.
    """

    buffer: ReplayBuffer

    def __init__(self, buffer: ReplayBuffer, number: int) -> None:
        self.buffer = buffer
        self.name = f"member {number} ({type(buffer).__name__})"

    @property
    def may_refuse(self) -> bool:
        """Whether the member may still refuse records that were checked; it is unchanged then."""
        return False

    @property
    def tracks_generations(self) -> bool:
        """Whether rows have generations."""
        return bool(self.buffer.writer.tracks_generations)

    @abstractmethod
    def stores(self, key: NestedKey) -> bool:
        """Tells whether records have a key; ``True`` while nobody knows."""

    @abstractmethod
    def check_extend(self, records: TensorDictBase) -> None:
        """Raises unless the member can take records ``[K]``; nothing is written."""

    @abstractmethod
    def extend(self, records: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Writes records ``[K]``; returns their rows and generations, int64 ``[K]`` each (None: not tracked)."""

    def draw(self, rows: int, count: int) -> Drawn:
        """Draws ``rows`` rows, ``count`` equal shares of a sample, and transforms them."""
        dependency = self.buffer._sample_dependency
        if dependency is not None:
            # Updates submitted to the member itself come before; one that failed is its caller's.
            with contextlib.suppress(Exception):
                dependency.result()
        data, info = self._draw(rows)
        batch = data.batch_size
        if not batch or batch[0] % count:
            raise RuntimeError(
                f"sample: rows of {self.name} must come in {count} equal shares along the first dim, got batch size "
                f"{list(batch)}. Nothing was returned; a share holds whole windows, and a transform keeps rows apart."
            )
        leaves = {unravel_key(key): leaf for key, leaf in data.items(True, True)}
        for key, leaf in leaves.items():
            if not isinstance(leaf, torch.Tensor):
                raise TypeError(f"sample: key {key!r} of {self.name} must be a tensor, got {type(leaf).__name__}.")
        return Drawn(self.name, count, batch, leaves, info)

    @abstractmethod
    def _draw(self, rows: int) -> tuple[TensorDictBase, dict[NestedKey, torch.Tensor]]:
        """Returns transformed rows and what the sampler says about them, aligned with their batch size."""

    @abstractmethod
    def check_update(self, update: dict[str, Any]) -> None:
        """Raises unless an update fits what is stored; nothing is changed."""

    @abstractmethod
    def update(self, update: dict[str, Any]) -> Masks:
        """Applies a checked update."""

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises ``ValueError`` unless a state can be loaded, as far as that can be told."""
        if not isinstance(state, dict) or not {"_storage", "_sampler", "_writer"} <= state.keys():
            raise ValueError(f"load_state_dict: the state of {self.name} must be a buffer's. Nothing was changed.")

    @property
    def can_dump(self) -> bool:
        """Whether there is anything that the member could save; when not, it is loaded by emptying it."""
        return True

    def _as_stored(self, records: TensorDictBase) -> TensorDictBase:
        """Returns what inverse transforms will make of records."""
        transform = self.buffer.transform
        if not _changes_writes(transform):
            return records
        # Tried on copies: transforms may keep a state of what was written, and the member's own write runs them again.
        with _set_dispatch_td_nn_modules(True):
            stored = copy.deepcopy(transform).inv(records.clone())
        if not isinstance(stored, TensorDictBase) or stored.batch_size != records.batch_size:
            got = "none" if stored is None else f"batch size {list(stored.batch_size)}"
            raise ValueError(
                f"extend: the inverse transform of {self.name} must make one row of each record, got {got} for "
                f"{len(records)} records. Nothing was written."
            )
        return stored


def _changes_writes(transform: Transform) -> bool:
    if isinstance(transform, Compose):
        return any(_changes_writes(part) for part in transform.transforms)
    kind = type(transform)
    return bool(transform.in_keys_inv) or kind._inv_call is not Transform._inv_call or kind.inv is not Transform.inv
