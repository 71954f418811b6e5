# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Prioritized replay: a batch of 8,192 transitions from a million rows, drawn in proportion to skewed priorities.

``prioritized``   two lines: priorities as they are, and the priorities of the last batch set anew before each draw. The
                  limit is a uniform sample of as many rows of the same storage; 3 times that is the bar.

The sizes are the case's own, since what counts is the number of rows: of ``--sizes`` only ``tiny`` makes a difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyTensorStorage, PrioritizedSampler, ReplayBuffer

from benchmarks.cases import Comparison
from benchmarks.presets import TINY, ReplaySizes
from benchmarks.timing import Candidate
from torchrl_ext.data import PrioritizedTransitionSampler, SlotReplayBuffer, SlotStorage, TransitionSampler

ALPHA, BETA = 0.6, 0.4
PREPARED_PRIORITIES = 16


@dataclass(frozen=True)
class Table:
    """How many rows there are, what a row holds, how many are drawn."""

    streams: int
    slots: int
    drawn: int
    observation: int = 20
    action: int = 6
    run_slots: int = 64

    @property
    def rows(self) -> int:
        return self.streams * self.slots


MILLION = Table(streams=512, slots=2048, drawn=8192)
SMALL = Table(streams=32, slots=128, drawn=64)


def prioritized(device: torch.device, sizes: Sequence[ReplaySizes]) -> Iterator[Comparison]:
    """Samples with priorities as they are, then with the priorities of the last batch set before."""
    for table in dict.fromkeys(SMALL if preset == TINY else MILLION for preset in sizes):
        for updates in (False, True):
            yield _compare(device, table, updates=updates)


def _compare(device: torch.device, table: Table, *, updates: bool) -> Comparison:
    storage = SlotStorage(table.slots, table.streams, device=device, final_capacity=table.slots // 16)
    sampler = PrioritizedTransitionSampler(alpha=ALPHA, beta=BETA)
    buffer = SlotReplayBuffer(storage=storage, sampler=sampler, batch_size=table.drawn)
    uniform = SlotReplayBuffer(storage=storage, sampler=TransitionSampler(), batch_size=table.drawn)
    for run in _runs(table, device):
        buffer.extend_batch(run)
    everything = storage.unravel(torch.arange(table.rows, device=device))
    sampler.update_priority(everything, _skewed(table.rows, device), storage=storage)

    def sample(priority: torch.Tensor | None) -> TensorDictBase:
        nonlocal last
        if priority is not None:
            handles = last["index"], last["index_generation"]
            sampler.update_priority(handles[0], priority, storage=storage, generation=handles[1])
        last = buffer.sample()
        return last

    last = buffer.sample()
    priorities = itertools.cycle([_skewed(table.drawn, device) for _ in range(PREPARED_PRIORITIES)])
    peer, missing = _build_peer(table, device, updates=updates)

    def fresh() -> torch.Tensor | None:
        return next(priorities) if updates else None

    return Comparison(
        config=f"{table.rows} rows, with update" if updates else f"{table.rows} rows",
        ours=Candidate(sample, fresh),
        limit_name="a uniform sample of the same storage",
        limit=Candidate(lambda _: uniform.sample()),
        peer_name=f"torchrl {metadata.version('torchrl')} PrioritizedSampler",
        peer=None if peer is None else Candidate(peer, fresh),
        peer_missing=missing,
        extra={"streams": table.streams, "slots": table.slots, "rows": table.drawn, "alpha": ALPHA, "beta": BETA},
    )


def _runs(table: Table, device: torch.device) -> Iterator[TensorDict]:
    """Yields a lap and one run more, so that every slot holds a row of a second lap or of a full first one."""
    rng = torch.Generator().manual_seed(0)
    batch = (table.run_slots, table.streams)
    for _ in range(table.slots // table.run_slots + 1):
        observation = torch.randn(table.run_slots + 1, table.streams, table.observation, generator=rng)
        ended = torch.rand(*batch, 1, generator=rng) < 0.01
        following = {"observation": observation[1:], "reward": torch.randn(*batch, 1, generator=rng)}
        flags = {"done": ended, "terminated": ended, "truncated": torch.zeros_like(ended)}
        action = torch.rand(*batch, table.action, generator=rng)
        run = {"observation": observation[:-1], "action": action, "next": {**following, **flags}}
        yield TensorDict(run, batch).to(device)


def _skewed(count: int, device: torch.device) -> torch.Tensor:
    """Priorities as TD errors have them: most small, few large."""
    return torch.empty(count).exponential_().pow_(2).to(device)


def _build_peer(
    table: Table, device: torch.device, *, updates: bool
) -> tuple[Callable[[torch.Tensor | None], Any] | None, str | None]:
    try:
        sampler = PrioritizedSampler(table.rows, alpha=ALPHA, beta=BETA)
    except RuntimeError as error:
        missing = f"it needs TorchRL's compiled extension, which does not load with torch {torch.__version__}: {error}"
        return None, missing
    buffer = ReplayBuffer(storage=LazyTensorStorage(table.rows, device=device), sampler=sampler, batch_size=table.drawn)
    for run in _runs(table, device):
        buffer.extend(run.flatten(0, 1))
    buffer.update_priority(torch.arange(table.rows, device=device), _skewed(table.rows, device))
    _, last = buffer.sample(return_info=True)

    def sample(priority: torch.Tensor | None) -> Any:
        nonlocal last
        if priority is not None:
            buffer.update_priority(last["index"], priority)
        data, last = buffer.sample(return_info=True)
        return data

    return sample, None
