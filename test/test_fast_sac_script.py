# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The FastSAC script: command line, warm-up, resume, seeds, backends, errors."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

pytest.importorskip("hydra")
envpool = pytest.importorskip("envpool")

from torchrl_ext.testing import CountingEnv  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "sota_implementations" / "fast_sac" / "fast_sac.py"
TINY = [
    "preset=pendulum",
    "device=cpu",
    "time_budget=null",
    "total_frames=1600",
    "env.num_envs=8",
    "collector.learning_starts=100",
    "learner.batch_size=32",
    "learner.updates_per_step=0.5",
    "networks.actor_hidden=16",
    "networks.critic_hidden=16",
    "networks.num_atoms=11",
    "replay.capacity=500",
    "eval.episodes=2",
    "log.every=400",
]


@pytest.fixture(scope="module")
def script():
    """The script's modules, importable as they are when it is run."""
    sys.path.insert(0, str(SCRIPT.parent))
    import fast_sac

    yield fast_sac
    sys.path.remove(str(SCRIPT.parent))


@pytest.fixture
def build(script, tmp_path):
    """Builds runs from overrides of TINY and closes them."""
    runs = []

    def make(*overrides, folder="run"):
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        runs.append(script.Run(settings_of(script, *overrides), path, title="test", overrides=list(overrides)))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def settings_of(script, *overrides):
    import hydra
    from omegaconf import OmegaConf

    with hydra.initialize_config_dir(str(SCRIPT.parent / "config"), version_base="1.3"):
        cfg = hydra.compose("fast_sac", overrides=[*TINY, *overrides])
    return script.Settings.from_dict(OmegaConf.to_container(cfg, resolve=True))


def train(script, folder, *overrides):
    folder.mkdir(exist_ok=True)
    assert script.run(script.Run(settings_of(script, *overrides), folder, title="test", overrides=[])) == 0
    return folder


def start(folder, *overrides):
    command = [sys.executable, str(SCRIPT), *TINY, f"hydra.run.dir={folder}", *overrides]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, cwd=folder.parent, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def parameters(state):
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def lines(folder):
    """The lines of metrics, without those of time."""
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = re.compile("seconds|.*_ms|.*_share")
    return [{key: value for key, value in line.items() if not times.fullmatch(key)} for line in read]


def last(folder):
    return torch.load(folder / "checkpoints" / "last.pt", weights_only=True)


