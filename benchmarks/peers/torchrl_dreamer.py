#!/usr/bin/env python
# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Runs TorchRL 0.14.1's own DreamerV3 recipe on the EnvPool task of one of our presets.

    python benchmarks/peers/torchrl_dreamer.py --preset atari --device cuda --seconds 60 --set learner.train_ratio=16

What runs is the recipe's ``train.py``: its agent, losses, stepper, replay, collector and inference server. From our
preset come task, streams, seed, batch, sequence length, train ratio, warm-up, network sizes, rates, precision and
compilation.

Collection: asynchronous, one process per stream that holds one EnvPool environment, and one inference process that
acts for all of them (``inference_backend=auto``), which captures a batch of all streams on a GPU; 64 transitions per
message (``transition_chunk_size=auto``). It is the recipe's default and the way in which TorchRL reports rates of 64
environments; its batched ways step the streams of a process one after another and pass every observation through the
learner's process. ``--peer`` changes any value of the recipe; ``--peer collector.backend=sync`` is faster on few cores.

Replaced: the environments, through the recipe's own ``env.backend=custom``; the evaluation, which is our script's (same
seeds, all episodes at once instead of one after another, which saves the recipe time). Not taken from the preset: the
replay's device, which is the host, as slices cannot be drawn on a GPU with the generator that the recipe passes.

Prints one line of JSON and writes ``settings.json`` and ``metrics.jsonl`` as ``motrixlab_run.py`` does, for
``draw_runs.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("RL_WARNINGS", "0")
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "sota_implementations" / "dreamer_v3"
if __name__ == "__main__":
    # Run as a script, sys.path starts at this folder; and torchrl's wheel installs a package named benchmarks as well.
    # Workers of the recipe are given this path.
    sys.path[0] = str(ROOT)
for _path in (SCRIPT, SCRIPT.parent):
    if str(_path) not in sys.path:
        sys.path.append(str(_path))

import torch  # noqa: E402

from benchmarks.peers import PeerUnavailableError  # noqa: E402
from benchmarks.rate_window import STARTED, RateWindow  # noqa: E402

FACTORY = "benchmarks.peers.torchrl_dreamer_env:make"
#: Vector steps of a batch of the collector where the learner has at most one update per vector step: TorchRL's own
#: comparison of message sizes has it so.
_STEPS_PER_BATCH = 16


def recipe_folder(folder: str | Path | None = None) -> Path:
    """Returns the folder of TorchRL's recipe: the given one, ``TORCHRL_DREAMER_RECIPE``, or one beside torchrl.

    Raises:
        PeerUnavailableError: if it is not there.
    """
    import torchrl

    site = Path(torchrl.__file__).parents[1]
    named = folder or os.environ.get("TORCHRL_DREAMER_RECIPE")
    tried = [Path(named)] if named else [site / "sota-implementations" / "dreamer_v3", site / "recipe" / "dreamer_v3"]
    for path in tried:
        if (path / "train.py").is_file():
            return path.resolve()
    raise PeerUnavailableError(
        f"TorchRL's DreamerV3 recipe must be at {' or '.join(map(str, tried))}, got no train.py there; name its folder "
        "with --recipe or TORCHRL_DREAMER_RECIPE."
    )


def load_settings(preset: str, overrides: Sequence[str] = ()) -> Any:
    """Returns the settings of our script for a preset, as Hydra composes them."""
    import hydra
    from dreamer_settings import Settings
    from omegaconf import OmegaConf

    with hydra.initialize_config_dir(str(SCRIPT / "config"), version_base="1.3"):
        config = hydra.compose("dreamer_v3", overrides=[f"preset={preset}", *overrides])
    return Settings.from_dict(OmegaConf.to_container(config, resolve=True))


