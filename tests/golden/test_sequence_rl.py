"""Sequence RL from data: windows, the recurrent actor and its three losses in float64 NumPy, the model's states,
updates, and acting.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import registry, rng
from offrl.actor import NoisyActor
from offrl.algorithm import TrainState
from offrl.algorithms import sequence_rl as module
from offrl.algorithms.sequence_rl import (
    PREVIOUS,
    WINDOW_ACTIONS,
    WINDOW_OBSERVATIONS,
    WINDOW_VALID,
    RecallSampler,
    RecallSource,
)
from offrl.data.arrays import from_arrays
from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.sweeps import HeldPolicy
from offrl.world_models.model import Outcome, Prediction
from tests.support.cases import Case, data, identical, train
from tests.support.golden import KEY, OBS, A, B, critics, double, q_values, redraw, single, spec, transitions
from tests.support.reference import mlp as ref

J, WIDTH, ALPHA = 3, 4, 2.5
G = np.random.default_rng(4)
VALID = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 1]])
BATCH = {
    **transitions(G),
    **single(
        {
            PREVIOUS: G.uniform(-1, 1, (B, A)),
            WINDOW_OBSERVATIONS: G.normal(size=(B, J, OBS)),
            WINDOW_ACTIONS: G.uniform(-1, 1, (B, J, A)),
            WINDOW_VALID: VALID,
        }
    ),
}
BATCH["observations"], BATCH["actions"] = BATCH[WINDOW_OBSERVATIONS][:, 0], BATCH[WINDOW_ACTIONS][:, 0]
X = double(BATCH)


SPEC = spec()


def make(spec: DataSpec = SPEC, **settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "sequence_rl")
    defaults = {
        "hidden": [6, 5],
        "learning_rate": 0.01,
        "alpha": ALPHA,
        "length": J,
        "recurrent_width": WIDTH,
        "sequence_decay_steps": 100,
    }
    algorithm = kind(kind.Config(**{**defaults, **settings}), spec)
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(5)
    for params in state.params.values():
        redraw(params, g)
    return algorithm, state


def unroll(params: dict[str, Tensor], observation: np.ndarray, before: np.ndarray, steps: int) -> np.ndarray:
    """[steps, A] in float64: a network of Patel and Siegelmann's class, whose own actions follow those of `before` [K,
    A].
    """
    p = {k: v.numpy().astype(np.float64) for k, v in params.items()}
    h = p["second.weight"] @ np.maximum(p["first.weight"] @ observation + p["first.bias"], 0.0) + p["second.bias"]
    actions: list[np.ndarray] = []
    for i in range(steps):
        x = before[i] if i < len(before) else actions[-1]
        a, b = np.split(p["gru.weight_in"] @ x + p["gru.bias_in"], 3), np.split(p["gru.weight"] @ h + p["gru.bias"], 3)
        reset, update = (1.0 / (1.0 + np.exp(-(a[k] + b[k]))) for k in (0, 1))
        h = (1.0 - update) * np.tanh(a[2] + reset * b[2]) + update * h
        actions.append(np.tanh(p["head.weight"] @ h + p["head.bias"]))
    return np.stack(actions)


# ---- windows


def test_windows_begin_with_td3_bcs_transitions() -> None:
    """An episode of 4 rows that is cut off (3 transitions), and one of 2 that terminates."""
    rows = np.arange(6.0)
    dataset = from_arrays(
        rows[:, None],
        0.1 * rows[:, None] + 0.1,
        rows,
        np.arange(6) == 5,
        np.arange(6) == 3,
        action_low=-1.0,
        action_high=1.0,
    )
    source = RecallSampler(3).prepare(dataset)
    key = rng.make_key(1)
    batch, plain = RecallSampler(3)(source, key, 200), registry.get("algo", "td3_bc").sampler
    expected = plain(make(spec=dataset.spec)[0])
    drawn = expected(expected.prepare(dataset), key, 200)
    for name, column in drawn.items():
        assert torch.equal(batch[name], column), name
    windows = {
        0.0: ([0, 1, 2], [1, 1, 1], 0.0),
        1.0: ([1, 2, 2], [1, 1, 0], 0.1),
        2.0: ([2, 2, 2], [1, 0, 0], 0.2),
        4.0: ([4, 5, 5], [1, 1, 0], 0.0),  # what the other episode did is not before it
        5.0: ([5, 5, 5], [1, 0, 0], 0.5),
    }
    first = batch["observations"][:, 0].tolist()
    assert set(first) == set(windows)
    for i, row in enumerate(first):
        states, valid, previous = windows[row]
        assert batch[WINDOW_OBSERVATIONS][i, :, 0].tolist() == states and batch[WINDOW_VALID][i].tolist() == valid
        assert batch[PREVIOUS][i, 0].item() == pytest.approx(previous)
        np.testing.assert_allclose(batch[WINDOW_ACTIONS][i, :, 0], 0.1 * np.array(states) + 0.1, rtol=1e-6)


def test_data_without_windows_are_refused() -> None:
    alone = from_arrays(
        np.zeros((4, 1)), np.zeros((4, 1)), np.zeros(4), np.ones(4, bool), action_low=-1.0, action_high=1.0
    )
    with pytest.raises(UserError, match="no window of 2 steps"):
        RecallSampler(3).prepare(alone)
    assert RecallSampler(1).prepare(alone).transitions.count == 4
    with pytest.raises(UserError, match="longest episode has 40 transitions; take a smaller length"):
        RecallSampler(41).prepare(data(False))


# ---- the network


@pytest.mark.parametrize("known", [1, J])
def test_the_actor_unrolls_its_own_actions(known: int) -> None:
    algorithm, state = make()
    before = G.uniform(-1, 1, (B, known, A))
    ours = algorithm.apply(
        "sequence", state.params["sequence"], BATCH["observations"], torch.tensor(before, dtype=torch.float32), 5
    )
    expected = [unroll(state.params["sequence"], o, b, 5) for o, b in zip(X["observations"], before, strict=True)]
    np.testing.assert_allclose(ours, np.stack(expected), rtol=2e-4, atol=2e-5)


# ---- losses


def fixed(monkeypatch: pytest.MonkeyPatch, algorithm: Any, q: Any) -> None:
    """The sequence actor gives its parameter "a", and Q_1 is a known function."""
    monkeypatch.setattr(algorithm, "apply", lambda name, params, *x: params["a"])
    monkeypatch.setattr(module.SequenceRL, "first_q", lambda algorithm, state, s, a: q(s, a))


@pytest.mark.parametrize(("valid", "loss", "imitation"), [([1.0, 1.0], -0.7333333333, 0.1), ([1.0, 0.0], -2.46, 0.04)])
def test_the_loss_of_the_specification(
    monkeypatch: pytest.MonkeyPatch, valid: list[float], loss: float, imitation: float
) -> None:
    """J.8 no. 4: Q = (2, -1), a = (0.5, 0.2), data (0.3, -0.2): lambda is 1.6666667, of the first step alone 1.25."""
    algorithm, state = make(DataSpec((1,), 1, action_low=(-1.0,), action_high=(1.0,)), length=2)
    fixed(monkeypatch, algorithm, lambda s, a: torch.tensor([2.0, -1.0]))
    batch = single(
        {
            "observations": [[0.0]],
            PREVIOUS: [[0.0]],
            WINDOW_ACTIONS: [[[0.3], [-0.2]]],
            WINDOW_OBSERVATIONS: [[[0.0], [0.0]]],
            WINDOW_VALID: [valid],
        }
    )
    value, metrics = algorithm.sequence_loss({"a": torch.tensor([[[0.5], [0.2]]])}, state, batch, KEY)
    assert float(value) == pytest.approx(loss, rel=1e-5) and float(metrics["sequence/bc"]) == pytest.approx(
        imitation, rel=1e-5
    )


class Sum:
    """A model whose next state is s + a; an episode ends beyond `wall`, and two of three members, one of them no elite,
    err by 0.3 a.
    """

    def __init__(self, wall: float = 100.0) -> None:
        self.wall = wall

    def first_past(self, observations: Tensor) -> Tensor:
        return observations[:, None][:, :0]

    def predict(self, tree: Any, observations: Tensor, actions: Tensor, past: Tensor) -> Prediction:
        bias = torch.tensor([0.0, 0.0, 0.3]).reshape(3, 1, 1)
        mean = observations + actions * (1.0 + bias)
        return Prediction(mean, torch.ones_like(mean), mean[..., 0], mean[..., 0])

    def choose(self, prediction: Prediction, member: Tensor) -> Prediction:
        return Prediction(*(x[member, torch.arange(len(member))].unsqueeze(0) for x in prediction[:4]))  # type: ignore[index]

    def to_outcome(
        self, tree: Any, prediction: Any, observations: Tensor, actions: Tensor, following: Tensor, *_: Any
    ) -> Outcome:
        return Outcome(following, following[:, 0], following[:, 0] > self.wall, following[:, 0] < 0)


def recalling(algorithm: Any, elites: tuple[int, ...] = (0,), wall: float = 100.0) -> None:
    algorithm.runtime.source = RecallSource(None, Sum(wall), {"elites": torch.tensor(elites)})  # type: ignore[arg-type]


def test_no_gradient_passes_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """J.8 no. 2: Q = -(s + a)^2, next state s + a, from 1 by -0.5 and 0.25: the sum of -Q is 0.8125, its gradient (1,
    1.5); through the model it would be (2.5, 1.5). alpha = 0.8125 makes lambda 2, so that a mean over two steps is
    their sum."""
    algorithm, state = make(
        DataSpec((1,), 1, action_low=(-1.0,), action_high=(1.0,)), length=2, state_source="model", alpha=0.8125
    )
    recalling(algorithm)
    fixed(monkeypatch, algorithm, lambda s, a: -(s + a).square()[:, 0])
    a = torch.tensor([[[-0.5], [0.25]]])
    batch = {**single({"observations": [[1.0]], PREVIOUS: [[0.0]], WINDOW_VALID: [[1.0, 1.0]]}), WINDOW_ACTIONS: a}
    grads, (loss, _) = torch.func.grad_and_value(algorithm.sequence_loss, has_aux=True)({"a": a}, state, batch, KEY)
    assert float(loss) == pytest.approx(0.8125)
    np.testing.assert_allclose(grads["a"].flatten(), [1.0, 1.5], rtol=1e-6)


@pytest.mark.parametrize(
    ("elites", "wall", "cutoff", "weights"),
    [
        ((0, 1), 100.0, None, [1, 1, 1]),
        ((0,), 1.5, None, [1, 0, 0]),  # the first step ends beyond the wall
        ((0,), 1.9, None, [1, 1, 0]),
        ((0, 2), 100.0, 0.2, [1, 1, 0]),  # elites differ by 0.3 a: 0.18, then 0.24
        ((0, 1), 100.0, 0.2, [1, 1, 1]),  # the member that differs is no elite
    ],
)
def test_states_count_until_the_model_does_not_know(
    elites: tuple[int, ...], wall: float, cutoff: float | None, weights: list[int]
) -> None:
    algorithm, _ = make(DataSpec((1,), 1, action_low=(-1.0,), action_high=(1.0,)), state_source="model", cutoff=cutoff)
    recalling(algorithm, elites, wall)
    chosen = torch.tensor([0.6, 0.8, 0.1])
    states, actions, counted = algorithm.rollout_states(torch.ones(1, 1), lambda i, at: chosen[i].reshape(1, 1), KEY)
    assert counted.tolist() == [weights] and torch.equal(actions.flatten(), chosen)
    if elites != (0, 2):
        np.testing.assert_allclose(states.flatten(), [1.0, 1.6, 2.4], rtol=1e-6)


def test_one_elite_for_all_steps() -> None:
    algorithm, _ = make(DataSpec((1,), 1, action_low=(-1.0,), action_high=(1.0,)), state_source="model")
    recalling(algorithm, (0, 2))
    states, _, _ = algorithm.rollout_states(torch.zeros(64, 1), lambda i, at: torch.ones(64, 1), KEY)
    last = states[:, -1, 0]
    assert {round(x, 4) for x in last.tolist()} == {2.0, 2.6}  # two steps of 1, or two of 1.3


def test_the_loss_by_the_datas_states() -> None:
    algorithm, state = make()
    before = np.concatenate([X[PREVIOUS][:, None], X[WINDOW_ACTIONS][:, :-1]], 1)
    actions = np.stack(
        [unroll(state.params["sequence"], o, b, J) for o, b in zip(X["observations"], before, strict=True)]
    )
    q = q_values(critics(state.params["critic"])[:1], X[WINDOW_OBSERVATIONS].reshape(-1, OBS), actions.reshape(-1, A))[
        0
    ].reshape(B, J)
    assert (q < 0).any() and (q > 0).any()
    count = VALID.sum()
    imitation = (VALID * ((actions - X[WINDOW_ACTIONS]) ** 2).mean(-1)).sum() / count
    expected = imitation - ALPHA / ((VALID * np.abs(q)).sum() / count) * (VALID * q).sum() / count
    loss, metrics = algorithm.sequence_loss(state.params["sequence"], state, BATCH, KEY)
    assert float(loss) == pytest.approx(expected, rel=1e-4) and float(metrics["sequence/bc"]) == pytest.approx(
        imitation, rel=1e-4
    )
    assert float(metrics["sequence/steps"]) == count / B


def test_the_loss_by_td3_bcs_policy() -> None:
    one = DataSpec((A,), A, action_low=(-1.0,) * A, action_high=(1.0,) * A)  # states that actions can be added to
    algorithm, state = make(one, state_source="distil")
    recalling(algorithm)
    observations, pi = G.normal(size=(B, A)), ref.net(state.params["actor"], "net.")
    batch = single({"observations": observations, PREVIOUS: X[PREVIOUS]})
    at, teacher = observations.astype(np.float32).astype(np.float64), []
    for _ in range(J):
        teacher.append(np.tanh(ref.forward(pi, at)[0]))
        at = at + teacher[-1]
    imitated = np.stack(teacher, 1)
    before = np.concatenate([X[PREVIOUS][:, None], imitated[:, :-1]], 1)
    actions = np.stack([unroll(state.params["sequence"], o, b, J) for o, b in zip(observations, before, strict=True)])
    loss, _ = algorithm.sequence_loss(state.params["sequence"], state, batch, KEY)
    assert float(loss) == pytest.approx(((actions - imitated) ** 2).mean(), rel=1e-4)


# ---- updates


def test_td3_bc_is_as_it_was() -> None:
    """Bit for bit, on the same data with the same keys; the sequence actor moves beside it at every second update."""
    sequence, _ = train(Case("sequence_rl").make(), [3], 6)
    plain, _ = train(Case("td3_bc").make(), [3], 6)
    for name in ("critic", "actor"):
        identical(sequence.params[name], plain.params[name])
        identical(sequence.target[name], plain.target[name])


def test_order_of_an_update() -> None:
    """Critic, pi, then sigma by the new critic and the new pi, targets last; sigma's rate falls from update to
    update.
    """
    algorithm, state = make(sequence_learning_rate=0.01, sequence_decay_steps=8)
    before = state
    state, metrics = algorithm.update(state, BATCH, KEY, phase=0)
    assert state.params["sequence"] is before.params["sequence"] and "sequence/loss" not in metrics
    adam = ref.Adam(lambda t: 0.01 * max(1.0 - t / 4, 0.01))
    values = [v.numpy().astype(np.float64) for v in state.params["sequence"].values()]
    for n in range(3):
        state = algorithm.update(state, BATCH, KEY, phase=0)[0] if n else state
        fresh = algorithm.descend(state, "critic", algorithm.critic_loss, BATCH, KEY)[0]
        params = {
            k: torch.tensor(v, dtype=torch.float32) for k, v in zip(state.params["sequence"], values, strict=True)
        }
        grads, (loss, _) = torch.func.grad_and_value(algorithm.sequence_loss, has_aux=True)(params, fresh, BATCH, KEY)
        values = adam.step(values, [g.numpy().astype(np.float64) for g in grads.values()])
        stale = algorithm.sequence_loss(params, state, BATCH, KEY)[0]
        state, metrics = algorithm.update(state, BATCH, KEY, phase=1)
        assert (
            float(metrics["sequence/loss"]) == pytest.approx(float(loss), rel=1e-5) and abs(float(stale - loss)) > 1e-4
        )
        for k, value in zip(state.params["sequence"], values, strict=True):
            np.testing.assert_allclose(state.params["sequence"][k], value, rtol=1e-3, atol=2e-4, err_msg=k)


def test_defaults() -> None:
    c = registry.get("algo", "sequence_rl").Config()
    assert (c.length, c.action_steps, c.alpha, c.state_source, c.recurrent_width, c.sequence_learning_rate) == (
        8,
        None,
        2.5,
        "data",
        128,
        1e-3,
    )


# ---- acting


def acting(**settings: Any) -> tuple[TrainedPolicy, np.ndarray]:
    algorithm, state = make(**settings)
    return TrainedPolicy(algorithm, state, 0), G.normal(size=(12, 2, OBS)).astype(np.float32)


@pytest.mark.parametrize("action_steps", [None, 1, 2, 5])
def test_it_plays_a_sequence_and_tells_itself_what_it_did(action_steps: int | None) -> None:
    policy, observations = acting(action_steps=action_steps)
    d, carry, played = action_steps or J, policy.start(2), []
    for t, o in enumerate(observations):
        a, carry = policy.step(carry, o, t)
        played.append(a)
    for t in range(0, 10, d):
        for e in range(2):
            before = played[t - 1][e] if t else np.zeros(A)
            expected = unroll(policy.state.params["sequence"], observations[t, e], before[None], d)
            np.testing.assert_allclose(np.stack(played)[t : t + d, e], expected[: 12 - t], rtol=1e-3, atol=1e-4)


def test_episodes_that_begin_at_different_times() -> None:
    policy, observations = acting(action_steps=4)
    _, carry = policy.step(policy.start(2), observations[0], 0)
    fresh = policy.start(2)
    mixed = type(carry)(*(torch.stack([new[0], old[1]]) for new, old in zip(fresh, carry, strict=True)))
    a, _ = policy.step(mixed, observations[1], 1)
    np.testing.assert_array_equal(a[0], policy.step(fresh, observations[1], 0)[0][0])
    np.testing.assert_array_equal(a[1], policy.step(carry, observations[2], 1)[0][1])  # whatever it sees


def test_execute_0_is_td3_bc() -> None:
    policy, observations = acting(action_steps=0)
    assert type(policy.actor) is NoisyActor and policy.start(2) is None
    expected = np.tanh(
        ref.forward(ref.net(policy.state.params["actor"], "net."), observations[0].astype(np.float64))[0]
    )
    np.testing.assert_allclose(policy.step(None, observations[0], 0)[0], expected, rtol=1e-4, atol=1e-5)
    assert HeldPolicy(policy, 4).planned == 1
    assert HeldPolicy(policy.with_settings({"action_steps": 2}), 9).planned == 9


def test_exploration_is_told_too() -> None:
    """What comes after an action depends on the action as it was played, with its noise."""
    policy, observations = acting()
    algorithm, params = policy.algorithm, policy.state.params["sequence"]
    a, carry = policy.step(policy.start(2), observations[0], 0, explore=True)
    greedy, _ = policy.step(policy.start(2), observations[0], 0)
    assert 0.0 < np.abs(a - greedy).max() < 1.0
    second, _ = policy.step(carry, observations[0], 1)
    x = torch.as_tensor(observations[0])
    before = torch.stack([torch.zeros(2, A), torch.as_tensor(a)], 1)
    unnoisy = algorithm.apply("sequence", params, x, before, 2)[:, 1]
    noise = 0.1 * rng.normal(rng.fold_in(policy.state.key, -1), (2, J, A))[:, 1]
    np.testing.assert_allclose(second, (unnoisy + noise).clamp(-1, 1), rtol=1e-5, atol=1e-6)
