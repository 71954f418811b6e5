# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The sender's half of :class:`~torchrl_ext.weight_update.SeqlockWeightSyncScheme`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.weight_update import WeightSyncScheme
from torchrl.weight_update.utils import _resolve_model

from torchrl_ext.weight_update._channel import Channel
from torchrl_ext.weight_update._leaves import Weights
from torchrl_ext.weight_update._publisher import Publisher, addressed
from torchrl_ext.weight_update._sending import SendingEnd
from torchrl_ext.weight_update.weight_layout import WeightLayout

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SenderSide"]


class SenderSide(WeightSyncScheme):
    """Makes the channels and publishes to them."""

    _num_workers: int | None
    _transport: Literal["auto", "host", "ipc"]
    _connect_timeout: float
    _layout: WeightLayout | None
    _channels: dict[int, Channel]
    _publisher: Publisher | None
    _initial: dict[int, Weights] | None
    """The first weights of each worker, until they were sent."""

    def _init_on_sender_impl(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: nn.Module | None = None,
        weights: TensorDictBase | None = None,
        params_map: Mapping[int, TensorDictBase] | None = None,
        devices: Sequence[torch.device] | None = None,
        num_workers: int | None = None,
        ctx: Any = None,
    ) -> None:
        """Makes the channels.

        Give one of ``model``, ``weights``, ``params_map`` (the first weights of each worker) and ``context`` (whose
        ``model_id`` attribute is the model). Workers know their devices: of ``devices`` only the number counts, and the
        multiprocessing context ``ctx`` is not needed.
        """
        given = [value for value in (context, model, weights, params_map) if value is not None]
        if len(given) != 1 or (context is not None and model_id is None):
            raise ValueError(
                "SeqlockWeightSyncScheme: init_on_sender must be given one of model, weights, params_map and context "
                f"(with model_id), got {len(given)} of them and model_id {model_id!r}."
            )
        counts = [num_workers, self._num_workers, getattr(context, "num_workers", None)]
        counts += [len(value) if value is not None else None for value in (devices, params_map)]
        count = next((value for value in counts if value is not None), None)
        if count is None:
            raise ValueError("SeqlockWeightSyncScheme: num_workers must be given, got neither it nor a context's.")
        if count < 1:
            raise ValueError(f"SeqlockWeightSyncScheme: num_workers must be at least 1, got {count}.")
        if devices is not None and len(devices) != count:
            raise ValueError(
                f"SeqlockWeightSyncScheme: devices must be one for each of {count} workers, got {len(devices)}."
            )
        workers = list(range(count))
        if params_map is not None and sorted(params_map) != workers:
            raise ValueError(
                f"SeqlockWeightSyncScheme: params_map must have weights for workers {workers}, got {list(params_map)}."
            )
        first = None if params_map is None else next(iter(params_map.values()))
        source = _resolved(next(value for value in (model, weights, first, model_id) if value is not None), context)
        layout = WeightLayout.from_weights(source)
        channels = {worker: Channel(layout.nbytes) for worker in workers}
        self._publisher = Publisher(layout, channels, self._transport, source)
        self._layout, self._channels = layout, channels
        self.model_id = model_id
        self.context, self.model = context, model
        self._weights = weights
        self._initial = None if params_map is None else dict(params_map)

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any | None = None
    ) -> None:
        self.send(self._initial if weights is None else weights)
        cast(Publisher, self._publisher).connect(self._connect_timeout)
        self._initial = None  # not before: a connection that timed out may be tried again

    def send(
        self,
        weights: Weights | Mapping[int, Weights] | None = None,
        worker_ids: int | Sequence[int] | None = None,
        wait: float | None = None,
    ) -> None:
        """Publishes weights; the caller may overwrite them as soon as this returns (on CUDA: in stream order).

        Args:
            weights (nn.Module, TensorDict, state dict, or a mapping of worker ids to these, optional): what to send.
                Defaults to the model or weights of ``init_on_sender``.
            worker_ids (int or sequence of int, optional): to whom. Defaults to all workers, or those of the mapping.
            wait (float, optional): seconds to wait until every one of them applied these weights. Defaults to not
                waiting.

        Raises:
            RuntimeError: before ``connect``; with ``transport="ipc"``, where that cannot be had.
            ValueError: for weights of another layout, naming the first key that differs, or an unknown worker. Nothing
                was sent.
            TimeoutError: naming the workers that did not apply them. They stay published.
        """
        if not (self.initialized_on_sender and self.synchronized_on_sender):
            raise RuntimeError(
                "SeqlockWeightSyncScheme: send must follow init_on_sender and connect. Nothing was sent."
            )
        given = addressed(weights, worker_ids, self._channels)
        sources, publisher = {w: self._source(source) for w, source in given.items()}, cast(Publisher, self._publisher)
        publisher.send(sources)
        if wait is not None:
            publisher.wait(list(sources), wait)

    def poll(self) -> bool:
        """Shows what is complete to the workers and answers them, without waiting: call it once per learner step.

        Returns:
            bool: whether everything that was sent is visible.

        Raises:
            RuntimeError: before ``init_on_sender``; with ``transport="ipc"``, where that cannot be had.
        """
        if self._publisher is None:
            raise RuntimeError("SeqlockWeightSyncScheme: poll must follow init_on_sender.")
        return self._publisher.poll()

    def _source(self, weights: Any) -> Weights:
        if weights is None:
            weights = self._weights
        if weights is None:
            weights = self.model_id if self._model_ref is None else self.model
        return _resolved(weights, self.context)

    def for_worker(self, worker_idx: int) -> Self:
        """Returns the receiver of one worker, to be passed to its process as an argument; also when it is restarted.

        Raises:
            ValueError: for an unknown worker.
        """
        if worker_idx not in self._channels:
            raise ValueError(
                f"SeqlockWeightSyncScheme: worker_idx must be among {list(self._channels)}, got {worker_idx}."
            )
        scheme = type(self)(transport=self._transport, connect_timeout=self._connect_timeout)
        scheme._layout, scheme._channels = self._layout, {worker_idx: self._channels[worker_idx]}
        scheme._model_id, scheme._worker_idx = self._model_id, worker_idx
        return scheme

    @property
    def versions(self) -> dict[int, int]:
        """Sender: the newest version that each worker sees."""
        return {worker: end.version for worker, end in self._ends.items()}

    @property
    def applied_versions(self) -> dict[int, int]:
        """Sender: the version that each worker acts on."""
        return {worker: end.applied for worker, end in self._ends.items()}

    @property
    def _ends(self) -> dict[int, SendingEnd]:
        return {} if self._publisher is None else self._publisher.ends


def _resolved(weights: Any, context: Any) -> Weights:
    """Returns weights, those of a model of the context where they are its name; raises ``ValueError`` for others."""
    if isinstance(weights, str) and context is not None:
        fallback = getattr(context, "_fallback_policy", None) if weights == "policy" else None
        weights = _resolve_model(context, weights) if fallback is None else fallback
    if not isinstance(weights, nn.Module | TensorDictBase | Mapping):
        got = f"the name {weights!r} without a context" if isinstance(weights, str) else type(weights).__name__
        raise ValueError(
            "SeqlockWeightSyncScheme: weights must be a module, a TensorDict or a state dict, got "
            f"{got}. Nothing was sent."
        )
    return weights
