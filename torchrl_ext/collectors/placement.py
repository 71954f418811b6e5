# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Which processor cores a worker may use."""

from __future__ import annotations

import os
import re
from collections.abc import Collection

from torchrl._utils import logger as torchrl_logger

__all__ = ["parse_cores", "spread_cores"]

_PART = re.compile(r"\s*([0-9]+)\s*(?::\s*([0-9]+)\s*)?")


def parse_cores(spec: str | None, *, available: Collection[int] | None = None) -> set[int] | None:
    """Reads a set of cores, such as ``"0:5,7"``.

    Args:
        spec (str, optional): numbers and ranges with both ends included, separated by commas. None, for no choice, is
            returned as it is.

    Keyword Args:
        available (collection of int, optional): the cores that there are; others are dropped, which is logged. Defaults
            to those that this process may use.

    Returns:
        set of int: at least one core.

    Raises:
        ValueError: when ``spec`` cannot be read, or no core of it is available.

    Examples:
        >>> from torchrl_ext.collectors.placement import parse_cores
        >>> parse_cores("0:5,7", available=range(8))
        {0, 1, 2, 3, 4, 5, 7}
        >>> parse_cores("6:99", available=range(8))  # the rest is dropped
        {6, 7}
        >>> parse_cores(None) is None
        True
    """
    if spec is None:
        return None
    usable = os.sched_getaffinity(0) if available is None else set(available)
    chosen: set[int] = set()
    dropped = False
    for part in spec.split(","):
        match = _PART.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ValueError(f"parse_cores: spec must be cores and ascending ranges such as '0:5,7', got {spec!r}.")
        found = {core for core in usable if first <= core <= last}
        dropped |= len(found) < last - first + 1
        chosen |= found
    if not chosen:
        raise ValueError(f"parse_cores: spec must name one of the cores {sorted(usable)} at least, got {spec!r}.")
    if dropped:
        torchrl_logger.warning("parse_cores: of %r only the cores %s are available.", spec, sorted(chosen))
    return chosen


def spread_cores(cores: Collection[int] | None, num_workers: int) -> list[set[int] | None]:
    """Gives each worker cores of its own.

    Args:
        cores (collection of int, optional): to be shared out; None leaves every worker where it is.
        num_workers (int): workers, at least 1.

    Returns:
        list: for each worker, a block of neighbouring cores (sizes differ by at most one), or one core, shared evenly,
        where there are fewer cores than workers; or None.

    Raises:
        ValueError: for no worker or no core.

    Examples:
        >>> from torchrl_ext.collectors.placement import spread_cores
        >>> spread_cores(range(5), 2)
        [{0, 1, 2}, {3, 4}]
        >>> spread_cores({4, 7}, 3)
        [{4}, {7}, {4}]
        >>> spread_cores(None, 2)
        [None, None]
    """
    if num_workers < 1 or (cores is not None and not cores):
        raise ValueError(
            f"spread_cores: num_workers must be at least 1 and cores not empty, got {num_workers} and {cores}."
        )
    if cores is None:
        return [None] * num_workers
    ordered = sorted(set(cores))
    size, longer = divmod(len(ordered), num_workers)
    if not size:
        return [{ordered[worker % len(ordered)]} for worker in range(num_workers)]
    starts = [worker * size + min(worker, longer) for worker in range(num_workers + 1)]
    return [set(ordered[start:stop]) for start, stop in zip(starts[:-1], starts[1:], strict=True)]
