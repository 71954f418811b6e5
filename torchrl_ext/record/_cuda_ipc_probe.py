# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Whether two processes can share memory of a GPU, tried out: ``python -m torchrl_ext.record._cuda_ipc_probe``."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch

from torchrl_ext.transport.device_memory import DeviceMemory, MappedMemory

__all__ = ["main"]

_OWNER, _USER = 42, 7


def _use(uuid: str, exported: tuple[Any, ...], answers: Connection) -> None:
    mapped = MappedMemory(uuid, exported)
    seen = int(mapped.bytes[0])
    mapped.bytes[1] = _USER
    torch.cuda.synchronize(mapped.bytes.device)
    answers.send(seen)


def main() -> int:
    """Returns 0 when a byte went each way through memory of ``cuda:0``; may hang where the driver does."""
    memory = DeviceMemory(2, torch.device("cuda", 0))
    memory.bytes[0] = _OWNER
    torch.cuda.synchronize()
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    exported = memory.export()
    process = context.Process(target=_use, args=(memory.uuid, exported, sender), daemon=True)
    process.start()
    # Ours must be closed, or the end of a process that failed would not be seen.
    sender.close()
    try:
        seen = receiver.recv()
    except EOFError:
        seen = None
    process.join()
    memory.forget(exported)
    return 0 if seen == _OWNER and int(memory.bytes[1]) == _USER else 1


if __name__ == "__main__":
    sys.exit(main())
