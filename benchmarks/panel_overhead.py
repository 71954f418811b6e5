# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Updates per second of one FastSAC run with its panel on and off (case 63 asks for a ratio within 2 %).

A child process trains on a pseudo-terminal, which this process reads as a terminal would. Blocks with the panel
(frames, system metrics, what the loop tells it) and without alternate in one run, so that both see the same learner on
the same machine; each pair gives a ratio. What is written to files is the same in all blocks.

Example:
    ``python benchmarks/panel_overhead.py --pairs 10 --seconds 5``
    ``python benchmarks/panel_overhead.py --pairs 10 --seconds 5 -- device=cuda preset=halfcheetah``
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "sota_implementations" / "fast_sac"
OVERRIDES = ["preset=pendulum", "device=cpu", "time_budget=1000000", "log.backends=[csv]"]


def main() -> None:
    """Prints one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="of blocks, with and without a panel")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a block")
    parser.add_argument("--warm-up", type=float, default=5.0, help="seconds of learning before the first block")
    parser.add_argument("--size", type=int, nargs=2, default=[120, 40], help="columns and lines of the terminal")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="of the script's configuration, after --")
    args = parser.parse_args()
    given = {override.split("=")[0] for override in args.overrides}
    overrides = [override for override in OVERRIDES if override.split("=")[0] not in given] + args.overrides
    if args.child is not None:
        _train(args, overrides)
        return
    with tempfile.TemporaryDirectory() as folder:
        rates, drawn = _watch(Path(folder), args)
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    ordered = sorted(ratios)
    result = {
        "ratio": statistics.median(ratios),
        "ratio_p10": ordered[round(0.1 * (len(ordered) - 1))],
        "ratio_p90": ordered[round(0.9 * (len(ordered) - 1))],
        "updates_per_second": {name: statistics.median(values) for name, values in rates.items()},
        "pairs": len(ratios),
        "seconds": args.seconds,
        "overrides": overrides,
        "drawn_bytes_per_second": drawn / (args.pairs * args.seconds),
    }
    sys.stdout.write(json.dumps(result) + "\n")


def _watch(folder: Path, args: argparse.Namespace) -> tuple[dict[str, list[float]], int]:
    """Runs the child on a pseudo-terminal; returns updates per second by block, and the bytes it drew."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", args.size[1], args.size[0], 0, 0))
    command = [sys.executable, __file__, "--child", str(folder), *sys.argv[1:]]
    with open(folder / "errors", "wb") as errors:
        child = subprocess.Popen(
            command,
            env={**os.environ, "TERM": "xterm-256color"},
            stdin=slave,
            stdout=slave,
            stderr=errors,
            start_new_session=True,
        )
    try:
        drawn = 0
        while child.poll() is None:
            if select.select([master], [], [], 0.2)[0]:
                drawn += len(os.read(master, 65536))
    finally:
        child.kill()
        child.wait()
        os.close(master)
        os.close(slave)
    if child.returncode:
        sys.exit(f"panel_overhead: the run must end by itself, got {(folder / 'errors').read_text()[-2000:]}")
    return json.loads((folder / "rates.json").read_text()), drawn


class _Nobody:
    """Who is told of a run without a panel."""

    should_quit = False

    def say(self, text: str) -> None: ...

    def point(self, series: str, frames: float, value: float) -> None: ...


def _train(args: argparse.Namespace, overrides: list[str]) -> None:
    os.environ.setdefault("RL_WARNINGS", "0")
    sys.path[:0] = [str(ROOT), str(SCRIPT.parent), str(SCRIPT)]
    import hydra
    from common.loop_control import Every
    from common.progress import Progress
    from fast_sac import Run, Settings
    from omegaconf import OmegaConf

    with hydra.initialize_config_dir(str(SCRIPT / "config"), version_base="1.3"):
        cfg = hydra.compose("fast_sac", overrides=overrides)
    settings = Settings.from_dict(OmegaConf.to_container(cfg, resolve=True))
    run = Run(settings, args.child, title="panel_overhead", overrides=args.overrides)
    run.progress.close()
    run.telling.progress = _Nobody()
    should_log = Every(settings.log.every)

    def block(seconds: float, *, panel: bool) -> float:
        should_look = Every(2.0 if panel else None, time.monotonic())
        begun, before, metrics = time.perf_counter(), run.state.governor.updates, {}
        while (now := time.perf_counter()) - begun < seconds:
            metrics = run.step() or metrics
            run.counters.seconds = now
            if should_log(run.counters.frames):
                run.log(metrics)
            if should_look(time.monotonic()):
                run.look()
            if panel:
                run.show()
        if run.device.type == "cuda":
            import torch

            torch.cuda.synchronize(run.device)
        return (run.state.governor.updates - before) / (time.perf_counter() - begun)

    def with_panel(seconds: float) -> float:
        run.telling.progress = Progress(
            title="panel_overhead",
            folder=args.child,
            total_frames=None,
            time_budget=None,
            print_every=5.0,
            devices=[run.device],
        )
        try:
            return block(seconds, panel=True)
        finally:
            run.telling.progress.close()
            run.telling.progress = _Nobody()

    try:
        run.begin()
        while not run.state.governor.updates:
            run.step()
        block(args.warm_up, panel=False)
        rates: dict[str, list[float]] = {"on": [], "off": []}
        for turn in range(args.pairs):
            for name in ("on", "off") if turn % 2 else ("off", "on"):
                rates[name].append(with_panel(args.seconds) if name == "on" else block(args.seconds, panel=False))
    finally:
        run.close()
    (args.child / "rates.json").write_text(json.dumps(rates))


if __name__ == "__main__":
    main()
