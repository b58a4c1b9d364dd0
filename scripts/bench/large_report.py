"""The time and the size of `offrl report` on large folders: `python scripts/bench/large_report.py`.

Makes them in a temporary folder, from a small run that it trains first (or `--template RUN`): 5,000 run directories of
one seed each (5 algorithms x 20 datasets x 50 seeds: the template's files under other names and seeds, the numbers
moved by noise); one table of results with a million rows (5 x 20 x 10 seeds x 1,000 evaluations); one run of 10 seeds
whose own scores.csv has a million rows. Reports on each and prints wall-clock and CPU seconds of the command, memory
and the size of the page.

    python scripts/bench/large_report.py --make FOLDER --scale 0.1      # only make the folders, of a tenth of the size
    python scripts/bench/large_report.py --on FOLDER                    # report on folders made before
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from offrl.runs.score import COLUMNS

ALGORITHMS = ("bc", "td3_bc", "iql", "cql", "rebrac")
DATASETS = tuple(f"{env}-{kind}-v2" for env in ("hopper", "halfcheetah", "walker2d", "ant") for kind in
                 ("random", "medium", "medium-replay", "medium-expert", "expert"))  # fmt: skip
PLACES = {"hopper": "Hopper-v4", "halfcheetah": "HalfCheetah-v4", "walker2d": "Walker2d-v4", "ant": "Ant-v4"}
PACKAGES = "gymnasium 1.4.0, mujoco 3.11.0"
TRAIN = (
    "algo=bc dataset=builtin seeds=1 steps=2000 compile=eager compare=[] eval.every=100 eval.episodes=2 "
    "eval.max_steps=40 log_every=20"
)
REPORTS = ("runs", "table.csv", "long")


def make(folder: Path, template: Path, scale: float) -> None:
    rng = np.random.default_rng(0)
    runs(folder / "runs", template, max(1, round(50 * scale)), rng)
    table(folder / "table.csv", max(1, round(1000 * scale)), rng)
    long(folder / "long", template, max(1, round(100_000 * scale)), rng)


def runs(folder: Path, template: Path, seeds: int, rng: np.random.Generator) -> None:
    """One run directory for each algorithm, dataset and seed."""
    record, config = json.loads((template / "run.json").read_text()), (template / "config.yaml").read_text()
    scores, metrics = (
        (template / "scores.csv").read_text(),
        [json.loads(x) for x in (template / "metrics.jsonl").read_text().splitlines()],
    )
    header, *rows = csv.reader(scores.splitlines())
    for algorithm in ALGORITHMS:
        for dataset in DATASETS:
            for seed in range(seeds):
                target = folder / f"{algorithm}-{dataset}-{seed}"
                target.mkdir(parents=True)
                one = json.loads(json.dumps(record))
                one["label"], one["identity"]["seeds"], one["data"]["name"] = algorithm, [seed], dataset
                one["data"]["fingerprint"] = f"{DATASETS.index(dataset):064x}"
                one["replicas"] = [{"seed": seed}]
                (target / "run.json").write_text(json.dumps(one, indent=1))
                (target / "config.yaml").write_text(
                    re.sub(r"^seeds:.*(\n- .*)*", f"seeds:\n- {seed}", config, flags=re.M)
                )
                level = 10.0 * ALGORITHMS.index(algorithm) + rng.normal()
                with open(target / "scores.csv", "w", newline="") as file:
                    writer = csv.writer(file, lineterminator="\n")
                    writer.writerow(header)
                    for row in rows:
                        full = dict(zip(header, row, strict=True))
                        if full["seed"] == rows[0][1]:
                            place = PLACES[dataset.partition("-")[0]]
                            full |= {
                                "seed": str(seed),
                                "score": repr(level + rng.normal()),
                                "env_id": place,
                                "reference": "D4RL",
                            }
                            full["dataset"] = dataset
                            writer.writerow(full[name] for name in header)
                with open(target / "metrics.jsonl", "w") as file:
                    for line in metrics:
                        moved = {
                            k: [v[0] * rng.uniform(0.9, 1.1)] if isinstance(v, list) else v for k, v in line.items()
                        }
                        file.write(json.dumps(moved) + "\n")
                shutil.copyfile(template / "timing.jsonl", target / "timing.jsonl")


def table(path: Path, evaluations: int, rng: np.random.Generator) -> None:
    """results.csv of 10 seeds of each algorithm on each dataset."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for a, algorithm in enumerate(ALGORITHMS):
            for dataset in DATASETS:
                place = PLACES[dataset.partition("-")[0]]
                for seed in range(10):
                    values = np.cumsum(rng.normal(size=evaluations)) / 10 + 10 * a
                    for i, value in enumerate(values.tolist(), start=1):
                        row = {
                            "suite": "",
                            "dataset": dataset,
                            "env_id": place,
                            "packages": PACKAGES,
                            "reference": "D4RL",
                            "scored_by": "return",
                            "algorithm": algorithm,
                            "settings": f"{a:08x}",
                            "seed": seed,
                            "step": 1000 * i,
                            "episodes": 10,
                            "raw": repr(32.5 * value),
                            "normalised": repr(value),
                            "success": "",
                            "cell": "",
                            "run": f"/data/experiments/2026/{dataset}/{algorithm}/runs/{algorithm}-{dataset}-0a1b2c",
                            "final": "true" if i == evaluations else "false",
                        }
                        writer.writerow(row[name] for name in COLUMNS)


