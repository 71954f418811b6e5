# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Prioritized replay: proportions, importance weights, and whose a priority is.

Everything is held on the host and where a device keeps the books: there on host memory (``books``), so that it runs
without a GPU, and on CUDA by the tests marked ``gpu``.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from _host_sync import NoHostSync
from _reference import Reference, flat_rows, state_bytes
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from test_replay_cases import steps
from test_replay_device import books_on_the_device
from torchrl.data import RandomSampler, ReplayBuffer
from torchrl.data.replay_buffers.scheduler import LinearScheduler

from torchrl_ext.data import (
    PrioritizedTransitionSampler,
    RowLayout,
    SlotReplayBuffer,
    SlotStorage,
    SlotWriter,
    TransitionSampler,
    _fused,
    _priority_input,
)
from torchrl_ext.data._block import HEAD, RESERVED
from torchrl_ext.data._proportional import ABSENT, WIDTH, BlockSums, FixedPointSums
from torchrl_ext.data.draws import locate, sampleable_counts

PLACES = ["host", "books", pytest.param("cuda", marks=pytest.mark.gpu)]


@contextlib.contextmanager
def at(place: str) -> Iterator[None]:
    with books_on_the_device() if place == "books" else contextlib.nullcontext():
        yield


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    with at(request.param):
        yield request.param


def make(place: str, capacity: int, num_streams: int = 1, **options: Any) -> SlotReplayBuffer:
    where: dict[str, Any] = {"device": "cuda"} if place == "cuda" else {}
    where["layout"] = RowLayout.from_tensordict(steps(0, 1))
    if place == "shared":
        where["shared"] = True
    final_capacity = None if place == "host" else capacity + 1  # only private host memory grows
    return SlotReplayBuffer(
        storage=SlotStorage(capacity, num_streams, final_capacity=final_capacity, **where),
        sampler=PrioritizedTransitionSampler(**options),
        generator=torch.Generator().manual_seed(0),
    )


def bare(first: int, count: int, num_streams: int = 1) -> TensorDict:
    """Steps that do not say what follows them."""
    run = steps(first, count, num_streams)
    del run["next", "observation"]
    return run


def update(buffer: SlotReplayBuffer, index: Any, priority: Any, generation: Any = None) -> torch.Tensor:
    """The mask of entries that were set; ``index`` are pairs, slots where there is one stream."""
    return buffer.sampler.update_priority(
        torch.as_tensor(index), priority, storage=buffer.storage, generation=generation
    ).cpu()


def write_unevenly(buffer: SlotReplayBuffer, first: np.ndarray, turns: int, seed: int = 0) -> None:
    """Blocks of streams, some steps each; step t of stream n is the number ``1000 n + t``."""
    rng = np.random.default_rng(seed)
    for _ in range(turns):
        start = int(rng.integers(len(first)))
        stop = int(rng.integers(start + 1, len(first) + 1))
        count = int(rng.integers(1, 5))
        runs = [steps(int(first[n]) + 1000 * n, count) for n in range(start, stop)]
        buffer.extend_batch(torch.cat(runs, 1), streams=slice(start, stop))
        first[start:stop] += count


def live_rows(buffer: SlotReplayBuffer) -> list[tuple[int, int]]:
    """(slot, stream) of all live rows, stream by stream, oldest first."""
    low, high = (side.tolist() for side in buffer.storage.live_range())
    capacity = buffer.storage.capacity
    return [(t % capacity, n) for n in range(len(low)) for t in range(low[n], high[n])]


def drawn(buffer: SlotReplayBuffer, count: int) -> Counter:
    """How often each (slot, stream) was drawn."""
    return Counter(map(tuple, buffer.sample(count)["index"].tolist()))


def weight_of(buffer: SlotReplayBuffer) -> dict[tuple[int, int], float]:
    """Importance weight of every row that can be drawn, from a large sample."""
    sample = buffer.sample(4096)
    pairs = map(tuple, sample["index"].tolist())
    return dict(zip(pairs, sample["priority_weight"].tolist(), strict=True))


def assert_shares(counts: Counter, shares: dict[Any, float]) -> None:
    """Pearson's chi-square, six deviations wide; rows without a share must not appear."""
    total, whole = sum(counts.values()), sum(shares.values())
    expected = {key: total * share / whole for key, share in shares.items() if share > 0}
    assert set(counts) <= set(expected)
    assert min(expected.values()) >= 5, "the test draws too little"
    distance = sum((counts[key] - mean) ** 2 / mean for key, mean in expected.items())
    freedom = len(expected) - 1
    assert distance < freedom + 6 * (2 * freedom) ** 0.5 + 6


