# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""MotrixLab's collector (``motrix-rl-builtin`` 0.4.0) in a process of its own, drained by its learner into its replay.

``Collector.step_once``, ring, cursors, weight channel and ``Learner.drain`` are the released ones. What stands here is
the loop around them, with an amount of steps that it may make, so that it rests while others are timed.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn

from benchmarks.peers.motrixlab import _import, build_buffer, build_drain
from benchmarks.peers.motrixlab_async import ASYNC_OPTIONS, stub_simulator
from benchmarks.peers.motrixlab_trainers import PACKAGE, EnvPoolStreams

RING_SLOTS = int(str(ASYNC_OPTIONS["ring_capacity"]))
RUN_SLOTS = int(str(ASYNC_OPTIONS["max_ingest_per_iter"]))
IDLE_S = float(str(ASYNC_OPTIONS["idle_sleep_s"]))
#: Between two looks for steps to make; another candidate is timed meanwhile, on the same cores.
REST_S = 5e-3
DEADLINE_S = 300.0
# Its actor is made and not asked: see :func:`_work`.
ACTOR_OPTIONS = {
    "actor_hidden_dim": 256,
    "log_std_max": 0.0,
    "log_std_min": -5.0,
    "use_tanh": True,
    "use_layer_norm": True,
}
_CPU = torch.device("cpu")


class RingedCollector:
    """One worker process that makes as many steps as :meth:`collect` asks for, and rests otherwise.

    Its rows have the observation of the critics as well, as MotrixLab's always have: here the actor's again.

    Args:
        options (dict): keywords of :class:`~torchrl_ext.envs.EnvPoolEnv`.
        network (Module): the policy, from an observation to an action; pickled.

    Keyword Args:
        slots (int): steps that the replay keeps.
        drain_every (float): seconds between two looks at an empty ring.

    Raises:
        PeerUnavailableError: if the package cannot be imported here.
    """

    def __init__(self, options: dict[str, Any], network: nn.Module, *, slots: int, drain_every: float) -> None:
        stub_simulator()
        transport = _import(f"{PACKAGE}.async_impl.transport")
        probe = EnvPoolStreams(options, actor_keys=["observation"], critic_keys=["observation"], device=_CPU)
        self._streams, widths = probe.num_envs, probe.widths
        scale, bias = probe.action_range
        probe.env.close()
        store = _import(f"{PACKAGE}.async_impl.transport.ring").FinalObsStorage(RING_SLOTS, self._streams, *widths[:2])
        ring = transport.SharedTransitionRing(RING_SLOTS, self._streams, *widths, final_obs_store=store)
        replay = build_buffer(
            streams=self._streams,
            slots=slots,
            observation=widths[0],
            critic_observation=widths[1],
            action=widths[2],
            n_steps=1,
            device=_CPU,
            final_obs_bootstrap=True,
        )
        self._drain = build_drain([ring], replay, run_slots=RUN_SLOTS, device=_CPU)
        self._drain_every = drain_every
        context = torch.multiprocessing.get_context("spawn")
        self._control = transport.Control(1)
        self._wanted = context.Value("q", 0, lock=False)
        self._ready = context.Event()
        arguments = (options, network, ring, self._control, self._wanted, self._ready, scale, bias)
        self._worker = context.Process(target=_work, args=arguments, daemon=True)
        self._worker.start()
        try:
            deadline = time.monotonic() + DEADLINE_S
            while not self._ready.wait(0.2):
                self._check(deadline)
        except BaseException:
            self.close()
            raise

    def collect(self, rows: int) -> None:
        """Lets the worker make so many rows, and drains them."""
        self._wanted.value += rows // self._streams
        left, deadline = rows // self._streams, time.monotonic() + DEADLINE_S
        while left > 0:
            if drained := self._drain():
                left -= drained
            else:
                self._check(deadline)
                time.sleep(self._drain_every)

    def _check(self, deadline: float) -> None:
        if not self._worker.is_alive():
            raise RuntimeError(f"RingedCollector: the worker ended early (exit code {self._worker.exitcode}).")
        if time.monotonic() > deadline:
            raise TimeoutError(f"RingedCollector: the worker must be done within {DEADLINE_S:g} s.")

    def close(self) -> None:
        """Ends the worker."""
        self._control.set_stop()
        self._worker.join(10.0)
        self._worker.kill()
        self._worker.join()


def _work(
    options: dict[str, Any],
    network: nn.Module,
    ring: Any,
    control: Any,
    wanted: Any,
    ready: Any,
    scale: torch.Tensor,
    bias: torch.Tensor,
) -> None:
    """The worker's process: as ``async_impl.worker.run_collector_process``, with another environment and network."""
    torch.set_num_threads(1)
    stub_simulator()
    config, transport = _import(f"{PACKAGE}.config"), _import(f"{PACKAGE}.async_impl.transport")
    asynchronous = config.FastSacAsyncOptionsCfg(**{**ASYNC_OPTIONS, "collector_inference_device": "cpu"})
    agent = config.FastSacAgentCfg(**ACTOR_OPTIONS, obs_normalization=False, learning_starts=0)
    cfg = config.FastSacCfg(device="cpu", agent=agent, trainer=config.FastSacTrainerCfg(0, asynchronous))
    env = EnvPoolStreams(options, actor_keys=["observation"], critic_keys=["observation"], device=_CPU)
    weights = transport.WeightChannelShared(env.widths[0])
    collectors = _import(f"{PACKAGE}.async_impl.collector")
    receiver = transport.weight_receiver_for(weights, [torch.zeros(0), torch.zeros(0)])  # nothing is published
    collector = collectors.Collector(env, cfg, env.widths[0], env.widths[2], scale, bias, ring, receiver, control)
    # Its own actor has layers of its own sizes; all candidates ask the same network.
    collector._policy_runtime = network
    collector.reset()
    ready.set()
    parent = torch.multiprocessing.parent_process()
    started_by = os.getppid() if parent is None else parent.pid
    while not control.stop:
        resting = control.collector_steps >= wanted.value
        if resting or not collector.step_once():
            if os.getppid() != started_by:
                break  # killed: nobody says stop
            time.sleep(REST_S if resting else IDLE_S)
    env.env.close()
