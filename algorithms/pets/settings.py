"""Settings of PETS: the model's, the planner's, and those that a finished model brings with it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from offrl.errors import UserError
from offrl.settings.field import defaults, setting
from offrl.world_models import uncertainty
from offrl.world_models.dynamics import DynamicsSettings
from offrl.world_models.model import Trained
from offrl.world_models.planning import PlanSettings

MODEL = {f.name for f in dataclasses.fields(DynamicsSettings)} - {"name"}
FREE = {"reward", "calibrated"}  # of these, the settings that may differ from those of a finished model


@dataclass
@defaults(plan_horizon=15, plan_population=200, plan_elites=20, plan_particles=5)
class PETSConfig(PlanSettings, DynamicsSettings):
    """Settings of PETS. The model's are those of algo=dynamics, the planner's PETS's but for fewer plans, particles and
    steps.
    """

    name: str = "pets"
    # PETS: 30, 500, 50 and 20, that is 1.5 million predictions before each action, not 75,000
    plan_members: str = setting(
        "fixed", "fixed: a particle keeps one elite of the model for the whole plan (TSinf); drawn: it gets another at "
                 "each step (TS1)",
        choices=("fixed", "drawn"), acting=True
    )  # fmt: skip
    plan_discount: float = setting(1.0, "of the rewards of a plan", low=0.0, high=1.0, acting=True)
    penalty: float = setting(
        0.0,
        "times the uncertainty, is taken off each reward of a plan (MOPO's lambda); above 0 all members are asked",
        low=0.0,
        acting=True,
    )
    uncertainty: str = setting(
        "aleatoric", "penalty: how uncertain the model is of a step", choices=uncertainty.names()
    )
    range_margin: float = setting(
        1.0,
        "plans' observations are cut off where they leave the data's range by so many times its width",
        low=0.0,
        acting=True,
    )
    world_model: str = setting(
        "", "a trained model: a run of algo=dynamics, or a file in its models/; empty: it is trained", place=True
    )
    world_model_id: str = setting("", "which model that is", filled=True)


def with_model(config: PETSConfig, world_model: Trained) -> PETSConfig:
    """`config` with the settings of the model that it names. Raises UserError for one that cannot be planned in, and
    for settings of the model's that are given beside it."""
    if world_model.model.kind != "ensemble":
        kind = world_model.meta["model"]
        raise UserError(
            f"algo.world_model={config.world_model} is a model of kind {kind}; algo=pets plans in those of "
            "algo=dynamics"
        )
    default, model = PETSConfig(), world_model.model.config
    values: dict[str, Any] = {}
    for name in sorted(MODEL):
        value, model_value = getattr(config, name), getattr(model, name)
        changed = value != getattr(default, name)
        if changed and value != model_value and name not in FREE:
            raise UserError(
                f"algo.{name}={value}, but algo.world_model={config.world_model} is trained and has {model_value}: "
                "leave the first out"
            )
        values[name] = value if changed and name in FREE else model_value
    return dataclasses.replace(config, **values)
