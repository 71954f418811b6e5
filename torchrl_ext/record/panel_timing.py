# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The Timing view: stages of the learner's loop and of the collectors' steps, one level deep."""

from __future__ import annotations

from collections.abc import Mapping

from torchrl_ext.record.panel_frame import LABEL, PLAIN, VALUE, Row, clean, meter, number, rule, show
from torchrl_ext.record.panel_state import PanelState

__all__ = ["collector_stages", "first_levels", "timing_rows"]

_COLLECTOR, _MS = "collector/", "_ms"


def collector_stages(state: PanelState) -> dict[str, float]:
    """Returns the mean seconds of a collector's step by stage, from metrics such as ``"collector/env_ms"``."""
    return {
        name[len(_COLLECTOR) : -len(_MS)]: value / 1e3
        for name, given in state.metrics.items()
        if name.startswith(_COLLECTOR) and name.endswith(_MS) and (value := number(given)) is not None
    }


def timing_rows(state: PanelState, width: int, height: int) -> list[Row]:
    """Returns at most ``height`` lines; stages that find no room are counted."""
    rows: list[Row] = []
    groups = {"Learner: mean of an entry": state.stages, "Collector: mean of a step": collector_stages(state)}
    wanted = {title: stages for title, stages in groups.items() if stages}
    for left, (title, stages) in zip(range(len(wanted), 0, -1), wanted.items(), strict=True):
        rows += _group(title, stages, width, (height - len(rows)) // left, state.style)
    return (rows or [rule("Timing", width, state.style), [(" no stage was timed yet", PLAIN)]])[:height]


def _group(title: str, stages: Mapping[str, float], width: int, height: int, style: str) -> list[Row]:
    known = {path: value for path, given in stages.items() if (value := number(given)) is not None}
    whole = sum(value for path, value in known.items() if "/" not in path)
    found = first_levels(known)
    room = max(0, height - 2)
    shown = found if len(found) <= room else found[: max(0, room - 1)]
    rows = [rule(title, width, style), [(f" {'stage':<28}{'ms':>12}{'share':>9}", LABEL)]]
    for path, depth in shown:
        share = known[path] / whole if whole > 0 else 0.0
        name = clean("  " * depth + (path.rsplit("/", 1)[-1] if depth else path))[:27]
        text = f" {name:<28}{1e3 * known[path]:>12.3f}{show(share, '{:.1f} %', scale=100):>9}  "
        rows.append([(text, PLAIN if depth else VALUE), *meter(share, max(0, width - 53), style)])
    if hidden := len(found) - len(shown):
        rows.append([(f" and {hidden} more", PLAIN)])
    return rows


def first_levels(stages: Mapping[str, float]) -> list[tuple[str, int]]:
    """Returns paths and depths of the stages and of the first level below each, in order.

    What is deeper is a part of those, so that nothing is shown twice.

    Examples:
        >>> first_levels({"env": 3.0, "policy": 1.0, "env/physics": 2.0, "env/physics/solver": 1.5})
        [('env', 0), ('env/physics', 1), ('policy', 0)]
    """
    found: list[tuple[str, int]] = []
    for path in stages:
        if "/" not in path:
            found.append((path, 0))
            found += [(child, 1) for child in stages if child.startswith(f"{path}/") and child.count("/") == 1]
        elif path.count("/") == 1 and path.split("/")[0] not in stages:
            found.append((path, 0))
    return found
