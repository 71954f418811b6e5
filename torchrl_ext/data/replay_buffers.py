# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The replay buffer over packed rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_tensor_collection
from tensordict.nn.utils import _set_dispatch_td_nn_modules
from torchrl.data.replay_buffers.replay_buffers.base import _maybe_delay_init
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_ext.data._draw_order import in_turn
from torchrl_ext.data._prefetch_state import read_prefetch, write_prefetch
from torchrl_ext.data.batch_pool import PinnedPool
from torchrl_ext.data.conditional_updates import ConditionalUpdates
from torchrl_ext.data.handles import SlotHandle
from torchrl_ext.data.packing import PackedRun
from torchrl_ext.data.positions import snapshot, undisturbed
from torchrl_ext.data.routed_writes import RoutedWrites
from torchrl_ext.data.samplers import TransitionSampler
from torchrl_ext.data.slot_sampler import SlotSampler
from torchrl_ext.data.storages import SlotStorage
from torchrl_ext.data.writers import SlotWriter

__all__ = ["SlotReplayBuffer"]

#: Seconds after which a reader that writers in other processes disturb again and again gives up.
_PATIENCE = 10.0
_PINNED = PinnedPool()


class SlotReplayBuffer(ConditionalUpdates, RoutedWrites):
    """A TorchRL replay buffer that writes runs as bytes and samples transitions in two gathers.

    It has everything :class:`torchrl.data.ReplayBuffer` has (transforms, ``prefetch``, iteration, ``state_dict``,
    ``dumps``), and ``extend_batch`` for time-major runs. Sampled TensorDicts carry their ``"index"`` and
    ``"index_generation"``.

    Keyword Args:
        storage (SlotStorage or callable): where rows are.
        sampler (Sampler, optional): defaults to ``TransitionSampler()``.
        contiguous (bool, optional): ``True`` gives each sampled field its own memory, ``False`` (default) strided views
            of packed rows, which is faster to make and as fast to multiply.
        sample_device (torch.device, optional): where samples are moved, packed; from the host to a CUDA device through
            page-locked memory, in the current stream's order and without waiting. Defaults to the storage's device.
        routing_key (NestedKey, optional): stored or not, holds the stream of each record: :meth:`extend` then takes
            records of any streams in any order. Defaults to None.
        routing_dim (int, optional): the batch dimension of what :meth:`extend` takes whose entries are the streams.
            Defaults to None: dimension 0 (``[N, T]``).
        visibility ("ordered" or "eventual", optional): whether a sample waits for the updates submitted before it.
            Defaults to ``"ordered"``.
        max_pending_bytes (int, optional): bound of the copies that submitted updates hold. Defaults to 1 GiB.
        when_full ("block", "raise" or "drop_oldest", optional): what an update does that would pass the bound.
            Defaults to ``"block"``.
        batch_size, transform, prefetch, generator, pin_memory and the other keywords: as in TorchRL. A CPU
            ``generator`` also serves a CUDA storage. Without one, draws come from torch's default generator. With
            ``prefetch`` and a sampler of this package, batches are drawn in the order in which they are returned;
            transforms run side by side.

    Raises:
        TypeError: when the storage or the writer is of another kind.
        ValueError: for options of TorchRL that nothing here would follow: a ``dim_extend`` other than 1, and
            ``collate_fn`` or ``sample_unit`` with a sampler that assembles its batches itself.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_ext.data import SlotReplayBuffer, SlotStorage
        >>> t = torch.arange(5.0).view(5, 1, 1).expand(5, 3, 1)
        >>> run = TensorDict(
        ...     {
        ...         "observation": t,
        ...         "next": {"observation": t + 1, "reward": t, "done": torch.zeros(5, 3, 1, dtype=torch.bool)},
        ...     },
        ...     [5, 3],
        ... )
        >>> buffer = SlotReplayBuffer(storage=SlotStorage(100, num_streams=3), batch_size=4)
        >>> handle = buffer.extend_batch(run)
        >>> len(buffer), buffer.sample()["next", "observation"].shape
        (15, torch.Size([4, 1]))
    """

    _is_tensordict = True

    def __init__(
        self,
        *,
        storage: SlotStorage | Callable[[], SlotStorage],
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: SlotWriter | Callable[[], SlotWriter] | None = None,
        contiguous: bool = False,
        sample_device: torch.device | str | None = None,
        routing_key: NestedKey | None = None,
        routing_dim: int | None = None,
        visibility: Literal["ordered", "eventual"] = "ordered",
        max_pending_bytes: int = 2**30,
        when_full: Literal["block", "raise", "drop_oldest"] = "block",
        **kwargs: Any,
    ) -> None:
        self.contiguous = contiguous
        self.sample_device = None if sample_device is None else torch.device(sample_device)
        self._set_routing(routing_key, routing_dim)
        self._prepare_updates(visibility, max_pending_bytes, when_full)
        super().__init__(
            storage=storage,
            sampler=TransitionSampler() if sampler is None else sampler,
            writer=SlotWriter() if writer is None else writer,
            **kwargs,
        )
        self._order_draws_ahead()

    def _init(self) -> None:
        collates = self._init_collate_fn is not None
        super()._init()
        try:
            self._check_parts(collates)
        except BaseException:
            self._initialized = False
            raise

    def _check_parts(self, collates: bool) -> None:
        if not isinstance(self._storage, SlotStorage) or not isinstance(self._writer, SlotWriter):
            raise TypeError(
                "SlotReplayBuffer: the storage must be a SlotStorage and the writer a SlotWriter, got "
                f"{type(self._storage).__name__} and {type(self._writer).__name__}."
            )
        if (collates or self._sample_unit is not None) and isinstance(self._sampler, SlotSampler):
            raise ValueError(
                "SlotReplayBuffer: collate_fn and sample_unit must go with a sampler of TorchRL, got "
                f"{type(self._sampler).__name__}, which assembles its batches itself; use transform=."
            )
        if self.dim_extend != 1:
            raise ValueError(
                f"SlotReplayBuffer: dim_extend must be 1 (extend takes [N, T]), got {self.dim_extend}; runs with time "
                "first go through extend_batch."
            )

    @_maybe_delay_init
    def set_storage(self, storage: Storage, collate_fn: Callable | None = None) -> Storage:
        """Sets a new storage, re-registers the writer, resets the sampler and returns the previous storage."""
        self._writer.register_storage(storage)  # rejects a storage of another kind before anything changes
        with self._futures_lock, self._replay_lock:
            self._clear_prefetch_queue_locked()
            previous = super().set_storage(storage, collate_fn)
            storage.attach(self)
            self._sampler._empty()
            self.set_rng(self._rng)
        return previous

    def _dump_prefetch_state(self, path: Path, prefetch_state: dict[str, Any]) -> None:
        write_prefetch(path, prefetch_state)

    def _load_prefetch_state(self, path: Path) -> dict[str, Any] | None:
        return read_prefetch(path)

    # ------------------------------------------------------------------ writing

    @_maybe_delay_init
    def extend_batch(self, run: TensorDictBase | PackedRun, *, streams: slice | None = None) -> SlotHandle:
        """Writes a time-major run ``[K, N]``; see :meth:`SlotStorage.extend_batch`.

        Inverse transforms run on TensorDicts, with time last as in TorchRL; packed runs are moved as they are.
        """
        if isinstance(run, TensorDictBase) and self._transform is not None and len(self._transform):
            inverse = self._inverse(run.transpose(0, 1) if run.batch_dims == 2 else run)
            if inverse is None:
                raise ValueError(
                    "extend_batch: inverse transforms must return the run, got None of one that keeps it for later. "
                    "Nothing was written; use extend()."
                )
            run = inverse.transpose(0, 1) if inverse.batch_dims == 2 else inverse
        with self._replay_lock, self._write_lock:
            return self._storage.extend_batch(run, streams=streams)

    def set_writer(self, writer: SlotWriter) -> SlotWriter:
        """Replaces the writer and returns the one before; raises ``TypeError`` for a kind that cannot write here."""
        if not isinstance(writer, SlotWriter):
            raise TypeError(
                f"SlotReplayBuffer: set_writer needs a SlotWriter, got {type(writer).__name__}. Nothing was changed."
            )
        return super().set_writer(writer)

    @_maybe_delay_init
    def end_streams(self, streams: slice | None = None) -> None:
        """Cuts streams; see :meth:`SlotStorage.end_streams`."""
        with self._replay_lock, self._write_lock:
            self._storage.end_streams(streams)

    @_maybe_delay_init
    def empty(self, empty_write_count: bool = True) -> None:
        """Drops all rows, batches sampled ahead included; every old handle dies."""
        with self._futures_lock:
            self._clear_prefetch_queue_locked()
            with self._replay_lock:
                self._storage.empty(empty_write_count=empty_write_count)
                self._sampler._empty()

    # ------------------------------------------------------------------ sampling

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        *,
        contiguous: bool | None = None,
        device: torch.device | str | None = None,
    ) -> TensorDict | tuple[TensorDict, dict[str, Any]]:
        """Samples a batch; see :class:`TransitionSampler` for its keys.

        Args:
            batch_size (int, optional): rows. Defaults to the buffer's.
            return_info (bool, optional): whether to return ``(data, info)``. Defaults to ``False``.

        Keyword Args:
            contiguous (bool, optional): for this call. Defaults to the buffer's.
            device (torch.device, optional): for this call. Defaults to the buffer's.

        Returns:
            TensorDict: batch size ``[batch_size]``; the caller owns its memory.

        Raises:
            RuntimeError: when no row can be sampled.
            ValueError: when ``contiguous`` or ``device`` is given with ``prefetch``, whose batches are made ahead.
        """
        if contiguous is None and device is None:
            return super().sample(batch_size, return_info)
        if self._prefetch:
            raise ValueError(
                "sample: contiguous and device must be set on a buffer with prefetch, got them in a call. "
                "Nothing was drawn."
            )
        before = self.contiguous, self.sample_device
        with self._replay_lock:
            try:
                if contiguous is not None:
                    self.contiguous = contiguous
                if device is not None:
                    self.sample_device = torch.device(device)
                return super().sample(batch_size, return_info)
            finally:
                self.contiguous, self.sample_device = before

    def _sample(self, batch_size: int) -> tuple[TensorDict, dict[str, Any]]:
        if not isinstance(self._sampler, SlotSampler):
            contiguous, device = self.contiguous, self.sample_device
            data, info = super()._sample(batch_size)
            if is_tensor_collection(data):
                data = data.contiguous() if contiguous else data
                data = data if device is None else data.to(device)
            index = info["index"]
            info["index"] = torch.stack(index, -1) if isinstance(index, tuple) else index
            for key, value in info.items():
                if is_tensor_collection(data) and isinstance(value, torch.Tensor) and value.shape[:1] == data.shape[:1]:
                    data.set(key, value)
            return data, info
        with in_turn(), self._replay_lock, self._write_lock, self._storage._lock, self._storage._order:
            data, info = self._consistent_sample(batch_size)
        if self._pin_memory and data.device is not None and data.device.type == "cpu" and torch.cuda.is_available():
            data = data.pin_memory()
        if self._transform is not None and len(self._transform):
            with _set_dispatch_td_nn_modules(True):
                data = self._transform(data)
        return data, info

    def _consistent_sample(self, batch_size: int) -> tuple[TensorDict, dict[str, Any]]:
        storage = self._storage
        leaving = self.sample_device is not None and self.sample_device.type == "cuda" and storage.device.type == "cpu"
        pool = _PINNED if leaving else self._pool
        options = {"contiguous": self.contiguous, "device": self.sample_device, "pool": pool}
        if not storage.has_other_writers:
            return self._sampler.draw_batch(storage, batch_size, **options)
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            before = snapshot(storage.block) if storage.initialized else None
            data, info = self._sampler.draw_batch(storage, batch_size, **options)
            handles = info["index"], info["index_generation"]
            # Only a storage without rows has no positions to compare, and drawing from that one raises.
            if undisturbed(storage.block, cast(np.ndarray, before), *handles, self._sampler.reach):
                return data, info
            self._sampler.take_back()
        raise RuntimeError(
            f"sample: writers in other processes overwrote the drawn rows again and again for {_PATIENCE} s. Nothing "
            "was returned; use a larger capacity."
        )
