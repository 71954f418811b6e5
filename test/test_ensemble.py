# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""GroupedReplayBufferEnsemble: CASES 8, 30 and 32, TorchRL's metadata and masks, atomic writes, members of both kinds.

A record's ``value`` is its number; ``latent`` is what updates overwrite. Numbers of member ``m`` start at ``1000 * m``.
"""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from _reference import state_bytes
from tensordict import TensorDict
from torchrl._utils import logger
from torchrl.data import (
    ConditionalUpdateResult,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.envs import Compose, ObservationNorm, Transform

from torchrl_ext.data import (
    GroupedReplayBufferEnsemble,
    SequenceSampler,
    SlotReplayBuffer,
    SlotStorage,
    TransitionSampler,
    WriteBackResult,
    _member_rows,
    group_rows,
)

logger.setLevel(logging.WARNING)

KINDS = pytest.mark.parametrize("kinds", ["stock", "slot", "mixed"])


# ------------------------------------------------------------------------------------------- members and records
def records(values: Sequence[int], **extra: Any) -> TensorDict:
    """[M] records with the given numbers."""
    value = torch.tensor(values, dtype=torch.float32)
    data = {"value": value.unsqueeze(-1), "latent": torch.zeros(len(values), 2), "version": value.long() * 0}
    return TensorDict({**data, **{key: torch.as_tensor(column) for key, column in extra.items()}}, [len(values)])


def only_stored(data: TensorDict) -> TensorDict:
    """A member's transform: what a TransitionSampler computes is not what a stock member has."""
    return data.exclude("discount", "steps_to_next_obs")


def stock(capacity: int = 8, *, track: bool = True, kind: type = TensorDictReplayBuffer, **kwargs: Any) -> ReplayBuffer:
    writer = (TensorDictRoundRobinWriter if kind is TensorDictReplayBuffer else RoundRobinWriter)(
        track_generations=track
    )
    return kind(storage=LazyTensorStorage(capacity), writer=writer, **kwargs)


def slot(capacity: int = 8, num_streams: int = 1, **kwargs: Any) -> SlotReplayBuffer:
    options = {"storage": SlotStorage(capacity, num_streams), "transform": only_stored, **kwargs}
    return SlotReplayBuffer(**options)


def members_of(kinds: str, count: int = 3, capacity: int = 8, fill: int = 0) -> list[ReplayBuffer]:
    """``count`` members, the first ``fill`` records of each written."""
    makers = {"stock": [stock], "slot": [slot], "mixed": [stock, slot]}[kinds]
    members = [makers[number % len(makers)](capacity) for number in range(count)]
    for number, member in enumerate(members):
        if fill:
            member.extend(records(range(1000 * number, 1000 * number + fill)))
    return members


def picture(ensemble: ReplayBufferEnsemble) -> Any:
    """Everything that the members hold, byte by byte."""
    return [state_bytes(ensemble[number].state_dict()) for number in range(len(ensemble))]


def content(ensemble: ReplayBufferEnsemble) -> Any:
    """What the members hold without the memory that a stock storage has not written yet, to compare two ensembles."""
    found = []
    for number in range(len(ensemble)):
        state = ensemble[number].state_dict()
        if not isinstance(ensemble[number], SlotReplayBuffer):
            state["_storage"] = ensemble[number].storage[:] if len(ensemble[number]) else None
        found.append(state_bytes(state))
    return found


def stored(member: ReplayBuffer, key: str) -> torch.Tensor:
    """[slots, ...] of a field, of the first stream in ours."""
    if isinstance(member, SlotReplayBuffer):
        return member.storage[key][:, 0].clone()
    return member.storage._storage[key].clone()


def handles_of(sample: TensorDict) -> dict[str, Any]:
    return {"index": sample["index"], "generation": sample["index_generation"]}


def written_handles(metadata: TensorDict) -> dict[str, Any]:
    return {"index": metadata.select("buffer_ids", "index"), "generation": metadata["index_generation"]}


def owners(sample: TensorDict) -> torch.Tensor:
    """The member that each row's number belongs to."""
    return sample["value"].squeeze(-1).long() // 1000


def assert_chi_square(counts: torch.Tensor, weights: Sequence[float]) -> None:
    """No draw of fixed seed is off by more than the 99.9 % quantile of chi-square (up to five degrees of freedom)."""
    expected = torch.tensor(weights, dtype=torch.float64)
    expected = expected / expected.sum() * counts.sum()
    assert int(counts[expected == 0].sum()) == 0
    inside = expected > 0
    statistic = float(((counts - expected)[inside] ** 2 / expected[inside]).sum())
    assert statistic < {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}[int(inside.sum()) - 1]


# ------------------------------------------------------------------------------------------- cases
class TestCase30OrderIsRestored:
    """Contract: members are asked once each, and share ``i`` of a sample comes from the ``i``-th member chosen."""

    IDS = (2, 0, 2, 1, 0, 2)

    def test_grouping_of_the_example(self):
        """case 30"""
        groups = group_rows(torch.tensor(self.IDS), 3)
        assert groups.counts.tolist() == [2, 1, 3]
        assert groups.order.tolist() == [1, 4, 3, 0, 2, 5]

    @KINDS
    @pytest.mark.parametrize("rows", [1, 3])
    def test_share_i_comes_from_the_ith_member_chosen(self, kinds, rows, monkeypatch):
        """case 30"""
        ensemble = GroupedReplayBufferEnsemble(*members_of(kinds, fill=8), num_buffer_sampled=6)
        monkeypatch.setattr(ensemble, "_choose", lambda rows: torch.tensor(self.IDS))
        sample = ensemble.sample(6 * rows)
        wanted = torch.tensor(self.IDS).unsqueeze(-1).expand(6, rows)
        assert torch.equal(owners(sample), wanted)
        assert torch.equal(sample["index", "buffer_ids"], wanted)

    @KINDS
    def test_handles_name_the_rows_that_were_read(self, kinds, monkeypatch):
        """case 30"""
        members = members_of(kinds, fill=11)  # a lap and a half, so that slots and numbers differ
        ensemble = GroupedReplayBufferEnsemble(*members, num_buffer_sampled=6)
        monkeypatch.setattr(ensemble, "_choose", lambda rows: torch.tensor(self.IDS))
        sample = ensemble.sample(24)
        for row, member, value in zip(
            *(leaf.flatten() for leaf in (*sample["index"].values(), sample["value"])), strict=True
        ):
            assert stored(members[member], "value")[row].item() == value.item()

    @KINDS
    def test_each_member_that_was_chosen_draws_once(self, kinds, monkeypatch):
        """case 30"""
        ensemble = GroupedReplayBufferEnsemble(*members_of(kinds, fill=8), num_buffer_sampled=6)
        asked = []
        for number, member in enumerate(ensemble._members):
            draw = member.draw
            monkeypatch.setattr(
                member, "draw", lambda rows, count, n=number, draw=draw: (asked.append((n, rows)), draw(rows, count))[1]
            )
        monkeypatch.setattr(ensemble, "_choose", lambda rows: torch.tensor([2, 0, 2, 2, 0, 2]))
        ensemble.sample(12)
        assert asked == [(0, 4), (2, 8)]


class TestCase32WriteBackReachesItsOwner:
    """Contract: an update changes the member that owned the row, whatever index other members use."""

    @KINDS
    def test_update_of_one_member_leaves_the_others_bit_identical(self, kinds):
        """case 32"""
        members = members_of(kinds, capacity=4, fill=4)
        ensemble = GroupedReplayBufferEnsemble(*members)
        before = picture(ensemble)
        index = TensorDict({"buffer_ids": torch.ones(4, dtype=torch.int64), "index": torch.arange(4)}, [4])
        result = ensemble.update_if_present(
            index=index, generation=torch.zeros(4, dtype=torch.int64), patch={"latent": torch.full((4, 2), 7.0)}
        )
        after = picture(ensemble)
        assert result.updated.all()
        assert (after[0], after[2]) == (before[0], before[2])
        assert stored(members[1], "latent").tolist() == [[7.0, 7.0]] * 4

    @KINDS
    def test_lap_in_one_member_makes_its_handles_stale_alone(self, kinds):
        """case 32"""
        members = members_of(kinds, capacity=4, fill=4)
        ensemble = GroupedReplayBufferEnsemble(*members)
        ids = torch.arange(3).repeat(4)
        index = TensorDict({"buffer_ids": ids, "index": torch.arange(4).repeat_interleave(3)}, [12])
        members[1].extend(records(range(1100, 1104)))
        result = ensemble.update_if_present(
            index=index, generation=torch.zeros(12, dtype=torch.int64), patch={"latent": torch.ones(12, 2)}
        )
        assert torch.equal(result.updated, ids != 1)
        assert torch.equal(result.stale, ids == 1)
        assert stored(members[1], "latent").count_nonzero() == 0
        assert stored(members[0], "latent").all() and stored(members[2], "latent").all()


