# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""From drawn windows to a batch: one packed gather into one block of memory, and views of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDict

from torchrl_ext.data import _fused as fused
from torchrl_ext.data._block import HEAD, SlotBlock, items
from torchrl_ext.data._gather import Chain, Span, successors, successors_numpy, transition_leaves
from torchrl_ext.data._transitions import _own_memory, _take
from torchrl_ext.data._windows import Windows
from torchrl_ext.data.batch_pool import BatchPool
from torchrl_ext.data.layout import FOLLOWED, RowLayout
from torchrl_ext.data.positions import holes_from

_WORD = torch.complex128


@dataclass(frozen=True)
class BatchPlan:
    """Where the parts of a batch of windows lie in its block: rows, successors, index, generations, in this order.

    One block is taken, moved and given back at once, and views of known place cost half of what views of views cost.
    """

    layout: RowLayout
    shape: torch.Size
    views: tuple[tuple[NestedKey, torch.dtype, Any, Any, Any], ...]
    later_at: int
    index_at: int
    generation_at: int
    nbytes: int

    @classmethod
    def of(cls, layout: RowLayout, shape: torch.Size) -> BatchPlan:
        """Plans batches of a shape, ``[B, T]`` or ``[B * T]``."""
        count = shape.numel()
        later_at = count * layout.row_bytes
        index_at = later_at + (count * layout.successor_bytes if layout.derives else 0)
        generation_at = index_at + 16 * count
        nbytes = generation_at + -(-8 * count // 16) * 16
        raw = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        rows, later, index, generation = raw.tensor_split((later_at, index_at, generation_at))
        leaves = transition_leaves(
            layout,
            rows.view(*shape, layout.row_bytes),
            later.view(*shape, layout.successor_bytes) if layout.derives else None,
        )
        leaves["index"] = index.view(torch.int64).view(*shape, 2)
        leaves["index_generation"] = generation[: 8 * count].view(torch.int64).view(shape)
        views = tuple((k, v.dtype, v.shape, v.stride(), v.storage_offset()) for k, v in leaves.items())
        return cls(layout, shape, views, later_at, index_at, generation_at, nbytes)

    def batch(self, raw: torch.Tensor, *, contiguous: bool, pool: BatchPool | None) -> tuple[TensorDict, dict]:
        """Returns the batch that a filled block holds, and its handles row by row."""
        typed: dict[torch.dtype, torch.Tensor] = {}
        leaves: dict[NestedKey, torch.Tensor] = {}
        for key, dtype, shape, stride, offset in self.views:
            base = typed.get(dtype)
            if base is None:
                base = typed[dtype] = raw.view(dtype)
            leaves[key] = base.as_strided(shape, stride, offset)
        if contiguous:
            leaves = {key: _own_memory(leaf, pool) for key, leaf in leaves.items()}
        handles = {"index": leaves["index"].view(-1, 2), "index_generation": leaves["index_generation"].view(-1)}
        return self.layout.assemble(leaves, self.shape, raw.device), handles


plan_batch = lru_cache(maxsize=64)(BatchPlan.of)


def unwrapped_rows(first: np.ndarray, seq_len: int, num_streams: int) -> np.ndarray:
    """Returns the unwrapped rows ``[B, T]`` of windows on the host, given their first ones."""
    return first[:, None] + _ladder_numpy(seq_len) * num_streams


def gather_on_host(
    block: SlotBlock, first: np.ndarray, seq_len: int, plan: BatchPlan, pool: BatchPool | None
) -> torch.Tensor:
    """Fills a block with the rows of windows, window by window, given their unwrapped first rows."""
    num_streams, capacity = block.num_streams, block.capacity
    raw = _take(plan.nbytes, block.device, pool)
    numbers = raw.numpy()
    count = len(first) * seq_len
    wide = numbers[plan.index_at :].view(np.int64)
    index = wide[: 2 * count].reshape(len(first), seq_len, 2)
    # Divisions are for the first rows alone: what follows counts on, and wraps once at most.
    step, stream = np.divmod(first, num_streams)
    lap, slot = np.divmod(step, capacity)
    slots = slot[:, None] + _ladder_numpy(seq_len)
    wrapped = slots >= capacity
    np.subtract(slots, wrapped * capacity, out=index[..., 0])
    index[..., 1] = stream[:, None]
    np.add(lap[:, None], wrapped, out=wide[2 * count : 3 * count].reshape(wrapped.shape))
    at, width = (index[..., 0] * num_streams + stream[:, None]).ravel(), block.words.shape[1]
    words = raw.view(_WORD).as_strided((count, width), (width, 1))
    torch.index_select(block.words, 0, torch.from_numpy(at), out=words)
    if block.layout.derives:
        rows = numbers[: plan.later_at].reshape(count, -1)
        later = numbers[plan.later_at : plan.index_at].reshape(count, -1)
        _put_successors(block, step, stream, at, rows, later)
    return raw


def _put_successors(
    block: SlotBlock, step: np.ndarray, stream: np.ndarray, at: np.ndarray, rows: np.ndarray, later: np.ndarray
) -> None:
    """Copies the successors inside a window from its next row, and looks for the others: at ends and behind it."""
    num_streams, seq_len = block.num_streams, len(at) // len(step)
    found = items(later)
    found[:-1] = items(rows[1:, : later.shape[1]])
    final = rows.view(np.int32)[:, block.layout.final_offset // 4]
    other = final != FOLLOWED
    other[seq_len - 1 :: seq_len] = True
    lane = other.nonzero()[0]
    kind, row = final[lane], at[lane]
    side = block.side_start + row % num_streams * block.final_capacity + kind
    following = (row + num_streams) % (block.capacity * num_streams)
    after = np.where(kind >= 0, side, np.where(kind == FOLLOWED, following, row))
    # Only the last row of a window can be the newest of its stream, whose successor may be pending.
    newest = (step + seq_len == block.np_positions[HEAD, stream]).nonzero()[0]
    if len(newest):
        last = newest * seq_len + (seq_len - 1)
        chain = Chain(None, at[last], np.ones_like(last), None, final[last])
        after[lane.searchsorted(last)] = successors_numpy(block, chain, stream[newest], 1)
    found[lane] = block.successor_items[after]


def gather_on_device(block: SlotBlock, windows: Windows[torch.Tensor], seq_len: int, plan: BatchPlan) -> torch.Tensor:
    """Does what :func:`gather_on_host` does, with torch operations only and no host synchronisation."""
    stream, positions = windows.stream.unsqueeze(-1), block.positions
    steps = windows.step.unsqueeze(-1) + _ladder(seq_len, block.device)
    slot = steps.remainder(block.capacity)
    at = torch.add(stream, slot, alpha=block.num_streams).flatten()
    raw = torch.empty(plan.nbytes, dtype=torch.uint8, device=block.device)
    rows = raw[: plan.later_at].view(_WORD).view(len(at), -1)
    torch.index_select(block.words, 0, at, out=rows)
    if block.layout.derives:
        room = (positions[HEAD][stream] - steps).flatten()
        final = rows.view(torch.int32)[:, block.layout.final_offset // 4]
        after = successors(block, Chain(None, at, room, None, final), stream.expand_as(steps).flatten(), 1)
        later = raw[plan.later_at : plan.index_at].view(_WORD).view(len(at), -1)
        torch.index_select(block.successor_words, 0, after, out=later)
    index = raw[plan.index_at : plan.generation_at].view(torch.int64).view(*slot.shape, 2)
    torch.stack([slot, stream.expand_as(slot)], -1, out=index)
    generation = raw[plan.generation_at :].view(torch.int64)[: len(at)].view(slot.shape)
    torch.div(steps, block.capacity, rounding_mode="floor", out=generation)
    return raw


def gather_fused(
    block: SlotBlock,
    windows: Windows[torch.Tensor],
    row_offset: torch.Tensor,
    span: Span,
    seq_len: int,
    plan: BatchPlan,
) -> torch.Tensor:
    """Does what :func:`gather_on_device` does with the kernels of one-step transitions.

    Those find a row by its number among all sampleable rows, where a window is as many numbers in a row; what they
    write begins with the parts of a plan, in the same order.
    """
    count = len(windows)
    raw = torch.empty(fused.Outputs.nbytes(block, count * seq_len), dtype=torch.uint8, device=block.device)
    out = fused.Outputs(raw, block.layout.row_bytes, block.layout.successor_bytes, count * seq_len)
    first = row_offset[windows.stream] + windows.step
    if block.may_have_holes:
        first += holes_from(block, windows.stream, windows.step)
    torch.add(first.unsqueeze(-1), _ladder(seq_len, block.device), out=out.wide.view(count, seq_len))
    fused.launch(block, span, out, 1, 1.0)
    return raw[: plan.nbytes]


@lru_cache(maxsize=16)
def _ladder_numpy(seq_len: int) -> np.ndarray:
    return np.arange(seq_len)


def _ladder(seq_len: int, device: torch.device) -> torch.Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.arange(seq_len, device=device)  # memory of that graph, which nobody else may read
    return _kept_ladder(seq_len, device)


@lru_cache(maxsize=16)
def _kept_ladder(seq_len: int, device: torch.device) -> torch.Tensor:
    # Copied, which is complete when it returns: whoever comes next may be on another stream.
    return torch.arange(seq_len).to(device)
