# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""``compare_revisions.py`` end to end, on a tiny repository whose benchmark takes a known time."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # torchrl's wheel installs a package ``benchmarks`` too

from benchmarks import compare_revisions  # noqa: E402

SCRIPT = ROOT / "benchmarks" / "compare_revisions.py"
DEADLINE_S = 60.0

#: A stand-in where pytest-benchmark is not loaded (the extra 'test' does not have it): its fixture and its report.
CONFTEST = """
import json, time
import pytest

records = []

def pytest_addoption(parser, pluginmanager):
    if not pluginmanager.has_plugin("benchmark"):
        parser.addoption("--benchmark-json")

def pytest_configure(config):
    if not config.pluginmanager.has_plugin("benchmark"):
        config.pluginmanager.register(StandIn())

class StandIn:
    @pytest.fixture
    def benchmark(self, request):
        def measure(call):
            data = []
            for _ in range(5):
                start = time.perf_counter()
                call()
                data.append(time.perf_counter() - start)
            records.append({"fullname": request.node.nodeid, "stats": {"data": data}})
        return measure

    def pytest_sessionfinish(self, session):
        with open(session.config.getoption("--benchmark-json"), "w") as file:
            json.dump({"benchmarks": records}, file)
"""

#: The package has the name of the installed one: what is installed must not be what is measured.
BENCHMARK = """
import time
import torchrl_ext

def test_wait(benchmark):
    benchmark(lambda: time.sleep(torchrl_ext.SECONDS))

def test_other(benchmark):
    benchmark(lambda: time.sleep(1e-3))
"""
FAST, SLOW = "SECONDS = 0.01\n", "SECONDS = 0.05\n"


