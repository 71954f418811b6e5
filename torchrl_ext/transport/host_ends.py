# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The two ends of a ring in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from tensordict import NestedKey

from torchrl_ext.data.layout import FOLLOWED, NO_SUCCESSOR
from torchrl_ext.transport.consumer import RingConsumer
from torchrl_ext.transport.cursors import Cursor
from torchrl_ext.transport.host_ring import HostRing
from torchrl_ext.transport.pinning import Pinned
from torchrl_ext.transport.producer import RingProducer, write_arena

__all__ = ["HostConsumer", "HostProducer"]


class HostProducer(RingProducer):
    """The writing end of a :class:`HostRing`.

    Args:
        ring (HostRing): which.

    Keyword Args:
        is_alive (callable, optional): whether the consumer's process lives; asked only when there is no room.
    """

    def __init__(self, ring: HostRing, *, is_alive: Callable[[], bool] | None = None) -> None:
        super().__init__(ring.shape, ring.parts, is_alive)
        self.slots = [ring.layout.view(rows).lock_() for rows in ring.parts.rows]
        self._rows = list(ring.parts.rows)
        self._leaves = [list(ring.layout.leaves(rows, ring.layout.fields).values()) for rows in ring.parts.rows]
        self._marked = set(range(ring.capacity))  # a killed producer may have left marks anywhere, and a tail beyond
        self._cursors[Cursor.TAIL_FINISHED] = min(self._cursors[Cursor.TAIL_FINISHED], self._issued)

    def _slot(self) -> int:
        return self._issued % self._shape.capacity

    def _push(self, leaves: Mapping[NestedKey, torch.Tensor | np.ndarray]) -> None:
        slot = self._slot()
        self._copy_leaves(self._leaves[slot], leaves, self._rows[slot])

    def _write(
        self,
        cut_streams: np.ndarray | None,
        finals: torch.Tensor | None,
        place: int,
        tail: torch.Tensor | None,
    ) -> None:
        parts, cursors, slot, width = self._parts, self._cursors, self._slot(), self._shape.layout.successor_bytes
        if slot in self._marked:
            parts.final[slot].fill_(FOLLOWED)
            self._marked.discard(slot)
        if cut_streams is not None:
            parts.final[slot, torch.as_tensor(cut_streams)] = NO_SUCCESSOR
            self._marked.add(slot)
        if finals is not None:
            write_arena(parts.arena, finals, place, width=width, non_blocking=False)
        if tail is not None:
            cursors[Cursor.TAIL_STARTED] = self._issued + 1
            cursors.fence()
            parts.tails[0].copy_(tail[:, :width])
            cursors.fence()
            cursors[Cursor.TAIL_FINISHED] = self._issued + 1


class HostConsumer(RingConsumer):
    """The reading end of a :class:`HostRing`.

    Args:
        ring (HostRing): which.

    Keyword Args:
        is_alive (callable, optional): whether the producer's process lives; asked only when there is nothing to read.
        device (torch.device, optional): the CUDA device that spans are copied to. The ring's memory is page-locked for
            it, as long as this object lives, so that the device reads the slots themselves: a copy is enqueued, nothing
            is staged, and committed slots are given back when it is done (:meth:`poll`). Defaults to the host.
    """

    def __init__(
        self, ring: HostRing, *, is_alive: Callable[[], bool] | None = None, device: torch.device | None = None
    ) -> None:
        on_device = device is not None and device.type == "cuda"
        super().__init__(ring.shape, ring.parts, is_alive, device if on_device else None)
        self._pinned = None if self._device is None else Pinned(ring.segment.bytes, "HostConsumer", self._device)

    def _complete(self, issued: int) -> int:
        return issued

    def _tail(self, step: int) -> torch.Tensor | None:
        cursors, count = self._cursors, step + 1
        if cursors[Cursor.TAIL_FINISHED] != count:
            return None
        cursors.fence()
        tail = self._parts.tails[0].clone()
        cursors.fence()
        # The producer went on meanwhile: the next step will show the successor.
        return tail if cursors[Cursor.TAIL_STARTED] == count else None

    def close(self) -> None:
        """Says that nothing more is wanted; the producer's next ``reserve`` raises. Waits for copies under way."""
        super().close()
        if self._pinned is not None:
            self._pinned.release()
            self._pinned = None
