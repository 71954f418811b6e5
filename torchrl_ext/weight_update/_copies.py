# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The copies between the tensors of some weights and their places in a flat buffer, planned once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from torchrl_ext.weight_update._leaves import Leaves, Weights, extra_like


class Place(Protocol):
    """Where a leaf lies in the buffer."""

    @property
    def name(self) -> str:
        """Of the leaf."""

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns its part of the buffer."""


class Copies:
    """Lists for ``torch._foreach_copy_``, one pair per device, dtype and memory format, since those go as one kernel.

    Attributes:
        device (torch.device, optional): the one device that the weights are on, None for several.
    """

    def __init__(self, leaves: Leaves, places: Sequence[Place], flat: torch.Tensor) -> None:
        self._extra = {place.name: place.view(flat) for place in places if place.name in leaves.extra}
        groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._tied: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._tensors: list[torch.Tensor] = []
        seen: set[int] = set()
        for place in places:
            tensor = leaves.tensors[place.name]
            if place.name in leaves.extra or not tensor.numel():
                continue
            if id(tensor) in seen:
                group = self._tied
            else:
                group = groups.setdefault((tensor.device, tensor.dtype, tensor.is_contiguous()), ([], []))
            seen.add(id(tensor))
            self._tensors.append(tensor)
            group[0].append(tensor)
            group[1].append(place.view(flat))
        self._groups = list(groups.values())
        self._pointers = [tensor.data_ptr() for tensor in self._tensors]
        devices = {tensor.device for tensor in self._tensors}
        self.device = devices.pop() if len(devices) == 1 else None

    @property
    def current(self) -> bool:
        """Whether the leaves, as long as they are current, still lie in the same memory."""
        return [tensor.data_ptr() for tensor in self._tensors] == self._pointers

    def pack(self, source: Weights) -> None:
        """Copies the weights into the buffer; raises ``ValueError`` for extra state of another layout by now."""
        extra = extra_like(source, self._extra)
        with torch.no_grad():
            for tensors, views in self._groups:
                torch._foreach_copy_(views, tensors)
            for tensor, view in zip(*self._tied, strict=True):
                view.copy_(tensor)
            for name, value in extra.items():
                self._extra[name].copy_(value)

    def unpack(self, destination: Any) -> None:
        """Copies the buffer into the weights, a tied one from the first of its names."""
        with torch.no_grad():
            for tensors, views in self._groups:
                torch._foreach_copy_(tensors, views)
        if self._extra:
            target = getattr(destination, "_orig_mod", destination)
            values = {name: view.to(self.device or view.device, copy=True) for name, view in self._extra.items()}
            target.set_extra_state({name.partition(".")[2]: value for name, value in values.items()})
