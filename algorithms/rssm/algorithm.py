"""RSSM: a recurrent state-space model, and an actor-critic that learns in its imagination. DreamerV3 ("Mastering
Diverse Domains through World Models", Hafner et al., 2023, arXiv 2301.04104); with `objective=bottleneck` its model is
trained as RePo's ("RePo: Resilient Model-Based Reinforcement Learning by Regularizing Posterior Predictability", Zhu et
al., 2023, arXiv 2309.00082), with `objective=information` as InfoPower's ("INFOrmation Prioritization through
EmPOWERment in Visual Model-Based RL", Bharadhwaj et al., 2022, arXiv 2204.08585).

Ours, for data without an environment: heads whose disagreement is a penalty (`members`, `penalty`, after Offline
DreamerV2, arXiv 2206.04779), a model that stays as it is after some updates, and cloning of the data's actions.
"""

from __future__ import annotations

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
    Grid,
    Loss,
    Metrics,
    Params,
    Sampler,
    TrainState,
    Traits,
    Tree,
    Update,
)
from offrl.algorithms.rssm.actor import RecurrentActor
from offrl.algorithms.rssm.imagination import Dream, imagined, lambda_returns
from offrl.algorithms.rssm.latents import Latents, LatentWindows
from offrl.algorithms.rssm.modules import model_networks
from offrl.algorithms.rssm.networks import HEAD, BoundedNormal, head
from offrl.algorithms.rssm.objectives import OBJECTIVES
from offrl.algorithms.rssm.open_loop import open_loop
from offrl.algorithms.rssm.settings import RSSMConfig, check_settings, fitted
from offrl.data.samplers.states import (
    ARRIVAL_REWARDS,
    IS_FIRST,
    IS_LAST,
    IS_TERMINAL,
    PREVIOUS_ACTIONS,
    StateSampler,
    in_time,
    steps_of,
)
from offrl.families.sequence import masked_mean
from offrl.optim import LaProp, constant
from offrl.registry import register


