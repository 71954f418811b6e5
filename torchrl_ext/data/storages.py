# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Storage of many streams as packed rows in a time-major ring."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from torchrl.data.replay_buffers.storages import Storage

from torchrl_ext.data import _slot_io as io
from torchrl_ext.data import positions as pos
from torchrl_ext.data._block import HEAD, NEWEST, RESERVED, TAIL, UNCOUNTED, UNKNOWN, SlotBlock
from torchrl_ext.data._device_write import cut_streams_on_device, write_run_on_device
from torchrl_ext.data._stock_view import StockView
from torchrl_ext.data.checkpoint import SlotStorageCheckpointer, load_state, save_state
from torchrl_ext.data.handles import SlotHandle
from torchrl_ext.data.layout import RowLayout
from torchrl_ext.data.packing import PackedRun, check_run
from torchrl_ext.data.sizing import block_bytes, default_final_capacity, default_hole_capacity
from torchrl_ext.data.streams import stream_order

__all__ = ["SlotStorage"]


class SlotStorage(StockView):
    """A ring of ``capacity`` slots for each of ``num_streams`` streams, one packed row per record.

    The storage has ``ndim=2`` (slot, stream) and plugs into :class:`torchrl.data.ReplayBuffer` and into
    :class:`~torchrl_ext.data.SlotReplayBuffer`. Each observation is stored once (``next_obs="derive"``): the successor
    of a row is the row one step later in its stream, or a final observation kept in a side table where that is not so
    (the end of an episode, a reset that no flag announces). Successors are exact: a reset observation never stands in.

    Roles      One process writes a stream; several may share a storage with ``shared=True`` or ``filename=``.
    State      ``head`` (next step to write) and ``tail`` (oldest step that may live) of each stream. A row lives iff
               ``max(tail, head - capacity) <= step < head``; its generation is ``step // capacity``.
    Publish    A write reserves its steps, copies, then publishes them. A reader in another process without the lock
               must drop what was reserved meanwhile (:class:`~torchrl_ext.data.SlotReplayBuffer` does).

    Args:
        capacity (int): slots per stream, at least 2.
        num_streams (int, optional): streams. Defaults to 1.

    Keyword Args:
        layout (RowLayout, optional): of a row. Defaults to that of the first run written.
        next_obs ("derive" or "store", optional): used when ``layout`` is None. Defaults to ``"derive"``.
        next_keys (sequence of NestedKey, optional): used when ``layout`` is None, see :class:`RowLayout`.
        device (torch.device, optional): of the rows. Defaults to ``"cpu"``.
        pinned (bool, optional): page-locked host memory. Defaults to ``False``.
        shared (bool, optional): shared host memory. Defaults to ``False``.
        filename (str, optional): a file to map; it must not exist (:meth:`open` reopens one).
        final_capacity (int, optional): side-table entries per stream, the pending successor included. The table of
            private host memory grows when it is full and starts with 1/64 of the slots; that of other memory raises
            when it is full and has 1/40 (at least 17) by default: size it for the shortest episodes to expect.
        extra ("raise" or "drop"): what to do with keys that the layout does not have. Defaults to ``"raise"``.

    Raises:
        ValueError: on impossible sizes or options.
        MemoryError: when the rows do not fit what is free, stating both, per field; nothing is allocated.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_ext.data import SlotStorage
        >>> def run(first, steps):
        ...     t = torch.arange(first, first + steps).view(-1, 1, 1).expand(-1, 2, 1).float()
        ...     return TensorDict(
        ...         {
        ...             "observation": t,
        ...             "next": {"observation": t + 1, "reward": t, "done": torch.zeros_like(t, dtype=torch.bool)},
        ...         },
        ...         [steps, 2],
        ...     )
        >>> storage = SlotStorage(4, num_streams=2)
        >>> handle = storage.extend_batch(run(0, 6))
        >>> len(storage), storage["observation"][:, 0, 0].tolist()
        (8, [4.0, 5.0, 2.0, 3.0])
        >>> storage.generation_of(handle.index)[:, 0].tolist()  # two rows were overwritten in the same call
        [-1, -1, 0, 0, 1, 1]
        >>> storage.get((torch.tensor([1]), torch.tensor([0])))["next", "observation"].item()
        6.0
    """

    _default_checkpointer = SlotStorageCheckpointer

    def __init__(
        self,
        capacity: int,
        num_streams: int = 1,
        *,
        layout: RowLayout | None = None,
        next_obs: Literal["derive", "store"] | None = None,
        next_keys: Sequence[NestedKey] | None = None,
        device: torch.device | str = "cpu",
        pinned: bool = False,
        shared: bool = False,
        filename: str | None = None,
        final_capacity: int | None = None,
        extra: Literal["raise", "drop"] = "raise",
    ) -> None:
        for name, value, least in (("capacity", capacity, 2), ("num_streams", num_streams, 1)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"SlotStorage: {name} must be an int >= {least}, got {value!r}.")
        if next_obs not in (None, "derive", "store"):
            raise ValueError(f"SlotStorage: next_obs must be 'derive' or 'store', got {next_obs!r}.")
        if layout is not None and next_obs not in (None, layout.next_obs):
            raise ValueError(f"SlotStorage: next_obs must be the layout's {layout.next_obs!r}, got {next_obs!r}.")
        if final_capacity is not None and final_capacity < 2:
            raise ValueError(
                f"SlotStorage: final_capacity must be >= 2 (one pending successor, one final), got {final_capacity}."
            )
        if extra not in ("raise", "drop"):
            raise ValueError(f"SlotStorage: extra must be 'raise' or 'drop', got {extra!r}.")
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        places = [name for name, on in (("pinned", pinned), ("shared", shared), ("filename", filename)) if on]
        if len(places) > 1 or (places and device.type != "cpu"):
            raise ValueError(
                "SlotStorage: at most one of pinned, shared and filename goes with device='cpu', got "
                f"{places} on {device}."
            )
        Storage.__init__(self, capacity * num_streams)
        self.ndim = 2
        self.capacity, self.num_streams = capacity, num_streams
        self.device, self.extra = device, extra
        place = places[0] if places else "cpu"
        self._kind = "cuda" if device.type == "cuda" else "file" if place == "filename" else place
        self._filename = filename
        self._final_capacity = final_capacity or default_final_capacity(capacity, grows=self._grows)
        self._next_obs, self._next_keys = next_obs or "derive", next_keys
        self._block: SlotBlock | None = None
        self._lock = threading.RLock()
        self._order = stream_order(device)
        self._content_revision = 0
        if layout is not None:
            self._allocate(layout)

    # ------------------------------------------------------------------ geometry

    @property
    def _grows(self) -> bool:
        return self._kind in ("cpu", "pinned")

    def _allocate(self, layout: RowLayout) -> None:
        holes = default_hole_capacity(self.capacity)
        self._bind(self._make_block(layout, self._final_capacity, holes))

    def _make_block(self, layout: RowLayout, finals: int, holes: int, *, create: bool = True) -> SlotBlock:
        return SlotBlock(
            layout,
            self.capacity,
            self.num_streams,
            finals,
            holes,
            kind=self._kind,
            device=self.device,
            filename=self._filename,
            create=create,
        )

    def _bind(self, block: SlotBlock) -> None:
        self._block = block
        self._storage = block.layout.view(block.ring).lock_()
        self._final_capacity = block.final_capacity

    @property
    def initialized(self) -> bool:
        """Whether the layout is known and the rows are allocated."""
        return self._block is not None

    @property
    def layout(self) -> RowLayout | None:
        """The layout of a row, None before the first write when none was given."""
        return None if self._block is None else self._block.layout

    @property
    def block(self) -> SlotBlock:
        """The allocation; raises ``RuntimeError`` before the layout is known."""
        if self._block is None:
            raise RuntimeError("SlotStorage: nothing was written and no layout was given; write a run first.")
        return self._block

    @staticmethod
    def nbytes_for(
        layout: RowLayout, capacity: int, num_streams: int, *, final_capacity: int | None = None, grows: bool = True
    ) -> int:
        """Returns the bytes that a storage of these sizes allocates, side table and positions included.

        Args:
            layout (RowLayout): of a row.
            capacity, num_streams (int): as in the constructor.

        Keyword Args:
            final_capacity (int, optional): as in the constructor.
            grows (bool, optional): ``False`` for CUDA, shared and memory-mapped storages, whose default side table is
                larger because it cannot grow. Defaults to ``True``.
        """
        finals = final_capacity or default_final_capacity(capacity, grows=grows)
        return block_bytes(layout, capacity, num_streams, finals, default_hole_capacity(capacity))

    @property
    def nbytes(self) -> int:
        """Bytes allocated; 0 before the layout is known."""
        return 0 if self._block is None else self._block.nbytes

    # ------------------------------------------------------------------ positions

    @property
    def head(self) -> torch.Tensor:
        """int64 ``[N]``, a copy: the next step to write of each stream."""
        return self._position(HEAD)

    @property
    def tail(self) -> torch.Tensor:
        """int64 ``[N]``, a copy: the oldest step that may live of each stream."""
        return self._position(TAIL)

    def _position(self, row: int) -> torch.Tensor:
        if self._block is None:
            return torch.zeros(self.num_streams, dtype=torch.int64)
        return self._block.positions[row].clone()

    def live_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``low`` and ``high``, int64 ``[N]`` each: step ``s`` of a stream lives iff ``low <= s < high``."""
        low, high = pos.live_range(self.block)
        return low, high.clone()

    def generation_of(self, index: torch.Tensor) -> torch.Tensor:
        """Returns the generation of rows, ``-1`` where no live row is.

        Args:
            index (torch.Tensor): int64 ``[..., 2]`` (slot, stream); ``[...]`` slots when there is one stream. Indices
                out of range name no row.

        Returns:
            torch.Tensor: int64 ``[...]`` on the device of ``index``. The same answer in every process.
        """
        slot, stream = io.split_index(index, self.num_streams)
        if self._block is None:
            return torch.full_like(slot, -1)
        return pos.generation_of(self._block, slot.to(self.device), stream.to(self.device)).to(slot.device)

    def ravel(self, index: torch.Tensor) -> torch.Tensor:
        """Returns flat row numbers ``slot * N + stream`` of indices ``[..., 2]``."""
        slot, stream = io.split_index(index, self.num_streams)
        return slot * self.num_streams + stream

    def unravel(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns indices ``[..., 2]`` of flat row numbers."""
        slot = rows.div(self.num_streams, rounding_mode="floor")
        return torch.stack([slot, rows - slot * self.num_streams], -1)

    @property
    def write_count(self) -> int:
        """Rows written since creation or the last :meth:`empty` that reset it, overwritten ones included."""
        if self._block is None:
            return 0
        positions = self._block.np_positions
        return int((positions[HEAD] - positions[UNCOUNTED]).sum())

    @property
    def has_other_writers(self) -> bool:
        """Whether another process may write while this one reads (shared memory and mapped files)."""
        return self._kind in ("shared", "file")

    def num_finals(self) -> int:
        """Returns how many final observations live in the side table."""
        if self._block is None:
            return 0
        low, _ = pos.live_range(self._block)
        return int((self._block.final_step >= low.unsqueeze(-1)).sum())

    def __len__(self) -> int:
        """Returns the number of live rows of all streams."""
        if self._block is None:
            return 0
        # The host copy of heads and tails answers without asking a CUDA device.
        positions = self._block.np_positions
        low = np.maximum(positions[TAIL], positions[RESERVED] - self.capacity)
        return int((positions[HEAD] - low).sum())

    # ------------------------------------------------------------------ writing

    def extend_batch(self, run: TensorDictBase | PackedRun, *, streams: slice | None = None) -> SlotHandle:
        """Writes ``K`` steps of ``N`` streams in at most two copies (one more wrap piece).

        Args:
            run (TensorDictBase or PackedRun): batch size ``[K, N]``, time first (``[K]`` when there is one stream). A
                :class:`~torchrl_ext.data.PackedRun` of the storage's layout is moved as bytes. May be a borrowed view:
                host data is copied before return, CUDA data on the current stream.

        Keyword Args:
            streams (slice, optional): the columns to write, for a run of batch size ``[K, stop - start]``; blocks
                advance independently. Defaults to all streams.

        Returns:
            SlotHandle: the rows written. More than ``capacity`` steps leave the newest ``capacity``, and positions
            advance as single writes would.

        Raises:
            TypeError, KeyError, ValueError: when the run does not fit, or a row that ends an episode without
                termination lacks its final observation. Nothing was written.
            RuntimeError: when the side table is full and cannot grow. Nothing was written.
        """
        with self._lock:
            columns = io.column_block(streams, self.num_streams)
            layout = self._infer_layout(run) if self._block is None else self._block.layout
            width = columns.stop - columns.start
            if isinstance(run, PackedRun):
                io.check_packed(layout, run, width)
            else:
                run = check_run(layout, run, where="extend_batch", extra=self.extra, num_streams=width)
            if self._block is None:
                self._allocate(layout)
            with self._order:
                if self._block.on_device:
                    return write_run_on_device(self._block, run, columns)
                return io.write_run(self, run, columns)

    def _infer_layout(self, run: TensorDictBase | PackedRun) -> RowLayout:
        if isinstance(run, PackedRun):
            return run.layout
        if not isinstance(run, TensorDictBase):
            raise TypeError(
                "extend_batch: run must be a TensorDict of batch size [K, N] or a PackedRun, got "
                f"{type(run).__name__}. Nothing was written; stack the steps along dim 0."
            )
        if run.batch_dims not in ((1, 2) if self.num_streams == 1 else (2,)):
            raise ValueError(
                f"extend_batch: run must have batch size [K, {self.num_streams}] with K >= 1, got "
                f"{list(run.batch_size)}. Nothing was written."
            )
        return RowLayout.from_tensordict(run, next_obs=self._next_obs, next_keys=self._next_keys)

    def end_streams(self, streams: slice | None = None) -> None:
        """Cuts streams: the next first observation will not be taken for the successor of the newest row.

        A pending successor becomes the row's final observation. A newest row whose successor is not known (packed runs
        without a tail) stays readable by index and is never sampled as a transition.

        Args:
            streams (slice, optional): the columns to cut. Defaults to all streams.

        Raises:
            RuntimeError: when the side table is full and cannot grow. Nothing was changed.
        """
        if self._block is None:
            return
        with self._lock, self._order:
            cut = cut_streams_on_device if self._block.on_device else io.cut_streams
            cut(self, io.column_block(streams, self.num_streams))
            self._bump_mutation_revision()

    def empty(self, *, empty_write_count: bool = True) -> None:
        """Drops all rows: head and tail move to the start of the next lap, so that every old handle dies."""
        if self._block is None:
            return
        with self._lock, self._order:
            for positions in self._block.position_copies():
                start = pos.next_lap(positions[HEAD], self.capacity)
                counted = 0 if empty_write_count else positions[HEAD] - positions[UNCOUNTED]
                positions[UNCOUNTED] = start - counted
                for row in (TAIL, RESERVED, HEAD):
                    positions[row] = start
                positions[NEWEST] = UNKNOWN
            self._block.sampleable = None
            self._bump_mutation_revision()

    def _empty(self) -> None:
        # The writer resets its own count; the storage's count is the writer's when it is ours.
        self.empty()

    # ------------------------------------------------------------------ reading and content

    def get(self, index: Any) -> TensorDict | torch.Tensor:
        """Reads rows or fields.

        Args:
            index: a tensor of slots (``[..., 2]`` with streams, or ``[...]``: all streams of a slot) or a tuple of
                tensors (slots, streams) gives copies with their one-step successors under ``"next"``; an int or slice
                over slots (or a tuple of them) gives zero-copy views of the stored fields; a key gives the view
                ``[capacity, N, *feature]`` of that field.

        Returns:
            TensorDict, or torch.Tensor for a key.

        Raises:
            IndexError: for slots or streams out of range.
        """
        if isinstance(index, str) or (isinstance(index, tuple) and all(isinstance(i, str) for i in index)):
            return self.block.layout.leaves(self.block.ring, [self._field(index)])[unravel_key(index)]
        with self._lock, self._order:
            return io.read(self, index)

    def _field(self, key: NestedKey):
        field = self.block.layout.by_key.get(unravel_key(key))
        if field is None:
            raise KeyError(f"SlotStorage: key {key!r} must be one of {list(self.block.layout.by_key)}.")
        return field

    def __repr__(self) -> str:
        size = f"{self.capacity} slots x {self.num_streams} streams, {len(self)} rows live"
        where = self._filename or (self.device if self._kind in ("cpu", "cuda") else self._kind)
        keys = list(self._block.layout.by_key) if self._block is not None else "not yet known"
        return f"{type(self).__name__}({size}, device={where}, keys={keys})"

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Returns the live bytes, positions and side table as tensors and plain values (copies)."""
        with self._lock:
            return save_state(self._block)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict` exactly, positions and generations included.

        Raises:
            ValueError: when the state is damaged or of another layout, capacity or number of streams. Nothing changed.
        """
        with self._lock:
            load_state(self, state_dict)
            self._bump_mutation_revision()

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
            state["block__context"] = io.pickled_block(self, state.pop("_block"))
            state["_kind"] = self._kind
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        block = state.pop("block__context")
        Storage.__setstate__(self, state)
        self._lock = threading.RLock()
        self._order = stream_order(self.device)
        self._block = self._storage = None
        io.unpickle_block(self, block)
