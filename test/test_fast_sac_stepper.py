# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Gradient steps from tensors: the numbers of the eager step, one launch on CUDA.

On a CPU the stepper runs launch by launch (``capture=False``), or with graphs that run their steps again when they are
replayed, so that all but the capture itself is tested; what is marked ``gpu`` captures.
"""

from __future__ import annotations

import contextlib
import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import _philox
import pytest
import torch
from tensordict import TensorDict
from test_counter_draws import FakeGenerator
from test_trainers import assert_equal, make_batch, make_learner, parameters
from torch.optim.lr_scheduler import LinearLR
from torchrl.data import Bounded, LazyTensorStorage, ReplayBuffer

from torchrl_ext.data import PrioritizedTransitionSampler, SlotReplayBuffer, SlotStorage, TransitionSampler, _fused
from torchrl_ext.data._transitions import assemble
from torchrl_ext.data.draws import locate, sampleable_counts
from torchrl_ext.modules import EmpiricalNormalization, make_fast_sac_actor, make_fast_sac_critic
from torchrl_ext.modules.squashed_normal import SquashedNormal
from torchrl_ext.objectives import FastSACLoss
from torchrl_ext.trainers import (
    FastSACLearner,
    FastSACStepper,
    _gradient_steps,
    _graph_sampling,
    fast_sac_learner,
    random_state,
    restore_random_state,
)
from torchrl_ext.trainers._adamw import adamw, groups_of, make_state
from torchrl_ext.trainers._counter_draws import STRIDE, CounterDraws, normal_noise
from torchrl_ext.trainers._graph_sampling import GraphSampling
from torchrl_ext.trainers._working_copies import WorkingCopy
from torchrl_ext.trainers.fast_sac_stepper import NotCapturedError

RATES = {"critic_lr": 1e-3, "actor_lr": 1e-3, "alpha_lr": 1e-3}
SCALARS = ("loss_critic", "loss_alpha", "alpha", "loss_actor")


def asymmetric_learner(*, device="cpu", spec=None, hidden=16, loss_options=None, **options) -> FastSACLearner:
    """Critics that see more than the actor, an action box of unequal sides, atoms and widths of odd numbers."""
    torch.manual_seed(0)
    low, high = torch.tensor([-1.0, -2.0, 0.0]), torch.tensor([1.0, 2.0, 0.5])
    spec = Bounded(low, high) if spec is None else spec
    normalizer = EmpiricalNormalization(["observation", "state"], [5, 9], clamp=3.0, device=device)
    seen, more = normalizer.out_keys
    actor = make_fast_sac_actor(
        spec, observation_dim=5, in_keys=[seen], hidden_size=hidden, init_std=0.5, device=device
    )
    critic = make_fast_sac_critic(
        observation_dim=14, action_dim=3, in_keys=[more, seen], hidden_size=hidden, num_atoms=11, device=device
    )
    return FastSACLearner(FastSACLoss(actor, critic, **(loss_options or {})), normalizer, **(RATES | options))


def asymmetric_batch(size=16, **extra) -> TensorDict:
    seen = {"observation": torch.randn(size, 5), "state": torch.randn(size, 9)}
    nxt = {
        "observation": torch.randn(size, 5),
        "state": torch.randn(size, 9),
        "reward": torch.randn(size, 1),
        "terminated": torch.rand(size, 1) < 0.2,
    }
    return TensorDict({**seen, "action": torch.rand(size, 3) * 0.5, "next": nxt, **extra}, [size])


def run_steps(learner, steps, batch=make_batch, *, stepper=None):
    """Scalars of each step, for draws that depend on the step alone."""
    rows = []
    for number in range(steps):
        torch.manual_seed(100 + number)
        drawn = batch()
        if stepper is None:
            metrics = learner.update(drawn)
        else:
            stepper.step(drawn, done=learner.updates)
            learner.updates += 1
            metrics = stepper.metrics()
        rows.append([float(metrics.get(name, 0.0)) for name in SCALARS])
    return torch.tensor(rows), metrics


def filled_replay(device="cpu", *, streams=8, slots=64, batch_size=32, generator=None) -> SlotReplayBuffer:
    replay = SlotReplayBuffer(
        storage=SlotStorage(slots, streams, device=device, final_capacity=slots + 1),
        sampler=TransitionSampler(1, 0.97),
        batch_size=batch_size,
        generator=generator,
    )
    replay.extend_batch(make_run(slots, streams))
    return replay


def make_run(steps, streams, *, reward=None) -> TensorDict:
    ended = torch.rand(steps, streams, 1) < 0.05
    rewards = torch.randn(steps, streams, 1) if reward is None else torch.full((steps, streams, 1), float(reward))
    nxt = {"observation": torch.randn(steps, streams, 3), "reward": rewards, "terminated": ended, "done": ended}
    observation, action = torch.randn(steps, streams, 3), torch.rand(steps, streams, 2) * 2 - 1
    return TensorDict({"observation": observation, "action": action, "next": nxt}, [steps, streams])


@contextlib.contextmanager
def repeated_graphs():
    """Stands in for CUDA: a graph is its steps, taken again at each replay."""

    def captured(stepper, inside, count, with_actor):
        pattern = [with_actor] if count == 1 else [stepper._is_actors_turn(turn) for turn in range(count)]
        stepper.launched = getattr(stepper, "launched", [])

        def replay():
            stepper.launched.append(count)
            stepper._run_beside(pattern, inside)

        return SimpleNamespace(replay=replay)

    class Stream:
        def __init__(self, *_, **__): ...
        def wait_stream(self, *_): ...
        def wait_event(self, *_): ...
        def record(self, *_): ...

    fake = {
        "Stream": Stream,
        "Event": Stream,
        "current_stream": Stream,
        "stream": lambda _: contextlib.nullcontext(),
        "device": lambda _: contextlib.nullcontext(),
        "graph_pool_handle": lambda: None,
        "default_generators": [torch.default_generator],
    }
    with (
        mock.patch.object(FastSACStepper, "_captured", captured),
        mock.patch.multiple(torch.cuda, **fake),
        mock.patch.object(_fused, "can_sample", lambda *_: True),
    ):
        yield


def drawn_noise(seat, shape, count):
    """What the kernel makes."""
    made = _philox.normals(*seat.tolist(), count * shape.numel())
    return torch.from_numpy(made).float().view(count, *shape).unbind()


@contextlib.contextmanager
def counted_draws(generator):
    """Stands in for the kernels that draw: numbers are the reference's, and torch's CUDA generator is ``generator``.

    Gives the seats of rows and of noise, those of rehearsals excepted.
    """
    drawn = SimpleNamespace(rows=[], noise=[])

    def counter(device, steps, own=None):
        return CounterDraws(generator if own is None else own, steps, device)

    def noise(seat, shape, count):
        drawn.noise.append(tuple(seat.tolist()))
        return drawn_noise(seat, shape, count)

    def sample(block, span, count, n_steps, gamma, _, seat):
        drawn.rows.append(tuple(seat.tolist()))
        low, high, counts = map(torch.as_tensor, sampleable_counts(block))
        wide = torch.from_numpy(_philox.wide_integers(*seat.tolist(), count))
        rows = locate(block, low, counts, wide % counts.sum(), high)
        return assemble(block, rows, n_steps, gamma, ("next", "reward"))[0], None, {}

    warm_up = FastSACStepper._warm_up

    def rehearsed(stepper, inside):
        rows, noise = len(drawn.rows), len(drawn.noise)
        warm_up(stepper, inside)
        del drawn.rows[rows:], drawn.noise[noise:]

    with (
        mock.patch.object(_gradient_steps, "counter_draws", counter),
        mock.patch.object(_graph_sampling, "counter_draws", counter),
        mock.patch.object(_gradient_steps, "normal_noise", noise),
        mock.patch.object(_fused, "sample", sample),
        mock.patch.object(_graph_sampling, "_finish", lambda _, batch, *__, **___: (batch, {})),
        mock.patch.object(FastSACStepper, "_warm_up", rehearsed),
    ):
        yield drawn


@contextlib.contextmanager
def noise_of_a_seat(seed, offset=0, *, make=drawn_noise, shape=(32, 2), device="cpu"):
    """Lets an eager step draw the noise that a captured one draws at a seat."""
    drawn = iter(make(torch.tensor([seed, offset], device=device), torch.Size(shape), 2))
    with mock.patch.object(SquashedNormal, "_noise", lambda *_: next(drawn)):
        yield


class TestNumbers:
    """Contract: tensors give what TensorDicts give, for the same state and draws."""

    def test_200_steps_in_float32_are_those_of_the_eager_step(self):
        expected, _ = run_steps(make_learner(policy_frequency=2), 200)
        learner = make_learner(policy_frequency=2)
        got, _ = run_steps(learner, 200, stepper=FastSACStepper(learner, capture=False))
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize(
        "options",
        [
            {"max_grad_norm": 0.1},
            {"loss_options": {"target_reduction": "min", "policy_reduction": "min"}},
            {"loss_options": {"fixed_alpha": True}},
            {"loss_options": {"alpha_init": 0.1, "min_alpha": 0.099, "max_alpha": 0.101}},
            {"loss_options": {"reduction": "sum", "target_reduction": "mean"}},
        ],
        ids=lambda options: ",".join(options.get("loss_options", options)),
    )
    def test_options_of_loss_and_learner_count(self, options):
        learner, other = (asymmetric_learner(policy_frequency=2, **options) for _ in range(2))
        for which in (learner, other):
            torch.manual_seed(1)
            which.observe(asymmetric_batch())
        expected, eager = run_steps(learner, 12, asymmetric_batch)
        got, metrics = run_steps(other, 12, asymmetric_batch, stepper=FastSACStepper(other, capture=False))
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
        assert metrics.keys() == eager.keys()
        for name, value in eager.items():
            torch.testing.assert_close(metrics[name], value, rtol=1e-6, atol=1e-6)
        for key, value in parameters(learner).items():
            torch.testing.assert_close(parameters(other)[key], value, rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("key", ["priority_weight", "discount", "steps_to_next_obs"])
    def test_entries_of_a_batch_count(self, key):
        def batch():
            values = {"priority_weight": torch.rand(16), "discount": torch.rand(16, 1)}
            return asymmetric_batch(**{key: values.get(key, torch.randint(1, 4, (16, 1)))})

        learner, other = asymmetric_learner(), asymmetric_learner()
        expected, _ = run_steps(learner, 4, batch)
        got, _ = run_steps(other, 4, batch, stepper=FastSACStepper(other, capture=False))
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)

    def test_bfloat16_stays_as_near_to_float32_as_the_eager_step(self):
        exact, _ = run_steps(asymmetric_learner(policy_frequency=2), 200, asymmetric_batch)
        eager, _ = run_steps(asymmetric_learner(policy_frequency=2, autocast=torch.bfloat16), 200, asymmetric_batch)
        learner = asymmetric_learner(policy_frequency=2, autocast=torch.bfloat16)
        got, _ = run_steps(learner, 200, asymmetric_batch, stepper=FastSACStepper(learner, capture=False))
        scale = exact.abs().amax(0)
        ours, theirs = ((rows - exact).abs().amax(0) / scale for rows in (got, eager))
        assert (ours <= torch.tensor([2e-2, 2e-2, 2e-3, 5e-2])).all(), ours
        assert (ours <= 3 * theirs + 2e-3).all(), (ours, theirs)

    def test_the_rule_of_the_compiled_path_is_that_of_adamw(self):
        torch.manual_seed(0)
        start = [torch.randn(7, 3), torch.randn(5)]
        twins = [[tensor.clone().requires_grad_() for tensor in start] for _ in range(2)]
        options = {"lr": torch.tensor(1e-2), "betas": (0.9, 0.95), "weight_decay": 0.1, "capturable": False}
        theirs, ours = (torch.optim.AdamW(parameters, **options, foreach=False) for parameters in twins)
        make_state(ours)
        for _ in range(100):
            gradients = [torch.randn_like(tensor) for tensor in start]
            for parameter, gradient in zip(twins[0], gradients, strict=True):
                parameter.grad = gradient
            theirs.step()
            adamw(groups_of(ours)[0], gradients)
        for mine, other in zip(twins[1], twins[0], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        assert {float(entry["step"]) for entry in ours.state.values()} == {100.0}

    @pytest.mark.parametrize("autocast", [None, torch.bfloat16])
    def test_a_compiler_takes_every_part_whole_and_keeps_the_numbers(self, autocast, monkeypatch):
        torch._dynamo.reset()
        learners = [asymmetric_learner(policy_frequency=2, max_grad_norm=0.5, autocast=autocast) for _ in range(2)]
        expected, _ = run_steps(learners[0], 6, asymmetric_batch, stepper=FastSACStepper(learners[0], capture=False))
        compiled = torch.compile

        def traced(function, *, options, **settings):
            assert settings["fullgraph"] and not options["triton.cudagraphs"]
            return compiled(function, **settings, backend="aot_eager")

        monkeypatch.setattr(torch, "compile", traced)
        stepper = FastSACStepper(learners[1], capture=False, compile=True)
        got, _ = run_steps(learners[1], 6, asymmetric_batch, stepper=stepper)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


class TestWorkingCopies:
    """Contract: matrix products read low-precision, padded copies; masters, their shapes and checkpoints stay."""

    @pytest.mark.parametrize("which", ["actor", "critic"])
    def test_padding_changes_no_output(self, which):
        learner = asymmetric_learner()
        network = learner.loss.actor_network.module[0].module
        inputs = [torch.randn(6, 5)]
        if which == "critic":
            network, inputs = learner.loss.qvalue_network.module, [torch.randn(6, 9), torch.randn(6, 5)]
            inputs.append(torch.randn(6, 3))
        shapes = [parameter.shape for parameter in network.parameters()]
        copied = WorkingCopy(network, torch.float32)
        for copy_, number in zip(copied.copies, copied.copied, strict=True):
            copy_.copy_(copied.masters[number].detach())
        for got, expected in zip(_tuple(copied.network(*inputs)), _tuple(network(*inputs)), strict=True):
            torch.testing.assert_close(got, expected)
        assert [parameter.shape for parameter in network.parameters()] == shapes
        weights = [parameter for parameter in copied.parameters if parameter.dim() > 1]
        first, last = weights[0].shape, weights[-1].shape
        assert (first[1] % 8, last[-1 if which == "critic" else 0] % 8) == (0, 0)

    def test_parameters_changed_from_outside_are_seen_by_the_next_step(self):
        learner = make_learner(autocast=torch.bfloat16)
        stepper = FastSACStepper(learner, capture=False)
        batch, losses = make_batch(), []
        for factor in (1.0, 1.0, 3.0):
            with torch.no_grad():
                torch._foreach_mul_(learner.loss.critic_parameters(), factor)
            state = copy.deepcopy(learner.state_dict())
            torch.manual_seed(0)
            stepper.step(batch, done=0)
            losses.append(float(stepper.metrics()["loss_critic"]))
            learner.load_state_dict(state)
            stepper.reset()
        assert losses[0] == losses[1] != losses[2]


def _tuple(value):
    return value if isinstance(value, tuple) else (value,)


class TestSteps:
    """Contract: blocks are single steps, the actor has its turn, state and learning rates are the learner's."""

    def test_blocks_are_single_steps(self):
        ends, launches = [], []
        for sizes in ([12], [1] * 12, [3, 9], [2, 5, 5]):
            learner = make_learner(policy_frequency=4)
            with repeated_graphs():
                learner._stepper = stepper = FastSACStepper(learner)
                torch.manual_seed(1)
                replay = filled_replay()
                torch.manual_seed(2)
                for size in sizes:
                    metrics = learner.update_from(replay, size)
            assert learner.updates == 12 and "loss_actor" in metrics
            ends.append({**parameters(learner), **metrics})
            launches.append(stepper.launched)
        assert launches == [[4, 4, 4], [1] * 12, [1, 1, 1, 1, 4, 4], [1, 1, 1, 1, 1, 1, 1, 1, 4]]
        for other in ends[1:]:
            assert_equal(ends[0], other)

    def test_rehearsal_leaves_no_trace(self):
        learner, other = make_learner(policy_frequency=2), make_learner(policy_frequency=2)
        replay = filled_replay()
        with repeated_graphs():
            learner._stepper = FastSACStepper(learner)
            torch.manual_seed(3)
            learner.update_from(replay, 2)
        torch.manual_seed(3)
        other.update_from(replay, 2)
        assert_equal(parameters(learner), parameters(other))
        steps = {int(entry["step"]) for entry in learner.actor_optimizer.state.values()}
        assert steps == {1}

    def test_preparing_with_another_replay_takes_no_step_and_leaves_no_trace(self):
        ends = []
        for prepared in (False, True):
            learner = make_learner(policy_frequency=2)
            with repeated_graphs():
                learner._stepper = FastSACStepper(learner)
                torch.manual_seed(3)
                replay = filled_replay()
                if prepared:
                    torch.manual_seed(4)
                    small = filled_replay(slots=4)
                    learner.prepare(small)
                    assert learner.updates == 0 and not learner._stepper.launched
                torch.manual_seed(5)
                metrics = learner.update_from(replay, 4)
            ends.append({**parameters(learner), **metrics})
        assert_equal(*ends)

    def test_a_learner_without_graphs_has_nothing_to_prepare(self):
        learner, replay = make_learner(), filled_replay()
        before = {name: value.clone() for name, value in parameters(learner).items()}
        state = torch.get_rng_state()
        learner.prepare(replay)
        assert learner.updates == 0 and torch.equal(torch.get_rng_state(), state)
        assert_equal(before, parameters(learner))

    def test_batches_of_another_size_take_a_graph_of_their_own(self):
        learner, other = make_learner(policy_frequency=1), make_learner(policy_frequency=1)
        batches = [make_batch(size) for size in (8, 8, 16, 8)]
        with repeated_graphs():
            learner._stepper = FastSACStepper(learner)
            torch.manual_seed(0)
            sizes = [len(learner.update(batch.clone())["td_error"]) for batch in batches]
        torch.manual_seed(0)
        for batch in batches:
            other.update(batch)
        assert sizes == [8, 8, 16, 8]
        assert_equal(parameters(learner), parameters(other))

    def test_a_batch_is_left_as_it_is(self):
        learner, batch = make_learner(), make_batch().lock_()
        keys = set(batch.keys(True, True))
        FastSACStepper(learner, capture=False).step(batch, done=0)
        assert set(batch.keys(True, True)) == keys

    def test_metrics_are_owned(self):
        learner = make_learner(policy_frequency=1)
        stepper = FastSACStepper(learner, capture=False)
        stepper.step(make_batch(), done=0)
        first = stepper.metrics()
        kept = {name: value.clone() for name, value in first.items()}
        stepper.step(make_batch(), done=1)
        assert_equal(first, kept)
        assert not any(value.requires_grad for value in first.values())

    def test_loss_actor_comes_with_the_first_turn_of_the_actor_and_stays(self):
        learner = make_learner(policy_frequency=2)
        stepper, seen = FastSACStepper(learner, capture=False), []
        for done in range(3):
            stepper.step(make_batch(), done=done)
            seen.append(stepper.metrics().get("loss_actor"))
        assert seen[0] is None and seen[1] == seen[2]

    def test_learning_rates_count_from_the_next_step_on(self):
        learner = make_learner(policy_frequency=1)
        stepper = FastSACStepper(learner, capture=False)
        stepper.step(make_batch(), done=0)
        learner.set_learning_rates(critic=0.0, actor=0.0, alpha=0.0)
        before = {key: value for key, value in parameters(learner).items() if not key.startswith("target")}
        stepper.step(make_batch(), done=1)
        after = parameters(learner)
        assert_equal(before, {key: after[key] for key in before})
        learner.set_learning_rates(actor=1e-2)
        stepper.step(make_batch(), done=2)
        moved = {key.split("_")[0] for key, value in parameters(learner).items() if key in before}
        assert moved >= {"actor"}
        assert not torch.equal(*(learner.loss.actor_parameters()[0].detach(), before[_first_actor_key(before)]))

    def test_a_negative_learning_rate_changes_nothing(self):
        learner = make_learner()
        with pytest.raises(ValueError, match=r"learning rate actor must be >= 0, got -1.*Nothing was changed"):
            learner.set_learning_rates(critic=0.5, actor=-1.0)
        assert learner.critic_optimizer.param_groups[0]["lr"] == 1e-3

    def test_schedulers_move_rates_that_are_tensors_in_place(self):
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(1e-2))
        rate = optimizer.param_groups[0]["lr"]
        schedule = LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=2)
        optimizer.step()
        schedule.step()
        assert optimizer.param_groups[0]["lr"] is rate and float(rate) == pytest.approx(5e-3)

    def test_resumes_exactly(self):
        learner, other = make_learner(policy_frequency=2), make_learner(policy_frequency=2, seed=1)
        run_steps(learner, 5, stepper=FastSACStepper(learner, capture=False))
        stepper = FastSACStepper(other, capture=False)
        other._stepper = stepper
        run_steps(other, 2, stepper=stepper)
        other.load_state_dict(copy.deepcopy(learner.state_dict()))
        eager, _ = run_steps(learner, 4)
        resumed, _ = run_steps(other, 4, stepper=stepper)
        torch.testing.assert_close(resumed, eager, rtol=1e-6, atol=1e-7)
        assert other.updates == 9


