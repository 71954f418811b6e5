# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Checking records of any streams, and finding the shortest way to write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from tensordict import TensorDictBase

from torchrl_ext.data._device_write import write_run_on_device
from torchrl_ext.data._routed_device import run_on, write_records_on_device
from torchrl_ext.data._routed_write import write_records
from torchrl_ext.data._slot_write import layout_of, write_run
from torchrl_ext.data.packing import Run, check_run

if TYPE_CHECKING:
    from torchrl_ext.data.storages import SlotStorage


def extend_records(storage: SlotStorage, records: TensorDictBase, streams: torch.Tensor) -> torch.Tensor:
    """Implements :meth:`SlotStorage.extend_records`."""
    where = "extend_records"
    if not isinstance(records, TensorDictBase) or records.batch_dims != 1 or not len(records):
        found = list(records.batch_size) if isinstance(records, TensorDictBase) else type(records).__name__
        raise ValueError(
            f"{where}: records must be a TensorDict of batch size [M] with M >= 1, got {found}. Nothing was written."
        )
    device = torch.as_tensor(streams).device
    streams = check_streams(where, streams, records.shape, storage)
    block = storage._block
    layout = block.layout if block is not None else layout_of(storage, records)
    checked = check_run(layout, records, where=where, extra=storage.extra, records=True)
    if block is None:
        block = storage._allocate(layout)
    if not block.on_device:
        checked = run_on(block.device, checked)
    # Streams on a device would have to be read back to see their order.
    shape = _shape_of_run(streams.numpy(), storage.num_streams) if streams.device.type == "cpu" else None
    with storage._order:
        if shape is not None:
            return _write_run(storage, _as_run(checked, *shape), time_first=shape[0]).to(device)
        if block.on_device:
            return write_records_on_device(block, checked, streams)
        return write_records(storage, checked, streams.numpy()).to(device)


def check_streams(where: str, streams: torch.Tensor, shape: torch.Size, storage: SlotStorage) -> torch.Tensor:
    """Returns stream ids as int64 of the records' shape; raises unless they are integers in range.

    For a storage on the host they come back on the host.
    """
    streams, num_streams = torch.as_tensor(streams), storage.num_streams
    if streams.dtype.is_floating_point or streams.dtype.is_complex or streams.dtype == torch.bool:
        raise TypeError(f"{where}: stream ids must be integers, got {streams.dtype}. Nothing was written.")
    if streams.shape[: len(shape)] != shape or streams.numel() != shape.numel():
        raise ValueError(
            f"{where}: stream ids must be one per record, shape {list(shape)}, got {list(streams.shape)}. "
            "Nothing was written."
        )
    streams = streams.reshape(shape).long()
    if storage.device.type == "cpu":
        streams = streams.cpu()  # waits for a device, as the records' own copy to the host does
    # For a storage on a device the range would have to be read back; ids out of range go to no stream there.
    if streams.device.type == "cpu" and streams.numel():
        ids = streams.numpy()
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= num_streams:
            raise ValueError(
                f"{where}: stream ids must be in [0, {num_streams}), got from {low} to {high}. Nothing was written."
            )
    return streams


def _shape_of_run(ids: np.ndarray, num_streams: int) -> tuple[bool, int, int] | None:
    """Returns whether time comes first, ``K`` and ``N`` of records that are all streams in order; None for others."""
    steps, rest = divmod(len(ids), num_streams)
    if rest or ids[0] != 0:
        return None
    streams = np.arange(num_streams)
    if not np.count_nonzero(ids.reshape(steps, num_streams) != streams):
        return True, steps, num_streams
    if not np.count_nonzero(ids.reshape(num_streams, steps) != streams[:, None]):
        return False, steps, num_streams
    return None


def _as_run(records: Run, time_first: bool, steps: int, num_streams: int) -> Run:
    def shaped(leaf: torch.Tensor) -> torch.Tensor:
        first, second = (steps, num_streams) if time_first else (num_streams, steps)
        leaf = leaf.reshape(first, second, *leaf.shape[2:])
        return leaf if time_first else leaf.transpose(0, 1)

    leaves = {key: shaped(leaf) for key, leaf in records.leaves.items()}
    successors = records.successors
    if successors is not None:
        successors = {key: shaped(leaf) for key, leaf in successors.items()}
    return Run(leaves, successors, steps, num_streams, records.device)


def _write_run(storage: SlotStorage, run: Run, *, time_first: bool) -> torch.Tensor:
    columns = slice(0, storage.num_streams)
    if storage.block.on_device:
        handle = write_run_on_device(storage.block, run, columns)
    else:
        handle = write_run(storage, run, columns)
    return (handle.index if time_first else handle.index.transpose(0, 1)).flatten(0, 1)
