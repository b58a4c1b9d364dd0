"""DPT: "Supervised Pretraining Can Learn In-Context Reinforcement Learning" (Lee et al., 2023, arXiv 2306.14892)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offrl.actor import Actor, Carry
from offrl.algorithm import Algorithm, Metrics, TrainState
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.samplers.contexts import ContextSampler, FreshContexts
from offrl.data.samplers.transitions import Batch, Sampler
from offrl.families.sequence import masked_mean
from offrl.nn import Linear, Transformer, initialise, make_policy
from offrl.nn.policies import Policy
from offrl.nn.transformer import Affine, Cache, drop, visible
from offrl.optim import Adam, Params
from offrl.registry import register
from offrl.settings.field import setting

OUTER = 1_000  # folded into the key of the dropout of embeddings; the transformer's layers have 0, 1, ...


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
        "data: the data set's, which has the columns tasks and optimal_actions; environment: new tasks in every batch, of an environment "
        "that can make them (bandits and darkroom can)",
        choices=("data", "environment"),
    )
    shuffle: bool = setting(True, "contexts=data: transitions of a context come in a random order")
    width: int = setting(32, "width of the transformer", low=1)
    layers: int = setting(4, "its blocks", low=1)
    heads: int = setting(1, "its attention heads", low=1)
    dropout: float = setting(0.0, "dropout rate of embeddings, attention and blocks", low=0.0, high=0.99, structural=True)
    activation: str = setting("gelu", "of the blocks", choices=("relu", "gelu", "silu", "tanh"))
    init: str = setting(
        "torch",
        "initial weights of the blocks: torch (uniform), or gpt (GPT-2's, as the authors', so small at this width that it learns slowly)",
        choices=("torch", "gpt"),
    )
    policy: str = setting(
        "gaussian",
        "gaussian: negative log-likelihood; deterministic: squared error (discrete actions: always categorical)",
        choices=("gaussian", "deterministic"),
    )
    one_state: bool | None = setting(
        None, "there is one observation only, as in bandits: keys and values are kept between steps; null: whether the data have one only"
    )


class InContext(nn.Module):
    """The distribution of the best action after each of T tokens, the first of which is the query and the others are transitions."""

    def __init__(self, size: int, config: Any, spec: DataSpec) -> None:
        super().__init__()
        c, self.rate = config, config.dropout
        self.embed = Linear(size, c.width)
        self.trunk: nn.Module = Transformer(c.width, c.layers, c.heads, dropout=c.dropout, activation=c.activation)
        for part in self.trunk.modules():
            if isinstance(part, Affine):
                initialise(part.weight, part.bias, c.init)
        self.head = make_policy(c.policy, c.width, spec.action_dim, spec.num_actions, [])

    def forward(self, tokens: Tensor, mask: Tensor | None = None, key: Tensor | None = None, past: Cache | None = None) -> Any:
        """tokens [B, T, size] -> parameters of the distributions [B, T, ...]; with `past`, those of the new tokens and the longer cache."""
        x = self.embed(tokens)
        if past is not None:
            x, cache = cast(Transformer, self.trunk).extend(x, past, mask)
            return self.head(x), cache
        if key is not None:
            x = drop(x, self.rate, key, OUTER)
        return self.head(self.trunk(x, mask, key))


@dataclass(frozen=True)
class Memory:
    """What was seen of E tasks, by columns of a context: observations and next_observations [E, n, O], actions as a network takes them
    [E, n, A], rewards [E, n]."""

    seen: Batch
    valid: Tensor | None = None  # bool [E, n]: False is no transition, and stands before all that are; None: all are valid
    doing: Batch | None = None  # the transition that is being made, without its successor: [E, ...]
    cache: Cache = ()  # of the query and the first tokens of `seen`, where there is one observation only
    cached: int = 0  # how many of `seen` are in it
    steps: int = 0  # of the episode


pytree.register_dataclass(Memory)


@register("algo", "dpt")
class DPT(Algorithm):
    """Predicts a task's best action at a query from transitions of the task, by cross-entropy after every length of the context (Algorithm
    1).

    A token is (s, a, s', r), the query's (s, 0, 0, 0) stands first, and nothing says what came when. Unlike the authors' the loss counts
    the empty context, too, so that the first action is learnt, and is the mean over positions, not the sum, which Adam does not notice.

    It acts on all that it has seen since `start`, in earlier episodes of the same tasks too: this is how it learns in context (`offrl
    adapt`). With `explore` it samples, as if from a posterior; else it takes the most probable action.
    """

    Config = DPTConfig

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Mapping[str, Sequence[float]] | None = None) -> Any:
        if config.one_state is None:
            seen = dataset.columns["observations"]
            one = all(bool((seen[:rows] == seen[0]).all()) for rows in (1_000, len(seen)))  # most data show at once that they have more
            config = dataclasses.replace(config, one_state=one)
        return config

    def modules(self) -> dict[str, nn.Module]:
        self.blank = self.spec.encoded_action_dim + self.spec.observation_dim + 1  # numbers in a token that the query leaves at zero
        return {"actor": InContext(self.spec.observation_dim + self.blank, self.config, self.spec)}

    @property
    def policy(self) -> Policy:
        return cast(Policy, self.networks["actor"].head)

    def sampler(self) -> Sampler:
        c = self.config
        return FreshContexts(self.spec, c.context) if c.contexts == "environment" else ContextSampler(c.context, c.shuffle)

    def optimizer(self, name: str) -> Adam:
        c = self.config
        return Adam(c.learning_rate, weight_decay=c.weight_decay, clip_norm=c.clip_norm, warmup_steps=c.warmup_steps)

    def tokens(self, context: Batch) -> Tensor:
        """Transitions [B, n, 2 O + A + 1]. actions: as a network takes them."""
        return torch.cat([context["observations"], context["actions"], context["next_observations"], context["rewards"].unsqueeze(-1)], -1)

    def asked(self, queries: Tensor) -> Tensor:
        """The query's token [B, 1, 2 O + A + 1]."""
        return torch.cat([queries, torch.zeros(*queries.shape[:-1], self.blank, device=queries.device)], -1).unsqueeze(-2)

    # ---- training

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Metrics]:
        """Mean imitation loss of the label over batch and lengths of the context."""
        context = self.tokens({**batch, "actions": self.spec.encode(batch["actions"])})
        valid = torch.cat([torch.ones_like(batch["valid"][:, :1]), batch["valid"]], 1)
        tokens = torch.cat([self.asked(batch["queries"]), context], 1)
        dist = self.apply("actor", actor, tokens, visible(valid, tokens.shape[-2]), key)
        labels = batch["labels"].unsqueeze(1).expand(*valid.shape, *batch["labels"].shape[1:])
        each = self.policy.bc_loss(dist, labels)  # [B, H + 1]
        loss = masked_mean(each, valid)
        full = each.gather(1, batch["valid"].sum(1, keepdim=True)).mean()
        return loss, {"actor/loss": loss, "actor/loss_empty": each[:, 0].mean(), "actor/loss_full": full}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        return self.descend(state, "actor", self.actor_loss, batch, key)

    def actor(self, state: TrainState) -> Actor:
        return DPTActor(self, state)


