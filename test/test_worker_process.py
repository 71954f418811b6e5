# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Worker processes: what reaches them, what comes back, and how each way to die ends. Every wait has a deadline."""

from __future__ import annotations

import gc
import json
import multiprocessing as mp
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
from _load import slowness
from tensordict import TensorDict

from torchrl_ext.collectors import _heartbeat, _worker_process
from torchrl_ext.collectors._heartbeat import Heartbeat
from torchrl_ext.collectors._spawn import Payload
from torchrl_ext.collectors._worker_process import WorkerProcess
from torchrl_ext.data import RowLayout, SlotStorage
from torchrl_ext.transport import RingPeerDied
from torchrl_ext.transport.segment import Segment

ROOT = Path(__file__).resolve().parents[1]
#: Seconds for anything at all.
DEADLINE = 60.0

# Targets travel by value: importing this module in a worker would import torch there, two seconds for nothing.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def serve(channel, heartbeat=None, **state) -> None:
    """Calls the functions that are sent with ``state`` and sends back what they return."""
    while True:
        if channel.poll(0.02):
            channel.send(channel.recv()(**state))
        if heartbeat is not None:
            heartbeat.beat()


def sleep(channel) -> None:
    print("asleep", flush=True)
    channel.send("asleep")
    time.sleep(1000)


def start(
    target: Callable[..., None] = serve, *, name: str = "worker-0", options: Any = None, **state
) -> WorkerProcess:
    payload = Payload(target, state)
    try:
        return WorkerProcess(payload, name=name, **(options or {}))
    finally:
        payload.close()


def ask(worker: WorkerProcess, function: Callable[..., Any]) -> Any:
    worker.send(function)
    return worker.recv(DEADLINE, what="an answer")


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def seen_within() -> float:
    """Seconds for a death to be seen: ten where a core is free."""
    return 10.0 * slowness()


def wait_until(condition: Callable[[], bool], what: str, seconds: float = DEADLINE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.01)


def descriptors(pid: int | str = "self") -> int:
    if pid == "self":
        gc.collect()  # what earlier tests dropped is not counted, whenever it would have been collected
    return len(os.listdir(f"/proc/{pid}/fd"))


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


@pytest.fixture
def started() -> Iterator[list[WorkerProcess]]:
    """Workers that a test made; whatever it does, none of them stays."""
    workers: list[WorkerProcess] = []
    yield workers
    for worker in workers:
        worker.close()


class Shared:
    """What the shared worker was given, as its parent holds it."""

    def __init__(self) -> None:
        self.segment, self.heartbeat = Segment(64, "test"), Heartbeat()
        self.tensor = torch.zeros(4).share_memory_()
        self.parameter = torch.nn.Parameter(torch.ones(3).share_memory_())
        step = torch.ones(1, 2, 1)
        no = torch.zeros(1, 2, 1, dtype=torch.bool)
        self.run = TensorDict(
            {"observation": step, "next": {"observation": step, "reward": step, "done": no, "terminated": no}}, [1, 2]
        )
        self.storage = SlotStorage(8, 2, layout=RowLayout.from_tensordict(self.run), shared=True)
        context = mp.get_context("spawn")
        self.lock = context.Lock()
        self.ours, self.theirs = context.Pipe()
        self.core = min(os.sched_getaffinity(0))
        state = {name: value for name, value in vars(self).items() if name not in ("ours", "core")}
        options = {"cores": [self.core], "num_threads": 2}
        self.worker = start(view=self.tensor[2:], options=options, **state)


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    state = Shared()
    yield state
    state.worker.close()
    state.ours.close(), state.theirs.close()


class TestGarbage:
    """Contract: garbage is collected as anywhere; what the worker imported is not looked through for it."""

    def test_imports_are_set_aside_and_cycles_of_the_target_are_collected(self, shared):
        def look(**_):
            import gc
            import weakref

            class Node:
                pass

            node = Node()
            node.itself, told = node, weakref.ref(node)
            del node
            gc.collect()
            return gc.isenabled(), told() is None, gc.get_freeze_count() > 100_000

        assert ask(shared.worker, look) == (True, True, True)


