"""Shorter horizons: what n-step targets and values of far subgoals do in a corridor, in the updates that it takes to
learn.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry
from offrl.algorithm import select, stack, with_config
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.evaluation.policy import TrainedPolicy
from offrl.training.step import Step

pytestmark = pytest.mark.nightly

LENGTH, RIGHT, DISCOUNT, SEEDS = 40, 0.7, 0.97, 3


def observed(place: np.ndarray, length: int) -> np.ndarray:
    return np.stack([2.0 * place / length - 1.0, np.ones(len(place))], 1).astype(np.float32)


def corridor() -> Dataset:
    """Walks of 60 steps at most on a line of 40 places, to the right with probability 0.7; a reward of 1 at the end of
    the line.
    """
    g, rows = np.random.default_rng(0), []
    for _ in range(150):
        place = int(g.integers(0, LENGTH))
        for t in range(60):
            move = 1 if g.random() < RIGHT else -1
            following = min(max(place + move, 0), LENGTH)
            done = following == LENGTH
            rows.append((place, 0.8 * move, float(done), done, t == 59 and not done, following))
            place = following
            if done:
                break
    place, move, reward, done, cut, following = (np.array(column) for column in zip(*rows, strict=True))
    states, after = observed(place, LENGTH), observed(following, LENGTH)
    return from_arrays(
        states, move[:, None], reward, done, cut, next_observations=after, action_low=[-1.0], action_high=[1.0]
    )


def exact() -> np.ndarray:
    """Q of the data's own behaviour at a step to the right, from each place."""
    step, reward = np.zeros((LENGTH, LENGTH)), np.zeros(LENGTH)
    for place in range(LENGTH):
        for share, move in ((RIGHT, 1), (1.0 - RIGHT, -1)):
            if place + move < LENGTH:
                step[place, max(place + move, 0)] += share
            else:
                reward[place] += share
    v = np.linalg.solve(np.eye(LENGTH) - DISCOUNT * step, reward)
    return np.append(DISCOUNT * v[1:], 1.0)


def trained(name: str, dataset: Dataset, updates: int, **settings: Any) -> tuple[Any, list[Any]]:
    """(algorithm, the state of each seed)."""
    kind = registry.get("algo", name)
    algorithm = kind(kind.Config(hidden=[64, 64], **settings), dataset.spec)
    step = Step(algorithm, algorithm.sampler().prepare(dataset), batch_size=settings["batch_size"], replicas=SEEDS)
    state, _ = step.run(stack([algorithm.init(s) for s in range(SEEDS)]), {}, 0, updates)
    return algorithm, [select(state, n) for n in range(SEEDS)]


def error(n_step: int) -> np.ndarray:
    """Root mean square error of Q over all places, of each seed: IQL with an expectile of 0.5, which values the data's
    behaviour.
    """
    own = {
        "expectile": 0.5,
        "discount": DISCOUNT,
        "polyak": 0.02,
        "learning_rate": 1e-3,
        "batch_size": 128,
        "n_step": n_step,
    }
    algorithm, states = trained("iql", corridor(), 800, **own)
    places = torch.tensor(observed(np.arange(LENGTH), LENGTH))
    with torch.no_grad():
        q = np.stack([algorithm.q_value(state, places, torch.full((LENGTH, 1), 0.8)).numpy() for state in states])
    return np.asarray(np.sqrt(((q - exact()) ** 2).mean(1)))


def test_values_travel_faster_by_n_steps() -> None:
    one, five = error(1), error(5)
    print(f"error of Q after 800 updates, seeds: one step {one.round(3)}, five {five.round(3)}")
    assert five.max() < 0.6 * one.min()


def walks(turn: float = 0.15, episodes: int = 200, steps: int = 60, length: int = 20) -> Dataset:
    """Random walks on a line of 20 places that turn around now and then."""
    g, rows = np.random.default_rng(0), []
    place, way = g.integers(0, length, episodes), g.choice([-1, 1], episodes)
    for _ in range(steps):
        way = np.where(g.random(episodes) < turn, -way, way)
        rows.append((place, way))
        place = np.clip(place + way, 0, length - 1)
    place, way = (np.stack([row[i] for row in rows], 1).ravel() for i in (0, 1))
    ends = np.arange(len(place)) % steps == steps - 1
    limits = {"action_low": [-1.0], "action_high": [1.0]}
    return from_arrays(observed(place, length), 0.8 * way[:, None], np.zeros(len(place)), episode_ends=ends, **limits)  # type: ignore[arg-type]


def test_sharsa_chooses_the_subgoals_that_lead_to_the_goal() -> None:
    """Its flows alone do what the data do, which walk about: it is the choice of the best among many that goes
    somewhere.
    """
    dataset = walks()
    own = {"discount": 0.9, "subgoal_steps": 5, "learning_rate": 3e-3, "polyak": 0.05, "batch_size": 256}
    algorithm, states = trained("sharsa", dataset, 1000, **own)
    place, goal = (x.ravel() for x in np.meshgrid(np.arange(20), np.arange(20)))
    far = np.abs(goal - place) > 1
    here, there, way = observed(place[far], 20), observed(goal[far], 20), np.sign(goal - place)[far]
    right = {}
    for count in (1, 32):
        chosen = with_config(algorithm, dataclasses.replace(algorithm.config, candidates=count))
        right[count] = [
            float((np.sign(TrainedPolicy(chosen, s, 0).act(here, goal=there)[:, 0]) == way).mean()) for s in states
        ]
    print(f"steps towards the goal, seeds: one subgoal {right[1]}, the best of 32 {right[32]}")
    assert max(right[1]) < 0.7 and min(right[32]) > 0.75
