# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Grouping rows by an id with one stable sort."""

from __future__ import annotations

import numpy as np

__all__ = ["rank_in_group"]


def rank_in_group(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns a stable order that sorts ``ids`` and each sorted row's rank inside its group, in arrival order.

    Args:
        ids (np.ndarray): int64 ``[M]``.

    Returns:
        tuple of np.ndarray: ``order`` and ``rank``, int64 ``[M]``: row ``order[i]`` is the ``rank[i]``-th of its group.

    Examples:
        >>> import numpy as np
        >>> from torchrl_ext.data.grouping import rank_in_group
        >>> rank_in_group(np.array([2, 0, 2, 1, 0, 2]))
        (array([1, 4, 3, 0, 2, 5]), array([0, 1, 0, 0, 1, 2]))
    """
    # A stable sort keeps each group's timeline; an unstable one would shuffle it.
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    return order, np.arange(len(ids)) - np.searchsorted(ordered, ordered)
