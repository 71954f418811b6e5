# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""EnvPoolEnv: the same numbers as single environments, true final observations, a direct path that agrees."""

import builtins
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import Bounded, Categorical, MultiCategorical
from torchrl.envs import SerialEnv
from torchrl.envs.utils import check_env_specs

from torchrl_ext.envs import EnvPoolEnv

envpool = pytest.importorskip("envpool")
# Raw pools of the classic tasks round the bounds of their gymnasium spaces.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting")

NO_LIMIT = 2**31 - 1
SEED = 11
# (task, step limit, options of the single environments): the limit makes many ends in few steps, and the tasks that
# terminate also terminate before it.
FAMILIES = [
    pytest.param("HalfCheetah-v4", 25, id="gym-mujoco"),
    pytest.param("Hopper-v4", 22, id="gym-mujoco-terminates"),
    pytest.param("WalkerWalk-v1", 25, id="dmc"),
    pytest.param("Go1JoystickFlatTerrain-v1", 38, id="playground"),
    pytest.param("Pendulum-v1", 25, id="classic-continuous"),
    pytest.param("CartPole-v1", 20, id="classic-discrete"),
]
FLAGS = ("terminated", "truncated", "done")


def make(task_id, num_envs=3, **kwargs):
    kwargs.setdefault("seed", SEED)
    return EnvPoolEnv(task_id, num_envs=num_envs, num_threads=1, **kwargs)


def observations_of(task_id, raw):
    """The observation keys of a single environment's raw output, float32, first environment."""
    if task_id.startswith("WalkerWalk"):
        parts = [raw["orientations"][0], raw["height"], raw["velocity"][0]]
        return {"observation": np.concatenate(parts).astype(np.float32)}
    raw = raw if isinstance(raw, dict) else {"observation": raw}
    return {key: value[0].astype(np.float32) for key, value in raw.items()}


def actions_for(env, steps):
    """Fixed actions `[steps, n, ...]` in which streams differ."""
    generator = torch.Generator().manual_seed(5)
    n = env.batch_size[0]
    if isinstance(env.action_spec, Categorical):
        return torch.randint(env.action_spec.space.n, (steps, n), generator=generator)
    low, high = env.action_spec.space.low, env.action_spec.space.high
    return low + (high - low) * torch.rand(steps, *env.action_spec.shape, generator=generator)


def single_stream(task_id, seed, actions, limit):
    """One stream by raw EnvPool: no limit in the pool, ends counted here, every reset explicit."""
    pool = envpool.make_gymnasium(task_id, num_envs=1, num_threads=1, seed=[seed], max_episode_steps=NO_LIMIT)
    if "info:terminated" in pool.spec.state_array_spec:  # Playground: the pool's own limit and its own word for it
        pool = envpool.make_gymnasium(task_id, num_envs=1, num_threads=1, seed=[seed], max_episode_steps=limit)
    root = observations_of(task_id, pool.reset()[0])
    steps, rows = 0, []
    for action in actions:
        observation, reward, terminated, truncated, info = pool.step(action.numpy()[None])
        steps += 1
        terminated = bool(info["terminated"][0]) if "terminated" in info else bool(terminated[0])
        truncated = steps == limit
        following = observations_of(task_id, observation)
        rows.append((root, following, reward[0], terminated, truncated))
        root = following
        if terminated or truncated:
            root, steps = observations_of(task_id, pool.reset()[0]), 0
    return rows


def run_torchrl(env, actions):
    """The rows of `step_and_maybe_reset`, stacked time first."""
    root, rows = env.reset(), []
    for action in actions:
        root["action"] = action
        row, root = env.step_and_maybe_reset(root)
        rows.append(row.clone())
    return torch.stack(rows)