@register("algo", "rssm")
class RSSM(Algorithm[RSSMConfig]):
    """Modules: encoder, dynamics, prior, posterior, reward, continuation, decoder or, with `objective=bottleneck`,
    multiplier, with `information` multiplier, contrast and inverse (the model), actor, critic. Shapes: T states of a
    window, the first axis of all that is learnt from; B windows; H imagined steps; N = T B states that they begin at; F
    features.
    """

    # a program grows with the states of a window and the imagined steps
    traits = Traits(
        targets=("critic",),
        policy_modules=("encoder", "dynamics", "posterior", "actor"),
        observations="streams",
        image_encoder="dreamer",
        shifts_images=False,
        actions=("continuous",),
        n_step=False,
        compiles=False,
    )
    actor_class = RecurrentActor
    open_loop = open_loop

    @classmethod
    def fit_config(cls, config: RSSMConfig, dataset: Dataset, grid: Grid = None) -> RSSMConfig:
        """`config`, once the data have rewards."""
        return fitted(config, dataset, grid)

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        check_settings(c)
        model, features = model_networks(c, s), c.recurrent_width + c.groups * c.classes
        self.model = tuple(model)
        critic, actor = head(features, c.width, 3, HEAD.out_dim, 0.0), BoundedNormal(features, s.action_dim, c.width)
        return {**model, "actor": actor, "critic": critic}

    def sampler(self) -> Sampler:
        return StateSampler(self.config.length, "chain")

    def optimizer(self, name: str) -> Adam:
        c = self.config
        if name == "multiplier":
            return Adam(c.multiplier_learning_rate)
        return LaProp(c.learning_rate, eps=1e-20, warmup_steps=c.warmup_steps, adaptive_clip=c.adaptive_clip)

    def extra(self, params: dict[str, Params]) -> Tree:
        return {"low": torch.zeros(()), "high": torch.zeros(())}

    def latents(self, params: dict[str, Params]) -> Latents:
        """The latent model with these parameters."""
        return Latents(lambda name, *x: self.apply(name, params[name], *x), self.config)

    # ---- losses

    def actor_loss(self, actor: Params, dream: Dream, windows: LatentWindows, batch: Batch) -> Loss:
        """-E weight [sg((R - v) / max(1, S)) ln pi(a|s) + 3e-4 H(pi)], DreamerV3's; actor_gradient=model: -E weight [R
        + 3e-4 H(pi)], DreamerV2's; ours: - bc_weight E ln pi(a_t|s_t) of the data.
        """
        c, policy = self.config, self.policy
        dist = self.apply("actor", actor, dream.features[:-1].detach())
        entropy = policy.entropy(dist)  # type: ignore[operator]
        if c.actor_gradient == "model":
            gain = dream.returns
        else:
            advantage = (dream.returns - dream.values[:-1]) / (dream.high - dream.low).clamp(min=1.0)
            gain = policy.log_prob(dist, dream.actions) * advantage
        gain = gain + c.entropy_weight * entropy
        known = self.apply("actor", actor, windows.state.features.detach())
        cloning = masked_mean(-policy.log_prob(known, batch["actions"]), ~batch[IS_LAST])
        loss = c.bc_weight * cloning - (dream.weights * gain).mean()
        metrics: Metrics = {"loss": loss, "bc": cloning, "entropy": entropy.mean(), "return": dream.returns.mean()}
        return loss, {f"actor/{name}": value for name, value in metrics.items()}

    def critic_loss(
        self, critic: Params, state: TrainState, dream: Dream, windows: LatentWindows, batch: Batch
    ) -> Loss:
        """E weight [CE(v, R) + CE(v, v')] + 0.3 of the same on the data's own returns, which begin again from imagined
        ones at each state (as the authors' code); the gradient of the latter trains the model, too.
        """
        c = self.config

        def loss(features: Tensor, returns: Tensor) -> Tensor:
            logits = self.apply("critic", critic, features)
            slow = HEAD.mean(self.apply("critic", state.target["critic"], features.detach())).detach()
            return HEAD.loss(logits, returns) + HEAD.loss(logits, slow)

        dreamt = (dream.weights * loss(dream.features[:-1], dream.returns)).mean()
        alive = c.discount * (~batch[IS_TERMINAL]).float()
        again = dream.returns[0].unflatten(0, batch[IS_LAST].shape)
        returns = lambda_returns(batch[ARRIVAL_REWARDS], again, alive, (~batch[IS_LAST]).float(), c.decay)
        replayed = ((~batch[IS_LAST][:-1]).float() * loss(windows.state.features[:-1], returns)).mean()
        return dreamt + c.replay_weight * replayed, {"critic/loss": dreamt, "critic/replay": replayed}

    def loss(
        self, params: dict[str, Params], state: TrainState, batch: Batch, key: Tensor
    ) -> tuple[Tensor, Metrics, Any]:
        """The losses of model, actor and critic, of the states after the burn-in."""
        c, keys = self.config, rng.split(key, 3)
        latents = self.latents(params)
        windows = latents.observe_windows(batch["observations"], batch[PREVIOUS_ACTIONS], batch[IS_FIRST], keys[0])
        windows, batch = windows.since(c.burn_in), steps_of(batch, slice(c.burn_in, None))
        model, metrics = OBJECTIVES[c.objective](latents, windows, batch, keys[1], params)
        through = params["actor"] if c.actor_gradient == "model" else None
        dream = imagined(self, state, windows, keys[2], through)
        actor, actor_metrics = self.actor_loss(params["actor"], dream, windows, batch)
        critic, critic_metrics = self.critic_loss(params["critic"], state, constant(dream), windows, batch)
        metrics = {**metrics, **actor_metrics, **critic_metrics}
        return model + actor + critic, metrics, {"low": dream.low, "high": dream.high}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        c, before = self.config, state
        batch = in_time(batch)
        names = (*self.model, "actor", "critic")
        state, metrics, scale = self.descend(state, names, self.loss, batch, key, aux=True)
        state = self.polyak(state.with_extra(**scale), "critic")
        if c.model_updates:
            learns = state.step < c.model_updates
            model = {n: _where(learns, state.params[n], before.params[n]) for n in self.model}
            state = state._replace(params={**state.params, **model})
            if c.policy_after_model:
                state = self.without_policy(learns, state, before)
        return state, metrics

    def without_policy(self, waits: Tensor, state: TrainState, before: TrainState) -> TrainState:
        """The state with actor, critic, their optimisers and the scale of returns of `before`, where `waits` []."""
        names = ("actor", "critic")

        def chosen(after: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
            return {**after, **{n: _where(waits, old[n], after[n]) for n in names if n in after}}

        return state._replace(
            params=chosen(state.params, before.params),
            opt=chosen(state.opt, before.opt),
            target=chosen(state.target, before.target),
            extra=_where(waits, before.extra, state.extra),
        )


def _where(condition: Tensor, chosen: Tree, otherwise: Tree) -> Tree:
    return pytree.tree_map(lambda x, y: torch.where(condition, x, y), chosen, otherwise)
