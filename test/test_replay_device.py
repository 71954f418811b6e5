# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The bookkeeping of CUDA storages: masks instead of host decisions, no waiting for the device, fused kernels.

The same code runs on host memory when a block is told to keep its books on the device, so that random programs hold it
against the reference without a GPU; the tests marked ``gpu`` repeat that on CUDA, kernels included.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from tensordict import TensorDict
from test_replay_cases import flat_rows
from test_replay_model import Config, Empty, EndStreams, Run, model, programs, run_program

from torchrl_ext.data import (
    PackedRun,
    PrioritizedTransitionSampler,
    RowLayout,
    SequenceSampler,
    SlotReplayBuffer,
    SlotStorage,
    TransitionSampler,
    _fused,
    _slot_write,
)
from torchrl_ext.data._block import FINALS, RESERVED, SlotBlock
from torchrl_ext.data.batch_pool import BatchPool, PinnedPool
from torchrl_ext.data.layout import HOLE
from torchrl_ext.data.packing import check_run, find_ends, write_rows
from torchrl_ext.data.streams import current_stream

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@contextlib.contextmanager
def books_on_the_device():
    with mock.patch.object(SlotBlock, "on_device", True), mock.patch.object(SlotStorage, "_grows", False):
        yield


def run_on(device: str, config: Config, ops: list) -> None:
    if device == "cuda":
        run_program(replace(config, kind="cuda"), ops)
    else:
        with books_on_the_device():
            run_program(replace(config, kind="plain", final_capacity=config.capacity + 1), ops)


class TestAnyProgramOnTheDevicePath:
    """Contract: what is written, sampled and remembered does not depend on who keeps the books."""

    @model
    @given(program=programs())
    def test_masks_agree_with_the_reference_on_any_program(self, program):
        config, ops = program
        run_on("host memory", config, ops)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.timeout(300)
    @model
    @given(program=programs())
    def test_cuda_agrees_with_the_reference_on_any_program(self, program):
        config, ops = program
        run_on("cuda", config, ops)

    @pytest.mark.parametrize("device", ["host memory", pytest.param("cuda", marks=gpu)])
    @pytest.mark.parametrize("form", ["bare", "packed_bare"])
    def test_cut_before_the_successor_is_known_leaves_a_hole(self, device, form):
        ops = [Run(form, ("-..", "-..")), EndStreams(0, 2), Run("td", ("/..", "/T."))]
        run_on(device, Config("small", 6, 2), ops)

    @pytest.mark.parametrize("kept", ["by the host", "by the device", pytest.param("on cuda", marks=gpu)])
    def test_draws_look_for_a_hole_only_until_it_is_overwritten(self, kept):
        with books_on_the_device() if kept == "by the device" else contextlib.nullcontext():
            storage = SlotStorage(8, 2, device="cuda" if kept == "on cuda" else "cpu", final_capacity=9)
            buffer = SlotReplayBuffer(storage=storage, batch_size=64)
            never, zero = torch.zeros(2, 2, 1, dtype=torch.bool), torch.zeros(2, 2, 1)
            following = {"observation": zero, "reward": zero, "done": never, "terminated": never}
            run = TensorDict({"observation": zero, "next": following}, [2, 2]).to(storage.device)
            run, seen = replace(RowLayout.from_tensordict(run).pack(run), tail=None), []
            for turn in range(7):
                buffer.extend_batch(run)  # the last successors come with the next run
                if turn == 1:
                    buffer.end_streams(slice(1, 2))
                seen.append(storage.block.may_have_holes)
                slot, stream = buffer.sample()["index"].unbind(-1)
                assert (storage.block.final[slot * 2 + stream] != HOLE).all()
        # The hole is step 3 of 8 slots, which step 11 overwrites.
        assert seen == [False, True, True, True, True, False, False]

    @pytest.mark.parametrize("kept", ["by the host", "by the device", pytest.param("on cuda", marks=gpu)])
    def test_rows_that_a_killed_writer_tore_are_lost_until_they_are_overwritten(self, kept):
        storage = filled("cpu", 2, capacity=8).storage
        state, lived = storage.state_dict(), storage.head
        state["positions"][RESERVED] += 3
        with books_on_the_device() if kept == "by the device" else contextlib.nullcontext():
            loaded = SlotStorage(8, 2, layout=storage.layout, device="cuda" if kept == "on cuda" else "cpu")
            loaded.load_state_dict(state)
            torn = 3
            for _ in range(5):
                low, high = loaded.live_range()
                assert torch.equal(high.cpu() - low.cpu(), torch.full((2,), 8 - torn))
                assert torch.equal(low.cpu(), lived + 3 - 8) or not torn
                assert len(loaded) == 2 * (8 - torn)
                again = SlotStorage(8, 2)
                again.load_state_dict(loaded.state_dict())
                assert len(again) == len(loaded)
                assert torch.equal(again["observation"], loaded["observation"].cpu()), "not all rows were saved"
                loaded.extend_batch(PackedRun(loaded.layout, loaded.block.ring[:1].clone()))
                torn = max(torn - 1, 0)

    @pytest.mark.parametrize("device", ["host memory", pytest.param("cuda", marks=gpu)])
    def test_a_collector_may_start_anew_many_times_within_a_lap(self, device):
        """Each start cuts the streams while the successor of their newest row is not known."""
        start = [Run("packed_bare", ("/..", "/..")), EndStreams(0, 2)]
        run_on(device, Config("small", 64, 2), [*30 * start, Run("td", ("/..", "/T."))])

    @pytest.mark.parametrize("device", ["host memory", pytest.param("cuda", marks=gpu)])
    def test_runs_that_need_one_copy_alternate_with_runs_that_need_more(self, device):
        plain = Run("packed_bare", ("-..", "-.T"))
        block, tailed, cut = Run("packed_bare", ("-.",)), Run("packed", ("-.X", "-..")), EndStreams(0, 1)
        ops = [plain] * 6 + [tailed, plain, plain, block, plain, plain, cut, plain, plain, Empty(), plain, plain]
        run_on(device, Config("small", 7, 2), ops)


