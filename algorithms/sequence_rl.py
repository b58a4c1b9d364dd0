"""Sequence RL from data: the sequence actor of "Overcoming Slow Decision Frequencies in Continuous Control: Model-Based
Sequence Reinforcement Learning for Model-Free Control" (Patel and Siegelmann, 2024, arXiv 2410.08979), beside TD3+BC
(arXiv 2106.06860)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl import rng
from offrl.actor import Actor, Carry, NoisyActor
from offrl.algorithm import Adam, Dataset, Loss, Params, Requirement, TrainConfig, TrainState, Update
from offrl.data.samplers.transitions import Batch, Transitions, TransitionSampler, places_ahead, windows
from offrl.errors import UserError
from offrl.families.generative.chunks import traced
from offrl.families.td3 import TD3, TD3Settings
from offrl.nn import Linear
from offrl.nn.recurrent import GRU
from offrl.registry import register
from offrl.settings.field import setting
from offrl.world_models.model import required
from offrl.world_models.uncertainty import disagreement

# [B, J, ...]
WINDOW_OBSERVATIONS, WINDOW_ACTIONS, WINDOW_VALID = ("window_observations", "window_actions", "window_valid")
PREVIOUS = "previous_actions"  # the action of the step before, 0 at an episode's start [B, A]


@dataclass(frozen=True)
class RecallSource:
    """The data's transitions, and the model where one recalls states: all replicas share it."""

    transitions: Transitions
    model: Any = None
    tree: Any = None  # the model's tensors


@dataclass(frozen=True)
class RecallSampler:
    """What `TransitionSampler` draws, with the same keys the same rows, and of each the window of `length` steps that
    begins with it.

    An episode's end cuts a window: the rest repeats its last step and is not valid. What is last in an episode that was
    cut off, and so is no transition, is in no window.

    pretrained: the world model, where one is needed. states: windows with the observations of every step.
    """

    length: int
    n_step: int = 1
    states: bool = True
    pretrained: Mapping[str, Any] | None = None

    def prepare(self, dataset: Dataset) -> RecallSource:
        """Raises UserError where no window has two steps, for a length beyond all episodes, and for a model that looks
        back.
        """
        source = TransitionSampler(n_step=self.n_step, ordered=True).prepare(dataset)
        assert source.last is not None
        longest = int((source.last - torch.arange(source.count, device=source.last.device)).max()) + 1
        if self.length > 1 and longest == 1:
            raise UserError(
                f"{dataset.spec.name}: no window of 2 steps to learn a sequence from: each episode of the data has one "
                "transition, and their order is not known; say where episodes end (dataset.fields.truncations or "
                "episode_ends), or take algo=td3_bc"
            )
        if self.length > longest:
            raise UserError(
                f"{dataset.spec.name}: algo.length={self.length}: no window of so many steps is in the data, whose "
                f"longest episode has {longest} transitions; take a smaller length (algo.action_steps may be larger)"
            )
        if not self.pretrained:
            return RecallSource(source)
        trained = self.pretrained["world_model"].to(source.last.device)
        if trained.model.history > 1:
            raise UserError(
                "algo=sequence_rl asks the model in each update and keeps no past: train one with algo.history=1 "
                f"(this one has {trained.model.history})"
            )
        return RecallSource(source, trained.model, trained.tree)

    def __call__(self, source: RecallSource, key: Tensor, batch_size: int) -> Batch:
        rows = source.transitions
        assert rows.last is not None
        pick = TransitionSampler.draw(rows, key, batch_size)
        window_rows, valid = places_ahead(rows, pick, self.length)
        before = (pick - 1).clamp(min=0)
        continues = (pick > 0) & (rows.last[before] == rows.last[pick])
        batch = windows(rows, pick, self.n_step) if self.n_step > 1 else rows.take(pick)
        batch |= {WINDOW_ACTIONS: rows.table.column("actions", window_rows), WINDOW_VALID: valid.float()}
        batch[PREVIOUS] = torch.where(continues.unsqueeze(-1), rows.table.column("actions", before), 0.0)
        return batch | ({WINDOW_OBSERVATIONS: rows.table.column("observations", window_rows)} if self.states else {})


