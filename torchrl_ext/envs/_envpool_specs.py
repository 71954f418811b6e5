# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""TorchRL specs of an EnvPool task, and the host buffers through which its arrays pass.

EnvPool allocates fresh arrays on every step. Here they are cast once into buffers that live as long as the
environment, so that a step allocates nothing; whoever hands data out copies it first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDict
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, TensorSpec, Unbounded


class ObservationBuffer:
    """The newest observation of every stream.

    A task with one array gives the key ``"observation"``, otherwise each array keeps EnvPool's name. With ``flatten``
    the arrays are concatenated into ``"observation"`` in the order in which EnvPool declares them, each raveled.
    Scalars become features of width 1. Floating arrays are cast to ``dtype``; all others keep their dtype.

    Args:
        arrays (Mapping[str, ArraySpec]): EnvPool's state arrays; the observations are those named ``obs`` or ``obs:*``.

    Keyword Args:
        num_envs (int): number of streams ``n``.
        flatten (bool): concatenate; needs floating arrays only.
        dtype (torch.dtype): dtype of floating features.
    """

    data: TensorDict
    """Batch size ``[n]`` on the host; always the same tensors, locked."""

    def __init__(
        self, arrays: Mapping[str, Any], *, num_envs: int, flatten: bool, dtype: torch.dtype, task_id: str
    ) -> None:
        names = [name for name in arrays if name == "obs" or name.startswith("obs:")]
        features = {name: _features(task_id, name, arrays[name]) for name in names}
        if flatten and not all(np.issubdtype(arrays[name].dtype, np.floating) for name in names):
            raise ValueError(
                f"EnvPoolEnv: flatten_obs=True needs floating observations, got "
                f"{ {name: str(arrays[name].dtype) for name in names} } in {task_id!r}; pass flatten_obs=False."
            )
        self.spec = Composite(shape=(num_envs,))
        self.data = TensorDict({}, batch_size=[num_envs])
        self._targets: list[tuple[np.ndarray, tuple[str, ...]]] = []
        if flatten:
            width = sum(math.prod(shape) for shape in features.values())
            flat = self._add("observation", Unbounded((num_envs, width), dtype=dtype))
        stop = 0
        for name in names:
            path = tuple(name.replace(":", ".").split(".")[1:])
            shape = features[name]
            if flatten:
                start, stop = stop, stop + math.prod(shape)
                target = flat[:, start:stop].reshape(num_envs, *shape)
                # A reshape that had to copy would never be seen by ``data``.
                assert np.shares_memory(target, flat)
            else:
                key: NestedKey = "observation" if len(names) == 1 else path if len(path) > 1 else path[0]
                target = self._add(key, _observation_spec(arrays[name], (num_envs, *shape), dtype))
            if _shape(arrays[name]) == ():
                target = target[:, 0]
            # EnvPool itself strips the path of an only array.
            self._targets.append((target, () if len(names) == 1 else path))
        self.data.lock_()

    def _add(self, key: NestedKey, spec: TensorSpec) -> np.ndarray:
        self.spec[key] = spec
        self.data[key] = spec.zero()
        return self.data[key].numpy()

    def write(self, observation: Any, streams: np.ndarray | None = None) -> None:
        """Stores what ``recv`` or ``reset`` returned for ``streams``, all of them by default."""
        rows = slice(None) if streams is None else streams
        for target, path in self._targets:
            array = observation
            for name in path:
                array = array[name]
            target[rows] = array


