# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Cases from public reports (CASES.md, sections A and G), the replay part of each, with values worked by hand.

``steps(first, count)`` writes the number of the step into every field, so a torn or misplaced row shows.
"""

from __future__ import annotations

import itertools
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _reference import flat_rows, leaves, state_bytes
from tensordict import TensorDict

from torchrl_ext.data import GroupedReplayBufferEnsemble, RowLayout, SlotReplayBuffer, SlotStorage, TransitionSampler

FLAGS = ("done", "terminated", "truncated")
DEADLINE = 60.0
BOTH_N = pytest.mark.parametrize("n_steps", [1, 3])


def steps(first: int, count: int, num_streams: int = 1, **flags: list[int]) -> TensorDict:
    """[count, N]: step t of stream n is the number ``1000 n + t`` in every field, its successor one more.

    ``flags`` lists the steps where a flag is raised, in all streams.
    """
    clock = torch.arange(first, first + count).reshape(count, 1, 1) + 1000 * torch.arange(num_streams).reshape(1, -1, 1)
    out = TensorDict({"id": clock, "observation": clock.float().expand(-1, -1, 3)}, [count, num_streams])
    out["next", "observation"] = out["observation"] + 1
    out["next", "reward"] = clock.float()
    for name in FLAGS:
        raised = torch.tensor([t in flags.get(name, []) for t in range(first, first + count)])
        out["next", name] = raised.reshape(count, 1, 1).expand(count, num_streams, 1)
    return out


def make_buffer(capacity: int, num_streams: int = 1, n_steps: int = 1, gamma: float = 0.9, **kwargs: Any) -> Any:
    return SlotReplayBuffer(
        storage=SlotStorage(capacity, num_streams),
        sampler=TransitionSampler(n_steps, gamma),
        generator=torch.Generator().manual_seed(0),
        **kwargs,
    )


def rows_by_id(sample: TensorDict) -> dict[int, TensorDict]:
    """One row per stored id."""
    return {int(identity): sample[i] for i, identity in enumerate(sample["id"].flatten().tolist())}


class TestCase1WrapOfMoreThanTwoLaps:
    """Contract: a run of any length lands where single writes would have put it."""

    def test_ten_rows_into_four_slots_leave_the_newest_four_where_single_writes_would(self):
        """case 1"""
        storage = SlotStorage(4)
        storage.extend_batch(steps(0, 10))
        assert len(storage) == 4
        assert storage["id"].flatten().tolist() == [8, 9, 6, 7]

    def test_next_single_write_lands_in_slot_two(self):
        """case 1"""
        storage = SlotStorage(4)
        storage.extend_batch(steps(0, 10))
        handle = storage.extend_batch(steps(10, 1))
        assert handle.index.flatten().tolist() == [2, 0]
        assert storage["id"].flatten().tolist() == [8, 9, 10, 7]

    def test_bare_record_without_observations_wraps_alike(self):
        """case 1, with ``arange(10)`` itself as the data"""
        storage = SlotStorage(4)
        storage.extend_batch(TensorDict({"x": torch.arange(10)}, [10]))
        storage.extend_batch(TensorDict({"x": torch.tensor([10])}, [1]))
        assert storage["x"].flatten().tolist() == [8, 9, 10, 7]

    @pytest.mark.parametrize("count", range(1, 14))
    def test_any_length_equals_single_writes(self, count):
        """case 1"""
        at_once, one_by_one = SlotStorage(4, 2), SlotStorage(4, 2)
        for storage in (at_once, one_by_one):
            storage.extend_batch(steps(0, 3, 2))
        at_once.extend_batch(steps(3, count, 2))
        for t in range(3, 3 + count):
            one_by_one.extend_batch(steps(t, 1, 2))
        assert state_bytes(at_once["id"]) == state_bytes(one_by_one["id"])
        assert at_once.head.tolist() == one_by_one.head.tolist()
        assert at_once.write_count == one_by_one.write_count
        assert len(at_once) == len(one_by_one)


class TestCase2ListIsNoRun:
    """Contract: a list is refused; nothing is ever cut to the shortest of its items."""

    @pytest.mark.parametrize("method", ["extend_batch", "extend"])
    @pytest.mark.parametrize("filled", [False, True])
    def test_list_of_unequal_tensors_is_a_clear_error(self, method, filled):
        """case 2"""
        buffer = make_buffer(4)
        if filled:
            buffer.extend_batch(steps(0, 2))
        before = state_bytes(buffer.state_dict())
        with pytest.raises(TypeError, match="list"):
            getattr(buffer, method)([torch.zeros(4), torch.zeros(1)])
        assert state_bytes(buffer.state_dict()) == before
        assert len(buffer) == (2 if filled else 0)

    def test_list_of_unequal_runs_is_a_clear_error(self):
        """case 2"""
        storage = SlotStorage(4)
        with pytest.raises(TypeError, match="list"):
            storage.extend_batch([steps(0, 4), steps(4, 1)])
        assert len(storage) == 0


class TestCase3OneWritePath:
    """Contract: single writes and one run leave the same storage."""

    @staticmethod
    def filled(how: str, num_streams: int) -> Any:
        buffer = make_buffer(8, num_streams)
        data = steps(0, 6, num_streams, truncated=[2], done=[2])
        if how == "extend_batch":
            buffer.extend_batch(data)
        elif how == "extend":
            buffer.extend(data.transpose(0, 1))
        else:
            for t in range(6):
                buffer.add(data[t])
        return buffer

    @pytest.mark.parametrize("num_streams", [1, 3])
    @pytest.mark.parametrize("how", ["add", "extend"])
    def test_six_single_writes_equal_one_run(self, how, num_streams):
        """case 3"""
        single, batch = self.filled(how, num_streams), self.filled("extend_batch", num_streams)
        structure = []
        for buffer in (single, batch):
            stored = buffer.storage.get(torch.tensor([[t, n] for t in range(6) for n in range(num_streams)]))
            structure.append({k: (v.dtype, v.shape) for k, v in leaves(stored).items()})
            structure.append(flat_rows(stored))
            structure.append((buffer.storage.head.tolist(), buffer.write_count, len(buffer)))
        assert structure[:3] == structure[3:]

    @pytest.mark.parametrize("num_streams", [1, 3])
    @pytest.mark.parametrize("how", ["add", "extend"])
    def test_both_sample_the_same_batch(self, how, num_streams):
        """case 3"""
        single, batch = self.filled(how, num_streams), self.filled("extend_batch", num_streams)
        assert flat_rows(single.sample(64)) == flat_rows(batch.sample(64))


class TestCase5NoTornRows:
    """Contract: a sample taken while another thread writes shows whole rows with their true successors."""

    BATCHES = 10_000
    DEADLINE = 120.0

    @pytest.fixture(autouse=True)
    def threads_alternate_often(self) -> Iterator[None]:
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        yield
        sys.setswitchinterval(before)

    @staticmethod
    def run(first: int, count: int, width: int, device: str) -> TensorDict:
        clock = torch.arange(first, first + count, device=device).reshape(count, 1)
        out = TensorDict({"id": clock, "observation": clock.expand(count, width).contiguous()}, [count], device=device)
        out["next", "observation"] = out["observation"] + 1
        out["next", "reward"] = (clock % 1000).float()
        for name in FLAGS:
            out["next", name] = torch.zeros(count, 1, dtype=torch.bool, device=device)
        return out

    @staticmethod
    def torn(sample: TensorDict) -> torch.Tensor:
        """Rows whose fields come from different steps."""
        identity = sample["id"]
        wrong = (sample["observation"] != identity).any(-1)
        wrong |= (sample["next", "observation"] != identity + 1).any(-1)
        wrong |= (sample["next", "reward"] != (identity % 1000).float()).any(-1)
        generation, slot = sample["index_generation"], sample["index"][..., 0]
        wrong |= generation * 64 + slot != identity.squeeze(-1)
        return wrong.sum()

    def write_until(self, stop: threading.Event, buffer: Any, width: int, device: str, errors: list) -> None:
        try:
            stream = torch.cuda.Stream() if device == "cuda" else None
            with torch.cuda.stream(stream):
                first, deadline = 64, time.monotonic() + self.DEADLINE
                while not stop.is_set() and time.monotonic() < deadline:
                    count = 1 + first % 7
                    buffer.extend_batch(self.run(first, count, width, device))
                    first += count
        except BaseException as error:  # reported by the test's own thread
            errors.append(error)

    def race(self, device: str, width: int, batches: int) -> None:
        storage = SlotStorage(64, device=device)
        buffer = SlotReplayBuffer(storage=storage, sampler=TransitionSampler())
        buffer.extend_batch(self.run(0, 64, width, device))
        torn = torch.zeros((), dtype=torch.int64, device=device)
        if device == "cuda":
            torch.cuda.synchronize()  # all of this was made on the default stream
        stop, errors = threading.Event(), []
        args = (stop, buffer, width, device, errors)
        writer = threading.Thread(target=self.write_until, args=args, daemon=True)
        deadline = time.monotonic() + self.DEADLINE
        writer.start()
        try:
            while storage.write_count <= 64 and not errors:  # all samples may be taken before it gets a core
                assert time.monotonic() < deadline, "the writer never wrote"
                time.sleep(0.001)
            stream = torch.cuda.Stream() if device == "cuda" else None
            with torch.cuda.stream(stream):
                for _ in range(batches):
                    torn += self.torn(buffer.sample(16))
                    assert time.monotonic() < deadline, f"{batches} batches took more than {self.DEADLINE} s"
                torn = int(torn)
        finally:
            stop.set()
            writer.join(timeout=60.0)
        assert not errors, errors
        assert not writer.is_alive(), "the writer did not stop within 60 s"
        assert storage.write_count > 64, "the writer never wrote"
        assert torn == 0

    def test_reader_beside_a_writer_sees_no_torn_row(self):
        """case 5, on the CPU"""
        self.race("cpu", 64, self.BATCHES)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_reader_on_its_own_cuda_stream_sees_no_torn_row(self):
        """case 5, on CUDA: reader and writer each have their own stream"""
        self.race("cuda", 16_384, self.BATCHES)


class TestCase6Prefetch:
    """Contract: prefetch=N keeps N batches ready; what was prefetched before ``empty`` is never returned after it."""

    @pytest.mark.parametrize("prefetch", [1, 3])
    def test_one_sample_leaves_that_many_batches_pending(self, prefetch):
        """case 6"""
        buffer = make_buffer(8, 2, batch_size=4, prefetch=prefetch)
        buffer.extend_batch(steps(0, 8, 2))
        for _ in range(5):
            buffer.sample()
            assert len(buffer._prefetch_queue) == prefetch

    @pytest.mark.parametrize("prefetch", [1, 3])
    @BOTH_N
    def test_no_old_row_comes_back_after_empty_and_refill(self, prefetch, n_steps):
        """case 6"""
        buffer = make_buffer(8, 2, n_steps, batch_size=16, prefetch=prefetch)
        buffer.extend_batch(steps(0, 8, 2))
        buffer.sample()
        buffer.empty()
        buffer.extend_batch(steps(500, 8, 2))
        for _ in range(2 * prefetch + 2):
            sample = buffer.sample()
            assert ((sample["id"] % 1000) >= 500).all()
            assert (sample["observation"][:, :1] == sample["id"]).all()

    @pytest.mark.parametrize("prefetch", [1, 3])
    def test_emptied_buffer_has_nothing_to_sample(self, prefetch):
        """case 6"""
        buffer = make_buffer(8, 2, batch_size=16, prefetch=prefetch)
        buffer.extend_batch(steps(0, 8, 2))
        buffer.sample()
        buffer.empty()
        with pytest.raises(RuntimeError):
            buffer.sample()

    @pytest.mark.parametrize("prefetch", [1, 3])
    @pytest.mark.parametrize("contiguous", [False, True])
    def test_prefetched_batches_are_whole_and_not_reused_while_held(self, prefetch, contiguous):
        """case 6: batches come from a pool; one that the caller still holds must not change"""
        buffer = make_buffer(8, 2, 3, batch_size=16, prefetch=prefetch, contiguous=contiguous)
        buffer.extend_batch(steps(0, 8, 2))
        held = [buffer.sample() for _ in range(4 * prefetch)]
        copies = [flat_rows(sample) for sample in held]
        for _ in range(4 * prefetch):
            buffer.extend_batch(steps(8, 3, 2))
            buffer.sample()
        assert [flat_rows(sample) for sample in held] == copies


class TestCase8SavedAndLoaded:
    """Contract: one storage of three streams, each elsewhere, is saved and loaded equal."""

    @staticmethod
    def filled() -> Any:
        buffer = make_buffer(6, 3, 3, batch_size=8)
        buffer.extend_batch(steps(0, 4, 3, truncated=[1], done=[1]))
        buffer.extend_batch(steps(4, 5, 2, terminated=[5], done=[5]), streams=slice(0, 2))
        buffer.extend_batch(steps(70, 1, 1), streams=slice(0, 1))
        return buffer

    @pytest.mark.parametrize("how", ["state_dict", "dumps", "pickle"])
    @pytest.mark.parametrize("part", ["storage", "buffer"])
    def test_three_streams_come_back_equal(self, how, part, tmp_path):
        """case 8 (one storage of three streams; ensembles come later)"""
        old = self.filled()
        new = make_buffer(6, 3, 3, batch_size=8)
        source, target = (old.storage, new.storage) if part == "storage" else (old, new)
        if how == "state_dict":
            target.load_state_dict(source.state_dict())
        elif how == "dumps":
            source.dumps(tmp_path / "saved")
            target.loads(tmp_path / "saved")
        else:
            target = pickle.loads(pickle.dumps(source))
            new = target if part == "buffer" else SlotReplayBuffer(storage=target, sampler=TransitionSampler(3, 0.9))
        assert state_bytes(new.storage.state_dict()) == state_bytes(old.storage.state_dict())
        assert new.storage.head.tolist() == old.storage.head.tolist() == [10, 9, 4]
        assert len(new) == len(old) == 6 + 6 + 4
        assert new.write_count == old.write_count == 12 + 10 + 1
        for buffer in (old, new):
            buffer.set_rng(torch.Generator().manual_seed(5))
        assert flat_rows(new.sample(64)) == flat_rows(old.sample(64))

    @pytest.mark.parametrize("how", ["state_dict", "dumps", "pickle"])
    @pytest.mark.parametrize("prefetch", [None, 2])
    def test_loaded_buffer_draws_the_same_next_minibatches(self, how, prefetch, tmp_path):
        """case 8, with the generator and the prefetch queue"""
        old = make_buffer(6, 3, 3, batch_size=8, prefetch=prefetch)
        old.extend_batch(steps(0, 5, 3))
        old.sample()
        new = make_buffer(6, 3, 3, batch_size=8, prefetch=prefetch)
        if how == "state_dict":
            new.load_state_dict(old.state_dict())
        elif how == "dumps":
            old.dumps(tmp_path / "saved")
            new.loads(tmp_path / "saved")
        else:
            new = pickle.loads(pickle.dumps(old))
        for _ in range(5):
            assert flat_rows(new.sample()) == flat_rows(old.sample())

    @pytest.mark.parametrize("copied", [False, True])
    @pytest.mark.parametrize("kind", ["buffer", "ensemble"])
    def test_batches_ahead_are_drawn_in_the_order_in_which_they_are_returned(self, kind, copied, monkeypatch):
        """case 8: else a generator's draws go to this batch or that one, and no seed reproduces"""

        def make(prefetch):
            made = make_buffer(6, 3, 3, batch_size=8, prefetch=prefetch if kind == "buffer" else None)
            made.extend_batch(steps(0, 5, 3))
            if kind == "ensemble":
                generator = torch.Generator().manual_seed(0)
                made = GroupedReplayBufferEnsemble(made, batch_size=8, prefetch=prefetch, generator=generator)
            return pickle.loads(pickle.dumps(made)) if copied else made

        ahead, expected = make(2), make(None)
        real, calls, second_came = ahead._sample, itertools.count(), threading.Event()

        def first_thread_is_late(batch_size):
            call = next(calls)
            if call == 1:
                assert second_came.wait(DEADLINE)
                time.sleep(0.1)  # as long as the second one needs, were it not for its turn
            elif call == 2:
                second_came.set()
            return real(batch_size)

        monkeypatch.setattr(ahead, "_sample", first_thread_is_late)
        for _ in range(3):
            assert ahead.sample()["id"].tolist() == expected.sample()["id"].tolist()

    @pytest.mark.parametrize("fails", ["in its draw", "before it"])
    def test_batch_ahead_that_fails_lets_the_next_one_draw(self, fails, monkeypatch):
        buffer = make_buffer(6, 3, 3, batch_size=8, prefetch=2)
        buffer.extend_batch(steps(0, 5, 3))
        owner, name = (buffer, "_sample") if fails == "before it" else (buffer.sampler, "draw_batch")
        real, calls = getattr(owner, name), itertools.count()

        def second_fails(*args, **options):
            if next(calls) == 1:
                raise RuntimeError("a fault")
            return real(*args, **options)

        monkeypatch.setattr(owner, name, second_fails)
        buffer.sample()
        with pytest.raises(RuntimeError, match="a fault"):
            buffer.sample()
        assert buffer.sample().shape == (8,)

    def test_loaded_batches_ahead_say_on_which_device_they_are(self, tmp_path):
        old = make_buffer(6, 3, 3, batch_size=8, prefetch=2)
        old.extend_batch(steps(0, 5, 3))
        old.sample()
        new = make_buffer(6, 3, 3, batch_size=8, prefetch=2)
        old.dumps(tmp_path)
        new.loads(tmp_path)
        for _ in range(3):
            sample = new.sample()
            assert sample.device == sample["next"].device == old.sample().device == torch.device("cpu")

    def test_saved_buffer_holds_no_pickle(self, tmp_path):
        """No file of a save runs code when it is read."""
        buffer = make_buffer(6, 3, 3, batch_size=8, prefetch=2)
        buffer.extend_batch(steps(0, 5, 3))
        buffer.sample()
        buffer.dumps(tmp_path / "saved")
        assert not list((tmp_path / "saved").rglob("*.pkl"))
        for path in (tmp_path / "saved").rglob("*.pt"):
            torch.load(path, weights_only=True)


