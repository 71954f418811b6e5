# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The weights of the rows of a storage whose books a device keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import NestedKey

from torchrl_ext.data._block import HEAD, SlotBlock
from torchrl_ext.data._fused import Outputs
from torchrl_ext.data._priorities import PriorityTable, capturing
from torchrl_ext.data._proportional import ABSENT, FixedPointSums
from torchrl_ext.data.draws import Draw
from torchrl_ext.data.positions import holes_from, sampleable_range


class DevicePriorities(PriorityTable):
    """The table of a storage on a device: masks over all rows, and nothing is read back.

    Every tensor is written in place, so that a captured draw brings the table up to date in each replay.
    """

    def __init__(self, block: SlotBlock, **options: Any) -> None:
        super().__init__(block, **options)
        self._sums = FixedPointSums(self.weights)
        self._slots = torch.arange(block.capacity, dtype=torch.int32, device=block.device).unsqueeze(-1)
        self._absent = torch.full((), ABSENT, device=block.device)

    def _advance(self, block: SlotBlock, positions: np.ndarray) -> None:
        low, high = sampleable_range(block)
        head, (seen_head, seen_low) = block.positions[HEAD], self.seen
        last = head - 1
        slot = last.remainder(self.capacity)
        # Where another state was loaded, nobody knows which of its records were here before: all rows are new.
        loaded = ((head < seen_head) | (low < seen_low)).any()
        fresh = torch.where(loaded, self.capacity, head - seen_head)
        age = (slot.int() - self._slots).remainder_(self.capacity)
        live = age < head - low
        grid = self.weights[: self.sink].view(self.capacity, self.num_streams)
        torch.where(live & (age >= fresh), grid, self._absent, out=grid)
        torch.where(live & (age < fresh), self.new_weight(), grid, out=grid)
        torch.stack([head, low], out=self.seen)
        torch.stack([slot, last.div(self.capacity, rounding_mode="floor"), high - last, head - low], out=self.places)
        self.newest.copy_(torch.where(high < head, slot * self.num_streams + self.streams, self.sink))

    def settle(self, block: SlotBlock) -> None:
        """Takes changed weights into the sums."""
        if self.stale or capturing(block):
            self._sums.rebuild()
            self.least.copy_(self._sums.least())
            self.stale = capturing(block)

    def fill(self, block: SlotBlock, ranges: torch.Tensor, holes: int, out: Outputs) -> None:
        """Draws rows for a captured draw, see :class:`torchrl_ext.data._graphs.Choice`; the sums are settled."""
        at = self._sums.draw(block, out.count, None).clamp_(max=self.sink - 1)
        slot = at.div(self.num_streams, rounding_mode="floor")
        stream = at - slot * self.num_streams
        _, generation, _, _ = self.locate(self.places[:, stream], slot)
        # Rows are numbered stream by stream: those up to its stream's end, less those from it to there.
        running, _, high, _ = ranges[:, stream].unbind(0)
        step = generation * self.capacity + slot
        number = running - high + step
        if holes:
            number += holes_from(block, stream, step)
        torch.clamp(number, min=0, out=out.wide)
        out.weight.copy_(self.importance(at))

    def draw(self, block: SlotBlock, count: int, generator: torch.Generator | None) -> Draw[torch.Tensor]:
        self.settle(block)
        at = self._sums.draw(block, count, generator).clamp_(max=self.sink - 1)
        slot = at.div(self.num_streams, rounding_mode="floor")
        stream = at - slot * self.num_streams
        age, generation, extra, _ = self.locate(self.places[:, stream], slot)
        return Draw(at, age + extra, 1, stream, slot, generation)

    def importance(self, at: torch.Tensor | np.ndarray) -> torch.Tensor:
        return self.weights.index_select(0, torch.as_tensor(at)).div_(self.least).pow_(self.exponent)

    def update(
        self, block: SlotBlock, index: torch.Tensor, generation: torch.Tensor | None, priority: torch.Tensor
    ) -> torch.Tensor:
        slot, stream = index
        inside = (slot >= 0) & (slot < self.capacity) & (stream >= 0) & (stream < self.num_streams)
        age, lap, _, live = self.locate(self.places[:, stream.clamp(0, self.num_streams - 1)], slot)
        meant = inside & (age < live)
        if generation is not None:
            meant &= lap == generation
        # What is not meant, or replaced by a later entry, goes to the sink.
        at = torch.where(meant, slot * self.num_streams + stream, self.sink)
        # A maximum does not depend on the order in which it is taken; what a scatter leaves behind does.
        order = torch.arange(len(at), dtype=torch.int32, device=self.device)
        self.claims.index_fill_(0, at, -1).scatter_reduce_(0, at, order, "amax")
        taken = meant & (self.claims.index_select(0, at) == order)
        weight = torch.where(taken, self.weigh(priority), ABSENT)
        self.put_back()
        self.weights.index_copy_(0, torch.where(taken, at, self.sink), weight)
        self.take_out(block)
        torch.maximum(self.top, torch.where(meant, priority, 0.0).amax(), out=self.top)
        return taken


class ByPriority:
    """The rows of a captured draw, in proportion to a table of weights."""

    def __init__(self, table: DevicePriorities, weight_key: NestedKey) -> None:
        self.table, self._weight_key = table, weight_key

    def fill(self, block: SlotBlock, ranges: torch.Tensor, holes: int, out: Outputs) -> None:
        """Draws by the table."""
        self.table.fill(block, ranges, holes, out)

    def leaves(self, out: Outputs) -> dict[NestedKey, torch.Tensor]:
        """Adds the importance weights."""
        return {self._weight_key: out.weight}
