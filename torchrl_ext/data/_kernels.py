# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Triton kernels that fuse the bookkeeping of draws and writes on a CUDA device.

The torch operations of :mod:`torchrl_ext.data.draws`, :mod:`torchrl_ext.data._gather` and
:mod:`torchrl_ext.data._device_write` give the same numbers (returns to rounding, because a multiply-add is fused here)
in about thirty launches; these kernels need two to four, which is what a sample of 65,536 rows in 0.1 ms leaves room
for. Kernels see positions as ``int64 [7, N]`` with the rows of :mod:`torchrl_ext.data._block`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ranges(positions, ends, low_out, high_out, num, capacity, BLOCK: tl.constexpr):
    """One program: the sampleable range of each stream and the running number of sampleable rows."""
    stream = tl.arange(0, BLOCK)
    inside = stream < num
    head = tl.load(positions + stream, mask=inside, other=0)
    reserved = tl.load(positions + num + stream, mask=inside, other=0)
    tail = tl.load(positions + 2 * num + stream, mask=inside, other=0)
    newest = tl.load(positions + 4 * num + stream, mask=inside, other=0)
    low = tl.maximum(tail, reserved - capacity)
    high = tl.maximum(low, head - (newest == 0).to(tl.int64))
    tl.store(low_out + stream, low, mask=inside)
    tl.store(high_out + stream, high, mask=inside)
    tl.store(ends + stream, tl.cumsum(tl.where(inside, high - low, 0), 0), mask=inside)


@triton.jit
def transitions(
    wide,
    positions,
    ends,
    low,
    high,
    powers,
    rows32,
    at_out,
    after_out,
    last_out,
    total_out,
    index_out,
    generation_out,
    discount_out,
    steps_out,
    count,
    num,
    capacity,
    final_capacity,
    side_start,
    row_words,
    final_word,
    reward_word,
    SEARCH: tl.constexpr,
    REACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turns random numbers into rows, follows their returns and finds their successors; one lane a transition."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < count
    ordinal = tl.load(wide + lane, mask=inside, other=0) % tl.load(ends + num - 1)
    first = tl.zeros([BLOCK], dtype=tl.int64)
    last = first + num
    for _ in range(SEARCH):
        middle = (first + last) // 2
        beyond = tl.load(ends + middle, mask=middle < num, other=9223372036854775807) <= ordinal
        first = tl.where(beyond, middle + 1, first)
        last = tl.where(beyond, last, middle)
    stream = tl.minimum(first, num - 1)
    before = tl.load(ends + stream - 1, mask=stream > 0, other=0)
    step = tl.load(low + stream) + ordinal - before
    top = tl.load(high + stream)
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
            reward = tl.load(rewards + later * row_words + reward_word, mask=alive, other=0.0)
            total += reward * tl.load(powers + k)
            final = tl.where(alive, tl.load(rows32 + later * row_words + final_word, mask=alive, other=0), final)
            last_at = tl.where(alive, later, last_at)
            used += alive.to(tl.int64)
        tl.store(total_out + lane, total, mask=inside)
        tl.store(last_out + lane, last_at, mask=inside)
    side = side_start + stream * final_capacity
    place = tl.load(positions + 3 * num + stream) % final_capacity
    pending = (step + used + 1 >= top) & (tl.load(positions + 4 * num + stream) == 1)
    following = (step + used + 1) % capacity * num + stream
    following = tl.where(pending, side + place, following)
    after = tl.where(final >= 0, side + final, tl.where(final == -1, following, last_at))
    tl.store(at_out + lane, at, mask=inside)
    tl.store(after_out + lane, after, mask=inside)
    tl.store(index_out + 2 * lane, slot, mask=inside)
    tl.store(index_out + 2 * lane + 1, stream, mask=inside)
    tl.store(generation_out + lane, step // capacity, mask=inside)
    tl.store(steps_out + lane, used + 1, mask=inside)
    tl.store(discount_out + lane, tl.load(powers + used + 1), mask=inside)


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
    counted,
    final_step,
    rows64,
    rows32,
    count,
    num,
    capacity,
    final_capacity,
    side_start,
    finals_words,
    row_words,
    final_word,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program stores one listed final observation; ``counted`` takes the new counts, applied by ``commit``.

    ``numbers`` int64 ``[4, M]``: stream, step, rank in its stream, row of ``finals``.
    """
    entry = tl.program_id(0)
    stream = tl.load(numbers + entry)
    step = tl.load(numbers + count + entry)
    rank = tl.load(numbers + 2 * count + entry)
    source = tl.load(numbers + 3 * count + entry)
    sequence = tl.load(positions + 3 * num + stream) + rank
    place = sequence % final_capacity
    target = side_start + stream * final_capacity + place
    for start in tl.static_range(0, WORDS, BLOCK):
        word = start + tl.arange(0, BLOCK)
        inside = word < WORDS
        value = tl.load(finals + source * finals_words + word, mask=inside)
        tl.store(rows64 + target * row_words + word, value, mask=inside)
    row = step % capacity * num + stream
    tl.store(rows32 + row * row_words * 2 + final_word, place.to(tl.int32))
    tl.store(final_step + stream * final_capacity + place, step)
    # Finals of one stream may be stored in any order: their steps and sequences only grow, so the largest wins.
    tl.atomic_max(counted + stream, sequence + 1)


@triton.jit
def commit(
    positions,
    counted,
    rows32,
    first,
    width,
    num,
    capacity,
    added,
    known,
    row_words,
    final_word,
    BLOCK: tl.constexpr,
):
    """Moves the heads of a column block and notes what is known of the newest rows' successors."""
    stream = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = stream < width
    stream = first + stream
    head = tl.load(positions + stream, mask=inside, other=0) + added
    row = (head - 1) % capacity * num + stream
    final = tl.load(rows32 + row * row_words + final_word, mask=inside, other=0)
    tl.store(positions + stream, head, mask=inside)
    tl.store(positions + num + stream, head, mask=inside)
    tl.store(positions + 4 * num + stream, tl.where(final == -1, known, 2).to(tl.int64), mask=inside)
    sequence = tl.load(counted + stream, mask=inside, other=-1)
    tl.store(positions + 3 * num + stream, sequence, mask=inside & (sequence >= 0))
    tl.store(counted + stream, tl.full([BLOCK], -1, tl.int64), mask=inside)
