"""The time of loading a Minari dataset, beside iterating its episodes: `python scripts/bench/data.py`.

Makes datasets of one million transitions (11 observations, 3 actions; 1,000 and 50,000 episodes of equal length) with
Minari itself in a temporary folder, and times, interleaved and in one process, on files that the operating system has
in memory:

- iterate: `minari.load_dataset(id).iterate_episodes()` to the end, nothing kept;
- first load: `offrl.load_dataset(id)` without the flat cache: everything up to columns that can be trained on, checks
  and fingerprint;
- second load: the same from the flat cache, with the same fingerprint.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data import Dataset, DatasetConfig, load_dataset

OBSERVATIONS, ACTIONS = 11, 3


def make(name: str, episodes: int, steps: int) -> None:
    """Write the dataset `name` below $MINARI_DATASETS_PATH: `episodes` episodes of `steps` steps."""
    import minari
    from gymnasium import spaces
    from minari.data_collector.episode_buffer import EpisodeBuffer

    def buffers() -> Iterator[Any]:
        rng, last = np.random.default_rng(0), np.arange(steps) == steps - 1
        for number in range(episodes):
            yield EpisodeBuffer(
                observations=rng.normal(size=(steps + 1, OBSERVATIONS)),
                actions=rng.uniform(-1, 1, (steps, ACTIONS)).astype(np.float32),
                rewards=rng.normal(size=steps),
                terminations=last & (number % 2 == 0),
                truncations=last & (number % 2 == 1),
            )

    observation_space = spaces.Box(-np.inf, np.inf, (OBSERVATIONS,), np.float64)
    action_space = spaces.Box(-1, 1, (ACTIONS,), np.float32)
    minari.create_dataset_from_buffers(
        name, list(buffers()), observation_space=observation_space, action_space=action_space
    )


def iterate(name: str) -> int:
    """Rows of the dataset, counted by going through its episodes."""
    import minari

    return sum(len(episode.rewards) for episode in minari.load_dataset(name).iterate_episodes())


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came out."""
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


def measure(name: str, rows: int, repeats: int, cache: str) -> dict[str, list[float]]:
    """Seconds of each of the three, `repeats` times in turns. Raises SystemExit if they do not see the same data."""
    times: dict[str, list[float]] = {"iterate": [], "first": [], "second": []}

    def load(kind: str) -> Dataset:
        return load_dataset(DatasetConfig(name=name, cache=kind, cache_dir=cache))

    fingerprint = load("always").fingerprint  # fills the cache, and is not counted
    for _ in range(repeats):
        for kind, function in {
            "iterate": lambda: iterate(name),
            "first": lambda: load("never"),
            "second": lambda: load("always"),
        }.items():
            seconds, result = timed(function)
            times[kind].append(seconds)
            if (result != rows) if kind == "iterate" else (len(result) != rows or result.fingerprint != fingerprint):
                raise SystemExit(f"{name}: {kind} saw other data")
            del result
    return times


def cpu() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="transitions of each dataset")
    parser.add_argument("--episodes", type=int, nargs="+", default=[1_000, 50_000], help="one dataset for each")
    parser.add_argument(
        "--repeats", type=int, default=5, help="times each thing is done (3 for 10,000 episodes or more)"
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore")  # Minari's, about descriptions that are missing
    from importlib.metadata import version

    packages = ", ".join(f"{p} {version(p)}" for p in ("minari", "h5py", "numpy"))
    print(
        f"`{' '.join(['python', *sys.argv])}`\n\n{cpu()}, {os.cpu_count()} cores; Python {platform.python_version()}, "
        f"{packages}.\n"
    )
    print("Seconds: median (smallest to largest).\n")
    print("| episodes | iterate (Minari) | first load | of iterating | second load |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="offrl-bench-") as folder:
        os.environ["MINARI_DATASETS_PATH"] = folder
        for episodes in options.episodes:
            name, steps = f"bench/e{episodes}-v0", options.rows // episodes
            make(name, episodes, steps)
            times = measure(
                name,
                episodes * steps,
                min(options.repeats, 3) if episodes >= 10_000 else options.repeats,
                f"{folder}/cache",
            )
            cells = [f"{statistics.median(t):.3f} ({min(t):.3f} to {max(t):.3f})" for t in times.values()]
            ratio = statistics.median(times["first"]) / statistics.median(times["iterate"])
            print(
                f"| {episodes:,} of {steps:,} steps | {cells[0]} | {cells[1]} | {ratio:.3f} | {cells[2]} |", flush=True
            )


if __name__ == "__main__":
    main()
