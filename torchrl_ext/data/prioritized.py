# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Prioritized replay of transitions from a :class:`~torchrl_ext.data.SlotStorage`."""

from __future__ import annotations

import json
from typing import Any, cast

import torch
from tensordict import NestedKey, TensorDict, unravel_key

from torchrl_ext.data._block import SlotBlock
from torchrl_ext.data._device_priorities import ByPriority, DevicePriorities
from torchrl_ext.data._kept_priorities import KeepsPriorities
from torchrl_ext.data._moves import moved
from torchrl_ext.data._priorities import PriorityTable, capturing
from torchrl_ext.data._priority_input import checked_update
from torchrl_ext.data._row_draws import refuse_empty
from torchrl_ext.data._transitions import assemble, assemble_fused, check_transitions
from torchrl_ext.data.batch_pool import BatchPool
from torchrl_ext.data.draws import Draw
from torchrl_ext.data.storages import SlotStorage

__all__ = ["PrioritizedTransitionSampler"]

_EMPTY = (
    "sample: the storage must hold a row of positive weight whose successor is known, got none. Nothing was drawn; "
    "write to it first."
)


class PrioritizedTransitionSampler(KeepsPriorities):
    """Draws n-step transitions in proportion to their priorities (Schaul et al. 2016, https://arxiv.org/abs/1511.05952).

    A sampleable row is drawn with probability ``(priority + eps)**alpha`` over the sum of all of them, independently
    and with replacement. What is sampleable, and what a sample holds, is as in :class:`TransitionSampler`; one entry
    is added:

    =====================  ============================================================================================
    ``"priority_weight"``  float32 ``[B]``: ``(p / p_min)**-beta`` of the row, where ``p`` is its probability and
                           ``p_min`` that of the least likely sampleable row: the importance weight ``(n p)**-beta``
                           over the largest there is, as in TorchRL
    =====================  ============================================================================================

    A new row has the largest priority given so far, 1 at first. A priority belongs to its record: it is gone with a row
    that is overwritten or dropped. It can be set for any live row, also for one that is not sampleable yet.

    State      ``state_dict`` has the weights of all rows. ``empty()`` and ``set_storage()`` of the buffer reset them
               and the largest priority. When a storage alone goes back to a loaded state, all its rows are new rows.
    Devices    Weights lie on the storage's device, with what finds them 9 bytes a row (16 on CUDA). On CUDA neither
               draws nor updates wait for the device, and draws work inside a CUDA graph after a first draw outside of
               it; where all priorities and ``eps`` are 0, rows without weight are drawn there.

    Args:
        n_steps (int, optional): as in :class:`TransitionSampler`. Defaults to 1.
        gamma (float, optional): as in :class:`TransitionSampler`. Defaults to 0.99.

    Keyword Args:
        alpha (float, optional): how much priorities count, at least 0 (uniform). Defaults to 0.6.
        beta (float, optional): how much importance weights correct, in ``[0, 1]``; may be set at any time (TorchRL's
            schedulers do). Defaults to 0.4.
        eps (float, optional): added to each priority, at least 0. Defaults to 1e-8.
        max_priority_within_buffer (bool, optional): a new row has the largest priority of the rows that live when it is
            first looked at (by a draw or an update), 1 when there are none. Defaults to ``False``.
        reward_key (NestedKey, optional): a scalar per row. Defaults to ``("next", "reward")``.
        weight_key (NestedKey, optional): where importance weights go. Defaults to ``"priority_weight"``.

    Raises:
        ValueError: on impossible options.

    .. note:: ``(priority + eps)**alpha`` is kept between 1e-18 and 1e18, and 0 where ``priority + eps`` is.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_ext.data import PrioritizedTransitionSampler, SlotReplayBuffer, SlotStorage
        >>> t = torch.arange(6.0).view(6, 1, 1)
        >>> run = TensorDict(
        ...     {
        ...         "observation": t,
        ...         "next": {
        ...             "observation": t + 1,
        ...             "reward": torch.ones(6, 1, 1),
        ...             "done": torch.zeros(6, 1, 1, dtype=torch.bool),
        ...         },
        ...     },
        ...     [6, 1],
        ... )
        >>> sampler = PrioritizedTransitionSampler(alpha=1.0, beta=1.0)
        >>> buffer = SlotReplayBuffer(storage=SlotStorage(8), sampler=sampler, batch_size=32)
        >>> handle = buffer.extend_batch(run)
        >>> updated = sampler.update_priority(
        ...     handle.index, torch.tensor([0.0, 0.0, 0.0, 3.0, 0.0, 0.0]).view(6, 1), storage=buffer.storage
        ... )
        >>> sample = buffer.sample()
        >>> sample["observation"].unique(), updated.all()
        (tensor([3.]), tensor(True))
    """

    def __init__(
        self,
        n_steps: int = 1,
        gamma: float = 0.99,
        *,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-8,
        max_priority_within_buffer: bool = False,
        reward_key: NestedKey = ("next", "reward"),
        weight_key: NestedKey = "priority_weight",
    ) -> None:
        super().__init__(
            n_steps,
            gamma,
            alpha=alpha,
            beta=beta,
            eps=eps,
            max_priority_within_buffer=max_priority_within_buffer,
            reward_key=reward_key,
        )
        self.weight_key = unravel_key(weight_key)
        self._choice: ByPriority | None = None

    # ------------------------------------------------------------------ drawing

    def draw_batch(
        self,
        storage: SlotStorage,
        batch_size: int,
        *,
        contiguous: bool = False,
        device: torch.device | None = None,
        pool: BatchPool | None = None,
    ) -> tuple[TensorDict, dict[NestedKey, torch.Tensor]]:
        """Draws and assembles ``batch_size`` transitions; see the class and :meth:`SlotSampler.draw_batch`.

        Raises:
            RuntimeError: when no row can be sampled.
            ValueError: when the rows have ``"discount"`` or ``"steps_to_next_obs"`` (their returns are finished
                already), or ``n_steps > 1`` and the reward is not one floating-point number.
        """
        recipe = self.n_steps, self.gamma, self.reward_key
        options: dict[str, Any] = {"contiguous": contiguous, "device": device, "pool": pool}
        if storage.initialized:
            check_transitions(storage.block.layout, self.reward_key, self.n_steps)
            if storage.block.on_device and self._rng is None:
                made = self._draw_captured(storage.block, self._device_table(storage), batch_size, recipe, options)
                if made is not None:
                    return made
        drawn = self.draw(storage, batch_size)
        weight = cast(PriorityTable, self._table).importance(drawn.at)
        batch, small = assemble(storage.block, drawn, *recipe, **options)
        if device is not None:
            weight = moved(weight, device)
        batch.set(self.weight_key, weight)
        small[self.weight_key] = weight
        return batch, small

    def _device_table(self, storage: SlotStorage) -> DevicePriorities:
        refuse_empty(storage.block)
        return cast(DevicePriorities, self._table_of(storage))

    def _draw_captured(
        self,
        block: SlotBlock,
        table: DevicePriorities,
        batch_size: int,
        recipe: tuple[int, float, NestedKey],
        options: dict[str, Any],
    ) -> tuple[TensorDict, dict[NestedKey, torch.Tensor]] | None:
        """Draws by one graph, some forty launches in one; None where that is not possible."""
        if capturing(block):
            return None
        table.settle(block)
        choice = self._choice
        if choice is None or choice.table is not table:
            choice = self._choice = ByPriority(table, self.weight_key)
        return assemble_fused(block, batch_size, *recipe, generator=None, choice=choice, **options)

    def draw(self, storage: SlotStorage, batch_size: int) -> Draw:
        """Draws rows; see :meth:`draw_batch`."""
        if not storage.initialized:
            raise RuntimeError(_EMPTY)
        block = storage.block
        if block.on_device:
            refuse_empty(block)
        drawn = self._table_of(storage).draw(block, batch_size, self._rng)
        if drawn is None:
            raise RuntimeError(_EMPTY)
        return drawn

    def sample(self, storage: SlotStorage, batch_size: int) -> tuple[tuple[torch.Tensor, torch.Tensor], dict]:
        """Draws one-step transitions for a stock :class:`torchrl.data.ReplayBuffer`, weights in its info.

        Raises:
            RuntimeError: for ``n_steps > 1``: a stock buffer drops what a sampler computes; use SlotReplayBuffer.
            TypeError: for another storage.
        """
        (slot, stream), info = super().sample(storage, batch_size)
        at = slot * storage.num_streams + stream
        return (slot, stream), {**info, self.weight_key: cast(PriorityTable, self._table).importance(at)}

    # ------------------------------------------------------------------ priorities

    @torch.no_grad()
    def update_priority(
        self,
        index: torch.Tensor,
        priority: float | torch.Tensor,
        *,
        storage: SlotStorage | None = None,
        generation: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sets the priorities of live rows.

        Args:
            index (torch.Tensor): int64 ``[..., 2]`` (slot, stream), ``[...]`` slots when there is one stream. Rows out
                of range and rows that do not live are skipped. Of several entries for one row the last counts.
            priority (float or torch.Tensor): one for all rows, or one for each, ``[...]`` or ``[..., 1]``; finite in
                float32 and not negative. On a CUDA device nothing is checked: NaN and negative numbers count as 0.

        Keyword Args:
            storage (SlotStorage): whose rows.
            generation (torch.Tensor, optional): int64 ``[...]``, ``"index_generation"`` of a sample: rows that were
                overwritten since then are skipped. Defaults to None: whatever lives at the index is meant.

        Returns:
            torch.Tensor: bool ``[...]`` on the storage's device: the entries that were set. An entry that a later one
            of the same call replaces was not.

        Raises:
            TypeError, IndexError, ValueError: when the storage or the index is of another kind, shapes differ or a
                priority is impossible. Nothing was changed.
        """
        if not isinstance(storage, SlotStorage):
            raise TypeError(
                f"update_priority: storage must be a SlotStorage, got {type(storage).__name__}. Nothing was changed."
            )
        update = checked_update(storage, index, priority, generation)
        if not storage.initialized or not update.shape.numel():
            return torch.zeros(update.shape, dtype=torch.bool, device=storage.device)
        update = update.to(storage.device)
        with storage._lock, storage._order:
            table = self._table_of(storage)
            return table.update(storage.block, update.pairs, update.generation, update.priority).view(update.shape)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_choice": None}

    def __repr__(self) -> str:
        options = {"n_steps": self.n_steps, "gamma": self.gamma, "alpha": self._alpha, "beta": self._beta}
        return f"{type(self).__name__}({json.dumps(options)[1:-1]})"
