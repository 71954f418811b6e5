# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Collectors: exact successors, flags and episodes, from EnvPool and from any TorchRL environment."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import SerialEnv

from torchrl_ext.collectors import Episode, EpisodeTracker, PackedRunCollector, RunCollector, UniformPolicy
from torchrl_ext.data import SlotReplayBuffer, SlotStorage, TransitionSampler
from torchrl_ext.testing import CountingEnv


class Recorder:
    """A policy of fixed actions that keeps what it was shown."""

    def __init__(self, actions):
        self.actions, self.seen = actions, []

    def __call__(self, tensordict):
        self.seen.append(tensordict.clone())
        return tensordict.set("action", self.actions[len(self.seen) - 1])


def replay_of(collector, *, capacity=64, n_steps=1, gamma=0.5):
    storage = SlotStorage(capacity, num_streams=collector.num_streams, layout=collector.layout)
    return SlotReplayBuffer(storage=storage, sampler=TransitionSampler(n_steps, gamma), batch_size=512)


def rows_of(replay):
    """Every row with its one-step successor, in the order of steps: `[K, N]`."""
    return replay._storage.get(torch.arange(len(replay) // replay._storage.num_streams))


class TestEpisodeTracker:
    """Contract: returns and lengths are those of the episodes that ended, in order; a restart forgets the others."""

    def test_episodes(self):
        tracker = EpisodeTracker(2)
        for step in range(6):
            tracker.add(np.array([1.0, 10.0]), np.array([step % 2 == 1, step == 4]))
        assert tracker.pop() == [
            Episode(0, 2.0, 2),
            Episode(0, 2.0, 2),
            Episode(1, 50.0, 5),
            Episode(0, 2.0, 2),
        ]
        assert tracker.pop() == []

    def test_restart(self):
        tracker = EpisodeTracker(1)
        tracker.add(np.array([5.0]), np.array([False]))
        tracker.restart()
        tracker.add(np.array([1.0]), np.array([True]))
        assert tracker.pop() == [Episode(0, 1.0, 1)]


class TestPackedRunCollector:
    """Contract (case 54): bit for bit what TorchRL's own stepping of the same environment gives; the actor is shown
    the reset observation after an end, the row before it keeps the final one; runs of any length agree."""

    limit, steps, streams = 5, 24, 3

    @pytest.fixture(autouse=True)
    def needs_envpool(self):
        pytest.importorskip("envpool")

    def env(self):
        from torchrl_ext.envs import EnvPoolEnv

        return EnvPoolEnv("Pendulum-v1", num_envs=self.streams, num_threads=1, seed=3, max_episode_steps=self.limit)

    def actions(self):
        return torch.empty(self.steps, self.streams, 1).uniform_(-2.0, 2.0)

    def reference(self, actions):
        env = self.env()
        root, rows = env.reset(), []
        for action in actions:
            row, root = env.step_and_maybe_reset(root.set("action", action))
            rows.append(row)
        env.close()
        return torch.stack(rows)

    @pytest.mark.parametrize("num_steps", [1, 4, 8])
    def test_agrees_with_torchrl_stepping(self, num_steps):
        actions = self.actions()
        expected = self.reference(actions)
        policy = Recorder(actions)
        collector = PackedRunCollector(self.env(), policy, observation_keys=["observation"], num_steps=num_steps)
        replay = replay_of(collector)
        for _ in range(self.steps // num_steps):
            replay.extend_batch(collector.collect())
        collector.close()
        got = rows_of(replay)
        for key in ("observation", "action", ("next", "observation"), ("next", "reward"), ("next", "done")):
            assert torch.equal(got[key], expected[key]), key
        assert got["next", "truncated"].any() and not got["next", "terminated"].any()
        # The actor saw exactly the roots: reset observations after an end, never the final ones.
        seen = torch.stack([shown["observation"] for shown in policy.seen])
        assert torch.equal(seen, expected["observation"])
        ended = expected["next", "done"][:-1, :, 0]
        assert ended.any()
        assert not (seen[1:][ended] == expected["next", "observation"][:-1][ended]).all(-1).any()
        assert collector.rows == self.steps * self.streams
        assert len(collector.episodes.pop()) == self.steps // self.limit * self.streams

    def test_truncated_target_bootstraps_from_the_final_observation(self):
        """r + gamma * V(final) for the row before a time limit: the batch has its true successor and no termination."""
        actions = self.actions()
        expected = self.reference(actions)
        collector = PackedRunCollector(self.env(), Recorder(actions), observation_keys=["observation"], num_steps=8)
        replay = replay_of(collector, n_steps=3)
        for _ in range(3):
            replay.extend_batch(collector.collect())
        collector.close()
        batch = replay.sample()
        at = batch["index"]
        last = at[:, 0] + batch["steps_to_next_obs"][:, 0] - 1
        assert torch.equal(batch["next", "observation"], expected["next", "observation"][last, at[:, 1]])
        cut = batch["next", "truncated"][:, 0]
        assert cut.any() and not batch["next", "terminated"].any()
        assert (last[cut] % self.limit == self.limit - 1).all()

    def test_restart_begins_new_episodes(self):
        collector = PackedRunCollector(
            self.env(), UniformPolicy(self.env().action_spec), observation_keys=["observation"]
        )
        replay = replay_of(collector)
        replay.extend_batch(collector.collect())
        collector.restart()
        replay.end_streams()
        replay.extend_batch(collector.collect())
        collector.close()
        rows = rows_of(replay)
        assert not torch.equal(rows["next", "observation"][0], rows["observation"][1])

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match="num_steps must be >= 1, got 0"):
            PackedRunCollector(self.env(), Recorder([]), observation_keys=["observation"], num_steps=0)
        with pytest.raises(KeyError):
            PackedRunCollector(self.env(), Recorder([]), observation_keys=["pixels"])


class TestRunCollector:
    """Contract: every row of any TorchRL environment has its true successor, across ends, runs and wraps."""

    @pytest.mark.parametrize("ends", ["truncated", "terminated", "both"])
    @pytest.mark.parametrize("num_steps", [1, 4])
    def test_successors(self, num_steps, ends):
        env = CountingEnv(3, [4, 5, 7], ends=ends)
        collector = RunCollector(
            env,
            UniformPolicy(env.action_spec),
            observation_keys=["observation", ("privileged", "code")],
            num_steps=num_steps,
        )
        replay = replay_of(collector, capacity=16)
        for _ in range(40 // num_steps):
            replay.extend_batch(collector.collect())
            batch = replay.sample()
            here = CountingEnv.identity(batch["observation"])
            after = CountingEnv.identity(batch["next", "observation"])
            assert torch.equal(after, here + torch.tensor([0, 0, 1]))
            assert torch.equal(batch["next", "privileged", "code"], CountingEnv.code_of(after))
            assert torch.equal(batch["next", "reward"], CountingEnv.reward_of(here))
        lengths = {(e.stream, e.length) for e in collector.episodes.pop()}
        assert lengths == {(0, 4), (1, 5), (2, 7)}
        assert collector.rows == 120

    def test_done_alone_is_a_termination(self):
        class DoneOnly(CountingEnv):
            def _step(self, tensordict):
                return super()._step(tensordict).exclude("terminated", "truncated")

            def _reset(self, tensordict=None, **kwargs):
                return super()._reset(tensordict, **kwargs).exclude("terminated", "truncated")

        env = DoneOnly(2, 3)
        del env.done_spec["truncated"]
        collector = RunCollector(env, UniformPolicy(env.action_spec), observation_keys=["observation"], num_steps=4)
        run = collector.collect()
        assert torch.equal(run["next", "terminated"], run["next", "done"]) and run["next", "done"].any()
        assert not run["next", "truncated"].any()

    def test_unbatched_environment(self):
        env = SerialEnv(1, lambda: CountingEnv(1, 3))
        with pytest.raises(ValueError, match=r"must have batch size \[n\], got \[1, 1\]"):
            RunCollector(env, Recorder([]), observation_keys=["observation"])

    def test_policy_sees_all_observations_and_nothing_else(self):
        env = CountingEnv(2, 3)
        policy = Recorder([torch.zeros(2, 1)])
        collector = RunCollector(env, policy, observation_keys=["observation"])
        run = collector.collect()
        assert isinstance(run, TensorDict)
        assert set(policy.seen[0].keys(True, True)) == {"observation", ("privileged", "code")}
        assert ("privileged", "code") not in set(run.keys(True, True))


class TestCollected:
    """Contract: what is told of delivered rows is kept within bounds where nobody asks."""

    def test_what_nobody_asks_for_does_not_grow(self):
        from torchrl_ext.collectors import _collected
        from torchrl_ext.collectors._board import EndedEpisodes

        collected, most = _collected.Collected(0), _collected._KEPT
        one = EndedEpisodes(np.ones(1), np.ones(1, np.int64), np.zeros((1, 0)))
        for number in range(most + 10):
            collected.add_episodes(0, np.array([number]), one)
            collected.add_versions(np.array([number]), number, 2)
        episodes, versions = collected.pop_episodes(), collected.pop_versions()
        assert episodes["stream"][[0, -1]].tolist() == [10, most + 9] and len(episodes) == most
        assert list(versions)[0] == 10 and len(versions) == most and set(versions.values()) == {2}
        assert len(collected.pop_episodes()) == 0 and collected.pop_versions() == {}
