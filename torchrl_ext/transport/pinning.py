# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Page-locks memory that was not made by torch, so that a CUDA device copies from it by itself."""

from __future__ import annotations

import contextlib

import torch
from torchrl._utils import logger as torchrl_logger

__all__ = ["Pinned"]


class Pinned:
    """Host memory registered with CUDA until :meth:`release` or its end.

    Where the driver refuses (a limit on locked memory), copies from it are synchronous instead; one log line says so.

    Args:
        memory (torch.Tensor): uint8, on the host; kept alive meanwhile.
        what (str): names the owner in the log.
        device (torch.device): the CUDA device that copies from it.
    """

    def __init__(self, memory: torch.Tensor, what: str, device: torch.device) -> None:
        self._memory: torch.Tensor | None = memory
        self._device, self.is_registered = device, False
        with torch.cuda.device(device):
            code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
            self.is_registered = code == 0
            if not self.is_registered:
                # The refusal stays behind as the device's last error until some launch reports it.
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=device)
        if not self.is_registered:
            torchrl_logger.warning(
                f"{what}: {memory.numel()} bytes could not be page-locked (CUDA error {code}); copies from them wait."
            )

    def release(self) -> None:
        """Waits for the device, which may still read, and gives the memory up; a second call does nothing."""
        memory, self._memory = self._memory, None
        if memory is not None and self.is_registered:
            torch.cuda.synchronize(self._device)
            with torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def __del__(self) -> None:
        if self.__dict__.get("_memory") is not None:
            self.release()
