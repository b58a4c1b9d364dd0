"""Latents that encoders learn by predicting, as in MR.Q ("Towards General-Purpose Model-Free Reinforcement Learning",
Fujimoto et al., 2025, arXiv 2501.16142), for critics, V and policies in place of observations.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from offrl.actor import Actor, MemorylessActor, NoisyActor
from offrl.algorithm import Adam, Batch, Carry, DataSpec, Loss, Metrics, Params, TrainState, Traits
from offrl.data.fit import seen_besides
from offrl.data.samplers.states import IS_TERMINAL, VALID, StateSampler, first_steps, going_on, in_time, steps_of
from offrl.errors import UserError
from offrl.families.critics.critic import Critic, represents
from offrl.families.predictive import HEAD, LinearModel, PairEncoder, state_encoder
from offrl.settings.field import setting

ENCODERS = ("encoder", "pair_encoder", "model")  # the modules that predict
WEIGHT = 0.1  # MR.Q's, of the errors of rewards and terminals
DECAY = 1e-4  # MR.Q's AdamW


@dataclass
class RepresentationSettings:
    """Settings of algorithms whose critics may see latents."""

    representation: str = setting(
        "none",
        "what critics, V and policy see: none: the observation; mrq: latents that predict rewards, terminals and "
        "themselves, by MR.Q's losses, which alone train them",
        choices=("none", "mrq"),
    )
    latent: int = setting(512, "representation=mrq: numbers of a latent state, and of one with an action", low=1)
    representation_horizon: int = setting(5, "representation=mrq: steps that latents are predicted ahead", low=1)


def encoders(spec: DataSpec, hidden: Sequence[int], latent: int, action_latent: int) -> dict[str, nn.Module]:
    """The modules ENCODERS."""
    networks = state_encoder(spec, hidden, latent), PairEncoder(latent, spec.action_dim, action_latent, hidden)
    return dict(zip(ENCODERS, (*networks, LinearModel(latent)), strict=True))


def prediction_errors(
    algorithm: Any, params: dict[str, Params], target: Params, batch: Batch, horizon: int
) -> tuple[Tensor, Tensor, Tensor]:
    """|z_{t+1} - z'(s_{t+1})|^2, CE(r_t) and (d_{t+1} - terminal)^2, each [], summed over `horizon` steps t, those
    before a terminal; z_0 = z(s_0), and z_{t+1} and d_{t+1} are the model's of z(z_t, a_t).

    target: the encoder's of z'. batch: windows of states with the steps first.
    """
    observations, terms = batch["observations"], []
    following = algorithm.apply("encoder", target, steps_of(observations, slice(1, horizon + 1)))
    z = algorithm.apply("encoder", params["encoder"], steps_of(observations, 0))
    for t in range(horizon):
        pair = algorithm.apply("pair_encoder", params["pair_encoder"], z, batch["actions"][t])
        end, z, reward = algorithm.apply("model", params["model"], pair)
        error = torch.where(batch[VALID][t + 1], (z - following[t]).square().mean(-1), 0.0)
        end_error = (end - batch[IS_TERMINAL][t + 1].float()).square()
        terms.append(torch.stack([error, HEAD.loss(reward, batch["rewards"][t]), end_error]))
    dynamics, reward, ends = (torch.stack(terms, 1) * going_on(batch)[:horizon]).mean(-1).sum(-1)
    return dynamics, reward, ends


class LatentActor(MemorylessActor):
    """The policy on the encoder's latents."""

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        return super().act(carry, self.apply("encoder", observations), key, explore=explore)


class NoisyLatentActor(LatentActor, NoisyActor):
    """The same of a deterministic policy."""


class Represented:
    """What algorithms with critics need for `representation`: nothing happens without one."""

    critic: Critic
    config: Any
    spec: DataSpec
    data_spec: DataSpec
    actor_class: ClassVar[type[Actor]]
    apply: Callable[..., Any]
    descend: Callable[..., Any]
    polyak: Callable[..., TrainState]

    @classmethod
    def with_latents(cls, traits: Traits, config: Any) -> Traits:
        """`traits` of an algorithm with these settings."""
        if not represents(config):
            return traits
        return replace(
            traits,
            targets=(*traits.targets, "encoder"),
            policy_modules=(*traits.policy_modules, "encoder"),
            critic_modules=(*traits.critic_modules, "encoder", "pair_encoder"),
        )

    @property
    def latent_spec(self) -> DataSpec:
        """The specification that critics, V and policy see."""
        return replace(self.spec, observation_shape=(self.config.latent,)) if represents(self.config) else self.spec

    def encoder_modules(self) -> dict[str, nn.Module]:
        """The modules of the representation. Raises UserError for what it does not go with."""
        c = self.config
        if not represents(c):
            return {}
        refused = "discrete actions" if self.spec.discrete else seen_besides(self.data_spec)
        refused = refused or "algo.cost_limit" * (getattr(c, "cost_limit", None) is not None)
        if refused:
            raise UserError(f"algo.representation={c.representation} does not go with {refused}: leave it out")
        return encoders(self.spec, c.hidden, c.latent, max(1, c.latent // 2))

    def encoder_optimizer(self) -> Adam:
        """AdamW with a third of the learning rate, MR.Q's share."""
        return Adam(self.config.learning_rate / 3.0, weight_decay=DECAY)

    def sampler(self) -> Any:
        """Windows of states, whose first steps are the critics' transitions; without a representation the algorithm's
        own.
        """
        c = self.config
        if not represents(c):
            return super().sampler()  # type: ignore[misc]
        return StateSampler(max(c.representation_horizon, c.n_step + 1) + 1, past_end=True)

    def prediction_loss(self, params: dict[str, Params], state: TrainState, batch: Batch) -> Loss:
        """See `prediction_errors`; those of rewards and terminals count 0.1."""
        target = state.target["encoder"]
        dynamics, reward, ends = prediction_errors(self, params, target, batch, self.config.representation_horizon)
        metrics = {"model/dynamics": dynamics, "model/reward": reward, "model/termination": ends}
        return dynamics + WEIGHT * (reward + ends), metrics

    def with_encoders(self, params: dict[str, Params]) -> Any:
        """A copy of the algorithm whose critics see z(s, a) by these encoders, which are constants."""
        inner = copy.copy(self)
        inner.critic = copy.copy(self.critic)
        inner.critic.pairs = functools.partial(self.apply, "pair_encoder", params["pair_encoder"])
        return inner

    def on_latents(self, state: TrainState, batch: Batch) -> tuple[Any, TrainState, Batch, Metrics]:
        """The beginning of an update: the algorithm whose critics see z(s, a), the state after a step of the encoders,
        the batch's transitions with latents in place of observations, which are constants, and metrics. Without a
        representation they are what they were.
        """
        if not represents(self.config):
            return self, state, batch, {}
        batch = in_time(batch)
        state, learnt = self.descend(state, ENCODERS, self.prediction_loss, batch)
        state = self.polyak(state, "encoder", self.config.polyak)
        rows = first_steps(batch, self.config.n_step)
        for name in ("observations", "next_observations"):
            rows[name] = self.apply("encoder", state.params["encoder"], rows[name])
        return self.with_encoders(state.params), state, rows, learnt

    def acting(self, kind: type[Actor]) -> type[Actor]:
        """`kind`, or its counterpart that acts on latents."""
        if not represents(self.config):
            return kind
        return NoisyLatentActor if issubclass(kind, NoisyActor) else LatentActor

    def actor(self, state: TrainState) -> Actor:
        """The policy with these parameters."""
        return self.acting(self.actor_class)(self, state)  # type: ignore[arg-type]
