"""Contrastive RL: "Contrastive Learning as Goal-Conditioned Reinforcement Learning" (Eysenbach et al., 2022, arXiv
2206.07568), as in OGBench (arXiv 2410.20092), and with the deep encoders of "1000 Layer Networks for Self-Supervised
RL" (arXiv 2503.14858)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl.algorithm import Batch, Loss, Params, TrainState, Update
from offrl.data.samplers.goals import ACTOR_GOALS, VALUE_GOALS
from offrl.errors import UserError
from offrl.families.goal_conditioned import (
    GoalConditioned,
    GoalValueSettings,
    awr_loss,
    chosen_learner,
    concatenate,
    ddpg_bc_loss,
    learner_field,
    make_values,
)
from offrl.nn.residual import BLOCK, Encoders, ResidualEnsemble
from offrl.registry import register
from offrl.settings.field import defaults, setting

LOGSUMEXP_PENALTY = 0.1  # weight of the squared log partition function, as the authors'


@dataclass
@defaults(value_current=0.0, value_trajectory=1.0, value_random=0.0)
class CRLConfig(GoalValueSettings):
    """Settings of CRL; the defaults are OGBench's for antmaze. It has no target networks."""

    name: str = "crl"
    latent: int = setting(512, "width of the latents that are compared", low=1)
    contrast: str = setting(
        "binary",
        "binary: each pair by itself, positive or not; infonce: each row's goal among the batch's",
        choices=("binary", "infonce"),
    )
    energy: str = setting(
        "dot",
        "how near two latents are: dot, their product over sqrt(latent); l2, minus their distance",
        choices=("dot", "l2"),
    )
    encoder: str = setting(
        "mlp", "mlp: of `hidden`; residual: deep residual networks of `depth` and `width`", choices=("mlp", "residual")
    )
    depth: int = setting(4, "residual: how many layers, a multiple of 4", low=BLOCK)
    width: int = setting(256, "residual: their width", low=1)
    energy_floor: float | None = setting(
        None,
        "dot: energies below this are all alike to the actor; null: none (OGBench's code before June 2025: -13.8155, "
        "log 1e-6)",
        structural=True,
    )
    learner: str = learner_field()
    bc_weight: float = setting(
        0.1, "ddpg_bc: weight of imitation (pointmaze 0.03, humanoidmaze 0.1, manipulation 3)", low=0.0
    )
    temperature: float = setting(3.0, "awr: multiplies the advantage in the exponent; larger is greedier", low=0.0)


def binary_nce(logits: Tensor) -> Tensor:
    """Cross-entropy of each pair [E, B, B] being of one trajectory or not, a mean over all: on the diagonal they
    are.
    """
    truth = torch.eye(logits.shape[-1], device=logits.device, dtype=logits.dtype).expand_as(logits)
    return F.binary_cross_entropy_with_logits(logits, truth)


def info_nce(logits: Tensor) -> Tensor:
    """-mean(diagonal - logsumexp over goals) + 0.1 mean logsumexp**2, of logits [E, B, B]."""
    partition = logits.logsumexp(-1)
    return (partition - logits.diagonal(dim1=-2, dim2=-1)).mean() + LOGSUMEXP_PENALTY * partition.square().mean()


