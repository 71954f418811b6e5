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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from tensordict import NestedKey

from torchrl_ext.data._block import CUT, FINALS, HEAD, NEWEST, PENDING, TAIL, UNKNOWN, SlotBlock, items
from torchrl_ext.data.fields import next_of
from torchrl_ext.data.grouping import group_rows
from torchrl_ext.data.layout import FOLLOWED, NO_SUCCESSOR, RowLayout
from torchrl_ext.data.packing import Ends, PackedRun, Run, differ


@dataclass
class FinalPlan:
    """What a write will do to the side table; made before the first byte is written."""

    promoted: np.ndarray | None = None
    """Streams whose pending successor becomes final, ids ``[P]``."""
    order: np.ndarray | None = None
    """Which of the run's finals the next three speak of; None for all, as they are."""
    streams: np.ndarray | None = None
    steps: np.ndarray | None = None
    sequence: np.ndarray | None = None
    counts: np.ndarray | None = None
    """How many finals each stream of the storage gets; None when none gets two."""
    needed: int = 0
    """Entries per stream that the write needs, the pending one included; 0 when the table is known to suffice."""


def plan_finals(
    block: SlotBlock,
    source: Run | PackedRun,
    ends: Ends | PackedRun,
    columns: slice,
    num_steps: int,
    first: np.ndarray,
    head: int | None,
) -> FinalPlan:
    """Decides promotions and places of final observations for a run of a column block.

    ``first`` are the heads of its streams, and ``head`` is that of all of them, None where they differ.
    """
    positions = block.np_positions
    plan = FinalPlan()
    # With a whole lap or more the newest row dies in this write, and its successor with it.
    if num_steps < block.capacity:
        pending = positions[NEWEST, columns] == PENDING
        if block.layout.next_keys and np.count_nonzero(pending):
            ids = np.flatnonzero(pending)
            shown = _first_observations(block.layout, source)
            if len(ids) < columns.stop - columns.start:
                at = torch.from_numpy(ids)
                shown = {key: leaf[at.to(leaf.device)] for key, leaf in shown.items()}
            plan.promoted = unequal_pending(block, ids + columns.start, shown)
    if not block.layout.derives:
        return plan
    if plan.promoted is not None:
        sequence = positions[FINALS, plan.promoted]
        plan.needed = needed_entries(block, plan.promoted, sequence, num_steps)
    if ends.final_rows is None or not ends.final_rows.shape[0]:
        return plan
    step, stream = np.divmod(ends.final_rows.numpy(), columns.stop - columns.start)
    if columns.start:
        stream += columns.start
    dropped = num_steps - block.capacity
    if dropped > 0:
        plan.order = np.flatnonzero(step >= dropped)
        step, stream = step[plan.order], stream[plan.order]
    plan.sequence = positions[FINALS].take(stream)
    most = 0
    if plan.promoted is not None:
        also = np.isin(stream, plan.promoted)
        plan.sequence += also
        most = int(also.any())
    if len(stream) and np.bincount(stream).max() > 1:
        _, rank, plan.counts = group_rows(stream, block.num_streams)
        plan.sequence += rank
        most += int(rank.max())
    plan.streams, plan.steps = stream, step + (first[stream - columns.start] if head is None else head)
    plan.needed = max(plan.needed, needed_entries(block, stream, plan.sequence, num_steps, most))
    return plan


def needed_entries(block: SlotBlock, streams: np.ndarray, sequence: np.ndarray, num_steps: int, most: int = 0) -> int:
    """Returns 0 when new entries fit the side table, else how many per stream surely suffice.

    An entry fits when the owner of the place after its own, which the next pending successor takes, is dead once the
    write is done. Entries of a stream die in order, so the owners of earlier places are dead then too.

    Args:
        streams, sequence (np.ndarray): of each new entry.
        num_steps (int): steps that the write adds to the streams.
        most (int): how many entries of the same write come before an entry of the same stream, at most.
    """
    positions, capacity = block.np_positions, block.final_capacity
    owner = block.np_entry_step.take(streams * capacity + (sequence + 1) % capacity)
    held = owner >= positions[HEAD].take(streams) + (num_steps - block.capacity)
    if np.count_nonzero(held):  # rows before the tail are dead as well, which is rarely what decides
        held &= owner >= positions[TAIL, streams]
    fits = most + 2 <= capacity and not np.count_nonzero(held)
    return 0 if fits else capacity + most + 2


