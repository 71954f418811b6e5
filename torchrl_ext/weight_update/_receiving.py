# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The worker's end of a channel."""

from __future__ import annotations

import time

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl._utils import logger as torchrl_logger

from torchrl_ext.transport.device_memory import uuid_of
from torchrl_ext.transport.ipc_slots import CudaSlotReader
from torchrl_ext.weight_update._channel import ANSWERED, APPLIED, OPENED, PAUSE, Channel
from torchrl_ext.weight_update.weight_layout import WeightLayout

__all__ = ["ReceivingEnd"]


class ReceivingEnd:
    """Takes whole weights out of a channel and writes them into a model.

    Args:
        channel (Channel): of this worker.
        layout (WeightLayout): of the weights.
        model (nn.Module or TensorDictBase): what they are written into.

    Raises:
        ValueError: when the model has another layout, naming the first key that differs.
    """

    def __init__(self, channel: Channel, layout: WeightLayout, model: nn.Module | TensorDictBase) -> None:
        self._channel, self._layout = channel, layout
        self._cursors = channel.cursors()
        self._on_device: CudaSlotReader | None = None
        self._asked = self._opened = 0
        self._sent: torch.cuda.Event | None = None
        self._device: torch.device | None = None
        self.version = 0
        self.rebind(model)

    def rebind(self, model: nn.Module | TensorDictBase) -> None:
        """Writes into another model of the same layout from now on, which the next :meth:`take` gives the newest."""
        device, before = self._layout.device_of(model), self._device
        self.model = model
        self._device = device if device is not None and device.type == "cuda" else None
        size, on_cuda = (self._layout.nbytes,), self._device is not None
        self._flat = torch.empty(size, dtype=torch.uint8, pin_memory=on_cuda)
        self._device_flat = torch.empty(size, dtype=torch.uint8, device=self._device) if on_cuda else None
        self._views: dict[int, TensorDict] = {}
        self._in_model = 0
        self._rewind()
        if self._asked and self._device != before:
            self.ask()

    def _rewind(self) -> None:
        """Reads the newest weights again, whether or not they were read before."""
        self._host = self._channel.host.reader()
        if self._on_device is not None:
            self._on_device.rewind()

    @property
    def settled(self) -> bool:
        """Whether the sender offered device memory since :meth:`ask`, and it is mapped."""
        return self._on_device is not None and self._opened == self._asked

    def ask(self) -> None:
        """Tells the sender where the model is."""
        self._asked = self._channel.ask(self._cursors, "the host" if self._device is None else uuid_of(self._device))

    def take(self, seconds: float = 0.0) -> TensorDict | None:
        """Applies the newest weights; returns views of them, or None when nothing is newer and whole in that time."""
        taken = self._take()
        if taken is None and seconds > 0:
            deadline = time.monotonic() + seconds
            while taken is None and time.monotonic() < deadline:
                time.sleep(PAUSE)
                taken = self._take()
        return taken

    def _take(self) -> TensorDict | None:
        if self._asked != self._opened and self._cursors[ANSWERED] == self._asked:
            self._open()
        version, flat = self._read()
        if version is None:
            return None
        try:
            self._layout.unpack(flat, self.model)
        except BaseException:
            self._rewind()  # they are still to be applied, once the model can take them
            raise
        self.version = self._in_model = version
        self._cursors.fence()
        self._cursors[APPLIED] = version
        views = self._views.get(id(flat))
        if views is None:
            views = self._views[id(flat)] = self._layout.view(flat)
        return views

    def materialize(self) -> None:
        """Gives a model without memory, on the meta device, the weights of the next :meth:`take` to be written into."""
        found = self._layout.check(self.model)
        meta = {name: tensor for name, tensor in found.tensors.items() if tensor.is_meta and name not in found.extra}
        if meta:
            found.replace({name: torch.empty_like(tensor, device="cpu") for name, tensor in meta.items()})

    def _read(self) -> tuple[int | None, torch.Tensor]:
        remote, flat = self._on_device, self._device_flat
        if remote is not None and flat is not None and remote.device == flat.device and remote.version > self._in_model:
            version = remote.read(flat)
            if version is not None:
                return version, flat
        # What was published before the sender moved to device memory.
        newest, pinned = self._host.version, self._flat
        if newest <= self._in_model or newest < self.version or (self._sent is not None and not self._sent.query()):
            return None, pinned
        version = self._host.read(pinned)
        if version is None or flat is None:
            return version, pinned
        flat.copy_(pinned, non_blocking=True)
        self._sent = torch.cuda.Event()
        self._sent.record(torch.cuda.current_stream(self._device))
        return version, flat

    def _open(self) -> None:
        self._opened, self._on_device = self._asked, None
        try:
            self._on_device = CudaSlotReader.open(self._channel.offer(self._cursors))
        except RuntimeError as error:
            torchrl_logger.warning(f"SeqlockWeightSyncScheme: device memory cannot be mapped: {error}")
        self._cursors[OPENED] = self._asked if self._on_device is not None else -self._asked
