# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Bad input to the replay core: every error says where, what must hold, what came and what is unchanged, and the
state is the same to the last byte before and after."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from _reference import flat_rows, state_bytes
from tensordict import NonTensorData, TensorDict

from torchrl_ext.data import (
    PackedRun,
    PrioritizedTransitionSampler,
    RowLayout,
    SequenceSampler,
    SlotReplayBuffer,
    SlotStorage,
    TransitionSampler,
    sizing,
)
from torchrl_ext.data._block import NEWEST

FLAGS = ("done", "terminated", "truncated")
CAPACITY, STREAMS = 5, 3
UNCHANGED = r"(?i)(nothing (was|is|has been|changed)|unchanged|no byte|not changed|as (it|they) (was|were))"


def make_run(steps: int = 2, streams: int = STREAMS, first: int = 0) -> TensorDict:
    """[steps, streams]; step t of stream n is ``100 n + t`` everywhere."""
    clock = torch.arange(first, first + steps).reshape(-1, 1, 1) + 100 * torch.arange(streams).reshape(1, -1, 1)
    run = TensorDict({"observation": clock.float().expand(-1, -1, 4).clone()}, [steps, streams])
    run["agents"] = TensorDict({"state": clock.double()}, [steps, streams])
    run["action"] = clock.float().expand(-1, -1, 2).clone()
    run["next"] = TensorDict(
        {"observation": run["observation"] + 1, "agents": {"state": run["agents", "state"] + 1}}, [steps, streams]
    )
    run["next", "reward"] = clock.float()
    for name in FLAGS:
        run["next", name] = torch.zeros(steps, streams, 1, dtype=torch.bool)
    return run


def bare(run: TensorDict) -> TensorDict:
    """The run without its next observations."""
    return run.exclude(("next", "observation"), ("next", "agents", "state"), ("next", "agents"))


def make_buffer(n_steps: int = 1, filled: int = 7, **kwargs: Any) -> SlotReplayBuffer:
    buffer = SlotReplayBuffer(
        storage=SlotStorage(CAPACITY, STREAMS, **kwargs),
        sampler=TransitionSampler(n_steps, 0.9),
        batch_size=8,
        generator=torch.Generator().manual_seed(0),
    )
    for t in range(filled):
        run = make_run(1, first=t)
        run["next", "truncated"][:, t % STREAMS] = t % 4 == 3
        buffer.extend_batch(run)
    return buffer


def refused(
    call: Callable[[], Any],
    state: Callable[[], Any],
    error: type[BaseException] | tuple[type[BaseException], ...],
    *says: str,
    unchanged: bool = True,
) -> str:
    """Makes a bad call; it must raise, say all of ``says`` (patterns) and leave ``state()`` as it was."""
    before = state_bytes(state())
    with pytest.raises(error) as caught:
        call()
    assert state_bytes(state()) == before, "a refused call changed the state"
    message = " ".join(map(str, caught.value.args))
    for pattern in says:
        assert re.search(pattern, message), f"the error must say {pattern!r}, it says: {message}"
    if unchanged:
        assert re.search(UNCHANGED, message), f"the error must say what is unchanged, it says: {message}"
    assert message.isascii() and len(message) < 2000
    return message


def without(key: Any) -> Callable[[TensorDict], TensorDict]:
    return lambda run: run.exclude(key)


def with_leaf(key: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[TensorDict], TensorDict]:
    def apply(run: TensorDict) -> TensorDict:
        run = run.clone()
        run[key] = change(run[key])
        return run

    return apply


def with_extra(key: Any) -> Callable[[TensorDict], TensorDict]:
    return lambda run: run.clone().set(key, torch.zeros(*run.batch_size, 1))


BAD_RUNS: dict[str, tuple[Callable[[TensorDict], TensorDict], Any, tuple[str, ...]]] = {
    "missing key": (without("action"), KeyError, ("action",)),
    "missing reward": (without(("next", "reward")), KeyError, ("reward",)),
    "missing flag": (without(("next", "terminated")), KeyError, ("terminated",)),
    "missing observation": (without("observation"), (KeyError, ValueError), ("observation",)),
    "missing nested observation": (without("agents"), (KeyError, ValueError), ("agents", "state")),
    "one next observation of two": (without(("next", "observation")), ValueError, ("observation",)),
    "extra key": (with_extra("surprise"), (KeyError, ValueError), ("surprise",)),
    "extra nested key": (with_extra(("agents", "surprise")), (KeyError, ValueError), ("agents", "surprise")),
    "extra next key": (with_extra(("next", "surprise")), (KeyError, ValueError), ("surprise",)),
    "dtype of the observation": (
        with_leaf("observation", torch.Tensor.double),
        (ValueError, TypeError),
        ("observation", "float32", "float64"),
    ),
    "dtype of the next observation": (
        with_leaf(("next", "observation"), torch.Tensor.half),
        (ValueError, TypeError),
        ("observation", "float32", "float16"),
    ),
    "dtype of a flag": (
        with_leaf(("next", "done"), torch.Tensor.float),
        (ValueError, TypeError),
        ("done", "bool", "float32"),
    ),
    "same size, other dtype": (
        with_leaf("action", torch.Tensor.int),
        (ValueError, TypeError),
        ("action", "float32", "int32"),
    ),
    "shape of the action": (with_leaf("action", lambda x: x[..., :1]), ValueError, ("action", r"2\b", r"1\b")),
    "more dimensions": (with_leaf("action", lambda x: x.unsqueeze(-1)), ValueError, ("action",)),
    "shape of the next observation": (
        with_leaf(("next", "observation"), lambda x: x[..., :3]),
        ValueError,
        ("observation", r"4\b", r"3\b"),
    ),
    "other trailing order": (
        with_leaf("action", lambda x: x.unsqueeze(-2)),
        ValueError,
        ("action",),
    ),
}

