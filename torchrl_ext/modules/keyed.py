# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""A lean TensorDictModule for networks that run thousands of times a second."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor, nn


class KeyedModule(TensorDictModuleBase):
    """Reads tensors from a tensordict, calls a module on them, writes its tensors back.

    What :class:`~tensordict.nn.TensorDictModule` does for tensors in and tensors out, without its generality:
    with tensordict 0.14 that class looks for ``pandas`` on the import path for each output it writes, which costs
    more (about 0.1 ms a call) than a small layer.

    Args:
        module (nn.Module): called with one tensor per in-key, returns one tensor or a tuple of them.

    Keyword Args:
        in_keys (sequence of NestedKey): positional arguments of ``module``.
        out_keys (sequence of NestedKey): where its outputs go.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> double = KeyedModule(torch.nn.Identity(), in_keys=["x"], out_keys=["y"])
        >>> double(TensorDict(x=torch.ones(2), batch_size=[2]))["y"]
        tensor([1., 1.])
    """

    def __init__(self, module: nn.Module, *, in_keys: Sequence[NestedKey], out_keys: Sequence[NestedKey]) -> None:
        super().__init__()
        self.module = module
        self.in_keys = [unravel_key(key) for key in in_keys]
        self.out_keys = [unravel_key(key) for key in out_keys]

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the same tensordict with the ``out_keys`` written.

        Raises:
            KeyError: if an in-key is missing. Nothing is written.
            ValueError: if the module returns another number of tensors than there are out-keys. Nothing is written.
        """
        inputs = [tensordict.get(key, None) for key in self.in_keys]
        missing = [key for key, value in zip(self.in_keys, inputs, strict=True) if value is None]
        if missing:
            raise KeyError(
                f"KeyedModule: the keys {missing} must be present, got {sorted(map(str, tensordict.keys()))}. "
                "Nothing was written."
            )
        outputs = self.module(*inputs)
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        if len(outputs) != len(self.out_keys):
            raise ValueError(
                f"KeyedModule: {type(self.module).__name__} must return {len(self.out_keys)} tensors, one for each of "
                f"{self.out_keys}, got {len(outputs)}. Nothing was written."
            )
        for key, value in zip(self.out_keys, outputs, strict=True):
            tensordict.set(key, value)
        return tensordict
