"""Run directories: what identifies a run, what is written next to its checkpoints, and reading it all back."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offrl import checkpoint
from offrl.config import FREE, TrainConfig, seed_list
from offrl.errors import UserError
from offrl.logging import Result, final_table
from offrl.stats import mean_interval

if TYPE_CHECKING:
    import torch

    from offrl.data.dataset import Dataset
    from offrl.evaluate import Evaluation
    from offrl.policy import TrainedPolicy

CONFIG, RECORD, SCORES, CURVE = "config.yaml", "run.json", "scores.csv", "learning_curve.png"
PACKAGES = ("offrl", "torch", "numpy", "gymnasium", "mujoco", "minari", "h5py", "gymnasium-robotics")


def identity(config: TrainConfig) -> dict[str, Any]:
    """The settings that decide the parameters that come out; two runs that agree in these are the same run."""
    values = {k: v for k, v in dataclasses.asdict(config).items() if k not in FREE}
    values["seeds"] = seed_list(config.seeds)
    for place in ("name", "cache_dir", "mirror", "memory", "memory_limit_gb"):  # where the data lie; what they are, the fingerprint says
        values["dataset"].pop(place)
    return values


def directory(config: TrainConfig, dataset: Dataset) -> Path:
    """Where a run belongs: a name given by hand, or one made of the algorithm, the data set and a hash of the settings.

    The same command therefore finds its own run again.
    """
    if config.name:
        return Path(config.runs_dir) / config.name
    settings = {**identity(config), "data": dataset.fingerprint, "env": config.eval.env}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:6]
    data = "".join(c if c.isalnum() or c in "-_." else "-" for c in dataset.spec.name)
    return Path(config.runs_dir) / f"{config.label}-{data}-{digest}"


def prepare(run_dir: Path, config: TrainConfig, dataset: Dataset, choose_mode: Callable[[], str], device: torch.device) -> str:
    """Check that `run_dir` is free or holds this very run, write its config and record, and return the mode of the step.

    A resumed run keeps the mode that it began with: another one would round differently. Raises UserError when another run is there.
    """
    old = read_record(run_dir) if (run_dir / RECORD).exists() else None
    settings = identity(config)
    _refuse_to_overwrite(run_dir, old is not None)
    if old is not None:
        if old["data"]["fingerprint"] != dataset.fingerprint:
            raise UserError(
                f"{run_dir} was trained on {old['data']['name']} ({old['data']['fingerprint'][:12]}) and this is {dataset.spec.name} "
                f"({dataset.fingerprint[:12]}): a run continues on its own data only; choose another name="
            )
        change = _difference(old["identity"], json.loads(json.dumps(settings, default=str)))
        if change:
            raise UserError(f"{run_dir} holds another run ({change}); choose another name=, or use the settings it began with")
    same_device = old is not None and old["device"] == device.type
    mode = old["mode"] if old is not None and same_device and config.compile == "auto" else choose_mode()
    record = {
        "label": config.label,
        "identity": settings,
        "data": dataset.describe(),
        "spec": dataset.spec.to_json(),
        "env": config.eval.env,
        "mode": mode,
        "device": device.type,
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    checkpoint.write_text(run_dir / RECORD, json.dumps(record, indent=1, default=str) + "\n")
    from omegaconf import OmegaConf

    saved = dataclasses.replace(config, name=run_dir.name, resume=None, config=None)
    checkpoint.write_text(run_dir / CONFIG, OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(saved))))
    return mode


def _refuse_to_overwrite(run_dir: Path, known: bool) -> None:
    """Raise UserError where starting anew would write over a stranger's files, or over a finished run that lost its checkpoints."""
    if known and (run_dir / "policies").exists() and not checkpoint.steps(run_dir):
        raise UserError(
            f"{run_dir} holds a finished run without checkpoints, and training anew would overwrite it; "
            "remove that folder, or choose another name="
        )
    if not known and (others := sorted(p.name for p in run_dir.iterdir() if not p.name.startswith("."))):
        raise UserError(f"{run_dir} is no run directory and not empty (it has {', '.join(others[:3])}); choose another name= or runs_dir=")


