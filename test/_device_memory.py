# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What this process holds of a CUDA device."""

from __future__ import annotations

import os

import torch


def own_device_memory() -> int:
    """Returns the bytes that this process has on the current device, its contexts included.

    What the device has in all, which other processes change at any time, where NVML does not tell it apart.
    """
    import pynvml

    torch.cuda.synchronize()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
        if process.pid == os.getpid() and process.usedGpuMemory:
            return int(process.usedGpuMemory)
    free, total = torch.cuda.mem_get_info()
    return total - free
