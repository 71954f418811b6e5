# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Windows of consecutive steps: where they may start, what they hold, and in which order fresh ones come.

``steps(first, count)`` writes ``1000 * stream + step`` into every field, so a row names itself; random programs run
against the list model of ``_reference.py``.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.multiprocessing as mp
from _host_sync import NoHostSync
from _reference import flat_rows, state_bytes
from hypothesis import HealthCheck, given, settings
from tensordict import TensorDict
from test_replay_device import books_on_the_device, gpu
from test_replay_model import Config, Empty, EndStreams, Machine, Run, Save, chi_square, chi_square_limit, programs
from torchrl.data import ReplayBuffer

from torchrl_ext.data import RowLayout, SequenceSampler, SlotReplayBuffer, SlotStorage, SlotWriter, _fused
from torchrl_ext.data._episode_windows import draw_within_episodes, episode_starts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # torchrl's wheel installs a ``benchmarks`` as well

from benchmarks.cases import sequences

FLAGS = ("done", "terminated", "truncated")
LAYOUTS = pytest.mark.parametrize("layout", ["derive", "store", "no next keys"])
BOOKS = pytest.mark.parametrize("books", [contextlib.nullcontext, books_on_the_device], ids=["host", "device"])


def steps(first: int, count: int, num_streams: int = 1, *, start: int = 0, **flags: list[int]) -> TensorDict:
    """[count, N]: step t of stream n is the number ``1000 (start + n) + t`` everywhere, its successor one more.

    ``flags`` lists the steps where a flag is raised, in all streams; there the successor is the negative number.
    """
    clock = torch.arange(first, first + count).reshape(count, 1, 1)
    clock = clock + 1000 * torch.arange(start, start + num_streams).reshape(1, -1, 1)
    out = TensorDict({"id": clock, "observation": clock.float().expand(-1, -1, 3)}, [count, num_streams])
    ended = torch.zeros(count, num_streams, 1, dtype=torch.bool)
    for name in FLAGS:
        raised = torch.tensor([t in flags.get(name, []) for t in range(first, first + count)])
        out["next", name] = raised.reshape(count, 1, 1).expand(count, num_streams, 1)
        ended |= out["next", name]
    out["next", "observation"] = torch.where(ended, -out["observation"], out["observation"] + 1)
    out["next", "reward"] = clock.float()
    return out


def records(first: int, count: int, num_streams: int = 1, **flags: list[int]) -> TensorDict:
    """The same as DreamerV3 keeps it: no root observation, what a step returned lies under ``next``."""
    out = steps(first, count, num_streams, **flags)
    out["state"] = out["observation"].clone()
    out["next", "pixels"] = out["id"].remainder(251).to(torch.uint8).unsqueeze(-1).expand(-1, -1, 2, 2)
    return out.exclude("observation", ("next", "observation"))


def make(
    seq_len: int, capacity: int, num_streams: int = 1, *, layout: str = "derive", seed: int = 0, **options: Any
) -> SlotReplayBuffer:
    sampler_options = {name: options.pop(name) for name in ("strict_episodes", "online", "flat") if name in options}
    place = {name: options.pop(name) for name in ("device", "shared", "filename") if name in options}
    storage = SlotStorage(
        capacity,
        num_streams,
        next_obs="derive" if layout == "derive" else "store",
        final_capacity=capacity + 1,
        **place,
    )
    return SlotReplayBuffer(
        storage=storage,
        sampler=SequenceSampler(seq_len, **sampler_options),
        generator=torch.Generator().manual_seed(seed),
        **options,
    )


def write(buffer: SlotReplayBuffer, first: int, count: int, **flags: list[int]) -> None:
    buffer.extend_batch(steps(first, count, buffer.storage.num_streams, **flags))


def filled(layout: str, seq_len: int, capacity: int, heads: list[int], **options: Any) -> SlotReplayBuffer:
    """Streams that were written up to different heads, one step at a time where they differ."""
    buffer = make(seq_len, capacity, len(heads), layout=layout, **options)
    source = records if layout == "no next keys" else steps
    low = min(heads)
    buffer.extend_batch(source(0, low, len(heads)))
    for n, head in enumerate(heads):
        if head > low:
            run = source(low, head - low, len(heads))[:, n : n + 1]
            buffer.extend_batch(run, streams=slice(n, n + 1))
    return buffer


def starts_of(sample: TensorDict, capacity: int) -> list[tuple[int, int]]:
    """(stream, first step) of each window of a batch ``[B, T]``, after checking that its rows follow each other."""
    slot, stream = sample["index"].unbind(-1)
    step = sample["index_generation"] * capacity + slot
    assert sample["index"].dtype == sample["index_generation"].dtype == torch.int64
    assert bool((step[:, 1:] - step[:, :-1] == 1).all()), "a window skips a step"
    assert bool((stream == stream[:, :1]).all()), "a window changes its stream"
    return list(zip(stream[:, 0].tolist(), step[:, 0].tolist(), strict=True))


def draw_starts(buffer: SlotReplayBuffer, windows: int) -> list[tuple[int, int]]:
    sample = buffer.sample(windows * buffer.sampler.seq_len)
    return starts_of(sample, buffer.storage.capacity)


def starts_between(low: int, high: int, seq_len: int, streams: range) -> set[tuple[int, int]]:
    return {(n, step) for n in streams for step in range(low, high - seq_len + 1)}


