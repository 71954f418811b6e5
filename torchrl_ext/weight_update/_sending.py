# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The sender's end of a channel, and weights on their way through it."""

from __future__ import annotations

from typing import Literal

import torch
from torchrl._utils import logger as torchrl_logger

from torchrl_ext.transport.device_memory import uuid_of
from torchrl_ext.transport.ipc_slots import CudaSeqlockSlots, CudaSlotsHandle
from torchrl_ext.weight_update._channel import APPLIED, ASKED, OPENED, Channel
from torchrl_ext.weight_update._leaves import Weights
from torchrl_ext.weight_update.weight_layout import WeightLayout

__all__ = ["IPC_BYTES", "SendingEnd", "Snapshot"]

#: ``"auto"`` takes device memory from here on. On an H200, from ``send`` until the worker's copy is complete, 1 MiB
#: takes 0.55 ms through device memory and 0.88 through the host, 108 MB 1.1 and 52 ms; less was not measured.
IPC_BYTES = 1 << 20


class Snapshot:
    """Packed weights on a CUDA device as of one moment of its current stream; any number of channels send it.

    Args:
        flat (torch.Tensor): uint8 ``[nbytes]``, filled on the current stream and never written again.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self._ready = torch.cuda.Event()
        self._ready.record(torch.cuda.current_stream(flat.device))
        self._on_host: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def on_stream(self) -> torch.Tensor:
        """Returns ``flat`` for copies on the current stream, which may be another one than it was filled on."""
        stream = torch.cuda.current_stream(self.flat.device)
        stream.wait_event(self._ready)
        self.flat.record_stream(stream)
        return self.flat

    def on_host(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Returns a pinned copy and the event after which it is complete; enqueued on the first call."""
        if self._on_host is None:
            # torch keeps a pinned block until the copies that use it are complete, and lends it again then.
            pinned = torch.empty(self.flat.shape, dtype=torch.uint8, pin_memory=True)
            pinned.copy_(self.on_stream(), non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.flat.device))
            self._on_host = pinned, event
        return self._on_host


