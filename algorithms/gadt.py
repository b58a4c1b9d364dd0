"""G-ADT: V-ADT with goals for prompts ("Rethinking Decision Transformer via Hierarchical Reinforcement Learning", Ma et
al., 2023, arXiv 2311.00267)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from offrl import losses, rng
from offrl.algorithm import (
    Batch,
    Carry,
    Dataset,
    Loss,
    Params,
    Sampler,
    TrainConfig,
    TrainState,
    Traits,
    Tree,
    Update,
)
from offrl.data.samplers.goals import ACHIEVED
from offrl.data.samplers.sequences import STEPS, VALID
from offrl.families.goal_conditioned import required_goals
from offrl.families.sequence import GoalHistory, History, SequenceActor, SequenceModel, SequenceSettings, masked_mean
from offrl.families.subgoals import Candidates, Subgoals
from offrl.families.teacher import CHUNK, TeacherSettings, make_teacher, values_requirement
from offrl.pretrained import Pretrained, Requirement
from offrl.registry import register
from offrl.settings.field import setting

PROMPTS, ADVANTAGES = "prompts", "advantages"
NEVER = -1e9  # the advantage of a step after which nothing is known
ONCE = 1 << 40  # `refresh` is called before the first update, and then no more


@dataclass
class GADTConfig(TeacherSettings, SequenceSettings):
    """Settings of G-ADT; the defaults are the authors'."""

    name: str = "gadt"
    temperature: float = setting(
        1.0, "multiplies the advantage in the exponent of each step's weight; larger is greedier", low=0.0
    )
    max_weight: float = setting(100.0, "cap of the exponential weights", low=0.0)
    subgoal_steps: int = setting(
        25, "k: a prompt is so many steps ahead; a run of hiql or ota that is named has its own", low=1
    )
    candidates: int = setting(
        64, "states of the data among which subgoals are chosen, where values= names a run without a high level", low=1
    )
    representation: int = setting(
        10, "of the HIQL that is trained where values= names no run: numbers that represent a subgoal", low=1
    )
    expectile: float = setting(0.7, "the same HIQL's expectile", low=0.0, high=1.0, shared=True)
    discount: float = setting(
        0.99, "the same HIQL's discount factor (giant mazes and humanoidmaze: 0.995)", low=0.0, high=1.0, shared=True
    )
    value_hidden: list[int] = setting([512, 512, 512], "widths of the same HIQL's hidden layers", low=1)
    value_batch_size: int = setting(1024, "transitions in a batch of the same HIQL", low=1)
    value_learning_rate: float = setting(3e-4, "the same HIQL's learning rate", low=0.0, shared=True)


class GADTActor(SequenceActor):
    """Policy prompted with subgoals that the high level chooses on the way to the goal."""

    algorithm: GADT

    def __init__(self, algorithm: GADT, state: TrainState) -> None:
        super().__init__(algorithm, state)
        self.high = SimpleNamespace(params={name: state.extra[name] for name in algorithm.subgoals.modules})
        self.candidates = None if algorithm.subgoals.latent else Candidates(*state.extra["candidates"])

    def start(self, episodes: int) -> Carry:
        carry = super().start(episodes)
        return GoalHistory(
            {**carry.window, PROMPTS: torch.zeros(episodes, 0, self.algorithm.subgoals.width)}, carry.remaining
        )

    def set_goal(self, carry: Carry, goals: Tensor) -> Carry:
        return dataclasses.replace(carry, goals=goals)

    def current_step(self, carry: History, observations: Tensor) -> Batch:
        assert isinstance(carry, GoalHistory)
        goals = required_goals(self.algorithm, carry.goals)
        prompts = self.algorithm.subgoals.choose(self.high, observations, goals, self.candidates)
        return {**super().current_step(carry, observations), PROMPTS: prompts}


