#!/usr/bin/env python
# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Trains MotrixLab's FastSAC on the EnvPool task of one of our presets, for the same minutes.

    python benchmarks/peers/motrixlab_run.py --preset go1 --device cuda --seed 0 --out outputs/motrixlab/go1
    python benchmarks/draw_runs.py ours=OUR_RUN MotrixLab=outputs/motrixlab/go1 --out curves.png

Writes ``settings.json`` and ``metrics.jsonl`` (``frames``, ``seconds``, ``updates``, ``train/return``,
``eval/return``); the last printed line is a JSON object. The presets are those of ``sota_implementations/fast_sac``;
README.md of benchmarks/ says what of a run is the preset's and what is MotrixLab's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("RL_WARNINGS", "0")

import numpy as np
import torch

if __name__ == "__main__":
    # Run as a script, sys.path starts at this folder; and torchrl's wheel installs a package named benchmarks as well.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.peers import PeerUnavailableError
from benchmarks.peers.motrixlab_async import AsyncTrainer
from benchmarks.peers.motrixlab_trainers import EnvPoolStreams, SyncTrainer, make_agent
from torchrl_ext.envs import EnvPoolEnv

STARTED = time.monotonic()
CONFIG = Path(__file__).resolve().parents[2] / "sota_implementations" / "fast_sac" / "config"
PRINT_EVERY = 10.0
EVAL_SEED_OFFSET = 1_000_003  # as in our script: an evaluation never starts from a state that was trained on
# MotrixLab's own values (configs/algo_base/motrix.fastsac.yaml of its repository, which the wheel does not contain).
OWN = {
    "actor_learning_rate": 3e-4,
    "critic_learning_rate": 3e-4,
    "alpha_learning_rate": 3e-4,
    "weight_decay": 1e-3,
    "max_grad_norm": 0.0,
    "actor_hidden_dim": 512,
    "critic_hidden_dim": 768,
    "num_q_networks": 2,
    "use_layer_norm": True,
    "use_tanh": True,
    "log_std_max": 0.0,
    "log_std_min": -5.0,
    "num_atoms": 101,
    "tau": 0.125,
    "alpha_init": 1e-3,
    "use_autotune": True,
    "target_entropy_ratio": 0.0,
    "policy_frequency": 4,
    "obs_normalization": True,
    "compile": True,
    "amp": True,
    "amp_dtype": "bf16",
}
# Sizes of the job, always the preset's.
SIZES = {
    "num_updates": "learner.updates_per_step",
    "batch_size": "learner.batch_size",
    "num_steps": "learner.n_steps",
    "gamma": "learner.gamma",
    "v_min": "networks.v_min",
    "v_max": "networks.v_max",
    "buffer_size": "replay.capacity",
}
# What ``--recipe preset`` takes from the preset too: all that both implementations have.
RECIPE = {
    "actor_learning_rate": "learner.actor_lr",
    "critic_learning_rate": "learner.critic_lr",
    "alpha_learning_rate": "learner.alpha_lr",
    "weight_decay": "learner.weight_decay",
    "actor_hidden_dim": "networks.actor_hidden",
    "critic_hidden_dim": "networks.critic_hidden",
    "num_q_networks": "networks.num_critics",
    "log_std_max": "networks.log_std_max",
    "log_std_min": "networks.log_std_min",
    "num_atoms": "networks.num_atoms",
    "tau": "learner.tau",
    "alpha_init": "learner.alpha_init",
    "target_entropy_ratio": "learner.target_entropy_ratio",
    "policy_frequency": "learner.policy_frequency",
}


def load_preset(name: str, overrides: Sequence[str] = ()) -> Any:
    """Composes our script's configuration, without Hydra's own part; unknown keys of ``overrides`` raise."""
    from omegaconf import OmegaConf

    base: Any = OmegaConf.load(CONFIG / "fast_sac.yaml")
    for key in ("defaults", "hydra"):
        base.pop(key)
    OmegaConf.set_struct(base, True)
    return OmegaConf.merge(
        base, OmegaConf.load(CONFIG / "preset" / f"{name}.yaml"), OmegaConf.from_dotlist([*overrides])
    )


def env_options(preset: Any, *, seed: int, evaluate: bool) -> dict[str, Any]:
    """Keywords of the preset's ``EnvPoolEnv``, for training or for evaluation, as our script makes them."""
    env = preset.env
    limit = env.max_episode_steps
    if not evaluate and env.train_episode_steps is not None:
        limit = env.train_episode_steps
    return {
        "task_id": env.task,
        "num_envs": preset.eval.episodes if evaluate else env.num_envs,
        "num_threads": preset.eval.num_threads if evaluate else env.num_threads,
        "thread_affinity_offset": None if evaluate else env.thread_affinity_offset,
        "seed": seed + EVAL_SEED_OFFSET if evaluate else seed,
        "max_episode_steps": limit,
        "options": None if env.options is None else dict(env.options),
    }


