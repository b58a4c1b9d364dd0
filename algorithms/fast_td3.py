"""FastTD3: "FastTD3: Simple, Fast, and Capable Reinforcement Learning for Humanoid Control" (Seo et al., 2025, arXiv
2505.22642).

In many environments at once: `offrl finetune algo=fast_td3 env=ID mixing=0 "algo.value_range=[-250,250]"`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.actor import BoundParams, Carry, NoisyActor
from offrl.algorithm import Adam, Batch, Loss, Metrics, Params, TrainState, Update
from offrl.errors import UserError
from offrl.families.td3 import TD3, TD3Settings
from offrl.nn import Deterministic
from offrl.registry import register
from offrl.settings.field import defaults, setting

HEAD_STD = 0.01  # of the initial weights of the actor's last layer


@dataclass
@defaults(
    hidden=[512, 256, 128],
    critic_hidden=[1024, 512, 256],
    batch_size=32768,
    polyak=0.1,
    policy_noise=0.001,
)
class FastTD3Config(TD3Settings):
    """Settings of FastTD3; the defaults are the authors' for HumanoidBench, with 128 environments."""

    name: str = "fast_td3"
    value_head: str = setting("c51", "critics of a distribution over value_bins", choices=("c51",))
    weight_decay: float = setting(0.1, "AdamW's, of all parameters", low=0.0, structural=True)
    exploration: list[float] = setting(
        [0.001, 0.4],
        "smallest and largest standard deviation of the noise in play: each environment draws one for each episode",
        low=0.0,
        acting=True,
    )


class EpisodeNoise(NoisyActor):
    """A deterministic policy that explores with Gaussian noise, whose standard deviation is drawn uniformly for each
    environment when an episode begins. Its carry is that deviation [E]; -1: to be drawn.
    """

    resettable = True

    def start(self, episodes: int) -> Tensor:
        return torch.full((episodes,), -1.0, device=self.state.step.device)

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        (actions,) = self.apply("actor", observations)
        if not explore:
            return actions, carry
        draw, key = rng.split(key)
        low, high = self.algorithm.config.exploration
        std = torch.where(carry < 0.0, rng.uniform(draw, (len(observations),), low, high), carry)
        noise = std.unsqueeze(-1) * rng.normal(key, tuple(actions.shape))
        return (actions + noise).clamp(-1.0, 1.0), std

    def graph(self, explore: bool) -> nn.Module:
        """For an exported file: observations [E, O] -> actions [E, A], each as in the first step of an episode."""
        return FirstStep(self, explore)


class FirstStep(nn.Module):
    """One function from observations [E, O] to actions [E, A]."""

    def __init__(self, actor: EpisodeNoise, explore: bool) -> None:
        super().__init__()
        self.actor, self.explore = actor, explore
        self.nets = nn.ModuleDict({n: p.module for n, p in actor.state.params.items() if isinstance(p, BoundParams)})

    def forward(self, observations: Tensor) -> Tensor:
        start = observations.new_full((observations.shape[0],), -1.0)
        return self.actor.act(start, observations, self.actor.state.key, explore=self.explore)[0]


@register("algo", "fast_td3")
class FastTD3(TD3[FastTD3Config]):
    """TD3 with critics of a distribution of returns, decay of all weights and no target actor, for many environments
    and few large batches. The critics' loss is the cross-entropy of the projection of r + gamma z, z of the target
    critic with the smaller mean at (s', a'), summed over critics. Targets move at every update, the actor at every
    second one, by the critics that just moved.
    """

    traits = replace(TD3.traits, targets=("critic",))
    actor_class = EpisodeNoise

    def modules(self) -> dict[str, nn.Module]:
        limits = self.config.exploration
        if len(limits) != 2 or not limits[0] <= limits[1]:
            raise UserError(f"algo.exploration={limits} must be [smallest,largest], such as [0.001,0.4]")
        modules = super().modules()
        actor = modules["actor"]
        assert isinstance(actor, Deterministic)
        nn.init.normal_(actor.net.head.weight, 0.0, HEAD_STD)
        nn.init.zeros_(actor.net.head.bias)
        return modules

    def optimizer(self, name: str) -> Adam:
        return replace(super().optimizer(name), weight_decay=self.config.weight_decay)

    def next_action(self, state: TrainState, batch: Batch, key: Tensor) -> Tensor:
        """a' [B, A]: the actor's own action at s' with clipped noise, without a target actor."""
        return super().next_action(state._replace(target={**state.target, "actor": state.params["actor"]}), batch, key)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch) -> Loss:
        """-E min_i Q_i(s, pi(s))."""
        (action,) = self.apply("actor", actor, batch["observations"])
        q = self.critic.actor_q(state.params["critic"], batch["observations"], action).amin(0).mean()
        return -q, {"actor/loss": -q, "actor/q": q}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        state, critic = self.descend(state, "critic", self.critic_loss, batch, key)
        actor: Metrics = {}
        state = self.critic.regularised(state)
        if phase == 1:
            state, actor = self.descend(state, "actor", self.actor_loss, batch)
        return self.polyak(state, "critic"), {**critic, **actor}
