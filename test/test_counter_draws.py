# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Random numbers made from a counter: their values, the kernels that make them, and where they stand.

Kernels run on CUDA, and on a CPU where Triton is installed and ``TRITON_INTERPRET=1`` is set.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from unittest import mock

import _philox as reference
import numpy as np
import pytest
import torch
from test_replay_device import books_on_the_device, filled

from torchrl_ext.data import _fused, _transitions
from torchrl_ext.data._transitions import _span
from torchrl_ext.trainers._counter_draws import STRIDE, CounterDraws, normal_noise
from torchrl_ext.trainers._graph_sampling import GraphSampling

INTERPRETED = _fused.has_triton() and os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
SEATS = [(0, 0), (12345, STRIDE), (2**64 - 3, 2**40 + STRIDE), (2**63 + 7, 3 * 2**32)]


class FakeGenerator:
    """What counts of a generator of a CUDA device."""

    device = torch.device("cpu")

    def __init__(self, seed=0):
        self.manual_seed(seed)

    def manual_seed(self, seed):
        self.seed, self.offset = seed, 0

    def initial_seed(self):
        return self.seed

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        assert offset % 4 == 0
        self.offset = offset

    def get_state(self):
        return self.seed, self.offset

    def set_state(self, state):
        self.seed, self.offset = state


@contextlib.contextmanager
def kernels_on(device):
    """Lets fused kernels run on a device; on a CPU they are interpreted."""
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(books_on_the_device())
            stack.enter_context(mock.patch.object(_fused, "available", lambda block: block.layout.derives))
            stack.enter_context(mock.patch.object(_transitions, "graph_of", lambda *_: None))
            stack.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        yield


def seat_of(seed, offset, device="cpu"):
    return torch.tensor([seed - 2**64 if seed >= 2**63 else seed, offset], device=device)


