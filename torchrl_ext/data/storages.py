# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Storage of many streams as packed rows in a time-major ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from torchrl.data.replay_buffers.storages import Storage

from torchrl_ext.data import _slot_write as writing
from torchrl_ext.data import positions as pos
from torchrl_ext.data._block import HEAD, NEWEST, RESERVED, TAIL, UNCOUNTED, UNKNOWN, Kind, SlotBlock
from torchrl_ext.data._device_write import cut_streams_on_device, write_run_on_device
from torchrl_ext.data._options import check_options, check_sizes, find_place
from torchrl_ext.data._records import extend_records
from torchrl_ext.data._slot_read import read
from torchrl_ext.data._slot_state import SavedState
from torchrl_ext.data._yielding_lock import YieldingLock
from torchrl_ext.data.fields import Field
from torchrl_ext.data.handles import SlotHandle
from torchrl_ext.data.layout import RowLayout
from torchrl_ext.data.packing import PackedRun, check_run
from torchrl_ext.data.sizing import block_bytes, default_final_capacity, default_hole_capacity
from torchrl_ext.data.streams import stream_order

__all__ = ["SlotStorage"]


class SlotStorage(SavedState):
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
    Death      What a writer that was killed had reserved does not live until it is written over. Whoever goes on in its
               place calls :meth:`end_streams` first.

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
        >>> lives = storage.generation_of(handle.index) == handle.generation
        >>> lives[:, 0].tolist()  # two rows were overwritten in the same call
        [False, False, True, True, True, True]
        >>> storage.get((torch.tensor([1]), torch.tensor([0])))["next", "observation"].item()
        6.0
    """

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
        check_sizes(capacity, num_streams, final_capacity)
        check_options(layout, next_obs, extra)
        device, kind = find_place(device, pinned=pinned, shared=shared, filename=filename)
        Storage.__init__(self, capacity * num_streams)
        self.ndim = 2
        self.capacity, self.num_streams = capacity, num_streams
        self.device, self.extra = device, extra
        self._kind: Kind = kind
        self._filename = filename
        self._final_capacity = final_capacity or default_final_capacity(capacity, grows=self._grows)
        self._next_obs: Literal["derive", "store"] = next_obs or "derive"
        self._next_keys = next_keys
        self._block: SlotBlock | None = None
        self._lock = YieldingLock()
        self._order = stream_order(device)
        self._content_revision = 0
        if layout is not None:
            self._allocate(layout)

    # ------------------------------------------------------------------ geometry

    @property
    def _grows(self) -> bool:
        return self._kind in ("cpu", "pinned")

    def _allocate(self, layout: RowLayout) -> SlotBlock:
        block = self._make_block(layout, self._final_capacity, default_hole_capacity(self.capacity, grows=self._grows))
        self._bind(block)
        return block

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
        return block_bytes(layout, capacity, num_streams, finals, default_hole_capacity(capacity, grows=grows))

    @property
    def nbytes(self) -> int:
        """Bytes allocated; 0 before the layout is known."""
        return 0 if self._block is None else self._block.nbytes

    # ------------------------------------------------------------------ writing

    def extend_batch(self, run: TensorDictBase | PackedRun, *, streams: slice | None = None) -> SlotHandle:
        """Writes ``K`` steps of ``N`` streams in at most two copies (one more wrap piece).

        Args:
            run (TensorDictBase or PackedRun): batch size ``[K, N]``, time first (``[K]`` when there is one stream). A
                :class:`~torchrl_ext.data.PackedRun` of the storage's layout is moved as bytes. May be a borrowed view:
                host data is copied before return, page-locked host data and CUDA data in the order of the current
                stream where the storage is on a device.

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
            columns, block = writing.column_block(streams, self.num_streams), self._block
            layout = writing.infer_layout(self, run) if block is None else block.layout
            width = columns.stop - columns.start
            if isinstance(run, PackedRun):
                writing.check_packed(layout, run, width)
            else:
                run = check_run(layout, run, where="extend_batch", extra=self.extra, num_streams=width)
            if block is None:
                block = self._allocate(layout)
            with self._order:
                if block.on_device:
                    return write_run_on_device(block, run, columns)
                return writing.write_run(self, run, columns)

    def extend_records(self, records: TensorDictBase, streams: torch.Tensor) -> torch.Tensor:
        """Writes records of any streams in any order by one scatter.

        The result is that of writing each record by itself: records of one stream are consecutive steps, in arrival
        order. Records that come step by step, all streams in order, are written as a run.

        Args:
            records (TensorDictBase): batch size ``[M]``.
            streams (torch.Tensor): integers ``[M]``, the stream of each record.

        Returns:
            torch.Tensor: int64 ``[M, 2]``, (slot, stream) of each record, on the device of ``streams``. Of more than
            ``capacity`` records of one stream the newest live.

        Raises:
            TypeError, KeyError, ValueError, RuntimeError: as :meth:`extend_batch`, and ``ValueError`` for streams out
                of range. Nothing was written.

        Streams that lie on a CUDA device are not read back: records of streams out of range are dropped, and a write
        whose final observations the side table cannot take changes nothing. Their index is ``-1``; the first later call
        that learns of such a refusal (a write, or one that asks for positions) raises ``RuntimeError``.
        """
        with self._lock:
            return extend_records(self, records, streams)

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
            cut = cut_streams_on_device if self._block.on_device else writing.cut_streams
            cut(self, writing.column_block(streams, self.num_streams))
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
            self._block.sampleable = self._block.settled_at = None
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
            return read(self, index)

    def _field(self, key: NestedKey) -> Field:
        field = self.block.layout.by_key.get(unravel_key(key))
        if field is None:
            raise KeyError(f"SlotStorage: key {key!r} must be one of {list(self.block.layout.by_key)}.")
        return field

    def __repr__(self) -> str:
        size = f"{self.capacity} slots x {self.num_streams} streams, {len(self)} rows live"
        where = self._filename or (self.device if self._kind in ("cpu", "cuda") else self._kind)
        keys = list(self._block.layout.by_key) if self._block is not None else "not yet known"
        return f"{type(self).__name__}({size}, device={where}, keys={keys})"
