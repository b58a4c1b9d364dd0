"""Importance sampling of all candidates at once: per-decision and weighted (Precup et al., 2000; as in DOPE's code,
arXiv 2103.16596), and doubly robust, fitted Q corrected by weighted TD errors (Jiang and Li, arXiv 1511.03722; Thomas
and Brunskill, 1604.00923).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offrl import registry
from offrl.actor import MemorylessActor
from offrl.algorithm import Algorithm, TrainState
from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.nn.policies import Deterministic, Gaussian, TanhGaussian, gaussian_log_prob
from offrl.ope.config import OPEConfig
from offrl.ope.fqe import Fitted, Scale, standardised
from offrl.ope.problem import Estimates, Problem, candidate_actions, in_environment, raw_observations
from offrl.optim import Params
from offrl.training.fit import Progress, fit

MARGIN = 1e-4  # actions are clipped to +-(1 - MARGIN), where a tanh-Gaussian's density is finite
NEGLIGIBLE = 1e-9  # rewards discounted below this share are left out
ROWS = 16_384
CLIP = (-6.0, 2.0)  # bounds of the log ratio of one step
DRAWS = 10  # actions of an exploring candidate for each expectation


def behavior_log_prob(
    problem: Problem, settings: OPEConfig, device: str = "cpu", progress: Progress | None = None
) -> Tensor:
    """log b(a_t | s_t) of the data's actions under a model of the policy that made them: float64 [R].

    The model is behaviour cloning by likelihood (algo=bc with a tanh-Gaussian, or categorical for discrete actions) on
    standardised observations, trained on every row.
    """
    dataset, where = problem.dataset, torch.device(device)
    bc = registry.get("algo", "bc")
    config = bc.Config(
        learning_rate=settings.learning_rate,
        batch_size=settings.batch_size,
        hidden=settings.hidden,
        policy="tanh_gaussian",
    )
    scale = Scale.of(dataset, settings.discount)
    inputs = standardised(problem, scale)
    if not dataset.spec.discrete:
        actions = inputs.columns["actions"].clamp(-1.0 + MARGIN, 1.0 - MARGIN)
        inputs = replace(inputs, columns={**inputs.columns, "actions": actions})
    algorithm: Algorithm = bc(config, dataset.spec)
    source = algorithm.sampler().prepare(inputs.to(where))
    engine = fit(
        algorithm,
        source,
        [settings.seed],
        settings.behavior_updates,
        settings.batch_size,
        where,
        compile=settings.compile,
        progress=progress,
    )
    params = {k: v[0] for k, v in engine.state().params["actor"].items()}
    return _densities(algorithm, params, inputs.columns["observations"], inputs.columns["actions"])


@torch.no_grad()
def _densities(algorithm: Algorithm, params: Params, observations: Tensor, actions: Tensor) -> Tensor:
    """log pi(a | s) [R] of a policy module, for observations as it takes them: float64."""
    parts = []
    for first in range(0, len(observations), ROWS):
        part = slice(first, first + ROWS)
        dist = algorithm.apply("actor", params, observations[part])
        parts.append(algorithm.policy.log_prob(dist, actions[part]).double())
    return torch.cat(parts)


def target_log_prob(problem: Problem, target_std: float) -> Tensor:
    """log pi_k(a_t | s_t) of the data's actions: float64 [R, K].

    A greedy candidate gets a Gaussian of `target_std` around its action; a greedy choice among discrete actions has
    probability 1 or 0. As they explore (problem.explore), candidates must have a density: a method
    log_prob(observations, actions) for raw ones in the environment's range, or the policy module of a trained run.
    Raises UserError for one without.
    """
    columns = []
    for k, name in enumerate(problem.names):
        if problem.explore:
            columns.append(_own_density(name, problem.policies[k], problem.dataset))
            continue
        greedy, data = problem.actions[k].current, problem.dataset.columns["actions"]
        if problem.dataset.spec.discrete:
            columns.append(torch.where(greedy == data, 0.0, -torch.inf).double())
        else:
            spread = torch.full((), target_std, dtype=torch.float64).log()
            columns.append(gaussian_log_prob(greedy.double(), spread.expand_as(greedy), data.double()))
    return torch.stack(columns, 1)


@torch.no_grad()
def _own_density(name: str, policy: Any, dataset: Dataset) -> Tensor:
    observations = raw_observations(dataset, "observations")
    spec, actions = dataset.spec, dataset.columns["actions"]
    if hasattr(policy, "log_prob"):
        densities = torch.as_tensor(
            np.asarray(policy.log_prob(observations, in_environment(spec, actions)), np.float64)
        )
        if densities.shape != (len(dataset),):
            raise UserError(
                f"candidate {name}: log_prob gave shape {tuple(densities.shape)} for {len(dataset)} rows; one number a "
                "row is due"
            )
        if spec.discrete:
            return densities
        low, high = spec.action_bounds
        return densities + float(np.log((high - low) / 2.0).sum())
    algorithm = getattr(policy, "algorithm", None)
    state: TrainState | None = getattr(policy, "state", None)
    if (
        algorithm is None
        or state is None
        or type(policy.actor) is not MemorylessActor
        or isinstance(algorithm.policy, Deterministic)
    ):
        raise UserError(
            f"candidate {name} says no density of its actions, which wis and dr with explore=true need; leave out "
            "explore=true"
        )
    if isinstance(algorithm.policy, (Gaussian, TanhGaussian)):
        actions = actions.clamp(-1.0 + MARGIN, 1.0 - MARGIN)
    return _densities(algorithm, state.params["actor"], policy.normalised(observations), actions)


def weighted_sums(
    ratios: Tensor,
    gains: Tensor,
    dataset: Dataset,
    discount: float,
    resamples: Tensor | None = None,
    usable: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """sum_t discount**t (sum_i w_it g_it / sum_i w_it) with w_it = exp(sum of the log ratios of episode i up to step
    t).

    ratios, gains: [R, K] float64. resamples: how often each episode is drawn in each of B bootstrap samples, [B, E];
    the first result is for the data themselves. usable: rows whose gain is known, bool [R]; an episode leaves at one
    that is not. Returns ([1 + B, K], effective number of episodes [K]: the mean over steps, weighted by discount**t, of
    (sum w)**2 / sum w**2).

    An episode that has ended stays in the sum below with the weight it had and gains nothing more. One that was cut
    short (a time-out, or an unknown successor) leaves both sums: what would have followed is not known. Weights are
    taken relative to the largest of their step, so none overflows.
    """
    start, lengths = dataset.episode_start, dataset.episode_lengths()
    order = torch.argsort(lengths, descending=True, stable=True)
    first, lengths = start[order], lengths[order]
    ended = dataset.columns["terminations"][first + lengths - 1]
    episodes, candidates = len(order), ratios.shape[1]
    counts = torch.ones(1, episodes, dtype=torch.float64)
    if resamples is not None:
        counts = torch.cat([counts, resamples.double()])[:, order]
    log_weight = torch.zeros(episodes, candidates, dtype=torch.float64)
    total = torch.zeros(len(counts), candidates, dtype=torch.float64)
    effective, share = torch.zeros(candidates, dtype=torch.float64), 0.0
    # how many are longer than t steps
    alive_at = torch.searchsorted(-lengths, -torch.arange(int(lengths[0])), right=False)
    for t in range(int(lengths[0])):
        factor = discount**t
        if factor < NEGLIGIBLE:
            break
        n = int(alive_at[t])
        rows = first[:n] + t
        log_weight[:n] += ratios[rows]
        log_weight[n:][~ended[n:]] = -torch.inf
        if usable is not None:
            log_weight[:n][~usable[rows]] = -torch.inf
        top = log_weight.amax(0)
        if (top == -torch.inf).all():
            break  # no episode says what happens this late
        weight = torch.exp(log_weight - torch.where(top == -torch.inf, 0.0, top))
        above = counts[:, :n] @ (weight[:n] * gains[rows])
        below = counts @ weight
        # a bootstrap sample can hold none of the episodes that still run
        total += factor * torch.where(below > 0.0, above / below, 0.0)
        effective += factor * weight.sum(0).square() / weight.square().sum(0).clamp(min=NEGLIGIBLE)
        share += factor
    return total, effective / max(share, NEGLIGIBLE)


def episode_counts(episodes: int, resamples: int, seed: int) -> Tensor:
    """The number of times that each episode is drawn in each bootstrap sample: [B, E]."""
    generator = np.random.Generator(np.random.PCG64(seed))
    return torch.from_numpy(generator.multinomial(episodes, np.full(episodes, 1.0 / episodes), size=resamples))


def wis(problem: Problem, behavior: Tensor, settings: OPEConfig) -> Estimates:
    """Values by per-decision weighted importance sampling; the interval by a bootstrap over episodes."""
    rewards = problem.dataset.columns["rewards"].double().unsqueeze(1).expand(-1, len(problem.names))
    sums, effective, _ = _weighted(problem, behavior, settings, rewards)
    return _estimates("wis", problem, settings, sums, effective)


def doubly_robust(fitted: Fitted, behavior: Tensor, settings: OPEConfig) -> Estimates:
    """mean V(s0) + sum_t discount**t (weighted mean of r_t + discount m_t V(s_{t+1}) - Q(s_t, a_t)).

    The weights are those of `wis`, self-normalised at each step; the sum of TD errors telescopes to the usual form
    sum_t discount**t [w_t (r_t - Q_t) + w_{t-1} V_t]. The interval is a bootstrap over episodes with Q held fixed.
    """
    problem = fitted.problem
    columns, episodes = problem.dataset.columns, problem.dataset.num_episodes
    values, next_values = state_values(fitted)
    q = fitted.data_values(torch.arange(len(problem.dataset))).mean(0)
    masks = (~columns["terminations"]).double().unsqueeze(1)
    errors = columns["rewards"].double().unsqueeze(1) + settings.discount * masks * next_values - q
    sums, effective, counts = _weighted(problem, behavior, settings, errors, problem.known)
    first = torch.cat([torch.ones(1, episodes), counts]).double() @ values[problem.starts] / episodes
    return _estimates("dr", problem, settings, first + sums, effective, correction=sums[0].tolist())


def state_values(fitted: Fitted) -> tuple[Tensor, Tensor]:
    """(V(s_t), V(s_{t+1})) of each candidate, float64 [R, K]: mean over the seeds of Q at its own actions.

    Greedy candidates have one action; as they explore, it is the mean over DRAWS of them.
    """
    problem = fitted.problem
    rows = torch.arange(len(problem.dataset))
    values_here = after = torch.zeros(())
    draws = DRAWS if problem.explore else 1
    for draw in range(draws):
        actions = problem.actions
        if draw:
            pairs = zip(problem.names, problem.policies, strict=True)
            actions = tuple(candidate_actions(name, policy, problem.dataset, True, draw) for name, policy in pairs)
        values_here = values_here + fitted.values(rows, torch.stack([a.current for a in actions], 1)).mean(0)
        after = after + fitted.values(rows, torch.stack([a.after for a in actions], 1), "next_observations").mean(0)
    return values_here / draws, after / draws


def _weighted(
    problem: Problem, behavior: Tensor, settings: OPEConfig, gains: Tensor, usable: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(`weighted_sums` of the gains, effective episodes, the bootstrap's counts of episodes [B, E])."""
    target = target_log_prob(problem, settings.target_std)
    ratios = (target - behavior.unsqueeze(1)).clamp(*CLIP)
    counts = episode_counts(problem.dataset.num_episodes, settings.bootstrap, settings.seed)
    return *weighted_sums(ratios, gains, problem.dataset, settings.discount, counts, usable), counts


def _estimates(
    method: str, problem: Problem, settings: OPEConfig, values: Tensor, effective: Tensor, **details: list[float]
) -> Estimates:
    """Of values [1 + B, K], the data's first: the interval is the middle 95% of the bootstrap's."""
    low, high = np.nanpercentile(values[1:].numpy(), [2.5, 97.5], axis=0)
    more = {"effective_episodes": effective.tolist(), **details}
    return Estimates(method, problem.names, values[0].numpy(), low, high, settings.discount, more)
