# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Bars of loads in the characters of a terminal: one bar for each core under a connected ceiling."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["STYLES", "SpectrumPlan", "plan_spectrum", "draw_bars", "draw_spectrum", "spectrum_style"]

#: Characters of one cell from empty to full. Fonts that flatten blocks show braille or ASCII well.
STYLES = {
    "blocks": " " + "".join(map(chr, range(0x2581, 0x2589))),
    "braille": " \u28c0\u28e4\u28f6\u28ff",
    "ascii": " .:#",
}
_VARIABLE = "TORCHRL_EXT_CPU_SPECTRUM"
#: Left of the bars: ``100%`` and the wall; right of them: the wall.
_GUTTER, _WALL = 5, 1
#: The ceiling above and the core ids below a band of bars.
_AROUND = 2
_MAX_ROWS = 8


def spectrum_style(*, unicode: bool = True) -> str:
    """Returns the style that ``TORCHRL_EXT_CPU_SPECTRUM`` names, one of ``"blocks"``, ``"braille"`` and ``"ascii"``.

    Keyword Args:
        unicode (bool): whether the terminal writes UTF-8; if not, the default is ``"ascii"``, not ``"blocks"``.
            Defaults to ``True``.

    Raises:
        ValueError: if there is no such style.

    Examples:
        >>> spectrum_style() in STYLES
        True
    """
    style = os.environ.get(_VARIABLE) or ("blocks" if unicode else "ascii")
    if style not in STYLES:
        raise ValueError(f"Panel: {_VARIABLE} must be one of {', '.join(STYLES)}, got {style!r}; nothing was drawn.")
    return style


def draw_bars(values: Sequence[float | None], *, height: int, style: str) -> list[str]:
    """Returns ``height`` lines, the top one first, with a bar for each value in 0..1; None is an empty column.

    A value above zero is never invisible.

    Examples:
        >>> draw_bars([0.0, 0.01, 0.5, 1.0], height=2, style="ascii")
        ['   #', ' .##']
    """
    levels = STYLES[style]
    steps = len(levels) - 1
    filled = []
    for value in values:
        share = value if value is not None and math.isfinite(value) else 0.0
        filled.append(max(1, round(min(share, 1.0) * height * steps)) if share > 0 else 0)
    # A cell by what fills it and what lies below, without a comparison for each of thousands of cells.
    full = height * steps
    cells = levels[0] * full + levels + levels[-1] * full
    return ["".join([cells[count + above] for count in filled]) for above in range(steps, full + 1, steps)]


@dataclass(frozen=True)
class SpectrumPlan:
    """How bars are arranged: ``bands`` one above the other, each of ``per_band`` bars and ``rows`` lines of them; a
    bar takes ``pitch`` columns and shows the mean of ``group`` cores."""

    bands: int
    per_band: int
    rows: int
    pitch: int
    group: int

    @property
    def height(self) -> int:
        """Lines of all bands with their ceilings and labels."""
        return self.bands * (self.rows + _AROUND)


def plan_spectrum(cores: int, *, width: int, height: int) -> SpectrumPlan | None:
    """Returns the arrangement of so many cores that fits, None where nothing does.

    Examples:
        >>> plan_spectrum(128, width=80, height=8)
        SpectrumPlan(bands=2, per_band=64, rows=2, pitch=1, group=1)
    """
    inner, most_bands = width - _GUTTER - _WALL, height // (1 + _AROUND)
    if cores < 1 or inner < 1 or most_bands < 1:
        return None
    pitch = max((pitch for pitch in (1, 2, 3, 4, 6) if cores * pitch <= inner), default=1)
    group = math.ceil(cores / (inner * most_bands))
    bars = math.ceil(cores / group)
    bands = math.ceil(bars * pitch / inner)
    # Whole eights, so that the bands look alike.
    per_band = min(inner, 8 * math.ceil(bars / bands / 8)) if bands > 1 else bars
    return SpectrumPlan(bands, per_band, min(_MAX_ROWS, height // bands - _AROUND), pitch, group)


def draw_spectrum(
    load: Sequence[float], cores: Sequence[int], plan: SpectrumPlan, *, style: str
) -> list[tuple[str, int]]:
    """Returns the lines of a spectrum.

    Args:
        load (sequence of float): of each core, 0..1.
        cores (sequence of int): the cores' ids, which label the bars.
        plan (SpectrumPlan): see :func:`plan_spectrum`.

    Keyword Args:
        style (str): of :data:`STYLES`.

    Returns:
        list of tuple: each line and its height above the floor, -1 for ceilings and labels.
    """
    left, right, wall, flat = ("+", "+", "|", "-") if style == "ascii" else ("\u250c", "\u2510", "\u2502", "\u2500")
    means = [
        sum(load[at : at + plan.group]) / len(load[at : at + plan.group]) for at in range(0, len(load), plan.group)
    ]
    names = [str(core) for core in cores[:: plan.group]]
    lines: list[tuple[str, int]] = []
    for first in range(0, len(means), plan.per_band):
        bars, labels = means[first : first + plan.per_band], names[first : first + plan.per_band]
        span = len(bars) * plan.pitch
        lines.append((f"100%{left}{flat * span}{right}", -1))
        thick = max(1, plan.pitch - 1)
        for row, line in enumerate(draw_bars(bars, height=plan.rows, style=style)):
            body = "".join(cell * thick + " " * (plan.pitch - thick) for cell in line)
            lines.append((f"    {wall}{body}{wall}", plan.rows - 1 - row))
        lines.append((f"core {_label(labels, plan.pitch)}", -1))
    return lines


def _label(names: Sequence[str], pitch: int) -> str:
    """Every bar is labelled where the ids fit, else one in 2, 4, 8, ...; one that would pass the right wall is none."""
    longest, step = max(map(len, names)), 1
    while step * pitch < longest + 1 and step < len(names):
        step *= 2
    room = len(names) * pitch + 1
    label = "".join(name.ljust(step * pitch) for name in names[::step]).rstrip()
    return label if len(label) <= room else label.rpartition(" ")[0].rstrip()
