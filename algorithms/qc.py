"""Q-chunking: "Reinforcement Learning with Action Chunking" (Li et al., 2025, arXiv 2507.07969), and its relatives of
single actions.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import (
    Algorithm,
    Batch,
    Dataset,
    Loss,
    Params,
    Requirement,
    TrainConfig,
    TrainState,
    Traits,
    Update,
)
from offrl.data.samplers.chunks import VALID, WHOLE, ChunkSampler, valid_mean
from offrl.families import critics
from offrl.families.critics import Critic, Values, WithCritic
from offrl.families.generative.best_of_n import noise_of
from offrl.families.generative.chunks import ChunkActor, action_steps_field, length_field
from offrl.families.generative.cost import check_cost
from offrl.families.generative.settings import FlowSettings, greedy_field, make_field, pessimism_field, rho_field
from offrl.nn import flow
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class QCConfig(FlowSettings):
    """Settings of Q-chunking; the defaults are the authors'. chunked=false: FQL-n and BFN-n; length=1: FQL and BFN."""

    name: str = "qc"
    length: int = length_field(
        5, "steps that a target sums, and actions in a chunk (h); 1: single actions and one-step targets"
    )
    action_steps: int = action_steps_field()
    chunked: bool = setting(
        True, "Q and the policy are of whole chunks; false: of single actions, with n-step targets (n = length)"
    )
    actor_type: str = setting(
        "best",
        "best: the best of `candidates` chunks that the flow draws, by Q (QC, BFN); distil: a one-step policy that "
        "climbs Q (QC-FQL, FQL)",
        choices=("best", "distil"),
    )
    candidates: int = setting(32, "actor_type=best: chunks drawn for each target and decision", low=1)
    acting_candidates: int = setting(
        0, "actor_type=best: chunks drawn for each decision; 0: candidates", low=0, high=100_000, acting=True
    )
    alpha: float = setting(
        100.0, "actor_type=distil: weight of distillation (in units of Q unless normalize_q)", low=0.0
    )
    normalize_q: bool = setting(False, "actor_type=distil: divide the policy's Q by its mean size")
    truncated_windows: str = setting(
        "drop",
        "windows that a time-out cuts: drop: no target, as published; bootstrap: of the steps that there are, which "
        "suits chunked=false",
        choices=("drop", "bootstrap"),
    )
    pessimism: str = pessimism_field()
    rho: float = rho_field()
    greedy: str = greedy_field()


class QCActor(ChunkActor):
    """The one-step policy, or the best of the flow's chunks; noise is drawn for each chunk unless `greedy` is zero."""

    algorithm: QC

    @property
    def length(self) -> int:
        return self.algorithm.chunk_length

    def chunk(self, observations: Tensor, key: Tensor, explore: bool) -> Tensor:
        algorithm, c = self.algorithm, self.algorithm.config
        zero_noise = not explore and c.greedy == "zero"
        count = 1 if zero_noise else c.acting_candidates or c.candidates
        return algorithm.decide(self.state, observations, key, count, zero_noise=zero_noise).unflatten(
            1, (self.length, -1)
        )


