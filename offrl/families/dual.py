"""Learning V by regression of an extreme value or a dual of a divergence: what XQL, f-DVL and ReCOIL share beyond IQL."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from offrl import losses, rng
from offrl.algorithm import Metrics, TrainState
from offrl.data.samplers.transitions import Batch
from offrl.families.critics import Target
from offrl.families.in_sample import InSampleQ, InSampleSettings
from offrl.nn import MLP, Bootstrap
from offrl.optim import OptState, Params, global_norm
from offrl.settings.field import setting


@dataclass
class DualSettings(InSampleSettings):
    """Settings of in-sample algorithms whose loss of V is steep; the defaults are XQL's "consistent" ones for D4RL's locomotion tasks."""

    gumbel_temperature: float = setting(
        2.0, "XQL's beta: V is beta log E[exp(Q / beta)], nearer to the largest Q of the data the smaller it is", low=1e-3
    )
    gumbel_clip: float = setting(7.0, "largest (Q - V) / gumbel_temperature in the exponent", low=0.0)
    value_layer_norm: bool = setting(True, "LayerNorm in each hidden layer of V, whatever the critics have")
    value_updates: int = setting(1, "updates of V in each update", low=1)
    random_actions: int = setting(0, "so many uniformly random actions for each state are added to V's batch", low=0)
    action_noise: float = setting(
        0.0, "standard deviation of noise (cut at 0.5) on the data's continuous actions in V's batch; 0: none", low=0.0, structural=True
    )
    huber_delta: float = setting(
        20.0, "scalar value head: the critics' squared errors grow linearly beyond this; 0: never", low=0.0, structural=True
    )


class DualQ(InSampleQ):
    """V's loss is a function of u = Q - V, with V the head's mean. A subclass gives it (`value_error`)."""

    def make_value(self, *, layer_norm: bool = False, norm_first: bool = True) -> MLP:
        """LayerNorm before the activation, as in the authors' code."""
        return super().make_value(layer_norm=layer_norm or self.config.value_layer_norm, norm_first=norm_first)

    @abstractmethod
    def value_error(self, difference: Tensor) -> Tensor:
        """The loss of V for each row, [B], of Q - V [B]."""

    def value_objective(self, logits: Tensor, q: Tensor, bootstrap: Bootstrap | None) -> Tensor:
        return self.value_error(q - self.head.mean(logits))

    def q_objective(self, logits: Tensor, target: Target) -> Tensor:
        if self.config.value_head != "scalar":
            return super().q_objective(logits, target)
        error = self.head.mean(logits) - target.value
        return losses.huber(error, self.config.huber_delta) if self.config.huber_delta else 0.5 * error.square()

    def value_loss(
        self, value: Params, state: TrainState, batch: Batch, q: Tensor, q_logits: Tensor | None = None
    ) -> tuple[Tensor, Metrics]:
        logits = self.apply("value", value, batch["observations"])
        v = self.head.mean(logits)
        rows = self.value_objective(logits, q, None)
        loss, gap = rows.mean(), (q - v).detach()
        # what a spike would show in: one row's part of the loss, and how far V is from Q
        return loss, {"value/loss": loss, "value/v": v.mean(), "value/largest": rows.amax(), "value/gap": gap.abs().amax()}

    def value_batch(self, voters: Params, batch: Batch, q: Tensor, key: Tensor) -> tuple[Batch, Tensor]:
        """Observations and Q for V's loss: at the data's actions, perhaps with noise, and then at random ones."""
        c, observations, actions = self.config, batch["observations"], batch["actions"]
        keys = rng.split(key)
        if c.action_noise and not self.spec.discrete:
            noise = (c.action_noise * rng.normal(keys[0], tuple(actions.shape))).clamp(-0.5, 0.5)
            actions = (actions + noise).clamp(-1.0, 1.0)
            q, _ = self.smallest(self.q(voters, observations, actions))
        if c.random_actions:
            observations = observations.repeat(c.random_actions, *[1] * (observations.ndim - 1))
            shape = (observations.shape[0], *actions.shape[1:])
            if self.spec.discrete:
                actions = rng.randint(keys[1], shape, self.spec.num_actions)
            else:
                actions = rng.uniform(keys[1], shape, -1.0, 1.0)
            random, _ = self.smallest(self.q(voters, observations, actions))
            q = torch.cat([q, random])
            observations = torch.cat([batch["observations"], observations])
        return {**batch, "observations": observations}, q

    def train_value(self, state: TrainState, batch: Batch, q: Tensor, q_logits: Tensor | None, key: Tensor) -> tuple[TrainState, Metrics]:
        metrics: Metrics = {}
        voters = self.voters(state, key)  # those that gave q
        for i in range(self.config.value_updates):
            inputs, values = self.value_batch(voters, batch, q, rng.fold_in(key, 200 + i))
            before = state.opt["value"]
            state, metrics = self.descend(state, "value", self.value_loss, inputs, values)
            metrics["value/gradient"] = self.gradient_norm(before, state.opt["value"])
        return state, metrics

    def gradient_norm(self, before: OptState, after: OptState) -> Tensor:
        """Norm of the gradient that Adam was given between two of V's states: its first moment keeps it."""
        old, new = cast(Params, before["mu"]), cast(Params, after["mu"])
        beta = self.optimizer("value").beta1
        return global_norm({k: (new[k] - beta * old[k]) / (1.0 - beta) for k in new})
