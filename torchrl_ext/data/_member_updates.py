# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""One update of rows of several members: flattened, cut by member, and its results put back together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key

from torchrl_ext.data._member_rows import MemberGroups, check_integers
from torchrl_ext.data._members import Masks
from torchrl_ext.data.write_back import WriteBackResult

_WHERE = "update_if_present"


@dataclass
class RoutedUpdate:
    """An update with one row per handle; what it patches is checked by the members."""

    shape: torch.Size
    """The handles' shape."""
    ids: torch.Tensor
    """Integers ``[M]``: the member of each row."""
    index: torch.Tensor
    """int64 ``[M]``, as is the next."""
    generation: torch.Tensor
    patch: dict[NestedKey, torch.Tensor]
    """``[M, *feature]`` each."""
    version_key: NestedKey | None
    version: Any
    """A number, or a tensor ``[M]``."""
    require_newer: bool

    @property
    def nbytes(self) -> int:
        """Bytes of everything it reads."""
        return sum(tensor.numel() * tensor.dtype.itemsize for tensor in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Everything it reads, in a fixed order; :meth:`replaced` takes copies in the same one."""
        found = [self.ids, self.index, self.generation, *self.patch.values()]
        return [*found, self.version] if isinstance(self.version, torch.Tensor) else found

    def replaced(self, tensors: list[torch.Tensor]) -> RoutedUpdate:
        """Returns the same update over other memory."""
        ids, index, generation, *values = tensors
        version = values.pop() if isinstance(self.version, torch.Tensor) else self.version
        patch = dict(zip(self.patch, values, strict=True))
        return replace(self, ids=ids, index=index, generation=generation, patch=patch, version=version)

    def by_member(self, groups: MemberGroups) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the number of each member that has rows, and its part as arguments of ``update_if_present``."""
        arranged = self.replaced([groups.sort(tensor) for tensor in self.tensors()])
        for number, span in groups:
            yield number, arranged.replaced([tensor[span] for tensor in arranged.tensors()]).arguments()

    def arguments(self) -> dict[str, Any]:
        """Returns it as arguments of ``update_if_present``."""
        return {
            "index": self.index,
            "generation": self.generation,
            "patch": self.patch,
            "version_key": self.version_key,
            "version": self.version,
            "require_newer": self.require_newer,
        }

    def result(self, parts: Sequence[Masks], groups: MemberGroups) -> WriteBackResult:
        """Puts the masks of the members, in the order of :meth:`by_member`, back into the order of the handles."""

        def joined(which: int) -> torch.Tensor:
            masks = [cast(torch.Tensor, part[which]) for part in parts]
            return groups.join(masks, dtype=torch.bool, device=self.ids.device).view(self.shape)

        return WriteBackResult(
            updated=joined(0),
            superseded=joined(1),
            version_rejected=None if self.version_key is None else joined(2),
            batch_size=self.shape,
        )


def flatten_update(
    index: TensorDictBase,
    generation: torch.Tensor,
    patch: Mapping[NestedKey, torch.Tensor] | TensorDictBase,
    version_key: NestedKey | None,
    version: int | torch.Tensor | None,
    require_newer: bool,
) -> RoutedUpdate:
    """Checks that everything has one entry per row, and flattens it."""
    if not isinstance(index, TensorDictBase) or not {"buffer_ids", "index"} <= set(index.keys()):
        got = list(index.keys()) if isinstance(index, TensorDictBase) else type(index).__name__
        raise TypeError(
            f"{_WHERE}: index must be a TensorDict with the keys 'buffer_ids' and 'index', got {got}. "
            "Nothing was changed."
        )
    ids, local = index.get("buffer_ids"), index.get("index")
    generation, shape, count = torch.as_tensor(generation), ids.shape, ids.numel()
    check_integers(_WHERE, index=local, generation=generation)
    if local.shape != shape or generation.numel() != count:
        raise ValueError(
            f"{_WHERE}: index and generation must have the shape of buffer_ids {list(shape)}, got {list(local.shape)} "
            f"and {list(generation.shape)}. Nothing was changed."
        )
    if (version_key is None) != (version is None):
        raise ValueError(f"{_WHERE}: version_key and version must be given together. Nothing was changed.")
    if isinstance(version, torch.Tensor):
        if version.numel() not in (1, count):
            raise ValueError(
                f"{_WHERE}: version must be one number or one for each of {count} rows, got shape "
                f"{list(version.shape)}. Nothing was changed."
            )
        version = version.detach().reshape(-1).expand(count)
    return RoutedUpdate(
        shape,
        ids.reshape(-1),
        local.reshape(-1).long(),
        generation.reshape(-1).long(),
        _flatten_patch(patch, shape),
        None if version_key is None else unravel_key(version_key),
        version,
        require_newer,
    )


def _flatten_patch(
    patch: Mapping[NestedKey, torch.Tensor] | TensorDictBase, shape: torch.Size
) -> dict[NestedKey, torch.Tensor]:
    items = patch.items(True, True) if isinstance(patch, TensorDictBase) else patch.items()
    flat = {}
    for key, value in items:
        value = torch.as_tensor(value)
        if value.shape[: len(shape)] != shape:
            raise ValueError(
                f"{_WHERE}: key {key!r} must start with the shape of buffer_ids {list(shape)}, got "
                f"{list(value.shape)}. Nothing was changed."
            )
        flat[unravel_key(key)] = value.detach().reshape(shape.numel(), *value.shape[len(shape) :])
    if not flat:
        raise ValueError(f"{_WHERE}: patch must have at least one key, got none. Nothing was changed.")
    return flat