class TestWindows:
    """Contract: the rows of a window are consecutive steps of one stream that all live; every such window is drawn,
    uniformly and independently."""

    @LAYOUTS
    @BOOKS
    @pytest.mark.parametrize("heads", [[29, 29, 29], [29, 33, 50]], ids=["in step", "uneven"])
    def test_every_row_of_a_window_is_the_next_step_of_its_stream(self, layout, books, heads):
        with books():
            buffer = filled(layout, 4, 10, heads)
            sample = buffer.sample(4 * 400)
            assert sample.batch_size == (400, 4)
            starts = torch.tensor(starts_of(sample, 10))
            expected = 1000 * starts[:, :1] + starts[:, 1:] + torch.arange(4)
            assert torch.equal(sample["id"].squeeze(-1), expected)
            assert torch.equal(sample["next", "reward"].squeeze(-1), expected.float())

    @LAYOUTS
    @BOOKS
    @pytest.mark.parametrize("heads", [[7, 7], [10, 10], [29, 29], [12, 47]])
    @pytest.mark.parametrize("seq_len", [1, 3, 7])
    def test_a_window_never_crosses_the_head_or_the_tail_and_every_start_is_drawn(self, layout, books, heads, seq_len):
        with books():
            buffer = filled(layout, seq_len, 10, heads)
            expected = set()
            for n, head in enumerate(heads):
                expected |= starts_between(max(head - 10, 0), head, seq_len, range(n, n + 1))
            assert set(draw_starts(buffer, 40 * len(expected))) == expected
            assert buffer.sampler._sampleable_count(buffer.storage, seq_len) == len(expected)

    @LAYOUTS
    @BOOKS
    def test_a_window_may_be_as_long_as_the_ring(self, layout, books):
        with books():
            buffer = filled(layout, 10, 10, [13, 27])
            assert set(draw_starts(buffer, 60)) == {(0, 3), (1, 17)}

    @BOOKS
    def test_the_last_row_of_a_window_has_a_known_successor(self, books):
        """Packed runs without a tail: the newest row waits for its successor, unless it ends an episode."""
        with books():
            buffer = make(3, 8, 3)
            buffer.extend_batch(steps(0, 4, 3))
            bare = steps(4, 2, 3, terminated=[5], done=[5]).exclude(("next", "observation"))
            for name in ("terminated", "done"):  # in the last stream only
                bare["next", name] = bare["next", name] & torch.tensor([False, False, True]).reshape(1, 3, 1)
            buffer.extend_batch(buffer.storage.layout.pack(bare))
            expected = starts_between(0, 5, 3, range(2)) | starts_between(0, 6, 3, range(2, 3))
            assert set(draw_starts(buffer, 400)) == expected

    @BOOKS
    def test_newest_rows_alone_can_be_a_window(self, books):
        """Streams in step where only some have one start, and it is the one that ends at the newest row."""
        with books():
            buffer = make(4, 8, 2)
            layout = RowLayout.from_tensordict(steps(0, 1, 1))
            bare = steps(0, 4, 2, terminated=[3]).exclude(("next", "observation"))
            bare["next", "terminated"] = bare["next", "terminated"] & torch.tensor([False, True]).reshape(1, 2, 1)
            buffer.extend_batch(layout.pack(bare))
            assert set(draw_starts(buffer, 20)) == {(1, 0)}

    @BOOKS
    def test_no_window_holds_a_row_that_was_cut_before_its_successor_was_known(self, books):
        with books():
            buffer = make(3, 12, 2)
            layout = RowLayout.from_tensordict(steps(0, 1, 1))
            for first, count in ((0, 4), (4, 5), (9, 2)):
                buffer.extend_batch(layout.pack(steps(first, count, 2).exclude(("next", "observation"))))
                buffer.end_streams(slice(0, 1))
            # Stream 0 has holes at 3, 8 and 10; stream 1 lacks the successor of step 10 only.
            expected = {(0, 0), *starts_between(4, 8, 3, range(1)), *starts_between(0, 10, 3, range(1, 2))}
            sample = buffer.sample(3 * 2000)
            assert set(starts_of(sample, 12)) == expected
            assert torch.equal(sample["next", "observation"], sample["observation"] + 1)
            write(buffer, 11, 3)
            starts = set(draw_starts(buffer, 2000))
            assert {start for start in starts if start[0] == 0} == {(0, 4), (0, 5), (0, 11)}

    def test_draws_are_uniform_over_the_starts_of_uneven_streams(self):
        buffer = filled("derive", 5, 16, [6, 21, 9, 17, 40], seed=7)
        expected = {(n, step) for n, (low, high) in enumerate([(0, 6), (5, 21), (0, 9), (1, 17), (24, 40)])
                    for step in range(low, high - 4)}  # fmt: skip
        cells = Counter(draw_starts(buffer, 60_000))
        mean = 60_000 / len(expected)
        assert chi_square(cells, dict.fromkeys(expected, mean)) < chi_square_limit(len(expected) - 1)

    def test_draws_follow_each_other_independently(self):
        buffer = filled("derive", 5, 16, [6, 21, 9], seed=8)
        drawn = draw_starts(buffer, 60_000)
        size = Counter()
        for stream, count in ((0, 2), (1, 12), (2, 5)):
            size[stream] = count
        pairs = Counter((a[0], b[0]) for a, b in zip(drawn[::2], drawn[1::2], strict=True))
        expected = {(a, b): 30_000 * size[a] * size[b] / 19**2 for a in size for b in size}
        assert chi_square(pairs, expected) < chi_square_limit(len(expected) - 1)

    @pytest.mark.parametrize("heads", [[29, 29], [29, 33]])
    @pytest.mark.parametrize("strict_episodes", [False, True])
    def test_same_generator_state_draws_the_same_batch(self, heads, strict_episodes):
        first, second = (filled("derive", 4, 10, heads, strict_episodes=strict_episodes, seed=3) for _ in range(2))
        drawn = flat_rows(first.sample(80))
        assert flat_rows(second.sample(80)) == drawn
        assert flat_rows(second.sample(80)) != drawn

    def test_batch_names_its_rows(self):
        buffer = filled("derive", 4, 10, [29, 33])
        sample, info = buffer.sample(80, return_info=True)
        assert sample["index"].shape == (20, 4, 2) and sample["index_generation"].shape == (20, 4)
        assert torch.equal(buffer.storage.generation_of(sample["index"]), sample["index_generation"])
        assert torch.equal(buffer.storage.get(sample["index"])["id"], sample["id"])
        assert torch.equal(info["index"], sample["index"].flatten(0, 1))
        assert torch.equal(info["index_generation"], sample["index_generation"].flatten())