def three_kinds(**options: Any) -> GroupedReplayBufferEnsemble:
    """TorchRL's, ours with one stream, and ours with two streams."""
    members = stock(), slot(), slot(4, 2, routing_key="env")
    return GroupedReplayBufferEnsemble(
        *members, routing_key="source", generator=torch.Generator().manual_seed(3), **options
    )


def fill_three_kinds(ensemble: GroupedReplayBufferEnsemble, first: int = 0, count: int = 30) -> TensorDict:
    numbers = torch.arange(first, first + count)
    source, env = numbers % 3, numbers // 3 % 2
    return ensemble.extend(records((1000 * source + numbers).tolist(), source=source, env=env))


class TestCase8SavedAndLoaded:
    """Contract: every member is restored exactly, under its number; a state that does not fit changes nothing."""

    def test_state_dict_restores_every_member(self):
        """case 8"""
        ensemble, other = three_kinds(), three_kinds()
        fill_three_kinds(ensemble)
        other.load_state_dict(copy.deepcopy(ensemble.state_dict()))
        assert content(other) == content(ensemble)

    def test_dumps_restores_every_member(self, tmp_path):
        """case 8"""
        ensemble, other = three_kinds(), three_kinds()
        fill_three_kinds(ensemble)
        fill_three_kinds(other, first=70)
        ensemble.dumps(tmp_path / "deep" / "save")
        other.loads(tmp_path / "deep" / "save")
        assert content(other) == content(ensemble)

    @pytest.mark.parametrize("way", ["state_dict", "dumps"])
    @pytest.mark.parametrize("prefetch", [None, 2])
    def test_loaded_ensemble_goes_on_as_the_saved_one(self, way, prefetch, tmp_path):
        """case 8, random numbers, handles and batches sampled ahead included"""
        options = {"batch_size": 12, "prefetch": prefetch}
        ensemble, other = three_kinds(**options), three_kinds(**options)
        metadata = fill_three_kinds(ensemble)
        ensemble.sample()
        if way == "dumps":
            ensemble.dumps(tmp_path)
            other.loads(tmp_path)
        else:
            other.load_state_dict(copy.deepcopy(ensemble.state_dict()))
        patch = {"latent": torch.ones(len(metadata), 2)}
        masks = [e.update_if_present(**written_handles(metadata), patch=patch).updated for e in (ensemble, other)]
        assert torch.equal(*masks)
        assert 0 < int(masks[0].sum()) < len(metadata)
        if prefetch is None:
            for _ in range(3):
                assert state_bytes(ensemble.sample()) == state_bytes(other.sample())
        else:
            # Two threads sample ahead: which of them draws first is open, so only what was saved is the same.
            for _ in range(prefetch):
                sample, again = ensemble.sample(), other.sample()
                assert state_bytes(sample) == state_bytes(again)

    @pytest.mark.parametrize("way", ["state_dict", "dumps"])
    def test_state_of_another_number_of_members_is_refused_and_nothing_changes(self, way, tmp_path):
        """case 8"""
        ensemble, other = three_kinds(), GroupedReplayBufferEnsemble(stock(), slot(), routing_key="source")
        fill_three_kinds(ensemble)
        other.extend(records(range(4), source=[0, 1, 0, 1], env=[0, 0, 0, 0]))
        before = picture(other)
        with pytest.raises(ValueError, match="2 members, got 3"):
            if way == "dumps":
                ensemble.dumps(tmp_path)
                other.loads(tmp_path)
            else:
                other.load_state_dict(ensemble.state_dict())
        assert picture(other) == before

    def test_state_that_one_of_our_members_cannot_take_changes_no_member(self):
        """case 8"""
        ensemble = GroupedReplayBufferEnsemble(stock(), slot(4))
        other = GroupedReplayBufferEnsemble(stock(), slot(5))
        for e in (ensemble, other):
            e[0].extend(records(range(3)))
            e[1].extend(records(range(3)))
        other[0].extend(records(range(2)))
        before = picture(other)
        with pytest.raises(ValueError, match="capacity"):
            other.load_state_dict(ensemble.state_dict())
        assert picture(other) == before

    def test_state_of_a_stock_member_of_another_size_changes_no_member(self):
        """case 8: TorchRL's storage would take the other size over"""
        ensemble, other = (GroupedReplayBufferEnsemble(slot(), stock(size)) for size in (8, 9))
        for e in (ensemble, other):
            for number in range(2):
                e[number].extend(records(range(3 + len(e[1]))))
        before = picture(other)
        with pytest.raises(ValueError, match="member 1.*9 rows, got .8"):
            other.load_state_dict(ensemble.state_dict())
        assert picture(other) == before

    def test_state_of_another_transform_changes_no_member(self, tmp_path):
        """case 8"""
        ensemble = GroupedReplayBufferEnsemble(slot(), transform=ObservationNorm(1.0, 2.0, in_keys=["value"]))
        other = GroupedReplayBufferEnsemble(slot())
        for e in (ensemble, other):
            e[0].extend(records(range(2 + (e is other))))
        ensemble.dumps(tmp_path)
        before = picture(other)
        with pytest.raises(ValueError, match="transform"):
            other.load_state_dict(ensemble.state_dict())
        with pytest.raises(ValueError, match="transform"):
            other.loads(tmp_path)
        assert picture(other) == before

    def test_half_a_save_is_no_save(self, tmp_path, monkeypatch):
        """case 8: not even over an older one"""
        ensemble = three_kinds()
        fill_three_kinds(ensemble)
        ensemble.dumps(tmp_path)
        before = picture(ensemble)
        with monkeypatch.context() as broken, pytest.raises(OSError, match="disk full"):
            broken.setattr(ensemble[2], "dumps", lambda path: (_ for _ in ()).throw(OSError("disk full")))
            ensemble.dumps(tmp_path)
        with pytest.raises(FileNotFoundError):
            ensemble.loads(tmp_path)
        assert picture(ensemble) == before

    @pytest.mark.parametrize("way", ["state_dict", "dumps"])
    def test_members_that_were_never_written_are_saved_too(self, way, tmp_path):
        """case 8: also over an older save in which they were written"""
        ensemble, other = three_kinds(), three_kinds()
        fill_three_kinds(other)
        other.dumps(tmp_path)
        if way == "dumps":
            ensemble.dumps(tmp_path)
            other.loads(tmp_path)
        else:
            other.load_state_dict(ensemble.state_dict())
        assert [len(other[number]) for number in range(3)] == [0, 0, 0]

    def test_pickle_restores_every_member(self):
        ensemble = three_kinds(batch_size=12)
        fill_three_kinds(ensemble)
        other = pickle.loads(pickle.dumps(ensemble))
        assert content(other) == content(ensemble)
        assert other.sample().batch_size == (3, 4)


