"""MOBILE: "Model-Bellman Inconsistency for Model-based Offline Reinforcement Learning" (Sun et al., 2023, ICML, PMLR
202).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Batch, Dataset, Loss, Params, TrainState, Tree
from offrl.errors import UserError
from offrl.families.critics import Target, Values
from offrl.families.sac import SoftActorCritic
from offrl.registry import register
from offrl.settings.field import defaults, setting
from offrl.world_models.model_rollouts import (
    LearnsInModel,
    ModelBasedSettings,
    ModelSource,
)


@dataclass
@defaults(
    max_entropy_weight=1.0, entropy_in_target=False, uncertainty="none", actor_schedule="cosine", decay_steps=3_000_000
)
class MOBILEConfig(ModelBasedSettings):
    """Settings of MOBILE; the defaults are the authors' for D4RL's HalfCheetah. entropy_learning_rate=0 fixes the
    entropy's weight.
    """

    name: str = "mobile"
    inconsistency_weight: float = setting(
        0.5, "times the model-Bellman inconsistency, is taken off each imagined row's target (beta)", low=0.0
    )
    backup_samples: int = setting(10, "next states that are drawn from each elite for the inconsistency", low=1)
    min_target: float | None = setting(
        None,
        "targets are at least this; the authors' 0 is right only where no policy's return is below it; null: not "
        "clipped",
    )


@register("algo", "mobile")
class MOBILE(LearnsInModel[MOBILEConfig], SoftActorCritic[MOBILEConfig]):
    """SAC on the data's transitions and imagined ones, whose targets are penalised by how much the elites' Bellman
    backups differ.

    The losses of the policy and of the entropy's weight are SAC's.
    """

    def modules(self) -> dict[str, nn.Module]:
        c = self.config
        modules = super().modules()
        if self.rollouts.real_rows >= c.batch_size:
            raise UserError(
                f"algo.real_share={c.real_share:g}: MOBILE is cautious of imagined rows alone, and none is left in a "
                "batch"
            )
        return modules

    def derived(self, source: ModelSource, dataset: Dataset) -> Tree:
        """An empty tree. Raises UserError for a model whose inconsistency cannot be measured."""
        if source.model.history > 1:
            raise UserError(
                "algo=mobile asks the model again in each update and keeps no past: train one with algo.history=1 "
                f"(this one has {source.model.history})"
            )
        if len(source.tree["elites"]) < 2:
            raise UserError(
                "algo=mobile compares the model's elites, and there is one: train a model with algo.elites=2 or more"
            )
        return {}

    def inconsistency(self, state: TrainState, observations: Tensor, actions: Tensor, key: Tensor) -> Tensor:
        """U(s, a) [B] at observations [B, O] (equation 8): the (unbiased) standard deviation over elites of the mean,
        over drawn next states and actions, of the smallest target critic's value. All are one batch of backup_samples *
        elites * B."""
        source: ModelSource = self.runtime.source
        model, tree, count = source.model, self.rollouts.tree(source), self.config.backup_samples
        prediction = model.predict(tree, observations, actions, model.first_past(observations))
        mean, std = prediction.mean[tree["elites"]], prediction.std[tree["elites"]]  # [K, B, O]
        state_key, action_key = rng.split(key)
        next_observations = mean + std * rng.normal(state_key, (count, *mean.shape))
        # as rollouts are
        next_observations = next_observations.nan_to_num(0.0).clamp(tree["low"], tree["high"]).flatten(0, 2)
        action, _ = self.sample(state.params["actor"], next_observations, action_key)
        value = self.critic.min_q(state.target["critic"], next_observations, action).mean
        return value.reshape(count, *mean.shape[:2]).mean(0).std(0)

    def best_target(self, state: TrainState, actor: Params, batch: Batch, key: Tensor, count: int) -> Target:
        """The target with, for V(s'), the smallest over critics of each one's best of `count` actions, as in the
        authors' code: the other order, that of CQL, is more cautious."""
        observations = batch["next_observations"]
        target_critics = self.critic.target_critics(state, rng.fold_in(key, 100))
        action, log_p = self.sample(actor, observations, key, count)
        logits = self.critic.logits(target_critics, observations, action)  # [E, M, B, out_dim]
        best = self.critic.head.mean(logits).argmax(1)  # [E, B]
        # [E, B, out_dim]
        best_logits = logits.gather(1, best[:, None, :, None].expand(-1, -1, -1, logits.shape[-1])).squeeze(1)
        bonus = self.weight(state) * float(self.config.entropy_in_target) * log_p.gather(0, best)
        value = Values((self.critic.head.mean(best_logits) - bonus).amin(0), self.critic.smallest(best_logits).logits)
        return self.critic.td_target(batch, value)

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E (y - Q_i(s, a))^2, summed over critics i, with y = r - beta U(s, a) + gamma min_j Q'_j(s', a') and U = 0 on
        the data's rows.
        """
        c, real_rows = self.config, self.rollouts.real_rows
        target = self.target(state, state.params["actor"], batch, key)
        uncertainty = self.inconsistency(
            state, batch["observations"][real_rows:], batch["actions"][real_rows:], rng.fold_in(key, 302)
        )
        value = target.value - c.inconsistency_weight * torch.cat([uncertainty.new_zeros(real_rows), uncertainty])
        metrics = {"mobile/inconsistency": uncertainty.mean()}
        if c.min_target is not None:
            metrics["mobile/clipped"] = (value < c.min_target).float().mean()
            value = value.clamp(min=c.min_target)
        loss, loss_metrics = self.critic.loss(critic, batch, target._replace(value=value), key)
        return loss, {**loss_metrics, **metrics}
