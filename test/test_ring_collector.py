# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""RingCollector: which rows come, in what order, with what beside them. Every wait has a deadline.

A started collector costs seconds, so most tests read what a shared one delivered.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import cloudpickle
import psutil
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.data import Bounded, Composite, LazyTensorStorage, ReplayBuffer, Unbounded
from torchrl.envs import EnvBase, InitTracker, ParallelEnv, SerialEnv, StepCounter, TensorDictPrimer, TransformedEnv
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.weight_update import MultiProcessWeightSyncScheme

from torchrl_ext.collectors import RingCollector
from torchrl_ext.collectors import _collector_setup as setup
from torchrl_ext.collectors._direct_call import direct_call
from torchrl_ext.collectors._stream_plan import EnvFactories
from torchrl_ext.collectors._worker_policy import WorkerPolicy
from torchrl_ext.data import RowLayout, SlotReplayBuffer, SlotStorage, TransitionSampler
from torchrl_ext.envs import EnvPoolEnv
from torchrl_ext.testing import CountingEnv
from torchrl_ext.weight_update import SeqlockWeightSyncScheme

# Environments and policies travel by value: workers need not import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

TRAJ, VERSION = ("collector", "traj_ids"), ("collector", "policy_version")
#: Seconds against hanging, for one test or fixture: some start six interpreters that import torch.
DEADLINE = 240.0


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Fails when the block takes longer, also where it waits inside of what is tested."""

    def late(*_: Any) -> None:
        raise AssertionError(f"{what} did not end within {seconds} s")

    handler = signal.signal(signal.SIGALRM, late)
    outer, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    begun = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if outer:
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - begun), 0.01))


@pytest.fixture(autouse=True)
def _deadline(request) -> Iterator[None]:
    with within(DEADLINE, request.node.name):
        yield


def wait_until(condition: Callable[[], bool], what: str, seconds: float = DEADLINE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.002)


def drain_until(collector: RingCollector, rows: int, seconds: float = DEADLINE) -> int:
    """Drains until so many rows came, or a few more."""
    got, deadline = 0, time.monotonic() + seconds
    while got < rows:
        got += collector.drain()
        assert time.monotonic() < deadline, f"only {got} of {rows} rows came within {seconds} s"
        time.sleep(0.001)
    return got


class Told(CountingEnv):
    """Tells in each observation the seed it was given (-1 for none), its process and the threads of torch there.

    With a folder as gate, a step waits until there is a file of its number, or one of the name "all".
    """

    def __init__(self, num_streams: int, lengths: Any = 5, *, gate: Path | None = None, **options: Any) -> None:
        super().__init__(num_streams, lengths, **options)
        self._told, self._gate, self._steps = -1, gate, 0
        spec = self.observation_spec.clone()
        spec["told"] = Unbounded((num_streams, 3), dtype=torch.int64)
        self.observation_spec = spec

    def _observe(self, identity: torch.Tensor, flags: Any) -> TensorDict:
        out = super()._observe(identity, flags)
        told = torch.tensor([self._told, os.getpid(), torch.get_num_threads()])
        return out.set("told", told.expand(*self.batch_size, 3).clone())

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        self._steps += 1
        while self._gate is not None and not (self._gate / "all").exists():
            if (self._gate / str(self._steps)).exists():
                break
            time.sleep(0.001)
        return super()._step(tensordict)

    def _set_seed(self, seed: int | None) -> None:
        self._told = -1 if seed is None else seed


class Single(EnvBase):
    """One stream, batch size ``[]``, that counts as CountingEnv does."""

    def __init__(self, stream: int, length: int = 4) -> None:
        super().__init__(batch_size=[])
        self._stream, self._length, self._episode, self._count = stream, length, -1, 0
        self.observation_spec = Composite(observation=Unbounded(3))
        self.action_spec, self.reward_spec = Bounded(-1.0, 1.0, (1,)), Unbounded(1)

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDict:
        self._episode, self._count = self._episode + 1, 0
        return self._observe()

    def _observe(self) -> TensorDict:
        done = torch.tensor([self._count == self._length])
        here = torch.tensor([self._stream, self._episode, self._count], dtype=torch.float32)
        return TensorDict({"observation": here, "done": done, "terminated": done.clone()}, [])

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        self._count += 1
        return self._observe().set("reward", tensordict["action"].clone())

    def _set_seed(self, seed: int | None) -> None:
        """Nothing is random here."""


class Constant(nn.Module):
    """Its one weight is the action."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((1,), float(value)))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.value.expand(*observation.shape[:-1], 1)


def constant(value: float) -> TensorDictModule:
    return TensorDictModule(Constant(value), in_keys=["observation"], out_keys=["action"])


class Memory(TensorDictModuleBase):
    """Counts its own steps in a recurrent state, which is zero at the beginning of an episode."""

    def __init__(self, state: str = "hidden", out: str = "action") -> None:
        super().__init__()
        self.in_keys, self.out_keys, self._state, self._out = [state], [out, ("next", state)], state, out

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        state = tensordict[self._state]
        return tensordict.update({self._out: state.clone(), "next": {self._state: state + 1}})

    def make_tensordict_primer(self) -> TensorDictPrimer:
        return TensorDictPrimer({self._state: Unbounded(1)}, default_value=0.0, expand_specs=True)


def reference(env: EnvBase, policy: Any, steps: int, seed: int | None = None) -> TensorDict:
    """The slow truth ``[steps, n]``: one environment, stepped in this process."""
    if seed is not None:
        env.set_seed(seed)
    rows, observation = [], env.reset()
    with torch.no_grad():
        for _ in range(steps):
            row, observation = env.step_and_maybe_reset(policy(observation))
            rows.append(row.clone())
    return torch.stack(rows).contiguous()


def zero_action(observation: TensorDictBase) -> TensorDictBase:
    return observation.set("action", torch.zeros(*observation.batch_size, 1))


def assert_same(found: TensorDictBase, wanted: TensorDictBase, keys: list[Any], what: str) -> None:
    for key in keys:
        assert torch.equal(found[key], wanted[key]), f"{what}: {key} differs from stepping the environment here"


OUTCOME = [("next", name) for name in ("reward", "done", "terminated", "truncated")]


def assert_true_successors(buffer: SlotReplayBuffer, *, rows_at_least: int) -> None:
    """No sampled row has another successor than the next step of its stream and episode."""
    sample = buffer.sample(20_000)
    before, after = (CountingEnv.identity(part["observation"]) for part in (sample, sample["next"]))
    wrong = (after != before + torch.tensor([0, 0, 1])).any(-1)
    assert not wrong.any(), f"successors {before[wrong][:3].tolist()} -> {after[wrong][:3].tolist()}"
    assert (before[:, 0] == sample["index"][:, 1]).all(), "rows lie in columns of other streams"
    found = len(torch.unique(sample["index"], dim=0))
    assert found >= rows_at_least, f"only {found} rows can be sampled"


# ---------------------------------------------------------------------- ten streams over four workers


def make_told(num_envs: int) -> EnvBase:
    return Told(num_envs, [4, [3, 5], 1][:num_envs], ends=("truncated", "terminated", "both"))


BLOCKS = [slice(0, 3), slice(3, 6), slice(6, 8), slice(8, 10)]


@pytest.fixture(scope="module")
def thousand() -> SimpleNamespace:
    """All that a collector of 1000 rows delivered."""
    with within(DEADLINE, "collecting 1000 rows with four workers"):
        collector = RingCollector(
            make_told,
            num_workers=4,
            num_streams=10,
            frames_per_batch=300,
            total_frames=1000,
            seed=7,
            extra_keys=["is_init", TRAJ],
        )
        try:
            early = collector.collected.pop_episodes()
            batches = list(collector)
            episodes, timings = collector.collected.pop_episodes(), collector.collected.timings()
            later, pids, fill = collector.collected.pop_episodes(), collector.pids, collector.fill
        finally:
            collector.shutdown()
    return SimpleNamespace(
        collector=collector,
        batches=batches,
        rows=torch.cat(batches),
        episodes=episodes,
        early=early,
        later=later,
        timings=timings,
        pids=pids,
        fill=fill,
    )


