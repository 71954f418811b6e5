# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Names of written rows."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["SlotHandle"]


class SlotHandle:
    """Names the rows that one :meth:`SlotStorage.extend_batch` wrote, without materialising their indices.

    Attributes:
        first_step (np.ndarray): int64 ``[n]``, the step of the first row of each stream of the block.
        num_steps (int): rows written per stream, those that the same call overwrote again included.
        streams (slice): the columns written.
    """

    __slots__ = ("_capacity", "first_step", "num_steps", "streams")

    def __init__(self, first_step: np.ndarray, num_steps: int, streams: slice, capacity: int) -> None:
        self.first_step, self.num_steps, self.streams, self._capacity = first_step, num_steps, streams, capacity

    @property
    def steps(self) -> torch.Tensor:
        """int64 ``[K, n]``: the step of each row."""
        return torch.from_numpy(self.first_step + np.arange(self.num_steps)[:, None])

    @property
    def index(self) -> torch.Tensor:
        """int64 ``[K, n, 2]``: (slot, stream) of each row."""
        slots = self.steps.remainder(self._capacity)
        return torch.stack([slots, torch.arange(self.streams.start, self.streams.stop).expand_as(slots)], -1)

    @property
    def generation(self) -> torch.Tensor:
        """int64 ``[K, n]``: the generation of each row."""
        return self.steps.div(self._capacity, rounding_mode="floor")
