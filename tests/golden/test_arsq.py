"""ARSQ: digits and losses by hand, its network and update in float64 NumPy, demonstrations, and the bandit that digits
apart get wrong.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import TrainState, select, stack
from offrl.algorithms.arsq import ARSQ, ARSQConfig, Digits
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.samplers.demonstrations import DEMONSTRATION, BestEpisodeSampler
from offrl.errors import UserError
from offrl.finetuning.transitions import columns_for
from offrl.training.step import Step

# ---- digits


@pytest.mark.parametrize(
    ("action", "levels", "bins", "digits", "decoded"),
    [
        (0.3, 2, 7, [4, 3], 0.2857142857),
        (-1.0, 2, 7, [0, 0], -0.9795918367),
        (1.0, 2, 7, [6, 6], 0.9795918367),
        (-0.51, 3, 5, [1, 1, 0], -0.512),
        (0.99999, 1, 41, [40], 0.9756097561),
        (0.0, 1, 41, [20], 0.0),
    ],
)
def test_digits_by_hand(action: float, levels: int, bins: int, digits: list[int], decoded: float) -> None:
    code = Digits(levels, bins, 1)
    found_digits, prefixes = code.encode(torch.tensor([[action]]))
    assert found_digits.tolist() == [digits]
    known = torch.zeros(1, 1)
    for position, digit in enumerate(digits):  # as acting appends them
        assert torch.equal(known, prefixes[position])
        known = code.append(known, torch.tensor([digit]), position)
    assert float(known) == pytest.approx(decoded, abs=1e-6)


def test_digits_come_level_by_level_and_each_prefix_has_those_before_it() -> None:
    """b = 3, actions (0.9, -0.5): thirds of [-1, 1], then ninths. Middles after level 0: 2/3 and -2/3."""
    digits, prefixes = Digits(2, 3, 2).encode(torch.tensor([[0.9, -0.5]]))
    assert digits.tolist() == [[2, 0, 2, 2]]
    expected = [[0.0, 0.0], [2 / 3, 0.0], [2 / 3, -2 / 3], [8 / 9, -2 / 3]]
    torch.testing.assert_close(prefixes.squeeze(1), torch.tensor(expected))


# ---- losses


def algorithm_with(outputs: list[list[float]], values: tuple[float, float], **settings: object) -> ARSQ:
    """One state, one action dimension a position; the network is replaced by fixed numbers U [P, b], V of the state and
    of the next.
    """
    data = from_arrays(
        np.zeros((4, 1)), np.zeros((4, len(outputs))), np.zeros(4), np.ones(4, bool), action_low=-1.0, action_high=1.0
    )
    config = ARSQConfig(hidden=[4], bins=len(outputs[0]), **settings)  # type: ignore[arg-type]
    algorithm = ARSQ(config, data.spec)

    def apply(name: str, params: dict[str, Tensor], part: str, observations: Tensor, *rest: Any) -> Tensor:
        if part == "value":
            return torch.full(
                (2, len(observations)), values[1] if "target" in params else values[0], dtype=torch.float64
            )
        chosen = outputs if rest[1] is None else [outputs[rest[1]]]
        return torch.tensor(chosen, dtype=torch.float64)[:, None].expand(2, -1, len(observations), -1)

    algorithm.apply = apply  # type: ignore[method-assign,assignment]
    return algorithm


U = [[0.0, 0.1, 0.2], [0.3, 0.0, 0.0]]
OWN = torch.tensor([[2 / 3, -2 / 3]], dtype=torch.float64)  # the middles of digits 2 and 0


def test_values_by_hand() -> None:
    algorithm = algorithm_with(U, (1.0, 0.8), entropy_weight=0.1)
    values = algorithm.values({}, torch.zeros(1, 1), OWN)
    expected = torch.tensor(
        [[-0.2407605964, -0.1407605964, -0.0407605964], [-0.0094922956, -0.3094922956, -0.3094922956]],
        dtype=torch.float64,
    )
    torch.testing.assert_close(values.advantages[0, :, 0], expected, rtol=0, atol=1e-9)
    assert float(values.q[1, 0]) == pytest.approx(0.9497471079, abs=1e-9)
    probability = (values.chosen[0].sum() / 0.1).exp()
    assert float(probability) == pytest.approx(0.6049987296, abs=1e-9)
    thirds = [-2 / 3, 0.0, 2 / 3]
    every = torch.tensor([[x, y] for x in thirds for y in thirds], dtype=torch.float64)
    q = algorithm.values({}, torch.zeros(9, 1), every).q[0]
    assert float(0.1 * (q / 0.1).logsumexp(0)) == pytest.approx(1.0, abs=1e-12)  # V, whatever U


@pytest.mark.parametrize(
    ("form", "floor", "expected"),
    [("cql", -1.0, 0.9375438406), ("margin", -1.0, -0.45), ("margin", -0.01, -0.02), ("cql", 0.5, 1.0443966601)],
)
def test_imitation_by_hand(form: str, floor: float, expected: float) -> None:
    algorithm = algorithm_with(U, (1.0, 0.8), entropy_weight=0.1, imitation=form, floor=floor)
    values = algorithm.values({}, torch.zeros(1, 1), OWN)
    assert algorithm.imitation(values).squeeze(1).tolist() == pytest.approx([expected] * 2, abs=1e-9)  # both copies


def test_loss_by_hand() -> None:
    """Two rows, of which the second is terminal and no demonstration: y = .5 + .99 * .8 and .5; sums over the two
    copies.
    """
    algorithm = algorithm_with(U, (1.0, 0.8), entropy_weight=0.1, bc_weight=0.3)
    batch = {
        "observations": torch.zeros(2, 1),
        "next_observations": torch.zeros(2, 1),
        "actions": OWN.expand(2, -1),
        "rewards": torch.full((2,), 0.5, dtype=torch.float64),
        "masks": torch.tensor([1.0, 0.0], dtype=torch.float64),
        DEMONSTRATION: torch.tensor([1.0, 0.0]),
    }
    state = TrainState(
        {"critic": {}}, {"critic": {"target": torch.zeros(1)}}, {}, {}, {}, torch.zeros(()), torch.zeros(())
    )
    loss, metrics = algorithm.critic_loss({}, state, batch)
    td = 0.1171370421 + (0.9497471079 - 0.5) ** 2  # 2 copies times the mean of two rows
    assert float(metrics["critic/td"]) == pytest.approx(td, abs=1e-9)
    # not diluted by the row that is none
    assert float(metrics["critic/imitation"]) == pytest.approx(2 * 0.9375438406, abs=1e-9)
    assert float(loss) == pytest.approx(td + 0.3 * 2 * 0.9375438406, abs=1e-9)
    without = {**batch, DEMONSTRATION: torch.zeros(2)}
    assert float(algorithm.critic_loss({}, state, without)[1]["critic/imitation"]) == 0.0


# ---- the network and an update, beside NumPy


def problem(**settings: object) -> tuple[ARSQ, dict[str, Tensor]]:
    g = np.random.default_rng(0)
    s, a = g.normal(size=(40, 3)), g.uniform(-1, 1, (40, 2))
    data = from_arrays(s, a, g.normal(size=40), np.arange(40) % 10 == 9, action_low=-1.0, action_high=1.0)
    algorithm = ARSQ(ARSQConfig(**{"hidden": [16, 16], "levels": 2, "bins": 5, **settings}), data.spec)  # type: ignore[arg-type]
    sampler = algorithm.sampler()
    return algorithm, sampler(sampler.prepare(data), rng.make_key(1), 16)


def perceptron(p: dict[str, np.ndarray], part: str, x: np.ndarray) -> np.ndarray:
    """[2, B, ...]: tanh after each of two hidden layers."""
    y = np.broadcast_to(x, (2, *x.shape))
    for i in range(2):
        y = np.tanh(y @ p[f"{part}.layers.{i}.weight"] + p[f"{part}.layers.{i}.bias"])
    return y @ p[f"{part}.head.weight"] + p[f"{part}.head.bias"]


def numpy_q(p: dict[str, np.ndarray], s: np.ndarray, a: np.ndarray, alpha: float, independent: bool) -> np.ndarray:
    """[2, B], position by position from the definition: intervals [low, high] of each dimension, digits, middles,
    blocks.
    """
    low, high = -np.ones_like(a), np.ones_like(a)
    q, p_ = perceptron(p, "value", s)[..., 0], 0
    for _level in range(2):
        for d in range(2):
            prefix = np.zeros_like(a) if independent else (low + high) / 2
            u = perceptron(p, "blocks", np.concatenate([s, prefix], 1))[..., 5 * p_ : 5 * p_ + 5]
            log_pi = u / alpha - np.log(np.exp(u / alpha).sum(-1, keepdims=True))
            width = (high[:, d] - low[:, d]) / 5
            digit = np.clip(np.floor((a[:, d] - low[:, d]) / width), 0, 4).astype(int)
            q = q + alpha * log_pi[:, np.arange(len(a)), digit]
            low[:, d] += digit * width
            high[:, d] = low[:, d] + width
            p_ += 1
    return q


@pytest.mark.parametrize("independent", [False, True])
def test_values_and_target_beside_numpy(independent: bool) -> None:
    algorithm, batch = problem(independent=independent, entropy_weight=0.2, bc_weight=0.0, discount=0.9)
    state = algorithm.init(3)
    # not the targets'
    state = state._replace(params={"critic": {k: v + 0.05 for k, v in state.params["critic"].items()}})
    online, target = ({k: v.double().numpy() for k, v in p["critic"].items()} for p in (state.params, state.target))
    s, a, r, m, s1 = (
        batch[k].double().numpy() for k in ("observations", "actions", "rewards", "masks", "next_observations")
    )
    q = numpy_q(online, s, a, 0.2, independent)
    got = algorithm.values(state.params["critic"], batch["observations"], batch["actions"]).q
    np.testing.assert_allclose(got.numpy(), q, rtol=1e-4, atol=1e-5)
    y = r + 0.9 * m * perceptron(target, "value", s1)[..., 0].min(0)
    loss, _ = algorithm.critic_loss(state.params["critic"], state, batch)
    assert float(loss) == pytest.approx(((q - y) ** 2).mean(1).sum(), rel=1e-4)
    np.testing.assert_allclose(
        algorithm.q_value(state, batch["observations"], batch["actions"]).numpy(), q.min(0), rtol=1e-4, atol=1e-5
    )


def test_the_target_follows_the_parameters_of_after_the_update() -> None:
    algorithm, batch = problem(polyak=0.25)
    state = algorithm.init(0)
    after, _ = algorithm.update(state, batch, rng.make_key(0), phase=0)
    for k, v in after.target["critic"].items():
        torch.testing.assert_close(v, 0.75 * state.target["critic"][k] + 0.25 * after.params["critic"][k])
    assert any(not torch.equal(after.params["critic"][k], v) for k, v in state.params["critic"].items())


def test_initial_weights() -> None:
    """Orthogonal with gain sqrt 2, output layers with 0.01, biases 0."""
    params = problem()[0].init(0).params["critic"]
    hidden, head = params["blocks.layers.1.weight"][0], params["blocks.head.weight"][0]  # [in, out]
    torch.testing.assert_close(hidden @ hidden.T, 2.0 * torch.eye(16), rtol=0, atol=1e-5)
    torch.testing.assert_close(head @ head.T, 1e-4 * torch.eye(16), rtol=0, atol=1e-9)  # 16 x 20
    assert all(float(v.abs().max()) == 0.0 for k, v in params.items() if k.endswith("bias"))


def test_acts_by_the_smaller_advantage_of_the_copies_digit_after_digit() -> None:
    algorithm, batch = problem(entropy_weight=0.05)
    state = algorithm.init(1)
    state = state._replace(params={"critic": {k: 3.0 * v for k, v in state.params["critic"].items()}})
    p = {k: v.double().numpy() for k, v in state.params["critic"].items()}
    s = batch["observations"].double().numpy()
    low, high = -np.ones((16, 2)), np.ones((16, 2))
    for position in range(4):
        d = position % 2
        u = perceptron(p, "blocks", np.concatenate([s, (low + high) / 2], 1))[..., 5 * position : 5 * position + 5]
        a = u - 0.05 * np.log(np.exp(u / 0.05).sum(-1, keepdims=True))
        digit = a.min(0).argmax(-1)
        width = (high[:, d] - low[:, d]) / 5
        low[:, d] += digit * width
        high[:, d] = low[:, d] + width
    actions, carry = algorithm.actor(state).act(None, batch["observations"], rng.make_key(0), explore=False)
    assert carry is None
    np.testing.assert_allclose(actions.numpy(), (low + high) / 2, atol=1e-6)


def test_explores_in_proportion_to_the_softmax() -> None:
    algorithm = algorithm_with(U, (1.0, 0.8), entropy_weight=0.1)
    actor = algorithm.actor(TrainState({"critic": {}}, {}, {}, {}, {}, torch.zeros(()), torch.zeros(())))
    actions, _ = actor.act(None, torch.zeros(20_000, 1), rng.make_key(4), explore=True)
    share = ((actions[:, 0] > 0.5) & (actions[:, 1] < -0.5)).float().mean()
    assert float(share) == pytest.approx(0.6049987296, abs=0.015)  # four standard deviations


# ---- demonstrations


def ranked() -> Dataset:
    """Ten episodes of four rows; the observation is the episode's number, whose return is the number modulo 5."""
    episode = np.repeat(np.arange(10), 4)
    rewards = np.where(np.arange(40) % 4 == 0, episode % 5, 0)
    return from_arrays(
        episode[:, None], np.zeros((40, 1)), rewards, np.arange(40) % 4 == 3, action_low=-1.0, action_high=1.0
    )


