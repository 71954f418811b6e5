# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The policy that acts in the real environment, with latents that it carries from step to step."""

from __future__ import annotations

from dreamer_envs import OBSERVATION
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import nn
from torchrl.modules import RSSMPosteriorV3, RSSMPriorV3, RSSMStateEstimatorV3

__all__ = ["RecurrentPolicy"]


class RecurrentPolicy(TensorDictModuleBase):
    """Acts in the real environment: updates its latents from an observation, then samples an action.

    The latents of the step before and its action are carried under ``"carried_state"``, ``"carried_belief"`` and
    ``"previous_action"``, and ignored where ``"is_init"``. It writes ``"state"``, ``"belief"`` (float32, those of
    the current observation, which rows keep), ``"action"`` and the carried ones of the next step. Shares all
    parameters with the networks that learn.

    Args:
        encoder (nn.Module): of observations.
        prior (RSSMPriorV3): of the world model.
        posterior (RSSMPosteriorV3): of the world model.
        actor (ProbabilisticTensorDictSequential): reads ``"state"`` and ``"belief"``.
        action_dim (int): features of an action.
    """

    def __init__(
        self,
        encoder: nn.Module,
        prior: RSSMPriorV3,
        posterior: RSSMPosteriorV3,
        actor: ProbabilisticTensorDictSequential,
        action_dim: int,
    ) -> None:
        super().__init__()
        self.in_keys = [OBSERVATION, "is_init", "carried_state", "carried_belief", "previous_action"]
        carried = [("next", key) for key in self.in_keys[2:]]
        self.out_keys = ["state", "belief", "action", *carried]
        self.encoder, self.actor, self._action_dim = encoder, actor, action_dim
        keys = ["carried_state", "carried_belief", "previous_action", "embedding", "is_init"]
        self.estimator = RSSMStateEstimatorV3(prior, posterior, in_keys=keys)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes the latents, the action and what is carried."""
        inner = TensorDict({key: tensordict.get(key) for key in self.in_keys[1:]}, tensordict.batch_size)
        inner.set("embedding", self.encoder(tensordict.get(OBSERVATION)))
        self.actor(self.estimator(inner))
        state, belief = inner.get("state"), inner.get("belief")
        action = inner.get("action").float()
        for key, value in zip(self.out_keys, (state, belief, action, state, belief, action), strict=True):
            tensordict.set(key, value)
        return tensordict

    @property
    def latents(self) -> dict[str, int]:
        """What rows keep of the latents, by number of features."""
        return dict(zip(("state", "belief"), self.carried.values(), strict=False))

    @property
    def carried(self) -> dict[str, int]:
        """What environments must carry from step to step, by number of features."""
        prior = self.estimator.prior
        sizes = (prior.num_categoricals * prior.num_classes, prior.rnn_hidden_dim, self._action_dim)
        return dict(zip(self.in_keys[2:], sizes, strict=True))
