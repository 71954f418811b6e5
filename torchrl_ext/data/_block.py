# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The one allocation behind a storage, and the views that give its bytes their meaning."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from typing import Literal

import numpy as np
import torch

from torchrl_ext.data.layout import RowLayout
from torchrl_ext.data.sizing import PAGE, POSITION_ROWS, block_bytes, ensure_fits

Kind = Literal["cpu", "pinned", "shared", "file", "cuda"]

#: Rows of the position table.
HEAD, RESERVED, TAIL, FINALS, NEWEST, UNCOUNTED, HOLES = range(POSITION_ROWS)
#: ``UNCOUNTED`` is what to take from a head to get the rows written since the write count was reset.
#: Values of ``NEWEST``: what is known of the successor of a stream's newest row. Where a device keeps the books, a row
#: that is ``UNKNOWN`` may be cut all the same: its hidden ``final`` tells, and no write has to wait for that.
UNKNOWN, PENDING, CUT = 0, 1, 2

_WORD = torch.complex128  # 16 bytes, copied bit by bit by index operations
_MAGIC = "torchrl_ext.SlotStorage"


def _private_memory(nbytes: int) -> torch.Tensor:
    """Returns zeroed host memory on huge pages where the system gives them.

    Random rows of a large storage miss the address cache on 4 kB pages: 2 MB pages make gathers 15 to 20 % faster.
    Memory is committed as it is written, as with ``torch.zeros``.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def items(rows: np.ndarray) -> np.ndarray:
    """Returns rows of bytes ``[M, n]`` as ``M`` items of ``n`` bytes; the bytes of a row lie side by side."""
    return rows.view(f"V{rows.shape[1]}")[:, 0]


def used_slots(positions: np.ndarray, capacity: int) -> int:
    """Returns how many leading slots hold live rows, by the positions int64 ``[7, N]`` of a block.

    Rows are written from slot 0 on after each ``empty``; a tail moves into a lap only where torn rows were loaded.
    """
    used = int((positions[HEAD] - positions[TAIL] // capacity * capacity).max())
    return min(max(used, 0), capacity)


class SlotBlock:
    """Positions, side table and rows of a storage in one tensor of bytes.

    The order is: ``positions`` int64 ``[7, N]``; ``final_step`` int64 ``[N, F]``, the step that owns each side entry;
    ``hole_step`` int64 ``[N, H]``; at the next page ``rows`` uint8 ``[capacity * N + N * F + 1, row_bytes]``: the ring,
    the side table (entry ``f`` of stream ``s`` at ``capacity * N + s * F + f``) and a sink row for writes that must go
    nowhere. A file has one page of JSON before it.

    The side table of a stream is a ring of its own: the ``q``-th final observation lies at ``q % F`` and
    ``positions[FINALS]`` counts them. The place of the next one holds the pending successor of the newest row, so that
    a pending successor becomes final by counting it, without a copy.
    """

    def __init__(
        self,
        layout: RowLayout,
        capacity: int,
        num_streams: int,
        final_capacity: int,
        hole_capacity: int,
        *,
        kind: Kind,
        device: torch.device,
        filename: str | None = None,
        create: bool = True,
    ) -> None:
        self.layout = layout
        self.capacity, self.num_streams = capacity, num_streams
        self.final_capacity, self.hole_capacity = final_capacity, hole_capacity
        self.kind: Kind = kind
        self.device, self.filename = device, filename
        self.nbytes = block_bytes(layout, capacity, num_streams, final_capacity, hole_capacity)
        if create:
            where = "cpu" if kind == "pinned" else kind
            ensure_fits(layout, capacity, num_streams, self.nbytes, where, device=device, filename=filename)
        self.bind(self._allocate(create))
        if create:
            self.final_step.fill_(-1)
            self.hole_step.fill_(-1)
            if self.on_device:
                self.mirror()

    def adopt(
        self, layout: RowLayout, geometry: dict, *, kind: Kind, device: torch.device, bytes_: torch.Tensor
    ) -> None:
        """Takes over bytes that another block of the same geometry wrote (unpickling)."""
        self.layout, self.kind, self.device, self.filename = layout, kind, device, None
        self.capacity, self.num_streams = geometry["capacity"], geometry["num_streams"]
        self.final_capacity, self.hole_capacity = geometry["final_capacity"], geometry["hole_capacity"]
        self.nbytes = bytes_.numel()
        self.bind(bytes_)

    def _allocate(self, create: bool) -> torch.Tensor:
        if self.kind == "file":
            return self._map_file(create)
        if self.kind == "cuda":
            return torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)
        if self.kind == "pinned":
            return torch.zeros(self.nbytes, dtype=torch.uint8, pin_memory=True)
        if self.kind == "shared":
            return torch.zeros(self.nbytes, dtype=torch.uint8).share_memory_()
        return _private_memory(self.nbytes)

    def _map_file(self, create: bool) -> torch.Tensor:
        assert self.filename is not None  # what makes a block of this kind
        size = PAGE + self.nbytes
        if create:
            header = json.dumps({"magic": _MAGIC, **self.geometry()}).encode()
            if len(header) > PAGE:
                raise ValueError(
                    f"SlotStorage: the description of a memory-mapped row must fit {PAGE} bytes, got {len(header)}. "
                    "Nothing was written; use fewer or shorter keys."
                )
            # Owned by the user alone; an existing file is not overwritten silently.
            descriptor = os.open(self.filename, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size)
                os.pwrite(descriptor, header, 0)
            except OSError:  # a full disk or a quota; the name must be free for another try
                os.unlink(self.filename)
                raise
            finally:
                os.close(descriptor)
        elif os.path.getsize(self.filename) != size:
            raise ValueError(
                f"SlotStorage: {self.filename} must be {size} bytes long, got {os.path.getsize(self.filename)}. "
                "The file was left as it is."
            )
        return torch.from_file(self.filename, shared=True, size=size, dtype=torch.uint8)[PAGE:]

    def geometry(self) -> dict:
        """Describes the block by plain values."""
        return {
            "layout": self.layout.to_dict(),
            "capacity": self.capacity,
            "num_streams": self.num_streams,
            "final_capacity": self.final_capacity,
            "hole_capacity": self.hole_capacity,
        }

    @staticmethod
    def read_header(filename: str) -> dict:
        """Returns the geometry that a memory-mapped file states; raises ``ValueError`` for a foreign file."""
        with open(filename, "rb") as file:
            head = file.read(PAGE)
        try:
            header = json.loads(head.rstrip(b"\0"))
            if header.pop("magic") != _MAGIC:
                raise ValueError("other magic")
            return header
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(
                f"SlotStorage: {filename} must begin with the header of a memory-mapped SlotStorage, got "
                f"{head[:32]!r}. The file was left as it is."
            ) from error

    def bind(self, block: torch.Tensor) -> None:
        """Makes the views of a block of bytes."""
        self.bytes = block
        self._mirror: np.ndarray
        self._late: list[tuple[torch.Tensor, torch.cuda.Event | None, int]]
        #: What :func:`torchrl_ext.data.draws.lockstep` found; every write sets it to None.
        self.sampleable: tuple | None = None
        #: For kernels: the sizes, the table of sampleable ranges, and captured draws.
        self.geometry_tensors: dict[int, torch.Tensor] = {}
        self.table: torch.Tensor | None = None
        self.graphs: dict = {}
        #: For updates by kernels: which handle writes a row.
        self.owner: torch.Tensor | None = None
        num, finals, holes = self.num_streams, self.final_capacity, self.hole_capacity
        ints = block[: 8 * num * (POSITION_ROWS + finals + holes)].view(torch.int64)
        positions, final_step, hole_step = ints.split([POSITION_ROWS * num, finals * num, holes * num])
        self.positions = positions.view(POSITION_ROWS, num)
        self.heads = self.positions[: RESERVED + 1]  # HEAD and RESERVED, which a device write moves together
        self.final_step = final_step.view(num, finals)
        self.hole_step = hole_step.view(num, holes)
        row_bytes = self.layout.row_bytes
        count = num * (self.capacity + finals) + 1
        self.rows = block[self.nbytes - count * row_bytes :].view(count, row_bytes)
        self.ring = self.rows[: self.capacity * num].view(self.capacity, num, row_bytes)
        self.ring_words = self.ring.view(torch.int64)  # as which torch copies a quarter faster than as bytes
        self.side_start = self.capacity * num
        self.sink = count - 1
        self.words = self.rows.view(_WORD)
        self.rows32, self.rows64 = self.rows.view(torch.int32), self.rows.view(torch.int64)
        self.successor_words = self.words[:, : self.layout.successor_bytes // 16]
        self.final = self.rows32[:, self.layout.final_offset // 4]
        if not self.on_device:
            # Bookkeeping works on few numbers at a time, where NumPy costs a third of a torch call.
            self._mirror, self._late, self._refused = self.positions.numpy(), [], False
            self.np_final_step = self.final_step.numpy()
            self.np_entry_step = self.np_final_step.reshape(-1)
            self.np_hole_step = self.hole_step.numpy()
            self.np_rows = self.rows.numpy()
            self.np_final = self.np_rows.view(np.int32)[:, self.layout.final_offset // 4]
            # As one item per row NumPy copies rows in half the time that a row of bytes takes.
            self.row_items = items(self.np_rows)
            if self.layout.derives:
                self.successor_items = items(self.np_rows[:, : self.layout.successor_bytes])
        else:
            self.mirror()

    @property
    def on_device(self) -> bool:
        """Whether the bookkeeping is done by the device, because the host must not wait for it."""
        return self.device.type != "cpu"

    def mirror(self) -> None:
        """Reads the positions of a device block back (at creation and after loading)."""
        # The writing process knows heads and tails without asking; which newest rows are cut only the device knows, so
        # the mirror of NEWEST says PENDING where a successor may be pending.
        self._mirror, self._late, self._refused = self.positions.cpu().numpy().copy(), [], False
        #: The step at which all streams stand without a pending successor; None where that is not known.
        self.settled_at: int | None = None
        #: The newest hole of each stream, -1 where there is none.
        self.newest_holes: np.ndarray = self.hole_step.amax(-1).cpu().numpy().copy()
        self.room = 0

    @property
    def np_positions(self) -> np.ndarray:
        """The positions as the host knows them: the table itself, or its mirror, which may have to wait for counts."""
        if self._late:
            self.catch_up()
        return self._mirror

    def catch_up(self) -> None:
        """Waits for counts that are on their way to the host; raises once for writes that the device refused."""
        for counts, event, newest in self._late:
            if event is not None:
                event.synchronize()
            *added, refused = counts.tolist()
            self._refused = self._refused or bool(refused)
            self._add(np.asarray(added), newest)
        self._late = []
        self.raise_refused()

    def raise_refused(self) -> None:
        """Raises once for writes that the device refused, as far as the host knows by now."""
        if self._refused:
            self._refused = False
            raise RuntimeError(
                "SlotStorage: an earlier write with streams on the device did not fit the side table, of which each "
                f"stream has final_capacity={self.final_capacity} entries. None of its records was written; build the "
                "storage with a larger final_capacity, or give streams on the host to be told at once."
            )

    def mirror_later(
        self, counts: torch.Tensor, known: np.ndarray | None, fits: torch.Tensor | None, newest: int
    ) -> None:
        """Moves the mirrored heads by counts of rows that a device was given, now if ``known``, else when asked for.

        ``fits`` is whether the device took them, None when that is sure. With ``known`` counts, those of earlier writes
        must have been caught up.
        """
        if known is not None:
            self._add(known, newest)
            return
        refused = torch.zeros_like(counts[:1]) if fits is None else (~fits).long().view(1)
        counts = torch.cat([counts, refused])
        if self.device.type == "cuda":
            copy = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True).copy_(counts, non_blocking=True)
            event = torch.cuda.Event(blocking=True)
            event.record()
            self._late.append((copy, event, newest))
        else:
            self._late.append((counts, None, newest))

    def _add(self, counts: np.ndarray, newest: int) -> None:
        self._mirror[: RESERVED + 1] += counts
        self._mirror[NEWEST, counts > 0] = newest

    @property
    def written(self) -> tuple[int, np.ndarray]:
        """What the host knows without waiting: how many writes it has no counts of yet, and a copy of the positions."""
        return len(self._late), self._mirror.copy()

    @property
    def longest(self) -> int:
        """At least so many live rows follow each other in some stream, none of them a hole; waits for nothing."""
        return int((self._mirror[HEAD] - np.maximum(self._low(), self._newest_holes() + 1)).max())

    @property
    def may_have_holes(self) -> bool:
        """Whether a row may live whose stream was cut before its successor was known; waits for nothing.

        Inside a capture always: a graph outlives what is known now.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return True
        holes = self.newest_holes if self.on_device else self.np_hole_step
        return bool((holes >= 0).any() and (self._newest_holes() >= self._low()).any())

    def _low(self) -> np.ndarray:
        return np.maximum(self._mirror[TAIL], self._mirror[RESERVED] - self.capacity)

    def _newest_holes(self) -> np.ndarray:
        return self.newest_holes if self.on_device else self.np_hole_step.max(-1)

    def position_copies(self) -> list[torch.Tensor | np.ndarray]:
        """Returns the position tables that a host-side change of heads and tails must be written to."""
        return [self.positions, self.np_positions] if self.on_device else [self.positions]

    def used_slots(self) -> int:
        """Returns how many leading slots hold live rows."""
        return used_slots(self.np_positions, self.capacity)
