# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Learners, the governor of their update ratio, and checkpoints."""

from __future__ import annotations

from torchrl_ext.trainers.checkpoint import load_checkpoint, random_state, restore_random_state, save_checkpoint
from torchrl_ext.trainers.fast_sac_learner import FastSACLearner
from torchrl_ext.trainers.fast_sac_stepper import FastSACStepper
from torchrl_ext.trainers.governor import UpdateGovernor

__all__ = [
    "FastSACLearner",
    "FastSACStepper",
    "UpdateGovernor",
    "load_checkpoint",
    "random_state",
    "restore_random_state",
    "save_checkpoint",
]
