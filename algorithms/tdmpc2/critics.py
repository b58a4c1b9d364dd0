"""The critics of TD-MPC2, and the values that are read from them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import DataSpec, Params, Part
from offrl.algorithms.tdmpc2.networks import FORM, HEAD
from offrl.algorithms.tdmpc2.settings import TDMPC2Config
from offrl.algorithms.tdmpc2.tasks import embedding_of
from offrl.nn import EnsembleMLP, call
from offrl.nn.encoders.own import members


class LatentCritics(Part):
    """E critics Q(z, a), read by HEAD; every value is 0 at first. The algorithm's module "critic"."""

    config: TDMPC2Config

    def __init__(self, config: TDMPC2Config, spec: DataSpec) -> None:
        super().__init__(config, spec)
        self.inputs, dropout = config.latent + embedding_of(spec), config.critic_dropout
        self.network = EnsembleMLP(
            config.critics,
            self.inputs + spec.action_dim,
            config.hidden,
            HEAD.out_dim,
            dropout=dropout,
            dropout_first=dropout > 0.0,
            **FORM,
        )
        nn.init.zeros_(self.network.head.weight)

    def logits(self, params: Params, latents: Tensor, actions: Tensor, key: Tensor | None = None) -> Tensor:
        """Outputs [E, ..., K] at latents [..., L] and actions [..., A]; a key switches dropout on."""
        x = torch.cat([latents[..., : self.inputs], actions], -1)
        key = key if self.config.critic_dropout else None
        return call(self.network, params, x.flatten(0, -2), key).unflatten(1, x.shape[:-1])

    def some(self, params: Params, count: int, key: Tensor) -> Params:
        """The parameters of `count` critics drawn without replacement."""
        return members(params, rng.uniform(key, (self.config.critics,)).topk(count).indices)

    def mean_q(
        self, params: Params, latents: Tensor, actions: Tensor, key: Tensor, dropout: Tensor | None = None
    ) -> Tensor:
        """The mean value [...] of two critics drawn by `key`."""
        pair = self.some(params, min(2, self.config.critics), key)
        return HEAD.mean(self.logits(pair, latents, actions, dropout)).mean(0)

    def target_q(self, params: Params, latents: Tensor, actions: Tensor, key: Tensor) -> Tensor:
        """The smallest value [...] of the target critics, or of `target_critics` of them that `key` draws."""
        if self.config.target_critics not in (0, self.config.critics):
            params = self.some(params, self.config.target_critics, key)
        return HEAD.mean(self.logits(params, latents, actions)).amin(0)
