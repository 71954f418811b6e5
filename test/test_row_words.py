# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Rows written as a whole are those that are written field by field, bit by bit."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from torchrl_ext.data import RowLayout, SlotStorage, _row_words
from torchrl_ext.data._row_words import RowWords
from torchrl_ext.data.layout import FOLLOWED
from torchrl_ext.transport import HostConsumer, HostProducer, HostRing

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]
SHAPES = [(), (1,), (2,), (3,), (4,), (6,), (2, 3), (98,)]
ANY_SIZE = mock.patch.object(_row_words, "_LEAST_BYTES", 0)


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every bit pattern, NaNs with their payloads among them."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).bool()
    nbytes = int(np.prod(shape, dtype=int)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).reshape(shape)


@st.composite
def layouts(draw: st.DrawFn) -> RowLayout:
    kinds = draw(st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), min_size=1, max_size=7))
    record = {f"k{at}": torch.zeros(shape, dtype=dtype) for at, (dtype, shape) in enumerate(kinds)}
    observation = torch.zeros(draw(st.sampled_from([1, 3, 5])))
    return RowLayout.from_tensordict(
        TensorDict({**record, "observation": observation, "next": {"observation": observation}}, [])
    )


def fields_of(layout: RowLayout, *batch: int) -> list[torch.Tensor]:
    return [any_bits((*batch, *field.shape), field.dtype, seed) for seed, field in enumerate(layout.fields)]


def by_field(layout: RowLayout, sources: list[torch.Tensor], *batch: int) -> torch.Tensor:
    rows = torch.zeros(*batch, layout.row_bytes, dtype=torch.uint8)
    for view, source in zip(layout.leaves(rows, layout.fields).values(), sources, strict=True):
        view.copy_(source)
    rows.view(torch.int32)[..., layout.final_offset // 4] = FOLLOWED
    return rows


class TestWholeRows:
    @settings(max_examples=60, deadline=None)
    @given(layout=layouts(), kept=st.booleans())
    def test_they_have_the_bytes_of_a_copy_per_field(self, layout, kept):
        words, sources = RowWords(layout), fields_of(layout, 3, 4)
        rows = torch.full((3, 4, layout.row_bytes), 7, dtype=torch.uint8)
        with ANY_SIZE:
            assert words.write(rows, sources, words.gaps(12) if kept else None)
        assert torch.equal(rows, by_field(layout, sources, 3, 4))

    def test_gaps_are_used_again(self):
        layout = RowLayout.from_tensordict(TensorDict({"a": torch.zeros(3), "b": torch.zeros(1, dtype=torch.bool)}, []))
        words = RowWords(layout)
        gaps = words.gaps(5)
        for turn in range(3):
            sources = [any_bits((5, *field.shape), field.dtype, 10 * turn) for field in layout.fields]
            rows = torch.zeros(5, layout.row_bytes, dtype=torch.uint8)
            with ANY_SIZE:
                assert words.write(rows, sources, gaps)
            assert torch.equal(rows, by_field(layout, sources, 5))

    @pytest.mark.parametrize("why", ["strided field", "strided rows", "another dtype", "odd address", "few bytes"])
    def test_nothing_is_written_where_it_cannot_be_done_so(self, why):
        layout = RowLayout.from_tensordict(
            TensorDict({"image": torch.zeros(8, dtype=torch.uint8), "a": torch.zeros(3)}, [])
        )
        sources = fields_of(layout, 4)
        at = [field.key for field in layout.fields].index("image")
        rows = torch.zeros(4, layout.row_bytes, dtype=torch.uint8)
        if why == "strided field":
            sources[at] = torch.zeros(8, 4, dtype=torch.uint8).T
        elif why == "strided rows":
            rows = torch.zeros(4, 2, layout.row_bytes, dtype=torch.uint8)[:, 0]
        elif why == "another dtype":
            sources[at] = sources[at].to(torch.int16)
        elif why == "odd address":
            sources[at] = torch.zeros(33, dtype=torch.uint8)[1:].view(4, 8)
        with mock.patch.object(_row_words, "_LEAST_BYTES", 10**6 if why == "few bytes" else 0):
            assert not RowWords(layout).write(rows, sources)
        assert not rows.any()


def big_run(**options: Any) -> TensorDict:
    """Enough bytes that rows are written as a whole, with ends."""
    count, streams = 8, 64
    run = TensorDict({"observation": any_bits((count, streams, 40), torch.float32, 1).nan_to_num()}, [count, streams])
    run["action"] = torch.rand(count, streams, 3, **options)
    run["next"] = TensorDict({"observation": torch.rand(count, streams, 40)}, [count, streams])
    run["next", "observation"][:-1] = run["observation"][1:]
    run["next", "reward"] = torch.rand(count, streams, 1)
    for name in ("done", "terminated", "truncated"):
        run["next", name] = torch.rand(count, streams, 1) < 0.1 if name == "terminated" else torch.zeros(8, 64, 1) > 0
    run["next", "done"] |= run["next", "terminated"]
    return run


class TestWhoWritesThem:
    def test_storage_has_the_same_bytes_either_way(self):
        run, states = big_run(), []
        for least in (0, 10**9):
            with mock.patch.object(_row_words, "_LEAST_BYTES", least):
                storage = SlotStorage(16, 64)
                for _ in range(3):
                    storage.extend_batch(run)
                states.append(storage.state_dict())
        for key, value in states[0].items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, states[1][key]), key

    def test_ring_has_the_same_bytes_either_way_and_marks_last_a_lap(self):
        layout = RowLayout.from_tensordict(big_run()[0, 0])
        pushed: list[list[torch.Tensor]] = []
        for least in (0, 10**9):
            ring = HostRing(layout, capacity=2, num_streams=64)
            producer, consumer = HostProducer(ring), HostConsumer(ring)
            pushed.append([])
            with mock.patch.object(_row_words, "_LEAST_BYTES", least):
                for step in range(6):
                    leaves = {key: any_bits((64, *f.shape), f.dtype, step) for key, f in layout.by_key.items()}
                    assert producer.push(leaves, cut_streams=np.array([5]) if step == 1 else None)
                    with consumer.read_span() as span:
                        pushed[-1].append(span.rows.clone())
        assert all(torch.equal(rows, other) for rows, other in zip(*pushed, strict=True))
        final = torch.stack(pushed[0]).view(torch.int32)[..., layout.final_offset // 4]
        assert (final != FOLLOWED).nonzero().tolist() == [[1, 0, 5]]

    def test_what_has_a_history_leaves_none_in_the_memory_of_rows(self):
        run = big_run(requires_grad=True)
        for steps in (run, run[:1]):
            storage = SlotStorage(16, 64)
            storage.extend_batch(steps)
            assert not storage["action"].requires_grad and not storage.block.ring.requires_grad
        layout = RowLayout.from_tensordict(run[0, 0])
        ring = HostRing(layout, capacity=2, num_streams=64)
        assert HostProducer(ring).push({key: run[0].get(key) for key in layout.by_key})
        assert not ring.parts.rows.requires_grad
