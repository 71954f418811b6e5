# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Batches sampled ahead, saved as tensors: TorchRL pickles them, and a pickle from elsewhere runs what it likes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, unravel_key

_NAME = "prefetch.pt"


def write_prefetch(folder: Path, state: dict[str, Any]) -> None:
    """Writes the queue of a buffer with ``prefetch``; raises ``TypeError`` for what is not made of tensors."""
    queue = []
    for batch, info in state["queue"]:
        if not isinstance(batch, TensorDict) or not all(isinstance(value, torch.Tensor) for value in info.values()):
            raise TypeError(
                "dumps: prefetched batches must be TensorDicts with tensors as info to be saved, got "
                f"{type(batch).__name__} with {sorted(map(str, info))}. Sample them first, or save without prefetch."
            )
        leaves = [[unravel_key(key), leaf.clone()] for key, leaf in batch.items(True, True)]
        device = None if batch.device is None else str(batch.device)
        queue.append({"batch_size": list(batch.batch_size), "device": device, "leaves": leaves, "info": dict(info)})
    torch.save({"version": state["version"], "capacity": state["capacity"], "queue": queue}, folder / _NAME)


def read_prefetch(folder: Path) -> dict[str, Any] | None:
    """Reads what :func:`write_prefetch` wrote, None where there is none; raises ``ValueError`` when it is damaged."""
    path = folder / _NAME
    if not path.exists():
        return None
    try:
        state = torch.load(path, weights_only=True)
        state["queue"] = tuple(
            (_rebuild(entry["leaves"], entry["batch_size"], entry.get("device")), entry["info"])
            for entry in state["queue"]
        )
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError) as error:
        raise ValueError(
            f"loads: {path} must hold undamaged prefetched batches, got {type(error).__name__}. Nothing was changed."
        ) from error
    return state


def _rebuild(leaves: list, batch_size: list[int], device: str | None) -> TensorDict:
    batch = TensorDict({}, batch_size=batch_size, device=device)
    for key, leaf in leaves:
        batch.set(key, leaf)
    return batch
