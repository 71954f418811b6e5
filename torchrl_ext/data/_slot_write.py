# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""How a storage on the host takes runs in: checks, copies, growth of the side table, cuts."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from tensordict import TensorDictBase

from torchrl_ext.data._block import CUT, FINALS, HEAD, HOLES, NEWEST, PENDING, RESERVED, TAIL, UNKNOWN, SlotBlock
from torchrl_ext.data.final_obs import (
    common_head,
    moved_finals,
    needed_entries,
    newest_state,
    plan_finals,
    promote,
    store_finals,
)
from torchrl_ext.data.handles import SlotHandle
from torchrl_ext.data.layout import FOLLOWED, HOLE, RowLayout
from torchrl_ext.data.packing import Ends, PackedRun, Run, find_ends, write_marks, write_rows

if TYPE_CHECKING:
    from torchrl_ext.data.storages import SlotStorage


def column_block(streams: slice | None, num_streams: int) -> slice:
    """Returns a slice with explicit bounds; raises ``ValueError`` when it is not a non-empty range of columns."""
    if streams is None:
        return slice(0, num_streams)
    start = 0 if streams.start is None else streams.start
    stop = num_streams if streams.stop is None else streams.stop
    if streams.step not in (None, 1) or not 0 <= start < stop <= num_streams:
        raise ValueError(
            f"SlotStorage: streams must be slice(a, b) with 0 <= a < b <= {num_streams}, got {streams}. "
            "Nothing was changed."
        )
    return slice(start, stop)


def check_packed(layout: RowLayout, run: PackedRun, width: int) -> None:
    """Raises unless a packed run has the layout, the width and consistent parts."""
    if run.layout is not layout and run.layout != layout:
        raise ValueError(
            f"extend_batch: the packed run must have the storage's layout {layout.digest[:12]} "
            f"({list(layout.by_key)}), got {run.layout.digest[:12]} ({list(run.layout.by_key)}). Nothing was written."
        )
    rows, finals, at, tail = run.rows, run.finals, run.final_rows, run.tail
    shape = rows.shape
    if (
        rows.dtype != torch.uint8
        or len(shape) != 3
        or shape[0] < 1
        or shape[1] != width
        or shape[2] != layout.row_bytes
    ):
        raise ValueError(
            f"extend_batch: packed rows must be uint8 [K, {width}, {layout.row_bytes}] with K >= 1, got {rows.dtype} "
            f"{list(shape)}. Nothing was written."
        )
    count = 0 if at is None else at.shape[0]
    if (finals is None) != (at is None) or (finals is not None and finals.shape[0] != count):
        raise ValueError(
            f"extend_batch: finals and final_rows must have the same length, got "
            f"{'None' if finals is None else len(finals)} and {count}. Nothing was written."
        )
    if at is not None and count:
        numbers, most = at.numpy(), shape[0] * width
        if numbers[0] < 0 or numbers[-1] >= most or np.count_nonzero(numbers[1:] <= numbers[:-1]):
            raise ValueError(
                f"extend_batch: final_rows must be ascending numbers below K * N = {most}, got from {numbers.min()} to "
                f"{numbers.max()}. Nothing was written."
            )
    for name, part, length in (("finals", finals, count), ("tail", tail, width)):
        if part is not None and (
            part.dtype != torch.uint8
            or len(part.shape) != 2
            or part.shape[0] != length
            or part.shape[1] < layout.successor_bytes
            or (length and part.stride(1) != 1)
        ):
            raise ValueError(
                f"extend_batch: {name} must be uint8 [{length}, >= {layout.successor_bytes}], bytes of a row side by "
                f"side, got {part.dtype} {list(part.shape)}. Nothing was written."
            )


def infer_layout(storage: SlotStorage, run: TensorDictBase | PackedRun) -> RowLayout:
    """Returns the layout of a storage's first run."""
    if isinstance(run, PackedRun):
        return run.layout
    if not isinstance(run, TensorDictBase):
        raise TypeError(
            "extend_batch: run must be a TensorDict of batch size [K, N] or a PackedRun, got "
            f"{type(run).__name__}. Nothing was written; stack the steps along dim 0."
        )
    if run.batch_dims not in ((1, 2) if storage.num_streams == 1 else (2,)):
        raise ValueError(
            f"extend_batch: run must have batch size [K, {storage.num_streams}] with K >= 1, got "
            f"{list(run.batch_size)}. Nothing was written."
        )
    return layout_of(storage, run)