@register("algo", "gadt")
class GADT(SequenceModel[GADTConfig]):
    """A high level sets the state to be in k steps from now, and a transformer goes to it: the data's own state k steps
    later while it learns, a subgoal of the high level when it acts.

    Tokens (subgoal and observation together, action) of each step. Imitation is weighted by exp(temperature (V(s', w) -
    V(s, w))), w the state k steps ahead, or the last of its trajectory. A prompt is HIQL's phi(s, w); the authors' HIQL
    has states for subgoals, and prompts are states. So they are here with a run of gcivl, whose subgoals
    `offrl.families.subgoals` chooses among states of the data. The goal itself is seen by the high level alone.
    """

    traits = Traits(goal_conditioned=True)
    actor_class = GADTActor

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        return values_requirement(config, "hiql", hiql_settings(config.algo), check_values)

    def modules(self) -> Any:
        c = self.config
        teacher = make_teacher(c, self.spec, {"name": "hiql", **hiql_settings(c)})
        self.subgoals = Subgoals.from_algorithm(teacher, c.subgoal_steps)
        return super().modules()

    def extra(self, params: dict[str, Params]) -> Tree:
        """The high level, which acts but does not learn; and the states that it may choose, drawn before the first
        update.
        """
        subgoals, run = self.subgoals, self.pretrained.get("values")
        values = (run.state if run else subgoals.algorithm.init(0)).params  # a policy's file has its own
        tree: dict[str, Any] = {name: values[name] for name in subgoals.modules}
        if not subgoals.latent:
            s, count = self.spec, self.config.candidates
            tree["candidates"] = [torch.zeros(count, n) for n in (s.observation_dim, s.goal_dim or s.observation_dim)]
        return tree

    @property
    def every(self) -> int:
        return 0 if self.subgoals.latent else ONCE

    def refresh(self, state: TrainState, source: Any, key: Tensor, *, step: int) -> Update:
        """Draw the states that may be chosen as subgoals."""
        rows = source.table.take(rng.randint(key, (self.config.candidates,), source.count))
        states = rows["observations"].flatten(1).float()
        candidates = [states, rows[ACHIEVED].flatten(1).float() if self.spec.goal_dim else states.clone()]
        return state.with_extra(candidates=candidates), {}

    def sizes(self) -> dict[str, int]:
        return {"observation": self.subgoals.width + self.spec.observation_dim, "action": self.spec.encoded_action_dim}

    def tokens(self, batch: Batch) -> dict[str, Tensor]:
        return {
            "observation": torch.cat([batch[PROMPTS], batch["observations"]], -1),
            "action": self.spec.encode(batch["actions"]),
        }

    def sampler(self) -> Sampler:
        extra = (ACHIEVED,) if self.spec.goal_dim and not self.subgoals.latent else ()
        return dataclasses.replace(super().sampler(), derived_columns=self.prompts, extra=extra)  # type: ignore[type-var]

    @torch.no_grad()
    def prompts(self, dataset: Dataset) -> dict[str, Tensor]:
        """The prompt of every row, and the advantage of what the data do there on the way to it."""
        run, subgoals, columns = self.pretrained["values"], self.subgoals, dataset.columns
        ends = dataset.per_row(dataset.episode_end - 1)
        targets = torch.minimum(torch.arange(len(dataset), device=ends.device) + subgoals.steps, ends)
        goal_column = columns[ACHIEVED if self.spec.goal_dim else "observations"]
        prompts, advantages = [], []
        for rows in torch.arange(len(dataset), device=ends.device).split(CHUNK):
            observations, next_observations = (
                columns[name][rows].cpu().flatten(1).float() for name in ("observations", "next_observations")
            )
            goals = goal_column[targets[rows]].cpu().flatten(1).float()
            gain = subgoals.value(run.state, next_observations, goals) - subgoals.value(run.state, observations, goals)
            prompts.append(subgoals.describe(run.state, observations, goals))
            advantages.append(torch.where(columns["successor_known"][rows].cpu(), gain, NEVER))
        return {PROMPTS: torch.cat(prompts), ADVANTAGES: torch.cat(advantages)}

    def weight(self, batch: Batch) -> Tensor:
        """min(exp(temperature (V(s', w) - V(s, w))), cap) of each step, [B, K]."""
        return losses.advantage_weight(batch[ADVANTAGES], self.config.temperature, self.config.max_weight)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E weight(V(s', w) - V(s, w)) |a_t - pi(w_1, s_1, a_1, ..., w_t, s_t)|^2, or times -log pi(a_t | ...)."""
        dist = self.apply("actor", actor, self.tokens(batch), batch[STEPS], batch[VALID], key)
        loss = masked_mean(self.weight(batch) * self.policy.bc_loss(dist, batch["actions"]), batch[VALID])
        return loss, {"actor/loss": loss}


def check_values(run: Pretrained) -> None:
    """Raise UserError for a run without subgoals."""
    Subgoals.of_run(run)


def hiql_settings(config: GADTConfig) -> dict[str, Any]:
    """Settings of the HIQL that is trained where no run is named."""
    c = config
    return {
        "subgoal_steps": c.subgoal_steps,
        "representation": c.representation,
        "expectile": c.expectile,
        "discount": c.discount,
        "hidden": list(c.value_hidden),
        "batch_size": c.value_batch_size,
        "learning_rate": c.value_learning_rate,
    }
