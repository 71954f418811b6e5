# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The two ends of a ring in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from tensordict import NestedKey, TensorDict

from torchrl_ext.data import PackedRun
from torchrl_ext.data.layout import FOLLOWED, NO_SUCCESSOR
from torchrl_ext.transport.cursors import Cursor
from torchrl_ext.transport.errors import RingClosed, RingPeerDied
from torchrl_ext.transport.host_ring import HostRing
from torchrl_ext.transport.ring import Span

__all__ = ["HostConsumer", "HostProducer"]


class HostProducer:
    """The writing end of a :class:`HostRing`.

    Args:
        ring (HostRing): which.

    Keyword Args:
        is_alive (callable, optional): whether the consumer's process lives; asked only when there is no room.
    """

    def __init__(self, ring: HostRing, *, is_alive: Callable[[], bool] | None = None) -> None:
        self._ring, self._parts, self._is_alive = ring, ring.parts, is_alive
        self._cursors = ring.parts.cursors()
        self._issued = self._cursors[Cursor.ISSUED]
        self._finals = self._cursors[Cursor.FINALS_ISSUED]
        self._views = [ring.layout.view(rows).lock_() for rows in ring.parts.rows]
        self._leaves = [ring.layout.leaves(rows, ring.layout.fields) for rows in ring.parts.rows]
        self._marked: set[int] = set()
        self._reserved = False

    def reserve(self) -> TensorDict | None:
        """Returns the next slot as a TensorDict ``[n]`` of views to write into, None when there is no room.

        Raises:
            RingClosed: when the consumer closed the ring.
            RingPeerDied: when there is no room and the consumer's process is dead.
        """
        cursors, ring = self._cursors, self._ring
        if cursors[Cursor.CONSUMER_CLOSED]:
            raise RingClosed("HostProducer: the consumer must not have closed the ring. Nothing was reserved.")
        room = min(cursors[Cursor.READ] + ring.capacity, cursors[Cursor.LIMIT]) - self._issued
        finals = cursors[Cursor.FINALS_READ] + ring.final_capacity - self._finals
        if room < 1 or finals < ring.num_streams:
            if self._is_alive is not None and not self._is_alive():
                raise RingPeerDied("HostProducer: the consumer's process must live, it ended without closing the ring.")
            return None
        cursors.fence()  # the consumer's reads of this slot come before what is written now
        self._reserved = True
        return self._views[self._issued % ring.capacity]

    def push(self, leaves: Mapping[NestedKey, torch.Tensor | np.ndarray], **ends: Any) -> bool:
        """Reserves a slot, copies one step into it and publishes it.

        Args:
            leaves (mapping): every field of the layout by key, tensors or arrays ``[n, *feature]``; numbers of another
                dtype are cast.
            **ends: see :meth:`publish`.

        Returns:
            bool: whether there was room; nothing was done otherwise.

        Raises:
            KeyError, ValueError: when a field is missing or of another shape. Nothing was published, and the slot stays
                reserved.
            RingClosed, RingPeerDied: see :meth:`reserve`.
        """
        if self.reserve() is None:
            return False
        for key, view in self._leaves[self._issued % self._ring.capacity].items():
            value = leaves[key]
            if value.shape != view.shape:
                raise ValueError(
                    f"HostProducer: key {key!r} must have shape {list(view.shape)}, got {list(value.shape)}. "
                    "Nothing was published."
                )
            view.copy_(value if isinstance(value, torch.Tensor) else torch.from_numpy(value))
        self.publish(**ends)
        return True

    def publish(
        self,
        *,
        final_streams: np.ndarray | None = None,
        finals: torch.Tensor | None = None,
        cut_streams: np.ndarray | None = None,
        tail: torch.Tensor | None = None,
    ) -> None:
        """Publishes the reserved slot.

        Keyword Args:
            final_streams (np.ndarray, optional): ascending ids of the streams whose successor is not the next row.
            finals (torch.Tensor, optional): uint8 ``[M, >= successor_bytes]``, their successors.
            cut_streams (np.ndarray, optional): ids of terminated streams without a final observation.
            tail (torch.Tensor, optional): uint8 ``[n, >= successor_bytes]``, the successor of each row of the slot.

        Raises:
            RuntimeError: without a reserved slot.
            ValueError: when there is not one final observation for each stream named. Nothing was published.
        """
        ring, parts, cursors = self._ring, self._parts, self._cursors
        if not self._reserved:
            raise RuntimeError(
                "HostProducer: publish must follow reserve, got no reserved slot. Nothing was published."
            )
        count = 0 if final_streams is None else len(final_streams)
        if count != (0 if finals is None else len(finals)) or count > ring.num_streams:
            raise ValueError(
                f"HostProducer: finals must be one for each of {count} streams, at most {ring.num_streams}, got "
                f"{0 if finals is None else len(finals)}. Nothing was published."
            )
        slot, width = self._issued % ring.capacity, ring.layout.successor_bytes
        if slot in self._marked:
            parts.final[slot].fill_(FOLLOWED)
            self._marked.discard(slot)
        if cut_streams is not None and len(cut_streams):
            parts.final[slot, torch.as_tensor(cut_streams)] = NO_SUCCESSOR
            self._marked.add(slot)
        if count and finals is not None:
            begin = self._finals % ring.final_capacity
            ahead = min(count, ring.final_capacity - begin)
            parts.arena[begin : begin + ahead].copy_(finals[:ahead, :width])
            if ahead < count:
                parts.arena[: count - ahead].copy_(finals[ahead:, :width])
            parts.ended[slot, :count] = cast(np.ndarray, final_streams)
        parts.counts[slot] = count
        if tail is not None:
            cursors[Cursor.TAIL_STARTED] = self._issued + 1
            cursors.fence()
            parts.tail.copy_(tail[:, :width])
            cursors.fence()
            cursors[Cursor.TAIL_FINISHED] = self._issued + 1
        self._finals += count
        cursors[Cursor.FINALS_ISSUED] = self._finals
        self._issued += 1
        self._reserved = False
        cursors.fence()  # everything above is seen by whoever sees the next line
        cursors[Cursor.ISSUED] = self._issued

    def close(self) -> None:
        """Says that nothing more will come; what was published can still be read."""
        self._cursors.fence()
        self._cursors[Cursor.PRODUCER_CLOSED] = 1


