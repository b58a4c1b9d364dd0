"""CQL and Cal-QL's bound: each term in float64 NumPy, and whole updates, in which every loss is that of the state
before.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import registry, rng
from offrl.algorithm import TrainState, stack
from offrl.data.arrays import from_arrays
from offrl.errors import UserError
from offrl.families.conservative import SampledActions, sampled_actions
from offrl.training.step import Step
from tests.support.golden import KEY, OBS, A, B, K, critics, double, q_values, redraw, single, spec, transitions
from tests.support.reference import mlp as ref
from tests.support.reference.losses import logsumexp

N = 3
LR, ACTOR_LR, DISCOUNT, POLYAK, WEIGHT = 0.01, 0.003, 0.9, 0.1, 2.0
G = np.random.default_rng(4)
BATCH = transitions(G) | single({"returns_to_go": 2 * G.normal(size=B)})
CHOICES = torch.tensor([0, 3, 1, 1, 2, 0, 3, 2])
X = double(BATCH)


def make(name: str = "cql", discrete: bool = False, **settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", name)
    defaults = {
        "hidden": [6, 5],
        "learning_rate": LR,
        "actor_learning_rate": ACTOR_LR,
        "discount": DISCOUNT,
        "polyak": POLYAK,
    }
    algorithm = kind(
        kind.Config(**{**defaults, "actions": N, "conservative_weight": WEIGHT, **settings}), spec(K if discrete else 0)
    )
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(5)  # larger than initial weights
    for params in (state.params["critic"], state.target["critic"], state.params["actor"]):
        redraw(params, g)
    if not discrete:
        state.params["actor"].update(scale=torch.tensor(0.8), shift=torch.tensor(-0.6))
    state.params["entropy"]["log"] = torch.tensor(-0.4)
    return algorithm, state


class Actor:
    """A tanh-Gaussian policy in float64."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.net, self.scale, self.shift = ref.net(params, "net."), float(params["scale"]), float(params["shift"])

    def sample(self, observations: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean, raw = np.split(ref.forward(self.net, observations)[0], 2, 1)
        log_std = np.clip(self.scale * raw + self.shift, -20, 2)
        u = mean + np.exp(log_std) * noise
        slope = -2 * (np.logaddexp(u, -u) - np.log(2))  # log(1 - tanh(u)**2) = -2 log cosh(u)
        return np.tanh(u), (-0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi) - slope).sum(-1)


def normal(key: Tensor, *shape: int) -> np.ndarray:
    return rng.normal(key, shape).numpy().astype(np.float64)


def tried(actor: Actor, key: Tensor) -> tuple[np.ndarray, np.ndarray]:
    uniform, here, there = rng.split(rng.fold_in(key, 102), 3)
    drawn = rng.uniform(uniform, (N, B, A), -1.0, 1.0).numpy().astype(np.float64)
    now, log_now = actor.sample(X["observations"], normal(here, N, B, A))
    later, log_later = actor.sample(X["next_observations"], normal(there, N, B, A))
    return np.concatenate([drawn, now, later]), np.concatenate([np.full((N, B), A * np.log(0.5)), log_now, log_later])


def sampled(algorithm: Any, state: TrainState, batch: dict[str, Tensor]) -> SampledActions:
    return sampled_actions(partial(algorithm.sample, state.params["actor"]), batch, N, rng.fold_in(KEY, 102))


