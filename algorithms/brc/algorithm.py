"""BRC: "Bigger, Regularized, Categorical: High-Capacity Value Functions are Efficient Multi-Task Learners" (Nauman et
al., 2025, arXiv 2505.23150), for one task.

In an environment: `offrl finetune algo=brc env=ID`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Adam, Batch, Dataset, Params, TrainState, Tree, Update
from offrl.algorithms.brc.networks import BroEnsemble, BroTanhGaussian
from offrl.data.value_range import LARGEST_RETURN, largest_return
from offrl.errors import UserError
from offrl.families.critics import Critic, ScaledRewards, Target, Values, blocks, check_layers, largest
from offrl.families.sac import SoftActorCritic, SoftSettings
from offrl.registry import register
from offrl.settings.field import defaults, setting

ENTROPY_BETA1 = 0.5  # Adam's, of the weight of the entropy


@dataclass
@defaults(
    hidden=[256],
    critic_hidden=[4096, 4096],
    entropy_weight=0.1,
    target_entropy_scale=0.5,
    value_range=[-10.0, 10.0],
    layer_norm_epsilon=1e-6,
    actor_value="mean",
)
class BRCConfig(SoftSettings):
    """Settings of BRC; the defaults are the authors' for one task. Each entry of `hidden` and `critic_hidden` is a
    block.
    """

    name: str = "brc"
    value_head: str = setting("c51", "critics of a distribution over value_bins", choices=("c51",))
    init: str = setting("orthogonal", "initial weights: orthogonal, with gain sqrt(2)", choices=("orthogonal",))
    weight_decay: float = setting(1e-4, "AdamW's, of the policy and the critics", low=0.0, structural=True)
    largest_return: float | None = setting(
        None,
        "the largest size of a return, by which rewards are scaled, until an episode in play has a larger one; null: "
        "found from the data",
        low=0.0,
    )


class BroCritic(Critic):
    """Critics with a BroNet each."""

    def make_network(self, size: int, inputs: int, outputs: int, norm_first: bool) -> nn.Module:
        c = self.config
        widths = blocks(c.critic_hidden or c.hidden)
        return BroEnsemble(size, inputs, *widths, outputs, activation=c.activation, epsilon=c.layer_norm_epsilon)


@register("algo", "brc")
class BRC(ScaledRewards, SoftActorCritic[BRCConfig]):
    """SAC with wide residual critics of a distribution of returns, of which targets and the policy take the mean of
    all in place of the smallest, weight decay, and rewards scaled by the largest return so far. Order of steps, the
    authors': critics, targets, actor (by the new critics), weight of the entropy (by the actor before).
    """

    traits = replace(SoftActorCritic.traits, actions=("continuous",), own_encoders=False, scales_by_returns=True)
    critic_class = BroCritic
    fitted = "largest_return"
    reduction = "mean"
    entropy_loss = SoftActorCritic.linear_entropy_loss

    def modules(self) -> dict[str, nn.Module]:
        c = self.config
        check_layers(c)
        if c.max_target_actions > 1:
            raise UserError("brc has targets of one action: leave algo.max_target_actions as it is")
        if c.discount == 1.0:
            raise UserError("algo.discount=1 leaves the entropy of an episode without a bound, by which brc scales "
                            "rewards: take a smaller one")  # fmt: skip
        return super().modules()

    def make_actor(self) -> nn.Module:
        c, s = self.config, self.spec
        form = {"activation": c.activation, "epsilon": c.layer_norm_epsilon}
        return BroTanhGaussian(s.observation_dim, s.action_dim, *blocks(c.hidden), **form)

    @classmethod
    def fit(cls, config: BRCConfig, dataset: Dataset, discount: float) -> float:
        start, end = dataset.bounds()
        rewards, ends = (dataset.columns[name].cpu().numpy() for name in ("rewards", "terminations"))
        return largest_return(rewards, start, end, ~ends[end - 1].astype(bool), discount)

    def extra(self, params: dict[str, Params]) -> Tree:
        """The largest size of a return so far, 0 where none is known; what rewards were last divided by: [] each."""
        size = torch.tensor(float(self.config.largest_return or 0.0))
        return {LARGEST_RETURN: size, "divisor": self.divisor_for(size, self.config.entropy_weight)}

    def optimizer(self, name: str) -> Adam:
        adam = super().optimizer(name)
        if name == "entropy":
            return replace(adam, beta1=ENTROPY_BETA1)
        return replace(adam, weight_decay=self.config.weight_decay)

    def divisor_for(self, size: Tensor, weight: float | Tensor) -> Tensor:
        """(max |G| + alpha |target entropy| / (1 - discount) / 2) / the end of `value_range`, [] of max |G|, `size`."""
        c = self.config
        return (size + weight * abs(self.target_entropy) / (1.0 - c.discount) / 2.0) / largest(c.value_range)

    def divisor(self, state: TrainState) -> Tensor:
        return cast(Tensor, state.extra["divisor"])

    def scaled(self, state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
        """The state with the largest return that the batch tells of, and the batch with its rewards divided; as long as
        no return is known they are 0.
        """
        size = cast(Tensor, state.extra[LARGEST_RETURN])
        if LARGEST_RETURN in batch:
            size = torch.maximum(size, batch[LARGEST_RETURN].max())
        divisor = self.divisor_for(size, self.weight(state))
        state = state.with_extra(**{LARGEST_RETURN: size, "divisor": divisor})
        return state, self.divided(batch, torch.where(size > 0.0, divisor, np.inf))

    def target(self, state: TrainState, actor: Params, batch: Batch, key: Tensor) -> Target:
        """The distribution of r + discount (1 - terminated) (z - alpha log pi(a'|s')), z of the mean of the target
        critics' distributions at (s', a'), a' from the policy.
        """
        action, log_p = self.sample(actor, batch["next_observations"], key)
        critics = self.critic.target_critics(state, rng.fold_in(key, 100))
        logits = self.critic.logits(critics, batch["next_observations"], action)
        value, mixture = self.critic.aggregate(logits, "mean")
        weight = self.weight(state) * float(self.config.entropy_in_target)
        return self.critic.td_target(batch, Values(value - weight * log_p, mixture))

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        actor_key, critic_key = rng.split(key)
        state, batch = self.scaled(state, batch)
        state, critic = self.descend(state, "critic", self.critic_loss, batch, critic_key)
        state = self.polyak(state, "critic")
        negative_entropy = self.negative_entropy(state.params["actor"], batch["observations"], actor_key)
        state, actor = self.descend(state, "actor", self.actor_loss, batch, actor_key)
        state, entropy = self.descend(state, "entropy", self.entropy_loss, negative_entropy)
        return state, {**critic, **actor, **entropy, "critic/divisor": self.divisor(state)}
