# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What a ring raises when its other end is gone."""

from __future__ import annotations

__all__ = ["RingClosed", "RingPeerDied"]


class RingClosed(RuntimeError):  # noqa: N818  # the design's word
    """The other end closed the ring: nothing more will come, or nothing more is wanted."""


class RingPeerDied(RuntimeError):  # noqa: N818  # the design's word
    """The other end's process ended without closing the ring."""
