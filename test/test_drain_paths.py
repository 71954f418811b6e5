# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The short ways that a drained run takes: what they leave behind is what the long ways leave behind.

A drained run is packed, has final observations and no tail. Written whole, its streams are in step and the short ways
apply; written one stream after the other, by a storage that is not told that they are in step, the general ones do.
Every byte of both storages is compared.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from test_replay_device import books_on_the_device

from torchrl_ext.data import PackedRun, RowLayout, SlotStorage, _device_write, _slot_write
from torchrl_ext.data.layout import FOLLOWED, NO_SUCCESSOR
from torchrl_ext.transport import HostConsumer, HostProducer, HostRing
from torchrl_ext.transport.cursors import CURSOR_BYTES, Cursor, Cursors

STREAMS, CAPACITY = 5, 8


def make_layout() -> RowLayout:
    no = torch.zeros(1, dtype=torch.bool)
    record = {"observation": torch.zeros(3), "step": torch.zeros((), dtype=torch.int64)}
    return RowLayout.from_tensordict(
        TensorDict({**record, "next": {"observation": torch.zeros(3), "reward": torch.zeros(1), "done": no}}, [])
    )


def drained(layout: RowLayout, rng: np.random.Generator, steps: int, share: float) -> PackedRun:
    """A run of random bytes: a share of its rows has a final observation, another one is cut without."""
    count = steps * STREAMS
    rows = torch.from_numpy(rng.integers(0, 256, (steps, STREAMS, layout.row_bytes), dtype=np.uint8))
    kind = rng.choice(3, size=count, p=[1 - 1.5 * share, share, 0.5 * share])
    final = rows.view(torch.int32)[..., layout.final_offset // 4]
    final[...] = torch.from_numpy(np.where(kind == 2, NO_SUCCESSOR, FOLLOWED)).view(steps, STREAMS)
    ended = np.flatnonzero(kind == 1)
    finals = torch.from_numpy(rng.integers(0, 256, (len(ended), layout.successor_bytes), dtype=np.uint8))
    return PackedRun(layout, rows, torch.from_numpy(ended), finals)


def column(run: PackedRun, stream: int) -> PackedRun:
    """The same run as one stream has it."""
    step, streams = np.divmod(run.final_rows.numpy(), STREAMS)
    ours = streams == stream
    rows = run.rows[:, stream : stream + 1]
    return PackedRun(run.layout, rows, torch.from_numpy(step[ours]), run.finals[torch.from_numpy(ours)])


@contextlib.contextmanager
def never_in_step():
    with (
        mock.patch.object(_slot_write, "common_head", return_value=None),
        mock.patch.object(_device_write, "common_head", return_value=None),
    ):
        yield


class TestRunsInStep:
    @pytest.mark.parametrize("books", [contextlib.nullcontext, books_on_the_device])
    @pytest.mark.parametrize("share", [0.0, 0.03, 0.3])
    def test_run_written_whole_leaves_the_bytes_that_its_streams_leave_one_by_one(self, books, share):
        layout, rng = make_layout(), np.random.default_rng(7)
        with books():
            whole, single = (
                SlotStorage(CAPACITY, STREAMS, layout=layout, final_capacity=CAPACITY + 1) for _ in range(2)
            )
            for number in range(60):
                run = drained(layout, rng, int(rng.choice([1, 2, 3, CAPACITY, CAPACITY + 3])), share)
                handle = whole.extend_batch(run)
                with never_in_step():
                    for stream in range(STREAMS):
                        single.extend_batch(column(run, stream), streams=slice(stream, stream + 1))
                if number % 9 == 8:
                    for storage in (whole, single):
                        storage.end_streams()
                live = whole.generation_of(handle.index) == handle.generation
                assert live[-min(len(live), CAPACITY) :].all()
                assert torch.equal(whole.block.bytes, single.block.bytes), number

    def test_refused_run_changes_nothing_and_the_next_one_fits(self):
        """With books on the device, where the table cannot grow and room is asked for before anything is written."""
        layout, rng = make_layout(), np.random.default_rng(3)
        with books_on_the_device():
            storage = SlotStorage(CAPACITY, STREAMS, layout=layout, final_capacity=3)
            storage.extend_batch(drained(layout, rng, 1, 0.0))
            assert storage.block.settled_at == 1
            run = drained(layout, rng, 4, 0.0)
            ends = torch.arange(4) * STREAMS + 2
            finals = torch.ones(4, layout.successor_bytes, dtype=torch.uint8)
            before = storage.block.bytes.clone(), storage.head
            with pytest.raises(RuntimeError, match="side table must hold 5 entries"):
                storage.extend_batch(PackedRun(layout, run.rows, ends, finals))
            assert torch.equal(storage.block.bytes, before[0]) and torch.equal(storage.head, before[1])
            storage.extend_batch(PackedRun(layout, run.rows, ends[:2], finals[:2]))
            assert storage.head.tolist() == [5] * STREAMS and storage.num_finals() == 2

    def test_kernels_are_told_the_same_whether_or_not_a_stream_ends_twice(self):
        """The rows of ``numbers`` that only kernels read: rank, row of the finals, whether the last of its stream."""
        layout, rng = make_layout(), np.random.default_rng(2)
        run, first = drained(layout, rng, 4, 0.0), np.arange(STREAMS) + 100

        def listed(*rows: int) -> list[tuple[int, ...]]:
            storage = SlotStorage(CAPACITY, STREAMS + 1, layout=layout)
            finals = torch.zeros(len(rows), layout.successor_bytes, dtype=torch.uint8)
            given = PackedRun(layout, run.rows, torch.tensor(rows), finals)
            found = _device_write._listed(storage.block, given, slice(1, STREAMS + 1), first, 4)
            assert found.most == 1 + max(rank for _, _, rank, _, _ in found.numbers.T)
            return sorted(map(tuple, found.numbers.T.tolist()))

        once = [(1, 100, 0, 0, 1), (2, 104, 0, 2, 1), (4, 104, 0, 1, 1)]
        assert listed(0, 8, 16) == once
        assert listed(0, 8, 16, 18) == [*once[:2], (4, 104, 0, 1, 0), (4, 106, 1, 3, 1)]

    @pytest.mark.parametrize("streams", [slice(0, STREAMS), slice(1, 3)])
    def test_rows_at_any_address_are_copied(self, streams):
        layout, rng = make_layout(), np.random.default_rng(5)
        run = drained(layout, rng, 3, 0.0)
        odd = torch.zeros(run.rows.numel() + 1, dtype=torch.uint8)[1:].view(run.rows.shape).copy_(run.rows)
        storage = SlotStorage(CAPACITY, STREAMS, layout=layout)
        storage.extend_batch(PackedRun(layout, odd[:, streams]), streams=streams)
        assert torch.equal(storage.block.ring[:3, streams], run.rows[:, streams])


class TestSpansOfARing:
    def test_ends_and_beginnings_of_any_steps_are_those_that_were_pushed(self):
        layout, rng = make_layout(), np.random.default_rng(11)
        ring = HostRing(layout, 7, STREAMS, final_capacity=STREAMS + 3)
        producer, consumer = HostProducer(ring), HostConsumer(ring)
        steps: list[dict[str, Any]] = []
        read = 0
        for _ in range(300):
            while rng.random() < 0.8 and producer.reserve() is not None:
                count = int(rng.choice([0, 0, 0, 1, STREAMS]))
                ended = np.sort(rng.permutation(STREAMS)[:count])
                finals = torch.from_numpy(rng.integers(0, 256, (count, layout.row_bytes), dtype=np.uint8))
                begins = bool(rng.random() < 0.1)
                producer.publish(final_streams=ended, finals=finals, begins=begins)
                steps.append({"ended": ended, "finals": finals[:, : layout.successor_bytes], "begins": begins})
            if (span := consumer.read_span(int(rng.integers(1, 8)), tail=False)) is None:
                continue
            shown = steps[read : read + span.num_steps]
            assert (span.first_step, span.begins) == (read, shown[0]["begins"])
            assert not any(step["begins"] for step in shown[1:])
            rows = np.concatenate([number * STREAMS + step["ended"] for number, step in enumerate(shown)])
            if len(rows):
                assert span.run.final_rows.tolist() == rows.tolist()
                assert torch.equal(span.run.finals, torch.cat([step["finals"] for step in shown]))
            else:
                assert span.run.final_rows is None and span.run.finals is None
            read += span.num_steps
            span.commit()
        assert read > 100 and consumer.finals == sum(len(step["ended"]) for step in steps[:read])


class TestPush:
    def fields(self) -> dict[Any, Any]:
        numbers = np.arange(STREAMS)
        return {
            "observation": torch.from_numpy(numbers).view(-1, 1).expand(-1, 3),  # integers, cast to floats
            "step": numbers.astype(np.float64),
            ("next", "reward"): numbers[:, None].astype(np.float32),
            ("next", "done"): torch.from_numpy(numbers[:, None] % 2),
        }

    def test_tensors_and_arrays_of_any_dtype_arrive_as_the_layout_has_them(self):
        ring = HostRing(make_layout(), 4, STREAMS)
        producer, consumer = HostProducer(ring), HostConsumer(ring)
        assert producer.push(self.fields())
        rows = consumer.read_span().view()[0]
        assert rows["observation"].tolist() == [[float(n)] * 3 for n in range(STREAMS)]
        assert rows["step"].tolist() == list(range(STREAMS)) and rows["step"].dtype == torch.int64
        assert rows["next", "reward"].flatten().tolist() == list(range(STREAMS))
        assert rows["next", "done"].flatten().tolist() == [False, True, False, True, False]

    @pytest.mark.parametrize("wrong", [np.zeros(STREAMS), np.zeros((STREAMS, 2)), torch.zeros(1, 1)])
    def test_field_of_another_shape_leaves_the_slot_as_it_was(self, wrong):
        ring = HostRing(make_layout(), 4, STREAMS)
        producer, before = HostProducer(ring), ring.parts.rows.clone()
        with pytest.raises(ValueError, match=r"key \('next', 'reward'\) must have shape \[5, 1\], got"):
            producer.push({**self.fields(), ("next", "reward"): wrong})
        with pytest.raises(KeyError):
            producer.push({"observation": self.fields()["observation"]})
        assert torch.equal(ring.parts.rows, before) and ring.parts.cursors()[Cursor.ISSUED] == 0
        assert producer.push(self.fields())


class TestCursors:
    def test_each_counter_has_a_cache_line_of_its_own(self):
        memory = bytearray(CURSOR_BYTES)
        cursors = Cursors(memoryview(memory))
        numbers = [number for name, number in vars(Cursor).items() if name.isupper()]
        for number in numbers:
            cursors[number] = -1 - number
        found = np.frombuffer(memory, np.int64).reshape(-1, 8)
        assert len(found) == len(numbers) and sorted(numbers) == list(range(len(numbers)))
        assert [cursors[number] for number in numbers] == found[numbers, 0].tolist() == [-1 - n for n in numbers]
        assert not found[:, 1:].any()

    def test_released_counters_let_their_memory_be_closed(self):
        memory = mmap.mmap(-1, CURSOR_BYTES)
        cursors = Cursors(memoryview(memory))
        cursors[Cursor.READ] = 3
        with pytest.raises(BufferError):
            memory.close()
        cursors.release()
        memory.close()
