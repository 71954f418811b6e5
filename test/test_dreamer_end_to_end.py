# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""DreamerV3 end to end beside TorchRL's recipe: equal work, counters that count, windows without what is excluded."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from _load import slowness

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # torchrl's wheel installs a package named ``benchmarks`` as well

pytest.importorskip("hydra")
pytest.importorskip("envpool")

from benchmarks import bench_dreamer_v3_end_to_end as bench  # noqa: E402
from benchmarks import rate_window  # noqa: E402
from benchmarks.peers import PeerUnavailableError, torchrl_dreamer  # noqa: E402
from benchmarks.peers.torchrl_dreamer_env import OneStream  # noqa: E402
from torchrl_ext.envs import EnvPoolEnv  # noqa: E402

CPU = torch.device("cpu")
TINY = ["env.num_envs=2", "env.max_episode_steps=7", "replay.capacity=200", "collector.learning_starts=16"]
TINY += ["learner.batch_size=3", "learner.seq_len=4", "learner.imagination_horizon=2", "learner.train_ratio=6"]
TINY += [f"networks.{size}" for size in ("belief=16", "categoricals=3", "classes=4", "hidden=8", "bins=15")]
TINY += ["log.every=20", "eval.every=60", "eval.episodes=2", "eval.max_steps=5"]


@pytest.fixture
def recipe() -> Path:
    """The folder of TorchRL's recipe, where there is one."""
    try:
        return torchrl_dreamer.recipe_folder()
    except PeerUnavailableError as error:
        pytest.skip(str(error))


def spaces(settings: Any) -> Any:
    from dreamer_envs import make_env, spaces_of

    env = make_env(settings.env, num_envs=1, seed=0, num_threads=1, evaluate=True)
    found = spaces_of(env, settings.env)
    env.close()
    return found


def config_of(settings: Any, out: Path, *, evaluate: bool = False) -> Any:
    return torchrl_dreamer.recipe_config(
        settings, spaces(settings), device=CPU, out=out, evaluate=evaluate, limit=100.0
    )


