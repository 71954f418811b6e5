# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Environments as the recurrent policy needs them: scaled or one-hot actions, marks of first steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from common import env_factory
from common.setting_groups import EnvSettings
from torchrl.data import Bounded, Composite, OneHot, TensorSpec
from torchrl.envs import Compose, EnvBase, InitTracker, Transform, TransformedEnv

OBSERVATION = "observation"


@dataclass(frozen=True, kw_only=True)
class Spaces:
    """What networks must know of an environment."""

    observation: tuple[int, ...]
    """Shape of one observation: ``(features,)``, or ``(channels, height, width)`` of pixels."""
    action: int
    """Features of a continuous action, or the number of discrete ones."""
    discrete: bool

    @property
    def pixels(self) -> bool:
        """Whether observations are images."""
        return len(self.observation) == 3


class ActorActions(Transform):
    """Turns what the actor gives into the environment's action.

    Features of a continuous action are clipped to [-1, 1] and scaled to the environment's box; a discrete action is
    one-hot. Rows keep what the actor gave.

    Args:
        spec (TensorSpec): the environment's: ``[n, A]`` floats, ``[n]`` whole numbers or ``[n, A]`` one-hot.
        batch_size (torch.Size): of the environment.

    Raises:
        ValueError: for an action that is neither discrete nor in a finite box.
    """

    def __init__(self, spec: TensorSpec, batch_size: torch.Size) -> None:
        super().__init__(in_keys_inv=["action"], out_keys_inv=["action"])
        self.discrete, self._one_hot = not spec.dtype.is_floating_point, isinstance(spec, OneHot)
        if self.discrete:
            count = getattr(spec.space, "n", None)
            if count is None or spec.shape != (torch.Size([*batch_size, count]) if self._one_hot else batch_size):
                raise ValueError(f"the action must be one whole number or a box of floats, got {spec}.")
            self._dtype = spec.dtype
            self.actor_spec: TensorSpec = OneHot(count, shape=(*batch_size, count), dtype=torch.float32)
            return
        low, high = spec.space.low, spec.space.high
        if not bool(torch.isfinite(low).all() & torch.isfinite(high).all()):
            raise ValueError(f"the action box must be finite, got {spec}.")
        self._low, self._high = low, high
        self.actor_spec = Bounded(-1.0, 1.0, spec.shape, dtype=spec.dtype)

    def _inv_apply_transform(self, action: torch.Tensor) -> torch.Tensor:
        if self.discrete:
            return action.to(self._dtype) if self._one_hot else action.argmax(-1)
        return self._low + (action.clamp(-1.0, 1.0) + 1.0) / 2.0 * (self._high - self._low)

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Shows the actor's action space."""
        input_spec = input_spec.clone()
        input_spec["full_action_spec"]["action"] = self.actor_spec
        return input_spec


def make_env(
    settings: EnvSettings, *, num_envs: int, seed: int, num_threads: int | None, evaluate: bool
) -> TransformedEnv:
    """Makes ``num_envs`` streams with batch size ``[num_envs]`` on the host; see :func:`common.env_factory.make_env`.

    Raises:
        ImportError, ValueError: if the backend is not installed, or the task, an option or an action space is wrong.
    """
    env = env_factory.make_env(settings, num_envs=num_envs, seed=seed, num_threads=num_threads, evaluate=evaluate)
    try:
        actions = ActorActions(env.action_spec, env.batch_size)
    except ValueError as error:
        env.close()
        raise ValueError(f"env.task {settings.task!r} cannot be driven: {error}") from error
    return TransformedEnv(env, Compose(actions, InitTracker()))


def spaces_of(env: EnvBase, settings: EnvSettings) -> Spaces:
    """Reads what networks must know.

    Raises:
        ValueError: if observations are neither flat floats nor uint8 images.
    """
    known = list(env.observation_spec.keys(True, True))
    spec = env.observation_spec[OBSERVATION] if OBSERVATION in known else None
    shape = () if spec is None else tuple(spec.shape[env.batch_dims :])
    fits = spec is not None and (
        (len(shape) == 1 and spec.dtype.is_floating_point) or (len(shape) == 3 and spec.dtype == torch.uint8)
    )
    if not fits:
        raise ValueError(
            f"env.task {settings.task!r} must have {OBSERVATION!r} of flat floats or uint8 [C, H, W], got "
            f"{spec if spec is not None else known}; nothing was started."
        )
    action = env.action_spec
    return Spaces(observation=shape, action=action.shape[-1], discrete=isinstance(action, OneHot))
