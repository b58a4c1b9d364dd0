"""Run directories: what identifies a run, what is written next to its checkpoints, and reading it all back."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offrl import registry
from offrl.errors import UserError, nearest
from offrl.runs.log import Result, final_table
from offrl.settings.dataset import DatasetConfig
from offrl.settings.diff import difference
from offrl.settings.field import without_places
from offrl.settings.replicas import Replica, Values, by_cell, expand, grid_text, number, replicas
from offrl.settings.train import FREE, TrainConfig, seed_list
from offrl.statistics.intervals import mean_interval
from offrl.system import files as checkpoint

if TYPE_CHECKING:
    import torch

    from offrl.data.dataset import Dataset
    from offrl.data.reward_labels import Labeller
    from offrl.evaluation.evaluator import Evaluation
    from offrl.evaluation.policy import TrainedPolicy
    from offrl.evaluation.reward_inference import Earned
    from offrl.evaluation.target_returns import Achieved
    from offrl.settings.evaluation import EvalConfig
    from offrl.tasks.task import Task

CONFIG, RECORD, SCORES, CURVE, GRID = "config.yaml", "run.json", "scores.csv", "learning_curve.png", "grid.png"
PACKAGES = ("offrl", "torch", "numpy", "gymnasium", "mujoco", "minari", "h5py", "gymnasium-robotics")


def identity(config: TrainConfig) -> dict[str, Any]:
    """The settings that decide the parameters that come out; two runs that agree in these are the same run."""
    values = {k: v for k, v in dataclasses.asdict(config).items() if k not in FREE}
    values["algo"], values["dataset"] = without_places(config.algo), without_places(config.dataset)  # the fingerprint says what data are
    values["seeds"] = seed_list(config.seeds)
    grid = values.pop("grid")
    if grid:
        values["grid"] = [[field, cells] for field, cells in grid.items()]  # a list: the order of the fields is that of the replicas
        values["algo"] = _without(values["algo"], grid)
    return values


def _without(algo: dict[str, Any], grid: Collection[str]) -> dict[str, Any]:
    """An algorithm's settings less those that a grid decides."""
    return {k: v for k, v in algo.items() if k not in grid}


def fit(config: TrainConfig, dataset: Dataset) -> TrainConfig:
    """`config` with what its algorithm leaves to be found from the data."""
    return dataclasses.replace(config, algo=registry.get("algo", config.algo.name).fit_config(config.algo, dataset, config.grid))


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


def prepare(
    run_dir: Path,
    config: TrainConfig,
    dataset: Dataset,
    choose: Callable[[], tuple[str, int]],
    device: torch.device,
) -> tuple[str, int]:
    """Check that `run_dir` is free or holds this very run, write its config and record, and return the mode of the step and how many
    replicas it trains as one program.

    A resumed run keeps those that it began with, unless told otherwise: others round differently. Raises UserError when another run is
    there.
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
        changed = change(old["identity"], json.loads(json.dumps(settings, default=str)))
        if changed:
            raise UserError(f"{run_dir} holds another run ({changed}); choose another name=, or use the settings it began with")
    same_device = old is not None and old["device"] == device.type
    mode, group = choose()
    if old is not None and same_device:
        mode = old["mode"] if config.compile == "auto" else mode
        group = old.get("group", len(old["identity"]["seeds"]))
    group = config.group or group
    record = {
        "label": config.label,
        "identity": settings,
        "replicas": [{"seed": r.seed, **dict(r.values)} for r in replicas(config)],  # the columns of metrics.jsonl
        "data": dataset.describe(),
        "spec": dataset.spec.to_json(),
        "env": config.eval.env,
        "mode": mode,
        "group": group,
        "device": device.type,
        "packages": {name: installed(name) for name in PACKAGES},
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    checkpoint.write_text(run_dir / RECORD, json.dumps(record, indent=1, default=str) + "\n")
    from omegaconf import OmegaConf

    saved = dataclasses.asdict(dataclasses.replace(config, name=run_dir.name, resume=None, config=None))
    saved["algo"] = _without(saved["algo"], config.grid)
    checkpoint.write_text(run_dir / CONFIG, OmegaConf.to_yaml(OmegaConf.create(saved)))
    return mode, group


def _refuse_to_overwrite(run_dir: Path, known: bool) -> None:
    """Raise UserError where starting anew would write over a stranger's files, or over a finished run that lost its checkpoints."""
    if known and (run_dir / "policies").exists() and not checkpoint.steps(run_dir):
        raise UserError(
            f"{run_dir} holds a finished run without checkpoints, and training anew would overwrite it; "
            "remove that folder, or choose another name="
        )
    if not known and (others := sorted(p.name for p in run_dir.iterdir() if not p.name.startswith("."))):
        raise UserError(f"{run_dir} is no run directory and not empty (it has {', '.join(others[:3])}); choose another name= or runs_dir=")


