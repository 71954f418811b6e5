# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Rings in host memory, both ends in one process, so that a call is timed and not a scheduler.

``ring_host_drain``  an 8-slot run, 1 % of its rows ended, from the ring into a host storage. The limit is one memcpy of
                     the same slots into memory of the same size.
``ring_push``        one step of all streams from separate fields into the ring. The limit is one memcpy of a slot.
``weight_sync``      one snapshot of a 1 MB actor from the slots that its publisher fills. The limit is one memcpy.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.cases import Comparison
from benchmarks.cases.replay_sources import Source, make_source
from benchmarks.peers import PeerUnavailableError, motrixlab
from benchmarks.presets import ReplaySizes
from benchmarks.timing import Candidate
from torchrl_ext.data import SlotReplayBuffer, SlotStorage
from torchrl_ext.transport import HostConsumer, HostProducer, HostRing, SeqlockSlots

RING_SLOTS = 64
PREPARED_RUNS = 4
ACTOR_BYTES = 2**20


def ring_host_drain(device: torch.device, sizes: Sequence[ReplaySizes]) -> Iterator[Comparison]:
    """Drains one run into a storage on the CPU."""
    _require_cpu(device)
    for preset in sizes:
        yield _drain(preset)


def ring_push(device: torch.device, sizes: Sequence[ReplaySizes]) -> Iterator[Comparison]:
    """Pushes one step."""
    _require_cpu(device)
    for preset in sizes:
        yield _push(preset)


def weight_sync(device: torch.device, sizes: Sequence[ReplaySizes]) -> Iterator[Comparison]:
    """Reads one snapshot."""
    _require_cpu(device)
    slots, out = SeqlockSlots(ACTOR_BYTES), torch.empty(ACTOR_BYTES, dtype=torch.uint8)
    weights = torch.randint(0, 255, (ACTOR_BYTES,), dtype=torch.uint8)
    yield Comparison(
        config="1 MB actor",
        ours=Candidate(lambda _: slots.read(out), lambda: slots.publish(weights)),
        limit_name="one memcpy",
        limit=Candidate(lambda _: ctypes.memmove(out.data_ptr(), weights.data_ptr(), ACTOR_BYTES)),
        peer_name="none",
        bytes_moved=ACTOR_BYTES,
    )


def _require_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        raise ValueError("rings in host memory are measured with --device cpu.")


class _Pushes:
    """Runs, step by step, as the producer's fields."""

    def __init__(self, preset: ReplaySizes) -> None:
        self.sources = [
            make_source(preset, torch.device("cpu"), ended=True, seed=seed) for seed in range(PREPARED_RUNS)
        ]
        self.layout = self.sources[0].packed.layout
        self._rotation = itertools.cycle(self.sources)
        self._ends = {id(source): self._ends_of(source) for source in self.sources}
        self._fields = {id(source): self._fields_of(source) for source in self.sources}

    def next(self) -> Source:
        return next(self._rotation)

    @staticmethod
    def _ends_of(source: Source) -> list[tuple[np.ndarray, torch.Tensor]]:
        packed = source.packed
        steps, streams = packed.rows.shape[:2]
        at = packed.final_rows.numpy()
        step, stream = np.divmod(at, streams)
        return [(stream[step == k], packed.finals[torch.from_numpy(step == k)]) for k in range(steps)]

    def _fields_of(self, source: Source) -> list[dict]:
        leaves = self.layout.leaves(source.packed.rows, self.layout.fields)
        return [{key: leaf[k].clone() for key, leaf in leaves.items()} for k in range(len(source.packed.rows))]

    def push(self, producer: HostProducer, source: Source, steps: range) -> None:
        fields, ends = self._fields[id(source)], self._ends[id(source)]
        for step in steps:
            streams, finals = ends[step]
            producer.push(fields[step], final_streams=streams, finals=finals)


