# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Assembling a batch of transitions from drawn rows."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDict

from torchrl_ext.data._block import SlotBlock
from torchrl_ext.data._gather import Chain, Span, follow, follow_numpy, successors, successors_numpy
from torchrl_ext.data.batch_pool import BatchPool
from torchrl_ext.data.draws import Draw
from torchrl_ext.data.layout import is_next, next_of

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
) -> TensorDict:
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
    span = _span(block, reward_key, n_steps)
    on_host = not block.on_device
    if on_host and (n_steps == 1 or span.reward.dtype in _NUMPY_REWARDS):
        chain = follow_numpy(block, draw, span, n_steps, gamma)
    else:
        chain = follow(block, draw, span, n_steps, gamma)
    rows, later = _gather(block, block.words, draw.at, pool), None
    if layout.derives:
        find = successors_numpy if on_host else successors
        later = _gather(block, block.successor_words, find(block, chain, draw.stream, draw.unit), pool)
    elif n_steps > 1:
        later = _gather(block, block.words, chain.last_at, pool)
    small = _small(chain, draw, gamma)
    if device is not None and device != block.device:
        rows, later, chain, small = _move(device, rows, later, chain, small)
    leaves = layout.leaves(rows, layout.fields)
    if layout.derives:
        leaves.update((next_of(key), leaf) for key, leaf in layout.leaves(later, layout.prefix).items())
    elif later is not None:
        own = [field for field in layout.fields if is_next(field.key)]
        leaves.update(layout.leaves(later, own))
    if chain.steps is not None:
        # The gathered rows are this batch's own: the return and the last flags replace the row's in place.
        reward = leaves[span.reward.key]
        reward.copy_(chain.reward.view(reward.shape))
        for field in span.flags:
            start = field.offset - span.start
            flag = chain.span[:, start : start + field.nbytes].view(field.dtype)
            leaves[field.key].copy_(flag.view(leaves[field.key].shape))
    if contiguous:
        leaves = {key: _own_memory(leaf, pool) for key, leaf in leaves.items()}
    return layout.assemble({**leaves, **small}, torch.Size([len(draw)]), rows.device)


def _span(block: SlotBlock, reward_key: NestedKey, n_steps: int) -> Span:
    span = Span.of(block, reward_key)
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


def _gather(block: SlotBlock, words: torch.Tensor, at: torch.Tensor, pool: BatchPool | None) -> torch.Tensor:
    out = _take(len(at) * words.shape[1] * 16, block.device, pool)
    out = out.view(words.dtype).view(len(at), words.shape[1])
    torch.index_select(words, 0, at, out=out)
    return out.view(torch.uint8)


def _small(chain: Chain, draw: Draw, gamma: float) -> dict[NestedKey, torch.Tensor]:
    count, device = len(draw), draw.at.device
    if chain.steps is None:
        discount = torch.full((count, 1), gamma, device=device)
        steps = torch.ones(count, 1, dtype=torch.int64, device=device)
    else:
        steps = chain.steps.unsqueeze(-1)
        discount = torch.pow(gamma, steps.to(torch.float32))
    index = torch.stack([draw.slot, draw.stream], -1)
    return {
        "discount": discount,
        "steps_to_next_obs": steps,
        "index": index,
        "index_generation": draw.generation,
    }


def _move(device: torch.device, rows, later, chain: Chain, small: dict):
    rows = rows.to(device, non_blocking=True)
    later = None if later is None else later.to(device, non_blocking=True)
    small = {key: leaf.to(device, non_blocking=True) for key, leaf in small.items()}
    if chain.steps is not None:
        chain.reward, chain.span = chain.reward.to(device), chain.span.to(device)
    return rows, later, chain, small


def _own_memory(leaf: torch.Tensor, pool: BatchPool | None) -> torch.Tensor:
    out = _take(leaf.numel() * leaf.dtype.itemsize, leaf.device, pool).view(leaf.dtype).view(leaf.shape)
    return out.copy_(leaf)
