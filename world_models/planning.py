"""Planning: the best next actions by trying whole plans in a model, and acting as the first step of what came out
(MPC).

`cem` is the cross-entropy method of PETS (arXiv 1805.12114), `mppi` the path-integral planner of TD-MPC2 (arXiv
2310.16828). Both know nothing of models: they are handed a function that scores plans, so what rolls them out, with how
many particles and which value after the last step, is the caller's. They are pure functions of a key that neither
branch on a tensor nor copy to the host, and plan for B states at once. All states meet the same random numbers, so what
is planned for one depends neither on the others nor on its place among them; only noise that is asked for (`explore`)
is each state's own.

Shapes: B states, P candidate plans for each, H steps of a plan, A action dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offrl import rng
from offrl.errors import UserError
from offrl.nn.meta_check import ACTING, check_acting
from offrl.settings.field import setting

Returns = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(observations [B, O], plans [B, P, H, A], key []) -> the return of each plan, [B, P]. Those that are not finite lose
to all that are.
"""

PLANNERS = ("cem", "mppi")
PLAN_COSTS = ("plan_population", "plan_horizon", "plan_particles", "plan_iterations")
QUESTIONS = 1_000_000_000  # to the model before each action: a policy file of a stranger may ask for any number
PLANS = ACTING / 4  # bytes that the plans of one state may take: many states are planned for at once
_EDGE = math.erf(math.sqrt(2.0))  # probability that a normal number is within 2 standard deviations


@dataclass
class MPPISettings:
    """Settings of `mppi`. Defaults: PETS on HalfCheetah; what only `mppi` reads has TD-MPC2's, but for its largest
    noise.
    """

    plan_horizon: int = setting(30, "steps of a plan (TD-MPC2, with a value after the last: 3)", low=1, acting=True)
    plan_population: int = setting(500, "plans tried in each iteration (TD-MPC2: 512)", low=1, acting=True)
    plan_elites: int = setting(
        50, "the best of them, which the next iteration is drawn around (TD-MPC2: 64)", low=1, acting=True
    )
    plan_iterations: int = setting(5, "rounds of trying plans before each action (TD-MPC2: 6)", low=1, acting=True)
    plan_std_min: float = setting(
        0.05, "mppi: least standard deviation of candidate actions, in units of [-1, 1]", low=0.0, acting=True
    )
    # TD-MPC2's 2 is for plans of 3 steps: over 30 it makes nearly all actions extreme ones, and what a warm start knew
    # is lost
    plan_std_max: float = setting(
        0.3,
        "mppi: the largest, and the first iteration's (TD-MPC2: 2); equal to plan_std_min it fixes the noise",
        low=1e-8,
        acting=True,
    )
    plan_action: str = setting(
        "elite",
        "mppi: act as an elite drawn by its weight (TD-MPC2), or as the elites' weighted mean",
        choices=("elite", "mean"),
        acting=True,
    )


@dataclass
class PlanSettings(MPPISettings):
    """Settings of either planner."""

    planner: str = setting(
        "cem", "how plans improve: cem (PETS), or mppi (as in TD-MPC2)", choices=PLANNERS, acting=True
    )
    plan_particles: int = setting(20, "rollouts of each plan, whose returns are averaged", low=1, acting=True)
    plan_alpha: float = setting(
        0.1, "cem: share of the old mean and variance that stays in each iteration", low=0.0, high=1.0, acting=True
    )


def check_plan(config: Any) -> None:
    """Raise UserError for settings that contradict one another. Settings are compared as Python numbers: call it in
    `modules`.
    """
    if config.plan_elites > config.plan_population:
        raise UserError(
            f"algo.plan_elites={config.plan_elites} is more than algo.plan_population={config.plan_population}: "
            "lower the first or raise the second"
        )
    known = [name for name in PLAN_COSTS if hasattr(config, name)]
    if (product := math.prod(getattr(config, name) for name in known)) > QUESTIONS:
        raise UserError(
            f"{' times '.join(f'algo.{name}' for name in known)} is {product:,} questions to the model before each "
            f"action; at most {QUESTIONS:,} are tried"
        )
    if getattr(config, "planner", "mppi") == "mppi" and config.plan_std_min > config.plan_std_max:
        raise UserError(
            f"algo.plan_std_min={config.plan_std_min} is above algo.plan_std_max={config.plan_std_max}; equal "
            "ones fix the noise"
        )


def check_plan_memory(config: Any, action_dim: int, width: int = 0) -> None:
    """Raise UserError where the plans of a state take too much memory. width: of the layers that all of them go through
    at once, by `latent` and `hidden`; 0: they do not.
    """
    # what was measured: 10 float32 for each number of a plan, and of the widest layer
    size = 40.0 * config.plan_population * (config.plan_horizon * action_dim + width)
    names = "plan_population", "plan_horizon", *(("latent", "hidden") if width else ())
    check_acting(config, names, size, PLANS)