def recipe_config(settings: Any, spaces: Any, *, device: torch.device, out: Path, evaluate: bool, limit: float) -> Any:
    """Returns the recipe's configuration for our settings; what the preset does not say is TorchRL's default.

    Args:
        settings (Settings): of our script.
        spaces (Spaces): of its environments.

    Keyword Args:
        device (torch.device): of the learner.
        out (Path): the folder of the run.
        evaluate (bool): whether there are evaluations.
        limit (float): seconds after which the run ends.
    """
    from omegaconf import OmegaConf

    from benchmarks.peers.torchrl_dreamer_env import OneStream

    env, net, learner, streams = settings.env, settings.networks, settings.learner, settings.env.num_envs
    options = {"max_episode_steps": env.max_episode_steps, "options": env.options}
    probe = OneStream(env.task, seed=0, **options)
    steps = _STEPS_PER_BATCH if learner.updates_per_row * streams <= 1 else 1
    on_gpu = device.type == "cuda"
    unused = ("backend", "base_url", "project", "entity", "group", "mode", "exp_name", "output_plot")
    return OmegaConf.create(
        {
            "env": {
                "backend": "custom",
                "factory": FACTORY,
                "factory_kwargs": {"task": env.task, **options},
                "name": env.task,
                "task": None,
                "seed": settings.seed,
                "use_seed": True,
                "max_episode_steps": probe.pool.max_episode_steps,
                "vector_key": None if spaces.pixels else "observation",
                "pixels_key": "observation" if spaces.pixels else None,
                "milestone_key": None,
                "milestone_names": [],
            },
            "collector": {
                "backend": "async",
                "num_envs": streams,
                "frames_per_batch": streams * steps,
                "total_frames": streams * steps * 10**9,
                "count_reset_records": False,
                "exploration": "random",
                "async_env_backend": "multiprocessing",
                "env_exchange": "auto",
                "envs_per_worker": 1,
                "transition_chunk_size": "auto",
                "policy_device": None,
                "inference_backend": "auto",
                "inference_max_batch_size": None,
                "inference_min_batch_size": 1,
                "inference_timeout": 0.01,
                "inference_static_batch_size": streams if on_gpu else None,
            },
            "replay_buffer": {
                "device": "cpu",
                "buffer_size": settings.replay.capacity * streams,
                "batch_size": learner.batch_size,
                "seq_len": learner.seq_len,
                "online": settings.replay.online,
                "warmup_factor": settings.collector.learning_starts / (learner.batch_size * learner.seq_len),
            },
            "networks": {
                "rnn_hidden_dim": net.belief,
                "num_categoricals": net.categoricals,
                "num_classes": net.classes,
                "unimix": net.unimix,
                "recurrent_model": "block_gru",
                "num_blocks": net.blocks,
                "dynamics_layers": net.dynamics_layers,
                "prior_layers": net.prior_layers,
                "posterior_layers": net.posterior_layers,
                "norm_eps": net.norm_eps,
                "decoder_event_dims": net.decoder_sizes,
                "num_reward_bins": net.bins,
                "num_value_bins": net.bins,
                "hidden_dim": net.hidden,
                "encoder_layers": net.encoder_layers,
                "decoder_layers": net.decoder_layers,
                "reward_layers": net.reward_layers,
                "actor_layers": net.actor_layers,
                "value_layers": net.value_layers,
                "policy_min_std": net.min_std,
                "policy_max_std": net.max_std,
                "image_depth": net.image_depth,
                "image_mults": net.image_mults,
                "image_kernel_size": net.image_kernel,
                "image_decoder_blocks": net.image_blocks,
            },
            "optimization": {
                "device": str(device),
                "deferred_policy_sync": False,
                "separate_policy_rng": False,
                "mixed_precision": learner.mixed_precision,
                "compile": "off" if learner.compile is False or learner.compile_scan else "auto",
                "compile_train_step": False if learner.compile_scan else learner.compile,
                "compile_train_step_mode": "default",
                "compile_rssm": "scan" if learner.compile_scan else None,
                "cudagraph_train_step": on_gpu if learner.cuda_graph is None else learner.cuda_graph,
                "rssm_scan_unroll": learner.scan_unroll,
                "lr": learner.lr,
                "optimizer_eps": learner.optimizer_eps,
                "adaptive_grad_clip": learner.adaptive_grad_clip,
                "warmup_steps": learner.warmup_steps,
                "updates_per_batch": 1,
                "train_ratio": learner.train_ratio,
                "imagination_horizon": learner.imagination_horizon,
                "continuation_horizon": learner.continuation_horizon,
                "use_reinforce": True,
                "return_normalization_rate": learner.return_rate,
                "return_normalization_min_scale": 1.0,
                "slow_critic_regularization": learner.slow_critic_weight,
                "slow_critic_tau": learner.slow_critic_tau,
                "replay_value_loss_weight": learner.replay_value_weight,
                "free_bits": learner.free_bits,
                "dynamic_loss_weight": learner.dynamic_weight,
                "representation_loss_weight": learner.representation_weight,
                "gamma": learner.gamma,
                "lmbda": learner.lmbda,
                "max_time": limit,
                "collection_warmup_seconds": 0,
                "sync_timers": False,
                "resume_from": None,
                "checkpoint_dir": None,
                "checkpoint_every": None,
                "checkpoint_include_replay": False,
                "checkpoint_keep_last": 1,
            },
            "logger": {
                **dict.fromkeys(unused),
                "tags": [],
                "log_dir": str(out),
                "train_every": settings.log.every,
                "eval_every": settings.eval.every if evaluate else None,
                "eval_episodes": settings.eval.episodes,
                "metrics_jsonl": str(out / "metrics.jsonl"),
            },
        }
    )


