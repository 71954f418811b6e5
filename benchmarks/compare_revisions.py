# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Compares the benchmarks of two revisions on this machine, and says whether one is slower.

    python benchmarks/compare_revisions.py main -k ours -- --suite short

Base and head are laid out in temporary folders (the base, and a head that is a revision, as git worktrees) and run with
this interpreter, each with its own tree on PYTHONPATH, in turns: base head head base. The benchmarks themselves come
from one side for both, so that a change cannot move its own yardstick. Prints a Markdown table of the ratios of medians
with bootstrap intervals. What follows ``--`` goes to pytest.

Exit status: 1 when a benchmark is slower (the lower end of its interval is past the threshold) or no longer runs in
head, 2 when nothing could be compared, else 0. The worktrees are removed in any case that a process can notice.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # Run as a script, sys.path starts at benchmarks/; and torchrl's wheel installs a package of this name as well.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.revision_report import Line, Samples, compare_samples, exit_status, render
from benchmarks.revision_statistics import run_order
from benchmarks.revision_trees import (
    DEFAULT_BENCHMARKS,
    FOLDER,
    SIGNALS,
    CompareError,
    commit_of,
    interrupt,
    signals_wait,
    snapshot,
    take_definitions,
    worktree,
)

ROOT = Path(__file__).resolve().parents[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison that the command line asks for; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    args, pytest_options = _parser().parse_args(arguments[:cut]), arguments[cut + 1 :]
    # One that is ignored (nohup) stays so.
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        with tempfile.TemporaryDirectory(prefix="compare-revisions-") as folder:
            lines, title = _compare(args, Path(folder), pytest_options)
    except CompareError as error:
        sys.stderr.write(f"compare_revisions.py: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("compare_revisions.py: interrupted; the worktrees are removed.\n")
        return 130
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    text = render(lines, title, threshold=args.threshold)
    print(text, end="")
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    status = exit_status(lines)
    if status == 2:
        sys.stderr.write("compare_revisions.py: no benchmark was measured in every run; nothing was compared.\n")
    return status


def _compare(args: argparse.Namespace, folder: Path, pytest_options: list[str]) -> tuple[list[Line], str]:
    repository = args.repository.resolve()
    base = commit_of(repository, args.base)
    head = None if args.head is None else commit_of(repository, args.head)
    with contextlib.ExitStack() as stack:
        trees = {"base": stack.enter_context(worktree(repository, base, folder / "base"))}
        if head is None:
            trees["head"] = snapshot(repository, folder / "head")
        else:
            trees["head"] = stack.enter_context(worktree(repository, head, folder / "head"))
        paths = take_definitions(trees, args.definitions, args.benchmarks)
        settings = folder / "pytest.ini"  # of neither side: its options would be part of the yardstick
        settings.write_text("[pytest]\n", encoding="utf-8")
        runs: dict[str, list[Samples]] = {"base": [], "head": []}
        order = run_order(args.pairs)
        for number, side in enumerate(order, start=1):
            sys.stderr.write(f"compare_revisions.py: run {number} of {len(order)}, {side}\n")
            report = folder / f"run-{number}.json"
            options = [*paths, "-c", str(settings), *(["-k", args.keyword] if args.keyword else []), *pytest_options]
            runs[side].append(_run(trees[side], side, options, report, seconds=args.run_timeout))
    names = {"base": base[:12], "head": "the working tree" if head is None else head[:12]}
    title = (
        f"Base {names['base']} against head {names['head']}: {args.pairs} pairs of runs in turns, medians, "
        f"benchmarks as {args.definitions} defines them."
    )
    return compare_samples(runs["base"], runs["head"], threshold=args.threshold), title


def _run(tree: Path, side: str, options: list[str], report: Path, *, seconds: float) -> Samples:
    command = [sys.executable, "-m", "pytest", f"--rootdir={tree}", "-q", "-p", "no:cacheprovider"]
    # Options of the caller's own pytest are not for these runs, and a worker of xdist measures nothing.
    foreign = ("PYTEST_ADDOPTS", "PYTEST_XDIST")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    # First on the path, before what is installed: an editable installation would measure one tree twice.
    env |= {"PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
    output = report.with_suffix(".log")
    process = None
    with output.open("w") as log:
        try:
            with signals_wait():  # until the run is known, and so can be ended
                process = subprocess.Popen(
                    [*command, *options, f"--benchmark-json={report}"],
                    cwd=tree,
                    env=env,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=_hear_signals,
                )
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise CompareError(f"a run of {side} took more than {seconds:g} s; --run-timeout allows more.") from None
        finally:
            if process is not None:
                # Its own workers too: a benchmark that was cut short has not ended them.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    tail = "".join(output.read_text(errors="replace").splitlines(keepends=True)[-20:])
    samples = _read(report)
    if not samples:
        raise CompareError(f"the benchmarks of {side} measured nothing (pytest ended with {status}):\n{tail}".rstrip())
    if status:
        sys.stderr.write(f"compare_revisions.py: some benchmarks of {side} failed:\n{tail}")
    return samples


def _read(report: Path) -> Samples:
    """Reads the rounds of a report of pytest-benchmark."""
    try:
        benchmarks = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    except (OSError, ValueError, KeyError):
        return {}
    return {entry["fullname"]: entry["stats"]["data"] for entry in benchmarks if entry["stats"]["data"]}


def _hear_signals() -> None:
    """In the run: what waits in this process must not wait in its benchmarks, which end workers by it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0.0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {value:g}")
    return value


def _report(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"must be in a folder that exists, got {path}")
    return path


def _percent(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 100.0:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 100, got {value:g}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compare the benchmarks of two revisions on this machine.",
        epilog="What follows -- goes to pytest.",
    )
    parser.add_argument("base", help="revision to compare with")
    parser.add_argument("--head", help="revision that is judged (default: the working tree as it is)")
    parser.add_argument(
        "--definitions", choices=("base", "head"), default="base", help="whose benchmarks/ both run (%(default)s)"
    )
    parser.add_argument(
        "--benchmarks", nargs="+", default=(), metavar="FILE", help=f"default: {FOLDER}/{DEFAULT_BENCHMARKS}"
    )
    parser.add_argument("-k", "--keyword", help="pytest's -k: which benchmarks")
    parser.add_argument("--pairs", type=_positive, default=4, help="runs of each side (%(default)s)")
    parser.add_argument("--threshold", type=_percent, default=5.0, help="per cent (%(default)s)")
    parser.add_argument("--run-timeout", type=_seconds, default=3600.0, help="seconds for one run (%(default)s)")
    parser.add_argument("--out", type=_report, help="file that receives the same report")
    parser.add_argument("--repository", type=Path, default=ROOT, help="default: the one of this script")
    return parser


if __name__ == "__main__":
    sys.exit(main())
