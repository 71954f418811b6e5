# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""One storage in several processes: positions are shared, handles mean the same, readers without the lock see no torn
row."""

from __future__ import annotations

import errno
import os
import pickle
import time
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from unittest import mock

import pytest
import torch
import torch.multiprocessing as mp
from tensordict import TensorDict

from torchrl_ext.data import (
    RowLayout,
    SlotReplayBuffer,
    SlotStorage,
    TransitionSampler,
    _slot_write,
    checkpoint,
    replay_buffers,
)
from torchrl_ext.data._block import HEAD, NEWEST, RESERVED, UNKNOWN
from torchrl_ext.data.draws import sampleable_counts
from torchrl_ext.data.positions import snapshot, undisturbed

STREAMS, CAPACITY, DEADLINE = 4, 16, 120.0


def run(first: int, num_steps: int) -> TensorDict:
    """Every field of a row is its step; every seventh step terminates, and its successor is negative."""
    t = torch.arange(first, first + num_steps).view(-1, 1, 1).expand(-1, STREAMS, 1).float()
    done = t % 7 == 6
    after = torch.where(done, -t, t + 1)
    wide, wide_after = t.expand(-1, -1, 64), after.expand(-1, -1, 64)
    step = {"observation": wide_after, "reward": t, "done": done, "terminated": done}
    return TensorDict({"observation": wide, "next": step}, [num_steps, STREAMS])


def write_until_told(storage: SlotStorage, started, stop) -> None:
    torch.set_num_threads(1)
    first = 3
    while not stop.is_set():
        storage.extend_batch(run(first, 3))
        first += 3
        started.set()


def write_once(storage: SlotStorage) -> None:
    storage.extend_batch(run(3, 5))


def make_storage(kind: str, folder) -> SlotStorage:
    layout = RowLayout.from_tensordict(run(0, 1))
    place = {"shared": True} if kind == "shared" else {"filename": str(folder / "replay")}
    return SlotStorage(CAPACITY, STREAMS, layout=layout, final_capacity=CAPACITY + 1, **place)


@pytest.mark.parametrize("kind", ["shared", "file"])
class TestTwoProcesses:
    """Contract: one writer per stream, any number of readers; a reader drops what was reserved while it read."""

    def test_what_another_process_writes_is_seen_with_its_generations(self, kind, tmp_path):
        storage = make_storage(kind, tmp_path)
        handle = storage.extend_batch(run(0, 3))
        process = mp.get_context("spawn").Process(target=write_once, args=(storage,), daemon=True)
        process.start()
        process.join(DEADLINE)
        assert process.exitcode == 0, f"the writer ended with {process.exitcode}"
        assert storage.head.tolist() == [8] * STREAMS
        assert storage["observation"][:8, 0, 0].tolist() == [float(i) for i in range(8)]
        assert torch.equal(storage.generation_of(handle.index), handle.generation)

    def test_reader_without_the_lock_sees_no_torn_row(self, kind, tmp_path):
        storage = make_storage(kind, tmp_path)
        storage.extend_batch(run(0, 3))
        buffer = SlotReplayBuffer(storage=storage, sampler=TransitionSampler(2, 1.0), batch_size=16)
        context = mp.get_context("spawn")
        started, stop = context.Event(), context.Event()
        process = context.Process(target=write_until_told, args=(storage, started, stop), daemon=True)
        process.start()
        assert started.wait(DEADLINE), "the writer wrote nothing"
        end = time.monotonic() + DEADLINE
        batches = 0
        try:
            while batches < 200 or int(storage.head[0]) < 10 * CAPACITY:
                assert time.monotonic() < end, f"{batches} batches and head {storage.head[0]} after {DEADLINE} s"
                sample = buffer.sample()
                t = sample["observation"][:, :1]
                assert torch.equal(sample["observation"], t.expand(-1, 64)), "fields of two steps in one row"
                used = sample["steps_to_next_obs"]
                last = t + used - 1
                after = torch.where(sample["next", "done"], -last, last + 1)
                assert torch.equal(sample["next", "observation"], after.expand(-1, 64)), "a successor of another row"
                assert torch.equal(sample["next", "reward"], used * t + used * (used - 1) / 2), "a return of other rows"
                batches += 1
        finally:
            stop.set()
            process.join(DEADLINE)
        assert not process.is_alive(), "the writer did not stop"


def assert_whole(storage: SlotStorage) -> None:
    """Every row that can be sampled, if there is one, has the fields of one step and the successor of that step."""
    if not int(sampleable_counts(storage.block)[2].sum()):
        return
    sample = SlotReplayBuffer(storage=storage, batch_size=256).sample()
    t = sample["observation"][:, :1]
    assert torch.equal(sample["observation"], t.expand(-1, 64)), "fields of two steps in one row"
    after = torch.where(sample["next", "done"], -t, t + 1)
    assert torch.equal(sample["next", "observation"], after.expand(-1, 64)), "a successor of another row"
    slot = sample["index"][:, 0]
    assert torch.equal(t[:, 0].long(), sample["index_generation"] * CAPACITY + slot), "a row of another step"


class TestSavingBesideAWriter:
    """Contract: a state that is saved while another process writes has whole rows with their successors only."""

    @pytest.mark.parametrize("written", [5, 40])
    @pytest.mark.parametrize(
        ("form", "during"), [("state", at) for at in range(6)] + [("pickle", at) for at in range(3)]
    )
    @pytest.mark.parametrize("change", ["1 step", "3 steps", "a lap", "a part", "cut", "empty"])
    def test_nothing_torn_is_saved(self, change, form, during, written, tmp_path, monkeypatch):
        """Forced: the other process writes while one tensor after the other is copied, halfway through it; or after
        the storage looked at itself, and before the first copy."""
        storage = make_storage("file", tmp_path)
        storage.extend_batch(replace(storage.layout.pack(run(0, written)), tail=None))
        other, copied = SlotStorage.open(str(tmp_path / "replay")), []

        def change_it():
            if change == "cut":
                other.end_streams(slice(0, 2))
            elif change == "empty":
                other.empty()
            elif change == "a part":  # killed in its write: reserved, half a row written, never published
                other.block.np_positions[RESERVED] += 2
                other.block.ring[written % CAPACITY, :, :100] = 77
            else:
                other.extend_batch(run(written, {"1 step": 1, "3 steps": 3, "a lap": CAPACITY}[change]))

        def host_copy(tensor):
            if not copied and not during:
                change_it()
            copied.append(tensor)
            copy = tensor.clone()
            if len(copied) == during:
                change_it()
                copy[len(copy) // 2 :] = tensor[len(copy) // 2 :]
            return copy

        monkeypatch.setattr(checkpoint, "host_copy", host_copy)
        restored = make_storage("shared", tmp_path)  # a side table that cannot grow
        if form == "state":
            restored.load_state_dict(storage.state_dict())
        else:
            restored = pickle.loads(pickle.dumps(storage))
        assert len(copied) == (5 if form == "state" else 2)
        head = int(restored.head[0])
        assert restored.head.tolist() == [head] * STREAMS or change == "cut"
        assert restored.write_count == 0 or change != "empty"
        assert_whole(restored)
        for steps in (1, 2, 5, 11) if change != "cut" else ():
            restored.extend_batch(run(int(restored.head[0]), steps))
            assert_whole(restored)
        assert restored.block.final_capacity == CAPACITY + 1

    @pytest.mark.parametrize("next_obs", ["derive", "store"])
    @pytest.mark.parametrize("written", [5, 8, 40])
    def test_newest_saved_row_keeps_its_successor_when_an_episode_begins(
        self, written, next_obs, tmp_path, monkeypatch
    ):
        """Step 6 ends an episode, so that with 8 rows the newest that is saved is such a row."""
        layout = RowLayout.from_tensordict(run(0, 1), next_obs=next_obs)
        storage = SlotStorage(CAPACITY, STREAMS, layout=layout, filename=str(tmp_path / "replay"))
        storage.extend_batch(run(0, written))
        other, copied = SlotStorage.open(str(tmp_path / "replay")), []

        def host_copy(tensor):
            copied.append(tensor)
            if len(copied) == 3:
                other.extend_batch(run(written, 1))
            return tensor.clone()

        monkeypatch.setattr(checkpoint, "host_copy", host_copy)
        restored = SlotStorage(CAPACITY, STREAMS)
        restored.load_state_dict(storage.state_dict())
        assert restored.head.tolist() == [written - 1] * STREAMS
        restored.extend_batch(run(1001, 3))
        buffer = SlotReplayBuffer(storage=restored, sampler=TransitionSampler(2, 1.0), batch_size=512)
        sample = buffer.sample()
        t, used = sample["observation"][:, 0], sample["steps_to_next_obs"][:, 0]
        assert (t == written - 2).any(), "the newest row that was saved"
        last = t + used - 1
        assert torch.equal(sample["next", "observation"][:, 0], torch.where(last % 7 == 6, -last, last + 1))
        assert torch.equal(sample["next", "reward"][:, 0], used * t + used * (used - 1) / 2), "a return of two episodes"

    def test_newest_row_that_is_a_hole_is_saved_where_nothing_changes(self, tmp_path):
        storage = make_storage("file", tmp_path)
        storage.extend_batch(replace(storage.layout.pack(run(0, 5)), tail=None))
        storage.end_streams()
        restored = SlotStorage(CAPACITY, STREAMS, final_capacity=CAPACITY + 1)
        restored.load_state_dict(storage.state_dict())
        assert restored.head.tolist() == [5] * STREAMS and restored.block.may_have_holes


def test_storage_without_rows_or_layout_is_not_shared_with_a_spawned_process():
    process = mp.get_context("spawn").Process(target=write_once, args=(SlotStorage(CAPACITY, STREAMS, shared=True),))
    with pytest.raises(RuntimeError, match="rows must be there to be shared .* give layout= or write a run first"):
        process.start()


def test_reopened_file_has_the_rows_and_positions(tmp_path):
    storage = make_storage("file", tmp_path)
    handle = storage.extend_batch(run(0, 20))
    again = SlotStorage.open(str(tmp_path / "replay"))
    assert torch.equal(again["observation"], storage["observation"])
    assert torch.equal(again.generation_of(handle.index), storage.generation_of(handle.index))
    again.extend_batch(run(20, 1))
    assert storage.head.tolist() == [21] * STREAMS, "both map the same file"


def test_file_that_the_disk_has_no_room_for_is_not_left_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "posix_fallocate", full)
        make_storage("file", tmp_path)
    make_storage("file", tmp_path).extend_batch(run(0, 3))


def test_file_is_readable_by_its_owner_alone(tmp_path):
    make_storage("file", tmp_path)
    assert (tmp_path / "replay").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("kind", ["cpu", "shared", "file"])
class TestCopies:
    """Contract: a pickle that is not for a process being spawned carries the rows by value, of one moment."""

    @staticmethod
    def storage(kind: str, folder) -> SlotStorage:
        return SlotStorage(CAPACITY, STREAMS) if kind == "cpu" else make_storage(kind, folder)

    def test_what_is_written_after_the_state_was_taken_is_not_in_it(self, kind, tmp_path):
        storage = self.storage(kind, tmp_path)
        storage.extend_batch(run(0, 3))
        state = storage.__getstate__()  # what a pickle writes afterwards, without the lock
        storage.extend_batch(run(3, CAPACITY))
        copy = SlotStorage.__new__(SlotStorage)
        copy.__setstate__(state)
        assert copy.head.tolist() == [3] * STREAMS
        assert copy["observation"][:3, 0, 0].tolist() == [0.0, 1.0, 2.0]

    def test_storage_sent_by_a_queue_is_a_copy_and_leaves_the_sender_alone(self, kind, tmp_path):
        """Torch moves tensors that a queue sends into shared memory."""
        storage = self.storage(kind, tmp_path)
        storage.extend_batch(run(0, 3))
        copy = pickle.loads(bytes(ForkingPickler.dumps(storage)))
        copy.extend_batch(run(3, CAPACITY))
        assert storage.head.tolist() == [3] * STREAMS
        assert len(storage) == 3 * STREAMS
        assert storage["observation"][:3, 0, 0].tolist() == [0.0, 1.0, 2.0]
        storage.extend_batch(run(3, 1))
        assert storage["observation"][:4, 0, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert copy.head.tolist() == [3 + CAPACITY] * STREAMS


@pytest.mark.parametrize("form", ["records", "run"])
def test_writes_after_a_writer_that_was_killed_end_what_it_had_reserved(tmp_path, form):
    """Killed between reserving two steps and publishing them: what it may have torn stays dead, the rest goes on."""
    storage = make_storage("file", tmp_path)
    storage.extend_batch(run(0, CAPACITY))
    storage.block.np_positions[RESERVED] += 2
    again = SlotStorage.open(str(tmp_path / "replay"))
    for step in range(CAPACITY, CAPACITY + 4):
        if form == "run":
            again.extend_batch(run(step, 1))
        else:
            again.extend_records(run(step, 1)[0].flip(0), torch.arange(STREAMS).flip(0))
        torn = max(2 - (step - CAPACITY + 1), 0)
        assert len(again) == (CAPACITY - torn) * STREAMS
        assert int(again.live_range()[0].min()) >= 2
    assert torch.equal(again.block.positions[RESERVED], again.block.positions[HEAD])


@pytest.mark.parametrize("ended", ["by a cut", "by a final observation"])
def test_cut_after_a_writer_that_was_killed_leaves_a_row_that_is_cut_already(tmp_path, ended):
    """Killed after it hid the newest row: whoever starts it anew cuts the streams."""
    storage = make_storage("file", tmp_path)
    storage.extend_batch(replace(storage.layout.pack(run(0, 5 if ended == "by a cut" else 7)), tail=None))
    if ended == "by a cut":
        storage.end_streams()
    storage.block.np_positions[RESERVED] += 1
    storage.block.np_positions[NEWEST] = UNKNOWN
    again = SlotStorage.open(str(tmp_path / "replay"))
    again.end_streams()
    again.extend_batch(run(10, 2))
    sample = SlotReplayBuffer(storage=again, batch_size=1000).sample()
    seen = sorted(set(sample["observation"][:, 0].tolist()))
    assert seen == ([0, 1, 2, 3, 10, 11] if ended == "by a cut" else [0, 1, 2, 3, 4, 5, 6, 10, 11])


def test_cut_after_a_writer_that_was_killed_loses_no_row_with_its_own_successor(tmp_path):
    layout = RowLayout.from_tensordict(run(0, 1), next_obs="store")
    storage = SlotStorage(CAPACITY, STREAMS, layout=layout, filename=str(tmp_path / "replay"))
    storage.extend_batch(run(0, 3))
    again = SlotStorage.open(str(tmp_path / "replay"))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_slot_write, "copy_rows", mock.Mock(side_effect=KeyboardInterrupt))
        storage.extend_batch(run(3, 2))
    again.end_streams()
    again.extend_batch(run(10, 2))
    sample = SlotReplayBuffer(storage=again, sampler=TransitionSampler(5, 1.0), batch_size=1000).sample()
    t, used = sample["observation"][:, 0], sample["steps_to_next_obs"][:, 0]
    assert sorted(set(t.tolist())) == [0, 1, 2, 10, 11]
    assert torch.equal(used, torch.where(t < 3, 3 - t, 12 - t).long())


def test_reader_goes_on_after_a_writer_was_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(replay_buffers, "_PATIENCE", 0.5)
    storage = make_storage("file", tmp_path)
    storage.extend_batch(run(0, CAPACITY + 3))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_slot_write, "copy_rows", mock.Mock(side_effect=KeyboardInterrupt))
        storage.extend_batch(run(CAPACITY + 3, 2))
    assert_whole(SlotStorage.open(str(tmp_path / "replay")))


def test_storage_has_no_rows_while_more_than_a_lap_is_written(tmp_path):
    storage = make_storage("file", tmp_path)
    storage.extend_batch(run(0, 3))
    storage.block.np_positions[RESERVED] += CAPACITY + 5
    assert len(storage) == 0


def test_reader_drops_what_another_process_cut_or_emptied_meanwhile(tmp_path):
    """Forced: the cut and the emptying happen between the reader's two looks at the positions."""
    storage = make_storage("shared", tmp_path)
    storage.extend_batch(run(0, 8))
    newest, oldest = torch.tensor([[7, 0]]), torch.tensor([[0, 0]])
    generation = torch.zeros(1, dtype=torch.int64)
    before = snapshot(storage.block)
    assert undisturbed(storage.block, before, newest, generation, 1)
    storage.end_streams()
    assert not undisturbed(storage.block, before, newest, generation, 1), "its successor moved to the side table"
    assert undisturbed(storage.block, before, oldest, generation, 1)
    storage.empty()
    assert not undisturbed(storage.block, before, oldest, generation, 1), "the row is dead"
