# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What a worker leaves behind for its parent to read."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from torchrl_ext.collectors._child import REPORT_BYTES

__all__ = ["WorkerFiles"]

_TAIL_BYTES = 1 << 14


class WorkerFiles:
    """Files that a worker writes: its output, and the traceback of its target.

    Args:
        path (Path, optional): of the output, which is appended to, or made with mode 0600. Defaults to a temporary file
            without a name.
    """

    output: int
    """Descriptor of the output."""
    report: int
    """Descriptor of the traceback's file, which has no name."""

    def __init__(self, path: Path | None) -> None:
        self._closed: tuple[str, str] | None = None
        if path is None:
            with tempfile.TemporaryFile() as file:
                self.output = os.dup(file.fileno())
        else:
            self.output = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._start = os.fstat(self.output).st_size
        try:
            self.report = os.memfd_create("report", os.MFD_CLOEXEC)
        except OSError:
            os.close(self.output)
            raise

    def traceback(self) -> str:
        """Returns type and message of the exception that ended the target, then its traceback; ``""`` without one."""
        if self._closed is not None:
            return self._closed[0]
        return os.pread(self.report, REPORT_BYTES, 0).decode(errors="replace").rstrip()

    def tail(self, lines: int) -> str:
        """Returns the last lines of the output, at most 16 KiB of it."""
        if self._closed is not None:
            text = self._closed[1]
        else:
            start = max(self._start, os.fstat(self.output).st_size - _TAIL_BYTES)
            text = os.pread(self.output, _TAIL_BYTES, start).decode(errors="replace")
        return "\n".join(text.rstrip().splitlines()[-lines:])

    def close(self) -> None:
        """Closes the files; what was in them can still be asked for."""
        if self._closed is None:
            self._closed = self.traceback(), self.tail(_TAIL_BYTES)
            os.close(self.output)
            os.close(self.report)
