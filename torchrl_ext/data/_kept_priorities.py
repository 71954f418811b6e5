# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The priorities that a sampler keeps: which table has them, since when, and how they are saved."""

from __future__ import annotations

import math
from collections import OrderedDict
from copy import deepcopy
from typing import Any

import torch
from tensordict import NestedKey

from torchrl_ext.data._block import SlotBlock
from torchrl_ext.data._device_priorities import DevicePriorities
from torchrl_ext.data._priorities import STATE, HostPriorities, PriorityTable, capturing, used_slots
from torchrl_ext.data.samplers import TransitionSampler
from torchrl_ext.data.storages import SlotStorage


class KeepsPriorities(TransitionSampler):
    """A sampler with a table of weights, made when it is first used and begun anew for another storage or state."""

    _restart: bool
    """Whether the table begins anew, from ``_loaded`` where that is given, when it is next used."""
    _loaded: dict[str, Any] | None

    def __init__(
        self,
        n_steps: int,
        gamma: float,
        *,
        alpha: float,
        beta: float,
        eps: float,
        max_priority_within_buffer: bool,
        reward_key: NestedKey,
    ) -> None:
        for name, value in (("alpha", alpha), ("eps", eps)):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"PrioritizedTransitionSampler: {name} must be a finite number >= 0, got {value}.")
        self._alpha, self._eps = float(alpha), float(eps)
        self._within_buffer = max_priority_within_buffer
        self._table: PriorityTable | None = None
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
            loaded = None if saved is None else _checked(saved)
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
        state.update(_table=None, _restart=True, _loaded=self.state_dict()["priorities"])
        return state


def _checked(saved: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of the state of a table; raises ``ValueError`` when it is damaged."""
    state = {name: deepcopy(saved[name]) for name in STATE}
    capacity, num = state["capacity"], state["num_streams"]

    def check(name: str, right: bool, wanted: str) -> None:
        if not right:
            got = state[name]
            got = f"{got.dtype} {list(got.shape)}" if isinstance(got, torch.Tensor) else got
            raise ValueError(
                f"PrioritizedTransitionSampler: {name} of the state must be {wanted}, got {got}. Nothing was changed."
            )

    def is_tensor(name: str, dtype: torch.dtype, *shape: int) -> bool:
        value = state[name]
        return isinstance(value, torch.Tensor) and value.dtype == dtype and value.shape == shape

    for name in ("capacity", "num_streams"):
        check(name, isinstance(state[name], int) and state[name] > 0, "an int > 0")
    check("seen", is_tensor("seen", torch.int64, 2, num), f"int64 [2, {num}]")
    head, low = state["seen"]
    check("seen", bool(((low >= 0) & (low <= head) & (head - low <= capacity)).all()), "steps of live rows")
    rows = used_slots(state["seen"], capacity) * num
    check("weights", is_tensor("weights", torch.float32, rows), f"float32 [{rows}]")
    check("top", is_tensor("top", torch.float32), "float32 []")
    return state
