# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""DreamerV3 (arXiv 2301.04104): trains one of the presets in ``config/preset``; see README.md in this folder.

Example:
    ``python sota_implementations/dreamer_v3/dreamer_v3.py preset=pendulum seed=1``
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# TorchRL reads it when it is imported: its extension, which is not used here, is built for one torch release.
os.environ.setdefault("RL_WARNINGS", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of the folder common

import hydra
from common.command_line import run, run_configuration
from dreamer_run import Run
from dreamer_settings import Settings
from omegaconf import DictConfig

__all__ = ["Run", "Settings", "main", "run"]


@hydra.main(version_base="1.3", config_path="config", config_name="dreamer_v3")
def main(cfg: DictConfig) -> None:
    """Command line."""
    run_configuration(cfg, Settings, Run)


if __name__ == "__main__":
    main()
