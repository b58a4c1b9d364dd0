"""Skills from data: SPiRL's auto-encoder of segments of actions ("Accelerating Reinforcement Learning with Learned
Skill Priors", Pertsch et al., 2020, arXiv 2010.11944), with the closed-loop decoder of Skill-Critic (Hao et al., 2023,
arXiv 2306.08388)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offrl.algorithm import Algorithm, Batch, Dataset, Loss, Params, Sampler, TrainState, Traits, Update
from offrl.data.samplers.sequences import VALID, SequenceSampler
from offrl.nn import Linear, make_policy
from offrl.nn.policies import Policy
from offrl.nn.recurrent import GRU
from offrl.nn.representations.latent import Latent, bounded, draw, gaussian_kl, standard
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class SkillsConfig:
    """Settings of skills; lengths, widths and weights are Skill-Critic's for its mazes."""

    name: str = "skills"
    learning_rate: float = setting(1e-3, "Adam's learning rate", low=0.0)
    batch_size: int = setting(128, "segments in a batch", low=1)
    skill_length: int = setting(10, "steps that a skill lasts (H)", low=1)
    skill_dim: int = setting(10, "dimension of a skill (z)", low=1)
    kl_weight: float = setting(1e-2, "weight of KL(q(z | actions) || N(0, I)), averaged over z's dimensions", low=0.0)
    hidden: list[int] = setting([128, 128, 128], "widths of the hidden layers of decoder and prior", low=1)
    recurrent_width: int = setting(128, "width of the encoder's GRU", low=1)


class SkillNet(nn.Module):
    """Encoder q(z | a_1..H), decoder p(a | s, z, step) and prior p(z | s)."""

    def __init__(self, observation_dim: int, action_dim: int, num_actions: int, config: SkillsConfig) -> None:
        super().__init__()
        c, z = config, config.skill_dim
        self.gru, self.out = GRU(num_actions or action_dim, c.recurrent_width), Linear(c.recurrent_width, 2 * z)
        inputs = observation_dim + z + c.skill_length
        self.decoder = make_policy("unit_gaussian", inputs, action_dim, num_actions, c.hidden)
        self.prior = Latent(observation_dim, z, c.hidden)

    def forward(self, part: str, *x: Tensor) -> tuple[Tensor, ...]:
        """`part` with its inputs: "encode" actions as a network takes them [B, H, A] and valid [B, H] -> q; "prior"
        observations [..., O] -> p; "decode" observations [..., O], z [..., Z] and step as one-hot [..., H] -> the
        action's distribution."""
        if part == "encode":
            return bounded(self.out(self.gru(*x)))
        if part == "prior":
            return self.prior(*x)
        return self.decoder(torch.cat(x, -1))


@register("algo", "skills")
class Skills(Algorithm[SkillsConfig]):
    """A trajectory segment of H actions is encoded as z, from which a decoder reconstructs them given the state and the
    step within the skill; beside it a prior learns the distribution of z at a state. It acts nowhere; `algo=skill_iql`
    requires it.

    The error is averaged over the segment's actions, the KL divergence over z's dimensions, as in the authors' code,
    whose encoder is an LSTM. A segment that the end of its episode cuts is shorter.
    """

    traits = Traits(policy_modules=())

    def modules(self) -> dict[str, nn.Module]:
        s = self.spec
        return {"skills": SkillNet(s.observation_dim, s.action_dim, s.num_actions, self.config)}

    @property
    def policy(self) -> Policy:
        """The decoder, for its distribution's methods."""
        return self.networks["skills"].decoder  # type: ignore[return-value]

    def sampler(self) -> Sampler:
        return SequenceSampler(self.config.skill_length)

    def posterior(self, skills: Params, actions: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        """(mean, log standard deviation) [B, Z] of q(z | actions [B, H, ...]), of which those that are not `valid` [B,
        H] do not count.
        """
        return self.apply("skills", skills, "encode", self.spec.encode(actions), valid)

    def prior(self, skills: Params, observations: Tensor) -> tuple[Tensor, ...]:
        """(mean, log standard deviation) [B, Z] of p(z | s)."""
        return self.apply("skills", skills, "prior", observations)

    def inputs(self, observations: Tensor, z: Tensor, step: Tensor) -> Tensor:
        """What a low level sees [B, O + Z + H] at steps [B] of skills z [B, Z]: the step as a one-hot vector."""
        index = torch.arange(self.config.skill_length, device=z.device) == step.unsqueeze(-1)
        return torch.cat([observations, z, index.to(z.dtype)], -1)

    def decode(self, skills: Params, inputs: Tensor) -> tuple[Tensor, ...]:
        """The distribution of the action at `inputs`."""
        return self.apply("skills", skills, "decode", inputs)

    def skills_loss(self, skills: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |a - mean|^2 / 2 (discrete: cross-entropy) + kl_weight KL(q || N(0, I)) - log p(z | s), z drawn from q and
        constant in p.
        """
        c, observations, valid = self.config, batch["observations"], batch[VALID]
        q = self.posterior(skills, batch["actions"], valid)
        z = draw(q, key)
        length = c.skill_length
        index = torch.eye(length, dtype=z.dtype, device=z.device).expand(len(z), length, length)
        dist = self.apply("skills", skills, "decode", observations, z.unsqueeze(-2).expand(-1, length, -1), index)
        error = self._error(dist, batch["actions"])
        error = torch.where(valid, error, 0.0).sum() / valid.sum()
        kl = gaussian_kl(q, standard(q[0])).mean() / c.skill_dim
        prior: Latent = self.networks["skills"].prior  # type: ignore[assignment]
        log_prob = prior.log_prob(self.prior(skills, observations[:, 0]), z.detach()).mean()
        loss = error + c.kl_weight * kl - log_prob
        return loss, {"skills/loss": loss, "skills/error": error, "skills/kl": kl, "skills/prior_log_prob": log_prob}

    def _error(self, dist: tuple[Tensor, ...], actions: Tensor) -> Tensor:
        """[B, H] for actions [B, H, ...]."""
        if self.spec.discrete:
            return self.policy.bc_loss(dist, actions)
        return 0.5 * (dist[0] - actions).square().mean(-1)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return self.descend(state, "skills", self.skills_loss, batch, key)

    @torch.no_grad()
    def of_dataset(self, skills: Params, dataset: Dataset, rows: int = 16_384) -> tuple[Tensor, Tensor]:
        """(mean, log standard deviation) [R, Z] of q for the segment that begins at each row of the data, on the
        CPU.
        """
        stop = dataset.per_row(dataset.episode_end.cpu())
        actions, posteriors = dataset.columns["actions"], []
        for row in torch.arange(len(stop)).split(rows):
            index = row.unsqueeze(-1) + torch.arange(self.config.skill_length)
            valid = index < stop[row].unsqueeze(-1)
            segment = (
                actions[index.clamp(max=len(stop) - 1).flatten().to(actions.device)].cpu().unflatten(0, index.shape)
            )
            posteriors.append(self.posterior(skills, segment, valid))
        return torch.cat([q[0] for q in posteriors]), torch.cat([q[1] for q in posteriors])
