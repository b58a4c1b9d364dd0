"""DPT: "Supervised Pretraining Can Learn In-Context Reinforcement Learning" (Lee et al., 2023, arXiv 2306.14892)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

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
    DataSpec,
    Grid,
    Loss,
    Params,
    Sampler,
    TrainState,
    Update,
)
from offrl.data.samplers.contexts import ContextSampler, FreshContexts
from offrl.families.sequence import masked_mean
from offrl.nn import Linear, Transformer, initialise, make_policy
from offrl.nn.policies import Policy
from offrl.nn.transformer import Affine, Cache, drop, visible
from offrl.registry import register
from offrl.settings.field import setting

OUTER = 1_000  # folded into the key of the dropout of embeddings; the transformer's layers have 0, 1, ...


class InContext(nn.Module):
    """The distribution of the best action after each of T tokens, the first of which is the query and the others are
    transitions.
    """

    def __init__(self, size: int, config: DPTConfig, spec: DataSpec) -> None:
        super().__init__()
        c, self.rate = config, config.dropout
        self.embed = Linear(size, c.width)
        self.trunk: nn.Module = Transformer(c.width, c.layers, c.heads, dropout=c.dropout, activation=c.activation)
        for part in self.trunk.modules():
            if isinstance(part, Affine):
                initialise(part.weight, part.bias, c.init)
        self.head = make_policy(c.policy, c.width, spec.action_dim, spec.num_actions, [])

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, key: Tensor | None = None, past: Cache | None = None
    ) -> Any:
        """tokens [B, T, size] -> parameters of the distributions [B, T, ...]; with `past`, those of the new tokens and
        the longer cache.
        """
        x = self.embed(tokens)
        if past is not None:
            x, cache = cast(Transformer, self.trunk).extend(x, past, mask)
            return self.head(x), cache
        if key is not None:
            x = drop(x, self.rate, key, OUTER)
        return self.head(self.trunk(x, mask, key))


@dataclass
class DPTConfig:
    """Settings of DPT; the defaults are the authors' for bandits, but for the length of the context (500 there)."""

    name: str = "dpt"
    learning_rate: float = setting(1e-4, "AdamW's learning rate", low=0.0)
    weight_decay: float = setting(1e-4, "AdamW's decay of all parameters", low=0.0, structural=True)
    warmup_steps: int = setting(0, "updates until the learning rate is reached", low=0)
    clip_norm: float = setting(0.0, "largest norm of the gradient; 0: no clipping", low=0.0, structural=True)
    batch_size: int = setting(64, "contexts in a batch", low=1)
    context: int = setting(200, "transitions in a context (H), and at most so many are remembered when it acts", low=1)
    contexts: str = setting(
        "data",
        "data: the dataset's, which has the columns tasks and optimal_actions; environment: new tasks in every batch, "
        "of an environment that can make them (bandits and darkroom can)",
        choices=("data", "environment"),
    )
    shuffle: bool = setting(True, "contexts=data: transitions of a context come in a random order")
    width: int = setting(32, "width of the transformer", low=1)
    layers: int = setting(4, "its blocks", low=1)
    heads: int = setting(1, "its attention heads", low=1)
    dropout: float = setting(
        0.0, "dropout rate of embeddings, attention and blocks", low=0.0, high=0.99, structural=True
    )
    activation: str = setting("gelu_tanh", "of the blocks", choices=("relu", "gelu", "gelu_tanh", "silu", "tanh"))
    init: str = setting(
        "torch",
        "initial weights of the blocks: torch (uniform), or gpt (GPT-2's, as the authors', so small at this width that "
        "it learns slowly)",
        choices=("torch", "gpt"),
    )
    policy: str = setting(
        "gaussian",
        "gaussian: negative log-likelihood; deterministic: squared error (discrete actions: always categorical)",
        choices=("gaussian", "deterministic"),
    )
    one_state: bool | None = setting(
        None,
        "there is one observation only, as in bandits: keys and values are kept between steps; null: whether the data "
        "have one only",
    )


