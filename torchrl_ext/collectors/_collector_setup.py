# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Checks what a collector is given, before anything is started."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torchrl.envs import Compose, EnvBase, TransformedEnv
from torchrl.envs.utils import RandomPolicy
from torchrl.modules.utils import get_primers_from_module

from torchrl_ext.collectors._ring_worker import split_evenly
from torchrl_ext.data import RowLayout, SlotReplayBuffer, SlotStorage
from torchrl_ext.data.sizing import free_bytes, gigabytes
from torchrl_ext.transport import HostRing

__all__ = ["EnvFactories", "check_frames", "check_memory", "check_storage", "policy_for_workers", "ring_capacity"]

#: Bytes of a ring where its slots are not numbered by the caller, and the most and fewest slots then.
_RING_BYTES, _MOST_SLOTS, _FEWEST_SLOTS = 1 << 28, 64, 4


class EnvFactories:
    """One environment factory per worker, and the streams of each.

    Args:
        create_env_fn (callable or sequence of callable): one for each worker; or one for all, which is called with
            ``num_envs=`` the streams of a worker where ``num_streams`` is given, without arguments otherwise.
        num_workers (int, optional): Defaults to the number of factories, else 1.
        num_streams (int, optional): of all workers.

    Raises:
        ValueError: for no worker, more workers than streams, or factories that do not match.
    """

    def __init__(
        self,
        create_env_fn: Callable[..., EnvBase] | Sequence[Callable[..., EnvBase]],
        num_workers: int | None,
        num_streams: int | None,
    ) -> None:
        several = list(create_env_fn) if isinstance(create_env_fn, Sequence) else None
        given = 1 if several is None else len(several)
        count = given if num_workers is None else num_workers
        if count < 1 or (several is not None and given != count):
            raise ValueError(
                f"RingCollector: num_workers must be at least 1 and match the factories, got {count} workers and "
                f"{given} factories. Nothing was started."
            )
        one = cast(Callable[..., EnvBase], create_env_fn)
        self.columns: list[slice] = []
        self.factories: list[Callable[[], EnvBase]] = [one] * count if several is None else several
        if num_streams is not None:
            if num_streams < count or several is not None:
                raise ValueError(
                    f"RingCollector: num_streams must be at least num_workers={count} and come with one factory, got "
                    f"{num_streams} with {given}. Nothing was started."
                )
            self.columns = split_evenly(num_streams, count)
            self.factories = [partial(one, num_envs=block.stop - block.start) for block in self.columns]

    def example(self) -> EnvBase:
        """Makes the first worker's environment, for its specs; the caller closes it."""
        return self.factories[0]()

    def with_primers(self, policy: Any, env: EnvBase) -> EnvBase:
        """Gives every environment the recurrent state that the policy asks for and ``env`` does not have yet."""
        if not isinstance(policy, nn.Module):
            return env
        found, known = get_primers_from_module(policy, warn=False), set(env.observation_spec.keys(True, True))
        primers = [
            primer
            for primer in getattr(found, "transforms", [] if found is None else [found])
            if not set(primer.primers.keys(True, True)) <= known
        ]
        if not primers:
            return env
        self.factories = [partial(_primed, factory, copy.deepcopy(primers)) for factory in self.factories]
        return _primed(lambda: env, primers)

    def count_streams(self, first: int) -> None:
        """Finds the streams of each worker, where they were not given, from those of the first one."""
        if self.columns:
            return
        sizes = [first]
        for factory in self.factories[1:]:
            if factory is self.factories[0]:
                sizes.append(first)
                continue
            env = factory()
            sizes.append(max(env.batch_size.numel(), 1))
            close_env(env)
        bounds = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
        self.columns = [slice(start, stop) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]


def _primed(factory: Callable[[], EnvBase], primers: Sequence[Any]) -> EnvBase:
    return TransformedEnv(factory(), Compose(*copy.deepcopy(primers)))


def close_env(env: EnvBase) -> None:
    """Closes an environment that may never have been opened, where another call would raise."""
    if not env.is_closed:
        env.close()


def policy_for_workers(policy: Any) -> Any:
    """Returns a copy of the policy on the host, as it travels to workers; None for random actions."""
    if policy is None or isinstance(policy, RandomPolicy):
        return None
    if not isinstance(policy, nn.Module):
        return policy
    held = [*policy.parameters(), *policy.buffers()]
    # What lies in shared memory would be shared with the workers, who act with weights of their own.
    apart = all(value.device.type == "cpu" and not value.is_shared() for value in held)
    return policy if apart else copy.deepcopy(policy).cpu()


def check_frames(name: str, frames: int, multiple: int) -> None:
    """Raises unless frames are whole steps of all streams, naming the nearest such number."""
    if frames < 1 or frames % multiple:
        nearest = max(1, round(frames / multiple)) * multiple
        raise ValueError(
            f"RingCollector: {name} must be a positive multiple of the {multiple} streams, got {frames}; the nearest "
            f"is {nearest}. Nothing was started."
        )


def check_storage(replay_buffer: Any, layout: RowLayout, num_streams: int) -> SlotStorage | None:
    """Returns the storage that a collector fills, checking that its rows fit."""
    if replay_buffer is None:
        return None
    storage = getattr(replay_buffer, "storage", None)
    if not isinstance(replay_buffer, SlotReplayBuffer) or not isinstance(storage, SlotStorage):
        raise TypeError(
            "RingCollector: replay_buffer must be a SlotReplayBuffer with a SlotStorage, got "
            f"{type(replay_buffer).__name__}. Nothing was started; iterate the collector to fill other buffers."
        )
    if storage.num_streams != num_streams or storage.layout not in (None, layout):
        kept = None if storage.layout is None else storage.layout.digest[:12]
        raise ValueError(
            f"RingCollector: the storage must have {num_streams} streams and layout {layout.digest[:12]} "
            f"({list(layout.by_key)}), got {storage.num_streams} and {kept} "
            f"({[] if storage.layout is None else list(storage.layout.by_key)}). Nothing was started; make it with "
            "layout=collector.layout, or choose the same observation_keys and extra_keys."
        )
    return storage


def ring_capacity(slots: int | None, slot_bytes: int) -> int:
    """Returns the slots of a ring."""
    if slots is not None:
        return slots
    return max(_FEWEST_SLOTS, min(_MOST_SLOTS, _RING_BYTES // max(slot_bytes, 1)))


def check_memory(layout: RowLayout, capacity: int, widths: Sequence[int]) -> None:
    """Raises ``MemoryError``, stating both numbers, when the host rings of all workers do not fit."""
    needed = sum(HostRing.nbytes_for(layout, capacity, width) for width in widths)
    free = free_bytes("cpu")
    if needed > free:
        raise MemoryError(
            f"RingCollector: the rings need {gigabytes(needed)}, {gigabytes(free)} are free. Nothing was started; "
            "choose fewer ring_slots."
        )


def device_of(value: torch.device | str | None) -> torch.device | None:
    """Returns a device that exists, or None.

    Raises:
        ValueError: when it does not.
    """
    if value is None:
        return None
    device = torch.device(value)
    if device.type == "cuda":
        index = 0 if device.index is None else device.index
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise ValueError(
                f"RingCollector: device {str(device)!r} must exist, got {torch.cuda.device_count()} CUDA devices. "
                "Nothing was started."
            )
        device = torch.device("cuda", index)
    return device
