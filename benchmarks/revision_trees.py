# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Two trees of one repository for ``compare_revisions.py``: laid out, given one side's benchmarks, removed."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

FOLDER = "benchmarks"
DEFAULT_BENCHMARKS = "test_*_benchmark.py"
#: What ends a comparison: Ctrl-C, the end of a job, a terminal that is gone.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Those that came while signals wait; None while they do not.
_waiting: list[object] | None = None


class CompareError(RuntimeError):
    """Nothing can be compared; the message is one sentence for the person who asked."""


def commit_of(repository: Path, revision: str) -> str:
    """Returns the commit that a revision names."""
    done = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if done.returncode:
        raise CompareError(f"{revision!r} is no revision of {repository}; nothing was measured.")
    return done.stdout.strip()


@contextlib.contextmanager
def worktree(repository: Path, commit: str, path: Path) -> Iterator[Path]:
    """Lays a commit out at a path, and removes it afterwards whatever signal comes meanwhile."""
    try:
        # Hooks of the repository are not asked: they may install things.
        done = _git(repository, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", str(path), commit)
        if done.returncode:
            raise CompareError(f"git cannot lay out {commit[:12]}: {_last_line(done.stderr)}")
        yield path
    finally:
        with signals_wait():
            if _git(repository, "worktree", "remove", "--force", str(path)).returncode:
                shutil.rmtree(path, ignore_errors=True)
                _git(repository, "worktree", "prune")


def interrupt(number: int, _: object) -> None:
    """Handles a signal: raises ``KeyboardInterrupt``, within :func:`signals_wait` at its end."""
    if _waiting is None:
        raise KeyboardInterrupt
    _waiting.append(number)


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Keeps signals for later, from processes too: half a removal would leave the worktree registered."""
    global _waiting
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # for the processes: they inherit it
    # The mask is this thread's alone. What another one hears, a library's, has its handler run in this one.
    _waiting = []
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        came, _waiting = _waiting, None
        if came:
            raise KeyboardInterrupt


def snapshot(repository: Path, path: Path) -> Path:
    """Copies the working tree as it is, files that git does not know or ignore included."""
    listed = _git(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
    if listed.returncode:
        raise CompareError(f"git cannot list the files of the working tree: {_last_line(listed.stderr)}")
    for name in filter(None, listed.stdout.split("\0")):
        source, target = repository / name, path / name
        if source.is_file() or source.is_symlink():  # else deleted, or a repository of its own
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return path


def take_definitions(trees: dict[str, Path], side: str, wanted: Sequence[str]) -> list[str]:
    """Gives both trees the benchmarks of one; returns the paths that pytest gets."""
    other = "head" if side == "base" else "base"
    source, target = trees[side] / FOLDER, trees[other] / FOLDER
    paths = list(wanted) or sorted(f"{FOLDER}/{path.name}" for path in source.glob(DEFAULT_BENCHMARKS))
    absent = [path for path in paths if not (trees[side] / path.split("::")[0]).is_file()]
    if absent or not paths:
        what = f"{absent[0]} is" if absent else f"{FOLDER}/{DEFAULT_BENCHMARKS} are"
        raise CompareError(
            f"{what} not in {side}, which defines the benchmarks; --definitions {other} takes {other}'s."
        )
    if outside := [path for path in paths if Path(path).parts[0] != FOLDER]:
        raise CompareError(f"a benchmark must be in {FOLDER}/, which both sides share, got {outside[0]}.")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return paths


def _git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else "no message"