def first_plan(batch: int, horizon: int, low: Tensor, high: Tensor) -> Tensor:
    """The mean plan at the start of `batch` episodes: the middle of the bounds low, high [A] everywhere, [batch,
    horizon, A].
    """
    return ((low + high) / 2.0).expand(batch, horizon, -1).clone()


def shifted(mean: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The mean plan [B, H, A] one step later: without its first action, and with the middle of the bounds, [A] or
    [B, A], as its last.
    """
    middle = ((low + high) / 2.0).unsqueeze(-2)
    return torch.cat([mean[:, 1:], middle.expand(mean.shape[0], 1, -1).to(mean.dtype)], 1)


def truncated_normal(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Standard normal float32 given that it is within [-2, 2], by the inverse of its distribution function."""
    return (math.sqrt(2.0) * torch.erfinv(_EDGE * rng.uniform(key, shape, -1.0, 1.0))).clamp(-2.0, 2.0)


def plan(
    config: Any,
    returns: Returns,
    observations: Tensor,
    mean: Tensor,
    low: Tensor,
    high: Tensor,
    key: Tensor,
    *,
    explore: bool = False,
) -> tuple[Tensor, Tensor]:
    """`cem` or `mppi`, whichever `config` (with the fields of PlanSettings) names, with its settings; see there."""
    c, problem = config, (returns, observations, mean, low, high, key)
    sizes = {"population": c.plan_population, "elites": c.plan_elites, "iterations": c.plan_iterations}
    if c.planner == "cem":
        return cem(*problem, alpha=c.plan_alpha, **sizes)
    return mppi(
        *problem,
        temperature=0.5,
        std_min=c.plan_std_min,
        std_max=c.plan_std_max,
        pick=c.plan_action,
        explore=explore,
        **sizes,
    )


def cem(
    returns: Returns,
    observations: Tensor,
    mean: Tensor,
    low: Tensor,
    high: Tensor,
    key: Tensor,
    *,
    population: int,
    elites: int,
    iterations: int,
    alpha: float | Tensor,
    floor: float = 1e-3,
) -> tuple[Tensor, Tensor]:
    """The cross-entropy method as in PETS (arXiv 1805.12114): the first action [B, A], and the next step's mean plan
    [B, H, A].

    Candidates are normal numbers cut at 2 standard deviations, which are at most half the distance to the nearer bound,
    so none leaves the bounds; mean and variance follow the elites', new = alpha old + (1 - alpha) elites'. The variance
    starts at ((high - low) / 4)**2.

    observations: [B, O], only handed to `returns`. mean: [B, H, A], from `first_plan` or the last step's. low, high:
    [A].
    elites: how many; those whose return is not finite count for nothing, and a state without a finite return keeps its
    plan. floor: a state's plan is final once all its variances are at most this, for bounds of [-1, 1]; PETS stops
    then.
    Raises ValueError for returns of another shape than [B, P], or more elites than candidates.
    """
    _fits(population, elites)
    half = (high - low) / 2.0
    mean = mean.clamp(low, high)
    variance = (half.square() / 4.0).expand_as(mean)
    for i in range(iterations):
        draw, score = rng.split(rng.fold_in(key, i))
        nearest = torch.minimum(mean - low, high - mean)
        std = torch.minimum(variance.sqrt(), nearest / 2.0)
        plans = _candidates(truncated_normal, draw, mean, std, low, high, population)
        value, best = _best(returns, observations, plans, score, elites)
        counts = torch.isfinite(value)
        center, spread = _moments(best, counts.to(value.dtype))
        moves = (counts.any(1) & (variance > floor * half.square()).flatten(1).any(1)).view(-1, 1, 1)
        # the average of plans inside the bounds can leave them by a rounding
        mean = torch.where(moves, alpha * mean + (1.0 - alpha) * center, mean).clamp(low, high)
        variance = torch.where(moves, alpha * variance + (1.0 - alpha) * spread, variance)
    return mean[:, 0], shifted(mean, low, high)


def mppi(
    returns: Returns,
    observations: Tensor,
    mean: Tensor,
    low: Tensor,
    high: Tensor,
    key: Tensor,
    *,
    population: int,
    elites: int,
    iterations: int,
    temperature: float | Tensor,
    std_min: float | Tensor,
    std_max: float | Tensor,
    pick: str = "elite",
    explore: bool = False,
    proposals: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Path integral control as in TD-MPC2 (arXiv 2310.16828): the first action [B, A], and the next step's mean plan
    [B, H, A].

    Candidates are normal numbers clipped to the bounds; mean and standard deviation become those of the elites,
    weighted by exp(temperature (return - best return)). With `elites` = `population` and `std_min` = `std_max` it is
    MPPI with fixed noise (arXiv 1509.01149).

    std_min, std_max: of the candidates, in units of half the bounds' distance; the first iteration draws with std_max.
    low, high: [A], or [B, A] where states have bounds of their own. pick: the action is that of an "elite" drawn by its
    weight, or of the "mean". explore: with noise of the plan's standard deviation, and draws that are each state's own.
    proposals: plans [B, N, H, A] within the bounds, such as a policy's, that are among the `population` of every
    iteration.
    The other arguments, and returns that are not finite, as in `cem`.
    """
    _fits(population, elites)
    bounds = low.unsqueeze(-2), high.unsqueeze(-2)  # of each step of a plan
    of_plans = low[..., None, None, :], high[..., None, None, :]
    half = (bounds[1] - bounds[0]) / 2.0
    mean = mean.clamp(*bounds)
    least, most = half * std_min, half * std_max
    std = most.expand_as(mean)
    for i in range(iterations):
        draw, score = rng.split(rng.fold_in(key, i))
        if proposals is None:
            plans = _candidates(rng.normal, draw, mean, std, *of_plans, population)
        else:
            plans = _candidates(rng.normal, draw, mean, std, *of_plans, population - proposals.shape[1])
            plans = torch.cat([proposals, plans], 1)
        value, best = _best(returns, observations, plans, score, elites)
        counts = torch.isfinite(value)
        top = torch.where(counts[:, :1], value[:, :1], 0.0)  # of values in falling order
        # a difference of finite returns can overflow, and 0 times infinity is no weight
        gap = (value - top).clamp(min=torch.finfo(value.dtype).min)
        logits = torch.where(counts, temperature * gap, -math.inf)
        center, spread = _moments(best, logits.exp())
        moves = counts.any(1).view(-1, 1, 1)
        mean = torch.where(moves, center, mean).clamp(*bounds)
        std = torch.where(moves, torch.minimum(torch.maximum(spread.sqrt(), least), most), std)
    chosen, noise = rng.split(rng.fold_in(key, iterations))
    action = mean[:, 0]
    if pick == "elite":
        # mapped over the states, the draw is the same one for all of them
        index = (
            rng.categorical(chosen, logits)
            if explore
            else torch.func.vmap(lambda row: rng.categorical(chosen, row))(logits)
        )
        index = index.view(-1, 1, 1).expand(-1, 1, action.shape[-1])
        action = torch.where(moves[:, 0], best[:, :, 0].gather(1, index).squeeze(1), action)
    if explore:
        action = action + std[:, 0] * rng.normal(noise, tuple(action.shape)).to(action.dtype)
    return action.clamp(low, high), shifted(mean, low, high)


def _fits(population: int, elites: int) -> None:
    if not 1 <= elites <= population:
        raise ValueError(f"a population of {population} plans cannot have {elites} elites")


def _candidates(
    noise: Callable[[Tensor, tuple[int, ...]], Tensor],
    key: Tensor,
    mean: Tensor,
    std: Tensor,
    low: Tensor,
    high: Tensor,
    population: int,
) -> Tensor:
    """Plans [B, P, H, A] around the mean, none beyond the bounds."""
    draws = noise(key, (population, *mean.shape[1:])).to(mean.dtype)
    return (mean.unsqueeze(1) + std.unsqueeze(1) * draws).clamp(low, high)


def _best(returns: Returns, observations: Tensor, plans: Tensor, key: Tensor, elites: int) -> tuple[Tensor, Tensor]:
    """The elites' returns [B, elites], best first and -inf for what is not finite, and their plans [B, elites, H,
    A].
    """
    value = returns(observations, plans, key)
    if value.shape != plans.shape[:2]:
        raise ValueError(
            f"returns of shape {tuple(value.shape)} for {plans.shape[1]} plans of each of {plans.shape[0]} states"
        )
    value = value.to(plans.dtype)
    value = torch.where(torch.isfinite(value), value, -math.inf)  # +inf is a diverged model as well
    # topk leaves open which of equal ones it takes
    value, order = torch.sort(value, dim=1, descending=True, stable=True)
    index = order[:, :elites, None, None].expand(-1, -1, *plans.shape[2:])
    return value[:, :elites], plans.gather(1, index)


def _moments(plans: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance [B, H, A] of plans [B, N, H, A] with weights [B, N]; 0 and 0 where all weights are 0."""
    total = weights.sum(1, keepdim=True)
    share = (weights / torch.where(total > 0.0, total, 1.0))[..., None, None]
    mean = (share * plans).sum(1)
    return mean, (share * (plans - mean.unsqueeze(1)).square()).sum(1)
