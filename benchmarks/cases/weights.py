# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Weights from a learner to a worker process.

``weight_sync``  On the CPU, one snapshot of a 1 MB actor from the slots that its publisher fills: at rest, and while a
                 publisher in another process publishes as fast as it can, with ``snapshots_s`` in ``extra``; a torn
                 snapshot ends the case. The limit is one memcpy. With ``--device cuda``, an actor of 1 MB and one of
                 108 MB from a learner to a worker on the same GPU, from ``send`` until the worker's copy is complete:
                 ours is ``transport="auto"``, with ``host_ms`` and ``ipc_ms`` in ``extra``. The limit is one copy on
                 the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.cases import Comparison
from benchmarks.peers import PeerUnavailableError, motrixlab_weights
from benchmarks.presets import ReplaySizes
from benchmarks.timing import Candidate
from torchrl_ext.transport import SeqlockSlots
from torchrl_ext.weight_update import SeqlockWeightSyncScheme

ACTOR_BYTES = 2**20
#: Widths and numbers of square layers: 1 MB and 108 MB of float32.
ACTORS = {"1 MB actor": (512, 1), "108 MB actor": (3000, 3)}
#: Values that the busy publisher repeats: every byte of one is its number.
PATTERNS = 16
DEADLINE_S = 120.0
OFF, OURS, PEER, END = range(4)


def weight_sync(device: torch.device, sizes: Sequence[ReplaySizes]) -> Iterator[Comparison]:
    """Hands one snapshot over; the sizes are the actors' own."""
    if device.type == "cuda":
        for name in ACTORS:
            with contextlib.ExitStack() as alive:
                yield _synchronise(name, device, alive)
        return
    yield _read_at_rest()
    with contextlib.ExitStack() as alive:
        yield _read_from_busy(alive)


def _read_at_rest() -> Comparison:
    slots, out = SeqlockSlots(ACTOR_BYTES), torch.empty(ACTOR_BYTES, dtype=torch.uint8)
    weights = torch.randint(0, 255, (ACTOR_BYTES,), dtype=torch.uint8)
    return Comparison(
        config="1 MB actor",
        ours=Candidate(lambda _: slots.read(out), lambda: slots.publish(weights)),
        limit_name="one memcpy",
        limit=Candidate(lambda _: ctypes.memmove(out.data_ptr(), weights.data_ptr(), ACTOR_BYTES)),
        peer_name="none",
        bytes_moved=ACTOR_BYTES,
    )