def layout_of(storage: SlotStorage, records: TensorDictBase) -> RowLayout:
    """Returns the layout of the first records, by what the storage was told of successors and extra keys."""
    if storage.extra == "drop":
        records = records.select(*records.keys(True, True))  # tensors alone
    return RowLayout.from_tensordict(records, next_obs=storage._next_obs, next_keys=storage._next_keys)


def write_run(storage: SlotStorage, run: Run | PackedRun, columns: slice) -> SlotHandle:
    """Writes a checked run. Everything that can fail happens before the first byte is written."""
    block = storage.block
    ends: Ends | PackedRun
    if isinstance(run, PackedRun):
        if run.rows.is_cuda:
            run = run.cpu()
        num_steps, ends = run.rows.shape[0], run
    else:
        num_steps, ends = run.num_steps, find_ends(block.layout, run)
    first = block.np_positions[HEAD, columns].copy()
    head = common_head(first)
    plan = plan_finals(block, run, ends, columns, num_steps, first, head)
    if plan.needed > block.final_capacity:
        block = grow(storage, finals=plan.needed)
    positions = block.np_positions
    block.sampleable = None
    watched = storage.has_other_writers
    if watched:
        # What a reader without the lock needs: RESERVED first and HEAD last, so that it can tell a write under way
        # (RESERVED != HEAD) from one that is done, pending successors included.
        # A writer that was killed may have reserved more than it published.
        positions[RESERVED, columns] = np.maximum(positions[RESERVED, columns], first + num_steps)
        if block.layout.derives:  # else a row has its successor, whatever comes next
            positions[NEWEST, columns] = UNKNOWN
    if plan.promoted is not None:
        promote(block, plan.promoted)
    # Before the rows, a large copy that drives code and numbers out of the caches; only the rows' marks must wait.
    marked = None if plan.streams is None else store_finals(block, plan, ends)
    copy_rows(block, run, ends, columns, num_steps, first, head)
    if marked is not None:
        rows, place = marked
        block.np_final[rows] = place
    heads = first + num_steps
    positions[NEWEST, columns] = newest_state(block, ends, columns, heads, None if head is None else head + num_steps)
    if not watched:
        positions[RESERVED, columns] = heads
    positions[HEAD, columns] = heads
    return SlotHandle(first, num_steps, columns, block.capacity)


def copy_rows(
    block: SlotBlock,
    run: Run | PackedRun,
    ends: Ends | PackedRun,
    columns: slice,
    num_steps: int,
    first: np.ndarray,
    head: int | None,
) -> None:
    """Copies a run to its slots; ``head`` is where all its streams stand, None where their heads ``first`` differ."""
    dropped = max(num_steps - block.capacity, 0)
    if head is not None:
        start, take = (head + dropped) % block.capacity, num_steps - dropped
        ahead = min(take, block.capacity - start)
        _put(block, run, ends, slice(dropped, dropped + ahead), start, columns)
        if ahead < take:
            _put(block, run, ends, slice(dropped + ahead, num_steps), 0, columns)
        return
    # Streams at different steps: one scatter of whole rows in 16-byte words.
    if isinstance(run, PackedRun):
        rows = run.rows[dropped:].contiguous()
        if rows.storage_offset() % 16:  # bytes of a caller that do not lie at words
            rows = rows.clone()
    else:
        shape = (num_steps - dropped, run.num_streams, block.layout.row_bytes)
        rows = torch.zeros(shape, dtype=torch.uint8, device=block.device)
        _put_fields(block.layout, run, ends, rows, slice(dropped, num_steps))
    slots = (first + np.arange(dropped, num_steps)[:, None]) % block.capacity
    at = slots * block.num_streams + np.arange(columns.start, columns.stop)
    words = rows.view(block.words.dtype).flatten(0, 1)
    index = torch.from_numpy(at.ravel()).to(block.device, non_blocking=True)
    block.words.index_copy_(0, index, words.to(block.device, non_blocking=True))