class DPTActor(Actor):
    """Policy conditioned on the transitions so far. A carry is a `ContextMemory`, which outlives episodes."""

    algorithm: DPT
    remembers_actions = True

    def start(self, episodes: int) -> Carry:
        observation = torch.zeros(episodes, 0, self.algorithm.spec.observation_dim)
        transitions = {
            "observations": observation,
            "actions": torch.zeros(episodes, 0, self.algorithm.spec.encoded_action_dim),
            "next_observations": observation,
            "rewards": torch.zeros(episodes, 0),
        }
        return ContextMemory(transitions)

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        dist, memory = self.predict(self.extended(carry, observations), observations)
        actions = self.choose(dist, key, explore)
        pending = {
            "observations": observations,
            "actions": self.algorithm.spec.encode(actions),
            "rewards": torch.zeros(len(observations)),
        }
        return actions, dataclasses.replace(memory, pending=pending, steps=memory.steps + 1)

    def observe_reward(self, carry: Carry, rewards: Tensor) -> Carry:
        return dataclasses.replace(carry, pending={**carry.pending, "rewards": rewards})

    def new_episode(self, carry: Carry, observations: Tensor, lengths: Tensor) -> Carry:
        context, memory = self.algorithm.config.context, self.extended(carry, observations)
        count = memory.transitions["rewards"].shape[1]
        step = torch.arange(count) - (count - memory.steps)  # of the episode, negative for what was before it
        ends = lengths.unsqueeze(-1)
        next_observations = torch.where(
            (step == ends - 1).unsqueeze(-1), observations.unsqueeze(1), memory.transitions["next_observations"]
        )
        transitions = {**memory.transitions, "next_observations": next_observations}
        mask = step < ends
        if bool(mask.all()) and count <= context:
            return dataclasses.replace(memory, transitions=transitions, steps=0)
        valid = mask if memory.valid is None else mask & memory.valid
        order = valid.long().argsort(dim=1, stable=True)[:, -context:]  # the last ones, behind padding
        valid = valid.gather(1, order)
        rows = torch.arange(len(order)).unsqueeze(-1)
        # no cache: it depends on the transitions that are left out
        return ContextMemory(
            {name: column[rows, order] for name, column in transitions.items()}, None if bool(valid.all()) else valid
        )

    def extended(self, memory: ContextMemory, obs: Tensor) -> ContextMemory:
        """The memory with the transition that led to `obs` [E, O]."""
        if memory.pending is None:
            return memory
        transition, valid = {**memory.pending, "next_observations": obs}, memory.valid
        transitions = {
            name: torch.cat([column, transition[name].unsqueeze(1)], 1) for name, column in memory.transitions.items()
        }
        if valid is not None:
            valid = torch.cat([valid, torch.ones_like(valid[:, :1])], 1)
        return dataclasses.replace(memory, transitions=transitions, valid=valid, pending=None)

    def predict(self, memory: ContextMemory, obs: Tensor) -> tuple[tuple[Tensor, ...], ContextMemory]:
        """The distribution of the best action at `obs` [E, ...]; and the memory, with the cache computed for it."""
        algorithm, limit, valid, cache = self.algorithm, self.algorithm.config.context, memory.valid, memory.cache
        tokens = algorithm.tokens({name: column[:, -limit:] for name, column in memory.transitions.items()})
        count = tokens.shape[-2] + 1
        if valid is not None:
            valid = torch.cat([torch.ones_like(valid[:, :1]), valid[:, -limit:]], 1)
        mask = None if valid is None else visible(valid, count)
        if not algorithm.config.one_state or memory.transitions["rewards"].shape[1] > limit:
            dist = self.apply("actor", torch.cat([algorithm.query_token(obs), tokens], 1), mask)
            return tuple(x[:, -1] for x in dist), memory
        new_tokens = tokens[:, memory.cached_count :] if cache else torch.cat([algorithm.query_token(obs), tokens], 1)
        dist, cache = self.apply(
            "actor", new_tokens, None if mask is None else mask[..., count - new_tokens.shape[-2] :, :], None, cache
        )
        return tuple(x[:, -1] for x in dist), dataclasses.replace(memory, cache=cache, cached_count=count - 1)


