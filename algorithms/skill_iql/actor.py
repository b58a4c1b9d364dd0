"""Acting by skills: the high level chooses one every H steps, and the skills' decoder acts in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.actor import Actor, Carry

if TYPE_CHECKING:
    from offrl.algorithms.skill_iql.algorithm import SkillIQL


@dataclass(frozen=True)
class SkillCarry:
    """The memory of E episodes at the same step t: the skill [E, Z] that each is in."""

    skill: Tensor
    t: int = 0


pytree.register_dataclass(SkillCarry)


class SkillActor(Actor):
    """Policy that chooses a skill every H steps; the decoder acts in between."""

    algorithm: SkillIQL

    def start(self, episodes: int) -> Carry:
        return SkillCarry(torch.zeros(episodes, self.algorithm.width))

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        """Actions of the current skills, and the next carry.

        With `explore` the skill is drawn, and its actions are not: the decoder has no learnt spread of its own
        (discrete actions: they are drawn too).
        """
        skill_key, action_key = rng.split(key)
        skill, step, skills = carry.skill, carry.t % self.algorithm.length, self.algorithm.skills
        if step == 0:
            skill = self.choose(self.apply("actor", observations), skill_key, explore)
        actions, decoder = skills.decode(self.state.extra["skills"], observations, skill, step), skills.policy
        stochastic = explore and self.algorithm.spec.discrete
        return decoder.sample(actions, action_key) if stochastic else decoder.mode(actions), SkillCarry(
            skill, carry.t + 1
        )
