# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The tensors of a module or TensorDict by dotted name: found once, and known to be the same ever after."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from tensordict import TensorDictBase
from torch import nn

#: What weights come from and go to.
Weights: TypeAlias = "nn.Module | TensorDictBase | Mapping[str, torch.Tensor]"

EXTRA_STATE = "__extra_state__"  # TorchRL's name


class Leaves:
    """Every parameter and buffer of ``source`` under every name that it has, as ``TensorDict.from_module`` names them.

    The wrapper of ``torch.compile`` does not count in names. A module's extra state is among them when its values are
    all tensors.

    Attributes:
        tensors (dict): by dotted name.
        extra (dict): those of them that are a module's extra state, which it may make anew each time.
        copies (dict): what a :class:`WeightLayout` planned for them.
    """

    def __init__(self, source: Weights) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.extra: dict[str, torch.Tensor] = {}
        self.copies: dict[int, Any] = {}
        # A module may be given other or more parameters and children, and `Module.to` replaces buffers: what is
        # remembered holds for as long as each of these is what it was, and there are as many.
        self._links: list[tuple[Callable[[Any], Any], Any, Any]] = []
        self._holders: list[Mapping[str, Any]] = []
        self._puts: dict[str, Callable[[torch.Tensor], None]] = {}
        if isinstance(source, TensorDictBase):
            self._walk_tensordict(source, "")
        elif isinstance(source, nn.Module):
            self._walk_module(source, "")
            self.extra = extra_state(source)
            self.tensors.update(self.extra)
        else:
            for name, tensor in source.items():
                self._add(name, tensor, source.get, name)
        self._counts = [len(holder) for holder in self._holders]

    @property
    def current(self) -> bool:
        """Whether the source still has the same tensors."""
        for get, key, value in self._links:
            if get(key) is not value:
                return False
        return [len(holder) for holder in self._holders] == self._counts

    def replace(self, values: Mapping[str, torch.Tensor]) -> None:
        """Puts tensors in the place of leaves of the same module; those that are tied stay tied."""
        made: dict[int, torch.Tensor] = {}
        for name, value in values.items():
            old = self.tensors[name]
            new = made.get(id(old))
            if new is None:
                new = nn.Parameter(value, requires_grad=False) if isinstance(old, nn.Parameter) else value
                made[id(old)] = new.requires_grad_(old.requires_grad)
            self._puts[name](new)

    def _add(
        self,
        name: str,
        tensor: Any,
        get: Callable[[Any], Any],
        key: Any,
        put: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"WeightLayout: key {name!r} must be a tensor, got {type(tensor).__name__}.")
        name = name.replace("_orig_mod.", "")
        self.tensors[name] = tensor
        self._links.append((get, key, tensor))
        if put is not None:
            self._puts[name] = put

    def _walk_tensordict(self, source: TensorDictBase, prefix: str) -> None:
        me = weakref.ref(source)  # what is remembered must not keep its source alive

        def get(key: Any) -> Any:
            owner = me()
            return None if owner is None else owner.get(key)

        def same_keys(known: Any) -> Any:
            owner = me()
            return known if owner is not None and tuple(owner.keys(True, True)) == known else None

        keys = tuple(source.keys(True, True))
        self._links.append((same_keys, keys, keys))
        for key, leaf in source.items(include_nested=True, leaves_only=True):
            name = prefix + (key if isinstance(key, str) else ".".join(key))
            self._add(name, leaf, get, key, partial(_put, me, key))

    def _walk_module(self, module: nn.Module, prefix: str) -> None:
        if isinstance(module, TensorDictBase):  # TensorDictParams is both
            self._walk_tensordict(module, prefix)
            return
        self._holders += [module._parameters, module._buffers, module._modules]
        for owner in (module._parameters, module._buffers):
            held = cast("dict[str, torch.Tensor | None]", owner)
            for key, tensor in held.items():
                if tensor is None:
                    self._links.append((held.get, key, None))
                else:
                    self._add(prefix + key, tensor, held.get, key, partial(held.__setitem__, key))
        for key, child in module._modules.items():
            if child is not None:
                self._links.append((module._modules.get, key, child))
                self._walk_module(child, f"{prefix}{key}.")


def _put(source: weakref.ref, key: Any, value: torch.Tensor) -> None:
    owner = cast(TensorDictBase, source())
    if owner.device != value.device:
        owner.clear_device_()  # it would move what it is given
    with owner.unlock_():
        owner.set(key, value)


def extra_like(source: Any, known: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the extra state that a module has now; raises ``ValueError`` unless it is like what is known.

    It need not be the tensors of before, nor of their shapes.
    """
    if not known:
        return {}
    extra = extra_state(source)
    for name in sorted(known.keys() | extra.keys()):
        wanted, got = (_kind(values.get(name)) for values in (known, extra))
        if wanted != got:
            raise ValueError(f"WeightLayout: key {name!r} must be {wanted}, got {got}. Nothing was changed.")
    return extra


def _kind(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def extra_state(module: Any) -> dict[str, torch.Tensor]:
    """Returns the extra state of a module by leaf name, where it maps names to tensors only."""
    module = getattr(module, "_orig_mod", module)
    if not isinstance(module, nn.Module) or type(module).get_extra_state is nn.Module.get_extra_state:
        return {}
    state = module.get_extra_state()
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        return {}
    return {f"{EXTRA_STATE}.{key}": value for key, value in state.items()}