class TestProportions:
    """Contract: each draw is independent and takes a sampleable row in proportion to ``(priority + eps)**alpha``."""

    @pytest.mark.parametrize("alpha", [1.0, 0.6])
    def test_rows_of_uneven_streams_are_drawn_in_proportion_after_laps(self, place, alpha):
        buffer = make(place, 8, 5, alpha=alpha, eps=0.01)
        write_unevenly(buffer, np.zeros(5, dtype=np.int64), 40)
        rows = live_rows(buffer)
        assert len(rows) == 40
        priority = torch.rand(len(rows), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        assert update(buffer, rows, priority).all()
        shares = {row: (p + 0.01) ** alpha for row, p in zip(rows, priority.tolist(), strict=True)}
        assert_shares(drawn(buffer, 40_000), shares)

    def test_alpha_zero_is_uniform(self, place):
        buffer = make(place, 10, alpha=0.0)
        buffer.extend_batch(steps(0, 10))
        update(buffer, torch.arange(10), torch.logspace(-6, 6, 10))
        counts = drawn(buffer, 10_000)
        assert_shares(counts, dict.fromkeys(live_rows(buffer), 1.0))

    def test_order_inside_a_batch_says_nothing_about_rows(self, place):
        buffer = make(place, 64)
        buffer.extend_batch(steps(0, 64))
        first = [int(buffer.sample(32)["index"][0, 0]) for _ in range(600)]
        assert_shares(Counter(slot // 8 for slot in first), dict.fromkeys(range(8), 1.0))

    def test_rows_repeat(self, place):
        buffer = make(place, 4, alpha=1.0, eps=0.0)
        buffer.extend_batch(steps(0, 4))
        update(buffer, torch.arange(4), torch.tensor([0.0, 0.0, 5.0, 0.0]))
        assert set(buffer.sample(64)["id"].flatten().tolist()) == {2}

    def test_large_table_is_searched_through(self, place):
        buffer = make(place, 1000, 7, alpha=1.0, eps=0.0)
        buffer.extend_batch(steps(0, 1000, 7))
        priority = torch.zeros(1000, 7)
        rows = [(0, 0), (0, 6), (1, 0), (499, 3), (998, 2), (999, 5), (999, 6)]
        for share, (slot, stream) in enumerate(rows, start=1):
            priority[slot, stream] = share
        update(buffer, live_rows(buffer), priority.T.flatten())
        assert_shares(drawn(buffer, 10_000), dict(zip(rows, range(1, 8), strict=True)))

    def test_same_generator_state_gives_the_same_batch(self, place):
        buffer = make(place, 32, 3)
        buffer.extend_batch(steps(0, 32, 3))
        batches = []
        for _ in range(2):
            buffer.set_rng(torch.Generator().manual_seed(5))
            batches.append(flat_rows(buffer.sample(50)))
        assert batches[0] == batches[1]


def sums_of(kind: str, weights: list[float]) -> tuple[Any, torch.Tensor]:
    """Sums over weights, absent ones appended up to a whole block and one more."""
    padded = torch.full((-(-len(weights) // WIDTH) * WIDTH + WIDTH,), ABSENT)
    values = torch.tensor(weights)
    padded[: len(weights)] = torch.where(values > 0, values, ABSENT)
    sums = BlockSums(padded) if kind == "blocks" else FixedPointSums(padded)
    sums.rebuild()
    return sums, padded


def draw_from(sums: Any, count: int) -> torch.Tensor:
    if isinstance(sums, BlockSums):
        return torch.from_numpy(sums.draw(count, None))
    block = mock.Mock(on_device=True, device=torch.device("cpu"))
    return sums.draw(block, count, None)


ADVERSARIAL = {
    "one at the start": [1.0] + [0.0] * 999,
    "one at the end": [0.0] * 1023 + [1e-18],
    "tiny beside huge": [1e-18, 1e18] * 300,
    "huge among gaps": ([0.0] * 40 + [1e18] + [0.0] * 7 + [1e-18]) * 20,
    "falling": [2.0**-k if k < 59 else 0.0 for k in range(200)],
    "rising": [0.0] * 33 + [2.0 ** (k - 59) for k in range(118)],
    "rounding": [0.1, 0.0, 1e-7, 0.0] * 500 + [0.0] * 64 + [1 / 3] * 10,
    "rounding behind gaps": [k % WIDTH and (k * 37 % 101 + 1) / 997 for k in range(100 * WIDTH)],
    "equal": [0.3] * 1000,
}


class TestSums:
    """Contract: no row without weight is ever drawn, whatever the others weigh and whatever number is drawn."""

    @pytest.mark.parametrize("kind", ["blocks", "fixed point"])
    @pytest.mark.parametrize("name", ADVERSARIAL)
    def test_row_without_weight_is_never_drawn(self, kind, name):
        sums, weights = sums_of(kind, ADVERSARIAL[name])
        assert bool((weights[draw_from(sums, 50_000)] > 0).all())
        assert float(sums.least()) == float(weights[weights > 0].min())

    @pytest.mark.parametrize("name", ADVERSARIAL)
    def test_numbers_at_the_very_ends_find_rows_with_weight(self, name):
        sums, weights = sums_of("blocks", ADVERSARIAL[name])
        bounds = sums._bounds.numpy() / float(sums._bounds[-1])
        unit = np.concatenate([bounds, np.nextafter(bounds, 0), np.nextafter(bounds, 1), [0.0, 1 - 2**-53]])
        unit = unit[(unit >= 0) & (unit < 1)]
        with mock.patch.object(torch, "rand", lambda *_, **__: torch.from_numpy(unit)):
            found = draw_from(sums, len(unit))
        assert bool((weights[found] > 0).all())

    @pytest.mark.parametrize("name", ADVERSARIAL)
    def test_every_fixed_point_number_finds_a_row_with_weight(self, name):
        sums, weights = sums_of("fixed point", ADVERSARIAL[name])
        ends = sums._ends
        numbers = torch.cat([ends - 1, ends, torch.zeros(1, dtype=torch.int64)])
        numbers = numbers[(numbers >= 0) & (numbers < ends[-1])]
        found = torch.searchsorted(ends, numbers, right=True)
        assert bool((weights[found] > 0).all())
        rows = (weights > 0).nonzero().flatten()
        assert set(found.tolist()) == set(rows.tolist()), "each row with weight has a number of its own"

    @pytest.mark.parametrize("kind", ["blocks", "fixed point"])
    def test_shares_are_the_weights(self, kind):
        weights = np.random.default_rng(0).gamma(0.3, size=300).clip(1e-3).tolist()
        sums, _ = sums_of(kind, weights)
        assert_shares(Counter(draw_from(sums, 2_000_000).tolist()), dict(enumerate(weights)))


class TestImportanceWeights:
    """Contract: a row's weight is ``(p / p_min)**-beta`` over all sampleable rows, float32 ``[B]``."""

    def expected(self, priorities: list[float], alpha: float, beta: float, eps: float) -> list[float]:
        powers = [(p + eps) ** alpha for p in priorities]
        shares = [power / sum(powers) for power in powers]
        weights = [(len(shares) * share) ** -beta for share in shares]
        return [weight / max(weights) for weight in weights]

    @pytest.mark.parametrize(("alpha", "beta"), [(0.6, 0.4), (1.0, 1.0), (0.3, 0.0), (0.0, 0.7)])
    def test_weights_are_the_formula(self, place, alpha, beta):
        buffer = make(place, 6, alpha=alpha, beta=beta, eps=1e-3)
        buffer.extend_batch(steps(0, 6))
        priorities = [0.5, 2.0, 1.0, 0.25, 4.0, 1.0]
        update(buffer, torch.arange(6), torch.tensor(priorities))
        wanted = self.expected(priorities, alpha, beta, 1e-3)
        sample = buffer.sample(512)
        assert sample["priority_weight"].dtype == torch.float32 and sample["priority_weight"].shape == (512,)
        for slot, weight in zip(sample["index"][:, 0].tolist(), sample["priority_weight"].tolist(), strict=True):
            assert weight == pytest.approx(wanted[slot], rel=1e-5)

    def test_rows_that_cannot_be_drawn_do_not_count_for_the_least(self, place):
        buffer = make(place, 4, alpha=1.0, beta=1.0, eps=0.0)
        handle = buffer.extend_batch(bare(0, 3))
        update(buffer, handle.index.flatten(0, 1)[:, 0], torch.tensor([2.0, 4.0, 0.5]))  # step 2 has no successor yet
        assert weight_of(buffer) == pytest.approx({(0, 0): 1.0, (1, 0): 0.5})

    def test_beta_may_be_annealed_by_a_scheduler(self, place):
        buffer = make(place, 4, alpha=1.0, beta=0.0, eps=0.0)
        buffer.extend_batch(steps(0, 4))
        update(buffer, torch.arange(4), torch.tensor([1.0, 4.0, 4.0, 4.0]))
        assert set(weight_of(buffer).values()) == {1.0}
        scheduler = LinearScheduler(buffer.sampler, param_name="beta", final_value=1.0, num_steps=2)
        scheduler.step()
        assert weight_of(buffer)[1, 0] == pytest.approx(0.5)
        scheduler.step()
        assert weight_of(buffer)[1, 0] == pytest.approx(0.25)

    def test_weight_goes_where_it_is_wanted(self, place):
        buffer = make(place, 4, weight_key=("info", "weight"))
        buffer.extend_batch(steps(0, 4))
        sample, info = buffer.sample(8, return_info=True)
        assert sample["info", "weight"].shape == (8,)
        assert torch.equal(info["info", "weight"], sample["info", "weight"])
        assert "priority_weight" not in sample.keys()

    def test_extreme_priorities_give_finite_weights(self, place):
        buffer = make(place, 4, alpha=5.0, beta=1.0)
        buffer.extend_batch(steps(0, 4))
        update(buffer, torch.arange(4), torch.tensor([0.0, 1e-30, 1e30, 3e38]))
        weight = buffer.sample(256)["priority_weight"]
        assert bool((weight > 0).all()) and bool((weight <= 1).all())


class TestNewRows:
    """Contract: a new row has the largest priority so far, 1 at first, as it was when the row was written."""

    def test_all_rows_are_alike_until_a_priority_is_set(self, place):
        buffer = make(place, 8, alpha=1.0, beta=1.0)
        buffer.extend_batch(steps(0, 8))
        assert set(weight_of(buffer).values()) == {1.0}
        assert buffer.sampler.default_priority == 1.0

    def test_new_row_has_the_largest_priority_so_far(self, place):
        buffer = make(place, 8, alpha=1.0, beta=1.0, eps=0.0)
        buffer.extend_batch(steps(0, 4))
        update(buffer, [1, 2], torch.tensor([8.0, 2.0]))
        update(buffer, [1], 3.0)  # the largest is no more in the buffer
        buffer.extend_batch(steps(4, 2))
        assert buffer.sampler.default_priority == 8.0
        wanted = {0: 1.0, 1: 3.0, 2: 2.0, 3: 1.0, 4: 8.0, 5: 8.0}
        assert weight_of(buffer) == pytest.approx({(slot, 0): 1 / p for slot, p in wanted.items()})

    def test_rows_written_before_an_update_do_not_get_its_priority(self, place):
        buffer = make(place, 8, alpha=1.0, beta=1.0, eps=0.0)
        buffer.extend_batch(steps(0, 2))
        buffer.extend_batch(steps(2, 2))
        update(buffer, [0], 100.0)
        assert weight_of(buffer)[2, 0] == weight_of(buffer)[1, 0] == 1.0

    def test_rows_written_at_different_steps_are_the_new_ones(self, place):
        buffer = make(place, 8, 3, alpha=1.0, beta=1.0, eps=0.0)
        for stream, count in enumerate((3, 5, 6)):
            buffer.extend_batch(steps(1000 * stream, count), streams=slice(stream, stream + 1))
        old = live_rows(buffer)
        update(buffer, old, torch.full((len(old),), 0.5))
        buffer.extend_batch(torch.cat([steps(3, 4), steps(1005, 4), steps(2006, 4)], 1))
        wanted = {row: 1.0 if row in old else 0.5 for row in live_rows(buffer)}
        for stream, first in enumerate((3, 5, 6)):
            wanted.update({((first + k) % 8, stream): 0.5 for k in range(4)})
        assert weight_of(buffer) == pytest.approx(wanted)

    def test_routed_records_are_new_rows_before_the_host_knows_where_they_went(self, place):
        buffer = make(place, 8, 3, alpha=1.0, beta=1.0, eps=0.0)
        device = buffer.storage.device
        records = torch.cat([steps(0, 2), steps(2000, 3)])[:, 0].to(device)
        streams = torch.tensor([0, 0, 2, 2, 2], device=device)
        buffer.storage.extend_records(records, streams)
        update(buffer, live_rows(buffer), 0.25)
        more = torch.cat([steps(2003, 1), steps(1000, 1), steps(2004, 1)])[:, 0].to(device)
        buffer.storage.extend_records(more, torch.tensor([2, 1, 2], device=device))
        wanted = dict.fromkeys([(0, 0), (1, 0), (0, 2), (1, 2), (2, 2)], 1.0)
        assert weight_of(buffer) == pytest.approx({**wanted, (0, 1): 0.25, (3, 2): 0.25, (4, 2): 0.25})
        update(buffer, [(4, 2)], 0.125)
        assert weight_of(buffer)[4, 2] == 1.0
        buffer.storage.extend_records(steps(2005, 1)[:, 0].to(device), torch.tensor([2], device=device))
        assert weight_of(buffer)[5, 2] == 0.125
        assert bool(buffer.storage.block._late) == (place != "host"), "draws and updates wait for no counts"

    def test_skipped_entries_do_not_raise_the_largest(self, place):
        buffer = make(place, 4)
        buffer.extend_batch(steps(0, 6))
        update(buffer, [0, 3, 7], torch.tensor([50.0, 60.0, 70.0]), torch.tensor([0, 1, 0]))  # two stale, one nowhere
        assert buffer.sampler.default_priority == 1.0

    def test_largest_within_the_buffer_goes_with_its_row(self, place):
        buffer = make(place, 4, alpha=0.5, beta=1.0, eps=0.0, max_priority_within_buffer=True)
        buffer.extend_batch(steps(0, 4))
        update(buffer, torch.arange(4), torch.tensor([9.0, 4.0, 0.25, 0.25]))
        buffer.extend_batch(steps(4, 1))  # over the row of 9
        wanted = {0: 4.0, 1: 4.0, 2: 0.25, 3: 0.25}
        assert weight_of(buffer) == pytest.approx({(slot, 0): (p / 0.25) ** -0.5 for slot, p in wanted.items()})
        update(buffer, torch.arange(4), 0.01)
        buffer.extend_batch(steps(5, 8))  # over all of them
        assert set(weight_of(buffer).values()) == {1.0}
        update(buffer, [0], 4.0)
        assert weight_of(buffer)[0, 0] == pytest.approx(0.5), "with no row left, new ones have priority 1"


class TestRecords:
    """Contract: a priority belongs to a record, not to a slot."""

    def test_overwritten_row_loses_its_priority(self, place):
        buffer = make(place, 4, alpha=1.0, beta=1.0, eps=0.0)
        buffer.extend_batch(steps(0, 4))
        update(buffer, torch.arange(4), torch.tensor([0.0, 0.0, 0.5, 0.25]))
        buffer.extend_batch(steps(4, 2))
        assert weight_of(buffer) == pytest.approx({(0, 0): 0.25, (1, 0): 0.25, (2, 0): 0.5, (3, 0): 1.0})

    def test_stale_handle_does_not_touch_the_newer_row(self, place):
        """case 15"""
        buffer = make(place, 4, alpha=1.0, beta=1.0, eps=0.0)
        handle = buffer.extend_batch(steps(0, 4))
        buffer.extend_batch(steps(4, 2))
        pairs, generation = handle.index.flatten(0, 1), handle.generation.flatten()
        assert update(buffer, pairs, 0.5, generation).tolist() == [False, False, True, True]
        assert weight_of(buffer) == pytest.approx({(0, 0): 0.5, (1, 0): 0.5, (2, 0): 1.0, (3, 0): 1.0})

    def test_handle_is_stale_after_any_number_of_laps(self, place):
        """case 18"""
        buffer = make(place, 4)
        old = buffer.extend_batch(steps(0, 2))
        buffer.extend_batch(steps(2, 12))
        fresh = buffer.sample(8)
        assert not update(buffer, old.index[1], 2.0, old.generation[1]).any()
        assert update(buffer, fresh["index"].unique(dim=0), 2.0).all()
        one = fresh[:1]
        assert update(buffer, one["index"], 2.0, one["index_generation"]).all()

    def test_without_generations_whatever_lives_there_is_meant(self, place):
        buffer = make(place, 4)
        buffer.extend_batch(steps(0, 6))
        assert update(buffer, [0, 1, 2, 3], 2.0).all()

    def test_indices_out_of_range_are_skipped(self, place):
        buffer = make(place, 4, 2)
        buffer.extend_batch(steps(0, 3, 2))
        rows = [(0, 0), (-1, 0), (4, 0), (0, -1), (0, 2), (3, 1), (2, 1), (2**40, 0), (0, -(2**40))]
        wanted = [True, False, False, False, False, False, True, False, False]
        assert update(buffer, rows, 2.0).tolist() == wanted

    def test_last_of_several_entries_wins(self, place):
        """case 20"""
        buffer = make(place, 4, alpha=1.0, beta=1.0, eps=0.0)
        buffer.extend_batch(steps(0, 4))
        for _ in range(200):
            mask = update(buffer, [2, 2, 1, 2], torch.tensor([10.0, 20.0, 5.0, 4.0]))
            assert mask.tolist() == [False, False, True, True]
            weights = buffer.sampler.state_dict()["priorities"]["weights"].tolist()
            assert weights == pytest.approx([1.0, 5.0, 4.0, 1.0])

    def test_ten_thousand_entries_equal_a_dictionary_built_in_order(self, place):
        """case 20"""
        buffer = make(place, 50, 2, alpha=1.0, eps=0.0)
        buffer.extend_batch(steps(0, 50, 2))
        rng = torch.Generator().manual_seed(3)
        flat = torch.randint(100, (10_000,), generator=rng)
        priority = torch.rand(10_000, generator=rng) + 0.1
        update(buffer, buffer.storage.unravel(flat), priority)
        wanted = dict(zip(flat.tolist(), priority.tolist(), strict=True))
        weights = buffer.sampler.state_dict()["priorities"]["weights"].tolist()
        assert weights == pytest.approx([wanted[row] for row in range(100)])

    def test_last_live_entry_wins_over_a_later_stale_one(self, place):
        buffer = make(place, 4, alpha=1.0, eps=0.0)
        buffer.extend_batch(steps(0, 6))
        mask = update(buffer, [0, 0], torch.tensor([3.0, 7.0]), torch.tensor([1, 0]))
        assert mask.tolist() == [True, False]
        assert float(buffer.sampler.state_dict()["priorities"]["weights"][0]) == pytest.approx(3.0)

    def test_row_that_is_not_sampleable_yet_keeps_its_priority(self, place):
        buffer = make(place, 8, 2, alpha=1.0, beta=1.0, eps=0.0)
        buffer.extend_batch(bare(0, 3, 2))
        update(buffer, [(2, 0), (2, 1)], torch.tensor([0.5, 0.25]))
        assert set(weight_of(buffer)) == {(0, 0), (1, 0), (0, 1), (1, 1)}
        buffer.extend_batch(bare(3, 1, 2)[:, :1], streams=slice(0, 1))
        assert weight_of(buffer)[2, 0] == 1.0, "the least of all, now that it counts"
        assert (2, 1) not in weight_of(buffer)

    def test_newest_row_without_a_successor_is_never_drawn(self, place):
        buffer = make(place, 4, 3)
        for first in range(0, 12, 3):
            buffer.extend_batch(bare(first, 3, 3))
            newest = (first + 2) % 4
            update(buffer, [(newest, n) for n in range(3)], 1e6)
            assert newest not in {slot for slot, _ in drawn(buffer, 500)}

    def test_hole_is_never_drawn(self, place):
        buffer = make(place, 6, 2)
        buffer.extend_batch(bare(0, 2, 2))
        buffer.end_streams(slice(0, 1))
        buffer.extend_batch(bare(50, 2, 2))
        assert update(buffer, [(1, 0), (1, 1)], 3.0).all(), "a hole lives"
        assert set(drawn(buffer, 2000)) == {(0, 0), (2, 0), (0, 1), (1, 1), (2, 1)}
        buffer.extend_batch(bare(60, 4, 2))  # slot 1 is written anew
        assert (1, 0) not in drawn(buffer, 500), "its successor is not known"
        buffer.extend_batch(bare(70, 1, 2))
        assert (1, 0) in drawn(buffer, 2000)

    def test_row_that_another_process_is_about_to_overwrite_is_not_drawn(self):
        buffer = make("shared", 8, alpha=1.0, beta=1.0, eps=0.0)
        buffer.extend_batch(steps(0, 12))
        update(buffer, torch.arange(8), torch.arange(1.0, 9.0))
        positions, sampler = buffer.storage.block.np_positions, buffer.sampler
        positions[RESERVED] += 2  # as a writer does first: steps 4 and 5, in slots 4 and 5, are under way
        drawn_slots = set(sampler.draw(buffer.storage, 500).slot.tolist())
        assert drawn_slots == {0, 1, 2, 3, 6, 7}
        positions[HEAD] += 2
        weights = weight_of(buffer)
        assert weights[4, 0] == weights[5, 0] == pytest.approx(1 / 8)

    @pytest.mark.parametrize("through", ["buffer", "storage"])
    def test_rows_are_gone_after_empty(self, place, through):
        buffer = make(place, 4, alpha=1.0, beta=1.0, eps=0.0)
        old = buffer.extend_batch(steps(0, 6))
        update(buffer, torch.arange(4), torch.tensor([5.0, 6.0, 7.0, 8.0]))
        (buffer if through == "buffer" else buffer.storage).empty()
        with pytest.raises(RuntimeError, match="successor is known"):
            buffer.sample(64)
        assert not update(buffer, old.index.flatten(0, 1), 3.0, old.generation.flatten()).any()
        buffer.extend_batch(steps(0, 2))
        assert weight_of(buffer) == {(0, 0): 1.0, (1, 0): 1.0}
        # The buffer's empty() starts over; a storage that lost its rows has still seen their priorities.
        assert buffer.sampler.default_priority == (1.0 if through == "buffer" else 8.0)


class TestRefusals:
    """Contract: what is impossible is refused in one sentence before anything changes."""

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"alpha": -0.1}, "alpha must be a finite number >= 0, got -0.1"),
            ({"alpha": float("inf")}, "alpha must be"),
            ({"alpha": float("nan")}, "alpha must be"),
            ({"beta": 1.1}, r"beta must be in \[0, 1\], got 1.1"),
            ({"beta": -0.5}, "beta must be"),
            ({"eps": -1e-8}, "eps must be a finite number >= 0"),
            ({"n_steps": 0}, "n_steps must be"),
            ({"gamma": 1.5}, "gamma must be"),
        ],
    )
    def test_impossible_options(self, options, words):
        with pytest.raises(ValueError, match=words):
            PrioritizedTransitionSampler(**options)

    @pytest.mark.parametrize("option", [{"replacement": False}, {"stream_weights": torch.ones(2)}, {"drop_last": True}])
    def test_options_of_uniform_draws_are_not_offered(self, option):
        with pytest.raises(TypeError):
            PrioritizedTransitionSampler(**option)

    def test_beta_stays_when_a_new_one_is_refused(self):
        sampler = PrioritizedTransitionSampler(beta=0.3)
        with pytest.raises(ValueError, match="beta"):
            sampler.beta = 2.0
        assert sampler.beta == 0.3

    @pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), 1e300])
    def test_impossible_priorities(self, place, bad):
        buffer = make(place, 4)
        buffer.extend_batch(steps(0, 4))
        update(buffer, [0], 2.0)
        before = state_bytes(buffer.sampler.state_dict())
        with pytest.raises(ValueError, match="finite float32 numbers >= 0"):
            update(buffer, [0, 1, 2], torch.tensor([5.0, bad, 5.0], dtype=torch.float64))
        assert state_bytes(buffer.sampler.state_dict()) == before

    @pytest.mark.parametrize(
        ("index", "priority", "generation", "error", "words"),
        [
            ([[0, 0], [1, 0]], torch.ones(3), None, ValueError, "one number or have the shape"),
            ([[0, 0], [1, 0]], torch.ones(2), torch.zeros(3), ValueError, "generation must have the shape"),
            ([[0.0, 0.0]], 1.0, None, TypeError, "integers"),
            ([[True, False]], 1.0, None, TypeError, "integers"),
            ([[0, 0]], torch.tensor([1j]), None, TypeError, "real numbers"),
            ([0, 1, 2], 1.0, None, IndexError, "slot, stream"),
        ],
    )
    def test_update_that_does_not_fit(self, index, priority, generation, error, words):
        buffer = make("host", 4, 2)
        buffer.extend_batch(steps(0, 4, 2))
        before = state_bytes(buffer.sampler.state_dict())
        with pytest.raises(error, match=words):
            update(buffer, index, priority, generation)
        assert state_bytes(buffer.sampler.state_dict()) == before

    @pytest.mark.parametrize("storage", [None, object()])
    def test_update_needs_a_slot_storage(self, storage):
        with pytest.raises(TypeError, match="storage must be a SlotStorage"):
            PrioritizedTransitionSampler().update_priority(torch.zeros(1, 2).long(), 1.0, storage=storage)

    def test_update_on_the_host_reads_only_what_has_arrived(self):
        """What is copied from a CUDA device without waiting is not there yet when it is read."""
        buffer, move = make("host", 4), torch.Tensor.to
        buffer.extend_batch(steps(0, 4))
        sample = buffer.sample(4)

        def complete(tensor: torch.Tensor, device: Any, *args: Any, **options: Any) -> torch.Tensor:
            assert not (device == torch.device("cpu") and options.get("non_blocking")), "would be read too early"
            return move(tensor, device, *args, **options)

        with mock.patch.object(torch.Tensor, "to", complete):
            update(buffer, sample["index"], torch.ones(4), sample["index_generation"])

    @pytest.mark.gpu
    def test_priorities_of_a_busy_device_arrive_on_the_host(self):
        buffer = make("host", 64, 8, alpha=1.0, eps=0.0)
        buffer.extend_batch(steps(0, 64, 8))
        index = buffer.storage.unravel(torch.arange(512)).to("cuda")
        generation = torch.zeros(512, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        for turn in range(5):
            torch.cuda._sleep(50_000_000)
            priority = torch.arange(1.0, 513.0, device="cuda") + turn
            assert update(buffer, index + 0, priority, generation + 0).all()
            weights = buffer.sampler.state_dict()["priorities"]["weights"]
            assert torch.equal(weights, torch.arange(1.0, 513.0) + turn)

    def test_update_of_an_empty_storage_sets_nothing(self, place):
        buffer = make(place, 4, 2)
        assert update(buffer, [(0, 0)], 1.0).tolist() == [False]
        buffer.extend_batch(steps(0, 1, 2))
        assert update(buffer, torch.zeros(0, 2, dtype=torch.int64), 1.0).tolist() == []

    def test_nothing_to_draw(self, place):
        buffer = make(place, 4, 2)
        with pytest.raises(RuntimeError, match="successor is known"):
            buffer.sample(64)
        buffer.extend_batch(bare(0, 1, 2))
        with pytest.raises(RuntimeError, match="successor is known"):
            buffer.sample(64)

    def test_all_weights_zero(self):
        buffer = make("host", 4, eps=0.0)
        buffer.extend_batch(steps(0, 4))
        update(buffer, torch.arange(4), 0.0)
        with pytest.raises(RuntimeError, match="positive weight"):
            buffer.sample(64)
        update(buffer, [3], 1.0)
        assert set(drawn(buffer, 64)) == {(3, 0)}

    def test_priorities_may_have_any_real_dtype_and_shape_of_the_index(self, place):
        buffer = make(place, 4, 2, alpha=1.0, eps=0.0)
        buffer.extend_batch(steps(0, 4, 2))
        index = torch.tensor([[(0, 0), (1, 0)], [(2, 1), (3, 1)]])
        values = [[1, 2], [3, 4]]
        for priority in (
            torch.tensor(values),
            torch.tensor(values, dtype=torch.bfloat16).unsqueeze(-1),
            torch.tensor(values, dtype=torch.float64, requires_grad=True),
        ):
            assert update(buffer, index, priority).tolist() == [[True, True], [True, True]]
            weights = buffer.sampler.state_dict()["priorities"]["weights"].tolist()
            assert [weights[row] for row in (0, 2, 5, 7)] == pytest.approx([1, 2, 3, 4])


def busy_buffer(place: str, **options: Any) -> SlotReplayBuffer:
    """Uneven streams after laps, one newest row whose successor is not known, one row cut before it was."""
    buffer = make(place, 8, 4, **options)
    write_unevenly(buffer, np.zeros(4, dtype=np.int64), 30)
    buffer.extend_batch(bare(5000, 2, 2), streams=slice(0, 2))
    buffer.end_streams(slice(0, 1))
    buffer.extend_batch(bare(6000, 2), streams=slice(0, 1))
    sample = buffer.sample(32)
    update(buffer, sample["index"], torch.rand(32) * 3, sample["index_generation"])
    update(buffer, buffer.storage.unravel(torch.arange(32)), torch.linspace(0.0, 2.0, 32))
    return buffer


def history(buffer: SlotReplayBuffer) -> Any:
    """Two batches, the rows written between them included."""
    buffer.set_rng(torch.Generator().manual_seed(9))
    first = flat_rows(buffer.sample(100))
    buffer.extend_batch(steps(7000, 3, 4))
    return first, flat_rows(buffer.sample(100)), buffer.sampler.default_priority, buffer.sampler.beta


class TestState:
    """Contract: a saved and restored sampler goes on exactly as the one that was saved."""

    def test_state_dict_goes_on(self, place):
        buffer, other = busy_buffer(place, beta=0.7), make(place, 8, 4)
        other.load_state_dict(buffer.state_dict())
        assert state_bytes(other.sampler.state_dict()) == state_bytes(buffer.sampler.state_dict())
        assert history(other) == history(buffer)

    def test_saved_folder_goes_on_without_pickles(self, place, tmp_path):
        buffer, other = busy_buffer(place, beta=0.7), make(place, 8, 4)
        buffer.dumps(tmp_path)
        assert torch.load(tmp_path / "sampler" / "sampler.pt", weights_only=True)["beta"] == 0.7
        other.loads(tmp_path)
        assert state_bytes(other.sampler.state_dict()) == state_bytes(buffer.sampler.state_dict())
        assert history(other) == history(buffer)

    def test_state_is_a_copy(self, place):
        buffer = busy_buffer(place)
        state = buffer.sampler.state_dict()
        before = state_bytes(state)
        history(buffer)
        update(buffer, buffer.storage.unravel(torch.arange(32)), 9.0)
        assert state_bytes(state) == before
        buffer.sampler.load_state_dict(state)
        history(buffer)
        assert state_bytes(state) == before

    def test_state_may_be_loaded_where_nothing_was_written_since(self, place):
        buffer = busy_buffer(place)
        before, rows = weight_of(buffer), buffer.storage.unravel(torch.arange(32))
        buffer.sampler.load_state_dict(buffer.sampler.state_dict())
        assert weight_of(buffer) == before, "rows that could not be drawn still cannot"
        state = buffer.sampler.state_dict()
        update(buffer, rows, 7.0)
        buffer.sampler.load_state_dict(state)
        assert weight_of(buffer) == before

    def test_state_saved_before_the_first_draw(self, place):
        buffer, other = make(place, 4), make(place, 4)
        buffer.extend_batch(steps(0, 4))
        other.load_state_dict(buffer.state_dict())
        assert set(weight_of(other).values()) == {1.0}

    @pytest.mark.parametrize("how", [lambda b: pickle.loads(pickle.dumps(b)), copy.deepcopy], ids=["pickle", "copy"])
    def test_pickled_sampler_goes_on(self, how):
        buffer = busy_buffer("host")
        sampler = how(buffer.sampler)
        assert state_bytes(sampler.state_dict()) == state_bytes(buffer.sampler.state_dict())
        before = history(buffer)
        other = busy_buffer("host")
        other.storage.load_state_dict(busy_buffer("host").storage.state_dict())
        other._sampler = sampler
        assert history(other) == before

    def test_state_of_another_exponent_is_refused(self):
        buffer, other = busy_buffer("host"), busy_buffer("host", alpha=0.9)
        before = state_bytes(other.sampler.state_dict())
        with pytest.raises(ValueError, match="alpha"):
            other.sampler.load_state_dict(buffer.sampler.state_dict())
        with pytest.raises(ValueError, match="beta"):
            other.sampler.load_state_dict({"alpha": 0.9, "eps": 1e-8})
        assert state_bytes(other.sampler.state_dict()) == before

    @pytest.mark.parametrize(
        ("name", "damage"),
        [
            ("weights", lambda saved: saved["weights"][:-4]),
            ("weights", lambda saved: saved["weights"].double()),
            ("weights", lambda saved: None),
            ("seen", lambda saved: saved["seen"][:, :3]),
            ("seen", lambda saved: saved["seen"].flip(0)),
            ("top", lambda saved: torch.ones(2)),
            ("capacity", lambda saved: 0),
        ],
    )
    def test_damaged_state_is_refused(self, name, damage):
        buffer = busy_buffer("host")
        state = buffer.sampler.state_dict()
        state["priorities"] = {**state["priorities"], name: damage(state["priorities"])}
        before = state_bytes(buffer.sampler.state_dict())
        with pytest.raises(ValueError, match=f"{name} .*Nothing was changed"):
            buffer.sampler.load_state_dict(state)
        assert state_bytes(buffer.sampler.state_dict()) == before

    def test_state_of_another_storage_is_refused_when_it_is_used(self):
        buffer, other = busy_buffer("host"), make("host", 4, 2)
        other.extend_batch(steps(0, 4, 2))
        other.sampler.load_state_dict(buffer.sampler.state_dict())
        with pytest.raises(ValueError, match="4 slots x 2 streams, got 8 x 4"):
            other.sample(64)
        other.empty()
        other.extend_batch(steps(0, 4, 2))
        assert set(weight_of(other).values()) == {1.0}

    def test_rows_of_a_storage_that_was_loaded_alone_are_new(self, place):
        buffer = busy_buffer(place)
        saved = buffer.storage.state_dict()
        write_unevenly(buffer, np.full(4, 100), 9)
        update(buffer, buffer.storage.unravel(torch.arange(32)), torch.linspace(0.0, 2.0, 32))
        buffer.storage.load_state_dict(saved)
        assert set(weight_of(buffer).values()) == {1.0}

    def test_another_storage_starts_over(self, place):
        buffer = busy_buffer(place, alpha=1.0)
        for capacity in (8, 5):
            buffer.set_storage(make(place, capacity, 4).storage)
            buffer.extend_batch(steps(0, 5, 4))
            assert set(weight_of(buffer).values()) == {1.0} and buffer.sampler.default_priority == 1.0
            update(buffer, [(0, 0)], 5.0)

    def test_storage_of_another_size_gets_a_table_of_its_own(self, place):
        buffer, other = busy_buffer(place), make(place, 5, 2)
        other.extend_batch(steps(0, 5, 2))
        assert buffer.sampler.update_priority(torch.tensor([[4, 1]]), 2.0, storage=other.storage).all()
        assert {*buffer.sampler.draw(other.storage, 200).torch().at.tolist()} == set(range(10))

    def test_storage_that_grows_keeps_its_priorities(self):
        buffer = make("host", 32, alpha=1.0, beta=1.0, eps=0.0)
        buffer.extend_batch(steps(0, 8))
        update(buffer, torch.arange(8), torch.arange(1.0, 9.0))
        block = buffer.storage.block
        buffer.extend_batch(steps(8, 20, truncated=list(range(8, 28))))
        assert buffer.storage.block is not block
        weights = weight_of(buffer)
        assert [weights[slot, 0] for slot in range(8)] == pytest.approx([1 / p for p in range(1, 9)])


def ended_buffer(place: str, n_steps: int, sampler: type = PrioritizedTransitionSampler) -> SlotReplayBuffer:
    """Terminations, truncations and unflagged resets on uneven streams, some laps."""
    buffer = make(place, 16, 3)
    buffer._sampler = sampler(n_steps, 0.9)
    rng = np.random.default_rng(4)
    first = np.zeros(3, dtype=np.int64)
    for turn in range(14):
        stop = 3 if turn % 3 else 2
        ends = {"terminated": [int(rng.integers(200))], "truncated": [int(rng.integers(200)), int(first[0]) + 1]}
        run = torch.cat([steps(int(first[n]), 4, **ends) for n in range(stop)], 1)
        first[:stop] += 4 + (turn % 5 == 0)  # a gap is a reset that nobody flagged
        buffer.extend_batch(run, streams=slice(0, stop))
    buffer.extend_batch(bare(900, 2, 2), streams=slice(1, 3))
    return buffer


class TestContent:
    """Contract: a sample holds what TransitionSampler's holds for the same rows."""

    @pytest.mark.parametrize("n_steps", [1, 3])
    @pytest.mark.parametrize("contiguous", [False, True])
    def test_transitions_are_those_of_the_uniform_sampler(self, place, n_steps, contiguous):
        by_row: list[dict[tuple[int, ...], Any]] = []
        for sampler in (TransitionSampler, PrioritizedTransitionSampler):
            # A kernel's multiply-add rounds once where torch operations round twice.
            with mock.patch.object(_fused, "available", lambda block: False):
                sample = ended_buffer(place, n_steps, sampler).sample(3000, contiguous=contiguous)
            pairs = map(tuple, sample["index"].tolist())
            rows = flat_rows(sample.exclude("priority_weight").cpu())
            by_row.append(dict(zip(pairs, rows, strict=True)))
        assert by_row[0] == by_row[1]
        assert len(by_row[0]) > 40

    def test_stock_buffer_draws_and_updates(self, place):
        storage = make(place, 8, 2).storage
        sampler = PrioritizedTransitionSampler(alpha=1.0, beta=1.0, eps=0.0)
        buffer = ReplayBuffer(storage=storage, writer=SlotWriter(), sampler=sampler, batch_size=16)
        buffer.extend(steps(0, 8, 2).transpose(0, 1))
        buffer.update_priority(torch.tensor([[3, 1]]), torch.tensor([1e9]))
        sample, info = buffer.sample(return_info=True)
        assert sample["id"].flatten().tolist() == [1003] * 16
        assert info["priority_weight"].tolist() == pytest.approx([1e-9] * 16)

    def test_prefetched_samples_are_whole(self):
        buffer = SlotReplayBuffer(
            storage=SlotStorage(16, 2), sampler=PrioritizedTransitionSampler(), batch_size=8, prefetch=2
        )
        buffer.extend_batch(steps(0, 16, 2))
        for _ in range(5):
            sample = buffer.sample()
            assert torch.equal(sample["next", "observation"], sample["observation"] + 1)
            assert bool((sample["priority_weight"] == 1).all())

    def test_representation_names_the_options(self):
        text = repr(PrioritizedTransitionSampler(3, 0.9, alpha=0.5, beta=0.2))
        assert text == 'PrioritizedTransitionSampler("n_steps": 3, "gamma": 0.9, "alpha": 0.5, "beta": 0.2)'


# ------------------------------------------------------------------------------------------- random programs
@dataclass(frozen=True)
class Write:
    first: int
    last: int
    count: int
    bare: bool
    reset: bool


@dataclass(frozen=True)
class Cut:
    first: int
    last: int


@dataclass(frozen=True)
class Drop:
    pass


@dataclass(frozen=True)
class Update:
    seed: int
    handles: bool


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, int, list[Any]]:
    capacity, streams = draw(st.integers(2, 6)), draw(st.integers(1, 4))
    blocks = st.tuples(st.integers(0, streams - 1), st.integers(1, streams)).map(lambda b: (b[0], max(b[0] + 1, b[1])))
    longest = st.sampled_from([1, 1, 2, 3, capacity, 2 * capacity + 1])
    writes = st.builds(lambda b, *more: Write(*b, *more), blocks, longest, st.booleans(), st.booleans())
    updates = st.builds(Update, st.integers(0, 10**6), st.booleans())
    other = st.one_of(blocks.map(lambda b: Cut(*b)), st.just(Drop()))
    return capacity, streams, draw(st.lists(st.one_of(writes, writes, updates, updates, other), max_size=12))


