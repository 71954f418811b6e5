# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The byte layout of a row: canonical order, alignment, equality and digests."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Binary, Composite, Unbounded

from torchrl_ext.data import RowLayout

SHAPES = {
    "observation": ((3,), torch.float32),
    ("obs", "pixels"): ((5, 5), torch.uint8),
    "action": ((7,), torch.bfloat16),
    ("next", "observation"): ((3,), torch.float32),
    ("next", "obs", "pixels"): ((5, 5), torch.uint8),
    ("next", "reward"): ((1,), torch.float32),
    ("next", "done"): ((1,), torch.bool),
    "step": ((), torch.int64),
}


def record(keys) -> TensorDict:
    out = TensorDict({}, [])
    for key in keys:
        shape, dtype = SHAPES[key]
        out[key] = torch.zeros(shape, dtype=dtype)
    return out


class TestRowLayout:
    """Contract: the same fields give the same bytes, on every machine and in whatever order they were named."""

    def test_insertion_order_does_not_matter(self):
        forward, backward = (RowLayout.from_tensordict(record(keys)) for keys in (SHAPES, reversed(SHAPES)))
        assert forward == backward
        assert hash(forward) == hash(backward)
        assert forward.digest == backward.digest

    def test_successors_come_first_then_larger_then_by_name(self):
        layout = RowLayout.from_tensordict(record(SHAPES))
        keys = [field.key for field in layout.fields]
        first = [("obs", "pixels"), "observation"]
        assert keys == [*first, "action", "step", ("next", "reward"), ("next", "done")]

    def test_leaves_are_aligned_and_rows_move_in_16_byte_words(self):
        layout = RowLayout.from_tensordict(record(SHAPES))
        assert layout.row_bytes % 16 == layout.successor_bytes % 16 == 0
        for field in layout.fields:
            assert field.offset % (16 if field.nbytes >= 16 else field.dtype.itemsize) == 0, field
        spans = sorted((field.offset, field.offset + field.nbytes) for field in layout.fields)
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False)), "fields overlap"

    def test_spec_gives_the_layout_of_its_records(self):
        spec = Composite(
            observation=Unbounded((2, 3)),
            next=Composite(observation=Unbounded((2, 3)), done=Binary(1, shape=(2, 1), dtype=torch.bool), shape=(2,)),
            shape=(2,),
        )
        keys = ["observation", ("next", "observation"), ("next", "done")]
        assert RowLayout.from_spec(spec) == RowLayout.from_tensordict(record(keys))

    def test_description_rebuilds_the_layout(self):
        layout = RowLayout.from_tensordict(record(SHAPES), next_obs="store")
        assert RowLayout.from_dict(layout.to_dict()) == layout

    def test_damaged_description_is_refused(self):
        state = RowLayout.from_tensordict(record(SHAPES)).to_dict()
        for bad in (
            {},
            None,
            {**state, "row_bytes": 7},
            {**state, "fields": [["observation", "float99", [3], 0]]},
            {**state, "fields": [["observation", "float32", [3]]]},
            {**state, "fields": [[[], "float32", [3], 0]], "next_keys": []},
            {**state, "next_keys": state["next_keys"] * 2},
            {**state, "next_obs": "never"},
        ):
            with pytest.raises(ValueError, match="description"):
                RowLayout.from_dict(bad)

    def test_next_key_that_is_named_twice_counts_once(self):
        once, twice = (RowLayout.from_tensordict(record(SHAPES), next_keys=["observation"] * n) for n in (1, 2))
        assert twice == once and [field.key for field in twice.prefix] == ["observation"]

    @pytest.mark.parametrize("key", [("next", "observation"), "nowhere"])
    @pytest.mark.parametrize("next_obs", ["derive", "store"])
    def test_next_key_must_be_a_field_at_the_root(self, key, next_obs):
        with pytest.raises(KeyError, match="must be a field at the root"):
            RowLayout.from_tensordict(record(SHAPES), next_obs=next_obs, next_keys=[key])

    @pytest.mark.parametrize("dims", [-1, 2])
    def test_dims_that_a_leaf_does_not_have_are_refused(self, dims):
        with pytest.raises(ValueError, match=f"batch_dims must be from 0 to .*, got {dims} and '"):
            RowLayout.from_tensordict(record(SHAPES).expand(1), batch_dims=dims)

    def test_fields_without_elements_are_refused(self):
        with pytest.raises(ValueError, match="key 'action' must hold at least one element"):
            RowLayout.from_tensordict(record(SHAPES).set("action", torch.zeros(0)))

    def test_mode_and_dtype_make_another_layout(self):
        layout = RowLayout.from_tensordict(record(SHAPES))
        assert layout != RowLayout.from_tensordict(record(SHAPES), next_obs="store")
        assert layout != RowLayout.from_tensordict(record(SHAPES).set("action", torch.zeros(7)))

    def test_views_are_the_bytes(self):
        layout = RowLayout.from_tensordict(record(SHAPES))
        rows = torch.zeros(2, 4, layout.row_bytes, dtype=torch.uint8)
        view = layout.view(rows)
        assert view.batch_size == torch.Size([2, 4])
        view["obs", "pixels"].fill_(7)
        assert int((rows == 7).sum()) == 2 * 4 * 25
        assert view["step"].shape == torch.Size([2, 4])
        assert all(leaf.untyped_storage().data_ptr() == rows.data_ptr() for leaf in view.values(True, True))
