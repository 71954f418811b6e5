# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Checkpoints: one file, written atomically, read without running code from it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

#: Bytes that are written at once: what stops a file is heard in between.
_CHUNK = 1 << 26


class _Writing:
    """A file for :func:`torch.save`, whose own writer tells of no error but that a position is wrong."""

    def __init__(self, file: BinaryIO, should_stop: Callable[[], bool]) -> None:
        self._file, self._should_stop = file, should_stop
        self.error: BaseException | None = None
        self.flush = file.flush

    def write(self, data: bytes | memoryview) -> int:
        try:
            for start in range(0, len(data), _CHUNK):
                if self._should_stop():
                    raise InterruptedError("save_checkpoint: it was asked to stop; the file is as it was.")
                self._file.write(data[start : start + _CHUNK])
        except BaseException as error:
            self.error = error
            raise
        return len(data)


def save_checkpoint(
    path: str | Path, state: Mapping[str, Any], *, kind: str, should_stop: Callable[[], bool] = lambda: False
) -> Path:
    """Writes a state of tensors and plain values; whoever looks sees the old file or the whole new one.

    Args:
        path (str or Path): the file. Its folder is made.
        state (Mapping[str, Any]): tensors, numbers, strings, lists and dictionaries. An entry ``"kind"`` is not kept.

    Keyword Args:
        kind (str): what the file is, such as ``"torchrl_ext.fast_sac/1"``; :func:`load_checkpoint` asks for it.
        should_stop (callable): asked while the file is written, every 64 MiB. Defaults to one that never says so.

    Returns:
        Path: the file.

    Raises:
        InterruptedError: if it was asked to stop. The old file is kept.
        OSError: if the file cannot be written, such as on a full disk. The old file is kept.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            writing = _Writing(file, should_stop)
            try:
                torch.save({**state, "kind": kind}, writing)  # type: ignore[arg-type]  # it needs write and flush alone
            except Exception:
                if isinstance(writing.error, OSError) and writing.error.filename is None:
                    writing.error.filename = str(path)
                if writing.error is not None:
                    raise writing.error from None
                raise
            file.flush()
            # Before the rename: after a power cut the new name must not point at empty blocks.
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def load_checkpoint(path: str | Path, *, kind: str, map_location: torch.device | str = "cpu") -> dict[str, Any]:
    """Reads what :func:`save_checkpoint` wrote, with ``weights_only=True``.

    Args:
        path (str or Path): the file.

    Keyword Args:
        kind (str): what the file must be.
        map_location (torch.device or str): where tensors go. Defaults to ``"cpu"``.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file cannot be read or is another kind of file. Numbers of a tensor that were changed on
            disk are not noticed.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"load_checkpoint: {path} must be a checkpoint file, got no such file.")
    try:
        state = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # damaged bytes fail anywhere in torch's reader, by any of Python's errors
        # torch's own message advises weights_only=False, which would run whatever the file says.
        raise ValueError(
            f"load_checkpoint: {path} must be an undamaged {kind} checkpoint, got a file that cannot be read "
            f"({type(error).__name__}). Nothing was changed."
        ) from error
    if not isinstance(state, dict) or state.get("kind") != kind:
        got = repr(state.get("kind")) if isinstance(state, dict) else f"a {type(state).__name__}"
        raise ValueError(f"load_checkpoint: {path} must be a {kind} checkpoint, got {got}. Nothing was changed.")
    return state


def random_state() -> dict[str, Any]:
    """Returns the state of the global generators of Python, NumPy and torch (each CUDA device included)."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restores :func:`random_state`; states of CUDA devices that are not there are left out.

    Raises:
        ValueError: if the state is not one. Nothing was changed then.
    """
    try:
        version, internal, gauss = state["python"]
        python = (version, tuple(internal), gauss)
        random.Random().setstate(python)
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy = (name, keys.numpy().astype(np.uint32), position, has_gauss, cached)
        np.random.RandomState().set_state(numpy)
        torch.Generator().set_state(state["torch"])
        devices = list(state["cuda"])[: torch.cuda.device_count()]
        for index, cuda in enumerate(devices):
            torch.Generator(torch.device("cuda", index)).set_state(cuda)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ValueError(f"restore_random_state: the state is damaged ({error}). Nothing was changed.") from error
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(state["torch"])
    for index, cuda in enumerate(devices):
        torch.cuda.set_rng_state(cuda, index)
