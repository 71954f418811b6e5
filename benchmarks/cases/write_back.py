# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Many streams: routed writes, and results written back into sampled rows.

``routed_extend``  1,024 records of a vector task in one call, for as many streams as the configuration says, in order
                   (every stream, step by step) or shuffled. The limit is one plain copy per leaf into arrays that
                   exist; it finds no places, no ends and no successors.
``write_back``     2,048 rows of latents, 32 MiB, written back by handle. The limit compares generations and then does
                   one ``index_copy_`` per leaf. Submitted updates are timed until applied. On CUDA a second
                   configuration writes from a busy learner stream into a host storage.

The peer is TorchRL 0.14.1 with one buffer per stream in an ensemble.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBufferEnsemble, TensorDictReplayBuffer, TensorDictRoundRobinWriter

from benchmarks.cases import Comparison
from benchmarks.presets import ReplaySizes
from benchmarks.timing import Candidate, summarise
from torchrl_ext.data import SequenceSampler, SlotReplayBuffer, SlotStorage

RECORDS = 1024
STREAM_COUNTS = (64, 256)
OBSERVATION, ACTION = 64, 6
ROWS, LATENT = 2048, 2048
STREAMS = 16
#: Prepared batches of records, each the continuation of the one before.
BATCHES = 16


def routed_extend(device: torch.device, sizes: Sequence[ReplaySizes]) -> Iterator[Comparison]:
    """Writes records of many streams in one call."""
    for streams, shuffled in itertools.product(STREAM_COUNTS, (False, True)):
        yield _routed_extend(device, streams, shuffled)


def write_back(device: torch.device, sizes: Sequence[ReplaySizes]) -> Iterator[Comparison]:
    """Writes latents back, alone and beside a sampler (and on CUDA beside a learner)."""
    yield _write_back(device)
    if device.type == "cpu":
        for visibility in ("eventual", "ordered"):
            yield _beside_a_sampler(visibility)
    else:
        yield _beside_a_learner(device)


