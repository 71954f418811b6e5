# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""How a storage moves rows: runs in, rows and views out, cuts, growth, sharing."""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, unravel_key

from torchrl_ext.data._block import CUT, FINALS, HEAD, HOLES, NEWEST, PENDING, RESERVED, TAIL, UNKNOWN, SlotBlock
from torchrl_ext.data.final_obs import (
    in_step,
    moved_finals,
    needed_entries,
    newest_state,
    plan_finals,
    promote,
    write_finals,
)
from torchrl_ext.data.handles import SlotHandle
from torchrl_ext.data.layout import HOLE, RowLayout
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
    if rows.dtype != torch.uint8 or len(shape) != 3 or shape[0] < 1 or shape[1:] != (width, layout.row_bytes):
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
    if count:
        numbers, most = at.numpy(), shape[0] * width
        if numbers[0] < 0 or numbers[-1] >= most or np.count_nonzero(numbers[1:] <= numbers[:-1]):
            raise ValueError(
                f"extend_batch: final_rows must be ascending numbers below K * N = {most}, got from {numbers.min()} to "
                f"{numbers.max()}. Nothing was written."
            )
    if tail is not None and (len(tail) != width or tail.shape[-1] < layout.successor_bytes):
        raise ValueError(
            f"extend_batch: tail must be uint8 [{width}, >= {layout.successor_bytes}], got {list(tail.shape)}. "
            "Nothing was written."
        )


def write_run(storage: SlotStorage, run: Run | PackedRun, columns: slice) -> SlotHandle:
    """Writes a checked run. Everything that can fail happens before the first byte is written."""
    block = storage.block
    packed = isinstance(run, PackedRun)
    num_steps = run.rows.shape[0] if packed else run.num_steps
    ends = run if packed else find_ends(block.layout, run)
    first = block.np_positions[HEAD, columns].copy()
    plan = plan_finals(block, run, ends, columns, num_steps, first)
    if plan.needed > block.final_capacity:
        block = grow(storage, finals=plan.needed)
    positions = block.np_positions
    block.sampleable = None
    if storage.has_other_writers:
        # A reader without the lock must know what is being overwritten, and must never pair the new heads with the
        # old pending successors.
        positions[RESERVED, columns] += num_steps
        positions[NEWEST, columns] = UNKNOWN
    copy_rows(block, run, ends, columns, num_steps, first)
    if plan.promoted is not None:
        promote(block, plan.promoted)
    if plan.streams is not None:
        write_finals(block, plan, ends)
    heads = first + num_steps
    positions[HEAD, columns] = heads
    positions[RESERVED, columns] = heads
    positions[NEWEST, columns] = newest_state(block, ends, columns, heads)
    return SlotHandle(first, num_steps, columns, block.capacity)


def copy_rows(
    block: SlotBlock, run: Run | PackedRun, ends: Ends | PackedRun, columns: slice, num_steps: int, first: np.ndarray
) -> None:
    dropped = max(num_steps - block.capacity, 0)
    if in_step(first):
        start, take = int(first[0] + dropped) % block.capacity, num_steps - dropped
        ahead = min(take, block.capacity - start)
        _put(block.layout, run, ends, block.ring[start : start + ahead, columns], dropped)
        if ahead < take:
            _put(block.layout, run, ends, block.ring[: take - ahead, columns], dropped + ahead)
        return
    # Streams at different steps: one scatter of whole rows in 16-byte words.
    if isinstance(run, PackedRun):
        rows = run.rows[dropped:].contiguous()
    else:
        shape = (num_steps - dropped, run.num_streams, block.layout.row_bytes)
        rows = torch.zeros(shape, dtype=torch.uint8, device=block.device)
        _put(block.layout, run, ends, rows, dropped)
    slots = (first + np.arange(dropped, num_steps)[:, None]) % block.capacity
    at = slots * block.num_streams + np.arange(columns.start, columns.stop)
    words = rows.view(block.words.dtype).flatten(0, 1)
    index = torch.from_numpy(at.ravel()).to(block.device, non_blocking=True)
    block.words.index_copy_(0, index, words.to(block.device, non_blocking=True))


