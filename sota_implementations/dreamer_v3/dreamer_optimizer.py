# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""TorchRL's optimizer and target update as one CUDA graph, so that the host is left to the replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchrl.objectives import SoftUpdate
from torchrl.trainers.algorithms import DreamerV3Optimizer

__all__ = ["GraphedOptimizer", "TargetInGraph"]


class GraphedOptimizer(DreamerV3Optimizer):
    """A :class:`DreamerV3Optimizer` whose steps may be captured.

    Launching the some 120 kernels of a step takes a host 4 to 5 ms, during which it holds Python's lock: as much as the
    device needs for a third of an update. What TorchRL computes on the host for each step (the learning rate of the
    warm-up, the corrections of the means) is computed on the device from a counter there.

    Before :meth:`capture`, and after a state was loaded, steps are TorchRL's own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._counters: list[Tensor] = []

    @property
    def captured(self) -> bool:
        """Whether steps are launched as a graph."""
        return self._graph is not None

    def capture(self, after: Callable[[], None]) -> None:
        """Captures the step and what follows it; nothing is changed. Gradients must lie where they will.

        Args:
            after (callable): launches kernels and does nothing else.
        """
        self._count_on_device()
        device, graph = self._counters[0].device, torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        # Thread-local: the replay's own threads may go on using the device.
        with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"), torch.no_grad():
            self._launch()
            after()
        self._graph = graph

    def _count_on_device(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter]["rms"] = torch.zeros_like(parameter, dtype=torch.float32)
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
        self._counters = [
            torch.tensor(float(group["step"]), dtype=torch.float64, device=group["params"][0].device)
            for group in self.param_groups
        ]

    def _launch(self) -> None:
        for group, counter in zip(self.param_groups, self._counters, strict=True):
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state[parameter] for parameter in parameters]
            _descend(group, parameters, [s["rms"] for s in states], [s["momentum"] for s in states], counter)

    def step(self, closure: Any = None) -> Any:
        """Takes a step; see TorchRL's."""
        if self._graph is None:
            return super().step(closure)
        for group in self.param_groups:
            group["step"] += 1
        self._graph.replay()
        return None

    def release(self) -> None:
        """Goes back to TorchRL's own steps."""
        self._graph = None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a state; captured steps end, since they hold the state of before."""
        super().load_state_dict(state_dict)  # type: ignore[arg-type]
        self.release()


class TargetInGraph(SoftUpdate):
    """A target update that is part of an optimizer's graph while there is one.

    Args:
        loss_module (LossModule): with targets.
        optimizer (GraphedOptimizer): whose graph.

    Keyword Args:
        tau (float): how far a target moves to its source.
    """

    def __init__(self, loss_module: Any, optimizer: GraphedOptimizer, *, tau: float) -> None:
        super().__init__(loss_module, tau=tau)
        self._optimizer = optimizer

    def launch(self) -> None:
        """Updates the targets."""
        super().step()

    def step(self) -> None:
        """Updates the targets, unless the optimizer's graph did."""
        if not self._optimizer.captured:
            self.launch()


def _descend(
    group: Mapping[str, Any], parameters: list[Tensor], rms: list[Tensor], momentum: list[Tensor], counter: Tensor
) -> None:
    """The rule of :class:`DreamerV3Optimizer`, with every number that depends on the step on the device."""
    beta1, beta2, warmup = group["beta1"], group["beta2"], group["warmup_steps"]
    counter.add_(1.0)
    rate = group["lr"] * ((counter - 1) / warmup).clamp(max=1.0) if warmup else torch.full_like(counter, group["lr"])
    scale = (rate / (1 - beta1**counter)).neg().float()
    correction = (1 - beta2**counter).float()
    gradients = [parameter.grad.float() for parameter in parameters if parameter.grad is not None]
    if group["agc"]:
        most = list(torch._foreach_norm([parameter.float() for parameter in parameters]))
        torch._foreach_clamp_min_(most, group["parameter_norm_min"])
        torch._foreach_mul_(most, group["agc"])
        norms = torch._foreach_maximum(torch._foreach_norm(gradients), most)
        gradients = list(torch._foreach_mul(gradients, torch._foreach_div(most, norms)))
    torch._foreach_mul_(rms, beta2)
    torch._foreach_addcmul_(rms, gradients, gradients, value=1 - beta2)
    roots = torch._foreach_div(rms, correction)
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, group["eps"])
    torch._foreach_mul_(momentum, beta1)
    torch._foreach_add_(momentum, torch._foreach_div(gradients, roots), alpha=1 - beta1)
    updates = torch._foreach_mul(momentum, scale)
    torch._foreach_add_(parameters, [update.to(own.dtype) for update, own in zip(updates, parameters, strict=True)])