@pytest.mark.parametrize("n_step", [1, 3])
def test_the_best_episodes_are_half_of_a_batch(n_step: int) -> None:
    """30% of ten episodes: numbers 4 and 9 have return 4, and of those with 3 the earlier one counts."""
    sampler = BestEpisodeSampler(n_step=n_step, share=0.3)
    source = sampler.prepare(ranked())
    batch = sampler(source, rng.make_key(0), 401)
    numbers, flags = batch["observations"][:, 0], batch[DEMONSTRATION]
    assert torch.equal(flags == 1.0, torch.isin(numbers, torch.tensor([3.0, 4.0, 9.0])))
    assert set(numbers[:200].tolist()) == {3.0, 4.0, 9.0} and set(numbers[200:].tolist()) == set(map(float, range(10)))
    assert int(flags[200:].sum()) > 30  # by content, so in both halves
    everything = BestEpisodeSampler(n_step=n_step)
    batch = everything(everything.prepare(ranked()), rng.make_key(0), 64)
    assert bool((batch[DEMONSTRATION] == 1.0).all()) and ("span" in batch) == (n_step > 1)


def test_what_is_played_is_no_demonstration() -> None:
    columns = columns_for(ranked().spec, BestEpisodeSampler(), "arsq")
    assert DEMONSTRATION in columns


