"""OGBench's goal datasets (arXiv 2410.20092, section 5): its point mazes, cubes, scene and puzzles, driven by its own
oracles, in its npz layout.

The controllers are those of the installed package (`get_oracle_subgoal` of the mazes, the plan and Markov oracles of
cubes, buttons, drawer and window); the loops around them follow what OGBench documents of its datasets. Ant and
humanoid mazes need its trained experts, which no package holds.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from offrl.collect.config import CollectConfig
from offrl.collect.environment import World, look
from offrl.collect.episodes import Episode, Play, play_units
from offrl.collect.ogbench.manipulation import player
from offrl.collect.ogbench.mazes import play_maze
from offrl.collect.ogbench.rows import as_episode
from offrl.collect.publish import PACKAGES, Collection
from offrl.collect.record import KEPT, Stop
from offrl.collect.recorder import seed_for
from offrl.errors import UserError, nearest
from offrl.runs.log import write_error
from offrl.runs.record import installed
from offrl.runs.tables import print_table
from offrl.system import files as checkpoint
from offrl.tasks.environments import make_env, quiet
from offrl.tasks.task import Task

MAZE_KINDS, ARM_KINDS = ("navigate", "stitch", "explore", "path"), ("play", "noisy")
ARMS = ("cube", "scene", "puzzle")
EPISODES, LENGTH, STITCH_LENGTH = 1000, 1001, 201  # rows of an episode: as published


def prepare(config: CollectConfig) -> tuple[World, dict[str, Any]]:
    """Check everything; fill in the kind. Raises UserError for an environment whose oracle the package does not
    hold.
    """
    if importlib.util.find_spec("ogbench") is None:
        raise UserError("recipe=ogbench needs the package ogbench: pip install 'offrl[ogbench]'")
    with quiet():
        for name in ("ogbench.locomaze", "ogbench.manipspace"):
            importlib.import_module(name)
    family = config.env.partition("-")[0]
    if family == "visual":
        raise UserError(
            f"{config.env} has images for observations, which are not recorded; take its version with states"
        )
    if family not in ("pointmaze", *ARMS):
        import gymnasium

        known = [
            n
            for n in gymnasium.registry
            if n.startswith(("pointmaze-", *(f"{arm}-" for arm in ARMS))) and "singletask" not in n
        ]
        reason = (
            "needs OGBench's trained experts, which are in no package"
            if "maze" in family or "soccer" in family
            else "is not recorded"
        )
        raise UserError(
            f"recipe=ogbench: {config.env or 'env='} {reason}.{nearest(config.env, known)} It knows: "
            f"{', '.join(sorted(known))}"
        )
    if config.rows is not None or config.datasets:
        raise UserError("recipe=ogbench counts episodes=, and has no rows= or datasets=")
    kinds = MAZE_KINDS if family == "pointmaze" else ARM_KINDS
    config.kind = config.kind or kinds[0]
    if config.kind not in kinds:
        raise UserError(f"kind={config.kind} is none of {config.env}: {', '.join(kinds)}.{nearest(config.kind, kinds)}")
    with quiet():
        world = look(config.env)
    return world, {"trained_by": "OGBench's oracle"}


def collect(config: CollectConfig, folder: Path, collection: Collection, stop: Stop) -> None:
    """Record the training and the validation episodes, and write two npz files in OGBench's layout."""
    count = config.episodes or EPISODES
    total = count + count // 10
    stem = config.env.rpartition("-v")[0]
    names = {"train": f"{stem}-{config.kind}-v0.npz", "val": f"{stem}-{config.kind}-v0-val.npz"}
    if total == count:  # too few for a tenth
        del names["val"]
    episodes = _record(config, folder / "episodes", total, stop)
    data = {k: np.concatenate([e.columns[k] for e in episodes]) for k in episodes[0].columns}
    lengths = np.array([len(e) for e in episodes])
    rows = int(lengths[:count].sum())
    for part, name in names.items():
        columns = {k: v[:rows] if part == "train" else v[rows:] for k, v in data.items()}
        if not (folder / name).exists():
            _write(folder / name, columns)
        collection.record["written"][part] = {"ogbench": str(folder / name)}
    numbers = _statistics({k: v[:rows] for k, v in data.items()}, lengths[:count])
    card = {
        "env_id": config.env,
        "kind": config.kind,
        "versions": collection.world.label,
        "seed": config.seed,
        "settings": collection.record["identity"],
        "files": names,
        "columns": list(data),
        "training": numbers,
        "validation_episodes": total - count,
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
    }
    collection.save()
    checkpoint.write_text(folder / "card.json", json.dumps(card, indent=1) + "\n", KEPT)
    table = [
        [
            k,
            v
            if isinstance(v, str)
            else f"{v:,}"
            if isinstance(v, int)
            else ", ".join(f"{x:.3f}" for x in np.atleast_1d(v)),
        ]
        for k, v in numbers.items()
    ]
    description = f"Recorded by `offrl collect recipe=ogbench` in {collection.world.label}, seed {config.seed}."
    lines = [f"# {config.env}, {config.kind}", "", description, "",
             "Rewards are none: the goal decides them. `terminals` marks each trajectory's last row, which has no "
             "successor.", "",
             "| training | |", "|---|---|", *(f"| {k} | {v} |" for k, v in table), ""]  # fmt: skip
    checkpoint.write_text(folder / "card.md", "\n".join(lines), KEPT)
    if not config.quiet:
        print_table(["training set", config.env], table)


def _record(config: CollectConfig, folder: Path, total: int, stop: Stop) -> list[Episode]:
    """`total` episodes. Each is decided by the seed and its number alone."""
    length = STITCH_LENGTH if config.kind == "stitch" else LENGTH
    arguments: dict[str, Any] = {"terminate_at_goal": False}
    if not config.env.startswith("pointmaze"):
        arguments["mode"] = "data_collection"

    @contextlib.contextmanager
    def stage() -> Iterator[Play]:
        env = make_env(Task(name=config.env, env_id=config.env, env_kwargs=arguments, max_episode_steps=length))
        play = play_maze if config.env.startswith("pointmaze") else player(config, env)

        def one(number: int) -> list[Episode]:
            with quiet(), numpy_seed(seed_for(config.seed, "ogbench", config.kind, number)) as seed:
                env.action_space.seed(seed)
                return [as_episode(play(env, config, seed))]

        try:
            yield one
        finally:
            env.close()

    title = f"recording {config.env} {config.kind}"
    return play_units(folder, stage, None, total, title, config.quiet, stop)


@contextlib.contextmanager
def numpy_seed(seed: int) -> Iterator[int]:
    """OGBench's environments and oracles draw from NumPy's global generator: seeded here, and put back."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield seed
    finally:
        np.random.set_state(state)


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
