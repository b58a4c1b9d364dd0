"""The Trajectory Transformer: network, loss and targets in float64 NumPy; beam search in a tree that can be searched by
hand.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import registry, rng
from offrl.algorithm import TrainState
from offrl.algorithms.tt.actor import TTActor
from offrl.algorithms.tt.beam_search import Plans, Search, beam_search, keep_likely
from offrl.algorithms.tt.discretizer import Bins, encode
from offrl.algorithms.tt.model import TokenModel, weighted_loss
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.errors import UserError

G = np.random.default_rng(3)
KIND = registry.get("algo", "tt")
SMALL = {
    "width": 16,
    "layers": 2,
    "heads": 2,
    "bins": 7,
    "context": 5,
    "beam_width": 4,
    "plan_horizon": 4,
    "plan_context": 3,
    "batch_size": 8,
}


def data(discrete: bool = False, ends: tuple[int, ...] = (19, 59)) -> Dataset:
    """Three episodes of 20, 20 and 20 rows; the first and the last end by a terminal unless told otherwise."""
    n = 60
    terminal, last = np.isin(np.arange(n), ends), np.arange(n) % 20 == 19
    actions = G.integers(0, 3, n) if discrete else G.uniform(-1, 1, (n, 2))
    bounds: dict[str, Any] = {"num_actions": 3} if discrete else {"action_low": -1.0, "action_high": 1.0}
    return from_arrays(G.normal(size=(n, 2)), actions, G.normal(size=n), terminal, last & ~terminal, **bounds)


def make(dataset: Dataset, **settings: Any) -> Any:
    config = KIND.fit_config(KIND.Config(**{**SMALL, **settings}), dataset)
    algorithm = KIND(config, dataset.spec)
    algorithm.runtime.source = algorithm.sampler().prepare(dataset)
    return algorithm


def trained(algorithm: Any, scale: float = 0.4) -> TrainState:
    """With larger weights than initial ones, and the data's bins."""
    state = algorithm.init(1)
    g = torch.Generator().manual_seed(5)
    params = {k: scale * torch.randn(v.shape, generator=g) for k, v in state.params["trajectory"].items()}
    return state._replace(params={"trajectory": params}, extra=algorithm.runtime.source.bins._asdict())


# ---- the network


