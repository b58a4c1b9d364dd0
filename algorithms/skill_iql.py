"""IQL over skills: Skill-Critic's two levels (Hao et al., 2023, arXiv 2306.08388) with the high level learnt from the
data alone, by IQL (Kostrikov et al., 2021, arXiv 2110.06169)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offrl import losses, rng
from offrl.algorithm import (
    Algorithm,
    Dataset,
    Grid,
    Loss,
    Params,
    TrainConfig,
    TrainState,
    Traits,
    Tree,
    Update,
)
from offrl.data.samplers.tables import Table, table_of
from offrl.data.samplers.transitions import Batch, Episodes, Sampler, by_weight, draw_rows
from offrl.errors import UserError
from offrl.families.critics import Value, Values
from offrl.families.in_sample import InSampleSettings, expectile_loss
from offrl.families.skills.levels import OverSkills, SkillSettings
from offrl.nn.representations.latent import draw, gaussian_kl
from offrl.pretrained import Pretrained, Requirement
from offrl.registry import register
from offrl.settings.field import setting


@dataclass(frozen=True)
class Segments:
    """The source of SegmentSampler; segments are numbered among those that may be drawn."""

    count: int
    table: Table
    weighted: Episodes | None = None  # where some episodes are drawn more often than others


@dataclass(frozen=True)
class SegmentSampler:
    """Segments of `length` steps: observations at the first, next_observations after the last, rewards [B, length] of
    every step, and masks = 1 - whether the episode terminated within.

    A segment that terminates is shorter, and its rewards beyond that are 0. One that the data cut short in another way,
    by a time limit or the end of a recording, is never drawn: what its last steps would have led to is not known.

    extra_columns: what an algorithm makes itself, for all R rows of the data; a segment has the row where it begins.
    """

    length: int
    extra_columns: Callable[[Dataset], Mapping[str, Tensor]] | None = None

    def prepare(self, dataset: Dataset) -> Segments:
        """The source of segments. Raises UserError where no episode is long enough."""
        device = dataset.device
        starts, ends, rewards, masks = segments(dataset, self.length)
        if not len(starts):
            raise UserError(
                f"{dataset.spec.name}: no segment of {self.length} steps to train on: every episode is shorter, and "
                f"none terminates; the longest has {int(dataset.episode_lengths().max())} steps"
            )
        # which are drawn follows from the episodes' weights
        weighted, first = by_weight(dataset, starts.to(device))
        order = torch.searchsorted(starts.to(device), first)
        extra = {"rewards": rewards.to(device)[order], "masks": masks.to(device)[order]}
        own_columns = self.extra_columns(dataset) if self.extra_columns else {}
        extra |= {name: column.to(device)[first] for name, column in own_columns.items()}
        more: dict[str, tuple[Tensor, Tensor | None]] = {
            "next_observations": (dataset.columns["next_observations"], ends.to(device)[order]),
            **{name: (column, None) for name, column in extra.items()},
        }
        table = table_of(dataset, {"observations": dataset.columns["observations"]}, first, more)
        return Segments(len(first), table, weighted)

    def __call__(self, source: Segments, key: Tensor, batch_size: int) -> Batch:
        return source.table.take(draw_rows(key, batch_size, source.count, source.weighted))


def segments(dataset: Dataset, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(first rows [S], last rows [S], rewards [S, length], masks [S] float32) of all segments that may be drawn, on the
    CPU.
    """
    columns = {name: dataset.columns[name].cpu() for name in ("rewards", "terminations", "successor_known")}
    stop = dataset.per_row(dataset.episode_end.cpu())  # exclusive
    row = torch.arange(len(stop))
    terminated = torch.zeros(len(stop), dtype=torch.bool)
    count, rewards = torch.zeros_like(row), []
    for j in range(length):
        index = (row + j).clamp(max=len(row) - 1)
        inside = ~terminated & (row + j < stop)
        rewards.append(torch.where(inside, columns["rewards"][index], 0.0))
        count = count + inside
        terminated = terminated | (inside & columns["terminations"][index])
    last = row + count - 1
    complete = terminated | ((count == length) & columns["successor_known"][last])
    return row[complete], last[complete], torch.stack(rewards, 1)[complete], (~terminated[complete]).float()


