# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Plays a checkpoint of a run: episodes of the deterministic policy, and a video where the task can be rendered.

Example:
    ``python sota_implementations/fast_sac/play.py outputs/fast_sac/walker/2026-11-30_10-00-00_seed0 --episodes 4``
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("RL_WARNINGS", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of the folder common

import torch
from common.devices import EVAL_SEED_OFFSET
from common.evaluation import evaluate
from saved_run import load_run
from utils import make_eval_env
from video import record_video


def main(arguments: list[str]) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Evaluate a checkpoint of a run.")
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--checkpoint", choices=["best", "last"], default="best")
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=None, help="default: that of the run's evaluations")
    parser.add_argument("--video", type=Path, default=None, help="a .gif to write one episode to")
    options = parser.parse_args(arguments)
    try:
        settings, learner = load_run(options.run, checkpoint=options.checkpoint)
        settings = replace(settings, eval=replace(settings.eval, episodes=options.episodes))
        seed = settings.seed + EVAL_SEED_OFFSET if options.seed is None else options.seed
        env = make_eval_env(settings)
        result = evaluate(env, learner.policy, seed=seed, max_steps=settings.eval.max_steps, device=torch.device("cpu"))
        env.close()
        assert result is not None
        sys.stdout.write(
            f"{settings.env.task}: mean return {result.mean:.1f} over {len(result.returns)} episodes (worst "
            f"{min(result.returns):.1f}, best {max(result.returns):.1f}), mean length {result.mean_length:.0f}\n"
        )
        if options.video is not None:
            frames = record_video(options.run, options.video, checkpoint=options.checkpoint, seed=seed)
            sys.stdout.write(f"{options.video}: {frames} frames\n")
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        sys.stderr.write(f"play: {' '.join(str(error).split())}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
