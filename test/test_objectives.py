# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""FastSACLoss and the C51 projection, each against a slow reference."""

from __future__ import annotations

import copy
import math
import pickle
import re

import pytest
import torch
from _host_sync import NoHostSync
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch.nn import functional as F
from torchrl.data import Bounded, OneHot
from torchrl.objectives import SACLoss, SoftUpdate

from torchrl_ext.data import PrioritizedTransitionSampler
from torchrl_ext.modules import make_fast_sac_actor, make_fast_sac_critic
from torchrl_ext.objectives import FastSACLoss
from torchrl_ext.objectives._c51 import project_categorical
from torchrl_ext.objectives._tensor_losses import TensorLosses, networks_of, why_not_tensors

B, OBSERVATION, PRIVILEGED, ACTION = 6, 3, 4, 2


def make_batch(*batch_size: int) -> TensorDict:
    size = batch_size or (B,)

    def observe() -> dict[str, torch.Tensor]:
        return {"observation": torch.randn(*size, OBSERVATION), "privileged": torch.randn(*size, PRIVILEGED)}

    nxt = {
        **observe(),
        "reward": torch.randn(*size, 1),
        "terminated": torch.rand(*size, 1) < 0.3,
        "truncated": torch.rand(*size, 1) < 0.3,
    }
    nxt["done"] = nxt["terminated"] | nxt["truncated"]
    batch = {**observe(), "action": torch.rand(*size, ACTION) * 2 - 1, "next": TensorDict(nxt, batch_size=size)}
    return TensorDict(batch, batch_size=size)


def make_loss(*, spec=None, num_critics=2, action_key="action", **options) -> FastSACLoss:
    torch.manual_seed(7)
    spec = Bounded(-1.0, 1.0, shape=(ACTION,)) if spec is None else spec
    actor = make_fast_sac_actor(spec, observation_dim=OBSERVATION, hidden_size=16, action_key=action_key, init_std=0.5)
    critic = make_fast_sac_critic(
        observation_dim=PRIVILEGED,
        action_dim=ACTION,
        in_keys=["privileged"],
        action_key=action_key,
        hidden_size=16,
        num_atoms=21,
        v_min=-5.0,
        v_max=5.0,
        num_critics=num_critics,
    )
    loss = FastSACLoss(actor, critic, **options)
    for parameter in (*loss.actor_parameters(), *loss.critic_parameters()):
        torch.nn.init.normal_(parameter, std=0.5)
    if options.get("delay_qvalue", True):
        for target in loss.target_parameters():
            torch.nn.init.normal_(target, std=0.5)
    torch.manual_seed(0)
    return loss


def project_slowly(probs, shift, scale, support):
    """One row in Python floats: atom by atom, hat function by hat function."""
    width = support[1] - support[0]
    out = [0.0] * len(support)
    for p, z in zip(probs, support, strict=True):
        moved = min(max(shift + scale * z, support[0]), support[-1])
        for i, atom in enumerate(support):
            out[i] += p * max(0.0, 1.0 - abs(moved - atom) / width)
    return out


def expected_target(loss, batch, reduction, *, discount):
    """The target of each critic, row by row in Python floats, for the draw of seed 0."""
    nxt = batch["next"]
    with torch.no_grad():
        dist = loss.actor_network.get_dist(nxt.select("observation"))
        torch.manual_seed(0)
        action, log_prob = dist.rsample_and_log_prob()
        net = copy.deepcopy(loss.qvalue_network.module)
        for parameter, target in zip(net.parameters(), loss.target_parameters(), strict=True):
            parameter.copy_(target)
        probs = net(nxt["privileged"], action).softmax(-1).double()
    support = loss.support.double().tolist()
    alpha = loss.alpha.item()
    out = []
    for row in range(B):
        candidates = probs[row].tolist()
        if reduction == "mean":
            candidates = [[sum(c[i] for c in candidates) / len(candidates) for i in range(len(support))]]
        elif reduction == "min":
            candidates = [min(candidates, key=lambda c: sum(p * z for p, z in zip(c, support, strict=True)))]
        alive = 0.0 if nxt["terminated"][row].item() else 1.0
        scale = discount[row] * alive
        shift = nxt["reward"][row].item() - scale * alpha * log_prob[row].item()
        out.append([project_slowly(c, shift, scale, support) for c in candidates])
    return torch.tensor(out, dtype=torch.float64).movedim(1, 0)  # [Q or 1, B, atoms]


