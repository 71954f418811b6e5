# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""MotrixLab's asynchronous FastSAC trainer (``motrix-rl-builtin`` 0.4.0) over an EnvPool task.

Agent, collector, learner, rings and weight channel are the released ones; what stands here is the wiring of one
collector process to one learner, which in ``async_impl.train`` needs packages of its own simulator.
"""

from __future__ import annotations

import queue
import sys
import time
import types
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.peers.motrixlab import _import
from benchmarks.peers.motrixlab_trainers import PACKAGE, EnvPoolStreams

START_TIMEOUT = 300.0
EPISODES_EVERY = 50
# Its own values for the asynchronous trainer (configs/algo_base/motrix.fastsac.yaml of its repository).
ASYNC_OPTIONS = {
    "ring_capacity": 64,
    "utd_mode": "strict",
    "weight_publish_interval": 4,
    "weight_poll_interval": 1,
    "max_ingest_per_iter": 8,
    "idle_sleep_s": 5e-4,
    "collector_inference_device": "cuda",
    "collector_compile": True,
    "collector_amp": True,
    "collector_amp_dtype": "fp16",
    "num_collectors": 1,
    "cpus_per_collector": None,
    "num_learners": 1,
    "learner_devices": None,
}


@dataclass(kw_only=True)
class _Channels:
    """What learner and collector share, all of MotrixLab's own types; sent to the collector when it is started."""

    ring: Any
    ring_slots: Any
    final_store: Any
    weights: Any
    weight_slots: Any
    control: Any
    ready: Any
    start: Any
    episodes: Any


class AsyncTrainer:
    """Its ``Collector`` in a process, its ``Learner`` in this one, wired as ``async_impl.train`` does with one of each.

    Args:
        agent (FastSacAgent): with final observations on.
        env (EnvPoolStreams): of the task, never opened here.

    Keyword Args:
        streams (dict): keywords of :class:`EnvPoolStreams`, for the collector's own.
        policy_threads (int): of torch in the collector.
        seed (int): of the collector's generators.
    """

    name = "asynchronous: motrix_rl_builtin.fastsac.async_impl Collector (own process) and Learner, strict ratio"

    def __init__(
        self, agent: Any, env: EnvPoolStreams, *, streams: dict[str, Any], policy_threads: int, seed: int
    ) -> None:
        self.agent, cuda = agent, agent.device.type == "cuda"
        config, transport = _import(f"{PACKAGE}.config"), _import(f"{PACKAGE}.async_impl.transport")
        learner = _import(f"{PACKAGE}.async_impl.learner")
        self._options = config.FastSacAsyncOptionsCfg(**ASYNC_OPTIONS)
        self._options.collector_inference_device = str(agent.device)
        trainer = config.FastSacTrainerCfg(0, self._options)
        cfg = config.FastSacCfg(device=str(agent.device), agent=agent.cfg, trainer=trainer, asynchronous=True)
        capacity, widths, num_envs = self._options.ring_capacity, env.widths, agent.num_envs
        store = _import(f"{PACKAGE}.async_impl.transport.ring").FinalObsStorage(capacity, num_envs, *widths[:2])
        context = torch.multiprocessing.get_context("spawn")
        self._control, weights = transport.Control(1), transport.WeightChannelShared(widths[0])
        # The host channel: what its "auto" takes for an actor below 16 MiB, which these are.
        sender = transport.HostWeightSender(weights, sum(p.numel() for p in agent.actor.parameters()))
        slots = None
        if cuda:
            shared: Any = transport.RingCursors()
            slots = torch.zeros(capacity, num_envs, sum(widths) + 3, device=agent.device)
            ring = transport.IpcTransitionRing(shared, slots, capacity, num_envs, *widths, final_obs_store=store)
        else:
            ring = shared = transport.SharedTransitionRing(capacity, num_envs, *widths, final_obs_store=store)
        self._learner = learner.Learner(agent, cfg, [learner.CollectorEndpoint(ring, sender)], self._control)
        self._learner.publish_weights()
        self._slots = slots
        self._channels = _Channels(
            ring=shared,
            ring_slots=context.Queue(),
            final_store=store,
            weights=weights,
            weight_slots=sender.params,
            control=self._control,
            ready=context.Event(),
            start=context.Event(),
            episodes=context.Queue(),
        )
        scale, bias = env.action_range
        self._worker = context.Process(
            target=_collect, args=(self._channels, cfg, streams, scale, bias, policy_threads, seed), daemon=True
        )

    def start(self) -> None:
        """Starts the collector and waits until its streams are open and its policy is compiled."""
        self._worker.start()
        self._channels.ring_slots.put(self._slots)
        deadline = time.monotonic() + START_TIMEOUT
        while not self._channels.ready.wait(0.2):
            self._check_alive()
            if time.monotonic() > deadline:
                raise TimeoutError(f"AsyncTrainer: the collector must be ready within {START_TIMEOUT:g} s.")
        self._channels.start.set()

    def advance(self) -> int:
        """Takes what is in the ring, then the gradient steps that are due; returns the rows that came."""
        rows = self._learner.drain() * self.agent.num_envs
        if not self._learner.maybe_train(self._control.collector_steps):
            self._check_alive()
            time.sleep(self._options.idle_sleep_s)
        return rows

    def _check_alive(self) -> None:
        if not self._worker.is_alive():
            raise RuntimeError(f"AsyncTrainer: the collector ended early (exit code {self._worker.exitcode}).")

    def pop_episodes(self) -> list[float]:
        """Returns of the episodes that ended since the last call."""
        ended: list[float] = []
        while True:
            try:
                ended += self._channels.episodes.get_nowait()
            except queue.Empty:
                return ended

    def close(self) -> None:
        """Ends the collector."""
        self._control.set_stop()
        self._channels.start.set()
        if self._worker.pid is not None:
            deadline = time.monotonic() + 10.0
            while self._worker.is_alive() and time.monotonic() < deadline:
                self.pop_episodes()  # a process does not end before its queue was read
                self._worker.join(0.1)
            self._worker.terminate()
            self._worker.join()


