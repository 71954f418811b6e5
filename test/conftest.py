# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""What every test relies on: one torch thread, fixed seeds, hypothesis profiles, no `gpu` test without a GPU.

Markers are registered in pyproject.toml alone.
"""

import os

# TorchRL reads it when it is imported: its extension is built for one torch release and warns with any other.
os.environ.setdefault("RL_WARNINGS", "0")

import random

import hypothesis
import numpy as np
import pytest
import torch

# The machine of the tests has two cores, and several tests start processes.
torch.set_num_threads(1)

# `ci` draws the same examples on every run; `long` searches anew each time.
hypothesis.settings.register_profile(
    "ci",
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "long",
    max_examples=2000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def fixed_seeds_of_fixtures() -> None:
    """Those of a module are made before those of its tests, whatever the files before it drew."""
    _seed()


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    _seed()