class TestProjection:
    """Contract: the hat-function projection; mass is kept, so is the expectation inside the support."""

    @given(
        seed=st.integers(0, 2**16),
        atoms=st.integers(2, 60),
        low=st.floats(-50, 20),
        width=st.floats(0.5, 100),
        scale=st.floats(0, 1.5),
        shift=st.floats(-200, 200),
    )
    def test_it_is_the_slow_reference(self, seed, atoms, low, width, scale, shift):
        probs = torch.rand(atoms, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).softmax(0)
        support = torch.linspace(low, low + width, atoms, dtype=torch.float64)
        got = project_categorical(
            probs,
            torch.tensor(shift, dtype=torch.float64),
            torch.tensor(scale, dtype=torch.float64),
            support,
            v_min=low,
            v_max=low + width,
        )
        expected = project_slowly(probs.tolist(), shift, scale, support.tolist())
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=1e-9)

    @staticmethod
    def project(probs, shift, scale, low=-5.0, high=5.0):
        support = torch.linspace(low, high, probs.shape[-1])
        return project_categorical(probs, shift, scale, support, v_min=low, v_max=high), support

    def test_mass_is_conserved_in_float32(self):
        probs = torch.randn(2, 500, 101).softmax(-1)
        got, _ = self.project(probs, 20 * torch.randn(500), torch.rand(500))
        torch.testing.assert_close(got.sum(-1), torch.ones(2, 500), rtol=0, atol=2e-6)
        assert (got >= 0).all()

    def test_the_expectation_is_conserved_inside_the_support(self):
        probs = torch.randn(500, 101).softmax(-1)
        shift, scale = torch.rand(500) - 0.5, torch.rand(500) * 0.9
        got, support = self.project(probs, shift, scale)
        torch.testing.assert_close(got @ support, shift + scale * (probs @ support), rtol=1e-4, atol=1e-5)

    def test_the_identity_changes_nothing(self):
        probs = torch.randn(50, 101).softmax(-1)
        got, _ = self.project(probs, torch.zeros(50), torch.ones(50))
        torch.testing.assert_close(got, probs, rtol=0, atol=2e-6)

    @pytest.mark.parametrize(("shift", "atom"), [(1e6, 20), (-1e6, 0), (5.0, 20), (-5.0, 0)])
    def test_mass_beyond_an_edge_goes_to_the_last_atom(self, shift, atom):
        got, _ = self.project(torch.randn(1, 21).softmax(-1), torch.tensor([shift]), torch.zeros(1))
        torch.testing.assert_close(got[0], F.one_hot(torch.tensor(atom), 21).float())

    def test_a_row_of_nan_does_not_reach_its_neighbours(self):
        got, _ = self.project(torch.randn(3, 21).softmax(-1), torch.tensor([0.0, math.nan, 0.0]), torch.ones(3))
        assert got[[0, 2]].isfinite().all() and not got[1].isfinite().all()


