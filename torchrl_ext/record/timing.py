# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Where the time of a loop goes, by stages that do not nest."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from time import perf_counter
from types import TracebackType
from typing import NamedTuple

import torch

__all__ = ["StageTimer", "StageTotal"]

#: Entries of one stage that may be on their way on the device; what comes meanwhile is not measured.
_PAIRS = 64


class StageTotal(NamedTuple):
    """What a stage took."""

    seconds: float
    """Of the entries that were measured."""
    entries: int
    """How many those are."""


class StageTimer:
    """Seconds of the first-level stages of a loop.

    Host        a stage takes as long as its block does.
    Device      with a CUDA ``device``, a stage takes as long as its device was between the block's two ends on the
                current stream. That is read at later entries of the same stage, when it is known: nothing waits for the
                device, the last entry may be missing, and entries are left out when 64 are on their way or the stream
                is being captured.
    Nesting     none. A block that raises counts as well.
    Threads     one enters stages; any other may call :meth:`means` and :meth:`totals`, which ask the device nothing.

    Args:
        stages (sequence of str): distinct names, without ``"/"``: a stage has no parts.

    Keyword Args:
        device (torch.device, optional): where the work is done. None or a CPU is the host.
        device_stages (collection of str, optional): the stages measured on a CUDA ``device``; the others are measured
            on the host. Defaults to all.

    Raises:
        ValueError: for names that are empty, repeated or have a ``"/"``, and for unknown ``device_stages``.

    Examples:
        >>> timer = StageTimer(["sample", "update"])
        >>> for _ in range(3):
        ...     with timer("sample"):
        ...         pass
        >>> timer.totals()["sample"].entries
        3
        >>> sorted(timer.means())
        ['sample']
    """

    def __init__(
        self,
        stages: Sequence[str],
        *,
        device: torch.device | None = None,
        device_stages: Collection[str] | None = None,
    ) -> None:
        names = tuple(stages)
        if len(set(names)) < len(names) or not all(name and "/" not in name for name in names):
            raise ValueError(f"StageTimer: stages must be distinct names without '/', got {list(names)}.")
        timed = names if device_stages is None else tuple(device_stages)
        if not set(timed) <= set(names):
            raise ValueError(f"StageTimer: device_stages must be among {list(names)}, got {list(timed)}.")
        #: Name of the stage that was entered, None between stages.
        self.current: str | None = None
        self._stages: dict[str, _Stage] = {}
        for name in names:
            if device is not None and device.type == "cuda" and name in timed:
                self._stages[name] = _DeviceStage(self, name, device)
            else:
                self._stages[name] = _Stage(self, name)

    def __call__(self, name: str) -> _Stage:
        """Returns the context of a stage: ``with timer("sample"): ...``.

        Raises:
            ValueError: for a name that is not among the stages.
            RuntimeError: when the context is entered inside a stage; that stage goes on.
        """
        try:
            return self._stages[name]
        except KeyError:
            raise ValueError(f"StageTimer: a stage must be one of {list(self._stages)}, got {name!r}.") from None

    def totals(self) -> dict[str, StageTotal]:
        """Returns what each stage took since construction; differences of two calls are what happened meanwhile."""
        return {name: StageTotal(stage.seconds, stage.entries) for name, stage in self._stages.items()}

    def means(self) -> dict[str, float]:
        """Returns the mean seconds of an entry since construction, of the stages that are known."""
        return {name: total.seconds / total.entries for name, total in self.totals().items() if total.entries}


class _Stage:
    """Host time. One object per stage: making one for each entry would double the cost."""

    __slots__ = ("_began", "_name", "_timer", "entries", "seconds")

    def __init__(self, timer: StageTimer, name: str) -> None:
        self._timer, self._name = timer, name
        self._began = self.seconds = 0.0
        self.entries = 0

    def __enter__(self) -> None:
        timer = self._timer
        if timer.current is not None:
            raise RuntimeError(
                f"StageTimer: stages must not nest, got {self._name!r} inside {timer.current!r}, which goes on."
            )
        timer.current = self._name
        self._began = perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += perf_counter() - self._began
        self.entries += 1
        self._timer.current = None


class _DeviceStage(_Stage):
    """Device time between two CUDA events."""

    __slots__ = ("_device", "_free", "_made", "_open", "_pending")

    def __init__(self, timer: StageTimer, name: str, device: torch.device) -> None:
        super().__init__(timer, name)
        self._device, self._made = device, 0
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._open: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def __enter__(self) -> None:
        super().__enter__()
        # Of a stream that is being captured events tell nothing, and asking for one would break the capture.
        if torch.cuda.is_current_stream_capturing():
            return
        # Here and not in means(), which another thread may call while this one captures a graph.
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.popleft()
            self.seconds += first.elapsed_time(last) / 1e3
            self.entries += 1
            self._free.append((first, last))
        if not self._free and self._made < _PAIRS:
            self._made += 1
            self._free.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        if self._free:
            self._open = self._free.pop()
            self._open[0].record(torch.cuda.current_stream(self._device))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open[1].record(torch.cuda.current_stream(self._device))
            self._pending.append(self._open)
            self._open = None
        self._timer.current = None
