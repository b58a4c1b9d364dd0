"""IQL over skills: the sampler of trajectory segments, the policy that acts by skills, and the algorithm that learns
it.
"""

from offrl.algorithms.skill_iql.algorithm import SkillIQL, SkillIQLConfig

__all__ = ["SkillIQL", "SkillIQLConfig"]