class TestCriticLoss:
    """Contract: cross entropy to the projected soft Bellman target, masked by termination only."""

    @pytest.mark.parametrize("num_critics", [1, 2, 3])
    @pytest.mark.parametrize("reduction", ["min", "mean", "own"])
    def test_it_is_the_slow_reference(self, reduction, num_critics):
        loss = make_loss(target_reduction=reduction, num_critics=num_critics, alpha_init=0.2, gamma=0.9)
        batch = make_batch()
        target = expected_target(loss, batch, reduction, discount=[0.9] * B)
        logits = loss.qvalue_network.module(batch["privileged"], batch["action"]).movedim(1, 0)
        rows = -(target * logits.double().log_softmax(-1)).sum(-1).sum(0)
        torch.manual_seed(0)
        value, metadata = loss.critic_loss(batch)
        torch.testing.assert_close(value.double(), rows.mean(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(metadata["td_error"].double(), rows.detach(), rtol=1e-5, atol=1e-5)
        value_of_target = (target @ loss.support.double()).mean(0)
        torch.testing.assert_close(metadata["target_value"].double(), value_of_target, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(("terminated", "target"), [(False, 10.7), (True, 1.0)])
    def test_a_truncated_row_bootstraps_and_a_terminated_one_does_not(self, terminated, target):
        """case 54: r = 1, gamma 0.97, next value 10."""

        class Ten(torch.nn.Module):
            support = torch.linspace(0.0, 20.0, 101)

            def __init__(self):
                super().__init__()
                self.level = torch.nn.Parameter(torch.tensor(1e4))

            def forward(self, observation, action):
                logits = self.level * (self.support == 10).float()
                return logits.expand(*observation.shape[:-1], 2, 101)

        actor = make_fast_sac_actor(Bounded(-1.0, 1.0, shape=(ACTION,)), observation_dim=OBSERVATION, hidden_size=16)
        critic = TensorDictModule(Ten(), in_keys=["privileged", "action"], out_keys=["state_action_logits"])
        loss = FastSACLoss(actor, critic, gamma=0.97, alpha_init=0.0, fixed_alpha=True)
        batch = make_batch()
        batch["next", "reward"] = torch.ones(B, 1)
        batch["next", "terminated"] = torch.full((B, 1), terminated)
        batch["next", "truncated"] = torch.full((B, 1), not terminated)
        batch["next", "done"] = torch.ones(B, 1, dtype=torch.bool)
        _, metadata = loss.critic_loss(batch)
        torch.testing.assert_close(metadata["target_value"], torch.full((B,), target), rtol=0, atol=1e-4)

    def discounts(self, **entries):
        """The loss when the batch carries ``entries`` and gamma is 0.9, and the function that prices a discount."""
        loss = make_loss(gamma=0.9, alpha_init=0.1)
        batch = make_batch()

        def value(batch):
            torch.manual_seed(0)
            return loss.critic_loss(batch)[0]

        def priced(discount):
            torch.manual_seed(0)
            target = expected_target(loss, batch, "own", discount=discount)
            logits = loss.qvalue_network.module(batch["privileged"], batch["action"]).movedim(1, 0)
            return -(target * logits.double().log_softmax(-1)).sum(-1).sum(0).mean().float()

        return value(batch.clone().update(entries)), priced

    def test_without_a_key_the_discount_is_gamma(self):
        value, priced = self.discounts()
        torch.testing.assert_close(value, priced([0.9] * B), rtol=1e-5, atol=1e-5)

    def test_steps_to_next_obs_raises_gamma_to_the_steps(self):
        value, priced = self.discounts(steps_to_next_obs=torch.tensor([1, 2, 3, 1, 2, 3]).unsqueeze(-1))
        torch.testing.assert_close(value, priced([0.9, 0.81, 0.729] * 2), rtol=1e-5, atol=1e-5)

    def test_the_discount_of_the_sampler_comes_first(self):
        value, priced = self.discounts(
            steps_to_next_obs=torch.full((B, 1), 3), discount=torch.tensor([0.5, 0.25] * 3).unsqueeze(-1)
        )
        torch.testing.assert_close(value, priced([0.5, 0.25] * 3), rtol=1e-5, atol=1e-5)

    def test_a_batch_of_two_dimensions_is_its_flat_batch(self):
        loss, batch = make_loss(), make_batch(2, 3)
        torch.manual_seed(0)
        value, metadata = loss.critic_loss(batch)
        torch.manual_seed(0)
        flat, _ = loss.critic_loss(batch.reshape(6))
        assert metadata["td_error"].shape == (2, 3)
        torch.testing.assert_close(value, flat)

    def test_done_and_truncated_are_not_read(self):
        loss, batch = make_loss(), make_batch()
        assert loss.critic_loss(batch.exclude(("next", "done"), ("next", "truncated")))[0].isfinite()


class TestActorAndAlphaLoss:
    """Contract: the policy and the temperature objective of SAC, in units of the [-1, 1] box."""

    @pytest.mark.parametrize("reduction", ["min", "mean"])
    def test_the_actor_loss_is_the_slow_reference(self, reduction):
        loss, batch = make_loss(policy_reduction=reduction, alpha_init=0.3), make_batch()
        torch.manual_seed(0)
        value, metadata = loss.actor_loss(batch)
        torch.manual_seed(0)
        action, log_prob = loss.actor_network.get_dist(batch.select("observation")).rsample_and_log_prob()
        q = (loss.qvalue_network.module(batch["privileged"], action).softmax(-1) * loss.support).sum(-1)
        q = q.min(1).values if reduction == "min" else q.mean(1)
        torch.testing.assert_close(value, (0.3 * log_prob - q).mean())
        torch.testing.assert_close(metadata["log_prob"], log_prob.detach())
        torch.testing.assert_close(metadata["q_value"], q.detach())

    def test_the_alpha_loss_is_the_formula(self):
        loss, batch = make_loss(target_entropy=-1.5, alpha_init=0.3), make_batch()
        log_prob = torch.randn(B)
        value, metadata = loss.alpha_loss(batch, log_prob=log_prob)
        torch.testing.assert_close(value, -(0.3 * (log_prob - 1.5)).mean())
        torch.testing.assert_close(metadata["entropy"], -log_prob)

    def test_the_temperature_falls_when_the_policy_is_more_random_than_asked(self):
        loss, batch = make_loss(target_entropy=0.0), make_batch()
        loss.alpha_loss(batch, log_prob=torch.full((B,), -3.0))[0].backward()  # an entropy of 3
        assert loss.log_alpha.grad > 0

    def test_without_log_prob_the_alpha_loss_draws_its_own(self):
        loss, batch = make_loss(), make_batch()
        torch.manual_seed(0)
        value, _ = loss.alpha_loss(batch)
        torch.manual_seed(0)
        expected, _ = loss.alpha_loss(batch, log_prob=loss.actor_loss(batch)[1]["log_prob"])
        torch.testing.assert_close(value, expected)

    def test_auto_target_entropy_is_minus_the_ratio_times_the_dimension(self):
        assert make_loss(target_entropy_ratio=0.25).target_entropy.item() == -0.25 * ACTION

    def test_entropy_does_not_depend_on_the_units_of_the_action(self):
        losses = [make_loss(spec=Bounded(-high, high, shape=(ACTION,))) for high in (1.0, 0.01)]
        batch, entropies = make_batch(), []
        for loss in losses:
            torch.manual_seed(0)
            entropies.append(loss.alpha_loss(batch)[1]["entropy"])
        torch.testing.assert_close(*entropies, rtol=1e-5, atol=1e-5)

    def test_the_temperature_stays_inside_its_limits_and_can_come_back(self):
        loss, batch = make_loss(alpha_init=0.1, min_alpha=0.05, max_alpha=0.2), make_batch()
        with torch.no_grad():
            loss.log_alpha.fill_(3.0)
        torch.testing.assert_close(loss.alpha.item(), 0.2)
        loss.alpha_loss(batch, log_prob=torch.full((B,), -9.0))[0].backward()
        torch.testing.assert_close(loss.log_alpha.exp().item(), 0.2)
        assert loss.log_alpha.grad > 0

    def test_a_fixed_temperature_has_no_parameter_and_no_loss(self):
        loss, batch = make_loss(alpha_init=0.0, fixed_alpha=True), make_batch()
        assert loss.alpha_parameters() == [] and loss.alpha.item() == 0.0
        assert loss.alpha_loss(batch)[0].item() == 0.0
        assert loss.actor_loss(batch)[0].isfinite()


class TestTensorLosses:
    """Contract: the losses of tensors are the losses of TensorDicts, gradients included, noise given."""

    @pytest.mark.parametrize("spec", [None, Bounded(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 5.0]))], ids=str)
    def test_values_and_gradients_are_the_same(self, spec):
        loss, batch = make_loss(spec=spec, alpha_init=0.3), make_batch()
        tensors = TensorLosses(loss, None, networks_of(loss))
        read = tensors.read(batch)
        torch.manual_seed(0)
        noise = tensors.noise(read)
        parts = {
            "critic": (lambda: sum(tensors.critic(read, noise)[:1]), loss.critic_parameters() + [loss.log_alpha]),
            "actor": (lambda: tensors.actor(read, noise), loss.actor_parameters()),
        }
        for name, (function, parameters) in parts.items():
            torch.manual_seed(0)
            value, metadata = getattr(loss, f"{name}_loss")(batch)
            if name == "critic":
                value = value + loss.alpha_loss(batch, log_prob=metadata["next_log_prob"])[0]
            ours = function()
            assert torch.equal(ours, value)
            both = (torch.autograd.grad(each, parameters) for each in (ours, value))
            assert all(torch.equal(*pair) for pair in zip(*both, strict=True))

    def test_metrics_are_losses_temperature_and_rows(self):
        loss, batch = make_loss(alpha_init=0.3), make_batch()
        tensors = TensorLosses(loss, None, networks_of(loss))
        torch.manual_seed(0)
        value, metadata = loss.critic_loss(batch)
        loss_alpha, temperature = loss.alpha_loss(batch, log_prob=metadata["next_log_prob"])
        torch.manual_seed(0)
        read = tensors.read(batch)
        _, metrics = tensors.critic(read, tensors.noise(read))
        assert torch.equal(metrics[:3], torch.stack([value.detach(), loss_alpha.detach(), temperature["alpha"]]))
        rows = torch.stack([temperature["entropy"], metadata["target_value"], metadata["td_error"]])
        assert torch.equal(metrics[3:].view(3, B), rows) and not metrics.requires_grad

    def test_limits_of_the_temperature_are_restored_in_place(self):
        loss = make_loss(alpha_init=0.1, min_alpha=0.05, max_alpha=0.2)
        with torch.no_grad():
            loss.log_alpha.fill_(3.0)
        loss.limit_alpha()
        torch.testing.assert_close(loss.log_alpha.exp().item(), 0.2)

    def test_a_loss_without_target_critics_is_told(self):
        assert "delay_qvalue" in why_not_tensors(make_loss(delay_qvalue=False), None)
        assert why_not_tensors(make_loss(), None) is None


class TestParameters:
    """Contract: each loss trains its own parameters; the rest of TorchRL sees ordinary target parameters."""

    @pytest.mark.parametrize("name", ["critic", "actor", "alpha"])
    def test_a_loss_gives_gradients_to_its_own_parameters_only(self, name):
        loss, batch = make_loss(), make_batch()
        getattr(loss, f"{name}_loss")(batch)[0].backward()
        for other in ("critic", "actor", "alpha"):
            for parameter in getattr(loss, f"{other}_parameters")():
                assert (parameter.grad is not None) == (other == name)
        assert all(not target.requires_grad for target in loss.target_parameters())

    def test_the_parameters_are_those_of_the_three_lists(self):
        loss = make_loss()
        lists = [*loss.actor_parameters(), *loss.critic_parameters(), *loss.alpha_parameters()]
        assert {id(p) for p in lists} == {id(p) for p in loss.parameters()} and len(lists) == len(
            list(loss.parameters())
        )

    def test_target_parameters_start_as_copies(self):
        actor = make_fast_sac_actor(Bounded(-1.0, 1.0, shape=(2,)), observation_dim=3, hidden_size=16)
        loss = FastSACLoss(actor, make_fast_sac_critic(observation_dim=3, action_dim=2, hidden_size=16))
        for target, source in zip(loss.target_parameters(), loss.critic_parameters(), strict=True):
            assert torch.equal(target, source) and target.data_ptr() != source.data_ptr()

    @pytest.mark.parametrize("by_hand", [False, True], ids=["SoftUpdate", "foreach"])
    def test_soft_update_moves_the_targets_the_loss_uses(self, by_hand):
        loss, batch = make_loss(), make_batch()
        updater = SoftUpdate(loss, tau=0.25)
        with torch.no_grad():
            for parameter in loss.critic_parameters():
                parameter.add_(1.0)
            before = [target.clone() for target in loss.target_parameters()]
            if by_hand:
                torch._foreach_lerp_(loss.target_parameters(), loss.critic_parameters(), 0.25)
            else:
                updater.step()
        for old, new, source in zip(before, loss.target_parameters(), loss.critic_parameters(), strict=True):
            torch.testing.assert_close(new, 0.75 * old + 0.25 * source)
        target = expected_target(loss, batch, "own", discount=[0.97] * B)
        torch.manual_seed(0)
        _, metadata = loss.critic_loss(batch)
        expected = (target @ loss.support.double()).mean(0).float()
        torch.testing.assert_close(metadata["target_value"], expected, rtol=1e-4, atol=1e-4)

    def test_without_delay_the_target_is_the_critic_itself(self):
        loss = make_loss(delay_qvalue=False)
        for target, source in zip(loss.target_parameters(), loss.critic_parameters(), strict=True):
            assert target.data_ptr() == source.data_ptr()

    def test_an_optimizer_step_is_seen_by_the_actor_loss(self):
        loss, batch = make_loss(), make_batch()
        optimizer = torch.optim.SGD(loss.critic_parameters(), lr=1.0)
        torch.manual_seed(0)
        before = loss.actor_loss(batch)[1]["q_value"]
        loss.critic_loss(batch)[0].backward()
        optimizer.step()
        torch.manual_seed(0)
        assert not torch.equal(loss.actor_loss(batch)[1]["q_value"], before)

    def equal_losses(self, first, second, batch):
        values = []
        for loss in (first, second):
            torch.manual_seed(0)
            values.append([loss.critic_loss(batch)[0].item(), loss.actor_loss(batch)[0].item(), loss.alpha.item()])
        return values[0] == values[1]

    def test_a_loaded_state_gives_the_same_losses(self):
        first, second, batch = make_loss(alpha_init=0.3), make_loss(), make_batch()
        with torch.no_grad():
            for tensor in (*first.parameters(), *first.target_parameters()):
                tensor.add_(0.1)
        assert not self.equal_losses(first, second, batch)
        second.load_state_dict(first.state_dict())
        assert self.equal_losses(first, second, batch)

    def test_a_state_that_replaces_tensors_is_followed(self):
        first, second, batch = make_loss(alpha_init=0.3), make_loss(), make_batch()
        second.load_state_dict({key: value.clone() for key, value in first.state_dict().items()}, assign=True)
        with torch.no_grad():
            for tensors in zip(
                (*first.parameters(), *first.target_parameters()),
                (*second.parameters(), *second.target_parameters()),
                strict=True,
            ):
                for tensor in tensors:
                    tensor.add_(0.1)
        assert self.equal_losses(first, second, batch)

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))])
    def test_a_copy_gives_the_same_losses_and_trains_alone(self, duplicate):
        loss, batch = make_loss(), make_batch()
        twin = duplicate(loss)
        assert self.equal_losses(loss, twin, batch)
        with torch.no_grad():
            for tensor in (*loss.parameters(), *loss.target_parameters()):
                tensor.add_(0.1)
        assert not self.equal_losses(loss, twin, batch)
        with torch.no_grad():
            for tensor in (*twin.parameters(), *twin.target_parameters()):
                tensor.add_(0.1)
        assert self.equal_losses(loss, twin, batch)

    def test_a_moved_loss_computes_with_what_it_was_moved_to(self):
        loss, batch = make_loss(spec=Bounded(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 5.0]))), make_batch()
        loss.to(torch.float64)
        batch = batch.to(torch.float64).update({"next": {"terminated": batch["next", "terminated"]}})
        for name in ("critic_loss", "actor_loss", "alpha_loss"):
            assert getattr(loss, name)(batch)[0].dtype == torch.float64
        with torch.no_grad():
            torch._foreach_zero_(loss.critic_parameters())
        assert loss.actor_loss(batch)[1]["q_value"].abs().max() < 1e-6


