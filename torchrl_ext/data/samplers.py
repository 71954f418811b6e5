# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Samplers of transitions from a :class:`~torchrl_ext.data.SlotStorage`."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, unravel_key
from torchrl.data.replay_buffers.samplers import Sampler

from torchrl_ext.data._row_draws import EMPTY, draw_uniform, draw_weighted, refuse_empty
from torchrl_ext.data._transitions import assemble, assemble_fused, check_transitions
from torchrl_ext.data.batch_pool import BatchPool
from torchrl_ext.data.draws import Draw, locate, sampleable_counts
from torchrl_ext.data.slot_sampler import SlotSampler
from torchrl_ext.data.storages import SlotStorage

__all__ = ["TransitionSampler"]


class TransitionSampler(SlotSampler):
    """Draws n-step transitions uniformly over all sampleable rows of all streams.

    Every draw is independent: a minibatch is never a block of environments. A row is sampleable when it lives and its
    successor is known. The n-step return follows the row's stream; it never crosses a termination, a truncation, a
    reset or the head, where it is shorter (``k < n`` steps, ``discount = gamma**k``, the last known successor). What is
    sampleable does not depend on ``n_steps``.

    With :class:`~torchrl_ext.data.SlotReplayBuffer` a sample has, beside the stored fields of the row:

    ========================================  =======================================================================
    ``("next", key)``                         the successor of the last row used, for the keys of ``layout.next_keys``
    ``("next", "reward")``                    ``sum(gamma**i * r[t + i], i < k)``
    ``("next", "terminated")`` and the like   flags of the last row used
    ``"discount"``                            ``gamma**k``, float32 ``[B, 1]``
    ``"steps_to_next_obs"``                   ``k``, int64 ``[B, 1]`` (TorchRL's value estimators read it)
    ``"index"``, ``"index_generation"``       (slot, stream) int64 ``[B, 2]`` and generation int64 ``[B]`` of the row
    ========================================  =======================================================================

    A terminated row that was written without a final observation has its own observation as successor.

    Args:
        n_steps (int, optional): steps of a return, at least 1. Defaults to 1.
        gamma (float, optional): discount of one step, in ``[0, 1]``. Defaults to 0.99.

    Keyword Args:
        replacement (bool, optional): whether rows may repeat. ``False`` goes through a permutation of all sampleable
            rows, reshuffled when it is used up or when rows were written. Defaults to ``True``.
        drop_last (bool, optional): without replacement, drop the incomplete last batch. Defaults to ``False``.
        stream_weights (torch.Tensor, optional): float ``[N]``, relative weight of each stream: a stream with rows is
            drawn in proportion to its weight, then a row of it uniformly. One must be above 0, and on a CUDA device
            nobody looks whether a stream of positive weight has rows; one must. Defaults to None (uniform over rows).
        reward_key (NestedKey, optional): a scalar per row. Defaults to ``("next", "reward")``.

    Raises:
        ValueError: on impossible options.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_ext.data import SlotReplayBuffer, SlotStorage, TransitionSampler
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
        >>> buffer = SlotReplayBuffer(storage=SlotStorage(8), sampler=TransitionSampler(3, 0.9), batch_size=32)
        >>> _ = buffer.extend_batch(run)
        >>> sample = buffer.sample()
        >>> span = sample["next", "observation"] - sample["observation"]
        >>> bool((span == sample["steps_to_next_obs"]).all())
        True
    """

    _order: torch.Tensor | None
    _order_key: torch.Tensor | None
    _compared: tuple[SlotStorage, int] | None = None
    """The storage, and its revision, whose rows are known to be those of ``_order_key``."""

    def __init__(
        self,
        n_steps: int = 1,
        gamma: float = 0.99,
        *,
        replacement: bool = True,
        drop_last: bool = False,
        stream_weights: torch.Tensor | None = None,
        reward_key: NestedKey = ("next", "reward"),
    ) -> None:
        if not isinstance(n_steps, int) or n_steps < 1:
            raise ValueError(f"TransitionSampler: n_steps must be an int >= 1, got {n_steps!r}.")
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"TransitionSampler: gamma must be in [0, 1], got {gamma}.")
        if stream_weights is not None:
            stream_weights = torch.as_tensor(stream_weights, dtype=torch.float64)
            possible = (stream_weights >= 0) & stream_weights.isfinite()
            if not replacement or stream_weights.dim() != 1 or not (possible.all() and (stream_weights > 0).any()):
                raise ValueError(
                    "TransitionSampler: stream_weights must be finite numbers >= 0, one per stream, one of them above "
                    f"0, and go with replacement=True, got {stream_weights.tolist()} with replacement={replacement}."
                )
        self.n_steps, self.gamma = n_steps, float(gamma)
        self.replacement, self.drop_last = replacement, drop_last
        self.stream_weights = stream_weights
        self.reward_key = unravel_key(reward_key)
        self._empty()

    @property
    def reach(self) -> int:
        """Steps past a row that its transition may depend on."""
        return self.n_steps

    def draw_batch(
        self,
        storage: SlotStorage,
        batch_size: int,
        *,
        contiguous: bool = False,
        device: torch.device | None = None,
        pool: BatchPool | None = None,
    ) -> tuple[TensorDict, dict[str, torch.Tensor]]:
        """Draws and assembles ``batch_size`` transitions; see the class and :meth:`SlotSampler.draw_batch`.

        Raises:
            RuntimeError: when no row can be sampled.
            ValueError: when ``batch_size`` is below 1, the rows have ``"discount"`` or ``"steps_to_next_obs"`` (their
                returns are finished already), or ``n_steps > 1`` and the reward is not one floating-point number.
        """
        _refuse_no_rows(batch_size)
        options: dict[str, Any] = {"contiguous": contiguous, "device": device, "pool": pool}
        recipe = self.n_steps, self.gamma, self.reward_key
        if storage.initialized:
            check_transitions(storage.block.layout, self.reward_key, self.n_steps)
            if self.replacement and self.stream_weights is None and storage.block.on_device:
                refuse_empty(storage.block)
                made = assemble_fused(storage.block, batch_size, *recipe, generator=self._rng, **options)
                if made is not None:
                    return made
        drawn = self.draw(storage, batch_size)  # before the block is asked for, so that nothing to draw is refused here
        return assemble(storage.block, drawn, *recipe, **options)

    def draw(self, storage: SlotStorage, batch_size: int) -> Draw:
        """Draws rows; see :meth:`draw_batch`."""
        _refuse_no_rows(batch_size)
        if not storage.initialized:
            raise RuntimeError(EMPTY.format("an empty storage"))
        if not self.replacement:
            return self._draw_permuted(storage, batch_size)
        if self.stream_weights is not None:
            return draw_weighted(storage, batch_size, self._rng, self.stream_weights)
        return draw_uniform(storage, batch_size, self._rng)

    def _draw_permuted(self, storage: SlotStorage, batch_size: int) -> Draw:
        block, order = storage.block, self._order
        low, high, counts = sampleable_counts(block)
        key, least = torch.stack([low, high]), batch_size if self.drop_last else 1
        if order is None or not self._is_current(storage, key) or len(order) < least:
            order = self._shuffle(key, counts, least)
            self._compared = storage, storage._mutation_revision
        ordinal = order[:batch_size]
        self._order = order = order[batch_size:]
        self.ran_out = len(order) < least
        drawn = locate(block, low, counts, ordinal.to(block.device), high)
        if self.ran_out:
            order = self._shuffle(key, counts, least)
        self._count_remaining(len(order), batch_size)
        return drawn

    def _is_current(self, storage: SlotStorage, key: torch.Tensor) -> bool:
        # What a device answers must be waited for, so it is asked once after a write; the host knows of each. In memory
        # that other processes write too, rows are being lost before a head moves.
        now = storage, storage._mutation_revision
        if storage.block.on_device and self._compared == now:
            return True
        known = self._order_key is not None and torch.equal(self._order_key.to(key.device), key)
        self._compared = now if known else None
        return known

    def _shuffle(self, key: torch.Tensor, counts: torch.Tensor, least: int) -> torch.Tensor:
        # The number of rows is read back once per pass over the data, also on CUDA.
        total = int(counts.sum())
        if not total:
            raise RuntimeError(EMPTY.format("none"))
        if total < least:
            raise ValueError(
                f"TransitionSampler: the batch size must be at most the {total} sampleable rows with drop_last=True, "
                f"got {least}. Nothing was drawn."
            )
        device = key.device if self._rng is None else self._rng.device
        self._order = order = torch.randperm(total, generator=self._rng, device=device)
        self._order_key = key
        return order

    def _count_remaining(self, left: int, batch_size: int) -> None:
        self._remaining_batches = left // batch_size if self.drop_last else -(left // -batch_size)

    # ------------------------------------------------------------------ TorchRL's sampler interface

    def sample(self, storage: SlotStorage, batch_size: int) -> tuple[tuple[torch.Tensor, torch.Tensor], dict]:
        """Draws one-step transitions for a stock :class:`torchrl.data.ReplayBuffer`.

        Raises:
            RuntimeError: for ``n_steps > 1``: stock buffers and ensembles drop what a sampler computes; use ours.
            TypeError: for another storage.
        """
        if not isinstance(storage, SlotStorage):
            raise TypeError(f"TransitionSampler: the storage must be a SlotStorage, got {type(storage).__name__}.")
        if self.n_steps > 1:
            raise RuntimeError(
                f"TransitionSampler: n_steps={self.n_steps} needs SlotReplayBuffer, in an ensemble "
                "GroupedReplayBufferEnsemble; stock ones drop the returns that a sampler computes. Nothing was drawn."
            )
        # A stock buffer holds no lock of the storage, and what a draw finds out about positions is kept.
        with storage._lock, storage._order:
            drawn = self.draw(storage, batch_size).torch()
            return (drawn.slot.long(), drawn.stream.long()), {}

    def _sampleable_count(self, storage: SlotStorage, batch_size: int) -> int:
        with storage._lock, storage._order:
            count = int(sampleable_counts(storage.block)[2].sum()) if storage.initialized else 0
        return 0 if not self.replacement and self.drop_last and count < batch_size else count

    @property
    def ran_out(self) -> bool:
        """Whether the last batch ended a pass (without replacement)."""
        return self._ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._ran_out = bool(value)

    def _empty(self) -> None:
        self._order = self._order_key = self._compared = None
        self._ran_out = False
        self._remaining_batches = Sampler._remaining_batches

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the current permutation; options are the constructor's."""
        return OrderedDict(order=self._order, order_key=self._order_key, ran_out=self._ran_out)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`; raises ``ValueError`` when it is not one, and changes nothing then."""
        if not isinstance(state_dict, Mapping):
            raise ValueError(
                f"TransitionSampler: the state must be a dict, got {type(state_dict).__name__}. Nothing was changed."
            )
        try:
            order, key, ran_out = (state_dict[name] for name in ("order", "order_key", "ran_out"))
        except KeyError as error:
            raise ValueError(
                f"TransitionSampler: the state must have the key {error}, got {list(state_dict)}. Nothing was changed."
            ) from error
        for name, value, dims in (("order", order, 1), ("order_key", key, 2)):
            is_tensor = isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.dim() == dims
            if value is not None and not is_tensor:
                raise ValueError(
                    f"TransitionSampler: {name} of the state must be an int64 tensor of {dims} dimensions or None, got "
                    f"{value}. Nothing was changed."
                )
        self._order = None if order is None else order.clone()
        self._order_key = None if key is None else key.clone()
        self._compared = None
        self._ran_out = bool(ran_out)

    def dumps(self, path: str | Path) -> None:
        """Writes :meth:`state_dict` under a folder."""
        Path(path).mkdir(exist_ok=True)
        torch.save(dict(self.state_dict()), Path(path) / "sampler.pt")

    def loads(self, path: str | Path) -> None:
        """Reads what :meth:`dumps` wrote."""
        # A pass that began on a device can go on where there is none.
        self.load_state_dict(torch.load(Path(path) / "sampler.pt", weights_only=True, map_location="cpu"))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_compared": None}  # a storage travels by itself

    def __repr__(self) -> str:
        options = {"n_steps": self.n_steps, "gamma": self.gamma, "replacement": self.replacement}
        return f"{type(self).__name__}({json.dumps(options)[1:-1]})"


def _refuse_no_rows(batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"TransitionSampler: batch_size must be at least 1, got {batch_size}. Nothing was drawn.")
