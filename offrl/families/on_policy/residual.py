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
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

from offrl import registry
from offrl.algorithm import Adam, Algorithm, Batch, Dataset, Loss, Params, TrainState, Traits, Tree, Update
from offrl.errors import UserError
from offrl.families.on_policy import ppo
from offrl.families.on_policy.residual_actor import ResidualActor, frozen
from offrl.settings.field import setting
from offrl.settings.kinds import restored

NOISE = 0.0368  # scale x sigma at the published scale of 0.1 and log sigma of -1; the authors keep it at other scales
HOW = "residual learns on top of a trained run, from what it plays: offrl finetune RUN mode=residual env=ID"


@dataclass
class ResidualConfig:
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
    observation_clip: float = setting(3.0, "normalised observations are cut off at +- this", low=0.0)
    look_every: int = setting(
        1, "steps between two observations that the residual sees; the policy below sees all of its own", low=1
    )
    horizon: int = setting(200, "steps of each environment in an iteration [700]", low=1)
    passes: int = setting(50, "passes over an iteration's steps, at most", low=1)
    batch_size: int = setting(
        0, "steps in an update, of which a pass makes as many as there are; 0: all of an iteration in one", low=0
    )
    target_kl: float | None = setting(
        0.1, "the passes end after one with a larger divergence from the policy that played; null: never"
    )
    clip: float = setting(0.2, "the ratio of densities counts up to 1 +- this", low=0.0)
    discount: float = setting(0.999, "per environment step", low=0.0, high=1.0)
    gae_decay: float = setting(0.95, "decay of later errors in an advantage (lambda)", low=0.0, high=1.0)
    actor_learning_rate: float = setting(3e-4, "of the residual", low=0.0)
    critic_learning_rate: float = setting(1e-3, "of its value [0.005]", low=0.0)
    schedule: str = setting(
        "constant", "of both rates over the iterations [cosine: to 0]", choices=("constant", "cosine")
    )
    warmup_iterations: int = setting(0, "iterations in which the residual's rate rises from 0 [5]", low=0)
    weight_decay: float = setting(1e-6, "AdamW's", low=0.0)
    gradient_norm: float = setting(1.0, "largest joint norm of both gradients; 0: any", low=0.0)
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


class PlayedOnly:
    """There are no batches of recorded data."""

    def prepare(self, dataset: Dataset) -> Any:
        raise UserError(HOW)

    def __call__(self, source: Any, key: Tensor, batch_size: int) -> Batch:
        raise UserError(HOW)


class Residual(Algorithm[ResidualConfig]):
    """a = clip(a_base + scale u, -1, 1), u ~ N(mean(x), sigma^2), x = [clipped normalised observation, a_base]; V(x)
    beside it.

    The base never changes: its parameters are in `extra`. An update is a pass over one minibatch of what was just
    played.
    """

    traits = Traits(actions=("continuous",), n_step=False)
    actor_class = ResidualActor

    @classmethod
    def requires(cls, config: Any, dataset: Dataset) -> dict[str, Any]:
        raise UserError(HOW)

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        if not c.base:
            raise UserError(HOW)
        kind = registry.get("algo", str(c.base.get("name")))
        self.base: Algorithm = kind(restored(kind.Config, c.base, "the policy below a residual"), s)
        inputs = s.observation_dim + s.action_dim
        return {"actor": network(inputs, c.hidden, s.action_dim, None), "critic": network(inputs, c.hidden, 1, 0.25)}

    def sampler(self) -> Any:
        return PlayedOnly()

    def optimizer(self, name: str) -> Adam:
        c = self.config
        rate = c.actor_learning_rate if name == "actor" else c.critic_learning_rate
        return Adam(learning_rate=rate, eps=1e-5, weight_decay=c.weight_decay)

    def extra(self, params: dict[str, Params]) -> Tree:
        width = self.spec.observation_dim
        statistics = {"mean": torch.zeros(width), "std": torch.ones(width)}  # of observations, after the data's own
        return {"base": frozen(self.base, self.base.init(0)), "learning": torch.ones(()), **statistics}

    @property
    def log_sigma(self) -> float:
        """Its logarithm."""
        c = self.config
        return math.log(NOISE / c.scale) if c.log_sigma is None else c.log_sigma

    @property
    def sigma(self) -> float:
        """The standard deviation of the residual's output."""
        return math.exp(self.log_sigma)

    def features(self, extra: Tree, observations: Tensor, base_actions: Tensor) -> Tensor:
        """x [..., O + A] of normalised observations and the base's actions."""
        limit = self.config.observation_clip
        return torch.cat([((observations - extra["mean"]) / extra["std"]).clamp(-limit, limit), base_actions], -1)

    def log_prob(self, means: Tensor, u: Tensor) -> Tensor:
        """log N(u; mean, sigma^2) [...], of outputs before they are scaled, added and clipped."""
        errors = (u - means) * math.exp(-self.log_sigma)
        return -(0.5 * errors.square() + self.log_sigma + 0.5 * math.log(2.0 * math.pi)).sum(-1)

    def combine(self, base_actions: Tensor, u: Tensor) -> Tensor:
        """The action: clip(a_base + scale u, -1, 1)."""
        return (base_actions + self.config.scale * u).clamp(-1.0, 1.0)

    def ppo_loss(self, params: dict[str, Params], state: TrainState, batch: Batch) -> Loss:
        """mean max(-A r, -A clip(r, 1 - c, 1 + c)) + mean (V(x) - R)^2 / 2, A normalised, r = pi(u|x) / pi_old(u|x)."""
        x, weight = self.features(state.extra, batch["observations"], batch["base_actions"]), batch["weight"]
        log_ratio = self.log_prob(self.apply("actor", params["actor"], x), batch["u"]) - batch["log_prob"]
        ratio = log_ratio.exp()
        actor = ppo.clipped_loss(ppo.normalised(batch["advantages"], weight), ratio, self.config.clip, weight)
        value = self.apply("critic", params["critic"], x).squeeze(-1)
        critic = 0.5 * ppo.weighted_mean((value - batch["returns"]).square(), weight)
        outside = ppo.weighted_mean(((ratio - 1.0).abs() > self.config.clip).float(), weight)
        kl = ppo.divergence(log_ratio, weight)
        return actor + critic, {"actor/loss": actor, "critic/loss": critic, "actor/kl": kl, "actor/clipped": outside}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        """One step on both modules, if the passes of this iteration have not ended: after a step whose divergence was
        too large.
        """
        c, names = self.config, ("actor", "critic")
        grads, (_, metrics) = grad_and_value(self.ppo_loss, has_aux=True)(
            {n: state.params[n] for n in names}, state, batch
        )
        grads, learning = ppo.clipped_together(grads, c.gradient_norm), state.extra["learning"]
        params, opt = dict(state.params), dict(state.opt)
        for n in names:
            new, memory = self.optimizer(n).update(params[n], grads[n], opt[n])
            params[n], opt[n] = chosen(learning, new, params[n]), chosen(learning, memory, opt[n])
        again = learning if c.target_kl is None else learning * (metrics["actor/kl"] <= c.target_kl)
        state = state._replace(
            params=params, opt=opt, extra={**state.extra, "learning": again}, step=state.step + learning.long() - 1
        )
        # sums of these over `learning` are the means over the passes that were made
        return state, {"learning": learning, **{name: learning * value for name, value in metrics.items()}}


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


def chosen(flag: Tensor, new: Tree, old: Tree) -> Tree:
    """`new` where the flag [] is 1, else `old`, leaf by leaf."""
    return pytree.tree_map(lambda a, b: torch.where(flag > 0.0, a, b), new, old)
