"""Trajectory Transformer: "Offline Reinforcement Learning as One Big Sequence Modeling Problem" (Janner et al., 2021,
arXiv 2106.02039).

A language model of trajectories, whose words are the bins of single numbers, and a policy that searches for the plan
with the largest expected return among continuations drawn from it. The bins belong to the state (`TrainState.extra`),
so a policy file has them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from offrl.algorithm import (
    Adam,
    Algorithm,
    Batch,
    Dataset,
    Grid,
    Loss,
    Params,
    Sampler,
    TrainState,
    Traits,
    Tree,
    Update,
)
from offrl.algorithms.tt import discretizer as quantiles
from offrl.algorithms.tt.actor import TTActor
from offrl.algorithms.tt.model import TokenModel, weighted_loss
from offrl.algorithms.tt.sampler import TokenSampler
from offrl.data.samplers.sequences import drawn_episodes
from offrl.errors import UserError
from offrl.nn.meta_check import ACTING, check_acting
from offrl.registry import register
from offrl.settings.field import setting

KINDS = ("observation", "action", "reward", "value")
MOST_PLANS = 100_000  # of an episode at once, in the settings of a policy file too


@dataclass
class TTConfig:
    """Settings of the Trajectory Transformer. The defaults are the authors', but for a planner that a CPU can play
    episodes with: theirs are in configs/experiment/tt/published-gym.yaml."""

    name: str = "tt"
    learning_rate: float = setting(6e-4, "AdamW's learning rate", low=0.0)
    weight_decay: float = setting(0.1, "AdamW's decay of the weights of matrix products", low=0.0, structural=True)
    clip_norm: float = setting(1.0, "largest norm of the gradient; 0: no clipping", low=0.0, structural=True)
    warmup_steps: int | None = setting(
        None, "updates until the learning rate is reached; null: once through the data", low=0
    )
    decay_steps: int | None = setting(
        None,
        "updates of the cosine, after the warm-up, from the learning rate down; then it rises as it fell, and so on, "
        "but is never below a tenth; null: 19 times through the data",
        low=1,
    )
    batch_size: int = setting(256, "windows in a batch", low=1)
    context: int = setting(10, "steps of a window", low=2)
    width: int = setting(128, "width of the transformer", low=1)
    layers: int = setting(4, "its blocks", low=1)
    heads: int = setting(4, "its attention heads", low=1)
    dropout: float = setting(
        0.1, "dropout rate of embeddings, attention and blocks", low=0.0, high=0.99, structural=True
    )
    bins: int = setting(100, "tokens of each number", low=2, high=32_766)
    discretizer: str = setting(
        "quantile", "bins hold equally many samples, or are equally wide", choices=quantiles.METHODS
    )
    bin_value: str = setting(
        "middle",
        "what a token stands for: the middle between the smallest and the largest sample of its bin, or their mean",
        choices=quantiles.MEANINGS,
    )
    discount: float = setting(
        0.99, "of the values that are predicted, and of the rewards of a plan", low=0.0, high=1.0, shared=True
    )
    terminal_reward: float | None = setting(
        None,
        "in place of the reward of a step that ends the episode (the authors, for locomotion: -100); null: as it is",
        shared=True,
    )
    action_weight: float = setting(5.0, "weight of the actions' tokens in the loss; observations have 1", low=0.0)
    reward_weight: float = setting(1.0, "weight of the rewards' tokens", low=0.0)
    value_weight: float = setting(1.0, "weight of the values' tokens", low=0.0)
    plan_horizon: int = setting(5, "steps of a plan (the authors: 5 to 20)", low=1, high=1000)
    plan_every: int = setting(1, "steps of a plan that are taken before the next one is made", low=1)
    beam_width: int = setting(
        16,
        "plans that are kept at each step (the authors: 32 or 128); 1 with beam_expand=1: none is compared with another",  # noqa: E501
        low=1,
    )
    beam_expand: int = setting(2, "continuations that are drawn of each", low=1)
    action_cdf: float = setting(
        0.6,
        "actions are not drawn from the least probable tokens that have this share of the probability together",
        low=0.0,
        high=0.999,
        acting=True,
    )
    action_top_k: int = setting(0, "nor from any but so many; 0: from all, 1: the most probable", low=0)
    observation_top_k: int = setting(
        1, "observations are drawn from so many tokens; 0: from all, 1: the most probable", low=0
    )
    plan_context: int = setting(
        5, "steps that planning begins with at most, the one that is planned first included", low=2
    )
    plan_max_length: int | None = setting(
        None,
        "steps after which planning forgets all but the last plan_context - 1, and computes their keys anew (the "
        "authors: plan_context, so after every step; about half as fast); at most context; null: context",
        low=2,
    )


@register("algo", "tt")
class TT(Algorithm[TTConfig]):
    """Predict every number of a trajectory from those before it, and act by beam search for the largest return. Module
    "trajectory".
    """

    traits = Traits(policy_modules=("trajectory",), acts_on_device=True)
    actor_class = TTActor

    @classmethod
    def fit_config(cls, config: TTConfig, dataset: Dataset, grid: Grid = None) -> TTConfig:
        """`config` with the lengths of the learning rate's schedule."""
        rows = int(dataset.episode_lengths()[drawn_episodes(dataset)].sum())
        epoch = -(-rows // config.batch_size)
        warmup = epoch if config.warmup_steps is None else config.warmup_steps
        decay = 19 * epoch if config.decay_steps is None else config.decay_steps
        return dataclasses.replace(config, warmup_steps=warmup, decay_steps=decay)

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        if s.discrete and s.num_actions > c.bins:
            raise UserError(
                f"{s.name} has {s.num_actions} actions, which do not fit into algo.bins={c.bins} tokens: raise it"
            )
        if c.beam_width * c.beam_expand > MOST_PLANS:
            raise UserError(
                f"algo.beam_width={c.beam_width} times algo.beam_expand={c.beam_expand} plans are more than "
                f"{MOST_PLANS:,}"
            )
        if c.plan_every > c.plan_horizon:
            raise UserError(
                f"algo.plan_every={c.plan_every} is more than the steps of a plan, algo.plan_horizon={c.plan_horizon}"
            )
        if c.width % c.heads:
            raise UserError(f"algo.width={c.width} is no multiple of algo.heads={c.heads}")
        start = min(c.plan_context, c.context)
        self.longest = c.context if c.plan_max_length is None else c.plan_max_length
        if not start <= self.longest <= c.context:
            raise UserError(
                f"algo.plan_max_length={self.longest} must be at least algo.plan_context={start}, and at most "
                f"algo.context={c.context}"
            )
        # tokens of an observation, of an action, and of a step
        self.sizes = s.observation_dim, 1 if s.discrete else s.action_dim
        self.dims = sum(self.sizes) + 2
        numbers = 2 * c.layers * c.width * self.dims * self.longest + 30 * c.bins  # of a plan, as measured
        size = 4.0 * c.beam_width * c.beam_expand * numbers
        check_acting(c, ("beam_width", "beam_expand", "layers", "width"), size, 2 * ACTING)
        model = TokenModel(self.dims, c.bins, c.context, c.width, c.layers, c.heads, c.dropout)
        self.decayed = model.decayed()
        self.runtime.notes = (
            f"planning: {c.plan_horizon * (s.observation_dim + s.action_dim + 2):,} tokens one after another, each for "
            f"{c.beam_width * c.beam_expand:,} plans of every episode, before "
            f"{'each action' if c.plan_every == 1 else f'every {c.plan_every} actions'} (algo.plan_*, algo.beam_*)",
        )
        return {"trajectory": model}

    # ---- learning

    def sampler(self) -> Sampler:
        c = self.config
        return TokenSampler(
            c.context, spec=self.spec, bins=c.bins, method=c.discretizer, meaning=c.bin_value, discount=c.discount,
            terminal_reward=c.terminal_reward,
        )  # fmt: skip

    def optimizer(self, name: str) -> Adam:
        c = self.config
        return Adam(
            c.learning_rate, beta2=0.95, weight_decay=c.weight_decay, decayed=self.decayed, clip_norm=c.clip_norm,
            schedule="cosine_cycle", decay_steps=c.decay_steps or 1, floor=0.1, warmup_steps=c.warmup_steps or 0,
        )  # fmt: skip

    def extra(self, params: dict[str, Params]) -> Tree:
        """The bins of tokens; until the first update, which takes them from the data, bins between -1 and 1."""
        s, n = self.spec, self.config.bins
        line = np.linspace(-1.0, 1.0, n)
        number = quantiles.fit(line, n)
        action = quantiles.choices(s.num_actions, n) if s.discrete else number
        observation_dim, action_dim = self.sizes
        return quantiles.stack([*[number] * observation_dim, *[action] * action_dim, number, number])._asdict()

    def trajectory_loss(self, params: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """-sum_i w_i log p(x_i | x_1, ..., x_{i-1}) over the tokens of states, actions, rewards and values (section
        3.1), w by kind.
        """
        c, tokens = self.config, batch["tokens"]
        counts = (*self.sizes, 1, 1)
        unit = torch.ones((), device=tokens.device)
        kinds = [unit, unit * c.action_weight, unit * c.reward_weight, unit * c.value_weight]
        weights = torch.cat([weight.expand(count) for weight, count in zip(kinds, counts, strict=True)])
        logits = self.apply("trajectory", params, tokens[:, :-1], key)
        loss, entropy = weighted_loss(logits, tokens, weights, batch["counted"])
        metrics = {"trajectory/loss": loss}
        dim = torch.arange(1, tokens.shape[-1], device=tokens.device) % self.dims
        first = 0
        for kind, count in zip(KINDS, counts, strict=True):
            mask = batch["counted"][:, 1:] & (dim >= first) & (dim < first + count)
            metrics[f"trajectory/{kind}"] = torch.where(mask, entropy, 0.0).sum() / mask.sum().clamp(min=1)
            first += count
        return loss, metrics

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        new_state, metrics = self.descend(state, "trajectory", self.trajectory_loss, batch, key)
        # the same at each update: a state is handed the data in updates only
        device = state.step.device  # memory-mapped data stay on the CPU
        tables = {name: bins.to(device) for name, bins in self.runtime.source.bins._asdict().items()}
        extra = {name: torch.where(state.step < 0, state.extra[name], bins) for name, bins in tables.items()}
        return new_state._replace(extra=extra), metrics
