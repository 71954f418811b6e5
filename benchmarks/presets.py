# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The sizes at which the replay cases are measured: those of the FastSAC scripts, and one for tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class ReplaySizes:
    """One replay workload: who writes, what a row holds, how much is sampled."""

    name: str
    """Name in the ``config`` column of the report."""
    streams: int
    """Environments that write one column each."""
    observation: int
    """Floats of the actor's observation."""
    critic_observation: int
    """Floats of the critic's observation."""
    action: int
    """Floats of the action."""
    run_slots: int = 8
    """Steps of each stream in one ingested run."""
    slots_cpu: int = 128
    """Steps kept per stream on the CPU."""
    slots_cuda: int = 1024
    """Steps kept per stream on a GPU."""
    sample_rows_cpu: int = 8192
    """Transitions per sampled batch on the CPU."""
    sample_rows_cuda: int = 65536
    """Transitions per sampled batch on a GPU: eight minibatches of the learner drawn at once."""
    ended: float = 0.01
    """Share of rows that end an episode and bring a final observation."""
    source_bytes: int = 128 * 2**20
    """Source runs rotated through an ingest: several times the last-level cache, so that no source is ever warm."""

    def __post_init__(self) -> None:
        for slots in (self.slots_cpu, self.slots_cuda):
            if slots % self.run_slots or slots < 2 * self.run_slots:
                raise ValueError(f"slots must be a multiple, at least 2, of run_slots={self.run_slots}, got {slots}.")
        for rows in (self.sample_rows_cpu, self.sample_rows_cuda):
            if rows % self.streams:
                # The peer samples a fixed number of rows per stream, so other sizes would not be equal work.
                raise ValueError(f"sample rows must be a multiple of streams={self.streams}, got {rows}.")

    def slots(self, device: torch.device) -> int:
        """Steps kept per stream on ``device``."""
        return self.slots_cuda if device.type == "cuda" else self.slots_cpu

    def sample_rows(self, device: torch.device) -> int:
        """Transitions per sampled batch on ``device``."""
        return self.sample_rows_cuda if device.type == "cuda" else self.sample_rows_cpu


SMALL = ReplaySizes(name="small", streams=256, observation=48, critic_observation=60, action=12)
LARGE = ReplaySizes(name="large", streams=2048, observation=98, critic_observation=120, action=29)
TINY = ReplaySizes(
    name="tiny",
    streams=32,
    observation=3,
    critic_observation=5,
    action=2,
    slots_cpu=32,
    slots_cuda=32,
    sample_rows_cpu=64,
    sample_rows_cuda=64,
    source_bytes=2**14,
)

SIZES: dict[str, ReplaySizes] = {sizes.name: sizes for sizes in (SMALL, LARGE, TINY)}
