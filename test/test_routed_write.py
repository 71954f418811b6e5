# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Routed writes: records of any streams in any order, written at once, are what they are when they come one by one.

Observation ``10000 s + t`` is the t-th thing that stream s showed. ``World`` plays episodes with ends of every kind and
resets that no flag announces.
"""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from _reference import flat_rows
from tensordict import LazyStackedTensorDict, TensorDict
from test_replay_device import books_on_the_device

from torchrl_ext.data import RowLayout, SlotReplayBuffer, SlotStorage, TransitionSampler, _routed_device
from torchrl_ext.data.packing import check_run

KEY = "env_index"
REFUSED = (ValueError, KeyError, TypeError, IndexError)
FLAGS = ("done", "terminated", "truncated")
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


class World:
    """Streams that step when they are told to: ``records`` makes their next transitions, in any interleaving."""

    def __init__(self, num_streams: int, seed: int = 0, *, eventful: bool = True, reset_share: float = 0.2) -> None:
        self.random, self.eventful, self.reset_share = random.Random(seed), eventful, reset_share
        self.now = [10_000 * stream for stream in range(num_streams)]
        self.count = 0

    def records(self, streams: list[int], *, bare: bool = False, feature: tuple[int, ...] = (1,)) -> TensorDict:
        """[M], one transition of each stream named; ``bare`` ones carry no successor and are never truncated."""
        columns: dict[str, list] = {name: [] for name in ("observation", "after", "number", *FLAGS)}
        for stream in streams:
            here = self.now[stream]
            kind = self.random.random() / self.reset_share if self.eventful else 1.0
            terminated, truncated, reset = kind < 0.3, 0.3 <= kind < 0.6 and not bare, 0.6 <= kind < 1.0 and not bare
            columns["observation"].append(here)
            columns["after"].append(here + 1)
            columns["number"].append(self.count)
            columns["terminated"].append(terminated)
            columns["truncated"].append(truncated)
            columns["done"].append(terminated or truncated)
            self.count += 1
            self.now[stream] = here + (5 if terminated or truncated or reset else 1)
        made = {name: torch.tensor(values) for name, values in columns.items()}
        count = len(streams)
        out = TensorDict(
            {
                "observation": made["observation"].float().reshape(count, 1).repeat(1, 3),
                "number": made["number"],
                KEY: torch.tensor(streams, dtype=torch.int64).reshape(count, *feature),
                "next": {"reward": made["number"].float().reshape(count, 1)},
            },
            [count],
        )
        if not bare:
            out["next", "observation"] = made["after"].float().reshape(count, 1).repeat(1, 3)
        for name in FLAGS:
            out["next", name] = made[name].bool().reshape(count, 1)
        return out


def make_storage(capacity: int, num_streams: int, kind: str = "cpu", **kwargs: Any) -> SlotStorage:
    place: dict[str, Any] = {"shared": {"shared": True}, "cuda": {"device": "cuda"}}.get(kind, {})
    return SlotStorage(capacity, num_streams, final_capacity=capacity + 1, **place, **kwargs)


def make_buffer(storage: SlotStorage, **kwargs: Any) -> Any:
    if "routing_dim" not in kwargs:
        kwargs.setdefault("routing_key", KEY)
    return SlotReplayBuffer(storage=storage, batch_size=16, **kwargs)


def write_one_by_one(storage: SlotStorage, data: TensorDict, streams: list[int]) -> list[list[int]]:
    """The meaning of a routed write; returns the index of each record."""
    index = []
    for i, stream in enumerate(streams):
        index.append([int(storage.head[stream]) % storage.capacity, stream])
        storage.extend_batch(data[i : i + 1].unsqueeze(0), streams=slice(stream, stream + 1))
    return index


def state(storage: SlotStorage) -> dict[str, Any]:
    """All that can be asked of a storage: positions, handles, counts, stored rows, and what can be sampled."""
    cells = torch.cartesian_prod(torch.arange(storage.capacity), torch.arange(storage.num_streams))
    generation = storage.generation_of(cells)
    live = cells[generation >= 0]
    low, high = storage.live_range()
    out: dict[str, Any] = {
        "head": storage.head.tolist(),
        "low": torch.minimum(low, high).tolist(),
        "high": high.tolist(),
        "generation": generation.tolist(),
        "len": len(storage),
        "write_count": storage.write_count,
        "num_finals": storage.num_finals(),
    }
    rows = storage.get(live.to(storage.device))
    if storage.layout.derives:  # what a row without a known successor shows there is nobody's business
        rows = rows.exclude(*(("next", key) for key in storage.layout.next_keys))
    out["rows"] = flat_rows(rows.cpu())
    for n_steps in (1, 3):
        sampler = TransitionSampler(n_steps, 0.5)  # returns of whole numbers are exact, fused multiply-adds or not
        # A CPU generator draws the same numbers for every kind of memory.
        buffer = SlotReplayBuffer(storage=storage, sampler=sampler, generator=torch.Generator().manual_seed(5))
        try:
            sample = buffer.sample(30 * len(storage)).cpu()
        except RuntimeError:
            out[f"sample of {n_steps}"] = None
            continue
        by_row = {}
        for row in flat_rows(sample):
            by_row[row["index",]] = row
        out[f"sample of {n_steps}"] = by_row
    return out


def assert_same(got: SlotStorage, wanted: SlotStorage) -> None:
    left, right = state(got), state(wanted)
    for name, value in right.items():
        assert left[name] == value, f"{name} differs from that of single writes"


@contextlib.contextmanager
def kept_by(kind: str) -> Iterator[None]:
    with books_on_the_device() if kind == "books on the device" else contextlib.nullcontext():
        yield


# ------------------------------------------------------------------------------------------- equality
class TestBatchOfRecordsIsSingleWrites:
    """Contract: a routed write leaves the storage in the state in which the same records, written one by one, leave it:
    heads, handles, rows, final observations, pending successors, what is sampleable."""

    @pytest.mark.parametrize("next_obs", ["derive", "store"])
    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("kind", ["cpu", "shared", "books on the device", GPU])
    def test_random_batches_among_other_writes(self, kind, seed, next_obs):
        generator = random.Random(100 * seed)
        capacity, width = generator.randint(2, 7), generator.randint(1, 5)
        world = World(width, seed)
        with kept_by(kind):
            routed = make_buffer(make_storage(capacity, width, kind, next_obs=next_obs))
            single = make_storage(capacity, width, "cpu" if kind == "cuda" else kind, next_obs=next_obs)
            for turn in range(9):
                most = generator.choice([1, 4, 3 * width, 3 * capacity * width])
                # Few streams often, so that some get more records than they have slots.
                among = generator.sample(range(width), generator.randint(1, width))
                streams = [generator.choice(among) for _ in range(generator.randint(1, most))]
                bare = next_obs == "derive" and turn > 0 and generator.random() < 0.3
                data = world.records(streams, bare=bare)
                index = routed.extend(data.to(routed.storage.device))
                assert index.cpu().tolist() == write_one_by_one(single, data, streams)
                assert_same(routed.storage, single)
                other = generator.random()
                if other < 0.2:
                    block = slice(generator.randrange(width), width)
                    routed.storage.end_streams(block)
                    single.end_streams(block)
                elif other < 0.3:
                    routed.storage.empty()
                    single.empty()
                elif other < 0.6:
                    steps = [world.records(list(range(width))) for _ in range(2)]
                    run = torch.stack(steps, 0)
                    routed.extend_batch(run.to(routed.storage.device))
                    single.extend_batch(run)
                    assert_same(routed.storage, single)

    EVENTS = {
        "several rows of one stream": [[0, 0, 0, 0]],
        "streams turn by turn": [[0, 1, 2, 0, 1, 2]],
        "streams in blocks backwards": [[2, 2, 2, 1, 1, 0]],
        "more rows than slots": [[1] * 9],
        "many laps of one and one row of others": [[0, 2, *[1] * 17, 0]],
        "wrap in one stream only": [[0, 0, 0], [0, 0, 1, 1]],
        "exactly one lap": [[0] * 4 + [1] * 4],
        "one lap and one": [[0] * 5, [0] * 5],
        "one record at a time": [[0], [1], [0], [0], [1]],
        "half of the streams never": [[1, 1], [1]],
    }

    @pytest.mark.parametrize("reset_share", [0.0001, 0.5, 0.95])
    @pytest.mark.parametrize("name", sorted(EVENTS))
    def test_written_batches(self, name, reset_share):
        """From hardly an event to hardly a row without one."""
        for bare in (False, True):
            world = World(3, 7, reset_share=reset_share)
            routed, single = make_buffer(make_storage(4, 3)), make_storage(4, 3)
            first = world.records([0, 1, 2])
            routed.extend(first)
            write_one_by_one(single, first, [0, 1, 2])
            for streams in self.EVENTS[name]:
                data = world.records(streams, bare=bare)
                assert routed.extend(data).tolist() == write_one_by_one(single, data, streams)
                assert_same(routed.storage, single)

    def test_successor_of_a_row_is_the_next_record_of_its_stream_in_the_same_batch(self):
        buffer = make_buffer(make_storage(8, 2))
        buffer.extend(World(2, eventful=False).records([0, 1, 0, 1, 1]))
        rows = buffer.storage.get(torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1], [2, 1]]))
        assert rows["observation"][:, 0].tolist() == [0.0, 1.0, 10_000.0, 10_001.0, 10_002.0]
        assert rows["next", "observation"][:, 0].tolist() == [1.0, 2.0, 10_001.0, 10_002.0, 10_003.0]
        assert buffer.storage.num_finals() == 0

    def test_truncation_inside_a_batch_keeps_its_final_observation(self):
        world = World(2, eventful=False)
        data = world.records([0, 1, 0, 1])
        data["next", "truncated"][0] = data["next", "done"][0] = True
        data["observation"][2] = 500.0
        data["next", "observation"][2] = 501.0
        buffer = make_buffer(make_storage(8, 2))
        buffer.extend(data)
        rows = buffer.storage.get(torch.tensor([[0, 0], [1, 0], [0, 1]]))
        assert rows["next", "observation"][:, 0].tolist() == [1.0, 501.0, 10_001.0]
        assert buffer.storage.num_finals() == 1

    def test_pending_successor_becomes_final_when_the_next_record_does_not_continue_it(self):
        world = World(2, eventful=False)
        buffer = make_buffer(make_storage(8, 2))
        buffer.extend(world.records([0, 1]))
        world.now = [700, 10_001]
        buffer.extend(world.records([1, 0]))
        rows = buffer.storage.get(torch.tensor([[0, 0], [0, 1]]))
        assert rows["next", "observation"][:, 0].tolist() == [1.0, 10_001.0]
        assert buffer.storage.num_finals() == 1

    def test_sixty_four_environments_are_one_storage_of_sixty_four_columns(self):
        width = 64
        world, order = World(width, 3), random.Random(1)
        routed, single = make_buffer(make_storage(8, width)), make_storage(8, width)
        for _ in range(4):
            streams = [order.randrange(width) for _ in range(300)]
            data = world.records(streams)
            assert routed.extend(data).tolist() == write_one_by_one(single, data, streams)
        assert_same(routed.storage, single)


# ------------------------------------------------------------------------------------------- index
class TestIndex:
    """Contract: int64 [M, 2] (slot, stream), row by row of ``data.reshape(-1)``; the r-th record of a stream goes to
    step ``head + r``."""

    def test_record_goes_to_head_plus_rank_of_its_stream(self):
        buffer, world = make_buffer(make_storage(4, 3)), World(3)
        buffer.extend(world.records([0, 0, 0, 2]))
        index = buffer.extend(world.records([2, 0, 2, 1, 0, 2]))
        assert index.dtype == torch.int64
        assert index.tolist() == [[1, 2], [3, 0], [2, 2], [0, 1], [0, 0], [3, 2]]
        assert buffer.storage.head.tolist() == [5, 1, 4]

    def test_rows_overwritten_by_the_same_batch_are_named_too(self):
        buffer, world = make_buffer(make_storage(4, 2)), World(2)
        index = buffer.extend(world.records([1] * 6))
        assert index.tolist() == [[0, 1], [1, 1], [2, 1], [3, 1], [0, 1], [1, 1]]
        assert buffer.storage["number"][:, 1].tolist() == [4, 5, 2, 3]

    def test_index_serves_updates(self):
        buffer, world = make_buffer(make_storage(4, 3)), World(3)
        data = world.records([2, 0, 2, 1, 0, 2])
        index = buffer.extend(data)
        result = buffer.update_if_present(
            index=index, generation=buffer.storage.generation_of(index), patch={"number": -1 - data["number"]}
        )
        assert result.updated.all()
        slot, stream = index.unbind(-1)
        assert torch.equal(buffer.storage["number"][slot, stream], -1 - data["number"])

    @pytest.mark.parametrize("shape", [(12,), (3, 4), (2, 3, 2), (1, 12), (12, 1)])
    def test_batch_of_any_shape_is_read_row_by_row(self, shape):
        streams = [0, 2, 2, 1, 0, 1, 1, 1, 2, 0, 0, 2]
        for feature in ((), (1,)):
            data = World(3, 1).records(streams, feature=feature)
            buffer, single = make_buffer(make_storage(5, 3)), make_storage(5, 3)
            index = buffer.extend(data.reshape(shape))
            assert index.tolist() == write_one_by_one(single, data, streams)
            assert_same(buffer.storage, single)

    def test_transposed_batch_is_read_in_its_own_order(self):
        streams = [0, 2, 2, 1, 0, 1]
        data = World(3, 1).records(streams).reshape(2, 3)
        flat = data.transpose(0, 1).reshape(-1)
        buffer, single = make_buffer(make_storage(5, 3)), make_storage(5, 3)
        wanted = write_one_by_one(single, flat, flat[KEY].flatten().tolist())
        assert buffer.extend(data.transpose(0, 1)).tolist() == wanted
        assert_same(buffer.storage, single)

    def test_lazy_stack_of_records_is_a_batch(self):
        streams = [0, 2, 2, 1]
        data = World(3, 1).records(streams)
        buffer, single = make_buffer(make_storage(5, 3)), make_storage(5, 3)
        wanted = write_one_by_one(single, data, streams)
        assert buffer.extend(LazyStackedTensorDict(*data.unbind(0), stack_dim=0)).tolist() == wanted
        assert_same(buffer.storage, single)


# ------------------------------------------------------------------------------------------- ids
class TestRouting:
    """Contract: ids are integers of the batch shape, with or without a last dim of one; the key is stored iff the
    layout has it; ``routing_dim`` takes the coordinate along a batch dim instead."""

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
    @pytest.mark.parametrize("feature", [(), (1,)])
    def test_ids_are_integers_of_any_size(self, dtype, feature):
        streams = [2, 0, 2, 1]
        data = World(3).records(streams, feature=feature)
        data[KEY] = data[KEY].to(dtype)
        buffer, single = make_buffer(make_storage(5, 3)), make_storage(5, 3)
        assert buffer.extend(data).tolist() == write_one_by_one(single, data, streams)
        assert_same(buffer.storage, single)

    def test_inferred_layout_stores_the_key(self):
        buffer = make_buffer(make_storage(5, 3))
        buffer.extend(World(3).records([2, 0, 2, 1, 1]))
        sample = buffer.sample(64)
        assert torch.equal(sample[KEY].flatten(), sample["index"][:, 1])

    @pytest.mark.parametrize("extra", ["raise", "drop"])
    def test_given_layout_without_the_key_drops_it(self, extra):
        data = World(3).records([2, 0, 2, 1])
        layout = RowLayout.from_tensordict(data.exclude(KEY))
        buffer = make_buffer(make_storage(5, 3, layout=layout, extra=extra))
        buffer.extend(data)
        buffer.add(World(3).records([1])[0])
        assert buffer.storage.head.tolist() == [1, 2, 2]
        assert KEY not in buffer.sample().keys(True, True)
        assert KEY in data.keys(), "the caller's data was changed"

    def test_given_layout_with_the_key_stores_it(self):
        data = World(3).records([2, 0, 2, 1])
        buffer = make_buffer(make_storage(5, 3, layout=RowLayout.from_tensordict(data)))
        buffer.extend(data)
        assert buffer.storage[KEY][0].flatten().tolist() == [0, 1, 2]

    def test_key_may_be_nested(self):
        streams = [2, 0, 2, 1]
        data = World(3).records(streams)
        data["collector", "env"] = data.pop(KEY)
        buffer, single = make_buffer(make_storage(5, 3), routing_key=("collector", "env")), make_storage(5, 3)
        assert buffer.extend(data).tolist() == write_one_by_one(single, data, streams)
        assert_same(buffer.storage, single)

    def test_ids_of_an_only_stream_are_zero(self):
        world = World(1)
        data = world.records([0] * 7)
        buffer, single = make_buffer(make_storage(5, 1)), make_storage(5, 1)
        assert buffer.extend(data).tolist() == write_one_by_one(single, data, [0] * 7)
        assert_same(buffer.storage, single)

    def test_single_record_is_added_to_its_stream(self):
        world = World(3, 2)
        buffer, single = make_buffer(make_storage(4, 3)), make_storage(4, 3)
        for stream in (2, 0, 2, 2, 1, 2, 2):
            data = world.records([stream])
            index = buffer.add(data[0])
            assert index.reshape(-1).tolist() == write_one_by_one(single, data, [stream])[0]
            assert_same(buffer.storage, single)

    def test_runs_are_written_time_first_as_ever(self):
        world = World(3, 2)
        run = torch.stack([world.records([0, 1, 2]) for _ in range(3)])
        buffer, single = make_buffer(make_storage(4, 3)), make_storage(4, 3)
        buffer.extend_batch(run)
        single.extend_batch(run)
        assert_same(buffer.storage, single)

    @pytest.mark.parametrize(("shape", "dim"), [((3, 4), 0), ((4, 3), 1), ((2, 3, 2), 1), ((3,), 0), ((1, 2, 3), 2)])
    def test_coordinate_along_the_routing_dim_is_the_stream(self, shape, dim):
        coordinate = torch.arange(3).reshape([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape)
        streams = coordinate.reshape(-1).tolist()
        data = World(3, 4).records(streams).exclude(KEY)
        buffer, single = make_buffer(make_storage(5, 3), routing_dim=dim), make_storage(5, 3)
        index = buffer.extend(data.reshape(shape))
        assert index.dtype == torch.int64
        assert index.tolist() == write_one_by_one(single, data, streams)
        assert_same(buffer.storage, single)

    def test_key_and_dim_exclude_each_other(self):
        with pytest.raises(ValueError):
            SlotReplayBuffer(storage=SlotStorage(4, 3), routing_key=KEY, routing_dim=0)

    def test_routing_survives_a_pickle(self):
        buffer = make_buffer(make_storage(5, 3))
        world = World(3)
        buffer.extend(world.records([0, 1]))
        loaded = pickle.loads(pickle.dumps(buffer))
        assert loaded.extend(world.records([1, 1, 2])).tolist() == [[1, 1], [2, 1], [0, 2]]
        assert buffer.storage.head.tolist() == [1, 1, 0]

    @pytest.mark.gpu
    @pytest.mark.parametrize("where", ["cpu", "cuda"])
    def test_records_of_either_device_reach_a_cuda_storage(self, where):
        streams = [2, 0, 2, 1, 1, 1]
        data = World(3, 5).records(streams)
        buffer, single = make_buffer(make_storage(5, 3, "cuda")), make_storage(5, 3)
        assert buffer.extend(data.to(where)).cpu().tolist() == write_one_by_one(single, data, streams)
        assert_same(buffer.storage, single)

    @pytest.mark.gpu
    @pytest.mark.parametrize("streams", [[2, 0, 2, 1, 1, 1], [0, 1, 2, 0, 1, 2]])
    def test_records_on_a_device_reach_a_host_storage(self, streams):
        buffer, single, world = make_buffer(make_storage(5, 3)), make_storage(5, 3), World(3, 5)
        for _ in range(4):
            data = world.records(streams)
            index = buffer.extend(data.to("cuda"))
            assert index.device.type == "cuda"
            assert index.tolist() == write_one_by_one(single, data, streams)
            assert_same(buffer.storage, single)

    @pytest.mark.gpu
    @pytest.mark.parametrize("wrong", [-1, 3, 2**40])
    @pytest.mark.parametrize("filled", [True, False])
    def test_streams_on_a_device_out_of_range_are_refused_by_a_host_storage(self, wrong, filled):
        world, buffer = World(3), make_buffer(make_storage(5, 3))
        if filled:
            buffer.extend(world.records([0, 1]))
        before = buffer.storage.write_count
        data = world.records([2, 0, 1]).to("cuda")
        data[KEY][1] = wrong
        with pytest.raises(ValueError, match="stream ids must be in"):
            buffer.extend(data)
        assert buffer.storage.write_count == before and buffer.storage.initialized == filled

    @pytest.mark.gpu
    def test_index_on_the_host_is_complete_though_the_device_is_busy(self):
        buffer, world = make_buffer(make_storage(64, 3, "cuda")), World(3, eventful=False)
        buffer.extend(world.records([2, 0, 2]))
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        index = buffer.extend(world.records([2, 0, 2, 1, 1, 1]))
        assert index.device.type == "cpu"
        assert index.tolist() == [[2, 2], [1, 0], [3, 2], [0, 1], [1, 1], [2, 1]]


class TestStreamsOnTheDevice:
    """Contract: the host is not told how far streams given on the device go, and learns it when it asks; what the
    device cannot take changes nothing and raises then."""

    CAPACITY, FINALS = 16, 3

    def buffer(self, kind: str) -> Any:
        place = {"device": "cuda"} if kind == "cuda" else {}
        return make_buffer(SlotStorage(self.CAPACITY, 2, final_capacity=self.FINALS, **place))

    @staticmethod
    def cut(world: World, streams: list[int], kind: str) -> TensorDict:
        data = world.records(streams)
        for name in ("done", "truncated"):
            data["next", name].fill_(True)
        return data.to("cuda" if kind == "cuda" else "cpu")

    @pytest.mark.parametrize("kind", ["books on the device", GPU])
    def test_write_that_does_not_fit_the_side_table_changes_nothing(self, kind):
        world = World(2, eventful=False)
        with kept_by(kind):
            buffer = self.buffer(kind)
            buffer.extend(world.records([0, 1, 1]).to(buffer.storage.device))
            before, rows = buffer.storage.head.tolist(), buffer.storage.block.ring.clone()
            index = buffer.extend(self.cut(world, [0, 0, 0, 1], kind))
            assert index.tolist() == [[-1, -1]] * 4
            assert buffer.storage.head.tolist() == before
            assert torch.equal(buffer.storage.block.ring, rows)

    @pytest.mark.parametrize("kind", ["books on the device", GPU])
    def test_refusal_raises_once_when_positions_are_asked_for(self, kind):
        world = World(2, eventful=False)
        with kept_by(kind):
            buffer = self.buffer(kind)
            buffer.extend(self.cut(world, [0, 0, 0, 1], kind))
            with pytest.raises(RuntimeError, match="None of its records was written"):
                len(buffer.storage)
            assert len(buffer.storage) == 0

    @pytest.mark.parametrize("kind", ["books on the device", GPU])
    def test_write_whose_streams_the_host_knows_raises_for_a_refusal_before_it_writes(self, kind, monkeypatch):
        world = World(2, eventful=False)
        if kind != "cuda":  # where the host keeps no books it would know every stream
            known = lambda block, streams: np.bincount(streams, minlength=2) if len(streams) == 3 else None  # noqa: E731
            monkeypatch.setattr(_routed_device, "_known_counts", known)
        with kept_by(kind):
            buffer = self.buffer(kind)
            buffer.extend(self.cut(world, [0, 0, 0, 1], kind))
            rows = buffer.storage.block.ring.clone()
            with pytest.raises(RuntimeError, match="None of its records was written"):
                buffer.extend(world.records([0, 1, 1]))
            assert torch.equal(buffer.storage.block.ring, rows)
            buffer.extend(world.records([0, 1, 1]))
            assert (buffer.storage.head.tolist(), len(buffer.storage)) == ([1, 2], 3)

    @pytest.mark.parametrize("kind", ["books on the device", GPU])
    def test_record_of_a_stream_out_of_range_goes_nowhere_and_has_no_index(self, kind):
        world = World(2, eventful=False)
        with kept_by(kind):
            buffer = self.buffer(kind)
            data = world.records([0, 1, 1]).to(buffer.storage.device)
            checked = check_run(RowLayout.from_tensordict(data), data, where="test", extra="raise", records=True)
            buffer.extend(data)
            streams = torch.tensor([1, 2, -1], device=buffer.storage.device)
            index = _routed_device.write_records_on_device(buffer.storage.block, checked, streams)
            assert index.tolist() == [[2, 1], [-1, -1], [-1, -1]]
            assert buffer.storage.head.tolist() == [1, 3]

    @pytest.mark.parametrize("kind", ["books on the device", GPU])
    def test_writes_go_on_after_a_refusal(self, kind):
        world = World(2, eventful=False)
        with kept_by(kind):
            buffer = self.buffer(kind)
            for _ in range(3):
                buffer.extend(self.cut(world, [0, 0, 0, 1], kind))
                with pytest.raises(RuntimeError, match="None of its records was written"):
                    len(buffer.storage)
                buffer.extend(world.records([0, 1, 1, 1]).to(buffer.storage.device))
            assert buffer.storage.head.tolist() == [3, 9]
            assert (len(buffer.storage), buffer.storage.write_count) == (12, 12)


# ------------------------------------------------------------------------------------------- refused
class TestRefusedBeforeAnythingIsWritten:
    """Contract: what does not fit raises before the first byte is written, whichever record is the bad one."""

    @staticmethod
    def bad(how: str, data: TensorDict) -> Any:
        ids = data[KEY]
        if how == "no ids":
            return data.exclude(KEY)
        if how == "id behind the last":
            ids[-1] = 3
        elif how == "id before the first":
            ids[-1] = -1
        elif how == "id far away":
            ids[0] = 2**40
        elif how == "float ids":
            data[KEY] = ids.float()
        elif how == "bool ids":
            data[KEY] = ids.bool()
        elif how == "two ids a record":
            data[KEY] = ids.expand(-1, 2).clone()
        elif how == "missing field":
            return data.exclude("number")
        elif how == "unknown field":
            data["surprise"] = torch.zeros(len(data))
        elif how == "other dtype":
            data["number"] = data["number"].int()
        elif how == "other shape":
            data["observation"] = data["observation"][:, :2].clone()
        elif how == "truncated without a final observation":
            data = data.exclude(("next", "observation"))
            data["next", "done"][-2] = data["next", "truncated"][-2] = True
            data["next", "terminated"][-2] = False
        elif how == "done without a final observation":
            data = data.exclude(("next", "observation"))
            for name, value in (("done", True), ("truncated", False), ("terminated", False)):
                data["next", name][0] = value
        elif how == "list of records":
            return list(data.unbind(0))
        elif how == "no TensorDict":
            return torch.zeros(4)
        return data

    HOWS = (
        "no ids",
        "id behind the last",
        "id before the first",
        "id far away",
        "float ids",
        "bool ids",
        "two ids a record",
        "missing field",
        "unknown field",
        "other dtype",
        "other shape",
        "truncated without a final observation",
        "done without a final observation",
        "list of records",
        "no TensorDict",
    )

    @pytest.mark.parametrize("how", HOWS)
    @pytest.mark.parametrize("filled", [True, False])
    def test_batch_that_does_not_fit_changes_no_byte(self, how, filled):
        world = World(3, 3)
        layout = RowLayout.from_tensordict(World(3).records([0]))
        buffer = make_buffer(make_storage(4, 3, layout=layout))
        if filled:
            buffer.extend(world.records([0, 1, 2, 2, 1, 0, 1, 1, 1]))
        before = buffer.storage.block.bytes.clone()
        with pytest.raises(REFUSED) as caught:
            buffer.extend(self.bad(how, world.records([2, 1, 0, 2])))
        assert "nothing" in str(caught.value).lower(), f"says not that nothing was written: {caught.value}"
        assert torch.equal(buffer.storage.block.bytes, before)
        assert buffer.extend(world.records([2])).tolist() == [[2 if filled else 0, 2]]

    @pytest.mark.parametrize("how", [how for how in HOWS if "id" in how.split() or "ids" in how or "TensorDict" in how])
    def test_first_batch_that_does_not_fit_leaves_the_storage_without_rows(self, how):
        buffer = make_buffer(make_storage(4, 3))
        with pytest.raises(REFUSED):
            buffer.extend(self.bad(how, World(3).records([2, 1, 0, 2])))
        assert len(buffer) == 0
        assert buffer.extend(World(3).records([1, 1, 0])).tolist() == [[0, 1], [1, 1], [0, 0]]

    @pytest.mark.parametrize(
        ("how", "error"), [("no ids", KeyError), ("float ids", TypeError), ("bool ids", TypeError)]
    )
    def test_errors_are_of_the_usual_types(self, how, error):
        buffer = make_buffer(make_storage(4, 3))
        with pytest.raises(error):
            buffer.extend(self.bad(how, World(3).records([2, 1, 0, 2])))

    @pytest.mark.parametrize(("shape", "dim"), [((4, 3), 0), ((3, 4), 1), ((4,), 0), ((3, 4), 2), ((3,), 1)])
    def test_routing_dim_must_be_a_batch_dim_of_all_streams(self, shape, dim):
        buffer = make_buffer(make_storage(5, 3), routing_dim=dim)
        data = World(3).records([0] * torch.Size(shape).numel()).exclude(KEY).reshape(shape)
        with pytest.raises(REFUSED):
            buffer.extend(data)
        assert len(buffer) == 0

    def test_added_record_of_a_missing_stream_is_refused(self):
        buffer = make_buffer(make_storage(4, 3))
        buffer.extend(World(3).records([0, 1, 2]))
        before = buffer.storage.block.bytes.clone()
        record = World(3).records([1])[0]
        record[KEY].fill_(3)
        with pytest.raises(REFUSED):
            buffer.add(record)
        with pytest.raises(REFUSED):
            buffer.add(World(3).records([1])[0].exclude(KEY))
        assert torch.equal(buffer.storage.block.bytes, before)
