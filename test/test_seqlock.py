# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The newest value of a busy publisher: whole, and never an older one. A value names its version in every byte."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from typing import Any

import pytest
import torch

from torchrl_ext.transport import CudaSeqlockSlots, CudaSlotReader, SeqlockSlots

DEADLINE = 120.0
#: Snapshots of the stress test; a hundred thousand in the long run.
SNAPSHOTS = int(os.environ.get("SEQLOCK_SNAPSHOTS", "5000"))
#: Processes take turns on a device, milliseconds each.
CUDA_SNAPSHOTS = int(os.environ.get("SEQLOCK_CUDA_SNAPSHOTS", "2000"))
WORDS = 512


def value(version: int) -> torch.Tensor:
    return torch.full((WORDS,), version, dtype=torch.int64).view(torch.uint8)


def room() -> torch.Tensor:
    return torch.zeros(8 * WORDS, dtype=torch.uint8)


class TestOneProcess:
    def test_nothing_is_read_before_the_first_version(self):
        assert SeqlockSlots(8 * WORDS).read(room()) is None

    def test_newest_version_is_read_once(self):
        slots, out = SeqlockSlots(8 * WORDS), room()
        for version in range(1, 6):
            assert slots.publish(value(version)) == version
        assert (slots.version, slots.read(out)) == (5, 5)
        assert torch.equal(out, value(5))
        assert slots.read(out) is None

    def test_version_under_way_does_not_hide_the_finished_one(self, monkeypatch):
        """Forced: the publisher stands in the middle of version 3."""
        slots, out, seen = SeqlockSlots(8 * WORDS), room(), []
        slots.publish(value(1))
        slots.publish(value(2))
        fence = slots._cursors.fence

        def look() -> None:
            fence()
            if not seen:
                seen.append(None)
                seen[0] = reader.read(out), int(out.view(torch.int64)[0])

        reader = SeqlockSlots.__new__(SeqlockSlots)
        reader._open(slots._segment, slots.nbytes)
        monkeypatch.setattr(slots._cursors, "fence", look)
        slots.publish(value(3))
        assert seen == [(2, 2)]

    def test_copy_that_was_overtaken_twice_is_made_again(self, monkeypatch):
        """Forced: two versions are published between the reader's copy and its second look."""
        slots, out, fences = SeqlockSlots(8 * WORDS), room(), []
        publisher = SeqlockSlots.__new__(SeqlockSlots)
        publisher._open(slots._segment, slots.nbytes)
        publisher.publish(value(1))

        def fence() -> None:
            fences.append(None)
            if len(fences) == 2:
                publisher.publish(value(2))
                publisher.publish(value(3))

        monkeypatch.setattr(slots._cursors, "fence", fence)
        assert slots.read(out) == 3
        assert torch.equal(out, value(3))

    def test_reader_gives_up_after_its_attempts(self, monkeypatch):
        slots = SeqlockSlots(8 * WORDS)
        publisher = SeqlockSlots.__new__(SeqlockSlots)
        publisher._open(slots._segment, slots.nbytes)
        publisher.publish(value(1))
        monkeypatch.setattr(slots._cursors, "fence", lambda: [publisher.publish(value(0)) for _ in range(2)])
        assert slots.read(room(), attempts=3) is None

    @pytest.mark.parametrize(
        "wrong", [value(1)[:1], value(1)[:-1], value(1).view(torch.int64), value(1).float()], ids=lambda v: str(v.dtype)
    )
    def test_value_of_another_size_or_kind_is_refused_and_nothing_is_published(self, wrong):
        slots, out = SeqlockSlots(8 * WORDS), room()
        slots.publish(value(1))
        with pytest.raises(ValueError, match=r"value must be uint8 \[4096\], got .*. Nothing was published"):
            slots.publish(wrong)
        assert (slots.version, slots.read(out)) == (1, 1)
        assert torch.equal(out, value(1))

    def test_empty_value_is_refused(self):
        with pytest.raises(ValueError, match="nbytes must be at least 1"):
            SeqlockSlots(0)


