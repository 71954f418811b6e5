# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""RingCollector between two states: what is counted, granted and seeded when something begins anew.

Interleavings are forced by patching the worker's end that lies in this process. Every wait has a deadline.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from _load import slowness
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Unbounded

from torchrl_ext.collectors import RingCollector
from torchrl_ext.collectors._ring_worker import RingWorker
from torchrl_ext.collectors._worker_loop import STAGES
from torchrl_ext.data import SlotReplayBuffer, SlotStorage
from torchrl_ext.envs import EnvPoolEnv
from torchrl_ext.testing import CountingEnv
from torchrl_ext.transport import HostConsumer, RingPeerDied
from torchrl_ext.weight_update import SeqlockWeightSyncScheme

# Environments and policies travel by value: workers need not import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: Seconds against hanging.
DEADLINE = 120.0
RING_SLOTS = 16


class Told(CountingEnv):
    """Tells in each observation the seed it was given and whether it was a static one.

    With a folder as gate, a step waits until there is a file of its number, or one of the name "all"; seeds from 1000
    on wait for one of the name "seed", and the last thing that seeding does is to make one of its own name.
    """

    def __init__(self, num_streams: int, *, gate: Path | None = None, **options: Any) -> None:
        super().__init__(num_streams, **options)
        self._told, self._gate, self._steps = (-1, 0), gate, 0
        spec = self.observation_spec.clone()
        spec["told"] = Unbounded((num_streams, 2), dtype=torch.int64)
        self.observation_spec = spec

    def _observe(self, identity: torch.Tensor, flags: Any) -> TensorDict:
        out = super()._observe(identity, flags)
        return out.set("told", torch.tensor(self._told).expand(*self.batch_size, 2).clone())

    def _wait_for(self, *names: str) -> None:
        while self._gate is not None and not any((self._gate / name).exists() for name in names):
            time.sleep(0.001)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        self._steps += 1
        self._wait_for(str(self._steps), "all")
        return super()._step(tensordict)

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        if self._gate is not None and seed is not None and seed >= 1000:
            self._wait_for("seed")
            time.sleep(0.5)
            (self._gate / f"seeded {seed}").touch()
        self._told = (-1 if seed is None else seed, int(static_seed))
        return seed