def stream_options(preset: Any, *, seed: int) -> dict[str, Any]:
    """Keywords of the training streams, but for their device."""
    options = env_options(preset, seed=seed, evaluate=False)
    known = set(EnvPoolEnv(**options).observation_spec.keys(True, True))
    asymmetric = {"state", "privileged_state"} <= known
    actor = list(preset.env.actor_keys or (["state"] if asymmetric else ["observation"]))
    critic = list(preset.env.critic_keys or (["privileged_state"] if asymmetric else actor))
    return {"options": options, "actor_keys": actor, "critic_keys": critic}


def agent_values(preset: Any, recipe: str, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Values of MotrixLab's ``FastSacAgentCfg``: the job's sizes from the preset, the rest by ``recipe``."""
    from omegaconf import OmegaConf

    ratio = preset.learner.updates_per_step
    if ratio != int(ratio):
        raise ValueError(f"MotrixLab takes whole updates per vector step, got learner.updates_per_step={ratio}.")
    taken = SIZES | (RECIPE if recipe == "preset" else {})
    values = OWN | {name: OmegaConf.select(preset, key) for name, key in taken.items()}
    # Its gate counts vector steps, ours rows.
    values["learning_starts"] = -(-preset.collector.learning_starts // preset.env.num_envs)
    values["num_updates"] = int(ratio)
    own: Any = OmegaConf.create(values)
    OmegaConf.set_struct(own, True)
    return OmegaConf.to_container(OmegaConf.merge(own, OmegaConf.from_dotlist([*changes])))  # type: ignore[return-value]


@torch.no_grad()
def evaluate(agent: Any, preset: Any, *, seed: int) -> tuple[list[float], list[int]]:
    """Runs the first episode of each evaluation stream with the deterministic policy; returns returns and lengths."""
    streams = stream_options(preset, seed=seed)
    streams["options"] = env_options(preset, seed=seed, evaluate=True)
    env = EnvPoolStreams(**streams, device=agent.device)
    total, length = torch.zeros(env.num_envs, dtype=torch.float64), torch.zeros(env.num_envs, dtype=torch.int64)
    alive = torch.ones(env.num_envs, dtype=torch.bool)
    obs, _ = env.reset()
    for _ in range(preset.eval.max_steps):
        result = env.step(agent.act(obs, deterministic=True))
        obs = result.obs
        total += result.reward.cpu() * alive
        length += alive
        alive &= ~(result.terminated | result.truncated).cpu()
        if not alive.any():
            break
    env.env.close()
    return total.tolist(), length.tolist()


class Run:
    """One training run of the peer."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._preset = preset = load_preset(options.preset, options.override)
        self._seed, self._out = options.seed, options.out
        if preset.env.backend not in ("auto", "envpool"):
            raise ValueError(f"the task must be EnvPool's, got env.backend={preset.env.backend}.")
        self._budget = preset.time_budget if options.minutes is None else 60.0 * options.minutes
        if self._budget is None:
            raise ValueError("the preset has no time_budget; --minutes says how long.")
        values = agent_values(preset, options.recipe, options.agent)
        self._limit, self._eval_every = options.limit, options.eval_every
        device = torch.device(options.device)
        device = torch.device("cuda", 0) if device == torch.device("cuda") else device
        random.seed(self._seed)
        np.random.seed(self._seed)
        torch.manual_seed(self._seed)
        torch.set_float32_matmul_precision("high")  # as its trainers do when they are imported
        if preset.torch_threads is not None:
            torch.set_num_threads(preset.torch_threads)
        streams = stream_options(preset, seed=self._seed)
        env = EnvPoolStreams(**streams, device=device)
        self._agent = make_agent(env, values, device)
        self.trainer: SyncTrainer | AsyncTrainer
        if options.trainer == "async":
            threads = preset.collector.policy_threads
            self.trainer = AsyncTrainer(self._agent, env, streams=streams, policy_threads=threads, seed=self._seed)
        else:
            self.trainer = SyncTrainer(self._agent, env)
        self._summary: dict[str, Any] = {"preset": options.preset, "trainer": options.trainer, "recipe": options.recipe}
        self._summary |= {"seed": self._seed, "device": str(device)}
        self._frames, self._seconds, self._slowest_evaluation = 0, 0.0, 0.0
        self._last: dict[str, float] = {}
        self._out.mkdir(parents=True, exist_ok=True)
        self._file = open(self._out / "metrics.jsonl", "w", encoding="ascii")
        self._announce(streams["options"], values, options)

    def _announce(self, env: dict[str, Any], values: dict[str, Any], options: argparse.Namespace) -> None:
        taken = set(SIZES) | {"learning_starts"} | (set(RECIPE) if options.recipe == "preset" else set())
        parts = {
            "environment, of the preset": env,
            "agent, of the preset": {name: values[name] for name in values if name in taken},
            "agent, MotrixLab's own": {name: values[name] for name in values if name not in taken},
            "changed by --override": list(options.override),
            "changed by --agent": list(options.agent),
            "trainer": self.trainer.name,
        }
        (self._out / "settings.json").write_text(json.dumps(self._summary | parts, indent=1) + "\n", encoding="ascii")
        for name, part in parts.items():
            print(f"{name}: {json.dumps(part)}", flush=True)
        print(f"budget: {self._budget:g} s of training; {self._limit:g} s for the command", flush=True)

    def train(self) -> None:
        """Collects and learns until the budget is used up; only the opening of the streams does not count."""
        self.trainer.start()
        print(f"streams are open after {time.monotonic() - STARTED:.0f} s", flush=True)
        started, next_print, next_evaluation = time.monotonic(), PRINT_EVERY, self._eval_every
        while True:
            had_updates, begun = self._agent.update_idx, time.monotonic()
            self._frames += self.trainer.advance()
            self._seconds = time.monotonic() - started
            if not had_updates and self._agent.update_idx:
                # Compilation on CUDA.
                self._summary["first_updates_s"] = round(time.monotonic() - begun, 2)
            reserve = 10.0 + 1.5 * self._slowest_evaluation
            if self._seconds >= self._budget or time.monotonic() - STARTED >= self._limit - reserve:
                break
            if self._seconds >= next_evaluation:
                self.evaluate()
                self._seconds = time.monotonic() - started
                next_evaluation += self._eval_every * max(1, -(-(self._seconds - next_evaluation) // self._eval_every))
            if self._seconds >= next_print:
                self._log()
                next_print = (self._seconds // PRINT_EVERY + 1) * PRINT_EVERY
        if self._agent.device.type == "cuda":
            torch.cuda.synchronize()
        self._seconds = time.monotonic() - started
        self._log()

    def _log(self) -> None:
        values = {f"learner/{key}": value for key, value in self._agent.window_metrics.stats_and_reset().items()}
        if returns := self.trainer.pop_episodes():
            values["train/return"] = sum(returns) / len(returns)
        self._write(values)
        shown = "".join(f", {key} {value:.1f}" for key, value in self._last.items())
        loss = values.get("learner/qf_loss", float("nan"))
        counts = f"{self._frames} frames, {self._agent.update_idx} updates"
        print(f"[{self._seconds:6.1f} s] {counts}, critic loss {loss:.4g}{shown}", flush=True)

    def _write(self, values: dict[str, float]) -> None:
        self._last |= {key: values[key] for key in ("train/return", "eval/return") if key in values}
        counters = {"seconds": self._seconds, "updates": self._agent.update_idx}
        self._file.write(json.dumps({"frames": self._frames, **values, **counters}) + "\n")
        self._file.flush()

    def evaluate(self) -> float:
        """Evaluates and writes it down; returns the mean return."""
        begun = time.monotonic()
        returns, lengths = evaluate(self._agent, self._preset, seed=self._seed)
        self._slowest_evaluation = max(self._slowest_evaluation, time.monotonic() - begun)
        mean = sum(returns) / len(returns)
        mean_length = sum(lengths) / len(lengths)
        self._write({"eval/return": mean, "eval/length": mean_length, "eval/worst": min(returns)})
        print(f"evaluation at {self._frames} frames: mean return {mean:.1f}, worst {min(returns):.1f}", flush=True)
        return mean

    def summary(self, final_return: float) -> dict[str, Any]:
        """Returns the last line."""
        frames, updates, seconds = self._frames, self._agent.update_idx, self._seconds
        rates = {"frames_per_s": round(frames / seconds, 1), "updates_per_s": round(updates / seconds, 1)}
        done = {"frames": frames, "updates": updates, "seconds": round(seconds, 2), "return": final_return}
        return self._summary | done | rates | {"command_s": round(time.monotonic() - STARTED, 1)}

    def close(self) -> None:
        """Ends threads and processes."""
        self.trainer.close()
        self._file.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; raises SystemExit with one sentence when MotrixLab is missing or cannot run the preset."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    presets = sorted(path.stem for path in (CONFIG / "preset").glob("*.yaml"))
    parser.add_argument("--preset", choices=presets, default="pendulum")
    parser.add_argument("--minutes", type=float, help="of training; default: the preset's time_budget")
    parser.add_argument("--limit", type=float, default=575.0, help="seconds for all after the imports")
    parser.add_argument("--trainer", choices=("sync", "async"), default="sync")
    parser.add_argument("--recipe", choices=("own", "preset"), default="own", help="whose rates and network sizes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=float, default=45.0, help="seconds of training between evaluations")
    parser.add_argument("--override", nargs="*", default=[], metavar="KEY=VALUE", help="of the preset")
    parser.add_argument("--agent", nargs="*", default=[], metavar="KEY=VALUE", help="of MotrixLab's FastSacAgentCfg")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    from omegaconf.errors import OmegaConfBaseException

    try:
        run = Run(options)
    except (PeerUnavailableError, OmegaConfBaseException, ValueError) as error:
        raise SystemExit(f"motrixlab_run: {str(error).splitlines()[0]}") from error
    try:
        run.train()
        print(json.dumps(run.summary(run.evaluate())), flush=True)
    finally:
        run.close()


if __name__ == "__main__":
    main()