def filled(
    device: str, num_streams: int = 64, *, capacity: int = 32, seed: int = 0, holes: bool = False
) -> SlotReplayBuffer:
    """Streams at different steps, with ends of every kind, over more than a lap; some are cut after half of the writes
    if there are to be ``holes``, which the last successors must then be unknown for."""
    generator = torch.Generator().manual_seed(seed)
    storage = SlotStorage(capacity, num_streams, device=device, final_capacity=capacity + 1)
    buffer = SlotReplayBuffer(storage=storage, sampler=TransitionSampler(3, 0.9), batch_size=4096)
    first = torch.zeros(num_streams)
    for turn in range(12):
        width = num_streams if turn % 3 else num_streams // 2
        steps = 5
        t = first[:width] + torch.arange(steps).unsqueeze(-1)
        first[:width] += steps
        observation = (1000 * torch.arange(width) + t).unsqueeze(-1)
        ended = torch.rand(steps, width, 1, generator=generator) < 0.15
        terminated = ended & (torch.rand(steps, width, 1, generator=generator) < 0.5)
        run = TensorDict(
            {
                "observation": observation,
                "next": {
                    "observation": torch.where(ended, -observation, observation + 1),
                    "reward": torch.rand(steps, width, 1, generator=generator),
                    "done": ended,
                    "terminated": terminated,
                    "truncated": ended & ~terminated,
                },
            },
            [steps, width],
        )
        if turn % 2:
            run = RowLayout.from_tensordict(run).pack(run)
            run = replace(run, tail=None) if holes else run
        buffer.extend_batch(run, streams=slice(0, width))
        if holes and turn % 2:
            buffer.end_streams(slice(turn, turn + 10))
    return buffer


SAMPLERS = [TransitionSampler(2, 0.9), PrioritizedTransitionSampler(), SequenceSampler(4)]