class TestReference:
    """Contract: the generator of the tests is Philox 4x32-10, by the known answers of its authors (Random123)."""

    @pytest.mark.parametrize(
        ("counter", "key", "answer"),
        [
            ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
            ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
            (
                (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
                (0xA4093822, 0x299F31D0),
                "d16cfe09 94fdcceb 5001e420 24126ea1",
            ),
        ],
    )
    def test_known_answers(self, counter, key, answer):
        assert " ".join(f"{int(word[0]):08x}" for word in reference.philox(counter, key)) == answer


class TestValues:
    """Contract: numbers are uniform or normal, and independent across lanes, steps, uses and seeds. Bounds are of five
    standard deviations."""

    COUNT = 2**16

    def test_integers_are_uniform_modulo_any_number_of_rows(self):
        drawn = reference.wide_integers(7, STRIDE, self.COUNT)
        assert drawn.min() >= 0 and drawn.max() < 2**62
        for bins in (10, 127, 1024):
            squares = (np.bincount(drawn % bins, minlength=bins) - self.COUNT / bins) ** 2
            chi = squares.sum() / (self.COUNT / bins)
            assert abs(chi - (bins - 1)) < 5 * (2 * (bins - 1)) ** 0.5, bins
        # Every bit is a coin.
        bits = (drawn[:, None] >> np.arange(62)) & 1
        assert np.abs(bits.mean(0) - 0.5).max() < 5 * 0.5 / self.COUNT**0.5

    def test_noise_is_standard_normal(self):
        drawn = reference.normals(7, STRIDE, self.COUNT)
        for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
            assert abs((drawn**power).mean() - moment) < 5 * (variance / self.COUNT) ** 0.5, power
        levels = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
        bins = torch.bucketize(torch.from_numpy(drawn), torch.special.ndtri(levels)).bincount(minlength=100)
        chi = float(((bins - self.COUNT / 100) ** 2).sum() / (self.COUNT / 100))
        assert abs(chi - 99) < 5 * (2 * 99) ** 0.5
        assert 3.8 < np.abs(drawn).max() < 6.8

    def test_lanes_steps_and_seeds_are_independent(self):
        base = reference.normals(7, STRIDE, self.COUNT)
        others = {
            "next step": reference.normals(7, 2 * STRIDE, self.COUNT),
            "next seed": reference.normals(8, STRIDE, self.COUNT),
            "high half of the seed": reference.normals(7 + 2**32, STRIDE, self.COUNT),
            "high half of the offset": reference.normals(7, STRIDE + 2**32, self.COUNT),
            **{f"lag {lag}": np.roll(base, lag) for lag in (1, 2, 256, 512, 768, 1024)},
        }
        for name, other in others.items():
            for left, right in ((base, other), (base**2 - 1, other**2 - 1)):
                scale = left.std() * right.std() / self.COUNT**0.5
                assert abs((left * right).mean()) < 5 * scale, name

    def test_no_number_comes_twice(self):
        drawn = [reference.wide_integers(7, STRIDE * step, 4096) for step in range(50)]
        assert len(np.unique(np.concatenate(drawn))) == 50 * 4096
        rows = reference.words(7, 0, np.arange(4096), reference.ROWS)
        noise = reference.words(7, 0, np.arange(4096), reference.NOISE)
        pairs = [one.astype(np.int64) << 32 | other.astype(np.int64) for one, other, *_ in (rows, noise)]
        assert not np.intersect1d(*pairs).size


class TestKernels:
    """Contract: kernels make the numbers of the reference."""

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize(("seed", "offset"), SEATS)
    def test_noise(self, device, seed, offset):
        made = normal_noise(seat_of(seed, offset, device), torch.Size([300, 7]), 2)
        assert [tensor.shape for tensor in made] == [(300, 7)] * 2 and made[0].dtype == torch.float32
        got = torch.cat([tensor.reshape(-1) for tensor in made]).cpu().double()
        torch.testing.assert_close(got, torch.from_numpy(reference.normals(seed, offset, 4200)), rtol=0, atol=1e-4)

    @pytest.mark.parametrize("device", DEVICES)
    def test_noise_of_the_critics_is_the_same_with_and_without_the_actor(self, device):
        seat = seat_of(5, STRIDE, device)
        (alone,), (first, second) = (normal_noise(seat, torch.Size([33, 3]), count) for count in (1, 2))
        assert torch.equal(alone, first) and not torch.isclose(first, second).any()

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize(("seed", "offset"), SEATS)
    def test_rows(self, device, seed, offset):
        """Rows drawn at a seat are those that the reference's integers choose, the batch and all else alike."""
        count, n_steps = 700, 3
        with kernels_on(device):
            block = filled(device)._storage.block
            span = _span(block.layout, ("next", "reward"), n_steps)
            given = _fused.Outputs.allocate(block, count)
            given.wide.copy_(torch.from_numpy(reference.wide_integers(seed, offset, count)))
            _fused.launch(block, span, given, n_steps, 0.9)
            rows, later, small = _fused.sample(block, span, count, n_steps, 0.9, None, seat_of(seed, offset, device))
        assert torch.equal(rows, given.rows) and torch.equal(later, given.later)
        for name, leaf in given.leaves()[2].items():
            assert torch.equal(small[name], leaf), name
        assert len(small["index"].unique(dim=0)) > 300

    @pytest.mark.parametrize("device", DEVICES)
    def test_a_replay_is_drawn_from_at_the_seat_of_a_step(self, device):
        with kernels_on(device):
            replay = filled(device)
            counter = CounterDraws(FakeGenerator(3), 4, torch.device(device))
            counter.place()
            batch = GraphSampling(replay, counter, 4).draw(2)
            block, span = replay._storage.block, _span(replay._storage.block.layout, ("next", "reward"), 3)
            given = _fused.Outputs.allocate(block, 4096)
            given.wide.copy_(torch.from_numpy(reference.wide_integers(3, 2 * STRIDE, 4096)))
            _fused.launch(block, span, given, 3, 0.9)
            stock = replay.sample()
        assert torch.equal(batch["index"], given.index) and torch.equal(batch["discount"], given.discount)
        assert set(batch.keys(True, True)) == set(stock.keys(True, True)) and batch.shape == stock.shape


class TestPlace:
    """Contract: a generator says where draws stand, the device follows, and no two steps stand alike."""

    def made(self, seed=3, steps=4):
        generator = FakeGenerator(seed)
        return CounterDraws(generator, steps, torch.device("cpu")), generator

    @staticmethod
    def launch(counter, steps):
        """Seats of a launch."""
        counter.place()
        drawn = counter.seats[:steps].clone()
        counter.advance(steps)
        counter.launched(steps)
        return [tuple(seat) for seat in drawn.tolist()]

    def test_launches_of_any_size_are_single_steps(self):
        expected = [(3, STRIDE * step) for step in range(12)]
        for sizes in ([4, 4, 4], [1] * 12, [1, 4, 2, 4, 1]):
            counter, generator = self.made()
            assert [seat for size in sizes for seat in self.launch(counter, size)] == expected
            assert generator.offset == 12 * STRIDE

    def test_the_device_is_written_only_when_the_generator_moved_by_itself(self, monkeypatch):
        counter, generator = self.made()
        self.launch(counter, 4)
        written, copy = [], torch.Tensor.copy_
        monkeypatch.setattr(torch.Tensor, "copy_", lambda *args, **kwargs: written.append(1) or copy(*args, **kwargs))
        for size in (4, 1, 2):
            self.launch(counter, size)
        assert not written
        generator.offset += 8  # torch.randn on the same device
        assert self.launch(counter, 2) == [(3, 11 * STRIDE + 8), (3, 12 * STRIDE + 8)]
        assert len(written) == 1
        self.launch(counter, 1)
        assert len(written) == 1

    def test_seeding_and_states_of_the_generator_count(self):
        counter, generator = self.made()
        first = self.launch(counter, 3)
        state = generator.get_state()
        after = self.launch(counter, 2)
        generator.set_state(state)
        assert self.launch(counter, 2) == after
        generator.manual_seed(3)
        assert self.launch(counter, 3) == first
        generator.manual_seed(2**63 + 5)
        assert self.launch(counter, 1) == [(5 - 2**63, 0)]

    def test_several_counters_of_one_generator_never_stand_alike(self):
        generator = FakeGenerator(1)
        counters = [CounterDraws(generator, most, torch.device("cpu")) for most in (4, 8, 1)]
        seats = [seat for turn in range(9) for seat in self.launch(counters[turn % 3], 1 + turn % 3 % 2)]
        assert max(Counter(seats).values()) == 1

    def test_operations_of_torch_inside_a_graph_come_in_between(self):
        counter, generator = self.made()
        counter.place()
        generator.offset += 12  # what torch's replay does for a graph with dropout
        counter.advance(2)
        counter.launched(2)
        assert generator.offset == 2 * STRIDE + 12
        assert self.launch(counter, 1) == [(3, 2 * STRIDE + 12)]
