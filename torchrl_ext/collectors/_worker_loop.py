# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The loop of a collector's worker process: act, step, push."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_ext.collectors._board import Board, Counter
from torchrl_ext.collectors._row_plan import IS_INIT, POLICY_VERSION, TRAJ_IDS
from torchrl_ext.collectors._stream_blocks import Ends, make_block
from torchrl_ext.collectors._worker_options import WorkerOptions
from torchrl_ext.collectors._worker_policy import WorkerPolicy
from torchrl_ext.envs import EnvPoolEnv
from torchrl_ext.transport.producer import RingProducer

__all__ = ["STAGES", "WorkerLoop"]

#: Where the time of a step goes; environments that name stages of their own add ``env/<name>``.
STAGES = ("policy", "env", "push", "wait", "weights", "env/pool")
#: Seconds between two looks at a full ring: from the first to the longest.
_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3
_MARKS = (IS_INIT, TRAJ_IDS, POLICY_VERSION)


class WorkerLoop:
    """Steps one worker's streams for as long as the consumer wants rows.

    Roles      The worker's thread runs everything here. The parent reads the board and the rows, sends commands over
               the channel, and counts them on the board.
    State      What episodes, trajectories and marks have come to, between two steps.
    Publish    An episode's entry on the board comes before the step that ended it; the heartbeat and the count of
               steps come after it.
    Ordering   A command is obeyed between two steps, and answered with its number. What was pushed before it belongs
               to the streams as they were.
    Full       Without a slot or credit nothing is stepped; weights are received, the heart beats, commands are obeyed.
    Death      ``RingClosed``, when the parent closed the ring, ends the loop.

    Args:
        channel (Channel): to the parent.
        env (EnvBase): to step.
        policy (WorkerPolicy): acts.
        producer (RingProducer): of this worker's ring.
        board (Board): its companion.
        options (WorkerOptions): from the parent.
    """

    def __init__(
        self,
        channel: Any,
        env: EnvBase,
        policy: WorkerPolicy,
        producer: RingProducer,
        board: Board,
        options: WorkerOptions,
    ) -> None:
        self._channel, self._env, self._policy, self._producer = channel, env, policy, producer
        self._board, self._counters, self._options = board, board.counters, options
        plan, slots = options.plan, producer.slots
        self._layout, self._count = plan.layout, len(slots[0])
        self._slot_of = {id(slot): number for number, slot in enumerate(slots)}
        self._block = make_block(env, plan, slots)
        self._reward = [slot["next", "reward"].reshape(self._count).numpy() for slot in slots]
        self._marks = [
            [(key, slot[key].reshape(self._count).numpy()) for key in plan.extra_keys if key in _MARKS]
            for slot in slots
        ]
        self._values: dict[NestedKey, Any] = {
            IS_INIT: np.ones(self._count, dtype=bool),
            TRAJ_IDS: np.zeros(self._count, dtype=np.int64),
            POLICY_VERSION: 0,
        }
        outputs = [key for key in plan.extra_keys if key not in _MARKS]
        self._no_outputs = {key: torch.zeros(slots[0][key].shape, dtype=slots[0][key].dtype) for key in outputs}
        if not env.batch_dims:
            self._no_outputs = {key: value[0] for key, value in self._no_outputs.items()}
        self._tail = torch.zeros(self._count, plan.layout.successor_bytes, dtype=torch.uint8)
        self._tail_leaves = plan.layout.leaves(self._tail, plan.layout.prefix)
        self._returns = np.zeros(self._count)
        self._lengths = np.zeros(self._count, dtype=np.int64)
        self._commands = 0  # obeyed; the parent counts those of each process anew, and may be ahead already
        self._random_left = options.random_steps
        self._begins = True
        base = env
        while isinstance(base, TransformedEnv):
            base = base.base_env
        self._stage_seconds = base.stage_seconds if isinstance(base, EnvPoolEnv) else {}
        self._seed(options.seed, options.epoch, options.static_seed)

    def run(self) -> None:
        """Collects until the ring is closed."""
        clock, counters, producer = time.perf_counter, self._counters, self._producer
        block, policy, board = self._block, self._policy, self._board
        seconds = board.seconds
        # Those of the environment begin anew with each life, those of the board do not.
        inner = [(place, name.removeprefix("env/"), seconds[place]) for place, name in enumerate(STAGES) if place >= 5]
        started = False
        while True:
            begun = clock()
            if counters[Counter.COMMANDS] != self._commands:
                started = self._obey() and started
            slot = producer.reserve()
            if slot is None and (slot := self._wait_for_room()) is None:
                continue  # a command came while the ring was full
            if not started:
                self._begin()
                started = True
            waited = clock()
            policy.receive()
            received = clock()
            number = self._slot_of[id(slot)]
            if self._random_left > 0:
                self._random_left -= 1
                policy.act_randomly(block.observation)
                for key, zeros in self._no_outputs.items():
                    block.observation.set(key, zeros)
            else:
                if policy.act(block.observation):
                    block.restore()
            acted = clock()
            self._values[POLICY_VERSION] = policy.version
            for key, target in self._marks[number]:
                target[...] = self._values[key]
            ends = block.step(number)
            stepped = clock()
            self._count_step(number, ends)
            self._publish(ends)
            board.heartbeat.beat()
            counters[Counter.STEPS] += 1
            seconds[0] += acted - received
            seconds[1] += stepped - acted
            seconds[2] += clock() - stepped
            seconds[3] += waited - begun
            seconds[4] += received - waited
            for place, name, before in inner:
                seconds[place] = before + self._stage_seconds.get(name, 0.0)

    def _publish(self, ends: Ends | None) -> None:
        options, tail = self._options, None
        if options.tails:
            self._block.write_tail(self._tail_leaves)
            tail = self._tail
        if ends is None:
            self._producer.publish(tail=tail, begins=self._begins, version=self._policy.version)
        else:
            self._producer.publish(
                final_streams=ends.streams,
                finals=ends.finals,
                tail=tail,
                begins=self._begins,
                version=self._policy.version,
            )
        self._begins = False

    def _count_step(self, number: int, ends: Ends | None) -> None:
        self._returns += self._reward[number]
        self._lengths += 1
        if self._marks[number]:
            self._values[IS_INIT][:] = False
        if ends is None:
            return
        streams = ends.streams
        self._board.write(self._producer.finals, self._returns[streams], self._lengths[streams], ends.metrics)
        self._returns[streams], self._lengths[streams] = 0.0, 0
        self._name_trajectories(streams)
        self._values[IS_INIT][streams] = True

    def _name_trajectories(self, streams: np.ndarray) -> None:
        # Unique over all workers and lives: each counts its own and leaves room for the others.
        begun, options = self._counters[Counter.TRAJECTORIES], self._options
        numbers = begun + np.arange(len(streams))
        self._values[TRAJ_IDS][streams] = (
            numbers // self._count * options.num_streams + options.first_stream + numbers % self._count
        )
        self._counters[Counter.TRAJECTORIES] = begun + len(streams)

    def _begin(self) -> None:
        self._block.reset()
        self._begins = True
        self._returns.fill(0.0)
        self._lengths.fill(0)
        self._values[IS_INIT][:] = True
        self._name_trajectories(np.arange(self._count))

    def _wait_for_room(self) -> TensorDictBase | None:
        """Waits for a slot; goes on receiving weights and returns None when there is a command."""
        counters, pause = self._counters, _PAUSE
        while counters[Counter.COMMANDS] == self._commands:
            if (slot := self._producer.reserve()) is not None:
                return slot
            counters[Counter.LOOKS] += 1
            self._policy.receive()
            self._board.heartbeat.beat()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return None

    def _obey(self) -> bool:
        """Obeys the parent's messages and answers with their numbers; returns whether the streams may go on."""
        go_on = True
        while self._commands < self._counters[Counter.COMMANDS]:
            command, value = self._channel.recv()
            self._commands += 1
            if command == "seed":
                seed, epoch, static_seed, self._random_left = value
                self._seed(seed, epoch, static_seed)
                go_on = False
            self._channel.send(("done", self._commands))
        return go_on

    def _seed(self, seed: int | None, epoch: int, static_seed: bool) -> None:
        if seed is None:
            return
        options = self._options
        own = seed + epoch * options.num_streams + options.first_stream
        torch.manual_seed(own)
        np.random.seed(own % 2**32)
        random.seed(own)
        self._env.set_seed(own, static_seed=static_seed)
