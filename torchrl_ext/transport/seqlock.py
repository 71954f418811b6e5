# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The newest value of a publisher, for a reader that never waits for it nor sees a torn one."""

from __future__ import annotations

from typing import Any

import torch

from torchrl_ext.transport.cursors import CURSOR_BYTES, Cursor, Cursors
from torchrl_ext.transport.segment import Segment

__all__ = ["SeqlockSlots"]

_STARTED, _FINISHED = Cursor.TAIL_STARTED, Cursor.TAIL_FINISHED


class SeqlockSlots:
    """Two slots and two counters: the publisher fills one slot while readers copy the other.

    Roles      One publisher; any number of readers, each with an object of its own (pass it to their process).
    State      ``started`` and ``finished``, the versions begun and completed; version ``v`` lies in slot ``v % 2``.
    Publish    The publisher moves ``started``, fills the slot, moves ``finished``, with a fence after each step.
    Ordering   A reader copies the finished slot and looks again: the copy is whole when at most one version was begun
               after it, since that one fills the other slot. A reader that refused every value under way would starve
               beside a busy publisher.
    Full       Never: a version that nobody read is overwritten.
    Empty      ``read`` returns None before the first version, and where nothing is newer than what was read.
    Death      A publisher that dies in the middle leaves the last finished version readable.
    Lifetime   The memory lives as long as anybody has it mapped.

    Args:
        nbytes (int): of a value, at least 1.

    Raises:
        ValueError: for less.
        MemoryError: when the memory is not free; nothing is left allocated.

    Examples:
        >>> import torch
        >>> from torchrl_ext.transport import SeqlockSlots
        >>> slots, out = SeqlockSlots(4), torch.zeros(4, dtype=torch.uint8)
        >>> slots.read(out) is None
        True
        >>> slots.publish(torch.full((4,), 7, dtype=torch.uint8)), slots.read(out), out.tolist()
        (1, 1, [7, 7, 7, 7])
        >>> slots.read(out) is None  # nothing newer
        True
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 1:
            raise ValueError(f"SeqlockSlots: nbytes must be at least 1, got {nbytes}. Nothing was allocated.")
        stride = -(-nbytes // 64) * 64
        self._open(Segment(CURSOR_BYTES + 2 * stride, "SeqlockSlots"), nbytes)

    def _open(self, segment: Segment, nbytes: int) -> None:
        self.nbytes, self._segment = nbytes, segment
        stride = (segment.nbytes - CURSOR_BYTES) // 2
        starts = (CURSOR_BYTES, CURSOR_BYTES + stride)
        self._slots = [segment.bytes[start : start + nbytes] for start in starts]
        self._cursors = Cursors(memoryview(segment.memory))
        self._seen = self._floor = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self._segment, self.nbytes)

    @property
    def version(self) -> int:
        """The newest complete version, 0 before the first."""
        return self._cursors[_FINISHED]

    def reader(self) -> SeqlockSlots:
        """Returns another object over the same memory, for a reader in this process that has read nothing yet."""
        return _attach(self._segment, self.nbytes)

    def continue_from(self, version: int) -> None:
        """Gives the next value a version above ``version`` at least."""
        self._floor = version

    def publish(self, value: torch.Tensor) -> int:
        """Publishes a value and returns its version, 1 for the first; never waits.

        Args:
            value (torch.Tensor): uint8 ``[nbytes]``.

        Raises:
            ValueError: for another shape or dtype. Nothing was published.
        """
        if value.shape != (self.nbytes,) or value.dtype != torch.uint8:
            raise ValueError(
                f"SeqlockSlots: value must be uint8 [{self.nbytes}], got {value.dtype} {list(value.shape)}. "
                "Nothing was published."
            )
        slot, _ = self.begin()
        slot.copy_(value)
        return self.finish()

    def begin(self) -> tuple[torch.Tensor, int]:
        """Begins a version that stays invisible until :meth:`finish`.

        A version that was begun and not finished is begun anew.

        Returns:
            (torch.Tensor, int): uint8 ``[nbytes]``, the slot to fill completely, and the version.
        """
        cursors = self._cursors
        version = max(cursors[_FINISHED], self._floor) + 1
        cursors[_STARTED] = version
        cursors.fence()  # readers see that the slot is begun before any byte of it changes
        return self._slots[version % 2], version

    def finish(self) -> int:
        """Shows the version that was begun to readers, once every byte of its slot is written, and returns it.

        Raises:
            RuntimeError: when no version was begun. Nothing changed.
        """
        cursors = self._cursors
        version = cursors[_STARTED]
        if version == cursors[_FINISHED]:
            raise RuntimeError("SeqlockSlots: finish must follow begin, got no version begun. Nothing changed.")
        cursors.fence()
        cursors[_FINISHED] = version
        return version

    def read(self, out: torch.Tensor, *, attempts: int = 8) -> int | None:
        """Copies the newest version into ``out`` when it is newer than the last one read.

        Args:
            out (torch.Tensor): uint8 ``[nbytes]``; after None its content is undefined.

        Keyword Args:
            attempts (int, optional): copies at most, where the publisher overtakes each. Defaults to 8.

        Returns:
            int: the version, or None when nothing is newer or every copy was overtaken.
        """
        cursors = self._cursors
        for _ in range(attempts):
            version = cursors[_FINISHED]
            if version == self._seen:
                return None
            cursors.fence()
            out.copy_(self._slots[version % 2])
            cursors.fence()
            if cursors[_STARTED] - version <= 1:
                self._seen = version
                return version
        return None


def _attach(segment: Segment, nbytes: int) -> SeqlockSlots:
    slots = SeqlockSlots.__new__(SeqlockSlots)
    slots._open(segment, nbytes)
    return slots
