# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Sampling windows of consecutive steps over many streams, where TorchRL keeps one replay buffer per environment.

``ensemble_sample``  32 windows of 65 steps out of 65,536 records that 1, 64 or 256 streams share, successors included.
                     The limit is one gather per field from one contiguous timeline, window starts drawn as well.
                     ``walker`` and ``pixel`` are the records of DreamerV3; there the limit is one gather of the same
                     packed rows into preallocated memory, with the row numbers given.

The sizes are this case's own; those of the command line are for records of FastSAC.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    ReplayBufferEnsemble,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

from benchmarks.cases import Comparison
from benchmarks.presets import ReplaySizes
from benchmarks.timing import Candidate
from torchrl_ext.data import SequenceSampler, SlotReplayBuffer, SlotStorage

STEPS = 65
EPISODE = 100
PREPARED_DRAWS = 16


@dataclass(frozen=True, kw_only=True)
class WindowSizes:
    """One workload: who wrote, what a record holds, how many windows a batch has."""

    name: str
    streams: int
    slots: int
    """Records kept of each stream."""
    windows: int
    records: Callable[[WindowSizes], TensorDict]
    packed_limit: bool = False
    """Whether the limit is one gather of packed rows, not one per field."""


def _flat(sizes: WindowSizes) -> TensorDict:
    """[slots, streams]: observations whose successors are the next rows', except at every hundredth step."""
    shape = (sizes.slots, sizes.streams)
    observation = torch.randn(sizes.slots + 1, sizes.streams, 16)
    done = _every_hundredth(shape)
    step = {
        "observation": torch.where(done, torch.randn(*shape, 16), observation[1:]),
        "reward": torch.randn(*shape, 1),
        "done": done,
        "terminated": done.clone(),
        "truncated": torch.zeros_like(done),
    }
    data = {"observation": observation[:-1], "action": torch.randn(*shape, 6), "is_init": done.roll(1, 0), "next": step}
    return TensorDict({**data, "env_index": _env_index(shape)}, shape)


def _dreamer(sizes: WindowSizes, *, state: int, observed: dict[str, torch.Tensor]) -> TensorDict:
    """[slots, streams]: what DreamerV3 replays; what a step returned is kept under ``next`` alone."""
    shape = (sizes.slots, sizes.streams)
    done = _every_hundredth(shape)
    step = {"reward": torch.randn(*shape, 1), "done": done, "terminated": done.clone(), "truncated": done.clone()}
    latent = {"state": torch.randn(*shape, state), "belief": torch.randn(*shape, 512)}
    data = {"action": torch.randn(*shape, 6), "is_init": done.roll(1, 0), **latent, "next": {**step, **observed}}
    return TensorDict({**data, "env_index": _env_index(shape)}, shape)


def _walker(sizes: WindowSizes) -> TensorDict:
    return _dreamer(sizes, state=128, observed={"observation": torch.randn(sizes.slots, sizes.streams, 24)})


def _pixel(sizes: WindowSizes) -> TensorDict:
    pixels = torch.randint(0, 256, (sizes.slots, sizes.streams, 3, 64, 64), dtype=torch.uint8)
    return _dreamer(sizes, state=1024, observed={"pixels": pixels})


def _every_hundredth(shape: tuple[int, int]) -> torch.Tensor:
    return (torch.arange(shape[0]) % EPISODE == EPISODE - 1).view(-1, 1, 1).expand(*shape, 1).clone()


def _env_index(shape: tuple[int, int]) -> torch.Tensor:
    return torch.arange(shape[1]).expand(shape).clone()


