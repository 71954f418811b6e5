# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Records one episode of an EnvPool task, in a process of its own: a renderer that finds no OpenGL ends its process.

A second pool of the same seed is stepped with the same actions and rendered.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of the folder common

import numpy as np
import torch
from common.env_factory import choose_backend, make_env
from saved_run import load_run
from torchrl.envs.utils import ExplorationType, set_exploration_type

__all__ = ["record_video"]

_DEADLINE_S = 600


def record_video(run: Path, output: Path, *, checkpoint: str, seed: int, max_frames: int = 500) -> int:
    """Writes a GIF of one episode and returns its frames.

    Raises:
        RuntimeError: where the task cannot be rendered here. Nothing was written.
    """
    command = [sys.executable, __file__, str(run), str(output), checkpoint, str(seed), str(max_frames)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(
            f"an episode must be rendered within {_DEADLINE_S} s, it was not. No video was written."
        ) from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise RuntimeError(
            f"the task must be rendered here, its renderer ended with: {said[-1]}. No video was written."
        )
    return int(done.stdout.strip().splitlines()[-1])


def _record(run: Path, output: Path, checkpoint: str, seed: int, max_frames: int) -> int:
    import envpool
    from PIL import Image

    settings, learner = load_run(run, checkpoint=checkpoint)
    if choose_backend(settings.env) != "envpool":
        raise ValueError("videos are made of EnvPool tasks only")
    env = make_env(replace(settings.env, num_envs=1), num_envs=1, seed=seed, num_threads=1, evaluate=True)
    shown = envpool.make_gymnasium(
        settings.env.task, num_envs=1, seed=seed, render_mode="rgb_array", **(settings.env.options or {})
    )
    root, _ = env.reset(), shown.reset()
    frames, keys = [], list(env.observation_spec.keys(True, True))
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        for _ in range(max_frames):
            picture = np.asarray(shown.render(0))
            frames.append(Image.fromarray(picture.reshape(picture.shape[-3:])))
            root.set("action", learner.policy(root.select(*keys)).get("action"))
            row, root = env.step_and_maybe_reset(root)
            shown.step(row["action"].double().numpy())
            if bool(row["next", "done"].any()):
                break
    output.parent.mkdir(parents=True, exist_ok=True)
    frames[0].save(output, save_all=True, append_images=frames[1:], duration=40, loop=0)
    return len(frames)


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("checkpoint")
    parser.add_argument("seed", type=int)
    parser.add_argument("max_frames", type=int)
    options = parser.parse_args()
    frames = _record(options.run, options.output, options.checkpoint, options.seed, options.max_frames)
    sys.stdout.write(f"{frames}\n")


if __name__ == "__main__":
    _main()
