"""f-DVL: "Dual RL: Unification and New Methods for Reinforcement and Imitation Learning" (Sikchi et al., 2023, arXiv
2302.08560).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from offrl import losses, rng
from offrl.actor import Actor
from offrl.algorithm import Algorithm, Grid, Loss, Metrics, TrainState, Traits, Update
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch
from offrl.families import in_sample
from offrl.families.critics import Critic, Value, fit_value_range
from offrl.families.in_sample import SteepValueSettings
from offrl.optim import Adam, Params
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class FDVLConfig(SteepValueSettings):
    """Settings of f-DVL; the defaults are the authors' for D4RL's locomotion tasks, except `greediness`."""

    name: str = "f_dvl"
    batch_size: int = setting(1024, "transitions in a batch", low=1)
    gumbel_clip: float = setting(5.0, "reverse_kl: largest (Q - V) / gumbel_temperature in the exponent", low=0.0)
    random_actions: int = setting(1, "so many uniformly random actions for each state are added to V's batch", low=0)
    divergence: str = setting(
        "chi_square",
        "of the policy's visits from the data's: chi_square, total_variation, or reverse_kl, whose loss is XQL's",
        choices=("chi_square", "total_variation", "reverse_kl"),
    )
    greediness: float = setting(
        0.8,
        "lambda of chi_square and total_variation: nearer to 1, V is nearer to the largest Q (the latter needs more "
        "than 0.5)",
        low=0.0,
        high=1.0,
    )


@register("algo", "f_dvl")
class FDVL(Algorithm):
    """V minimises lambda f*(Q - V) + (1 - lambda) (V - Q) over the data's actions, f* the conjugate of a divergence,
    cut at 0.
    """

    Config = FDVLConfig
    traits = Traits(targets=("critic",), critic_modules=("critic",))

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Grid = None) -> Any:
        return fit_value_range(config, dataset, grid)

    def modules(self) -> dict[str, nn.Module]:
        self.value = Value(
            self.config, self.spec, layer_norm=self.config.value_layer_norm, norm_first=True
        )  # as the authors' code
        actor = in_sample.make_actor(self.config, self.spec)
        self.critic = Critic(self.config, self.spec)
        return {"value": self.value.network, "actor": actor, "critic": self.critic.network}

    def optimizer(self, name: str) -> Adam:
        return in_sample.optimizer(self.config, name)

    def value_loss(self, value: Params, state: TrainState, batch: Batch, q: Tensor) -> Loss:
        """E [lambda f*(Q - V) + (1 - lambda) (V - Q)], or for the reverse KL divergence XQL's Gumbel regression."""
        v = self.value(value, batch["observations"]).mean
        rows = self.value_error(q - v)
        return rows.mean(), in_sample.value_metrics(rows, q, v)

    def value_error(self, difference: Tensor) -> Tensor:
        """The loss of each row, [B], of Q - V [B]."""
        c = self.config
        if c.divergence == "reverse_kl":
            return losses.gumbel(difference, c.gumbel_temperature, c.gumbel_clip)
        dual = losses.chi_square_dual if c.divergence == "chi_square" else losses.total_variation_dual
        return dual(difference, c.greediness)

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E h(r + gamma V(s') - Q(s, a)), h Huber's loss."""
        target = self.critic.td_target(batch, self.value(state.params["value"], batch["next_observations"]))
        return self.critic.loss(
            critic, batch, target, key, objective=in_sample.huber_objective(self.config, self.critic)
        )

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, q: Tensor, key: Tensor) -> Loss:
        """-E min(exp(temperature (Q - V)), cap) log pi(a|s)."""
        advantage = q - self.value(state.params["value"], batch["observations"]).mean
        weight = losses.advantage_weight(advantage, self.config.temperature, self.config.max_weight)
        dist = self.apply("actor", actor, batch["observations"], key)
        loss = (weight * self.policy.bc_loss(dist, batch["actions"])).mean()
        return loss, {"actor/loss": loss, "actor/advantage": advantage.mean(), "actor/weight": weight.mean()}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        target_critics = self.critic.target_critics(state, key)
        value: Metrics = {}
        q = self.critic.min_q(target_critics, batch["observations"], batch["actions"]).mean
        for i in range(self.config.value_updates):
            inputs = in_sample.value_batch(
                self.config, self.critic, target_critics, batch, q, rng.fold_in(key, 200 + i)
            )
            opt_state = state.opt["value"]
            state, value = self.descend(state, "value", self.value_loss, *inputs)
            value["value/gradient"] = in_sample.gradient_norm(opt_state, state.opt["value"], self.optimizer("value"))
        state, actor = self.descend(state, "actor", self.actor_loss, batch, q, key)
        state, critic = self.descend(state, "critic", self.critic_loss, batch, key)
        state = self.critic.regularised(state)
        return self.polyak(state, "critic", self.config.polyak), {**value, **actor, **critic}

    def actor(self, state: TrainState) -> Actor:
        return in_sample.actor_of(self, state)

    def q_value(self, state: TrainState, observations: Tensor, actions: Tensor) -> Tensor:
        return self.critic.q(state.params["critic"], observations, actions).amin(0)
