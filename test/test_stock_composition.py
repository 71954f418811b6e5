# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Our parts in TorchRL's slots: what works with stock buffers, samplers and writers, and what raises and names ours."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, TimeoutError

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.data.postprocs import MultiStep
from torchrl.data.replay_buffers.sample_units import Transition
from torchrl.envs import Compose, DoubleToFloat, MultiStepTransform, Reward2GoTransform, RewardScaling

from torchrl_ext.data import (
    PrioritizedTransitionSampler,
    SlotReplayBuffer,
    SlotStorage,
    SlotWriter,
    TransitionSampler,
)
from torchrl_ext.data._block import RESERVED

STREAMS = 3


def run(first: int, num_steps: int, num_streams: int = STREAMS, *, ends: int = 5) -> TensorDict:
    """Observation ``1000 * stream + step``; every ``ends``-th step terminates, and its successor is negative."""
    step = torch.arange(first, first + num_steps).view(-1, 1, 1).expand(-1, num_streams, 1)
    stream = torch.arange(num_streams).view(1, -1, 1).expand_as(step)
    here = (1000 * stream + step).float()
    done = (step + 1) % ends == 0
    data = {
        "observation": here,
        "episode": (step // ends + 100 * stream).squeeze(-1),
        "next": {
            "observation": torch.where(done, -here, here + 1),
            "reward": step.float(),
            "done": done,
            "terminated": done,
            "truncated": torch.zeros_like(done),
        },
    }
    return TensorDict(data, [num_steps, num_streams])


def stream_major(first: int, num_steps: int) -> TensorDict:
    return run(first, num_steps).transpose(0, 1).contiguous()


def assert_true_successors(sample: TensorDict) -> None:
    # A slice sampler marks the end of its windows in ``done`` and ``truncated``; ``terminated`` is the record's own.
    here, after = sample["observation"], sample["next", "observation"]
    assert torch.equal(after, torch.where(sample["next", "terminated"], -here, here + 1))


def twice_the_reward(sample: TensorDict) -> TensorDict:
    return sample.set(("next", "reward"), 2 * sample["next", "reward"])


class TestStockReplayBuffer:
    """Contract: a stock buffer over our storage samples live rows with true successors."""

    @pytest.mark.parametrize("writer", [RoundRobinWriter, SlotWriter])
    @pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
    def test_random_sampler_gives_true_successors_across_wraps(self, kind, writer):
        if kind is TensorDictReplayBuffer and writer is RoundRobinWriter:
            writer = None  # its own default, a TensorDictRoundRobinWriter
        options = {} if writer is None else {"writer": writer()}
        buffer = kind(storage=SlotStorage(7, STREAMS), sampler=RandomSampler(), batch_size=64, **options)
        for first in range(0, 30, 3):
            buffer.extend(stream_major(first, 3))
            sample = buffer.sample()
            assert_true_successors(sample)
            low = max(0, first + 3 - 7)
            assert int((sample["observation"] % 1000).min()) >= low
        assert len(buffer) == 7 * STREAMS

    def test_transition_sampler_of_one_step_works_in_a_stock_buffer(self):
        buffer = ReplayBuffer(storage=SlotStorage(7, STREAMS), sampler=TransitionSampler(), batch_size=32)
        buffer.extend(stream_major(0, 6))
        assert_true_successors(buffer.sample())

    def test_transition_sampler_of_several_steps_raises_and_names_the_buffer(self):
        buffer = ReplayBuffer(storage=SlotStorage(7, STREAMS), sampler=TransitionSampler(3), batch_size=32)
        buffer.extend(stream_major(0, 6))
        with pytest.raises(RuntimeError, match="SlotReplayBuffer"):
            buffer.sample()

    def test_slice_sampler_gives_consecutive_steps_of_one_episode(self):
        sampler = SliceSampler(slice_len=3, traj_key="episode", strict_length=True)
        buffer = TensorDictReplayBuffer(storage=SlotStorage(20, STREAMS), sampler=sampler, batch_size=12)
        buffer.extend(stream_major(0, 10))
        for _ in range(5):
            windows = buffer.sample().reshape(4, 3)
            assert torch.equal(windows["episode"], windows["episode"][:, :1].expand(4, 3))
            assert torch.equal(windows["observation"].diff(dim=1), torch.ones(4, 2, 1))
            assert_true_successors(windows.reshape(-1))

    def test_sampler_without_replacement_visits_each_row_once(self):
        buffer = ReplayBuffer(storage=SlotStorage(20, STREAMS), sampler=SamplerWithoutReplacement(), batch_size=6)
        buffer.extend(stream_major(0, 10))
        seen = torch.cat([buffer.sample()["observation"] for _ in range(5)]).flatten()
        assert sorted(seen.tolist()) == sorted(run(0, 10)["observation"].flatten().tolist())

    @pytest.mark.parametrize(
        "sampler", [SamplerWithoutReplacement, lambda: SliceSampler(slice_len=2, traj_key="episode")]
    )
    def test_stock_sampler_raises_and_names_ours_when_streams_are_apart(self, sampler):
        storage = SlotStorage(20, STREAMS)
        buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler(), batch_size=6)
        storage.extend_batch(run(0, 10))
        storage.extend_batch(run(10, 2)[:, :1], streams=slice(0, 1))
        with pytest.raises(RuntimeError, match="TransitionSampler"):
            buffer.sample()

    @pytest.mark.parametrize(
        "sampler", [SamplerWithoutReplacement, lambda: SliceSampler(num_slices=2, traj_key="episode")]
    )
    def test_stock_sampler_raises_while_slots_that_a_killed_writer_tore_are_in_the_way(self, sampler):
        storage = SlotStorage(8, STREAMS)
        storage.extend_batch(run(0, 11))
        state = storage.state_dict()
        state["positions"][RESERVED] += 2
        storage.load_state_dict(state)
        buffer = ReplayBuffer(storage=storage, sampler=sampler(), writer=SlotWriter(), batch_size=6)
        with pytest.raises(RuntimeError, match="live steps from 5 to 10.*SlotReplayBuffer"):
            buffer.sample()
        storage.extend_batch(run(11, 2))
        assert_true_successors(buffer.sample())

    def test_random_sampler_works_when_streams_are_apart(self):
        storage = SlotStorage(20, STREAMS)
        buffer = ReplayBuffer(storage=storage, sampler=RandomSampler(), batch_size=256)
        storage.extend_batch(run(0, 10))
        storage.extend_batch(run(10, 5)[:, :1], streams=slice(0, 1))
        sample = buffer.sample()
        assert_true_successors(sample)
        assert float((sample["observation"] < 1000).float().mean()) == pytest.approx(15 / 35, abs=0.15)

    def test_prefetch_and_transform_work(self):
        buffer = ReplayBuffer(
            storage=SlotStorage(20, STREAMS),
            sampler=RandomSampler(),
            batch_size=8,
            prefetch=2,
            transform=RewardScaling(loc=0.0, scale=10.0, in_keys=[("next", "reward")]),
        )
        buffer.extend(stream_major(0, 10))
        for _ in range(4):
            sample = buffer.sample()
            assert torch.equal(sample["next", "reward"], 10 * (sample["observation"] % 1000))

    def test_extend_accepts_a_plain_sequence_of_one_stream(self):
        buffer = ReplayBuffer(storage=SlotStorage(4), writer=SlotWriter(), batch_size=2)
        index = buffer.extend(run(0, 3, 1).transpose(0, 1))
        assert index.tolist() == [[0, 0], [1, 0], [2, 0]]

    def test_add_writes_one_step_of_all_streams(self):
        buffer = ReplayBuffer(storage=SlotStorage(4, STREAMS), sampler=RandomSampler(), batch_size=2)
        for step in range(6):
            buffer.add(run(step, 1)[0])
        assert len(buffer) == 12
        assert buffer.storage["observation"][:, 0, 0].tolist() == [4.0, 5.0, 2.0, 3.0]

    def test_state_dict_of_a_stock_buffer_restores_rows_and_positions(self):
        old = ReplayBuffer(storage=SlotStorage(4, STREAMS), sampler=RandomSampler(), batch_size=4)
        old.extend(stream_major(0, 6))
        new = ReplayBuffer(storage=SlotStorage(4, STREAMS), sampler=RandomSampler(), batch_size=4)
        new.load_state_dict(old.state_dict())
        assert torch.equal(new.storage["observation"], old.storage["observation"])
        assert torch.equal(new.storage.head, old.storage.head)
        new.extend(stream_major(6, 1))  # the stock writer's cursor came along

    def test_revision_that_stock_samplers_remember_is_new_after_a_load(self):
        """TorchRL's trajectory indices are made anew when ``_mutation_revision`` has changed, and only then."""
        storage = SlotStorage(20, STREAMS)
        storage.extend_batch(run(0, 3))
        states, seen = [storage.state_dict()], {storage._mutation_revision}
        storage.extend_batch(run(3, 1))
        states.append(storage.state_dict())
        seen.add(storage._mutation_revision)
        for turn in range(4 * STREAMS):
            storage.load_state_dict(states[turn % 2])
            assert storage._mutation_revision not in seen
            seen.add(storage._mutation_revision)

    def test_content_is_changed_under_the_lock_of_the_storage(self):
        storage = SlotStorage(20, STREAMS)
        storage.extend_batch(run(0, 4))
        changed = run(10, 1)[0].select("observation", "episode")

        def change() -> None:
            storage[2] = changed

        with ThreadPoolExecutor(1) as other:
            with storage._lock:
                done = other.submit(change)
                with pytest.raises(TimeoutError):
                    done.result(0.1)
                assert storage["observation"][2, 0].item() == 2.0
            done.result(30.0)
        assert storage["observation"][2, 0].item() == 10.0

    def test_index_generation_of_our_writer_in_a_stock_buffer_is_that_of_the_storage(self):
        buffer = ReplayBuffer(
            storage=SlotStorage(4, STREAMS), writer=SlotWriter(), sampler=RandomSampler(), batch_size=16
        )
        buffer.extend(stream_major(0, 6))
        sample, info = buffer.sample(return_info=True)
        step = info["index_generation"] * 4 + info["index"][0]
        assert torch.equal(step, (sample["observation"].flatten() % 1000).long())


