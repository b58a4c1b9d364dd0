"""SHARSA: its windows by hand, each loss in float64 NumPy, the order of an update, and the choice among many
subgoals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import registry, rng
from offrl.algorithm import TrainState
from offrl.data.arrays import from_arrays
from offrl.data.dataset import DataSpec
from offrl.data.samplers.goals import DrawnGoals, HorizonSampler, Mix
from offrl.errors import UserError
from tests.support.golden import KEY, redraw
from tests.support.reference import goals as ref

B, OBS, A, GOAL, N, DISCOUNT = 6, 3, 2, 2, 4, 0.9
R = np.random.default_rng(3)
BATCH: dict[str, Tensor] = {
    k: torch.tensor(R.normal(size=(B, OBS)), dtype=torch.float32)
    for k in ("observations", "next_observations", "window_states")
}
BATCH |= {
    k: torch.tensor(R.normal(size=(B, GOAL)), dtype=torch.float32)
    for k in ("value_goals", "value_subgoals", "high_goals", "high_targets", "low_goals", "low_value_goals")
}
BATCH["actions"] = torch.tensor(R.uniform(-1, 1, (B, A)), dtype=torch.float32)
BATCH |= {
    "span": torch.tensor([4, 2, 0, 4, 1, 0]),
    "successes": torch.tensor([0.0, 1, 1, 0, 0, 0]),
    "known": torch.tensor([1.0, 1, 1, 1, 1, 0]),
    "low_successes": torch.tensor([0.0, 1, 0, 0, 1, 0]),
}
X = {k: v.numpy().astype(np.float64) for k, v in BATCH.items()}


def make(**settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "sharsa")
    config = kind.Config(**{"hidden": [6, 5], "discount": DISCOUNT, "subgoal_steps": N, "flow_steps": 3, **settings})
    algorithm = kind(config, DataSpec((OBS,), A, action_low=(-1.0,) * A, action_high=(1.0,) * A, goal_dim=GOAL))
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(5)
    for params in (*state.params.values(), *state.target.values()):
        redraw(params, g)
    return algorithm, state


def sigma(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def bce(logit: np.ndarray, y: np.ndarray) -> np.ndarray:
    return -(y * np.log(sigma(logit)) + (1.0 - y) * np.log(1.0 - sigma(logit)))


def join(*names: str) -> np.ndarray:
    return np.concatenate([X[n] for n in names], 1)


# y = rewards + following * V(s_m, g), by hand: 0.9^m at the goal, and 0.9^m of V where it is not reached within m steps
REWARDS = np.array([0.0, 0.81, 1.0, 0.0, 0.0, 0.0])
FOLLOWING = np.array([0.6561, 0.0, 0.0, 0.6561, 0.9, 1.0])


@pytest.mark.parametrize("pessimism", ["min", "mean"])
@pytest.mark.parametrize("kind", ["bce", "squared"])
def test_values_of_subgoals(kind: str, pessimism: str) -> None:
    """Row 5, after which nothing is known, does not count; the mean is over all rows."""
    algorithm, state = make(value_loss=kind, pessimism=pessimism)
    state.target["critic"]["head.bias"][1] += 1.0  # each is the smaller one somewhere
    level = algorithm.levels(BATCH)[""]
    read, loss_of = (sigma, bce) if kind == "bce" else (lambda x: x, lambda x, y: (x - y) ** 2)
    v = ref.mlp(state.params["value"], join("observations", "value_goals"))[:, 0]
    after = read(ref.mlp(state.params["value"], join("window_states", "value_goals"))[:, 0])
    columns = join("observations", "value_goals", "value_subgoals")  # no actions
    q, target_q = (ref.twins(p["critic"], columns)[..., 0] for p in (state.params, state.target))
    y = REWARDS + FOLLOWING * after
    expected = sum((X["known"] * loss_of(q[k], y)).mean() for k in range(2))
    found, metrics = algorithm.critic_loss(state.params["critic"], state, BATCH, level, "")
    assert float(found) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["critic/q"]) == pytest.approx(read(q).mean(), rel=1e-5)

    target = read(target_q).min(0) if pessimism == "min" else read(target_q).mean(0)
    assert (target_q[0] < target_q[1]).any() and (target_q[0] > target_q[1]).any()
    found, _ = algorithm.value_loss(state.params["value"], state, BATCH, level, "")
    assert float(found) == pytest.approx((X["known"] * loss_of(v, target)).mean(), rel=1e-5)


def test_values_of_actions() -> None:
    """Double SHARSA's low level: single steps with discount 1 - 1 / n, and a goal that is the row's own state ends
    them.
    """
    algorithm, state = make(low_values=True)
    level = algorithm.levels(BATCH)["low_"]
    after = sigma(ref.mlp(state.params["low_value"], join("next_observations", "low_value_goals"))[:, 0])
    y = X["low_successes"] + 0.75 * (1.0 - X["low_successes"]) * after
    columns = join("observations", "low_value_goals", "actions")
    q, target_q = (ref.twins(p["low_critic"], columns)[..., 0] for p in (state.params, state.target))
    found, _ = algorithm.critic_loss(state.params["low_critic"], state, BATCH, level, "low_")
    assert float(found) == pytest.approx(bce(q, y).mean(1).sum(), rel=1e-5)
    v = ref.mlp(state.params["low_value"], join("observations", "low_value_goals"))[:, 0]
    found, _ = algorithm.value_loss(state.params["low_value"], state, BATCH, level, "low_")
    assert float(found) == pytest.approx(bce(v, sigma(target_q).min(0)).mean(), rel=1e-5)


def test_the_cross_entropy_is_least_at_the_target() -> None:
    algorithm, _ = make()
    y = torch.tensor([0.2, 0.9])
    logits = torch.log(y / (1 - y)).requires_grad_()
    (slope,) = torch.autograd.grad(algorithm.objective(logits, y).sum(), logits)
    assert slope.abs().max() < 1e-6
    far = torch.tensor([0.0, 0.0], requires_grad=True)
    (slope,) = torch.autograd.grad(algorithm.objective(far, y).sum(), far)
    np.testing.assert_allclose(slope, [0.5 - 0.2, 0.5 - 0.9], atol=1e-6)  # sigma(l) - y


@pytest.mark.parametrize(
    ("name", "inputs", "data"),
    [("high", ("observations", "high_goals"), "high_targets"), ("actor", ("observations", "low_goals"), "actions")],
)
def test_flows(name: str, inputs: tuple[str, ...], data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, state = make()
    noise, t = R.normal(size=(B, 2)), R.uniform(size=(B, 1))
    monkeypatch.setattr(rng, "normal", lambda key, shape: torch.tensor(noise, dtype=torch.float32))
    monkeypatch.setattr(rng, "uniform", lambda key, shape: torch.tensor(t, dtype=torch.float32))
    x = (1 - t) * noise + t * X[data]
    velocity = ref.mlp(state.params[name], np.concatenate([join(*inputs), x, t], 1), "net.")
    expected = ((velocity - (X[data] - noise)) ** 2).mean()
    columns = torch.cat([BATCH[k] for k in inputs], -1)
    loss, _ = algorithm.flow_loss(state.params[name], state, columns, BATCH[data], KEY, name)
    assert float(loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("low", [False, True])
def test_every_loss_reads_the_parameters_of_before_the_update(low: bool) -> None:
    """As in the authors' code, where they are one loss; the targets follow the critics of before it."""
    algorithm, state = make(low_values=low, learning_rate=0.1, polyak=0.3)
    after, metrics = algorithm.update(state, BATCH, KEY, phase=0)
    keys = rng.split(KEY)
    alone = dict(
        algorithm.descend(
            state,
            "high",
            algorithm.flow_loss,
            torch.cat([BATCH["observations"], BATCH["high_goals"]], -1),
            BATCH["high_targets"],
            keys[0],
            "high",
        )[0].params
    )
    alone["actor"] = algorithm.descend(
        state,
        "actor",
        algorithm.flow_loss,
        torch.cat([BATCH["observations"], BATCH["low_goals"]], -1),
        BATCH["actions"],
        keys[1],
        "actor",
    )[0].params["actor"]
    for prefix, level in algorithm.levels(BATCH).items():
        for name, loss in ((f"{prefix}critic", algorithm.critic_loss), (f"{prefix}value", algorithm.value_loss)):
            alone[name] = algorithm.descend(state, name, loss, BATCH, level, prefix)[0].params[name]
    assert set(alone) == set(after.params) and f"{'low_' if low else ''}critic/loss" in metrics
    for name, params in alone.items():
        for k, v in params.items():
            assert torch.equal(after.params[name][k], v) and not torch.equal(v, state.params[name][k]), (name, k)
    for name, params in state.target.items():
        for k, v in params.items():
            torch.testing.assert_close(after.target[name][k], 0.7 * v + 0.3 * state.params[name][k])


