# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The terminal of a panel: frames in place, lines above them, single keys, and everything as it was afterwards."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
import termios
import tty
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, TextIO

from torchrl_ext.record.panel_frame import Frame

__all__ = ["Terminal"]

_ESCAPE_KEYS = re.compile(rb"\x1b(\[[0-9;?]*[ -/]*[@-~]|O.|.)?", re.DOTALL)
#: The end of an unnamed output file that is written to the terminal when the panel leaves it.
_TAIL = 64 * 1024


class Terminal:
    """Draws frames on a terminal that nobody else writes to meanwhile, from :meth:`open` to :meth:`close`.

    Frames     from the first line of the screen, written in one piece. What the screen showed before scrolls away.
    Output     those of the descriptors 1 and 2 that are this terminal lead to a file, also in processes that are
               started from now on: what they write cannot tear a frame.
    Keys       of standard input where that is a terminal, without Enter and without echo; Ctrl-C stays a signal.
    Background a stopped job or one in the background neither draws nor touches the terminal's modes.

    Args:
        stream (TextIO): a terminal.

    Keyword Args:
        output (Path, optional): the file, which is appended to. None is a temporary one, whose end is written to
            standard error by :meth:`close`.
    """

    def __init__(self, stream: TextIO, *, output: Path | None = None) -> None:
        from rich.console import Console

        self._log: IO[bytes] = tempfile.TemporaryFile() if output is None else open(output, "ab")
        stream.flush()
        self._fd = os.dup(stream.fileno())
        # Its file is never written to: it knows the terminal's colours and turns frames into text.
        self._console = Console(file=io.StringIO(), force_terminal=True, legacy_windows=False, width=80, height=24)
        self._encoding = stream.encoding or "utf-8"
        self._output = output
        self._saved: dict[int, int] = {}
        self._modes: tuple[int, list[Any]] | None = None
        self._drew = self._is_redirected = False

    def open(self) -> None:
        """Takes the terminal; :meth:`close` puts back as much as was taken when this is interrupted."""
        self._redirect()
        self._take_keys()

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines now; 80 and 24 where the terminal does not know."""
        columns, lines = os.get_terminal_size(self._fd)
        return columns or 80, lines or 24

    @property
    def keys(self) -> int | None:
        """The descriptor that keys are read from, None without any."""
        return None if self._modes is None else self._modes[0]

    @property
    def in_foreground(self) -> bool:
        """Whether the terminal is this process' to use."""
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return True  # not the controlling terminal: no job control here

    def _redirect(self) -> None:
        # Not by name: in a container the terminal's may be unknown.
        terminal = os.fstat(self._fd).st_rdev
        for fd, stream in ((1, sys.stdout), (2, sys.stderr)):
            if os.isatty(fd) and os.fstat(fd).st_rdev == terminal:
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
                self._saved[fd], self._is_redirected = os.dup(fd), True
                os.dup2(self._log.fileno(), fd)

    def _take_keys(self) -> None:
        try:
            fd = sys.stdin.fileno()
            if os.isatty(fd):
                self._modes = (fd, termios.tcgetattr(fd))
                self.keep_modes()
        except (AttributeError, OSError, ValueError, termios.error):
            self._modes = None  # no standard input, or a replaced one

    def keep_modes(self) -> None:
        """Takes single keys again, should a shell have put its own modes back."""
        # From the background a change of modes would stop the process.
        if self._modes is not None and self.in_foreground:
            fd = self._modes[0]
            if termios.tcgetattr(fd)[3] & (termios.ICANON | termios.ECHO):
                tty.setcbreak(fd, termios.TCSANOW)

    def read_keys(self) -> str:
        """Returns the keys pressed, without arrows and the like; call it when :attr:`keys` is readable."""
        assert self._modes is not None
        pressed = os.read(self._modes[0], 256)
        if not pressed:
            self._modes = None  # hung up: it would be readable for ever
        return _ESCAPE_KEYS.sub(b"", pressed).decode("ascii", "ignore")

    def draw(self, frame: Frame, above: Sequence[str] = ()) -> None:
        """Draws a frame; ``above`` scrolls out at the top of the screen, into the terminal's own history."""
        self._console.size = (frame.width, frame.height)
        with self._console.capture() as capture:
            self._console.print(frame, end="")
        said = "".join(f"{line}\r\n" for line in above)
        # The cursor is hidden each time: a shell shows it when it puts a job back to the foreground.
        head = "\x1b[?2026h\x1b[?25l\x1b[H" + (f"\x1b[J{said}" if said else "")
        if not self._drew:
            self._drew, head = True, "\n" * self.size[1] + head
        self._write(head + capture.get().replace("\n", "\r\n") + "\x1b[J\x1b[?2026l")

    def _write(self, text: str) -> None:
        data = memoryview(text.encode(self._encoding, "replace"))
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        """Puts the terminal and the descriptors back; may be called twice, also after an interruption."""
        if self._fd < 0:
            return
        for fd, saved in [*self._saved.items()]:
            with contextlib.suppress(OSError, ValueError):
                (sys.stdout if fd == 1 else sys.stderr).flush()
            os.dup2(saved, fd)
            del self._saved[fd]
            os.close(saved)
        with contextlib.suppress(OSError, termios.error):
            if self._modes is not None and self.in_foreground:
                termios.tcsetattr(self._modes[0], termios.TCSANOW, self._modes[1])
            if self._drew:
                self._write("\x1b[?25h\x1b[0m")
        if self._output is None and self._is_redirected:
            self._replay()
        self._is_redirected, self._modes = False, None
        self._log.close()
        os.close(self._fd)
        self._fd = -1

    def _replay(self) -> None:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _TAIL))
        with contextlib.suppress(OSError):
            os.write(2, self._log.read())
