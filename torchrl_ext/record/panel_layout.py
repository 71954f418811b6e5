# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The frame of a panel as a pure function of its state and its size: head, one of four views, foot."""

from __future__ import annotations

from torchrl_ext.record.panel_curves import learning_rows
from torchrl_ext.record.panel_frame import (
    GREEN,
    LABEL,
    MISSING,
    ORANGE,
    PLAIN,
    VALUE,
    Frame,
    Row,
    clean,
    clock,
    gib,
    meter,
    number,
    pairs,
    rule,
    short,
    show,
)
from torchrl_ext.record.panel_state import PanelState
from torchrl_ext.record.panel_system import mean_of, system_rows
from torchrl_ext.record.panel_timing import collector_stages, timing_rows

__all__ = ["VIEWS", "render"]

VIEWS = ("Overview", "Timing", "System", "Learning")


def render(state: PanelState, width: int, height: int) -> Frame:
    """Returns the frame of a state, a rich renderable of exactly ``height`` lines of ``width`` columns.

    Args:
        state (PanelState): what is shown.
        width (int): columns.
        height (int): lines.

    Examples:
        >>> frame = render(PanelState(title="pendulum"), 80, 23)
        >>> frame.width, frame.height
        (80, 23)
    """
    views = (_overview, timing_rows, system_rows, learning_rows)
    body = max(0, height - 2)
    rows = views[state.view - 1](state, width, body)[:body]
    rows += [[] for _ in range(body - len(rows))]
    return Frame([_head(state, width), *rows, _foot(state, width)], width, height)


def _head(state: PanelState, width: int) -> Row:
    tabs: Row = []
    for at, name in enumerate(VIEWS, start=1):
        # Brackets, too: reverse video is not seen everywhere.
        chosen = at == state.view
        tabs.append((f"[{at} {name}]" if chosen else f" {at} {name} ", "bold reverse" if chosen else LABEL))
    tabs.append(("  q stop", LABEL))
    room = width - sum(len(text) for text, _ in tabs) - 1
    return [(clean(state.title)[: max(0, room - 1)].ljust(max(0, room)), VALUE), *tabs]


def _foot(state: PanelState, width: int) -> Row:
    counts = state.counts
    text = f" {short(counts.frames)} frames {short(state.frame_rate)}/s  {short(counts.updates)} updates "
    text += f"{short(state.update_rate)}/s  {clock(counts.seconds)} elapsed  {state.left} left"
    if state.stopping:
        return [(" stopping after this step  ", f"bold {ORANGE}"), (text, PLAIN)]
    return [(f"{100 * state.done:4.0f} %", f"bold {GREEN}"), (text, PLAIN)]


def _overview(state: PanelState, width: int, height: int) -> list[Row]:
    counts, metrics = state.counts, state.metrics
    bar = meter(state.done, max(0, width - 52), state.style)
    totals = [f"of {short(state.total_frames)}" if state.total_frames else ""]
    totals.append(f"of {clock(state.time_budget)}" if state.time_budget else "")
    items = [
        ("Frames", f"{counts.frames:,} {totals[0]}"),
        ("Frames/s", f"{state.frame_rate:,.0f}"),
        ("Updates", f"{counts.updates:,}"),
        ("Updates/s", f"{state.update_rate:,.1f}"),
        ("Return, training", show(metrics.get("train/return"))),
        ("Return, evaluated", show(metrics.get("eval/return"))),
        ("Collector wait", _collector_wait(state)),
        ("Ring fill", _ring_fill(state)),
        ("Policy lag", show(metrics.get("collector/policy_lag_updates"), "{:,.1f} updates")),
        ("Update", show(_update_ms(state), "{:.3f} ms")),
        ("Learner busy", show(metrics.get("learner/busy_share"), "{:.0f} %", scale=100)),
        ("Learner waits", show(metrics.get("learner/wait_share"), "{:.0f} %", scale=100)),
        ("UTD requested", show(metrics.get("utd/requested"), "{:.5g} per frame")),
        ("UTD measured", show(metrics.get("utd/measured"), "{:.5g} per frame")),
        *_replayed(state),
        *_machine(state),
    ]
    rows: list[Row] = [
        [
            (" ", PLAIN),
            *bar,
            (f" {100 * state.done:5.1f} %", VALUE),
            (f"  {clock(counts.seconds)} {totals[1]}".rstrip() + f"  {state.left} left", VALUE),
        ],
        [],
        *pairs(items, width),
    ]
    if counts.note:
        rows.append([(" ", PLAIN), (clean(counts.note), VALUE)])
    rows.append(rule("Messages", width, state.style))
    room = max(0, height - len(rows))
    rows += [[(f" {clean(text)}", PLAIN)] for text in (state.messages[-room:] if room else ())]
    return rows


def _collector_wait(state: PanelState) -> str:
    wait = number(state.metrics.get("collector/wait_ms"))
    whole = 1e3 * sum(value for path, value in collector_stages(state).items() if "/" not in path)
    share = f" ({100 * wait / whole:.0f} %)" if wait is not None and whole > 0 else ""
    return (MISSING if wait is None else f"{short(wait)} ms/step") + share


def _ring_fill(state: PanelState) -> str:
    slots = number(state.metrics.get("collector/ring_slots"))
    of = "" if slots is None else f" of {slots:.0f}"
    return show(state.metrics.get("collector/ring_fill"), "{:.1f}" + of + " slots")


def _update_ms(state: PanelState) -> float | None:
    known = number(state.metrics.get("learner/update_ms"))
    busy = number(state.metrics.get("learner/busy_share"))
    if known is None and busy is not None and state.update_rate > 0:
        return 1e3 * busy / state.update_rate
    return known


def _replayed(state: PanelState) -> list[tuple[str, str]]:
    """What only learners have that write back into their replay, or count replayed steps."""
    metrics, items = state.metrics, []
    if "train_ratio/requested" in metrics:
        measured, requested = (show(metrics.get(f"train_ratio{name}"), "{:.4g}") for name in ("", "/requested"))
        items.append(("Train ratio", f"{measured} of {requested}"))
    if "write_back/pending" in metrics:
        wait, pending = (
            show(metrics.get("write_back/wait_ms"), "{:.2f} ms"),
            show(metrics["write_back/pending"], "{:.0f}"),
        )
        items.append(("Write-back lag", f"{wait}, {pending} pending"))
        for name in ("stale", "superseded"):
            share = metrics.get(f"write_back/{name}_share")
            items.append((f"Rows {name}", show(share, "{:.1f} %", scale=100)))
    return items


def _machine(state: PanelState) -> list[tuple[str, str]]:
    if state.system is None:
        return []
    cpu, gpus = state.system.cpu, state.system.gpus
    items = [
        ("CPU", f"{show(mean_of(cpu.load), '{:.0f} %', scale=100)} of {len(cpu.load)} cores"),
        ("Memory", f"{gib(cpu.ram_used)} of {gib(cpu.ram_total)} GiB"),
    ]
    if gpus:
        used = [gpu.memory_used for gpu in gpus if gpu.memory_used is not None]
        load = show(mean_of([gpu.utilisation for gpu in gpus]), "{:.0f} %", scale=100)
        items.append(("GPU", f"{load} of {len(gpus)}"))
        items.append(("GPU memory", f"{gib(sum(used) if used else None)} GiB"))
    return items
