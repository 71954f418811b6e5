# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What :class:`~torchrl_ext.data.SlotReplayBuffer` asks of a sampler that assembles its own batches."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers.samplers import Sampler

from torchrl_ext.data.batch_pool import BatchPool

if TYPE_CHECKING:
    from torchrl_ext.data.storages import SlotStorage

__all__ = ["SlotSampler"]


class _KeepsReplacement(type(Sampler)):  # type: ignore[misc]  # mypy knows no base that is computed
    """TorchRL's metaclass turns ``replacement=False`` into another class; here it is an option of one class."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return ABCMeta.__call__(cls, *args, **kwargs)


class SlotSampler(Sampler, metaclass=_KeepsReplacement):
    """A sampler that draws rows of a :class:`~torchrl_ext.data.SlotStorage` and assembles the batch itself.

    A stock buffer asks a sampler for indices and the storage for rows, so what a sampler computes (returns, windows)
    has no place. :class:`~torchrl_ext.data.SlotReplayBuffer` calls :meth:`draw_batch` instead, with the storage's lock
    held.
    """

    @property
    def reach(self) -> int:
        """Steps past a batch's handles that its content may depend on; readers of shared memory check as many."""
        return 1

    def take_back(self) -> None:
        """Forgets the batch drawn last, which its reader dropped; what it used up can be drawn again."""

    def update_priority(
        self,
        index: torch.Tensor,
        priority: float | torch.Tensor,
        *,
        storage: SlotStorage | None = None,
        generation: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Does nothing, as in TorchRL: only a prioritized sampler keeps priorities."""
        return None

    @abstractmethod
    def draw_batch(
        self,
        storage: SlotStorage,
        batch_size: int,
        *,
        contiguous: bool = False,
        device: torch.device | None = None,
        pool: BatchPool | None = None,
    ) -> tuple[TensorDict, dict[str, torch.Tensor]]:
        """Draws and assembles a batch.

        Args:
            storage (SlotStorage): whose rows.
            batch_size (int): rows.

        Keyword Args:
            contiguous (bool, optional): ``True`` gives each field its own memory. Defaults to ``False``.
            device (torch.device, optional): moves the batch there, packed. Defaults to the storage's.
            pool (BatchPool, optional): where host batches come from.

        Returns:
            tuple: the batch, and what the sampler added to it, ``"index"`` and ``"index_generation"`` included.

        Raises:
            RuntimeError: when nothing can be sampled.
        """
