# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Fields into packed rows in one pass over the rows, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from torchrl_ext.data.fields import Field
from torchrl_ext.data.layout import FOLLOWED, RowLayout

__all__ = ["Gaps", "RowWords", "row_words"]

#: Rows of fewer bytes stay in the caches, and a copy per field is as fast or faster.
_LEAST_BYTES = 1 << 20


@dataclass(frozen=True)
class Gaps:
    """What lies between the whole fields of so many rows, to be used again and again by one writer."""

    parts: list[torch.Tensor | None]
    """float32 ``[count, words]`` in the order of a row, None where a field goes."""
    views: list[torch.Tensor]
    """Of the fields that lie in gaps."""


class RowWords:
    """A row as 4-byte words: fields that are made of whole words, and the gaps between them.

    A copy per field goes over all rows once per field and touches their lines again and again; one concatenation writes
    row after row. Words are moved as float32, which keeps every bit: nothing computes with them.

    Args:
        layout (RowLayout): of a row.
    """

    def __init__(self, layout: RowLayout) -> None:
        self._final = layout.final_offset
        self._fields = layout.fields
        self._is_whole = [field.nbytes % 4 == 0 and field.offset % 4 == 0 for field in layout.fields]
        #: Byte ranges of gaps in the order of a row, None for a field.
        self._parts: list[tuple[int, int] | None] = []
        end = 0
        for field, is_whole in zip(layout.fields, self._is_whole, strict=True):  # in the order of their offsets
            if is_whole:
                if field.offset > end:
                    self._parts.append((end, field.offset))
                self._parts.append(None)
                end = field.offset + field.nbytes
        self._parts.append((end, layout.row_bytes))  # ``final`` ends a row

    def gaps(self, count: int) -> Gaps:
        """Makes the gaps of so many rows, for :meth:`write`: no row is marked."""
        parts: list[torch.Tensor | None] = []
        views = {}
        for part in self._parts:
            if part is None:
                parts.append(None)
                continue
            start, end = part
            memory = torch.zeros(count, end - start, dtype=torch.uint8)
            parts.append(memory.view(torch.float32))
            for field, is_whole in zip(self._fields, self._is_whole, strict=True):
                if not is_whole and start <= field.offset < end:
                    views[field.key] = _view(memory, field, field.offset - start)
            if start <= self._final < end:
                memory[:, self._final - start :][:, :4].view(torch.int32).fill_(FOLLOWED)
        return Gaps(parts, [views[field.key] for field in self._fields if field.key in views])

    def write(self, rows: torch.Tensor, sources: Sequence[torch.Tensor], gaps: Gaps | None = None) -> bool:
        """Writes whole rows, the hidden ``final`` too, which says that nothing is cut.

        Args:
            rows (torch.Tensor): uint8 ``[*batch, row_bytes]``.
            sources (sequence of torch.Tensor): ``[*batch, *feature]`` in the layout's order.
            gaps (Gaps, optional): of as many rows. Defaults to new ones.

        Returns:
            bool: ``False`` where it cannot be done, or would not be faster; nothing was written then.
        """
        if rows.is_cuda or rows.numel() < _LEAST_BYTES or not rows.is_contiguous():
            return False
        count = rows.numel() // rows.shape[-1]
        whole, small = [], []
        for source, field, is_whole in zip(sources, self._fields, self._is_whole, strict=True):
            if source.dtype != field.dtype or source.is_cuda or not source.is_contiguous():
                return False
            if not is_whole:
                small.append(source.view(count, *field.shape))
                continue
            try:
                whole.append(source.view(count, -1).view(torch.float32))
            except RuntimeError:  # small numbers of a caller that do not begin at a multiple of 4 bytes
                return False
        gaps = self.gaps(count) if gaps is None else gaps
        if small:
            torch._foreach_copy_(gaps.views, small)
        fields = iter(whole)
        parts = [next(fields) if part is None else part for part in gaps.parts]
        torch.cat(parts, 1, out=rows.view(count, -1).view(torch.float32))
        return True


def _view(memory: torch.Tensor, field: Field, offset: int) -> torch.Tensor:
    return memory[:, offset : offset + field.nbytes].view(field.dtype).view(len(memory), *field.shape)


@lru_cache(maxsize=32)
def row_words(layout: RowLayout) -> RowWords:
    """Returns the words of a layout."""
    return RowWords(layout)
