# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The two ends of a ring on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from tensordict import NestedKey

from torchrl_ext.data.layout import FOLLOWED, NO_SUCCESSOR
from torchrl_ext.transport.consumer import RingConsumer
from torchrl_ext.transport.ipc_ring import CudaIpcRing
from torchrl_ext.transport.producer import RingProducer, write_arena

__all__ = ["CudaIpcConsumer", "CudaIpcProducer"]


class CudaIpcProducer(RingProducer):
    """The writing end of a :class:`CudaIpcRing`.

    What :meth:`reserve` returns is page-locked host memory, one of several in rotation: a published step goes to the
    device in one copy on the producer's own stream, and its memory is used again when that copy is done. :meth:`push`
    takes CUDA tensors too, which are copied on the device, in the order of the current stream.

    Args:
        ring (CudaIpcRing): which; opened, in another process than its owner's.

    Keyword Args:
        is_alive (callable, optional): whether the consumer's process lives; asked only when there is no room.
        staging (int, optional): page-locked steps, at most the ring's capacity. Defaults to 4.

    Raises:
        ValueError: for less than one step of staging.
    """

    def __init__(self, ring: CudaIpcRing, *, is_alive: Callable[[], bool] | None = None, staging: int = 4) -> None:
        if staging < 1:
            raise ValueError(f"CudaIpcProducer: staging must be at least 1, got {staging}. Nothing was allocated.")
        super().__init__(ring.shape, ring.parts, is_alive)
        shape, device = ring.shape, ring.device
        self._events, self._device = ring.events, device
        self._stream = torch.cuda.Stream(device)
        self._depth = min(staging, shape.capacity)
        size = (self._depth, shape.num_streams)
        self._rows = torch.zeros(*size, shape.layout.row_bytes, dtype=torch.uint8, pin_memory=True)
        self._ends = torch.zeros(*size, shape.layout.successor_bytes, dtype=torch.uint8, pin_memory=True)
        self._tails = torch.zeros_like(self._ends, pin_memory=True) if shape.tails else None
        self._final = self._rows.view(torch.int32)[..., shape.layout.final_offset // 4]
        self._final.fill_(FOLLOWED)
        self.slots = [shape.layout.view(rows).lock_() for rows in self._rows]
        fields = shape.layout.fields
        self._staged = [list(shape.layout.leaves(rows, fields).values()) for rows in self._rows]
        self._leaves = [list(shape.layout.leaves(rows, fields).values()) for rows in ring.parts.rows]
        self._marked: set[int] = set()
        self._on_device = False
        self._first = self._issued

    def _slot(self) -> int:
        self._on_device = False  # a push whose publication failed may have left its rows there
        before = self._issued - self._depth
        if before >= self._first:
            # Our own copy out of this memory. Its event is recorded anew only a lap of the ring later, and one of a
            # producer before us, which may have been killed, is never waited for.
            self._events[before % self._shape.capacity].synchronize()
        return self._issued % self._depth

    def _push(self, leaves: Mapping[NestedKey, torch.Tensor | np.ndarray]) -> None:
        on_device = any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in leaves.values())
        if not on_device:
            staged = self._issued % self._depth
            self._copy_leaves(self._staged[staged], leaves, self._rows[staged])
            return
        # A copy out of the caller's pinned memory would be under way when the caller overwrites it.
        leaves = {key: torch.as_tensor(leaf).clone() if _is_pinned(leaf) else leaf for key, leaf in leaves.items()}
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copy_leaves(self._leaves[self._issued % self._shape.capacity], leaves)
        for leaf in leaves.values():
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                leaf.record_stream(self._stream)  # may be freed by the caller while the copy is under way
        self._on_device = True

    def _write(
        self,
        cut_streams: np.ndarray | None,
        finals: torch.Tensor | None,
        place: int,
        tail: torch.Tensor | None,
    ) -> None:
        shape, parts, stream = self._shape, self._parts, self._stream
        staged, slot, width = self._issued % self._depth, self._issued % shape.capacity, shape.layout.successor_bytes
        on_device, self._on_device = self._on_device, False
        for value in (finals, tail):
            if value is not None and value.is_cuda:
                stream.wait_stream(torch.cuda.current_stream(self._device))
                value.record_stream(stream)
        if not on_device:
            self._mark(staged, cut_streams)
        with torch.cuda.stream(stream):
            if on_device:
                parts.final[slot].fill_(FOLLOWED)
                if cut_streams is not None:
                    parts.final[slot, torch.as_tensor(cut_streams).to(self._device)] = NO_SUCCESSOR
            else:
                parts.rows[slot].copy_(self._rows[staged], non_blocking=True)
            if finals is not None:
                if not finals.is_cuda:
                    finals = self._ends[staged, : len(finals)].copy_(finals[:, :width])
                write_arena(parts.arena, finals, place, width=width, non_blocking=True)
            parts.has_tail[slot] = tail is not None and self._tails is not None
            if tail is not None and self._tails is not None:
                if not tail.is_cuda:
                    tail = self._tails[staged].copy_(tail[:, :width])
                parts.tails[slot].copy_(tail[:, :width], non_blocking=True)
            self._events[slot].record(stream)

    def _mark(self, staged: int, cut_streams: np.ndarray | None) -> None:
        if staged in self._marked:
            self._final[staged].fill_(FOLLOWED)
            self._marked.discard(staged)
        if cut_streams is not None:
            self._final[staged, torch.as_tensor(cut_streams)] = NO_SUCCESSOR
            self._marked.add(staged)

    def close(self) -> None:
        """Says that nothing more will come, when what was published has arrived on the device."""
        self._stream.synchronize()
        super().close()


def _is_pinned(leaf: torch.Tensor | np.ndarray) -> bool:
    leaf = leaf if isinstance(leaf, torch.Tensor) else torch.from_numpy(leaf)
    return not leaf.is_cuda and leaf.is_pinned()


class CudaIpcConsumer(RingConsumer):
    """The reading end of a :class:`CudaIpcRing`, in its owner's process.

    Spans show device memory. Whatever is enqueued on the current stream before a commit may read them.

    Args:
        ring (CudaIpcRing): which.

    Keyword Args:
        is_alive (callable, optional): whether the producer's process lives; asked only when there is nothing to read.
    """

    def __init__(self, ring: CudaIpcRing, *, is_alive: Callable[[], bool] | None = None) -> None:
        super().__init__(ring.shape, ring.parts, is_alive, ring.device)
        self._events = ring.events
        self._known = self._read  # slots known to be complete

    def restart(self) -> int:
        """See ``RingConsumer.restart``."""
        dropped = super().restart()
        self._known = self._read
        return dropped

    def _complete(self, issued: int) -> int:
        # Copies finish in order: when the newest is done, all are. A query never waits; an event of a killed process
        # may never be done.
        if issued > self._known and self._events[(issued - 1) % self._shape.capacity].query():
            self._known = issued
        while self._known < issued and self._events[self._known % self._shape.capacity].query():
            self._known += 1
        return self._known

    def _tail(self, step: int) -> torch.Tensor | None:
        slot = step % self._shape.capacity
        return self._parts.tails[slot] if self._parts.has_tail[slot] else None
