# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""``python -m torchrl_ext.doctor``: what this machine has, and whether the presets can run on it."""

# What a check needs is imported inside it: where an import fails, the other facts are still told.

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

__all__ = ["Fact", "facts", "main"]

#: Those of setup.py.
REQUIREMENTS = ("torch>=2.11", "torchrl>=0.14.1,<0.16", "tensordict>=0.14,<0.16")
_IPC_SECONDS = 60.0


class Fact(NamedTuple):
    """One line of the report."""

    name: str
    status: Literal["OK", "NOTE", "FAIL"]
    """``FAIL``: the presets cannot run. ``NOTE``: they can; something is slower or not there."""
    text: str


def _python() -> list[Fact]:
    new, linux = sys.version_info >= (3, 10), sys.platform == "linux"
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    return [
        Fact("Python", "OK" if new else "FAIL", platform.python_version() + ("" if new else "; 3.10 is needed")),
        Fact("system", "OK" if linux else "FAIL", system + ("" if linux else "; Linux is needed")),
    ]


def _packages() -> list[Fact]:
    from packaging.requirements import Requirement

    found = []
    for requirement in map(Requirement, REQUIREMENTS):
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            found.append(Fact(requirement.name, "FAIL", "not installed"))
            continue
        known = requirement.specifier.contains(version, prereleases=True)
        text = version if known else f"{version}; {requirement} is needed"
        found.append(Fact(requirement.name, "OK" if known else "FAIL", text))
    return found


def _scripts() -> list[Fact]:
    known = _installed("hydra")
    found = [Fact("hydra", "OK" if known else "FAIL", _version("hydra-core") if known else "not installed: extra sota")]
    if _installed("envpool"):
        return [*found, Fact("EnvPool", "OK", _version("envpool"))]
    if _installed("dm_control"):
        text = "not installed (needs Python 3.11): the preset walker runs on dm_control, others need EnvPool"
        return [*found, Fact("EnvPool", "NOTE", text)]
    return [*found, Fact("EnvPool", "FAIL", "not installed, nor dm_control: extra sota")]


def _memory() -> list[Fact]:
    from torchrl_ext.record._cpu import cgroup_memory

    group = cgroup_memory()
    limit = "no limit of a container" if group is None else f"limit of the container {group.limit / 1e9:.1f} GB"
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = [Fact("memory", "OK", f"{total / 1e9:.1f} GB, {limit}")]
    try:
        shared = shutil.disk_usage("/dev/shm")
        text = f"{shared.total / 1e9:.1f} GB, {shared.free / 1e9:.1f} GB free"
        small = "; rings do not need it, storages in shared memory do"
        enough = shared.free >= 1e9
        found.append(Fact("/dev/shm", "OK" if enough else "NOTE", text if enough else text + small))
    except OSError as error:
        found.append(Fact("/dev/shm", "NOTE", f"not there ({error.strerror}); rings do not need it"))
    try:
        os.close(os.memfd_create("torchrl_ext", os.MFD_CLOEXEC))
        found.append(Fact("memfd", "OK", "available"))
    except (AttributeError, OSError) as error:
        found.append(Fact("memfd", "FAIL", f"not available ({error}); rings are made of it"))
    return found


def _cores() -> list[Fact]:
    from torchrl_ext.record._cpu import cpu_model

    cores = sorted(os.sched_getaffinity(0))
    total = os.cpu_count() or len(cores)
    usable = Fact("cores", "OK", f"{cpu_model()}, {len(cores)} of {total} usable ({_ranges(cores)})")
    if len(cores) < total:
        usable = usable._replace(status="NOTE")
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    if nodes > 1:
        return [usable, Fact("NUMA", "NOTE", f"{nodes} nodes: keep workers on that of the GPU (collector.cores)")]
    return [usable, Fact("NUMA", "OK", "1 node" if nodes else "not told")]


def _nvml() -> list[Fact]:
    if importlib.util.find_spec("pynvml") is None:
        return [Fact("NVML", "NOTE", "nvidia-ml-py is not installed: no values of GPUs are shown")]
    import pynvml

    try:
        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError as error:
        return [Fact("NVML", "NOTE", f"{error}: no values of GPUs are shown")]
    return [Fact("NVML", "OK", f"driver {driver if isinstance(driver, str) else driver.decode()}")]


