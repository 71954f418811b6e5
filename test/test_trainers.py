# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Learner, governor and checkpoints."""

import contextlib
import copy
import random
import warnings

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded

from torchrl_ext.modules import EmpiricalNormalization, make_fast_sac_actor, make_fast_sac_critic
from torchrl_ext.objectives import FastSACLoss
from torchrl_ext.trainers import (
    FastSACLearner,
    UpdateGovernor,
    load_checkpoint,
    random_state,
    restore_random_state,
    save_checkpoint,
)

LOSS = ("gamma", "target_entropy", "fixed_alpha", "alpha_init")


def make_learner(*, hidden=16, normalize=True, seed=0, v_min=-20.0, v_max=20.0, **options):
    torch.manual_seed(seed)
    normalizer = EmpiricalNormalization(["observation"], [3]) if normalize else None
    keys = normalizer.out_keys if normalize else ["observation"]
    actor = make_fast_sac_actor(
        Bounded(-1.0, 1.0, shape=(2,)), observation_dim=3, in_keys=keys, hidden_size=hidden, init_std=0.5
    )
    critic = make_fast_sac_critic(
        observation_dim=3, action_dim=2, in_keys=keys, hidden_size=hidden, num_atoms=11, v_min=v_min, v_max=v_max
    )
    loss = FastSACLoss(actor, critic, **{name: options.pop(name) for name in LOSS if name in options})
    rates = {"critic_lr": 1e-3, "actor_lr": 1e-3, "alpha_lr": 1e-3}
    return FastSACLearner(loss, normalizer, **(rates | options))


def make_batch(size=32):
    return TensorDict(
        {
            "observation": torch.randn(size, 3),
            "action": torch.rand(size, 2) * 2 - 1,
            "next": {
                "observation": torch.randn(size, 3),
                "reward": torch.randn(size, 1),
                "terminated": torch.rand(size, 1) < 0.1,
            },
        },
        [size],
    )


def parameters(learner):
    return {key: value.clone() for key, value in learner.loss.state_dict().items() if isinstance(value, torch.Tensor)}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


