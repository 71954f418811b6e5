# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Write-back and routed writes against a slow reference model and against TorchRL, on arbitrary programs.

The machine of ``test_replay_model`` gets two more operations. Every byte is a function of the program, and what
hypothesis prints can be pasted into ``run_program``.

    pytest test/test_write_back_model.py                                        # CI: the same programs every time
    HYPOTHESIS_PROFILE=long pytest -o timeout=0 test/test_write_back_model.py   # thousands, others every time
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import test_replay_model as replay
import torch
from _reference import REWARD, Key, state_bytes
from _write_back_reference import REJECTED, STALE, SUPERSEDED, UPDATED, Handle, extend_routed, outcomes, update
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from test_replay_device import books_on_the_device
from test_replay_model import Config, Empty, EndStreams, Leaf, Mark, Observed, Rollback, Run, Save, Schema
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer, TensorDictRoundRobinWriter

from torchrl_ext import data

DEADLINE = 60.0
ENV: Key = ("env_index",)
VERSION: Key = ("meta", "version")


# ------------------------------------------------------------------------------------------- layouts
def _schema(name: str, *, stored_id: bool) -> Schema:
    return Schema(
        name,
        observations=(Leaf(("pixels",), torch.uint8, (2, 3)), Leaf(("clock",), torch.int64, ())),
        others=(
            Leaf(("latent", "z"), torch.float32, (2, 3)),
            Leaf(("latent", "half"), torch.bfloat16, (1,)),
            Leaf(VERSION, torch.int64, ()),
            Leaf(("known",), torch.bool, (3,)),
            Leaf(("action",), torch.int64, ()),
            *((Leaf(ENV, torch.int64, (1,)),) if stored_id else ()),
        ),
        reward=Leaf(REWARD, torch.float32, (1,)),
        flags=replay._flags("done", "terminated", "truncated", shape=(1,)),
    )


SCHEMAS = {"routed": _schema("routed", stored_id=True), "plain": _schema("plain", stored_id=False)}


# ------------------------------------------------------------------------------------------- operations
@dataclass(frozen=True)
class Routed:
    """Records of the streams named, in this order.

    ``letters[i]`` is what happens in record ``i``: ``.`` plain, ``T`` terminated, ``X`` truncated, ``r`` a reset
    that no flag announces behind it, ``/`` one before it.
    """

    streams: tuple[int, ...]
    letters: str
    bare: bool = False


@dataclass(frozen=True)
class At:
    """A handle: ``back`` steps behind the head of a stream, and what is wrong with it."""

    stream: int
    back: int
    wrong: str = ""


@dataclass(frozen=True)
class Update:
    """A patch of the fields ``keys`` (numbers, modulo the fields there are) for some handles."""

    handles: tuple[At, ...]
    keys: tuple[int, ...] = (0,)
    versions: tuple[int, ...] | int | None = None
    newer: bool = False
    submitted: bool = False
    form: str = "flat"


FORMS = ("flat", "grid", "grid with a flat patch", "slots", "tensordict")
WRONG = (
    "lap before",
    "lap after",
    "negative",
    "slot out",
    "slot below",
    "stream out",
    "stream below",
    "same flat number",
    "far away",
)


@st.composite
def routed_writes(draw: st.DrawFn, config: Config) -> Routed:
    size = draw(st.sampled_from([3, 2 * config.num_streams, 1, 2 * config.capacity + 3]))
    among = draw(st.lists(st.integers(0, config.num_streams - 1), min_size=1, max_size=config.num_streams))
    streams = draw(st.lists(st.sampled_from(among), min_size=size, max_size=size))
    letters = draw(st.lists(st.sampled_from("....TXr/"), min_size=size, max_size=size))
    return Routed(tuple(streams), "".join(letters), draw(st.sampled_from([False, False, True])))


