# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Triton kernels that fuse the bookkeeping of draws and writes on a CUDA device.

The torch operations of :mod:`torchrl_ext.data.draws`, :mod:`torchrl_ext.data._gather` and
:mod:`torchrl_ext.data._device_write` give the same numbers (returns to rounding, because a multiply-add is fused here)
in about thirty launches; these kernels need two to four, which is what a sample of 65,536 rows in 0.1 ms leaves room
for. Kernels see positions as ``int64 [7, N]`` with the rows of :mod:`torchrl_ext.data._block`.
"""

# Triton reads the annotations of a kernel, so that its parameters have none but constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from torchrl_ext.data._draw_kernels import wide_integer


@triton.jit
def holes_before(holes, counted, capacity, step, HOLE_SEARCH: tl.constexpr):
    """Returns how many places of each stream's ring of holes, the oldest first, hold one before ``step`` or none."""
    first = counted * 0
    last = first + capacity
    for _ in tl.static_range(HOLE_SEARCH):
        middle = (first + last) // 2
        before = (middle < capacity) & (tl.load(holes + (counted + middle) % capacity) < step)
        first = tl.where(before, middle + 1, first)
        last = tl.where(before, last, middle)
    return first


@triton.jit
def ranges(positions, rows32, geometry, table, BLOCK: tl.constexpr, HOLE_SEARCH: tl.constexpr):
    """One program: how many rows can be sampled up to each stream, and the sampleable range of each stream.

    ``table`` int64 ``[4, N]``: running number, first step, end, and, with ``HOLE_SEARCH`` steps of a search for holes,
    how many places of the stream's ring of holes, the oldest first, hold none that lives.
    """
    num, capacity = tl.load(geometry), tl.load(geometry + 1)
    row_words, final_word = tl.load(geometry + 4), tl.load(geometry + 5)
    stream = tl.arange(0, BLOCK)
    inside = stream < num
    head = tl.load(positions + stream, mask=inside, other=0)
    reserved = tl.load(positions + num + stream, mask=inside, other=0)
    tail = tl.load(positions + 2 * num + stream, mask=inside, other=0)
    newest = tl.load(positions + 4 * num + stream, mask=inside, other=0)
    low = tl.maximum(tail, reserved - capacity)
    filled = inside & (head > tail)
    row = (head + capacity - 1) % capacity * num + stream
    final = tl.load(rows32 + row * row_words + final_word, mask=filled, other=-1)
    unknown = (newest == 0) & (final == -1)
    high = tl.maximum(low, head - unknown.to(tl.int64))
    tl.store(table + num + stream, low, mask=inside)
    tl.store(table + 2 * num + stream, high, mask=inside)
    count = high - low
    if HOLE_SEARCH > 0:
        known, places = tl.minimum(stream, num - 1), tl.load(geometry + 7)
        holes = positions + (7 + tl.load(geometry + 2)) * num + known * places
        counted = tl.load(positions + 6 * num + known)
        dead = holes_before(holes, counted, places, low, HOLE_SEARCH)
        count -= holes_before(holes, counted, places, high, HOLE_SEARCH) - dead
        tl.store(table + 3 * num + stream, dead, mask=inside)
    tl.store(table + stream, tl.cumsum(tl.where(inside, count, 0), 0), mask=inside)


