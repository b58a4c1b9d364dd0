"""A residual on a frozen policy: "From Imitation to Refinement - Residual RL for Precise Assembly" (ResiP; Ankile et
al., 2024, arXiv 2407.16677), in small. A Gaussian policy adds a little to each action of a policy that was trained
before, and learns by PPO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offrl import registry, rng
from offrl.algorithm import Adam, Algorithm, Batch, Loss, Params, TrainState, Traits, Tree
from offrl.errors import UserError
from offrl.families.on_policy import ppo
from offrl.families.on_policy.algorithm import OnPolicy, OnPolicySettings
from offrl.families.on_policy.residual_actor import ResidualActor, frozen
from offrl.settings.field import defaults, setting
from offrl.settings.kinds import restored

NOISE = 0.0368  # scale x sigma at the published scale of 0.1 and log sigma of -1; the authors keep it at other scales
HOW = "residual learns on top of a trained run, from what it plays: offrl finetune RUN mode=residual env=ID"


@dataclass
@defaults(passes=50, target_kl=0.1, discount=0.999, observation_clip=3.0)
class ResidualConfig(OnPolicySettings):
    """Settings of the residual; its published values where they differ in brackets."""

    name: str = "residual"
    base: dict[str, Any] = setting({}, "settings of the policy below", filled=True)
    hidden: list[int] = setting([256, 256], "widths of the hidden layers of the residual and of its value", low=1)
    scale: float = setting(
        0.1, "what the residual's output is multiplied by; 0: the policy below alone", low=0.0, acting=True
    )
    log_sigma: float | None = setting(
        -1.0,
        "log of the standard deviation of the residual's output, fixed; null: ln(0.0368 / scale), the same noise at "
        "every scale",
    )
    look_every: int = setting(
        1, "steps between two observations that the residual sees; the policy below sees all of its own", low=1
    )
    horizon: int = setting(200, "steps of each environment in an iteration [700]", low=1)
    actor_learning_rate: float = setting(3e-4, "of the residual", low=0.0)
    critic_learning_rate: float = setting(1e-3, "of its value [0.005]", low=0.0)
    schedule: str = setting(
        "constant", "of both rates over the iterations [cosine: to 0]", choices=("constant", "cosine")
    )
    warmup_iterations: int = setting(0, "iterations in which the residual's rate rises from 0 [5]", low=0)
    weight_decay: float = setting(1e-6, "AdamW's", low=0.0)
    rewards: str = setting(
        "auto",
        "success: 1 in a step after which the environment reports success, else 0; env: the environment's; auto: "
        "success if it is reported",
        choices=("auto", "success", "env"),
    )
    end_on_success: bool = setting(True, "an episode ends with its success; false: goes on [false]")
    scale_rewards: bool = setting(False, "divide rewards by their running standard deviation and cut off at +-5 [true]")
    time_limits: str = setting(
        "bootstrap",
        "a cut episode: bootstrap: goes on with the value of its last state; end: earns nothing more [end]",
        choices=("bootstrap", "end"),
    )


class Residual(OnPolicy[ResidualConfig]):
    """a = clip(a_base + scale u, -1, 1), u ~ N(mean(x), sigma^2), x = [clipped normalised observation, a_base]; V(x)
    beside it.

    The base never changes: its parameters are in `extra`. An update is a pass over one minibatch of what was just
    played.
    """

    traits = Traits(actions=("continuous",), n_step=False, on_policy=True)
    usage = HOW
    actor_class = ResidualActor

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        if not c.base:
            raise UserError(HOW)
        kind = registry.get("algo", str(c.base.get("name")))
        self.base: Algorithm = kind(restored(kind.Config, c.base, "the policy below a residual"), s)
        inputs = s.observation_dim + s.action_dim
        return {"actor": network(inputs, c.hidden, s.action_dim, None), "critic": network(inputs, c.hidden, 1, 0.25)}

    def optimizer(self, name: str) -> Adam:
        c = self.config
        rate = c.actor_learning_rate if name == "actor" else c.critic_learning_rate
        return Adam(learning_rate=rate, eps=1e-5, weight_decay=c.weight_decay)

    def extra(self, params: dict[str, Params]) -> Tree:
        # the statistics are of observations after the data's own
        return {"base": frozen(self.base, self.base.init(0)), **super().extra(params)}

    @property
    def statistics(self) -> str:
        return "first" if self.spec.observation_mean is None else "none"

    @property
    def learns_from_success(self) -> bool:
        return self.config.rewards == "success"

    @property
    def ends_on_success(self) -> bool:
        return self.config.end_on_success and self.learns_from_success

    def rates(self, iteration: int, iterations: int) -> dict[str, float]:
        c, factors = self.config, (1.0, 1.0)
        if c.schedule == "cosine":
            factors = (
                ppo.rate_factor(iteration, iterations, c.warmup_iterations),
                ppo.rate_factor(iteration, iterations),
            )
        elif iteration < c.warmup_iterations:
            factors = iteration / c.warmup_iterations, 1.0
        rates = {"actor_learning_rate": c.actor_learning_rate, "critic_learning_rate": c.critic_learning_rate}
        return {name: factor * rate for factor, (name, rate) in zip(factors, rates.items(), strict=True)}

    @property
    def log_sigma(self) -> float:
        """Its logarithm."""
        c = self.config
        return math.log(NOISE / c.scale) if c.log_sigma is None else c.log_sigma

    @property
    def sigma(self) -> float:
        """The standard deviation of the residual's output."""
        return math.exp(self.log_sigma)

    def features(self, extra: Tree, sights: Batch) -> Tensor:
        """x [..., O + A] of normalised observations and the base's actions."""
        return torch.cat([self.normalised(extra, sights["observations"]), sights["base_actions"]], -1)

    def draw(self, actor: Params, x: Tensor, sights: Batch, key: Tensor) -> tuple[Tensor, Batch]:
        means = self.apply("actor", actor, x)
        u = means + self.sigma * rng.normal(key, tuple(means.shape))
        return self.combine(sights["base_actions"], u), {"u": u, "log_prob": self.log_prob(means, u)}

    def log_prob(self, means: Tensor, u: Tensor) -> Tensor:
        """log N(u; mean, sigma^2) [...], of outputs before they are scaled, added and clipped."""
        errors = (u - means) * math.exp(-self.log_sigma)
        return -(0.5 * errors.square() + self.log_sigma + 0.5 * math.log(2.0 * math.pi)).sum(-1)

    def combine(self, base_actions: Tensor, u: Tensor) -> Tensor:
        """The action: clip(a_base + scale u, -1, 1)."""
        return (base_actions + self.config.scale * u).clamp(-1.0, 1.0)

    def ppo_loss(self, params: dict[str, Params], state: TrainState, batch: Batch) -> Loss:
        """mean max(-A r, -A clip(r, 1 - c, 1 + c)) + mean (V(x) - R)^2 / 2, A normalised, r = pi(u|x) / pi_old(u|x)."""
        x, weight = self.features(state.extra, batch), batch["weight"]
        log_ratio = self.log_prob(self.apply("actor", params["actor"], x), batch["u"]) - batch["log_prob"]
        advantages = ppo.normalised(batch["advantages"], weight)
        actor, metrics = ppo.surrogate(advantages, log_ratio, self.config.clip, weight)
        errors = self.value(params["critic"], x) - batch["returns"]
        critic = 0.5 * ppo.weighted_mean(errors.square(), weight)
        return actor + critic, {**metrics, "critic/loss": critic}


def network(inputs: int, hidden: Sequence[int], outputs: int, gain: float | None) -> nn.Module:
    """An MLP of ReLU layers, Kaiming normal. The last layer is orthogonal of this gain, which is its bias too; None: 0,
    no bias.
    """
    layers: list[nn.Module] = []
    for width in hidden:
        layer = nn.Linear(inputs, width)
        nn.init.kaiming_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU()]
        inputs = width
    head = nn.Linear(inputs, outputs, bias=gain is not None)
    if gain is None:
        nn.init.zeros_(head.weight)
    else:
        nn.init.orthogonal_(head.weight, gain)
        nn.init.constant_(head.bias, gain)
    return nn.Sequential(*layers, head)
