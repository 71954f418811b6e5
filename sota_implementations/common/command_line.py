# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""From a Hydra configuration to an exit code: the same for every script."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.loop_control import EXIT_CODES, StopSignal
from common.training_run import TrainingRun


def run(job: TrainingRun) -> int:
    """Trains, evaluates, saves and closes; returns the exit code."""
    keep_replay = job.settings.checkpoint.replay
    with StopSignal() as stop:
        try:
            job.train(stop)
            final = None if stop.count else job.evaluate(stop)
            if stop.count:
                job.progress.say("stopped by a signal: writing the checkpoint (once more: without the replay)")
            job.save(with_replay=keep_replay, should_hurry=lambda: stop.count > 1)
            job.report(final)
            return stop.exit_code
        finally:
            job.close()


def run_configuration(cfg: DictConfig, settings: Any, kind: type[TrainingRun]) -> None:
    """Runs what Hydra composed; what is wrong with it is said in one sentence, before anything is started.

    Args:
        cfg (DictConfig): of the command line.
        settings (type): its dataclass, with ``from_dict``.
        kind (type): of the run.
    """
    hydra_config = HydraConfig.get()
    try:
        job = kind(
            settings.from_dict(OmegaConf.to_container(cfg, resolve=True)),
            Path(hydra_config.runtime.output_dir),
            title=f"{kind.label} preset {hydra_config.runtime.choices['preset']}",
            overrides=list(hydra_config.overrides.task),
        )
    except (ValueError, KeyError, ImportError, OSError, MemoryError, OmegaConfBaseException) as error:
        # str of a KeyError is the repr of its message.
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        _leave(kind, str(message), 2)
    except KeyboardInterrupt:
        _leave(kind, "stopped by a signal before training; nothing was saved.", EXIT_CODES[signal.SIGINT])
    try:
        code = run(job)
    except KeyboardInterrupt:
        _leave(kind, "stopped at once by a third signal; nothing more was saved.", EXIT_CODES[signal.SIGINT])
    if code:
        sys.exit(code)


def _leave(kind: type[TrainingRun], message: str, code: int) -> NoReturn:
    sys.stderr.write(f"{kind.name}: {' '.join(message.split())}\n")
    sys.exit(code)
