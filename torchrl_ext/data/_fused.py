# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Launching the fused kernels where they apply; what does not fit takes the torch operations."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from types import ModuleType
from typing import cast

import numpy as np
import torch

from torchrl_ext.data._block import SlotBlock
from torchrl_ext.data._gather import Span, powers
from torchrl_ext.data.fields import Field

_MOST_STREAMS = 16384
_LANES = 256
_ROWS = 8


@lru_cache(maxsize=1)
def _kernels() -> ModuleType:
    # Triton comes with CUDA builds of torch only; importing it takes a while, so only device storages do.
    from torchrl_ext.data import _kernels as kernels

    return kernels


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether kernels can be compiled here."""
    return importlib.util.find_spec("triton") is not None


def available(block: SlotBlock) -> bool:
    """Whether the fused kernels can serve a block."""
    return block.device.type == "cuda" and block.layout.derives and block.num_streams <= _MOST_STREAMS and has_triton()


def can_sample(block: SlotBlock, span: Span, n_steps: int) -> bool:
    """Whether the fused kernels can follow returns of this layout."""
    if not available(block):
        return False
    reward = cast(Field, span.reward)  # looked at where a return has more than one step, which needs it
    return n_steps == 1 or (reward.dtype == torch.float32 and reward.shape.numel() == 1 and span.flag_range is not None)


def sample(
    block: SlotBlock,
    span: Span,
    count: int,
    n_steps: int,
    gamma: float,
    generator: torch.Generator | None,
    seat: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Draws transitions: packed rows, packed successors and the small leaves.

    Random numbers are torch's, of a generator or its own one, or made at a ``seat`` of ``_draw_kernels``.
    """
    out = Outputs.allocate(block, count)
    if seat is None and generator is None:
        out.wide.random_(0, 2**62)
    elif generator is not None:
        out.wide.copy_(torch.randint(2**62, (count,), generator=generator, device=generator.device), non_blocking=True)
    launch(block, span, out, n_steps, gamma, seat=seat)
    return out.leaves()


class Outputs:
    """Everything a draw writes, carved from one allocation; only what :meth:`leaves` returns outlives it."""

    rows: torch.Tensor
    later: torch.Tensor
    index: torch.Tensor
    generation: torch.Tensor
    steps: torch.Tensor
    wide: torch.Tensor
    found: torch.Tensor
    discount: torch.Tensor
    total: torch.Tensor
    weight: torch.Tensor

    def __init__(self, raw: torch.Tensor, row_bytes: int, successor_bytes: int, count: int) -> None:
        self.count = count
        byte, wide, single = torch.uint8, torch.int64, torch.float32
        parts: list[tuple[str, int, torch.dtype, tuple[int, ...] | None]] = []
        parts += [("rows", row_bytes, byte, (row_bytes,)), ("later", successor_bytes, byte, (successor_bytes,))]
        parts += [("index", 16, wide, (2,)), ("generation", 8, wide, ()), ("steps", 8, wide, (1,))]
        parts += [
            ("wide", 8, wide, ()),
            ("found", 24, wide, None),
            ("discount", 4, single, (1,)),
            ("total", 4, single, ()),
            ("weight", 4, single, ()),
        ]
        offset = 0
        for name, size, dtype, shape in parts:
            part = raw.narrow(0, offset, size * count).view(dtype)
            setattr(self, name, part.view(3, count) if shape is None else part.view(count, *shape))
            offset += size * count + -size * count % 16

    @staticmethod
    def nbytes(block: SlotBlock, count: int) -> int:
        """Bytes of the allocation, with room to align each part."""
        return count * (block.layout.row_bytes + block.layout.successor_bytes + 76) // 16 * 16 + 11 * 16

    @classmethod
    def allocate(cls, block: SlotBlock, count: int) -> Outputs:
        raw = torch.empty(cls.nbytes(block, count), dtype=torch.uint8, device=block.device)
        return cls(raw, block.layout.row_bytes, block.layout.successor_bytes, count)

    def leaves(self) -> tuple[torch.Tensor, torch.Tensor, dict]:
        small = {"discount": self.discount, "steps_to_next_obs": self.steps}
        small.update(index=self.index, index_generation=self.generation)
        return self.rows, self.later, small


