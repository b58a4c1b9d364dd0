"""DPT: "Supervised Pretraining Can Learn In-Context Reinforcement Learning" (Lee et al., 2023, arXiv 2306.14892)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from offrl.actor import Actor
from offrl.algorithm import Algorithm, Grid, Loss, TrainState, Update
from offrl.algorithms.dpt.actor import DPTActor
from offrl.algorithms.dpt.model import InContext
from offrl.data.dataset import Dataset
from offrl.data.samplers.contexts import ContextSampler, FreshContexts
from offrl.data.samplers.transitions import Batch, Sampler
from offrl.families.sequence import masked_mean
from offrl.nn.policies import Policy
from offrl.nn.transformer import visible
from offrl.optim import Adam, Params
from offrl.registry import register
from offrl.settings.field import setting


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
        "of an environment "
        "that can make them (bandits and darkroom can)",
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


@register("algo", "dpt")
class DPT(Algorithm):
    """Predict a task's best action at a query from transitions of the task, after every length of the context
    (algorithm 1).

    A token is (s, a, s', r), the query's (s, 0, 0, 0) stands first, and no token has a position. Unlike the authors'
    the loss counts the empty context, too, so that the first action is learnt, and is the mean over positions, not the
    sum, a factor that Adam cancels.

    It acts on all transitions since `start`, those of earlier episodes of the same tasks too: so it learns in context
    (`offrl adapt`). With `explore` it samples, as if from a posterior; else it takes the most probable action.
    """

    Config = DPTConfig

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Grid = None) -> Any:
        if config.one_state is None:
            observations = dataset.columns["observations"]
            reference = observations[0]  # in most data it differs from one of the first rows already
            constant = all(bool((observations[:rows] == reference).all()) for rows in (1_000, len(observations)))
            config = dataclasses.replace(config, one_state=constant)
        return config

    def modules(self) -> dict[str, nn.Module]:
        self.blank = (
            self.spec.encoded_action_dim + self.spec.observation_dim + 1
        )  # numbers in a token that the query leaves at zero
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

    def actor(self, state: TrainState) -> Actor:
        return DPTActor(self, state)
