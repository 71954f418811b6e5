# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Applying an update to rows in host memory: in chunks, each of which checks again what lives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchrl_ext.data._block import HEAD, RESERVED, TAIL, SlotBlock
from torchrl_ext.data._words import as_items, as_words, item_column, word_columns
from torchrl_ext.data.write_back import REJECTED, STALE, SUPERSEDED, UPDATED, Update

if TYPE_CHECKING:
    from torchrl_ext.data.storages import SlotStorage

#: Bytes written with the lock held: about half a millisecond.
CHUNK_BYTES = 2**22
#: From so many items on NumPy lets go of the GIL while it copies; it then takes two thirds of torch's time.
_GIL_FREE_ITEMS = 512


def update_on_host(storage: SlotStorage, update: Update) -> torch.Tensor:
    """Writes the patch into the rows that live and returns a code for each; others use the storage between chunks."""
    block, lock = storage.block, storage._lock
    slot, stream, generation = update.slot.numpy(), update.stream.numpy(), update.generation.numpy()
    fields = update.patch if update.version is None else [*update.patch, update.version]
    step = max(1, CHUNK_BYTES // sum(field.nbytes for field, _ in fields))
    target_of, source_of = (item_column, as_items) if step >= _GIL_FREE_ITEMS else (word_columns, as_words)
    sources: list[Any] = [source_of(field, value) for field, value in fields]
    stored: list[Any] = [target_of(block, field) for field, _ in fields]
    died = False
    live = codes = rows = seen = np.empty(0, dtype=np.int64)
    for start in range(0, len(update), step):
        chunk = slice(start, start + step)
        if start:
            lock.let_others()
        with lock:
            if storage.block is not block:  # the side table grew, and the rows have moved
                block = storage.block
                stored = [target_of(block, field) for field, _ in fields]
            positions = block.np_positions[: TAIL + 1]
            if not start:
                live = _live(block, slot, stream, generation)
                rows = np.where(live, slot * block.num_streams + stream, block.sink)
                codes = _decide(block, update, rows, live)
            elif np.count_nonzero(positions != seen):
                dead = live[start:] & ~_live(block, slot[start:], stream[start:], generation[start:])
                codes[start:][dead] = STALE
                died = True
            seen = positions.copy()
            # Losers and dead handles write to the sink, which is cheaper than leaving them out of the patch.
            target = np.where(codes[chunk] == UPDATED, rows[chunk], block.sink)
            for columns, source in zip(stored, sources, strict=True):
                if isinstance(columns, np.ndarray):
                    columns[target] = source[chunk]
                else:
                    columns.index_copy_(0, torch.from_numpy(target), source[chunk])
    if died:
        _settle(codes, rows)
    storage._bump_mutation_revision()
    return torch.from_numpy(codes.astype(np.uint8, copy=False))


def _live(block: SlotBlock, slot: np.ndarray, stream: np.ndarray, generation: np.ndarray) -> np.ndarray:
    positions, capacity = block.np_positions, block.capacity
    low, head = np.maximum(positions[TAIL], positions[RESERVED] - capacity), positions[HEAD]
    # As unsigned numbers negative ones are too large as well.
    inside = (slot.view(np.uint64) < capacity) & (stream.view(np.uint64) < block.num_streams)
    # Clipped, so that no product overflows into the range of live steps.
    step = np.clip(generation, -1, int(head.max()) // capacity + 1) * capacity + slot
    ids = np.where(inside, stream, 0)
    return inside & (step >= low[ids]) & (step < head[ids])


def _decide(block: SlotBlock, update: Update, rows: np.ndarray, live: np.ndarray) -> np.ndarray:
    """Returns a code for each row: of several live ones for a record the last wins, or the highest version."""
    order = None if update.version is None else _by_version(update.version[1])
    loser = _earlier_duplicates(rows, order) & live
    codes = np.where(live, UPDATED, STALE).astype(np.uint8)
    codes[loser] = SUPERSEDED if update.version is None else REJECTED
    if update.version is not None:
        field, incoming = update.version
        stored = block.layout.leaves(block.rows, [field])[field.key][torch.from_numpy(rows)].flatten()
        accepted = incoming > stored if update.require_newer else incoming >= stored
        codes[live & ~accepted.numpy()] = REJECTED
    return codes


def _by_version(version: torch.Tensor) -> np.ndarray:
    return version.argsort(stable=True).numpy()


def _earlier_duplicates(rows: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    """Returns where a later one of ``order`` (None: as they come) has the same row."""
    loser = np.zeros(len(rows), dtype=bool)
    keys = rows if order is None else rows[order]
    # Handles often come sorted and distinct (one per coordinate), which two passes over them tell.
    if not np.count_nonzero(keys[1:] <= keys[:-1]):
        return loser
    by_row = np.argsort(keys, kind="stable")
    ordered = keys[by_row]
    same = by_row[:-1][ordered[1:] == ordered[:-1]]
    loser[same if order is None else order[same]] = True
    return loser


def _settle(codes: np.ndarray, rows: np.ndarray) -> None:
    """Turns rows that were superseded by one that died in the meantime into stale ones."""
    superseded = np.flatnonzero(codes == SUPERSEDED)
    if len(superseded):
        gone = ~np.isin(rows[superseded], rows[codes == UPDATED])
        codes[superseded[gone]] = STALE
