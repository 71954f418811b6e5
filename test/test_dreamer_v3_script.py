# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The DreamerV3 script: a whole run, latents written back, recurrent state, update ratio, resume, presets, errors."""

import contextlib
import copy
import io
import json
import re
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from test_tensorboard_layout import charts_of

pytest.importorskip("hydra")
envpool = pytest.importorskip("envpool")

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "sota_implementations" / "dreamer_v3" / "dreamer_v3.py"
TINY = [
    "device=cpu",
    "torch_threads=1",
    "env.num_threads=1",
    "env.num_envs=2",
    "replay.capacity=200",
    "replay.device=null",
    "learner.batch_size=3",
    "learner.seq_len=4",
    "learner.imagination_horizon=2",
    "collector.learning_starts=16",
    "collector.num_workers=1",
]
NETWORKS = [f"networks.{size}" for size in ("belief=16", "categoricals=3", "classes=4", "hidden=8", "bins=15")]
PENDULUM = ["preset=pendulum", *TINY, *NETWORKS, "total_frames=80", "learner.train_ratio=6", "log.every=20"]
PENDULUM += ["eval.episodes=1", "eval.max_steps=5", "env.max_episode_steps=7"]
#: A collector that has no workers.
IDLE = SimpleNamespace(
    load_state_dict=lambda state: None,
    hold_at=lambda frames: None,
    shutdown=lambda: None,
    stats=lambda: {"frames": 0},
    num_streams=2,
)
ON_CUDA = ["device=cuda", "collector.policy_device=learner", "learner.compile=false", "learner.cuda_graph=false"]
OUTCOME = [("next", key) for key in ("observation", "reward", "done", "terminated", "truncated")]


@pytest.fixture(scope="module")
def script():
    """The script's modules, importable as they are when it is run."""
    sys.path.insert(0, str(SCRIPT.parent))
    import dreamer_v3  # it finds the folder that scripts share
    import dreamer_envs  # isort: skip
    import dreamer_learner
    import dreamer_networks
    import dreamer_replay
    import dreamer_run
    from common.loop_control import StopSignal

    yield SimpleNamespace(
        main=dreamer_v3,
        envs=dreamer_envs,
        learner=dreamer_learner,
        networks=dreamer_networks,
        replay=dreamer_replay,
        run=dreamer_run,
        StopSignal=StopSignal,
    )
    sys.path.remove(str(SCRIPT.parent))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The script sets the number of threads, which other tests must not see."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def settings_of(script, *overrides):
    import hydra
    from omegaconf import OmegaConf

    with hydra.initialize_config_dir(str(SCRIPT.parent / "config"), version_base="1.3"):
        cfg = hydra.compose("dreamer_v3", overrides=list(overrides))
    return script.main.Settings.from_dict(OmegaConf.to_container(cfg, resolve=True))


def make_env(script, settings, *, num_envs):
    return script.envs.make_env(settings, num_envs=num_envs, seed=0, num_threads=1, evaluate=False)


def make_run(script, folder, *overrides):
    folder.mkdir(exist_ok=True)
    return script.main.Run(settings_of(script, *PENDULUM, *overrides), folder, title="test", overrides=list(overrides))