def test_the_best_of_many_subgoals_is_pursued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flows that stand still leave the noise as it is: the subgoal is the draw with the largest smaller Q, the action
    the noise cut off.
    """
    algorithm, state = make(candidates=3, greedy="sample")
    for name in ("high", "actor"):
        state.params[name] = {k: torch.zeros_like(v) for k, v in state.params[name].items()}
    noise = torch.tensor(R.normal(size=(B, 3, GOAL)) * 2, dtype=torch.float32)
    seen: list[Tensor] = []
    apply = algorithm.apply

    def watched(name: str, params: Any, *x: Any) -> Any:
        if name == "actor":
            seen.append(x[0][:, OBS:])
        return apply(name, params, *x)

    monkeypatch.setattr(algorithm, "apply", watched)
    monkeypatch.setattr(rng, "normal", lambda key, shape: noise if shape[1] == 3 else noise[:, :1])
    actor = algorithm.actor(state)
    goals = BATCH["value_goals"]
    action, _ = actor.act(actor.set_goal(actor.start(B), goals), BATCH["observations"], KEY, explore=False)
    columns = [np.concatenate([X["observations"], X["value_goals"], noise[:, i].numpy()], 1) for i in range(3)]
    scores = np.stack([ref.twins(state.params["critic"], c)[..., 0].min(0) for c in columns], 1)
    best = scores.argmax(1)
    assert len(set(best)) > 1
    np.testing.assert_allclose(seen[0], noise[np.arange(B), best], atol=1e-6)
    np.testing.assert_allclose(action, noise[:, 0].clamp(-1, 1), atol=1e-6)


def test_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 0 to 9 are an episode, rows 10 to 12 another; windows of 4 steps."""
    rows = np.arange(13)
    places = np.stack([rows, rows], 1).astype(np.float32)
    observations = np.stack([rows, -rows, 0 * rows], 1).astype(np.float32)
    following = observations + np.array([1.0, -1.0, 0.0], np.float32)
    following[[9, 12], 2] = 0.5  # a state that is not the next episode's first
    limits: dict[str, Any] = {"action_low": [-1.0] * A, "action_high": [1.0] * A}
    data = from_arrays(
        observations,
        np.zeros((13, A)),
        np.zeros(13),
        episode_ends=[9, 12],
        next_observations=following,
        achieved_goals=places,
        **limits,
    )
    picked = torch.tensor([2, 2, 2, 8, 9, 2, 9, 10])
    goals = torch.tensor([4, 9, 6, 11, 11, 2, 9, 9])
    sampler = HorizonSampler(Mix(0.2, 0.5, 0.3), Mix(0.0, 1.0, 0.0), 4, low=Mix(0.2, 0.5, 0.3))
    source = sampler.prepare(data)
    none = torch.zeros(8, dtype=torch.bool)
    monkeypatch.setattr(type(source), "draw", lambda self, key, count: picked)
    monkeypatch.setattr("offrl.data.samplers.goals.choose", lambda *_: DrawnGoals(goals, none, none, goals, none))
    batch = sampler(source, KEY, 8)
    assert batch["span"].tolist() == [2, 4, 4, 1, 0, 0, 0, 2]
    assert batch["successes"].tolist() == [1, 0, 1, 0, 0, 1, 1, 0]
    assert batch["known"].tolist() == [1, 1, 1, 1, 0, 1, 1, 1]  # nothing follows row 9, and its goal is elsewhere
    ends = [4, 6, 6, 9, 9, 2, 9, 12]
    assert batch["window_states"][:, 0].tolist() == ends and batch["value_subgoals"][:, 0].tolist() == ends
    assert batch["high_targets"][:, 1].tolist() == ends and batch["high_goals"][:, 0].tolist() == goals.tolist()
    assert batch["low_goals"][:, 0].tolist() == [6, 6, 6, 9, 9, 6, 9, 12]
    assert batch["low_successes"].tolist() == [0, 0, 0, 0, 0, 1, 1, 0]


def test_what_cannot_be() -> None:
    data = from_arrays(
        np.zeros((5, OBS)),
        np.zeros((5, A)),
        np.zeros(5),
        np.ones(5, bool),
        action_low=[-1.0] * A,
        action_high=[1.0] * A,
    )
    with pytest.raises(
        UserError, match=r"algo\.subgoal_steps=4 looks ahead in the data, each of whose episodes has one transition"
    ):
        HorizonSampler(Mix(0.2, 0.5, 0.3), Mix(0.0, 1.0, 0.0), 4).prepare(data)
    with pytest.raises(UserError, match=r"algo\.subgoal_steps=1: .*algo\.low_values.* 2 or more ahead"):
        make(low_values=True, subgoal_steps=1)
