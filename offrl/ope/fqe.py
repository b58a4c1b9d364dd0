"""Fitted Q evaluation of K policies as one program (Le et al., arXiv 1903.08738; as in DOPE's code, arXiv
2103.16596).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offrl import losses, rng
from offrl.algorithm import Algorithm, Metrics, TrainState, Traits
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch, Sampler, TransitionSampler
from offrl.errors import warn
from offrl.nn import MLP, EnsembleMLP
from offrl.ope.config import FQEConfig, validate
from offrl.ope.problem import FLOOR, Estimates, Problem, make_problem
from offrl.optim import Adam, Params
from offrl.statistics.intervals import student_t
from offrl.training.engine import LocalEngine
from offrl.training.fit import Progress
from offrl.training.fit import fit as train_replicas
from offrl.training.updates import metric_means

PAIRS = 65_536  # rows times candidates whose values are computed at once


@dataclass(frozen=True)
class Scale:
    """The standardisation of observations and rewards for the networks, and the bounds of values."""

    mean: Tensor  # [O]
    std: Tensor  # [O]
    reward_mean: (
        float  # 0 where episodes can end: a constant added to each reward would then change the order of policies
    )
    reward_std: float
    low: float  # bounds of (1 - discount) V for standardised rewards
    high: float

    @staticmethod
    def of(dataset: Dataset, discount: float) -> Scale:
        """From the rows that TD learning may use."""
        rows = dataset.transition_rows()
        observations = dataset.flat("observations")
        rewards = dataset.columns["rewards"][rows].double()
        ends = bool(dataset.columns["terminations"].any())
        mean = 0.0 if ends else float(rewards.mean())
        std = float(rewards.std(unbiased=False)) or 1.0
        low, high = (float(rewards.min()) - mean) / std, (float(rewards.max()) - mean) / std
        if ends:  # an episode may last one step only, or for ever
            low, high = min(low, (1.0 - discount) * low), max(high, (1.0 - discount) * high)
        return Scale(observations.mean(0), observations.std(0, unbiased=False) + FLOOR, mean, std, low, high)

    def observations(self, values: Tensor) -> Tensor:
        """Standardised: [..., O]."""
        return (values - self.mean) / self.std

    def returns(self, q: Tensor, discount: float) -> Tensor:
        """Discounted returns in the rewards' own units, from (1 - discount) Q of standardised rewards."""
        return (q * self.reward_std + self.reward_mean) / (1.0 - discount)