def _cuda() -> list[Fact]:
    import torch

    abi = f"C++11 ABI {int(torch.compiled_with_cxx11_abi())}"
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU"
    found = [Fact("torch build", "OK", f"{build}, {abi}")]
    if not torch.cuda.is_available():
        why = "no GPU that torch can use" if torch.version.cuda else "torch is built for the CPU"
        return [*found, Fact("CUDA", "NOTE", f"{why}: training runs on the CPU")]
    if not _installed("triton") or not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        found.append(Fact("torch.compile", "NOTE", "needs triton and a C compiler: set learner.compile=false"))
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        text = f"{gpu.name}, {gpu.uuid}, {gpu.total_memory / 1e9:.1f} GB, sm_{gpu.major}{gpu.minor}"
        try:
            torch.ones(1, device=f"cuda:{index}").add_(1).item()
            found.append(Fact(f"cuda:{index}", "OK", text))
        except RuntimeError as error:
            found.append(Fact(f"cuda:{index}", "FAIL", f"{text}; {str(error).splitlines()[0]}"))
    return [*found, _cuda_ipc()]


def _cuda_ipc() -> Fact:
    rest = "transport=host works without it"
    with subprocess.Popen(
        [sys.executable, "-m", "torchrl_ext.record._cuda_ipc_probe"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            _, errors = process.communicate(timeout=_IPC_SECONDS)
        except subprocess.TimeoutExpired:
            return Fact("CUDA IPC", "NOTE", f"no answer within {_IPC_SECONDS:.0f} s; {rest}")
        finally:
            # With its child, which holds the pipe open; a Ctrl-C reaches neither of them.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == 0:
        return Fact("CUDA IPC", "OK", "memory of cuda:0 went through two processes")
    # torch ends its messages with advice.
    reasons = re.findall(r"^\w+(?:Error|Exception): .*", errors, re.MULTILINE)
    return Fact("CUDA IPC", "NOTE", f"{reasons[-1] if reasons else 'the bytes did not arrive'}; {rest}")


def _transport() -> list[Fact]:
    import torch

    from torchrl_ext.collectors.transport_choice import IPC_SLOT_BYTES, choose_transport

    gpu = torch.device("cuda", 0) if torch.cuda.is_available() else None
    found = []
    for name, policy_device in (("cpu", None), ("learner", gpu)):
        choice = choose_transport("auto", storing_device=gpu, policy_device=policy_device, slot_bytes=IPC_SLOT_BYTES)
        found.append(Fact(f"transport, policy_device={name}", "OK", f"{choice.kind}: {choice.reason}"))
    return found


#: In the order of the report.
CHECKS: tuple[Callable[[], list[Fact]], ...] = (_python, _packages, _scripts, _memory, _cores, _nvml, _cuda, _transport)


def facts() -> list[Fact]:
    """Returns what this machine has. A check that cannot be made is a fact of its own, with status ``FAIL``."""
    found: list[Fact] = []
    for check in CHECKS:
        try:
            found += check()
        except Exception as error:  # the other checks go on
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            found.append(Fact(check.__name__.strip("_"), "FAIL", text))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes one line per fact, or with ``--json`` one object, to standard output.

    Args:
        arguments (sequence of str, optional): Defaults to those of the command line.

    Returns:
        int: 0 when no fact has status ``FAIL``, so that the presets can run; else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m torchrl_ext.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object: ok, and facts with name, status, text")
    options = parser.parse_args(arguments)
    found = facts()
    failed = any(fact.status == "FAIL" for fact in found)
    if options.json:
        sys.stdout.write(json.dumps({"ok": not failed, "facts": [fact._asdict() for fact in found]}) + "\n")
    else:
        sys.stdout.write("".join(f"{fact.status:<4}  {fact.name}: {fact.text}\n" for fact in found))
    return int(failed)


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "installed"


def _ranges(numbers: Sequence[int]) -> str:
    """Formats ascending numbers as ``collector.cores`` takes them: ``0:3,8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join(":".join(map(str, run)) for run in runs)


if __name__ == "__main__":
    sys.exit(main())
