# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What the machine does: load of each core, memory, and the GPUs that this process sees."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from torchrl_ext.record._cpu import CoreLoad, cgroup_memory, cpu_model
from torchrl_ext.record._nvml import DeviceNumbers, Nvml, NvmlDevice
from torchrl_ext.record._visible_gpus import by_uuids, visible_gpus
from torchrl_ext.transport.device_memory import visible_devices

__all__ = ["CpuSample", "GpuSample", "SystemMetrics", "SystemSample"]


@dataclass(frozen=True, kw_only=True)
class CpuSample:
    """Cores and memory."""

    model: str
    physical_cores: int
    """Of the machine."""
    logical_cores: int
    """Of the machine."""
    affinity: tuple[int, ...]
    """Numbers of the cores that this process could use when the metrics were made, ascending."""
    load: tuple[float, ...]
    """Busy share of each core of ``affinity``, 0 to 1, by all processes."""
    ram_used: int
    """Bytes that cannot be had, of ``ram_total``."""
    ram_total: int
    """Bytes of the machine, or of the container's limit where that is less."""
    process_rss: int
    """Resident bytes of this process alone."""


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """One CUDA device as a whole, by all processes. None is what cannot be had; it is no zero."""

    index: int
    """Of the CUDA device in this process."""
    name: str
    """``"unknown"`` where it cannot be had."""
    uuid: str
    """With its prefix ``GPU-`` or ``MIG-``; empty where it cannot be had."""
    utilisation: float | None
    """Share of the last moment in which a kernel ran, 0 to 1. A MIG instance has none."""
    memory_used: int | None
    """Bytes."""
    memory_total: int | None
    """Bytes."""
    power_watts: float | None
    temperature_celsius: float | None


@dataclass(frozen=True, kw_only=True)
class SystemSample:
    """One reading."""

    cpu: CpuSample
    gpus: tuple[GpuSample, ...]
    """In CUDA's order."""


class SystemMetrics:
    """Reads what the machine does, for display and logs, in any thread but one at a time.

    Devices     CUDA's order under ``CUDA_VISIBLE_DEVICES`` (indices, UUIDs, MIG instances). Until torch has initialised
                CUDA it is derived from the variable, which holds for GPUs of one kind; from then on from torch's UUIDs.
    Context     None is made: NVML is asked, and torch only after something else has initialised CUDA.
    Failure     :meth:`sample` does not raise for GPUs. NVML that is missing or fails is one line of the log, and what
                it would have told is None from then on.
    Processes   Only this process's memory is told. NVML knows processes by ids of the host, so it is not asked.

    Keyword Args:
        devices (sequence of torch.device, optional): whose GPUs to read; others than CUDA's are left out, without an
            index it is 0, and an empty sequence leaves NVML alone. Defaults to all visible GPUs.

    Examples:
        >>> cpu = SystemMetrics(devices=[]).sample().cpu
        >>> len(cpu.load) == len(cpu.affinity) <= cpu.logical_cores
        True
        >>> any(cpu.load) and cpu.ram_used < cpu.ram_total
        True
    """

    def __init__(self, *, devices: Sequence[torch.device] | None = None) -> None:
        # The main thread's: of a thread that was pinned, sched_getaffinity(0) would tell only its own.
        self._cores = CoreLoad(os.sched_getaffinity(os.getpid()))
        self._model = cpu_model()
        self._logical_cores = psutil.cpu_count() or len(self._cores.cores)
        self._physical_cores = psutil.cpu_count(logical=False) or self._logical_cores
        self._process = psutil.Process()
        wanted = None if devices is None else [device.index or 0 for device in devices if device.type == "cuda"]
        self._wanted = None if wanted is None else sorted(set(wanted))
        self._nvml = Nvml() if self._wanted != [] else None
        self._gpus: list[NvmlDevice] = []
        self._asked_torch = False
        if self._nvml is not None:
            self._gpus = visible_gpus(self._nvml.devices, os.environ.get("CUDA_VISIBLE_DEVICES"))

    def sample(self) -> SystemSample:
        """Returns a reading; loads are means since the last one (see :class:`CpuSample`).

        The first load covers the time since construction, or since the machine was started where that is less than
        0.1 s or nothing ran.
        """
        return SystemSample(cpu=self._cpu(), gpus=self._gpu_rows())

    def _cpu(self) -> CpuSample:
        memory = psutil.virtual_memory()
        used, total = memory.total - memory.available, memory.total
        group = cgroup_memory()
        if group is not None and group.limit < total:
            used, total = min(group.used, group.limit), group.limit
        return CpuSample(
            model=self._model,
            physical_cores=self._physical_cores,
            logical_cores=self._logical_cores,
            affinity=self._cores.cores,
            load=self._cores.read(),
            ram_used=used,
            ram_total=total,
            process_rss=self._process.memory_info().rss,
        )

    def _gpu_rows(self) -> tuple[GpuSample, ...]:
        if self._nvml is None:
            return ()
        if not self._asked_torch and torch.cuda.is_initialized():
            self._asked_torch = True
            self._gpus = by_uuids(self._nvml.devices, list(visible_devices())) or self._gpus
        return tuple(self._gpu_row(index) for index in self._wanted or range(len(self._gpus)))

    def _gpu_row(self, index: int) -> GpuSample:
        if self._nvml is None or index >= len(self._gpus):
            return GpuSample(index=index, name="unknown", uuid="", **DeviceNumbers()._asdict())
        gpu = self._gpus[index]
        return GpuSample(index=index, name=gpu.name, uuid=gpu.uuid, **self._nvml.read(gpu)._asdict())
