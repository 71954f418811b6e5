# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""NVML without exceptions: what it cannot tell is None, and that it failed is logged once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torchrl._utils import logger as torchrl_logger

__all__ = ["DeviceNumbers", "Nvml", "NvmlDevice"]

#: Errors that say that one number cannot be had (MIG, vGPU, containers), while NVML and the device are well.
_REFUSALS = ("NotSupported", "NoPermission", "InvalidArgument", "NotFound", "FunctionNotFound")


class NvmlDevice:
    """A GPU or a MIG instance.

    Args:
        handle (object, optional): NVML's; None when it could not be had.
        name (str): ``"unknown"`` when it could not be had.
        uuid (str): with its prefix ``GPU-`` or ``MIG-``; empty when it could not be had.
        instances (list of NvmlDevice): the MIG instances of a GPU in MIG mode, which itself cannot be used then.
    """

    def __init__(self, handle: Any, name: str, uuid: str, instances: list[NvmlDevice]) -> None:
        self.handle, self.name, self.uuid, self.instances = handle, name, uuid, instances


class DeviceNumbers(NamedTuple):
    """What NVML tells of one device as a whole. Of processes nothing is asked: their ids are those of the host."""

    utilisation: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None


class Nvml:
    """The GPUs of this machine in NVML's order, that of the PCI bus.

    ``pynvml`` (package nvidia-ml-py) is imported here, not before. No CUDA context is made.
    """

    def __init__(self) -> None:
        self._told = False
        self._library: Any = None
        self._refusals: tuple[type[BaseException], ...] = ()
        self.devices: list[NvmlDevice] = []
        try:
            import pynvml

            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
        except Exception as error:  # whatever is wrong with driver or package, training goes on
            self._tell("is not available", error)
            return
        self._library = pynvml
        found = (getattr(pynvml, f"NVMLError_{name}", None) for name in _REFUSALS)
        self._refusals = tuple(kind for kind in found if kind is not None)
        self.devices = [self._open(index) for index in range(count)]

    @property
    def available(self) -> bool:
        """Whether NVML answered when this was made."""
        return self._library is not None

    def ask(self, name: str, *parts: Any) -> Any:
        """Calls a function of NVML; None where it refuses.

        Raises:
            Exception: of any kind when NVML or the device has failed.
        """
        try:
            return getattr(self._library, name)(*parts)
        except self._refusals:
            return None

    def read(self, device: NvmlDevice) -> DeviceNumbers:
        """Returns the numbers of a device. One that failed is not asked again, as NVML may take seconds to fail."""
        if device.handle is None:
            return DeviceNumbers()
        try:
            rates = self.ask("nvmlDeviceGetUtilizationRates", device.handle)
            memory = self.ask("nvmlDeviceGetMemoryInfo", device.handle)
            milliwatts = self.ask("nvmlDeviceGetPowerUsage", device.handle)
            celsius = self.ask("nvmlDeviceGetTemperature", device.handle, self._library.NVML_TEMPERATURE_GPU)
        except Exception as error:  # a lost GPU, a driver that was replaced: training goes on
            device.handle = None
            self._tell("failed", error)
            return DeviceNumbers()
        return DeviceNumbers(
            utilisation=_value(rates, lambda it: it.gpu / 100),
            memory_used=_value(memory, lambda it: int(it.used)),
            memory_total=_value(memory, lambda it: int(it.total)),
            power_watts=_value(milliwatts, lambda it: it / 1000),
            temperature_celsius=_value(celsius, float),
        )

    def _open(self, index: int) -> NvmlDevice:
        try:
            handle = self.ask("nvmlDeviceGetHandleByIndex", index)
            instances = self._instances(handle) if handle is not None else []
        except Exception as error:  # the others keep their places
            self._tell("failed", error)
            return NvmlDevice(None, "unknown", "", [])
        return self._described(handle, instances)

    def _instances(self, handle: Any) -> list[NvmlDevice]:
        mode = self.ask("nvmlDeviceGetMigMode", handle)
        if not mode or not mode[0]:
            return []
        most = self.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0
        found = (self.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, place) for place in range(most))
        return [self._described(instance, []) for instance in found if instance is not None]

    def _described(self, handle: Any, instances: list[NvmlDevice]) -> NvmlDevice:
        texts = []
        for name, unknown in (("nvmlDeviceGetName", "unknown"), ("nvmlDeviceGetUUID", "")):
            try:
                text = self.ask(name, handle) if handle is not None else None
            except Exception as error:
                self._tell("failed", error)
                text = None
            # Old releases return bytes.
            texts.append(text.decode(errors="replace") if isinstance(text, bytes) else text or unknown)
        return NvmlDevice(handle, texts[0], texts[1], instances)

    def _tell(self, what: str, error: Exception) -> None:
        if not self._told:
            self._told = True
            torchrl_logger.warning("SystemMetrics: NVML %s (%s); values of GPUs are not available.", what, error)


def _value(answer: Any, read: Callable[[Any], Any]) -> Any:
    return None if answer is None else read(answer)