def _first_actor_key(state):
    return next(key for key in state if key.startswith("actor"))


class TestDraws:
    """Contract: steps draw where the generator of the device stands and move it on, whatever graph takes them, so that
    seeds and states of generators govern runs; nothing is drawn twice."""

    @contextlib.contextmanager
    def running(self, seed=5, **options):
        """A learner, its replay, the generator, and the seats of what is drawn."""
        generator = FakeGenerator(seed)
        with repeated_graphs(), counted_draws(generator) as drawn:
            torch.manual_seed(1)
            replay, learner = filled_replay(), make_learner(**({"policy_frequency": 4} | options))
            learner._stepper = FastSACStepper(learner)
            yield learner, replay, generator, drawn

    @staticmethod
    def taken(learner, replay, *sizes):
        for size in sizes:
            metrics = learner.update_from(replay, size)
        return {**parameters(learner), **metrics}

    def test_blocks_draw_what_single_steps_draw(self):
        ends = []
        for sizes in ([12], [1] * 12, [3, 9], [2, 5, 5]):
            with self.running() as (learner, replay, generator, drawn):
                ends.append(self.taken(learner, replay, *sizes))
                assert drawn.rows == drawn.noise == [(5, STRIDE * step) for step in range(12)]
                assert generator.get_state() == (5, 12 * STRIDE)
        for other in ends[1:]:
            assert_equal(ends[0], other)

    def test_a_step_is_the_eager_one_with_the_noise_of_its_seat(self):
        eager, rows = make_learner(policy_frequency=4), []
        torch.manual_seed(2)
        batches = [make_batch() for _ in range(8)]
        for number, batch in enumerate(batches):
            with noise_of_a_seat(5, STRIDE * number):
                rows.append(eager.update(batch.clone()))
        with self.running() as (learner, *_):
            for batch, expected in zip(batches, rows, strict=True):
                got = learner.update(batch)
                for name, value in expected.items():
                    torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)

    def test_a_new_capture_goes_on(self):
        with self.running() as (learner, replay, *_):
            expected = self.taken(learner, replay, 4, 4, 4)
        with self.running() as (learner, replay, *_):
            self.taken(learner, replay, 4)
            learner._stepper.reset()
            self.taken(learner, replay, 4)
            learner.load_state_dict(copy.deepcopy(learner.state_dict()))
            assert_equal(self.taken(learner, replay, 4), expected)

    def test_no_seat_serves_two_steps_of_any_graphs(self):
        with self.running() as (learner, replay, generator, drawn):
            for turn, size in enumerate([1, 4, 2, 8, 3, 1]):
                learner.update_from(replay, size)
                generator.offset += 4 * (turn % 2)  # something else draws
                learner.update(make_batch(8 + 8 * (turn % 2)))
            assert len(drawn.noise) == len(set(drawn.noise)) == learner.updates == 25
            assert len(drawn.rows) == len(set(drawn.rows)) == 19

    def test_seeds_and_states_of_the_generator_count(self):
        with self.running(critic_lr=0.0, actor_lr=0.0, alpha_lr=0.0) as (learner, replay, generator, _):
            first = learner.update_from(replay, 4)["q_target"]
            state = generator.get_state()
            second = learner.update_from(replay, 4)["q_target"]
            generator.set_state(state)
            assert torch.equal(learner.update_from(replay, 4)["q_target"], second)
            generator.manual_seed(5)
            assert torch.equal(learner.update_from(replay, 4)["q_target"], first)
            assert not torch.isclose(first, second).all()

    def test_resumes_with_the_draws_that_would_have_come(self):
        with self.running() as (learner, replay, generator, _):
            self.taken(learner, replay, 6)
            saved = copy.deepcopy((learner.state_dict(), replay.state_dict(), generator.get_state()))
            expected = self.taken(learner, replay, 7)
        with self.running(seed=9) as (other, replay, generator, _):
            self.taken(other, replay, 1)
            other.load_state_dict(saved[0])
            replay.load_state_dict(saved[1])
            generator.set_state(saved[2])
            assert_equal(self.taken(other, replay, 7), expected)

    def test_rows_are_drawn_from_the_replays_own_generator(self):
        with self.running() as (learner, replay, generator, drawn):
            replay._rng = own = FakeGenerator(8)
            learner.update_from(replay, 5)
            assert drawn.rows == [(8, STRIDE * step) for step in range(5)]
            assert drawn.noise == [(5, STRIDE * step) for step in range(5)]
            assert generator.get_state() == (5, 5 * STRIDE) and own.get_state() == (8, 5 * STRIDE)

    def test_a_failed_capture_leaves_the_generator(self):
        with self.running() as (learner, replay, generator, _):
            with mock.patch.object(FastSACStepper, "_captured", side_effect=RuntimeError("no room")):
                learner.update_from(replay, 3)
            assert learner._stepper is None and generator.get_state() == (5, 0)

    def test_without_graphs_kernels_draw_too(self):
        with self.running() as (learner, replay, *_):
            expected = self.taken(learner, replay, 8)
        with self.running() as (learner, replay, _, drawn):
            learner._stepper = FastSACStepper(learner, capture=False)
            got = self.taken(learner, replay, 8)
            assert drawn.rows == drawn.noise == [(5, STRIDE * step) for step in range(8)]
        assert_equal(got, expected)


