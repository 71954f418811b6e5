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

import hydra
from dreamer_run import Run
from dreamer_settings import Settings
from dreamer_shared import StopSignal
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


def run(job: Run) -> int:
    """Trains, evaluates, saves and closes; returns the exit code."""
    keep_replay = job.settings.checkpoint.replay
    try:
        with StopSignal() as stop:
            job.train(stop)
            final = None if stop.count else job.evaluate(stop)
            if stop.count:
                job.progress.say("stopped by a signal: writing the checkpoint (once more: without the replay)")
            job.save(with_replay=keep_replay and stop.count < 2)
            job.report(final)
            return stop.exit_code
    finally:
        job.close()


@hydra.main(version_base="1.3", config_path="config", config_name="dreamer_v3")
def main(cfg: DictConfig) -> None:
    """Command line: what is wrong with a configuration is said in one sentence, before anything is started."""
    hydra_config = HydraConfig.get()
    try:
        job = Run(
            Settings.from_dict(OmegaConf.to_container(cfg, resolve=True)),  # type: ignore[arg-type]
            Path(hydra_config.runtime.output_dir),
            title=f"DreamerV3 preset {hydra_config.runtime.choices['preset']}",
            overrides=list(hydra_config.overrides.task),
        )
    except (ValueError, KeyError, ImportError, FileNotFoundError, MemoryError, OmegaConfBaseException) as error:
        # str of a KeyError is the repr of its message.
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        sys.stderr.write(f"dreamer_v3: {' '.join(str(message).split())}\n")
        sys.exit(2)
    if code := run(job):
        sys.exit(code)


if __name__ == "__main__":
    main()