def _first_observations(layout: RowLayout, source: Run | PackedRun) -> dict[NestedKey, torch.Tensor]:
    if not isinstance(source, PackedRun):
        return source.first
    return layout.leaves(source.rows[0], [layout.by_key[key] for key in layout.next_keys if key in layout.by_key])


def unequal_pending(block: SlotBlock, ids: np.ndarray, shown: Mapping[NestedKey, torch.Tensor]) -> np.ndarray | None:
    """Returns the streams whose pending successor is not what comes next, None when there is none.

    Args:
        block (SlotBlock): of the streams.
        ids (np.ndarray): streams with a pending successor.
        shown (mapping): what comes next, ``[len(ids), *feature]`` by next key.
    """
    layout = block.layout
    if layout.derives:
        place = block.np_positions[FINALS, ids] % block.final_capacity
        side = torch.from_numpy(block.side_start + ids * block.final_capacity + place)
        known = layout.leaves(block.successor_words.index_select(0, side).view(torch.uint8), layout.prefix)
    else:
        stored = block.words.index_select(0, torch.from_numpy(_newest_rows(block, ids))).view(torch.uint8)
        known = layout.leaves(stored, [layout.by_key[next_of(key)] for key in layout.next_keys])
        known = {key[1] if len(key) == 2 else key[1:]: leaf for key, leaf in known.items()}
    unequal = torch.zeros(len(ids), dtype=torch.bool)
    for key, leaf in known.items():
        if key in shown:
            unequal |= differ(leaf, shown[key].to(leaf.device), 1)
    ids = ids[unequal.numpy()]
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
    rows, place = store_finals(block, plan, ends)
    block.np_final[rows] = place


def store_finals(block: SlotBlock, plan: FinalPlan, ends: Ends | PackedRun) -> tuple[np.ndarray, np.ndarray]:
    """Stores the final observations of a run and returns the hidden ``final`` of its rows: where it goes, and what."""
    planned = plan.streams, plan.steps, plan.sequence
    streams, steps, sequence = cast("tuple[np.ndarray, np.ndarray, np.ndarray]", planned)
    place = sequence % block.final_capacity
    entry = streams * block.final_capacity + place
    finals = items(_on_host(cast(torch.Tensor, ends.finals), block))
    block.successor_items[block.side_start + entry] = finals if plan.order is None else finals[plan.order]
    block.np_entry_step[entry] = steps
    if plan.counts is None:
        block.np_positions[FINALS][streams] = sequence + 1
    else:
        block.np_positions[FINALS] += plan.counts
    return steps % block.capacity * block.num_streams + streams, place.astype(np.int32)


def common_head(heads: np.ndarray) -> int | None:
    """Returns where all streams stand, None where their heads differ."""
    head = int(heads[0])
    return None if np.count_nonzero(heads != head) else head


def newest_state(
    block: SlotBlock, ends: Ends | PackedRun, columns: slice, heads: np.ndarray, head: int | None
) -> np.ndarray | int:
    """Stores the pending successors of the newest rows, whose heads are new, and returns what is known of them."""
    if head is not None:
        first = (head - 1) % block.capacity * block.num_streams
        final = block.np_final[first + columns.start : first + columns.stop]
    else:
        ids = np.arange(columns.start, columns.stop)
        final = block.np_final[(heads - 1) % block.capacity * block.num_streams + ids]
    if ends.tail is not None and block.layout.derives:
        keep_pending(block, np.arange(columns.start, columns.stop), ends.tail)
    known, cut = known_newest(block, ends.tail), final != FOLLOWED
    return np.where(cut, CUT, known) if np.count_nonzero(cut) else known


def known_newest(block: SlotBlock, tail: torch.Tensor | None) -> int:
    """Returns the state of a newest row that is not cut, given the successors that came with it or None."""
    return PENDING if tail is not None or not block.layout.derives else UNKNOWN


def keep_pending(block: SlotBlock, ids: np.ndarray, tail: torch.Tensor) -> None:
    """Stores the pending successors of streams; their finals are counted already."""
    side = block.side_start + ids * block.final_capacity + block.np_positions[FINALS, ids] % block.final_capacity
    block.successor_items[side] = items(_on_host(tail, block))


def _on_host(successors: torch.Tensor, block: SlotBlock) -> np.ndarray:
    """Fields of a run may lie on a device, and what was packed of them then does too."""
    return successors.cpu().numpy()[:, : block.layout.successor_bytes]


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
        new.successor_items[target] = old.successor_items[old.side_start + keep * capacity + place[keep]]
        if back:
            new.np_final_step[keep, moved[keep]] = step[keep]
            new.np_final[step[keep] % old.capacity * old.num_streams + keep] = moved[keep]
