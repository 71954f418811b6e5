# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Where the draws of captured steps stand: a torch generator on the host, followed on the device by the graphs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.data._fused import has_triton

#: By how much a step moves the offset of a generator. One would do; but reading and moving it are two calls, and what
#: another thread draws in between (4 per million numbers or so) must not be drawn again.
STRIDE = 256
_LANES = 256


class CounterDraws:
    """Places the draws of launches at the seed and offset of a generator.

    Truth      The generator: seeding it, setting its state and checkpoints of it govern draws inside graphs like any
               others, and what it draws itself comes in between. It is read and moved on the host, without waiting.
    Seats      int64 ``[steps, 2]`` on the device: seed and offset of each step of the next launch. Graphs move them
               (:meth:`advance`), so that a launch writes them only if the generator was seeded or drawn from elsewhere
               since the last one: one small copy.
    Unique     No two steps have one seat, whatever graphs they are of: a generator only moves on, unless it is seeded.

    Args:
        generator (torch.Generator): of a CUDA device.
        steps (int): most steps of one launch.
        device (torch.device): where graphs read.
    """

    def __init__(self, generator: torch.Generator, steps: int, device: torch.device) -> None:
        self.generator = generator
        self.seats = torch.zeros(steps, 2, dtype=torch.int64, device=device)
        self._next = 0, -1

    def place(self) -> None:
        """Makes the seats those of the generator; before a launch."""
        stands = self.generator.initial_seed(), self.generator.get_offset()
        if stands != self._next:
            seats = np.empty(tuple(self.seats.shape), dtype=np.int64)
            seats[:, 0] = np.uint64(stands[0]).astype(np.int64)
            seats[:, 1] = stands[1] + STRIDE * np.arange(len(seats))
            # Pageable: the driver takes so few bytes at once, so that nobody waits and no copy is overwritten.
            self.seats.copy_(torch.from_numpy(seats), non_blocking=True)
        self._next = stands

    def advance(self, steps: int) -> None:
        """Moves the seats past a launch, on the device; after its draws, where they are made or captured."""
        self.seats[:, 1].add_(STRIDE * steps)

    def launched(self, steps: int) -> None:
        """Moves the generator past a launch."""
        # Operations of torch inside the graph may have moved it since, which the seats do not know.
        self.generator.set_offset(self.generator.get_offset() + STRIDE * steps)
        self._next = self._next[0], self._next[1] + STRIDE * steps


def counter_draws(device: torch.device, steps: int, generator: torch.Generator | None = None) -> CounterDraws | None:
    """Returns where draws on a device stand, None where kernels cannot make them and torch's operations must.

    Args:
        device (torch.device): of the draws.
        steps (int): most steps of one launch.
        generator (torch.Generator, optional): defaults to torch's own of the device.
    """
    if device.type != "cuda" or not has_triton():
        return None
    if generator is None:
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    return CounterDraws(generator, steps, device)


def normal_noise(seat: Tensor, shape: torch.Size, count: int) -> tuple[Tensor, ...]:
    """Makes ``count`` standard normal float32 tensors of one shape in one launch; the first are the same for any count.

    Args:
        seat (torch.Tensor): int64 ``[2]``, a row of :attr:`CounterDraws.seats`.
        shape (torch.Size): of each.
        count (int): how many.
    """
    from torchrl_ext.data import _draw_kernels as kernels  # Triton: see _fused

    out = torch.empty(count, *shape, dtype=torch.float32, device=seat.device)
    kernels.normals[(-(-out.numel() // (4 * _LANES)),)](seat, out, out.numel(), BLOCK=_LANES)
    return out.unbind()