class Five(nn.Module):
    """Its one weight, 5, is the action."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((1,), 5.0))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.value.expand(*observation.shape[:-1], 1)


def five() -> TensorDictModule:
    return TensorDictModule(Five(), in_keys=["observation"], out_keys=["action"])


def wait_until(condition: Callable[[], bool], what: str, seconds: float = DEADLINE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.002)


def frames(collector: RingCollector) -> int:
    return collector.state_dict()["frames"]


def drain_to(collector: RingCollector, rows: int) -> None:
    """Has exactly so many rows collected in all."""
    collector.hold_at(rows)
    wait_until(lambda: collector.drain() >= 0 and frames(collector) >= rows, f"{rows} rows")
    assert frames(collector) == rows


def kill(collector: RingCollector, worker: int = 0) -> None:
    os.kill(collector.pids[worker], signal.SIGKILL)
    wait_until(lambda: not collector._workers[worker].is_alive(), "the death of the worker")


def steps_of(buffer: SlotReplayBuffer, first: int) -> torch.Tensor:
    """Returns (episode, step) of stream 0 from a slot on."""
    head = buffer.storage.head.tolist()[0]
    return CountingEnv.identity(buffer.storage["observation"][first:head, 0])[:, 1:]


@pytest.fixture(scope="module")
def seeding(tmp_path_factory) -> Path:
    """The gate of seeds from 1000 on, for steps an open one."""
    folder = tmp_path_factory.mktemp("seeding")
    (folder / "all").touch()
    return folder


@pytest.fixture(scope="module")
def replayed(seeding) -> Iterator[tuple[RingCollector, SlotReplayBuffer]]:
    """One worker of two streams that fills a replay and may be started anew."""
    buffer = SlotReplayBuffer(storage=SlotStorage(1 << 10, 2))
    collector = RingCollector(
        lambda: Told(2, lengths=1000, gate=seeding),
        frames_per_batch=2,
        replay_buffer=buffer,
        ring_slots=RING_SLOTS,
        max_restarts=6,
        seed=3,
    )
    yield collector, buffer
    collector.shutdown()


class TestDeath:
    """Contract: what was published before a death is read; whatever is asked of a dead worker starts it anew."""

    def test_rows_published_right_before_a_death_is_seen_are_kept(self, replayed, monkeypatch):
        collector, buffer = replayed
        drain_to(collector, frames(collector) + 20)
        rows, check = frames(collector), RingWorker.check

        def publish_and_die(self: RingWorker, stall_timeout: float) -> None:
            monkeypatch.setattr(RingWorker, "check", check)
            collector.hold_at(rows + 10)
            wait_until(lambda: collector.fill == [5], "five steps in the ring")
            kill(collector)
            self.check(stall_timeout)

        monkeypatch.setattr(RingWorker, "check", publish_and_die)
        time.sleep(0.6)  # the workers' lives are looked at twice a second
        while RingWorker.check is not check:
            collector.drain()
        drain_to(collector, rows + 20)
        last = steps_of(buffer, rows // 2 - 1)[:, 1].tolist()
        assert last == [last[0] + number for number in range(6)] + list(range(5))

    def test_a_seed_may_be_set_although_a_worker_is_dead(self, replayed):
        collector, buffer = replayed
        drain_to(collector, frames(collector) + 4)
        rows, first = frames(collector), buffer.storage.head.tolist()[0]
        collector.hold_at(rows + 10)
        wait_until(lambda: collector.fill == [5], "five steps in the ring")
        kill(collector)
        assert collector.set_seed(70) == 72
        drain_to(collector, rows + 20)
        assert buffer.storage["told"][first : first + 10, :, 0].unique().tolist() == [70]
        assert steps_of(buffer, first)[:, 1].tolist() == list(range(10)), "rows from before were delivered"

    def test_a_worker_started_anew_is_seeded_as_the_last_one_was(self, replayed):
        collector, buffer = replayed
        collector.set_seed(80, static_seed=True)
        drain_to(collector, frames(collector) + 4)
        kill(collector)
        drain_to(collector, frames(collector) + 4)
        told = buffer.storage["told"][buffer.storage.head.tolist()[0] - 4 :][:4, 0].tolist()
        assert told == [[80, 1]] * 2 + [[82, 1]] * 2
        collector.load_state_dict(collector.state_dict())
        drain_to(collector, frames(collector) + 2)
        assert buffer.storage["told"][buffer.storage.head.tolist()[0] - 1, 0].tolist() == [84, 1]

    def test_a_pause_needs_no_dead_worker(self, replayed):
        collector, _ = replayed
        drain_to(collector, frames(collector) + 2)
        kill(collector)
        with collector.pause():
            assert frames(collector) == frames(collector)
        drain_to(collector, frames(collector) + 4)

    def test_workers_rest_until_the_last_of_two_pauses_ends(self, replayed):
        collector, _ = replayed
        collector.hold_at(None)
        one, other = collector.pause(), collector.pause()
        one.__enter__(), other.__enter__()
        one.__exit__(None, None, None)
        collector.drain()
        time.sleep(0.1)
        assert collector.drain() == 0, "the end of the first pause ended the second one"
        other.__exit__(None, None, None)
        wait_until(lambda: collector.drain() > 0, "a step after both pauses")
        with collector.pause():
            collector.hold_at(0)  # as the other tests find it: nothing waits
            collector.drain()

    def test_a_worker_that_is_not_ready_in_time_after_a_restart_is_started_once_more(self, replayed, monkeypatch):
        collector, _ = replayed
        drain_to(collector, frames(collector) + 2)
        kill(collector)
        wait = RingWorker.wait_until_ready

        def too_late(self: RingWorker, deadline: float, meanwhile=None) -> None:
            monkeypatch.setattr(RingWorker, "wait_until_ready", wait)
            self.wait_until_ready(time.monotonic())

        monkeypatch.setattr(RingWorker, "wait_until_ready", too_late)
        late = collector.pids
        with pytest.raises(TimeoutError, match="its environment and policy are ready"):
            wait_until(lambda: collector.drain() < 0, "the end of the first restart")
        assert collector.pids != late
        late = collector.pids
        drain_to(collector, frames(collector) + 4)
        assert collector.pids != late, "a worker that nobody waited for went on"

    def test_time_of_the_pool_is_that_of_all_lives(self):
        collector = RingCollector(
            partial(EnvPoolEnv, "Pendulum-v1", num_threads=1),
            num_streams=2,
            frames_per_batch=2,
            replay_buffer=SlotReplayBuffer(storage=SlotStorage(1 << 10, 2)),
            max_restarts=1,
        )
        try:
            drain_to(collector, 1000)
            seconds = collector.collected.boards[0].seconds
            before = seconds[STAGES.index("env/pool")]
            assert before > 0.0
            kill(collector)
            drain_to(collector, 1010)
            assert seconds[STAGES.index("env/pool")] > before
        finally:
            collector.shutdown()


class TestSeeding:
    """Contract: after ``set_seed`` every row is of the new streams."""

    def test_rows_on_their_way_to_the_device_are_dropped_too(self, replayed, monkeypatch):
        """As with device memory, where a step is published before its copy is complete."""
        collector, buffer = replayed
        drain_to(collector, frames(collector) + 4)
        rows, first = frames(collector), buffer.storage.head.tolist()[0]
        collector.hold_at(rows + 10)
        wait_until(lambda: collector.fill == [5], "five steps in the ring")
        complete_from = time.monotonic() + 0.5
        monkeypatch.setattr(
            HostConsumer,
            "_complete",
            lambda self, issued: issued if time.monotonic() > complete_from else max(issued - 2, self.read),
        )
        collector.set_seed(90)
        drain_to(collector, rows + 10)
        assert buffer.storage["told"][first : first + 5, 0, 0].tolist() == [90] * 5

    def test_a_late_answer_is_not_taken_for_that_of_the_next_seed(self, replayed, seeding, monkeypatch):
        collector, _ = replayed
        wait = RingWorker.wait_for
        with monkeypatch.context() as patch, pytest.raises(TimeoutError, match="that it has done 'seed'"):
            patch.setattr(RingWorker, "wait_for", lambda self, command, _: wait(self, command, 0.1))
            collector.set_seed(1000)  # waits at the gate
        (seeding / "seed").touch()
        collector.set_seed(1001)
        assert (seeding / "seeded 1001").exists(), "set_seed returned before it was done"


@pytest.fixture(scope="module")
def counted() -> Iterator[tuple[RingCollector, SlotReplayBuffer]]:
    """80 steps of two workers, of which the first 30 are random."""
    buffer = SlotReplayBuffer(storage=SlotStorage(1 << 10, 2))
    collector = RingCollector(
        [lambda: Told(1), lambda: Told(1, first_stream=1)],
        five(),
        frames_per_batch=2,
        total_frames=160,
        init_random_frames=60,
        replay_buffer=buffer,
        ring_slots=RING_SLOTS,
    )
    yield collector, buffer
    collector.shutdown()


class TestCounters:
    """Contract: exactly ``total_frames`` are collected, and a state counts what the caller got."""

    def test_random_steps_that_were_dropped_are_acted_again(self, counted):
        collector, buffer = counted
        drain_to(collector, 20)
        collector.hold_at(None)
        wait_until(lambda: collector.fill == [RING_SLOTS] * 2, "full rings")
        collector.set_seed(5)
        drain_to(collector, 80)
        random = (buffer.storage["action"][:40, :, 0] != 5.0).tolist()
        assert random == [[True, True]] * 30 + [[False, False]] * 10

    def test_nothing_is_stepped_by_the_credit_of_before_a_state(self, counted, monkeypatch):
        collector, _ = counted
        count_from = RingWorker.count_from

        def late(self: RingWorker, steps: int) -> None:
            time.sleep(0.2)
            count_from(self, steps)

        monkeypatch.setattr(RingWorker, "count_from", late)
        collector.hold_at(None)
        collector.load_state_dict({**collector.state_dict(), "frames": 156, "steps": [78, 78]})
        wait_until(lambda: collector.drain() >= 0 and frames(collector) >= 160, "the last rows")
        time.sleep(0.1)
        assert (collector.drain(), collector.fill, frames(collector)) == (0, [0, 0], 160)

    def test_iteration_ends_although_a_block_stands_beyond_the_end(self, counted):
        collector, _ = counted
        collector.load_state_dict({**collector.state_dict(), "frames": 158, "steps": [81, 77]})
        ended = threading.Event()

        def watch() -> None:
            if not ended.wait(DEADLINE):
                os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=watch, daemon=True).start()
        try:
            assert next(collector.iterator()) is None
        except KeyboardInterrupt:
            pytest.fail("iteration waits for rows that will not come")
        finally:
            ended.set()

    def test_stats_tell_frames_and_batches(self, counted):
        collector, _ = counted
        before = collector.stats()
        assert list(collector.iterator()), "nothing was left to collect"
        after, state = collector.stats(), collector.state_dict()
        assert (before["completed"], after["completed"]) == (False, True)
        assert (after["frames"], after["batches"]) == (state["frames"], state["iter"] + 1)

    def test_batches_have_rows_of_all_streams_although_the_state_was_uneven(self):
        collector = RingCollector(
            [lambda: Told(1), lambda: Told(1, first_stream=1)], frames_per_batch=20, total_frames=40
        )
        try:
            collector.load_state_dict({**collector.state_dict(), "frames": 22, "steps": [15, 7]})
            rows = torch.cat(list(collector))
        finally:
            collector.shutdown()
        found = CountingEnv.identity(rows["observation"])
        assert found[..., 0].tolist() == [[0, 1]] * 9 and found[..., 2].tolist() == [[n % 5] * 2 for n in range(9)]

    def test_rows_of_a_run_that_is_not_complete_are_not_in_the_state(self, tmp_path):
        collector = RingCollector(
            [lambda: Told(1), lambda: Told(1, first_stream=1, gate=tmp_path)],
            frames_per_batch=10,
            total_frames=200,
            batches="any",
        )
        try:
            rows = collector.next().numel()
            for step in (1, 2):
                (tmp_path / str(step)).touch()
                wait_until(lambda: collector.fill[1] > 0, "a step of the slow worker")
                rows += collector.next().numel()
            state = collector.state_dict()
            assert (state["frames"], sum(state["steps"])) == (rows, rows)
            (tmp_path / "all").touch()
            collector.load_state_dict(state)
            assert collector.state_dict()["steps"] == state["steps"]
            rows += sum(batch.numel() for batch in collector.iterator())
            assert rows == 200
        finally:
            (tmp_path / "all").touch()
            collector.shutdown()

    def test_a_state_is_the_same_after_a_shutdown(self, tmp_path):
        collector = RingCollector(
            [lambda: Told(1), lambda: Told(1, first_stream=1, gate=tmp_path)],
            five(),
            frames_per_batch=10,
            batches="any",
        )
        try:
            collector.next()
            (tmp_path / "1").touch()
            wait_until(lambda: collector.fill[1] > 0, "a step of the slow worker")
            collector.next()
            state = collector.state_dict()
            assert state["frames"] == sum(state["steps"]) == 20 and set(state["versions"]) == {0, 1}
        finally:
            (tmp_path / "all").touch()
            collector.shutdown()
        assert collector.state_dict() == state


class TestBackground:
    """Contract: while a thread drains, weights may be sent from another one, which learns of an error there."""

    def test_whoever_sends_weights_learns_of_a_death(self):
        policy = five()
        collector = RingCollector(
            lambda: Told(2), policy, frames_per_batch=2, replay_buffer=SlotReplayBuffer(storage=SlotStorage(64, 2))
        )
        try:
            collector.start()
            kill(collector)
            wait_until(lambda: collector._background.error is not None, "the error in the background")
            with pytest.raises(RingPeerDied, match="collector-0.*SIGKILL"):
                collector.update_policy_weights_(policy)
        finally:
            collector.shutdown()

    def test_a_hook_that_does_not_return_holds_up_no_shutdown(self):
        entered, goes_on = threading.Event(), threading.Event()

        def hook(_: Any) -> None:
            entered.set()
            goes_on.wait(2 * DEADLINE)

        collector = RingCollector(
            lambda: Told(2),
            frames_per_batch=2,
            replay_buffer=SlotReplayBuffer(storage=SlotStorage(64, 2)),
            post_collect_hook=hook,
            stall_timeout=DEADLINE,
        )
        pids = collector.pids
        try:
            collector.start()
            assert entered.wait(DEADLINE)
            begun = time.monotonic()
            collector.shutdown(timeout=0.5)
            assert time.monotonic() - begun < 5.0 * slowness()
            assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
        finally:
            goes_on.set()
            collector.shutdown()

    def test_weights_are_never_sent_and_shown_at_once(self, monkeypatch):
        buffer, policy = SlotReplayBuffer(storage=SlotStorage(64, 2)), five()
        collector = RingCollector(lambda: Told(2), policy, frames_per_batch=2, replay_buffer=buffer)
        busy, met = threading.Lock(), []

        def alone(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if not busy.acquire(blocking=False):
                    met.append(method.__name__)
                    return method(*args, **kwargs)
                try:
                    time.sleep(0.005)
                    return method(*args, **kwargs)
                finally:
                    busy.release()

            return call

        for name in ("send", "poll"):
            monkeypatch.setattr(SeqlockWeightSyncScheme, name, alone(getattr(SeqlockWeightSyncScheme, name)))
        try:
            collector.start()
            for _ in range(10):
                collector.update_policy_weights_(policy)
                collector.weights_arrived()
        finally:
            collector.shutdown()
        assert not met
