"""Skill-Critic: "Refining Learned Skills for Hierarchical Reinforcement Learning" (Hao et al., 2023, arXiv 2306.08388).

`offrl finetune RUN env=ID` trains it on from a run of `algo=skill_iql` (`offrl.finetuning.expansion`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import (
    Algorithm,
    Batch,
    Dataset,
    Loss,
    Params,
    TrainState,
    Traits,
    Update,
    merged,
)
from offrl.data.samplers.decisions import DECISION, POSITION, SKILLS
from offrl.data.samplers.transitions import SPAN
from offrl.errors import UserError
from offrl.families.critics import ActorScheduleSettings, Critic, CriticSettings, Values
from offrl.families.sac import LogWeight
from offrl.families.skills.levels import RefinesSkills, SkillSettings
from offrl.nn.policies import Policy
from offrl.nn.representations.latent import gaussian_kl
from offrl.registry import register
from offrl.settings.field import setting

# modules of both levels; a level's weight of its divergence is LEVEL_weight
POLICY, CRITIC = {"high": "actor", "low": "low"}, {"high": "critic", "low": "low_critic"}
HOW = "skill_critic goes on with the policies of a run of skill_iql: offrl finetune RUN env=ID"


@dataclass
class SkillCriticConfig(SkillSettings, ActorScheduleSettings, CriticSettings):
    """Settings of Skill-Critic: those of the run, and the authors' for their mazes."""

    name: str = "skill_critic"
    train_low: bool = setting(
        True,
        "whether the low level learns; false: it stays the decoder, and acts greedily (the authors' first stage)",
    )
    high_divergence: float = setting(
        1.0, "KL(high level || the skills' prior), in nats, at which its learnt weight holds it", low=0.0
    )
    low_divergence: float = setting(
        80.0, "KL(low level || decoder), in nats, at which its learnt weight holds it (fetch: 100)", low=0.0
    )
    divergence_weight: float = setting(1.0, "alpha of either level: the weight of its KL at first", low=1e-8)
    low_log_std: float = setting(
        -3.0,
        "log standard deviation of the decoder's actions in the KL, and of the low level's at first",
        low=-5.0,
        high=2.0,
        shared=True,
    )


