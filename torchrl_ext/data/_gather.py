# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""From drawn rows to transitions: n-step returns, the last row used, and its true successor.

A return starts at a drawn row and goes on while the row's successor is the next row of the ring (hidden ``final`` is
``FOLLOWED``), that row is sampleable, and fewer than ``n`` rows were used. So it never crosses a termination, a
truncation, a reset or the head; at the head it is shorter. Everything about a row's end lies in the last bytes of the
row (reward, flags, ``final``), so each further step costs one gather of a 16-byte word.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, cast

import numpy as np
import torch
from tensordict import NestedKey

from torchrl_ext.data._block import FINALS, HEAD, NEWEST, PENDING, SlotBlock
from torchrl_ext.data.draws import Array, Draw, modulo
from torchrl_ext.data.fields import Field, is_next, next_of
from torchrl_ext.data.layout import FOLLOWED, HOLE, RowLayout
from torchrl_ext.data.packing import END_KEYS


@dataclass(frozen=True)
class Span:
    """The aligned 16-byte words of a row that hold the reward, the flags and ``final``."""

    start: int
    stop: int
    reward: Field | None
    flags: tuple[Field, ...]
    final_offset: int
    patches: tuple[tuple[torch.dtype, int, int], ...]
    """What an n-step transition takes from the last row used: aligned words, at which column of a row and of a span."""
    flag_range: tuple[int, int] | None
    """The bytes of a row that the flags fill alone; None when something lies between them."""

    @classmethod
    def of(cls, layout: RowLayout, reward_key: NestedKey) -> Span:
        """Finds the span of a layout."""
        reward = layout.by_key.get(reward_key)
        flags = tuple(layout.by_key[key] for key in END_KEYS if key in layout.by_key)
        needed = [*flags, *([] if reward is None else [reward])]
        start = min([layout.final_offset, *(field.offset for field in needed)]) // 16 * 16
        stop = max([layout.final_offset + 4, *(field.offset + field.nbytes for field in needed)])
        # Reward and flags are neighbours unless another small field sorts between them.
        first = min((f.offset for f in needed), default=0)
        last = max((f.offset + f.nbytes for f in needed), default=0)
        if any(first <= field.offset < last and field not in needed for field in layout.fields):
            ranges = [(f.offset, f.offset + f.nbytes) for f in needed]
        else:
            # What pads the row up to ``final`` may be copied along.
            ends_row = all(field.offset + field.nbytes <= last for field in layout.fields)
            ranges = [(first, layout.final_offset if ends_row else last)]
        patches = tuple(word for span_range in ranges for word in _words(*span_range, start))
        flag_range = (min((f.offset for f in flags), default=0), max((f.offset + f.nbytes for f in flags), default=0))
        between = any(flag_range[0] <= f.offset < flag_range[1] and f not in flags for f in layout.fields)
        return cls(
            start, -(-stop // 16) * 16, reward, flags, layout.final_offset, patches, None if between else flag_range
        )


def _words(first: int, last: int, start: int) -> list[tuple[torch.dtype, int, int]]:
    """Cuts a byte range into the widest aligned words: copying a column of bytes costs three times one of words."""
    words = []
    while first < last:
        dtype = next(
            dtype
            for dtype in (torch.int64, torch.int32, torch.uint8)
            if first % dtype.itemsize == 0 and first + dtype.itemsize <= last
        )
        words.append((dtype, first // dtype.itemsize, (first - start) // dtype.itemsize))
        first += dtype.itemsize
    return words


@dataclass
class Chain(Generic[Array]):
    """What a return used: steps, the last row, its ``final``, and its span with the return in place of the reward.

    Arrays on the host, tensors on a device; ``steps`` and ``span`` (uint8 ``[B, width]``) are None for one step.
    """

    steps: Array | None
    last_at: Array
    last_room: Array
    span: Array | None
    final: Array


def follow_numpy(block: SlotBlock, draw: Draw[np.ndarray], span: Span, n_steps: int, gamma: float) -> Chain[np.ndarray]:
    """Follows returns on the host, on compact copies of the spans: the gathered rows would be a cache miss each."""
    at, room, unit = draw.at, draw.room, draw.unit
    if n_steps == 1:
        return Chain(None, at, room, None, block.final.index_select(0, torch.from_numpy(at)).numpy())
    count, ring = len(at), block.capacity * block.num_streams
    reach = min(n_steps, block.capacity)  # a return within a ring of C rows uses C at most
    # All steps in one gather; rows whose return has ended read somewhere harmless, be it NaN.
    rows = modulo(at + (np.arange(reach, dtype=at.dtype) * block.num_streams)[:, None], ring)
    words = block.words[:, span.start // 16 : span.stop // 16]
    words = words.squeeze(1) if words.shape[1] == 1 else words
    read = words.index_select(0, torch.from_numpy(rows.ravel())).numpy()
    parts = read.view(np.uint8).reshape(reach, count, -1)
    field = cast(Field, span.reward)  # given wherever a return has more than one step
    final_at, reward_at = span.final_offset - span.start, field.offset - span.start
    final = parts[..., final_at : final_at + 4].view(np.int32)[..., 0]
    dtype = np.float32 if field.dtype == torch.float32 else np.float64
    reward = parts[..., reward_at : reward_at + field.nbytes].view(dtype)[..., 0]
    total, used = reward[0].copy(), np.zeros(count, dtype=at.dtype)
    alive, holes = np.ones(count, dtype=bool), block.may_have_holes
    for k in range(1, reach):
        alive &= final[k - 1] == FOLLOWED
        alive &= room > k * unit
        if holes:
            alive &= final[k] != HOLE
        total += np.where(alive, reward[k] * dtype(gamma**k), dtype(0))
        used += alive
    lanes = np.arange(count, dtype=at.dtype)
    last = read[used * at.dtype.type(count) + lanes].view(np.uint8).reshape(count, -1)
    last_final = last[:, final_at : final_at + 4].view(np.int32)[:, 0]
    last[:, reward_at : reward_at + field.nbytes].view(dtype)[:, 0] = total
    last_at = modulo(at + used * at.dtype.type(block.num_streams), ring)
    return Chain(used + 1, last_at, room - used * at.dtype.type(unit), last, last_final)


def follow(block: SlotBlock, draw: Draw[torch.Tensor], span: Span, n_steps: int, gamma: float) -> Chain[torch.Tensor]:
    """Follows returns with torch operations only, without a host synchronisation (CUDA, and any reward dtype)."""
    if n_steps == 1:
        return Chain(None, draw.at, draw.room, None, block.final.index_select(0, draw.at))
    ring, reward = block.capacity * block.num_streams, cast(Field, span.reward)
    spans = block.words[:, span.start // 16 : span.stop // 16]
    last = spans.index_select(0, draw.at)
    final = last.view(torch.int32)[:, (span.final_offset - span.start) // 4]
    total, steps = _part(last, span, reward).clone(), torch.ones_like(draw.at)
    alive = (final == FOLLOWED) & (draw.room > draw.unit)
    for k in range(1, min(n_steps, block.capacity)):
        read = spans.index_select(0, (draw.at + k * block.num_streams) % ring)
        final = read.view(torch.int32)[:, (span.final_offset - span.start) // 4]
        alive = alive & (final != HOLE)
        # ``where`` and not a product: what ended returns read may be NaN.
        total = torch.where(alive, total + _part(read, span, reward) * gamma**k, total)
        last = torch.where(alive.unsqueeze(-1), read, last)
        steps = steps + alive
        alive = alive & (final == FOLLOWED) & (draw.room > (k + 1) * draw.unit)
    last_at = (draw.at + (steps - 1) * block.num_streams) % ring
    room = draw.room - (steps - 1) * draw.unit
    final = last.view(torch.int32)[:, (span.final_offset - span.start) // 4].clone()
    _part(last, span, reward).copy_(total)
    return Chain(steps, last_at, room, last.view(torch.uint8), final)


def transition_leaves(layout: RowLayout, rows: torch.Tensor, later: torch.Tensor | None) -> dict:
    """Returns the leaves of transitions by key: the rows' own, and the successors' (or last rows') under ``"next"``."""
    leaves = layout.leaves(rows, layout.fields)
    if later is None:
        return leaves
    if layout.derives:
        successors = layout.leaves(later, layout.prefix).values()
        leaves.update(zip(_next_keys(layout), successors, strict=True))
    else:
        leaves.update(layout.leaves(later, [field for field in layout.fields if is_next(field.key)]))
    return leaves


@lru_cache(maxsize=64)
def _next_keys(layout: RowLayout) -> tuple[NestedKey, ...]:
    return tuple(next_of(field.key) for field in layout.prefix)


@lru_cache(maxsize=64)
def powers(gamma: float, n_steps: int, device: torch.device) -> torch.Tensor:
    """Returns ``gamma**k`` for ``k <= n_steps``, float32 ``[n_steps + 1]``; rounded once, alike on every device."""
    return torch.tensor([gamma**k for k in range(n_steps + 1)], dtype=torch.float32, device=device)


def _part(span_words: torch.Tensor, span: Span, field: Field) -> torch.Tensor:
    return span_words.view(field.dtype)[:, (field.offset - span.start) // field.dtype.itemsize]


def successors_numpy(block: SlotBlock, chain: Chain[np.ndarray], streams: np.ndarray, unit: int) -> np.ndarray:
    """Returns the flat rows that hold the successors, on the host; few rows need more than the next ring row."""
    at, final = chain.last_at, chain.final
    ring = block.capacity * block.num_streams
    found = modulo(at + block.num_streams, ring)
    newest = chain.last_room <= unit
    special = np.flatnonzero((final != FOLLOWED) | newest)
    if len(special):
        ids, kind = streams[special], final[special]
        side = block.side_start + ids * block.final_capacity
        positions = block.np_positions
        # The last sampleable row of a stream has a pending successor, or the next row where that is in the ring.
        pending = side + positions[FINALS, ids] % block.final_capacity
        follows = np.where(positions[NEWEST, ids] == PENDING, pending, found[special])
        own = np.where(kind == FOLLOWED, np.where(newest[special], follows, found[special]), at[special])
        found[special] = np.where(kind >= 0, side + kind, own)
    return found


def successors(block: SlotBlock, chain: Chain[torch.Tensor], stream: torch.Tensor, unit: int) -> torch.Tensor:
    """Returns the flat rows that hold the successors, with torch operations only."""
    positions, final = block.positions, chain.final
    found = (chain.last_at + block.num_streams) % (block.capacity * block.num_streams)
    side = block.side_start + stream * block.final_capacity
    pending = (chain.last_room <= unit) & (positions[NEWEST][stream] == PENDING)
    found = torch.where(pending, side + positions[FINALS][stream] % block.final_capacity, found)
    return torch.where(final >= 0, side + final, torch.where(final == FOLLOWED, found, chain.last_at))


def gather_successors(block: SlotBlock, at: torch.Tensor, stream: torch.Tensor, rows: torch.Tensor) -> dict:
    """Returns the one-step successors of any rows by next key; a row that does not live stands in for its own."""
    final = rows.view(torch.int32)[:, block.layout.final_offset // 4]
    slot = at.div(block.num_streams, rounding_mode="floor")
    newest = (slot + 1) % block.capacity == block.positions[HEAD][stream] % block.capacity
    unknown = newest & (block.positions[NEWEST][stream] != PENDING)
    final = torch.where((final == FOLLOWED) & unknown, HOLE, final)
    chain = Chain(None, at, torch.where(newest, 1, 2), None, final)
    found = successors(block, chain, stream, 1).clamp(0, block.sink)
    words = block.successor_words.index_select(0, found)
    return block.layout.leaves(words.view(torch.uint8), block.layout.prefix)
