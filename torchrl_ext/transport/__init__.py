# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Rings that carry packed rows from worker processes to the learner's."""

from torchrl_ext.transport.errors import RingClosed, RingPeerDied
from torchrl_ext.transport.host_ends import HostConsumer, HostProducer
from torchrl_ext.transport.host_ring import HostRing
from torchrl_ext.transport.ipc_ends import CudaIpcConsumer, CudaIpcProducer
from torchrl_ext.transport.ipc_ring import CudaIpcRing, RingExport
from torchrl_ext.transport.ipc_slots import CudaSeqlockSlots, CudaSlotReader, CudaSlotsHandle
from torchrl_ext.transport.ring import Span
from torchrl_ext.transport.seqlock import SeqlockSlots

__all__ = [
    "CudaIpcConsumer",
    "CudaIpcProducer",
    "CudaIpcRing",
    "CudaSeqlockSlots",
    "CudaSlotReader",
    "CudaSlotsHandle",
    "HostConsumer",
    "HostProducer",
    "HostRing",
    "RingClosed",
    "RingExport",
    "RingPeerDied",
    "SeqlockSlots",
    "Span",
]
