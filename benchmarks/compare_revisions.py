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
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":
    # Run as a script, sys.path starts at benchmarks/; and torchrl's wheel installs a package of this name as well.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.revision_statistics import Ratio, ratio_of_medians, run_order, verdict

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "benchmarks"
DEFAULT_BENCHMARKS = "test_*_benchmark.py"
#: Times of each round, by benchmark.
Samples = dict[str, list[float]]


class CompareError(RuntimeError):
    """Nothing can be compared; the message is one sentence for the person who asked."""


@dataclass(frozen=True)
class Line:
    """One benchmark of the report; ``ratio`` is ``None`` where only one side measured it."""

    name: str
    base_ms: float | None
    head_ms: float | None
    ratio: Ratio | None
    verdict: str


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison that the command line asks for; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    args, pytest_options = _parser().parse_args(arguments[:cut]), arguments[cut + 1 :]
    previous = signal.signal(signal.SIGTERM, _leave)
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
        signal.signal(signal.SIGTERM, previous)
    text = render(lines, title, threshold=args.threshold)
    print(text, end="")
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    return int(any(line.verdict in ("slower", "not measured in head") for line in lines))


def compare_samples(base: Sequence[Samples], head: Sequence[Samples], *, threshold: float) -> list[Line]:
    """Returns one line for each benchmark that any run measured, by name.

    Args:
        base (sequence of dict): for each run, seconds of each round by benchmark, in order of time.
        head (sequence of dict): as many.
        threshold (float): per cent.
    """
    lines = []
    for name in sorted({name for run in (*base, *head) for name in run}):
        old, new = ([run[name] for run in runs if run.get(name)] for runs in (base, head))
        ratio, word = None, "not measured in head" if len(old) == len(base) else "not measured in base"
        if len(old) == len(base) and len(new) == len(head):
            ratio = ratio_of_medians(old, new)
            word = verdict(ratio, threshold=threshold / 100)
        lines.append(Line(name, _median_ms(old), _median_ms(new), ratio, word))
    return lines


def render(lines: Sequence[Line], title: str, *, threshold: float) -> str:
    """Returns the report, Markdown that ends with a newline."""
    counts = {word: sum(line.verdict == word for line in lines) for word in ("slower", "faster", "same", "unclear")}
    missing = len(lines) - sum(counts.values())
    rows = [
        f"{title}",
        "",
        "| benchmark | base ms | head ms | head / base | 95 % interval | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for line in lines:
        times = ["-" if ms is None else f"{ms:.4g}" for ms in (line.base_ms, line.head_ms)]
        ratio = ["-", "-"]
        if line.ratio is not None:
            ratio = [f"{line.ratio.value:.3f}", f"{line.ratio.low:.3f} to {line.ratio.high:.3f}"]
        word = f"**{line.verdict}**" if line.verdict in ("slower", "not measured in head") else line.verdict
        name = line.name.removeprefix(f"{FOLDER}/").replace("|", "\\|")
        rows.append(f"| `{name}` | {' | '.join([*times, *ratio, word])} |")
    told = ", ".join(f"{count} {word}" for word, count in counts.items())
    rows += ["", f"{told}, {missing} on one side only. Slower: the whole interval is above {1 + threshold / 100:g}."]
    return "\n".join(rows) + "\n"


def _compare(args: argparse.Namespace, folder: Path, pytest_options: list[str]) -> tuple[list[Line], str]:
    repository = args.repository.resolve()
    base = _commit(repository, args.base)
    head = None if args.head is None else _commit(repository, args.head)
    with contextlib.ExitStack() as stack:
        trees = {"base": stack.enter_context(_worktree(repository, base, folder / "base"))}
        if head is None:
            trees["head"] = _snapshot(repository, folder / "head")
        else:
            trees["head"] = stack.enter_context(_worktree(repository, head, folder / "head"))
        paths = _take_definitions(trees, args.definitions, args.benchmarks)
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


def _commit(repository: Path, revision: str) -> str:
    done = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if done.returncode:
        raise CompareError(f"{revision!r} is no revision of {repository}; nothing was measured.")
    return done.stdout.strip()


@contextlib.contextmanager
def _worktree(repository: Path, commit: str, path: Path) -> Iterator[Path]:
    try:
        # Hooks of the repository are not asked: they may install things.
        done = _git(repository, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", str(path), commit)
        if done.returncode:
            raise CompareError(f"git cannot lay out {commit[:12]}: {_last_line(done.stderr)}")
        yield path
    finally:
        if _git(repository, "worktree", "remove", "--force", str(path)).returncode:
            shutil.rmtree(path, ignore_errors=True)
            _git(repository, "worktree", "prune")


def _snapshot(repository: Path, path: Path) -> Path:
    """Copies the working tree as it is, files that git does not know or ignore included."""
    listed = _git(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate").stdout
    for name in filter(None, listed.split("\0")):
        source, target = repository / name, path / name
        if source.is_file() or source.is_symlink():  # else deleted, or a repository of its own
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return path


def _take_definitions(trees: dict[str, Path], side: str, wanted: Sequence[str]) -> list[str]:
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


def _run(tree: Path, side: str, options: list[str], report: Path, *, seconds: float) -> Samples:
    command = [sys.executable, "-m", "pytest", f"--rootdir={tree}", "-q", "-p", "no:cacheprovider"]
    # Options of the caller's own pytest are not for these runs, and a worker of xdist measures nothing.
    foreign = ("PYTEST_ADDOPTS", "PYTEST_XDIST")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    # First on the path, before what is installed: an editable installation would measure one tree twice.
    env |= {"PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
    output = report.with_suffix(".log")
    with output.open("w") as log:
        process = subprocess.Popen(
            [*command, *options, f"--benchmark-json={report}"],
            cwd=tree,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise CompareError(f"a run of {side} took more than {seconds:g} s; --run-timeout allows more.") from None
        finally:
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


def _median_ms(runs: Sequence[Sequence[float]]) -> float | None:
    values = sorted(value for run in runs for value in run)
    middle = len(values) // 2
    return 500 * (values[middle] + values[-middle - 1]) if values else None


def _git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else "no message"


def _leave(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


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
    parser.add_argument("--run-timeout", type=float, default=3600.0, help="seconds for one run (%(default)s)")
    parser.add_argument("--out", type=Path, help="file that receives the same report")
    parser.add_argument("--repository", type=Path, default=ROOT, help="default: the one of this script")
    return parser


if __name__ == "__main__":
    sys.exit(main())
