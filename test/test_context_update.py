# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Latents of sampled sequences become updates: one row per record, the last one, TorchRL's answer."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torchrl
from tensordict import TensorDict

from torchrl_ext.data import SequenceSampler, SlotReplayBuffer, SlotStorage, context_update, replay_context_update


def sample_of(index: torch.Tensor, *, ensemble: bool = False) -> TensorDict:
    """A sample ``[B, T + 1]`` whose generations name their rows."""
    batch = index.shape[:2]
    handles = TensorDict({"buffer_ids": index[..., 1], "index": index[..., 0]}, batch) if ensemble else index
    generation = torch.arange(batch.numel()).view(batch)
    return TensorDict({"index": handles, "index_generation": generation}, batch)


def latents(batch: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """State and belief that name their row."""
    state = torch.arange(float(batch[0] * (batch[1] - 1))).view(batch[0], batch[1] - 1, 1).repeat(1, 1, 3)
    return state, -state[..., :2]


def by_dict(index: torch.Tensor) -> list[int]:
    """The slow and plainly right version: a dict filled in arrival order, read in the order of coordinates."""
    last = {tuple(pair): row for row, pair in enumerate(index[:, 1:].flatten(0, 1).tolist())}
    return [last[pair] for pair in sorted(last)]


def theirs():
    """TorchRL's function, from the scripts that its wheel carries."""
    path = Path(torchrl.__file__).parents[1] / "sota-implementations" / "dreamer_v3" / "dreamer_v3_replay.py"
    if not path.exists():
        pytest.skip("this wheel of torchrl does not carry its scripts")
    spec = importlib.util.spec_from_file_location("dreamer_v3_replay", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.replay_context_update


class TestWhichRowsCount:
    @pytest.mark.parametrize("seed", range(20))
    @pytest.mark.parametrize("ensemble", [False, True])
    def test_last_row_of_each_record_is_kept_in_the_order_of_records(self, seed, ensemble):
        generator = torch.Generator().manual_seed(seed)
        index = torch.randint(0, 4, (5, 7, 2), generator=generator)
        sample = sample_of(index, ensemble=ensemble)
        state, belief = latents(sample.shape)
        handles, generation, patch = replay_context_update(sample, state, belief)
        keep = by_dict(index if not ensemble else index.flip(-1))
        assert patch["state"][:, 0].tolist() == [float(row) for row in keep]
        assert patch["belief"][:, 0].tolist() == [-float(row) for row in keep]
        assert torch.equal(generation, sample["index_generation"][:, 1:].flatten()[keep])
        slots = handles["index"] if ensemble else handles[:, 0]
        assert torch.equal(slots, index[:, 1:].flatten(0, 1)[keep, 0])

    @pytest.mark.parametrize("seed", range(10))
    def test_ensemble_handles_give_what_torchrl_gives(self, seed):
        generator = torch.Generator().manual_seed(seed)
        sample = sample_of(torch.randint(0, 5, (4, 9, 2), generator=generator), ensemble=True)
        state, belief = latents(sample.shape)
        ours, expected = replay_context_update(sample, state, belief), theirs()(sample, state, belief)
        assert (ours[0] == expected[0]).all()
        assert torch.equal(ours[1], expected[1])
        assert all(torch.equal(ours[2][key], expected[2][key]) for key in ("state", "belief"))

    def test_coordinates_too_large_for_one_key_are_sorted_by_columns(self):
        index = torch.tensor([[[0, 0], [2**62, 2**61], [1, 5], [2**62, 2**61], [1, 4]]])
        handles, _, patch = replay_context_update(sample_of(index), *latents(torch.Size([1, 5])))
        assert handles.tolist() == [[1, 4], [1, 5], [2**62, 2**61]]
        assert patch["state"][:, 0].tolist() == [3.0, 1.0, 2.0]

    @pytest.mark.parametrize("seed", range(5))
    def test_our_buffers_need_no_distinct_rows(self, seed):
        """The same bytes are stored, and the rows that a later one replaces are reported as superseded."""
        generator = torch.Generator().manual_seed(seed)
        index = torch.randint(0, 4, (5, 7, 2), generator=generator)
        state, belief = latents(index.shape[:2])
        stored = []
        for distinct in (False, True):
            buffer = SlotReplayBuffer(storage=SlotStorage(4, 4, next_obs="store"))
            zeros = {"state": torch.zeros(4, 4, 3), "belief": torch.zeros(4, 4, 2)}
            handle = buffer.extend_batch(TensorDict(zeros, [4, 4]))
            sample = TensorDict({"index": index, "index_generation": torch.zeros(5, 7, dtype=torch.int64)}, [5, 7])
            given, generation, patch = replay_context_update(sample, state, belief, distinct=distinct)
            result = buffer.update_if_present(index=given, generation=generation, patch=patch)
            assert bool((handle.generation == 0).all()) and result.stale_count == 0
            assert result.updated_count == len(by_dict(index))
            stored.append((buffer.storage["state"].clone(), buffer.storage["belief"].clone()))
        assert all(torch.equal(*pair) for pair in zip(*stored, strict=True))

    def test_one_column_of_slots_is_enough(self):
        index = torch.tensor([[0, 3, 1, 3]])
        handles, _, patch = replay_context_update(sample_of_slots(index), *latents(torch.Size([1, 4])))
        assert (handles.tolist(), patch["state"][:, 0].tolist()) == ([1, 3], [1.0, 2.0])

    @pytest.mark.parametrize("seed", range(5))
    def test_device_rows_that_a_later_one_replaces_name_no_record(self, seed):
        """What CUDA handles get, on host memory: as many rows as before, and generation -1 for those replaced."""
        generator = torch.Generator().manual_seed(seed)
        index = torch.randint(0, 4, (5, 7, 2), generator=generator)
        rows = index[:, 1:].flatten(0, 1)
        is_last = context_update._is_last(rows)
        assert is_last.nonzero().flatten().tolist() == sorted(by_dict(index))


def sample_of_slots(index: torch.Tensor) -> TensorDict:
    return TensorDict({"index": index, "index_generation": torch.zeros_like(index)}, index.shape)


class TestThePatch:
    def test_gradients_stay_behind_and_the_dtype_is_the_stored_one(self):
        sample = sample_of(torch.arange(8).view(1, 4, 2))
        state, belief = (latent.bfloat16().requires_grad_() for latent in latents(sample.shape))
        _, _, patch = replay_context_update(sample, state, belief)
        assert all(leaf.dtype == torch.float32 and not leaf.requires_grad for leaf in patch.values())

    @pytest.mark.parametrize("which", ["state", "belief", "sample"])
    def test_shapes_that_do_not_fit_are_refused(self, which):
        sample = sample_of(torch.arange(8).view(1, 4, 2))
        state, belief = latents(sample.shape)
        if which == "sample":
            sample = sample.reshape(-1)
        elif which == "state":
            state = state[:, :-1]
        else:
            belief = belief.flatten(0, 1)
        with pytest.raises(ValueError, match=f"replay_context_update: {which} must have"):
            replay_context_update(sample, state, belief)

    def test_stored_latents_are_those_of_the_row_before(self):
        steps, streams = 12, 3
        storage = SlotStorage(16, streams, next_obs="store")
        buffer = SlotReplayBuffer(storage=storage, sampler=SequenceSampler(4), batch_size=32)
        clock = torch.arange(steps).view(-1, 1, 1) + 100 * torch.arange(streams).view(1, -1, 1)
        zeros = torch.zeros(steps, streams, 2)
        buffer.extend_batch(TensorDict({"clock": clock, "state": zeros, "belief": zeros}, [steps, streams]))
        sample = buffer.sample()
        state = sample["clock"][:, :-1].float().repeat(1, 1, 2)
        index, generation, patch = replay_context_update(sample, state, -state)
        result = buffer.submit_update_if_present(index=index, generation=generation, patch=patch).result(timeout=60)
        assert result.updated.all()
        slot, stream = index.unbind(-1)
        stored = storage["state"][slot, stream, 0]
        assert torch.equal(stored, storage["clock"][slot, stream, 0].float() - 1)
        assert torch.equal(storage["belief"][slot, stream, 1], -stored)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCuda:
    @pytest.mark.parametrize("handles_on", ["cpu", "cuda"])
    def test_nothing_waits_for_the_device(self, handles_on):
        index = torch.randint(0, 4, (5, 7, 2))
        sample = sample_of(index).to(handles_on)
        state, belief = (latent.cuda() for latent in latents(index.shape[:2]))
        replay_context_update(sample, state, belief)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            handles, generation, patch = replay_context_update(sample, state, belief)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        kept = (generation >= 0).cpu()
        rows = patch["state"].cpu()[kept, 0].long().tolist()
        assert sorted(rows) == sorted(by_dict(index))
        assert torch.equal(handles.cpu()[kept], index[:, 1:].flatten(0, 1)[rows])
