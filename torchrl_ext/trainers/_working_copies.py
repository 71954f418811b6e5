# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Networks that compute with low-precision copies of parameters in the shapes that tensor cores like."""

from __future__ import annotations

from copy import deepcopy
from typing import cast

import torch
from torch import Tensor, nn

from torchrl_ext.modules.fast_sac import BatchedLinear, C51CriticNet, FastSACActorNet

_WIDTH = 8  # elements: 16 bytes of a 2-byte number, what tensor cores load at once


class WorkingCopy:
    """A twin of a network whose matrix products use copies of the weights, made once per change, not once per use.

    Of the networks of this package the first input and the last output are padded with zeros to multiples of 8, which
    the master parameters, and so checkpoints, know nothing of. Everything else is the network's own.

    Args:
        network (nn.Module): with the master parameters.
        dtype (torch.dtype, optional): of the copies; None copies nothing, and the twin is the network itself.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype | None) -> None:
        self.masters = list(network.parameters())
        #: The copies, less their padding, and of which master each is.
        self.copies: list[Tensor] = []
        self.copied: list[int] = []
        self.network = network
        if dtype is not None:
            self.network = deepcopy(network)
            for twin, own in zip(self.network.modules(), network.modules(), strict=True):
                for name, master in own._parameters.items():
                    twin._parameters[name] = master
            self._pad_and_copy(dtype)
            numbers = {id(master): number for number, master in enumerate(self.masters)}
            self.copied = [numbers[source] for source in self._sources]
        self.parameters = list(self.network.parameters())

    def _pad_and_copy(self, dtype: torch.dtype) -> None:
        self._sources: list[int] = []
        widths: dict[int, tuple[int, int]] = {}
        network = self.network
        if isinstance(network, C51CriticNet):
            first, last = cast(BatchedLinear, network.layers[0]), cast(BatchedLinear, network.layers[-1])
            network.pad += -first.weight.shape[1] % _WIDTH
            widths[id(first)] = (-first.weight.shape[1] % _WIDTH, 0)
            widths[id(last)] = (0, -last.weight.shape[2] % _WIDTH)
        elif isinstance(network, FastSACActorNet):
            entry = cast(nn.Linear, network.trunk[0])
            network.pad += -entry.in_features % _WIDTH
            widths[id(entry)] = (-entry.in_features % _WIDTH, 0)
            widths[id(network.head)] = (0, -network.head.out_features % _WIDTH)
        for module in network.modules():
            more_in, more_out = widths.get(id(module), (0, 0))
            if isinstance(module, BatchedLinear):
                module.bias_apart = True
                self._replace(module, "weight", dtype, (0, more_in, more_out))
                if more_out:
                    self._replace(module, "bias", module.bias.dtype, (0, 0, more_out))
            elif isinstance(module, nn.Linear):
                self._replace(module, "weight", dtype, (more_out, more_in))
                if module.bias is not None:
                    self._replace(module, "bias", dtype, (more_out,))

    def _replace(self, module: nn.Module, name: str, dtype: torch.dtype, more: tuple[int, ...]) -> None:
        master = cast(Tensor, module._parameters[name])
        shape = [size + extra for size, extra in zip(master.shape, more, strict=True)]
        copy = torch.zeros(shape, dtype=dtype, device=master.device)
        module._parameters[name] = nn.Parameter(copy, requires_grad=master.requires_grad)
        self.copies.append(_inside(copy, master))
        self._sources.append(id(master))

    def frozen(self) -> nn.Module:
        """Returns a twin that shares all memory with this one and asks for no gradient."""
        twin = deepcopy(self.network)
        for module, own in zip(twin.modules(), self.network.modules(), strict=True):
            for name, parameter in own._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(parameter.detach(), requires_grad=False)
        return twin


def _inside(padded: Tensor, master: Tensor) -> Tensor:
    for dim, size in enumerate(master.shape):
        padded = padded.narrow(dim, 0, size)
    return padded
