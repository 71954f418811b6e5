# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""``TransitionSampler``: passes over the data, weights of streams on a device, and batches that leave their device.

What is drawn, and how often, is held against the list model in test_replay_model.py.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from test_replay_cases import steps
from test_replay_device import books_on_the_device

from torchrl_ext.data import RowLayout, SequenceSampler, SlotReplayBuffer, SlotStorage, TransitionSampler
from torchrl_ext.data._moves import moved


def filled(count: int = 10, num_streams: int = 1, **options: Any) -> SlotReplayBuffer:
    """Observation t is step t."""
    storage = SlotStorage(16, num_streams, layout=RowLayout.from_tensordict(steps(0, 1)), final_capacity=17)
    buffer = SlotReplayBuffer(
        storage=storage,
        sampler=TransitionSampler(**options),
        batch_size=4,
        generator=torch.Generator().manual_seed(0),
    )
    if count:
        buffer.extend_batch(steps(0, count, num_streams))
    return buffer


class TestPasses:
    """Contract: without replacement a pass takes each row once; what is left of it and too little for a batch is
    dropped with ``drop_last``."""

    def test_larger_batch_than_the_rest_of_a_pass_begins_another_one(self):
        buffer = filled(replacement=False, drop_last=True)
        buffer.sample(4)
        assert len(buffer.sample(8)["id"].unique()) == 8
        assert len(buffer.sample(10)["id"].unique()) == 10

    def test_batch_that_no_pass_could_fill_is_refused(self):
        buffer = filled(replacement=False, drop_last=True)
        buffer.sample(4)
        before = buffer.sampler.state_dict()["order"].tolist()
        with pytest.raises(ValueError, match="at most the 10 sampleable rows with drop_last=True, got 11.*Nothing was"):
            buffer.sample(11)
        assert buffer.sampler.state_dict()["order"].tolist() == before

    def test_smaller_batches_use_a_pass_up(self):
        buffer = filled(replacement=False, drop_last=True)
        ids = torch.cat([buffer.sample(count)["id"] for count in (4, 3, 3)])
        assert len(ids.unique()) == 10 and buffer.sampler.ran_out


class TestStreamWeights:
    """Contract: where nothing can be drawn a draw raises, whoever keeps the books."""

    @pytest.mark.parametrize("books", ["host", "device"])
    def test_nothing_to_draw_is_refused(self, books):
        with mock.patch.object(torch, "rand") as drawn:
            if books == "host":
                self.draw_from_nothing()
            else:
                with books_on_the_device():
                    self.draw_from_nothing()
        drawn.assert_not_called()

    @pytest.mark.gpu
    @pytest.mark.parametrize("seed", [None, 0])
    def test_draws_do_not_wait_for_the_device(self, seed):
        buffer = SlotReplayBuffer(
            storage=SlotStorage(16, 4, device="cuda"),
            sampler=TransitionSampler(stream_weights=torch.tensor([0.0, 1.0, 0.0, 2.0])),
            generator=None if seed is None else torch.Generator().manual_seed(seed),
        )
        buffer.extend_batch(steps(0, 16, 4).to("cuda"))
        buffer.sample(64)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            sample = buffer.sample(64)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert set(sample["index"][:, 1].tolist()) == {1, 3}

    @staticmethod
    def draw_from_nothing() -> None:
        buffer = filled(0, 2, stream_weights=torch.ones(2))
        run = steps(0, 1, 2)
        del run["next", "observation"]
        buffer.extend_batch(run)
        with pytest.raises(RuntimeError, match="a row whose successor is known"):
            buffer.sample(8)


class TestMoves:
    """Contract: a tensor that was moved to the host is complete; towards a CUDA device nobody waits."""

    @pytest.mark.parametrize(("device", "waits"), [("cpu", True), ("cuda", False)])
    def test_only_the_host_waits(self, device, waits):
        leaf = mock.Mock(device=torch.device("cuda"))
        moved(leaf, torch.device(device))
        leaf.to.assert_called_once_with(torch.device(device), non_blocking=not waits)

    @pytest.mark.gpu
    @pytest.mark.parametrize(
        "sampler", [TransitionSampler(), TransitionSampler(replacement=False), TransitionSampler(3), SequenceSampler(4)]
    )
    @pytest.mark.parametrize("contiguous", [False, True])
    def test_batch_on_the_host_is_complete(self, sampler, contiguous):
        storage = SlotStorage(256, 64, device="cuda")
        buffer = SlotReplayBuffer(storage=storage, sampler=sampler)
        buffer.extend_batch(steps(0, 256, 64).to("cuda"))
        buffer.sample(4096)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        sample = buffer.sample(4096, device="cpu", contiguous=contiguous)
        early = sample.clone()
        torch.cuda.synchronize()
        assert all(torch.equal(leaf, sample[key]) for key, leaf in early.items(True, True))
        assert sample.device == torch.device("cpu")
