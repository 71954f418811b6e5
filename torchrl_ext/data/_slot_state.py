# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What a storage hands on: state dicts, mapped files, pickles and memory shared with a spawned process."""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, Literal

from torchrl.data.replay_buffers.storages import Storage

from torchrl_ext.data._block import SlotBlock
from torchrl_ext.data._stock_view import StockView
from torchrl_ext.data._yielding_lock import YieldingLock
from torchrl_ext.data.checkpoint import SlotStorageCheckpointer, copied_bytes, load_state, save_state
from torchrl_ext.data.layout import RowLayout
from torchrl_ext.data.streams import stream_order

if TYPE_CHECKING:
    from torchrl_ext.data.storages import SlotStorage


class SavedState(StockView):
    """The part of :class:`~torchrl_ext.data.SlotStorage` that saves, reopens and sends a storage."""

    _default_checkpointer = SlotStorageCheckpointer
    _storage: Any
    """The ring as a TensorDict of views; None before the layout is known."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the live bytes, positions and side table as tensors and plain values (copies)."""
        with self._lock:
            return save_state(self._block)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict` exactly, positions and generations included.

        Raises:
            ValueError: when the state is damaged or of another layout, capacity or number of streams. Nothing changed.
        """
        with self._lock, self._order:
            before = self._mutation_revision
            load_state(self, state_dict)
            # Heads may have gone back, and a revision must never be the one of other rows.
            self._content_revision += 1 + max(0, before - self._mutation_revision)

    @classmethod
    def open(cls, filename: str, *, extra: Literal["raise", "drop"] = "raise") -> SlotStorage:
        """Reopens a memory-mapped file with its rows and positions; raises ``ValueError`` for a foreign file."""
        header = SlotBlock.read_header(filename)
        storage = cls(
            header["capacity"],
            header["num_streams"],
            filename=filename,
            final_capacity=header["final_capacity"],
            extra=extra,
        )
        layout = RowLayout.from_dict(header["layout"])
        storage._bind(storage._make_block(layout, header["final_capacity"], header["hole_capacity"], create=False))
        return storage

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = self.__dict__.copy()
            for name in ("_lock", "_order", "_storage", "_rng"):
                state[name] = None
            # Counters of TorchRL's base class that the positions replace; the new process makes its own.
            for name in ("_last_cursor_index_value", "_mutation_revision_value"):
                state.pop(name, None)
            state["_attached_entities_list"] = []
            state["block__context"] = pickled_block(self, state.pop("_block"))
            state["_kind"] = self._kind
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        block = state.pop("block__context")
        Storage.__setstate__(self, state)
        self._lock = YieldingLock()
        self._order = stream_order(self.device)
        self._block = self._storage = None
        unpickle_block(self, block)


def pickled_block(storage: SlotStorage, block: SlotBlock | None) -> dict | None:
    """Returns what a pickle carries: bytes by value, or the shared memory itself when a process is being spawned."""
    if block is None:
        if get_spawning_popen() is not None:
            # Both processes would allocate rows of their own, and none would see the other's.
            raise RuntimeError(
                "SlotStorage: rows must be there to be shared with a process, got a storage without rows and layout. "
                "Nothing was sent; give layout= or write a run first."
            )
        return None
    state: dict[str, Any] = {"geometry": block.geometry(), "bytes": block.bytes}
    if get_spawning_popen() is None:
        state["kind"] = "cpu" if block.kind in ("shared", "file") else block.kind
        if not block.on_device:
            # Of one moment: others write before the pickle is. And a queue of torch would move the rows themselves into
            # shared memory, away from the arrays that the books are kept in.
            state["bytes"] = copied_bytes(block)
    elif block.kind == "file":
        state.update(bytes=None, kind="file")
    else:
        if block.kind in ("cpu", "pinned"):
            # Torch moves what it sends into shared memory; from here on both processes see the same bytes.
            block.bytes.share_memory_()
            block.bind(block.bytes)
            block.kind = storage._kind = "shared"
            storage._bind(block)
        state.update(bytes=block.bytes, kind=block.kind)
    return state


def unpickle_block(storage: SlotStorage, state: dict | None) -> None:
    """Rebuilds the allocation of an unpickled storage."""
    if state is None:
        return
    geometry, storage._kind = state["geometry"], state["kind"]
    layout = RowLayout.from_dict(geometry["layout"])
    sizes = (geometry["final_capacity"], geometry["hole_capacity"])
    if state["bytes"] is None:
        storage._bind(storage._make_block(layout, *sizes, create=False))
        return
    storage._filename = None
    block = SlotBlock.__new__(SlotBlock)
    block.adopt(layout, geometry, kind=storage._kind, device=storage.device, bytes_=state["bytes"])
    storage._bind(block)
