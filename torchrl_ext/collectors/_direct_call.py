# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Calls what a TensorDictModule wraps without its generality, which costs a small network as much as itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torch.nn.modules import module as torch_module

from torchrl_ext.modules.keyed import KeyedModule

__all__ = ["direct_call"]


def direct_call(policy: Any) -> Callable[[TensorDictBase], TensorDictBase]:
    """Returns a function of a TensorDict that does what the policy does.

    That is the policy itself, unless it plainly reads tensors and writes tensors: a TensorDictModule without hooks,
    method, keyword inputs or outputs that are thrown away.

    Args:
        policy (callable): reads and writes a TensorDict in place.

    Examples:
        >>> from tensordict import TensorDict
        >>> policy = TensorDictModule(nn.Identity(), in_keys=["observation"], out_keys=["action"])
        >>> call = direct_call(policy)
        >>> call is policy, call(TensorDict(observation=torch.ones(2), batch_size=[2]))["action"]
        (False, tensor([1., 1.]))
    """
    if type(policy) not in (TensorDictModule, KeyedModule) or _has_hooks(policy):
        return policy
    if type(policy) is TensorDictModule:
        plain = policy.method is None and not policy.method_kwargs and policy._kwargs is None and policy.inplace is True
        if not plain or policy._get_kwargs or "_" in policy.out_keys or not isinstance(policy.module, nn.Module):
            return policy
    module, in_keys, out_keys = policy.module, list(policy.in_keys), list(policy.out_keys)

    def call(tensordict: TensorDictBase) -> TensorDictBase:
        outputs = module(*[tensordict.get(key) for key in in_keys])
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        elif isinstance(outputs, (dict, TensorDictBase)) and type(policy) is TensorDictModule:
            outputs = tuple(outputs.get(key, None) for key in out_keys)
        if not isinstance(outputs, tuple) or len(outputs) != len(out_keys) or any(value is None for value in outputs):
            return policy(tensordict)  # knows what else there is, and what to say
        for key, value in zip(out_keys, outputs, strict=True):
            tensordict.set(key, value)
        return tensordict

    return call


def _has_hooks(module: nn.Module) -> bool:
    own = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    shared = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
    return any(getattr(module, name) for name in own) or any(bool(hooks) for hooks in shared)
