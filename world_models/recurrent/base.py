"""What algorithms have in common that learn in the imagination of a recurrent latent model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offrl.algorithm import (
    Adam,
    Algorithm,
    Batch,
    Dataset,
    Grid,
    Metrics,
    Params,
    Sampler,
    TrainState,
    Traits,
    Tree,
)
from offrl.data.samplers.states import IS_FIRST, PREVIOUS_ACTIONS, StateSampler, steps_of
from offrl.optim import LaProp
from offrl.world_models.recurrent.latents import Latents, LatentWindows
from offrl.world_models.recurrent.modules import model_networks
from offrl.world_models.recurrent.networks import HEAD
from offrl.world_models.recurrent.objectives import OBJECTIVES
from offrl.world_models.recurrent.open_loop import latent_states, open_loop
from offrl.world_models.recurrent.settings import LatentConfig, check_data, check_settings

ConfigT = TypeVar("ConfigT", bound=LatentConfig)

TRAITS = Traits(
    observations="streams",
    image_encoder="dreamer",
    shifts_images=False,
    actions=("continuous",),
    n_step=False,
)


class RecurrentModel(Algorithm[ConfigT]):
    """Modules of the model: encoder, dynamics, prior, posterior, reward, continuation, decoder or, with
    `objective=bottleneck`, multiplier, with `information` multiplier, contrast and inverse. Shapes: T states of a
    window, the first axis of all that is learnt from; B windows; F features.
    """

    open_loop = open_loop
    latent_states = latent_states

    @classmethod
    def fit_config(cls, config: ConfigT, dataset: Dataset, grid: Grid = None) -> ConfigT:
        """`config`, once the data have rewards."""
        check_data(config, dataset, grid)
        return config

    @classmethod
    def traits_for(cls, config: ConfigT) -> Traits:
        return dataclasses.replace(cls.traits, unrolled=config.length + config.horizon)

    def _traits(self, config: ConfigT) -> Traits:
        # how much compiled convolutions save has not been measured
        return dataclasses.replace(super()._traits(config), compiles=self.data_spec.encoder is None)

    def model_modules(self) -> dict[str, nn.Module]:
        """The modules of the model, whose names are `self.model`."""
        check_settings(self.config)
        networks = model_networks(self.config, self.spec)
        self.model = tuple(networks)
        return networks

    def sampler(self) -> Sampler:
        return StateSampler(self.config.length, "chain")

    def optimizer(self, name: str) -> Adam:
        c = self.config
        if name == "multiplier":
            return Adam(c.multiplier_learning_rate)
        return LaProp(c.learning_rate, eps=1e-20, warmup_steps=c.warmup_steps, adaptive_clip=c.adaptive_clip)

    def latents(self, params: dict[str, Params]) -> Latents:
        """The latent model with these parameters."""
        return Latents(lambda name, *x: self.apply(name, params[name], *x), self.config)

    def model_loss(
        self, params: dict[str, Params], batch: Batch, keys: Sequence[Tensor]
    ) -> tuple[LatentWindows, Batch, Tensor, Metrics]:
        """The states after the burn-in, their batch, and the model's loss with its metrics; two keys."""
        c, latents = self.config, self.latents(params)
        windows = latents.observe_windows(batch["observations"], batch[PREVIOUS_ACTIONS], batch[IS_FIRST], keys[0])
        windows, batch = windows.since(c.burn_in), steps_of(batch, slice(c.burn_in, None))
        return windows, batch, *OBJECTIVES[c.objective](latents, windows, batch, keys[1], params)

    def value_loss(self, name: str, critic: Params, state: TrainState, features: Tensor, returns: Tensor) -> Tensor:
        """CE(v, R) + CE(v, v') of critic `name` and its slow copy, for features [..., F]: [...]."""
        logits = self.apply(name, critic, features)
        slow = HEAD.mean(self.apply(name, state.target[name], features.detach())).detach()
        return HEAD.loss(logits, returns) + HEAD.loss(logits, slow)

    def with_old_model(self, state: TrainState, before: TrainState) -> TrainState:
        """The state with the model of `before`, where it stays as it is after some updates."""
        if not self.config.model_updates:
            return state
        learns = state.step < self.config.model_updates
        model = {n: chosen(learns, state.params[n], before.params[n]) for n in self.model}
        return state._replace(params={**state.params, **model})


def chosen(condition: Tensor, yes: Tree, no: Tree) -> Tree:
    """The one tree or the other, by a condition []."""
    return pytree.tree_map(lambda x, y: torch.where(condition, x, y), yes, no)
