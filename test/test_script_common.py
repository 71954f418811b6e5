# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What the scripts share: times of a learner's loop, rows of worker processes, and what the panel costs."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from test_fast_sac_async import workers_of
from test_fast_sac_script import build, script  # noqa: F401
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_ext.collectors._collected import Collected
from torchrl_ext.record.panel_layout import VIEWS, render

pytestmark = pytest.mark.usefixtures("script")


class Reads(TorchDispatchMode):
    """Counts what would make the host wait for a CUDA device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        copied = name in ("_to_copy", "copy_")
        self.count += copied or name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")
        return func(*args, **(kwargs or {}))


class Event:
    """A CUDA event that is never reached."""

    waited = 0

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        Event.waited += 1


@pytest.fixture
def cuda_events(monkeypatch):
    """A device whose work is never done."""
    monkeypatch.setattr(Event, "waited", 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *parts: pytest.fail("synchronised"))
    return Event


class TestPanelCost:
    """Contract: what the panel is told and draws reads no tensor and waits for no device."""

    def test_looking_showing_and_drawing_synchronise_nothing(self, build, cuda_events):  # noqa: F811
        """case 63"""
        from common.learner_time import LearnerTime

        run = build("log.every=80")
        while run.state.learner.updates < 4:
            run.step()
        newest = run.step()
        on_device = LearnerTime(torch.device("cuda", 0))
        for _ in range(100):
            with on_device.stage("sample"):
                pass
            with on_device.updating(4):
                pass
        run.time = run.telling.time = on_device
        # A metric that was left on the device by mistake is not read either.
        run.telling.keep({"train/return": newest.get("loss_critic", torch.ones(()))})
        board = run.progress.panel._board
        with Reads() as reads:
            for view in range(1, len(VIEWS) + 1):
                run.look()
                run.show()
                render(board.state(time.monotonic(), view), 80, 23)
        assert (reads.count, cuda_events.waited) == (0, 0)

    def test_the_counter_sees_a_read(self):
        with Reads() as reads:
            torch.ones(()).item()
        assert reads.count == 1

    def test_blocks_are_marked_on_the_learners_device_whichever_is_current(self, cuda_events, monkeypatch):
        from common.learner_time import LearnerTime

        seen = []
        monkeypatch.setattr(cuda_events, "record", lambda event, stream=None: seen.append(stream))
        with LearnerTime(torch.device("cuda:1")).learning():
            pass
        assert seen == [torch.device("cuda:1")], "the stream of another device says nothing of the updates"

    def test_the_host_waits_for_a_block_only_when_two_more_are_enqueued(self, cuda_events):
        from common.learner_time import LearnerTime

        times = LearnerTime(torch.device("cuda", 0))
        waited = []
        for _ in range(5):
            with times.learning():
                pass
            waited.append(cuda_events.waited)
        assert waited == [0, 0, 1, 2, 3]


class TestParsing:
    """Contract: a value of another type than its annotation is refused with a sentence that names it."""

    @pytest.mark.parametrize("value", [float("inf"), float("nan"), 1.5, True, "1"])
    def test_what_is_no_whole_number_is_named(self, value):
        from common.parsing import parse

        @dataclass
        class Group:
            count: int

        with pytest.raises(ValueError, match="group.count must be of type int, got .*; nothing was started"):
            parse(Group, {"count": value}, "group.")


class TestDevices:
    """Contract: a device is one that computes; anything else is refused by the name of its setting."""

    @pytest.mark.parametrize("name", ["meta", "cuda:99", "tpu9"])
    def test_what_does_not_compute_is_refused(self, name):
        from common.devices import make_device

        with pytest.raises(ValueError, match=f"replay.device must be auto or a device of this machine, got '{name}'"):
            make_device(name, "replay.device")


class TestLearnerTime:
    """Contract: shares of time and milliseconds, for a log and a panel that do not disturb each other."""

    @pytest.fixture
    def times(self, script, monkeypatch):  # noqa: F811
        from common import learner_time

        from torchrl_ext.record import timing

        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.go_on)
        monkeypatch.setattr(learner_time, "time", clock)
        monkeypatch.setattr(timing, "perf_counter", lambda: self.now)
        return learner_time.LearnerTime(torch.device("cpu"))

    def go_on(self, seconds: float) -> None:
        self.now += seconds

    def test_a_device_is_busy_with_updates_however_soon_the_host_has_launched_them(self, times):
        times._device = torch.device("cuda")  # its stages are timed by the clock of this test
        with times.updating(4):
            self.go_on(0.8)
        self.go_on(0.8)
        assert times.metrics("log")["learner/busy_share"] == pytest.approx(0.5)

    def test_milliseconds_are_of_an_entry_and_of_one_update_and_shares_of_the_time(self, times):
        with times.stage("drain"):
            self.go_on(0.5)
        with times.learning():
            for _ in range(2):
                with times.updating(4):
                    self.go_on(0.8)
        while self.now < 104.0 - 1e-6:
            times.wait()
        values = times.metrics("log")
        wanted = {"busy_share": 0.4, "wait_share": 0.475, "drain_ms": 500.0, "update_ms": 200.0}
        assert values == {f"learner/{name}": pytest.approx(value) for name, value in wanted.items()}
        assert times.stages(values) == {"drain": pytest.approx(0.5), "update": pytest.approx(0.2)}

    def test_each_reader_has_its_own_span(self, times):
        for _ in range(3):
            with times.stage("drain"):
                self.go_on(1.0)
            times.metrics("panel")
        assert times.metrics("log")["learner/drain_ms"] == pytest.approx(1000.0)
        assert "learner/drain_ms" not in times.metrics("panel")


class Ring:
    """A collector that delivers the versions it is told to."""

    def __init__(self) -> None:
        self.collected, self.fill, self.policy_version, self.arrived, self.sent = Collected(0), [3, 5], 0, True, 0
        self.rows: list[int] = []
        self.frames, self.num_streams, self.steps = 0, 8, [0, 0]
        self.collected.boards = [
            SimpleNamespace(counters=[0, 2], seconds=[seconds], stages=("env",)) for seconds in (0.2, 0.4)
        ]

    def hold_at(self, frames):
        self.limit = frames

    def drain(self):
        versions, self.rows = np.array(self.rows), []
        if len(versions):
            self.collected.add_versions(versions, self.policy_version, 1)
        return len(versions)

    def weights_arrived(self):
        return self.arrived

    def update_policy_weights_(self, policy):
        self.policy_version += 1

    def stats(self):
        return {"frames": self.frames}

    def state_dict(self):
        return {"steps": list(self.steps)}

    def load_state_dict(self, state):
        self.frames = state["frames"]


class TestRingFeed:
    """Contract: weights go out by updates, one version at a time; the age of what acted is in updates."""

    @pytest.fixture
    def ring(self):
        return Ring()

    @pytest.fixture
    def feed(self, ring):
        from common.ring_feed import RingFeed

        def make(*, publish_every=1, updates=0):
            feed = RingFeed(nn.Linear(1, 1), publish_every=publish_every)
            feed.attach(ring, updates=updates)
            return feed

        return make

    def test_lag_is_the_updates_since_the_weights_that_acted(self, ring, feed):
        feed = feed(publish_every=4)
        for updates in range(1, 11):
            feed.publish(updates)
        assert ring.policy_version == 2  # of 4 and 8 updates
        ring.rows = [0, 1, 2, 2]
        assert feed.drain() == 4
        assert feed.metrics(keep=True)["collector/policy_lag_updates"] == (10 + 6 + 2 + 2) / 4
        assert feed.metrics()["collector/policy_lag_updates"] == (10 + 6 + 2 + 2) / 4
        assert "collector/policy_lag_updates" not in feed.metrics()

    def test_lag_after_a_resume_counts_from_the_weights_of_the_checkpoint(self, ring, feed):
        feed = feed(updates=1000)
        feed.publish(1003)
        ring.rows = [0, 1]
        feed.drain()
        assert feed.metrics()["collector/policy_lag_updates"] == (3 + 0) / 2

    def test_weights_wait_for_those_before_and_go_out_as_soon_as_they_may(self, ring, feed):
        feed = feed()
        ring.arrived = False
        feed.publish(1)
        feed.publish(2)
        assert ring.policy_version == 0
        ring.arrived = True
        feed.publish(2)
        feed.publish(2)
        assert ring.policy_version == 1

    def test_workers_wait_for_credit_and_are_told_in_means(self, ring, feed):
        values = feed().metrics()
        assert ring.limit == 0
        assert values == {"collector/env_ms": pytest.approx(150.0), "collector/ring_fill": 4.0}

    @pytest.mark.parametrize(
        ("state", "frames", "limit"),
        [
            ({}, 0, 80),  # a new run
            ({}, 800, -720),  # workers that never saw the rows of a run in turns
            ({"frames": 800}, 800, 80),
            ({"frames": 808}, 800, 88),
            ({}, 4, 80),  # never a row too few: a limit is rounded down to a step of all streams
        ],
    )
    def test_credit_counts_the_rows_of_the_run_whatever_its_collector_counted(self, ring, feed, state, frames, limit):
        feed = feed()
        feed.load_state_dict(state, frames=frames)
        feed.credit(80)
        assert ring.limit == limit
        feed.credit(None)
        assert ring.limit is None

    def test_waiting_for_the_first_rows_ends_when_it_is_asked_to(self, ring, feed):
        asked = []
        assert feed().begin(None, lambda: bool(asked.append(1)) or len(asked) > 2) == 0
        assert len(asked) == 3

    @pytest.mark.parametrize(
        ("steps", "at_most", "limit"),
        [([0, 0], None, 8), ([5, 6], None, 56), ([5, 6], 48, 48), ([6, 6], 48, 48), ([5, 7], 48, 48)],
    )
    def test_a_step_of_every_worker_is_waited_for_that_may_take_one(self, ring, feed, steps, at_most, limit):
        ring.steps = list(steps)

        def drain():
            late = [at for at, step in enumerate(ring.steps) if step < ring.limit // 8]
            if not late:
                pytest.fail("nobody may go on")
            ring.steps[late[0]] += 1
            return 4

        ring.drain = drain
        assert feed().begin(at_most, lambda: False) == 4 * (sum(ring.steps) - sum(steps))
        assert ring.limit == limit
        assert all(now > then or now >= limit // 8 for now, then in zip(ring.steps, steps, strict=True))

    @pytest.mark.parametrize(("setting", "device"), [("learner", "meta"), ("cpu", "cpu"), ("cuda:1", "cuda:1")])
    def test_policies_act_on_the_learners_device_or_the_one_that_is_named(self, script, setting, device):  # noqa: F811
        from common.ring_feed import ring_options

        settings = SimpleNamespace(
            policy_device=setting,
            num_workers=1,
            transport="auto",
            ring_slots=None,
            policy_threads=1,
            stall_timeout=1.0,
            max_restarts=0,
        )
        options = ring_options(settings, torch.device("meta"))
        assert torch.device(options["policy_device"]) == torch.device(device)


class TestCommandLine:
    """Contract: what ends a run before its time is one sentence and an exit code, never a traceback."""

    @pytest.fixture
    def start(self, monkeypatch):
        from common import command_line

        config = SimpleNamespace(
            runtime=SimpleNamespace(output_dir="nowhere", choices={"preset": "test"}),
            overrides=SimpleNamespace(task=[]),
        )
        monkeypatch.setattr(command_line, "HydraConfig", SimpleNamespace(get=lambda: config))
        settings = SimpleNamespace(from_dict=lambda values: SimpleNamespace(checkpoint=SimpleNamespace(replay=True)))

        def run(kind):
            with pytest.raises(SystemExit) as caught:
                command_line.run_configuration(OmegaConf.create({}), settings, kind)
            return caught.value.code

        return run

    @pytest.mark.parametrize(
        ("error", "code", "said"),
        [
            (ValueError("a must be b,\ngot c."), 2, "test: a must be b, got c.\n"),
            (PermissionError(13, "Permission denied", "metrics.jsonl"), 2, "test: [Errno 13] Permission denied: "),
            (KeyboardInterrupt(), 130, "test: stopped by a signal before training; nothing was saved.\n"),
        ],
    )
    def test_a_run_that_cannot_begin(self, start, capsys, error, code, said):
        def kind(settings, folder, *, title, overrides):
            raise error

        kind.name = kind.label = "test"
        assert start(kind) == code
        out = capsys.readouterr().err
        assert out.startswith(said) and out.count("\n") == 1

    def test_the_third_signal_closes_and_saves_nothing_more(self, start, capsys):
        class Kind:
            name = label = "test"
            closed: ClassVar[list[bool]] = []

            def __init__(self, settings, folder, *, title, overrides):
                self.settings = settings

            def train(self, stop):
                for _ in range(3):
                    signal.raise_signal(signal.SIGINT)

            def close(self):
                self.closed.append(True)

        assert start(Kind) == 130 and Kind.closed
        assert capsys.readouterr().err == "test: stopped at once by a third signal; nothing more was saved.\n"


class TestSignals:
    def test_a_signal_while_a_finished_run_is_closed_changes_nothing(self):
        from common.command_line import run

        class Job:
            settings = SimpleNamespace(checkpoint=SimpleNamespace(replay=True))
            closed = False

            def train(self, stop):
                pass

            def evaluate(self, stop):
                return 1.0

            def save(self, **options):
                pass

            def report(self, final):
                pass

            def close(self):
                signal.raise_signal(signal.SIGTERM)
                self.closed = True

        job = Job()
        before = signal.signal(signal.SIGTERM, lambda number, frame: pytest.fail("the process would have ended"))
        try:
            assert run(job) == 0 and job.closed
        finally:
            signal.signal(signal.SIGTERM, before)


class TestFailedStart:
    """Contract: what cannot be built leaves nothing running."""

    def test_workers_end_when_a_later_part_cannot_be_made(self, build, monkeypatch):  # noqa: F811
        import trainer

        seen = []

        def refuse(settings):
            seen.extend(workers_of(os.getpid()))
            raise ValueError("no environment for evaluations")

        monkeypatch.setattr(trainer, "make_eval_env", refuse)
        with pytest.raises(ValueError, match="no environment for evaluations"):
            build("async=true")
        assert seen, "the workers had been started"
        end = time.monotonic() + 60.0
        while set(seen) & set(workers_of(os.getpid())):
            assert time.monotonic() < end, "the workers go on"
            time.sleep(0.05)
