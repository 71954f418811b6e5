# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The Learning view: curves of returns and losses over collected frames."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_ext.record.panel_frame import LABEL, ORANGE, PLAIN, SKY, VALUE, Row, clean, rule, short
from torchrl_ext.record.panel_state import PanelState
from torchrl_ext.record.spectrum import draw_bars

__all__ = ["learning_rows", "resample"]

_GUTTER = 11
_MAX_ROWS = 12


def learning_rows(state: PanelState, width: int, height: int) -> list[Row]:
    """Returns at most ``height`` lines: for each series its title and a curve; those that find no room are counted."""
    # Returns first: losses may take all the room.
    names = sorted(state.curves, key=lambda series: not series.endswith("return"))
    curves = {series: state.curves[series] for series in names if state.curves[series]}
    if not curves:
        return [rule("Learning", width, state.style), [(" no point of a curve yet", PLAIN)]][:height]
    until = max(points[-1][0] for points in curves.values())
    # A title and one row at least; one line is left for the axis.
    fit = max(0, (height - 1) // 2)
    shown = dict(list(curves.items())[: fit if len(curves) <= fit else max(0, fit - 1)])
    rows: list[Row] = []
    each = min(_MAX_ROWS, (height - 1) // max(1, len(shown)) - 1)
    for at, (series, points) in enumerate(shown.items()):
        rows += _curve(series, points, until, width, each, state.style, colour=SKY if at % 2 == 0 else ORANGE)
    end = f"{short(until)} frames"
    rows.append([(" " * _GUTTER + "0" + end.rjust(max(0, width - _GUTTER - 2)), LABEL)])
    if hidden := len(curves) - len(shown):
        rows.append([(f" and {hidden} more series", PLAIN)])
    return rows[:height]


def _curve(
    series: str,
    points: Sequence[tuple[float, float]],
    until: float,
    width: int,
    height: int,
    style: str,
    *,
    colour: str,
) -> list[Row]:
    values = [value for _, value in points]
    low, high = min(values), max(values)
    title = f"{clean(series)}  newest {short(values[-1])}  highest {short(high)}  lowest {short(low)}"
    rows = [rule(f"{title}  {len(points)} points", width, style)]
    columns = resample(points, until, max(1, width - _GUTTER - 1))
    span = high - low
    # A constant curve lies in the middle; the lowest value is seen, too.
    scaled = [None if v is None else 0.5 if span <= 0 else max(1e-9, (v - low) / span) for v in columns]
    for at, line in enumerate(draw_bars(scaled, height=height, style=style)):
        label = short(high) if at == 0 else short(low) if at == height - 1 else ""
        rows.append([(f"{label:>{_GUTTER - 1}} ", VALUE), (line, colour)])
    return rows


def resample(points: Sequence[tuple[float, float]], until: float, width: int) -> list[float | None]:
    """Returns the mean of the points in each of ``width`` equal spans of ``0..until``; a span without points repeats
    the one before, None before the first.

    Examples:
        >>> resample([(0.0, 1.0), (5.0, 2.0), (5.5, 4.0)], 10.0, 5)
        [1.0, 1.0, 3.0, 3.0, 3.0]
    """
    sums, counts = [0.0] * width, [0] * width
    for frames, value in points:
        at = min(max(int(frames / until * width), 0), width - 1) if until > 0 else 0
        sums[at] += value
        counts[at] += 1
    found: list[float | None] = []
    for total, count in zip(sums, counts, strict=True):
        found.append(total / count if count else found[-1] if found else None)
    return found
