# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Recycled blocks of host memory for sampled batches."""

from __future__ import annotations

import sys
import threading

import numpy as np
import torch

__all__ = ["BatchPool", "PinnedPool"]


class BatchPool:
    """Hands out host memory and takes it back by itself once no tensor uses it.

    Fresh blocks of a few megabytes are page-faulted on every use; recycled ones are not. A block is free again when
    the last tensor made from it is gone, views and tensors saved by autograd included: each tensor handed out holds a
    reference to its NumPy array, so the array's reference count tells.

    Args:
        max_blocks (int, optional): blocks kept per size. Further requests get fresh memory. Defaults to 8.

    Examples:
        >>> from torchrl_ext.data.batch_pool import BatchPool
        >>> pool = BatchPool()
        >>> first = pool.take(1024)
        >>> address = first.data_ptr()
        >>> pool.take(1024).data_ptr() == address  # still in use
        False
        >>> del first
        >>> pool.take(1024).data_ptr() == address
        True
    """

    def __init__(self, max_blocks: int = 8) -> None:
        self.max_blocks = max_blocks
        self._blocks: dict[int, list[np.ndarray]] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> torch.Tensor:
        """Returns uint8 ``[nbytes]`` of undefined content, aligned to 16 bytes."""
        # Sizes an eighth apart share blocks, so that requests of ever new sizes do not keep a block each.
        step = max(16, 1 << max(nbytes.bit_length() - 4, 0))
        size = -(-nbytes // step) * step
        with self._lock:
            blocks = self._blocks.setdefault(size, [])
            for i in range(len(blocks)):
                # The list and the argument of getrefcount: any third reference is a tensor in use.
                if sys.getrefcount(blocks[i]) == 2:
                    return torch.from_numpy(blocks[i])[:nbytes]
            # NumPy aligns to 16 bytes at least; complex128 makes that explicit.
            block = np.empty(size // 16, dtype=np.complex128).view(np.uint8)
            if len(blocks) < self.max_blocks:
                blocks.append(block)
            return torch.from_numpy(block)[:nbytes]

    def __getstate__(self) -> dict:
        return {"max_blocks": self.max_blocks}

    def __setstate__(self, state: dict) -> None:
        BatchPool.__init__(self, state["max_blocks"])


class PinnedPool(BatchPool):
    """Hands out page-locked memory for batches that go to a CUDA device.

    A copy from ordinary memory is made by the driver, which first waits for everything that was enqueued before it, a
    learner's update for one; a copy from page-locked memory is only enqueued. torch takes memory back that no tensor
    uses, and lends it again when the copies that read it are done.
    """

    def take(self, nbytes: int) -> torch.Tensor:
        """See :meth:`BatchPool.take`."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
