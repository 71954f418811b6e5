# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Stacking what members gave to one sample, in the order in which the members were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDict

from torchrl_ext.data._member_rows import MemberGroups
from torchrl_ext.data.layout import RowLayout

Leaves = dict[NestedKey, torch.Tensor]


@dataclass
class Drawn:
    """Rows that one member gave to a sample."""

    name: str
    """Of the member."""
    count: int
    """How often it was chosen; its rows are that many equal shares."""
    batch: torch.Size
    """Of the leaves; the first dim goes over the shares."""
    leaves: Leaves
    """What the member stores, its transform included."""
    info: Leaves
    """What its sampler says about the rows, handles included."""


def stack_members(drawn: Sequence[Drawn], groups: MemberGroups) -> tuple[TensorDict, TensorDict]:
    """Stacks shares of members in the order of the chosen ids.

    Args:
        drawn (sequence of Drawn): one for each member that was chosen, in the order of their numbers.
        groups (MemberGroups): of the ids.

    Returns:
        tuple: the batch ``[num_buffer_sampled, rows, ...]`` and the info about it, without ``"buffer_ids"``.

    Raises:
        KeyError, ValueError: when members disagree about keys, or about the dtype, shape or device of a key.
    """
    # What some samplers say and others do not belongs to the rows: another member may store it.
    common = set.intersection(*(set(part.info) for part in drawn))
    said = [{key: value for key, value in part.info.items() if key not in common} for part in drawn]
    leaves = _stack(drawn, [{**part.leaves, **own} for part, own in zip(drawn, said, strict=True)], groups)
    info = _stack(drawn, [{key: part.info[key] for key in part.info if key in common} for part in drawn], groups)
    first = drawn[0]
    shares = sum(groups.counts)
    batch = torch.Size([shares, first.batch[0] // first.count, *first.batch[1:]])
    handles = {("index", "index") if key == "index" else key: value for key, value in info.items()}
    devices = {leaf.device for leaf in leaves.values()}
    data = RowLayout.assemble(leaves, batch, next(iter(devices)))
    about = RowLayout.assemble(handles, batch, handles["index", "index"].device)
    return data if len(devices) == 1 else data.clear_device_(), about.clear_device_()  # as TorchRL's info


def _stack(drawn: Sequence[Drawn], leaves: Sequence[Leaves], groups: MemberGroups) -> Leaves:
    _check_keys(drawn, leaves)
    stacked = {}
    for key in leaves[0]:
        parts = []
        for part, own in zip(drawn, leaves, strict=True):
            # By shares: whatever the member made of a share stays together.
            parts.append(own[key].unflatten(0, (part.count, part.batch[0] // part.count)))
        _check_alike(key, drawn, parts)
        stacked[key] = groups.restore(parts[0] if len(parts) == 1 else torch.cat(parts))
    return stacked


def _check_keys(drawn: Sequence[Drawn], leaves: Sequence[Leaves]) -> None:
    for part, own in zip(drawn[1:], leaves[1:], strict=True):
        for key in own.keys() ^ leaves[0].keys():
            has, lacks = (part.name, drawn[0].name) if key in own else (drawn[0].name, part.name)
            raise KeyError(
                f"sample: the members' samples must have the same keys, got {key!r} from {has} and not from {lacks}. "
                "Nothing was returned; add or drop the key in a transform of the member."
            )


def _check_alike(key: NestedKey, drawn: Sequence[Drawn], parts: Sequence[torch.Tensor]) -> None:
    # Concatenating would cast numbers of different dtypes without a word.
    first = parts[0]
    for part, leaf in zip(drawn[1:], parts[1:], strict=True):
        if leaf.dtype != first.dtype or leaf.shape[1:] != first.shape[1:] or leaf.device != first.device:
            raise ValueError(
                f"sample: key {key!r} must be the same in the samples of all members, got {first.dtype} of shape "
                f"{list(first.shape[1:])} on {first.device} from {drawn[0].name} and {leaf.dtype} of shape "
                f"{list(leaf.shape[1:])} on {leaf.device} from {part.name}. Nothing was returned; convert it in a "
                "transform of the member."
            )
