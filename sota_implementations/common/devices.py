# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The device, the threads and the generators of a run."""

from __future__ import annotations

import random

import numpy as np
import torch

#: Streams of one run have seeds seed + i; an evaluation never starts from a state that was trained on.
EVAL_SEED_OFFSET = 1_000_003


def make_device(name: str, setting: str = "device") -> torch.device:
    """Returns the device of a setting, which errors name; ``auto`` is a GPU where there is one.

    Raises:
        ValueError: if there is no such device.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros((), device=device).item()  # some hold no numbers
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"{setting} must be auto or a device of this machine, got {name!r}; nothing was started."
        ) from error
    return device


def seed_everything(seed: int) -> None:
    """Seeds the global generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def prepare(device_name: str, *, threads: int | None, seed: int) -> torch.device:
    """Sets torch's threads and precision, seeds the global generators and returns the device of a run.

    Raises:
        ValueError: if there is no such device.
    """
    device = make_device(device_name)
    if threads is not None:
        torch.set_num_threads(threads)
    if device.type == "cuda":
        # What autocast leaves in float32 goes through tensor cores too.
        torch.set_float32_matmul_precision("high")
    seed_everything(seed)
    return device
