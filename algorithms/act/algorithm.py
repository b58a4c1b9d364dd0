"""ACT: "Learning Fine-Grained Bimanual Manipulation with Low-Cost Hardware" (Zhao et al., 2023, arXiv 2304.13705), for
observations that are vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.actor import Actor
from offrl.algorithm import Algorithm, Loss, TrainState, Traits, Update
from offrl.algorithms.act.network import ChunkAutoencoder
from offrl.data.samplers.chunks import VALID, ChunkSampler
from offrl.data.samplers.transitions import Batch
from offrl.errors import UserError
from offrl.families.generative.chunks import execute_field, length_field
from offrl.families.generative.ensembling import EnsemblingActor, ensemble_field
from offrl.optim import Adam, Params
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class ACTConfig:
    """Settings of ACT; the defaults suit a CPU. Published: length 100, width 512, 8 heads, feed_forward 3200, layers 4,
    batch_size 8 and learning_rate 1e-5, for images."""

    name: str = "act"
    learning_rate: float = setting(1e-4, "AdamW's learning rate", low=0.0)
    weight_decay: float = setting(1e-4, "AdamW's decay of all parameters", low=0.0, structural=True)
    batch_size: int = setting(64, "windows in a batch", low=1)
    length: int = length_field(20)
    execute: int = execute_field()
    ensemble: float | None = ensemble_field()
    kl_weight: float = setting(
        10.0, "weight of the posterior's divergence from the prior, beside the error of an action", low=0.0
    )
    latent: int = setting(32, "numbers in the latent, which is 0 when it acts", low=1)
    width: int = setting(128, "width of the transformers", low=1)
    heads: int = setting(4, "their attention heads", low=1)
    feed_forward: int = setting(512, "width of the hidden layer in their blocks", low=1)
    layers: int = setting(2, "blocks of the posterior, and of the encoder", low=1)
    decoder_layers: int = setting(1, "blocks of the decoder", low=1)
    dropout: float = setting(0.1, "dropout rate of attention and blocks", low=0.0, high=0.99, structural=True)


@register("algo", "act")
class ACT(Algorithm):
    """A variational autoencoder of chunks: the latent takes up what differs between demonstrations, and at 0 the policy
    is of one style.

    The posterior, which training alone needs, is a part of module "actor": one loss trains both.
    """

    Config = ACTConfig
    traits = Traits(actions=("continuous",))

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        if c.width % c.heads:
            width = c.heads * max(1, c.width // c.heads)
            raise UserError(
                f"algo.width={c.width} is no multiple of algo.heads={c.heads}: take algo.width={width}, or other heads"
            )
        sizes = (c.length, c.latent, c.width, c.heads, c.feed_forward, c.layers, c.decoder_layers)
        return {"actor": ChunkAutoencoder(s.observation_dim, s.action_dim, *sizes, dropout=c.dropout)}

    def sampler(self) -> ChunkSampler:
        return ChunkSampler(self.config.length)

    def optimizer(self, name: str) -> Adam:
        return Adam(self.config.learning_rate, weight_decay=self.config.weight_decay)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |a - pi(s, z)| + kl_weight E KL(q(z|s, a) | N(0, 1)), z ~ q (algorithm 1): the mean of steps that there
        are, the sum over z.
        """
        actions, valid = batch["actions"], batch[VALID]
        chunk, mean, log_variance = self.apply("actor", actor, batch["observations"], None, actions, valid, key)
        error = torch.where(valid.unsqueeze(-1), (actions - chunk).abs(), 0.0).sum() / (
            valid.sum() * self.spec.action_dim
        )
        divergence = -0.5 * (1.0 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        loss = error + self.config.kl_weight * divergence
        return loss, {"actor/loss": loss, "actor/error": error, "actor/divergence": divergence}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return self.descend(state, "actor", self.actor_loss, batch, key)

    def actor(self, state: TrainState) -> Actor:
        return ACTActor(self, state)


class ACTActor(EnsemblingActor):
    """The decoder at latent 0; with `explore`, at one drawn from the prior."""

    algorithm: ACT

    def chunk(self, observations: Tensor, key: Tensor, explore: bool) -> Tensor:
        latent = rng.normal(key, (observations.shape[0], self.algorithm.config.latent)) if explore else None
        return self.apply("actor", observations, latent)[0].clamp(-1.0, 1.0)