def _put(layout: RowLayout, run: Run | PackedRun, ends: Ends | PackedRun, rows: torch.Tensor, first: int) -> None:
    steps = slice(first, first + rows.shape[0])
    if isinstance(run, PackedRun):
        source = run.rows[steps]
        if source.storage_offset() % 8 == 0 and source.stride(0) % 8 == source.stride(1) % 8 == 0:
            # As int64 words torch copies a quarter faster than as bytes.
            rows, source = rows.view(torch.int64), source.view(torch.int64)
        rows.copy_(source, non_blocking=True)
        return
    write_rows(layout, run, rows, steps)
    write_marks(layout, rows, None if ends.marks is None else ends.marks[steps])


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
    positions[NEWEST, pending] = CUT
    positions[NEWEST, lost] = CUT


def split_index(index: torch.Tensor, num_streams: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns slots and streams of an index ``[..., 2]``, or ``[...]`` when there is one stream."""
    if index.dim() and index.shape[-1] == 2 and (index.dim() > 1 or num_streams > 1):
        return index[..., 0], index[..., 1]
    if num_streams == 1:
        return index, torch.zeros_like(index)
    raise IndexError(
        f"SlotStorage: index must be int64 [..., 2] (slot, stream) for {num_streams} streams, got {list(index.shape)}."
    )


def read(storage: SlotStorage, index: Any) -> TensorDict:
    """Implements :meth:`SlotStorage.get` for everything but keys."""
    block = storage.block
    if isinstance(index, (list, range, np.ndarray)):
        index = torch.as_tensor(np.asarray(index))
    if isinstance(index, torch.Tensor) and index.dtype == torch.bool:
        index = index.nonzero(as_tuple=True)
    if isinstance(index, torch.Tensor) and index.dim() == 1:
        # Slots with all their streams, as stock components address a two-dimensional storage.
        streams = torch.arange(block.num_streams, device=index.device)
        index = torch.broadcast_tensors(index.unsqueeze(-1), streams)
        return _read_rows(block, *index)
    if isinstance(index, torch.Tensor) and index.dim() > 1:
        return _read_rows(block, *split_index(index, block.num_streams))
    if isinstance(index, tuple) and all(isinstance(i, (torch.Tensor, np.ndarray)) for i in index) and len(index) == 2:
        return _read_rows(block, *torch.broadcast_tensors(*(torch.as_tensor(i) for i in index)))
    # As in stock storages, slices see the slots that hold rows.
    return storage._storage[: block.used_slots()][index]


def _read_rows(block: SlotBlock, slot: torch.Tensor, stream: torch.Tensor) -> TensorDict:
    from torchrl_ext.data._gather import gather_successors

    slot, stream = slot.to(block.device, torch.int64), stream.to(block.device, torch.int64)
    if not block.on_device and slot.numel():
        # On CUDA the bounds would cost a synchronisation; there the gather itself asserts them.
        for name, value, size in (("slot", slot, block.capacity), ("stream", stream, block.num_streams)):
            if int(value.min()) < 0 or int(value.max()) >= size:
                raise IndexError(
                    f"SlotStorage: {name} must be in [0, {size}), got from {int(value.min())} to {int(value.max())}."
                )
    at = (slot * block.num_streams + stream).flatten()
    rows = block.words.index_select(0, at).view(torch.uint8)
    layout = block.layout
    leaves = layout.leaves(rows, layout.fields)
    if layout.derives:
        successors = gather_successors(block, at, stream.flatten(), rows)
        leaves.update((("next", *(k if isinstance(k, tuple) else (k,))), v) for k, v in successors.items())
    return layout.assemble(leaves, rows.shape[:1], rows.device).reshape(slot.shape)


def write_by_cursor(storage: SlotStorage, cursor: Any, data: Any) -> None:
    """Lets a stock writer write where it believes its cursor is, when all streams do stand there."""
    for buffer in storage._attached_entities:
        writer = getattr(buffer, "_writer", None)
        if writer is not None and writer.tracks_generations and writer._storage is storage:
            if type(writer).__module__.split(".")[0] == "torchrl":
                storage._slot_generations = None  # raises: two tables of generations would disagree
    if not isinstance(data, TensorDictBase):
        raise TypeError(f"SlotStorage: data must be a TensorDict, got {type(data).__name__}. Nothing was written.")
    single = isinstance(cursor, int) or (isinstance(cursor, torch.Tensor) and cursor.dim() == 0)
    if single:
        data = data.unsqueeze(0)
    if "index" in data.keys() and (storage.layout is None or "index" not in storage.layout.by_key):
        data = data.exclude("index")  # a mark of TorchRL's TensorDict writers, not part of a record
    first = int(cursor) if single else int(cursor[0])
    heads = np.zeros(1, np.int64) if storage._block is None else storage.block.np_positions[HEAD]
    if (heads % storage.capacity != first).any() or (heads != heads[0]).any():
        raise RuntimeError(
            f"SlotStorage: a stock writer may write only while all streams stand at its cursor {first}, got slots "
            f"{np.unique(heads % storage.capacity).tolist()}. Nothing was written; use SlotWriter."
        )
    storage.extend_batch(data)


def write_content(storage: SlotStorage, index: Any, data: Any) -> None:
    """Changes stored fields of rows in place, leaving positions and cuts alone."""
    if not isinstance(data, TensorDictBase):
        raise TypeError(f"SlotStorage: data must be a TensorDict, got {type(data).__name__}. Nothing was written.")
    block = storage.block
    if isinstance(index, torch.Tensor) and index.dim() > 1:
        index = split_index(index, block.num_streams)
    views = block.layout.leaves(block.ring, block.layout.fields)
    checked = {}
    for key, leaf in data.items(True, True):
        view = views.get(unravel_key(key))
        if view is None:
            raise KeyError(f"SlotStorage: key {key!r} must be one of {list(views)}. Nothing was written.")
        if leaf.dtype != view.dtype:
            raise ValueError(f"SlotStorage: key {key!r} must be {view.dtype}, got {leaf.dtype}. Nothing was written.")
        try:
            checked[unravel_key(key)] = leaf.expand(view[index].shape)
        except RuntimeError as error:
            raise ValueError(
                f"SlotStorage: key {key!r} must have shape {list(view[index].shape)}, got {list(leaf.shape)}. "
                "Nothing was written."
            ) from error
    for key, leaf in checked.items():
        views[key][index] = leaf.to(block.device)


def pickled_block(storage: SlotStorage, block: SlotBlock | None) -> dict | None:
    """Returns what a pickle carries: bytes by value, or the shared memory itself when a process is being spawned."""
    if block is None:
        return None
    state: dict[str, Any] = {"geometry": block.geometry(), "bytes": block.bytes}
    if get_spawning_popen() is None:
        storage = None
        state["kind"] = "cpu" if block.kind in ("shared", "file") else block.kind
    elif block.kind == "file":
        state.update(bytes=None, kind="file")
    else:
        if block.kind in ("cpu", "pinned"):
            # Torch moves what it sends into shared memory; from here on both processes see the same bytes.
            block.bytes.share_memory_()
            block.bind(block.bytes)
            block.kind = storage._kind = "shared"
            storage._bind(block)
        state.update(bytes=block.bytes, kind=block.kind)
    return state


def unpickle_block(storage: SlotStorage, state: dict | None) -> None:
    """Rebuilds the allocation of an unpickled storage."""
    if state is None:
        return
    geometry, storage._kind = state["geometry"], state["kind"]
    layout = RowLayout.from_dict(geometry["layout"])
    sizes = (geometry["final_capacity"], geometry["hole_capacity"])
    if state["bytes"] is None:
        storage._bind(storage._make_block(layout, *sizes, create=False))
        return
    storage._filename = None
    block = SlotBlock.__new__(SlotBlock)
    block.adopt(layout, geometry, kind=storage._kind, device=storage.device, bytes_=state["bytes"])
    storage._bind(block)
