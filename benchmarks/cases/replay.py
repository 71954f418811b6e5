# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Replay cases: writing a packed run, sampling one-step and n-step transitions.

``ingest``        one 8-slot run of all streams, 1 % of its rows ended, their final observations written too. The limit
                  is one memcpy of the same bytes into a ring of the same size, from an equally cold source.
``sample``        a batch of independent uniform transitions, successor bytes included. The limit is two preallocated
                  gathers of as many rows and successors with the row numbers given.
``sample_nstep``  the same with n = 3. The limit stays the same: reading the rows between is the sampler's own cost.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.cases import Comparison
from benchmarks.cases.replay_sources import Source, make_source, rotating_sources
from benchmarks.peers import PeerUnavailableError, motrixlab
from benchmarks.presets import ReplaySizes
from benchmarks.timing import Candidate
from torchrl_ext.data import RowLayout, SlotReplayBuffer, SlotStorage, TransitionSampler

GAMMA = 0.97
PREPARED_RUNS = 16
PREPARED_DRAWS = 16


def ingest(device: torch.device, sizes: Sequence[ReplaySizes]) -> Iterator[Comparison]:
    """Writes one packed run per call; on CUDA also without ended rows, which needs no side table."""
    for preset in sizes:
        yield _ingest(device, preset, ended=True)
        if device.type == "cuda":
            yield _ingest(device, preset, ended=False)


def sample(device: torch.device, sizes: Sequence[ReplaySizes]) -> Iterator[Comparison]:
    """Samples one-step transitions."""
    for preset in sizes:
        yield _sample(device, preset, n_steps=1)


def sample_nstep(device: torch.device, sizes: Sequence[ReplaySizes]) -> Iterator[Comparison]:
    """Samples three-step transitions."""
    for preset in sizes:
        yield _sample(device, preset, n_steps=3)


def _ingest(device: torch.device, preset: ReplaySizes, *, ended: bool) -> Comparison:
    sources = rotating_sources(preset, device, ended=ended)
    first = next(sources)
    slots, run_bytes, block_bytes = preset.slots(device), first.packed.rows.numel(), first.block.numel()
    final_rows = 0 if first.packed.final_rows is None else len(first.packed.final_rows)
    storage = SlotStorage(slots, preset.streams, layout=first.packed.layout, device=device)
    buffer = SlotReplayBuffer(storage=storage, sampler=TransitionSampler(gamma=GAMMA))
    runs_per_lap = slots // preset.run_slots
    # The finals follow the run in the block, so the last position needs room for them behind the ring.
    ring = torch.zeros(runs_per_lap * run_bytes + block_bytes - run_bytes, dtype=torch.uint8, device=device)
    positions = itertools.cycle(range(0, runs_per_lap * run_bytes, run_bytes))

    def copy(source: Source) -> None:
        start = next(positions)
        if device.type == "cpu":
            # The C library's memcpy: torch's copy of bytes is a quarter slower.
            ctypes.memmove(ring.data_ptr() + start, source.block.data_ptr(), block_bytes)
        else:
            ring[start : start + block_bytes].copy_(source.block)

    peer, missing = _peer(lambda: _peer_ingest(preset, device, with_finals=ended))
    ours = Candidate(lambda source: buffer.extend_batch(source.packed), lambda: next(sources))
    # One lap of everybody, so that every page is mapped and every slot holds an older generation.
    writers: list[Callable[[Source], object]] = [ours.run, copy]
    if peer is not None:
        writers.append(peer)
    for write in writers:
        for _ in range(runs_per_lap + 1):
            write(next(sources))
    return Comparison(
        config=preset.name if ended else f"{preset.name}, no ends",
        ours=ours,
        limit_name="one memcpy of run and finals",
        limit=Candidate(copy, lambda: next(sources)),
        peer_name=motrixlab.name("SimpleReplayBuffer.extend_batch"),
        peer=None if peer is None else Candidate(peer, lambda: next(sources)),
        peer_missing=missing,
        bytes_moved=block_bytes,
        extra={**_describe(preset, device, first.packed.layout), "final_rows": final_rows},
    )


