# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The replay core against a slow reference model, on arbitrary programs.

A program is a storage configuration and a list of operations, all of them small frozen values: what hypothesis
prints can be pasted into ``run_program`` and fails the same way again. Every byte is a function of the program.

    pytest test/test_replay_model.py                                        # CI: the same few programs every time
    HYPOTHESIS_PROFILE=long pytest -o timeout=0 test/test_replay_model.py   # many, others every time
"""

from __future__ import annotations

import copy
import hashlib
import io
import math
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from _reference import DONE, REWARD, TERMINATED, TRUNCATED, Key, Reference, flat_rows, leaves, rows_of, state_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import RandomSampler, ReplayBuffer

from torchrl_ext import data

REFUSED = (ValueError, KeyError, TypeError, IndexError)


# ------------------------------------------------------------------------------------------- layouts
@dataclass(frozen=True)
class Leaf:
    """One field of a layout."""

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.empty(self.shape, dtype=self.dtype).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Schema:
    """Observations (derived or stored twice), the other fields, the flags that exist."""

    name: str
    observations: tuple[Leaf, ...]
    others: tuple[Leaf, ...]
    reward: Leaf
    flags: tuple[Leaf, ...]

    @property
    def next_keys(self) -> list[Key]:
        return [leaf.key for leaf in self.observations]


def _flags(*names: str, shape: tuple[int, ...]) -> tuple[Leaf, ...]:
    return tuple(Leaf(("next", name), torch.bool, shape) for name in names)


SMALL = Schema(
    "small",
    observations=(Leaf(("observation",), torch.float32, (3,)),),
    others=(Leaf(("action",), torch.float32, (2,)),),
    reward=Leaf(REWARD, torch.float32, (1,)),
    flags=_flags("done", "terminated", "truncated", shape=(1,)),
)
MIXED = Schema(
    "mixed",
    observations=(
        Leaf(("pixels",), torch.uint8, (2, 3, 1)),
        Leaf(("agents", "state"), torch.bfloat16, (3,)),
        Leaf(("mask",), torch.bool, (5,)),
        Leaf(("clock",), torch.int64, ()),
    ),
    others=(
        Leaf(("extra", "logp"), torch.float16, (2,)),
        Leaf(("action",), torch.int64, ()),
        Leaf(("next", "note"), torch.int32, ()),
    ),
    reward=Leaf(REWARD, torch.float32, (1,)),
    flags=_flags("done", "terminated", "truncated", shape=(1,)),
)
DOUBLE = Schema(
    "double",
    observations=(Leaf(("observation",), torch.float64, ()), Leaf(("obs", "x"), torch.float32, (1,))),
    others=(Leaf(("action",), torch.float32, (1,)),),
    reward=Leaf(REWARD, torch.float64, ()),
    flags=_flags("done", "terminated", shape=()),
)
SCHEMAS = {schema.name: schema for schema in (SMALL, MIXED, DOUBLE)}


# ------------------------------------------------------------------------------------------- bytes
def leaf_bytes(leaf: Leaf, identity: str) -> bytearray:
    """Bytes that name ``identity``: every fourth one makes a float leaf start with a NaN of its own payload."""
    blob = bytearray()
    for block in range(-(-leaf.nbytes // 32)):
        blob += hashlib.blake2b(f"{leaf.key}/{identity}/{block}".encode(), digest_size=32).digest()
    del blob[leaf.nbytes :]
    if leaf.dtype == torch.bool:
        return bytearray(byte & 1 for byte in blob)
    size = leaf.dtype.itemsize
    if leaf.dtype.is_floating_point:
        kind = hashlib.blake2b(identity.encode(), digest_size=1).digest()[0] % 4
        if kind == 0:
            blob[size - 1] |= 0x7F  # an exponent of ones (a sign stays) ...
            blob[size - 2] |= 0xFC  # ... for 16, 32 and 64 bits alike
            blob[0] |= 1  # a mantissa that is not zero, quiet or signalling
        elif kind == 1:
            blob[-size:] = bytes(size)  # the last element is 0.0, its twin -0.0
    return blob


@dataclass(frozen=True)
class Observed:
    """What an environment showed: two observations are the same iff these are."""

    token: int
    twin: bool = False
    """The same, but for one bit of one key: values may compare equal (-0.0) or never (NaN), bits differ."""

    def bytes_of(self, schema: Schema, leaf: Leaf) -> bytes:
        blob = leaf_bytes(leaf, f"observed {self.token}")
        if self.twin and schema.observations[self.token % len(schema.observations)] == leaf:
            if leaf.dtype.is_floating_point and not any(blob[-leaf.dtype.itemsize :]):
                blob[-1] ^= 0x80
            else:
                blob[0] ^= 1
        return bytes(blob)


def reward_bytes(leaf: Leaf, serial: int) -> bytes:
    """A reward of its own per row; now and then infinite or NaN, which must not leak into other returns."""
    special = {5: math.inf, 9: math.nan}.get(serial % 13)
    value = torch.full(leaf.shape, 1.0 + serial if special is None else special, dtype=leaf.dtype)
    return value.numpy().tobytes()


# ------------------------------------------------------------------------------------------- programs
@dataclass(frozen=True)
class Config:
    """One storage."""

    schema: str = "small"
    capacity: int = 4
    num_streams: int = 1
    next_obs: str = "derive"
    layout_given: bool = True
    final_capacity: int | None = None
    kind: str = "plain"  # plain, shared, file, cuda


@dataclass(frozen=True)
class Run:
    """Steps of the streams ``first, first + 1, ...``, one string each.

    The first letter says how the run begins: ``-`` where the stream stands, ``/`` at a new observation (a reset
    nobody flagged), ``~`` at the twin of where it stands. The others are its steps: ``.`` plain, ``T`` terminated,
    ``X`` truncated, ``B`` both, ``D`` done only, ``t`` terminated only, ``r`` unflagged reset, ``z`` unflagged
    reset to the twin.
    """

    form: str  # td, bare, packed, packed_bare, extend, add
    streams: tuple[str, ...]
    first: int = 0


@dataclass(frozen=True)
class Empty:
    pass


@dataclass(frozen=True)
class EndStreams:
    first: int
    last: int


@dataclass(frozen=True)
class Save:
    how: str


@dataclass(frozen=True)
class Mark:
    pass


@dataclass(frozen=True)
class Rollback:
    pass


@dataclass(frozen=True)
class Reject:
    how: str


SAVES = (
    "storage.state_dict",
    "buffer.state_dict",
    "storage.dumps",
    "buffer.dumps",
    "storage.pickle",
    "buffer.pickle",
    "torch.save",
)
REJECTS = (
    "missing",
    "extra",
    "dtype",
    "shape",
    "width",
    "block",
    "truncated",
    "partial",
    "list",
    "names",
    "time only",
    "foreign",
)


def configs() -> st.SearchStrategy[Config]:
    return st.builds(
        Config,
        schema=st.sampled_from(sorted(SCHEMAS)),
        capacity=st.integers(2, 6),
        num_streams=st.integers(1, 4),
        layout_given=st.booleans(),
        final_capacity=st.sampled_from([None, None, 2, 3]),
        kind=st.sampled_from(["plain", "plain", "plain", "shared", "file"]),
    )


@st.composite
def runs(draw: st.DrawFn, config: Config) -> Run:
    form = draw(st.sampled_from(["td", "td", "bare", "packed", "packed_bare", "extend", "add"]))
    whole = form in ("extend", "add")
    first = 0 if whole else draw(st.integers(0, config.num_streams - 1))
    last = config.num_streams if whole else draw(st.integers(first + 1, config.num_streams))
    longest = draw(st.sampled_from([1, 2, 3, config.capacity, 2 * config.capacity + 3]))
    steps = 1 if form == "add" else draw(st.integers(1, longest))
    streams = []
    for _ in range(first, last):
        start = draw(st.sampled_from("---/~"))
        streams.append(start + "".join(draw(st.lists(st.sampled_from("....TXBDtrz"), min_size=steps, max_size=steps))))
    return Run(form, tuple(streams), first)


def operations(config: Config) -> st.SearchStrategy[Any]:
    blocks = st.tuples(st.integers(0, config.num_streams - 1), st.integers(1, config.num_streams)).map(
        lambda ends: EndStreams(min(ends), max(ends[1], ends[0] + 1))
    )
    return st.one_of(
        runs(config),
        runs(config),
        runs(config),
        runs(config),
        blocks,
        st.builds(Save, st.sampled_from(SAVES)),
        st.builds(Reject, st.sampled_from(REJECTS)),
        st.sampled_from([Empty(), Mark(), Rollback()]),
    )


@st.composite
def programs(draw: st.DrawFn) -> tuple[Config, list[Any]]:
    config = draw(configs())
    return config, draw(st.lists(operations(config), min_size=1, max_size=10))


# ------------------------------------------------------------------------------------------- machine
class Machine:
    """One storage and its reference, driven side by side. ``check`` holds after every operation."""

    GAMMA = 0.9

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.schema = SCHEMAS[config.schema]
        self.folder = folder
        self.serial = 0
        self.tokens = 0
        self.files = 0
        self.initialised = config.layout_given
        self.standing = [self._observe() for _ in range(config.num_streams)]
        self.reference = Reference(
            config.capacity,
            config.num_streams,
            next_obs=config.next_obs,
            next_keys=self.schema.next_keys,
            reward_dtype=self.schema.reward.dtype,
        )
        self.handles: list[tuple[Any, list[list[int]], int]] = []
        self.mark: tuple[Any, ...] | None = None
        self.filename = ""
        self.layout = data.RowLayout.from_tensordict(self._example(), next_obs=config.next_obs)
        self.storage = self._make_storage()
        self.buffer = self._make_buffer(self.storage)

    # ---------------------------------------------------------------- construction
    def _make_storage(self) -> Any:
        config = self.config
        kind: dict[str, Any] = {}
        final_capacity = config.final_capacity
        if config.kind != "plain":
            final_capacity = config.capacity + 1  # memory of several processes cannot grow: every row may own a final
        if config.kind == "shared":
            kind["shared"] = True
        if config.kind == "cuda":
            kind["device"] = "cuda"
        if config.kind == "file":
            self.filename = kind["filename"] = str(self._path("replay"))
        return data.SlotStorage(
            config.capacity,
            config.num_streams,
            layout=self.layout if config.layout_given else None,
            next_obs=config.next_obs,
            final_capacity=final_capacity,
            **kind,
        )

    def _make_buffer(self, storage: Any) -> Any:
        return data.SlotReplayBuffer(
            storage=storage,
            sampler=data.TransitionSampler(1, self.GAMMA),
            batch_size=8,
            generator=torch.Generator().manual_seed(7),
        )

    def _path(self, name: str) -> Path:
        self.files += 1
        return self.folder / f"{name}_{self.files}"

    def _observe(self) -> Observed:
        self.tokens += 1
        return Observed(self.tokens)

    # ---------------------------------------------------------------- data
    def _row(self, here: Observed, event: str, there: Observed) -> dict[Key, bytes]:
        schema = self.schema
        self.serial += 1
        row: dict[Key, bytes] = {}
        for leaf in schema.observations:
            row[leaf.key] = here.bytes_of(schema, leaf)
            row[("next", *leaf.key)] = there.bytes_of(schema, leaf)
        for leaf in schema.others:
            row[leaf.key] = bytes(leaf_bytes(leaf, f"row {self.serial}"))
        row[schema.reward.key] = reward_bytes(schema.reward, self.serial)
        raised = {
            DONE: event in "TXBD",
            TERMINATED: event in "TBt",
            TRUNCATED: event in "XB",
        }
        for leaf in schema.flags:
            row[leaf.key] = bytes([raised[leaf.key]])
        return row

    def _leaf(self, key: Key) -> Leaf:
        schema = self.schema
        for leaf in (*schema.observations, *schema.others, schema.reward, *schema.flags):
            if key in (leaf.key, ("next", *leaf.key)):
                return leaf
        raise KeyError(key)

    def _tensordict(self, rows: list[list[dict[Key, bytes]]], *, bare: bool) -> TensorDict:
        """[K, n], in another key order and another memory order every second time."""
        steps, width = len(rows), len(rows[0])
        keys = list(rows[0][0])
        if bare:
            keys = [key for key in keys if not (key[0] == "next" and key[1:] in self.schema.next_keys)]
        if self.serial % 2:
            keys.reverse()
        columns_first = self.serial % 3 == 0
        out: dict[Any, torch.Tensor] = {}
        for key in keys:
            leaf = self._leaf(key)
            if columns_first:
                blob = b"".join(rows[k][n][key] for n in range(width) for k in range(steps))
                value = torch.frombuffer(bytearray(blob), dtype=leaf.dtype).reshape(width, steps, *leaf.shape)
                out[key] = value.transpose(0, 1)
            else:
                blob = b"".join(rows[k][n][key] for k in range(steps) for n in range(width))
                out[key] = torch.frombuffer(bytearray(blob), dtype=leaf.dtype).reshape(steps, width, *leaf.shape)
        result = TensorDict({}, [steps, width])
        for key, value in out.items():
            result.set(key if len(key) > 1 else key[0], value)
        return result

    def _example(self) -> TensorDict:
        here, there = Observed(10**6), Observed(10**6 + 1)
        example = self._tensordict([[self._row(here, ".", there)]], bare=False)
        self.serial = 0
        return example

    def make_run(self, run: Run) -> tuple[TensorDict, list[Observed]]:
        """The run's data and where its streams stand afterwards."""
        bare = run.form in ("bare", "packed_bare") and self.config.next_obs == "derive"
        steps = len(run.streams[0]) - 1
        rows: list[list[dict[Key, bytes]]] = [[] for _ in range(steps)]
        standing = []
        for offset, letters in enumerate(run.streams):
            here = self.standing[run.first + offset]
            here = {"-": here, "/": self._observe(), "~": Observed(here.token, not here.twin)}[letters[0]]
            for k, letter in enumerate(letters[1:]):
                # Nothing in a run without successors tells of a reset, and only a terminated row may end there.
                event = {"r": ".", "z": ".", "X": "T", "B": "T", "D": "t"}.get(letter, letter) if bare else letter
                there = self._observe()
                rows[k].append(self._row(here, event, there))
                if event in "TXBDtr":
                    here = self._observe()
                else:
                    here = Observed(there.token, event == "z")
            standing.append(here)
        return self._tensordict(rows, bare=bare), standing

    # ---------------------------------------------------------------- operations
    def apply(self, op: Any) -> None:
        """Runs one operation on both sides, then checks everything."""
        getattr(self, f"_do_{type(op).__name__.lower()}")(op)
        self.check()

    def _do_run(self, run: Run) -> None:
        if not self.initialised and run.form not in ("td", "extend", "add"):
            run = replace(run, form="td")
        td, standing = self.make_run(run)
        steps, width = td.batch_size
        last = run.first + width
        streams = None if width == self.config.num_streams and self.serial % 2 else slice(run.first, last)
        one = self.config.num_streams == 1
        handle = index = None
        if run.form == "extend":
            index = self.buffer.extend(td[:, 0] if one and self.serial % 2 else td.transpose(0, 1))
        elif run.form == "add":
            self.buffer.add(td[0, 0] if one and self.serial % 2 else td[0])
        else:
            given = self.layout.pack(td) if run.form in ("packed", "packed_bare") else td
            if one and run.form in ("td", "bare") and self.serial % 2:
                given = td[:, 0]
            target = self.buffer if self.serial % 3 else self.storage
            handle = target.extend_batch(given, streams=streams)
        self.reference.extend_batch(td, streams=slice(run.first, last))
        self.initialised = True
        self.standing[run.first : last] = standing
        heads = [self.reference.streams[n].head for n in range(run.first, last)]
        kept = min(steps, self.config.capacity)
        if handle is not None:
            self._check_handle(handle, heads, kept, run.first)
        if index is not None:
            found = {tuple(pair) for pair in index.tolist()}
            capacity = self.config.capacity
            expected = {((h - 1 - k) % capacity, n) for n, h in enumerate(heads) for k in range(kept)}
            assert index.dtype == torch.int64, index.dtype
            assert found == expected, f"extend returned {sorted(found)}, wrote {sorted(expected)}"

    def _check_handle(self, handle: Any, heads: list[int], kept: int, first: int) -> None:
        index, generation = handle.index, handle.generation
        width = len(heads)
        assert index.dtype == generation.dtype == torch.int64
        assert tuple(index.shape) == (handle.num_steps, width, 2) and tuple(generation.shape) == index.shape[:2]
        assert (handle.first_step + handle.num_steps).tolist() == heads
        assert handle.num_steps >= kept
        slots, columns = index.unbind(-1)
        steps = (generation * self.config.capacity + slots).tolist()
        expected = [[head - handle.num_steps + k for head in heads] for k in range(handle.num_steps)]
        assert steps == expected, f"the handle names steps {steps}, written were {expected}"
        assert columns.tolist() == [list(range(first, first + width))] * handle.num_steps
        self.handles.append((handle, steps, first))

    def _do_endstreams(self, op: EndStreams) -> None:
        if not self.initialised:
            return
        whole = (op.first, op.last) == (0, self.config.num_streams)
        target = self.buffer if op.first % 2 else self.storage
        if whole and self.serial % 2:
            target.end_streams()
        else:
            target.end_streams(slice(op.first, op.last))
        self.reference.end_streams(slice(op.first, op.last))

    def _do_empty(self, op: Empty) -> None:
        self.buffer.empty()
        self.reference.empty()

    def _do_save(self, op: Save) -> None:
        """The loaded copy goes on in the place of the original; both must be equal to the last byte."""
        if not self.initialised:
            return
        before = state_bytes(self.storage.state_dict())
        old = self.buffer
        storage, buffer = self._reload(op.how)
        if buffer is None:
            buffer = self._make_buffer(storage)
        else:
            storage = buffer.storage
            assert state_bytes(buffer.state_dict()) == state_bytes(old.state_dict()), f"{op.how}: states differ"
        assert state_bytes(storage.state_dict()) == before, f"{op.how}: the loaded storage differs"
        self.storage, self.buffer = storage, buffer

    def _reload(self, how: str) -> tuple[Any, Any]:
        storage, buffer = self.storage, self.buffer
        if self.config.kind == "file" and how.endswith("pickle"):
            how = "reopen"
        if how == "reopen":
            return data.SlotStorage.open(self.filename), None
        if how == "storage.state_dict":
            state = copy.deepcopy(storage.state_dict())
            fresh = self._make_storage()
            fresh.load_state_dict(state)
            return fresh, None
        if how == "torch.save":
            file = io.BytesIO()
            torch.save(buffer.state_dict(), file)
            file.seek(0)
            fresh = self._make_buffer(self._make_storage())
            fresh.load_state_dict(torch.load(file, weights_only=True))
            return None, fresh
        if how == "buffer.state_dict":
            state = copy.deepcopy(buffer.state_dict())
            fresh = self._make_buffer(self._make_storage())
            fresh.load_state_dict(state)
            return None, fresh
        if how == "storage.dumps":
            path = self._path("dump")
            storage.dumps(path)
            fresh = self._make_storage()
            fresh.loads(path)
            return fresh, None
        if how == "buffer.dumps":
            path = self._path("dump")
            buffer.dumps(path)
            fresh = self._make_buffer(self._make_storage())
            fresh.loads(path)
            return None, fresh
        if how == "storage.pickle":
            return pickle.loads(pickle.dumps(storage)), None
        assert how == "buffer.pickle", how
        return None, pickle.loads(pickle.dumps(buffer))

    def _do_mark(self, op: Mark) -> None:
        if self.initialised:
            state = copy.deepcopy(self.storage.state_dict())
            self.mark = (state, self.reference.copy(), len(self.handles), list(self.standing))

    def _do_rollback(self, op: Rollback) -> None:
        """Loading an older state brings back all of it. Handles of the time in between name nothing any more."""
        if self.mark is None:
            return
        state, reference, handles, standing = self.mark
        self.storage.load_state_dict(copy.deepcopy(state))
        self.reference = reference.copy()
        del self.handles[handles:]
        self.standing = list(standing)

    def _do_reject(self, op: Reject) -> None:
        if not self.initialised:
            return
        letters = tuple("-.." for _ in range(self.config.num_streams))
        td, _ = self.make_run(Run("td", letters))
        call = self._bad_call(op.how, td)
        if call is None:
            return
        before = state_bytes(self.buffer.state_dict())
        with pytest.raises(REFUSED):
            call()
        assert state_bytes(self.buffer.state_dict()) == before, f"a rejected call ({op.how}) changed the state"

    def _bad_call(self, how: str, td: TensorDict) -> Callable[[], Any] | None:
        storage, buffer, streams = self.storage, self.buffer, self.config.num_streams
        if how == "missing":
            td.del_("action")
        elif how == "extra":
            td["surprise"] = torch.zeros(td.batch_size)
        elif how == "dtype":
            td["action"] = td["action"].to(torch.uint8)
        elif how == "shape":
            td["action"] = torch.stack([td["action"]] * 2, -1)
        elif how == "width":
            td = torch.cat([td, td[:, :1]], 1)
        elif how == "block":
            return lambda: storage.extend_batch(td, streams=slice(1, streams + 1))
        elif how == "truncated":
            if self.config.next_obs == "store":
                return None
            for key in self.schema.next_keys:
                td.del_(("next", *key))
            flag = self.schema.flags[-1 if len(self.schema.flags) == 3 else 0].key
            value = td[flag].clone()
            value[1, streams - 1] = True
            td[flag] = value
        elif how == "partial":
            if len(self.schema.next_keys) < 2:
                return None
            td.del_(("next", *self.schema.next_keys[-1]))
        elif how == "list":
            return lambda: storage.extend_batch([td, td])
        elif how == "names":
            td.names = ["env", "time"]
        elif how == "time only":
            if streams == 1:
                return None
            td = td[:, 0]
        elif how == "foreign":
            other = TensorDict({"alien": torch.zeros(2, streams)}, [2, streams])
            packed = data.RowLayout.from_tensordict(other).pack(other)
            return lambda: storage.extend_batch(packed)
        return lambda: (buffer if self.serial % 2 else storage).extend_batch(td)

    # ---------------------------------------------------------------- checks
    def check(self) -> None:
        """Live set, counts, generations, handles, stored bytes, samples: all as the reference says."""
        if not self.initialised:
            assert len(self.storage) == 0 and self.storage.write_count == 0
            return
        self._check_positions()
        self._check_stored_bytes()
        for n_steps in (1, 2, 3):
            self._check_samples(n_steps)
        assert self.storage.num_finals() == self.reference.num_finals(), "final entries leaked or were lost"

    def _check_positions(self) -> None:
        storage, reference, config = self.storage, self.reference, self.config
        lo, hi = storage.live_range()
        expected_lo, expected_hi = reference.live_range()
        assert storage.head.tolist() == expected_hi
        assert hi.tolist() == expected_hi
        assert [a if a < b else b for a, b in zip(lo.tolist(), expected_hi, strict=True)] == expected_lo
        assert len(storage) == len(self.buffer) == len(reference)
        assert storage.write_count == self.buffer.write_count == reference.write_count
        slots, streams = torch.meshgrid(torch.arange(config.capacity), torch.arange(config.num_streams), indexing="ij")
        cells = torch.stack([slots, streams], -1)
        generations = storage.generation_of(cells).tolist()
        for slot in range(config.capacity):
            expected = [reference.generation(slot, n) for n in range(config.num_streams)]
            assert generations[slot] == expected, f"slot {slot}: {generations[slot]}, not {expected}"
        flat = storage.ravel(cells)
        assert (flat == slots * config.num_streams + streams).all()
        assert (storage.unravel(flat) == cells).all()
        for handle, steps, first in self.handles:
            alive = (storage.generation_of(handle.index) == handle.generation).tolist()
            expected = [[reference.lives(first + n, step) for n, step in enumerate(row)] for row in steps]
            assert alive == expected, f"handle of steps {steps} from stream {first}: {alive}, not {expected}"

    def _check_stored_bytes(self) -> None:
        reference = self.reference
        live = list(reference.live())
        if not live:
            return
        index = torch.tensor([[step % self.config.capacity, n] for n, step in live])
        got = self.storage.get(index)
        assert tuple(got.batch_size) == (len(live),)
        rows = flat_rows(got)
        for (n, step), row in zip(live, rows, strict=True):
            record = reference.record(n, step)
            for key, blob in record.fields.items():
                assert row[key] == blob, f"stored {key} of step {step} of stream {n}"
            if record.successor is not None:
                for key, blob in record.successor.items():
                    assert row[("next", *key)] == blob, f"one-step successor {key} of step {step} of stream {n}"
        key = next(iter(self.schema.others)).key
        column = self.storage[key if len(key) > 1 else key[0]]
        assert tuple(column.shape[:2]) == (self.config.capacity, self.config.num_streams)
        for (n, step), row in zip(live, rows, strict=True):
            value = column[step % self.config.capacity, n]
            assert value.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes() == row[key]

    def _check_samples(self, n_steps: int) -> None:
        reference, buffer = self.reference, self.buffer
        buffer.set_sampler(data.TransitionSampler(n_steps, self.GAMMA))
        generator = torch.Generator().manual_seed(self.serial)
        buffer.set_rng(generator)
        sampleable = reference.sampleable()
        if not sampleable:
            with pytest.raises(RuntimeError):
                buffer.sample(4)
            return
        contiguous = bool((self.serial + n_steps) % 2)
        batch = 40 * len(sampleable)  # a row is missed with probability exp(-40)
        start = generator.get_state()
        sample = buffer.sample(batch, contiguous=contiguous)
        drawn = self._check_batch(sample, n_steps, batch)
        assert drawn == sampleable, f"n={n_steps}: drawn {sorted(drawn)}, sampleable {sorted(sampleable)}"
        first = flat_rows(sample)
        generator.set_state(start)
        again = buffer.sample(batch, contiguous=not contiguous)
        assert flat_rows(again) == first, "the same generator state drew another batch"

    def _check_batch(self, sample: TensorDict, n_steps: int, batch: int) -> set[tuple[int, int]]:
        reference = self.reference
        assert tuple(sample.batch_size) == (batch,)
        for name, dtype, shape in (
            ("index", torch.int64, (batch, 2)),
            ("index_generation", torch.int64, (batch,)),
            ("discount", torch.float32, (batch, 1)),
            ("steps_to_next_obs", torch.int64, (batch, 1)),
        ):
            assert sample[name].dtype == dtype and tuple(sample[name].shape) == shape, name
        assert tuple(sample[REWARD].shape) == (batch, *self.schema.reward.shape)
        rows = flat_rows(sample)
        index = sample["index"].tolist()
        generations = sample["index_generation"].tolist()
        rewards = sample[REWARD].double().reshape(batch, -1).tolist()
        used = sample["steps_to_next_obs"].flatten().tolist()
        discounts = sample["discount"].flatten().tolist()
        expected_keys = None
        cache: dict[tuple[int, int], tuple[bytes, ...]] = {}
        for i in range(batch):
            slot, n = index[i]
            step = generations[i] * self.config.capacity + slot
            name = f"step {step} of stream {n}, n={n_steps}"
            signature = tuple(rows[i][key] for key in sorted(rows[i]))
            if (n, step) in cache:
                assert cache[n, step] == signature, f"{name} was drawn twice and differs"
                continue
            cache[n, step] = signature
            assert (n, step) in reference.sampleable(), f"{name} is not sampleable"
            expected = reference.transition(n, step, n_steps, self.GAMMA)
            for key, blob in expected.fields.items():
                assert rows[i][key] == blob, f"{name}: {key}"
            for key, blob in expected.successor.items():
                assert rows[i][("next", *key)] == blob, f"{name}: successor {key}"
            for key, blob in expected.flags.items():
                assert rows[i][key] == blob, f"{name}: {key} of the last row used"
            assert used[i] == expected.steps, f"{name}: {used[i]} steps used, not {expected.steps}"
            assert discounts[i] == pytest.approx(expected.discount, rel=1e-6), f"{name}: discount"
            assert rewards[i] == pytest.approx(expected.reward, rel=1e-5, nan_ok=True), f"{name}: return"
            if expected_keys is None:
                expected_keys = {*expected.fields, *expected.flags, REWARD}
                expected_keys |= {("next", *key) for key in expected.successor}
                expected_keys |= {("index",), ("index_generation",), ("discount",), ("steps_to_next_obs",)}
                assert set(rows[i]) == expected_keys
        return set(cache)


