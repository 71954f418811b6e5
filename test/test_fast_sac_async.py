# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The FastSAC script with workers that collect while the learner learns, and what is made of its checkpoints."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from test_fast_sac_script import ROOT, SCRIPT, build, last, lines, script, start, train  # noqa: F401
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_ext.trainers import save_checkpoint

DEADLINE = 120.0
ASYNC = ["async=true", "collector.publish_every=4"]
SLOW = """
import time

from torchrl_ext.testing import CountingEnv


class Slow(CountingEnv):
    seconds = 0.0

    def _step(self, tensordict):
        time.sleep(self.seconds)
        return super()._step(tensordict)


def slow(num_envs, seconds):
    env = Slow(num_envs, [3, 4, 5, 7])
    env.seconds = seconds
    return env
"""


def workers_of(pid):
    """Processes of a run's workers, by their parent."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    fields = file.read().rsplit(")", 1)[1].split()
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    command = file.read()
            except OSError:
                continue
            if int(fields[1]) == pid and b"collector-" in command and fields[0] != "Z":
                found.append(int(entry))
    return found


def wait_for(what, holds, seconds=DEADLINE):
    end = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < end, f"{what} did not happen within {seconds} s"
        time.sleep(0.05)
    return value


def has_lines(folder):
    return (folder / "metrics.jsonl").exists() and lines(folder)


class TestGovernor:
    """Contract: strict is exact whoever is slow, none lost at the end; free takes what it can."""

    @pytest.mark.parametrize("slow", ["learner", "collector"])
    def test_strict_ratio_holds(self, build, monkeypatch, slow):  # noqa: F811
        run = build(*ASYNC, "learner.updates_per_step=1")
        target, name = (run.state.learner, "update") if slow == "learner" else (run.source, "feed")
        whole = getattr(target, name)

        def slowly(*args, **kwargs):
            time.sleep(0.004)
            return whole(*args, **kwargs)

        monkeypatch.setattr(target, name, slowly)
        stop = type("Never", (), {"count": 0})()
        run.train(stop)
        expected = 200 - 12  # 200 vector steps, of which 12 leave fewer than 100 rows
        assert run.state.counters.frames == 1600
        assert run.state.governor.updates == run.state.learner.updates == expected

    def test_workers_are_held_back_by_what_the_learner_owes(self, build):  # noqa: F811
        run = build(*ASYNC, "collector.max_ahead=2", "learner.updates_per_step=50", "collector.learning_starts=8")
        run.begin()
        end = time.monotonic() + DEADLINE
        while run.state.counters.frames < 80:
            assert time.monotonic() < end, "80 rows did not come in time"
            run.step()
            owed = run.state.governor.due(run.state.counters.frames)
            assert owed <= (2 + 1) * 50 + 4, "rows of more than max_ahead vector steps came before their updates"

    def test_free_goes_on_without_new_rows(self, build):  # noqa: F811
        run = build(*ASYNC, "collector.governor=free", "learner.updates_per_step=0.01", "total_frames=400")
        stop = type("Never", (), {"count": 0})()
        run.train(stop)
        assert run.state.counters.frames == 400
        assert run.state.governor.updates > run.state.governor.expected(400) == 0


class TestWorkers:
    @pytest.mark.parametrize(("options", "threads"), [([], 3), (["collector.env_threads=5"], 5)])
    def test_each_has_its_share_of_the_threads_of_environments_or_what_is_said(
        self,
        build,  # noqa: F811
        monkeypatch,
        options,
        threads,
    ):
        factories = []

        def made(factory, *args, **kwargs):
            factories.append(factory)
            raise ValueError("no workers here")

        monkeypatch.setattr(sys.modules["sources"], "RingCollector", made)
        with pytest.raises(ValueError, match="no workers here"):
            build(*ASYNC, "env.num_threads=6", "collector.num_workers=2", *options)
        assert [factory.keywords["num_threads"] for factory in factories] == [threads]

    def test_no_threads_are_refused(self, build):  # noqa: F811
        with pytest.raises(ValueError, match=r"collector.env_threads must be >= 1 or null, got 0"):
            build(*ASYNC, "collector.env_threads=0")


class TestBegin:
    @pytest.mark.parametrize("asynchronous", ["true", "false"])
    def test_steps_are_compiled_on_rows_of_the_run_before_its_clock(self, build, monkeypatch, asynchronous):  # noqa: F811
        run, batches = build(f"async={asynchronous}"), []
        learner = run.state.learner

        def prepare(replay):
            assert run.state.counters.seconds == 0 and learner.updates == 0
            batches.append(replay.sample())
            learner.cuda_graph = False

        monkeypatch.setattr(learner, "cuda_graph", True)
        monkeypatch.setattr(learner, "prepare", prepare)
        stop = type("Never", (), {"count": 0})()
        run.train(stop)
        assert len(batches) == 1
        real = run.state.replay.sample()
        assert batches[0].shape == real.shape
        assert {key: leaf.shape for key, leaf in batches[0].items(True, True)} == {
            key: leaf.shape for key, leaf in real.items(True, True)
        }
        assert run.state.counters.frames == 1600


class TestGate:
    """case 45: no update below ``learning_starts`` rows, the first one there; parameters bit-equal until then."""

    def test_nothing_is_learnt_before(self, build):  # noqa: F811
        run = build(*ASYNC, "collector.learning_starts=400")
        before = [value.clone() for value in run.state.learner.loss.parameters()]
        run.begin()
        end = time.monotonic() + DEADLINE
        while run.state.learner.updates == 0:
            assert time.monotonic() < end, "no update came"
            if run.state.counters.frames < 400:
                now = list(run.state.learner.loss.parameters())
                assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
            run.step()
        assert run.state.counters.frames >= 400


class TestMetrics:
    def test_lag_and_shares_are_told(self, script, tmp_path):  # noqa: F811
        folder = train(script, tmp_path / "run", *ASYNC)
        told = {key for line in (folder / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)}
        assert {"collector/policy_lag_updates", "learner/busy_share", "collector/ring_fill", "collector/env_ms"} <= told
        lags = [
            line["collector/policy_lag_updates"] for line in lines(folder) if "collector/policy_lag_updates" in line
        ]
        assert all(0 <= lag <= 94 for lag in lags)
        assert any("train/return" in line for line in lines(folder))


class TestLife:
    def test_resumed_run_goes_on(self, build):  # noqa: F811
        run = build(*ASYNC)
        stop = type("Never", (), {"count": 0})()
        run.train(stop)
        run.save(with_replay=True)
        other = build(*ASYNC, f"resume_from={run.folder}", "total_frames=3200", folder="b")
        assert (other.state.counters.frames, len(other.state.replay)) == (1600, 1600)
        other.train(stop)
        assert other.state.counters.frames == 3200
        assert other.state.governor.updates == (400 - 12) // 2
        rows = other.state.replay.storage.get(torch.arange(199, 202))
        assert not torch.equal(rows["next", "observation"][0], rows["observation"][1]), "streams were cut"

    @pytest.mark.parametrize("replay", [True, False])
    def test_a_run_in_turns_goes_on_asynchronously_and_neither_overshoots_nor_stops(self, build, replay):  # noqa: F811
        run, stop = build("total_frames=400"), type("Never", (), {"count": 0})()
        run.train(stop)
        run.save(with_replay=replay)
        more = [f"resume_from={run.folder}", "total_frames=800", "collector.max_ahead=1", "collector.learning_starts=8"]
        other, most = build(*ASYNC, *more, folder="b"), 0
        whole = other.step

        def step():
            nonlocal most
            before = other.state.counters.frames
            made = whole()
            most = max(most, other.state.counters.frames - before)
            return made

        other.step = step
        other.train(stop)
        assert other.state.counters.frames == 800 and most <= 16, "workers are at most max_ahead steps ahead"
        assert not other.state.governor.due(800)

    def test_a_start_that_was_stopped_is_gone_on_from(self, build):  # noqa: F811
        run, stop = build(*ASYNC, "total_frames=80"), type("Never", (), {"count": 0})()
        run.train(stop)
        run.save(with_replay=True)
        stopped = build(*ASYNC, f"resume_from={run.folder}", folder="b")
        stopped.train(type("Stopped", (), {"count": 1})())
        frames = stopped.state.counters.frames
        assert 80 <= frames == len(stopped.state.replay), "rows that came count"
        stopped.save(with_replay=True)
        more = ["total_frames=160", "collector.max_ahead=1"]
        other = build(*ASYNC, *more, f"resume_from={stopped.folder}", folder="c")
        other.train(stop)
        assert other.state.counters.frames == len(other.state.replay) == 160

    def test_workers_that_stood_unevenly_go_on(self, build):  # noqa: F811
        two, end = ["collector.num_workers=2", "total_frames=16000"], time.monotonic() + DEADLINE
        run = build(*ASYNC, *two)
        run.begin()
        while sum(run.source.state_dict()["steps"]) % 2 == 0:
            assert time.monotonic() < end, "both workers stand at the same step, always"
            run.step()
        run.save(with_replay=True)
        frames = run.state.counters.frames
        other = build(*ASYNC, *two, f"resume_from={run.folder}", folder="b")
        end = time.monotonic() + DEADLINE
        other.begin(lambda: time.monotonic() > end)
        assert time.monotonic() < end, "the first steps are waited for that nobody may take"
        assert min(other.source.state_dict()["steps"]) > min(run.source.state_dict()["steps"])
        assert other.state.counters.frames == len(other.state.replay) > frames

    @pytest.mark.parametrize("asynchronous", ["true", "false"])
    def test_updates_that_are_owed_at_the_last_row_are_taken_without_further_rows(self, build, asynchronous):  # noqa: F811
        run, stop = build("total_frames=400"), type("Never", (), {"count": 0})()
        run.train(stop)
        done = run.state.governor.updates
        run.state.governor.updates -= 5  # stopped by a signal before they were taken
        run.save(with_replay=True)
        more = ["total_frames=400", f"resume_from={run.folder}", f"async={asynchronous}"]
        other = build(*more, folder="b")
        other.train(stop)
        assert other.state.counters.frames == len(other.state.replay) == 400
        assert other.state.governor.updates == done

    def test_a_policy_that_learnt_acts_when_a_run_in_turns_goes_on_asynchronously(self, build):  # noqa: F811
        run, stop = build("total_frames=400"), type("Never", (), {"count": 0})()
        run.train(stop)
        run.save(with_replay=True)
        uniform = ["collector.warm_up_actions=uniform", "collector.learning_starts=800", "total_frames=480"]
        other = build(*ASYNC, *uniform, f"resume_from={run.folder}", folder="b")
        assert other.source.collector.init_random_frames == 0
        fresh = build(*ASYNC, *uniform, folder="c")
        assert fresh.source.collector.init_random_frames == 800

    def test_a_warm_up_that_was_stopped_has_the_uniform_rows_that_are_left(self, build):  # noqa: F811
        uniform = ["collector.warm_up_actions=uniform", "collector.learning_starts=400"]
        run, stop = build(*uniform, "total_frames=80"), type("Never", (), {"count": 0})()
        run.train(stop)
        run.save(with_replay=True)
        other = build(*ASYNC, *uniform, f"resume_from={run.folder}", folder="b")
        assert other.source.collector.init_random_frames == 320, "its workers count from 0"
        other.begin()
        other.save(with_replay=False)
        frames = other.state.counters.frames
        third = build(*ASYNC, *uniform, f"resume_from={other.folder}", folder="c")
        left = third.source.collector.init_random_frames - third.source.state_dict()["frames"]
        assert (frames, left) == (88, 400), "an empty replay is warmed up from its beginning"

    def test_the_seed_of_the_command_line_counts(self, build):  # noqa: F811
        run, stop = build(*ASYNC, "total_frames=80"), type("Never", (), {"count": 0})()
        run.train(stop)
        run.save(with_replay=True)
        same = build(*ASYNC, f"resume_from={run.folder}", folder="b").source.state_dict()
        other = build(*ASYNC, f"resume_from={run.folder}", "seed=7", folder="c").source.state_dict()
        assert (same["seed"], same["epoch"]) == (0, 1)
        assert (other["seed"], other["epoch"]) == (7, 1)

    def test_weights_that_had_to_wait_go_out_while_no_rows_come(self, build, monkeypatch):  # noqa: F811
        run, told = build(*ASYNC), []
        monkeypatch.setattr(run.source, "feed", lambda **kwargs: 0)
        monkeypatch.setattr(run.source, "publish", told.append)
        run.step()
        assert told == [0]

    def test_a_budget_that_is_used_up_collects_nothing(self, script, build):  # noqa: F811
        run = build(*ASYNC, "total_frames=80")
        assert script.run(run) == 0
        other = build(*ASYNC, "total_frames=80", f"resume_from={run.folder}", folder="b")
        assert script.run(other) == 0
        assert last(other.folder)["counters"]["frames"] == last(other.folder)["source"]["frames"] == 80

    def test_rows_without_a_known_successor_owe_no_update(self, build):  # noqa: F811
        run = build(*ASYNC, "total_frames=8", "collector.learning_starts=1", "learner.updates_per_step=2")
        end = time.monotonic() + DEADLINE
        run.begin(lambda: False)
        while not run.is_done():
            assert time.monotonic() < end, "the run waits for rows that never come"
            run.step()
        assert run.state.counters.frames == 8 and run.state.governor.updates == 0

    def test_a_signal_is_heard_while_streams_are_opened(self, tmp_path):
        (tmp_path / "slow_factory.py").write_text(SLOW)
        task = ["env.backend=factory", "env.task=slow_factory:slow", "env.num_envs=4", "eval.episodes=4"]
        process = start(tmp_path / "run", *ASYNC, *task, "env.options={seconds: 250}", "log.print_every=0.2")
        try:
            pids = wait_for("a worker", lambda: workers_of(process.pid))
            wait_for("the first line", lambda: (tmp_path / "run" / "metrics.jsonl").exists())
            time.sleep(1.0)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=DEADLINE)  # less than the streams take
            assert process.returncode == 130 and b"Traceback" not in err, err.decode()
        finally:
            process.kill()
        assert last(tmp_path / "run")["counters"]["frames"] == 0
        wait_for("the end of the workers", lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signal_writes_a_checkpoint_and_ends_the_workers(self, tmp_path, number):
        process = start(tmp_path / "run", *ASYNC, "total_frames=800000", "log.print_every=0.2")
        try:
            pids = wait_for("a worker", lambda: workers_of(process.pid))
            wait_for(
                "a line of metrics", lambda: (tmp_path / "run" / "metrics.jsonl").exists() and lines(tmp_path / "run")
            )
            process.send_signal(number)
            _, err = process.communicate(timeout=DEADLINE)
            assert process.returncode == 128 + number, err.decode()
        finally:
            process.kill()
        saved = last(tmp_path / "run")
        assert saved["counters"]["frames"] > 0 and saved["replay"] is not None
        wait_for("the end of the workers", lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))

    def test_killed_worker_ends_the_run_with_its_name(self, tmp_path):
        process = start(tmp_path / "run", *ASYNC, "total_frames=800000")
        try:
            pids = wait_for("a worker", lambda: workers_of(process.pid))
            wait_for(
                "a line of metrics", lambda: (tmp_path / "run" / "metrics.jsonl").exists() and lines(tmp_path / "run")
            )
            os.kill(pids[0], signal.SIGKILL)
            _, err = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
        assert process.returncode not in (0, None)
        assert b"collector-0" in err and b"SIGKILL" in err

    def test_killed_worker_is_started_anew_when_asked(self, tmp_path):
        options = ["collector.max_restarts=1", "total_frames=8000", "learner.updates_per_step=0.1"]
        process = start(tmp_path / "run", *ASYNC, *options)
        try:
            pids = wait_for("a worker", lambda: workers_of(process.pid))
            wait_for(
                "a line of metrics", lambda: (tmp_path / "run" / "metrics.jsonl").exists() and lines(tmp_path / "run")
            )
            os.kill(pids[0], signal.SIGKILL)
            out, err = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
        assert process.returncode == 0, err.decode()
        assert last(tmp_path / "run")["counters"]["frames"] == 8000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "run"
    process = start(folder, "async=false")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err.decode()
    return folder


class TestCheckpointUses:
    @staticmethod
    def call(name, *arguments):
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(SCRIPT.parent / name), *map(str, arguments)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False)

    def test_exported_policy_acts_as_the_learners(self, folder, script):  # noqa: F811
        onnxruntime = pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
        done = self.call("export.py", folder, "--checkpoint", "last")
        assert done.returncode == 0, done.stderr
        from saved_run import load_run
        from tensordict import TensorDict

        _, learner = load_run(folder, checkpoint="last")
        session = onnxruntime.InferenceSession(str(folder / "policy.onnx"), providers=["CPUExecutionProvider"])
        observation = 2 * torch.randn(5, 3)
        found = session.run(None, {"observation": observation.numpy()})[0]
        with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
            wanted = learner.policy(TensorDict(observation=observation, batch_size=[5]))["action"]
        assert torch.allclose(torch.from_numpy(found), wanted, atol=1e-4)

    def test_checkpoint_is_played(self, folder):
        done = self.call("play.py", folder, "--episodes", "2")
        assert done.returncode == 0, done.stderr
        assert "Pendulum-v1: mean return -" in done.stdout and "over 2 episodes" in done.stdout

    @pytest.mark.parametrize("damage", ["configuration", "list", "checkpoint"])
    def test_a_damaged_run_is_refused_in_one_sentence(self, folder, script, tmp_path, damage):  # noqa: F811
        from saved_run import load_run

        (tmp_path / ".hydra").mkdir()
        broken = {"configuration": ": [", "list": "[1]"}.get(damage)
        config = broken or (folder / ".hydra" / "config.yaml").read_text()
        (tmp_path / ".hydra" / "config.yaml").write_text(config)
        save_checkpoint(tmp_path / "checkpoints" / "last.pt", {}, kind="torchrl_ext.fast_sac/1")
        wanted = (
            "config.yaml must be the configuration of a run" if broken else "last.pt must be the checkpoint of a run"
        )
        with pytest.raises(ValueError, match=wanted):
            load_run(tmp_path)

    def test_a_model_that_is_not_kept_leaves_the_one_of_before(self, folder, script, tmp_path, monkeypatch):  # noqa: F811
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
        import export

        monkeypatch.setattr(export, "TOLERANCE", -1.0)
        (tmp_path / "policy.onnx").write_bytes(b"of before")
        with pytest.raises(RuntimeError, match="must be within -1 of torch's, got .*policy.onnx was not written"):
            export.export(folder, tmp_path / "policy.onnx", checkpoint="last")
        assert [path.name for path in tmp_path.iterdir()] == ["policy.onnx"]
        assert (tmp_path / "policy.onnx").read_bytes() == b"of before"

    def test_a_policy_of_lost_numbers_is_not_exported(self, folder, script, tmp_path, monkeypatch):  # noqa: F811
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
        import export

        settings, learner = export.load_run(folder, checkpoint="last")
        learner.loss.actor_parameters()[0].data.fill_(float("nan"))
        monkeypatch.setattr(export, "load_run", lambda folder, checkpoint: (settings, learner))
        with pytest.raises(RuntimeError, match="must be within 0.0001 of torch's, got inf"):
            export.export(folder, tmp_path / "policy.onnx", checkpoint="last")
        assert not list(tmp_path.iterdir())

    def test_a_model_that_cannot_be_written_is_told_in_one_sentence(self, folder):
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
        done = self.call("export.py", folder, "--output", folder / "metrics.jsonl" / "policy.onnx")
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("export: ")

    @pytest.mark.parametrize("name", ["export.py", "play.py"])
    def test_folder_of_no_run_is_refused_in_one_sentence(self, tmp_path, name):
        done = self.call(name, tmp_path)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1 and "must be the folder of a run" in done.stderr