@st.composite
def updates(draw: st.DrawFn, config: Config) -> Update:
    # Few rows, so that records of one update meet: mostly of the newest steps, and a few of older laps.
    back = st.one_of(*[st.integers(0, 1)] * 6, st.integers(0, 3 * config.capacity))
    rows = draw(st.lists(st.tuples(st.integers(0, config.num_streams - 1), back), min_size=1, max_size=4))
    wrong = st.sampled_from(("",) * 6 * len(WRONG) + WRONG)
    handle = st.builds(lambda row, wrong: At(*row, wrong), st.sampled_from(rows), wrong)
    handles = draw(st.lists(handle, min_size=draw(st.sampled_from([0, 1, 4, 6])), max_size=8))
    each = st.lists(st.integers(0, 5), min_size=len(handles), max_size=len(handles)).map(tuple)
    return Update(
        tuple(handles),
        tuple(draw(st.lists(st.integers(0, 20), min_size=1, max_size=4, unique=True))),
        draw(st.one_of(st.none(), each, each, st.integers(0, 5))),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from(FORMS)),
    )


@st.composite
def programs(draw: st.DrawFn) -> tuple[Config, list[Any]]:
    """Something is written first, and two of three operations are updates."""
    config = replace(draw(replay.configs()), schema=draw(st.sampled_from(sorted(SCHEMAS))))
    others = st.one_of(*[routed_writes(config)] * 6, replay.operations(config))
    first = draw(st.integers(1, config.capacity + 2))
    ops: list[Any] = [Run("td", ("-" + "." * first,) * config.num_streams)]
    for _ in range(draw(st.integers(1, 4))):
        ops += [draw(updates(config)), draw(others), draw(updates(config))]
    return config, ops


