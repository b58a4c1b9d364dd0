"""Valid files in memory, before they are written: random episodes, and their columns in each layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Table = dict[str, Any]  # column -> array
Rng = np.random.Generator


@dataclass
class Draft:
    """What is to be written. Slips change `tables`, `meta` and `lines`."""

    container: str  # hdf5 | npz | parquet | minari | arrow | lerobot | json
    name: str  # of the file or folder
    tables: dict[str, Table] = field(default_factory=dict)  # group -> columns; "" is the file itself
    attributes: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)  # settings of the dataset
    meta: dict[str, Any] = field(default_factory=dict)  # Minari's metadata.json
    lines: list[Any] = field(default_factory=list)  # JSON values, one a line


@dataclass
class Episode:
    observations: np.ndarray  # [T + 1, *O], the last one comes after the last action
    actions: np.ndarray  # [T, A], or [T] integers
    rewards: np.ndarray  # [T]
    terminated: bool


def random_episodes(
    rng: Rng, discrete: bool = False, shape: tuple[int, ...] | None = None, number: int = 0
) -> list[Episode]:
    """A few short episodes of random numbers; no two observations are alike. Images are uint8."""
    shape = shape or (int(rng.integers(1, 5)),)
    width = int(rng.integers(1, 4))
    episodes = []
    for _ in range(number or int(rng.integers(2, 9))):
        steps = int(rng.integers(1, 13))
        observations = rng.normal(size=(steps + 1, *shape)).astype(np.float32)
        if len(shape) > 1:
            observations = rng.integers(0, 256, (steps + 1, *shape)).astype(np.uint8)
        actions = rng.integers(0, 4, steps) if discrete else rng.uniform(-0.95, 0.95, (steps, width)).astype(np.float32)
        episodes.append(
            Episode(observations, actions, rng.normal(size=steps).astype(np.float32), bool(rng.random() < 0.5))
        )
    if episodes and not any(e.terminated for e in episodes):
        episodes[0].terminated = True
    return episodes


def stacked(episodes: list[Episode]) -> Table:
    """The episodes' columns, one after the other."""
    lengths = [len(e.rewards) for e in episodes]
    ends = np.zeros(sum(lengths), bool)
    ends[np.cumsum(lengths) - 1] = True
    terminations = ends.copy()
    terminations[ends] = [e.terminated for e in episodes]
    return {
        "observations": np.concatenate([e.observations[:-1] for e in episodes]),
        "actions": np.concatenate([e.actions for e in episodes]),
        "rewards": np.concatenate([e.rewards for e in episodes]),
        "terminations": terminations,
        "truncations": ends & ~terminations,
        "next_observations": np.concatenate([e.observations[1:] for e in episodes]),
        "final_observations": np.stack([e.observations[-1] for e in episodes]),
        "episode_ids": np.repeat(np.arange(len(episodes)), lengths),
        "episode_ends": ends,
    }


def _pick(table: Table, names: str) -> Table:
    return {name: table[name] for name in names.split()}


def _precision(rng: Rng, table: Table) -> Table:
    """The same columns in another type of numbers, now and then."""
    if rng.random() < 0.3:
        kind = rng.choice(["f8", "f2", ">f4", ">f8"])
        return {k: v.astype(kind) if v.dtype.kind == "f" else v for k, v in table.items()}
    return table


def d4rl(rng: Rng) -> Draft:
    columns = stacked(random_episodes(rng, discrete=rng.random() < 0.1))
    table = _pick(columns, "observations actions rewards")
    table["terminals"] = columns["terminations"]
    if rng.random() < 0.8:
        table["timeouts"] = columns["truncations"]
    elif rng.random() < 0.5:
        table["episode_ends"] = columns["episode_ends"]
    if rng.random() < 0.5:
        table["next_observations"] = columns["next_observations"]
    elif rng.random() < 0.3 and "timeouts" in table:
        table["final_observations"] = columns["final_observations"]
    table = _precision(rng, table)
    if rng.random() < 0.4:
        table["infos/qpos"] = rng.normal(size=(len(table["rewards"]), 2))
        table["metadata/algorithm"] = np.bytes_("SAC")
        table["metadata/policy/fc0/weight"] = rng.normal(size=(3, 2))
    attributes = (
        {} if rng.random() < 0.7 else {"dataset_id": "mine/case-v0", "ref_min_score": -1.5, "ref_max_score": 20.0}
    )
    return Draft("hdf5", "case.hdf5", {"": table}, attributes)


