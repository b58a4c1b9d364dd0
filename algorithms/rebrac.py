"""ReBRAC: "Revisiting the Minimalist Approach to Offline Reinforcement Learning" (Tarasov et al., 2023, arXiv
2305.09836).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from offrl.algorithm import Batch, Loss, Metrics, Params, Sampler, TrainState, TransitionSampler, Update, merged
from offrl.families.critics import ConstraintSettings, Critic, RepresentationSettings, RiskSettings, Values
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
class ReBRACConfig(TD3Settings, ConstraintSettings, RepresentationSettings, RiskSettings):
    """Settings of ReBRAC; the defaults are the authors' for D4RL's locomotion tasks, where the two penalties differ
    between datasets.
    """

    name: str = "rebrac"
    actor_layer_norm: bool = setting(False, "LayerNorm after each hidden layer of the actor")
    actor_bc: float = setting(
        0.01, "weight of the actor's squared distance from the data's action (ReBRAC's beta_1)", low=0.0
    )
    actor_q: float = setting(
        1.0, "weight of the normalised value in the actor's loss; 0: the actor imitates and nothing else", low=0.0
    )
    critic_bc: float = setting(
        0.01, "weight, in the target, of the next action's squared distance from the data's (beta_2)", low=0.0
    )
    update_order: str = setting(
        "sequential",
        "sequential: the critics, then the actor by the new critics, then the targets (as published); simultaneous: "
        "all from the parameters before the update, and the actor goes on by its momentum in between (as OGBench)",
        choices=("sequential", "simultaneous"),
    )


@register("algo", "rebrac")
class ReBRAC(TD3[ReBRACConfig]):
    """TD3 with deeper critics that have LayerNorm, and a penalty in the actor's loss and one of its own in the critics'
    target.

    Distances are sums over action dimensions, as in the authors' code; TD3+BC's is a mean. The authors move the actor's
    target towards the actor of before its step; here it is the one of after it, as in TD3.
    """

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.latent_spec
        norm = {"layer_norm": c.actor_layer_norm, "layer_norm_epsilon": c.layer_norm_epsilon}
        actor = Deterministic(s.observation_dim, s.action_dim, c.hidden, **norm, activation=c.activation, init=c.init)
        self.critic = Critic(c, s)
        return {"critic": self.critic.network, "actor": actor, **self.cost_modules(), **self.encoder_modules()}

    def sampler(self) -> Sampler:
        sampler = super().sampler()
        if not isinstance(sampler, TransitionSampler):
            return sampler
        return replace(sampler, extra=("next_actions", *sampler.extra))

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        if self.config.update_order == "sequential":
            return super().update(state, batch, key, phase=phase)
        self, state, batch, learnt = self.on_latents(state, batch)
        critic, metrics = self.descend(state, "critic", self.critic_loss, batch, key)
        actor_metrics: Metrics = {}
        actor = self.momentum_step(state)
        if phase == 1:
            actor, actor_metrics = self.descend(state, "actor", self.actor_loss, batch)
        after = self.critic.regularised(merged(state, critic, actor))
        if phase == 1:
            after = after._replace(target=self.move_targets(state).target)
        after, costs = self.learn_costs(after, batch, lambda b: self.next_action(after, b, key), actor_metrics)
        return after, {**learnt, **metrics, **actor_metrics, **costs}

    def momentum_step(self, state: TrainState) -> TrainState:
        """The actor's Adam step by a gradient of 0, that is by momentum: OGBench's one optimiser steps all networks at
        every update.
        """
        actor = state.params["actor"]
        params, opt = self.optimizer("actor").update(
            actor, {k: torch.zeros_like(v) for k, v in actor.items()}, state.opt["actor"]
        )
        return state._replace(params={**state.params, "actor": params}, opt={**state.opt, "actor": opt})

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E (r + gamma (min_j Q'_j(s', a') - beta_2 |a' - a'_data|^2) - Q_i(s, a))^2, summed over critics i (equation
        3); in OGBench's order their mean."""
        next_action = self.next_action(state, batch, key)
        next_q, logits = self.next_q(state, batch, next_action, key)
        distance = (next_action - batch["next_actions"]).square().sum(-1)  # [B], of the noisy action
        target = self.critic.td_target(batch, Values(next_q - self.config.critic_bc * distance, logits))
        objective = self.critic.mean_objective if self.config.update_order == "simultaneous" else None
        return self.critic.loss(critic, batch, target, key, objective=objective)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch) -> Loss:
        """E [beta_1 |pi(s) - a|^2 - lambda min_i Q_i(s, pi(s)) / E |min_i Q_i|], with lambda = `actor_q`."""
        c = self.config
        (action,) = self.apply("actor", actor, batch["observations"])
        # [B]; of all critics, unlike TD3+BC
        q = self.critic.actor_q(state.params["critic"], batch["observations"], action).amin(0)
        distance = (action - batch["actions"]).square().sum(-1)
        loss = c.actor_bc * distance.mean() - c.actor_q * q.mean() / q.detach().abs().mean()
        metrics = {"actor/loss": loss, "actor/bc": distance.mean(), "actor/q": q.mean()}
        return self.limited(loss, metrics, state, batch["observations"], action)
