"""Off-policy evaluation: against linear algebra on a small MDP, against loops and numbers worked by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from offrl import ope
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.ope import importance
from offrl.ope.config import OPEConfig
from offrl.ope.fqe import FQE, Scale, combine, fit, summarise
from offrl.ope.importance import behavior_log_prob, doubly_robust, target_log_prob, weighted_sums, wis
from offrl.ope.problem import behavior_value, candidate_actions, make_problem
from offrl.ope.selection import evaluate_policies

STATES, DISCOUNT = 4, 0.8
SMALL: dict[str, Any] = {
    "discount": DISCOUNT,
    "hidden": [32],
    "learning_rate": 3e-3,
    "polyak": 0.1,
    "compile": "eager",
    "batch_size": 128,
}


class Table:
    """A policy on one-hot observations: probabilities [S, K]."""

    def __init__(self, probabilities: Any) -> None:
        self.p = np.asarray(probabilities, float)

    def start(self, episodes: int) -> np.random.Generator:
        return np.random.default_rng(0)

    def step(self, carry: Any, observations: np.ndarray, t: int, explore: bool = False) -> tuple[np.ndarray, Any]:
        p = self.p[observations.argmax(1)]
        if explore:
            return (carry.random(len(p))[:, None] > p.cumsum(1)).sum(1), carry
        return p.argmax(1), carry

    def log_prob(self, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        return np.log(self.p[observations.argmax(1), actions])


def greedy(*actions: int) -> Table:
    return Table(np.eye(2)[list(actions)])


# from each state and action: probabilities of the next state, the last one being the end; and a reward that the action
# decides
NEXT = np.array(
    [
        [[0.7, 0.3, 0.0, 0.0, 0.0], [0.0, 0.2, 0.6, 0.0, 0.2]],
        [[0.5, 0.0, 0.0, 0.5, 0.0], [0.0, 0.0, 0.3, 0.4, 0.3]],
        [[0.0, 0.5, 0.5, 0.0, 0.0], [0.1, 0.0, 0.0, 0.8, 0.1]],
        [[0.0, 0.0, 0.3, 0.3, 0.4], [0.6, 0.0, 0.0, 0.0, 0.4]],
    ]
)
REWARD = np.array([[0.0, 1.0], [2.0, -1.0], [0.5, 0.0], [3.0, 1.0]])
BEHAVIOR = np.array([[0.6, 0.4], [0.5, 0.5], [0.3, 0.7], [0.5, 0.5]])
CANDIDATES = {"a": greedy(0, 0, 0, 0), "b": greedy(1, 1, 1, 1), "c": greedy(1, 0, 0, 0), "d": greedy(0, 1, 0, 1)}


def true_value(policy: Table) -> float:
    """V of state 0 by linear algebra."""
    p = np.einsum("sa,san->sn", policy.p, NEXT)[:, :STATES]
    return float(np.linalg.solve(np.eye(STATES) - DISCOUNT * p, (policy.p * REWARD).sum(1))[0])


def roll(episodes: int, limit: int = 12, seed: int = 0) -> Dataset:
    """Episodes of the behaviour policy from state 0; cut by a time-out after `limit` steps."""
    rng = np.random.default_rng(seed)
    columns: dict[str, list[Any]] = {
        k: [] for k in ("observations", "actions", "rewards", "terminations", "truncations", "next_observations")
    }
    for _ in range(episodes):
        s = 0
        for t in range(limit):
            a = int(rng.random() > BEHAVIOR[s, 0])
            n = int(rng.choice(STATES + 1, p=NEXT[s, a]))
            over, cut = n == STATES, t + 1 == limit and n != STATES
            row = (np.eye(STATES)[s], a, REWARD[s, a], over, cut, np.eye(STATES)[n % STATES])
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
            s = n
            if over:
                break
    arrays = {k: np.array(v) for k, v in columns.items()}
    floats = {k: arrays[k].astype(np.float32) for k in ("observations", "next_observations", "rewards")}
    if arrays["terminations"].sum() == episodes:
        del floats["next_observations"], arrays["next_observations"]
    return from_arrays(**{**arrays, **floats}, num_actions=2)


@pytest.fixture(scope="module")
def data() -> Dataset:
    return roll(4_000)


def exact_behavior(data: Dataset) -> torch.Tensor:
    return torch.from_numpy(
        Table(BEHAVIOR).log_prob(data.columns["observations"].numpy(), data.columns["actions"].numpy())
    )


@pytest.mark.parametrize("networks", ["shared", "separate"])
def test_fqe_finds_the_values_of_a_small_mdp(data: Dataset, networks: str) -> None:
    settings = OPEConfig(**SMALL, networks=networks, pairs=2, updates=400, seeds=1)
    estimates = summarise(fit(make_problem(data, CANDIDATES), settings))
    truth = [true_value(p) for p in CANDIDATES.values()]
    assert max(truth) - min(truth) > 4.0
    np.testing.assert_allclose(estimates.value, truth, atol=0.4)  # errs by 0.12 +- 0.06 over seeds
    assert [estimates.names[k] for k in estimates.order()] == [
        n for _, n in sorted(zip(truth, CANDIDATES, strict=True), reverse=True)
    ]


def test_fqe_of_stochastic_candidates(data: Dataset) -> None:
    policy = Table([[0.5, 0.5], [0.9, 0.1], [0.4, 0.6], [0.2, 0.8]])
    settings = OPEConfig(**SMALL, updates=400, seeds=1, explore=True)
    found = ope.estimate(data, {"x": policy, "behavior": Table(BEHAVIOR)}, settings)
    np.testing.assert_allclose(found.value, [true_value(policy), true_value(Table(BEHAVIOR))], atol=0.35)


def soft(share: float) -> dict[str, Table]:
    """The candidates mixed with the behaviour policy, so that importance weights stay moderate; and that policy
    itself.
    """
    return {
        **{n: Table(share * c.p + (1 - share) * BEHAVIOR) for n, c in CANDIDATES.items()},
        "behavior": Table(BEHAVIOR),
    }


def test_wis_converges(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance, "CLIP", (-50.0, 50.0))
    settings = OPEConfig(discount=DISCOUNT)
    candidates = soft(0.5)
    own = wis(make_problem(data, candidates, explore=True), exact_behavior(data), settings)
    truth = np.array([true_value(p) for p in candidates.values()])
    assert truth.max() - truth.min() > 1.0
    np.testing.assert_allclose(own.value, truth, atol=0.15)
    assert ((own.low - 0.05 < truth) & (truth < own.high + 0.05)).all()
    # all of the behaviour policy's weights are one; only what a time-out hides is missing
    assert own.value[-1] == pytest.approx(behavior_value(data, DISCOUNT)[0], abs=0.02)
    assert 3_900 < own.details["effective_episodes"][-1] <= 4_000
    greedy_ = wis(make_problem(data, {"b": CANDIDATES["b"]}), exact_behavior(data), settings)
    assert greedy_.value[0] == pytest.approx(true_value(CANDIDATES["b"]), abs=0.3)
    assert greedy_.details["effective_episodes"][0] < 1_000


def test_dr_corrects_a_poor_q(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance, "CLIP", (-50.0, 50.0))
    settings = OPEConfig(**SMALL, updates=30, seeds=1, explore=True)
    candidates = soft(0.5)
    problem = make_problem(data, candidates, explore=True)
    fitted = fit(problem, settings)
    truth = np.array([true_value(p) for p in candidates.values()])
    assert np.abs(summarise(fitted).value - truth).max() > 1.0
    np.testing.assert_allclose(doubly_robust(fitted, exact_behavior(data), settings).value, truth, atol=0.15)


def test_behavior_model_finds_the_probabilities(data: Dataset) -> None:
    # batches of 128 leave an error of up to 0.06
    settings = OPEConfig(**{**SMALL, "batch_size": 1024}, behavior_updates=300)
    found = behavior_log_prob(make_problem(data, {"a": CANDIDATES["a"]}), settings)
    np.testing.assert_allclose(found.exp(), exact_behavior(data).exp(), atol=0.08)


def test_behavior_model_of_continuous_actions() -> None:
    rng = np.random.default_rng(0)
    observations = rng.normal(size=(2_000, 1)).astype(np.float32)
    pre = 0.5 * observations + 0.3 * rng.normal(size=(2_000, 1))
    flags = np.arange(2_000) % 20 == 19
    data = from_arrays(
        observations, np.tanh(pre).astype(np.float32), np.ones(2_000), truncations=flags, action_low=-1, action_high=1
    )
    found = behavior_log_prob(
        make_problem(data, {"zero": Constant(1)}), OPEConfig(**SMALL, behavior_updates=400)
    ).numpy()
    z = (pre - 0.5 * observations) / 0.3
    exact = (-0.5 * z**2 - math.log(0.3) - 0.5 * math.log(2 * math.pi) - np.log(1 - np.tanh(pre) ** 2)).sum(1)
    assert abs((found - exact).mean()) < 0.1 and np.corrcoef(found, exact)[0, 1] > 0.95


class Constant:
    def __init__(self, size: int, value: float = 0.0) -> None:
        self.size, self.value = size, value

    def start(self, episodes: int) -> None:
        return None

    def step(self, carry: Any, observations: np.ndarray, t: int) -> tuple[np.ndarray, Any]:
        return np.full((len(observations), self.size), self.value, np.float32), carry


def two_episodes(ended: bool) -> Dataset:
    """A: two steps with rewards 1 and 2, then the end. B: one step with reward 3, then the end or a time-out."""
    return from_arrays(
        np.arange(3, dtype=np.float32)[:, None],
        np.zeros((3, 1), np.float32),
        np.array([1.0, 2.0, 3.0]),
        terminations=np.array([False, True, ended]),
        truncations=np.array([False, False, not ended]),
        action_low=-1.0,
        action_high=1.0,
    )


@pytest.mark.parametrize(("ended", "value"), [(True, 5 / 3 + 0.5), (False, 5 / 3 + 1.0)])
def test_weighted_sums_by_hand(ended: bool, value: float) -> None:
    # step 0: weights 2 and 1, so (2 * 1 + 1 * 3) / 3. Step 1: A's weight is 2 * 0.5 = 1; B, when it ended, keeps its 1
    # and gains nothing
    ratios = torch.tensor([[2.0], [0.5], [1.0]], dtype=torch.float64).log()
    data = two_episodes(ended)
    gains = data.columns["rewards"].double().unsqueeze(1)
    sums, effective = weighted_sums(ratios, gains, data, 0.5, torch.tensor([[2, 0], [0, 2]]))
    assert sums[0].item() == pytest.approx(value)
    assert sums[1].item() == pytest.approx(1.0 + 0.5 * 2.0)  # A alone
    assert sums[2].item() == pytest.approx(3.0)  # B alone
    late = 2.0 if ended else 1.0
    assert effective.item() == pytest.approx((9 / 5 + 0.5 * late) / 1.5)
    shifted, _ = weighted_sums(ratios + 500.0, gains, data, 0.5)  # as weights they would overflow
    assert math.isfinite(shifted.item())


def test_where_no_episode_goes_on_nothing_is_known() -> None:
    data = two_episodes(False)
    ratios, gains = torch.zeros(3, 1, dtype=torch.float64), data.columns["rewards"].double().unsqueeze(1)
    sums, effective = weighted_sums(ratios, gains, data, 0.5, usable=torch.tensor([True, False, True]))
    # step 0 alone: (1 + 3) / 2 of two episodes
    assert sums.item() == pytest.approx(2.0) and effective.item() == pytest.approx(2.0)


def test_target_densities_by_hand() -> None:
    data = two_episodes(True)
    problem = make_problem(data, {"zero": Constant(1), "half": Constant(1, 0.05)})
    found = target_log_prob(problem, 0.1)
    top = -math.log(0.1) - 0.5 * math.log(2 * math.pi)
    np.testing.assert_allclose(found[0], [top, top - 0.125], atol=1e-6)
    clipped = (found - torch.tensor([0.0, 50.0, -50.0]).unsqueeze(1)).clamp(-6.0, 2.0)
    np.testing.assert_allclose(clipped[:, 0], [top, -6.0, 2.0], atol=1e-6)


def test_dr_is_the_textbook_sum() -> None:
    """Against loops over episodes and steps: sum_t discount**t [w_t (r_t - Q_t) + w_{t-1} V_t], each w normalised over
    episodes.
    """
    data = roll(12, limit=1_000, seed=3)
    assert data.columns["terminations"][data.episode_end - 1].all()
    problem = make_problem(data, CANDIDATES)
    settings = OPEConfig(**SMALL, updates=40, seeds=1)
    fitted = fit(problem, settings)
    rows = torch.arange(len(data))
    v, q = fitted.values(rows, problem.current)[0].numpy(), fitted.data_values(rows)[0].numpy()
    behavior = exact_behavior(data)
    ratios = (target_log_prob(problem, 0.1) - behavior.unsqueeze(1)).clamp(-6.0, 2.0).numpy()
    episodes = list(zip(data.episode_start.tolist(), data.episode_end.tolist(), strict=True))
    expected = []
    for k in range(len(CANDIDATES)):

        def weights(t: int, k: int = k) -> np.ndarray:
            w = np.array([math.exp(ratios[s : min(s + t + 1, e), k].sum()) for s, e in episodes])
            return w / w.sum()

        total = 0.0
        for t in range(max(e - s for s, e in episodes)):
            now, before = weights(t), weights(t - 1) if t else np.full(len(episodes), 1 / len(episodes))
            for i, (s, e) in enumerate(episodes):
                if s + t < e:
                    reward = float(data.columns["rewards"][s + t])
                    total += DISCOUNT**t * (now[i] * (reward - q[s + t, k]) + before[i] * v[s + t, k])
        expected.append(total)
    np.testing.assert_allclose(doubly_robust(fitted, behavior, settings).value, expected, rtol=1e-6)


def test_weights_shrink_by_the_same_share_at_any_learning_rate(data: Dataset) -> None:
    for rate in (1e-4, 1e-2):
        adam = FQE(OPEConfig(learning_rate=rate, weight_decay=1e-3), data, Scale.of(data, 0.9), 2).optimizer("critic")
        params = {"w": torch.full((3,), 2.0)}
        after, _ = adam.update(params, {"w": torch.zeros(3)}, adam.init(params))
        np.testing.assert_allclose(after["w"], 2.0 * (1 - 1e-3), rtol=1e-6)


def test_pairs_are_drawn_equally_often(data: Dataset) -> None:
    settings = OPEConfig(pairs=4)
    algorithm = FQE(settings, data, Scale.of(data, 0.9), 7)
    chosen = algorithm.choose(torch.tensor(5), 7_000)
    assert chosen is not None and chosen.shape == (7_000, 4)
    np.testing.assert_allclose(np.bincount(chosen.flatten(), minlength=7), 4_000, rtol=0.05)
    assert FQE(settings, data, Scale.of(data, 0.9), 4).choose(torch.tensor(5), 10) is None


def test_target_bounds_hold_where_episodes_end() -> None:
    data = two_episodes(True)
    scale = Scale.of(data, 0.5)
    assert scale.reward_mean == 0.0  # a constant added to each reward would favour long episodes
    low, high = (scale.returns(torch.tensor(x), 0.5).item() for x in (scale.low, scale.high))
    assert (low, high) == pytest.approx((1.0, 6.0))  # one step of the smallest reward; the largest for ever
    cut = Scale.of(from_arrays(np.zeros((3, 1), np.float32), np.zeros((3, 1), np.float32), [1.0, 2.0, 3.0]), 0.5)
    assert cut.returns(torch.tensor(cut.low), 0.5).item() == pytest.approx(2.0)


def test_combined_interval_by_hand() -> None:
    # two seeds, two initial states: means 2 and 4; states 1.5 and 4.5
    values = np.array([[[1.0], [3.0]], [[2.0], [6.0]]])
    value, low, high = combine(values)
    states, seeds = 4.5 / 2, 2.0  # variances: of the mean over states, between seeds; one degree of freedom each
    freedom = int((states + seeds) ** 2 / (states**2 + seeds**2))
    assert freedom == 1
    assert value[0] == 3.0 and high[0] - 3.0 == pytest.approx(12.7062 * math.sqrt(states + seeds), rel=1e-4)
    assert low[0] == pytest.approx(6.0 - high[0])
    assert np.isnan(combine(values[:1, :1])[1]).all()


def test_same_call_same_numbers_and_no_global_state(data: Dataset) -> None:
    settings = OPEConfig(**SMALL, updates=20, seeds=2)
    before = torch.random.get_rng_state().clone()
    one, two = (ope.estimate(data, CANDIDATES, settings) for _ in range(2))
    assert np.array_equal(one.value, two.value) and np.array_equal(one.low, two.low)
    assert torch.equal(before, torch.random.get_rng_state())
    assert not np.array_equal(
        one.value, ope.estimate(data, CANDIDATES, OPEConfig(**SMALL, updates=20, seeds=2, seed=1)).value
    )


# ----------------------------------------------------------------------------------------------------------------
# actions


class Counter:
    """A policy with a memory: its action is how many observations it saw, plus the last one's first number."""

    def start(self, episodes: int) -> np.ndarray:
        return np.zeros(episodes)

    def step(self, carry: np.ndarray, observations: np.ndarray, t: int) -> tuple[np.ndarray, Any]:
        carry = carry + 1
        return (carry + observations[:, 0] / 1_000)[:, None], carry


