"""Planners: iterations in float64 NumPy on the same draws, optimal control of a double integrator, and what must hold
for any model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import rng
from offrl.algorithms.tdmpc2 import TDMPC2Config
from offrl.errors import UserError
from offrl.settings.field import check
from offrl.world_models.planning import (
    PlanSettings,
    cem,
    check_plan,
    check_plan_memory,
    first_plan,
    mppi,
    plan,
    shifted,
    truncated_normal,
)

B, P, H, A, ELITES = 2, 16, 3, 2, 5
LOW, HIGH = torch.tensor([-1.0, -0.5]), torch.tensor([1.0, 2.0])
ONES = torch.ones(A)
KEY = rng.make_key(4)
G = np.random.default_rng(7)
MEAN = torch.tensor(G.uniform(LOW.numpy(), HIGH.numpy(), (B, H, A)), dtype=torch.float32)
MEAN[0, 0, 0] = 0.95  # so near a bound that the distance to it is what limits the draws
GOALS = torch.tensor([[0.2, 0.7], [-0.6, 1.5]])
CEM: dict[str, Any] = {"population": 200, "elites": 20, "iterations": 8, "alpha": 0.1}
MPPI: dict[str, Any] = {
    "population": 200,
    "elites": 20,
    "iterations": 8,
    "temperature": 2.0,
    "std_min": 0.05,
    "std_max": 2.0,
}
BOTH = pytest.mark.parametrize(("planner", "settings"), [(cem, CEM), (mppi, MPPI)], ids=["cem", "mppi"])


def quadratic(observations: Tensor, plans: Tensor, key: Tensor) -> Tensor:
    """Best where every action is the observation; no two steps count the same."""
    weight = torch.arange(1, plans.shape[2] + 1, dtype=plans.dtype).unsqueeze(-1)
    return -(weight * (plans - observations[:, None, None]).square()).sum((-1, -2))


def noisy(observations: Tensor, plans: Tensor, key: Tensor) -> Tensor:
    return quadratic(observations, plans, key) + rng.normal(key, tuple(plans.shape[:2]))


def np_noisy(plans: np.ndarray, key: Tensor) -> np.ndarray:
    goals, weight = GOALS.numpy().astype(np.float64), np.arange(1, H + 1)[:, None]
    return -(weight * (plans - goals[:, None, None]) ** 2).sum((-1, -2)) + rng.normal(key, (B, P)).numpy().astype(
        np.float64
    )


def float64(x: Tensor) -> np.ndarray:
    return x.numpy().astype(np.float64)


def test_truncated_normal_inverts_the_distribution_function() -> None:
    normal, u = statistics.NormalDist(), float64(rng.uniform(KEY, (4000,), -1.0, 1.0))
    below, inside = normal.cdf(-2.0), normal.cdf(2.0) - normal.cdf(-2.0)
    expected = [normal.inv_cdf(below + inside * (x + 1) / 2) if x > -1 else -2.0 for x in u]
    z = truncated_normal(KEY, (4000,))
    np.testing.assert_allclose(z.numpy(), expected, atol=2e-5)
    assert z.abs().max() <= 2.0 and z.max() > 1.95 and z.min() < -1.95
    assert abs(z.var().item() - 0.7737) < 0.05  # 1 - 4 phi(2) / (2 Phi(2) - 1)


# 0.055 ends the first state's search after two iterations and lets the second's go on
@pytest.mark.parametrize("floor", [1e-3, 0.055])
def test_cem_in_numpy(floor: float) -> None:
    low, high, alpha = float64(LOW), float64(HIGH), 0.3
    mean, var = float64(MEAN), np.broadcast_to((high - low) ** 2 / 16, (B, H, A)).copy()
    stopped, capped = [], []
    for i in range(4):
        draw, score = rng.split(rng.fold_in(KEY, i))
        cap = np.minimum(((mean - low) / 2) ** 2, ((high - mean) / 2) ** 2)
        capped.append(cap < var)
        plans = mean[:, None] + np.sqrt(np.minimum(cap, var))[:, None] * float64(truncated_normal(draw, (P, H, A)))
        returns = np_noisy(plans, score)
        stopped.append([])
        for b in range(B):
            if (var[b] / ((high - low) / 2) ** 2).max() <= floor:
                stopped[-1].append(b)
                continue
            best = plans[b][np.argsort(-returns[b])[:ELITES]]
            mean[b] = alpha * mean[b] + (1 - alpha) * best.mean(0)
            var[b] = alpha * var[b] + (1 - alpha) * best.var(0)
    assert np.any(capped) and not np.all(capped)
    assert any(len(s) == 1 for s in stopped) == (floor > 0.01)
    action, following = cem(
        noisy,
        GOALS,
        MEAN,
        LOW,
        HIGH,
        KEY,
        population=P,
        elites=ELITES,
        iterations=4,
        alpha=alpha,
        floor=floor,
    )
    np.testing.assert_allclose(action.numpy(), mean[:, 0], atol=2e-6)
    np.testing.assert_allclose(following[:, :-1].numpy(), mean[:, 1:], atol=2e-6)
    np.testing.assert_allclose(following[:, -1].numpy(), np.broadcast_to((low + high) / 2, (B, A)), atol=1e-7)


@pytest.mark.parametrize("explore", [False, True])
@pytest.mark.parametrize("pick", ["elite", "mean"])
def test_mppi_in_numpy(pick: str, explore: bool) -> None:
    low, high, temperature, least, most = float64(LOW), float64(HIGH), 0.1, 0.3, 0.6
    half, mean = (high - low) / 2, float64(MEAN)
    std, raw = np.broadcast_to(half * most, (B, H, A)), []
    for i in range(3):
        draw, score = rng.split(rng.fold_in(KEY, i))
        plans = np.clip(mean[:, None] + std[:, None] * float64(rng.normal(draw, (P, H, A))), low, high)
        returns = np_noisy(plans, score)
        order = np.argsort(-returns, 1)[:, :ELITES]
        best, value = np.take_along_axis(plans, order[..., None, None], 1), np.take_along_axis(returns, order, 1)
        weight = np.exp(temperature * (value - value.max(1, keepdims=True)))
        weight = (weight / weight.sum(1, keepdims=True))[..., None, None]
        mean = (weight * best).sum(1)
        raw.append(np.sqrt((weight * (best - mean[:, None]) ** 2).sum(1)) / half)
        std = half * np.clip(raw[-1], least, most)
    assert np.min(raw) < least and np.max(raw) > least  # the clamp matters, and not everywhere
    chosen, noise = rng.split(rng.fold_in(KEY, 3))
    action = mean[:, 0]
    if pick == "elite":
        logits = torch.tensor(np.log(weight[..., 0, 0]), dtype=torch.float32)
        drawn = (
            rng.categorical(chosen, logits)
            if explore
            else torch.cat([rng.categorical(chosen, row).view(1) for row in logits])
        )
        assert (drawn > 0).any()
        action = best[np.arange(B), drawn.numpy(), 0]
    if explore:
        action = np.clip(action + std[:, 0] * float64(rng.normal(noise, (B, A))), low, high)
    got, following = mppi(
        noisy, GOALS, MEAN, LOW, HIGH, KEY, population=P, elites=ELITES, iterations=3, temperature=temperature,
        std_min=least, std_max=most, pick=pick, explore=explore,
    )  # fmt: skip
    np.testing.assert_allclose(got.numpy(), action, atol=2e-6)
    np.testing.assert_allclose(following[:, :-1].numpy(), mean[:, 1:], atol=2e-6)


def test_mppi_with_all_plans_as_elites_and_one_std_has_fixed_noise() -> None:
    seen: list[Tensor] = []

    def keep(observations: Tensor, plans: Tensor, key: Tensor) -> Tensor:
        seen.append(plans)
        return noisy(observations, plans, key)

    wide = 100 * ONES
    mppi(
        keep,
        GOALS,
        first_plan(B, H, -wide, wide),
        -wide,
        wide,
        KEY,
        **{**MPPI, "elites": 200, "std_min": 0.01, "std_max": 0.01},
    )
    assert len(seen) == 8 and all(abs(plans.std(1).mean().item() - 1.0) < 0.05 for plans in seen)


@BOTH
def test_bounds_hold_exactly(planner: Callable[..., Any], settings: dict[str, Any]) -> None:
    # no binary fractions, and an action that has no choice
    low, high = (torch.tensor([-0.1, 0.3]), torch.tensor([0.7, 0.3]))
    seen: list[Tensor] = []

    def outwards(observations: Tensor, plans: Tensor, key: Tensor) -> Tensor:
        seen.append(plans)
        return plans.sum((-1, -2))

    mean = torch.full((1, H, A), 5.0)  # a plan from elsewhere, beyond the bounds
    for k in range(20):
        more = {"explore": True} if planner is mppi else {}
        action, mean = planner(outwards, torch.zeros(1, 1), mean, low, high, rng.fold_in(KEY, k), **settings, **more)
        seen += [action, mean]
    assert all(((x >= low) & (x <= high)).all() for x in seen)
    assert action[0, 1] == high[1]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finds_the_top_of_a_quadratic(
    planner: Callable[..., Any], settings: dict[str, Any], dtype: torch.dtype
) -> None:
    goals = torch.tensor([[0.3, -0.5], [-0.8, 0.1], [1.5, -2.0]], dtype=dtype)  # the last beyond the bounds
    one, many = ONES.to(dtype), {**settings, "population": 500, "elites": 50, "iterations": 20}
    action, following = planner(quadratic, goals, first_plan(3, 2, -one, one), -one, one, KEY, **many)
    assert action.dtype == following.dtype == dtype
    tolerance = 0.1 if planner is mppi else 0.03  # an elite of a search that keeps a noise of 0.05
    for found in (action, following[:, 0]):
        np.testing.assert_allclose(found[:2], goals[:2], atol=tolerance)
        # PETS's noise shrinks with the distance to the bound
        np.testing.assert_allclose(found[2], [1.0, -1.0], atol=0.3)


STEP, STEPS, FORCE = 0.2, 12, 5.0
SYSTEM, PUSH = np.array([[1.0, STEP], [0.0, 1.0]]), np.array([0.5 * STEP**2, STEP])
STARTS = np.array([[1.0, 0.0], [-0.5, 1.0], [0.3, -1.2]])


def regulator() -> list[np.ndarray]:
    """The optimal gains K_t, u = -K_t x, of sum_t |x_t+1|^2 + 0.1 u_t^2 over STEPS steps (Riccati, backwards)."""
    cost, gains = np.zeros((2, 2)), []
    for _ in range(STEPS):
        ahead = cost + np.eye(2)  # of the next state
        gain = (PUSH @ ahead @ SYSTEM) / (0.1 + PUSH @ ahead @ PUSH)
        closed = SYSTEM - np.outer(PUSH, gain)
        cost = closed.T @ ahead @ closed + 0.1 * np.outer(gain, gain)
        gains.append(gain)
    return gains[::-1]


def integrator(observations: Tensor, plans: Tensor, key: Tensor) -> Tensor:
    state, total = observations.unsqueeze(1).expand(-1, plans.shape[1], -1), torch.zeros(plans.shape[:2])
    system, push = torch.tensor(SYSTEM, dtype=torch.float32), torch.tensor(PUSH, dtype=torch.float32)
    for u in plans.unbind(2):
        state = state @ system.T + u * push
        total = total - state.square().sum(-1) - 0.1 * u.square().squeeze(-1)
    return total


@BOTH
def test_first_action_is_the_optimal_regulators(planner: Callable[..., Any], settings: dict[str, Any]) -> None:
    expected = -STARTS @ regulator()[0]
    assert (np.abs(expected) < 0.7 * FORCE).all() and (np.abs(expected) > 1.0).all()
    high, starts = torch.tensor([FORCE]), torch.tensor(STARTS, dtype=torch.float32)
    many: dict[str, Any] = {**settings, "population": 500, "elites": 50, "iterations": 30}
    # both searches go on to where their own noise is far below the tolerance
    many |= {"std_min": 0.02, "std_max": 0.5, "pick": "mean"} if planner is mppi else {"alpha": 0.3, "floor": 1e-6}
    action, _ = planner(integrator, starts, first_plan(len(STARTS), STEPS, -high, high), -high, high, KEY, **many)
    np.testing.assert_allclose(action[:, 0].numpy(), expected, rtol=0.05)


@BOTH
def test_warm_start_beats_a_cold_one(planner: Callable[..., Any], settings: dict[str, Any]) -> None:
    low, high = torch.tensor([-FORCE]), torch.tensor([FORCE])
    settings = {**settings, "population": 500, "elites": 50}
    if planner is mppi:
        settings |= {"std_max": 0.2, "pick": "mean"}  # noise over the whole range forgets where it began
    few = {**settings, "iterations": 2}
    state, cold = 3.0 * torch.tensor(STARTS, dtype=torch.float32), first_plan(len(STARTS), STEPS, low, high)
    action, warm = planner(integrator, state, cold, low, high, KEY, **{**settings, "iterations": 15})
    state = state @ torch.tensor(SYSTEM.T, dtype=torch.float32) + action * torch.tensor(PUSH, dtype=torch.float32)

    def reached(mean: Tensor, key: Tensor) -> Tensor:
        first, following = planner(integrator, state, mean, low, high, key, **few)
        whole = torch.cat([first.unsqueeze(1), following[:, :-1]], 1)
        return integrator(state, whole.unsqueeze(1), key).squeeze(1)

    keys = rng.split(rng.fold_in(KEY, 9), 5)
    difference = torch.stack([reached(warm, k) - reached(cold, k) for k in keys]).mean(0)
    assert (difference > 0.1).all()


@BOTH
def test_a_row_does_not_see_the_others(planner: Callable[..., Any], settings: dict[str, Any]) -> None:
    goals = torch.tensor(G.uniform(-1, 1, (4, A)), dtype=torch.float32)
    means = 0.5 * torch.tensor(G.uniform(-1, 1, (4, H, A)), dtype=torch.float32)
    action, following = planner(quadratic, goals, means, -ONES, ONES, KEY, **settings)
    for b in range(4):
        alone = planner(quadratic, goals[b : b + 1], means[b : b + 1], -ONES, ONES, KEY, **settings)
        torch.testing.assert_close(alone[0][0], action[b], atol=1e-6, rtol=0)
        torch.testing.assert_close(alone[1][0], following[b], atol=1e-6, rtol=0)
    if planner is mppi:
        same = mppi(
            quadratic, goals[:1].expand(4, -1), means[:1].expand(4, -1, -1), -ONES, ONES, KEY, **settings, explore=True
        )[0]
        assert (same[0] != same[1]).any()  # noise of their own


@BOTH
def test_vmap_over_keys_and_one_graph(planner: Callable[..., Any], settings: dict[str, Any]) -> None:
    def act(key: Tensor) -> tuple[Tensor, Tensor]:
        more = {"explore": True} if planner is mppi else {}
        return planner(noisy, GOALS, MEAN, LOW, HIGH, key, **{**settings, "iterations": 2}, **more)

    keys = torch.stack(rng.split(KEY, 3))
    together = torch.func.vmap(act)(keys)
    captured = torch.compile(torch.func.vmap(act), fullgraph=True, backend="eager")(keys)
    for r in range(3):
        for x, y, z in zip(act(keys[r]), together, captured, strict=True):
            torch.testing.assert_close(y[r], x, atol=1e-6, rtol=0)
            torch.testing.assert_close(z[r], x, atol=1e-6, rtol=0)
    assert (together[0][0] != together[0][1]).any()


@BOTH
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_returns_that_are_not_finite_lose(planner: Callable[..., Any], settings: dict[str, Any], bad: float) -> None:
    def broken(by: float) -> Callable[..., Tensor]:
        return lambda o, plans, key: torch.where(plans[:, :, 0, 0] > 0.0, by, quadratic(o, plans, key))

    goals = torch.tensor([[-0.4, 0.3], [0.5, -0.2]])  # the second's best plans are the ones that break
    start = first_plan(2, H, -ONES, ONES)
    got = planner(broken(bad), goals, start, -ONES, ONES, KEY, **settings)
    worst = planner(broken(-1e9), goals, start, -ONES, ONES, KEY, **settings)
    assert all(torch.isfinite(x).all() and torch.equal(x, y) for x, y in zip(got, worst, strict=True))
    assert abs(got[0][0, 0].item() + 0.4) < 0.15 and got[0][1, 0] <= 0.0


@BOTH
def test_only_finite_elites_count(planner: Callable[..., Any], settings: dict[str, Any]) -> None:
    """Three of the plans are finite, and there are places for five elites; of the second state's plans none is."""
    seen: list[Tensor] = []

    def returns(o: Tensor, plans: Tensor, key: Tensor) -> Tensor:
        seen.append(plans)
        value = torch.full(plans.shape[:2], float("nan"))
        value[0, [3, 8, 11]] = 1.0
        return value

    more = {"pick": "mean"} if planner is mppi else {"alpha": 0.0}
    action, following = planner(
        returns, GOALS, MEAN, LOW, HIGH, KEY, **{**settings, "population": P, "elites": 5, "iterations": 1, **more}
    )
    torch.testing.assert_close(action[0], seen[0][0, [3, 8, 11]].mean(0)[0])
    assert torch.equal(action[1], MEAN[1, 0]) and torch.equal(following[1], shifted(MEAN, LOW, HIGH)[1])
    if planner is mppi:  # an elite: one of the three, or the plan that there was
        action, _ = planner(
            returns, GOALS, MEAN, LOW, HIGH, KEY, **{**settings, "population": P, "elites": 5, "iterations": 1}
        )
        assert any(torch.equal(action[0], seen[0][0, i, 0]) for i in (3, 8, 11)) and torch.equal(action[1], MEAN[1, 0])


