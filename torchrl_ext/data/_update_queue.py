# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Updates that were submitted and not yet applied: order, bounded memory, statistics."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from torchrl_ext.data._update_callbacks import UpdateCallbacks
from torchrl_ext.data.write_back import REJECTED, STALE, SUPERSEDED, UPDATED, WriteBackResult

_COUNTED = {"applied": UPDATED, "stale": STALE, "superseded": SUPERSEDED, "version_rejected": REJECTED}
#: Waiting times remembered for the percentiles.
_REMEMBERED = 1024


@dataclass
class Pending:
    """An update on its way. ``done`` ends with it and never fails, so that it can be waited for by anybody."""

    nbytes: int
    future: Future[WriteBackResult]
    done: Future[None] = field(default_factory=Future)
    submitted: float = field(default_factory=time.perf_counter)
    handed: bool = False
    """Whether it was handed to whoever applies it."""
    started: bool = False

    def finish(self, outcome: WriteBackResult | BaseException | None) -> None:
        """Ends it with a result or an error, or with None when its caller cancelled it."""
        # Callbacks of the future may sample, which waits for what is not done.
        self.done.set_result(None)
        if outcome is None or not (self.future.running() or self.future.set_running_or_notify_cancel()):
            return
        if isinstance(outcome, BaseException):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class UpdateQueue:
    """Applies updates one after the other in a thread of its own.

    Roles      Any thread submits; one worker thread, started by the first update, applies.
    Ordering   Updates apply in the order in which :meth:`start` was called, each after the futures it was given.
    Full       ``max_pending_bytes`` bounds the copies held by updates that are not applied. ``"block"`` waits for room,
               ``"raise"`` refuses, ``"drop_oldest"`` drops updates that have not started, oldest first. An update that
               does not fit by itself is taken when nothing (with ``"drop_oldest"``: nothing but what is being applied)
               is pending.
    Death      An update that fails fails its own future and no other.
    """

    def __init__(self, max_pending_bytes: int, when_full: Literal["block", "raise", "drop_oldest"]) -> None:
        if max_pending_bytes < 1:
            raise ValueError(f"SlotReplayBuffer: max_pending_bytes must be at least 1, got {max_pending_bytes}.")
        self.max_pending_bytes = max_pending_bytes
        self.when_full: Literal["block", "raise", "drop_oldest"] = when_full
        #: Held while an update is applied, in whatever thread.
        self.turn = threading.Lock()
        #: Held while an update is handed to the worker, so that its place among the others is the same everywhere.
        self.entry = threading.Lock()
        self._state = threading.Condition()
        self._pending: deque[Pending] = deque()
        self._bytes = 0
        self._closed = False
        self._worker: ThreadPoolExecutor | None = None
        self._callbacks = UpdateCallbacks()
        self._counts = dict.fromkeys([*_COUNTED, "failed", "dropped"], 0)
        self._device_counts: dict[torch.device, torch.Tensor] = {}
        self._waits: deque[float] = deque(maxlen=_REMEMBERED)

    def __getstate__(self) -> dict[str, Any]:
        return {"max_pending_bytes": self.max_pending_bytes, "when_full": self.when_full}

    def __setstate__(self, state: dict[str, Any]) -> None:
        UpdateQueue.__init__(self, **state)

    def reserve(self, nbytes: int) -> Pending:
        """Makes room for an update before its inputs are copied.

        Raises:
            RuntimeError: when the queue is full and refuses, or was closed. Nothing was changed.
        """
        dropped = []
        with self._state:
            while self._pending and self._bytes + nbytes > self.max_pending_bytes and not self._closed:
                if self.when_full == "raise":
                    raise RuntimeError(
                        f"submit_update_if_present: pending updates must hold at most {self.max_pending_bytes} bytes, "
                        f"got {self._bytes} pending and {nbytes} more. Nothing was submitted; wait for a future, or "
                        "give max_pending_bytes."
                    )
                if self.when_full == "block":
                    self._state.wait()
                    continue
                oldest = next((pending for pending in self._pending if not pending.started), None)
                if oldest is None:
                    break
                self._leave(oldest)
                self._counts["dropped"] += 1
                dropped.append(oldest)
            closed, pending = self._closed, Pending(nbytes, self._callbacks.future())
            if not closed:
                self._pending.append(pending)
                self._bytes += nbytes
        for left in dropped:  # without the lock, for callbacks may do anything
            left.finish(
                RuntimeError(
                    f"submit_update_if_present: this update was dropped for a newer one, since "
                    f"{self.max_pending_bytes} bytes may be pending. Nothing of it was written."
                )
            )
        if closed:
            raise RuntimeError(
                "submit_update_if_present: the buffer must not be shut down. Nothing was submitted; "
                "update_if_present still works."
            )
        return pending

    def _leave(self, pending: Pending) -> None:
        self._pending.remove(pending)
        self._bytes -= pending.nbytes
        self._state.notify_all()

    def withdraw(self, pending: Pending) -> None:
        """Gives the room of an update back that could not be submitted."""
        with self._state:
            if pending not in self._pending:
                return
            self._leave(pending)
        pending.done.set_result(None)

    def start(
        self, pending: Pending, apply: Callable[[], WriteBackResult], after: Sequence[Future], ready: Callable[[], None]
    ) -> None:
        """Hands a reserved update to the worker.

        Args:
            pending (Pending): from :meth:`reserve`.
            apply (callable): applies it.
            after (sequence of Future): what must be over before; how it ended does not matter.
            ready (callable): waits for the copies of its inputs.
        """
        with self._state:
            pending.handed = True
            self._state.notify_all()
            if self._worker is None:
                self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torchrl_ext-update")
            self._worker.submit(self._work, pending, apply, after, ready)

    def run(
        self, pending: Pending, apply: Callable[[], WriteBackResult], after: Sequence[Future], ready: Callable[[], None]
    ) -> None:
        """Applies a reserved update in the calling thread, as :meth:`start` does in the worker."""
        with self._state:
            pending.handed = True
            self._state.notify_all()
        self._run(pending, apply, after, ready)

    def _work(self, *update: Any) -> None:
        self._callbacks.busy = threading.get_ident()
        self._run(*update)

    def _run(
        self, pending: Pending, apply: Callable[[], WriteBackResult], after: Sequence[Future], ready: Callable[[], None]
    ) -> None:
        try:
            if after:
                wait(after)
            ready()
            with self._state:
                if pending not in self._pending:  # dropped
                    return
                pending.started = True
                cancelled = not pending.future.set_running_or_notify_cancel()
            outcome: Any = None if cancelled else apply()
        except BaseException as error:  # whatever it was, it belongs to this update alone
            outcome = error
        with self._state:
            if pending not in self._pending:  # dropped while its copies were waited for, which failed
                return
            self._leave(pending)
            if isinstance(outcome, BaseException):
                self._counts["failed"] += 1
            elif outcome is not None:
                self._waits.append(time.perf_counter() - pending.submitted)
        pending.finish(outcome)

    def count(self, codes: torch.Tensor) -> None:
        """Adds the codes of an update of a host storage to the statistics."""
        self._add(np.bincount(codes.numpy(), minlength=len(_COUNTED)).tolist())

    def count_result(self, result: WriteBackResult) -> None:
        """Adds a result to the statistics; on CUDA its masks are read, once."""
        masks = [result.stale, result.updated, result.superseded, result.version_rejected]
        none = torch.zeros_like(result.updated)
        counts = torch.stack([none if mask is None else mask for mask in masks]).flatten(1).sum(1)
        self._add(counts.tolist())

    def _add(self, by_code: list[int]) -> None:
        with self._state:
            for name, code in _COUNTED.items():
                self._counts[name] += by_code[code]

    def counts_on(self, device: torch.device) -> torch.Tensor:
        """Returns the counts by code that updates of a device storage add up, int64 ``[4]``; nobody reads them yet."""
        with self._state:
            total = self._device_counts.get(device)
            if total is None:
                total = torch.zeros(len(_COUNTED), dtype=torch.int64, device=device)
                self._device_counts[device] = total
            return total

    def stats(self) -> dict[str, Any]:
        """Returns the numbers documented by :meth:`SlotReplayBuffer.stats`; waits for CUDA counts."""
        with self._state:
            counts = dict(self._counts)
            for total in self._device_counts.values():
                for name, code in _COUNTED.items():
                    counts[name] += int(total[code])
            waits = [1e3 * seconds for seconds in self._waits]
            pending = {"updates_pending": len(self._pending), "updates_pending_bytes": self._bytes}
        p50, p95 = np.percentile(waits, [50, 95]).tolist() if waits else (0.0, 0.0)
        counted = {f"updates_{name}": count for name, count in counts.items()}
        return {**pending, **counted, "update_wait_p50_ms": p50, "update_wait_p95_ms": p95}

    def refuse(self) -> None:
        """Refuses further updates, those that wait for room included."""
        with self._state:
            self._closed = True
            self._state.notify_all()

    def close(self) -> None:
        """Refuses further updates and waits for those that were submitted."""
        self.refuse()
        with self._state:
            # Those that reserved room are still copying their inputs; they are submitted in a moment.
            self._state.wait_for(lambda: all(pending.handed for pending in self._pending))
            worker = self._worker
        if worker is not None:
            worker.shutdown(wait=True)
        self._callbacks.close()
