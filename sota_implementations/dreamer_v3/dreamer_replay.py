# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""One replay for all streams, and the latents that go back into it after each update."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future

import torch
from common.devices import make_device
from dreamer_envs import OBSERVATION
from dreamer_settings import Settings
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_ext.data import (
    RowLayout,
    SequenceSampler,
    SlotReplayBuffer,
    SlotStorage,
    WriteBackResult,
    replay_context_update,
)

__all__ = ["ROW_KEYS", "WriteBacks", "make_replay", "row_layout"]

#: What rows keep beside observations, actions and outcomes: marks of first steps, and the latents.
ROW_KEYS = ("is_init", "state", "belief")

#: Outcomes on a device that are kept until they are counted, which waits for the device.
_MOST_PENDING = 256


def row_layout(env: EnvBase, latents: Mapping[str, int]) -> RowLayout:
    """Returns the layout of rows: a transition, the mark of a first step, and float32 latents.

    Args:
        env (EnvBase): with batch size ``[n]`` and ``"is_init"`` among its observations.
        latents (Mapping[str, int]): number of features by key.
    """
    example = env.fake_tensordict()
    outcome = [("next", key) for key in (OBSERVATION, "reward", "done", "terminated", "truncated")]
    for flag in ("terminated", "truncated"):
        # Every environment has "done"; a stored row always tells the ends apart.
        if example.get(("next", flag), None) is None:
            example["next", flag] = torch.zeros_like(example["next", "done"])
    row = example.select(OBSERVATION, "action", "is_init", *outcome)
    for key, size in latents.items():
        row.set(key, torch.zeros(*env.batch_size, size))
    return RowLayout.from_tensordict(row)


def make_replay(settings: Settings, layout: RowLayout, device: torch.device) -> SlotReplayBuffer:
    """Allocates the replay: a column per stream, windows of ``seq_len + 1`` rows, a generator of its own.

    Raises:
        MemoryError: if there is not as much memory; it says how much each field needs.
    """
    place = device if settings.replay.device is None else make_device(settings.replay.device, "replay.device")
    length = settings.learner.seq_len + 1
    generator = torch.Generator(place)
    generator.manual_seed(settings.seed)
    prefetch = settings.replay.prefetch
    if prefetch is None:
        prefetch = int(place.type == "cpu" and device.type != "cpu")
    return SlotReplayBuffer(
        storage=SlotStorage(settings.replay.capacity, settings.env.num_envs, layout=layout, device=place),
        sampler=SequenceSampler(length, online=settings.replay.online),
        batch_size=settings.learner.batch_size * length,
        sample_device=None if place == device else device,
        generator=generator,
        prefetch=prefetch or None,
        visibility=settings.replay.visibility,  # type: ignore[arg-type]  # the settings refuse others
    )


class WriteBacks:
    """Submits refreshed latents and keeps account of what became of every row; no future is dropped.

    A sample that is asked for after a submission waits for it, so the updates of one learner always see the latents of
    the last one. Counts are read at once on a host, and by :meth:`settle` where reading them waits for a device.

    Args:
        replay (SlotReplayBuffer): with ``"state"`` and ``"belief"`` in its rows.
    """

    def __init__(self, replay: SlotReplayBuffer) -> None:
        self._replay = replay
        self._on_host = replay.storage.device.type == "cpu"
        self._pending: deque[tuple[int, Future[WriteBackResult]]] = deque()
        self.submitted = 0
        """Updates."""
        self.rows = {"applied": 0, "stale": 0, "superseded": 0}
        """Rows of the updates that were counted, by outcome."""
        self._told = dict(self.rows)

    def submit(self, sample: TensorDictBase, state: torch.Tensor, belief: torch.Tensor) -> Future[WriteBackResult]:
        """Writes the latents after each step of the sampled windows into the row that follows.

        Args:
            sample (TensorDictBase): ``[B, T + 1]``, with its handles.
            state (torch.Tensor): ``[B, T, S]``; the caller may overwrite it afterwards.
            belief (torch.Tensor): ``[B, T, D]``.

        Raises:
            RuntimeError: if an earlier write-back failed.
        """
        index, generation, patch = replay_context_update(sample, state, belief, distinct=False)
        future = self._replay.submit_update_if_present(index=index, generation=generation, patch=patch)
        self.submitted += 1
        self._pending.append((self.submitted, future))
        if self._on_host or len(self._pending) > _MOST_PENDING:
            while self._pending and self._pending[0][1].done():
                self._count(*self._pending.popleft())
        return future

    def settle(self) -> None:
        """Waits for everything that was submitted, and counts it.

        Raises:
            RuntimeError: if a write-back failed; the others are counted by the next call.
        """
        while self._pending:
            self._count(*self._pending.popleft())

    def _count(self, number: int, future: Future[WriteBackResult]) -> None:
        try:
            result = future.result()
        except Exception as error:
            raise RuntimeError(
                f"dreamer_v3: the write-back of update {number} must not fail, got {type(error).__name__}: {error}"
            ) from error
        self.rows["applied"] += int(result.updated.sum())
        self.rows["stale"] += result.stale_count
        self.rows["superseded"] += result.superseded_count

    def metrics(self, *, keep: bool = False) -> dict[str, float]:
        """Returns what waits to be written, how long it does, and the shares of rows by outcome.

        Keyword Args:
            keep (bool): takes the outcomes that are known, so that nothing is waited for, and goes on with the shares.
                By default everything is settled first, and shares are those since the last call.
        """
        values = {"write_back/pending": float(sum(not future.done() for _, future in self._pending))}
        if self._on_host:
            values["write_back/wait_ms"] = self._replay.stats()["update_wait_p50_ms"]
        if not keep:
            self.settle()
        fresh = {name: count - self._told[name] for name, count in self.rows.items()}
        if not keep:
            self._told = dict(self.rows)
        if total := sum(fresh.values()):
            values |= {f"write_back/{name}_share": count / total for name, count in fresh.items()}
        return values
