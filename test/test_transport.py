# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The contract of a ring: order, room, borrowed spans, final observations, tails, death. Rows name (stream, step)."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from torchrl_ext.data import RowLayout, SlotReplayBuffer, SlotStorage, TransitionSampler
from torchrl_ext.transport import (
    CudaIpcConsumer,
    CudaIpcProducer,
    CudaIpcRing,
    HostConsumer,
    HostProducer,
    HostRing,
    RingClosed,
    RingPeerDied,
)
from torchrl_ext.transport.cursors import Cursor
from torchrl_ext.transport.pinning import Pinned
from torchrl_ext.transport.segment import Segment
from torchrl_ext.transport.segment import _attach as segment_of_process

DEADLINE = 120.0
#: Slots of the stress test; a million in the long run.
STRESS_SLOTS = int(os.environ.get("RING_STRESS_SLOTS", "20000"))
FEATURES = 5


def make_layout() -> RowLayout:
    zeros, no = torch.zeros(FEATURES), torch.zeros(1, dtype=torch.bool)
    return RowLayout.from_tensordict(
        TensorDict(
            {
                "observation": zeros,
                "step": torch.zeros((), dtype=torch.int64),
                "next": {"observation": zeros, "reward": torch.zeros(1), "done": no, "terminated": no, "truncated": no},
            },
            [],
        )
    )


class SettledProducer(CudaIpcProducer):
    """Waits for the device in every publication, so that it is as immediate as on the host; nobody but a test would."""

    def publish(self, **ends: Any) -> None:
        super().publish(**ends)
        torch.cuda.synchronize()


class SettledConsumer(CudaIpcConsumer):
    """Waits for the device in every commit, as nobody but a test would."""

    def _commit(self, steps: int, finals: int) -> None:
        super()._commit(steps, finals)
        torch.cuda.synchronize()
        self.poll()


def make_host(capacity: int = 4, num_streams: int = 2, **options: Any) -> tuple[HostRing, HostProducer, HostConsumer]:
    ring = HostRing(make_layout(), capacity, num_streams, **options)
    return ring, HostProducer(ring), HostConsumer(ring)


def make_ipc(capacity: int = 4, num_streams: int = 2, **options: Any) -> tuple[Any, Any, Any]:
    ring = CudaIpcRing(make_layout(), capacity, num_streams, device="cuda", tails=True, **options)
    return ring, SettledProducer(ring), SettledConsumer(ring)


@pytest.fixture(params=["host", pytest.param("ipc", marks=pytest.mark.gpu)])
def make(request: pytest.FixtureRequest) -> Callable[..., tuple[Any, Any, Any]]:
    """Makes a ring and both its ends, in one process, of either transport."""
    return {"host": make_host, "ipc": make_ipc}[request.param]


def settle(ring: Any) -> None:
    """Lets copies on the device arrive, so that publication is as immediate as on the host."""
    if ring.parts.rows.is_cuda:
        torch.cuda.synchronize()


def shown(stream: np.ndarray | int, step: int) -> Any:
    """The number that all features of an observation hold."""
    return 1000.0 * np.asarray(stream) + step % 1000


def packed(layout: RowLayout, numbers: Any) -> torch.Tensor:
    """Observations that hold these numbers, as the producer hands final observations and tails over."""
    numbers = torch.as_tensor(np.asarray(numbers), dtype=torch.float32)
    rows = torch.zeros(len(numbers), layout.successor_bytes, dtype=torch.uint8)
    layout.leaves(rows, layout.prefix)["observation"].copy_(numbers.unsqueeze(-1))
    return rows


def write_step(
    ring: Any,
    producer: Any,
    step: int,
    *,
    ended: tuple[int, ...] = (),
    tail: bool = False,
    settled: bool = True,
    **others: Any,
) -> bool:
    """One step of all streams; ``ended`` ones are truncated at a final observation of 0.5 more than a next one has."""
    slot = producer.reserve()
    if slot is None:
        return False
    streams = np.arange(ring.num_streams)
    slot["observation"].copy_(torch.from_numpy(shown(streams, step)).float().unsqueeze(-1))
    slot["step"].fill_(step)
    slot["next", "reward"].fill_(step)
    flag = torch.zeros(ring.num_streams, 1, dtype=torch.bool)
    flag[list(ended)] = True
    slot["next", "done"].copy_(flag)
    slot["next", "truncated"].copy_(flag)
    slot["next", "terminated"].zero_()
    ids = np.asarray(ended, dtype=np.int64)
    producer.publish(
        final_streams=ids if ended else None,
        finals=packed(ring.layout, shown(ids, step + 1) + 0.5) if ended else None,
        tail=packed(ring.layout, shown(streams, step + 1)) if tail else None,
        **others,
    )
    if settled:
        settle(ring)
    return True