def _read_from_busy(alive: contextlib.ExitStack) -> Comparison:
    slots, turn = SeqlockSlots(ACTOR_BYTES), torch.zeros(1, dtype=torch.int64).share_memory_()
    out, spare = torch.empty(ACTOR_BYTES, dtype=torch.uint8), torch.ones(ACTOR_BYTES, dtype=torch.uint8)
    extra: dict[str, Any] = {"snapshots": 0, "torn": 0}
    receiver, missing, channel = None, None, None
    try:
        channel = motrixlab_weights.make_channel(ACTOR_BYTES // 4)
        receiver = motrixlab_weights.make_receiver(channel)
    except PeerUnavailableError as error:
        missing = str(error)
    _start(alive, turn, _publish_on, (slots, channel, turn))
    spent = 0.0

    def await_publisher(who: int, version: Callable[[], int]) -> None:
        turn[0], before = who, version()
        _wait(lambda: version() > before + 1, "the publisher must publish")

    def read(_: object) -> None:
        nonlocal spent
        start = time.perf_counter()
        while slots.read(out) is None:
            pass
        spent += time.perf_counter() - start
        extra["snapshots"] += 1
        extra["snapshots_s"] = round(extra["snapshots"] / spent)

    def fresh() -> None:
        # What the call before read, looked at outside of the timer.
        if extra["snapshots"] and out.min() != out.max():
            raise RuntimeError("weight_sync: every byte of a snapshot must be of one version, got a torn one.")
        await_publisher(OURS, lambda: slots.version)

    def read_peer(_: object) -> None:
        _wait(receiver.load, "the peer must load a snapshot", pause=0.0)

    def rest() -> None:
        turn[0] = OFF

    return Comparison(
        config="1 MB actor, busy publisher",
        ours=Candidate(read, fresh),
        limit_name="one memcpy",
        limit=Candidate(lambda _: ctypes.memmove(out.data_ptr(), spare.data_ptr(), ACTOR_BYTES), rest),
        peer_name=motrixlab_weights.name(),
        peer=None if receiver is None else Candidate(read_peer, lambda: await_publisher(PEER, lambda: receiver.begun)),
        peer_missing=missing,
        bytes_moved=ACTOR_BYTES,
        extra=extra,
    )


def _publish_on(slots: SeqlockSlots, channel: Any, turn: torch.Tensor) -> None:
    """Publishes for whoever's turn it is, without a pause; the target of a process."""
    torch.set_num_threads(1)
    values = [torch.full((slots.nbytes,), value, dtype=torch.uint8) for value in range(PATTERNS)]
    sender = None if channel is None else motrixlab_weights.make_sender(channel)
    count, started = 0, _Started()
    while (whose := int(turn[0])) != END and started.by_a_living_process():
        count += 1
        if whose == OURS:
            slots.publish(values[count % PATTERNS])
        elif whose == PEER and sender is not None:
            sender.publish()
        else:
            time.sleep(1e-4)


def _synchronise(name: str, device: torch.device, alive: contextlib.ExitStack) -> Comparison:
    width, layers = ACTORS[name]
    actor = _actor(width, layers).to(device)
    candidates = {kind: _sender(kind, actor, width, layers, alive) for kind in ("auto", "host", "ipc")}
    nbytes = 4 * width * width * layers
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return Comparison(
        config=name,
        ours=candidates.pop("auto"),
        limit_name="one copy on the device",
        limit=Candidate(lambda _: target.copy_(source)),
        peer_name=motrixlab_weights.name(),
        peer_missing="its senders and receivers on one GPU need its worker processes, which are not driven here.",
        others=candidates,
        bytes_moved=nbytes,
    )


def _sender(kind: Any, actor: nn.Module, width: int, layers: int, alive: contextlib.ExitStack) -> Candidate:
    """Starts a worker and returns one synchronisation with it."""
    scheme = SeqlockWeightSyncScheme(num_workers=1, transport=kind, connect_timeout=DEADLINE_S)
    scheme.init_on_sender(model_id="policy", model=actor)
    alive.callback(lambda: actor)  # which the scheme does not keep
    # Whether to end; snapshots that arrived; whether to look for weights. Processes take turns on a device, so a worker
    # that is not measured must leave it alone.
    state = torch.zeros(3, dtype=torch.int64).share_memory_()
    device = next(actor.parameters()).device
    # The scheme gives device memory up after its worker has ended.
    alive.callback(scheme.shutdown)
    _start(alive, state[:1], _receive_on, (scheme.for_worker(0), device, width, layers, state))
    scheme.connect()

    def send(_: object) -> None:
        arrived = int(state[1])
        scheme.send()
        _wait(lambda: scheme.poll() and int(state[1]) > arrived, "the worker must apply the weights", pause=0.0)
        state[2] = 0

    def settle() -> None:
        state[2] = 1
        # Device memory is agreed on between two sends.
        _wait(lambda: scheme.poll() and scheme.applied_versions[0] == scheme.versions[0], "the worker must be idle")

    for _ in range(10):
        settle()
        send(None)
    return Candidate(send, settle)


def _receive_on(
    scheme: SeqlockWeightSyncScheme, device: torch.device, width: int, layers: int, state: torch.Tensor
) -> None:
    """Applies weights as they come and counts them once they are in place; the target of a process."""
    torch.set_num_threads(1)  # as in a worker
    actor = _actor(width, layers).to(device)
    scheme.init_on_receiver(model_id="policy", model=actor)
    scheme.connect()
    started = _Started()
    while int(state[0]) != END and started.by_a_living_process():
        if not int(state[2]):
            time.sleep(1e-4)
        elif scheme.receive() is not None:
            torch.cuda.current_stream(device).synchronize()
            state[1] += 1


def _actor(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def _start(
    alive: contextlib.ExitStack, turn: torch.Tensor, target: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()

    def end() -> None:
        turn[0] = END
        process.join(10.0)
        if process.is_alive():
            process.kill()
            process.join(10.0)

    alive.callback(end)


class _Started:
    """Tells a process whether the one that started it is still there: a killed one has nobody told to end."""

    def __init__(self) -> None:
        parent = multiprocessing.parent_process()
        self._pid = os.getppid() if parent is None else parent.pid

    def by_a_living_process(self) -> bool:
        """Whether it is; costs one system call."""
        return os.getppid() == self._pid


def _wait(condition: Callable[[], Any], what: str, *, pause: float = 1e-4) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"weight_sync: {what} within {DEADLINE_S} s.")
        if pause:
            time.sleep(pause)
