# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Triton kernels of an update without versions: who writes a record, and the writing.

The torch operations of :mod:`torchrl_ext.data._update_device` give the same bytes and masks in about thirty launches.
"""

# Triton reads the annotations of a kernel, so that its parameters have none but constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def claim(
    slot,
    stream,
    generation,
    slot_stride,
    stream_stride,
    generation_stride,
    positions,
    geometry,
    owner,
    rows,
    count,
    BLOCK: tl.constexpr,
):
    """Finds the row of each handle, ``-1`` for dead ones, and lets the last handle of a row own it.

    ``owner`` int64 ``[1 + rows]`` holds the number of the update, then for each row the update and handle that own it:
    a later update outbids an earlier one, so that nothing has to be cleared.
    """
    num, capacity = tl.load(geometry), tl.load(geometry + 1)
    lane = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = lane < count
    slots = tl.load(slot + lane * slot_stride, mask=inside, other=-1)
    streams = tl.load(stream + lane * stream_stride, mask=inside, other=-1)
    laps = tl.load(generation + lane * generation_stride, mask=inside, other=-1)
    valid = inside & (slots >= 0) & (slots < capacity) & (streams >= 0) & (streams < num)
    ids = tl.where(valid, streams, 0)
    head = tl.load(positions + ids)
    low = tl.maximum(tl.load(positions + 2 * num + ids), tl.load(positions + num + ids) - capacity)
    # Clipped, so that no product overflows into the range of live steps: no lap after the head's has begun.
    laps = tl.minimum(tl.maximum(laps, -1), head // capacity + 1)
    step = laps * capacity + slots
    live = valid & (step >= low) & (step < head)
    row = slots * num + streams
    tl.store(rows + lane, tl.where(live, row, -1), mask=inside)
    bid = (tl.load(owner) << 32) + lane
    tl.atomic_max(owner + 1 + tl.where(live, row, 0), bid, mask=live)


@triton.jit
def write(
    rows,
    owner,
    source,
    target,
    updated,
    superseded,
    counts,
    row_words,
    first_word,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    LAST: tl.constexpr,
):
    """One program writes one field of one row where its handle owns the row; the last field also tells the outcome."""
    lane = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + lane)
    live = row >= 0
    owns = live & ((tl.load(owner + 1 + tl.maximum(row, 0)) & 0xFFFFFFFF) == lane)
    for start in tl.static_range(0, WORDS, BLOCK):
        word = start + tl.arange(0, BLOCK)
        mask = (word < WORDS) & owns
        value = tl.load(source + lane * WORDS + word, mask=mask)
        tl.store(target + row * row_words + first_word + word, value, mask=mask)
    if LAST:
        tl.store(updated + lane, owns.to(tl.uint8))
        tl.store(superseded + lane, (live & (owns == 0)).to(tl.uint8))
        # The codes of write_back: 0 stale, 1 updated, 2 superseded.
        tl.atomic_add(counts + tl.where(owns, 1, tl.where(live, 2, 0)), 1)
        if lane == 0:
            tl.store(owner, tl.load(owner) + 1)
