# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Assembling a batch of transitions from drawn rows."""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import numpy as np
import torch
from tensordict import NestedKey, TensorDict

from torchrl_ext.data import _fused as fused
from torchrl_ext.data._block import SlotBlock
from torchrl_ext.data._gather import (
    Chain,
    Span,
    follow,
    follow_numpy,
    powers,
    successors,
    successors_numpy,
    transition_leaves,
)
from torchrl_ext.data._graphs import Choice, graph_of
from torchrl_ext.data._moves import arrived, moved
from torchrl_ext.data.batch_pool import BatchPool
from torchrl_ext.data.draws import Draw
from torchrl_ext.data.fields import Field
from torchrl_ext.data.layout import RowLayout

_NUMPY_REWARDS = (torch.float32, torch.float64)


def assemble(
    block: SlotBlock,
    draw: Draw,
    n_steps: int,
    gamma: float,
    reward_key: NestedKey,
    *,
    contiguous: bool = False,
    device: torch.device | None = None,
    pool: BatchPool | None = None,
) -> tuple[TensorDict, dict[NestedKey, torch.Tensor]]:
    """Gathers drawn rows, follows their returns and gathers the successors: one packed gather each.

    Args:
        block (SlotBlock): where the rows are.
        draw (Draw): which rows.
        n_steps, gamma, reward_key: of the return.

    Keyword Args:
        contiguous (bool): ``True`` gives each field its own memory, ``False`` views of packed rows.
        device (torch.device, optional): moves the batch there, packed.
        pool (BatchPool, optional): where host batches come from.
    """
    layout = block.layout
    span = _span(layout, reward_key, n_steps)
    chain: Chain
    after: torch.Tensor | np.ndarray
    if not block.on_device and (n_steps == 1 or cast(Field, span.reward).dtype in _NUMPY_REWARDS):
        draw = draw.numpy()
        chain = follow_numpy(block, draw, span, n_steps, gamma)
        after = successors_numpy(block, chain, draw.stream, draw.unit) if layout.derives else chain.last_at
    else:
        draw = draw.torch()
        chain = follow(block, draw, span, n_steps, gamma)
        after = successors(block, chain, draw.stream, draw.unit) if layout.derives else chain.last_at
    rows, later = _gather(block, block.words, draw.at, pool), None
    if layout.derives:
        later = _gather(block, block.successor_words, after, pool)
    elif n_steps > 1:
        later = _gather(block, block.words, after, pool)
    if chain.steps is not None:
        # The gathered rows are this batch's own: the return and the last flags replace the row's in place.
        last = torch.as_tensor(chain.span)
        for dtype, row_word, span_word in span.patches:
            taken = last.view(dtype)[:, span_word]
            rows.view(dtype)[:, row_word].copy_(taken)
            if later is not None and not layout.derives:
                later.view(dtype)[:, row_word].copy_(taken)
    small = _small(chain, draw, n_steps, gamma, block.device)
    return _finish(layout, rows, later, small, contiguous=contiguous, device=device, pool=pool)


def assemble_fused(
    block: SlotBlock,
    count: int,
    n_steps: int,
    gamma: float,
    reward_key: NestedKey,
    *,
    generator: torch.Generator | None,
    contiguous: bool = False,
    device: torch.device | None = None,
    pool: BatchPool | None = None,
    choice: Choice | None = None,
) -> tuple[TensorDict, dict[NestedKey, torch.Tensor]] | None:
    """Draws and assembles transitions by fused kernels; None where they do not apply.

    Rows are drawn uniformly, or by a ``choice`` that is captured; outside a captured draw a choice does not apply.
    """
    span = _span(block.layout, reward_key, n_steps)
    if not fused.can_sample(block, span, n_steps):
        return None
    own_device = device is None or device == block.device
    if generator is None and own_device and not contiguous and not torch.cuda.is_current_stream_capturing():
        graph = graph_of(block, span, count, n_steps, gamma, *([] if choice is None else [choice]))
        if graph is not None:
            return graph.replay()
    if choice is not None:
        return None
    rows, later, small = fused.sample(block, span, count, n_steps, gamma, generator)
    return _finish(block.layout, rows, later, small, contiguous=contiguous, device=device, pool=pool)