def test_a_colder_mppi_acts_as_the_best_plan_and_a_hot_one_as_their_mean() -> None:
    few = {**MPPI, "iterations": 1, "pick": "mean"}
    seen: list[Tensor] = []

    def keep(o: Tensor, plans: Tensor, key: Tensor) -> Tensor:
        seen.append(plans)
        return quadratic(o, plans, key)

    best = mppi(keep, GOALS, MEAN, LOW, HIGH, KEY, **{**few, "temperature": 1e9})[0]
    order = quadratic(GOALS, seen[0], KEY).argsort(1, descending=True)
    torch.testing.assert_close(best, torch.stack([seen[0][b, order[b, 0], 0] for b in range(B)]))
    even = mppi(quadratic, GOALS, MEAN, LOW, HIGH, KEY, **{**few, "temperature": 0.0})[0]
    torch.testing.assert_close(even, torch.stack([seen[0][b, order[b, :20], 0].mean(0) for b in range(B)]))
    # returns as far apart as numbers go are still weights
    apart = lambda o, plans, key: torch.where(plans[:, :, 0, 0] > 0.0, 3e38, -3e38)  # noqa: E731
    for temperature in (0.0, 2.0):
        assert torch.isfinite(
            mppi(apart, GOALS, MEAN, LOW, HIGH, KEY, **{**few, "elites": 200, "temperature": temperature})[0]
        ).all()


