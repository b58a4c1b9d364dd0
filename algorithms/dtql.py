"""Diffusion trusted Q-learning: "Diffusion Policies Creating a Trust Region for Offline Reinforcement Learning" (Chen
et al., 2024, arXiv 2405.19690)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.algorithm import (
    Adam,
    Algorithm,
    Batch,
    Dataset,
    Loss,
    Params,
    Requirement,
    TrainConfig,
    TrainState,
    Traits,
    Tree,
    Update,
)
from offrl.errors import UserError
from offrl.families import in_sample
from offrl.families.critics import Critic, CriticSettings, Value, Values, WithCritic
from offrl.families.generative import edm
from offrl.families.generative.best_of_n import Noise, ValuedActor, candidates_field, choice_field
from offrl.families.generative.settings import greedy_field
from offrl.nn import TanhGaussian, flow
from offrl.nn.diffusion import PlainDenoiser
from offrl.nn.mlp import ACTIVATIONS
from offrl.nn.policies import gaussian_log_prob
from offrl.registry import register
from offrl.settings.field import setting

WARM_UP = 50_000  # updates, as published
EDGE = 1.001  # the data's actions are divided by this before their inverse tanh, as in the authors' code


@dataclass
class DTQLConfig(CriticSettings):
    """Settings of DTQL; the defaults are the authors' for most of D4RL's locomotion tasks."""

    name: str = "dtql"
    actor_learning_rate: float | None = setting(
        None, "the policy's and the denoiser's, where it is another; null: learning_rate", low=0.0
    )
    hidden: list[int] = setting(
        [256, 256, 256], "widths of the hidden layers; the denoiser has one more, without activation", low=1
    )
    activation: str = setting(
        "mish",
        "activation of the hidden layers of critics, V and denoiser; the policy's is ReLU",
        choices=tuple(ACTIVATIONS),
    )
    layer_norm: bool = setting(True, "LayerNorm before the activation of each hidden layer of the critics (never of V)")
    alpha: float = setting(5.0, "weight of the trust region's loss, in units of Q", low=0.0)
    bc_weight: float = setting(
        0.0, "weight of the log likelihood of the data's actions, in units of Q (AntMaze: 1)", low=0.0
    )
    expectile: float = setting(
        0.7, "tau: 0.5 values the data's policy, 1.0 the best action in the data", low=0.0, high=1.0
    )
    warm_up: int | None = setting(
        None,
        "updates at first that the policy waits for critics and denoiser; null: 50,000, or a fifth of the run where "
        "that is less",
        low=0,
    )
    schedule: str = setting(
        "constant", "learning rates over decay_steps, after the warm-up", choices=("constant", "cosine")
    )
    decay_steps: int = setting(
        1_000_000, "length of the schedule in updates, as published whatever the run's length", low=1
    )
    sigma_data: float = setting(0.5, "standard deviation that actions count as having", low=1e-3, structural=True)
    sigma_min: float = setting(0.002, "smallest noise level that is learnt", low=1e-6, structural=True)
    sigma_max: float = setting(80.0, "largest noise level that is learnt", low=1e-6, structural=True)
    embedding: int = setting(16, "waves in which the denoiser sees a noise level", low=4)
    candidates: int = candidates_field(1024, "actions that are drawn at each step (N), of which one is played")
    choice: str = choice_field()
    greedy: str = greedy_field()


class DTQLActor(ValuedActor):
    """One of N actions of the one-step policy."""

    algorithm: DTQL

    def condition(self, observations: Tensor, count: int) -> Tensor:
        """Means and log standard deviations [count * E, 2 A]: all candidates of a state have the same."""
        return flow.repeated(torch.cat(self.apply("actor", observations), -1), count)

    def draw(self, observations: Tensor, key: Tensor, noise: Noise) -> Tensor:
        mean, log_std = observations.chunk(2, -1)
        return (mean + log_std.exp() * noise(key)).tanh()


@register("algo", "dtql")
class DTQL(WithCritic, Algorithm[DTQLConfig]):
    """IQL's V and Q beside a denoiser of the data's actions; a one-step policy climbs Q and stays where that denoiser
    works.

    An update moves V and the critics, each by the other of before, the denoiser, the policy by the new ones, and the
    target critics, which only acting reads. At first, for `warm_up` updates, policy and targets stay as they are.
    Modules: value, critic, denoiser, and actor. `extra` holds a copy of the target critics, by which policies choose.
    """

    traits = Traits(targets=("critic",), critic_modules=("critic",), observations="encoded", actions=("continuous",))
    actor_class = DTQLActor

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        c = config.algo
        if not c.sigma_min < c.sigma_max:
            raise UserError(f"algo.sigma_min={c.sigma_min:g} must be below algo.sigma_max={c.sigma_max:g}")
        if c.warm_up is not None and c.warm_up >= config.steps:
            raise UserError(
                f"algo.warm_up={c.warm_up} leaves the policy none of steps={config.steps}: ask for more steps, or for "
                f"a shorter warm-up, such as algo.warm_up={config.steps // 5}"
            )
        return {}

    @classmethod
    def adopt(cls, config: TrainConfig, dataset: Dataset, pretrained: Mapping[str, Any]) -> TrainConfig:
        """The length of the warm-up, where none is given."""
        if config.algo.warm_up is not None:
            return config
        return dataclasses.replace(
            config, algo=dataclasses.replace(config.algo, warm_up=min(WARM_UP, config.steps // 5))
        )

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        self.value, self.critic = Value(dataclasses.replace(c, layer_norm=False), s), Critic(c, s, norm_first=True)
        form, width = {"activation": c.activation, "init": c.init}, c.embedding // 2 * 2
        denoiser = PlainDenoiser(s.observation_dim, s.action_dim, c.hidden, width, linear_first=True, **form)
        actor = TanhGaussian(s.observation_dim, s.action_dim, c.hidden, init="isometric")
        return {"value": self.value.network, "critic": self.critic.network, "denoiser": denoiser, "actor": actor}

    @property
    def warm_up(self) -> int:
        """Updates of the warm-up."""
        return WARM_UP if self.config.warm_up is None else int(self.config.warm_up)

    def optimizer(self, name: str) -> Adam:
        c = self.config
        rate = (
            c.actor_learning_rate
            if name in ("actor", "denoiser") and c.actor_learning_rate is not None
            else c.learning_rate
        )
        if c.schedule == "constant":
            return Adam(rate)
        return Adam(
            rate, schedule=c.schedule, decay_steps=c.decay_steps, schedule_from=0 if name == "actor" else self.warm_up
        )

    def extra(self, params: dict[str, Params]) -> Tree:
        return {"target": {k: v.clone() for k, v in params["critic"].items()}}

    def value_loss(self, value: Params, state: TrainState, batch: Batch, q: Values) -> Loss:
        """E |tau - 1(Q - V < 0)| (Q - V)^2, Q the smallest of the online critics' values (arXiv 2110.06169, equation
        5).
        """
        return in_sample.expectile_loss(self.value, value, batch, q, self.config.expectile)

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, next_v: Values, key: Tensor) -> Loss:
        """sum_i E (r + gamma V(s') - Q_i(s, a))^2 (arXiv 2110.06169, equation 6)."""
        return self.critic.loss(critic, batch, self.critic.td_target(batch, next_v), key)

    def denoising(self, denoiser: Params, observations: Tensor, actions: Tensor, key: Tensor) -> Tensor:
        """The denoiser's loss [] at actions [B, A], with a noise level and noise for each."""
        c, (level_key, noise_key) = self.config, rng.split(key)
        sigma = edm.levels(rng.uniform(level_key, (actions.shape[0],)), c.sigma_data, c.sigma_min, c.sigma_max)
        noise = rng.normal(noise_key, tuple(actions.shape))

        def network(x: Tensor, level: Tensor) -> Tensor:
            return self.apply("denoiser", denoiser, x, level, observations)

        return edm.denoising_loss(network, actions, noise, sigma, c.sigma_data)

    def denoiser_loss(self, denoiser: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E ((D(a + sigma e; sigma, s) - a) / c_out)^2 over the data's actions."""
        loss = self.denoising(denoiser, batch["observations"], batch["actions"], key)
        return loss, {"denoiser/loss": loss}

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """alpha L_trust(a~) - E min_i Q_i(s, a~) - bc_weight E log pi(a|s), a~ of the policy; L_trust is the denoiser's
        loss at a~.
        """
        c, observations, (draw_key, trust_key) = self.config, batch["observations"], rng.split(key)
        mean, log_std = self.apply("actor", actor, observations)
        action = (mean + log_std.exp() * rng.normal(draw_key, tuple(mean.shape))).tanh()
        trust = self.denoising(state.params["denoiser"], observations, action, trust_key)
        q = self.critic.min_q(state.params["critic"], observations, action).mean.mean()
        likelihood = gaussian_log_prob(mean, log_std, torch.atanh(batch["actions"] / EDGE)).mean()  # before the tanh
        loss = c.alpha * trust - q - c.bc_weight * likelihood
        return loss, {
            "actor/loss": loss,
            "actor/trust_region_loss": trust,
            "actor/q": q,
            "actor/log_likelihood": likelihood,
        }

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        critic_key, denoiser_key, actor_key = rng.split(key, 3)
        q = self.critic.min_q(state.params["critic"], batch["observations"], batch["actions"])
        next_v = self.value(state.params["value"], batch["next_observations"])
        state, value = self.descend(state, "value", self.value_loss, batch, q)
        state, critic = self.descend(state, "critic", self.critic_loss, batch, next_v, critic_key)
        state = self.critic.regularised(state)
        state, denoiser = self.descend(state, "denoiser", self.denoiser_loss, batch, denoiser_key)
        moved, actor = self.descend(state, "actor", self.actor_loss, batch, actor_key)
        ready = state.step >= self.warm_up
        params, opt = (
            pytree.tree_map(lambda a, b: torch.where(ready, a, b), new["actor"], old["actor"])
            for new, old in ((moved.params, state.params), (moved.opt, state.opt))
        )
        state = state._replace(params={**state.params, "actor": params}, opt={**state.opt, "actor": opt})
        state = self.polyak(state, "critic", torch.where(ready, self.config.polyak, 0.0))
        target = {k: v.clone() for k, v in state.target["critic"].items()}
        return state.with_extra(target=target), {**value, **critic, **denoiser, **actor}
