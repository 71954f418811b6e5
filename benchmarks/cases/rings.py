# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Rings, both ends in one process, so that a call is timed and not a scheduler.

``ring_host_drain``  an 8-slot run, 1 % of its rows ended, from rings in host memory into a storage: from one ring, and
                     from those of four collectors with a quarter of the streams each. With ``--device cuda`` the
                     storage is there and the ring's memory page-locked. The limit is one copy of the same slots.
``ring_ipc_drain``   the same from a ring in device memory; also a run without ends.
``ring_push``        one step of all streams from separate fields into a ring, with ``--device cuda`` into one in device
                     memory, from host and from CUDA fields. The limit is one copy of a slot.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.cases import Comparison
from benchmarks.cases.ring_peers import peer_drains, peer_pushes
from benchmarks.cases.ring_sources import PREPARED, RING_SLOTS, Pushes
from benchmarks.peers import motrixlab
from benchmarks.presets import ReplaySizes
from benchmarks.timing import Candidate
from torchrl_ext.data import SlotReplayBuffer, SlotStorage
from torchrl_ext.transport import (
    CudaIpcConsumer,
    CudaIpcProducer,
    CudaIpcRing,
    HostConsumer,
    HostProducer,
    HostRing,
)
from torchrl_ext.transport.consumer import RingConsumer
from torchrl_ext.transport.producer import RingProducer

COLLECTORS = 4
CPU = torch.device("cpu")
MEDIUM = ReplaySizes(name="medium", streams=2048, observation=48, critic_observation=60, action=12)
"""The third size of ``ring_ipc_drain``: many streams with narrow rows."""

Ends = tuple[RingProducer, RingConsumer]


def ring_host_drain(device: torch.device, sizes: Sequence[ReplaySizes]) -> Iterator[Comparison]:
    """Drains one run into a storage on ``device``."""
    for preset in sizes:
        yield _drain(preset, device, "host")
        if device.type == "cpu":
            yield _drain(preset, device, "host", collectors=COLLECTORS)


def ring_ipc_drain(device: torch.device, sizes: Sequence[ReplaySizes]) -> Iterator[Comparison]:
    """Drains one run from device memory into a storage there."""
    if device.type != "cuda":
        raise ValueError("ring_ipc_drain needs device memory; it is measured with --device cuda.")
    for preset in [*sizes, MEDIUM]:
        yield _drain(preset, device, "ipc")
        yield _drain(preset, device, "ipc", ended=False)


def ring_push(device: torch.device, sizes: Sequence[ReplaySizes]) -> Iterator[Comparison]:
    """Pushes one step."""
    for preset in sizes:
        yield _push(preset, device, fields=CPU)
        if device.type == "cuda":
            yield _push(preset, device, fields=device)


def _make_ends(kind: str, pushes: Pushes, device: torch.device) -> Ends:
    streams = pushes.preset.streams
    if kind == "ipc":
        shared = CudaIpcRing(pushes.layout, RING_SLOTS, streams, device=device)
        return CudaIpcProducer(shared), CudaIpcConsumer(shared)
    ring = HostRing(pushes.layout, RING_SLOTS, streams)
    return HostProducer(ring), HostConsumer(ring, device=device)


