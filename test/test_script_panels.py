# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The panels of the training scripts on a real pseudo-terminal, from the first frame to q."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("hydra")
pytest.importorskip("envpool")

from test_dreamer_v3_script import PENDULUM, SCRIPT
from test_fast_sac_script import SCRIPT as FAST_SAC
from test_fast_sac_script import TINY
from test_panel_terminal import Screen, Session, session

DEADLINE = 60.0
LONG = ["total_frames=800000", "collector.policy_device=learner"]
DREAMER = [*PENDULUM, *LONG, "learner.train_ratio=3"]
ASYNC = [*TINY, *LONG, "async=true", "torch_threads=1", "log.every=80"]
#: What each script's Overview must have a number for, and the stages of its learner.
SCRIPTS = {
    "dreamer_v3": (
        SCRIPT,
        DREAMER,
        {
            "Train ratio": r"[\d.]+ of 3",
            "Write-back lag": r"[\d.]+ ms, \d+ pending",
            "Rows stale": r"[\d.]+ %",
            "Rows superseded": r"[\d.]+ %",
        },
        ("drain", "sample", "update", "write_back", "publish"),
    ),
    "fast_sac": (FAST_SAC, ASYNC, {}, ("drain", "sample", "update", "publish")),
}
COMMON = {
    "Frames/s": r"[\d,]+",
    "Updates/s": r"[\d,.]+",
    "Return, training": r"-?[\d,.]+",
    "Collector wait": r"[\d.]+ ms/step \(\d+ %\)",
    "Ring fill": r"[\d.]+",
    "Policy lag": r"[\d.]+ updates",
    "Update": r"[\d.]+ ms",
    "Learner busy": r"\d+ %",
    "Learner waits": r"\d+ %",
    "UTD requested": r"[\d.]+ per frame",
    "UTD measured": r"[\d.]+ per frame",
}


def frame_of(running: Session) -> str:
    return "\n".join(running.screen.frames[-1])


def wait_for(running: Session, patterns: dict[str, str]) -> None:
    """Waits until one frame has every name with its number."""

    def has_all(screen: Screen) -> bool:
        shown = "\n".join(screen.frames[-1]) if screen.frames else ""
        return all(re.search(rf"{re.escape(name)} +{pattern}", shown) for name, pattern in patterns.items())

    running.until(has_all, f"{list(patterns)}")


@pytest.mark.parametrize("name", SCRIPTS)
def test_panel_shows_what_the_run_measures_and_q_stops_it_as_ctrl_c(name: str, tmp_path: Path) -> None:
    """rows A10 and A12"""
    script, overrides, more, stages = SCRIPTS[name]
    command = [sys.executable, str(script), *overrides, f"hydra.run.dir={tmp_path}"]
    with session(command, columns=120, lines=45, deadline=DEADLINE) as running:
        running.shows("[1 Overview]")
        wait_for(running, COMMON | more)
        assert re.search(r"\d+:\d\d left", frame_of(running))
        running.press("2")
        running.shows("[2 Timing]")
        for stage in (*stages, "policy", "env", "push", "wait", "weights"):
            assert re.search(rf"\n ?{stage} +[\d.]+ +[\d.]+ %", frame_of(running)), stage
        running.press("3")
        running.shows("[3 System]")
        running.press("4")
        running.shows("[4 Learning]")
        assert "train/return  newest" in frame_of(running) and "learner/loss_actor  newest" in frame_of(running)
        running.press("q")
        assert running.end() == 130
        assert running.is_restored()
        assert any("stopped by a signal" in line for line in running.screen.scrolled)
    assert {len(row) for frame in running.screen.frames for row in frame[:-1]} == {120}
    assert (tmp_path / "output.log").exists() and (tmp_path / "checkpoints" / "last.pt").exists()