def rewarded(ends: str | None = None) -> TensorDict:
    """Rewards 1, 2, 3 (then 4), observations 0, 1, 2, 3; ``ends`` flags the second step, whose successor is 2."""
    out = TensorDict({"id": torch.arange(4).reshape(4, 1)}, [4])
    out["observation"] = torch.tensor([0.0, 1.0, 50.0, 51.0] if ends else [0.0, 1.0, 2.0, 3.0]).reshape(4, 1)
    out["next", "observation"] = torch.tensor([1.0, 2.0, 51.0, 52.0] if ends else [1.0, 2.0, 3.0, 4.0]).reshape(4, 1)
    out["next", "reward"] = torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(4, 1)
    for name in FLAGS:
        raised = torch.zeros(4, 1, dtype=torch.bool)
        raised[1] = ends is not None and name in (ends, "done")
        out["next", name] = raised
    return out


class TestCase12NStepReturns:
    """Contract: a return never crosses termination, truncation or the head; discount is gamma ** steps used."""

    @staticmethod
    def first_row(ends: str | None, n_steps: int = 3, next_obs: str = "derive", contiguous: bool = False) -> TensorDict:
        buffer = SlotReplayBuffer(
            storage=SlotStorage(8, next_obs=next_obs),
            sampler=TransitionSampler(n_steps, 0.9),
            generator=torch.Generator().manual_seed(0),
        )
        buffer.extend_batch(rewarded(ends))
        return rows_by_id(buffer.sample(256, contiguous=contiguous))[0]

    FORMS = pytest.mark.parametrize(
        ("next_obs", "contiguous"), [("derive", False), ("derive", True), ("store", False), ("store", True)]
    )

    @FORMS
    def test_without_an_end_the_return_is_5_23_and_the_discount_0_729(self, next_obs, contiguous):
        """case 12"""
        row = self.first_row(None, 3, next_obs, contiguous)
        assert row["next", "reward"].item() == pytest.approx(5.23)
        assert row["discount"].item() == pytest.approx(0.729)
        assert row["steps_to_next_obs"].item() == 3
        assert row["next", "observation"].item() == 3.0
        assert not row["next", "done"].item()

    @FORMS
    def test_terminated_at_the_second_step_returns_2_8_and_is_not_bootstrapped(self, next_obs, contiguous):
        """case 12"""
        row = self.first_row("terminated", 3, next_obs, contiguous)
        assert row["next", "reward"].item() == pytest.approx(2.8)
        assert row["steps_to_next_obs"].item() == 2
        assert row["next", "terminated"].item()
        assert not row["next", "truncated"].item()

    @FORMS
    def test_truncated_at_the_second_step_bootstraps_from_that_step(self, next_obs, contiguous):
        """case 12"""
        row = self.first_row("truncated", 3, next_obs, contiguous)
        assert row["next", "reward"].item() == pytest.approx(2.8)
        assert row["discount"].item() == pytest.approx(0.81)
        assert row["next", "observation"].item() == 2.0
        assert row["next", "truncated"].item()
        assert not row["next", "terminated"].item()

    def test_return_is_shortened_at_the_head(self):
        """case 12: the head of the ring is no place to read on"""
        buffer = make_buffer(4, n_steps=3)
        buffer.extend_batch(steps(1, 6))
        rows = rows_by_id(buffer.sample(256))
        assert sorted(rows) == [3, 4, 5, 6]
        assert {i: row["steps_to_next_obs"].item() for i, row in rows.items()} == {3: 3, 4: 3, 5: 2, 6: 1}
        assert rows[5]["next", "reward"].item() == pytest.approx(5 + 0.9 * 6)
        assert rows[5]["discount"].item() == pytest.approx(0.81)
        assert [rows[i]["next", "observation"][0].item() for i in (3, 4, 5, 6)] == [6.0, 7.0, 7.0, 7.0]

    def test_return_of_one_stream_never_reads_the_next_stream(self):
        """case 12"""
        buffer = make_buffer(4, 3, n_steps=3, gamma=1.0)
        buffer.extend_batch(steps(0, 4, 3))
        for identity, row in rows_by_id(buffer.sample(512)).items():
            used = row["steps_to_next_obs"].item()
            assert row["next", "reward"].item() == sum(identity + i for i in range(used))
            assert row["next", "observation"][0].item() == identity + used