class TestTorchRLInterface:
    """Contract: what a TorchRL user expects of a LossModule."""

    def test_forward_returns_all_losses_and_writes_the_priority(self):
        loss, batch = make_loss(), make_batch()
        SoftUpdate(loss, tau=0.1)
        out = loss(batch)
        assert set(out.keys()) == {"loss_actor", "loss_critic", "loss_alpha", "alpha", "entropy"}
        assert all(value.shape == () for value in out.values())
        assert batch["td_error"].shape == (B,)

    def test_a_batch_is_left_alone_but_for_the_priority(self):
        loss, batch = make_loss(), make_batch()
        SoftUpdate(loss, tau=0.1)
        keys = set(batch.keys(True, True))
        loss(batch)
        assert set(batch.keys(True, True)) - keys == {"td_error"}

    def test_forward_equals_the_three_methods_of_the_same_draws(self):
        loss, batch = make_loss(), make_batch()
        SoftUpdate(loss, tau=0.1)
        torch.manual_seed(0)
        out = loss(batch)
        torch.manual_seed(0)
        critic, _ = loss.critic_loss(batch)
        actor, metadata = loss.actor_loss(batch)
        alpha, _ = loss.alpha_loss(batch, log_prob=metadata["log_prob"])
        for name, value in (("critic", critic), ("actor", actor), ("alpha", alpha)):
            torch.testing.assert_close(out[f"loss_{name}"], value)

    def test_a_seeded_step_reproduces_bit_by_bit(self):
        results = []
        for _ in range(2):
            loss, batch = make_loss(), make_batch()
            optimizer = torch.optim.AdamW(loss.parameters(), lr=1e-2)
            for _ in range(3):
                optimizer.zero_grad()
                total = loss.critic_loss(batch)[0] + loss.actor_loss(batch)[0] + loss.alpha_loss(batch)[0]
                total.backward()
                optimizer.step()
            results.append(torch.cat([parameter.detach().reshape(-1) for parameter in loss.parameters()]))
        assert torch.equal(*results)

    def test_keyword_arguments_are_dispatched(self):
        loss, batch = make_loss(), make_batch()
        SoftUpdate(loss, tau=0.1)
        flat = batch.select(*loss.in_keys).flatten_keys("_").to_dict()
        assert len(loss(**flat)) == len(loss.out_keys)

    def test_every_key_can_be_renamed(self):
        loss, batch = make_loss(action_key=("agent", "move")), make_batch()
        SoftUpdate(loss, tau=0.1)
        loss.set_keys(
            reward=("r", "sum"), terminated="over", discount="factor", priority="rank", priority_weight="importance"
        )
        nxt = batch["next"]
        renamed = batch.select("observation", "privileged").update(
            {
                "agent": {"move": batch["action"]},
                "factor": torch.full((B, 1), 0.5),
                "importance": torch.rand(B),
                "next": {
                    **nxt.select("observation", "privileged"),
                    "r": {"sum": nxt["reward"]},
                    "over": nxt["terminated"],
                },
            }
        )
        renamed = TensorDict(renamed.to_dict(), batch_size=[B]).auto_batch_size_(1)
        loss(renamed)
        assert "rank" in renamed.keys()
        assert ("next", "r", "sum") in loss.in_keys and ("agent", "move") in loss.in_keys

    def test_an_unknown_key_is_refused(self):
        with pytest.raises(ValueError, match="not an accepted tensordict key"):
            make_loss().set_keys(rewards="reward")

    @pytest.mark.parametrize("shape", [(B,), (B, 1)], ids=str)
    def test_importance_weights_average_the_rows(self, shape):
        loss, batch, weights = make_loss(), make_batch(), torch.rand(B)
        torch.manual_seed(0)
        rows = loss.critic_loss(batch)[1]["td_error"]
        torch.manual_seed(0)
        value, _ = loss.critic_loss(batch.set("priority_weight", weights.view(shape)))
        torch.testing.assert_close(value, (rows * weights).sum() / weights.sum())

    def test_the_weights_of_a_prioritized_replay_are_found_under_the_name_that_it_gives_them(self):
        assert FastSACLoss._AcceptedKeys.priority_weight == SACLoss._AcceptedKeys.priority_weight
        assert PrioritizedTransitionSampler().weight_key == FastSACLoss._AcceptedKeys.priority_weight

    def test_no_reduction_keeps_the_rows(self):
        loss, batch = make_loss(reduction="none"), make_batch()
        SoftUpdate(loss, tau=0.1)
        out = loss(batch)
        assert out.batch_size == (B,) and out["loss_critic"].shape == (B,)

    def test_gamma_can_be_scheduled_in_place(self):
        loss = make_loss()
        pointer = loss.gamma.data_ptr()
        loss.gamma = 0.5
        assert loss.gamma.item() == 0.5 and loss.gamma.data_ptr() == pointer

    def test_no_loss_waits_for_the_device(self):
        loss, batch = make_loss(target_reduction="min", policy_reduction="min", max_alpha=1.0), make_batch()
        batch.set("priority_weight", torch.rand(B, 1))
        with NoHostSync():
            for name in ("critic_loss", "actor_loss", "alpha_loss"):
                getattr(loss, name)(batch)[0].backward()

    def test_values_stay_in_float32_under_bfloat16_autocast(self):
        loss, batch = make_loss(), make_batch()
        with torch.autocast("cpu", torch.bfloat16):
            _, critic = loss.critic_loss(batch)
            _, actor = loss.actor_loss(batch)
        assert {value.dtype for value in (*critic.values(), *actor.values())} == {torch.float32}

    def test_a_locked_batch_can_be_read(self):
        loss, batch = make_loss(), make_batch().lock_()
        for name in ("critic_loss", "actor_loss", "alpha_loss"):
            assert getattr(loss, name)(batch)[0].isfinite()

    def test_losses_compile_without_a_graph_break_to_the_same_numbers(self):
        loss, batch = make_loss(), make_batch()
        torch._dynamo.reset()
        for name in ("critic_loss", "actor_loss", "alpha_loss"):
            eager = getattr(loss, name)
            compiled = torch.compile(eager, fullgraph=True, backend="aot_eager", dynamic=False)
            values = []
            for function in (eager, compiled):
                torch.manual_seed(0)
                values.append(function(batch)[0])
            torch.testing.assert_close(*values)

    def test_it_learns_a_bandit(self):
        spec = Bounded(-1.0, 1.0, shape=(1,))
        actor = make_fast_sac_actor(spec, observation_dim=1, hidden_size=32, init_std=0.6)
        critic = make_fast_sac_critic(
            observation_dim=1, action_dim=1, hidden_size=32, num_atoms=51, v_min=-3.0, v_max=1.0
        )
        loss = FastSACLoss(actor, critic, alpha_init=0.05)
        optimizer = torch.optim.AdamW(loss.parameters(), lr=3e-3, weight_decay=0.0)
        for _ in range(250):
            observation, action = torch.ones(64, 1), torch.rand(64, 1) * 2 - 1
            nxt = {
                "observation": observation,
                "reward": -((action - 0.4) ** 2),
                "terminated": torch.ones(64, 1, dtype=torch.bool),
            }
            batch = TensorDict({"observation": observation, "action": action, "next": nxt}, batch_size=[64])
            batch = batch.auto_batch_size_(1)
            optimizer.zero_grad()
            (loss.critic_loss(batch)[0] + loss.actor_loss(batch)[0] + loss.alpha_loss(batch)[0]).backward()
            optimizer.step()
        best = actor.module[0].module(torch.ones(1, 1))[0].tanh().item()
        assert abs(best - 0.4) < 0.15


