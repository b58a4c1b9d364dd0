"""Drafts of Minari datasets, of numbers and of texts, and of texts in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.fuzz.drafts import Draft, Rng, Table, random_episodes

WORDS = ("go north", "You are in the hall.\n", "take lamp", "ö", "", "A long text. " * 5, "日本", "\n")


def box(shape: tuple[int, ...], low: float | None = None, dtype: str = "float32") -> dict[str, Any]:
    """A Box as Minari writes it down; without bounds where `low` is None."""
    bound = np.inf if low is None else -low
    if dtype == "uint8":
        return {
            "type": "Box",
            "dtype": dtype,
            "shape": list(shape),
            "low": np.zeros(shape).tolist(),
            "high": np.full(shape, 255.0).tolist(),
        }
    return {
        "type": "Box",
        "dtype": dtype,
        "shape": list(shape),
        "low": np.full(shape, -bound).tolist(),
        "high": np.full(shape, bound).tolist(),
    }


def minari(container: str) -> Callable[[Rng], Draft]:
    def make(rng: Rng) -> Draft:
        discrete = bool(rng.random() < 0.3)
        kind = str(rng.choice(["box", "dict", "numbers", "image"], p=[0.55, 0.25, 0.1, 0.1]))
        image = kind == "image" and container == "minari"
        episodes = random_episodes(rng, discrete, (4, 4, 3) if image else None)
        width = episodes[0].observations.shape[1:]
        space = box(width, dtype="uint8" if image else "float32")
        tables: dict[str, Table] = {}
        for i, e in enumerate(episodes):
            table: Table = {
                "observations": e.observations,
                "actions": e.actions,
                "rewards": e.rewards.astype(np.float64),
            }
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
        action_space = (
            {"type": "Discrete", "dtype": "int64", "start": 0, "n": 4}
            if discrete
            else box(episodes[0].actions.shape[1:], -1.0)
        )
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
            meta["env_spec"] = json.dumps(
                {"id": "Nowhere-v0", "max_episode_steps": 50, "kwargs": {}, "additional_wrappers": []}
            )
        return Draft(container, "case-v0", tables, meta=meta)

    return make


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
            lines.append(
                {
                    "turns": turns,
                    "final_obs": final,
                    "terminated": done,
                    "truncated": not done and bool(rng.random() < 0.8),
                }
            )
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
            lines.append(
                [
                    {"state": word(), "action": word(), "reward": r, "done": d}
                    for r, d in zip(rewards, flags, strict=True)
                ]
            )
        else:
            lines.append(
                {"conversation": [f"Is it {k}? {word() or 'No.'}" for k in range(steps)], "done": done, "word": "Paris"}
            )
    if form == "turns" and rng.random() < 0.3:
        lines.insert(0, {"offrl": {"name": "mine"}})
    return Draft("json", "case.jsonl.gz" if rng.random() < 0.3 else "case.jsonl", lines=lines)
