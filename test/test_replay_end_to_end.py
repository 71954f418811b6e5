# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Truncation end to end: an environment whose observations are (stream, episode, step), through rollouts, collectors
and both buffers. Whatever is drawn, its successor must be the same episode, ``k`` steps later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _reference import state_bytes
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import RandomSampler, ReplayBuffer, SamplerWithoutReplacement, SliceSampler
from torchrl.envs import StepCounter, TransformedEnv
from torchrl.envs.utils import check_env_specs

from torchrl_ext.data import RowLayout, SlotReplayBuffer, SlotStorage, SlotWriter, TransitionSampler
from torchrl_ext.testing import CountingEnv

GAMMA = 0.9
STREAMS = 3
CAPACITY = 7
DRAWS = 600  # of at most 21 rows: one is missed with probability 1e-11
LENGTHS = [2, [3, 5, 1], 11]
ENDS = ["truncated", "terminated", "both"]

N_STEPS = pytest.mark.parametrize("n_steps", [1, 3])
NEXT_OBS = pytest.mark.parametrize("next_obs", ["derive", "store"])
SOURCES = pytest.mark.parametrize("source", ["collector", "rollouts", "continued", "reset between collectors"])


def make_env(**kwargs: Any) -> CountingEnv:
    kwargs.setdefault("ends", ENDS)
    return CountingEnv(STREAMS, LENGTHS, **kwargs)


