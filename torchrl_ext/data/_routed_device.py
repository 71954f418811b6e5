# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Records of any streams in any order, written on a CUDA device without waiting for it."""

from __future__ import annotations

import numpy as np
import torch

from torchrl_ext.data._block import CUT, FINALS, HEAD, NEWEST, PENDING, TAIL, UNKNOWN, SlotBlock
from torchrl_ext.data._device_write import full_side_table
from torchrl_ext.data._moves import arrived
from torchrl_ext.data._routed_write import pack_rows, record_cuts
from torchrl_ext.data.fields import next_of
from torchrl_ext.data.grouping import group_rows
from torchrl_ext.data.layout import FOLLOWED, NO_SUCCESSOR
from torchrl_ext.data.packing import Run, differ, pack_successors


def write_records_on_device(block: SlotBlock, run: Run, streams: torch.Tensor) -> torch.Tensor:
    """Writes checked records ``[M, 1]``; the same outcome as :func:`torchrl_ext.data._routed_write.write_records`.

    Streams given on the host tell the host how far each stream goes. Those given on the device do not: it learns that
    by a copy that nobody waits for until positions are asked for. Streams out of range go nowhere. Whether the side
    table takes the cuts of such a write is decided on the device as well: a write that it cannot take changes nothing,
    and the first call that learns of it raises.
    """
    known = _known_counts(block, streams)
    if known is None:
        block.raise_refused()
    else:
        block.catch_up()  # what was refused before raises here, while nothing is written
    given, num_streams, capacity = streams.to(block.device, non_blocking=True), block.num_streams, block.capacity
    valid = (given >= 0) & (given < num_streams)
    ids = torch.where(valid, given, 0)
    run = run_on(block.device, run)
    order, rank, counts = group_rows(torch.where(valid, given, num_streams), num_streams + 1)
    counts = counts[:num_streams]
    # Records of no stream sort last, so they follow nobody and nobody follows them.
    cut = record_cuts(run, order, torch.where(valid, given, num_streams))
    positions, all_streams = block.positions, torch.arange(num_streams, device=block.device)
    steps = positions[HEAD][ids] + rank
    kept = valid & (rank >= counts[ids] - capacity)
    target = torch.where(kept, steps % capacity * num_streams + ids, block.sink)
    promoted = _unequal_pending(block, run, order, counts)
    has_entries = block.layout.derives and run.successors is not None
    chosen, fits = cut & kept, None
    if has_entries or (block.layout.derives and promoted is not None):
        most = len(given) if known is None else int(known.max())
        fits = _fits(block, min(most, capacity) + 1, counts, ids, chosen, promoted, wait=known is not None)
    if fits is not None:
        counts, chosen = torch.where(fits, counts, 0), chosen & fits
        kept, target = kept & fits, torch.where(fits, target, block.sink)
        promoted = None if promoted is None else promoted & fits

    rows = pack_rows(block.layout, run, None if has_entries else cut)
    block.sampleable = block.settled_at = None
    block.words.index_copy_(0, target, rows.view(block.words.dtype))
    if promoted is not None:
        _promote(block, promoted, all_streams)
    if has_entries:
        _write_finals(block, run, chosen, ids, steps, target)
    written, state = counts > 0, UNKNOWN if block.layout.derives else PENDING
    if has_entries:
        last = order[(counts.cumsum(0) - 1).clamp(min=0)]
        side = block.side_start + all_streams * block.final_capacity + positions[FINALS] % block.final_capacity
        tail = pack_successors(block.layout, {key: leaf[last, 0] for key, leaf in (run.successors or {}).items()})
        side = torch.where(written, side, block.sink)
        block.successor_words.index_copy_(0, side, tail.view(block.words.dtype))
        state = PENDING
    block.heads.add_(counts)
    found: torch.Tensor | int = state
    if state == PENDING:
        newest = (positions[HEAD] - 1) % capacity * num_streams + all_streams
        found = torch.where(block.final.index_select(0, newest) == FOLLOWED, PENDING, CUT)
    positions[NEWEST] = torch.where(written, found, positions[NEWEST])
    block.mirror_later(counts, known, fits, state)
    named = valid if fits is None else valid & fits
    index = torch.where(named.unsqueeze(-1), torch.stack([steps % capacity, ids], -1), -1)
    return arrived(index, streams.device)  # the host, where streams came from, waits for it


def _known_counts(block: SlotBlock, streams: torch.Tensor) -> np.ndarray | None:
    """Returns how many records each stream gets where the host can tell without waiting, else None."""
    if streams.device.type != "cpu" or block.device.type == "cpu":
        return None
    return np.bincount(streams.numpy(), minlength=block.num_streams)


