# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Taking over the inputs of an update, so that its caller may overwrite them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torchrl_ext.data.batch_pool import BatchPool


class Stageable(Protocol):
    """An update that can be moved: it lists its tensors, and can be had again over others."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""

    def tensors(self) -> list[torch.Tensor]:
        """Returns everything it reads."""

    def replaced(self, tensors: list[torch.Tensor]) -> Any:
        """Returns the same update over as many other tensors."""


@dataclass
class Staged:
    """An update whose tensors are its own, on the storage's device.

    Ownership  Copies from CUDA are enqueued on the stream that was current: whoever overwrites an input later in that
               order does not reach them. They are complete once :meth:`wait` returned.
    """

    update: Any
    copies: list[torch.cuda.Event]

    def wait(self) -> None:
        """Blocks, without spinning, until the copies are complete; what was enqueued after them does not matter."""
        for event in self.copies:
            event.synchronize()


def stage(update: Stageable, device: torch.device, pool: BatchPool, *, donate: bool) -> Staged:
    """Copies the inputs of an update to memory of its own on ``device``.

    Args:
        update (Update): checked.
        device (torch.device): of the storage.
        pool (BatchPool): where host memory comes from.

    Keyword Args:
        donate (bool): leaves what is in host memory where it is; the caller will not touch it again. What is on a CUDA
            ``device`` stays there in any case, because it is read in stream order.
    """
    if device.type == "cpu":
        return _to_host(update, pool, donate=donate)
    tensors = update.tensors()
    if all(tensor.device == device for tensor in tensors):
        return Staged(update, [])
    on_host = [i for i, tensor in enumerate(tensors) if tensor.device.type == "cpu"]
    if on_host:
        # One copy for all. Torch keeps the pinned block until the stream is past it; a pageable one would make the
        # host wait for everything enqueued before.
        sources = [tensors[i] for i in on_host]
        raw = torch.empty(_packed_bytes(sources), dtype=torch.uint8, pin_memory=device.type == "cuda")
        for view, source in zip(_views(raw, sources), sources, strict=True):
            view.copy_(source)
        for i, view in zip(on_host, _views(raw.to(device, non_blocking=True), sources), strict=True):
            tensors[i] = view
    return Staged(update.replaced([tensor.to(device, non_blocking=True) for tensor in tensors]), [])


def _to_host(update: Stageable, pool: BatchPool, *, donate: bool) -> Staged:
    given = update.tensors()
    tensors, copies = list(given), []
    for kind in {tensor.device for tensor in given}:
        if kind.type == "cpu" and donate:
            continue
        chosen = [i for i, tensor in enumerate(given) if tensor.device == kind]
        sources = [given[i] for i in chosen]
        nbytes = _packed_bytes(sources)
        # Pinned blocks are torch's own, which it recycles once the copies that use them are complete.
        on_cuda = kind.type == "cuda"
        raw = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) if on_cuda else pool.take(nbytes)
        for i, view, source in zip(chosen, _views(raw, sources), sources, strict=True):
            tensors[i] = view.copy_(source, non_blocking=True)
        if on_cuda:
            event = torch.cuda.Event(blocking=True)
            event.record(torch.cuda.current_stream(kind))
            copies.append(event)
    return Staged(update.replaced(tensors), copies)


def _packed_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(_aligned(tensor) for tensor in tensors)


def _aligned(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.dtype.itemsize // 16) * 16


def _views(raw: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Cuts raw bytes into contiguous tensors of the given shapes, each aligned to 16 bytes."""
    views, offset = [], 0
    for tensor in like:
        nbytes = tensor.numel() * tensor.dtype.itemsize
        views.append(raw[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape))
        offset += _aligned(tensor)
    return views
