# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The steps that ring cases push: the same content as fields and final observations for us and for the peer."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from benchmarks.cases.replay_sources import Source, make_source
from benchmarks.presets import ReplaySizes
from torchrl_ext.transport.producer import RingProducer

PREPARED = 4
RING_SLOTS = 64


class Pushes:
    """Runs, step by step, as a producer's fields.

    Args:
        preset (ReplaySizes): of one ring.

    Keyword Args:
        ended (bool): whether some rows end an episode.
        device (torch.device): of the fields and final observations that we push; the peer takes the host's.
        first_seed (int): of the first of ``PREPARED`` runs.
    """

    def __init__(
        self,
        preset: ReplaySizes,
        *,
        ended: bool = True,
        device: torch.device = torch.device("cpu"),  # noqa: B008  # immutable
        first_seed: int = 0,
    ) -> None:
        cpu = torch.device("cpu")
        self.preset, self._device = preset, device
        self.sources = [
            make_source(preset, cpu, ended=ended, seed=seed) for seed in range(first_seed, first_seed + PREPARED)
        ]
        self.layout = self.sources[0].packed.layout
        self._rotation = itertools.cycle(self.sources)
        self._ends = {id(source): self._ends_of(source) for source in self.sources}
        self._fields = {id(source): self._fields_of(source) for source in self.sources}

    def next(self) -> Source:
        """Returns the next run of the rotation."""
        return next(self._rotation)

    def _ends_of(self, source: Source) -> list[tuple[np.ndarray | None, torch.Tensor | None]]:
        packed = source.packed
        steps, streams = packed.rows.shape[:2]
        if packed.final_rows is None or packed.finals is None:
            return [(None, None)] * steps
        step, stream = np.divmod(packed.final_rows.numpy(), streams)
        finals = [packed.finals[torch.from_numpy(step == k)].to(self._device) for k in range(steps)]
        return [(stream[step == k], finals[k]) for k in range(steps)]

    def _fields_of(self, source: Source) -> list[dict[Any, torch.Tensor]]:
        leaves = self.layout.leaves(source.packed.rows, self.layout.fields)
        steps = range(len(source.packed.rows))
        return [{key: leaf[k].clone().to(self._device) for key, leaf in leaves.items()} for k in steps]

    def push(self, producer: RingProducer, source: Source, steps: range) -> None:
        """Pushes some steps of a run."""
        fields, ends = self._fields[id(source)], self._ends[id(source)]
        for step in steps:
            streams, finals = ends[step]
            if not producer.push(fields[step], final_streams=streams, finals=finals):
                raise RuntimeError("the ring must have room after it was drained.")

    def push_to_peer(self, ring: Any, steps: range, *, finals: bool) -> None:
        """Pushes some steps of the next run into a peer's ring."""
        self.push_source_to_peer(ring, self.next(), steps, finals=finals)

    def push_source_to_peer(self, ring: Any, source: Source, steps: range, *, finals: bool) -> None:
        """Pushes some steps of a run into a peer's ring."""
        for step in steps:
            options = {"final_obs": source.payloads[step]} if finals else {}
            if not ring.push(*(field[step] for field in source.fields), **options):
                raise RuntimeError("the peer's ring must have room for a run after it was drained.")
