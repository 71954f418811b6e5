# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What a collector's state is, and how its streams begin anew."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torchrl_ext.collectors._batch_assembly import BatchAssembly
from torchrl_ext.collectors._delivery import Delivery

__all__ = ["CollectorState"]

_NEEDED = ("frames", "iter", "seed", "epoch", "num_streams", "steps")


class CollectorState:
    """Counters and seeds, across a set seed, a saved state and a resume.

    Roles      The learner's thread, holding the workers' lock.
    Ordering   Counters change while every worker rests, so that no credit is granted by numbers of before.
    Death      A dead worker is looked after when its rows are dropped, see :class:`WorkerSet`.

    Args:
        delivery (Delivery): counts rows.
        assembly (BatchAssembly): counts batches, and may hold rows of one that is not complete.

    Keyword Args:
        level (bool): whether all workers must stand at the same step.
    """

    def __init__(self, delivery: Delivery, assembly: BatchAssembly, *, level: bool) -> None:
        self._delivery, self._workers, self._credit = delivery, delivery.workers, delivery.credit
        self._assembly, self._level = assembly, level
        self._kept: OrderedDict | None = None

    def set_seed(self, seed: int, static_seed: bool) -> None:
        """Begins all streams anew with a seed."""
        self._begin_anew(seed, 0, static_seed)

    def state_dict(self) -> OrderedDict:
        """Returns the counters of what the caller got, and the seeds."""
        if self._kept is not None:
            return self._kept.copy()
        with self._workers.lock:
            return self._now()

    def keep(self) -> None:
        """Keeps the state for whoever asks when the workers have gone; waits for nobody."""
        self._kept = self._now()

    def _now(self) -> OrderedDict:
        waiting = [self._assembly.partial_steps(worker) for worker in self._workers]
        steps = [worker.steps - partial for worker, partial in zip(self._workers, waiting, strict=True)]
        held = sum(worker.num_streams * partial for worker, partial in zip(self._workers, waiting, strict=True))
        return OrderedDict(
            frames=self._delivery.frames - held,
            iter=self._assembly.count,
            seed=self._workers.seed,
            epoch=self._workers.epoch,
            num_streams=self._workers.num_streams,
            steps=steps,
            versions={} if self._workers.scheme is None else self._workers.scheme.versions,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on counting from a state, with seeds of a new epoch.

        Raises:
            ValueError: for a state of another number of streams, or one that lacks a counter. Nothing was changed.
        """
        missing = [name for name in _NEEDED if name not in state]
        if missing:
            raise ValueError(
                f"RingCollector: the state must have {list(_NEEDED)}, got one without {missing}. Nothing was changed."
            )
        workers, steps = self._workers, state["steps"]
        if state["num_streams"] != workers.num_streams:
            raise ValueError(
                f"RingCollector: the state must be of {workers.num_streams} streams, got {state['num_streams']}. "
                "Nothing was changed."
            )
        if len(steps) != len(workers) or self._level:  # other blocks, or uneven ones: each goes on from the same step
            steps = [state["frames"] // workers.num_streams] * len(workers)

        def count() -> None:
            for worker, delivered in zip(workers, steps, strict=True):
                worker.count_from(delivered)
            self._delivery.frames = sum(worker.steps * worker.num_streams for worker in workers)
            self._assembly.count = state["iter"]

        self._begin_anew(state["seed"], state["epoch"] + 1, workers.static_seed, count)

    def _begin_anew(
        self, seed: int | None, epoch: int, static_seed: bool, count: Callable[[], None] = lambda: None
    ) -> None:
        """Drops what was not delivered, counts anew where that is asked for, then seeds and cuts all streams."""
        workers, timeout = self._workers, self._workers.boot_timeout
        with workers.lock, self._credit.pause():
            for worker in workers:
                dropped = self._assembly.drop_partial(worker)
                self._delivery.frames -= dropped * worker.num_streams
                worker.dropped += dropped
                worker.drop_unread(timeout)
                workers.look_after(worker)
            self._credit.forget_asked()
            workers.seed, workers.epoch, workers.static_seed = seed, epoch, static_seed
            count()
            for worker in workers:
                worker.begin_anew(seed=seed, epoch=epoch, static_seed=static_seed)
            for worker in workers:
                worker.wait_for("seed", timeout)
