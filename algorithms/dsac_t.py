"""DSAC-T: "Distributional Soft Actor-Critic with Three Refinements" (Duan et al., 2023, arXiv 2310.05858).

For use in an environment: `offrl finetune algo=dsac_t env=ID mixing=0`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from offrl import losses, rng
from offrl.algorithm import Batch, Loss, Params, TrainState, Tree, Update, merged
from offrl.errors import UserError
from offrl.families.critics import RiskSettings, Target
from offrl.families.sac import SoftActorCritic, SoftSettings
from offrl.nn.heads import STD_FLOOR, GaussianValues, huber
from offrl.registry import register
from offrl.settings.field import defaults, setting

DEVIATIONS = 3.0  # samples of returns are cut off at so many, and targets of the deviation at so many widths
THRESHOLD = 50.0  # of Huber's loss
WEIGHTS = (0.1, 10.0)  # of rows: smallest and largest


@dataclass
@defaults(
    hidden=[256, 256, 256],
    activation="gelu",
    learning_rate=1e-4,
    entropy_learning_rate=3e-4,
    entropy_weight=math.e,
)
class DSACTConfig(SoftSettings, RiskSettings):
    """Settings of DSAC-T; the defaults are the authors' code's."""

    name: str = "dsac_t"
    value_head: str = setting("gaussian", "critics of a mean and a deviation", choices=("gaussian",))
    exact: bool = setting(
        False,
        "the deviation's target is the mean square, which it is of a Gaussian; false: half of it, as in the authors' "
        "code, whose deviations are too small by the root of 2",
    )


@register("algo", "dsac_t")
class DSACT(SoftActorCritic[DSACTConfig]):
    """SAC whose critics learn the mean and deviation of returns. The refinements: the mean learns from the mean of the
    next value, both critics learn from the one whose mean is smaller, and rows are weighted by the deviation.
    """

    traits = replace(
        SoftActorCritic.traits, targets=("critic", "actor"), period=2, actions=("continuous",), n_step=False
    )
    actor_form: ClassVar[dict[str, Any]] = {"log_std_min": -20.0, "log_std_max": 0.5}

    def modules(self) -> dict[str, nn.Module]:
        c = self.config
        if c.max_target_actions > 1 or c.n_step > 1:
            raise UserError(
                "dsac_t looks one step ahead with one action: leave algo.max_target_actions and algo.n_step as they are"
            )
        return super().modules()

    def extra(self, params: dict[str, Params]) -> Tree:
        """The running mean of each critic's deviation, [E]; 0 before the first update."""
        return {"width": torch.zeros(self.config.critics)}

    def targets(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Tensor]:
        """y = r + gamma (1 - terminated) (q'_i - alpha log pi(a'|s')) of the critic i whose mean q' is smaller at a'
        of the target policy, and the same with a sample of its return in place of q'_i (refinements 1 and 2): [B] each.
        """
        head, observations = cast(GaussianValues, self.critic.head), batch["next_observations"]
        action, log_p = self.sample(state.target["actor"], observations, key)
        critics = self.critic.target_critics(state, rng.fold_in(key, 100))
        logits = self.critic.logits(critics, observations, action)
        mean, index = head.mean(logits).min(0)
        std = head.std(logits).gather(0, index.unsqueeze(0)).squeeze(0)
        noise = rng.normal(rng.fold_in(key, 101), tuple(mean.shape)).clamp(-DEVIATIONS, DEVIATIONS)
        bonus = -self.weight(state) * float(self.config.entropy_in_target) * log_p
        target, sample = (
            losses.td_target(batch["rewards"], batch["masks"], self.config.discount, value + bonus)
            for value in (mean, mean + std * noise)
        )
        return target, sample

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E w [H(q, y) + sigma sg((sigma^2 - H(q, y_b)) / (sigma + 0.1))], summed over critics."""
        target, sample = self.targets(state, batch, key)
        head, width = cast(GaussianValues, self.critic.head), state.extra["width"].unsqueeze(-1)

        def objective(logits: Tensor, target: Target) -> Tensor:
            return distribution_loss(
                head.mean(logits), head.std(logits), target.value, sample, width, self.config.exact
            )

        loss, metrics = self.critic.loss(critic, batch, Target(target), key, objective=objective)
        return loss, {**metrics, "critic/width": width.mean()}

    def with_width(self, state: TrainState, batch: Batch) -> TrainState:
        """The state with b, the running means of the critics' deviations, a step further."""
        logits = self.critic.logits(state.params["critic"], batch["observations"], batch["actions"])
        std, width = cast(GaussianValues, self.critic.head).std(logits).mean(-1), state.extra["width"]
        return state.with_extra(width=torch.where(width > 0.0, torch.lerp(width, std, self.config.polyak), std))

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        actor_key, critic_key = rng.split(key)
        before = self.with_width(state, batch)
        critic, metrics = self.descend(before, "critic", self.critic_loss, batch, critic_key)
        if phase == 0:
            return self.critic.regularised(critic), metrics
        negative_entropy = self.negative_entropy(before.params["actor"], batch["observations"], actor_key)
        entropy, entropy_metrics = self.descend(before, "entropy", self.entropy_loss, negative_entropy)
        actor, actor_metrics = self.descend(before, "actor", self.actor_loss, batch, actor_key)
        after = self.critic.regularised(merged(before, critic, entropy, actor))
        after = self.polyak(self.polyak(after, "critic"), "actor")
        return after, {**metrics, **entropy_metrics, **actor_metrics}


def distribution_loss(
    mean: Tensor, std: Tensor, target: Tensor, sample: Tensor, width: Tensor, exact: bool = False
) -> Tensor:
    """w [H(q, y) + sigma sg((sigma^2 - H(q, y_b)) / (sigma + 0.1))], elementwise; y_b = q + clip(y_z - q, +-3 b), w =
    clip(b^2 / (sigma^2 + 0.1), 0.1, 10) (refinement 3).

    H is Huber's loss, which is half the square: `exact` doubles it beside sigma^2. width: b, which broadcasts.
    """
    error = torch.maximum(torch.minimum(sample - mean.detach(), DEVIATIONS * width), -DEVIATIONS * width)
    weight = (width.square() / (std.detach().square() + STD_FLOOR)).clamp(*WEIGHTS)
    spread = huber(error, THRESHOLD) * (2.0 if exact else 1.0)
    slope = (std.square() - spread) / (std + STD_FLOOR)
    return weight * (huber(target - mean, THRESHOLD) + std * slope.detach())