def on_host(sampler, device: str) -> SlotReplayBuffer:
    buffer = SlotReplayBuffer(
        storage=SlotStorage(32, 4), sampler=copy.deepcopy(sampler), sample_device=device, batch_size=16
    )
    step = torch.arange(32.0).view(32, 1, 1) + 1000 * torch.arange(4.0).view(1, 4, 1)
    never = torch.zeros(32, 4, 1, dtype=torch.bool)
    flags = {key: never.clone() for key in ("done", "terminated", "truncated")}
    following = {"observation": step + 1, "reward": step.clone(), **flags}
    buffer.extend_batch(TensorDict({"observation": step, "next": following}, [32, 4]))
    return buffer


class TestBatchesThatLeaveTheHost:
    @pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
    def test_only_batches_for_a_cuda_device_are_made_in_page_locked_memory(self, sampler):
        taken = []
        with mock.patch.object(PinnedPool, "take", lambda _, nbytes: taken.append(nbytes) or BatchPool().take(nbytes)):
            buffer = on_host(sampler, "cpu")
            before = buffer.sample()
            assert not taken
            # Its name decides; the sampler itself is told to leave the batch here.
            buffer.sample_device = torch.device("cuda")
            draw = type(buffer._sampler).draw_batch

            def here(self, *args, **options):
                assert options.pop("device").type == "cuda"
                return draw(self, *args, device=None, **options)

            with mock.patch.object(type(buffer._sampler), "draw_batch", here):
                after = buffer.sample()
        assert taken and set(after.keys(True)) == set(before.keys(True))

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
    def test_sampling_does_not_wait_for_what_the_device_still_has_to_do(self, sampler):
        buffer = on_host(sampler, "cuda")
        buffer.sample()
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)  # half a second of updates that were enqueued before
        done = torch.cuda.Event()
        done.record()
        sample = buffer.sample()
        assert not done.query(), "sampling waited for the device"
        torch.cuda.synchronize()
        slot, stream = sample["index"].reshape(-1, 2).cpu().unbind(-1)
        assert sample["observation"].is_cuda
        assert torch.equal(sample["observation"].reshape(-1).cpu(), 1000.0 * stream + slot)


class OnDevice(torch.Tensor):
    """Host memory that, like that of a device, NumPy does not see."""

    def numpy(self, *_: object, **__: object) -> None:
        raise TypeError("can't convert a tensor on a device to numpy")

    def cpu(self, *_: object, **__: object) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def ended(device: str = "cpu") -> TensorDict:
    """Three steps of two streams, the first of which ends at its second step."""
    t = torch.arange(6.0).view(3, 2, 1)
    done = torch.zeros(3, 2, 1, dtype=torch.bool)
    done[1, 0] = True
    following = {"observation": t + 100, "reward": t, "done": done, "terminated": done.clone()}
    return TensorDict({"observation": t, "next": following}, [3, 2]).to(device)


def assert_same_state(storage: SlotStorage, other: SlotStorage) -> None:
    state, wanted = storage.state_dict(), other.state_dict()
    for name, value in wanted.items():
        assert torch.equal(state[name], value) if isinstance(value, torch.Tensor) else state[name] == value, name


class TestRunsOfAnotherDevice:
    """Contract: a storage on the host takes runs whose fields lie on a device, and has them when the call returns."""

    def test_final_observations_and_pending_successors_are_brought_to_the_host(self):
        plain, storage = SlotStorage(8, 2), SlotStorage(8, 2)

        def found_on_a_device(*args):
            found = find_ends(*args)
            return replace(found, finals=found.finals.as_subclass(OnDevice), tail=found.tail.as_subclass(OnDevice))

        for _ in range(2):
            plain.extend_batch(ended())
            with mock.patch.object(_slot_write, "find_ends", found_on_a_device):
                storage.extend_batch(ended())
        assert_same_state(storage, plain)

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
    def test_only_rows_on_a_device_are_copied_without_waiting(self, device, monkeypatch):
        """Nothing would keep a reader from looking at rows on the host before they are there."""
        run = ended()
        layout = RowLayout.from_tensordict(run)
        rows = torch.zeros(3, 2, layout.row_bytes, dtype=torch.uint8, device=device)
        copied, copy = [], torch.Tensor.copy_

        def copy_and_tell(rows, fields, *, non_blocking=False):
            copied.append(non_blocking)
            return copy(rows, fields, non_blocking=non_blocking)

        monkeypatch.setattr(torch.Tensor, "copy_", copy_and_tell)
        write_rows(layout, check_run(layout, run, where="test", extra="raise"), rows, slice(None))
        assert copied == [device == "cuda"] * len(layout.fields)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("pinned", [False, True])
    @pytest.mark.parametrize("num_streams", [1, 2])
    def test_a_run_on_cuda_is_stored_as_one_on_the_host(self, pinned, num_streams):
        plain, storage = SlotStorage(8, num_streams, pinned=pinned), SlotStorage(8, num_streams, pinned=pinned)
        for steps in (3, 1, 1, 3):
            run = ended()[:steps, :num_streams]
            plain.extend_batch(run)
            moved = run.to("cuda")
            torch.cuda.synchronize()
            torch.cuda._sleep(200_000_000)
            storage.extend_batch(moved)
            assert_same_state(storage, plain)


