# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""When a loop does something beside its steps, and when it is asked to stop."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Every:
    """Says yes once per interval of a growing number.

    Args:
        interval (float, optional): None never says yes.
        start (float): where the number stands.
    """

    def __init__(self, interval: float | None, start: float = 0.0) -> None:
        self._interval, self._begin = interval, 0.0
        self._last = start if interval is None else start // interval

    def __call__(self, value: float) -> bool:
        if self._interval is None or (value - self._begin) // self._interval <= self._last:
            return False
        self._last = (value - self._begin) // self._interval
        return True

    def begin_anew(self, value: float) -> None:
        """Has an interval begin here, as when what is done takes as long as an interval itself."""
        self._begin, self._last = value, 0


class StopSignal:
    """Turns SIGINT and SIGTERM into a request to stop; the second one also asks to stop quickly, the third raises."""

    def __init__(self) -> None:
        self.count = 0
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in EXIT_CODES:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.number = number
        if self.count > 2:
            raise KeyboardInterrupt

    @property
    def exit_code(self) -> int:
        """Of the process: 0 when nothing was received, else 128 plus the signal."""
        return EXIT_CODES.get(self.number, 0) if self.count else 0  # type: ignore[call-overload]

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
