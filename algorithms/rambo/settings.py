"""RAMBO's settings, the runs that it builds on, and the parameters that it takes over from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.optim import Params
from offrl.pretrained import Requirement
from offrl.settings.field import setting
from offrl.world_models.dynamics import DynamicsSettings
from offrl.world_models.model import required
from offrl.world_models.model_rollouts import ModelBasedSettings
from offrl.world_models.uncertainty import names

if TYPE_CHECKING:
    from offrl.settings.train import TrainConfig

MODEL_SETTINGS: dict[str, Any] = {
    "learning_rate": 3e-4,
    "patience": 10,
    "bounds_weight": 0.001,
}  # of the model that is trained first


@dataclass
class RAMBOConfig(ModelBasedSettings):
    """Settings of RAMBO; the defaults are OfflineRL-Kit's for D4RL's HalfCheetah."""

    name: str = "rambo"
    max_entropy_weight: float | None = setting(
        1.0, "the entropy's weight counts as at most this; null: as it is", low=0.0
    )
    real_share: float = setting(
        0.5, "share of each batch that is the data's, not imagined", low=0.0, high=1.0, structural=True
    )
    rollout_every: int = setting(250, "updates between two times", low=1)
    rollout_retain: int = setting(20, "imagined transitions of so many times are kept", low=1)
    uncertainty: str = setting("none", "how uncertain the model is of a step", choices=("none", *names()))
    random_rollouts: bool = setting(False, "rollouts choose uniform actions, not the policy's (most of AntMaze)")
    adversarial_weight: float = setting(
        3e-4, "weight of what lowers the policy's value, beside the model's likelihood (lambda)", low=0.0
    )
    model_learning_rate: float = setting(
        3e-4, "Adam's, for the model while the policy learns; 0: it stays as it is", low=0.0
    )
    bounds_weight: float = setting(
        0.001, "weight of the distance between the bounds of the log variance, meanwhile", low=0.0
    )
    behaviour: str = setting(
        "", "a trained run of bc that the actor begins as; empty: one is trained first", place=True
    )
    behaviour_id: str = setting("", "which one that is", filled=True)
    clone_epochs: int = setting(50, "times through the data of that training; 0: the actor begins as it is", low=0)
    clone_learning_rate: float = setting(1e-4, "Adam's, meanwhile", low=0.0, shared=True)
    world_model_shape: list[int] = setting(
        [], "the world model's members, history, 1 where it learns terminations, hidden widths", place=True, filled=True
    )


def requirements(config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
    """The world model, and a clone of the data's behaviour by least squares between its samples and the data's
    actions.
    """
    c = config.algo
    runs = {"world_model": required({**MODEL_SETTINGS, "members": c.members})}
    if not c.clone_epochs and not c.behaviour:
        return runs
    settings = {
        "policy": "tanh_gaussian",
        "loss": "sample_error",
        "hidden": list(c.hidden),
        "init": c.init,
        "batch_size": c.batch_size,
        "learning_rate": c.clone_learning_rate,
    }
    steps = math.ceil(c.clone_epochs * len(dataset.transition_rows()) / c.batch_size)
    return {**runs, "behaviour": Requirement("bc", settings, steps=steps, label="behaviour-bc")}


def with_shape(config: TrainConfig, model: Any) -> TrainConfig:
    """The settings with the shape of the model that is trained on. Raises UserError for one that has no likelihood."""
    loss = getattr(model.config, "loss", "")
    if model.kind != "ensemble" or loss != "likelihood":
        description = f"one trained with loss={loss}" if model.kind == "ensemble" else f"of the kind '{model.kind}'"
        raise UserError(
            f"world_model={config.algo.world_model} is {description}; rambo goes on training an ensemble by its "
            "likelihood (algo=dynamics "
            "with loss=likelihood), or leave world_model= out"
        )
    shape = [model.members, model.history, int(model.learns_ending), *model.config.hidden]
    return dataclasses.replace(config, algo=dataclasses.replace(config.algo, world_model_shape=shape))


def model_shape(config: RAMBOConfig) -> list[int]:
    """The model's members, history, whether it learns terminations, and widths: as found, or those of one that would be
    trained.
    """
    default = DynamicsSettings(**MODEL_SETTINGS)
    return config.world_model_shape or [default.members, default.history, 0, *default.hidden]


def first_params(pretrained: Mapping[str, Any], params: Mapping[str, Params]) -> dict[str, Params]:
    """Initial `params` with the actor of the clone and the networks of the trained model, where there are such.

    Raises UserError where the clone's network is another.
    """
    params = dict(params)
    if "behaviour" in pretrained:
        clone = pretrained["behaviour"].state.params.get("actor", {})
        if {name: x.shape for name, x in clone.items()} != {name: x.shape for name, x in params["actor"].items()}:
            raise UserError(
                "algo.behaviour: its policy's network is not this one's: name a run of bc with "
                "algo.policy=tanh_gaussian and the same "
                "algo.hidden, or leave it out"
            )
        params["actor"] = {name: clone[name].clone() for name in params["actor"]}
    if "world_model" in pretrained:
        model_params = pretrained["world_model"].tree["params"]
        params["dynamics"] = {
            name: model_params[name].clone() for name in params["dynamics"]
        }  # replicas must not share what they train
    return params
