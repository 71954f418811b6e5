# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Write-back: patching stored rows by handles, at once or from a queue (CASES.md, sections B to D).

Step t of stream n is the number ``1000 n + t`` in every field, so that a patch on the wrong row shows. ``Gate`` stands
in for the storage's lock and keeps the update thread out for as long as a test wants; every wait has a deadline.
"""

from __future__ import annotations

import concurrent.futures as cf
import contextlib
import copy
import itertools
import pickle
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _host_sync import NoHostSync
from _write_back_reference import REJECTED, STALE, SUPERSEDED, UPDATED, outcomes
from tensordict import TensorDict
from test_replay_device import books_on_the_device
from torchrl.data import ConditionalUpdateResult

from torchrl_ext.data import (
    RowLayout,
    SlotReplayBuffer,
    SlotStorage,
    TransitionSampler,
    WriteBackResult,
)

DEADLINE = 60.0
STILL = 0.15
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = pytest.mark.parametrize("device", ["cpu", GPU])
METHODS = ("update_if_present", "submit_update_if_present")


# ------------------------------------------------------------------------------------------- data
def records(first: int, count: int, num_streams: int = 1, *, device: str = "cpu", **flags: list[int]) -> TensorDict:
    """[count, N], every field ``1000 n + t``; ``flags`` lists the steps where a flag is raised in all streams."""
    clock = torch.arange(first, first + count).reshape(count, 1) + 1000 * torch.arange(num_streams)
    clock = clock.to(device)
    number = clock.float()
    out = TensorDict(
        {
            "id": clock.unsqueeze(-1),
            "observation": number.unsqueeze(-1).repeat(1, 1, 3),
            "value": number,
            "version": torch.zeros_like(clock),
            "latent": {
                "z": number[..., None, None].repeat(1, 1, 2, 4),
                "half": number.unsqueeze(-1).bfloat16(),
                "known": torch.zeros_like(clock, dtype=torch.bool),
            },
            "next": {"observation": number.unsqueeze(-1).repeat(1, 1, 3) + 1, "reward": number.unsqueeze(-1)},
        },
        [count, num_streams],
        device=device,
    )
    for name in ("done", "terminated", "truncated"):
        raised = torch.tensor([t in flags.get(name, []) for t in range(first, first + count)], device=device)
        out["next", name] = raised.reshape(count, 1, 1).repeat(1, num_streams, 1)
    return out


def make_buffer(capacity: int, num_streams: int = 1, *, device: str = "cpu", **kwargs: Any) -> Any:
    """An empty buffer. Side tables that cannot grow are as large as they may have to be."""
    storage = kwargs.pop("storage", None)
    if storage is None:
        storage = SlotStorage(capacity, num_streams, device=device, final_capacity=capacity + 1)
    return SlotReplayBuffer(
        storage=storage,
        sampler=kwargs.pop("sampler", None) or TransitionSampler(),
        batch_size=kwargs.pop("batch_size", 16),
        generator=torch.Generator(storage.device).manual_seed(0),
        **kwargs,
    )


def filled(capacity: int = 4, num_streams: int = 1, *, written: int | None = None, **kwargs: Any) -> Any:
    """A buffer that holds ``records(0, written)``; full when ``written`` is not given."""
    buffer = make_buffer(capacity, num_streams, **kwargs)
    written = capacity if written is None else written
    buffer.extend_batch(records(0, written, num_streams, device=str(buffer.storage.device)))
    return buffer


def handles(buffer: Any, rows: list[tuple[int, int]] | None = None) -> dict[str, torch.Tensor]:
    """``index`` and ``generation`` of what lives at (slot, stream), by default everywhere, slot by slot."""
    storage = buffer.storage
    if rows is None:
        rows = [(slot, stream) for slot in range(storage.capacity) for stream in range(storage.num_streams)]
    index = torch.tensor(rows, dtype=torch.int64, device=storage.device).reshape(-1, 2)
    return {"index": index, "generation": storage.generation_of(index)}


def slots(buffer: Any, *wanted: int) -> dict[str, torch.Tensor]:
    """Handles of the rows at some slots of the only stream."""
    return handles(buffer, [(slot, 0) for slot in wanted])


def patch_values(buffer: Any, values: Any, key: str = "value") -> dict[str, torch.Tensor]:
    return {key: torch.as_tensor(values, dtype=torch.float32).to(buffer.storage.device)}


def column(buffer: Any, key: Any = "value", stream: int = 0) -> list:
    return buffer.storage[key][:, stream].cpu().tolist()


def masks(result: Any) -> list[str]:
    """The result as one word per record, after checking that its masks partition the records."""
    named = {UPDATED: result.updated, SUPERSEDED: result.superseded, STALE: result.stale}
    if result.version_rejected is not None:
        named[REJECTED] = result.version_rejected
    shape = result.updated.shape
    assert all(mask.dtype == torch.bool and mask.shape == shape for mask in named.values())
    stack = torch.stack([mask.reshape(-1).cpu() for mask in named.values()])
    assert (stack.sum(0) == 1).all(), f"the masks do not partition the records: {stack.tolist()}"
    counts = [result.updated_count, result.superseded_count, result.stale_count, result.version_rejected_count]
    wanted = [int(named[name].sum()) if name in named else 0 for name in (UPDATED, SUPERSEDED, STALE, REJECTED)]
    assert counts == wanted, f"counts {counts}, masks {wanted}"
    words = list(named)
    return [words[row] for row in stack.int().argmax(0).tolist()]


def apply(buffer: Any, method: str, **kwargs: Any) -> Any:
    """The result of an update, either way."""
    result = getattr(buffer, method)(**kwargs)
    return result.result(timeout=DEADLINE) if method.startswith("submit") else result


def image(storage: Any) -> dict[str, torch.Tensor]:
    """All bytes of the storage but the sink row, which exists to be written by those who must write nowhere."""
    block = storage.block
    tables = {name: getattr(block, name).cpu().clone() for name in ("positions", "final_step", "hole_step")}
    return {**tables, "rows": block.rows[: block.sink].cpu().clone()}


def assert_same(before: dict[str, torch.Tensor], storage: Any) -> None:
    after = image(storage)
    for name, value in before.items():
        assert torch.equal(value, after[name]), f"{name} changed"


def expect(before: dict[str, torch.Tensor], storage: Any, key: Any, row: tuple[int, int], value: Any) -> None:
    """Writes into the picture what an update must write into the storage."""
    block = storage.block
    ring = before["rows"][: block.capacity * block.num_streams].view(block.capacity, block.num_streams, -1)
    block.layout.view(ring)[key][row] = value.cpu()


# ------------------------------------------------------------------------------------------- threads
def background(call: Callable[[], Any]) -> cf.Future:
    """Runs a call in a thread that gates let through."""
    future: cf.Future = cf.Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="test", daemon=True).start()
    return future


def assert_waits(future: cf.Future) -> None:
    done, _ = cf.wait([future], timeout=STILL)
    assert not done, f"did not wait: {future}"


class Gate:
    """A storage's lock that the threads of the buffer get only while the gate is open."""

    def __init__(self, lock: Any, before: Callable[[int], None] | None = None) -> None:
        self._lock, self._before = lock, before
        self._open, self._depth = threading.Event(), threading.local()
        self.entered = threading.Event()
        self.entries = 0

    def open(self) -> None:
        self._open.set()

    def _foreign(self) -> bool:
        thread = threading.current_thread()
        return thread is not threading.main_thread() and thread.name != "test"

    def _pass(self) -> None:
        if not self._foreign() or getattr(self._depth, "value", 0):
            return
        self.entered.set()
        if not self._open.wait(DEADLINE):
            raise TimeoutError("the gate stayed shut")
        self.entries += 1
        if self._before is not None:
            self._before(self.entries)

    def __enter__(self) -> Any:
        self._pass()
        self._lock.__enter__()
        self._depth.value = getattr(self._depth, "value", 0) + 1
        return self

    def __exit__(self, *error: Any) -> None:
        self._depth.value -= 1
        self._lock.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


@contextlib.contextmanager
def gated(buffer: Any, before: Callable[[int], None] | None = None) -> Iterator[Gate]:
    """A shut gate; it opens at the end at the latest, and what is pending is waited for."""
    storage = buffer.storage
    lock = storage._lock
    storage._lock = gate = Gate(lock, before)
    try:
        yield gate
    finally:
        gate.open()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: buffer.stats()["updates_pending"] == 0, DEADLINE / 2)
        storage._lock = lock


