# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""MotrixLab's FastSAC replay buffer (``motrix-rl-builtin`` 0.4.0) as a peer.

The wheel is pure Python and is installed with ``--no-deps``; of its dependencies only ``omegaconf.MISSING`` is needed
to import the replay buffer.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import types
from typing import Any

import torch

from benchmarks.peers import PeerUnavailableError

DISTRIBUTION = "motrix-rl-builtin"
VERSION = "0.4.0"


def name(what: str) -> str:
    """Returns the peer's name for the report: the release that is really installed, and what of it is measured."""
    try:
        return f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)} {what}"
    except importlib.metadata.PackageNotFoundError:
        return f"{DISTRIBUTION} {VERSION} {what}"


def build_buffer(
    *,
    streams: int,
    slots: int,
    observation: int,
    critic_observation: int,
    action: int,
    n_steps: int,
    device: torch.device,
    final_obs_bootstrap: bool,
) -> Any:
    """Returns a ``SimpleReplayBuffer`` of ``slots`` transitions per stream.

    Raises:
        PeerUnavailableError: if the package cannot be imported here.
    """
    module = _import("motrix_rl_builtin.fastsac.buffer")
    return module.SimpleReplayBuffer(
        streams,
        slots,
        observation,
        action,
        critic_observation,
        n_steps=n_steps,
        device=device,
        final_obs_bootstrap=final_obs_bootstrap,
    )


def final_payload(streams: torch.Tensor, observation: torch.Tensor, critic_observation: torch.Tensor) -> Any:
    """Returns the final observations of one slot in the peer's own type.

    Raises:
        PeerUnavailableError: if the package cannot be imported here.
    """
    module = _import("motrix_rl_builtin.fastsac.async_impl.transport.ring")
    return module.FinalObsPayload(streams, observation, critic_observation)


def _import(module: str) -> Any:
    # In this order: of the stub that stands there after a first call no spec can be asked.
    if "omegaconf" not in sys.modules and importlib.util.find_spec("omegaconf") is None:
        stub = types.ModuleType("omegaconf")
        stub.MISSING = "???"  # type: ignore[attr-defined]
        sys.modules["omegaconf"] = stub
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PeerUnavailableError(
            f"{DISTRIBUTION}=={VERSION} cannot be imported ({error}); "
            "run pip install --no-deps -r benchmarks/requirements-peers.txt."
        ) from error


def build_ring(*, slots: int, streams: int, observation: int, critic_observation: int, action: int) -> Any:
    """Returns a ``SharedTransitionRing``, whose ``push`` takes the fields of one step and ``read_span`` gives views.

    Raises:
        PeerUnavailableError: if the package cannot be imported here.
    """
    module = _import("motrix_rl_builtin.fastsac.async_impl.transport")
    return module.SharedTransitionRing(slots, streams, observation, critic_observation, action)


def add_finals(ring: Any, *, observation: int, critic_observation: int) -> Any:
    """Gives a ring of :func:`build_ring` the store of its final observations, as the trainer does, and returns it."""
    module = _import("motrix_rl_builtin.fastsac.async_impl.transport.ring")
    ring.final_obs_store = module.FinalObsStorage(ring.capacity, ring.num_envs, observation, critic_observation)
    return ring


def build_ipc_ring(
    *, slots: int, streams: int, observation: int, critic_observation: int, action: int, device: torch.device
) -> Any:
    """Returns an ``IpcTransitionRing`` of this process's own device memory, which serves both ends.

    Raises:
        PeerUnavailableError: if the package cannot be imported here.
    """
    module = _import("motrix_rl_builtin.fastsac.async_impl.transport")
    memory = torch.zeros(slots, streams, observation + critic_observation + action + 3, device=device)
    sizes = (slots, streams, observation, critic_observation, action)
    return module.IpcTransitionRing(module.RingCursors(), memory, *sizes)


def build_drain(rings: list[Any], replay: Any, *, run_slots: int, device: torch.device) -> Any:
    """Returns the trainer's ``Learner.drain`` over these rings, without a trainer.

    The learner is the package's own; what stands in for its agent has the replay buffer and nothing to train.

    Raises:
        PeerUnavailableError: if the package cannot be imported here.
    """
    learner = _import("motrix_rl_builtin.fastsac.async_impl.learner")
    agent = types.SimpleNamespace(
        rb=replay,
        device=device,
        world_size=1,
        cfg=types.SimpleNamespace(learning_starts=0),
        set_train_mode=lambda: None,
        window_metrics=types.SimpleNamespace(add=lambda *_: None),
    )
    options = types.SimpleNamespace(max_ingest_per_iter=run_slots)
    config = types.SimpleNamespace(trainer=types.SimpleNamespace(async_options=options))
    endpoints = [learner.CollectorEndpoint(ring, None) for ring in rings]
    return learner.Learner(agent, config, endpoints, types.SimpleNamespace(num_collectors=len(rings))).drain
