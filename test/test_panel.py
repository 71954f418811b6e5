# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The training panel without a terminal: frames as a function of state and size, plain lines, what it never does."""

from __future__ import annotations

import gc
import io
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchrl_ext.record.panel import Panel
from torchrl_ext.record.panel_board import PanelBoard
from torchrl_ext.record.panel_curves import learning_rows, resample
from torchrl_ext.record.panel_frame import Frame
from torchrl_ext.record.panel_layout import VIEWS, render
from torchrl_ext.record.panel_painter import PanelPainter
from torchrl_ext.record.panel_state import Counts, Curves, PanelState
from torchrl_ext.record.panel_system import system_rows
from torchrl_ext.record.panel_timing import timing_rows
from torchrl_ext.record.spectrum import STYLES, SpectrumPlan, draw_bars, draw_spectrum, plan_spectrum

rich_console, rich_cells = pytest.importorskip("rich.console"), pytest.importorskip("rich.cells")

ROOT = Path(__file__).resolve().parents[1]
DEADLINE = 60.0
GIB = 2**30
SIZES = [(1, 1), (10, 3), (40, 10), (80, 23), (81, 24), (160, 49), (300, 80)]
OVERVIEW, TIMING, SYSTEM, LEARNING = 1, 2, 3, 4


def gpu(index: int, **changes) -> SimpleNamespace:
    fields = {"index": index, "name": f"Device-{index}", "uuid": f"GPU-{index}", "utilisation": 0.01 * (11 + index)}
    fields |= {"memory_used": index * GIB, "memory_total": 141 * GIB, "power_watts": 300.0 + index}
    return SimpleNamespace(**(fields | {"temperature_celsius": 40.0 + index} | changes))


def machine(cores=range(128), *, load=None, gpus: int = 8) -> SimpleNamespace:
    cores = tuple(cores)
    load = tuple(1.0 for _ in cores) if load is None else tuple(load)
    cpu = SimpleNamespace(model="A CPU", physical_cores=64, logical_cores=256, affinity=cores, load=load)
    cpu.ram_used, cpu.ram_total, cpu.process_rss = 100 * GIB, 512 * GIB, 7 * GIB
    return SimpleNamespace(cpu=cpu, gpus=tuple(gpu(index) for index in range(gpus)))


def a_state(**changes) -> PanelState:
    points = [(float(at), at**0.5) for at in range(0, 1000, 7)]
    fields = {
        "title": "FastSAC preset pendulum",
        "counts": Counts(1234, 567, 89.0, "return 871.3"),
        "total_frames": 10_000,
        "metrics": {"train/return": 871.3, "collector/wait_ms": 0.974, "collector/env_ms": 2.922},
        "stages": {"sample": 0.001, "update": 0.003},
        "messages": [f"message {at}" for at in range(100)],
        "curves": dict.fromkeys(("train", "eval", "loss"), points),
        "system": machine(),
    }
    return PanelState(**(fields | changes))


def text_of(frame: Frame) -> list[str]:
    """The lines as a terminal without colours shows them, and room for a frame that would be too wide or too high."""
    file = io.StringIO()
    rich_console.Console(file=file, width=frame.width + 50, height=frame.height + 50, color_system=None).print(
        frame, end=""
    )
    return file.getvalue().split("\n")[:-1]


def lines_of(width: int = 80, height: int = 23, **changes) -> list[str]:
    return text_of(render(a_state(**changes), width, height))


