# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Replay, collectors and training parts for asynchronous off-policy RL with TorchRL.

Public names are imported from the subpackages (``from torchrl_ext.data import SlotReplayBuffer``), so that
``import torchrl_ext`` costs nothing: it imports neither torch nor torchrl.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