# ------------------------------------------------------------------------------------------- machine
class Machine(replay.Machine):
    """The machine of the replay model with write-back and routed writes."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.first_stream = 0
        # An inferred layout has the routing key, whatever the schema says.
        if not config.layout_given:
            config = replace(config, schema="routed")
        with mock.patch.dict(replay.SCHEMAS, SCHEMAS):
            super().__init__(config, folder)
        self.stores_id = config.schema == "routed"

    def _make_buffer(self, storage: Any) -> Any:
        return data.SlotReplayBuffer(
            storage=storage,
            sampler=data.TransitionSampler(1, self.GAMMA),
            batch_size=8,
            generator=torch.Generator().manual_seed(7),
            routing_key=ENV,
        )

    # ---------------------------------------------------------------- data
    def _row(self, here: Observed, event: str, there: Observed) -> dict[Key, bytes]:
        row = super()._row(here, event, there)
        row[VERSION] = (self.serial % 4).to_bytes(8, "little")
        return row

    def make_run(self, run: Run) -> tuple[TensorDict, list[Observed]]:
        self.first_stream = run.first
        return super().make_run(run)

    def _tensordict(self, rows: list[list[dict[Key, bytes]]], *, bare: bool) -> TensorDict:
        if any(leaf.key == ENV for leaf in self.schema.others):
            for step in rows:
                for column, row in enumerate(step):
                    row[ENV] = (self.first_stream + column).to_bytes(8, "little")
        return super()._tensordict(rows, bare=bare)

    # ---------------------------------------------------------------- stock operations under a routing key
    def _do_run(self, run: Run) -> None:
        # With a routing key extend and add mean records; those are what Routed is for.
        super()._do_run(replace(run, form="td") if run.form in ("extend", "add") else run)

    # ---------------------------------------------------------------- routed writes
    def _do_routed(self, op: Routed) -> None:
        bare = op.bare and self.config.next_obs == "derive" and self.initialised
        rows = []
        for stream, letter in zip(op.streams, op.letters, strict=True):
            if letter == "/":
                self.standing[stream] = self._observe()
            event = "T" if bare and letter == "X" else "." if letter in "/r" else letter
            there = self._observe()
            rows.append(self._row(self.standing[stream], event, there))
            reset = event in "TX" or (letter == "r" and not bare)
            self.standing[stream] = self._observe() if reset else there
        records = self._tensordict([[row] for row in rows], bare=bare)[:, 0].clone()
        records[ENV[0]] = torch.tensor(op.streams).unsqueeze(-1)
        index = self._write_records(records)
        if not self.stores_id:
            records.del_(ENV[0])
        wanted = extend_routed(self.reference, records, op.streams)
        self.initialised = True
        assert index.dtype == torch.int64
        assert [tuple(row) for row in index.tolist()] == wanted

    def _write_records(self, records: TensorDict) -> torch.Tensor:
        """In the form whose turn it is: shaped, with ids of another size, or one alone."""
        count, given = len(records), records.clone()
        if not self.stores_id and self.serial % 3 == 0:
            given[ENV[0]] = given[ENV[0]].squeeze(-1).int()
        given = given.to(self.storage.device)
        if count == 1 and self.serial % 2:
            return self.buffer.add(given[0]).reshape(1, 2)
        if count % 2 == 0 and self.serial % 2:
            given = given.reshape(2, count // 2)
        return self.buffer.extend(given)

    # ---------------------------------------------------------------- updates
    def _handle(self, at: At) -> Handle:
        capacity, width = self.config.capacity, self.config.num_streams
        step = self.reference.streams[at.stream].head - 1 - at.back
        slot, lap = step % capacity, step // capacity
        return {
            "": (slot, at.stream, lap),
            "lap before": (slot, at.stream, lap - 1),
            "lap after": (slot, at.stream, lap + 1),
            "negative": (slot, at.stream, -1 - at.back),
            "slot out": (slot + capacity, at.stream, lap),
            "slot below": (slot - capacity, at.stream, lap),
            "stream out": (slot, at.stream + width, lap),
            "stream below": (slot, at.stream - width, lap),
            "same flat number": (slot - 1, at.stream + width, lap),
            "far away": (slot + 2**40, at.stream, lap + 2**61),
        }[at.wrong]

    def _patchable(self) -> list[Leaf]:
        leaves = [*self.schema.others, *self.schema.observations, self.schema.reward, *self.schema.flags]
        if self.config.next_obs == "store":
            leaves += [replace(leaf, key=("next", *leaf.key)) for leaf in self.schema.observations]
        return leaves

    def _patch_bytes(self, leaf: Leaf, record: int) -> bytes:
        if leaf.key == VERSION:
            return (self.serial % 4).to_bytes(8, "little")
        if leaf.key == REWARD:
            return replay.reward_bytes(leaf, self.serial + record)
        return bytes(replay.leaf_bytes(leaf, f"patch {self.serial} of record {record}"))

    def _do_update(self, op: Update) -> None:
        if not self.initialised:
            return
        self.serial += 1
        handles, count = [self._handle(at) for at in op.handles], len(op.handles)
        choice = [leaf for leaf in self._patchable() if op.versions is None or leaf.key != VERSION]
        chosen = {leaf.key: leaf for leaf in (choice[k % len(choice)] for k in op.keys)}
        patch = [{key: self._patch_bytes(leaf, i) for key, leaf in chosen.items()} for i in range(count)]
        lead = (2, count // 2) if op.form.startswith("grid") and count % 2 == 0 else (count,)
        given = self._inputs(op.form, lead, handles, chosen, patch)
        versions = None
        if op.versions is not None:
            alone = isinstance(op.versions, int)
            versions = [op.versions] * count if alone else list(op.versions)
            version = op.versions if alone else torch.tensor(versions, dtype=torch.int64).reshape(lead)
            given |= {"version_key": VERSION, "version": version, "require_newer": op.newer}
            patch = [{**row, VERSION: v.to_bytes(8, "little")} for row, v in zip(patch, versions, strict=True)]
        if op.submitted:
            result = self.buffer.submit_update_if_present(**given).result(timeout=DEADLINE)
        else:
            result = self.buffer.update_if_present(**given)
        wanted = update(
            self.reference,
            handles,
            patch,
            version_key=None if versions is None else VERSION,
            versions=versions,
            require_newer=op.newer,
        )
        assert tuple(result.updated.shape) == lead
        assert words(result, versioned=versions is not None) == wanted, f"handles {handles}"

    def _inputs(
        self,
        form: str,
        lead: tuple[int, ...],
        handles: list[Handle],
        chosen: dict[Key, Leaf],
        patch: list[dict[Key, bytes]],
    ) -> dict[str, Any]:
        count, device = len(handles), self.storage.device
        values: dict[Any, torch.Tensor] = {}
        for key, leaf in chosen.items():
            blob = bytearray(b"".join(row[key] for row in patch))
            value = torch.frombuffer(blob, dtype=leaf.dtype) if blob else torch.empty(0, dtype=leaf.dtype)
            batch = (count,) if form == "grid with a flat patch" else lead
            values[key if len(key) > 1 else key[0]] = value.reshape(*batch, *leaf.shape).to(device)
        index = torch.tensor([row[:2] for row in handles], dtype=torch.int64).reshape(*lead, 2)
        if form == "slots" and self.config.num_streams == 1 and not index[..., 1].any():
            index = index[..., 0]
        return {
            "index": index.to(device),
            "generation": torch.tensor([row[2] for row in handles], dtype=torch.int64).reshape(lead).to(device),
            "patch": TensorDict(values, lead) if form == "tensordict" else values,
        }

    # ---------------------------------------------------------------- checks
    def check(self) -> None:
        if not self.initialised:
            return super().check()
        self._check_positions()
        self._check_stored_bytes()
        # Samples take longest to compare and say little more than the bytes do.
        self._check_samples(1 if self.serial % 3 else 3)
        assert self.storage.num_finals() == self.reference.num_finals(), "final entries leaked or were lost"
        return None


def words(result: Any, *, versioned: bool) -> list[str]:
    """What became of each record, after checking that the masks partition them."""
    masks = {UPDATED: result.updated, SUPERSEDED: result.superseded, STALE: result.stale}
    assert (result.version_rejected is not None) == versioned
    if versioned:
        masks[REJECTED] = result.version_rejected
    rows = list(zip(*(mask.reshape(-1).tolist() for mask in masks.values()), strict=True))
    assert all(sum(row) == 1 for row in rows), rows
    return [list(masks)[row.index(True)] for row in rows]


def run_program(config: Config, ops: list[Any]) -> None:
    """Runs one program; every disagreement is an AssertionError."""
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(config, Path(folder))
        for op in ops:
            machine.apply(op)


def on_host_memory(config: Config) -> Config:
    """As a CUDA storage, whose side table cannot grow."""
    return replace(config, kind="plain", final_capacity=config.capacity + 1)


model = settings(
    # A program takes a tenth of a second: CI searches little here, and TestWrittenPrograms is for it.
    max_examples=settings.default.max_examples if settings.default.max_examples > 100 else 30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


# ------------------------------------------------------------------------------------------- tests
class TestAnyProgramAgreesWithTheReference:
    """Contract: after any program of writes, routed writes, updates, cuts, emptying, saving and loading, the storage is
    what the list model says, and every update reports what the model says of each of its records."""

    @model
    @given(program=programs())
    def test_deriving_storage_agrees_on_any_program(self, program):
        run_program(*program)

    @model
    @given(program=programs())
    def test_storage_of_both_copies_agrees_on_any_program(self, program):
        config, ops = program
        run_program(replace(config, next_obs="store"), ops)

    @model
    @given(program=programs())
    def test_masks_agree_with_the_reference_on_any_program(self, program):
        """The bookkeeping of CUDA storages, on host memory."""
        config, ops = program
        with books_on_the_device():
            run_program(on_host_memory(config), ops)

    @pytest.mark.gpu
    @pytest.mark.timeout(600)
    @model
    @given(program=programs())
    def test_cuda_agrees_with_the_reference_on_any_program(self, program):
        config, ops = program
        run_program(replace(config, kind="cuda", final_capacity=config.capacity + 1), ops)


def handles(*backs: int, stream: int = 0, wrong: str = "") -> tuple[At, ...]:
    return tuple(At(stream, back, wrong) for back in backs)


class TestWrittenPrograms:
    """Programs worth naming: each one is a fault that a plausible implementation has."""

    FULL = Run("td", ("-..X..", "-.T..."))

    @pytest.fixture(params=["host", "books on the device"], autouse=True)
    def books(self, request):
        if request.param == "host":
            yield
        else:
            with books_on_the_device():
                yield

    @staticmethod
    def config(**kwargs: Any) -> Config:
        return on_host_memory(Config("routed", 5, 2, **kwargs))

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("submitted", [False, True])
    @pytest.mark.parametrize("next_obs", ["derive", "store"])
    def test_every_field_of_every_row(self, next_obs, submitted, form):
        everything = tuple(range(20))
        rows = (*handles(*range(5)), *handles(*range(5), stream=1))
        ops = [self.FULL, Update(rows, everything, submitted=submitted, form=form), self.FULL]
        run_program(self.config(next_obs=next_obs), [*ops, Update(rows, everything, 3, form=form), Empty(), self.FULL])

    @pytest.mark.parametrize("wrong", ["", *WRONG])
    @pytest.mark.parametrize("versions", [None, (5, 5, 5, 5)])
    def test_wrong_handle_among_duplicates(self, wrong, versions):
        rows = (At(0, 1), At(0, 1, wrong), At(0, 1), At(0, 1, wrong))
        run_program(
            self.config(), [self.FULL, Update(rows, (0, 1, 2), versions), Update(rows, (0,), versions, newer=True)]
        )

    def test_handles_of_all_laps_together(self):
        rows = tuple(At(n, back) for back in range(17, -1, -1) for n in (0, 1))
        run_program(self.config(), [self.FULL, self.FULL, self.FULL, Update(rows, (0, 3)), Update(rows, (0,), 9)])

    def test_versions_in_every_order(self):
        rows = handles(0, 1, 0, 1, 0, 1, 2)
        for versions in ((1, 2, 3, 4, 5, 5, 0), (5, 5, 4, 3, 2, 1, 0), (3, 3, 3, 3, 3, 3, 3), (4, 0, 0, 4, 4, 0, 5)):
            for newer in (False, True):
                step = Update(rows, (0, 1), versions, newer)
                run_program(self.config(), [self.FULL, step, step, Update(rows, (2,), versions, not newer)])

    @pytest.mark.parametrize("next_obs", ["derive", "store"])
    def test_patched_observation_at_every_place_of_an_episode(self, next_obs):
        """Before an end, at it, behind it, the newest row, and what the next write then makes of it."""
        observations = tuple(range(7))  # others are six: fields beyond them are observations and flags
        for back in (0, 2, 4):
            for again in (
                Run("td", ("-..", "-..")),
                Run("td", ("/.", "~.")),
                Run("bare", ("-.", "-.")),
                EndStreams(0, 2),
            ):
                patch = Update((At(0, back), At(1, back)), (*observations, 7, 8, 12, 13))
                run_program(self.config(next_obs=next_obs), [self.FULL, patch, again, self.FULL])

    def test_patched_row_that_ended_without_a_final_observation_is_its_own_successor(self):
        ops = [Run("bare", ("-.T.", "-T..")), Update((*handles(0, 1, 2), *handles(0, 1, 2, stream=1)), (6, 7, 8))]
        run_program(self.config(), [*ops, Run("bare", ("-..", "-T."))])

    @pytest.mark.parametrize("how", replay.SAVES)
    def test_patched_rows_are_saved_and_handles_keep_their_meaning(self, how):
        ops = [self.FULL, Update(handles(0, 1, 2), (0, 1, 6, 7), 5), Save(how), self.FULL]
        run_program(self.config(), [*ops, Update(handles(*range(9)), (0, 1), 4), Save(how), Routed((0, 1, 1), "..T")])

    def test_older_state_brings_back_unpatched_rows(self):
        ops = [self.FULL, Mark(), Update(handles(0, 1, 2), (0, 6)), self.FULL, Rollback()]
        run_program(self.config(), [*ops, Update(handles(0, 1, 2), (0, 6), 1), self.FULL])

    @pytest.mark.parametrize("next_obs", ["derive", "store"])
    def test_updates_between_routed_writes(self, next_obs):
        patch = Update((*handles(0, 1, 5), *handles(0, 1, 5, stream=1)), (0, 2, 6, 7, 8))
        ops = [
            Routed((0, 1, 1, 0, 0), "..rT."),
            patch,
            Routed((1, 1, 0), "/.X"),
            patch,
            Routed((0,) * 13, "..T..X..r...."),
        ]
        run_program(self.config(next_obs=next_obs), [*ops, patch, Routed((1,), "."), patch, EndStreams(0, 1), *ops])

    @pytest.mark.parametrize("schema", sorted(SCHEMAS))
    def test_inferred_layout_of_a_routed_write(self, schema):
        for layout_given in (False, True):
            config = replace(self.config(), schema=schema, layout_given=layout_given)
            run_program(config, [Routed((1, 0, 1), "..."), Run("td", ("-.", "-.")), Update(handles(0, 1), (0,))])


# ------------------------------------------------------------------------------------------- against TorchRL
class Pick(NamedTuple):
    """A handle ever given out, ``back`` of them ago; with a negative generation when ``negative``."""

    back: int
    negative: bool


class Against(NamedTuple):
    """One update of both buffers."""

    picks: list[Pick]
    versions: list[int] | None
    alone: bool
    newer: bool


def torchrl_programs() -> st.SearchStrategy[tuple[int, list[Any]]]:
    pick = st.builds(Pick, st.one_of(st.integers(0, 4), st.integers(0, 30)), st.sampled_from([False] * 7 + [True]))

    def versioned(picks: list[Pick]) -> st.SearchStrategy[Against]:
        versions = st.lists(st.integers(0, 5), min_size=len(picks), max_size=len(picks))
        return st.builds(Against, st.just(picks), st.one_of(st.none(), versions), st.booleans(), st.booleans())

    against = st.lists(pick, min_size=1, max_size=8).flatmap(versioned)
    ops = st.lists(st.one_of(st.integers(1, 3), against, against, st.just("empty")), min_size=2, max_size=10)
    return st.tuples(st.integers(2, 6), ops)


class Twins:
    """Our buffer, TorchRL's, and what both should hold as a dictionary."""

    KEYS = ("a", ("nested", "b"), ("nested", "deep", "c"), ("nested", "v"))

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.ours = data.SlotReplayBuffer(storage=data.SlotStorage(capacity), batch_size=4)
        self.theirs = TensorDictReplayBuffer(
            storage=LazyTensorStorage(capacity), writer=TensorDictRoundRobinWriter(track_generations=True), batch_size=4
        )
        self.written = self.number = 0
        self.handles: list[dict[str, Any]] = []
        self.rows: dict[int, dict[str, Any]] = {}  # slot -> what lives there

    def numbers(self, count: int) -> dict[Any, torch.Tensor]:
        clock = torch.arange(self.number, self.number + count)
        self.number += count
        return {
            "a": clock.float().unsqueeze(-1).repeat(1, 3),
            ("nested", "b"): clock,
            ("nested", "deep", "c"): clock[:, None, None].double().repeat(1, 2, 2),
        }

    def write(self, count: int) -> None:
        for start in range(0, count, self.capacity):
            size = min(self.capacity, count - start)
            values = {**self.numbers(size), ("nested", "v"): torch.arange(size) % 3}
            handle = self.ours.extend_batch(TensorDict(values, [size]))
            index = self.theirs.extend(TensorDict(values, [size]))
            generation = self.theirs.writer.generations_of(index)
            for i in range(size):
                slot = int(handle.index[i, 0, 0])
                record = {"id": self.written, "slot": slot, "index": index[i], "their": generation[i]}
                self.rows[slot] = {"id": self.written, **{key: value[i].clone() for key, value in values.items()}}
                self.handles.append({**record, "our": handle.generation[i, 0]})
                self.written += 1

    def empty(self) -> None:
        self.ours.empty()
        self.theirs.empty()
        self.rows.clear()

    def update(self, op: Against) -> None:
        if not self.handles:
            return
        chosen = [(self.handles[-1 - pick.back % len(self.handles)], pick.negative) for pick in op.picks]
        count = len(chosen)
        patch = self.numbers(count)
        more: dict[str, Any] = {}
        versions = None
        if op.versions is not None:
            versions = [op.versions[0]] * count if op.alone else op.versions
            given = versions[0] if op.alone else torch.tensor(versions)
            more = {"version_key": ("nested", "v"), "version": given, "require_newer": op.newer}
        ours = self.ours.update_if_present(
            index=torch.tensor([[h["slot"], 0] for h, _ in chosen]),
            generation=torch.stack([-1 - h["our"] if negative else h["our"] for h, negative in chosen]),
            patch=patch,
            **more,
        )
        theirs = self.theirs.update_if_present(
            index=torch.stack([h["index"] for h, _ in chosen]),
            generation=torch.stack([-1 - h["their"] if negative else h["their"] for h, negative in chosen]),
            patch=patch,
            **more,
        )
        live = [self.rows.get(h["slot"], {"id": -1})["id"] == h["id"] and not negative for h, negative in chosen]
        slots = [h["slot"] for h, _ in chosen]
        wanted = outcomes(
            live, slots, versions, lambda slot: int(self.rows[slot]["nested", "v"]), require_newer=op.newer
        )
        assert words(ours, versioned=versions is not None) == wanted
        if versions is None:
            assert torch.equal(ours.updated | ours.superseded, theirs.updated)
        else:
            assert torch.equal(ours.updated, theirs.updated)
            assert torch.equal(ours.version_rejected, theirs.version_rejected)
        assert ours.stale_count == theirs.stale_count
        for i, word in enumerate(wanted):
            if word == UPDATED:
                self.rows[slots[i]].update({key: value[i].clone() for key, value in patch.items()})
                if versions is not None:
                    self.rows[slots[i]]["nested", "v"] = torch.tensor(versions[i])
        self.check(theirs_too=SUPERSEDED not in wanted)

    def check(self, *, theirs_too: bool = True) -> None:
        for key in self.KEYS:
            for slot, row in self.rows.items():
                assert torch.equal(self.ours.storage[key][slot, 0], row[key]), f"ours: {key} of slot {slot}"
                their = self.theirs._storage._storage.get(key)[slot]
                if theirs_too:
                    assert torch.equal(their, row[key]), f"TorchRL's: {key} of slot {slot}"
                else:
                    their.copy_(row[key])  # which duplicate won there is undefined