class TestArguments:
    """Contract: what a worker is given is pickled before it starts; shared memory stays shared, the rest is a copy."""

    def test_shared_memory_is_the_same_on_both_sides(self, shared):
        def write(segment, tensor, view, **_):
            segment.bytes[5] = 42
            tensor[1] = 7.0
            view[1] = 8.0
            return tensor.tolist()

        assert ask(shared.worker, write) == [0.0, 7.0, 0.0, 8.0], "a view has a copy of its own"
        assert int(shared.segment.bytes[5]) == 42 and shared.tensor.tolist() == [0.0, 7.0, 0.0, 8.0]

    def test_shared_storage_shows_what_the_worker_wrote(self, shared):
        assert ask(shared.worker, lambda storage, run, **_: len(storage.extend_batch(run).index)) == 1
        assert shared.storage.head.tolist() == [1, 1] and shared.storage["observation"][0].tolist() == [[1.0], [1.0]]

    def test_parameters_are_copies_even_from_shared_memory(self, shared):
        def add(parameter, **_):
            parameter.data.add_(1)
            return type(parameter).__name__, parameter.requires_grad, parameter.tolist()

        assert ask(shared.worker, add) == ("Parameter", True, [2.0, 2.0, 2.0])
        assert shared.parameter.tolist() == [1.0, 1.0, 1.0]

    def test_connections_and_locks_of_multiprocessing_work(self, shared):
        with shared.lock:
            assert not ask(shared.worker, lambda lock, **_: lock.acquire(timeout=0.01)), "the lock is another one"
        shared.ours.send("over there")
        assert ask(shared.worker, lambda theirs, **_: theirs.poll(60.0) and theirs.recv()) == "over there"

    def test_cores_and_threads_are_those_asked_for(self, shared):
        """case 42"""
        cores, threads = ask(shared.worker, lambda **_: (os.sched_getaffinity(0), torch.get_num_threads()))
        assert (cores, threads) == ({shared.core}, 2)

    def test_freed_memory_stays_with_the_worker(self, shared):
        def faults(**_):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _step in range(10):
                arrays = [torch.empty(4 << 20, dtype=torch.uint8).fill_(1) for _ in range(8)]
                del arrays
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        assert ask(shared.worker, faults) < 3 * 8192, "the 8192 pages of each of 10 steps were mapped anew"

    def test_a_policy_needs_no_descriptor_for_each_tensor(self):
        """case 37"""
        payload = Payload(serve, {"policy": torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(200)])})
        assert payload.descriptors == []

    def test_the_part_that_does_not_pickle_is_named_before_anything_starts(self):
        before = children(), descriptors()
        policy = torch.nn.Linear(2, 2)
        policy.lock = threading.Lock()
        segment = Segment(64, "test")
        with pytest.raises(
            TypeError,
            match=r"^RingCollector: policy must pickle, got Linear: cannot pickle '_thread.lock' object. Noth",
        ):
            Payload(serve, {"ring": segment, "policy": policy}, where="RingCollector")
        del segment
        assert children() <= before[0] and descriptors() <= before[1]

    def test_a_payload_starts_again_with_the_same_memory(self, started):
        ours, theirs = mp.Pipe()
        payload = Payload(lambda channel, pipe: pipe.send(os.getpid()), {"pipe": theirs})
        theirs.close()
        for _ in range(2):
            started.append(WorkerProcess(payload, name="again"))
            assert ours.poll(DEADLINE) and ours.recv() == started[-1].pid
        payload.close()
        payload.close()
        before = descriptors()
        with pytest.raises(RuntimeError, match="Payload: it must not be closed to start a process"):
            WorkerProcess(payload, name="again")
        assert descriptors() <= before

    def test_a_process_that_cannot_be_made_leaves_nothing(self, monkeypatch):
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        before = descriptors()
        with pytest.raises(FileNotFoundError):
            start()
        assert descriptors() <= before

    @pytest.mark.parametrize(
        ("options", "text"), [({"cores": [100000]}, "cores name some of"), ({"num_threads": 0}, "num_threads must be")]
    )
    def test_cores_and_threads_that_cannot_be_are_refused(self, options, text):
        before = descriptors()
        with pytest.raises(ValueError, match=f"^WorkerProcess: .*{text}.* Nothing was started"):
            start(options=options)
        assert descriptors() <= before


