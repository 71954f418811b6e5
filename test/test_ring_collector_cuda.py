# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""RingCollector with a replay, batches or policies on a CUDA device. Rows name (stream, episode, step)."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _device_memory import own_device_memory
from tensordict.nn import TensorDictModule
from torch import nn

from torchrl_ext.collectors import RingCollector
from torchrl_ext.collectors._worker_policy import WorkerPolicy
from torchrl_ext.data import SlotReplayBuffer, SlotStorage
from torchrl_ext.envs import EnvPoolEnv
from torchrl_ext.testing import CountingEnv
from torchrl_ext.transport import RingPeerDied

pytestmark = pytest.mark.gpu
DEADLINE = 60.0
#: Streams of a worker; enough that a step is large enough for device memory.
STREAMS = 2048
LENGTHS = [3, 7]


def make_env(num_envs: int) -> CountingEnv:
    return CountingEnv(num_envs, lengths=[LENGTHS[stream % 2] for stream in range(num_envs)])


def make_pool(num_envs: int) -> EnvPoolEnv:
    return EnvPoolEnv("Pendulum-v1", num_envs=num_envs, num_threads=1, max_episode_steps=7)


def make_policy() -> TensorDictModule:
    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


def make_collector(**options: Any) -> RingCollector:
    defaults = {"num_streams": STREAMS, "frames_per_batch": STREAMS, "stall_timeout": 30.0}
    return RingCollector(make_env, make_policy().cuda(), **{**defaults, **options})


def make_replay(**options: Any) -> SlotReplayBuffer:
    env = make_env(2)
    from torchrl_ext.collectors import record_layout

    layout = record_layout(env, list(env.observation_spec.keys(True, True)))
    storage = SlotStorage(32, STREAMS, layout=layout, device="cuda", **options)
    return SlotReplayBuffer(storage=storage, batch_size=4096)


def drain(collector: RingCollector, rows: int) -> int:
    """Drains at least so many rows."""
    end, found = time.monotonic() + DEADLINE, 0
    while found < rows:
        assert time.monotonic() < end, f"{found} of {rows} rows arrived in {DEADLINE} s"
        found += collector.drain()
    return found


def check_sample(replay: SlotReplayBuffer) -> None:
    """Every successor is the true one, and no row is anything but what its stream had there."""
    sample = replay.sample().cpu()
    here, after = sample["observation"].long(), sample["next", "observation"].long()
    assert torch.equal(after[:, :2], here[:, :2]), "the stream and the episode go on"
    assert torch.equal(after[:, 2], here[:, 2] + 1)
    assert torch.equal(sample["privileged", "code"], CountingEnv.code_of(here))
    assert torch.equal(sample["next", "reward"], CountingEnv.reward_of(here))
    lengths = torch.tensor(LENGTHS)[here[:, 0] % 2]
    assert torch.equal(sample["next", "done"][:, 0], here[:, 2] + 1 == lengths)


