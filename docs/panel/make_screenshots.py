# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Writes pictures of the panel's views, 80 x 24 and 160 x 50.

Run from the repository's root: ``python docs/panel/make_screenshots.py`` takes a made-up run on 128 cores and 8 GPUs,
``python docs/panel/make_screenshots.py --run FOLDER --name h200`` what the run in that folder has logged by now, and
this machine as it is at the moment.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console, Group

from torchrl_ext.record import CpuSample, GpuSample, SystemMetrics, SystemSample
from torchrl_ext.record.panel_layout import VIEWS, render
from torchrl_ext.record.panel_state import Counts, PanelState

FOLDER = Path(__file__).parent
GIB = 2**30


def recorded_system(cores: int = 128, gpus: int = 8) -> SystemSample:
    """A machine under load; the utilisation of its last GPU cannot be told, as under MIG."""
    load = tuple(0.5 + 0.45 * math.sin(0.9 * core) * math.cos(0.13 * core) for core in range(cores))
    cpu = CpuSample(
        model="AMD EPYC 9654 96-Core Processor",
        physical_cores=96,
        logical_cores=192,
        affinity=tuple(range(cores)),
        load=load,
        ram_used=212 * GIB,
        ram_total=768 * GIB,
        process_rss=31 * GIB,
    )
    devices = [
        GpuSample(
            index=index,
            name="NVIDIA H200",
            uuid=f"GPU-{index}",
            utilisation=None if index == gpus - 1 else 0.97 - 0.09 * index,
            memory_used=(12 + 9 * index) * GIB,
            memory_total=141 * GIB,
            power_watts=640.0 - 40 * index,
            temperature_celsius=61.0 - index,
        )
        for index in range(gpus)
    ]
    return SystemSample(cpu=cpu, gpus=tuple(devices))


def recorded_state(*, cores: int = 128, gpus: int = 8) -> PanelState:
    """A run that is two fifths through."""
    points = range(0, 41_000_000, 500_000)
    returns = [(float(at), 900 * (1 - math.exp(-at / 1.5e7)) + 25 * math.sin(at / 9e5)) for at in points]
    return PanelState(
        title="FastSAC preset humanoid_walk",
        counts=Counts(41_287_680, 161_280, 412.0, "return 871.3"),
        total_frames=100_000_000,
        frame_rate=100_212.0,
        update_rate=391.4,
        metrics={
            "train/return": 871.3,
            "eval/return": 884.9,
            "collector/policy_ms": 1.204,
            "collector/env_ms": 7.911,
            "collector/env/pool_ms": 7.602,
            "collector/push_ms": 0.118,
            "collector/wait_ms": 0.974,
            "collector/weights_ms": 0.021,
            "collector/ring_fill": 2.6,
            "collector/ring_slots": 8.0,
            "collector/policy_lag_updates": 11.3,
            "learner/busy_share": 0.91,
            "learner/wait_share": 0.06,
            "utd/requested": 4 / 1024,
            "utd/measured": 0.0039062,
        },
        stages={"drain": 0.00031, "sample": 0.00044, "update": 0.00186, "publish": 0.00008},
        messages=(
            "FastSAC preset humanoid_walk: HumanoidWalk (envpool), 1024 streams, cuda:0",
            "update ratio: 4 gradient steps per vector step of 1024 rows",
            "evaluation at 40000000 frames: mean return 884.9 over 16 episodes",
        ),
        curves={
            "train/return": returns,
            "eval/return": returns[::10],
            "learner/loss": [(x, 9 - y / 100) for x, y in returns],
        },
        system=recorded_system(cores, gpus),
    )


def state_of(run: Path) -> PanelState:
    """Where a run stands by its ``metrics.jsonl``, on this machine as it is now."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="ascii").splitlines()]
    curves: dict[str, list[tuple[float, float]]] = {}
    metrics: dict[str, float] = {}
    for line in lines:
        metrics |= line
        for name, value in line.items():
            if name.endswith("/return") or "loss" in name:
                curves.setdefault(name, []).append((float(line["frames"]), value))
    config = run / ".hydra" / "config.yaml"
    budget = OmegaConf.load(config) if config.exists() else OmegaConf.create()
    logged = [line for line in lines if "seconds" in line]
    before, last = logged[-2:]
    taken = last["seconds"] - before["seconds"]
    metrics["utd/measured"] = (last["updates"] - before["updates"]) / (last["frames"] - before["frames"])
    machine = SystemMetrics()
    machine.sample()
    time.sleep(1.0)  # a load is that of the time between two samples
    return PanelState(
        title=f"{run.resolve().parent.name} {run.resolve().name}",
        counts=Counts(
            last["frames"], last["updates"], last["seconds"], f"return {metrics.get('train/return', 0.0):.1f}"
        ),
        total_frames=budget.get("total_frames"),
        time_budget=budget.get("time_budget"),
        frame_rate=(last["frames"] - before["frames"]) / taken,
        update_rate=(last["updates"] - before["updates"]) / taken,
        metrics=metrics,
        stages={
            name.removeprefix("learner/").removesuffix("_ms"): value / 1e3
            for name, value in metrics.items()
            if name.startswith("learner/") and name.endswith("_ms")
        },
        curves=curves,
        system=machine.sample(),
    )


def main() -> None:
    """Exports both sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="folder of a run")
    parser.add_argument("--name", default="", help="what the files' names say")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    state = recorded_state() if options.run is None else state_of(options.run)
    for width, height in ((80, 24), (160, 50)):
        console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True, color_system="truecolor")
        frames = [render(replace(state, view=view), width, height - 1) for view in range(1, len(VIEWS) + 1)]
        console.print(Group(*frames))
        picture = console.export_svg(title=f"Panel, {width} x {height}")
        # Fonts of the reader's machine: a picture loads nothing from elsewhere.
        picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
        name = "_".join(filter(None, ("panel", options.name, f"{width}x{height}.svg")))
        (options.out / name).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
