"""Settings of `offrl benchmark`. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offrl.settings.evaluation import MOST_PROCESSES
from offrl.settings.field import setting


@dataclass
class BenchmarkConfig:
    """Settings of `offrl benchmark`; every other one is a setting of `offrl train` and goes to all cells."""

    suite: str = setting("d4rl-gym", "a suite of configs/suite, or a YAML file; `own` takes datasets=a.hdf5,b.hdf5")
    algos: list[str] = setting(
        ["bc", "td3_bc", "iql"], "algorithms; ALGO.NAME=VALUE sets something for one of them: iql.temperature=5"
    )
    datasets: list[str] = setting([], "only these datasets of the suite; for suite=own, its files or names")
    seeds: Any = setting(5, "how many seeds (0, 1, ...) or a list of seeds; all seeds of a cell train at once")
    steps: int | None = setting(None, "updates of each seed; null: the suite's, or else the algorithm's own", low=1)
    name: str | None = setting(None, "the benchmark's folder in runs_dir; null: the suite's name")
    runs_dir: str = setting("runs", "where the benchmark's folder is made")
    launcher: str = setting(
        "serial", "what runs the cells: serial, local, ray, slurm, slurm_local; launcher.NAME=VALUE sets it up"
    )
    jobs: int | None = setting(
        None,
        "cells at once, with a launcher; null: one for each core, or the launcher's own number",
        low=1,
        high=MOST_PROCESSES,
    )
    retry: bool = setting(True, "train failed cells again; false leaves them failed")
    dry_run: bool = setting(False, "print the cells and how far they are, and train nothing")
    quiet: bool = setting(False, "print the final table only (also --quiet)")


@dataclass
class VariantsConfig:
    """Settings of `offrl finetune robust=`: which variants of its environment it learns on."""

    robust: str | None = setting(
        None,
        "learn on variants of the environment, one run for each: a parameter and its range, as in offrl evaluate (a "
        "YAML file of one line, or rrls:1); writes RUNS_DIR/NAME/variants.csv and .json",
    )
    points: str = setting("grid", "robust=: the variants, grid or grid:20, at equal distances")
    budget: int = setting(3, "robust=: how many of the variants are trained on", low=1)
    choose: str = setting(
        "equal", "robust=: which: equal spacing, or MBTL's choice after each training", choices=("equal", "mbtl")
    )
