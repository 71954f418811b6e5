# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The order of draws that several threads make ahead.

Roles      one thread submits at a time (TorchRL's lock of the queue); as many threads draw as batches are made ahead.
State      per task an event "drawn", and that of the task before it.
Publish    a task draws once the one before it has drawn; transforms then run side by side.
Ordering   of draws from a generator: that of submission, which is that in which batches are returned.
Death      a task that fails or is cancelled before its turn lets the next one pass.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

__all__ = ["DrawExecutor", "in_turn"]

_task = threading.local()


class DrawExecutor(ThreadPoolExecutor):
    """Starts tasks in order, as any executor, and has what they do within :func:`in_turn` done in order too."""

    def __init__(self, max_workers: int) -> None:
        super().__init__(max_workers)
        self._last_drawn = threading.Event()
        self._last_drawn.set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submits a task."""
        before, drawn = self._last_drawn, threading.Event()
        future = super().submit(_run, before, drawn, fn, *args, **kwargs)
        self._last_drawn = drawn
        future.add_done_callback(lambda _: drawn.set())
        return future


def _run(before: threading.Event, drawn: threading.Event, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _task.turn = before, drawn
    try:
        return fn(*args, **kwargs)
    finally:
        _task.turn = None


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Waits until the tasks before this thread's have drawn; at once in a thread without a task.

    Enter it before any lock: whoever has the turn needs them. Within it, and a second time in a task, it does nothing.
    """
    turn = getattr(_task, "turn", None)
    if turn is None:
        yield
        return
    before, drawn = turn
    before.wait()
    _task.turn = None
    try:
        yield
    finally:
        drawn.set()
