# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The System view: every core of the mask as a bar, every GPU as a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchrl_ext.record.panel_frame import LABEL, ORANGE, PLAIN, SKY, VERMILLION, Row, clean, gib, number, rule, show
from torchrl_ext.record.panel_state import PanelState
from torchrl_ext.record.spectrum import draw_spectrum, plan_spectrum

if TYPE_CHECKING:
    from torchrl_ext.record.system_metrics import CpuSample, GpuSample

__all__ = ["mean_of", "system_rows"]


def mean_of(values: Sequence[Any]) -> float | None:
    """Returns the mean of those values that are numbers, None without any."""
    known = [value for value in map(number, values) if value is not None]
    return sum(known) / len(known) if known else None


def system_rows(state: PanelState, width: int, height: int) -> list[Row]:
    """Returns at most ``height`` lines; the GPUs come first in need of room, the bars take what is left."""
    if state.system is None:
        return [rule("CPU", width, state.style), [(f" {clean(state.system_error) or 'measuring'}", PLAIN)]][:height]
    gpus = _gpu_rows(state.system.gpus, width, state.style)[:height]
    left = height - len(gpus)
    rows = _cpu_rows(state.system.cpu, width, left, state.style)[:left] + gpus
    if state.system_error and len(rows) < height:
        rows.append([(f" {clean(state.system_error)}", PLAIN)])
    return rows


def _cpu_rows(cpu: CpuSample, width: int, height: int, style: str) -> list[Row]:
    plan = plan_spectrum(len(cpu.load), width=width, height=height - 2)
    load = f"{show(mean_of(cpu.load), '{:.0f} %', scale=100)} mean, {show(_most(cpu.load), '{:.0f} %', scale=100)} most"
    cores = f"{len(cpu.affinity)} of {cpu.logical_cores} cores"
    # The figures are never cut, the name of a model may be.
    name = clean(cpu.model or "")[: max(0, width - len(load) - len(cores) - 14)]
    rows = [rule("  ".join(part for part in ("CPU", name, cores, load) if part), width, style)]
    memory = f" memory {gib(cpu.ram_used)} of {gib(cpu.ram_total)} GiB, this run {gib(cpu.process_rss)} GiB"
    shared = plan.group if plan is not None else 1
    memory += f"; a bar is the mean of {shared} cores" if shared > 1 else f"; {cpu.physical_cores} physical cores"
    rows.append([(memory, PLAIN)])
    if plan is None:
        return rows
    for line, level in draw_spectrum(cpu.load, cpu.affinity, plan, style=style):
        if level < 0:
            rows.append([(line, LABEL)])
        else:
            # The walls and what stands between them: the higher, the warmer.
            share = (level + 1) / plan.rows
            colour = VERMILLION if share > 0.8 and plan.rows > 1 else ORANGE if share > 0.5 else SKY
            rows.append([(line[:5], LABEL), (line[5:-1], colour), (line[-1], LABEL)])
    return rows


def _most(values: Sequence[Any]) -> float | None:
    return max((value for value in map(number, values) if value is not None), default=None)


def _gpu_rows(gpus: Sequence[GpuSample], width: int, style: str) -> list[Row]:
    if not gpus:
        return [rule("GPU  none", width, style)]
    load = show(mean_of([gpu.utilisation for gpu in gpus]), "{:.0f} %", scale=100)
    rows = [rule(f"GPU  {len(gpus)} devices  {load} mean", width, style)]
    room = max(8, width - 51)
    rows.append([(f" {'id':>3} {'name':<{room}} {'load':>6} {'memory GiB':>15} {'power':>8} {'temp':>6}", LABEL)])
    for gpu in gpus:
        memory = f"{gib(gpu.memory_used)}/{gib(gpu.memory_total)}"
        cells = f" {gpu.index:>3} {clean(gpu.name or 'N/A')[:room]:<{room}} "
        cells += f"{show(gpu.utilisation, '{:.0f} %', scale=100):>6} {memory:>15} "
        cells += f"{show(gpu.power_watts, '{:.0f} W'):>8} {show(gpu.temperature_celsius, '{:.0f} C'):>6}"
        rows.append([(cells, PLAIN)])
    return rows
