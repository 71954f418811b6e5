# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The terminal panel of a training run; plain lines where there is no terminal."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, TextIO

from torchrl_ext.record.panel_board import PanelBoard
from torchrl_ext.record.panel_painter import PanelPainter
from torchrl_ext.record.spectrum import spectrum_style

if TYPE_CHECKING:
    from torchrl_ext.record.panel_terminal import Terminal
    from torchrl_ext.record.system_metrics import SystemSample

__all__ = ["Panel"]

_NOTHING: Mapping[str, float] = MappingProxyType({})


class Panel:
    """Shows a run while it trains: views on the keys 1 to 4, ``q`` to stop it.

    Terminal    frames of the terminal's height less one line; descriptors 1 and 2 lead to ``output`` meanwhile, also in
                processes started after :meth:`start`. Standard input, where it is a terminal, gives single keys.
    Elsewhere   one plain line every ``print_every`` seconds while the counters move, without an escape byte. The same
                on a terminal without rich.
    Threads     the caller's thread stores numbers, a thread of the panel draws them, another one asks ``sampler`` each
                second. A fault of drawing ends the frames, never the run.
    Metrics     the Overview knows ``train/return``, ``eval/return``, ``collector/wait_ms``, ``collector/ring_fill``,
                ``collector/ring_slots``, ``collector/policy_lag_updates``, ``learner/update_ms``,
                ``learner/busy_share``, ``learner/wait_share``, ``utd/requested`` and ``utd/measured`` (updates per
                frame). Without ``learner/update_ms`` it is the busy time of an update, without ``utd/measured`` it
                comes from the counters. What is not known is ``N/A``. Of a learner that writes back into its replay
                there are ``train_ratio`` and ``train_ratio/requested`` (replayed steps per frame), and
                ``write_back/pending``, ``write_back/wait_ms``, ``write_back/stale_share`` and
                ``write_back/superseded_share``.

    Keyword Args:
        title (str): of the run.
        total_frames (int, optional): rows at which the run ends. Defaults to None (unknown).
        time_budget (float, optional): seconds at which it ends. Defaults to None (unknown).
        print_every (float): seconds between plain lines. Defaults to 5.
        sampler (callable, optional): returns a :class:`~torchrl_ext.record.system_metrics.SystemSample`, in a thread of
            its own. Without one there is no System view.
        stream (TextIO, optional): where to write. Defaults to ``sys.stdout``.
        refresh_per_second (float): frames per second; keys are answered at once. Defaults to 4.
        output (Path, optional): file that standard output and error are appended to while frames are drawn. None is a
            temporary one, whose last 64 KiB are written to standard error by :meth:`stop`.

    Raises:
        ValueError: if a number is not positive or ``TORCHRL_EXT_CPU_SPECTRUM`` names no style. Nothing is drawn.

    Examples:
        >>> import io
        >>> stream = io.StringIO()
        >>> with Panel(title="pendulum", total_frames=100, stream=stream) as panel:
        ...     panel.update(frames=50, updates=25, seconds=2.0, metrics={"train/return": -3.0}, note="return -3.0")
        >>> stream.getvalue()
        ' 50.0 %  50 frames  0 frames/s  25 updates  0.0 updates/s  0:02 elapsed  0:02 left  return -3.0\\n'
    """

    def __init__(
        self,
        *,
        title: str,
        total_frames: int | None = None,
        time_budget: float | None = None,
        print_every: float = 5.0,
        sampler: Callable[[], SystemSample] | None = None,
        stream: TextIO | None = None,
        refresh_per_second: float = 4.0,
        output: Path | None = None,
    ) -> None:
        numbers = {"total_frames": total_frames, "time_budget": time_budget, "print_every": print_every}
        for name, value in {**numbers, "refresh_per_second": refresh_per_second}.items():
            if value is not None and not value > 0:
                raise ValueError(f"Panel: {name} must be positive, got {value}; nothing was drawn.")
        self._stream = sys.stdout if stream is None else stream
        style = spectrum_style(unicode="utf" in (getattr(self._stream, "encoding", None) or "").lower())
        self._board = PanelBoard(title, total_frames, time_budget, style)
        self._board.system_error = "" if sampler else "no sampler of system metrics"
        self._sampler, self._output = sampler, output
        self._print_every, self._draw_every = print_every, 1 / refresh_per_second
        self._painter: PanelPainter | None = None
        self._is_stopped, self._owner = False, os.getpid()

    @property
    def should_quit(self) -> bool:
        """Whether ``q`` was pressed: the run is to stop as after one SIGINT."""
        return self._board.should_quit

    def start(self) -> None:
        """Takes the terminal, where there is one, and begins to draw; nothing when it was started before."""
        if self._painter is not None or self._is_stopped:
            return
        atexit.register(self.stop)
        # Nothing is changed before stop() knows of the painter: a Ctrl-C may come between any two instructions.
        self._painter = PanelPainter(
            self._board,
            self._stream,
            terminal=self._terminal(),
            sampler=self._sampler,
            print_every=self._print_every,
            draw_every=self._draw_every,
        )
        try:
            self._painter.start()
        except BaseException:
            self._painter.stop()
            self._painter = None
            raise
        if self._board.counts is not None:
            self._painter.wake()

    def _terminal(self) -> Terminal | None:
        if not self._stream.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
            return None
        if importlib.util.find_spec("rich") is None:
            self._board.say("Panel: frames need rich (pip install 'torchrl_ext[sota]'); plain lines instead.")
            return None
        from torchrl_ext.record.panel_terminal import Terminal

        return Terminal(self._stream, output=self._output)

    def update(
        self,
        *,
        frames: int,
        updates: int,
        seconds: float,
        metrics: Mapping[str, float],
        stages: Mapping[str, float] = _NOTHING,
        note: str = "",
    ) -> None:
        """Tells where the run stands; stores it and returns, so that a loop may call it at every step.

        Keyword Args:
            frames (int): rows collected.
            updates (int): gradient steps.
            seconds (float): of training.
            metrics (Mapping): numbers by name, copied; those not named keep their value. Tensors are shown as ``N/A``:
                the panel never reads a device.
            stages (Mapping): mean seconds by stage; replaces the last one unless empty. ``"env/physics"`` is a part of
                ``"env"``; deeper parts are not shown. Must not be changed afterwards.
            note (str): what else to show, such as the newest return.
        """
        board = self._board
        if metrics:
            board.metrics.update(metrics)
        if stages:
            board.stages = stages
        is_first = board.counts is None
        board.counts = (frames, updates, seconds, note)
        if is_first and self._painter is not None and not self._is_stopped:
            self._painter.wake()

    def say(self, text: str) -> None:
        """Writes lines above the frame, or plain lines; control characters become spaces.

        Before :meth:`start` lines are kept for it, after :meth:`stop` they are written at once.
        """
        if self._painter is None:
            self._board.say(text)
        else:
            self._painter.say(text)

    def point(self, series: str, frames: float, value: float) -> None:
        """Adds a point to a curve of the Learning view; one that is not finite is left out."""
        with self._board.lock:
            self._board.curves.add(series, frames, value)

    def stop(self) -> None:
        """Shows the last state, ends the thread and puts the terminal back; may be called twice."""
        # A forked process has the panel's memory, but the terminal is its parent's.
        if self._is_stopped or self._owner != os.getpid():
            return
        if self._painter is not None:
            self._painter.stop()
        # Only now: a Ctrl-C in between leaves the rest to atexit.
        self._is_stopped = True
        atexit.unregister(self.stop)

    def __enter__(self) -> Panel:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
