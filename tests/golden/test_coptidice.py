"""COptiDICE: each loss by hand on two rows with linear networks, and the optimum of a linear program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.algorithm import TrainState, select, stack
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset, DataSpec
from offrl.training.step import Step
from tests.support.golden import KEY, single

DISCOUNT, ALPHA = 0.5, 0.5
BATCH = single(
    {
        "observations": [[1.0], [2.0]],
        "actions": [[0.5], [-0.25]],
        "next_observations": [[2.0], [0.0]],
        "first_observations": [[1.0], [1.0]],
        "first_weights": [1.5, 0.5],
        "rewards": [1.0, 0.0],
        "costs": [0.0, 2.0],
        "masks": [1.0, 0.0],
    }
)
LAMBDA = np.log1p(np.e)  # and tau: the softplus of 1
# nu = min(s, 3 - s): 1 at 1 and 2, 0 at 0, so that e = r - lambda c + nu(s') / 2 - nu(s) is
E = np.array([1 + 0.5 - 1, -2 * LAMBDA - 1])
W = np.array([1 + E[0] / ALPHA, np.exp(E[1] / ALPHA)])


def make(**settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "coptidice")
    defaults = {"hidden": [], "discount": DISCOUNT, "divergence_weight": ALPHA, "cost_limit": 4.0, "cost_horizon": 2}
    spec = DataSpec((1,), 1, action_low=(-1.0,), action_high=(1.0,))
    algorithm = kind(kind.Config(**{**defaults, **settings}), spec)
    state = algorithm.init(0)
    lines = {"nu": ([1.0, -1.0], [0.0, 3.0]), "chi": ([2.0, 1.0], [0.0, 1.0])}
    for name, (slopes, offsets) in lines.items():
        state.params[name]["head.weight"] = torch.tensor(slopes).view(2, 1, 1)
        state.params[name]["head.bias"] = torch.tensor(offsets).view(2, 1, 1)
    return algorithm, state


def test_nu_loss() -> None:
    """(1 - g) nu(s_0) + w e - alpha f(w), f the soft chi-square, whose gradient goes through w as well."""
    algorithm, state = make()
    np.testing.assert_allclose(algorithm.weights(state, BATCH).numpy(), W, rtol=1e-5)
    f = np.array([0.5 * (W[0] - 1) ** 2, W[1] * (np.log(W[1]) - 1) + 1])
    expected = (0.5 * np.array([1.5, 0.5]) * 1 + W * E - ALPHA * f).mean()
    assert float(algorithm.nu_loss(state.params["nu"], state, BATCH)[0]) == pytest.approx(expected, rel=1e-5)


def test_chi_loss_and_the_bound_of_the_cost() -> None:
    """chi = min(2 s, s + 1): 2, 3 and 0 at 1, 2 and 0."""
    algorithm, state = make()
    weights = np.array([2.0, 0.5])
    bound = 0.5 * np.array([1.5, 0.5]) * 2 + weights * (np.array([0.0, 2.0]) + np.array([1.5 - 2, -3.0]))
    u = 2 * np.exp(bound / LAMBDA) / np.exp(bound / LAMBDA).sum()
    loss, metrics = algorithm.chi_loss(state.params["chi"], state, BATCH, torch.tensor(weights, dtype=torch.float32))
    assert float(loss) == pytest.approx((u * bound).mean(), rel=1e-5)
    assert float(metrics["cost/mean"]) == pytest.approx(u[1] * 0.5 * 2 / 2, rel=1e-5)
    assert float(metrics["cost/divergence"]) == pytest.approx((u * np.log(u) - u + 1).mean(), rel=1e-4)


@pytest.mark.parametrize(("scale", "threshold"), [("mean", 1.5), ("sum", 3.0)])
def test_scalars(scale: str, threshold: float) -> None:
    algorithm, state = make(cost_scale=scale)
    loss, _ = algorithm.multiplier_loss(state.params["multiplier"], state, torch.tensor(1.0))
    assert float(loss) == pytest.approx(LAMBDA * (threshold - 1), rel=1e-6)
    loss, _ = algorithm.temperature_loss(state.params["temperature"], state, torch.tensor(0.21))
    assert float(loss) == pytest.approx(LAMBDA * (0.01 - 0.21), rel=1e-6)


def test_actor_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The likelihood of actions 0.1 standard deviations (0.375) away at observations 0.1 standard deviations (0.5)
    away.
    """
    monkeypatch.setattr(rng, "normal", lambda key, shape: torch.ones(shape))
    algorithm, state = make()
    state.params["actor"]["net.head.weight"] = torch.tensor([[0.3], [0.0]])
    state.params["actor"]["net.head.bias"] = torch.tensor([0.0, -0.5])
    x, a = np.array([1.0, 2.0]) + 0.05, np.array([0.5, -0.25]) + 0.0375
    z = (np.arctanh(a) - 0.3 * x) / np.exp(-0.5)
    log_p = -0.5 * z**2 + 0.5 - 0.5 * np.log(2 * np.pi) - np.log(1 - a**2)
    loss, _ = algorithm.actor_loss(state.params["actor"], state, BATCH, KEY)
    assert float(loss) == pytest.approx(-(W * log_p).mean(), rel=1e-4)


