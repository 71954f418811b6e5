# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""TensorBoard's layout against the names that the scripts write."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from torchrl_ext.record import custom_scalars_layout
from torchrl_ext.trainers import FastSACLearner

SCRIPTS = Path(__file__).resolve().parents[1] / "sota_implementations"


def logged_names() -> set[str]:
    """The names in the sources of the script and its learner, and an example of those of stages."""
    paths = [path for folder in ("common", "fast_sac") for path in (SCRIPTS / folder).glob("*.py")]
    source = "".join(path.read_text(encoding="utf-8") for path in paths)
    names = set(re.findall(r'"((?:train|eval|learner|collector)/[a-z_]+)"', source))
    step = inspect.getsource(FastSACLearner._step)
    names |= {f"learner/{a or b}" for a, b in re.findall(r'"(\w+)": |metrics\["(\w+)"\]', step)}
    return names | {"updates", "episodes", "seconds", "collector/env_ms", "learner/drain_ms"}


def charts_of(name: str) -> list[str]:
    charts = [chart for category in custom_scalars_layout().values() for chart in category.items()]
    return [title for title, (_, tags) in charts if any(re.match(tag, name) for tag in tags)]


class TestLayout:
    """Contract: each metric is in one chart; parts of stages are in none."""

    def test_every_metric_of_fast_sac_is_in_one_chart(self):
        """row A10"""
        names = logged_names()
        assert {"train/return", "eval/worst", "learner/td_error", "learner/loss_actor", "collector/ring_fill"} <= names
        assert {name: len(charts_of(name)) for name in names} == dict.fromkeys(names, 1)

    @pytest.mark.parametrize("name", ["collector/env_ms/reset_ms", "collector/env/reset_ms", "train/return_std"])
    def test_child_paths_and_longer_names_are_in_none(self, name):
        """row A10"""
        assert charts_of(name) == []

    def test_tensorboard_accepts_it(self):
        summary = pytest.importorskip("torch.utils.tensorboard.summary")
        layout = pytest.importorskip("tensorboard.plugins.custom_scalar.layout_pb2")
        (value,) = summary.custom_scalars(custom_scalars_layout()).value
        read = layout.Layout.FromString(value.tensor.string_val[0])
        assert [category.title for category in read.category] == [
            "episodes",
            "learner",
            "pace",
            "collector",
            "write-back",
        ]
        assert read.category[0].chart[0].multiline.tag == ["^train/return$", "^eval/return$", "^eval/worst$"]
