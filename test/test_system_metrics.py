# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What the machine does: cores and memory from the kernel's files, GPUs from an NVML that is made up here."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import torch
from torchrl._utils import logger as torchrl_logger

from torchrl_ext.record import GpuSample, SystemMetrics, _cpu, system_metrics
from torchrl_ext.record._cpu import CgroupMemory, CoreLoad, cgroup_memory

VALUES = ["utilisation", "memory_used", "memory_total", "power_watts", "temperature_celsius"]


class NVMLError(Exception):
    """As pynvml's."""


class NotSupportedError(NVMLError):
    """As pynvml's."""


class NotFoundError(NVMLError):
    """As pynvml's."""


class FakeNvml(ModuleType):
    """GPUs 0, 1, ... whose every number tells which they are. `mig` has the instances of a GPU in MIG mode."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self, uuids: list[str], *, mig: dict[int, list[str]] | None = None, refused: str = "") -> None:
        super().__init__("pynvml")
        self.NVMLError = NVMLError
        self.NVMLError_NotSupported, self.NVMLError_NotFound = NotSupportedError, NotFoundError
        self.mig, self.refused, self.dies_after, self.samples, self.asked = mig or {}, refused, None, 0, []
        self.uuids = dict(enumerate(uuids))
        self.uuids |= {(gpu, at): uuid for gpu, names in self.mig.items() for at, uuid in enumerate(names)}
        self.count = len(uuids)

    def _call(self, name: str, handle=None) -> None:
        self.asked.append(name)
        if name == "nvmlDeviceGetUtilizationRates":
            self.samples += 1
        if self.dies_after is not None and self.samples > self.dies_after:
            raise NVMLError("GPU is lost")
        if name == self.refused or (isinstance(handle, tuple) and name != "nvmlDeviceGetMemoryInfo"):
            raise NotSupportedError("Not Supported")

    def nvmlInit(self):
        self._call("nvmlInit")

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetMigMode(self, handle):
        if not self.mig:
            raise NotSupportedError("Not Supported")
        return [int(handle in self.mig)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        if index >= len(self.mig[handle]):
            raise NotFoundError("Not Found")
        return handle, index

    def nvmlDeviceGetName(self, handle):
        return f"H200 {handle}".encode() if handle == 1 else f"H200 {handle}"  # both types that pynvml has had

    def nvmlDeviceGetUUID(self, handle):
        return self.uuids[handle]

    def nvmlDeviceGetUtilizationRates(self, handle):
        self._call("nvmlDeviceGetUtilizationRates", handle)
        return SimpleNamespace(gpu=10 * handle, memory=99)

    def nvmlDeviceGetMemoryInfo(self, handle):
        self._call("nvmlDeviceGetMemoryInfo", handle)
        return SimpleNamespace(used=7 if isinstance(handle, tuple) else 100 + handle, total=1000, free=0)

    def nvmlDeviceGetPowerUsage(self, handle):
        self._call("nvmlDeviceGetPowerUsage", handle)
        return 1000 * (200 + handle)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        self._call("nvmlDeviceGetTemperature", handle)
        return 40 + handle


@pytest.fixture
def nvml(monkeypatch):
    """Puts an NVML in place of the machine's."""

    def install(uuids=("GPU-a0", "GPU-b1", "GPU-c2"), *, visible: str | None = None, **options) -> FakeNvml:
        fake = FakeNvml(list(uuids), **options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return fake

    return install


@pytest.fixture
def lines():
    """What TorchRL's logger is told."""
    found: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    keeper = Keeper()
    torchrl_logger.addHandler(keeper)
    yield found
    torchrl_logger.removeHandler(keeper)


def values(gpu: GpuSample) -> list[object]:
    return [getattr(gpu, name) for name in VALUES]


class TestGpuOrder:
    """Contract: rows are in CUDA's order, whatever `CUDA_VISIBLE_DEVICES` says."""

    @pytest.mark.parametrize(
        ("visible", "uuids"),
        [
            (None, ["GPU-a0", "GPU-b1", "GPU-c2"]),
            ("0,1,2", ["GPU-a0", "GPU-b1", "GPU-c2"]),
            ("1", ["GPU-b1"]),
            ("2, 0", ["GPU-c2", "GPU-a0"]),
            ("GPU-c2,GPU-a0", ["GPU-c2", "GPU-a0"]),
            ("GPU-b", ["GPU-b1"]),  # the beginning of one alone
            ("GPU-", []),  # of several
            ("", []),
            ("-1", []),
            ("NoDevFiles", []),
            ("1,9,0", ["GPU-b1"]),  # what is not there ends the list
            ("1,-1,0", ["GPU-b1"]),
            ("1,1", []),
            ("1gpu", ["GPU-b1"]),
        ],
    )
    def test_rows_follow_cuda_visible_devices(self, nvml, visible, uuids):
        """row A11"""
        nvml(visible=visible)
        gpus = SystemMetrics().sample().gpus
        assert [gpu.uuid for gpu in gpus] == uuids and [gpu.index for gpu in gpus] == list(range(len(uuids)))
        for gpu in gpus:
            number = "abc".index(gpu.uuid[4])
            assert values(gpu) == [number / 10, 100 + number, 1000, 200.0 + number, 40.0 + number]
            assert gpu.name == f"H200 {number}"

    def test_torch_corrects_the_order_once_cuda_is_initialised(self, nvml, monkeypatch):
        """CUDA puts the fastest GPU first; its UUIDs tell."""
        nvml()
        metrics = SystemMetrics()
        assert [gpu.uuid for gpu in metrics.sample().gpus] == ["GPU-a0", "GPU-b1", "GPU-c2"]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(system_metrics, "visible_devices", lambda: dict.fromkeys(["c2", "GPU-a0"]))
        assert [gpu.uuid for gpu in metrics.sample().gpus] == ["GPU-c2", "GPU-a0"]

    def test_given_devices_are_read_alone_and_others_than_cuda_left_out(self, nvml):
        nvml(visible="2,1")
        devices = [torch.device("cuda", 1), torch.device("cpu"), torch.device("cuda", 1)]
        gpus = SystemMetrics(devices=devices).sample().gpus
        assert [(gpu.index, gpu.uuid) for gpu in gpus] == [(1, "GPU-b1")]
        assert SystemMetrics(devices=[torch.device("cuda")]).sample().gpus[0].uuid == "GPU-c2"

    def test_no_device_leaves_nvml_alone(self, nvml):
        fake = nvml()
        assert SystemMetrics(devices=[torch.device("cpu")]).sample().gpus == () and not fake.asked

    def test_device_that_cannot_be_found_is_a_row_of_none(self, nvml):
        nvml(visible="0")
        (gpu,) = SystemMetrics(devices=[torch.device("cuda", 3)]).sample().gpus
        assert gpu.index == 3 and gpu.uuid == "" and values(gpu) == [None] * 5


class TestMig:
    """Contract: an instance shows its memory; what NVML does not tell of it is None, no zero."""

    MIG = {"mig": {0: ["MIG-x0", "MIG-y1"]}}

    @pytest.mark.parametrize(
        ("visible", "uuids"),
        [
            ("MIG-y1", ["MIG-y1"]),
            ("MIG-y", ["MIG-y1"]),
            ("0", ["MIG-x0"]),  # a GPU in MIG mode stands for its first instance
            ("GPU-a0", ["MIG-x0"]),
            ("MIG-z", []),
            (None, ["MIG-x0", "GPU-b1", "GPU-c2"]),
        ],
    )
    def test_instances_are_found(self, nvml, visible, uuids):
        """case 59"""
        nvml(visible=visible, **self.MIG)
        assert [gpu.uuid for gpu in SystemMetrics().sample().gpus] == uuids

    def test_utilisation_of_an_instance_is_none_and_memory_is_shown(self, nvml, lines):
        """case 59"""
        nvml(visible="MIG-y1", **self.MIG)
        (gpu,) = SystemMetrics().sample().gpus
        assert values(gpu) == [None, 7, 1000, None, None] and not lines

    def test_uuid_of_the_whole_gpu_does_not_hide_the_instance(self, nvml, monkeypatch):
        """case 59: some releases of CUDA give an instance the UUID of its GPU"""
        nvml(visible="MIG-y1", **self.MIG)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(system_metrics, "visible_devices", lambda: dict.fromkeys(["a0"]))
        assert [gpu.uuid for gpu in SystemMetrics().sample().gpus] == ["MIG-y1"]


class TestNvmlFailure:
    """Contract: no exception and no false zero; one line of the log at most."""

    @pytest.mark.parametrize(
        ("refused", "missing"),
        [
            ("nvmlDeviceGetUtilizationRates", ["utilisation"]),
            ("nvmlDeviceGetMemoryInfo", ["memory_used", "memory_total"]),
            ("nvmlDeviceGetPowerUsage", ["power_watts"]),
            ("nvmlDeviceGetTemperature", ["temperature_celsius"]),
        ],
    )
    def test_value_that_is_not_supported_is_none_and_the_others_are_shown(self, nvml, lines, refused, missing):
        """case 59"""
        nvml(refused=refused)
        for gpu in SystemMetrics().sample().gpus:
            assert [name for name in VALUES if getattr(gpu, name) is None] == missing
        assert not lines

    def test_a_true_zero_stays_zero(self, nvml):
        """case 59"""
        nvml()
        assert SystemMetrics().sample().gpus[0].utilisation == 0.0

    def test_nvml_that_dies_costs_one_line_and_leaves_rows_of_none(self, nvml, lines):
        fake = nvml()
        metrics = SystemMetrics()
        fake.dies_after = 6  # readings: the third sample of three GPUs fails
        samples = [metrics.sample().gpus for _ in range(5)]
        assert fake.samples == 6 + 3  # a driver may take seconds to fail: each is asked once more
        assert all(None not in values(gpu) for gpus in samples[:2] for gpu in gpus)
        assert all(values(gpu) == [None] * 5 for gpus in samples[2:] for gpu in gpus)
        assert [gpu.uuid for gpu in samples[4]] == ["GPU-a0", "GPU-b1", "GPU-c2"]
        assert lines == ["SystemMetrics: NVML failed (GPU is lost); values of GPUs are not available."]

    def test_one_lost_gpu_does_not_hide_the_others(self, nvml, lines, monkeypatch):
        fake = nvml()
        metrics = SystemMetrics()
        read = fake.nvmlDeviceGetPowerUsage

        def lost(handle):
            if handle == 1:
                raise NVMLError("GPU is lost")
            return read(handle)

        monkeypatch.setattr(fake, "nvmlDeviceGetPowerUsage", lost)
        rows = [values(gpu) for gpu in metrics.sample().gpus]
        assert rows[1] == [None] * 5 and None not in rows[0] + rows[2] and len(lines) == 1

    @pytest.mark.parametrize("missing", ["package", "driver"])
    def test_missing_nvml_costs_one_line(self, nvml, lines, monkeypatch, missing):
        fake = nvml()
        if missing == "package":
            monkeypatch.setitem(sys.modules, "pynvml", None)
        else:
            fake.dies_after = -1
        metrics = SystemMetrics()
        assert metrics.sample().gpus == () and metrics.sample().gpus == ()
        assert len(lines) == 1 and lines[0].startswith("SystemMetrics: NVML is not available")

    def test_missing_nvml_leaves_rows_of_none_for_given_devices(self, nvml, monkeypatch):
        nvml()
        monkeypatch.setitem(sys.modules, "pynvml", None)
        (gpu,) = SystemMetrics(devices=[torch.device("cuda", 0)]).sample().gpus
        assert gpu.index == 0 and values(gpu) == [None] * 5

    def test_processes_are_never_asked_for(self, nvml):
        """case 61: ids of NVML are those of the host"""
        fake = nvml()  # has no function for processes: asking for one would end in rows of None
        assert all(None not in values(gpu) for gpu in SystemMetrics().sample().gpus)
        assert not [name for name in fake.asked if "Process" in name]


class TestNoContext:
    """Contract: sampling does not initialise CUDA."""

    def test_sampling_asks_nothing_of_torch_that_initialises_cuda(self, nvml, monkeypatch):
        """case 63"""

        def refuse(*parts, **options):
            raise AssertionError("CUDA was initialised")

        nvml()
        for name in ("_lazy_init", "get_device_properties", "device_count", "is_available", "current_device"):
            monkeypatch.setattr(torch.cuda, name, refuse)
        assert len(SystemMetrics().sample().gpus) == 3

    @pytest.mark.gpu
    def test_real_gpus_are_those_of_torch_and_have_no_context(self):
        code = """
import torch
from torchrl_ext.record import SystemMetrics
metrics = SystemMetrics()
before = [gpu.uuid for gpu in metrics.sample().gpus]
assert not torch.cuda.is_initialized()
uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
after = [gpu.uuid for gpu in metrics.sample().gpus]
assert before == after == ["GPU-" + uuid for uuid in uuids] or before[0].startswith("MIG-"), (before, after, uuids)
assert all(gpu.memory_total for gpu in metrics.sample().gpus)
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


class TestCores:
    """Contract: one load per core of the affinity mask, labelled; the first reading is no row of zeros."""

    def test_first_sample_is_not_all_zero(self):
        """case 64"""
        assert any(SystemMetrics(devices=[]).sample().cpu.load)

    def test_first_sample_of_another_thread_is_not_all_zero(self):
        """case 64: psutil would keep its last reading by thread"""
        metrics, found = SystemMetrics(devices=[]), []
        thread = threading.Thread(target=lambda: found.append(metrics.sample()))
        thread.start()
        thread.join(60.0)
        assert any(found[0].cpu.load)

    def test_first_sample_of_an_idle_machine_is_the_mean_since_it_was_started(self, tmp_path, monkeypatch):
        """case 64"""
        stat = tmp_path / "stat"
        stat.write_text("cpu  50 0 0 150 0 0 0 0 0 0\ncpu0 25 0 0 75 0 0 0 0 0 0\ncpu3 10 0 0 90 0 0 0 0 0 0\n")
        monkeypatch.setattr(_cpu, "time", SimpleNamespace(monotonic=iter([0.0, 1.0, 2.0, 3.0]).__next__))
        load = CoreLoad({0, 3}, stat=stat)
        assert load.read() == (0.25, 0.1)
        stat.write_text("cpu0 125 0 0 75 0 0 0 0 0 0\ncpu3 10 0 0 90 0 0 0 0 0 0\n")
        assert load.read() == (1.0, 0.0)
        assert load.read() == (0.0, 0.0)  # once measured, nothing is nothing

    def test_calls_in_quick_succession_return_the_last_load(self, tmp_path, monkeypatch):
        """case 64: the kernel counts in hundredths of a second"""
        monkeypatch.setattr(_cpu, "time", SimpleNamespace(monotonic=iter([0.0, 0.05]).__next__))
        stat = tmp_path / "stat"
        stat.write_text("cpu0 25 0 0 75 0 0 0 0\n")
        load = CoreLoad({0}, stat=stat)
        stat.write_text("cpu0 26 0 0 75 0 0 0 0\n")
        assert load.read() == (0.25,)

    def test_waiting_for_disks_is_idle_and_guests_are_not_counted_twice(self, tmp_path, monkeypatch):
        stat = tmp_path / "stat"
        stat.write_text("cpu0 0 0 0 0 0 0 0 0 0 0\n")
        monkeypatch.setattr(_cpu, "time", SimpleNamespace(monotonic=iter([0.0, 1.0]).__next__))
        load = CoreLoad({0}, stat=stat)
        stat.write_text("cpu0 10 5 5 40 10 10 10 10 10 5\n")
        assert load.read() == (0.5,)

    def test_load_follows_the_work(self):
        metrics, usable = SystemMetrics(devices=[]), os.sched_getaffinity(0)
        deadline, load = time.monotonic() + 60.0, 0.0
        os.sched_setaffinity(0, {min(usable)})  # of this thread alone: on two cores each would be half busy
        try:
            while load <= 0.5:  # a container may be kept from its cores for a while
                assert time.monotonic() < deadline, f"a core that worked had a load of {load}"
                metrics.sample()
                end = time.monotonic() + 0.3
                while time.monotonic() < end:
                    pass
                cpu = metrics.sample().cpu
                load = cpu.load[cpu.affinity.index(min(usable))]
        finally:
            os.sched_setaffinity(0, usable)

    def test_cores_are_those_of_the_affinity_mask(self):
        """case 64"""
        core = max(os.sched_getaffinity(0))
        code = f"""
import os
os.sched_setaffinity(0, {{{core}}})
from torchrl_ext.record import SystemMetrics
cpu = SystemMetrics(devices=[]).sample().cpu
print(cpu.affinity, len(cpu.load), cpu.logical_cores)
"""
        run = subprocess.run([sys.executable, "-c", code], check=True, timeout=100, capture_output=True, text=True)
        assert run.stdout.split("\n")[0] == f"({core},) 1 {psutil.cpu_count()}"

    def test_cores_keep_their_numbers_where_some_are_off_line(self, tmp_path):
        """case 64"""
        stat = tmp_path / "stat"
        stat.write_text("".join(f"cpu{core} {core} 0 0 {100 - core} 0 0 0 0\n" for core in (0, 1, 4, 5, 6, 7)))
        load = CoreLoad({1, 4, 5, 7}, stat=stat)
        assert load.cores == (1, 4, 5, 7) and load.read() == (0.01, 0.04, 0.05, 0.07)


def group(folder: Path, limit: str, used: int, inactive: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file 3\n")
    return folder


class TestMemory:
    """Contract: the limit of the container counts where it is less than the machine's memory."""

    def test_limit_is_read_and_cached_files_are_free(self, tmp_path):
        assert cgroup_memory(group(tmp_path, "1000", 600, 200), root=tmp_path) == CgroupMemory(1000, 400)

    def test_the_tightest_limit_up_to_the_root_counts(self, tmp_path):
        group(tmp_path, "max", 9000, 0)
        group(tmp_path / "pod", "500", 450, 50)
        inner = group(tmp_path / "pod" / "job", "800", 100, 0)
        assert cgroup_memory(inner, root=tmp_path) == CgroupMemory(500, 400)

    def test_no_limit_is_none(self, tmp_path):
        assert cgroup_memory(group(tmp_path / "a", "max", 5, 0), root=tmp_path) is None
        assert cgroup_memory(tmp_path / "missing", root=tmp_path) is None

    @pytest.mark.parametrize("limit", [10**7, 10**18])
    def test_sample_takes_the_smaller_total(self, monkeypatch, limit):
        monkeypatch.setattr(system_metrics, "cgroup_memory", lambda: CgroupMemory(limit, 4000))
        cpu = SystemMetrics(devices=[]).sample().cpu
        total = psutil.virtual_memory().total
        assert cpu.ram_total == min(limit, total)
        assert cpu.ram_used == 4000 if limit < total else 0 < cpu.ram_used < total

    def test_memory_of_this_process_is_told(self):
        cpu = SystemMetrics(devices=[]).sample().cpu
        assert 10**7 < cpu.process_rss < cpu.ram_total and cpu.physical_cores <= cpu.logical_cores and cpu.model