def change(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What differs between two identities, in words; an empty string when nothing does."""
    grids = [grid_text(dict(settings.get("grid", []))) for settings in (old, new)]
    if grids[0] != grids[1]:
        return f"{grids[0]} there, {grids[1]} here"
    changed = difference(complete(old), complete(new))
    return next((f"{name}: {there} there, {here} here" for name, (there, here) in changed.items()), "")


def complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A run's identity with the defaults of the settings that it lacks because they are younger than the run."""
    kinds: dict[str, Any] = {"dataset": DatasetConfig}
    with contextlib.suppress(UserError):  # of an algorithm that is not installed any more
        kinds["algo"] = registry.get("algo", settings["algo"]["name"]).Config
    parts = {part: {**without_places(kind()), **settings[part]} for part, kind in kinds.items() if settings[part]}
    if "algo" in parts:
        parts["algo"] = _without(parts["algo"], [field for field, _ in settings.get("grid", [])])
    return {"precision": "float32", **settings, **parts}


def installed(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
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
        self.grid: dict[str, list[float]] = dict(self.record["identity"].get("grid", []))
        self.replicas: list[Replica] = expand(self.grid, self.seeds)
        self.algorithm: str = self.record.get("label", self.record["identity"]["algo"]["name"])
        self.dataset: str = self.record["data"]["name"]

    def __repr__(self) -> str:
        grid = f", {grid_text(self.grid)}" if self.grid else ""
        return f"Run({str(self.dir)!r}: {self.algorithm} on {self.dataset}, seeds {self.seeds}{grid})"

    @property
    def acts(self) -> bool:
        """Whether what was trained acts, and can be scored; a world model does not."""
        return bool(registry.get("algo", self.record["identity"]["algo"]["name"]).traits.policy_modules)

    @property
    def goal_conditioned(self) -> bool:
        """Whether its policies act towards a goal that they are told."""
        settings = self.record["identity"]["algo"]
        kind = registry.get("algo", settings["name"])
        known = {f.name for f in dataclasses.fields(kind.Config)}
        return bool(kind.traits_for(kind.Config(**{k: v for k, v in settings.items() if k in known})).goal_conditioned)

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
        """The rows of the last evaluation, one for each replica."""
        rows = self.scores
        return [r for r in rows if r["step"] == rows[-1]["step"]]

    @property
    def diverged(self) -> list[Replica]:
        """Replicas that were frozen because a loss was not finite."""
        found = checkpoint.load_latest(self.dir)
        return [] if found is None else [r for r, ok in zip(self.replicas, found[0]["alive"].tolist(), strict=True) if not ok]

    def policy(self, seed: int | None = None, **values: float) -> TrainedPolicy:
        """The policy of one seed, the first by default, and of one cell of the grid: `policy(seed=0, temperature=3.0)`.

        A field may be left out where the grid has one value for it. Raises UserError for a seed or value that was not trained, where
        several cells fit, or before training ended.
        """
        return self._load(self._find(self.seeds[0] if seed is None else seed, values))

    def _find(self, seed: int, values: dict[str, float]) -> Replica:
        """The replica with this seed and these values. Raises UserError."""
        if seed not in self.seeds:
            raise UserError(f"{self.dir} has no seed {seed}; it has {', '.join(map(str, self.seeds))}")
        for field, value in values.items():
            if field not in self.grid:
                has = f"its grid is over {', '.join(self.grid)}" if self.grid else "it has no grid"
                raise UserError(f"{self.dir} has no grid over '{field}'; {has}.{nearest(field, self.grid)}")
            if value not in self.grid[field]:
                raise UserError(f"{self.dir} has no {field}={value}; it has {', '.join(map(number, self.grid[field]))}")
        open_ = {field: given for field, given in self.grid.items() if field not in values and len(given) > 1}
        if open_:
            choices = "; ".join(f"{field}={' or '.join(map(number, given))}" for field, given in open_.items())
            raise UserError(f"{self.dir} has several policies of seed {seed}; say which: policy(seed={seed}, ...) with {choices}")
        chosen = {field: values.get(field, given[0]) for field, given in self.grid.items()}
        return next(r for r in self.replicas if r.seed == seed and dict(r.values) == chosen)

    def _load(self, replica: Replica, device: str = "auto") -> TrainedPolicy:
        from offrl.evaluation.policy import TrainedPolicy

        path = self.dir / "policies" / f"{replica.name}.safetensors"
        if not path.exists():
            raise UserError(f"{path} does not exist: training has not finished; `offrl train resume={self.dir}` continues it")
        return TrainedPolicy.load(path, device)

    def evaluate(
        self,
        episodes: int = 10,
        seed: int = 0,
        env: Any = None,
        parallel: int = 64,
        max_steps: int | None = None,
        acting: Mapping[str, Any] | None = None,
        device: str = "auto",
    ) -> Evaluation:
        """Score the final policies of all replicas again, in the order of `replicas`.

        `env`: a Gymnasium id, "auto" (the data set's), a function that makes an environment, or None for the one that the run was scored
        in. `acting`: see `TrainedPolicy.acting`. `device`: where policies act whose actions take long, such as language models. Raises
        UserError where there is none, or it does not fit the data.
        """
        policies = [self._load(r, device) for r in self.replicas]
        policies = [p.acting(acting) for p in policies] if acting else policies
        return self._score(policies, episodes, seed, env, parallel, max_steps)

    def ask(
        self,
        target_returns: Sequence[float] | None = None,
        episodes: int = 10,
        seed: int = 0,
        env: Any = None,
        parallel: int = 64,
        max_steps: int | None = None,
    ) -> Achieved:
        """Score return-conditioned policies for several returns that they are asked for, in the units of the recorded rewards.

        `target_returns`: None spreads them over the data's. The other arguments as in `evaluate`. Raises UserError for policies that
        cannot be asked.
        """
        from dataclasses import fields, replace

        from offrl.evaluation.target_returns import Achieved, spread_targets

        data = self.record["data"]
        targets = spread_targets(data["return_min"], data["return_max"]) if target_returns is None else [float(t) for t in target_returns]
        policies = [self._load(r) for r in self.replicas]
        many = len(policies)
        whole = self._score([p.asking(t) for t in targets for p in policies], episodes, seed, env, parallel, max_steps)

        def part(i: int) -> Evaluation:
            rows = slice(i * many, (i + 1) * many)
            arrays = {f.name: getattr(whole, f.name) for f in fields(whole) if f.name not in ("label", "faults", "tasks")}
            cut: dict[str, Any] = {name: None if a is None else a[rows] for name, a in arrays.items()}
            return replace(whole, **cut)

        return Achieved(tuple(targets), tuple(self.replicas), tuple(part(i) for i in range(len(targets))))

    def told(
        self,
        rewards: str | Labeller,
        episodes: int = 10,
        seed: int = 0,
        env: Any = None,
        parallel: int = 64,
        max_steps: int | None = None,
        dataset: Dataset | None = None,
    ) -> Earned:
        """Tell zero-shot policies another reward, without training, and score them by it and by the environment's own.

        `rewards`: a function of an episode's columns or the name of one, as `dataset.reward_labels` takes it; the task is inferred from the
        run's data (or `dataset`, as recorded), which it labels. The other arguments as in `evaluate`. Raises UserError for policies that
        would have to be trained for it, and where the data are not there any more.
        """
        from offrl.evaluation import reward_inference as other_rewards
        from offrl.ope.candidates import data_of

        policies = [self._load(r) for r in self.replicas]
        states, values, mean = other_rewards.sample(data_of([self]) if dataset is None else dataset, rewards)
        told = [p.rewarded(states, values) for p in policies]
        task, config = self._scored_in(episodes, seed, env, parallel, max_steps, goals=False)
        found, returns = other_rewards.score(told, task, config, rewards)
        return other_rewards.Earned(other_rewards.name_of(rewards), tuple(self.replicas), found, returns, mean)

    def _score(
        self, policies: Sequence[TrainedPolicy], episodes: int, seed: int, env: Any, parallel: int, max_steps: int | None
    ) -> Evaluation:
        from offrl.evaluation.pool import evaluate_parallel

        task, config = self._scored_in(episodes, seed, env, parallel, max_steps, self.goal_conditioned)
        alone = any(p.device.type != "cpu" for p in policies)  # on a GPU: other processes would act on the CPU
        return evaluate_parallel(policies, [p.seed for p in policies], task, config, workers=0 if alone else None)

    def _scored_in(self, episodes: int, seed: int, env: Any, parallel: int, max_steps: int | None, goals: bool) -> tuple[Task, EvalConfig]:
        """The task that policies are scored in, and how. goals: whether they act towards some. Raises UserError."""
        from offrl.data.dataset import DataSpec
        from offrl.data.fit import check_fit
        from offrl.settings.evaluation import EvalConfig
        from offrl.tasks.environments import resolve_task

        spec = DataSpec.from_json(self.record["spec"])
        own = self.record.get("env", "auto")
        name = env if isinstance(env, str) else "auto" if callable(env) or own == "none" else own
        config = EvalConfig(episodes=episodes, seed=seed, parallel=parallel, env=name, max_steps=max_steps)
        task = with_factory(spec.task, env, spec.name) if callable(env) else spec.task
        task = resolve_task(task, config, goals)
        if task is None:
            raise UserError(f"{self.dir}: there is no environment to score in; name one: offrl evaluate {self.dir} env=ID")
        check_fit(spec, task)
        return task, config

    def export(
        self,
        format: str = "onnx",
        seed: int | None = None,
        out: str | Path | None = None,
        stochastic: bool = False,
        opset: int | None = None,
        **values: float,
    ) -> Path:
        """Write the policy of one seed, and cell of the grid, as a file that runs without offrl; see `offrl.export.export_policy`.

        Returns the file: `out`, or RUN/export/REPLICA/policy.SUFFIX, with policy.json beside it. Raises UserError.
        """
        from offrl.export.write import export_run

        return export_run(self, format, seed, values, out, stochastic, opset).path

    def video(self, episodes: int = 1, seed: int = 0, env: Any = None, fps: int = 30, size: int | None = None) -> list[Path]:
        """Film the first episodes of `evaluate(seed=seed)` with all replicas in one picture: RUN/videos/*.mp4, one for each episode.

        Raises `offrl.video.NoVideo`, a UserError, where nothing can be rendered or encoded here.
        """
        from offrl import video
        from offrl.settings.evaluation import EvalConfig

        video.prepare()
        return video.film(self, EvalConfig(seed=seed), env=env, fps=fps, size=size, videos=episodes, quiet=True)

    def results(self) -> list[Result]:
        """The last evaluation as rows of a table: one for each cell of the grid, in its order; none when nothing was scored.

        Seeds that diverged are left out, unless all of a cell's did: they did not train to the end.
        """
        rows = self.scores and self.final_scores
        if not rows:
            return []
        lost, found = self.diverged, []
        for values, where in by_cell(self.replicas).items():
            kept = [i for i in where if self.replicas[i] not in lost] or where
            found.append(summarise(self.algorithm, [rows[i] for i in kept], self.record, values))
        return found

    def plot(self, others: Sequence[Run] = ()) -> bool:
        """Draw learning_curve.png, and grid.png for a grid over one or two fields; False when there is nothing to draw."""
        from offrl.figures.curves import grid_picture, learning_curve

        files = {run.algorithm: run.dir / SCORES for run in (self, *others) if (run.dir / SCORES).exists()}
        results, title = self.results(), f"{self.algorithm} on {self.dataset}"
        grid_picture(results, self.dir / GRID, title=title)
        behaviour = results[0].behaviour if results else None
        return bool(files) and learning_curve(files, self.dir / CURVE, behaviour=behaviour, title=title)


def summarise(algorithm: str, rows: Sequence[dict[str, Any]], record: dict[str, Any], values: Values = ()) -> Result:
    """One row of the final table from the rows of one evaluation. `values`: the cell of the grid that all of them belong to."""

    def interval(key: str) -> tuple[float, float, float] | None:
        values = [r[key] for r in rows]
        return None if any(v is None for v in values) else mean_interval(values)

    returns, score = interval("return_mean"), interval("score")
    assert returns is not None
    return Result(algorithm, len(rows), returns, score, interval("success"), behaviour(record, score is not None), values)


def behaviour(record: dict[str, Any], normalised: bool) -> float | None:
    """The mean return, or score, of a run's data set as it was recorded; None where that is not known."""
    mean, task = record["data"].get("return_mean"), (record.get("spec") or {}).get("task") or {}
    if not isinstance(mean, (int, float)) or (normalised and (task.get("ref_min") is None or task.get("ref_max") is None)):
        return None
    return 100.0 * (mean - task["ref_min"]) / (task["ref_max"] - task["ref_min"]) if normalised else float(mean)


def with_factory(task: Any, factory: Callable[[], Any], name: str) -> Any:
    """The task scored in the environment that `factory` makes."""
    from offrl.tasks.task import Task

    if task is None:
        return Task(name=name, env_factory=factory)
    keys = task.observation_keys
    kept = keys if "achieved_goal" in keys and "desired_goal" not in keys else ()  # goals are told apart, as the data have them
    return dataclasses.replace(task, env_id=None, env_kwargs={}, env_factory=factory, max_episode_steps=None, observation_keys=kept)


def report(runs: Sequence[Run], title: str) -> None:
    """Print the final table of runs on the same data."""
    results = [result for run in runs for result in run.results()]
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
