# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Adapters to the packages we compare with; each raises ``PeerUnavailableError`` when its package cannot be used."""

from __future__ import annotations


class PeerUnavailableError(RuntimeError):
    """A peer cannot be measured here; the message is the one-sentence reason that goes into the report."""
