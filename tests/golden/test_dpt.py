"""DPT: its loss at each length of the context in float64 NumPy, what its contexts are, and what it remembers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import registry, rng
from offrl.algorithm import TrainState
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.samplers.contexts import ContextSampler
from offrl.data.transforms.columns import scale_rewards
from tests.support.reference.transformer import affine, numpy_of, transformer

OBS, A, K, LAYERS, HEADS = 3, 2, 4, 2, 2
SIZES = (5, 9, 3)  # rows of each task, in episodes of their own that do not stand together


def data(discrete: bool = True) -> Dataset:
    """Tasks 7, 2 and 11, each in two episodes."""
    g, parts = np.random.default_rng(0), [(7, 2), (2, 4), (11, 1), (7, 3), (2, 5), (11, 2)]
    tasks, rows = np.concatenate([np.full(n, task) for task, n in parts]), sum(SIZES)
    ends = np.zeros(rows, bool)
    ends[np.cumsum([n for _, n in parts]) - 1] = True
    columns: dict[str, Any] = {"rewards": g.normal(size=rows), "terminations": ends, "tasks": tasks}
    if discrete:
        columns |= {"actions": g.integers(0, K, rows), "num_actions": K, "optimal_actions": g.integers(0, K, rows)}
    else:
        columns |= {"actions": g.uniform(-2, 2, (rows, A)), "action_low": -2.0, "action_high": 2.0}
        columns |= {"optimal_actions": g.uniform(-2, 2, (rows, A))}
    return from_arrays(g.normal(size=(rows, OBS)), **columns)


def make(dataset: Dataset, **settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "dpt")
    small = {"width": 8, "layers": LAYERS, "heads": HEADS, "context": 4, "activation": "relu"}
    algorithm = kind(kind.fit_config(kind.Config(**{**small, **settings}), dataset), dataset.spec)
    return algorithm, algorithm.init(3)


def outputs(params: dict[str, Tensor], tokens: np.ndarray) -> np.ndarray:
    """What the head gives after the last of the tokens [T, size]."""
    p = numpy_of(params)
    x = transformer(affine(tokens, p, "embed"), numpy_of(params, "trunk."), LAYERS, HEADS)
    return affine(x[-1], p, "head.net.head")


@pytest.mark.parametrize("discrete", [True, False])
def test_loss_after_every_length_of_the_context(discrete: bool) -> None:
    """The query first, then the transitions; what is no transition counts nothing."""
    dataset = data(discrete)
    algorithm, state = make(dataset, context=6)
    sampler = algorithm.sampler()
    batch = sampler(sampler.prepare(dataset), rng.make_key(0), 5)
    x = {k: v.double().numpy() for k, v in batch.items()}
    actions = np.eye(K)[batch["actions"].numpy()] if discrete else x["actions"]
    assert not batch["valid"].all(), "some tasks have fewer transitions than a context"
    losses: list[list[float]] = []
    for b in range(5):
        query = np.concatenate([x["queries"][b], np.zeros(actions.shape[-1] + OBS + 1)])
        seen = np.concatenate([x["observations"], actions, x["next_observations"], x["rewards"][..., None]], -1)[b]
        losses.append([])
        for length in range(int(x["valid"][b].sum()) + 1):
            out = outputs(state.params["actor"], np.stack([query, *seen[:length]]))
            if discrete:
                losses[-1].append(-float((out - np.log(np.exp(out).sum()))[int(x["labels"][b])]))
            else:
                losses[-1].append(float((0.5 * (np.tanh(out) - x["labels"][b]) ** 2 + 0.5 * np.log(2 * np.pi)).sum()))
    loss, metrics = algorithm.actor_loss(state.params["actor"], state, batch, rng.make_key(1))
    assert float(loss) == pytest.approx(np.mean([v for row in losses for v in row]), rel=1e-4)
    assert float(metrics["actor/loss_empty"]) == pytest.approx(np.mean([row[0] for row in losses]), rel=1e-4)
    assert float(metrics["actor/loss_full"]) == pytest.approx(np.mean([row[-1] for row in losses]), rel=1e-4)


@pytest.mark.parametrize("shuffle", [True, False])
def test_contexts_are_of_one_task_and_the_label_does_not_depend_on_them(shuffle: bool) -> None:
    dataset = data()
    columns = {k: v.numpy() for k, v in dataset.columns.items()}
    row_of = {o.tobytes(): i for i, o in enumerate(columns["observations"])}
    sampler = ContextSampler(4, shuffle)
    source, orders, asked = sampler.prepare(dataset), set(), {}
    for i in range(60):
        batch = sampler(source, rng.make_key(i), 8)
        for b in range(8):
            query = row_of[batch["queries"][b].numpy().tobytes()]
            many = int(batch["valid"][b].sum())
            rows = [row_of[o.numpy().tobytes()] for o in batch["observations"][b][:many]]
            task = columns["tasks"][query]
            assert (columns["tasks"][rows] == task).all() and len(set(rows)) == many == min(
                4, int((columns["tasks"] == task).sum())
            )
            assert batch["valid"][b][:many].all() and not batch["valid"][b][many:].any()
            for name in ("actions", "rewards", "next_observations"):
                assert np.array_equal(batch[name][b][:many].numpy(), columns[name][rows])
            assert int(batch["labels"][b]) == columns["optimal_actions"][query]
            asked.setdefault(query, set()).add(tuple(sorted(rows)))
            orders.add(tuple(rows) == tuple(sorted(rows)))
    assert orders == ({True, False} if shuffle else {True})
    assert len(asked) == sum(SIZES), "every row is asked about"
    assert all(
        len(seen) == (6 if columns["tasks"][query] == 2 else 2 if columns["tasks"][query] == 7 else 1)
        for query, seen in asked.items()
    )


def test_continuous_labels_are_scaled_like_actions() -> None:
    dataset = data(discrete=False)
    sampler = ContextSampler(2)
    found = sampler(sampler.prepare(dataset), rng.make_key(0), 64)["labels"]
    allowed = dataset.columns["optimal_actions"] / 2.0
    assert all((row - allowed).abs().sum(1).min() < 1e-6 for row in found)


def test_weights_of_episodes_decide_what_is_asked() -> None:
    dataset = data()
    only = dataclasses.replace(dataset, weights=torch.tensor([0.0, 0.0, 0.0, 0.0, 17 / 5, 0.0], dtype=torch.float64))
    sampler = ContextSampler(9)
    batch = sampler(sampler.prepare(only), rng.make_key(0), 32)
    rows = {tuple(r.tolist()) for r in dataset.columns["observations"][10:15]}
    assert {tuple(r.tolist()) for r in batch["queries"]} == rows and bool(batch["valid"].all()), (
        "the context is all of the task"
    )


# ---- acting


def bandit(algorithm: Any, state: TrainState, steps: int, seed: int = 0) -> tuple[list[Tensor], Any]:
    """Distributions while it plays a bandit of which nothing but rewards is to be seen."""
    actor = algorithm.actor(state)
    carry, found, obs = actor.start(2), [], torch.full((2, OBS), 0.7)
    for t in range(steps):
        dist, _ = actor.predict(actor.extended(carry, obs), obs)
        found.append(dist[0])
        _, carry = actor.act(carry, obs, rng.make_key(t), explore=True)
        carry = actor.observe_reward(carry, rng.normal(rng.fold_in(rng.make_key(seed), t), (2,)))
    return found, carry


def test_cached_decoding_is_full_recomputation() -> None:
    """Also beyond the context's length, where the oldest transitions are forgotten."""
    dataset = data()
    kept, state = make(dataset, context=6, one_state=True)
    plain, _ = make(dataset, context=6, one_state=False)
    (a, carry), (b, _) = bandit(kept, state, 10), bandit(plain, state, 10)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=0)
    assert carry.cache and carry.cached_count == 6 and not torch.equal(a[0], a[5])


