# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The registry of comparison cases.

A case is a generator function ``case(device, sizes) -> Iterator[Comparison]``, one comparison per line of the report.
It is a generator so that only one comparison's storages exist at a time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.presets import ReplaySizes
from benchmarks.timing import Candidate

CaseFunction = Callable[[torch.device, Sequence[ReplaySizes]], Iterator["Comparison"]]

# Modules are imported when a case is asked for, so that one case's imports cannot break the others.
CASES: dict[str, str] = {
    "collector_rate": "benchmarks.cases.collection:collector_rate",
    "ensemble_sample": "benchmarks.cases.sequences:ensemble_sample",
    "fast_sac_update": "benchmarks.cases.fast_sac:fast_sac_update",
    "ingest": "benchmarks.cases.replay:ingest",
    "prioritized": "benchmarks.cases.prioritized:prioritized",
    "ring_host_drain": "benchmarks.cases.rings:ring_host_drain",
    "ring_ipc_drain": "benchmarks.cases.rings:ring_ipc_drain",
    "ring_push": "benchmarks.cases.rings:ring_push",
    "routed_extend": "benchmarks.cases.write_back:routed_extend",
    "sample": "benchmarks.cases.replay:sample",
    "sample_nstep": "benchmarks.cases.replay:sample_nstep",
    "weight_sync": "benchmarks.cases.weights:weight_sync",
    "write_back": "benchmarks.cases.write_back:write_back",
    "dreamer_replay_path": "benchmarks.cases.dreamer:dreamer_replay_path",
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Candidates that do the same work, ready to be timed against each other.

    Args:
        config (str): which variant of the case this is.
        ours (Candidate): the component of ``torchrl_ext``.
        limit_name (str): what the limit does.
        limit (Candidate, optional): the least that the hardware must do for this work.
        peer_name (str): which package and function the peer is.
        peer (Candidate, optional): ``None`` when it cannot run here; ``peer_missing`` then says why.
        peer_missing (str, optional): one sentence.
        others (Mapping[str, Candidate]): measured in the same rounds, reported in ``extra`` only.
        bytes_moved (int): payload of one call, for GB/s.
        extra (Mapping[str, Any]): copied into the report's ``extra``.
    """

    config: str
    ours: Candidate
    limit_name: str
    limit: Candidate | None
    peer_name: str
    peer: Candidate | None = None
    peer_missing: str | None = None
    others: Mapping[str, Candidate] = field(default_factory=dict)
    bytes_moved: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)


def load(name: str) -> CaseFunction:
    """Returns the case function registered as ``name``.

    Raises:
        ValueError: if there is no such case; the message lists those there are.
    """
    if name not in CASES:
        raise ValueError(f"unknown case {name!r}; the cases are {', '.join(sorted(CASES))}.")
    module, function = CASES[name].split(":")
    return getattr(importlib.import_module(module), function)
