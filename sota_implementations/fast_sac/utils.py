# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Builds the parts of a run from its settings."""

from __future__ import annotations

import torch
from common.devices import EVAL_SEED_OFFSET, make_device
from common.env_factory import make_env
from settings import EnvSettings, Settings
from torchrl.envs import EnvBase

from torchrl_ext.data import RowLayout, SlotReplayBuffer, SlotStorage, TransitionSampler
from torchrl_ext.modules import EmpiricalNormalization, make_fast_sac_actor, make_fast_sac_critic
from torchrl_ext.objectives import FastSACLoss
from torchrl_ext.trainers import FastSACLearner, UpdateGovernor


def observation_keys(env: EnvBase, settings: EnvSettings) -> tuple[list[str], list[str]]:
    """Returns what the actor and what the critics read.

    Raises:
        ValueError: if a key is not an observation of the environment.
    """
    known = list(env.observation_spec.keys(True, True))
    asymmetric = "state" in known and "privileged_state" in known
    actor = settings.actor_keys or (["state"] if asymmetric else ["observation"])
    critic = settings.critic_keys or (["privileged_state"] if asymmetric else actor)
    for name, keys in (("actor_keys", actor), ("critic_keys", critic)):
        if not set(keys) <= set(known):
            raise ValueError(f"env.{name} must be among the observations {known} of {settings.task!r}, got {keys}.")
    return actor, critic


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


def make_replay(
    settings: Settings, layout: RowLayout, device: torch.device, *, capacity: int | None = None
) -> SlotReplayBuffer:
    """Allocates the replay, with a generator of its own, so that what is sampled does not depend on who acts.

    Keyword Args:
        capacity (int, optional): slots per stream, and final observations. Defaults to the settings'.
    """
    place = device if settings.replay.device is None else make_device(settings.replay.device, "replay.device")
    storage = SlotStorage(
        settings.replay.capacity if capacity is None else capacity,
        settings.env.num_envs,
        layout=layout,
        device=place,
        final_capacity=settings.replay.final_capacity if capacity is None else capacity,
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
