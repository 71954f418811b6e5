# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Order between CUDA streams that use one storage."""

from __future__ import annotations

import contextlib

import torch

_STREAMS: dict[tuple[int, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns ``torch.cuda.current_stream(device)``, whose new object each time takes as long as to launch a kernel."""
    index = torch.cuda.current_device() if device.index is None else device.index
    at = index, torch._C._cuda_getCurrentRawStream(index)
    stream = _STREAMS.get(at)
    if stream is None:
        stream = _STREAMS[at] = torch.cuda.current_stream(index)
    return stream


class StreamOrder:
    """Makes each use of a storage wait, on the device, for the use before it when that was on another stream.

    A lock orders host calls, not the work they enqueue: a reader on its own stream would gather rows while a writer's
    copy is still running. One stream pays nothing; from the second one on each use records an event, so that a user
    waits for the last use only and not for what was enqueued after it. Inside a graph capture nothing is waited for:
    a captured use is ordered by where its graph is launched.

    Enter it with the storage's lock held.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    def __enter__(self) -> None:
        current = current_stream(self._device)
        # A stream compared with None by != is not unequal.
        if (self._last is None or current != self._last) and not torch.cuda.is_current_stream_capturing():
            if self._done is not None:
                current.wait_event(self._done)
            elif self._last is not None:
                current.wait_stream(self._last)
                self._done = torch.cuda.Event()
            self._last = current

    def __exit__(self, *_: object) -> None:
        if self._done is not None and not torch.cuda.is_current_stream_capturing():
            self._done.record(self._last)


def stream_order(device: torch.device) -> contextlib.AbstractContextManager:
    """Returns the order of a storage's device; nothing to do on the host."""
    return StreamOrder(device) if device.type == "cuda" else contextlib.nullcontext()
