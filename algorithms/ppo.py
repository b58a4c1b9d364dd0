"""Proximal policy optimisation (Schulman et al., 2017, arXiv 1707.06347), as CleanRL's `ppo_continuous_action.py` has
it, with what rsl_rl does otherwise in settings.

`offrl finetune algo=ppo env=ID` trains it from fresh parameters, without data; `offrl finetune RUN mode=on_policy` goes
on with the actor of a run of BC."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.actor import Carry
from offrl.algorithm import Adam, Batch, Loss, Metrics, Params, TrainState, Traits, Tree
from offrl.families.on_policy import ppo
from offrl.families.on_policy.algorithm import OnPolicy, OnPolicyActor, OnPolicySettings
from offrl.nn import MLP, Gaussian
from offrl.nn.policies import gaussian_log_prob
from offrl.registry import register
from offrl.settings.field import defaults, setting

STD_MIN, STD_MAX = 1e-6, 1e6  # rsl_rl's


@dataclass
@defaults(batch_size=64, gradient_norm=0.5)
class PPOConfig(OnPolicySettings):
    """Settings of PPO: CleanRL's but for `value_clip`; rsl_rl's in brackets where they differ."""

    name: str = "ppo"
    horizon: int = setting(128, "steps of each environment in an iteration [24]", low=1)
    hidden: list[int] = setting([64, 64], "widths of the hidden layers of policy and value [256, 256, 256]", low=1)
    activation: str = setting("tanh", "of the hidden layers [elu]", choices=("tanh", "elu", "relu"))
    bounded: bool = setting(False, "the mean action is the tanh of the network's output", filled=True)
    std_start: float = setting(1.0, "standard deviation of the policy at the start", low=STD_MIN, high=STD_MAX)
    learning_rate: float = setting(3e-4, "Adam's, of both [1e-3]", low=0.0)
    schedule: str = setting(
        "linear",
        "constant; linear: to 0 over the iterations; adaptive: by the divergence of each minibatch [adaptive]",
        choices=("constant", "linear", "adaptive"),
    )
    desired_kl: float = setting(0.01, "of schedule=adaptive: the divergence that rates are adapted to", above=0.0)
    value_weight: float = setting(0.25, "weight of the value's squared error [1]", low=0.0)
    value_clip: bool = setting(
        False, "a value that moves further than clip, in units of returns, from that of the play gains nothing [true]"
    )
    value_warmup: int | None = setting(
        None, "iterations in which the value alone learns; null: 5 on the actor of a run, else 0", low=0
    )
    entropy_weight: float = setting(0.0, "weight of the policy's entropy [0.01]", low=0.0)
    joint_norm: bool = setting(
        True, "gradient_norm is of both gradients together; false: of the policy's and the value's each [false]"
    )
    normalise_over: str = setting(
        "batch",
        "advantages less their mean and over their deviation: those of each batch, or of an iteration [iteration]",
        choices=("batch", "iteration"),
    )
    normalise_observations: bool = setting(
        True, "observations by their mean and deviation over the iterations before [false]"
    )


class PPOActor(OnPolicyActor):
    """The mean, clipped, or a sample."""

    algorithm: PPO

    def look(self, carry: Carry, observations: Tensor, key: Tensor) -> tuple[Batch, Carry]:
        return {"observations": observations}, carry

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        x = self.algorithm.features(self.state.extra, {"observations": observations})
        return self.choose(self.apply("actor", x), key, explore), carry


@register("algo", "ppo")
class PPO(OnPolicy[PPOConfig]):
    """a = clip(u, -1, 1), u ~ N(mean(x), diag(exp(2 log_std))), with V(x) beside it; x: the normalised observation."""

    traits = Traits(actions=("continuous",), n_step=False, on_policy=True)
    usage = "ppo learns from what it plays, without data: offrl finetune algo=ppo env=ID"
    actor_class = PPOActor

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        form: dict[str, Any] = {"activation": c.activation, "init": "orthogonal"}
        bounds = {"log_std_min": math.log(STD_MIN), "log_std_max": math.log(STD_MAX)}
        actor = Gaussian(s.observation_dim, s.action_dim, c.hidden, bounded=c.bounded, **bounds, **form)
        critic = MLP(s.observation_dim, c.hidden, 1, **form)
        nn.init.constant_(actor.log_std, math.log(c.std_start))
        nn.init.orthogonal_(actor.net.head.weight, 0.01)
        nn.init.orthogonal_(critic.head.weight, 1.0)
        return {"actor": actor, "critic": critic}

    def optimizer(self, name: str) -> Adam:
        return Adam(learning_rate=self.config.learning_rate, eps=1e-5)

    def extra(self, params: dict[str, Params]) -> Tree:
        # the rate of schedule=adaptive; whether the actor moves
        rate = torch.tensor(float(self.config.learning_rate))
        return {**super().extra(params), "rate": rate, "moving": torch.ones(())}

    @property
    def statistics(self) -> str:
        return "running" if self.config.normalise_observations else "none"

    def features(self, extra: Tree, sights: Batch) -> Tensor:
        x = sights["observations"]
        return self.normalised(extra, x) if self.config.normalise_observations else x

    def draw(self, actor: Params, x: Tensor, sights: Batch, key: Tensor) -> tuple[Tensor, Batch]:
        means, log_std = self.apply("actor", actor, x)
        u = means + log_std.exp() * rng.normal(key, tuple(means.shape))
        draws = {"u": u, "log_prob": gaussian_log_prob(means, log_std, u)}
        if self.config.schedule == "adaptive":
            draws |= {"means": means, "log_std": log_std}
        return u.clamp(-1.0, 1.0), draws

    def rates(self, iteration: int, iterations: int) -> dict[str, float]:
        c = self.config
        return {"learning_rate": c.learning_rate * (1.0 - iteration / iterations if c.schedule == "linear" else 1.0)}

    def flags(self, iteration: int) -> dict[str, float]:
        return {**super().flags(iteration), "moving": float(iteration >= (self.config.value_warmup or 0))}

    def prepared(self, batch: Batch) -> Batch:
        if self.config.normalise_over == "batch":
            return batch
        return {**batch, "advantages": ppo.normalised(batch["advantages"], batch["weight"])}

    def ppo_loss(self, params: dict[str, Params], state: TrainState, batch: Batch) -> Loss:
        """mean max(-A r, -A clip(r, 1 - c, 1 + c)) - entropy_weight H + value_weight mean max((V - R)^2, (V_c - R)^2),
        r = pi(u|x) / pi_old(u|x), V_c = V_old + clip(V - V_old, -c, c).
        """
        c, weight, x = self.config, batch["weight"], self.features(state.extra, batch)
        means, log_std = self.apply("actor", params["actor"], x)
        log_ratio = gaussian_log_prob(means, log_std, batch["u"]) - batch["log_prob"]
        advantages = batch["advantages"]
        if c.normalise_over == "batch":
            advantages = ppo.normalised(advantages, weight)
        actor, metrics = ppo.surrogate(advantages, log_ratio, c.clip, weight)
        entropy = (log_std + 0.5 * math.log(2.0 * math.pi * math.e)).sum(-1).mean()
        value, returns = self.value(params["critic"], x), batch["returns"]
        errors = (value - returns).square()
        if c.value_clip:
            errors = ppo.clipped_value_errors(value, batch["values"], returns, c.clip)
        critic = ppo.weighted_mean(errors, weight)
        metrics |= {"critic/loss": critic, "actor/std": log_std.exp().mean()}
        if c.schedule == "adaptive":
            drift = ppo.gaussian_divergence(batch["means"], batch["log_std"], means, log_std)
            metrics |= {"actor/exact_kl": ppo.weighted_mean(drift, weight), "actor/rate": state.extra["rate"]}
        return actor - c.entropy_weight * entropy + c.value_weight * critic, metrics

    def limited(self, gradients: dict[str, Params]) -> dict[str, Params]:
        if self.config.joint_norm:
            return super().limited(gradients)
        norm = self.config.gradient_norm
        return {name: ppo.clipped_together({name: g}, norm)[name] for name, g in gradients.items()}

    def adapted(self, extra: Tree, metrics: Metrics) -> Tree:
        if self.config.schedule != "adaptive":
            return extra
        return {**extra, "rate": ppo.adapted_rate(extra["rate"], metrics["actor/exact_kl"], self.config.desired_kl)}

    def stepper(self, name: str, extra: Tree) -> Adam:
        adam = self.optimizer(name)
        adaptive = self.config.schedule == "adaptive"
        return dataclasses.replace(adam, learning_rate=extra["rate"]) if adaptive else adam

    def moves(self, name: str, extra: Tree) -> Tensor:
        return extra["learning"] * extra["moving"] if name == "actor" else extra["learning"]