class TestCommandLine:
    """Contract: a run leaves its files, says what it will do and did (case 57), and writes no escape byte to a pipe."""

    def test_end_to_end(self, tmp_path):
        process = start(tmp_path / "run", "log.print_every=0.2")
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err.decode()
        assert b"\x1b" not in out + err
        text = out.decode()
        assert "overrides: preset=pendulum device=cpu" in text and "learner.updates_per_step=0.5" in text
        assert "0.5 gradient steps per vector step of 8 rows, 0.0625 per row, 2 replayed rows per collected" in text
        expected = (200 - 12) // 2  # 200 vector steps, of which 12 leave fewer than 100 rows
        assert f"expected updates: {expected} after 1600 frames" in text
        measured = int(re.search(r"updates: (\d+) measured", text)[1])
        assert abs(measured / expected - 1) <= 0.01
        assert re.search(r"\d+\.\d %  .*frames/s.*updates/s.*elapsed.*left", text)
        assert re.search(r"final mean return -?\d+", text)
        files = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file()}
        assert {"metrics.jsonl", "learning_curve.png", "checkpoints/last.pt", "checkpoints/best.pt"} <= files
        assert {"csv/scalars/eval/return.csv", "csv/scalars/learner/loss_critic.csv"} <= files
        assert any(name.startswith("tensorboard/events.out") for name in files)
        assert not [name for name in files if "partial" in name]
        assert (tmp_path / "run" / "learning_curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert [line["frames"] for line in lines(tmp_path / "run") if "updates" in line] == [400, 800, 1200, 1600, 1600]

    def test_signal_checkpoints_and_resume_continues(self, script, tmp_path):
        process = start(tmp_path / "run", "total_frames=8000000", "log.print_every=0.1")
        deadline = time.monotonic() + 80
        try:
            for line in process.stdout:
                match = re.search(rb"%  ([\d,]+) frames.* ([\d,]+) updates ", line)
                assert time.monotonic() < deadline
                if match and int(match[2].replace(b",", b"")) > 5:
                    break
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
        assert process.returncode == 143, err.decode()
        assert b"stopped by a signal" in out and b"not evaluated" in out
        saved = last(tmp_path / "run")
        frames = saved["counters"]["frames"]
        assert saved["replay"] is not None and saved["governor"]["updates"] == (frames // 8 - 12) // 2
        more = frames + 800
        folder = train(
            script, tmp_path / "more", f"resume_from={tmp_path / 'run'}", f"total_frames={more}", "log.every=80"
        )
        assert last(folder)["counters"]["frames"] == more
        assert last(folder)["governor"]["updates"] == (more // 8 - 12) // 2
        assert last(folder)["learner"]["updates"] == (more // 8 - 12) // 2
        assert lines(folder)[0]["frames"] > frames

    def test_one_sentence_and_exit_code(self, tmp_path):
        process = start(tmp_path / "run", "env.task=Pendulm-v1", "env.backend=envpool")
        out, err = process.communicate(timeout=100)
        assert process.returncode == 2 and b"Traceback" not in out + err
        assert err.decode().splitlines()[-1].startswith("fast_sac: EnvPoolEnv: task_id must be a task of EnvPool")
        assert "did you mean 'Pendulum-v1'" in err.decode()


class TestWarmUp:
    """Contract (case 45): 1000 rows with 64 streams are 16 vector steps; before, no update and bit-equal parameters."""

    @pytest.mark.parametrize("actions", ["policy", "uniform"])
    def test_gate(self, build, actions):
        run = build(
            "env.num_envs=64",
            "total_frames=64000",
            "collector.learning_starts=1000",
            "learner.updates_per_step=3",
            f"collector.warm_up_actions={actions}",
        )
        learner = run.state.learner
        before = {key: value.clone() for key, value in parameters(learner.loss.state_dict()).items()}
        for _ in range(15):
            assert run.step() == {}
        assert run.state.counters.frames == 960 and learner.updates == 0
        after = parameters(learner.loss.state_dict())
        assert all(torch.equal(before[key], after[key]) for key in before)
        drawn = run.state.replay._storage["action"][:15]
        # The policy as initialised is tanh(Normal(0, 0.5)) in the box [-2, 2]; both differ far beyond chance.
        assert (drawn.std() > 1.0) == (actions == "uniform")
        run.step()
        assert run.state.counters.frames == 1024 and learner.updates == run.state.governor.updates == 3

    def test_lost_numbers_stop_the_run(self, script, build):
        run = build("collector.learning_starts=8", "log.every=80")
        run.state.learner.loss.actor_parameters()[0].data.fill_(float("nan"))
        with pytest.raises(RuntimeError, match="must be finite, got none at .*loss_critic"):
            script.run(run)
        assert not (run.folder / "checkpoints").exists()

    def test_lost_numbers_are_never_saved_over_a_good_checkpoint(self, script, build):
        often = ["collector.learning_starts=8", "checkpoint.every=0.0001", "log.every=800000"]
        run = build(*often, "learner.updates_per_step=1")
        whole = run.step

        def step():
            if run.state.learner.updates == 8:
                run.state.learner.loss.actor_parameters()[0].data.fill_(float("nan"))
            return whole()

        run.step = step
        with pytest.raises(RuntimeError, match="must be finite"):
            script.run(run)
        saved = last(run.folder)["learner"]["loss"]
        assert all(bool(torch.isfinite(value).all()) for value in parameters(saved).values())

    def test_lost_numbers_are_never_the_best_checkpoint(self, build):
        run = build("collector.learning_starts=8", "eval.every=80", "log.every=800000", "learner.updates_per_step=1")
        run.evaluate = lambda stop: pytest.fail("a policy of lost numbers was evaluated")
        run.state.learner.loss.actor_parameters()[0].data.fill_(float("nan"))
        with pytest.raises(RuntimeError, match="must be finite"):
            run.train(type("Never", (), {"count": 0})())

    def test_steps_per_run(self, build):
        run = build("collector.steps_per_run=5", "total_frames=4000")
        for _ in range(6):
            run.step()
        assert run.state.governor.updates == (30 - 12) // 2


class TestSaving:
    """Contract: a second signal leaves the replay out, also while it is being written; a place that takes no
    checkpoints is found before the run.
    """

    @pytest.mark.parametrize("with_replay", [True, False])
    def test_a_second_signal_while_the_checkpoint_is_written_leaves_the_replay_out(self, script, build, with_replay):
        run = build()
        whole, state_dict = run.step, run.state.replay.state_dict

        def step():
            if run.state.counters.frames == 400:
                signal.raise_signal(signal.SIGINT)
            return whole()

        def slow_state():
            state = state_dict()
            if not with_replay:
                signal.raise_signal(signal.SIGINT)
            return state

        run.step, run.state.replay.state_dict = step, slow_state
        assert script.run(run) == 130
        assert (last(run.folder)["replay"] is not None) == with_replay
        assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["last.pt"]

    def test_what_a_killed_run_had_begun_to_write_goes_and_what_another_one_writes_stays(self, build, tmp_path):
        killed = subprocess.Popen([sys.executable, "-c", ""])
        killed.wait()
        other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        place = tmp_path / "run" / "checkpoints"
        place.mkdir(parents=True)
        kept = [place / f".last.pt.{other.pid}.partial", place / "last.pt", place / ".last.pt.x.partial"]
        try:
            for path in [place / f".last.pt.{killed.pid}.partial", place / f".best.pt.{os.getpid()}.partial", *kept]:
                path.write_bytes(b"half")
            build()
            assert set(place.iterdir()) == set(kept)
        finally:
            other.communicate(b"")

    def test_a_checkpoint_that_takes_as_long_as_its_interval_leaves_time_to_train(self, build, monkeypatch):
        clock = sys.modules["common.training_run"].time
        run, now, saved = build("checkpoint.every=10", "total_frames=800"), 0.0, []
        whole = run.step

        def step():
            nonlocal now
            now += 1.0
            return whole()

        def save(**options):
            nonlocal now
            now += 12.0
            saved.append(run.state.counters.frames // 8)

        fake = type("Clock", (), {"monotonic": staticmethod(lambda: now), "sleep": clock.sleep})
        monkeypatch.setattr(sys.modules["common.training_run"], "time", fake)
        run.step, run.save = step, save
        run.train(type("Never", (), {"count": 0})())
        assert saved == [10 * number for number in range(1, 11)]

    def test_a_place_that_takes_no_checkpoints_is_refused_before_the_run(self, build, tmp_path):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "checkpoints").write_bytes(b"")
        with pytest.raises(OSError, match="checkpoints must be a folder that can be written to; nothing was started"):
            build()


class TestResume:
    """Contract: everything but the environments goes on: the same next minibatch, generators, counters, curve."""

    @pytest.mark.parametrize("n_steps", [1, 3])
    def test_next_minibatch(self, build, n_steps):
        run = build(f"learner.n_steps={n_steps}", "env.max_episode_steps=7")
        for _ in range(40):
            run.step()
        run.save(with_replay=True)
        other = build(f"learner.n_steps={n_steps}", "env.max_episode_steps=7", f"resume_from={run.folder}", folder="b")
        assert other.state.counters.frames == 320 and other.state.learner.updates == run.state.learner.updates > 0
        for _ in range(3):
            ours, theirs = run.state.replay.sample(), other.state.replay.sample()
            assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
            for key in ours.keys(True, True):
                assert torch.equal(ours[key], theirs[key]), key
        ours, theirs = run.state.learner.state_dict()["loss"], other.state.learner.state_dict()["loss"]
        assert all(torch.equal(value, theirs[key]) for key, value in parameters(ours).items())

    def test_new_episodes_are_no_successors(self, build):
        run = build()
        run.step()
        run.save(with_replay=True)
        other = build(f"resume_from={run.folder}", folder="b")
        other.step()
        rows = other.state.replay._storage.get(torch.arange(2))
        assert not torch.equal(rows["next", "observation"][0], rows["observation"][1])

    def test_generators(self, build):
        run = build()
        run.step()
        run.save(with_replay=True)
        expected = torch.rand(4)
        build(f"resume_from={run.folder}", folder="b")
        assert torch.equal(torch.rand(4), expected)

    def test_without_replay_the_gate_closes_again(self, build):
        run = build("collector.warm_up_actions=uniform")
        for _ in range(40):
            run.step()
        run.save(with_replay=False)
        other = build("collector.warm_up_actions=uniform", f"resume_from={run.folder}", folder="b")
        done = other.state.learner.updates
        for _ in range(12):
            assert other.step() == {}
        for _ in range(2):
            other.step()
        assert other.state.learner.updates == done + 1

    @pytest.mark.parametrize("foreign", ["noise", "task", "size", "missing"])
    def test_foreign_checkpoint_changes_nothing(self, script, build, tmp_path, foreign):
        path = tmp_path / "foreign.pt"
        if foreign == "noise":
            path.write_bytes(b"no checkpoint")
        elif foreign != "missing":
            override = "env.task=MountainCarContinuous-v0" if foreign == "task" else "networks.actor_hidden=32"
            other = build(override, folder="other")
            other.step()
            path = other.state.save(path, history={}, with_replay=True)
        run = build()
        run.step()
        before = {key: value.clone() for key, value in parameters(run.state.learner.loss.state_dict()).items()}
        rows = len(run.state.replay)
        with pytest.raises((ValueError, FileNotFoundError), match=str(path)) as caught:
            run.state.load(path)
        assert "\n" not in str(caught.value)
        after = parameters(run.state.learner.loss.state_dict())
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert len(run.state.replay) == rows and run.state.counters.frames == 8

    @pytest.mark.parametrize(
        "damage",
        ["no history", "no generators", "no optimizer", "no counters", "no points", "no source", "no owed"],
    )
    def test_a_checkpoint_that_is_not_whole_changes_nothing(self, build, damage):
        other = build(folder="other")
        for _ in range(30):
            other.step()
        path = other.state.save(other.folder / "a.pt", history={}, with_replay=True)
        state = torch.load(path, weights_only=True)
        part, name = {
            "no history": (state, "history"),
            "no generators": (state["random"], "numpy"),
            "no optimizer": (state["learner"], "actor_optimizer"),
            "no counters": (state["counters"], "episodes"),
            "no points": (state, "history"),
            "no source": (state, "source"),
            "no owed": (state["governor"], "owed"),
        }[damage]
        if damage == "no counters":
            part["nope"] = part.pop(name)
        elif damage in ("no points", "no source", "no owed"):
            part[name] = [1]
        else:
            del part[name]
        torch.save(state, path)
        run = build()
        run.step()
        before = {key: value.clone() for key, value in parameters(run.state.learner.loss.state_dict()).items()}
        with pytest.raises(
            ValueError, match=f"resume_from: {path} must be a checkpoint of this configuration"
        ) as caught:
            run.state.load(path)
        assert "\n" not in str(caught.value)
        after = parameters(run.state.learner.loss.state_dict())
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert len(run.state.replay) == run.state.counters.frames == 8

    def test_options_of_the_command_line_count(self, build):
        run = build()
        run.save(with_replay=True)
        options = ["learner.gamma=0.5", "learner.target_entropy_ratio=0.25", "learner.critic_lr=0.125"]
        learner = build(f"resume_from={run.folder}", *options, folder="b").state.learner
        assert (float(learner.loss.gamma), float(learner.loss.target_entropy)) == (0.5, -0.25)
        assert learner.critic_optimizer.param_groups[0]["lr"] == 0.125

    @pytest.mark.parametrize(
        "changed", ["learner.updates_per_step=2", "learner.updates_per_step=0.25", "collector.learning_starts=16"]
    )
    def test_another_update_ratio_counts_from_there_on(self, build, changed):
        run = build()
        for _ in range(100):
            run.step()
        run.save(with_replay=True)
        done = run.state.governor.updates
        ratio = float(changed.partition("step=")[2] or 0.5)
        other = build(f"resume_from={run.folder}", changed, folder="b")
        assert other.state.governor.due(800) == 0, "rows of before were learnt from at the ratio of then"
        for _ in range(40):
            other.step()
        assert other.state.governor.updates == done + 40 * ratio
        other.save(with_replay=True)
        third = build(f"resume_from={other.folder}", changed, folder="c")
        assert third.state.governor.updates == third.state.governor.expected(1120) == done + 40 * ratio

    def test_the_gate_may_be_moved_behind_where_a_run_stands(self, build):
        run = build()
        for _ in range(100):
            run.step()
        run.save(with_replay=True)
        done = run.state.governor.updates
        other = build(f"resume_from={run.folder}", "collector.learning_starts=880", folder="b")
        for _ in range(9):
            other.step()
        assert other.state.governor.updates == done
        for _ in range(4):
            other.step()
        assert other.state.governor.updates == done + 2

    def test_updates_that_a_free_governor_took_are_not_waited_for(self, build):
        run = build()
        for _ in range(50):
            run.step()
        run.state.governor.count(1000)
        run.save(with_replay=True)
        other = build(f"resume_from={run.folder}", folder="b")
        done = other.state.governor.updates
        for _ in range(4):
            other.step()
        assert other.state.governor.updates == done + 2

    def test_another_range_of_returns_is_refused(self, build):
        run = build()
        run.save(with_replay=True)
        with pytest.raises(ValueError, match="atoms .* from -600 to 0, got from -10 to 0"):
            build(f"resume_from={run.folder}", "networks.v_min=-10", folder="b")

    def test_a_budget_that_is_used_up_collects_nothing(self, script, build, tmp_path):
        folder = train(script, tmp_path / "run", "total_frames=80")
        run = build(f"resume_from={folder}", "total_frames=80", folder="b")
        assert script.run(run) == 0
        assert run.state.counters.frames == len(run.state.replay) == 80

    def test_foreign_replay_changes_nothing(self, build):
        other = build("replay.capacity=400", folder="other")
        other.step()
        path = other.state.save(other.folder / "a.pt", history={}, with_replay=True)
        run = build()
        with pytest.raises(ValueError, match="capacity"):
            run.state.load(path)
        assert run.state.counters.frames == 0 and len(run.state.replay) == 0


class TestSeed:
    """Contract: on a CPU one seed is one run; another seed is another."""

    def test_reproduces(self, script, tmp_path):
        folders = [train(script, tmp_path / name, f"seed={seed}") for name, seed in (("a", 1), ("b", 1), ("c", 2))]
        assert lines(folders[0]) == lines(folders[1]) != lines(folders[2])
        assert any("train/return" in line for line in lines(folders[0]))
        a, b, c = (parameters(last(folder)["learner"]["loss"]) for folder in folders)
        assert all(torch.equal(a[key], b[key]) for key in a)
        assert not all(torch.equal(a[key], c[key]) for key in a)

    def test_evaluation_leaves_the_run_as_it_was(self, script, tmp_path):
        often = train(script, tmp_path / "often", "eval.every=400")
        once = train(script, tmp_path / "once")
        a, b = (parameters(last(folder)["learner"]["loss"]) for folder in (often, once))
        assert all(torch.equal(a[key], b[key]) for key in a)
        assert len([line for line in lines(often) if "eval/return" in line]) == 4


class TestBackends:
    """Contract: other environments go through the same loop, with true successors (case 54)."""

    def test_gym(self, script, tmp_path):
        pytest.importorskip("gymnasium")
        options = ["env.backend=gym", "env.num_envs=2", "env.max_episode_steps=50", "total_frames=400"]
        folder = train(script, tmp_path / "run", *options)
        saved = last(folder)
        assert saved["learner"]["updates"] == (200 - 49) // 2
        assert saved["counters"]["episodes"] == 8
        assert [line for line in lines(folder) if "eval/return" in line][0]["eval/length"] == 50

    def test_training_episodes_may_be_shorter_than_those_of_evaluations(self, script, tmp_path):
        folder = train(script, tmp_path / "run", "env.train_episode_steps=20")
        assert all(line.get("train/length", 20) == 20 for line in lines(folder))
        assert [line for line in lines(folder) if "eval/return" in line][0]["eval/length"] == 200

    def test_factory_truncation_end_to_end(self, build, monkeypatch, tmp_path):
        module = """
            from torchrl_ext.testing import CountingEnv

            def counting(num_envs):
                return CountingEnv(num_envs, [3, 4, 5, 7], ends=["truncated", "both", "terminated"])
        """
        (tmp_path / "counting_factory.py").write_text(textwrap.dedent(module))
        monkeypatch.syspath_prepend(str(tmp_path))
        run = build(
            "env.backend=factory",
            "env.task=counting_factory:counting",
            "env.num_envs=4",
            "learner.n_steps=3",
            "replay.capacity=32",
            "eval.episodes=4",
        )
        shown = []
        policy = run.source.collector.policy
        run.source.collector.policy = lambda data: policy(shown.append(data["observation"].clone()) or data)
        for _ in range(60):
            run.step()
        assert run.state.learner.updates > 0
        batch = run.state.replay.sample()
        here, after = (CountingEnv.identity(part["observation"]) for part in (batch, batch["next"]))
        assert torch.equal(after, here + torch.tensor([0, 0, 1]) * batch["steps_to_next_obs"])
        # The actor sees every step of every episode but the final observation.
        for stream, length in enumerate([3, 4, 5, 7]):
            steps = torch.stack(shown)[:, stream].long()
            assert steps[:, 2].tolist() == [t % length for t in range(60)]
            assert steps[:, 1].tolist() == [t // length for t in range(60)]

    def test_a_batched_factory_has_the_limit_of_steps_that_is_set(self, build, monkeypatch, tmp_path):
        module = """
            from torchrl_ext.testing import CountingEnv

            def counting(num_envs):
                return CountingEnv(num_envs, [30] * num_envs)
        """
        (tmp_path / "long_factory.py").write_text(textwrap.dedent(module))
        monkeypatch.syspath_prepend(str(tmp_path))
        task = ["env.backend=factory", "env.task=long_factory:counting", "env.num_envs=2", "total_frames=80"]
        run = build(*task, "env.max_episode_steps=4")
        for _ in range(10):
            run.step()
        assert run.episodes()[1] == [4] * 4
        stored = run.state.replay.storage.get(torch.arange(10))["next"]
        assert stored["truncated"][..., 0].any(1).nonzero().flatten().tolist() == [3, 7]
        assert not stored["terminated"].any()

    def test_unbatched_factory(self, build, monkeypatch, tmp_path):
        module = """
            from torchrl.envs import GymEnv

            def pendulum(g):
                return GymEnv("Pendulum-v1", g=g)
        """
        (tmp_path / "gym_factory.py").write_text(textwrap.dedent(module))
        monkeypatch.syspath_prepend(str(tmp_path))
        run = build("env.backend=factory", "env.task=gym_factory:pendulum", "env.num_envs=2", "env.options={g: 5.0}")
        run.step()
        assert len(run.state.replay) == 2

    def test_asymmetric_observations(self, script, build):
        import utils
        from torchrl.data import Bounded, Composite, Unbounded

        spec = Composite(state=Unbounded((2, 3)), privileged_state=Unbounded((2, 5)), shape=(2,))

        class Env:
            observation_spec, action_spec, batch_dims = spec, Bounded(-1.0, 1.0, shape=(2, 1)), 1

        learner = utils.make_learner(settings_of(script), Env(), torch.device("cpu"))
        assert learner.loss.actor_network.in_keys == ["state_normalized"]
        assert "privileged_state_normalized" in learner.loss.qvalue_network.in_keys
        data = TensorDict({"state": torch.randn(2, 3), "privileged_state": torch.randn(2, 5)}, [2])
        assert learner.policy(data)["action"].shape == (2, 1)


class TestErrors:
    """Contract: one sentence that says what must hold and what came, before anything is started."""

    @pytest.mark.parametrize(
        "overrides, message",
        [
            (["env.task=CartPole-v1"], "'CartPole-v1' cannot be driven: .*continuous actions only"),
            (["env.task=NoSuchTask-v9"], "must be a task of EnvPool"),
            (["env.task=NoSuchTask-v9", "env.backend=gym"], "must be a task of Gymnasium"),
            (["env.task=no_such:thing", "env.backend=factory"], "must be an importable module:function"),
            (["env.backend=isaac"], r"env.backend must be one of \['auto', .*got 'isaac'"),
            (["env.num_envs=0"], "env.num_envs must be >= 1, got 0"),
            (["env.options={no_such: 1}"], "options of EnvPool's 'Pendulum-v1'"),
            (["env.actor_keys=[pixels]"], r"env.actor_keys must be among the observations \['observation'\]"),
            (["learner.n_steps=0"], "learner.n_steps must be >= 1, got 0"),
            (["learner.batch_size=big"], "learner.batch_size must be of type int, got 'big'"),
            (["learner.updates_per_step=-1"], "learner.updates_per_step must be positive"),
            (["learner.gamma=1.5"], "learner.gamma must be in"),
            (["networks.v_min=1", "networks.v_max=0"], "v_min must be below v_max"),
            (["replay.capacity=1"], "replay.capacity must be >= 2, got 1"),
            (["collector.learning_starts=100000"], "at most replay.capacity"),
            (["total_frames=1601"], r"a multiple of num_envs \* steps_per_run = 8 \(1600 or 1608\), got 1601; nothing"),
            (["total_frames=3"], r"a multiple of num_envs \* steps_per_run = 8 \(8\), got 3; nothing"),
            (["total_frames=inf"], "total_frames must be of type int, got inf"),
            (["torch_threads=0"], "torch_threads must be >= 1 or null, got 0"),
            (["learner.updates_per_step=inf"], "learner.updates_per_step must be positive and finite, got inf"),
            (["learner.betas=[0.9,2]"], r"learner.betas must be two numbers in \[0, 1\), got \[0.9, 2.0\]"),
            (["learner.actor_lr=-1"], "learner.actor_lr must be >= 0, got -1"),
            (["device=meta"], "device must be auto or a device of this machine, got 'meta'"),
            (["env.backend=gym", "env.options={no_such: 1}"], "must be a task of Gymnasium that can be made.*no_such"),
            (
                ["env.backend=factory", "env.task=textwrap:dedent", "env.options={no_such: 1}"],
                "env.options must be arguments of 'textwrap:dedent', got .*no_such.*nothing was started",
            ),
            (["total_frames=null"], "total_frames or time_budget must be set"),
            (["device=tpu9"], "device must be auto or a device of this machine, got 'tpu9'"),
            (["log.backends=[wandb]"], r"log.backends\[0\] must be one of"),
        ],
    )
    def test_message(self, build, overrides, message):
        with pytest.raises(ValueError, match=message):
            build(*overrides)

    def test_missing_envpool(self, build, monkeypatch):
        monkeypatch.setitem(sys.modules, "envpool", None)
        with pytest.raises(ImportError, match="EnvPool >= 1.2.5 must be importable.*pip install"):
            build("env.backend=envpool")

    def test_auto_backend_without_envpool(self, script, monkeypatch):
        from common import env_factory

        found = env_factory.importlib.util.find_spec
        missing = {"envpool"}
        monkeypatch.setattr(
            env_factory.importlib.util, "find_spec", lambda name: None if name in missing else found(name)
        )
        assert env_factory.choose_backend(settings_of(script).env) == "gym"
        missing.add("dm_control")
        with pytest.raises(ValueError, match="neither EnvPool nor dm_control installed"):
            env_factory.choose_backend(settings_of(script, "env.task=WalkerWalk-v1").env)

    def test_every_preset_is_valid(self, script):
        presets = sorted(path.stem for path in (SCRIPT.parent / "config" / "preset").glob("*.yaml"))
        assert {"walker", "pendulum", "halfcheetah", "humanoid", "go1", "g1"} <= set(presets)
        import hydra
        from omegaconf import OmegaConf

        for preset in presets:
            with hydra.initialize_config_dir(str(SCRIPT.parent / "config"), version_base="1.3"):
                cfg = hydra.compose("fast_sac", overrides=[f"preset={preset}"])
            settings = script.Settings.from_dict(OmegaConf.to_container(cfg, resolve=True))
            assert settings.env.task in envpool.list_all_envs()