def run_program(config: Config, ops: list[Any]) -> None:
    """Runs one program; every disagreement is an AssertionError that names row and field."""
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(config, Path(folder))
        for op in ops:
            machine.apply(op)


model = settings(
    max_examples=max(100, settings.default.max_examples),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


# ------------------------------------------------------------------------------------------- tests
class TestAnyProgramAgreesWithTheReference:
    """Contract: live set, ``len``, write count, handles, bytes, sampleable rows, successors, returns, steps used,
    flags and final entries are what the list model says, after every operation of any program; a rejected call
    changes no byte; the same generator state draws the same batch."""

    @model
    @given(program=programs())
    def test_deriving_storage_agrees_on_any_program(self, program):
        run_program(*program)

    @model
    @given(program=programs())
    def test_storage_of_both_copies_agrees_on_any_program(self, program):
        config, ops = program
        run_program(replace(config, next_obs="store"), ops)


class TestWrittenPrograms:
    """Programs worth naming: each one is a fault that a plausible implementation has."""

    @pytest.mark.parametrize("next_obs", ["derive", "store"])
    @pytest.mark.parametrize("schema", sorted(SCHEMAS))
    def test_one_run_of_every_event_over_two_streams(self, schema, next_obs):
        run_program(Config(schema, 6, 2, next_obs), [Run("td", ("-..T.X", "-BDtrz"))])

    @pytest.mark.parametrize("schema", sorted(SCHEMAS))
    def test_pending_successor_becomes_final_when_one_bit_differs(self, schema):
        twins = [Run("td", ("-.",)), Run("td", ("~.",)), Run("packed", ("~.",)), Run("add", ("~.",))]
        run_program(Config(schema, 6, 1), 4 * twins)

    def test_equal_nan_observations_continue_an_episode(self):
        run_program(Config("double", 5, 2), [Run("add", ("-.", "-."))] * 9)

    @pytest.mark.parametrize("form", ["td", "packed"])
    def test_final_entries_die_with_their_rows_over_many_laps(self, form):
        run_program(Config("small", 2, 2, final_capacity=2), [Run(form, ("-X.", "-TX"))] * 6)

    @pytest.mark.parametrize("form", ["td", "packed"])
    @pytest.mark.parametrize("gap", range(5))
    def test_entry_of_the_oldest_live_row_is_kept_when_the_table_is_full(self, form, gap):
        letters = "-" + "." * gap + "X."
        run_program(Config("small", 4, 1, final_capacity=2), [Run(form, ("-...X",)), Run(form, (letters,))])

    @pytest.mark.parametrize("form", ["td", "packed"])
    def test_streams_with_different_counts_of_finals_share_a_run(self, form):
        ops = [Run("td", ("-XX",), 0), Run("td", ("-X.X",), 2), Run(form, ("-X.X.", "-.XX.", "~XX.X"))]
        run_program(Config("small", 6, 3), ops)
        run_program(Config("small", 6, 3, final_capacity=7), ops)

    @pytest.mark.parametrize("schema", sorted(SCHEMAS))
    def test_bare_run_is_sampleable_up_to_its_newest_row_until_the_next_run(self, schema):
        run_program(Config(schema, 5, 2), [Run("bare", ("-...", "-.T.")), Run("packed_bare", ("-..", "-T."))])

    def test_successor_nobody_knows_is_a_hole_for_ever(self):
        ops = [Run("bare", ("-..", "-.."), 0), EndStreams(0, 1), Run("bare", ("/..", "-..")), Run("td", ("-.", "-."))]
        run_program(Config("small", 6, 2), ops)

    def test_pending_successor_of_a_cut_stream_stays_sampleable(self):
        run, end = Run("td", ("-..", "-..")), EndStreams(0, 2)
        run_program(Config("small", 6, 2), [run, EndStreams(1, 2), run, end, end, run])

    @pytest.mark.parametrize("steps", [3, 4, 8])
    def test_empty_on_and_off_a_lap_boundary_kills_every_handle(self, steps):
        letters = "-" + "." * steps
        run_program(Config("small", 4, 2), [Run("td", (letters, letters)), Empty(), Empty(), Run("td", ("-.", "-."))])

    def test_first_row_after_empty_follows_nothing(self):
        ops = [Run("bare", ("-..",)), Empty(), Run("bare", ("-..",)), Run("td", ("-..",)), Empty(), Run("td", ("/..",))]
        run_program(Config("small", 4, 1), ops)

    @pytest.mark.parametrize("form", ["td", "bare", "packed", "packed_bare", "extend"])
    def test_oversize_run_keeps_the_newest_rows_and_advances_all_steps(self, form):
        config = Config("mixed", 3, 2)
        ops = [Run("td", ("-.", "-.")), Run(form, ("-.T.....T.", "-r........")), Run("td", ("-.", "/."))]
        run_program(config, ops)

    def test_oversize_run_ends_with_flags(self):
        run_program(Config("small", 2, 1), [Run("td", ("-.X.XX",)), Run("td", ("-XXXX",)), Run("td", ("-.....X.",))])

    def test_column_blocks_advance_independently(self):
        ops = [
            Run("td", ("-...", "-..X"), 0),
            Run("packed", ("-.......",), 2),
            Run("bare", ("-..",), 1),
            Run("td", ("-.", "/."), 1),
            Run("packed", ("-X.X.",), 0),
        ]
        run_program(Config("mixed", 5, 3), ops)

    @pytest.mark.parametrize("how", [*SAVES, "reopen"])
    @pytest.mark.parametrize("next_obs", ["derive", "store"])
    def test_saved_and_loaded_copy_goes_on_in_place_of_the_original(self, how, next_obs):
        config = Config("mixed", 4, 2, next_obs, kind="file" if how == "reopen" else "plain")
        before = [Run("td", ("-.X..", "-..T.")), Run("td", ("/..",), 1), EndStreams(0, 1)]
        run_program(config, [*before, Save(how), Run("td", ("-..", "~.X")), Save(how), Run("extend", ("-..", "-.."))])

    def test_layout_of_the_first_run_is_restored_by_a_load(self):
        for how in SAVES:
            run_program(Config("mixed", 4, 2, layout_given=False), [Run("td", ("-.X.", "-..T")), Save(how)])

    def test_load_of_an_older_state_brings_back_all_of_it(self):
        later = [Run("td", ("/X.XX",)), Empty(), Rollback(), Run("td", ("-..",)), Rollback()]
        run_program(Config("small", 4, 1, final_capacity=2), [Run("td", ("-.X.",)), Mark(), *later])

    @pytest.mark.parametrize("how", REJECTS)
    @pytest.mark.parametrize("form", ["td", "packed"])
    def test_rejected_run_changes_no_byte(self, how, form):
        letters = ("-.X.", "-..T")
        run_program(Config("mixed", 4, 2), [Run(form, letters), Reject(how), Run(form, letters), Reject(how)])


class TestTheReferenceItself:
    """Contract of the model: numbers worked by hand."""

    @staticmethod
    def run(rewards: list[float], observations: list[int], followed: list[int] | None, **flags: list[int]) -> Any:
        count = len(rewards)
        out = TensorDict({"observation": torch.tensor(observations).float().reshape(count, 1, 1)}, [count, 1])
        if followed is not None:
            out["next", "observation"] = torch.tensor(followed).float().reshape(count, 1, 1)
        out["next", "reward"] = torch.tensor(rewards).reshape(count, 1, 1)
        for name in ("done", "terminated", "truncated"):
            raised = flags.get(name, [0] * count)
            out["next", name] = torch.tensor(raised, dtype=torch.bool).reshape(count, 1, 1)
        return out

    @staticmethod
    def value(transition: Any) -> float:
        return torch.frombuffer(bytearray(transition.successor["observation",]), dtype=torch.float32).item()

    def test_three_steps_without_an_end_return_5_23(self):
        """case 12"""
        reference = Reference(8, 1)
        reference.extend_batch(self.run([1.0, 2.0, 3.0], [0, 1, 2], [1, 2, 3]))
        got = reference.transition(0, 0, 3, 0.9)
        assert got.reward == pytest.approx([5.23]) and got.discount == pytest.approx(0.729)
        assert (got.steps, got.terminated, self.value(got)) == (3, False, 3.0)

    def test_truncation_at_the_second_step_returns_2_8_and_its_own_successor(self):
        """case 12"""
        reference = Reference(8, 1)
        reference.extend_batch(self.run([1.0, 2.0, 3.0], [0, 1, 50], [1, 2, 51], truncated=[0, 1, 0], done=[0, 1, 0]))
        got = reference.transition(0, 0, 3, 0.9)
        assert got.reward == pytest.approx([2.8]) and got.discount == pytest.approx(0.81)
        assert (got.steps, got.terminated, self.value(got)) == (2, False, 2.0)
        assert reference.num_finals() == 1

    def test_reset_nobody_flagged_ends_the_return_and_owns_a_final(self):
        reference = Reference(8, 1)
        reference.extend_batch(self.run([1.0, 2.0], [0, 50], [1, 51]))
        reference.extend_batch(self.run([3.0], [90], [91]))
        assert reference.num_finals() == 2
        assert [self.value(reference.transition(0, step, 3, 0.9)) for step in range(3)] == [1.0, 51.0, 91.0]

    def test_bare_run_waits_for_its_last_successor(self):
        reference = Reference(8, 1)
        reference.extend_batch(self.run([1.0, 2.0], [0, 1], None))
        assert reference.sampleable() == {(0, 0)}
        assert reference.transition(0, 0, 3, 0.9).steps == 1
        reference.extend_batch(self.run([3.0], [2], None))
        assert reference.sampleable() == {(0, 0), (0, 1)}
        reference.end_streams()
        reference.extend_batch(self.run([4.0], [70], [71]))
        assert reference.sampleable() == {(0, 0), (0, 1), (0, 3)}
        assert reference.transition(0, 1, 3, 0.9).steps == 1

    def test_lap_arithmetic_names_rows_and_empty_starts_the_next_lap(self):
        reference = Reference(4, 1)
        reference.extend_batch(self.run([0.0] * 6, list(range(6)), list(range(1, 7))))
        assert [reference.generation(slot, 0) for slot in range(4)] == [1, 1, 0, 0]
        assert (len(reference), reference.write_count) == (4, 6)
        reference.empty()
        assert (len(reference), reference.write_count, reference.streams[0].head) == (0, 0, 8)
        reference.empty()
        assert reference.streams[0].head == 8


# ------------------------------------------------------------------------------------------- statistics
def chi_square_limit(degrees: int, z: float = 4.75) -> float:
    """Upper 1e-6 quantile of the chi-square distribution (Wilson and Hilferty)."""
    spread = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - spread + z * math.sqrt(spread)) ** 3