class TestReplayOnTheDevice:
    @pytest.mark.parametrize("transport", ["host", "ipc"])
    def test_every_row_and_its_successor_arrive(self, transport):
        replay = make_replay()
        collector = make_collector(
            replay_buffer=replay, transport=transport, policy_device="cuda" if transport == "ipc" else None
        )
        try:
            assert collector.transport.kind == transport
            for _ in range(6):
                drain(collector, 10 * STREAMS)
                check_sample(replay)
            episodes = collector.collected.pop_episodes()
            assert set(episodes["length"].tolist()) == set(LENGTHS)
            assert torch.equal(episodes["length"], torch.tensor(LENGTHS)[episodes["stream"] % 2])
        finally:
            collector.shutdown()

    def test_two_workers_fill_their_blocks(self):
        replay = make_replay()
        with_two = make_collector(replay_buffer=replay, num_workers=2, transport="ipc", policy_device="cuda")
        try:
            for _ in range(4):
                drain(with_two, 20 * STREAMS)
                # Each worker's environment counts its own streams.
                sample = replay.sample().cpu()
                here, after = sample["observation"].long(), sample["next", "observation"].long()
                assert torch.equal(after[:, 2], here[:, 2] + 1)
                assert torch.equal(here[:, 0], sample["index"][:, 1] % (STREAMS // 2))
        finally:
            with_two.shutdown()

    def test_auto_takes_device_memory_where_the_policy_runs_there_anyway(self):
        collector = make_collector(replay_buffer=make_replay(), policy_device="cuda")
        try:
            assert collector.transport.kind == "ipc"
        finally:
            collector.shutdown()
        collector = make_collector(replay_buffer=make_replay())
        try:
            assert collector.transport == ("host", "the workers do not use cuda:0 for anything else")
        finally:
            collector.shutdown()

    def test_worker_that_names_its_devices_otherwise_is_matched_by_uuid(self):
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        replay = make_replay()
        collector = make_collector(
            replay_buffer=replay, policy_device="cuda", worker_env={"CUDA_VISIBLE_DEVICES": uuid}, transport="ipc"
        )
        try:
            drain(collector, 4 * STREAMS)
            check_sample(replay)
        finally:
            collector.shutdown()

    def test_worker_that_cannot_map_the_memory_gets_a_ring_in_host_memory(self):
        """The worker sees no device at all, as in a container without them."""
        replay = make_replay()
        options = {"replay_buffer": replay, "policy_device": "cuda", "worker_env": {"CUDA_VISIBLE_DEVICES": ""}}
        with pytest.raises(RuntimeError, match="transport 'ipc' cannot be had"):
            make_collector(transport="ipc", **options)

    def test_expandable_segments_take_the_ring_in_host_memory(self, monkeypatch):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        collector = make_collector(replay_buffer=make_replay(), policy_device="cuda")
        try:
            assert collector.transport.kind == "host"
            assert "expandable_segments" in collector.transport.reason
            drain(collector, 4 * STREAMS)
        finally:
            collector.shutdown()


class TestPolicyOnTheDevice:
    @pytest.mark.parametrize("captured", [False, True])
    def test_workers_act_on_new_weights(self, captured):
        """case 52"""
        policy = make_policy().cuda()
        collector = RingCollector(
            partial(make_env, 4),
            policy,
            frames_per_batch=40,
            policy_device="cuda",
            storing_device="cuda",
            cudagraph_policy=captured,
            run_ahead=False,
        )
        try:
            batches = iter(collector)
            assert next(batches).device.type == "cuda"
            for value in (0.0, 0.5):
                with torch.no_grad():
                    policy.module.weight.zero_()
                    policy.module.bias.fill_(value)
                collector.update_policy_weights_(policy)
                end = time.monotonic() + DEADLINE
                while not (next(batches)["action"] == value).all():
                    assert time.monotonic() < end, "the workers never acted on the new weights"
        finally:
            collector.shutdown()

    def test_a_factory_may_make_the_policy_on_a_device_although_it_acts_on_the_host(self):
        collector = RingCollector(partial(make_env, 4), policy_factory=lambda: make_policy().cuda(), frames_per_batch=8)
        try:
            assert collector.next().device in (None, torch.device("cpu"))
        finally:
            collector.shutdown()

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    def test_a_captured_policy_on_another_device_acts_on_new_weights(self):
        """case 52"""
        policy = make_policy().to("cuda:1")
        collector = RingCollector(
            partial(make_env, 4),
            policy,
            frames_per_batch=40,
            policy_device="cuda:1",
            cudagraph_policy=True,
            run_ahead=False,
        )
        try:
            collector.next()
            with torch.no_grad():
                policy.module.weight.zero_()
                policy.module.bias.fill_(0.5)
            collector.update_policy_weights_(policy)
            end = time.monotonic() + DEADLINE
            while not (collector.next()["action"] == 0.5).all():
                assert time.monotonic() < end, "the workers never acted on the new weights"
        finally:
            collector.shutdown()

    def test_waiting_for_an_action_leaves_the_core_to_others(self):
        """Threads of environments of other workers need it."""

        def slow(observation: torch.Tensor) -> torch.Tensor:
            torch.cuda._sleep(600_000_000)  # clocks, 0.3 s
            return observation[..., :1] + 1.0

        env, module = make_env(4), TensorDictModule(slow, in_keys=["observation"], out_keys=["action"])
        options = SimpleNamespace(policy_device=torch.device("cuda"), compile_policy=None, cudagraph_policy=None)
        policy, observation = WorkerPolicy(module, env, None, options), env.reset()
        policy.act(observation)
        begun, busy = time.perf_counter(), time.process_time()
        assert policy.act(observation) is False
        took, busy = time.perf_counter() - begun, time.process_time() - busy
        assert torch.equal(observation["action"], observation["observation"][..., :1] + 1.0)
        assert busy < took / 2, f"{busy:.3f} s of a core in {took:.3f} s"

    def test_batches_on_the_device_have_their_successors(self):
        collector = make_collector(
            frames_per_batch=5 * STREAMS, policy_device="cuda", storing_device="cuda", transport="ipc"
        )
        try:
            for batch, _ in zip(collector, range(4), strict=False):
                here, after = batch["observation"], batch["next", "observation"]
                assert torch.equal(after[..., 2], here[..., 2] + 1)
                assert torch.equal(after[..., :2], here[..., :2])
        finally:
            collector.shutdown()


class TestEnvPool:
    def test_actions_answer_the_observations_beside_them(self):
        """Each observation, not the first one for ever."""
        pytest.importorskip("envpool")
        policy = make_policy().cuda()
        collector = RingCollector(
            make_pool,
            policy,
            num_streams=4,
            frames_per_batch=80,
            policy_device="cuda",
        )
        try:
            rows = collector.next().cuda()
        finally:
            collector.shutdown()
        assert len(torch.unique(rows["observation"].reshape(-1, 3), dim=0)) == 80
        torch.testing.assert_close(rows["action"], policy(rows.select("observation"))["action"], rtol=1e-4, atol=1e-5)


class TestLife:
    def test_killed_worker_is_told_and_the_device_goes_on(self):
        collector = make_collector(replay_buffer=make_replay(), policy_device="cuda", transport="ipc")
        try:
            drain(collector, 4 * STREAMS)
            os.kill(collector.pids[0], signal.SIGKILL)
            end = time.monotonic() + 10.0
            with pytest.raises(RingPeerDied, match="SIGKILL"):
                while time.monotonic() < end:
                    collector.drain()
            begun = time.monotonic()
            torch.cuda.synchronize()
            assert time.monotonic() - begun < 1.0
        finally:
            collector.shutdown()

    def test_killed_worker_is_started_anew_over_the_same_memory(self):
        replay = make_replay()
        collector = make_collector(replay_buffer=replay, policy_device="cuda", transport="ipc", max_restarts=1)
        try:
            drain(collector, 4 * STREAMS)
            os.kill(collector.pids[0], signal.SIGKILL)
            drain(collector, 70 * STREAMS)
            check_sample(replay)
        finally:
            collector.shutdown()

    def test_cycles_leave_nothing_on_the_device(self):
        """case 47"""
        replay = make_replay()

        def cycle(killed: bool) -> None:
            collector = make_collector(replay_buffer=replay, policy_device="cuda", transport="ipc")
            drain(collector, STREAMS)
            if killed:
                os.kill(collector.pids[0], signal.SIGKILL)
            collector.shutdown()

        cycle(False)
        before, descriptors = own_device_memory(), len(os.listdir("/proc/self/fd"))
        for count in range(int(os.environ.get("COLLECTOR_CYCLES", "2"))):
            cycle(count % 2 == 0)
        assert abs(own_device_memory() - before) < 64 * 2**20
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
