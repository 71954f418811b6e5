# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The slow and plainly right model of write-back and routed writes, on the lists of ``_reference``.

Live         a handle (slot, stream, generation) is live iff slot and stream exist and the generation is not negative
             and is the one of the row that lives there.
Duplicates   among the live handles of one row the last one wins, the others are superseded; with versions the highest
             incoming version wins (the last one on ties) and the others are rejected.
Versions     the winner must not be older than the stored version (newer with ``require_newer``), or it is rejected.
Bytes        only the patched fields of the winners change. A stored observation is the successor of the row before it
             wherever that one is followed by it, and its own where it ended without a final observation.
Routed       a batch of records is what the same records are when they come one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from _reference import Key, Record, Reference
from tensordict import TensorDictBase

Handle = tuple[int, int, int]
"""(slot, stream, generation)."""

UPDATED, SUPERSEDED, REJECTED, STALE = "updated", "superseded", "rejected", "stale"


def is_live(reference: Reference, handle: Handle) -> bool:
    """Whether the row that the handle names is the one that lives there."""
    slot, stream, generation = handle
    if not (0 <= slot < reference.capacity and 0 <= stream < reference.num_streams) or generation < 0:
        return False
    return reference.generation(slot, stream) == generation


def outcomes(
    live: Sequence[bool],
    rows: Sequence[Any],
    versions: Sequence[Any] | None = None,
    stored: Callable[[Any], Any] | None = None,
    *,
    require_newer: bool = False,
) -> list[str]:
    """What becomes of each record of one update: ``rows[i]`` is what record ``i`` addresses."""
    result = [STALE] * len(live)
    for row in {row for row, alive in zip(rows, live, strict=True) if alive}:
        same = [i for i in range(len(live)) if live[i] and rows[i] == row]
        if versions is None:
            winner = same[-1]
            for i in same:
                result[i] = SUPERSEDED
            result[winner] = UPDATED
            continue
        winner = max(same, key=lambda i: (versions[i], i))
        for i in same:
            result[i] = REJECTED
        if versions[winner] > stored(row) or (versions[winner] == stored(row) and not require_newer):
            result[winner] = UPDATED
    return result


def update(
    reference: Reference,
    handles: Sequence[Handle],
    patch: Sequence[dict[Key, bytes]],
    *,
    version_key: Key | None = None,
    versions: Sequence[int] | None = None,
    require_newer: bool = False,
    decode: Callable[[bytes], Any] = lambda blob: int.from_bytes(blob, "little", signed=True),
) -> list[str]:
    """Applies one update; ``patch[i]`` are the bytes that record ``i`` brings, its version included."""

    def stored(row: tuple[int, int]) -> Any:
        return decode(reference.record(row[1], reference.step_at(*row)).fields[version_key])

    live = [is_live(reference, handle) for handle in handles]
    rows = [(slot, stream) for slot, stream, _ in handles]
    result = outcomes(live, rows, versions, stored, require_newer=require_newer)
    for (slot, stream), outcome, values in zip(rows, result, patch, strict=True):
        if outcome == UPDATED:
            patch_row(reference, stream, reference.step_at(slot, stream), values)
    return result


def patch_row(reference: Reference, stream: int, step: int, values: dict[Key, bytes]) -> None:
    """Changes stored fields of one live row, and whatever else is made of the same bytes."""
    record = reference.record(stream, step)
    record.fields = {**record.fields, **values}
    observed = {key: values[key] for key in reference.next_keys if key in values}
    if ("next", "reward") in values and record.reward:
        record.reward = reference._floats(values["next", "reward"])
    record.observation = {**record.observation, **observed}
    if reference.next_obs == "store":
        followed = {key: values[("next", *key)] for key in reference.next_keys if ("next", *key) in values}
        record.successor = {**record.successor, **followed}
        if record.expected is not None:
            record.expected = {**record.expected, **followed}
        return
    if _stands_in_for_its_successor(record):
        record.successor = {**record.successor, **observed}
    before = reference.streams[stream].rows.get(step - 1)
    if before is not None and not before.ends and before.successor is not None:
        before.successor = {**before.successor, **observed}


def _stands_in_for_its_successor(record: Record) -> bool:
    # A terminated row that came without a final observation; nothing else ends with a known successor of its own.
    return record.ends and not record.owns_final and record.successor is not None


def extend_routed(reference: Reference, data: TensorDictBase, streams: Sequence[int]) -> list[tuple[int, int]]:
    """Writes the records of ``data`` ([M]) one by one; returns (slot, stream) of each."""
    index = []
    for i, stream in enumerate(streams):
        index.append((reference.streams[stream].head % reference.capacity, stream))
        reference.extend_batch(data[i : i + 1].unsqueeze(0), streams=slice(stream, stream + 1))
    return index
