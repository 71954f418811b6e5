# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""TorchRL's buffers as members of an ensemble."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn.utils import _set_dispatch_td_nn_modules
from torch.utils._pytree import tree_leaves
from torchrl.data import ImmutableDatasetWriter, ReplayBuffer, SliceSampler

from torchrl_ext.data._member_rows import own_generations, superseded_rows
from torchrl_ext.data._members import Masks, Member


class StockMember(Member):
    """A buffer of TorchRL over a one-dimensional tensor storage.

    Args:
        flat (bool): whether samples are ``[rows]`` always. TorchRL's slice samplers make ``[rows, 1]`` in an ensemble.
    """

    def __init__(self, buffer: ReplayBuffer, number: int, *, flat: bool) -> None:
        super().__init__(buffer, number)
        self._flat = flat

    def _fields(self) -> dict[NestedKey, torch.Tensor]:
        """The stored tensors by key, none before the first write."""
        storage = self.buffer.storage
        if not storage.initialized:
            return {}
        if not isinstance(storage._storage, TensorDictBase):
            raise TypeError(f"{self.name} must store TensorDicts, got {type(storage._storage).__name__}.")
        return {unravel_key(key): leaf for key, leaf in storage._storage.items(True, True)}

    def stores(self, key: NestedKey) -> bool:
        """Tells whether the storage has a key."""
        fields = self._fields()
        return not fields or key in fields

    def check_extend(self, records: TensorDictBase) -> None:
        """Checks keys, shapes and dtypes against what is stored: TorchRL adds, casts and skips without a word."""
        if isinstance(self.buffer.writer, ImmutableDatasetWriter):
            raise RuntimeError(f"extend: {self.name} must be writable, it has a dataset's writer. Nothing was written.")
        records, fields = self._as_stored(records), self._fields()
        if not fields:
            return
        fields.pop("index", None)  # the mark of TorchRL's TensorDict writers
        given = {unravel_key(key): leaf for key, leaf in records.items(True, True) if key != "index"}
        # Locked storages drop keys that they do not know.
        extra = set() if self.buffer.storage._storage.is_locked else given.keys() - fields.keys()
        if extra or fields.keys() - given.keys():
            raise KeyError(
                f"extend: records of {self.name} must have the keys {list(fields)}, got {list(given)}. "
                "Nothing was written."
            )
        for key, stored in fields.items():
            leaf = given[key]
            if isinstance(stored, torch.Tensor) and (leaf.dtype, leaf.shape[1:]) != (stored.dtype, stored.shape[1:]):
                raise ValueError(
                    f"extend: key {key!r} of {self.name} must be {stored.dtype} of shape {list(stored.shape[1:])} per "
                    f"record, got {leaf.dtype} of shape {list(leaf.shape[1:])}. Nothing was written."
                )

    def extend(self, records: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Writes records by the buffer's own ``extend``, priorities included."""
        buffer = self.buffer
        with buffer._replay_lock:  # nobody else writes between the write and its generations
            rows = torch.as_tensor(buffer.extend(records)).reshape(-1)
            if not self.tracks_generations:
                return rows, None
            return rows, own_generations(rows, buffer.writer.generations_of(rows))

    def _draw(self, rows: int) -> tuple[TensorDictBase, dict[NestedKey, torch.Tensor]]:
        buffer = self.buffer
        with buffer._replay_lock, buffer._write_lock:
            info = self._draw_index(rows)
            index = info["index"]
            if self.tracks_generations:
                info["index_generation"] = buffer.writer.generations_of(index)
            data = buffer.storage.get(index.to(buffer.storage.device))
        data = buffer._collate_fn(data)
        if not isinstance(data, TensorDictBase):
            raise TypeError(f"sample: {self.name} must give TensorDicts, got {type(data).__name__}.")
        data = data.exclude("index", "index_generation")
        if len(buffer.transform):
            with _set_dispatch_td_nn_modules(True):
                data = buffer.transform(data)
        if data.numel() != index.numel():
            raise RuntimeError(
                f"sample: a transform of {self.name} must keep all {index.numel()} rows, got batch size "
                f"{list(data.batch_size)}. Nothing was returned."
            )
        dims = index.dim()
        return data, {key: value.reshape(*data.batch_size, *value.shape[dims:]) for key, value in info.items()}

    def _draw_index(self, rows: int) -> dict[NestedKey, torch.Tensor]:
        """Asks the sampler until it gave all rows: one without replacement gives fewer at the end of a pass."""
        buffer, parts = self.buffer, []
        left = rows
        while left:
            index, info = buffer.sampler.sample(buffer.storage, left)
            index = torch.stack(index, -1) if isinstance(index, tuple) else torch.as_tensor(index)
            if not 0 < len(index) <= left:
                raise RuntimeError(f"its sampler gave {len(index)} rows for {left}.")
            if self._flat and index.dim() == 2:
                index = index.squeeze(-1)
            aligned = {
                unravel_key(key): value
                for key, value in info.items()
                if isinstance(value, torch.Tensor) and value.shape[: index.dim()] == index.shape
            }
            parts.append({**aligned, "index": index})
            left -= len(index)
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0] if all(key in p for p in parts)}

    def check_update(self, update: dict[str, Any]) -> None:
        """Checks keys, shapes, dtypes and versions by TorchRL's rules."""
        where, fields = f"update_if_present: {self.name}", self._fields()
        given = dict(update["patch"])
        version = self._version(update)
        if version is not None:
            key, value = version
            if key in given or (key in fields and fields[key].shape[1:].numel() != 1):
                raise ValueError(
                    f"{where}: version_key {key!r} must name one number per row outside of patch. Nothing was changed."
                )
            given[key] = value
        count = len(update["index"])
        for key, value in given.items():
            if key not in fields:
                raise KeyError(f"{where}: key {key!r} must be one of {list(fields)}. Nothing was changed.")
            stored = fields[key]
            if value.dtype != stored.dtype or value.numel() != count * stored.shape[1:].numel():
                raise ValueError(
                    f"{where}: key {key!r} must be {stored.dtype} of shape {[count, *stored.shape[1:]]}, got "
                    f"{value.dtype} of shape {list(value.shape)}. Nothing was changed."
                )

    def _version(self, update: dict[str, Any]) -> tuple[NestedKey, torch.Tensor] | None:
        key, version = update["version_key"], update["version"]
        if key is None:
            return None
        stored = self._fields().get(key)
        dtype = None if isinstance(version, torch.Tensor) or stored is None else stored.dtype
        return key, torch.as_tensor(version, dtype=dtype).reshape(-1).expand(len(update["index"]))

    def update(self, update: dict[str, Any]) -> Masks:
        """Applies an update. TorchRL leaves open which of several rows wins: here the last live one, as in ours."""
        buffer, index = self.buffer, update["index"]
        options: dict[str, Any] = dict(update)
        version = self._version(update)
        with buffer._replay_lock:
            superseded = torch.zeros_like(index, dtype=torch.bool)
            if version is not None:
                options["version"] = version[1]
            else:
                current = buffer.writer.generations_of(index)
                captured = update["generation"].to(index.device)
                superseded = superseded_rows(index, (captured >= 0) & (captured == current))
                options["generation"] = captured.masked_fill(superseded, -1)
            result = buffer.update_if_present(**options)
        return result.updated, superseded, result.version_rejected

    def check_state(self, state: dict[str, Any]) -> None:
        """Checks the number of rows, which TorchRL takes over or finds too late."""
        super().check_state(state)
        wanted = self.buffer.storage.max_size
        sizes = {len(leaf) for leaf in tree_leaves(state["_storage"]) if isinstance(leaf, torch.Tensor) and leaf.ndim}
        if sizes - {wanted}:
            raise ValueError(
                f"load_state_dict: the state of {self.name} must have {wanted} rows, got {sorted(sizes)}. "
                "Nothing was changed."
            )

    @property
    def can_dump(self) -> bool:
        """TorchRL cannot save a storage that was never written."""
        return bool(self.buffer.storage.initialized)

    def check_end_streams(self) -> None:
        """Raises ``RuntimeError`` when there is no stream that TorchRL could end; it looks closer itself."""
        if not isinstance(self.buffer.sampler, SliceSampler) or not self.tracks_generations:
            raise RuntimeError(
                f"end_streams: {self.name} must have a SliceSampler and a writer that tracks generations, it has "
                f"{type(self.buffer.sampler).__name__} and {type(self.buffer.writer).__name__}. Nothing was changed."
            )
