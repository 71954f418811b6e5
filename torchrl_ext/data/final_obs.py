# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Final observations: the side table of a storage in host memory.

State      Entries of stream ``s`` form a ring of ``F``: the ``q``-th final observation lies at ``q % F``, its owner's
           step in ``final_step``, its place in the owner's hidden ``final``. ``positions[FINALS]`` counts them.
Pending    The place of the next entry holds the successor of the stream's newest row. When the next first observation
           equals it, it is simply overwritten later; when it differs, counting it makes it final (promotion).
Lifetime   An entry lives exactly as long as its row: rows of a stream die in the order they were written, so a ring of
           entries never loses a live one as long as at most ``F - 1`` live at once (checked before writing).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from torchrl_ext.data._block import CUT, FINALS, HEAD, NEWEST, PENDING, TAIL, UNKNOWN, SlotBlock
from torchrl_ext.data.grouping import rank_in_group
from torchrl_ext.data.layout import FOLLOWED, NO_SUCCESSOR, next_of
from torchrl_ext.data.packing import Ends, PackedRun, Run, differ


@dataclass
class FinalPlan:
    """What a write will do to the side table; made before the first byte is written."""

    promoted: np.ndarray | None
    """Streams whose pending successor becomes final, ids ``[P]``."""
    order: np.ndarray | None
    """Which of the run's finals, sorted by stream."""
    streams: np.ndarray | None
    steps: np.ndarray | None
    sequence: np.ndarray | None
    needed: int
    """Entries per stream that the write needs, the pending one included."""


def plan_finals(
    block: SlotBlock, source: Run | PackedRun, ends: Ends | PackedRun, streams: slice, dropped: int
) -> FinalPlan:
    """Decides promotions and places of final observations for a run of a column block."""
    positions, start, stop = block.np_positions, streams.start, streams.stop
    head = positions[HEAD, start:stop]
    num_steps, width = source.rows.shape[:2] if isinstance(source, PackedRun) else (source.num_steps, stop - start)
    # With a whole lap or more the newest row dies in this write, and its successor with it.
    promoted = None if num_steps >= block.capacity else _unequal_pending(block, source, streams)
    if promoted is not None and not block.layout.derives:
        return FinalPlan(promoted, None, None, None, None, 0)
    order = stream = steps = sequence = None
    if ends.final_rows is not None and len(ends.final_rows):
        at = ends.final_rows.numpy()
        step, stream = np.divmod(at, width)
        kept = step >= dropped
        order, rank = rank_in_group(stream[kept])
        order = np.flatnonzero(kept)[order]
        stream = stream[order] + start
        steps = positions[HEAD, stream] + step[order]
        sequence = positions[FINALS, stream] + rank
        if promoted is not None:
            sequence += np.isin(stream, promoted)
    low = np.maximum(positions[TAIL, streams], head + num_steps - block.capacity)
    touched = [ids for ids in (promoted, stream) if ids is not None and len(ids)]
    needed = needed_entries(block, low, np.concatenate(touched), start) if touched else 0
    return FinalPlan(promoted, order, stream, steps, sequence, needed)


def needed_entries(block: SlotBlock, low: np.ndarray, streams: np.ndarray, first_stream: int = 0) -> int:
    """Returns the entries per stream needed once each mention in ``streams`` has added one, the pending one included.

    Args:
        low (np.ndarray): the first live step after the write, of the streams from ``first_stream`` on.
        streams (np.ndarray): ids, repeated for each new entry.
        first_stream (int): the id of ``low[0]``. Defaults to 0.
    """
    ids, added = np.unique(streams, return_counts=True)
    live = (block.np_final_step[ids] >= low[ids - first_stream, None]).sum(1)
    return int((live + added).max()) + 1


