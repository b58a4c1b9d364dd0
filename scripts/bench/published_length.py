"""Five methods at the published number of updates, four seeds each: scores, curves and the time they took.

    python scripts/bench/published_length.py --data ../shared/data --runs runs/published --jobs 2 --hours 8
    python scripts/bench/published_length.py --runs runs/published --out docs/benchmarks/published-length.md

The first command trains what is not finished, shortest first, and goes on where it was stopped; a job is one process
with one thread, or a GPU. The second writes the page: a row and a curve of what has finished here, those that the page
has of what finished on another machine, and of the rest how far it is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offrl.errors import UserError
from offrl.figures.curves import learning_curve
from offrl.runs.run import SavedRun
from offrl.runs.tables import interval_text
from offrl.statistics.intervals import mean_interval
from offrl.system.files import write_text


@dataclass(frozen=True)
class Published:
    """A run with published settings; what is not named here is the algorithm's default or belongs to the data's
    name.
    """

    algorithm: str
    file: str  # under --data
    settings: dict[str, Any] = field(default_factory=dict)
    sizes: str = "2 x 256, batch 256"
    updates: int = 1_000_000

    @property
    def name(self) -> str:
        return f"{self.algorithm}-{Path(self.file).stem}"


HOPPER = "d4rl/hopper_medium_replay.hdf5"
PLAN = (
    Published("bc", HOPPER),
    Published("td3_bc", HOPPER),
    Published("iql", HOPPER, {"experiment": "iql/d4rl-gym"}),
    # arXiv 2305.09836, table 11, hopper-medium-replay: the file's name is not D4RL's, so its row is given by hand
    Published("rebrac", HOPPER, {"algo.actor_bc": 0.05, "algo.critic_bc": 0.5}, "3 x 256, batch 1,024"),
    Published("qrl", "ogbench/pointmaze-medium-navigate-v0.npz", {}, "3 x 512, batch 1,024"),
)


def command(one: Published, data: Path, runs: Path) -> list[str]:
    """The command that trains it, or goes on with it."""
    program = [sys.executable, "-m", "offrl.cli", "train"]
    if (runs / one.name / "run.json").is_file():
        return [*program, f"resume={runs / one.name}"]
    settings = {
        "algo": one.algorithm,
        "dataset": data / one.file,
        "name": one.name,
        "runs_dir": runs,
        "seeds": 4,
        "steps": one.updates,
        "workers": 1,
        "eval.workers": 0,
        "eval.every": one.updates // 20,
        "checkpoint.every": 10_000,
        "log_every": 10_000,
        **one.settings,
    }
    return [*program, *(f"{k}={v}" for k, v in settings.items())]


def updates_made(run: Path) -> int:
    """The last update that a line of metrics tells of; 0 for a run that has not begun."""
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def hours(run: Path) -> float:
    """Time of all updates and evaluations, on one core or GPU; what a stop lost is not counted."""
    total, last = 0.0, 0
    for line in (run / "timing.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "updates_per_second" in entry and entry["step"] > last:
            total += (entry["step"] - last) / entry["updates_per_second"]
            last = entry["step"]
        total += entry.get("evaluation", 0.0)
    return total / 3600


def train(options: argparse.Namespace) -> None:
    """Train what is not finished, until the time is over; a run that is stopped saves and can go on."""
    options.runs.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 3600 * options.hours
    waiting = [one for one in PLAN if not options.only or one.algorithm in options.only]
    waiting = [one for one in waiting if updates_made(options.runs / one.name) < one.updates]
    running: list[subprocess.Popen[bytes]] = []
    while (waiting or running) and time.monotonic() < deadline:
        running = [p for p in running if p.poll() is None]
        while waiting and len(running) < options.jobs:
            one = waiting.pop(0)
            with (options.runs / f"{one.name}.log").open("ab") as log:
                running.append(subprocess.Popen(command(one, options.data, options.runs), stdout=log, stderr=log))
            print(f"{one.name}: from update {updates_made(options.runs / one.name):,}", flush=True)
        time.sleep(5)
    for process in running:
        process.terminate()  # it saves; a process begun in the background of a shell ignores SIGINT
    for process in running:
        process.wait()


def row(one: Published, runs: Path, page: str) -> str:
    """A row of the table. page: the present one, whose row stays where it is of a finished run and the one here is
    not.
    """
    run = runs / one.name
    made = updates_made(run)
    head = f"| {one.algorithm} | {Path(one.file).stem} | {one.sizes} | {made:,} of {one.updates:,} |"
    if made < one.updates:
        before = next((line for line in page.splitlines() if line.startswith(f"| {one.algorithm} |")), "")
        if f"{one.updates:,} of {one.updates:,}" in before:
            return before
        if made == 0:
            return f"{head} not begun | | |"
        return f"{head} not finished | | {hours(run):.1f} |"
    values = [float(scored["score"]) for scored in SavedRun(run).final_scores]
    return (
        f"{head} {interval_text(mean_interval(values))} | {', '.join(f'{v:.1f}' for v in values)} | {hours(run):.1f} |"
    )


HEAD = """# Published length

    {command}

4 seeds, published settings and sizes, last evaluation: mean over seeds with its 95% Student-t interval.
Scores are normalised with D4RL's reference returns; QRL's is the share of episodes that succeed, in %.
Hours are of one CPU core for all four seeds, as the runs' own clocks counted them.

| algorithm | data | networks | updates, of the **published** | score | seeds | hours |
|---|---|---|---|---|---|---|
"""
BY_HAND = "\n<!-- by hand -->\n"


def page(options: argparse.Namespace) -> None:
    """Write the page and its curves."""
    old = options.out.read_text(encoding="utf-8") if options.out.is_file() else ""
    rows = [row(one, options.runs, old) for one in PLAN]
    command = "python scripts/bench/published_length.py --data ../shared/data --runs runs/published"
    text = HEAD.format(command=command) + "\n".join(rows) + "\n"
    for one in PLAN:
        picture, run = options.out.with_name(f"{options.out.stem}-{one.algorithm}.png"), options.runs / one.name
        if updates_made(run) >= one.updates:
            title = f"{Path(one.file).stem}, published length"
            learning_curve({one.algorithm: run / "scores.csv"}, picture, title=title)
        if picture.is_file():
            text += f"\n![Scores of {one.algorithm} over updates]({picture.name})\n"
    write_text(options.out, text + "".join(old.partition(BY_HAND)[1:]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/published"))
    parser.add_argument("--data", type=Path, help="folder that holds d4rl/ and ogbench/")
    parser.add_argument("--only", nargs="*", default=[], choices=sorted({one.algorithm for one in PLAN}))
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, each on one core; one on a GPU")
    parser.add_argument("--hours", type=float, default=1e6, help="stop after so long; the next call goes on")
    parser.add_argument("--out", type=Path, help="write the page instead of training")
    options = parser.parse_args()
    if not options.out and not options.data:
        parser.error("--data is missing: the folder that holds d4rl/ and ogbench/")
    try:
        page(options) if options.out else train(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
