# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""``dreamer_replay_path``: everything that replay does for one DreamerV3 update, learner excluded.

Sample windows, split handles from data, find the last latent of each record, write the latents back. Ours is one
storage with a column per environment; the peer is TorchRL 0.14.1's path, one buffer per environment in an ensemble; the
limit is the same work on plain arrays of ``[environments * slots]`` rows, with fresh allocations.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torchrl
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
from torchrl_ext.data import SequenceSampler, SlotReplayBuffer, SlotStorage, replay_context_update


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes of one DreamerV3 recipe."""

    name: str
    streams: int
    windows: int
    steps: int
    state: int
    belief: int
    pixels: bool
    slots: int = 512

    def records(self, count: int, device: torch.device) -> TensorDict:
        """Records of one environment that has not ended."""
        never = torch.zeros(count, 1, dtype=torch.bool, device=device)
        data: dict[str, Any] = {
            "action": torch.randn(count, 6, device=device),
            "is_init": never,
            "state": torch.zeros(count, self.state, device=device),
            "belief": torch.zeros(count, self.belief, device=device),
            "next": {
                "reward": torch.randn(count, 1, device=device),
                "done": never.clone(),
                "terminated": never.clone(),
                "truncated": never.clone(),
            },
        }
        if self.pixels:
            data["next"]["pixels"] = torch.zeros(count, 3, 64, 64, dtype=torch.uint8, device=device)
        else:
            data["next"]["observation"] = torch.randn(count, 24, device=device)
        return TensorDict(data, [count])


RECIPES = (
    Recipe(name="walker", streams=16, windows=16, steps=64, state=128, belief=512, pixels=False),
    Recipe(name="pixel", streams=64, windows=32, steps=64, state=1024, belief=512, pixels=True),
)


def dreamer_replay_path(device: torch.device, sizes: Sequence[ReplaySizes]) -> Iterator[Comparison]:
    """Yields one comparison per recipe."""
    for recipe in RECIPES:
        latents = (
            torch.randn(recipe.windows, recipe.steps, recipe.state, device=device),
            torch.randn(recipe.windows, recipe.steps, recipe.belief, device=device),
        )
        peer, missing = _peer(recipe, device, *latents)
        yield Comparison(
            config=f"{recipe.name}, {recipe.streams} streams, {recipe.windows}x{recipe.steps}",
            ours=Candidate(_ours(recipe, device, *latents)),
            limit_name="the same on plain arrays, fresh allocations",
            limit=Candidate(_bare(recipe, device, *latents)),
            peer_name=f"torchrl {metadata.version('torchrl')} ReplayBufferEnsemble",
            peer=None if peer is None else Candidate(peer),
            peer_missing=missing,
            extra={"slots": recipe.slots, "state": recipe.state, "belief": recipe.belief},
        )


def _ours(
    recipe: Recipe, device: torch.device, state: torch.Tensor, belief: torch.Tensor
) -> Callable[[object], object]:
    storage = SlotStorage(recipe.slots, recipe.streams, next_obs="store", device=device)
    length = recipe.steps + 1
    buffer = SlotReplayBuffer(storage=storage, sampler=SequenceSampler(length), batch_size=recipe.windows * length)
    for _ in range(recipe.slots // 8):
        run = recipe.records(8 * recipe.streams, device)
        buffer.extend_batch(run.reshape(8, recipe.streams))

    def path(_: object) -> object:
        sample = buffer.sample()
        data = sample.exclude("index", "index_generation")[:, :-1]
        index, generation, patch = replay_context_update(sample, state, belief, distinct=False)
        buffer.update_if_present(index=index, generation=generation, patch=patch)
        return data

    return path


def _bare(
    recipe: Recipe, device: torch.device, state: torch.Tensor, belief: torch.Tensor
) -> Callable[[object], object]:
    rows, length = recipe.streams * recipe.slots, recipe.steps + 1
    store = {
        key: torch.zeros(rows, *leaf.shape[1:], dtype=leaf.dtype, device=device)
        for key, leaf in recipe.records(1, device).items(True, True)
    }
    for leaf in store.values():
        leaf.fill_(1)  # maps its pages
    generations = torch.zeros(rows, dtype=torch.int64, device=device)
    steps = torch.arange(length, device=device)
    flat_state, flat_belief = state.flatten(0, 1), belief.flatten(0, 1)

    def path(_: object) -> object:
        stream = torch.randint(0, recipe.streams, (recipe.windows, 1), device=device)
        first = torch.randint(0, recipe.slots - length, (recipe.windows, 1), device=device)
        drawn = stream * recipe.slots + first + steps
        index = drawn.flatten()
        out = {key: leaf.index_select(0, index) for key, leaf in store.items()}
        sampled = generations[index].view(recipe.windows, length)
        written = drawn[:, 1:].flatten()
        ordered, order = written.sort(stable=True)
        last = torch.ones_like(ordered, dtype=torch.bool)
        last[:-1] = ordered[1:] != ordered[:-1]
        keep = order[last]
        live = generations[written[keep]] == sampled[:, 1:].flatten()[keep]
        chosen = keep if bool(live.all()) else keep[live]
        store["state"].index_copy_(0, written[chosen], flat_state[chosen])
        store["belief"].index_copy_(0, written[chosen], flat_belief[chosen])
        return out

    return path


def _peer(
    recipe: Recipe, device: torch.device, state: torch.Tensor, belief: torch.Tensor
) -> tuple[Callable[[object], object] | None, str | None]:
    if device.type == "cuda":
        return None, "TorchRL 0.14.1 draws slices on the storage's device with the host's generator, which raises."
    update = _their_context_update()
    if update is None:
        return None, "this wheel of torchrl does not carry its sota-implementations."
    length = recipe.steps + 1
    members = []
    for stream in range(recipe.streams):
        member = TensorDictReplayBuffer(
            storage=LazyTensorStorage(recipe.slots),
            sampler=SliceSampler(slice_len=length, end_key=("next", "done"), traj_key="env_index", init_key=None),
            writer=TensorDictRoundRobinWriter(track_generations=True),
        )
        records = recipe.records(recipe.slots, device)
        member.extend(records.set("env_index", torch.full((recipe.slots,), stream)))
        members.append(member)
    ensemble = ReplayBufferEnsemble(
        *members,
        p="sampleable",
        num_buffer_sampled=recipe.windows,
        routing_key="env_index",
        batch_size=recipe.windows * length,
    )

    def path(_: object) -> object:
        sample = ensemble.sample().reshape(recipe.windows, length)
        handles = sample.select("index", "index_generation")
        data = sample.exclude("index", "index_generation")[:, :-1]
        index, generation, patch = update(handles, state, belief)
        ensemble.update_if_present(index=index, generation=generation, patch=patch)
        return data

    return path, None


def _their_context_update() -> Callable[..., Any] | None:
    path = Path(torchrl.__file__).parents[1] / "sota-implementations" / "dreamer_v3" / "dreamer_v3_replay.py"
    spec = importlib.util.spec_from_file_location("dreamer_v3_replay", path)
    if not path.exists() or spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.replay_context_update
