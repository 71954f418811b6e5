# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""How an ensemble writes: records and updates, grouped once and checked for all members before the first is written."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, cast

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn.utils import _set_dispatch_td_nn_modules

from torchrl_ext.data._ensemble_options import route
from torchrl_ext.data._ensemble_sampling import EnsembleSampling
from torchrl_ext.data._member_rows import MemberGroups
from torchrl_ext.data._member_updates import RoutedUpdate, flatten_update
from torchrl_ext.data.queued_updates import QueuedUpdates
from torchrl_ext.data.write_back import WriteBackResult


class EnsembleWriting(QueuedUpdates, EnsembleSampling):
    """The part of :class:`~torchrl_ext.data.GroupedReplayBufferEnsemble` that writes."""

    def extend(self, data: TensorDictBase, *, update_priority: bool | None = None) -> TensorDict:
        """Writes each record to its member, one write per member that has records.

        Records keep their order inside each member: in a :class:`~torchrl_ext.data.SlotReplayBuffer` of one stream they
        are consecutive steps; one of several streams routes them on by its own ``routing_key``.

        Member ids, stream ids, keys, shapes and dtypes are checked for all members before the first is written, with
        members' inverse transforms tried on copies. What no check can foresee is left to the members: memory that runs
        out, a hook of a TorchRL member (transforms, priorities) that fails on values, and a side table that is full and
        cannot grow. Members of that last kind come first, so that one of them refuses before anything was written.

        Args:
            data (TensorDictBase): any batch size; ``routing_key`` or ``routing_dim`` names the members.

        Returns:
            TensorDict: batch size ``[M]``, aligned with ``data.reshape(-1)``: ``"buffer_ids"`` and ``"index"`` (in the
            member), int64, and ``"index_generation"`` when every member tracks generations. A record that a later one
            of the same call replaced has the generation of its own write, so that its handle is stale.

        Raises:
            TypeError, ValueError, KeyError, RuntimeError: see above. Nothing was written.
        """
        if update_priority is not None:
            raise NotImplementedError("extend: update_priority belongs to a member; leave it None.")
        if isinstance(data, TensorDictBase) and len(self._transform):
            with _set_dispatch_td_nn_modules(True):
                data = self._transform.inv(data)
        if not isinstance(data, TensorDictBase):
            raise TypeError(f"extend: data must be a TensorDict, got {type(data).__name__}. Nothing was written.")
        records, ids = route(data, len(self._members), self.routing_key, self.routing_dim)
        groups = MemberGroups(ids, len(self._members), "extend")
        with self._replay_lock, self._write_lock:
            arranged = groups.sort(records)
            writes = [(self._members[number], self._without_routing(number, arranged[span])) for number, span in groups]
            for member, part in writes:
                member.check_extend(part)
            written = {
                member: member.extend(part) for member, part in sorted(writes, key=lambda w: not w[0].may_refuse)
            }
        handles = [written[member] for member, _ in writes]
        as_handles: dict[str, Any] = {"dtype": torch.int64, "device": ids.device}
        metadata = {"buffer_ids": ids, "index": groups.join([rows for rows, _ in handles], **as_handles)}
        if self._writer.tracks_generations:
            generations = [cast(torch.Tensor, generation) for _, generation in handles]
            metadata["index_generation"] = groups.join(generations, **as_handles)
        return TensorDict(metadata, [len(ids)])

    def _without_routing(self, number: int, records: TensorDictBase) -> TensorDictBase:
        key = self.routing_key
        return records if key is None or self._members[number].stores(key) else records.exclude(key)

    def update_if_present(
        self,
        *,
        index: TensorDictBase,
        generation: torch.Tensor,
        patch: Mapping[NestedKey, torch.Tensor] | TensorDictBase,
        version_key: NestedKey | None = None,
        version: int | torch.Tensor | None = None,
        require_newer: bool = False,
    ) -> WriteBackResult:
        """Overwrites fields of records that still live, in the members that own them.

        Rows are grouped once. The update is checked for every member concerned before it applies to any. Of several
        live handles of one record the last wins in every member, or the one with the highest version.

        Keyword Args:
            index (TensorDictBase): ``"buffer_ids"`` and ``"index"``, as in a sample or in what :meth:`extend` returned.
            generation (torch.Tensor): one per row.
            patch (mapping or TensorDictBase): stored keys and their new content, leading with the shape of
                ``buffer_ids``.
            version_key, version, require_newer: as in :meth:`SlotReplayBuffer.update_if_present`.

        Returns:
            WriteBackResult: masks in the shape of ``buffer_ids``, on its device.

        Raises:
            KeyError, TypeError, ValueError: when something does not fit. Nothing was changed.
            RuntimeError: when a member does not track generations. Nothing was changed.
        """
        self._refuse_untracked("update_if_present")
        update = flatten_update(index, generation, patch, version_key, version, require_newer)
        self._wait_for_updates()
        return self._apply_update(update)

    def submit_update_if_present(
        self,
        *,
        index: TensorDictBase,
        generation: torch.Tensor,
        patch: Mapping[NestedKey, torch.Tensor] | TensorDictBase,
        version_key: NestedKey | None = None,
        version: int | torch.Tensor | None = None,
        require_newer: bool = False,
        donate: bool = False,
    ) -> Future[WriteBackResult]:
        """Submits :meth:`update_if_present`; order, ownership and failure are those of a single buffer.

        With member ids on the host, keys, shapes and dtypes are checked here, for the members concerned; with member
        ids on a device the future raises. Where all members are on one CUDA device the update is enqueued at once.

        Keyword Args:
            donate (bool, optional): see :meth:`SlotReplayBuffer.submit_update_if_present`.

        Returns:
            Future: of a :class:`WriteBackResult`.

        Raises:
            RuntimeError: see :meth:`SlotReplayBuffer.submit_update_if_present`.
        """
        self._refuse_untracked("submit_update_if_present")
        update = flatten_update(index, generation, patch, version_key, version, require_newer)
        if update.ids.device.type == "cpu":
            groups = MemberGroups(update.ids, len(self._members), "submit_update_if_present")
            one = update.replaced([tensor[:1] for tensor in update.tensors()])
            for number, _ in groups:
                self._members[number].check_update(one.arguments())
        devices = {member.buffer.storage.device for member in self._members}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        on_device = device.type != "cpu"
        return self._submit(update, device, self._apply_update, donate=donate or on_device, at_once=on_device)

    def _refuse_untracked(self, where: str) -> None:
        for member in self._members:
            if not member.tracks_generations:
                raise RuntimeError(
                    f"{where}: every member must track generations, {member.name} does not. Nothing was changed."
                )

    def _apply_update(self, update: RoutedUpdate) -> WriteBackResult:
        groups = MemberGroups(update.ids, len(self._members), "update_if_present")
        parts = [(self._members[number], part) for number, part in update.by_member(groups)]
        for member, part in parts:
            member.check_update(part)
        with self._replay_lock, self._write_lock, self._updates.turn:
            result = update.result([member.update(part) for member, part in parts], groups)
        self._updates.count_result(result)
        return result