@register("algo", "skill_critic")
class SkillCritic(RefinesSkills, Algorithm[SkillCriticConfig]):
    """Two soft actor-critics: a policy over skills of H steps with Q_z(s, z), held near the skills' prior, and one over
    actions within a skill with Q_a(s, z, k, a), k the step, which begins as the skills' decoder and is held near it.

    Modules: actor (the high level), critic (Q_z), high_weight, low, low_critic (Q_a), low_weight.
    """

    traits = Traits(
        targets=("critic", "low_critic"), policy_modules=("actor", "low"), actions=("continuous",), n_step=False
    )

    @classmethod
    def requires(cls, config: Any, dataset: Dataset) -> dict[str, Any]:
        raise UserError(HOW)

    def modules(self) -> dict[str, nn.Module]:
        weights = {f"{level}_weight": LogWeight(self.config.divergence_weight) for level in POLICY}
        return {**self.high_modules(), **self.low_modules(), **weights}

    def play(
        self, state: TrainState, observations: Tensor, skill: Tensor, step: Tensor, key: Tensor, explore: bool
    ) -> Tensor:
        dist = self.apply("low", state.params["low"], self.skills.inputs(observations, skill, step))
        return self.low.sample(dist, key) if explore and self.config.train_low else self.low.mode(dist)

    # ---- both levels: a policy over y at x, skills at observations or actions at a low level's inputs, with critics

    def judge(self, level: str) -> Critic:
        """The critics of a level."""
        return self.critic if level == "high" else self.low_critic

    def sample(self, level: str, policy: Params, state: TrainState, x: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Of a policy's parameters: y [B, ...], and its divergence [B] from the skills' prior or decoder."""
        skills, network = state.extra["skills"], cast(Policy, self.networks[POLICY[level]])
        dist = self.apply(POLICY[level], policy, x)
        prior = self.skills.prior(skills, x) if level == "high" else self.skills.decode(skills, x)
        if level == "low":
            prior = (*prior, torch.full_like(prior[0], self.config.low_log_std))
        return network.sample(dist, key), gaussian_kl(dist, prior)

    def penalty(self, level: str, state: TrainState, divergence: Tensor) -> Tensor:
        """alpha KL [B]."""
        return self.apply(f"{level}_weight", state.params[f"{level}_weight"]) * divergence

    def weight_loss(self, weight: Params, state: TrainState, level: str, divergence: Tensor) -> Loss:
        """alpha (target - KL): the weight of a level's divergence [B] grows while that is above its target."""
        c, alpha = self.config, self.apply(f"{level}_weight", weight)
        target = c.high_divergence if level == "high" else c.low_divergence
        return alpha * (target - divergence.mean()), {f"{level}/weight": alpha, f"{level}/kl": divergence.mean()}

    def policy_loss(self, policy: Params, state: TrainState, level: str, batch: Batch, key: Tensor) -> Loss:
        """E [alpha KL(pi(.|x) || prior(.|x)) - min_i Q_i(x, y)], y of pi."""
        x = batch["observations"]
        y, divergence = self.sample(level, policy, state, x, key)
        q = self.judge(level).min_q(state.params[CRITIC[level]], x, y).mean
        loss = (self.penalty(level, state, divergence) - q).mean()
        return loss, {f"{level}/loss": loss, f"{level}/q": q.mean()}

    def critic_loss(self, critic: Params, state: TrainState, level: str, batch: Batch, key: Tensor) -> Loss:
        """E (r + gamma^m U(s') - Q_i(x, y))^2, r the rewards of a skill's m <= H steps, or of one step."""
        judge, value = self.judge(level), Values(getattr(self, f"{level}_value")(state, batch, key))
        loss, metrics = judge.loss(critic, batch, judge.td_target(batch, value, batch["discount"]), key)
        return loss, {name.replace("critic", CRITIC[level]): x for name, x in metrics.items()}

    def high_value(self, state: TrainState, batch: Batch, key: Tensor) -> Tensor:
        """U(s') [B] = min Q_z'(s', z') - alpha_z KL(pi_z || the skills' prior), z' of pi_z."""
        x = batch["next_observations"]
        z, divergence = self.sample("high", state.params["actor"], state, x, key)
        return self.critic.min_q(self.critic.target_critics(state, key), x, z).mean - self.penalty(
            "high", state, divergence
        )

    def low_value(self, state: TrainState, batch: Batch, key: Tensor) -> Tensor:
        """U(s') [B] = (min Q_z'(s', z') where a skill z' of pi_z begins at s', else min Q_a'(s', z, k', a')) - alpha_a
        KL(pi_a || decoder), a' of pi_a.
        """
        skill_key, action_key = rng.split(key)
        observations, step = batch["next_observations"], (batch[POSITION] + 1) % self.length
        begins = step == 0
        z, _ = self.sample("high", state.params["actor"], state, observations, skill_key)
        x = self.skills.inputs(observations, torch.where(begins.unsqueeze(-1), z, batch[SKILLS]), step)
        actions, divergence = self.sample("low", state.params["low"], state, x, action_key)
        high = self.critic.min_q(self.critic.target_critics(state, key), observations, z).mean
        low = self.low_critic.min_q(state.target["low_critic"], x, actions).mean
        return torch.where(begins, high, low) - self.penalty("low", state, divergence)

    # ---- the update

    def batch_of(self, level: str, batch: Batch) -> Batch:
        """The batch of a level, of steps with their decisions: those decisions, or the steps at what the low level
        sees.
        """
        c = self.config
        if level == "low":
            x = self.skills.inputs(batch["observations"], batch[SKILLS], batch[POSITION])
            return {**batch, "observations": x, "discount": c.discount * torch.ones_like(batch["rewards"])}
        columns = {name: batch[DECISION + name] for name in ("observations", "next_observations", "masks")}
        amounts = {"rewards": self.reward_of(batch["step_rewards"]), "discount": c.discount ** batch[SPAN]}
        return {**columns, **amounts, "actions": batch[SKILLS]}

    def learn(self, state: TrainState, level: str, batch: Batch, key: Tensor) -> Update:
        """A step of a level's weight, then of its policy and critics from the state before both, then of targets."""
        batch, policy_key, critic_key = self.batch_of(level, batch), *rng.split(key)
        policy, critic = POLICY[level], CRITIC[level]
        _, divergence = self.sample(level, state.params[policy], state, batch["observations"], policy_key)
        state, weight = self.descend(state, f"{level}_weight", self.weight_loss, level, divergence)
        one, first = self.descend(state, policy, self.policy_loss, level, batch, policy_key)
        two, second = self.descend(state, critic, self.critic_loss, level, batch, critic_key)
        return self.polyak(self.critic.regularised(merged(state, one, two)), critic), {**weight, **first, **second}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        high_key, low_key = rng.split(key)
        state, metrics = self.learn(state, "high", batch, high_key)
        if not self.config.train_low:
            return state, metrics
        state, low = self.learn(state, "low", batch, low_key)
        return state, {**metrics, **low}
