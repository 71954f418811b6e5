# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Launching the fused kernels where they apply; what does not fit takes the torch operations."""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import numpy as np
import torch

from torchrl_ext.data._block import PENDING, UNKNOWN, SlotBlock
from torchrl_ext.data._gather import Span, powers
from torchrl_ext.data.packing import PackedRun

_MOST_STREAMS = 16384
_LANES = 256


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, dict]:
    """Draws transitions: rows, rows of their successors, last rows and returns (None for one step), small leaves."""
    kernels, device, num = _kernels(), block.device, block.num_streams
    drawn_on = device if generator is None else generator.device
    wide = torch.randint(2**62, (count,), generator=generator, device=drawn_on).to(device, non_blocking=True)
    ends, low, high = torch.empty(3, num, dtype=torch.int64, device=device)
    blocks = max(16, 1 << (num - 1).bit_length())
    kernels.ranges[(1,)](block.positions, ends, low, high, num, block.capacity, BLOCK=blocks, num_warps=8)
    at, after, last, generation, steps = torch.empty(5, count, dtype=torch.int64, device=device)
    index = torch.empty(count, 2, dtype=torch.int64, device=device)
    total, discount = torch.empty(2, count, dtype=torch.float32, device=device)
    reach = min(n_steps, block.capacity)
    kernels.transitions[(-(-count // _LANES),)](
        wide,
        block.positions,
        ends,
        low,
        high,
        powers(gamma, n_steps, device),
        block.rows.view(torch.int32),
        at,
        after,
        last,
        total,
        index,
        generation,
        discount,
        steps,
        count,
        num,
        block.capacity,
        block.final_capacity,
        block.side_start,
        block.layout.row_bytes // 4,
        span.final_offset // 4,
        0 if span.reward is None else span.reward.offset // 4,
        SEARCH=num.bit_length(),
        REACH=reach,
        BLOCK=_LANES,
    )
    small = {
        "discount": discount.unsqueeze(-1),
        "steps_to_next_obs": steps.unsqueeze(-1),
        "index": index,
        "index_generation": generation,
    }
    return at, after, last if n_steps > 1 else None, total if n_steps > 1 else None, small


def patch(block: SlotBlock, span: Span, rows: torch.Tensor, last: torch.Tensor, total: torch.Tensor) -> None:
    """Writes returns and last flags into gathered rows ``[B, row_bytes]``."""
    count, (start, stop) = len(last), span.flag_range
    _kernels().patch[(-(-count // _LANES),)](
        block.rows,
        block.rows.view(torch.int32),
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
    """Stores listed final observations; :func:`commit` makes them count. ``numbers`` is int64 ``[4, M]``."""
    layout, count = block.layout, numbers.shape[1]
    numbers = torch.from_numpy(numbers).pin_memory().to(block.device, non_blocking=True)
    finals = finals.to(block.device, non_blocking=True)
    _kernels().place_finals[(count,)](
        numbers,
        finals.view(torch.int64),
        block.positions,
        _counted(block),
        block.final_step,
        block.rows.view(torch.int64),
        block.rows.view(torch.int32),
        count,
        block.num_streams,
        block.capacity,
        block.final_capacity,
        block.side_start,
        finals.shape[-1] // 8,
        layout.row_bytes // 8,
        layout.final_offset // 4,
        WORDS=layout.successor_bytes // 8,
        BLOCK=128,
        num_warps=1,
    )


def commit(block: SlotBlock, run: PackedRun, columns: slice, num_steps: int) -> None:
    """Publishes a run whose rows and finals are written."""
    width = columns.stop - columns.start
    _kernels().commit[(-(-width // _LANES),)](
        block.positions,
        _counted(block),
        block.rows.view(torch.int32),
        columns.start,
        width,
        block.num_streams,
        block.capacity,
        num_steps,
        UNKNOWN if run.tail is None else PENDING,
        block.layout.row_bytes // 4,
        block.layout.final_offset // 4,
        BLOCK=_LANES,
    )


def _counted(block: SlotBlock) -> torch.Tensor:
    if getattr(block, "counted", None) is None:
        block.counted = torch.full((block.num_streams,), -1, dtype=torch.int64, device=block.device)
    return block.counted
