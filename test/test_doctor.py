# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""`python -m torchrl_ext.doctor`: facts, exit code and output, with facts made up here and those of this machine."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import torch

from torchrl_ext import doctor
from torchrl_ext.doctor import Fact

ROOT = Path(__file__).resolve().parents[1]


def report(monkeypatch, *statuses: str) -> None:
    found = [Fact(f"fact {at}", status, f"text {at}") for at, status in enumerate(statuses)]
    monkeypatch.setattr(doctor, "CHECKS", (lambda: found,))


class TestReport:
    """Contract: one plain line per fact; the exit code is 1 when a fact is FAIL, else 0."""

    @pytest.mark.parametrize(
        ("statuses", "code"), [(["OK"], 0), (["OK", "NOTE"], 0), (["OK", "FAIL", "NOTE"], 1), (["FAIL"], 1)]
    )
    def test_exit_code_says_whether_the_presets_can_run(self, monkeypatch, capsys, statuses, code):
        report(monkeypatch, *statuses)
        assert doctor.main([]) == code
        assert json.loads(run_json(capsys))["ok"] == (code == 0)

    def test_each_fact_is_a_plain_line(self, monkeypatch, capsys):
        """case 62"""
        report(monkeypatch, "OK", "NOTE", "FAIL")
        doctor.main([])
        written = capsys.readouterr().out
        assert written == "OK    fact 0: text 0\nNOTE  fact 1: text 1\nFAIL  fact 2: text 2\n"

    def test_json_has_the_same_facts(self, monkeypatch, capsys):
        report(monkeypatch, "NOTE")
        written = json.loads(run_json(capsys))
        assert written == {"ok": True, "facts": [{"name": "fact 0", "status": "NOTE", "text": "text 0"}]}

    def test_check_that_raises_is_a_failed_fact_and_the_others_go_on(self, monkeypatch):
        def _broken() -> list[Fact]:
            raise RuntimeError("no driver\nand a trace")

        monkeypatch.setattr(doctor, "CHECKS", (_broken, lambda: [Fact("next", "OK", "")]))
        assert doctor.facts() == [Fact("broken", "FAIL", "RuntimeError: no driver"), Fact("next", "OK", "")]


def run_json(capsys) -> str:
    capsys.readouterr()
    doctor.main(["--json"])
    return capsys.readouterr().out