class TestBatches:
    """Contract: batches are ``[K, N]`` of all streams in order, exactly ``total_frames``, as TorchRL has them."""

    def test_the_last_batch_is_cut_to_total_frames(self, thousand):
        """case 40"""
        assert [batch.numel() for batch in thousand.batches] == [300, 300, 300, 100]
        assert [tuple(batch.shape) for batch in thousand.batches] == [(30, 10)] * 3 + [(10, 10)]
        assert len(thousand.collector) == 4 and thousand.fill == [0] * 4, "more than total_frames was made"

    def test_ten_streams_are_split_evenly_over_four_workers(self, thousand):
        """case 41"""
        process = thousand.rows["told"][0, :, 1].tolist()
        assert process == [pid for pid, width in zip(thousand.pids, (3, 3, 2, 2), strict=True) for _ in range(width)]
        assert len(set(thousand.pids)) == 4 and (thousand.collector.num_workers, thousand.collector.num_streams) == (
            4,
            10,
        )

    def test_rows_are_those_of_stepping_the_environments_here(self, thousand):
        keys = [
            "observation",
            ("privileged", "code"),
            ("next", "observation"),
            ("next", "privileged", "code"),
            *OUTCOME,
        ]
        for block in BLOCKS:
            wanted = reference(make_told(block.stop - block.start), zero_action, 100)
            assert_same(thousand.rows[:, block], wanted, keys, f"streams {block.start}:{block.stop}")

    def test_time_is_the_first_dimension_and_its_name_says_so(self, thousand):
        assert all(batch.names[0] == "time" and batch.device == torch.device("cpu") for batch in thousand.batches)

    def test_batches_own_their_memory(self, thousand):
        steps = [CountingEnv.identity(batch["observation"])[0, 2].tolist() for batch in thousand.batches]
        assert steps == [[2, episode, 0] for episode in (0, 30, 60, 90)], "a later batch overwrote an earlier one"

    def test_is_init_marks_the_first_step_of_each_episode(self, thousand):
        assert torch.equal(thousand.rows["is_init"], thousand.rows["observation"][..., 2:] == 0)

    def test_trajectories_are_episodes_and_no_two_share_a_number(self, thousand):
        rows = thousand.rows
        columns = torch.arange(10).expand(100, 10)
        episodes = torch.stack([columns, CountingEnv.identity(rows["observation"])[..., 1]], -1).reshape(-1, 2)
        names = torch.cat([episodes, rows[TRAJ].reshape(-1, 1)], -1)
        count = len(torch.unique(episodes, dim=0))
        assert len(torch.unique(names, dim=0)) == count == len(torch.unique(rows[TRAJ]))

    def test_each_block_is_seeded_by_its_first_stream(self, thousand):
        """case 41"""
        assert thousand.rows["told"][0, :, 0].tolist() == [7] * 3 + [10] * 3 + [13] * 2 + [15] * 2

    def test_random_actions_of_no_two_streams_are_alike(self, thousand):
        """case 41"""
        actions = thousand.rows["action"][..., 0].T
        assert actions.abs().max() <= 1.0 and len(torch.unique(actions)) == 1000
        alike = [(a, b) for a in range(10) for b in range(a) if (actions[a] == actions[b]).any()]
        assert not alike

    def test_episodes_tell_stream_worker_length_and_undiscounted_return(self, thousand):
        rows, wanted = thousand.rows, []
        returns, lengths = torch.zeros(10, dtype=torch.float64), torch.zeros(10, dtype=torch.int64)
        for step in range(100):
            returns, lengths = returns + rows["next", "reward"][step, :, 0], lengths + 1
            ended = rows["next", "done"][step, :, 0]
            wanted += [(n, lengths[n].item(), returns[n].item()) for n in ended.nonzero()[:, 0].tolist()]
            returns[ended], lengths[ended] = 0.0, 0
        episodes = thousand.episodes
        fields = [episodes[key].tolist() for key in ("stream", "length", "return")]
        worker_of = [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
        found = list(zip(*fields, strict=True))
        assert sorted(found) == sorted(wanted)
        assert episodes["worker"].tolist() == [worker_of[stream] for stream in fields[0]]
        for worker in range(4):
            mine = [entry for entry in found if worker_of[entry[0]] == worker]
            assert mine == [entry for entry in wanted if worker_of[entry[0]] == worker], "oldest come first"

    def test_episodes_come_with_their_rows_and_once(self, thousand):
        assert (len(thousand.early), len(thousand.later)) == (0, 0)
        assert thousand.episodes["return"].dtype == torch.float64 and thousand.episodes["metrics"].shape[1] == 0

    def test_times_of_each_worker_are_told_by_stage(self, thousand):
        assert len(thousand.timings) == 4
        for stages in thousand.timings:
            assert {"policy", "env", "push", "wait", "weights"} <= set(stages)
            assert 0.0 < stages["env"] < 1.0 and 0.0 < stages["policy"] < 1.0 and 0.0 < stages["push"] < 1.0
            assert "env/pool" not in stages, "nobody told it"


# ---------------------------------------------------------------------- EnvPool


def make_pool(num_envs: int) -> EnvBase:
    return EnvPoolEnv("Pendulum-v1", num_envs=num_envs, num_threads=1, max_episode_steps=7)


def make_counted_pool(num_envs: int) -> EnvBase:
    return TransformedEnv(make_pool(num_envs), StepCounter())


def pool_policy() -> TensorDictModule:
    torch.manual_seed(3)
    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


POOL_KEYS = ["observation", "action", ("next", "observation"), *OUTCOME]


@pytest.fixture(scope="module")
def pool() -> Iterator[SimpleNamespace]:
    scheme = SeqlockWeightSyncScheme()
    with within(DEADLINE, "starting EnvPool workers"):
        policy = pool_policy()
        collector = RingCollector(
            make_pool,
            policy,
            num_workers=2,
            num_streams=5,
            frames_per_batch=100,
            weight_sync_schemes={"policy": scheme},
            extra_keys=[VERSION, "is_init"],
            seed=5,
        )
        first = collector.next()
    yield SimpleNamespace(collector=collector, policy=policy, first=first, scheme=scheme)
    collector.shutdown()


class TestEnvPool:
    """Contract: EnvPool's own loop gives the rows of ``step_and_maybe_reset``."""

    def rows_of(self, seed: int, steps: int = 20) -> TensorDictBase:
        blocks = [(0, 3), (3, 2)]
        return torch.cat(
            [reference(make_pool(n), pool_policy(), steps, seed + first).select(*POOL_KEYS) for first, n in blocks], 1
        )

    def test_rows_are_those_of_stepping_the_environments_here(self, pool):
        assert_same(pool.first, self.rows_of(5), POOL_KEYS, "seed=5 at the start")
        assert pool.first["next", "truncated"].any(), "no episode ended"

    def test_policy_that_answers_with_copies_sees_every_observation(self):
        """As a policy on a device does, whose answer comes back with what it was given."""
        policy = pool_policy()
        collector = RingCollector(
            make_pool, lambda data: policy(data.clone()), num_streams=3, frames_per_batch=60, seed=5, policy_device=None
        )
        try:
            with within(DEADLINE, "collecting with a policy that copies"):
                rows = collector.next()
        finally:
            collector.shutdown()
        assert len(torch.unique(rows["observation"].reshape(-1, 3), dim=0)) == 60
        torch.testing.assert_close(rows["action"], policy(rows.select("observation"))["action"])

    def test_time_of_the_pool_itself_is_told_under_transforms_too(self):
        collector = RingCollector(make_counted_pool, pool_policy(), num_streams=3, frames_per_batch=30, total_frames=30)
        try:
            with within(DEADLINE, "collecting from a transformed pool"):
                collector.next()
            stages = collector.collected.timings()[0]
        finally:
            collector.shutdown()
        assert 0.0 < stages["env/pool"] < stages["env"]

    def test_policy_on_a_device_brings_back_what_it_writes_and_nothing_else(self):
        env, module = make_pool(3), pool_policy()
        options = SimpleNamespace(policy_device=None, compile_policy=None, cudagraph_policy=None)
        policy = WorkerPolicy(module, env, None, options)
        # By the path of any other device, which answers with copies.
        policy._device, policy._called = torch.device("cpu"), lambda data: module(data.clone())
        observation = TensorDict(observation=torch.randn(3, 3), other=torch.zeros(3, 1), batch_size=[3])
        before = dict(observation.items())
        assert policy.act(observation) is False
        assert all(observation[key] is value for key, value in before.items())
        assert torch.equal(observation["action"], module(observation.clone())["action"])
        env.close()

    def test_policy_that_writes_over_its_observations_sees_every_one(self):
        policy = nn.Linear(3, 1)

        def over(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return observation + 100.0, policy(observation)

        module = TensorDictModule(over, in_keys=["observation"], out_keys=["observation", "action"])
        collector = RingCollector(make_pool, module, num_streams=3, frames_per_batch=60, seed=5)
        try:
            with within(DEADLINE, "collecting with a policy that writes over its observations"):
                rows = collector.next()
        finally:
            collector.shutdown()
        assert rows["observation"].abs().max() < 50.0, "rows have what the environment showed"
        torch.testing.assert_close(rows["action"], policy(rows["observation"]))

    def test_is_init_follows_each_end(self, pool):
        done, init = pool.first["next", "done"], pool.first["is_init"]
        assert init[0].all() and torch.equal(init[1:], done[:-1])

    def test_a_seed_gives_the_same_streams_again_and_another_one_others(self, pool):
        """case 41"""
        collector = pool.collector
        batches = []
        for seed in (21, 22, 21):
            assert collector.set_seed(seed) == seed + 5
            batches.append(collector.next())
        assert_same(batches[0], self.rows_of(21), POOL_KEYS, "set_seed(21)")
        assert_same(batches[2], batches[0], POOL_KEYS, "the same seed again")
        assert not torch.equal(batches[1]["observation"], batches[0]["observation"])
        firsts = batches[0]["observation"][0]
        assert len(torch.unique(firsts, dim=0)) == 5, "two streams begin alike"

    def test_zeroed_weights_make_every_action_zero_once_they_are_applied(self, pool):
        """case 52"""
        collector, policy = pool.collector, pool.policy
        for weight in policy.parameters():
            weight.data.zero_()
        collector.update_policy_weights_(policy)
        wait_until(
            lambda: collector.next() is not None and set(pool.scheme.applied_versions.values()) == {2},
            "version 2 in every worker",
        )
        batch = collector.next()
        while (batch[VERSION] < 2).any():  # what the rings held
            assert (batch["action"][(batch[VERSION] == 2)] == 0).all()
            batch = collector.next()
        assert (batch["action"] == 0).all()

    def test_replay_gives_true_successors_back(self):
        buffer = SlotReplayBuffer(storage=SlotStorage(128, 3), sampler=TransitionSampler(1))
        collector = RingCollector(
            make_pool,
            pool_policy(),
            num_workers=1,
            num_streams=3,
            frames_per_batch=60,
            total_frames=180,
            replay_buffer=buffer,
            seed=5,
        )
        try:
            assert list(collector) == [None] * 3 and len(buffer) == 180
            collector.collected.pop_episodes()
        finally:
            collector.shutdown()
        truth = reference(make_pool(3), pool_policy(), 60, 5)
        sample = buffer.sample(5000)
        slot, stream = sample["index"].unbind(-1)
        keys = ["observation", "action", ("next", "observation"), *OUTCOME]
        assert_same(sample, truth[slot, stream], keys, "the replay")
        # The newest row of each stream has no successor yet.
        assert len(torch.unique(sample["index"], dim=0)) >= 180 - 3


# ---------------------------------------------------------------------- a replay


RING_SLOTS = 16


@pytest.fixture(scope="module")
def filling() -> Iterator[SimpleNamespace]:
    """A collector of 2 workers with 2 streams each, whose action is the version of its weights."""
    scheme, policy = SeqlockWeightSyncScheme(), constant(1)
    buffer = SlotReplayBuffer(storage=SlotStorage(1 << 13, 4), sampler=TransitionSampler(1))
    with within(DEADLINE, "starting two workers"):
        collector = RingCollector(
            [lambda: Told(2), lambda: Told(2, first_stream=2)],
            policy,
            frames_per_batch=8,
            replay_buffer=buffer,
            weight_sync_schemes={"policy": scheme},
            extra_keys=["is_init", VERSION],
            ring_slots=RING_SLOTS,
        )
        collector.hold_at(40)
        time.sleep(0.1)
        early = collector.fill
    yield SimpleNamespace(collector=collector, buffer=buffer, policy=policy, scheme=scheme, version=1, early=early)
    collector.shutdown()


def heads(filling: SimpleNamespace) -> list[int]:
    return filling.buffer.storage.head.tolist()


def level(filling: SimpleNamespace) -> int:
    """Has all streams come to the same step and wait for credit there; returns the step."""
    step = max(heads(filling)) + RING_SLOTS + 4
    filling.collector.hold_at(4 * step)
    drain_until(filling.collector, 4 * step - sum(heads(filling)))
    assert heads(filling) == [step] * 4
    return step


def send(filling: SimpleNamespace) -> int:
    """Publishes weights whose action is their version."""
    filling.version += 1
    filling.policy.module.value.data.fill_(filling.version)
    filling.collector.update_policy_weights_(filling.policy)
    return filling.version


def stored(filling: SimpleNamespace, key: Any, first: int, stop: int) -> torch.Tensor:
    return filling.buffer.storage[key][first:stop]


class TestReplay:
    """Contract: ``drain`` copies what is there, in order; credit is exact; streams are cut where they begin anew."""

    def test_nothing_is_stepped_before_the_first_drain(self, filling):
        assert filling.early == [0, 0]

    def test_workers_stop_exactly_at_the_held_frames(self, filling):
        step, collector = level(filling), filling.collector
        collector.hold_at(4 * step + 12)
        assert drain_until(collector, 12) == 12
        collector.hold_at(4 * step + 15)  # no whole step more
        time.sleep(0.1)
        assert collector.drain() == 0 and collector.fill == [0, 0] and collector.state_dict()["frames"] == 4 * step + 12
        collector.hold_at(None)
        assert drain_until(collector, 40) >= 40

    def test_a_lower_limit_takes_nothing_back(self, filling):
        step, collector = level(filling), filling.collector
        collector.hold_at(4 * step + 16)
        wait_until(lambda: collector.fill == [4, 4], "four steps in each ring")
        collector.hold_at(4 * step)
        assert drain_until(collector, 16) == 16
        time.sleep(0.05)
        assert collector.drain() == 0

    @pytest.mark.parametrize("most", [1, 2, 5, 7, 8])
    def test_a_drain_gives_at_most_the_rows_asked_for_or_one_step(self, filling, most):
        step, collector = level(filling), filling.collector
        collector.hold_at(4 * step + 32)
        wait_until(lambda: collector.fill == [8, 8], "eight steps in each ring")
        rows = collector.drain(most)
        assert 2 <= rows <= max(most, 2) and sum(heads(filling)) == 4 * step + rows

    def test_small_drains_forget_no_worker(self, filling):
        step, collector = level(filling), filling.collector
        collector.hold_at(4 * step + 32)
        wait_until(lambda: collector.fill == [8, 8], "eight steps in each ring")
        assert [collector.drain(2) for _ in range(4)] == [2] * 4
        assert heads(filling) == [step + 2] * 4

    def test_rows_of_a_stream_come_in_order_without_gaps(self, filling):
        first = level(filling)
        filling.collector.hold_at(4 * (first + 60))
        drain_until(filling.collector, 240)
        rows = CountingEnv.identity(stored(filling, "observation", first, first + 60))
        assert torch.equal(rows[..., 0], torch.arange(4).expand(60, 4))
        numbers = rows[..., 1] * 5 + rows[..., 2]  # episodes have 5 steps
        assert (numbers[1:] - numbers[:-1] == 1).all()
        assert torch.equal(stored(filling, "is_init", first, first + 60), rows[..., 2:] == 0)
        assert torch.equal(stored(filling, ("next", "reward"), first, first + 60), CountingEnv.reward_of(rows))
        assert_true_successors(filling.buffer, rows_at_least=4 * first)

    def test_iteration_fills_the_replay_and_yields_none(self, filling):
        step = level(filling)
        filling.collector.hold_at(None)
        assert filling.collector.next() is None and heads(filling) == [step + 2] * 4

    def test_workers_rest_during_a_pause_and_go_on_after_it(self, filling):
        collector = filling.collector
        level(filling)
        collector.hold_at(None)
        wait_until(lambda: min(collector.fill) > 2, "rows in both rings")
        with collector.pause():
            pushed = sum(collector.fill)
            assert pushed and collector.drain() == 2 * pushed, "what was pushed cannot be drained"
            time.sleep(0.1)
            assert (collector.drain(), collector.fill) == (0, [0, 0])
        assert drain_until(collector, 8) >= 8

    def test_a_seed_set_in_a_pause_does_not_end_it(self, filling):
        collector = filling.collector
        collector.hold_at(None)
        drain_until(collector, 4)
        with collector.pause():
            collector.set_seed(4)
            time.sleep(0.1)
            assert (collector.drain(), collector.fill) == (0, [0, 0])

    def test_set_seed_drops_what_was_not_delivered_and_cuts_streams(self, filling):
        collector, step = filling.collector, level(filling)
        last = CountingEnv.identity(stored(filling, "observation", step - 1, step))[0]
        collector.hold_at(None)
        wait_until(lambda: collector.fill == [RING_SLOTS] * 2, "full rings")
        assert collector.set_seed(100) == 104
        collector.hold_at(4 * step + 40)
        assert drain_until(collector, 40) == 40, "dropped rows were counted as collected"
        rows = CountingEnv.identity(stored(filling, "observation", step, step + 10))
        assert (rows[0, :, 2] == 0).all() and (rows[0, :, 1] > last[:, 1]).all(), "rows of before were delivered"
        assert stored(filling, "told", step, step + 10)[..., 0].tolist() == [[100, 100, 102, 102]] * 10
        assert_true_successors(filling.buffer, rows_at_least=4 * (step + 5))

    def test_returns_begin_anew_with_the_streams(self, filling):
        collector = filling.collector
        step = level(filling)
        collector.set_seed(2)
        collector.hold_at(4 * step + 28)
        wait_until(lambda: collector.fill == [7, 7], "two steps into the second episode")
        collector.set_seed(3)
        collector.collected.pop_episodes()
        level(filling)
        episodes = collector.collected.pop_episodes()
        assert len(episodes) and (episodes["length"] == 5).all()
        # Five rewards of 100 * stream + 10 * episode + step + 1.
        number = (episodes["return"] - 15 - 500 * episodes["stream"]) / 50
        assert torch.equal(number, number.round()) and (number >= 0).all()

    def test_episodes_arrive_with_the_rows_that_ended_them(self, filling):
        collector, step = filling.collector, level(filling)
        collector.collected.pop_episodes()
        collector.hold_at(4 * step + 48)
        wait_until(lambda: collector.fill == [12, 12], "twelve steps in each ring")
        assert len(collector.collected.pop_episodes()) == 0
        told = [0] * 4
        while collector.drain(2):
            streams = collector.collected.pop_episodes()["stream"].tolist()
            told = [count + streams.count(stream) for stream, count in enumerate(told)]
            rows = [stored(filling, ("next", "done"), step, head) for head in heads(filling)]
            assert told == [int(done[:, stream].sum()) for stream, done in enumerate(rows)], "they came apart"
        assert sum(told) >= 8

    def test_policy_lag_counts_versions_between_acting_and_delivery(self, filling):
        collector, step = filling.collector, level(filling)
        version = send(filling)
        wait_until(lambda: set(filling.scheme.applied_versions.values()) == {version}, "the version in every worker")
        collector.collected.pop_policy_lag()
        collector.hold_at(4 * step + 32)
        wait_until(lambda: collector.fill == [8, 8], "eight steps in each ring")
        send(filling), send(filling)
        drain_until(collector, 32)
        assert collector.collected.pop_policy_lag() == (2.0, 2)
        assert collector.collected.pop_policy_lag() == (0.0, 0)


class TestWeights:
    """Contract: workers take the newest weights, a full ring notwithstanding; rows tell whose they are."""

    def test_a_worker_with_a_full_ring_takes_weights(self, filling):
        collector = filling.collector
        level(filling)
        collector.hold_at(None)
        wait_until(lambda: collector.fill == [RING_SLOTS] * 2, "full rings")
        version = send(filling)
        wait_until(lambda: set(filling.scheme.applied_versions.values()) == {version}, "the version in every worker")
        assert collector.fill == [RING_SLOTS] * 2

    def test_each_row_has_the_version_that_acted(self, filling):
        collector, first = filling.collector, level(filling)
        for _ in range(6):
            send(filling)
            collector.hold_at(4 * (level(filling) + 3))
            drain_until(collector, 12)
        last = max(heads(filling))
        versions, actions = stored(filling, VERSION, first, last), stored(filling, "action", first, last)
        assert (versions[1:] >= versions[:-1]).all() and versions[-1].min() == filling.version
        wrong = versions.float() != actions
        assert not wrong.any(), (
            f"versions {versions[wrong][:4].tolist()} stand at actions {actions[wrong][:4].tolist()}"
        )

    def test_the_first_row_has_the_version_of_the_first_weights(self, filling):
        level(filling)
        assert stored(filling, VERSION, 0, 1).flatten().tolist() == [1] * 4


# ---------------------------------------------------------------------- resume


@pytest.fixture(scope="module")
def resumed(filling) -> Iterator[SimpleNamespace]:
    """A new collector goes on filling a replay of before, from the state of one whose blocks were a step apart."""
    with within(DEADLINE, "resuming"):
        filling.collector.set_seed(11)
        step = level(filling)
        filling.collector.hold_at(4 * step + 8)
        wait_until(lambda: filling.collector.fill == [2, 2], "two steps in each ring")
        filling.collector.drain(2)
        state = filling.collector.state_dict()
        buffer = SlotReplayBuffer(storage=SlotStorage(1 << 10, 4), sampler=TransitionSampler(1))
        collector = RingCollector(
            [lambda: Told(2), lambda: Told(2, first_stream=2)],
            constant(5),
            frames_per_batch=8,
            total_frames=4 * step + 80,
            init_random_frames=12,
            replay_buffer=buffer,
            seed=7,
        )
        try:
            run = reference(Told(4), zero_action, 7)
            after = [("next", key) for key in ("observation", "told", "privileged")]
            before = collector.layout.pack(run.select(*collector.layout.by_key, *after))
            before.tail = None  # as collectors write them
            buffer.extend_batch(before)
            collector.load_state_dict(state)
            rows, total, deadline = 0, 4 * step + 80, time.monotonic() + DEADLINE
            while collector.state_dict()["frames"] < total and time.monotonic() < deadline:
                rows += collector.drain()
                time.sleep(0.001)
        except BaseException:
            collector.shutdown()
            raise
    yield SimpleNamespace(collector=collector, buffer=buffer, rows=rows, total=total, old=7)
    collector.shutdown()


class TestResume:
    """Contract: a resumed run counts on, with seeds of a new epoch, and takes no reset for a successor."""

    def test_total_frames_is_exact_although_blocks_stood_at_different_steps(self, resumed):
        assert (resumed.collector.state_dict()["frames"], resumed.rows) == (resumed.total, 78)

    def test_the_first_row_after_a_resume_is_no_successor(self, resumed):
        first = CountingEnv.identity(resumed.buffer.storage["observation"][7])
        assert torch.equal(first[:, 2], torch.zeros(4, dtype=torch.int64))
        assert_true_successors(resumed.buffer, rows_at_least=24 + 70)

    def test_random_frames_of_before_are_not_acted_again(self, resumed):
        rows = resumed.buffer.storage["action"][resumed.old : min(heads(resumed))]
        assert (rows == 5.0).all(), "the first 12 rows were collected before the state was saved"

    def test_seeds_are_of_a_new_epoch(self, resumed):
        seeds = resumed.buffer.storage["told"][resumed.old, :, 0]
        assert seeds[0] == seeds[1] >= 15 and seeds[2] == seeds[3] == seeds[0] + 2

    @pytest.mark.parametrize("lacking", ["frames", "iter", "seed", "epoch", "num_streams", "steps"])
    def test_a_state_that_lacks_a_counter_changes_nothing(self, resumed, lacking):
        state = resumed.collector.state_dict()
        other = {**state, "frames": 0, "steps": [0] * len(state["steps"]), "epoch": state["epoch"] + 5}
        del other[lacking]
        with pytest.raises(ValueError, match=f"the state must have .*'{lacking}'.* Nothing was changed"):
            resumed.collector.load_state_dict(other)
        assert resumed.collector.state_dict() == state

    def test_a_state_of_other_streams_changes_nothing(self, resumed):
        state = resumed.collector.state_dict()
        with pytest.raises(ValueError, match="the state must be of 4 streams, got 3. Nothing was changed"):
            resumed.collector.load_state_dict({**state, "num_streams": 3, "frames": 0})
        assert resumed.collector.state_dict() == state


def test_iteration_ends_at_total_frames_although_one_block_was_drained_further():
    buffer = SlotReplayBuffer(storage=SlotStorage(64, 4))
    collector = RingCollector(
        [lambda: CountingEnv(2), lambda: CountingEnv(2, first_stream=2, lengths=3)],
        frames_per_batch=8,
        total_frames=40,
        replay_buffer=buffer,
    )
    try:
        collector.drain()
        wait_until(lambda: min(collector.fill) + min(buffer.storage.head.tolist()) >= 8, "eight steps of each worker")
        collector.drain(12)  # six steps of the first one whose turn it is
        with within(60.0, f"iteration with heads at {buffer.storage.head.tolist()}"):
            for none in collector:
                assert none is None
        assert buffer.storage.head.tolist() == [10] * 4 and len(collector) == 5
    finally:
        collector.shutdown()


# ---------------------------------------------------------------------- other ways to iterate


@pytest.fixture(scope="module")
def lockstep() -> Iterator[SimpleNamespace]:
    """A collector that does not run ahead, given a policy in shared memory."""
    policy = constant(1)
    policy.share_memory()
    core = min(os.sched_getaffinity(0))
    with within(DEADLINE, "starting one worker"):
        collector = RingCollector(
            lambda: Told(3),
            policy,
            frames_per_batch=12,
            run_ahead=False,
            cores=str(core),
            num_threads=2,
            extra_keys=[VERSION],
        )
    yield SimpleNamespace(collector=collector, policy=policy, core=core)
    collector.async_shutdown()
    assert not any(map(psutil.pid_exists, collector._pids_of_test)), "async_shutdown left a worker"


class TestWithoutRunningAhead:
    """Contract: a batch is acted by the weights sent before it was asked for; nothing is stepped between batches."""

    @pytest.fixture(autouse=True)
    def pids(self, lockstep):
        lockstep.collector._pids_of_test = lockstep.collector.pids

    def test_a_batch_has_the_weights_that_were_sent_before(self, lockstep):
        collector, policy = lockstep.collector, lockstep.policy
        for value in (2.0, 3.0, 4.0):
            before = collector.next()
            policy.module.value.data.fill_(value)
            between = collector.next()
            assert torch.equal(between["action"], before["action"][:4]), "weights arrived without being sent"
            collector.update_policy_weights_()
            assert (collector.next()["action"] == value).all()

    def test_weights_may_be_a_tensordict(self, lockstep):
        weights = TensorDict.from_module(constant(9))
        lockstep.collector.update_policy_weights_(weights)
        assert (lockstep.collector.next()["action"] == 9.0).all()

    def test_nothing_is_stepped_between_two_batches(self, lockstep):
        last = lockstep.collector.next()
        time.sleep(0.1)
        assert lockstep.collector.fill == [0]
        following = lockstep.collector.next()
        wanted = CountingEnv.identity(torch.where(last["next", "done"], -1, last["next", "observation"])[-1])
        found = CountingEnv.identity(following["observation"][0])
        goes_on = wanted[:, 0] >= 0
        assert torch.equal(found[goes_on], wanted[goes_on])

    def test_nothing_is_stepped_ahead_after_a_state_was_loaded(self, lockstep):
        collector = lockstep.collector
        state = collector.state_dict()
        collector.load_state_dict({**state, "iter": state["iter"] + 10, "frames": state["frames"] + 120})
        assert (collector.next()["observation"][0, :, 2] == 0).all()
        time.sleep(0.1)
        assert collector.fill == [0]

    def test_cores_and_threads_are_those_asked_for(self, lockstep):
        """case 42"""
        assert psutil.Process(lockstep.collector.pids[0]).cpu_affinity() == [lockstep.core]
        assert (lockstep.collector.next()["told"][..., 2] == 2).all()

    def test_a_loop_that_was_left_can_be_taken_up_again(self, lockstep):
        """As TorchRL's collectors do."""
        shapes = []
        for _ in range(2):
            for batch in lockstep.collector:
                shapes.append(tuple(batch.shape))
                break
            gc.collect()
        assert shapes == [(4, 3)] * 2

    def test_replay_calls_name_what_is_missing(self, lockstep):
        for call in (lockstep.collector.drain, lockstep.collector.start):
            with pytest.raises(RuntimeError, match=r"RingCollector: .* must have a replay_buffer, got none"):
                call()


@pytest.fixture(scope="module")
def racing(tmp_path_factory) -> SimpleNamespace:
    """``batches="any"`` of a fast worker and one that makes its first two steps when it is told to."""
    gate = tmp_path_factory.mktemp("gate")
    with within(DEADLINE, "starting two workers"):
        collector = RingCollector(
            [lambda: Told(2, 50), lambda: Told(2, 50, first_stream=2, gate=gate)],
            frames_per_batch=16,
            total_frames=4 * 42,
            batches="any",
        )
        try:
            first = [collector.next()]
            for step in (1, 2):  # so that some rows of the slow worker wait in a batch that is not complete
                (gate / str(step)).touch()
                wait_until(lambda: collector.fill[1] > 0, "a step of the slow worker")
                first.append(collector.next())
            (gate / "all").touch()
            collector.set_seed(1)
            rest = list(collector.iterator())
            frames = collector.state_dict()["frames"]
        finally:
            (gate / "all").touch()
            collector.shutdown()
    return SimpleNamespace(first=first, rest=rest, frames=frames, collector=collector)


class TestBatchesOfAny:
    """Contract: a batch is a run of the worker that has one first; in all there are ``total_frames``."""

    def test_a_slow_worker_holds_up_no_other(self, racing):
        owners = [int(batch["observation"][0, 0, 0]) // 2 for batch in [*racing.first, *racing.rest]]
        assert owners[:3] == [0, 0, 0] and set(owners) == {0, 1}

    def test_a_batch_is_a_run_of_one_worker(self, racing):
        for batch in [*racing.first, *racing.rest]:
            before, after = (CountingEnv.identity(part["observation"]) for part in (batch, batch["next"]))
            assert (after - before == torch.tensor([0, 0, 1])).all() and batch.shape[1] == 2
            assert torch.equal(after[:-1], before[1:]), "a batch has rows from before and after set_seed"

    def test_after_set_seed_each_worker_begins_anew(self, racing):
        for owner in (0, 1):
            mine = [batch for batch in racing.rest if int(batch["observation"][0, 0, 0]) // 2 == owner]
            assert (mine[0]["observation"][0, :, 2] == 0).all(), f"worker {owner} delivered rows from before"

    def test_total_frames_is_exact(self, racing):
        assert sum(batch.numel() for batch in [*racing.first, *racing.rest]) == racing.frames == 168

    def test_its_length_is_the_number_of_batches(self, racing):
        assert len(racing.collector) == len(racing.first) + len(racing.rest) == 12


# ---------------------------------------------------------------------- policies


class Explorer(nn.Module):
    """Acts 6 where exploration is deterministic, else 5."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        value = 6.0 if exploration_type() == ExplorationType.DETERMINISTIC else 5.0
        return torch.full((*observation.shape[:-1], 1), value)


class Doubled(nn.Module):
    """Acts 5, and tells twice that."""

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        action = torch.full((*observation.shape[:-1], 1), 5.0)
        return action, 2 * action


class Pair(NamedTuple):
    """What a module may return instead of a tuple."""

    action: torch.Tensor
    features: torch.Tensor


@pytest.fixture(scope="module")
def explored(tmp_path_factory) -> SimpleNamespace:
    """What one collector with a factory, random frames, hooks and an output folder did."""
    folder, calls = tmp_path_factory.mktemp("output"), []

    def make() -> EnvBase:
        print(f"made by {os.environ.get('WHO', 'the parent')}", flush=True)
        return CountingEnv(3)

    with within(DEADLINE, "collecting with a policy factory"):
        collector = RingCollector(
            make,
            policy_factory=lambda: TensorDictModule(Explorer(), ["observation"], ["action"]),
            frames_per_batch=6,
            total_frames=18,
            init_random_frames=7,
            exploration_type=ExplorationType.DETERMINISTIC,
            output_dir=folder,
            worker_env={"WHO": "the worker"},
            pre_collect_hook=lambda: calls.append("before"),
            post_collect_hook=lambda batch: calls.append(tuple(batch.shape)),
        )
        try:
            batches = list(collector)
        finally:
            collector.shutdown()
    return SimpleNamespace(batches=batches, folder=folder, calls=calls, collector=collector)


class TestPolicy:
    """Contract: how actions are chosen, and what is kept beside them."""

    def test_a_trainer_of_torchrl_can_ask_how_many_rows_are_random(self, explored):
        assert explored.collector.init_random_frames == 7

    def test_the_first_rows_are_random_up_to_a_whole_step(self, explored):
        actions = torch.cat(explored.batches)["action"][..., 0]
        assert (actions[:3].abs() <= 1.0).all() and len(torch.unique(actions[:3])) == 9
        assert (actions[3:] == 6.0).all(), "the exploration type, or the number of random steps"

    @pytest.mark.parametrize("kind", ["pool", "any", "recurrent"])
    def test_random_frames_have_zeros_for_what_else_the_policy_writes(self, kind):
        policy: Any = TensorDictModule(Doubled(), ["observation"], ["action", "features"])
        if kind == "recurrent":
            policy = TensorDictSequential(policy, Memory(out="told"))
        make = make_pool if kind == "pool" else sized
        collector = RingCollector(make, policy, num_streams=3, frames_per_batch=12, init_random_frames=6)
        try:
            with within(DEADLINE, "collecting random frames"):
                rows = collector.next()
        finally:
            collector.shutdown()
        assert (rows["features"][:2] == 0.0).all() and (rows["features"][2:] == 10.0).all()
        assert (rows["action"][:2].abs() <= 2.0).all() and (rows["action"][2:] == 5.0).all()
        if kind == "recurrent":
            assert rows["hidden"][:, 0, 0].tolist() == [0.0, 0.0, 0.0, 1.0], "random steps leave the state alone"

    @pytest.mark.parametrize("kind", [dict, TensorDict, tuple, Pair, list])
    def test_a_module_is_called_once_whatever_it_returns(self, kind):
        calls = []

        class Module(nn.Module):
            def forward(self, observation: torch.Tensor) -> Any:
                calls.append(observation)
                if kind is Pair:
                    return Pair(observation, 2 * observation)
                if kind in (tuple, list):
                    return kind((observation, 2 * observation))
                return kind({"features": 2 * observation, "action": observation})

        policy = TensorDictModule(Module(), ["observation"], ["action", "features"])
        observation = TensorDict(observation=torch.ones(2, 1), batch_size=[2])
        try:
            wanted = policy(observation.copy())
        except Exception:
            wanted = None
        calls.clear()
        if wanted is None:
            with pytest.raises(Exception, match=".*"):
                direct_call(policy)(observation.copy())
            return
        found = direct_call(policy)(observation)
        assert len(calls) == 1
        assert_same(found, wanted, ["observation", "action", "features"], kind.__name__)

    def test_hooks_are_called_around_each_batch(self, explored):
        assert explored.calls == ["before", (2, 3)] * 3

    def test_output_goes_to_the_folder(self, explored):
        assert [path.read_text() for path in sorted(explored.folder.iterdir())] == ["made by the worker\n"]

    def test_a_collector_that_was_shut_down_says_so(self, explored):
        collector = explored.collector
        collector.shutdown()
        for call in (collector.set_seed, lambda _: collector.pause().__enter__(), collector.load_state_dict):
            state = 1 if call != collector.load_state_dict else collector.state_dict()
            with pytest.raises(RuntimeError, match="RingCollector: it must not have been shut down"):
                call(state)


@pytest.fixture(scope="module")
def recurrent() -> SimpleNamespace:
    with within(DEADLINE, "collecting with a recurrent policy"):
        collector = RingCollector(
            lambda: TransformedEnv(CountingEnv(2, [3, 4]), InitTracker()),
            Memory(),
            frames_per_batch=24,
            total_frames=48,
            metric_keys=[("privileged", "code")],
        )
        try:
            batches = list(collector)
            episodes = collector.collected.pop_episodes()
        finally:
            collector.shutdown()
    return SimpleNamespace(rows=torch.cat(batches), episodes=episodes)


class TestRecurrentPolicy:
    """Contract: recurrent state is carried from step to step, reset with its stream, and kept in rows."""

    def test_state_is_carried_and_reset(self, recurrent):
        steps = recurrent.rows["observation"][..., 2:]
        assert torch.equal(recurrent.rows["action"], steps)

    def test_state_is_in_the_rows_and_after_them(self, recurrent):
        steps = recurrent.rows["observation"][..., 2:]
        assert torch.equal(recurrent.rows["hidden"], steps)
        assert torch.equal(recurrent.rows["next", "hidden"], steps + 1)

    def test_marks_of_an_init_tracker_are_kept(self, recurrent):
        assert torch.equal(recurrent.rows["is_init"], recurrent.rows["observation"][..., 2:] == 0)

    def test_metrics_are_those_of_the_last_step(self, recurrent):
        done = recurrent.rows["next", "done"][..., 0]
        wanted = recurrent.rows["next", "privileged", "code"][done].double()
        assert torch.equal(recurrent.episodes["metrics"], wanted) and len(wanted) == 8 + 6

    def test_one_factory_for_all_workers_is_called_once_here(self):
        calls = []

        def make() -> EnvBase:
            calls.append(1)
            return CountingEnv(2)

        factories = EnvFactories(make, 3, None)
        factories.with_primers(Memory(), factories.example())
        factories.count_streams(2)
        assert len(calls) == 1 and factories.columns == [slice(0, 2), slice(2, 4), slice(4, 6)]
        one, other = (factory() for factory in factories.factories[:2])
        assert "hidden" in one.observation_spec.keys() and one is not other

    def test_two_recurrent_modules_have_a_state_each(self):
        collector = RingCollector(
            lambda: CountingEnv(2, [3, 4]),
            TensorDictSequential(Memory(), Memory("second", "doubled")),
            frames_per_batch=12,
        )
        try:
            batch = collector.next()
        finally:
            collector.shutdown()
        steps = batch["observation"][..., 2:]
        assert torch.equal(batch["action"], steps) and torch.equal(batch["second"], steps)


# ---------------------------------------------------------------------- environments


@pytest.fixture(scope="module")
def mixed() -> Iterator[SimpleNamespace]:
    """A serial, a parallel and a single environment under one collector."""
    with within(DEADLINE, "collecting with three kinds of environments"):
        collector = RingCollector(
            [
                lambda: SerialEnv(2, [lambda: Single(0), lambda: Single(1, 3)]),
                # TorchRL pickles the outermost class of these by name, so it must be one that can be imported.
                lambda: ParallelEnv(2, [lambda: TransformedEnv(Single(2)), lambda: TransformedEnv(Single(3, 2))]),
                lambda: Single(4, 5),
            ],
            frames_per_batch=60,
        )
        batch = collector.next()
    yield SimpleNamespace(collector=collector, batch=batch)
    collector.shutdown()


class TestEnvironments:
    """Contract: any TorchRL environment of batch size ``[n]`` or ``[]`` serves, with processes of its own too."""

    def test_streams_of_all_kinds_stand_side_by_side(self, mixed):
        found = CountingEnv.identity(mixed.batch["observation"])
        steps = torch.arange(12)
        for stream, length in enumerate([4, 3, 4, 2, 5]):
            wanted = torch.stack([torch.full((12,), stream), steps // length, steps % length], -1)
            assert torch.equal(found[:, stream], wanted), f"stream {stream}"
            after = CountingEnv.identity(mixed.batch["next", "observation"][:, stream])
            assert torch.equal(after, wanted + torch.tensor([0, 0, 1])), f"successors of stream {stream}"

    def test_the_step_has_the_action_of_its_row(self, mixed):
        assert torch.equal(mixed.batch["next", "reward"], mixed.batch["action"])

    def test_an_environment_that_knows_only_done_and_terminated_is_never_truncated(self, mixed):
        assert torch.equal(mixed.batch["next", "done"], mixed.batch["next", "terminated"])
        assert not mixed.batch["next", "truncated"].any()

    def test_processes_of_an_environment_end_with_the_collector(self, mixed):
        workers = [psutil.Process(pid) for pid in mixed.collector.pids]
        family = [process for worker in workers for process in [worker, *worker.children(recursive=True)]]
        assert len(family) >= 5, "the parallel environment has no processes"
        mixed.collector.shutdown()
        _, alive = psutil.wait_procs(family, timeout=60.0)
        assert not alive


# ---------------------------------------------------------------------- bad input


class Locked(nn.Module):
    """A policy that does not pickle."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return observation[..., :1]


def three() -> EnvBase:
    return CountingEnv(3)


def sized(num_envs: int) -> EnvBase:
    return CountingEnv(num_envs)


def broken() -> EnvBase:
    raise LookupError("no such task")


def storage_of(env: EnvBase, num_streams: int) -> SlotReplayBuffer:
    keys = ["observation", "action", ("next", "observation"), *OUTCOME]
    layout = RowLayout.from_tensordict(env.fake_tensordict().select(*keys))
    return SlotReplayBuffer(storage=SlotStorage(16, num_streams, layout=layout))


BAD = {
    "no worker": (lambda: {"num_workers": 0}, ValueError, "num_workers must be at least 1"),
    "no factory": (lambda: {"create_env_fn": []}, ValueError, "num_workers must be at least 1"),
    "an environment": (lambda: {"create_env_fn": three()}, TypeError, "must be a function .*got CountingEnv.*lambda"),
    "the name of an environment": (lambda: {"create_env_fn": "Pendulum-v1"}, TypeError, "must be a function .*got str"),
    "environments": (lambda: {"create_env_fn": [three()]}, TypeError, "must be a function .*got CountingEnv"),
    "factories of another number": (
        lambda: {"create_env_fn": [three, three], "num_workers": 3},
        ValueError,
        "match the factories, got 3 workers and 2 factories",
    ),
    "more workers than streams": (
        lambda: {"create_env_fn": sized, "num_workers": 3, "num_streams": 2},
        ValueError,
        "num_streams must be at least num_workers=3.*got 2",
    ),
    "a function without num_envs": (
        lambda: {"create_env_fn": lambda: CountingEnv(2), "num_streams": 4},
        TypeError,
        "must take num_envs=, .* num_streams=4 .* <lambda>.* leave num_streams out",
    ),
    "frames_per_batch": (lambda: {"frames_per_batch": 10}, ValueError, "frames_per_batch .* 3 streams, got 10; .* 9"),
    "frames_per_batch of zero": (lambda: {"frames_per_batch": 0}, ValueError, "frames_per_batch .* got 0; .* 3"),
    "total_frames": (lambda: {"total_frames": 100}, ValueError, "total_frames .* 3 streams, got 100; .* 99"),
    "frames_per_batch that is no whole number": (
        lambda: {"frames_per_batch": 12.0},
        ValueError,
        "frames_per_batch .* 3 streams, got 12.0",
    ),
    "total_frames that is no whole number": (
        lambda: {"total_frames": 1.2e6},
        ValueError,
        "total_frames .* got 1200000",
    ),
    "waiting with a replay": (
        lambda: {"run_ahead": False, "replay_buffer": storage_of(CountingEnv(3), 3)},
        ValueError,
        "run_ahead=False .* replay_buffer",
    ),
    "batches with a replay": (
        lambda: {"batches": "any", "replay_buffer": storage_of(CountingEnv(3), 3)},
        ValueError,
        "batches='any' .* replay_buffer",
    ),
    "two policies": (
        lambda: {"policy": constant(1), "policy_factory": lambda: constant(1)},
        ValueError,
        "policy and policy_factory must not both",
    ),
    "batches": (lambda: {"batches": "some"}, ValueError, "batches must be 'all' or 'any', got 'some'"),
    "unequal workers": (
        lambda: {"create_env_fn": sized, "num_workers": 2, "num_streams": 3, "batches": "any"},
        ValueError,
        r"equal workers, got \[2, 1\] streams",
    ),
    "restarts without a replay": (lambda: {"max_restarts": 1}, ValueError, "max_restarts must come with"),
    "policy_device": (lambda: {"policy_device": "cuda:77"}, ValueError, "device 'cuda:77' must exist"),
    "storing_device": (lambda: {"storing_device": "cuda:77"}, ValueError, "device 'cuda:77' must exist"),
    "ring_slots beyond memory": (lambda: {"ring_slots": 10**11}, MemoryError, r"need .*\d.* are free"),
    "one ring slot": (lambda: {"ring_slots": 1}, ValueError, "ring_slots must be an int of at least 2, got 1"),
    "part of a ring slot": (lambda: {"ring_slots": 8.0}, ValueError, "ring_slots must be an int .* got 8.0"),
    "init_random_frames": (lambda: {"init_random_frames": -3}, ValueError, "init_random_frames .* at least 0, got -3"),
    "max_restarts": (lambda: {"max_restarts": -1}, ValueError, "max_restarts must be an int of at least 0, got -1"),
    "stall_timeout": (lambda: {"stall_timeout": 0}, ValueError, "stall_timeout must be a positive .* got 0"),
    "boot_timeout": (lambda: {"boot_timeout": -1.0}, ValueError, "boot_timeout must be a positive .* got -1.0"),
    "another scheme": (
        lambda: {"policy": constant(1), "weight_sync_schemes": {"policy": MultiProcessWeightSyncScheme()}},
        TypeError,
        "weight_sync_schemes must be .*SeqlockWeightSyncScheme",
    ),
    "a scheme without weights": (
        lambda: {"weight_sync_schemes": {"policy": SeqlockWeightSyncScheme()}},
        TypeError,
        "for a module with weights",
    ),
    "transport": (lambda: {"transport": "tcp"}, ValueError, "transport must be 'auto', 'host' or 'ipc', got 'tcp'"),
    "ipc on the host": (lambda: {"transport": "ipc"}, ValueError, "'ipc' cannot be had: rows are stored on the host"),
    "another buffer": (
        lambda: {"replay_buffer": ReplayBuffer(storage=LazyTensorStorage(8))},
        TypeError,
        "replay_buffer must be a SlotReplayBuffer .*got ReplayBuffer",
    ),
    "no buffer at all": (lambda: {"replay_buffer": [1]}, TypeError, "replay_buffer must be a .*got list"),
    "storage of other streams": (
        lambda: {"replay_buffer": SlotReplayBuffer(storage=SlotStorage(16, 4))},
        ValueError,
        "the storage must have 3 streams .*got 4",
    ),
    "storage of another layout": (
        lambda: {"replay_buffer": storage_of(CountingEnv(3), 3)},
        ValueError,
        "the storage must have 3 streams and layout .*privileged",
    ),
    "a policy that does not pickle": (
        lambda: {"policy": TensorDictModule(Locked(), ["observation"], ["action"])},
        TypeError,
        "policy must pickle, got TensorDictModule: .*lock",
    ),
    "a factory that fails": (lambda: {"create_env_fn": broken}, LookupError, "no such task"),
    "observation_keys": (lambda: {"observation_keys": ["pixels"]}, KeyError, "observation_keys must .*pixels"),
    "extra_keys": (lambda: {"extra_keys": ["logits"]}, KeyError, "extra_keys must .*logits"),
    "metric_keys": (lambda: {"metric_keys": ["height"]}, KeyError, "metric_keys must .*height"),
    "cores": (lambda: {"cores": "100000"}, ValueError, "spec must name one of the cores"),
    "cores of the second worker": (
        lambda: {"cores": [os.sched_getaffinity(0), {100000}], "num_workers": 2},
        ValueError,
        "cores must name some of .* for worker 1, got .100000.*Nothing was started",
    ),
    "cores of fewer workers": (
        lambda: {"cores": [os.sched_getaffinity(0)], "num_workers": 2},
        ValueError,
        "cores must be one set for all or one for each of 2 workers, got 1",
    ),
    "cores of more workers": (
        lambda: {"cores": [os.sched_getaffinity(0)] * 3, "num_workers": 2},
        ValueError,
        "cores must be .* 2 workers, got 3",
    ),
}


class TestBadInput:
    """Contract: one sentence says where, what must hold and what came; nothing is started and nothing stays open."""

    @staticmethod
    def refused(options: dict[str, Any], error: type[Exception]) -> str:
        arguments = {"create_env_fn": three, "frames_per_batch": 12, **options}
        with pytest.raises(error) as caught:
            RingCollector(**arguments)
        assert type(caught.value) is error
        return str(caught.value)

    @pytest.mark.parametrize("name", BAD)
    def test_it_is_refused_in_one_sentence_and_leaves_nothing(self, name):
        make_options, error, text = BAD[name]
        options = make_options()  # may start what Python keeps for locks
        gc.collect()
        children, descriptors = set(psutil.Process().children()), len(os.listdir("/proc/self/fd"))
        message = self.refused(options, error)
        gc.collect()
        pattern = pytest.RaisesExc(error, match=f"(?s){text}")
        assert pattern.matches(error(message)), message
        assert "\n" not in message
        if error is not LookupError and name != "cores":
            assert message.strip("\"'").split(":")[0] in ("RingCollector", "HostRing")
        assert set(psutil.Process().children()) <= children, "a process was started"
        assert len(os.listdir("/proc/self/fd")) <= descriptors, "a descriptor stays open"

    def test_cuda_without_a_number_is_the_current_device_of_this_process(self, monkeypatch):
        """As a storage's ``device="cuda"`` is; a learner of several sets its own."""
        for name, value in (("is_available", True), ("device_count", 4), ("is_initialized", True)):
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
        assert setup.device_of("cuda") == torch.device("cuda", 2)
        assert setup.device_of("cuda:1") == torch.device("cuda", 1)
        assert setup.device_of("cuda", current=False) == torch.device("cuda", 0)

    def test_memory_is_told_in_both_numbers(self):
        message = self.refused({"ring_slots": 10**11}, MemoryError)
        assert message.count(" GB") + message.count(" TB") + message.count(" GiB") >= 2, message


class TestFill:
    """Contract: what waits in the rings can be asked for from any thread."""

    def test_fill_waits_for_a_thread_that_drains(self):
        collector = RingCollector(lambda: CountingEnv(2), frames_per_batch=8)
        try:
            asked = threading.Thread(target=lambda: collector.fill, daemon=True)
            with collector._workers.lock:
                asked.start()
                asked.join(0.2)
                assert asked.is_alive(), "two threads used the counters of a ring at once"
            asked.join(60.0)
            assert not asked.is_alive()
        finally:
            collector.shutdown()


class TestHookThatRaises:
    """Contract: a hook's error reaches the caller; its rows are in the replay, once, and draining goes on."""

    def test_rows_are_written_once(self):
        env = CountingEnv(2)
        from torchrl_ext.collectors import record_layout

        layout = record_layout(env, list(env.observation_spec.keys(True, True)))
        replay = SlotReplayBuffer(storage=SlotStorage(64, 2, layout=layout), batch_size=4)
        calls = []

        def hook(run):
            calls.append(run["observation"].clone())
            if len(calls) == 1:
                raise ValueError("boom in the hook")

        collector = RingCollector(
            lambda: CountingEnv(2, lengths=100),
            frames_per_batch=2,
            total_frames=40,
            replay_buffer=replay,
            post_collect_hook=hook,
        )
        try:
            end, rows, raised = time.monotonic() + DEADLINE, 0, 0
            while len(replay) < 40:
                assert time.monotonic() < end, f"{len(replay)} of 40 rows arrived"
                try:
                    rows += collector.drain()
                except ValueError as error:
                    assert "boom in the hook" in str(error)
                    raised += 1
            assert raised == 1 and collector.drain() == 0
            steps = replay.storage.get(torch.arange(20))["observation"][:, 0, 2]
            assert steps.tolist() == list(range(20))
        finally:
            collector.shutdown()
