"""Values of goals against shortest paths and exact occupancies in a small maze, and signs of the high level's advantage
in a corridor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from offrl import registry
from offrl.algorithm import select, stack
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.training.step import Step

pytestmark = pytest.mark.nightly

MAZE = [
    "#########",
    "#...#...#",
    "#.#.#.#.#",
    "#.#...#.#",
    "#.#####.#",
    "#.......#",
    "#.#.#.#.#",
    "#...#...#",
    "#########",
]
CELLS = [(i, j) for i, line in enumerate(MAZE) for j, c in enumerate(line) if c == "."]
NUMBER = {c: n for n, c in enumerate(CELLS)}
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
PLACE = np.array(CELLS, np.float32) / 4.0 - 1.0  # [cells, 2]


def step_of(cell: int, move: int) -> int:
    i, j = CELLS[cell]
    return NUMBER.get((i + MOVES[move][0], j + MOVES[move][1]), cell)


TABLE = np.array([[step_of(c, m) for m in range(4)] for c in range(len(CELLS))])  # [cells, moves]


def shortest() -> np.ndarray:
    """Steps from each cell to each other one."""
    steps = np.full((len(CELLS), len(CELLS)), np.inf)
    np.fill_diagonal(steps, 0.0)
    for _ in CELLS:
        steps = np.minimum(steps, 1.0 + steps[TABLE].min(1))
    return steps


def walks(episodes: int = 400, length: int = 60, seed: int = 0) -> Dataset:
    """Uniform random walks. The action is the move as a vector."""
    g = np.random.default_rng(seed)
    cell, rows, moves = g.integers(len(CELLS), size=episodes), [], []
    for _ in range(length):
        move = g.integers(4, size=episodes)
        rows.append(cell)
        moves.append(move)
        cell = TABLE[cell, move]
    place = PLACE[np.stack(rows, 1).ravel()]
    action = np.array(MOVES, np.float32)[np.stack(moves, 1).ravel()]
    ends = np.arange(len(place)) % length == length - 1
    return from_arrays(place, action, np.zeros(len(place)), episode_ends=ends, action_low=[-1.0], action_high=[1.0])


def trained(name: str, dataset: Dataset, updates: int, seeds: int = 1, **settings: Any) -> tuple[Any, list[Any]]:
    """(algorithm, the state of each seed)."""
    kind = registry.get("algo", name)
    common = {"hidden": [64, 64], "batch_size": 256, "learning_rate": 1e-3, "discount": 0.95, **settings}
    if hasattr(kind.Config, "polyak"):
        common.setdefault("polyak", 0.02)
    algorithm = kind(kind.Config(**common), dataset.spec)
    source = algorithm.sampler().prepare(dataset)
    step = Step(algorithm, source, batch_size=256, replicas=seeds, mode="eager")
    state, _ = step.run(stack([algorithm.init(s) for s in range(seeds)]), {}, 0, updates)
    return algorithm, [select(state, n) for n in range(seeds)]


def all_pairs() -> tuple[torch.Tensor, torch.Tensor]:
    count = len(CELLS)
    place = torch.tensor(PLACE)
    return place.repeat_interleave(count, 0), place.repeat(count, 1)


def distances(algorithm: Any, state: Any) -> np.ndarray:
    with torch.no_grad():
        found = algorithm.distances(state, *all_pairs())
    return np.asarray(found.numpy().reshape(len(CELLS), len(CELLS)))


OWN: dict[str, dict[str, Any]] = {
    "gcivl": {"expectile": 0.9},
    "gciql": {"expectile": 0.9},
    "qrl": {"latent": 64},
    "hiql": {"expectile": 0.9, "subgoal_steps": 5},
    "ota": {"expectile": 0.9, "subgoal_steps": 5, "option_steps": 3},
}


@pytest.mark.parametrize("name", OWN)
def test_values_rank_goals_by_shortest_paths(name: str) -> None:
    algorithm, states = trained(name, walks(), 3000, **OWN[name])
    found, exact = distances(algorithm, states[0]), shortest()
    each = [spearmanr(found[c], exact[c]).statistic for c in range(len(CELLS))]
    print(f"{name}: rank correlation with shortest paths, mean over starts: {np.mean(each):.3f}")
    # a goal counts as reached in the very row it was taken from, not wherever one stands there: that blurs what is
    # learnt from rewards
    assert np.mean(each) > (0.95 if name == "qrl" else 0.8)
    if name == "qrl":  # d(s, g) <= d(s, w) + d(w, g), for all w
        assert (found[:, None, :] <= found[:, :, None] + found[None, :, :] + 1e-3).all()
        # in proportion; the multiplier, which learns as slowly as the rest, still rises, so that a step is not yet 1
        # long
        assert np.corrcoef(found.ravel(), exact.ravel())[0, 1] > 0.97


def test_contrastive_values_rank_by_discounted_occupancy() -> None:
    """Q(s, a, g) is log p(g | s, a) - log p(g) up to a constant, p(g | s, a) the discounted occupancy of the data's
    policy.
    """
    discount, length = 0.9, 60
    dataset = walks(episodes=1500, length=length)
    algorithm, states = trained("crl", dataset, 4000, discount=discount, latent=64)
    uniform = np.stack([np.eye(len(CELLS))[TABLE[:, m]] for m in range(4)])  # [moves, cells, cells]
    walk = uniform.mean(0)
    # of what follows a state, that one included
    ahead = (1 - discount) * np.linalg.inv(np.eye(len(CELLS)) - discount * walk)
    marginal = np.linalg.matrix_power(walk, 1000).mean(0)
    found, exact = [], []
    with torch.no_grad():
        for m, move in enumerate(MOVES):
            actions = torch.tensor(move, dtype=torch.float32).expand(len(CELLS) ** 2, 2)
            found.append(algorithm.q(states[0], *all_pairs(), actions).numpy().reshape(len(CELLS), -1))
            exact.append(np.log(uniform[m] @ ahead) - np.log(marginal))
    rank = spearmanr(np.concatenate(found).ravel(), np.concatenate(exact).ravel()).statistic
    print(f"crl: rank correlation with log occupancies {rank:.3f}")
    assert rank > 0.85


def corridor(length: int = 300, episodes: int = 60, seed: int = 0) -> Dataset:
    """Walks to and fro in a corridor, a place a step with some slips; what is observed is the place and noise."""
    g = np.random.default_rng(seed)
    place, way, rows, moves = g.integers(length, size=episodes), g.choice([-1, 1], episodes), [], []
    for _ in range(500):
        way = np.where(g.random(episodes) < 0.01, -way, way)
        move = np.where(g.random(episodes) < 0.2, 0, way)
        rows.append(place)
        moves.append(move)
        place = np.clip(place + move, 0, length - 1)
    position = np.stack(rows, 1).ravel() / (length / 2) - 1.0
    observations = np.stack([position, 0.3 * g.standard_normal(len(position))], 1).astype(np.float32)
    ends = np.arange(len(position)) % 500 == 499
    actions = np.stack(moves, 1).ravel()[:, None].astype(np.float32)
    return from_arrays(
        observations, actions, np.zeros(len(position)), episode_ends=ends, action_low=[-1.0], action_high=[1.0]
    )


def sign_errors(algorithm: Any, state: Any, length: int, steps: int, least: int) -> float:
    """The share of far goals for which V(w, g) - V(s, g) has the wrong sign, with w `steps` places nearer to g than
    s.
    """
    g = np.random.default_rng(1)
    start, goal = g.integers(length, size=4000), g.integers(length, size=4000)
    gap = goal - start
    far = np.abs(gap) > least
    start, goal = start[far], goal[far]
    nearer = start + steps * np.sign(goal - start)

    def seen(place: np.ndarray) -> torch.Tensor:
        noise = 0.3 * g.standard_normal(len(place))
        return torch.tensor(np.stack([place / (length / 2) - 1.0, noise], 1), dtype=torch.float32)

    aim = seen(goal)
    with torch.no_grad():
        gain = algorithm.distances(state, seen(start), aim) - algorithm.distances(state, seen(nearer), aim)
    return float((gain <= 0.0).float().mean())


def test_options_have_fewer_signs_wrong_in_a_long_corridor() -> None:
    """OTA, arXiv 2505.12737, section 4: with values of options the high level's advantage points the right way more
    often.
    """
    length, dataset = 300, corridor()
    errors = {}
    for name, own in (("hiql", {}), ("ota", {"option_steps": 15})):
        algorithm, states = trained(name, dataset, 2500, seeds=2, discount=0.97, subgoal_steps=25, **own)
        errors[name] = [sign_errors(algorithm, s, length, 25, 100) for s in states]
    print(
        "share of wrong signs, goals more than 100 places away: "
        f"{ ({k: np.round(v, 3).tolist() for k, v in errors.items()}) }"
    )
    assert np.mean(errors["ota"]) < 0.5 * np.mean(errors["hiql"])
    assert max(errors["ota"]) < min(errors["hiql"])
