"""Behaviour cloning of chunks of actions by their mean, or by a Gaussian: the control of generative policies, as which
it is measured in Diffusion Policy (arXiv 2303.04137) and Q-chunking (arXiv 2507.07969). Where the data do two things in
one state, it plays what is between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offrl.algorithm import Algorithm, Batch, Loss, Params, TrainState, Traits, Update
from offrl.data.samplers.chunks import VALID, ChunkSampler, valid_mean
from offrl.families.generative.chunks import ChunkActor, action_steps_field, length_field
from offrl.nn import make_policy
from offrl.nn.custom.networks import ActorNetworkSettings
from offrl.nn.policies import gaussian_log_prob
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class ChunkBCConfig(ActorNetworkSettings):
    """Settings of chunked behaviour cloning; the defaults are BC's, and the chunks as long as Q-chunking's."""

    name: str = "chunk_bc"
    learning_rate: float = setting(3e-4, "Adam's learning rate", low=0.0)
    batch_size: int = setting(256, "windows in a batch", low=1)
    length: int = length_field(5)
    action_steps: int = action_steps_field()
    hidden: list[int] = setting([256, 256], "widths of the hidden layers", low=1)
    policy: str = setting(
        "deterministic",
        "deterministic: squared error; gaussian: negative log-likelihood",
        choices=("deterministic", "gaussian"),
    )
    dropout: float = setting(0.0, "dropout rate of the policy", low=0.0, high=0.99, structural=True)
    init: str = setting("torch", "initial weights: torch (uniform) or orthogonal", choices=("torch", "orthogonal"))


class GaussianChunkActor(ChunkActor):
    """The mean chunk, or with `explore` a sample."""

    algorithm: ChunkBC

    def chunk(self, observations: Tensor, key: Tensor, explore: bool) -> Tensor:
        chunk = self.choose(self.apply("actor", observations), key, explore)
        return chunk.unflatten(1, (self.algorithm.config.length, -1))


@register("algo", "chunk_bc")
class ChunkBC(Algorithm[ChunkBCConfig]):
    """Imitate the data's chunks by squared error, or by the likelihood of a diagonal Gaussian; act open-loop."""

    traits = Traits(actions=("continuous",), observations="encoded")
    actor_class = GaussianChunkActor

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        return {
            "actor": make_policy(
                c.policy, s.observation_dim, c.length * s.action_dim, 0, c.hidden, dropout=c.dropout, init=c.init
            )
        }

    def sampler(self) -> ChunkSampler:
        return ChunkSampler(self.config.length)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |pi(s) - a|^2 / D over the steps that there are, a a chunk of D numbers, or -E log pi(a|s) of those
        steps.
        """
        dist = [
            x.unflatten(-1, (self.config.length, -1)) for x in self.apply("actor", actor, batch["observations"], key)
        ]
        actions, valid = batch["actions"], batch[VALID]
        if self.config.policy == "deterministic":
            loss = valid_mean((dist[0] - actions).square(), valid)
        else:
            mean, log_std = dist
            loss = -torch.where(valid, gaussian_log_prob(mean, log_std, actions), 0.0).sum(-1).mean()
        return loss, {"actor/loss": loss}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return self.descend(state, "actor", self.actor_loss, batch, key)
