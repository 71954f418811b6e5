# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What the panel's views are written in: styled lines of a frame of one size, and numbers as text."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

#: A piece of a line and its style in rich's words.
Span = tuple[str, str]
Row = list[Span]

# Okabe and Ito's palette, told apart with any colour vision; what a colour says, a word or a height says too.
SKY, ORANGE, VERMILLION, GREEN = "#56B4E9", "#E69F00", "#D55E00", "#009E73"
LABEL, VALUE, PLAIN = SKY, "bold", ""
MISSING = "N/A"


@dataclass(frozen=True)
class Frame:
    """A rich renderable of exactly ``height`` lines of ``width`` columns: rows beyond it are cut, missing ones blank.

    Args:
        rows (sequence of Row): from the top.
        width (int): columns.
        height (int): lines.
    """

    rows: Sequence[Row]
    width: int
    height: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment
        from rich.style import Style

        end = Segment.line()
        for at in range(self.height):
            row = self.rows[at] if at < len(self.rows) else ()
            spans = [Segment(text, Style.parse(style) if style else None) for text, style in row]
            yield from Segment.adjust_line_length(spans, self.width)
            yield end


def clean(text: str) -> str:
    """Returns one line without control characters: neither an escape byte nor a line feed gets into a frame."""
    return "".join(char if char.isprintable() else " " for char in text)


def number(value: Any) -> float | None:
    """Returns a finite number as it is, None for all else. A tensor is all else: reading it may wait for a device."""
    return float(value) if isinstance(value, numbers.Real) and math.isfinite(value) else None


def show(value: Any, form: str = "{:,.1f}", *, scale: float = 1.0) -> str:
    """Returns a number as text, ``N/A`` for anything else."""
    known = number(value)
    return MISSING if known is None else form.format(known * scale)


def clock(seconds: float) -> str:
    """Returns ``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def short(value: float) -> str:
    """Returns a number in few characters, such as ``12.3M``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * size:
            return f"{value / size:.1f}{unit}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def gib(value: Any) -> str:
    """Returns bytes in GiB, without the unit."""
    return show(value, "{:.1f}", scale=2.0**-30)


def rule(title: str, width: int, style: str) -> Row:
    """Returns a title on a line that goes on to the right edge."""
    flat = "-" if style == "ascii" else "\u2500"
    title = clean(title)[: max(0, width - 4)]
    return [(f"{flat * 2} ", LABEL), (title, VALUE), (" " + flat * max(0, width - 4 - len(title)), LABEL)]


def meter(share: float, width: int, style: str) -> Row:
    """Returns a horizontal bar of a share in 0..1; ``[###...]`` reads without colour too."""
    full, rest = ("#", ".") if style == "ascii" else ("\u2588", "\u2591")
    cells = round(min(max(share, 0.0), 1.0) * width)
    return [(full * cells, SKY), (rest * (width - cells), PLAIN)]


def pairs(items: Sequence[tuple[str, str]], width: int) -> Iterator[Row]:
    """Yields names and values, as many pairs to a line as have room."""
    columns = max(1, width // 38)
    each = width // columns
    for at in range(0, len(items), columns):
        row: Row = []
        for name, value in items[at : at + columns]:
            row += [(f" {name:<17.17} ", LABEL), (clean(value)[: max(0, each - 20)].ljust(max(0, each - 19)), VALUE)]
        yield row
