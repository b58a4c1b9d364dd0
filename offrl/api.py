"""Training, fine-tuning and runs from Python; the command line is a thin layer over this module."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offrl import registry, video
from offrl.data import load_dataset
from offrl.data.dataset import Dataset
from offrl.data.loading.load import as_dataset, is_user_data, name_of
from offrl.data.tables.frame import is_frame
from offrl.data.transforms.apply import apply_transforms
from offrl.data.transforms.reward_labels import Labeller
from offrl.distilling.measure import measure
from offrl.errors import say
from offrl.evaluation import reward_inference
from offrl.evaluation.reward_inference import RewardEvaluation
from offrl.evaluation.robust import RobustScores, score_robustly
from offrl.evaluation.shield_kinds import ShieldSettings
from offrl.evaluation.studies import study_of
from offrl.export import c_code
from offrl.export.write import export_run
from offrl.families.teacher import check_imitable
from offrl.figures.curves import plot_run
from offrl.finetuning.loop import finetune as play_and_learn
from offrl.finetuning.record import directory
from offrl.finetuning.setup import begin
from offrl.finetuning.summary import write
from offrl.ope.candidates import data_of, recorded
from offrl.ope.unscored import judge
from offrl.runs import record as runs
from offrl.runs.run import SavedRun
from offrl.runs.settings import data_named, run_settings, scored_again
from offrl.settings import advice
from offrl.settings.compose import compose
from offrl.settings.dataset import DatasetConfig
from offrl.settings.evaluation import EvalConfig
from offrl.settings.train import TrainConfig
from offrl.system.devices import pick_device
from offrl.system.progress import Progress
from offrl.system.user_code import refuse_imported
from offrl.tasks.environments import make_env
from offrl.tasks.task import with_factory
from offrl.training import distributed
from offrl.training.loop import train as run_training
from offrl.training.run.callbacks import OnEvaluation
from offrl.training.stages import ready

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Run(SavedRun):
    """A run directory: its settings, scores and policies, and the ways to evaluate, film, draw and export them."""

    def evaluate_on_reward(
        self,
        rewards: str | Labeller,
        episodes: int = 10,
        seed: int = 0,
        env: str | Callable[[], Any] | None = None,
        parallel: int = 64,
        max_steps: int | None = None,
        dataset: Dataset | None = None,
    ) -> RewardEvaluation:
        """Infer the task of another reward without training, and score zero-shot policies by that reward and by the
        environment's own.

        rewards: a function of an episode's columns or the name of one, as `dataset.reward_labels` takes it; the task is
        inferred from the run's data (or `dataset`, as recorded), which it labels. The other arguments as in `evaluate`.
        Raises UserError for policies that would have to be trained for it, and where the data are not there any more.
        """
        policies = [self.load_policy(r) for r in self.replicas]
        states, values, mean = reward_inference.sample(data_of([self]) if dataset is None else dataset, rewards)
        policies = [p.infer_task(states, values) for p in policies]
        config = EvalConfig(episodes=episodes, seed=seed, parallel=parallel, max_steps=max_steps)
        evaluation, returns = reward_inference.score(policies, self._task(env, goals=False), config, rewards)
        return RewardEvaluation(reward_inference.name_of(rewards), tuple(self.replicas), evaluation, returns, mean)

    def evaluate_robust(
        self,
        robust: str = "rrls",
        points: str = "grid",
        episodes: int = 10,
        seed: int = 0,
        env: str | Callable[[], Any] | None = None,
        parallel: int = 64,
        max_steps: int | None = None,
        acting: Mapping[str, Any] | None = None,
        cost_limit: float | None = None,
        shield: ShieldSettings | None = None,
        quiet: bool = True,
    ) -> RobustScores:
        """Score the policies in the environment as it is and at each point of a study of perturbations, and at the
        worst points again, in episodes of `seed` + 1.

        robust: rrls, rrls:3, contact or a YAML file of ranges. points: grid, grid:5, latin:100 or axis. The other
        arguments as in `evaluate`. Raises UserError for a study that the environment has not, and where noise is in
        units of data that are not there any more.
        """
        task = self._task(env)
        with make_env(task) as environment:
            study = study_of(robust, environment, task.env_id or task.name)
        noisy = "noise" in study.ranges
        deviations = data_of([self]).columns["observations"].double().std(0).numpy() if noisy else 1.0
        policies = self._policies(acting, shield)
        config = EvalConfig(episodes=episodes, seed=seed, parallel=parallel, max_steps=max_steps, cost_limit=cost_limit)
        chosen = study.points(points)
        total = (1 + len(chosen)) * len(policies) * episodes
        with Progress(f"{len(chosen):,} points", total, "episodes", quiet, stderr=True) as bar:
            return score_robustly(policies, self.replicas, task, config, study, chosen, deviations, bar.update)

    def export(
        self,
        format: str = "onnx",
        seed: int | None = None,
        out: str | Path | None = None,
        stochastic: bool = False,
        opset: int | None = None,
        shield: ShieldSettings | None = None,
        acting: Mapping[str, Any] | None = None,
        **values: float,
    ) -> Path:
        """Write the policy of one seed, and grid point, as a file that runs without offrl; see
        `offrl.export.export_policy`. acting: as in `evaluate`.

        Returns the file: `out`, or RUN/export/REPLICA/policy.SUFFIX, with policy.json beside it. Raises UserError.
        """
        return export_run(self, format, seed, values, out, stochastic, opset, shield, acting).path

    def film(
        self,
        episodes: int = 1,
        seed: int = 0,
        env: str | Callable[[], Any] | None = None,
        fps: int = 30,
        size: int | None = None,
        shield: ShieldSettings | None = None,
    ) -> list[Path]:
        """Film the first episodes of `evaluate(seed=seed)` with all replicas in one picture: RUN/videos/*.mp4, one for
        each episode.

        Raises `offrl.video.NoVideo`, a UserError, where nothing can be rendered or encoded here.
        """
        video.prepare()
        return video.film(
            self, EvalConfig(seed=seed), env=env, fps=fps, size=size, videos=episodes, quiet=True, shield=shield
        )

    def plot(self, runs: Sequence[SavedRun] = ()) -> Figure | None:
        """Draw learning_curve.png, beside the curves of `runs`, and grid.png for a grid over one or two fields.

        Returns the figure of the learning curve, which a notebook shows and whose `show()` opens a window; None when
        nothing was scored."""
        return plot_run(self, runs)


def train(
    algo: str | None = None,
    dataset: str | Path | Sequence[str | Path] | Dataset | Any = None,
    *,
    seeds: int | Sequence[int] | None = None,
    steps: int | None = None,
    env: str | Callable[[], Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    on_evaluation: OnEvaluation | Sequence[OnEvaluation] | None = None,
    **more: Any,
) -> Run:
    """Train `algo` on a dataset, all seeds at once, score it, and return the run.

    algo: "iql" by default. dataset: whatever the command line takes, a list of files, a DataFrame of pandas or polars
    (whose columns settings={"dataset.fields.observations": ["temp", "flow_*"]} names), or a `Dataset`; the built-in one
    by default. seeds: how many (4 by default), or which. env: a Gymnasium id, "file.py:Name", a function or class that
    makes an environment, or "none"; by default the dataset's own. settings: any other setting by its name on the
    command line, such as {"algo.temperature": 5.0, "dataset.top_fraction": 0.1}; settings without a dot can be given as
    keywords (quiet=True). A grid trains every combination of its values with every seed: grid={"temperature": [1, 3,
    10]}, or settings={"grid.temperature": [1, 3, 10]}. on_evaluation: a function, or several, called after each
    evaluation with an `EvaluationEvent` (step, scores, policies, run_dir); one that returns False ends the run, and one
    that fails ends it with all saved. plugins="my.py": see docs/tutorials/own-algorithm.md. The same call continues a
    run that was interrupted, and returns at once where it had finished. Raises UserError for what a command would
    refuse.
    """
    arguments = {"algo": algo, "seeds": seeds, "steps": steps}
    values: dict[str, Any] = {**{k: v for k, v in arguments.items() if v is not None}, **more, **(settings or {})}
    if isinstance(env, str):
        values["eval.env"] = env
    data = dataset if isinstance(dataset, Dataset) or is_frame(dataset) else None
    if dataset is not None:
        values["dataset"] = name_of(dataset)
    return train_from(values, data, env if callable(env) else None, on_evaluation)[0]


def train_from(
    values: Mapping[str, Any],
    dataset: Any = None,
    env: Callable[[], Any] | None = None,
    on_evaluation: OnEvaluation | Sequence[OnEvaluation] | None = None,
) -> list[Run]:
    """Train with the settings `values`, and the algorithms to compare with; returns the runs, the main one first, whose
    evaluations `on_evaluation` is called with.

    dataset: a `Dataset` or a DataFrame, in place of what `values` name.
    """
    refuse_imported()
    main = (
        compose(values) if values.get("resume") is None else run_settings(values["resume"], values, ("dataset", "eval"))
    )
    if main.compare and not main.quiet and (private := _own_settings(main.given)):
        say(f"{', '.join(private)}: of {main.label} alone; {', '.join(main.compare)} have their own default settings")
    result: list[Run] = []
    for config in itertools.chain([main], _compared(main)):
        config, data, pretrained = _prepare(config, dataset, env)
        run_dir = runs.directory(config, data)
        run_training(config, data, run_dir, pretrained, None if result else on_evaluation)
        run = Run(run_dir)
        run.factory = env
        if distributed.world().first:
            say(*([] if config.quiet else judge(run, config, data)))
        if distributed.world().first and run.acts:
            run.plot()
        result.append(run)
    if len(result) > 1 and distributed.world().first:
        result[0].plot(result[1:])
    return result


def _compared(main: TrainConfig) -> Iterator[TrainConfig]:
    """The settings of the algorithms that a run's scores are compared with; a world model has no score to compare."""
    if not registry.get("algo", main.algo.name).traits.policy_modules:
        return
    for name in main.compare:
        if name != main.label:
            private = _own_settings(main.given)
            settings = {k: v for k, v in main.given.items() if k != "algo" and k not in private}
            shared = {k: getattr(main, k) for k in ("seeds", "steps", "runs_dir", "quiet")}
            yield compose({**settings, **shared, "algo": name, "compare": []})


def _own_settings(settings: Mapping[str, Any]) -> list[str]:
    """Names of the settings among those given that are of the main algorithm alone, and not of those that it is
    compared with.
    """
    return [
        k
        for k, v in settings.items()
        if k.startswith(("algo.", "grid.")) or (k == "experiment" and v not in ("none", "auto"))
    ]


def _prepare(
    config: TrainConfig, dataset: Any, env: Callable[[], Any] | None
) -> tuple[TrainConfig, Dataset, Mapping[str, Any]]:
    """The data of a run, its settings with what the data decide, and the runs that its algorithm builds on; see
    `stages.ready`.
    """
    device = str(pick_device(config.device))
    if dataset is None:
        data_named(config)
        data = load_dataset(config.dataset, device, config.quiet)
    else:
        data = apply_transforms(
            [as_dataset(dataset, config.dataset)], config.dataset, device=device, quiet=config.quiet
        )
    acts = registry.get("algo", config.algo.name).traits.policy_modules
    if acts and is_user_data(config.dataset.name, data):
        advice.choose_steps(config, len(data), device == "cpu")  # also for the algorithms to compare with
    if env is None and config.resume:
        config = scored_again(config)
    if env is not None:
        task = with_factory(data.spec.task, env, data.spec.name)
        data = dataclasses.replace(data, spec=dataclasses.replace(data.spec, task=task))
    config, pretrained = ready(config, data)
    return config, data, pretrained


def finetune(
    run: Run | str | Path | None = None,
    *,
    env: str | Callable[[], Any] | None = None,
    steps: int | None = None,
    dataset: str | Path | Dataset | None = None,
    settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> Run:
    """Let the replicas of `run` go on learning in an environment, and return the new run.

    run: a run, or its directory; None: fresh parameters of algo="...". env: a Gymnasium id, or a function that makes an
    environment; by default the one that the run was scored in. steps: environment steps of each replica. dataset: where
    the run's data are, if they moved or came from Python; for fresh parameters the data to mix in. settings: any other
    setting by its name on the command line, such as {"algo.temperature": 5.0, "eval.episodes": 20}; settings without a
    dot can be given as keywords (mixing=0.5, quiet=True). The same call continues what was interrupted. Raises
    UserError for what a command would refuse.
    """
    values: dict[str, Any] = {**more, **(settings or {})}
    if steps is not None:
        values["steps"] = steps
    if isinstance(env, str):
        values["env"] = env
    dataset = load_dataset(dataset) if is_frame(dataset) else dataset
    data = dataset if isinstance(dataset, Dataset) else None
    if dataset is not None and data is None:
        values["dataset"] = name_of(dataset)
    path = run.dir if isinstance(run, Run) else run
    return finetune_from(path, values, data, env if callable(env) else None)


def finetune_from(
    run: str | Path | None,
    values: Mapping[str, Any],
    dataset: Dataset | None = None,
    env: Callable[[], Any] | None = None,
) -> Run:
    """Fine-tune with the settings `values`; see `finetune`."""
    start = begin(run, values, dataset, env)
    run_dir = directory(start)
    play_and_learn(start, run_dir)
    done = Run(run_dir)
    write(done)
    return done


def tune(
    dataset: str | Path | Sequence[str | Path],
    algos: str | Sequence[str] = "iql",
    *,
    settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Choose settings and an algorithm from data alone, or with real episodes; returns what `offrl tune` writes to
    result.json.

    dataset: a file, files or a name, as on the command line. settings: any setting of `offrl tune` by its name there,
    such as {"space.temperature": [0.5, 10, "log"], "ope.updates": 20_000}; settings without a dot can be given as
    keywords (budget="16x20000", episodes=20, out="tune"). The same call continues what was interrupted; out/winner is
    the run of the chosen setting. Raises UserError for what a command would refuse.
    """
    from offrl.tuning.tune import tune as run_tune  # its pages would slow every other command

    return run_tune({"dataset": name_of(dataset), "algos": algos, **more, **(settings or {})})


def distill(
    run: Run | str | Path,
    into: str = "tree",
    *,
    dataset: str | Path | Dataset | None = None,
    settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> Run:
    """Train a small policy that imitates each policy of `run`, measure it (RUN/student.json), and return its run.

    into: tree, trees, sindy (a sparse formula), linear or mlp. dataset: whose states the teacher labels; by default its
    own data. settings: any other setting by its name on the command line, such as {"algo.max_depth": 4}; settings
    without a dot can be given as keywords. Raises UserError for what a command would refuse.
    """
    data = dataset if isinstance(dataset, Dataset) else None
    values: dict[str, Any] = {"algo.into": into, **more, **(settings or {})}
    if dataset is not None and data is None:
        values["dataset"] = name_of(dataset)
    return distill_from(run.dir if isinstance(run, Run) else run, values, data)[0]


def distill_from(
    run: str | Path, values: Mapping[str, Any], dataset: Dataset | None = None
) -> tuple[Run, dict[str, Any]]:
    """Distill with the settings `values`; returns the run and what student.json says."""
    teacher = Run(run)
    kind = registry.get("algo", teacher.record["identity"]["algo"]["name"])
    check_imitable(kind.Config().name, kind.traits)
    c_code.compiler()  # before any work
    source, default = recorded(run_settings(run).dataset), DatasetConfig()
    data = {f"dataset.{k}": v for k, v in vars(source).items() if v != getattr(default, k) and k != "name"}
    diverged = teacher.diverged
    into = values.get("algo.into", "tree")
    basis = {
        "algo": "distill",
        "dataset": source.name,
        "algo.teacher": str(run),
        "label": f"distill-{into}",
        "seeds": list(dict.fromkeys(r.seed for r in teacher.replicas if r not in diverged)),
        "steps": 1,
        "compare": [],
        "eval.env": teacher.record.get("env", "auto"),
        # trees and formulas are read in the data's units
        "dataset.normalize_observations": into == "mlp",
        **({} if "dataset" in values else data),
    }
    student = train_from({**basis, **values}, dataset)[0]
    return student, measure(student, teacher, run_settings(student.dir).eval)
