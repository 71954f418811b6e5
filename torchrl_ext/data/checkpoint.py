# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Saving and restoring a storage: exact bytes, positions, side table."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

from torchrl_ext.data._block import (
    CUT,
    FINALS,
    HEAD,
    HOLES,
    NEWEST,
    PENDING,
    RESERVED,
    TAIL,
    UNCOUNTED,
    UNKNOWN,
    SlotBlock,
    used_slots,
)
from torchrl_ext.data.layout import FOLLOWED, RowLayout
from torchrl_ext.data.positions import newest_state
from torchrl_ext.data.sizing import POSITION_ROWS

if TYPE_CHECKING:
    from torchrl_ext.data.storages import SlotStorage

_FORMAT = "torchrl_ext.SlotStorage/1"
_SIZES = ("capacity", "num_streams", "final_capacity", "hole_capacity")
_TENSORS = ("positions", "final_step", "hole_step", "ring", "side")


def save_state(block: SlotBlock | None) -> dict[str, Any]:
    """Returns plain values and host copies of all that lives; slots that were never written are left out.

    What writers in other processes touched meanwhile is left out too, so that no saved row is torn.
    """
    if block is None:
        return {"format": _FORMAT, "geometry": None}
    if block.on_device:
        block.catch_up()  # what a device refused must not be missed in silence
        if block.device.type == "cuda":
            torch.cuda.synchronize(block.device)  # writes from other streams must have landed
    positions = host_copy(block.positions)  # before all others: what they change from here on is told by comparing
    if block.on_device:
        positions[NEWEST] = host_copy(newest_state(block))
    tensors = {
        "positions": positions,
        "final_step": block.final_step,
        "hole_step": block.hole_step,
        "ring": block.ring[: used_slots(positions.numpy(), block.capacity)],
        "side": block.rows[block.side_start : block.sink],
    }
    copies = {name: tensor if name == "positions" else host_copy(tensor) for name, tensor in tensors.items()}
    if block.kind in ("shared", "file"):
        _leave_out_changes(block, copies)
    return {"format": _FORMAT, "geometry": block.geometry(), **copies}


