# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""An ensemble of members that really differ: offline and online data, several tasks, TorchRL's buffers and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict
from torchrl.data import ImmutableDatasetWriter, ReplayBuffer, ReplayBufferEnsemble
from torchrl.envs.transforms import Transform

from torchrl_ext.data._ensemble_options import adapt_members, check_options
from torchrl_ext.data._ensemble_writing import EnsembleWriting
from torchrl_ext.data._slot_member import SlotMember
from torchrl_ext.data._stock_member import StockMember

__all__ = ["GroupedReplayBufferEnsemble"]


class GroupedReplayBufferEnsemble(EnsembleWriting):
    """A :class:`torchrl.data.ReplayBufferEnsemble` that groups rows once, with members of TorchRL's kind and ours.

    Metadata and results are TorchRL's: samples have batch size ``[num_buffer_sampled, rows]`` and carry
    ``("index", "buffer_ids")``, ``("index", "index")`` and, when every member tracks generations,
    ``"index_generation"``. Each member that was chosen draws once, whatever the number of its shares; the shares are
    put back, so that share ``i`` comes from the ``i``-th member chosen. The index of a row in a
    :class:`~torchrl_ext.data.SlotReplayBuffer` is its flat number ``slot * N + stream``.

    A member's own transform runs on all rows that it gives to a batch, then the ensemble's runs on the batch.
    ``len()`` counts members and ``ensemble[i]`` is member ``i``, as in TorchRL.

    Args:
        *members (ReplayBuffer): each a :class:`~torchrl_ext.data.SlotReplayBuffer`, or a buffer of TorchRL over
            TensorDicts in a one-dimensional tensor storage.

    Keyword Args:
        routing_key (NestedKey, optional): the key of a record's member id, for :meth:`extend`. A member that already
            stores records without this key gets them without it.
        routing_dim (int, optional): the batch dimension of written data whose entries are the members.
        p (list of float, Tensor or "sampleable", optional): weight of each member in the draw. ``"sampleable"`` weighs
            members by the records (or windows) that they can give now, and leaves out those that cannot give any.
            Defaults to None: all alike.
        sample_from_all (bool, optional): each member gives one share to every batch; excludes ``p``.
        num_buffer_sampled (int, optional): shares of a batch. Defaults to the number of members.
        batch_size, transform, prefetch, pin_memory, shared: as in TorchRL.
        visibility, max_pending_bytes, when_full: of submitted updates, see
            :class:`~torchrl_ext.data.SlotReplayBuffer`.
        generator (torch.Generator, optional): of the ensemble and all its members. Defaults to None: members keep
            theirs.

    Raises:
        TypeError: for a member of another kind.
        ValueError: for impossible options.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer, TensorDictRoundRobinWriter
        >>> from torchrl_ext.data import GroupedReplayBufferEnsemble, SlotReplayBuffer, SlotStorage
        >>> writer = TensorDictRoundRobinWriter(track_generations=True)
        >>> offline = TensorDictReplayBuffer(storage=LazyTensorStorage(100), writer=writer)
        >>> online = SlotReplayBuffer(storage=SlotStorage(100), transform=lambda td: td.select("value", "latent"))
        >>> replay = GroupedReplayBufferEnsemble(
        ...     offline, online, routing_key="source", p=[0.25, 0.75], num_buffer_sampled=8, batch_size=32
        ... )
        >>> value = torch.arange(6.0)
        >>> records = TensorDict(
        ...     {"value": value, "latent": torch.zeros(6), "source": torch.tensor([1, 0, 1, 1, 0, 0])}, [6]
        ... )
        >>> handles = replay.extend(records)
        >>> handles["index"].tolist()
        [0, 0, 1, 2, 1, 2]
        >>> result = replay.update_if_present(
        ...     index=handles.select("buffer_ids", "index"),
        ...     generation=handles["index_generation"],
        ...     patch={"latent": value + 1},
        ... )
        >>> result.updated_count, online.storage["latent"][:3, 0].tolist()
        (6, [1.0, 3.0, 4.0])
    """

    def __init__(
        self,
        *members: ReplayBuffer,
        routing_key: NestedKey | None = None,
        routing_dim: int | None = None,
        p: list[float] | torch.Tensor | Literal["sampleable"] | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        batch_size: int | None = None,
        transform: Transform | Callable | None = None,
        generator: torch.Generator | None = None,
        prefetch: int | None = None,
        pin_memory: bool = False,
        shared: bool = False,
        visibility: Literal["ordered", "eventual"] = "ordered",
        max_pending_bytes: int = 2**30,
        when_full: Literal["block", "raise", "drop_oldest"] = "block",
    ) -> None:
        self._members = adapt_members(members)
        check_options(len(members), routing_key, routing_dim, p, sample_from_all, num_buffer_sampled)
        self._prepare_updates(visibility, max_pending_bytes, when_full)
        super().__init__(
            *members,
            routing_key=routing_key,
            routing_dim=routing_dim,
            p=p,
            sample_from_all=sample_from_all,
            num_buffer_sampled=None if sample_from_all else num_buffer_sampled,
            batch_size=batch_size,
            transform=transform,
            generator=generator,
            prefetch=prefetch,
            pin_memory=pin_memory,
            shared=shared,
        )
        self._order_draws_ahead()

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Sets the generator of the ensemble and all members; None leaves the members theirs."""
        if generator is None:
            self._rng = None
        else:
            super().set_rng(generator)

    def empty(self, empty_write_count: bool = True) -> None:
        """Empties every member and drops batches sampled ahead.

        Raises:
            RuntimeError: when a member holds a dataset that cannot be emptied. Nothing was changed.
        """
        for member in self._members:
            if isinstance(member.buffer.writer, ImmutableDatasetWriter):
                raise RuntimeError(
                    f"empty: {member.name} must be writable, it has a dataset's writer. Nothing was changed."
                )
        with self._futures_lock:
            self._clear_prefetch_queue_locked()
            with self._replay_lock:
                for member in self._members:
                    member.buffer.empty(empty_write_count=empty_write_count)

    def end_streams(self, **keys: NestedKey | None) -> None:
        """Cuts the streams of all members, see :meth:`SlotReplayBuffer.end_streams`.

        Members of TorchRL's kind are cut by TorchRL's own rules: each must hold one stream, with a slice sampler and a
        writer that tracks generations.

        Keyword Args:
            end_key, terminated_key, truncated_key: see :meth:`torchrl.data.ReplayBufferEnsemble.end_streams`, for such
                members.

        Raises:
            RuntimeError: when a member of TorchRL's kind cannot be cut; nothing was changed then. One of ours whose
                side table is full raises after those.
        """
        stock = [member for member in self._members if isinstance(member, StockMember)]
        for stock_member in stock:
            stock_member.check_end_streams()
        # TorchRL's method for the members of its kind alone, with the locks and queues of this ensemble.
        view = object.__new__(ReplayBufferEnsemble)
        shared = {**self.__dict__, "_synchronize_futures_locked": self._synchronize_futures_locked}
        view.__dict__.update(shared, _rbs=tuple(member.buffer for member in stock))
        view.end_streams(**keys)
        with self._replay_lock, self._write_lock:
            for member in self._members:
                if isinstance(member, SlotMember):
                    member.buffer.end_streams()

    def __getitem__(self, index: Any) -> Any:
        """Returns member ``i`` for an integer, and an ensemble of some members for a slice or a list of integers.

        Of a tuple the rest are rows: those of one member, or of several members stacked.
        """
        if isinstance(index, tuple):
            chosen, rows = self[index[0]], index[1:]
            if not rows or not isinstance(chosen, GroupedReplayBufferEnsemble):
                return chosen[rows] if rows else chosen
            parts = [member[rows] for member in chosen._rbs]
            if len({len(part.batch_size) for part in parts}) > 1:
                raise ValueError(
                    "GroupedReplayBufferEnsemble: rows of several members must have as many dimensions to be stacked, "
                    f"got {[list(part.batch_size) for part in parts]} (streams and slots, where a member has streams). "
                    "Index the members one by one."
                )
            return TensorDict.maybe_dense_stack(parts)
        if index is Ellipsis or (isinstance(index, slice) and index == slice(None)):
            return self
        if hasattr(index, "__index__") and not getattr(index, "ndim", 0):
            return self._rbs[int(index)]
        numbers = list(range(len(self._members)))[index] if isinstance(index, slice) else [int(i) for i in index]
        sampler = self._sampler
        return GroupedReplayBufferEnsemble(
            *(self._rbs[number] for number in numbers),
            routing_key=self.routing_key,
            p=sampler.p[numbers] if isinstance(sampler.p, torch.Tensor) else sampler.p,
            sample_from_all=sampler.sample_from_all,
            num_buffer_sampled=sampler.num_buffer_sampled,
            batch_size=self._batch_size,
            transform=self._transform,
            visibility=self.visibility,
            max_pending_bytes=self._updates.max_pending_bytes,
            when_full=self._updates.when_full,
        )