SCRIPT = """
from torchrl_ext.collectors._spawn import Payload
from torchrl_ext.collectors._worker_process import WorkerProcess

class Policy:
    gain = 2

    def act(self, number):
        return helper(number) * self.gain

def helper(number):
    return number + 1

print("main runs", flush=True)
payload = Payload(lambda channel, policy: channel.send((policy.act(20), Policy())), {"policy": Policy()})
worker = WorkerProcess(payload, name="w")
answer, policy = worker.recv(60.0)
print(answer, type(policy) is Policy, worker.stop(60.0), flush=True)
worker.close()
"""


class TestStart:
    """Contract: the caller's ``__main__`` is not run again; the worker has its path and folder, and a session."""

    @pytest.mark.parametrize("how", ["file", "stdin"])
    def test_scripts_without_a_guard_work(self, how, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        command = [sys.executable, str(script) if how == "file" else "-"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        result = subprocess.run(
            command,
            input=SCRIPT if how == "stdin" else None,
            capture_output=True,
            text=True,
            env=env,
            timeout=DEADLINE,
        )
        assert (result.stdout, result.returncode) == ("main runs\n42 True 0\n", 0), result.stderr

    def test_path_folder_arguments_and_session_are_set(self, started, monkeypatch, tmp_path):
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.chdir(tmp_path)
        (tmp_path / "only_here.py").write_text("VALUE = 5")
        (tmp_path / "pickle.py").write_text("raise ImportError('the wrong module')")
        started.append(start(options={"env": {"ONLY_THERE": "1"}}))

        def look(**_):
            import only_here

            return (
                only_here.VALUE,
                os.getcwd(),
                sys.argv,
                os.environ["ONLY_THERE"],
                os.getsid(0),
                mp.current_process(),
            )

        value, folder, arguments, variable, session, process = ask(
            started[0], lambda **state: (*look(**state)[:5], look(**state)[5].daemon)
        )
        assert (value, folder, arguments, variable, process) == (5, str(tmp_path), sys.argv, "1", False)
        assert session == started[0].pid != os.getsid(0)

    def test_a_target_without_torch_imports_none(self, started):
        started.append(start())
        names = ask(started[0], lambda **_: sorted({"torch", "numpy", "tensordict", "torchrl_ext"} & set(sys.modules)))
        assert names == []

    def test_only_what_was_meant_is_inherited_and_handed_on(self, started):
        """Standard streams, channel, pipe of the parent, report: and of these a program started there gets three."""
        other = os.open("/dev/null", os.O_RDONLY)
        started.append(start())
        inside = ask(started[0], lambda **_: len(os.listdir("/proc/self/fd")))
        listing = "import os; print(len(os.listdir('/proc/self/fd')))"
        after = ask(
            started[0],
            lambda **_: int(subprocess.run([sys.executable, "-c", listing], stdout=-1, close_fds=False).stdout),
        )
        os.close(other)
        assert (inside, after) == (3 + 3 + 1, 3 + 1), "one more is the listing itself"


class TestOutput:
    """Contract: nothing reaches the parent's terminal; the end of the output is in errors; files are the owner's."""

    def test_output_is_kept_from_the_terminal_and_shown_in_errors(self, started, capfd):
        def speak(channel):
            print("\n".join(f"line {number}" for number in range(5000)))
            sys.stderr.write("last words\n")
            os._exit(3)

        started.append(start(speak, name="speaker"))
        with pytest.raises(
            RingPeerDied, match=r"^WorkerProcess: a message was awaited, but worker 'speaker'"
        ) as caught:
            started[0].recv(DEADLINE)
        assert f"(pid {started[0].pid}) ended with exit code 3; the end of its output:" in str(caught.value)
        assert str(caught.value).endswith("line 4998\nline 4999\nlast words")
        assert "line 4979" not in started[0].tail(20) and started[0].tail(2) == "line 4999\nlast words"
        assert capfd.readouterr() == ("", "")

    def test_a_given_file_is_private_and_appended_to(self, started, tmp_path):
        for word in ("first", "second"):
            started.append(start(lambda channel, word: print(word), options={"output": tmp_path / "log"}, word=word))
            wait_until(lambda: not started[-1].is_alive(), "the end of the worker")
            assert started[-1].tail() == word
        assert (tmp_path / "log").read_text() == "first\nsecond\n"
        assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600

    def test_what_became_of_a_worker_is_known_after_close(self):
        def fail(channel):
            print("before")
            raise ValueError("boom at 7")

        worker = start(fail)
        wait_until(lambda: not worker.is_alive(), "the end of the worker")
        worker.close()
        worker.close()
        assert "boom at 7" in worker.failure() and worker.tail().startswith("before") and worker.exitcode == 1
        with pytest.raises(RuntimeError, match="must not be closed"):
            worker.recv(1.0)


class TestMessages:
    """Contract: by value, in order, readable after a death; every wait ends."""

    def test_descriptors_stay_flat_over_two_thousand_messages(self, shared):
        """case 37"""
        worker, tensors = shared.worker, [torch.full((8,), float(number)) for number in range(4)]

        def exchange() -> None:
            worker.send(lambda **_: [torch.full((8,), float(number)) for number in range(4)])
            assert all(torch.equal(a, b) for a, b in zip(worker.recv(DEADLINE), tensors, strict=True))

        exchange()
        before = descriptors(), descriptors(worker.pid)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] + 64, hard))
        ask(worker, lambda **_: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)))
        try:
            for _ in range(1000):
                exchange()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert descriptors() <= before[0] and descriptors(worker.pid) <= before[1]

    def test_a_timeout_names_what_was_awaited_and_a_late_answer_still_comes(self, started, tmp_path):
        goes_on = tmp_path / "goes on"

        def late(**_):
            while not goes_on.exists():
                time.sleep(0.005)
            return "late"

        started.append(start(name="slow"))
        started[0].send(late)
        assert not started[0].poll(0.01)
        with pytest.raises(TimeoutError, match=r"worker 'slow' \(pid \d+\) must send the first batch within 0.05 s"):
            started[0].recv(0.05, what="the first batch")
        goes_on.touch()
        assert started[0].recv(DEADLINE) == "late"

    def test_messages_before_a_death_are_read_first(self, started):
        def talk(channel):
            for number in range(3):
                channel.send(number)
            os.kill(os.getpid(), signal.SIGKILL)

        started.append(start(talk))
        wait_until(lambda: not started[0].is_alive(), "the end of the worker")
        assert [started[0].recv(DEADLINE) for _ in range(3)] == [0, 1, 2]
        for _ in range(2):
            with pytest.raises(RingPeerDied, match="SIGKILL"):
                started[0].recv(DEADLINE)

    def test_a_message_to_a_dead_worker_says_what_happened(self, started):
        started.append(start(lambda channel: sys.exit(4)))
        wait_until(lambda: not started[0].is_alive(), "the end of the worker")
        with pytest.raises(RingPeerDied, match="a message was to be sent, but worker .* ended with exit code 4"):
            started[0].send(1)

    def test_a_stopped_worker_holds_up_no_send(self, started, monkeypatch):
        monkeypatch.setattr(_worker_process, "_SEND_WITHIN", 1)
        started.append(start(sleep))
        assert started[0].recv(DEADLINE) == "asleep"
        os.kill(started[0].pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError, match="must take a message within 1 s; worker .* is alive"):
            started[0].send(bytes(10_000_000))

    @pytest.mark.parametrize("dies", [False, True], ids=["stuck", "killed"])
    def test_half_a_message_holds_up_no_recv(self, dies, started, monkeypatch):
        def begin(channel, dies):
            os.write(channel._connection.fileno(), (100).to_bytes(4, "big") + b"half")
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)

        monkeypatch.setattr(_worker_process, "_RECV_WITHIN", int(DEADLINE) if dies else 1)
        started.append(start(begin, dies=dies))
        error, text = (RingPeerDied, "SIGKILL") if dies else (TimeoutError, "must finish a message within 1 s")
        with pytest.raises(error, match=text):
            started[0].recv(DEADLINE)


