# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Prioritized replay of transitions from a :class:`~torchrl_ext.data.SlotStorage`."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from copy import deepcopy
from typing import Any, cast

import torch
from tensordict import NestedKey, TensorDict, unravel_key

from torchrl_ext.data._block import SlotBlock
from torchrl_ext.data._device_priorities import ByPriority, DevicePriorities
from torchrl_ext.data._priorities import STATE, HostPriorities, PriorityTable, capturing
from torchrl_ext.data._slot_read import split_index
from torchrl_ext.data._transitions import assemble, assemble_fused, moved
from torchrl_ext.data.batch_pool import BatchPool
from torchrl_ext.data.draws import Draw
from torchrl_ext.data.samplers import TransitionSampler
from torchrl_ext.data.storages import SlotStorage

__all__ = ["PrioritizedTransitionSampler"]

_EMPTY = (
    "sample: the storage must hold a row of positive weight whose successor is known, got none. Nothing was drawn; "
    "write to it first."
)


class PrioritizedTransitionSampler(TransitionSampler):
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

    _restart: bool
    """Whether the table begins anew, from ``_loaded`` where that is given, when it is next used."""
    _loaded: dict[str, Any] | None

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
        for name, value in (("alpha", alpha), ("eps", eps)):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"PrioritizedTransitionSampler: {name} must be a finite number >= 0, got {value}.")
        self._alpha, self._eps = float(alpha), float(eps)
        self._within_buffer = max_priority_within_buffer
        self.weight_key = unravel_key(weight_key)
        self._table: PriorityTable | None = None
        self._choice: ByPriority | None = None
        self.beta = beta
        super().__init__(n_steps, gamma, reward_key=reward_key)

    @property
    def alpha(self) -> float:
        """The exponent of priorities."""
        return self._alpha

    @property
    def eps(self) -> float:
        """What is added to each priority."""
        return self._eps

    @property
    def beta(self) -> float:
        """The exponent of importance weights; set it to anneal it. Raises ``ValueError`` outside ``[0, 1]``."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"PrioritizedTransitionSampler: beta must be in [0, 1], got {value}.")
        self._beta = float(value)
        if self._table is not None:
            self._table.exponent.fill_(-self._beta)

    @property
    def default_priority(self) -> float:
        """The largest priority given so far, at least 1; reading it waits for a CUDA device."""
        if self._restart or self._table is None:
            return 1.0 if self._loaded is None else float(self._loaded["top"])
        return float(self._table.top)

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
            ValueError: when ``n_steps > 1`` and the reward is not one floating-point number.
        """
        recipe = self.n_steps, self.gamma, self.reward_key
        options: dict[str, Any] = {"contiguous": contiguous, "device": device, "pool": pool}
        if storage.initialized and storage.block.on_device and self._rng is None:
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
        self._refuse_empty(storage.block)
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
            self._refuse_empty(block)
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
        index = torch.as_tensor(index)
        if index.dtype.is_floating_point or index.dtype.is_complex or index.dtype == torch.bool:
            raise TypeError(f"update_priority: index must be integers, got {index.dtype}. Nothing was changed.")
        slot, stream = split_index(index, storage.num_streams)
        shape = slot.shape
        priority = _checked(priority, shape)
        if generation is not None:
            generation = torch.as_tensor(generation)
            if generation.shape != shape:
                raise ValueError(
                    f"update_priority: generation must have the shape {list(shape)} of the index, got "
                    f"{list(generation.shape)}. Nothing was changed."
                )
        if not storage.initialized or not slot.numel():
            return torch.zeros(shape, dtype=torch.bool, device=storage.device)
        with storage._lock, storage._order:
            pairs = torch.stack([slot.flatten(), stream.flatten()]).long().to(storage.device, non_blocking=True)
            if generation is not None:
                generation = generation.flatten().to(storage.device, non_blocking=True)
            priority = priority.to(storage.device, non_blocking=True)
            return self._table_of(storage).update(storage.block, pairs, generation, priority).view(shape)

    def _table_of(self, storage: SlotStorage) -> PriorityTable:
        """Returns the table, up to date. A storage of another geometry gets a new one."""
        block, table = storage.block, self._table
        if table is None or self._restart or not table.fits(block):
            table = self._start(block)
        table.refresh(storage)
        return table

    def _start(self, block: SlotBlock) -> PriorityTable:
        if capturing(block):
            raise RuntimeError(
                "PrioritizedTransitionSampler: a first draw must not be captured in a CUDA graph, whose replays would "
                "reset all priorities. Nothing was drawn; draw a batch before the capture."
            )
        saved, sizes = self._loaded, (block.capacity, block.num_streams)
        if saved is not None and (saved["capacity"], saved["num_streams"]) != sizes:
            raise ValueError(
                f"PrioritizedTransitionSampler: the loaded priorities must be of {sizes[0]} slots x {sizes[1]} "
                f"streams, got {saved['capacity']} x {saved['num_streams']}. Nothing was drawn; load those of the "
                "storage, or empty the buffer."
            )
        table = self._table
        if table is None or not table.fits(block):
            options = {"alpha": self._alpha, "beta": self._beta, "eps": self._eps, "within_buffer": self._within_buffer}
            table = self._table = (DevicePriorities if block.on_device else HostPriorities)(block, **options)
        table.load(saved)  # in place: captured draws keep reading it
        self._restart, self._loaded = False, None
        return table

    # ------------------------------------------------------------------ state

    def _empty(self) -> None:
        super()._empty()
        self._restart, self._loaded = True, None

    def state_dict(self) -> dict[str, Any]:
        """Returns the priorities, the positions they were brought up to, the largest one and ``beta``, as copies."""
        table = deepcopy(self._loaded) if self._restart or self._table is None else self._table.state()
        return OrderedDict(alpha=self._alpha, eps=self._eps, beta=self._beta, priorities=table)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`, which goes with the state of the storage.

        Raises:
            ValueError: when it is of another kind, or of a sampler with another ``alpha`` or ``eps``. Nothing changed.
        """
        try:
            options = state_dict["alpha"], state_dict["eps"]
            beta, saved = state_dict["beta"], state_dict["priorities"]
            loaded = None if saved is None else {name: deepcopy(saved[name]) for name in STATE}
        except KeyError as error:
            raise ValueError(
                f"PrioritizedTransitionSampler: the state must have the key {error}, got {list(state_dict)}. Nothing "
                "was changed."
            ) from error
        if options != (self._alpha, self._eps):
            raise ValueError(
                f"PrioritizedTransitionSampler: the state must have (alpha, eps) {(self._alpha, self._eps)}, got "
                f"{options}. Nothing was changed."
            )
        self.beta = beta
        self._restart, self._loaded = True, loaded

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.update(_table=None, _choice=None, _restart=True, _loaded=self.state_dict()["priorities"])
        return state

    def __repr__(self) -> str:
        options = {"n_steps": self.n_steps, "gamma": self.gamma, "alpha": self._alpha, "beta": self._beta}
        return f"{type(self).__name__}({json.dumps(options)[1:-1]})"


def _checked(priority: float | torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Returns priorities as float32 ``[M]``, one for each row of ``shape``."""
    value = torch.as_tensor(priority).detach()
    if value.dtype.is_complex or value.dtype == torch.bool:
        raise TypeError(f"update_priority: priority must be real numbers, got {value.dtype}. Nothing was changed.")
    if value.numel() != 1 and value.shape not in (shape, (*shape, 1)):
        raise ValueError(
            f"update_priority: priority must be one number or have the shape {list(shape)} of the index, got "
            f"{list(value.shape)}. Nothing was changed."
        )
    value = value.float().flatten().expand(shape.numel())
    if value.device.type != "cpu":
        # To ask would wait for the device.
        return value.nan_to_num(nan=0.0).clamp(min=0.0)
    numbers = value.numpy()
    low, high = numbers.min(initial=0.0), numbers.max(initial=0.0)  # NaN where any number is
    if not 0.0 <= low <= high < math.inf:
        raise ValueError(
            f"update_priority: priorities must be finite float32 numbers >= 0, got from {numbers.min()} to "
            f"{numbers.max()}. Nothing was changed; pass absolute values."
        )
    return value
