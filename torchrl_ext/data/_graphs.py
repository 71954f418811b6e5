# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Draws replayed as one CUDA graph: the host pays for one launch instead of six."""

from __future__ import annotations

import sys
from typing import Any, Protocol, cast

import torch
from tensordict import NestedKey, TensorDict

from torchrl_ext.data._block import SlotBlock
from torchrl_ext.data._fused import Outputs, hole_search, launch, refresh
from torchrl_ext.data._gather import Span, powers, transition_leaves

#: More batches than these are rarely alive at once; further ones are drawn without a graph.
_MOST_GRAPHS = 4


class _Memory:
    """Lends device memory to tensors; its reference count tells whether any of them still lives."""

    def __init__(self, raw: torch.Tensor) -> None:
        self._raw = raw
        self.__cuda_array_interface__ = {
            "shape": (raw.numel(),),
            "typestr": "|u1",
            "data": (raw.data_ptr(), False),
            "version": 2,
        }


class Choice(Protocol):
    """Which rows a captured draw takes."""

    def fill(self, block: SlotBlock, ranges: torch.Tensor, holes: int, out: Outputs) -> None:
        """Writes the number of each row among the sampleable ones into ``out.wide``, by operations that are captured.

        ``ranges`` and ``holes`` are what ``sampleable_table`` and ``hole_search`` of ``_fused`` return.
        """

    def leaves(self, out: Outputs) -> dict[NestedKey, torch.Tensor]:
        """Returns what it adds to a batch, parts of ``out``."""


class Uniform:
    """All sampleable rows alike."""

    def fill(self, block: SlotBlock, ranges: torch.Tensor, holes: int, out: Outputs) -> None:
        """Writes random numbers, which the kernels take modulo the number of rows."""
        out.wide.random_(0, 2**62)

    def leaves(self, out: Outputs) -> dict[NestedKey, torch.Tensor]:
        """Adds nothing."""
        return {}


_UNIFORM = Uniform()


class SampleGraph:
    """One captured draw and the memory it writes.

    Ownership  the caller owns a batch for as long as any tensor of it lives, views and what autograd saved included:
               each batch is made of new tensors over one lent memory, which is lent again once nobody holds it.
    """

    def __init__(
        self, block: SlotBlock, span: Span, count: int, n_steps: int, gamma: float, choice: Choice = _UNIFORM
    ) -> None:
        self._block, self._batch = block, torch.Size([count])
        raw = torch.empty(Outputs.nbytes(block, count), dtype=torch.uint8, device=block.device)
        self.memory = _Memory(raw)
        # What the graph reads by address must not be freed by a cache.
        self._powers = powers(gamma, n_steps, block.device)
        out = Outputs(raw, block.layout.row_bytes, block.layout.successor_bytes, count)
        ranges, holes = cast(tuple, block.sampleable)[0], hole_search(block)
        choice.fill(block, ranges, holes, out)
        launch(block, span, out, n_steps, gamma, holes=holes)  # compiles, and leaves nothing to do but replay
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            choice.fill(block, ranges, holes, out)
            launch(block, span, out, n_steps, gamma, table=ranges, holes=holes)
        rows, later, small = out.leaves()
        small.update(choice.leaves(out))
        leaves: dict[NestedKey, torch.Tensor] = {**transition_leaves(block.layout, rows, later), **small}
        self._small = tuple(small)
        self._plan: list[tuple[NestedKey, torch.dtype, Any, Any, Any]] = [
            (key, leaf.dtype, leaf.shape, leaf.stride(), leaf.storage_offset()) for key, leaf in leaves.items()
        ]

    @property
    def free(self) -> bool:
        """Whether no tensor of an earlier batch lives."""
        # The attribute and the argument of getrefcount; a third reference is a tensor somebody holds.
        return sys.getrefcount(self.memory) == 2

    def replay(self) -> tuple[TensorDict, dict[NestedKey, torch.Tensor]]:
        """Draws a batch; the host assembles it while the device works."""
        refresh(self._block)
        self._graph.replay()
        base = torch.as_tensor(self.memory, device=self._block.device)
        typed: dict[torch.dtype, torch.Tensor] = {torch.uint8: base}
        leaves: dict[NestedKey, torch.Tensor] = {}
        for key, dtype, shape, stride, offset in self._plan:
            words = typed.get(dtype)
            if words is None:
                words = typed[dtype] = base.view(dtype)
            leaves[key] = words.as_strided(shape, stride, offset)
        batch = self._block.layout.assemble(leaves, self._batch, self._block.device)
        return batch, {key: leaves[key] for key in self._small}


def graph_of(
    block: SlotBlock, span: Span, count: int, n_steps: int, gamma: float, choice: Choice = _UNIFORM
) -> SampleGraph | None:
    """Returns a free captured draw, capturing one if there are few; None when all are in use."""
    reward = None if span.reward is None else span.reward.offset
    graphs = block.graphs.setdefault((reward, count, n_steps, gamma, choice, block.may_have_holes), [])
    for graph in graphs:
        if graph.free:
            return graph
    if len(graphs) >= _MOST_GRAPHS:
        return None
    refresh(block)
    graphs.append(SampleGraph(block, span, count, n_steps, gamma, choice))
    return graphs[-1]
