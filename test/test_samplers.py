# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""``TransitionSampler``: passes over the data, weights of streams on a device, and batches that leave their device.

What is drawn, and how often, is held against the list model in test_replay_model.py.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from test_replay_cases import steps
from test_replay_device import books_on_the_device
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler

from torchrl_ext import data
from torchrl_ext.data import RowLayout, SequenceSampler, SlotReplayBuffer, SlotStorage, TransitionSampler, draws
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

    @pytest.mark.parametrize("batch_size", [0, -1, -4])
    @pytest.mark.parametrize("replacement", [True, False])
    def test_batch_of_no_rows_is_refused_and_uses_nothing_up(self, replacement, batch_size):
        buffer = filled(replacement=replacement)
        buffer.sample(4)
        before = buffer.sampler.state_dict()["order"]
        with pytest.raises(ValueError, match=f"batch_size must be at least 1, got {batch_size}. Nothing was drawn"):
            buffer.sample(batch_size)
        assert replacement or torch.equal(buffer.sampler.state_dict()["order"], before)

    def test_a_device_is_asked_once_after_a_write_whether_a_pass_goes_on(self):
        with books_on_the_device(), mock.patch.object(torch, "equal", wraps=torch.equal) as asked:
            buffer = filled(replacement=False)
            ids = torch.cat([buffer.sample(2)["id"] for _ in range(3)])
            assert asked.call_count == 0 and len(ids.unique()) == 6
            state = buffer.sampler.state_dict()
            buffer.sampler.load_state_dict(state)
            ids = torch.cat([ids, *(buffer.sample(2)["id"] for _ in range(2))])
            assert asked.call_count == 1 and len(ids.unique()) == 10
            buffer.sample(2)
            buffer.extend_batch(steps(10, 1))
            ids = torch.cat([buffer.sample(4)["id"] for _ in range(2)])
            assert asked.call_count == 2 and len(ids.unique()) == 8

    def test_a_pass_does_not_go_on_in_another_storage(self):
        buffer, other = filled(replacement=False), filled(0, replacement=False)
        other.extend_batch(steps(0, 10))
        other.storage.load_state_dict(filled(4).storage.state_dict())
        for _ in range(2):
            buffer.sampler.draw_batch(buffer.storage, 4)
        drawn, _ = buffer.sampler.draw_batch(other.storage, 4)
        assert sorted(drawn["id"].flatten().tolist()) == [0, 1, 2, 3]

    def test_a_sampler_within_a_pass_can_be_pickled_without_its_storage(self):
        buffer = filled(replacement=False)
        first = buffer.sample(4)["id"]
        data = pickle.dumps(buffer.sampler)
        assert len(data) < buffer.storage.nbytes
        sampler = pickle.loads(data)
        drawn, _ = sampler.draw_batch(buffer.storage, 6)
        assert len(torch.cat([first, drawn["id"]]).unique()) == 10

    @pytest.mark.gpu
    def test_a_batch_within_a_pass_does_not_wait_for_the_device(self):
        buffer = SlotReplayBuffer(
            storage=SlotStorage(16, 4, device="cuda"), sampler=TransitionSampler(replacement=False)
        )
        buffer.extend_batch(steps(0, 16, 4).to("cuda"))
        seen = [buffer.sample(8)["index"]]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            seen += [buffer.sample(8)["index"] for _ in range(3)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(torch.cat(seen).unique(dim=0)) == 32

    @pytest.mark.gpu
    def test_a_pass_that_was_saved_on_a_device_goes_on_where_there_is_none(self, tmp_path):
        buffer = SlotReplayBuffer(storage=SlotStorage(16, device="cuda"), sampler=TransitionSampler(replacement=False))
        buffer.extend_batch(steps(0, 10).to("cuda"))
        first = buffer.sample(4)["id"].cpu()
        buffer.sampler.dumps(tmp_path)
        other = filled(replacement=False)
        with mock.patch.object(torch.cuda, "is_available", return_value=False):
            other.sampler.loads(tmp_path)
        assert len(torch.cat([first, other.sample(6)["id"]]).unique()) == 10


class TestStockBuffer:
    """Contract: a stock buffer draws what lives, also while runs are written to its storage past the buffer."""

    @pytest.mark.parametrize("sampler", [TransitionSampler, RandomSampler])
    def test_a_run_that_is_written_during_a_draw_is_not_forgotten(self, sampler, monkeypatch):
        storage = filled().storage
        buffer = ReplayBuffer(storage=storage, sampler=sampler(), batch_size=4)
        writer = threading.Thread(target=storage.extend_batch, args=(steps(10, 12),), daemon=True)
        look = draws._lockstep

        def look_and_be_overtaken(block):
            found = look(block)
            if writer.ident is None:
                writer.start()
                writer.join(timeout=0.3)
            return found

        storage.block.sampleable = None
        monkeypatch.setattr(draws, "_lockstep", look_and_be_overtaken)
        buffer.sample()
        writer.join(timeout=60.0)
        assert not writer.is_alive() and storage.head.tolist() == [22]
        ids = torch.cat([buffer.sample(64)["id"] for _ in range(4)])
        assert ids.unique().tolist() == list(range(6, 22)), "sampled by positions from before the run"

    @pytest.mark.parametrize(
        ("sampler", "looks"),
        [(TransitionSampler(), "samplers.sampleable_counts"), (SequenceSampler(4), "sequences.valid_starts")],
        ids=["transitions", "windows"],
    )
    def test_whether_there_is_enough_is_found_out_in_the_order_of_writes(self, sampler, looks):
        """What is found out on a device is kept; a write on another stream must be done before anybody looks."""
        buffer, inside = filled(), []
        buffer.set_sampler(sampler)
        storage = buffer.storage
        module, name = looks.split(".")
        look = getattr(getattr(data, module), name)

        @contextlib.contextmanager
        def order():
            inside.append("order")
            yield
            inside.remove("order")

        def look_inside(*args):
            other = threading.Thread(
                target=lambda: storage._lock._lock.acquire(blocking=False) and inside.append("lost")
            )
            other.start()
            other.join(timeout=60.0)
            assert inside == ["order"], "nobody keeps writers away"
            return look(*args)

        storage._order = order()
        with mock.patch.object(getattr(data, module), name, look_inside):
            assert buffer.can_sample(4)
        assert inside == []


class TestStreamWeights:
    """Contract: where nothing can be drawn a draw raises, whoever keeps the books."""

    def test_weights_that_no_stream_could_be_drawn_by_are_refused(self):
        with pytest.raises(ValueError, match="one of them above 0, .*got .0.0, 0.0."):
            TransitionSampler(stream_weights=torch.zeros(2))
        with pytest.raises(ValueError, match="one of them above 0"):
            TransitionSampler(stream_weights=torch.zeros(0))

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