def test_the_tried_actions_and_their_densities() -> None:
    algorithm, state = make()
    actions, log_p = sampled(algorithm, state, BATCH)
    expected, log_expected = tried(Actor(state.params["actor"]), KEY)
    np.testing.assert_allclose(actions, expected, atol=1e-5)
    np.testing.assert_allclose(log_p, log_expected, rtol=1e-3, atol=1e-3)
    assert actions.shape == (3 * N, B, A) and float(log_p[0, 0]) == pytest.approx(math.log(0.5**A))
    assert not np.allclose(expected[N : 2 * N], expected[2 * N :])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"importance": False},
        {"cql_temperature": 2.0},
        {"min_difference": 1.5, "max_difference": 4.0},
        {"action_gap": 0.7},
        {"penalty_share": 0.5},
        {"penalty_share": 0.375},
    ],
    ids=str,
)
def test_penalty(settings: dict[str, Any]) -> None:
    algorithm, state = make(**settings)
    nets = critics(state.params["critic"])
    actions, log_p = tried(Actor(state.params["actor"]), KEY)
    rows: Any = slice(None)
    if "penalty_share" in settings:  # the noise has the shape of what is asked, so it is taken from the algorithm
        # from the whole batch: online its parts differ
        rows = [0, 2, 4, 6] if settings["penalty_share"] == 0.5 else [0, 2, 5]
        some = {k: v[rows] for k, v in BATCH.items()}
        actions, log_p = (x.numpy().astype(np.float64) for x in sampled(algorithm, state, some))
    q = q_values(nets, X["observations"][rows], actions)  # [2, 3 N, B]
    taken = q_values(nets, X["observations"][rows], X["actions"][rows])
    temperature = settings.get("cql_temperature", 1.0)
    scores = q - log_p if settings.get("importance", True) else np.concatenate([q, taken[:, None]], 1)
    plain = temperature * logsumexp(scores / temperature, 1) - taken
    low, high = settings.get("min_difference", -np.inf), settings.get("max_difference", np.inf)
    if np.isfinite(low):
        assert (plain < low).any() and (plain > high).any() and ((plain > low) & (plain < high)).any()
    each = np.clip(plain, low, high).mean(1)  # of each critic
    expected = WEIGHT * each.sum()
    if "action_gap" in settings:
        expected = math.e * WEIGHT * (each - 0.7).sum()  # the multiplier starts at exp(1)
    loss, metrics = algorithm.penalty(state.params["critic"], state, BATCH, rng.fold_in(KEY, 102))
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    assert float(metrics["cql/difference"]) == pytest.approx(each.mean(), rel=1e-4)
    assert float(metrics["cql/q_policy"]) == pytest.approx(q[:, N : 2 * N].mean(), rel=1e-3)
    whole, _ = algorithm.critic_loss(state.params["critic"], state, BATCH, KEY)
    td, _ = algorithm.critic.loss(
        state.params["critic"], BATCH, algorithm.target(state, state.params["actor"], BATCH, KEY), KEY
    )
    assert float(whole) == pytest.approx(expected + float(td), rel=1e-4)


@pytest.mark.parametrize("importance", [True, False])
def test_cal_ql_bounds_the_policys_values_only_and_before_the_densities(importance: bool) -> None:
    algorithm, state = make("cal_ql", importance=importance)
    nets = critics(state.params["critic"])
    actions, log_p = tried(Actor(state.params["actor"]), KEY)
    q, taken = q_values(nets, X["observations"], actions), q_values(nets, X["observations"], X["actions"])
    floor = X["returns_to_go"]
    below = q[:, N:] < floor
    assert below.any() and (~below).any() and (q[:, :N] < floor).any()
    values = np.concatenate([q[:, :N], np.maximum(q[:, N:], floor)], 1)
    scores = values - log_p if importance else np.concatenate([values, taken[:, None]], 1)
    difference = logsumexp(scores, 1) - taken
    loss, metrics = algorithm.penalty(state.params["critic"], state, BATCH, rng.fold_in(KEY, 102))
    assert float(loss) == pytest.approx(WEIGHT * difference.mean(1).sum(), rel=1e-4)
    assert float(metrics["cal_ql/bounded"]) == pytest.approx(below.mean(), rel=1e-4)
    plain, _ = make("cql", importance=importance)
    assert float(plain.penalty(state.params["critic"], state, BATCH, rng.fold_in(KEY, 102))[0]) < float(loss)


