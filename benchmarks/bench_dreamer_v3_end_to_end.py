#!/usr/bin/env python
# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""DreamerV3 end to end: environment steps and updates per second of our script and of TorchRL's own recipe.

Each runs in a process of its own, one after the other, with the same task, streams, sizes, ratio and precision:
``ours`` is the script's run as ``dreamer_v3.py`` builds it, ``torchrl`` is ``peers/torchrl_dreamer.py``. Rates are
differences of the runs' own counters from the first update (``--after``: a later one) to the end of the window, so that
warm-up, compilation and evaluations are not in them. Without ``--evaluate`` nothing is evaluated; no checkpoint is made
but the best one's.

Example:
    ``python benchmarks/bench_dreamer_v3_end_to_end.py --preset atari --device cuda --impl ours torchrl --seconds 60
    --set learner.train_ratio=16 learner.scan_unroll=2``
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("RL_WARNINGS", "0")
ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "sota_implementations" / "dreamer_v3"
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # torchrl's wheel installs a package named benchmarks as well
for _path in (SCRIPT, SCRIPT.parent):
    if str(_path) not in sys.path:
        sys.path.append(str(_path))

IMPLEMENTATIONS = ("ours", "torchrl")
RATES = ("env_steps_per_second", "updates_per_second")
#: Seconds beyond ``--limit`` for the last evaluation and the end of the workers; what then still runs hangs.
GRACE_S = 300.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table in Markdown and one line of JSON."""
    args = _arguments(arguments)
    if args.worker:
        sys.stdout.write(json.dumps(run_ours(args)) + "\n")
        return
    # So that what runs meanwhile is ended too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    results: dict[str, list[dict[str, Any]]] = {impl: [] for impl in args.impl}
    for number in range(args.rounds):
        # In turns, so that a machine that slows down slows both.
        for impl in args.impl if number % 2 == 0 else args.impl[::-1]:
            results[impl].append(_measure(impl, args, args.out / f"{impl}_{number}"))
    report = _report(args, results)
    sys.stdout.write(table(report["impl"]) + "\n" + json.dumps(report) + "\n")


def run_ours(args: argparse.Namespace) -> dict[str, Any]:
    """Runs our script's run in this process until the window has ended; returns its counts."""
    import dataclasses

    import dreamer_v3  # noqa: F401  # it finds the folder that scripts share
    from common.loop_control import StopSignal
    from dreamer_run import Run

    from benchmarks.peers.torchrl_dreamer import load_settings
    from benchmarks.rate_window import STARTED, RateWindow

    fixed = [f"device={args.device}", f"seed={args.seed}", "checkpoint.every=null", "log.backends=[csv]"]
    if not args.evaluate:
        fixed.append("eval.every=null")
    settings = load_settings(args.preset, [*fixed, *args.set])
    # It is the window that ends the run.
    settings = dataclasses.replace(settings, total_frames=settings.env.num_envs * 10**8)
    first: list[float] = []
    evaluations: list[dict[str, float]] = []

    class Timed(Run):
        """The script's run, which ends with the window."""

        def build(self, made: Any) -> Any:
            history = super().build(made)
            self.window = RateWindow(args.seconds, device=self.device, after=args.after, limit=args.limit)
            return history

        def step(self) -> dict[str, Any]:
            metrics = super().step()
            self.window.tick(self.counters.frames, self.governor.updates)
            if not first and self.governor.updates:
                first.append(round(time.monotonic() - STARTED, 1))
            return metrics

        def evaluate(self, stop: StopSignal) -> float | None:
            with self.window.excluded():
                result = super().evaluate(stop)
            if result is not None:
                told = {"frames": self.counters.frames, "seconds": round(self.counters.seconds, 2), "return": result}
                evaluations.append(told)
            return result

        def is_done(self) -> bool:
            return self.window.over or super().is_done()

    args.out.mkdir(parents=True, exist_ok=True)
    run = Timed(settings, args.out, title=f"DreamerV3 preset {args.preset}", overrides=[*args.set])
    try:
        with StopSignal() as stop:
            run.train(stop)
            if args.evaluate and not stop.count:
                run.evaluate(stop)
        run.write_backs.settle()
        told = {"impl": "ours", "preset": args.preset, "seed": args.seed, "device": str(run.device)}
        return (
            told
            | run.window.result()
            | {"first_update_s": first[0] if first else None, "evaluations": evaluations}
            | {"measures": _last_measures(args.out / "metrics.jsonl")}
            | {"write_back": dict(run.write_backs.rows), "command_s": round(time.monotonic() - STARTED, 1)}
        )
    finally:
        run.close()


