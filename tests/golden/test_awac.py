"""AWAC: each loss in float64 NumPy, for continuous and discrete actions, and whole updates in the authors' order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.algorithm import TrainState
from tests.support.golden import A, B, K, critics, double, q_values, redraw, spec, transitions
from tests.support.reference import mlp as ref

LR, DISCOUNT, POLYAK, TEMPERATURE = 0.01, 0.9, 0.1, 2.0
G = np.random.default_rng(6)
BATCH = transitions(G)
X = double(BATCH)
KEY, OTHER = rng.split(rng.make_key(0))
CHOSEN = torch.tensor([0, 3, 1, 1, 2, 0, 3, 2])
LOG_STD = np.array([0.2, -0.4])


def noise(key: torch.Tensor) -> np.ndarray:
    """What stands for the generator here: another draw for each key."""
    return np.random.default_rng(int(key) & ((1 << 63) - 1)).normal(size=(B, A))


@pytest.fixture(autouse=True)
def known_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "normal", lambda key, shape: torch.tensor(noise(key), dtype=torch.float32).reshape(shape))


def make(discrete: bool = False, **settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "awac")
    defaults = {
        "hidden": [6, 5],
        "learning_rate": LR,
        "discount": DISCOUNT,
        "polyak": POLYAK,
        "temperature": TEMPERATURE,
    }
    algorithm = kind(kind.Config(**{**defaults, **settings}), spec(K if discrete else 0))
    state = algorithm.init(3)
    # larger than initial weights: advantages of both signs, some of them beyond the cap
    g = torch.Generator().manual_seed(8)
    for params in (state.params["critic"], state.params["actor"], state.target["critic"]):
        redraw(params, g)
    if not discrete:
        state.params["actor"]["log_std"] = torch.tensor(LOG_STD, dtype=torch.float32)
    return algorithm, state


def sample(actor: ref.Net, log_std: np.ndarray, observations: np.ndarray, key: torch.Tensor) -> np.ndarray:
    """The mean is not squashed; samples are clipped."""
    raw = ref.forward(actor, observations)[0] + np.exp(log_std) * noise(key)
    assert (np.abs(raw) > 1).any() and (np.abs(raw) < 1).any()
    return np.clip(raw, -1, 1)


def test_critic_loss() -> None:
    algorithm, state = make()
    action = sample(ref.net(state.params["actor"], "net."), LOG_STD, X["next_observations"], KEY)  # the online actor's
    next_q = q_values(critics(state.target["critic"]), X["next_observations"], action)
    assert (next_q[0] < next_q[1]).any() and (next_q[0] > next_q[1]).any()
    y = X["rewards"] + DISCOUNT * X["masks"] * next_q.min(0)  # no entropy
    q = q_values(critics(state.params["critic"]), X["observations"], X["actions"])
    loss, metrics = algorithm.critic_loss(state.params["critic"], state, BATCH, KEY)
    assert float(loss) == pytest.approx(((q - y) ** 2).mean(1).sum(), rel=1e-5)
    assert float(metrics["critic/q"]) == pytest.approx(q.mean(), rel=1e-4)


def advantage(nets: list[ref.Net], action: np.ndarray) -> np.ndarray:
    """Smallest critic at the data's actions minus smallest critic at the policy's, each the smallest by itself."""
    return q_values(nets, X["observations"], X["actions"]).min(0) - q_values(nets, X["observations"], action).min(0)


@pytest.mark.parametrize(("temperature", "capped"), [(TEMPERATURE, False), (10.0, True)])
def test_actor_loss_and_the_cap_of_100(temperature: float, capped: bool) -> None:
    algorithm, state = make(temperature=temperature)
    actor = ref.net(state.params["actor"], "net.")
    a = advantage(critics(state.params["critic"]), sample(actor, LOG_STD, X["observations"], KEY))  # online critics
    weight = np.minimum(np.exp(temperature * a), 100.0)  # temperature is 1 / lambda
    assert (a < 0).any() and (a > 0).any() and (weight == 100.0).any() == capped and (weight < 100.0).any()
    mean, std = ref.forward(actor, X["observations"])[0], np.exp(LOG_STD)
    # a sum over dimensions
    log_p = (-0.5 * ((X["actions"] - mean) / std) ** 2 - np.log(std * np.sqrt(2 * np.pi))).sum(1)
    loss, metrics = algorithm.actor_loss(state.params["actor"], state, BATCH, KEY)
    assert float(loss) == pytest.approx(-(weight * log_p).mean(), rel=1e-4)
    assert float(metrics["actor/advantage"]) == pytest.approx(a.mean(), rel=1e-4)
    assert float(metrics["actor/weight"]) == pytest.approx(weight.mean(), rel=1e-4)


def test_the_policy_is_not_squashed_and_may_become_narrow() -> None:
    algorithm, state = make()
    mean = ref.forward(ref.net(state.params["actor"], "net."), X["observations"])[0]
    assert (np.abs(mean) > 1).any()
    ours, _ = algorithm.actor(state).act(None, BATCH["observations"], KEY, explore=False)
    np.testing.assert_allclose(ours, np.clip(mean, -1, 1), atol=1e-5)
    state.params["actor"]["log_std"] = torch.tensor([-25.0, -15.0])
    _, log_std = algorithm.apply("actor", state.params["actor"], BATCH["observations"])
    assert log_std[0].tolist() == [-20.0, -15.0]


def policy(state: TrainState, observations: np.ndarray) -> np.ndarray:
    z = ref.forward(ref.net(state.params["actor"], "net."), observations)[0]
    return np.exp(z) / np.exp(z).sum(1, keepdims=True)


def every_q(nets: list[ref.Net], observations: np.ndarray) -> np.ndarray:
    return np.stack([ref.forward(n, observations)[0] for n in nets])  # [2, B, K]


def test_discrete_values_are_exact_means() -> None:
    algorithm, state = make(discrete=True)
    batch = {**BATCH, "actions": CHOSEN}
    rows = np.arange(B)
    next_v = (
        policy(state, X["next_observations"]) * every_q(critics(state.target["critic"]), X["next_observations"]).min(0)
    ).sum(1)
    y = X["rewards"] + DISCOUNT * X["masks"] * next_v
    each = every_q(critics(state.params["critic"]), X["observations"])
    loss, _ = algorithm.critic_loss(state.params["critic"], state, batch, KEY)
    assert float(loss) == pytest.approx(((each[:, rows, CHOSEN] - y) ** 2).mean(1).sum(), rel=1e-5)

    p = policy(state, X["observations"])
    a = each[:, rows, CHOSEN].min(0) - (p * each.min(0)).sum(1)
    expected = -(np.minimum(np.exp(TEMPERATURE * a), 100.0) * np.log(p[rows, CHOSEN])).mean()
    assert float(algorithm.actor_loss(state.params["actor"], state, batch, KEY)[0]) == pytest.approx(expected, rel=1e-4)


def test_discrete_c51_bootstraps_from_the_mixture_over_actions() -> None:
    """The distribution of the next value: of each action that of its smaller critic, weighted by the policy."""
    bins, low, high = 5, -2.0, 2.0
    algorithm, state = make(discrete=True, value_head="c51", value_bins=bins, value_range=[low, high])
    atoms = np.linspace(low, high, bins)
    raw = every_q(critics(state.target["critic"]), X["next_observations"]).reshape(2, B, K, bins)
    p = np.exp(raw) / np.exp(raw).sum(-1, keepdims=True)
    pi, target = policy(state, X["next_observations"]), np.zeros((B, bins))
    for b in range(B):
        mixture = sum(pi[b, k] * p[(p[:, b, k] @ atoms).argmin(), b, k] for k in range(K))
        for atom, mass in zip(atoms, mixture, strict=True):  # algorithm 1 of arXiv 1707.06887
            place = (np.clip(X["rewards"][b] + DISCOUNT * X["masks"][b] * atom, low, high) - low) / (
                atoms[1] - atoms[0]
            )
            below = int(np.floor(place))
            target[b, below] += mass * (below + 1 - place)
            if below + 1 < bins:
                target[b, below + 1] += mass * (place - below)
    now = every_q(critics(state.params["critic"]), X["observations"]).reshape(2, B, K, bins)[:, np.arange(B), CHOSEN]
    log_p = now - np.log(np.exp(now).sum(-1, keepdims=True))
    loss, _ = algorithm.critic_loss(state.params["critic"], state, {**BATCH, "actions": CHOSEN}, KEY)
    assert float(loss) == pytest.approx(-(target * log_p).sum(-1).mean(1).sum(), rel=1e-4)


class Reference:
    """AWAC in float64: the critics, then the actor with the new critics, then the targets."""

    def __init__(self, state: TrainState) -> None:
        self.actor, self.log_std = ref.net(state.params["actor"], "net."), LOG_STD
        self.critics, self.targets = critics(state.params["critic"]), critics(state.target["critic"])
        self.adam = {k: ref.Adam(lambda t: LR) for k in ("actor", "critic0", "critic1")}

    def update(self, key: torch.Tensor) -> None:
        after, now = rng.split(key)
        action = sample(self.actor, self.log_std, X["next_observations"], after)
        y = X["rewards"] + DISCOUNT * X["masks"] * q_values(self.targets, X["next_observations"], action).min(0)
        both = np.concatenate([X["observations"], X["actions"]], 1)
        for e, critic in enumerate(self.critics):
            out, inputs = ref.forward(critic, both)
            grads, _ = ref.backward(critic, inputs, 2 * (out - y[:, None]) / B)
            self.critics[e] = ref.unflat(self.adam[f"critic{e}"].step(ref.flat(critic), grads))

        a = advantage(self.critics, sample(self.actor, self.log_std, X["observations"], now))
        weight = np.minimum(np.exp(TEMPERATURE * a), 100.0)[:, None]
        mean, inputs = ref.forward(self.actor, X["observations"])
        std = np.exp(self.log_std)
        error = (mean - X["actions"]) / std
        grads, _ = ref.backward(self.actor, inputs, weight * error / std / B)
        grads.append((weight * (1 - error**2)).sum(0) / B)
        *values, self.log_std = self.adam["actor"].step([*ref.flat(self.actor), self.log_std], grads)
        self.actor = ref.unflat(values)
        self.targets = [ref.polyak(t, o, POLYAK) for t, o in zip(self.targets, self.critics, strict=True)]


def test_updates_in_the_authors_order() -> None:
    algorithm, state = make()
    mine = Reference(state)
    for t in range(6):
        key = rng.fold_in(OTHER, t)
        state, _ = algorithm.update(state, BATCH, key, phase=0)
        mine.update(key)
        ref.close(mine.actor, state.params["actor"], "net.")
        np.testing.assert_allclose(state.params["actor"]["log_std"], mine.log_std, atol=2e-5)
        for e in range(2):
            ref.close(mine.critics[e], state.params["critic"], member=e)
            ref.close(mine.targets[e], state.target["critic"], member=e)


def test_defaults() -> None:
    c = registry.get("algo", "awac").Config()
    published = {
        "learning_rate": 3e-4,
        "batch_size": 256,
        "discount": 0.99,
        "polyak": 0.005,
        "temperature": 3.0,
        "max_weight": 100.0,
    }
    assert {k: getattr(c, k) for k in published} == published
    assert c.hidden == [256, 256, 256] and c.init == "torch" and c.critics == 2 and not c.layer_norm
