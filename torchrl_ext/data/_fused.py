# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Launching the fused kernels where they apply; what does not fit takes the torch operations."""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import numpy as np
import torch

from torchrl_ext.data._block import SlotBlock
from torchrl_ext.data._gather import Span, powers

_MOST_STREAMS = 16384
_LANES = 256
_ROWS = 8


@lru_cache(maxsize=1)
def _kernels():
    # Triton comes with CUDA builds of torch only; importing it takes a while, so only device storages do.
    from torchrl_ext.data import _kernels as kernels

    return kernels


def available(block: SlotBlock) -> bool:
    """Whether the fused kernels can serve a block."""
    return (
        block.device.type == "cuda"
        and block.layout.derives
        and block.num_streams <= _MOST_STREAMS
        and importlib.util.find_spec("triton") is not None
    )


def can_sample(block: SlotBlock, span: Span, n_steps: int) -> bool:
    """Whether the fused kernels can follow returns of this layout."""
    if not available(block) or block.may_have_holes:
        return False
    reward = span.reward
    return n_steps == 1 or (reward.dtype == torch.float32 and reward.shape.numel() == 1 and span.flag_range is not None)


def sample(
    block: SlotBlock, span: Span, count: int, n_steps: int, gamma: float, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Draws transitions: packed rows, packed successors and the small leaves."""
    kernels, device, layout = _kernels(), block.device, block.layout
    drawn_on = device if generator is None else generator.device
    wide = torch.randint(2**62, (count,), generator=generator, device=drawn_on)
    if drawn_on != device:
        wide = wide.to(device, non_blocking=True)
    geometry = _geometry(block, span)
    rows32, rows64 = block.rows.view(torch.int32), block.rows.view(torch.int64)
    found = torch.empty(3, count, dtype=torch.int64, device=device)
    generation = torch.empty(count, dtype=torch.int64, device=device)
    steps = torch.empty(count, 1, dtype=torch.int64, device=device)
    index = torch.empty(count, 2, dtype=torch.int64, device=device)
    discount = torch.empty(count, 1, dtype=torch.float32, device=device)
    total = discount if n_steps == 1 else torch.empty(count, dtype=torch.float32, device=device)
    kernels.transitions[(-(-count // _LANES),)](
        wide,
        block.positions,
        _table(block, geometry, rows32),
        geometry,
        powers(gamma, n_steps, device),
        rows32,
        found,
        total,
        index,
        generation,
        discount,
        steps,
        count,
        SEARCH=block.num_streams.bit_length(),
        REACH=min(n_steps, block.capacity),
        BLOCK=_LANES,
    )
    rows = torch.empty(count, layout.row_bytes, dtype=torch.uint8, device=device)
    later = torch.empty(count, layout.successor_bytes, dtype=torch.uint8, device=device)
    words = layout.row_bytes // 8
    lanes = min(128, 1 << (words - 1).bit_length())
    kernels.gather[(-(-count // _ROWS),)](
        rows64,
        found,
        rows.view(torch.int64),
        later.view(torch.int64),
        count,
        ROW_WORDS=words,
        LATER_WORDS=layout.successor_bytes // 8,
        ROWS=_ROWS,
        BLOCK=lanes,
    )
    if n_steps > 1:
        _patch(block, span, rows, rows32, found[2], total)
    small = {"discount": discount, "steps_to_next_obs": steps, "index": index, "index_generation": generation}
    return rows, later, small


def _geometry(block: SlotBlock, span: Span) -> torch.Tensor:
    # Numbers that never change go to the kernels through memory: each argument costs a launch about a microsecond.
    if block.geometry_tensor is None or block.geometry_tensor[0] is not span:
        reward = 0 if span.reward is None else span.reward.offset // 4
        numbers = [block.num_streams, block.capacity, block.final_capacity, block.side_start]
        numbers += [block.layout.row_bytes // 4, span.final_offset // 4, reward]
        block.geometry_tensor = span, torch.tensor(numbers, dtype=torch.int64, device=block.device)
    return block.geometry_tensor[1]


def _table(block: SlotBlock, geometry: torch.Tensor, rows32: torch.Tensor) -> torch.Tensor:
    """What ``ranges`` finds; kept until the next write, except inside a graph, which must look again each time."""
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if block.sampleable is not None and not capturing:
        return block.sampleable[0]
    table = torch.empty(3, block.num_streams, dtype=torch.int64, device=block.device)
    width = max(16, 1 << (block.num_streams - 1).bit_length())
    _kernels().ranges[(1,)](block.positions, rows32, geometry, table, BLOCK=width, num_warps=8)
    if not capturing:
        block.sampleable = (table,)
    return table


def _patch(
    block: SlotBlock,
    span: Span,
    rows: torch.Tensor,
    rows32: torch.Tensor,
    last: torch.Tensor,
    total: torch.Tensor,
) -> None:
    count, (start, stop) = len(last), span.flag_range
    _kernels().patch[(-(-count // _LANES),)](
        block.rows,
        rows32,
        rows,
        rows.view(torch.int32),
        last,
        total,
        count,
        block.layout.row_bytes,
        span.reward.offset // 4,
        FLAGS=start,
        FLAG_BYTES=stop - start,
        BLOCK=_LANES,
    )


def write_finals(block: SlotBlock, numbers: np.ndarray, finals: torch.Tensor) -> None:
    """Stores listed final observations. ``numbers`` is int64 ``[5, M]``, see ``place_finals``."""
    kernels, layout, count = _kernels(), block.layout, numbers.shape[1]
    # A few kilobytes of pageable memory: the driver copies them at once, without waiting for the device.
    numbers = torch.from_numpy(numbers).to(block.device, non_blocking=True)
    finals = finals.to(block.device, non_blocking=True)
    geometry = _geometry(
        block, Span.of(layout, ("next", "reward")) if block.geometry_tensor is None else block.geometry_tensor[0]
    )
    kernels.place_finals[(count,)](
        numbers,
        finals.view(torch.int64),
        block.positions,
        block.final_step,
        block.rows.view(torch.int64),
        block.rows.view(torch.int32),
        geometry,
        count,
        finals.shape[-1] // 8,
        ROW_WORDS=layout.row_bytes // 8,
        WORDS=layout.successor_bytes // 8,
        BLOCK=128,
        num_warps=1,
    )
    kernels.count_finals[(-(-count // _LANES),)](numbers, block.positions, geometry, count, BLOCK=_LANES)