MEAN, LOG_STD = "skill_mean", "skill_log_std"  # columns: q(z | actions) of the skill that begins at a row


@dataclass
class SkillIQLConfig(SkillSettings, InSampleSettings):
    """Settings of IQL over skills; those of the high level are IQL's, those of the skills Skill-Critic's."""

    name: str = "skill_iql"
    expectile: float = setting(0.7, "0.5 values the data's skills, 1.0 the best skill in the data", low=0.0, high=1.0)
    policy: str = setting(
        "gaussian",
        "the high level: a Gaussian over skills, of a spread that depends on the state",
        choices=("gaussian",),
    )
    prior_weight: float = setting(
        0.1, "weight of KL(high level || the skills' prior): larger stays nearer to the data", low=0.0
    )
    skills: str = setting("", "a run of algo=skills; empty: one is trained first", place=True)
    skills_id: str = setting("", "which one that is", filled=True)
    skill_steps: int | None = setting(
        None, "updates of the skills that are trained first; null: as many as this run has", low=1, place=True
    )
    skill_length: int = setting(10, "the same skills: steps that one lasts (H)", low=1)
    skill_dim: int = setting(10, "the same skills: its dimension (z)", low=1)
    skill_hidden: list[int] = setting(
        [128, 128, 128], "the same skills: widths of the hidden layers of decoder and prior", low=1
    )
    recurrent_width: int = setting(128, "the same skills: width of the encoder's GRU", low=1)
    kl_weight: float = setting(1e-2, "the same skills: weight of KL(q(z | actions) || N(0, I))", low=0.0, shared=True)
    skill_learning_rate: float = setting(1e-3, "the same skills: learning rate", low=0.0, shared=True)