def test_an_update_of_mppi_with_three_plans() -> None:
    """Plans of returns 1, 2, 3, one more of NaN, and first actions 0, 0.5, 1; proposals are the whole population."""
    plans = torch.tensor([0.0, 0.5, 1.0, -1.0]).view(1, 4, 1, 1)
    value = torch.tensor([[1.0, 2.0, 3.0, float("nan")]])
    settings = {"iterations": 1, "temperature": 0.5, "std_min": 0.05, "std_max": 2.0, "pick": "mean"}
    problem = torch.zeros(1, 1), torch.zeros(1, 1, 1), -ONES[:1], ONES[:1], KEY

    def update(elites: int, explore: bool = False) -> float:
        size = 3 if elites < 3 else 4  # without the NaN, whose weight is 0 where it is an elite
        returns = lambda o, p, key: value[:, :size]  # noqa: E731
        few = {"population": size, "elites": min(elites, size), "explore": explore, "proposals": plans[:, :size]}
        return float(mppi(returns, *problem, **settings, **few)[0])

    assert update(4) == pytest.approx(0.660078, rel=1e-6)  # weights 0.186324, 0.307196, 0.506480
    noise = float(rng.normal(rng.split(rng.fold_in(KEY, 1))[1], (1, 1)))
    assert abs(noise) < 0.8  # inside the bounds
    assert (update(4, explore=True) - 0.660078) / noise == pytest.approx(0.384156, rel=1e-4)
    assert update(2) == pytest.approx(0.811230, rel=1e-6)  # weights 0.377541, 0.622459
    assert update(1) == 1.0


