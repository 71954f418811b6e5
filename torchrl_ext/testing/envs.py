# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""A vectorised environment that can be checked by reading one of its observations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

ENDS = {"terminated": (True, False), "truncated": (False, True), "both": (True, True)}


class CountingEnv(EnvBase):
    """``N`` streams whose observations are (stream, episode, step): any misplaced row shows in the data.

    The successor of (stream, episode, step) is (stream, episode, step + 1), the true final one included; the reset
    observation is (stream, episode + 1, 0). Actions change nothing. Every reset, flagged or not, begins an episode.

    Args:
        num_streams (int): streams; the batch size is ``[num_streams]``.
        lengths (int or sequence): steps per episode. One number for all, or one entry per stream: a number or the
            numbers its episodes cycle through.
        ends (str or sequence of str): how episodes end: ``"terminated"``, ``"truncated"``, ``"both"``. A sequence
            is cycled through, episode by episode, each stream starting at its own place.
        first_stream (int): id of the first stream, so that several environments can be told apart.
        device (torch.device or str): where the data is made.

    Reads ``action``; writes ``observation`` (float32 [3]), ``("privileged", "code")`` (int64 [1], the same identity
    as one number), ``reward`` (float32 [1], see :meth:`reward_of`) and ``done``, ``terminated``, ``truncated``.

    Raises:
        ValueError: if a length is below 1, if lengths are not one per stream, or if an end has no such name.
        RuntimeError: if a stream is stepped after its end: nothing may be collected there.
    """

    batch_locked = True

    def __init__(
        self,
        num_streams: int = 3,
        lengths: int | Sequence[int | Sequence[int]] = 5,
        *,
        ends: str | Sequence[str] = "truncated",
        first_stream: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(device=device, batch_size=torch.Size([num_streams]))
        per_stream = [lengths] * num_streams if isinstance(lengths, int) else list(lengths)
        if len(per_stream) != num_streams:
            raise ValueError(f"CountingEnv: lengths must have one entry per stream ({num_streams}), got {lengths!r}.")
        self._lengths = [[entry] if isinstance(entry, int) else list(entry) for entry in per_stream]
        if not all(cycle and min(cycle) >= 1 for cycle in self._lengths):
            raise ValueError(f"CountingEnv: an episode must last at least 1 step, got lengths {lengths!r}.")
        self._ends = [ends] if isinstance(ends, str) else list(ends)
        if not self._ends or not set(self._ends) <= set(ENDS):
            raise ValueError(f"CountingEnv: ends must be among {sorted(ENDS)}, got {ends!r}.")
        self._first_stream = first_stream
        self._episode = [-1] * num_streams
        self._count = [0] * num_streams
        where = {"shape": self.batch_size, "device": self.device}
        column = {"shape": (num_streams, 1), "device": self.device}
        self.observation_spec = Composite(
            {
                "observation": Unbounded((num_streams, 3), dtype=torch.float32, device=self.device),
                "privileged": Composite({"code": Unbounded(**column, dtype=torch.int64)}, **where),
            },
            **where,
        )
        self.action_spec = Bounded(-1.0, 1.0, **column, dtype=torch.float32)
        self.reward_spec = Unbounded(**column, dtype=torch.float32)
        flags = {name: Categorical(2, **column, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
        self.done_spec = Composite(flags, **where)

    @staticmethod
    def identity(observation: torch.Tensor) -> torch.Tensor:
        """(stream, episode, step) as int64 ``[..., 3]``."""
        return observation.long()

    @staticmethod
    def code_of(identity: torch.Tensor) -> torch.Tensor:
        """The second observation key of an identity ``[..., 3]``: int64 ``[..., 1]``."""
        return identity @ torch.tensor([[10**8], [10**4], [1]], device=identity.device)

    @staticmethod
    def reward_of(identity: torch.Tensor) -> torch.Tensor:
        """Reward of the step taken at an identity ``[..., 3]``: float32 ``[..., 1]``."""
        return (identity @ torch.tensor([[100], [10], [1]], device=identity.device) + 1).float()

    def length_of(self, stream: int, episode: int) -> int:
        """Steps of an episode."""
        cycle = self._lengths[stream - self._first_stream]
        return cycle[episode % len(cycle)]

    def end_of(self, stream: int, episode: int) -> str:
        """How an episode ends."""
        return self._ends[(stream + episode) % len(self._ends)]

    def _identities(self) -> torch.Tensor:
        pairs = zip(self._episode, self._count, strict=True)
        triples = [(self._first_stream + n, episode, count) for n, (episode, count) in enumerate(pairs)]
        return torch.tensor(triples, dtype=torch.int64, device=self.device).reshape(*self.batch_size, 3)

    def _observe(self, identity: torch.Tensor, flags: dict[str, list[bool]]) -> TensorDict:
        out = TensorDict({}, batch_size=self.batch_size, device=self.device)
        out["observation"] = identity.float()
        out["privileged", "code"] = self.code_of(identity)
        for name, raised in flags.items():
            out[name] = torch.tensor(raised, dtype=torch.bool, device=self.device).unsqueeze(-1)
        return out

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDict:
        mask = [True] * self.batch_size.numel()
        if tensordict is not None and "_reset" in tensordict.keys():
            mask = tensordict["_reset"].reshape(*self.batch_size, -1).any(-1).tolist()
        for n in (n for n, wanted in enumerate(mask) if wanted):
            self._episode[n] += 1
            self._count[n] = 0
        off = [False] * len(mask)
        return self._observe(self._identities(), {"done": off, "terminated": off, "truncated": off})

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        here = self._identities()
        terminated, truncated = [], []
        for n, episode in enumerate(self._episode):
            stream = self._first_stream + n
            length = self.length_of(stream, episode)
            if episode < 0 or self._count[n] >= length:
                raise RuntimeError(f"CountingEnv: stream {stream} must be reset before it is stepped. Nothing moved.")
            over = self._count[n] + 1 == length
            ends = ENDS[self.end_of(stream, episode)]
            terminated.append(over and ends[0])
            truncated.append(over and ends[1])
        self._count = [count + 1 for count in self._count]
        done = [a or b for a, b in zip(terminated, truncated, strict=True)]
        out = self._observe(self._identities(), {"done": done, "terminated": terminated, "truncated": truncated})
        out["reward"] = self.reward_of(here)
        return out

    def _set_seed(self, seed: int | None) -> None:
        """Nothing is random here."""