class TestBeginFinish:
    def test_begun_version_is_invisible_until_finished(self):
        slots, out = SeqlockSlots(8 * WORDS), room()
        slots.publish(value(1))
        slot, version = slots.begin()
        slot.copy_(value(2))
        assert (version, slots.version, slots.read(out)) == (2, 1, 1)
        assert slots.finish() == 2
        assert slots.reader().read(out) == 2
        assert torch.equal(out, value(2))

    def test_version_that_is_begun_anew_keeps_its_number(self):
        slots, out = SeqlockSlots(8 * WORDS), room()
        slots.begin()[0].copy_(value(9))
        slots.begin()[0].copy_(value(1))
        assert (slots.finish(), slots.read(out)) == (1, 1)
        assert torch.equal(out, value(1))

    def test_finish_without_begin_is_refused(self):
        slots = SeqlockSlots(8 * WORDS)
        with pytest.raises(RuntimeError, match="must follow begin"):
            slots.finish()
        slots.publish(value(1))
        with pytest.raises(RuntimeError, match="must follow begin"):
            slots.finish()
        assert slots.version == 1

    def test_versions_go_on_from_where_another_publisher_stood(self):
        slots, out = SeqlockSlots(8 * WORDS), room()
        slots.publish(value(1))
        slots.continue_from(6)
        assert (slots.publish(value(7)), slots.publish(value(8)), slots.read(out)) == (7, 8, 8)
        slots.continue_from(2)
        assert slots.publish(value(9)) == 9

    def test_each_reader_has_read_nothing_yet(self):
        slots, out = SeqlockSlots(8 * WORDS), room()
        slots.publish(value(1))
        assert (slots.read(out), slots.read(out), slots.reader().read(out)) == (1, None, 1)


def publish_for_ever(slots: SeqlockSlots, stop: Any) -> None:
    version = 0
    while not stop.is_set():
        for _ in range(100):
            version += 1
            slots.publish(value(version))


def test_busy_publisher_never_shows_a_torn_or_an_older_value():
    """case 36"""
    context = mp.get_context("spawn")
    slots, stop, out = SeqlockSlots(8 * WORDS), context.Event(), room()
    process = context.Process(target=publish_for_ever, args=(slots, stop), daemon=True)
    process.start()
    end, last, accepted = time.monotonic() + DEADLINE + SNAPSHOTS / 1000, 0, 0
    try:
        while accepted < SNAPSHOTS:
            assert time.monotonic() < end, f"{accepted} of {SNAPSHOTS} snapshots were accepted in time"
            version = slots.read(out)
            if version is None:
                time.sleep(1e-5)  # where both share a core, the publisher would wait for the end of a time slice
                continue
            numbers = out.view(torch.int64)
            assert bool((numbers == version).all()), "torn"
            assert version > last
            last, accepted = version, accepted + 1
    finally:
        stop.set()
        process.join(DEADLINE)
        process.kill()


def read_snapshots(handle: Any, snapshots: int, results: Any) -> None:
    reader, accepted, last = CudaSlotReader.open(handle), 0, 0
    out = torch.zeros(handle.nbytes, dtype=torch.uint8, device=reader.device)
    torn = torch.zeros((), dtype=torch.bool, device=reader.device)
    deadline = time.monotonic() + DEADLINE + snapshots / 500
    while accepted < snapshots and time.monotonic() < deadline:
        version = reader.read(out)
        if version is None:
            continue
        torn |= (out.view(torch.int64) != version).any()
        if version <= last:
            break
        last, accepted = version, accepted + 1
    results.put((accepted, bool(torn), last))


@pytest.mark.gpu
class TestCuda:
    def test_version_is_invisible_until_its_copy_is_complete(self):
        device = torch.device("cuda")
        slots = CudaSeqlockSlots(8 * WORDS, device=device)
        source = value(1).to(device)
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)
        assert slots.publish(source) == 1
        assert (slots.poll(), slots.busy, slots.version, slots.newest()) == (False, True, 0, None)
        assert slots.publish(source) is None  # one is under way
        source.zero_()  # in stream order: what was published is what it was
        assert (slots.wait(), slots.busy, slots.version) == (1, False, 1)
        assert torch.equal(slots.newest().cpu(), value(1))
        slots.continue_from(4)
        assert (slots.publish(source), slots.wait()) == (5, 5)

    @pytest.mark.parametrize("nbytes", [0, 8])
    def test_what_cannot_be_is_refused(self, nbytes):
        with pytest.raises(ValueError, match="CudaSeqlockSlots"):
            CudaSeqlockSlots(nbytes, device=torch.device("cuda" if nbytes == 0 else "cpu"))

    def test_busy_publisher_never_shows_a_torn_or_an_older_value(self):
        """case 36"""
        context, snapshots = mp.get_context("spawn"), CUDA_SNAPSHOTS
        slots, results = CudaSeqlockSlots(8 * WORDS, device=torch.device("cuda")), context.Queue()
        handle = slots.export()
        process = context.Process(target=read_snapshots, args=(handle, snapshots, results), daemon=True)
        process.start()
        source, version, deadline = value(0).to("cuda"), 0, time.monotonic() + DEADLINE + 20.0 + snapshots / 500
        try:
            while results.empty() and time.monotonic() < deadline:
                if slots.poll():
                    version += 1
                    source.view(torch.int64).fill_(version)
                    assert slots.publish(source) == version
            accepted, torn, _ = results.get(timeout=1.0)
        finally:
            process.join(5.0)
            process.kill()
            process.join()
            slots.forget(handle)
        assert (accepted, torn) == (snapshots, False)