def train(script, folder, *overrides):
    """Runs the script in this process; returns what it wrote to its output."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert script.main.run(make_run(script, folder, *overrides)) == 0
    return out.getvalue()


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def last(folder):
    return torch.load(folder / "checkpoints" / "last.pt", weights_only=True)


@pytest.fixture(scope="module")
def finished(script, tmp_path_factory):
    """A run from the first step to the last."""
    folder = tmp_path_factory.mktemp("finished")
    options = ["learner.train_ratio=9", "collector.policy_device=learner"]
    return SimpleNamespace(folder=folder, text=train(script, folder, *options))


class Parts:
    """A learner and a replay without a process: rows come from steps in this one."""

    def __init__(self, script, *overrides):
        self.settings = settings_of(script, *overrides)
        env_settings, device = self.settings.env, torch.device("cpu")
        torch.manual_seed(0)
        self.env = make_env(script, env_settings, num_envs=env_settings.num_envs)
        self.spaces = script.envs.spaces_of(self.env, env_settings)
        networks = script.networks.make_networks(self.settings.networks, self.spaces, device)
        self.policy = networks.policy
        self.learner = script.learner.Learner(
            networks, self.settings.learner, self.settings.networks, pixels=self.spaces.pixels, device=device
        )
        layout = script.replay.row_layout(self.env, self.policy.latents)
        self.replay = script.replay.make_replay(self.settings, layout, device)
        self.write_backs = script.replay.WriteBacks(self.replay)
        self._root = None

    @torch.no_grad()
    def collect(self, steps):
        rows = []
        self._root = self.env.reset() if self._root is None else self._root
        for _ in range(steps):
            row, self._root = self.env.step_and_maybe_reset(self.policy(self._root))
            rows.append(row.select("observation", "action", "is_init", "state", "belief", *OUTCOME).clone())
        run = torch.stack(rows).contiguous()
        self.replay.extend_batch(run)
        return run

    def close(self):
        self.env.close()
        self.replay.shutdown()


@pytest.fixture
def parts(script):
    made = []

    def make(*overrides):
        made.append(Parts(script, *overrides))
        return made[-1]

    yield make
    for part in made:
        part.close()


class TestWholeRun:
    """Contract: a run leaves its files, says what it will do and did (case 57)."""

    def test_it_writes_metrics_curve_and_checkpoints(self, finished):
        files = {str(path.relative_to(finished.folder)) for path in finished.folder.rglob("*") if path.is_file()}
        assert {"metrics.jsonl", "learning_curve.png", "checkpoints/last.pt", "checkpoints/best.pt"} <= files
        assert {"csv/scalars/eval/return.csv", "csv/scalars/learner/loss_actor.csv"} <= files
        assert not [name for name in files if "partial" in name]

    def test_it_prints_the_ratio_the_updates_and_what_was_overridden(self, finished):
        """case 57"""
        text = finished.text
        assert "\x1b" not in text
        assert "overrides: learner.train_ratio=9" in text
        assert "train ratio: 9 replayed steps per collected step, in batches of 3 x 4: 0.75 updates per step" in text
        # Streams take a step together: 40 vector steps, of which 7 leave fewer than 16 rows; each is worth 1.5.
        expected = int(33 * 1.5)
        assert f"expected updates: {expected} after 80 frames" in text
        assert f"updates: {expected} measured, {expected} expected" in text
        assert re.search(r"\d+\.\d %  .*frames/s.*updates/s.*elapsed.*left", text)
        assert re.search(r"final mean return -?\d+", text)

    def test_measured_updates_and_ratio_are_those_that_were_set(self, finished):
        line = [line for line in lines(finished.folder) if "updates" in line][-1]
        assert line["frames"] == 80 and line["updates"] == int(33 * 1.5)
        # 49.5 updates belong to 66 rows after the warm-up; half an update is owed.
        assert line["train_ratio"] == pytest.approx(9 * 49 / 49.5)

    def test_every_row_of_every_write_back_is_accounted_for(self, finished):
        counts = re.search(
            r"write-back: (\d+) updates, rows applied (\d+), stale (\d+), superseded (\d+)", finished.text
        )
        updates, *rows = (int(count) for count in counts.groups())
        assert updates == int(33 * 1.5) and sum(rows) == updates * 3 * 4 and rows[0] > 0
        shares = [line for line in lines(finished.folder) if "write_back/stale_share" in line][-1]
        names = ("applied", "stale", "superseded")
        assert sum(shares[f"write_back/{name}_share"] for name in names) == pytest.approx(1)

    def test_every_metric_is_in_one_chart_but_parts_of_stages_which_are_in_none(self, finished):
        """row A10"""
        names = {name for line in lines(finished.folder) for name in line} - {"frames"}
        assert {"learner/loss_actor", "learner/loss_model_reco", "write_back/stale_share", "train_ratio"} <= names
        assert {name: len(charts_of(name)) for name in names} == {name: name.count("/") < 2 for name in names}

    def test_first_level_stages_of_learner_and_workers_are_logged(self, finished):
        """row A10"""
        told = {name: value for line in lines(finished.folder) for name, value in line.items()}
        learner, workers = ("drain", "sample", "update", "write_back", "publish"), ("policy", "env", "push", "wait")
        assert all(told[f"learner/{stage}_ms"] > 0 for stage in learner)
        assert all(told[f"collector/{stage}_ms"] > 0 for stage in (*workers, "weights"))

    def test_the_walker_preset_expects_1100000_updates(self, script):
        """case 57"""
        settings = settings_of(script, "preset=dmc_walker")
        learner = settings.learner
        assert (learner.batch_size, learner.seq_len, learner.train_ratio) == (16, 64, 1024)
        expected = script.run.make_governor(settings).expected(settings.total_frames)
        assert settings.total_frames == 1_100_000 and abs(expected / 1.1e6 - 1) < 0.01


class TestWriteBack:
    """Contract: what an update computed is in the row that follows, whenever anyone asks."""

    def test_latents_read_back_by_slot_are_those_of_the_update(self, parts):
        """case 22"""
        part = parts(*PENDULUM)
        part.collect(20)
        sample = part.replay.sample()
        _, state, belief = part.learner.update(sample)
        part.write_backs.submit(sample, state, belief).result(timeout=60)
        wanted = _as_records(sample, state, belief)
        assert 1 < len(wanted) <= 12
        _assert_stored(part.replay, wanted)

    @pytest.mark.parametrize("option", ["replay.prefetch=0", "replay.prefetch=1", "replay.visibility=eventual"])
    def test_so_are_those_of_many_updates_that_are_awaited_late(self, parts, option):
        """case 22"""
        part = parts(*PENDULUM, "learner.batch_size=6", option)
        part.collect(20)
        wanted, futures = {}, []
        for _ in range(4):
            sample = part.replay.sample()
            _, state, belief = part.learner.update(sample)
            wanted |= _as_records(sample, state, belief)
            futures.append(part.write_backs.submit(sample, state, belief))
            state.fill_(7.0)  # it belongs to the caller again, as the static outputs of a CUDA graph do
        part.write_backs.settle()
        assert all(future.done() for future in futures)
        assert sum(part.write_backs.rows.values()) == 4 * 6 * 4
        _assert_stored(part.replay, wanted)

    def test_the_latents_of_the_worker_are_those_of_the_learner_with_the_same_weights(self, parts):
        part = parts(*PENDULUM, "learner.batch_size=30")
        part.collect(20)
        sample = part.replay.sample()
        _, _, belief = part.learner.update(sample)
        # One step on from a row's context; where an episode begins, the two differ by definition.
        plain = ~sample["is_init"][:, :2].any(1).squeeze(-1)
        assert plain.sum() > 5
        assert torch.allclose(belief[plain, 0], sample["belief"][plain, 1], atol=1e-5)

    def test_the_next_sample_has_the_latents_of_the_last_update(self, parts):
        part = parts(*PENDULUM)
        part.collect(6)
        sample = part.replay.sample()
        _, state, belief = part.learner.update(sample)
        part.write_backs.submit(sample, state, belief)
        wanted, seen = _as_records(sample, state, belief), 0
        after = torch.cat([part.replay.sample() for _ in range(10)])
        for index, value in zip(after["index"].flatten(0, 1).tolist(), after["belief"].flatten(0, 1), strict=True):
            if tuple(index) in wanted:
                seen += 1
                assert torch.equal(value, wanted[tuple(index)][1])
        assert seen

    def test_rows_that_were_overwritten_meanwhile_are_stale_and_stay_as_they_are(self, parts):
        part = parts(*PENDULUM, "replay.capacity=20")
        part.collect(20)
        sample = part.replay.sample()
        _, state, belief = part.learner.update(sample)
        part.collect(20)  # a lap: none of the sampled rows lives
        before = part.replay.storage["belief"].clone()
        part.write_backs.submit(sample, state, belief)
        part.write_backs.settle()
        assert part.write_backs.rows == {"applied": 0, "stale": 12, "superseded": 0}
        assert torch.equal(part.replay.storage["belief"], before)

    def test_a_failed_write_back_raises_and_the_others_are_still_counted(self, parts, monkeypatch):
        part = parts(*PENDULUM)
        part.collect(20)
        sample = part.replay.sample()
        latents = torch.zeros(3, 4, 12), torch.zeros(3, 4, 16)
        failed = Future()
        failed.set_exception(OSError("no space"))
        with monkeypatch.context() as patch:
            patch.setattr(part.replay, "submit_update_if_present", lambda **_: failed)
            with pytest.raises(RuntimeError, match="write-back of update 1 must not fail, got OSError: no space"):
                part.write_backs.submit(sample, *latents)
        part.write_backs.submit(sample, *latents)
        part.write_backs.settle()
        assert sum(part.write_backs.rows.values()) == 12


def _as_records(sample, state, belief):
    """The slow truth: (slot, stream) to the latents after the step before; the last of several wins."""
    index = sample["index"][:, 1:].flatten(0, 1).tolist()
    values = zip(state.flatten(0, 1).clone(), belief.flatten(0, 1).clone(), strict=True)
    return {tuple(row): latents for row, latents in zip(index, values, strict=True)}


def _assert_stored(replay, wanted):
    for (slot, stream), (state, belief) in wanted.items():
        assert torch.equal(replay.storage["state"][slot, stream], state)
        assert torch.equal(replay.storage["belief"][slot, stream], belief)


@pytest.fixture(scope="module")
def rows(script, tmp_path_factory):
    """Rows of a worker whose policy never learnt."""
    with contextlib.redirect_stdout(io.StringIO()):
        run = make_run(script, tmp_path_factory.mktemp("rows"), "collector.learning_starts=80", "total_frames=80")
    try:
        while run.counters.frames < 78:
            run.step()
        assert run.governor.updates == 0
        storage = run.replay.storage
        names = ("is_init", "state", "belief", "action", "observation")
        rows = {name: storage[name][: run.counters.frames // 2].clone() for name in names}
    finally:
        run.close()
    return SimpleNamespace(policy=run.policy, **rows)


def observations(*, steps, streams, features=3):
    """What a policy is given: the first step of each stream, and of the second stream once more."""
    generator, given = torch.Generator().manual_seed(0), []
    for number in range(steps):
        first = torch.full((streams, 1), number == 0)
        first[1] |= number == 2
        seen = torch.randn(streams, features, generator=generator)
        given.append(TensorDict(observation=seen, is_init=first, batch_size=[streams]))
    return given


class TestCollection:
    """Contract: rows carry the latents that the policy acted on, which begin anew with each episode."""

    @torch.no_grad()
    def test_the_recurrent_state_is_that_of_nothing_at_the_first_step_of_an_episode(self, rows):
        first = rows.is_init.squeeze(-1)
        assert first[:, 0].nonzero().flatten().tolist() == list(range(0, len(first), 7))
        estimator = rows.policy.estimator
        nothing = estimator.prior._update_belief(torch.zeros(1, 12), torch.zeros(1, 16), torch.zeros(1, 1))
        begun = rows.belief[first]
        assert torch.allclose(begun, nothing.expand_as(begun), atol=1e-6)

    @torch.no_grad()
    def test_it_is_carried_from_step_to_step_otherwise(self, rows):
        goes_on = ~rows.is_init.squeeze(-1)[1:]
        prior = rows.policy.estimator.prior
        wanted = prior._update_belief(rows.state[:-1], rows.belief[:-1], rows.action[:-1])
        assert goes_on.sum() > 50
        assert torch.allclose(rows.belief[1:][goes_on], wanted[goes_on], atol=1e-6)

    @torch.no_grad()
    def test_memory_is_the_policys_own_and_begins_anew_with_an_episode_or_another_batch(self, parts):
        policy = parts(*PENDULUM).policy
        estimator, other = policy.estimator, policy.twin()
        assert list(other.parameters())[0] is list(policy.parameters())[0]

        def act(policy, is_init):
            flags = torch.tensor(is_init).unsqueeze(-1)
            return policy(TensorDict(observation=torch.ones(len(is_init), 3), is_init=flags, batch_size=[len(is_init)]))

        def belief_after(row):
            return estimator.prior._update_belief(row["state"], row["belief"], row["action"])

        first = act(policy, [True, True])
        act(other, [True, True, True])
        second = act(policy, [False, True])
        assert set(second.keys()) == {"observation", "is_init", "state", "belief", "action"}
        assert torch.allclose(second["belief"][0], belief_after(first)[0], atol=1e-6)
        assert torch.allclose(second["belief"][1], first["belief"][1], atol=1e-6), "a first step knows nothing"
        third = act(policy, [False] * 3)  # whatever the flags say, these streams are others
        assert torch.allclose(third["belief"], first["belief"][:1].expand(3, -1), atol=1e-6)

    def test_memory_stays_on_the_device_of_the_policy(self, parts):
        policy = parts(*PENDULUM).policy
        policy._remembered(torch.Size([2]), torch.device("cpu"))
        elsewhere = policy._remembered(torch.Size([2]), torch.device("meta"))
        assert {value.device.type for value in elsewhere.values()} == {"meta"}

    @torch.no_grad()
    def test_memory_that_is_written_in_place_gives_what_a_new_one_gives(self, parts):
        policy = parts(*PENDULUM).policy
        given = observations(steps=5, streams=3)
        torch.manual_seed(1)
        acted = [policy(step.clone()) for step in given]
        torch.manual_seed(1)
        wanted, memory = [], {"state": torch.zeros(3, 12), "belief": torch.zeros(3, 16), "action": torch.zeros(3, 1)}
        for step in given:
            inner = TensorDict(memory, [3]).rename_key_("action", "previous_action").update(step.select("is_init"))
            inner["embedding"] = policy.encoder(step["observation"])
            policy.actor(policy.estimator(inner))
            memory = {key: inner[key].clone() for key in memory}
            wanted.append(memory)
        for row, latents in zip(acted, wanted, strict=True):
            assert all(torch.equal(row[key], value) for key, value in latents.items())

    @torch.no_grad()
    def test_the_memory_of_a_batch_stays_where_it_is_and_rows_are_not_in_it(self, parts):
        policy = parts(*PENDULUM).policy
        first, second = observations(steps=2, streams=3)
        before = policy(first).clone()
        places = [value.data_ptr() for value in policy._memory.values()]
        policy(second)
        assert [value.data_ptr() for value in policy._memory.values()] == places
        assert all(torch.equal(first[key], before[key]) for key in policy.out_keys)
        assert not {value.data_ptr() for value in second.values()} & set(places)

    @pytest.mark.gpu
    @pytest.mark.parametrize("task", ["Pendulum-v1", "CartPole-v1"])
    @torch.no_grad()
    def test_a_captured_step_gives_what_an_eager_one_gives(self, script, task):
        from tensordict.nn import CudaGraphModule

        settings, device = settings_of(script, *PENDULUM, f"env.task={task}"), torch.device("cuda", 0)
        env = make_env(script, settings.env, num_envs=3)
        spaces = script.envs.spaces_of(env, settings.env)
        env.close()
        policy = script.networks.make_networks(settings.networks, spaces, device).policy
        eager, captured, rows = policy, CudaGraphModule(policy.twin()), []
        for number, step in enumerate(observations(steps=8, streams=3, features=spaces.observation[0])):
            for act in (eager, captured):
                torch.manual_seed(number)
                rows.append(act(step.to(device)).cpu())
        for plain, replayed in zip(rows[::2], rows[1::2], strict=True):
            assert all(torch.allclose(plain[key], replayed[key], atol=1e-5) for key in policy.out_keys)
        assert not torch.equal(rows[-1]["belief"], rows[-3]["belief"]), "a replay acts on its own inputs"

    @pytest.mark.gpu
    @pytest.mark.parametrize("captured", ["null", "false"])
    def test_workers_act_on_the_learners_gpu(self, script, tmp_path, captured):
        text = train(script, tmp_path, *ON_CUDA, f"collector.cudagraph_policy={captured}")
        assert "updates: 33 measured, 33 expected" in text

    @pytest.mark.parametrize(
        ("option", "device", "wanted"),
        [("null", "cpu", False), ("null", "cuda", True), ("false", "cuda", False), ("true", "cuda", True)],
    )
    def test_workers_capture_their_step_where_they_act_on_a_gpu(self, script, option, device, wanted):
        collector = settings_of(script, *PENDULUM, f"collector.cudagraph_policy={option}").collector
        assert collector.captures_on(torch.device(device)) is wanted

    def test_a_step_on_the_host_cannot_be_captured(self, script, tmp_path):
        with (
            contextlib.redirect_stdout(io.StringIO()),
            pytest.raises(
                ValueError, match="collector.cudagraph_policy must be null or false where workers act on cpu"
            ),
        ):
            make_run(script, tmp_path, "collector.cudagraph_policy=true")

    @pytest.mark.parametrize(("train_ratio", "ahead"), [(24, 1), (6, 1), (1.5, 4)])
    def test_workers_may_be_ahead_by_one_update_or_one_step(self, script, tmp_path, monkeypatch, train_ratio, ahead):
        monkeypatch.setattr(script.main.Run, "_make_collector", lambda run: IDLE)
        with contextlib.redirect_stdout(io.StringIO()):
            run = make_run(script, tmp_path, f"learner.train_ratio={train_ratio}")
        credits = []
        run.feed = SimpleNamespace(
            drain=lambda: 0, credit=credits.append, publish=lambda updates: None, close=lambda: None
        )
        run.counters.frames = 10  # fewer than the warm-up
        run.step()
        run.close()
        assert credits == [10 + 2 * ahead]

    def test_the_stochastic_state_is_one_of_each_categorical(self, rows):
        assert torch.equal(rows.state.unflatten(-1, (3, 4)).sum(-1), torch.ones(*rows.state.shape[:2], 3))

    def test_continuous_actions_are_clipped_and_scaled_and_rows_keep_what_the_actor_gave(self, script):
        settings = settings_of(script, *PENDULUM)
        env = make_env(script, settings.env, num_envs=2)
        seen = []
        env.base_env._step, step = lambda td: (seen.append(td["action"].clone()), step(td))[1], env.base_env._step
        root = env.reset().set("action", torch.tensor([[3.0], [-0.25]]))
        row, _ = env.step_and_maybe_reset(root)
        env.close()
        assert seen[0].tolist() == [[2.0], [-0.5]] and row["action"].tolist() == [[3.0], [-0.25]]

    @pytest.mark.parametrize(("backend", "wanted"), [("envpool", [1, 0]), ("gym", [[0, 1], [1, 0]])])
    def test_discrete_actions_arrive_as_the_environment_takes_them(self, script, backend, wanted):
        pytest.importorskip("gymnasium")
        settings = settings_of(script, *PENDULUM, "env.task=CartPole-v1", f"env.backend={backend}")
        env = make_env(script, settings.env, num_envs=2)
        seen = []
        env.base_env._step, step = lambda td: (seen.append(td["action"].clone()), step(td))[1], env.base_env._step
        row, _ = env.step_and_maybe_reset(env.reset().set("action", torch.tensor([[0.0, 1.0], [1.0, 0.0]])))
        spaces = script.envs.spaces_of(env, settings.env)
        env.close()
        assert seen[0].tolist() == wanted and row["action"].tolist() == [[0.0, 1.0], [1.0, 0.0]]
        assert spaces.discrete and spaces.action == 2 and spaces.observation == (4,)


class TestResume:
    """Contract: a run goes on from a checkpoint: counters, replay with its positions, streams cut."""

    def test_resume_continues_counters_and_cuts_streams(self, script, finished, tmp_path):
        saved = last(finished.folder)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            run = make_run(
                script, tmp_path, "learner.train_ratio=9", f"resume_from={finished.folder}", "total_frames=120"
            )
            try:
                assert run.counters.frames == 80 and run.governor.updates == int(33 * 1.5)
                assert f"{run.governor.updates} updates, 80 rows in the replay" in out.getvalue()
                for key, value in run.learner.loss.state_dict().items():
                    if isinstance(value, torch.Tensor):
                        assert torch.equal(value, saved["learner"]["loss"][key]), key
                old = {name: run.replay.storage[name][39].clone() for name in ("observation", "belief")}
                with script.StopSignal() as stop:
                    run.train(stop)
                assert run.counters.frames == 120 and run.governor.updates == int(53 * 1.5)
                assert len(run.replay) == 120, "the rows before are still there"
                assert torch.equal(run.replay.storage["observation"][39], old["observation"])
                assert run.replay.storage["is_init"][40].all(), "new episodes begin after the cut"
                slots = torch.cat([run.replay.sample()["index"][..., 0] for _ in range(100)])
                before, after = (slots < 40).any(1), (slots >= 40).any(1)
                assert before.any() and after.any() and not (before & after).any(), "a window crosses the cut"
            finally:
                run.close()

    def test_two_signals_leave_a_checkpoint_without_replay_whose_resume_warms_up_again(
        self, script, tmp_path, monkeypatch
    ):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            first = make_run(script, tmp_path / "first", "total_frames=8000")
            plain = first.step

            def step():
                plain()
                if first.governor.updates == 9:
                    signal.raise_signal(signal.SIGINT)
                    signal.raise_signal(signal.SIGINT)

            first.step = step
            assert script.main.run(first) == 130
            assert "stopped by a signal" in out.getvalue() and last(tmp_path / "first")["replay"] is None
            assert first.write_backs.submitted * 12 == sum(first.write_backs.rows.values()) == 9 * 12
            # Loading needs no worker, which takes seconds to start.
            monkeypatch.setattr(script.main.Run, "_make_collector", lambda run: IDLE)
            second = make_run(script, tmp_path / "second", f"resume_from={tmp_path / 'first'}", "total_frames=8000")
            try:
                frames = second.counters.frames
                assert frames == first.counters.frames and second.governor.updates == 9 and not len(second.replay)
                assert second.governor.expected(frames + 14) == 9 and second.governor.expected(frames + 16) == 10
                # 7 vector steps of the second warm-up are left out, as those of the first are.
                second.counters.frames += 14 + 32
                second.governor.count(8)
                assert second.train_ratio == pytest.approx(8 * 12 / 32)
            finally:
                second.close()

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("networks.hidden=16", "networks must have the sizes that were saved"),
            ("env.task=PendulumSwingup-v1", "env.task must be 'Pendulum-v1' as saved"),
            ("env.num_envs=4", "env.num_envs must be 2 as saved"),
        ],
    )
    def test_a_checkpoint_of_another_configuration_is_refused(self, script, finished, tmp_path, override, message):
        more = ["collector.learning_starts=24", f"resume_from={finished.folder}"]
        with contextlib.redirect_stdout(io.StringIO()), pytest.raises(ValueError, match=message):
            make_run(script, tmp_path, *more, override)

    def test_options_are_those_of_the_command_line_and_not_those_that_were_saved(self, parts):
        saved = parts(*PENDULUM, "learner.lr=1e-3", "learner.gamma=0.9", "learner.warmup_steps=7")
        saved.collect(8)
        saved.learner.update(saved.replay.sample())
        options = ["learner.lr=5e-4", "learner.gamma=0.8", "learner.lmbda=0.5", "learner.warmup_steps=3"]
        learner = parts(*PENDULUM, *options).learner
        learner.load_state_dict(copy.deepcopy(saved.learner.state_dict()))
        group = learner.optimizer.param_groups[0]
        assert (group["lr"], group["warmup_steps"]) == (5e-4, 3) and group["step"] == 1
        estimator = learner.stepper.loss_module.actor_loss._value_estimator
        assert (float(estimator.gamma), float(estimator.lmbda)) == pytest.approx((0.8, 0.5))

    @pytest.mark.parametrize("part", ["stepper", "optimizer", "target_updater"])
    def test_a_learner_without_a_part_of_its_state_is_left_as_it_is(self, parts, part):
        learner, other = parts(*PENDULUM).learner, parts(*PENDULUM).learner
        state = copy.deepcopy(other.state_dict())
        for value in state["loss"].values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.add_(1.0)
        if part == "stepper":
            del state["stepper"]
        else:
            del state["stepper"][part]
        before = [value.detach().clone() for value in learner.loss.parameters()]
        with pytest.raises((ValueError, KeyError), match=part):
            learner.load_state_dict(state)
        after = list(learner.loss.parameters())
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))

    def test_a_checkpoint_whose_replay_is_foreign_changes_nothing(self, script, parts, finished):
        part = parts(*PENDULUM, "replay.capacity=100")
        governor = script.run.make_governor(part.settings)
        state = script.run.DreamerState(
            task="Pendulum-v1", num_envs=2, learner=part.learner, governor=governor, replay=part.replay
        )
        before = [value.detach().clone() for value in part.learner.loss.parameters()]
        with pytest.raises(ValueError, match="capacity"):
            state.load(finished.folder)
        after = list(part.learner.loss.parameters())
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        assert state.counters.frames == governor.updates == len(part.replay) == 0


class TestCompilation:
    """Contract: the update is compiled whole, its recurrence alone, or not at all; the names of parameters stay."""

    @pytest.mark.parametrize("option", [None, "learner.compile=true", "learner.compile_scan=true"])
    def test_what_is_compiled_is_what_was_asked_for(self, parts, option):
        learner = parts(*PENDULUM, *([option] if option else [])).learner
        (rollout,) = [module for module in learner.networks.world_model.modules() if hasattr(module, "_scan_fn")]
        assert learner.stepper.resolve(learner.device)[0] is (option == "learner.compile=true")
        assert (rollout._scan_fn is not None) is (option == "learner.compile_scan=true")
        assert not [name for name in learner.loss.state_dict() if "_orig_mod" in name]

    def test_whole_and_alone_exclude_each_other(self, script):
        with pytest.raises(ValueError, match="learner.compile must be null or false with compile_scan, got True"):
            settings_of(script, *PENDULUM, "learner.compile=true", "learner.compile_scan=true")


class TestPresets:
    """Contract: every preset builds, collects and learns."""

    @pytest.mark.parametrize(
        ("preset", "parameters", "action"),
        [("dmc_walker", 640_867, 6), ("dmc_cartpole", None, 1), ("atari", None, 6)],
    )
    def test_one_update_of_a_small_batch(self, parts, preset, parameters, action):
        part = parts(f"preset={preset}", *TINY, "env.num_envs=1", "learner.batch_size=2")
        assert parameters in (None, part.learner.num_parameters)
        assert part.spaces.action == action and part.spaces.discrete is part.spaces.pixels is (preset == "atari")
        run = part.collect(7)
        if part.spaces.discrete:
            assert torch.equal(run["action"].sum(-1), torch.ones(7, 1)) and run["observation"].dtype == torch.uint8
        before = [parameter.detach().clone() for parameter in part.learner.loss.parameters()]
        part.learner.optimizer.param_groups[0]["warmup_steps"] = 0
        sample = part.replay.sample()
        metrics, state, belief = part.learner.update(sample)
        part.write_backs.submit(sample, state, belief)
        part.write_backs.settle()
        assert all(bool(torch.isfinite(value).all()) for value in metrics.values())
        changed = [not torch.equal(old, new) for old, new in zip(before, part.learner.loss.parameters(), strict=True)]
        assert sum(changed) > len(changed) / 2 and part.write_backs.rows["stale"] == 0

    def test_pixels_of_64_streams_are_one_batch_of_one_worker(self, script, tmp_path):
        sizes = ["networks.image_depth=2", "networks.image_blocks=4", "learner.train_ratio=1.5", "total_frames=512"]
        options = [*TINY, *NETWORKS, "env.num_envs=64", "replay.capacity=16", "collector.learning_starts=384", *sizes]
        overrides = ["preset=atari", *options, "eval.episodes=1", "eval.max_steps=3", "eval.every=null"]
        settings = settings_of(script, *overrides)
        assert settings.collector.num_workers == 1 and settings.collector.policy_device == "learner"
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert script.main.run(script.main.Run(settings, tmp_path, title="test", overrides=overrides)) == 0
        assert "updates: 24 measured, 24 expected" in out.getvalue()


class TestErrors:
    """Contract: what is wrong with a configuration is said in one sentence, before anything is started."""

    def test_a_replay_on_a_device_that_is_not_there_is_named(self, parts):
        with pytest.raises(ValueError, match="replay.device must be auto or a device of this machine, got 'cuda:99'"):
            parts(*PENDULUM, "replay.device=cuda:99")

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("total_frames=81", "total_frames must be a positive multiple of env.num_envs = 2, got 81"),
            ("collector.learning_starts=11", r"between env.num_envs \* \(learner.seq_len \+ 2\) = 12 and"),
            ("learner.train_ratio=0", "learner.train_ratio must be positive, got 0.0"),
            ("networks.belief=12", "networks.belief must be a multiple of networks.blocks = 8, got 12"),
            ("replay.capacity=5", r"replay.capacity must be more than learner.seq_len \+ 1 = 5, got 5"),
            ("replay.visibility=late", "replay.visibility must be one of"),
            ("torch_threads=0", "torch_threads must be >= 1 or null, got 0"),
            ("total_frames=inf", "total_frames must be of type int, got inf"),
            ("replay.prefetch=-1", "replay.prefetch must be null or >= 0, got -1"),
            ("collector.num_workers=3", "collector.num_workers must be at most env.num_envs = 2, got 3"),
            ("+learner.nope=1", "the keys of learner must be among"),
        ],
    )
    def test_settings_refuse(self, script, override, message):
        with pytest.raises(ValueError, match=message) as caught:
            settings_of(script, *PENDULUM, override)
        assert "\n" not in str(caught.value) and str(caught.value).endswith("nothing was started.")

    def test_the_command_line_says_one_sentence(self, tmp_path):
        command = [sys.executable, str(SCRIPT), *PENDULUM, "networks.decoder_sizes=[4]", f"hydra.run.dir={tmp_path}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=200, check=False)
        assert done.returncode == 2
        errors = [line for line in done.stderr.decode().splitlines() if line.startswith("dreamer_v3: ")]
        assert len(errors) == 1 and "networks.decoder_sizes must add up to the 3 features" in errors[0]
        assert b"Traceback" not in done.stderr
