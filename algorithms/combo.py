"""COMBO: "COMBO: Conservative Offline Model-Based Policy Optimization" (Yu et al., 2021, arXiv 2102.08363)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Batch, Loss, Params, TrainState
from offrl.errors import UserError
from offrl.families import conservative
from offrl.families.conservative import SoftMaximumSettings
from offrl.families.sac import SoftActorCritic
from offrl.registry import register
from offrl.settings.field import defaults, setting
from offrl.world_models.model_rollouts import (
    LearnsInModel,
    ModelBasedSettings,
)


@dataclass
@defaults(
    hidden=[256, 256, 256],
    entropy_in_target=False,
    conservative_weight=0.5,
    real_share=0.5,
    uncertainty="none",
    actor_schedule="cosine",
)
class COMBOConfig(ModelBasedSettings, SoftMaximumSettings):
    """Settings of COMBO; the defaults are OfflineRL-Kit's for D4RL's HalfCheetah."""

    name: str = "combo"
    penalised_states: str = setting(
        "mix",
        "the states whose values are pushed down (rho): those of the whole batch, or imagined ones",
        choices=("mix", "model"),
    )
    kit_compat: bool = setting(
        False, "the penalty as in OfflineRL-Kit's code: the mean of logsumexps of 3 actions, not one of all"
    )


@register("algo", "combo")
class COMBO(LearnsInModel[COMBOConfig], SoftActorCritic[COMBOConfig]):
    """Critics are pushed down where the model leads, and up at the data's own state-action pairs; the policy's loss is
    SAC's.
    """

    def modules(self) -> dict[str, nn.Module]:
        c = self.config
        modules = super().modules()
        if c.kit_compat and (not c.importance or c.gradient_samples):
            raise UserError(
                "algo.kit_compat=true is the penalty of that code, which has algo.importance=true and "
                "algo.gradient_samples=0"
            )
        real = self.rollouts.real_rows
        if not 0 < real < c.batch_size:
            raise UserError(
                f"algo.real_share={c.real_share:g} of algo.batch_size={c.batch_size} is {real} row(s): COMBO needs the "
                "data's, where values are pushed up, and imagined ones"
            )
        return modules

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E (r + gamma min_j Q'_j(s', a') - Q_i(s, a))^2 over the data's rows and imagined ones, and the penalty
        (equation 2).
        """
        return conservative.penalised_loss(self, critic, state, batch, key)

    def penalty(
        self, critic: Params, state: TrainState, batch: Batch, key: Tensor, logits: Tensor | None = None
    ) -> Loss:
        """beta (E_rho log sum_a exp Q_i(s, a) - E_data Q_i(s, a)), summed over critics i (equation 2).

        logits: the critics' at the batch's (s, a), where known.
        """
        c, real_rows = self.config, self.rollouts.real_rows
        if logits is None:
            logits = self.critic.logits(critic, batch["observations"], batch["actions"])
        first = 0 if c.penalised_states == "mix" else real_rows
        penalty_batch = {k: v[first:] for k, v in batch.items()}
        sampled = conservative.sampled_actions(
            partial(self.sample, state.params["actor"]), penalty_batch, c.actions, key
        )
        soft = conservative.soft_maximum(
            self.critic,
            critic,
            penalty_batch,
            sampled,
            c,
            rng.fold_in(key, 3),
            logits[:, first:],
            reduce=self.kit_joint if c.kit_compat else conservative.logsumexp_over_actions,
        )
        q_data = soft.q_data[:, :real_rows] if first == 0 else self.critic.head.mean(logits[:, :real_rows])
        per_critic = soft.logsumexp_q.mean(-1) - q_data.mean(-1)  # of each critic
        loss = c.conservative_weight * per_critic.sum()
        metrics = {"cql/penalty": loss, "cql/difference": per_critic.mean(), "cql/q_data": q_data.mean()}
        n = c.actions
        return loss, {**metrics, "cql/q_uniform": soft.q[:, :n].mean(), "cql/q_policy": soft.q[:, n : 2 * n].mean()}

    def kit_joint(self, scores: Tensor) -> Tensor:
        """The mean over n of logsumexps of three of the scores [E, 3 n, B], as in OfflineRL-Kit: a uniform, a present
        and a next action.
        """
        return scores.unflatten(1, (3, self.config.actions)).logsumexp(1).mean(1)