def _difference(old: Any, new: Any, name: str = "") -> str:
    """`algo.name: iql there, bc here` for the first setting that differs, or an empty string."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*(k for k in ("name",) if k in old), *old, *new]:
            if key not in old or key not in new:
                continue  # a setting that only one version knows
            if change := _difference(old[key], new[key], f"{name}.{key}" if name else key):
                return change
        return ""
    return "" if old == new else f"{name}: {old} there, {new} here"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_record(run_dir: Path) -> dict[str, Any]:
    """What `prepare` wrote about a run. Raises UserError when `run_dir` holds no run."""
    try:
        return json.loads((run_dir / RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        there = sorted(p.parent.name for p in run_dir.parent.glob(f"*/{RECORD}"))
        from offrl.errors import nearest

        raise UserError(f"{run_dir} is not a run directory (it has no {RECORD}).{nearest(run_dir.name, there)}") from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{run_dir / RECORD} cannot be read ({error}); restore the file that offrl wrote, or choose another name="
        ) from None


class Run:
    """A run directory, read back: its settings, scores and policies."""

    def __init__(self, run_dir: str | Path) -> None:
        """Raises UserError when there is no run."""
        self.dir = Path(run_dir)
        self.record = read_record(self.dir)
        self.seeds: list[int] = self.record["identity"]["seeds"]
        self.algorithm: str = self.record.get("label", self.record["identity"]["algo"]["name"])
        self.dataset: str = self.record["data"]["name"]

    def __repr__(self) -> str:
        return f"Run({str(self.dir)!r}: {self.algorithm} on {self.dataset}, seeds {self.seeds})"

    @property
    def scores(self) -> list[dict[str, Any]]:
        """The rows of scores.csv, numbers as numbers and empty cells as None."""
        import csv

        path = self.dir / SCORES
        if not path.exists():
            return []
        with open(path, newline="", encoding="utf-8") as file:
            return [{k: _number(v) for k, v in row.items()} for row in csv.DictReader(file)]

    @property
    def final_scores(self) -> list[dict[str, Any]]:
        """The rows of the last evaluation, one for each seed."""
        rows = self.scores
        return [r for r in rows if r["step"] == rows[-1]["step"]]

    @property
    def diverged(self) -> list[int]:
        """Seeds that were frozen because a loss was not finite."""
        found = checkpoint.load_latest(self.dir)
        return [] if found is None else [s for s, ok in zip(self.seeds, found[0]["alive"].tolist(), strict=True) if not ok]

    def policy(self, seed: int | None = None) -> TrainedPolicy:
        """The policy of one seed, the first by default. Raises UserError for a seed that was not trained, or before training ended."""
        from offrl.policy import TrainedPolicy

        seed = self.seeds[0] if seed is None else seed
        if seed not in self.seeds:
            raise UserError(f"{self.dir} has no seed {seed}; it has {', '.join(map(str, self.seeds))}")
        path = self.dir / "policies" / f"seed_{seed}.safetensors"
        if not path.exists():
            raise UserError(f"{path} does not exist: training has not finished; `offrl train resume={self.dir}` continues it")
        return TrainedPolicy.load(path)

    def evaluate(self, episodes: int = 10, seed: int = 0, env: Any = None, parallel: int = 64, max_steps: int | None = None) -> Evaluation:
        """Score the final policies again. `env`: a Gymnasium id, "auto" (the data set's), a function that makes an environment, or None
        for the one that the run was scored in. Raises UserError where there is none, or it does not fit the data."""
        from offrl.data.dataset import DataSpec
        from offrl.evalconfig import EvalConfig
        from offrl.evaluate import check_fit, evaluate, resolve_task

        spec = DataSpec.from_json(self.record["spec"])
        own = self.record.get("env", "auto")
        name = env if isinstance(env, str) else "auto" if callable(env) or own == "none" else own
        config = EvalConfig(episodes=episodes, seed=seed, parallel=parallel, env=name, max_steps=max_steps)
        task = with_factory(spec.task, env, spec.name) if callable(env) else spec.task
        task = resolve_task(task, config)
        if task is None:
            raise UserError(f"{self.dir}: there is no environment to score in; name one: offrl evaluate {self.dir} env=ID")
        check_fit(spec, task)
        return evaluate([self.policy(s) for s in self.seeds], self.seeds, task, config)

    def result(self) -> Result | None:
        """The last evaluation as a row of a table, or None when nothing was scored."""
        rows = self.scores and self.final_scores
        if not rows:
            return None
        return summarise(self.algorithm, rows, self.record)

    def plot(self, others: Sequence[Run] = ()) -> bool:
        """Draw learning_curve.png; False when there is nothing to draw."""
        from offrl.plots import learning_curve

        files = {run.algorithm: run.dir / SCORES for run in (self, *others) if (run.dir / SCORES).exists()}
        result = self.result()
        behaviour = result.behaviour if result else None
        return bool(files) and learning_curve(files, self.dir / CURVE, behaviour=behaviour, title=f"{self.algorithm} on {self.dataset}")


def summarise(algorithm: str, rows: Sequence[dict[str, Any]], record: dict[str, Any]) -> Result:
    """One row of the final table from the rows of one evaluation."""

    def interval(key: str) -> tuple[float, float, float] | None:
        values = [r[key] for r in rows]
        return None if any(v is None for v in values) else mean_interval(values)

    returns, score = interval("return_mean"), interval("score")
    assert returns is not None
    behaviour = record["data"]["return_mean"]
    task = record["spec"].get("task")
    if score is not None and task:
        behaviour = 100.0 * (behaviour - task["ref_min"]) / (task["ref_max"] - task["ref_min"])
    return Result(algorithm, len(rows), returns, score, interval("success"), behaviour)


def with_factory(task: Any, factory: Callable[[], Any], name: str) -> Any:
    """The task scored in the environment that `factory` makes."""
    from offrl.tasks import Task

    if task is None:
        return Task(name=name, env_factory=factory)
    return dataclasses.replace(task, env_id=None, env_kwargs={}, env_factory=factory, max_episode_steps=None, observation_keys=())


def report(runs: Sequence[Run], title: str) -> None:
    """Print the final table of runs on the same data."""
    results = [r for run in runs if (r := run.result()) is not None]
    if results:
        final_table(results, title)


def _number(text: str) -> Any:
    if text == "":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
