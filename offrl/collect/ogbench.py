"""OGBench's goal datasets (arXiv 2410.20092, section 5): its point mazes and cubes, driven by its own oracles, in its npz layout.

The controllers are those of the installed package (`get_oracle_subgoal` of the mazes, the cube's plan and Markov oracles); the loops around
them follow what OGBench documents of its datasets. Ant and humanoid mazes need its trained experts, which no package holds.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offrl.collect.config import CollectConfig
from offrl.collect.environment import World, look
from offrl.collect.publish import PACKAGES, Collection
from offrl.collect.record import KEPT, Stop
from offrl.collect.recorder import SHARD_SECONDS, seed_for
from offrl.errors import UserError, nearest
from offrl.runs.log import write_error
from offrl.runs.record import installed
from offrl.runs.tables import print_table
from offrl.system import files as checkpoint
from offrl.system.progress import Progress
from offrl.tasks.environments import make_env, quiet
from offrl.tasks.task import Task

MAZE_KINDS, CUBE_KINDS = ("navigate", "stitch", "explore", "path"), ("play", "noisy")
EPISODES, LENGTH, STITCH_LENGTH = 1000, 1001, 201  # rows of an episode: as published
MAZE_NOISE, CUBE_NOISE = 0.5, 0.1  # OGBench's --noise for point mazes and for cubes
RANDOM_ACTIONS = 0.1  # OGBench's --p_random_action for the kind noisy
STITCH_CELLS, EXPLORE_STEPS = 4, 10
P_STACK = {"single": (0.0, 0.0), "double": (0.0, 0.25), "triple": (0.05, 0.35), "quadruple": (0.1, 0.5), "octuple": (0.0, 0.35)}
COLUMNS = ("observations", "actions", "terminals", "qpos", "qvel")
Rows = dict[str, list[Any]]


def prepare(config: CollectConfig) -> tuple[World, dict[str, Any]]:
    """Check everything; fill in the kind. Raises UserError for an environment whose oracle the package does not hold."""
    if importlib.util.find_spec("ogbench") is None:
        raise UserError("recipe=ogbench needs the package ogbench: pip install 'offrl[ogbench]'")
    with quiet():
        for name in ("ogbench.locomaze", "ogbench.manipspace"):
            importlib.import_module(name)
    family = config.env.partition("-")[0]
    if family == "visual":
        raise UserError(f"{config.env} has images for observations, which are not recorded; take its version with states")
    if family not in ("pointmaze", "cube"):
        import gymnasium

        known = [n for n in gymnasium.registry if n.startswith(("pointmaze-", "cube-")) and "singletask" not in n]
        why = "needs OGBench's trained experts, which are in no package" if "maze" in family or "soccer" in family else "is not recorded"
        raise UserError(f"recipe=ogbench: {config.env or 'env='} {why}.{nearest(config.env, known)} It knows: {', '.join(sorted(known))}")
    if config.rows is not None or config.sets:
        raise UserError("recipe=ogbench counts episodes=, and has no rows= or sets=")
    kinds = MAZE_KINDS if family == "pointmaze" else CUBE_KINDS
    config.kind = config.kind or kinds[0]
    if config.kind not in kinds:
        raise UserError(f"kind={config.kind} is none of {config.env}: {', '.join(kinds)}.{nearest(config.kind, kinds)}")
    with quiet():
        world = look(config.env)
    return world, {"trained_by": "OGBench's oracle"}


def collect(config: CollectConfig, folder: Path, place: Collection, stop: Stop) -> None:
    """Record the training and the validation episodes, and write two npz files in OGBench's layout."""
    count = config.episodes or EPISODES
    total = count + count // 10
    stem = config.env.rpartition("-v")[0]
    names = {"train": f"{stem}-{config.kind}-v0.npz", "val": f"{stem}-{config.kind}-v0-val.npz"}
    if total == count:  # too few for a tenth
        del names["val"]
    data = _record(config, folder / "episodes", total, stop)
    lengths = data.pop("length")
    rows = int(lengths[:count].sum())
    for part, name in names.items():
        columns = {k: v[:rows] if part == "train" else v[rows:] for k, v in data.items()}
        if not (folder / name).exists():
            _write(folder / name, columns)
        place.record["written"][part] = {"ogbench": str(folder / name)}
    numbers = _statistics({k: v[:rows] for k, v in data.items()}, lengths[:count])
    card = {
        "env_id": config.env, "kind": config.kind, "versions": place.world.label, "seed": config.seed, "settings": place.record["identity"],
        "files": names, "columns": list(data), "training": numbers, "validation_episodes": total - count,
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
    }  # fmt: skip
    place.save()
    checkpoint.write_text(folder / "card.json", json.dumps(card, indent=1) + "\n", KEPT)
    table = [
        [k, v if isinstance(v, str) else f"{v:,}" if isinstance(v, int) else ", ".join(f"{x:.3f}" for x in np.atleast_1d(v))]
        for k, v in numbers.items()
    ]
    description = f"Recorded by `offrl collect recipe=ogbench` in {place.world.label}, seed {config.seed}."
    lines = [f"# {config.env}, {config.kind}", "", description, "",
             "Rewards are none: the goal decides them. `terminals` marks each trajectory's last row, which has no successor.", "",
             "| training | |", "|---|---|", *(f"| {k} | {v} |" for k, v in table), ""]  # fmt: skip
    checkpoint.write_text(folder / "card.md", "\n".join(lines), KEPT)
    if not config.quiet:
        print_table(["training set", config.env], table)