differential = settings(
    max_examples=max(300, 2 * settings.default.max_examples if settings.default.max_examples > 100 else 0),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


class TestAgainstTorchRL:
    """Contract: one stream of ours and TorchRL's round-robin buffer report the same handles as updated and rejected,
    and hold the same (where TorchRL defines it: without live duplicates, or with versions)."""

    @differential
    @given(program=torchrl_programs())
    def test_same_masks_and_the_same_content(self, program):
        capacity, ops = program
        twins = Twins(capacity)
        twins.write(1)
        for op in ops:
            if op == "empty":
                twins.empty()
                twins.write(1)  # TorchRL has no layout before
            elif isinstance(op, int):
                twins.write(op)
            else:
                twins.update(op)
            twins.check()

    def test_thousand_records_in_a_hundred_updates(self):
        generator = torch.Generator().manual_seed(0)
        twins, seen = Twins(64), Counter()
        twins.write(64)
        for turn in range(100):
            count = 40
            picks = [Pick(int(back), False) for back in torch.randint(0, 150, (count,), generator=generator)]
            versions = torch.randint(0, 2 + turn, (count,), generator=generator).tolist() if turn % 2 else None
            twins.update(Against(picks, versions, False, turn % 4 == 1))
            seen["updates"] += 1
            twins.write(1 + turn % 9)
        assert seen["updates"] == 100


def test_the_model_itself_knows_winners_and_losers():
    """Numbers worked by hand."""
    live, rows = [True, False, True, True], ["a", "a", "a", "b"]
    assert outcomes(live, rows) == [SUPERSEDED, STALE, UPDATED, UPDATED]
    stored = {"a": 2, "b": 2}.get
    assert outcomes(live, rows, [3, 9, 3, 2], stored) == [REJECTED, STALE, UPDATED, UPDATED]
    assert outcomes(live, rows, [4, 9, 3, 2], stored, require_newer=True) == [UPDATED, STALE, REJECTED, REJECTED]
    assert outcomes(live, rows, [1, 9, 0, 3], stored) == [REJECTED, STALE, REJECTED, UPDATED]


def test_state_of_the_machine_is_compared_by_bytes():
    """The helper on which every comparison of a save rests."""
    assert state_bytes({"x": torch.tensor([0.0])}) != state_bytes({"x": torch.tensor([-0.0])})
