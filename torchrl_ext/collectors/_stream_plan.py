# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The environments, policy and rows of a collector, found before anything is started."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from tensordict import NestedKey
from torch import nn
from torchrl.envs import Compose, EnvBase, TransformedEnv
from torchrl.envs.utils import RandomPolicy
from torchrl.modules.utils import get_primers_from_module

from torchrl_ext.collectors._row_plan import RowPlan

__all__ = ["EnvFactories", "StreamPlan", "policy_for_workers"]


class StreamPlan:
    """What every worker of a collector makes and writes, from one example of each.

    Args:
        create_env_fn (callable or sequence of callable): see :class:`EnvFactories`.
        policy (callable, optional): acts in the workers.

    Keyword Args:
        policy_factory (callable, optional): makes the policy in each worker instead; called here too.
        num_workers (int, optional): see :class:`EnvFactories`.
        num_streams (int, optional): see :class:`EnvFactories`.
        observation_keys, extra_keys, metric_keys (sequence of NestedKey): see :class:`RowPlan`.
        batch (bool): whether rows are handed out as batches.

    Raises:
        ValueError, KeyError: for what cannot be; and whatever a factory or the policy raises.
    """

    policy: Any
    """As this process has it."""
    travelling: Any
    """As it is sent to the workers, None where they make it or act randomly."""
    row: RowPlan
    """Of every row."""
    columns: list[slice]
    """The streams of each worker."""

    def __init__(
        self,
        create_env_fn: Callable[..., EnvBase] | Sequence[Callable[..., EnvBase]],
        policy: Any,
        *,
        policy_factory: Callable[[], Any] | None,
        num_workers: int | None,
        num_streams: int | None,
        observation_keys: Sequence[NestedKey] | None,
        extra_keys: Sequence[NestedKey] | None,
        metric_keys: Sequence[NestedKey],
        batch: bool,
    ) -> None:
        self.policy, self.policy_factory = policy if policy_factory is None else policy_factory(), policy_factory
        envs = EnvFactories(create_env_fn, num_workers, num_streams)
        env = envs.example()
        try:
            env = envs.with_primers(self.policy, env)
            example = policy_for_workers(self.policy)
            self.row = RowPlan.of(
                env,
                example,
                observation_keys=observation_keys,
                extra_keys=extra_keys,
                metric_keys=metric_keys,
                batch=batch,
            )
            envs.count_streams(max(env.batch_size.numel(), 1))
        finally:
            close_env(env)
        self.travelling = None if policy_factory is not None else example
        self.factories, self.columns = envs.factories, envs.columns

    @property
    def widths(self) -> list[int]:
        """How many streams each worker has."""
        return [block.stop - block.start for block in self.columns]

    @property
    def num_streams(self) -> int:
        """Streams of all workers."""
        return self.columns[-1].stop


class EnvFactories:
    """One environment factory per worker, and the streams of each.

    Args:
        create_env_fn (callable or sequence of callable): one for each worker; or one for all, which is called with
            ``num_envs=`` the streams of a worker where ``num_streams`` is given, without arguments otherwise.
        num_workers (int, optional): Defaults to the number of factories, else 1.
        num_streams (int, optional): of all workers.

    Raises:
        ValueError: for no worker, more workers than streams, or factories that do not match.
        TypeError: for what is not a function, as an environment or its name, or does not take ``num_envs``.
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
        for factory in [create_env_fn] if several is None else several:
            if isinstance(factory, EnvBase) or not callable(factory):
                raise TypeError(
                    "RingCollector: create_env_fn must be a function that makes environments, or one for each worker, "
                    f"got {type(factory).__name__}. Nothing was started; pass lambda: GymEnv(...) or the like."
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
            if not _takes_num_envs(one):
                raise TypeError(
                    f"RingCollector: create_env_fn must take num_envs=, which num_streams={num_streams} is split into, "
                    f"got {one!r}. Nothing was started; leave num_streams out where it makes all of its streams itself."
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
        # One for all stays one for all: its streams need not be counted again.
        primed = {id(factory): partial(_primed, factory, copy.deepcopy(primers)) for factory in self.factories}
        self.factories = [primed[id(factory)] for factory in self.factories]
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


def split_evenly(total: int, parts: int) -> list[slice]:
    """Splits streams among workers; the first ones have one more.

    >>> split_evenly(10, 4)
    [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None), slice(8, 10, None)]
    """
    share, more = divmod(total, parts)
    bounds = [0]
    for part in range(parts):
        bounds.append(bounds[-1] + share + (part < more))
    return [slice(start, stop) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]


def _takes_num_envs(factory: Callable[..., EnvBase]) -> bool:
    try:
        inspect.signature(factory).bind(num_envs=1)
    except TypeError:
        return False
    except ValueError:  # of a function in C nothing is known
        return True
    return True