def _last_measures(path: Path) -> dict[str, float]:
    """Returns what the run wrote down last of its learner's and its workers' time."""
    lines = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
    told = [line for line in lines if "learner/update_ms" in line]  # one between two updates has no time of any
    names = ("_ms", "_share", "ring_fill", "policy_lag_updates", "train_ratio")
    return {name: round(value, 4) for name, value in (told or [{}])[-1].items() if name.endswith(names)}


def _measure(impl: str, args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Runs one implementation in a process of its own; returns its line, or what it said instead."""
    out.mkdir(parents=True, exist_ok=True)
    shared = ["--preset", args.preset, "--device", args.device, "--seed", str(args.seed), "--out", str(out)]
    shared += ["--seconds", str(args.seconds), "--after", str(args.after), "--limit", str(args.limit)]
    shared += ["--evaluate"] * args.evaluate
    if impl == "ours":
        command = [str(Path(__file__).resolve()), "--worker", *shared, "--set", *args.set]
    else:
        command = [str(ROOT / "benchmarks" / "peers" / "torchrl_dreamer.py"), *shared, "--set", *args.set]
        command += ["--peer", *args.peer] + (["--recipe", args.recipe] if args.recipe else [])
    with open(out / "output.txt", "wb") as output, open(out / "errors.txt", "wb") as errors:
        run = subprocess.Popen([sys.executable, *command], stdout=output, stderr=errors, start_new_session=True)
        try:
            status = run.wait(args.limit + GRACE_S)
        except subprocess.TimeoutExpired:
            late = f"it must end within --limit={args.limit:g} s, and {GRACE_S:g} s for the rest; it was ended."
            return {"impl": impl, "error": late, "output": str(out)}
        finally:
            # With its workers, however it or this process ends.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    lines, said = (
        (out / name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        for name in ("output.txt", "errors.txt")
    )
    if status or not lines or not lines[-1].startswith("{"):
        return {"impl": impl, "error": said[-1] if said else f"exit code {status}", "output": str(out)}
    return json.loads(lines[-1])


def _report(args: argparse.Namespace, results: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    impls = {impl: _median(runs) for impl, runs in results.items()}
    report: dict[str, Any] = {"benchmark": "dreamer_v3_end_to_end", "preset": args.preset, "device": args.device}
    report |= {"set": args.set, "peer": args.peer, "rounds": args.rounds, "impl": impls, "runs": dict(results)}
    if all(impl in impls for impl in IMPLEMENTATIONS):
        pairs = {name: (impls["ours"].get(name), impls["torchrl"].get(name)) for name in RATES}
        report["ratio"] = {
            name: round(ours / peer, 3) if ours and peer else None for name, (ours, peer) in pairs.items()
        }
    return report


def _median(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns medians of the numbers of the runs that ended well, else the first run."""
    good = [run for run in runs if "error" not in run]
    if not good:
        return dict(runs[0])
    names = [name for name, value in good[0].items() if isinstance(value, int | float)]
    return {name: statistics.median(run[name] for run in good if run[name] is not None) for name in names}


def table(impls: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the rates of all implementations and their ratios in Markdown."""
    names = list(impls)
    both = set(IMPLEMENTATIONS) <= set(names)
    labels = {"env_steps_per_second": "environment steps/s", "updates_per_second": "updates/s"}
    labels |= {"env_steps": "environment steps", "updates": "updates", "seconds": "seconds"}
    labels |= {"first_update_s": "first update after, s"}
    lines = ["| | " + " | ".join(names) + (" | ours / torchrl |" if both else " |")]
    lines.append("|---" * (len(names) + 1 + both) + "|")
    for key, label in labels.items():
        values = [impls[name].get(key) for name in names]
        cells = ["-" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}" for value in values]
        if both:
            ours, peer = impls["ours"].get(key), impls["torchrl"].get(key)
            cells.append(f"{ours / peer:.2f}" if key in RATES and ours and peer else "")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lines += [f"\n{name}: {run['error']}" for name, run in impls.items() if "error" in run]
    return "\n".join(lines)


def _arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--preset", default="pendulum")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--impl", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of the window")
    parser.add_argument("--after", type=int, default=1, help="the update from which rates count")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each, in turns; medians are told")
    parser.add_argument("--limit", type=float, default=575.0, help="seconds for a run, with everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate", action="store_true", help="as often as the preset says, and at the end")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the preset, for both")
    parser.add_argument("--peer", nargs="*", default=[], metavar="KEY=VALUE", help="of TorchRL's recipe")
    parser.add_argument("--recipe", help="folder of TorchRL's recipe (default: beside torchrl)")
    parser.add_argument("--out", type=Path, default=Path("outputs/dreamer_v3_end_to_end"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