def chi_square(counts: Counter, expected: dict[Any, float]) -> float:
    assert set(counts) <= set(expected), f"drawn but impossible: {set(counts) - set(expected)}"
    return sum((counts[cell] - mean) ** 2 / mean for cell, mean in expected.items())


def uneven(capacity: int = 16) -> tuple[Any, Reference]:
    """Five streams: 3 rows; wrapped; a hole of unknown successor; wrapped with episodes; nothing."""
    width = 5

    def run(stream: int, steps: int, bare: bool = False, **flags: list[int]) -> TensorDict:
        clock = torch.arange(steps).reshape(steps, 1, 1).float() + 100 * stream
        out = TensorDict({"observation": clock, ("next", "reward"): clock.clone()}, [steps, 1])
        if not bare:
            out["next", "observation"] = clock + 1
        for name in ("done", "terminated", "truncated"):
            raised = [int(k in flags.get(name, [])) for k in range(steps)]
            out["next", name] = torch.tensor(raised, dtype=torch.bool).reshape(steps, 1, 1)
        return out

    layout = data.RowLayout.from_tensordict(run(0, 1))
    storage = data.SlotStorage(capacity, width, layout=layout)
    reference = Reference(capacity, width)

    def write(stream: int, steps: int, **kwargs: Any) -> None:
        td = run(stream, steps, **kwargs)
        for side in (storage, reference):
            side.extend_batch(td, streams=slice(stream, stream + 1))

    write(0, 3)
    write(1, capacity + 5)
    write(2, 4, bare=True)
    for side in (storage, reference):
        side.end_streams(slice(2, 3))
    write(2, 5, bare=True)
    write(3, capacity + 1, truncated=[4, 9], terminated=[12], done=[4, 9, 12])
    assert len(reference.sampleable()) == 3 + capacity + 7 + capacity
    return storage, reference