@register("algo", "crl")
class CRL(GoalConditioned[CRLConfig]):
    """Q(s, a, g), up to what depends on g alone, is the log of how much likelier g is on the discounted way from (s, a)
    than anywhere.

    It is learnt by telling the goals of a row's own future from those of the batch's other rows, so it values the
    data's policy."""

    def modules(self) -> dict[str, nn.Module]:
        c = self.config
        self.learner = chosen_learner(c, self.spec.discrete)
        if c.encoder == "residual" and c.depth % BLOCK:
            raise UserError(f"algo.depth={c.depth} must be a multiple of {BLOCK}")
        modules = {
            "actor": self.make_actor(),
            "critic": self.encoders(2, self.spec.observation_dim + self.spec.encoded_action_dim),
        }
        return {**modules, "value": self.encoders(1, self.spec.observation_dim)} if self.learner == "awr" else modules

    def encoders(self, size: int, inputs: int) -> Encoders:
        """`size` encoders of inputs of that dimension, and as many of goals."""
        c = self.config
        if c.encoder == "mlp":
            return Encoders(make_values(c, size, inputs, c.latent), make_values(c, size, self.goal_dim, c.latent))
        networks = (
            ResidualEnsemble(size, width, c.width, c.depth, c.latent, epsilon=c.layer_norm_epsilon)
            for width in (inputs, self.goal_dim)
        )
        return Encoders(*networks)

    def row_energies(self, name: str, params: Params, x: Tensor, goals: Tensor) -> Tensor:
        """Energies of rows with their own goals, [E, B]."""
        phi, psi = self.apply(name, params, x, goals)
        if self.config.energy == "l2":
            return -(phi - psi).square().sum(-1).clamp(min=1e-12).sqrt()
        return (phi * psi).sum(-1) / math.sqrt(self.config.latent)

    def pair_energies(self, name: str, params: Params, x: Tensor, goals: Tensor) -> Tensor:
        """Energies of all rows with all goals, [E, B, B]."""
        phi, psi = self.apply(name, params, x, goals)
        product = phi @ psi.transpose(-2, -1)
        if self.config.energy == "dot":
            return product / math.sqrt(self.config.latent)
        square = phi.square().sum(-1).unsqueeze(-1) + psi.square().sum(-1).unsqueeze(-2) - 2.0 * product
        return -square.clamp(min=1e-12).sqrt()

    def contrastive_loss(self, params: Params, state: TrainState, name: str, batch: Batch, goals: Tensor) -> Loss:
        """NCE of the rows' own goals against those of the batch's other rows: binary, or InfoNCE with its penalty."""
        x = batch["observations"].flatten(1)
        if name == "critic":
            x = concatenate(x, self.spec.encode(batch["actions"]))
        logits = self.pair_energies(name, params, x, goals)
        loss = binary_nce(logits) if self.config.contrast == "binary" else info_nce(logits)
        positive = logits.diagonal(dim1=-2, dim2=-1).mean()
        accuracy = (logits.mean(0).argmax(-1) == torch.arange(logits.shape[-1], device=logits.device)).float().mean()
        return loss, {
            f"{name}/loss": loss,
            f"{name}/own": positive,
            f"{name}/others": logits.mean(),
            f"{name}/accuracy": accuracy,
        }

    def energy(self, state: TrainState, observations: Tensor, goals: Tensor, actions: Tensor) -> Tensor:
        """The smaller of the critics' energies, [B]."""
        return self.row_energies(
            "critic", state.params["critic"], concatenate(observations, self.spec.encode(actions)), goals
        ).amin(0)

    def floored(self, energies: Tensor) -> Tensor:
        """Energies as the actor sees them."""
        floor = self.config.energy_floor if self.config.energy == "dot" else None
        return energies if floor is None else energies.clamp(min=floor)

    def q(self, state: TrainState, observations: Tensor, goals: Tensor, actions: Tensor) -> Tensor:
        """The smaller energy as the actor sees it, [B]."""
        return self.floored(self.energy(state, observations, goals, actions))

    def advantage(self, state: TrainState, batch: Batch) -> Tensor:
        """Q(s, a, g) - V(s, g) [B] of the data's actions at the actor's goals."""
        observations, goals = batch["observations"], batch[ACTOR_GOALS]
        v = self.floored(self.row_energies("value", state.params["value"], observations.flatten(1), goals).squeeze(0))
        return self.q(state, observations, goals, batch["actions"]) - v

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch) -> Loss:
        """ddpg_bc: -E Q(s, pi(s, g), g) / E |Q| - bc_weight E log pi(a | s, g); awr: -E min(exp(temperature (Q - V)),
        100) log pi.
        """
        dist, log_prob = self.imitation(actor, batch)
        if self.learner == "awr":
            return awr_loss(log_prob, self.advantage(state, batch), self.config.temperature)
        q = self.q(state, batch["observations"], batch[ACTOR_GOALS], self.policy.mode(dist))
        return ddpg_bc_loss(q, log_prob, self.config.bc_weight)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        goals = batch[VALUE_GOALS]
        state, actor = self.descend(state, "actor", self.actor_loss, batch)
        state, critic = self.descend(state, "critic", self.contrastive_loss, "critic", batch, goals)
        if self.learner != "awr":
            return state, {**critic, **actor}
        state, value = self.descend(state, "value", self.contrastive_loss, "value", batch, goals)
        return state, {**critic, **value, **actor}

    def distances(self, state: TrainState, observations: Tensor, goals: Tensor) -> Tensor:
        mean = self.policy.mode(self.apply("actor", state.params["actor"], concatenate(observations, goals)))
        return -self.energy(state, observations, goals, mean)