def copied_bytes(block: SlotBlock) -> torch.Tensor:
    """Returns a copy of all bytes of a host block, of one moment, as :func:`save_state` makes it."""
    positions = host_copy(block.positions)
    copy = SlotBlock.__new__(SlotBlock)
    copy.adopt(block.layout, block.geometry(), kind="cpu", device=block.device, bytes_=host_copy(block.bytes))
    if block.kind in ("shared", "file"):
        side = copy.rows[copy.side_start : copy.sink]
        parts = {"final_step": copy.final_step, "hole_step": copy.hole_step, "ring": copy.ring, "side": side}
        _leave_out_changes(block, {"positions": positions, **parts})
        copy.positions.copy_(positions)
    return copy.bytes


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy on the host."""
    return tensor.detach().cpu().clone()


def _leave_out_changes(block: SlotBlock, copies: dict[str, torch.Tensor]) -> None:
    """Makes copies say of each stream what was there before and after they were taken.

    Rows that a writer reserved meanwhile are not live, as after a writer that was killed; nor is the newest row of a
    stream that changed, whose successor may have been settled in between. It is the successor of the row before it.
    """
    positions, now = copies["positions"].numpy(), block.np_positions.copy()
    busy = (now != positions).any(0) | (positions[RESERVED] != positions[HEAD])
    # The newest row may be a hole, which is then not counted.
    place = (positions[HOLES] - 1) % block.hole_capacity
    holes = copies["hole_step"].numpy()
    newest = positions[HEAD] - 1
    positions[HOLES] -= busy & (positions[HOLES] > 0) & (holes[np.arange(block.num_streams), place] == newest)
    holes[holes >= np.where(busy, newest, positions[HEAD])[:, None]] = -1
    positions[UNCOUNTED] = np.where(now[TAIL] != positions[TAIL], now[UNCOUNTED], positions[UNCOUNTED])
    positions[TAIL] = now[TAIL]
    positions[HEAD] = np.maximum(positions[HEAD] - busy, now[TAIL])
    positions[RESERVED] = now[RESERVED]
    _leave_behind(positions, block.capacity)
    positions[NEWEST, busy] = UNKNOWN
    low = np.maximum(positions[TAIL], positions[HEAD] - block.capacity)
    _settle_newest(block, copies, np.flatnonzero(busy & (positions[HEAD] == newest) & (newest > low)))
    # Entries of rows that are not there would take places until as many rows were written.
    owners = copies["final_step"].numpy()
    owners[owners >= positions[HEAD][:, None]] = -1
    copies["ring"] = copies["ring"][: used_slots(positions, block.capacity)]


def _leave_behind(positions: np.ndarray, capacity: int) -> None:
    """Moves tails past the rows that are torn because a writer reserved their slots and did not publish."""
    head, reserved = positions[HEAD], positions[RESERVED]
    torn = np.where(reserved > head, np.minimum(reserved - capacity, head), 0)
    positions[TAIL] = np.maximum(positions[TAIL], torn)
    positions[RESERVED] = head


def _settle_newest(block: SlotBlock, copies: dict[str, torch.Tensor], streams: np.ndarray) -> None:
    """Tells what follows the newest rows of streams whose next rows, which live in the copies, are left out."""
    layout, positions, ring = block.layout, copies["positions"].numpy(), copies["ring"].numpy()
    step = positions[HEAD, streams]
    newest = np.ascontiguousarray(ring[(step - 1) % block.capacity, streams])
    is_followed = newest.view(np.int32)[:, layout.final_offset // 4] == FOLLOWED
    positions[NEWEST, streams] = np.where(is_followed, PENDING, CUT)
    if layout.derives:
        streams, step = streams[is_followed], step[is_followed]
        side = copies["side"].numpy().reshape(block.num_streams, block.final_capacity, -1)
        place, prefix = positions[FINALS, streams] % block.final_capacity, slice(layout.successor_bytes)
        side[streams, place, prefix] = ring[step % block.capacity, streams, prefix]


def check_state(storage: SlotStorage, state: dict[str, Any]) -> RowLayout | None:
    """Raises ``ValueError`` unless a state can be loaded into a storage; returns its layout."""

    def reject(what: str, wanted: Any, got: Any) -> NoReturn:
        raise ValueError(f"load_state_dict: the state must have {what} {wanted}, got {got}. Nothing was changed.")

    if not isinstance(state, dict) or state.get("format") != _FORMAT or "geometry" not in state:
        reject("format", _FORMAT, list(state) if isinstance(state, dict) else type(state).__name__)
    geometry = state["geometry"]
    if geometry is None:
        return None
    if not isinstance(geometry, dict) or not isinstance(geometry.get("layout"), dict):
        reject("a geometry", "with a layout", list(geometry) if isinstance(geometry, dict) else geometry)
    sizes = {name: geometry.get(name) for name in _SIZES}
    if not all(isinstance(size, int) for size in sizes.values()):
        reject("a geometry", f"with numbers for {_SIZES}", sizes)
    layout = RowLayout.from_dict(geometry["layout"])
    for name, wanted in (("capacity", storage.capacity), ("num_streams", storage.num_streams)):
        if geometry[name] != wanted:
            reject(name, wanted, geometry[name])
    if storage.layout is not None and storage.layout != layout:
        reject("the layout", list(storage.layout.by_key), list(layout.by_key))
    num, finals, holes = geometry["num_streams"], geometry["final_capacity"], geometry["hole_capacity"]
    shapes = {
        "positions": (torch.int64, (POSITION_ROWS, num)),
        "final_step": (torch.int64, (num, finals)),
        "hole_step": (torch.int64, (num, holes)),
        "side": (torch.uint8, (num * finals, layout.row_bytes)),
    }
    for name in _TENSORS:
        tensor = state.get(name)
        if not isinstance(tensor, torch.Tensor):
            reject("the tensor", name, type(tensor).__name__)
    for name, shape in shapes.items():
        got = (state[name].dtype, tuple(state[name].shape))
        if got != shape:
            reject(name, shape, got)
    positions = state["positions"]
    ring = (used_slots(positions.cpu().numpy(), storage.capacity), num, layout.row_bytes)
    if state["ring"].dtype != torch.uint8 or tuple(state["ring"].shape) != ring:
        reject("ring", (torch.uint8, ring), (state["ring"].dtype, tuple(state["ring"].shape)))
    if bool((positions < 0).any()) or bool((positions[TAIL] > positions[HEAD]).any()):
        reject("positions", "with 0 <= tail <= head", positions[[HEAD, TAIL]].tolist())
    if bool((positions[NEWEST] > CUT).any()):
        reject("newest rows", f"in states from 0 to {CUT}", positions[NEWEST].tolist())
    return layout


def load_state(storage: SlotStorage, state: dict[str, Any]) -> None:
    """Restores a checked state; the side table takes the saved size."""
    layout = check_state(storage, state)
    if layout is None:
        storage.empty()
        return
    geometry = state["geometry"]
    sizes = (geometry["final_capacity"], geometry["hole_capacity"])
    block = storage._block
    if block is None or (block.final_capacity, block.hole_capacity) != sizes:
        if storage._kind == "file" and block is not None:
            raise ValueError(
                f"SlotStorage: the saved state must have (final_capacity, hole_capacity) "
                f"{(block.final_capacity, block.hole_capacity)} to load into {storage._filename}, got {sizes}. "
                "Nothing was changed."
            )
        block = storage._make_block(layout, *sizes)
    block.sampleable = None
    positions = state["positions"].cpu().numpy().copy()
    _leave_behind(positions, block.capacity)
    block.positions.copy_(torch.from_numpy(positions))
    block.final_step.copy_(state["final_step"])
    block.hole_step.copy_(state["hole_step"])
    block.ring[: len(state["ring"])].copy_(state["ring"])
    block.rows[block.side_start : block.sink].copy_(state["side"])
    if block.on_device:
        block.mirror()
    storage._bind(block)


class SlotStorageCheckpointer(StorageCheckpointerBase):
    """Writes a storage as one JSON description and raw files, with a checksum of each."""

    def dumps(self, storage: SlotStorage, path: str | Path) -> None:
        """Saves under a folder; the description is written last and by rename, so that half a save is no save."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        with storage._lock:
            state = save_state(storage._block)
        description = {"format": state["format"], "geometry": state["geometry"], "tensors": {}}
        for name in _TENSORS if state["geometry"] is not None else ():
            array = np.ascontiguousarray(state[name].numpy())
            array.tofile(path / f"{name}.bin")
            description["tensors"][name] = [list(array.shape), str(array.dtype), zlib.crc32(array.data)]
        partial = path / "storage.json.partial"
        partial.write_text(json.dumps(description))
        partial.replace(path / "storage.json")

    def loads(self, storage: SlotStorage, path: str | Path) -> None:
        """Restores what :meth:`dumps` saved; raises ``ValueError`` when it is damaged. Nothing changes then."""
        path = Path(path)
        try:
            description = json.loads((path / "storage.json").read_text())
            state = {"format": description["format"], "geometry": description["geometry"]}
            for name, (shape, dtype, checksum) in description["tensors"].items():
                array = np.fromfile(path / f"{name}.bin", dtype=dtype)
                if zlib.crc32(array.data) != checksum:
                    raise ValueError(f"{name}.bin has another checksum than when it was saved")
                state[name] = torch.from_numpy(array.reshape(shape))
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"SlotStorage: {path} must hold a save, but {error.filename} does not exist. Nothing was changed."
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"SlotStorage: {path} must hold an undamaged save, got: {error}. Nothing was changed."
            ) from error
        storage.load_state_dict(state)