class TestForms:
    """Contract: ``flat``, ``contiguous``, ``prefetch`` and devices change how a batch comes, not what it says."""

    @BOOKS
    @LAYOUTS
    @pytest.mark.parametrize("contiguous", [False, True])
    def test_flat_batches_are_the_same_window_by_window(self, books, layout, contiguous):
        with books():
            shaped, flat = (filled(layout, 4, 10, [29, 33], flat=flat) for flat in (False, True))
            a, b = shaped.sample(80, contiguous=contiguous), flat.sample(80, contiguous=contiguous)
            assert a.batch_size == (20, 4) and b.batch_size == (80,)
            assert a["next"].batch_size == (20, 4) and b["next"].batch_size == (80,)
            assert flat_rows(a) == flat_rows(b)
            assert set(a.keys(True, True)) == set(b.keys(True, True))
            assert all(b[key].shape == a[key].flatten(0, 1).shape for key in b.keys(True, True))

    @LAYOUTS
    def test_contiguous_gives_each_field_its_own_memory(self, layout):
        views, own = (filled(layout, 4, 10, [29, 33]).sample(80, contiguous=c) for c in (False, True))
        assert flat_rows(views) == flat_rows(own)
        assert all(leaf.is_contiguous() for leaf in own.values(True, True))
        assert len({leaf.untyped_storage().data_ptr() for leaf in own.values(True, True)}) == len(
            list(own.keys(True, True))
        )

    @LAYOUTS
    def test_a_batch_has_the_keys_of_a_record_and_its_handles(self, layout):
        buffer = filled(layout, 4, 10, [29])
        source = records if layout == "no next keys" else steps
        keys = {("next", key[1]) if isinstance(key, tuple) else key for key in source(0, 1).keys(True, True)}
        sample = buffer.sample(8)
        assert set(sample.keys(True, True)) == keys | {"index", "index_generation"}
        for key in keys:
            assert sample[key].dtype == source(0, 1)[key].dtype
            assert sample[key].shape == (2, 4, *source(0, 1)[key].shape[2:])

    def test_batches_ahead_are_batches_like_others(self):
        buffer = filled("derive", 4, 10, [29, 33], prefetch=2, batch_size=80)
        for _ in range(5):
            sample = buffer.sample()
            assert sample.batch_size == (20, 4)
            starts_of(sample, 10)
        buffer.empty()
        write(buffer, 100, 6)
        assert int(buffer.sample()["id"].min()) >= 100

    def test_a_batch_is_not_overwritten_while_it_is_held(self):
        buffer = filled("derive", 4, 10, [29, 33])
        held = buffer.sample(80)["next", "observation"][3:5]
        before = held.clone()
        for _ in range(20):
            buffer.sample(80)
        assert torch.equal(held, before)

    def test_changing_a_batch_changes_neither_storage_nor_neighbouring_rows(self):
        buffer = filled("derive", 4, 10, [29])
        sample = buffer.sample(80)
        observation = sample["observation"].clone()
        sample["next", "observation"].zero_()
        assert torch.equal(sample["observation"], observation)
        assert bool((buffer.storage["observation"] != 0).all())

    def test_sampler_and_buffer_can_be_pickled(self):
        buffer = filled("derive", 4, 10, [29, 33], online=True)
        buffer.sample(8)
        again = pickle.loads(pickle.dumps(buffer))
        assert draw_starts(again, 1) == draw_starts(buffer, 1)


class TestSuccessors:
    """Contract: every row of a window carries the observation that its step returned."""

    @BOOKS
    @LAYOUTS
    def test_every_kind_of_end_and_the_newest_row_have_their_true_successors(self, books, layout):
        flags = {"terminated": [13, 17], "truncated": [15, 21], "done": [13, 15, 17, 18, 21]}
        with books():
            buffer = make(4, 12, 2, layout=layout)
            source = records if layout == "no next keys" else steps
            run = source(0, 22, 2, **flags)
            if layout != "no next keys":
                run["next", "observation"][19] = -7.0  # a reset that no flag announces
            buffer.extend_batch(run[:14])
            buffer.extend_batch(run[14:])
            sample = buffer.sample(4 * 400)
            starts = torch.tensor(starts_of(sample, 12))
            assert int(starts[:, 1].max()) == 18
            step = starts[:, 1:] + torch.arange(4)
            for key in source(0, 1).keys(True, True):
                expected = run[key][step, starts[:, :1]]
                assert torch.equal(sample[key], expected), key

    @BOOKS
    def test_a_promoted_successor_stays_the_rows_own(self, books):
        with books():
            buffer = make(4, 12)
            write(buffer, 0, 4)
            write(buffer, 50, 4)  # elsewhere than the pending successor of step 3
            sample = buffer.sample(4 * 100)
            after = sample["next", "observation"][..., 0].flatten().tolist()
            rows = dict(zip(sample["id"].flatten().tolist(), after, strict=True))
            assert rows == {i: i + 1.0 for i in (0, 1, 2, 3, 50, 51, 52, 53)}


