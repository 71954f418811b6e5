# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What the workers of a collector are made from."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchrl_ext.collectors._board import Board
from torchrl_ext.collectors._ring_worker import RingWorker, output_path
from torchrl_ext.collectors._stream_plan import StreamPlan
from torchrl_ext.collectors._worker_loop import STAGES
from torchrl_ext.collectors._worker_options import WorkerOptions
from torchrl_ext.collectors.placement import parse_cores
from torchrl_ext.data import RowLayout
from torchrl_ext.transport import CudaIpcRing, HostRing
from torchrl_ext.weight_update import SeqlockWeightSyncScheme

__all__ = ["WorkerBlueprint"]


@dataclass(frozen=True, kw_only=True)
class WorkerBlueprint:
    """Makes the workers of a collector, with a ring and a board each.

    Args:
        streams (StreamPlan): environments, policy and rows.
        options (WorkerOptions): of the first worker; the others differ by ``index`` and ``first_stream``.
        capacity (int): steps that a ring holds.
        device (torch.device, optional): the CUDA device that rows are copied to.
        scheme (SeqlockWeightSyncScheme, optional): the sender of the policy's weights.
        cores (str, collection of int, or sequence of these, optional): for all workers, or for each.
        num_threads (int): of torch in each worker.
        output_dir (path, optional): folder for the workers' output.
        worker_env (mapping, optional): environment variables of the workers.
    """

    streams: StreamPlan
    options: WorkerOptions
    capacity: int
    device: torch.device | None
    scheme: SeqlockWeightSyncScheme | None
    cores: str | Collection[int] | Sequence[str | Collection[int]] | None
    num_threads: int
    output_dir: str | Path | None
    worker_env: Mapping[str, str] | None

    def make(self, kind: str) -> list[RingWorker]:
        """Returns new workers, not started, with rings of a kind, ``"host"`` or ``"ipc"``.

        Raises:
            ValueError, TypeError, MemoryError: for what cannot be. Nothing was started.
        """
        cores = _cores_of_each(self.cores, len(self.streams.columns))
        return [self._make_one(kind, index, own) for index, own in enumerate(cores)]

    def _make_one(self, kind: str, index: int, cores: Collection[int] | None) -> RingWorker:
        streams, folder = self.streams, self.output_dir
        columns, width = streams.columns[index], streams.widths[index]
        return RingWorker(
            self._make_ring(kind, streams.row.layout, width),
            Board(STAGES, 4 * width, len(streams.row.metric_keys)),
            columns,
            replace(self.options, index=index, first_stream=columns.start),
            target={
                "create_env_fn": streams.factories[index],
                "policy": streams.travelling,
                "policy_factory": streams.policy_factory,
                "weights": None if self.scheme is None else self.scheme.for_worker(index),
            },
            device=self.device,
            process={
                "output": output_path(None if folder is None else Path(folder), index),
                "env": self.worker_env,
                "cores": cores,
                "num_threads": self.num_threads,
            },
        )

    def _make_ring(self, kind: str, layout: RowLayout, width: int) -> HostRing | CudaIpcRing:
        if kind == "ipc":
            assert self.device is not None
            return CudaIpcRing(layout, self.capacity, width, device=self.device, tails=self.options.tails)
        return HostRing(layout, self.capacity, width)


def _cores_of_each(cores: Any, count: int) -> list[Collection[int] | None]:
    """Returns the cores of each worker, None where it has all of this process."""
    apart = isinstance(cores, Sequence) and not isinstance(cores, str) and not all(isinstance(c, int) for c in cores)
    given, usable = list(cores) if apart else [cores] * count, os.sched_getaffinity(0)
    if len(given) != count:
        raise ValueError(
            f"RingCollector: cores must be one set for all or one for each of {count} workers, got {len(given)}. "
            "Nothing was started."
        )
    found = [parse_cores(own) if isinstance(own, str) else own for own in given]
    for index, own in enumerate(found):
        if own is not None and not usable & set(own):
            raise ValueError(
                f"RingCollector: cores must name some of {sorted(usable)} for worker {index}, got {sorted(own)}. "
                "Nothing was started."
            )
    return found
