# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What a worker process does before and around its target.

The module is loaded by path and imports nothing of ours, because importing the package imports torch, two seconds that
a target may not need.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from multiprocessing.process import current_process
from typing import Any, TypedDict

__all__ = ["Channel", "Header", "StopAsked", "run"]

#: Seconds between two looks at the parent, and from its end to the end of the worker.
_WATCH_EVERY, _GRACE = 0.5, 1.0
#: Of a traceback that the parent gets to see.
REPORT_BYTES = 1 << 16


class Header(TypedDict):
    """What comes before the payload."""

    name: str
    parent: int
    """Its process id."""
    sys_path: list[str]
    argv: list[str]
    cores: list[int] | None
    num_threads: int
    connection: int
    lifeline: int
    """A pipe that only the parent can write, and never does."""
    report: int
    """A file for the traceback of the target; writing it never waits for a reader, as a socket may."""
    inherited: list[int]
    """Every descriptor that was handed over."""


class StopAsked(EOFError):  # noqa: N818  # no error: it ends the worker with exit code 0
    """The parent asked the worker to end; nothing more will come."""


class Channel:
    """The worker's end of the messages; what it sends is pickled by value, tensors too.

    Args:
        connection (Connection): to the parent.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: Any) -> None:
        """Sends a message; waits while the parent has some hundred kilobytes to read."""
        import cloudpickle  # type: ignore[import-untyped]  # may lie on the parent's path alone

        self._connection.send_bytes(cloudpickle.dumps(message))

    def poll(self, timeout: float = 0.0) -> bool:
        """Whether :meth:`recv` returns, or raises, at once; waits for that up to ``timeout`` seconds."""
        return self._connection.poll(timeout)

    def recv(self) -> Any:
        """Waits for the next message; the worker ends with its parent, so this needs no deadline.

        Raises:
            StopAsked: when the parent wants the worker to end. A target may let it pass.
        """
        try:
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise StopAsked("the parent asked the worker to end") from None

    def shut(self) -> None:
        """Lets the parent see the end at once, whatever forked children still hold the descriptor."""
        duplicate = socket.socket(fileno=os.dup(self._connection.fileno()))
        with duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)


def run(boot: int) -> None:
    """Runs the target that the file ``boot`` holds, and exits: 0 at its end, 1 after an exception."""
    with os.fdopen(boot, "rb") as file:
        header: Header = pickle.load(file)
        faulthandler.enable()
        watcher = threading.Thread(
            target=_end_with_parent, args=(header["parent"], header["lifeline"]), name="parent-watcher", daemon=True
        )
        watcher.start()
        channel = Channel(Connection(header["connection"]))
        try:
            _settle(header)
            # What is imported lives as long as the worker. To look through it for garbage again and again meanwhile,
            # and once more at the end, takes 1.4 s of the 3.7 that TorchRL takes to be imported and left.
            gc.disable()
            target, arguments = pickle.load(file)
            gc.freeze()
            gc.enable()
            file.close()
            if "torch" in sys.modules:  # imported later, torch takes the number from the environment
                sys.modules["torch"].set_num_threads(header["num_threads"])
            target(channel, **arguments)
        except StopAsked:
            pass
        except Exception as error:
            _report(error, header["report"])
            channel.shut()
            raise SystemExit(1) from None


def _settle(header: Header) -> None:
    for descriptor in header["inherited"]:  # programs that the target starts have no business with them
        os.set_inheritable(descriptor, False)
    if header["cores"] is not None:
        os.sched_setaffinity(0, header["cores"])
    sys.path[:] = header["sys_path"]
    sys.argv[:] = header["argv"]
    current_process().name = header["name"]


def _report(error: Exception, report: int) -> None:
    text = "".join(traceback.format_exception(error))
    sys.stderr.write(text)
    sys.stderr.flush()
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    head = f"{summary[:4096]}\n".encode(errors="replace")
    os.pwrite(report, head + text.encode(errors="replace")[len(head) - REPORT_BYTES :], 0)


def _end_with_parent(parent: int, lifeline: int) -> None:
    """Kills the process group soon after the parent is gone.

    The end of the pipe tells at once, but not when a process that the parent had forked holds the other end as well;
    the parent's id tells in any case. (A death signal from the kernel would come when the parent's *thread* ends.) The
    thread runs whenever the target releases the GIL; a C call that keeps it delays the end until it returns.
    """
    poller = select.poll()
    poller.register(lifeline, select.POLLIN)
    while os.getppid() == parent and not poller.poll(1000 * _WATCH_EVERY):
        pass
    time.sleep(_GRACE)  # the target sees the end of its channel, and may close what it holds
    os.killpg(0, signal.SIGKILL)