class TestStrictEpisodes:
    """Contract: no row of a window but its last ends an episode; uniform over the starts that remain."""

    CASES = {
        "terminated": {"terminated": [5]},
        "truncated": {"truncated": [5]},
        "done": {"done": [5]},
    }

    @staticmethod
    def valid(low: int, high: int, seq_len: int, ends: set[int], streams: range = range(1)) -> set[tuple[int, int]]:
        starts = starts_between(low, high, seq_len, streams)
        return {(n, s) for n, s in starts if not ends & set(range(s, s + seq_len - 1))}

    @BOOKS
    @LAYOUTS
    @pytest.mark.parametrize("flag", FLAGS)
    def test_only_the_last_row_may_raise_a_flag(self, books, layout, flag):
        with books():
            buffer = make(3, 12, 2, layout=layout, strict_episodes=True)
            source = records if layout == "no next keys" else steps
            buffer.extend_batch(source(0, 15, 2, **{flag: [7, 8, 12]}))
            expected = self.valid(3, 15, 3, {7, 8, 12}, range(2))
            assert {(0, 5), (0, 6), (0, 10)} & expected == {(0, 5), (0, 10)}
            assert set(draw_starts(buffer, 40 * len(expected))) == expected
            assert buffer.sampler._sampleable_count(buffer.storage, 3) == len(expected)

    @BOOKS
    @pytest.mark.parametrize("layout", ["derive", "store"])
    def test_a_reset_that_no_flag_announces_ends_an_episode(self, books, layout):
        with books():
            buffer = make(3, 12, layout=layout, strict_episodes=True)
            run = steps(0, 4)
            run["next", "observation"][1] = -9.0
            buffer.extend_batch(run)
            buffer.extend_batch(steps(50, 4))  # promotes the pending successor of step 3
            buffer.end_streams()
            buffer.extend_batch(steps(54, 2))
            expected = self.valid(0, 10, 3, {1, 3, 7})
            assert set(draw_starts(buffer, 400)) == expected

    @BOOKS
    def test_a_flag_that_was_changed_in_place_counts(self, books):
        with books():
            buffer = make(3, 8, strict_episodes=True)
            write(buffer, 0, 8)
            assert set(draw_starts(buffer, 200)) == self.valid(0, 8, 3, set())
            ended = TensorDict({"next": {"done": torch.ones(1, 1, dtype=torch.bool)}}, [1])
            buffer.storage.set((torch.tensor([4]), torch.tensor([0])), ended, set_cursor=False)
            assert set(draw_starts(buffer, 200)) == self.valid(0, 8, 3, {4})

    @BOOKS
    def test_windows_of_one_step_are_never_refused(self, books):
        with books():
            buffer = make(1, 8, strict_episodes=True)
            write(buffer, 0, 8, done=list(range(8)))
            assert set(draw_starts(buffer, 400)) == {(0, s) for s in range(8)}

    @pytest.mark.parametrize("heads", [[40, 40, 40], [40, 43, 57]])
    def test_draws_are_uniform_whether_few_or_many_windows_qualify(self, heads):
        ends = {30, 31, 37, 44, 50, 51, 52}
        buffer = make(4, 16, 3, strict_episodes=True, seed=5)
        whole = steps(0, 60, 3, truncated=sorted(ends))
        buffer.extend_batch(whole[: min(heads)])
        for n, head in enumerate(heads):
            if head > min(heads):
                buffer.extend_batch(whole[min(heads) : head, n : n + 1], streams=slice(n, n + 1))
        expected = set()
        for n, head in enumerate(heads):
            expected |= self.valid(head - 16, head, 4, ends, range(n, n + 1))
        cells = Counter(draw_starts(buffer, 30_000))
        few = Counter(start for _ in range(1500) for start in draw_starts(buffer, 2))
        for counts in (cells, few):
            means = dict.fromkeys(expected, sum(counts.values()) / len(expected))
            assert chi_square(counts, means) < chi_square_limit(len(expected) - 1)

    def test_rare_windows_are_found_by_looking_at_all_starts(self):
        """One window in 2,000 qualifies: rejection alone would take for ever."""
        buffer = make(3, 2002, strict_episodes=True)
        write(buffer, 0, 2002, done=[t for t in range(2002) if t not in (999, 1000)])
        assert set(draw_starts(buffer, 50)) == {(0, 999)}

    @BOOKS
    def test_nothing_qualifying_is_an_error_that_changes_nothing(self, books):
        with books():
            buffer = make(3, 12, strict_episodes=True)
            write(buffer, 0, 12, done=list(range(12)))
            before = state_bytes(buffer.state_dict()), state_bytes(buffer._rng)
            with pytest.raises(RuntimeError, match="3 consecutive steps without a reset inside"):
                buffer.sample(6)
            assert (state_bytes(buffer.state_dict()), state_bytes(buffer._rng)) == before
            assert not buffer.can_sample(6)

    def test_default_generator_is_put_back_when_nothing_qualifies(self):
        buffer = make(3, 12, strict_episodes=True)
        buffer.set_rng(None)
        write(buffer, 0, 12, done=list(range(12)))
        before = torch.get_rng_state()
        with pytest.raises(RuntimeError):
            buffer.sample(6)
        assert torch.equal(torch.get_rng_state(), before)
        block, span = buffer.storage.block, buffer.sampler._span(buffer.storage.block)
        assert draw_within_episodes(block, span, 3, 2, None) is None


