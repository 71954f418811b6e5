# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Saving and restoring an ensemble: each member under its number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import ReplayBufferEnsemble

from torchrl_ext.data._members import Member
from torchrl_ext.data._prefetch_state import read_prefetch, write_prefetch

_FORMAT = "torchrl_ext.GroupedReplayBufferEnsemble/1"


class EnsembleState(ReplayBufferEnsemble):
    """The part of :class:`~torchrl_ext.data.GroupedReplayBufferEnsemble` that is saved and restored."""

    _members: list[Member]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of each member under its number, and the ensemble's own.

        Members' transforms, generators and batches sampled ahead are included. TorchRL's storages hand out views of
        their rows, ours copies.
        """
        with self._capture_prefetch_state() as prefetch_state:
            return {
                "format": _FORMAT,
                "members": {str(number): member.buffer.state_dict() for number, member in enumerate(self._members)},
                "own": self._own_state(),
                "prefetch_state": prefetch_state,
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`.

        Raises:
            ValueError: when the state is no ensemble's, has another number of members, or one of our storages cannot
                take its part. Nothing was changed.
        """
        if not isinstance(state_dict, dict) or state_dict.get("format") != _FORMAT:
            raise ValueError(f"load_state_dict: the state must have the format {_FORMAT}. Nothing was changed.")
        self._check_number("load_state_dict", len(state_dict["members"]))
        self._check_own_state("load_state_dict", state_dict["own"])
        states = [state_dict["members"].get(str(number)) for number in range(len(self._members))]
        for member, state in zip(self._members, states, strict=True):
            member.check_state(state)
        self._validate_prefetch_state(state_dict["prefetch_state"])
        self.synchronize()
        with self._futures_lock:
            self._clear_prefetch_queue_locked()
            with self._replay_lock:
                for member, state in zip(self._members, states, strict=True):
                    member.buffer.load_state_dict(state)
                self._load_own_state(state_dict["own"])
                self._restore_prefetch_queue_locked(state_dict["prefetch_state"])

    def dumps(self, path: str | Path) -> None:
        """Saves each member in a folder of its number; the description comes last, so that half a save is no save."""
        path = Path(path).absolute()
        path.mkdir(parents=True, exist_ok=True)
        description = path / "ensemble.json"
        description.unlink(missing_ok=True)
        with self._capture_prefetch_state(clone_queue=False) as prefetch_state:
            saved = [member.can_dump for member in self._members]
            for number, member in enumerate(self._members):
                if saved[number]:
                    member.buffer.dumps(path / str(number))
            torch.save(self._own_state(), path / "ensemble.pt")
            self._dump_prefetch_state(path, prefetch_state)
        partial = path / "ensemble.json.partial"
        partial.write_text(json.dumps({"format": _FORMAT, "saved": saved}))
        partial.replace(description)

    def loads(self, path: str | Path) -> None:
        """Restores what :meth:`dumps` saved.

        Raises:
            FileNotFoundError, ValueError: when it is no save of an ensemble or has another number of members; nothing
                was changed. A member's own error on damaged files leaves the members before it loaded.
        """
        path = Path(path).absolute()
        description = json.loads((path / "ensemble.json").read_text())
        if description.get("format") != _FORMAT:
            raise ValueError(f"loads: {path} must hold a save of the format {_FORMAT}. Nothing was changed.")
        self._check_number("loads", len(description["saved"]))
        own = torch.load(path / "ensemble.pt", weights_only=True)
        self._check_own_state("loads", own)
        prefetch_state = self._load_prefetch_state(path)
        self._validate_prefetch_state(prefetch_state)
        self.synchronize()
        with self._futures_lock:
            self._clear_prefetch_queue_locked()
            with self._replay_lock:
                for number, (member, saved) in enumerate(zip(self._members, description["saved"], strict=True)):
                    if saved:
                        member.buffer.loads(path / str(number))
                    else:
                        member.buffer.empty()
                self._load_own_state(own)
                self._restore_prefetch_queue_locked(prefetch_state, clone_queue=False)

    def _check_number(self, where: str, number: int) -> None:
        if number != len(self._members):
            raise ValueError(
                f"{where}: the state must have {len(self._members)} members, got {number}. Nothing was changed."
            )

    def _own_state(self) -> dict[str, Any]:
        rng = None if self._rng is None else (self._rng.get_state().clone(), str(self._rng.device))
        return {"transform": dict(self._transform.state_dict()), "batch_size": self._batch_size, "rng": rng}

    def _check_own_state(self, where: str, state: dict[str, Any]) -> None:
        wanted = self._transform.state_dict().keys()
        if state["transform"].keys() != wanted:
            raise ValueError(
                f"{where}: the ensemble's transform must have the state {list(wanted)}, got "
                f"{list(state['transform'])}. Nothing was changed."
            )

    def _load_own_state(self, state: dict[str, Any]) -> None:
        self._transform.load_state_dict(state["transform"])
        self._batch_size = state["batch_size"]
        if state["rng"] is not None:
            values, device = state["rng"]
            rng = torch.Generator(device=device)
            rng.set_state(values)
            self.set_rng(rng)

    def _dump_prefetch_state(self, path: Path, prefetch_state: dict[str, Any]) -> None:
        queue = tuple((batch, dict(info.items(True, True))) for batch, info in prefetch_state["queue"])
        write_prefetch(path, {**prefetch_state, "queue": queue})

    def _load_prefetch_state(self, path: Path) -> dict[str, Any] | None:
        state = read_prefetch(path)
        if state is not None:
            state["queue"] = tuple((batch, TensorDict(info, batch.batch_size)) for batch, info in state["queue"])
        return state
