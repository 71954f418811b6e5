# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Sampler of windows of consecutive steps from a :class:`~torchrl_ext.data.SlotStorage`."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import NestedKey, TensorDict

from torchrl_ext.data import _fused as fused
from torchrl_ext.data._block import SlotBlock
from torchrl_ext.data._episode_windows import draw_within_episodes, episode_starts
from torchrl_ext.data._fresh_windows import FreshWindows
from torchrl_ext.data._gather import Span
from torchrl_ext.data._moves import arrived
from torchrl_ext.data._transitions import _span
from torchrl_ext.data._window_rows import BatchPlan, gather_fused, gather_on_device, gather_on_host, plan_batch
from torchrl_ext.data._windows import (
    KnownStarts,
    Starts,
    Windows,
    capturing,
    draw_on_device,
    draw_on_host,
    surely_valid,
    valid_starts,
)
from torchrl_ext.data.batch_pool import BatchPool
from torchrl_ext.data.slot_sampler import SlotSampler
from torchrl_ext.data.storages import SlotStorage

__all__ = ["SequenceSampler"]


class SequenceSampler(SlotSampler):
    """Draws windows of ``seq_len`` consecutive steps of one stream, uniformly over all valid starts of all streams.

    Every draw is independent, with replacement. A window lives as a whole: it crosses neither the head nor the tail of
    its stream. Where successors are derived (``next_obs="derive"``), the successor of its last row is known too, and
    no row is in it whose stream was cut before its successor was known. Unless ``strict_episodes``, it may go on past
    an episode's end into the next episode.

    With :class:`~torchrl_ext.data.SlotReplayBuffer` a batch of ``B * seq_len`` rows has batch size ``[B, seq_len]``
    and, beside the stored fields of each row:

    ======================  =====================================================================================
    ``("next", key)``       the row's true successor, for the keys of ``layout.next_keys``: the next row's
                            observation, or the final one where an episode ended
    ``"index"``             (slot, stream) of each row, int64 ``[B, seq_len, 2]``
    ``"index_generation"``  generation of each row, int64 ``[B, seq_len]``
    ======================  =====================================================================================

    On CUDA nothing is read back, except once after a write whether there is anything to draw, where heads and tails
    do not tell (``strict_episodes``, streams hardly longer than a window, streams that were cut). A CPU generator
    serves a CUDA storage.

    Args:
        seq_len (int): steps of a window, at least 1 and at most the storage's capacity.

    Keyword Args:
        strict_episodes (bool, optional): ``True`` draws only windows in which no row but the last ends an episode, by
            a flag, by a reset that no flag announced, or by a cut. Defaults to ``False``.
        online (bool, optional): ``True`` serves newly completed windows first, each once, then uniform ones: the steps
            of a stream are cut into windows that do not overlap, from its first step on (or its first after ``empty()``
            or a row that no window may hold). The window that lies the most steps behind its stream's head comes first;
            where that is equal, streams take turns. What was overwritten before its turn is dropped. A sampler that was
            just made has served nothing; batches sampled ahead (``prefetch``) count as served. In memory that other
            processes write, windows wait until the stream is two rows further. Defaults to ``False``.
        flat (bool, optional): ``True`` gives batches of batch size ``[B * seq_len]``, window by window. Defaults to
            ``False``.

    Raises:
        ValueError: when ``seq_len`` is below 1, or for ``online`` with ``strict_episodes``: where episodes end is in
            the rows, which are not read to count windows.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_ext.data import SequenceSampler, SlotReplayBuffer, SlotStorage
        >>> t = torch.arange(10.0).view(10, 1, 1).expand(10, 2, 1)
        >>> run = TensorDict({"observation": t, "next": {"observation": t + 1, "reward": t}}, [10, 2])
        >>> buffer = SlotReplayBuffer(storage=SlotStorage(8, 2), sampler=SequenceSampler(4), batch_size=12)
        >>> _ = buffer.extend_batch(run)
        >>> sample = buffer.sample()
        >>> sample.batch_size, sample["index"].shape
        (torch.Size([3, 4]), torch.Size([3, 4, 2]))
        >>> bool((sample["observation"][:, 1:] == sample["next", "observation"][:, :-1]).all())
        True
    """

    def __init__(
        self, seq_len: int, *, strict_episodes: bool = False, online: bool = False, flat: bool = False
    ) -> None:
        if not isinstance(seq_len, int) or seq_len < 1:
            raise ValueError(f"SequenceSampler: seq_len must be an int >= 1, got {seq_len!r}.")
        if online and strict_episodes:
            raise ValueError(
                "SequenceSampler: online=True must go with strict_episodes=False, got both; windows are counted "
                "without reading where episodes end."
            )
        self.seq_len = seq_len
        self.strict_episodes, self.online, self.flat = strict_episodes, online, flat
        self._empty()

    def draw_batch(
        self,
        storage: SlotStorage,
        batch_size: int,
        *,
        contiguous: bool = False,
        device: torch.device | None = None,
        pool: BatchPool | None = None,
    ) -> tuple[TensorDict, dict[NestedKey, torch.Tensor]]:
        """Draws and assembles ``batch_size`` rows; see the class and :meth:`SlotSampler.draw_batch`.

        Returns:
            tuple: the batch, and its handles row by row, ``"index"`` ``[B * seq_len, 2]`` and ``"index_generation"``.

        Raises:
            ValueError: when ``batch_size`` is not a multiple of ``seq_len``, or that exceeds the capacity.
            RuntimeError: when no window can be drawn.
        """
        count, seq_len = self._count(storage, batch_size), self.seq_len
        block = storage.block
        plan = plan_batch(block.layout, torch.Size([batch_size] if self.flat else [count, seq_len]))
        if block.on_device:
            raw = self._gather_on_device(storage, count, plan)
        else:
            raw = gather_on_host(block, self._draw_on_host(storage, count), seq_len, plan, pool)
        if device is not None and device != raw.device:
            raw = arrived(raw, device)
        return plan.batch(raw, contiguous=contiguous, pool=pool)

    def _count(self, storage: SlotStorage, batch_size: int) -> int:
        seq_len = self.seq_len
        if batch_size < 1 or batch_size % seq_len:
            below = batch_size // seq_len * seq_len
            nearest = f"the nearest is {seq_len}" if below < 1 else f"the nearest are {below} and {below + seq_len}"
            raise ValueError(
                f"SequenceSampler: batch_size counts rows and must be a multiple of seq_len={seq_len}, got "
                f"{batch_size}; {nearest}. Nothing was drawn."
            )
        if seq_len > storage.capacity:
            raise ValueError(
                f"SequenceSampler: seq_len must be at most the storage's capacity {storage.capacity}, got {seq_len}. "
                "Nothing was drawn."
            )
        if not storage.initialized:
            self._refuse("an empty storage")
        return batch_size // seq_len

    def _refuse(self, got: str) -> NoReturn:
        what = "without a reset inside" if self.strict_episodes else "whose successors are known"
        raise RuntimeError(
            f"sample: a stream must hold {self.seq_len} consecutive steps {what}, got {got}. Nothing was changed; "
            "write more steps or lower seq_len."
        )

    # ------------------------------------------------------------------ on the host

    def _draw_on_host(self, storage: SlotStorage, count: int) -> np.ndarray:
        """Returns the unwrapped first rows of windows, fresh ones first."""
        block, seq_len, rng = storage.block, self.seq_len, self._rng
        fresh = self._fresh.take(storage, count) if self.online else None
        served = None if fresh is None or not len(fresh) else fresh.unwrapped(block.num_streams)
        missing = count if served is None else count - len(served)
        if served is not None and not missing:
            return served
        if self.strict_episodes:
            # Draws that were made before it is clear that there is nothing to draw must not count.
            state = torch.get_rng_state() if rng is None else rng.get_state()
            drawn = draw_within_episodes(block, self._span(block), seq_len, missing, rng)
            if drawn is None:
                (torch.set_rng_state if rng is None else rng.set_state)(state)
        else:
            drawn = draw_on_host(block, seq_len, missing, rng)
        if drawn is None:
            self._refuse("none")
        return drawn if served is None else np.append(served, drawn)

    # ------------------------------------------------------------------ on a device

    def _gather_on_device(self, storage: SlotStorage, count: int, plan: BatchPlan) -> torch.Tensor:
        block, span = storage.block, self._span(storage.block)
        sure = not self.strict_episodes and surely_valid(block, self.seq_len)
        starts = self._known.get(storage, self._starts, sure=sure, refuse=lambda: self._refuse("none"))
        # What a graph replays cannot be new, so inside a capture all windows are uniform.
        fresh = self._fresh.take(storage, count) if self.online and not capturing(block) else None
        missing = count if fresh is None else count - len(fresh)
        windows = draw_on_device(starts, block, missing, self._rng)
        if fresh is not None and len(fresh):
            # A few hundred bytes of pageable memory: the driver copies them at once, without waiting for the device.
            served = torch.from_numpy(np.stack([fresh.stream, fresh.step])).to(block.device, non_blocking=True)
            windows = Windows(torch.cat([served[0], windows.stream]), torch.cat([served[1], windows.step]))
        if starts.row_offset is not None and fused.can_sample(block, span, 1):
            return gather_fused(block, windows, starts.row_offset, span, self.seq_len, plan)
        return gather_on_device(block, windows, self.seq_len, plan)

    def _starts(self, block: SlotBlock) -> Starts[torch.Tensor]:
        if self.strict_episodes:
            return episode_starts(block, self._span(block), self.seq_len)
        return valid_starts(block, self.seq_len)

    @staticmethod
    def _span(block: SlotBlock) -> Span:
        return _span(block.layout, ("next", "reward"), 1)

    # ------------------------------------------------------------------ TorchRL's sampler interface

    def sample(self, storage: SlotStorage, batch_size: int) -> NoReturn:
        """Raises ``RuntimeError``: a stock buffer has no place for windows."""
        raise RuntimeError(
            "SequenceSampler: windows are assembled by SlotReplayBuffer, got a stock ReplayBuffer. Nothing was drawn."
        )

    def _sampleable_count(self, storage: SlotStorage, batch_size: int) -> int:
        if not storage.initialized or self.seq_len > storage.capacity:
            return 0
        # What a device finds out is kept, so a write that is not done yet must not be overlooked.
        with storage._lock, storage._order:
            return int(self._starts(storage.block).ends[-1])

    def take_back(self) -> None:
        """Forgets that the fresh windows of the batch drawn last were served (a reader that was disturbed drops it)."""
        self._fresh.take_back()

    def _empty(self) -> None:
        self._fresh = FreshWindows(self.seq_len)
        self._known = KnownStarts()

    def state_dict(self) -> dict[str, Any]:
        """Returns which windows were served (``online``); options are the constructor's."""
        return OrderedDict(self._fresh.state())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`; raises ``ValueError`` when it is not one, and changes nothing then."""
        self._fresh = FreshWindows.from_state(self.seq_len, state_dict)

    def dumps(self, path: str | Path) -> None:
        """Writes :meth:`state_dict` under a folder."""
        Path(path).mkdir(exist_ok=True)
        torch.save(dict(self.state_dict()), Path(path) / "sampler.pt")

    def loads(self, path: str | Path) -> None:
        """Reads what :meth:`dumps` wrote."""
        self.load_state_dict(torch.load(Path(path) / "sampler.pt", weights_only=True))

    def __repr__(self) -> str:
        options = f"strict_episodes={self.strict_episodes}, online={self.online}, flat={self.flat}"
        return f"{type(self).__name__}({self.seq_len}, {options})"
