# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Windows of consecutive steps of one stream: where they may start, and uniform draws.

A window of ``T`` steps may start at step ``s`` of a stream when all of ``s .. s + T - 1`` live and, where successors
are derived, the last one's is known and no hole is among them. So the valid starts of a stream are runs of consecutive
steps, one run more than it has holes, and a draw is one search in the running count of starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, cast

import numpy as np
import torch

from torchrl_ext.data import _fused as fused
from torchrl_ext.data._block import HEAD, NEWEST, RESERVED, TAIL, UNKNOWN, SlotBlock
from torchrl_ext.data.draws import Array, lockstep, uniform_ordinals
from torchrl_ext.data.positions import live_holes, sampleable_range

if TYPE_CHECKING:
    from torchrl_ext.data.storages import SlotStorage


@dataclass(frozen=True)
class Windows(Generic[Array]):
    """Drawn windows: the stream and the first step of each, int64 ``[B]``."""

    stream: Array
    step: Array

    def __len__(self) -> int:
        return len(self.step)

    def unwrapped(self, num_streams: int) -> Array:
        """Returns ``step * N + stream``: the flat row of each first step if the ring had no end, int64 ``[B]``.

        The rows of a window are ``N`` apart; modulo ``capacity * N`` they are rows of the ring, and how often that
        goes into them is their generation.
        """
        rows: Any = self.step * num_streams + self.stream
        return rows