class TestFailure:
    """Contract: an exception of the target arrives with type, message and traceback; exit code 1."""

    @pytest.mark.parametrize("method", ["recv", "poll", "send"])
    def test_exception_of_the_target_is_raised_in_the_parent(self, method, started):
        """case 43"""

        def step(number):
            raise ValueError(f"boom at {number}")

        started.append(start(lambda channel: step(7), name="env"))
        worker = started[0]
        if method == "send":
            wait_until(lambda: not worker.is_alive(), "the end of the worker")
        with pytest.raises(RuntimeError, match=r"worker 'env' \(pid \d+\) raised ValueError: boom at 7\n") as caught:
            worker.send(0) if method == "send" else getattr(worker, method)(DEADLINE)
        assert type(caught.value) is RuntimeError
        assert "Traceback" in str(caught.value) and "in step" in str(caught.value)
        wait_until(lambda: worker.exitcode == 1, "exit code 1")
        assert "boom at 7" in worker.tail(), "it is in the output as well"

    def test_exception_arrives_while_the_worker_cannot_exit(self, started):
        """A thread, a forked child and a full socket hold it back."""

        def fail(channel):
            threading.Thread(target=time.sleep, args=(1000,)).start()
            if os.fork() == 0:
                time.sleep(1000)
            raise ValueError("boom")

        started.append(start(fail))
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="ValueError: boom"):
            started[0].recv(DEADLINE)
        assert time.monotonic() - begin < seen_within()

    def test_arguments_that_cannot_be_rebuilt_are_told(self, started):
        class Stubborn:
            def __reduce__(self):
                return int, ("no number",)

        started.append(start(part=Stubborn()))
        with pytest.raises(RuntimeError, match="ValueError: invalid literal"):
            started[0].recv(DEADLINE)

    def test_long_messages_are_cut(self, started):
        def fail(channel):
            raise ValueError("x" * 10_000_000)

        started.append(start(fail))
        with pytest.raises(RuntimeError, match="ValueError: xxx") as caught:
            started[0].recv(DEADLINE)
        assert len(str(caught.value)) < 100_000


