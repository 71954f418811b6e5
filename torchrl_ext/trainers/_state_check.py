# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Checks of saved states before anything is loaded from them, so that a foreign one changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def check_like(where: str, mine: Mapping[str, Any] | None, state: Any) -> None:
    """Raises ``ValueError`` unless ``state`` has the keys, shapes and dtypes of ``mine`` (both may be None).

    Args:
        where (str): begins the message.
        mine (Mapping[str, Any], optional): a flat state of what would be overwritten.
        state (Any): what would be loaded.
    """
    if mine is None or state is None:
        if mine is not state:
            raise ValueError(f"{where}: must be {_name(mine)}, got {_name(state)}. Nothing was changed.")
        return
    if not isinstance(state, Mapping) or set(state) != set(mine):
        got = set(state) if isinstance(state, Mapping) else set()
        raise ValueError(
            f"{where}: the state must have the same entries, got none at {sorted(set(mine) - got)[:3]} and unknown "
            f"ones at {sorted(got - set(mine), key=str)[:3]}. Nothing was changed."
        )
    for key, value in mine.items():
        if not isinstance(value, torch.Tensor):
            continue
        other = state[key]
        if not isinstance(other, torch.Tensor) or other.shape != value.shape or other.dtype != value.dtype:
            raise ValueError(
                f"{where}: {key!r} must be {_describe(value)}, got {_describe(other)}. Nothing was changed."
            )


def check_optimizer(where: str, optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Raises ``ValueError`` unless a saved optimizer state has one entry of the right shape per parameter or none."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = state.get("state") if isinstance(state, Mapping) else None
    if not isinstance(moments, Mapping) or not set(moments) <= set(range(len(parameters))):
        raise ValueError(
            f"{where}: the state must be that of an optimizer of {len(parameters)} parameters, got {_name(state)}. "
            "Nothing was changed."
        )
    for number, entry in moments.items():
        if not isinstance(entry, Mapping):
            raise ValueError(f"{where}: parameter {number} must have a state, got {_name(entry)}. Nothing was changed.")
        for name, value in entry.items():
            shape = parameters[number].shape
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != shape:
                raise ValueError(
                    f"{where}: {name!r} of parameter {number} must have shape {list(shape)}, got "
                    f"{list(value.shape)}. Nothing was changed."
                )


def _name(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"a {type(value).__name__}" + (f" of {len(value)} entries" if isinstance(value, Mapping) else "")


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {list(value.shape)}"
    return f"a {type(value).__name__}"
