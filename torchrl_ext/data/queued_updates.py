# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The part of a replay buffer that holds updates until they are applied."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Literal

import torch
from torchrl.data import ReplayBuffer

from torchrl_ext.data._draw_order import DrawExecutor
from torchrl_ext.data._staging import Stageable, stage
from torchrl_ext.data._update_queue import UpdateQueue
from torchrl_ext.data.batch_pool import BatchPool
from torchrl_ext.data.write_back import WriteBackResult


def _members(queue: deque[Future]) -> tuple[Future, ...]:
    """Returns what a queue holds now. TorchRL's lock is not taken: its owner may be waiting for a batch."""
    while True:
        try:
            return tuple(queue)
        except RuntimeError:  # it changed under the iteration
            continue


class _Barrier:
    """What a later sample waits for: every update before it, as one that is dropped ends before those ahead of it."""

    def __init__(self, updates: tuple[Future, ...]) -> None:
        self._updates = updates

    def result(self) -> None:
        """Waits; TorchRL calls it like that of a future."""
        for done in self._updates:
            done.result()


class QueuedUpdates(ReplayBuffer):
    """Takes over the inputs of updates and applies them in order, for a buffer or an ensemble of them."""

    _updates: UpdateQueue
    _pool: BatchPool
    _sample_dependency: Any
    visibility: Literal["ordered", "eventual"]

    def _prepare_updates(
        self,
        visibility: Literal["ordered", "eventual"],
        max_pending_bytes: int,
        when_full: Literal["block", "raise", "drop_oldest"],
    ) -> None:
        if visibility not in ("ordered", "eventual") or when_full not in ("block", "raise", "drop_oldest"):
            raise ValueError(
                f"{type(self).__name__}: visibility must be 'ordered' or 'eventual' and when_full 'block', 'raise' or "
                f"'drop_oldest', got {visibility!r} and {when_full!r}."
            )
        self._pool = BatchPool()
        self.visibility = visibility
        self._updates = UpdateQueue(max_pending_bytes, when_full)

    def _order_draws_ahead(self) -> None:
        """Replaces the threads of ``prefetch``, which draw in any order."""
        if self._prefetch_cap:
            self._prefetch_executor = DrawExecutor(self._prefetch_cap)

    def _wait_for_updates(self) -> None:
        """Waits for updates submitted before, and for the batches that were being sampled ahead."""
        wait(_members(self._pending_update_futures))
        # A transform that updates while it makes such a batch would wait for itself.
        makers = getattr(getattr(self, "_prefetch_executor", None), "_threads", ())
        if threading.current_thread() not in makers:
            wait(_members(self._prefetch_queue))

    def _forget_ended_updates(self) -> None:
        """Called by the owner of the entry."""
        waiting = self._pending_update_futures
        while waiting and waiting[0].done():
            waiting.popleft()

    def _synchronize_futures_locked(self) -> None:
        # As TorchRL's, which would also forget the updates that were submitted while it waited.
        ahead = tuple(self._prefetch_queue)
        wait((*ahead, *_members(self._pending_update_futures)))
        with self._updates.entry:
            self._forget_ended_updates()
            if not self._pending_update_futures:
                self._sample_dependency = None
        for made in ahead:
            made.result()

    def __getstate__(self) -> dict[str, Any]:
        # Updates that were submitted in the meantime are not for the copy.
        return {**super().__getstate__(), "_pending_update_futures": deque(), "_sample_dependency": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._order_draws_ahead()

    def _submit(
        self,
        update: Stageable,
        device: torch.device,
        apply: Callable[[Any], WriteBackResult],
        *,
        donate: bool,
        at_once: bool,
    ) -> Future[WriteBackResult]:
        """Submits a checked update.

        Args:
            update (Stageable): what ``apply`` takes, once its tensors are the update's own, on ``device``.
            device (torch.device): of the storage.
            apply (callable): applies it.

        Keyword Args:
            donate (bool): see :func:`stage`.
            at_once (bool): applies it in the calling thread, which enqueues it on its current CUDA stream.
        """
        ahead = _members(self._prefetch_queue)
        pending = self._updates.reserve(update.nbytes)
        waiting = self._pending_update_futures
        try:
            staged = stage(update, device, self._pool, donate=donate)
            if at_once:
                self._updates.run(pending, lambda: apply(staged.update), ahead, staged.wait)
                return pending.future
            with self._updates.entry:
                self._forget_ended_updates()
                self._updates.start(pending, lambda: apply(staged.update), ahead, staged.wait)
                waiting.append(pending.done)
                if self.visibility == "ordered":
                    self._sample_dependency = _Barrier(_members(waiting))
        except BaseException:
            self._updates.withdraw(pending)
            raise
        return pending.future

    def stats(self) -> dict[str, Any]:
        """Returns TorchRL's numbers (size, write count, prefetched batches) and those of updates.

        ``updates_pending`` and ``updates_pending_bytes`` are not applied yet; ``updates_applied``, ``updates_stale``,
        ``updates_superseded`` and ``updates_version_rejected`` count rows since the buffer was made, ``updates_failed``
        and ``updates_dropped`` updates; ``update_wait_p50_ms`` and ``update_wait_p95_ms`` are the times from
        submission until applied of the last 1,024 updates of a host storage. Counts of a CUDA storage synchronise.
        """
        return {**super().stats(), **self._updates.stats()}

    def shutdown(self, timeout: float | None = None) -> None:
        """Applies pending updates, finishes batches sampled ahead and closes the buffer for both."""
        self._updates.refuse()
        try:
            super().shutdown(timeout)
        finally:
            self._updates.close()