def _sample(device: torch.device, preset: ReplaySizes, *, n_steps: int) -> Comparison:
    # Sources need not be cold here: what is timed reads the storages.
    runs = [make_source(preset, device, ended=True, seed=seed) for seed in range(PREPARED_RUNS)]
    layout, rows, slots = runs[0].packed.layout, preset.sample_rows(device), preset.slots(device)
    laps = [runs[i % len(runs)] for i in range(slots // preset.run_slots + 2)]

    def build_ours(*, tail: bool) -> Candidate:
        buffer = SlotReplayBuffer(
            storage=SlotStorage(slots, preset.streams, layout=layout, device=device),
            sampler=TransitionSampler(n_steps=n_steps, gamma=GAMMA),
            batch_size=rows,
            contiguous=False,
        )
        for source in laps[:-1]:
            buffer.extend_batch(source.packed)
        buffer.extend_batch(replace(laps[-1].packed, tail=laps[-1].tail if tail else None))
        return Candidate(lambda _: buffer.sample(rows))

    def build_peer(final_obs: bool) -> Callable[[object], object]:
        peer_buffer = _peer_buffer(preset, device, n_steps=n_steps, final_obs=final_obs)
        for source in laps:
            peer_buffer.extend_batch(*source.fields, final_payloads=source.payloads if final_obs else None)
        return lambda _: peer_buffer.sample(rows // preset.streams)

    peer, missing = _peer(lambda: build_peer(True))
    plain, _ = _peer(lambda: build_peer(False))
    # For information: without a tail some streams end one row earlier than others, and the peer without final
    # observations does less work than we do.
    others = {"ours_uneven": build_ours(tail=False)}
    if plain is not None:
        others["peer_without_final_obs"] = Candidate(plain)
    return Comparison(
        config=preset.name,
        ours=build_ours(tail=True),
        limit_name="two preallocated gathers of rows and successors",
        limit=_gathers(layout, slots, preset.streams, rows, n_steps, device),
        peer_name=motrixlab.name("SimpleReplayBuffer.sample"),
        peer=None if peer is None else Candidate(peer),
        peer_missing=missing,
        others=others,
        bytes_moved=rows * (layout.row_bytes + layout.successor_bytes),
        extra={**_describe(preset, device, layout), "rows": rows, "n_steps": n_steps},
    )


def _gathers(layout: RowLayout, slots: int, streams: int, rows: int, n_steps: int, device: torch.device) -> Candidate:
    # The widest word that pays: CUDA gathers element by element, the CPU copies whole rows and needs no rounding up.
    word = torch.complex128 if device.type == "cuda" else torch.int64
    width = word.itemsize
    ring = torch.randint(0, 255, (slots * streams, layout.row_bytes), dtype=torch.uint8, device=device).view(word)
    prefix = ring[:, : -(-layout.successor_bytes // width)]
    row_out = torch.empty(rows, ring.shape[1], dtype=word, device=device)
    successor_out = torch.empty(rows, prefix.shape[1], dtype=word, device=device)
    drawn = [torch.randint(0, slots * streams, (rows,), device=device) for _ in range(PREPARED_DRAWS)]
    pairs = itertools.cycle([(row, (row + n_steps * streams) % (slots * streams)) for row in drawn])

    def gather(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        torch.index_select(ring, 0, pair[0], out=row_out)
        torch.index_select(prefix, 0, pair[1], out=successor_out)

    return Candidate(gather, lambda: next(pairs))


def _peer(build: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return build(), None
    except PeerUnavailableError as error:
        return None, str(error)


def _peer_buffer(preset: ReplaySizes, device: torch.device, *, n_steps: int, final_obs: bool) -> Any:
    return motrixlab.build_buffer(
        streams=preset.streams,
        slots=preset.slots(device),
        observation=preset.observation,
        critic_observation=preset.critic_observation,
        action=preset.action,
        n_steps=n_steps,
        device=device,
        final_obs_bootstrap=final_obs,
    )


def _peer_ingest(preset: ReplaySizes, device: torch.device, *, with_finals: bool) -> Callable[[Source], None]:
    buffer = _peer_buffer(preset, device, n_steps=1, final_obs=with_finals)
    if with_finals:
        return lambda source: buffer.extend_batch(*source.fields, final_payloads=source.payloads)
    return lambda source: buffer.extend_batch(*source.fields)


def _describe(preset: ReplaySizes, device: torch.device, layout: RowLayout) -> dict[str, Any]:
    return {
        "streams": preset.streams,
        "slots": preset.slots(device),
        "row_bytes": layout.row_bytes,
        "successor_bytes": layout.successor_bytes,
    }
