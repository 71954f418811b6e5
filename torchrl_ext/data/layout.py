# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The byte layout of one row: every field of a record in one packed struct."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_leaf_nontensor, unravel_key

from torchrl_ext.data._row_plan import plan_row
from torchrl_ext.data.fields import Field, as_tuple

if TYPE_CHECKING:
    from torchrl_ext.data.packing import PackedRun

__all__ = ["Field", "RowLayout"]

#: Values of the hidden ``final`` field that are not a position in the side table.
FOLLOWED = -1  # the successor is the next row of the stream (or, for the newest row, the pending successor)
NO_SUCCESSOR = -2  # a cut whose successor is not in the side table; the row's own observation stands in
HOLE = -3  # the stream was cut before the successor was known; the row is never sampled as a transition


@dataclass(frozen=True)
class RowLayout:
    """A row as one packed struct, in a canonical order that does not depend on insertion order.

    The keys whose successor is derived come first and form one contiguous prefix, the others follow; each group is
    ordered by decreasing size, then by name. Every leaf is aligned to its item size, leaves of 16 bytes or more to 16.
    A hidden int32 ``final`` ends the row; ``row_bytes`` and ``successor_bytes`` are multiples of 16, so that rows and
    successors move in 16-byte words. Equal layouts compare equal, hash equal and share :attr:`digest`.

    Build one with :meth:`from_tensordict` or :meth:`from_spec`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_ext.data import RowLayout
        >>> record = TensorDict(
        ...     {
        ...         "observation": torch.zeros(3),
        ...         "action": torch.zeros(1),
        ...         "next": {
        ...             "observation": torch.zeros(3),
        ...             "reward": torch.zeros(1),
        ...             "done": torch.zeros(1, dtype=torch.bool),
        ...         },
        ...     }
        ... )
        >>> layout = RowLayout.from_tensordict(record)
        >>> layout.next_keys, layout.successor_bytes, layout.row_bytes
        (('observation',), 16, 32)
        >>> rows = torch.zeros(5, layout.row_bytes, dtype=torch.uint8)
        >>> layout.view(rows)["next", "reward"].shape
        torch.Size([5, 1])
    """

    fields: tuple[Field, ...]
    next_keys: tuple[NestedKey, ...]
    next_obs: Literal["derive", "store"]
    successor_bytes: int
    final_offset: int
    row_bytes: int

    @classmethod
    def from_tensordict(
        cls,
        example: TensorDictBase,
        *,
        batch_dims: int | None = None,
        next_obs: Literal["derive", "store"] = "derive",
        next_keys: Sequence[NestedKey] | None = None,
    ) -> RowLayout:
        """Builds the layout of the records of a TensorDict.

        Args:
            example (TensorDictBase): one record or a batch of them.

        Keyword Args:
            batch_dims (int, optional): leading dims of each leaf that are not part of a record. Defaults to
                ``example.batch_dims``.
            next_obs ("derive" or "store"): ``"derive"`` stores each observation once and takes the successor from the
                following row; ``"store"`` keeps what is under ``"next"`` in the row. Defaults to ``"derive"``; records
                that have nothing under ``"next"`` are stored as they are.
            next_keys (sequence of NestedKey, optional): root keys whose successor counts. Defaults to the keys that
                are present both at the root and under ``"next"``, done flags excepted.

        Raises:
            ValueError: if ``"derive"`` finds no key to derive, or a leaf is empty or lacks a batch dim.
            KeyError: if a next key is not a field at the root.
            TypeError: if a leaf is not a tensor.
        """
        dims = example.batch_dims if batch_dims is None else batch_dims
        leaves = {}
        for key, leaf in example.items(True, True, is_leaf=is_leaf_nontensor):
            if not isinstance(leaf, torch.Tensor):
                raise TypeError(f"RowLayout: key {unravel_key(key)!r} must be a tensor, got {type(leaf).__name__}.")
            if not 0 <= dims <= leaf.dim():
                raise ValueError(
                    f"RowLayout: batch_dims must be from 0 to the dims of each leaf, got {dims} and {key!r} of shape "
                    f"{list(leaf.shape)}."
                )
            leaves[unravel_key(key)] = (leaf.dtype, leaf.shape[dims:])
        return cls._build(leaves, next_obs, next_keys)

    @classmethod
    def from_spec(
        cls,
        spec: TensorDictBase,
        *,
        next_obs: Literal["derive", "store"] = "derive",
        next_keys: Sequence[NestedKey] | None = None,
    ) -> RowLayout:
        """Builds the layout from a TorchRL ``Composite`` that describes a record, as :meth:`from_tensordict` does.

        Args:
            spec (Composite): leaves at the root and under ``"next"``; its own shape is not part of a record.

        Keyword Args:
            next_obs, next_keys: as in :meth:`from_tensordict`.
        """
        return cls.from_tensordict(spec.zero(), batch_dims=len(spec.shape), next_obs=next_obs, next_keys=next_keys)

    @classmethod
    def _build(
        cls, leaves: Mapping, next_obs: Literal["derive", "store"], next_keys: Sequence[NestedKey] | None
    ) -> RowLayout:
        return cls(**plan_row(leaves, next_obs, next_keys)._asdict())

    @property
    def derives(self) -> bool:
        """Whether successors are derived from the following row."""
        return self.next_obs == "derive"

    @cached_property
    def by_key(self) -> dict[NestedKey, Field]:
        """The fields by key, in canonical order."""
        return {field.key: field for field in self.fields}

    @cached_property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the canonical description: equal layouts have equal digests, on every machine."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Describes the layout by plain lists, strings and numbers (for checkpoints and handshakes)."""
        return {
            "next_obs": self.next_obs,
            "next_keys": [list(as_tuple(key)) for key in self.next_keys],
            "fields": [
                [list(as_tuple(f.key)), str(f.dtype).removeprefix("torch."), list(f.shape), f.offset]
                for f in self.fields
            ],
            "row_bytes": self.row_bytes,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> RowLayout:
        """Rebuilds a layout from :meth:`to_dict`; raises ``ValueError`` when the description is not one."""
        try:
            leaves = {
                unravel_key(tuple(key)): (getattr(torch, dtype), torch.Size(shape))
                for key, dtype, shape, _ in state["fields"]
            }
            keys = [unravel_key(tuple(key)) for key in state["next_keys"]]
            layout = cls._build(leaves, state["next_obs"], keys)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"RowLayout: the saved description is damaged ({error}).") from error
        if layout.to_dict() != dict(state):
            raise ValueError("RowLayout: the saved description was made by another version of the layout rules.")
        return layout

    def view(self, rows: torch.Tensor) -> TensorDict:
        """Shows packed rows as a TensorDict of zero-copy strided views.

        Args:
            rows (torch.Tensor): uint8 of shape ``[*batch, row_bytes]``, bytes of a row contiguous.

        Returns:
            TensorDict: batch size ``[*batch]``, on the device of ``rows``; writing to a leaf writes the bytes.
        """
        return self.assemble(self.leaves(rows, self.fields), rows.shape[:-1], rows.device)

    def view_successors(self, rows: torch.Tensor) -> TensorDict:
        """Shows successor prefixes ``[*batch, >= successor_bytes]`` as a TensorDict that holds only the next keys."""
        leaves = self.leaves(rows, self.prefix)
        return self.assemble(leaves, rows.shape[:-1], rows.device)

    def pack(self, run: TensorDictBase, *, extra: Literal["raise", "drop"] = "raise") -> PackedRun:
        """Packs ``K`` steps of ``N`` streams into bytes that :meth:`SlotStorage.extend_batch` moves as they are.

        Args:
            run (TensorDictBase): batch size ``[K, N]``, time first, on any device.

        Keyword Args:
            extra ("raise" or "drop"): what to do with keys the layout does not have. Defaults to ``"raise"``.

        Returns:
            PackedRun: rows, final observations and tail on the device of the run.

        Raises:
            KeyError, ValueError: as :meth:`SlotStorage.extend_batch` does.
        """
        from torchrl_ext.data.packing import pack_run

        return pack_run(self, run, extra=extra)

    @cached_property
    def prefix(self) -> tuple[Field, ...]:
        """The fields whose successor is derived: the first ones of a row."""
        return self.fields[: len(self.next_keys)] if self.derives else ()

    def leaves(self, rows: torch.Tensor, fields: Sequence[Field]) -> dict[NestedKey, torch.Tensor]:
        """Returns the views of some fields by key (see :meth:`view`)."""
        typed: dict[torch.dtype, torch.Tensor] = {}
        views = {}
        for field in fields:
            base = typed.get(field.dtype)
            if base is None:
                base = typed[field.dtype] = rows.view(field.dtype)
            view = base.narrow(-1, field.start, field.numel)
            dims = len(field.shape)
            views[field.key] = view if dims == 1 else view.unflatten(-1, field.shape) if dims else view.squeeze(-1)
        return views

    @staticmethod
    def assemble(leaves: Mapping[NestedKey, torch.Tensor], batch: torch.Size, device: torch.device) -> TensorDict:
        """Nests flat leaves into a TensorDict of the given batch size without copying or checking them again."""
        tree: dict[str, Any] = {}
        for key, leaf in leaves.items():
            if isinstance(key, str):
                tree[key] = leaf
                continue
            node = tree
            for part in key[:-1]:
                node = node.setdefault(part, {})
            node[key[-1]] = leaf
        return _nest(tree, batch, device)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, RowLayout) and self.digest == other.digest)


def _nest(tree: dict[str, Any], batch: torch.Size, device: torch.device) -> TensorDict:
    source = {key: _nest(leaf, batch, device) if isinstance(leaf, dict) else leaf for key, leaf in tree.items()}
    # The public constructor checks shapes and devices that a layout guarantees; on the hot path that is 50 us a batch.
    return TensorDict._new_unsafe(source, batch_size=batch, device=device)