@register("algo", "qc")
class QC(WithCritic, Algorithm[QCConfig]):
    """TD over h steps with chunks of h actions as single actions of D = h A numbers, and a flow that clones the data's
    chunks.

    All losses of an update read the parameters of before it, as in the authors' code, where they are one loss; so does
    the target critic, which follows the critics of before the update. Modules: critic, flow, and with actor_type=distil
    actor, which maps noise to a chunk."""

    traits = Traits(
        targets=("critic",), critic_modules=("critic",), observations="encoded", actions=("continuous",), n_step=False
    )
    actor_class = QCActor

    @classmethod
    def traits_for(cls, config: QCConfig) -> Traits:
        acts = ("actor",) if config.actor_type == "distil" else ("flow", "critic")
        single = config.length == 1 or not config.chunked  # else Q is of chunks, and no single action has one
        return dataclasses.replace(cls.traits, policy_modules=acts, critic_modules=("critic",) if single else ())

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        c = config.algo
        if c.actor_type == "best":
            actions = dataset.spec.action_dim * (c.length if c.chunked else 1)
            check_cost(config, c.candidates, dataset.spec.observation_dim, actions, "algo.actor_type=distil")
        return {}

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        self.chunk_length = int(c.length) if c.chunked else 1  # actions that are decided at once
        self.width = self.chunk_length * s.action_dim  # D
        self.critic = Critic(c, dataclasses.replace(s, action_dim=self.width))
        modules = {"critic": self.critic.network, "flow": make_field(c, s, self.width)}
        return modules | ({"actor": make_field(c, s, self.width, timed=False)} if c.actor_type == "distil" else {})

    def sampler(self) -> ChunkSampler:
        return ChunkSampler(self.config.length)

    def decisions(self, batch: Batch) -> Batch:
        """The batch with what was decided as actions [B, D]: the data's chunks, or the first action of each."""
        return {**batch, "actions": batch["actions"][:, : self.chunk_length].flatten(1)}

    def integrated(self, params: Params, observations: Tensor, z: Tensor) -> Tensor:
        """The flow's chunks [B, D] from noise z [B, D]."""
        return flow.integrate(lambda x, t: self.apply("flow", params, observations, x, t), z, self.config.flow_steps)

    def decide(
        self, state: TrainState, observations: Tensor, key: Tensor, count: int, *, zero_noise: bool = False
    ) -> Tensor:
        """The policy's chunks [B, D]: of the one-step policy, or the best of `count` of the flow by the online critics
        (section 4.2).

        zero_noise: all noise is 0.
        """
        c, rows = self.config, observations.shape[0]
        distil = c.actor_type == "distil"
        count = 1 if distil else count
        z = observations.new_zeros(count * rows, self.width) if zero_noise else noise_of(key, count, rows, self.width)
        if distil:
            return self.apply("actor", state.params["actor"], observations, z).clamp(-1.0, 1.0)
        chunks = self.integrated(state.params["flow"], flow.repeated(observations, count), z).unflatten(0, (count, -1))
        q = self.critic.q(state.params["critic"], observations, chunks)
        return flow.best_of(self.critic.reduce_ensemble(q, c.pessimism, c.rho), chunks)

    def next_value(self, state: TrainState, batch: Batch, key: Tensor) -> Values:
        """Q'(s', a') [B] of the target critics, a' the policy's chunk after the window, which the online critics
        choose.
        """
        c, s = self.config, batch["next_observations"]
        chunk = self.decide(state, s, key, c.candidates)
        return self.critic.aggregate(
            self.critic.logits(self.critic.target_critics(state, key), s, chunk), c.pessimism, c.rho
        )

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E w (sum_k gamma^k r_k + gamma^m Q'(s_m, a') - Q_i(s, a))^2, the mean over critics i (equation 6); w = 0
        where a time-out cut the window (truncated_windows=drop), else 1."""
        target = self.critic.td_target(batch, self.next_value(state, batch, key))

        def objective(logits: Tensor, target: critics.Target) -> Tensor:
            loss = self.critic.mean_objective(logits, target)
            return loss * batch[WHOLE] if self.config.truncated_windows == "drop" else loss

        loss, metrics = self.critic.loss(critic, self.decisions(batch), target, key, objective=objective)
        return loss, {**metrics, "critic/full_window_share": batch[WHOLE].mean()}

    def flow_loss(self, field: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |v(s, x_t, t) - (a - z)|^2 / D over the steps that there are, x_t = (1 - t) z + t a (equation 5)."""
        observations, chunks = batch["observations"], self.decisions(batch)["actions"]
        error = flow.matching(lambda x, t: self.apply("flow", field, observations, x, t), chunks, key)
        loss = valid_mean(error.unflatten(1, (self.chunk_length, -1)), batch[VALID][:, : self.chunk_length])
        return loss, {"flow/loss": loss}

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E [alpha |mu(s, z) - flow(s, z)|^2 / D - Q(s, mu(s, z))], Q the critics' mean; Q sees actions cut to the
        range (equation 9).
        """
        c, observations = self.config, batch["observations"]
        z = rng.normal(key, (observations.shape[0], self.width))
        cloned = self.integrated({k: v.detach() for k, v in state.params["flow"].items()}, observations, z)
        chunk = self.apply("actor", actor, observations, z)
        distillation = (chunk - cloned).square().mean()
        q = self.critic.q(state.params["critic"], observations, chunk.clamp(-1.0, 1.0)).mean(0)
        scale = q.detach().abs().mean() if c.normalize_q else 1.0
        loss = c.alpha * distillation - q.mean() / scale
        metrics = {"actor/loss": loss, "actor/distillation": distillation, "actor/q": q.mean()}
        return loss, {**metrics, "actor/clipped": (chunk.detach().abs() > 1.0).float().mean()}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        critic_key, flow_key, actor_key = rng.split(key, 3)
        steps = [
            self.descend(state, "critic", self.critic_loss, batch, critic_key),
            self.descend(state, "flow", self.flow_loss, batch, flow_key),
        ]
        if self.config.actor_type == "distil":
            steps.append(self.descend(state, "actor", self.actor_loss, batch, actor_key))
        return self.simultaneous(state, *steps)

    def q_value(self, state: TrainState, observations: Tensor, actions: Tensor) -> Tensor | None:
        return self.critic.q(state.params["critic"], observations, actions).mean(0) if self.chunk_length == 1 else None