# ------------------------------------------------------------------------------------------- writing
class TestExtend:
    """Contract: one write per member in arrival order, TorchRL's metadata, and no write at all when one is refused."""

    @pytest.mark.parametrize("count", [1, 5, 40])
    @pytest.mark.parametrize("track", [True, False])
    @pytest.mark.parametrize("shape", [(), (1,)])
    def test_metadata_and_rows_equal_torchrl(self, count, track, shape):
        """More rows than slots included: those that were replaced have the generation of their own write."""
        ids = torch.randint(3, (count, *shape))
        ensembles = [
            make(*(stock(4 + n, track=track) for n in range(3)), routing_key="source")
            for make in (ReplayBufferEnsemble, GroupedReplayBufferEnsemble)
        ]
        for _ in range(2):
            theirs, ours = (e.extend(records(range(count), source=ids.clone())) for e in ensembles)
            assert state_bytes(ours) == state_bytes(theirs)
        assert content(ensembles[1]) == content(ensembles[0])

    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_routing_dim_equals_torchrl(self, dim):
        shape = (3, 4) if dim == 0 else (4, 3)
        data = records(range(12)).reshape(*shape)
        theirs, ours = (
            make(*(stock() for _ in range(3)), routing_dim=dim)
            for make in (ReplayBufferEnsemble, GroupedReplayBufferEnsemble)
        )
        assert state_bytes(ours.extend(data.clone())) == state_bytes(theirs.extend(data.clone()))
        assert content(ours) == content(theirs)

    @KINDS
    def test_records_keep_their_order_in_each_member(self, kinds):
        members = members_of(kinds)
        ensemble = GroupedReplayBufferEnsemble(*members, routing_key="source")
        ids = torch.randint(3, (20,))
        metadata = ensemble.extend(records(range(20), source=ids))
        for number, member in enumerate(members):
            mine = ids == number
            assert metadata["index"][mine].tolist() == [i % 8 for i in range(int(mine.sum()))]
            newest = torch.arange(20)[mine].tolist()[-8:]
            assert sorted(stored(member, "value")[: len(newest)].flatten().tolist()) == newest

    def test_index_of_several_streams_is_the_flat_row(self):
        ensemble = three_kinds()
        metadata = fill_three_kinds(ensemble)
        mine = metadata["buffer_ids"] == 2
        rows, numbers = metadata["index"][mine], torch.arange(30)[mine]
        live = metadata["index_generation"][mine] == ensemble[2].storage.generation_of(
            ensemble[2].storage.unravel(rows)
        )
        index = ensemble[2].storage.unravel(rows[live])
        got = ensemble[2].storage.get(index)["value"].flatten() - 2000
        assert got.tolist() == numbers[live].tolist()
        assert index[:, 1].tolist() == (numbers[live] // 3 % 2).tolist()

    def test_rows_replaced_by_the_same_call_have_stale_handles(self):
        ensemble = three_kinds()
        metadata = fill_three_kinds(ensemble)  # ten rows per member, eight slots
        result = ensemble.update_if_present(**written_handles(metadata), patch={"latent": torch.ones(30, 2)})
        for number, replaced in enumerate((2, 2, 2)):
            mine = metadata["buffer_ids"] == number
            assert int(result.stale[mine].sum()) == replaced, number
            assert result.stale[mine][:replaced].all()

    def test_metadata_of_no_record_has_the_same_keys(self):
        ensemble = three_kinds()
        fill_three_kinds(ensemble)
        metadata = ensemble.extend(records([], source=torch.zeros(0, dtype=torch.int64), env=torch.zeros(0)))
        assert sorted(metadata.keys()) == ["buffer_ids", "index", "index_generation"]
        assert metadata.batch_size == (0,)

    def test_rows_are_grouped_once(self, monkeypatch):
        """Whatever the number of members; an update is grouped once too."""
        ensemble = GroupedReplayBufferEnsemble(*members_of("mixed", 6, capacity=64), routing_key="source")
        calls = []
        monkeypatch.setattr(
            _member_rows, "group_rows", lambda ids, groups: (calls.append(len(ids)), group_rows(ids, groups))[1]
        )
        metadata = ensemble.extend(records(range(60), source=torch.arange(60) % 6))
        ensemble.update_if_present(**written_handles(metadata), patch={"latent": torch.ones(60, 2)})
        assert calls == [60, 60]

    def test_caller_keeps_its_data(self):
        data = records(range(4), source=[1, 1, 1, 1])
        before = state_bytes(data)
        ensemble = GroupedReplayBufferEnsemble(stock(), stock(), routing_key="source")
        ensemble.extend(data)
        assert state_bytes(data) == before

    def test_routing_key_is_dropped_where_it_is_not_stored(self):
        members = members_of("mixed", 2, fill=2)
        ensemble = GroupedReplayBufferEnsemble(*members, routing_key="source")
        metadata = ensemble.extend(records(range(4), source=[0, 1, 1, 0]))
        assert metadata["index"].tolist() == [2, 2, 3, 3]
        assert "source" not in members[0].storage._storage.keys()

    def test_routing_key_of_a_member_is_dropped_where_it_is_not_stored(self):
        member = slot(4, 2, routing_key="env")
        member.extend_batch(records(range(4)).reshape(2, 2))
        ensemble = GroupedReplayBufferEnsemble(member, slot(), routing_key="source")
        metadata = ensemble.extend(records(range(4), source=[0, 0, 1, 0], env=[1, 0, 0, 1]))
        assert metadata["index"].tolist() == [5, 4, 0, 7]
        assert "env" not in member.storage.layout.by_key

    def test_one_record_is_added(self):
        ensemble = GroupedReplayBufferEnsemble(*members_of("mixed", 2), routing_key="source")
        metadata = ensemble.add(records([5], source=[1])[0])
        assert (metadata["buffer_ids"].item(), metadata["index"].item()) == (1, 0)

    def test_inverse_transforms_run_once_on_what_is_written(self):
        seen = []

        class Counting(Transform):
            def _inv_call(self, data: TensorDict) -> TensorDict:
                self.calls = getattr(self, "calls", 0) + 1
                seen.append(self)
                return data.set("value", data.get("value") + 1)

        counting = [Counting(in_keys_inv=["value"]) for _ in range(2)]
        members = stock(transform=counting[0]), slot(transform=Compose(counting[1]))
        ensemble = GroupedReplayBufferEnsemble(*members, routing_key="source")
        ensemble.extend(records(range(4), source=[0, 1, 0, 1]))
        assert [transform.calls for transform in counting] == [1, 1]
        assert stored(members[0], "value")[:2].flatten().tolist() == [1.0, 3.0]
        assert stored(members[1], "value")[:2].flatten().tolist() == [2.0, 4.0]

    def test_inverse_transform_that_works_in_place_is_applied_once(self):
        class InPlace(Transform):
            def _inv_call(self, data: TensorDict) -> TensorDict:
                data.get("value").add_(1)
                return data

        member = stock(transform=InPlace())
        GroupedReplayBufferEnsemble(member, stock(), routing_key="source").extend(records([1, 2], source=[0, 0]))
        assert stored(member, "value")[:2].flatten().tolist() == [2.0, 3.0]

    @pytest.mark.parametrize(
        ("change", "error", "match"),
        [
            (lambda d: d.set("source", d["source"] + 1), ValueError, r"\[0, 3\)"),
            (lambda d: d.set("source", d["source"] - 1), ValueError, r"\[0, 3\)"),
            (lambda d: d.set("source", d["source"].float()), TypeError, "integers"),
            (lambda d: d.set("source", d["source"] > 0), TypeError, "integers"),
            (lambda d: d.set("source", torch.zeros(6, 2, dtype=torch.int64)), ValueError, "one member id per record"),
            (lambda d: d.exclude("source"), KeyError, "routing key"),
            (lambda d: d.exclude("latent"), KeyError, "member 0"),
            (lambda d: d.set("other", torch.zeros(6)), KeyError, "member 0"),
            (lambda d: d.set("value", d["value"].double()), ValueError, "member 0.*'value'|'value'.*member 0"),
            (lambda d: d.set("latent", torch.zeros(6, 3)), ValueError, "member 0.*'latent'|'latent'.*member 0"),
            (lambda d: d.set("env", d["env"] + 1), ValueError, "stream ids"),
            (lambda d: [d], TypeError, "TensorDict"),
        ],
    )
    def test_what_is_refused_changes_no_member(self, change, error, match):
        ensemble = three_kinds()
        fill_three_kinds(ensemble)
        before = picture(ensemble)
        with pytest.raises(error, match=match):
            ensemble.extend(change(records(range(6), source=[0, 1, 2, 0, 1, 2], env=[0, 1, 0, 1, 0, 1])))
        assert picture(ensemble) == before

    def test_records_that_the_last_member_refuses_change_no_member(self):
        members = stock(), slot(), slot(storage=SlotStorage(4))
        members[2].extend(records([1]).exclude("version"))
        ensemble = GroupedReplayBufferEnsemble(*members, routing_key="source")
        before = picture(ensemble)
        with pytest.raises(KeyError, match="member 2"):
            ensemble.extend(records(range(3), source=[0, 1, 2]))
        assert picture(ensemble) == before

    def test_truncated_record_without_its_final_observation_changes_no_member(self):
        members = stock(), slot()
        run = TensorDict(
            {"observation": torch.arange(4.0), "next": {"observation": torch.arange(4.0), "done": torch.zeros(4) > 0}},
            [4],
        )
        for member in members:
            member.extend(run.clone())
        ensemble = GroupedReplayBufferEnsemble(*members, routing_key="source")
        before = picture(ensemble)
        bad = TensorDict(
            {"observation": torch.zeros(2), "source": torch.tensor([0, 1]), "next": {"done": torch.ones(2) > 0}}, [2]
        )
        with pytest.raises((ValueError, KeyError), match="member [01]"):
            ensemble.extend(bad)
        assert picture(ensemble) == before

    def test_full_side_table_that_cannot_grow_refuses_before_other_members_are_written(self):
        def run(count: int, **extra: Any) -> TensorDict:
            t = torch.arange(float(count))
            return TensorDict({"observation": t, "next": {"observation": -1 - t}, **extra}, [count])  # each row is cut

        fixed = slot(storage=SlotStorage(64, shared=True, final_capacity=4))
        ensemble = GroupedReplayBufferEnsemble(stock(64), slot(64), fixed, routing_key="source")
        ensemble.extend(run(3, source=torch.arange(3)))
        before = picture(ensemble)
        with pytest.raises(RuntimeError, match="side table"):
            ensemble.extend(run(24, source=torch.arange(24) % 3))
        assert picture(ensemble) == before

    def test_dataset_is_not_written(self):
        offline = TensorDictReplayBuffer(storage=LazyTensorStorage(4), writer=ImmutableDatasetWriter())
        online = slot()
        ensemble = GroupedReplayBufferEnsemble(online, offline, routing_key="source")
        with pytest.raises(RuntimeError, match="member 1.*dataset"):
            ensemble.extend(records(range(2), source=[0, 1]))
        assert len(online) == 0
        with pytest.raises(RuntimeError, match="member 1.*dataset"):
            ensemble.empty()

    def test_several_streams_without_a_routing_key_are_refused(self):
        ensemble = GroupedReplayBufferEnsemble(slot(), slot(4, 2), routing_key="source")
        with pytest.raises(RuntimeError, match="member 1.*routing_key"):
            ensemble.extend(records(range(2), source=[0, 1]))
        assert len(ensemble[0]) == 0

    def test_transform_that_drops_records_is_refused(self):
        class Halving(Transform):
            def _inv_call(self, data: TensorDict) -> TensorDict:
                return data[::2]

        members = slot(), stock(transform=Halving())
        ensemble = GroupedReplayBufferEnsemble(*members, routing_key="source")
        with pytest.raises(ValueError, match="member 1.*one row of each record"):
            ensemble.extend(records(range(8), source=[0, 1] * 4))
        assert [len(member) for member in members] == [0, 0]

    def test_ensemble_without_routing_is_not_written(self):
        with pytest.raises(RuntimeError, match="routing_key or routing_dim"):
            GroupedReplayBufferEnsemble(slot(), slot()).extend(records(range(2)))


# ------------------------------------------------------------------------------------------- sampling
def episodes(count: int) -> TensorDict:
    done = torch.zeros(count, 1, dtype=torch.bool)
    data = {"value": torch.arange(float(count)).unsqueeze(-1), "episode": torch.zeros(count, dtype=torch.int64)}
    return TensorDict({**data, "next": {"done": done, "terminated": done.clone()}}, [count])


def slices() -> SliceSampler:
    return SliceSampler(slice_len=2, traj_key="episode", strict_length=True)


class TestSample:
    """Contract: TorchRL's choice of members, keys and shapes; rows of a sample come from the members it names."""

    @pytest.mark.parametrize("kind", [TensorDictReplayBuffer, ReplayBuffer])
    @pytest.mark.parametrize("track", [[True, True], [True, False], [False, False]])
    @pytest.mark.parametrize("sampler", [None, SamplerWithoutReplacement, slices])
    @pytest.mark.parametrize(
        "options",
        [{}, {"p": [0.3, 0.7]}, {"p": "sampleable"}, {"num_buffer_sampled": 3}, {"sample_from_all": True}],
        ids=str,
    )
    def test_keys_shapes_and_dtypes_equal_torchrl(self, kind, track, sampler, options):
        pictures = []
        for make in (ReplayBufferEnsemble, GroupedReplayBufferEnsemble):
            members = [stock(32, track=t, kind=kind, sampler=None if sampler is None else sampler()) for t in track]
            for member in members:
                member.extend(episodes(20))
            sample, info = make(*members, **options).sample(12, return_info=True)
            pictures.append(
                [
                    (td.batch_size, td.device, {key: (v.shape, v.dtype, v.device) for key, v in td.items(True, True)})
                    for td in (sample, info)
                ]
            )
        assert pictures[1] == pictures[0]

    def test_weights_are_kept(self):
        ensemble = GroupedReplayBufferEnsemble(*members_of("mixed", fill=4), p=[0.5, 0.2, 0.3], num_buffer_sampled=4000)
        sample = ensemble.sample(4000)
        assert_chi_square(torch.bincount(owners(sample).flatten(), minlength=3), [0.5, 0.2, 0.3])

    def test_members_are_alike_without_weights(self):
        ensemble = GroupedReplayBufferEnsemble(*members_of("mixed", fill=4), num_buffer_sampled=4000)
        assert_chi_square(torch.bincount(owners(ensemble.sample(4000)).flatten(), minlength=3), [1, 1, 1])

    def test_rows_of_a_member_are_drawn_uniformly(self):
        ensemble = GroupedReplayBufferEnsemble(*members_of("mixed", 2, fill=5), num_buffer_sampled=400)
        sample = ensemble.sample(4000)
        for number in range(2):
            rows = sample["index", "index"][sample["index", "buffer_ids"] == number]
            assert_chi_square(torch.bincount(rows, minlength=5), [1] * 5)

    def test_sampleable_weighs_members_by_their_rows_and_leaves_out_empty_ones(self):
        members = [stock(64), slot(64), stock(64), slot(64), slot(64, 2)]
        for member, count in zip(members, (10, 30, 0, 0, 0), strict=True):
            if count:
                member.extend(records(range(1000 * members.index(member), 1000 * members.index(member) + count)))
        members[4].extend_batch(records(range(4000, 4020)).reshape(10, 2))
        ensemble = GroupedReplayBufferEnsemble(*members, p="sampleable", num_buffer_sampled=4000)
        assert_chi_square(torch.bincount(owners(ensemble.sample(4000)).flatten(), minlength=5), [10, 30, 0, 0, 20])

    def test_sampleable_counts_windows_of_slice_samplers(self):
        members = [stock(64, sampler=slices()) for _ in range(2)]
        for member, count in zip(members, (3, 11), strict=True):  # 2 and 10 windows
            member.extend(episodes(count))
        ensemble = GroupedReplayBufferEnsemble(*members, p="sampleable", num_buffer_sampled=2000)
        counts = torch.bincount(ensemble.sample(4000)["index", "buffer_ids"][:, 0, 0], minlength=2)
        assert_chi_square(counts, [2, 10])

    @pytest.mark.parametrize("p", [None, "sampleable"])
    def test_ensemble_without_rows_raises(self, p):
        ensemble = GroupedReplayBufferEnsemble(*members_of("mixed"), p=p)
        assert not ensemble.can_sample(3)
        with pytest.raises(RuntimeError, match="sample"):
            ensemble.sample(3)

    def test_error_of_a_member_names_it(self):
        members = members_of("mixed", 2, fill=3)
        members[1].empty()
        with pytest.raises(RuntimeError, match="member 1"):
            GroupedReplayBufferEnsemble(*members, p=[0.0, 1.0]).sample(2)

    def test_each_member_gives_one_share_with_sample_from_all(self):
        ensemble = GroupedReplayBufferEnsemble(*members_of("mixed", fill=3), sample_from_all=True, num_buffer_sampled=7)
        assert owners(ensemble.sample(12)).tolist() == [[0] * 4, [1] * 4, [2] * 4]

    def test_batch_size_must_be_a_multiple_of_the_shares(self):
        ensemble = GroupedReplayBufferEnsemble(*members_of("mixed", fill=3), num_buffer_sampled=4)
        with pytest.raises(ValueError, match="multiple of num_buffer_sampled=4"):
            ensemble.sample(6)

    def test_pass_without_replacement_that_ends_inside_a_share_goes_on(self):
        members = [stock(8, sampler=SamplerWithoutReplacement()), slot(8, sampler=TransitionSampler(replacement=False))]
        for number, member in enumerate(members):
            member.extend(records(range(1000 * number, 1000 * number + 6)))
        sample = GroupedReplayBufferEnsemble(*members, sample_from_all=True).sample(12)
        for number in range(2):
            assert sorted(sample["value"][number].flatten().tolist()) == list(range(1000 * number, 1000 * number + 6))
        ensemble = GroupedReplayBufferEnsemble(members[0], num_buffer_sampled=2)
        counts = torch.bincount(ensemble.sample(20)["value"].flatten().long())
        assert int(counts.min()) >= 3 and int(counts.max()) <= 4

    def test_generator_makes_samples_repeatable(self):
        def sample() -> TensorDict:
            ensemble = GroupedReplayBufferEnsemble(
                *members_of("mixed", fill=8), num_buffer_sampled=6, generator=torch.Generator().manual_seed(1)
            )
            return ensemble.sample(12)

        first = sample()
        torch.manual_seed(99)
        assert state_bytes(first) == state_bytes(sample())

    def test_members_keep_their_generators_without_one_for_the_ensemble(self):
        member = slot(generator=torch.Generator().manual_seed(5))
        member.extend(records(range(8)))
        GroupedReplayBufferEnsemble(member)
        torch.manual_seed(0)
        first = member.sample(8)["value"]
        member.set_rng(torch.Generator().manual_seed(5))
        torch.manual_seed(1)
        assert torch.equal(member.sample(8)["value"], first)

    def test_key_that_one_member_lacks_is_named_with_the_members(self):
        members = [stock(), slot(transform=None)]
        for member in members:
            member.extend(records(range(4)))
        with pytest.raises(KeyError, match=r"discount.*from member 1 .*not from member 0|steps_to_next_obs.*member 1"):
            GroupedReplayBufferEnsemble(*members, sample_from_all=True).sample(4)

    @pytest.mark.parametrize("latent", [torch.zeros(4, 2).double(), torch.zeros(4, 3)])
    def test_key_that_members_store_differently_is_named_with_the_members(self, latent):
        members = [stock(), slot()]
        members[0].extend(records(range(4)))
        members[1].extend(records(range(4)).set("latent", latent))
        with pytest.raises(ValueError, match="'latent'.*from member 0 .*from member 1"):
            GroupedReplayBufferEnsemble(*members, sample_from_all=True).sample(4)

    def test_transforms_of_members_run_before_that_of_the_ensemble(self):
        def plus(number: float) -> Any:
            return lambda data: only_stored(data).set("value", data.get("value") + number)

        def twice(data: TensorDict) -> TensorDict:
            assert data.batch_size == (2, 4)
            return data.set("value", data.get("value") * 2)

        members = [stock(transform=plus(100.0)), slot(transform=plus(200.0))]
        for member in members:
            member.extend(records([1, 1, 1]))
        ensemble = GroupedReplayBufferEnsemble(*members, sample_from_all=True, transform=twice)
        assert ensemble.sample(8)["value"].squeeze(-1).tolist() == [[202.0] * 4, [402.0] * 4]

    def test_transform_of_the_ensemble_may_flatten_the_shares(self):
        ensemble = GroupedReplayBufferEnsemble(
            *members_of("mixed", fill=8), num_buffer_sampled=6, transform=lambda data: data.reshape(-1)
        )
        sample = ensemble.sample(24)
        assert sample.batch_size == (24,)
        assert torch.equal(sample["index", "buffer_ids"], owners(sample))
        result = ensemble.update_if_present(**handles_of(sample), patch={"latent": torch.ones(24, 2)})
        assert not result.stale.any()

    def test_member_that_makes_windows_is_cut_by_shares(self):
        def windows(data: TensorDict) -> TensorDict:
            return data.select("value").reshape(-1, 2)

        cut = SliceSampler(slice_len=2, traj_key="episode", strict_length=True, truncated_key=None)
        members = [
            stock(32, sampler=cut, transform=windows),
            slot(storage=SlotStorage(32, next_obs="store"), sampler=SequenceSampler(2)),
        ]
        members[1].append_transform(lambda data: data.select("value", "index", "index_generation"))
        for member in members:
            member.extend(episodes(20))
        ensemble = GroupedReplayBufferEnsemble(*members, num_buffer_sampled=6)
        sample = ensemble.sample(24)
        assert sample.batch_size == (6, 2, 2)
        assert (sample["value"][..., 1, 0] - sample["value"][..., 0, 0] == 1).all()
        assert torch.equal(sample["index", "index"], sample["value"].squeeze(-1).long())

    def test_transform_that_loses_rows_is_refused(self):
        members = [stock(transform=lambda data: data[::2]), stock()]
        for member in members:
            member.extend(records(range(4)))
        with pytest.raises(RuntimeError, match="member 0.*keep all 4 rows"):
            GroupedReplayBufferEnsemble(*members, sample_from_all=True).sample(8)

    @KINDS
    def test_prefetched_samples_are_right_and_dropped_by_empty(self, kinds):
        members = members_of(kinds, fill=8)
        ensemble = GroupedReplayBufferEnsemble(*members, batch_size=12, prefetch=2)
        for _ in range(5):
            sample = ensemble.sample()
            assert torch.equal(sample["index", "buffer_ids"], owners(sample))
        assert len(ensemble._prefetch_queue) == 2
        ensemble.empty()
        assert [len(member) for member in members] == [0, 0, 0]
        for number, member in enumerate(members):
            member.extend(records(range(1000 * number + 500, 1000 * number + 508)))
        assert (ensemble.sample()["value"] % 1000 >= 500).all()
        ensemble.shutdown()

    def test_writes_of_another_thread_never_mix_members(self):
        members = members_of("mixed", fill=8)
        ensemble = GroupedReplayBufferEnsemble(*members, routing_key="source", num_buffer_sampled=6)
        stop, failed = threading.Event(), []

        def write() -> None:
            numbers = torch.arange(12)
            while not stop.is_set():
                try:
                    source = numbers % 3
                    ensemble.extend(records((1000 * source + numbers % 900).tolist(), source=source))
                except Exception as error:  # told to the test, whose thread would not see it
                    failed.append(error)
                    return
                numbers = numbers + 12

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        for _ in range(200):
            sample = ensemble.sample(24)
            assert torch.equal(owners(sample), sample["index", "buffer_ids"])
        stop.set()
        writer.join(timeout=60.0)
        assert not writer.is_alive() and not failed

    def test_share_that_holds_no_whole_window_is_refused(self):
        member = slot(storage=SlotStorage(32, next_obs="store"), sampler=SequenceSampler(4))
        member.extend(episodes(20))
        with pytest.raises(RuntimeError, match="member 0.*4 equal shares"):
            GroupedReplayBufferEnsemble(member, num_buffer_sampled=4).sample(8)

    def test_iteration_yields_batches(self):
        ensemble = GroupedReplayBufferEnsemble(*members_of("mixed", fill=8), batch_size=6)
        for count, batch in enumerate(ensemble):
            assert batch.batch_size == (3, 2)
            if count == 3:
                break

    def test_memory_mapped_members_are_sampled(self, tmp_path):
        mapped = TensorDictReplayBuffer(
            storage=LazyMemmapStorage(8, scratch_dir=tmp_path / "rows"),
            writer=TensorDictRoundRobinWriter(track_generations=True),
        )
        members = [mapped, slot()]
        for number, member in enumerate(members):
            member.extend(records(range(1000 * number, 1000 * number + 8)))
        sample = GroupedReplayBufferEnsemble(*members, num_buffer_sampled=4).sample(8)
        assert torch.equal(sample["index", "buffer_ids"], owners(sample))


# ------------------------------------------------------------------------------------------- write-back
class TestUpdate:
    """Contract: TorchRL's masks where it defines them, the last live duplicate elsewhere, all members or none."""

    @KINDS
    def test_handles_of_a_sample_find_their_rows(self, kinds):
        members = members_of(kinds, fill=11)
        ensemble = GroupedReplayBufferEnsemble(*members, num_buffer_sampled=6)
        sample = ensemble.sample(24)
        patch = sample["value"].expand(6, 4, 2) + 0.5
        result = ensemble.update_if_present(**handles_of(sample), patch={"latent": patch})
        assert isinstance(result, WriteBackResult) and isinstance(result, ConditionalUpdateResult)
        assert result.updated.shape == result.batch_size == (6, 4)
        assert not result.stale.any()
        for member in members:
            value, latent = stored(member, "value"), stored(member, "latent")
            written = latent[:, 0] != 0
            assert torch.equal(latent[written], value[written].expand(-1, 2) + 0.5)
        touched = sum(int((stored(member, "latent")[:, 0] != 0).sum()) for member in members)
        assert int(result.updated.sum()) == touched

    @pytest.mark.parametrize("versions", [None, "one", "each"])
    def test_masks_and_rows_equal_torchrl_without_duplicates(self, versions):
        generator = torch.Generator().manual_seed(11)

        def draw(high: int, *shape: int) -> torch.Tensor:
            return torch.randint(high, shape, generator=generator)

        capacities = [3, 4, 5]
        candidates = torch.tensor([(n, i) for n, c in enumerate(capacities) for i in range(c)])
        for round_ in range(120):
            if round_ % 6 == 0:  # new ensembles now and then, so that first laps are seen too
                makers = (ReplayBufferEnsemble, GroupedReplayBufferEnsemble)
                ensembles = [make(*(stock(c) for c in capacities), routing_key="source") for make in makers]
                for ensemble in ensembles:
                    ensemble.extend(records(range(3), source=torch.arange(3)))
            total = int(draw(15, 1)) + 1
            written, version_written = draw(3, total), draw(4, total)
            chosen = candidates[torch.randperm(len(candidates), generator=generator)[: int(draw(12, 1)) + 1]]
            generation = draw(4 + round_ % 6 * 2, len(chosen)) - 1
            options: dict[str, Any] = {}
            if versions is not None:
                version = draw(4, *((len(chosen),) if versions == "each" else ()))
                options = {"version_key": "version", "version": version, "require_newer": bool(draw(2, 1))}
            results = []
            for ensemble in ensembles:
                ensemble.extend(records(range(total), source=written).set("version", version_written.clone()))
                results.append(
                    ensemble.update_if_present(
                        index=TensorDict({"buffer_ids": chosen[:, 0], "index": chosen[:, 1]}, [len(chosen)]),
                        generation=generation,
                        patch={"latent": torch.arange(1.0, 1 + 2 * len(chosen)).view(-1, 2)},
                        **options,
                    )
                )
            theirs, ours = results
            assert torch.equal(ours.updated, theirs.updated)
            assert (ours.updated_count, ours.stale_count) == (theirs.updated_count, theirs.stale_count)
            assert (ours.version_rejected is None) == (versions is None)
            if versions is not None:
                assert torch.equal(ours.version_rejected, theirs.version_rejected)
            assert ours.superseded_count == 0
            assert content(ensembles[1]) == content(ensembles[0])

    @KINDS
    def test_last_of_several_live_handles_wins_and_the_others_are_superseded(self, kinds):
        members = members_of(kinds, capacity=4, fill=6)  # rows 0 and 1 in their second lap
        ensemble = GroupedReplayBufferEnsemble(*members)
        ids = torch.tensor([1, 1, 0, 1, 0, 1, 2])
        rows = torch.tensor([2, 2, 1, 2, 1, 0, 2])
        generation = torch.tensor([0, 0, 1, 9, 1, 0, 0])
        patch = torch.arange(1.0, 8.0).unsqueeze(-1).expand(7, 2)
        result = ensemble.update_if_present(
            index=TensorDict({"buffer_ids": ids, "index": rows}, [7]), generation=generation, patch={"latent": patch}
        )
        assert result.updated.tolist() == [False, True, False, False, True, False, True]
        assert result.superseded.tolist() == [True, False, True, False, False, False, False]
        assert result.stale.tolist() == [False, False, False, True, False, True, False]
        assert stored(members[1], "latent")[:, 0].tolist() == [0.0, 0.0, 2.0, 0.0]
        assert stored(members[0], "latent")[:, 0].tolist() == [0.0, 5.0, 0.0, 0.0]
        assert stored(members[2], "latent")[:, 0].tolist() == [0.0, 0.0, 7.0, 0.0]

    @KINDS
    def test_duplicates_equal_a_dict_built_in_order(self, kinds):
        members = members_of(kinds, fill=8)
        ensemble = GroupedReplayBufferEnsemble(*members)
        ids, rows = torch.randint(3, (500,)), torch.randint(8, (500,))
        patch = torch.arange(1.0, 501.0).unsqueeze(-1).expand(500, 2)
        result = ensemble.update_if_present(
            index=TensorDict({"buffer_ids": ids, "index": rows}, [500]),
            generation=torch.zeros(500, dtype=torch.int64),
            patch={"latent": patch},
        )
        last = {(m, r): p for m, r, p in zip(ids.tolist(), rows.tolist(), patch[:, 0].tolist(), strict=True)}
        for number, member in enumerate(members):
            wanted = [last.get((number, row), 0.0) for row in range(8)]
            assert stored(member, "latent")[:, 0].tolist() == wanted
        assert result.updated_count == len(last)
        assert result.superseded_count == 500 - len(last)

    @KINDS
    def test_highest_version_wins_in_every_member(self, kinds):
        members = members_of(kinds, fill=4)
        ensemble = GroupedReplayBufferEnsemble(*members)
        ids = torch.tensor([0, 1, 2, 0, 1, 2, 0])
        result = ensemble.update_if_present(
            index=TensorDict({"buffer_ids": ids, "index": torch.zeros(7, dtype=torch.int64)}, [7]),
            generation=torch.zeros(7, dtype=torch.int64),
            patch={"latent": torch.arange(1.0, 8.0).unsqueeze(-1).expand(7, 2)},
            version_key="version",
            version=torch.tensor([1, 5, -1, 3, 4, -1, 3]),
        )
        assert result.updated.tolist() == [False, True, False, False, False, False, True]
        assert result.version_rejected.tolist() == [True, False, True, True, True, True, False]
        assert [stored(member, "version")[0].item() for member in members] == [3, 5, 0]

    def test_version_may_be_one_number_of_the_stored_dtype(self):
        members = [stock(), slot()]
        for member in members:
            member.extend(records(range(2)).set("version", torch.zeros(2, dtype=torch.int32)))
        index = TensorDict({"buffer_ids": torch.tensor([0, 1]), "index": torch.tensor([0, 0])}, [2])
        result = GroupedReplayBufferEnsemble(*members).update_if_present(
            index=index,
            generation=torch.zeros(2).long(),
            patch={"latent": torch.ones(2, 2)},
            version_key="version",
            version=4,
        )
        assert result.updated.all()
        assert [stored(member, "version")[:2].tolist() for member in members] == [[4, 0], [4, 0]]

    def test_patch_may_be_a_tensordict_of_any_leading_shape(self):
        members = members_of("mixed", 2, fill=8)
        ensemble = GroupedReplayBufferEnsemble(*members, num_buffer_sampled=4)
        sample = ensemble.sample(8)
        patch = TensorDict({"latent": torch.ones(4, 2, 2)}, [4, 2])
        result = ensemble.update_if_present(**handles_of(sample), patch=patch)
        assert result.updated.shape == (4, 2)
        assert not result.stale.any()

    def test_gradients_do_not_enter_a_member(self):
        members = members_of("mixed", 2, fill=4)
        ensemble = GroupedReplayBufferEnsemble(*members, sample_from_all=True)
        sample = ensemble.sample(4)
        patch = torch.ones(2, 2, 2, requires_grad=True) * 2
        ensemble.update_if_present(**handles_of(sample), patch={"latent": patch})
        assert not any(stored(member, "latent").requires_grad for member in members)

    @pytest.mark.parametrize(
        ("change", "error", "match"),
        [
            ({"index": {"buffer_ids": torch.tensor([0, 1, 3])}}, ValueError, r"\[0, 3\)"),
            ({"index": {"buffer_ids": torch.tensor([0, -1, 2])}}, ValueError, r"\[0, 3\)"),
            ({"index": {"buffer_ids": torch.tensor([0.0, 1.0, 2.0])}}, TypeError, "integers"),
            ({"index": {"index": torch.tensor([0.0, 1.0, 2.0])}}, TypeError, "integers"),
            ({"generation": torch.zeros(3)}, TypeError, "integers"),
            ({"generation": torch.zeros(2, dtype=torch.int64)}, ValueError, "shape of buffer_ids"),
            ({"patch": {}}, ValueError, "at least one key"),
            ({"patch": {"latent": torch.zeros(2, 2)}}, ValueError, "'latent'"),
            ({"patch": {"latent": torch.zeros(3, 3)}}, ValueError, "member [012].*'latent'"),
            ({"patch": {"latent": torch.zeros(3, 2).double()}}, ValueError, "member [012].*'latent'"),
            ({"patch": {"other": torch.zeros(3, 2)}}, KeyError, "member [012].*'other'"),
            ({"version": 3}, ValueError, "together"),
            ({"version_key": "version"}, ValueError, "together"),
            ({"version_key": "version", "version": torch.zeros(2).long()}, ValueError, "version"),
            ({"version_key": "latent", "version": 3}, ValueError, "latent"),
            ({"version_key": "other", "version": 3}, KeyError, "other"),
            ({"version_key": "version", "version": torch.zeros(3)}, ValueError, "version"),
        ],
    )
    def test_what_is_refused_changes_no_member(self, change, error, match):
        ensemble = GroupedReplayBufferEnsemble(*members_of("mixed", fill=8))
        before = picture(ensemble)
        index = {"buffer_ids": torch.arange(3), "index": torch.arange(3), **change.get("index", {})}
        call = {
            "generation": torch.zeros(3, dtype=torch.int64),
            "patch": {"latent": torch.ones(3, 2)},
            **change,
            "index": TensorDict(index, [3]),
        }
        with pytest.raises(error, match=match):
            ensemble.update_if_present(**call)
        assert picture(ensemble) == before

    @pytest.mark.parametrize("odd", [0, 1, 2])
    def test_member_that_refuses_leaves_all_unchanged(self, odd):
        members = members_of("mixed")
        for number, member in enumerate(members):
            width = 3 if number == odd else 2
            member.extend(records(range(4)).set("latent", torch.zeros(4, width)))
        ensemble = GroupedReplayBufferEnsemble(*members)
        before = picture(ensemble)
        index = TensorDict({"buffer_ids": torch.arange(3), "index": torch.zeros(3, dtype=torch.int64)}, [3])
        with pytest.raises(ValueError, match=f"member {odd}"):
            ensemble.update_if_present(
                index=index, generation=torch.zeros(3, dtype=torch.int64), patch={"latent": torch.ones(3, 2)}
            )
        assert picture(ensemble) == before

    def test_members_without_generations_are_named(self):
        members = [slot(), stock(track=False)]
        for member in members:
            member.extend(records(range(4)))
        ensemble = GroupedReplayBufferEnsemble(*members, sample_from_all=True)
        sample = ensemble.sample(4)
        assert "index_generation" not in sample.keys()
        with pytest.raises(RuntimeError, match="member 1"):
            ensemble.update_if_present(
                index=sample["index"], generation=torch.zeros(2, 2).long(), patch={"latent": torch.zeros(2, 2, 2)}
            )

    def test_submitted_update_applies_before_the_next_sample(self):
        members = members_of("mixed", 2, fill=4)
        ensemble = GroupedReplayBufferEnsemble(*members, sample_from_all=True)
        sample = ensemble.sample(64)
        future = ensemble.submit_update_if_present(**handles_of(sample), patch={"latent": torch.ones(2, 32, 2)})
        assert ensemble.sample(64)["latent"].all()
        assert future.result(timeout=60).stale_count == 0
        ensemble.shutdown()

    def test_update_submitted_to_a_member_is_seen_by_the_next_sample(self):
        member = slot()
        member.extend(records(range(4)))
        ensemble = GroupedReplayBufferEnsemble(member)
        own = member.sample(64)
        member.submit_update_if_present(
            index=own["index"], generation=own["index_generation"], patch={"latent": torch.ones(64, 2)}
        )
        assert ensemble.sample(64)["latent"].all()
        member.shutdown()


# ------------------------------------------------------------------------------------------- the whole
class TestSubmit:
    """Contract: a submitted update is that of a single buffer: owned, in order, and nobody else's failure."""

    @staticmethod
    def handles(count: int = 4, member: int = 1) -> dict[str, Any]:
        ids = torch.full((count,), member)
        index = TensorDict({"buffer_ids": ids, "index": torch.arange(count)}, [count])
        return {"index": index, "generation": torch.zeros(count, dtype=torch.int64)}

    @KINDS
    def test_inputs_belong_to_the_caller_again_at_once(self, kinds):
        members = members_of(kinds, capacity=4, fill=4)
        ensemble = GroupedReplayBufferEnsemble(*members)
        patch, handles = {"latent": torch.full((4, 2), 7.0)}, self.handles()
        with ensemble._updates.turn:  # nothing is applied meanwhile
            future = ensemble.submit_update_if_present(**handles, patch=patch)
            patch["latent"].fill_(0.0)
            handles["index"]["index"].fill_(0)
            handles["index"]["buffer_ids"].fill_(0)
            handles["generation"].fill_(-1)
        assert future.result(timeout=60).updated.all()
        assert stored(members[1], "latent").tolist() == [[7.0, 7.0]] * 4
        assert stored(members[0], "latent").count_nonzero() == 0

    @KINDS
    def test_updates_apply_in_the_order_of_submission(self, kinds):
        members = members_of(kinds, capacity=4, fill=4)
        ensemble = GroupedReplayBufferEnsemble(*members)
        futures = [
            ensemble.submit_update_if_present(**self.handles(), patch={"latent": torch.full((4, 2), float(k))})
            for k in range(20)
        ]
        assert all(future.result(timeout=60).updated.all() for future in futures)
        assert stored(members[1], "latent").tolist() == [[19.0, 19.0]] * 4
        stats = ensemble.stats()
        assert (stats["updates_applied"], stats["updates_pending"]) == (80, 0)

    @KINDS
    def test_what_does_not_fit_a_member_raises_at_submission(self, kinds):
        ensemble = GroupedReplayBufferEnsemble(*members_of(kinds, capacity=4, fill=4))
        before = picture(ensemble)
        with pytest.raises(KeyError, match="nope"):
            ensemble.submit_update_if_present(**self.handles(), patch={"nope": torch.zeros(4, 2)})
        with pytest.raises(ValueError, match="latent"):
            ensemble.submit_update_if_present(**self.handles(), patch={"latent": torch.zeros(4, 3)})
        with pytest.raises(ValueError, match="member ids"):
            ensemble.submit_update_if_present(**self.handles(member=3), patch={"latent": torch.zeros(4, 2)})
        assert picture(ensemble) == before

    def test_failed_update_raises_from_its_own_future_only(self, monkeypatch):
        members = members_of("mixed", capacity=4, fill=4)
        ensemble = GroupedReplayBufferEnsemble(*members, batch_size=6)
        kept = members[1].update_if_present
        monkeypatch.setattr(members[1], "update_if_present", lambda **_: (_ for _ in ()).throw(MemoryError("boom")))
        failed = ensemble.submit_update_if_present(**self.handles(), patch={"latent": torch.ones(4, 2)})
        with pytest.raises(MemoryError, match="boom"):
            failed.result(timeout=60)
        monkeypatch.setattr(members[1], "update_if_present", kept)
        later = ensemble.submit_update_if_present(**self.handles(), patch={"latent": torch.ones(4, 2)})
        assert later.result(timeout=60).updated.all()
        assert ensemble.sample().numel() == 6


class TestEnsemble:
    """Contract: what an ensemble of TorchRL is, with members checked when it is made."""

    @pytest.mark.parametrize(
        "index",
        [(slice(None), 2), (slice(None), [0, 2]), (slice(1, None), slice(None, 3)), ([1], 2), (0, 2), (0,)],
        ids=str,
    )
    def test_rows_of_several_members_are_those_of_torchrls_ensemble(self, index):
        members = members_of("stock", 2, fill=6)
        theirs = ReplayBufferEnsemble(*members, num_buffer_sampled=2, batch_size=4)
        ours = GroupedReplayBufferEnsemble(*members, num_buffer_sampled=2, batch_size=4)
        got, wanted = ours[index], theirs[index]
        if index == (0,):
            assert got is wanted
            return
        assert got.batch_size == wanted.batch_size
        assert torch.equal(got["value"], wanted["value"])

    def test_rows_of_all_members_may_be_asked_for_by_an_ellipsis(self):
        ensemble = GroupedReplayBufferEnsemble(*members_of("stock", 2, fill=6), num_buffer_sampled=2, batch_size=4)
        assert ensemble[..., :3]["value"].flatten().tolist() == [0, 1, 2, 1000, 1001, 1002]

    def test_rows_of_members_with_and_without_streams_are_not_stacked(self):
        ensemble = GroupedReplayBufferEnsemble(*members_of("mixed", 2, fill=6), num_buffer_sampled=2, batch_size=4)
        with pytest.raises(ValueError, match=r"as many dimensions .* got \[\[3\], \[1, 6\]\] .* one by one"):
            ensemble[:, :3]

    def test_it_is_an_ensemble_of_torchrl(self):
        members = members_of("mixed", fill=3)
        ensemble = GroupedReplayBufferEnsemble(*members)
        assert isinstance(ensemble, ReplayBufferEnsemble)
        assert len(ensemble) == 3
        assert all(ensemble[number] is member for number, member in enumerate(members))
        assert ensemble[-1] is members[2]
        assert ensemble[:] is ensemble
        assert ensemble.write_count == 9
        assert ensemble.stats()["size"] == 9
        assert "SlotStorage" in repr(ensemble)

    def test_several_members_are_an_ensemble_again(self):
        ensemble = GroupedReplayBufferEnsemble(*members_of("mixed", 4, fill=3), p=[0.1, 0.2, 0.3, 0.4], batch_size=8)
        part = ensemble[1:3]
        assert isinstance(part, GroupedReplayBufferEnsemble)
        assert part[0] is ensemble[1] and len(part) == 2
        assert set(owners(part.sample()).flatten().tolist()) <= {1, 2}
        for index in ([3, 0], torch.tensor([3, 0]), np.array([3, 0])):
            assert ensemble[index][0] is ensemble[3]
        for index in (np.int64(3), torch.tensor(3)):
            assert ensemble[index] is ensemble[3]
        assert ensemble[1, :2] is not None
        with pytest.raises(IndexError):
            ensemble[4]

    def test_several_members_keep_the_rules_for_updates(self):
        rules = {"visibility": "eventual", "max_pending_bytes": 1000, "when_full": "raise"}
        part = GroupedReplayBufferEnsemble(*members_of("mixed", 3), **rules)[1:]
        queue = part._updates
        assert (part.visibility, queue.max_pending_bytes, queue.when_full) == tuple(rules.values())

    def test_empty_makes_every_handle_stale(self):
        ensemble = three_kinds()
        metadata = fill_three_kinds(ensemble)
        ensemble.empty()
        assert ensemble.write_count == 0
        fill_three_kinds(ensemble)
        result = ensemble.update_if_present(**written_handles(metadata), patch={"latent": torch.ones(30, 2)})
        ours = metadata["buffer_ids"] > 0  # TorchRL's generations do not change with ``empty``
        assert result.stale[ours].all()

    def test_end_streams_cuts_members_of_both_kinds(self):
        theirs, ours = stock(8, sampler=SliceSampler(slice_len=1, end_key=("next", "done"))), slot(8)
        for member in (theirs, ours):
            member.extend(episodes(3).set(("next", "value"), torch.arange(1.0, 4.0).unsqueeze(-1)))
        GroupedReplayBufferEnsemble(theirs, ours).end_streams()
        assert theirs[:]["next", "done"].flatten().tolist() == [False, False, True]
        later = episodes(1).set(("next", "value"), torch.ones(1, 1))  # begins at 0, as if it were a new episode
        ours.extend(later)
        assert ours.storage.get(torch.tensor([[2, 0]]))["next", "value"].item() == 3.0

    def test_end_streams_names_a_member_that_has_none_and_changes_nothing(self):
        theirs, ours = stock(8), slot(storage=SlotStorage(8, next_obs="store"))
        for member in (ours, theirs):
            member.extend(episodes(3))
        ensemble = GroupedReplayBufferEnsemble(ours, theirs)
        before = picture(ensemble)
        with pytest.raises(RuntimeError, match="member 1.*SliceSampler"):
            ensemble.end_streams()
        assert picture(ensemble) == before

    @pytest.mark.parametrize(
        ("make", "error", "match"),
        [
            (lambda: GroupedReplayBufferEnsemble(), ValueError, "at least one"),
            (lambda: GroupedReplayBufferEnsemble(slot(), SlotStorage(4)), TypeError, "SlotStorage as member 1"),
            (lambda: GroupedReplayBufferEnsemble(ReplayBuffer(storage=ListStorage(4))), TypeError, "ListStorage"),
            (
                lambda: GroupedReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(4, ndim=2))),
                TypeError,
                "2 dims as member 0",
            ),
            (lambda: GroupedReplayBufferEnsemble(GroupedReplayBufferEnsemble(slot())), TypeError, "StorageEnsemble"),
            (lambda: GroupedReplayBufferEnsemble(slot(), p=[0.5, 0.5]), ValueError, "1 weights"),
            (lambda: GroupedReplayBufferEnsemble(slot(), slot(), p=[1.0, -1.0]), ValueError, "weights >= 0"),
            (lambda: GroupedReplayBufferEnsemble(slot(), slot(), p=[0.0, 0.0]), ValueError, "not all 0"),
            (lambda: GroupedReplayBufferEnsemble(slot(), p="ready"), ValueError, "sampleable"),
            (lambda: GroupedReplayBufferEnsemble(slot(), p=[1.0], sample_from_all=True), ValueError, "sample_from_all"),
            (lambda: GroupedReplayBufferEnsemble(slot(), num_buffer_sampled=0), ValueError, "num_buffer_sampled"),
            (lambda: GroupedReplayBufferEnsemble(slot(), routing_key="a", routing_dim=0), ValueError, "at most one"),
        ],
    )
    def test_impossible_ensembles_are_refused(self, make, error, match):
        with pytest.raises(error, match=match):
            make()


