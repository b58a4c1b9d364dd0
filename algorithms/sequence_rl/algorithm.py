"""Sequence RL from data: the sequence actor of "Overcoming Slow Decision Frequencies in Continuous Control: Model-Based
Sequence Reinforcement Learning for Model-Free Control" (Patel and Siegelmann, 2024, arXiv 2410.08979), beside TD3+BC
(arXiv 2106.06860)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.actor import Actor, NoisyActor
from offrl.algorithm import Loss, TrainState, Update
from offrl.algorithms.sequence_rl.actor import RolledOutActor, SequenceNet
from offrl.algorithms.sequence_rl.sampler import (
    PREVIOUS,
    WINDOW_ACTIONS,
    WINDOW_OBSERVATIONS,
    WINDOW_VALID,
    RecallSampler,
    RecallSource,
)
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch
from offrl.errors import UserError
from offrl.families.td3 import TD3, TD3Settings, first_q, imitating_loss
from offrl.optim import Adam, Params
from offrl.pretrained import Requirement
from offrl.registry import register
from offrl.settings.field import setting
from offrl.world_models.model import Prediction, required
from offrl.world_models.uncertainty import disagreement

if TYPE_CHECKING:
    from offrl.settings.train import TrainConfig

Choose = Callable[[int, Tensor], Tensor]  # (step, observations [B, O]) -> actions [B, A]
SLOWEST = 0.01  # of the sequence actor's learning rate, at last


@dataclass
class SequenceRLConfig(TD3Settings):
    """Settings of sequence RL; those of critics and policy are TD3+BC's."""

    name: str = "sequence_rl"
    alpha: float = setting(
        2.5, "weight of the normalised value against imitation, of both actors; larger is greedier", low=0.0
    )
    length: int = setting(
        8, "actions that the sequence actor is trained to unroll from one observation (J)", low=1, high=64
    )
    execute: int | None = setting(
        None,
        "steps between decisions when acting (D), more than length too; null: length; 0: TD3+BC's policy acts",
        low=0,
        acting=True,
    )
    recall: str = setting(
        "data",
        "where the critic judges the sequence: data: in the states that the data went on to; model: in those of a "
        "world model, as "
        "published; distil: it does not, and TD3+BC's policy in the model is imitated",
        choices=("data", "model", "distil"),
    )
    recurrent_width: int = setting(128, "width of the sequence actor's GRU", low=1)
    sequence_learning_rate: float = setting(
        1e-3, "the sequence actor's learning rate, which falls linearly to a hundredth", low=0.0
    )
    sequence_decay_steps: int | None = setting(None, "updates until it has fallen; null: those of the run", low=1)
    cutoff: float | None = setting(
        None,
        "recall=model, distil: states count until elites of the model disagree by more than this; null: however much",
        low=0.0,
    )
    world_model: str = setting(
        "",
        "recall=model, distil: a run of algo=dynamics, or a file in its models/; empty: one is trained first",
        place=True,
    )
    world_model_id: str = setting("", "which model that is", filled=True)
    members: int = setting(7, "models in the ensemble that is trained where world_model= names none", low=1, place=True)