class TestFallback:
    """Contract: what cannot be captured is eager, the log says why in one line, and no step is lost."""

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda loss: setattr(loss, "reduction", "none"), "reduction='none'"),
            (lambda loss: setattr(loss.actor_network.module[1], "distribution_class", dict), "SquashedNormal"),
            (lambda loss: setattr(loss.qvalue_network, "out_keys", ["a", "b"]), "critics are not one module"),
        ],
    )
    def test_a_loss_without_a_form_in_tensors_is_told(self, change, reason):
        learner = make_learner()
        change(learner.loss)
        with pytest.raises(NotCapturedError, match=reason):
            FastSACStepper(learner, capture=False)

    def test_a_normaliser_of_another_kind_is_told(self):
        learner = make_learner()

        class Mine(EmpiricalNormalization):
            pass

        learner.normalizer = Mine(["observation"], [3])
        with pytest.raises(NotCapturedError, match="normaliser is a Mine"):
            FastSACStepper(learner, capture=False)

    def test_a_failed_capture_takes_no_step_and_goes_on_eagerly(self, monkeypatch):
        learner, other = make_learner(), make_learner()
        said = []
        monkeypatch.setattr(fast_sac_learner.torchrl_logger, "warning", said.append)
        replay = filled_replay()
        with repeated_graphs():
            learner._stepper = FastSACStepper(learner)
            with mock.patch.object(FastSACStepper, "_captured", side_effect=RuntimeError("no room\nsecond line")):
                torch.manual_seed(4)
                metrics = learner.update_from(replay, 3)
                learner.update_from(replay, 1)
        torch.manual_seed(4)
        other.update_from(replay, 3)
        other.update_from(replay, 1)
        assert said == ["FastSACLearner: gradient steps are eager, because RuntimeError: no room."]
        assert learner.updates == 4 and "loss_critic" in metrics
        assert_equal(parameters(learner), parameters(other))

    def test_a_failed_compilation_is_captured_all_the_same(self, monkeypatch):
        def refuse(function, **_):
            def call(*_, **__):
                raise RuntimeError("no compiler")

            return call

        said = []
        monkeypatch.setattr(torch, "compile", refuse)
        monkeypatch.setattr(_gradient_steps.torchrl_logger, "info", said.append)
        learner, other = make_learner(), make_learner()
        replay = filled_replay()
        with repeated_graphs():
            learner._stepper = stepper = FastSACStepper(learner, compile={})
            torch.manual_seed(5)
            learner.update_from(replay, 4)
        torch.manual_seed(5)
        other.update_from(replay, 4)
        assert not stepper.compiled and learner._stepper is stepper
        assert said == ["FastSACStepper: steps are captured but not compiled, because of RuntimeError: no compiler."]
        assert_equal(parameters(learner), parameters(other))

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"sampler": PrioritizedTransitionSampler()}, "PrioritizedTransitionSampler keeps books"),
            ({"sampler": TransitionSampler(replacement=False)}, "uniform draws with replacement"),
            ({"contiguous": True}, "contiguous batches"),
            ({"prefetch": 1}, "prefetch"),
        ],
        ids=str,
    )
    def test_a_replay_that_cannot_be_drawn_from_inside_is_sampled_before_each_launch(
        self, options, reason, monkeypatch
    ):
        said = []
        monkeypatch.setattr(_gradient_steps.torchrl_logger, "info", said.append)
        replay = SlotReplayBuffer(storage=SlotStorage(64, 8), batch_size=32, **options)
        replay.extend_batch(make_run(64, 8))
        learner = make_learner()
        with repeated_graphs():
            learner._stepper = stepper = FastSACStepper(learner)
            learner.update_from(replay, 5)
        assert stepper.launched == [1] * 5 and learner.updates == 5
        assert len(said) == 1 and reason in said[0]

    @pytest.mark.parametrize("stepper", [False, True])
    def test_a_negative_number_of_updates_is_refused(self, stepper):
        learner = make_learner()
        learner._stepper = FastSACStepper(learner, capture=False) if stepper else None
        with pytest.raises(ValueError, match="updates must not be negative, got -1. No step was taken"):
            learner.update_from(filled_replay(), -1)
        assert learner.updates == 0

    def test_a_stock_replay_is_sampled_before_each_launch(self):
        replay = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=32)
        replay.extend(make_batch(64))
        learner = make_learner()
        with repeated_graphs():
            learner._stepper = stepper = FastSACStepper(learner)
            learner.update_from(replay, 4)
        assert stepper.launched == [1] * 4

    def test_a_batch_with_a_loss_mask_is_refused(self):
        learner = make_learner()
        stepper = FastSACStepper(learner, capture=False)
        mask = learner.loss._loss_mask_keys()
        if not mask:
            pytest.skip("this TorchRL masks no losses by itself")
        batch = make_batch().set(mask[0], torch.ones(32, 1, dtype=torch.bool))
        with pytest.raises(ValueError, match="without a mask"):
            stepper.step(batch, done=0)

    @pytest.mark.parametrize("count", [0, 3, 6])
    def test_a_block_that_breaks_the_actors_turn_is_refused(self, count):
        with pytest.raises(ValueError, match=f"multiple of policy_frequency=4, got {count}"):
            FastSACStepper(make_learner(), capture=False, steps_per_graph=count)


