# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The training run of the peer: our presets read as our script reads them, the same task, the same keys in its log."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # torchrl's wheel installs a package named ``benchmarks`` as well

pytest.importorskip("omegaconf")
pytest.importorskip("envpool")

from benchmarks import draw_runs  # noqa: E402
from benchmarks.peers import PeerUnavailableError, motrixlab_run, motrixlab_trainers  # noqa: E402
from torchrl_ext.envs import EnvPoolEnv  # noqa: E402

CPU = torch.device("cpu")
TINY = ["env.num_envs=4", "collector.learning_starts=4", "learner.batch_size=16", "eval.episodes=2", "eval.max_steps=5"]


def make_streams(**options: Any) -> motrixlab_trainers.EnvPoolStreams:
    preset = motrixlab_run.load_preset("pendulum", ["env.num_envs=3", *(f"{key}={options[key]}" for key in options)])
    return motrixlab_trainers.EnvPoolStreams(**motrixlab_run.stream_options(preset, seed=5), device=CPU)


@pytest.mark.parametrize("name", ["halfcheetah", "go1", "g1", "pendulum"])
def test_a_preset_is_read_as_hydra_composes_it(name: str) -> None:
    hydra = pytest.importorskip("hydra")
    from omegaconf import OmegaConf

    with hydra.initialize_config_dir(str(motrixlab_run.CONFIG), version_base="1.3"):
        theirs = OmegaConf.to_container(hydra.compose("fast_sac", overrides=[f"preset={name}"]))
    assert OmegaConf.to_container(motrixlab_run.load_preset(name)) == theirs


def test_an_unknown_key_is_refused() -> None:
    from omegaconf.errors import OmegaConfBaseException

    preset = motrixlab_run.load_preset("go1")
    with pytest.raises(OmegaConfBaseException, match="batch_sise"):
        motrixlab_run.load_preset("go1", ["learner.batch_sise=3"])
    with pytest.raises(OmegaConfBaseException, match="taw"):
        motrixlab_run.agent_values(preset, "own", ["taw=1"])


def test_sizes_are_the_presets_and_the_recipe_is_motrixlabs() -> None:
    preset = motrixlab_run.load_preset("halfcheetah")
    own, shared = (motrixlab_run.agent_values(preset, recipe) for recipe in ("own", "preset"))
    sizes = {"batch_size": 4096, "num_updates": 4, "gamma": 0.99, "v_min": -500.0, "v_max": 1500.0, "num_steps": 1}
    # 12,800 rows of 128 streams.
    sizes |= {"learning_starts": 100, "buffer_size": 16000}
    assert sizes.items() <= own.items() and sizes.items() <= shared.items()
    assert (own["tau"], own["policy_frequency"], own["alpha_init"]) == (0.125, 4, 1e-3)
    assert (shared["tau"], shared["policy_frequency"], shared["alpha_init"]) == (0.05, 2, 0.1)
    assert motrixlab_run.agent_values(preset, "own", ["tau=0.5"])["tau"] == 0.5


def test_the_asymmetric_task_gives_the_actor_and_the_critics_their_own_observations() -> None:
    preset = motrixlab_run.load_preset("go1")
    streams = motrixlab_run.stream_options(preset, seed=0)
    assert (streams["actor_keys"], streams["critic_keys"]) == (["state"], ["privileged_state"])
    wanted = {"task_id": "Go1JoystickFlatTerrain-v1", "num_envs": 1024, "num_threads": 16, "max_episode_steps": None}
    assert wanted.items() <= streams["options"].items()
    evaluation = motrixlab_run.env_options(preset, seed=0, evaluate=True)
    assert (evaluation["num_envs"], evaluation["seed"]) == (32, 1_000_003)