@register("algo", "dpt")
class DPT(Algorithm[DPTConfig]):
    """Predict a task's best action at a query from transitions of the task, after every length of the context
    (algorithm 1).

    A token is (s, a, s', r), the query's (s, 0, 0, 0) stands first, and no token has a position. Unlike the authors'
    the loss counts the empty context, too, so that the first action is learnt, and is the mean over positions, not the
    sum, a factor that Adam cancels.

    It acts on all transitions since `start`, those of earlier episodes of the same tasks too: so it learns in context
    (`offrl adapt`). With `explore` it samples, as if from a posterior; else it takes the most probable action.
    """

    actor_class = DPTActor

    @classmethod
    def fit_config(cls, config: DPTConfig, dataset: Dataset, grid: Grid = None) -> DPTConfig:
        if config.one_state is None:
            observations = dataset.columns["observations"]
            reference = observations[0]  # in most data it differs from one of the first rows already
            constant = all(bool((observations[:rows] == reference).all()) for rows in (1_000, len(observations)))
            config = dataclasses.replace(config, one_state=constant)
        return config

    def modules(self) -> dict[str, nn.Module]:
        # numbers in a token that the query leaves at zero
        self.blank = self.spec.encoded_action_dim + self.spec.observation_dim + 1
        return {"actor": InContext(self.spec.observation_dim + self.blank, self.config, self.spec)}

    @property
    def policy(self) -> Policy:
        return cast(Policy, self.networks["actor"].head)

    def sampler(self) -> Sampler:
        c = self.config
        return (
            FreshContexts(self.spec, c.context) if c.contexts == "environment" else ContextSampler(c.context, c.shuffle)
        )

    def optimizer(self, name: str) -> Adam:
        c = self.config
        return Adam(c.learning_rate, weight_decay=c.weight_decay, clip_norm=c.clip_norm, warmup_steps=c.warmup_steps)

    def tokens(self, context: Batch) -> Tensor:
        """Transitions [B, n, 2 O + A + 1]. actions: as a network takes them."""
        return torch.cat(
            [
                context["observations"],
                context["actions"],
                context["next_observations"],
                context["rewards"].unsqueeze(-1),
            ],
            -1,
        )

    def query_token(self, queries: Tensor) -> Tensor:
        """The query's token [B, 1, 2 O + A + 1]."""
        return torch.cat([queries, torch.zeros(*queries.shape[:-1], self.blank, device=queries.device)], -1).unsqueeze(
            -2
        )

    # ---- training

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E -log pi(a* | s_query, D_j), or |a* - pi|^2, D_j the context's first j transitions, over j = 0, ..., H
        (algorithm 1).
        """
        context = self.tokens({**batch, "actions": self.spec.encode(batch["actions"])})
        valid = torch.cat([torch.ones_like(batch["valid"][:, :1]), batch["valid"]], 1)
        tokens = torch.cat([self.query_token(batch["queries"]), context], 1)
        dist = self.apply("actor", actor, tokens, visible(valid, tokens.shape[-2]), key)
        labels = batch["labels"].unsqueeze(1).expand(*valid.shape, *batch["labels"].shape[1:])
        per_length = self.policy.bc_loss(dist, labels)  # [B, H + 1]
        loss = masked_mean(per_length, valid)
        full_context = per_length.gather(1, batch["valid"].sum(1, keepdim=True)).mean()
        return loss, {"actor/loss": loss, "actor/loss_empty": per_length[:, 0].mean(), "actor/loss_full": full_context}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return self.descend(state, "actor", self.actor_loss, batch, key)


@dataclass(frozen=True)
class ContextMemory:
    """The transitions of E tasks so far, by columns of a context: observations and next_observations [E, n, O], actions
    as a network takes them [E, n, A], rewards [E, n]."""

    transitions: Batch
    valid: Tensor | None = (
        None  # bool [E, n]: False is no transition, and stands before all transitions; None: all are valid
    )
    pending: Batch | None = None  # the transition that is being made, without its successor: [E, ...]
    cache: Cache = ()  # of the query and the first tokens of `transitions`, where there is one observation only
    cached_count: int = 0  # transitions in the cache
    steps: int = 0  # of the episode


pytree.register_dataclass(ContextMemory)