class TestFrame:
    """Contract: a frame has exactly the asked lines and columns, whatever is shown and however small; the same state
    gives the same frame; text cannot break it."""

    @pytest.mark.parametrize("style", STYLES)
    @pytest.mark.parametrize("view", range(1, len(VIEWS) + 1))
    @pytest.mark.parametrize("size", SIZES, ids=str)
    def test_every_view_has_exactly_its_size(self, size, view, style):
        """case 62"""
        for state in (a_state(), PanelState(title=""), a_state(system=machine(range(512), gpus=16))):
            lines = text_of(render(replace(state, view=view, style=style), *size))
            assert len(lines) == size[1]
            assert {len(line) for line in lines} == {size[0]}

    @pytest.mark.parametrize("rows", [timing_rows, system_rows, learning_rows])
    @pytest.mark.parametrize("empty", [False, True])
    def test_a_view_takes_no_more_lines_than_it_is_given(self, rows, empty):
        nothing = {"system": None, "stages": {}, "metrics": {}, "curves": {}} if empty else {}
        state = a_state(**nothing, system_error="driver lost")
        for height in range(40):
            assert len(rows(state, 80, height)) <= height

    def test_gpus_have_room_before_the_bars(self):
        for height in range(10, 23):
            shown = "\n".join("".join(text for text, _ in row) for row in system_rows(a_state(), 80, height))
            assert all(f"Device-{index}" in shown for index in range(8))

    def test_same_state_gives_the_same_frame(self):
        assert lines_of() == lines_of()

    def test_text_from_outside_cannot_break_a_frame(self):
        """case 62"""
        evil = "a\x1b[2J\nb\tc\x07"
        for view in range(1, len(VIEWS) + 1):
            lines = lines_of(
                view=view,
                title=evil,
                counts=Counts(1, 1, 1.0, evil),
                messages=[evil],
                curves={evil: [(1.0, 1.0)]},
                stages={evil: 1.0},
                system_error=evil,
            )
            assert len(lines) == 23
            assert not re.search(r"[\x00-\x1f]", "".join(lines))

    def test_wide_characters_take_two_columns(self):
        frame = render(a_state(messages=["\u4e16\u754c" * 60]), 80, 23)
        assert {rich_cells.cell_len(line) for line in text_of(frame)} == {80}

    def test_chosen_view_is_told_without_colour(self):
        for view, name in enumerate(VIEWS, start=1):
            assert f"[{view} {name}]" in lines_of(view=view)[0]

    def test_ascii_style_has_nothing_but_ascii(self):
        for view in range(1, len(VIEWS) + 1):
            assert "".join(lines_of(view=view, style="ascii")).isascii()


class TestOverview:
    """Contract: what the issue lists is there, what is unknown is N/A, aggregates only."""

    def test_known_metrics_are_shown(self):
        metrics = {
            "train/return": 871.3,
            "eval/return": 884.9,
            "collector/wait_ms": 0.974,
            "collector/env_ms": 2.922,
            "collector/env/pool_ms": 2.9,
            "collector/ring_fill": 2.6,
            "collector/ring_slots": 8.0,
            "collector/policy_lag_updates": 11.3,
            "learner/update_ms": 2.325,
            "learner/busy_share": 0.91,
            "utd/requested": 0.25,
            "utd/measured": 0.2499,
        }
        shown = "\n".join(lines_of(metrics=metrics))
        expected = [
            "12.3 %",
            "10:32 left",
            "871.3",
            "884.9",
            "0.974 ms/step (25 %)",
            "2.6 of 8 slots",
        ]
        expected += ["11.3 updates", "2.325 ms", "91 %", "0.25 per frame", "0.2499 per frame", "return 871.3"]
        assert not [text for text in expected if text not in shown]

    @pytest.mark.parametrize(("wait", "shown"), [(28.591, "28.6"), (1234.5, "1,234")])
    @pytest.mark.parametrize("width", [80, 120])
    def test_long_waits_find_room_with_their_share(self, wait, shown, width):
        metrics = {"collector/wait_ms": wait, "collector/env_ms": wait / 4}
        assert f"{shown} ms/step (80 %)" in "\n".join(lines_of(width=width, metrics=metrics))

    def test_write_back_and_train_ratio_are_shown_where_they_are_measured(self):
        metrics = {"train_ratio": 31.98, "train_ratio/requested": 32.0, "write_back/pending": 2.0}
        metrics |= {"write_back/wait_ms": 1.25, "write_back/stale_share": 0.012, "write_back/superseded_share": 0.1}
        shown = "\n".join(lines_of(metrics=metrics))
        expected = ["31.98 of 32", "1.25 ms, 2 pending", "Rows stale        1.2 %", "Rows superseded   10.0 %"]
        assert not [text for text in expected if text not in shown]
        assert not re.search("Train ratio|Write-back|Rows stale", "\n".join(lines_of()))

    def test_unknown_metrics_are_not_available(self):
        shown = "\n".join(lines_of(metrics={}))
        for name in ("Return, training", "Collector wait", "Ring fill", "Policy lag", "Learner busy", "UTD requested"):
            assert re.search(f"{name} +N/A", shown)

    def test_update_takes_the_busy_time_where_it_is_not_measured(self):
        assert "2.000 ms" in "\n".join(lines_of(metrics={"learner/busy_share": 0.8}, update_rate=400.0))

    def test_machine_is_told_in_aggregate_only(self):
        shown = "\n".join(lines_of())
        assert "100 % of 128 cores" in shown and "Device-" not in shown and "core 0" not in shown

    def test_newest_messages_are_kept(self):
        shown = "\n".join(lines_of())
        assert "message 99" in shown and "message 1 " not in shown

    def test_tensors_are_never_read(self):
        """case 63"""

        class Watched(torch.Tensor):
            def __torch_function__(self, *args, **kwargs):
                raise AssertionError("the panel read a tensor")

        metrics = {"train/return": torch.ones(()).as_subclass(Watched)}
        assert "Return, training  N/A" in "\n".join(lines_of(metrics=metrics))