@register("algo", "skill_iql")
class SkillIQL(OverSkills, Algorithm[SkillIQLConfig]):
    """IQL whose actions are skills of H steps: V(s), Q(s, z), and a policy over z that imitates the data's, weighted by
    advantage, and is kept near the skills' prior. A transition is H steps: the sum of their rewards, and discount**H of
    what follows.

    z is drawn from q(z | the H actions) at each update. When it acts, it holds a skill for H steps, in which the
    skills' decoder, given the step within the skill, chooses the actions. The skills are a run of their own that comes
    first (`algo=skills`): one serves all seeds, all settings of the high level, and a resumed run, and no update has to
    decide whether it is the skills' turn.
    """

    traits = Traits(targets=("critic",), n_step=False)  # Q is of skills, not of actions: it has no critic_modules

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        c = config.algo
        steps = c.skill_steps or config.steps
        return {"skills": Requirement("skills", _skill_settings(c), steps=steps, label="skills", check=check_skills)}

    @classmethod
    def fit_config(cls, config: SkillIQLConfig, dataset: Dataset, grid: Grid = None) -> SkillIQLConfig:
        explicit, config = bool(config.value_range), super().fit_config(config, dataset, grid)
        if config.value_range and not explicit and not config.discount_within:
            # of rewards of one sign, sums that are discounted once in H steps are larger by this at most
            length = config.skills_settings.get("skill_length", config.skill_length)
            factor = max(float(x) for x in (grid or {}).get("discount", [config.discount])) ** (1 - length)
            config = dataclasses.replace(config, value_range=[factor * x for x in config.value_range])
        return config

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        settings = _skill_settings(c)  # read in any case: what the skills depend on cannot be in a grid
        self.take_skills(settings)
        high = self.make_high(dropout=c.dropout)
        self.value = Value(c, s)
        self.critic = self.critic_of(s.observation_dim, self.width)
        return {"value": self.value.network, "actor": high, "critic": self.critic.network}

    def extra(self, params: dict[str, Params]) -> Tree:
        """The skills, which act but do not learn."""
        run = self.pretrained.get("skills")
        skills = (run.state if run else self.skills.init(0)).params["skills"]  # a policy's file has its own
        return {"skills": skills}

    def sampler(self) -> Sampler:
        return SegmentSampler(self.length, extra_columns=self.encoded)

    def encoded(self, dataset: Dataset) -> dict[str, Tensor]:
        """q(z | actions) of the skill that begins at each row."""
        run = self.pretrained["skills"]
        mean, log_std = run.algorithm.of_dataset(run.state.params["skills"], dataset)
        return {MEAN: mean, LOG_STD: log_std}

    def one_step(self, batch: Batch, key: Tensor) -> Batch:
        """Segments as transitions whose action is a skill."""
        actions = draw((batch[MEAN], batch[LOG_STD]), key)
        return {**batch, "actions": actions, "rewards": self.reward_of(batch["rewards"])}

    def play(
        self, state: TrainState, observations: Tensor, skill: Tensor, step: Tensor, key: Tensor, explore: bool
    ) -> Tensor:
        """Actions of the decoder, which has no learnt spread of its own: greedy, but for discrete ones that explore."""
        inputs, decoder = self.skills.inputs(observations, skill, step), self.skills.policy
        actions = self.skills.decode(state.extra["skills"], inputs)
        return decoder.sample(actions, key) if explore and self.spec.discrete else decoder.mode(actions)

    def value_loss(self, value: Params, state: TrainState, batch: Batch, q: Values) -> Loss:
        """E |tau - 1(Q - V < 0)| (Q - V)^2 (IQL's equation 5)."""
        return expectile_loss(self.value, value, batch, q, self.config.expectile)

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E (sum of H rewards + gamma^H V(s_{t+H}) - Q(s, z))^2."""
        next_v = self.value(state.params["value"], batch["next_observations"])
        target = self.critic.td_target(batch, next_v, self.config.discount**self.length)
        return self.critic.loss(critic, batch, target, key)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, q: Tensor, key: Tensor) -> Loss:
        """-E min(exp(beta (Q - V)), cap) log pi(z|s) (IQL's equation 7) + prior_weight KL(pi || the skills' prior)."""
        c, observations = self.config, batch["observations"]
        advantage = q - self.value(state.params["value"], observations).mean
        weight = losses.advantage_weight(advantage, c.temperature, c.max_weight)
        dist = self.apply("actor", actor, observations, key)
        kl = gaussian_kl(dist, self.skills.prior(state.extra["skills"], observations)).mean()
        loss = (weight * self.policy.bc_loss(dist, batch["actions"])).mean() + c.prior_weight * kl
        return loss, {
            "actor/loss": loss,
            "actor/advantage": advantage.mean(),
            "actor/weight": weight.mean(),
            "actor/prior_kl": kl,
        }

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        key, action_key = rng.split(key)
        batch = self.one_step(batch, action_key)
        q = self.critic.min_q(self.critic.target_critics(state, key), batch["observations"], batch["actions"])
        state, value = self.descend(state, "value", self.value_loss, batch, q)
        state, actor = self.descend(state, "actor", self.actor_loss, batch, q.mean, key)
        state, critic = self.descend(state, "critic", self.critic_loss, batch, key)
        state = self.critic.regularised(state)
        return self.polyak(state, "critic"), {**value, **actor, **critic}


def check_skills(run: Pretrained) -> None:
    """Raise UserError for a run of another algorithm."""
    if run.settings["name"] != "skills":
        raise UserError(f"algo.skills: a run of {run.settings['name']} is none of algo=skills")


def _skill_settings(config: SkillIQLConfig) -> dict[str, Any]:
    """Settings of the skills that are trained first."""
    c = config
    settings = {name: getattr(c, name) for name in ("skill_length", "skill_dim", "kl_weight", "recurrent_width")}
    return {**settings, "hidden": list(c.skill_hidden), "batch_size": 128, "learning_rate": c.skill_learning_rate}