def steps_of(consumer: Any) -> list[int]:
    """Reads and commits everything that is published."""
    found: list[int] = []
    while (span := consumer.read_span()) is not None:
        with span:
            assert span.num_steps == len(span.rows)
            found += span.view()["step"][:, 0].tolist()
    return found


class TestOrderAndRoom:
    def test_steps_arrive_once_in_order_over_many_laps(self, make):
        ring, producer, consumer = make()
        found, step, generator = [], 0, np.random.default_rng(0)
        while step < 100:
            for _ in range(generator.integers(1, 6)):
                step += write_step(ring, producer, step)
            found += steps_of(consumer)
        assert found == list(range(step))

    def test_burst_is_accepted_up_to_the_capacity(self, make):
        """case 50"""
        ring, producer, consumer = make(capacity=4)
        assert [write_step(ring, producer, step) for step in range(7)] == [True] * 4 + [False] * 3
        assert consumer.fill == 4
        assert steps_of(consumer) == [0, 1, 2, 3]
        assert write_step(ring, producer, 4)

    def test_span_is_the_longest_run_of_neighbours(self, make):
        ring, producer, consumer = make(capacity=4)
        for step in range(3):
            write_step(ring, producer, step)
        assert consumer.read_span().num_steps == 3
        ring, producer, consumer = make(capacity=4)
        for step in range(3):
            write_step(ring, producer, step)
        steps_of(consumer)
        for step in range(3, 6):
            write_step(ring, producer, step)
        with consumer.read_span() as span:
            assert (span.first_step, span.num_steps) == (3, 1), "the end of the ring ends a span"
        with consumer.read_span() as span:
            assert (span.first_step, span.num_steps) == (4, 2)

    def test_span_has_at_most_as_many_steps_as_asked_for(self, make):
        ring, producer, consumer = make(capacity=4)
        for step in range(4):
            write_step(ring, producer, step)
        with consumer.read_span(3) as span:
            assert span.num_steps == 3
        assert steps_of(consumer) == [3]

    @pytest.mark.parametrize("max_steps", [0, -1])
    def test_span_of_no_steps_is_refused(self, make, max_steps):
        ring, producer, consumer = make(capacity=4)
        write_step(ring, producer, 0)
        with pytest.raises(ValueError, match=f"max_steps must be at least 1, got {max_steps}. Nothing was lent"):
            consumer.read_span(max_steps)
        assert steps_of(consumer) == [0]

    def test_credit_bounds_what_is_ever_written(self, make):
        ring, producer, consumer = make(capacity=4)
        consumer.grant(6)
        written = 0
        for _ in range(5):
            while write_step(ring, producer, written):
                written += 1
            steps_of(consumer)
        assert written == 6
        consumer.grant(7)
        assert write_step(ring, producer, 6) and not write_step(ring, producer, 7)

    def test_slot_is_not_seen_before_it_is_published(self, make):
        ring, producer, consumer = make()
        slot = producer.reserve()
        slot["step"].fill_(7)
        assert consumer.read_span() is None
        producer.publish()
        assert steps_of(consumer) == [7]


class TestPush:
    def test_step_of_separate_fields_is_published_whole(self, make):
        ring, producer, consumer = make(capacity=2)
        leaves = {key: torch.ones(2, *field.shape, dtype=field.dtype) for key, field in ring.layout.by_key.items()}
        assert [producer.push(leaves) for _ in range(3)] == [True, True, False]
        with consumer.read_span() as span:
            view = span.view()
            assert all(bool((view[key] == 1).all()) for key in ring.layout.by_key)

    def test_arrays_do_as_well_and_are_cast(self, make):
        ring, producer, consumer = make()
        leaves = {key: np.full((2, *field.shape), 1.0) for key, field in ring.layout.by_key.items()}
        assert producer.push(leaves)
        with consumer.read_span() as span:
            view = span.view()
            assert all(bool((view[key] == 1).all()) for key in ring.layout.by_key)

    def test_field_of_another_shape_publishes_nothing(self, make):
        ring, producer, consumer = make()
        leaves = {key: torch.ones(2, *field.shape) for key, field in ring.layout.by_key.items()}
        leaves["step"] = torch.ones(1)
        with pytest.raises(ValueError, match="'step' must have shape"):
            producer.push(leaves)
        assert consumer.fill == 0

    def test_missing_field_publishes_nothing(self, make):
        ring, producer, consumer = make()
        with pytest.raises(
            KeyError, match="'observation' must be among the fields, got \\['step'\\]. Nothing was published"
        ):
            producer.push({"step": torch.zeros(2, dtype=torch.int64)})
        assert consumer.fill == 0


