"""Valid robot data in memory: LeRobot v2.1, robomimic and V-D4RL."""

from __future__ import annotations

import numpy as np

from tests.fuzz.drafts import Draft, Rng, random_episodes
from tests.support.lerobot import png

CAMERA = "observation.images.front"


def lerobot(rng: Rng) -> Draft:
    """A table for each episode, whose images are PNG in some cases."""
    episodes, seen = random_episodes(rng), bool(rng.random() < 0.4)
    tables, scored = {}, bool(rng.random() < 0.5)
    for number, e in enumerate(episodes):
        rows = len(e.rewards)
        table = {"observation.state": e.observations[:-1], "action": 9 * e.actions}
        table |= {"timestamp": np.arange(rows, dtype=np.float32) / 10, "frame_index": np.arange(rows)}
        table |= {"episode_index": np.full(rows, number), "task_index": np.zeros(rows, int)}
        if scored:
            table |= {"next.reward": e.rewards, "next.success": (np.arange(rows) == rows - 1) & e.terminated}
        if seen:
            frames = rng.integers(0, 256, (rows, 4, 5, 3)).astype(np.uint8)
            table[CAMERA] = [{"bytes": png(frame), "path": ""} for frame in frames]
        tables[f"episode_{number}"] = table
    shapes = {k: [4, 5, 3] if k == CAMERA else list(v.shape[1:]) or [1] for k, v in table.items()}
    types = {k: "image" if k == CAMERA else str(v.dtype) for k, v in table.items()}
    meta = {
        "codebase_version": "v2.1",
        "fps": 10,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "features": {k: {"dtype": types[k], "shape": shapes[k], "names": None} for k in table},
    }
    lines = [{"episode_index": k, "length": len(e.rewards)} for k, e in enumerate(episodes)]
    keys = ["observation.state", CAMERA] if seen else []
    return Draft("lerobot", "arm", tables, meta=meta, lines=lines, config={"observation_keys": keys})


def robomimic(rng: Rng) -> Draft:
    following, seen, tables = bool(rng.random() < 0.6), bool(rng.random() < 0.4), {}
    for number, e in enumerate(random_episodes(rng, number=int(rng.integers(2, 13)))):
        rows = len(e.rewards)
        frames = rng.integers(0, 256, (rows + 1, 4, 5, 3)).astype(np.uint8)
        last = np.arange(rows) == rows - 1
        table = {"actions": e.actions, "rewards": np.float64(last & e.terminated), "dones": last.astype(int)}
        for group, part in (("obs", slice(0, -1)), ("next_obs", slice(1, None)))[: 1 + following]:
            table |= {f"{group}/b": e.observations[part].astype(float), f"{group}/a": e.observations[part][:, :1]}
            if seen:
                table[f"{group}/view"] = frames[part]
        tables[f"data/demo_{number}"] = table
    return Draft("hdf5", "case.hdf5", tables, config={"observation_keys": ["a", "b", "view"] if seen else []})


def vd4rl(rng: Rng) -> Draft:
    """One file of states, an npz or a shard."""
    shard, parts = bool(rng.random() < 0.5), []
    for e in random_episodes(rng, shape=(4, 5, 3), number=3 if shard else 1):
        states = len(e.rewards) + 1
        steps, last = np.arange(states), np.arange(states) == states - 1
        part = {"action": np.concatenate([0 * e.actions[:1], e.actions]), "reward": np.append(0, e.rewards)}
        part["discount"] = 1.0 - (last & e.terminated)
        if shard:
            part |= {"observation": np.moveaxis(e.observations, -1, 1), "step_type": 1.0 + last - (steps == 0)}
        else:
            part |= {"image": e.observations, "is_first": steps == 0, "is_terminal": last & e.terminated}
        parts.append(part)
    table = {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}
    return Draft("hdf5" if shard else "npz", "0.hdf5" if shard else "20220101T000000-a-0.npz", {"": table})
