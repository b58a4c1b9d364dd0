"""Transformers over the steps of an episode, which the Decision Transformer and its descendants share.

Shapes in comments: B batch, K steps of context, D width, E episodes side by side.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offrl.algorithm import (
    Actor,
    Adam,
    Algorithm,
    Batch,
    Carry,
    Dataset,
    Grid,
    Loss,
    Params,
    Sampler,
    TrainState,
    Update,
)
from offrl.data.samplers.sequences import RETURNS, STEPS, SequenceSampler, drawn_episodes
from offrl.families.return_conditioned import TargetReturnSettings, fit_target_return, recorded
from offrl.nn import Transformer, make_policy
from offrl.nn.policies import Policy
from offrl.nn.transformer import Affine, Norm, Table, drop, interleave, visible
from offrl.settings.field import setting

OUTER = 1_000  # folded into the key of the dropout of embeddings; the transformer's layers have 0, 1, ...


@dataclass
class SequenceSettings:
    """Settings of transformers over steps; the defaults are DT's authors' for D4RL's locomotion tasks."""

    learning_rate: float = setting(1e-4, "AdamW's learning rate", low=0.0)
    weight_decay: float = setting(1e-4, "AdamW's decay of all parameters", low=0.0, structural=True)
    warmup_steps: int = setting(10_000, "updates until the learning rate is reached", low=0)
    clip_norm: float = setting(0.25, "largest norm of the gradient; 0: no clipping", low=0.0, structural=True)
    batch_size: int = setting(64, "windows in a batch", low=1)
    context: int = setting(20, "steps that the policy looks back, this one included (K)", low=1)
    width: int = setting(128, "width of the transformer", low=1)
    layers: int = setting(3, "its blocks", low=1)
    heads: int = setting(1, "its attention heads", low=1)
    dropout: float = setting(
        0.1, "dropout rate of embeddings, attention and blocks", low=0.0, high=0.99, structural=True
    )
    activation: str = setting("relu", "of the blocks", choices=("relu", "gelu", "silu", "tanh"))
    max_timestep: int | None = setting(
        None,
        "time steps with an embedding of their own; null: as long as the data's longest episode or the environment's "
        "limit",
        low=1,
    )
    padding: str = setting(
        "right",
        "where windows shorter than the context are filled up; no result depends on it",
        choices=("right", "left"),
    )
    policy: str = setting(
        "deterministic",
        "deterministic: squared error; gaussian: negative log-likelihood (discrete actions: always categorical)",
        choices=("deterministic", "gaussian"),
    )


ConfigT = TypeVar("ConfigT", bound=SequenceSettings)


class Steps(nn.Module):
    """Several tokens a step, each embedded linearly; those of a step share a learnt embedding of its time."""

    def __init__(
        self, sizes: Mapping[str, int], config: SequenceSettings, post_norm: bool = False, hidden: str = ""
    ) -> None:
        """sizes: dimension of each kind of token, in their order within a step. hidden: a kind to which no token
        attends, not even itself, but for the one of a window's first step."""
        super().__init__()
        c, self.kinds, self.rate, self.hidden = config, tuple(sizes), config.dropout, hidden
        self.embed = nn.ModuleDict({kind: Affine(size, c.width) for kind, size in sizes.items()})
        self.time = Table(c.max_timestep or 1, c.width)  # it is found from the data, and a grid is checked before that
        self.norm = Norm(c.width)
        self.trunk: nn.Module = Transformer(
            c.width, c.layers, c.heads, dropout=c.dropout, activation=c.activation, post_norm=post_norm
        )

    def forward(
        self,
        tokens: Mapping[str, Tensor],
        timesteps: Tensor,
        valid: Tensor | None,
        key: Tensor | None,
        output_kind: str | None = None,
    ) -> dict[str, Tensor]:
        """tokens [B, K, size] by kind, timesteps and valid [B, K] -> the transformer's outputs at them, [B, K, D] by
        kind; with `output_kind`, of that kind alone."""
        count, time = len(self.kinds), self.time(timesteps)
        x = self.norm(interleave([self.embed[kind](tokens[kind]) + time for kind in self.kinds]))
        if key is not None:
            x = drop(x, self.rate, key, OUTER)
        if self.hidden and valid is None:
            valid = torch.ones_like(timesteps, dtype=torch.bool)
        mask = None
        if valid is not None:
            rows = valid.repeat_interleave(count, -1)
            mask = visible(rows, x.shape[-2])
            if self.hidden:
                first = valid & (valid.cumsum(-1) == 1)
                keys = torch.stack(
                    [first if kind == self.hidden else torch.ones_like(first) for kind in self.kinds], -1
                ).flatten(-2)
                # padding goes on seeing itself, so that no row of weights is empty
                mask = mask & (keys.unsqueeze(-2) | ~rows.unsqueeze(-1)).unsqueeze(-3)
        return self.outputs(x, mask, key, 0, output_kind)

    def outputs(
        self, x: Tensor, mask: Tensor | None, key: Tensor | None, skip: int, output_kind: str | None
    ) -> dict[str, Tensor]:
        """The transformer's outputs at all tokens but the first `skip`, by kind, or at those of `output_kind`."""
        count = len(self.kinds)
        if output_kind is not None:
            return {output_kind: self.trunk(x, mask, key, slice(skip + self.kinds.index(output_kind), None, count))}
        x = self.trunk(x, mask, key)[..., skip:, :].unflatten(-2, (-1, count))
        return {kind: x[..., i, :] for i, kind in enumerate(self.kinds)}