def test_refusals() -> None:
    g = np.random.default_rng(0)
    wide = from_arrays(
        g.normal(size=(9, 2)),
        g.uniform(-1, 1, (9, 100)),
        np.zeros(9),
        np.ones(9, bool),
        action_low=-1.0,
        action_high=1.0,
    )
    with pytest.raises(
        UserError, match=r"algo.levels=1 x 100 action dimensions x algo.bins=41 are 4,100 outputs, of at most 4,096"
    ):
        ARSQ(ARSQConfig(hidden=[4]), wide.spec)
    with pytest.raises(UserError, match="actions"):
        from_arrays(
            g.normal(size=(9, 2)), np.full((9, 1), 1.1), np.zeros(9), np.ones(9, bool), action_low=-1.0, action_high=1.0
        )
    data = ranked()
    cut = Dataset(**{**data.__dict__, "complete": torch.zeros(10, dtype=torch.bool)})
    with pytest.raises(UserError, match=r"algo.demo_share=0.3 ranks episodes by return"):
        BestEpisodeSampler(share=0.3).prepare(cut)


# ---- the bandit: digits apart choose an action that no row has


def middle(digit: int) -> float:
    return -1.0 + (digit + 0.5) * 2.0 / 3.0


def bandit(updates: int, **settings: object) -> tuple[list[list[int]], list[float]]:
    """(greedy digits, V) of three seeds. Digits (2, 2) in a tenth of the rows with reward 1, (2, 0) with -1, (0, 0)
    with 0.1.
    """
    rows = [(2, 2, 1.0)] * 10 + [(2, 0, -1.0)] * 45 + [(0, 0, 0.1)] * 45
    actions = np.array([[middle(x), middle(y)] for x, y, _ in rows])
    rewards = np.array([r for *_, r in rows])
    data = from_arrays(np.zeros((100, 1)), actions, rewards, np.ones(100, bool), action_low=-1.0, action_high=1.0)
    config = ARSQConfig(hidden=[32, 32], bins=3, entropy_weight=0.1, learning_rate=3e-3, **settings)  # type: ignore[arg-type]
    algorithm = ARSQ(config, data.spec)
    step = Step(algorithm, algorithm.sampler().prepare(data), batch_size=64, replicas=3)
    trained, _ = step.run(stack([algorithm.init(seed) for seed in range(3)]), {}, 0, updates)
    states, here = [select(trained, i) for i in range(3)], torch.zeros(1, 1)
    greedy = [algorithm.actor(s).act(None, here, rng.make_key(0), explore=False)[0] for s in states]
    values = [float(algorithm.apply("critic", s.params["critic"], "value", here).amin()) for s in states]
    return [algorithm.digits.encode(a)[0][0].tolist() for a in greedy], values