class Model:
    """Priorities by (stream, step), in lists and dictionaries."""

    ALPHA, BETA, EPS = 0.7, 0.6, 0.125

    def __init__(self, place: str, capacity: int, streams: int) -> None:
        self.buffer = make(place, capacity, streams, alpha=self.ALPHA, beta=self.BETA, eps=self.EPS)
        self.reference = Reference(capacity, streams)
        self.priority: dict[tuple[int, int], float] = {}
        self.top = 1.0
        self.clock = [0] * streams

    def run(self, op: Any) -> None:
        if isinstance(op, Write):
            self.write(op)
        elif isinstance(op, Update):
            self.update(op)
        elif isinstance(op, Cut):
            block = slice(op.first, op.last)
            self.buffer.end_streams(block)
            self.reference.end_streams(block)
        elif len(self.reference):
            self.buffer.storage.empty()
            self.reference.empty()

    def write(self, op: Write) -> None:
        block = slice(op.first, op.last)
        starts = [self.clock[n] + 100 * op.reset for n in range(op.first, op.last)]
        run = torch.cat([(bare if op.bare else steps)(start, op.count) for start in starts], 1)
        for n, start in zip(range(op.first, op.last), starts, strict=True):
            self.clock[n] = start + op.count
            head = self.reference.streams[n].head
            self.priority.update({(n, head + k): self.top for k in range(op.count)})
        self.buffer.extend_batch(run, streams=block)
        self.reference.extend_batch(run, streams=block)

    def update(self, op: Update) -> None:
        rng = np.random.default_rng(op.seed)
        capacity, streams = self.reference.capacity, self.reference.num_streams
        slot, stream = rng.integers(-1, capacity + 1, 9), rng.integers(-1, streams + 1, 9)
        laps = max(s.head for s in self.reference.streams) // capacity
        generation = rng.integers(max(0, laps - 1), laps + 1, 9)
        priority = rng.integers(0, 20, 9) / 4
        winner: dict[tuple[int, int], int] = {}
        for i, (s, n, g) in enumerate(zip(slot.tolist(), stream.tolist(), generation.tolist(), strict=True)):
            lives = self.reference.generation(s, n) if 0 <= s < capacity and 0 <= n < streams else -1
            if lives >= 0 and (not op.handles or lives == g):
                winner[n, lives * capacity + s] = i
                self.priority[n, lives * capacity + s] = float(priority[i])
                self.top = max(self.top, float(priority[i]))
        pairs = torch.from_numpy(np.stack([slot, stream], -1))
        handles = torch.from_numpy(generation) if op.handles else None
        mask = update(self.buffer, pairs, torch.from_numpy(priority), handles)
        assert mask.tolist() == [i in winner.values() for i in range(9)]

    def check(self) -> None:
        capacity = self.reference.capacity
        rows = {(step % capacity, n): (self.priority[n, step], step // capacity) for n, step in self.sampleable()}
        if not rows:
            with pytest.raises(RuntimeError, match="successor is known"):
                self.buffer.sample(8)
            return
        least = min(p for p, _ in rows.values())
        sample = self.buffer.sample(48)
        handles = zip(sample["index"].tolist(), sample["index_generation"].tolist(), strict=True)
        for (pair, generation), weight in zip(handles, sample["priority_weight"].tolist(), strict=True):
            priority, lap = rows[tuple(pair)]
            assert generation == lap
            wanted = ((priority + self.EPS) / (least + self.EPS)) ** (-self.ALPHA * self.BETA)
            assert weight == pytest.approx(wanted, rel=1e-5)

    def sampleable(self) -> set[tuple[int, int]]:
        return self.reference.sampleable()


class TestAnyProgram:
    """Contract: after any writes, cuts, drops and updates each row that is drawn is sampleable and has the priority
    that a list model gives it, and the least weight is that of all sampleable rows."""

    @pytest.mark.parametrize("kind", ["shared", *PLACES])
    @given(program=programs())
    def test_priorities_are_those_of_a_list_model(self, kind, program):
        capacity, streams, ops = program
        with at(kind):
            model = Model(kind, capacity, streams)
            for op in ops:
                model.run(op)
                model.check()


class TestNothingIsReadBack:
    """Contract: where a device keeps the books, neither draws nor updates nor the look at new rows wait for it."""

    @pytest.mark.parametrize("within_buffer", [False, True])
    def test_operations_read_no_value(self, within_buffer):
        with at("books"):
            buffer = make("books", 8, 4, max_priority_within_buffer=within_buffer)
            write_unevenly(buffer, np.zeros(4, dtype=np.int64), 30)
            sample = buffer.sample(64)
            priority = mock.patch.object(_priority_input, "_checked", lambda priority, _: priority)
            buffer.extend_batch(bare(7000, 3, 4))
            with NoHostSync(), priority:
                update(buffer, sample["index"], torch.rand(64), sample["index_generation"])
            buffer.extend_batch(bare(7003, 3, 4))
            with NoHostSync():
                buffer.sample(64)


class TestOtherSamplers:
    """Contract: a sampler that keeps no priorities ignores them, as in TorchRL; a check it cannot do is refused."""

    def test_priorities_of_a_uniform_sampler_are_ignored(self):
        buffer = SlotReplayBuffer(storage=SlotStorage(4), batch_size=4)
        buffer.extend_batch(steps(0, 4))
        sample = buffer.sample()
        buffer.update_priority(sample["index"], torch.rand(4), sample["index_generation"])

    def test_generations_need_a_sampler_that_checks_them(self):
        buffer = SlotReplayBuffer(storage=SlotStorage(4), sampler=RandomSampler(), batch_size=4)
        buffer.extend_batch(steps(0, 4))
        with pytest.raises(TypeError, match="generation needs a sampler of torchrl_ext, got RandomSampler"):
            buffer.update_priority(torch.arange(4), torch.rand(4), torch.zeros(4, dtype=torch.int64))


class TestNumbersForTheKernels:
    """Contract: a captured draw hands rows to the kernels as numbers among the sampleable rows."""

    @pytest.mark.parametrize("seed", range(5))
    def test_numbers_name_the_rows_that_were_drawn(self, seed):
        with at("books"):
            buffer = make("books", 8, 4, alpha=1.0)
            write_unevenly(buffer, np.zeros(4, dtype=np.int64), 30, seed)
            buffer.extend_batch(bare(0, 2, 4)[:, :2], streams=slice(0, 2))
            buffer.end_streams(slice(0, 2))
            buffer.extend_batch(bare(2, 3, 4)[:, :2], streams=slice(0, 2))
            buffer.end_streams(slice(0, 1))
            buffer.extend_batch(bare(5, 6 if seed % 2 else 2, 4))
            block, table = buffer.storage.block, buffer.sampler._table_of(buffer.storage)
            update(buffer, live_rows(buffer), torch.rand(len(live_rows(buffer))) + 0.1)
            table.settle(block)
            low, high, counts = sampleable_counts(block)
            ranges = torch.stack([counts.cumsum(0), low, high, high])
            out = SimpleNamespace(count=256, wide=torch.zeros(256, dtype=torch.int64), weight=torch.zeros(256))
            torch.manual_seed(seed)
            assert block.may_have_holes
            table.fill(block, ranges, 1, out)
            torch.manual_seed(seed)
            rows = table._sums.draw(block, 256, None)
            assert torch.equal(locate(block, low, counts, out.wide, high).at, rows)
            assert torch.equal(out.weight, table.importance(rows))


@pytest.mark.gpu
class TestCuda:
    """Contract: on CUDA nothing synchronises, and a captured draw sees what was written and set before each replay."""

    def test_operations_do_not_synchronise(self):
        buffer = make("cuda", 64, 32)
        buffer.set_rng(None)
        for first in range(0, 128, 8):
            buffer.extend_batch(bare(first, 8, 32).to("cuda"))
            sample = buffer.sample(64)
            update(buffer, sample["index"], torch.rand(64, device="cuda"), sample["index_generation"])
        buffer.extend_batch(bare(128, 8, 32).to("cuda"))
        priority = torch.rand(64, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            sample = buffer.sample(64)
            buffer.sampler.update_priority(
                sample["index"], priority, storage=buffer.storage, generation=sample["index_generation"]
            )
            buffer.sample(64)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.parametrize("n_steps", [1, 3])
    def test_draws_of_one_graph_follow_priorities_and_writes(self, n_steps):
        buffer = make("cuda", 8, 4, n_steps=n_steps, alpha=1.0, eps=0.0, beta=1.0)
        buffer.set_rng(None)
        first = np.zeros(4, dtype=np.int64)
        for turn in range(4):
            write_unevenly(buffer, first, 12, seed=turn)
            rows = live_rows(buffer)
            priority = torch.arange(1.0, len(rows) + 1).roll(7 * turn)
            update(buffer, rows, priority)
            counts, weights = Counter(), {}
            for _ in range(6):
                sample = buffer.sample(4096)
                pairs = [tuple(pair) for pair in sample["index"].tolist()]
                counts.update(pairs)
                weights.update(zip(pairs, sample["priority_weight"].tolist(), strict=True))
                slot, stream = sample["index"].unbind(-1)
                assert torch.equal(sample["id"], buffer.storage["id"][slot, stream])
            assert buffer.storage.block.graphs, "this is about captured draws"
            shares = dict(zip(rows, priority.tolist(), strict=True))
            assert_shares(counts, shares)
            assert weights == pytest.approx({row: min(shares.values()) / shares[row] for row in weights}, rel=1e-5)

    def test_exponent_of_weights_reaches_captured_draws(self):
        buffer = make("cuda", 4, alpha=1.0, eps=0.0, beta=1.0)
        buffer.set_rng(None)
        buffer.extend_batch(steps(0, 4))
        update(buffer, torch.arange(4), torch.tensor([1.0, 4.0, 4.0, 4.0]))
        for beta, least in ((1.0, 0.25), (0.5, 0.5), (0.0, 1.0)):
            buffer.sampler.beta = beta
            assert float(buffer.sample(1024)["priority_weight"].min()) == pytest.approx(least)

    def test_impossible_priorities_count_as_zero(self):
        buffer = make("cuda", 4, alpha=1.0, eps=0.0)
        buffer.extend_batch(steps(0, 4))
        update(buffer, torch.arange(4), torch.tensor([float("nan"), -1.0, 0.0, 2.0], device="cuda"))
        assert set(drawn(buffer, 256)) == {(3, 0)}

    def test_captured_draw_follows_writes_and_updates(self):
        buffer = make("cuda", 4, 2, alpha=1.0, eps=0.0)
        buffer.set_rng(None)
        buffer.extend_batch(steps(0, 4, 2))
        buffer.sample(64)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sample = buffer.sample(256)
        update(buffer, live_rows(buffer), torch.tensor([0.0, 0.0, 3.0, 0.0] * 2))
        graph.replay()
        assert set(sample["id"].flatten().tolist()) == {2, 1002}
        buffer.extend_batch(steps(4, 1, 2))
        graph.replay()
        assert set(sample["id"].flatten().tolist()) == {2, 1002, 4, 1004}

    def test_first_draw_is_not_captured(self):
        buffer = make("cuda", 4)
        buffer.set_rng(None)
        buffer.extend_batch(steps(0, 4))
        torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            buffer.sample(64)