FLAT = tuple(
    WindowSizes(name=f"{streams} streams", streams=streams, slots=65536 // streams, windows=32, records=_flat)
    for streams in (1, 64, 256)
)
WALKER = WindowSizes(name="walker", streams=16, slots=512, windows=16, records=_walker, packed_limit=True)
PIXEL = WindowSizes(name="pixel", streams=64, slots=256, windows=32, records=_pixel, packed_limit=True)


def ensemble_sample(device: torch.device, sizes: Sequence[ReplaySizes]) -> Iterator[Comparison]:
    """Samples windows; ``sizes`` is not used."""
    del sizes
    for workload in (*FLAT, WALKER, PIXEL):
        yield compare_windows(device, workload)


def compare_windows(device: torch.device, sizes: WindowSizes) -> Comparison:
    """Builds the candidates of one workload."""
    data = sizes.records(sizes).to(device)
    ours = _ours(device, sizes, data, uneven=False)
    others = {}
    if sizes.streams > 1:
        # For information: without a common head a draw has to search for its stream.
        others["ours_uneven"] = _sampling(_ours(device, sizes, data, uneven=True))
    peer, missing = _peer(device, sizes, data)
    layout = ours.storage.layout
    later = layout.successor_bytes if layout.derives else 0
    return Comparison(
        config=sizes.name,
        ours=_sampling(ours),
        limit_name="one gather of packed rows" if sizes.packed_limit else "one gather per field, starts drawn",
        limit=_packed_gather(ours, sizes) if sizes.packed_limit else _field_gathers(data, sizes),
        peer_name=f"torchrl {metadata.version('torchrl')} ReplayBufferEnsemble.sample",
        peer=peer,
        peer_missing=missing,
        others=others,
        bytes_moved=sizes.windows * STEPS * (layout.row_bytes + later),
        extra={
            "streams": sizes.streams,
            "slots": sizes.slots,
            "windows": sizes.windows,
            "steps": STEPS,
            "row_bytes": layout.row_bytes,
            "successor_bytes": later,
        },
    )


def _sampling(buffer: Any) -> Candidate:
    return Candidate(lambda _: buffer.sample())


def _ours(device: torch.device, sizes: WindowSizes, data: TensorDict, *, uneven: bool) -> SlotReplayBuffer:
    derives = "observation" in data.keys()
    buffer = SlotReplayBuffer(
        storage=SlotStorage(sizes.slots, sizes.streams, next_obs="derive" if derives else "store", device=device),
        sampler=SequenceSampler(STEPS),
        batch_size=sizes.windows * STEPS,
    )
    buffer.extend_batch(data)
    # The ring is full, and its oldest row is not in its first slot.
    buffer.extend_batch(data[: sizes.slots // 3])
    if uneven:
        buffer.extend_batch(data[:7, : sizes.streams // 2], streams=slice(0, sizes.streams // 2))
    return buffer


def _peer(device: torch.device, sizes: WindowSizes, data: TensorDict) -> tuple[Candidate | None, str | None]:
    try:
        ensemble = _ensemble(device, sizes, data)
        ensemble.sample()
    except Exception as error:  # another package's failure is a word in the report, not its end
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return _sampling(ensemble), None


def _ensemble(device: torch.device, sizes: WindowSizes, data: TensorDict) -> ReplayBufferEnsemble:
    members = []
    for stream in range(sizes.streams):
        member = TensorDictReplayBuffer(
            storage=LazyTensorStorage(sizes.slots, device=device),
            sampler=SliceSampler(slice_len=STEPS, end_key=("next", "done"), traj_key="env_index", init_key=None),
            writer=TensorDictRoundRobinWriter(track_generations=True),
        )
        member.extend(data[:, stream].clone())
        members.append(member)
    return ReplayBufferEnsemble(
        *members,
        p="sampleable",
        num_buffer_sampled=sizes.windows,
        routing_key="env_index",
        batch_size=sizes.windows * STEPS,
    )


def _field_gathers(data: TensorDict, sizes: WindowSizes) -> Candidate:
    timeline = data.transpose(0, 1).flatten(0, 1)
    fields = {key: leaf.contiguous() for key, leaf in timeline.items(True, True)}
    device, total = data.device, len(timeline)
    generator, ladder = torch.Generator(device).manual_seed(0), torch.arange(STEPS, device=device)

    def gather(_: object) -> dict[Any, torch.Tensor]:
        first = torch.randint(0, total - STEPS, (sizes.windows, 1), generator=generator, device=device)
        rows = (first + ladder).reshape(-1)
        return {key: leaf.index_select(0, rows) for key, leaf in fields.items()}

    return Candidate(gather)


def _packed_gather(ours: SlotReplayBuffer, sizes: WindowSizes) -> Candidate:
    # From our own rows: memory on other pages would be another machine.
    words = ours.storage.block.words
    device, drawn = words.device, []
    out = torch.empty(sizes.windows * STEPS, words.shape[1], dtype=words.dtype, device=device)
    for _ in range(PREPARED_DRAWS):
        slot = torch.randint(0, sizes.slots, (sizes.windows, 1), device=device) + torch.arange(STEPS, device=device)
        stream = torch.randint(0, sizes.streams, (sizes.windows, 1), device=device)
        drawn.append((slot % sizes.slots * sizes.streams + stream).flatten())
    turn = itertools.cycle(drawn)
    return Candidate(lambda rows: torch.index_select(words, 0, rows, out=out), lambda: next(turn))
