# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The part of a replay buffer that writes results back into rows that were sampled earlier."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data.replay_buffers.replay_buffers.base import _maybe_delay_init

from torchrl_ext.data._staging import stage
from torchrl_ext.data._update_device import update_on_device
from torchrl_ext.data._update_host import update_on_host
from torchrl_ext.data.queued_updates import QueuedUpdates
from torchrl_ext.data.slot_sampler import SlotSampler
from torchrl_ext.data.write_back import Update, WriteBackResult, check_update

if TYPE_CHECKING:
    from torchrl_ext.data.storages import SlotStorage

__all__ = ["ConditionalUpdates"]


class ConditionalUpdates(QueuedUpdates):
    """Conditional updates of :class:`~torchrl_ext.data.SlotReplayBuffer`: TorchRL's interface, exact on every device.

    Roles      Any thread submits, samples and writes. One worker thread applies submitted updates to host storages; a
               CUDA storage is updated on the caller's stream, by the calling thread. Callbacks of futures may do what
               any thread may: they never run in the worker.
    State      The queue of pending updates: their copies (at most ``max_pending_bytes``) and statistics.
    Publish    A row has all fields of a patch or none. Rows of one update appear in chunks, each under the lock of the
               storage for about half a millisecond; what died meanwhile is noticed and reported stale.
    Ordering   Updates apply in the order of submission, after every sample taken before, batches sampled ahead
               included. ``visibility="ordered"``: a sample issued later waits for them; ``"eventual"``: it does not.
    Full       See ``when_full`` of :class:`~torchrl_ext.data.SlotReplayBuffer`.
    Death      An update that fails raises from its own future; later updates and samples go on.
    Lifetime   Inputs belong to the caller again when ``submit_update_if_present`` returns (in stream order on CUDA).

    In memory shared by processes, updates come from the process that writes the streams: no lock spans processes.
    """

    _storage: Any

    @_maybe_delay_init
    def update_if_present(
        self,
        *,
        index: torch.Tensor,
        generation: torch.Tensor,
        patch: Mapping[NestedKey, torch.Tensor] | TensorDictBase,
        version_key: NestedKey | None = None,
        version: int | torch.Tensor | None = None,
        require_newer: bool = False,
    ) -> WriteBackResult:
        """Overwrites fields of records that still live; returns when that is done (on CUDA: enqueued).

        Of several live handles of one record the last wins, on every device; the others are reported as superseded.
        Updates submitted earlier apply first.

        Keyword Args:
            index (torch.Tensor): int64 ``[..., 2]`` (slot, stream), ``[...]`` slots when there is one stream. What is
                out of range names no record.
            generation (torch.Tensor): int64 ``[...]``, from the sample that the handles come from.
            patch (mapping or TensorDictBase): stored keys and their new content, ``[..., *feature]`` of the stored
                dtype. Patching an observation patches the successor that the row before it shares with it.
            version_key (NestedKey, optional): a stored number per record. A record is updated only when the incoming
                version is not smaller; of several live handles the highest version wins, the last one among equals.
                The accepted version is stored with the patch. Defaults to None: no comparison.
            version (int or torch.Tensor, optional): the incoming version, one for all or one per row.
            require_newer (bool, optional): whether a version must be larger. Defaults to ``False``.

        Returns:
            WriteBackResult: masks in the shape of the handles.

        Raises:
            KeyError: for keys that are not stored.
            TypeError: for handles that are not integers.
            ValueError: for an empty patch, other shapes or dtypes, or a version without its key. Nothing was changed
                after any error.

        Examples:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from torchrl_ext.data import SlotReplayBuffer, SlotStorage
            >>> buffer = SlotReplayBuffer(storage=SlotStorage(4), batch_size=2)
            >>> def run(first, steps):
            ...     t = torch.arange(float(first), first + steps)
            ...     return TensorDict({"observation": t, "latent": t, "next": {"observation": t + 1}}, [steps])
            >>> handle = buffer.extend_batch(run(0, 4))
            >>> _ = buffer.extend_batch(run(4, 2))  # takes the place of two records
            >>> result = buffer.update_if_present(
            ...     index=handle.index[:, 0], generation=handle.generation[:, 0], patch={"latent": -torch.ones(4)}
            ... )
            >>> result.updated.tolist(), buffer.storage["latent"].flatten().tolist()
            ([False, False, True, True], [4.0, 5.0, -1.0, -1.0])
        """
        update = check_update(
            self._storage,
            "update_if_present",
            index=index,
            generation=generation,
            patch=patch,
            version_key=version_key,
            version=version,
            require_newer=require_newer,
        )
        self._wait_for_updates()
        staged = stage(update, self._storage.device, self._pool, donate=True)
        staged.wait()  # inputs on CUDA for a host storage: the result is asked for at once
        return self._apply(self._storage, staged.update)

    @_maybe_delay_init
    def submit_update_if_present(
        self,
        *,
        index: torch.Tensor,
        generation: torch.Tensor,
        patch: Mapping[NestedKey, torch.Tensor] | TensorDictBase,
        version_key: NestedKey | None = None,
        version: int | torch.Tensor | None = None,
        require_newer: bool = False,
        donate: bool = False,
    ) -> Future[WriteBackResult]:
        """Submits :meth:`update_if_present` without waiting for it; see the class for order and ownership.

        CUDA inputs of a host storage are copied to pinned memory on the current stream, and the worker waits for those
        copies alone: work enqueued later delays neither the update nor the samples that wait for it.

        Keyword Args:
            donate (bool, optional): ``True`` spares the copy of inputs that are on the storage's device already: the
                caller leaves them alone until the future is done. Defaults to ``False``.

        Other keyword arguments and errors are those of :meth:`update_if_present`; inputs are checked here.

        Returns:
            Future: of a :class:`WriteBackResult`.

        Raises:
            RuntimeError: when the buffer was shut down, or the queue is full and ``when_full="raise"``. Nothing was
                submitted.

        Examples:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from torchrl_ext.data import SlotReplayBuffer, SlotStorage
            >>> buffer = SlotReplayBuffer(storage=SlotStorage(8), batch_size=4)
            >>> t = torch.arange(8.0)
            >>> _ = buffer.extend_batch(TensorDict({"observation": t, "next": {"observation": t + 1}}, [8]))
            >>> sample, patch = buffer.sample(), {"observation": torch.full((4,), 7.0)}
            >>> future = buffer.submit_update_if_present(
            ...     index=sample["index"], generation=sample["index_generation"], patch=patch
            ... )
            >>> _ = patch["observation"].fill_(0)  # the buffer has its own copy
            >>> future.result().stale_count, bool((buffer.storage["observation"] == 7).any())
            (0, True)
        """
        update = check_update(
            self._storage,
            "submit_update_if_present",
            index=index,
            generation=generation,
            patch=patch,
            version_key=version_key,
            version=version,
            require_newer=require_newer,
        )
        storage, on_device = self._storage, self._storage.block.on_device
        apply = partial(self._apply, storage)  # the one that the handles speak of, whatever set_storage does meanwhile
        return self._submit(update, storage.device, apply, donate=donate or on_device, at_once=on_device)

    def _apply(self, storage: SlotStorage, update: Update) -> WriteBackResult:
        with self._updates.turn:
            if storage.block.on_device:
                return update_on_device(storage, update, self._updates.counts_on(storage.device))
            codes = update_on_host(storage, update)
        self._updates.count(codes)
        return update.result(codes)

    @_maybe_delay_init
    def update_priority(
        self,
        index: torch.Tensor | tuple[torch.Tensor, ...],
        priority: float | torch.Tensor,
        generation: torch.Tensor | None = None,
    ) -> None:
        """Sets the priorities of rows.

        Args:
            index (torch.Tensor): int64 ``[..., 2]`` (slot, stream).
            priority (float or torch.Tensor): one for all, or one per row.
            generation (torch.Tensor, optional): int64 ``[...]``; rows that were overwritten since keep their own
                priority. Defaults to None: whatever lives there now.

        Raises:
            TypeError: for generations with a sampler that does not check them. Nothing was changed.
            IndexError, ValueError: see the sampler. Nothing was changed.
        """
        if isinstance(index, tuple):
            index = torch.stack(torch.broadcast_tensors(*index), -1)
        options = {} if generation is None else {"generation": generation}
        if options and not isinstance(self._sampler, SlotSampler):
            raise TypeError(
                f"update_priority: generation needs a sampler of torchrl_ext, got {type(self._sampler).__name__}. "
                "Nothing was changed."
            )
        with self._replay_lock, self._write_lock, self._storage._lock, self._storage._order:
            self._sampler.update_priority(index, torch.as_tensor(priority), storage=self._storage, **options)