class FQE(Algorithm):
    """Q of K fixed policies by TD learning: y = r + discount m Q'(s', pi_k(s')).

    The networks give q = (1 - discount) Q, which is of the size of a single reward; targets are clipped to the values
    that the data's smallest and largest reward allow. With networks=shared one trunk has an output for each candidate,
    and each row of a batch is given the targets of `pairs` candidates drawn at random: an unbiased estimate of the mean
    of all K losses. It acts in no environment, so it is not registered.
    """

    Config = FQEConfig
    traits = Traits(targets=("critic",), policy_modules=())

    def __init__(self, config: FQEConfig, dataset: Dataset, scale: Scale, candidates: int) -> None:
        self.candidates, self.scale, self.episodes = candidates, scale, dataset.num_episodes
        self.shared = config.networks == "shared"
        self.pairs = min(config.pairs, candidates)
        super().__init__(config, dataset.spec)

    def modules(self) -> dict[str, nn.Module]:
        width, hidden = self.spec.observation_dim + self.spec.encoded_action_dim, self.config.hidden
        if self.shared:
            return {"critic": MLP(width, hidden, self.candidates, layer_norm=self.config.layer_norm)}
        return {"critic": EnsembleMLP(self.candidates, width, hidden, 1, layer_norm=self.config.layer_norm)}

    def optimizer(self, name: str) -> Adam:
        # TensorFlow Addons' AdamW, which DOPE's code uses, does not multiply the decay by the learning rate
        c = self.config
        steps = 0 if c.schedule == "constant" else c.updates
        return Adam(
            c.learning_rate, weight_decay=c.weight_decay / c.learning_rate, schedule=c.schedule, decay_steps=steps
        )

    def sampler(self) -> Sampler:
        return TransitionSampler(extra=("after", "episode"))

    def init(self, seed: int) -> TrainState:
        """With several seeds each has its own bootstrap sample of the episodes, as weights."""
        weights = torch.ones(self.episodes)
        if self.config.seeds > 1:
            counts = np.random.Generator(np.random.PCG64(seed)).multinomial(
                self.episodes, np.full(self.episodes, 1.0 / self.episodes)
            )
            weights = torch.from_numpy(counts.astype(np.float32))
        return super().init(seed)._replace(extra={"weights": weights})

    def q_data(self, critic: Params, observations: Tensor, actions: Tensor) -> Tensor:
        """q of all candidates at the data's actions: [B, K]."""
        x = torch.cat([observations, self.spec.encode(actions)], -1)
        q = self.apply("critic", critic, x)
        return q if self.shared else q.squeeze(-1).T

    def q_own(self, critic: Params, observations: Tensor, actions: Tensor, picks: Tensor | None = None) -> Tensor:
        """q of candidate picks[b, j] at action actions[b, j] ([B, J, A] or [B, J]): [B, J]. Without `picks` J is K, all
        in their order.
        """
        actions = self.spec.encode(actions)
        states = observations.unsqueeze(1).expand(-1, actions.shape[1], -1)
        x = torch.cat([states, actions], -1)  # [B, J, O + A]
        if not self.shared:
            return self.apply("critic", critic, x.transpose(0, 1)).squeeze(-1).T
        q = self.apply("critic", critic, x)  # [B, J, K]
        if picks is None:
            return q.diagonal(dim1=1, dim2=2)
        return q.gather(-1, picks.unsqueeze(-1)).squeeze(-1)

    def choose(self, key: Tensor, batch: int) -> Tensor | None:
        """For each row the candidates whose targets are computed, [B, J]: one from each of J equal shares, so each
        equally often.
        """
        if not self.shared or self.pairs == self.candidates:
            return None
        spread = rng.uniform(key, (batch, self.pairs)) + torch.arange(self.pairs, device=key.device)
        return (spread * (self.candidates / self.pairs)).long().clamp(max=self.candidates - 1)

    def critic_loss(
        self, critic: Params, state: TrainState, batch: Batch, y: Tensor, picks: Tensor | None, weight: Tensor
    ) -> tuple[Tensor, Metrics]:
        q = self.q_data(critic, batch["observations"], batch["actions"])
        if picks is not None:
            q = q.gather(1, picks)
        error = (q - y) / (1.0 - self.config.discount)
        loss = (weight * error.square().mean(1)).sum() / weight.sum().clamp(min=1e-6)
        return loss, {"critic/loss": loss, "critic/q": q.mean(), "critic/td_error": error.abs().mean()}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        c, rewards = self.config, batch["rewards"].unsqueeze(1)
        picks = self.choose(key, len(rewards))
        actions = batch["after"]
        if picks is not None:
            index = picks if actions.ndim == 2 else picks.unsqueeze(-1).expand(-1, -1, actions.shape[-1])
            actions = actions.gather(1, index)
        following = self.q_own(state.target["critic"], batch["next_observations"], actions, picks)
        y = losses.td_target((1.0 - c.discount) * rewards, batch["masks"].unsqueeze(1), c.discount, following)
        y = y.clamp(self.scale.low, self.scale.high)
        weight = state.extra["weights"][batch["episode"]]
        state, metrics = self.descend(state, "critic", self.critic_loss, batch, y, picks, weight)
        return self.polyak(state, "critic", c.polyak), metrics


