# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What a collector asks of an environment and of what acts in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase

from torchrl_ext.data import RowLayout

Policy = Callable[[TensorDictBase], TensorDictBase]
_OUTCOME_KEYS = ("reward", "terminated", "truncated", "done")


class UniformPolicy:
    """Draws actions uniformly from the action box, from torch's default generator.

    Args:
        action_spec (TensorSpec): of all streams, ``[n, A]``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded
        >>> policy = UniformPolicy(Bounded(-1.0, 1.0, shape=(3, 2)))
        >>> policy(TensorDict(batch_size=[3]))["action"].shape
        torch.Size([3, 2])
    """

    in_keys: Sequence[NestedKey] = ()

    def __init__(self, action_spec: TensorSpec) -> None:
        self._spec = action_spec

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes ``"action"``."""
        return tensordict.set("action", self._spec.rand())


def record_keys(observation_keys: Sequence[NestedKey]) -> list[NestedKey]:
    """Returns the keys of a transition: observations, action, and under ``"next"`` observations and outcome."""
    after = [*observation_keys, *_OUTCOME_KEYS]
    nested = [("next", *((key,) if isinstance(key, str) else key)) for key in after]
    return [*observation_keys, "action", *nested]


def record_layout(env: EnvBase, observation_keys: Sequence[NestedKey]) -> RowLayout:
    """Returns the layout of what collectors store of an environment, before anything was collected.

    Args:
        env (EnvBase): with batch size ``[n]``.
        observation_keys (sequence of NestedKey): the observations to store.

    Raises:
        KeyError: if the environment lacks a key.
    """
    example = env.fake_tensordict()
    for flag in ("terminated", "truncated"):
        # Every environment has "done"; a stored record always tells the ends apart.
        if example.get(("next", flag), None) is None:
            example["next", flag] = torch.zeros_like(example["next", "done"])
    return RowLayout.from_tensordict(example.select(*record_keys(observation_keys)))