def test_plans_that_are_proposed_are_tried_in_every_iteration() -> None:
    tried: list[Tensor] = []

    def keep(o: Tensor, plans: Tensor, key: Tensor) -> Tensor:
        tried.append(plans)
        return quadratic(o, plans, key)

    mine = torch.rand(B, 3, H, A) * (HIGH - LOW) + LOW
    mppi(keep, GOALS, MEAN, LOW, HIGH, KEY, **{**MPPI, "iterations": 2, "population": P, "elites": 5}, proposals=mine)
    assert all(torch.equal(plans[:, :3], mine) and plans.shape[1] == P for plans in tried) and len(tried) == 2


def test_plan_is_the_planner_of_the_settings() -> None:
    s = PlanSettings()
    assert (s.planner, s.plan_horizon, s.plan_population, s.plan_elites, s.plan_iterations) == ("cem", 30, 500, 50, 5)
    assert (s.plan_alpha, s.plan_particles) == (0.1, 20)
    check(s)
    check_plan(s)
    shared = {"population": 500, "elites": 50, "iterations": 5}
    x, y = plan(s, noisy, GOALS, MEAN, LOW, HIGH, KEY), cem(noisy, GOALS, MEAN, LOW, HIGH, KEY, alpha=0.1, **shared)
    assert torch.equal(x[0], y[0]) and torch.equal(x[1], y[1])
    x = plan(PlanSettings(planner="mppi"), noisy, GOALS, MEAN, LOW, HIGH, KEY, explore=True)
    y = mppi(
        noisy,
        GOALS,
        MEAN,
        LOW,
        HIGH,
        KEY,
        temperature=0.5,
        std_min=0.05,
        std_max=0.3,
        explore=True,
        **shared,
    )
    assert torch.equal(x[0], y[0]) and torch.equal(x[1], y[1])


