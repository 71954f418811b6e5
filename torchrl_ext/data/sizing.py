# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""How large a storage is, and whether it fits, before it is allocated."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import cast

import psutil
import torch
from torchrl._utils import logger as torchrl_logger

from torchrl_ext.data.layout import RowLayout

__all__ = ["free_bytes"]

#: int64 numbers kept per stream (see :class:`torchrl_ext.data._block.SlotBlock`).
POSITION_ROWS = 7
PAGE = 4096
_CGROUPS = Path("/sys/fs/cgroup")
#: Where a control group of version 2 and one of version 1 have their limit, what they use, and what of that is pages of
#: files, which the kernel drops before it refuses memory.
_GROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def default_final_capacity(capacity: int, *, grows: bool) -> int:
    """Returns the side-table entries per stream: 1/64 of the slots where the table can grow, 1/40 where it cannot.

    Toy capacities, and at least 16 episodes where a full table raises, always fit; one more is for the pending one.
    """
    share = max(1, capacity // 64) if grows else max(16, capacity // 40)
    return (capacity if capacity <= 16 else min(capacity, share)) + 1


def default_hole_capacity(capacity: int, *, grows: bool) -> int:
    """Returns the places per stream for rows that were cut before their successor was known.

    Each new start of a collector takes one until its row is overwritten, so memory that cannot grow has more of them.
    """
    return min(capacity, 8 if grows else 64)


def block_bytes(layout: RowLayout, capacity: int, num_streams: int, final_capacity: int, hole_capacity: int) -> int:
    """Returns the size of everything a storage allocates: positions, side table, rows and the sink row."""
    head = 8 * num_streams * (POSITION_ROWS + final_capacity + hole_capacity)
    rows = num_streams * (capacity + final_capacity) + 1
    return math.ceil(head / PAGE) * PAGE + rows * layout.row_bytes


def free_bytes(kind: str, *, device: torch.device | None = None, filename: str | None = None) -> int:
    """Returns the bytes that can be allocated now.

    Args:
        kind (str): ``"cpu"``, ``"shared"`` (limited by /dev/shm as well), ``"file"`` or ``"cuda"``.

    Keyword Args:
        device (torch.device, optional): the CUDA device.
        filename (str, optional): the file whose disk counts.

    Raises:
        ValueError: for another kind, or ``"file"`` without a ``filename``.
    """
    if kind not in ("cpu", "shared", "cuda", "file") or (kind == "file" and filename is None):
        raise ValueError(
            "free_bytes: kind must be 'cpu', 'shared', 'cuda', or 'file' with a filename, got "
            f"{kind!r} and filename={filename!r}."
        )
    if kind == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What the caching allocator holds without using it can be allocated too.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if kind == "file":
        return shutil.disk_usage(Path(cast(str, filename)).absolute().parent).free
    free = min(psutil.virtual_memory().available, _cgroup_free())
    if kind == "shared" and os.path.isdir("/dev/shm"):
        free = min(free, shutil.disk_usage("/dev/shm").free)
    return free


def _cgroup_free() -> float:
    for limit, used, stat, dropped in _GROUP_FILES:
        try:
            most = (_CGROUPS / limit).read_text().strip()
            if most == "max":
                return math.inf
            pages = dict(line.split() for line in (_CGROUPS / stat).read_text().splitlines())
            return max(0, int(most) - int((_CGROUPS / used).read_text()) + int(pages[dropped]))
        except (OSError, ValueError, KeyError):
            continue
    return math.inf


def gigabytes(count: float) -> str:
    """Formats bytes as decimal gigabytes, small amounts as kilobytes."""
    return f"{count / 1e9:.1f} GB" if count >= 5e7 else f"{count / 1e3:.1f} kB"


def ensure_fits(
    layout: RowLayout,
    capacity: int,
    num_streams: int,
    needed: int,
    kind: str,
    *,
    device: torch.device | None = None,
    filename: str | None = None,
) -> None:
    """Says what a storage needs, per field, and raises ``MemoryError`` when it is more than is free."""
    rows = capacity * num_streams
    fields = ", ".join(f"{field.key!r} {gigabytes(field.nbytes * rows)}" for field in layout.fields)
    rest = needed - sum(field.nbytes for field in layout.fields) * rows
    free = free_bytes(kind, device=device, filename=filename)
    text = (
        f"{capacity} slots x {num_streams} streams need {gigabytes(needed)} ({fields}, padding and side table "
        f"{gigabytes(rest)}); {device if kind == 'cuda' else kind} has {gigabytes(free)} free"
    )
    if needed > free:
        raise MemoryError(f"SlotStorage: {text}. Nothing was allocated; lower the capacity or the number of streams.")
    torchrl_logger.debug("SlotStorage: %s.", text)