class StepPolicy(nn.Module):
    """`Steps`, and the distribution of the action read from the output at one kind of token."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        config: SequenceSettings,
        spec: Any,
        output_kind: str = "observation",
        post_norm: bool = False,
        hidden: str = "",
    ) -> None:
        super().__init__()
        self.output_kind = output_kind
        self.steps = Steps(sizes, config, post_norm, hidden)
        self.head = make_policy(config.policy, config.width, spec.action_dim, spec.num_actions, [], init="gpt")

    def forward(
        self, tokens: Mapping[str, Tensor], timesteps: Tensor, valid: Tensor | None = None, key: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Parameters of the actions' distribution [B, K, ...]."""
        return self.head(self.steps(tokens, timesteps, valid, key, self.output_kind)[self.output_kind])


@dataclass(frozen=True)
class History:
    """The memory of E episodes, all at the same time step: the last K steps as columns of a batch without padding."""

    window: Batch  # [E, n, ...] observations, actions, rewards (in training units), returns_to_go, timesteps
    remaining: Tensor  # [E] of the target return, in the units of the recorded rewards; 0 where there is none
    t: int = 0


pytree.register_dataclass(History)


@dataclass(frozen=True)
class GoalHistory(History):
    """A `History` with the goals [E, G] of the episodes; None: none was set."""

    goals: Tensor | None = None


pytree.register_dataclass(GoalHistory)


class SequenceActor(Actor):
    """Policy of the last K steps. A carry is a `History`."""

    algorithm: SequenceModel
    remembers_actions = True

    def start(self, episodes: int) -> Carry:
        spec = self.algorithm.spec
        window = {
            "observations": torch.zeros(episodes, 0, spec.observation_dim),
            "actions": torch.zeros(episodes, 0, dtype=torch.int64)
            if spec.discrete
            else torch.zeros(episodes, 0, spec.action_dim),
            "rewards": torch.zeros(episodes, 0),
            RETURNS: torch.zeros(episodes, 0),
            STEPS: torch.zeros(episodes, 0, dtype=torch.int64),
        }
        return History(window, torch.zeros(episodes))

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        window = self.enter(carry, observations)
        actions = self.choose(self.action_distribution(window), key, explore)
        return actions, self.with_actions(carry, window, actions)

    def enter(self, carry: History, observations: Tensor) -> Batch:
        """The window once the episodes are at `observations` [E, O], where no action is chosen yet."""
        count = self.algorithm.config.context - 1
        past = {name: column[:, max(0, column.shape[1] - count) :] for name, column in carry.window.items()}
        return {
            name: torch.cat([past[name], x.unsqueeze(1)], 1)
            for name, x in self.current_step(carry, observations).items()
        }

    def current_step(self, carry: History, observations: Tensor) -> Batch:
        """The current step's entry in each column of the window, [E, ...]."""
        actions, episodes = carry.window["actions"], len(observations)
        return {
            "observations": observations,
            "actions": actions.new_zeros(episodes, *actions.shape[2:]),
            "rewards": torch.zeros(episodes),
            RETURNS: carry.remaining,
            STEPS: torch.full((episodes,), carry.t),
        }

    def action_distribution(self, window: Batch) -> tuple[Tensor, ...]:
        """The distribution of the action at the window's last step, [E, ...]."""
        dist = self.apply("actor", self.algorithm.tokens(window), window[STEPS])
        return tuple(x[:, -1] for x in dist)

    def with_actions(self, carry: History, window: Batch, actions: Tensor) -> History:
        """The memory once `actions` were taken at the window's last step."""
        return dataclasses.replace(carry, window=with_last(window, "actions", actions), t=carry.t + 1)


