"""Forward-backward representations, zero-shot RL: "Does Zero-Shot Reinforcement Learning Exist?" (Touati et al., 2023,
arXiv 2209.14935); conservative ones (VC-FB, MC-FB): "Zero-Shot Reinforcement Learning from Low Quality Data" (Jeen et
al., 2024, arXiv 2309.15178)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Batch, Carry, Loss, Params, TrainState, Update
from offrl.families.forward_backward import (
    ZeroShot,
    ZeroShotActor,
    ZeroShotSettings,
    measure,
    measure_loss,
    orthonormality_loss,
)
from offrl.families.sac import LogWeight
from offrl.nn.representations.forward_backward import Backward, Forward, Representation, TaskActor
from offrl.registry import register
from offrl.settings.field import setting

LARGEST_WEIGHT = 1e6
PARTS = ("inputs", "backward", "actor")


@dataclass
class FBConfig(ZeroShotSettings):
    """Settings of forward-backward representations; the defaults are those for ExORL."""

    name: str = "fb"
    orthonormality: float = setting(
        1.0, "weight of the loss that keeps B's coordinates orthonormal over the data", low=0.0
    )
    norm_tanh: list[str] = setting(
        list(PARTS),
        "networks whose first layer is linear, LayerNorm, tanh (the others': linear, ReLU): inputs, those that read "
        "(s, a), (s, z) and s; backward, B; actor, the actor's after that. Neither reference has all of them: see the "
        "deviations",
        choices=PARTS,
    )
    policy_noise: float = setting(0.2, "standard deviation of the policy's noise, in training and exploring", low=0.0)
    noise_clip: float = setting(0.3, "largest such noise", low=0.0)
    conservative: str = setting(
        "none",
        "push down, outside the data: none: nothing; value (VC-FB): F . z; measure (MC-FB): F . B",
        choices=("none", "value", "measure"),
    )
    conservative_weight: float = setting(1.0, "weight of that penalty; the first one, where it is learnt", low=1e-6)
    penalty_target: float | None = setting(
        50.0, "learn the weight that holds the penalty at this; null: the weight stays", structural=True
    )
    actions: int = setting(
        2, "actions tried for each state: 3 times so many uniform ones, and so many of the policy at s and at s'", low=1
    )


class FBActor(ZeroShotActor):
    """Policy of the module "actor", which sees the observation and z."""

    algorithm: FB

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        action = self.apply("actor", observations, self.task(carry, observations))
        return self.algorithm.noisy(action, key) if explore else action, carry


@register("algo", "fb")
class FB(ZeroShot[FBConfig]):
    """F . B learns the discounted visits of every policy pi(., z) by the Bellman equation; pi(., z) maximises F . z."""

    actor_class = FBActor

    @property
    def learns_weight(self) -> bool:
        """True where the penalty's weight is learnt."""
        return self.config.conservative != "none" and self.config.penalty_target is not None

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        sizes = s.observation_dim, s.action_dim, c.z_dim, c.inputs_hidden, c.hidden
        inputs, back, act = (part in c.norm_tanh for part in PARTS)
        backward = Backward(s.observation_dim, c.z_dim, c.backward_hidden, norm_tanh=back)
        representation = Representation(Forward(*sizes, norm_tanh=inputs), backward)
        modules: dict[str, nn.Module] = {
            "actor": TaskActor(*sizes, norm_tanh=(inputs, act)),
            "representation": representation,
        }
        return {**modules, "lagrange": LogWeight(c.conservative_weight)} if self.learns_weight else modules

    def noisy(self, mean: Tensor, key: Tensor) -> Tensor:
        """Actions [..., A] around the policy's; where one is cut off at the range, gradients flow as if it were not."""
        c = self.config
        noise = (rng.normal(key, tuple(mean.shape)) * c.policy_noise).clamp(-c.noise_clip, c.noise_clip)
        return mean + ((mean + noise).clamp(-1.0, 1.0) - mean).detach()

    def actions(self, actor: Params, observations: Tensor, z: Tensor, key: Tensor) -> Tensor:
        """Actions drawn from the policy: [B, A]."""
        return self.noisy(self.apply("actor", actor, observations.flatten(1), z), key)

    # ---- learning

    def representation_loss(self, params: Params, state: TrainState, batch: Batch, z: Tensor, key: Tensor) -> Loss:
        """E_{i != j} (M_ij - gamma M'_ij)^2 / 2 - E M_ii, M_ij = F(s_i, a_i, z_i) . B(s'_j), for both F (arXiv
        2103.07945, equation 18).

        To it come the loss that keeps B orthonormal over the data, and the conservative penalty.
        """
        c = self.config
        draw, penalty_key = rng.split(key)
        next_actions = self.actions(state.params["actor"], batch["next_observations"], z, draw)
        target = self.target_measure(state, batch, next_actions, z)
        f = self.forward_map(params, batch["observations"], batch["actions"], z)
        b = self.backward_map(params, batch["next_observations"])
        m = measure(f, b)
        bellman, orthonormality = measure_loss(m, target, c.discount * batch["masks"]), orthonormality_loss(b)
        loss = bellman + c.orthonormality * orthonormality
        metrics = {
            "fb/measure_loss": bellman,
            "fb/orthonormality": orthonormality,
            "fb/measure": m.mean(),
            "fb/q": (f * z).sum(-1).mean(),
        }
        if c.conservative != "none":
            penalty = self.penalty(params, state, batch, z, penalty_key, f, b)
            weight = self.weight(state)
            loss = loss + weight * penalty
            metrics |= {"conservative/penalty": penalty, "conservative/weight": weight}
        return loss, {**metrics, "fb/loss": loss}

    def weight(self, state: TrainState) -> Tensor:
        """The penalty's weight, []."""
        if self.learns_weight:
            return self.apply("lagrange", state.params["lagrange"]).clamp(max=LARGEST_WEIGHT)
        return torch.zeros((), device=state.step.device) + self.config.conservative_weight

    def penalty(
        self, params: Params, state: TrainState, batch: Batch, z: Tensor, key: Tensor, f: Tensor, b: Tensor
    ) -> Tensor:
        """E (logsumexp over sampled actions of X - X of the data's action), X = F . z (VC-FB) or each F . B_j (MC-FB),
        summed over both F.

        Sampled for each row are 3 n uniform actions at s, n of the policy at s and n at s', where F is of s' too, and n
        times the data's. f, b: F [2, B, D] of the data's actions, and B [B, D].
        """
        n, actor = self.config.actions, state.params["actor"]
        observations, next_observations = batch["observations"].flatten(1), batch["next_observations"].flatten(1)
        actions = batch["actions"]
        keys = rng.split(key, 3)

        def policy(observations: Tensor, draw: Tensor) -> Tensor:  # [n, B, A]
            mean = self.apply("actor", actor, observations, z)
            return self.noisy(mean.expand(n, *mean.shape), draw)

        uniform = rng.uniform(keys[0], (3 * n, *actions.shape), -1.0, 1.0)
        sampled = torch.cat([uniform, policy(observations, keys[1]), policy(next_observations, keys[2])])
        states = torch.cat(
            [observations.expand(4 * n, *observations.shape), next_observations.expand(n, *next_observations.shape)]
        )
        rows = [x.flatten(0, 1) for x in (states, sampled, z.expand(5 * n, *z.shape))]
        forward = self.forward_map(params, *rows).unflatten(1, (5 * n, -1))  # [2, 5 n, B, D]
        forward = torch.cat([forward, f.unsqueeze(1).expand(-1, n, -1, -1)], 1)
        if self.config.conservative == "value":
            return ((forward * z).sum(-1).logsumexp(1) - (f * z).sum(-1)).mean(-1).sum()
        # F . B of every action with every s', taken from all actions and one row at a time by the matrix product
        return ((forward @ b.transpose(-1, -2)).logsumexp(1) - measure(f, b)).mean((-2, -1)).sum()

    def lagrange_loss(self, lagrange: Params, state: TrainState, penalty: Tensor) -> Loss:
        """-weight (penalty - penalty_target) / 2."""
        weight, penalty_target = self.apply("lagrange", lagrange).clamp(max=LARGEST_WEIGHT), self.config.penalty_target
        assert penalty_target is not None
        loss = -0.5 * weight * (penalty - penalty_target)
        return loss, {"conservative/weight_loss": loss}

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, z: Tensor, key: Tensor) -> Loss:
        """-E min F(s, pi(s, z), z) . z."""
        actions = self.actions(actor, batch["observations"], z, key)
        q = self.q(state.params["representation"], batch["observations"], actions, z).amin(0)
        loss = -q.mean()
        return loss, {"actor/loss": loss, "actor/action": actions.abs().mean()}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        z_key, loss_key, actor_key = rng.split(key, 3)
        z = self.draw_z(state, batch, z_key)
        state, metrics = self.descend(state, "representation", self.representation_loss, batch, z, loss_key)
        if self.learns_weight:  # after the penalty that it weighs; the reference's code moves it before
            state, weight = self.descend(state, "lagrange", self.lagrange_loss, metrics["conservative/penalty"])
            metrics = {**metrics, **weight}
        state, actor = self.descend(state, "actor", self.actor_loss, batch, z, actor_key)
        return self.polyak(state, "representation"), {**metrics, **actor}
