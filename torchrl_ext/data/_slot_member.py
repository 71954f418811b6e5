# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Our buffers as members of an ensemble."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import NestedKey, TensorDictBase

from torchrl_ext.data._member_rows import own_generations
from torchrl_ext.data._members import Masks, Member
from torchrl_ext.data._records import check_streams
from torchrl_ext.data._slot_write import infer_layout
from torchrl_ext.data.checkpoint import check_state
from torchrl_ext.data.packing import check_run
from torchrl_ext.data.replay_buffers import SlotReplayBuffer
from torchrl_ext.data.write_back import check_update


class SlotMember(Member):
    """A :class:`~torchrl_ext.data.SlotReplayBuffer`."""

    buffer: SlotReplayBuffer

    @property
    def may_refuse(self) -> bool:
        """A full side table that cannot grow is found by the write itself, before its first byte."""
        return not self.buffer.storage._grows

    def stores(self, key: NestedKey) -> bool:
        """Tells whether the layout has a key."""
        layout = self.buffer.storage.layout
        return layout is None or key in layout.by_key

    def check_extend(self, records: TensorDictBase) -> None:
        """Checks what the storage will be given, and the stream ids when there are several streams."""
        buffer, where = self.buffer, f"extend: {self.name}"
        storage, key = buffer.storage, buffer.routing_key
        if key is None and storage.num_streams > 1:
            raise RuntimeError(
                f"{where} with {storage.num_streams} streams must have a routing_key, which names the stream of each "
                "record. Nothing was written."
            )
        if key is not None:
            if records.get(key, None) is None:
                raise KeyError(f"{where} needs its routing key {key!r} in the records. Nothing was written.")
            check_streams(where, records.get(key), records.batch_size, storage)
            records = records if self.stores(key) else records.exclude(key)
        run = self._as_stored(records).unsqueeze(-1)
        layout = infer_layout(storage, run) if storage.layout is None else storage.layout
        check_run(layout, run, where=where, extra=storage.extra, num_streams=1)

    def extend(self, records: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Writes consecutive steps of the one stream, or records routed on to several streams."""
        buffer, storage = self.buffer, self.buffer.storage
        if buffer.routing_key is None:
            handle = buffer.extend_batch(records)
            return storage.ravel(handle.index).flatten(), handle.generation.flatten()
        with buffer._replay_lock:  # nobody else writes between the write and its generations
            index = buffer.extend(records)
            return storage.ravel(index), own_generations(storage.ravel(index), storage.generation_of(index))

    def _draw(self, rows: int) -> tuple[TensorDictBase, dict[NestedKey, torch.Tensor]]:
        data, info = self.buffer._sample(rows)
        # A transform may have moved rows, then their handles moved along; it may also have dropped the handles.
        index, generation = (data.pop(name, None) for name in ("index", "index_generation"))
        index = info["index"].reshape(*data.batch_size, 2) if index is None else index
        generation = info["index_generation"].reshape(data.batch_size) if generation is None else generation
        return data, {"index": self.buffer.storage.ravel(index), "index_generation": generation}

    def check_update(self, update: dict[str, Any]) -> None:
        """Checks keys, shapes, dtypes and versions against the layout."""
        storage = self.buffer.storage
        index = storage.unravel(update["index"])
        check_update(storage, f"update_if_present: {self.name}", **{**update, "index": index})

    def update(self, update: dict[str, Any]) -> Masks:
        """Applies an update; the last of several live rows wins."""
        index = self.buffer.storage.unravel(update["index"])
        result = self.buffer.update_if_present(**{**update, "index": index})
        return result.updated, cast(torch.Tensor, result.superseded), result.version_rejected

    def check_state(self, state: dict[str, Any]) -> None:
        """Checks format, sizes and layout of the rows too."""
        super().check_state(state)
        check_state(self.buffer.storage, state["_storage"])