class TestCase13SamplingAfterTheWrap:
    """Contract: sampling never fails after a wrap and never edits what is stored."""

    @BOTH_N
    @pytest.mark.parametrize("contiguous", [False, True])
    def test_capacity_plus_five_rows_then_a_hundred_samples(self, n_steps, contiguous):
        """case 13"""
        capacity = 16
        buffer = make_buffer(capacity, 2, n_steps)
        ends = [3, 9, 17]
        for t in range(capacity + 5):
            buffer.extend_batch(steps(t, 1, 2, truncated=ends, done=ends))
        flags = {name: buffer.storage["next", name].clone() for name in FLAGS}
        before = state_bytes(buffer.storage.state_dict())
        for _ in range(100):
            buffer.sample(32, contiguous=contiguous)
        for name, value in flags.items():
            assert torch.equal(buffer.storage["next", name], value)
        assert state_bytes(buffer.storage.state_dict()) == before
        assert flags["truncated"][:, 0].flatten().nonzero().flatten().tolist() == [1, 9]

    @BOTH_N
    def test_writing_into_a_sample_leaves_the_storage_alone(self, n_steps):
        """case 13: a loss may edit its batch in place"""
        buffer = make_buffer(8, 2, n_steps)
        buffer.extend_batch(steps(0, 11, 2, terminated=[6], done=[6]))
        before = state_bytes(buffer.storage.state_dict())
        for contiguous in (False, True):
            sample = buffer.sample(32, contiguous=contiguous)
            sample["observation"].fill_(-1.0)
            sample["next", "observation"].fill_(-1.0)
            sample["next", "reward"].fill_(-1.0)
            sample["next", "done"].fill_(True)
        assert state_bytes(buffer.storage.state_dict()) == before