class DPTActor(Actor):
    """Acts on the transitions that it has seen. A carry is a `Memory`, which outlives episodes."""

    algorithm: DPT

    def start(self, episodes: int) -> Carry:
        observation = torch.zeros(episodes, 0, self.algorithm.spec.observation_dim)
        actions = torch.zeros(episodes, 0, self.algorithm.spec.encoded_action_dim)
        seen = {"observations": observation, "actions": actions, "next_observations": observation, "rewards": torch.zeros(episodes, 0)}
        return Memory(seen)

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        dist, memory = self.best(self.noted(carry, observations), observations)
        actions = self.choose(dist, key, explore)
        doing = {"observations": observations, "actions": self.algorithm.spec.encode(actions), "rewards": torch.zeros(len(observations))}
        return actions, dataclasses.replace(memory, doing=doing, steps=memory.steps + 1)

    def observe_reward(self, carry: Carry, rewards: Tensor) -> Carry:
        return dataclasses.replace(carry, doing={**carry.doing, "rewards": rewards})

    def new_episode(self, carry: Carry, observations: Tensor, lengths: Tensor) -> Carry:
        context, memory = self.algorithm.config.context, self.noted(carry, observations)
        count = memory.seen["rewards"].shape[1]
        step = torch.arange(count) - (count - memory.steps)  # of the episode, negative for what was before it
        ends = lengths.unsqueeze(-1)
        following = torch.where((step == ends - 1).unsqueeze(-1), observations.unsqueeze(1), memory.seen["next_observations"])
        seen = {**memory.seen, "next_observations": following}
        made = step < ends
        if bool(made.all()) and count <= context:
            return dataclasses.replace(memory, seen=seen, steps=0)
        valid = made if memory.valid is None else made & memory.valid
        order = valid.long().argsort(dim=1, stable=True)[:, -context:]  # the last ones, behind what is no transition
        valid = valid.gather(1, order)
        rows = torch.arange(len(order)).unsqueeze(-1)
        # what was cached has looked at what is left out
        return Memory({name: column[rows, order] for name, column in seen.items()}, None if bool(valid.all()) else valid)

    def noted(self, memory: Memory, obs: Tensor) -> Memory:
        """The memory with the transition that led to `obs` [E, O]."""
        if memory.doing is None:
            return memory
        new, valid = {**memory.doing, "next_observations": obs}, memory.valid
        seen = {name: torch.cat([column, new[name].unsqueeze(1)], 1) for name, column in memory.seen.items()}
        if valid is not None:
            valid = torch.cat([valid, torch.ones_like(valid[:, :1])], 1)
        return dataclasses.replace(memory, seen=seen, valid=valid, doing=None)

    def best(self, memory: Memory, obs: Tensor) -> tuple[tuple[Tensor, ...], Memory]:
        """The distribution of the best action at `obs` [E, ...]; and the memory, with what was computed for it."""
        algorithm, most, valid, cache = self.algorithm, self.algorithm.config.context, memory.valid, memory.cache
        tokens = algorithm.tokens({name: column[:, -most:] for name, column in memory.seen.items()})
        many = tokens.shape[-2] + 1
        if valid is not None:
            valid = torch.cat([torch.ones_like(valid[:, :1]), valid[:, -most:]], 1)
        mask = None if valid is None else visible(valid, many)
        if not algorithm.config.one_state or memory.seen["rewards"].shape[1] > most:
            dist = self.apply("actor", torch.cat([algorithm.asked(obs), tokens], 1), mask)
            return tuple(x[:, -1] for x in dist), memory
        new = tokens[:, memory.cached :] if cache else torch.cat([algorithm.asked(obs), tokens], 1)
        dist, cache = self.apply("actor", new, None if mask is None else mask[..., many - new.shape[-2] :, :], None, cache)
        return tuple(x[:, -1] for x in dist), dataclasses.replace(memory, cache=cache, cached=many - 1)