NOISE = 0.1  # standard deviation of exploration, as TD3's


class SequenceNet(nn.Module):
    """h = W2 relu(W1 s), and then for each action h <- GRU(h, the action before), a = tanh(W3 h): any number of
    actions.
    """

    def __init__(self, observation_dim: int, action_dim: int, width: int) -> None:
        super().__init__()
        self.first, self.second = Linear(observation_dim, width, "xavier"), Linear(width, width, "xavier")
        self.gru, self.head = GRU(action_dim, width), Linear(width, action_dim, "xavier")

    def forward(self, observations: Tensor, before: Tensor, steps: int, noise: Tensor | None = None) -> Tensor:
        """Actions [B, steps, A] from observations [B, O] and what came before the first K of them, [B, K, A]; before
        the others comes the network's own last action. noise [B, steps, A] is added to each action, which is then
        clipped."""
        h = self.second(F.relu(self.first(observations)))
        actions: list[Tensor] = []
        for i in range(steps):
            h = self.gru.step(h, before[..., i, :] if i < before.shape[-2] else actions[-1])
            action = self.head(h).tanh()
            actions.append(action if noise is None else (action + noise[..., i, :]).clamp(-1.0, 1.0))
        return torch.stack(actions, -2)


class OpenLoop(NamedTuple):
    """The memory of E episodes."""

    actions: Tensor  # [E, D, A]: those to come, the next one first
    remaining: Tensor  # [E] int64: how many of them are still played
    previous: Tensor  # [E, A]: the one that was played last; 0 at the start


class RolledOutActor(Actor):
    """Policy that plays D actions from one observation, whatever happens meanwhile."""

    algorithm: SequenceRL
    resettable = remembers_actions = True

    @property
    def action_steps(self) -> int:
        """D: actions from one observation."""
        c = self.algorithm.config
        return int(c.length if c.action_steps is None else c.action_steps)

    def actions_per_decision(self, steps: int) -> int:
        return steps

    def start(self, episodes: int) -> Carry:
        device = self.state.step.device
        actions = torch.zeros(episodes, self.action_steps, self.algorithm.spec.action_dim, device=device)
        return OpenLoop(actions, torch.zeros(episodes, dtype=torch.int64, device=device), actions[:, 0])

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        queue, remaining, previous = carry
        fresh = remaining == 0
        if traced(fresh) or bool(fresh.any()):
            noise = NOISE * rng.normal(key, tuple(queue.shape)) if explore else None
            actions = self.apply("sequence", observations, previous.unsqueeze(-2), self.action_steps, noise)
            queue = torch.where(fresh.reshape(-1, 1, 1), actions, queue)
            remaining = torch.where(fresh, self.action_steps, remaining)
        return queue[:, 0], OpenLoop(torch.cat([queue[:, 1:], queue[:, -1:]], 1), remaining - 1, queue[:, 0])


Choose = Callable[[int, Tensor], Tensor]  # (step, observations [B, O]) -> actions [B, A]
LR_FLOOR = 0.01  # of the sequence actor's learning rate, at last


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
    action_steps: int | None = setting(
        None,
        "steps between decisions when acting (D), more than length too; null: length; 0: TD3+BC's policy acts",
        low=0,
        acting=True,
    )
    state_source: str = setting(
        "data",
        "where the critic judges the sequence: data: in the states that the data went on to; model: in those of a "
        "world model, as published; distil: it does not, and TD3+BC's policy in the model is imitated",
        choices=("data", "model", "distil"),
    )
    recurrent_width: int = setting(128, "width of the sequence actor's GRU", low=1)
    sequence_learning_rate: float = setting(
        1e-3, "the sequence actor's learning rate, which falls linearly to a hundredth", low=0.0
    )
    sequence_decay_steps: int | None = setting(None, "updates until it has fallen; null: those of the run", low=1)
    cutoff: float | None = setting(
        None,
        "state_source=model, distil: states count until elites of the model disagree by more than this; null: however "
        "much",
        low=0.0,
    )
    world_model: str = setting(
        "",
        "state_source=model, distil: a run of algo=dynamics, or a file in its models/; empty: one is trained first",
        place=True,
    )
    world_model_id: str = setting("", "which model that is", filled=True)
    members: int = setting(7, "models in the ensemble that is trained where world_model= names none", low=1, place=True)