class TestWhatCannotWork:
    """Contract: a stock part that would be silently wrong raises and names the part that works."""

    def test_stock_writer_raises_when_streams_are_not_at_its_cursor(self):
        storage = SlotStorage(4, STREAMS)
        buffer = ReplayBuffer(storage=storage, sampler=RandomSampler(), batch_size=4)
        storage.extend_batch(run(0, 1))
        before = storage.state_dict()["ring"].clone()
        with pytest.raises(RuntimeError, match="SlotWriter"):
            buffer.extend(stream_major(1, 1))
        assert torch.equal(storage.state_dict()["ring"], before)

    def test_stock_writer_with_a_generation_table_raises_before_writing(self):
        storage = SlotStorage(4, STREAMS)
        buffer = ReplayBuffer(
            storage=storage, writer=RoundRobinWriter(track_generations=True), sampler=RandomSampler(), batch_size=4
        )
        with pytest.raises(RuntimeError, match="SlotWriter"):
            buffer.extend(stream_major(0, 1))
        assert len(storage) == 0

    def test_stock_update_if_present_raises_and_names_our_buffer(self):
        buffer = ReplayBuffer(storage=SlotStorage(4, STREAMS), writer=SlotWriter(), batch_size=4)
        buffer.extend(stream_major(0, 2))
        _, info = buffer.sample(return_info=True)
        index = torch.stack(info["index"], -1)
        with pytest.raises(RuntimeError, match="SlotReplayBuffer"):
            buffer.update_if_present(
                index=index, generation=info["index_generation"], patch={"observation": torch.zeros(4, 1)}
            )

    def test_our_writer_refuses_another_storage(self):
        with pytest.raises(TypeError, match="SlotStorage"):
            ReplayBuffer(storage=LazyTensorStorage(4), writer=SlotWriter())

    def test_our_buffer_refuses_another_storage(self):
        with pytest.raises(TypeError, match="SlotStorage"):
            SlotReplayBuffer(storage=LazyTensorStorage(4))

    def test_our_sampler_refuses_another_storage(self):
        buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=TransitionSampler(), batch_size=2)
        buffer.extend(run(0, 4)[:, 0])
        with pytest.raises(TypeError, match="SlotStorage"):
            buffer.sample()


