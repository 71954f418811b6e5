# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What an ensemble may be made of, and which member a record goes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data import ReplayBuffer, TensorStorage

from torchrl_ext.data._member_rows import check_integers
from torchrl_ext.data._members import Member
from torchrl_ext.data._slot_member import SlotMember
from torchrl_ext.data._stock_member import StockMember
from torchrl_ext.data.replay_buffers import SlotReplayBuffer
from torchrl_ext.data.storages import SlotStorage


def adapt_members(buffers: Sequence[ReplayBuffer]) -> list[Member]:
    """Returns one adapter per buffer; raises ``TypeError`` for a buffer that cannot be a member."""
    if not buffers:
        raise ValueError("GroupedReplayBufferEnsemble: at least one member must be given, got none.")
    flat = any(isinstance(buffer, SlotReplayBuffer) for buffer in buffers)
    members: list[Member] = []
    for number, buffer in enumerate(buffers):
        if isinstance(buffer, ReplayBuffer) and not buffer.initialized:
            buffer._init()
        if isinstance(buffer, SlotReplayBuffer):
            members.append(SlotMember(buffer, number))
            continue
        storage = buffer.storage if isinstance(buffer, ReplayBuffer) else None
        if not isinstance(storage, TensorStorage) or isinstance(storage, SlotStorage) or storage.ndim != 1:
            found = "" if storage is None else f" over {type(storage).__name__} with {getattr(storage, 'ndim', 1)} dims"
            raise TypeError(
                "GroupedReplayBufferEnsemble: members must be SlotReplayBuffers, or ReplayBuffers over a tensor "
                f"storage of one dim, got {type(buffer).__name__}{found} as member {number}."
            )
        members.append(StockMember(buffer, number, flat=flat))
    return members


def check_options(
    num_members: int,
    routing_key: NestedKey | None,
    routing_dim: int | None,
    p: Any,
    sample_from_all: bool,
    num_buffer_sampled: int | None,
) -> None:
    """Raises ``ValueError`` for impossible options that TorchRL would accept."""
    if routing_dim is not None and not isinstance(routing_dim, int):
        raise ValueError(f"GroupedReplayBufferEnsemble: routing_dim must be an int, got {routing_dim!r}.")
    if routing_key is not None and routing_dim is not None:
        raise ValueError("GroupedReplayBufferEnsemble: at most one of routing_key and routing_dim must be given.")
    if num_buffer_sampled is not None and num_buffer_sampled < 1:
        raise ValueError(f"GroupedReplayBufferEnsemble: num_buffer_sampled must be >= 1, got {num_buffer_sampled}.")
    if sample_from_all and p is not None:
        raise ValueError("GroupedReplayBufferEnsemble: at most one of p and sample_from_all must be given.")
    if isinstance(p, str):
        if p != "sampleable":
            raise ValueError(f"GroupedReplayBufferEnsemble: p must be weights or 'sampleable', got {p!r}.")
    elif p is not None:
        weights = torch.as_tensor(p, dtype=torch.float64)
        if weights.shape != (num_members,) or not bool((weights >= 0).all()) or not float(weights.sum()) > 0:
            raise ValueError(
                f"GroupedReplayBufferEnsemble: p must be {num_members} weights >= 0, not all 0, got {weights.tolist()}."
            )


def route(
    data: TensorDictBase, num_members: int, routing_key: NestedKey | None, routing_dim: int | None
) -> tuple[TensorDictBase, torch.Tensor]:
    """Returns the flat records and the member of each, int64 ``[M]``."""
    # TensorDict cannot reshape a batch of no records.
    records = data.reshape(-1) if data.batch_size.numel() else data.flatten(0, -1) if data.ndim > 1 else data
    if routing_key is not None:
        ids = records.get(routing_key, None)
        if ids is None:
            raise KeyError(
                f"extend: data must have the routing key {routing_key!r}, got {list(data.keys(True, True))}. "
                "Nothing was written."
            )
        check_integers("extend", **{"member ids": ids})
        if ids.numel() != len(records):
            raise ValueError(
                f"extend: {routing_key!r} must hold one member id per record, got shape {list(ids.shape)} for "
                f"{len(records)} records. Nothing was written."
            )
        return records, ids.reshape(-1).long()
    if routing_dim is None:
        raise RuntimeError("extend: the ensemble must have routing_key or routing_dim, got none. Nothing was written.")
    if not -data.ndim <= routing_dim < data.ndim or data.shape[routing_dim] != num_members:
        raise ValueError(
            f"extend: dim {routing_dim} must go over the {num_members} members, got batch size "
            f"{list(data.batch_size)}. Nothing was written."
        )
    shape = [1] * data.ndim
    shape[routing_dim] = num_members
    ids = torch.arange(num_members, device=data.device).view(shape)
    return records, ids.expand(data.shape).reshape(-1)