class TestFacts:
    """Contract: what the presets cannot do without is FAIL, the rest NOTE."""

    def test_this_machine_can_run_the_presets(self):
        environment = {**os.environ, "RL_WARNINGS": "0"}
        run = subprocess.run(
            [sys.executable, "-m", "torchrl_ext.doctor", "--json"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        written = json.loads(run.stdout)
        names = [fact["name"] for fact in written["facts"]]
        assert run.returncode == (0 if written["ok"] else 1), run.stderr
        for name in ("Python", "torch", "torchrl", "tensordict", "EnvPool", "/dev/shm", "memfd", "cores", "NUMA"):
            assert name in names
        assert {"NVML", "torch build", "transport, policy_device=cpu"} <= set(names) and "\x1b" not in run.stdout

    def test_requirements_are_those_of_the_package(self):
        tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
        texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert set(doctor.REQUIREMENTS) <= texts

    @pytest.mark.parametrize(
        ("version", "status", "text"),
        [
            ("2.10.0", "FAIL", "2.10.0; torch>=2.11 is needed"),
            ("2.13.0+cu130", "OK", "2.13.0+cu130"),
            ("2.14.0.dev20261101", "OK", "2.14.0.dev"),
            (None, "FAIL", "not"),
        ],
    )
    def test_versions_are_compared_with_the_requirements(self, monkeypatch, version, status, text):
        def installed(name: str) -> str:
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version if name == "torch" else "0.14.1"

        monkeypatch.setattr(metadata, "version", installed)
        fact = doctor._packages()[0]
        assert fact.name == "torch" and fact.status == status and fact.text.startswith(text)

    @pytest.mark.parametrize(
        ("present", "statuses"),
        [
            ({"hydra", "envpool", "dm_control"}, ["OK", "OK"]),
            ({"hydra", "dm_control"}, ["OK", "NOTE"]),
            ({"hydra"}, ["OK", "FAIL"]),
            ({"envpool"}, ["FAIL", "OK"]),
        ],
    )
    def test_an_environment_and_hydra_must_be_there(self, monkeypatch, present, statuses):
        monkeypatch.setattr(doctor, "_installed", present.__contains__)
        assert [fact.status for fact in doctor._scripts()] == statuses

    def test_missing_memfd_is_a_failure(self, monkeypatch):
        monkeypatch.delattr(os, "memfd_create")
        assert {fact.name: fact.status for fact in doctor._memory()}["memfd"] == "FAIL"

    def test_small_shm_is_a_note(self, monkeypatch):
        small = type("Usage", (), {"total": 64 << 20, "free": 64 << 20})
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: small)
        (fact,) = [fact for fact in doctor._memory() if fact.name == "/dev/shm"]
        assert fact.status == "NOTE" and fact.text.startswith("0.1 GB, 0.1 GB free")

    def test_limited_affinity_is_told(self, monkeypatch):
        """case 64"""
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 8})
        monkeypatch.setattr(os, "cpu_count", lambda: 16)
        fact = doctor._cores()[0]
        assert fact.status == "NOTE" and fact.text.endswith("4 of 16 usable (0:2,8)")

    def test_missing_nvml_is_a_note(self, monkeypatch):
        monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
        assert [fact.status for fact in doctor._nvml()] == ["NOTE"]

    def test_cpu_alone_is_a_note_and_keeps_rows_on_the_host(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert [fact.status for fact in doctor._cuda()] == ["OK", "NOTE"]
        assert {fact.text for fact in doctor._transport()} == {"host: rows are stored on the host"}


class TestProbe:
    """Contract: the CUDA IPC probe runs in processes of its own and cannot hang the report."""

    def probe(self, monkeypatch, code: str) -> Fact:
        popen = subprocess.Popen
        monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen([command[0], "-c", code], **options))
        return doctor._cuda_ipc()

    def test_success(self, monkeypatch):
        assert self.probe(monkeypatch, "").status == "OK"

    def test_failure_is_a_note_with_the_reason(self, monkeypatch):
        fact = self.probe(monkeypatch, "raise RuntimeError('invalid resource handle\\nCompile with advice.')")
        assert fact.status == "NOTE" and fact.text.startswith("RuntimeError: invalid resource handle; transport=host")

    def test_probe_that_hangs_is_killed_with_its_children(self, monkeypatch):
        monkeypatch.setattr(doctor, "_IPC_SECONDS", 1.0)
        code = "import subprocess; subprocess.run(['sleep', '600'])"
        began = time.monotonic()
        fact = self.probe(monkeypatch, code)
        assert fact.status == "NOTE" and re.match(r"no answer within 1 s", fact.text)
        assert time.monotonic() - began < 120.0

    def test_ctrl_c_ends_the_probe_with_its_children(self, monkeypatch):
        started, communicate = [], subprocess.Popen.communicate

        def interrupted(process, *arguments, **options):
            if process.args[-1].startswith("import os"):
                started.append((process, int(process.stderr.readline())))
                raise KeyboardInterrupt
            return communicate(process, *arguments, **options)

        monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
        code = (
            "import os, subprocess, sys; child = subprocess.Popen(['sleep', '600']); print(child.pid, file=sys.stderr)"
        )
        with pytest.raises(KeyboardInterrupt):
            self.probe(monkeypatch, f"{code}; sys.stderr.flush(); child.wait()")
        ((process, child),) = started
        assert process.wait(timeout=60.0) == -signal.SIGKILL
        end = time.monotonic() + 60.0
        while time.monotonic() < end and alive(child):
            time.sleep(0.01)
        assert not alive(child)

    @pytest.mark.gpu
    def test_real_probe_ends(self):
        fact = doctor._cuda_ipc()
        assert fact.name == "CUDA IPC" and fact.status in ("OK", "NOTE")


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody waits for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
