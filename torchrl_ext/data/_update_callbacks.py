# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Callbacks of updates: they may wait for later updates, so the thread that applies these does not run them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any


class UpdateCallbacks:
    """Makes futures whose callbacks leave one thread free.

    Roles      The busy thread ends futures; a thread of its own, started by the first callback, runs what it would run.
               Callbacks that another thread would run, it runs itself.
    Ordering   Callbacks run one after the other, in the order in which their futures ended.
    """

    def __init__(self) -> None:
        #: The thread that must go on.
        self.busy: int | None = None
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._runs_in: int | None = None

    def future(self) -> Future[Any]:
        """Returns a new future."""
        return _UpdateFuture(self)

    def call(self, callback: Callable[[Any], Any], future: Future[Any]) -> None:
        """Runs a callback of a future that has ended."""
        if threading.get_ident() != self.busy:
            callback(future)
            return
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torchrl_ext-update-callbacks")
            self._executor.submit(self._run, callback, future)

    def _run(self, callback: Callable[[Any], Any], future: Future[Any]) -> None:
        self._runs_in = threading.get_ident()
        try:
            callback(future)
        except Exception:  # as futures do
            logging.getLogger("concurrent.futures").exception("exception calling callback for %r", future)

    def close(self) -> None:
        """Waits for the callbacks of futures that have ended, unless one of them asks."""
        with self._lock:
            executor = self._executor
        if executor is not None:
            executor.shutdown(wait=threading.get_ident() != self._runs_in)


class _UpdateFuture(Future[Any]):
    def __init__(self, callbacks: UpdateCallbacks) -> None:
        super().__init__()
        self._callbacks = callbacks

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        super().add_done_callback(partial(self._callbacks.call, fn))