def strided_row(env):
    """A row of views into one byte buffer per stream, as a ring has them, plus a key that is none of the env's."""
    fake = env.fake_tensordict()
    keys = [*env.observation_spec.keys(True, True), "action", *(("next", key) for key in ("reward", *FLAGS))]
    buffer = torch.full((env.batch_size[0], 4096), 0x5A, dtype=torch.uint8)
    row, offset = TensorDict({"version": torch.full((env.batch_size[0],), 77)}, batch_size=env.batch_size), 0
    for key in keys:
        leaf = fake[key]
        size = leaf[0].numel() * leaf.element_size()
        view = buffer[:, offset : offset + size].view(leaf.dtype)
        row[key] = view[:, 0] if leaf.ndim == 1 else view
        assert row[key].shape == leaf.shape and row[key].data_ptr() == buffer.data_ptr() + offset
        offset += -(-size // 16) * 16
    return row


def run_step_into(env, actions):
    env.reset()
    row, rows, finals = strided_row(env), [], []
    ways = [row, env.bind_row(row)]
    for step, action in enumerate(actions):
        final = env.step_into(action, ways[step % 2])
        rows.append(row.clone())
        finals.append(final)
    return torch.stack(rows), finals


def natural_length(task_id, actions, stream):
    """Steps until `stream` terminates by itself under `actions`."""
    pool = envpool.make_gymnasium(task_id, num_envs=1, num_threads=1, seed=[SEED + stream], max_episode_steps=NO_LIMIT)
    pool.reset()
    for step, action in enumerate(actions[:, stream], start=1):
        if pool.step(action.numpy()[None])[2][0]:
            return step
    raise AssertionError(f"{task_id} did not terminate within {len(actions)} steps")


class TestSpecs:
    """Contract: specs say the shapes, dtypes, bounds and keys that come."""

    @pytest.mark.parametrize(
        "task_id", ["HalfCheetah-v4", "WalkerWalk-v1", "Go1JoystickFlatTerrain-v1", "Pendulum-v1", "CartPole-v1"]
    )
    def test_torchrl_accepts_the_specs(self, task_id):
        check_env_specs(make(task_id, num_envs=2))

    def test_torchrl_accepts_the_specs_of_pixels_and_discrete_actions(self):
        env = make("Pong-v5", num_envs=1)
        check_env_specs(env)
        assert env.observation_spec["observation"].dtype == torch.uint8
        assert env.observation_spec["observation"].shape == (1, 4, 84, 84)
        assert env.action_spec.space.n == 6

    @pytest.mark.parametrize("task_id", ["FrozenLake-v1", "RubiksCube-v0", "BinPack-v2", "MiniGrid-Empty-5x5-v0"])
    def test_torchrl_accepts_the_specs_of_integers_masks_and_nested_keys(self, task_id):
        check_env_specs(make(task_id, num_envs=2))

    def test_reward_and_ends_have_one_column_per_stream(self):
        env = make("Pendulum-v1", num_envs=3)
        assert env.reward_spec.shape == (3, 1) and env.reward_spec.dtype == torch.float32
        assert {key: tuple(spec.shape) for key, spec in env.full_done_spec.items()} == dict.fromkeys(FLAGS, (3, 1))

    def test_continuous_actions_carry_the_bounds_of_the_task(self):
        spec = make("Humanoid-v4", num_envs=2).action_spec
        assert isinstance(spec, Bounded) and spec.dtype == torch.float32 and spec.shape == (2, 17)
        assert torch.equal(spec.space.high, torch.full((2, 17), 0.4))
        assert torch.equal(spec.space.low, torch.full((2, 17), -0.4))

    def test_a_discrete_action_is_one_categorical_per_stream(self):
        spec = make("CartPole-v1", num_envs=3).action_spec
        assert type(spec) is Categorical and spec.shape == (3,) and spec.space.n == 2

    def test_several_discrete_actions_are_multi_categorical(self):
        spec = make("RubiksCube-v0", num_envs=3).action_spec
        assert isinstance(spec, MultiCategorical) and spec.shape[0] == 3

    def test_dmc_is_concatenated_by_default_in_the_order_of_declaration(self):
        flat, apart = make("WalkerWalk-v1", num_envs=2), make("WalkerWalk-v1", num_envs=2, flatten_obs=False)
        parts = apart.reset()
        expected = torch.cat([parts["orientations"], parts["height"], parts["velocity"]], -1)
        assert parts["height"].shape == (2, 1)
        assert torch.equal(flat.reset()["observation"], expected)

    def test_playground_keeps_its_names_unless_asked_to_concatenate(self):
        apart, flat = make("Go1JoystickFlatTerrain-v1", 1), make("Go1JoystickFlatTerrain-v1", 1, flatten_obs=True)
        parts = apart.reset()
        assert set(apart.observation_spec.keys()) == {"state", "privileged_state"}
        expected = torch.cat([parts["state"], parts["privileged_state"]], -1)
        assert torch.equal(flat.reset()["observation"], expected)

    def test_float64_is_kept_when_asked_for(self):
        wide, narrow = make("HalfCheetah-v4", dtype=torch.float64), make("HalfCheetah-v4")
        assert wide.action_spec.dtype == torch.float64
        assert torch.equal(wide.reset()["observation"].float(), narrow.reset()["observation"])

    def test_options_reach_the_task(self):
        skip = {"frame_skip": 1}
        slow, fast = make("HalfCheetah-v4", options=skip), make("HalfCheetah-v4")
        action = actions_for(slow, 1)
        slow, fast = run_torchrl(slow, action), run_torchrl(fast, action)
        assert torch.equal(slow["observation"], fast["observation"])
        assert not torch.equal(slow["next", "observation"], fast["next", "observation"])


@pytest.mark.parametrize(("task_id", "limit"), FAMILIES)
class TestAgainstSingleEnvironments:
    """Contract: stream i is the single environment of seed + i, row for row (case 54)."""

    def test_every_row_of_every_stream_is_a_true_transition(self, task_id, limit):
        """case 54"""
        env = make(task_id, max_episode_steps=limit)
        actions = actions_for(env, 110)
        rows = run_torchrl(env, actions)
        ends = 0
        for stream in range(3):
            expected = single_stream(task_id, SEED + stream, actions[:, stream], limit)
            for step, (root, following, reward, terminated, truncated) in enumerate(expected):
                row = rows[step, stream]
                for key in root:
                    np.testing.assert_array_equal(row[key].numpy(), root[key], err_msg=f"root {key} {step=}")
                    np.testing.assert_array_equal(row["next", key].numpy(), following[key], err_msg=f"{key} {step=}")
                assert row["next", "reward"].item() == reward
                flags = [row["next", key].item() for key in FLAGS]
                assert flags == [terminated, truncated, terminated or truncated], f"{step=} {stream=}"
                ends += terminated or truncated
        assert ends >= 6

    def test_the_final_observation_is_not_the_next_root(self, task_id, limit):
        """case 54"""
        env = make(task_id, max_episode_steps=limit)
        rows = run_torchrl(env, actions_for(env, limit + 1))
        done = rows["next", "done"][:-1].squeeze(-1)
        assert done.any()
        for key in env.observation_spec.keys(True, True):
            same = (rows["next", key][:-1] == rows[key][1:]).flatten(2).all(-1)
            assert torch.equal(same, ~done), key

    def test_step_into_agrees_bit_for_bit(self, task_id, limit):
        one, other = make(task_id, max_episode_steps=limit), make(task_id, max_episode_steps=limit)
        actions = actions_for(one, 110)
        rows = run_torchrl(one, actions)
        direct, finals = run_step_into(other, actions)
        keys = list(one.observation_spec.keys(True, True))
        for key in [*keys, "action", ("next", "reward"), *(("next", flag) for flag in FLAGS)]:
            assert torch.equal(direct[key], rows[key]), key
        for step, final in enumerate(finals):
            ended = rows[step]["next", "done"].squeeze(-1).nonzero().squeeze(-1)
            assert (final is None) == (len(ended) == 0)
            if final is not None:
                assert torch.equal(final.streams, ended)
                for key in keys:
                    assert torch.equal(final.observations[key], rows[step]["next", key][ended]), key


class TestEnds:
    """Contract: terminated and truncated are told apart, both may be true; an ended stream is reset before it steps."""

    @pytest.mark.parametrize("task_id", ["CartPole-v1", "Hopper-v4", "Go1JoystickFlatTerrain-v1"])
    def test_a_termination_on_the_limit_step_is_both(self, task_id):
        actions = actions_for(make(task_id), 150)
        length = natural_length(task_id, actions, stream=1)
        rows = run_torchrl(make(task_id, max_episode_steps=length), actions[:length])
        assert [rows["next", flag][-1, 1].item() for flag in FLAGS] == [True, True, True]

    @pytest.mark.parametrize("task_id", ["CartPole-v1", "Hopper-v4", "Go1JoystickFlatTerrain-v1"])
    def test_a_termination_before_the_limit_is_no_truncation(self, task_id):
        actions = actions_for(make(task_id), 150)
        length = natural_length(task_id, actions, stream=1)
        rows = run_torchrl(make(task_id, max_episode_steps=length + 1), actions[:length])
        assert [rows["next", flag][-1, 1].item() for flag in FLAGS] == [True, False, True]

    def test_a_dmc_time_limit_is_no_termination(self):
        """case 54"""
        rows = run_torchrl(make("WalkerWalk-v1", max_episode_steps=5), torch.zeros(10, 3, 6))
        assert rows["next", "truncated"][:, 0, 0].nonzero().flatten().tolist() == [4, 9]
        assert not rows["next", "terminated"].any()

    def test_the_limit_is_that_of_the_task_by_default(self):
        assert make("Pendulum-v1").max_episode_steps == 200
        assert make("WalkerWalk-v1").max_episode_steps == 1000
        assert make("Blackjack-v1").max_episode_steps == NO_LIMIT

    def test_a_limit_that_stays_in_the_pool_truncates_too(self):
        rows = run_torchrl(make("Pong-v5", num_envs=1, max_episode_steps=2), torch.zeros(4, 1, dtype=torch.int64))
        assert rows["next", "truncated"][:, 0, 0].tolist() == [False, True, False, True]
        assert not rows["next", "terminated"].any()

    def test_an_ended_stream_must_be_reset_before_it_is_stepped(self):
        env = make("Pendulum-v1", max_episode_steps=1)
        data = env.step(env.reset().set("action", torch.zeros(3, 1)))
        with pytest.raises(RuntimeError, match=r"EnvPoolEnv.step: streams must be reset .*ended streams \[0, 1, 2\]"):
            env.step(data)
        with pytest.raises(RuntimeError, match=r"EnvPoolEnv.step_into: streams must be reset"):
            env.step_into(torch.zeros(3, 1), strided_row(env))

    def test_a_reset_mask_restarts_its_streams_alone(self):
        env = make("Pendulum-v1", max_episode_steps=3)
        start = env.reset()
        middle = env.step(start.clone().set("action", torch.ones(3, 1)))["next"]
        mask = torch.tensor([[False], [True], [False]])
        after = env.reset(middle.clone().set("_reset", mask))
        assert torch.equal(after["observation"][::2], middle["observation"][::2])
        assert not torch.equal(after["observation"][1], middle["observation"][1])
        # Its clock starts again, those of the others go on.
        for ends in ([False, False, False], [True, False, True]):
            after = env.step(after.set("action", torch.ones(3, 1)))["next"]
            assert after["truncated"].squeeze(-1).tolist() == ends

    def test_an_empty_reset_mask_restarts_nothing(self):
        env = make("Pendulum-v1")
        start = env.reset()
        after = env.reset(start.clone().set("_reset", torch.zeros(3, 1, dtype=torch.bool)))
        assert torch.equal(after["observation"], start["observation"])

    def test_a_rollout_until_all_are_done_leaves_the_ended_streams_alone(self):
        env = make("CartPole-v1", max_episode_steps=60)
        rows = env.rollout(60, break_when_any_done=False, break_when_all_done=True)
        lengths = [int(rows["next", "done"][stream].flatten().nonzero()[0]) + 1 for stream in range(3)]
        assert rows.shape == (3, max(lengths))
        shortest = lengths.index(min(lengths))
        assert min(lengths) < max(lengths), "the seed must make streams of different lengths"
        # TorchRL repeats the last row of an ended stream.
        tail = rows[shortest, min(lengths) - 1 :]["next", "observation"]
        assert torch.equal(tail, tail[:1].expand_as(tail))


class TestSeeds:
    """Contract: seed + stream id; the same seed gives the same streams, no two streams are alike."""

    def test_the_same_seed_gives_the_same_streams(self):
        one, other = make("Hopper-v4", max_episode_steps=20), make("Hopper-v4", max_episode_steps=20)
        actions = actions_for(one, 60)
        assert (run_torchrl(one, actions) == run_torchrl(other, actions)).all()

    @pytest.mark.parametrize("task_id", ["HalfCheetah-v4", "WalkerWalk-v1", "Go1JoystickFlatTerrain-v1", "CartPole-v1"])
    def test_no_two_streams_are_alike(self, task_id):
        env = make(task_id, num_envs=5)
        key = next(iter(env.observation_spec.keys(True, True)))
        assert len(env.reset()[key].unique(dim=0)) == 5

    def test_streams_are_shifted_by_the_base_seed(self):
        one, other = make("Pendulum-v1", seed=40).reset(), make("Pendulum-v1", seed=41).reset()
        assert torch.equal(one["observation"][1:], other["observation"][:2])

    def test_the_number_of_threads_does_not_matter(self):
        one = make("HalfCheetah-v4", num_envs=4)
        two = EnvPoolEnv("HalfCheetah-v4", num_envs=4, num_threads=2, thread_affinity_offset=0, seed=SEED)
        actions = actions_for(one, 20)
        assert (run_torchrl(one, actions) == run_torchrl(two, actions)).all()

    def test_set_seed_starts_the_streams_of_that_seed(self):
        env, fresh = make("Pendulum-v1", seed=1), make("Pendulum-v1", seed=9)
        env.reset()
        env.set_seed(9)
        assert torch.equal(env.reset()["observation"], fresh.reset()["observation"])

    def test_set_seed_returns_the_next_seed(self):
        env = make("Pendulum-v1")
        assert env.set_seed(9) not in (9, None)
        assert env.set_seed(9, static_seed=True) == 9

    def test_seeds_of_torchrl_beyond_int32_are_taken(self):
        env = make("Pendulum-v1", seed=2**32 - 1)
        assert len(env.reset()["observation"].unique(dim=0)) == 3

    def test_without_a_seed_torchs_generator_decides(self):
        torch.manual_seed(3)
        one, other = make("Pendulum-v1", seed=None), make("Pendulum-v1", seed=None)
        torch.manual_seed(3)
        again = make("Pendulum-v1", seed=None)
        assert not torch.equal(one.reset()["observation"], other.reset()["observation"])
        one.set_seed(None), again.set_seed(None)
        assert not torch.equal(one.reset()["observation"], again.reset()["observation"])

    def test_a_later_reset_of_all_draws_new_starts(self):
        env = make("Pendulum-v1")
        assert not torch.equal(env.reset()["observation"], env.reset()["observation"])


class TestStepInto:
    """Contract: writes what the row has, nothing else; what it returns is owned; ordinary steps may follow."""

    def test_the_policy_sees_the_reset_observation_after_an_end(self):
        env, other = make("Pendulum-v1", max_episode_steps=2), make("Pendulum-v1", max_episode_steps=2)
        rows = run_torchrl(other, torch.zeros(3, 3, 1))
        env.reset()
        row = strided_row(env)
        for step in range(2):
            env.step_into(torch.zeros(3, 1), row)
            assert torch.equal(env.current_observation()["observation"], rows["observation"][step + 1])

    def test_other_keys_of_the_row_are_left_alone(self):
        env = make("Pendulum-v1")
        env.reset()
        row = strided_row(env)
        env.step_into(torch.zeros(3, 1), row)
        assert row["version"].tolist() == [77, 77, 77]

    @pytest.mark.parametrize("missing", ["observation", "action", "next", ("next", "reward"), ("next", "done")])
    def test_keys_that_the_row_lacks_are_skipped(self, missing):
        env, whole_env = make("Pendulum-v1"), make("Pendulum-v1")
        env.reset(), whole_env.reset()
        part, whole = strided_row(env).exclude(missing), strided_row(whole_env)
        env.step_into(torch.ones(3, 1), part)
        whole_env.step_into(torch.ones(3, 1), whole)
        assert (part == whole.exclude(missing)).all()

    def test_a_next_observation_in_the_row_is_the_true_successor(self):
        env, other = make("Pendulum-v1", max_episode_steps=1), make("Pendulum-v1", max_episode_steps=1)
        rows = run_torchrl(other, torch.ones(1, 3, 1))
        env.reset()
        row = strided_row(env)
        row["next", "observation"] = torch.zeros(3, 3)
        env.step_into(torch.ones(3, 1), row)
        assert torch.equal(row["next", "observation"], rows["next", "observation"][0])

    def test_a_row_bound_by_another_environment_is_refused(self):
        env, other = make("Pendulum-v1"), make("Pendulum-v1")
        env.reset()
        with pytest.raises(ValueError, match=r"row must be bound by the environment that steps, .*; nothing was stepp"):
            env.step_into(torch.zeros(3, 1), other.bind_row(strided_row(other)))

    def test_binding_a_wrong_row_is_refused(self):
        env = make("Pendulum-v1")
        row = strided_row(env)
        row["observation"] = torch.zeros(3, 3, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"row key 'observation' must have shape \[3, 3\] and dtype torch.float32"):
            env.bind_row(row)

    def test_an_action_that_is_a_view_of_the_row_is_taken(self):
        env = make("Pendulum-v1")
        env.reset()
        row = strided_row(env)
        row["action"].fill_(0.5)
        env.step_into(row["action"], row)
        assert row["action"].flatten().tolist() == [0.5, 0.5, 0.5]

    def test_an_action_with_a_gradient_is_taken(self):
        env = make("Pendulum-v1")
        env.reset()
        row = strided_row(env)
        env.step_into(torch.zeros(3, 1, requires_grad=True), row)
        assert not row["action"].requires_grad

    def test_finals_are_not_overwritten_by_later_steps(self):
        env = make("Pendulum-v1", max_episode_steps=1)
        env.reset()
        row = strided_row(env)
        finals = env.step_into(torch.zeros(3, 1), row)
        before = finals.observations.clone()
        env.step_into(torch.zeros(3, 1), row)
        assert finals.streams.dtype == torch.int64 and finals.observations.batch_size == (3,)
        assert (finals.observations == before).all()

    def test_an_ordinary_step_goes_on_from_the_current_observation(self):
        env, other = make("HalfCheetah-v4", max_episode_steps=3), make("HalfCheetah-v4", max_episode_steps=3)
        actions = actions_for(env, 8)
        rows = run_torchrl(other, actions)
        env.reset()
        for action in actions[:5]:
            env.step_into(action, strided_row(env))
        root = env.current_observation().clone()
        for step in (5, 6, 7):
            row, root = env.step_and_maybe_reset(root.set("action", actions[step]))
            assert torch.equal(row["next", "observation"], rows["next", "observation"][step])
            assert torch.equal(row["observation"], rows["observation"][step])

    def test_step_into_goes_on_from_ordinary_steps(self):
        env, other = make("HalfCheetah-v4", max_episode_steps=3), make("HalfCheetah-v4", max_episode_steps=3)
        actions = actions_for(env, 5)
        rows = run_torchrl(other, actions)
        run_torchrl(env, actions[:4])
        row = strided_row(env)
        env.step_into(actions[4], row)
        assert torch.equal(row["observation"], rows["observation"][4])


class TestOwnership:
    """Contract: what reset and step return is never written again."""

    def test_later_steps_and_resets_leave_returned_data_alone(self):
        env = make("HalfCheetah-v4", max_episode_steps=4)
        actions = actions_for(env, 12)
        kept, copies, root = [], [], env.reset()
        for action in actions:
            row, root = env.step_and_maybe_reset(root.set("action", action))
            kept.append(row), copies.append(row.clone())
        for action in actions:
            env.step_into(action, strided_row(env))
        assert all((row == copy).all() for row, copy in zip(kept, copies, strict=True))


class TestLifetime:
    """Contract: the pool opens at the first reset; close may be called twice; factories work."""

    def test_close_may_be_called_twice_and_reset_opens_again(self):
        env = make("Pendulum-v1")
        first = env.reset()
        env.close()
        env.close()
        assert env.is_closed
        assert torch.equal(env.reset()["observation"], first["observation"])
        assert not env.is_closed

    def test_no_pool_is_opened_before_the_first_reset(self, monkeypatch):
        def refuse(*args, **kwargs):
            raise AssertionError("a pool was opened")

        monkeypatch.setattr(envpool, "make_gymnasium", refuse)
        env = make("HalfCheetah-v4")
        env.set_seed(0)
        env.fake_tensordict()
        env.close()

    def test_a_collector_drives_it_from_a_factory(self):
        collector = Collector(
            lambda: make("CartPole-v1", max_episode_steps=10), None, frames_per_batch=60, total_frames=120
        )
        try:
            batches = [batch.clone() for batch in collector]
        finally:
            collector.shutdown()
        assert [batch.shape for batch in batches] == [(3, 20), (3, 20)]
        assert batches[0]["next", "done"].any()

    def test_it_nests_in_torchrls_batched_environments(self):
        env = SerialEnv(2, lambda: make("Pendulum-v1", max_episode_steps=3))
        assert env.rollout(4, break_when_any_done=False)["next", "reward"].shape == (2, 3, 4, 1)
        env.close()

    def test_it_says_what_it_is(self):
        assert repr(make("Pendulum-v1")) == "EnvPoolEnv('Pendulum-v1', num_envs=3, device=cpu)"


class TestErrors:
    """Contract: one sentence: where, what must hold, what came, what is unchanged or what to do."""

    def test_an_unknown_task_names_close_ones(self):
        with pytest.raises(ValueError, match=r"task_id must be a task of EnvPool .*'HalfCheeta-v4'.*'HalfCheetah-v4'"):
            make("HalfCheeta-v4")

    def test_a_task_like_no_other_is_told_where_the_names_are(self):
        with pytest.raises(ValueError, match=r"'qqqq-qq'; envpool.list_all_envs\(\) names them all"):
            make("qqqq-qq")

    @pytest.mark.parametrize(
        ("name", "value", "least"),
        [
            ("num_envs", 0, 1),
            ("num_envs", 2.0, 1),
            ("num_threads", 0, 1),
            ("max_episode_steps", 0, 1),
            ("thread_affinity_offset", -1, 0),
        ],
    )
    def test_a_count_out_of_range_is_named(self, name, value, least):
        arguments = {"num_envs": 2, "num_threads": 1} | {name: value}
        with pytest.raises(ValueError, match=f"EnvPoolEnv: {name} must be an int >= {least}, got {value}; no pool"):
            EnvPoolEnv("Pendulum-v1", **arguments)

    def test_a_half_precision_dtype_is_refused(self):
        with pytest.raises(ValueError, match=r"dtype must be torch.float32 or torch.float64, got torch.bfloat16"):
            make("Pendulum-v1", dtype=torch.bfloat16)

    def test_an_unknown_option_lists_the_known_ones(self):
        with pytest.raises(ValueError, match=r"options must be options of .*'frame_skp'.*'frame_skip'"):
            make("HalfCheetah-v4", options={"frame_skp": 2})

    @pytest.mark.parametrize(("name", "keyword"), [("seed", "seed"), ("env_seed", "seed"), ("batch_size", "num_envs")])
    def test_an_option_that_is_a_keyword_names_the_keyword(self, name, keyword):
        with pytest.raises(ValueError, match=f"options must not hold '{name}', which is the keyword '{keyword}'"):
            make("HalfCheetah-v4", options={name: 3})

    def test_a_task_of_several_players_is_refused(self):
        with pytest.raises(ValueError, match=r"'Go9x9-v1' must have one player .* got 2 players"):
            make("Go9x9-v1")

    def test_flattening_pixels_is_refused(self):
        with pytest.raises(ValueError, match=r"flatten_obs=True needs floating observations, got .*uint8.*'Pong-v5'"):
            make("Pong-v5", flatten_obs=True)

    @pytest.mark.parametrize(
        ("task_id", "action"),
        [
            ("Pendulum-v1", torch.zeros(3)),
            ("Pendulum-v1", torch.zeros(2, 1)),
            ("Pendulum-v1", torch.zeros(3, 1, dtype=torch.float64)),
            ("CartPole-v1", torch.zeros(3)),
            ("CartPole-v1", torch.zeros(3, 1, dtype=torch.int64)),
        ],
    )
    def test_a_wrong_action_steps_nothing(self, task_id, action):
        env, other = make(task_id), make(task_id)
        start = env.reset()
        other.reset()
        row = strided_row(env)
        before = row.clone()
        with pytest.raises(ValueError, match=r'EnvPoolEnv: "action" must have shape .* and dtype .*; no stream was'):
            env.step_into(action, row)
        assert (row == before).all()
        assert torch.equal(env.current_observation()["observation"], start["observation"])
        good = env.action_spec.zero()
        env.step_into(good, row)
        other.step_into(good, before)
        assert (row == before).all()

    def test_step_refuses_a_wrong_action(self):
        env = make("Pendulum-v1")
        with pytest.raises(ValueError, match=r'"action" must have shape \[3, 1\] and dtype torch.float32, got \[3\]'):
            env.step(env.reset().set("action", torch.zeros(3)))

    @pytest.mark.parametrize(
        ("key", "leaf"),
        [
            ("observation", torch.zeros(3, 4)),
            ("action", torch.zeros(3, 1, dtype=torch.float64)),
            (("next", "reward"), torch.zeros(3)),
            (("next", "done"), torch.zeros(3, 1)),
        ],
    )
    def test_a_wrong_leaf_of_the_row_steps_and_writes_nothing(self, key, leaf):
        env = make("Pendulum-v1")
        start = env.reset()
        row = strided_row(env)
        row[key] = leaf
        before = row.clone()
        with pytest.raises(ValueError, match=r"step_into: row key .* must have shape .*; nothing was stepped or writ"):
            env.step_into(torch.ones(3, 1), row)
        assert (row == before).all()
        assert torch.equal(env.current_observation()["observation"], start["observation"])

    @pytest.mark.parametrize("after", ["construction", "set_seed", "close"])
    def test_step_into_needs_a_reset_first(self, after):
        env = make("Pendulum-v1")
        row = strided_row(env)
        if after != "construction":
            env.reset()
            env.set_seed(1) if after == "set_seed" else env.close()
        with pytest.raises(RuntimeError, match=r"EnvPoolEnv.step_into: all streams must have been reset .* call reset"):
            env.step_into(torch.zeros(3, 1), row)

    def test_the_other_calls_need_a_reset_first_too(self):
        env = make("Pendulum-v1")
        with pytest.raises(RuntimeError, match=r"EnvPoolEnv.current_observation: all streams must have been reset"):
            env.current_observation()
        with pytest.raises(RuntimeError, match=r"EnvPoolEnv.step: all streams must have been reset"):
            env.step(TensorDict({"action": torch.zeros(3, 1)}, batch_size=[3]))
        mask = torch.tensor([[True], [False], [False]])
        with pytest.raises(RuntimeError, match=r"EnvPoolEnv.reset: all streams must have been reset"):
            env.reset(TensorDict({"_reset": mask}, batch_size=[3]))

    def test_a_missing_envpool_names_the_extra(self, monkeypatch):
        real = builtins.__import__

        def missing(name, *args, **kwargs):
            if name == "envpool":
                raise ModuleNotFoundError("No module named 'envpool'")
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", missing)
        with pytest.raises(ImportError, match=r"No module named 'envpool'; install it with `pip install torchrl_ext\["):
            make("Pendulum-v1")

    def test_an_old_envpool_is_refused(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "envpool", SimpleNamespace(__version__="1.2.4"))
        with pytest.raises(ImportError, match=r"EnvPool must be >= 1.2.5 .*, got 1.2.4; upgrade it"):
            make("Pendulum-v1")