def _put(
    block: SlotBlock, run: Run | PackedRun, ends: Ends | PackedRun, steps: slice, slot: int, columns: slice
) -> None:
    num_steps = steps.stop - steps.start
    if isinstance(run, PackedRun):
        put_packed(block, run.rows if num_steps == run.rows.shape[0] else run.rows[steps], slot, columns)
    else:
        rows = block.ring[slot : slot + num_steps, columns]
        _put_fields(block.layout, run, ends, rows, steps)


def put_packed(block: SlotBlock, rows: torch.Tensor, slot: int, columns: slice) -> None:
    """Copies packed rows ``[k, n, row_bytes]`` to the slots from one on, of which there are enough."""
    ring = block.ring_words
    try:
        rows = rows.view(torch.int64)
    except RuntimeError:  # bytes of a caller that do not lie at multiples of 8
        ring = block.ring
    ring = ring[slot : slot + rows.shape[0]]
    if columns.stop - columns.start < block.num_streams:
        ring = ring[:, columns]
    ring.copy_(rows, non_blocking=True)


def _put_fields(layout: RowLayout, run: Run, ends: Ends | PackedRun, rows: torch.Tensor, steps: slice) -> None:
    write_rows(layout, run, rows, steps)
    marks = cast(Ends, ends).marks  # a packed run, which is its own ends, has them in its rows
    write_marks(layout, rows, None if marks is None else marks[steps])


def grow(storage: SlotStorage, *, finals: int = 0, holes: int = 0) -> SlotBlock:
    """Moves everything into an allocation with a larger side table; raises when the memory cannot be replaced."""
    old = storage.block
    if not storage._grows:
        what, has = ("final_capacity", old.final_capacity) if finals else ("places for cut rows", old.hole_capacity)
        raise RuntimeError(
            f"SlotStorage: the side table must hold {finals or holes} entries per stream, it has {what}={has} and "
            f"{old.kind} memory cannot grow. Nothing was changed; build the storage with a larger final_capacity."
        )
    new = storage._make_block(
        old.layout,
        max(old.final_capacity, min(2 * finals, finals + old.capacity)),
        max(old.hole_capacity, 2 * holes),
    )
    new.ring.copy_(old.ring)
    new.positions.copy_(old.positions)
    if old.layout.derives:
        moved_finals(old, new)
    ids = np.arange(old.num_streams)
    for back in range(1, old.hole_capacity + 1):
        sequence = old.np_positions[HOLES] - back
        keep = ids[sequence >= 0]
        new.np_hole_step[keep, sequence[keep] % new.hole_capacity] = old.np_hole_step[
            keep, sequence[keep] % old.hole_capacity
        ]
    storage._bind(new)
    return new


def cut_streams(storage: SlotStorage, columns: slice) -> None:
    """Implements :meth:`SlotStorage.end_streams`."""
    block = storage.block
    positions = block.np_positions
    ids = np.arange(columns.start, columns.stop)
    state = positions[NEWEST, columns]
    pending = ids[state == PENDING]
    # Liveness of the newest row: it lives unless the stream is empty.
    lost = ids[(state == UNKNOWN) & (positions[HEAD, columns] > positions[TAIL, columns])]
    # A writer that was killed may have hidden the state of a row that is cut.
    is_cut = block.np_final[(positions[HEAD, lost] - 1) % block.capacity * block.num_streams + lost] != FOLLOWED
    hidden, lost = lost[is_cut], lost[~is_cut]
    low = np.maximum(positions[TAIL], positions[HEAD] - block.capacity)
    derives = block.layout.derives
    needed = needed_entries(block, pending, positions[FINALS, pending], 0) if len(pending) and derives else 0
    holes = int((block.np_hole_step[lost] >= low[lost, None]).sum(1).max()) + 1 if len(lost) else 0
    if needed > block.final_capacity or holes > block.hole_capacity:
        block = grow(storage, finals=needed, holes=holes)
        positions = block.np_positions
    block.sampleable = None
    if len(pending):
        promote(block, pending)
    if len(lost):
        newest = positions[HEAD, lost] - 1
        block.np_final[newest % block.capacity * block.num_streams + lost] = HOLE
        block.np_hole_step[lost, positions[HOLES, lost] % block.hole_capacity] = newest
        positions[HOLES, lost] += 1
    for cut in (pending, lost, hidden):
        positions[NEWEST, cut] = CUT
