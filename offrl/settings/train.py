"""Typed settings of a run. Imports no torch, so that help and mistakes in a command are quick."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

from offrl.errors import UserError, nearest
from offrl.settings.dataset import DatasetConfig
from offrl.settings.encoder import EncoderConfig
from offrl.settings.evaluation import MOST_PROCESSES, EvalConfig
from offrl.settings.field import setting

LOGGERS = ("tensorboard", "wandb")


@dataclass
class CheckpointConfig:
    """Frequency of checkpoints, and how many to keep."""

    every: int | None = setting(
        None, "updates between checkpoints; null: with every evaluation and at least 20 times a run", low=1
    )
    keep: int = setting(2, "how many checkpoints to keep; 0 keeps all", low=0)


@dataclass
class TrainConfig:
    """All settings that decide a run. `algo` is a dataclass of its own, one for each algorithm."""

    algo: Any = setting(None, "the algorithm; `offrl list algo=NAME` shows its own settings", shown="iql")
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    experiment: str = setting(
        "auto", "per-dataset settings from configs/experiment: auto (by dataset), none, or algo/name"
    )
    # set by an experiment: patterns of the datasets' names that it is for
    match: list[str] = field(default_factory=list)
    seeds: Any = setting(4, "how many seeds (0, 1, ...) or a list of seeds, 3,7; all train at once")
    grid: dict[str, Any] = setting(
        {},
        "values to train side by side, every combination with every seed: grid.temperature=1,3,10 "
        "grid.expectile=0.7,0.9",
    )
    paired: bool = setting(
        False, "read the grid's lists side by side, first with first, second with second, in place of all combinations"
    )
    steps: int = setting(1_000_000, "updates of each seed", low=1)
    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps")
    compile: str = setting(
        "auto", "how the step runs: auto picks by device and length", choices=("auto", "eager", "cudagraph", "compiled")
    )
    precision: str = setting(
        "float32",
        "bf16: networks under autocast; tf32: CUDA products in TensorFloat-32; float32: neither",
        choices=("float32", "tf32", "bf16"),
    )
    threads: int = setting(
        1, "torch threads on CPU; more than 1 pays only where no other job runs", low=1, high=MOST_PROCESSES
    )
    workers: int | None = setting(
        None,
        "processes that train on CPU, one thread each; null: one for each core that is free when there are several "
        "replicas; on GPUs: one for each GPU",
        low=1,
        high=MOST_PROCESSES,
    )
    group: int | None = setting(
        None, "replicas trained as one program; null: as many as are fastest on the device and fit its memory", low=1
    )
    log_every: int = setting(1_000, "updates between two lines of metrics", low=1)
    stop: str = setting(
        "none",
        "none, or fqe-plateau: end the run when the values of its policies, by fitted Q evaluation on the data, no "
        "longer rise",
    )
    stop_patience: int = setting(3, "stop=fqe-plateau: evaluations in a row without a new best value", low=1)
    stop_updates: int = setting(10_000, "stop=fqe-plateau: updates of each fitted Q evaluation", low=1)
    compare: list[str] = setting(
        [], "algorithms to train as well, with their own default settings, for the final table"
    )
    runs_dir: str = setting("runs", "where run directories are made")
    plugins: list[str] = setting(
        [], "your own Python files with algorithms, networks, data sources, environments: plugins=my.py"
    )
    name: str | None = setting(None, "the run directory's name; null: algorithm, dataset and a hash of the settings")
    label: str | None = setting(None, "what tables and the run directory's name call the algorithm; null: its name")
    resume: str | None = setting(None, "a run directory to continue")
    config: str | None = setting(None, "a YAML file of settings; those on the command line win")
    logger: Any = setting(
        "tensorboard", "where curves are shown: tensorboard, wandb, several as [tensorboard,wandb], or none"
    )
    quiet: bool = setting(False, "print the final table only (also --quiet)")
    # as the user gave it, before defaults; for the runs of `compare`
    given: dict[str, Any] = field(default_factory=dict)


MOST_SEEDS = 10_000  # replicas, where there is a grid

# What may change when a run is continued: these do not alter a single update.
FREE = (
    "steps",
    "runs_dir",
    "name",
    "resume",
    "quiet",
    "compile",
    "device",
    "threads",
    "workers",
    "group",
    "stop",
    "stop_patience",
    "stop_updates",
    "compare",
    "checkpoint",
    "eval",
    "log_every",
    "match",
    "experiment",
    "label",
    "given",
    "config",
    "plugins",
    "logger",
)


def seed_list(seeds: Any) -> list[int]:
    """`4` -> [0, 1, 2, 3]; a list stays. Raises UserError for anything else, or for repeated or negative seeds."""
    if isinstance(seeds, bool) or not isinstance(seeds, (int, list, tuple, range)):
        raise UserError(f"seeds={seeds!r} must be a number of seeds or a list of seeds, such as seeds=4 or seeds=3,7")
    if isinstance(seeds, int) and seeds > MOST_SEEDS:
        raise UserError(
            f"seeds={seeds} asks for that many seeds at once, at most {MOST_SEEDS} can be; seed {seeds} alone is "
            f"seeds={seeds},"
        )
    if not isinstance(seeds, int) and len(seeds) > MOST_SEEDS:
        raise UserError(f"seeds= lists {len(seeds):,} seeds, at most {MOST_SEEDS:,} can train at once")
    values = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not values or any(isinstance(s, bool) or not isinstance(s, int) or not 0 <= s < 2**63 for s in values):
        raise UserError(f"seeds={seeds!r} must hold at least one seed, each a whole number from 0 to 2**63 - 1")
    if len(set(values)) != len(values):
        raise UserError(f"seeds={seeds!r} names a seed twice")
    return values


def logger_names(value: Any) -> list[str]:
    """`wandb`, `[tensorboard,wandb]` or `none` as a list. Raises UserError for others, and for packages that are not
    installed.
    """
    if not isinstance(value, str | list | tuple | None):
        raise UserError(f"logger={value} is no name of a logger; choose among {', '.join(LOGGERS)}, none")
    names = [value] if isinstance(value, str) else list(value or [])
    names = [] if names == ["none"] else names
    for name in names:
        if name not in LOGGERS:
            known = [*LOGGERS, "none"]
            raise UserError(f"logger={name} is not known; choose among {', '.join(known)}.{nearest(str(name), known)}")
        if name != "tensorboard" and importlib.util.find_spec(name) is None:
            raise UserError(f"logger={name} needs pip install {name}")
    return names
