"""RSSM: a recurrent state-space model, and an actor-critic that learns in its imagination. DreamerV3 ("Mastering
Diverse Domains through World Models", Hafner et al., 2023, arXiv 2301.04104); with `objective=bottleneck` its model is
trained as RePo's ("RePo: Resilient Model-Based Reinforcement Learning by Regularizing Posterior Predictability", Zhu et
al., 2023, arXiv 2309.00082), with `objective=information` as InfoPower's ("INFOrmation Prioritization through
EmPOWERment in Visual Model-Based RL", Bharadhwaj et al., 2022, arXiv 2204.08585).

Ours, for data without an environment: heads whose disagreement is a penalty (`members`, `penalty`, after Offline
DreamerV2, arXiv 2206.04779), a model that stays as it is after some updates, and cloning of the data's actions.
Deviations from each paper, also of the presets' settings files: docs/algorithms/rssm.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Batch, Loss, Metrics, Params, TrainState, Tree, Update
from offrl.algorithms.rssm.imagination import LatentRollout, latent_rollout
from offrl.algorithms.rssm.settings import RSSMConfig
from offrl.data.samplers.states import ARRIVAL_REWARDS, IS_LAST, IS_TERMINAL, in_time
from offrl.errors import UserError
from offrl.families.sequence import masked_mean
from offrl.optim import constant
from offrl.registry import register
from offrl.world_models.recurrent.actor import RecurrentActor
from offrl.world_models.recurrent.base import TRAITS, RecurrentModel, chosen
from offrl.world_models.recurrent.latents import LatentWindows
from offrl.world_models.recurrent.modules import feature_size
from offrl.world_models.recurrent.networks import HEAD, BoundedNormal, head
from offrl.world_models.recurrent.returns import lambda_returns


@register("algo", "rssm")
class RSSM(RecurrentModel[RSSMConfig]):
    """Modules: the model's, actor, critic. Shapes: H imagined steps; N = T B states that they begin at."""

    traits = dataclasses.replace(
        TRAITS, targets=("critic",), policy_modules=("encoder", "dynamics", "posterior", "actor")
    )
    actor_class = RecurrentActor

    def modules(self) -> dict[str, nn.Module]:
        c, s, model = self.config, self.spec, self.model_modules()
        if c.policy_after_model and not c.model_updates:
            raise UserError("algo.policy_after_model needs a model that is ready once: algo.model_updates=25000, say")
        features = feature_size(c)
        critic, actor = head(features, c.width, 3, HEAD.out_dim, 0.0), BoundedNormal(features, s.action_dim, c.width)
        return {**model, "actor": actor, "critic": critic}

    def extra(self, params: dict[str, Params]) -> Tree:
        return {"low": torch.zeros(()), "high": torch.zeros(())}

    # ---- losses

    def actor_loss(self, actor: Params, rollout: LatentRollout, windows: LatentWindows, batch: Batch) -> Loss:
        """-E weight [sg((R - v) / max(1, S)) ln pi(a|s) + 3e-4 H(pi)], DreamerV3's; actor_gradient=model: -E weight [R
        + 3e-4 H(pi)], DreamerV2's; ours: - bc_weight E ln pi(a_t|s_t) of the data.
        """
        c, policy = self.config, self.policy
        dist = self.apply("actor", actor, rollout.features[:-1].detach())
        entropy = policy.entropy(dist)  # type: ignore[operator]
        if c.actor_gradient == "model":
            gain = rollout.returns
        else:
            advantage = (rollout.returns - rollout.values[:-1]) / (rollout.high - rollout.low).clamp(min=1.0)
            gain = policy.log_prob(dist, rollout.actions) * advantage
        gain = gain + c.entropy_weight * entropy
        known = self.apply("actor", actor, windows.state.features.detach())
        cloning = masked_mean(-policy.log_prob(known, batch["actions"]), ~batch[IS_LAST])
        loss = c.bc_weight * cloning - (rollout.weights * gain).mean()
        metrics: Metrics = {"loss": loss, "bc": cloning, "entropy": entropy.mean(), "return": rollout.returns.mean()}
        return loss, {f"actor/{name}": value for name, value in metrics.items()}

    def critic_loss(
        self, critic: Params, state: TrainState, rollout: LatentRollout, windows: LatentWindows, batch: Batch
    ) -> Loss:
        """E weight [CE(v, R) + CE(v, v')] + 0.3 of the same on the data's own returns, which begin again from imagined
        ones at each state (as the authors' code); the gradient of the latter trains the model, too.
        """
        c = self.config
        loss = self.value_loss("critic", critic, state, rollout.features[:-1], rollout.returns)
        loss = (rollout.weights * loss).mean()
        alive = c.discount * (~batch[IS_TERMINAL]).float()
        starts = rollout.returns[0].unflatten(0, batch[IS_LAST].shape)
        returns = lambda_returns(batch[ARRIVAL_REWARDS], starts, alive, (~batch[IS_LAST]).float(), c.decay)
        replayed = self.value_loss("critic", critic, state, windows.state.features[:-1], returns)
        replayed = ((~batch[IS_LAST][:-1]).float() * replayed).mean()
        return loss + c.replay_weight * replayed, {"critic/loss": loss, "critic/replay": replayed}

    def loss(
        self, params: dict[str, Params], state: TrainState, batch: Batch, key: Tensor
    ) -> tuple[Tensor, Metrics, Any]:
        """The losses of model, actor and critic, of the states after the burn-in."""
        c, keys = self.config, rng.split(key, 3)
        windows, batch, model, metrics = self.model_loss(params, batch, keys[:2])
        through = params["actor"] if c.actor_gradient == "model" else None
        rollout = latent_rollout(self, state, windows, keys[2], through)
        actor, actor_metrics = self.actor_loss(params["actor"], rollout, windows, batch)
        critic, critic_metrics = self.critic_loss(params["critic"], state, constant(rollout), windows, batch)
        metrics = {**metrics, **actor_metrics, **critic_metrics}
        return model + actor + critic, metrics, {"low": rollout.low, "high": rollout.high}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        c, before = self.config, state
        batch = in_time(batch)
        names = (*self.model, "actor", "critic")
        state, metrics, scale = self.descend(state, names, self.loss, batch, key, aux=True)
        state = self.polyak(state.with_extra(**scale), "critic")
        state = self.with_old_model(state, before)
        if c.policy_after_model:
            state = self.without_policy(state.step < c.model_updates, state, before)
        return state, metrics

    def without_policy(self, waits: Tensor, state: TrainState, before: TrainState) -> TrainState:
        """The state with actor, critic, their optimisers and the scale of returns of `before`, where `waits` []."""
        parts: dict[str, Any] = {
            part: {
                name: x if name in self.model else chosen(waits, getattr(before, part)[name], x)
                for name, x in getattr(state, part).items()
            }
            for part in ("params", "opt", "target", "extra")
        }
        return state._replace(**parts)
