#!/usr/bin/env python
# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Compares ``torchrl_ext`` with its peers and with the hardware limit, one JSON line per configuration.

    python benchmarks/compare.py ingest sample sample_nstep --device cpu --out report.jsonl

Each line holds ``case, device, config, ours_ms, peer, peer_ms, limit, limit_ms, ratio_peer (peer_ms / ours_ms),
ratio_limit (ours_ms / limit_ms)`` and an ``extra`` object. README.md beside this file says how to read them.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    # Run as a script, sys.path starts at benchmarks/; and torchrl's wheel installs a package of this name as well.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import cases
from benchmarks.presets import SIZES, ReplaySizes
from benchmarks.timing import Candidate, Timing, interleave, synchronizer

WARMUP_ROUNDS = 3
# The thread's own processor time leaves out what other processes take: for ratios on a shared machine.
CLOCKS = {"wall": time.perf_counter, "thread": time.thread_time}
VERSIONS = ("torch", "torchrl", "tensordict")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases named on the command line; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        functions = {name: cases.load(name) for name in args.cases}
        device = _device(args.device)
        _check_clock(args.clock, device, args.threads)
    except ValueError as error:
        return _fail(f"compare.py: {error}")
    torch.set_num_threads(args.threads)
    logging.getLogger("torchrl").setLevel(logging.WARNING)  # a line for each storage of each peer otherwise
    sizes = [SIZES[name] for name in args.sizes]
    lines: list[str] = []
    try:
        for name, function in functions.items():
            for record in run_case(name, function, device, sizes=sizes, rounds=args.rounds, clock=args.clock):
                lines.append(json.dumps(record))
                print(lines[-1], flush=True)
    except ValueError as error:  # a case that has nothing to measure on the device
        return _fail(f"compare.py: {error}")
    finally:
        # Also what came before an error or a Ctrl-C: it took minutes.
        if args.out is not None and lines:
            args.out.write_text("".join(f"{line}\n" for line in lines))
    return 0


def run_case(
    name: str,
    function: cases.CaseFunction,
    device: torch.device,
    *,
    sizes: Sequence[ReplaySizes],
    rounds: int,
    clock: str = "wall",
) -> Iterator[dict[str, Any]]:
    """Yields one record per configuration of a case."""
    for comparison in function(device, sizes):
        candidates = {"ours": comparison.ours, "peer": comparison.peer, "limit": comparison.limit, **comparison.others}
        present: dict[str, Candidate] = {key: value for key, value in candidates.items() if value is not None}
        timings = interleave(
            present, rounds=rounds, warmup=WARMUP_ROUNDS, synchronize=synchronizer(device), clock=CLOCKS[clock]
        )
        yield make_record(name, device, comparison, timings, rounds=rounds, clock=clock)


def make_record(
    name: str,
    device: torch.device,
    comparison: cases.Comparison,
    timings: dict[str, Timing],
    *,
    rounds: int,
    clock: str = "wall",
) -> dict[str, Any]:
    """Returns the JSON object of one configuration; what was not measured is ``None``."""
    medians = {key: timing.median_ms for key, timing in timings.items()}
    ours, peer, limit = (medians.get(key) for key in ("ours", "peer", "limit"))
    extra: dict[str, Any] = {**comparison.extra, "rounds": rounds, "clock": clock, "threads": torch.get_num_threads()}
    extra["hardware"] = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    extra["versions"] = {package: metadata.version(package) for package in VERSIONS}
    if comparison.peer_missing is not None:
        extra["peer_missing"] = comparison.peer_missing
    for key, timing in timings.items():
        extra[f"{key}_p10_p90_p95_ms"] = [_rounded(point) for point in (timing.p10_ms, timing.p90_ms, timing.p95_ms)]
        if comparison.bytes_moved:
            extra[f"{key}_gb_s"] = _rounded(_ratio(comparison.bytes_moved / 1e6, timing.median_ms))
    extra.update({f"{key}_ms": _rounded(medians[key]) for key in comparison.others})
    if comparison.bytes_moved:
        extra["bytes"] = comparison.bytes_moved
    return {
        "case": name,
        "device": device.type,
        "config": comparison.config,
        "ours_ms": _rounded(ours),
        "peer": comparison.peer_name,
        "peer_ms": _rounded(peer),
        "limit": comparison.limit_name,
        "limit_ms": _rounded(limit),
        "ratio_peer": _rounded(_ratio(peer, ours)),
        "ratio_limit": _rounded(_ratio(ours, limit)),
        "extra": extra,
    }


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA build of torch and a visible GPU, and this process has none.")
    return torch.device(name)


def _check_clock(clock: str, device: torch.device, threads: int) -> None:
    if clock == "thread" and (device.type != "cpu" or threads != 1):
        raise ValueError("--clock thread sees one CPU thread only; it needs --device cpu and --threads 1.")


def _fail(message: str) -> int:
    sys.stderr.write(f"{message}\n")
    return 2


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _report(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, got {path}")
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compare torchrl_ext with its peers and the hardware limit, one JSON line per configuration.",
        epilog=f"cases: {', '.join(sorted(cases.CASES))}",
    )
    parser.add_argument("cases", nargs="+", metavar="CASE", help="what to measure")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--rounds", type=_positive, default=101, help="timed calls of each candidate (%(default)s)")
    parser.add_argument("--threads", type=_positive, default=1, help="torch threads on the CPU (%(default)s)")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall", help="thread: own CPU time (%(default)s)")
    parser.add_argument(
        "--sizes", nargs="+", choices=tuple(SIZES), default=("small", "large"), help="default: small large"
    )
    parser.add_argument("--out", type=_report, help="file that receives the same lines")
    return parser


if __name__ == "__main__":
    sys.exit(main())
