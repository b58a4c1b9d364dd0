"""COMBO: "COMBO: Conservative Offline Model-Based Policy Optimization" (Yu et al., 2021, arXiv 2102.08363)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from offrl.algorithm import Metrics, TrainState
from offrl.data.samplers.transitions import Batch
from offrl.errors import UserError
from offrl.families.conservative import SoftMaximum, SoftMaximumSettings
from offrl.optim import Params
from offrl.registry import register
from offrl.settings.field import setting
from offrl.world_models.actor_critic import ModelBased, ModelBasedSettings
from offrl.world_models.uncertainty import names


@dataclass
class COMBOConfig(ModelBasedSettings, SoftMaximumSettings):
    """Settings of COMBO; the defaults are OfflineRL-Kit's for D4RL's HalfCheetah."""

    name: str = "combo"
    hidden: list[int] = setting([256, 256, 256], "widths of the hidden layers", low=1)
    entropy_in_target: bool = setting(False, "whether the entropy counts in the critics' targets")
    conservative_weight: float = setting(0.5, "weight of the penalty: how far the critics are pushed down outside the data (beta)", low=0.0)
    pushed: str = setting(
        "mix", "the states whose values are pushed down (rho): those of the whole batch, or imagined ones", choices=("mix", "model")
    )
    kit_compat: bool = setting(False, "the penalty as in OfflineRL-Kit's code: the mean of logsumexps of 3 actions, not one of all")
    real_share: float = setting(0.5, "share of each batch that is the data's, not imagined", low=0.0, high=1.0, structural=True)
    uncertainty: str = setting("none", "how uncertain the model is of a step; COMBO does not ask", choices=("none", *names()))
    actor_schedule: str = setting("cosine", "the actor's learning rate over decay_steps", choices=("cosine", "constant"))


@register("algo", "combo")
class COMBO(ModelBased, SoftMaximum):
    """Critics are pushed down where the model leads, and up at the data's own state-action pairs (equation 2):

    conservative_weight * (mean over pushed states of the soft maximum of Q(s, .) - mean over the data's rows of Q(s, a)), for each critic.
    """

    Config = COMBOConfig

    def modules(self) -> dict[str, nn.Module]:
        c = self.config
        if c.kit_compat and (not c.importance or c.followed):
            raise UserError("algo.kit_compat=true is the penalty of that code, which has algo.importance=true and algo.followed=0")
        if not 0 < self.real_rows < c.batch_size:
            raise UserError(
                f"algo.real_share={c.real_share:g} of algo.batch_size={c.batch_size} is {self.real_rows} row(s): COMBO needs the data's, "
                "where values are pushed up, and imagined ones"
            )
        return super().modules()

    def joint(self, scores: Tensor) -> Tensor:
        if not self.config.kit_compat:
            return super().joint(scores)
        # their code keeps uniform, present and next actions as three columns, and each triple as a row of its own
        kinds = scores.unflatten(1, (3, self.config.actions))
        return kinds.logsumexp(1).mean(1)

    def penalty(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Metrics]:
        c, real = self.config, self.real_rows
        if c.pushed == "mix":
            level, taken, metrics = self.soft_maximum(critic, state, batch, key)
            up = taken[:, :real]
        else:
            level, _, metrics = self.soft_maximum(critic, state, {k: v[real:] for k, v in batch.items()}, key)
            up = self.critic.q(critic, batch["observations"][:real], batch["actions"][:real])
        each = level.mean(-1) - up.mean(-1)  # of each critic
        loss = c.conservative_weight * each.sum()
        return loss, {**metrics, "cql/difference": each.mean(), "cql/q_data": up.mean(), "cql/penalty": loss}
