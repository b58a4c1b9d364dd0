"""TD3-AWR: "A Clean Slate for Offline Reinforcement Learning" (Jackson et al., 2025, arXiv 2504.11453)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from offrl import losses
from offrl.algorithm import Batch, Loss, Params, TrainState, TransitionSampler, Update
from offrl.families.critics import Critic, Value, Values
from offrl.families.in_sample import expectile_loss
from offrl.families.td3 import TD3, TD3Settings
from offrl.nn import Deterministic
from offrl.registry import register
from offrl.settings.field import defaults, setting


@dataclass
@defaults(
    learning_rate=1e-3,
    batch_size=1024,
    hidden=[256, 256, 256],
    layer_norm=True,
    layer_norm_epsilon=1e-6,
    init="fixed_bias",
)
class TD3AWRConfig(TD3Settings):
    """Settings of TD3-AWR. The authors search per task: actor_bc from 0.0005 to 1, critic_bc from 0 to 0.1, expectiles
    of 0.5, 0.7 and 0.9, temperatures of 0.5, 3 and 10. The defaults lie in between."""

    name: str = "td3_awr"
    actor_layer_norm: bool = setting(True, "LayerNorm after each hidden layer of the actor")
    actor_bc: float = setting(
        0.01, "weight of the actor's squared distance from the data's action (ReBRAC's beta_1)", low=0.0
    )
    actor_q: float = setting(
        1.0, "weight of the normalised value in the actor's loss; 0: the actor imitates and nothing else", low=0.0
    )
    critic_bc: float = setting(
        0.01, "weight, in the target, of the next action's squared distance from the data's (beta_2)", low=0.0
    )
    expectile: float = setting(0.7, "of Q over the data's actions, which advantages are relative to", low=0.0, high=1.0)
    temperature: float = setting(
        3.0, "multiplies the advantage in the exponent of the imitation's weight; 0: ReBRAC", low=0.0
    )
    max_weight: float = setting(100.0, "cap of the exponential weights", low=0.0)


@register("algo", "td3_awr")
class TD3AWR(TD3[TD3AWRConfig]):
    """ReBRAC that imitates an action the more the better it is: IQL's weights exp(temperature * (Q - V)), V an
    expectile of Q.
    """

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        norm = {"layer_norm": c.actor_layer_norm, "layer_norm_epsilon": c.layer_norm_epsilon}
        actor = Deterministic(s.observation_dim, s.action_dim, c.hidden, **norm, activation=c.activation, init=c.init)
        self.critic = Critic(c, s)
        self.value = Value(c, s)
        return {"critic": self.critic.network, "actor": actor, "value": self.value.network}

    def sampler(self) -> TransitionSampler:
        return TransitionSampler(("next_actions",), self.config.n_step)

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E (r + gamma (min_j Q'_j(s', a') - beta_2 |a' - a'_data|^2) - Q_i(s, a))^2, summed over critics i."""
        next_action = self.next_action(state, batch, key)
        next_q, logits = self.next_q(state, batch, next_action, key)
        distance = (next_action - batch["next_actions"]).square().sum(-1)  # [B], of the noisy action
        target = self.critic.td_target(batch, Values(next_q - self.config.critic_bc * distance, logits))
        return self.critic.loss(critic, batch, target, key)

    def value_loss(self, value: Params, state: TrainState, batch: Batch) -> Loss:
        """E |tau - 1(Q - V < 0)| (Q - V)^2, Q the smallest of the online critics (IQL's expectile regression)."""
        q = self.critic.min_q(state.params["critic"], batch["observations"], batch["actions"])
        return expectile_loss(self.value, value, batch, q, self.config.expectile)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch) -> Loss:
        """E [beta_1 w |pi(s) - a|^2 - lambda min_i Q_i(s, pi(s)) / E |min_i Q_i|], with w = min(exp(beta (Q(s, a) -
        V(s))), cap).
        """
        c, critic, observations = self.config, state.params["critic"], batch["observations"]
        advantage = (
            self.critic.q(critic, observations, batch["actions"]).amin(0)
            - self.value(state.params["value"], observations).mean
        )
        weight = losses.advantage_weight(advantage, c.temperature, c.max_weight)
        (action,) = self.apply("actor", actor, observations)
        q = self.critic.q(critic, observations, action).amin(0)  # [B]
        distance = (action - batch["actions"]).square().sum(-1)
        loss = c.actor_bc * (weight * distance).mean() - c.actor_q * q.mean() / q.detach().abs().mean()
        metrics = {"actor/loss": loss, "actor/bc": distance.mean(), "actor/q": q.mean()}
        return loss, {**metrics, "actor/advantage": advantage.mean(), "actor/weight": weight.mean()}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        state, critic = self.descend(state, "critic", self.critic_loss, batch, key)
        state = self.critic.regularised(state)
        if phase == 0:
            return state, critic
        # V of the new critics, for the actor's weights
        state, value = self.descend(state, "value", self.value_loss, batch)
        state, actor = self.descend(state, "actor", self.actor_loss, batch)
        return self.move_targets(state), {**critic, **value, **actor}