def run_script(path: Path, *options: str) -> dict[str, Any]:
    """Runs a command to its end; returns the JSON of its last line."""
    command = [sys.executable, str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def window(seconds: float) -> float:
    """Seconds of a window: so many updates are in it on a machine in use as in shorter ones on a free one."""
    return round(min(seconds * slowness(), 10 * seconds), 1)


class TestWindow:
    """Contract: rates are differences of the run's counters, from the first update to the end of the window."""

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        now = [rate_window.STARTED]
        monkeypatch.setattr(rate_window.time, "monotonic", lambda: now[0])
        return now

    def test_it_begins_with_the_first_update_and_ends_after_its_seconds(self, clock: Any) -> None:
        window = rate_window.RateWindow(4.0, device=CPU)
        turns = [(10, 0), (20, 0), (30, 1), (50, 3), (70, 5), (90, 7)]
        over = []
        for frames, updates in turns:
            clock[0] += 2.0
            over.append(window.tick(frames, updates))
        assert over == [False, False, False, False, True, True]
        told = window.result()
        assert (told["env_steps"], told["updates"], told["seconds"], told["begun_s"]) == (40, 4, 4.0, 6.0)
        assert (told["env_steps_per_second"], told["updates_per_second"]) == (10.0, 1.0)

    def test_what_is_excluded_is_no_time_of_it(self, clock: Any) -> None:
        window = rate_window.RateWindow(4.0, device=CPU, after=5)
        window.tick(10, 4)
        window.tick(20, 5)
        with window.excluded():
            clock[0] += 50.0
        clock[0] += 3.0
        assert not window.tick(26, 8)
        clock[0] += 1.0
        assert window.tick(28, 9) and window.result()["seconds"] == 4.0 and window.result()["env_steps"] == 8

    def test_the_limit_ends_it_with_what_was_counted(self, clock: Any) -> None:
        window = rate_window.RateWindow(1e9, device=CPU, limit=10.0)
        window.tick(0, 1)
        clock[0] += 11.0
        assert window.tick(22, 12) and window.result()["env_steps_per_second"] == 2.0

    def test_without_an_update_there_is_no_rate(self) -> None:
        window = rate_window.RateWindow(1.0, device=CPU)
        window.tick(10, 0)
        assert set(window.result().values()) == {None}


class TestEqualWork:
    """Contract: the recipe gets the preset's task, sizes and ratio."""

    @pytest.mark.parametrize("task", ["Pendulum-v1", "CartPole-v1"])
    def test_a_stream_is_the_one_of_our_environment(self, task: str) -> None:
        stream = OneStream(task, seed=3, max_episode_steps=4)
        ours = EnvPoolEnv(task, num_envs=1, num_threads=1, seed=3, max_episode_steps=4)
        root, wanted = stream.reset(), ours.reset()
        for number in range(10):
            given = torch.tensor([0.5]) if task == "Pendulum-v1" else torch.eye(2)[number % 2]
            taken = torch.tensor([[1.0]]) if task == "Pendulum-v1" else torch.tensor([number % 2])
            assert torch.equal(root["observation"], wanted["observation"][0])
            row, root = stream.step_and_maybe_reset(root.set("action", given))
            expected, wanted = ours.step_and_maybe_reset(wanted.set("action", taken.to(ours.action_spec.dtype)))
            for key in ("observation", "reward", "done", "terminated", "truncated"):
                assert torch.equal(row["next", key], expected["next", key][0])
        stream.close()
        ours.close()

    @pytest.mark.parametrize("preset", ["pendulum", "dmc_walker", "atari"])
    def test_sizes_and_ratio_are_the_presets(self, preset: str, tmp_path: Path) -> None:
        settings = torchrl_dreamer.load_settings(preset)
        config, learner, streams = config_of(settings, tmp_path), settings.learner, settings.env.num_envs
        replay = config.replay_buffer
        assert (replay.batch_size, replay.seq_len) == (learner.batch_size, learner.seq_len)
        assert config.optimization.train_ratio == learner.train_ratio and config.collector.num_envs == streams
        assert replay.warmup_factor * replay.batch_size * replay.seq_len == settings.collector.learning_starts
        assert replay.buffer_size == settings.replay.capacity * streams and config.logger.eval_every is None
        assert (config.env.pixels_key is not None) is (preset == "atari") is (config.env.vector_key is None)

    @pytest.mark.parametrize("preset", ["dmc_walker", "atari"])
    def test_the_networks_have_as_many_parameters(self, recipe: Path, preset: str, tmp_path: Path) -> None:
        from dreamer_learner import Learner
        from dreamer_networks import make_networks

        settings = torchrl_dreamer.load_settings(preset, ["env.num_envs=1", "learner.imagination_horizon=1"])
        found, config = spaces(settings), config_of(settings, tmp_path)
        networks = make_networks(settings.networks, found, CPU)
        ours = Learner(networks, settings.learner, settings.networks, pixels=found.pixels, device=CPU)
        train: Any = torchrl_dreamer._load(recipe)
        shape = found.observation if found.pixels else None
        flat = 0 if found.pixels else found.observation[0]
        theirs = train._build_learner(config, CPU, flat, found.action, shape, found.discrete)
        count = sum(parameter.numel() for group in theirs.optimizer.param_groups for parameter in group["params"])
        assert count == ours.num_parameters

    def test_an_unknown_value_of_the_recipe_is_refused(self, recipe: Path, tmp_path: Path) -> None:
        with pytest.raises(Exception, match="backennd"):
            torchrl_dreamer.main(["--peer", "collector.backennd=sync", "--out", str(tmp_path)])


class TestRuns:
    """Contract: both run to the end of the window and say what they did."""

    def test_the_recipe_runs_and_counts(self, recipe: Path, tmp_path: Path) -> None:
        seconds = window(3.0)
        options = ["--preset", "pendulum", "--seconds", str(seconds), "--evaluate", "--out", str(tmp_path)]
        options += ["--set", *TINY]
        told = run_script(Path(torchrl_dreamer.__file__), *options, "--peer", "collector.backend=sync")
        assert told["impl"] == "torchrl" and told["seconds"] >= seconds and told["updates"] > 0
        # Half an update per row; batches of 16 vector steps begin and end the window.
        assert abs(told["updates"] - told["env_steps"] / 2) <= 16
        assert told["updates_per_second"] == pytest.approx(told["updates"] / told["seconds"], rel=0.01)
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="ascii").splitlines()]
        assert all({"frames", "seconds", "updates"} <= set(line) for line in lines)
        points = [line for line in lines if "eval/return" in line]
        assert points and [point["frames"] for point in points] == [point["frames"] for point in told["evaluations"]]
        assert any("train/return" in line for line in lines) and points[0]["frames"] >= 60

    def test_ours_runs_and_counts(self, tmp_path: Path) -> None:
        seconds = window(2.0)
        options = ["--preset", "pendulum", "--seconds", str(seconds), "--impl", "ours", "--out", str(tmp_path)]
        options += ["--set", *TINY]
        report = run_script(Path(bench.__file__), *options)
        (told,) = report["runs"]["ours"]
        assert "error" not in told and told["seconds"] >= seconds and told["updates"] > 0
        assert abs(told["updates"] - told["env_steps"] / 2) <= 2
        assert told["write_back"]["applied"] > 0 and told["measures"]["learner/update_ms"] > 0

    def test_a_missing_recipe_is_one_sentence(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(PeerUnavailableError, match="must be at .*nowhere, got no train.py there; name its folder"):
            torchrl_dreamer.recipe_folder(tmp_path / "nowhere")
        monkeypatch.setenv("TORCHRL_DREAMER_RECIPE", str(tmp_path / "absent"))
        with pytest.raises(SystemExit, match="torchrl_dreamer: TorchRL's DreamerV3 recipe must be at .*absent"):
            torchrl_dreamer.main(["--out", str(tmp_path)])

    def test_a_peer_that_cannot_run_is_told_beside_ours(self, tmp_path: Path) -> None:
        begun = time.monotonic()
        args = bench._arguments(["--impl", "torchrl", "--recipe", str(tmp_path), "--out", str(tmp_path / "out")])
        told = bench._measure("torchrl", args, tmp_path / "out")
        assert "must be at" in told["error"] and time.monotonic() - begun < 120
        text = bench.table({"ours": {"env_steps_per_second": 30.0, "updates_per_second": 2.0}, "torchrl": told})
        assert "| environment steps/s | 30 | - |  |" in text and told["error"] in text

    def test_a_run_that_hangs_is_ended_with_its_workers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        started, hangs = tmp_path / "started", tmp_path / "hangs"
        hangs.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {started}.new\nmv {started}.new {started}\nwait\n")
        hangs.chmod(0o755)
        monkeypatch.setattr(bench.sys, "executable", str(hangs))
        monkeypatch.setattr(bench, "GRACE_S", 0.5, raising=False)

        class Begun(subprocess.Popen[bytes]):
            """Its time begins when its worker is there, however long a shell takes to start."""

            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                deadline = time.monotonic() + 60
                while not started.exists():
                    assert time.monotonic() < deadline, "the run did not begin"
                    time.sleep(0.01)

        monkeypatch.setattr(bench.subprocess, "Popen", Begun)
        args = bench._arguments(["--impl", "ours", "--limit", "0.5", "--out", str(tmp_path / "out")])
        told = bench._measure("ours", args, tmp_path / "out")
        assert told["error"] == "it must end within --limit=0.5 s, and 0.5 s for the rest; it was ended."
        deadline = time.monotonic() + 60
        line = Path(f"/proc/{int(started.read_text())}/cmdline")
        while line.exists() and line.read_bytes():  # of what ended and nobody waited for nothing is left there
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_the_table_has_the_ratios() -> None:
    impls = {
        name: {"env_steps_per_second": rate, "updates_per_second": rate / 8}
        for name, rate in (("ours", 300.0), ("torchrl", 200.0))
    }
    lines = bench.table(impls).splitlines()
    assert lines[2] == "| environment steps/s | 300 | 200 | 1.50 |" and lines[3].endswith("| 1.50 |")
