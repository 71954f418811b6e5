# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Networks, the squashed distribution and the normaliser, each against a slow or a stock reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from _host_sync import NoHostSync
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type
from torch import distributions as D
from torch.nn import functional as F
from torchrl.collectors import Collector
from torchrl.data import Bounded, Categorical, Composite, OneHot, Unbounded
from torchrl.envs import EnvBase, ExplorationType, set_exploration_type

from torchrl_ext.modules import (
    C51CriticNet,
    EmpiricalNormalization,
    FastSACActorNet,
    KeyedModule,
    SquashedNormal,
    action_bounds,
    make_fast_sac_actor,
    make_fast_sac_critic,
    make_fast_sac_policy,
)


class CountingEnv(EnvBase):
    """Observes how many steps its episode has taken; ends never."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded(shape=(3,)))
        self.action_spec = Bounded(-1.0, 1.0, shape=(2,))
        self.reward_spec = Unbounded(shape=(1,))

    def _reset(self, tensordict=None, **kwargs):
        self.steps = 0
        return TensorDict(observation=torch.zeros(3))

    def _step(self, tensordict):
        self.steps += 1
        done = torch.zeros(1, dtype=torch.bool)
        return TensorDict(
            observation=torch.full((3,), float(self.steps)), reward=torch.zeros(1), done=done, terminated=done.clone()
        )

    def _set_seed(self, seed):
        torch.manual_seed(seed)


class TestSquashedNormal:
    """Contract: the density of TransformedDistribution, finite wherever tanh saturates, one draw and its score."""

    @pytest.fixture(params=["unit", "box", "numbers"])
    def pair(self, request):
        torch.manual_seed(1)
        loc, scale = torch.randn(7, 3, dtype=torch.float64), torch.rand(7, 3, dtype=torch.float64) + 0.1
        low, high = {
            "unit": (-1.0, 1.0),
            "box": (torch.tensor([-1.0, 0.0, 2.0]).double(), torch.tensor([1.0, 5.0, 2.5]).double()),
            "numbers": (-0.4, 0.4),
        }[request.param]
        transforms = [D.TanhTransform(cache_size=1), D.AffineTransform((low + high) / 2, (high - low) / 2)]
        reference = D.TransformedDistribution(D.Independent(D.Normal(loc, scale), 1), transforms)
        return SquashedNormal(loc, scale, low=low, high=high), reference

    def test_log_prob_is_that_of_the_transformed_distribution(self, pair):
        dist, reference = pair
        action = reference.sample((5,))
        torch.testing.assert_close(dist.log_prob(action), reference.log_prob(action), rtol=1e-9, atol=1e-9)

    def test_a_draw_and_its_score_are_those_of_the_same_number(self, pair):
        dist, reference = pair
        action, log_prob = dist.rsample_and_log_prob((5,))
        assert action.shape == (5, 7, 3)
        torch.testing.assert_close(log_prob, reference.log_prob(action), rtol=1e-7, atol=1e-7)

    def test_draws_stay_inside_the_bounds(self, pair):
        dist, _ = pair
        wide = SquashedNormal(dist.loc, dist.scale * 100, low=dist.low, high=dist.high)
        action = wide.sample((1000,))
        assert (action >= torch.as_tensor(dist.low)).all() and (action <= torch.as_tensor(dist.high)).all()
        assert not action.requires_grad

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_score_and_gradients_are_finite_where_tanh_saturates(self, dtype):
        loc = torch.tensor([[-20.0], [-9.0], [0.0], [9.0], [20.0]], dtype=dtype, requires_grad=True)
        scale = torch.full_like(loc, 0.01).requires_grad_()
        action, log_prob = SquashedNormal(loc, scale).rsample_and_log_prob()
        gradients = torch.autograd.grad(log_prob.sum() + action.sum(), (loc, scale))
        for value in (action, log_prob, *gradients):
            assert value.isfinite().all()

    def test_saturated_score_is_the_exact_one(self):
        pre_tanh = torch.linspace(-20, 20, 41, dtype=torch.float64).unsqueeze(-1)
        scale = torch.full_like(pre_tanh, 1e-12)
        _, log_prob = SquashedNormal(pre_tanh, scale).rsample_and_log_prob()
        torch.manual_seed(0)  # the draw of the autouse seed
        noise = torch.randn(41, 1, dtype=torch.float64)
        # log(1 - tanh(u)^2) = -2 log cosh(u), and log cosh(u) = |u| + log1p(exp(-2|u|)) - log 2
        log_cosh = pre_tanh.abs() + torch.log1p(torch.exp(-2 * pre_tanh.abs())) - math.log(2)
        exact = -0.5 * noise**2 - math.log(1e-12) - 0.5 * math.log(2 * math.pi) + 2 * log_cosh
        torch.testing.assert_close(log_prob, exact.squeeze(-1), rtol=1e-8, atol=1e-8)

    def test_pathwise_gradients_are_those_of_autograd_through_the_reference(self):
        loc = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
        scale = (torch.rand(4, 2, dtype=torch.float64) + 0.5).requires_grad_()
        torch.manual_seed(3)
        _, ours = SquashedNormal(loc, scale).rsample_and_log_prob()
        torch.manual_seed(3)
        pre_tanh = loc + scale * torch.randn(4, 2, dtype=torch.float64)
        theirs = (D.Normal(loc, scale).log_prob(pre_tanh) - (1 - pre_tanh.tanh() ** 2).log()).sum(-1)
        for got, expected in zip(
            torch.autograd.grad(ours.sum(), (loc, scale)), torch.autograd.grad(theirs.sum(), (loc, scale)), strict=True
        ):
            torch.testing.assert_close(got, expected)

    def test_an_action_on_a_bound_has_a_finite_score(self):
        dist = SquashedNormal(torch.zeros(2, 1), torch.ones(2, 1))
        assert dist.log_prob(torch.tensor([[-1.0], [1.0]])).isfinite().all()

    def test_expanded_draws_have_the_new_batch_shape(self):
        assert SquashedNormal(torch.zeros(3), torch.ones(3)).expand([5]).sample().shape == (5, 3)


class TestActor:
    """Contract: a policy TorchRL can collect with, inside its bounds, with a bounded spread."""

    def test_deterministic_exploration_acts_with_the_squashed_mean(self):
        actor = make_fast_sac_actor(Bounded(-2.0, 4.0, shape=(2,)), observation_dim=3, hidden_size=16)
        torch.nn.init.normal_(actor.module[0].module.head.weight)
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            td = actor(TensorDict(observation=torch.randn(5, 3), batch_size=[5]))
        torch.testing.assert_close(td["action"], 1.0 + 3.0 * td["loc"].tanh())

    def test_it_draws_unless_told_otherwise(self):
        actor = make_fast_sac_actor(Bounded(-1.0, 1.0, shape=(2,)), observation_dim=3, hidden_size=16)
        td = TensorDict(observation=torch.zeros(1, 3), batch_size=[1])
        assert not torch.equal(actor(td.clone())["action"], actor(td.clone())["action"])

    def test_a_collector_runs_the_policy_and_stores_raw_observations_only(self):
        normalizer = EmpiricalNormalization(["observation"], [3])
        actor = make_fast_sac_actor(
            CountingEnv().action_spec, observation_dim=3, in_keys=["observation_normalized"], hidden_size=16
        )
        collector = Collector(
            CountingEnv(), make_fast_sac_policy(actor, normalizer), frames_per_batch=8, total_frames=8
        )
        try:
            batch = next(iter(collector))
        finally:
            collector.shutdown()
        assert batch["observation"][:, 0].tolist() == list(range(8))
        assert batch["action"].shape == (8, 2)
        assert not {"observation_normalized", "loc", "scale"} & set(batch.keys())

    def test_the_spread_never_leaves_its_range(self):
        net = FastSACActorNet(3, 2, hidden_size=16, log_std_min=-3.0, log_std_max=-1.0)
        torch.nn.init.normal_(net.head.weight, std=100.0)
        _, scale = net(torch.randn(64, 3))
        assert scale.min() >= math.exp(-3) * (1 - 1e-6) and scale.max() <= math.exp(-1) * (1 + 1e-6)

    def test_the_first_policy_has_the_asked_spread_in_every_state(self):
        loc, scale = FastSACActorNet(3, 2, hidden_size=16, init_std=0.7)(1e3 * torch.randn(9, 3))
        torch.testing.assert_close(scale, torch.full_like(scale, 0.7))
        assert not loc.any()

    def test_several_observations_are_concatenated_in_order(self):
        actor = make_fast_sac_actor(
            Bounded(-1.0, 1.0, shape=(2,)), observation_dim=5, in_keys=["a", ("b", "c")], hidden_size=16
        )
        torch.nn.init.normal_(actor.module[0].module.head.weight)
        a, c = torch.randn(4, 2), torch.randn(4, 3)
        td = actor(TensorDict({"a": a, "b": {"c": c}}, batch_size=[4]))
        torch.testing.assert_close(td["loc"], actor.module[0].module(torch.cat([a, c], -1))[0])

    def test_bounds_that_differ_by_dimension_move_with_the_module(self):
        spec = Bounded(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 10.0]))
        actor = make_fast_sac_actor(spec, observation_dim=3, hidden_size=16).to(torch.float64)
        with set_interaction_type(InteractionType.DETERMINISTIC):
            action = actor(TensorDict(observation=torch.randn(4, 3).double(), batch_size=[4]))["action"]
        torch.testing.assert_close(action, torch.tensor([[0.0, 5.0]]).double().expand(4, 2))

    def test_a_batched_spec_gives_the_bounds_of_one_action(self):
        low, high = action_bounds(Composite(action=Bounded(-3.0, 3.0, shape=(16, 2)), shape=(16,)))
        assert low.tolist() == [-3.0, -3.0] and high.tolist() == [3.0, 3.0]

    @pytest.mark.parametrize(
        "spec",
        [OneHot(4), Categorical(4), Bounded(0, 3, shape=(1,), dtype=torch.int64), Composite(other=OneHot(2))],
        ids=["one_hot", "categorical", "integers", "missing"],
    )
    def test_a_discrete_action_space_raises_one_sentence(self, spec):
        with pytest.raises(ValueError, match="Bounded spec of a floating dtype.*continuous actions only") as error:
            make_fast_sac_actor(spec, observation_dim=3)
        assert str(error.value).count(". ") == 0 and str(error.value).endswith(".")

    def test_an_unbounded_action_space_raises(self):
        with pytest.raises(ValueError, match="finite low < high"):
            make_fast_sac_actor(Bounded(-math.inf, 1.0, shape=(2,)), observation_dim=3)

    def test_an_impossible_spread_raises(self):
        with pytest.raises(ValueError, match="init_std must be strictly between"):
            FastSACActorNet(3, 2, init_std=2.0)

    def test_a_range_of_spreads_that_is_turned_around_raises(self):
        with pytest.raises(ValueError, match=r"log_std_min must not be above log_std_max, got \[0.0, -5.0\]"):
            FastSACActorNet(3, 2, log_std_min=0.0, log_std_max=-5.0)

    @pytest.mark.parametrize("key", ["action", ("agent", "action")])
    def test_a_module_names_the_key_that_it_lacks_and_writes_nothing(self, key):
        module = KeyedModule(torch.nn.Bilinear(3, 2, 1), in_keys=["observation", key], out_keys=["value"])
        td = TensorDict(observation=torch.zeros(4, 3), batch_size=[4])
        with pytest.raises(KeyError, match="KeyedModule: .*action.* must be present, got .'observation'.. Nothing was"):
            module(td)
        assert set(td.keys()) == {"observation"}

    def test_a_module_that_returns_another_number_of_tensors_writes_nothing(self):
        module = KeyedModule(torch.nn.Identity(), in_keys=["x"], out_keys=["y", "z"])
        td = TensorDict(x=torch.zeros(4), batch_size=[4])
        with pytest.raises(ValueError, match=r"Identity must return 2 tensors, one for each of \['y', 'z'\], got 1"):
            module(td)
        assert set(td.keys()) == {"x"}


class TestCritics:
    """Contract: the batched module is so many separate networks, whatever the batch shape and the padding."""

    @staticmethod
    def one_by_one(net: C51CriticNet, x: torch.Tensor) -> torch.Tensor:
        outputs = []
        for q in range(net.num_critics):
            h = F.pad(x, (0, net.pad))
            for layer in net.layers:
                if isinstance(layer, torch.nn.SiLU):
                    h = F.silu(h)
                elif layer.weight.shape[1] == 1:
                    h = F.layer_norm(h, h.shape[-1:], layer.weight[q, 0], layer.bias[q, 0])
                else:
                    h = F.linear(h, layer.weight[q].T, layer.bias[q, 0])
            outputs.append(h)
        return torch.stack(outputs, -2)

    @pytest.mark.parametrize("num_critics", [1, 2, 5])
    @pytest.mark.parametrize("batch", [(), (7,), (4, 3)], ids=str)
    def test_logits_are_those_of_separate_networks(self, num_critics, batch):
        net = C51CriticNet(3, 2, num_critics=num_critics, hidden_size=16, num_atoms=11, pad_to=8, dtype=torch.float64)
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter)
        observation, action = torch.randn(*batch, 3).double(), torch.randn(*batch, 2).double()
        logits = net(observation, action)
        assert logits.shape == (*batch, num_critics, 11)
        torch.testing.assert_close(logits, self.one_by_one(net, torch.cat([observation, action], -1)))

    def test_a_critic_has_no_gradient_from_another(self):
        net = C51CriticNet(3, 2, hidden_size=16)
        net(torch.randn(4, 3), torch.randn(4, 2))[:, 0].square().sum().backward()
        for parameter in net.parameters():
            assert parameter.grad[0].any() and not parameter.grad[1].any()

    def test_padding_starts_at_zero_and_is_never_trained(self):
        net = C51CriticNet(3, 2, hidden_size=16, pad_to=8)
        net(torch.randn(4, 3), torch.randn(4, 2)).square().sum().backward()
        first = net.layers[0].weight
        assert first.shape[1] == 8
        assert not first[:, 5:].any() and not first.grad[:, 5:].any()

    def test_critics_start_differently_and_like_a_linear_layer(self):
        weight = C51CriticNet(90, 10, hidden_size=64).layers[0].weight
        assert not torch.equal(weight[0], weight[1])
        assert 0.09 < weight.abs().max() <= 0.1

    def test_bfloat16_autocast_returns_float32_logits(self):
        net = C51CriticNet(3, 2, hidden_size=16)
        with torch.autocast("cpu", torch.bfloat16):
            assert net(torch.randn(4, 3), torch.randn(4, 2)).dtype == torch.float32

    def test_the_module_reads_and_writes_the_given_keys(self):
        critic = make_fast_sac_critic(
            observation_dim=5, action_dim=2, in_keys=["observation", "privileged"], action_key="act", hidden_size=16
        )
        td = TensorDict(
            observation=torch.randn(4, 2), privileged=torch.randn(4, 3), act=torch.randn(4, 2)
        ).auto_batch_size_()
        td.batch_size = [4]
        assert critic(td)["state_action_logits"].shape == (4, 2, 101)

    @pytest.mark.parametrize(
        "options",
        [{"num_critics": 0}, {"num_atoms": 1}, {"pad_to": 0}, {"hidden_size": 6}, {"v_min": 1.0, "v_max": 1.0}],
    )
    def test_nonsense_sizes_raise(self, options):
        with pytest.raises(ValueError, match="C51CriticNet"):
            C51CriticNet(3, 2, **options)


class TestEmpiricalNormalization:
    """Contract: the statistics of the concatenation of all collected rows, in place, without waiting."""

    KEYS = ("observation", ("agent", "pixels"))

    @staticmethod
    def run(rows: int, scale: float = 3.0, shift: float = 5.0) -> TensorDict:
        return TensorDict(
            {
                "observation": torch.randn(rows, 4) * scale + shift,
                "agent": {"pixels": torch.randint(0, 256, (rows, 2, 3), dtype=torch.uint8)},
            },
            batch_size=[rows],
        )

    def normalizer(self, **options) -> EmpiricalNormalization:
        return EmpiricalNormalization(self.KEYS, [4, (2, 3)], **options)

    @staticmethod
    def features(runs: list[TensorDict]) -> np.ndarray:
        rows = torch.cat(runs)
        parts = [rows["observation"], rows["agent", "pixels"].flatten(1)]
        return torch.cat([part.double() for part in parts], -1).numpy()

    @given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6), seed=st.integers(0, 2**16))
    def test_the_moments_are_those_of_all_rows_together(self, sizes, seed):
        torch.manual_seed(seed)
        runs, normalizer = [self.run(size, shift=10.0 * i) for i, size in enumerate(sizes)], self.normalizer()
        for run in runs:
            normalizer.update(run)
        rows = self.features(runs)
        assert normalizer.count.item() == len(rows)
        if len(rows):
            np.testing.assert_allclose(normalizer.mean.numpy(), rows.mean(0), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(normalizer.var.numpy(), rows.var(0), rtol=1e-4, atol=1e-4)

    def test_a_run_of_steps_and_streams_counts_each_row_once(self):
        normalizer, run = self.normalizer(), self.run(24)
        normalizer.update(run.reshape(8, 3))
        assert normalizer.count.item() == 24
        np.testing.assert_allclose(normalizer.mean.numpy(), self.features([run]).mean(0), rtol=1e-5)

    def test_a_replayed_batch_is_normalised_and_not_counted(self):
        normalizer, run = self.normalizer(), self.run(24)
        normalizer.update(run)
        before = {key: value.clone() for key, value in normalizer.state_dict().items()}
        for _ in range(3):
            normalizer.normalize_transition(run.clone().set("next", self.run(24)))
        assert all(torch.equal(value, before[key]) for key, value in normalizer.state_dict().items())

    def test_root_and_next_are_normalised_with_the_same_statistics(self):
        normalizer, run, nxt = self.normalizer(eps=0.5), self.run(24), self.run(24)
        normalizer.update(run)
        out = normalizer.normalize_transition(run.clone().set("next", nxt.clone()))
        rows = self.features([run])
        for source, result in ((run, out), (nxt, out["next"])):
            expected = (self.features([source]) - rows.mean(0)) / (rows.std(0) + 0.5)
            got = torch.cat([result["observation_normalized"], result["agent", "pixels_normalized"].flatten(1)], -1)
            np.testing.assert_allclose(got.numpy(), expected, rtol=1e-4, atol=1e-5)

    def test_clamp_limits_the_result(self):
        normalizer = self.normalizer(clamp=0.5)
        run = self.run(50)
        normalizer.update(run)
        assert normalizer(run)["observation_normalized"].abs().max() == 0.5

    def test_before_the_first_row_observations_pass_almost_unchanged(self):
        run = self.run(5)
        torch.testing.assert_close(self.normalizer(eps=1e-8)(run)["observation_normalized"], run["observation"])

    def test_updates_stop_once_enough_rows_were_counted(self):
        normalizer = self.normalizer(until=30)
        for _ in range(3):
            normalizer.update(self.run(20))
        assert normalizer.count.item() == 40
        frozen = normalizer.mean.clone()
        normalizer.update(self.run(20, shift=1e3))
        assert torch.equal(normalizer.mean, frozen)

    def test_many_rows_far_from_zero_keep_their_variance(self):
        normalizer = EmpiricalNormalization(["x"], [1])
        for _ in range(200):
            normalizer.update(TensorDict(x=1e3 + torch.randn(500, 1), batch_size=[500]))
        assert abs(normalizer.mean.item() - 1e3) < 0.02 and abs(normalizer.var.item() - 1.0) < 0.02

    def test_an_update_keeps_the_memory_of_every_buffer(self):
        normalizer = self.normalizer()
        pointers = {name: buffer.data_ptr() for name, buffer in normalizer.named_buffers()}
        normalizer.update(self.run(10))
        normalizer.load_state_dict(self.normalizer().state_dict())
        assert {name: buffer.data_ptr() for name, buffer in normalizer.named_buffers()} == pointers

    @pytest.mark.parametrize("wait", [lambda x: x[0].item(), lambda x: x[x > 0], lambda x: x.nonzero()])
    def test_the_mode_that_looks_for_waits_finds_them(self, wait):
        with NoHostSync(), pytest.raises(AssertionError):
            wait(torch.ones(3))

    def test_no_method_waits_for_the_device(self):
        normalizer, run = self.normalizer(until=100, clamp=5.0), self.run(10)
        with NoHostSync():
            normalizer.update(run)
            normalizer(run)

    def test_a_loaded_state_continues_exactly(self):
        first, second, run = self.normalizer(), self.normalizer(), self.run(10)
        first.update(run)
        second.load_state_dict(first.state_dict())
        for normalizer in (first, second):
            normalizer.update(run)
        assert all(torch.equal(a, b) for a, b in zip(first.buffers(), second.buffers(), strict=True))

    def test_shapes_are_read_from_a_spec(self):
        spec = Composite(observation=Unbounded(shape=(16, 4)), shape=(16,))
        normalizer = EmpiricalNormalization.from_spec(spec, ["observation"], out_keys=["observation"])
        assert normalizer.shapes == [torch.Size([4])] and normalizer.out_keys == ["observation"]

    def test_a_wrong_shape_raises_and_changes_nothing(self):
        normalizer = self.normalizer()
        with pytest.raises(ValueError, match=r"key 'observation' must have shape \[3, 4\].*got \[3, 5\]"):
            normalizer.update(self.run(3).set("observation", torch.zeros(3, 5)))
        assert normalizer.count.item() == 0

    def test_a_missing_key_raises_and_changes_nothing(self):
        normalizer = self.normalizer()
        with pytest.raises(KeyError, match="observation"):
            normalizer.update(self.run(3).exclude("observation"))
        assert normalizer.count.item() == 0

    def test_a_missing_key_leaves_observations_that_are_overwritten_as_they_were(self):
        normalizer, run = self.normalizer(out_keys=self.KEYS), self.run(3)
        normalizer.update(run)
        for whole, part in ((run.exclude(self.KEYS[1]), run), (run, run.exclude(self.KEYS[1]))):
            with pytest.raises(KeyError, match="pixels"):
                normalizer(run.exclude(self.KEYS[1]))
            batch = whole.clone().set("next", part.clone())
            before = batch.clone()
            with pytest.raises(KeyError, match="pixels"):
                normalizer.normalize_transition(batch)
            assert (batch == before).all()

    def test_a_batch_without_next_raises_and_changes_nothing(self):
        normalizer, run = self.normalizer(out_keys=self.KEYS), self.run(3)
        before = run.clone()
        with pytest.raises(KeyError, match="EmpiricalNormalization: key 'next' must be present"):
            normalizer.normalize_transition(run)
        assert (run == before).all()

    def test_flags_are_observations_like_others(self):
        normalizer = EmpiricalNormalization(["x"], [2], eps=1e-8)
        run = TensorDict(x=torch.tensor([[True, False], [False, True]]), batch_size=[2])
        normalizer.update(run)
        torch.testing.assert_close(normalizer(run)["x_normalized"], torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))

    @pytest.mark.parametrize("options", [{"eps": 0.0}, {"clamp": -1.0}, {"until": 0}, {"out_keys": ["one"]}])
    def test_nonsense_options_raise(self, options):
        with pytest.raises(ValueError, match="EmpiricalNormalization"):
            self.normalizer(**options)
