# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Exports the deterministic policy of a run to ONNX, normaliser included, and checks it with onnxruntime.

Example:
    ``python sota_implementations/fast_sac/export.py outputs/fast_sac/walker/2026-11-30_10-00-00_seed0``
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

os.environ.setdefault("RL_WARNINGS", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of the folder common

import numpy as np
import torch
from saved_run import load_run
from torch import Tensor, nn
from utils import make_train_env

from torchrl_ext.modules.action_bounds import action_bounds
from torchrl_ext.trainers import FastSACLearner

#: Largest difference between torch's and onnxruntime's actions, relative to the range of an action.
TOLERANCE = 1e-4


class DeterministicPolicy(nn.Module):
    """Observations in, the mode of the policy out; plain tensors, as ONNX has them.

    Args:
        learner (FastSACLearner): whose actor and statistics are taken.
        low, high (Tensor): bounds of the actions, ``[A]``.
    """

    def __init__(self, learner: FastSACLearner, low: Tensor, high: Tensor) -> None:
        super().__init__()
        self.net = learner.loss.actor_network.module[0].module
        names = list(learner.loss.actor_network.in_keys)
        normalizer = learner.normalizer
        self.clamp = None if normalizer is None else normalizer.clamp
        #: The observations that the policy reads, by their raw names, in order.
        self.in_keys = (
            names if normalizer is None else [normalizer.in_keys[normalizer.out_keys.index(n)] for n in names]
        )
        self.register_buffer("center", (low + high) / 2)
        self.register_buffer("half_range", (high - low) / 2)
        self.widths = []
        for place, name in enumerate(names):
            if normalizer is None:
                self.widths.append(None)
                continue
            index = normalizer.out_keys.index(name)
            sizes = [shape.numel() for shape in normalizer.shapes]
            start = sum(sizes[:index])
            self.widths.append(sizes[index])
            part = slice(start, start + sizes[index])
            self.register_buffer(f"loc_{place}", normalizer.loc[part].clone())
            self.register_buffer(f"inv_scale_{place}", normalizer.inv_scale[part].clone())

    def forward(self, *observations: Tensor) -> Tensor:
        """Returns actions ``[B, A]`` for observations ``[B, *]``."""
        inputs = []
        for place, value in enumerate(observations):
            if self.widths[place] is not None:
                value = (value - getattr(self, f"loc_{place}")) * getattr(self, f"inv_scale_{place}")
                if self.clamp is not None:
                    value = value.clamp(-self.clamp, self.clamp)
            inputs.append(value)
        loc, _ = self.net(*inputs)
        return self.center + self.half_range * loc.tanh()


def export(folder: Path, output: Path, *, checkpoint: str, batch: int = 16) -> float:
    """Writes the model and returns the largest difference from torch, relative to the range of an action.

    Raises:
        RuntimeError: when it is more than the tolerance. Nothing was written.
    """
    import onnxruntime

    settings, learner = load_run(folder, checkpoint=checkpoint)
    env = make_train_env(settings)
    policy = DeterministicPolicy(learner, *action_bounds(env.action_spec)).eval()
    shapes = [tuple(env.observation_spec[key].shape[1:]) for key in policy.in_keys]
    env.close()
    generator = torch.Generator().manual_seed(0)
    examples = tuple(torch.randn(batch, *shape, generator=generator) for shape in shapes)
    names = [str(key) for key in policy.in_keys]
    dynamic = tuple({0: torch.export.Dim("batch", min=1)} for _ in names)
    output.parent.mkdir(parents=True, exist_ok=True)
    program = torch.onnx.export(
        policy,
        examples,
        input_names=names,
        output_names=["action"],
        dynamic_shapes=(dynamic,),
        dynamo=True,
        verbose=False,
    )
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        program.save(str(partial))
        session = onnxruntime.InferenceSession(str(partial), providers=["CPUExecutionProvider"])
        worst = 0.0
        for rows in (1, batch, 3 * batch + 1):
            inputs = [torch.randn(rows, *shape, generator=generator) for shape in shapes]
            with torch.no_grad():
                wanted = policy(*inputs) / policy.half_range
            found = session.run(None, {name: value.numpy() for name, value in zip(names, inputs, strict=True)})[0]
            difference = float(np.abs(found / policy.half_range.numpy() - wanted.numpy()).max())
            worst = max(worst, difference) if difference == difference else math.inf
        if worst > TOLERANCE:
            raise RuntimeError(
                f"onnxruntime's actions must be within {TOLERANCE:g} of torch's, got {worst:g}; {output} was not "
                "written."
            )
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    return worst


def main(arguments: list[str]) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Export the deterministic policy of a run to ONNX.")
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--output", type=Path, default=None, help="default: policy.onnx in the folder")
    parser.add_argument("--checkpoint", choices=["best", "last"], default="best")
    options = parser.parse_args(arguments)
    output = options.output or options.run / "policy.onnx"
    try:
        worst = export(options.run, output, checkpoint=options.checkpoint)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        sys.stderr.write(f"export: {' '.join(str(error).split())}\n")
        return 2
    sys.stdout.write(f"{output}: within {worst:.1e} of torch's actions\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
