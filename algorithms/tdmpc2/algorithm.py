"""TD-MPC2: "TD-MPC2: Scalable, Robust World Models for Continuous Control" (Hansen et al., 2024, arXiv 2310.16828).

Encoder, latent dynamics, rewards and critics learn together from windows of states; a policy maximises the critics, and
acting plans around it. Ours is the pessimism for data without an environment, for which nothing is published: the
policy also clones the data (`bc_weight`), targets take the smallest of all critics (`target_critics`), and plans stay
near the policy's (`plan_distance_weight`, `plan_start`, `plan_proposals`, `plan_std_max`, `plan_temperature`). Windows
are drawn alike, where the authors draw an episode first, and images are encoded otherwise; all deviations:
docs/algorithms/tdmpc2.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl import losses, rng
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
    Update,
)
from offrl.algorithms.tdmpc2.actor import LatentPlanner, open_loop
from offrl.algorithms.tdmpc2.critics import LatentCritics
from offrl.algorithms.tdmpc2.networks import FORM, HEAD, LatentModel, LatentPolicy, latent_encoder
from offrl.algorithms.tdmpc2.settings import TDMPC2Config, check_settings, fitted
from offrl.algorithms.tdmpc2.tasks import ManyTasks, scaled_entropy
from offrl.data.samplers.states import IS_TERMINAL, VALID, StateSampler, in_time, steps_of
from offrl.nn.encoders.streams import shifted_windows
from offrl.registry import register


@register("algo", "tdmpc2")
class TDMPC2(ManyTasks, Algorithm[TDMPC2Config]):
    """Modules: encoder, model (dynamics, rewards, terminals), critic, actor. Shapes: K states of a window, the first
    axis of all that is learnt from; B windows; L latent; E critics.
    """

    traits = Traits(
        targets=("critic",),
        policy_modules=("encoder", "model", "critic", "actor"),
        critic_modules=("encoder", "critic"),
        observations="streams",
        image_encoder="tdmpc2",
        actions=("continuous",),
        n_step=False,
        acts_on_device=True,
        multitask=True,
    )
    actor_class = LatentPlanner
    open_loop = open_loop

    @classmethod
    def fit_config(cls, config: TDMPC2Config, dataset: Dataset, grid: Grid = None) -> TDMPC2Config:
        """`config` with the discount of the longest episodes, and whether they end in terminals."""
        return fitted(config, dataset, grid)

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        check_settings(c, s.action_dim)
        self.critics = LatentCritics(c, s)
        steps = c.plan_population * c.plan_iterations * c.plan_horizon
        self.runtime.notes = (f"planning asks the model {steps:,} times before each action (algo.plan_*)",) * c.planning
        return {
            "encoder": latent_encoder(s, c.encoder_hidden, c.latent),
            "model": LatentModel(c.latent, s.action_dim, c.hidden, c.episodic, len(self.parts)),
            "critic": self.critics.network,
            "actor": LatentPolicy(c.latent, s.action_dim, c.hidden, bool(self.parts), **FORM),
        }

    def sampler(self) -> Sampler:
        return StateSampler(self.config.horizon + 1)

    def optimizer(self, name: str) -> Adam:
        c = self.config
        if name == "actor":
            return Adam(c.learning_rate, eps=1e-5, clip_norm=c.clip_norm)
        return Adam(c.learning_rate * c.encoder_rate if name == "encoder" else c.learning_rate)

    # ---- values

    def q_value(self, state: TrainState, observations: Tensor, actions: Tensor) -> Tensor:
        latents = self.encode(state.params, state.extra, observations)
        return HEAD.mean(self.critics.logits(state.params["critic"], latents, actions)).amin(0)

    def td_target(self, state: TrainState, batch: Batch, following: Tensor, key: Tensor) -> Tensor:
        """y_t = r_t + gamma (1 - terminal) min_j Q'_j(z_{t+1}, a'), a' ~ pi(z_{t+1}), over some j: [K - 1, B]."""
        chosen, draw = rng.split(key)
        action = self.policy.sample(self.apply("actor", state.params["actor"], following), draw)
        value = self.critics.target_q(state.target["critic"], following, action, chosen)
        masks = (~batch[IS_TERMINAL][1:]).float()
        return losses.td_target(batch["rewards"][:-1], masks, self.discount(following), value)

    # ---- learning

    def weighted(self, loss: Tensor) -> Tensor:
        """The mean of losses [T, ...], those of step t times rho^t."""
        mean = loss.flatten(1).mean(1)
        return (self.config.rho ** torch.arange(len(mean), device=mean.device) * mean).mean()

    def model_loss(
        self,
        params: dict[str, Params],
        state: TrainState,
        batch: Batch,
        following: Tensor,
        targets: Tensor,
        key: Tensor,
    ) -> tuple[Tensor, Metrics, Tensor]:
        """mean_t rho^t [20 |z_{t+1} - sg h(s_{t+1})|^2 + 0.1 CE(R(z_t, a_t), r_t) + 0.1 mean_i CE(Q_i(z_t, a_t), y_t)]
        + BCE(terminal), z_0 = h(s_0), z_{t+1} = d(z_t, a_t) (equation 4), and z_0..z_H [K, B, L].
        """
        c, actions = self.config, batch["actions"][:-1]
        latents, steps = [self.encode(params, state.extra, steps_of(batch["observations"], 0))], []
        for action in actions:
            steps.append(self.apply("model", params["model"], latents[-1], action))
            latents.append(steps[-1].latent)
        z = torch.stack(latents)
        error = (z[1:] - following)[..., : c.latent].square().mean(-1)
        consistency = self.weighted(torch.where(batch[VALID][1:], error, 0.0))
        reward = self.weighted(HEAD.loss(torch.stack([step.reward for step in steps]), batch["rewards"][:-1]))
        logits = self.critics.logits(params["critic"], z[:-1], actions, key)
        value = self.weighted(HEAD.loss(logits, targets).mean(0))
        loss = c.consistency_weight * consistency + c.reward_weight * reward + c.value_weight * value
        metrics = {
            "model/consistency": consistency,
            "model/reward": reward,
            "critic/loss": value,
            "critic/q": HEAD.mean(logits).mean(),
            "critic/saturation": HEAD.saturation(targets),
        }
        if c.episodic:
            ends = torch.stack([step.termination for step in steps])
            termination = F.binary_cross_entropy_with_logits(ends, batch[IS_TERMINAL][1:].float())
            loss, metrics["model/termination"] = loss + c.termination_weight * termination, termination
        return loss, metrics, z

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, latents: Tensor, key: Tensor) -> Loss:
        """-mean_t rho^t [Q(z_t, a) / S + 1e-4 H], a ~ pi(z_t), Q the mean of two critics, H = -A log N(u) of the action
        before tanh (equation 6 and the authors' code); ours: + bc_weight E|Q / S| / 2.5 mean_t rho^t (a - a_t)^2,
        of the drawn action, so that its spread counts as well: values are of drawn actions.
        """
        c, keys = self.config, rng.split(key, 3)
        mean, log_std = self.apply("actor", actor, latents)
        noise = rng.normal(keys[0], tuple(mean.shape))
        action = (mean + log_std.exp() * noise).tanh()
        entropy = scaled_entropy(log_std, noise)
        q = self.critics.mean_q(state.params["critic"], latents, action, keys[1], keys[2])
        first = q[0].detach()
        spread = losses.percentile(first, 0.95) - losses.percentile(first, 0.05)
        scale = torch.lerp(state.extra["scale"], spread.clamp(min=1.0), c.polyak)
        error = (action[:-1] - batch["actions"][:-1]).square()
        cloning = self.weighted(self.per_action(error, log_std[:-1]))
        size = (q.detach() / scale).abs().mean() / losses.CLONING
        loss = c.bc_weight * size * cloning - self.weighted(q / scale + c.entropy_weight * entropy)
        metrics: dict[str, Any] = {"loss": loss, "bc": cloning, "scale": scale, "entropy": entropy.mean()}
        return loss, {f"actor/{name}": value for name, value in metrics.items()}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        keys = rng.split(key, 3)
        batch = in_time(shifted_windows(self.networks["encoder"], batch, key))
        later = steps_of(batch["observations"], slice(1, None))
        following = self.encode(state.params, state.extra, later)
        targets = self.td_target(state, batch, following, keys[0])
        modules, x = ("encoder", "model", "critic"), (batch, following, targets, keys[1])
        state, model, latents = self.descend(state, modules, self.model_loss, *x, clip=self.config.clip_norm, aux=True)
        state, latents = self.renewed(state, latents, batch)
        state, actor = self.descend(state, "actor", self.actor_loss, batch, latents, keys[2])
        state = state.with_extra(scale=actor["actor/scale"])
        return self.polyak(state, "critic"), {**model, **actor}
