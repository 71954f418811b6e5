# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What ``update_priority`` is given: checked, in one form, and on the device of the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from torchrl_ext.data._moves import arrived
from torchrl_ext.data._slot_read import split_index
from torchrl_ext.data.storages import SlotStorage


@dataclass
class PriorityUpdate:
    """Priorities of rows, on the device where the weights are once :meth:`to` moved them.

    Attributes:
        shape (torch.Size): of the caller's index.
        pairs (torch.Tensor): int64 ``[2, M]``, (slot, stream).
        generation (torch.Tensor, optional): int64 ``[M]``.
        priority (torch.Tensor): float32 ``[M]``.
    """

    shape: torch.Size
    pairs: torch.Tensor
    generation: torch.Tensor | None
    priority: torch.Tensor

    def to(self, device: torch.device) -> PriorityUpdate:
        """Returns the update on a device; the host waits for what comes from a CUDA device."""
        generation = None if self.generation is None else arrived(self.generation, device)
        return PriorityUpdate(self.shape, arrived(self.pairs, device), generation, arrived(self.priority, device))


def checked_update(
    storage: SlotStorage, index: torch.Tensor, priority: float | torch.Tensor, generation: torch.Tensor | None
) -> PriorityUpdate:
    """Returns what was given; raises ``TypeError``, ``IndexError`` or ``ValueError`` where it is impossible."""
    index = torch.as_tensor(index)
    if index.dtype.is_floating_point or index.dtype.is_complex or index.dtype == torch.bool:
        raise TypeError(f"update_priority: index must be integers, got {index.dtype}. Nothing was changed.")
    slot, stream = split_index(index, storage.num_streams)
    shape = slot.shape
    checked = _checked(priority, shape)
    if generation is not None:
        generation = torch.as_tensor(generation)
        if generation.shape != shape:
            raise ValueError(
                f"update_priority: generation must have the shape {list(shape)} of the index, got "
                f"{list(generation.shape)}. Nothing was changed."
            )
        generation = generation.flatten()
    return PriorityUpdate(shape, torch.stack([slot.flatten(), stream.flatten()]).long(), generation, checked)


def _checked(priority: float | torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Returns priorities as float32 ``[M]``, one for each row of ``shape``."""
    value = torch.as_tensor(priority).detach()
    if value.dtype.is_complex or value.dtype == torch.bool:
        raise TypeError(f"update_priority: priority must be real numbers, got {value.dtype}. Nothing was changed.")
    if value.numel() != 1 and value.shape not in (shape, (*shape, 1)):
        raise ValueError(
            f"update_priority: priority must be one number or have the shape {list(shape)} of the index, got "
            f"{list(value.shape)}. Nothing was changed."
        )
    value = value.float().flatten().expand(shape.numel())
    if value.device.type != "cpu":
        # To ask would wait for the device.
        return value.nan_to_num(nan=0.0).clamp(min=0.0)
    numbers = value.numpy()
    low, high = numbers.min(initial=0.0), numbers.max(initial=0.0)  # NaN where any number is
    if not 0.0 <= low <= high < math.inf:
        raise ValueError(
            f"update_priority: priorities must be finite float32 numbers >= 0, got from {numbers.min()} to "
            f"{numbers.max()}. Nothing was changed; pass absolute values."
        )
    return value