def test_cal_ql_pushes_no_value_at_its_bound_down() -> None:
    """With returns above all values the penalty's gradient is that of the uniform actions and the data's alone."""
    algorithm, _ = make("cal_ql")
    values = torch.zeros(2, 3 * N, B, requires_grad=True)
    bounded = algorithm.calibrated(values, torch.full((B,), 100.0))
    bounded.sum().backward()
    assert values.grad is not None and bool((values.grad[:, :N] == 1).all()) and not values.grad[:, N:].any()


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("best", [False, True])
def test_targets(best: bool, entropy: bool) -> None:
    algorithm, state = make(max_target_actions=N if best else 1, entropy_in_target=entropy)
    actor, targets = Actor(state.params["actor"]), critics(state.target["critic"])
    action, log_p = actor.sample(X["next_observations"], normal(KEY, N, B, A) if best else normal(KEY, B, A)[None])
    q = q_values(targets, X["next_observations"], action).min(0)  # [M, B]
    chosen, columns = q.argmax(0), np.arange(B)
    assert not best or len(set(chosen.tolist())) > 1
    value = q[chosen, columns] - entropy * math.exp(-0.4) * log_p[chosen, columns]
    y = algorithm.target(state, state.params["actor"], BATCH, KEY)
    np.testing.assert_allclose(y.value, X["rewards"] + DISCOUNT * X["masks"] * value, atol=1e-3)


def test_discrete_actions_have_an_exact_logsumexp() -> None:
    algorithm, state = make(discrete=True, max_target_actions=2, cql_temperature=0.5)
    batch = {**BATCH, "actions": CHOICES}
    every = np.stack([ref.forward(n, X["observations"])[0] for n in critics(state.params["critic"])])  # [2, B, K]
    difference = 0.5 * logsumexp(every / 0.5, 2) - every[:, np.arange(B), CHOICES]
    loss, metrics = algorithm.penalty(state.params["critic"], state, batch, KEY)
    assert float(loss) == pytest.approx(WEIGHT * difference.mean(1).sum(), rel=1e-4)
    assert float(metrics["cql/q_data"]) == pytest.approx(every[:, np.arange(B), CHOICES].mean(), rel=1e-4)
    after = np.stack([ref.forward(n, X["next_observations"])[0] for n in critics(state.target["critic"])])
    y = algorithm.target(state, state.params["actor"], batch, KEY)
    np.testing.assert_allclose(y.value, X["rewards"] + DISCOUNT * X["masks"] * after.min(0).max(1), atol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"importance": False}, {"name": "cal_ql"}], ids=str)
def test_the_gradient_of_a_few_actions_is_right_on_average(settings: dict[str, Any]) -> None:
    """Drawn 3,000 times; the value is that of all of them whatever is drawn."""
    found = {}
    for followed in (0, 1, 3000):
        algorithm, state = make(**settings, gradient_samples=followed)
        gradient = torch.func.grad_and_value(lambda p, a=algorithm, s=state: a.penalty(p, s, BATCH, KEY)[0])
        grads, value = gradient(state.params["critic"])
        found[followed] = torch.cat([g.flatten() for g in grads.values()]), float(value)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5) and found[0][1] == pytest.approx(
        found[3000][1], rel=1e-5
    )
    scale = found[0][0].abs().max()
    assert (
        float((found[3000][0] - found[0][0]).abs().max())
        < 0.05 * scale
        < float((found[1][0] - found[0][0]).abs().max())
    )


