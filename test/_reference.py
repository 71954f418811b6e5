# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The slow and plainly right model of the replay core, kept as Python lists and bytes.

It shares no code with the implementation and knows nothing of slots being reused, side tables, pending
successors or generations kept in tensors: a stream is a list of every row ever written, and each row carries
its own true successor. What the storage must answer follows from that list and from one sentence each:

Lives        step ``t`` of a stream lives iff ``max(tail, head - capacity) <= t < head``.
Identity     ``slot = t % capacity`` and ``generation = t // capacity`` name one row for ever.
Successor    what really followed the row; None while nobody knows it (or for ever, behind ``end_streams``).
Sampleable   live and its successor is known.
Return       adds rows ``t, t + 1, ...``; it ends with the n-th row, with a row that ``ends`` its piece of an
             episode, with the newest row, and before a row whose successor is unknown.
Final        a row owns a final observation iff its successor is not the observation stored one step later
             (derive mode only; a terminated row that came without one owns none, its own stands in).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection

Key = tuple[str, ...]
"""A nested key as a tuple, always: ``("next", "reward")``, ``("observation",)``."""

DONE: Key = ("next", "done")
TERMINATED: Key = ("next", "terminated")
TRUNCATED: Key = ("next", "truncated")
REWARD: Key = ("next", "reward")
FLAGS: tuple[Key, ...] = (DONE, TERMINATED, TRUNCATED)


# ------------------------------------------------------------------------------------------- bytes
def as_key(key: str | tuple[str, ...]) -> Key:
    """A nested key as a tuple."""
    return (key,) if isinstance(key, str) else tuple(key)


def tensor_bytes(value: torch.Tensor) -> bytes:
    """All bytes of a tensor in row-major order, whatever its dtype, strides and NaN payloads."""
    # A clone, since ``contiguous`` keeps the strides of dimensions of size one, and a view needs them to be one.
    value = value.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    return value.view(torch.uint8).numpy().tobytes() if value.numel() else b""


def leaves(data: TensorDictBase) -> dict[Key, torch.Tensor]:
    """All leaves by tuple key."""
    return {as_key(key): value for key, value in data.items(include_nested=True, leaves_only=True)}


def flat_rows(data: TensorDictBase) -> list[dict[Key, bytes]]:
    """One dictionary of bytes per element of the batch, row-major."""
    count = data.batch_size.numel()
    rows: list[dict[Key, bytes]] = [{} for _ in range(count)]
    for key, value in leaves(data).items():
        blob = tensor_bytes(value)
        size = len(blob) // count if count else 0
        for i, row in enumerate(rows):
            row[key] = blob[i * size : (i + 1) * size]
    return rows


def rows_of(run: TensorDictBase) -> list[list[dict[Key, bytes]]]:
    """``rows[k][n]`` of a run of batch size [K, N]."""
    steps, streams = run.batch_size
    flat = flat_rows(run)
    return [flat[k * streams : (k + 1) * streams] for k in range(steps)]


def state_bytes(state: Any) -> Any:
    """A picture of any nested state that compares equal iff every byte is equal.

    Takes tensors, TensorDicts, dicts, lists, tuples and plain values; floats and NaN compare by their bits.
    """
    if isinstance(state, torch.Tensor):
        return str(state.dtype), tuple(state.shape), tensor_bytes(state)
    if isinstance(state, np.ndarray):
        return str(state.dtype), state.shape, state.tobytes()
    if is_tensor_collection(state):
        items = sorted(leaves(state).items())
        return tuple(state.batch_size), [(key, state_bytes(value)) for key, value in items]
    if isinstance(state, dict):
        return [(repr(key), state_bytes(value)) for key, value in sorted(state.items(), key=lambda kv: repr(kv[0]))]
    if isinstance(state, (list, tuple)):
        return [state_bytes(value) for value in state]
    if isinstance(state, torch.Generator):
        return tensor_bytes(state.get_state())
    return repr(state)


# ------------------------------------------------------------------------------------------- records
@dataclass
class Record:
    """One row as it was written, with what really followed it."""

    step: int
    fields: dict[Key, bytes]
    """What the storage must keep, bit for bit."""
    observation: dict[Key, bytes]
    """The next keys at the root: what the row before this one has as its successor."""
    successor: dict[Key, bytes] | None
    """By root key. None: unknown."""
    expected: dict[Key, bytes] | None
    """What the next row must start with to continue this one; None: whatever comes continues (or ``ends``)."""
    reward: list[float]
    done: bool
    terminated: bool
    truncated: bool
    ends: bool
    """No return reads past this row."""
    owns_final: bool
    """Its successor is stored nowhere else in the ring."""


