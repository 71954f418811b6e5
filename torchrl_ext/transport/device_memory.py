# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Memory of one CUDA device that another process maps."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

__all__ = ["DeviceMemory", "MappedMemory", "uuid_of", "visible_devices"]


def uuid_of(device: torch.device) -> str:
    """Returns the UUID of a CUDA device, the only name that means the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def visible_devices() -> dict[str, torch.device]:
    """Returns this process's CUDA devices by UUID."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return {uuid_of(device): device for device in devices}


class DeviceMemory:
    """Zeroed memory that this process owns and exports.

    Args:
        nbytes (int): at least 1.
        device (torch.device): where.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.uuid = uuid_of(self.bytes.device)

    def export(self) -> tuple[Any, ...]:
        """Returns what one other process needs to map the memory, once.

        torch counts one user more for each export and one less when a user lets go in an orderly way. A killed one does
        not, so ours never do (see :class:`MappedMemory`), and :meth:`forget` counts for them.
        """
        return self.bytes.untyped_storage()._share_cuda_()

    def forget(self, exported: tuple[Any, ...]) -> None:
        """Counts one user less, whose process has ended."""
        _, _, _, _, counter, counter_offset, _, _ = exported
        torch.UntypedStorage._release_ipc_counter_cuda(counter, counter_offset)


class MappedMemory:
    """Another process's memory, mapped until this process ends.

    Args:
        uuid (str): of its device.
        exported (tuple): from :meth:`DeviceMemory.export`, never used before.

    Raises:
        RuntimeError: when no visible device has the UUID, or the handle cannot be opened there.
    """

    def __init__(self, uuid: str, exported: tuple[Any, ...]) -> None:
        devices = visible_devices()
        if uuid not in devices:
            raise RuntimeError(
                f"MappedMemory: a visible CUDA device must have the UUID {uuid}, got {list(devices)}. "
                "Nothing was mapped."
            )
        device = devices[uuid]
        _, *rest = exported
        with torch.cuda.device(device):
            storage = torch.UntypedStorage._new_shared_cuda(device.index, *rest)
        # Never let go of, not even while the interpreter ends: the owner counts our use until it sees that our process
        # has ended, so that nothing is counted twice nor forgotten, however that happens.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(storage))
        # The exported storage may lie anywhere in an allocation; torch maps it at its own offset.
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        self.uuid = uuid
