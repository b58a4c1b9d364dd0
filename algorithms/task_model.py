"""A recurrent encoder of the task from the last few transitions, and a world model given its encoding z.

The first stage of Meta-DT (Wang et al., 2024, arXiv 2410.11448).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl.algorithm import Adam, Algorithm, Batch, Dataset, Loss, Params, Sampler, TrainState, Traits, Update
from offrl.data.samplers.histories import HistorySampler
from offrl.nn import Linear
from offrl.nn.recurrent import GRU
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class TaskModelConfig:
    """Settings of the task model; the defaults are the authors'."""

    name: str = "task_model"
    learning_rate: float = setting(1e-3, "Adam's learning rate", low=0.0)
    clip_norm: float = setting(1.0, "largest norm of the gradient; 0: no clipping", low=0.0, structural=True)
    batch_size: int = setting(128, "transitions in a batch", low=1)
    history: int = setting(
        4, "transitions before it that tell the task (h); before the start of an episode they are zeros", low=1
    )
    embedding: int = setting(16, "numbers that stand for the task, and for each part of a transition", low=1)
    recurrent_width: int = setting(128, "width of the encoder's GRU and of the two hidden layers of the model", low=1)
    predicts: str = setting(
        "reward",
        "what differs between tasks: the reward, from (s, a, s'); the next observation, from (s, a); or both",
        choices=("reward", "observation", "both"),
    )


class TaskNet(nn.Module):
    """Encoder and decoders in one."""

    def __init__(self, observation_dim: int, action_dim: int, config: TaskModelConfig) -> None:
        super().__init__()
        c, e, w = config, config.embedding, config.recurrent_width
        self.parts = nn.ModuleList(Linear(size, e) for size in (observation_dim, action_dim, 1))
        self.gru, self.out = GRU(3 * e, w), Linear(w, e)
        self.observation, self.action = Linear(observation_dim, e), Linear(action_dim, e)
        self.reward = layers(4 * e, w, 1) if c.predicts != "observation" else None
        self.following = layers(3 * e, w, observation_dim) if c.predicts != "reward" else None

    def forward(
        self, history: tuple[Tensor, Tensor, Tensor], row: tuple[Tensor, Tensor, Tensor] | None
    ) -> tuple[Tensor, ...]:
        """history: observations [B, h, O], actions [B, h, A] and rewards [B, h]; row: observations, actions and next
        observations [B, ...] -> z [B, e], and with a row the predicted reward [B, 1], next observation [B, O] or
        both."""
        observations, actions, rewards = history
        inputs = (observations, actions, rewards.unsqueeze(-1))
        z = self.out(self.gru(torch.cat([part(x).relu() for part, x in zip(self.parts, inputs, strict=True)], -1)))
        if row is None:
            return (z,)
        s, a, next_s = self.observation(row[0]).relu(), self.action(row[1]).relu(), self.observation(row[2]).relu()
        outputs = [z]
        if self.reward is not None:
            outputs.append(through(self.reward, torch.cat([s, a, next_s, z], -1)))
        if self.following is not None:
            outputs.append(through(self.following, torch.cat([s, a, z], -1)))
        return tuple(outputs)


def layers(size: int, width: int, out: int) -> nn.ModuleList:
    return nn.ModuleList([Linear(size, width), Linear(width, width), Linear(width, out)])


def through(net: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in net[:-1]:
        x = F.relu(layer(x))
    return net[-1](x)


@register("algo", "task_model")
class TaskModel(Algorithm[TaskModelConfig]):
    """A model of the reward (or the next observation) given the transition and z, the task encoded from the transitions
    before it. It has no policy; `algo=meta_dt` takes it, and trains one where none is named."""

    traits = Traits(policy_modules=())

    def modules(self) -> dict[str, nn.Module]:
        return {"model": TaskNet(self.spec.observation_dim, self.spec.encoded_action_dim, self.config)}

    def sampler(self) -> Sampler:
        return HistorySampler(self.config.history)

    def optimizer(self, name: str) -> Adam:
        return Adam(self.config.learning_rate, clip_norm=self.config.clip_norm)

    def errors(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """z [B, e] of each row, and the mean squared and summed absolute errors of the prediction [B]. batch: as
        `HistorySampler` makes it, but actions as a network takes them."""
        history = (batch["past_observations"], batch["past_actions"], batch["past_rewards"])
        z, *predicted = self.apply(
            "model", params, history, (batch["observations"], batch["actions"], batch["next_observations"])
        )
        truth = {"reward": [batch["rewards"].unsqueeze(-1)], "observation": [batch["next_observations"]]}
        targets = (
            truth["reward"] + truth["observation"] if self.config.predicts == "both" else truth[self.config.predicts]
        )
        errors = [p - x for p, x in zip(predicted, targets, strict=True)]
        return z, sum(e.square().mean(-1) for e in errors), sum(e.abs().sum(-1) for e in errors)

    def task(self, params: Params, observations: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
        """z [B, e] of the last transitions: observations [B, h, O], actions as a network takes them, rewards [B, h]."""
        return self.apply("model", params, (observations, actions, rewards), None)[0]

    def encoded(self, batch: Batch) -> Batch:
        """A batch whose actions are as a network takes them; those before the start of the episode are zeros in any
        case.
        """
        past = self.spec.encode(batch["past_actions"]) * batch["past_valid"].unsqueeze(-1)
        return {**batch, "actions": self.spec.encode(batch["actions"]), "past_actions": past}

    def model_loss(self, model: Params, state: TrainState, batch: Batch) -> Loss:
        """E (r - R(s, a, s', z))^2, E |s' - P(s, a, z)|^2, or their sum, z the encoding of the h transitions before."""
        _, squared, _ = self.errors(model, self.encoded(batch))
        loss = squared.mean()
        return loss, {"model/loss": loss}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return self.descend(state, "model", self.model_loss, batch)

    @torch.no_grad()
    def of_dataset(self, params: Params, dataset: Dataset, rows: int = 16_384) -> tuple[Tensor, Tensor]:
        """(z [R, e], summed absolute error [R]) of every row of the data, on their device."""
        sampler, parts = HistorySampler(self.config.history), []
        source = sampler.all_rows(dataset)
        weights: dict[str, Any] = {name: value.to(dataset.device) for name, value in params.items()}
        for block in torch.arange(len(dataset), device=dataset.device).split(rows):
            z, _, error = self.errors(weights, self.encoded(sampler.take(source, block)))
            parts.append((z, error))
        return torch.cat([z for z, _ in parts]), torch.cat([error for _, error in parts])