class TestOnline:
    """Contract: completed windows come first, each once, oldest first, then uniform ones; what was overwritten is
    dropped; the state is saved."""

    @BOOKS
    def test_completed_windows_come_once_each_in_order_and_uniform_ones_after(self, books):
        with books():
            buffer = make(4, 40, 2, online=True)
            write(buffer, 0, 10)
            assert draw_starts(buffer, 3) == [(0, 0), (1, 0), (0, 4)]
            write(buffer, 10, 3)
            served = draw_starts(buffer, 8)
            assert served[:3] == [(1, 4), (1, 8), (0, 8)]
            assert len(set(draw_starts(buffer, 400))) == 20, "nothing is new: all starts are drawn"
            write(buffer, 13, 3)
            assert draw_starts(buffer, 2) == [(1, 12), (0, 12)]

    @BOOKS
    def test_served_windows_hold_the_rows_they_name(self, books):
        with books():
            buffer = make(4, 10, 2, online=True)
            for first in range(0, 60, 4):
                write(buffer, first, 4, truncated=[first + 1])
                sample = buffer.sample(12)
                assert starts_of(sample, 10)[:2] == [(0, first), (1, first)]
                expected = torch.arange(first, first + 4) + 1000 * torch.arange(2).unsqueeze(-1)
                assert torch.equal(sample["id"][:2].squeeze(-1), expected)
                after = torch.where(torch.arange(4) == 1, -expected, expected + 1).float()
                assert torch.equal(sample["next", "observation"][:2, :, 0], after)

    @BOOKS
    def test_the_window_furthest_behind_its_streams_head_comes_first(self, books):
        with books():
            buffer = make(3, 30, 3, online=True)
            for n, count in ((0, 4), (1, 12), (2, 7)):
                buffer.extend_batch(steps(0, count, 1, start=n), streams=slice(n, n + 1))
            # Steps behind the head: stream 0: 4; stream 1: 12, 9, 6, 3; stream 2: 7, 4.
            order = [(1, 0), (1, 3), (2, 0), (1, 6), (2, 3), (0, 0), (1, 9)]
            assert draw_starts(buffer, 4) == order[:4]
            assert draw_starts(buffer, 4)[:3] == order[4:], "of two that are four steps behind, stream 2 has its turn"

    @BOOKS
    def test_streams_with_a_backlog_do_not_starve_each_other(self, books):
        with books():
            buffer = make(2, 8, 6, online=True)
            served = Counter()
            for turn in range(30):  # three times as much is written as is served
                write(buffer, 2 * turn, 2)
                served.update(stream for stream, _ in draw_starts(buffer, 2))
            assert served == dict.fromkeys(range(6), 10)

    @BOOKS
    def test_windows_that_were_overwritten_before_their_turn_are_dropped(self, books):
        with books():
            buffer = make(4, 10, online=True)
            write(buffer, 0, 9)
            assert draw_starts(buffer, 1) == [(0, 0)]
            write(buffer, 9, 16)  # steps 15 to 24 live: the windows from 4, 8 and 12 are gone
            assert draw_starts(buffer, 3)[:2] == [(0, 16), (0, 20)]

    @BOOKS
    def test_emptying_begins_anew(self, books):
        with books():
            buffer = make(4, 10, online=True)
            write(buffer, 0, 7)
            draw_starts(buffer, 1)
            buffer.empty()
            write(buffer, 100, 5)
            assert draw_starts(buffer, 2)[0] == (0, 10)
            buffer.storage.empty()  # behind the sampler's back
            write(buffer, 200, 5)
            assert draw_starts(buffer, 2)[0] == (0, 20)

    @BOOKS
    def test_the_newest_row_waits_for_its_successor(self, books):
        with books():
            buffer = make(4, 10, online=True)
            layout = RowLayout.from_tensordict(steps(0, 1))
            for first in range(0, 12, 4):
                buffer.extend_batch(layout.pack(steps(first, 4).exclude(("next", "observation"))))
                if first:
                    assert draw_starts(buffer, 1) == [(0, first - 4)]

    @BOOKS
    def test_the_newest_records_of_streams_wait_for_their_successors(self, books):
        """Records in another order than streams are written by a scatter, whose counts the host may learn later."""
        with books():
            buffer = make(4, 12, 2, online=True)
            bare = steps(0, 12, 2).exclude(("next", "observation"))
            buffer.extend_batch(RowLayout.from_tensordict(steps(0, 1, 2)).pack(bare[:4]))
            for first in (4, 8):
                records = bare[first : first + 4].flip(1).flatten(0, 1)
                buffer.storage.extend_records(records, torch.tensor([1, 0]).repeat(4))
                assert draw_starts(buffer, 2) == [(0, first - 4), (1, first - 4)]
                assert buffer.sampler.state_dict()["cursor"].tolist() == [first, first]
                buffer.sample(8)
                assert buffer.sampler.state_dict()["cursor"].tolist() == [first, first], "a newest row was served"

    @BOOKS
    def test_windows_begin_anew_behind_a_row_that_no_window_may_hold(self, books):
        with books():
            buffer = make(3, 20, online=True)
            layout = RowLayout.from_tensordict(steps(0, 1))
            for first, count in ((0, 5), (5, 8)):
                buffer.extend_batch(layout.pack(steps(first, count).exclude(("next", "observation"))))
                buffer.end_streams()
            # Holes at 4 and 12: nothing holds them, and windows start again at 5.
            assert draw_starts(buffer, 3) == [(0, 0), (0, 5), (0, 8)]
            write(buffer, 13, 4)
            assert draw_starts(buffer, 2)[0] == (0, 13)

    @pytest.mark.parametrize("how", ["state_dict", "dumps", "storage kept"])
    def test_state_says_which_windows_were_served(self, how, tmp_path):
        buffer = make(4, 20, 2, online=True)
        write(buffer, 0, 13)
        assert draw_starts(buffer, 3) == [(0, 0), (1, 0), (0, 4)]
        again = make(4, 20, 2, online=True, seed=1)
        if how == "state_dict":
            again.load_state_dict(buffer.state_dict())
        elif how == "dumps":
            buffer.dumps(tmp_path)
            again.loads(tmp_path)
        else:
            sampler = SequenceSampler(4, online=True)
            sampler.load_state_dict(buffer.sampler.state_dict())
            again = SlotReplayBuffer(storage=buffer.storage, sampler=sampler)
        assert draw_starts(again, 3) == draw_starts(buffer, 3) == [(1, 4), (1, 8), (0, 8)]

    def test_a_saved_state_does_not_change_with_the_sampler(self):
        buffer = make(4, 20, online=True)
        write(buffer, 0, 13)
        draw_starts(buffer, 1)
        state = buffer.sampler.state_dict()
        before = state_bytes(state)
        draw_starts(buffer, 2)
        assert state_bytes(state) == before
        buffer.sampler.load_state_dict(state)
        draw_starts(buffer, 2)
        assert state_bytes(state) == before

    def test_a_batch_that_its_reader_dropped_can_be_taken_back(self):
        buffer = make(4, 20, online=True)
        write(buffer, 0, 13)
        assert draw_starts(buffer, 1) == [(0, 0)]
        assert draw_starts(buffer, 2) == [(0, 4), (0, 8)]
        buffer.sampler.take_back()
        assert draw_starts(buffer, 2) == [(0, 4), (0, 8)]

    def test_shared_memory_leaves_the_rows_that_a_writer_may_disturb(self):
        buffer = make(4, 20, online=True, shared=True)
        write(buffer, 0, 9)
        assert draw_starts(buffer, 2)[0] == (0, 0)
        assert bool((buffer.sampler._fresh.cursor == 4).all())
        write(buffer, 9, 1)
        assert draw_starts(buffer, 1) == [(0, 4)]

    def test_a_state_of_another_storage_is_refused(self):
        buffer = make(4, 20, 2, online=True)
        write(buffer, 0, 8)
        buffer.sampler.load_state_dict({"cursor": torch.zeros(3, dtype=torch.int64), "turn": 0})
        with pytest.raises(ValueError, match="one cursor per stream"):
            buffer.sample(8)
        for bad in ({}, {"cursor": torch.zeros(2), "turn": 0}, {"cursor": 3, "turn": 0}, {"cursor": None}):
            with pytest.raises(ValueError, match="Nothing was changed"):
                buffer.sampler.load_state_dict(bad)

    def test_strict_episodes_cannot_be_counted_without_reading(self):
        with pytest.raises(ValueError, match="online=True must go with strict_episodes=False"):
            SequenceSampler(4, online=True, strict_episodes=True)


