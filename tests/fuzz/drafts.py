"""Valid files in memory, before they are written: random episodes, and their columns in each layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Table = dict[str, Any]  # column -> array
Rng = np.random.Generator


@dataclass
class Draft:
    """What is to be written. Slips change `tables`, `meta` and `lines`."""

    container: str  # hdf5 | npz | parquet | minari | arrow | json
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


def random_episodes(rng: Rng, discrete: bool = False, shape: tuple[int, ...] | None = None, number: int = 0) -> list[Episode]:
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
        episodes.append(Episode(observations, actions, rng.normal(size=steps).astype(np.float32), bool(rng.random() < 0.5)))
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
    attributes = {} if rng.random() < 0.7 else {"dataset_id": "mine/case-v0", "ref_min_score": -1.5, "ref_max_score": 20.0}
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
        for column, key in (("observations", "obs"), ("rewards", "r"), ("actions", "train/act"), ("terminations", "done")):
            if column in table and rng.random() < 0.5:
                table[key] = table.pop(column)
                fields[column] = key
    return _precision(rng, table), fields


def _columns(container: str, name: str) -> Callable[[Rng], Draft]:
    def make(rng: Rng) -> Draft:
        table, fields = _plain(rng)
        if container == "parquet":
            table = {k: v.astype(v.dtype.newbyteorder("=")) for k, v in table.items()}  # Arrow has no other
            table.pop("final_observations", None)
            if len(table.get("episode_ends", table["rewards"] if "rewards" in table else table[fields["rewards"]])) != len(
                next(iter(table.values()))
            ):
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


def box(shape: tuple[int, ...], low: float | None = None, dtype: str = "float32") -> dict[str, Any]:
    """A Box as Minari writes it down; without bounds where `low` is None."""
    bound = np.inf if low is None else -low
    if dtype == "uint8":
        return {"type": "Box", "dtype": dtype, "shape": list(shape), "low": np.zeros(shape).tolist(), "high": np.full(shape, 255.0).tolist()}
    return {"type": "Box", "dtype": dtype, "shape": list(shape), "low": np.full(shape, -bound).tolist(), "high": np.full(shape, bound).tolist()}


def _minari(container: str) -> Callable[[Rng], Draft]:
    def make(rng: Rng) -> Draft:
        discrete = bool(rng.random() < 0.3)
        kind = str(rng.choice(["box", "dict", "numbers", "image"], p=[0.55, 0.25, 0.1, 0.1]))
        image = kind == "image" and container == "minari"
        episodes = random_episodes(rng, discrete, (4, 4, 3) if image else None)
        width = episodes[0].observations.shape[1:]
        space = box(width, dtype="uint8" if image else "float32")
        tables: dict[str, Table] = {}
        for i, e in enumerate(episodes):
            table: Table = {"observations": e.observations, "actions": e.actions, "rewards": e.rewards.astype(np.float64)}
            ends = np.arange(len(e.rewards)) == len(e.rewards) - 1
            table["terminations"], table["truncations"] = ends & e.terminated, ends & (not e.terminated)
            if kind == "dict":
                del table["observations"]
                table["observations/observation"] = e.observations
                table["observations/achieved_goal"] = e.observations[:, :1] * 2
                table["observations/desired_goal"] = e.observations[:, :1] * 3
            elif kind == "numbers":
                table["observations"] = np.arange(len(e.observations)) % 5
            if rng.random() < 0.3:
                table["infos/success"] = np.zeros(len(e.observations), bool)
            tables[f"episode_{i}"] = table
        if kind == "dict":
            goals = {k: box((1,)) for k in ("achieved_goal", "desired_goal")}
            space = {"type": "Dict", "subspaces": {**goals, "observation": space}}
        elif kind == "numbers":
            space = {"type": "Discrete", "dtype": "int64", "start": 0, "n": 5}
        action_space = {"type": "Discrete", "dtype": "int64", "start": 0, "n": 4} if discrete else box(episodes[0].actions.shape[1:], -1.0)
        form = "hdf5" if container == "minari" else str(rng.choice(["arrow", "parquet"]))
        meta = {
            "dataset_id": "mine/case-v0",
            "total_episodes": len(episodes),
            "total_steps": sum(len(e.rewards) for e in episodes),
            "data_format": form,
            "observation_space": json.dumps(space),
            "action_space": json.dumps(action_space),
            "minari_version": "0.5.3",
            "author": ["nobody"],
        }
        if image:
            meta["jpeg_encoding"] = True  # Minari's default, which HDF5 storage does not heed
        if rng.random() < 0.3:
            meta["ref_min_score"], meta["ref_max_score"] = 0.0, 10.0
            meta["env_spec"] = json.dumps({"id": "Nowhere-v0", "max_episode_steps": 50, "kwargs": {}, "additional_wrappers": []})
        return Draft(container, "case-v0", tables, meta=meta)

    return make


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


WORDS = ("go north", "You are in the hall.\n", "take lamp", "ö", "", "A long text. " * 5, "日本", "\n")


def text(rng: Rng) -> Draft:
    """JSON lines of offrl's own form, of LMRL-Gym's or of ArCHer's."""

    def word() -> str:
        return str(rng.choice(WORDS))

    form = str(rng.choice(["turns", "sequence", "history", "steps", "dialogue"], p=[0.6, 0.1, 0.1, 0.1, 0.1]))
    lines: list[Any] = []
    for _ in range(int(rng.integers(1, 6))):
        steps, done = int(rng.integers(1, 6)), bool(rng.random() < 0.5)
        rewards = [round(float(r), 3) for r in rng.normal(size=steps)]
        if form == "turns":
            turns = [{"obs": word(), "action": word(), "reward": r} for r in rewards]
            final = None if rng.random() < 0.3 else word()
            lines.append({"turns": turns, "final_obs": final, "terminated": done, "truncated": not done and bool(rng.random() < 0.8)})
            if rng.random() < 0.3:
                lines[-1]["meta"] = {"player": word()}
        elif form == "sequence":
            sequence = [[word(), bool(k % 2)] for k in range(2 * steps + 1)]
            lines.append({"sequence": sequence, "reward": rewards, "done": done})
        elif form == "history":
            flags = [False] * (steps - 1) + [done]
            lines.append({"text_history": [word() for _ in range(2 * steps + 1)], "rewards": rewards, "dones": flags})
        elif form == "steps":
            flags = [False] * (steps - 1) + [done]
            lines.append([{"state": word(), "action": word(), "reward": r, "done": d} for r, d in zip(rewards, flags, strict=True)])
        else:
            lines.append({"conversation": [f"Is it {k}? {word() or 'No.'}" for k in range(steps)], "done": done, "word": "Paris"})
    if form == "turns" and rng.random() < 0.3:
        lines.insert(0, {"offrl": {"name": "mine"}})
    return Draft("json", "case.jsonl.gz" if rng.random() < 0.3 else "case.jsonl", lines=lines)


