# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Interleaved timing of competing candidates.

Candidates are measured in one process, one call each per round, in an order that changes from round to round: a slow
phase of the machine, a warm cache or a growing heap then falls on all of them alike. Medians are reported, since the
mean of a shared machine measures its other tenants.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Candidate:
    """Something to time.

    Args:
        run (Callable): the timed call; receives what ``fresh`` returned.
        fresh (Callable, optional): called before each ``run``, outside the timer, for an input that must not be
            reused (a cold source, another set of rows). ``run`` receives ``None`` without it.
    """

    run: Callable[[Any], object]
    fresh: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call over all rounds."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    p95_ms: float


def summarise(samples_ms: list[float]) -> Timing:
    """Returns median and 10 % / 90 % / 95 % points of at least one sample (nearest rank)."""
    ordered = sorted(samples_ms)
    last = len(ordered) - 1
    points = [ordered[round(share * last)] for share in (0.1, 0.9, 0.95)]
    return Timing(statistics.median(ordered), *points)


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Returns what must be called inside the timer before a call on ``device`` counts as done."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def round_order(names: Sequence[str], turn: int) -> list[str]:
    """Returns the order of round ``turn``: rotated by one each round, mirrored after each full rotation."""
    # Rotation alone would leave most candidates behind the same neighbour, whose cache lines they then find.
    lap, first = divmod(turn, len(names))
    order = list(names) if lap % 2 == 0 else list(reversed(names))
    return order[first:] + order[:first]


def interleave(
    candidates: Mapping[str, Candidate],
    *,
    rounds: int,
    warmup: int = 3,
    synchronize: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Times every candidate once per round and returns their statistics.

    Args:
        candidates (Mapping): name to :class:`Candidate`, at least one.
        rounds (int): timed rounds, at least 1.
        warmup (int): untimed rounds before them (first calls allocate, compile and page in).
        synchronize (Callable): ends a call; runs inside the timer, and once before it starts.
        clock (Callable): seconds.

    Returns:
        dict[str, Timing]: one entry per candidate, in the order given.

    Raises:
        ValueError: if ``rounds`` is below 1.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}.")
    names = list(candidates)
    samples: dict[str, list[float]] = {name: [] for name in names}
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection would be billed to whoever happens to run
    try:
        for turn in range(-warmup, rounds):
            for name in round_order(names, turn):
                elapsed = _time_one(candidates[name], synchronize, clock)
                if turn >= 0:
                    samples[name].append(elapsed * 1e3)
    finally:
        if was_enabled:
            gc.enable()
    return {name: summarise(values) for name, values in samples.items()}


def _time_one(candidate: Candidate, synchronize: Callable[[], None], clock: Callable[[], float]) -> float:
    argument = candidate.fresh() if candidate.fresh is not None else None
    synchronize()  # work left over from the previous candidate is not ours
    start = clock()
    # The result is dropped at once, inside the timer: giving an output's memory back is part of its price.
    candidate.run(argument)
    synchronize()
    return clock() - start
