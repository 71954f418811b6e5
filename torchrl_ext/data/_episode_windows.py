# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Windows without a reset inside: only their last row may end an episode.

A row ends one when its successor is not the next row (its hidden ``final`` says so: flags, resets that no flag
announced, cuts) or when a flag of it is raised. Looking at every row of a storage costs as much as sampling from it a
few dozen times, so on the host windows are drawn first and looked at then; a device counts the ends of all windows at
once, after each write.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from torchrl_ext.data._block import HEAD, SlotBlock
from torchrl_ext.data._gather import Span
from torchrl_ext.data._window_rows import unwrapped_rows
from torchrl_ext.data._windows import Starts, draw_from, draw_on_host, sampleable
from torchrl_ext.data.layout import FOLLOWED, HOLE

#: Rounds of drawing and rejecting before all starts are looked at, and the least windows of a round.
_ROUNDS, _LEAST = 4, 16


def episode_starts(block: SlotBlock, span: Span, seq_len: int) -> Starts[torch.Tensor]:
    """Returns the starts of all windows without a reset inside, each a run of its own; looks at every row."""
    capacity, num = block.capacity, block.num_streams
    ended = _ended(block.ring, span, 0)
    inside = torch.zeros_like(ended, dtype=torch.int32)
    if seq_len > 1:
        # Ends among the first T - 1 rows of the window from each slot on, around the ring.
        running = torch.cat([ended, ended[: seq_len - 2]]).cumsum(0, dtype=torch.int32)
        inside = running[seq_len - 2 :] - running[:capacity] + ended
    low, high, row_offset = sampleable(block)
    newest = block.positions[HEAD] - 1
    slot = torch.arange(capacity, device=block.device).unsqueeze(-1)
    step = newest - (newest - slot).remainder(capacity)
    valid = (inside == 0) & (step >= low) & (step + seq_len <= high)
    if block.may_have_holes:
        last_is_hole = (block.final[: capacity * num].view(capacity, num) == HOLE).roll(1 - seq_len, 0)
        valid &= ~last_is_hole
    return Starts.of(step.T, valid.T.long(), row_offset)


def draw_within_episodes(
    block: SlotBlock, span: Span, seq_len: int, count: int, rng: torch.Generator | None
) -> np.ndarray | None:
    """Draws unwrapped first rows of windows of a host block uniformly over those without a reset inside, if any.

    Windows drawn uniformly over all starts and kept when they qualify are uniform over those that qualify. Where those
    are rare, all starts are looked at.
    """
    kept: list[np.ndarray] = []
    tried = found = 0
    for _ in range(_ROUNDS):
        # As many as will do, by the share kept so far; never more than a handful times what is asked for.
        wanted = math.ceil(1.25 * (count - found) * tried / found) if found else count
        drawn = draw_on_host(block, seq_len, min(max(wanted, _LEAST), 8 * count + _LEAST), rng)
        if drawn is None:
            return None
        kept.append(drawn[~_ends_inside(block, span, drawn, seq_len)])
        tried, found = tried + len(drawn), found + len(kept[-1])
        if found >= count or not found:
            break
    if found < count:
        starts = episode_starts(block, span, seq_len)
        counted = Starts(starts.ends.numpy(), starts.offset.numpy(), starts.per_stream)
        drawn = draw_from(counted, block.num_streams, count - found, rng)
        if drawn is None:
            return None
        kept.append(drawn)
    return np.concatenate(kept)[:count]


def _ends_inside(block: SlotBlock, span: Span, first: np.ndarray, seq_len: int) -> np.ndarray:
    if seq_len == 1:
        return np.zeros(len(first), dtype=bool)
    at = unwrapped_rows(first, seq_len - 1, block.num_streams) % (block.capacity * block.num_streams)
    words = block.words[:, span.start // 16 : span.stop // 16]
    read = words.index_select(0, torch.from_numpy(at.ravel())).view(torch.uint8)
    return _ended(read.view(*at.shape, -1), span, span.start).any(-1).numpy()


def _ended(raw: torch.Tensor, span: Span, start: int) -> torch.Tensor:
    """Tells which rows end an episode, from their bytes ``[..., width]`` from offset ``start`` on."""
    ended = raw.view(torch.int32)[..., (span.final_offset - start) // 4] != FOLLOWED
    for flag in span.flags:
        first = (flag.offset - start) // flag.dtype.itemsize
        raised = raw.view(flag.dtype)[..., first : first + flag.numel].bool()
        ended |= raised[..., 0] if flag.numel == 1 else raised.any(-1)
    return ended
