# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""How many gradient steps are due: a fixed ratio to collected rows, behind a warm-up gate."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any


class UpdateGovernor:
    """Counts gradient steps against collected rows, exactly.

    One vector step is ``rows_per_step`` rows. No step is due while fewer than ``learning_starts`` rows were collected;
    the vector step that reaches it is the first one that counts, and every vector step from there on is worth
    ``ratio`` gradient steps. Fractions add up (a ratio of 0.5 gives one gradient step every second time), so at any
    time ``updates == floor(ratio * counted rows / rows_per_step)`` once all that was due is done.

    Only rows count, never calls: runs of any length, from any number of collectors, give the same total.

    Args:
        ratio (float): gradient steps per vector step, positive.

    Keyword Args:
        rows_per_step (int): rows of one vector step, the number of streams.
        learning_starts (int): rows below which nothing is due. Defaults to 0.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> governor = UpdateGovernor(2, rows_per_step=64, learning_starts=1000)
        >>> governor.due(960), governor.due(1024), governor.due(1088)
        (0, 2, 4)
        >>> governor.count(3)
        >>> governor.due(1088), governor.expected(6400)
        (1, 170)
    """

    updates: int
    """Gradient steps counted so far."""

    def __init__(self, ratio: float, *, rows_per_step: int, learning_starts: int = 0) -> None:
        if not 0 < ratio < math.inf:
            raise ValueError(f"UpdateGovernor: ratio must be positive and finite, got {ratio}.")
        if rows_per_step < 1 or learning_starts < 0:
            raise ValueError(
                "UpdateGovernor: rows_per_step must be >= 1 and learning_starts >= 0, got "
                f"{rows_per_step} and {learning_starts}."
            )
        self.rows_per_step, self.learning_starts = rows_per_step, learning_starts
        # str: the fraction that was written, 3/10 for 0.3, and not the nearest binary one.
        self.ratio = Fraction(str(ratio))
        self.updates = 0
        self.rearm(0)

    def rearm(self, rows: int) -> None:
        """Closes the gate again after ``rows`` rows, as when training goes on with an empty replay."""
        self._base_rows, self._base_updates = rows, self.updates

    def settle(self, rows: int, owed: int) -> None:
        """Counts on from ``rows``, where ``owed`` steps are due: those before were done at another ratio, or gate."""
        self._base_updates += self.updates + owed - self.expected(rows)

    @property
    def warm_up_rows(self) -> int:
        """Rows before the first vector step that counts, since the gate was closed."""
        return max(0, -(-self.learning_starts // self.rows_per_step) - 1) * self.rows_per_step

    def is_open(self, rows: int) -> bool:
        """Whether ``rows`` collected rows are enough to learn."""
        return rows - self._base_rows >= self.learning_starts

    def expected(self, rows: int) -> int:
        """Returns the gradient steps that belong to ``rows`` collected rows, those already counted included."""
        if not self.is_open(rows):
            return self._base_updates
        counted = max(0, rows - self._base_rows - self.warm_up_rows)
        return self._base_updates + int(self.ratio * counted / self.rows_per_step)

    def due(self, rows: int) -> int:
        """Returns the gradient steps that are missing after ``rows`` collected rows."""
        return max(0, self.expected(rows) - self.updates)

    def count(self, updates: int = 1) -> None:
        """Counts gradient steps that were done."""
        self.updates += updates

    def state_dict(self) -> dict[str, int]:
        """Returns the counters; ratio and gate are the constructor's."""
        return {"updates": self.updates, "base_rows": self._base_rows, "base_updates": self._base_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`.

        Raises:
            ValueError: if a counter is missing, or rows or updates are negative. Nothing was changed.
        """
        names = ("updates", "base_rows", "base_updates")
        values: list[Any] = [state.get(name) for name in names]
        # A base is below zero where the ratio was raised.
        if not all(isinstance(value, int) for value in values) or min(values[:2]) < 0:
            raise ValueError(
                f"UpdateGovernor: the state must have the counters {list(names)}, got {dict(state)}. "
                "Nothing was changed."
            )
        self.updates, self._base_rows, self._base_updates = values