class TestBadInput:
    """Contract: one sentence that says where, what must hold and what came; nothing was computed."""

    @pytest.mark.parametrize("key", [("next", "reward"), ("next", "terminated"), "discount", "steps_to_next_obs"])
    def test_a_row_entry_of_the_wrong_shape_raises(self, key):
        batch = make_batch()
        batch.set(key, torch.ones(B))
        name = key if isinstance(key, str) else key[1]
        with pytest.raises(ValueError, match=re.escape(f"key {name!r} must have shape [6, 1], got [6]")):
            make_loss().critic_loss(batch)

    @pytest.mark.parametrize("name", ["reward", "terminated"])
    def test_a_missing_row_entry_raises(self, name):
        with pytest.raises(KeyError, match=f"key '{name}' must be in the batch"):
            make_loss().critic_loss(make_batch().exclude(("next", name)))

    def test_critics_of_another_support_raise(self):
        actor = make_fast_sac_actor(Bounded(-1.0, 1.0, shape=(2,)), observation_dim=3, hidden_size=16)
        critic = make_fast_sac_critic(observation_dim=4, action_dim=2, in_keys=["privileged"], hidden_size=16)
        loss = FastSACLoss(actor, critic, support=torch.linspace(-1, 1, 7))
        with pytest.raises(ValueError, match=r"logits of shape .* atoms 7, got \[6, 2, 101\]"):
            loss.critic_loss(make_batch())

    def test_a_discrete_action_space_raises_one_sentence(self):
        actor = make_fast_sac_actor(Bounded(-1.0, 1.0, shape=(2,)), observation_dim=3, hidden_size=16)
        critic = make_fast_sac_critic(observation_dim=3, action_dim=2, hidden_size=16)
        with pytest.raises(ValueError, match="Bounded spec.*got OneHot.*continuous actions only") as error:
            FastSACLoss(actor, critic, action_spec=OneHot(4))
        assert str(error.value).count(". ") == 0

    def test_a_critic_without_atoms_needs_them_given(self):
        actor = make_fast_sac_actor(Bounded(-1.0, 1.0, shape=(2,)), observation_dim=3, hidden_size=16)
        critic = TensorDictModule(torch.nn.Linear(3, 7), in_keys=["observation"], out_keys=["state_action_logits"])
        with pytest.raises(ValueError, match="support must be given"):
            FastSACLoss(actor, critic)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"target_reduction": "max"}, "target_reduction must be one of"),
            ({"policy_reduction": "own"}, "policy_reduction must be one of"),
            ({"reduction": "median"}, "reduction must be one of"),
            ({"alpha_init": 0.0}, "alpha_init"),
            ({"alpha_init": 0.1, "min_alpha": 0.2}, "min_alpha <= alpha_init"),
            ({"alpha_init": 0.1, "max_alpha": 0.05}, "alpha_init <= max_alpha"),
        ],
    )
    def test_nonsense_options_raise(self, options, words):
        with pytest.raises(ValueError, match=words):
            make_loss(**options)