class TestErrors:
    """Contract: an error says what must hold in one sentence, and nothing was drawn or changed."""

    @pytest.mark.parametrize("seq_len", [0, -3, 2.0, None])
    def test_seq_len_is_at_least_one(self, seq_len):
        with pytest.raises(ValueError, match="seq_len must be an int >= 1"):
            SequenceSampler(seq_len)

    @pytest.mark.parametrize(("rows", "nearest"), [(9, "nearest are 8 and 12"), (3, "nearest is 4"), (0, "is 4")])
    def test_batch_size_counts_rows(self, rows, nearest):
        buffer = filled("derive", 4, 10, [29])
        before = state_bytes(buffer._rng)
        with pytest.raises(ValueError, match=nearest):
            buffer.sample(rows)
        assert state_bytes(buffer._rng) == before

    def test_a_window_must_fit_the_ring(self):
        buffer = filled("derive", 11, 10, [29])
        with pytest.raises(ValueError, match="at most the storage's capacity 10, got 11"):
            buffer.sample(11)
        assert not buffer.can_sample(11)

    @BOOKS
    @pytest.mark.parametrize("heads", [[3, 3], [2, 3]])
    def test_streams_that_are_too_short(self, books, heads):
        with books():
            buffer = filled("derive", 4, 10, heads, online=True)
            before = state_bytes(buffer._rng)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="4 consecutive steps whose successors are known, got none"):
                    buffer.sample(8)
            assert state_bytes(buffer._rng) == before
            assert not buffer.can_sample(8)
            write(buffer, 3, 2)
            assert buffer.can_sample(8)
            buffer.sample(8)

    def test_an_empty_storage(self):
        buffer = make(4, 10)
        with pytest.raises(RuntimeError, match="got an empty storage"):
            buffer.sample(8)
        assert not buffer.can_sample(8)

    def test_a_stock_buffer_is_told_which_buffer_serves_windows(self):
        storage = SlotStorage(8)
        storage.extend_batch(steps(0, 8))
        stock = ReplayBuffer(storage=storage, sampler=SequenceSampler(4), writer=SlotWriter(), batch_size=8)
        with pytest.raises(RuntimeError, match="SlotReplayBuffer"):
            stock.sample()


class TestBenchmarkCase:
    """Contract: candidates of the case ``ensemble_sample`` do the work that they are timed for."""

    @pytest.mark.parametrize("workload", ["FLAT", "WALKER", "PIXEL"])
    def test_candidates_give_the_windows_of_their_workload(self, workload):
        made = getattr(sequences, workload)
        sizes = replace(made[-1] if isinstance(made, tuple) else made, streams=2, slots=130, windows=2)
        comparison = sequences.compare_windows(torch.device("cpu"), sizes)
        assert comparison.peer_missing is None
        ours = comparison.ours.run(None)
        assert ours.batch_size == (2, sequences.STEPS)
        starts_of(ours, 130)
        peer = comparison.peer.run(None)
        assert peer.numel() == ours.numel()
        assert set(peer.keys(True, True)) >= set(ours.keys(True, True)) - {"index", "index_generation"}
        limit = comparison.limit.run(comparison.limit.fresh() if comparison.limit.fresh else None)
        rows = next(iter(limit.values())) if isinstance(limit, dict) else limit
        assert len(rows) == ours.numel()
        assert comparison.others["ours_uneven"].run(None).batch_size == ours.batch_size