def by_hand(p: dict[str, np.ndarray], tokens: np.ndarray, dims: int, bins: int) -> np.ndarray:
    """Logits of one layer with one head."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p[name + ".weight"] + p[name + ".bias"]

    def affine(x: np.ndarray, name: str) -> np.ndarray:
        return x @ p[name + ".weight"].T + p[name + ".bias"]

    erf, b = np.vectorize(math.erf), "trunk.blocks.0."
    x = np.stack(
        [
            p["embed.weight"][dims * bins if k == bins else k + bins * (i % dims)] + p["position"][i]
            for i, k in enumerate(tokens)
        ]
    )
    q, k, v = np.split(affine(norm(x, b + "norm1"), b + "qkv"), 3, -1)
    seen = np.zeros_like(x)
    for i in range(len(x)):
        others = [j for j in range(i + 1) if j % dims != dims - 1]
        weight = np.exp(k[others] @ q[i] / np.sqrt(x.shape[1]))
        seen[i] = weight @ v[others] / weight.sum()
    x = x + affine(seen, b + "out")
    up = affine(norm(x, b + "norm2"), b + "up")
    x = norm(x + affine(up * 0.5 * (1 + erf(up / np.sqrt(2))), b + "down"), "trunk.norm")
    return np.stack([p["head"][i % dims] @ row for i, row in enumerate(x)])


def test_network() -> None:
    torch.manual_seed(0)
    dims, bins = 4, 5
    model = TokenModel(dims, bins, 3, 8, 1, 1)
    for value in model.parameters():
        torch.nn.init.normal_(value, std=0.6)
    tokens = torch.randint(0, bins, (6, 11))
    tokens[2:, 8:] = bins  # over
    logits = model(tokens)
    p = {k: v.detach().double().numpy() for k, v in model.named_parameters()}
    expected = np.stack([by_hand(p, row, dims, bins) for row in tokens.tolist()])
    np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=1e-4, atol=1e-4)
    parts: Any = ()
    for piece in tokens.split([5, 1, 3, 2], -1):  # in any pieces, with what is remembered of those before
        last, parts = model(piece, None, parts)
    torch.testing.assert_close(last, logits[:, -1], rtol=1e-5, atol=1e-5)


def test_nothing_sees_a_value() -> None:
    model = TokenModel(4, 5, 3, 8, 2, 2)
    tokens = torch.randint(0, 5, (1, 12))
    before = model(tokens)
    for changed in range(12):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 1) % 5
        moved = (model(other) - before).abs().amax(-1)[0] > 1e-7
        expected = [changed] if changed % 4 == 3 else range(changed, 12)
        assert torch.nonzero(moved).flatten().tolist() == list(expected)


def test_only_weights_of_products_decay() -> None:
    algorithm = make(data())
    names = {k for k, v in algorithm.init(0).params["trajectory"].items()}
    spared = {k for k in names if "norm" in k or k.endswith("bias") or k in ("embed.weight", "position")}
    assert algorithm.optimizer("trajectory").decayed == names - spared and len(names - spared) == 1 + 2 * 4


# ---- what is learnt


def test_loss() -> None:
    tokens, logits = torch.randint(0, 6, (3, 8)), torch.randn(3, 7, 6)
    counted = torch.ones(3, 8, dtype=torch.bool)
    counted[1, 4:] = False
    weights = torch.tensor([1.0, 5.0, 2.0, 0.5])
    total = 0.0
    x = logits.double().numpy()
    for b, i in itertools.product(range(3), range(7)):
        probability = np.exp(x[b, i]) / np.exp(x[b, i]).sum()
        total -= float(counted[b, i + 1]) * weights[(i + 1) % 4].item() * np.log(probability[tokens[b, i + 1]])
    loss, _ = weighted_loss(logits, tokens, weights, counted)
    assert float(loss) == pytest.approx(total / 21, rel=1e-5)


@pytest.mark.parametrize("terminal", [None, -50.0])
def test_windows_and_values(terminal: float | None) -> None:
    dataset = data()
    algorithm = make(dataset, terminal_reward=terminal, discount=0.8)
    source, sampler = algorithm.runtime.source, algorithm.sampler()
    r = dataset.columns["rewards"].double().numpy()
    if terminal is not None:
        r[[19, 59]] = terminal
    numbers = []
    for t in range(60):
        rest = r[t + 1 : 20 * (t // 20 + 1)]
        value = (0.8 ** np.arange(len(rest)) * rest).sum()
        numbers.append(
            [*dataset.columns["observations"][t].tolist(), *dataset.columns["actions"][t].tolist(), r[t], value]
        )
    expected = encode(torch.tensor(np.array(numbers, np.float32)), source.bins.edges)
    assert torch.equal(source.windows.table.column("tokens", torch.arange(source.windows.count)).long(), expected)
    if terminal is not None:
        assert float(source.bins.values[4].min()) == terminal  # exactly, and alone
    seen = set()
    for i in range(20):
        batch = sampler(source, rng.make_key(i), 16)
        for window, counted in zip(batch["tokens"].view(16, 5, 6), batch["counted"].view(16, 5, 6), strict=True):
            start = next(t for t in range(60) if torch.equal(expected[t], window[0]))
            seen.add(start)
            left = 20 - start % 20
            assert torch.equal(window[:left], expected[start : start + min(left, 5)])
            assert (window[left:] == 7).all()
            # the second episode was cut off
            assert counted[:left].all() and (counted[left:] == (start // 20 != 1)).all()
    assert len(seen) > 55


def test_published_defaults() -> None:
    c = KIND.Config()
    published = {
        "learning_rate": 6e-4,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "batch_size": 256,
        "context": 10,
        "width": 128,
        "layers": 4,
    }
    published |= {
        "heads": 4,
        "dropout": 0.1,
        "bins": 100,
        "discount": 0.99,
        "action_weight": 5,
        "reward_weight": 1,
        "value_weight": 1,
    }
    published |= {
        "beam_expand": 2,
        "action_cdf": 0.6,
        "observation_top_k": 1,
        "plan_context": 5,
        "plan_every": 1,
        "plan_max_length": None,
    }
    assert {k: getattr(c, k) for k in published} == published
    adam = make(data(), batch_size=8).optimizer("trajectory")
    assert (adam.beta1, adam.beta2, adam.warmup_steps, adam.decay_steps, adam.floor) == (0.9, 0.95, 8, 152, 0.1)
    for k in (1, 8, 20, 84, 160, 200, 312):  # the authors' rule: down to the 20th time through the data, and up again
        t = k / 8
        share = t if t < 1 else max(0.1, 0.5 * (1 + math.cos(math.pi * (t - 1) / 19)))
        assert float(adam.rate(torch.tensor(k - 1.0))) == pytest.approx(6e-4 * share, rel=1e-4)


def test_the_whole_loss_weighs_by_kind() -> None:
    algorithm = make(data(), action_weight=3.0, reward_weight=2.0, value_weight=0.5, dropout=0.0)
    state = trained(algorithm)
    batch = algorithm.sampler()(algorithm.runtime.source, rng.make_key(0), 8)
    loss, metrics = algorithm.trajectory_loss(state.params["trajectory"], state, batch, rng.make_key(0))
    total, counted = 0.0, batch["counted"].view(8, 5, 6).clone()
    counted[:, 0, 0] = False  # nothing predicts the first token
    for kind, weight, dims in (
        ("observation", 1, [0, 1]),
        ("action", 3, [2, 3]),
        ("reward", 2, [4]),
        ("value", 0.5, [5]),
    ):
        total += weight * float(metrics[f"trajectory/{kind}"]) * float(counted[..., dims].sum())
    assert float(loss) == pytest.approx(total / (8 * 29), rel=1e-4)


# ---- planning


def test_unlikely_tokens_are_left_out() -> None:
    def left(p: list[float], **limits: Any) -> list[int]:
        return torch.nonzero(keep_likely(torch.tensor(p).log(), **limits) > -torch.inf).flatten().tolist()

    p = [0.3, 0.05, 0.15, 0.4, 0.1]
    assert left(p) == left(p, top_k=9) == [0, 1, 2, 3, 4]
    assert left(p, cdf=0.2) == [0, 2, 3]  # 0.05 and 0.1 have less than 0.2 together
    assert left(p, cdf=0.5) == [0, 3] and left(p, cdf=0.999) == [3] and left(p, top_k=3) == [0, 2, 3]
    assert left([0.25] * 4, cdf=0.6) == [0, 1, 2, 3]  # the most probable always stay
    assert left([0.3, 0.3, 0.0, 0.4], cdf=0.5) == [3]  # as improbable as one that goes


class Tree:
    """A model of 1 + 1 + 2 tokens a step, whose probabilities are a fixed function of all tokens so far but values."""

    bins = 3

    def __init__(self) -> None:
        self.calls: list[int] = []

    @staticmethod
    @functools.cache
    def logits(tokens: tuple[int, ...]) -> np.ndarray:
        shown = [k for i, k in enumerate(tokens) if i % 4 != 3]
        x = np.random.default_rng([len(tokens), *shown]).normal(size=Tree.bins + 1)
        if len(tokens) % 4 == 0 and tokens[-3] == 2:  # an action after which the episode is likely to be over
            x[3] += 3
        return x

    def __call__(self, tokens: Tensor, past: Any) -> tuple[Tensor, Any]:
        whole = tokens if past is None else torch.cat([past, tokens], -1)
        self.calls.append(whole.shape[-1])
        return torch.tensor(np.stack([self.logits(tuple(row)) for row in whole.tolist()]), dtype=torch.float32), whole


REWARDS, VALUES = np.array([-1.0, 0.5, 3.0]), np.array([0.0, 4.0, -2.0])


def walk(tree: Tree, prefix: tuple[int, ...], actions: tuple[int, ...], discount: float, context: int) -> list[float]:
    """Scores after each step of a plan, in a window that forgets all but the last context - 1 steps when it has
    `context` of them.
    """

    def probabilities(tokens: tuple[int, ...]) -> np.ndarray:
        x = np.exp(tree.logits(tokens))
        return x / x.sum()

    tokens, earned, scores, over = prefix, 0.0, [], False
    for t, action in enumerate(actions):
        if over:
            scores.append(earned)
            continue
        tokens = (*tokens, action)
        reward = probabilities(tokens)
        tokens = (*tokens, int(reward[:3].argmax()))
        value = probabilities(tokens)
        earned += discount**t * (reward[:3] @ REWARDS)
        scores.append(earned + discount ** (t + 1) * (value[:3] @ VALUES))
        tokens = (*tokens, int(value[:3].argmax()))
        if len(tokens) // 4 == context:
            tokens = tokens[len(tokens) - 4 * (context - 1) :]
        state = int(probabilities(tokens).argmax())
        over, tokens = state == 3, (*tokens, state)
    return scores


def search(**settings: Any) -> Search:
    return Search(**{"horizon": 3, "width": 27, "expand": 40, "context": 3, "longest": 3, "discount": 0.9, **settings})


def found(tree: Any, prefixes: Tensor, how: Search, seed: int = 0) -> Plans:
    values = torch.tensor(REWARDS, dtype=torch.float32), torch.tensor(VALUES, dtype=torch.float32)
    return beam_search(tree, prefixes, (1, 1), values, torch.ones(4, 3, dtype=torch.bool), how, rng.make_key(seed))


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_wide_beam_finds_the_best_of_all_plans(steps: int) -> None:
    prefixes = torch.tensor(G.integers(0, 3, (4, 4 * steps + 1)))
    tree = Tree()
    plans = found(tree, prefixes, search())
    ended = 0
    for e, prefix in enumerate(prefixes.tolist()):
        all_scores = {a: walk(tree, tuple(prefix), a, 0.9, 3) for a in itertools.product(range(3), repeat=3)}
        ended += sum(s[1] == s[2] for s in all_scores.values())
        best = max(all_scores.values(), key=lambda s: s[-1])[-1]
        assert float(plans.score[e, 0]) == pytest.approx(best, abs=1e-5)
        for actions, score in zip(plans.actions[e, :, :, 0].tolist(), plans.score[e].tolist(), strict=True):
            # each beam has the score of its own plan
            assert score == pytest.approx(all_scores[tuple(actions)][-1], abs=1e-5)
        assert (plans.score[e, 1:] <= plans.score[e, 0] + 1e-6).all()
    assert ended, "some plans must end an episode, or this tests less than it says"
    assert max(tree.calls) < 12  # the window


def test_one_beam_is_greedy_by_the_first_score() -> None:
    """Kept at each step is what promises most by then, which need not lead to the best plan."""
    prefixes, tree = torch.tensor(G.integers(0, 3, (8, 1))), Tree()
    one, many = found(tree, prefixes, search(width=1, expand=100)), found(tree, prefixes, search())
    for e, prefix in enumerate(prefixes.tolist()):
        chosen: tuple[int, ...] = ()
        for _ in range(3):
            chosen = max(((*chosen, a) for a in range(3)), key=lambda a: walk(tree, tuple(prefix), a, 0.9, 3)[-1])
        assert float(one.score[e, 0]) == pytest.approx(walk(tree, tuple(prefix), chosen, 0.9, 3)[-1], abs=1e-5)
    assert (one.score[:, 0] <= many.score[:, 0] + 1e-5).all() and (one.score[:, 0] < many.score[:, 0] - 0.1).any()


def test_copies_do_not_fill_the_beams() -> None:
    plans = found(Tree(), torch.tensor([[0], [1], [2]]), search(horizon=1, width=3, expand=50))
    assert all(sorted(row) == [0, 1, 2] for row in plans.actions.flatten(1).tolist())
    few = found(Tree(), torch.tensor([[0]]), search(horizon=2, width=40, expand=20))
    distinct = {tuple(row) for row in few.actions[0, :, :, 0].tolist()}
    assert len(distinct) == 7, "one of the first actions ends the episode"
    assert few.actions.shape == (1, 40, 2, 1) and few.score.isfinite().all()  # copies where there is nothing else


def test_unseen_tokens_and_ends_are_not_drawn() -> None:
    seen = torch.ones(4, 3, dtype=torch.bool)
    seen[1, 0] = seen[0, 1] = False

    def sure(tokens: Tensor, past: Any) -> tuple[Tensor, Any]:
        return torch.tensor([5.0, 4.0, 1.0, 9.0]).expand(len(tokens), 4), tokens[:, :1]

    values = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 1.0, 1.0])
    plans = beam_search(
        sure, torch.zeros(1, 1, dtype=torch.int64), (1, 1), values, seen, search(horizon=2), rng.make_key(0)
    )
    assert set(plans.actions.flatten().tolist()) == {1, 2}  # not 0, which does not occur, nor an end within a step
    p = np.exp([5, 4, 1, 9.0])
    p /= p.sum()
    # the next observation says that it is over
    assert float(plans.score[0, 0]) == pytest.approx(p[:3] @ [1, 2, 3], rel=1e-5)


@pytest.mark.parametrize(("steps", "longest"), [(0, 3), (2, 3), (2, 4), (1, 5)])
def test_cached_planning_equals_recomputation(steps: int, longest: int) -> None:
    algorithm = make(data(), plan_max_length=longest, action_cdf=0.0)
    state = trained(algorithm)
    prefix = torch.randint(0, 7, (3, 6 * steps + 2))
    actor = algorithm.actor(state)
    cached = actor.plan(prefix, rng.make_key(1))

    def again(tokens: Tensor, past: Any) -> tuple[Tensor, Any]:
        whole = tokens if past is None else torch.cat([past, tokens], -1)
        return algorithm.apply("trajectory", state.params["trajectory"], whole)[:, -1], whole

    bins = Bins(**state.extra)
    plain = beam_search(
        again, prefix, (2, 2), (bins.values[-2], bins.values[-1]), bins.occupied, actor.search, rng.make_key(1)
    )
    assert torch.equal(cached.actions, plain.actions)
    torch.testing.assert_close(cached.score, plain.score, rtol=1e-5, atol=1e-5)


# ---- acting


@pytest.mark.parametrize("discrete", [False, True])
def test_planning_knows_the_last_steps(discrete: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = make(data(discrete))
    state, prefixes = trained(algorithm), []
    plan = TTActor.plan
    monkeypatch.setattr(TTActor, "plan", lambda self, prefix, key: prefixes.append(prefix) or plan(self, prefix, key))
    actor = algorithm.actor(state)
    carry, edges = actor.start(2), state.extra["edges"]
    o, a = algorithm.sizes
    expected: list[Tensor] = []
    for t in range(5):
        obs, reward = torch.randn(2, 2), torch.tensor([0.3, -0.6]) * t
        action, carry = actor.act(carry, obs, rng.make_key(9), explore=False)
        now = encode(obs, edges[:o])
        # two whole steps and this observation
        assert torch.equal(prefixes[-1], torch.cat([*expected[-2:], now], -1)), t
        numbers = torch.cat([action.view(2, a).float(), reward.unsqueeze(-1)], -1)
        expected.append(torch.cat([now, encode(numbers, edges[o:-1]), torch.zeros(2, 1, dtype=torch.int64)], -1))
        carry = actor.observe_reward(carry, reward)


def test_several_steps_of_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = make(data(), plan_every=3)
    state, made = trained(algorithm), []
    plan = TTActor.plan

    def spy(self: Any, prefix: Tensor, key: Tensor) -> Plans:
        made.append(plan(self, prefix, key))
        return made[-1]

    monkeypatch.setattr(TTActor, "plan", spy)
    actor = algorithm.actor(state)
    carry, actions = actor.start(4), []
    for _ in range(7):
        action, carry = actor.act(carry, torch.randn(4, 2), rng.make_key(0), explore=False)
        actions.append(encode(action, state.extra["edges"][2:4]))
        carry = actor.observe_reward(carry, torch.zeros(4))
    assert len(made) == 3
    for t, action in enumerate(actions):
        assert torch.equal(action, made[t // 3].actions[:, 0, t % 3])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"plan_every": 5}, "plan_every=5 is more than the steps of a plan"),
        ({"plan_max_length": 6}, "plan_max_length=6 must be at least algo.plan_context=3, and at most algo.context=5"),
        ({"plan_max_length": 2}, "plan_max_length=2 must be"),
        ({"heads": 3}, "width=16 is no multiple of algo.heads=3"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(data(), **settings)


def test_too_many_actions() -> None:
    with pytest.raises(UserError, match=r"3 actions, which do not fit into algo\.bins=2"):
        make(data(True), bins=2)


def test_initial_weights_are_the_authors() -> None:
    """All N(0, 0.02) but the output layer: uniform in +-1/sqrt(width), as EinLinear's."""
    net = TokenModel(dims=5, bins=20, steps=3, width=64, layers=1, heads=2)
    assert float(net.head.abs().max()) <= 0.125
    assert float(net.head.std()) == pytest.approx(0.125 / 3**0.5, rel=0.1)
    assert float(net.embed.weight.std()) == pytest.approx(0.02, rel=0.1)
