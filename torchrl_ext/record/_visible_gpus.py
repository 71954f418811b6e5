# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Which of the machine's GPUs are this process's CUDA devices, and in which order."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchrl_ext.record._nvml import NvmlDevice

__all__ = ["by_uuids", "visible_gpus"]


def visible_gpus(devices: Sequence[NvmlDevice], visible: str | None) -> list[NvmlDevice]:
    """Returns the devices that CUDA shows as 0, 1, ... for a value of ``CUDA_VISIBLE_DEVICES``.

    CUDA's rules: an entry is an index or the beginning of one UUID only; the first that names nothing ends the list,
    and one that is named twice empties it. A GPU in MIG mode stands for its first instance. Indices count in the order
    of the PCI bus, which is CUDA's own where all GPUs are of one kind or ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.

    Args:
        devices (sequence of NvmlDevice): in the order of the PCI bus.
        visible (str, optional): None is an unset variable: all devices.

    Examples:
        >>> gpus = [NvmlDevice(object(), "H200", f"GPU-{letter}0", []) for letter in "abc"]
        >>> [gpu.uuid for gpu in visible_gpus(gpus, "2,GPU-a")]
        ['GPU-c0', 'GPU-a0']
        >>> visible_gpus(gpus, "")
        []
    """
    if visible is None:
        return [_usable(device) for device in devices]
    chosen: list[NvmlDevice] = []
    for entry in visible.split(","):
        device = _named(devices, entry.strip())
        if device is None:
            break
        if device in chosen:
            return []
        chosen.append(device)
    return chosen


def by_uuids(devices: Sequence[NvmlDevice], uuids: Sequence[str]) -> list[NvmlDevice] | None:
    """Returns the devices that have the UUIDs, which may lack their prefix; None when one of them is not known.

    A GPU in MIG mode is not taken for its instances: which of them is meant cannot be told.
    """
    every = {other.uuid.split("-", 1)[-1]: other for device in devices for other in (device.instances or [device])}
    found = [every.get(uuid.removeprefix("GPU-").removeprefix("MIG-")) for uuid in uuids]
    known = [device for device in found if device is not None]
    return known if len(known) == len(found) else None


def _usable(device: NvmlDevice) -> NvmlDevice:
    return device.instances[0] if device.instances else device


def _named(devices: Sequence[NvmlDevice], entry: str) -> NvmlDevice | None:
    if entry.startswith(("GPU-", "MIG-")):
        every = [other for device in devices for other in (device, *device.instances)]
        matching = [device for device in every if device.uuid.startswith(entry)]
        return _usable(matching[0]) if len(matching) == 1 else None
    # As CUDA reads it: the number that the entry begins with.
    number = re.match(r"\+?([0-9]+)", entry)
    index = int(number[1]) if number else len(devices)
    return _usable(devices[index]) if index < len(devices) else None
