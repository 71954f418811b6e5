# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Builds the parts of a run from its settings, and the small things its loop needs."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
from env_factory import make_env, observation_keys
from settings import Settings
from torchrl.envs import EnvBase

from torchrl_ext.data import RowLayout, SlotReplayBuffer, SlotStorage, TransitionSampler
from torchrl_ext.modules import EmpiricalNormalization, make_fast_sac_actor, make_fast_sac_critic
from torchrl_ext.objectives import FastSACLoss
from torchrl_ext.trainers import FastSACLearner, UpdateGovernor

# Streams of one run have seeds seed + i; an evaluation never starts from a state that was trained on.
EVAL_SEED_OFFSET = 1_000_003
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def make_device(name: str) -> torch.device:
    """Returns the device of a setting; ``auto`` is a GPU where there is one.

    Raises:
        ValueError: if there is no such device.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device must be auto or a device of this machine, got {name!r}; nothing was started.") from (
            error
        )
    return device


def seed_everything(seed: int) -> None:
    """Seeds the global generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def make_train_env(settings: Settings) -> EnvBase:
    """Makes the environment that is learnt from."""
    env = settings.env
    return make_env(env, num_envs=env.num_envs, seed=settings.seed, num_threads=env.num_threads, evaluate=False)


def make_eval_env(settings: Settings) -> EnvBase:
    """Makes the environment of evaluations, one stream per episode."""
    episodes, threads = settings.eval.episodes, settings.eval.num_threads
    seed = settings.seed + EVAL_SEED_OFFSET
    return make_env(settings.env, num_envs=episodes, seed=seed, num_threads=threads, evaluate=True)


def make_learner(settings: Settings, env: EnvBase, device: torch.device) -> FastSACLearner:
    """Builds networks, loss and learner on the device.

    Raises:
        ValueError: if the action space is not a finite box, which is all FastSAC can drive.
    """
    net, opt = settings.networks, settings.learner
    actor_keys, critic_keys = observation_keys(env, settings.env)
    spec = env.observation_spec
    widths = {key: spec[key].shape[env.batch_dims :].numel() for key in dict.fromkeys([*actor_keys, *critic_keys])}
    normalizer = None
    if net.normalize:
        normalizer = EmpiricalNormalization.from_spec(spec, list(widths), clamp=net.observation_clamp, device=device)
    names = dict(zip(widths, normalizer.out_keys if normalizer else widths, strict=True))
    try:
        actor = make_fast_sac_actor(
            env.action_spec,
            observation_dim=sum(widths[key] for key in actor_keys),
            in_keys=[names[key] for key in actor_keys],
            hidden_size=net.actor_hidden,
            log_std_min=net.log_std_min,
            log_std_max=net.log_std_max,
            init_std=net.init_std,
            device=device,
        )
    except ValueError as error:
        raise ValueError(f"env.task {settings.env.task!r} cannot be driven: {error}") from error
    critic = make_fast_sac_critic(
        observation_dim=sum(widths[key] for key in critic_keys),
        action_dim=env.action_spec.shape[-1],
        in_keys=[names[key] for key in critic_keys],
        num_critics=net.num_critics,
        hidden_size=net.critic_hidden,
        num_atoms=net.num_atoms,
        v_min=net.v_min,
        v_max=net.v_max,
        pad_to=net.pad_to,
        device=device,
    )
    loss = FastSACLoss(
        actor,
        critic,
        target_reduction=opt.target_reduction,
        policy_reduction=opt.policy_reduction,
        gamma=opt.gamma,
        alpha_init=opt.alpha_init,
        min_alpha=opt.min_alpha,
        target_entropy_ratio=opt.target_entropy_ratio,
    )
    return FastSACLearner(
        loss,
        normalizer,
        critic_lr=opt.critic_lr,
        actor_lr=opt.actor_lr,
        alpha_lr=opt.alpha_lr,
        betas=(opt.betas[0], opt.betas[1]),
        weight_decay=opt.weight_decay,
        tau=opt.tau,
        policy_frequency=opt.policy_frequency,
        max_grad_norm=opt.max_grad_norm,
        autocast=torch.bfloat16 if opt.autocast == "bf16" else None,
        cuda_graph=opt.cuda_graph,
        compile=opt.compile,
    )


def make_replay(settings: Settings, layout: RowLayout, device: torch.device) -> SlotReplayBuffer:
    """Allocates the replay, with a generator of its own, so that what is sampled does not depend on who acts."""
    place = torch.device(settings.replay.device or device)
    storage = SlotStorage(
        settings.replay.capacity,
        settings.env.num_envs,
        layout=layout,
        device=place,
        final_capacity=settings.replay.final_capacity,
    )
    generator = torch.Generator(place)
    generator.manual_seed(settings.seed)
    return SlotReplayBuffer(
        storage=storage,
        sampler=TransitionSampler(settings.learner.n_steps, settings.learner.gamma),
        batch_size=settings.learner.batch_size,
        sample_device=None if place == device else device,
        generator=generator,
    )


def make_governor(settings: Settings) -> UpdateGovernor:
    """Makes the governor of updates per vector step."""
    return UpdateGovernor(
        settings.learner.updates_per_step,
        rows_per_step=settings.env.num_envs,
        learning_starts=settings.collector.learning_starts,
    )


class Every:
    """Says yes once per interval of a growing number.

    Args:
        interval (float, optional): None never says yes.
        start (float): where the number stands.
    """

    def __init__(self, interval: float | None, start: float = 0.0) -> None:
        self._interval = interval
        self._last = start if interval is None else start // interval

    def __call__(self, value: float) -> bool:
        if self._interval is None or value // self._interval <= self._last:
            return False
        self._last = value // self._interval
        return True


class StopSignal:
    """Turns SIGINT and SIGTERM into a request to stop; the second one also asks to stop quickly, the third raises."""

    def __init__(self) -> None:
        self.count = 0
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in EXIT_CODES:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.number = number
        if self.count > 2:
            raise KeyboardInterrupt

    @property
    def exit_code(self) -> int:
        """Of the process: 0 when nothing was received, else 128 plus the signal."""
        return EXIT_CODES.get(self.number, 0) if self.count else 0  # type: ignore[call-overload]

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def mean(values: Sequence[float]) -> float:
    """Returns the mean of some numbers."""
    return sum(values) / len(values)
