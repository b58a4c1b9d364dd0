"""Settings of an ensemble of dynamics models."""

from __future__ import annotations

from dataclasses import dataclass

from offrl.nn.mlp import ACTIVATIONS
from offrl.settings.field import setting


@dataclass
class HeldOutSettings:
    """Settings of the data that a model is judged by, and of what it takes from that or from the environment."""

    held_out: int = setting(1000, "random transitions for the held-out error of members, at most a fifth of all", low=1)
    test_share: float = setting(
        0.05, "share of the episodes that are kept apart for the report; 0: fit to all", low=0.0, high=0.5, shared=True
    )
    reward: str = setting("learned", "learned; auto: the environment's own where it is known; or a rule's name")
    calibrated: bool = setting(
        False, "rollouts use standard deviations scaled so that held-out intervals cover what they should"
    )


@dataclass
class DynamicsSettings(HeldOutSettings):
    """Settings of an ensemble of dynamics models; the defaults are MOPO's and its successors'."""

    name: str = "dynamics"
    members: int = setting(7, "models in the ensemble", low=1)
    elites: int = setting(5, "how many of them, those with the smallest held-out error, rollouts draw from", low=1)
    hidden: list[int] = setting([200, 200, 200, 200], "widths of the hidden layers", low=1)
    activation: str = setting("silu", "between layers", choices=tuple(ACTIVATIONS))
    residual: bool = setting(False, "hidden layers of equal width add their input")
    delta: bool = setting(True, "predict the change of the observation, not the next one itself")
    history: int = setting(1, "so many observations and actions, the last ones, are the input", low=1)
    loss: str = setting(
        "likelihood",
        "likelihood: Gaussian, with a learnt variance; squared: the mean alone; value_gradient: squared, weighted by "
        "how steeply a trained value changes there (VaGraM; value_run= names the run)",
        choices=("likelihood", "squared", "value_gradient"),
    )
    value_run: str = setting("", "loss=value_gradient: a run whose critics say what matters", place=True)
    value_run_id: str = setting("", "which critics those are", filled=True)
    learning_rate: float = setting(1e-3, "Adam's learning rate", low=0.0)
    batch_size: int = setting(256, "transitions in a batch of each member", low=1)
    weight_decay: list[float] = setting(
        [2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4], "of each layer, part of the loss; stretched to fit", low=0.0
    )
    bounds_weight: float = setting(0.01, "weight of the distance between the bounds of the log variance", low=0.0)
    patience: int = setting(5, "epochs in a row without a better member, after which training ends", low=1)
    tolerance: float = setting(0.01, "a member is better when its held-out error fell by more than this share", low=0.0)
    max_epochs: int = setting(0, "training ends after so many epochs; 0: when no member gets better", low=0)
    termination: str = setting(
        "auto", "auto: the environment's own rule where it is known, else learned; never; or a rule's name"
    )
    epoch: int | None = setting(
        None, "updates of an epoch; null: once through the data, or 250 where that is more", low=1
    )