# five states, two actions: successors, rewards and costs; episodes begin in the first
NEXT = np.array([[1, 2], [3, 0], [4, 1], [0, 2], [1, 3]])
REWARDS = np.array([[0.0, 1.0], [0.2, 0.0], [2.0, 0.3], [0.1, 0.5], [1.0, 0.0]])
COSTS = np.array([[0.0, 0.5], [0.0, 0.0], [1.0, 0.2], [0.0, 0.1], [1.0, 0.0]])
G, MEAN_COST, LENGTH = 0.9, 0.2, 40


def best_reward() -> float:
    """Of the visits d >= 0 with sum_a d(s, a) = (1 - g) p_0(s) + g sum d(s', a') P(s | s', a') and E c <= 0.2."""
    from scipy.optimize import linprog

    flow = np.zeros((5, 10))
    for s, a in np.ndindex(5, 2):
        flow[s, 2 * s + a] += 1.0
        flow[NEXT[s, a], 2 * s + a] -= G
    start = np.array([1 - G, 0, 0, 0, 0])
    program = linprog(-REWARDS.ravel(), A_ub=[COSTS.ravel()], b_ub=[MEAN_COST], A_eq=flow, b_eq=start)
    return float(-program.fun)


def uniform_data() -> Dataset:
    g, rows = np.random.default_rng(0), []
    for _ in range(100):
        state = 0
        for action in g.integers(0, 2, LENGTH):
            rows.append((state, action))
            state = NEXT[state, action]
    s, a = np.array(rows).T
    eye, ends = np.eye(5, dtype=np.float32), np.arange(len(s)) % LENGTH == LENGTH - 1
    return from_arrays(eye[s], a, REWARDS[s, a], None, ends, eye[NEXT[s, a]], num_actions=2, costs=COSTS[s, a])


@pytest.mark.nightly
def test_the_optimum_of_the_linear_program() -> None:
    """Within 5% of its reward and of the limit; without a limit the reward is twice as large."""
    pytest.importorskip("scipy")
    data, kind = uniform_data(), registry.get("algo", "coptidice")
    limit = MEAN_COST * LENGTH / (1 - G**LENGTH)
    settings = {"cost_limit": limit, "cost_horizon": LENGTH, "discount": G, "hidden": [], "data_noise": 0.0}
    settings |= {"learning_rate": 0.01, "divergence_weight": 0.003, "cost_radius": 0.0}
    algorithm = kind(kind.Config(**settings), data.spec)
    step = Step(algorithm, algorithm.sampler().prepare(data), batch_size=2048, replicas=1)
    state, _ = step.run(stack([algorithm.init(0)]), {}, 0, 3000)
    policy = algorithm.apply("actor", select(state, 0).params["actor"], torch.eye(5))[0].exp().numpy()
    transitions = np.zeros((5, 5))
    for s, a in np.ndindex(5, 2):
        transitions[s, NEXT[s, a]] += policy[s, a]
    visits = np.linalg.solve((np.eye(5) - G * transitions).T, [1 - G, 0, 0, 0, 0])[:, None] * policy
    assert float((visits * REWARDS).sum()) == pytest.approx(best_reward(), rel=0.05)
    assert float((visits * COSTS).sum()) == pytest.approx(MEAN_COST, rel=0.05)