class TestBorrowedSpans:
    def test_committed_span_shows_nothing(self, make):
        ring, producer, consumer = make()
        write_step(ring, producer, 0)
        span = consumer.read_span()
        span.commit()
        span.commit()
        for look in (lambda: span.rows, span.view, lambda: span.run):
            with pytest.raises(RuntimeError, match="were committed"):
                look()

    def test_slots_are_not_written_again_before_they_are_committed(self, make):
        ring, producer, consumer = make(capacity=2)
        for step in range(2):
            write_step(ring, producer, step)
        span = consumer.read_span()
        assert not write_step(ring, producer, 2)
        assert span.view()["step"][:, 0].tolist() == [0, 1]
        span.commit()
        assert write_step(ring, producer, 2)

    def test_block_that_is_left_by_an_exception_read_nothing(self, make):
        ring, producer, consumer = make()
        write_step(ring, producer, 0)
        span = consumer.read_span()
        with pytest.raises(KeyError), span:
            raise KeyError
        assert span.view()["step"][0, 0] == 0
        span.commit()

    def test_released_span_is_lent_again(self, make):
        ring, producer, consumer = make()
        write_step(ring, producer, 0)
        consumer.read_span().release()
        with consumer.read_span() as span:
            assert span.view()["step"][0, 0] == 0

    def test_released_span_says_that_it_was_given_up(self, make):
        ring, producer, consumer = make()
        write_step(ring, producer, 0)
        span = consumer.read_span()
        span.release()
        with pytest.raises(RuntimeError, match="Span: steps 0 to 0 were committed or released"):
            span.view()

    def test_next_span_needs_the_last_one_committed(self, make):
        ring, producer, consumer = make()
        write_step(ring, producer, 0)
        consumer.read_span()
        with pytest.raises(RuntimeError, match="must be committed"):
            consumer.read_span()


