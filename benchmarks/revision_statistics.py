# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The arithmetic of ``compare_revisions.py``: how much slower is head, and how sure is that?

Runs come in pairs, one of base and one of head, close in time. Rounds of one process resemble each other more than
those of two (memory layout, phase of the machine), so the bootstrap draws whole pairs first and rounds inside them
second; rounds alone would give intervals that are far too narrow. With few pairs the interval is still somewhat too
narrow, which is what the threshold is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Side = Literal["base", "head"]
Verdict = Literal["slower", "faster", "same", "unclear"]

RESAMPLES = 2000
#: Rounds drawn from a run; more do not move a median, and cost memory.
MOST_ROUNDS = 101


@dataclass(frozen=True)
class Ratio:
    """Median time of head over that of base: 1.1 is ten per cent slower; ``low`` and ``high`` are its interval."""

    value: float
    low: float
    high: float


def run_order(pairs: int) -> list[Side]:
    """Returns the order of the runs, base head head base ..., in which a steady drift falls on both alike.

    Raises:
        ValueError: if ``pairs`` is below 1.
    """
    if pairs < 1:
        raise ValueError(f"run_order: pairs must be at least 1, got {pairs}.")
    order: list[Side] = []
    for pair in range(pairs):
        order += ["base", "head"] if pair % 2 == 0 else ["head", "base"]
    return order


def ratio_of_medians(
    base: Sequence[Sequence[float]],
    head: Sequence[Sequence[float]],
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Ratio:
    """Returns the ratio of the medians over all rounds, with a percentile bootstrap interval.

    Args:
        base (sequence of sequences): seconds of each round, one sequence for each run, in order of time.
        head (sequence of sequences): as many runs; the i-th ones of both are a pair.
        confidence (float): share of the resamples inside the interval.
        resamples (int): how many; 2,000 by default.
        seed (int): of the draws, so that a report can be computed again.

    Raises:
        ValueError: if the numbers of runs differ or are 0, a run is empty, or a time is not above 0.
    """
    if len(base) != len(head) or not base:
        raise ValueError(f"ratio_of_medians: base and head need as many runs, got {len(base)} and {len(head)}.")
    for run in (*base, *head):
        if not len(run) or not min(run) > 0.0:
            raise ValueError(f"ratio_of_medians: a run needs times above 0, got {list(run)}.")
    value = float(np.median(np.concatenate(head)) / np.median(np.concatenate(base)))
    rng = np.random.default_rng(seed)
    pairs = rng.integers(len(base), size=(resamples, len(base)))
    ratios = _resampled_medians(head, pairs, rng) / _resampled_medians(base, pairs, rng)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(ratios, [tail, 1.0 - tail])
    return Ratio(value, float(low), float(high))


def verdict(ratio: Ratio, *, threshold: float = 0.05) -> Verdict:
    """Says what an interval shows.

    Args:
        ratio (Ratio): of :func:`ratio_of_medians`.
        threshold (float): how much slower or faster is too little to care about; 0.05 is 5 %.

    Returns:
        str: ``"slower"`` or ``"faster"`` when the whole interval is past the threshold, ``"same"`` when the whole
        interval is within it, else ``"unclear"``.
    """
    if ratio.low > 1.0 + threshold:
        return "slower"
    if ratio.high < 1.0 - threshold:
        return "faster"
    return "same" if 1.0 - threshold <= ratio.low and ratio.high <= 1.0 + threshold else "unclear"


def _resampled_medians(runs: Sequence[Sequence[float]], pairs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[resamples]: medians of as many rounds of each run that ``pairs`` [resamples, runs] names."""
    lengths = np.array([len(run) for run in runs])
    table = np.zeros((len(runs), lengths.max()))
    for row, run in zip(table, runs, strict=True):
        row[: len(run)] = run
    rounds = min(int(lengths.max()), MOST_ROUNDS)
    drawn = (rng.random((*pairs.shape, rounds)) * lengths[pairs][..., None]).astype(np.int64)
    return np.median(table[pairs[..., None], drawn].reshape(len(pairs), -1), axis=1)
