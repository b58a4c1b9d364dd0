"""V-ADT: "Rethinking Decision Transformer via Hierarchical Reinforcement Learning" (Ma et al., 2023, arXiv
2311.00267).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offrl import losses
from offrl.algorithm import Batch, Carry, Dataset, Loss, Params, Sampler, TrainConfig, TrainState, Tree
from offrl.data.samplers.sequences import STEPS, VALID
from offrl.errors import UserError
from offrl.families.critics import Value
from offrl.families.return_conditioned import round_digits
from offrl.families.sequence import History, SequenceActor, SequenceModel, SequenceSettings, masked_mean
from offrl.families.teacher import (
    CHUNK,
    TeacherSettings,
    check_critics,
    make_teacher,
    observation_rows,
    q_of_data,
    values_requirement,
)
from offrl.pretrained import Pretrained, Requirement
from offrl.registry import register
from offrl.settings.field import setting

PROMPTS, ADVANTAGES = "prompts", "advantages"


@dataclass
class VADTConfig(TeacherSettings, SequenceSettings):
    """Settings of V-ADT."""

    name: str = "vadt"
    temperature: float = setting(
        3.0, "multiplies the advantage in the exponent of each step's weight; larger is greedier", low=0.0
    )
    max_weight: float = setting(100.0, "cap of the exponential weights", low=0.0)
    prompt_scale: float | None = setting(
        None,
        "values are divided by this before the network sees them (published: 1); null: their spread over the data",
        low=1e-9,
    )
    expectile: float = setting(
        0.7, "of the IQL that is trained where values= names no run", low=0.0, high=1.0, shared=True
    )
    discount: float = setting(0.99, "the same IQL's discount factor", low=0.0, high=1.0, shared=True)
    value_hidden: list[int] = setting([256, 256], "widths of the same IQL's hidden layers", low=1)
    value_batch_size: int = setting(256, "transitions in a batch of the same IQL", low=1)
    value_learning_rate: float = setting(3e-4, "the same IQL's learning rate", low=0.0, shared=True)


class VADTActor(SequenceActor):
    """Policy prompted with V(s)."""

    algorithm: VADT

    def start(self, episodes: int) -> Carry:
        carry = super().start(episodes)
        return dataclasses.replace(carry, window={**carry.window, PROMPTS: torch.zeros(episodes, 0)})

    def current_step(self, carry: History, observations: Tensor) -> Batch:
        return {
            **super().current_step(carry, observations),
            PROMPTS: self.algorithm.teacher.value(self.state.extra["value"], observations).mean,
        }


@register("algo", "vadt")
class VADT(SequenceModel[VADTConfig]):
    """A high level sets a value to reach, Q(s, a) of the data while it learns and V(s) when it acts; a transformer
    reaches it.

    Tokens (value and observation together, action) of each step. Imitation is weighted by exp(temperature (Q - V)),
    equation 8; V and Q are IQL's.
    """

    actor_class = VADTActor

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        c = config.algo
        settings = {
            "expectile": c.expectile,
            "discount": c.discount,
            "hidden": list(c.value_hidden),
            "batch_size": c.value_batch_size,
            "learning_rate": c.value_learning_rate,
        }
        # 1,000,000 updates of IQL, then 100,000
        return values_requirement(config, "iql", settings, check_values, ratio=10)

    @classmethod
    def adopt(cls, config: TrainConfig, dataset: Dataset, pretrained: Mapping[str, Any]) -> TrainConfig:
        """The spread of the values over the data, where no scale of prompts is given."""
        if config.algo.prompt_scale is None:
            spread = float(q_of_data(pretrained["values"], dataset).std())
            config = dataclasses.replace(
                config, algo=dataclasses.replace(config.algo, prompt_scale=round_digits(spread) or 1.0)
            )
        return config

    def modules(self) -> Any:
        self.teacher = make_teacher(self.config, self.spec, {"name": "iql"})
        return super().modules()

    def extra(self, params: dict[str, Params]) -> Tree:
        """V, which acts but does not learn."""
        run = self.pretrained.get("values")
        return {"value": (run.state if run else self.teacher.init(0)).params["value"]}  # a policy's file has its own

    def sizes(self) -> dict[str, int]:
        return {"observation": 1 + self.spec.observation_dim, "action": self.spec.encoded_action_dim}

    def tokens(self, batch: Batch) -> dict[str, Tensor]:
        scale = self.config.prompt_scale
        prompts = batch[PROMPTS].unsqueeze(-1) / (1.0 if scale is None else scale)
        return {
            "observation": torch.cat([prompts, batch["observations"]], -1),
            "action": self.spec.encode(batch["actions"]),
        }

    def sampler(self) -> Sampler:
        return dataclasses.replace(super().sampler(), derived_columns=self.values)  # type: ignore[type-var]

    @torch.no_grad()
    def values(self, dataset: Dataset) -> dict[str, Tensor]:
        """Q and the advantage Q - V of every row."""
        run = self.pretrained["values"]
        q = q_of_data(run, dataset)
        v = torch.cat(
            [
                run.algorithm.value(run.state.params["value"], rows).mean
                for rows in observation_rows(dataset).split(CHUNK)
            ]
        )
        return {PROMPTS: q, ADVANTAGES: q - v}

    def weight(self, batch: Batch) -> Tensor:
        """min(exp(temperature (Q - V)), cap) of each step, [B, K]."""
        return losses.advantage_weight(batch[ADVANTAGES], self.config.temperature, self.config.max_weight)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E weight(Q - V) |a_t - pi(Q_1, s_1, a_1, ..., Q_t, s_t)|^2, or times -log pi(a_t | ...) (equation 8)."""
        dist = self.apply("actor", actor, self.tokens(batch), batch[STEPS], batch[VALID], key)
        loss = masked_mean(self.weight(batch) * self.policy.bc_loss(dist, batch["actions"]), batch[VALID])
        return loss, {"actor/loss": loss}


def check_values(run: Pretrained) -> None:
    """Raise UserError for a run without Q or V."""
    alternatives = "iql, xql or f_dvl"
    check_critics(run, alternatives)
    if not isinstance(getattr(run.algorithm, "value", None), Value):
        raise UserError(f"algo.values: {run.algorithm.config.name} learns no V; use a run of {alternatives}")