class TestTiming:
    """Contract: stages and the first level below each, no path twice (A10)."""

    def test_deeper_paths_are_parts_of_what_is_shown(self):
        stages = {"env_step": 0.003, "env_step/physics": 0.002, "env_step/physics/solver": 0.0015, "learn": 0.001}
        shown = "\n".join(lines_of(view=TIMING, stages=stages, metrics={}))
        assert re.search(r" env_step +3\.000 +75\.0 %", shown)
        assert re.search(r"   physics +2\.000 +50\.0 %", shown)
        assert "solver" not in shown
        assert shown.count("physics") == 1

    def test_stages_of_the_collector_come_from_its_metrics(self):
        shown = "\n".join(lines_of(view=TIMING, stages={}))
        assert re.search(r"env +2\.922 +75\.0 %", shown) and re.search(r"wait +0\.974 +25\.0 %", shown)

    def test_stages_without_room_are_counted(self):
        stages = {f"stage{at}": 1.0 for at in range(40)}
        shown = "\n".join(lines_of(view=TIMING, stages=stages, metrics={}))
        assert shown.count("stage1") > 0 and re.search(r"and 22 more", shown)


class TestSystem:
    """Contract: every core of the mask is a bar that is labelled by its id, every GPU a line; what cannot be had is
    N/A, never zero."""

    def test_128_cores_and_8_gpus_are_all_seen_in_80_columns(self):
        """case 62"""
        full, lines = STYLES["blocks"][-1], lines_of(view=SYSTEM)
        assert [line.count(full) for line in lines if full in line] == [64, 64, 64, 64]  # two bands of two rows
        for index in range(8):
            (line,) = [line for line in lines if f"Device-{index}" in line]
            assert f"{11 + index} %" in line and f"{index:.1f}/141.0" in line and f"{300 + index} W" in line

    def test_each_core_has_its_own_bar(self):
        full = STYLES["blocks"][-1]
        for busy in (0, 63, 64, 127):
            lines = lines_of(view=SYSTEM, system=machine(load=[float(core == busy) for core in range(128)]))
            at = [(row, line.index(full)) for row, line in enumerate(lines) if full in line]
            assert {column for _, column in at} == {5 + busy % 64}
            assert at[0][0] == (4 if busy < 64 else 8)

    def test_four_cores_of_the_mask_are_four_bars_with_their_ids(self):
        """case 64"""
        lines = lines_of(view=SYSTEM, system=machine([3, 17, 64, 190]))
        labels = [line for line in lines if line.startswith("core ")]
        assert [line.split()[1:] for line in labels] == [["3", "17", "64", "190"]]
        bars = [line for line in lines if STYLES["blocks"][-1] in line]
        assert all(len(re.findall(f"{STYLES['blocks'][-1]}+", line)) == 4 for line in bars) and bars
        assert "4 of 256 cores" in lines[1]

    def test_ceiling_is_connected(self):
        for style, (left, flat, right) in {"ascii": "+-+", "blocks": "\u250c\u2500\u2510"}.items():
            lines = lines_of(view=SYSTEM, style=style)
            assert [line.strip() for line in lines].count(f"100%{left}{flat * 64}{right}") == 2

    def test_utilisation_that_cannot_be_had_is_not_zero(self):
        """case 59"""
        system = machine()
        system.gpus = (gpu(0, utilisation=None, power_watts=None, temperature_celsius=None), gpu(1, memory_used=None))
        lines = lines_of(view=SYSTEM, system=system)
        (first,) = [line for line in lines if "Device-0" in line]
        assert first.split() == ["0", "Device-0", "N/A", "0.0/141.0", "N/A", "N/A"]
        (second,) = [line for line in lines if "Device-1" in line]
        assert "N/A/141.0" in second and "12 %" in second
        assert "12 % mean" in "\n".join(lines)  # over those that are known

    def test_summary_is_in_the_title(self):
        title = lines_of(view=SYSTEM, system=machine(load=[0.5] * 127 + [0.9]))[1]
        assert "A CPU" in title and "128 of 256 cores" in title and "50 % mean, 90 % most" in title

    def test_many_cores_share_bars_and_it_is_said(self):
        lines = lines_of(view=SYSTEM, system=machine(range(1024), gpus=8))
        assert any("a bar is the mean of 5 cores" in line for line in lines)

    def test_without_a_sample_it_says_so(self):
        assert "measuring" in "\n".join(lines_of(view=SYSTEM, system=None))
        assert "driver lost" in "\n".join(lines_of(view=SYSTEM, system=None, system_error="driver lost"))