class TestDraws:
    """Contract: every draw is uniform over the sampleable rows of all streams and independent of the others;
    without replacement each row comes exactly once per epoch; weights tilt streams, never rows of one stream."""

    DRAWS = 60_000

    def counts(self, buffer: Any, capacity: int = 16, batch: int = 500) -> tuple[Counter, torch.Tensor]:
        cells, flat = Counter(), []
        for _ in range(self.DRAWS // batch):
            sample = buffer.sample(batch)
            steps = sample["index_generation"] * capacity + sample["index"][:, 0]
            pairs = list(zip(sample["index"][:, 1].tolist(), steps.tolist(), strict=True))
            cells.update(pairs)
            flat.extend(pairs)
        return cells, flat

    def buffer(self, storage: Any, sampler: Any, **kwargs: Any) -> Any:
        generator = torch.Generator().manual_seed(2024)
        return data.SlotReplayBuffer(storage=storage, sampler=sampler, generator=generator, **kwargs)

    @pytest.mark.parametrize("n_steps", [1, 3])
    def test_draws_are_uniform_over_uneven_streams_with_a_hole(self, n_steps):
        storage, reference = uneven()
        cells, _ = self.counts(self.buffer(storage, data.TransitionSampler(n_steps, 0.9)))
        rows = reference.sampleable()
        expected = dict.fromkeys(rows, self.DRAWS / len(rows))
        assert chi_square(cells, expected) < chi_square_limit(len(rows) - 1)

    def test_draws_follow_each_other_independently(self):
        """A minibatch made of blocks of streams or slots would fill few of the pairs."""
        storage, reference = uneven()
        _, flat = self.counts(self.buffer(storage, data.TransitionSampler()))
        rows = sorted(reference.sampleable())
        group = {row: i % 6 for i, row in enumerate(rows)}
        size = Counter(group.values())
        pairs = Counter((group[a], group[b]) for a, b in zip(flat[::2], flat[1::2], strict=True))
        total = self.DRAWS // 2
        expected = {(a, b): total * size[a] * size[b] / len(rows) ** 2 for a in size for b in size}
        assert chi_square(pairs, expected) < chi_square_limit(len(expected) - 1)

    def test_stream_weights_tilt_streams_and_leave_rows_of_one_stream_equal(self):
        """Two full streams, so that a weight per stream and a weight per row say the same."""
        storage, reference = uneven()
        weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.0])
        cells, _ = self.counts(self.buffer(storage, data.TransitionSampler(stream_weights=weights)))
        share = {1: 0.75, 3: 0.25}
        expected = {(n, step): self.DRAWS * share[n] / 16 for n, step in reference.sampleable() if n in share}
        assert len(expected) == 32
        assert chi_square(cells, expected) < chi_square_limit(31)

    def test_equal_stream_weights_are_uniform_over_rows_of_equal_streams(self):
        storage, reference = uneven()
        weights = torch.tensor([0.0, 2.5, 0.0, 2.5, 0.0])
        cells, _ = self.counts(self.buffer(storage, data.TransitionSampler(3, 0.9, stream_weights=weights)))
        expected = {(n, step): self.DRAWS / 32 for n, step in reference.sampleable() if n in (1, 3)}
        assert chi_square(cells, expected) < chi_square_limit(31)

    def epoch(self, buffer: Any, batch: int, batches: int, capacity: int = 16) -> list[tuple[int, int]]:
        out = []
        for _ in range(batches):
            sample = buffer.sample(batch)
            steps = sample["index_generation"] * capacity + sample["index"][:, 0]
            out += zip(sample["index"][:, 1].tolist(), steps.tolist(), strict=True)
        return out

    def test_weight_of_a_stream_does_not_grow_with_its_rows(self):
        """Streams of 3 and 16 rows and equal weights share the draws; a stream without rows takes none."""
        storage, reference = uneven()
        weights = torch.tensor([1.0, 1.0, 0.0, 0.0, 5.0])
        cells, _ = self.counts(self.buffer(storage, data.TransitionSampler(stream_weights=weights)))
        rows = {0: 3, 1: 16}
        expected = {(n, step): self.DRAWS / 2 / rows[n] for n, step in reference.sampleable() if n in rows}
        assert chi_square(cells, expected) < chi_square_limit(len(expected) - 1)

    def test_stock_random_sampler_is_uniform_over_sampleable_rows(self):
        storage, reference = uneven()
        generator = torch.Generator().manual_seed(2024)
        parts = {"sampler": RandomSampler(), "writer": data.SlotWriter(), "generator": generator}
        buffer, cells = ReplayBuffer(storage=storage, batch_size=500, **parts), Counter()
        rows = reference.sampleable()
        expected = Counter()
        for n, step in rows:
            # Stream 2 counts anew after its cut, so that some of its rows show the same observation.
            expected[100 * n + (step - 4 if n == 2 and step >= 4 else step)] += self.DRAWS / len(rows)
        for _ in range(self.DRAWS // 500):
            sample = buffer.sample()
            assert torch.equal(sample["next", "observation"], sample["observation"] + 1)
            cells.update(map(int, sample["observation"].flatten().tolist()))
        assert chi_square(cells, expected) < chi_square_limit(len(expected) - 1)

    @pytest.mark.parametrize("n_steps", [1, 3])
    def test_each_row_comes_once_per_epoch_without_replacement(self, n_steps):
        storage, reference = uneven()
        rows = reference.sampleable()
        batch = 7
        assert len(rows) % batch == 0
        sampler = data.TransitionSampler(n_steps, 0.9, replacement=False)
        buffer = self.buffer(storage, sampler, batch_size=batch)
        epochs = [self.epoch(buffer, batch, len(rows) // batch) for _ in range(3)]
        for drawn in epochs:
            assert Counter(drawn) == Counter(rows)
        assert epochs[0] != epochs[1] != epochs[2], "epochs come in the same order"

    def test_first_epoch_is_complete_when_the_batch_does_not_divide_it(self):
        storage, reference = uneven()
        rows = reference.sampleable()
        batch = 8
        assert len(rows) % batch
        buffer = self.buffer(storage, data.TransitionSampler(replacement=False), batch_size=batch)
        drawn = self.epoch(buffer, batch, -(-len(rows) // batch))
        assert Counter(drawn[: len(rows)]) == Counter(rows)

    def test_dropping_the_last_batch_repeats_no_row_within_an_epoch(self):
        storage, reference = uneven()
        rows = reference.sampleable()
        batch = 8
        sampler = data.TransitionSampler(replacement=False, drop_last=True)
        buffer = self.buffer(storage, sampler, batch_size=batch)
        for _ in range(3):
            drawn = self.epoch(buffer, batch, len(rows) // batch)
            assert len(drawn) == len(set(drawn)) == len(rows) // batch * batch
            assert set(drawn) <= rows

    def test_same_seed_draws_the_same_epochs(self):
        epochs = []
        for _ in range(2):
            storage, _ = uneven()
            buffer = self.buffer(storage, data.TransitionSampler(replacement=False), batch_size=7)
            epochs.append(self.epoch(buffer, 7, 12))
        assert epochs[0] == epochs[1]


def test_rows_are_read_time_first():
    """The helper on which every byte comparison rests."""
    td = TensorDict({"a": torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)}, [2, 2])
    assert [[row["a",] for row in step] for step in rows_of(td)] == [[b"\x01", b"\x02"], [b"\x03", b"\x04"]]
    assert set(leaves(td)) == {("a",)}
