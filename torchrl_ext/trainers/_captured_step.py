# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""A gradient step as CUDA graphs: one launch instead of some hundred."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from tensordict import TensorDictBase
from torch import Tensor

Step = Callable[[TensorDictBase, bool], dict[str, Tensor]]
_WARM_UP_STEPS = 3


class CapturedStep:
    """Captures ``step(batch, with_actor)`` once for each value of ``with_actor``, and replays it.

    The batch is copied into memory of the graph's own, so any batch of the same keys, shapes and dtypes will do.
    Capturing takes steps of its own; what they changed is put back. Random numbers go on from torch's CUDA generator.

    Args:
        step (callable): the gradient step; every tensor it changes must be among ``changed`` after its first call.
        batch (TensorDictBase): an example.

    Keyword Args:
        changed (callable): returns the tensors that a step changes in place (parameters, buffers, moments).
        forget_gradients (callable): sets all gradients to None, so that they are allocated by the graph.
    """

    def __init__(
        self,
        step: Step,
        batch: TensorDictBase,
        *,
        changed: Callable[[], Iterable[Tensor]],
        forget_gradients: Callable[[], None],
    ) -> None:
        self._batch = batch.clone()
        self._keys = list(self._batch.keys(True, True))
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[bool, dict[str, Tensor]] = {}
        # Moments that do not exist yet are made, as zeros, by the first step below.
        known = [(tensor, tensor.detach().clone()) for tensor in changed()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_STEPS):
                for with_actor in (False, True):
                    step(self._batch.copy(), with_actor)
        torch.cuda.current_stream().wait_stream(side)
        for with_actor in (False, True):
            forget_gradients()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                # A shallow copy: what the step writes into its batch belongs to the graph.
                self._outputs[with_actor] = step(self._batch.copy(), with_actor)
            self._graphs[with_actor] = graph
        # All that ran above was rehearsal.
        before = {id(tensor) for tensor, _ in known}
        with torch.no_grad():
            for tensor, value in known:
                tensor.copy_(value)
            for tensor in changed():
                if id(tensor) not in before:
                    tensor.zero_()

    def __call__(self, batch: TensorDictBase, with_actor: bool) -> dict[str, Tensor]:
        """Takes one step; what it returns is overwritten by the next one of the same ``with_actor``."""
        for key in self._keys:
            self._batch.get(key).copy_(batch.get(key), non_blocking=True)
        self._graphs[with_actor].replay()
        return self._outputs[with_actor]
