# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The weights of all rows of a storage, brought up to date from its positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchrl_ext.data._block import HEAD, NEWEST, RESERVED, TAIL, UNKNOWN, SlotBlock
from torchrl_ext.data._proportional import ABSENT, MOST, WIDTH, BlockSums
from torchrl_ext.data.draws import Array, Draw

if TYPE_CHECKING:
    from torchrl_ext.data.storages import SlotStorage

#: What a saved table has.
STATE = ("capacity", "num_streams", "weights", "seen", "top")


class PriorityTable(ABC):
    """One float32 weight, ``(priority + eps)**alpha``, for each row ``slot * N + stream``.

    Writers do not know of the table. It remembers the heads it has seen; :meth:`refresh` gives the rows written since
    then the weight of the largest priority and takes that of dead rows away. Rows that live and cannot be sampled have
    no weight at rest: that of a newest row without a known successor is held aside and put back around every change; a
    hole never gets one.
    """

    def __init__(self, block: SlotBlock, *, alpha: float, beta: float, eps: float, within_buffer: bool) -> None:
        self.alpha, self.eps, self.within_buffer = alpha, eps, within_buffer
        self.capacity, self.num_streams, self.device = block.capacity, block.num_streams, block.device
        num, device, wide = block.num_streams, block.device, torch.int64
        #: The row that stands for none: it never has a weight.
        self.sink = block.capacity * num
        self.weights = torch.full((-(-(self.sink + 1) // WIDTH) * WIDTH,), ABSENT, device=device)
        #: The largest priority so far, and the exponent of importance weights.
        self.top = torch.ones((), device=device)
        self.exponent = torch.tensor(-beta, device=device)
        #: The least weight there is, of the weights that were summed last.
        self.least = torch.ones((), device=device)
        #: Of each stream, when last looked at: its head and its first live step,
        self.seen = torch.zeros(2, num, dtype=wide, device=device)
        #: slot and lap of the row written last, what the ``room`` of a row has beyond its age, how many rows live,
        self.places = torch.zeros(4, num, dtype=wide, device=device)
        #: the newest row if its successor is not known, else the sink, and its weight.
        self.newest = torch.full((num,), self.sink, dtype=wide, device=device)
        self.held = torch.full((num,), ABSENT, device=device)
        #: Whether any weight may be held aside.
        self.holds = True
        self.streams = torch.arange(num, device=device)
        self.claims = torch.zeros(self.sink + 1, dtype=torch.int32, device=device)
        self._key: tuple[tuple[int, int], np.ndarray] | None = None
        self.stale = True

    def fits(self, block: SlotBlock) -> bool:
        """Whether the table is of a block of this geometry."""
        return (self.capacity, self.num_streams, self.device) == (block.capacity, block.num_streams, block.device)

    def weigh(self, priority: torch.Tensor) -> torch.Tensor:
        """Returns the float32 weights of float32 priorities."""
        power = (priority + self.eps).pow_(self.alpha)
        weight = power.clamp(1 / MOST, MOST)
        return weight if self.eps > 0 else torch.where(power > 0, weight, ABSENT)

    # ------------------------------------------------------------------ following the storage

    def refresh(self, storage: SlotStorage) -> None:
        """Takes in what was written, cut or emptied since the last look."""
        block, captured = storage.block, capturing(storage.block)
        # What the host knows without waiting: a write changes its positions, on every device, or promises to; a cut and
        # an emptying change them too, and a load the revision.
        late, positions = block.written
        key, last = ((storage._content_revision, late), positions), self._key
        if last is not None and not captured and last[0] == key[0] and np.array_equal(last[1], key[1]):
            return
        self.put_back()
        self._advance(block, key[1])
        self.take_out(block)
        if not captured:
            self._key = key

    @abstractmethod
    def _advance(self, block: SlotBlock, positions: np.ndarray) -> None:
        """Moves on to the positions of a block; on the host these are ``positions``, a copy no other writer changes."""

    def put_back(self) -> None:
        """Gives every live row its weight, so that weights may change; :meth:`take_out` must follow."""
        if self.holds:
            self.weights.index_copy_(0, self.newest, self.held)

    def take_out(self, block: SlotBlock) -> None:
        """Leaves a weight to sampleable rows only."""
        if self.holds:
            torch.index_select(self.weights, 0, self.newest, out=self.held)
            self.weights.index_fill_(0, self.newest, ABSENT)
        if block.may_have_holes:
            step, low = block.hole_step, self.seen[1].unsqueeze(-1)
            at = step.remainder(self.capacity) * self.num_streams + self.streams.unsqueeze(-1)
            self.weights.index_fill_(0, torch.where(step >= low, at, self.sink).flatten(), ABSENT)
        self.stale = True

    def new_weight(self) -> torch.Tensor:
        """float32 ``[]``: what new rows weigh, asked before they have a weight."""
        if not self.within_buffer:
            return self.weigh(self.top)
        most = self.weights.max()
        return torch.where(most > 0, most, self.weigh(torch.ones_like(self.top)))

    # ------------------------------------------------------------------ drawing and updating

    @abstractmethod
    def draw(self, block: SlotBlock, count: int, generator: torch.Generator | None) -> Draw | None:
        """Draws rows of a table that is up to date; None on the host when no row has a weight."""

    @abstractmethod
    def importance(self, at: torch.Tensor | np.ndarray) -> torch.Tensor:
        """Returns the importance weights of rows that were drawn last, float32, like ``at``."""

    @abstractmethod
    def update(
        self, block: SlotBlock, index: torch.Tensor, generation: torch.Tensor | None, priority: torch.Tensor
    ) -> torch.Tensor:
        """Sets the priorities float32 ``[M]`` of rows (slot, stream) int64 ``[2, M]``; returns which were set.

        Without generations whatever lives there is meant. Of several entries for one row the last is taken. The table
        must be up to date.
        """

    def locate(self, places: Array, slot: Array) -> tuple[Array, ...]:
        """Returns how many rows were written after a row, its generation, and the last two of its stream's places."""
        last, lap, extra, live = places
        behind = last - slot
        older = (behind < 0) * 1
        return behind + older * self.capacity, lap - older, extra, live

    # ------------------------------------------------------------------ saving

    def state(self) -> dict[str, Any]:
        """Returns host copies of all that :meth:`load` needs."""
        used = used_slots(self.seen, self.capacity)
        weights = self.weights.index_copy(0, self.newest, self.held)[: used * self.num_streams]
        copies = {"weights": weights, "seen": self.seen, "top": self.top}
        sizes = {"capacity": self.capacity, "num_streams": self.num_streams}
        return {**sizes, **{name: value.cpu().clone() for name, value in copies.items()}}

    def load(self, state: dict[str, Any] | None) -> None:
        """Forgets everything and takes a state of the same geometry; :meth:`refresh` holds it against the storage."""
        self.weights.fill_(ABSENT)
        self.held.fill_(ABSENT)
        self.newest.fill_(self.sink)
        self.seen.zero_()
        self.top.fill_(1.0)
        self._key = None
        if state is not None:
            self.weights[: len(state["weights"])] = state["weights"].to(self.device)
            self.seen.copy_(state["seen"])
            self.top.copy_(state["top"])


class HostPriorities(PriorityTable):
    """The table of a storage on the host: touches as many rows as were written, died or are updated."""

    def __init__(self, block: SlotBlock, **options: Any) -> None:
        super().__init__(block, **options)
        self._weights, self._claims, self._places = (t.numpy() for t in (self.weights, self.claims, self.places))
        self._sums = BlockSums(self.weights)
        self._in_step = False

    def _advance(self, block: SlotBlock, positions: np.ndarray) -> None:
        head, low = positions[HEAD], np.maximum(positions[TAIL], positions[RESERVED] - self.capacity)
        high = np.maximum(low, head - ((positions[NEWEST] == UNKNOWN) & block.layout.derives))
        seen = self.seen.numpy()
        seen_head, seen_low = seen
        if (head < seen_head).any() or (low < seen_low).any():
            # Another state was loaded: which of its records were here before, nobody knows.
            self.weights.fill_(ABSENT)
            seen_head = seen_low = low
        first = np.maximum(seen_head, low)
        self._fill(seen_low, np.minimum(low, seen_head), ABSENT)
        if self.within_buffer:
            self._fill(first, head, ABSENT)
        self._fill(first, head, float(self.new_weight()))
        seen[:] = head, low
        last = head - 1
        self._places[:] = last % self.capacity, last // self.capacity, high - last, head - low
        self._in_step = bool((self._places == self._places[:, :1]).all())
        newest = self._places[0] * self.num_streams + np.arange(self.num_streams)
        self.holds = bool((high < head).any())
        self.newest.numpy()[:] = np.where(high < head, newest, self.sink)

    def _places_of(self, stream: np.ndarray) -> np.ndarray:
        return self._places[:, 0] if self._in_step else self._places[:, stream]

    def _fill(self, first: np.ndarray, stop: np.ndarray, weight: float) -> None:
        """Sets the weights of the steps ``first <= step < stop`` of each stream."""
        count = np.clip(stop - first, 0, self.capacity)
        start, steps = int(first[0] % self.capacity), int(count[0])
        if (count == steps).all() and (steps in (0, self.capacity) or (first % self.capacity == start).all()):
            grid = self._weights[: self.sink].reshape(self.capacity, self.num_streams)
            grid[start : start + steps] = weight
            grid[: max(start + steps - self.capacity, 0)] = weight
            return
        stream = np.repeat(np.arange(self.num_streams), count)
        rank = np.arange(len(stream)) - np.repeat(count.cumsum() - count, count)
        self._weights[(first[stream] + rank) % self.capacity * self.num_streams + stream] = weight

    def draw(self, block: SlotBlock, count: int, generator: torch.Generator | None) -> Draw[np.ndarray] | None:
        if self.stale:
            self._sums.rebuild()
            self.least.fill_(float(self._sums.least()))
            self.stale = False
        if self._sums.empty:
            return None
        at = self._sums.draw(count, generator)
        slot = at // self.num_streams
        stream = at - slot * self.num_streams
        age, generation, extra, _ = self.locate(self._places_of(stream), slot)
        return Draw(at, age + extra, 1, stream, slot, generation)

    def importance(self, at: torch.Tensor | np.ndarray) -> torch.Tensor:
        ratio = self._weights[np.asarray(at)] / np.float32(self.least)
        return torch.from_numpy(ratio ** np.float32(self.exponent))

    def update(
        self, block: SlotBlock, index: torch.Tensor, generation: torch.Tensor | None, priority: torch.Tensor
    ) -> torch.Tensor:
        slot, stream = index.numpy()
        # Negative numbers are huge ones without a sign.
        inside = (slot.view(np.uint64) < self.capacity) & (stream.view(np.uint64) < self.num_streams)
        age, lap, _, live = self.locate(self._places_of(np.where(inside, stream, 0)), slot)
        meant = inside & (age < live)
        if generation is not None:
            meant &= lap == generation.numpy()
        entry = np.flatnonzero(meant)
        at, order = (slot * self.num_streams + stream)[entry], np.arange(len(entry), dtype=np.int32)
        # A maximum does not depend on the order in which it is taken; what a scatter leaves behind does.
        self._claims[at] = -1
        np.maximum.at(self._claims, at, order)
        last = self._claims[at] == order
        self.top.clamp_(min=float(priority.numpy()[entry].max(initial=0.0)))
        entry, weight = entry[last], self.weigh(priority).numpy()
        self.put_back()
        self._weights[at[last]] = weight[entry]
        self.take_out(block)
        taken = np.zeros(len(slot), dtype=bool)
        taken[entry] = True
        return torch.from_numpy(taken)


def used_slots(seen: torch.Tensor, capacity: int) -> int:
    """Returns how many slots, counted from the first, hold all rows of streams at ``seen`` (head and first step)."""
    head, low = seen
    # Where nothing was overwritten yet, rows lie in the leading slots.
    return capacity if bool((low % capacity).any()) else max(0, int((head - low).max()))


def capturing(block: SlotBlock) -> bool:
    """Whether what is done now to a block is captured in a CUDA graph."""
    return block.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