class Reference:
    """CQL in float64, with the gradients written out."""

    def __init__(self, state: TrainState, gap: float | None) -> None:
        self.actor, self.gap = Actor(state.params["actor"]), gap
        self.critics, self.targets = critics(state.params["critic"]), critics(state.target["critic"])
        self.log_weight, self.log_multiplier = float(state.params["entropy"]["log"]), 1.0
        self.adam = {k: ref.Adam(lambda t: ACTOR_LR) for k in ("actor", "entropy")}
        self.adam |= {k: ref.Adam(lambda t: LR) for k in ("critic0", "critic1", "lagrange")}

    def update(self, key: Tensor) -> None:
        now, after = rng.split(key)
        w, actor, old = math.exp(self.log_weight), self.actor, self.critics

        z, inputs = ref.forward(actor.net, X["observations"])
        raw = np.split(z, 2, 1)[1]
        log_std, noise = np.clip(actor.scale * raw + actor.shift, -20, 2), normal(now, B, A)
        action, log_p = actor.sample(X["observations"], noise)
        q = q_values(old, X["observations"], action)
        into = np.zeros((B, A))
        for e, critic in enumerate(old):
            _, steps = ref.forward(critic, np.concatenate([X["observations"], action], 1))
            _, slope = ref.backward(critic, steps, (q.argmin(0) == e).astype(np.float64)[:, None])
            into += slope[:, OBS:]
        du = (w * 2 * action - into * (1 - action**2)) / B
        dlog = du * np.exp(log_std) * noise - w / B
        dlog = dlog * ((actor.scale * raw + actor.shift < 2) & (actor.scale * raw + actor.shift > -20))
        grads, _ = ref.backward(actor.net, inputs, np.concatenate([du, dlog * actor.scale], 1))
        values = [*ref.flat(actor.net), np.array(actor.scale), np.array(actor.shift)]
        *values, scale, shift = self.adam["actor"].step(values, [*grads, (dlog * raw).sum(), dlog.sum()])

        # the critics, with the actor of before
        next_action, _ = actor.sample(X["next_observations"], normal(after, B, A))
        y = X["rewards"] + DISCOUNT * X["masks"] * q_values(self.targets, X["next_observations"], next_action).min(0)
        tries, log_tries = tried(actor, after)
        multiplier = 1.0 if self.gap is None else math.exp(self.log_multiplier)
        rows = np.concatenate([X["actions"][None], tries])  # [1 + 3 N, B, A]
        flat = np.concatenate([np.broadcast_to(X["observations"], (*rows.shape[:2], OBS)), rows], -1).reshape(
            -1, OBS + A
        )
        new, differences = [], []
        for e, critic in enumerate(old):
            out, steps = ref.forward(critic, flat)
            out = out.reshape(-1, B)
            scores = out[1:] - log_tries
            level = logsumexp(scores, 0)
            differences.append((level - out[0]).mean())
            share = WEIGHT * multiplier / B
            grad = np.concatenate([(2 * (out[0] - y) / B - share)[None], share * np.exp(scores - level)])
            grads, _ = ref.backward(critic, steps, grad.reshape(-1, 1))
            new.append(ref.unflat(self.adam[f"critic{e}"].step(ref.flat(critic), grads)))

        (log_weight,) = self.adam["entropy"].step([np.array(self.log_weight)], [np.array(-(log_p.mean() - A))])
        self.log_weight = float(log_weight)
        if self.gap is not None:
            slope = -multiplier * WEIGHT * (np.mean(differences) - self.gap)
            (log_multiplier,) = self.adam["lagrange"].step([np.array(self.log_multiplier)], [np.array(slope)])
            self.log_multiplier = float(log_multiplier)
        actor.net, actor.scale, actor.shift = ref.unflat(values), float(scale), float(shift)
        self.critics = new
        self.targets = [ref.polyak(t, o, POLYAK) for t, o in zip(self.targets, self.critics, strict=True)]


@pytest.mark.parametrize("gap", [None, 1.0])
def test_updates_take_every_loss_from_the_state_before(gap: float | None) -> None:
    algorithm, state = make(action_gap=gap)
    mine = Reference(state, gap)
    for t in range(4):
        key = rng.fold_in(KEY, t)
        state, metrics = algorithm.update(state, BATCH, key, phase=0)
        mine.update(key)
        ref.close(mine.actor.net, state.params["actor"], "net.", atol=1e-4)
        assert float(state.params["actor"]["scale"]) == pytest.approx(mine.actor.scale, abs=1e-4)
        assert float(state.params["actor"]["shift"]) == pytest.approx(mine.actor.shift, abs=1e-4)
        assert float(state.params["entropy"]["log"]) == pytest.approx(mine.log_weight, abs=1e-4)
        for e in range(2):
            ref.close(mine.critics[e], state.params["critic"], member=e, atol=1e-4)
            ref.close(mine.targets[e], state.target["critic"], member=e, atol=1e-4)
        if gap is not None:
            assert float(state.params["lagrange"]["log"]) == pytest.approx(mine.log_multiplier, abs=1e-4)
    assert ("lagrange" in state.params) == (gap is not None) == ("cql/multiplier" in metrics)


