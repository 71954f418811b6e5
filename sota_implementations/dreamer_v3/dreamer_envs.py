# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Environments as the recurrent policy needs them: scaled or one-hot actions, marks of first steps, carried state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dreamer_settings import EnvSettings
from dreamer_shared import PlainEnvSettings, make_plain_env
from tensordict import TensorDictBase
from torchrl.data import Bounded, Composite, OneHot, TensorSpec, Unbounded
from torchrl.envs import Compose, EnvBase, InitTracker, TensorDictPrimer, Transform, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

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
    settings: EnvSettings, *, num_envs: int, seed: int, carried: Mapping[str, int] | None = None
) -> TransformedEnv:
    """Makes ``num_envs`` streams with batch size ``[num_envs]`` on the host.

    Args:
        settings (EnvSettings): the task.

    Keyword Args:
        num_envs (int): streams.
        seed (int): base seed.
        carried (Mapping[str, int], optional): what a recurrent policy carries from step to step, by number of
            features; zero at the first step of an episode. Defaults to nothing, see :func:`carry`.

    Raises:
        ImportError, ValueError: if the backend is not installed, or the task, an option or an action space is wrong.
    """
    plain = PlainEnvSettings(
        task=settings.task,
        backend=settings.backend,
        num_envs=num_envs,
        num_threads=settings.num_threads,
        thread_affinity_offset=None,
        max_episode_steps=settings.max_episode_steps,
        train_episode_steps=None,
        workers="serial",
        options=settings.options,
        actor_keys=None,
        critic_keys=None,
    )
    env = make_plain_env(plain, num_envs=num_envs, seed=seed, num_threads=settings.num_threads, evaluate=False)
    try:
        actions = ActorActions(env.action_spec, env.batch_size)
    except ValueError as error:
        raise ValueError(f"env.task {settings.task!r} cannot be driven: {error}") from error
    made = TransformedEnv(env, Compose(actions, InitTracker()))
    if carried is not None:
        carry(made, carried)
    return made


def carry(env: TransformedEnv, carried: Mapping[str, int]) -> None:
    """Has an environment carry the state of a recurrent policy; see :func:`make_env`."""
    specs = {key: Unbounded(size) for key, size in carried.items()}
    env.append_transform(TensorDictPrimer(specs, default_value=0.0, expand_specs=True))


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


@torch.no_grad()
def evaluate(
    env: EnvBase,
    policy: Callable[[TensorDictBase], TensorDictBase],
    *,
    seed: int,
    max_steps: int,
    device: torch.device,
    in_keys: Sequence[Any],
    should_stop: Callable[[], bool] = lambda: False,
) -> list[float] | None:
    """Returns the return of each stream's first episode, acting with the mode of the policy.

    Args:
        env (EnvBase): with the policy's carried state; one stream per episode.
        policy (callable): recurrent.

    Keyword Args:
        seed (int): of the environment, the same each time.
        max_steps (int): an episode that has not ended by then is counted as it is.
        device (torch.device): of the policy.
        in_keys (sequence of NestedKey): what the policy reads.
        should_stop (callable): asked at every step; None is returned when it says yes.
    """
    forked = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked), set_exploration_type(ExplorationType.DETERMINISTIC):
        # The posterior is sampled in any mode.
        torch.manual_seed(seed)
        env.set_seed(seed)
        root = env.reset()
        total = torch.zeros(env.batch_size, dtype=torch.float64)
        alive = torch.ones(env.batch_size, dtype=torch.bool)
        for _ in range(max_steps):
            if should_stop():
                return None
            root.update(policy(root.select(*in_keys).to(device)).to("cpu"))
            row, root = env.step_and_maybe_reset(root)
            total += row["next", "reward"].reshape(-1) * alive
            alive &= ~row["next", "done"].reshape(-1)
            if not alive.any():
                break
    return total.tolist()
