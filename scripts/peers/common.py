"""The parts that the contestants of scripts/compare_speed.py share: data, sizes, initial weights, and the protocol of a
burst.

A contestant is a program of its own (`python -m peers.NAME`). It warms up, prints one line of JSON, and then waits:
each line "burst SECONDS" on standard input makes it update for that long and print how often it did. Waiting costs
nothing, so that bursts of several contestants can be interleaved. This file needs NumPy only: some contestants run in
an environment without offrl.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

OBSERVATION, ACTION, BATCH, WIDTH = 11, 3, 256, 256
HIDDEN = (WIDTH, WIDTH)
COLUMNS = ("observations", "actions", "rewards", "masks", "next_observations")
CHECKED_UPDATES = 6
EPISODE = 1000  # steps of the longest
RETURN_SCALE = 1000.0  # a sequence model sees returns divided by this
# updates between two looks at the clock, where `serve`'s default would take long
CHUNKS = {"dt": 2, "cql": 4, "edac": 10, "rebrac": 10, "qrl": 2, "fql": 2, "qc": 2}

Arrays = dict[str, np.ndarray]
# runs that many updates to their end; returns losses, to show that something was learnt
Updates = Callable[[int], dict[str, float]]


_OUT = sys.stdout


def _own_output() -> None:
    """Libraries write to standard output as well: the answers get it for themselves, and the libraries' goes to
    standard error.
    """
    global _OUT
    _OUT = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


CHECKOUT = (
    ("--checkouts", {"type": Path, "required": True, "help": "folder of other people's repositories, as OWNER+NAME"}),
)


def options(*more: tuple[str, dict[str, Any]]) -> argparse.Namespace:
    """The command line of a contestant; `more` are further arguments of argparse."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000, help="transitions in the dataset")
    parser.add_argument("--replicas", type=int, default=1, help="seeds at once")
    parser.add_argument("--check", type=Path, help="print the losses of the updates in this file, and nothing else")
    for name, settings in more:
        parser.add_argument(name, **settings)
    parsed = parser.parse_args()
    _own_output()
    return parsed


def flags(rows: int, every: int = EPISODE) -> tuple[np.ndarray, np.ndarray]:
    """Terminations (one row in `every`, at random) and time-outs (each `every`-th row): two bool arrays [rows]."""
    terminations = np.random.default_rng(1).random(rows) < 1.0 / every
    timeouts = np.arange(rows) % every == every - 1
    return terminations, timeouts & ~terminations


def episodes(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The first row of each episode by `flags`, and the one after its last: two int64 arrays [E]."""
    ends = np.flatnonzero(np.logical_or(*flags(rows))) + 1
    return np.concatenate([[0], ends[:-1]]), ends


def transitions(rows: int, seed: int = 0) -> Arrays:
    """Noise in the shape of a dataset of Hopper: the columns `COLUMNS`, float32; masks = 1 - terminations."""
    g = np.random.default_rng(seed)
    states = g.standard_normal((rows + 1, OBSERVATION), dtype=np.float32)
    actions = g.random((rows, ACTION), dtype=np.float32) * 2.0 - 1.0
    rewards = g.standard_normal(rows, dtype=np.float32)
    masks = (~flags(rows)[0]).astype(np.float32)
    return dict(zip(COLUMNS, (states[:-1], actions, rewards, masks, states[1:]), strict=True))


def with_next_actions(rows: int) -> Arrays:
    """`transitions` and, in the column "next_actions", the actions of the rows after."""
    columns = transitions(rows)
    return {**columns, "next_actions": np.roll(columns["actions"], -1, 0)}


def save_check(path: Path, weights: Arrays, batches: list[Arrays]) -> None:
    """Write initial weights and batches, for `load_check`."""
    columns = {f"batch{i}/{k}": v for i, batch in enumerate(batches) for k, v in batch.items()}
    np.savez(path, **{f"weights/{k}": v for k, v in weights.items()}, **columns)  # type: ignore[arg-type]


def load_check(path: Path) -> tuple[Arrays, list[Arrays]]:
    """Initial weights, as "NET/w0" [in, out], "NET/b0" [out] and so on, and batches. (A transformer's and a
    goal-conditioned network's weights are under offrl's own names.)"""
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    weights = {k.removeprefix("weights/"): v for k, v in arrays.items() if k.startswith("weights/")}
    count = len({k.partition("/")[0] for k in arrays if k.startswith("batch")})
    batches = [{k.partition("/")[2]: v for k, v in arrays.items() if k.startswith(f"batch{i}/")} for i in range(count)]
    return weights, batches


def report(**values: Any) -> None:
    """Print one line of JSON where the parent reads it."""
    _OUT.write(json.dumps(values) + "\n")
    _OUT.flush()


def serve(updates: Updates, chunk: int = 20, **facts: Any) -> None:
    """Warm up, print `facts`, and then answer lines of standard input until it ends. `chunk`: updates between two looks
    at the clock.
    """
    first = updates(chunk)
    updates(chunk)
    report(ready=True, losses=first, **facts)
    for line in sys.stdin:
        seconds, done, start = float(line.split()[1]), 0, time.perf_counter()
        losses: dict[str, float] = {}
        while (now := time.perf_counter() - start) < seconds:
            losses = updates(chunk)
            done += chunk
        report(rate=done / now, losses=losses)
