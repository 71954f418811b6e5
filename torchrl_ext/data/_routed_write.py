# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Records of any streams in any order, written to host memory by one scatter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from torchrl_ext.data._block import CUT, FINALS, HEAD, NEWEST, PENDING, RESERVED, UNKNOWN, SlotBlock, items
from torchrl_ext.data._slot_write import grow
from torchrl_ext.data.final_obs import (
    FinalPlan,
    keep_pending,
    known_newest,
    needed_entries,
    promote,
    unequal_pending,
    write_finals,
)
from torchrl_ext.data.grouping import RowGroups, group_rows
from torchrl_ext.data.layout import FOLLOWED, RowLayout
from torchrl_ext.data.packing import Ends, Run, differ, ends, pack_successors, write_marks, write_rows

if TYPE_CHECKING:
    from torchrl_ext.data.storages import SlotStorage


def write_records(storage: SlotStorage, run: Run, ids: np.ndarray) -> torch.Tensor:
    """Writes checked records ``[M, 1]`` to the streams ``ids``, in arrival order inside each stream.

    Everything that can fail happens before the first byte is written, and the storage is then as if each record had
    been written by itself.

    Returns:
        torch.Tensor: int64 ``[M, 2]``, (slot, stream) of each record.
    """
    block = storage.block
    groups = group_rows(ids, block.num_streams)
    counts = groups.counts
    written = np.flatnonzero(counts)
    stops = counts.cumsum()
    newest = groups.order[stops[written] - 1]
    positions = block.np_positions
    steps = positions[HEAD, ids] + groups.rank
    kept = np.flatnonzero(groups.rank >= counts[ids] - block.capacity)
    cut = record_cuts(run, torch.from_numpy(groups.order), torch.from_numpy(ids)).numpy()
    plan = _plan(block, run, ids, groups, written)
    at = kept[cut[kept]]
    entries, marks = _plan_finals(block, plan, ids, steps, counts, at, has_entries=run.successors is not None)
    if plan.needed > block.final_capacity:
        block = grow(storage, finals=plan.needed)
        positions = block.np_positions
    finals = pack_records(block.layout, run, at) if entries else None
    tail = None if run.successors is None or not block.layout.derives else pack_records(block.layout, run, newest)
    rows = pack_rows(block.layout, run, torch.from_numpy(cut) if marks else None)

    block.sampleable = None
    # Not less than before: a writer that was killed may have torn what it had reserved.
    positions[RESERVED] = np.maximum(positions[RESERVED], positions[HEAD] + counts)
    if storage.has_other_writers and block.layout.derives:
        positions[NEWEST, written] = UNKNOWN
    target = steps % block.capacity * block.num_streams + ids
    _scatter(block, rows, target, kept)
    if plan.promoted is not None:
        promote(block, plan.promoted)
    if entries:
        write_finals(block, plan, Ends(None, finals, None, None))
    if tail is not None:
        keep_pending(block, written, tail)
    cut_newest = block.np_final[target[newest]] != FOLLOWED
    positions[NEWEST, written] = np.where(cut_newest, CUT, known_newest(block, tail))
    positions[HEAD] += counts
    return torch.from_numpy(np.stack([steps % block.capacity, ids], -1))


def record_cuts(run: Run, order: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns bool ``[M]``: records that are not followed by their true successor, see :func:`packing.cuts`.

    Args:
        run (Run): of records ``[M, 1]``.
        order (torch.Tensor): int64 ``[M]``, sorts the records by stream.
        ids (torch.Tensor): int64 ``[M]``, the stream of each record.
    """
    flagged = ends(run)
    count = run.num_steps
    cut = torch.zeros(count, dtype=torch.bool, device=run.device) if flagged is None else flagged.squeeze(1).clone()
    if run.successors is None or count < 2:
        return cut
    order = order.to(run.device)
    ordered = ids.to(run.device)[order]
    before, after = order[:-1], order[1:]
    unequal = torch.zeros(count - 1, dtype=torch.bool, device=run.device)
    for key, successor in run.successors.items():
        observation = run.leaves.get(key)
        if observation is not None:
            pair = successor.squeeze(1).index_select(0, before), observation.squeeze(1).index_select(0, after)
            unequal |= differ(*pair, 1)
    unequal &= ordered[:-1] == ordered[1:]
    return cut.index_put_((before,), unequal | cut[before])


def _plan(block: SlotBlock, run: Run, ids: np.ndarray, groups: RowGroups, written: np.ndarray) -> FinalPlan:
    """Decides which pending successors become final: those that the first new record of their stream does not show."""
    counts, plan = groups.counts, FinalPlan()
    # With a whole lap or more the newest row dies in this write, and its successor with it.
    pending = written[(block.np_positions[NEWEST, written] == PENDING) & (counts[written] < block.capacity)]
    if len(pending) and block.layout.next_keys:
        first = torch.from_numpy(groups.order[(groups.counts.cumsum() - counts)[pending]])
        keys = run.leaves if run.successors is None else run.successors
        shown = {key: run.leaves[key].squeeze(1).index_select(0, first) for key in keys if key in run.leaves}
        plan.promoted = unequal_pending(block, pending, shown)
    return plan


def _plan_finals(
    block: SlotBlock,
    plan: FinalPlan,
    ids: np.ndarray,
    steps: np.ndarray,
    counts: np.ndarray,
    at: np.ndarray,
    *,
    has_entries: bool,
) -> tuple[bool, bool]:
    """Finds places for the final observations of the records ``at``; says whether cuts have entries or are marks."""
    positions = block.np_positions
    if not block.layout.derives:
        return False, bool(len(at))
    if plan.promoted is not None:
        sequence = positions[FINALS, plan.promoted]
        plan.needed = needed_entries(block, plan.promoted, sequence, counts[plan.promoted])
    if not has_entries or not len(at):
        return False, bool(len(at))
    plan.streams, plan.steps = ids[at], steps[at]
    _, rank, plan.counts = group_rows(plan.streams, block.num_streams)
    plan.sequence = positions[FINALS, plan.streams] + rank
    most = int(rank.max())
    if plan.promoted is not None:
        plan.sequence += np.isin(plan.streams, plan.promoted)
        most += 1
    needed = needed_entries(block, plan.streams, plan.sequence, counts[plan.streams], most)
    plan.needed = max(plan.needed, needed)
    return True, False


def pack_records(layout: RowLayout, run: Run, at: np.ndarray) -> torch.Tensor:
    """Packs the successors of some records, uint8 ``[len(at), successor_bytes]``."""
    assert run.successors is not None  # the caller asked
    rows = torch.from_numpy(at).to(run.device)
    return pack_successors(
        layout, {key: leaf.squeeze(1).index_select(0, rows) for key, leaf in run.successors.items()}
    ).cpu()


def pack_rows(layout: RowLayout, run: Run, marks: torch.Tensor | None) -> torch.Tensor:
    """Packs all records, uint8 ``[M, row_bytes]`` on their device."""
    rows = torch.zeros(run.num_steps, 1, layout.row_bytes, dtype=torch.uint8, device=run.device)
    write_rows(layout, run, rows, slice(None))
    write_marks(layout, rows, None if marks is None else marks.unsqueeze(1))
    return rows.squeeze(1)


def _scatter(block: SlotBlock, rows: torch.Tensor, target: np.ndarray, kept: np.ndarray) -> None:
    source = items(rows.cpu().numpy())
    if len(kept) < len(target):  # more than a lap in one stream: only the newest rows are written
        source, target = source[kept], target[kept]
    block.row_items[target] = source
