# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Reads a run back from its folder: its settings, and the learner of one of its checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from settings import Settings
from utils import make_learner, make_train_env
from yaml import YAMLError

from torchrl_ext.trainers import FastSACLearner, load_checkpoint

__all__ = ["load_run"]


def load_run(folder: str | Path, *, checkpoint: str = "best") -> tuple[Settings, FastSACLearner]:
    """Builds the learner of a run on the host, with the weights and statistics of a checkpoint.

    Args:
        folder (Path): of a run: it has ``.hydra/config.yaml`` and ``checkpoints/``.

    Keyword Args:
        checkpoint (str, optional): ``"best"``, which is ``"last"`` where no evaluation was the best yet, or ``"last"``.

    Raises:
        FileNotFoundError: if the folder is not of a run.
        ValueError: if its configuration cannot be read, or the checkpoint is damaged or of another one.
    """
    folder = Path(folder)
    config = folder / ".hydra" / "config.yaml"
    path = folder / "checkpoints" / f"{checkpoint}.pt"
    if checkpoint == "best" and not path.exists():
        path = path.with_name("last.pt")
    for file in (config, path):
        if not file.exists():
            raise FileNotFoundError(f"fast_sac: {folder} must be the folder of a run, it has no {file.name}.")
    try:
        values = OmegaConf.to_container(OmegaConf.load(config), resolve=False)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ValueError(f"fast_sac: {config} must be the configuration of a run, got {error}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"fast_sac: {config} must be the configuration of a run, got a {type(values).__name__}.")
    settings = replace(Settings.from_dict(values), device="cpu")  # type: ignore[arg-type]
    env = make_train_env(settings)
    try:
        learner = make_learner(settings, env, torch.device("cpu"))
    finally:
        env.close()
    state = load_checkpoint(path, kind="torchrl_ext.fast_sac/1")
    if not isinstance(state.get("learner"), dict):
        raise ValueError(f"fast_sac: {path} must be the checkpoint of a run, it has no learner.")
    learner.load_state_dict(state["learner"])
    return settings, learner