def _drain(preset: ReplaySizes) -> Comparison:
    pushes = _Pushes(preset)
    ring = HostRing(pushes.layout, RING_SLOTS, preset.streams)
    producer, consumer = HostProducer(ring), HostConsumer(ring)
    buffer = SlotReplayBuffer(storage=SlotStorage(preset.slots_cpu, preset.streams, layout=pushes.layout))
    steps, run_bytes = range(preset.run_slots), pushes.sources[0].packed.rows.numel()
    plain = torch.zeros(preset.slots_cpu // preset.run_slots * run_bytes, dtype=torch.uint8)
    places = itertools.cycle(range(0, len(plain), run_bytes))
    ring_places = itertools.cycle(range(0, RING_SLOTS // preset.run_slots * run_bytes, run_bytes))

    def drain(_: object) -> None:
        while (span := consumer.read_span()) is not None:
            with span:
                buffer.extend_batch(span.run)

    def copy(_: object) -> None:
        start = ring.parts.rows.data_ptr() + next(ring_places)
        ctypes.memmove(plain.data_ptr() + next(places), start, run_bytes)

    peer, fresh, missing = _peer_drain(preset, pushes)
    for _ in range(preset.slots_cpu // preset.run_slots + 1):  # maps every page
        pushes.push(producer, pushes.next(), steps)
        drain(None)
        copy(None)
        if peer is not None and fresh is not None:
            peer(fresh())
    return Comparison(
        config=preset.name,
        ours=Candidate(drain, lambda: pushes.push(producer, pushes.next(), steps)),
        limit_name="one memcpy of the slots",
        limit=Candidate(copy),
        peer_name=f"{motrixlab.DISTRIBUTION} {motrixlab.VERSION} SharedTransitionRing, extend_batch",
        peer=None if peer is None else Candidate(peer, fresh),
        peer_missing=missing,
        bytes_moved=run_bytes,
    )


def _peer_drain(
    preset: ReplaySizes, pushes: _Pushes
) -> tuple[Callable[[object], None] | None, Callable[[], Any] | None, str | None]:
    sizes = {
        "streams": preset.streams,
        "observation": preset.observation,
        "critic_observation": preset.critic_observation,
        "action": preset.action,
    }
    cpu = torch.device("cpu")
    try:
        ring = motrixlab.build_ring(slots=RING_SLOTS, **sizes)
        replay = motrixlab.build_buffer(
            slots=preset.slots_cpu, n_steps=1, device=cpu, final_obs_bootstrap=False, **sizes
        )
    except PeerUnavailableError as error:
        return None, None, str(error)

    def fill() -> None:
        fields = pushes.next().fields
        for step in range(preset.run_slots):
            if not ring.push(*(field[step] for field in fields)):
                raise RuntimeError("the peer's ring must have room for a run after it was drained.")

    def drain(_: object) -> None:
        read = 0
        while read < preset.run_slots:
            count, views = ring.read_span()
            replay.extend_batch(*views)
            ring.commit_reads(count)
            read += count

    return drain, fill, None


def _push(preset: ReplaySizes) -> Comparison:
    pushes = _Pushes(preset)
    ring = HostRing(pushes.layout, RING_SLOTS, preset.streams)
    producer, consumer = HostProducer(ring), HostConsumer(ring)
    slot_bytes = preset.streams * pushes.layout.row_bytes
    plain = torch.zeros(RING_SLOTS * slot_bytes, dtype=torch.uint8)
    places = itertools.cycle(range(0, len(plain), slot_bytes))

    def make_room() -> Source:
        if (span := consumer.read_span()) is not None:
            span.commit()
        return pushes.next()

    def copy(source: Source) -> None:
        ctypes.memmove(plain.data_ptr() + next(places), source.packed.rows.data_ptr(), slot_bytes)

    peer_sizes = (preset.streams, preset.observation, preset.critic_observation, preset.action)
    peer, missing = None, None
    try:
        names = ("streams", "observation", "critic_observation", "action")
        peer = motrixlab.build_ring(slots=RING_SLOTS, **dict(zip(names, peer_sizes, strict=True)))
    except PeerUnavailableError as error:
        missing = str(error)

    def peer_fresh() -> tuple[torch.Tensor, ...]:
        count, _ = peer.read_span()
        peer.commit_reads(count)
        return tuple(field[0] for field in pushes.next().fields)

    for _ in range(RING_SLOTS + 1):
        pushes.push(producer, make_room(), range(1))
        copy(pushes.next())
    return Comparison(
        config=preset.name,
        ours=Candidate(lambda source: pushes.push(producer, source, range(1)), make_room),
        limit_name="one memcpy of a slot",
        limit=Candidate(copy, pushes.next),
        peer_name=f"{motrixlab.DISTRIBUTION} {motrixlab.VERSION} SharedTransitionRing.push",
        peer=None if peer is None else Candidate(lambda fields: peer.push(*fields), peer_fresh),
        peer_missing=missing,
        bytes_moved=slot_bytes,
    )
