# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Draws of rows in proportion to their weights, from running sums that are made anew when weights changed.

A tree of sums is walked once for every row drawn or updated; one pass over a million weights costs less than a walk for
each of a few thousand rows, and no rounding error is ever carried on from one update to the next.

A row without weight holds ``ABSENT``, a negative zero: it adds nothing to any sum, and read as an unsigned number it is
above every weight, so that one pass finds the least weight there is.
"""

from __future__ import annotations

import numpy as np
import torch

from torchrl_ext.data._block import SlotBlock
from torchrl_ext.data.draws import uniform_ordinals

#: What a row that must not be drawn weighs.
ABSENT = -0.0
#: Weights are multiples of this many; sums of blocks of them are searched first.
WIDTH = 16
#: Weights are kept in ``[1 / MOST, MOST]``, so that the quotient of any two is a float32.
MOST = 1e18

#: A product with it is less than the other factor.
_BELOW = 1.0 - 2.0**-52
#: The sum of all weights in fixed point: what a random number of 62 bits modulo it is biased by stays below 2**-17.
_UNITS = 2.0**44


class BlockSums:
    """Sums on the host: a table leads to the block of ``WIDTH`` weights, a search inside it to the row.

    A sequential sum never falls and does not move at a row without weight, so the first sum beyond a number is at a row
    that has one.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        self._blocks, self._ones = weights.view(-1, WIDTH), torch.ones(WIDTH)
        self._unsigned = weights.numpy().view(np.uint32)
        num_blocks = len(self._blocks)
        self._bounds = torch.zeros(num_blocks + 1, dtype=torch.float64)
        self._ends = self._bounds[1:].numpy()
        self._guide = torch.zeros(num_blocks + 2, dtype=torch.int32)
        self._scale = 0.0

    def rebuild(self) -> None:
        """Takes changed weights in."""
        # A product with ones takes half as long as torch's sum over short rows.
        torch.cumsum(self._blocks.mv(self._ones), 0, dtype=torch.float64, out=self._bounds[1:])
        if self.empty:
            return
        # The range of all sums is cut into as many equal cells as there are blocks, and the blocks that end before each
        # cell are counted. In the cell of a random number one block ends on average, whatever the weights are, so that
        # one comparison finds most of them.
        self._scale = len(self._blocks) / self._ends[-1]
        counts = torch.from_numpy(np.bincount(self._cell(self._ends), minlength=len(self._blocks) + 1))
        torch.cumsum(counts, 0, dtype=torch.int32, out=self._guide[1:])

    def _cell(self, sums: np.ndarray) -> np.ndarray:
        # Monotone with all its rounding, which is all that the search relies on.
        return (sums * self._scale).astype(np.int64)

    @property
    def empty(self) -> bool:
        """Whether no row can be drawn."""
        return not self._ends[-1]

    def least(self) -> np.float32:
        """Returns the least weight there is."""
        return self._unsigned.min().view(np.float32)

    def draw(self, count: int, generator: torch.Generator | None) -> np.ndarray:
        """Draws flat rows int64 ``[count]``, independently; some row must have a weight."""
        unit = torch.rand(count, dtype=torch.float64, generator=generator)
        mass = unit.numpy() * self._ends[-1]  # below the total: ``unit`` is at most 1 - 2**-53
        chosen = self._search(mass)
        inside = self._blocks.index_select(0, torch.from_numpy(chosen)).cumsum(1, dtype=torch.float64).numpy()
        # Both sums of a block differ by rounding: what is left stays below the one that is searched.
        left = np.minimum(mass - self._bounds.numpy()[chosen], inside[:, -1] * _BELOW)
        return chosen * WIDTH + (inside > left[:, None]).argmax(1)

    def _search(self, mass: np.ndarray) -> np.ndarray:
        found = self._guide.numpy()[self._cell(mass)].astype(np.int64)
        found += self._ends[found] <= mass
        rest = np.flatnonzero(self._ends[found] <= mass)
        if len(rest):
            found[rest] = np.searchsorted(self._ends, mass[rest], side="right")
        return found


class FixedPointSums:
    """Sums on a device: running sums of all weights as integers, found by one search.

    A parallel scan adds floats in another order at every place, so that a running sum may fall, or rise at a row
    without weight. Integers add up exactly; what a row gets beyond its share is below ``1 / _UNITS``.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        self._weights = weights
        # Written in place only: a captured draw keeps reading them.
        self._ends = torch.zeros(len(weights), dtype=torch.int64, device=weights.device)
        self._total = torch.ones((), dtype=torch.int64, device=weights.device)
        self._none = torch.full((), torch.inf, device=weights.device)

    def rebuild(self) -> None:
        """Takes changed weights in."""
        scaled = self._weights.double()
        scaled.mul_(_UNITS / scaled.sum().clamp_(min=1 / MOST)).ceil_()
        torch.cumsum(scaled, 0, dtype=torch.int64, out=self._ends)
        torch.clamp(self._ends[-1], min=1, out=self._total)

    def least(self) -> torch.Tensor:
        """Returns the least weight there is, float32 ``[]``; infinity where there is none."""
        return torch.where(self._weights > 0, self._weights, self._none).amin()

    def draw(self, block: SlotBlock, count: int, generator: torch.Generator | None) -> torch.Tensor:
        """Draws flat rows int64 ``[count]``, independently; without any weight, ``len(weights)`` stands for each."""
        return torch.searchsorted(self._ends, uniform_ordinals(block, self._total, count, generator), right=True)