BAD_WIDTHS = {
    "one stream too many": (lambda: make_run(2, STREAMS + 1), (ValueError, IndexError), (r"\b4\b", r"\b3\b")),
    "one stream too few": (lambda: make_run(2, STREAMS - 1), (ValueError, IndexError), (r"\b2\b", r"\b3\b")),
    "no stream dimension": (lambda: make_run(2)[:, 0], ValueError, ("K", "N|streams|3")),
    "no time dimension": (lambda: make_run(2)[0, 0], ValueError, ("K|time|step",)),
}


@pytest.fixture(params=["empty", "filled"])
def buffer(request) -> SlotReplayBuffer:
    """A storage with a layout and no row, and one that has wrapped."""
    if request.param == "filled":
        return make_buffer()
    return make_buffer(filled=0, layout=RowLayout.from_tensordict(make_run()))


@pytest.mark.parametrize("target", ["storage", "buffer"])
class TestRefusedRuns:
    """Contract: a run that does not fit is refused before the first byte is written."""

    ENDED = "(?i)truncat|without termination"

    @pytest.mark.parametrize("name", BAD_RUNS)
    def test_run_that_differs_from_the_layout_is_refused(self, buffer, target, name):
        change, error, says = BAD_RUNS[name]
        side = buffer if target == "buffer" else buffer.storage
        bad = change(make_run())
        refused(lambda: side.extend_batch(bad), buffer.state_dict, error, *says)
        self.assert_alive(buffer)

    @pytest.mark.parametrize("name", BAD_RUNS)
    def test_packing_refuses_the_same_runs(self, buffer, target, name):
        change, error, says = BAD_RUNS[name]
        layout = RowLayout.from_tensordict(make_run())
        bad = change(make_run())
        refused(lambda: layout.pack(bad), buffer.state_dict, error, *says, unchanged=False)

    @pytest.mark.parametrize("name", BAD_WIDTHS)
    def test_wrong_leading_sizes_are_refused(self, buffer, target, name):
        make, error, says = BAD_WIDTHS[name]
        side = buffer if target == "buffer" else buffer.storage
        refused(lambda: side.extend_batch(make()), buffer.state_dict, error, *says)
        self.assert_alive(buffer)

    @pytest.mark.parametrize("block", [(0, 4), (2, 5), (3, 4), (7, 9), (2, 2), (2, 1), (0, 3, 2)], ids=str)
    def test_column_block_out_of_range_is_refused(self, buffer, target, block):
        side, streams = buffer if target == "buffer" else buffer.storage, slice(*block)
        wanted = max(1, len(range(*streams.indices(10))))
        says = ("stream", r"\b3\b")
        call = lambda: side.extend_batch(make_run(2, wanted), streams=streams)  # noqa: E731
        refused(call, buffer.state_dict, (IndexError, ValueError), *says)
        self.assert_alive(buffer)

    def test_block_of_another_width_than_the_run_is_refused(self, buffer, target):
        side = buffer if target == "buffer" else buffer.storage
        call = lambda: side.extend_batch(make_run(2, 3), streams=slice(0, 2))  # noqa: E731
        refused(call, buffer.state_dict, (IndexError, ValueError), r"\b3\b", r"\b2\b")
        self.assert_alive(buffer)

    @pytest.mark.parametrize("streams", [slice(0, 4), slice(3, 4), slice(2, 1)], ids=str)
    def test_ending_streams_out_of_range_is_refused(self, buffer, target, streams):
        side = buffer if target == "buffer" else buffer.storage
        refused(lambda: side.end_streams(streams), buffer.state_dict, (IndexError, ValueError), r"\b3\b")
        self.assert_alive(buffer)

    @pytest.mark.parametrize("flags", [("truncated",), ("truncated", "done"), ("done",)], ids="+".join)
    def test_truncated_row_without_a_final_observation_is_refused(self, buffer, target, flags):
        side = buffer if target == "buffer" else buffer.storage
        bad = bare(make_run())
        for name in flags:
            bad["next", name][1, 2] = True
        refused(
            lambda: side.extend_batch(bad),
            buffer.state_dict,
            ValueError,
            self.ENDED,
            "(?i)final|next",
            "step 1, stream 2",
        )
        self.assert_alive(buffer)

    def test_packing_a_truncated_row_without_a_final_observation_is_refused(self, buffer, target):
        bad = bare(make_run())
        bad["next", "truncated"][0, 1] = True
        layout = RowLayout.from_tensordict(make_run())
        refused(
            lambda: layout.pack(bad), buffer.state_dict, ValueError, self.ENDED, "step 0, stream 1", unchanged=False
        )

    def test_time_that_is_not_first_by_name_is_refused(self, buffer, target):
        side = buffer if target == "buffer" else buffer.storage
        bad = make_run(STREAMS)
        bad.names = ["env", "time"]
        refused(lambda: side.extend_batch(bad), buffer.state_dict, ValueError, "time", "extend")
        self.assert_alive(buffer)

    def test_time_first_by_name_is_accepted(self, buffer, target):
        side = buffer if target == "buffer" else buffer.storage
        good = make_run(2)
        good.names = ["time", None]
        before = buffer.write_count
        side.extend_batch(good)
        assert buffer.write_count == before + 2 * STREAMS

    @pytest.mark.parametrize(
        "bad",
        [
            [make_run(), make_run()],
            [torch.zeros(4), torch.zeros(1)],
            (make_run(),),
            {"observation": torch.zeros(2, STREAMS, 4)},
            torch.zeros(2, STREAMS),
            None,
            7,
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_what_is_no_tensordict_is_refused(self, buffer, target, bad):
        """case 2"""
        side = buffer if target == "buffer" else buffer.storage
        says = ("TensorDict", type(bad).__name__)
        refused(lambda: side.extend_batch(bad), buffer.state_dict, TypeError, *says)
        self.assert_alive(buffer)

    def test_run_packed_with_another_layout_is_refused(self, buffer, target):
        side = buffer if target == "buffer" else buffer.storage
        other = make_run().exclude("action")
        packed = RowLayout.from_tensordict(other).pack(other)
        refused(lambda: side.extend_batch(packed), buffer.state_dict, (ValueError, TypeError), "(?i)layout")
        self.assert_alive(buffer)

    def test_run_packed_for_the_other_mode_is_refused(self, buffer, target):
        side = buffer if target == "buffer" else buffer.storage
        packed = RowLayout.from_tensordict(make_run(), next_obs="store").pack(make_run())
        refused(lambda: side.extend_batch(packed), buffer.state_dict, (ValueError, TypeError), "(?i)layout")

    @pytest.mark.parametrize("fault", ["width", "rows", "dtype", "finals", "id too large", "id negative", "order"])
    def test_packed_run_that_contradicts_itself_is_refused(self, buffer, target, fault):
        side = buffer if target == "buffer" else buffer.storage
        run = make_run()
        run["next", "truncated"][0, 1] = True
        run["next", "truncated"][1, 0] = True
        packed = RowLayout.from_tensordict(run).pack(run)
        rows, ids, finals, tail = packed.rows, packed.final_rows, packed.finals, packed.tail
        assert ids.tolist() == [1, 3]
        if fault == "width":
            rows = torch.cat([rows, rows], 1)
        elif fault == "rows":
            rows = rows[..., :-16]
        elif fault == "dtype":
            rows = rows.view(torch.int16)
        elif fault == "finals":
            finals = finals[:1]
        elif fault == "id too large":
            ids = torch.tensor([1, 6])
        elif fault == "id negative":
            ids = torch.tensor([-1, 3])
        else:
            ids = torch.tensor([3, 1])
        bad = PackedRun(layout=packed.layout, rows=rows, final_rows=ids, finals=finals, tail=tail)
        refused(lambda: side.extend_batch(bad), buffer.state_dict, (ValueError, TypeError, IndexError))
        self.assert_alive(buffer)

    @pytest.mark.parametrize("part", ["finals", "tail"])
    @pytest.mark.parametrize(
        "spoil",
        [
            lambda rows: rows.float(),
            lambda rows: rows[:, :8],
            lambda rows: rows[:, 0],
            lambda rows: rows.repeat_interleave(2, 1)[:, ::2],
        ],
        ids=["dtype", "narrow", "one dim", "bytes apart"],
    )
    def test_packed_successors_that_are_no_rows_of_bytes_are_refused(self, buffer, target, part, spoil):
        side = buffer if target == "buffer" else buffer.storage
        run = make_run()
        run["next", "truncated"][0, 1] = True
        packed = RowLayout.from_tensordict(run).pack(run)
        bad = replace(packed, **{part: spoil(getattr(packed, part))})
        refused(lambda: side.extend_batch(bad), buffer.state_dict, ValueError, f"{part} must be uint8")
        self.assert_alive(buffer)

    def test_packed_rows_that_do_not_lie_at_words_are_taken_by_streams_at_different_steps(self, buffer, target):
        side = buffer if target == "buffer" else buffer.storage
        packed = RowLayout.from_tensordict(make_run()).pack(make_run())
        side.extend_batch(replace(packed, rows=packed.rows[:1, :1], tail=packed.tail[:1]), streams=slice(0, 1))
        memory = torch.zeros(packed.rows.numel() + 8, dtype=torch.uint8)
        rows = memory[8:].view(packed.rows.shape).copy_(packed.rows)
        handle = side.extend_batch(replace(packed, rows=rows))
        slot, stream = handle.index.unbind(-1)
        assert torch.equal(buffer.storage.block.ring[slot, stream, :-16], rows[..., :-16])

    def assert_alive(self, buffer: SlotReplayBuffer) -> None:
        """After a refusal the next good run is taken."""
        before = buffer.write_count
        buffer.extend_batch(make_run(first=50))
        assert buffer.write_count == before + 2 * STREAMS
        assert ((buffer.sample(64)["observation"] % 100) <= 52).all()


BAD_FIRSTS: dict[str, Callable[[SlotStorage], Any]] = {
    "width": lambda storage: storage.extend_batch(make_run(2, STREAMS + 1)),
    "packed width": lambda storage: storage.extend_batch(packed_run(make_run(2, STREAMS + 1))),
    "block": lambda storage: storage.extend_batch(make_run(2, 2), streams=slice(2, 4)),
    "block width": lambda storage: storage.extend_batch(make_run(2, 2), streams=slice(0, 1)),
    "packed rows": lambda storage: storage.extend_batch(replace(packed_run(), rows=torch.zeros(2, 3, 16).byte())),
    "list": lambda storage: storage.extend_batch([make_run()]),
    "names": lambda storage: storage.extend_batch(named(make_run(), ["env", "time"])),
    "no time": lambda storage: storage.extend_batch(make_run()[0]),
}


def packed_run(run: TensorDict | None = None) -> PackedRun:
    run = make_run() if run is None else run
    return RowLayout.from_tensordict(run).pack(run)


def named(run: TensorDict, names: list[str | None]) -> TensorDict:
    run.names = names
    return run


class TestRefusedFirstRuns:
    """Contract: a refused first run decides nothing: no layout, no memory, and any other run may be the first."""

    @pytest.mark.parametrize("name", BAD_FIRSTS)
    def test_refused_first_run_leaves_the_storage_as_new(self, name):
        storage = SlotStorage(CAPACITY, STREAMS)
        refused(
            lambda: BAD_FIRSTS[name](storage), storage.state_dict, (ValueError, TypeError, IndexError), unchanged=False
        )
        assert storage.nbytes == 0 and len(storage) == 0
        other = make_run().exclude("action")
        storage.extend_batch(other)
        assert len(storage) == 2 * STREAMS


class TestRefusedOverflow:
    """Contract: overflow of the side table is defined: memory of one process grows, other memory raises before
    writing (or grows), and either way nothing is lost."""

    @staticmethod
    def ended(count: int) -> TensorDict:
        run = make_run(count)
        run["next", "truncated"][:] = True
        return run

    @pytest.mark.parametrize("kind", ["plain", "shared", "file"])
    def test_more_final_observations_than_places_are_kept_or_refused(self, kind, tmp_path):
        more = {"shared": {"shared": True}, "file": {"filename": str(tmp_path / "replay")}}.get(kind, {})
        buffer = make_buffer(filled=0, layout=RowLayout.from_tensordict(make_run()), final_capacity=2, **more)
        buffer.extend_batch(self.ended(1))
        assert buffer.storage.num_finals() == STREAMS
        if kind == "plain":
            buffer.extend_batch(self.ended(3))
            assert buffer.storage.num_finals() == 4 * STREAMS
        else:
            call = lambda: buffer.extend_batch(self.ended(3))  # noqa: E731
            refused(call, buffer.state_dict, RuntimeError, "final_capacity")
            assert buffer.storage.num_finals() == STREAMS
        sample = buffer.sample(64)
        assert torch.equal(sample["next", "observation"], sample["observation"] + 1)


class TestRefusedExtendAndAdd:
    """Contract: TorchRL's two entry points refuse what ``extend_batch`` refuses."""

    @pytest.mark.parametrize("method", ["extend", "add"])
    def test_wrong_number_of_streams_is_refused(self, buffer, method):
        bad = make_run(2, STREAMS + 1).transpose(0, 1) if method == "extend" else make_run(1, STREAMS + 1)[0]
        refused(lambda: getattr(buffer, method)(bad), buffer.state_dict, (ValueError, IndexError), r"\b4\b", r"\b3\b")

    @pytest.mark.parametrize("method", ["extend", "add"])
    def test_missing_key_is_refused(self, buffer, method):
        run = make_run().exclude("action")
        bad = run.transpose(0, 1) if method == "extend" else run[0]
        refused(lambda: getattr(buffer, method)(bad), buffer.state_dict, KeyError, "action")

    @pytest.mark.parametrize("method", ["extend", "add"])
    def test_list_is_refused(self, buffer, method):
        refused(lambda: getattr(buffer, method)([make_run()]), buffer.state_dict, TypeError, "list", "TensorDict")

    def test_flat_data_for_several_streams_is_refused(self, buffer):
        refused(lambda: buffer.extend(make_run()[:, 0]), buffer.state_dict, ValueError, "N|stream")

    def test_store_mode_without_next_observations_is_refused(self):
        buffer = make_buffer(next_obs="store")
        refused(lambda: buffer.extend_batch(bare(make_run())), buffer.state_dict, (KeyError, ValueError), "observation")


class TestRefusedConstruction:
    """Contract: nonsense is refused where it is written down."""

    @pytest.mark.parametrize("capacity", [1, 0, -3])
    def test_capacity_below_two_is_refused(self, capacity):
        with pytest.raises(ValueError, match="capacity") as caught:
            SlotStorage(capacity, 2)
        assert str(capacity) in str(caught.value) and "2" in str(caught.value)

    @pytest.mark.parametrize("num_streams", [0, -1])
    def test_no_stream_is_refused(self, num_streams):
        with pytest.raises(ValueError, match=f"(?s)stream.*{num_streams}"):
            SlotStorage(4, num_streams)

    @pytest.mark.parametrize("n_steps", [0, -1])
    def test_n_steps_below_one_is_refused(self, n_steps):
        with pytest.raises(ValueError, match=f"(?s)n_steps.*{n_steps}"):
            TransitionSampler(n_steps)

    @pytest.mark.parametrize("n_steps", [1.5, "3", None])
    def test_n_steps_that_is_no_integer_is_refused(self, n_steps):
        with pytest.raises((ValueError, TypeError), match="n_steps"):
            TransitionSampler(n_steps)

    def test_unknown_next_obs_is_refused(self):
        with pytest.raises(ValueError, match="(?s)next_obs.*twice"):
            SlotStorage(4, 2, next_obs="twice")

    def test_unknown_extra_is_refused(self):
        with pytest.raises(ValueError, match="(?s)extra.*maybe"):
            SlotStorage(4, 2, extra="maybe")

    @pytest.mark.parametrize(
        "weights",
        [[1.0, 2.0], [1.0, -1.0, 1.0], [0.0, 0.0, 0.0], [1.0, float("nan"), 1.0], [float("inf"), 1.0, 1.0]],
    )
    def test_stream_weights_that_fit_no_stream_are_refused(self, weights):
        """Refused where they are given, or where they first meet the storage."""
        buffer = make_buffer()
        with pytest.raises((ValueError, RuntimeError), match="weight"):
            buffer.set_sampler(TransitionSampler(stream_weights=torch.tensor(weights)))
            buffer.sample()

    def test_next_key_that_the_example_lacks_is_refused(self):
        with pytest.raises((KeyError, ValueError), match="nowhere"):
            RowLayout.from_tensordict(make_run(), next_keys=["nowhere"])

    def test_layout_of_the_other_mode_is_refused(self):
        layout = RowLayout.from_tensordict(make_run(), next_obs="store")
        with pytest.raises(ValueError, match="(?s)next_obs.*store.*derive"):
            SlotStorage(4, 2, layout=layout, next_obs="derive")


class TestRefusedSamples:
    """Contract: what cannot be sampled is said, and nothing moves, the generator included."""

    @pytest.mark.parametrize("n_steps", [1, 3])
    @pytest.mark.parametrize("how", ["never written", "no layout", "emptied", "successors unknown"])
    def test_sampling_with_nothing_to_sample_is_refused(self, how, n_steps):
        layout = None if how == "no layout" else RowLayout.from_tensordict(make_run())
        buffer = make_buffer(n_steps, filled=0, layout=layout)
        if how == "emptied":
            buffer.extend_batch(make_run())
            buffer.empty()
        elif how == "successors unknown":
            buffer.extend_batch(bare(make_run(1)))
            assert len(buffer) == STREAMS
        refused(buffer.sample, buffer.state_dict, RuntimeError, "(?i)sampl", unchanged=False)

    @pytest.mark.parametrize(
        "sampler",
        [
            TransitionSampler(3, reward_key="pay"),
            TransitionSampler(3, reward_key="pay", replacement=False),
            TransitionSampler(3, reward_key="pay", stream_weights=torch.ones(STREAMS)),
            PrioritizedTransitionSampler(3, reward_key="pay"),
        ],
        ids=["uniform", "without replacement", "weighted", "prioritized"],
    )
    def test_return_of_a_reward_that_is_not_there_is_refused(self, sampler):
        buffer = make_buffer()
        buffer.set_sampler(sampler)
        refused(buffer.sample, buffer.state_dict, ValueError, "n_steps=3 needs one floating-point number at 'pay'")

    @pytest.mark.parametrize(
        "damage", [{"order": [0, 1]}, {"order_key": 3}, {"order": torch.ones(3)}, {"order_key": torch.ones(2, 1)}]
    )
    def test_damaged_state_of_a_permutation_is_refused(self, damage):
        buffer = make_buffer()
        buffer.set_sampler(TransitionSampler(replacement=False))
        buffer.sample(2)
        state = {**buffer.sampler.state_dict(), **damage}
        refused(lambda: buffer.sampler.load_state_dict(state), buffer.state_dict, ValueError, next(iter(damage)))

    @pytest.mark.parametrize("state", [None, [], 3, torch.zeros(2)], ids=["none", "list", "number", "tensor"])
    @pytest.mark.parametrize(
        "sampler", [TransitionSampler(replacement=False), SequenceSampler(2, online=True)], ids=["passes", "windows"]
    )
    def test_what_is_no_state_of_a_sampler_is_refused(self, sampler, state):
        buffer = make_buffer()
        buffer.set_sampler(sampler)
        buffer.sample(2)
        refused(lambda: buffer.sampler.load_state_dict(state), buffer.state_dict, ValueError, "state must")

    def test_batch_size_that_nobody_gave_is_refused(self):
        buffer = SlotReplayBuffer(storage=SlotStorage(4, 2), sampler=TransitionSampler())
        buffer.extend_batch(make_run(2, 2))
        with pytest.raises(RuntimeError, match="batch_size"):
            buffer.sample()


def big_layout() -> RowLayout:
    """Observations of 2412 and 1645 floats, as the largest of the tasks has them."""
    row = TensorDict(
        {"observation": torch.zeros(1, 1, 2412), "critic": torch.zeros(1, 1, 1645), "action": torch.zeros(1, 1, 29)},
        [1, 1],
    )
    row["next"] = row.select("observation", "critic").clone()
    row["next", "reward"] = torch.zeros(1, 1, 1)
    for name in FLAGS:
        row["next", name] = torch.zeros(1, 1, 1, dtype=torch.bool)
    return RowLayout.from_tensordict(row)


def available_bytes() -> int:
    """What the kernel says could still be given out."""
    text = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").exists() else ""
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return int(found.group(1)) * 1024 if found else 2**63


class TestRefusedMemory:
    """Contract: the bytes are known before allocation; a shortage names needed and free, per field."""

    def test_68_1_gigabytes_of_observations_are_stated_before_allocation(self):
        """case 14: 4096 streams, 1024 slots"""
        if available_bytes() > 60e9:
            pytest.skip("this machine might hold 68 GB")
        before = available_bytes()
        with pytest.raises(MemoryError) as caught:
            SlotStorage(1024, 4096, layout=big_layout())
        message = str(caught.value)
        needed = SlotStorage.nbytes_for(big_layout(), 1024, 4096)
        for name, number in (("observation", 40.5), ("critic", 27.6)):
            assert name in message, message
            assert str(number) in message, f"{name} needs {number} GB, the error says: {message}"
        assert str(needed) in message or f"{needed / 1e9:.1f}" in message, message
        assert re.search(r"(?i)free|available", message), message
        assert before - available_bytes() < 4e9, "memory was taken before the refusal"

    def test_shortage_on_any_machine_names_every_large_field(self):
        with pytest.raises(MemoryError) as caught:
            SlotStorage(2**30, 4096, layout=big_layout())
        message = str(caught.value)
        assert all(word in message for word in ("observation", "critic", "action")), message
        assert re.search(r"(?i)free|available", message), message

    def test_shortage_at_the_first_run_writes_nothing(self):
        """Without a layout the size is known when the first run comes."""
        storage = SlotStorage(2**40, 2)
        with pytest.raises(MemoryError, match="observation"):
            storage.extend_batch(make_run(2, 2))
        assert len(storage) == 0 and storage.write_count == 0


class TestMemoryOfAContainer:
    """Contract: what a control group still gives counts, and pages of files that it can drop are given."""

    @staticmethod
    def group(root: Path, version: int, limit: str, used: int, dropped: int) -> None:
        folder = root if version == 2 else root / "memory"
        folder.mkdir(exist_ok=True)
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        stat = f"anon 5\n{'' if version == 2 else 'total_'}inactive_file {dropped}\nactive_file 7\n"
        for name, text in (*zip(names, (f"{limit}\n", f"{used}\n"), strict=True), ("memory.stat", stat)):
            (folder / name).write_text(text)

    @pytest.mark.parametrize("version", [1, 2])
    def test_pages_of_files_that_can_be_dropped_are_free(self, version, monkeypatch, tmp_path):
        """A data set that was read fills a container up to its limit, and storages would be refused."""
        monkeypatch.setattr(sizing, "_CGROUPS", tmp_path)
        self.group(tmp_path, version, "10000000", 9_900_000, 9_000_000)
        assert sizing.free_bytes("cpu") == 9_100_000
        self.group(tmp_path, version, "10000000", 9_900_000, 0)
        assert sizing.free_bytes("cpu") == 100_000

    @pytest.mark.parametrize(("version", "limit"), [(2, "max"), (1, str(2**63 - 4096))])
    def test_without_a_limit_the_machine_counts(self, version, limit, monkeypatch, tmp_path):
        monkeypatch.setattr(sizing, "_CGROUPS", tmp_path)
        self.group(tmp_path, version, limit, 100, 0)
        assert sizing.free_bytes("cpu") > 10_000_000

    @pytest.mark.parametrize(("kind", "filename"), [("gpu", None), ("disk", "here"), ("file", None)])
    def test_memory_that_nobody_has_is_refused(self, kind, filename):
        with pytest.raises(ValueError, match=f"free_bytes: kind must be .*, got '{kind}'"):
            sizing.free_bytes(kind, filename=filename)

    def test_no_less_than_nothing_is_free(self, monkeypatch, tmp_path):
        """A limit may be lowered below what is used."""
        monkeypatch.setattr(sizing, "_CGROUPS", tmp_path)
        self.group(tmp_path, 2, "1000", 2000, 0)
        assert sizing.free_bytes("cpu") == 0


class TestRefusedCheckpoints:
    """Contract: a corrupted or foreign checkpoint is refused; what was in memory stays, to the last byte."""

    @staticmethod
    def other(kind: str) -> SlotStorage:
        if kind == "other layout":
            storage = SlotStorage(CAPACITY, STREAMS)
            storage.extend_batch(make_run().exclude("action"))
        elif kind == "other capacity":
            storage = SlotStorage(CAPACITY + 1, STREAMS)
            storage.extend_batch(make_run())
        elif kind == "other streams":
            storage = SlotStorage(CAPACITY, STREAMS + 1)
            storage.extend_batch(make_run(2, STREAMS + 1))
        else:
            storage = SlotStorage(CAPACITY, STREAMS, next_obs="store")
            storage.extend_batch(make_run())
        return storage

    FOREIGN = pytest.mark.parametrize("kind", ["other layout", "other capacity", "other streams", "other mode"])
    LOAD_ERRORS = (ValueError, KeyError, RuntimeError, TypeError, OSError, EOFError)

    @FOREIGN
    def test_foreign_state_dict_is_refused(self, kind):
        buffer = make_buffer()
        state = self.other(kind).state_dict()
        call = lambda: buffer.storage.load_state_dict(state)  # noqa: E731
        refused(call, buffer.state_dict, self.LOAD_ERRORS, "(?i)state", "got")

    @FOREIGN
    def test_foreign_dump_is_refused(self, kind, tmp_path):
        buffer = make_buffer()
        self.other(kind).dumps(tmp_path / "foreign")
        refused(lambda: buffer.storage.loads(tmp_path / "foreign"), buffer.state_dict, self.LOAD_ERRORS)

    @pytest.mark.parametrize("state", [{}, {"weights": torch.zeros(3)}, {"_storage": {}, "_len": 3}], ids=str)
    def test_state_of_something_else_is_refused(self, state):
        buffer = make_buffer()
        refused(lambda: buffer.storage.load_state_dict(state), buffer.state_dict, self.LOAD_ERRORS)

    def test_state_without_one_of_its_entries_is_refused(self):
        buffer = make_buffer()
        whole = buffer.storage.state_dict()
        for key in list(whole):
            part = {k: v for k, v in whole.items() if k != key}
            refused(lambda part=part: buffer.storage.load_state_dict(part), buffer.state_dict, self.LOAD_ERRORS)

    def test_state_whose_tensor_is_cut_short_is_refused(self):
        buffer = make_buffer()
        whole = buffer.storage.state_dict()
        tensors = [key for key, value in whole.items() if isinstance(value, torch.Tensor) and value.numel() > 1]
        assert tensors, "the state has no tensors at its top level"
        for key in tensors:
            cut = {**whole, key: whole[key].reshape(-1)[:-1]}
            refused(lambda cut=cut: buffer.storage.load_state_dict(cut), buffer.state_dict, self.LOAD_ERRORS)

    DAMAGE: ClassVar = {
        "no layout": lambda state: state["geometry"].pop("layout"),
        "layout of nothing": lambda state: state["geometry"].update(layout=None),
        "no final_capacity": lambda state: state["geometry"].pop("final_capacity"),
        "capacity in words": lambda state: state["geometry"].update(capacity="six"),
        "geometry that is a list": lambda state: state.update(geometry=[1, 2]),
        "wider ring": lambda state: state.update(ring=state["ring"].int()),
        "unknown state of the newest row": lambda state: state["positions"][NEWEST].fill_(7),
    }

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_state_that_is_damaged_inside_is_a_value_error(self, damage):
        buffer = make_buffer()
        state = copy.deepcopy(buffer.storage.state_dict())
        self.DAMAGE[damage](state)
        for target in (buffer.storage, SlotStorage(CAPACITY, STREAMS)):
            refused(lambda target=target: target.load_state_dict(state), buffer.state_dict, ValueError, "must|damaged")

    def test_positions_that_cannot_be_are_refused(self):
        buffer = make_buffer()
        whole = buffer.storage.state_dict()
        head = buffer.storage.head
        found = 0
        for key, value in whole.items():
            if not isinstance(value, torch.Tensor) or value.dtype != torch.int64 or value.shape[-1:] != head.shape:
                continue
            for i, row in enumerate(value.reshape(-1, STREAMS)):
                if torch.equal(row, head):
                    bad = value.clone()
                    bad.view(-1, STREAMS)[i] = -1
                    call = lambda key=key, bad=bad: buffer.storage.load_state_dict({**whole, key: bad})  # noqa: E731
                    refused(call, buffer.state_dict, self.LOAD_ERRORS)
                    found += 1
        assert found, "the state does not hold the heads"

    @pytest.mark.parametrize("part", ["storage", "buffer"])
    def test_dump_with_any_file_cut_in_half_is_refused(self, part, tmp_path):
        buffer = make_buffer()
        side = buffer.storage if part == "storage" else buffer
        side.dumps(tmp_path / "good")
        files = [p.relative_to(tmp_path / "good") for p in (tmp_path / "good").rglob("*") if p.is_file()]
        storage_files = [p for p in files if part == "storage" or "storage" in str(p)]
        assert storage_files
        for number, name in enumerate(storage_files):
            if not (tmp_path / "good" / name).stat().st_size:
                continue
            bad = tmp_path / f"bad_{number}"
            shutil.copytree(tmp_path / "good", bad)
            content = (bad / name).read_bytes()
            (bad / name).write_bytes(content[: len(content) // 2])
            refused(lambda bad=bad: side.loads(bad), buffer.storage.state_dict, Exception, unchanged=False)

    @pytest.mark.parametrize("part", ["storage", "buffer"])
    def test_dump_without_any_of_its_files_is_refused(self, part, tmp_path):
        buffer = make_buffer()
        side = buffer.storage if part == "storage" else buffer
        side.dumps(tmp_path / "good")
        files = [p.relative_to(tmp_path / "good") for p in (tmp_path / "good").rglob("*") if p.is_file()]
        for number, name in enumerate(p for p in files if part == "storage" or "storage" in str(p)):
            bad = tmp_path / f"bad_{number}"
            shutil.copytree(tmp_path / "good", bad)
            (bad / name).unlink()
            refused(lambda bad=bad: side.loads(bad), buffer.storage.state_dict, Exception, unchanged=False)

    def test_folder_that_does_not_exist_is_refused(self, tmp_path):
        buffer = make_buffer()
        refused(lambda: buffer.storage.loads(tmp_path / "none"), buffer.state_dict, (OSError, ValueError), "none")

    def test_corrupted_dump_is_refused_by_a_fresh_storage_which_stays_usable(self, tmp_path):
        make_buffer().storage.dumps(tmp_path / "bad")
        for path in (tmp_path / "bad").rglob("*"):
            if path.is_file():
                path.write_bytes(b"\x00" * 7)
        fresh = SlotStorage(CAPACITY, STREAMS)
        with pytest.raises(Exception):  # noqa: B017 - whichever file is read first decides
            fresh.loads(tmp_path / "bad")
        assert len(fresh) == 0
        fresh.extend_batch(make_run())
        assert len(fresh) == 2 * STREAMS

    @pytest.mark.parametrize("content", [b"", b"not a replay file", bytes(4096), b"\xff" * 100_000])
    def test_file_that_is_no_memory_mapped_replay_is_refused(self, content, tmp_path):
        path = tmp_path / "replay"
        path.write_bytes(content)
        with pytest.raises((ValueError, RuntimeError, OSError), match="replay"):
            SlotStorage.open(str(path))
        assert path.read_bytes() == content, "a refused file was changed"

    def test_memory_mapped_file_cut_short_is_refused_and_left_alone(self, tmp_path):
        path = tmp_path / "replay"
        storage = SlotStorage(CAPACITY, STREAMS, filename=str(path))
        storage.extend_batch(make_run())
        del storage
        content = path.read_bytes()
        short = tmp_path / "replay_short"
        short.write_bytes(content[: len(content) // 2])
        with pytest.raises((ValueError, RuntimeError, OSError), match="replay_short"):
            SlotStorage.open(str(short))
        assert short.read_bytes() == content[: len(content) // 2]

    def test_good_checkpoint_still_loads_after_refusals(self, tmp_path):
        buffer = make_buffer()
        buffer.storage.dumps(tmp_path / "good")
        fresh = make_buffer(filled=2)
        refused(lambda: fresh.storage.load_state_dict({}), fresh.state_dict, self.LOAD_ERRORS)
        fresh.storage.loads(tmp_path / "good")
        assert state_bytes(fresh.storage.state_dict()) == state_bytes(buffer.storage.state_dict())
        for side in (buffer, fresh):
            side.set_rng(torch.Generator().manual_seed(3))
        assert flat_rows(fresh.sample()) == flat_rows(buffer.sample())


class TestDataThatIsNoTensor:
    """Contract: it is a key like any other, which the layout never has."""

    @staticmethod
    def named(run: TensorDict) -> TensorDict:
        return run.set(("info", "task"), NonTensorData("walk", batch_size=run.batch_size))

    @pytest.mark.parametrize("call", ["extend_batch", "extend"])
    def test_it_is_refused(self, call):
        buffer = make_buffer()
        run = self.named(make_run(1, first=7))
        run = run if call == "extend_batch" else run.transpose(0, 1)
        refused(
            lambda: getattr(buffer, call)(run), buffer.storage.state_dict, KeyError, r"\('info', 'task'\)", UNCHANGED
        )

    def test_it_gives_no_layout(self):
        with pytest.raises(TypeError, match=r"key \('info', 'task'\) must be a tensor, got NonTensorData"):
            RowLayout.from_tensordict(self.named(make_run()))
        with pytest.raises(TypeError, match="must be a tensor"):
            SlotStorage(CAPACITY, STREAMS).extend_batch(self.named(make_run()))

    def test_it_is_dropped_where_that_is_asked_for(self):
        storage = SlotStorage(CAPACITY, STREAMS, extra="drop")
        for first in (0, 2):
            storage.extend_batch(self.named(make_run(2, first=first)))
        assert len(storage) == 4 * STREAMS and ("info", "task") not in storage.layout.by_key

    def test_it_cannot_stand_for_a_field(self):
        buffer, run = make_buffer(), make_run(1, first=7)
        run["action"] = NonTensorData("left", batch_size=run.batch_size)
        refused(
            lambda: buffer.extend_batch(run), buffer.storage.state_dict, (TypeError, ValueError), "'action'", UNCHANGED
        )