def batches(source: str, count: int = 8, steps: int = 4) -> Iterator[TensorDict]:
    """[N, T] batches, as TorchRL hands them out."""
    env = make_env()
    if source == "collector":
        frames = STREAMS * steps
        collector = Collector(env, None, frames_per_batch=frames, total_frames=frames * count)
        for batch in collector:
            yield batch.clone()  # a collector may hand out the same memory again
        collector.shutdown()
    elif source == "rollouts":
        for _ in range(count):  # every rollout begins with a reset that no flag announces
            yield env.rollout(steps, break_when_any_done=False)
    elif source == "continued":
        carry = env.reset()
        for _ in range(count):
            rows = []
            for _ in range(steps):
                carry = env.rand_action(carry)
                row, carry = env.step_and_maybe_reset(carry)
                rows.append(row.clone())
            yield torch.stack(rows, 1)
    else:
        for _ in range(2):
            frames = STREAMS * steps
            collector = Collector(env, None, frames_per_batch=frames, total_frames=frames * count // 2)
            for batch in collector:
                yield batch.clone()
            collector.shutdown(close_env=False)


def stored_rows(history: list[TensorDict], capacity: int) -> set[tuple[int, int, int]]:
    """Identities of the newest ``capacity`` rows of each stream."""
    rows = torch.cat(list(history), 1)["observation"][:, -capacity:]
    return {tuple(row) for row in CountingEnv.identity(rows).reshape(-1, 3).tolist()}


def true_steps(history: list[TensorDict], capacity: int, n_steps: int) -> dict[tuple[int, int, int], int]:
    """Steps that a return from each stored row may use: to its episode's last stored row, or ``n_steps``."""
    rows = torch.cat(list(history), 1)["observation"][:, -capacity:]
    out = {}
    for column in CountingEnv.identity(rows).tolist():
        for i, (stream, episode, step) in enumerate(column):
            same = [e == episode for _, e, _ in column[i : i + n_steps]]
            out[stream, episode, step] = same.index(False) if False in same else len(same)
    return out


def assert_true_successors(sample: TensorDict, env: CountingEnv, n_steps: int) -> set[tuple[int, int, int]]:
    """Every row of the sample is one true transition of the environment. Returns which rows were drawn."""
    here = CountingEnv.identity(sample["observation"])
    there = CountingEnv.identity(sample["next", "observation"])
    assert torch.equal(sample["privileged", "code"], CountingEnv.code_of(here)), "the two observations disagree"
    assert torch.equal(sample["next", "privileged", "code"], CountingEnv.code_of(there)), "the successors disagree"
    used = sample.get("steps_to_next_obs", torch.ones(len(here), 1, dtype=torch.int64)).flatten()
    flags = {name: sample["next", name].flatten().tolist() for name in ("done", "terminated", "truncated")}
    returns = sample["next", "reward"].flatten().tolist()
    if "discount" in sample.keys():
        torch.testing.assert_close(sample["discount"].flatten(), GAMMA ** used.float())
    drawn = set()
    for i, (row, successor, k) in enumerate(zip(here.tolist(), there.tolist(), used.tolist(), strict=True)):
        stream, episode, step = row
        assert 1 <= k <= n_steps
        assert successor == [stream, episode, step + k], f"{row} is followed by {successor} after {k} steps"
        ended = step + k == env.length_of(stream, episode)
        end = env.end_of(stream, episode) if ended else ""
        assert flags["done"][i] == ended
        assert flags["terminated"][i] == (end in ("terminated", "both"))
        assert flags["truncated"][i] == (end in ("truncated", "both"))
        rewards = [100 * stream + 10 * episode + step + j + 1 for j in range(k)]
        assert returns[i] == pytest.approx(sum(GAMMA**j * reward for j, reward in enumerate(rewards)), rel=1e-5)
        drawn.add((stream, episode, step))
    return drawn


def make_buffer(n_steps: int, next_obs: str, **kwargs: Any) -> SlotReplayBuffer:
    return SlotReplayBuffer(
        storage=SlotStorage(CAPACITY, STREAMS, next_obs=next_obs),
        sampler=TransitionSampler(n_steps, GAMMA),
        generator=torch.Generator().manual_seed(1),
        **kwargs,
    )


class TestCountingEnvironment:
    """Contract: a real TorchRL environment; successor (s, e, t + 1), reset (s, e + 1, 0); ends as configured."""

    @pytest.mark.parametrize("ends", [*ENDS, ENDS])
    def test_specs_hold(self, ends):
        check_env_specs(make_env(ends=ends), break_when_any_done="both")

    def test_end_of_an_episode_shows_the_final_observation_and_the_next_root_the_reset(self):
        env = CountingEnv(2, [2, 3], ends="truncated")
        data = env.rollout(4, break_when_any_done=False)
        assert CountingEnv.identity(data["next", "observation"][0, 1]).tolist() == [0, 0, 2]
        assert CountingEnv.identity(data["observation"][0, 2]).tolist() == [0, 1, 0]
        assert data["next", "truncated"][0, 1].item() and not data["next", "terminated"][0, 1].item()

    @pytest.mark.parametrize("ends", ENDS)
    def test_flags_are_those_configured(self, ends):
        data = CountingEnv(1, 1, ends=ends).rollout(1)
        assert data["next", "done"].all()
        assert data["next", "terminated"].item() == (ends != "truncated")
        assert data["next", "truncated"].item() == (ends != "terminated")

    def test_streams_reset_apart(self):
        env = CountingEnv(2, 9)
        td = env.rollout(3)[:, -1]["next"].select("observation")
        td["_reset"] = torch.tensor([[True], [False]])
        assert CountingEnv.identity(env.reset(td)["observation"]).tolist() == [[0, 1, 0], [1, 0, 3]]

    def test_stepping_past_the_end_raises(self):
        env = CountingEnv(1, 1)
        td = env.rand_action(env.reset())
        env.step(td)
        with pytest.raises(RuntimeError, match="stream 0 must be reset"):
            env.step(td)

    @pytest.mark.parametrize("kwargs", [{"lengths": [1, 2]}, {"lengths": 0}, {"lengths": [1, 0, 1]}, {"ends": "bored"}])
    def test_nonsense_is_refused(self, kwargs):
        with pytest.raises(ValueError, match="CountingEnv"):
            CountingEnv(3, **kwargs)


class TestSlotReplayBufferOnRealData:
    """Contract: every sampled transition has its true successor, never a reset observation, across wraps."""

    @SOURCES
    @N_STEPS
    @NEXT_OBS
    def test_every_draw_has_its_true_successor(self, source, n_steps, next_obs):
        buffer, env, history = make_buffer(n_steps, next_obs), make_env(), []
        for batch in batches(source):
            history.append(batch)
            buffer.extend(batch)
            sample = buffer.sample(DRAWS)
            drawn = assert_true_successors(sample, env, n_steps)
            assert drawn == stored_rows(history, CAPACITY)

    @SOURCES
    @N_STEPS
    def test_returns_are_as_long_as_the_episode_allows(self, source, n_steps):
        buffer, history = make_buffer(n_steps, "derive"), []
        for batch in batches(source):
            history.append(batch)
            buffer.extend(batch)
            expected = true_steps(history, CAPACITY, n_steps)
            sample = buffer.sample(DRAWS)
            for row, used in zip(sample["observation"].tolist(), sample["steps_to_next_obs"].tolist(), strict=True):
                assert used == [expected[tuple(map(int, row))]], row

    @pytest.mark.parametrize("how", ["extend_batch", "packed", "add"])
    @N_STEPS
    def test_every_write_path_keeps_true_successors(self, how, n_steps):
        buffer, env, history = make_buffer(n_steps, "derive"), make_env(), []
        for batch in batches("collector"):
            history.append(batch)
            run = batch.transpose(0, 1)
            if how == "extend_batch":
                buffer.extend_batch(run)
            elif how == "packed":
                buffer.extend_batch(RowLayout.from_tensordict(run).pack(run))
            else:
                for step in run.unbind(0):
                    buffer.add(step)
            assert assert_true_successors(buffer.sample(DRAWS), env, n_steps) == stored_rows(history, CAPACITY)

    @N_STEPS
    def test_batches_longer_than_the_storage_keep_true_successors(self, n_steps):
        buffer, env, history = make_buffer(n_steps, "derive"), make_env(), []
        for batch in batches("collector", count=4, steps=2 * CAPACITY + 3):
            history.append(batch)
            buffer.extend(batch)
            assert assert_true_successors(buffer.sample(DRAWS), env, n_steps) == stored_rows(history, CAPACITY)

    @N_STEPS
    def test_collectors_of_column_blocks_keep_true_successors(self, n_steps):
        """Two collectors, one storage: streams 0, 1 and stream 2 advance at their own pace."""
        buffer = make_buffer(n_steps, "derive")
        pairs = CountingEnv(2, LENGTHS[:2], ends=ENDS), CountingEnv(1, LENGTHS[2:], ends=ENDS, first_stream=2)
        left = Collector(pairs[0], None, frames_per_batch=2 * 5, total_frames=2 * 5 * 6)
        right = Collector(pairs[1], None, frames_per_batch=2, total_frames=2 * 6)
        reference = make_env()
        for a, b in zip(left, right, strict=True):
            buffer.extend_batch(a.transpose(0, 1), streams=slice(0, 2))
            buffer.extend_batch(b.transpose(0, 1), streams=slice(2, 3))
            assert_true_successors(buffer.sample(DRAWS), reference, n_steps)
        left.shutdown()
        right.shutdown()
        assert buffer.storage.head.tolist() == [30, 30, 12]

    @N_STEPS
    @pytest.mark.parametrize("prefetch", [1, 3])
    def test_prefetched_draws_keep_true_successors(self, n_steps, prefetch):
        buffer, env = make_buffer(n_steps, "derive", batch_size=64, prefetch=prefetch), make_env()
        for batch in batches("collector"):
            buffer.extend(batch)
            for _ in range(4):
                assert_true_successors(buffer.sample(), env, n_steps)

    @N_STEPS
    def test_draws_without_replacement_keep_true_successors(self, n_steps):
        env, history = make_env(), []
        sampler = TransitionSampler(n_steps, GAMMA, replacement=False)
        buffer = SlotReplayBuffer(storage=SlotStorage(CAPACITY, STREAMS), sampler=sampler, batch_size=CAPACITY)
        for batch in batches("rollouts"):
            history.append(batch)
            buffer.extend(batch)
            drawn = set()
            for _ in range(8):
                drawn |= assert_true_successors(buffer.sample(), env, n_steps)
            assert drawn <= stored_rows(history, CAPACITY)

    def test_collector_keys_unknown_to_the_layout_are_refused_or_dropped_as_asked(self):
        plain = make_env().rollout(4, break_when_any_done=False)
        layout = RowLayout.from_tensordict(plain.transpose(0, 1))
        strict = SlotReplayBuffer(storage=SlotStorage(CAPACITY, STREAMS, layout=layout))
        lenient = SlotReplayBuffer(storage=SlotStorage(CAPACITY, STREAMS, layout=layout, extra="drop"))
        for batch in batches("collector", count=1):
            with pytest.raises((KeyError, ValueError), match="traj_ids"):
                strict.extend(batch)
            lenient.extend(batch)
        assert len(strict) == 0 and len(lenient) == 12


class TestStockReplayBufferOnRealData:
    """Contract: ``torchrl.data.ReplayBuffer`` with ``RandomSampler`` over a ``SlotStorage`` draws sampleable rows
    with their one-step successors."""

    WRITERS = pytest.mark.parametrize("writer", ["stock", "slot"])

    @staticmethod
    def make(writer: str, next_obs: str = "derive", **kwargs: Any) -> ReplayBuffer:
        if writer == "slot":
            kwargs["writer"] = SlotWriter()
        return ReplayBuffer(
            storage=SlotStorage(CAPACITY, STREAMS, next_obs=next_obs),
            sampler=RandomSampler(),
            batch_size=DRAWS,
            generator=torch.Generator().manual_seed(1),
            **kwargs,
        )

    @SOURCES
    @NEXT_OBS
    def test_every_draw_has_its_true_successor(self, source, next_obs):
        buffer, env, history = self.make("slot", next_obs), make_env(), []
        for batch in batches(source):
            history.append(batch)
            buffer.extend(batch)
            drawn = assert_true_successors(buffer.sample(), env, 1)
            assert drawn == stored_rows(history, CAPACITY)

    def test_stock_writer_drives_the_storage_too(self):
        """All streams stand at its cursor; runs no longer than the storage."""
        buffer, env, history = self.make("stock"), make_env(), []
        for batch in batches("collector"):
            history.append(batch)
            buffer.extend(batch)
            assert assert_true_successors(buffer.sample(), env, 1) == stored_rows(history, CAPACITY)
            assert len(buffer) == min(CAPACITY * STREAMS, 4 * STREAMS * len(history))

    def test_prefetched_draws_keep_true_successors(self):
        buffer, env = self.make("slot", prefetch=2), make_env()
        for batch in batches("collector"):
            buffer.extend(batch)
            for _ in range(4):
                assert_true_successors(buffer.sample(), env, 1)

    def test_collector_fills_the_buffer_by_itself(self):
        """``Collector(..., replay_buffer=...)`` extends and yields nothing."""
        env = make_env()
        buffer = self.make("slot")
        frames = STREAMS * 4
        collector = Collector(env, None, frames_per_batch=frames, total_frames=8 * frames, replay_buffer=buffer)
        for _ in collector:
            assert_true_successors(buffer.sample(), make_env(), 1)
        collector.shutdown()
        assert len(buffer) == CAPACITY * STREAMS

    @N_STEPS
    def test_collector_fills_ours_by_itself(self, n_steps):
        buffer = make_buffer(n_steps, "derive")
        frames = STREAMS * 4
        collector = Collector(make_env(), None, frames_per_batch=frames, total_frames=8 * frames, replay_buffer=buffer)
        for _ in collector:
            assert_true_successors(buffer.sample(64), make_env(), n_steps)
        collector.shutdown()
        assert len(buffer) == CAPACITY * STREAMS


class TestStockPartsThatKnowOneHead:
    """Contract: stock parts that know one head work while all streams stand at the same step; otherwise they raise and
    name the part of ours that does the job."""

    @staticmethod
    def stock(sampler: Any, **kwargs: Any) -> ReplayBuffer:
        return ReplayBuffer(storage=SlotStorage(CAPACITY, STREAMS), sampler=sampler, batch_size=CAPACITY, **kwargs)

    def test_sampler_without_replacement_draws_each_row_once(self):
        buffer, env, history = self.stock(SamplerWithoutReplacement(), writer=SlotWriter()), make_env(), []
        for batch in batches("collector", count=4):
            history.append(batch)
            buffer.extend(batch)
        drawn = [assert_true_successors(buffer.sample(), env, 1) for _ in range(STREAMS)]
        assert set().union(*drawn) == stored_rows(history, CAPACITY)

    def test_slices_are_consecutive_steps_of_one_episode(self):
        sampler = SliceSampler(slice_len=2, end_key=("next", "done"), strict_length=True)
        buffer = ReplayBuffer(
            storage=SlotStorage(CAPACITY, STREAMS), sampler=sampler, batch_size=24, writer=SlotWriter()
        )
        for batch in batches("continued", count=4):
            buffer.extend(batch)
            identity = CountingEnv.identity(buffer.sample()["observation"]).reshape(-1, 2, 3)
            assert torch.equal(identity[:, 0] + torch.tensor([0, 0, 1]), identity[:, 1])

    @pytest.mark.parametrize(
        "sampler", [SamplerWithoutReplacement, lambda: SliceSampler(slice_len=2, end_key=("next", "done"))]
    )
    def test_uneven_streams_are_refused_by_name(self, sampler):
        buffer = self.stock(sampler(), writer=SlotWriter())
        run = make_env().rollout(4, break_when_any_done=False).transpose(0, 1)
        buffer.storage.extend_batch(run)
        buffer.storage.extend_batch(run[:2, :1], streams=slice(0, 1))
        with pytest.raises(RuntimeError, match="TransitionSampler|SequenceSampler"):
            buffer.sample(4)

    def test_stock_writer_of_uneven_streams_is_refused_by_name(self):
        buffer = self.stock(RandomSampler())
        batch = make_env().rollout(4, break_when_any_done=False)
        buffer.extend(batch)
        buffer.storage.extend_batch(batch.transpose(0, 1)[:2, :1], streams=slice(0, 1))
        before = state_bytes(buffer.storage.state_dict())
        with pytest.raises(RuntimeError, match="SlotWriter"):
            buffer.extend(batch)
        assert state_bytes(buffer.storage.state_dict()) == before


class TestTransformedEnvironment:
    """Contract: keys that a transform adds are rows like any other."""

    @N_STEPS
    def test_step_counter_survives_storage_and_sampling(self, n_steps):
        env = TransformedEnv(make_env(), StepCounter())
        buffer = make_buffer(n_steps, "derive")
        for _ in range(4):
            buffer.extend(env.rollout(5, break_when_any_done=False))
            sample = buffer.sample(DRAWS)
            assert_true_successors(sample, make_env(), n_steps)
            count = CountingEnv.identity(sample["observation"])[:, 2:]
            assert torch.equal(sample["step_count"], count)
            assert torch.equal(sample["next", "step_count"], count + sample["steps_to_next_obs"])
