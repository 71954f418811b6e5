# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""RingCollector when something dies, hangs, raises or ends: who says so, how soon, and what is left behind.

Every wait has a deadline. ``RING_COLLECTOR_CYCLES`` (default 3) is the number of starts and stops that are counted.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
from _load import slowness
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Unbounded
from torchrl.envs import EnvBase

from torchrl_ext.collectors import RingCollector
from torchrl_ext.collectors._ring_worker import RingWorker
from torchrl_ext.data import SlotReplayBuffer, SlotStorage, TransitionSampler
from torchrl_ext.testing import CountingEnv
from torchrl_ext.transport import RingPeerDied

# Environments travel by value: workers need not import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROOT = Path(__file__).resolve().parents[1]
#: Seconds against hanging, for one test or fixture: some start six interpreters that import torch.
DEADLINE = 240.0
CYCLES = int(os.environ.get("RING_COLLECTOR_CYCLES", "3"))


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
    with within(DEADLINE + 5.0 * CYCLES, request.node.name):
        yield


def seen_within() -> float:
    """Seconds for a death to be told and for processes to be gone: ten where a core is free."""
    return 10.0 * slowness()


def wait_until(condition: Callable[[], bool], what: str, seconds: float = DEADLINE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.005)


def drain_until(collector: RingCollector, rows: int, seconds: float = DEADLINE) -> int:
    got, deadline = 0, time.monotonic() + seconds
    while got < rows:
        got += collector.drain()
        assert time.monotonic() < deadline, f"only {got} of {rows} rows came within {seconds} s"
        time.sleep(0.001)
    return got


def drain_for_ever(collector: RingCollector) -> None:
    while True:
        collector.drain()
        time.sleep(0.001)


def gone(pids: list[int]) -> bool:
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            pass
    return True


