# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""A TorchRL loss whose networks stay tied to their parameters instead of being swapped at each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.objectives import LossModule


def bound_copy(network: TensorDictModuleBase, params: TensorDictBase) -> TensorDictModuleBase:
    """Returns a copy of ``network`` that computes with the memory of ``params`` and asks for no gradient.

    Args:
        network (TensorDictModuleBase): the module whose structure is copied.
        params (TensorDictBase): parameters and buffers, as of ``TensorDict.from_module(network)``.

    Returns:
        TensorDictModuleBase: the twin; its parameters share their storage with ``params``.
    """
    twin = deepcopy(network)
    params.data.to_module(twin)
    return twin.requires_grad_(False)


class BoundLossModule(LossModule):
    """Base of losses that call stateful networks.

    TorchRL's losses swap parameters in and out of a module at each call (``params.to_module``, 0.1 ms for a
    small network, several times per update). Here each network of :meth:`convert_to_functional` computes with
    its parameters permanently, and has two twins that share their memory: one with gradients stopped, one on the
    target parameters. All follow every in-place change (optimizers, ``SoftUpdate``, ``load_state_dict``)
    and are tied anew after what replaces tensors: ``.to``, copies, pickling, ``load_state_dict(assign=True)``.

    Subclasses call :meth:`_bind` at the end of their constructor.
    """

    _bound_names: tuple[str, ...] = ()

    def _bind(self, *names: str) -> None:
        if names:
            self._bound_names = names
        twins: dict[str, TensorDictModuleBase] = {}
        for name in self._bound_names:
            # ``_modules`` and not ``getattr``, which warns while no target updater exists.
            network, params = self.__dict__[name], self._modules[f"{name}_params"]
            params.to_module(network)
            twins[f"frozen_{name}"] = bound_copy(network, params)
            target = self._modules.get(f"target_{name}_params", None)
            twins[f"target_{name}"] = twins[f"frozen_{name}"] if target is None else bound_copy(network, target)
        # In ``__dict__``, so that twins are in no ``parameters()`` and no ``state_dict``.
        self.__dict__["_twins"] = twins

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> BoundLossModule:
        super()._apply(fn, *args, **kwargs)
        self._bind()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_twins"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As in :class:`~torch.nn.Module`; the networks follow, also with ``assign=True``."""
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        if assign:
            self._bind()
        return result
