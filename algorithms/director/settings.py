"""Settings of Director."""

from __future__ import annotations

from dataclasses import dataclass

from offrl.errors import UserError
from offrl.settings.field import defaults, setting
from offrl.world_models.recurrent.settings import LatentConfig


@dataclass
@defaults(horizon=16, discount=0.99)
class DirectorConfig(LatentConfig):
    """Settings of Director: those of the model are RSSM's, those of the hierarchy the authors'."""

    name: str = "director"
    goal_steps: int = setting(8, "steps for which the worker pursues a goal; horizon is a multiple of it", low=1)
    goal_groups: int = setting(8, "categorical variables of a goal's code", low=1)
    goal_classes: int = setting(8, "values of each of them", low=2)
    unimix: float = setting(
        0.01,
        "share of the uniform distribution in each categorical, of latent states and of codes",
        low=0.0,
        high=1.0,
    )
    goal_kl: float = setting(
        10.0, "KL divergence of codes from the uniform distribution, in nats, which its weight aims at", low=0.0
    )
    entropy_share: float = setting(
        0.5, "share of the largest entropy that the weights of both policies' entropies aim at", low=0.0, high=1.0
    )
    exploration_weight: float = setting(
        0.0,
        "weight of the manager's exploration reward, the error of the goal autoencoder, beside the task's (Director: "
        "0.1); below 0 it keeps to what the data have",
    )


def check_hierarchy(config: DirectorConfig) -> None:
    """Raise UserError where imagination is not made of whole goals."""
    if config.horizon % config.goal_steps:
        raise UserError(
            f"algo.horizon={config.horizon} is no multiple of algo.goal_steps={config.goal_steps}: an imagined goal is "
            "pursued to its end"
        )
