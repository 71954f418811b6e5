# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Write-back: what an update of sampled rows asks for, checked, and what became of each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torchrl.data import ConditionalUpdateResult

from torchrl_ext.data._slot_read import split_index
from torchrl_ext.data.fields import Field

if TYPE_CHECKING:
    from torchrl_ext.data.storages import SlotStorage

__all__ = ["WriteBackResult"]

#: What became of a row of an update.
STALE, UPDATED, SUPERSEDED, REJECTED = range(4)


class WriteBackResult(ConditionalUpdateResult):
    """What became of each row of an update; the four masks partition the rows.

    Extends TorchRL's result, which reports every duplicate as updated. On CUDA the masks are device tensors, and the
    counts synchronise.

    Attributes:
        updated (torch.Tensor): bool, in the shape of the handles: the row lived and has the patch.
        superseded (torch.Tensor): bool: the row lived, and a later row of the same update names the same record.
        version_rejected (torch.Tensor, optional): bool: the row lived and lost the comparison of versions, duplicates
            that do not carry the highest one included. None without ``version_key``.
    """

    superseded: torch.Tensor | None = None

    @property
    def stale(self) -> torch.Tensor:
        """bool: the record was overwritten or emptied, or no such record ever was."""
        kept = self.updated if self.superseded is None else self.updated | self.superseded
        return ~(kept if self.version_rejected is None else kept | self.version_rejected)

    @property
    def superseded_count(self) -> int:
        """Rows that a later row of the same update replaced."""
        return 0 if self.superseded is None else int(self.superseded.sum())

    @property
    def stale_count(self) -> int:
        """Rows whose record was gone."""
        return int(self.stale.sum())


@dataclass
class Update:
    """A checked update, flattened to one row per handle."""

    shape: torch.Size
    """The handles' leading shape."""
    slot: torch.Tensor
    """int64 ``[M]``, as are the next two."""
    stream: torch.Tensor
    generation: torch.Tensor
    patch: list[tuple[Field, torch.Tensor]]
    """Fields of the layout and their new content, ``[M, *field.shape]``."""
    version: tuple[Field, torch.Tensor] | None
    """The field that holds versions, and the incoming ones, ``[M]``."""
    require_newer: bool

    def __len__(self) -> int:
        return len(self.slot)

    def tensors(self) -> list[torch.Tensor]:
        """Everything that an update reads, in a fixed order; :meth:`replaced` takes copies in the same one."""
        found = [self.slot, self.stream, self.generation, *(value for _, value in self.patch)]
        return found if self.version is None else [*found, self.version[1]]

    def replaced(self, tensors: list[torch.Tensor]) -> Update:
        """Returns the same update over other memory."""
        slot, stream, generation, *values = tensors
        version = None if self.version is None else (self.version[0], values.pop())
        patch = [(field, value) for (field, _), value in zip(self.patch, values, strict=True)]
        return Update(self.shape, slot, stream, generation, patch, version, self.require_newer)

    @property
    def nbytes(self) -> int:
        """Bytes of everything it reads."""
        return sum(tensor.numel() * tensor.dtype.itemsize for tensor in self.tensors())

    def result(self, codes: torch.Tensor) -> WriteBackResult:
        """Turns a code for each row into masks."""
        codes = codes.view(self.shape)
        rejected = None if self.version is None else codes == REJECTED
        return WriteBackResult(
            updated=codes == UPDATED,
            superseded=codes == SUPERSEDED,
            version_rejected=rejected,
            batch_size=self.shape,
        )


def check_update(
    storage: SlotStorage,
    where: str,
    *,
    index: torch.Tensor,
    generation: torch.Tensor,
    patch: Mapping[NestedKey, torch.Tensor] | TensorDictBase,
    version_key: NestedKey | None,
    version: int | torch.Tensor | None,
    require_newer: bool,
) -> Update:
    """Checks everything that can be checked without reading data; raises before anything is copied or written."""
    index, generation = torch.as_tensor(index), torch.as_tensor(generation)
    for name, value in (("index", index), ("generation", generation)):
        if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
            raise TypeError(f"{where}: {name} must hold integers, got {value.dtype}. Nothing was changed.")
    slot, stream = split_index(index, storage.num_streams)
    shape, count = slot.shape, slot.numel()
    if generation.shape not in (shape, (count,)):
        raise ValueError(
            f"{where}: generation must have the shape of the handles {list(shape)}, got {list(generation.shape)}. "
            "Nothing was changed."
        )
    if not isinstance(patch, (Mapping, TensorDictBase)):
        raise TypeError(f"{where}: patch must map keys to tensors, got {type(patch).__name__}. Nothing was changed.")
    items = patch.items(True, True) if isinstance(patch, TensorDictBase) else patch.items()
    given = {unravel_key(key): value for key, value in items}
    if not given:
        raise ValueError(f"{where}: patch must have at least one key, got none. Nothing was changed.")
    checked = [
        (field, _rows(where, field, torch.as_tensor(value), shape))
        for field, value in ((_field(storage, where, key), value) for key, value in given.items())
    ]
    return Update(
        shape,
        slot.reshape(-1).long(),
        stream.reshape(-1).long(),
        generation.reshape(-1).long(),
        checked,
        _check_version(storage, where, version_key, version, given, shape),
        require_newer,
    )


def _field(storage: SlotStorage, where: str, key: NestedKey) -> Field:
    known = {} if storage.layout is None else storage.layout.by_key
    field = known.get(key)
    if field is None:
        raise KeyError(f"{where}: key {key!r} must be one of {list(known)}. Nothing was changed.")
    return field


def _rows(where: str, field: Field, value: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Returns a patch as ``[M, *field.shape]``; its values are never cast nor reshaped across rows."""
    if value.dtype != field.dtype or value.shape not in ((*shape, *field.shape), (shape.numel(), *field.shape)):
        raise ValueError(
            f"{where}: key {field.key!r} must be {field.dtype} of shape {[*shape, *field.shape]}, got {value.dtype} of "
            f"shape {list(value.shape)}. Nothing was changed."
        )
    return value.detach().reshape(shape.numel(), *field.shape)


def _check_version(
    storage: SlotStorage,
    where: str,
    key: NestedKey | None,
    version: int | torch.Tensor | None,
    patch: Mapping[NestedKey, Any],
    shape: torch.Size,
) -> tuple[Field, torch.Tensor] | None:
    if (key is None) != (version is None):
        raise ValueError(f"{where}: version_key and version must be given together. Nothing was changed.")
    if key is None:
        return None
    field = _field(storage, where, unravel_key(key))
    if field.key in patch or field.shape.numel() != 1:
        found = "in patch" if field.key in patch else f"of shape {list(field.shape)}"
        raise ValueError(
            f"{where}: version_key {key!r} must name one number per row outside of patch, got one {found}. "
            "Nothing was changed."
        )
    incoming = torch.as_tensor(version)
    if not isinstance(version, torch.Tensor) and incoming.to(field.dtype).to(incoming.dtype).equal(incoming):
        incoming = incoming.to(field.dtype)  # the same number
    accepted = ((), (1,), (shape.numel(),), (shape.numel(), *field.shape), shape, (*shape, *field.shape))
    if incoming.dtype != field.dtype or incoming.shape not in accepted:
        raise ValueError(
            f"{where}: version must be one {field.dtype} or one for each row, shape {list(shape)}, got "
            f"{incoming.dtype} of shape {list(incoming.shape)}. Nothing was changed."
        )
    return field, incoming.detach().reshape(-1).expand(shape.numel())
