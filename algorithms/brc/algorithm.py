"""BRC: "Bigger, Regularized, Categorical: High-Capacity Value Functions are Efficient Multi-Task Learners" (Nauman et
al., 2025, arXiv 2505.23150), for one task or several.

In an environment: `offrl finetune algo=brc env=ID`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Adam, Batch, Params, TrainState, Update
from offrl.algorithms.brc.networks import BroEnsemble, BroTanhGaussian, TaskBroEnsemble, TaskBroTanhGaussian
from offrl.algorithms.brc.scaling import MASKS, BRCConfig, ScaledByReturns, check_discount
from offrl.errors import UserError
from offrl.families.critics import Critic, Target, Values, blocks, check_layers
from offrl.families.multitask.numbers import action_masks, parts_of
from offrl.families.sac import SoftActorCritic
from offrl.registry import register

ENTROPY_BETA1 = 0.5  # Adam's, of the weight of the entropy
TASKS = "tasks.weight"  # of several tasks, [T, EMBEDDING]: a parameter of the critics, and the policy's copy of it


class BroCritic(Critic):
    """Critics with a BroNet each; of several tasks with their embeddings."""

    def make_network(self, size: int, inputs: int, outputs: int, norm_first: bool) -> nn.Module:
        c, s = self.config, self.spec
        sizes = size, inputs, *blocks(c.critic_hidden or c.hidden), outputs
        form: dict[str, Any] = {"activation": c.activation, "epsilon": c.layer_norm_epsilon}
        if parts := parts_of(s):
            return TaskBroEnsemble(len(parts), s.observation_dim, *sizes, **form)
        return BroEnsemble(*sizes, **form)

    def begin(self, state: TrainState) -> TrainState:
        return self.embedded(super().begin(state))

    def embedded(self, state: TrainState) -> TrainState:
        """The state with the critics' embeddings of tasks in the policy."""
        if not parts_of(self.spec):
            return state
        actor = {**state.params["actor"], TASKS: state.params["critic"][TASKS].clone()}
        return state._replace(params={**state.params, "actor": actor})


@register("algo", "brc")
class BRC(ScaledByReturns, SoftActorCritic[BRCConfig]):
    """SAC with wide residual critics of a distribution of returns, of which targets and the policy take the mean of
    all in place of the smallest, weight decay, and rewards scaled by the largest return so far. Order of steps, the
    authors': critics, targets, actor (by the new critics), weight of the entropy (by the actor before).
    """

    traits = replace(
        SoftActorCritic.traits, actions=("continuous",), own_encoders=False, scales_by_returns=True, multitask=True
    )
    critic: BroCritic
    critic_class = BroCritic
    reduction = "mean"

    def modules(self) -> dict[str, nn.Module]:
        c = self.config
        check_layers(c)
        if c.max_target_actions > 1:
            raise UserError("brc has targets of one action: leave algo.max_target_actions as it is")
        check_discount(c.discount)
        if self.parts and c.target_critics:
            raise UserError("brc has targets of all critics where it learns several tasks: leave algo.target_critics "
                            "at 0")  # fmt: skip
        return super().modules()

    def make_actor(self) -> nn.Module:
        c, s = self.config, self.spec
        form: dict[str, Any] = {"activation": c.activation, "epsilon": c.layer_norm_epsilon}
        sizes = s.observation_dim, s.action_dim, *blocks(c.hidden)
        if self.parts:
            return TaskBroTanhGaussian(action_masks(self.parts, s.action_dim), *sizes, **form)
        return BroTanhGaussian(*sizes, **form)

    def optimizer(self, name: str) -> Adam:
        adam = super().optimizer(name)
        if name == "entropy":
            return replace(adam, beta1=ENTROPY_BETA1)
        adam = replace(adam, weight_decay=self.config.weight_decay)
        if name == "actor" and self.parts:
            names = {key for key, _ in self.networks["actor"].named_parameters()}
            adam = replace(adam, decayed=frozenset(names - {TASKS, MASKS}))
        return adam

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
        state = self.polyak(self.critic.embedded(state), "critic")
        negative_entropy = self.negative_entropy(state.params["actor"], batch["observations"], actor_key)
        state, actor = self.descend(state, "actor", self.actor_loss, batch, actor_key)
        target = self.target_entropies(state.params["actor"])
        if isinstance(target, Tensor):
            target = self.of_task(target, batch["observations"]).mean()
        state, entropy = self.descend(state, "entropy", self.linear_entropy_loss, negative_entropy, target)
        return state, {**critic, **actor, **entropy, "critic/divisor": state.extra["divisor"].mean()}