def sized(observation: int, critic: int, action: int = 29, dtype: torch.dtype = torch.float32) -> TensorDict:
    """An example of one row, [1, 1]."""
    out = TensorDict(
        {
            "observation": torch.zeros(1, 1, observation, dtype=dtype),
            "critic": torch.zeros(1, 1, critic, dtype=dtype),
            "action": torch.zeros(1, 1, action),
        },
        [1, 1],
    )
    out["next"] = TensorDict(
        {"observation": out["observation"], "critic": out["critic"], "reward": torch.zeros(1, 1, 1)}, [1, 1]
    )
    for name in FLAGS:
        out["next", name] = torch.zeros(1, 1, 1, dtype=torch.bool)
    return out


class TestCase14Memory:
    """Contract: each observation is kept once, in its own dtype, and the bytes are known before allocation."""

    @pytest.mark.parametrize(("capacity", "streams"), [(128, 256), (1024, 64)])
    def test_bytes_are_at_most_1_05_of_one_observation_copy_and_the_other_fields(self, capacity, streams):
        """case 14"""
        storage = SlotStorage(capacity, streams, layout=RowLayout.from_tensordict(sized(98, 120)))
        one_copy = capacity * streams * (4 * (98 + 120 + 29 + 1) + 3)
        assert one_copy <= storage.nbytes <= 1.05 * one_copy

    def test_all_fields_live_in_one_allocation_of_the_stated_size(self):
        """case 14: the number is what is really held"""
        layout = RowLayout.from_tensordict(sized(98, 120))
        storage = SlotStorage(128, 64, layout=layout)
        storage.extend_batch(sized(98, 120).expand(2, 64))
        held = {storage[key].untyped_storage().data_ptr() for key in ("observation", "critic", ("next", "reward"))}
        assert len(held) == 1
        real = storage["observation"].untyped_storage().nbytes()
        assert 0.98 * storage.nbytes <= real <= storage.nbytes
        assert SlotStorage.nbytes_for(layout, 128, 64) == storage.nbytes

    @pytest.mark.parametrize("kind", ["plain", "shared", "file"])
    def test_bytes_stated_before_allocation_are_those_allocated(self, kind, tmp_path):
        """case 14"""
        layout = RowLayout.from_tensordict(sized(98, 120))
        for finals in (None, 5):
            place = {"shared": {"shared": True}, "file": {"filename": str(tmp_path / f"replay_{finals}")}}.get(kind, {})
            storage = SlotStorage(128, 64, layout=layout, final_capacity=finals, **place)
            stated = SlotStorage.nbytes_for(layout, 128, 64, final_capacity=finals, grows=kind == "plain")
            assert storage.nbytes == stated

    def test_4096_streams_of_1024_slots_need_one_copy_of_68_1_gigabytes(self):
        """case 14"""
        layout = RowLayout.from_tensordict(sized(2412, 1645))
        rows = 4096 * 1024
        observations = rows * 4 * 2412 + rows * 4 * 1645
        assert (round(rows * 4 * 2412 / 1e9, 1), round(rows * 4 * 1645 / 1e9, 1)) == (40.5, 27.6)
        assert round(observations / 1e9, 1) == 68.1
        one_copy = observations + rows * (4 * 30 + 3)
        needed = SlotStorage.nbytes_for(layout, 1024, 4096)
        assert one_copy <= needed <= 1.05 * one_copy

    def test_pixels_stay_uint8(self):
        """case 14"""
        layout = RowLayout.from_tensordict(sized(64 * 64 * 3, 8, dtype=torch.uint8))
        storage = SlotStorage(64, 2, layout=layout)
        assert storage["observation"].dtype == torch.uint8
        assert storage.nbytes <= 1.05 * 64 * 2 * (64 * 64 * 3 + 8 + 4 * 30 + 3)

    def test_shortage_names_needed_and_free_bytes_before_anything_is_allocated(self):
        """case 14: 70 petabytes"""
        layout = RowLayout.from_tensordict(sized(2412, 1645))
        with pytest.raises(MemoryError, match=r"(?i)free|available") as caught:
            storage = SlotStorage(1024 * 1024 * 1024, 4096, layout=layout)
            storage.extend_batch(sized(2412, 1645).expand(1, 4096))
        assert "observation" in str(caught.value) and "critic" in str(caught.value)


