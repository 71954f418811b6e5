# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What a ring owes to a CUDA device: nothing is seen before it has arrived, nothing waits for another process."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
from _device_memory import own_device_memory
from test_transport import DEADLINE, STRESS_SLOTS, make_layout, packed, produce, shown, steps_of, write_step

from torchrl_ext.data import SlotReplayBuffer, SlotStorage, TransitionSampler
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

pytestmark = pytest.mark.gpu


def stall(stream: torch.cuda.Stream, seconds: float) -> None:
    """Keeps a stream busy; at most 2 GHz are assumed, so it lasts at least that long."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(2e9 * seconds))


def make(capacity: int = 4, num_streams: int = 2, **options: Any) -> tuple[CudaIpcRing, CudaIpcProducer, Any]:
    ring = CudaIpcRing(make_layout(), capacity, num_streams, device="cuda", **options)
    return ring, CudaIpcProducer(ring), CudaIpcConsumer(ring)


def wait_for(what: str, holds: Any, seconds: float = DEADLINE) -> Any:
    end = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < end, f"{what} did not happen within {seconds} s"
    return value


class TestPublication:
    def test_slot_is_seen_when_its_copy_is_done_and_not_before(self):
        """case 50"""
        ring, producer, consumer = make()
        write_step(ring, producer, 0)
        assert steps_of(consumer) == [0]
        stall(producer._stream, 0.2)
        begun = time.monotonic()
        assert write_step(ring, producer, 1, settled=False)
        assert (consumer.fill, consumer.read_span()) == (0, None)
        assert time.monotonic() - begun < 0.1, "neither side may wait"
        span = wait_for("the copy", consumer.read_span)
        assert time.monotonic() - begun > 0.1
        assert span.view()["step"].tolist() == [[1, 1]]

    def test_burst_into_a_stalled_stream_is_accepted_up_to_the_capacity(self):
        """case 50"""
        ring, producer, consumer = make(capacity=4)
        stall(producer._stream, 0.2)
        accepted = [write_step(ring, producer, step, settled=False) for step in range(7)]
        assert (accepted, consumer.fill) == ([True] * 4 + [False] * 3, 0)
        torch.cuda.synchronize()
        assert steps_of(consumer) == [0, 1, 2, 3]

    def test_burst_followed_by_silence_is_seen(self):
        ring, producer, consumer = make(capacity=8)
        for step in range(5):
            write_step(ring, producer, step, settled=False)
        wait_for("the last slot", lambda: consumer.fill == 5)

    def test_slots_are_given_back_when_they_were_read_and_not_before(self):
        ring, producer, consumer = make(capacity=2)
        for step in range(2):
            write_step(ring, producer, step)
        out = torch.zeros_like(ring.parts.rows)
        stall(torch.cuda.current_stream(), 0.2)
        with consumer.read_span() as span:
            out.copy_(span.rows, non_blocking=True)
        consumer.poll()
        assert producer.reserve() is None
        torch.cuda.synchronize()
        consumer.poll()
        assert write_step(ring, producer, 2)
        assert ring.layout.view(out)["step"][:, 0].tolist() == [0, 1]

    def test_staged_memory_is_written_again_when_it_has_left_and_not_before(self):
        ring, producer, consumer = make(capacity=16)
        stall(producer._stream, 0.1)
        for step in range(12):
            write_step(ring, producer, step, settled=False)
        torch.cuda.synchronize()
        assert steps_of(consumer) == list(range(12))


class TestDeviceSources:
    def test_cuda_tensors_are_pushed_in_the_order_of_the_current_stream(self):
        ring, producer, consumer = make()
        view = ring.layout.view(torch.zeros(2, ring.layout.row_bytes, dtype=torch.uint8, device="cuda"))
        leaves = {key: leaf.clone() for key, leaf in view.items(True, True)}
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(int(2e8))
            leaves["step"].fill_(5)
            assert producer.push(
                leaves, final_streams=np.array([1]), finals=packed(ring.layout, shown(np.array([1]), 6)).cuda()
            )
            leaves["step"].fill_(9)
        span = wait_for("the copy", consumer.read_span)
        assert span.view()["step"].tolist() == [[5, 5]]
        finals = ring.layout.leaves(span.run.finals, ring.layout.prefix)["observation"]
        assert (span.run.final_rows.tolist(), finals[0, 0].item()) == ([1], shown(1, 6))

    def test_pinned_fields_beside_cuda_ones_may_be_overwritten_after_the_push(self):
        ring, producer, consumer = make()
        view = ring.layout.view(torch.zeros(2, ring.layout.row_bytes, dtype=torch.uint8, device="cuda"))
        leaves = {key: leaf.clone() for key, leaf in view.items(True, True)}
        leaves["step"] = torch.full((2,), 5).pin_memory()
        stall(producer._stream, 0.2)
        assert producer.push(leaves)
        leaves["step"].fill_(9)
        torch.cuda.synchronize()
        assert steps_of(consumer) == [5]

    def test_no_staging_is_refused(self):
        ring, _, _ = make()
        with pytest.raises(ValueError, match="CudaIpcProducer: staging must be at least 1, got 0"):
            CudaIpcProducer(ring, staging=0)

    def test_rows_on_the_host_are_sent_after_a_push_on_the_device_that_was_not_published(self):
        ring, producer, consumer = make()
        view = ring.layout.view(torch.zeros(2, ring.layout.row_bytes, dtype=torch.uint8, device="cuda"))
        leaves = {key: torch.full_like(leaf, 1) for key, leaf in view.items(True, True)}
        with pytest.raises(ValueError, match="Nothing was published"):
            producer.push(leaves, final_streams=np.array([0]))
        assert write_step(ring, producer, 7)
        assert steps_of(consumer) == [7]
        with pytest.raises(ValueError, match="Nothing was published"):
            producer.push(leaves, final_streams=np.array([0]))
        producer.publish()  # the slot stayed reserved, and has the device's rows
        torch.cuda.synchronize()
        assert steps_of(consumer) == [1]

    def test_cut_marks_of_device_sources_last_for_their_lap_alone(self):
        ring, producer, consumer = make(capacity=2)
        view = ring.layout.view(torch.zeros(2, ring.layout.row_bytes, dtype=torch.uint8, device="cuda"))
        leaves = {key: leaf.clone() for key, leaf in view.items(True, True)}
        marks = []
        for step in range(4):
            producer.push(leaves, cut_streams=np.array([1]) if step == 0 else None)
            torch.cuda.synchronize()
            with consumer.read_span():
                marks.append(ring.parts.final[step % 2].tolist())
            torch.cuda.synchronize()
            consumer.poll()
        assert marks == [[-1, -2], [-1, -1], [-1, -1], [-1, -1]]


class TestDrain:
    @pytest.mark.parametrize("transport", ["host", "ipc"])
    def test_draining_into_a_cuda_storage_waits_for_nothing(self, transport):
        if transport == "ipc":
            ring, producer, consumer = make(capacity=8)
        else:
            ring = HostRing(make_layout(), 8, 2)
            producer, consumer = HostProducer(ring), HostConsumer(ring, device=torch.device("cuda"))
        buffer = SlotReplayBuffer(storage=SlotStorage(16, 2, layout=ring.layout, device="cuda"))
        for step in range(40):
            write_step(ring, producer, step)
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                with consumer.read_span(tail=False) as span:
                    buffer.extend_batch(span.run)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
            torch.cuda.synchronize()
            consumer.poll()
        steps = buffer.storage[torch.arange(16)]["step"].cpu()
        assert sorted(set(steps.flatten().tolist())) == list(range(24, 40))

    def test_host_slots_are_given_back_when_the_device_has_read_them_and_not_before(self):
        ring = HostRing(make_layout(), 2, 2)
        producer, consumer = HostProducer(ring), HostConsumer(ring, device=torch.device("cuda"))
        assert consumer._pinned.is_registered
        for step in range(2):
            write_step(ring, producer, step)
        out = torch.zeros(2, 2, ring.layout.row_bytes, dtype=torch.uint8, device="cuda")
        stall(torch.cuda.current_stream(), 0.2)
        begun = time.monotonic()
        with consumer.read_span() as span:
            out.copy_(span.rows, non_blocking=True)
        consumer.poll()
        assert producer.reserve() is None
        assert time.monotonic() - begun < 0.1, "the copy must be enqueued, not waited for"
        torch.cuda.synchronize()
        consumer.poll()
        assert write_step(ring, producer, 2)
        assert ring.layout.view(out)["step"][:, 0].tolist() == [0, 1]
        consumer.close()

    def test_memory_that_cannot_be_page_locked_is_copied_all_the_same(self):
        ring = HostRing(make_layout(), 2, 2)
        first = HostConsumer(ring, device=torch.device("cuda"))
        second = HostConsumer(ring, device=torch.device("cuda"))  # the same pages a second time: refused
        assert not second._pinned.is_registered
        write_step(ring, HostProducer(ring), 3)
        with second.read_span() as span:
            out = span.rows.to("cuda", non_blocking=True) + 0  # a kernel meets no error left behind
        assert ring.layout.view(out)["step"].tolist() == [[3, 3]]
        second.close()
        first.close()

    def test_every_row_of_a_captured_sample_lies_in_the_window_as_of_the_replay(self):
        """The sample sleeps on the device before its gather while spans are drained over the oldest slots."""
        ring, producer, consumer = make(capacity=8)
        storage = SlotStorage(16, 2, layout=ring.layout, device="cuda")
        buffer = SlotReplayBuffer(storage=storage, sampler=TransitionSampler(), batch_size=512)
        step = 0

        def drain(steps: int) -> None:
            nonlocal step
            for _ in range(steps):
                write_step(ring, producer, step)
                step += 1
                with consumer.read_span(tail=False) as span:
                    buffer.extend_batch(span.run)

        def settle_all() -> None:
            torch.cuda.synchronize()
            consumer.poll()

        for _ in range(20):
            drain(1)
            settle_all()
        buffer.sample()  # compiles
        settle_all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.cuda._sleep(int(2e7))
            batch = buffer.sample()
        for _ in range(20):
            head = step
            graph.replay()
            for _ in range(6):
                write_step(ring, producer, step, settled=False)
                step += 1
            for _ in range(200):
                if (span := consumer.read_span(tail=False)) is not None:
                    with span:
                        buffer.extend_batch(span.run)
                if consumer.read == step:
                    break
                time.sleep(0.001)
            settle_all()
            found = batch["step"].flatten()
            assert head - 16 <= int(found.min()) and int(found.max()) < head
            numbers = batch["next", "observation"][:, 0] - batch["observation"][:, 0]
            assert set(numbers.unique().tolist()) <= {1.0, -999.0}


# ------------------------------------------------------------------------------------------- processes
def produce_on_the_device(ring: CudaIpcRing, connection: Any, slots: int, seed: int) -> None:
    ring.open(connection.recv())
    produce(ring, slots, seed, producer=CudaIpcProducer(ring), settled=False)


def publish_and_die(ring: CudaIpcRing, connection: Any) -> None:
    """Enqueues a device sleep, the copy, the event, publishes and kills itself."""
    ring.open(connection.recv())
    producer = CudaIpcProducer(ring)
    producer.reserve()["step"].fill_(1)
    stall(producer._stream, 0.2)
    producer.publish()
    os.kill(os.getpid(), signal.SIGKILL)


def open_and_wait(ring: CudaIpcRing, connection: Any) -> None:
    ring.open(connection.recv())
    write_step(ring, CudaIpcProducer(ring), 0, settled=False)
    connection.send("open")
    connection.recv()


def start(target: Any, ring: CudaIpcRing, *args: Any) -> tuple[Any, Any, Any]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(ring, theirs, *args), daemon=True)
    process.start()
    theirs.close()
    exported = ring.export()
    ours.send(exported)
    return process, ours, exported


class TestTwoProcesses:
    def test_no_slot_is_torn_lost_or_repeated(self):
        # Processes take turns on a device: many slots of capacity let each do much in its turn.
        ring = CudaIpcRing(make_layout(), 16 if STRESS_SLOTS < 50_000 else 512, 4, device="cuda", tails=True)
        process, _, exported = start(produce_on_the_device, ring, STRESS_SLOTS, 3)
        consumer = CudaIpcConsumer(ring, is_alive=process.is_alive)
        end, expected = time.monotonic() + 2 * DEADLINE + STRESS_SLOTS / 500, 0
        streams, bad = torch.arange(4, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
        try:
            while True:
                assert time.monotonic() < end, f"{expected} of {STRESS_SLOTS} slots arrived in time"
                try:
                    span = consumer.read_span()
                except RingClosed:
                    break
                if span is None:
                    continue
                with span:
                    steps = torch.arange(expected, expected + span.num_steps, device="cuda").unsqueeze(-1)
                    view, run = span.view(), span.run
                    bad += (view["step"].reshape(-1, 4) != steps).sum()
                    wanted = 1000.0 * streams + steps % 1000
                    bad += (view["observation"] != wanted.unsqueeze(-1)).sum()
                    if run.final_rows is not None:
                        at = run.final_rows.cuda()
                        numbers = ring.layout.leaves(run.finals, ring.layout.prefix)["observation"]
                        wanted = 1000.0 * (at % 4) + (steps[at // 4, 0] + 1) % 1000 + 0.5
                        bad += (numbers != wanted.unsqueeze(-1)).sum()
                    if run.tail is not None:
                        numbers = ring.layout.leaves(run.tail, ring.layout.prefix)["observation"]
                        bad += (numbers != (1000.0 * streams + (steps[-1] + 1) % 1000).unsqueeze(-1)).sum()
                    expected += span.num_steps
            assert (expected, int(bad)) == (STRESS_SLOTS, 0)
        finally:
            process.kill()
            process.join(DEADLINE)
            ring.forget(exported)

    def test_worker_killed_while_its_copy_waits_is_told_and_nothing_hangs(self):
        ring = CudaIpcRing(make_layout(), 4, 2, device="cuda")
        process, _, exported = start(publish_and_die, ring)
        consumer = CudaIpcConsumer(ring, is_alive=process.is_alive)
        try:
            seen = 0
            end = time.monotonic() + DEADLINE
            with pytest.raises(RingPeerDied):
                while time.monotonic() < end:
                    if (span := consumer.read_span()) is not None:
                        with span:  # the device may have finished the copy before the process was gone
                            assert span.view()["step"].tolist() == [[1, 1]]
                        seen += 1
            assert seen in (0, 1)
            begun = time.monotonic()
            torch.cuda.synchronize()
            assert time.monotonic() - begun < 1.0
        finally:
            process.kill()
            process.join(DEADLINE)
            ring.forget(exported)

    def test_cycles_leave_no_device_memory_behind_killed_ones_among_them(self):
        """case 47"""

        def cycle(killed: bool) -> None:
            ring = CudaIpcRing(make_layout(), 64, 2**14, device="cuda")
            process, connection, exported = start(open_and_wait, ring)
            try:
                assert connection.poll(DEADLINE), "the worker did not open the ring"
                assert connection.recv() == "open"
                if killed:
                    os.kill(process.pid, signal.SIGKILL)
                else:
                    connection.send("end")
                process.join(DEADLINE)
                assert process.exitcode == (-signal.SIGKILL if killed else 0)
            finally:
                process.kill()
            ring.forget(exported)

        cycle(False)
        before = own_device_memory()
        for count in range(int(os.environ.get("IPC_CYCLES", "4"))):
            cycle(count % 2 == 0)
        assert abs(own_device_memory() - before) < 64 * 2**20

    def test_ring_of_a_device_that_is_not_visible_is_refused(self):
        ring = CudaIpcRing(make_layout(), 4, 2, device="cuda")
        exported = ring.export()
        try:
            other = type(exported)("GPU-none", exported.memory, exported.events)
            with pytest.raises(RuntimeError, match="UUID GPU-none.*Nothing was mapped"):
                ring.open(other)
        finally:
            ring.forget(exported)
