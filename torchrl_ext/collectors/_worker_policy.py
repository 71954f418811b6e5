# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The policy of a worker: where it runs, how it is compiled, whose weights it has."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.nn import CudaGraphModule
from torch import nn
from torchrl.envs import EnvBase

from torchrl_ext.collectors._direct_call import direct_call
from torchrl_ext.collectors._worker_options import WorkerOptions

__all__ = ["WorkerPolicy"]


class WorkerPolicy:
    """Acts on the host's observations, wherever the policy runs.

    Args:
        policy (callable, optional): reads observations and writes ``"action"``, in place. None acts randomly.
        env (EnvBase): whose actions.
        weights (SeqlockWeightSyncScheme, optional): the receiving end, where the policy has weights.
        options (WorkerOptions): device, compilation.
    """

    def __init__(self, policy: Any, env: EnvBase, weights: Any, options: WorkerOptions) -> None:
        self._env, self._weights = env, weights
        device = options.policy_device
        self._device = device if device is not None and device.type != "cpu" else None
        on_cuda = self._device is not None and self._device.type == "cuda"
        self._done = torch.cuda.Event(blocking=True) if on_cuda else None
        if isinstance(policy, nn.Module):
            policy = policy.to("cpu" if device is None else device)  # a factory may have put it elsewhere
        self._policy = self._called = policy
        self._in_keys, self._out_keys = _keys_of(policy, "in_keys"), _keys_of(policy, "out_keys")
        observed = {unravel_key(key) for key in env.observation_spec.keys(True, True)}
        # What does not say what it writes may write anything.
        self._replaces = self._out_keys is None or not observed.isdisjoint(self._out_keys)
        if weights is not None:
            weights.init_on_receiver(model_id="policy", model=policy)
            weights.connect()
        self._version = 0 if weights is None else weights.version
        if self._device is None and options.compile_policy is None and options.cudagraph_policy is None:
            self._called = direct_call(policy)
        if options.compile_policy is not None:
            self._called = torch.compile(self._called, **options.compile_policy)
        if options.cudagraph_policy is not None:
            self._called = CudaGraphModule(self._called, **options.cudagraph_policy)

    @property
    def example(self) -> Any:
        """The policy as a function of host observations, for one call; None when actions are random."""
        if self._policy is None:
            return None
        return self._policy if self._device is None else lambda observed: self._policy(observed.to(self._device)).cpu()

    @property
    def version(self) -> int:
        """Of the weights that act."""
        return self._version

    def receive(self) -> None:
        """Takes the newest weights, if there are newer ones."""
        if self._weights is not None and self._weights.receive() is not None:
            self._version = self._weights.version

    def act(self, observation: TensorDictBase) -> bool:
        """Writes what the policy writes; returns whether that may stand in the place of observations."""
        if self._called is None:
            self.act_randomly(observation)
            return False
        if self._device is None:
            acted = self._called(observation)
            if acted is observation:
                return self._replaces
            observation.update(acted)
            return True
        seen = observation if self._in_keys is None else observation.select(*self._in_keys, strict=False)
        acted = self._called(self._to_device(seen))
        if self._out_keys is not None:
            acted = acted.select(*self._out_keys, strict=False)  # what it was given need not come back
        # The environment needs the action on the host: the one wait of a step.
        observation.update(self._to_host(acted))
        return self._replaces

    def _to_device(self, seen: TensorDictBase) -> TensorDictBase:
        if self._done is None:
            return seen.to(self._device, non_blocking=True)
        return seen.to(self._device, non_blocking=True, non_blocking_pin=True, num_threads=0)

    def _to_host(self, acted: TensorDictBase) -> TensorDictBase:
        if self._done is None:
            return acted.to(torch.device("cpu"))
        # A process that waits as torch does keeps a core busy, which the environments' threads could have.
        leaves = {
            key: torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True).copy_(leaf, non_blocking=True)
            for key, leaf in acted.items(True, True)
        }
        self._done.record(torch.cuda.current_stream(self._device))
        self._done.synchronize()
        return TensorDict(leaves, acted.batch_size)

    def act_randomly(self, observation: TensorDictBase) -> None:
        """Writes a random action."""
        self._env.rand_action(observation)


def _keys_of(policy: Any, name: str) -> list[NestedKey] | None:
    keys = getattr(policy, name, None)
    return None if keys is None else [unravel_key(key) for key in keys]
