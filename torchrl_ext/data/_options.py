# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What a storage may be asked for: sizes, options, and the kind of memory."""

from __future__ import annotations

import torch

from torchrl_ext.data._block import Kind
from torchrl_ext.data.layout import RowLayout


def check_sizes(capacity: int, num_streams: int, final_capacity: int | None) -> None:
    """Raises ``ValueError`` for impossible sizes."""
    for name, value, least in (("capacity", capacity, 2), ("num_streams", num_streams, 1)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"SlotStorage: {name} must be an int >= {least}, got {value!r}.")
    if final_capacity is not None and final_capacity < 2:
        raise ValueError(
            f"SlotStorage: final_capacity must be >= 2 (one pending successor, one final), got {final_capacity}."
        )


def check_options(layout: RowLayout | None, next_obs: str | None, extra: str) -> None:
    """Raises ``ValueError`` for unknown options, and for a ``next_obs`` that is not the layout's."""
    if next_obs not in (None, "derive", "store"):
        raise ValueError(f"SlotStorage: next_obs must be 'derive' or 'store', got {next_obs!r}.")
    if layout is not None and next_obs not in (None, layout.next_obs):
        raise ValueError(f"SlotStorage: next_obs must be the layout's {layout.next_obs!r}, got {next_obs!r}.")
    if extra not in ("raise", "drop"):
        raise ValueError(f"SlotStorage: extra must be 'raise' or 'drop', got {extra!r}.")


def find_place(
    device: torch.device | str, *, pinned: bool, shared: bool, filename: str | None
) -> tuple[torch.device, Kind]:
    """Returns the device with its index and the kind of memory; raises ``ValueError`` when two kinds are asked for."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    places = [name for name, on in (("pinned", pinned), ("shared", shared), ("filename", filename)) if on]
    if len(places) > 1 or (places and device.type != "cpu"):
        raise ValueError(
            f"SlotStorage: at most one of pinned, shared and filename goes with device='cpu', got {places} on {device}."
        )
    if device.type == "cuda":
        return device, "cuda"
    return device, "pinned" if pinned else "shared" if shared else "file" if filename else "cpu"
