# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Which keys of an environment and of its policy make a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from torchrl.envs import EnvBase

from torchrl_ext.collectors.policies import Policy, record_keys
from torchrl_ext.data import RowLayout

__all__ = ["IS_INIT", "POLICY_VERSION", "TRAJ_IDS", "RowPlan"]

IS_INIT = "is_init"
TRAJ_IDS = ("collector", "traj_ids")
POLICY_VERSION = ("collector", "policy_version")


@dataclass(frozen=True)
class RowPlan:
    """The keys of a row and their layout.

    Args:
        observation_keys (tuple of NestedKey): kept with their successors.
        extra_keys (tuple of NestedKey): kept beside them: marks of the collector and outputs of the policy.
        metric_keys (tuple of NestedKey): of a step's outcome, told of each episode's last step; not kept in rows.
        layout (RowLayout): of a row.
    """

    observation_keys: tuple[NestedKey, ...]
    extra_keys: tuple[NestedKey, ...]
    metric_keys: tuple[NestedKey, ...]
    layout: RowLayout

    @classmethod
    def of(
        cls,
        env: EnvBase,
        policy: Policy | None,
        *,
        observation_keys: Sequence[NestedKey] | None,
        extra_keys: Sequence[NestedKey] | None,
        metric_keys: Sequence[NestedKey],
        batch: bool,
    ) -> RowPlan:
        """Makes the plan from the specs of an environment and, where its outputs are kept, one call of the policy.

        Keyword Args:
            observation_keys (sequence of NestedKey, optional): Defaults to all observations.
            extra_keys (sequence of NestedKey, optional): Defaults to what TorchRL's collectors give (``traj_ids`` and
                everything that the policy writes) with ``batch``, to nothing without.
            metric_keys (sequence of NestedKey): see the class.
            batch (bool): whether rows are handed out as batches.

        Raises:
            KeyError: when neither the environment nor the policy has a key.
        """
        example = env.fake_tensordict()
        if not example.batch_dims:
            example = example.unsqueeze(0)
        known = [unravel_key(key) for key in env.observation_spec.keys(True, True)]
        observed = known if observation_keys is None else [unravel_key(key) for key in observation_keys]
        missing = [key for key in observed if key not in known]
        if missing:
            raise KeyError(
                f"RingCollector: observation_keys must be among {known}, got {missing}. Nothing was started."
            )
        for key in metric_keys:
            if example.get(_next(key), None) is None:
                raise KeyError(
                    f"RingCollector: metric_keys must be outcomes of a step, got {key!r}. Nothing was started."
                )
        for flag in ("terminated", "truncated"):
            # Every environment has "done"; a stored row always tells the ends apart.
            if example.get(("next", flag), None) is None:
                example["next", flag] = torch.zeros_like(example["next", "done"])
        record = example.select(*record_keys(observed))
        count = example.batch_size
        marks = {
            IS_INIT: torch.zeros(*count, 1, dtype=torch.bool),
            TRAJ_IDS: torch.zeros(count, dtype=torch.int64),
            POLICY_VERSION: torch.zeros(*count, 1, dtype=torch.int64),
        }
        outputs = TensorDict({}, count)
        wanted = None if extra_keys is None else [unravel_key(key) for key in extra_keys]
        if policy is not None and (batch if wanted is None else set(wanted) - set(marks)):
            outputs = _outputs(policy, example.select(*known), record)
        if wanted is None:
            wanted = [TRAJ_IDS, *outputs.keys(True, True)] if batch else []
        for key in wanted:
            value = marks.get(key) if key in marks else outputs.get(key, None)
            if value is None:
                raise KeyError(
                    f"RingCollector: extra_keys must be among {[*marks, *outputs.keys(True, True)]}, got {key!r}. "
                    "Nothing was started."
                )
            record.set(key, value)
        layout = RowLayout.from_tensordict(record.cpu())
        return cls(tuple(observed), tuple(wanted), tuple(metric_keys), layout)


def _next(key: NestedKey) -> NestedKey:
    return ("next", *((key,) if isinstance(key, str) else key))


@torch.no_grad()
def _outputs(policy: Policy, observation: TensorDictBase, record: TensorDictBase) -> TensorDictBase:
    before = set(observation.keys(True, True)) | set(record.keys(True, True))
    after = policy(observation.clone())
    keys = [key for key in after.keys(True, True) if key not in before and key[0] != "next"]
    return after.select(*keys).detach()