class HostConsumer:
    """The reading end of a :class:`HostRing`.

    Args:
        ring (HostRing): which.

    Keyword Args:
        is_alive (callable, optional): whether the producer's process lives; asked only when there is nothing to read.
    """

    def __init__(self, ring: HostRing, *, is_alive: Callable[[], bool] | None = None) -> None:
        self._ring, self._parts, self._is_alive = ring, ring.parts, is_alive
        self._cursors = ring.parts.cursors()
        self._read, self._finals = self._cursors[Cursor.READ], self._cursors[Cursor.FINALS_READ]
        self._borrowed = False

    def grant(self, limit: int) -> None:
        """Sets how many slots may be written in all since the ring was made."""
        self._cursors[Cursor.LIMIT] = limit

    @property
    def fill(self) -> int:
        """Slots that are published and not read."""
        return self._cursors[Cursor.ISSUED] - self._read

    def read_span(self, max_steps: int | None = None) -> Span | None:
        """Returns the longest run of unread steps that lie side by side, None when there is none.

        Args:
            max_steps (int, optional): at most so many. Defaults to all.

        Raises:
            RuntimeError: while an earlier span is not committed.
            RingClosed: when everything was read and the producer closed the ring.
            RingPeerDied: when everything was read and the producer's process is dead.
        """
        if self._borrowed:
            raise RuntimeError("HostConsumer: the last span must be committed before the next one is read.")
        ring, cursors, first = self._ring, self._cursors, self._read
        issued = cursors[Cursor.ISSUED]
        if issued == first:
            self._refuse_for_ever()
            return None
        cursors.fence()  # the slots are read after the counter that admits them
        start = first % ring.capacity
        steps = min(issued - first, ring.capacity - start, issued if max_steps is None else max_steps)
        final_rows, finals, count = self._finals_of(start, steps)
        tail = self._tail_of(issued) if first + steps == issued else None
        run = PackedRun(ring.layout, self._parts.rows[start : start + steps], final_rows, finals, tail)
        self._borrowed = True
        return Span(run, first, lambda: self._commit(steps, count))

    def _refuse_for_ever(self) -> None:
        closed, alive = self._cursors[Cursor.PRODUCER_CLOSED], self._is_alive is None or self._is_alive()
        self._cursors.fence()
        if (closed or not alive) and self._cursors[Cursor.ISSUED] == self._read:  # what came before is read first
            if closed:
                raise RingClosed("HostConsumer: the producer closed the ring and everything was read.")
            raise RingPeerDied("HostConsumer: the producer's process must live, it ended without closing the ring.")

    def _finals_of(self, start: int, steps: int) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
        parts, ring = self._parts, self._ring
        counts = parts.counts[start : start + steps]
        count = int(counts.sum())
        if not count:
            return None, None, 0
        step = np.repeat(np.arange(steps), counts)
        mask = np.arange(ring.num_streams) < counts[:, None]
        rows = step * ring.num_streams + parts.ended[start : start + steps][mask]
        begin = self._finals % ring.final_capacity
        if begin + count <= ring.final_capacity:
            finals = parts.arena[begin : begin + count]
        else:
            finals = torch.cat([parts.arena[begin:], parts.arena[: begin + count - ring.final_capacity]])
        return torch.from_numpy(rows), finals, count

    def _tail_of(self, issued: int) -> torch.Tensor | None:
        cursors = self._cursors
        if cursors[Cursor.TAIL_FINISHED] != issued:
            return None
        cursors.fence()
        tail = self._parts.tail.clone()
        cursors.fence()
        # The producer went on meanwhile: the next step will show the successor.
        return tail if cursors[Cursor.TAIL_STARTED] == issued else None

    def _commit(self, steps: int, finals: int) -> None:
        self._read += steps
        self._finals += finals
        self._borrowed = False
        self._cursors.fence()  # the reads above come before the slots may be written again
        self._cursors[Cursor.FINALS_READ] = self._finals
        self._cursors[Cursor.READ] = self._read

    def close(self) -> None:
        """Says that nothing more is wanted; the producer's next ``reserve`` raises."""
        self._cursors.fence()
        self._cursors[Cursor.CONSUMER_CLOSED] = 1
