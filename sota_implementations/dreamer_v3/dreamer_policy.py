# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The policy that acts in the real environment, with latents that it remembers from step to step."""

from __future__ import annotations

import torch
from dreamer_envs import OBSERVATION
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import nn
from torchrl.modules import RSSMPosteriorV3, RSSMPriorV3, RSSMStateEstimatorV3

__all__ = ["RecurrentPolicy"]

_REMEMBERED = ("state", "belief", "previous_action")


class RecurrentPolicy(TensorDictModuleBase):
    """Acts in the real environment: updates its latents from an observation, then samples an action.

    It writes ``"state"``, ``"belief"`` (float32, those of the current observation, which rows keep) and ``"action"``,
    and remembers them for the next step of the same streams: on its own device, so that observations and actions alone
    travel between host and device. Where ``"is_init"`` they are ignored. Another batch or device begins anew. Whoever
    acts in other environments takes a :meth:`twin`.

    The memory of a batch is written in place and nothing is decided by data, so that a step can be captured as a CUDA
    graph, as ``cudagraph_policy`` of a collector does. What is written into rows is never written again.

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
        self.in_keys, self.out_keys = [OBSERVATION, "is_init"], ["state", "belief", "action"]
        self.encoder, self.actor, self._action_dim = encoder, actor, action_dim
        self.estimator = RSSMStateEstimatorV3(prior, posterior, in_keys=[*_REMEMBERED, "embedding", "is_init"])
        self._memory: TensorDict | None = None

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes the latents and the action."""
        reset = tensordict.get("is_init")
        memory = self._remembered(tensordict.batch_size, reset.device)
        inner = memory.copy()  # its entries are replaced
        inner.set("is_init", reset)
        inner.set("embedding", self.encoder(tensordict.get(OBSERVATION)))
        self.actor(self.estimator(inner))
        values = inner.get("state"), inner.get("belief"), inner.get("action").float()
        for key, value in zip(self.out_keys, values, strict=True):
            tensordict.set(key, value)
        with torch.no_grad():
            for key, value in zip(_REMEMBERED, values, strict=True):
                memory.get(key).copy_(value)
        return tensordict

    def _remembered(self, batch_size: torch.Size, device: torch.device) -> TensorDict:
        memory = self._memory
        if memory is None or memory.batch_size != batch_size or memory.get("state").device != device:
            sizes = (*self.latents.values(), self._action_dim)
            nothing = {
                key: torch.zeros(*batch_size, size, device=device) for key, size in zip(_REMEMBERED, sizes, strict=True)
            }
            memory = self._memory = TensorDict(nothing, batch_size)
        return memory

    def twin(self) -> RecurrentPolicy:
        """Returns a policy of the same networks with a memory of its own."""
        estimator = self.estimator
        return RecurrentPolicy(self.encoder, estimator.prior, estimator.posterior, self.actor, self._action_dim)

    @property
    def latents(self) -> dict[str, int]:
        """What rows keep of the latents, by number of features."""
        prior = self.estimator.prior
        return {"state": prior.num_categoricals * prior.num_classes, "belief": prior.rnn_hidden_dim}