@pytest.mark.gpu
class TestCuda:
    """Contract: members on one device behave as on the host, handles and masks included."""

    def test_written_sampled_and_updated_rows_are_the_owners(self):
        """case 30, case 32"""
        members = [slot(storage=SlotStorage(8, device="cuda", next_obs="store")) for _ in range(2)]
        members.append(
            TensorDictReplayBuffer(
                storage=LazyTensorStorage(8, device="cuda"), writer=TensorDictRoundRobinWriter(track_generations=True)
            )
        )
        ensemble = GroupedReplayBufferEnsemble(*members, routing_key="source", num_buffer_sampled=6)
        source = torch.arange(30) % 3
        metadata = ensemble.extend(records((1000 * source + torch.arange(30)).tolist(), source=source).to("cuda"))
        assert metadata["index"].device.type == "cuda"
        sample = ensemble.sample(24)
        assert torch.equal(owners(sample), sample["index", "buffer_ids"])
        result = ensemble.update_if_present(**handles_of(sample), patch={"latent": torch.ones(6, 4, 2, device="cuda")})
        assert not result.stale.any()
        stale = ensemble.update_if_present(
            **written_handles(metadata), patch={"latent": torch.zeros(30, 2, device="cuda")}
        ).stale
        assert stale.tolist() == [i < 6 for i in range(30)]
