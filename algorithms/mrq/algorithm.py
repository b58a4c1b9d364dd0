"""MR.Q: "Towards General-Purpose Model-Free Reinforcement Learning" (Fujimoto et al., 2025, arXiv 2501.16142).

Ours, for data without an environment: the policy also clones the data (`bc_weight`). Windows are drawn alike, where the
authors draw them by priorities of errors (LAP); all deviations: docs/algorithms/mrq.md.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offrl import losses, rng
from offrl.algorithm import (
    Adam,
    Algorithm,
    Batch,
    Dataset,
    Grid,
    Loss,
    Params,
    Sampler,
    TrainState,
    Traits,
    Tree,
    Update,
)
from offrl.algorithms.mrq.networks import ExploringActor, LatentValues, OutputPolicy, latent_states, open_loop
from offrl.algorithms.mrq.settings import MRQConfig, fitted
from offrl.data.samplers.states import StateSampler, StateSource, going_on, in_time, steps_of
from offrl.families.critics.representation import ENCODERS, encoders, prediction_errors
from offrl.nn.encoders.streams import shifted_windows
from offrl.nn.heads import huber
from offrl.registry import register
from offrl.system.backend import move


@register("algo", "mrq")
class MRQ(Algorithm[MRQConfig]):
    """Encoders learn to predict rewards, terminals and latents by a linear model; critics and policy see their latents.

    `refresh` is the authors' order: before every `target_every`-th update all targets become copies, and the encoders
    make `target_every` updates in a row, on batches of their own, online of all that was played. It is never compiled;
    `update` is.

    Here, as in the paper but not in their code, a reward counts where no terminal came before it.

    Shapes: K states of a window, the first axis of all that is learnt from; B windows; L latent.
    """

    traits = Traits(
        targets=("encoder", "pair_encoder", "critic", "actor"),
        policy_modules=("encoder", "actor"),
        critic_modules=("encoder", "pair_encoder", "critic"),
        observations="streams",
        image_encoder="mrq",
        actions=("continuous",),
        learns_model=True,
    )
    actor_class = ExploringActor
    open_loop = open_loop
    latent_states = latent_states

    @classmethod
    def fit_config(cls, config: MRQConfig, dataset: Dataset, grid: Grid = None) -> MRQConfig:
        """`config` that says whether the data have terminals."""
        return fitted(config, dataset)

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        return {
            **encoders(s, c.hidden, c.latent, c.action_latent),
            "critic": LatentValues(c.latent, c.hidden),
            "actor": OutputPolicy(c.latent, s.action_dim, c.hidden),
        }

    def sampler(self) -> Sampler:
        return StateSampler(max(self.config.horizon, self.config.n_step) + 1, past_end=True)

    def optimizer(self, name: str) -> Adam:
        c = self.config
        return Adam(
            c.encoder_learning_rate if name in ENCODERS else c.learning_rate,
            weight_decay=c.weight_decay,
            clip_norm=c.clip_norm if name == "critic" else 0.0,
        )

    def extra(self, params: dict[str, Params]) -> Tree:
        """The units of the critics' values and of their targets', in rewards."""
        return {"scale": torch.ones(()), "target_scale": torch.ones(())}

    # ---- encoders

    @property
    def every(self) -> int:
        return self.config.target_every

    def refresh(self, state: TrainState, source: StateSource, key: Tensor, *, step: int) -> Update:
        """Copies to all targets, the scale E|r| of the data's rewards, and `target_every` updates of the encoders."""
        for name in self.traits.targets:
            state = self.polyak(state, name, 1.0)
        scale = move(source.mean_size("rewards").clamp(min=1e-8), state.step.device)
        state, metrics = state.with_extra(scale=scale, target_scale=state.extra["scale"]), {}
        for i in range(self.every):
            draw = rng.fold_in(key, i)
            batch = move(self.sampler()(source, draw, self.config.batch_size), state.step.device)
            state, metrics = self.descend(state, ENCODERS, self.encoder_loss, self.steps(batch, draw))
        return state, metrics

    def steps(self, batch: Batch, key: Tensor) -> Batch:
        """A batch [B, K] with the steps first; the images of a window are shifted alike."""
        return in_time(shifted_windows(self.networks["encoder"], batch, key, together=True))

    def latents(self, params: dict[str, Params], batch: Batch, steps: int | slice) -> Tensor:
        """Latents [..., B, L] of some of a batch's steps."""
        return self.apply("encoder", params["encoder"], steps_of(batch["observations"], steps))

    def encoder_loss(self, params: dict[str, Params], state: TrainState, batch: Batch) -> Loss:
        """sum_t [|z_{t+1} - z'(s_{t+1})|^2 + 0.1 CE(r_t) + 0.1 (d_{t+1} - terminal)^2], z_0 = z(s_0), over the t before
        a terminal; z_{t+1} and d_{t+1} are the model's of z(z_t, a_t).
        """
        c = self.config
        dynamics, reward, ends = prediction_errors(self, params, state.target["encoder"], batch, c.horizon)
        loss = dynamics + c.reward_weight * reward
        metrics = {"model/dynamics": dynamics, "model/reward": reward}
        if c.episodic:
            loss, metrics["model/termination"] = loss + c.termination_weight * ends, ends
        return loss, metrics

    # ---- values and policy

    def q(self, params: dict[str, Params], latents: Tensor, actions: Tensor) -> Tensor:
        """Both critics' values in units of the scale: [2, B]."""
        pair = self.apply("pair_encoder", params["pair_encoder"], latents, actions)
        return self.apply("critic", params["critic"], pair)

    def q_value(self, state: TrainState, observations: Tensor, actions: Tensor) -> Tensor:
        latents = self.apply("encoder", state.params["encoder"], observations)
        return state.extra["scale"] * self.q(state.params, latents, actions).amin(0)

    def td_target(self, state: TrainState, batch: Batch, key: Tensor) -> Tensor:
        """[sum_{t<n} gamma^t r_t + gamma^n S' min_j Q'_j(s_n, a')] / S, a' the target policy's with clipped noise; what
        comes after a terminal is 0: [B].
        """
        c, n = self.config, self.config.n_step
        latents = self.latents(state.target, batch, n)
        action, _ = self.apply("actor", state.target["actor"], latents)
        noise = (rng.normal(key, tuple(action.shape)) * c.policy_noise).clamp(-c.noise_clip, c.noise_clip)
        value = state.extra["target_scale"] * self.q(state.target, latents, (action + noise).clamp(-1.0, 1.0)).amin(0)
        goes_on = going_on(batch)[: n + 1]
        return losses.n_step_target(batch["rewards"][:n], goes_on, c.discount, value) / state.extra["scale"]

    def critic_loss(self, critic: Params, state: TrainState, pair: Tensor, target: Tensor) -> Loss:
        """mean_i Huber(Q_i(z(s, a)) - y)."""
        q = self.apply("critic", critic, pair)
        loss = huber(q - target, 1.0).mean()
        return loss, {"critic/loss": loss, "critic/q": q.mean() * state.extra["scale"]}

    def actor_loss(self, actor: Params, state: TrainState, latents: Tensor, actions: Tensor) -> Loss:
        """-mean_i Q_i(s, tanh x) + 1e-5 x^2; ours: + bc_weight E|Q| / 2.5 (tanh x - a)^2."""
        c = self.config
        action, x = self.apply("actor", actor, latents)
        q, cloning = self.q(state.params, latents, action), (action - actions).square().mean()
        loss = c.output_weight * x.square().mean() - q.mean()
        loss = loss + c.bc_weight / losses.CLONING * q.detach().abs().mean() * cloning
        return loss, {"actor/loss": loss, "actor/bc": cloning}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        batch = self.steps(batch, key)
        latents, actions = self.latents(state.params, batch, 0), batch["actions"][0]
        pair = self.apply("pair_encoder", state.params["pair_encoder"], latents, actions)
        target = self.td_target(state, batch, key)
        state, critic = self.descend(state, "critic", self.critic_loss, pair, target)
        state, actor = self.descend(state, "actor", self.actor_loss, latents, actions)
        return state, {**critic, **actor}