def _plain(rng: Rng) -> tuple[Table, dict[str, Any]]:
    shape = (4, 4, 3) if rng.random() < 0.1 else None
    columns = stacked(random_episodes(rng, discrete=rng.random() < 0.25, shape=shape))
    table = _pick(columns, "observations actions rewards")
    marks = rng.choice(["flags", "ends", "ids", "rows", "d4rl"])
    if marks != "rows":
        table["terminations"] = columns["terminations"]
    if marks == "flags":
        table["truncations"] = columns["truncations"]
    elif marks == "ends":
        table["episode_ends"] = columns["episode_ends"]
    elif marks == "rows":
        table["episode_ends"] = np.flatnonzero(columns["episode_ends"])
    elif marks == "ids":
        table["episode_ids"] = columns["episode_ids"]
    else:
        table["terminals"], table["timeouts"] = table.pop("terminations"), columns["truncations"]
    if rng.random() < 0.4:
        table["next_observations"] = columns["next_observations"]
    elif rng.random() < 0.3 and marks != "rows":
        table["final_observations"] = columns["final_observations"]
    if rng.random() < 0.2 and table["actions"].dtype.kind == "f":
        table["actions"] = table["actions"] * 3
    fields = {}
    if rng.random() < 0.3:
        for column, key in (
            ("observations", "obs"),
            ("rewards", "r"),
            ("actions", "train/act"),
            ("terminations", "done"),
        ):
            if column in table and rng.random() < 0.5:
                table[key] = table.pop(column)
                fields[column] = key
    return _precision(rng, table), fields


def columns_of(container: str, name: str) -> Callable[[Rng], Draft]:
    def make(rng: Rng) -> Draft:
        table, fields = _plain(rng)
        if container == "parquet":
            table = {k: v.astype(v.dtype.newbyteorder("=")) for k, v in table.items()}  # Arrow has no other
            table.pop("final_observations", None)
            if len(
                table.get("episode_ends", table["rewards"] if "rewards" in table else table[fields["rewards"]])
            ) != len(next(iter(table.values()))):
                table["episode_ends"] = np.isin(np.arange(len(next(iter(table.values())))), table["episode_ends"])
        return Draft(container, name, {"": table}, config={"fields": fields} if fields else {})

    return make


def ogbench(rng: Rng) -> Draft:
    columns = stacked(random_episodes(rng, shape=(2,)))
    table = _pick(columns, "observations actions") | {"terminals": columns["episode_ends"]}
    if rng.random() < 0.5:
        table["qpos"] = rng.normal(size=(len(table["actions"]), 3)).astype(np.float32)
    return Draft("npz", "pointmaze-medium-navigate-v0.npz", {"": table})


def d3rlpy_v1(rng: Rng) -> Draft:
    discrete = bool(rng.random() < 0.3)
    columns = stacked(random_episodes(rng, discrete=discrete))
    table = _pick(columns, "observations actions rewards")
    if discrete:
        table["actions"] = table["actions"].astype(np.int32)
    flags = np.float32 if rng.random() < 0.7 else bool
    table["terminals"] = columns["terminations"].astype(flags)
    table["episode_terminals"] = columns["episode_ends"].astype(flags)
    table["discrete_action"], table["version"] = np.bool_(discrete), np.bytes_("1.0")
    return Draft("hdf5", "case.h5", {"": table})


def d3rlpy_v2(rng: Rng) -> Draft:
    episodes = random_episodes(rng, discrete=rng.random() < 0.3)
    table: Table = {}
    for i, e in enumerate(episodes):
        table[f"observations_{i}"] = e.observations[:-1]
        table[f"actions_{i}"] = e.actions.reshape(len(e.actions), -1)
        table[f"rewards_{i}"] = e.rewards.reshape(-1, 1)
        table[f"terminated_{i}"] = np.bool_(e.terminated)
    table["total_size"], table["version"] = np.int64(len(episodes)), np.bytes_("2.1")
    return Draft("hdf5", "case.h5", {"": table})


def padded(rng: Rng) -> Draft:
    episodes = random_episodes(rng, discrete=rng.random() < 0.2)
    longest = max(len(e.rewards) for e in episodes) + int(rng.integers(0, 3))

    def fill(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values, np.zeros((longest - len(values), *values.shape[1:]), values.dtype)])

    table = {
        "observations": np.stack([fill(e.observations[:-1]) for e in episodes]),
        "actions": np.stack([fill(e.actions) for e in episodes]),
        "rewards": np.stack([fill(e.rewards) for e in episodes]),
        "masks": np.stack([fill(np.ones(len(e.rewards), np.float32)) for e in episodes]),
    }
    if rng.random() < 0.5:
        ends = [np.arange(longest) == len(e.rewards) - 1 for e in episodes]
        table["terminals"] = np.stack([x & e.terminated for x, e in zip(ends, episodes, strict=True)])
    if rng.random() < 0.3:
        table["rewards"], table["masks"] = table["rewards"][..., None], table["masks"][..., None]
    container = str(rng.choice(["npz", "hdf5", "parquet"], p=[0.4, 0.4, 0.2]))
    if container != "parquet":
        return Draft(container, f"case.{container}", {"": table})
    order = rng.permutation(len(episodes))
    rows: Table = {"row_index": order}
    for name, values in table.items():
        rows[f"{name}_data"] = [values[i].tobytes() for i in order]
        rows[f"{name}_shape"] = [str(values.shape)] * len(order)
        rows[f"{name}_dtype"] = [str(values.dtype)] * len(order)
    return Draft("parquet", "case.parquet", {"": rows})
