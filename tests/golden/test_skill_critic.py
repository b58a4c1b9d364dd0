"""Skill-Critic: rows of steps with their decisions, both levels' targets and losses by hand and in float64 NumPy, and
an update that is the same alone and among others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.func import vmap
from torch.utils import _pytree as pytree

from offrl import registry, rng
from offrl.algorithm import TrainState, stack, with_settings
from offrl.data.samplers.decisions import DecisionSampler
from offrl.families.critics import Values
from offrl.finetuning.play.turns import Turn
from offrl.finetuning.transitions import Rows, columns_for, returns_of
from offrl.nn.representations.latent import draw
from tests.support.golden import KEY, OBS, A, B, redraw, spec
from tests.support.reference import mlp as ref

H, Z, GAMMA = 3, 4, 0.9
G = np.random.default_rng(2)
SKILLS = {"skill_length": H, "skill_dim": Z, "hidden": [7], "recurrent_width": 5}


def make(**settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "skill_critic")
    small = {"hidden": [6, 5], "discount": GAMMA, "skills_settings": SKILLS, "divergence_weight": 0.3}
    algorithm = kind(kind.Config(**small, **settings), spec())
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(5)
    for name in ("actor", "critic", "low_critic"):
        redraw(state.params[name], g)
        redraw(state.target[name], g) if name in state.target else None
    for params in (state.params["low"], state.extra["skills"]):
        redraw(params, g, 0.3)
    return algorithm, state


def batch() -> dict[str, torch.Tensor]:
    """Steps 0, 1 and 2 of whole skills, and of a skill that ended after two steps, by a terminal or by time."""
    position, span = np.array([0, 1, 2, 2, 1, 1, 0, 0]), np.array([3, 3, 3, 3, 2, 2, 2, 1])
    ended = np.array([0, 0, 0, 1, 1, 0, 1, 0])  # whether the skill did by a terminal
    columns = {
        **{name: G.normal(size=(B, OBS)) for name in ("observations", "next_observations")},
        **{f"decision_{name}": G.normal(size=(B, OBS)) for name in ("observations", "next_observations")},
        "actions": G.uniform(-1, 1, (B, A)),
        "rewards": G.normal(size=B),
        "masks": 1 - ended * (position == span - 1),
        "decision_masks": 1 - ended,
        "skills": G.normal(size=(B, Z)),
        "step_rewards": G.normal(size=(B, H)) * (np.arange(H) < span[:, None]),
    }
    whole = {"position": torch.tensor(position), "span": torch.tensor(span)}
    return {name: torch.tensor(x, dtype=torch.float32) for name, x in columns.items()} | whole


BATCH = batch()
X = {name: x.double().numpy() for name, x in BATCH.items()}


def gaussian(net: Any, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean, log_std = np.split(ref.forward(net, inputs)[0], 2, 1)
    return mean, log_std.clip(-10, 2)


def kl(p: Any, q: Any) -> np.ndarray:
    (m, l), (m0, l0) = p, q  # noqa: E741
    return (l0 - l + (np.exp(2 * l) + (m - m0) ** 2) / (2 * np.exp(2 * l0)) - 0.5).sum(1)


def noise(key: torch.Tensor, width: int) -> np.ndarray:
    return draw((torch.zeros(B, width), torch.zeros(B, width)), key).double().numpy()


def smallest(params: Any, *inputs: np.ndarray) -> np.ndarray:
    both = np.concatenate(inputs, 1)
    return np.min([ref.forward(ref.net(params, member=e), both)[0][:, 0] for e in range(2)], 0)


class Levels:
    """Both levels in float64: samples and divergences, of the state's parameters."""

    def __init__(self, state: TrainState, low_log_std: float = -3.0) -> None:
        self.state, self.low_log_std = state, low_log_std

    def high(self, observations: np.ndarray, key: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        dist = gaussian(ref.net(self.state.params["actor"], "net."), observations)
        prior = gaussian(ref.net(self.state.extra["skills"], "prior.net."), observations)
        return dist[0] + np.exp(dist[1]) * noise(key, Z), kl(dist, prior)

    def low(self, inputs: np.ndarray, key: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        params = self.state.params["low"]
        mean = ref.forward(ref.net(params, "net."), inputs)[0]
        log_std = np.broadcast_to(params["log_std"].double().numpy().clip(-5, 2), mean.shape)
        decoder = ref.forward(ref.net(self.state.extra["skills"], "decoder.net."), inputs)[0]
        divergence = kl((mean, log_std), (decoder, np.full_like(mean, self.low_log_std)))
        return (mean + np.exp(log_std) * noise(key, A)).clip(-1, 1), divergence


@pytest.mark.parametrize("within", [False, True])
def test_the_high_level(within: bool) -> None:
    """A skill that time cut short is worth its steps' rewards and, discounted as often, what follows."""
    algorithm, state = make(discount_within=within)
    levels, decisions = Levels(state), algorithm.batch_of("high", BATCH)
    rewards = (X["step_rewards"] * GAMMA ** np.arange(H)).sum(1) if within else X["step_rewards"].sum(1)
    z, divergence = levels.high(X["decision_next_observations"], KEY)
    value = smallest(state.target["critic"], X["decision_next_observations"], z) - 0.3 * divergence
    y = rewards + GAMMA ** X["span"] * X["decision_masks"] * value
    both = np.concatenate([X["decision_observations"], X["skills"]], 1)
    q = np.stack([ref.forward(ref.net(state.params["critic"], member=e), both)[0][:, 0] for e in range(2)])
    loss, _ = algorithm.critic_loss(state.params["critic"], state, "high", decisions, KEY)
    assert float(loss) == pytest.approx(((q - y) ** 2).mean(1).sum(), rel=1e-4)
    z, divergence = levels.high(X["decision_observations"], KEY)
    loss, _ = algorithm.policy_loss(state.params["actor"], state, "high", decisions, KEY)
    expected = (0.3 * divergence - smallest(state.params["critic"], X["decision_observations"], z)).mean()
    assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_the_low_level() -> None:
    """Where a skill begins at the next state it is a new one, whose value is the high level's."""
    algorithm, state = make()
    levels, (skill_key, action_key) = Levels(state), rng.split(KEY)
    step = (X["position"].astype(int) + 1) % H
    z, _ = levels.high(X["next_observations"], skill_key)
    new = np.where((step == 0)[:, None], z, X["skills"])
    inputs = np.concatenate([X["next_observations"], new, np.eye(H)[step]], 1)
    actions, divergence = levels.low(inputs, action_key)
    high = smallest(state.target["critic"], X["next_observations"], z)
    value = np.where(step == 0, high, smallest(state.target["low_critic"], inputs, actions)) - 0.3 * divergence
    y = X["rewards"] + GAMMA * X["masks"] * value
    inputs = np.concatenate([X["observations"], X["skills"], np.eye(H)[X["position"].astype(int)]], 1)
    both = np.concatenate([inputs, X["actions"]], 1)
    q = np.stack([ref.forward(ref.net(state.params["low_critic"], member=e), both)[0][:, 0] for e in range(2)])
    steps = algorithm.batch_of("low", BATCH)
    np.testing.assert_allclose(steps["observations"], inputs, rtol=1e-6)
    loss, _ = algorithm.critic_loss(state.params["low_critic"], state, "low", steps, KEY)
    assert float(loss) == pytest.approx(((q - y) ** 2).mean(1).sum(), rel=1e-4)
    actions, divergence = levels.low(inputs, KEY)
    loss, _ = algorithm.policy_loss(state.params["low"], state, "low", steps, KEY)
    expected = (0.3 * divergence - smallest(state.params["low_critic"], inputs, actions)).mean()
    assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_a_low_target_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """r 1, Q_a' 2, Q_z' 3, alpha .1, KL .5, gamma .99: 2.9305 within a skill, 3.9205 where one begins."""
    algorithm, state = make()
    algorithm.config.discount, one = 0.99, torch.ones(B)
    state.params["low_weight"]["log"] = torch.tensor(0.1).log()
    width = {"high": Z, "low": A}
    monkeypatch.setattr(algorithm, "sample", lambda level, *_: (torch.zeros(B, width[level]), 0.5 * one))
    monkeypatch.setattr(algorithm.critic, "min_q", lambda *_: Values(3 * one))
    monkeypatch.setattr(algorithm.low_critic, "min_q", lambda *_: Values(2 * one))
    value = Values(algorithm.low_value(state, BATCH, KEY))
    target = algorithm.low_critic.td_target({"rewards": one, "masks": one}, value, 0.99).value
    np.testing.assert_allclose(target, np.where(X["position"] == H - 1, 3.9205, 2.9305), rtol=1e-6)


@pytest.mark.parametrize("level", ["high", "low"])
def test_weights_hold_divergences_at_their_targets(level: str) -> None:
    algorithm, state = make(**{f"{level}_divergence": 1.2})
    for divergence in (0.4, 1.6):
        x = torch.full((B,), divergence)
        gradient = torch.func.grad(lambda p, x=x: algorithm.weight_loss(p, state, level, x)[0])
        slope = float(gradient(state.params[f"{level}_weight"])["log"])
        assert slope == pytest.approx(0.3 * (1.2 - divergence), rel=1e-5)


@pytest.mark.parametrize("train_low", [True, False])
def test_an_update_alone_and_among_others(train_low: bool) -> None:
    algorithm, _ = make(train_low=train_low)
    states = [algorithm.init(seed) for seed in (0, 1, 2)]
    before = pytree.tree_map(torch.clone, states[1])
    keys = torch.stack([rng.make_key(seed) for seed in (7, 8, 9)])
    batches = {name: torch.stack([x, x.flip(0), x.roll(1, 0)]) for name, x in BATCH.items()}
    among, metrics = vmap(lambda s, b, k: algorithm.update(s, b, k, phase=0))(stack(states), batches, keys)
    alone, own = algorithm.update(states[1], {name: x[1] for name, x in batches.items()}, keys[1], phase=0)
    for one, other in zip(pytree.tree_leaves(alone), pytree.tree_leaves(among), strict=True):
        torch.testing.assert_close(one, other[1], rtol=1e-4, atol=1e-5)
    assert all(float(x) == pytest.approx(float(metrics[name][1]), rel=1e-3, abs=1e-4) for name, x in own.items())
    for one, other in zip(pytree.tree_leaves(before), pytree.tree_leaves(states[1]), strict=True):
        assert torch.equal(one, other)  # pure
    moved = {name for name, params in alone.params.items() if any(
        not torch.equal(x, before.params[name][k]) for k, x in params.items())}  # fmt: skip
    high = {"actor", "critic", "high_weight"}
    assert moved == (high | {"low", "low_critic", "low_weight"} if train_low else high)


def test_a_grid_of_settings() -> None:
    algorithm, state = make()
    names = ("discount", "high_divergence", "low_divergence")
    values = {name: torch.tensor([getattr(algorithm.config, name), 0.5]) for name in names}

    def metrics(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return with_settings(algorithm, x).update(state, BATCH, KEY, phase=0)[1]

    among = vmap(metrics)(values)
    for i in (0, 1):
        alone = metrics({name: float(x[i]) for name, x in values.items()})  # type: ignore[misc]
        assert all(float(x) == pytest.approx(float(among[name][i]), rel=1e-4, abs=1e-5) for name, x in alone.items())


def test_the_low_level_begins_as_the_decoder() -> None:
    """What goes on of a run of skill_iql, and what begins anew."""
    kind, (algorithm, _) = registry.get("algo", "skill_iql"), make()
    offline = kind(kind.Config(hidden=[6, 5], skills_settings=SKILLS), spec())
    run, fresh = offline.init(4), algorithm.init(5)
    state = algorithm.after(run, fresh)
    assert state.params["actor"] is run.params["actor"] and state.target["critic"] is run.target["critic"]
    assert state.params["low_critic"] is fresh.params["low_critic"] and float(state.params["low"]["log_std"][0]) == -3.0
    s, z, step = torch.randn(B, OBS), torch.randn(B, Z), torch.arange(B) % H
    play = [x.play(y, s, z, step, KEY, False) for x, y in ((offline, run), (algorithm, state))]
    assert torch.equal(*play)
    _, divergence = algorithm.sample("low", state.params["low"], state, algorithm.skills.inputs(s, z, step), KEY)
    assert divergence.abs().max() == 0.0
    explored = algorithm.play(state, s, z, step, KEY, True) - play[0]
    assert 0.01 < float(explored.std()) < 0.1  # exp(-3)


# ---- rows


def turn(number: float, terminated: bool = False, over: bool = False, valid: bool = True) -> Turn:
    """One step of one environment: observations and reward are its number."""
    observations, flags = np.full((1, OBS), number, np.float32), [np.array([x]) for x in (terminated, over, valid)]
    action, unknown = np.full((1, A), number / 100, np.float32), [np.full(1, np.nan) for _ in range(2)]
    return Turn(observations, action, np.full(1, number), observations + 1, *flags, [], *unknown, np.zeros(1, bool))


def test_rows_are_steps_with_their_decision() -> None:
    """A whole skill, one that time cuts after two steps, one that a terminal ends, one that no row ends, and one whose
    first two steps are played again.
    """
    sampler = DecisionSampler(H, Z)
    rows = Rows(spec(), columns_for(spec(), sampler, "it"), 1, 1, returns_of(sampler, GAMMA), sampler)
    turns = [turn(i) for i in range(4)] + [
        turn(4, over=True),
        turn(5, True, True),
        turn(6),
        turn(7, over=True, valid=False),
    ]
    turns += [turn(8), turn(9), turn(10)]
    out = []
    for i, one in enumerate(turns):
        memory = None if i in (8, 9) else {"skills": np.full((1, Z), i, np.float32)}
        owner, columns = rows.take(one, memory)
        out += [{name: x[j] for name, x in columns.items()} for j in range(len(owner))]
        assert len(owner) == {2: 3, 4: 2, 5: 1, 7: 1, 10: 3}.get(i, 0)
    assert set(out[0]) == {*rows.columns, "intervention"}
    assert [row["rewards"] for row in out] == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10]
    assert [row["position"] for row in out] == [0, 1, 2, 0, 1, 0, 0, 0, 1, 2]
    assert [row["span"] for row in out] == [3, 3, 3, 2, 2, 1, 1, 3, 3, 3]
    assert [row["skills"][0] for row in out] == [2, 2, 2, 4, 4, 5, 7, 10, 10, 10]
    assert [row["decision_observations"][0] for row in out] == [0, 0, 0, 3, 3, 5, 6, 8, 8, 8]
    assert [row["decision_next_observations"][0] for row in out] == [3, 3, 3, 5, 5, 6, 7, 11, 11, 11]
    assert [row["masks"] for row in out] == [row["decision_masks"] for row in out] == [1, 1, 1, 1, 1, 0, 1, 1, 1, 1]
    assert [row["step_rewards"].tolist() for row in out[2:6]] == [[0, 1, 2], [3, 4, 0], [3, 4, 0], [5, 0, 0]]
