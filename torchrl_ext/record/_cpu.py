# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Load of single cores and the memory that a container may use, from the kernel's own files."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

__all__ = ["CgroupMemory", "CoreLoad", "cgroup_memory", "cpu_model"]

#: Seconds below which a load is not measured anew: the kernel counts in hundredths of a second.
_SHORTEST = 0.1
_CORE = re.compile(r"cpu([0-9]+) (.*)")
_CGROUPS = Path("/sys/fs/cgroup")


class CoreLoad:
    """The busy share of cores between two calls of :meth:`read`.

    Read from ``/proc/stat`` by name: psutil numbers the cores that are on line from 0, and keeps its last reading by
    thread, so that the first one of another thread is zero.

    Args:
        cores (collection of int): those wanted; without one that the kernel lists, it lists none.

    Keyword Args:
        stat (Path): the kernel's file. Defaults to ``/proc/stat``.
    """

    def __init__(self, cores: Collection[int], *, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._last, self._last_time = self._times(), time.monotonic()
        #: The cores in ascending order, fixed.
        self.cores = tuple(sorted(set(cores) & set(self._last)))
        # Until something was measured: the mean since the machine was started.
        self._load = self._between(dict.fromkeys(self.cores, (0, 0)), self._last)
        self._measured = False

    def read(self) -> tuple[float, ...]:
        """Returns the busy share of each core, 0 to 1, since the last call or, first, since construction.

        Calls within 0.1 s return what the last one did; before anything was measured, the mean since the machine was
        started, so that the first is never zero for all cores.
        """
        now = time.monotonic()
        if now - self._last_time >= _SHORTEST:
            times = self._times()
            load = self._between(self._last, times)
            if self._measured or any(load):
                self._load, self._measured = load, True
            self._last, self._last_time = times, now
        return self._load

    def _times(self) -> dict[int, tuple[int, int]]:
        """Returns busy and all ticks of each core since the machine was started."""
        found = {}
        for line in self._stat.read_text().splitlines():
            match = _CORE.fullmatch(line)
            if match:
                # user nice system idle iowait irq softirq steal; what follows is in user and nice already.
                ticks = [int(number) for number in match[2].split()[:8]]
                found[int(match[1])] = (sum(ticks) - sum(ticks[3:5]), sum(ticks))
        return found

    def _between(self, then: dict[int, tuple[int, int]], now: dict[int, tuple[int, int]]) -> tuple[float, ...]:
        loads = []
        for core in self.cores:
            # A core that was taken off line does nothing.
            (busy_then, all_then), (busy, ticks) = then.get(core, (0, 0)), now.get(core, (0, 0))
            # The count of waiting time may go backwards.
            loads.append(min(max((busy - busy_then) / max(ticks - all_then, 1), 0.0), 1.0))
        return tuple(loads)


class CgroupMemory(NamedTuple):
    """Bytes that a control group may use, and uses without what the kernel would give up (cached files)."""

    limit: int
    used: int


def cgroup_memory(folder: Path | None = None, *, root: Path = _CGROUPS) -> CgroupMemory | None:
    """Reads the tightest memory limit that holds for a control group (version 2).

    Args:
        folder (Path, optional): the group's. Defaults to this process's.

    Keyword Args:
        root (Path): the topmost folder; limits of all groups up to it count. Defaults to ``/sys/fs/cgroup``.

    Returns:
        CgroupMemory, or None where there is no limit.
    """
    if folder is None:
        folder = _own_group(root)
    found = []
    for group in (folder, *folder.parents):
        memory = _group_memory(group)
        if memory is not None:
            found.append(memory)
        if group == root:
            break
    return min(found, default=None)


def _own_group(root: Path) -> Path:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return root
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    folder = root / path.lstrip("/")
    # In a container that shows only its own part of the tree, the part's top is the group.
    return folder if folder.is_dir() and ".." not in folder.parts else root


def _group_memory(group: Path) -> CgroupMemory | None:
    try:
        limit = int((group / "memory.max").read_text())  # "max" where there is none
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    try:
        lines = (group / "memory.stat").read_text().splitlines()
        used -= next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    except (OSError, ValueError, IndexError):
        pass
    return CgroupMemory(limit, max(used, 0))


def cpu_model() -> str:
    """Returns the processor's name, its architecture where the kernel does not tell."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.machine()
