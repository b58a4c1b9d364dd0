"""What a latent model learns of images with a moving distractor, with and without reconstructing them:
`python scripts/bench/latent_distractor.py`.

Trains `dreamerv3` (reconstruction), `repo` (bottleneck) and `infopower` (information) on pictures of the drawn
pendulum, clean and with discs that swing behind it, and prints, of other episodes: the error of the reward that is
predicted ten steps ahead along the recorded actions, without looking, in standard deviations of rewards (1: a guess of
their mean); and how much of the variance of angle (cos, sin), velocity and discs a ridge regression on the latent state
explains.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import offrl
from offrl import rng
from offrl.algorithm import Dataset, select, stack
from offrl.algorithms.rssm import RSSM
from offrl.envs.drawn import LIMIT, WORLDS, generate
from offrl.settings.compose import compose
from offrl.training.setup import make_algorithm
from offrl.training.step import Step
from offrl.world_models.probe import explained
from offrl.world_models.recurrent.latents import Latents, LatentState
from offrl.world_models.recurrent.networks import HEAD

DATA = ("pendulum", "pendulum-distractor")
MODELS = ("dreamerv3", "repo", "infopower")
SMALL: dict[str, Any] = {
    "batch_size": 8,
    "length": 16,
    "horizon": 2,
    "recurrent_width": 128,
    "groups": 8,
    "classes": 8,
    "width": 64,
    "depth": 4,
    "learning_rate": 1e-3,
    "warmup_steps": 100,
}
BEGIN, AHEAD, DRAWS = 20, 10, 8  # states seen before a prediction, steps of it, and futures it is the mean of
HELD_OUT = 100  # episodes


class Episodes(NamedTuple):
    """Episodes that no model was trained on; time first."""

    pictures: Tensor  # [T, E, 32, 32, 3] uint8
    states: Tensor  # [T, E, O]: what they show, and the velocity
    actions: Tensor  # [T, E, A]
    rewards: Tensor  # [T, E]


def columns(world: str, seed: int, rows: int) -> dict[str, np.ndarray]:
    """The columns of `generate`, with pictures."""
    data = dict(generate(world, seed, rows).columns)
    return {**data, "pictures": WORLDS[world].pictures(data["observations"])}


def training_data(world: str, rows: int) -> Dataset:
    data = columns(world, 0, rows)
    names = ("pictures", "actions", "rewards", "terminations", "truncations")
    return offrl.from_arrays(*(data[name] for name in names), action_low=-1.0, action_high=1.0, name=world)


def held_out(world: str) -> Episodes:
    data = columns(world, 1, HELD_OUT * LIMIT)
    names = ("pictures", "observations", "actions", "rewards")
    return Episodes(*(torch.from_numpy(data[n]).unflatten(0, (-1, LIMIT)).transpose(0, 1) for n in names))


def trained(name: str, dataset: Dataset, seed: int, steps: int, more: dict[str, Any]) -> tuple[Latents, dict[str, str]]:
    """The latent model after so many updates, and the means of its metrics over the last tenth of them."""
    settings = {f"algo.{k}": v for k, v in SMALL.items()} | more
    config = compose({"algo": name, "dataset": "-", **settings})
    algorithm = make_algorithm(config, dataset)
    assert isinstance(algorithm, RSSM)
    step = Step(algorithm, algorithm.sampler().prepare(dataset), batch_size=config.algo.batch_size, replicas=1)
    state, last = stack([algorithm.init(seed)]), steps // 10
    state, _ = step.run(state, {}, 0, steps - last)
    state, sums = step.run(state, {}, steps - last, last)
    means = {k.split("/")[1]: f"{float(v) / last:.3g}" for k, v in sums.items() if k.startswith("model/")}
    return algorithm.latents(select(state, 0).params), means


def reward_error(latents: Latents, states: LatentState, episodes: Episodes) -> float:
    """The root mean square error of rewards `AHEAD` steps ahead, in their standard deviations."""
    errors = []
    for begin in range(BEGIN, LIMIT - AHEAD, AHEAD):
        guesses = []
        for draw in range(DRAWS):
            state = pytree.tree_map(lambda x, t=begin: x[t], states)
            for k, key in enumerate(rng.split(rng.make_key(draw), AHEAD)):
                state, _ = latents.imagine(state, episodes.actions[begin + k], key)
            guesses.append(HEAD.mean(latents.apply("reward", state.features)))
        errors.append(torch.stack(guesses).mean(0) - episodes.rewards[begin + AHEAD - 1])
    return float(torch.stack(errors).square().mean().sqrt() / episodes.rewards.std())


def measured(latents: Latents, episodes: Episodes) -> list[float]:
    """The reward's error; R^2 of the angle, of the velocity and of the discs (nan without any)."""
    first = torch.zeros(episodes.rewards.shape, dtype=torch.bool)
    first[0] = True
    previous = torch.cat([torch.zeros_like(episodes.actions[:1]), episodes.actions[:-1]])
    states = latents.observe_windows({"pixels": episodes.pictures}, previous, first, rng.make_key(0)).state
    halves = torch.arange(HELD_OUT).chunk(2)  # of the episodes
    fit = explained(*((states.features[BEGIN:, e], episodes.states[BEGIN:, e]) for e in halves))
    return [reward_error(latents, states, episodes), *(float(part.mean()) for part in (fit[:2], fit[2], fit[3:]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=NUMBER", help="more settings of the bottleneck")
    options = parser.parse_args()
    torch.set_num_threads(1)
    more = {k: float(v) for k, v in (text.split("=") for text in options.set)}
    names = ("data", "model", "seed", "reward error", "angle", "velocity", "discs", "CPU s", "last metrics")
    print(f"{options.rows:,} rows, {options.steps:,} updates\n")
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
    for world in options.data:
        dataset, episodes = training_data(world, options.rows), held_out(world)
        for seed in options.seeds:
            for model in options.models:
                start = time.process_time()
                with torch.no_grad():
                    latents, metrics = trained(model, dataset, seed, options.steps, more if model == "repo" else {})
                    numbers = measured(latents, episodes)
                cells = [world, model, str(seed), *(f"{x:.2f}" for x in numbers), f"{time.process_time() - start:.0f}"]
                print(f"| {' | '.join(cells)} | {metrics} |", flush=True)


if __name__ == "__main__":
    main()