def _finish(
    layout: RowLayout,
    rows: torch.Tensor,
    later: torch.Tensor | None,
    small: dict[NestedKey, torch.Tensor],
    *,
    contiguous: bool,
    device: torch.device | None,
    pool: BatchPool | None,
) -> tuple[TensorDict, dict[NestedKey, torch.Tensor]]:
    if device is not None and device != rows.device:
        rows = arrived(rows, device)
        later = None if later is None else arrived(later, device)
        small = {key: moved(leaf, device) for key, leaf in small.items()}
    leaves = transition_leaves(layout, rows, later)
    if contiguous:
        leaves = {key: _own_memory(leaf, pool) for key, leaf in leaves.items()}
    leaves.update(small)
    return layout.assemble(leaves, rows.shape[:1], rows.device), small


def check_transitions(layout: RowLayout, reward_key: NestedKey, n_steps: int) -> None:
    """Raises ``ValueError`` when returns of a layout cannot be computed; to be asked before anything is drawn."""
    _refuse_finished_returns(layout)
    if n_steps > 1:
        _span(layout, reward_key, n_steps)


@lru_cache(maxsize=64)
def _refuse_finished_returns(layout: RowLayout) -> None:
    # Their own would be replaced by those of the draw, and a loss would discount a stored return by too little.
    stored = [key for key in ("steps_to_next_obs", "discount") if key in layout.by_key]
    if stored:
        raise ValueError(
            f"sample: the rows must not have the keys of a finished return, which are computed here, got {stored}. "
            "Nothing was drawn; write single steps without these keys (no MultiStep) and set n_steps, or use a stock "
            "ReplayBuffer."
        )


@lru_cache(maxsize=64)
def _span(layout: RowLayout, reward_key: NestedKey, n_steps: int) -> Span:
    span = Span.of(layout, reward_key)
    if n_steps > 1 and (
        span.reward is None or not span.reward.dtype.is_floating_point or span.reward.shape.numel() != 1
    ):
        found = "no such key" if span.reward is None else f"{span.reward.dtype} of shape {list(span.reward.shape)}"
        raise ValueError(
            f"sample: n_steps={n_steps} needs one floating-point number at {reward_key!r}, got {found}. "
            "Nothing was drawn; pass reward_key= or cast the rewards."
        )
    return span


def _take(nbytes: int, device: torch.device, pool: BatchPool | None) -> torch.Tensor:
    if pool is not None and device.type == "cpu":
        return pool.take(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _gather(
    block: SlotBlock, words: torch.Tensor, at: torch.Tensor | np.ndarray, pool: BatchPool | None
) -> torch.Tensor:
    rows = torch.as_tensor(at)
    out = _take(len(rows) * words.shape[1] * 16, block.device, pool)
    out = out.view(words.dtype).view(len(rows), words.shape[1])
    torch.index_select(words, 0, rows, out=out)
    return out.view(torch.uint8)


def _small(chain: Chain, draw: Draw, n_steps: int, gamma: float, device: torch.device) -> dict[NestedKey, torch.Tensor]:
    count = len(draw)
    if chain.steps is None:
        discount = torch.full((count, 1), gamma, device=device)
        steps = torch.ones(count, 1, dtype=torch.int64, device=device)
    else:
        # A table costs a sixth of a power.
        steps = torch.as_tensor(chain.steps).long().unsqueeze(-1)
        discount = powers(gamma, n_steps, device)[steps]
    if isinstance(draw.slot, np.ndarray):
        pairs = np.empty((count, 2), dtype=np.int64)
        pairs[:, 0], pairs[:, 1] = draw.slot, draw.stream
        index, generation = torch.from_numpy(pairs), torch.from_numpy(draw.generation)
    else:
        index, generation = torch.stack([draw.slot, draw.stream], -1), draw.generation
    return {"discount": discount, "steps_to_next_obs": steps, "index": index, "index_generation": generation}


def _own_memory(leaf: torch.Tensor, pool: BatchPool | None) -> torch.Tensor:
    out = _take(leaf.numel() * leaf.dtype.itemsize, leaf.device, pool).view(leaf.dtype).view(leaf.shape)
    return out.copy_(leaf)
