# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The optimizer of the DreamerV3 script, whose steps may be captured, against TorchRL's."""

import contextlib
import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.objectives import DQNLoss, SoftUpdate
from torchrl.trainers.algorithms import DreamerV3Optimizer

SCRIPT = Path(__file__).resolve().parents[1] / "sota_implementations" / "dreamer_v3"


@pytest.fixture(scope="module")
def optimizers():
    sys.path.insert(0, str(SCRIPT))
    try:
        import dreamer_optimizer
    finally:
        sys.path.remove(str(SCRIPT))
    return dreamer_optimizer


def make_loss(device="cpu") -> DQNLoss:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    value = TensorDictModule(network.to(device), ["observation"], ["action_value"])
    loss = DQNLoss(value, action_space="categorical", delay_value=True)
    return loss.to(device)


def give_gradients(parameters, step: int) -> None:
    """Of very different sizes, in memory that stays where it is."""
    generator = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator) * 10.0 ** (number - 2)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.copy_(gradient)


@contextlib.contextmanager
def repeated_graphs(optimizer, target):
    """Stands in for CUDA: a graph is its launches, repeated at each replay; capturing launches nothing."""

    def replay():
        with torch.no_grad():
            optimizer._launch()
            target.launch()

    none = contextlib.nullcontext()
    fake = {
        "CUDAGraph": lambda: SimpleNamespace(replay=replay),
        "graph": lambda *_, **__: none,
        "device": lambda _: none,
        "synchronize": lambda _: None,
    }
    with mock.patch.multiple(torch.cuda, **fake), mock.patch.object(optimizer, "_launch", lambda: None):
        optimizer.capture(lambda: None)
    yield


def run(optimizers, device, steps, *, captured, options, capture_at=0):
    """Steps of a loss with targets; returns parameters, targets and the optimizer."""
    loss = make_loss(device)
    parameters = list(loss.parameters())
    kind = optimizers.GraphedOptimizer if captured else DreamerV3Optimizer
    optimizer = kind(parameters, lr=0.01, **options)
    target = optimizers.TargetInGraph(loss, optimizer, tau=0.1) if captured else SoftUpdate(loss, tau=0.1)
    for step in range(steps):
        give_gradients(parameters, step)
        if captured and step == capture_at:
            if device == "cpu":
                with repeated_graphs(optimizer, target):
                    pass
            else:
                optimizer.capture(target.launch)
            assert optimizer.captured
        optimizer.step()
        target.step()
    return parameters, list(loss.target_value_network_params.values(True, True)), optimizer


OPTIONS = [{"warmup_steps": 10}, {"warmup_steps": 0}, {"warmup_steps": 3, "agc": 0.0}, {"warmup_steps": 2, "eps": 1e-3}]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_captured_steps_are_those_of_torchrl(optimizers, device, options):
    wanted = run(optimizers, device, 25, captured=False, options=options)
    got = run(optimizers, device, 25, captured=True, options=options)
    for one, other in zip([*wanted[0], *wanted[1]], [*got[0], *got[1]], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
    assert got[2].state_dict()["param_groups"] == wanted[2].state_dict()["param_groups"]


@pytest.mark.parametrize("device", DEVICES)
def test_capturing_later_goes_on_where_the_steps_stand(optimizers, device):
    options = {"warmup_steps": 10}
    wanted = run(optimizers, device, 25, captured=False, options=options)
    got = run(optimizers, device, 25, captured=True, options=options, capture_at=7)
    for one, other in zip([*wanted[0], *wanted[1]], [*got[0], *got[1]], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_states_go_both_ways_and_end_the_capture(optimizers, device):
    options = {"warmup_steps": 10}
    parameters, _, captured = run(optimizers, device, 12, captured=True, options=options)
    state = copy.deepcopy(captured.state_dict())
    twins = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    stock = DreamerV3Optimizer(twins, lr=0.01, **options)
    stock.load_state_dict(state)
    captured.load_state_dict(copy.deepcopy(state))  # loading keeps the tensors
    assert not captured.captured
    for optimizer, own in ((captured, parameters), (stock, twins)):
        give_gradients(own, 99)
        optimizer.step()
    for one, other in zip(parameters, twins, strict=True):
        torch.testing.assert_close(other, one)


def test_without_a_capture_targets_follow_as_in_torchrl(optimizers):
    loss = make_loss()
    parameters = list(loss.parameters())
    optimizer = optimizers.GraphedOptimizer(parameters, lr=0.1, warmup_steps=0)
    target = optimizers.TargetInGraph(loss, optimizer, tau=0.5)
    give_gradients(parameters, 0)
    before = [value.clone() for value in loss.target_value_network_params.values(True, True)]
    optimizer.step()
    target.step()
    after = list(loss.target_value_network_params.values(True, True))
    assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True))
