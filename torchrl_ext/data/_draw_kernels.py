# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Triton kernels that make random numbers from a counter (Philox 4x32-10), so that a graph draws by itself.

Seat       int64 ``[2]`` on the device: seed and offset of a torch generator.
Numbers    are a pure function of the seat, of what they are for and of the lane: key ``seed``, counter
           ``(lane, use, low half of offset, high half of offset)``.
Disjoint   from each other, and from what torch's operations draw at the same seed: those count
           ``(low half of offset / 4, high half of offset / 4, thread)``, and no offset reaches a use.
"""

# Triton reads the annotations of a kernel, so that its parameters have none but constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(0x80000001)
NOISE = tl.constexpr(0x80000002)


@triton.jit
def words(seat, lane, USE: tl.constexpr):
    """Returns four uint32 a lane."""
    seed, offset = tl.load(seat), tl.load(seat + 1)
    lane = lane.to(tl.uint32)
    low, high = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    # All of one shape, as Philox mixes them.
    zero = lane * 0
    return tl.philox(seed, lane, (zero + USE).to(tl.uint32), zero + low, zero + high)


@triton.jit
def wide_integer(seat, lane):
    """Returns an int64 of 62 random bits a lane, which says what row is drawn."""
    high, low, _, _ = words(seat, lane, ROWS)
    return (high.to(tl.int64) << 30) | (low.to(tl.int64) >> 2)


@triton.jit
def normal_pair(one, other):
    """Turns two blocks of uint32 into two of standard normal float32, by Box and Muller."""
    uniform = one.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10  # (n + 1/2) / 2**32
    angle = other.to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-09  # pi / 2**31
    radius = tl.sqrt(-2.0 * tl.log(uniform))
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def normals(seat, out, count, BLOCK: tl.constexpr):
    """Fills float32 ``[count]`` with standard normal numbers, four a lane and ``BLOCK`` apart.

    What is filled is a prefix of any longer fill.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    one, two, three, four = words(seat, program * BLOCK + column, NOISE)
    first, second = normal_pair(one, two)
    third, fourth = normal_pair(three, four)
    at = program * 4 * BLOCK + column
    tl.store(out + at, first, mask=at < count)
    tl.store(out + at + BLOCK, second, mask=at + BLOCK < count)
    tl.store(out + at + 2 * BLOCK, third, mask=at + 2 * BLOCK < count)
    tl.store(out + at + 3 * BLOCK, fourth, mask=at + 3 * BLOCK < count)
