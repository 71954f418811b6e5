# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""MotrixLab's weight channel through host memory as a peer: its seqlock sender and receiver."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.peers import motrixlab

_MODULE = "motrix_rl_builtin.fastsac.async_impl.transport.weight_channel"


def name() -> str:
    """Returns the peer's name for the report."""
    return motrixlab.name("HostWeightReceiver")


class Receiver:
    """The reading end, for a flat actor without normaliser statistics."""

    def __init__(self, receiver: Any, numel: int) -> None:
        self._receiver, self._actor, self._identity = receiver, _actor(numel), nn.Identity()
        self._flat = torch.zeros(numel)

    @property
    def begun(self) -> int:
        """Versions completed by the sender."""
        return self._receiver.version

    def load(self) -> bool:
        """Takes the newest snapshot; returns whether there was one that the sender left whole."""
        before = self._receiver.loaded_version
        return self._receiver.maybe_load(self._actor, self._identity, self._flat)[0] != before


class Sender:
    """The writing end, for an actor of one flat parameter."""

    def __init__(self, sender: Any, numel: int) -> None:
        self._sender, self._actor, self._identity = sender, _actor(numel), nn.Identity()

    def publish(self) -> None:
        """Publishes the actor."""
        self._sender.publish(self._actor, self._identity)


def make_channel(numel: int) -> tuple[Any, list[torch.Tensor], int]:
    """Returns the shared memory of a channel: counters, slots, and the number of floats in a slot.

    Raises:
        PeerUnavailableError: if the package cannot be imported here.
    """
    module = motrixlab._import(_MODULE)
    shared = module.WeightChannelShared(1)
    return shared, module.HostWeightSender(shared, numel).params, numel


def make_receiver(channel: tuple[Any, list[torch.Tensor], int]) -> Receiver:
    """Returns the reading end of a channel."""
    shared, params, numel = channel
    return Receiver(motrixlab._import(_MODULE).HostWeightReceiver(shared, params), numel)


def make_sender(channel: tuple[Any, list[torch.Tensor], int]) -> Sender:
    """Returns the writing end of a channel."""
    shared, params, numel = channel
    sender = motrixlab._import(_MODULE).HostWeightSender(shared, 1)
    sender.params = params
    return Sender(sender, numel)


def _actor(numel: int) -> nn.Module:
    actor = nn.Module()
    actor.flat = nn.Parameter(torch.zeros(numel), requires_grad=False)
    return actor
