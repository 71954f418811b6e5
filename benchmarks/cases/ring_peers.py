# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""MotrixLab's rings doing what ours do in the ring cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.cases.ring_sources import RING_SLOTS, Pushes
from benchmarks.peers import PeerUnavailableError, motrixlab
from benchmarks.presets import ReplaySizes
from benchmarks.timing import Candidate


def _widths(preset: ReplaySizes) -> dict[str, int]:
    return {
        "observation": preset.observation,
        "critic_observation": preset.critic_observation,
        "action": preset.action,
    }


def _peer_ring(preset: ReplaySizes, kind: str, device: torch.device, *, finals: bool) -> Any:
    sizes = {"slots": RING_SLOTS, "streams": preset.streams, **_widths(preset)}
    ring = motrixlab.build_ipc_ring(device=device, **sizes) if kind == "ipc" else motrixlab.build_ring(**sizes)
    observations = {"observation": preset.observation, "critic_observation": preset.critic_observation}
    return motrixlab.add_finals(ring, **observations) if finals else ring


def peer_drains(
    preset: ReplaySizes, pushes: Sequence[Pushes], device: torch.device, kind: str, *, ended: bool
) -> tuple[list[Candidate], str | None]:
    """The peer's learner, and with one ring its ring and buffer alone, which then have no final observations."""
    options = {"slots": preset.slots(device), "streams": preset.streams, "n_steps": 1, "device": device}
    try:
        rings = [_peer_ring(source.preset, kind, device, finals=ended) for source in pushes]
        replay = motrixlab.build_buffer(final_obs_bootstrap=ended, **options, **_widths(preset))
        learner = motrixlab.build_drain(rings, replay, run_slots=preset.run_slots, device=device)
        plain = _peer_ring(preset, kind, device, finals=False)
        plain_replay = motrixlab.build_buffer(final_obs_bootstrap=False, **options, **_widths(preset))
    except PeerUnavailableError as error:
        return [], str(error)

    def fill(targets: Sequence[Any], *, finals: bool) -> None:
        for ring, source in zip(targets, pushes, strict=True):
            source.push_to_peer(ring, range(preset.run_slots), finals=finals)

    def drain(_: object) -> None:
        read = 0
        while read < preset.run_slots:
            if not (count := learner()):
                raise RuntimeError("the peer's learner must find the run that was pushed.")
            read += count

    def drain_plain(_: object) -> None:
        read = 0
        while read < preset.run_slots:
            count, views = plain.read_span()
            plain_replay.extend_batch(*views)
            plain.commit_reads(count)
            read += count

    found = [Candidate(drain, lambda: fill(rings, finals=ended))]
    # Without the learner a host run reaches a GPU from pageable memory: not what the peer does.
    if len(pushes) == 1 and (kind == "ipc" or device.type == "cpu"):
        found.append(Candidate(drain_plain, lambda: fill([plain], finals=False)))
    return found, None


def peer_pushes(
    preset: ReplaySizes, pushes: Pushes, kind: str, device: torch.device
) -> tuple[list[Candidate], str | None]:
    """The peer's push with final observations, then without."""
    try:
        rings = [_peer_ring(preset, kind, device, finals=finals) for finals in (True, False)]
    except PeerUnavailableError as error:
        return [], str(error)

    def make(ring: Any, finals: bool) -> Candidate:
        def fresh() -> Any:
            count, _ = ring.read_span()
            if count:
                ring.commit_reads(count)
            return pushes.next()

        return Candidate(lambda source: pushes.push_source_to_peer(ring, source, range(1), finals=finals), fresh)

    return [make(ring, finals) for ring, finals in zip(rings, (True, False), strict=True)], None