class _Actor:
    """The recipe's acting policy, which remembers its latents between two steps of the same streams."""

    def __init__(self, policy: Any, sizes: dict[str, int]) -> None:
        self._policy, self._sizes = policy, sizes
        self._memory: Any = None

    def __call__(self, observed: Any) -> Any:
        if self._memory is None:
            shape, device = observed.batch_size, observed.get("is_init").device
            self._memory = {key: torch.zeros(*shape, size, device=device) for key, size in self._sizes.items()}
        acted = self._policy(observed.update(self._memory))
        self._memory = {key: acted.get(("next", key)) for key in self._sizes}
        return acted


class Run:
    """One run of the recipe, with what is counted and written down."""

    def __init__(self, options: argparse.Namespace) -> None:
        from dreamer_envs import make_env, spaces_of
        from omegaconf import OmegaConf

        folder = recipe_folder(options.recipe)
        self._settings = settings = load_settings(options.preset, [f"seed={options.seed}", *options.set])
        device = torch.device(options.device)
        self._device = device = torch.device("cuda", 0) if device == torch.device("cuda") else device
        if settings.torch_threads is not None:
            torch.set_num_threads(settings.torch_threads)
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # as our script does
        evaluations = settings.eval
        self._eval_env = make_env(
            settings.env, num_envs=evaluations.episodes, seed=0, num_threads=evaluations.num_threads, evaluate=True
        )
        spaces = spaces_of(self._eval_env, settings.env)
        self._sizes = {
            "state": settings.networks.categoricals * settings.networks.classes,
            "belief": settings.networks.belief,
            "previous_action": spaces.action,
        }
        out = self._out = options.out
        out.mkdir(parents=True, exist_ok=True)
        base = recipe_config(settings, spaces, device=device, out=out, evaluate=options.evaluate, limit=options.limit)
        OmegaConf.set_struct(base, True)
        self._config = OmegaConf.merge(base, OmegaConf.from_dotlist([*options.peer]))
        (out / "settings.json").write_text(json.dumps(OmegaConf.to_container(self._config), indent=2), encoding="ascii")
        self.window = RateWindow(options.seconds, device=device, after=options.after, limit=options.limit)
        self._recipe = _load(folder)
        self._evaluates, self._summary = options.evaluate, {"impl": "torchrl", "preset": options.preset}
        self._summary |= {"seed": options.seed, "device": str(device), "recipe": str(folder)}
        self._updates = self._frames = 0
        self._first_update: float | None = None
        self._returns: list[float] = []
        self._evaluations: list[dict[str, float]] = []
        self._timings: dict[str, float] = {}
        self._actor: Any = None
        self._begun = self._ready = time.monotonic()

    def train(self) -> None:
        """Runs the recipe until the window has ended; raises what it raises."""
        recipe: Any = self._recipe
        plain = {
            name: getattr(recipe, name) for name in ("_build_learner", "_make_learner_update", "_build_collection")
        }

        def build_learner(*args: Any, **kwargs: Any) -> Any:
            self._begun = time.monotonic()  # compilation counts as in our script, building does not
            learner = plain["_build_learner"](*args, **kwargs)
            self._actor = learner.real_world_actor
            return learner

        def make_learner_update(*args: Any, **kwargs: Any) -> Any:
            stepper = plain["_make_learner_update"](*args, **kwargs)
            step = stepper.step

            def counted(*sample: Any) -> Any:
                result = step(*sample)
                self._updates += 1
                if self._first_update is None:
                    self._first_update = time.monotonic() - STARTED
                return result

            stepper.step = counted
            return stepper

        def build_collection(*args: Any, **kwargs: Any) -> Any:
            self._ready = time.monotonic()
            collector, sync = plain["_build_collection"](*args, **kwargs)
            stats = collector.stats

            def looked_at() -> Any:
                # The recipe asks once per turn of its loop, between a batch and its updates.
                counted = stats()
                if not self._frames:
                    # As in our script, the start of the workers is no training.
                    self._begun += time.monotonic() - self._ready
                self._frames = int(counted["frames"])
                if self.window.tick(self._frames, self._updates):
                    signal.raise_signal(signal.SIGTERM)  # its way of being stopped
                return counted

            collector.stats = looked_at
            return collector, sync

        recipe._build_learner, recipe._make_learner_update = build_learner, make_learner_update
        recipe._build_collection, recipe._evaluate, recipe.append_jsonl = (
            build_collection,
            self._evaluated,
            self._record,
        )
        recipe.main(self._config)
        if self._evaluates:
            self._evaluate()

    def _evaluated(self, *, record_step: int, **_: Any) -> torch.Tensor:
        """Stands for the recipe's evaluation, the first of which is due before our script's."""
        every = self._settings.eval.every
        return torch.tensor(self._evaluate() if every is None or record_step >= every else float("nan"))

    def _evaluate(self) -> float:
        from common.devices import EVAL_SEED_OFFSET
        from common.evaluation import evaluate

        with self.window.excluded():
            result = evaluate(
                self._eval_env,
                _Actor(self._actor, self._sizes),
                seed=self._settings.seed + EVAL_SEED_OFFSET,
                max_steps=self._settings.eval.max_steps,
                device=self._device,
            )
            self._eval_env.close()
        assert result is not None
        point = {"eval/return": result.mean, "eval/length": result.mean_length, "eval/worst": min(result.returns)}
        self._write(point)
        told = {"frames": self._frames, "seconds": round(time.monotonic() - self._begun, 2), "return": result.mean}
        self._evaluations.append(told)
        print(f"evaluation at {self._frames} frames: mean return {result.mean:.1f}", flush=True)
        return result.mean

    def _record(self, _: Path | None, record: dict[str, Any]) -> None:
        """Stands for the recipe's writer of records."""
        if record["type"] == "train_episode":
            self._returns.append(float(record["score"]))
        elif record["type"] == "summary":
            self._timings = {name: round(float(value), 3) for name, value in record["timings"].items()}
        elif record["type"] == "train":
            values = {f"learner/{name}": value for name, value in record.items() if name.startswith("loss_")}
            if self._returns:
                values["train/return"] = sum(self._returns) / len(self._returns)
                self._returns = []
            self._write(values)
            shown = f"{record['environment_steps']} frames, {record['updates']} updates"
            print(f"[{time.monotonic() - self._begun:6.1f} s] {shown}", flush=True)

    def _write(self, values: dict[str, Any]) -> None:
        line = {"frames": self._frames, **values, "seconds": time.monotonic() - self._begun, "updates": self._updates}
        with open(self._out / "metrics.jsonl", "a", encoding="ascii") as file:
            file.write(json.dumps(line) + "\n")

    def summary(self) -> dict[str, Any]:
        """Returns the last line."""
        first = None if self._first_update is None else round(self._first_update, 1)
        told = {"first_update_s": first, "evaluations": self._evaluations, "recipe_timings": self._timings}
        return self._summary | self.window.result() | told | {"command_s": round(time.monotonic() - STARTED, 1)}

    def close(self) -> None:
        """Closes the environments of evaluations."""
        if not self._eval_env.is_closed:
            self._eval_env.close()


