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

import numpy as np
import torch

from torchrl_ext.data._block import FINALS, HEAD, NEWEST, PENDING, SlotBlock
from torchrl_ext.data.draws import Draw
from torchrl_ext.data.layout import FOLLOWED, HOLE, Field
from torchrl_ext.data.packing import END_KEYS


@dataclass(frozen=True)
class Span:
    """The aligned 16-byte words of a row that hold the reward, the flags and ``final``."""

    start: int
    stop: int
    reward: Field | None
    flags: tuple[Field, ...]
    final_offset: int

    @classmethod
    def of(cls, block: SlotBlock, reward_key) -> Span:
        """Finds the span of a layout."""
        fields = block.layout.by_key
        reward = fields.get(reward_key)
        flags = tuple(fields[key] for key in END_KEYS if key in fields)
        needed = [*flags, *([] if reward is None else [reward])]
        start = min([block.layout.final_offset, *(field.offset for field in needed)]) // 16 * 16
        stop = max([block.layout.final_offset + 4, *(field.offset + field.nbytes for field in needed)])
        return cls(start, -(-stop // 16) * 16, reward, flags, block.layout.final_offset)


@dataclass
class Chain:
    """What a return used: steps, the sum of rewards, the last row, its span and its ``final``."""

    steps: torch.Tensor | None
    reward: torch.Tensor | None
    last_at: torch.Tensor
    last_room: torch.Tensor
    span: torch.Tensor | None
    final: torch.Tensor


def follow_numpy(block: SlotBlock, draw: Draw, span: Span, n_steps: int, gamma: float) -> Chain:
    """Follows returns on the host, on compact copies of the spans: the gathered rows would be a cache miss each."""
    if n_steps == 1:
        return Chain(None, None, draw.at, draw.room, None, block.final.index_select(0, draw.at))
    at, room = draw.at.numpy(), draw.room.numpy()
    ring = block.capacity * block.num_streams
    width = span.stop - span.start
    words = block.words[:, span.start // 16 : span.stop // 16]
    words = words.squeeze(1) if words.shape[1] == 1 else words
    dtype = np.float32 if span.reward.dtype == torch.float32 else np.float64
    reward_at, final_at = span.reward.offset - span.start, span.final_offset - span.start

    def read(rows: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        gathered = words.index_select(0, rows).numpy().reshape(len(at), -1)
        parts = gathered.view(np.uint8).reshape(len(at), width)
        final = parts[:, final_at : final_at + 4].view(np.int32)[:, 0]
        return gathered, final, parts[:, reward_at : reward_at + span.reward.nbytes].view(dtype)[:, 0]

    last, final, reward = read(draw.at)
    total = reward.copy()
    alive = (final == FOLLOWED) & (room > draw.unit)
    steps = np.ones(len(at), dtype=np.int64)
    for k in range(1, n_steps):
        # Rows whose return has ended read somewhere harmless; the mask drops what they read.
        later = at + k * block.num_streams
        later -= (later >= ring) * np.int64(ring)
        gathered, final, reward = read(torch.from_numpy(later))
        alive &= final != HOLE
        np.add(total, reward * dtype(gamma**k), out=total, where=alive)
        np.copyto(last, gathered, where=alive[:, None])
        steps += alive
        alive &= (final == FOLLOWED) & (room > (k + 1) * draw.unit)
    last_at = at + (steps - 1) * block.num_streams
    last_at -= (last_at >= ring) * np.int64(ring)
    last = last.view(np.uint8).reshape(len(at), width)
    parts = (steps, total, last_at, room - (steps - 1) * draw.unit, last)
    tensors = [torch.from_numpy(part) for part in parts]
    return Chain(*tensors, torch.from_numpy(last[:, final_at : final_at + 4].view(np.int32)[:, 0]))


def follow(block: SlotBlock, draw: Draw, span: Span, n_steps: int, gamma: float) -> Chain:
    """Follows returns with torch operations only, without a host synchronisation (CUDA, and any reward dtype)."""
    if n_steps == 1:
        return Chain(None, None, draw.at, draw.room, None, block.final.index_select(0, draw.at))
    ring = block.capacity * block.num_streams
    spans = block.words[:, span.start // 16 : span.stop // 16]
    last = spans.index_select(0, draw.at)
    final = last.view(torch.int32)[:, (span.final_offset - span.start) // 4]
    total, steps = _part(last, span, span.reward).clone(), torch.ones_like(draw.at)
    alive = (final == FOLLOWED) & (draw.room > draw.unit)
    for k in range(1, n_steps):
        later = (draw.at + k * block.num_streams) % ring
        read = spans.index_select(0, later)
        final = read.view(torch.int32)[:, (span.final_offset - span.start) // 4]
        alive = alive & (final != HOLE)
        # ``where`` and not a product: what ended returns read may be NaN.
        total = torch.where(alive, total + _part(read, span, span.reward) * gamma**k, total)
        last = torch.where(alive.unsqueeze(-1), read, last)
        steps = steps + alive
        alive = alive & (final == FOLLOWED) & (draw.room > (k + 1) * draw.unit)
    last_at = (draw.at + (steps - 1) * block.num_streams) % ring
    room = draw.room - (steps - 1) * draw.unit
    final = last.view(torch.int32)[:, (span.final_offset - span.start) // 4]
    return Chain(steps, total, last_at, room, last.view(torch.uint8), final)


def _part(span_words: torch.Tensor, span: Span, field: Field) -> torch.Tensor:
    return span_words.view(field.dtype)[:, (field.offset - span.start) // field.dtype.itemsize]


def successors_numpy(block: SlotBlock, chain: Chain, stream: torch.Tensor, unit: int) -> torch.Tensor:
    """Returns the flat rows that hold the successors, on the host; few rows need more than the next ring row."""
    at, final, streams = chain.last_at.numpy(), chain.final.numpy(), stream.numpy()
    ring = block.capacity * block.num_streams
    found = at + block.num_streams
    found -= (found >= ring) * np.int64(ring)
    newest = chain.last_room.numpy() <= unit
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
    return torch.from_numpy(found)


def successors(block: SlotBlock, chain: Chain, stream: torch.Tensor, unit: int) -> torch.Tensor:
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
    chain = Chain(None, None, at, torch.where(newest, 1, 2), None, final)
    found = successors(block, chain, stream, 1).clamp(0, block.sink)
    words = block.successor_words.index_select(0, found)
    return block.layout.leaves(words.view(torch.uint8), block.layout.prefix)