class TestSpectrum:
    """Contract: bars grow with the load, in every style; the style is the variable's."""

    @pytest.mark.parametrize("style", STYLES)
    def test_bars_grow_with_the_load(self, style):
        levels, height = STYLES[style], 3
        loads = [step / 60 for step in range(61)]
        lines = draw_bars(loads, height=height, style=style)
        sums = [sum(levels.index(line[at]) for line in lines) for at in range(61)]
        assert sums == sorted(sums)
        assert (sums[0], sums[-1]) == (0, height * (len(levels) - 1))
        assert sums[1] == 1, "a load above zero was not seen"

    def test_load_that_is_no_number_is_an_empty_bar(self):
        assert draw_bars([None, float("nan"), float("inf"), 2.0], height=1, style="ascii") == ["   #"]

    @pytest.mark.parametrize("cores", [1, 4, 12, 64, 96, 128, 256, 1000])
    @pytest.mark.parametrize("size", [(80, 10), (160, 30), (40, 4), (20, 3)], ids=str)
    def test_plan_fits_and_leaves_no_core_out(self, cores, size):
        plan = plan_spectrum(cores, width=size[0], height=size[1])
        assert plan.height <= size[1] and plan.rows >= 1
        assert plan.per_band * plan.pitch + 6 <= size[0]
        assert plan.bands * plan.per_band * plan.group >= cores

    @pytest.mark.parametrize("cores", [range(128, 129), range(120, 129), range(95, 160), range(8)])
    @pytest.mark.parametrize("pitch", [1, 2, 3])
    def test_labels_are_ids_of_cores_and_never_parts_of_one(self, cores, pitch):
        plan = SpectrumPlan(bands=1, per_band=len(cores), rows=1, pitch=pitch, group=1)
        *_, (label, _) = draw_spectrum([0.5] * len(cores), cores, plan, style="ascii")
        word, *ids = label.split()
        assert word == "core" and {*map(int, ids)} <= {*cores}
        assert len(label) <= 5 + len(cores) * pitch + 1

    @pytest.mark.parametrize("style", STYLES)
    def test_variable_chooses_the_style(self, style, monkeypatch):
        monkeypatch.setenv("TORCHRL_EXT_CPU_SPECTRUM", style)
        panel = Panel(title="", total_frames=1, time_budget=None, stream=io.StringIO())
        assert panel._board.state(0.0, OVERVIEW).style == style

    def test_unknown_style_is_refused_in_a_sentence(self, monkeypatch):
        monkeypatch.setenv("TORCHRL_EXT_CPU_SPECTRUM", "bars")
        with pytest.raises(
            ValueError, match="TORCHRL_EXT_CPU_SPECTRUM must be one of blocks, braille, ascii, got 'bars'"
        ):
            Panel(title="", total_frames=1, time_budget=None, stream=io.StringIO())

    def test_stream_without_unicode_gets_ascii(self, monkeypatch):
        monkeypatch.delenv("TORCHRL_EXT_CPU_SPECTRUM", raising=False)
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        panel = Panel(title="", total_frames=1, time_budget=None, stream=stream)
        assert panel._board.state(0.0, OVERVIEW).style == "ascii"


