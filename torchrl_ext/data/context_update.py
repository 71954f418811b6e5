# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Refreshed latents of a sampled sequence, as an update of the records they came from."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

__all__ = ["replay_context_update"]


def replay_context_update(
    sample: TensorDictBase,
    state: torch.Tensor,
    belief: torch.Tensor,
    *,
    distinct: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor | TensorDictBase, torch.Tensor, dict[str, torch.Tensor]]:
    """Turns the latents of a learner step into handles and a patch for ``submit_update_if_present``.

    The latents after step ``t`` of a window are the context of its row ``t + 1``. Sampled windows may overlap: the last
    row of each record counts. Handles on the host are sorted by record and distinct; the rows kept are picked on the
    device of the latents, with an index that travels through pinned memory. Handles on a CUDA device stay there and
    keep their number, since counting them would wait for the device: a row that a later one replaces gets generation
    ``-1``, which names no record. Nothing here synchronises with a device.

    Source: DreamerV3's latents in replay (arXiv 2301.04104), as TorchRL's ``sota-implementations/dreamer_v3`` does it.

    Args:
        sample (TensorDictBase): batch size ``[B, T + 1]`` with ``"index"`` (int64 ``[B, T + 1, C]``, or the
            TensorDict of ``"buffer_ids"`` and ``"index"`` that ensembles give) and ``"index_generation"``.
        state (torch.Tensor): ``[B, T, S]``, with or without a gradient.
        belief (torch.Tensor): ``[B, T, D]``.

    Keyword Args:
        distinct (bool, optional): ``False`` keeps every row in its order and copies nothing: right for buffers of this
            package, whose updates let the last live row of a record win by themselves. Defaults to ``True``.
        dtype (torch.dtype, optional): of the patch, that of the stored fields. Defaults to ``torch.float32``.

    Returns:
        tuple: index, generation (int64 ``[M]``) and the patch ``{"state", "belief"}``, which may still be in flight.

    Raises:
        ValueError: when the shapes do not fit each other.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_ext.data import replay_context_update
        >>> index = torch.tensor([[[0, 0], [1, 0], [2, 0]], [[1, 0], [2, 0], [3, 0]]])  # (slot, stream)
        >>> sample = TensorDict({"index": index, "index_generation": torch.zeros(2, 3, dtype=torch.long)}, [2, 3])
        >>> latent = torch.arange(4.0).view(2, 2, 1)
        >>> index, generation, patch = replay_context_update(sample, latent, latent)
        >>> index[:, 0].tolist(), patch["state"].flatten().tolist()
        ([1, 2, 3], [0.0, 2.0, 3.0])
    """
    if sample.batch_dims != 2:
        raise ValueError(
            f"replay_context_update: sample must have batch size [B, T + 1], got {list(sample.batch_size)}."
        )
    shape = torch.Size([sample.shape[0], sample.shape[1] - 1])
    for name, latent in (("state", state), ("belief", belief)):
        if latent.shape[:2] != shape or latent.dim() != 3:
            raise ValueError(
                f"replay_context_update: {name} must have shape [{shape[0]}, {shape[1]}, D] for this sample, got "
                f"{list(latent.shape)}."
            )
    latents = {"state": state.detach().flatten(0, 1), "belief": belief.detach().flatten(0, 1)}
    generation, index = sample.get("index_generation")[:, 1:].reshape(-1), sample.get("index")[:, 1:]
    index = index.flatten(0, 1) if isinstance(index, torch.Tensor) else index.reshape(-1)
    if not distinct:
        return index, generation, {key: latent.to(dtype) for key, latent in latents.items()}
    if isinstance(index, torch.Tensor):
        columns = index if index.dim() > 1 else index.unsqueeze(-1)
    else:
        ids = index.get("buffer_ids")
        columns = torch.cat([ids.reshape(-1, 1), index.get("index").reshape(len(ids), -1)], -1)
    if columns.device.type != "cpu":
        generation = torch.where(_is_last(columns), generation, -1)
        return index, generation, {key: latent.to(dtype) for key, latent in latents.items()}
    keep = torch.from_numpy(_last_rows(columns.numpy()))
    index = index.index_select(0, keep) if isinstance(index, torch.Tensor) else _rows(index, keep)
    patch = {key: latent.index_select(0, _on(keep, latent.device)).to(dtype) for key, latent in latents.items()}
    return index, generation.index_select(0, keep), patch


def _rows(handles: TensorDictBase, keep: torch.Tensor) -> TensorDict:
    return TensorDict({key: handles.get(key).index_select(0, keep) for key in ("buffer_ids", "index")}, [len(keep)])


def _last_rows(columns: np.ndarray) -> np.ndarray:
    """Returns the last row of each distinct coordinate, in the order of coordinates."""
    radices = [int(top) + 1 for top in columns.max(0)] if len(columns) else []
    size = 1
    for radix in radices:
        size *= radix
    if size < 2**63:
        key = np.zeros(len(columns), dtype=np.int64)
        for column, radix in zip(columns.T, radices, strict=True):
            key = key * radix + column
        order = np.argsort(key, kind="stable")
        ordered = key[order, None]
    else:
        order = np.arange(len(columns))
        for column in columns.T[::-1]:
            order = order[np.argsort(column[order], kind="stable")]
        ordered = columns[order]
    last = np.ones(len(order), dtype=bool)
    last[:-1] = (ordered[1:] != ordered[:-1]).any(-1)
    return order[last]


def _is_last(columns: torch.Tensor) -> torch.Tensor:
    """Returns bool ``[M]``: whether no later row has the same coordinate. One sort per column reads nothing back."""
    order = torch.arange(len(columns), device=columns.device)
    for column in columns.flip(-1).unbind(-1):
        order = order[column[order].argsort(stable=True)]
    ordered = columns[order]
    last = torch.ones_like(order, dtype=torch.bool)
    torch.any(ordered[1:] != ordered[:-1], dim=-1, out=last[:-1])
    return torch.empty_like(last).scatter_(0, order, last)


def _on(index: torch.Tensor, device: torch.device) -> torch.Tensor:
    # A copy from pageable memory would wait for the learner step that is under way.
    if device.type == "cuda":
        return index.pin_memory().to(device, non_blocking=True)
    return index.to(device)
