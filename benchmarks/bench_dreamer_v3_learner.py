# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""DreamerV3 updates per second, without replay and with it: sample windows, update, write latents back.

The learner is the script's, which is TorchRL's losses and stepper, for all implementations; ``ours`` is one
``SlotReplayBuffer``, ``torchrl`` one buffer per stream in a ``ReplayBufferEnsemble``, as its own script builds it, and
``released`` the same with TorchRL's own steps of the optimizer, which the script captures on CUDA. All hold the same
rows. Blocks without and with replay alternate; the numbers are medians over blocks.

Example:
    ``python benchmarks/bench_dreamer_v3_learner.py --device cpu --impl ours torchrl --updates 3``
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("RL_WARNINGS", "0")
ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "sota_implementations" / "dreamer_v3"
for path in (ROOT, SCRIPT.parent, SCRIPT):
    sys.path.insert(0, str(path))

import hydra  # noqa: E402
import torch  # noqa: E402
from dreamer_envs import Spaces  # noqa: E402
from dreamer_learner import Learner  # noqa: E402
from dreamer_networks import make_networks  # noqa: E402
from dreamer_replay import WriteBacks, make_replay  # noqa: E402
from dreamer_settings import Settings  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from torchrl.data import (  # noqa: E402
    LazyTensorStorage,
    ReplayBufferEnsemble,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

from benchmarks.cases.dreamer import _their_context_update  # noqa: E402
from benchmarks.timing import synchronizer  # noqa: E402
from torchrl_ext.data import RowLayout  # noqa: E402

SPACES = {
    "dmc_walker": Spaces(observation=(24,), action=6, discrete=False),
    "dmc_cartpole": Spaces(observation=(5,), action=1, discrete=False),
    "atari": Spaces(observation=(3, 64, 64), action=6, discrete=True),
}
SLOTS = 512
"""Per stream."""
IMPLEMENTATIONS = ("ours", "torchrl", "released")
"""``released``: TorchRL's replay, and its optimizer's steps launched by the host as in its own script."""

#: Draw a batch; hand latents back; wait for them; end.
Parts = tuple[Callable[[], Any], Callable[..., object], Callable[[], None], Callable[[], None]]


def main() -> None:
    """Prints one line of JSON per replay; all of them feed one learner, which is compiled once."""
    args = _arguments()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    device = torch.device(args.device)
    places = args.replay_device or [args.device]
    spaces, settings = SPACES[args.preset], _settings(args, places[0])
    networks = make_networks(settings.networks, spaces, device)
    learner = Learner(networks, settings.learner, settings.networks, pixels=spaces.pixels, device=device)
    rows = _rows(settings, spaces, networks.policy.latents)
    shared = {
        "preset": args.preset,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "torchrl": metadata.version("torchrl"),
        "parameters": learner.num_parameters,
        "batch": [settings.learner.batch_size, settings.learner.seq_len],
        "streams": settings.env.num_envs,
    }
    for impl, place in itertools.product(sorted(args.impl, key=IMPLEMENTATIONS.index), places):
        make = _ours if impl == "ours" else _torchrl
        if impl == "released":
            learner.optimizer.release()
        named = {"impl": impl, "replay_device": place}
        try:
            parts = make(_settings(args, place), rows, device, torch.device(place))
            measured = _measure(learner, parts, args, device)
        except (RuntimeError, TypeError, ValueError) as error:  # what TorchRL raises here is a result
            if impl == "ours":
                raise
            measured = {"error": f"{type(error).__name__}: {error}"[:300]}
        sys.stdout.write(json.dumps(named | shared | measured) + "\n")
        sys.stdout.flush()


def _measure(learner: Learner, parts: Parts, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    sample, submit, settle, close = parts
    synchronize = synchronizer(device)
    fixed = sample().clone()
    begun = time.perf_counter()
    if not learner.is_warm:
        learner.warm_up(fixed)
    warm_up = time.perf_counter() - begun

    def without() -> None:
        learner.update(fixed)

    def with_replay() -> None:
        batch = sample()
        _, state, belief = learner.update(batch)
        submit(batch, state, belief)

    seconds: dict[str, list[float]] = {"without_replay": [], "with_replay": []}
    for part in (without, with_replay):
        for _ in range(3):
            part()
    for _ in range(args.rounds):
        for name, part in zip(seconds, (without, with_replay), strict=True):
            settle()
            synchronize()
            begun = time.perf_counter()
            for _ in range(args.updates):
                part()
            settle()
            synchronize()
            seconds[name].append((time.perf_counter() - begun) / args.updates)
    close()
    spent = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    return {
        "warm_up_s": round(warm_up, 1),
        "ms": {name: round(value, 3) for name, value in spent.items()},
        "rounds_ms": {name: [round(1e3 * value, 3) for value in values] for name, values in seconds.items()},
        "updates_per_second": {name: round(1e3 / value, 3) for name, value in spent.items()},
        "replay_share": round(spent["with_replay"] / spent["without_replay"] - 1, 4),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cpu", help="of the learner: cpu, cuda")
    parser.add_argument("--replay-device", nargs="+", choices=("cpu", "cuda"), help="default: the learner's")
    parser.add_argument("--impl", nargs="+", choices=IMPLEMENTATIONS, default=["ours"], help="of the replay")
    parser.add_argument("--preset", choices=tuple(SPACES), default="dmc_walker")
    parser.add_argument("--updates", type=int, default=50, help="of a block")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each kind")
    parser.add_argument("--batch-size", type=int, default=None, help="windows; default: the preset's")
    parser.add_argument("--seq-len", type=int, default=None, help="steps of a window; default: the preset's")
    parser.add_argument("--set", nargs="*", default=[], help="further overrides, such as learner.scan_unroll=2")
    parser.add_argument("--threads", type=int, default=None, help="of torch")
    return parser.parse_args()


def _settings(args: argparse.Namespace, place: str) -> Settings:
    overrides = [f"preset={args.preset}", f"replay.capacity={SLOTS}", "collector.learning_starts=4224"]
    overrides += ["replay.online=false", f"replay.device={place}", *args.set]
    if args.batch_size is not None:
        overrides.append(f"learner.batch_size={args.batch_size}")
    if args.seq_len is not None:
        overrides.append(f"learner.seq_len={args.seq_len}")
    with hydra.initialize_config_dir(str(SCRIPT / "config"), version_base="1.3"):
        config = hydra.compose("dreamer_v3", overrides=overrides)
    return Settings.from_dict(OmegaConf.to_container(config, resolve=True))


def _rows(settings: Settings, spaces: Spaces, latents: dict[str, int]) -> TensorDict:
    """``[SLOTS, streams]`` rows of one endless episode, on the host."""
    shape = (SLOTS, settings.env.num_envs)
    never = torch.zeros(*shape, 1, dtype=torch.bool)

    def observation() -> torch.Tensor:
        if spaces.pixels:
            return torch.randint(0, 256, (*shape, *spaces.observation), dtype=torch.uint8)
        return torch.randn(*shape, *spaces.observation)

    first = observation()
    following = torch.cat([first[1:], observation()[:1]])
    action = torch.rand(*shape, spaces.action) * 2 - 1
    if spaces.discrete:
        action = torch.nn.functional.one_hot(action.argmax(-1), spaces.action).float()
    data: dict[str, Any] = {"observation": first, "action": action, "is_init": never}
    data |= {key: torch.zeros(*shape, size) for key, size in latents.items()}
    outcome = {key: never.clone() for key in ("done", "terminated", "truncated")}
    data["next"] = {"observation": following, "reward": torch.randn(*shape, 1), **outcome}
    return TensorDict(data, shape)


def _ours(settings: Settings, rows: TensorDict, device: torch.device, place: torch.device) -> Parts:
    replay = make_replay(settings, RowLayout.from_tensordict(rows[0]), device)
    replay.extend_batch(rows)
    write_backs = WriteBacks(replay)
    return replay.sample, write_backs.submit, write_backs.settle, replay.shutdown


def _torchrl(settings: Settings, rows: TensorDict, device: torch.device, place: torch.device) -> Parts:
    context_update = _their_context_update()
    if context_update is None:
        raise SystemExit("bench_dreamer_v3_learner: this wheel of torchrl does not carry its sota-implementations.")
    batch, length = settings.learner.batch_size, settings.learner.seq_len + 1
    members = []
    for stream in range(settings.env.num_envs):
        member = TensorDictReplayBuffer(
            storage=LazyTensorStorage(SLOTS, device=place),
            sampler=SliceSampler(slice_len=length, end_key=("next", "done"), traj_key="env_index", init_key=None),
            writer=TensorDictRoundRobinWriter(track_generations=True),
        )
        member.extend(rows[:, stream].contiguous().set("env_index", torch.full((SLOTS,), stream)).to(place))
        members.append(member)
    ensemble = ReplayBufferEnsemble(
        *members,
        p="sampleable",
        num_buffer_sampled=batch,
        routing_key="env_index",
        batch_size=batch * length,
        # Its script passes the host's, with which slices cannot be drawn on a GPU.
        generator=torch.Generator(place).manual_seed(0),
        pin_memory=place.type == "cpu" and device.type == "cuda",
        prefetch=1,
    )
    pending: list[Any] = []

    def sample() -> Any:
        drawn = ensemble.sample().reshape(batch, length)
        handles = drawn.select("index", "index_generation")
        moved = drawn.exclude("index", "index_generation", "env_index").to(device, non_blocking=True)
        return moved.update(handles) if place == device else _WithHandles(moved, handles)

    def submit(drawn: Any, state: torch.Tensor, belief: torch.Tensor) -> None:
        handles = drawn.handles if isinstance(drawn, _WithHandles) else drawn
        index, generation, patch = context_update(handles.select("index", "index_generation"), state, belief)
        pending.append(ensemble.submit_update_if_present(index=index, generation=generation, patch=patch))

    def settle() -> None:
        while pending:
            pending.pop(0).result()

    return sample, submit, settle, lambda: None


class _WithHandles:
    """A batch on the learner's device whose handles stay on the host; a TensorDict has one device."""

    def __init__(self, data: Any, handles: Any) -> None:
        self.data, self.handles = data, handles

    def clone(self) -> Any:
        return self.data.clone()

    def exclude(self, *keys: str) -> Any:
        return self.data


if __name__ == "__main__":
    main()