def minari_text(rng: Rng) -> Draft:
    """A Minari dataset of texts."""
    tables: dict[str, Table] = {}
    steps = []
    for i in range(int(rng.integers(1, 5))):
        count, done = int(rng.integers(1, 6)), bool(rng.random() < 0.5)
        ends = np.arange(count) == count - 1
        texts = {"observations": np.array([str(rng.choice(WORDS[:3])) for _ in range(count + 1)], object)}
        texts["actions"] = np.array([str(rng.choice(WORDS[:3])) for _ in range(count)], object)
        flags = {"terminations": ends & done, "truncations": ends & (not done)}
        tables[f"episode_{i}"] = texts | {"rewards": rng.normal(size=count)} | flags
        steps.append(count)
    space = json.dumps({"type": "Text", "max_length": 100, "min_length": 0, "charset": "abc"})
    form = str(rng.choice(["hdf5", "arrow"]))
    meta = {"dataset_id": "mine/case-v0", "total_episodes": len(steps), "total_steps": sum(steps), "data_format": form}
    meta |= {"observation_space": space, "action_space": space, "minari_version": "0.5.3"}
    return Draft("minari" if form == "hdf5" else "arrow", "case-v0", tables, meta=meta)


LAYOUTS: dict[str, Callable[[Rng], Draft]] = {
    "d4rl": d4rl,
    "hdf5": _columns("hdf5", "case.hdf5"),
    "npz": _columns("npz", "case.npz"),
    "parquet": _columns("parquet", "case.parquet"),
    "ogbench": ogbench,
    "d3rlpy1": d3rlpy_v1,
    "d3rlpy2": d3rlpy_v2,
    "minari": _minari("minari"),
    "arrow": _minari("arrow"),
    "padded": padded,
    "text": text,
    "minari-text": minari_text,
}
