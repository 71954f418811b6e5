# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""How an ensemble samples: choosing members, asking each once, and stacking what they give."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn.utils import _set_dispatch_td_nn_modules
from tensordict.utils import expand_right
from torchrl.data.replay_buffers.utils import pin_memory_output

from torchrl_ext.data._draw_order import in_turn
from torchrl_ext.data._ensemble_state import EnsembleState
from torchrl_ext.data._member_rows import MemberGroups
from torchrl_ext.data._member_samples import Drawn, stack_members
from torchrl_ext.data._members import Member


class EnsembleSampling(EnsembleState):
    """The part of :class:`~torchrl_ext.data.GroupedReplayBufferEnsemble` that samples."""

    @pin_memory_output
    def _sample(self, batch_size: int) -> tuple[Any, TensorDict]:
        shares = self._sampler.num_buffer_sampled
        if batch_size < 1 or batch_size % shares:
            raise ValueError(
                f"sample: the batch size must be a multiple of num_buffer_sampled={shares}, got {batch_size}. "
                "Nothing was drawn."
            )
        rows = batch_size // shares
        with in_turn(), self._replay_lock, self._write_lock:
            ids = self._choose(rows)
            groups = MemberGroups(ids, len(self._members), "sample")
            drawn = [self._draw(self._members[n], rows, span.stop - span.start) for n, span in groups]
        if not self._writer.tracks_generations:  # as in TorchRL, all members or none
            for part in drawn:
                part.info.pop("index_generation", None)
        data, info = stack_members(drawn, groups)
        owners = ids.to(info["index", "index"].device, non_blocking=True)
        info["index", "buffer_ids"] = expand_right(owners, info.batch_size).contiguous()
        if len(self._transform):
            with _set_dispatch_td_nn_modules(True):
                data = self._transform(data)
        if isinstance(data, TensorDictBase):
            info = info.reshape(data.batch_size)
            data.update(info)
        return data, info

    def _choose(self, rows: int) -> torch.Tensor:
        """Returns the member of each share of ``rows`` rows, int64 ``[num_buffer_sampled]`` on the host."""
        sampler, generator = self._sampler, self._rng
        if sampler.sample_from_all:
            return torch.arange(len(self._members))
        options = {"generator": generator, "device": "cpu" if generator is None else generator.device}
        if sampler.p is None:
            ids = torch.randint(len(self._members), (sampler.num_buffer_sampled,), **options)
        else:
            weights = self._sampleable(rows) if isinstance(sampler.p, str) else sampler.p
            ids = torch.multinomial(
                weights.to(options["device"]), sampler.num_buffer_sampled, True, generator=generator
            )
        # The host decides which members are asked; a generator on CUDA makes it wait for the choice.
        return ids.cpu()

    def _sampleable(self, rows: int) -> torch.Tensor:
        counts = []
        for member in self._members:
            with member.buffer._replay_lock:
                counts.append(float(member.buffer.sampler._sampleable_count(member.buffer.storage, rows)))
        if not any(counts):
            raise RuntimeError(f"sample: one member must have {rows} rows to draw from, got none. Nothing was drawn.")
        return torch.tensor(counts)

    @staticmethod
    def _draw(member: Member, rows: int, shares: int) -> Drawn:
        try:
            return member.draw(rows * shares, shares)
        except RuntimeError as error:
            raise RuntimeError(f"sample: {member.name} could not be sampled: {error}") from error
