"""Settings of BREEZE."""

from __future__ import annotations

from dataclasses import dataclass

from offrl.families.forward_backward import ZeroShotSettings
from offrl.settings.field import setting


@dataclass
class BreezeConfig(ZeroShotSettings):
    """Settings of BREEZE; the defaults are those of its code, which are those for ExORL's quadruped."""

    name: str = "breeze"
    orthonormality: float = setting(
        10.0, "weight of the loss that keeps B's coordinates orthonormal over the data", low=0.0
    )
    value_learning_rate: float = setting(3e-4, "V's", low=0.0)
    weight_decay: float = setting(0.03, "AdamW's decay of F, B and V", low=0.0, structural=True)
    attention: bool = setting(
        True, "F and B by attention; false: the networks of fb, of inputs_hidden, hidden and backward_hidden"
    )
    hidden: list[int] = setting(
        [256], "widths of F's layers after its inputs were joined (attention=true: linear ones)", low=1
    )
    width: int = setting(256, "attention=true: B's width", low=1)
    layers: int = setting(2, "attention=true: layers of B's encoder, and of its decoder", low=1)
    feed_forward: int = setting(2048, "attention=true: width inside B's layers", low=1)
    value_hidden: list[int] = setting([512, 512], "widths of V's hidden layers", low=1)
    actor_hidden: list[int] = setting([1024, 1024, 1024], "widths of the actor's residual blocks", low=1)
    denoising_steps: int = setting(10, "steps from noise to an action (T)", low=1, high=1000)
    embedding: int = setting(64, "width of the embedding of a denoising step", low=4)
    actor_polyak: float = setting(
        1e-3, "rate at which the averaged actor, which acts, follows the trained one; at first 9 / (10 + updates), "
              "where that is more",
        low=0.0, high=1.0,
    )  # fmt: skip
    expectile: float = setting(
        0.99, "V is this expectile of Q over the data's actions (kitchen 0.7)", low=0.0, high=1.0
    )
    reward_weight: float = setting(
        1e-3, "omega: weight of the loss that regresses F . z on the implicit reward", low=0.0
    )
    temperature: float = setting(
        0.05, "alpha: multiplies the advantage in the exponent of imitation's weights; larger is greedier", low=0.0
    )
    samples: int = setting(
        1, "K_train: actions drawn at s', of which the one of the largest Q is taken (walker 9)", low=1
    )
    data_share: float = setting(
        0.0, "rho: share of the next actions that are the data's own (walker 0.1)", low=0.0, high=1.0, structural=True
    )
    acting_samples: int = setting(
        64,
        "K_eval: actions drawn when acting, of which the one of the largest Q is taken",
        low=1,
        high=100_000,
        acting=True,
    )