# ------------------------------------------------------------------------------------------- random programs
class WindowMachine(Machine):
    """A storage and its list model; after every operation, all windows of both are compared."""

    LENGTHS = (1, 2, 4)
    on_device = False
    """Whether a device keeps the books, where the host may serve a window one write later than the model."""

    def _make_buffer(self, storage: Any) -> Any:
        self.cursors, self.turn = [None] * self.config.num_streams, 0
        return SlotReplayBuffer(
            storage=storage,
            sampler=SequenceSampler(2, online=True),
            generator=torch.Generator().manual_seed(7),
        )

    def _do_empty(self, op: Empty) -> None:
        super()._do_empty(op)
        self.cursors, self.turn = [None] * self.config.num_streams, 0

    def _do_save(self, op: Save) -> None:
        before = list(self.cursors), self.turn
        super()._do_save(op)
        kept = op.how.startswith(("buffer", "torch")) and (self.config.kind, op.how) != ("file", "buffer.pickle")
        self.cursors, self.turn = before if kept else ([None] * len(before[0]), 0)

    def starts(self, seq_len: int, strict: bool) -> set[tuple[int, int]]:
        reference, rows, starts = self.reference, self.reference.sampleable(), set()
        for n, step in rows:
            window = [(n, step + k) for k in range(seq_len)]
            if rows.issuperset(window):
                if not strict or not any(reference.record(*row).ends for row in window[:-1]):
                    starts.add((n, step))
        return starts

    def check(self) -> None:
        if not self.initialised:
            return
        for seq_len in self.LENGTHS:
            for strict in (False, True):
                if seq_len <= self.config.capacity:
                    self._check_windows(seq_len, strict)
        if not self.on_device:
            self._check_fresh()

    def _check_windows(self, seq_len: int, strict: bool) -> None:
        expected, capacity = self.starts(seq_len, strict), self.config.capacity
        buffer = SlotReplayBuffer(
            storage=self.storage,
            sampler=SequenceSampler(seq_len, strict_episodes=strict),
            generator=torch.Generator().manual_seed(self.serial),
        )
        name = f"windows of {seq_len}, strict={strict}"
        assert buffer.sampler._sampleable_count(self.storage, seq_len) == len(expected), name
        if not expected:
            with pytest.raises(RuntimeError):
                buffer.sample(seq_len)
            return
        sample = buffer.sample(40 * len(expected) * seq_len).cpu()
        drawn = starts_of(sample, capacity)
        assert set(drawn) == expected, f"{name}: drawn {sorted(set(drawn))}, valid {sorted(expected)}"
        first = sorted({start: i for i, start in reversed(list(enumerate(drawn)))}.values())
        rows = flat_rows(sample[torch.tensor(first)])
        for place, i in enumerate(first):
            n, start = drawn[i]
            for k in range(seq_len):
                row, record = rows[place * seq_len + k], self.reference.record(n, start + k)
                successor = {("next", *key): blob for key, blob in record.successor.items()}
                for key, blob in {**record.fields, **successor}.items():
                    assert row[key] == blob, f"{name}: {key} of step {start + k} of stream {n}"

    def _fresh_windows(self) -> list[tuple[int, int]]:
        """All windows of 2 that the model has not served, in the order they should come."""
        found = []
        low, head = self.reference.live_range()
        for n, stream in enumerate(self.reference.streams):
            cursor = max(stream.tail if self.cursors[n] is None else self.cursors[n], stream.tail)
            while cursor < low[n]:
                cursor += 2
            self.cursors[n] = cursor
            known = {step for m, step in self.reference.sampleable() if m == n}
            last = head[n] - 2 if self.storage.has_other_writers else head[n]
            holes = [s for s in range(low[n], head[n]) if s not in known and stream.rows[s].ends]
            while cursor + 2 <= last and cursor + 1 in known | set(holes):
                hole = next((s for s in holes if cursor <= s < cursor + 2), None)
                if hole is None:
                    found.append((cursor - head[n], (n - self.turn) % len(head), n, cursor))
                    cursor += 2
                else:
                    cursor = hole + 1
        return [(n, step) for *_, n, step in sorted(found)]

    def _check_fresh(self) -> None:
        if not self.starts(2, False) or self.serial % 2:
            return
        expected = self._fresh_windows()[:3]
        drawn = draw_starts(self.buffer, 3)
        assert drawn[: len(expected)] == expected, f"fresh windows {drawn}, the model has {expected}"
        for n, step in expected:
            self.cursors[n], self.turn = step + 2, (n + 1) % self.config.num_streams


def run_windows(config: Config, ops: list[Any], *, on_device: bool = False) -> None:
    with tempfile.TemporaryDirectory() as folder:
        machine = WindowMachine(config, Path(folder))
        machine.on_device = on_device
        for op in ops:
            machine.apply(op)


