# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Memory that processes share and that has no name."""

from __future__ import annotations

import mmap
import os
from multiprocessing import reduction
from typing import Any

import torch

from torchrl_ext.data.sizing import free_bytes, gigabytes

__all__ = ["Segment"]


class Segment:
    """A zeroed ``memfd`` segment, committed when it is made.

    Nothing of it is left behind by a killed process, and the size of ``/dev/shm`` does not matter. Only processes that
    were given the descriptor can reach it: pass the segment as an argument to a process that is being spawned.

    Args:
        nbytes (int): at least 1.
        what (str): names the owner in errors.

    Raises:
        MemoryError: when that much memory is not free, stating both; nothing is left allocated.
    """

    def __init__(self, nbytes: int, what: str) -> None:
        free = free_bytes("cpu")
        if nbytes > free:
            raise MemoryError(
                f"{what}: {gigabytes(nbytes)} are needed, {gigabytes(free)} are free. Nothing was allocated."
            )
        descriptor = os.memfd_create("torchrl_ext", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)  # committed now, so that no write ever meets a bus error
            self._open(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise

    def _open(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = mmap.mmap(descriptor, nbytes)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (reduction.DupFd(self._descriptor), self.nbytes)

    def __del__(self) -> None:
        descriptor = self.__dict__.pop("_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)


def _attach(descriptor: Any, nbytes: int) -> Segment:
    segment, ours = Segment.__new__(Segment), descriptor.detach()
    try:
        segment._open(ours, nbytes)
    except BaseException:
        os.close(ours)
        raise
    return segment
