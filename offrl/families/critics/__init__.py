"""Critics and V as parts that an algorithm has. docs/critics.md says what each setting does and how the heads meet each
objective.
"""

from offrl.families.critics.constraint import Constraint, ConstraintSettings, InSampleConstraint
from offrl.families.critics.costs import CostCritic, CostSettings, LimitSettings, even_cost, fit_limit
from offrl.families.critics.critic import Critic
from offrl.families.critics.representation import RepresentationSettings
from offrl.families.critics.scaled import ScaledRewards, blocks, check_layers, largest
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
from offrl.families.critics.with_critic import WithCritic

__all__ = [
    "ActorScheduleSettings",
    "Constraint",
    "ConstraintSettings",
    "CostCritic",
    "CostSettings",
    "Critic",
    "CriticSettings",
    "InSampleConstraint",
    "LimitSettings",
    "Objective",
    "RepresentationSettings",
    "RiskSettings",
    "ScaledRewards",
    "Target",
    "Value",
    "Values",
    "WithCritic",
    "blocks",
    "check_layers",
    "epsilon_field",
    "even_cost",
    "fit_limit",
    "largest",
    "make_value_head",
]
