"""Data and reference scores of the environments that NumPy draws (envs/drawn.py).

python scripts/bench/drawn.py --out FOLDER --rows 100000      # data of pictures and of states, row for row the same
python scripts/bench/drawn.py --references                    # returns of uniform actions and of the controller
python scripts/bench/drawn.py --speed                         # pictures a second on one core

For each world FOLDER gets drawn-WORLD-state.npz (observations [R, O] float32, actions, rewards, terminations,
truncations, final_observations [E, O]: what follows each episode's last row) and drawn-WORLD.npz: the same with
pictures [R, 32, 32, 3] and [E, 32, 32, 3] uint8 as observations and final_observations, and what they show as
info_states [R, O]. `offrl train dataset=drawn-WORLD-state` makes the states anew, and needs no file.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gymnasium as gym
import numpy as np

from offrl.envs.drawn import LIMIT, ROWS, TASKS, WORLDS, generate

EPISODES = 2000


def write(world: str, out: Path, rows: int, seed: int) -> None:
    """Both files of a world."""
    columns = dict(generate(world, seed, rows).columns)
    states, finals = columns.pop("observations"), columns.pop("next_observations")[columns["truncations"]]
    path = out / f"drawn-{world}-state.npz"
    np.savez_compressed(path, observations=states, final_observations=finals, **columns)
    print(f"{path}: {len(states):,} rows, {path.stat().st_size / 1e6:.1f} MB", flush=True)
    path, draw = out / f"drawn-{world}.npz", WORLDS[world].pictures
    np.savez_compressed(path, observations=draw(states), final_observations=draw(finals), info_states=states, **columns)
    print(f"{path}: {len(states):,} rows, {path.stat().st_size / 1e6:.1f} MB", flush=True)


def references(world: str) -> None:
    """Returns of `EPISODES` episodes in the environment of states: mean and standard error."""
    dynamics = WORLDS[world]
    env = gym.make(TASKS[f"drawn-{world}-state"].env_id)
    draw = np.random.default_rng(0)
    for controlled in (False, True):
        totals = np.zeros(EPISODES)
        for e in range(EPISODES):
            observation, _ = env.reset(seed=e)
            for _ in range(LIMIT):
                uniform = draw.uniform(-1.0, 1.0, dynamics.dims[1])
                action = dynamics.control(observation[None])[0] if controlled else uniform
                observation, reward, *_ = env.step(action.astype(np.float32))
                totals[e] += float(reward)
        name = "controller" if controlled else "uniform actions"
        print(f"{world}, {name}: {totals.mean():.2f} +- {totals.std() / EPISODES**0.5:.2f}", flush=True)


def speed(world: str) -> None:
    """Steps a second of the environment of pictures, and pictures a second of data."""
    env = gym.make(TASKS[f"drawn-{world}"].env_id)
    env.reset(seed=0)
    action, start = np.zeros(WORLDS[world].dims[1], np.float32), time.perf_counter()
    for _ in range(5000):
        env.step(action)
    stepped, states = time.perf_counter(), generate(world, 0, 10_000).columns["observations"]
    begin = time.perf_counter()
    WORLDS[world].pictures(states)
    print(
        f"{world}: {5000 / (stepped - start):,.0f} steps a second, "
        f"{len(states) / (time.perf_counter() - begin):,.0f} pictures a second",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", nargs="+", choices=list(WORLDS), default=list(WORLDS))
    parser.add_argument("--references", action="store_true")
    parser.add_argument("--speed", action="store_true")
    options = parser.parse_args()
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    for world in options.world:
        if options.out is not None:
            write(world, options.out, options.rows, options.seed)
        if options.references:
            references(world)
        if options.speed:
            speed(world)


if __name__ == "__main__":
    main()
