# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Newly completed windows, each served once.

The steps of a stream are cut into windows that do not overlap, and one cursor per stream, the next step not served,
says which of them were. So nothing is queued, writes cost nothing, and what was overwritten is passed over by moving
the cursor. Heads and tails are known to the host on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchrl_ext.data._block import HEAD, NEWEST, RESERVED, TAIL, UNKNOWN, SlotBlock
from torchrl_ext.data._windows import Windows, split_at_holes

if TYPE_CHECKING:
    from torchrl_ext.data.storages import SlotStorage

_NEVER = 2**62


class FreshWindows:
    """The cursors of all streams.

    Args:
        seq_len (int): steps of a window.

    Attributes:
        cursor (np.ndarray, optional): int64 ``[N]``; None until the first draw, when streams start at their tails.
        turn (int): the stream that comes first among equals.
    """

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len
        self.cursor: np.ndarray | None = None
        self.turn = 0
        self._before: tuple[np.ndarray | None, int] = None, 0
        self._holes: tuple[int, np.ndarray] | None = None

    def take(self, storage: SlotStorage, count: int) -> Windows[np.ndarray]:
        """Returns up to ``count`` windows that were not served yet, and counts them as served.

        The window that lies the most steps behind its stream's head comes first (it is overwritten first); where that
        is equal, streams take turns. So none starves, also when more is written than is served.
        """
        block, seq_len = storage.block, self.seq_len
        cursor, high = self._advanced(block), self._complete(storage)
        self._before = self.cursor, self.turn
        self.cursor = cursor
        first, last = cursor[:, None], high[:, None]
        if block.may_have_holes:
            parts = map(torch.from_numpy, (cursor, high, self._live_holes(storage, cursor)))
            first, last = (part.numpy() for part in split_at_holes(*parts))
        # No more than ``count`` of a stream can be among the first.
        counts = ((last - first) // seq_len).clip(0, count).ravel()
        total = int(counts.sum())
        if not total:
            return Windows(np.empty(0, np.int64), np.empty(0, np.int64))
        run = np.repeat(np.arange(len(counts)), counts)
        rank = np.arange(total) - (counts.cumsum() - counts)[run]
        step, stream = first.ravel()[run] + rank * seq_len, run // first.shape[1]
        behind = step - block.np_positions[HEAD, stream]
        order = np.lexsort(((stream - self.turn) % block.num_streams, behind))[:count]
        step, stream = step[order], stream[order]
        self.cursor = cursor.copy()
        self.cursor[stream] = step + seq_len  # a stream's windows are in order, and the last assignment holds
        self.turn = int(stream[-1] + 1) % block.num_streams
        return Windows(stream, step)

    def take_back(self) -> None:
        """Forgets that the windows of the last :meth:`take` were served."""
        self.cursor, self.turn = self._before

    def _advanced(self, block: SlotBlock) -> np.ndarray:
        """The cursors behind what died: by whole windows, or to the tail of a stream that was emptied."""
        tail = block.np_positions[TAIL]
        if self.cursor is None:
            self.cursor = tail.copy()
        if len(self.cursor) != block.num_streams:
            raise ValueError(
                f"SequenceSampler: a loaded state must have one cursor per stream ({block.num_streams}), got "
                f"{len(self.cursor)}. Nothing was drawn."
            )
        cursor = np.maximum(self.cursor, tail)
        lost = np.maximum(block.np_positions[RESERVED] - block.capacity - cursor, 0)
        return cursor + -(-lost // self.seq_len) * self.seq_len

    @staticmethod
    def _complete(storage: SlotStorage) -> np.ndarray:
        """The steps below which windows can be served now."""
        block = storage.block
        high = block.np_positions[HEAD]
        if storage.has_other_writers:
            # What a writer may disturb while it is read would be read again and again: its newest two rows.
            return high - 2
        # The host's copy says UNKNOWN also where only a device knows that the row is cut; it waits for the next write.
        return high - (block.np_positions[NEWEST] == UNKNOWN) if block.layout.derives else high

    def _live_holes(self, storage: SlotStorage, cursor: np.ndarray) -> np.ndarray:
        """The holes of each stream from its cursor on, ascending, int64 ``[N, H]``, unused places at the end."""
        block = storage.block
        if block.on_device:
            # Holes come from ``end_streams`` and loads, which wait for the device anyway: read back once after each.
            if self._holes is None or self._holes[0] != storage._content_revision:
                self._holes = storage._content_revision, block.hole_step.cpu().numpy()
            holes = self._holes[1]
        else:
            holes = block.np_hole_step
        return np.sort(np.where(holes >= cursor[:, None], holes, _NEVER), -1)

    def state(self) -> dict[str, Any]:
        """Returns the cursors and the turn, copied."""
        return {"cursor": None if self.cursor is None else torch.from_numpy(self.cursor.copy()), "turn": self.turn}

    @classmethod
    def from_state(cls, seq_len: int, state: dict[str, Any]) -> FreshWindows:
        """Makes what :meth:`state` describes; raises ``ValueError`` when it is damaged."""
        if not isinstance(state, Mapping):
            raise ValueError(
                f"SequenceSampler: the state must be a dict, got {type(state).__name__}. Nothing was changed."
            )
        cursor, turn = state.get("cursor", ""), state.get("turn")
        ok = cursor is None or (isinstance(cursor, torch.Tensor) and cursor.dtype == torch.int64 and cursor.dim() == 1)
        if not ok or not isinstance(turn, int):
            raise ValueError(
                "SequenceSampler: the state must have a cursor (int64 [N] or None) and a turn (int), got "
                f"{list(state)}. Nothing was changed."
            )
        fresh = cls(seq_len)
        fresh.cursor, fresh.turn = None if cursor is None else cursor.cpu().numpy().copy(), turn
        return fresh
