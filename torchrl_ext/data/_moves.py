# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Tensors on their way to another device: who waits for them."""

from __future__ import annotations

import torch


def arrived(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a tensor on a device; a CUDA device is not waited for, the host gets it complete."""
    # On its way to the host, nothing would keep a reader from looking at it before it is there.
    return tensor.to(device, non_blocking=device.type == "cuda")


def moved(leaf: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same for a small leaf of pageable memory, for which a CUDA device would make the host wait."""
    if device.type == "cuda" and leaf.device.type == "cpu":
        leaf = leaf.pin_memory()
    return arrived(leaf, device)
