# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""A TorchRL weight synchronisation scheme whose two sides never wait for each other."""

from __future__ import annotations

import time
import weakref
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.weight_update import TransportBackend, WeightSyncScheme
from torchrl.weight_update.utils import _resolve_model
from torchrl.weight_update.weight_sync_schemes import register_weight_sync_backend

from torchrl_ext.weight_update._channel import PAUSE
from torchrl_ext.weight_update._receiving import ReceivingEnd
from torchrl_ext.weight_update._sender_side import SenderSide
from torchrl_ext.weight_update.weight_layout import WeightLayout

__all__ = ["SeqlockWeightSyncScheme"]


@register_weight_sync_backend("seqlock")
class SeqlockWeightSyncScheme(SenderSide):
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
        self._layout = self._publisher = self._initial = None
        self._channels = {}
        self._receiver: ReceivingEnd | None = None
        self._hook: Any = None

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
        target = _resolve_model(context, model_id) if model is None and context is not None else model
        if target is None:
            raise ValueError(
                f"SeqlockWeightSyncScheme: init_on_receiver must be given a model, or a context whose {model_id!r} is "
                "one, got neither."
            )
        receiver = ReceivingEnd(self._channels[worker_idx], self._layout, target)
        self._receiver, self._model_id, self._worker_idx = receiver, model_id, worker_idx
        self.model, self.context = target, context

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: int | None = None) -> None:
        if worker_idx is not None and worker_idx != self._worker_idx:
            raise ValueError(
                f"SeqlockWeightSyncScheme: worker_idx must be {self._worker_idx}, that of init_on_receiver, got "
                f"{worker_idx}."
            )
        receiver = cast(ReceivingEnd, self._receiver)
        receiver.materialize()
        receiver.ask()
        deadline = time.monotonic() + self._connect_timeout
        while True:
            receiver.take()
            if receiver.version and (self._transport != "ipc" or receiver.settled):
                return
            if time.monotonic() > deadline:
                what = "the device memory of transport='ipc'" if receiver.version else "its first weights"
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

        A receiver may be given another one of the same layout, which has the newest weights after the next ``receive``;
        one of another layout raises ``ValueError`` and changes nothing.
        """
        return WeightSyncScheme.model.fget(self)

    @model.setter
    def model(self, model: Any) -> None:
        if self._receiver is not None and model is not None and model is not self._receiver.model:
            self._receiver.rebind(model)
        WeightSyncScheme.model.fset(self, model)
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