def _records(streams: int, shuffled: bool, device: torch.device) -> list[TensorDict]:
    """Batches of records; an observation is its stream and step, and 1 % of the rows end an episode."""
    generator = torch.Generator().manual_seed(0)
    step = torch.zeros(streams, dtype=torch.int64)
    batches = []
    for _ in range(BATCHES):
        ids = torch.arange(streams).repeat(RECORDS // streams)
        if shuffled:
            ids = ids[torch.randperm(RECORDS, generator=generator)]
        rank = torch.empty(RECORDS, dtype=torch.int64)
        for stream in range(streams):
            at = (ids == stream).nonzero().squeeze(-1)
            rank[at] = torch.arange(len(at)) + step[stream]
            step[stream] += len(at)
        observation = (ids + rank / 1024).unsqueeze(-1).expand(-1, OBSERVATION).contiguous()
        following = (ids + (rank + 1) / 1024).unsqueeze(-1).expand(-1, OBSERVATION).contiguous()
        done = torch.rand(RECORDS, 1, generator=generator) < 0.01
        batches.append(
            TensorDict(
                {
                    "observation": observation,
                    "action": torch.randn(RECORDS, ACTION, generator=generator),
                    "is_init": torch.zeros(RECORDS, 1, dtype=torch.bool),
                    "env_index": ids,
                    "next": {
                        "observation": following,
                        "reward": torch.randn(RECORDS, 1, generator=generator),
                        "done": done,
                        "terminated": done.clone(),
                        "truncated": torch.zeros_like(done),
                    },
                },
                [RECORDS],
            ).to(device)
        )
    return batches


def _routed_extend(device: torch.device, streams: int, shuffled: bool) -> Comparison:
    batches = _records(streams, shuffled, device)
    slots = 2 * BATCHES * RECORDS // streams
    storage = SlotStorage(slots, streams, device=device, final_capacity=max(64, slots // 4))
    buffer = SlotReplayBuffer(storage=storage, routing_key="env_index")
    leaves = dict(batches[0].items(True, True))
    plain = {
        key: torch.zeros(slots * streams, *leaf.shape[1:], dtype=leaf.dtype, device=device)
        for key, leaf in leaves.items()
    }
    places = itertools.cycle(range(0, slots * streams, RECORDS))
    # Each candidate reads its own rotation: records must continue what was written before.
    ours_source, limit_source, peer_source = (itertools.cycle(batches) for _ in range(3))

    def copy(batch: TensorDict) -> None:
        start = next(places)
        for key, leaf in batch.items(True, True):
            plain[key][start : start + RECORDS].copy_(leaf)

    peer = _ensemble(
        [
            TensorDictReplayBuffer(storage=LazyTensorStorage(slots, device=device), writer=_writer())
            for _ in range(streams)
        ]
    )
    for batch in [*batches, *batches, *batches]:  # more than a lap, so that every page is mapped
        buffer.extend(batch)
        peer.extend(batch.copy())
        copy(batch)
    return Comparison(
        config=f"{streams} streams, {'shuffled' if shuffled else 'in order'}",
        ours=Candidate(buffer.extend, lambda: next(ours_source)),
        limit_name="one plain copy per leaf",
        limit=Candidate(copy, lambda: next(limit_source)),
        peer_name=f"torchrl {_version()} ReplayBufferEnsemble.extend",
        peer=Candidate(peer.extend, lambda: next(peer_source).copy()),
        bytes_moved=sum(leaf.numel() * leaf.dtype.itemsize for leaf in leaves.values()),
        extra={"records": RECORDS, "streams": streams},
    )


class _Latents:
    """A full storage of latents, handles of some of its rows, and a patch for them."""

    def __init__(self, device: torch.device, *, slots: int = 512, **options: Any) -> None:
        zeros = torch.zeros(slots, STREAMS, LATENT, device=device)
        run = TensorDict({"state": zeros, "belief": zeros, "reward": zeros[..., :1]}, [slots, STREAMS])
        self.buffer = SlotReplayBuffer(storage=SlotStorage(slots, STREAMS, device=device), **options)
        self.buffer.extend_batch(run)
        self.rows = torch.randperm(slots * STREAMS, generator=torch.Generator().manual_seed(0))[:ROWS].to(device)
        self.index = self.buffer.storage.unravel(self.rows)
        self.generation = self.buffer.storage.generation_of(self.index)
        self.patch = {key: torch.randn(ROWS, LATENT, device=device) for key in ("state", "belief")}

    def submit(self, **options: Any) -> Any:
        return self.buffer.submit_update_if_present(
            index=self.index, generation=self.generation, patch=self.patch, **options
        )

    def update(self) -> Any:
        return self.buffer.update_if_present(index=self.index, generation=self.generation, patch=self.patch)


def _write_back(device: torch.device) -> Comparison:
    latents = _Latents(device)
    slots = latents.buffer.storage.capacity
    plain = {key: torch.zeros(slots * STREAMS, LATENT, device=device) for key in latents.patch}
    for leaf in plain.values():
        leaf.fill_(1.0)  # maps its pages
    generations = torch.zeros(slots * STREAMS, dtype=torch.int64, device=device)

    def bare(_: object) -> None:
        live = generations[latents.rows] == latents.generation
        if device.type == "cuda" or bool(live.all()):
            for key, leaf in plain.items():
                leaf.index_copy_(0, latents.rows, latents.patch[key])

    members = [
        TensorDictReplayBuffer(storage=LazyTensorStorage(slots, device=device), writer=_writer())
        for _ in range(STREAMS)
    ]
    for member in members:
        member.extend(TensorDict({key: torch.zeros(slots, LATENT, device=device) for key in latents.patch}, [slots]))
    peer = _ensemble(members)
    handles = TensorDict({"buffer_ids": latents.index[:, 1], "index": latents.index[:, 0]}, [ROWS])
    return Comparison(
        config=f"{ROWS} rows, 32 MiB, {device.type} storage",
        ours=Candidate(lambda _: latents.update()),
        limit_name="compare generations, one index_copy_ per leaf",
        limit=Candidate(bare),
        peer_name=f"torchrl {_version()} ReplayBufferEnsemble.update_if_present",
        peer=Candidate(
            lambda _: peer.update_if_present(index=handles, generation=latents.generation, patch=latents.patch)
        ),
        others={
            "submit_until_applied": Candidate(lambda _: latents.submit().result()),
            "submit_donated_until_applied": Candidate(lambda _: latents.submit(donate=True).result()),
        },
        bytes_moved=2 * 4 * ROWS * LATENT,
        extra={"rows": ROWS, "streams": STREAMS},
    )


def _beside_a_sampler(visibility: str) -> Comparison:
    """A batch sampled ahead, taken while an update is being applied; the limit is the same without an update."""
    windows, length = 16, 65
    latents = _Latents(
        torch.device("cpu"),
        sampler=SequenceSampler(length),
        batch_size=windows * length,
        prefetch=1,
        visibility=visibility,
    )
    running: list[Any] = []

    def quiet() -> None:
        while running:
            running.pop().result()
        latents.buffer.sample()  # asks for the next batch

    def busy() -> None:
        quiet()
        running.append(latents.submit(donate=True))

    return Comparison(
        config=f"prefetched sample beside an update, {visibility}",
        ours=Candidate(lambda _: latents.buffer.sample(), busy),
        limit_name="the same without an update",
        limit=Candidate(lambda _: latents.buffer.sample(), quiet),
        peer_name="none",
        extra={"rows": windows * length},
    )


def _beside_a_learner(device: torch.device) -> Comparison:
    """A patch computed by a busy learner stream, for a host storage: what the learner and the caller notice of it."""
    latents = _Latents(torch.device("cpu"))
    patch = {key: leaf.to(device) for key, leaf in latents.patch.items()}
    weights = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)

    def learner_step() -> None:
        for _ in range(8):
            torch.mm(weights, weights)

    def submit() -> Any:
        return latents.buffer.submit_update_if_present(index=latents.index, generation=latents.generation, patch=patch)

    calls, overlapped, steps = [], 0, {True: [], False: []}
    for turn in range(60):
        writes = bool(turn % 2)
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        learner_step()
        if writes:
            before = time.perf_counter()
            future = submit()
            calls.append(1e3 * (time.perf_counter() - before))
        for _ in range(3):
            learner_step()
        behind = torch.cuda.Event()
        behind.record()
        if writes:
            future.result()
            overlapped += not behind.query()
        torch.cuda.synchronize(device)
        steps[writes].append(1e3 * (time.perf_counter() - begin) / 4)
    timing = {
        name: summarise(values[5:]).median_ms for name, values in (("with", steps[True]), ("without", steps[False]))
    }
    return Comparison(
        config="32 MiB patch behind a busy learner stream, cpu storage",
        ours=Candidate(lambda _: submit().result()),
        limit_name="copies to pinned memory",
        limit=_pinned_copies(patch),
        peer_name="none",
        bytes_moved=2 * 4 * ROWS * LATENT,
        extra={
            "submit_call_ms": summarise(calls[5:]).median_ms,
            "done_before_the_steps_behind": f"{overlapped} of 30",
            "learner_step_ms": timing["without"],
            "learner_step_with_write_back_ms": timing["with"],
        },
    )


def _pinned_copies(patch: dict[str, torch.Tensor]) -> Candidate:
    pinned = {key: torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True) for key, leaf in patch.items()}

    def copy(_: object) -> None:
        for key, leaf in patch.items():
            pinned[key].copy_(leaf, non_blocking=True)

    return Candidate(copy)


def _writer() -> TensorDictRoundRobinWriter:
    return TensorDictRoundRobinWriter(track_generations=True)


def _ensemble(members: list[TensorDictReplayBuffer]) -> ReplayBufferEnsemble:
    return ReplayBufferEnsemble(*members, routing_key="env_index", num_buffer_sampled=1)


def _version() -> str:
    return metadata.version("torchrl")