def _drain(
    preset: ReplaySizes, device: torch.device, kind: str, *, ended: bool = True, collectors: int = 1
) -> Comparison:
    block = preset.streams // collectors
    pushes = [
        Pushes(replace(preset, streams=block), ended=ended, first_seed=PREPARED * part) for part in range(collectors)
    ]
    ends = [_make_ends(kind, source, device) for source in pushes]
    slots, layout = preset.slots(device), pushes[0].layout
    finals = max(64, slots // 4)
    storage = SlotStorage(slots, preset.streams, layout=layout, device=device, final_capacity=finals)
    buffer = SlotReplayBuffer(storage=storage)
    columns = [slice(part * block, (part + 1) * block) for part in range(collectors)]

    def fill() -> None:
        for source, (producer, _) in zip(pushes, ends, strict=True):
            source.push(producer, source.next(), range(preset.run_slots))

    def drain(_: object) -> None:
        for (_, consumer), streams in zip(ends, columns, strict=True):
            while (span := consumer.read_span(tail=False)) is not None:
                with span:
                    buffer.extend_batch(span.run, streams=streams)

    run_bytes = preset.run_slots * preset.streams * layout.row_bytes
    copy = _copy_limit(device if kind == "ipc" else CPU, device, run_bytes, RING_SLOTS // preset.run_slots)
    peers, missing = peer_drains(preset, pushes, device, kind, ended=ended)
    candidates = [Candidate(drain, fill), Candidate(copy), *peers]
    for _ in range(slots // preset.run_slots + 1):  # maps every page, and every slot holds an older generation
        for candidate in candidates:
            candidate.run(None if candidate.fresh is None else candidate.fresh())
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    remark = "" if collectors == 1 else f", {collectors} collectors"
    return Comparison(
        config=f"{preset.name}{remark}" if ended else f"{preset.name}, no ends",
        ours=candidates[0],
        limit_name="one copy of the slots" if device.type == "cuda" else "one memcpy of the slots",
        limit=candidates[1],
        peer_name=motrixlab.name("Learner.drain"),
        peer=peers[0] if peers else None,
        peer_missing=missing,
        # What the peer's ring and buffer could do without their learner, which stacks the slots of a run.
        others={"peer_without_learner": peers[1]} if len(peers) > 1 else {},
        bytes_moved=run_bytes,
    )


def _copy_limit(source: torch.device, target: torch.device, nbytes: int, places: int) -> Callable[[object], None]:
    """Returns a copy of so many bytes, from page-locked memory where it goes to a GPU, each time another place."""
    pinned = source.type == "cpu" and target.type == "cuda"
    read = torch.ones(places * nbytes, dtype=torch.uint8, device=source, pin_memory=pinned)
    written = torch.zeros(2 * places * nbytes, dtype=torch.uint8, device=target)
    starts = itertools.cycle(range(0, places * nbytes, nbytes))
    ends = itertools.cycle(range(0, 2 * places * nbytes, nbytes))

    def copy(_: object) -> None:
        start, end = next(starts), next(ends)
        if target.type == "cpu":
            # The C library's memcpy: torch's copy of bytes is a quarter slower.
            ctypes.memmove(written.data_ptr() + end, read.data_ptr() + start, nbytes)
        else:
            written[end : end + nbytes].copy_(read[start : start + nbytes], non_blocking=True)

    return copy


def _push(preset: ReplaySizes, device: torch.device, *, fields: torch.device) -> Comparison:
    kind = "ipc" if device.type == "cuda" else "host"
    pushes = Pushes(preset, device=fields)
    producer, consumer = _make_ends(kind, pushes, device)
    slot_bytes = preset.streams * pushes.layout.row_bytes
    copy = _copy_limit(fields, device, slot_bytes, RING_SLOTS)
    extra: dict[str, Any] = {}

    def make_room() -> Any:
        if (span := consumer.read_span(tail=False)) is not None:
            span.commit()
        return pushes.next()

    def push(source: Any) -> None:
        pushes.push(producer, source, range(1))

    if fields.type == "cuda":
        peers, missing = [], "IpcTransitionRing.push takes host tensors only."
    else:
        peers, missing = peer_pushes(preset, pushes, kind, device)
    for _ in range(RING_SLOTS + 1):
        push(make_room())
        copy(None)
    candidates = [Candidate(push, make_room), *peers]
    if device.type == "cuda":
        # A push returns before its copy is done: what the producer itself waits for is a figure of its own.
        names = ("ours_issue_ms", "peer_issue_ms", "peer_without_final_obs_issue_ms")
        named = zip(candidates, names, strict=False)
        candidates = [replace(candidate, run=_issuing(candidate.run, extra, name)) for candidate, name in named]
    return Comparison(
        config=preset.name if device.type == "cpu" else f"{preset.name}, {fields.type} fields",
        ours=candidates[0],
        limit_name="one copy of a slot" if device.type == "cuda" else "one memcpy of a slot",
        limit=Candidate(copy),
        peer_name=motrixlab.name("push"),
        peer=candidates[1] if peers else None,
        peer_missing=missing,
        others={"peer_without_final_obs": candidates[2]} if peers else {},
        bytes_moved=slot_bytes,
        extra=extra,
    )


def _issuing(run: Callable[[Any], object], extra: dict[str, Any], name: str) -> Callable[[Any], None]:
    """Returns the call, which also keeps the median time until it returns in the report."""
    taken: list[float] = []

    def call(argument: Any) -> None:
        start = time.perf_counter()
        run(argument)
        taken.append((time.perf_counter() - start) * 1e3)
        extra[name] = round(statistics.median(taken), 5)

    return call
