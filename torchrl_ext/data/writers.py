# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Writer of a :class:`~torchrl_ext.data.SlotStorage`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers.writers import Writer

__all__ = ["SlotWriter"]


class SlotWriter(Writer):
    """Writes time-major runs through a storage that knows its own positions.

    The writer has no state: heads, generations and the write count are the storage's, so that several buffers, and
    buffers in several processes, agree about them. Works in :class:`~torchrl_ext.data.SlotReplayBuffer` and in a stock
    :class:`torchrl.data.ReplayBuffer`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import RandomSampler, ReplayBuffer
        >>> from torchrl_ext.data import SlotStorage, SlotWriter
        >>> buffer = ReplayBuffer(storage=SlotStorage(4), writer=SlotWriter(), sampler=RandomSampler(), batch_size=2)
        >>> t = torch.arange(3.0).view(1, 3, 1)
        >>> _ = buffer.extend(TensorDict({"observation": t, "next": {"observation": t + 1}}, [1, 3]))
        >>> len(buffer), buffer.write_count
        (3, 3)
    """

    tracks_generations = True

    def register_storage(self, storage: Any) -> None:
        """Attaches the writer to a storage; raises ``TypeError`` unless it is a ``SlotStorage``."""
        from torchrl_ext.data.storages import SlotStorage

        if not isinstance(storage, SlotStorage):
            raise TypeError(f"SlotWriter: the storage must be a SlotStorage, got {type(storage).__name__}.")
        super().register_storage(storage)

    def generations_of(self, index: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Returns the generation of rows (see :meth:`SlotStorage.generation_of`)."""
        if isinstance(index, tuple):
            index = torch.stack(torch.broadcast_tensors(*index), -1)
        return self._storage.generation_of(torch.as_tensor(index))

    def add(self, data: TensorDictBase) -> torch.Tensor:
        """Writes one step of all streams, batch size ``[N]`` (or ``[]`` for one stream); returns its index."""
        num_streams = self._storage.num_streams
        if data.batch_dims == 0 and num_streams == 1:
            data = data.unsqueeze(0)
        return self.extend(data.unsqueeze(0))

    def extend(self, data: TensorDictBase) -> torch.Tensor:
        """Writes a time-major run ``[K, N]``; returns the index of its rows, int64 ``[K * N, 2]``."""
        handle = self._storage.extend_batch(data)
        return handle.index.flatten(0, 1)

    @property
    def _write_count(self) -> int:
        return self._storage.write_count

    @property
    def _cursor(self) -> int:
        return int(self._storage.head[0]) % self._storage.capacity

    def _empty(self, empty_write_count: bool = True) -> None:
        self._storage.empty(empty_write_count=empty_write_count)

    def dumps(self, path: str | Path) -> None:
        """Does nothing: the storage saves all there is."""

    def loads(self, path: str | Path) -> None:
        """Does nothing: the storage loads all there is."""

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty dict: the storage has the state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing: the storage has the state."""