def test_bounds_of_the_bandit() -> None:
    """V's least value from the three rows, and what the independent form implies: Q(0, 2) = 1 - (-1) + 0.1."""
    assert 0.1 * math.log(sum(math.exp(r / 0.1) for r in (1.0, -1.0, 0.1))) == pytest.approx(1.0000123404, abs=1e-10)
    assert 0.1 * math.log(sum(math.exp(r / 0.1) for r in (1.0, -1.0, 0.1, 2.1))) == pytest.approx(
        2.1000016704, abs=1e-8
    )


@pytest.mark.nightly
def test_digits_that_see_those_before_them_find_the_best_row() -> None:
    digits, values = bandit(600, bc_weight=0.0)
    assert digits == [[2, 2]] * 3 and values == pytest.approx([1.0] * 3, abs=0.05)
    digits, values = bandit(600, bc_weight=0.1)
    assert digits == [[2, 2]] * 3 and all(0.6 < v < 0.95 for v in values)


@pytest.mark.nightly
def test_digits_apart_choose_what_no_row_has() -> None:
    """Without imitation (0, 2), valued at more than any reward; with much of it the commonest good row."""
    digits, values = bandit(600, bc_weight=0.0, independent=True)
    assert digits == [[0, 2]] * 3 and all(v > 1.8 for v in values)
    digits, values = bandit(600, bc_weight=0.5, independent=True)
    assert digits == [[0, 0]] * 3 and all(v < 0.3 for v in values)