def test_the_streams_are_those_of_our_environment_and_final_observations_are_the_true_ones() -> None:
    ours = EnvPoolEnv("Pendulum-v1", num_envs=3, num_threads=1, seed=5, max_episode_steps=3)
    streams = make_streams(**{"env.max_episode_steps": 3})
    scale, bias = streams.action_range
    assert (scale.tolist(), bias.tolist()) == ([2.0], [0.0])
    root = ours.reset()
    obs, critic_obs = streams.reset()
    assert torch.equal(obs, root["observation"]) and torch.equal(critic_obs, obs)
    total = torch.zeros(3)
    for step in range(1, 8):
        action = torch.full((3, 1), 0.1 * step)
        result = streams.step(action)
        row, root = ours.step_and_maybe_reset(root.set("action", action))
        total += row["next", "reward"][:, 0]
        assert torch.equal(result.reward, row["next", "reward"][:, 0])
        assert torch.equal(result.obs, root["observation"])
        assert torch.equal(result.truncated, row["next", "truncated"][:, 0])
        if step % 3:
            assert result.final_obs is None
        else:
            assert result.final_obs.env_ids.tolist() == [0, 1, 2]
            assert torch.equal(result.final_obs.obs.policy, row["next", "observation"])
            assert streams.pop_episodes() == pytest.approx(total.tolist())
            total.zero_()
    streams.env.close()
    ours.close()


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(*_: Any) -> None:
        raise PeerUnavailableError("motrix-rl-builtin cannot be imported.")

    monkeypatch.setattr(motrixlab_run, "make_agent", missing)
    with pytest.raises(SystemExit, match=r"^motrixlab_run: motrix-rl-builtin cannot be imported\.$"):
        motrixlab_run.main(["--preset", "pendulum", "--out", str(tmp_path)])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learner.updates_per_step=0.5", r"MotrixLab takes whole updates per vector step, got .*=0\.5\."),
        ("time_budget=null", r"the preset has no time_budget; --minutes says how long\."),
        ("env.backend=dm_control", r"the task must be EnvPool's, got env\.backend=dm_control\."),
    ],
)
def test_what_cannot_be_run_is_one_sentence(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(SystemExit, match=f"^motrixlab_run: {said}$"):
        motrixlab_run.main(["--preset", "pendulum", "--out", str(tmp_path / "out"), "--override", override])
    assert not (tmp_path / "out").exists()


def run(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], list[dict]]:
    pytest.importorskip("motrix_rl_builtin", reason="pip install --no-deps -r benchmarks/requirements-peers.txt")
    small = ["--agent", "actor_hidden_dim=16", "critic_hidden_dim=16", "--override", *TINY]
    motrixlab_run.main(["--minutes", "0.05", "--eval-every", "1e-6", "--out", str(folder), *small, *arguments])
    lines = (folder / "metrics.jsonl").read_text(encoding="ascii").splitlines()
    return json.loads(capsys.readouterr().out.splitlines()[-1]), [json.loads(line) for line in lines]


def test_a_run_writes_the_keys_of_our_script_and_ends_with_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, lines = run(tmp_path, capsys)
    assert all({"frames", "seconds", "updates"} <= line.keys() for line in lines)
    assert sum("eval/return" in line for line in lines) >= 2
    assert lines[-1]["eval/return"] == summary["return"]
    # A vector step without updates, then two updates each.
    assert summary["updates"] == 2 * (summary["frames"] // 4 - 1) > 0
    last = [line for line in lines if "learner/qf_loss" in line][-1]
    assert torch.isfinite(torch.tensor(last["learner/qf_loss"]))
    draw_runs.draw([f"a={tmp_path}", f"b={tmp_path}"], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_the_replay_holds_the_final_observations_of_truncated_rows() -> None:
    pytest.importorskip("motrix_rl_builtin", reason="pip install --no-deps -r benchmarks/requirements-peers.txt")
    preset = motrixlab_run.load_preset("pendulum", TINY)
    values = motrixlab_run.agent_values(preset, "own", ["actor_hidden_dim=16", "critic_hidden_dim=16", "buffer_size=9"])
    streams = make_streams(**{"env.max_episode_steps": 3})
    trainer = motrixlab_trainers.SyncTrainer(motrixlab_trainers.make_agent(streams, values, CPU), streams)
    trainer.start()
    for _ in range(4):
        assert trainer.advance() == 3
    replay = trainer.agent.rb
    assert (replay._final_slot[:, :4] >= 0).tolist() == [[False, False, True, False]] * 3
    kept = replay._final_obs_table[replay._final_slot[:, 2].long()]
    # The row after the end begins another episode.
    assert not torch.isclose(kept, replay.observations[:, 3]).all(-1).any()
    trainer.close()


def test_collector_and_learner_run_in_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary, _ = run(tmp_path, capsys, "--trainer", "async")
    assert summary["updates"] > 0 and summary["frames"] % 4 == 0
