# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Turns nested dictionaries into nested frozen dataclasses, checking every value against its annotation."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def require(holds: bool, name: str, must: str, got: Any) -> None:
    """Raises ``ValueError`` with one sentence unless ``holds``."""
    if not holds:
        raise ValueError(f"{name} must be {must}, got {got!r}; nothing was started.")


def parse(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Builds a dataclass from a mapping.

    Args:
        cls (type): a dataclass without defaults.
        values (Mapping[str, Any]): one value for each field, dataclasses as mappings.
        path (str): of ``values`` in the whole configuration, for messages.

    Raises:
        ValueError: if a key is missing or unknown, or a value has another type than the annotation says.
    """
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    for name in names:
        require(name in values, path + name, "set", "nothing")
    unknown = sorted(set(values) - set(names))
    require(not unknown, f"the keys of {path.rstrip('.') or 'the configuration'}", f"among {names}", unknown)
    return cls(**{name: _convert(values[name], hints[name], path + name) for name in names})


def _convert(value: Any, hint: Any, name: str) -> Any:
    if is_dataclass(hint):
        require(isinstance(value, Mapping), name, "a group of keys", value)
        return parse(hint, value, f"{name}.")
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _convert(value, next(arg for arg in args if arg is not type(None)), name)
    if origin is Literal:
        require(value in args, name, f"one of {list(args)}", value)
        return value
    if origin is list:
        require(isinstance(value, list), name, "a list", value)
        return [_convert(item, args[0], f"{name}[{index}]") for index, item in enumerate(value)]
    if origin is dict:
        require(isinstance(value, Mapping), name, "a group of keys", value)
        return dict(value)
    # YAML's 1 is fine for 1.0, and 1e6 (a float in YAML) for a whole number; True is a number in Python only.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and number:
        return float(value)
    if hint is int and number and math.isfinite(value) and value == int(value):
        return int(value)
    require(hint not in (int, float) and isinstance(value, hint), name, f"of type {hint.__name__}", value)
    return value