class TestSlotReplayBufferWithStockParts:
    """Contract: transforms, iteration, stock samplers and a change of storage work as in TorchRL."""

    def test_random_sampler_in_our_buffer_gives_handles(self):
        buffer = SlotReplayBuffer(storage=SlotStorage(7, STREAMS), sampler=RandomSampler(), batch_size=16)
        buffer.extend_batch(run(0, 9))
        sample = buffer.sample()
        assert_true_successors(sample)
        assert torch.equal(buffer.storage.generation_of(sample["index"]), sample["index_generation"])

    def test_forward_transforms_run_after_the_transition_is_assembled(self):
        transform = Compose(DoubleToFloat(), RewardScaling(loc=1.0, scale=2.0, in_keys=[("next", "reward")]))
        buffer = SlotReplayBuffer(
            storage=SlotStorage(8), sampler=TransitionSampler(2, 1.0), batch_size=32, transform=transform
        )
        buffer.extend_batch(run(0, 5, 1, ends=100))
        sample = buffer.sample()
        first = sample["observation"].flatten()
        used = sample["steps_to_next_obs"].flatten()
        total = torch.where(used == 2, 2 * first + 1, first)
        assert torch.equal(sample["next", "reward"].flatten(), 2 * total + 1)

    def test_iteration_without_replacement_ends_after_one_pass(self):
        buffer = SlotReplayBuffer(
            storage=SlotStorage(8, STREAMS), sampler=TransitionSampler(replacement=False), batch_size=5
        )
        buffer.extend_batch(run(0, 5))
        seen = torch.cat([sample["observation"] for sample in buffer]).flatten().tolist()
        assert sorted(seen) == sorted(run(0, 5)["observation"].flatten().tolist())

    def test_set_storage_registers_the_writer_and_resets_the_sampler(self):
        buffer = SlotReplayBuffer(
            storage=SlotStorage(8, STREAMS), sampler=TransitionSampler(replacement=False), batch_size=5
        )
        buffer.extend_batch(run(0, 5))
        buffer.sample()
        other = SlotStorage(4, 1)
        old = buffer.set_storage(other)
        assert old is not other
        buffer.extend_batch(run(7, 2, 1))
        assert len(old) == 15
        assert sorted(buffer.sample(2)["observation"].flatten().tolist()) == [7.0, 8.0]

    def test_set_storage_refuses_another_kind_and_keeps_the_old_one(self):
        buffer = SlotReplayBuffer(storage=SlotStorage(8, STREAMS), batch_size=5)
        buffer.extend_batch(run(0, 5))
        with pytest.raises(TypeError, match="SlotStorage"):
            buffer.set_storage(LazyTensorStorage(4))
        assert len(buffer) == 15
        buffer.sample()

    def test_collector_keys_are_dropped_on_request(self):
        buffer = SlotReplayBuffer(storage=SlotStorage(8, STREAMS, extra="drop"), batch_size=5)
        buffer.extend_batch(run(0, 2))
        more = run(2, 2)
        more["collector", "traj_ids"] = torch.zeros(2, STREAMS, dtype=torch.int64)
        buffer.extend_batch(more)
        assert ("collector", "traj_ids") not in buffer.sample().keys(True, True)

    @pytest.mark.parametrize("sampler", [RandomSampler, TransitionSampler])
    @pytest.mark.parametrize("how", ["delayed_init", "transform_factory"])
    @pytest.mark.parametrize(
        "use",
        [
            lambda buffer: buffer.extend(stream_major(0, 4)),
            lambda buffer: buffer.extend_batch(run(0, 4)),
            lambda buffer: buffer.add(run(0, 1)[0]),
            lambda buffer: buffer.end_streams(),
            lambda buffer: buffer.empty(),
            lambda buffer: buffer.set_storage(SlotStorage(9, STREAMS)),
            lambda buffer: buffer.update_priority(torch.zeros(1, 2).long(), 1.0),
        ],
        ids=["extend", "extend_batch", "add", "end_streams", "empty", "set_storage", "update_priority"],
    )
    def test_parts_that_are_made_late_are_made_by_the_first_use(self, sampler, how, use):
        late = {"delayed_init": True} if how == "delayed_init" else {"transform_factory": lambda: twice_the_reward}
        buffer = SlotReplayBuffer(storage=lambda: SlotStorage(8, STREAMS), sampler=sampler, batch_size=16, **late)
        assert not buffer.initialized
        use(buffer)
        assert buffer.initialized
        buffer.extend(stream_major(0, 4))
        sample = buffer.sample()
        scale = 1 if how == "delayed_init" else 2
        assert torch.equal(sample["next", "reward"], scale * (sample["observation"] % 1000))

    @pytest.mark.parametrize("how", ["update_if_present", "submit_update_if_present"])
    def test_update_of_a_buffer_whose_parts_are_made_late_is_checked(self, how):
        buffer = SlotReplayBuffer(storage=lambda: SlotStorage(8, STREAMS), delayed_init=True)
        with pytest.raises(KeyError, match="must be one of"):
            getattr(buffer, how)(
                index=torch.zeros(1, 2).long(), generation=torch.zeros(1).long(), patch={"reward": torch.zeros(1)}
            )

    def test_samples_of_a_stock_sampler_are_moved_and_made_contiguous_too(self):
        buffer = SlotReplayBuffer(
            storage=SlotStorage(8, STREAMS), sampler=RandomSampler(), batch_size=16, sample_device="meta"
        )
        buffer.extend_batch(run(0, 5))
        sample = buffer.sample()
        assert sample.device == torch.device("meta") and sample["observation"].is_meta
        sample = buffer.sample(contiguous=True, device="cpu")
        assert all(leaf.is_contiguous() and leaf.device.type == "cpu" for leaf in sample.values(True, True))
        assert_true_successors(sample)

    @pytest.mark.parametrize(
        "options",
        [{"collate_fn": lambda data: data}, {"sample_unit": Transition()}, {"dim_extend": 0}],
        ids=["collate_fn", "sample_unit", "dim_extend"],
    )
    def test_option_that_would_be_ignored_is_refused(self, options):
        with pytest.raises(ValueError, match=next(iter(options))):
            SlotReplayBuffer(storage=SlotStorage(8, STREAMS), **options)
        SlotReplayBuffer(storage=SlotStorage(8, STREAMS), **dict.fromkeys(options))

    def test_options_of_stock_sampling_serve_stock_samplers(self):
        collate = SlotReplayBuffer(
            storage=SlotStorage(8, STREAMS),
            sampler=RandomSampler(),
            batch_size=4,
            collate_fn=lambda data: data.select("observation"),
            sample_unit=Transition(),
        )
        collate.extend_batch(run(0, 5))
        assert "next" not in collate.sample().keys()