def launch(
    block: SlotBlock,
    span: Span,
    out: Outputs,
    n_steps: int,
    gamma: float,
    table: torch.Tensor | None = None,
    seat: torch.Tensor | None = None,
    holes: int | None = None,
) -> None:
    """Turns ``out.wide``, or what is drawn at a ``seat``, into transitions.

    ``holes`` is :func:`hole_search` of the block by default.
    """
    kernels, layout, count = _kernels(), block.layout, out.count
    geometry = geometry_of(block, span)
    rows32, rows64 = block.rows32, block.rows64
    kernels.transitions[(-(-count // _LANES),)](
        out.wide if seat is None else seat,
        block.positions,
        _table(block, geometry) if table is None else table,
        geometry,
        powers(gamma, n_steps, block.device),
        rows32,
        out.found,
        out.total,
        out.index,
        out.generation,
        out.discount,
        out.steps,
        count,
        SEARCH=block.num_streams.bit_length(),
        REACH=min(n_steps, block.capacity),
        BLOCK=_LANES,
        HOLE_SEARCH=hole_search(block) if holes is None else holes,
        DRAWS=seat is not None,
    )
    words = layout.row_bytes // 8
    kernels.gather[(-(-count // _ROWS),)](
        rows64,
        out.found,
        out.rows.view(torch.int64),
        out.later.view(torch.int64),
        count,
        ROW_WORDS=words,
        LATER_WORDS=layout.successor_bytes // 8,
        ROWS=_ROWS,
        BLOCK=min(128, 1 << (words - 1).bit_length()),
    )
    if n_steps > 1:
        _patch(block, span, out.rows, rows32, out.found[2], out.total)


def geometry_of(block: SlotBlock, span: Span | None = None) -> torch.Tensor:
    """Returns the sizes of a block as kernels read them, int64 ``[8]``."""
    # Numbers that never change go to the kernels through memory: each argument costs a launch about a microsecond.
    reward = 0 if span is None or span.reward is None else span.reward.offset // 4
    found = block.geometry_tensors.get(reward)
    if found is None:
        numbers = [block.num_streams, block.capacity, block.final_capacity, block.side_start]
        numbers += [block.layout.row_bytes // 4, block.layout.final_offset // 4, reward]
        numbers += [block.hole_capacity]
        # Captured draws keep reading it, so it lives as long as the block.
        found = block.geometry_tensors[reward] = torch.tensor(numbers, dtype=torch.int64, device=block.device)
    return found


def hole_search(block: SlotBlock) -> int:
    """Returns the steps of a search among the holes of a stream, 0 where none lives."""
    return block.hole_capacity.bit_length() if block.may_have_holes else 0


def _table(block: SlotBlock, geometry: torch.Tensor) -> torch.Tensor:
    """What ``ranges`` finds; kept until the next write, except inside a graph, which must look again each time."""
    capturing = block.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if block.sampleable is not None and not capturing:
        return block.sampleable[0]
    table = block.table
    if table is None or capturing:
        table = torch.empty(4, block.num_streams, dtype=torch.int64, device=block.device)
    width = max(16, 1 << (block.num_streams - 1).bit_length())
    _kernels().ranges[(1,)](
        block.positions, block.rows32, geometry, table, BLOCK=width, HOLE_SEARCH=hole_search(block), num_warps=8
    )
    if not capturing:
        block.sampleable, block.table = (table,), table
    return table


def sampleable_table(block: SlotBlock) -> torch.Tensor:
    """Returns running numbers, first steps and ends of what can be sampled, int64 ``[4, N]``; see ``ranges``."""
    return _table(block, geometry_of(block))


def refresh(block: SlotBlock) -> None:
    """Looks for sampleable ranges again if something was written."""
    if block.sampleable is None:
        sampleable_table(block)


def _patch(
    block: SlotBlock,
    span: Span,
    rows: torch.Tensor,
    rows32: torch.Tensor,
    last: torch.Tensor,
    total: torch.Tensor,
) -> None:
    # Kernels patch only what :func:`can_sample` admits: rewards there, and flags in one piece.
    count, (start, stop) = len(last), cast("tuple[int, int]", span.flag_range)
    _kernels().patch[(-(-count // _LANES),)](
        block.rows,
        rows32,
        rows,
        rows.view(torch.int32),
        last,
        total,
        count,
        block.layout.row_bytes,
        cast(Field, span.reward).offset // 4,
        FLAGS=start,
        FLAG_BYTES=stop - start,
        BLOCK=_LANES,
    )


def write_finals(block: SlotBlock, numbers: np.ndarray, finals: torch.Tensor, *, once: bool) -> None:
    """Stores listed final observations, ``once`` where no stream has two of them.

    ``numbers`` is int64 ``[5, M]``, see ``place_finals``.
    """
    kernels, layout, count = _kernels(), block.layout, numbers.shape[1]
    # A few kilobytes of pageable memory: the driver copies them at once, without waiting for the device.
    listed = torch.from_numpy(numbers).to(block.device, non_blocking=True)
    finals = finals[:, : layout.successor_bytes].to(block.device, non_blocking=True)
    if any(at % 8 for at in (finals.storage_offset(), finals.stride(0))) or finals.stride(1) != 1:
        finals = finals.clone(memory_format=torch.contiguous_format)  # columns of a caller that are no words of 8 bytes
    finals = finals.view(torch.int64)
    geometry = geometry_of(block)
    kernels.place_finals[(count,)](
        listed,
        finals,
        block.positions,
        block.final_step,
        block.rows64,
        block.rows32,
        geometry,
        count,
        finals.stride(0),
        ROW_WORDS=layout.row_bytes // 8,
        WORDS=layout.successor_bytes // 8,
        BLOCK=128,
        ONCE=once,
        num_warps=1,
    )
    if once:
        return
    kernels.count_finals[(-(-count // _LANES),)](listed, block.positions, geometry, count, BLOCK=_LANES)