def long(folder: Path, template: Path, evaluations: int, rng: np.random.Generator) -> None:
    """One run of 10 seeds, evaluated very often."""
    folder.mkdir(parents=True)
    record, config = json.loads((template / "run.json").read_text()), (template / "config.yaml").read_text()
    record["identity"]["seeds"], record["replicas"] = list(range(10)), [{"seed": s} for s in range(10)]
    (folder / "run.json").write_text(json.dumps(record, indent=1))
    config = re.sub(r"^seeds:.*(\n- .*)*", "seeds: 10", config, flags=re.M)
    (folder / "config.yaml").write_text(re.sub(r"^steps:.*", f"steps: {10 * evaluations}", config, flags=re.M))
    header, first = (template / "scores.csv").read_text().splitlines()[:2]
    names = header.split(",")
    base = dict(zip(names, next(csv.reader([first])), strict=True))
    with open(folder / "scores.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for i in range(1, evaluations + 1):
            for seed, value in enumerate(rng.normal(size=10).tolist()):
                row = {**base, "step": 10 * i, "seed": seed, "score": repr(value), "return_mean": repr(32.5 * value)}
                writer.writerow(row[name] for name in names)
    line = {"step": 10 * evaluations, "actor/loss": [0.0] * 10}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def measure(place: Path, out: Path) -> str:
    """A line on `offrl report place`."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    words = [sys.executable, "-m", "offrl.cli", "report", str(place), f"out={out}", "quiet=true"]
    subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    page = (out / "index.html").stat().st_size / 1e6
    size = sum(p.stat().st_size for p in ([place] if place.is_file() else place.rglob("*")) if p.is_file()) / 1e6
    return (
        f"| {place.name} | {size:,.0f} MB | {wall:.1f} | {cpu:.1f} | {after.ru_maxrss / 1e6:.1f} GB | {page:.1f} MB |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--template", type=Path, help="a small run")
    parser.add_argument("--make", type=Path, help="only make the folders, here")
    parser.add_argument("--on", type=Path, help="folders made before")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of seeds and evaluations")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="offrl-report-") as temporary:
        folder = options.on or options.make or Path(temporary) / "folders"
        if options.on is None:
            template = options.template
            if template is None:
                words = [*TRAIN.split(), f"runs_dir={temporary}", "name=template", "quiet=true"]
                subprocess.run(
                    [sys.executable, "-m", "offrl.cli", "train", *words], check=True, stdout=subprocess.DEVNULL
                )
                template = Path(temporary) / "template"
            make(folder, template, options.scale)
        if options.make is not None:
            return
        print(
            "| folder | size | wall s | CPU s | memory (highest so far) | page |\n|---|---|---|---|---|---|", flush=True
        )
        for name in REPORTS:
            print(measure(folder / name, Path(temporary) / f"report-{name}"), flush=True)


if __name__ == "__main__":
    main()
