"""What algorithms over skills have in common: the skills, which a run of their own learnt from data, a policy over them
and critics that judge them, and an actor that holds a skill for H steps.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from offrl import registry, rng
from offrl.algorithm import Actor, Carry, Params, TrainState, Tree
from offrl.data.samplers.decisions import SKILLS, DecisionSampler
from offrl.families.critics import Critic, WithCritic
from offrl.nn.policies import Gaussian
from offrl.nn.representations.latent import Latent
from offrl.settings.field import setting


@dataclass
class SkillSettings:
    """Settings of algorithms over skills."""

    discount_within: bool = setting(
        False, "rewards within a skill are discounted too; false, as published: they are summed"
    )
    skills_settings: dict[str, Any] = setting({}, "the settings of the skills", filled=True)


class SkillCarry(NamedTuple):
    """The memory of E episodes: the skill [E, Z] that each is in, and its steps so far [E] int64."""

    skill: Tensor
    t: Tensor


class SkillActor(Actor):
    """Policy that chooses a skill every H steps; in between the low level acts."""

    algorithm: Any  # an `OverSkills`
    resettable = True

    def start(self, episodes: int) -> Carry:
        device = self.state.step.device
        skill = torch.zeros(episodes, self.algorithm.width, device=device)
        return SkillCarry(skill, torch.zeros(episodes, dtype=torch.int64, device=device))

    @staticmethod
    def columns(carry: Carry) -> dict[str, Tensor]:
        return {SKILLS: carry.skill}

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        """Actions of the current skills, and the next carry. With `explore` the skill is drawn."""
        skill_key, action_key = rng.split(key)
        step = carry.t % self.algorithm.length
        # computed at every step and chosen at some, for episodes are at steps of their own
        skill = self.choose(self.apply("actor", observations), skill_key, explore)
        skill = torch.where((step == 0).unsqueeze(-1), skill, carry.skill)
        actions = self.algorithm.play(self.state, observations, skill, step, action_key, explore)
        return actions, SkillCarry(skill, carry.t + 1)


class OverSkills(WithCritic):
    """Parts of algorithms over skills; modules "actor", the policy over them, and "critic", which judges them."""

    config: Any
    spec: Any
    actor_class: ClassVar[type[Actor]] = SkillActor

    def take_skills(self, settings: Mapping[str, Any] | None = None) -> None:
        """Make the algorithm of the skills, and read their length H and width Z. settings: its own, where a run's are
        not filled in.
        """
        kind = registry.get("algo", "skills")
        self.skills: Any = kind(kind.Config(**(self.config.skills_settings or settings or {})), self.spec)
        self.length, self.width = int(self.skills.config.skill_length), int(self.skills.config.skill_dim)

    def make_high(self, **form: Any) -> Latent:
        """The policy over skills."""
        c = self.config
        return Latent(self.spec.observation_dim, self.width, c.hidden, activation=c.activation, init=c.init, **form)

    def critic_of(self, inputs: int, width: int) -> Critic:
        """Critics of vectors [B, width], such as skills, at vectors [B, inputs]."""
        vectors = {"observation_shape": (inputs,), "action_dim": width, "discrete": False, "num_actions": 0}
        return Critic(self.config, dataclasses.replace(self.spec, **vectors))

    def reward_of(self, rewards: Tensor) -> Tensor:
        """The rewards [B] of skills with rewards [B, H] of their steps: the sum, with `discount_within` discounted."""
        if self.config.discount_within:
            rewards = rewards * self.config.discount ** torch.arange(self.length, device=rewards.device)
        return rewards.sum(-1)

    @abstractmethod
    def play(
        self, state: TrainState, observations: Tensor, skill: Tensor, step: Tensor, key: Tensor, explore: bool
    ) -> Tensor:
        """Actions at steps [E] of skills [E, Z]."""


class RefinesSkills(OverSkills):
    """Parts of algorithms whose low level learns too, from what is played; further modules "low", the policy within a
    skill, which begins as the decoder, and "low_critic".
    """

    def high_modules(self) -> dict[str, nn.Module]:
        """The policy over skills and its critics, as a run has them."""
        self.take_skills()
        self.critic = self.critic_of(self.spec.observation_dim, self.width)
        return {"actor": self.make_high(), "critic": self.critic.network}

    def low_modules(self) -> dict[str, nn.Module]:
        """A policy of the decoder's form with a learnt standard deviation, and critics of its inputs and actions."""
        inputs, actions = self.spec.observation_dim + self.width + self.length, self.spec.action_dim
        self.low = Gaussian(inputs, actions, self.skills.config.hidden, bounded=False)
        nn.init.constant_(self.low.log_std, self.config.low_log_std)
        self.low_critic = self.critic_of(inputs, actions)
        return {"low": self.low, "low_critic": self.low_critic.network}

    def extra(self, params: dict[str, Params]) -> Tree:
        """The skills, whose prior and decoder stay as they are."""
        return {"skills": self.skills.init(0).params["skills"]}

    def after(self, run: TrainState, fresh: TrainState) -> TrainState:
        """The first state behind that of a run of skill_iql: its policy over skills, their critics, and its decoder as
        the low level go on; the rest begins anew.
        """
        decoder, skills = "decoder.", run.extra["skills"].items()
        low = {name.removeprefix(decoder): value.clone() for name, value in skills if name.startswith(decoder)}
        high = {name: run.params[name] for name in ("actor", "critic")}
        params = {**fresh.params, **high, "low": {**fresh.params["low"], **low}}
        target = {**fresh.target, "critic": run.target["critic"]}
        return fresh._replace(params=params, target=target, extra=run.extra, step=run.step, key=run.key)

    def sampler(self) -> DecisionSampler:
        return DecisionSampler(self.length, self.width)