class SendingEnd:
    """Publishes weights to one worker: one snapshot is on its way, the newest of those that came meanwhile waits.

    Args:
        channel (Channel): of the worker.
        worker (int): names it in errors.
        transport ("auto", "host" or "ipc"): see the scheme.
        device (torch.device, optional): where the sender's weights are, None unless that is one CUDA device.
    """

    def __init__(
        self, channel: Channel, worker: int, transport: Literal["auto", "host", "ipc"], device: torch.device | None
    ) -> None:
        self._channel, self._worker, self._transport, self.device = channel, worker, transport, device
        self._cursors, self._host = channel.cursors(), channel.host
        self._device_slots: CudaSeqlockSlots | None = None
        self._handle: CudaSlotsHandle | None = None
        self.on_device = False
        self._asked = self._offered = 0
        self._copying: Snapshot | None = None
        self._waiting: Snapshot | None = None

    @property
    def version(self) -> int:
        """The newest version that the worker sees."""
        return max(self._host.version, 0 if self._device_slots is None else self._device_slots.version)

    @property
    def applied(self) -> int:
        """The version that the worker acts on."""
        return self._cursors[APPLIED]

    @property
    def idle(self) -> bool:
        """Whether everything that was sent is visible."""
        slots = self._device_slots
        return self._copying is None and self._waiting is None and (slots is None or not slots.busy)

    @property
    def settled(self) -> bool:
        """Whether the worker asked, and opened what it was offered or was offered nothing."""
        return self._asked > 0 and self._asked == self._cursors[ASKED] and not self._offered

    def put(self, layout: WeightLayout, weights: Weights) -> None:
        """Publishes weights in host memory at once, in place of what is on its way."""
        slot, _ = self._host.begin()
        layout.pack(weights, slot)
        self._copying = self._waiting = None
        self._host.finish()

    def send(self, snapshot: Snapshot) -> None:
        """Publishes a snapshot as soon as :meth:`poll` finds its copy complete; never waits."""
        self.poll()
        if self._busy():
            self._waiting = snapshot
        else:
            self._start(snapshot)

    def poll(self) -> None:
        """Shows what is complete, answers the worker, and starts what waits; never waits."""
        if self._copying is not None and self._copying.on_host()[1].query():
            self._host.publish(self._copying.on_host()[0])
            self._copying = None
        busy = self._busy()  # shows what is complete in device memory
        if self._transport != "host" and not busy:
            # Before the next copy: a sender that is always ahead of its device has one under way at any other time.
            self._shake_hands()
            busy = self._busy()
        if self._waiting is not None and not busy:
            waiting, self._waiting = self._waiting, None
            self._start(waiting)

    def close(self) -> None:
        """Gives up the device memory: the worker has ended, or reads no more."""
        if self._device_slots is not None:
            self._device_slots.wait()
            self._forget()
        self._device_slots = self._copying = self._waiting = None
        self.on_device = False

    def _forget(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None and self._device_slots is not None:
            self._device_slots.forget(handle)

    def _busy(self) -> bool:
        return self._copying is not None or (self._device_slots is not None and not self._device_slots.poll())

    def _start(self, snapshot: Snapshot) -> None:
        if self.on_device and self._device_slots is not None:
            self._device_slots.publish(snapshot.on_stream())
        else:
            snapshot.on_host()
            self._copying = snapshot

    def _shake_hands(self) -> None:
        asked = self._cursors[ASKED]
        if asked != self._asked:
            uuid = self._channel.question(self._cursors, asked)
            if uuid is not None:
                self._asked = asked
                self._answer(asked, uuid)
        elif self._offered and abs(self._cursors[OPENED]) == self._offered:
            self._settle(self._cursors[OPENED] > 0)

    def _answer(self, asked: int, uuid: str) -> None:
        slots, self._offered = self._device_slots, 0
        if self.on_device and slots is not None:
            self._return_to_host(slots)
        reason = self._refusal(uuid)
        if reason is None:
            try:
                self._offer(asked)
                return
            except RuntimeError as error:  # no memory, or a driver or allocator that cannot export it
                reason = f"device memory cannot be offered: {error}"
        self._refuse(reason)

    def _offer(self, asked: int) -> None:
        slots = self._device_slots
        if slots is None:
            device, nbytes = torch.device(self.device or "cuda"), self._host.nbytes
            slots = self._device_slots = CudaSeqlockSlots(nbytes, device=device, counters=self._channel.control)
        self._forget()  # whoever had the last handle has ended, or opens another one now
        self._handle = slots.export()
        self._channel.answer(self._cursors, asked, self._handle)
        self._offered = asked

    def _settle(self, opened: bool) -> None:
        self._offered = 0
        if not opened:
            self._forget()
            self._refuse("its process could not map the memory")
            return
        self.on_device = True
        if self._device_slots is not None:
            self._device_slots.continue_from(self._host.version)

    def _return_to_host(self, slots: CudaSeqlockSlots) -> None:
        """A new worker starts from host memory: what its predecessor had goes there."""
        self.on_device = False
        self._host.continue_from(slots.version)
        newest = slots.newest()
        if newest is not None:
            self._start(Snapshot(newest.clone()))

    def _refusal(self, uuid: str) -> str | None:
        if self.device is None:
            return "the sender's weights are not on one CUDA device"
        if uuid != uuid_of(self.device):
            return f"its model is on {uuid}, the sender's weights on {uuid_of(self.device)}"
        if self._transport == "auto" and self._host.nbytes < IPC_BYTES:
            return f"weights of {self._host.nbytes} bytes, less than {IPC_BYTES}, are faster through host memory"
        return None

    def _refuse(self, reason: str) -> None:
        text = f"SeqlockWeightSyncScheme: worker {self._worker} gets its weights through host memory: {reason}."
        if self._transport == "ipc":
            raise RuntimeError(f"{text} transport='ipc' forbids that; what was published can still be read.")
        if self.device is not None:  # otherwise there was no choice
            torchrl_logger.info(text)