def _record(config: CollectConfig, folder: Path, total: int, stop: Stop) -> dict[str, np.ndarray]:
    """All rows of `total` episodes, and "length" [total]. Each episode is decided by the seed and its number alone."""
    from offrl.collect.episodes import shards

    saved_shards = shards(folder)
    parts = [{k: v.numpy() for k, v in checkpoint.read(p)[0].items()} for _, _, p in saved_shards]
    done = saved_shards[-1][1] if saved_shards else 0
    if done < total:
        length = STITCH_LENGTH if config.kind == "stitch" else LENGTH
        arguments: dict[str, Any] = {"terminate_at_goal": False}
        if config.env.startswith("cube"):
            arguments["mode"] = "data_collection"
        env = make_env(Task(name=config.env, env_id=config.env, env_kwargs=arguments, max_episode_steps=length))
        play = _maze if config.env.startswith("pointmaze") else _cube(config, env)
        first, pending, saved = done, [], time.monotonic()
        try:
            with quiet(), Progress(f"recording {config.env} {config.kind}", total, "episodes", config.quiet, done) as bar:
                while done < total:
                    with numpy_seed(seed_for(config.seed, "ogbench", config.kind, done)) as seed:
                        env.action_space.seed(seed)
                        pending.append(play(env, config, seed))
                    done += 1
                    bar.update(done)
                    if done == total or stop.asked or time.monotonic() - saved > SHARD_SECONDS:
                        parts.append(_join(pending))
                        tensors = {k: torch.from_numpy(v) for k, v in parts[-1].items()}
                        checkpoint.write(folder / f"{first:08d}-{done:08d}.safetensors", tensors, {"kind": "ogbench"}, KEPT)
                        first, pending, saved = done, [], time.monotonic()
                        stop.check()
        finally:
            env.close()
    return {k: np.concatenate([p[k] for p in parts]) for k in (*COLUMNS, "length")}


@contextlib.contextmanager
def numpy_seed(seed: int) -> Iterator[int]:
    """OGBench's environments and oracles draw from NumPy's global generator: seeded here, and put back."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield seed
    finally:
        np.random.set_state(state)


def _join(episodes: list[Rows]) -> dict[str, np.ndarray]:
    """Columns of OGBench's types."""
    joined = {k: np.concatenate([np.asarray(e[k], bool if k == "terminals" else np.float32) for e in episodes]) for k in COLUMNS}
    return {**joined, "length": np.array([len(e["terminals"]) for e in episodes], np.int64)}


def _keep(rows: Rows, observation: Any, action: np.ndarray, over: bool, info: dict[str, Any]) -> None:
    values = (observation, action, over, info["prev_qpos"], info["prev_qvel"])
    for key, value in zip(COLUMNS, values, strict=True):
        rows[key].append(np.array(value))


# --------------------------------------------------------------------------------------------------------------- mazes