@dataclass(frozen=True)
class Fitted:
    """Trained Q functions: N seeds of K candidates."""

    algorithm: FQE
    critics: list[Params]  # the target networks: averages over the last updates
    problem: Problem

    @torch.no_grad()
    def values(self, rows: Tensor, actions: Tensor, column: str = "observations") -> Tensor:
        """Q of each candidate in raw units, float64 [N, M, K], at the column's rows [M] and its own actions there [M,
        K, A] or [M, K].
        """
        return self._each(rows, actions, self.algorithm.q_own, column)

    @torch.no_grad()
    def data_values(self, rows: Tensor) -> Tensor:
        """Q of each candidate at the data's actions: [N, M, K]."""
        return self._each(rows, self.problem.dataset.columns["actions"][rows], self.algorithm.q_data, "observations")

    def _each(self, rows: Tensor, actions: Tensor, q: Callable[..., Tensor], column: str) -> Tensor:
        scale, out = self.algorithm.scale, []
        observations = self.problem.dataset.flat(column)
        size = max(1, PAIRS // self.algorithm.candidates)
        for critic in self.critics:
            device = next(iter(critic.values())).device
            parts = []
            for first in range(0, len(rows), size):
                states = scale.observations(observations[rows[first : first + size]]).to(device)
                parts.append(q(critic, states, actions[first : first + size].to(device)).cpu().double())
            out.append(scale.returns(torch.cat(parts), self.algorithm.config.discount))
        return torch.stack(out)


def fit(problem: Problem, settings: FQEConfig, device: str = "cpu", progress: Progress | None = None) -> Fitted:
    """Train the Q functions of all candidates. The same settings, data and candidates give the same numbers."""
    validate(settings)
    where, dataset = torch.device(device), problem.dataset
    scale = Scale.of(dataset, settings.discount)
    algorithm = FQE(settings, dataset, scale, len(problem.names))
    sampler = algorithm.sampler()
    source = sampler.prepare(standardised(problem, scale).to(where))
    seeds = [settings.seed + n for n in range(settings.seeds)]
    late = settings.updates - max(1, settings.updates // 10)

    def settle(engine: LocalEngine, step: int) -> bool:
        engine.settle(torch.ones(len(seeds), dtype=torch.bool))
        return False

    engine = train_replicas(
        algorithm,
        source,
        seeds,
        settings.updates,
        settings.batch_size,
        where,
        compile=settings.compile,
        stops=[late],
        look=settle,
        progress=progress,
    )
    late_losses = metric_means(engine.sums(), settings.updates - late)["critic/loss"]  # of the last tenth, [N]
    diverged = [seed for seed, loss in zip(seeds, late_losses.tolist(), strict=True) if not np.isfinite(loss)]
    if diverged:
        warn(
            f"fitted Q evaluation diverged for seed {', '.join(map(str, diverged))} (a loss is not finite): its values "
            "are missing"
        )
    target = engine.state().target["critic"]
    critics = [{k: v[n].to(where, copy=True) for k, v in target.items()} for n in range(len(seeds))]
    return Fitted(algorithm, critics, problem)


def standardised(problem: Problem, scale: Scale) -> Dataset:
    """The dataset as the networks see it, with the candidates' next actions and each row's episode as columns."""
    dataset = problem.dataset
    columns = dataset.columns
    episode = dataset.per_row(torch.arange(dataset.num_episodes))
    return replace(
        dataset,
        columns={
            **columns,
            "observations": scale.observations(dataset.flat("observations")),
            "next_observations": scale.observations(dataset.flat("next_observations")),
            "rewards": ((columns["rewards"].double() - scale.reward_mean) / scale.reward_std).float(),
            "after": problem.after,
            "episode": episode,
        },
        mapped=False,
    )


def summarise(fitted: Fitted) -> Estimates:
    """Mean of Q(s0, pi(s0)) over the data's initial states and over the seeds.

    The interval adds the variance of the mean over the initial states (Q held fixed) to that between the seeds, each of
    which had its own first weights, batches and bootstrap sample of the episodes; Student's t with the degrees of
    freedom of Welch and Satterthwaite. It says how far the estimate would move with other data of this kind, not how
    biased it is.
    """
    problem = fitted.problem
    starts = problem.starts
    values = fitted.values(starts, problem.current[starts]).numpy()  # [N, M, K]
    value, low, high = combine(values)
    details = {"seeds": values.mean(1).tolist()}
    return Estimates("fqe", problem.names, value, low, high, fitted.algorithm.config.discount, details)


def combine(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mean, low, high), each [K], of values [N seeds, M initial states, K]; see `summarise`. Without any spread to go
    by: NaN ends.
    """
    seeds, states, _ = values.shape
    value = values.mean((0, 1))
    parts = []
    if states > 1:
        parts.append((values.mean(0).var(0, ddof=1) / states, states - 1))
    if seeds > 1:
        parts.append((values.mean(1).var(0, ddof=1), seeds - 1))
    if not parts:
        return value, np.full_like(value, np.nan), np.full_like(value, np.nan)
    total = sum(variance for variance, _ in parts)
    below = sum(variance**2 / freedom for variance, freedom in parts)
    half = np.full_like(value, np.nan)
    for k in range(len(value)):
        if total[k] == 0.0:
            half[k] = 0.0
        elif np.isfinite(total[k]):
            freedom = max(1, int(total[k] ** 2 / below[k]))
            half[k] = student_t(0.95, freedom) * np.sqrt(total[k])
    return value, value - half, value + half


def estimate(dataset: Dataset, candidates: Mapping[str, Any], settings: FQEConfig, device: str = "cpu") -> Estimates:
    """Values of policies on a dataset, in the units of its rewards; quiet. For code that trains: it changes no global
    state.

    settings decide everything, so that the same call gives the same numbers. Raises UserError for candidates that do
    not fit the data."""
    return summarise(fit(make_problem(dataset, candidates, settings.explore), settings, device))
