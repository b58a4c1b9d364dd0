"""SimbaV2: "Hyperspherical Normalization for Scalable Deep Reinforcement Learning" (Lee et al., 2025, arXiv
2502.15280).

From data: `algo=simba_bc`, the authors' settings for it (`configs/algo/simba_bc.yaml`). In an environment:
`offrl finetune algo=simbav2 env=ID mixing=0 algo.reward_divisor=NUMBER`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Adam, Batch, Dataset, Loss, Params, TrainState, Update
from offrl.data.transforms.columns import returns_to_go
from offrl.data.value_range import value_range
from offrl.errors import UserError
from offrl.families.critics import Critic, ScaledRewards, blocks, check_layers, largest
from offrl.families.sac import LogWeight, SoftActorCritic, SoftSettings
from offrl.nn.sphere import SphereEnsemble, SphereTanhGaussian, projected
from offrl.registry import register
from offrl.settings.field import defaults, setting


@dataclass
@defaults(
    hidden=[128],
    critic_hidden=[512, 512],
    learning_rate=1e-4,
    discount=0.995,
    entropy_weight=0.01,
    target_entropy_scale=0.5,
    value_range=[-5.0, 5.0],
)
class SimbaV2Config(SoftSettings):
    """Settings of SimbaV2; the defaults are the authors' for environments whose episodes can end. Each entry of
    `hidden` and `critic_hidden` is a block.
    """

    name: str = "simbav2"
    value_head: str = setting("c51", "critics of a distribution over value_bins", choices=("c51",))
    init: str = setting("isometric", "initial weights: orthogonal, with columns of length 1", choices=("isometric",))
    bc_weight: float = setting(
        0.0, "weight of imitation, times the mean size of the critics' values (from data: 0.1)", low=0.0
    )
    reward_divisor: float | None = setting(
        None,
        "rewards are divided by this; null: found from the data, so that discounted returns fit into value_range "
        "(without data: so that a reward of 1 in every step does)",
        above=0.0,
    )
    decay_steps: int = setting(1_000_000, "updates in which all learning rates fall, linearly", low=1)
    decay_to: float = setting(
        0.5, "share of the learning rates that is left after decay_steps", low=0.0, high=1.0, structural=True
    )


class SphereCritic(Critic):
    """Critics with features and weights on the unit sphere."""

    def make_network(self, size: int, inputs: int, outputs: int, norm_first: bool) -> nn.Module:
        c = self.config
        return SphereEnsemble(size, inputs, *blocks(c.critic_hidden or c.hidden), outputs, c.activation)

    def regularised(self, state: TrainState) -> TrainState:
        """The critics' weights back on the sphere."""
        return on_sphere(state, "critic")


def on_sphere(state: TrainState, name: str) -> TrainState:
    """The state with the weights of a module back on the sphere."""
    return state._replace(params={**state.params, name: projected(state.params[name])})


@register("algo", "simbav2")
class SimbaV2(ScaledRewards, SoftActorCritic[SimbaV2Config]):
    """SAC with hyperspherical networks, critics of a distribution of returns and scaled rewards. Order of steps, the
    authors': actor, weight of the entropy, critics (with what both left), targets, whose weights are not projected.

    Deviations. The authors scale rewards by running statistics of the returns in play; here one number from the data
    stands for them, the same for the whole run (`reward_divisor`), which a run keeps when it learns on in an
    environment; without data it is a setting. Observations are normalised by the data's statistics, and by running ones
    of play where there are no data.
    """

    traits = replace(SoftActorCritic.traits, actions=("continuous",), own_encoders=False)
    fitted = "reward_divisor"
    entropy_loss = SoftActorCritic.linear_entropy_loss

    def modules(self) -> dict[str, nn.Module]:
        c = self.config
        check_layers(c)
        if c.reward_divisor is None and c.discount == 1.0:
            raise UserError("algo.discount=1 leaves returns without a bound: give algo.reward_divisor, or data")
        self.critic = SphereCritic(c, self.spec)
        return {"entropy": LogWeight(c.entropy_weight), "actor": self.make_actor(), "critic": self.critic.network}

    def make_actor(self) -> nn.Module:
        c, s = self.config, self.spec
        return SphereTanhGaussian(s.observation_dim, s.action_dim, *blocks(c.hidden), c.activation)

    @classmethod
    def fit(cls, config: SimbaV2Config, dataset: Dataset, discount: float) -> float:
        return divisor(dataset, discount, largest(config.value_range))

    def optimizer(self, name: str) -> Adam:
        """Adam, whose rate falls from the setting to `decay_to` of it in `decay_steps` updates."""
        c, adam = self.config, super().optimizer(name)
        if c.decay_to == 1.0:
            return adam
        until_zero = round(c.decay_steps / (1.0 - c.decay_to))
        return replace(adam, schedule="linear", decay_steps=until_zero, floor=c.decay_to)

    def divisor(self, state: TrainState, observations: Any) -> float | Tensor:
        """What rewards are divided by. Without data: what a reward of 1 in every step needs to fit into the range."""
        c = self.config
        if c.reward_divisor is not None:
            return c.reward_divisor
        return 1.0 / (1.0 - c.discount) / largest(c.value_range)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E [alpha log pi(a|s) - min_i Q_i(s, a)] + lambda E |min_i Q_i(s, a)| E (a - a_data)^2, a a reparametrised
        sample of the policy, lambda = `bc_weight` (as in TD7, arXiv 2306.02451), the middle factor constant.
        """
        action, log_p = self.sample(actor, batch["observations"], key)
        values = self.critic.q(state.params["critic"], batch["observations"], action)
        q = self.critic.reduce_ensemble(values, self.config.actor_value)
        imitation = (action - batch["actions"]).square().mean()
        loss = (self.weight(state) * log_p - q).mean() + self.config.bc_weight * q.detach().abs().mean() * imitation
        return loss, {"actor/loss": loss, "actor/q": q.mean(), "actor/bc": imitation, "actor/entropy": -log_p.mean()}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        actor_key, critic_key = rng.split(key)
        batch = self.divided(batch, self.divisor(state, batch["observations"]))
        state, actor = self.descend(state, "actor", self.actor_loss, batch, actor_key)
        negative_entropy = -actor.pop("actor/entropy")  # of the policy before its step
        state, entropy = self.descend(on_sphere(state, "actor"), "entropy", self.entropy_loss, negative_entropy)
        state, critic = self.descend(state, "critic", self.critic_loss, batch, critic_key)
        return self.polyak(self.critic.regularised(state), "critic"), {**actor, **entropy, **critic}


def divisor(dataset: Dataset, discount: float, limit: float) -> float:
    """max(std G, largest value / limit). G_t = discount G_{t-1} + r_t in each episode; the largest value is that of
    `value_range`, which counts what episodes that were cut off would still have earned.

    The authors take the largest |G|, and their G goes on from one episode to the next.
    """
    start, end = dataset.bounds()
    rewards = dataset.columns["rewards"].cpu().numpy()[::-1]  # backwards G is a return-to-go
    past = returns_to_go(rewards, np.zeros(len(rewards)), len(rewards) - end, len(rewards) - start, discount)
    value = largest(value_range(dataset, discount))
    return max(float(np.sqrt(past.var() + 1e-8)), value / limit)
