# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Starts the interpreter of a worker."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection

from torchrl_ext.collectors import _child
from torchrl_ext.collectors._spawn import Payload
from torchrl_ext.collectors._worker_files import WorkerFiles

__all__ = ["launch"]

# By path, so that nothing of ours, and no torch, is imported that the target does not need; with the working folder out
# of the way, whose files could hide the standard library's.
_BOOT = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; import importlib.util as u; "
    "s = u.spec_from_file_location('torchrl_ext_worker', sys.argv[1]); m = u.module_from_spec(s); "
    "sys.modules[s.name] = m; s.loader.exec_module(m); m.run(int(sys.argv[2]))"
)
# Freed memory stays with the process; otherwise the arrays of each step are mapped and cleared anew (480 page faults a
# step). The first is the largest value that glibc takes. Children of the worker inherit both, other libraries of C
# ignore them.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(512 << 20)}
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def launch(
    payload: Payload,
    resources: ExitStack,
    *,
    name: str,
    files: WorkerFiles,
    env: Mapping[str, str],
    cores: Collection[int] | None,
    num_threads: int,
    send_within: int,
    recv_within: int,
) -> tuple[subprocess.Popen, Connection]:
    """Returns a new process and the connection to it.

    ``resources`` gets the connection and the pipe that ends with this process. A message under way on the connection
    raises ``BlockingIOError`` when it does not go on for so many seconds.
    """
    with ExitStack() as passed:
        ours, theirs = socket.socketpair()
        passed.callback(theirs.close)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", send_within, 0))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", recv_within, 0))
        connection = resources.enter_context(Connection(ours.detach()))
        lifeline, held = os.pipe2(os.O_CLOEXEC)
        passed.callback(os.close, lifeline)
        resources.callback(os.close, held)
        boot = passed.enter_context(os.fdopen(os.memfd_create("boot", os.MFD_CLOEXEC), "r+b"))
        inherited = [*payload.descriptors, boot.fileno(), lifeline, theirs.fileno(), files.report]
        header: _child.Header = {
            "name": name,
            "parent": os.getpid(),
            "sys_path": sys.path,
            "argv": sys.argv,
            "cores": None if cores is None else sorted(cores),
            "num_threads": num_threads,
            "connection": theirs.fileno(),
            "lifeline": lifeline,
            "report": files.report,
            "inherited": inherited,
        }
        boot.write(pickle.dumps(header))
        boot.write(payload.data)
        boot.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", _BOOT, _child.__file__, str(boot.fileno()), name],
            pass_fds=inherited,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=files.output,
            stderr=files.output,
            env={**_MALLOC, **os.environ, **dict.fromkeys(_THREADS, str(num_threads)), **env},
        )
    return process, connection