class SequenceModel(Algorithm[ConfigT]):
    """A policy over the last K steps. A subclass has its loss.

    The action of a step may depend on this step's tokens before it and on all tokens of earlier steps. Training windows
    are padded and masked; when acting, the first windows are as short as the episode.
    """

    actor_class: ClassVar[type[Actor]] = SequenceActor

    def modules(self) -> dict[str, nn.Module]:
        return {"actor": StepPolicy(self.sizes(), self.config, self.spec)}

    @classmethod
    def fit_config(cls, config: ConfigT, dataset: Dataset, grid: Grid = None) -> ConfigT:
        config = super().fit_config(config, dataset, grid)
        if config.max_timestep is None:
            length = int(dataset.episode_lengths()[drawn_episodes(dataset)].max())
            task = dataset.spec.task
            limit = (task.max_episode_steps or 0) if task is not None else 0
            config = dataclasses.replace(config, max_timestep=max(length, limit))
        return fit_target_return(config, dataset) if isinstance(config, TargetReturnSettings) else config

    def sizes(self) -> dict[str, int]:
        """The kinds of tokens in their order, and the dimension of each; by default DT's."""
        return {"return": 1, "observation": self.spec.observation_dim, "action": self.spec.encoded_action_dim}

    def tokens(self, batch: Batch) -> dict[str, Tensor]:
        """The tokens [B, K, size] by kind; by default DT's (R_1, s_1, a_1, ..., R_K, s_K, a_K), the trajectory of its
        section 3, R_t the return to go. Where the policy acts, the current step's action and reward are zeros.
        """
        assert isinstance(self.config, TargetReturnSettings)
        return {
            "return": (batch[RETURNS] / self.config.scale).unsqueeze(-1),
            "observation": batch["observations"],
            "action": self.spec.encode(batch["actions"]),
        }

    @abstractmethod
    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """The loss of the policy, the module "actor"."""

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return self.descend(state, "actor", self.actor_loss, batch, key)

    def sampler(self) -> Sampler:
        return SequenceSampler(self.config.context, left_padded=self.config.padding == "left")

    def optimizer(self, name: str) -> Adam:
        c = self.config
        return Adam(c.learning_rate, weight_decay=c.weight_decay, clip_norm=c.clip_norm, warmup_steps=c.warmup_steps)

    @property
    def policy(self) -> Policy:
        return cast(Policy, self.networks["actor"].head)


class TargetReturnActor(SequenceActor):
    """Policy given the target return, less the rewards that the episode has earned. The config has
    `TargetReturnSettings`.
    """

    def start(self, episodes: int) -> Carry:
        target = torch.full((episodes,), float(self.algorithm.config.target_return))
        return dataclasses.replace(super().start(episodes), remaining=target)

    def observe_reward(self, carry: Carry, rewards: Tensor) -> Carry:
        window = with_last(carry.window, "rewards", rewards)
        return dataclasses.replace(
            carry, window=window, remaining=carry.remaining - recorded(rewards, self.algorithm.spec)
        )


def with_last(window: Batch, name: str, values: Tensor) -> Batch:
    """A window with another last entry [E, ...] in one of its columns."""
    return {**window, name: torch.cat([window[name][:, :-1], values.unsqueeze(1)], 1)}


def masked_mean(values: Tensor, valid: Tensor) -> Tensor:
    """The mean of values [B, K] where valid; [] ."""
    return torch.where(valid, values, 0.0).sum() / valid.sum().clamp(min=1)