class TestFinalObservations:
    def test_they_arrive_with_their_rows_over_many_laps(self, make):
        ring, producer, consumer = make(capacity=4, num_streams=3, final_capacity=7)
        generator = np.random.default_rng(1)
        for step in range(200):
            ended = tuple(np.flatnonzero(generator.random(3) < 0.4).tolist())
            assert write_step(ring, producer, step, ended=ended)
            with consumer.read_span() as span:
                run = span.run
                assert (run.final_rows.tolist() if ended else run.final_rows) == (list(ended) or None)
                if ended:
                    numbers = ring.layout.leaves(run.finals, ring.layout.prefix)["observation"][:, 0]
                    assert numbers.tolist() == (shown(np.array(ended), step + 1) + 0.5).tolist()

    def test_rows_of_a_span_are_counted_over_its_steps(self, make):
        ring, producer, consumer = make(capacity=4, num_streams=3)
        for step, ended in enumerate([(2,), (), (0, 1)]):
            write_step(ring, producer, step, ended=ended)
        assert consumer.read_span().run.final_rows.tolist() == [2, 6, 7]

    def test_slot_is_refused_while_the_arena_might_not_do(self, make):
        ring, producer, consumer = make(capacity=8, num_streams=2, final_capacity=3)
        assert write_step(ring, producer, 0, ended=(0, 1))
        assert not write_step(ring, producer, 1), "one place is left, and two streams may end"
        steps_of(consumer)
        assert write_step(ring, producer, 1)

    def test_terminated_rows_without_one_are_marked_for_their_lap_alone(self, make):
        ring, producer, consumer = make(capacity=2)
        for step in range(6):
            producer.reserve()
            producer.publish(cut_streams=np.array([1]) if step == 1 else None)
            with consumer.read_span() as span:
                final = span.rows.view(torch.int32)[0, :, ring.layout.final_offset // 4].tolist()
                assert final == ([-1, -2] if step == 1 else [-1, -1])

    def test_rings_of_many_steps_make_the_replay_of_single_ones(self, make):
        """Every sampled transition has its true successor, whatever the spans were."""
        ring, producer, consumer = make(capacity=4, num_streams=3)
        storage = SlotStorage(64, 3, layout=ring.layout)
        buffer = SlotReplayBuffer(storage=storage, sampler=TransitionSampler(), batch_size=2000)
        generator, step, ends = np.random.default_rng(2), 0, set()
        while step < 60:
            for _ in range(generator.integers(1, 5)):
                ended = tuple(np.flatnonzero(generator.random(3) < 0.2).tolist())
                if write_step(ring, producer, step, ended=ended, tail=True):
                    ends |= {(stream, step) for stream in ended}
                    step += 1
            while (span := consumer.read_span()) is not None:
                with span:
                    buffer.extend_batch(span.run)
        sample = buffer.sample()
        streams = sample["index"][:, 1].numpy()
        for stream, at, after in zip(
            streams, sample["step"].flatten().tolist(), sample["next", "observation"][:, 0].tolist(), strict=True
        ):
            assert after == shown(int(stream), at + 1) + (0.5 if (int(stream), at) in ends else 0.0)
        assert set(sample["step"].flatten().tolist()) == set(range(step)), "the newest row has its tail"


class TestTail:
    def test_newest_row_has_its_successor(self, make):
        ring, producer, consumer = make()
        for step in range(2):
            write_step(ring, producer, step, tail=True)
        tail = consumer.read_span().run.tail
        numbers = ring.layout.leaves(tail, ring.layout.prefix)["observation"][:, 0]
        assert numbers.tolist() == shown(np.arange(2), 2).tolist()

    def test_span_that_does_not_reach_the_newest_row_has_the_next_step_for_its_successors(self, make):
        ring, producer, consumer = make()
        for step in range(2):
            write_step(ring, producer, step)
        tail = consumer.read_span(1).run.tail
        numbers = ring.layout.leaves(tail, ring.layout.prefix)["observation"][:, 0]
        assert numbers.tolist() == shown(np.arange(2), 1).tolist()

    def test_span_has_none_where_it_is_not_asked_for(self, make):
        ring, producer, consumer = make()
        write_step(ring, producer, 0, tail=True)
        assert consumer.read_span(tail=False).run.tail is None

    def test_step_that_begins_anew_is_not_the_successor_of_the_one_before(self, make):
        ring, producer, consumer = make()
        write_step(ring, producer, 0)
        write_step(ring, producer, 1, begins=True)
        assert consumer.read_span(1).run.tail is None

    def test_tail_that_is_begun_anew_while_it_is_read_does_not_count(self, monkeypatch):
        """Forced: the producer goes on between the consumer's copy and its second look."""
        ring, producer, consumer = make_host()
        write_step(ring, producer, 0, tail=True)
        fences = []

        def fence() -> None:
            fences.append(len(fences))
            if len(fences) == 4:  # admitted, the newest, begun, copied
                write_step(ring, producer, 1, tail=True)

        monkeypatch.setattr(consumer._cursors, "fence", fence)
        span = consumer.read_span()
        assert (span.num_steps, span.run.tail) == (1, None)

    def test_tail_of_another_step_does_not_count(self, make):
        ring, producer, consumer = make()
        write_step(ring, producer, 0, tail=True)
        write_step(ring, producer, 1)
        assert consumer.read_span().run.tail is None


class TestHeader:
    def test_step_that_begins_anew_is_the_first_of_its_span(self, make):
        ring, producer, consumer = make(capacity=8)
        for step in range(6):
            write_step(ring, producer, step, begins=step in (0, 2, 5))
        found = []
        for _ in range(3):
            with consumer.read_span() as span:
                found.append((span.first_step, span.num_steps, span.begins))
        assert found == [(0, 2, True), (2, 3, True), (5, 1, True)]
        write_step(ring, producer, 6)
        assert not consumer.read_span().begins

    def test_versions_of_the_policy_arrive_with_their_steps_over_many_laps(self, make):
        ring, producer, consumer = make(capacity=4)
        for step in range(11):
            write_step(ring, producer, step, version=100 + step)
            with consumer.read_span() as span:
                assert span.versions.tolist() == [100 + step]

    def test_another_producer_goes_on_where_a_killed_one_left(self, make):
        ring, producer, consumer = make()
        write_step(ring, producer, 0, ended=(1,))
        producer.reserve()["step"].fill_(99)
        assert steps_of(consumer) == [0]
        assert consumer.restart() == 0
        second = type(producer)(ring)
        for step in range(1, 9):
            write_step(ring, second, step, ended=(0,), begins=step == 1)
            assert steps_of(consumer) == [step]

    def test_marks_of_a_killed_producer_are_not_on_the_rows_of_another_one(self, make):
        ring, producer, consumer = make(capacity=2)
        for _ in range(2):
            producer.reserve()
            producer.publish(cut_streams=np.array([1]))
        steps_of(consumer)
        consumer.restart()
        second = type(producer)(ring)
        for step in range(4):
            write_step(ring, second, step, begins=step == 0)
            with consumer.read_span() as span:
                assert span.rows.view(torch.int32)[0, :, ring.layout.final_offset // 4].tolist() == [-1, -1]

    def test_tail_of_a_step_that_a_killed_producer_did_not_publish_is_not_that_of_another_one(self, make, monkeypatch):
        """Forced: it is killed when the tail is complete and the counter has not moved."""
        ring, producer, consumer = make()
        write_step(ring, producer, 0)
        assert steps_of(consumer) == [0]
        fence, calls = producer._cursors.fence, []

        def die_at_the_last() -> None:
            fence()
            calls.append(ring.parts.cursors()[Cursor.TAIL_FINISHED])
            if calls[-1] == 2 or ring.parts.rows.is_cuda:
                raise KeyboardInterrupt

        producer.reserve()
        monkeypatch.setattr(producer._cursors, "fence", die_at_the_last)
        with pytest.raises(KeyboardInterrupt):
            producer.publish(tail=packed(ring.layout, [7.0, 7.0]))
        assert consumer.restart() == 0
        write_step(ring, type(producer)(ring), 1, begins=True)
        assert consumer.read_span().run.tail is None

    def test_span_that_is_open_at_a_restart_is_void(self, make):
        ring, producer, consumer = make()
        for step in range(2):
            write_step(ring, producer, step, ended=(0,))
        span = consumer.read_span()
        assert consumer.restart() == 2
        span.commit()
        assert (consumer.read, consumer.finals, consumer.unread) == (2, 2, 0)
        with pytest.raises(RuntimeError, match="were committed or released"):
            span.view()
        write_step(ring, type(producer)(ring), 5, begins=True)
        assert steps_of(consumer) == [5]

    def test_slots_that_were_not_read_are_dropped_by_a_restart(self, make):
        ring, producer, consumer = make()
        for step in range(3):
            write_step(ring, producer, step, ended=(0, 1))
        with consumer.read_span(1):
            pass
        assert (consumer.restart(), consumer.read, consumer.finals) == (2, 3, 6)
        second = type(producer)(ring)
        write_step(ring, second, 7, ended=(1,))
        with consumer.read_span() as span:
            finals = ring.layout.leaves(span.run.finals, ring.layout.prefix)["observation"]
            assert (span.first_step, finals[:, 0].tolist()) == (3, [shown(1, 8) + 0.5])


class TestOrdering:
    """Contract: the counter moves after what it admits, with a fence between (asserted as the order of calls)."""

    def test_publish_fences_before_the_counter_moves(self, make, monkeypatch):
        ring, producer, _ = make()
        producer.reserve()["step"].fill_(3)
        seen = []
        monkeypatch.setattr(
            producer._cursors,
            "fence",
            lambda: seen.append((ring.parts.cursors()[Cursor.ISSUED], int(ring.parts.counts[0]))),
        )
        ring.parts.counts[0] = 9
        producer.publish()
        assert seen == [(0, 0)]
        assert ring.parts.cursors()[Cursor.ISSUED] == 1

    def test_completeness_is_asked_behind_a_fence_after_the_counter(self, make, monkeypatch):
        """On arm64 the question about a slot's event could come before the counter that admits the slot."""
        ring, producer, consumer = make()
        write_step(ring, producer, 0)
        write_step(ring, producer, 1)
        seen, complete, fence = [], consumer._complete, consumer._cursors.fence
        monkeypatch.setattr(consumer._cursors, "fence", lambda: (seen.append("fence"), fence()))
        monkeypatch.setattr(consumer, "_complete", lambda issued: (seen.append("asked"), complete(issued))[1])
        for ask in (lambda: consumer.fill, lambda: consumer.tail_of(0), lambda: consumer.tail_of(1)):
            seen.clear()
            ask()
            assert seen[:2] == ["fence", "asked"]

    def test_commit_fences_before_the_slots_are_given_back(self, make, monkeypatch):
        ring, producer, consumer = make()
        write_step(ring, producer, 0)
        span, seen = consumer.read_span(), []
        monkeypatch.setattr(consumer._cursors, "fence", lambda: seen.append(ring.parts.cursors()[Cursor.READ]))
        span.commit()
        assert seen == [0]
        assert ring.parts.cursors()[Cursor.READ] == 1

    def test_ends_work_on_after_an_interrupt_in_the_middle_of_a_fence(self, make):
        """Forced: Ctrl-C comes when the fence has half happened; the consumer must still be able to close its ring."""
        ring, producer, consumer = make()

        class Interrupted:
            def __init__(self, gate: Any) -> None:
                self.gate, self.acquire = gate, gate.acquire

            def release(self) -> None:
                self.gate.release()
                raise KeyboardInterrupt

        gate = consumer._cursors._gate
        consumer._cursors._gate = Interrupted(gate)
        with pytest.raises(KeyboardInterrupt):
            consumer.read_span()
        consumer._cursors._gate = gate
        write_step(ring, producer, 0)
        assert steps_of(consumer) == [0]
        consumer.close()
        with pytest.raises(RingClosed):
            producer.reserve()


class TestEndOfARing:
    def test_what_was_published_is_read_before_the_end_is_told(self, make):
        ring, producer, consumer = make()
        write_step(ring, producer, 0)
        producer.close()
        with consumer.read_span() as span:
            assert span.num_steps == 1
        with pytest.raises(RingClosed, match="everything was read"):
            consumer.read_span()

    def test_producer_is_told_that_nothing_more_is_wanted(self, make):
        ring, producer, consumer = make()
        consumer.close()
        with pytest.raises(RingClosed, match="Nothing was reserved"):
            producer.reserve()

    def test_dead_producer_is_noticed_when_everything_was_read(self, make):
        ring, producer, consumer = make()
        consumer = type(consumer)(ring, is_alive=lambda: False)
        write_step(ring, producer, 0)
        with consumer.read_span() as span:
            assert span.num_steps == 1
        with pytest.raises(RingPeerDied, match="producer's process"):
            consumer.read_span()

    def test_end_that_closes_and_ends_while_it_is_asked_after_has_closed(self, make):
        """Forced: the other end closes, and its process ends, between the looks at the counters and at its life."""
        ring, producer, consumer = make(capacity=2)
        consumer = type(consumer)(ring, is_alive=lambda: bool(producer.close()))
        with pytest.raises(RingClosed, match="everything was read"):
            consumer.read_span()
        ring, producer, consumer = make(capacity=2)
        producer = type(producer)(ring, is_alive=lambda: bool(consumer.close()))
        assert [write_step(ring, producer, step) for step in range(2)] == [True, True]
        with pytest.raises(RingClosed, match="Nothing was reserved"):
            producer.reserve()

    def test_dead_consumer_is_noticed_when_there_is_no_room(self, make):
        ring, producer, _ = make(capacity=2)
        producer = type(producer)(ring, is_alive=lambda: False)
        assert [write_step(ring, producer, step) for step in range(2)] == [True, True]
        with pytest.raises(RingPeerDied, match="consumer's process"):
            producer.reserve()


class TestPinned:
    """Contract: memory is page-locked for one device, and given up when that device has read it."""

    @pytest.fixture
    def calls(self, monkeypatch):
        calls, devices = [], []

        class Device:
            def __init__(self, device: Any) -> None:
                self.device = device

            def __enter__(self) -> None:
                devices.append(self.device)

            def __exit__(self, *_: object) -> None:
                devices.pop()

        runtime = SimpleNamespace(
            cudaHostRegister=lambda *_: calls.append(("lock", devices[-1])) or 0,
            cudaHostUnregister=lambda *_: calls.append(("unlock", devices[-1])),
        )
        monkeypatch.setattr(torch.cuda, "device", Device)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: calls.append(("wait", device)))
        return calls

    def test_the_device_that_reads_is_waited_for_whatever_the_current_one_is(self, calls):
        device = torch.device("cuda", 1)
        pinned = Pinned(torch.zeros(4096, dtype=torch.uint8), "Test", device)
        pinned.release()
        pinned.release()
        assert calls == [("lock", device), ("wait", device), ("unlock", device)]

    def test_consumer_locks_for_its_own_device(self, calls):
        device = torch.device("cuda", 1)
        ring, _, _ = make_host()
        HostConsumer(ring, device=device).close()
        assert calls == [("lock", device), ("wait", device), ("unlock", device)]


class TestBadInput:
    @pytest.mark.parametrize("sizes", [(1, 2), (4, 0)])
    def test_impossible_sizes_are_refused(self, sizes):
        with pytest.raises(ValueError, match="HostRing: capacity must be at least 2"):
            HostRing(make_layout(), *sizes)

    def test_ring_in_device_memory_needs_a_device(self):
        with pytest.raises(ValueError, match="CudaIpcRing: device must be a CUDA device, got cpu. Nothing was alloc"):
            CudaIpcRing(make_layout(), 4, 2, device="cpu")

    def test_arena_smaller_than_a_step_is_refused(self):
        with pytest.raises(ValueError, match="final_capacity at least num_streams"):
            HostRing(make_layout(), 4, 3, final_capacity=2)

    def test_more_memory_than_there_is_is_refused_with_both_numbers(self):
        with pytest.raises(MemoryError, match=r"HostRing: .* GB are needed, .* are free. Nothing was allocated"):
            HostRing(make_layout(), 2**30, 2**20)

    def test_segment_that_cannot_be_mapped_leaves_no_descriptor_open(self, monkeypatch):
        segment = Segment(4096, "Test")
        received = SimpleNamespace(detach=lambda: os.dup(segment._descriptor))
        gc.collect()  # what earlier tests dropped is not counted
        before = len(os.listdir("/proc/self/fd"))

        def refuse(*_: Any) -> None:
            raise OSError("no room for a mapping")

        monkeypatch.setattr("mmap.mmap", refuse)
        with pytest.raises(OSError, match="no room"):
            segment_of_process(received, 4096)
        assert len(os.listdir("/proc/self/fd")) <= before

    def test_publish_without_a_slot_is_refused(self, make):
        _, producer, _ = make()
        with pytest.raises(RuntimeError, match="must follow reserve"):
            producer.publish()

    def test_finals_without_their_streams_are_refused_and_the_slot_stays_reserved(self, make):
        ring, producer, consumer = make()
        producer.reserve()
        with pytest.raises(ValueError, match="Nothing was published"):
            producer.publish(finals=packed(ring.layout, [1.0]))
        assert consumer.fill == 0
        producer.publish()
        assert consumer.fill == 1

    @pytest.mark.parametrize(
        ("streams", "finals", "tail", "message"),
        [
            ([0], (1, 1), None, r"finals must be uint8 \[1, >= 32\], got torch.uint8 \[1, 1\]"),
            ([2], (1, 32), None, r"final_streams must be ascending ids below 2, got \[2\]"),
            ([-1], (1, 32), None, r"final_streams must be ascending ids below 2, got \[-1\]"),
            ([1, 0], (2, 32), None, r"final_streams must be ascending ids below 2, got \[1 0\]"),
            (None, None, (1, 32), r"tail must be uint8 \[2, >= 32\], got torch.uint8 \[1, 32\]"),
            (None, None, (2, 8), r"tail must be uint8 \[2, >= 32\], got torch.uint8 \[2, 8\]"),
        ],
    )
    def test_successors_that_fit_no_row_are_refused_and_nothing_is_published(
        self, make, streams, finals, tail, message
    ):
        ring, producer, consumer = make()
        write_step(ring, producer, 0, tail=True)
        producer.reserve()
        with pytest.raises(ValueError, match=message + ". Nothing was published"):
            producer.publish(
                final_streams=None if streams is None else np.array(streams),
                finals=None if finals is None else torch.zeros(finals, dtype=torch.uint8),
                tail=None if tail is None else torch.zeros(tail, dtype=torch.uint8),
            )
        assert consumer.fill == 1
        assert consumer.read_span().run.tail is not None, "the tail of the step before is untouched"


# ------------------------------------------------------------------------------------------- processes
def produce(ring: Any, slots: int, seed: int, *, producer: Any = None, settled: bool = True) -> None:
    """A worker that writes as fast as it can, ends included."""
    producer, generator = HostProducer(ring) if producer is None else producer, np.random.default_rng(seed)
    for step in range(slots):
        ended = tuple(np.flatnonzero(generator.random(ring.num_streams) < 0.05).tolist())
        while not write_step(ring, producer, step, ended=ended, tail=step % 3 == 0, settled=settled):
            time.sleep(1e-5)
    producer.close()


def reserve_and_wait(ring: HostRing, ready: Any) -> None:
    """A worker that dies between ``reserve`` and ``publish``."""
    producer = HostProducer(ring)
    write_step(ring, producer, 0)
    producer.reserve()["step"].fill_(99)
    ready.set()
    time.sleep(2 * DEADLINE)


class TestTwoProcesses:
    def test_no_slot_is_torn_lost_or_repeated(self):
        ring, _, consumer = make_host(capacity=8, num_streams=4)
        process = mp.get_context("spawn").Process(target=produce, args=(ring, STRESS_SLOTS, 3), daemon=True)
        process.start()
        end, expected, streams = time.monotonic() + DEADLINE + STRESS_SLOTS / 2000, 0, np.arange(4)
        try:
            while True:
                assert time.monotonic() < end, f"{expected} of {STRESS_SLOTS} slots arrived in time"
                try:
                    span = consumer.read_span()
                except RingClosed:
                    break
                if span is None:
                    time.sleep(1e-5)  # where both share a core, the worker would wait for the end of a time slice
                    continue
                with span:
                    steps = np.arange(expected, expected + span.num_steps)
                    view = span.view()
                    assert (view["step"].numpy() == steps[:, None]).all()
                    wanted = 1000.0 * streams + (steps % 1000)[:, None]
                    assert (view["observation"].numpy() == wanted[..., None]).all()
                    run = span.run
                    if run.final_rows is not None:
                        step, stream = np.divmod(run.final_rows.numpy(), 4)
                        numbers = ring.layout.leaves(run.finals, ring.layout.prefix)["observation"].numpy()
                        wanted = 1000.0 * stream + (steps[step] + 1) % 1000 + 0.5
                        assert (numbers == wanted[:, None]).all()
                    if run.tail is not None:
                        numbers = ring.layout.leaves(run.tail, ring.layout.prefix)["observation"].numpy()
                        assert (numbers == (1000.0 * streams + (steps[-1] + 1) % 1000)[:, None]).all()
                    expected += span.num_steps
            assert expected == STRESS_SLOTS
        finally:
            process.kill()
            process.join(DEADLINE)

    def test_worker_killed_between_reserve_and_publish_is_noticed(self):
        ring, _, _ = make_host()
        context = mp.get_context("spawn")
        ready = context.Event()
        process = context.Process(target=reserve_and_wait, args=(ring, ready), daemon=True)
        process.start()
        try:
            assert ready.wait(DEADLINE), "the worker did not start"
            consumer = HostConsumer(ring, is_alive=process.is_alive)
            with consumer.read_span() as span:
                assert span.view()["step"][0, 0] == 0
            assert consumer.read_span() is None, "the worker lives and has published nothing more"
            os.kill(process.pid, signal.SIGKILL)
            process.join(DEADLINE)
            with pytest.raises(RingPeerDied):
                consumer.read_span()
        finally:
            process.kill()

    def test_nothing_is_left_in_shared_memory_nor_open(self):
        """case 38: the segment has no name, so neither the size of /dev/shm nor a killed process matters."""
        gc.collect()  # what earlier tests dropped is not counted
        before, maps = len(os.listdir("/proc/self/fd")), Path("/proc/self/maps")
        names = maps.read_text().count("/dev/shm/")  # other people's do not count
        for _ in range(20):
            ring, producer, consumer = make_host()
            write_step(ring, producer, 0)
            assert steps_of(consumer) == [0]
            assert maps.read_text().count("/dev/shm/") <= names
            del ring, producer, consumer
        assert len(os.listdir("/proc/self/fd")) <= before + 1

    def test_ring_larger_than_the_shared_memory_file_system_works(self):
        """case 38"""
        ring, producer, consumer = make_host(capacity=2048, num_streams=1024, final_capacity=1024)
        assert write_step(ring, producer, 0, ended=tuple(range(1024)))
        assert steps_of(consumer) == [0]
