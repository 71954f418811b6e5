# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What the sender of weights and one worker share."""

from __future__ import annotations

import pickle
from typing import Any

from torchrl_ext.transport.cursors import CURSOR_BYTES, Cursor, Cursors
from torchrl_ext.transport.ipc_slots import CudaSlotsHandle
from torchrl_ext.transport.segment import Segment
from torchrl_ext.transport.seqlock import SeqlockSlots

__all__ = ["ANSWERED", "APPLIED", "ASKED", "ASKING", "OPENED", "PAUSE", "Channel"]

# Names of this channel for counters whose places rings use otherwise; each has one writer.
#: Worker: the version that it acts on.
APPLIED = Cursor.READ
#: Worker: how often it told the device of its model.
ASKED = Cursor.LIMIT
#: Worker: the question that it writes, or wrote last.
ASKING = Cursor.PRODUCER_CLOSED
#: Sender: the question that a handle was offered for.
ANSWERED = Cursor.ISSUED
#: Worker: the question whose handle it opened, negative when that failed.
OPENED = Cursor.FINALS_READ

#: How long a wait of either side sleeps between two looks, in seconds.
PAUSE = 2e-4

_BOX_BYTES = 8192


class Channel:
    """Host memory of one worker: slots of weights, counters, and two boxes for the handshake of device memory.

    Handshake  The worker moves ``ASKING``, writes the UUID of its model's GPU and moves ``ASKED``. A sender on the same
               GPU puts the handle of device slots into its box and moves ``ANSWERED``. The worker opens it and moves
               ``OPENED``, after which the sender publishes there. A worker that was restarted asks anew, and so does
               one whose model moved: a question that is being written is not read.

    Send it to a spawned process as an argument.

    Args:
        nbytes (int): of a value.
    """

    def __init__(self, nbytes: int) -> None:
        self.host = SeqlockSlots(nbytes)
        #: The counters of the device slots lie here too, so that a handle carries no descriptor.
        self.control = Segment(CURSOR_BYTES + 2 * _BOX_BYTES, "SeqlockWeightSyncScheme")

    def cursors(self) -> Cursors:
        """Returns the counters, for one end."""
        return Cursors(memoryview(self.control.memory))

    def ask(self, cursors: Cursors, uuid: str) -> int:
        """Worker: tells its device and returns the number of the question."""
        number = cursors[ASKING] = cursors[ASKED] + 1
        cursors.fence()
        self._put(0, uuid)
        cursors.fence()
        cursors[ASKED] = number
        return number

    def question(self, cursors: Cursors, number: int) -> str | None:
        """Sender: returns the worker's device, None while the worker asks anew."""
        cursors.fence()
        content = self._content(0)
        cursors.fence()
        return pickle.loads(content) if cursors[ASKING] == number else None

    def answer(self, cursors: Cursors, number: int, handle: CudaSlotsHandle) -> None:
        """Sender: offers device memory."""
        self._put(1, (handle.nbytes, handle.uuid, handle.storage))
        cursors.fence()
        cursors[ANSWERED] = number

    def offer(self, cursors: Cursors) -> CudaSlotsHandle:
        """Worker: returns what the sender offered."""
        cursors.fence()
        nbytes, uuid, storage = pickle.loads(self._content(1))
        return CudaSlotsHandle(nbytes, uuid, storage, self.control)

    def _put(self, box: int, value: Any) -> None:
        content = pickle.dumps(value)
        if len(content) > _BOX_BYTES - 8:
            raise RuntimeError(f"SeqlockWeightSyncScheme: a handle must have {_BOX_BYTES} bytes at most.")
        start = CURSOR_BYTES + box * _BOX_BYTES
        self.control.memory[start : start + 8] = len(content).to_bytes(8, "little")
        self.control.memory[start + 8 : start + 8 + len(content)] = content

    def _content(self, box: int) -> bytes:
        start = CURSOR_BYTES + box * _BOX_BYTES
        size = int.from_bytes(self.control.memory[start : start + 8], "little")
        return self.control.memory[start + 8 : start + 8 + size]