class Launched:
    """Stands for a kernel and keeps what it was launched with."""

    def __getitem__(self, grid: tuple[int, ...]) -> Launched:
        return self

    def __call__(self, *args: object, **_: object) -> None:
        self.args = args


@pytest.mark.parametrize(
    "lie",
    [
        lambda finals: finals,
        lambda finals: torch.cat([finals, finals + 1], 1)[:, : finals.shape[1]],
        lambda finals: torch.cat([finals, finals[:, :4]], 1),
        lambda finals: torch.cat([finals[:, :4], finals], 1)[:, 4:],
        lambda finals: finals.repeat_interleave(2, 0)[::2],
        lambda finals: finals.repeat_interleave(2, 1)[:, ::2],
        lambda finals: finals[:1].expand_as(finals),
    ],
    ids=["dense", "wider", "odd width", "odd start", "every other row", "every other byte", "one for all"],
)
def test_kernels_are_told_where_final_observations_lie(lie):
    """A packed run may hold them in any memory; the kernel that stores them counts in words of 8 bytes."""
    layout = RowLayout.from_tensordict(ended())
    finals = torch.arange(3 * layout.successor_bytes, dtype=torch.uint8).view(3, -1)
    finals = lie(finals)
    launched = Launched()
    with mock.patch.object(_fused, "_kernels", lambda: SimpleNamespace(place_finals=launched)):
        block = SlotStorage(8, 2, layout=layout).block
        _fused.write_finals(block, np.zeros((5, 3), np.int64), finals, once=True)
    words, stride = launched.args[1], launched.args[8]
    read = words.as_strided((3, layout.successor_bytes // 8), (stride, 1))
    assert torch.equal(read.contiguous().view(torch.uint8), finals[:, : layout.successor_bytes])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCuda:
    """Contract: on CUDA nothing waits for the device, kernels give the numbers of the torch operations, and streams
    are ordered."""

    @pytest.mark.parametrize("holes", [False, True])
    @pytest.mark.parametrize("n_steps", [1, 3])
    def test_kernels_give_the_numbers_of_the_torch_operations(self, n_steps, holes):
        buffer = filled("cuda", holes=holes)
        assert buffer.storage.block.may_have_holes == holes
        buffer.sampler.n_steps = n_steps
        made = []
        for usable in (True, False):
            with mock.patch.object(_fused, "available", lambda block, usable=usable: usable):
                buffer.set_rng(torch.Generator("cuda").manual_seed(3))
                made.append(buffer.sample())
        fused, plain = made
        for key in plain.keys(True, True):
            if key == ("next", "reward"):
                # A fused multiply-add rounds once where the torch operations round twice.
                torch.testing.assert_close(fused[key], plain[key], rtol=1e-6, atol=1e-7)
            else:
                assert torch.equal(fused[key], plain[key]), key

    def test_kernels_find_the_windows_of_the_torch_operations_beside_holes(self):
        storage, made = filled("cuda", holes=True).storage, []
        for usable in (True, False):
            with mock.patch.object(_fused, "available", lambda block, usable=usable: usable):
                storage.block.sampleable = None
                generator = torch.Generator("cuda").manual_seed(3)
                buffer = SlotReplayBuffer(storage=storage, sampler=SequenceSampler(3), generator=generator)
                made.append(buffer.sample(300))
        for key in made[1].keys(True, True):
            assert torch.equal(made[0][key], made[1][key]), key

    @pytest.mark.parametrize("whose", ["the sampler's graph", "a graph of the user"])
    def test_graph_captured_before_a_hole_does_not_draw_it(self, whose):
        buffer = filled("cuda", 4)
        layout, block = buffer.storage.layout, buffer.storage.block
        buffer.sample()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sample = buffer.sample()
        rows = torch.zeros(3, 4, layout.row_bytes, dtype=torch.uint8, device="cuda")
        rows.view(torch.int32)[..., layout.final_offset // 4] = -1
        buffer.extend_batch(PackedRun(layout, rows))
        buffer.end_streams(slice(0, 4))
        buffer.extend_batch(PackedRun(layout, rows))
        assert int((block.final == HOLE).sum()) == 4
        if whose == "a graph of the user":
            graph.replay()
        else:
            sample = buffer.sample()
        slot, stream = sample["index"].unbind(-1)
        assert not (block.final[slot * 4 + stream] == HOLE).any()
        assert len(sample["index"].unique(dim=0)) == 4 * (32 - 2), "all but the hole and the newest of each stream"

    def test_kernel_writes_give_the_bytes_of_the_torch_operations(self):
        kernels = filled("cuda").storage.state_dict()
        with mock.patch.object(_fused, "available", lambda block: False):
            plain = filled("cuda").storage.state_dict()
        host = filled("cpu").storage.state_dict()
        for name in ("positions", "ring", "final_step"):
            assert torch.equal(kernels[name], plain[name]), name
            assert torch.equal(kernels[name], host[name]), name

    @pytest.mark.parametrize("usable", [True, False], ids=["kernels", "torch operations"])
    @pytest.mark.parametrize("twice", [False, True])
    def test_final_observations_may_be_part_of_wider_rows(self, usable, twice):
        """``finals`` and ``tail`` as columns of larger memory, whose rows do not lie one behind the other."""
        run = ended()
        if twice:
            run["next", "done"][2, 0] = run["next", "terminated"][2, 0] = True
        packed = RowLayout.from_tensordict(run).pack(run)
        host = SlotStorage(8, 2, layout=packed.layout, final_capacity=9)
        storage = SlotStorage(8, 2, layout=packed.layout, device="cuda", final_capacity=9)
        host.extend_batch(packed)

        def wider(part: torch.Tensor) -> torch.Tensor:
            wide = torch.full((len(part), 3 * part.shape[1]), 77, dtype=torch.uint8, device="cuda")
            wide[:, : part.shape[1]] = part
            return wide[:, : part.shape[1]]

        with mock.patch.object(_fused, "available", lambda block: usable):
            storage.extend_batch(
                replace(packed, rows=packed.rows.cuda(), finals=wider(packed.finals), tail=wider(packed.tail))
            )
        state, wanted = storage.state_dict(), host.state_dict()
        live = [s * 9 + q for s, count in enumerate(wanted["positions"][FINALS].tolist()) for q in range(count + 1)]
        assert torch.equal(state["ring"], wanted["ring"])
        assert torch.equal(state["side"][live], wanted["side"][live])

    @pytest.mark.parametrize("n_steps", [1, 3])
    def test_writing_and_sampling_do_not_synchronise(self, n_steps):
        buffer = filled("cuda")
        buffer.sampler.n_steps = n_steps
        layout = buffer.storage.layout
        rows = torch.zeros(5, 64, layout.row_bytes, dtype=torch.uint8, device="cuda")
        rows.view(torch.int32)[..., layout.final_offset // 4] = -1
        finals = torch.zeros(2, layout.successor_bytes, dtype=torch.uint8, device="cuda")
        run = PackedRun(layout, rows, torch.tensor([7, 70]), finals)
        buffer.storage.block.room = 20
        buffer.extend_batch(run)
        buffer.sample()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            buffer.extend_batch(run)
            buffer.sample()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_sampling_works_inside_a_cuda_graph(self):
        buffer = filled("cuda")
        buffer.sample()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sample = buffer.sample()
        seen = set()
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
            assert bool((buffer.storage.generation_of(sample["index"]) == sample["index_generation"]).all())
            seen.add(str(flat_rows(sample[:8])))
        assert len(seen) == 3, "each replay must draw anew"

    def test_writer_on_another_stream_waits_for_a_queued_sample(self):
        buffer = filled("cuda", 4)
        before = buffer.storage["observation"].clone()
        side = torch.cuda.Stream()
        buffer.sample()  # the first one compiles and captures, which waits for the device
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # stands for gradient kernels queued before the sample
        sample = buffer.sample()
        with torch.cuda.stream(side):
            layout = buffer.storage.layout
            rows = torch.full((16, 4, layout.row_bytes), 77, dtype=torch.uint8, device="cuda")
            rows.view(torch.int32)[..., layout.final_offset // 4] = -1
            buffer.extend_batch(PackedRun(layout, rows))
        torch.cuda.synchronize()
        slot, stream = sample["index"].unbind(-1)
        assert torch.equal(sample["observation"], before[slot, stream])

    def test_current_stream_is_the_one_of_torch(self):
        device, other = torch.device("cuda"), torch.cuda.Stream()
        for _ in range(2):
            assert current_stream(device) == torch.cuda.current_stream(device)
            with torch.cuda.stream(other):
                assert current_stream(device) == other
        assert current_stream(torch.device("cuda", 0)) == torch.cuda.default_stream(0)

    def test_patch_on_the_device_with_handles_on_the_host_arrives_whole(self):
        """Each kind of memory is copied once: what is still in flight to the host is not read for a second copy."""
        rows, width = 64, 2**14
        buffer = SlotReplayBuffer(storage=SlotStorage(rows, next_obs="store"))
        handle = buffer.extend_batch(TensorDict({"x": torch.zeros(rows, width)}, [rows]))
        index, generation = handle.index[:, 0], handle.generation[:, 0]
        patch = torch.zeros(rows, width, device="cuda")
        for c in range(1, 40):
            torch.cuda._sleep(2_000_000)
            patch.fill_(c)
            future = buffer.submit_update_if_present(index=index, generation=generation, patch={"x": patch})
            assert future.result(timeout=30).updated.all()
            assert bool((buffer.storage["x"] == c).all())

    def test_batch_stays_whole_while_anything_of_it_is_held(self):
        buffer = filled("cuda")
        held = [buffer.sample() for _ in range(3)]
        views = [buffer.sample()["observation"][5:9] for _ in range(3)]
        weight = torch.ones(1, 1, device="cuda", requires_grad=True)
        products = [buffer.sample()["observation"] @ weight for _ in range(3)]  # autograd keeps the observations
        before = [flat_rows(sample[:64]) for sample in held], [view.clone() for view in views]
        wanted = sum(product.detach().sum() for product in products)
        for _ in range(20):
            buffer.sample()
        assert [flat_rows(sample[:64]) for sample in held] == before[0]
        assert all(torch.equal(view, copy) for view, copy in zip(views, before[1], strict=True))
        sum(product.sum() for product in products).backward()
        torch.testing.assert_close(weight.grad.reshape(()), wanted, rtol=1e-4, atol=0.0)

    def test_cpu_generator_serves_a_cuda_storage(self):
        buffer = filled("cuda")
        drawn = []
        for _ in range(2):
            buffer.set_rng(torch.Generator().manual_seed(11))
            drawn.append(buffer.sample()["index"])
        assert torch.equal(*drawn)

    def test_full_side_table_raises_before_writing(self):
        storage = SlotStorage(32, 2, device="cuda", final_capacity=3)
        t = torch.arange(6.0).view(6, 1, 1).expand(6, 2, 1)
        flag = torch.ones(6, 2, 1, dtype=torch.bool)
        step = {"observation": t, "next": {"observation": -t - 1, "done": flag, "terminated": flag}}
        with pytest.raises(RuntimeError, match="final_capacity"):
            storage.extend_batch(TensorDict(step, [6, 2]))
        assert len(storage) == 0
