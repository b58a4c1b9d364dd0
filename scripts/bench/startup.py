"""Seconds from the command to the first update and the first score, cold and warm, for one tree of offrl or several
that take turns.

    python scripts/bench/startup.py --tree . --tree ../before --rounds 3 --out FILE

Cold: an empty cache of compiled code. Warm: the cache that the cold run left. Processes of another tree are those of
`git worktree`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers.contest import span

MARKS = ("import", "data", "first update", "first score")
BEGAN, MARK = "OFFRL_BENCH_BEGAN", "startup:"
SETTINGS = [
    "algo=iql",
    "dataset=builtin",
    "experiment=iql/d4rl-gym",
    "steps=6000",
    "eval.every=100",
    "eval.episodes=1",
    "compare=[]",
    "device=cpu",
    "compile=compiled",
]
# what each of the trees has by these names
PROBE = """
import json, os, sys, time
def mark(name):
    print({mark!r}, json.dumps([name, time.monotonic() - float(os.environ[{began!r}])]), flush=True)
import offrl.cli.main, offrl.cli.train, offrl.api
mark("import")
from offrl.training.engine import Slices
from offrl.runs.log import RunLog
def after(place, attribute, name, last=False):
    original = getattr(place, attribute)
    def call(*a, **k):
        result = original(*a, **k)
        mark(name)
        setattr(place, attribute, original)
        if last:
            raise KeyboardInterrupt
        return result
    setattr(place, attribute, call)
after(offrl.api, "load_dataset", "data")
after(Slices, "done", "first update")
after(RunLog, "scores", "first score", True)
sys.exit(offrl.cli.main.main(["train", *sys.argv[1:]]))
"""


def start(tree: Path, cache: Path, runs: Path, settings: list[str]) -> dict[str, float]:
    """Marks of one command, in seconds of the clock, and the seconds of CPU that all of its processes took until they
    ended.
    """
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "TORCHINDUCTOR_CACHE_DIR")
    }
    environment |= {
        "PYTHONPATH": str(tree),
        "OFFRL_CACHE": str(cache),
        "PYTHONPYCACHEPREFIX": str(cache.parent / f"pyc-{tree.name}"),
    }
    command = [
        sys.executable,
        "-c",
        PROBE.format(mark=MARK, began=BEGAN),
        *SETTINGS,
        *settings,
        f"runs_dir={runs}",
        "quiet=true",
    ]
    before = os.times()
    environment[BEGAN] = repr(time.monotonic())
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cache.parent, check=False)
    after = os.times()
    marks = dict(json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines() if line.startswith(MARK))
    if MARKS[-1] not in marks:
        raise SystemExit(f"{tree}: {done.stdout}{done.stderr}")
    marks["CPU"] = after.children_user + after.children_system - before.children_user - before.children_system
    return marks


def measure(trees: list[Path], rounds: int, workers: list[int]) -> dict[tuple[Path, int, str], list[dict[str, float]]]:
    """Marks by (tree, processes, cold or warm), one for each round."""
    marks: dict[tuple[Path, int, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for tree in trees:  # bytecode, and the files of the system's cache
            start(tree, Path(folder, "first"), Path(folder, "runs-first"), ["compile=eager", "workers=1"])
        for number in range(rounds):
            for count in workers:
                for tree in trees:
                    cache = Path(folder, f"cache-{number}-{count}-{trees.index(tree)}")
                    for state in ("cold", "warm"):
                        runs = Path(folder, f"runs-{cache.name}-{state}")
                        row = start(tree, cache, runs, [f"workers={count}"])
                        marks.setdefault((tree, count, state), []).append(row)
                        print(
                            tree.name,
                            count,
                            state,
                            {k: round(v, 1) for k, v in row.items()},
                            file=sys.stderr,
                            flush=True,
                        )
    return marks


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tree", action="append", type=Path, help="a checkout; several take turns")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    trees = [tree.resolve() for tree in arguments.tree or [Path(__file__).parents[2]]]
    marks = measure(trees, arguments.rounds, arguments.workers)
    lines = [
        f"| tree | processes | compiled code | {' | '.join(MARKS)} | CPU until then |",
        "|---" * (len(MARKS) + 4) + "|",
    ]
    for (tree, count, state), rows in marks.items():
        cells = []
        for name in (*MARKS, "CPU"):
            values = [row[name] for row in rows]
            cells.append(span(values, 1))
        commit = subprocess.run(
            ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
        lines.append(f"| {commit.stdout.strip()} | {count} | {state} | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