class TestUpdateGovernor:
    """Contract: nothing below the gate (case 45), then exactly ratio x vector steps, whatever the sizes of runs."""

    def test_gate(self):
        governor = UpdateGovernor(4, rows_per_step=64, learning_starts=1000)
        assert [governor.due(64 * step) for step in range(16)] == [0] * 16
        assert governor.due(1024) == 4

    @pytest.mark.parametrize("ratio", [0.3, 0.5, 1, 2.5, 8])
    @pytest.mark.parametrize("steps_per_run", [1, 3, 7])
    def test_total_is_exact(self, ratio, steps_per_run):
        governor = UpdateGovernor(ratio, rows_per_step=10, learning_starts=50)
        rows = 0
        for _ in range(500):
            rows += 10 * steps_per_run
            governor.count(governor.due(rows))
            assert governor.due(rows) == 0
        counted = 500 * steps_per_run - 4
        assert governor.updates == int(round(ratio * 10) * counted // 10) == governor.expected(rows)

    def test_case_57(self):
        """1.1e6 steps at 1024 replayed per collected, 16 x 64 in a batch: 1.1e6 updates."""
        assert UpdateGovernor(1024 / (16 * 64), rows_per_step=1).expected(1_100_000) == 1_100_000

    def test_no_gate(self):
        assert UpdateGovernor(2, rows_per_step=5).due(5) == 2

    def test_rearm(self):
        governor = UpdateGovernor(2, rows_per_step=5, learning_starts=20)
        governor.count(governor.due(100))
        done = governor.updates
        governor.rearm(100)
        assert not governor.is_open(115) and governor.due(115) == 0
        assert governor.due(120) == 2 and governor.expected(120) == done + 2

    def test_state(self):
        governor = UpdateGovernor(2, rows_per_step=5, learning_starts=20)
        governor.count(governor.due(100))
        other = UpdateGovernor(2, rows_per_step=5, learning_starts=20)
        other.load_state_dict(governor.state_dict())
        assert other.due(200) == governor.due(200) == 40
        with pytest.raises(ValueError, match="must have the counters"):
            other.load_state_dict({"updates": -1})
        assert other.due(200) == 40

    @pytest.mark.parametrize(("ratio", "owed"), [(0.5, 0), (7, 0), (7, 3), (2, 0)])
    def test_another_ratio_counts_from_where_it_was_settled(self, ratio, owed):
        governor = UpdateGovernor(2, rows_per_step=5, learning_starts=20)
        governor.count(governor.due(100) - owed)
        other = UpdateGovernor(ratio, rows_per_step=5, learning_starts=20)
        other.load_state_dict(governor.state_dict())
        other.settle(100, owed)
        assert other.due(100) == owed
        third = UpdateGovernor(ratio, rows_per_step=5, learning_starts=20)
        third.load_state_dict(other.state_dict())
        assert third.due(150) == other.due(150) == owed + 10 * ratio

    def test_what_was_settled_with_the_same_ratio_is_what_it_was(self):
        governor = UpdateGovernor(0.3, rows_per_step=5, learning_starts=20)
        governor.count(governor.due(100) - 2)
        before = governor.state_dict()
        governor.settle(100, governor.due(100))
        assert governor.state_dict() == before

    @pytest.mark.parametrize("ratio, rows", [(0, 1), (-1, 1), (float("nan"), 1), (float("inf"), 1), (1, 0)])
    def test_bad_arguments(self, ratio, rows):
        with pytest.raises(ValueError, match="UpdateGovernor: "):
            UpdateGovernor(ratio, rows_per_step=rows)


class TestFastSACLearner:
    """Contract: a step moves what it should and nothing else; the same state and draws give the same step."""

    def test_what_a_step_moves(self):
        learner = make_learner(policy_frequency=2, tau=0.5)
        learner.observe(make_batch())
        before = parameters(learner)
        metrics = learner.update(make_batch())
        after = parameters(learner)
        moved = {key for key in before if not torch.equal(before[key], after[key])}
        assert not any(key.startswith("actor") for key in moved) and "log_alpha" in moved
        assert any(key.startswith("qvalue") for key in moved) and any(key.startswith("target_q") for key in moved)
        assert "loss_actor" not in metrics and learner.updates == 1
        metrics = learner.update(make_batch())
        assert any(not torch.equal(after[key], value) for key, value in parameters(learner).items() if "actor" in key)
        assert "loss_actor" in metrics and not any(value.requires_grad for value in metrics.values())

    def test_target_update(self):
        learner = make_learner(tau=0.25)
        before = [target.clone() for target in learner.loss.target_parameters()]
        learner.update(make_batch())
        for old, new, source in zip(
            before, learner.loss.target_parameters(), learner.loss.critic_parameters(), strict=True
        ):
            torch.testing.assert_close(new, old + 0.25 * (source.detach() - old))

    def test_temperature_has_no_weight_decay(self):
        for group in make_learner().critic_optimizer.param_groups:
            is_alpha = any(parameter.dim() == 0 for parameter in group["params"])
            assert group["weight_decay"] == (0.0 if is_alpha else 1e-3)

    def test_statistics_count_collected_rows_once(self):
        learner = make_learner()
        learner.observe(make_batch(20))
        for _ in range(3):
            learner.update(make_batch())
        assert int(learner.normalizer.count) == 20

    def test_critic_gradients_reach_no_actor(self):
        learner = make_learner(policy_frequency=100)
        learner.update(make_batch())
        assert all(parameter.grad is None for parameter in learner.loss.actor_parameters())

    def test_autocast(self):
        learner = make_learner(autocast=torch.bfloat16, policy_frequency=1)
        metrics = learner.update(make_batch())
        assert all(value.isfinite().all() for value in metrics.values())
        assert all(parameter.dtype == torch.float32 for parameter in learner.loss.parameters())

    def test_max_grad_norm(self):
        learner = make_learner(max_grad_norm=1e-3)
        learner.update(make_batch())
        grads = torch.stack([parameter.grad.norm() for parameter in learner.loss.critic_parameters()])
        assert grads.norm() <= 1e-3 * 1.01

    def test_policy_follows_updates(self):
        learner = make_learner(policy_frequency=1)
        observation = TensorDict({"observation": torch.randn(4, 3)}, [4])
        torch.manual_seed(0)
        before = learner.policy(observation.clone())["action"]
        learner.update(make_batch())
        torch.manual_seed(0)
        assert not torch.equal(before, learner.policy(observation.clone())["action"])

    def test_resumes_exactly(self):
        learner = make_learner()
        learner.observe(make_batch())
        for _ in range(5):
            learner.update(make_batch())
        other = make_learner(seed=1)
        other.load_state_dict(copy.deepcopy(learner.state_dict()))
        assert other.updates == 5
        for which in (learner, other):
            torch.manual_seed(7)
            for _ in range(5):
                which.update(make_batch())
        assert_equal(parameters(learner), parameters(other))

    def test_learning_rate_is_the_constructors(self):
        other = make_learner(critic_lr=5e-4)
        learner = make_learner()
        learner.update(make_batch())
        other.load_state_dict(learner.state_dict())
        assert other.critic_optimizer.param_groups[0]["lr"] == 5e-4

    def test_options_are_the_constructors_also_where_the_loss_keeps_them(self):
        learner, other = make_learner(gamma=0.9, target_entropy=-1.0), make_learner(gamma=0.5, target_entropy=-3.0)
        learner.update(make_batch())
        other.load_state_dict(learner.state_dict())
        assert float(other.loss.gamma) == 0.5 and float(other.loss.target_entropy) == -3.0
        assert torch.equal(other.loss.log_alpha, learner.loss.log_alpha), "a temperature that is learnt is no option"

    def test_a_fixed_temperature_is_the_constructors(self):
        learner, other = (make_learner(fixed_alpha=True, alpha_init=value) for value in (0.1, 0.2))
        other.load_state_dict(learner.state_dict())
        assert float(other.loss.alpha) == pytest.approx(0.2)

    def test_critics_of_other_atoms_are_refused_since_their_logits_mean_other_returns(self):
        learner, other = make_learner(v_min=-5.0, v_max=5.0), make_learner(v_min=-5.0, v_max=50.0)
        other.update(make_batch())
        before = parameters(learner)
        with pytest.raises(ValueError, match=r"atoms.*from -5 to 50.*from -5 to 5.*Nothing was changed"):
            learner.load_state_dict(other.state_dict())
        assert_equal(before, parameters(learner))

    @pytest.mark.parametrize("part", ["loss", "normalizer", "critic_optimizer"])
    def test_a_part_that_is_no_state_is_refused_in_one_sentence(self, part):
        learner = make_learner()
        with pytest.raises(ValueError, match=f"FastSACLearner: {part}.*Nothing was changed"):
            learner.load_state_dict(learner.state_dict() | {part: 5})

    @pytest.mark.parametrize(
        "foreign",
        [
            {"hidden": 32},
            {"normalize": False},
        ],
    )
    def test_foreign_state_changes_nothing(self, foreign):
        learner, other = make_learner(), make_learner(**foreign)
        other.update(make_batch())
        before = parameters(learner)
        with pytest.raises(ValueError, match="Nothing was changed"):
            learner.load_state_dict(other.state_dict())
        assert_equal(before, parameters(learner))
        assert learner.updates == 0

    def test_foreign_optimizer_changes_nothing(self):
        learner, other = make_learner(), make_learner()
        other.update(make_batch())
        state = copy.deepcopy(other.state_dict())
        state["critic_optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)
        before = parameters(learner)
        with pytest.raises(ValueError, match="critic_optimizer.*exp_avg"):
            learner.load_state_dict(state)
        assert_equal(before, parameters(learner))

    @pytest.mark.parametrize("options", [{"tau": 0.0}, {"policy_frequency": 0}, {"max_grad_norm": 0.0}])
    def test_bad_options(self, options):
        with pytest.raises(ValueError, match="FastSACLearner"):
            make_learner(**options)


class TestCheckpoint:
    """Contract: the old file or the whole new one; a damaged or foreign file is told apart; no code is run."""

    KIND = "test/1"

    def test_round_trip(self, tmp_path):
        state = {"tensor": torch.arange(3), "nested": {"list": [1, 2.5, "x", None]}}
        path = save_checkpoint(tmp_path / "folder" / "a.pt", state, kind=self.KIND)
        loaded = load_checkpoint(path, kind=self.KIND)
        assert torch.equal(loaded["tensor"], state["tensor"]) and loaded["nested"] == state["nested"]
        assert [file.name for file in path.parent.iterdir()] == ["a.pt"]

    def test_interrupted_save_keeps_the_old_file(self, tmp_path, monkeypatch):
        path = save_checkpoint(tmp_path / "a.pt", {"number": 1}, kind=self.KIND)

        def half(state, file):
            file.write(b"half")
            raise OSError("disk full")

        monkeypatch.setattr(torch, "save", half)
        with pytest.raises(OSError, match="disk full"):
            save_checkpoint(path, {"number": 2}, kind=self.KIND)
        assert load_checkpoint(path, kind=self.KIND)["number"] == 1
        assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]

    def test_a_disk_that_is_full_is_told_as_such(self, tmp_path):
        resource = pytest.importorskip("resource")
        path = save_checkpoint(tmp_path / "a.pt", {"number": 1}, kind=self.KIND)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            with pytest.raises(OSError, match=f"File too large: '{path}'"):
                save_checkpoint(path, {"tensor": torch.zeros(1 << 20)}, kind=self.KIND)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert load_checkpoint(path, kind=self.KIND)["number"] == 1
        assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]

    @pytest.mark.parametrize("stop", [InterruptedError, KeyboardInterrupt])
    def test_a_file_is_not_written_to_its_end_when_it_is_asked_to_stop(self, tmp_path, stop):
        path = save_checkpoint(tmp_path / "a.pt", {"number": 1}, kind=self.KIND)
        asked = []

        def should_stop():
            asked.append(1)
            if len(asked) == 20 and stop is KeyboardInterrupt:
                raise KeyboardInterrupt
            return len(asked) >= 20

        state = {str(number): torch.zeros(8) for number in range(1000)}
        with pytest.raises(stop):
            save_checkpoint(path, state, kind=self.KIND, should_stop=should_stop)
        assert len(asked) == 20
        assert load_checkpoint(path, kind=self.KIND)["number"] == 1
        assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]

    @pytest.mark.parametrize("damage", ["empty", "noise", "short", "flipped"])
    def test_damaged(self, tmp_path, damage):
        path = save_checkpoint(tmp_path / "a.pt", {"tensor": torch.randn(1000)}, kind=self.KIND)
        data = bytearray(path.read_bytes())
        if damage == "flipped":
            data[-20] ^= 0xFF
            data[-2:] = b""
        changed = {"empty": b"", "noise": random.randbytes(500), "short": data[: len(data) // 2], "flipped": data}
        path.write_bytes(changed[damage])
        with pytest.raises(ValueError, match="undamaged test/1 checkpoint.*Nothing was changed"):
            load_checkpoint(path, kind=self.KIND)

    def test_whatever_bytes_are_changed_the_error_is_the_one_that_is_documented(self, tmp_path):
        path = save_checkpoint(tmp_path / "a.pt", {"tensor": torch.ones(3), "nested": {"x": [1, "y"]}}, kind=self.KIND)
        whole, generator = path.read_bytes(), random.Random(0)
        begin = whole.index(b"data.pkl")
        for _ in range(1500):
            data = bytearray(whole)
            data[generator.randrange(begin, begin + 600)] = generator.randrange(256)
            path.write_bytes(data)
            with contextlib.suppress(ValueError), warnings.catch_warnings(action="ignore"):
                load_checkpoint(path, kind=self.KIND)

    def test_an_entry_of_the_name_of_the_kind_does_not_replace_it(self, tmp_path):
        path = save_checkpoint(tmp_path / "a.pt", {"kind": "of a state", "number": 1}, kind=self.KIND)
        assert load_checkpoint(path, kind=self.KIND)["number"] == 1

    def test_foreign(self, tmp_path):
        torch.save({"model": torch.zeros(1)}, tmp_path / "a.pt")
        with pytest.raises(ValueError, match="must be a test/1 checkpoint, got None"):
            load_checkpoint(tmp_path / "a.pt", kind=self.KIND)
        torch.save([1], tmp_path / "b.pt")
        with pytest.raises(ValueError, match="got a list"):
            load_checkpoint(tmp_path / "b.pt", kind=self.KIND)
        with pytest.raises(FileNotFoundError, match="no such file"):
            load_checkpoint(tmp_path / "c.pt", kind=self.KIND)

    def test_code_is_not_run(self, tmp_path):
        class Evil:
            def __reduce__(self):
                return (open, (str(tmp_path / "evil"), "w"))

        torch.save({"kind": self.KIND, "evil": Evil()}, tmp_path / "a.pt")
        with pytest.raises(ValueError, match="cannot be read"):
            load_checkpoint(tmp_path / "a.pt", kind=self.KIND)
        assert not (tmp_path / "evil").exists()

    def test_random_state(self, tmp_path):
        def draw():
            return random.random(), float(np.random.rand()), float(torch.rand(()))

        draw()
        path = save_checkpoint(tmp_path / "a.pt", {"random": random_state()}, kind=self.KIND)
        expected = draw()
        draw()
        restore_random_state(load_checkpoint(path, kind=self.KIND)["random"])
        assert draw() == expected
        before = torch.get_rng_state()
        with pytest.raises(ValueError, match="damaged"):
            restore_random_state({"python": [1]})
        assert torch.equal(before, torch.get_rng_state())


@pytest.mark.gpu
def test_a_damaged_state_of_a_device_changes_no_generator():
    state, here = random_state(), torch.get_rng_state()
    torch.rand(3)
    moved = torch.get_rng_state()
    with pytest.raises(ValueError, match="restore_random_state: the state is damaged.*Nothing was changed"):
        restore_random_state(state | {"cuda": [torch.zeros(3, dtype=torch.uint8)]})
    assert torch.equal(torch.get_rng_state(), moved) and not torch.equal(here, moved)


@pytest.mark.gpu
class TestCudaGraph:
    """Contract: a captured step gives the numbers of the eager one, leaves no trace of its capture, and resumes."""

    def learners(self, **options):
        made = []
        for cuda_graph in (False, True):
            learner = make_learner(seed=0)
            loss = learner.loss.cuda()
            normalizer = learner.normalizer.cuda()
            rates = {"critic_lr": 1e-3, "actor_lr": 1e-3, "alpha_lr": 1e-3, "policy_frequency": 2}
            made.append(FastSACLearner(loss, normalizer, **rates, cuda_graph=cuda_graph, **options))
        return made

    def test_same_numbers(self):
        eager, captured = self.learners()
        batches = [make_batch().cuda() for _ in range(6)]
        for step, batch in enumerate(batches):
            # Draws differ between eager and captured steps: the policy is made deterministic instead.
            for learner in (eager, captured):
                for parameter in learner.loss.actor_parameters()[-1:]:
                    parameter.data[2:] = -30.0  # the smallest standard deviation
            ours = eager.update(batch.clone())
            theirs = captured.update(batch.clone())
            torch.testing.assert_close(theirs["loss_critic"], ours["loss_critic"], rtol=2e-2, atol=1e-3)
            assert captured.updates == step + 1
        for key, value in parameters(eager).items():
            torch.testing.assert_close(parameters(captured)[key], value, rtol=2e-2, atol=1e-2)

    def test_capture_leaves_no_trace(self):
        _, captured = self.learners()
        captured.update(make_batch().cuda())
        steps = {int(moments["step"]) for moments in captured.critic_optimizer.state.values()}
        assert steps == {1}
        captured.update(make_batch().cuda())
        assert {int(moments["step"]) for moments in captured.actor_optimizer.state.values()} == {1}

    def test_resumes(self):
        _, captured = self.learners()
        for _ in range(4):
            captured.update(make_batch().cuda())
        state = copy.deepcopy(captured.state_dict())
        _, other = self.learners()
        other.update(make_batch().cuda())
        other.load_state_dict(state)
        other.update(make_batch().cuda())
        assert other.updates == 5
        assert {int(moments["step"]) for moments in other.critic_optimizer.state.values()} == {5}

    def test_metrics_are_owned(self):
        _, captured = self.learners()
        first = captured.update(make_batch().cuda())
        kept = {name: value.clone() for name, value in first.items()}
        for _ in range(4):
            captured.update(make_batch().cuda())
        for name, value in first.items():
            assert torch.equal(value, kept[name]), name