@dataclass
class Starts(Generic[Array]):
    """Valid starts, as runs of consecutive steps; each stream has ``per_stream`` of them, stream by stream.

    Attributes:
        ends: int64 ``[R]``, how many starts there are up to the end of each run.
        offset: int64 ``[R]``, the step of a start minus its number among all starts.
        per_stream (int): runs of a stream.
        row_offset: int64 ``[N]``, for fused draws: the number of a row among all sampleable rows minus its step.
    """

    ends: Array
    offset: Array
    per_stream: int
    row_offset: torch.Tensor | None = None

    @classmethod
    def of(cls, first: Array, counts: Array, row_offset: torch.Tensor | None = None) -> Starts[Array]:
        """Counts runs ``[N, per_stream]`` given by their first steps and lengths."""
        flat: Any = counts.reshape(-1)
        ends = flat.cumsum(0)
        return cls(ends, first.reshape(-1) - (ends - flat), first.shape[1], row_offset)

    def locate(self, ordinal: Array) -> Windows[Array]:
        """Turns numbers of starts into windows."""
        run: Any
        if isinstance(self.ends, torch.Tensor):
            run = torch.searchsorted(self.ends, cast(torch.Tensor, ordinal), right=True)
            run.clamp_(max=len(self.ends) - 1)
        else:
            run = self.ends.searchsorted(ordinal, side="right")
        step: Any = self.offset[run] + ordinal
        return Windows(run if self.per_stream == 1 else run // self.per_stream, step)


def split_at_holes(low: torch.Tensor, high: torch.Tensor, holes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits steps ``low <= step < high`` at the holes ``[N, H]`` among them, ascending, unused ones at the end.

    Returns:
        tuple: first steps and ends of the runs between, int64 ``[N, H + 1]`` each; a run may be empty or negative.
    """
    first = torch.cat([low.unsqueeze(-1), holes + 1], -1)
    last = torch.cat([holes, high.unsqueeze(-1)], -1)
    return first, torch.minimum(last, high.unsqueeze(-1))


def sampleable(block: SlotBlock) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns ``low`` and ``high`` of :func:`sampleable_range`, and :attr:`Starts.row_offset` where kernels run."""
    if not fused.available(block):
        return *sampleable_range(block), None
    running, low, high, _ = fused.sampleable_table(block).unbind()  # one kernel instead of twenty
    return low, high, running - high


def valid_starts(block: SlotBlock, seq_len: int) -> Starts[torch.Tensor]:
    """Returns the starts of all windows, episode ends inside them allowed."""
    low, high, row_offset = sampleable(block)
    if block.may_have_holes:
        first, last = split_at_holes(low, high, live_holes(block, low))
    else:
        first, last = low.unsqueeze(-1), high.unsqueeze(-1)
    return Starts.of(first, (last - first - (seq_len - 1)).clamp_(min=0), row_offset)


def valid_starts_numpy(block: SlotBlock, seq_len: int) -> Starts[np.ndarray]:
    """Does what :func:`valid_starts` does for a host block, where NumPy costs a third."""
    if block.may_have_holes:
        starts = valid_starts(block, seq_len)
        return Starts(starts.ends.numpy(), starts.offset.numpy(), starts.per_stream)
    positions = block.np_positions
    low, high = np.maximum(positions[TAIL], positions[RESERVED] - block.capacity), positions[HEAD]
    if block.layout.derives:
        high = high - (positions[NEWEST] == UNKNOWN)
    return Starts.of(low[:, None], np.maximum(high - low - (seq_len - 1), 0))


def surely_valid(block: SlotBlock, seq_len: int) -> bool:
    """Whether the host knows, without asking a device, that a window may start somewhere."""
    if block.longest <= seq_len:
        block.catch_up()
    # One row more than a window: whether the newest has its successor only the device knows.
    return block.longest > seq_len


def draw_from(
    starts: Starts[np.ndarray], num_streams: int, count: int, rng: torch.Generator | None
) -> np.ndarray | None:
    """Draws unwrapped first rows from valid starts of a host block uniformly; None when there is none."""
    total = int(starts.ends[-1])
    if not total:
        return None
    return starts.locate(torch.randint(total, (count,), generator=rng).numpy()).unwrapped(num_streams)


def draw_on_host(block: SlotBlock, seq_len: int, count: int, rng: torch.Generator | None) -> np.ndarray | None:
    """Draws unwrapped first rows of windows of a host block uniformly over all starts; None when there is none."""
    rows, num_streams = lockstep(block), block.num_streams
    if rows is None:
        return draw_from(valid_starts_numpy(block, seq_len), num_streams, count, rng)
    # Streams in step need no search: unwrapped rows are one range. Streams whose newest row is sampleable too have one
    # start more.
    each = rows.high - rows.low - seq_len + 1
    known = rows.known if each >= 0 else None
    whole = max(each, 0) * num_streams
    total = whole if known is None else whole + len(known)
    if not total:
        return None
    ordinal = torch.randint(total, (count,), generator=rng).numpy()
    if known is not None:
        newest = np.flatnonzero(ordinal >= whole)
        ordinal[newest] = whole + known[ordinal[newest] - whole]
    return ordinal + rows.low * num_streams


def draw_on_device(
    starts: Starts[torch.Tensor], block: SlotBlock, count: int, rng: torch.Generator | None
) -> Windows[torch.Tensor]:
    """Draws from valid starts on a device uniformly; there must be some."""
    return starts.locate(uniform_ordinals(block, starts.ends[-1], count, rng))


class KnownStarts:
    """Valid starts on a device, kept until the next write, and made anew inside a captured graph."""

    def __init__(self) -> None:
        self._kept: tuple[tuple, Starts[torch.Tensor]] | None = None

    def __getstate__(self) -> dict:
        return {"_kept": None}  # belongs to a device and to a storage

    def get(
        self,
        storage: SlotStorage,
        make: Callable[[SlotBlock], Starts[torch.Tensor]],
        *,
        sure: bool,
        refuse: Callable[[], NoReturn],
    ) -> Starts[torch.Tensor]:
        """Returns what ``make`` gives; calls ``refuse`` when that is nothing, unless the host is ``sure`` it is not."""
        block = storage.block
        if capturing(block):
            return make(block)
        # What is kept belongs to the CUDA stream that made it, whose later work may reuse its memory.
        stream = torch.cuda.current_stream(block.device) if block.device.type == "cuda" else None
        revision = block, int(block.np_positions[HEAD].sum()), storage._content_revision, stream
        if self._kept is None or self._kept[0] != revision:
            starts = make(block)
            # The only question to the device, at most once per write: whether there is anything to draw.
            if not sure and not int(starts.ends[-1]):
                refuse()
            self._kept = revision, starts
        return self._kept[1]


def capturing(block: SlotBlock) -> bool:
    """Whether the current CUDA stream records a graph."""
    return block.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
