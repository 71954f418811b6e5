# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""The networks, of TorchRL's DreamerV3 modules: world model, imagination, actor, critic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from dreamer_envs import OBSERVATION, Spaces
from dreamer_policy import RecurrentPolicy
from dreamer_settings import NetworkSettings
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torchrl.data import Bounded, Composite, OneHot, Unbounded
from torchrl.envs import DreamerEnv
from torchrl.modules import (
    DreamerV3DiscreteActor,
    DreamerV3ImageDecoder,
    DreamerV3ImageEncoder,
    DreamerV3MLP,
    IndependentNormal,
    RSSMPosteriorV3,
    RSSMPriorV3,
    RSSMRolloutV3,
    SymExpTwoHot,
    WorldModelWrapper,
)
from torchrl.objectives import symexp, symlog

__all__ = ["Networks", "make_networks"]


class _VectorEncoder(nn.Module):
    def __init__(self, net: NetworkSettings, features: int) -> None:
        super().__init__()
        self.mlp = _mlp(net, features, None, net.encoder_layers)
        self.out_features = net.hidden

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.mlp(symlog(observation))


class _VectorDecoder(nn.Module):
    """One head for each part of the observation: adaptive clipping treats each by its own norm."""

    def __init__(self, net: NetworkSettings, latent: int, sizes: list[int]) -> None:
        super().__init__()
        self.trunk = _mlp(net, latent, None, net.decoder_layers)
        self.heads = nn.ModuleList(_mlp(net, net.hidden, size, 0) for size in sizes)

    def forward(self, state: torch.Tensor, belief: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(state, belief)
        # In float32, also under autocast: the loss takes the logarithm back.
        return symexp(torch.cat([head(hidden) for head in self.heads], -1).float())


class _Float(nn.Module):
    """A network whose output is float32, also under autocast."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.network(*inputs).float()


class _GaussianActor(nn.Module):
    def __init__(self, net: NetworkSettings, latent: int, actions: int) -> None:
        super().__init__()
        self.trunk = _mlp(net, latent, None, net.actor_layers)
        self.mean = _mlp(net, net.hidden, actions, 0, outscale=0.01)
        self.std = _mlp(net, net.hidden, actions, 0, outscale=0.01)
        self._low, self._range = net.min_std, net.max_std - net.min_std

    def forward(self, state: torch.Tensor, belief: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(belief, state)
        std = self._range * torch.sigmoid(self.std(hidden) + 2.0) + self._low
        return self.mean(hidden).tanh().float(), std.float()


@dataclass(frozen=True, kw_only=True)
class Networks:
    """Everything that learns, and two views of it."""

    world_model: TensorDictSequential
    """Encoder, recurrence, decoder, rewards and continuation of real sequences."""
    imagination: DreamerEnv
    """The recurrence and rewards, as an environment."""
    continuation: TensorDictSequential
    actor: ProbabilisticTensorDictSequential
    value: TensorDictSequential
    policy: RecurrentPolicy


def make_networks(net: NetworkSettings, spaces: Spaces, device: torch.device) -> Networks:
    """Builds all networks on a device.

    Raises:
        ValueError: if ``networks.decoder_sizes`` are not those of an observation, or an image cannot be halved as often
            as ``networks.image_mults`` says.
    """
    state, actions = net.categoricals * net.classes, spaces.action
    latent = state + net.belief
    encoder: nn.Module
    decoder: nn.Module
    if spaces.pixels:
        shape = (spaces.observation[0], spaces.observation[1], spaces.observation[2])
        options = {"depth": net.image_depth, "mults": tuple(net.image_mults), "kernel_size": net.image_kernel}
        image_encoder = DreamerV3ImageEncoder(shape[0], norm_eps=net.norm_eps, **options)
        encoder, embedding = image_encoder, image_encoder.output_features(shape)
        image_decoder = DreamerV3ImageDecoder(
            latent, shape, num_blocks=net.image_blocks, norm_eps=net.norm_eps, **options
        )
        decoder = _Float(image_decoder)
    else:
        features = spaces.observation[0]
        sizes = net.decoder_sizes or [features]
        if sum(sizes) != features:
            raise ValueError(
                f"networks.decoder_sizes must add up to the {features} features of an observation, got {sizes}; "
                "nothing was started."
            )
        encoder, embedding = _VectorEncoder(net, features), net.hidden
        decoder = _VectorDecoder(net, latent, sizes)

    prior = RSSMPriorV3(
        action_shape=torch.Size([actions]),
        action_dim=actions,
        hidden_dim=net.hidden,
        rnn_hidden_dim=net.belief,
        num_categoricals=net.categoricals,
        num_classes=net.classes,
        recurrent_model="block_gru",
        num_blocks=net.blocks,
        num_layers=net.dynamics_layers,
        prior_num_layers=net.prior_layers,
        norm_eps=net.norm_eps,
        unimix=net.unimix,
    )
    posterior = RSSMPosteriorV3(
        hidden_dim=net.hidden,
        num_categoricals=net.categoricals,
        num_classes=net.classes,
        rnn_hidden_dim=net.belief,
        obs_embed_dim=embedding,
        unimix=net.unimix,
        use_rms_norm=True,
        num_layers=net.posterior_layers,
        norm_eps=net.norm_eps,
    )
    reward, decode_reward = _Float(_mlp(net, latent, net.bins, net.reward_layers, outscale=0.0)), SymExpTwoHot(net.bins)
    goes_on = _Float(_mlp(net, latent, 1, net.reward_layers))

    following = [("next", "belief"), ("next", "state")]
    rollout = RSSMRolloutV3(
        TensorDictModule(
            prior,
            in_keys=["state", "belief", "action"],
            out_keys=[("next", "prior_logits"), ("next", "state"), ("next", "belief")],
        ),
        TensorDictModule(
            posterior,
            in_keys=[("next", "belief"), ("next", "encoded_latents")],
            out_keys=[("next", "posterior_logits"), ("next", "state")],
        ),
        reset_key="is_init",
    )
    world_model = TensorDictSequential(
        TensorDictModule(encoder, in_keys=[("next", OBSERVATION)], out_keys=[("next", "encoded_latents")]),
        rollout,
        TensorDictModule(decoder, in_keys=[("next", "state"), ("next", "belief")], out_keys=[("next", "reco_pixels")]),
        TensorDictModule(reward, in_keys=following, out_keys=[("next", "reward_logits")]),
        TensorDictModule(decode_reward, in_keys=[("next", "reward_logits")], out_keys=[("next", "reward")]),
        TensorDictModule(goes_on, in_keys=following, out_keys=[("next", "continue_pred")]),
    ).to(device)
    transition = TensorDictModule(prior, in_keys=["state", "belief", "action"], out_keys=["_", "state", "belief"])
    imagined_reward = TensorDictSequential(
        TensorDictModule(reward, in_keys=["belief", "state"], out_keys=["reward_logits"]),
        TensorDictModule(decode_reward, in_keys=["reward_logits"], out_keys=["reward"]),
    )
    continuation = TensorDictSequential(
        TensorDictModule(goes_on, in_keys=["belief", "state"], out_keys=["continue_logits"]),
        TensorDictModule(nn.Sigmoid(), in_keys=["continue_logits"], out_keys=["continuation"]),
    ).to(device)
    actor = _make_actor(net, latent, spaces).to(device)
    value = TensorDictSequential(
        TensorDictModule(
            _Float(_mlp(net, latent, net.bins, net.value_layers, outscale=0.0)),
            in_keys=["belief", "state"],
            out_keys=["state_value_logits"],
        ),
        TensorDictModule(SymExpTwoHot(net.bins), in_keys=["state_value_logits"], out_keys=["state_value"]),
    ).to(device)
    return Networks(
        world_model=world_model,
        imagination=_make_imagination(
            WorldModelWrapper(transition, imagined_reward), state, net.belief, spaces, device
        ),
        continuation=continuation,
        actor=actor,
        value=value,
        policy=RecurrentPolicy(encoder, prior, posterior, actor, actions),
    )


def _mlp(net: NetworkSettings, inputs: int, outputs: int | None, depth: int, *, outscale: float = 1.0) -> DreamerV3MLP:
    return DreamerV3MLP(inputs, outputs, depth=depth, num_cells=net.hidden, outscale=outscale, norm_eps=net.norm_eps)


def _make_actor(net: NetworkSettings, latent: int, spaces: Spaces) -> ProbabilisticTensorDictSequential:
    if spaces.discrete:
        return DreamerV3DiscreteActor(
            latent,
            spaces.action,
            depth=net.actor_layers,
            num_cells=net.hidden,
            norm_eps=net.norm_eps,
            unimix=net.unimix,
        )
    return ProbabilisticTensorDictSequential(
        TensorDictModule(
            _GaussianActor(net, latent, spaces.action), in_keys=["state", "belief"], out_keys=["loc", "scale"]
        ),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            default_interaction_type=InteractionType.RANDOM,
            distribution_class=IndependentNormal,
            return_log_prob=True,
            log_prob_key="action_log_prob",
        ),
    )


def _make_imagination(
    model: WorldModelWrapper, state: int, belief: int, spaces: Spaces, device: torch.device
) -> DreamerEnv:
    env = DreamerEnv(
        world_model=model.to(device),
        prior_shape=torch.Size([state]),
        belief_shape=torch.Size([belief]),
        device=device,
    )
    latents = Composite(state=Unbounded(state), belief=Unbounded(belief))
    actions = OneHot(spaces.action, dtype=torch.float32) if spaces.discrete else Bounded(-1.0, 1.0, (spaces.action,))
    env.observation_spec, env.state_spec = latents.to(device), latents.clone().to(device)
    env.action_spec, env.reward_spec = actions.to(device), Unbounded((1,)).to(device)
    return env