@register("algo", "sequence_rl")
class SequenceRL(TD3):
    """TD3+BC as it is, and a recurrent actor sigma that unrolls J actions from one state, each of which TD3+BC's first
    critic judges in the state that it is done in. Nothing bootstraps from sigma. Afterwards it acts D steps at a time,
    without model and critic."""

    Config = SequenceRLConfig
    traits = dataclasses.replace(TD3.traits, policy_modules=("sequence", "actor"))

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        c = config.algo
        if c.recall != "data":
            return {"world_model": required({"members": c.members})}
        if c.world_model:
            raise UserError(
                "algo.world_model= changes nothing with algo.recall=data, which asks no model: leave it out, or "
                "recall=model"
            )
        return {}

    @classmethod
    def adopt(cls, config: TrainConfig, dataset: Dataset, pretrained: Mapping[str, Any]) -> TrainConfig:
        """The learning rate falls over the whole run, where nothing else is given."""
        algo = dataclasses.replace(config.algo, sequence_decay_steps=config.algo.sequence_decay_steps or config.steps)
        return dataclasses.replace(config, algo=algo)

    def modules(self) -> dict[str, nn.Module]:
        s = self.spec
        return {
            **super().modules(),
            "sequence": SequenceNet(s.observation_dim, s.action_dim, self.config.recurrent_width),
        }

    def optimizer(self, name: str) -> Adam:
        if name != "sequence":
            return super().optimizer(name)
        c = self.config
        decay = max(1, (c.sequence_decay_steps or 1_000_000) // self.traits.period)
        return Adam(c.sequence_learning_rate, schedule="linear", decay_steps=decay, floor=SLOWEST)

    def sampler(self) -> RecallSampler:
        c, recall = self.config, self.config.recall
        return RecallSampler(c.length, c.n_step, recall == "data", None if recall == "data" else self.pretrained)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch) -> Loss:
        """E [(pi(s) - a)^2 - lambda Q_1(s, pi(s))] with lambda = alpha / E |Q_1(s, pi(s))| (TD3+BC)."""
        return imitating_loss(self, actor, state, batch)

    def recalled(self, observations: Tensor, choose: Choose, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(states [B, J, O], actions [B, J, A], weights [B, J]) of J steps in the model, by the mean of one elite for
        each row; constants.

        A state has weight 1 until the model ends the episode before it, or its elites disagree on the way there by more
        than `cutoff`."""
        c, source = self.config, self.runtime.source
        assert isinstance(source, RecallSource)
        model, tree = source.model, source.tree
        member_key, end_key = rng.split(key)
        rows, count = observations.shape[0], tree["elites"].shape[0]
        member, at = rng.randint(member_key, (rows,), count), observations
        steps, weight = [], observations.new_ones(rows)
        for i in range(c.length):
            action = choose(i, at).detach()
            steps.append((at, action, weight))
            if i + 1 == c.length:
                break
            every = model.predict(tree, at, action, model.first_past(at))
            elites = Prediction(*(x if x is None else x[tree["elites"]] for x in every))  # type: ignore[arg-type]
            one = model.choose(elites, member)
            outcome = model.settle(tree, one, at, action, one.mean[0], one.reward[0], rng.fold_in(end_key, i))
            follows = ~outcome.terminations
            if c.cutoff is not None:
                follows = follows & (disagreement(model, tree, elites, at, action) <= c.cutoff)
            weight, at = weight * follows, outcome.next_observations.detach()
        states, actions, weights = (torch.stack(column, 1) for column in zip(*steps, strict=True))
        return states, actions, weights

    def sequence_loss(self, sequence: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """mean_m (sigma_i - a_{t+i})^2 - lambda mean_m Q_1(s_{t+i}, sigma_i), lambda = alpha / mean_m |Q_1|, means over
        the steps m that count; sigma_i follows s_t and the data's actions (recall=model: its own, and s_{t+i} is the
        model's)."""
        c, observations, before = self.config, batch["observations"], batch[PREVIOUS].unsqueeze(-2)
        if c.recall == "distil":
            states, teacher, weights = self.recalled(
                observations, lambda i, at: self.apply("actor", state.params["actor"], at)[0], key
            )
            actions = self.apply("sequence", sequence, observations, torch.cat([before, teacher[:, :-1]], 1), c.length)
            loss = weighted_mean((actions - teacher).square().mean(-1), weights)
            return loss, {"sequence/loss": loss, "sequence/steps": weights.sum(-1).mean()}
        data, weights = batch[WINDOW_ACTIONS], batch[WINDOW_VALID]
        actions = self.apply("sequence", sequence, observations, torch.cat([before, data[:, :-1]], 1), c.length)
        imitation = weighted_mean((actions - data).square().mean(-1), weights)
        if c.recall == "model":
            actions = self.apply("sequence", sequence, observations, before, c.length)
            states, _, weights = self.recalled(observations, lambda i, at: actions[:, i], key)
        else:
            states = batch[WINDOW_OBSERVATIONS]
        q = first_q(self, state, states.flatten(0, 1), actions.flatten(0, 1)).unflatten(0, weights.shape)
        value = weighted_mean(q, weights)
        loss = imitation - c.alpha / weighted_mean(q.detach().abs(), weights) * value
        metrics = {
            "sequence/loss": loss,
            "sequence/bc": imitation,
            "sequence/q": value,
            "sequence/steps": weights.sum(-1).mean(),
        }
        return loss, metrics

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        state, critic = self.descend(state, "critic", self.critic_loss, batch, key)
        state = self.critic.regularised(state)
        if phase == 0:
            return state, critic
        state, actor = self.descend(state, "actor", self.actor_loss, batch)
        state, sequence = self.descend(state, "sequence", self.sequence_loss, batch, rng.fold_in(key, 401))
        return self.move_targets(state), {**critic, **actor, **sequence}

    def actor(self, state: TrainState) -> Actor:
        return NoisyActor(self, state) if self.config.execute == 0 else RolledOutActor(self, state)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """[]: sum(m x) / sum(m) of values and weights [B, J]."""
    return (weights * values).sum() / weights.sum()