def cells(maze: np.ndarray) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(free cells, those that are no straight corridor: ends, corners and junctions) of a map whose walls are 1."""
    free = [(int(i), int(j)) for i, j in np.argwhere(maze == 0)]

    def corridor(i: int, j: int) -> bool:
        up, down, left, right = (maze[i + a, j + b] == 0 for a, b in ((-1, 0), (1, 0), (0, -1), (0, 1)))
        return (up and down and not left and not right) or (left and right and not up and not down)

    return free, [c for c in free if not corridor(*c)]


def at_distance(maze: np.ndarray, start: tuple[int, int], steps: int) -> list[tuple[int, int]]:
    """The cells whose shortest way from `start` has `steps` steps."""
    ring, visited = [start], {start}
    for _ in range(steps):
        after = dict.fromkeys((i + a, j + b) for i, j in ring for a, b in ((-1, 0), (1, 0), (0, -1), (0, 1)))
        ring = [c for c in after if c not in visited and 0 <= c[0] < maze.shape[0] and 0 <= c[1] < maze.shape[1] and maze[c] == 0]
        visited |= set(ring)
    return ring


def _maze(env: Any, config: CollectConfig, seed: int) -> Rows:
    """One episode: towards the next cell on the way to the goal, with noise; navigate draws a new goal at each one reached."""
    base = env.unwrapped
    free, vertices = cells(base.maze_map)

    def draw(options: list[tuple[int, int]]) -> tuple[int, int]:
        return options[np.random.randint(len(options))]

    start = draw(free)
    goal = draw(at_distance(base.maze_map, start, STITCH_CELLS) or [start]) if config.kind == "stitch" else draw(vertices)
    observation, _ = env.reset(seed=seed, options={"task_info": {"init_ij": start, "goal_ij": goal}})
    noise = MAZE_NOISE if config.oracle_noise is None else config.oracle_noise
    rows: Rows = {k: [] for k in COLUMNS}
    direction, over, step = np.zeros(2), False, 0
    while not over:
        if config.kind != "explore":
            position = base.get_xy()
            direction = base.get_oracle_subgoal(position, base.cur_goal_xy)[0] - position
        elif step % EXPLORE_STEPS == 0:
            direction = np.random.normal(size=2)
        unit = direction / (np.linalg.norm(direction) + 1e-6)
        action = np.clip(unit + np.random.normal(0.0, noise, 2), -1.0, 1.0)
        following, _, terminated, truncated, info = env.step(action)
        over = bool(terminated or truncated)
        _keep(rows, observation, action, over, info)
        if info["success"] and config.kind == "navigate":
            base.set_goal(goal_xy=base.add_noise(base.ij_to_xy(draw(vertices))))
        observation, step = following, step + 1
    return rows


# --------------------------------------------------------------------------------------------------------------- cubes


def _cube(config: CollectConfig, env: Any) -> Callable[[Any, CollectConfig, int], Rows]:
    """The player of episodes: play follows plans with correlated noise, noisy reacts to the state with independent noise."""
    noise = CUBE_NOISE if config.oracle_noise is None else config.oracle_noise
    if config.kind == "play":
        oracle = importlib.import_module("ogbench.manipspace.oracles.plan.cube_plan").CubePlanOracle(env=env, noise=noise)
    else:
        oracle = importlib.import_module("ogbench.manipspace.oracles.markov.cube_markov").CubeMarkovOracle(env=env)
    stack = next((v for k, v in P_STACK.items() if k in config.env), (0.5, 0.5))

    def play(env: Any, config: CollectConfig, seed: int) -> Rows:
        observation, info = env.reset(seed=seed)
        space = env.action_space
        p_stack = np.random.uniform(*stack)
        spread = np.random.uniform(0.0, noise) * np.array([1, 1, 1, 3, 10]) if config.kind == "noisy" else None
        oracle.reset(observation, info)
        rows: Rows = {k: [] for k in COLUMNS}
        over = False
        while not over:
            if spread is not None and np.random.uniform() < RANDOM_ACTIONS:
                action = np.random.uniform(space.low, space.high)  # space.sample() has a generator that no seed reaches
            else:
                action = np.asarray(oracle.select_action(observation, info))
                action = action if spread is None else action + np.random.normal(0.0, spread)
            action = np.clip(action, -1.0, 1.0)
            following, _, terminated, truncated, info = env.step(action)
            over = bool(terminated or truncated)
            if oracle.done:
                oracle.reset(*env.unwrapped.set_new_target(p_stack=p_stack))
            _keep(rows, observation, action, over, info)
            observation = following
        return rows

    return play


# --------------------------------------------------------------------------------------------------------------- files


def _write(path: Path, columns: dict[str, np.ndarray]) -> None:
    """A compressed npz, whole or not at all."""
    try:
        with checkpoint.replacing(path) as file:
            np.savez_compressed(file, **columns)  # type: ignore[arg-type]
    except OSError as error:
        raise write_error(error, path) from None


def _statistics(columns: dict[str, np.ndarray], lengths: np.ndarray) -> dict[str, Any]:
    """Statistics that distinguish a dataset from another of its kind."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    observations, actions = columns["observations"][:, :2], columns["actions"]
    return {
        "rows": int(lengths.sum()),
        "episodes": len(lengths),
        "rows of an episode": f"{lengths.min()} to {lengths.max()}",
        "action mean": actions.mean(0).tolist(),
        "action std": actions.std(0).tolist(),
        "mean of the first two observations": observations.mean(0).tolist(),
        "std of the first two observations": observations.std(0).tolist(),
        "std of their starts": observations[starts].std(0).tolist(),
    }
