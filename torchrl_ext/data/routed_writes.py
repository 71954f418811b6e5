# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The part of a replay buffer that finds the stream of each record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn.utils import _set_dispatch_td_nn_modules
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.replay_buffers.base import _maybe_delay_init

if TYPE_CHECKING:
    from torchrl_ext.data.handles import SlotHandle

__all__ = ["RoutedWrites"]


class RoutedWrites(ReplayBuffer):
    """``extend`` and ``add`` of :class:`~torchrl_ext.data.SlotReplayBuffer`: runs, and records of any streams."""

    _storage: Any
    routing_key: NestedKey | None
    routing_dim: int | None

    def _set_routing(self, key: NestedKey | None, dim: int | None) -> None:
        if key is not None and dim is not None:
            raise ValueError(
                f"SlotReplayBuffer: routing_key and routing_dim exclude each other, got {key!r} and {dim!r}."
            )
        self.routing_key = None if key is None else unravel_key(key)
        self.routing_dim = dim

    @_maybe_delay_init
    def extend(self, data: TensorDictBase, *, update_priority: bool | None = None) -> torch.Tensor:
        """Writes TorchRL's stream-major data ``[N, T]`` (``[T]`` when there is one stream), or records by stream.

        With ``routing_key`` data may have any batch size: each record goes to the stream that it names, records of one
        stream in their order, all by one scatter. With ``routing_dim`` the coordinate along that dimension is the
        stream, and the first other one is time. Inverse transforms get the data as given.

        Args:
            data (TensorDictBase): what to write. The routing key is stored where the layout has it (a layout taken
                from the first write does) and dropped where it does not.

        Returns:
            torch.Tensor: int64 ``[M, 2]``, (slot, stream) of each row: oldest step first, or with a routing in the
            order of ``data.reshape(-1)``.

        Raises:
            TypeError, ValueError, KeyError: see :meth:`SlotStorage.extend_batch`, and for streams that are missing, out
                of range or not integers. Nothing was written.

        Examples:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from torchrl_ext.data import SlotReplayBuffer, SlotStorage
            >>> buffer = SlotReplayBuffer(storage=SlotStorage(8, 3, next_obs="store"), routing_key="env_index")
            >>> stream = torch.tensor([2, 0, 2])
            >>> index = buffer.extend(TensorDict({"value": torch.arange(3.0), "env_index": stream}, [3]))
            >>> index.tolist()
            [[0, 2], [0, 0], [1, 2]]
        """
        if update_priority is not None:
            raise NotImplementedError("extend: update_priority belongs to prioritized buffers; leave it None.")
        if not isinstance(data, TensorDictBase):
            raise TypeError(
                f"extend: data must be a TensorDict of batch size [N, T], got {type(data).__name__}. "
                "Nothing was written; stack the records first."
            )
        inverse = self._inverse(data)
        if inverse is None:
            return torch.zeros(0, 2, dtype=torch.int64)
        return self._extend_inverse(inverse)

    def _inverse(self, data: TensorDictBase) -> TensorDictBase | None:
        # On what the caller gave: transforms that look along time take the last dimension for it, as in TorchRL. None
        # says that a transform keeps the data until more come.
        if self._transform is None or not len(self._transform):
            return data
        with _set_dispatch_td_nn_modules(True):
            return self._transform.inv(data)

    def _extend_inverse(self, data: TensorDictBase) -> torch.Tensor:
        if self.routing_key is not None:
            return self._extend_by_key(data)
        num_streams, dim = self._storage.num_streams, self.routing_dim
        if dim is not None:
            return self._extend_by_dim(data, dim)
        if data.batch_dims == 1 and num_streams == 1:
            data = data.unsqueeze(0)
        is_time_major = data.batch_dims == 2 and data._has_names() and data.names[0] == "time"
        if data.batch_dims != 2 or data.shape[0] != num_streams or is_time_major:
            named = f" with names {data.names}" if is_time_major else ""
            raise ValueError(
                f"extend: data must have batch size [{num_streams}, T], got {list(data.batch_size)}{named}. Nothing "
                "was written; pass time-major runs to extend_batch(), or records of any streams with routing_key=."
            )
        return self._write_run(data.transpose(0, 1)).index.flatten(0, 1)

    def _write_run(self, run: TensorDictBase) -> SlotHandle:
        with self._replay_lock, self._write_lock:
            return self._storage.extend_batch(run)

    def _extend_by_dim(self, data: TensorDictBase, dim: int) -> torch.Tensor:
        num_streams = self._storage.num_streams
        if not -data.batch_dims <= dim < data.batch_dims or data.shape[dim] != num_streams:
            raise ValueError(
                f"extend: data must have {num_streams} streams along dim {dim}, got batch size "
                f"{list(data.batch_size)}. Nothing was written."
            )
        dim %= data.batch_dims
        if data.batch_dims <= 2:
            # Time is the other dimension: a run, whatever its order in memory.
            run = data.unsqueeze(0) if data.batch_dims == 1 else data.transpose(0, 1) if dim == 0 else data
            index = self._write_run(run).index
            return (index.transpose(0, 1) if dim == 0 else index).flatten(0, 1)
        shape = [-1 if d == dim else 1 for d in range(data.batch_dims)]
        ids = torch.arange(num_streams).view(shape).expand(data.batch_size).reshape(-1)
        return self._extend_records(data.reshape(-1), ids)

    def _extend_by_key(self, data: TensorDictBase) -> torch.Tensor:
        ids = data.get(self.routing_key, None)
        if ids is None:
            raise KeyError(
                f"extend: data must have the routing key {self.routing_key!r}, got {list(data.keys(True, True))}. "
                "Nothing was written."
            )
        if ids.numel() != data.numel():
            raise ValueError(
                f"extend: {self.routing_key!r} must have one stream per record, shape {list(data.batch_size)}, got "
                f"{list(ids.shape)}. Nothing was written."
            )
        layout = self._storage.layout
        if layout is not None and self.routing_key not in layout.by_key:
            data = data.exclude(self.routing_key)
        return self._extend_records(data if data.batch_dims == 1 else data.reshape(-1), ids.reshape(-1))

    def _extend_records(self, records: TensorDictBase, ids: torch.Tensor) -> torch.Tensor:
        with self._replay_lock, self._write_lock:
            return self._storage.extend_records(records, ids)

    @_maybe_delay_init
    def add(self, data: TensorDictBase) -> torch.Tensor:
        """Writes one step of all streams, batch size ``[N]`` (``[]`` for one stream), or one record by its stream.

        Returns:
            torch.Tensor: the index of each row, int64 ``[N, 2]``; ``[1, 2]`` with ``routing_key``.
        """
        if not isinstance(data, TensorDictBase):
            raise TypeError(f"add: data must be a TensorDict, got {type(data).__name__}. Nothing was written.")
        inverse = self._inverse(data)
        if inverse is None:
            return torch.zeros(0, 2, dtype=torch.int64)
        data = inverse
        if self.routing_key is not None:
            return self._extend_by_key(data.unsqueeze(0) if not data.batch_dims else data)
        if data.batch_dims == 0 and self._storage.num_streams == 1:
            data = data.unsqueeze(0)
        return self._write_run(data.unsqueeze(0)).index[0]