def _load(folder: Path) -> ModuleType:
    """Imports the recipe's ``train.py``; what workers import of it by name stays on the path."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    spec = importlib.util.spec_from_file_location("torchrl_dreamer_v3_train", folder / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise PeerUnavailableError(
            f"TorchRL's DreamerV3 recipe at {folder} must be importable, got {error}."
        ) from error
    return module


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; raises SystemExit with one sentence when the recipe is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    presets = sorted(path.stem for path in (SCRIPT / "config" / "preset").glob("*.yaml"))
    parser.add_argument("--preset", choices=presets, default="pendulum")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training after the first update")
    parser.add_argument("--after", type=int, default=1, help="the update from which rates count")
    parser.add_argument("--limit", type=float, default=575.0, help="seconds for all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate", action="store_true", help="as often as the preset says, and at the end")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the preset")
    parser.add_argument("--peer", nargs="*", default=[], metavar="KEY=VALUE", help="of the recipe, last of all")
    parser.add_argument("--recipe", help="folder of TorchRL's recipe (default: beside torchrl)")
    parser.add_argument("--out", type=Path, default=Path("outputs/torchrl_dreamer"))
    options = parser.parse_args(arguments)
    try:
        run = Run(options)
    except (PeerUnavailableError, ValueError) as error:
        raise SystemExit(f"torchrl_dreamer: {error}") from error
    try:
        run.train()
        print(json.dumps(run.summary()), flush=True)
    finally:
        run.close()


if __name__ == "__main__":
    main()