def _unequal_pending(block: SlotBlock, source: Run | PackedRun, streams: slice) -> np.ndarray | None:
    """Returns the streams whose pending successor is not the first observation of the run, None when there is none."""
    ids = np.flatnonzero(block.np_positions[NEWEST, streams] == PENDING)
    if not len(ids):
        return None
    layout = block.layout
    at = torch.from_numpy(ids)
    if layout.derives:
        rows = at + streams.start
        place = torch.from_numpy(block.np_positions[FINALS, streams][ids] % block.final_capacity)
        side = block.side_start + rows * block.final_capacity + place
        known = layout.leaves(block.successor_words.index_select(0, side).view(torch.uint8), layout.prefix)
    else:
        stored = block.rows[torch.from_numpy(_newest_rows(block, ids + streams.start))]
        known = layout.leaves(stored, [layout.by_key[next_of(key)] for key in layout.next_keys])
        known = {key[1] if len(key) == 2 else key[1:]: leaf for key, leaf in known.items()}
    if isinstance(source, PackedRun):
        first = layout.leaves(source.rows[0], [layout.by_key[key] for key in known])
    else:
        first = source.first
    unequal = torch.zeros(len(ids), dtype=torch.bool)
    for key, leaf in known.items():
        if key in first:
            value = first[key] if len(ids) == len(first[key]) else first[key][at.to(first[key].device)]
            unequal |= differ(leaf, value.to(leaf.device), 1)
    ids = ids[unequal.numpy()] + streams.start
    return ids if len(ids) else None


def _newest_rows(block: SlotBlock, streams: np.ndarray) -> np.ndarray:
    return (block.np_positions[HEAD, streams] - 1) % block.capacity * block.num_streams + streams


def promote(block: SlotBlock, streams: np.ndarray) -> None:
    """Makes the pending successor of the streams' newest rows their final observation."""
    rows = _newest_rows(block, streams)
    if not block.layout.derives:
        block.np_final[rows] = NO_SUCCESSOR  # the successor is in the row itself
        return
    positions = block.np_positions
    place = positions[FINALS, streams] % block.final_capacity
    block.np_final[rows] = place
    block.np_final_step[streams, place] = positions[HEAD, streams] - 1
    positions[FINALS, streams] += 1


def write_finals(block: SlotBlock, plan: FinalPlan, ends: Ends | PackedRun) -> None:
    """Stores the final observations of a run whose rows are already in the ring; heads are still the old ones."""
    if plan.order is None or not len(plan.order):
        return
    place = plan.sequence % block.final_capacity
    finals = ends.finals.numpy()[:, : block.layout.successor_bytes]
    block.np_successors[block.side_start + plan.streams * block.final_capacity + place] = finals[plan.order]
    block.np_final[plan.steps % block.capacity * block.num_streams + plan.streams] = place
    block.np_final_step[plan.streams, place] = plan.steps
    block.np_positions[FINALS, plan.streams] = plan.sequence + 1


def write_newest(block: SlotBlock, ends: Ends | PackedRun, streams: slice) -> None:
    """Notes what is known of the newest rows' successors and stores the pending ones; heads are the new ones."""
    positions = block.np_positions
    ids = np.arange(streams.start, streams.stop)
    known = PENDING if ends.tail is not None or not block.layout.derives else UNKNOWN
    final = block.np_final[_newest_rows(block, ids)]
    positions[NEWEST, streams] = np.where(final == FOLLOWED, known, CUT)
    if ends.tail is not None and block.layout.derives:
        place = positions[FINALS, streams] % block.final_capacity
        side = block.side_start + ids * block.final_capacity + place
        block.np_successors[side] = ends.tail.numpy()[:, : block.layout.successor_bytes]


def moved_finals(old: SlotBlock, new: SlotBlock) -> None:
    """Copies live and pending entries of a side table into a larger one and renumbers their owners."""
    positions, capacity = old.np_positions, old.final_capacity
    low = np.maximum(positions[TAIL], positions[HEAD] - old.capacity)
    for back in range(capacity):
        sequence = positions[FINALS] - back  # back == 0 is the pending one
        place, moved = sequence % capacity, sequence % new.final_capacity
        step = old.np_final_step[np.arange(old.num_streams), place]
        keep = np.flatnonzero((sequence >= 0) & ((step >= low) | (back == 0)))
        target = new.side_start + keep * new.final_capacity + moved[keep]
        new.np_successors[target] = old.np_successors[old.side_start + keep * capacity + place[keep]]
        if back:
            new.np_final_step[keep, moved[keep]] = step[keep]
            new.np_final[step[keep] % old.capacity * old.num_streams + keep] = moved[keep]
