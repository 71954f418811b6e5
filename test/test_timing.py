# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Where the time of a loop goes; CUDA events are made up here, and real where there is a GPU."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from torchrl_ext.record import StageTimer, StageTotal, timing

CUDA = torch.device("cuda", 0)


class FakeEvent:
    """An event that is reached when the device's clock, in milliseconds, is told to go on."""

    made: list[FakeEvent] = []
    clock = 0.0
    asked_by: set[int] = set()

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        FakeEvent.made.append(self)
        self.at: float | None = None

    def record(self, stream: object) -> None:
        assert stream == CUDA
        self.at = FakeEvent.clock

    def query(self) -> bool:
        FakeEvent.asked_by.add(threading.get_ident())
        return self.at is not None and self.at <= FakeEvent.clock - 1000.0  # a second behind

    def elapsed_time(self, last: FakeEvent) -> float:
        return last.at - self.at

    def synchronize(self) -> None:
        raise AssertionError("a timer must not wait for the device")


@pytest.fixture
def events(monkeypatch):
    monkeypatch.setattr(FakeEvent, "made", [])
    monkeypatch.setattr(FakeEvent, "clock", 0.0)
    monkeypatch.setattr(FakeEvent, "asked_by", set())
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *parts: pytest.fail("synchronised"))
    return FakeEvent


class TestHost:
    """Contract: a stage takes as long as its block; stages do not nest and have no parts."""

    def test_seconds_and_entries_are_summed_up(self, monkeypatch):
        monkeypatch.setattr(timing, "perf_counter", iter([1.0, 3.0, 10.0, 14.0, 20.0, 20.5]).__next__)
        timer = StageTimer(["sample", "update", "never"])
        for name in ("sample", "sample", "update"):
            with timer(name):
                pass
        assert timer.totals() == {"sample": StageTotal(6.0, 2), "update": StageTotal(0.5, 1), "never": StageTotal(0, 0)}
        assert timer.means() == {"sample": 3.0, "update": 0.5}

    def test_time_is_that_of_the_clock(self):
        timer = StageTimer(["sleep"], device=torch.device("cpu"))
        with timer("sleep"):
            time.sleep(0.02)
        assert 0.02 <= timer.means()["sleep"] < 60.0

    @pytest.mark.parametrize("inner", ["update", "sample"])
    def test_second_stage_inside_the_first_is_refused_and_the_first_goes_on(self, inner):
        timer = StageTimer(["sample", "update"])
        with timer("sample"):
            with pytest.raises(RuntimeError, match=f"stages must not nest, got '{inner}' inside 'sample'"):
                with timer(inner):
                    pytest.fail("entered")
            assert timer.current == "sample"
        assert [total.entries for total in timer.totals().values()] == [1, 0]

    def test_block_that_raises_counts_and_ends_its_stage(self):
        timer = StageTimer(["sample"])
        with pytest.raises(KeyError):
            with timer("sample"):
                raise KeyError
        assert timer.current is None and timer.totals()["sample"].entries == 1

    def test_unknown_stage_is_refused(self):
        with pytest.raises(ValueError, match=r"a stage must be one of \['sample'\], got 'update'"):
            StageTimer(["sample"])("update")

    @pytest.mark.parametrize("stages", [["a", "a"], ["a", "a/b"], [""]])
    def test_repeated_and_child_paths_are_refused(self, stages):
        """row A10"""
        with pytest.raises(ValueError, match="stages must be distinct names without '/'"):
            StageTimer(stages)

    def test_unknown_device_stages_are_refused(self):
        with pytest.raises(ValueError, match=r"device_stages must be among \['a'\], got \['b'\]"):
            StageTimer(["a"], device=CUDA, device_stages=["b"])


class TestDevice:
    """Contract: device time is read later, from the thread that enters stages, and never waited for."""

    def test_time_is_between_the_events_and_known_once_they_are_reached(self, events):
        """case 63"""
        timer = StageTimer(["update"], device=CUDA)
        for took in (4.0, 2.0):
            with timer("update"):
                events.clock += took
        assert timer.means() == {}
        events.clock += 2000.0
        with timer("update"):
            pass
        assert timer.totals()["update"] == StageTotal(pytest.approx(6e-3), 2)
        assert timer.means()["update"] == pytest.approx(3e-3)

    def test_other_threads_ask_the_device_nothing(self, events):
        """case 63: while a graph is captured, that would break the capture"""
        timer = StageTimer(["update"], device=CUDA)
        for _ in range(3):
            with timer("update"):
                pass
        thread = threading.Thread(target=timer.means)
        thread.start()
        thread.join(60.0)
        assert events.asked_by == {threading.get_ident()}

    def test_stages_of_the_host_are_measured_there(self, events):
        timer = StageTimer(["collect", "update"], device=CUDA, device_stages=["update"])
        with timer("collect"):
            time.sleep(0.01)
        assert timer.means()["collect"] >= 0.01 and not events.made

    def test_events_are_used_again_and_bounded(self, events):
        timer = StageTimer(["update"], device=CUDA)
        for _ in range(500):  # none is ever reached
            with timer("update"):
                pass
        assert len(events.made) == 2 * 64
        events.clock += 2000.0
        for _ in range(500):
            with timer("update"):
                events.clock += 2000.0
        events.clock += 2000.0
        with timer("update"):
            pass
        assert len(events.made) == 2 * 64 and timer.totals()["update"].entries == 64 + 500

    def test_capture_is_left_alone(self, events, monkeypatch):
        timer = StageTimer(["update"], device=CUDA)
        with timer("update"):
            pass
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        made = len(events.made)
        with timer("update"):
            pass
        assert len(events.made) == made and not events.asked_by and timer.current is None

    def test_nesting_is_refused_before_an_event_is_recorded(self, events):
        timer = StageTimer(["sample", "update"], device=CUDA)
        with timer("sample"):
            made = len(events.made)
            with pytest.raises(RuntimeError, match="must not nest"):
                with timer("update"):
                    pytest.fail("entered")
            assert len(events.made) == made

    @pytest.mark.gpu
    def test_real_work_of_the_device_is_measured_without_waiting(self):
        timer = StageTimer(["update"], device=CUDA)
        for _ in range(2):
            began = time.perf_counter()
            with timer("update"):
                torch.cuda._sleep(200_000_000)  # some 0.1 s
            assert time.perf_counter() - began < 0.05 or not timer.means()
        torch.cuda.synchronize()
        with timer("update"):
            pass
        assert timer.totals()["update"].entries == 2 and 0.01 < timer.means()["update"] < 1.0
