# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""TorchRL's ``MultiAsyncCollector``, whose worker writes into a replay buffer that it shares with this process."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors import MultiAsyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer

BATCH_STEPS = 64
IDLE_S = 1e-3
DEADLINE_S = 300.0


def _flatten(batch: TensorDictBase) -> TensorDictBase:
    """Makes rows of ``[streams, steps]``; the buffer has one dimension."""
    return batch.reshape(-1)


def name() -> str:
    """Returns the peer's name for the report."""
    return f"torchrl {importlib.metadata.version('torchrl')} MultiAsyncCollector, shared ReplayBuffer"


class SharedReplayCollector:
    """One worker process that runs free between :meth:`collect`'s beginning and end and is paused otherwise.

    It pauses between two of its batches only; what it makes beyond the rows asked for counts for the next call.

    Args:
        make_env (callable): makes the environment, of batch size ``[streams]``.
        policy (callable): as the collector takes it.

    Keyword Args:
        streams (int): rows of a step.
        slots (int): steps that the buffer keeps.
    """

    def __init__(self, make_env: Callable[[], Any], policy: Any, *, streams: int, slots: int) -> None:
        self._buffer = ReplayBuffer(storage=LazyTensorStorage(slots * streams), batch_size=streams, shared=True)
        env = make_env()
        # Initialised here: the collector would do it with rows ``[streams, 1]``, which no flat batch fits into.
        example = env.fake_tensordict().reshape(-1)
        example["collector", "traj_ids"] = torch.zeros(example.shape, dtype=torch.int64)
        self._buffer.extend(example)
        self._buffer.empty()
        env.close()
        self._threads = torch.get_num_threads()
        self._collector = MultiAsyncCollector(
            [make_env],
            policy,
            replay_buffer=self._buffer,
            frames_per_batch=BATCH_STEPS * streams,
            total_frames=-1,
            postproc=_flatten,
            device="cpu",
        )
        torch.set_num_threads(self._threads)  # the collector changes them in this process
        self._paused = contextlib.ExitStack()
        self._wanted = 0
        self._collector.start()
        self._wait(1)
        self._pause()
        self._wanted = self._written

    @property
    def _written(self) -> int:
        return int(self._buffer.write_count)

    def collect(self, rows: int) -> None:
        """Lets the worker run until there are so many rows more than after the last call."""
        self._wanted += rows
        if self._written < self._wanted:
            self._paused.close()
            self._wait(self._wanted)
            self._pause()

    def _pause(self) -> None:
        self._paused.enter_context(self._collector.pause())

    def _wait(self, rows: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self._written < rows:
            if time.monotonic() > deadline:
                raise TimeoutError(f"SharedReplayCollector: {rows} rows must come within {DEADLINE_S} s.")
            time.sleep(IDLE_S)

    def close(self) -> None:
        """Ends the worker."""
        self._paused.close()
        self._collector.async_shutdown()
        # Left to the end of the interpreter, its schemes would start a thread there and never return.
        for scheme in (self._collector._weight_sync_schemes or {}).values():
            scheme.shutdown()
        del self._collector
        gc.collect()
        torch.set_num_threads(self._threads)