def test_acts_as_the_loss_sees_it() -> None:
    """What was seen, as a batch of training, gives the same distribution at its end."""
    dataset = scale_rewards(data(), 2.0, 0.5)
    algorithm, state = make(dataset, context=6)
    actor = algorithm.actor(state)
    carry, transitions = actor.start(1), []
    obs = torch.randn(6, 1, OBS, generator=torch.Generator().manual_seed(0))
    for t in range(5):
        action, carry = actor.act(carry, obs[t], rng.make_key(t), explore=True)
        carry = actor.observe_reward(carry, torch.tensor([float(t)]))
        transitions.append(torch.cat([obs[t, 0], torch.eye(K)[action[0]], obs[t + 1, 0], torch.tensor([float(t)])]))
    query = torch.cat([obs[5, 0], torch.zeros(K + OBS + 1)])
    out = outputs(state.params["actor"], torch.stack([query, *transitions]).double().numpy())
    dist, _ = actor.predict(actor.extended(carry, obs[5]), obs[5])
    np.testing.assert_allclose(dist[0][0].numpy(), out - np.log(np.exp(out).sum()), atol=1e-5)


@pytest.mark.parametrize("context", [20, 4])
@pytest.mark.parametrize("one_state", [True, False])
def test_a_new_episode_keeps_what_was_seen_and_nothing_else(one_state: bool, context: int) -> None:
    """Two episodes of two tasks, of which the second's first one ends two steps early, and what each would remember
    alone.
    """
    dataset = data()
    algorithm, state = make(dataset, context=context, one_state=one_state)
    actor = algorithm.actor(state)
    g = torch.Generator().manual_seed(1)
    obs, rewards = torch.randn(9, 2, OBS, generator=g), torch.randn(9, 2, generator=g)
    if one_state:
        obs[:] = obs[0, 0]

    def play(rows: list[int], lengths: list[int]) -> Tensor:
        carry = actor.start(len(rows))
        for t in range(max(lengths)):
            running = torch.tensor([t < n for n in lengths]).unsqueeze(-1)
            now = obs[t, rows] if one_state else torch.where(running, obs[t, rows], 0.0)
            _, carry = actor.act(carry, now, rng.make_key(5), explore=False)
            carry = actor.observe_reward(carry, rewards[t, rows])
        last = torch.stack([obs[n, row] for n, row in zip(lengths, rows, strict=True)])
        carry = actor.new_episode(carry, last, torch.tensor(lengths))
        for t in (6, 7):
            _, carry = actor.act(carry, obs[t, rows], rng.make_key(5), explore=False)
            carry = actor.observe_reward(carry, rewards[t, rows])
        return actor.predict(actor.extended(carry, obs[8, rows]), obs[8, rows])[0][0]

    together, first, second = play([0, 1], [5, 3]), play([0], [5]), play([1], [3])
    torch.testing.assert_close(together, torch.cat([first, second]), atol=1e-5, rtol=0)
    if not one_state:
        assert not torch.allclose(first, play([0], [4]), atol=1e-4), "the transitions of the first episode count"


def test_an_update_is_adamw_on_the_loss() -> None:
    dataset = data()
    algorithm, state = make(dataset, learning_rate=0.01, weight_decay=0.1)
    sampler = algorithm.sampler()
    batch, key = sampler(sampler.prepare(dataset), rng.make_key(0), 5), rng.make_key(1)
    leaves = {k: v.clone().requires_grad_() for k, v in state.params["actor"].items()}
    algorithm.actor_loss(leaves, state, batch, key)[0].backward()
    new, _ = algorithm.update(state, batch, key, phase=0)
    for name, leaf in leaves.items():  # the first step of Adam is the sign of the gradient
        assert leaf.grad is not None
        expected = leaf * (1 - 0.01 * 0.1) - 0.01 * leaf.grad / (leaf.grad.abs() + 1e-8)
        clear = leaf.grad.abs() > 1e-5  # the sign of a rounding error is none
        torch.testing.assert_close(new.params["actor"][name][clear], expected[clear], atol=1e-5, rtol=1e-4)
