# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Weights as one flat run of bytes that both sides cut alike."""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from torchrl_ext.weight_update._copies import Copies
from torchrl_ext.weight_update._leaves import Leaves, Weights, extra_like

__all__ = ["WeightLayout", "WeightLeaf"]

_ALIGNMENT = 16
#: Weights, and pairs of weights and buffers, that are remembered.
_MOST_KEPT = 32

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class WeightLeaf:
    """Where one tensor lies.

    Attributes:
        name (str): dotted, as in ``module.0.weight``.
        shape (tuple of int), dtype (torch.dtype): of the tensor.
        offset (int): of its first byte, a multiple of 16.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the leaf's part of a flat buffer."""
        return flat[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


class WeightLayout:
    """A flat byte layout of a policy's weights, in an order that only their names decide.

    Leaves     Parameters and buffers of any dtype and shape, 0-dim and empty ones too, under every name that they have:
               tied ones travel once per name. A module's own extra state travels when its values are all tensors; that
               of its children does not, as in TorchRL.
    Order      Sorted by name; each leaf begins at a multiple of 16 bytes. Layouts are equal when their leaves are, and
               then have one digest.
    In place   :meth:`unpack` writes into the tensors that the destination has, so that compiled and CUDA-graph policies
               act on the new values. Where the destination ties leaves, the first of their names counts.
    Speed      Views and checks are made once per pair of weights and buffer; a module that was given other or more
               tensors meanwhile (``Module.to``, a replaced child) is noticed. Nothing waits for a CUDA device, except
               that a copy from CUDA into host memory is complete on return unless it is ``non_blocking``.

    Build one with :meth:`from_weights`.

    Attributes:
        leaves (tuple of WeightLeaf): by name.
        nbytes (int): of the flat buffer, a multiple of 16.
        digest (str): names, shapes, dtypes and offsets in hexadecimal.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from torchrl_ext.weight_update import WeightLayout
        >>> learner, worker = nn.Linear(3, 2), nn.Linear(3, 2)
        >>> layout = WeightLayout.from_weights(learner)
        >>> [leaf.name for leaf in layout.leaves], layout.nbytes
        (['bias', 'weight'], 48)
        >>> flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
        >>> layout.pack(learner, flat)
        >>> layout.unpack(flat, worker)
        >>> torch.equal(worker.weight, learner.weight)
        True
    """

    def __init__(self, leaves: Sequence[tuple[str, tuple[int, ...], torch.dtype]]) -> None:
        made, offset = [], 0
        for name, shape, dtype in sorted(leaves, key=lambda leaf: leaf[0]):
            made.append(WeightLeaf(name, tuple(shape), dtype, offset))
            offset += -(-made[-1].nbytes // _ALIGNMENT) * _ALIGNMENT
        if not offset:
            raise ValueError("WeightLayout: the weights must have a leaf that is not empty, got none.")
        self.leaves, self.nbytes = tuple(made), offset
        rows = [[leaf.name, list(leaf.shape), str(leaf.dtype), leaf.offset] for leaf in made]
        self.digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]
        self._known: dict[int, tuple[weakref.ref, Leaves]] = {}

    @classmethod
    def from_weights(cls, weights: Weights) -> WeightLayout:
        """Builds the layout of a module, of a TensorDict or of a state dict.

        Raises:
            ValueError: when there is nothing in them.
            TypeError: when a leaf is not a tensor.
        """
        tensors = Leaves(weights).tensors
        return cls([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()])

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for :meth:`from_dict`."""
        return {"leaves": [[leaf.name, list(leaf.shape), str(leaf.dtype)[6:]] for leaf in self.leaves]}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> WeightLayout:
        """Builds the layout that :meth:`to_dict` described."""
        return cls([(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in state["leaves"]])

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightLayout.from_dict, (self.to_dict(),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeightLayout) and self.leaves == other.leaves

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"WeightLayout({len(self.leaves)} leaves, {self.nbytes} bytes, {self.digest[:8]})"

    def check(self, weights: Weights) -> Leaves:
        """Returns the leaves of weights of this layout.

        Raises:
            ValueError: for others, naming the first that differs.
        """
        found = Leaves(weights)
        ours = {leaf.name: f"{leaf.dtype} {list(leaf.shape)}" for leaf in self.leaves}
        theirs = {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in found.tensors.items()}
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                raise ValueError(
                    f"WeightLayout: key {name!r} must be {ours.get(name, 'absent')}, "
                    f"got {theirs.get(name, 'nothing of that name')}. Nothing was changed."
                )
        return found

    def pack(self, weights: Weights, out: torch.Tensor, *, non_blocking: bool = False) -> None:
        """Copies weights into a flat buffer.

        Args:
            weights (nn.Module, TensorDict or mapping of str to tensor): of this layout.
            out (torch.Tensor): contiguous uint8 ``[nbytes]`` on any device.

        Keyword Args:
            non_blocking (bool): a copy from CUDA into pinned ``out`` is only enqueued on the current stream. Defaults
                to ``False``.

        Raises:
            ValueError: for weights of another layout, naming the first key that differs, or another buffer. Nothing
                was written.
        """
        copies = self._copies_of(weights, out)
        device = copies.device
        if device is not None and device != out.device and "cuda" in (device.type, out.device.type):
            # One copy between the devices instead of one per leaf.
            pinned = device.type == "cpu" and non_blocking
            between = torch.empty(self.nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
            Copies(self._leaves_of(weights), self.leaves, between).pack(weights)
            out.copy_(between, non_blocking=non_blocking)
        else:
            copies.pack(weights)

    def ensure_packable(self, weights: Weights) -> None:
        """Raises ``ValueError`` for weights that :meth:`pack` refuses."""
        extra_like(weights, self._leaves_of(weights).extra)

    def unpack(self, flat: torch.Tensor, destination: nn.Module | TensorDictBase) -> None:
        """Copies a flat buffer into the destination's tensors, which keep their memory.

        Copies on CUDA are enqueued on the current stream; a pinned buffer keeps its content until they are done.

        Args:
            flat (torch.Tensor): contiguous uint8 ``[nbytes]`` on any device.
            destination (nn.Module or TensorDict): of this layout.

        Raises:
            ValueError: see :meth:`pack`. Nothing was changed.
        """
        copies = self._copies_of(destination, flat)
        device = copies.device
        if device is not None and device != flat.device and "cuda" in (device.type, flat.device.type):
            copies = Copies(self._leaves_of(destination), self.leaves, flat.to(device, non_blocking=flat.is_pinned()))
        copies.unpack(destination)

    def view(self, flat: torch.Tensor) -> TensorDict:
        """Returns a flat buffer as a nested TensorDict of views."""
        self._check_flat(flat)
        return TensorDict({tuple(leaf.name.split(".")): leaf.view(flat) for leaf in self.leaves}, [])

    def device_of(self, weights: Weights) -> torch.device | None:
        """Returns the one device that all leaves are on, None where they are on several."""
        found = self._leaves_of(weights)
        devices = {tensor.device for name, tensor in found.tensors.items() if name not in found.extra}
        return devices.pop() if len(devices) == 1 else None

    def _check_flat(self, flat: torch.Tensor) -> None:
        if flat.dtype != torch.uint8 or flat.shape != (self.nbytes,) or not flat.is_contiguous():
            raise ValueError(
                f"WeightLayout: the flat buffer must be contiguous uint8 [{self.nbytes}], got {flat.dtype} "
                f"{list(flat.shape)}. Nothing was changed."
            )

    def _leaves_of(self, weights: Weights) -> Leaves:
        entry = self._known.get(id(weights))
        if entry is not None and entry[0]() is weights and entry[1].current:
            return entry[1]
        found = self.check(weights)
        if isinstance(weights, nn.Module | TensorDictBase):  # a dict cannot be watched, and is cheap to walk
            _keep(self._known, id(weights), found, weights)
        return found

    def _copies_of(self, weights: Weights, flat: torch.Tensor) -> Copies:
        leaves = self._leaves_of(weights)
        entry = leaves.copies.get(id(flat))
        if entry is not None and entry[0]() is flat and entry[1].current:
            return entry[1]
        self._check_flat(flat)
        copies = Copies(leaves, self.leaves, flat)
        _keep(leaves.copies, id(flat), copies, flat)
        return copies


def _keep(cache: dict[int, tuple[weakref.ref, _Value]], key: int, value: _Value, owner: Any) -> None:
    """Remembers a value for as long as its owner lives, the newest ones only."""
    while len(cache) >= _MOST_KEPT:
        cache.pop(next(iter(cache)), None)
    cache[key] = weakref.ref(owner, lambda _: cache.pop(key, None)), value
