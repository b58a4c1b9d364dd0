"""Critics and V as parts that an algorithm has. docs/critics.md says what each setting does and how the heads meet each
objective.
"""

from offrl.families.critics.critic import Critic, WithCritic
from offrl.families.critics.value import (
    ActorScheduleSettings,
    CriticSettings,
    Objective,
    RiskSettings,
    Target,
    Value,
    Values,
    epsilon_field,
    make_value_head,
)

__all__ = [
    "ActorScheduleSettings",
    "Critic",
    "CriticSettings",
    "Objective",
    "RiskSettings",
    "Target",
    "Value",
    "Values",
    "WithCritic",
    "epsilon_field",
    "make_value_head",
]