class TestDeath:
    """Contract: a killed worker is told within 10 s with name, signal and output; nothing of it stays."""

    @pytest.mark.parametrize("when", ["boot", "middle", "waiting"])
    def test_a_killed_worker_is_named_with_its_signal(self, when, started):
        """case 43"""
        started.append(start(sleep, name="collector-1"))
        worker = started[0]
        if when != "boot":
            assert worker.recv(DEADLINE) == "asleep"
        timer = threading.Timer(0.3 if when == "waiting" else 0.0, os.kill, (worker.pid, signal.SIGKILL))
        timer.start()
        begin = time.monotonic()
        try:
            with pytest.raises(
                RingPeerDied, match=rf"worker 'collector-1' \(pid {worker.pid}\) was killed by SIGKILL"
            ) as e:
                while True:
                    worker.recv(DEADLINE)
        finally:
            timer.join()
        assert time.monotonic() - begin < seen_within()
        assert worker.exitcode == -signal.SIGKILL and not worker.is_alive()
        assert when == "boot" or str(e.value).endswith("the end of its output:\nasleep")

    def test_a_crash_shows_where_it_was(self, started):
        def crash(channel):
            import ctypes

            ctypes.string_at(0)

        started.append(start(crash))
        with pytest.raises(RingPeerDied, match="killed by SIGSEGV") as caught:
            started[0].recv(DEADLINE)
        assert "Fatal Python error: Segmentation fault" in str(caught.value) and "in crash" in str(caught.value)

    def test_a_stopped_worker_is_alive_and_silent_and_goes_on(self, shared):
        worker, heartbeat = shared.worker, shared.heartbeat
        ask(worker, lambda **_: None)
        wait_until(lambda: heartbeat.silent_for() == 0.0, "a beat")
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: heartbeat.silent_for() > 0.5, "half a second of silence")
            assert worker.is_alive() and worker.exitcode is None
            with pytest.raises(TimeoutError, match="is alive"):
                worker.recv(0.05)
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        wait_until(lambda: heartbeat.silent_for() == 0.0, "a beat after the stop")

    def test_a_stopped_worker_can_be_killed(self, started):
        started.append(start(sleep))
        assert started[0].recv(DEADLINE) == "asleep"
        os.kill(started[0].pid, signal.SIGSTOP)
        assert started[0].stop(0.1) == -signal.SIGKILL

    def test_asked_to_stop_a_worker_ends_by_itself(self, started):
        def wait(channel):
            try:
                channel.recv()
            finally:
                print("closed what it held")

        started += [start(wait), start()]
        assert [worker.stop(DEADLINE) for worker in started] == [0, 0]
        assert started[0].tail() == "closed what it held" and started[0].stop(1.0) == 0

    @pytest.mark.parametrize("how", ["stop", "kill", "close", "killed", "ended"])
    @pytest.mark.parametrize("kind", ["fork", "exec"])
    def test_no_grandchild_stays(self, how, kind, started):
        def parent(channel, kind, ends):
            if kind == "exec":
                pid = subprocess.Popen(["sleep", "1000"]).pid
            else:
                pid = os.fork()
                if not pid:
                    time.sleep(1000)
            channel.send(pid)
            if not ends:
                channel.recv()

        started.append(start(parent, kind=kind, ends=how == "ended"))
        worker = started[0]
        grandchild = worker.recv(DEADLINE)
        if how == "stop":
            assert worker.stop(DEADLINE) == 0
        elif how == "killed":
            os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(RingPeerDied, match="SIGKILL"):
                worker.recv(DEADLINE)
        elif how == "ended":
            wait_until(lambda: not worker.is_alive(), "the end of the worker")
        else:
            getattr(worker, how)()
        wait_until(lambda: gone(grandchild), "the end of the grandchild")

    @pytest.mark.parametrize("sibling", [False, True], ids=["alone", "sibling"])
    def test_workers_end_with_a_killed_parent(self, sibling):
        """The sibling was forked by the parent and goes on holding every descriptor of it."""
        read, write = os.pipe()
        parent = os.fork()
        if not parent:
            try:
                workers = [start(sleep), start(serve)]
                workers[0].recv(DEADLINE), ask(workers[1], lambda **_: None)
                other = os.fork() if sibling else 0
                if sibling and not other:
                    time.sleep(1000)
                os.write(write, json.dumps([other, *(worker.pid for worker in workers)]).encode())
                time.sleep(1000)
            finally:
                os._exit(1)
        os.close(write)
        with os.fdopen(read, "rb", buffering=0) as pipe:
            wait_until(lambda: bool(mp.connection.wait([pipe], 0.0)), "the start of two workers", DEADLINE)
            other, *pids = json.loads(pipe.read(1000))
        try:
            assert not any(map(gone, pids))
            os.kill(parent, signal.SIGKILL)
            os.waitpid(parent, 0)
            wait_until(lambda: all(map(gone, pids)), "the end of the killed parent's workers")
        finally:
            if sibling:
                os.kill(other, signal.SIGKILL)

    def test_a_forked_copy_does_not_end_the_worker(self, started):
        started.append(start())
        copy = os.fork()
        if not copy:
            try:
                started[0].stop(0.1), started[0].kill(), started[0].close()
            finally:
                os._exit(0)
        os.waitpid(copy, 0)
        assert ask(started[0], lambda **_: "still here") == "still here"

    def test_a_dropped_object_ends_its_worker(self):
        worker = start()
        pid = worker.pid
        del worker
        wait_until(lambda: gone(pid), "the end of the worker")

    def test_nothing_is_left_after_twenty_lives(self):
        segment = Segment(64, "test")

        def look() -> tuple[int, int]:
            # Of this process alone: other people's do not count.
            return descriptors(), Path("/proc/self/maps").read_text().count("/dev/shm/")

        start().close()
        before, threads, family = look(), set(threading.enumerate()), children()
        for life in range(20):
            worker = start(serve if life % 2 else sleep)
            if life % 4 == 0:
                os.kill(worker.pid, signal.SIGKILL)
            elif life % 4 == 1:
                worker.stop(DEADLINE)
            elif life % 4 == 2:
                worker.recv(DEADLINE)
            payload = Payload(serve, {"segment": segment})
            assert len(payload.descriptors) == 1
            payload.close()
            worker.close()
            assert worker.exitcode is not None and gone(worker.pid)
        assert all(now <= then for now, then in zip(look(), before, strict=True))
        assert set(threading.enumerate()) <= threads and children() <= family


class TestHeartbeat:
    """Contract: silence is counted from the last beat that was seen, by the clock of the watcher."""

    def test_silence_ends_with_a_beat(self, monkeypatch):
        memory, clock = bytearray(16), SimpleNamespace(now=0.0)
        monkeypatch.setattr(_heartbeat, "time", SimpleNamespace(monotonic=lambda: clock.now))
        watcher, other = Heartbeat(memoryview(memory)), Heartbeat(memoryview(memory))
        clock.now = 2.0
        assert watcher.silent_for() == 2.0
        other.beat()
        assert watcher.silent_for() == 0.0
        clock.now = 5.0
        assert watcher.silent_for() == 3.0
        watcher.reset()
        assert watcher.silent_for() == 0.0

    def test_memory_of_others_is_not_passed_on(self):
        with pytest.raises(TypeError, match="Heartbeat: memory must be a segment of its own"):
            cloudpickle.dumps(Heartbeat(memoryview(bytearray(8))))