# ---------------------------------------------------------------------------------- transforms that look along time


def with_ids(data: TensorDict) -> TensorDict:
    return data.set("env_index", torch.arange(STREAMS).unsqueeze(-1).expand(data.shape))


@pytest.mark.parametrize("routing", [{}, {"routing_key": "env_index"}, {"routing_dim": 0}], ids=str)
def test_an_inverse_transform_of_extend_finds_time_where_torchrl_has_it(routing: dict) -> None:
    stock = TensorDictReplayBuffer(storage=LazyTensorStorage(60, ndim=2), batch_size=4)
    ours = SlotReplayBuffer(storage=SlotStorage(20, STREAMS), batch_size=4, **routing)
    for replay in (stock, ours):
        replay.append_transform(Reward2GoTransform(gamma=0.5, out_keys=["to_go"]))
        replay.extend(with_ids(stream_major(0, 8)))
    assert torch.equal(ours[:]["to_go"], stock[:]["to_go"])


def test_an_inverse_transform_of_a_time_major_run_finds_time_where_torchrl_has_it() -> None:
    stock = TensorDictReplayBuffer(storage=LazyTensorStorage(60, ndim=2), batch_size=4)
    ours = SlotReplayBuffer(storage=SlotStorage(20, STREAMS), batch_size=4)
    for replay in (stock, ours):
        replay.append_transform(Reward2GoTransform(gamma=0.5, out_keys=["to_go"]))
    stock.extend(stream_major(0, 8))
    ours.extend_batch(stream_major(0, 8).transpose(0, 1))
    assert torch.equal(ours[:]["to_go"], stock[:]["to_go"])


