"""TD3 that pays for its distance from the data twice, with weights of their own: in the actor's loss and in the critics' target."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from offrl.algorithm import Metrics, TrainState
from offrl.data.samplers.transitions import Batch, TransitionSampler
from offrl.families.critics import Critic
from offrl.families.td3 import TD3, TD3Settings
from offrl.nn import Deterministic
from offrl.optim import Params
from offrl.settings.field import setting


@dataclass
class PenalisedSettings(TD3Settings):
    """Settings of ReBRAC and its relatives; the defaults are the authors' for D4RL's locomotion tasks, where the two penalties differ
    between data sets."""

    learning_rate: float = setting(1e-3, "Adam's learning rate", low=0.0)
    batch_size: int = setting(1024, "transitions in a batch", low=1)
    hidden: list[int] = setting([256, 256, 256], "widths of the hidden layers", low=1)
    layer_norm: bool = setting(True, "LayerNorm after each hidden layer of the critics (and of V)")
    init: str = setting(
        "fixed_bias",
        "initial weights: fixed_bias (as published), torch (uniform), orthogonal, small_head",
        choices=("fixed_bias", "torch", "orthogonal", "small_head"),
    )
    actor_layer_norm: bool = setting(False, "LayerNorm after each hidden layer of the actor")
    actor_bc: float = setting(0.01, "weight of the actor's squared distance from the data's action (ReBRAC's beta_1)", low=0.0)
    actor_q: float = setting(1.0, "weight of the normalised value in the actor's loss; 0: the actor imitates and nothing else", low=0.0)
    critic_bc: float = setting(0.01, "weight, in the target, of the next action's squared distance from the data's (beta_2)", low=0.0)


class PenalisedTD3(TD3):
    """TD3 with the penalties of arXiv 2305.09836. Distances are sums over action dimensions, as in the authors' code; TD3+BC's is a mean.

    The authors move the actor's target towards the actor of before its step; here it is the one of after it, as in TD3.
    """

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        actor = Deterministic(s.observation_dim, s.action_dim, c.hidden, layer_norm=c.actor_layer_norm, init=c.init)
        self.critic = Critic(c, s)
        return {"critic": self.critic.network, "actor": actor}

    def sampler(self) -> TransitionSampler:
        return TransitionSampler(extra=("next_actions",))

    def next_penalty(self, batch: Batch, next_action: Tensor) -> Tensor:
        """beta_2 |a' - a'_data|**2, [B], of the noisy action that the target asks (equation 3)."""
        return self.config.critic_bc * (next_action - batch["next_actions"]).square().sum(-1)

    def imitation(self, state: TrainState, batch: Batch) -> tuple[Tensor | float, Metrics]:
        """How much each row's distance counts in the actor's loss, [B] or one number for all, and metrics; 1 unless overridden."""
        return 1.0, {}

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        c = self.config
        (action,) = self.apply("actor", actor, batch["observations"])
        q = self.critic.q(state.params["critic"], batch["observations"], action).amin(0)  # [B]; of all critics, unlike TD3+BC
        distance = (action - batch["actions"]).square().sum(-1)
        weight, metrics = self.imitation(state, batch)
        loss = c.actor_bc * (weight * distance).mean() - c.actor_q * q.mean() / q.detach().abs().mean()
        return loss, {"actor/loss": loss, "actor/bc": distance.mean(), "actor/q": q.mean(), **metrics}