@triton.jit
def transitions(
    wide,
    positions,
    table,
    geometry,
    powers,
    rows32,
    found,
    total_out,
    index_out,
    generation_out,
    discount_out,
    steps_out,
    count,
    SEARCH: tl.constexpr,
    REACH: tl.constexpr,
    BLOCK: tl.constexpr,
    HOLE_SEARCH: tl.constexpr,
    DRAWS: tl.constexpr = False,
):
    """Turns random numbers into rows, follows their returns and finds their successors; one lane a transition.

    ``wide`` int64 ``[B]``: the random numbers, or with ``DRAWS`` the seat of :mod:`torchrl_ext.data._draw_kernels` at
    which they are made.
    ``found`` int64 ``[3, B]``: the row, its successor's row, the last row used.
    """
    num, capacity = tl.load(geometry), tl.load(geometry + 1)
    final_capacity, side_start = tl.load(geometry + 2), tl.load(geometry + 3)
    row_words, final_word, reward_word = tl.load(geometry + 4), tl.load(geometry + 5), tl.load(geometry + 6)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < count
    if DRAWS:
        number = wide_integer(wide, lane)
    else:
        number = tl.load(wide + lane, mask=inside, other=0)
    ordinal = number % tl.load(table + num - 1)
    first = tl.zeros([BLOCK], dtype=tl.int64)
    last = first + num
    for _ in tl.static_range(SEARCH):
        middle = (first + last) // 2
        beyond = tl.load(table + middle, mask=middle < num, other=9223372036854775807) <= ordinal
        first = tl.where(beyond, middle + 1, first)
        last = tl.where(beyond, last, middle)
    stream = tl.minimum(first, num - 1)
    before = tl.load(table + stream - 1, mask=stream > 0, other=0)
    step = tl.load(table + num + stream) + ordinal - before
    top = tl.load(table + 2 * num + stream)
    if HOLE_SEARCH > 0:
        # The i-th hole is stepped over by whoever is at or behind it after the i before it were.
        places = tl.load(geometry + 7)
        holes = positions + (7 + final_capacity) * num + stream * places
        counted = tl.load(positions + 6 * num + stream)
        dead = tl.load(table + 3 * num + stream)
        passed = dead
        beyond = dead * 0 + places
        for _ in tl.static_range(HOLE_SEARCH):
            middle = (passed + beyond) // 2
            hole = tl.load(holes + (counted + middle) % places)
            behind = (middle < places) & (hole - (middle - dead) <= step)
            passed = tl.where(behind, middle + 1, passed)
            beyond = tl.where(behind, beyond, middle)
        step += passed - dead
    slot = step % capacity
    at = slot * num + stream
    final = tl.load(rows32 + at * row_words + final_word, mask=inside, other=0)
    used = tl.zeros([BLOCK], dtype=tl.int64)
    last_at = at
    if REACH > 1:
        rewards = rows32.to(tl.pointer_type(tl.float32))
        total = tl.load(rewards + at * row_words + reward_word, mask=inside, other=0.0)
        alive = inside
        for k in tl.static_range(1, REACH):
            alive = alive & (final == -1) & (step + k < top)
            later = (step + k) % capacity * num + stream
            ending = tl.load(rows32 + later * row_words + final_word, mask=alive, other=0)
            if HOLE_SEARCH > 0:
                alive = alive & (ending != -3)  # a return ends before a hole
            reward = tl.load(rewards + later * row_words + reward_word, mask=alive, other=0.0)
            total += reward * tl.load(powers + k)
            final = tl.where(alive, ending, final)
            last_at = tl.where(alive, later, last_at)
            used += alive.to(tl.int64)
        tl.store(total_out + lane, total, mask=inside)
        tl.store(found + 2 * count + lane, last_at, mask=inside)
    side = side_start + stream * final_capacity
    place = tl.load(positions + 3 * num + stream) % final_capacity
    pending = (step + used + 1 >= top) & (tl.load(positions + 4 * num + stream) == 1)
    following = (step + used + 1) % capacity * num + stream
    following = tl.where(pending, side + place, following)
    after = tl.where(final >= 0, side + final, tl.where(final == -1, following, last_at))
    tl.store(found + lane, at, mask=inside)
    tl.store(found + count + lane, after, mask=inside)
    tl.store(index_out + 2 * lane, slot, mask=inside)
    tl.store(index_out + 2 * lane + 1, stream, mask=inside)
    tl.store(generation_out + lane, step // capacity, mask=inside)
    tl.store(steps_out + lane, used + 1, mask=inside)
    tl.store(discount_out + lane, tl.load(powers + used + 1), mask=inside)


@triton.jit
def gather(
    rows64,
    found,
    rows_out,
    later_out,
    count,
    ROW_WORDS: tl.constexpr,
    LATER_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies rows and the successor prefixes of other rows, ``ROWS`` of each a program, in int64 words."""
    lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = lane < count
    lane = lane.to(tl.int64)
    at = tl.load(found + lane, mask=inside, other=0)
    after = tl.load(found + count + lane, mask=inside, other=0)
    for start in tl.static_range(0, ROW_WORDS, BLOCK):
        word = start + tl.arange(0, BLOCK)
        mask = inside[:, None] & (word < ROW_WORDS)[None, :]
        value = tl.load(rows64 + at[:, None] * ROW_WORDS + word[None, :], mask=mask)
        tl.store(rows_out + lane[:, None] * ROW_WORDS + word[None, :], value, mask=mask)
        if start < LATER_WORDS:
            mask = inside[:, None] & (word < LATER_WORDS)[None, :]
            value = tl.load(rows64 + after[:, None] * ROW_WORDS + word[None, :], mask=mask)
            tl.store(later_out + lane[:, None] * LATER_WORDS + word[None, :], value, mask=mask)


@triton.jit
def patch(
    rows8,
    rows32,
    out8,
    out32,
    last,
    total,
    count,
    row_bytes,
    reward_word,
    FLAGS: tl.constexpr,
    FLAG_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the returns and the flags of the last rows used into gathered rows."""
    lane = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = lane < count
    source = tl.load(last + lane, mask=inside, other=0)
    for byte in tl.static_range(FLAG_BYTES):
        value = tl.load(rows8 + source * row_bytes + FLAGS + byte, mask=inside, other=0)
        tl.store(out8 + lane * row_bytes + FLAGS + byte, value, mask=inside)
    rewards = out32.to(tl.pointer_type(tl.float32))
    tl.store(rewards + lane * (row_bytes // 4) + reward_word, tl.load(total + lane, mask=inside), mask=inside)


@triton.jit
def place_finals(
    numbers,
    finals,
    positions,
    final_step,
    rows64,
    rows32,
    geometry,
    count,
    finals_words,
    ROW_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONCE: tl.constexpr,
):
    """One program stores one listed final observation; ``count_finals`` makes them count, where streams end twice.

    ``numbers`` int64 ``[5, M]``: stream, step, rank in its stream, row of ``finals``, whether the last of its stream.
    """
    num, capacity = tl.load(geometry), tl.load(geometry + 1)
    final_capacity, side_start = tl.load(geometry + 2), tl.load(geometry + 3)
    row_words, final_word = tl.load(geometry + 4), tl.load(geometry + 5)
    entry = tl.program_id(0)
    stream = tl.load(numbers + entry)
    step = tl.load(numbers + count + entry)
    rank = tl.load(numbers + 2 * count + entry)
    source = tl.load(numbers + 3 * count + entry)
    counted = tl.load(positions + 3 * num + stream)
    place = (counted + rank) % final_capacity
    target = side_start + stream * final_capacity + place
    for start in tl.static_range(0, WORDS, BLOCK):
        word = start + tl.arange(0, BLOCK)
        inside = word < WORDS
        value = tl.load(finals + source * finals_words + word, mask=inside)
        tl.store(rows64 + target * ROW_WORDS + word, value, mask=inside)
    row = step % capacity * num + stream
    tl.store(rows32 + row * row_words + final_word, place.to(tl.int32))
    tl.store(final_step + stream * final_capacity + place, step)
    if ONCE:  # no other program looks at this stream's count
        tl.store(positions + 3 * num + stream, counted + 1)


@triton.jit
def count_finals(numbers, positions, geometry, count, BLOCK: tl.constexpr):
    """Adds the finals of a run to the counts of their streams, once all of them are placed."""
    num = tl.load(geometry)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    stream = tl.load(numbers + entry, mask=inside, other=0)
    added = tl.load(numbers + 2 * count + entry, mask=inside, other=0) + 1
    last = tl.load(numbers + 4 * count + entry, mask=inside, other=0) != 0
    counted = positions + 3 * num + stream
    tl.store(counted, tl.load(counted, mask=inside, other=0) + added, mask=inside & last)
