"""Behaviour cloning; with `dataset.top_fraction` < 1 it is %BC, cloning the best trajectories only
(`configs/algo/percent_bc.yaml`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Algorithm, Batch, Loss, Params, TrainState, Traits, Update
from offrl.nn import make_policy
from offrl.nn.custom.networks import ActorNetworkSettings
from offrl.registry import register
from offrl.settings.field import setting

NOISE = 1_000  # folded into the key of samples; dropout folds in the numbers of layers


@dataclass
class BCConfig(ActorNetworkSettings):
    """Settings of BC."""

    name: str = "bc"
    learning_rate: float = setting(3e-4, "Adam's learning rate", low=0.0)
    batch_size: int = setting(256, "transitions in a batch", low=1)
    hidden: list[int] = setting([256, 256], "widths of the hidden layers", low=1)
    policy: str = setting(
        "deterministic",
        "deterministic: squared error; gaussian, tanh_gaussian: negative log-likelihood (discrete actions: always "
        "categorical)",
        choices=("deterministic", "gaussian", "tanh_gaussian"),
    )
    loss: str = setting(
        "likelihood",
        "of a stochastic policy: its negative log-likelihood, or the squared error of a reparametrised sample",
        choices=("likelihood", "sample_error"),
    )
    dropout: float = setting(0.0, "dropout rate of the policy", low=0.0, high=0.99, structural=True)
    init: str = setting("torch", "initial weights: torch (uniform) or orthogonal", choices=("torch", "orthogonal"))


@register("algo", "bc")
class BC(Algorithm[BCConfig]):
    """Imitate the data's actions by squared error, the mean over batch and dimensions, or by the likelihood of a
    stochastic policy.
    """

    traits = Traits(observations="encoded")

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        return {
            "actor": make_policy(
                c.policy, s.observation_dim, s.action_dim, s.num_actions, c.hidden, dropout=c.dropout, init=c.init
            )
        }

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |pi(s) - a|^2, -E log pi(a|s), or with loss=sample_error E |a' - a|^2, a' ~ pi(.|s)."""
        dist = self.apply("actor", actor, batch["observations"], key)
        if self.config.loss == "sample_error" and not self.spec.discrete:
            loss = (self.policy.sample(dist, rng.fold_in(key, NOISE)) - batch["actions"]).square().mean()
        else:
            loss = self.policy.bc_loss(dist, batch["actions"]).mean()
        return loss, {"actor/loss": loss}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return self.descend(state, "actor", self.actor_loss, batch, key)