class Transition(NamedTuple):
    """What sampling row (stream, step) must return."""

    fields: dict[Key, bytes]
    """The stored fields, without reward, flags and successor: those of the first row, in store mode with ``next``
    of the last row used."""
    successor: dict[Key, bytes]
    flags: dict[Key, bytes]
    """The stored flags of the last row used."""
    reward: list[float]
    steps: int
    discount: float
    terminated: bool


class RejectedRunError(Exception):
    """The contract says that this run must be refused."""


@dataclass
class Stream:
    """Every row ever written to one stream, and where its life begins."""

    rows: dict[int, Record] = field(default_factory=dict)
    head: int = 0
    tail: int = 0


# ------------------------------------------------------------------------------------------- the model
class Reference:
    """A storage of ``num_streams`` streams that forgets nothing and answers from lists.

    Args:
        capacity (int): slots per stream.
        num_streams (int): streams.
        next_obs (str): ``"derive"`` or ``"store"``.
        next_keys (list of Key): observations at the root whose successor a row has.
        reward_dtype (torch.dtype): how to read the reward's bytes.
    """

    def __init__(
        self,
        capacity: int,
        num_streams: int,
        *,
        next_obs: str = "derive",
        next_keys: list[Key] | None = None,
        reward_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.capacity = capacity
        self.num_streams = num_streams
        self.next_obs = next_obs
        self.next_keys = [as_key(key) for key in (next_keys if next_keys is not None else [("observation",)])]
        self.reward_dtype = reward_dtype
        self.streams = [Stream() for _ in range(num_streams)]
        self.write_count = 0

    # ---------------------------------------------------------------- writing
    def extend_batch(self, run: TensorDictBase, *, streams: slice | None = None) -> None:
        """Writes ``K`` steps of the streams in ``streams``; ``run`` is [K, n] with or without successors."""
        first, last = self._block(streams)
        rows = rows_of(run)
        carries = self._carries_next(set(leaves(run)))
        if len(rows[0]) != last - first:
            raise RejectedRunError(f"{len(rows[0])} columns for {last - first} streams")
        if not carries:
            for row in (row for step in rows for row in step):
                done, terminated, truncated = (_flag(row, key) for key in FLAGS)
                if truncated or (done and not terminated):
                    raise RejectedRunError("a truncated row without a final observation")
        for column, n in enumerate(range(first, last)):
            self._extend_stream(self.streams[n], [step[column] for step in rows], carries)
        self.write_count += len(rows) * (last - first)

    def extend(self, data: TensorDictBase) -> None:
        """TorchRL's [N, T]."""
        self.extend_batch(data.transpose(0, 1))

    def add(self, data: TensorDictBase) -> None:
        """One step of all streams, [N]."""
        self.extend_batch(data.unsqueeze(0))

    def end_streams(self, streams: slice | None = None) -> None:
        """What comes next does not continue the newest row."""
        for n in range(*self._block(streams)):
            stream = self.streams[n]
            if not self._alive(stream, stream.head - 1):
                continue
            newest = stream.rows[stream.head - 1]
            if not newest.ends and newest.expected is not None:
                newest.owns_final = self.next_obs == "derive"
            newest.ends = True

    def empty(self) -> None:
        """Everything dies; every stream goes on at the start of its next lap."""
        for stream in self.streams:
            stream.head = stream.tail = -(-stream.head // self.capacity) * self.capacity
        self.write_count = 0

    def copy(self) -> Reference:
        """What a save followed by a load must give back."""
        return copy.deepcopy(self)

    def _block(self, streams: slice | None) -> tuple[int, int]:
        if streams is None:
            return 0, self.num_streams
        first = 0 if streams.start is None else streams.start
        last = self.num_streams if streams.stop is None else streams.stop
        if not 0 <= first < last <= self.num_streams or streams.step not in (None, 1):
            raise RejectedRunError(f"block {streams} of {self.num_streams} streams")
        return first, last

    def _carries_next(self, keys: set[Key]) -> bool:
        present = [("next", *key) in keys for key in self.next_keys]
        if any(present) and not all(present):
            raise RejectedRunError("some next keys present, others not")
        if self.next_obs == "store" and not all(present):
            raise RejectedRunError("stored next observations missing")
        return all(present)

    def _extend_stream(self, stream: Stream, rows: list[dict[Key, bytes]], carries: bool) -> None:
        for row in rows:
            observation = {key: row[key] for key in self.next_keys}
            followed = {key: row[("next", *key)] for key in self.next_keys} if carries else None
            done, terminated, truncated = (_flag(row, key) for key in FLAGS)
            flagged = done or terminated or truncated
            if flagged:
                successor = followed if carries else dict(observation)
            else:
                successor = followed
            derive = self.next_obs == "derive"
            record = Record(
                step=stream.head,
                fields={k: v for k, v in row.items() if not (derive and k[0] == "next" and k[1:] in self.next_keys)},
                observation=observation,
                successor=successor,
                expected=None if flagged else followed,
                reward=self._floats(row[REWARD]) if REWARD in row else [],
                done=done,
                terminated=terminated,
                truncated=truncated,
                ends=flagged,
                owns_final=derive and flagged and carries,
            )
            if self._alive(stream, stream.head - 1):
                self._follow(stream.rows[stream.head - 1], observation)
            stream.rows[stream.head] = record
            stream.head += 1

    def _follow(self, newest: Record, observation: dict[Key, bytes]) -> None:
        """The next row of the stream starts with ``observation``: what does that say of the newest row?"""
        if newest.ends:
            return
        if newest.expected is None:
            newest.successor = dict(observation)
        elif newest.expected != observation:
            newest.ends = True
            newest.owns_final = self.next_obs == "derive"

    # ---------------------------------------------------------------- reading
    def _alive(self, stream: Stream, step: int) -> bool:
        return max(stream.tail, stream.head - self.capacity, 0) <= step < stream.head

    def lives(self, stream: int, step: int) -> bool:
        """Whether the row (stream, step) lives."""
        return self._alive(self.streams[stream], step)

    def live(self) -> Iterator[tuple[int, int]]:
        """(stream, step) of all live rows."""
        for n, stream in enumerate(self.streams):
            for step in range(max(stream.tail, stream.head - self.capacity), stream.head):
                yield n, step

    def __len__(self) -> int:
        return sum(1 for _ in self.live())

    def live_range(self) -> tuple[list[int], list[int]]:
        """Per stream: first live step, head."""
        lo = [max(s.tail, s.head - self.capacity) for s in self.streams]
        return lo, [s.head for s in self.streams]

    def record(self, stream: int, step: int) -> Record:
        """The row itself."""
        return self.streams[stream].rows[step]

    def generation(self, slot: int, stream: int) -> int:
        """Lap number of the live row at (slot, stream), or -1."""
        for step in range(*(side[stream] for side in self.live_range())):
            if step % self.capacity == slot:
                return step // self.capacity
        return -1

    def step_at(self, slot: int, stream: int) -> int:
        """Step of the live row at (slot, stream)."""
        generation = self.generation(slot, stream)
        if generation < 0:
            raise KeyError((slot, stream))
        return generation * self.capacity + slot

    def sampleable(self) -> set[tuple[int, int]]:
        """(stream, step) of all rows that may be drawn."""
        return {(n, step) for n, step in self.live() if self.record(n, step).successor is not None}

    def num_finals(self) -> int:
        """Final observations that must be kept now."""
        return sum(self.record(n, step).owns_final for n, step in self.live())

    def transition(self, stream: int, step: int, n_steps: int, gamma: float) -> Transition:
        """What row (stream, step) must look like when it is drawn with ``n_steps`` and ``gamma``."""
        first = last = self.record(stream, step)
        if first.successor is None:
            raise KeyError((stream, step))
        total = [0.0 for _ in first.reward]
        used = 0
        while True:
            total = [t + gamma**used * r for t, r in zip(total, last.reward, strict=True)]
            used += 1
            follower = last.step + 1
            if used == n_steps or last.ends or not self.lives(stream, follower):
                break
            if self.record(stream, follower).successor is None:
                break
            last = self.record(stream, follower)
        special = {REWARD, *FLAGS, *(("next", *key) for key in self.next_keys)}
        fields = {key: value for key, value in first.fields.items() if key not in special}
        if self.next_obs == "store":  # all of "next" is what the last row used had there
            fields |= {key: last.fields[key] for key in fields if key[0] == "next"}
        return Transition(
            fields=fields,
            successor=last.successor,
            flags={key: last.fields[key] for key in FLAGS if key in last.fields},
            reward=total,
            steps=used,
            discount=gamma**used,
            terminated=last.terminated,
        )

    def _floats(self, blob: bytes) -> list[float]:
        if not blob:
            return []
        return torch.frombuffer(bytearray(blob), dtype=self.reward_dtype).double().tolist()


def _flag(row: dict[Key, bytes], key: Key) -> bool:
    return any(row.get(key, b""))
