# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""A worker's streams: one step of all of them, written into a row of the ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torchrl.envs import EnvBase

from torchrl_ext.collectors._row_plan import IS_INIT, POLICY_VERSION, TRAJ_IDS, RowPlan
from torchrl_ext.data.packing import pack_successors
from torchrl_ext.envs import EnvPoolEnv

__all__ = ["Ends", "PoolBlock", "StreamBlock", "TensorDictBlock", "make_block"]


class Ends(NamedTuple):
    """The streams that ended with a step."""

    streams: np.ndarray
    """int64 ``[m]``, ascending."""
    finals: torch.Tensor
    """uint8 ``[m, successor_bytes]``, their final observations."""
    metrics: np.ndarray | None
    """float64 ``[m, metrics]``."""


class StreamBlock(Protocol):
    """What a worker steps."""

    observation: TensorDictBase
    """``[n]``: what the policy sees next, and where it writes."""

    def reset(self) -> None:
        """Begins an episode in every stream."""

    def restore(self) -> None:
        """Makes ``observation`` show what comes, whatever a policy has put in its place."""

    def step(self, slot: int) -> Ends | None:
        """Steps with the action in ``observation``, writes the row of a slot."""

    def write_tail(self, out: dict[NestedKey, torch.Tensor]) -> None:
        """Writes the present observation."""


class PoolBlock:
    """The streams of an :class:`EnvPoolEnv`, by its own loop: each number is written once.

    Args:
        env (EnvPoolEnv): to step.
        plan (RowPlan): what a row keeps.
        slots (sequence of TensorDict): rows ``[n]`` that :meth:`step` may be asked to write.
    """

    def __init__(self, env: EnvPoolEnv, plan: RowPlan, slots: Sequence[TensorDict]) -> None:
        self._env, self._plan = env, plan
        self._bound = [env.bind_row(slot) for slot in slots]
        outputs = [key for key in plan.extra_keys if key not in (IS_INIT, TRAJ_IDS, POLICY_VERSION)]
        self._outputs = [[(key, slot.get(key)) for key in outputs] for slot in slots]
        self.observation: TensorDictBase = TensorDict({}, env.batch_size)
        self._live: list[tuple[str, torch.Tensor]] = []

    def reset(self) -> None:
        """See :class:`StreamBlock`."""
        self._env.reset()
        # The tensors stay the same, so the policy may always be given the same TensorDict to write into.
        self.observation = self._env.current_observation().copy()
        self._live = list(self._env.current_observation().items())

    def restore(self) -> None:
        """See :class:`StreamBlock`."""
        # A policy that answers with copies, from a device for one, has put them where the pool's own memory stood.
        for key, live in self._live:
            self.observation.set(key, live)

    def step(self, slot: int) -> Ends | None:
        """See :class:`StreamBlock`."""
        for key, target in self._outputs[slot]:
            target.copy_(self.observation.get(key))
        finals = self._env.step_into(self.observation.get("action"), self._bound[slot])
        if finals is None:
            return None
        layout, observations = self._plan.layout, finals.observations
        packed = pack_successors(layout, {key: observations.get(key) for key in layout.next_keys})
        return Ends(finals.streams.numpy(), packed, None)

    def write_tail(self, out: dict[NestedKey, torch.Tensor]) -> None:
        """See :class:`StreamBlock`."""
        observation = self._env.current_observation()
        for key, target in out.items():
            target.copy_(observation.get(key))


class TensorDictBlock:
    """The streams of any TorchRL environment, by ``step_and_maybe_reset``.

    Recurrent state that the environment's specs name (a ``TensorDictPrimer``) is carried and reset there.

    Args:
        env (EnvBase): of batch size ``[n]``, or ``[]`` for one stream.
        plan (RowPlan): what a row keeps.
        slots (sequence of TensorDict): rows ``[n]`` that :meth:`step` may be asked to write.
    """

    def __init__(self, env: EnvBase, plan: RowPlan, slots: Sequence[TensorDict]) -> None:
        self._env, self._plan = env, plan
        self._single = not env.batch_dims
        # The collector writes these itself, unless they are the environment's (an InitTracker has is_init).
        skipped = [key for key in (IS_INIT, TRAJ_IDS, POLICY_VERSION) if key in plan.extra_keys]
        self._targets = [[(key, view) for key, view in slot.items(True, True) if key not in skipped] for slot in slots]
        self.observation: TensorDictBase = TensorDict({}, env.batch_size)

    def reset(self) -> None:
        """See :class:`StreamBlock`."""
        self.observation = self._env.reset()

    def restore(self) -> None:
        """Nothing to do: each step brings observations of its own."""

    def step(self, slot: int) -> Ends | None:
        """See :class:`StreamBlock`."""
        row, self.observation = self._env.step_and_maybe_reset(self.observation)
        outcome = row.get("next")
        done = outcome.get("done")
        for flag in ("terminated", "truncated"):
            # "done" alone means termination in TorchRL.
            if outcome.get(flag, None) is None:
                outcome.set(flag, done.clone() if flag == "terminated" else torch.zeros_like(done))
        if self._single:
            row = row.unsqueeze(0)
            outcome, done = row.get("next"), done.unsqueeze(0)
        for key, target in self._targets[slot]:
            target.copy_(row.get(key))
        ended = np.flatnonzero(done.reshape(len(target), -1).any(-1).cpu().numpy())
        if not len(ended):
            return None
        layout, at = self._plan.layout, torch.from_numpy(ended)
        finals = {key: outcome.get(key)[at].cpu() for key in layout.next_keys}
        metrics = [outcome.get(key)[at].double().reshape(len(ended), -1).mean(-1) for key in self._plan.metric_keys]
        told = torch.stack(metrics, -1).cpu().numpy() if metrics else None
        return Ends(ended, pack_successors(layout, finals), told)

    def write_tail(self, out: dict[NestedKey, torch.Tensor]) -> None:
        """See :class:`StreamBlock`."""
        observation = self.observation.unsqueeze(0) if self._single else self.observation
        for key, target in out.items():
            target.copy_(observation.get(key))


def make_block(env: EnvBase, plan: RowPlan, slots: Sequence[TensorDict]) -> StreamBlock:
    """Returns the fastest block that serves an environment."""
    kind: Callable[..., Any] = PoolBlock if type(env) is EnvPoolEnv and not plan.metric_keys else TensorDictBlock
    return kind(env, plan, slots)