@register("algo", "sequence_rl")
class SequenceRL(TD3[SequenceRLConfig]):
    """TD3+BC as it is, and a recurrent actor sigma that unrolls J actions from one state, each of which TD3+BC's first
    critic judges in the state that it is done in. Nothing bootstraps from sigma. Afterwards it acts D steps at a time,
    without model and critic."""

    traits = dataclasses.replace(TD3.traits, policy_modules=("sequence", "actor"), observations="vector")

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        c = config.algo
        if c.state_source != "data":
            return {"world_model": required({"members": c.members})}
        if c.world_model:
            raise UserError(
                "algo.world_model= changes nothing with algo.state_source=data, which asks no model: leave it out, or "
                "state_source=model"
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
        return Adam(c.sequence_learning_rate, schedule="linear", decay_steps=decay, floor=LR_FLOOR)

    def sampler(self) -> RecallSampler:
        c, from_data = self.config, self.config.state_source == "data"
        return RecallSampler(c.length, c.n_step, from_data, None if from_data else self.pretrained)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch) -> Loss:
        """E [(pi(s) - a)^2 - lambda Q_1(s, pi(s))] with lambda = alpha / E |Q_1(s, pi(s))| (TD3+BC)."""
        (action,) = self.apply("actor", actor, batch["observations"])
        q = self.first_q(state, batch["observations"], action)
        scale = self.config.alpha / q.detach().abs().mean()
        imitation = (action - batch["actions"]).square().mean()
        loss = imitation - scale * q.mean()
        return loss, {"actor/loss": loss, "actor/bc": imitation, "actor/q": q.mean()}

    def rollout_states(self, observations: Tensor, choose: Choose, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
            all_members = model.predict(tree, at, action, model.first_past(at))
            elites = all_members.each(lambda x: x[tree["elites"]])
            one = model.choose(elites, member)
            outcome = model.to_outcome(tree, one, at, action, one.mean[0], one.reward[0], rng.fold_in(end_key, i))
            alive = ~outcome.terminations
            if c.cutoff is not None:
                alive = alive & (disagreement(model, tree, elites, at, action) <= c.cutoff)
            weight, at = weight * alive, outcome.next_observations.detach()
        states, actions, weights = (torch.stack(column, 1) for column in zip(*steps, strict=True))
        return states, actions, weights

    def sequence_loss(self, sequence: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """mean_m (sigma_i - a_{t+i})^2 - lambda mean_m Q_1(s_{t+i}, sigma_i), lambda = alpha / mean_m |Q_1|, means over
        the steps m that count; sigma_i follows s_t and the data's actions (state_source=model: its own, and s_{t+i} is
        the model's)."""
        c, observations, before = self.config, batch["observations"], batch[PREVIOUS].unsqueeze(-2)
        if c.state_source == "distil":
            states, teacher, weights = self.rollout_states(
                observations, lambda i, at: self.apply("actor", state.params["actor"], at)[0], key
            )
            actions = self.apply("sequence", sequence, observations, torch.cat([before, teacher[:, :-1]], 1), c.length)
            loss = weighted_mean((actions - teacher).square().mean(-1), weights)
            return loss, {"sequence/loss": loss, "sequence/steps": weights.sum(-1).mean()}
        data, weights = batch[WINDOW_ACTIONS], batch[WINDOW_VALID]
        actions = self.apply("sequence", sequence, observations, torch.cat([before, data[:, :-1]], 1), c.length)
        imitation = weighted_mean((actions - data).square().mean(-1), weights)
        if c.state_source == "model":
            actions = self.apply("sequence", sequence, observations, before, c.length)
            states, _, weights = self.rollout_states(observations, lambda i, at: actions[:, i], key)
        else:
            states = batch[WINDOW_OBSERVATIONS]
        q = self.first_q(state, states.flatten(0, 1), actions.flatten(0, 1)).unflatten(0, weights.shape)
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
        return NoisyActor(self, state) if self.config.action_steps == 0 else RolledOutActor(self, state)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """[]: sum(m x) / sum(m) of values and weights [B, J]."""
    return (weights * values).sum() / weights.sum()