class Repository:
    """A repository with a package and a benchmark of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.git("init", "--quiet", "--initial-branch=main", str(path))
        self.write("benchmarks/conftest.py", CONFTEST)
        self.write("benchmarks/test_wait_benchmark.py", BENCHMARK)
        self.write("torchrl_ext/__init__.py", FAST)
        self.write(".gitignore", "ignored.py\n__pycache__/\n")
        self.commit()

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        where = [] if arguments[0] == "init" else ["-C", str(self.path)]
        return subprocess.run(
            ["git", *where, *identity, *arguments], check=True, capture_output=True, text=True, timeout=DEADLINE_S
        ).stdout

    def write(self, name: str, text: str) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commit(self) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "work")
        return self.git("rev-parse", "HEAD").strip()

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(SCRIPT), "--repository", str(self.path), *arguments]

    def compare(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs the script; by default one pair and the benchmark whose time is known."""
        options = ["-k", "test_wait and not test_other", "--pairs", "1", *arguments]
        return subprocess.run(
            self.command(*options), env=self.env(), capture_output=True, text=True, timeout=DEADLINE_S
        )

    def env(self) -> dict[str, str]:
        # Without the plugins of this environment a run starts in a third of the time.
        return {**os.environ, "TMPDIR": str(self.path.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def leftovers(self) -> list[str]:
        """Worktrees and temporary folders that are still there."""
        worktrees = self.git("worktree", "list").splitlines()[1:]
        return worktrees + [path.name for path in self.path.parent.glob("compare-revisions-*")]


@pytest.fixture
def repository(tmp_path):
    made = Repository(tmp_path / "repository")
    yield made
    assert made.leftovers() == []  # whatever a test did


class TestVerdicts:
    """Contract: exit status 1 when head is slower or lacks a benchmark, 0 otherwise; the report says which."""

    def test_a_slower_head_is_found(self, repository, tmp_path):
        base = repository.git("rev-parse", "HEAD").strip()
        repository.write("torchrl_ext/__init__.py", SLOW)
        head = repository.commit()
        out = tmp_path / "report.md"
        done = repository.compare(base, "--head", head, "--pairs", "2", "--out", str(out))
        assert done.returncode == 1, done.stderr
        assert f"Base {base[:12]} against head {head[:12]}: 2 pairs of runs" in done.stdout
        assert "**slower**" in done.stdout and out.read_text() == done.stdout
        order = [line.rsplit(" ", 1)[1] for line in done.stderr.splitlines() if ": run " in line]
        assert order == ["base", "head", "head", "base"]

    def test_a_faster_head_is_not_a_failure(self, repository):
        repository.write("torchrl_ext/__init__.py", SLOW)
        repository.commit()
        done = repository.compare("HEAD", "--head", "HEAD~1")
        assert (done.returncode, done.stdout.count("| faster |")) == (0, 1), done.stderr

    def test_the_threshold_is_the_callers(self, repository):
        repository.write("torchrl_ext/__init__.py", "SECONDS = 0.012\n")
        done = repository.compare("HEAD", "--threshold", "99")
        assert done.returncode == 0, done.stdout + done.stderr

    def test_a_benchmark_that_no_longer_runs_in_head_is_a_failure(self, repository):
        repository.write("torchrl_ext/__init__.py", "")
        done = repository.compare("HEAD", "-k", "test_wait_benchmark")
        assert done.returncode == 1
        assert "| `test_wait_benchmark.py::test_wait` |" in done.stdout and "**not measured in head**" in done.stdout
        assert "some benchmarks of head failed" in done.stderr and "SECONDS" in done.stderr

    def test_the_report_of_pytest_benchmark_is_read(self, repository):
        pytest.importorskip("pytest_benchmark", reason="pytest-benchmark comes with the extra 'bench'.")
        repository.write("torchrl_ext/__init__.py", SLOW)
        options = ["-p", "benchmark", "--benchmark-max-time=0.1", "--benchmark-min-rounds=5"]
        done = repository.compare("HEAD", "--", *options)
        assert done.returncode == 1, done.stderr
        assert "**slower**" in done.stdout


class TestTrees:
    """Contract: each side runs its own package, both the same benchmarks; the working tree is head by default."""

    def test_uncommitted_and_untracked_files_are_of_head_and_ignored_ones_are_not(self, repository):
        repository.write("torchrl_ext/__init__.py", "from torchrl_ext.new import SECONDS\n")
        repository.write("torchrl_ext/new.py", f"import importlib.util\n{SLOW}" + IGNORED_IS_ABSENT)
        repository.write("ignored.py", "")
        before = repository.git("status", "--porcelain")
        done = repository.compare("HEAD")
        assert done.returncode == 1, done.stdout + done.stderr
        assert "against head the working tree" in done.stdout
        assert repository.git("status", "--porcelain") == before

    def test_head_cannot_move_its_own_yardstick(self, repository):
        repository.write("torchrl_ext/__init__.py", SLOW)
        repository.write("benchmarks/test_wait_benchmark.py", BENCHMARK.replace("torchrl_ext.SECONDS", "1e-2"))
        repository.commit()
        assert repository.compare("HEAD~1", "--head", "HEAD").returncode == 1
        by_head = repository.compare("HEAD~1", "--head", "HEAD", "--definitions", "head", "--threshold", "90")
        assert by_head.returncode == 0, by_head.stdout + by_head.stderr

    def test_hooks_of_the_repository_do_not_run(self, repository, tmp_path):
        hook, trace = repository.path / ".git" / "hooks" / "post-checkout", tmp_path / "trace"
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(f"#!/bin/sh\ntouch {trace}\n")
        hook.chmod(0o755)
        done = repository.compare("HEAD", "-k", "nothing_has_this_name")  # after base is laid out
        assert "base measured nothing" in done.stderr and not trace.exists()


NOTHING_IS_BLOCKED = "assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])\n"
IGNORED_IS_ABSENT = 'assert importlib.util.find_spec("ignored") is None\n'


class TestErrors:
    """Contract: one sentence, exit status 2, and no worktree stays (the fixture looks)."""

    def test_an_unknown_revision(self, repository):
        done = repository.compare("nowhere")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            f"compare_revisions.py: 'nowhere' is no revision of {repository.path}; nothing was measured.\n"
        )

    def test_a_revision_is_never_an_option_of_git(self, repository):
        done = repository.compare("HEAD", "--head=--all")
        assert done.returncode == 2 and "'--all' is no revision" in done.stderr

    def test_a_benchmark_that_base_does_not_have(self, repository):
        repository.write("benchmarks/test_new_benchmark.py", BENCHMARK)
        done = repository.compare("HEAD", "--benchmarks", "benchmarks/test_new_benchmark.py")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            "compare_revisions.py: benchmarks/test_new_benchmark.py is not in base, which defines the benchmarks; "
            "--definitions head takes head's.\n"
        )

    def test_a_selection_of_nothing(self, repository):
        done = repository.compare("HEAD", "-k", "nothing_has_this_name")
        assert done.returncode == 2 and "the benchmarks of base measured nothing" in done.stderr

    def test_a_base_that_cannot_be_imported(self, repository):
        repository.write("torchrl_ext/__init__.py", "raise RuntimeError('broken base')\n")
        repository.commit()
        repository.write("torchrl_ext/__init__.py", FAST)
        done = repository.compare("HEAD")
        assert done.returncode == 2 and "broken base" in done.stderr

    def test_a_run_that_hangs_is_ended(self, repository):
        repository.write("torchrl_ext/__init__.py", "SECONDS = 1000.0\n")
        done = repository.compare("HEAD", "--run-timeout", "4")
        assert done.returncode == 2 and "a run of head took more than 4 s" in done.stderr

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    def test_a_signal_ends_the_run_and_what_it_started(self, repository, tmp_path, number):
        if signal.getsignal(number) is signal.SIG_IGN:
            pytest.skip("The signal is ignored in this process and so in its children.")
        started = tmp_path / "started"
        wait = f"import os, pathlib\npathlib.Path({str(started)!r}).write_text(str(os.getpid()))\nSECONDS = 1000.0\n"
        repository.write("torchrl_ext/__init__.py", wait)
        repository.commit()
        command = repository.command("HEAD", "-k", "test_wait and not test_other")
        with subprocess.Popen(command, env=repository.env(), stderr=subprocess.PIPE, text=True) as process:
            wait_until(lambda: started.exists() and started.read_text())
            assert len(repository.leftovers()) > 0
            process.send_signal(number)
            _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130
        assert err.endswith("compare_revisions.py: interrupted; the worktrees are removed.\n")
        wait_until(lambda: not Path(f"/proc/{started.read_text()}").exists())

    @pytest.mark.parametrize("heard_by", ["this thread", "another thread"])
    def test_a_signal_while_a_run_is_being_started_ends_it(self, repository, monkeypatch, heard_by):
        """Another thread hears what this one blocks, and the handler then runs in this one all the same."""
        started, terminate = [], noticed_signal if heard_by == "another thread" else signal.raise_signal

        class Popen(subprocess.Popen):
            def __init__(self, command, **options):
                super().__init__(command, **options)
                if "pytest" in command:
                    started.append(self)
                    terminate(signal.SIGTERM)  # before anybody knows of the process

        repository.write("torchrl_ext/__init__.py", "SECONDS = 1000.0\n")
        repository.commit()
        monkeypatch.setattr(tempfile, "tempdir", str(repository.path.parent))
        monkeypatch.setattr(subprocess, "Popen", Popen)
        try:
            arguments = ["HEAD", "--repository", str(repository.path), "-k", "test_wait and not test_other"]
            assert compare_revisions.main(arguments) == 130
            (run,) = started
            assert run.poll() == -signal.SIGKILL
        finally:
            for run in started:
                run.kill()
                run.wait()

    def test_a_run_may_be_sent_the_signals_that_wait_while_it_is_started(self, repository):
        repository.write("torchrl_ext/__init__.py", f"import signal\n{FAST}" + NOTHING_IS_BLOCKED)
        done = repository.compare("HEAD", "--threshold", "99")
        assert done.returncode == 0, done.stderr

    def test_a_signal_while_worktrees_are_removed_waits_for_that(self, repository, tmp_path, monkeypatch):
        git_that(tmp_path, monkeypatch, when="worktree remove", does="kill -TERM $PPID; sleep 0.2")
        done = repository.compare("HEAD", "--head", "HEAD", "-k", "nothing_has_this_name")
        assert done.returncode == 130, done.stderr  # and the fixture finds nothing left

    def test_a_tree_that_cannot_be_copied(self, repository, tmp_path, monkeypatch):
        """Else the installed package would be measured as head."""
        git_that(tmp_path, monkeypatch, when="ls-files", does="echo 'fatal: too old' >&2; exit 129")
        done = repository.compare("HEAD")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "compare_revisions.py: git cannot list the files of the working tree: fatal: too old\n"

    def test_a_report_that_could_not_be_written_is_refused_before_anything_runs(self, repository, tmp_path):
        done = repository.compare("HEAD", "--out", str(tmp_path / "nowhere" / "report.md"))
        assert done.returncode == 2 and ": run " not in done.stderr
        assert done.stderr.endswith(
            f"--out: must be in a folder that exists, got {tmp_path / 'nowhere' / 'report.md'}\n"
        )

    @pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
    def test_a_time_that_is_none_is_refused(self, repository, seconds):
        done = repository.compare("HEAD", f"--run-timeout={seconds}")
        assert done.returncode == 2 and "--run-timeout: must be above 0, got" in done.stderr


def git_that(folder: Path, monkeypatch: pytest.MonkeyPatch, *, when: str, does: str) -> None:
    """Puts a git first on the path that does something more when its arguments have these words."""
    script = folder / "bin" / "git"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\ncase "$*" in *"{when}"*) {does};; esac\nexec {shutil.which("git")} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")


def noticed_signal(number: int) -> None:
    """Sends this process a signal that a second thread receives; returns once Python has noted it for its handler."""
    done = threading.Event()
    second = threading.Thread(target=done.wait, args=(DEADLINE_S,))
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    second.start()  # with the mask of the thread that starts it
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer)
    try:
        signal.pthread_kill(second.ident, number)
        assert select.select([reader], [], [], DEADLINE_S)[0], "the signal was not noted"
    finally:
        signal.set_wakeup_fd(previous)
        done.set()
        second.join(DEADLINE_S)
        os.close(reader)
        os.close(writer)


def wait_until(condition) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_script_runs_from_anywhere():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], cwd=tempfile.gettempdir(), capture_output=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0
