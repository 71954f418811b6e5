# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Whether and how a replay can be sampled inside a captured graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import ReplayBuffer

from torchrl_ext.data import SlotReplayBuffer, TransitionSampler, _fused
from torchrl_ext.data._gather import powers
from torchrl_ext.data._transitions import _finish, _span, check_transitions
from torchrl_ext.trainers._counter_draws import CounterDraws, counter_draws


def why_not_inside(replay: ReplayBuffer, device: torch.device) -> str | None:
    """Returns why a replay cannot be sampled inside a graph of ``device`` at all, None when it can."""
    if not isinstance(replay, SlotReplayBuffer):
        return f"a {type(replay).__name__} draws on the host"
    if type(replay._sampler) is not TransitionSampler:
        return f"a {type(replay._sampler).__name__} keeps books of its own"
    sampler, generator = replay._sampler, replay._rng
    if not sampler.replacement or sampler.stream_weights is not None:
        return "only uniform draws with replacement are captured"
    place = replay._storage.device
    if not _same(place, device) or not _same(replay.sample_device or place, device):
        return f"the replay is on {place}"
    if replay._prefetch or (replay._transform is not None and len(replay._transform)) or replay.contiguous:
        return "prefetch, transforms and contiguous batches are not captured"
    if generator is not None and not _same(generator.device, device):
        return f"its generator is on {generator.device}"
    return None


def _same(one: torch.device, other: torch.device) -> bool:
    """Whether two names mean one device; ``cuda`` without a number is the current one."""
    current = torch.cuda.current_device() if "cuda" in (one.type, other.type) and torch.cuda.is_available() else 0
    first, second = (current if device.index is None else device.index for device in (one, other))
    return one.type == other.type and first == second


class GraphSampling:
    """Draws from one replay inside graphs.

    State      What a captured draw depends on: the block of rows, batch size, options of the sampler, generator. When
               one of them changes, :meth:`matches` says no and graphs are to be captured anew.
    Draws      At the seats of ``counter``, which is that of the replay's own generator if it has one. Without a counter
               torch's operations draw.
    Ordering   :meth:`launching` holds the locks of the replay, so that a graph that draws is ordered with writes on
               other streams like any other sample.

    Args:
        replay (SlotReplayBuffer): of which :func:`why_not_inside` says nothing.
        counter (CounterDraws, optional): of torch's default generator.
        most (int): steps of one launch at most.
    """

    def __init__(self, replay: Any, counter: CounterDraws | None, most: int) -> None:
        self.replay, self._signature = replay, self._sign(replay)
        self.counter, generator = counter, replay._rng
        if counter is not None and generator is not None and generator is not counter.generator:
            self.counter = counter_draws(counter.seats.device, most, generator)
        sampler, block = replay._sampler, replay._storage.block
        # What a graph reads by address must not be freed by a cache.
        self._kept = powers(sampler.gamma, sampler.n_steps, block.device)

    @staticmethod
    def _sign(replay: Any) -> tuple[Any, ...]:
        sampler = replay._sampler
        options = replay._batch_size, sampler.n_steps, sampler.gamma, sampler.reward_key
        return replay._storage._block, replay._rng, sampler, options

    def matches(self, replay: Any) -> bool:
        """Whether captured draws are draws from this replay as it is."""
        if replay is not self.replay:
            return False
        (*objects, options), (*mine, my_options) = self._sign(replay), self._signature
        return all(one is other for one, other in zip(objects, mine, strict=True)) and options == my_options

    @staticmethod
    def can_draw(replay: Any) -> bool:
        """Whether kernels can draw at this time: the host knows of a row whose successor is known."""
        storage, sampler = replay._storage, replay._sampler
        if not storage.initialized or replay._batch_size is None:
            return False
        block = storage.block
        check_transitions(block.layout, sampler.reward_key, sampler.n_steps)
        span = _span(block.layout, sampler.reward_key, sampler.n_steps)
        return block.longest >= 2 and _fused.can_sample(block, span, sampler.n_steps)

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Lets torch's operations draw from the replay's own generator in a graph; before it is captured."""
        if self.replay._rng is not None and self.counter is None:
            graph.register_generator_state(self.replay._rng)

    def draw(self, turn: int) -> TensorDictBase:
        """Draws the batch of a step, given its number in the launch; inside a capture each replay draws it anew."""
        if self.counter is None:
            return self.replay.sample()
        sampler, block = self.replay._sampler, self.replay._storage.block
        span, recipe = _span(block.layout, sampler.reward_key, sampler.n_steps), (sampler.n_steps, sampler.gamma)
        made = _fused.sample(block, span, self.replay._batch_size, *recipe, None, self.counter.seats[turn])
        return _finish(block.layout, *made, contiguous=False, device=None, pool=None)[0]

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Holds the replay for the launch of a graph that draws from it."""
        replay = self.replay
        with replay._replay_lock, replay._write_lock, replay._storage._lock, replay._storage._order:
            yield
