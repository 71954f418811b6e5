# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Philox 4x32-10 in NumPy (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), as plainly as can be."""

from __future__ import annotations

import numpy as np

ROWS, NOISE, LANES = 0x80000001, 0x80000002, 256
_LOW = np.uint64(0xFFFFFFFF)


def philox(counter: tuple, key: tuple) -> list[np.ndarray]:
    """Four words of 32 bits (in uint64) for a counter of four and a key of two, which are arrays or numbers."""
    zero, one, two, three = (np.atleast_1d(np.asarray(word, dtype=np.uint64)) for word in counter)
    first, second = (np.uint64(word) for word in key)
    for _ in range(10):
        left, right = np.uint64(0xD2511F53) * zero, np.uint64(0xCD9E8D57) * two
        zero, one, two, three = (
            (right >> np.uint64(32)) ^ one ^ first,
            right & _LOW,
            (left >> np.uint64(32)) ^ three ^ second,
            left & _LOW,
        )
        first, second = (first + np.uint64(0x9E3779B9)) & _LOW, (second + np.uint64(0xBB67AE85)) & _LOW
    return [zero, one, two, three]


def words(seed: int, offset: int, lanes: np.ndarray, use: int) -> list[np.ndarray]:
    """What a seat gives each lane for one use."""
    halves = [value % 2**64 for value in (seed, offset)]
    (key_low, key_high), (low, high) = ((value % 2**32, value >> 32) for value in halves)
    return philox((lanes, use, low, high), (key_low, key_high))


def wide_integers(seed: int, offset: int, count: int) -> np.ndarray:
    """int64 ``[count]`` in ``[0, 2**62)``."""
    high, low, _, _ = words(seed, offset, np.arange(count), ROWS)
    return ((high << np.uint64(30)) | (low >> np.uint64(2))).astype(np.int64)


def normals(seed: int, offset: int, count: int) -> np.ndarray:
    """float64 ``[count]``: of the ``LANES`` words of each kind, four blocks of normal numbers, block after block."""
    programs = -(-count // (4 * LANES))
    drawn = words(seed, offset, np.arange(programs * LANES), NOISE)
    pairs = [_normal_pair(one.astype(np.float64), other) for one, other in (drawn[:2], drawn[2:])]
    blocks = [block.reshape(programs, LANES) for pair in pairs for block in pair]
    return np.stack(blocks, 1).reshape(-1)[:count]


def _normal_pair(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    angle = other.astype(np.uint32).view(np.int32) * (np.pi / 2**31)
    radius = np.sqrt(-2 * np.log((one + 0.5) / 2**32))
    return radius * np.cos(angle), radius * np.sin(angle)