class TestLearning:
    """Contract: curves are bounded in memory, keep their newest point and show their range."""

    def test_curves_keep_the_newest_and_are_bounded(self):
        curves = Curves()
        for at in range(10_000):
            curves.add("train", at, float(at))
        points = curves.snapshot()["train"]
        assert len(points) <= 1024 and points[-1] == (9999.0, 9999.0) and points == sorted(points)
        assert points[0][0] < 100

    def test_points_that_are_no_numbers_are_left_out(self):
        curves = Curves()
        curves.add("train", 1, float("nan"))
        curves.add("train", 2, 3.0)
        assert curves.snapshot() == {"train": [(2.0, 3.0)]}

    def test_columns_are_means_and_gaps_repeat(self):
        points = [(4.0, 1.0), (5.0, 3.0), (9.0, 8.0)]
        assert resample(points, 10.0, 5) == [None, None, 2.0, 2.0, 8.0]

    def test_range_and_newest_value_are_shown(self):
        lines = lines_of(view=LEARNING, curves={"eval": [(0.0, -5.0), (50.0, 40.0), (100.0, 20.0)]})
        assert "newest 20  highest 40  lowest -5  3 points" in lines[1]
        assert lines[2].split()[0] == "40"
        assert "100 frames" in "\n".join(lines)

    def test_constant_curve_is_drawn(self):
        lines = lines_of(view=LEARNING, curves={"eval": [(0.0, 3.0), (50.0, 3.0)]})
        assert any(STYLES["blocks"][-1] in line for line in lines)

    def test_series_without_room_are_counted(self):
        shown = "\n".join(lines_of(view=LEARNING, curves={f"series {at}": [(1.0, 1.0)] for at in range(30)}))
        assert re.search(r"and \d+ more series", shown)