def _collect(
    channels: _Channels,
    cfg: Any,
    streams: dict[str, Any],
    scale: torch.Tensor,
    bias: torch.Tensor,
    policy_threads: int,
    seed: int,
) -> None:
    """The collector's process: ``async_impl.worker.run_collector_process`` with another environment."""
    torch.set_num_threads(policy_threads)
    torch.manual_seed(seed)
    stub_simulator()
    transport, options = _import(f"{PACKAGE}.async_impl.transport"), cfg.trainer.async_options
    env, control, ring = EnvPoolStreams(**streams, device=torch.device("cpu")), channels.control, channels.ring
    slots = channels.ring_slots.get()
    if slots is not None:
        sizes = (options.ring_capacity, env.num_envs, *env.widths)
        ring = transport.IpcTransitionRing(ring, slots, *sizes, final_obs_store=channels.final_store)
    receiver = transport.weight_receiver_for(channels.weights, channels.weight_slots)
    collectors = _import(f"{PACKAGE}.async_impl.collector")
    actor_width, _, action_width = env.widths
    collector = collectors.Collector(env, cfg, actor_width, action_width, scale, bias, ring, receiver, control)
    collector.reset()
    collector.sync_weights()
    collector.warmup_inference()
    channels.ready.set()
    channels.start.wait()
    parent = torch.multiprocessing.parent_process()
    while not control.stop:
        if not collector.step_once():
            if parent is None or not parent.is_alive():
                break  # a killed learner leaves a full ring
            time.sleep(options.idle_sleep_s)
        elif control.collector_steps % EPISODES_EVERY == 0 and (ended := env.pop_episodes()):
            channels.episodes.put(ended)
    channels.episodes.cancel_join_thread()
    env.env.close()


def stub_simulator() -> None:
    """Stands in for the two names that the collector imports from MotrixLab's simulator for its annotations."""
    for name, member in (("motrix_env_core.array.env", "FinalObs"), ("motrix_env_core.base", "ABEnv")):
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            sys.modules.setdefault(path, types.ModuleType(path))
        setattr(sys.modules[name], member, object)
