"""`offrl finetune robust=`: a run on each of some variants of an environment, and which policy to use where."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from offrl.benchmark.config import VariantsConfig
from offrl.benchmark.variants import Bank, train_bank
from offrl.errors import Interrupted, UserError, say, warn
from offrl.evaluation.studies import Study, study_of
from offrl.runs.run import SavedRun
from offrl.runs.tables import print_table
from offrl.settings.compose import fill, flatten
from offrl.settings.evaluation import EvalConfig
from offrl.settings.field import plain_name
from offrl.system import trust
from offrl.system.files import write_text
from offrl.system.signals import terminable
from offrl.tasks.environments import make_env, resolve_task
from offrl.tasks.perturbed import Perturbation, altered, hiding_friction
from offrl.tasks.task import Task

FILE, TABLE = "variants.json", "variants.csv"
SCORING = ("eval.episodes", "eval.seed", "eval.max_steps")  # settings of `Run.evaluate_robust` too
FREE = ("quiet", "runs_dir", "name", "threads")  # what may change when a folder is continued


@dataclass(frozen=True)
class VariantEnv:
    """What makes the environment of one variant."""

    task: Task
    perturbation: Perturbation

    def __post_init__(self) -> None:
        # what scores and reports call it
        object.__setattr__(self, "__qualname__", f"{self.task.env_id} with {_text(self.perturbation.values)}")

    def __call__(self) -> Any:
        return altered(make_env(self.task), self.perturbation)


def run(path: str | None, values: Mapping[str, Any], finetune: Callable[..., Any]) -> int:
    """Train on variants with the settings `values` of a command, and print which policy to use where.

    finetune: `offrl.api.finetune_from`, which stands above. Raises UserError for whatever is wrong with the settings.
    """
    values = flatten(values)
    names = {f.name for f in fields(VariantsConfig)}
    config = fill(VariantsConfig(), {k: v for k, v in values.items() if k in names}, "finetune")
    settings = {k: v for k, v in values.items() if k not in names}
    task = _task(path, settings)
    study, points = _variants(config, task)
    folder = _folder(settings, path, task)
    begun = {"study": asdict(config), "task": task.env_id, "run": path, "points": points}
    begun["settings"] = {k: v for k, v in settings.items() if k not in FREE}
    rows = _continued(folder, begun, config)

    def train(i: int) -> np.ndarray:
        if i not in rows:
            say(f"variant {i + 1} of {len(points)}: {_text(points[i])}")
            env = VariantEnv(task, Perturbation(points[i], not study.rrls))
            chosen = {**settings, "name": f"variant-{i}", "runs_dir": str(folder)}
            trained = finetune(path, chosen, env=env)
            scoring: dict[str, Any] = {
                k.removeprefix("eval."): int(settings[k]) for k in SCORING if settings.get(k) is not None
            }
            scores = trained.evaluate_robust(
                config.robust or "", config.points, env=task.env_id, quiet=bool(settings.get("quiet")), **scoring
            )
            rows[i] = scores.means(range(len(trained.replicas)))
            content = {**begun, "unit": scores.unit, "rows": {str(k): row.tolist() for k, row in rows.items()}}
            write_text(folder / FILE, json.dumps(content, indent=1) + "\n")
        return rows[i]

    values_of = np.array([next(iter(point.values())) for point in points])
    positions = (values_of - values_of.min()) / (np.ptp(values_of) or 1.0)
    try:
        with terminable():
            bank = train_bank(positions, config.budget, config.choose, train)
    except Interrupted as stop:
        say(f"offrl: {stop}", file=sys.stderr)
        return 130
    _report(bank, points, folder)
    return 0


def _task(path: str | None, settings: dict[str, Any]) -> Task:
    """The environment, as it is. It is taken out of `settings`: each run gets its variant's."""
    env = settings.pop("env", None)
    if path is not None:
        task = SavedRun(path).task(env)
    else:
        trust.typed(env)
        task = resolve_task(None, EvalConfig(env=env)) if env else None
    if task is None or (task.env_id is None and not task.parts):  # for which no study is
        raise UserError("robust= learns on variants of an environment: name it, env=ID")
    return task