class TestPlainLines:
    """Contract: without a terminal one plain line an interval while the counters move, and the last state; no escape
    byte, no thread left."""

    def run(
        self, stream, *, seconds: float = 0.0, lines: int = 0, print_every: float = 5.0, moving: bool = True
    ) -> float:
        """Trains for so long and until so many lines are there; returns the seconds from the start to the last line."""
        started = time.monotonic()
        panel = Panel(title="run", total_frames=1000, time_budget=None, print_every=print_every, stream=stream)
        with panel:
            panel.say("a \x1b[31mred\x1b[0m line")
            frames = 0
            while True:
                panel.update(frames=frames, updates=frames // 2, seconds=float(frames), metrics={}, note="n\x1bote")
                frames += 10 if moving else 0
                took = time.monotonic() - started
                if took >= seconds and stream.getvalue().count("\n") >= lines:
                    break
                assert took < DEADLINE
                time.sleep(0.002)
        return time.monotonic() - started

    def test_a_run_without_an_end_needs_no_more_than_a_title(self):
        stream = io.StringIO()
        with Panel(title="run", stream=stream, print_every=60.0) as panel:
            panel.update(frames=50, updates=25, seconds=2.0, metrics={})
        assert "50 frames" in stream.getvalue()

    def test_one_line_an_interval_and_no_escape_byte(self):
        """case 62"""
        stream = io.StringIO()
        took = self.run(stream, lines=6, print_every=0.2)
        said, *lines = stream.getvalue().splitlines()
        assert said == "a  [31mred [0m line"
        assert "\x1b" not in stream.getvalue()
        assert 5 <= len(lines) <= 2 + took / 0.2  # at 0, 0.2, ..., and the last one
        pattern = r" *[\d.]+ %  [\d,]+ frames  [\d,]+ frames/s  [\d,]+ updates  [\d.,]+ updates/s  [\d:]+ elapsed  "
        assert all(re.fullmatch(pattern + r"[\d:?]+ left  n ote", line) for line in lines), lines

    def test_nothing_new_is_not_printed_again(self):
        stream = io.StringIO()
        self.run(stream, seconds=0.4, print_every=0.05, moving=False)
        assert len(stream.getvalue().splitlines()) == 2

    def test_last_state_is_printed_at_once_when_stopped(self):
        stream = io.StringIO()
        started = time.monotonic()
        with Panel(title="run", total_frames=100, time_budget=None, print_every=60.0, stream=stream) as panel:
            panel.update(frames=1, updates=0, seconds=1.0, metrics={})
            panel.update(frames=100, updates=9, seconds=2.0, metrics={})
        assert time.monotonic() - started < DEADLINE
        assert stream.getvalue().splitlines()[-1].startswith("100.0 %  100 frames")

    def test_rates_are_those_of_the_time_between_lines(self):
        board = PanelBoard("run", 10_000, None, "ascii")
        board.counts = (100, 10, 1.0, "")
        board.line(50.0)
        board.counts = (1100, 60, 3.0, "")
        assert "500 frames/s" in board.line(52.0) and "25.0 updates/s" in board.line(52.0)
        assert board.state(52.0, OVERVIEW).metrics["utd/measured"] == pytest.approx(0.05)

    def test_stop_may_be_called_twice_and_leaves_no_thread(self):
        before = set(threading.enumerate())
        panel = Panel(title="run", total_frames=1, time_budget=None, stream=io.StringIO())
        panel.start()
        panel.stop()
        panel.stop()
        panel.update(frames=1, updates=1, seconds=1.0, metrics={})
        panel.say("after")
        assert panel._painter._stream.getvalue() == "after\n"
        assert set(threading.enumerate()) <= before

    def test_closed_stream_does_not_end_the_run(self):
        stream = io.StringIO()
        with Panel(title="run", total_frames=1, time_budget=None, print_every=0.01, stream=stream) as panel:
            stream.close()
            for frames in range(20):
                panel.update(frames=frames, updates=1, seconds=1.0, metrics={})
                time.sleep(0.005)

    @pytest.mark.parametrize("name", ["total_frames", "time_budget", "print_every", "refresh_per_second"])
    def test_numbers_must_be_positive(self, name):
        options = {"total_frames": 1, "time_budget": 1.0, name: 0}
        with pytest.raises(ValueError, match=f"Panel: {name} must be positive, got 0"):
            Panel(title="", stream=io.StringIO(), **options)


class FakeTerminal:
    """Keeps the frames that are drawn."""

    keys, in_foreground, size = None, True, (80, 24)

    def __init__(self, fault: Exception | None = None) -> None:
        self.frames, self.above, self.closed, self.fault = [], [], 0, fault

    def open(self) -> None:
        pass

    def keep_modes(self) -> None:
        pass

    def draw(self, frame, above=()) -> None:
        if self.fault is not None:
            raise self.fault
        self.frames.append(text_of(frame))
        self.above += above

    def close(self) -> None:
        self.closed += 1


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {DEADLINE} s"
        time.sleep(0.002)


def shows(terminal: FakeTerminal, text: str) -> bool:
    return any(text in line for frame in terminal.frames[-1:] for line in frame)


def paint(terminal, *, sampler=None, until=None, stream=None) -> None:
    """Draws until a condition holds; without one for a while."""
    board = PanelBoard("run", 100, None, "blocks")
    board.counts = (50, 5, 1.0, "")
    painter = PanelPainter(
        board, stream or io.StringIO(), terminal=terminal, sampler=sampler, print_every=60.0, draw_every=0.02
    )
    painter._view = SYSTEM
    painter.start()
    try:
        painter.say("hello")
        if until is None:
            time.sleep(0.3)
        else:
            wait_until(until, "what was to be drawn")
    finally:
        painter.stop()


class TestPainter:
    """Contract: faults of drawing and of the sampler never end a run; a frame has no unmeasured load."""

    def test_first_loads_of_zero_are_not_drawn(self):
        """case 64"""
        samples = iter([machine(range(4), load=[0.0] * 4)])
        terminal = FakeTerminal()

        def sampler():
            if (first := next(samples, None)) is not None:
                return first
            wait_until(lambda: len(terminal.frames) > 1, "two frames without a measured load")
            return machine(range(4), load=[0.5] * 4)

        paint(terminal, sampler=sampler, until=lambda: shows(terminal, "50 % mean"))
        shown = ["\n".join(frame) for frame in terminal.frames]
        assert "measuring" in shown[1] and "50 % mean" in shown[-1]
        assert not [frame for frame in shown if " 0 % mean" in frame]

    def test_every_frame_has_the_same_height(self):
        """case 62"""
        terminal = FakeTerminal()
        paint(terminal, sampler=machine, until=lambda: len(terminal.frames) > 3)
        assert {len(frame) for frame in terminal.frames} == {23}

    def test_faulty_sampler_is_shown_and_nothing_else_happens(self):
        def sampler():
            raise RuntimeError("driver lost")

        terminal = FakeTerminal()
        paint(terminal, sampler=sampler, until=lambda: shows(terminal, "driver lost"))
        assert "driver lost" in "\n".join(terminal.frames[-1])

    def test_hanging_sampler_keeps_nobody(self):
        release, returned, terminal = threading.Event(), threading.Event(), FakeTerminal()

        def sampler():
            release.wait(10 * DEADLINE)
            returned.set()
            return machine()

        try:
            paint(terminal, sampler=sampler, until=lambda: len(terminal.frames) > 3)
            assert not returned.is_set()
        finally:
            release.set()

    def test_terminal_that_is_gone_leaves_plain_lines(self):
        terminal, stream = FakeTerminal(OSError("gone")), io.StringIO()
        paint(terminal, stream=stream)
        fault, *lines = stream.getvalue().splitlines()
        assert fault.startswith("Panel: frames could not be drawn (OSError('gone'))") and terminal.closed == 1
        assert sorted(lines)[0].startswith(" 50.0 %  50 frames") and sorted(lines)[1:] == ["hello"]

    @pytest.mark.parametrize("failing", ["panel", "panel-sampler"])
    def test_terminal_is_put_back_when_no_thread_can_be_started(self, failing, monkeypatch):
        terminal, start = FakeTerminal(), threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name == failing:
                raise RuntimeError("can't start new thread")
            start(thread)

        gc.collect()  # what earlier tests dropped is not counted
        threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
        panel = Panel(title="run", total_frames=1, time_budget=None, stream=io.StringIO(), sampler=machine)
        monkeypatch.setattr(panel, "_terminal", lambda: terminal)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            panel.start()
        assert terminal.closed == 1 and len(os.listdir("/proc/self/fd")) <= descriptors
        wait_until(lambda: set(threading.enumerate()) <= threads, "the end of every thread")
        panel.stop()

    def test_background_job_draws_nothing(self):
        terminal = FakeTerminal()
        terminal.in_foreground = False
        paint(terminal)
        assert not terminal.frames and terminal.closed == 1


def test_modules_import_and_print_without_rich():
    code = """
        import io, sys, types
        sys.modules["rich"] = None
        for name, path in (("torchrl_ext", "torchrl_ext"), ("torchrl_ext.record", "torchrl_ext/record")):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [path]
        from torchrl_ext.record.panel import Panel

        class Terminal(io.StringIO):
            def isatty(self):
                return True

        stream = Terminal()
        with Panel(title="run", total_frames=2, time_budget=None, stream=stream) as panel:
            panel.update(frames=1, updates=1, seconds=1.0, metrics={})
        sys.stdout.write(stream.getvalue())
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0].startswith("Panel: frames need rich")
    assert result.stdout.splitlines()[1].startswith(" 50.0 %  1 frames")
