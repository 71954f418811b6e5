# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""A worker process as its parent sees it."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from torchrl_ext.collectors._launch import launch
from torchrl_ext.collectors._spawn import Payload
from torchrl_ext.collectors._worker_files import WorkerFiles
from torchrl_ext.transport.errors import RingPeerDied

__all__ = ["WorkerProcess"]

#: Seconds: between two looks at a worker that is waited for; for a message under way; for a killed worker to be gone.
_LOOK_EVERY, _SEND_WITHIN, _RECV_WITHIN, _GONE_WITHIN = 0.1, 30, 5, 5.0


class WorkerProcess:
    """A process that runs a :class:`Payload`, in a session of its own, and never outlives its parent.

    Start      a new interpreter that does not import the caller's ``__main__``, with its path, folder and arguments;
               not daemonic, so the target may have children. Ctrl-C in a terminal does not reach it.
    Messages   pickled by value, in order. What was sent before a death can still be read.
    Death      a worker found dead takes the rest of its process group with it, so that no grandchild stays. A worker
               whose parent is gone, or closed this object, ends within 2 s (later while a C call keeps the GIL).
    Owner      the process that made it: in a forked copy ``close`` only closes descriptors, ``stop`` and ``kill`` do
               nothing, and no other method is of use.

    Args:
        payload (Payload): what to run. It is not closed, for a restart.

    Keyword Args:
        name (str): for errors.
        output (Path, optional): a file that stdout and stderr are appended to, made with mode 0600. Defaults to a
            temporary one without a name.
        env (mapping, optional): environment variables on top of this process's.
        cores (collection of int, optional): that the worker may use. Defaults to those of this process.
        num_threads (int, optional): of torch, OpenMP and MKL. Defaults to 1.

    Raises:
        ValueError: when no core of ``cores`` is this process's to give, or for less than one thread.
        RuntimeError: when the payload is closed.
        OSError: when the process or its files cannot be made. Nothing is left open.
    """

    pid: int
    """Its process id, and that of its process group."""

    def __init__(
        self,
        payload: Payload,
        *,
        name: str,
        output: Path | None = None,
        env: Mapping[str, str] | None = None,
        cores: Collection[int] | None = None,
        num_threads: int = 1,
    ) -> None:
        usable = os.sched_getaffinity(0)
        if num_threads < 1 or (cores is not None and not usable & set(cores)):
            raise ValueError(
                f"WorkerProcess: num_threads must be at least 1 and cores name some of {sorted(usable)}, got "
                f"{num_threads} and {cores}. Nothing was started."
            )
        self.name, self._owner = name, os.getpid()
        self._lock = threading.Lock()
        self._exitcode: int | None = None
        self._message: bytes | None = None
        self._resources: ExitStack | None = None
        with ExitStack() as resources:
            self._files = WorkerFiles(output)
            resources.callback(self._files.close)
            self._popen, self._connection = launch(
                payload,
                resources,
                name=name,
                files=self._files,
                env=env or {},
                cores=cores,
                num_threads=num_threads,
                send_within=_SEND_WITHIN,
                recv_within=_RECV_WITHIN,
            )
            self._resources = resources.pop_all()
        self.pid = self._popen.pid

    @property
    def exitcode(self) -> int | None:
        """None while the worker lives; negative for a signal."""
        return None if self.is_alive() else self._exitcode

    def is_alive(self) -> bool:
        """Whether the process has not ended; one system call (a stopped process is alive: see :class:`Heartbeat`)."""
        if self._exitcode is not None:
            return False
        try:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return True
            untaken = True
        except ChildProcessError:  # somebody else took the exit code
            untaken = False
        with self._lock:
            if self._exitcode is None:
                if untaken:  # until then no other group can have its number
                    self._signal_group()
                self._exitcode = self._popen.wait()
        return False

    def send(self, message: Any) -> None:
        """Sends a message, pickled by value.

        Raises:
            RuntimeError: with the traceback, when the target raised.
            RingPeerDied: when the worker is dead.
            TimeoutError: when it did not take the message within 30 s and the socket is full. Then stop it: part of the
                message may be sent.
        """
        data = cloudpickle.dumps(message)
        try:
            self._connection.send_bytes(data)
        except BlockingIOError:
            raise TimeoutError(
                f"WorkerProcess: {self._title} must take a message within {_SEND_WITHIN} s; {self.failure()}."
            ) from None
        except OSError:
            raise self._death("a message was to be sent") from None

    def poll(self, timeout: float = 0.0) -> bool:
        """Whether a message is there, after at most ``timeout`` seconds; for a death it raises as :meth:`recv`."""
        deadline = time.monotonic() + timeout
        while self._message is None:
            alive, left = self.is_alive(), deadline - time.monotonic()
            try:
                if self._connection.poll(min(max(left, 0.0), _LOOK_EVERY) if alive else 0.0):
                    self._message = self._connection.recv_bytes()
                    continue
            except BlockingIOError:
                raise TimeoutError(
                    f"WorkerProcess: {self._title} must finish a message within {_RECV_WITHIN} s; {self.failure()}."
                ) from None
            except (EOFError, OSError):
                alive = False
            if not alive:
                raise self._death("a message was awaited")
            if left <= 0.0:
                return False
        return True

    def recv(self, timeout: float, *, what: str = "a message") -> Any:
        """Returns the next message.

        Args:
            timeout (float): seconds to wait for it.

        Keyword Args:
            what (str, optional): names it in the error.

        Raises:
            RuntimeError: with type, message and traceback, when the target raised and all messages were read.
            RingPeerDied: when the worker ended otherwise and all messages were read; with its exit code and output.
            TimeoutError: when nothing came in time, and a later message can still be received; or when a message began
                and did not go on for 5 s: then stop the worker.
        """
        if not self.poll(timeout):
            raise TimeoutError(
                f"WorkerProcess: {self._title} must send {what} within {timeout} s, nothing came; {self.failure()}."
            )
        data, self._message = self._message, None
        assert data is not None
        return pickle.loads(data)

    def failure(self) -> str:
        """Returns what became of the worker, in words, for an error: exit code or signal, traceback or output."""
        if report := self._files.traceback():
            return f"{self._title} raised {report}"
        code = self.exitcode
        if code is None:
            state = "is alive"
        elif code < 0:
            state = f"was killed by {_signal_name(-code)} (exit code {code})"
        else:
            state = f"ended with exit code {code}"
        tail = self.tail()
        return f"{self._title} {state}" + (f"; the end of its output:\n{tail}" if tail else "; it printed nothing")

    def tail(self, lines: int = 20) -> str:
        """Returns the last lines of its output, at most 16 KiB of it."""
        return self._files.tail(lines)

    def stop(self, timeout: float) -> int | None:
        """Asks the worker to end (its channel ends), waits, then kills its process group.

        Args:
            timeout (float): seconds to wait before.

        Returns:
            int: the exit code; None if even a killed process is not gone, as one that waits for a device.
        """
        if self._resources is not None and os.getpid() == self._owner and self.is_alive():
            with socket.socket(fileno=os.dup(self._connection.fileno())) as ours, suppress(OSError):
                ours.shutdown(socket.SHUT_WR)
            self._wait(timeout)
        return self.kill()

    def kill(self) -> int | None:
        """Kills the process group and returns the exit code, as :meth:`stop` does."""
        if os.getpid() != self._owner:
            return None
        with self._lock:
            if self._exitcode is None:
                self._signal_group()
        self._wait(_GONE_WITHIN)
        return self._exitcode

    def close(self) -> None:
        """Kills the worker if it lives and frees every descriptor; a second call does nothing.

        :attr:`exitcode`, :meth:`failure` and :meth:`tail` still answer.
        """
        if self._resources is not None:
            self.kill()
            resources, self._resources = self._resources, None
            resources.close()

    def __del__(self) -> None:
        if self.__dict__.get("_resources") is not None:
            self.close()

    @property
    def _title(self) -> str:
        return f"worker {self.name!r} (pid {self.pid})"

    def _death(self, what: str) -> RuntimeError:
        """Returns the error for a worker whose end of the channel is gone."""
        if self._resources is None:
            return RuntimeError(f"WorkerProcess: {self._title} must not be closed when {what}.")
        if self._files.traceback():
            return RuntimeError(f"WorkerProcess: {what}, but {self.failure()}")
        self._wait(_GONE_WITHIN)  # its descriptors close before it has an exit code
        return RingPeerDied(f"WorkerProcess: {what}, but {self.failure()}")

    def _wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)

    def _signal_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