few = settings(max_examples=settings.default.max_examples // 2, suppress_health_check=list(HealthCheck))


class TestAnyProgram:
    """Contract: after any program the windows drawn are those of the list model, byte for byte, and fresh ones come in
    its order; whoever keeps the books."""

    @few
    @given(program=programs())
    def test_deriving_storage_agrees_on_any_program(self, program):
        run_windows(*program)

    @few
    @given(program=programs())
    def test_storage_of_both_copies_agrees_on_any_program(self, program):
        config, ops = program
        run_windows(replace(config, next_obs="store"), ops)

    @few
    @given(program=programs())
    def test_masks_agree_on_any_program(self, program):
        config, ops = program
        with books_on_the_device():
            run_windows(replace(config, kind="plain", final_capacity=config.capacity + 1), ops, on_device=True)

    @pytest.mark.gpu
    @pytest.mark.timeout(300)
    @few
    @given(program=programs())
    def test_cuda_agrees_on_any_program(self, program):
        config, ops = program
        run_windows(replace(config, kind="cuda"), ops, on_device=True)

    @pytest.mark.parametrize("on_device", [False, True])
    def test_holes_are_stepped_over_by_all_streams_at_once(self, on_device):
        ops = [
            Run("packed_bare", ("-...", "-.T.", "-....."[:4])),
            EndStreams(0, 2),
            Run("td", ("/...", "/.X.", "-...")),
        ]
        books = books_on_the_device() if on_device else contextlib.nullcontext()
        with books:
            run_windows(Config("small", 6, 3, final_capacity=7), ops, on_device=on_device)


# ------------------------------------------------------------------------------------------- devices and processes
def spun(seq_len: int, device: str, **options: Any) -> SlotReplayBuffer:
    """Uneven streams over more than a lap with every kind of end."""
    buffer = make(seq_len, 16, 5, device=device, **options)
    buffer.extend_batch(steps(0, 21, 5, terminated=[3, 9, 14], truncated=[11, 20]))
    buffer.extend_batch(steps(21, 7, 2, truncated=[24]), streams=slice(0, 2))
    return buffer


class TestOnADevice:
    """Contract: nothing waits for the device but one question per write, and a CPU generator draws what it would draw
    for host memory that is kept like a device."""

    MODES = pytest.mark.parametrize("mode", [{}, {"strict_episodes": True}, {"online": True}], ids=str)

    @MODES
    @pytest.mark.parametrize("layout", ["derive", "store"])
    def test_nothing_is_read_back(self, mode, layout):
        with books_on_the_device():
            buffer = filled(layout, 4, 16, [21, 21, 28], **mode)
            buffer.sample(40)
            with NoHostSync():
                buffer.sample(40)
                buffer.sample(40, contiguous=True)

    def test_long_streams_are_not_asked_about(self):
        with books_on_the_device():
            buffer = filled("derive", 4, 16, [21, 21, 28], online=True)
            with NoHostSync():
                buffer.sample(40)

    def test_valid_starts_are_counted_once_per_write(self):
        with books_on_the_device():
            buffer = filled("derive", 4, 16, [21, 21, 28], strict_episodes=True)
            with mock.patch("torchrl_ext.data.sequences.episode_starts", side_effect=episode_starts) as counted:
                for _ in range(3):
                    buffer.sample(40)
                assert counted.call_count == 1
                write(buffer, 30, 1)
                buffer.sample(40)
                buffer.end_streams()
                buffer.sample(40)
                assert counted.call_count == 3

    @pytest.mark.gpu
    @MODES
    @pytest.mark.parametrize("kernels", [True, False])
    def test_cuda_draws_what_host_memory_draws(self, mode, kernels):
        with books_on_the_device():
            expected = [spun(4, "cpu", **mode).sample(200)]
        usable = contextlib.nullcontext() if kernels else mock.patch.object(_fused, "available", lambda block: False)
        with usable:
            drawn = spun(4, "cuda", **mode).sample(200)
        assert drawn.device.type == "cuda"
        assert flat_rows(drawn) == flat_rows(expected[0])

    @pytest.mark.gpu
    @MODES
    @pytest.mark.parametrize("kernels", [True, False])
    def test_cuda_never_waits(self, mode, kernels):
        usable = contextlib.nullcontext() if kernels else mock.patch.object(_fused, "available", lambda block: False)
        with usable:
            buffer = spun(4, "cuda", **mode)
            buffer.sample(200)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                buffer.sample(200)
                buffer.sample(200, contiguous=True)
                if not mode.get("strict_episodes"):
                    buffer.extend_batch(buffer.storage.layout.pack(self.one_step()))
                    buffer.sample(200)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()

    @pytest.mark.gpu
    @pytest.mark.parametrize("layout", ["derive", "store"])
    def test_captured_draws_are_new_in_each_replay(self, layout):
        buffer = make(4, 16, 5, device="cuda", layout=layout)
        buffer.extend_batch(steps(0, 21, 5, truncated=[11]))
        buffer.set_rng(None)
        buffer.sample(40)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sample = buffer.sample(40)
        seen = set()
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
            seen.add(tuple(starts_of(sample, 16)))
            assert bool((buffer.storage.generation_of(sample["index"]) == sample["index_generation"]).all())
        assert len(seen) == 3

    @staticmethod
    def one_step() -> TensorDict:
        return steps(28, 1, 5).exclude(("next", "observation"))

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
    def test_samples_are_moved_packed(self, device):
        buffer = spun(4, "cpu")
        moved = buffer.sample(40, device=device)
        assert moved.device.type == device
        assert all(leaf.device.type == device for leaf in moved.values(True, True))
        starts_of(moved.cpu(), 16)


def write_until_told(storage: SlotStorage, started: Any, stop: Any) -> None:
    torch.set_num_threads(1)
    first = 12
    while not stop.is_set():
        storage.extend_batch(steps(first, 3, 2, truncated=[first + 1]))
        first += 3
        started.set()


class TestTwoProcesses:
    """Contract: a reader in another process sees whole windows with their true successors."""

    def test_no_window_is_torn_while_another_process_writes(self):
        uniform = make(4, 256, 2, shared=True)
        uniform.extend_batch(steps(0, 12, 2))
        online = SlotReplayBuffer(storage=uniform.storage, sampler=SequenceSampler(4, online=True))
        context = mp.get_context("spawn")
        started, stop = context.Event(), context.Event()
        process = context.Process(target=write_until_told, args=(uniform.storage, started, stop), daemon=True)
        process.start()
        try:
            assert started.wait(120.0)
            end, heads = time.monotonic() + 1.0, set()
            # For a second and, where the writer gets little of a core, until it has written meanwhile.
            while time.monotonic() < end or len(heads) <= 10:
                assert time.monotonic() < end + 120.0, "the writer must write meanwhile"
                for buffer in (uniform, online):
                    sample = buffer.sample(32)
                    starts = torch.tensor(starts_of(sample, 256))
                    expected = 1000 * starts[:, :1] + starts[:, 1:] + torch.arange(4)
                    assert torch.equal(sample["id"].squeeze(-1), expected)
                    ended = sample["next", "truncated"].squeeze(-1)
                    after = torch.where(ended, -expected, expected + 1).float()
                    assert torch.equal(sample["next", "observation"][..., 0], after)
                    heads.add(int(uniform.storage.head[0]))
        finally:
            stop.set()
            process.join(120.0)
        assert process.exitcode == 0