def run_on(device: torch.device, run: Run) -> Run:
    """Returns a run on a device; the host gets it complete."""
    if run.device == device:
        return run
    leaves = {key: arrived(leaf, device) for key, leaf in run.leaves.items()}
    successors = run.successors
    if successors is not None:
        successors = {key: arrived(leaf, device) for key, leaf in successors.items()}
    return Run(leaves, successors, run.num_steps, run.num_streams, device)


def _unequal_pending(block: SlotBlock, run: Run, order: torch.Tensor, counts: torch.Tensor) -> torch.Tensor | None:
    """bool ``[N]``: streams whose pending successor is not their first record; None where nothing is followed."""
    layout = block.layout
    if not layout.next_keys:
        return None
    positions, streams = block.positions, torch.arange(block.num_streams, device=block.device)
    if layout.derives:
        place = positions[FINALS] % block.final_capacity
        stored = block.successor_words.index_select(0, block.side_start + streams * block.final_capacity + place)
        known = layout.leaves(stored.view(torch.uint8), layout.prefix)
    else:
        newest = (positions[HEAD] - 1) % block.capacity * block.num_streams + streams
        stored = block.words.index_select(0, newest)
        leaves = layout.leaves(stored.view(torch.uint8), [layout.by_key[next_of(key)] for key in layout.next_keys])
        known = {key: leaves[next_of(key)] for key in layout.next_keys}
    first = order[(counts.cumsum(0) - counts).clamp(max=len(order) - 1)]
    unequal = torch.zeros(block.num_streams, dtype=torch.bool, device=block.device)
    for key, leaf in known.items():
        if key in run.leaves:
            unequal |= differ(leaf, run.leaves[key][first, 0], 1)
    # With a whole lap or more the newest row dies in this write, and its successor with it.
    return unequal & (positions[NEWEST] == PENDING) & (counts > 0) & (counts < block.capacity)


def _fits(
    block: SlotBlock,
    most: int,
    counts: torch.Tensor,
    ids: torch.Tensor,
    chosen: torch.Tensor,
    promoted: torch.Tensor | None,
    *,
    wait: bool,
) -> torch.Tensor | None:
    """Returns None when the side table surely takes the cuts, else whether it does, a bool of the device.

    With ``wait`` the host asks and raises before anything is written, as in any other write.
    """
    if block.final_capacity > block.capacity:
        return None  # a place for every row and one for the pending successor
    if block.room >= most:
        block.room -= most
        return None
    low = torch.maximum(block.positions[TAIL], block.positions[HEAD] + counts - block.capacity)
    live = (block.final_step >= low.unsqueeze(-1)).sum(-1)
    live.index_add_(0, ids, chosen.long())
    if promoted is not None:
        live += promoted
    needed = live.max() + 1
    if not wait:
        block.room = 0  # the host does not know what this write takes
        return needed <= block.final_capacity
    # The only wait for the device, once per final_capacity / most writes, or when the table is full.
    if int(needed) > block.final_capacity:
        raise full_side_table(block, int(needed))
    block.room = block.final_capacity - int(needed)
    return None


def _promote(block: SlotBlock, promoted: torch.Tensor, streams: torch.Tensor) -> None:
    positions = block.positions
    newest = (positions[HEAD] - 1) % block.capacity * block.num_streams + streams
    final = block.final.index_select(0, newest)
    if not block.layout.derives:
        block.final.index_copy_(0, newest, torch.where(promoted, NO_SUCCESSOR, final).int())
        return
    place = positions[FINALS] % block.final_capacity
    block.final.index_copy_(0, newest, torch.where(promoted, place, final).int())
    _own(block, streams * block.final_capacity + place, torch.where(promoted, positions[HEAD] - 1, -1))
    positions[FINALS] += promoted


def _write_finals(
    block: SlotBlock,
    run: Run,
    chosen: torch.Tensor,
    ids: torch.Tensor,
    steps: torch.Tensor,
    target: torch.Tensor,
) -> None:
    """Stores the successors of cut records; those of the others go to the sink row."""
    _, rank, counts = group_rows(torch.where(chosen, ids, block.num_streams), block.num_streams + 1)
    place = (block.positions[FINALS][ids] + rank) % block.final_capacity
    entry = ids * block.final_capacity + place
    packed = pack_successors(block.layout, {key: leaf[:, 0] for key, leaf in (run.successors or {}).items()})
    side = torch.where(chosen, block.side_start + entry, block.sink)
    block.successor_words.index_copy_(0, side, packed.view(block.words.dtype))
    block.final.index_copy_(0, target, torch.where(chosen, place, FOLLOWED).int())
    _own(block, torch.where(chosen, entry, 0), torch.where(chosen, steps, -1))
    block.positions[FINALS] += counts[: block.num_streams]


def _own(block: SlotBlock, entries: torch.Tensor, steps: torch.Tensor) -> None:
    # Steps of a stream only grow, so a maximum writes the new owner, and -1 writes nothing.
    block.final_step.view(-1).scatter_reduce_(0, entries, steps, "amax")
