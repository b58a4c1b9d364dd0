"""Implicit diffusion Q-learning: "IDQL: Implicit Q-Learning as an Actor-Critic Method with Diffusion Policies"
(Hansen-Estruch et al., 2023, arXiv 2304.10573)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offrl import losses, rng
from offrl.algorithm import Adam, Algorithm, Batch, Loss, Params, TrainState, Traits, Tree, Update
from offrl.families import in_sample
from offrl.families.critics import ActorScheduleSettings, Critic, CriticSettings, Value, Values, WithCritic
from offrl.families.generative.best_of_n import BestOfActor, Noise, candidates_field, drawn_of
from offrl.families.generative.settings import greedy_field
from offrl.nn import diffusion
from offrl.nn.diffusion import ResidualDenoiser
from offrl.registry import register
from offrl.settings.field import defaults, setting

SCHEDULE = "vp"  # the variance-preserving one


@dataclass
@defaults(batch_size=512, init="xavier", decay_steps=3_000_000)
class IDQLConfig(ActorScheduleSettings, CriticSettings):
    """Settings of IDQL; the defaults are the authors' for D4RL's locomotion tasks, with the denoiser of the larger of
    their learners.
    """

    name: str = "idql"
    expectile: float = setting(
        0.7, "tau: 0.5 values the data's policy, 1.0 the best action in the data", low=0.0, high=1.0
    )
    denoising_steps: int = setting(5, "steps from noise to an action (T)", low=1, high=1000)
    width: int = setting(256, "width of the denoiser's residual blocks, which are four times as wide inside", low=1)
    blocks: int = setting(3, "residual blocks of the denoiser", low=0)
    embedding: int = setting(
        64, "waves in which the denoiser sees a denoising step, through two layers twice as wide", low=2
    )
    dropout: float = setting(
        0.1, "dropout rate of the denoiser's blocks while they learn", low=0.0, high=0.99, structural=True
    )
    weight_decay: float = setting(
        1e-4, "AdamW's decay of the denoiser's parameters (optax's default)", low=0.0, structural=True
    )
    average: float = setting(
        0.001, "rate at which an averaged denoiser, which acts, follows the trained one", low=0.0, high=1.0
    )
    candidates: int = candidates_field(64, "actions that are drawn at each step (N), of which one is played")
    choice: str = setting(
        "best",
        "which of the drawn actions is played: best: the one with the largest Q; expectile: one drawn with the weights "
        "of V's loss, |tau - 1(Q < V)|, from the policy that V values",
        choices=("best", "expectile"),
        acting=True,
    )
    greedy: str = greedy_field()


class BestDenoisedActor(BestOfActor):
    """One of N actions of the averaged denoiser, which the target critics, and V, choose as `choice` says."""

    algorithm: IDQL

    def draw(self, observations: Tensor, key: Tensor, noise: Noise) -> Tensor:
        steps, average = self.algorithm.config.denoising_steps, self.state.extra["average"]
        keys = rng.split(key, steps + 1)

        def predicted(x: Tensor, step: Tensor) -> Tensor:
            return self.algorithm.apply("actor", average, x, step, observations)

        first, process = noise(keys[steps]), {"clip": "state", "variance": "beta"}
        return diffusion.reverse_process(predicted, first, lambda t: noise(keys[t]), steps, SCHEDULE, **process)

    def scores(self, observations: Tensor, candidates: Tensor) -> Tensor:
        return self.algorithm.critic.q(self.state.extra["target"], observations, candidates).amin(0)

    def choose_of(self, observations: Tensor, candidates: Tensor, key: Tensor) -> Tensor:
        if self.algorithm.config.choice == "best":
            return super().choose_of(observations, candidates, key)
        advantage = (
            self.scores(observations, candidates) - self.algorithm.value(self.state.params["value"], observations).mean
        )
        weights = losses.expectile_weight(advantage, self.algorithm.config.expectile)
        return drawn_of(torch.as_tensor(weights).log(), candidates, key)


@register("algo", "idql")
class IDQL(WithCritic, Algorithm[IDQLConfig]):
    """IQL's V and Q, which see the data's actions alone, beside a diffusion model that clones all that the data do; the
    one of N of its actions that the target critics value most is played.

    Modules: value, critic, and actor, the denoiser. `extra` holds what acts: the averaged denoiser, and a copy of the
    target critics."""

    traits = Traits(
        observations="encoded",
        targets=("critic",),
        policy_modules=("actor", "value"),
        critic_modules=("critic",),
        actions=("continuous",),
    )
    actor_class = BestDenoisedActor

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        self.value, self.critic = Value(c, s), Critic(c, s)
        denoiser = ResidualDenoiser(s.observation_dim, s.action_dim, c.width, c.blocks, c.embedding, dropout=c.dropout)
        return {"value": self.value.network, "critic": self.critic.network, "actor": denoiser}

    def optimizer(self, name: str) -> Adam:
        adam = super().optimizer(name)
        return dataclasses.replace(adam, weight_decay=self.config.weight_decay) if name == "actor" else adam

    def extra(self, params: dict[str, Params]) -> Tree:
        return {
            to: {k: v.clone() for k, v in params[name].items()}
            for to, name in (("average", "actor"), ("target", "critic"))
        }

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |e - eps(sqrt(abar_t) a + sqrt(1 - abar_t) e, t, s)|^2, summed over an action's entries: cloning, whatever
        it is worth.
        """
        step_key, noise_key, dropout_key = rng.split(key, 3)
        steps = self.config.denoising_steps
        noisy, step, noise = diffusion.noised(batch["actions"], steps, (step_key, noise_key), SCHEDULE)
        predicted = self.apply("actor", actor, noisy, step, batch["observations"], dropout_key)
        loss = (predicted - noise).square().sum(-1).mean()
        return loss, {"actor/loss": loss}

    def value_loss(self, value: Params, state: TrainState, batch: Batch, q: Values) -> Loss:
        """E |tau - 1(Q' - V < 0)| (Q' - V)^2 (arXiv 2110.06169, equation 5)."""
        return in_sample.expectile_loss(self.value, value, batch, q, self.config.expectile)

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E (r + gamma V(s') - Q_i(s, a))^2, the mean over critics i (arXiv 2110.06169, equation 6)."""
        next_v = self.value(state.params["value"], batch["next_observations"])
        return self.critic.loss(
            critic, batch, self.critic.td_target(batch, next_v), key, objective=self.critic.mean_objective
        )

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        actor_key, value_key, critic_key = rng.split(key, 3)
        state, actor = self.descend(state, "actor", self.actor_loss, batch, actor_key)
        average = {
            k: torch.lerp(v, state.params["actor"][k], self.config.average) for k, v in state.extra["average"].items()
        }
        q = self.critic.min_q(self.critic.target_critics(state, value_key), batch["observations"], batch["actions"])
        state, value = self.descend(state, "value", self.value_loss, batch, q)
        # with the new V, as the authors' code
        state, critic = self.descend(state, "critic", self.critic_loss, batch, critic_key)
        state = self.polyak(self.critic.regularised(state), "critic")
        target = {k: v.clone() for k, v in state.target["critic"].items()}
        return state.with_extra(average=average, target=target), {**actor, **value, **critic}