def _variants(config: VariantsConfig, task: Task) -> tuple[Study, list[dict[str, float]]]:
    """The study and its points. Raises UserError for another number of parameters than one, and for noise; warns of
    variants that are one, for another geom's friction hides theirs."""
    with contextlib.closing(make_env(task)) as env:
        study = study_of(config.robust or "", env, task.env_id or task.name)
        names = list(study.ranges)
        hiding = hiding_friction(env, names[0])
    if len(names) != 1:
        raise UserError(
            f"robust={config.robust} varies {', '.join(names)}: variants lie along one parameter; take rrls:1, or a "
            "file of one line"
        )
    if names[0] == "noise":
        raise UserError(
            f"robust={config.robust}: noise is in units of data, which play has not; take another parameter"
        )
    if config.points.partition(":")[0] != "grid":
        raise UserError(f"points={config.points}: variants lie at equal distances; write points=grid:20")
    points = study.points(config.points)
    if len(points) < config.budget:
        raise UserError(f"budget={config.budget} trainings of {len(points)} variants: there are no more")
    hidden = sum(point[names[0]] <= hiding for point in points)
    if hidden > 1:
        cure = "robust=contact:1" if study.rrls else "a line `friction: [LOW, HIGH]`"
        warn(
            f"robust={config.robust}: MuJoCo lets two geoms slide by the larger of their two frictions, and others "
            f"than {names[0].partition('.')[2]} have up to {hiding:g}: {hidden} of the {len(points)} variants may be "
            f"the same; {cure} changes the friction of all geoms"
        )
    return study, points


def _folder(settings: dict[str, Any], path: str | None, task: Task) -> Path:
    name = settings.pop("name", None) or f"variants-{settings.get('algo') or Path(path or '').name}-{task.env_id}"
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in str(name))
    if not plain_name(name):
        raise UserError(f"name={name} must be a plain name; where its folder is made is runs_dir=")
    return Path(str(settings.pop("runs_dir", "runs"))) / name


def _continued(folder: Path, begun: Mapping[str, Any], config: VariantsConfig) -> dict[int, np.ndarray]:
    """J(i -> all) of the variants that are trained in `folder`. Raises UserError where it is of other settings."""
    trust.check_folder(folder)
    if not (folder / FILE).exists():
        return {}
    recorded = json.loads(trust.read_text(folder / FILE))
    of = json.loads(json.dumps(begun))
    for content in (recorded, of):
        # MBTL goes on with a larger one
        content["study"]["budget"] = None if config.choose == "mbtl" else content["study"]["budget"]
    if other := [k for k in of if recorded.get(k) != of[k]]:
        raise UserError(f"{folder} holds variants of other settings ({other[0]}): give these another name=")
    return {int(i): np.array(row) for i, row in recorded["rows"].items()}


def _text(point: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value:.4g}" for name, value in point.items())


def _report(bank: Bank, points: list[dict[str, float]], folder: Path) -> None:
    """Print the table of variants, and write J(i -> j) as CSV: a line for each trained variant."""
    texts = [_text(point) for point in points]
    runs = [f"variant-{i}" for i in bank.trained]
    best, nearest = bank.earned(bank.best), bank.earned(bank.nearest)
    rows = [
        [texts[j], runs[bank.best[j]], f"{best[j]:.2f}", runs[bank.nearest[j]], f"{nearest[j]:.2f}"]
        for j in range(len(points))
    ]
    print_table(["variant", "best measured", "its score", "trained nearest", "its score"], rows, str(folder))
    lines = [",".join(["trained", *(text.replace(",", ";") for text in texts)])]
    lines += [",".join([run, *map(repr, row.tolist())]) for run, row in zip(runs, bank.matrix, strict=True)]
    write_text(folder / TABLE, "\n".join(lines) + "\n")
    single = bank.matrix.mean(1)
    say(
        f"mean over all variants: {best.mean():.2f} with the best measured at each (chosen and scored by the same "
        f"episodes), {nearest.mean():.2f} with the one that was trained nearest, {single.max():.2f} with "
        f"{runs[int(single.argmax())]} everywhere",
        "between variants take the policy that was trained nearest, or the best measured at the variant beside",
        str(folder / TABLE),
    )