def test_the_penalty_keeps_values_outside_the_data_down() -> None:
    """Data whose actions are all near 0.5 and whose rewards say nothing of others."""
    g, n = np.random.default_rng(0), 500
    actions = np.clip(0.5 + 0.05 * g.normal(size=(n, 1)), -1, 1)
    data = from_arrays(
        g.uniform(-1, 1, (n, 2)), actions, np.ones(n), np.ones(n, bool), action_low=[-1.0], action_high=[1.0]
    )
    gap = {}
    for weight in (0.0, 5.0):
        kind = registry.get("algo", "cql")
        algorithm = kind(kind.Config(hidden=[16], conservative_weight=weight, actions=3, learning_rate=1e-2), data.spec)
        step = Step(algorithm, algorithm.sampler().prepare(data), batch_size=32, replicas=1)
        state, _ = step.run(stack([algorithm.init(0)]), {}, 0, 60)
        critic = {k: v[0] for k, v in state.params["critic"].items()}
        seen = data.columns["observations"]
        inside = algorithm.critic.q(critic, seen, data.columns["actions"]).mean()
        outside = algorithm.critic.q(critic, seen, -data.columns["actions"]).mean()
        gap[weight] = float(outside - inside)
    assert gap[5.0] < -1.0 < gap[0.0]


def test_settings_with_which_the_penalty_would_be_a_constant() -> None:
    kind = registry.get("algo", "cql")
    between = kind.Config(min_difference=-5.0, max_difference=5.0)
    assert kind.fit_config(between, None) is between
    with pytest.raises(UserError, match=r"min_difference=5 must be below algo\.max_difference=-5"):
        kind.fit_config(kind.Config(min_difference=5.0, max_difference=-5.0), None)
    with pytest.raises(UserError, match="min_difference=7 must be below"):
        kind.fit_config(between, None, {"min_difference": [0.0, 7.0]})
    with pytest.raises(UserError, match="no state to estimate the penalty on"):
        kind.fit_config(kind.Config(penalty_share=0.0), None)


def test_published_defaults() -> None:
    c = registry.get("algo", "cql").Config()
    published = {
        "learning_rate": 3e-4,
        "actor_learning_rate": 3e-5,
        "batch_size": 256,
        "discount": 0.99,
        "polyak": 0.005,
    }
    assert {k: getattr(c, k) for k in published} == published
    assert (
        c.conservative_weight == 10.0
        and c.actions == 10
        and c.cql_temperature == 1.0
        and c.importance
        and c.max_target_actions == 1
    )
    assert c.action_gap is None and c.min_difference is None and not c.entropy_in_target and c.target_entropy is None
    assert c.hidden == [256] * 3 and c.init == "small_head" and c.penalty_share == 1.0 and c.gradient_samples == 0
    fresh = registry.get("algo", "cql")(c, spec()).init(0).params["actor"]
    assert float(fresh["scale"]) == 1.0 and float(fresh["shift"]) == -1.0


@pytest.mark.parametrize("name", ["cql", "cal_ql"])
def test_both_terms_read_one_pass_at_the_datas_actions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The critics are called for the targets, at the data's actions and at the tried ones; the gradient is that of the
    separate terms.
    """
    algorithm, state = make(name)
    target = algorithm.target(state, state.params["actor"], BATCH, KEY)

    def separate(critic: Any) -> Tensor:
        td, _ = algorithm.critic.loss(critic, BATCH, target, KEY)
        return td + algorithm.penalty(critic, state, BATCH, rng.fold_in(KEY, 102))[0]

    expected = torch.func.grad(separate)(state.params["critic"])
    calls = []
    network = type(algorithm.critic).__call__
    monkeypatch.setattr(type(algorithm.critic), "__call__", lambda self, *x: (calls.append(x), network(self, *x))[1])
    gradient = torch.func.grad(lambda critic: algorithm.critic_loss(critic, state, BATCH, KEY)[0])(
        state.params["critic"]
    )
    assert len(calls) == 3
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
