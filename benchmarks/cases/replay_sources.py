# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The runs that the replay cases write: the same content as bytes for us and as fields for the peer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.peers import PeerUnavailableError, motrixlab
from benchmarks.presets import ReplaySizes
from torchrl_ext.data import PackedRun, RowLayout

OBSERVATIONS = ("observation", "critic_observation")


@dataclass(frozen=True)
class Source:
    """One run, as bytes for us and the limit, as the peer's fields for the peer."""

    packed: PackedRun
    tail: torch.Tensor
    """Successors of the last rows; not in ``packed``, because the peer does not store them either."""
    block: torch.Tensor
    fields: tuple[torch.Tensor, ...]
    payloads: list[Any]
    """The peer's final observations, one entry per slot; empty when the peer cannot be imported."""


def rotating_sources(preset: ReplaySizes, device: torch.device, *, ended: bool) -> Iterator[Source]:
    """Yields runs for ever, each one cold again before its turn comes round."""
    first = make_source(preset, device, ended=ended, seed=0)
    count = max(4, -(-preset.source_bytes // first.block.numel()))
    # All candidates draw from one rotation: whoever reads a source, it was last touched ``count`` calls ago.
    return itertools.cycle([first, *(make_source(preset, device, ended=ended, seed=seed) for seed in range(1, count))])


def make_source(preset: ReplaySizes, device: torch.device, *, ended: bool, seed: int) -> Source:
    """Returns the ``seed``-th run of the rotation, on ``device``."""
    run = _random_run(preset, ended=ended, seed=seed)
    packed = RowLayout.from_tensordict(run, next_keys=OBSERVATIONS).pack(run)
    if packed.finals is None or packed.tail is None:
        raise RuntimeError("a run that carries next observations must be packed with its finals and its tail.")
    tail, finals = packed.tail.to(device), packed.finals
    # Run and finals lie in one block, so that the limit is one memcpy of exactly our bytes.
    block = torch.cat([packed.rows.reshape(-1), finals.reshape(-1)]).to(device)
    run_bytes = packed.rows.numel()
    packed = PackedRun(
        layout=packed.layout,
        rows=block[:run_bytes].view(packed.rows.shape),
        final_rows=packed.final_rows if ended else None,
        finals=block[run_bytes:].view(finals.shape) if ended else None,
        tail=None,
    )
    return Source(packed, tail, block, _peer_fields(run, device), _peer_payloads(run, device))


def _random_run(preset: ReplaySizes, *, ended: bool, seed: int) -> TensorDict:
    rng = torch.Generator().manual_seed(seed)
    batch = (preset.run_slots, preset.streams)
    total = preset.run_slots * preset.streams
    count = max(2, round(preset.ended * total)) if ended else 0
    # The rotation repeats its runs: ends at random would pile up on few streams, so each run takes the next ones.
    order = torch.randperm(preset.streams, generator=torch.Generator().manual_seed(0))
    streams = order[torch.arange(seed * count, (seed + 1) * count) % preset.streams]
    steps = torch.randint(0, preset.run_slots, (count,), generator=rng)
    final_rows = (steps * preset.streams + streams).sort().values
    terminated, truncated = torch.zeros(2, total, dtype=torch.bool)
    terminated[final_rows[::2]] = True
    truncated[final_rows[1::2]] = True
    run = TensorDict({}, batch)
    for key in OBSERVATIONS:
        current = torch.randn(*batch, getattr(preset, key), generator=rng)
        successor = torch.cat([current[1:], torch.randn(1, *current.shape[1:], generator=rng)])
        successor.view(total, -1)[final_rows] = torch.randn(count, current.shape[-1], generator=rng)
        run[key], run["next", key] = current, successor
    run["action"] = torch.rand(*batch, preset.action, generator=rng)
    run["next", "reward"] = torch.randn(*batch, 1, generator=rng)
    for key, flag in {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}.items():
        run["next", key] = flag.view(*batch, 1)
    return run


def _peer_fields(run: TensorDict, device: torch.device) -> tuple[torch.Tensor, ...]:
    # Slot-major, contiguous, int64 flags: what the peer's own ring hands to extend_batch.
    scalars = (run["next", "reward"], run["next", "done"].long(), run["next", "truncated"].long())
    fields = (*(run[key] for key in (*OBSERVATIONS, "action")), *(value.squeeze(-1) for value in scalars))
    return tuple(value.contiguous().to(device) for value in fields)


def _peer_payloads(run: TensorDict, device: torch.device) -> list[Any]:
    payloads = []
    try:
        for step in run["next"]:
            # Stream ids stay on the host (the peer turns them into a list); the rows are already where it wants them.
            streams = step["done"].squeeze(-1).nonzero().squeeze(-1)
            final = (step[key][streams].to(device) for key in OBSERVATIONS)
            payloads.append(motrixlab.final_payload(streams, *final) if len(streams) else None)
    except PeerUnavailableError:
        return []
    return payloads