def test_a_run_that_a_transform_keeps_for_later_is_refused() -> None:
    ours = SlotReplayBuffer(storage=SlotStorage(20, STREAMS), batch_size=4, transform=MultiStepTransform(3, 0.5))
    with pytest.raises(ValueError, match="must return the run, got None .* Nothing was written; use extend"):
        ours.extend_batch(stream_major(0, 2).transpose(0, 1))
    assert len(ours) == 0


def test_a_writer_of_another_kind_is_refused() -> None:
    ours = SlotReplayBuffer(storage=SlotStorage(20, STREAMS), batch_size=4)
    before = ours.writer
    with pytest.raises(TypeError, match="set_writer needs a SlotWriter, got TensorDictRoundRobinWriter"):
        ours.set_writer(TensorDictRoundRobinWriter())
    assert ours.writer is before and ours.set_writer(SlotWriter()) is before


def test_a_transform_that_keeps_the_data_for_later_writes_nothing_yet() -> None:
    ours = SlotReplayBuffer(storage=SlotStorage(20, STREAMS), batch_size=4, transform=MultiStepTransform(3, 0.5))
    assert ours.extend(stream_major(0, 2)).shape == (0, 2)
    assert len(ours) == 0
    ours.extend(stream_major(2, 8))
    assert torch.equal(ours[:]["observation"], stream_major(0, 10)["observation"][:, : len(ours) // STREAMS])


@pytest.mark.parametrize("sampler", [TransitionSampler, PrioritizedTransitionSampler])
def test_rows_with_finished_returns_are_not_drawn_with_other_returns(sampler: type) -> None:
    ours = SlotReplayBuffer(storage=SlotStorage(20, STREAMS, next_obs="store"), sampler=sampler(), batch_size=4)
    ours.extend(MultiStep(gamma=0.5, n_steps=3)(stream_major(0, 10)))
    with pytest.raises(ValueError, match=r"keys of a finished return.*got \['steps_to_next_obs'\]. Nothing was drawn"):
        ours.sample()


def test_a_stock_buffer_draws_finished_returns_as_they_were_stored() -> None:
    stock = TensorDictReplayBuffer(storage=SlotStorage(20, STREAMS), batch_size=32)
    finished = MultiStep(gamma=0.5, n_steps=3)(stream_major(0, 10))
    stock.extend(finished)
    sample = stock.sample()
    slot, stream = sample["index"].unbind(-1)
    for key in (("next", "observation"), ("next", "reward"), "steps_to_next_obs"):
        assert torch.equal(sample[key], finished[stream, slot][key])


# ------------------------------------------------------------------------------------------------- the order of time


def test_extend_names_a_time_major_batch_that_has_as_many_steps_as_streams() -> None:
    ours = SlotReplayBuffer(storage=SlotStorage(20, STREAMS), batch_size=4)
    data = run(0, STREAMS)
    data.names = ["time", None]
    with pytest.raises(ValueError, match=r"^extend: .*got \[3, 3\] with names \['time', None\].*to extend_batch"):
        ours.extend(data)
    ours.extend_batch(data)
    assert len(ours) == STREAMS * STREAMS
