# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The contract of a ring: one producer hands steps of its streams to one consumer.

Roles      One producer (a worker, writing one step of its streams per slot) and one consumer (the learner's process,
           reading spans of steps). Each end belongs to one thread.
State      ``capacity`` slots of packed rows ``[n, row_bytes]``; an arena of final observations, used as a ring of its
           own; the tail, which is the successor of the newest row of each stream; counters, each with one writer.
Publish    The producer reserves a slot, writes its rows, final observations and tail, then moves ``ISSUED``. A slot is
           published once it is issued and its copy is known to be complete (at once in host memory).
Ordering   The producer fences between writing and moving ``ISSUED``; the consumer fences between reading ``ISSUED`` and
           the slots, and again between reading the slots and moving ``READ``; the producer fences between reading
           ``READ`` and writing a slot again. So a slot is never read before it is whole, nor written while it is read.
           The tail is overwritten in place: it counts only when it was complete, and not begun anew, around the copy.
Full       ``reserve`` returns None when no slot, no credit or no room for a final observation of every stream is
           left. It is asked before the environment steps, so that no step is ever dropped.
Empty      ``read_span`` returns None.
Death      Either end closes its side; the other one's next call that would wait raises ``RingClosed``, the consumer's
           once everything published was read. ``is_alive`` tells an end about the other's process: where it is false
           and nothing was closed, such calls raise ``RingPeerDied``.
Lifetime   The memory lives as long as any end has it mapped or its descriptor open, and nothing of it has a name.
           What ``reserve`` returns is valid until ``publish``; what a span shows, until it is committed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import numpy as np
import torch
from tensordict import TensorDict

from torchrl_ext.data import PackedRun

__all__ = ["Span"]


class Span:
    """Consecutive published steps, borrowed from a ring until they are committed.

    ``with span:`` commits at the end of the block, unless it is left by an exception: then nothing was read, and the
    span stays open.

    Attributes:
        first_step (int): the first step, counted from the ring's beginning.
        num_steps (int): steps.
        begins (bool): whether the streams began anew with the first step: it follows nothing that was read before.
        versions (np.ndarray): int32 ``[K]``, of the policy that acted in each step; borrowed too.
    """

    def __init__(
        self,
        run: PackedRun,
        first_step: int,
        commit: Callable[[], None],
        release: Callable[[], None],
        *,
        begins: bool = False,
        versions: np.ndarray | None = None,
    ) -> None:
        self._run: PackedRun | None = run
        self._commit, self._release = commit, release
        self.begins, self.versions = begins, np.zeros(run.shape[0], np.int32) if versions is None else versions
        self.first_step, self.num_steps = first_step, run.shape[0]

    @property
    def run(self) -> PackedRun:
        """The steps as a run for ``SlotStorage.extend_batch``; raises ``RuntimeError`` once committed or released."""
        if self._run is None:
            raise RuntimeError(
                f"Span: steps {self.first_step} to {self.first_step + self.num_steps - 1} were committed or released "
                "and may be overwritten; copy what is needed before."
            )
        return self._run

    @property
    def rows(self) -> torch.Tensor:
        """uint8 ``[K, n, row_bytes]``, a view of the ring."""
        return self.run.rows

    def view(self) -> TensorDict:
        """Returns the rows as a TensorDict ``[K, n]`` of views of the ring."""
        return self.run.view()

    def commit(self) -> None:
        """Gives the slots back; a second call does nothing."""
        if self._run is not None:
            self._run = None
            self._commit()

    def release(self) -> None:
        """Gives the span up unread: the same steps are lent again. Does nothing once committed."""
        if self._run is not None:
            self._run = None
            self._release()

    def __enter__(self) -> Span:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.commit()
