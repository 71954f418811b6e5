# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Packs what a worker process runs, before any process is started."""

from __future__ import annotations

import fcntl
import io
import os
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Mapping
from multiprocessing import popen_spawn_posix, reduction
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from typing import Any, cast

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch.multiprocessing import reductions

__all__ = ["Payload"]

_FIRST_DESCRIPTOR = 3  # 0 to 2 are the worker's own streams, even where the parent has closed its


class Payload:
    """A target and its arguments, pickled here and now; a worker calls ``target(channel, **arguments)``.

    By value         functions and classes of a script, notebook or lambda, policies, parameters, tensors of any device
                     (a CUDA tensor returns to its device by way of the host).
    By descriptor    rings, segments, connections, locks, and CPU tensors in shared memory that are no parameters: the
                     worker sees the same memory.
    Restart          a payload can start any number of processes, one after the other, until it is closed.

    Args:
        target (callable): called with a :class:`~torchrl_ext.collectors._child.Channel` and the arguments.
        arguments (mapping): keyword arguments by name.

    Keyword Args:
        where (str, optional): begins the error. Defaults to ``"Payload"``.

    Raises:
        TypeError: when a part does not pickle, naming it. Nothing was started and no descriptor is left open.

    Examples:
        >>> payload = Payload(lambda channel, number: channel.send(number), {"number": 3})
        >>> len(payload.data) > 0, payload.descriptors
        (True, [])
        >>> import threading
        >>> Payload(print, {"policy": threading.Lock()})
        Traceback (most recent call last):
        TypeError: Payload: policy must pickle, got lock: cannot pickle '_thread.lock' object. Nothing was started.
    """

    data: bytes
    """The pickle."""

    def __init__(self, target: Callable[..., Any], arguments: Mapping[str, Any], *, where: str = "Payload") -> None:
        self._descriptors: list[int] | None = None
        try:
            self.data, self._descriptors = _pickled((target, dict(arguments)))
        except Exception as error:
            part, reason = _culprit({"target": target, **arguments}, error)
            raise TypeError(f"{where}: {part} must pickle, got {reason}. Nothing was started.") from error

    @property
    def descriptors(self) -> list[int]:
        """What the worker inherits, by the numbers that the pickle names; they are this payload's own."""
        if self._descriptors is None:
            raise RuntimeError("Payload: it must not be closed to start a process. Nothing was started.")
        return self._descriptors

    def close(self) -> None:
        """Closes the descriptors; processes that were started keep theirs. A second call does nothing."""
        descriptors, self._descriptors = self._descriptors, None
        for descriptor in descriptors or []:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


class _Spawning:
    """Stands for the process to be started while something is pickled for it."""

    DupFd = popen_spawn_posix.Popen.DupFd

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        # One for each mention: each is closed, or kept, by whatever it becomes in the worker.
        self.descriptors.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR))
        return self.descriptors[-1]


class _Pickler(cloudpickle.Pickler):
    """Cloudpickle, which by itself would copy the numbers of descriptors."""

    def __init__(self, file: io.BytesIO) -> None:
        # Those of torch move every tensor into shared memory, with a descriptor for each.
        handed_over = {
            kind: reduce
            for kind, reduce in reduction.ForkingPickler._extra_reducers.items()  # type: ignore[attr-defined]
            if reduce.__module__.startswith("multiprocessing.")
        }
        self.dispatch_table = ChainMap({}, cloudpickle.Pickler.dispatch_table, handed_over)
        super().__init__(file)  # reads the table

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in (torch.Tensor, torch.nn.Parameter) and _is_shared(obj):
            if kind is torch.Tensor:
                return reductions.reduce_tensor(obj)
            return torch._utils._rebuild_parameter, (obj.detach().clone(), obj.requires_grad, OrderedDict())
        if kind is torch.storage.TypedStorage and _is_shared(obj._untyped_storage):
            return reductions.reduce_typed_storage(obj)
        if kind is torch.UntypedStorage and _is_shared(obj):
            return reductions.reduce_storage(obj)
        return super().reducer_override(obj)


def _is_shared(obj: torch.Tensor | torch.UntypedStorage) -> bool:
    if isinstance(obj, torch.Tensor) and (obj.layout is not torch.strided or obj.is_nested):
        return False
    return obj.device.type == "cpu" and obj.is_shared()


def _pickled(value: Any) -> tuple[bytes, list[int]]:
    spawning, previous, file = _Spawning(), get_spawning_popen(), io.BytesIO()
    set_spawning_popen(cast(popen_spawn_posix.Popen, spawning))
    try:
        _Pickler(file).dump(value)
    except BaseException:
        for descriptor in spawning.descriptors:
            os.close(descriptor)
        raise
    finally:
        set_spawning_popen(previous)
    return file.getvalue(), spawning.descriptors


def _culprit(parts: Mapping[str, Any], error: Exception) -> tuple[str, str]:
    """Returns the first part that does not pickle by itself, and what it is and why not."""
    for name, part in parts.items():
        try:
            _, descriptors = _pickled(part)
        except Exception as own:
            return name, f"{type(part).__name__}: {_line(own)}"
        for descriptor in descriptors:
            os.close(descriptor)
    return f"{', '.join(parts)} together", _line(error)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
