"""Director: "Deep Hierarchical Planning from Pixels" (Hafner et al., 2022, arXiv 2206.04114), on RSSM's latent model: a
manager chooses a goal every few steps, as a code of a goal autoencoder, and a worker is rewarded for reaching it, both
in imagination.

Ours, for data without an environment: RSSM's penalty of the task's rewards, and no exploration reward. All
deviations: docs/algorithms/director.md.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Batch, Metrics, Params, TrainState, Tree, Update
from offrl.algorithms.director.actor import DirectorActor
from offrl.algorithms.director.goals import goals
from offrl.algorithms.director.hierarchy import abstract, coded, entropy_shares, manager_log_probs, max_cosine, segments
from offrl.algorithms.director.imagination import GoalRollout, goal_rollout
from offrl.algorithms.director.scales import correction, deviation, followed, policy_loss
from offrl.algorithms.director.settings import DirectorConfig, check_hierarchy
from offrl.data.samplers.states import VALID, in_time
from offrl.families.sequence import masked_mean
from offrl.registry import register
from offrl.world_models.recurrent.base import TRAITS, RecurrentModel
from offrl.world_models.recurrent.latents import LatentWindows
from offrl.world_models.recurrent.modules import feature_size
from offrl.world_models.recurrent.networks import HEAD, BoundedNormal, head
from offrl.world_models.recurrent.returns import imagined_returns

POLICIES = ("goal_encoder", "goal_decoder", "manager", "actor")
CRITICS = ("critic", "exploration_critic", "goal_critic")
Losses = tuple[Tensor, Metrics, Tree]  # [], what the log tells of them, and the next `extra`


@register("algo", "director")
class Director(RecurrentModel[DirectorConfig]):
    """Modules: the model's, goal_encoder, goal_decoder, manager, actor (the worker), critic and exploration_critic (the
    manager's), goal_critic (the worker's). Shapes: see `hierarchy`.
    """

    traits = dataclasses.replace(
        TRAITS,
        targets=CRITICS,
        policy_modules=("encoder", "dynamics", "posterior", "manager", "goal_decoder", "actor"),
    )
    actor_class = DirectorActor
    goals = goals

    def modules(self) -> dict[str, nn.Module]:
        c, model = self.config, self.model_modules()
        check_hierarchy(c)
        features, recurrent, width, code = feature_size(c), c.recurrent_width, c.width, c.goal_groups * c.goal_classes
        critics = dict.fromkeys(CRITICS, features) | {"goal_critic": features + recurrent}
        return {
            **model,
            "goal_encoder": head(recurrent, width, 3, code, 0.1),
            "goal_decoder": head(code, width, 3, recurrent, 0.1),
            "manager": head(features, width, 3, code, 0.1),
            "actor": BoundedNormal(features + recurrent, self.spec.action_dim, width),
            **{name: head(size, width, 3, HEAD.out_dim, 0.0) for name, size in critics.items()},
        }

    def extra(self, params: dict[str, Params]) -> Tree:
        weights = {"worker": torch.ones(self.spec.action_dim), "manager": torch.ones(self.config.goal_groups)}
        moments = {name: torch.zeros(3) for name in (*CRITICS, *weights)}
        return {**moments, **{f"{name}_entropy": x for name, x in weights.items()}, "goal_kl": torch.ones(())}

    # ---- losses

    def goal_loss(
        self, params: dict[str, Params], state: TrainState, windows: LatentWindows, batch: Batch, key: Tensor
    ) -> Losses:
        """E |h - dec(z)|^2 + beta KL(enc(z|h) | uniform) of the data's recurrent states h, constants; beta moves KL
        towards `goal_kl`.
        """
        c, recurrent, valid = self.config, windows.state.recurrent.detach(), batch[VALID]
        noise = rng.gumbel(key, (*recurrent.shape[:-1], c.goal_groups, c.goal_classes))
        error, divergence = coded(self.latents(params).apply, c, recurrent, noise)
        errors, mean = masked_mean(error.sum(-1), valid), masked_mean(divergence, valid)
        weight = (state.extra["goal_kl"] * correction(mean.detach(), c.goal_kl)).clamp(1e-5, 1.0)
        metrics = {"goal/reconstruction": errors, "goal/kl": mean, "goal/kl_weight": weight}
        return errors + weight * mean, metrics, {"goal_kl": weight}

    def worker_loss(self, params: dict[str, Params], state: TrainState, rollout: GoalRollout) -> Losses:
        """-E weight [A + eta H(pi)] and the critic's loss, with max-cosine rewards on the way to each goal by itself;
        A's gradient goes through the model.
        """
        c = self.config
        features, alive = segments(rollout.features, c.goal_steps), segments(rollout.alive, c.goal_steps)
        goals = rollout.goals.flatten(0, 1).expand(len(features), -1, -1)
        x = torch.cat([features, goals], -1)
        rewards = max_cosine(goals, features[..., : c.recurrent_width])
        gain, critic, extra = self.valued("goal_critic", params, state, x, rewards, alive)
        _, log_deviation = self.apply("actor", params["actor"], x[:-1].detach())
        entropy = 1.0 + log_deviation / math.log(10.0)  # of deviations from 0.1 to 1
        loss, metrics, more = policy_loss(c, "worker", state.extra, gain, entropy, alive)
        return loss + critic, {**metrics, "worker/reward": rewards.mean()}, {**extra, **more}

    def manager_loss(self, params: dict[str, Params], state: TrainState, rollout: GoalRollout) -> Losses:
        """-E weight [sg(A) ln pi(z|s) + eta H(pi)] and both critics' losses, every K steps; A is that of the task and,
        by its weight, that of exploration.
        """
        c, x = self.config, rollout.features[:: self.config.goal_steps].detach()
        log_probs = manager_log_probs(c, self.apply("manager", params["manager"], x[:-1]))
        rewards, alive = abstract(rollout.rewards, rollout.alive.detach(), c.goal_steps, c.discount)
        surprise, _ = abstract(rollout.surprise, rollout.alive.detach(), c.goal_steps, c.discount)
        gain, critic, extra = self.valued("critic", params, state, x, rewards, alive)
        more, other, moments = self.valued("exploration_critic", params, state, x, surprise, alive)
        log_prob = (rollout.codes.unflatten(-1, log_probs.shape[-2:]) * log_probs).sum((-2, -1))
        loss, metrics, weight = policy_loss(
            c, "manager", state.extra, gain + c.exploration_weight * more, entropy_shares(log_probs), alive, log_prob
        )
        metrics |= {"manager/reward": rewards.mean(), "manager/surprise": surprise.mean()}
        return loss + critic + other, metrics, {**extra, **moments, **weight}

    def valued(
        self, name: str, params: dict[str, Params], state: TrainState, x: Tensor, rewards: Tensor, alive: Tensor
    ) -> tuple[Tensor, Tensor, Tree]:
        """The advantages [T, N] in T of T + 1 states by critic `name` before this update, in units of the returns'
        running standard deviation; its loss; and that deviation's sums.
        """
        values = HEAD.mean(self.apply(name, state.params[name], x))
        returns = imagined_returns(self.config, rewards, values, alive)
        moments = followed(state.extra[name], returns, 0.999)
        errors = self.value_loss(name, params[name], state, x[:-1].detach(), returns.detach())
        loss = (alive.detach().cumprod(0)[:-1] * errors).mean()
        return (returns - values[:-1]) / deviation(moments, 0.01), loss, {name: moments}

    def loss(self, params: dict[str, Params], state: TrainState, batch: Batch, key: Tensor) -> Losses:
        """The losses of model, goal autoencoder, worker and manager, of the states after the burn-in."""
        keys = rng.split(key, 4)
        windows, batch, model, metrics = self.model_loss(params, batch, keys[:2])
        rollout = goal_rollout(self, {**state.params, "actor": params["actor"]}, windows, keys[2])
        goal, of_goal, extra = self.goal_loss(params, state, windows, batch, keys[3])
        worker, of_worker, more = self.worker_loss(params, state, rollout)
        manager, of_manager, last = self.manager_loss(params, state, rollout)
        metrics = {**metrics, **of_goal, **of_worker, **of_manager}
        return model + goal + worker + manager, metrics, {**extra, **more, **last}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        before = state
        state, metrics, extra = self.descend(
            state, (*self.model, *POLICIES, *CRITICS), self.loss, in_time(batch), key, aux=True
        )
        state = state.with_extra(**extra)
        for name in CRITICS:
            state = self.polyak(state, name)
        return self.with_old_model(state, before), metrics
