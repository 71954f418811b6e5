# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The threads of a panel: one draws and answers keys, one asks for the metrics of the machine."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from torchrl_ext.record.panel_board import PanelBoard
from torchrl_ext.record.panel_frame import clean
from torchrl_ext.record.panel_layout import VIEWS, render

if TYPE_CHECKING:
    from torchrl_ext.record.panel_terminal import Terminal
    from torchrl_ext.record.system_metrics import SystemSample

__all__ = ["PanelPainter"]

_SAMPLE_EVERY, _FIRST_SAMPLE_AGAIN = 1.0, 0.2
_JOIN_TIMEOUT = 5.0


class PanelPainter:
    """Draws a board from :meth:`start` to :meth:`stop`: frames on a terminal, plain lines on any other stream.

    A fault of drawing, such as a terminal that is gone, puts the terminal back and goes on with plain lines.

    Args:
        board (PanelBoard): what is drawn.
        stream (TextIO): of plain lines.

    Keyword Args:
        terminal (Terminal, optional): of frames; opened by :meth:`start`, closed by :meth:`stop`.
        sampler (callable, optional): returns a :class:`~torchrl_ext.record.system_metrics.SystemSample`.
        print_every (float): seconds between plain lines.
        draw_every (float): seconds between frames.
    """

    def __init__(
        self,
        board: PanelBoard,
        stream: TextIO,
        *,
        terminal: Terminal | None,
        sampler: Callable[[], SystemSample] | None,
        print_every: float,
        draw_every: float,
    ) -> None:
        self._board, self._stream, self._terminal, self._sampler = board, stream, terminal, sampler
        self._print_every, self._draw_every = print_every, draw_every
        self._view = 1
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._wake_reader, self._wake_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="panel", daemon=True)

    def start(self) -> None:
        """Takes the terminal and starts the threads; :meth:`stop` it also when this raises or is interrupted."""
        if self._terminal is None:
            self.write_plain(self._board.take_unsaid())
        else:
            self._terminal.open()
            if self._sampler is not None:
                # A driver may hang: nobody waits for this one, neither keys nor the end of the run.
                threading.Thread(target=self._sample, name="panel-sampler", daemon=True).start()
        self._thread.start()

    def wake(self) -> None:
        """Has the thread look at the board now; nothing once it ended."""
        if self._thread.is_alive():
            os.write(self._wake_writer, b"!")

    def say(self, text: str) -> None:
        """Writes lines above the frame with the next one, or now where there is none."""
        self._board.say(text)
        with self._lock:
            if self._terminal is None:
                self.write_plain(self._board.take_unsaid())

    def write_plain(self, lines: Sequence[str]) -> None:
        """Writes lines to the stream; one that is closed or broken does not end the run."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._stream.write("".join(f"{line}\n" for line in lines))
            self._stream.flush()

    def stop(self) -> None:
        """Draws once more, ends the thread and puts the terminal back; may be called again after an interruption."""
        self._stopping.set()
        self.wake()
        if self._thread.is_alive():  # not when it could not be started
            self._thread.join(_JOIN_TIMEOUT)
        self._leave()
        if not self._thread.is_alive():
            self._close_pipe()

    def _close_pipe(self) -> None:
        if self._wake_reader >= 0:
            os.close(self._wake_writer)
            os.close(self._wake_reader)
            self._wake_reader = -1

    def _leave(self) -> None:
        with self._lock:
            if self._terminal is not None:
                self._terminal.close()
                self._terminal = None
            self.write_plain(self._board.take_unsaid())

    def _run(self) -> None:
        terminal = self._terminal
        if terminal is not None:
            try:
                self._draw_frames(terminal)
                return
            except Exception as error:
                self._leave()
                self.write_plain(
                    [f"Panel: frames could not be drawn ({clean(repr(error))}); plain lines from here on."]
                )
        self._print_lines()

    def _draw_frames(self, terminal: Terminal) -> None:
        while True:
            last = self._stopping.is_set()
            now = time.monotonic()
            if terminal.in_foreground:
                terminal.keep_modes()
                width, height = terminal.size
                # The last line stays empty: the cursor rests there, and nothing scrolls.
                frame = render(self._board.state(now, self._view), width, max(1, height - 1))
                terminal.draw(frame, self._board.take_unsaid())
            if last:
                return
            self._await_key(terminal, now + self._draw_every)

    def _await_key(self, terminal: Terminal, until: float) -> None:
        """Returns at a time, after a key that changes the frame, or when woken."""
        while (left := until - time.monotonic()) > 0:
            keys = terminal.keys if terminal.in_foreground else None
            ready, _, _ = select.select([self._wake_reader] + ([] if keys is None else [keys]), [], [], left)
            if self._wake_reader in ready:
                os.read(self._wake_reader, 4096)
                return
            if ready and self._press(terminal.read_keys()):
                return

    def _press(self, keys: str) -> bool:
        before = self._view, self._board.should_quit
        for key in keys:
            if key in "1234"[: len(VIEWS)]:
                self._view = int(key)
            elif key in "qQ":
                self._board.should_quit = True
        return before != (self._view, self._board.should_quit)

    def _print_lines(self) -> None:
        printed: Any = None
        due = time.monotonic()
        while True:
            last = self._stopping.is_set()
            now, counts = time.monotonic(), self._board.counts
            if now >= due or last:
                if counts != printed:
                    self.write_plain([self._board.line(now)])
                    printed = counts
                due = now + self._print_every
            if last:
                return
            # Nothing to print before the first counters, which wake.
            ready, _, _ = select.select([self._wake_reader], [], [], max(0.0, due - now) if printed else None)
            if ready:
                os.read(self._wake_reader, 4096)
                due = due if printed else now

    def _sample(self) -> None:
        while not self._stopping.is_set():
            try:
                assert self._sampler is not None
                sample = self._sampler()
                if self._board.system is None and not any(sample.cpu.load):
                    # Loads are differences: a first one of zeros was not measured yet.
                    self._stopping.wait(_FIRST_SAMPLE_AGAIN)
                    sample = self._sampler()
                self._board.system, self._board.system_error = sample, ""
            except Exception as error:
                self._board.system_error = f"system metrics: {clean(repr(error))}"
            self._stopping.wait(_SAMPLE_EVERY)