def test_memory_of_plans_has_an_end() -> None:
    """Beyond what is published: TD-MPC2's 317 million parameters, and PETS, with as many actions as any robot."""
    check_plan_memory(TDMPC2Config(plan_population=512, hidden=[4096, 4096], latent=1376), action_dim=61, width=4096)
    check_plan_memory(PlanSettings(), action_dim=61)
    with pytest.raises(UserError, match=r"=100000, algo.plan_horizon=3: each action would take 6.17 GB .* 250 MB"):
        check_plan_memory(PlanSettings(plan_population=100_000, plan_horizon=3), action_dim=514)


def test_contradictions_are_refused() -> None:
    with pytest.raises(UserError, match=r"algo.plan_elites=50 is more than algo.plan_population=40"):
        check_plan(PlanSettings(plan_population=40))
    with pytest.raises(UserError, match=r"algo.plan_std_min=0.5 is above algo.plan_std_max=0.3"):
        check_plan(PlanSettings(planner="mppi", plan_std_min=0.5))
    with pytest.raises(UserError, match="planner=shooting is not allowed"):
        check(PlanSettings(planner="shooting"))
    with pytest.raises(ValueError, match="returns of shape"):
        cem(lambda o, plans, key: plans.sum((-1, -2))[0], GOALS, MEAN, LOW, HIGH, KEY, **CEM)
    with pytest.raises(ValueError, match="3 elites"):
        cem(
            noisy,
            GOALS,
            MEAN,
            LOW,
            HIGH,
            KEY,
            population=2,
            elites=3,
            iterations=1,
            alpha=0.1,
        )