def wait_until(condition: Callable[[], bool], seconds: float = DEADLINE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


# ------------------------------------------------------------------------------------------- identity
class TestHandlesNameRecords:
    """Contract: a handle is live iff the generation of its row is its own; whatever else it names is stale, is reported
    stale and is never written."""

    @pytest.mark.parametrize("method", METHODS)
    @DEVICES
    def test_patch_meant_for_overwritten_rows_is_skipped(self, method, device):
        """case 15"""
        buffer = filled(4, device=device)
        taken = slots(buffer, 0, 1, 2, 3)
        buffer.extend_batch(records(4, 2, device=device))
        result = apply(buffer, method, **taken, patch=patch_values(buffer, [100, 101, 102, 103]))
        assert result.updated.tolist() == [False, False, True, True]
        assert (result.updated_count, result.stale_count) == (2, 2)
        assert result.superseded.tolist() == [False] * 4
        assert column(buffer) == [4.0, 5.0, 102.0, 103.0]

    @DEVICES
    def test_handle_of_three_laps_ago_is_stale_and_a_fresh_one_lives(self, device):
        """case 18"""
        buffer = filled(4, device=device)
        old = slots(buffer, 1)
        buffer.extend_batch(records(4, 12, device=device))
        fresh = slots(buffer, 1)
        assert masks(buffer.update_if_present(**old, patch=patch_values(buffer, [-1]))) == [STALE]
        assert column(buffer) == [12.0, 13.0, 14.0, 15.0]
        assert masks(buffer.update_if_present(**fresh, patch=patch_values(buffer, [-2]))) == [UPDATED]
        assert column(buffer) == [12.0, -2.0, 14.0, 15.0]

    @pytest.mark.parametrize("how", ["state_dict", "dumps", "pickle"])
    def test_handles_keep_their_meaning_over_save_and_load(self, how, tmp_path):
        """case 18"""
        buffer = filled(4)
        old = slots(buffer, 1)
        buffer.extend_batch(records(4, 12))
        fresh = slots(buffer, 1)
        if how == "pickle":
            loaded = pickle.loads(pickle.dumps(buffer))
        else:
            loaded = make_buffer(4)
            if how == "state_dict":
                loaded.load_state_dict(copy.deepcopy(buffer.state_dict()))
            else:
                buffer.dumps(tmp_path)
                loaded.loads(tmp_path)
        for method in METHODS:
            assert masks(apply(loaded, method, **old, patch=patch_values(loaded, [-1]))) == [STALE]
            assert column(loaded) == [12.0, 13.0, 14.0, 15.0]
        assert masks(loaded.update_if_present(**fresh, patch=patch_values(loaded, [-2]))) == [UPDATED]
        assert column(loaded) == [12.0, -2.0, 14.0, 15.0]
        assert column(buffer) == [12.0, 13.0, 14.0, 15.0]

    @DEVICES
    def test_old_handles_die_when_the_buffer_is_emptied(self, device):
        buffer = filled(4, 2, device=device)
        taken = handles(buffer)
        buffer.empty()
        assert masks(buffer.update_if_present(**taken, patch=patch_values(buffer, [-1] * 8))) == [STALE] * 8
        buffer.extend_batch(records(50, 4, 2, device=device))
        assert masks(buffer.update_if_present(**taken, patch=patch_values(buffer, [-1] * 8))) == [STALE] * 8
        assert column(buffer) == [50.0, 51.0, 52.0, 53.0]

    WILD = (
        ("slot before the first", lambda n: ((-2, 0), 0)),
        ("slot one lap before the first", lambda n: ((-4, 0), 0)),
        ("slot behind the last", lambda n: ((4, 0), 0)),
        ("slot far away", lambda n: ((2**40, 0), 0)),
        ("slot that overflows a row number", lambda n: ((2**62, 0), 0)),
        ("stream before the first", lambda n: ((1, -1), 0)),
        ("stream behind the last", lambda n: ((0, n), 0)),
        ("stream far away", lambda n: ((0, 2**40), 0)),
        ("flat number of another row", lambda n: ((0, n + 1), 0)),
        ("flat number of another row, from behind", lambda n: ((2, -1), 0)),
        ("generation before the first", lambda n: ((1, 0), -1)),
        ("generation far below", lambda n: ((1, 0), -(2**40))),
        ("generation to come", lambda n: ((1, 0), 1)),
        ("row never written", lambda n: ((3, 0), 0)),
        ("row never written by its answer", lambda n: ((3, 0), -1)),
    )

    @pytest.mark.parametrize("handle", [make for _, make in WILD], ids=[name for name, _ in WILD])
    @pytest.mark.parametrize("num_streams", [1, 3])
    @pytest.mark.parametrize("versioned", [False, True])
    @DEVICES
    def test_handle_that_names_nothing_is_stale_and_wraps_nowhere(self, handle, num_streams, versioned, device):
        """Three of four slots are written; a true handle beside it is still served."""
        buffer = filled(4, num_streams, written=3, device=device)
        row, generation = handle(num_streams)
        before = image(buffer.storage)
        given = {
            "index": torch.tensor([row, (1, 0), row], device=device),
            "generation": torch.tensor([generation, 0, generation], device=device),
        }
        if versioned:
            given |= {"version_key": "version", "version": 2**62}
            expect(before, buffer.storage, "version", (1, 0), torch.tensor(2**62))
        result = buffer.update_if_present(**given, patch=patch_values(buffer, [-1, -2, -3]))
        assert masks(result) == [STALE, UPDATED, STALE]
        expect(before, buffer.storage, "value", (1, 0), torch.tensor(-2.0))
        assert_same(before, buffer.storage)

    @DEVICES
    def test_update_refreshes_content_and_not_identity(self, device):
        buffer = filled(4, 2, device=device)
        taken = handles(buffer)
        for value in (-1.0, -2.0):
            result = buffer.update_if_present(**taken, patch=patch_values(buffer, [value] * 8))
            assert masks(result) == [UPDATED] * 8
            assert column(buffer, stream=1) == [value] * 4
        assert torch.equal(buffer.storage.generation_of(taken["index"]), taken["generation"])
        assert (len(buffer), buffer.write_count) == (8, 8)

    @pytest.mark.parametrize("n_steps", [1, 3])
    @DEVICES
    def test_handles_of_a_sample_address_its_rows(self, n_steps, device):
        buffer = filled(8, 3, written=11, device=device, sampler=TransitionSampler(n_steps, 0.9))
        sample = buffer.sample(64)
        given = {"index": sample["index"], "generation": sample["index_generation"]}
        result = buffer.update_if_present(**given, patch={"value": -1 - sample["value"]})
        assert set(masks(result)) <= {UPDATED, SUPERSEDED}
        drawn = {tuple(row) for row in sample["index"].tolist()}
        stored = buffer.storage["value"].cpu()
        for slot in range(8):
            for stream in range(3):
                number = int(buffer.storage["id"][slot, stream])
                wanted = -1.0 - number if (slot, stream) in drawn else number
                assert stored[slot, stream] == wanted, (slot, stream)

    def test_handles_of_a_run_address_its_rows(self):
        buffer = make_buffer(4, 2)
        handle = buffer.extend_batch(records(0, 6, 2))
        value = torch.arange(12.0).reshape(6, 2)
        result = buffer.update_if_present(index=handle.index, generation=handle.generation, patch={"value": value})
        assert result.updated.tolist() == [[False] * 2] * 2 + [[True] * 2] * 4
        assert buffer.storage["value"].tolist() == [[8.0, 9.0], [10.0, 11.0], [4.0, 5.0], [6.0, 7.0]]


# ------------------------------------------------------------------------------------------- duplicates
class TestDuplicates:
    """Contract: the last live record of a row wins with all its fields, on every device and thread count; earlier live
    ones are superseded; stale ones are stale and supersede nobody."""

    @pytest.fixture(params=[1, 4])
    def threads(self, request) -> Iterator[int]:
        before = torch.get_num_threads()
        torch.set_num_threads(request.param)
        yield request.param
        torch.set_num_threads(before)

    @pytest.mark.parametrize("method", METHODS)
    @DEVICES
    def test_last_of_three_wins_every_time(self, method, device):
        """case 20"""
        buffer = filled(4, device=device)
        taken = slots(buffer, 2, 2, 2)
        for turn in range(200):
            values = patch_values(buffer, [10 + turn, 20 + turn, 30 + turn])
            result = apply(buffer, method, **taken, patch=values)
            assert column(buffer) == [0.0, 1.0, 30.0 + turn, 3.0]
            assert masks(result) == [SUPERSEDED, SUPERSEDED, UPDATED]

    @DEVICES
    def test_ten_thousand_records_of_a_hundred_rows_equal_a_dict_built_in_order(self, threads, device):
        """case 20"""
        buffer = filled(50, 2, device=device)
        generator = torch.Generator().manual_seed(threads)
        for _ in range(3):
            rows = torch.randint(0, 100, (10_000,), generator=generator)
            index = torch.stack([rows // 2, rows % 2], -1)
            value = torch.randperm(10_000, generator=generator).float()
            wide = value[:, None, None].expand(-1, 2, 4) + torch.arange(4)
            wanted = dict(zip(rows.tolist(), value.tolist(), strict=True))
            last = {row: i for i, row in enumerate(rows.tolist())}
            result = buffer.update_if_present(
                index=index.to(device),
                generation=buffer.storage.generation_of(index).to(device),
                patch={"value": value.to(device), ("latent", "z"): wide.to(device)},
            )
            assert sorted(result.updated.nonzero().flatten().tolist()) == sorted(last.values())
            assert (result.superseded_count, result.stale_count) == (10_000 - len(last), 0)
            stored = buffer.storage["value"].cpu().flatten()
            assert {row: stored[row].item() for row in wanted} == wanted
            z = buffer.storage["latent", "z"].cpu().flatten(0, 1)
            assert torch.equal(z, stored[:, None, None] + torch.arange(4).expand(2, 4))

    @DEVICES
    def test_stale_duplicates_supersede_nobody(self, device):
        buffer = filled(4, device=device)
        old = slots(buffer, 0)
        buffer.extend_batch(records(4, 1, device=device))
        new = slots(buffer, 0)
        order = [old, new, old, new, old, old]
        result = buffer.update_if_present(
            index=torch.cat([handle["index"] for handle in order]),
            generation=torch.cat([handle["generation"] for handle in order]),
            patch=patch_values(buffer, [10, 11, 12, 13, 14, 15]),
        )
        assert masks(result) == [STALE, SUPERSEDED, STALE, UPDATED, STALE, STALE]
        assert column(buffer) == [13.0, 1.0, 2.0, 3.0]

    @DEVICES
    def test_same_slot_of_another_stream_is_no_duplicate(self, device):
        buffer = filled(4, 3, device=device)
        taken = handles(buffer, [(2, 0), (2, 1), (2, 2), (2, 1)])
        result = buffer.update_if_present(**taken, patch=patch_values(buffer, [10, 11, 12, 13]))
        assert masks(result) == [UPDATED, SUPERSEDED, UPDATED, UPDATED]
        assert buffer.storage["value"][2].tolist() == [10.0, 13.0, 12.0]

    @pytest.mark.parametrize("method", METHODS)
    def test_last_wins_among_records_megabytes_apart(self, method):
        """More bytes than one chunk of any size that lets a sampler in soon."""
        frames = TensorDict({"frame": torch.zeros(8, 2**18), "number": torch.arange(8)}, [8])
        buffer = make_buffer(8)
        buffer.extend_batch(frames)
        rows = [k % 8 for k in range(64)]
        taken = slots(buffer, *rows)
        # Equal rows in a stride of zero: 64 MB to read and no memory to hold them.
        frame = torch.arange(64.0).unsqueeze(-1).expand(64, 2**18)
        result = apply(buffer, method, **taken, patch={"frame": frame, "number": 100 + torch.arange(64)})
        assert masks(result) == [SUPERSEDED] * 56 + [UPDATED] * 8
        assert column(buffer, "number") == [156 + k for k in range(8)]
        stored = buffer.storage["frame"][:, 0]
        assert torch.equal(stored.amin(-1), stored.amax(-1))
        assert stored[:, 0].tolist() == [56.0 + k for k in range(8)]


# ------------------------------------------------------------------------------------------- versions
class TestVersions:
    """Contract: the highest incoming version of a row wins (the last such record on ties) if it is not older than the
    stored one (newer with ``require_newer``) and is stored with the patch; live losers are version-rejected."""

    @staticmethod
    def update(buffer: Any, rows: tuple[int, ...], versions: Any, *, newer: bool = False, **more: Any) -> Any:
        device = buffer.storage.device
        return buffer.update_if_present(
            **{**slots(buffer, *rows), **more},
            patch=patch_values(buffer, [100 + i for i in range(len(rows))]),
            version_key="version",
            version=versions.to(device) if isinstance(versions, torch.Tensor) else versions,
            require_newer=newer,
        )

    @DEVICES
    def test_highest_version_wins_and_the_last_one_on_ties(self, device):
        buffer = filled(4, device=device)
        result = self.update(buffer, (1, 2, 1, 2, 1, 2), torch.tensor([3, 5, 7, 5, 7, 4]))
        assert masks(result) == [REJECTED, REJECTED, REJECTED, UPDATED, UPDATED, REJECTED]
        assert column(buffer) == [0.0, 104.0, 103.0, 3.0]
        assert column(buffer, "version") == [0, 7, 5, 0]
        assert result.superseded_count == 0

    @pytest.mark.parametrize(("newer", "wanted"), [(False, UPDATED), (True, REJECTED)])
    @DEVICES
    def test_equal_version_is_taken_unless_it_must_be_newer(self, newer, wanted, device):
        buffer = filled(4, device=device)
        self.update(buffer, (1,), 5)
        result = self.update(buffer, (1, 0), 5, newer=newer)
        assert masks(result) == [wanted, UPDATED]
        assert column(buffer, "version") == [5, 5, 0, 0]
        assert masks(self.update(buffer, (1,), 6, newer=newer)) == [UPDATED]

    @DEVICES
    def test_older_version_is_rejected_and_changes_nothing(self, device):
        buffer = filled(4, device=device)
        self.update(buffer, (1,), 5)
        before = image(buffer.storage)
        assert masks(self.update(buffer, (1, 1), torch.tensor([4, 3]))) == [REJECTED, REJECTED]
        assert_same(before, buffer.storage)

    @DEVICES
    def test_stale_record_of_the_highest_version_blocks_nobody(self, device):
        buffer = filled(4, device=device)
        old = slots(buffer, 0)
        buffer.extend_batch(records(4, 1, device=device))
        new = slots(buffer, 0)
        result = buffer.update_if_present(
            index=torch.cat([new["index"], old["index"], new["index"]]),
            generation=torch.cat([new["generation"], old["generation"], new["generation"]]),
            patch=patch_values(buffer, [10, 11, 12]),
            version_key="version",
            version=torch.tensor([2, 9, 1], device=device),
        )
        assert masks(result) == [UPDATED, STALE, REJECTED]
        assert column(buffer)[0] == 10.0
        assert column(buffer, "version")[0] == 2

    @DEVICES
    def test_one_version_serves_all_records(self, device):
        buffer = filled(4, 2, device=device)
        result = buffer.update_if_present(
            **handles(buffer), patch=patch_values(buffer, range(8)), version_key="version", version=3
        )
        assert masks(result) == [UPDATED] * 8
        assert buffer.storage["version"].flatten().tolist() == [3] * 8

    @pytest.mark.parametrize("shape", [(6,), (2, 3)])
    def test_versions_have_the_shape_of_the_handles_or_are_flat(self, shape):
        buffer = filled(3, 2)
        taken = handles(buffer)
        result = buffer.update_if_present(
            index=taken["index"].reshape(2, 3, 2),
            generation=taken["generation"].reshape(2, 3),
            patch={"value": torch.arange(6.0).reshape(2, 3)},
            version_key="version",
            version=torch.arange(1, 7).reshape(shape),
        )
        assert result.version_rejected.shape == (2, 3) and result.updated.all()
        assert buffer.storage["version"].flatten().tolist() == [1, 2, 3, 4, 5, 6]

    @DEVICES
    def test_neighbours_beyond_the_integers_of_a_float_differ(self, device):
        buffer = filled(4, device=device)
        big = 2**53
        result = self.update(buffer, (1, 1, 2, 2), torch.tensor([big + 1, big, big, big + 1]))
        assert masks(result) == [UPDATED, REJECTED, REJECTED, UPDATED]
        assert column(buffer, "version") == [0, big + 1, big + 1, 0]
        assert masks(self.update(buffer, (1,), big)) == [REJECTED]

    @DEVICES
    def test_extreme_versions_compare_like_numbers(self, device):
        buffer = filled(4, device=device)
        low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
        assert masks(self.update(buffer, (1, 1), torch.tensor([low, low]))) == [REJECTED, REJECTED]
        buffer.storage["version"][1] = low
        assert masks(self.update(buffer, (1, 1), torch.tensor([low, low]))) == [REJECTED, UPDATED]
        assert masks(self.update(buffer, (1, 1, 1), torch.tensor([high, low, 0]))) == [UPDATED, REJECTED, REJECTED]
        assert masks(self.update(buffer, (1,), torch.tensor([high]), newer=True)) == [REJECTED]

    @pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float32, torch.float64])
    @pytest.mark.parametrize("feature", [(), (1,)])
    @DEVICES
    def test_versions_of_any_number_dtype_and_singleton_shape(self, dtype, feature, device):
        """As in TorchRL: the versions have the dtype of the field."""
        buffer = make_buffer(4, device=device)
        stored = torch.tensor([3, 3, 3, 3], dtype=dtype).reshape(4, *feature)
        data = TensorDict({"value": torch.arange(4.0), "meta": {"v": stored}}, [4]).to(device)
        buffer.extend_batch(data)
        result = buffer.update_if_present(
            **slots(buffer, 0, 1, 1, 2),
            patch=patch_values(buffer, [10, 11, 12, 13]),
            version_key=("meta", "v"),
            version=torch.tensor([4, 6, 5, 2], dtype=dtype, device=device),
        )
        assert masks(result) == [UPDATED, UPDATED, REJECTED, REJECTED]
        assert column(buffer) == [10.0, 11.0, 2.0, 3.0]
        assert buffer.storage["meta", "v"].flatten().tolist() == [4, 6, 3, 3]

    @pytest.mark.parametrize(
        ("dtype", "version"), [(torch.int32, 2**32 + 7), (torch.int64, 1.5), (torch.uint8, 300), (torch.uint8, -1)]
    )
    def test_number_that_the_field_cannot_hold_is_refused(self, dtype, version):
        buffer = make_buffer(4)
        buffer.extend_batch(TensorDict({"value": torch.zeros(4), "version": torch.ones(4, dtype=dtype)}, [4]))
        before = image(buffer.storage)
        with pytest.raises(ValueError):
            self.update(buffer, (0, 1), version)
        assert_same(before, buffer.storage)

    def test_without_versions_nothing_is_rejected(self):
        buffer = filled(4)
        result = buffer.update_if_present(**slots(buffer, 1), patch=patch_values(buffer, [1]))
        assert result.version_rejected is None and result.version_rejected_count == 0


# ------------------------------------------------------------------------------------------- results
class TestResult:
    """Contract: a :class:`ConditionalUpdateResult` with masks of the handles' leading shape that partition the
    records."""

    @pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3), (3, 1, 2), (0,), (2, 0)])
    @pytest.mark.parametrize("flat", [False, True])
    @pytest.mark.parametrize("method", METHODS)
    @DEVICES
    def test_masks_have_the_leading_shape_of_the_handles(self, shape, flat, method, device):
        buffer = filled(3, 2, device=device)
        count = torch.Size(shape).numel()
        taken = handles(buffer, [(i // 2, i % 2) for i in range(count)])
        lead = (count,) if flat else shape
        result = apply(
            buffer,
            method,
            index=taken["index"].reshape(*shape, 2),
            generation=taken["generation"].reshape(shape),
            patch={
                "value": -torch.arange(float(count), device=device).reshape(lead),
                ("latent", "z"): torch.ones(*lead, 2, 4, device=device),
            },
        )
        assert isinstance(result, WriteBackResult) and isinstance(result, ConditionalUpdateResult)
        for mask in (result.updated, result.superseded, result.stale):
            assert tuple(mask.shape) == shape and mask.dtype == torch.bool
        assert masks(result) == [UPDATED] * count
        wanted = [-float(i) if i < count else 1000.0 * (i % 2) + i // 2 for i in range(6)]
        assert buffer.storage["value"].flatten().tolist() == wanted

    @pytest.mark.parametrize("method", METHODS)
    @DEVICES
    def test_slots_alone_name_the_rows_of_the_only_stream(self, method, device):
        buffer = filled(4, device=device)
        result = apply(
            buffer,
            method,
            index=torch.tensor([3, 1], device=device),
            generation=torch.tensor([0, 1], device=device),
            patch=patch_values(buffer, [10, 11]),
        )
        assert masks(result) == [UPDATED, STALE]
        assert column(buffer) == [0.0, 1.0, 2.0, 10.0]

    def test_counts_of_every_kind(self):
        buffer = filled(4)
        result = buffer.update_if_present(
            index=torch.tensor([0, 0, 1, 9]),
            generation=torch.tensor([0, 0, 0, 0]),
            patch=patch_values(buffer, [1, 2, 3, 4]),
        )
        counts = (result.updated_count, result.superseded_count, result.stale_count, result.version_rejected_count)
        assert counts == (2, 1, 1, 0) and all(type(count) is int for count in counts)


# ------------------------------------------------------------------------------------------- bytes
def eventful(device: str = "cpu") -> Any:
    """Two streams at different steps of their second lap, with finals, a reset nobody flagged and pending rows."""
    buffer = make_buffer(6, 2, device=device)
    buffer.extend_batch(records(0, 5, 2, device=device, truncated=[2], done=[2]))
    buffer.extend_batch(records(30, 3, 2, device=device, terminated=[31], done=[31]))
    buffer.extend_batch(records(40, 2, 1, device=device), streams=slice(0, 1))
    return buffer


class TestOnlyPatchedBytesChange:
    """Contract: the patched fields of updated rows take the patch bit by bit; every other byte of the storage stays:
    positions, side table, hidden words, padding, other rows and fields."""

    @pytest.mark.parametrize("method", METHODS)
    @DEVICES
    def test_every_other_byte_stays(self, method, device):
        buffer = eventful(device)
        generator = torch.Generator().manual_seed(1)
        for turn in range(20):
            rows = torch.randint(0, 6, (7, 2), generator=generator).remainder(torch.tensor([6, 2]))
            generation = buffer.storage.generation_of(rows.to(device)).cpu()
            generation[turn % 7] -= 1
            patch = {
                "observation": torch.randn(7, 3, generator=generator),
                ("latent", "half"): torch.randn(7, 1, generator=generator).bfloat16(),
                ("latent", "known"): torch.rand(7, generator=generator) < 0.5,
                ("next", "reward"): torch.randn(7, 1, generator=generator),
            }
            live = [bool(g >= 0) and i != turn % 7 for i, g in enumerate(generation.tolist())]
            wanted = outcomes(live, [tuple(row) for row in rows.tolist()])
            before = image(buffer.storage)
            for i, word in enumerate(wanted):
                if word == UPDATED:
                    for key, value in patch.items():
                        expect(before, buffer.storage, key, tuple(rows[i].tolist()), value[i])
            result = apply(
                buffer,
                method,
                index=rows.to(device),
                generation=generation.to(device),
                patch={key: value.to(device) for key, value in patch.items()},
            )
            assert masks(result) == wanted
            assert_same(before, buffer.storage)

    @pytest.mark.parametrize("stream", [0, 1, 2])
    @DEVICES
    def test_patch_of_one_stream_leaves_the_others_bit_identical(self, stream, device):
        """case 32, where the members are the streams of one storage"""
        buffer = make_buffer(4, 3, device=device)
        for n in range(3):
            buffer.extend_batch(records(100 * n, 4, device=device), streams=slice(n, n + 1))
        taken = handles(buffer, [(slot, stream) for slot in range(4)])
        others = [n for n in range(3) if n != stream]
        before = image(buffer.storage)
        assert masks(buffer.update_if_present(**taken, patch=patch_values(buffer, range(4)))) == [UPDATED] * 4
        for slot in range(4):
            expect(before, buffer.storage, "value", (slot, stream), torch.tensor(float(slot)))
        assert_same(before, buffer.storage)
        # One lap of that stream makes its handles stale, and only its.
        buffer.extend_batch(records(900, 4, device=device), streams=slice(stream, stream + 1))
        assert masks(buffer.update_if_present(**taken, patch=patch_values(buffer, range(4)))) == [STALE] * 4
        rest = handles(buffer, [(slot, n) for slot in range(4) for n in others])
        assert rest["generation"].tolist() == [0] * 8
        assert masks(buffer.update_if_present(**rest, patch=patch_values(buffer, range(8)))) == [UPDATED] * 8

    DTYPES = (
        (torch.bool, (5,)),
        (torch.uint8, (3, 5, 7)),
        (torch.int8, ()),
        (torch.int16, (3,)),
        (torch.int32, ()),
        (torch.int64, (2, 2)),
        (torch.float16, (3,)),
        (torch.bfloat16, (1,)),
        (torch.float32, (4,)),
        (torch.float64, ()),
        (torch.complex64, (3,)),
    )

    @pytest.mark.parametrize(("dtype", "shape"), DTYPES, ids=lambda value: str(value).removeprefix("torch."))
    @DEVICES
    def test_every_dtype_is_stored_bit_by_bit(self, dtype, shape, device):
        numel = torch.Size(shape).numel() * dtype.itemsize
        random_bytes = torch.randint(0, 256, (2, 8, numel), dtype=torch.uint8)
        if dtype == torch.bool:
            random_bytes &= 1
        stored, incoming = random_bytes.reshape(2, -1).view(dtype).reshape(2, 8, *shape)
        data = TensorDict({"x": stored, "between": torch.arange(8, dtype=torch.uint8)}, [8]).to(device)
        buffer = make_buffer(8, device=device)
        buffer.extend_batch(data)
        before = image(buffer.storage)
        for slot in (1, 6, 3):
            expect(before, buffer.storage, "x", (slot, 0), incoming[slot])
        result = buffer.update_if_present(**slots(buffer, 1, 6, 3), patch={"x": incoming[[1, 6, 3]].to(device)})
        assert masks(result) == [UPDATED] * 3
        assert_same(before, buffer.storage)

    @DEVICES
    def test_nan_payloads_and_signs_of_zero_arrive(self, device):
        words = torch.tensor([0x7FA00001, -0x400000 + 5, -0x80000000, 0x7F800000], dtype=torch.int64).int()
        buffer = filled(4, device=device)
        buffer.update_if_present(**slots(buffer, 0, 1, 2, 3), patch={"value": words.view(torch.float32).to(device)})
        stored = buffer.storage["value"].cpu().contiguous().view(torch.int32).flatten()
        assert stored.tolist() == words.tolist()

    @DEVICES
    def test_patched_observation_is_also_the_successor_of_the_row_before_it(self, device):
        buffer = filled(6, written=5, device=device)
        buffer.update_if_present(**slots(buffer, 2), patch={"observation": torch.full((1, 3), -7.0, device=device)})
        index = torch.tensor([[slot, 0] for slot in range(5)], device=device)
        rows = buffer.storage.get(index)
        assert rows["observation"][:, 0].tolist() == [0.0, 1.0, -7.0, 3.0, 4.0]
        assert rows["next", "observation"][:, 0].tolist() == [1.0, -7.0, 3.0, 4.0, 5.0]
        sample = buffer.sample(200)
        first = sample["id"].flatten()
        assert (sample["next", "observation"][first == 1] == -7.0).all()
        assert (sample["observation"][first == 2] == -7.0).all()

    @DEVICES
    def test_final_and_pending_successors_are_not_part_of_a_row(self, device):
        buffer = make_buffer(6, device=device)
        buffer.extend_batch(records(0, 2, device=device, truncated=[1], done=[1]))
        buffer.extend_batch(records(50, 2, device=device))
        taken = slots(buffer, 0, 1, 2, 3)
        buffer.update_if_present(**taken, patch={"observation": torch.full((4, 3), -7.0, device=device)})
        followed = buffer.storage.get(taken["index"])["next", "observation"][:, 0]
        assert followed.tolist() == [-7.0, 2.0, -7.0, 52.0]

    @DEVICES
    def test_successor_that_is_stored_can_be_patched(self, device):
        storage = SlotStorage(4, 1, next_obs="store", device=device)
        buffer = filled(4, storage=storage)
        patch = {("next", "observation"): torch.full((1, 3), -7.0, device=device)}
        assert masks(buffer.update_if_present(**slots(buffer, 2), patch=patch)) == [UPDATED]
        assert buffer.storage["next", "observation"][:, 0, 0].tolist() == [1.0, 2.0, -7.0, 4.0]
        assert buffer.storage["observation"][:, 0, 0].tolist() == [0.0, 1.0, 2.0, 3.0]

    @pytest.mark.parametrize("method", METHODS)
    @DEVICES
    def test_patch_is_a_mapping_or_a_tensordict_nested_at_will(self, method, device):
        z, half = torch.randn(2, 2, 4, device=device), torch.ones(2, 1, dtype=torch.bfloat16, device=device)
        for patch in (
            {("latent", "z"): z, ("latent", "half"): half},
            TensorDict({"latent": {"z": z, "half": half}}, [2], device=device),
            TensorDict({("latent", "z"): z, ("latent", "half"): half}, [2], device=device),
        ):
            buffer = filled(4, device=device)
            before = image(buffer.storage)
            for i, slot in enumerate((3, 0)):
                expect(before, buffer.storage, ("latent", "z"), (slot, 0), z[i])
                expect(before, buffer.storage, ("latent", "half"), (slot, 0), half[i])
            assert masks(apply(buffer, method, **slots(buffer, 3, 0), patch=patch)) == [UPDATED] * 2
            assert_same(before, buffer.storage)

    @pytest.mark.parametrize("method", METHODS)
    @DEVICES
    def test_inputs_may_be_views_of_any_strides(self, method, device):
        buffer = filled(4, 2, device=device)
        taken = handles(buffer)
        z = torch.randn(4, 2, 8, device=device).permute(2, 1, 0)
        result = apply(
            buffer,
            method,
            index=taken["index"].T.contiguous().T,
            generation=taken["generation"].repeat_interleave(2)[::2],
            patch={("latent", "z"): z, "value": torch.full((1,), -3.0, device=device).expand(8)},
        )
        assert masks(result) == [UPDATED] * 8
        assert torch.equal(buffer.storage["latent", "z"].flatten(0, 1), z)
        assert (buffer.storage["value"] == -3.0).all()

    @DEVICES
    def test_two_dimensional_storage_is_patched_by_time_and_environment(self, device):
        """case 22"""
        buffer = filled(5, 3, device=device)
        index = torch.tensor([[4, 2], [0, 1], [3, 0]], device=device)
        z = torch.randn(3, 2, 4, device=device)
        future = buffer.submit_update_if_present(
            index=index, generation=buffer.storage.generation_of(index), patch={("latent", "z"): z}
        )
        assert future.result(timeout=DEADLINE).updated_count == 3
        slot, stream = index.unbind(-1)
        assert torch.equal(buffer.storage["latent", "z"][slot, stream], z)
        assert torch.equal(buffer.storage.get(index)["latent", "z"], z)

    @DEVICES
    def test_other_handles_on_the_storage_see_the_patch(self, device):
        """case 22"""
        buffer = filled(4, device=device)
        view, other = buffer.storage["value"], make_buffer(4, storage=buffer.storage)
        future = buffer.submit_update_if_present(**slots(buffer, 1, 2), patch=patch_values(buffer, [-1, -2]))
        future.result(timeout=DEADLINE)
        assert view.flatten().tolist() == [0.0, -1.0, -2.0, 3.0]
        sample = other.sample(64)
        wanted = torch.tensor([0.0, -1.0, -2.0, 3.0], device=device)[sample["id"].flatten()]
        assert torch.equal(sample["value"], wanted)

    def test_other_process_would_see_the_patch_in_a_mapped_file(self, tmp_path):
        """case 22"""
        layout = RowLayout.from_tensordict(records(0, 1))
        storage = SlotStorage(4, 1, layout=layout, filename=str(tmp_path / "replay"))
        buffer = filled(4, storage=storage)
        buffer.submit_update_if_present(**slots(buffer, 1), patch=patch_values(buffer, [-1])).result(timeout=DEADLINE)
        second = SlotStorage.open(str(tmp_path / "replay"))
        assert second["value"].flatten().tolist() == [0.0, -1.0, 2.0, 3.0]

    @pytest.mark.parametrize("kind", [{"shared": True}, {}])
    def test_host_memory_of_every_kind_takes_patches(self, kind):
        buffer = filled(4, storage=SlotStorage(4, 1, final_capacity=5, **kind))
        assert masks(buffer.update_if_present(**slots(buffer, 2), patch=patch_values(buffer, [9]))) == [UPDATED]
        assert column(buffer) == [0.0, 1.0, 9.0, 3.0]

    @pytest.mark.parametrize("method", METHODS)
    @DEVICES
    def test_autograd_stays_outside(self, method, device):
        buffer = filled(4, device=device)
        leaf = torch.ones(2, requires_grad=True, device=device)
        apply(buffer, method, **slots(buffer, 0, 1), patch={"value": leaf})
        apply(buffer, method, **slots(buffer, 2, 3), patch={"value": leaf * 3})
        assert column(buffer) == [1.0, 1.0, 3.0, 3.0]
        assert not buffer.storage["value"].requires_grad and not buffer.sample()["value"].requires_grad
        assert leaf.grad is None and leaf.requires_grad


# ------------------------------------------------------------------------------------------- refused
def replaced(**change: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: {**given, **change}


def patched(**change: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Fields of the patch replaced, a good one beside them."""
    return lambda given: {**given, "patch": {"id": -torch.ones(3, 1, dtype=torch.int64), **change}}


def nested(key: Any, value: torch.Tensor) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: {**given, "patch": {"value": -torch.ones(3), key: value}}


VERSIONED = {"version_key": "version", "version": 1}
BAD = {
    "unknown key": (nested("vaule", torch.zeros(3)), KeyError),
    "unknown nested key": (nested(("latent", "y"), torch.zeros(3)), KeyError),
    "a branch in the place of a leaf": (nested("latent", torch.zeros(3)), KeyError),
    "hidden word": (nested("final", torch.zeros(3, dtype=torch.int32)), KeyError),
    "derived successor": (nested(("next", "observation"), torch.zeros(3, 3)), KeyError),
    "unknown key in a TensorDict": (replaced(patch=TensorDict({"vaule": torch.zeros(3)}, [3])), KeyError),
    "wider dtype": (patched(value=torch.zeros(3, dtype=torch.float64)), ValueError),
    "other dtype of the same size": (patched(value=torch.zeros(3, dtype=torch.int32)), ValueError),
    "integers for floats": (patched(value=torch.zeros(3, dtype=torch.int64)), ValueError),
    "transposed feature": (nested(("latent", "z"), torch.zeros(3, 4, 2)), ValueError),
    "flattened feature": (nested(("latent", "z"), torch.zeros(3, 8)), ValueError),
    "feature dim too much": (patched(value=torch.zeros(3, 1)), ValueError),
    "feature dim missing": (nested("observation", torch.zeros(9)), ValueError),
    "singleton dim missing": (nested(("next", "reward"), torch.zeros(3)), ValueError),
    "one record for all": (nested("observation", torch.zeros(1, 3)), ValueError),
    "no record dim": (nested("observation", torch.zeros(3)), ValueError),
    "a record too many": (patched(value=torch.zeros(4)), ValueError),
    "a record missing": (patched(value=torch.zeros(2)), ValueError),
    "batch dims too many": (patched(value=torch.zeros(3, 1, 1)), ValueError),
    "leading dims exchanged": (
        replaced(
            index=torch.zeros(2, 3, 2, dtype=torch.int64),
            generation=torch.zeros(2, 3, dtype=torch.int64),
            patch={"value": torch.zeros(3, 2)},
        ),
        ValueError,
    ),
    "fewer generations": (replaced(generation=torch.zeros(2, dtype=torch.int64)), ValueError),
    "more generations": (replaced(generation=torch.zeros(4, dtype=torch.int64)), ValueError),
    "one generation for all": (replaced(generation=torch.zeros(1, dtype=torch.int64)), ValueError),
    "generations in another order of dims": (
        replaced(
            index=torch.zeros(2, 3, 2, dtype=torch.int64),
            generation=torch.zeros(3, 2, dtype=torch.int64),
            patch={"value": torch.zeros(2, 3)},
        ),
        ValueError,
    ),
    "versions in another order of dims": (
        replaced(
            index=torch.zeros(2, 3, 2, dtype=torch.int64),
            generation=torch.zeros(2, 3, dtype=torch.int64),
            patch={"value": torch.zeros(2, 3)},
            version_key="version",
            version=torch.zeros(3, 2, dtype=torch.int64),
        ),
        ValueError,
    ),
    "three coordinates": (replaced(index=torch.zeros(3, 3, dtype=torch.int64)), (ValueError, IndexError)),
    "slots without streams": (replaced(index=torch.zeros(3, dtype=torch.int64)), (ValueError, IndexError)),
    "float index": (replaced(index=torch.zeros(3, 2)), TypeError),
    "bool index": (replaced(index=torch.zeros(3, 2, dtype=torch.bool)), TypeError),
    "float generation": (replaced(generation=torch.zeros(3)), (TypeError, ValueError)),
    "bool generation": (replaced(generation=torch.zeros(3, dtype=torch.bool)), (TypeError, ValueError)),
    "empty patch": (replaced(patch={}), ValueError),
    "empty TensorDict": (replaced(patch=TensorDict({}, [3])), ValueError),
    "no mapping": (replaced(patch=torch.zeros(3)), (TypeError, ValueError)),
    "version key alone": (replaced(version_key="version"), ValueError),
    "version alone": (replaced(version=1), ValueError),
    "version key unknown": (replaced(version_key="v", version=1), KeyError),
    "version key derived": (replaced(version_key=("next", "observation"), version=1), (KeyError, ValueError)),
    "version key in the patch": (
        replaced(**VERSIONED, patch={"version": torch.ones(3, dtype=torch.int64)}),
        ValueError,
    ),
    "version key in the patch by another spelling": (
        replaced(version_key=("version",), version=1, patch={"version": torch.ones(3, dtype=torch.int64)}),
        ValueError,
    ),
    "version key in the patch as a tuple": (
        replaced(**VERSIONED, patch={("version",): torch.ones(3, dtype=torch.int64)}),
        ValueError,
    ),
    "version key of many numbers": (replaced(version_key="observation", version=1.0), ValueError),
    "versions too few": (replaced(version_key="version", version=torch.ones(2, dtype=torch.int64)), ValueError),
    "versions too many": (replaced(version_key="version", version=torch.ones(4, dtype=torch.int64)), ValueError),
    "version between two integers": (replaced(version_key="version", version=1.5), ValueError),
    "versions of another dtype": (replaced(version_key="version", version=torch.ones(3)), ValueError),
}


class TestRefusedBeforeAnythingChanges:
    """Contract: whatever does not fit raises before the first byte changes, at the call, submitted or not; the message
    says what is unchanged, and nothing is enqueued."""

    @staticmethod
    def good() -> dict[str, Any]:
        return {
            "index": torch.tensor([[0, 0], [1, 1], [2, 0]]),
            "generation": torch.zeros(3, dtype=torch.int64),
            "patch": {"value": -torch.ones(3)},
        }

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("bad", sorted(BAD))
    def test_call_that_does_not_fit_raises_and_changes_no_byte(self, bad, method):
        buffer = filled(3, 2)
        before = image(buffer.storage)
        change, errors = BAD[bad]
        with pytest.raises(errors) as caught:
            getattr(buffer, method)(**change(self.good()))
        assert re.search("nothing|unchanged", str(caught.value), re.IGNORECASE), f"says not what is unchanged: {caught}"
        assert_same(before, buffer.storage)
        stats = buffer.stats()
        assert (stats["updates_pending"], stats["updates_failed"], stats["updates_applied"]) == (0, 0, 0)
        assert masks(apply(buffer, method, **self.good())) == [UPDATED] * 3

    @pytest.mark.gpu
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("bad", sorted(BAD))
    def test_call_that_does_not_fit_a_cuda_storage_raises_and_changes_no_byte(self, bad, method):
        buffer = filled(3, 2, device="cuda")
        before = image(buffer.storage)
        change, errors = BAD[bad]
        with pytest.raises(errors):
            getattr(buffer, method)(**change(self.good()))
        assert_same(before, buffer.storage)

    @pytest.mark.parametrize("method", METHODS)
    def test_buffer_without_rows_refuses_updates(self, method):
        buffer = make_buffer(4)
        with pytest.raises((RuntimeError, KeyError, ValueError)):
            getattr(buffer, method)(
                index=torch.tensor([0]), generation=torch.tensor([0]), patch={"value": torch.zeros(1)}
            )

    @pytest.mark.parametrize("option", [{"visibility": "sometimes"}, {"when_full": "drop_newest"}], ids=str)
    def test_option_out_of_its_range_is_refused(self, option):
        with pytest.raises(ValueError):
            make_buffer(4, **option)


# ------------------------------------------------------------------------------------------- ownership
class TestOwnership:
    """Contract: once submit has returned, its inputs are the caller's again."""

    @pytest.mark.parametrize("form", ["mapping", "tensordict"])
    def test_inputs_overwritten_after_submit_change_nothing(self, form):
        buffer = filled(4, 2)
        taken = handles(buffer, [(0, 0), (1, 1), (2, 0)])
        value, z, version = torch.tensor([10.0, 11.0, 12.0]), torch.ones(3, 2, 4), torch.tensor([1, 2, 3])
        patch: Any = {"value": value, ("latent", "z"): z}
        if form == "tensordict":
            patch = TensorDict({"value": value, "latent": {"z": z}}, [3])
        before = image(buffer.storage)
        for i, row in enumerate([(0, 0), (1, 1), (2, 0)]):
            expect(before, buffer.storage, "value", row, value[i].clone())
            expect(before, buffer.storage, ("latent", "z"), row, z[i].clone())
            expect(before, buffer.storage, "version", row, version[i].clone())
        with gated(buffer) as gate:
            future = buffer.submit_update_if_present(**taken, patch=patch, version_key="version", version=version)
            taken["index"].copy_(torch.tensor([[3, 1], [3, 1], [3, 1]]))
            taken["generation"].fill_(5)
            value.fill_(-1.0)
            z.fill_(-1.0)
            version.fill_(0)
            if form == "mapping":
                patch.clear()
                patch["vaule"] = None
            gate.open()
            assert masks(future.result(timeout=DEADLINE)) == [UPDATED] * 3
        assert_same(before, buffer.storage)

    def test_constants_written_over_each_other_arrive_each_in_its_turn(self):
        """case 26, on the host"""
        buffer = make_buffer(16)
        buffer.extend_batch(TensorDict({"x": torch.zeros(16, 2**12)}, [16]))
        taken, patch = slots(buffer, *range(16)), torch.empty(16, 2**12)
        for c in range(200):
            patch.fill_(c)
            future = buffer.submit_update_if_present(**taken, patch={"x": patch})
            patch.fill_(-1.0)
            assert future.result(timeout=DEADLINE).updated_count == 16
            assert (buffer.storage["x"] == c).all(), f"constant {c}"

    def test_patch_filled_before_submit_is_complete(self):
        """case 27, on the host"""
        buffer = make_buffer(16)
        buffer.extend_batch(TensorDict({"x": torch.zeros(16, 2**12)}, [16]))

        def fill_and_submit() -> cf.Future:
            patch = torch.zeros(16, 2**12)
            patch.fill_(7.0)
            return buffer.submit_update_if_present(**slots(buffer, *range(16)), patch={"x": patch})

        background(fill_and_submit).result(timeout=DEADLINE).result(timeout=DEADLINE)
        assert (buffer.storage["x"] == 7.0).all()

    @pytest.mark.parametrize("donate", [False, True])
    def test_update_needs_nobody_to_ask_for_it(self, donate):
        """case 25, on the host: it is done while the submitter works on and never touches the buffer again"""
        buffer = filled(4)
        future = buffer.submit_update_if_present(
            **slots(buffer, 1, 2), patch=patch_values(buffer, [8, 9]), donate=donate
        )
        done, _ = cf.wait([future], timeout=DEADLINE)
        assert done and masks(future.result()) == [UPDATED, UPDATED]
        assert column(buffer) == [0.0, 8.0, 9.0, 3.0]

    def test_copies_share_no_memory_with_each_other_nor_with_samples(self):
        buffer = filled(8, visibility="eventual")
        with gated(buffer) as gate:
            buffer.submit_update_if_present(**slots(buffer, 0), patch=patch_values(buffer, [-1.0]))
            assert gate.entered.wait(DEADLINE)
            futures, samples = [], []
            for k in range(40):
                given = slots(buffer, k % 8)
                futures.append(buffer.submit_update_if_present(**given, patch=patch_values(buffer, [100.0 + k])))
                samples.append(buffer.sample(64, contiguous=bool(k % 2)))
            before = [sample.clone() for sample in samples]
            gate.open()
            for future in futures:
                assert masks(future.result(timeout=DEADLINE)) == [UPDATED]
        assert column(buffer) == [132.0 + k for k in range(8)]
        for sample, copied in zip(samples, before, strict=True):
            assert (sample == copied).all()
            assert torch.equal(sample["value"], sample["id"].flatten().float())

    def test_inputs_freed_at_once_arrive(self):
        buffer = make_buffer(8)
        buffer.extend_batch(TensorDict({"x": torch.zeros(8, 2**12)}, [8]))
        futures = []
        for c in range(50):
            patch = torch.full((8, 2**12), float(c))
            futures.append(buffer.submit_update_if_present(**slots(buffer, *range(8)), patch={"x": patch}))
            del patch
            torch.full((8, 2**12), -1.0)  # likely the memory that was just freed
            assert futures[-1].result(timeout=DEADLINE).updated_count == 8
            assert (buffer.storage["x"] == c).all()


# ------------------------------------------------------------------------------------------- order
class TestOrder:
    """Contract: updates apply in submission order, after every sample taken before; a sample issued afterwards waits
    (``ordered``) or does not (``eventual``)."""

    @staticmethod
    def submit(buffer: Any, values: list[float], rows: tuple[int, ...] = (0, 1, 2, 3)) -> cf.Future:
        return buffer.submit_update_if_present(**slots(buffer, *rows), patch=patch_values(buffer, values))

    @DEVICES
    def test_updates_apply_in_the_order_of_their_submission(self, device):
        buffer = filled(4, device=device)
        generator = random.Random(0)
        wanted, futures = [0.0, 1.0, 2.0, 3.0], []
        for turn in range(300):
            rows = tuple(generator.choices(range(4), k=3))
            values = [float(10 * turn + i) for i in range(3)]
            futures.append(self.submit(buffer, values, rows))
            for row, value in zip(rows, values, strict=True):
                wanted[row] = value
        futures[-1].result(timeout=DEADLINE)
        assert all(future.done() for future in futures), "an earlier update is not done"
        assert column(buffer) == wanted

    def test_sample_issued_after_a_submit_waits_for_it(self):
        buffer = filled(4)
        with gated(buffer) as gate:
            future = self.submit(buffer, [-1.0, -2.0, -3.0, -4.0])
            sample = background(lambda: buffer.sample(64))
            assert_waits(sample)
            assert not future.done()
            gate.open()
            value = sample.result(timeout=DEADLINE)["value"]
        assert set(value.tolist()) == {-1.0, -2.0, -3.0, -4.0}

    def test_sample_waits_for_all_updates_submitted_before_it(self):
        buffer = filled(4)
        with gated(buffer) as gate:
            for turn in range(5):
                self.submit(buffer, [-1.0 - turn] * 4)
            sample = background(lambda: buffer.sample(64))
            assert_waits(sample)
            gate.open()
            assert set(sample.result(timeout=DEADLINE)["value"].tolist()) == {-5.0}

    def test_update_submitted_while_another_thread_saves_is_waited_for(self):
        """A save waits for what was submitted before it, and must not forget what came in the meantime."""
        buffer, held = filled(4), threading.Event()
        with gated(buffer, lambda entry: entry == 1 or held.wait(DEADLINE)) as gate:
            self.submit(buffer, [-1.0] * 4)
            assert gate.entered.wait(DEADLINE)
            saved = background(buffer.state_dict)
            assert_waits(saved)
            later = self.submit(buffer, [-2.0] * 4)
            gate.open()
            saved.result(timeout=DEADLINE)
            sample = background(lambda: buffer.sample(64))
            assert_waits(sample)
            assert not later.done()
            held.set()
            assert set(sample.result(timeout=DEADLINE)["value"].tolist()) == {-2.0}

    def test_sample_after_a_submit_never_sees_half_of_it(self):
        width = 2**14
        buffer = make_buffer(256)
        buffer.extend_batch(TensorDict({"x": torch.zeros(256, width), "number": torch.arange(256)}, [256]))
        taken, patch = slots(buffer, *range(256)), torch.zeros(256, 1).expand(256, width)
        for c in range(1, 6):
            patch = torch.full((256, 1), float(c)).expand(256, width)
            buffer.submit_update_if_present(**taken, patch={"x": patch})
            assert (buffer.sample(32)["x"][:, ::1000] == c).all()

    def test_eventual_sample_does_not_wait(self):
        buffer = filled(4, visibility="eventual")
        with buffer.storage._lock:
            future = self.submit(buffer, [-1.0, -2.0, -3.0, -4.0])
            value = buffer.sample(64)["value"]
            assert not future.done(), "the update applied while the storage was locked"
        assert set(value.tolist()) == {0.0, 1.0, 2.0, 3.0}
        future.result(timeout=DEADLINE)
        assert set(buffer.sample(64)["value"].tolist()) == {-1.0, -2.0, -3.0, -4.0}

    @pytest.mark.parametrize("prefetch", [1, 3])
    @pytest.mark.parametrize("visibility", ["ordered", "eventual"])
    def test_samples_made_ahead_are_unaffected(self, prefetch, visibility):
        buffer = filled(4, prefetch=prefetch, batch_size=64, visibility=visibility)
        old, new = {0.0, 1.0, 2.0, 3.0}, {-1.0, -2.0, -3.0, -4.0}
        buffer.sample()
        future = self.submit(buffer, [-1.0, -2.0, -3.0, -4.0])
        for _ in range(prefetch):
            assert set(buffer.sample()["value"].tolist()) == old
        future.result(timeout=DEADLINE)
        seen = [set(buffer.sample()["value"].tolist()) for _ in range(prefetch + 1)]
        if visibility == "ordered":
            assert seen == [new] * (prefetch + 1)
        assert seen[-1] == new
        buffer.shutdown()

    def test_update_waits_for_samples_that_are_being_made_ahead(self):
        """The threads that make them are kept out; the update could overtake them, and must not."""
        buffer = filled(4, prefetch=2, batch_size=64)
        buffer.sample()
        wait_until(lambda: all(made.done() for made in buffer._prefetch_queue))
        with buffer._replay_lock:
            buffer.sample()  # takes one and asks for another
            future = self.submit(buffer, [-1.0, -2.0, -3.0, -4.0])
            assert_waits(future)
        future.result(timeout=DEADLINE)
        for _ in range(2):
            assert set(buffer.sample()["value"].tolist()) == {0.0, 1.0, 2.0, 3.0}
        assert set(buffer.sample()["value"].tolist()) == {-1.0, -2.0, -3.0, -4.0}
        buffer.shutdown()

    def test_update_that_is_waited_for_is_not_seen_by_samples_that_are_being_made_ahead(self):
        buffer = filled(4, prefetch=2, batch_size=64)
        buffer.sample()
        wait_until(lambda: all(made.done() for made in buffer._prefetch_queue))
        with buffer._replay_lock:
            buffer.sample()  # takes one and asks for another
            taken, patch = slots(buffer, 0, 1, 2, 3), patch_values(buffer, [-1.0] * 4)
            update = background(lambda: buffer.update_if_present(**taken, patch=patch))
            assert_waits(update)
        update.result(timeout=DEADLINE)
        for _ in range(2):
            assert set(buffer.sample()["value"].tolist()) == {0.0, 1.0, 2.0, 3.0}
        buffer.shutdown()

    def test_transform_of_a_sample_that_is_being_made_ahead_may_update(self):
        """It must not wait for the sample that waits for it."""
        buffer = filled(4, prefetch=2, batch_size=4)

        def touch(sample: TensorDict) -> TensorDict:
            taken = {"index": sample["index"], "generation": sample["index_generation"]}
            buffer.update_if_present(**taken, patch={"value": torch.full((4,), -1.0)})
            return sample

        buffer.append_transform(touch)
        for _ in range(4):
            background(buffer.sample).result(timeout=DEADLINE)
        assert -1.0 in column(buffer)
        buffer.shutdown()

    def test_nothing_applies_while_somebody_holds_the_storage(self):
        buffer = filled(4)
        with buffer.storage._lock:
            future = self.submit(buffer, [-1.0] * 4)
            assert_waits(future)
            assert column(buffer) == [0.0, 1.0, 2.0, 3.0]
        assert future.result(timeout=DEADLINE).updated_count == 4

    def test_row_overwritten_while_its_update_waits_is_stale(self):
        buffer = filled(4)
        with buffer.storage._lock:
            future = self.submit(buffer, [-1.0, -2.0, -3.0, -4.0])
            buffer.extend_batch(records(4, 2))
        assert masks(future.result(timeout=DEADLINE)) == [STALE, STALE, UPDATED, UPDATED]
        assert column(buffer) == [4.0, 5.0, -3.0, -4.0]

    @pytest.mark.parametrize("entry", [1, 2, 3, 9])
    @pytest.mark.parametrize("versioned", [False, True])
    @pytest.mark.parametrize("pairs", ["side by side", "far apart"])
    def test_rows_overwritten_between_two_chunks_are_stale_from_then_on(self, entry, versioned, pairs):
        """A writer comes before the update thread takes the storage for the n-th time; what it wrote must not be
        touched, whatever lived when the update began. Every row has two records."""
        rows, width = 64, 2**18
        buffer = make_buffer(rows)

        def frames(first: int) -> TensorDict:
            clock = torch.arange(first, first + rows)
            return TensorDict({"id": clock, "x": clock.float().unsqueeze(-1).expand(rows, width)}, [rows])

        buffer.extend_batch(frames(0))
        interrupted = []

        def before(entered: int) -> None:
            if entered == entry:
                interrupted.append(entered)
                buffer.storage.extend_batch(frames(rows))

        more = {"version_key": "id", "version": 1000} if versioned else {}
        once = list(range(rows))
        order = once + once if pairs == "far apart" else sorted(once + once)
        with gated(buffer, before) as gate:
            gate.open()
            future = buffer.submit_update_if_present(
                **slots(buffer, *order),
                patch={"x": torch.full((2 * rows, 1), -1.0).expand(2 * rows, width)},
                **more,
            )
            words = masks(future.result(timeout=DEADLINE))
        assert interrupted, "128 MB were applied in one piece: a sampler would wait for all of it"
        assert buffer.storage["id"].flatten().tolist() == list(range(rows, 2 * rows))
        assert torch.equal(buffer.storage["x"][:, 0, ::4096], frames(rows)["x"][:, ::4096])
        last = {row: i for i, row in enumerate(order)}
        updated = [words[i] == UPDATED for i in sorted(last.values())]
        assert updated == sorted(updated, reverse=True), "chunks do not come in order"
        for i, row in enumerate(order):
            if i != last[row]:
                assert words[i] != UPDATED, "a record that is not the last of its row won"
                assert words[i] != SUPERSEDED or words[last[row]] == UPDATED, "superseded by a stale one"
        if entry == 1 or (pairs == "far apart" and not versioned):
            assert set(words) == {STALE}
        elif pairs == "side by side" and entry == 9:
            assert any(updated) and STALE in words

    def test_any_thread_may_submit(self):
        """Each thread's own updates keep their order, none is lost, and everybody is waited for."""
        buffer, turns = filled(4), 150
        start = threading.Barrier(4)

        def submit_many(row: int) -> cf.Future:
            start.wait(DEADLINE)
            for turn in range(turns):
                future = self.submit(buffer, [float(10 * turn + row)], (row,))
                if turn % 20 == row:
                    future.result(timeout=DEADLINE)
            return future

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            lasts = [background(lambda row=row: submit_many(row)) for row in range(4)]
            for last in lasts:
                assert masks(last.result(timeout=DEADLINE).result(timeout=DEADLINE)) == [UPDATED]
        finally:
            sys.setswitchinterval(before)
        buffer.synchronize()
        assert column(buffer) == [10.0 * (turns - 1) + row for row in range(4)]
        stats = buffer.stats()
        assert (stats["updates_applied"], stats["updates_failed"], stats["updates_pending"]) == (4 * turns, 0, 0)

    def test_racing_writer_is_never_patched_with_what_was_meant_for_another_row(self):
        """The patch carries the identity of its row."""
        capacity, streams = 8, 2
        buffer = filled(capacity, streams, visibility="eventual")
        turns, permits, futures, writes = 400, threading.Semaphore(0), [], []

        def write() -> None:
            first = capacity
            for turn in range(turns):
                assert permits.acquire(timeout=DEADLINE)
                buffer.extend_batch(records(first, 1 + turn % 3, streams))
                first += 1 + turn % 3
                writes.append(turn)

        writer = background(write)
        for _ in range(turns):
            sample = buffer.sample(32)
            identity = -sample["id"].flatten().float()
            permits.release()
            if len(futures) % 50 == 0:  # at times the writer comes first, whatever the scheduler likes
                written = len(futures) + 1
                wait_until(lambda written=written: len(writes) >= written)
            future = buffer.submit_update_if_present(
                index=sample["index"],
                generation=sample["index_generation"],
                patch={"value": identity, ("latent", "z"): identity[:, None, None].expand(-1, 2, 4)},
            )
            futures.append(future)
            seen = buffer.sample(32)
            number, value = seen["id"].flatten().float(), seen["value"]
            assert ((value == number) | (value == -number)).all(), "a patch on another row"
            assert (seen["latent", "z"] == value[:, None, None]).all(), "half a patch"
        writer.result(timeout=DEADLINE)
        words = {word for future in futures for word in masks(future.result(timeout=DEADLINE))}
        assert words == {UPDATED, SUPERSEDED, STALE}


# ------------------------------------------------------------------------------------------- failure
class TestFailure:
    """Contract: an update that fails while it is applied raises from its own future only; later updates and samples go
    on. So it is with one whose future was cancelled."""

    @staticmethod
    def failing(buffer: Any) -> Any:
        """The first update behind the gate fails."""

        def before(entry: int) -> None:
            if entry == 1:
                raise RuntimeError("boom")

        return gated(buffer, before)

    @staticmethod
    def submit(buffer: Any, value: float, *rows: int) -> cf.Future:
        return buffer.submit_update_if_present(**slots(buffer, *rows), patch=patch_values(buffer, [value] * len(rows)))

    @pytest.mark.parametrize("visibility", ["ordered", "eventual"])
    def test_failed_update_raises_from_its_own_future_only(self, visibility):
        buffer = filled(4, visibility=visibility)
        futures = [self.submit(buffer, -1.0, 0)]
        futures[0].result(timeout=DEADLINE)
        with self.failing(buffer) as gate:
            futures += [self.submit(buffer, -1.0, k) for k in (1, 2, 3)]
            gate.open()
            outcome = [future.exception(timeout=DEADLINE) for future in futures]
        assert [error is None for error in outcome] == [True, False, True, True]
        assert "boom" in str(outcome[1])
        assert column(buffer) == [-1.0, 1.0, -1.0, -1.0]
        assert set(buffer.sample(64)["value"].tolist()) == {-1.0, 1.0}
        assert masks(self.submit(buffer, -9.0, 1).result(timeout=DEADLINE)) == [UPDATED]
        stats = buffer.stats()
        assert (stats["updates_failed"], stats["updates_applied"], stats["updates_pending"]) == (1, 4, 0)
        buffer.shutdown()

    def test_failed_update_does_not_fail_the_sample_that_waits_for_it(self):
        buffer = filled(4)
        with self.failing(buffer) as gate:
            future = self.submit(buffer, -1.0, 0)
            sample = background(lambda: buffer.sample(64))
            assert_waits(sample)
            gate.open()
            assert set(sample.result(timeout=DEADLINE)["value"].tolist()) == {0.0, 1.0, 2.0, 3.0}
            assert future.exception(timeout=DEADLINE) is not None

    def test_failed_update_does_not_fail_samples_made_ahead(self):
        buffer = filled(4, prefetch=2, batch_size=8)
        buffer.sample()
        wait_until(lambda: all(made.done() for made in buffer._prefetch_queue))
        with self.failing(buffer) as gate:
            future = self.submit(buffer, -1.0, 0)
            gate.open()
            assert future.exception(timeout=DEADLINE) is not None
        for _ in range(5):
            buffer.sample()
        buffer.shutdown()

    def test_failed_update_does_not_fail_synchronize_and_saving(self, tmp_path):
        buffer = filled(4)
        with self.failing(buffer) as gate:
            future = self.submit(buffer, -1.0, 0)
            gate.open()
            assert future.exception(timeout=DEADLINE) is not None
        buffer.synchronize()
        buffer.state_dict()
        buffer.dumps(tmp_path)
        buffer.shutdown()

    @pytest.mark.parametrize("when", ["first in the queue", "behind others"])
    def test_cancelled_update_holds_up_nobody(self, when):
        """A future can be cancelled; whether that comes in time or not, its update is over for everybody."""
        buffer = filled(4)
        with gated(buffer) as gate:
            if when == "behind others":
                self.submit(buffer, -1.0, 0)
                assert gate.entered.wait(DEADLINE)
            cancelled = self.submit(buffer, -2.0, 1)
            in_time = cancelled.cancel()
            later = self.submit(buffer, -3.0, 2)
            gate.open()
            assert masks(later.result(timeout=DEADLINE)) == [UPDATED]
            background(lambda: buffer.sample(8)).result(timeout=DEADLINE)
            background(buffer.synchronize).result(timeout=DEADLINE)
        assert column(buffer)[1] == (1.0 if in_time else -2.0)
        background(buffer.shutdown).result(timeout=DEADLINE)

    @staticmethod
    def sampling_callback(buffer: Any, seen: cf.Future) -> Callable[[cf.Future], None]:
        """A callback that waits for a sample, made in a thread of its own so that a deadlock ends by itself."""

        def callback(_: cf.Future) -> None:
            try:
                seen.set_result(background(lambda: buffer.sample(64)).result(timeout=DEADLINE / 2))
            except BaseException as error:
                seen.set_exception(error)

        return callback

    def test_callback_of_a_future_may_sample(self):
        buffer, seen = filled(4), cf.Future()
        with gated(buffer) as gate:
            future = self.submit(buffer, -1.0, 0, 1, 2, 3)
            future.add_done_callback(self.sampling_callback(buffer, seen))
            gate.open()
            assert set(seen.result(timeout=DEADLINE)["value"].tolist()) == {-1.0}

    def test_callback_of_a_future_may_sample_while_later_updates_are_pending(self):
        """The sample waits for the later update, which must not wait for the callback."""
        buffer, seen = filled(4), cf.Future()
        with gated(buffer) as gate:
            first = self.submit(buffer, -1.0, 0, 1, 2, 3)
            first.add_done_callback(self.sampling_callback(buffer, seen))
            self.submit(buffer, -2.0, 0, 1, 2, 3)
            gate.open()
            assert set(seen.result(timeout=DEADLINE)["value"].tolist()) == {-2.0}
        background(buffer.shutdown).result(timeout=DEADLINE)

    def test_callback_of_a_future_may_shut_the_buffer_down(self):
        buffer, ended = filled(4), cf.Future()
        with gated(buffer) as gate:
            self.submit(buffer, -1.0, 0).add_done_callback(lambda _: ended.set_result(buffer.shutdown()))
            later = self.submit(buffer, -2.0, 1)
            gate.open()
            ended.result(timeout=DEADLINE / 2)
        assert masks(later.result(timeout=DEADLINE)) == [UPDATED]

    def test_callback_of_a_dropped_update_may_sample(self):
        buffer, seen = filled(4, when_full="drop_oldest", max_pending_bytes=1), cf.Future()
        with gated(buffer) as gate:
            self.submit(buffer, -1.0, 0, 1, 2, 3)
            assert gate.entered.wait(DEADLINE)
            self.submit(buffer, -2.0, 0).add_done_callback(self.sampling_callback(buffer, seen))
            # Drops the second update, whose callback waits for the first one, which waits at the gate.
            third = background(lambda: self.submit(buffer, -3.0, 0))
            cf.wait([seen], timeout=STILL)
            gate.open()
            assert masks(third.result(timeout=DEADLINE).result(timeout=DEADLINE)) == [UPDATED]
            value = set(seen.result(timeout=DEADLINE)["value"].tolist())
            assert value <= {-1.0, -3.0}, "the sample did not wait for the first update"

    def test_update_that_no_thread_can_be_started_for_gives_its_room_back(self, monkeypatch):
        buffer = filled(4, max_pending_bytes=1, when_full="raise")

        def submit(*_: Any) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="start new thread"):
            patch.setattr(cf.ThreadPoolExecutor, "submit", submit)
            self.submit(buffer, -1.0, 0)
        assert (buffer.stats()["updates_pending"], buffer.stats()["updates_pending_bytes"]) == (0, 0)
        assert masks(self.submit(buffer, -2.0, 0).result(timeout=DEADLINE)) == [UPDATED]
        assert column(buffer)[0] == -2.0
        background(buffer.shutdown).result(timeout=DEADLINE)

    def test_callback_that_raises_harms_nobody(self):
        buffer = filled(4)

        def callback(future: cf.Future) -> None:
            raise RuntimeError("boom in a callback")

        with gated(buffer) as gate:
            self.submit(buffer, -1.0, 0).add_done_callback(callback)
            later = self.submit(buffer, -2.0, 1)
            gate.open()
            assert masks(later.result(timeout=DEADLINE)) == [UPDATED]
        assert set(buffer.sample(64)["value"].tolist()) == {-1.0, -2.0, 2.0, 3.0}


# ------------------------------------------------------------------------------------------- bounds
class TestPendingBytes:
    """Contract: at most ``max_pending_bytes`` wait (one update alone may be larger); when there is no room submit
    blocks, raises, or drops the oldest update that has not started. An update that has started may count or not."""

    MB = 2**18  # floats

    def buffer(self, megabytes: float, **kwargs: Any) -> Any:
        buffer = make_buffer(4, max_pending_bytes=int(megabytes * 2**20), **kwargs)
        buffer.extend_batch(TensorDict({"x": torch.zeros(4, self.MB), "number": torch.arange(4)}, [4]))
        return buffer

    def submit(self, buffer: Any, value: float, row: int = 0, rows: int = 1) -> cf.Future:
        wanted = [(row + k) % 4 for k in range(rows)]
        return buffer.submit_update_if_present(
            **slots(buffer, *wanted), patch={"x": torch.full((rows, self.MB), float(value))}
        )

    def plug(self, buffer: Any, gate: Gate) -> cf.Future:
        """An update that has started and stands at the gate."""
        future = self.submit(buffer, 100, 3)
        assert gate.entered.wait(DEADLINE)
        return future

    def stored(self, buffer: Any) -> list[float]:
        x = buffer.storage["x"][:, 0]
        assert torch.equal(x.amin(-1), x.amax(-1))
        return x[:, 0].tolist()

    def within(self, buffer: Any) -> bool:
        return buffer.stats()["updates_pending_bytes"] <= buffer._updates.max_pending_bytes

    def test_submit_blocks_until_there_is_room_and_keeps_the_order(self):
        buffer = self.buffer(2.5)
        submitted: list[cf.Future] = []
        with gated(buffer) as gate:
            self.plug(buffer, gate)
            blocked = background(lambda: [submitted.append(self.submit(buffer, k, 0)) for k in range(1, 8)])
            assert_waits(blocked)
            assert len(submitted) in (1, 2) and self.within(buffer)
            gate.open()
            blocked.result(timeout=DEADLINE)
            for future in submitted:
                assert masks(future.result(timeout=DEADLINE)) == [UPDATED]
        assert self.stored(buffer) == [7.0, 0.0, 0.0, 100.0]

    def test_submit_raises_when_there_is_no_room_and_enqueues_nothing(self):
        buffer = self.buffer(2.5, when_full="raise")
        with gated(buffer) as gate:
            kept = [self.plug(buffer, gate)]
            with pytest.raises(RuntimeError, match="max_pending_bytes"):
                for k in range(1, 4):
                    kept.append(self.submit(buffer, k, k - 1))
            assert len(kept) in (2, 3) and self.within(buffer)
            pending = {key: buffer.stats()[key] for key in ("updates_pending", "updates_pending_bytes")}
            with pytest.raises(RuntimeError):
                self.submit(buffer, 9, 0)
            assert {key: buffer.stats()[key] for key in pending} == pending
            gate.open()
            for future in kept:
                assert masks(future.result(timeout=DEADLINE)) == [UPDATED]
        assert self.stored(buffer) == [1.0, 2.0 if len(kept) == 3 else 0.0, 0.0, 100.0]
        assert buffer.stats()["updates_dropped"] == 0
        assert masks(self.submit(buffer, 4, 3).result(timeout=DEADLINE)) == [UPDATED]

    def test_oldest_updates_that_have_not_started_are_dropped(self):
        buffer = self.buffer(2.5, when_full="drop_oldest")
        with gated(buffer) as gate:
            plug = self.plug(buffer, gate)
            submitted = [self.submit(buffer, k, 0) for k in range(1, 6)]
            dropped = [future.done() for future in submitted]
            assert dropped in ([True] * 3 + [False] * 2, [True] * 4 + [False])
            for future in submitted[: sum(dropped)]:
                with pytest.raises(RuntimeError, match="max_pending_bytes|dropped"):
                    future.result(timeout=DEADLINE)
            assert buffer.stats()["updates_dropped"] == sum(dropped) and self.within(buffer)
            gate.open()
            for future in (plug, *submitted[sum(dropped) :]):
                assert masks(future.result(timeout=DEADLINE)) == [UPDATED]
        assert self.stored(buffer) == [5.0, 0.0, 0.0, 100.0]
        stats = buffer.stats()
        assert (stats["updates_failed"], stats["updates_applied"]) == (0, 1 + 5 - sum(dropped))

    def test_as_many_are_dropped_as_room_is_needed(self):
        buffer = self.buffer(4.5, when_full="drop_oldest")
        with gated(buffer) as gate:
            self.plug(buffer, gate)
            small = [self.submit(buffer, 1 + k, k) for k in range(3)]
            assert not any(future.done() for future in small)
            large = self.submit(buffer, 9, 0, rows=3)
            assert [future.done() for future in small] in ([True, True, False], [True, True, True])
            gate.open()
            assert large.result(timeout=DEADLINE).updated_count == 3
        assert self.stored(buffer) == [9.0, 9.0, 9.0, 100.0]

    def test_nobody_waits_for_what_was_dropped(self):
        buffer = self.buffer(1.5, when_full="drop_oldest")
        with gated(buffer) as gate:
            self.plug(buffer, gate)
            for k in range(3):
                self.submit(buffer, k, 1)
            gate.open()
            background(lambda: buffer.sample(4)).result(timeout=DEADLINE)
            background(buffer.synchronize).result(timeout=DEADLINE)

    def test_submit_that_waits_for_room_ends_when_the_buffer_is_shut_down(self):
        """With an error or with its update applied; in either case nobody waits for it later."""
        for _ in range(5):
            buffer = self.buffer(1.5)
            with gated(buffer) as gate:
                self.plug(buffer, gate)
                blocked = background(lambda buffer=buffer: [self.submit(buffer, k, 0) for k in range(3)])
                assert_waits(blocked)
                ended = background(buffer.shutdown)
                gate.open()
                ended.result(timeout=DEADLINE)
                with contextlib.suppress(RuntimeError):
                    for future in blocked.result(timeout=DEADLINE):
                        future.result(timeout=DEADLINE)
                assert blocked.done() and buffer.stats()["updates_pending"] == 0
                last = background(
                    lambda buffer=buffer: buffer.update_if_present(
                        **slots(buffer, 0), patch={"x": torch.ones(1, self.MB)}
                    )
                )
                assert masks(last.result(timeout=DEADLINE)) == [UPDATED]

    @pytest.mark.parametrize("when_full", ["block", "raise", "drop_oldest"])
    def test_one_update_above_the_bound_is_accepted_when_nothing_is_pending(self, when_full):
        buffer = self.buffer(0.5, when_full=when_full)
        for value in (1, 2):
            assert masks(self.submit(buffer, value).result(timeout=DEADLINE)) == [UPDATED]
            wait_until(lambda: buffer.stats()["updates_pending_bytes"] == 0)
        assert self.stored(buffer)[0] == 2.0

    def test_failed_updates_give_their_room_back(self):
        buffer = self.buffer(1.5, when_full="raise")

        def before(entry: int) -> None:
            raise RuntimeError("boom")

        for _ in range(3):
            with gated(buffer, before) as gate:
                future = self.submit(buffer, 1)
                gate.open()
                assert future.exception(timeout=DEADLINE) is not None
            wait_until(lambda: buffer.stats()["updates_pending_bytes"] == 0)


# ------------------------------------------------------------------------------------------- stats
class TestStats:
    """Contract: ``stats()`` counts what is pending and what became of the records, beside what TorchRL counts."""

    COUNTERS = ("pending", "pending_bytes", "applied", "stale", "superseded", "version_rejected", "failed", "dropped")

    def counts(self, buffer: Any) -> dict[str, int]:
        return {name: buffer.stats()[f"updates_{name}"] for name in self.COUNTERS}

    def test_fresh_buffer_counts_nothing(self):
        buffer = filled(4)
        stats = buffer.stats()
        assert set(self.counts(buffer).values()) == {0}
        assert (stats["size"], stats["write_count"], stats["capacity"]) == (4, 4, 4)
        assert all(isinstance(value, (int, float, bool)) for value in stats.values())
        assert {"update_wait_p50_ms", "update_wait_p95_ms"} <= set(stats)

    def test_records_are_counted_by_what_became_of_them(self):
        buffer = filled(4)
        old = slots(buffer, 0)
        buffer.extend_batch(records(4, 1))
        new = slots(buffer, 0, 0, 1)
        given = {name: torch.cat([old[name], new[name]]) for name in old}
        buffer.submit_update_if_present(**given, patch=patch_values(buffer, range(4))).result(timeout=DEADLINE)
        for version in (7, 3):
            future = buffer.submit_update_if_present(
                **given, patch=patch_values(buffer, range(4)), version_key="version", version=version
            )
            future.result(timeout=DEADLINE)
        wait_until(lambda: buffer.stats()["updates_pending"] == 0)
        wanted = {"applied": 4, "stale": 3, "superseded": 1, "version_rejected": 4}
        assert self.counts(buffer) == {**dict.fromkeys(self.COUNTERS, 0), **wanted}

    def test_pending_updates_and_bytes_are_seen_and_vanish(self):
        buffer = filled(4)
        with gated(buffer) as gate:
            buffer.submit_update_if_present(**slots(buffer, 0), patch=patch_values(buffer, [1.0]))
            assert gate.entered.wait(DEADLINE)
            seen = [(self.counts(buffer)["pending"], self.counts(buffer)["pending_bytes"])]
            for k in range(3):
                buffer.submit_update_if_present(**slots(buffer, k), patch=patch_values(buffer, [1.0]))
                seen.append((self.counts(buffer)["pending"], self.counts(buffer)["pending_bytes"]))
            assert [count - seen[0][0] for count, _ in seen] == [0, 1, 2, 3] and seen[0][0] in (0, 1)
            steps = [after - before for (_, before), (_, after) in itertools.pairwise(seen)]
            assert steps[0] >= 4 and steps == [steps[0]] * 3
            gate.open()
            wait_until(lambda: self.counts(buffer)["pending"] == 0)
        assert self.counts(buffer)["pending_bytes"] == 0

    def test_waits_are_in_milliseconds_and_in_order(self):
        buffer = filled(4)
        with gated(buffer) as gate:
            future = buffer.submit_update_if_present(**slots(buffer, 0), patch=patch_values(buffer, [1.0]))
            time.sleep(0.05)
            gate.open()
            future.result(timeout=DEADLINE)
            wait_until(lambda: buffer.stats()["updates_pending"] == 0)
        stats = buffer.stats()
        assert 0.0 <= stats["update_wait_p50_ms"] <= stats["update_wait_p95_ms"] < 1000 * DEADLINE


# ------------------------------------------------------------------------------------------- state
class TestState:
    """Contract: what is saved has the updates that were pending; options survive; a shut-down buffer takes no more
    submits."""

    SAVES = ("state_dict", "dumps", "pickle")

    def save(self, how: str, buffer: Any, path: Any) -> Any:
        if how == "pickle":
            return pickle.loads(pickle.dumps(buffer))
        loaded = make_buffer(4)
        if how == "state_dict":
            loaded.load_state_dict(copy.deepcopy(buffer.state_dict()))
        else:
            buffer.dumps(path)
            loaded.loads(path)
        return loaded

    @pytest.mark.parametrize("visibility", ["ordered", "eventual"])
    @pytest.mark.parametrize("how", SAVES)
    def test_pending_updates_are_applied_before_saving(self, how, visibility, tmp_path):
        buffer = filled(4, visibility=visibility)
        lock = buffer.storage._lock
        with gated(buffer) as gate:
            for value in (-1.0, -2.0):
                buffer.submit_update_if_present(**slots(buffer, 0, 3), patch=patch_values(buffer, [value, value]))

            def save() -> Any:
                return self.save(how, buffer, tmp_path)

            saved = background(save)
            assert_waits(saved)
            gate.open()
            loaded = saved.result(timeout=DEADLINE)
        assert buffer.storage._lock is lock
        assert column(loaded) == [-2.0, 1.0, 2.0, -2.0]
        assert column(buffer) == [-2.0, 1.0, 2.0, -2.0]
        assert buffer.stats()["updates_pending"] == loaded.stats()["updates_pending"] == 0
        later = loaded.submit_update_if_present(**slots(loaded, 1), patch=patch_values(loaded, [5.0]))
        assert masks(later.result(timeout=DEADLINE)) == [UPDATED]
        assert column(buffer)[1] == 1.0

    def test_options_survive_a_pickle(self):
        buffer = filled(4, visibility="eventual", when_full="raise", max_pending_bytes=10)
        loaded = pickle.loads(pickle.dumps(buffer))
        with loaded.storage._lock:
            loaded.submit_update_if_present(**slots(loaded, 0), patch=patch_values(loaded, [-1.0]))
            loaded.sample(4)
            with pytest.raises(RuntimeError):
                for _ in range(100):
                    loaded.submit_update_if_present(**slots(loaded, 0), patch=patch_values(loaded, [-1.0]))

    def test_loading_forgets_updates_that_were_pending(self):
        """They were meant for what the load replaces; a handle of the loaded state names a row of the loaded state."""
        buffer = filled(4)
        state = copy.deepcopy(buffer.state_dict())
        futures = [
            buffer.submit_update_if_present(**slots(buffer, 0), patch=patch_values(buffer, [-1.0])) for _ in range(5)
        ]
        buffer.load_state_dict(state)
        cf.wait(futures, timeout=DEADLINE)
        assert column(buffer) == [0.0, 1.0, 2.0, 3.0]

    def test_shutdown_ends_what_is_pending_and_refuses_more(self):
        buffer = filled(4)
        futures = [
            buffer.submit_update_if_present(**slots(buffer, k), patch=patch_values(buffer, [-1.0 - k]))
            for k in range(4)
        ]
        buffer.shutdown()
        assert all(future.done() for future in futures)
        assert column(buffer) == [-1.0, -2.0, -3.0, -4.0]
        before = image(buffer.storage)
        with pytest.raises(RuntimeError):
            buffer.submit_update_if_present(**slots(buffer, 0), patch=patch_values(buffer, [9.0]))
        assert_same(before, buffer.storage)
        assert masks(buffer.update_if_present(**slots(buffer, 0), patch=patch_values(buffer, [9.0]))) == [UPDATED]
        assert column(buffer)[0] == 9.0
        buffer.shutdown()

    def test_shutdown_among_submitters_leaves_nothing_pending(self):
        """Each submit is refused or its update ends, and nobody waits for it later."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            for _ in range(30):
                buffer, many = filled(4), threading.Event()

                def submit_until_refused(
                    row: int, buffer: Any = buffer, many: threading.Event = many
                ) -> list[cf.Future]:
                    futures: list[cf.Future] = []
                    with contextlib.suppress(RuntimeError):
                        while True:
                            given = slots(buffer, row)
                            futures.append(
                                buffer.submit_update_if_present(
                                    **given, patch=patch_values(buffer, [float(len(futures))])
                                )
                            )
                            if len(futures) > 10:
                                many.set()
                    return futures

                submitters = [background(lambda row=row, call=submit_until_refused: call(row)) for row in range(3)]
                assert many.wait(DEADLINE)
                background(buffer.shutdown).result(timeout=DEADLINE)
                for submitter in submitters:
                    futures = submitter.result(timeout=DEADLINE)
                    assert all(masks(future.result(timeout=DEADLINE)) == [UPDATED] for future in futures)
                assert buffer.stats()["updates_pending"] == 0
                last = background(
                    lambda buffer=buffer: buffer.update_if_present(
                        **slots(buffer, 0), patch=patch_values(buffer, [9.0])
                    )
                )
                assert masks(last.result(timeout=DEADLINE)) == [UPDATED]
        finally:
            sys.setswitchinterval(before)

    def test_shutdown_leaves_no_thread_behind(self):
        before = set(threading.enumerate())
        buffer = filled(4)
        buffer.submit_update_if_present(**slots(buffer, 0), patch=patch_values(buffer, [9.0])).result(timeout=DEADLINE)
        buffer.shutdown()
        wait_until(lambda: set(threading.enumerate()) <= before)

    def test_buffer_that_never_submits_starts_no_thread(self):
        before = set(threading.enumerate())
        buffer = filled(4)
        buffer.update_if_present(**slots(buffer, 0), patch=patch_values(buffer, [9.0]))
        buffer.sample()
        assert set(threading.enumerate()) <= before

    def test_updates_that_wait_do_not_patch_another_storage(self):
        """Their handles name rows of the storage that they were submitted for."""
        buffer, other = filled(4), filled(4).storage
        old = buffer.storage
        with gated(buffer) as gate:
            futures = [
                buffer.submit_update_if_present(**slots(buffer, k), patch=patch_values(buffer, [-1.0]))
                for k in range(3)
            ]
            assert gate.entered.wait(DEADLINE)
            exchanged = background(lambda: buffer.set_storage(other))
            cf.wait([exchanged], timeout=STILL)
            gate.open()
            exchanged.result(timeout=DEADLINE)
            done, _ = cf.wait(futures, timeout=DEADLINE)
            assert len(done) == 3
            old._lock = gate._lock
        assert buffer.storage is other
        assert other["value"].flatten().tolist() == [0.0, 1.0, 2.0, 3.0]


# ------------------------------------------------------------------------------------------- CUDA
@pytest.mark.parametrize("method", METHODS)
def test_update_of_a_device_storage_reads_nothing_back(method):
    """As on CUDA, but on host memory, where a read is an operation that can be seen."""
    with books_on_the_device():
        buffer = filled(8, 3, written=11)
        sample = buffer.sample(64)
        given = {"index": sample["index"], "generation": sample["index_generation"]}
        patch = {"value": torch.zeros(64), ("latent", "z"): torch.ones(64, 2, 4)}
        with NoHostSync():
            plain = getattr(buffer, method)(**given, patch=patch)
            versioned = getattr(buffer, method)(
                **given, patch=patch, version_key="version", version=torch.arange(64), require_newer=True
            )
        for result in (plain, versioned):
            words = masks(result.result(timeout=DEADLINE) if method.startswith("submit") else result)
            assert len(words) == 64 and UPDATED in words and STALE not in words


def frames(rows: int, width: int) -> TensorDict:
    return TensorDict({"x": torch.zeros(rows, width)}, [rows])


def frame_buffer(rows: int, width: int, device: str) -> Any:
    buffer = make_buffer(rows, device=device)
    buffer.extend_batch(frames(rows, width).to(device))
    return buffer


def spin(milliseconds: float) -> None:
    """Work for the device on the current stream, of about this length."""
    torch.cuda._sleep(int(milliseconds * 1_900_000))


@contextlib.contextmanager
def no_host_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
class TestCudaPatchesOfAHostStorage:
    """Contract: inputs on a CUDA device are copied on the caller's stream when they are submitted; the update waits
    for these copies and for nothing that is enqueued later."""

    @staticmethod
    def taken(buffer: Any, device: str = "cuda") -> dict[str, torch.Tensor]:
        return {name: value.to(device) for name, value in slots(buffer, *range(buffer.storage.capacity)).items()}

    def test_update_is_done_long_before_the_learner_step_behind_it(self):
        """case 25"""
        buffer = frame_buffer(128, 2**14, "cpu")  # 8 MB
        given, patch = self.taken(buffer), torch.zeros(128, 2**14, device="cuda")
        for c in range(1, 6):  # the first turns allocate pinned memory
            patch.fill_(float(c))
            torch.cuda.synchronize()
            future = buffer.submit_update_if_present(**given, patch={"x": patch})
            spin(500.0)
            learner = torch.cuda.Event()
            learner.record()
            assert future.result(timeout=DEADLINE).updated_count == 128
            assert not learner.query(), "the update waited for the learner step, or the learner stream was synchronised"
            assert (buffer.storage["x"] == c).all()
            torch.cuda.synchronize()

    @pytest.mark.timeout(300)
    def test_two_hundred_large_patches_arrive_whole(self):
        """case 26"""
        buffer = frame_buffer(256, 2**16, "cpu")  # 64 MB
        given, patch = self.taken(buffer), torch.empty(256, 2**16, device="cuda")
        for c in range(200):
            patch.fill_(float(c))
            future = buffer.submit_update_if_present(**given, patch={"x": patch})
            patch.fill_(-1.0)
            assert future.result(timeout=DEADLINE).updated_count == 256
            assert bool((buffer.storage["x"] == c).all()), f"constant {c}"

    def test_patch_of_a_busy_side_stream_is_waited_for(self):
        """case 27"""
        buffer = frame_buffer(64, 2**14, "cpu")
        given, patch = self.taken(buffer), torch.zeros(64, 2**14, device="cuda")
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        for value in (7.0, 8.0):
            with torch.cuda.stream(side):
                spin(200.0)
                patch.fill_(value)
                written = torch.cuda.Event()
                written.record()
                future = buffer.submit_update_if_present(**given, patch={"x": patch})
                returned_early = not written.query()
            assert future.result(timeout=DEADLINE).updated_count == 64
            assert (buffer.storage["x"] == value).all()
        assert returned_early, "submit waited for the stream"

    def test_sources_freed_at_once_arrive(self):
        buffer = frame_buffer(64, 2**14, "cpu")
        given = self.taken(buffer)
        for c in range(20):
            patch = torch.full((64, 2**14), float(c), device="cuda")
            future = buffer.submit_update_if_present(**given, patch={"x": patch})
            del patch
            torch.cuda.empty_cache()
            garbage = torch.full((64, 2**14), -1.0, device="cuda")
            assert future.result(timeout=DEADLINE).updated_count == 64
            assert (buffer.storage["x"] == c).all()
            del garbage

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_static_outputs_of_a_graph_may_be_replayed_after_submit(self, device):
        buffer = frame_buffer(64, 2**14, device)
        given = self.taken(buffer)
        source = torch.zeros(64, 2**14, device="cuda")
        warm = torch.cuda.Stream()
        with torch.cuda.stream(warm):
            _ = source + 1
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            patch = source + 1
        futures = []
        for c in range(20):
            source.fill_(float(c))
            graph.replay()
            futures.append(buffer.submit_update_if_present(**given, patch={"x": patch}))
            source.fill_(-5.0)
            graph.replay()
            futures[-1].result(timeout=DEADLINE)
            torch.cuda.synchronize()
            assert bool((buffer.storage["x"] == c + 1).all())

    def test_inputs_of_mixed_devices_meet(self):
        for storage_device in ("cpu", "cuda"):
            buffer = filled(4, 2, device=storage_device)
            index = torch.tensor([[0, 0], [1, 1], [0, 0]])
            for turn, where in enumerate((("cpu", "cuda", "cuda"), ("cuda", "cpu", "cpu"), ("cuda", "cuda", "cpu"))):
                given = {
                    "index": index.to(where[0]),
                    "generation": torch.zeros(3, dtype=torch.int64, device=where[1]),
                    "patch": {
                        "value": torch.tensor([10.0, 11.0, 12.0], device=where[2]) + turn,
                        ("next", "reward"): torch.zeros(3, 1, device=where[0]),
                    },
                }
                for method in METHODS:
                    assert masks(apply(buffer, method, **given)) == [SUPERSEDED, UPDATED, UPDATED]
                    assert buffer.storage["value"][0, 0] == 12.0 + turn and buffer.storage["value"][1, 1] == 11.0 + turn


@pytest.mark.gpu
class TestCudaStorage:
    """Contract: on a CUDA storage everything happens on the device, on the caller's stream; the host waits for
    nothing; the masks are device tensors."""

    def test_nothing_synchronises_with_the_host(self):
        buffer = filled(64, 8, written=40, device="cuda")
        run = records(40, 4, 8, device="cuda")
        bare = run.exclude(("next", "observation"))
        packed = buffer.storage.layout.pack(bare)
        patch = {"value": torch.zeros(128, device="cuda"), ("latent", "z"): torch.ones(128, 2, 4, device="cuda")}
        version = torch.arange(128, device="cuda")
        for warm in (True, False):
            with contextlib.nullcontext() if warm else no_host_sync():
                sample = buffer.sample(128)
                given = {"index": sample["index"], "generation": sample["index_generation"]}
                results = [buffer.update_if_present(**given, patch=patch)]
                results.append(buffer.update_if_present(**given, patch=patch, version_key="version", version=version))
                results.append(buffer.update_if_present(**given, patch=patch, version_key="version", version=3))
                buffer.extend_batch(packed)
                future = buffer.submit_update_if_present(**given, patch=patch)
                buffer.sample(128)
                results.append(future.result(timeout=DEADLINE))
            for result in results:
                assert result.updated.is_cuda and result.superseded.is_cuda and result.stale.is_cuda
                assert len(masks(result)) == 128

    # Of 33 entries the side table can never need more, of 1,000 it will not need more soon.
    @pytest.mark.parametrize("final_capacity", [1000, 33])
    def test_routed_writes_do_not_synchronise_with_the_host(self, final_capacity):
        storage = SlotStorage(32, 8, device="cuda", final_capacity=final_capacity)
        buffer = make_buffer(32, storage=storage, routing_key="env")

        def batch(first: int) -> TensorDict:
            data = records(first, 4, 8, device="cuda").reshape(-1)
            data["env"] = torch.arange(32, device="cuda").remainder(8)
            return data

        batches = [batch(4 * turn) for turn in range(8)]
        for data in batches[:2]:
            buffer.extend(data)
        buffer.sample(32)
        with no_host_sync():
            for data in batches[2:]:
                index = buffer.extend(data)
                buffer.sample(32)
        assert tuple(index.shape) == (32, 2)
        assert storage.head.tolist() == [32] * 8

    def test_inputs_overwritten_after_submit_change_nothing(self):
        buffer = frame_buffer(64, 2**14, "cuda")
        given = {name: value.cuda() for name, value in slots(buffer, *range(64)).items()}
        patch = torch.empty(64, 2**14, device="cuda")
        for c in range(50):
            live = {name: value.clone() for name, value in given.items()}
            patch.fill_(float(c))
            future = buffer.submit_update_if_present(**live, patch={"x": patch})
            patch.fill_(-1.0)
            live["index"].fill_(0)
            live["generation"].fill_(9)
            assert future.result(timeout=DEADLINE).updated_count == 64
            assert bool((buffer.storage["x"] == c).all())

    def test_sources_freed_at_once_arrive(self):
        buffer = frame_buffer(64, 2**14, "cuda")
        for c in range(20):
            patch = torch.full((64, 2**14), float(c), device="cuda")
            future = buffer.submit_update_if_present(**slots(buffer, *range(64)), patch={"x": patch})
            del patch
            torch.cuda.empty_cache()
            garbage = torch.full((64, 2**14), -1.0, device="cuda")
            future.result(timeout=DEADLINE)
            assert bool((buffer.storage["x"] == c).all())
            del garbage

    def test_sample_of_another_stream_waits_for_the_update(self):
        buffer = frame_buffer(64, 2**14, "cuda")
        given, side = slots(buffer, *range(64)), torch.cuda.Stream()
        patch = torch.zeros(64, 2**14, device="cuda")
        torch.cuda.synchronize()
        for c in (1.0, 2.0):
            with torch.cuda.stream(side):
                spin(100.0)
                patch.fill_(c)
                buffer.submit_update_if_present(**given, patch={"x": patch})
            seen = buffer.sample(32)["x"]
            assert bool((seen == c).all())
            torch.cuda.synchronize()

    def test_update_of_another_stream_waits_for_the_sample(self):
        buffer = frame_buffer(64, 2**14, "cuda")
        given, side = slots(buffer, *range(64)), torch.cuda.Stream()
        patch = torch.ones(64, 2**14, device="cuda")
        buffer.sample(32)
        torch.cuda.synchronize()
        spin(100.0)
        seen = buffer.sample(32)["x"]
        with torch.cuda.stream(side):
            buffer.update_if_present(**given, patch={"x": patch})
        torch.cuda.synchronize()
        assert bool((seen == 0.0).all())

    def test_masks_and_bytes_are_those_of_a_host_storage(self):
        generator = torch.Generator().manual_seed(0)
        buffers = [eventful("cpu"), eventful("cuda")]
        for turn in range(60):
            index = torch.randint(-1, 7, (9, 2), generator=generator)
            index[:, 1] = torch.randint(-1, 3, (9,), generator=generator)
            generation = torch.randint(-1, 3, (9,), generator=generator)
            value, version = torch.randn(9, 3, generator=generator), torch.randint(0, 5, (9,), generator=generator)
            results = []
            for buffer in buffers:
                device = buffer.storage.device
                more = {"version_key": "version", "version": version.to(device)} if turn % 2 else {}
                given = {"index": index.to(device), "generation": generation.to(device)}
                results.append(
                    masks(buffer.update_if_present(**given, patch={"observation": value.to(device)}, **more))
                )
            assert results[0] == results[1]
            host, device_rows = (image(buffer.storage)["rows"] for buffer in buffers)
            ring = 6 * 2
            assert torch.equal(host[:ring], device_rows[:ring])
