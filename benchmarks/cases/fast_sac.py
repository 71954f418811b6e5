# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The gradient step of FastSAC: sample, normalise, critics, temperature, targets, and every fourth step the actor.

``fast_sac_update``   one call is 8 gradient steps, what the peer takes in one call. On CUDA everybody multiplies in
                      bfloat16; ours is captured and compiled, the peer compiled as it comes. The limit is the matrix
                      products of 8 steps alone, in one captured graph.

The peer draws and normalises its 8 batches at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchrl.data import Bounded

from benchmarks.cases import Comparison
from benchmarks.cases.replay_sources import OBSERVATIONS, Source, make_source
from benchmarks.peers import PeerUnavailableError, motrixlab, motrixlab_learner
from benchmarks.presets import TINY, ReplaySizes
from benchmarks.timing import Candidate
from torchrl_ext.data import SlotReplayBuffer, SlotStorage, TransitionSampler
from torchrl_ext.modules import EmpiricalNormalization, make_fast_sac_actor, make_fast_sac_critic
from torchrl_ext.objectives import FastSACLoss
from torchrl_ext.trainers import FastSACLearner

UPDATES = 8
POLICY_FREQUENCY = 4
ATOMS = 101
PREPARED_RUNS = 8


@dataclass(frozen=True)
class StepSizes:
    """Batch and widths."""

    batch: int
    actor: int = 512
    critic: int = 768

    @classmethod
    def of(cls, preset: ReplaySizes) -> StepSizes:
        """Returns the sizes that go with a replay workload."""
        return cls(64, 32, 32) if preset == TINY else cls(8192)


def make_replay(preset: ReplaySizes, device: torch.device, sources: Sequence[Source]) -> SlotReplayBuffer:
    """Returns a replay that is full of the sources' runs."""
    slots = preset.slots(device)
    storage = SlotStorage(
        slots, preset.streams, layout=sources[0].packed.layout, device=device, final_capacity=slots // 4
    )
    replay = SlotReplayBuffer(
        storage=storage, sampler=TransitionSampler(1, 0.97), batch_size=StepSizes.of(preset).batch
    )
    for turn in range(slots // preset.run_slots + 1):
        replay.extend_batch(sources[turn % len(sources)].packed)
    return replay


def make_learner(
    preset: ReplaySizes, device: torch.device, *, autocast: torch.dtype | None, seed: int = 0, **options: Any
) -> FastSACLearner:
    """Returns a learner of the preset's sizes."""
    torch.manual_seed(seed)
    sizes, widths = StepSizes.of(preset), [preset.observation, preset.critic_observation]
    normalizer = EmpiricalNormalization(list(OBSERVATIONS), widths, device=device)
    names = normalizer.out_keys
    spec = Bounded(-1.0, 1.0, shape=(preset.action,))
    actor = make_fast_sac_actor(
        spec, observation_dim=preset.observation, in_keys=[names[0]], hidden_size=sizes.actor, device=device
    )
    critic = make_fast_sac_critic(
        observation_dim=preset.critic_observation,
        action_dim=preset.action,
        in_keys=[names[1]],
        hidden_size=sizes.critic,
        num_atoms=ATOMS,
        device=device,
    )
    rates = {"critic_lr": 3e-4, "actor_lr": 3e-4, "alpha_lr": 3e-4, "tau": 0.125}
    loss = FastSACLoss(actor, critic, target_entropy_ratio=0.0)
    return FastSACLearner(
        loss, normalizer, policy_frequency=POLICY_FREQUENCY, autocast=autocast, **{**rates, **options}
    )


def fast_sac_update(device: torch.device, sizes: Sequence[ReplaySizes]) -> Iterator[Comparison]:
    """Takes 8 gradient steps per call."""
    for preset in sizes:
        yield _compare(device, preset)


def _compare(device: torch.device, preset: ReplaySizes) -> Comparison:
    sources = [make_source(preset, device, ended=True, seed=seed) for seed in range(PREPARED_RUNS)]
    replay, on_cuda = make_replay(preset, device, sources), device.type == "cuda"
    autocast = torch.bfloat16 if on_cuda else None

    def candidate(**options: Any) -> Candidate:
        learner = make_learner(preset, device, autocast=autocast, **options)
        return Candidate(lambda _: learner.update_from(replay, UPDATES))

    others = {}
    if on_cuda:
        others = {"ours_eager": candidate(), "ours_captured_not_compiled": candidate(cuda_graph=True)}
    peer, missing = _peer(device, preset, sources)
    return Comparison(
        config=preset.name,
        ours=candidate(cuda_graph=True, compile=True),
        limit_name="the matrix products of 8 steps" if on_cuda else "none on the CPU",
        limit=_products(device, preset) if on_cuda else None,
        peer_name=motrixlab.name(f"FastSacAgent.update({UPDATES})"),
        peer=peer,
        peer_missing=missing,
        others=others,
        extra={"batch": StepSizes.of(preset).batch, "updates_per_call": UPDATES, "autocast": str(autocast)},
    )


def _peer(device: torch.device, preset: ReplaySizes, sources: Sequence[Source]) -> tuple[Candidate | None, str | None]:
    sizes = StepSizes.of(preset)
    try:
        agent = motrixlab_learner.build_agent(
            streams=preset.streams,
            slots=preset.slots(device),
            observation=preset.observation,
            critic_observation=preset.critic_observation,
            action=preset.action,
            batch_size=sizes.batch,
            num_updates=UPDATES,
            actor_hidden=sizes.actor,
            critic_hidden=sizes.critic,
            fast=device.type == "cuda",
            device=device,
            runs=[source.fields for source in sources],
        )
    except PeerUnavailableError as error:
        return None, str(error)
    return Candidate(lambda _: agent.update(UPDATES)), None


def _products(device: torch.device, preset: ReplaySizes) -> Candidate:
    """Multiplies what forward and backward passes of 8 steps multiply, at padded widths, and nothing else."""
    sizes = StepSizes.of(preset)

    def layers(first: int, width: int, last: int) -> list[tuple[int, int]]:
        widths = [-(-size // 8) * 8 for size in (first, width, width // 2, width // 4, last)]
        return list(zip(widths[:-1], widths[1:], strict=True))

    critic = layers(preset.critic_observation + preset.action, sizes.critic, ATOMS)
    actor = layers(preset.observation, sizes.actor, 2 * preset.action)
    # Per step: critics forward twice (targets), backward as two more; actor forward once. The actor's turn: both
    # networks forward, the critics backward to their input, the actor backward.
    often = [(2, shape, 4) for shape in critic] + [(1, shape, 1) for shape in actor]
    turn = [(2, shape, 2) for shape in critic] + [(1, shape, 3) for shape in actor]
    jobs: list[Callable[[], object]] = []
    for num, (inner, outer), count in often * UPDATES + turn * (UPDATES // POLICY_FREQUENCY):
        a = torch.zeros(num, sizes.batch, inner, dtype=torch.bfloat16, device=device)
        b = torch.zeros(num, inner, outer, dtype=torch.bfloat16, device=device)
        out = torch.empty(num, sizes.batch, outer, dtype=torch.bfloat16, device=device)
        jobs += [lambda a=a, b=b, out=out: torch.bmm(a, b, out=out)] * count
    jobs[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for job in jobs:
            job()
    # With its operands, which the graph itself does not keep.
    return Candidate(lambda _, jobs=jobs: graph.replay())
