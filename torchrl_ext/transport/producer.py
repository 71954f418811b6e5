# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The writing end of a ring, whatever memory its rows lie in."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from tensordict import NestedKey, TensorDict

from torchrl_ext.data._row_words import row_words
from torchrl_ext.transport.cursors import Cursor
from torchrl_ext.transport.errors import RingClosed, RingPeerDied
from torchrl_ext.transport.parts import RingParts, RingShape

__all__ = ["RingProducer"]


class RingProducer(abc.ABC):
    """Reserves slots, has them filled and publishes them; see :mod:`torchrl_ext.transport.ring`.

    Attributes:
        slots (list of TensorDict): ``[n]`` each; what :meth:`reserve` returns is always one of them, so that whoever
            fills slots can prepare for each of them once.
    """

    slots: list[TensorDict]

    def __init__(self, shape: RingShape, parts: RingParts, is_alive: Callable[[], bool] | None) -> None:
        self._shape, self._parts, self._is_alive = shape, parts, is_alive
        self._cursors = parts.cursors()
        self._issued = self._cursors[Cursor.ISSUED]
        self._finals = self._cursors[Cursor.FINALS_ISSUED]
        self._reserved = False
        self._words = row_words(shape.layout)
        self._gaps = self._words.gaps(shape.num_streams)
        self._shapes = [(field.key, (shape.num_streams, *field.shape)) for field in shape.layout.fields]
        self._name = type(self).__name__

    @property
    def finals(self) -> int:
        """Final observations published since the ring was made."""
        return self._finals

    @abc.abstractmethod
    def _slot(self) -> int:
        """Returns which of ``slots`` the next step goes to, once it may be written."""

    @abc.abstractmethod
    def _push(self, leaves: Mapping[NestedKey, torch.Tensor | np.ndarray]) -> None:
        """Copies fields into the reserved slot, checking shapes."""

    @abc.abstractmethod
    def _write(
        self,
        cut_streams: np.ndarray | None,
        finals: torch.Tensor | None,
        place: int,
        tail: torch.Tensor | None,
    ) -> None:
        """Writes marks, final observations from a place of the arena on, and tail, and sends the rows off."""

    def reserve(self) -> TensorDict | None:
        """Returns the next slot as a TensorDict ``[n]`` of views to write into, None when there is no room.

        Raises:
            RingClosed: when the consumer closed the ring.
            RingPeerDied: when there is no room and the consumer's process is dead.
        """
        cursors, shape = self._cursors, self._shape
        if cursors[Cursor.CONSUMER_CLOSED]:
            raise self._closed()
        room = min(cursors[Cursor.READ] + shape.capacity, cursors[Cursor.LIMIT]) - self._issued
        finals = cursors[Cursor.FINALS_READ] + shape.final_capacity - self._finals
        if room < 1 or finals < shape.num_streams:
            if self._is_alive is not None and not self._is_alive():
                if cursors[Cursor.CONSUMER_CLOSED]:
                    raise self._closed()  # since the look above, before it ended
                raise RingPeerDied(
                    f"{self._name}: the consumer's process must live, it ended without closing the ring."
                )
            return None
        cursors.fence()  # the consumer's reads of this slot come before what is written now
        self._reserved = True
        return self.slots[self._slot()]

    def _closed(self) -> RingClosed:
        return RingClosed(f"{self._name}: the consumer must not have closed the ring. Nothing was reserved.")

    def push(self, leaves: Mapping[NestedKey, torch.Tensor | np.ndarray], **ends: Any) -> bool:
        """Reserves a slot, copies one step into it and publishes it.

        Args:
            leaves (mapping): every field of the layout by key, tensors or arrays ``[n, *feature]``; numbers of another
                dtype are cast.
            **ends: see :meth:`publish`.

        Returns:
            bool: whether there was room; nothing was done otherwise.

        Raises:
            KeyError, ValueError: when a field is missing or of another shape. Nothing was published, and the slot stays
                reserved.
            RingClosed, RingPeerDied: see :meth:`reserve`.
        """
        if self.reserve() is None:
            return False
        self._push(leaves)
        self.publish(**ends)
        return True

    def _copy_leaves(
        self,
        views: list[torch.Tensor],
        leaves: Mapping[NestedKey, torch.Tensor | np.ndarray],
        rows: torch.Tensor | None = None,
    ) -> None:
        """Copies fields into views in the layout's order, or into the rows as a whole where that is possible."""
        sources = []
        for key, shape in self._shapes:
            try:
                value = leaves[key]
            except KeyError:
                raise KeyError(
                    f"{self._name}: key {key!r} must be among the fields, got {list(leaves.keys())}. "
                    "Nothing was published."
                ) from None
            if value.shape != shape:
                raise ValueError(
                    f"{self._name}: key {key!r} must have shape {list(shape)}, got {list(value.shape)}. "
                    "Nothing was published."
                )
            source = value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
            sources.append(source.detach() if source.requires_grad else source)
        if rows is None or not self._words.write(rows, sources, self._gaps):
            torch._foreach_copy_(views, sources, non_blocking=views[0].is_cuda)

    def publish(
        self,
        *,
        final_streams: np.ndarray | None = None,
        finals: torch.Tensor | None = None,
        cut_streams: np.ndarray | None = None,
        tail: torch.Tensor | None = None,
        begins: bool = False,
        version: int = 0,
    ) -> None:
        """Publishes the reserved slot.

        Keyword Args:
            final_streams (np.ndarray, optional): ascending ids of the streams whose successor is not the next row.
            finals (torch.Tensor, optional): uint8 ``[M, >= successor_bytes]``, their successors.
            cut_streams (np.ndarray, optional): ids of terminated streams without a final observation.
            tail (torch.Tensor, optional): uint8 ``[n, >= successor_bytes]``, the successor of each row of the slot.
            begins (bool, optional): whether the streams began anew with this step, so that its observations follow
                nothing. Defaults to False.
            version (int, optional): of the policy that acted, an int32. Defaults to 0.

        Raises:
            RuntimeError: without a reserved slot.
            ValueError: when there is not one final observation for each stream named, a stream is not the ring's, or
                successors have another shape. Nothing was published.
        """
        shape, parts, cursors = self._shape, self._parts, self._cursors
        if not self._reserved:
            raise RuntimeError(
                f"{self._name}: publish must follow reserve, got no reserved slot. Nothing was published."
            )
        count = 0 if final_streams is None else len(final_streams)
        if count != (0 if finals is None else finals.shape[0]) or count > shape.num_streams:
            raise ValueError(
                f"{self._name}: finals must be one for each of {count} streams, at most {shape.num_streams}, got "
                f"{0 if finals is None else len(finals)}. Nothing was published."
            )
        if count:
            self._check_successors("finals", cast(torch.Tensor, finals), count)
            self._check_streams(cast(np.ndarray, final_streams))
        if tail is not None:
            self._check_successors("tail", tail, shape.num_streams)
        slot, place = self._issued % shape.capacity, self._finals % shape.final_capacity
        if count:
            streams, ahead = cast(np.ndarray, final_streams), shape.final_capacity - place
            parts.ended[place : place + count] = streams[:ahead]
            if count > ahead:
                parts.ended[: count - ahead] = streams[ahead:]
        parts.counts[slot], parts.begins[slot], parts.versions[slot] = count, begins, version
        if cut_streams is not None and not len(cut_streams):
            cut_streams = None
        self._write(cut_streams, finals if count else None, place, tail)
        if count:
            self._finals += count
            cursors[Cursor.FINALS_ISSUED] = self._finals
        self._issued += 1
        self._reserved = False
        cursors.fence()  # everything above is seen by whoever sees the next line
        cursors[Cursor.ISSUED] = self._issued

    def _check_successors(self, what: str, values: torch.Tensor, count: int) -> None:
        # A copy would stretch one row, or one byte, over all.
        shape, width = values.shape, self._shape.layout.successor_bytes
        if len(shape) != 2 or shape[0] != count or shape[1] < width or values.dtype != torch.uint8:
            raise ValueError(
                f"{self._name}: {what} must be uint8 [{count}, >= {width}], got {values.dtype} {list(shape)}. "
                "Nothing was published."
            )

    def _check_streams(self, streams: np.ndarray) -> None:
        count = self._shape.num_streams
        if not 0 <= streams[0] <= streams[-1] < count:  # of ascending ids the first and the last say it
            raise ValueError(
                f"{self._name}: final_streams must be ascending ids below {count}, got {streams}. "
                "Nothing was published."
            )

    def close(self) -> None:
        """Says that nothing more will come; what was published can still be read."""
        self._cursors.fence()
        self._cursors[Cursor.PRODUCER_CLOSED] = 1


def write_arena(arena: torch.Tensor, finals: torch.Tensor, place: int, *, width: int, non_blocking: bool) -> None:
    """Copies final observations into the arena from a place on, going on at its beginning."""
    count, ahead = finals.shape[0], arena.shape[0] - place
    if finals.shape[1] > width:
        finals = finals[:, :width]
    if count <= ahead:
        arena[place : place + count].copy_(finals, non_blocking=non_blocking)
    else:
        arena[place:].copy_(finals[:ahead], non_blocking=non_blocking)
        arena[: count - ahead].copy_(finals[ahead:], non_blocking=non_blocking)