class TestCase54TwoMeaningsOfNext:
    """Contract: the successor of a time limit is the final observation and bootstraps; a termination does not; the
    row after it starts with the reset observation and has no final observation of its own."""

    GAMMA, Q_NEXT = 0.97, 10.0
    RESET = 70.0

    def episode(self, flag: str, next_obs: str) -> Any:
        """Rows 0, 1, 2 with rewards 1; row 1 ends its episode at observation 2; row 2 starts at the reset."""
        data = TensorDict({"id": torch.arange(3).reshape(3, 1)}, [3])
        data["observation"] = torch.tensor([[0.0], [1.0], [self.RESET]])
        data["next", "observation"] = torch.tensor([[1.0], [2.0], [self.RESET + 1]])
        data["next", "reward"] = torch.ones(3, 1)
        for name in FLAGS:
            data["next", name] = torch.tensor([[False], [name in (flag, "done")], [False]])
        buffer = SlotReplayBuffer(
            storage=SlotStorage(8, next_obs=next_obs),
            sampler=TransitionSampler(1, self.GAMMA),
            generator=torch.Generator().manual_seed(0),
        )
        buffer.extend_batch(data)
        return buffer

    def target(self, row: TensorDict) -> float:
        alive = 1.0 - row["next", "terminated"].float()
        return (row["next", "reward"] + alive * row["discount"] * self.Q_NEXT).item()

    @pytest.mark.parametrize("next_obs", ["derive", "store"])
    def test_truncated_row_bootstraps_to_10_7_from_its_final_observation(self, next_obs):
        """case 54"""
        row = rows_by_id(self.episode("truncated", next_obs).sample(128))[1]
        assert self.target(row) == pytest.approx(10.7)
        assert row["next", "observation"].item() == 2.0

    @pytest.mark.parametrize("next_obs", ["derive", "store"])
    def test_terminated_row_is_worth_its_reward(self, next_obs):
        """case 54"""
        row = rows_by_id(self.episode("terminated", next_obs).sample(128))[1]
        assert self.target(row) == pytest.approx(1.0)

    @pytest.mark.parametrize("flag", ["terminated", "truncated"])
    @pytest.mark.parametrize("next_obs", ["derive", "store"])
    def test_following_row_starts_at_the_reset_observation(self, flag, next_obs):
        """case 54"""
        row = rows_by_id(self.episode(flag, next_obs).sample(128))[2]
        assert row["observation"].item() == self.RESET
        assert row["next", "observation"].item() == self.RESET + 1

    @pytest.mark.parametrize("flag", ["terminated", "truncated"])
    def test_only_the_ended_row_has_a_final_observation(self, flag):
        """case 54"""
        buffer = self.episode(flag, "derive")
        assert buffer.storage.num_finals() == 1
        row = rows_by_id(buffer.sample(128))[2]
        assert not any(row["next", name].item() for name in FLAGS)

    def test_terminated_row_without_a_final_observation_is_never_bootstrapped(self):
        """case 54: nothing that follows it is taken for its successor, least of all the reset observation"""
        buffer = self.episode("terminated", "derive")
        buffer.empty()
        bare = TensorDict({"id": torch.arange(3).reshape(3, 1)}, [3])
        bare["observation"] = torch.tensor([[0.0], [1.0], [self.RESET]])
        bare["next", "reward"] = torch.ones(3, 1)
        for name in FLAGS:
            bare["next", name] = torch.tensor([[False], [name in ("terminated", "done")], [False]])
        buffer.extend_batch(bare)
        row = rows_by_id(buffer.sample(128))[1]
        assert self.target(row) == pytest.approx(1.0)
        assert row["next", "observation"].item() == 1.0
        assert buffer.storage.num_finals() == 0