def test_actions_of_a_policy_with_a_memory() -> None:
    observations = np.array([[1.0], [2.0], [3.0], [11.0], [12.0]], np.float32)
    following = np.array([[2.0], [3.0], [4.0], [12.0], [13.0]], np.float32)
    flags = np.array([False, False, True, False, True])
    arrays = {
        "observations": observations,
        "actions": np.zeros((5, 1), np.float32),
        "rewards": np.zeros(5),
        "next_observations": following,
    }
    data = from_arrays(**arrays, truncations=flags, action_low=-100.0, action_high=100.0)
    found = candidate_actions("counter", Counter(), data, explore=False)
    np.testing.assert_allclose(found.current[:, 0] * 100, [1.001, 2.002, 3.003, 1.011, 2.012], rtol=1e-5)
    np.testing.assert_allclose(found.after[:, 0] * 100, [2.002, 3.003, 4.004, 2.012, 3.013], rtol=1e-5)
    arrays["next_observations"] = following + 0.5
    broken = from_arrays(**arrays, truncations=flags, action_low=-100.0, action_high=100.0, check=False)
    with pytest.raises(UserError, match="row 0 leads to another observation"):
        candidate_actions("counter", Counter(), broken, explore=False)


def test_actions_at_next_observations_that_no_row_holds() -> None:
    class Echo(Constant):
        def step(self, carry: Any, observations: np.ndarray, t: int) -> tuple[np.ndarray, Any]:
            return observations, carry

    observations = np.array([[0.1], [0.2], [0.3]], np.float32)
    following = np.array([[0.2], [0.25], [0.4]], np.float32)
    data = from_arrays(
        observations,
        np.zeros((3, 1), np.float32),
        np.zeros(3),
        next_observations=following,
        action_low=-1.0,
        action_high=1.0,
    )
    found = candidate_actions("echo", Echo(1), data, explore=False)
    np.testing.assert_allclose(found.current, observations, rtol=1e-6)
    np.testing.assert_allclose(found.after, following, rtol=1e-6)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Constant(3), r"actions of shape \(3, 3\) for 3 observations"),
        (Constant(1, math.nan), "NaN or infinite"),
    ],
)
def test_candidates_that_do_not_fit(policy: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_problem(two_episodes(True), {"x": policy})


def test_settings_out_of_range() -> None:
    with pytest.raises(UserError, match="discount"):
        ope.evaluate_policies(two_episodes(True), {"x": Constant(1)}, settings=OPEConfig(discount=1.0))
    with pytest.raises(UserError, match=r"unknown method 'fqq'\. Did you mean 'fqe'"):
        ope.evaluate_policies(two_episodes(True), {"x": Constant(1)}, "fqq")
    with pytest.raises(UserError, match="candidate x is a int"):
        ope.evaluate_policies(two_episodes(True), {"x": 3})
    with pytest.raises(UserError, match="candidate x cannot explore"):
        ope.evaluate_policies(two_episodes(True), {"x": Constant(1)}, settings=OPEConfig(explore=True))
    with pytest.raises(UserError, match="no candidate"):
        ope.evaluate_policies(two_episodes(True), {})
    with pytest.raises(UserError, match="candidate x says no density"):
        explore = OPEConfig(**{**SMALL, "behavior_updates": 1}, explore=True)

        class Noisy(Constant):
            def step(
                self, carry: Any, observations: np.ndarray, t: int, explore: bool = False
            ) -> tuple[np.ndarray, Any]:
                return super().step(carry, observations, t)

        ope.evaluate_policies(two_episodes(True), {"x": Noisy(1)}, "wis", explore)


def test_costs_are_those_of_an_episode() -> None:
    """Fitted Q evaluation of the costs, spread evenly over the longest episode, of 5 steps: J 5 (1 - g) / (1 - g^5)."""
    costs, ends = np.arange(20.0) % 3, np.arange(20) % 5 == 4

    def data(rewards: np.ndarray) -> Dataset:
        columns = np.arange(20.0)[:, None], np.zeros((20, 1)), rewards
        return from_arrays(*columns, None, ends, action_low=-1, action_high=1, costs=costs)

    settings = OPEConfig(**SMALL | {"updates": 2, "discount": 0.9})
    policies = {"a": Constant(1), "b": Constant(1, 0.5)}
    found = evaluate_policies(data(-np.arange(20.0)), policies, "fqe", settings, costs=True).costs
    alone = evaluate_policies(data(costs), policies, "fqe", settings).estimates["fqe"]
    assert found is not None
    np.testing.assert_allclose(found.value, alone.value * 5 * 0.1 / (1 - 0.9**5), rtol=1e-6)
    np.testing.assert_allclose(found.details["seeds"], np.array(alone.details["seeds"]) * 0.5 / (1 - 0.9**5), rtol=1e-6)
