# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Checks what a collector is given, before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import nn

from torchrl_ext.data import RowLayout, SlotReplayBuffer, SlotStorage
from torchrl_ext.data.sizing import free_bytes, gigabytes
from torchrl_ext.transport import HostRing
from torchrl_ext.weight_update import SeqlockWeightSyncScheme

__all__ = [
    "check_choices",
    "check_frames",
    "check_memory",
    "check_numbers",
    "check_storage",
    "device_of",
    "frames_unit",
    "make_scheme",
    "options_of",
    "ring_capacity",
    "target_device",
]

#: Bytes of a ring where its slots are not numbered by the caller, and the most and fewest slots then.
_RING_BYTES, _MOST_SLOTS, _FEWEST_SLOTS = 1 << 28, 64, 4


def check_choices(
    policy: Any, policy_factory: Any, *, batches: str, run_ahead: bool, max_restarts: int, replay_buffer: Any
) -> None:
    """Raises for options that exclude each other."""
    if policy is not None and policy_factory is not None:
        raise ValueError("RingCollector: policy and policy_factory must not both be given. Nothing was started.")
    if batches not in ("all", "any"):
        raise ValueError(f"RingCollector: batches must be 'all' or 'any', got {batches!r}. Nothing was started.")
    if max_restarts and replay_buffer is None:
        raise ValueError("RingCollector: max_restarts must come with a replay_buffer. Nothing was started.")
    if replay_buffer is not None and (batches == "any" or not run_ahead):
        option = "batches='any'" if batches == "any" else "run_ahead=False"
        raise ValueError(
            f"RingCollector: {option} must come without a replay_buffer, which is filled as rows come. Nothing was "
            "started; hold workers back with hold_at."
        )


def check_numbers(counts: Mapping[str, tuple[Any, int]], seconds: Mapping[str, float]) -> None:
    """Raises unless counts, which come with the least allowed, are whole numbers (or None) and seconds are positive."""
    for name, (value, least) in counts.items():
        if value is not None and (not isinstance(value, Integral) or value < least):
            raise ValueError(
                f"RingCollector: {name} must be an int of at least {least}, got {value!r}. Nothing was started."
            )
    for name, duration in seconds.items():
        if not duration > 0:
            raise ValueError(
                f"RingCollector: {name} must be a positive number of seconds, got {duration!r}. Nothing was started."
            )


def frames_unit(widths: Sequence[int], *, whole: bool) -> int:
    """Returns the rows of a step in a batch, which is of all workers where ``whole``, else of one."""
    if whole:
        return sum(widths)
    if len(set(widths)) > 1:
        raise ValueError(
            f"RingCollector: batches='any' must come with equal workers, got {widths} streams. Nothing was started."
        )
    return widths[0]


def make_scheme(
    schemes: Mapping[str, SeqlockWeightSyncScheme] | None, policy: Any, num_workers: int
) -> SeqlockWeightSyncScheme | None:
    """Returns the sender of the policy's weights, initialised; None where there are no weights."""
    has_weights = isinstance(policy, nn.Module) and any(True for _ in (*policy.parameters(), *policy.buffers()))
    if schemes is not None:
        scheme = schemes.get("policy")
        if list(schemes) != ["policy"] or not isinstance(scheme, SeqlockWeightSyncScheme) or not has_weights:
            raise TypeError(
                "RingCollector: weight_sync_schemes must be {'policy': SeqlockWeightSyncScheme(...)} for a module "
                f"with weights, got {dict(schemes)} for {type(policy).__name__}. Nothing was started."
            )
    elif has_weights:
        scheme = SeqlockWeightSyncScheme()
    else:
        return None
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=num_workers)
    return scheme


def options_of(value: bool | dict[str, Any]) -> dict[str, Any] | None:
    """Returns the options of a compilation that may be switched on by ``True``, None where it is off."""
    return dict(value) if isinstance(value, Mapping) else ({} if value else None)


def check_frames(name: str, frames: int, multiple: int) -> None:
    """Raises unless frames are whole steps of all streams, naming the nearest such number."""
    if not isinstance(frames, Integral):
        raise ValueError(
            f"RingCollector: {name} must be an int, a positive multiple of the {multiple} streams, got {frames}. "
            "Nothing was started."
        )
    if frames < 1 or frames % multiple:
        nearest = max(1, round(frames / multiple)) * multiple
        raise ValueError(
            f"RingCollector: {name} must be a positive multiple of the {multiple} streams, got {frames}; the nearest "
            f"is {nearest}. Nothing was started."
        )


def check_storage(replay_buffer: Any, layout: RowLayout, num_streams: int) -> SlotStorage | None:
    """Returns the storage that a collector fills, checking that its rows fit."""
    if replay_buffer is None:
        return None
    storage = getattr(replay_buffer, "storage", None)
    if not isinstance(replay_buffer, SlotReplayBuffer) or not isinstance(storage, SlotStorage):
        raise TypeError(
            "RingCollector: replay_buffer must be a SlotReplayBuffer with a SlotStorage, got "
            f"{type(replay_buffer).__name__}. Nothing was started; iterate the collector to fill other buffers."
        )
    if storage.num_streams != num_streams or storage.layout not in (None, layout):
        kept = None if storage.layout is None else storage.layout.digest[:12]
        raise ValueError(
            f"RingCollector: the storage must have {num_streams} streams and layout {layout.digest[:12]} "
            f"({list(layout.by_key)}), got {storage.num_streams} and {kept} "
            f"({[] if storage.layout is None else list(storage.layout.by_key)}). Nothing was started; make it with "
            "layout=collector.layout, or choose the same observation_keys and extra_keys."
        )
    return storage


def target_device(storage: SlotStorage | None, storing_device: torch.device | str | None) -> torch.device | None:
    """Returns the CUDA device that rows end up on, the storage's if it has one; None for the host."""
    device = device_of(storing_device)
    if storage is not None and storage.device is not None:
        device = device_of(storage.device)
    return device if device is not None and device.type == "cuda" else None


def ring_capacity(slots: int | None, slot_bytes: int) -> int:
    """Returns the slots of a ring."""
    if slots is not None:
        return slots
    return max(_FEWEST_SLOTS, min(_MOST_SLOTS, _RING_BYTES // max(slot_bytes, 1)))


def check_memory(layout: RowLayout, capacity: int, widths: Sequence[int]) -> None:
    """Raises ``MemoryError``, stating both numbers, when the host rings of all workers do not fit."""
    needed = sum(HostRing.nbytes_for(layout, capacity, width) for width in widths)
    free = free_bytes("cpu")
    if needed > free:
        raise MemoryError(
            f"RingCollector: the rings need {gigabytes(needed)}, {gigabytes(free)} are free. Nothing was started; "
            "choose fewer ring_slots."
        )


def device_of(value: torch.device | str | None, *, current: bool = True) -> torch.device | None:
    """Returns a device that exists, or None.

    Args:
        value (torch.device, optional): which.

    Keyword Args:
        current (bool, optional): whether ``"cuda"`` is this process's current device, else the first one. Defaults to
            True.

    Raises:
        ValueError: when it does not.
    """
    if value is None:
        return None
    device = torch.device(value)
    if device.type == "cuda":
        index = device.index
        if index is None:
            # Where nobody used CUDA yet nobody chose a device: asking would make a context.
            index = torch.cuda.current_device() if current and torch.cuda.is_initialized() else 0
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise ValueError(
                f"RingCollector: device {str(device)!r} must exist, got {torch.cuda.device_count()} CUDA devices. "
                "Nothing was started."
            )
        device = torch.device("cuda", index)
    return device
