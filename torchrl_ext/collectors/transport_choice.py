# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Which ring carries a worker's rows, and why."""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

import torch

from torchrl_ext.transport.device_memory import uuid_of

__all__ = ["Transport", "TransportChoice", "choose_transport"]

Transport = Literal["auto", "host", "ipc"]

#: Bytes of a step from which ``"auto"`` takes device memory: below, what a copy costs to enqueue outweighs the copy.
IPC_SLOT_BYTES = 1 << 16


class TransportChoice(NamedTuple):
    """A transport and the reason for it."""

    kind: Literal["host", "ipc"]
    reason: str


def choose_transport(
    transport: Transport,
    *,
    storing_device: torch.device | None,
    policy_device: torch.device | None,
    slot_bytes: int,
) -> TransportChoice:
    """Chooses the ring of a worker, before it is started.

    ``"auto"`` takes device memory when rows are stored on a CUDA device, the worker uses that very GPU anyway (its
    policy runs there) and a step is large enough to pay; otherwise host memory. That the handle can be opened is seen
    when the worker opens it.

    Args:
        transport (str): ``"auto"``, ``"host"`` or ``"ipc"``.

    Keyword Args:
        storing_device (torch.device, optional): where rows end up. None is the host.
        policy_device (torch.device, optional): where the worker's policy runs. None is the host.
        slot_bytes (int): of a step.

    Raises:
        ValueError: for another transport, or when ``"ipc"`` cannot be had, with the reason.

    Examples:
        >>> choose_transport("auto", storing_device=None, policy_device=None, slot_bytes=1 << 20)
        TransportChoice(kind='host', reason='rows are stored on the host')
    """
    if transport not in ("auto", "host", "ipc"):
        raise ValueError(f"RingCollector: transport must be 'auto', 'host' or 'ipc', got {transport!r}.")
    if transport == "host":
        return TransportChoice("host", "it was asked for")
    obstacle = _obstacle(storing_device)
    if transport == "ipc":
        if obstacle is not None:
            raise ValueError(f"RingCollector: transport 'ipc' cannot be had: {obstacle}. Nothing was started.")
        return TransportChoice("ipc", "it was asked for")
    if obstacle is not None:
        return TransportChoice("host", obstacle)
    assert storing_device is not None
    if policy_device is None or policy_device.type != "cuda" or uuid_of(policy_device) != uuid_of(storing_device):
        return TransportChoice("host", f"the workers do not use {storing_device} for anything else")
    if slot_bytes < IPC_SLOT_BYTES:
        return TransportChoice("host", f"a step has {slot_bytes} bytes, fewer than {IPC_SLOT_BYTES}")
    return TransportChoice("ipc", f"policy and replay are on {uuid_of(storing_device)}")


def _obstacle(storing_device: torch.device | None) -> str | None:
    """Returns why device memory cannot be shared, None when it probably can."""
    if storing_device is None or storing_device.type != "cuda":
        return "rows are stored on the host"
    options = ",".join(os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if "expandable_segments:true" in options.replace(" ", "").lower():
        return "expandable_segments:True makes memory that other processes cannot map"
    properties = torch.cuda.get_device_properties(storing_device)
    if "MIG" in properties.name or "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return f"{storing_device} is a MIG slice, which shares no memory between processes"
    return None
