"""Behaviour cloning by flow matching (Lipman et al., 2022, arXiv 2210.02747), of single actions or of chunks, which
keeps apart what the data do in one state at different times. As the cloned half of FQL (arXiv 2502.02538) and of
Q-chunking (arXiv 2507.07969)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Algorithm, Batch, Loss, Params, TrainState, Traits, Tree, Update
from offrl.data.samplers.chunks import VALID, ChunkSampler, valid_mean
from offrl.families.generative.chunks import ChunkActor, action_steps_field, length_field
from offrl.families.generative.settings import FieldSettings, greedy_field, make_field
from offrl.nn import flow
from offrl.nn.diffusion import update_average
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class FlowBCConfig(FieldSettings):
    """Settings of flow behaviour cloning; the defaults are those of FQL's flow."""

    name: str = "flow_bc"
    learning_rate: float = setting(3e-4, "Adam's learning rate", low=0.0)
    batch_size: int = setting(256, "windows in a batch", low=1)
    length: int = length_field(1)
    action_steps: int = action_steps_field()
    average: float = setting(
        0.0,
        "rate at which an averaged network, which then acts, follows the trained one; 0: none",
        low=0.0,
        high=1.0,
        structural=True,
    )
    greedy: str = greedy_field()


class FlowActor(ChunkActor):
    """The flow, from noise that is drawn for each chunk unless `greedy` is zero."""

    algorithm: FlowBC

    def chunk(self, observations: Tensor, key: Tensor, explore: bool) -> Tensor:
        algorithm, c = self.algorithm, self.algorithm.config
        z = rng.normal(key, (observations.shape[0], algorithm.width))
        if not explore and c.greedy == "zero":
            z = torch.zeros_like(z)
        params = self.state.extra["average"] if c.average else self.state.params["actor"]
        chunk = flow.integrate(lambda x, t: algorithm.apply("actor", params, observations, x, t), z, c.flow_steps)
        return chunk.unflatten(1, (c.length, -1))


@register("algo", "flow_bc")
class FlowBC(Algorithm[FlowBCConfig]):
    """Learn the velocity from noise to the data's chunks of actions; act by integrating it."""

    traits = Traits(actions=("continuous",), observations="encoded")
    actor_class = FlowActor

    @property
    def width(self) -> int:
        """D: numbers in a chunk."""
        return int(self.config.length) * self.spec.action_dim

    def modules(self) -> dict[str, nn.Module]:
        return {"actor": make_field(self.config, self.spec, self.width)}

    def sampler(self) -> ChunkSampler:
        return ChunkSampler(self.config.length)

    def extra(self, params: dict[str, Params]) -> Tree:
        return (
            {"average": {name: value.clone() for name, value in params["actor"].items()}} if self.config.average else {}
        )

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |v(s, x_t, t) - (a - z)|^2 / D over the steps that there are, x_t = (1 - t) z + t a, a a chunk of D
        numbers.
        """
        observations = batch["observations"]
        error = flow.matching(
            lambda x, t: self.apply("actor", actor, observations, x, t), batch["actions"].flatten(1), key
        )
        loss = valid_mean(error.unflatten(1, (self.config.length, -1)), batch[VALID])
        return loss, {"actor/loss": loss}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        state, metrics = self.descend(state, "actor", self.actor_loss, batch, key)
        if not self.config.average:
            return state, metrics
        average = update_average(state.extra["average"], state.params["actor"], state.step, self.config.average)
        return state.with_extra(average=average), metrics