def shared_files(pids: list[int]) -> set[str]:
    """What these processes have open or mapped in /dev/shm by a name; those of other people do not count."""
    found: set[str] = set()
    for pid in pids:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        found |= {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}
        found |= {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
    return {name for name in found if name.startswith("/dev/shm/") and os.path.exists(name)}


def descriptors(pid: int | str = "self") -> int:
    if pid == "self":
        gc.collect()  # what earlier tests dropped is not counted, whenever it would have been collected
    return len(os.listdir(f"/proc/{pid}/fd"))


def family() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


class Told(CountingEnv):
    """Tells in each observation the seed it was given, -1 for none."""

    def __init__(self, num_streams: int, **options: Any) -> None:
        super().__init__(num_streams, **options)
        self._told = -1
        spec = self.observation_spec.clone()
        spec["seed"] = Unbounded((num_streams, 1), dtype=torch.int64)
        self.observation_spec = spec

    def _observe(self, identity: torch.Tensor, flags: Any) -> TensorDict:
        out = super()._observe(identity, flags)
        return out.set("seed", torch.full((*self.batch_size, 1), self._told))

    def _set_seed(self, seed: int | None) -> None:
        self._told = -1 if seed is None else seed


class Doomed(CountingEnv):
    """Does something at its seventh step, having said so."""

    def __init__(self, num_streams: int, deed: Callable[[], None]) -> None:
        super().__init__(num_streams)
        self._deed, self._steps = deed, 0

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        self._steps += 1
        if self._steps == 7:
            print("last words", flush=True)
            self._deed()
        return super()._step(tensordict)


def boom() -> None:
    raise ValueError("boom at 7")


def make_buffer(num_streams: int) -> SlotReplayBuffer:
    return SlotReplayBuffer(storage=SlotStorage(1 << 10, num_streams), sampler=TransitionSampler(1))


@pytest.fixture
def collectors() -> Iterator[list[RingCollector]]:
    """Collectors that a test made; whatever it does, none of them stays."""
    made: list[RingCollector] = []
    yield made
    for collector in made:
        collector.shutdown(timeout=0.0)


def kill_when(path: Path, pid: int, what: signal.Signals) -> list[float]:
    """Signals a process once a file is there; the list gets the time."""
    at: list[float] = []

    def watch() -> None:
        deadline = time.monotonic() + DEADLINE
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        at.append(time.monotonic())
        os.kill(pid, what)

    threading.Thread(target=watch, daemon=True).start()
    return at


class TestBoot:
    """Contract: a worker that does not become ready is told with its words; nothing is left of the others."""

    @pytest.mark.parametrize(
        ("fate", "error", "texts"),
        [
            ("killed", RingPeerDied, ["collector-1", "SIGKILL", "exit code -9", "words of the factory"]),
            ("raises", RuntimeError, ["collector-1", "LookupError", "no such task over there"]),
        ],
    )
    def test_a_factory_that_fails_in_the_worker_is_told(self, fate, error, texts):
        """case 43"""
        here = os.getpid()

        def make() -> EnvBase:
            if os.getpid() != here:
                print("words of the factory", flush=True)
                if fate == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise LookupError("no such task over there")
            return CountingEnv(2)

        children, files = family(), descriptors()
        with pytest.raises(error) as caught:
            RingCollector([lambda: CountingEnv(2), make], frames_per_batch=4)
        message = str(caught.value)
        assert all(text in message for text in texts), message
        del caught
        wait_until(lambda: family() <= children, "the end of the other worker")
        assert descriptors() <= files

    def test_a_layout_that_differs_in_the_worker_is_told(self):
        here = os.getpid()
        with pytest.raises(RuntimeError, match=r"the environment of worker 0 must have 2 streams .*got 3") as caught:
            RingCollector(lambda: CountingEnv(2 if os.getpid() == here else 3), frames_per_batch=4)
        assert "collector-0" in str(caught.value)

    def test_a_worker_that_takes_too_long_is_told_and_ended(self):
        here = os.getpid()

        def make() -> EnvBase:
            if os.getpid() != here:
                time.sleep(1000)
            return CountingEnv(2)

        children, begun = family(), time.monotonic()
        with pytest.raises(TimeoutError, match="collector-0.* must send that its environment and policy are ready"):
            RingCollector(make, frames_per_batch=4, boot_timeout=1.0)
        assert time.monotonic() - begun < 1.0 + seen_within() and family() <= children


class TestDeath:
    """Contract: a death is told within 10 s with worker, code and last words, once what was published is read."""

    def test_a_worker_killed_in_a_step_ends_the_iteration(self, collectors, tmp_path):
        """case 43"""

        def hang() -> None:
            (tmp_path / "in the step").touch()
            time.sleep(1000)

        collectors.append(
            RingCollector([lambda: CountingEnv(2), lambda: Doomed(2, hang)], frames_per_batch=8, ring_slots=16)
        )
        pids, batches = collectors[0].pids, []
        at = kill_when(tmp_path / "in the step", pids[1], signal.SIGKILL)
        with pytest.raises(RingPeerDied) as caught:
            for batch in collectors[0]:
                batches.append(batch)
        assert time.monotonic() - at[0] < seen_within()
        message = str(caught.value)
        assert all(text in message for text in ("collector-1", f"pid {pids[1]}", "SIGKILL", "-9", "last words")), (
            message
        )
        assert sum(len(batch) for batch in batches) == 6, "what was published before was lost"
        wait_until(lambda: gone(pids), "the end of the other worker")

    def test_a_worker_killed_while_it_waits_for_credit_is_told_by_drain(self, collectors):
        """case 43"""
        buffer = make_buffer(4)
        collectors.append(
            RingCollector(
                [lambda: CountingEnv(2), lambda: CountingEnv(2, first_stream=2)],
                frames_per_batch=8,
                replay_buffer=buffer,
            )
        )
        collector = collectors[0]
        collector.hold_at(20)
        drain_until(collector, 20)
        pids = collector.pids
        os.kill(pids[0], signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(RingPeerDied, match=r"collector-0.*SIGKILL"):
            drain_for_ever(collector)
        assert time.monotonic() - begun < seen_within()
        collector.shutdown()
        wait_until(lambda: gone(pids), "the end of the workers")
        assert len(buffer) == 20

    def test_a_worker_killed_between_tail_and_row_is_told(self, collectors):
        """The successors of its last row are lost with it: nothing else may be waited for."""
        here = os.getpid()

        def make() -> EnvBase:
            if os.getpid() != here:
                from torchrl_ext.transport import HostProducer

                write, count = HostProducer._write, [0]

                def die_after_the_tail(self, *arguments) -> None:
                    write(self, *arguments)
                    count[0] += 1
                    if count[0] == 8:
                        os.kill(os.getpid(), signal.SIGKILL)

                HostProducer._write = die_after_the_tail
            return CountingEnv(2, lengths=100)

        collectors.append(RingCollector(make, frames_per_batch=14))
        collector = collectors[0]
        collector._go()
        wait_until(lambda: gone(collector.pids), "the death of the worker")
        begun = time.monotonic()
        with pytest.raises(RingPeerDied, match=r"collector-0.*SIGKILL"):
            for _ in collector:
                pass
        assert time.monotonic() - begun < seen_within()

    def test_a_stopped_worker_is_told_after_stall_timeout(self, collectors):
        stall = 6.0  # a worker that gets no core for a while must not be taken for the stopped one
        collectors.append(
            RingCollector(
                [lambda: CountingEnv(2), lambda: CountingEnv(2)], frames_per_batch=8, ring_slots=8, stall_timeout=stall
            )
        )
        collector = collectors[0]
        assert collector.next() is not None
        pids = collector.pids
        begun = time.monotonic()
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(TimeoutError, match=rf"collector-1 \(pid {pids[1]}\) .*stall_timeout={stall} s"):
            for _ in collector:
                pass
        assert 1.0 < time.monotonic() - begun < stall + seen_within()
        wait_until(lambda: gone(pids), "the end of a stopped worker")

    @pytest.mark.parametrize("how", ["iteration", "drain", "start"])
    def test_an_exception_of_the_environment_comes_with_its_text(self, how, collectors):
        """case 43"""
        buffer = None if how == "iteration" else make_buffer(2)
        collector = RingCollector(lambda: Doomed(2, boom), frames_per_batch=4, replay_buffer=buffer)
        collectors.append(collector)
        pids = collector.pids
        begun = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            if how == "iteration":
                for _ in collector:
                    pass
            elif how == "start":
                collector.start()
                assert wait_until(lambda: len(buffer) == 12, "draining in the background") is None
                wait_until(lambda: gone(pids), "the end of the worker")
                wait_until(lambda: collector._background.error is not None, "the error in the background")
            drain_for_ever(collector)
        assert time.monotonic() - begun < seen_within()
        message = str(caught.value)
        assert all(text in message for text in ("collector-0", "ValueError", "boom at 7", "_step")), message
        if buffer is not None:
            assert len(buffer) == 12, "what was published before was lost"


# ---------------------------------------------------------------------- restart


@pytest.fixture(scope="module")
def restarted() -> SimpleNamespace:
    """400 rows of two workers, of which one was killed with rows unread and the other one without; then a resume."""
    buffer = make_buffer(4)
    with within(DEADLINE, "collecting with restarts"):
        collector = RingCollector(
            [lambda: Told(2), lambda: Told(2, first_stream=2)],
            frames_per_batch=8,
            total_frames=400,
            replay_buffer=buffer,
            extra_keys=[("collector", "traj_ids"), "is_init"],
            ring_slots=16,
            max_restarts=2,
            seed=1000,
        )
        try:
            first_pids = collector.pids
            collector.set_seed(50)
            rows, deaths = 0, []
            collector.hold_at(82)
            rows += drain_until(collector, 80)
            collector.hold_at(None)
            wait_until(lambda: collector.fill == [16, 16], "full rings")
            deaths.append(buffer.storage.head.tolist()[2] + 16)
            os.kill(collector.pids[1], signal.SIGKILL)
            wait_until(lambda: gone(first_pids[1:]), "the death of the worker")
            collector.hold_at(200)
            rows += drain_until(collector, 200 - rows)
            os.kill(collector.pids[0], signal.SIGKILL)
            deaths.append(50)
            wait_until(lambda: collector.drain() == 0 and collector.pids[0] != first_pids[0], "the second restart")
            last_pids = collector.pids
            collector.hold_at(240)
            rows += drain_until(collector, 240 - rows)
            before = buffer.storage.head.tolist()
            episodes = collector.collected.pop_episodes()
            collector.load_state_dict(collector.state_dict())
            collector.hold_at(None)
            rows += drain_until(collector, 400 - rows)
            time.sleep(0.1)
            rows += collector.drain()
        finally:
            collector.shutdown()
    return SimpleNamespace(
        buffer=buffer,
        rows=rows,
        deaths=deaths,
        resumed_at=before,
        first_pids=first_pids,
        last_pids=last_pids,
        episodes=episodes,
        storage=buffer.storage,
    )


class TestRestart:
    """Contract: ``max_restarts`` workers are started anew for their streams; rows stay exact, streams are cut."""

    def test_total_frames_stays_exact(self, restarted):
        assert restarted.rows == 400 and restarted.storage.head.tolist() == [100] * 4

    def test_both_workers_were_started_anew(self, restarted):
        assert not set(restarted.first_pids) & set(restarted.last_pids)

    def test_no_reset_is_taken_for_a_successor(self, restarted):
        sample = restarted.buffer.sample(20_000)
        before, after = (CountingEnv.identity(part["observation"]) for part in (sample, sample["next"]))
        wrong = (after != before + torch.tensor([0, 0, 1])).any(-1)
        assert not wrong.any(), f"{before[wrong][:3].tolist()} -> {after[wrong][:3].tolist()}"
        assert (before[:, 0] == sample["index"][:, 1]).all()
        # The last row of a life has no successor that anybody knows.
        assert len(torch.unique(sample["index"], dim=0)) >= 400 - 4 * 4

    def test_rows_that_were_published_before_the_death_are_kept(self, restarted):
        rows = CountingEnv.identity(restarted.storage["observation"][: restarted.deaths[0], 2:])
        numbers = rows[..., 1] * 5 + rows[..., 2]
        assert (numbers[1:] - numbers[:-1] == 1).all(), "rows before the death are missing"

    def test_a_restarted_worker_begins_an_episode(self, restarted):
        for stream, step in ((2, restarted.deaths[0]), (0, restarted.deaths[1])):
            assert restarted.storage["observation"][step, stream].tolist() == [stream, 0, 0]
            assert restarted.storage["is_init"][step, stream]

    def test_trajectories_keep_numbers_of_their_own(self, restarted):
        rows = restarted.storage["observation"][:100]
        begins = (rows[..., 2] == 0).cumsum(0) * 4 + torch.arange(4)  # one number for each episode that began
        names = torch.stack([begins, restarted.storage["collector", "traj_ids"][:100]], -1).reshape(-1, 2)
        count = len(torch.unique(begins))
        assert len(torch.unique(names, dim=0)) == len(torch.unique(names[:, 1])) == count

    def test_returns_begin_anew_with_a_worker(self, restarted):
        assert (restarted.episodes["length"] == 5).all()
        number = (restarted.episodes["return"] - 15 - 500 * restarted.episodes["stream"]) / 50
        assert torch.equal(number, number.round())

    def test_no_seed_is_used_twice(self, restarted):
        seeds = restarted.storage["seed"][:100, :, 0]
        firsts = [set(seeds[:, 0].tolist()), set(seeds[:, 2].tolist())]
        used = sorted(seed + stream for block in firsts for seed in block for stream in (0, 1))
        assert [len(block) for block in firsts] == [3, 3], f"seeds of the blocks: {firsts}"
        assert len(set(used)) == len(used), f"a seed came twice: {used}"

    def test_seeds_follow_the_last_seed_that_was_set(self, restarted):
        seeds = restarted.storage["seed"][:100]
        assert seeds[0].flatten().tolist() == [50, 50, 52, 52] and (seeds >= 50).all() and (seeds < 1000).all()


# ---------------------------------------------------------------------- scripts


class TestWeightsOfANewStart:
    """Contract: a worker that starts anew may ask for its weights before it is ready, and is answered."""

    def test_weights_are_shown_while_a_worker_starts(self, monkeypatch):
        answers = [False, False, False, True]
        worker = RingWorker.__new__(RingWorker)
        process = SimpleNamespace(poll=lambda _: answers.pop(0), recv=lambda _, what: ("ready", None))
        worker._process, worker.board = process, SimpleNamespace(heartbeat=SimpleNamespace(reset=lambda: None))
        shown = []
        worker.wait_until_ready(time.monotonic() + DEADLINE, lambda: shown.append(len(answers)))
        assert shown == [3, 2, 1] and not answers

    def test_a_restart_shows_them(self, monkeypatch):
        collector = RingCollector(
            lambda: CountingEnv(2), frames_per_batch=2, replay_buffer=make_buffer(2), max_restarts=1
        )
        wait, seen = RingWorker.wait_until_ready, []

        def noted(worker, deadline, meanwhile=None):
            seen.append(meanwhile)
            wait(worker, deadline, meanwhile)

        monkeypatch.setattr(RingWorker, "wait_until_ready", noted)
        try:
            first = collector.pids[0]
            os.kill(first, signal.SIGKILL)
            wait_until(lambda: gone([first]), "the death of the worker")
            collector.hold_at(None)
            wait_until(lambda: collector.drain() and collector.pids[0] != first, "the new start")
            assert seen == [collector._workers.poll_weights]
        finally:
            collector.shutdown()


SCRIPT = """
import sys, time
import torch
from tensordict.nn import TensorDictModule
from torchrl_ext.collectors import RingCollector
from torchrl_ext.data import SlotReplayBuffer, SlotStorage
from torchrl_ext.testing import CountingEnv

class Env(CountingEnv):
    def _step(self, tensordict):
        return super()._step(tensordict).set("reward", gain() * tensordict["action"])

class Policy(torch.nn.Module):
    def forward(self, observation):
        return torch.full((*observation.shape[:-1], 1), 3.0)

def gain():
    return 2.0

mode = sys.argv[1]
buffer = SlotReplayBuffer(storage=SlotStorage(100, 2)) if mode == "drain" else None
print("boot", flush=True)
collector = RingCollector(
    [lambda: Env(1), lambda: Env(1, first_stream=1)],
    TensorDictModule(Policy(), ["observation"], ["action"]),
    frames_per_batch=8,
    replay_buffer=buffer,
)
print("ready", flush=True)
if mode == "drain":
    while True:
        if collector.drain() and min(buffer.storage.head.tolist()) > 5:
            print(float(buffer.storage["next", "reward"][0, 1]), flush=True)
            while True:
                collector.drain()
                time.sleep(0.01)
for number, batch in enumerate(collector):
    if number == 2:
        print(float(batch["next", "reward"].min()), flush=True)
"""


@contextmanager
def script(mode: str) -> Iterator[subprocess.Popen]:
    """Runs the script as a notebook is run: its ``__main__`` is no file and has no guard."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen) -> str:
    """Returns the next line that the script printed, without what TorchRL logs."""
    assert process.stdout is not None and process.stderr is not None
    while "torchrl" in (line := process.stdout.readline()):
        pass
    assert line, process.stderr.read()
    return line.strip()


def ctrl_c_within(imported: float) -> float:
    """Seconds: five where a core is free. torch and TorchRL take one of them to leave an interpreter, alone.

    They take four to be imported there: a machine where this script's import took longer is slower by as much.
    """
    return 5.0 * max(slowness(), imported / 5.0)


def end_of(process: subprocess.Popen) -> float:
    """Waits for the end of a script; returns the seconds that it took."""
    begun = time.monotonic()
    process.wait(DEADLINE)
    return time.monotonic() - begun


def workers_of(process: subprocess.Popen) -> list[int]:
    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


class TestScripts:
    """Contract: factories and policies of a guardless ``__main__`` work; workers do not outlive it, however it ends."""

    @pytest.mark.parametrize(
        ("mode", "end"),
        [("iterate", signal.SIGKILL), ("iterate", signal.SIGINT), ("drain", signal.SIGINT)],
        ids=["killed", "ctrl-c", "ctrl-c in drain"],
    )
    def test_workers_end_with_the_script(self, mode, end):
        begun = time.monotonic()
        with script(mode) as process:
            assert line_of(process) == "boot"
            imported = time.monotonic() - begun
            assert [line_of(process) for _ in range(2)] == ["ready", "6.0"]
            workers = workers_of(process)
            assert len(workers) == 2 + (mode == "drain")  # the resource tracker of a replay's lock
            files = shared_files([process.pid, *workers])
            process.send_signal(end)
            assert end_of(process) < ctrl_c_within(imported)
            ended = time.monotonic()
            wait_until(lambda: gone(workers), "the end of the workers")
            assert time.monotonic() - ended < seen_within()
            assert process.stderr is not None
            assert end == signal.SIGKILL or "KeyboardInterrupt" in process.stderr.read()
        assert not [name for name in files if os.path.exists(name)]

    def test_ctrl_c_while_workers_start_ends_them(self):
        begun = time.monotonic()
        with script("iterate") as process:
            assert line_of(process) == "boot"
            imported = time.monotonic() - begun
            wait_until(lambda: len(workers_of(process)) == 2, "the start of the workers")
            workers = workers_of(process)
            process.send_signal(signal.SIGINT)
            assert end_of(process) < ctrl_c_within(imported)
            ended = time.monotonic()
            wait_until(lambda: gone(workers), "the end of the workers")
            assert time.monotonic() - ended < seen_within()

    # ---------------------------------------------------------------------- what stays

    def test_a_forked_copy_does_not_end_the_workers(self, collectors):
        collectors.append(RingCollector(lambda: CountingEnv(2), frames_per_batch=4))
        collector = collectors[0]
        collector.next()
        copy = os.fork()
        if not copy:
            try:
                collector.shutdown()
            finally:
                os._exit(0)
        os.waitpid(copy, 0)
        for _ in range(100):
            assert collector.next().shape == (2, 2)


class TestResources:
    """Contract: nothing grows with batches or with starts and stops."""

    def test_descriptors_stay_flat_over_two_thousand_batches(self, collectors):
        """case 37"""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The worker inherits it; it has less than this process, whose earlier tests may have left many open.
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 200, hard))
        try:
            collectors.append(RingCollector(lambda: CountingEnv(2), frames_per_batch=2, total_frames=4000))
            collector, counts = collectors[0], []
            for number, batch in enumerate(collector):
                assert batch.shape == (1, 2)
                if number in (99, 1999):
                    counts.append((descriptors(), descriptors(collector.pids[0])))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert number == 1999
        assert all(now <= then for now, then in zip(counts[1], counts[0], strict=True)), counts

    def test_starts_and_stops_leave_nothing(self):
        kept = make_buffer(2)  # has Python start what looks after locks
        threads, children = set(threading.enumerate()), family()

        def held() -> tuple[int, int]:
            return descriptors(), psutil.Process().num_threads()

        def grew(counts: tuple[int, int]) -> bool:
            return any(now > then for now, then in zip(held(), counts, strict=True))

        counts, families, files = None, [], shared_files([os.getpid()])
        assert kept is not None
        for cycle in range(CYCLES):
            buffer = make_buffer(2) if cycle % 2 else None
            collector = RingCollector(lambda: CountingEnv(2), frames_per_batch=4, replay_buffer=buffer)
            families += collector.pids
            if cycle % 2:
                collector.start()
            else:
                collector.next()
            made = shared_files([os.getpid(), *collector.pids]) - files
            collector.shutdown()
            collector.shutdown()
            del collector, buffer
            if counts is None:
                counts = held()
            # A thread that was joined has said that it ended; the kernel's part of it ends after that.
            told = f"{counts} descriptors and threads after {cycle + 1} starts and stops, as after one,"
            wait_until(lambda most=counts: not grew(most), told, 60.0)
            assert not [name for name in made if os.path.exists(name)]
        assert gone(families) and set(threading.enumerate()) <= threads and family() <= children
