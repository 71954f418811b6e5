# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""A TorchRL weight synchronisation scheme whose two sides never wait for each other."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.weight_update import TransportBackend, WeightSyncScheme
from torchrl.weight_update.utils import _resolve_model
from torchrl.weight_update.weight_sync_schemes import register_weight_sync_backend

from torchrl_ext.weight_update._channel import PAUSE, Channel
from torchrl_ext.weight_update._leaves import Weights
from torchrl_ext.weight_update._publisher import Publisher, addressed
from torchrl_ext.weight_update._receiving import ReceivingEnd
from torchrl_ext.weight_update._sending import SendingEnd
from torchrl_ext.weight_update.weight_layout import WeightLayout

__all__ = ["SeqlockWeightSyncScheme"]


@register_weight_sync_backend("seqlock")
class SeqlockWeightSyncScheme(WeightSyncScheme):
    """Publishes a policy's weights to worker processes of the same host.

    Roles      One sender, in one thread; one receiver per worker, in the thread that calls its policy.
    Send       :meth:`send` takes the weights as they are at that moment (on CUDA: in the order of the current stream)
               and returns without waiting. Weights on CUDA are on their way until a later :meth:`poll`, or ``send``,
               finds their copy complete. What is sent meanwhile waits; where several wait, the newest replaces the
               others, so the last one sent always arrives as long as ``poll`` or ``send`` is called.
    Receive    :meth:`receive` applies the newest complete weights in place, never torn and never older ones, and
               returns None when there is nothing newer; the model keeps what it has.
    Versions   Each worker counts its own from 1. A version that nobody took is skipped.
    Transport  Through shared host memory, or, where worker and sender share one GPU, through device memory. The first
               weights always go through the host; device memory is agreed on by ``poll`` or ``send`` afterwards.
    Death      A dead worker is not waited for, except by ``wait``. A dead sender leaves the last weights in place.
    Collectors TorchRL's ``MultiSyncCollector`` and ``MultiAsyncCollector`` call nothing in their workers to receive;
               there, and wherever a receiver is given a ``context``, the scheme receives before each call of the model,
               in the same thread. Where they track policy versions, the row of that very step still has the stamp of
               the version before. Not served are ``cudagraph_policy=True``, which skips that call, Ray, RPC and
               distributed collectors, and weights that a worker hands on to workers of its own.

    Keyword Args:
        num_workers (int, optional): how many. Defaults to the ``num_workers`` of the context given to
            ``init_on_sender``.
        transport ("auto", "host" or "ipc"): ``"auto"`` takes device memory for 1 MiB or more on the same GPU (by
            UUID); ``"ipc"`` fails, with the reason, where it cannot be had. Defaults to ``"auto"``.
        connect_timeout (float): seconds that ``connect`` waits. Defaults to 60.

    Raises:
        ValueError: for other options.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from torchrl_ext.weight_update import SeqlockWeightSyncScheme
        >>> learner, worker = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> scheme = SeqlockWeightSyncScheme(num_workers=1)
        >>> scheme.init_on_sender(model_id="policy", model=learner)
        >>> receiver = scheme.for_worker(0)  # goes to the worker as an argument
        >>> scheme.connect()
        >>> receiver.init_on_receiver(model_id="policy", model=worker)
        >>> receiver.connect()
        >>> _ = nn.init.zeros_(learner.weight), nn.init.ones_(learner.bias)
        >>> scheme.send()
        >>> receiver.receive() is not None, worker(torch.ones(2)).item(), scheme.applied_versions
        (True, 1.0, {0: 2})
    """

    def __init__(
        self,
        *,
        num_workers: int | None = None,
        transport: Literal["auto", "host", "ipc"] = "auto",
        connect_timeout: float = 60.0,
    ) -> None:
        if transport not in ("auto", "host", "ipc") or (num_workers is not None and num_workers < 1):
            raise ValueError(
                "SeqlockWeightSyncScheme: transport must be 'auto', 'host' or 'ipc' and num_workers at least 1, got "
                f"{transport!r} and {num_workers}."
            )
        super().__init__("tensordict")
        self._num_workers, self._transport, self._connect_timeout = num_workers, transport, connect_timeout
        self._layout: WeightLayout | None = None
        self._channels: dict[int, Channel] = {}
        self._publisher: Publisher | None = None
        self._initial: dict[int, Weights] | None = None
        self._receiver: ReceivingEnd | None = None
        self._hook: Any = None

    # Sender

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
        self.model_id = model_id
        self.context, self.model = context, model
        self._weights = weights
        self._initial = None if params_map is None else dict(params_map)
        source = self._source(None if params_map is None else next(iter(params_map.values())))
        layout = self._layout = WeightLayout.from_weights(source)
        self._channels = {worker: Channel(layout.nbytes) for worker in range(count)}
        self._publisher = Publisher(layout, self._channels, self._transport, source)

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any | None = None
    ) -> None:
        self.send(self._initial if weights is None else weights)
        self._initial = None
        cast(Publisher, self._publisher).connect(self._connect_timeout)

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
        if isinstance(weights, str):
            context, name = self.context, weights
            weights = getattr(context, "_fallback_policy", None) if name == "policy" else None
            weights = _resolve_model(context, name) if weights is None else weights
        if not isinstance(weights, nn.Module | TensorDictBase | Mapping):
            raise ValueError(
                "SeqlockWeightSyncScheme: weights must be a module, a TensorDict or a state dict, got "
                f"{type(weights).__name__}. Nothing was sent."
            )
        return weights

    def for_worker(self, worker_idx: int) -> SeqlockWeightSyncScheme:
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

    # Receiver

    def _init_on_receiver_impl(
        self, model_id: str, context: Any = None, *, model: Any = None, worker_idx: int | None = None
    ) -> None:
        """Takes the channel of ``worker_idx`` (that of ``for_worker``, else the context's) for ``model``."""
        indices = (worker_idx, self.worker_idx, getattr(context, "worker_idx", None))
        worker_idx = next((index for index in indices if index is not None), None)
        if self._layout is None or worker_idx not in self._channels:
            raise ValueError(
                f"SeqlockWeightSyncScheme: worker_idx must be among {list(self._channels)}, got {worker_idx}; "
                "init_on_sender makes the channels before the scheme is passed to a worker."
            )
        self._model_id, self._worker_idx = model_id, worker_idx
        target = model if model is not None else _resolve_model(context, model_id)
        self._receiver = ReceivingEnd(self._channels[worker_idx], self._layout, target)
        self.model, self.context = target, context

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: int | None = None) -> None:
        receiver = cast(ReceivingEnd, self._receiver)
        receiver.materialize()
        receiver.ask()
        deadline = time.monotonic() + self._connect_timeout
        while receiver.version == 0 or (self._transport == "ipc" and not receiver.settled):
            if receiver.take() is None and time.monotonic() > deadline:
                what = "its first weights" if receiver.version == 0 else "the device memory of transport='ipc'"
                raise TimeoutError(
                    f"SeqlockWeightSyncScheme: worker {self._worker_idx} must get {what} within "
                    f"{self._connect_timeout} s of connect: the sender's connect was not called, failed or hangs."
                )
            time.sleep(PAUSE)

    def receive(self, timeout: float | None = None) -> TensorDict | None:
        """Applies the newest weights, if they are newer than what the model has.

        On CUDA the model acts on them from the next operation of the current stream on.

        Args:
            timeout (float, optional): seconds to wait for newer ones. Defaults to not waiting.

        Returns:
            TensorDict: views of the weights that were applied, valid until the next call; None when nothing is newer.

        Raises:
            RuntimeError: before ``connect``.
            ValueError: when the model has another layout by now. It is unchanged.
        """
        receiver = self._receiver
        if receiver is None or not self.synchronized_on_receiver:
            raise RuntimeError("SeqlockWeightSyncScheme: receive must follow init_on_receiver and connect.")
        before, taken = receiver.version, receiver.take(timeout or 0.0)
        if receiver.version != before and (count := getattr(self.context, "increment_version", None)) is not None:
            count()  # TorchRL's collectors stamp their rows with it
        return taken

    @property
    def model(self) -> Any | None:
        """The model whose weights are sent or written.

        A receiver may be given another one of the same layout, which has the newest weights after the next ``receive``.
        """
        return WeightSyncScheme.model.fget(self)

    @model.setter
    def model(self, model: Any) -> None:
        WeightSyncScheme.model.fset(self, model)
        if self._receiver is not None and model is not None and model is not self._receiver.model:
            self._receiver.rebind(model)
        self._receive_before_calls()

    @property
    def context(self) -> Any | None:
        """Whoever the model belongs to, a collector as a rule."""
        return WeightSyncScheme.context.fget(self)

    @context.setter
    def context(self, context: Any) -> None:
        WeightSyncScheme.context.fset(self, context)
        self._receive_before_calls()

    def _receive_before_calls(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._receiver is None or self.context is None or not isinstance(self._receiver.model, nn.Module):
            return
        me = weakref.ref(self)

        @torch.compiler.disable
        def receive(*_: Any) -> None:
            scheme = me()
            if scheme is not None and scheme.synchronized_on_receiver:
                scheme.receive()

        self._hook = self._receiver.model.register_forward_pre_hook(receive)

    # Both

    @property
    def layout(self) -> WeightLayout | None:
        """The layout of the weights, None before ``init_on_sender``."""
        return self._layout

    @property
    def version(self) -> int:
        """Receiver: the version that its model acts on. Sender: the newest that any worker sees. 0 before the first."""
        if self._receiver is not None:
            return self._receiver.version
        return max(self.versions.values(), default=0)

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

    def create_transport(self, **kwargs: Any) -> TransportBackend:
        """Not used: ``init_on_sender`` makes one channel per worker."""
        raise NotImplementedError("SeqlockWeightSyncScheme: channels are made by init_on_sender alone.")

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # The shared memory goes along; what one side made for itself stays.
        return {**state, "_publisher": None, "_receiver": None, "_hook": None, "_initial": None, "_weights": None}

    def shutdown(self) -> None:
        """Ends this side: workers keep their weights, device memory is given up once they have ended."""
        if self.__dict__.get("_hook") is not None:
            self._hook.remove()
            self._hook = None
        publisher = self.__dict__.get("_publisher")
        for end in publisher.ends.values() if publisher is not None else ():
            end.close()
        super().shutdown()