class ActionBuffer:
    """The actions of every stream in EnvPool's dtype, and the message that carries them.

    ``spec`` is ``Bounded`` for continuous actions, ``Categorical`` (int64, shape ``[n]``) for one discrete action and
    ``MultiCategorical`` for several.
    """

    def __init__(self, arrays: Mapping[str, Any], *, num_envs: int, dtype: torch.dtype, task_id: str) -> None:
        name = next(name for name in arrays if name not in ("env_id", "players.env_id"))
        array = arrays[name]
        self.spec, start = _action_spec(task_id, name, array, num_envs, dtype)
        self._start = start
        self._array = np.zeros((num_envs, *_shape(array)), dtype=array.dtype)
        self._shape, self._dtype = self.spec.shape, self.spec.dtype
        self._flat = self._array.reshape(self._shape)
        self._name = name
        # With the player ids given, EnvPool does not read its configuration on every step to infer them.
        self._message = self._pack(self._array, np.arange(num_envs, dtype=np.int32))

    def _pack(self, array: np.ndarray, streams: np.ndarray) -> dict[str, np.ndarray]:
        return {self._name: array, "env_id": streams, "players.env_id": streams}

    def write(self, action: torch.Tensor) -> np.ndarray:
        """Takes actions of all streams from any device and returns them as they came, on the host.

        Raises:
            ValueError: on a wrong shape or dtype; nothing was written.
        """
        if action.shape != self._shape or action.dtype != self._dtype:
            raise ValueError(
                f'EnvPoolEnv: "action" must have shape {list(self._shape)} and dtype {self._dtype}, got '
                f"{list(action.shape)} and {action.dtype}; no stream was stepped."
            )
        if action.requires_grad or not action.is_cpu:
            action = action.detach().cpu()
        given = action.numpy()
        np.copyto(self._flat, given, casting="same_kind")
        if self._start is not None:
            self._array += self._start
        return given

    def message(self, streams: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Returns what ``send`` takes for ``streams`` (int32 ids), all of them by default."""
        return self._message if streams is None else self._pack(self._array[streams], streams)


def _shape(array: Any) -> tuple[int, ...]:
    # A leading -1 counts players, which are one per stream here.
    return tuple(size for size in array.shape if size != -1)


def _features(task_id: str, name: str, array: Any) -> tuple[int, ...]:
    if isinstance(array.shape, tuple):  # a list, except for EnvPool's containers: (outer shape, inner shape)
        raise ValueError(
            f"EnvPoolEnv: observations must have a fixed size, got one of varying size at {name!r} in {task_id!r}; "
            "drive it through envpool.make instead."
        )
    return _shape(array) or (1,)


def _torch_dtype(array: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype


def _observation_spec(array: Any, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
    # EnvPool's bounds of floating observations are not to be trusted: DMC declares the smallest positive double as
    # minimum, and a bound that is right in float64 may be passed by one rounding in float32.
    if np.issubdtype(array.dtype, np.floating):
        return Unbounded(shape, dtype=dtype)
    if np.issubdtype(array.dtype, np.bool_):
        return Binary(shape=shape, dtype=torch.bool)
    limits = np.iinfo(array.dtype)
    if array.dtype != np.uint8 and (np.min(array.minimum) <= limits.min or np.max(array.maximum) >= limits.max):
        return Unbounded(shape, dtype=_torch_dtype(array))
    low, high = (torch.as_tensor(np.broadcast_to(x, shape).copy()) for x in (array.minimum, array.maximum))
    return Bounded(low, high, shape, dtype=_torch_dtype(array))


def _action_spec(
    task_id: str, name: str, array: Any, num_envs: int, dtype: torch.dtype
) -> tuple[TensorSpec, np.ndarray | None]:
    """Returns the spec and, for discrete actions that do not count from 0, the first value."""
    shape = _shape(array)
    low, high = (np.broadcast_to(np.asarray(x), shape) for x in (array.minimum, array.maximum))
    if np.issubdtype(array.dtype, np.floating):
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            return Unbounded((num_envs, *shape), dtype=dtype), None
        bounds = (torch.tensor(x, dtype=dtype).expand(num_envs, *shape).clone() for x in (low, high))
        return Bounded(*bounds, (num_envs, *shape), dtype=dtype), None
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"EnvPoolEnv: actions must be floating or integer, got {array.dtype} at {name!r} in {task_id!r}; "
            "drive it through envpool.make instead."
        )
    start = np.asarray(low, dtype=array.dtype) if np.any(low != 0) else None
    counts = torch.as_tensor(high.astype(np.int64) - low.astype(np.int64) + 1)
    if counts.numel() == 1:
        return Categorical(int(counts), shape=(num_envs,), dtype=torch.int64), start
    return MultiCategorical(counts.expand(num_envs, *shape), shape=(num_envs, *shape), dtype=torch.int64), start
