"""Diffusion-QL: "Diffusion Policies as an Expressive Policy Class for Offline Reinforcement Learning" (Wang et al.,
2022, arXiv 2208.06193)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Adam, Algorithm, Batch, Loss, Params, TrainState, Traits, Tree, Update
from offrl.families.critics import Critic, CriticSettings, Values, WithCritic
from offrl.families.generative.best_of_n import Noise, ValuedActor, candidates_field, choice_field, noise_of
from offrl.families.generative.settings import greedy_field
from offrl.nn import diffusion, flow
from offrl.nn.diffusion import PlainDenoiser
from offrl.registry import register
from offrl.settings.field import defaults, setting

SCHEDULE = "vp"  # the variance-preserving one


@dataclass
@defaults(hidden=[256, 256, 256], activation="mish")
class DiffusionQLConfig(CriticSettings):
    """Settings of Diffusion-QL; the defaults are those of the authors' class, which choose q_weight and clip_norm by
    dataset.
    """

    name: str = "diffusion_ql"
    q_weight: float = setting(1.0, "weight of Q, divided by its mean size, against cloning", low=0.0)
    chain: bool = setting(
        True, "the policy's Q is of an action denoised from noise, with gradients through all steps; false: of the "
              "action that one step predicts from a noised action of the data, which takes a fraction of the time "
              "(EDP, arXiv 2305.20081)",
    )  # fmt: skip
    max_target_actions: int = setting(
        1, "targets take each critic's best of so many actions of the policy, not one (AntMaze: 10)", low=1
    )
    denoising_steps: int = setting(5, "steps from noise to an action (T)", low=1, high=1000)
    embedding: int = setting(16, "waves in which the denoiser sees a denoising step", low=4)
    clip_norm: float = setting(1.0, "largest norm of the gradient; 0: no clipping", low=0.0, structural=True)
    average: float = setting(
        0.005,
        "rate at which an averaged denoiser, which acts in the targets, follows the trained one",
        low=0.0,
        high=1.0,
    )
    average_every: int = setting(5, "updates between two moves of the averaged denoiser", low=1)
    average_from: int = setting(1000, "updates before its first move: until then it is the initial one", low=0)
    candidates: int = candidates_field(50, "actions that are drawn at each step (N), of which one is played")
    choice: str = choice_field()
    greedy: str = greedy_field()


class DiffusionQLActor(ValuedActor):
    """One of N actions of the trained denoiser, not of the averaged one."""

    algorithm: DiffusionQL

    def draw(self, observations: Tensor, key: Tensor, noise: Noise) -> Tensor:
        return self.algorithm.denoise(self.state.params["actor"], observations, key, noise)


@register("algo", "diffusion_ql")
class DiffusionQL(WithCritic, Algorithm[DiffusionQLConfig]):
    """A diffusion model clones the data and climbs Q by gradients through its denoising; one of N of its actions is
    played, by their Q.

    An update moves the critics, the denoiser by the new critics, the averaged denoiser, and the target critics.
    Modules: critic, and actor, the denoiser. `extra` holds the averaged denoiser, and a copy of the target critics, by
    which policies choose.
    """

    traits = Traits(
        targets=("critic",),
        critic_modules=("critic",),
        observations="encoded",
        own_encoders=False,
        actions=("continuous",),
    )
    actor_class = DiffusionQLActor

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        self.critic = Critic(c, s)
        width = c.embedding // 2 * 2
        denoiser = PlainDenoiser(s.observation_dim, s.action_dim, c.hidden, width, activation=c.activation, init=c.init)
        return {"critic": self.critic.network, "actor": denoiser}

    def optimizer(self, name: str) -> Adam:
        return dataclasses.replace(super().optimizer(name), clip_norm=self.config.clip_norm)

    def extra(self, params: dict[str, Params]) -> Tree:
        return {
            to: {k: v.clone() for k, v in params[name].items()}
            for to, name in (("average", "actor"), ("target", "critic"))
        }

    def denoise(self, denoiser: Params, observations: Tensor, key: Tensor, noise: Noise) -> Tensor:
        """Actions [B, A] in [-1, 1] for observations [B, O]; noise(key): standard normal numbers [B, A]."""
        steps = self.config.denoising_steps
        keys = rng.split(key, steps + 1)

        def predicted(x: Tensor, step: Tensor) -> Tensor:
            return self.apply("actor", denoiser, x, step, observations)

        return diffusion.reverse_process(predicted, noise(keys[steps]), lambda t: noise(keys[t]), steps, SCHEDULE)

    def next_value(self, state: TrainState, batch: Batch, key: Tensor) -> Values:
        """min_i Q'_i(s', a') [B], a' of the averaged denoiser; of several a' each critic takes its best."""
        c, s, average = self.config, batch["next_observations"], state.extra["average"]
        count, rows, dim = int(c.max_target_actions), batch["next_observations"].shape[0], self.spec.action_dim
        action = self.denoise(average, flow.repeated(s, count), key, lambda k: noise_of(k, count, rows, dim))
        logits = self.critic.logits(
            self.critic.target_critics(state, rng.fold_in(key, 100)), s, action.unflatten(0, (count, rows))
        )
        best = self.critic.head.mean(logits).argmax(1, keepdim=True).unsqueeze(-1)  # [E, 1, B, 1]
        return self.critic.smallest(logits.take_along_dim(best, 1).squeeze(1))

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """sum_i E (r + gamma min_j Q'_j(s', a') - Q_i(s, a))^2, a' of the averaged denoiser (equation 4)."""
        return self.critic.loss(critic, batch, self.critic.td_target(batch, self.next_value(state, batch, key)), key)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |e - eps(x_t, t, s)|^2 / A - eta E Q_i(s, a0) / E |Q_j(s, a0)|, a0 denoised, i and j critics in random
        order (equation 3).
        """
        step_key, noise_key, chain_key, coin_key = rng.split(key, 4)
        c, observations, actions = self.config, batch["observations"], batch["actions"]
        noisy, step, noise = diffusion.noised(actions, c.denoising_steps, (step_key, noise_key), SCHEDULE)
        predicted = self.apply("actor", actor, noisy, step, observations)
        cloning = (predicted - noise).square().mean()
        if c.chain:
            action = self.denoise(actor, observations, chain_key, lambda k: rng.normal(k, tuple(actions.shape)))
        else:
            action = diffusion.clean_action(noisy, predicted, step, c.denoising_steps, SCHEDULE)
        q = self.critic.q(state.params["critic"], observations, action)  # [E, B]
        chosen = torch.arange(q.shape[0], device=q.device) == rng.randint(coin_key, (), q.shape[0])
        climbed = torch.where(chosen, q.mean(-1), 0.0).sum()
        size = torch.where(chosen.roll(1), q.detach().abs().mean(-1), 0.0).sum()
        loss = cloning - c.q_weight * climbed / size
        metrics = {"actor/loss": loss, "actor/cloning": cloning, "actor/q": q.mean()}
        return loss, {**metrics, "actor/clipped": (action.detach().abs() >= 1.0).float().mean()}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        c, keys = self.config, rng.split(key)
        state, critic = self.descend(state, "critic", self.critic_loss, batch, keys[0])
        state = self.critic.regularised(state)
        # by the new critics, as the authors' code
        state, actor = self.descend(state, "actor", self.actor_loss, batch, keys[1])
        moves = (state.step >= c.average_from) & (state.step % c.average_every == 0)
        rate = torch.where(moves, c.average, 0.0)
        average = {k: torch.lerp(v, state.params["actor"][k], rate) for k, v in state.extra["average"].items()}
        state = self.polyak(state, "critic")
        target = {k: v.clone() for k, v in state.target["critic"].items()}
        return state.with_extra(average=average, target=target), {**critic, **actor}