# ---------------------------------------------------------------------------------------------------------- CUDA


def cuda_learner(**options) -> FastSACLearner:
    learner = make_learner(hidden=64)
    loss, normalizer = learner.loss.cuda(), learner.normalizer.cuda()
    return FastSACLearner(loss, normalizer, **(RATES | {"policy_frequency": 4, "tau": 0.1} | options))


def trained(learner, calls, *, updates=4, seed=11, replay=None):
    """Scalars after each call, and the replay."""
    torch.manual_seed(10)
    replay = filled_replay("cuda", batch_size=256) if replay is None else replay
    replay.sample()  # the first one draws more often
    if replay._rng is not None:
        replay._rng.manual_seed(seed)
    torch.manual_seed(seed)
    rows = []
    for _ in range(calls):
        metrics = learner.update_from(replay, updates)
        rows.append(torch.stack([metrics.get(name, metrics["alpha"]) for name in SCALARS]))
    return torch.stack(rows).cpu(), replay


@pytest.mark.gpu
@pytest.mark.timeout(300)
class TestOnCuda:
    """Contract: captured and compiled steps give the numbers of the same steps launch by launch, launch one graph,
    never wait for the device, and follow rates and replay without a new capture."""

    @pytest.fixture(autouse=True)
    def fresh_compiler(self):
        torch._dynamo.reset()

    def uncaptured(self, **options):
        learner = cuda_learner(cuda_graph=True, **options)
        learner._stepper = FastSACStepper(learner, capture=False)
        return learner

    def test_preparing_uses_up_no_draw_and_compiles_for_every_replay(self):
        ends = []
        for prepared in (False, True):
            torch.manual_seed(1)
            learner, replay = cuda_learner(cuda_graph=True, compile={}), filled_replay("cuda")
            if prepared:
                small = filled_replay("cuda", slots=4)
                torch.manual_seed(2)
                state = torch.cuda.get_rng_state()
                learner.prepare(small)
                compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
                assert learner.updates == 0 and torch.equal(torch.cuda.get_rng_state(), state)
            torch.manual_seed(2)
            metrics = learner.update_from(replay, 8)
            ends.append({name: float(value.float().mean()) for name, value in metrics.items()})
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled, "compiled again for another replay"
        assert ends[0] == pytest.approx(ends[1], rel=1e-4)

    @pytest.mark.parametrize("own_generator", [False, True])
    def test_captured_steps_are_those_launched_one_by_one(self, own_generator):
        """200 steps in float32: the same draws, of rows and of noise, and losses within 1e-3."""
        made = []
        for learner in (self.uncaptured(), cuda_learner(cuda_graph=True)):
            replay = None
            if own_generator:
                torch.manual_seed(10)
                generator = torch.Generator("cuda").manual_seed(6)
                replay = filled_replay("cuda", batch_size=256, generator=generator)
            made.append(trained(learner, 50, replay=replay)[0])
            assert learner.updates == 200
        torch.testing.assert_close(made[1], made[0], rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("compile", [False, True])
    def test_200_steps_are_those_of_the_eager_learner(self, compile):
        """Batches given, so that only the noise is drawn, which the eager steps read from the seats: losses within 1e-3
        in float32."""
        made = []
        torch.manual_seed(3)
        batches = [make_batch(256).cuda() for _ in range(200)]
        for learner in (cuda_learner(), cuda_learner(cuda_graph=True, compile=compile)):
            rows = []
            for number, batch in enumerate(batches):
                torch.cuda.manual_seed(number)
                eager = learner._stepper is None
                noise = noise_of_a_seat(number, make=normal_noise, shape=(256, 2), device="cuda")
                with noise if eager else contextlib.nullcontext():
                    metrics = learner.update(batch.clone())
                rows.append(torch.stack([metrics.get(name, torch.zeros((), device="cuda")) for name in SCALARS]))
            made.append(torch.stack(rows).cpu())
            assert learner.cuda_graph is (learner._stepper is not None)
            assert not compile or learner._stepper is None or learner._stepper.compiled
        torch.testing.assert_close(made[1], made[0], rtol=1e-3, atol=1e-3)

    def test_bfloat16_stays_near_float32(self):
        exact, _ = trained(self.uncaptured(), 50)
        got, _ = trained(cuda_learner(cuda_graph=True, autocast=torch.bfloat16, compile=True), 50)
        scale = exact.abs().amax(0)
        assert (((got - exact).abs() / scale) <= torch.tensor([2e-2, 2e-2, 5e-3, 1e-1])).all()

    @pytest.mark.parametrize("own_generator", [False, True])
    @pytest.mark.parametrize("updates", [1, 4, 8])
    def test_a_graph_is_the_only_launch_of_its_steps(self, updates, own_generator):
        """Besides, the metrics of a call are copied once."""
        learner, replay = cuda_learner(cuda_graph=True), None
        if own_generator:
            replay = filled_replay("cuda", batch_size=256, generator=torch.Generator("cuda").manual_seed(6))
        _, replay = trained(learner, 8, updates=updates, replay=replay)
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        calls = 8
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(calls):
                learner.update_from(replay, updates)
            torch.cuda.synchronize()
        counts = {event.key: event.count for event in profile.key_averages()}
        assert counts.get("cudaGraphLaunch", 0) == calls * max(1, updates // 4)
        kernels = sum(count for key, count in counts.items() if key.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
        assert kernels == 0, counts
        assert counts.get("cudaMemcpyAsync", 0) <= calls and not counts.get("cudaMemsetAsync", 0), counts

    def test_no_thread_writes_to_the_replay_while_graphs_are_made_that_draw_from_it(self):
        learner, replay = cuda_learner(cuda_graph=True), filled_replay("cuda", batch_size=256)
        drawn, draw = [], GraphSampling.draw

        def could_write() -> bool:
            lock = replay._storage._lock._lock
            taken = lock.acquire(blocking=False)
            if taken:
                lock.release()
            return taken

        def draw_alone(sampling, turn):
            with ThreadPoolExecutor(1) as other:
                drawn.append(other.submit(could_write).result(timeout=10))
            return draw(sampling, turn)

        with mock.patch.object(GraphSampling, "draw", draw_alone):
            learner.update_from(replay, 4)
        assert drawn and not any(drawn)

    def test_a_stream_that_was_cut_is_drawn_from_inside_the_graph(self):
        """As after a new start of a worker or in a resumed run: the row before the cut has no successor."""
        learner, replay = cuda_learner(cuda_graph=True), filled_replay("cuda", batch_size=256)
        learner.update_from(replay, 4)
        run = make_run(8, 8)
        replay.extend_batch(replace(replay.storage.layout.pack(run.to("cuda")), tail=None))
        replay.storage.end_streams()
        replay.extend_batch(run)
        assert replay.storage.block.may_have_holes
        launched = []
        replayed = torch.cuda.CUDAGraph.replay
        with mock.patch.object(torch.cuda.CUDAGraph, "replay", lambda graph: launched.append(replayed(graph))):
            learner.update_from(replay, 8)
        assert len(launched) == 2 and learner.updates == 12

    def test_seeds_and_states_of_torchs_generator_count(self):
        learner = cuda_learner(cuda_graph=True, critic_lr=0.0, actor_lr=0.0, alpha_lr=0.0)
        _, replay = trained(learner, 2)
        seen = []
        torch.cuda.manual_seed(5)
        for _ in range(2):
            seen.append(learner.update_from(replay, 4)["q_target"])
        torch.cuda.manual_seed(5)
        seen.append(learner.update_from(replay, 4)["q_target"])
        state = torch.cuda.get_rng_state()
        seen.append(learner.update_from(replay, 4)["q_target"])
        torch.cuda.set_rng_state(state)
        seen.append(learner.update_from(replay, 4)["q_target"])
        for one, other in ((0, 2), (1, 3), (1, 4)):
            torch.testing.assert_close(seen[one], seen[other], rtol=1e-4, atol=1e-4)
        assert not torch.isclose(seen[0], seen[1], rtol=1e-3).all()

    def test_draws_of_others_come_in_between(self):
        made = []
        for learner in (self.uncaptured(), cuda_learner(cuda_graph=True)):
            _, replay = trained(learner, 1)
            rows = []
            for number in range(10):
                others = torch.randn(100 + number, device="cuda")
                metrics = learner.update_from(replay, 1 + number % 5)
                rows.append(torch.stack([metrics["loss_critic"], metrics["alpha"], others.sum()]))
            made.append(torch.stack(rows).cpu())
        torch.testing.assert_close(made[1], made[0], rtol=1e-3, atol=1e-4)

    def test_a_resumed_run_draws_what_would_have_come(self):
        """Generators as a checkpoint holds them: those of torch, and the replay's own in the replay's state."""
        learner, other = cuda_learner(cuda_graph=True), cuda_learner(cuda_graph=True)
        torch.manual_seed(10)
        replay = filled_replay("cuda", batch_size=256, generator=torch.Generator("cuda").manual_seed(6))
        learner.update_from(replay, 7)
        saved = copy.deepcopy((learner.state_dict(), replay.state_dict(), random_state()))
        expected = learner.update_from(replay, 9)
        again = filled_replay("cuda", batch_size=256, generator=torch.Generator("cuda").manual_seed(7))
        other.update_from(again, 2)
        other.load_state_dict(saved[0])
        again.load_state_dict(saved[1])
        restore_random_state(saved[2])
        got = other.update_from(again, 9)
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("updates", [1, 8])
    def test_no_step_waits_for_the_device(self, updates):
        learner = cuda_learner(cuda_graph=True)
        _, replay = trained(learner, 8, updates=updates)
        batch = make_batch(256).cuda()
        learner.update(batch)
        for _ in range(4):
            learner.update(batch)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(4):
                learner.update_from(replay, updates)
                torch.rand(1, device="cuda")  # the next launch draws elsewhere
            learner.update(batch)
            learner.set_learning_rates(critic=1e-4)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.parametrize("compile", [False, True])
    def test_learning_rates_need_no_new_capture(self, compile):
        learner = cuda_learner(cuda_graph=True, compile=compile)
        _, replay = trained(learner, 2)
        graphs = dict(learner._stepper._graphs)
        learner.set_learning_rates(critic=0.0, actor=0.0, alpha=0.0)
        before = {key: value for key, value in parameters(learner).items() if not key.startswith("target")}
        learner.update_from(replay, 4)
        after = parameters(learner)
        assert_equal(before, {key: after[key] for key in before})
        schedule = LinearLR(learner.critic_optimizer, start_factor=0.5, total_iters=4)
        learner.set_learning_rates(critic=1e-3)
        learner.update_from(replay, 4)
        assert not torch.equal(parameters(learner)[_first_critic_key(after)], after[_first_critic_key(after)])
        schedule.step()
        assert learner._stepper._graphs == graphs

    def test_what_is_written_between_steps_is_seen_by_the_next_one(self):
        learner = cuda_learner(cuda_graph=True, critic_lr=0.0, actor_lr=0.0, alpha_lr=0.0)
        _, replay = trained(learner, 2)
        before = learner.update_from(replay, 4)["q_target"].mean()
        replay.extend_batch(make_run(64, 8, reward=15.0).cuda())
        after = learner.update_from(replay, 4)["q_target"].mean()
        assert after > before + 5

    def test_statistics_of_the_normaliser_are_followed(self):
        learner, other = cuda_learner(cuda_graph=True), self.uncaptured()
        rows = []
        for which in (learner, other):
            _, replay = trained(which, 1)
            which.observe(TensorDict({"observation": torch.linspace(-9, 5, 192, device="cuda").view(64, 3)}, [64]))
            rows.append(trained(which, 2, replay=replay)[0])
        torch.testing.assert_close(rows[0], rows[1], rtol=1e-3, atol=1e-4)

    def test_resumes_from_a_checkpoint(self):
        learner, other = cuda_learner(cuda_graph=True), cuda_learner(cuda_graph=True)
        trained(learner, 3)
        trained(other, 1)
        other.load_state_dict(copy.deepcopy(learner.state_dict()))
        expected, _ = trained(learner, 10, seed=21)
        got, _ = trained(other, 10, seed=21)
        assert other.updates == learner.updates == 52
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)

    def test_metrics_are_owned(self):
        learner = cuda_learner(cuda_graph=True)
        _, replay = trained(learner, 1)
        first = learner.update_from(replay, 4)
        kept = {name: value.clone() for name, value in first.items()}
        learner.update_from(replay, 8)
        assert_equal(first, kept)

    def test_a_replay_on_the_host_is_sampled_before_each_launch(self):
        learner = cuda_learner(cuda_graph=True)
        replay = filled_replay("cpu", batch_size=256)
        replay.sample_device = torch.device("cuda")
        metrics = learner.update_from(replay, 6)
        assert learner.updates == 6 and learner._stepper is not None
        assert all(bool(value.isfinite().all()) for value in metrics.values())

    def test_two_kinds_of_steps_take_turns(self):
        learner = cuda_learner(cuda_graph=True)
        _, replay = trained(learner, 1)
        for size in (256, 64, 256):
            assert len(learner.update(make_batch(size).cuda())["td_error"]) == size
            assert len(learner.update_from(replay, 3)["td_error"]) == 256
        assert all(bool(value.isfinite().all()) for value in parameters(learner).values())


def _first_critic_key(state):
    return next(key for key in state if key.startswith("qvalue"))
