# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""A mode that finds, on a CPU, what would make the host wait for a CUDA device or break a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim"}


class NoHostSync(TorchDispatchMode):
    """Fails on reads of a value and on results whose shape depends on one (boolean indexing included)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        assert name not in _READS, f"{name} reads a value on the host"
        if name in {"index", "index_put", "index_put_"}:
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{name} with a mask has no static shape"
        return func(*args, **(kwargs or {}))
