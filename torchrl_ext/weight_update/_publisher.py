# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The sending ends of all workers: which weights go to whom, and in what form."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, cast

import torch

from torchrl_ext.weight_update._channel import PAUSE, Channel
from torchrl_ext.weight_update._leaves import Weights
from torchrl_ext.weight_update._sending import SendingEnd, Snapshot
from torchrl_ext.weight_update.weight_layout import WeightLayout

__all__ = ["Publisher", "addressed"]


class Publisher:
    """One :class:`SendingEnd` per worker.

    Args:
        layout (WeightLayout): of the weights.
        channels (mapping): by worker.
        transport ("auto", "host" or "ipc"): see the scheme.
        source (Weights): what is sent as a rule; device memory is for what lies where it does.
    """

    def __init__(
        self,
        layout: WeightLayout,
        channels: Mapping[int, Channel],
        transport: Literal["auto", "host", "ipc"],
        source: Weights,
    ) -> None:
        self._layout, self._transport = layout, transport
        device = self._cuda_device(source)
        self.ends = {worker: SendingEnd(channel, worker, transport, device) for worker, channel in channels.items()}

    def send(self, sources: Mapping[int, Weights]) -> None:
        """Publishes to each worker its weights; all of them are checked before the first is sent."""
        devices: dict[int, torch.device | None] = {}
        for source in sources.values():
            if id(source) not in devices:
                self._layout.ensure_packable(source)
                devices[id(source)] = self._cuda_device(source)
        snapshots: dict[tuple[int, torch.device], Snapshot] = {}
        for worker, source in sources.items():
            end, device = self.ends[worker], devices[id(source)]
            if device is None and not end.on_device:
                end.put(self._layout, source)
                continue
            target = cast(torch.device, end.device if end.on_device else device)
            key = id(source), target
            if key not in snapshots:
                flat = torch.empty(self._layout.nbytes, dtype=torch.uint8, device=target)
                self._layout.pack(source, flat, non_blocking=True)
                snapshots[key] = Snapshot(flat)
            end.send(snapshots[key])
        self.poll()

    def poll(self) -> bool:
        """Polls every end; returns whether everything that was sent is visible."""
        for end in self.ends.values():
            end.poll()
        return all(end.idle for end in self.ends.values())

    def wait(self, workers: Sequence[int], seconds: float) -> None:
        """Waits until workers act on what was sent last; raises ``TimeoutError`` naming those that do not."""
        deadline = time.monotonic() + seconds
        while True:
            self.poll()
            ends = {worker: self.ends[worker] for worker in workers}
            late = {worker: end for worker, end in ends.items() if not end.idle or end.applied < end.version}
            if not late:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"SeqlockWeightSyncScheme: workers {list(late)} must have applied versions "
                    f"{[end.version for end in late.values()]} within {seconds} s, they act on "
                    f"{[end.applied for end in late.values()]}. The weights stay published."
                )
            time.sleep(PAUSE)

    def connect(self, seconds: float) -> None:
        """Waits until the first weights are visible, since the caller may not poll for long and workers wait for them;
        with ``transport="ipc"`` also until every worker mapped its device memory.
        """
        deadline = time.monotonic() + seconds
        while not self.poll() or self._transport == "ipc":
            late = [worker for worker, end in self.ends.items() if not (end.idle and end.settled)]
            if not late:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"SeqlockWeightSyncScheme: workers {late} must connect within {seconds} s of the sender's connect, "
                    "which did not happen. The first weights stay published."
                )
            time.sleep(PAUSE)

    def _cuda_device(self, source: Weights) -> torch.device | None:
        device = self._layout.device_of(source)
        return device if device is not None and device.type == "cuda" else None


def addressed(weights: Any, worker_ids: int | Sequence[int] | None, workers: Collection[int]) -> dict[int, Any]:
    """Returns what goes to whom, from what ``send`` is given; raises ``ValueError`` for workers that are not there."""
    each = isinstance(weights, Mapping) and len(weights) > 0 and all(isinstance(key, int) for key in weights)
    if worker_ids is None:
        chosen = list(weights) if each else list(workers)
    else:
        chosen = [worker_ids] if isinstance(worker_ids, int) else list(worker_ids)
    known = [worker for worker in workers if not each or worker in weights]
    unknown = [worker for worker in chosen if worker not in known]
    if unknown:
        raise ValueError(f"SeqlockWeightSyncScheme: worker ids must be among {known}, got {unknown}. Nothing was sent.")
    return {worker: weights[worker] if each else weights for worker in chosen}
