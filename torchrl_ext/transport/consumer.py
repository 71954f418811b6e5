# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The reading end of a ring, whatever memory its rows lie in."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from torchrl_ext.data import PackedRun
from torchrl_ext.data.streams import current_stream
from torchrl_ext.transport.cursors import Cursor
from torchrl_ext.transport.errors import RingClosed, RingPeerDied
from torchrl_ext.transport.parts import RingParts, RingShape
from torchrl_ext.transport.ring import Span

__all__ = ["RingConsumer"]


class RingConsumer(abc.ABC):
    """Lends spans and gives their slots back; see :mod:`torchrl_ext.transport.ring`.

    Where spans are copied by a CUDA device, a committed slot is given back once the copies that were enqueued on the
    current stream before the commit are done: :meth:`poll`, which :meth:`read_span` does too, looks after that without
    waiting.
    """

    def __init__(
        self,
        shape: RingShape,
        parts: RingParts,
        is_alive: Callable[[], bool] | None,
        device: torch.device | None,
    ) -> None:
        self._shape, self._parts, self._is_alive, self._device = shape, parts, is_alive, device
        self._cursors = parts.cursors()
        self._read, self._finals = self._cursors[Cursor.READ], self._cursors[Cursor.FINALS_READ]
        self._lent: Span | None = None
        self._leaving: deque[tuple[torch.cuda.Event, int, int]] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._first_rows = np.arange(shape.capacity) * shape.num_streams  # of each step of a span
        self._name = type(self).__name__

    @abc.abstractmethod
    def _complete(self, issued: int) -> int:
        """Returns how many of the issued slots are complete."""

    @abc.abstractmethod
    def _tail(self, step: int) -> torch.Tensor | None:
        """Returns the successors of a step that is the newest of a span, uint8 ``[n, successor_bytes]``."""

    def grant(self, limit: int) -> None:
        """Sets how many slots may be written in all since the ring was made."""
        self._cursors[Cursor.LIMIT] = limit

    @property
    def read(self) -> int:
        """Slots committed since the ring was made."""
        return self._read

    @property
    def fill(self) -> int:
        """Slots that are published and not committed."""
        issued = self._cursors[Cursor.ISSUED]
        self._cursors.fence()
        return self._complete(issued) - self._read

    @property
    def unread(self) -> int:
        """Slots that were written and not committed, also those whose copy is not complete."""
        return self._cursors[Cursor.ISSUED] - self._read

    @property
    def finals(self) -> int:
        """Final observations committed since the ring was made."""
        return self._finals

    def read_span(self, max_steps: int | None = None, *, tail: bool = True) -> Span | None:
        """Returns the longest run of unread steps that lie side by side, None when there is none.

        A step with which the streams began anew is the first of its span.

        Args:
            max_steps (int, optional): at most so many. Defaults to all.

        Keyword Args:
            tail (bool, optional): whether the successors of the last step are looked for: in the next step where it is
                published, else in the tail. Defaults to True.

        Raises:
            ValueError: when ``max_steps`` is less than 1. Nothing was lent.
            RuntimeError: while an earlier span is not committed.
            RingClosed: when everything was read and the producer closed the ring.
            RingPeerDied: when everything was read and the producer's process is dead.
        """
        if self._lent is not None:
            raise RuntimeError(f"{self._name}: the last span must be committed before the next one is read.")
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"{self._name}: max_steps must be at least 1, got {max_steps}. Nothing was lent.")
        if self._leaving:
            self.poll()
        shape, cursors, first = self._shape, self._cursors, self._read
        issued = cursors[Cursor.ISSUED]
        cursors.fence()  # the slots are read after the counter that admits them
        complete = issued if issued == first else self._complete(issued)
        if complete == first:
            self._refuse_for_ever()
            return None
        start = first % shape.capacity
        steps = min(complete - first, shape.capacity - start, complete if max_steps is None else max_steps)
        parts = self._parts
        begins, final_rows, finals, count = False, None, None, 0
        if np.count_nonzero(parts.breaks[start : start + steps]):
            begins = bool(parts.begins[start])
            anew = parts.begins[start + 1 : start + steps]
            if np.count_nonzero(anew):
                steps = int(anew.argmax()) + 1
            final_rows, finals, count = self._finals_of(start, steps)
        successors = self.tail_of(first + steps - 1) if tail else None
        run = PackedRun(shape.layout, parts.rows[start : start + steps], final_rows, finals, successors)
        versions = parts.versions[start : start + steps]
        self._lent = Span(
            run,
            first,
            lambda: self._commit(steps, count),
            self._release,
            begins=begins,
            versions=versions,
        )
        return self._lent

    def tail_of(self, step: int) -> torch.Tensor | None:
        """Returns the successors of a published step that is not given back, None while they are not known.

        Args:
            step (int): counted from the ring's beginning.

        Returns:
            torch.Tensor, optional: uint8 ``[n, >= successor_bytes]``, borrowed as a span is; those of streams that
            ended there mean nothing.
        """
        after, issued = step + 1, self._cursors[Cursor.ISSUED]
        self._cursors.fence()  # the event is asked after the counter that admits it, and the slot is read after both
        if self._complete(issued) > after:
            slot = after % self._shape.capacity
            return None if self._parts.begins[slot] else self._parts.rows[slot]
        return self._tail(step)

    def _refuse_for_ever(self) -> None:
        # Asked in this order: one that closes and ends in between has closed, and what it published before is read.
        alive, closed = self._is_alive is None or self._is_alive(), self._cursors[Cursor.PRODUCER_CLOSED]
        if not closed and alive:
            return
        self._cursors.fence()
        issued = self._cursors[Cursor.ISSUED]
        if issued != self._read and (closed or self._complete(issued) != self._read):
            return
        if closed:
            raise RingClosed(f"{self._name}: the producer closed the ring and everything was read.")
        raise RingPeerDied(f"{self._name}: the producer's process must live, it ended without closing the ring.")

    def _finals_of(self, start: int, steps: int) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
        parts, shape = self._parts, self._shape
        rows = self._first_rows[:steps].repeat(parts.counts[start : start + steps])
        count = len(rows)
        if not count:
            return None, None, 0
        begin = self._finals % shape.final_capacity
        if begin + count <= shape.final_capacity:
            streams, finals = parts.ended[begin : begin + count], parts.arena[begin : begin + count]
        else:
            beyond = begin + count - shape.final_capacity
            streams = np.concatenate([parts.ended[begin:], parts.ended[:beyond]])
            finals = torch.cat([parts.arena[begin:], parts.arena[:beyond]])
        rows += streams
        return torch.from_numpy(rows), finals, count

    def _commit(self, steps: int, finals: int) -> None:
        self._read += steps
        self._finals += finals
        self._lent = None
        if self._device is None:
            self._give_back(self._read, self._finals)
            return
        event = self._spare.pop() if self._spare else torch.cuda.Event()
        event.record(current_stream(self._device))
        self._leaving.append((event, self._read, self._finals))

    def _release(self) -> None:
        self._lent = None

    def _give_back(self, read: int, finals: int) -> None:
        self._cursors.fence()  # the reads come before the slots may be written again
        self._cursors[Cursor.FINALS_READ] = finals
        self._cursors[Cursor.READ] = read

    def poll(self) -> None:
        """Gives those committed slots back whose copies are done; never waits."""
        while self._leaving and self._leaving[0][0].query():
            event, read, finals = self._leaving.popleft()
            self._spare.append(event)
            self._give_back(read, finals)

    def restart(self) -> int:
        """Makes the ring ready for another producer after the last one has ended.

        Read everything first: what was issued and never became complete is dropped, and a span that is open released.

        Returns:
            int: the slots that were dropped.
        """
        if self._lent is not None:
            self._lent.release()  # committed later, it would give back slots that are not its own any more
        cursors = self._cursors
        dropped = cursors[Cursor.ISSUED] - self._read
        self._read, self._finals = cursors[Cursor.ISSUED], cursors[Cursor.FINALS_ISSUED]
        if self._leaving:
            self._leaving[-1][0].synchronize()  # our own reads
            self._leaving.clear()
        self._give_back(self._read, self._finals)
        cursors[Cursor.PRODUCER_CLOSED] = 0
        return dropped

    def forget_peer(self) -> None:
        """Asks nobody about the producer's life any more."""
        self._is_alive = None

    def close(self) -> None:
        """Says that nothing more is wanted; the producer's next ``reserve`` raises."""
        self._cursors.fence()
        self._cursors[Cursor.CONSUMER_CLOSED] = 1
