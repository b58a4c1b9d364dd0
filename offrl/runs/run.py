"""A run directory, read back, and its policies, scored again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offrl import registry
from offrl.data.fit import check_fit
from offrl.errors import UserError, nearest, one_line
from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.pool.host import evaluate_parallel
from offrl.evaluation.predict import critic_of
from offrl.evaluation.result import Evaluation
from offrl.evaluation.shield_kinds import ShieldSettings
from offrl.evaluation.sweeps import AchievedReturns, FrequencyScores, HeldPolicy, as_prompts, data_range, spread_targets
from offrl.runs.log import SCORE_COLUMNS
from offrl.runs.record import RESTORE, SCORES, read_record, replicas_of, spec_of
from offrl.runs.tables import Result, html_of, summarise, text_of
from offrl.settings.evaluation import EvalConfig
from offrl.settings.kinds import restored
from offrl.settings.replicas import Replica, by_cell, cell_name, number
from offrl.system import csv_text, trust
from offrl.system import files as checkpoint
from offrl.tasks.environments import resolve_task
from offrl.tasks.provenance import Provenance
from offrl.tasks.task import Task, with_factory

if TYPE_CHECKING:
    from pandas import DataFrame

    from offrl.data.dataset import DataSpec

Env = str | Callable[[], Any] | None  # see `SavedRun.task`
LONGEST = 10_000  # steps between decisions


class SavedRun:
    """The settings, scores and policies of a run directory, which can be scored again. `offrl.Run` has more verbs,
    which need packages above this one.
    """

    def __init__(self, run_dir: str | Path) -> None:
        """Raises UserError when there is no run."""
        self.dir = Path(run_dir)
        # makes the environment that it was scored in, where that is known in this process
        self.factory: Callable[[], Any] | None = None
        self.record = read_record(self.dir, ("data.name",))
        self.seeds: list[int] = self.record["identity"]["seeds"]
        self.grid: dict[str, list[float]] = dict(self.record["identity"].get("grid", []))
        self.paired: bool = self.record["identity"].get("paired") is True
        self.replicas: list[Replica] = replicas_of(self.record)
        # as texts and pictures call it
        self.algorithm: str = one_line(str(self.record.get("label", self.record["identity"]["algo"]["name"])))
        self.dataset: str = one_line(str(self.record["data"]["name"]))
        self.fingerprint: str = self.record["data"].get("fingerprint", "")  # of the data

    def __repr__(self) -> str:
        return text_of(self)

    def _repr_html_(self) -> str:
        return html_of(self)

    @property
    def spec(self) -> DataSpec:
        """The specification of the data that it was trained on. Raises UserError where the record does not say it."""
        return spec_of(self.record, self.dir)

    @property
    def resume_command(self) -> str:
        """What continues the run, for a shell."""
        return f"offrl {'finetune' if self.record.get('kind') == 'finetune' else 'train'} resume={self.dir}"

    @property
    def acts(self) -> bool:
        """True for policies, which act and can be scored; a world model does not."""
        return bool(registry.get("algo", self.record["identity"]["algo"]["name"]).traits.policy_modules)

    @property
    def goal_conditioned(self) -> bool:
        """True where its policies act towards a goal."""
        settings = self.record["identity"]["algo"]
        kind = registry.get("algo", settings["name"])
        known = {f.name for f in dataclasses.fields(kind.Config)}
        config = restored(kind.Config, {k: v for k, v in settings.items() if k in known}, str(self.dir))
        return bool(kind.traits_for(config).goal_conditioned)

    @property
    def scores(self) -> DataFrame:
        """All evaluations as a pandas DataFrame: a row for each step and replica, with the columns of scores.csv.

        Raises UserError where pandas is not installed; `score_rows` needs nothing.
        """
        try:
            import pandas
        except ImportError:
            raise UserError(
                "run.scores is a pandas DataFrame: pip install pandas; run.score_rows is the same as a list of dicts"
            ) from None
        rows = self.score_rows
        return pandas.DataFrame(rows, columns=list(rows[0]) if rows else [*SCORE_COLUMNS])

    @property
    def score_rows(self) -> list[dict[str, Any]]:
        """The rows of scores.csv, numbers as numbers and empty cells as None."""
        path = self.dir / SCORES
        if not path.exists():
            return []
        return [{k: _number(v) for k, v in row.items()} for row in csv_text.read(path)]

    @property
    def final_scores(self) -> list[dict[str, Any]]:
        """The rows of the last evaluation, one for each replica; none where nothing was scored."""
        rows = self.score_rows
        return [r for r in rows if r["step"] == rows[-1]["step"]]

    @property
    def scored_in(self) -> str:
        """The dataset and the provenance of the last scores, as the title of a table; "" without scores."""
        if not (rows := self.final_scores):
            return ""
        row = rows[0]
        return f"{row['dataset']} in {Provenance(*(str(row[f.name] or '') for f in dataclasses.fields(Provenance)))}"

    @property
    def diverged(self) -> list[Replica]:
        """Replicas that were frozen because a loss was not finite, or beyond all measure."""
        latest = checkpoint.load_latest(self.dir)
        return (
            [] if latest is None else [r for r, ok in zip(self.replicas, self.alive(latest[0]), strict=True) if not ok]
        )

    def alive(self, tensors: Mapping[str, Any]) -> list[bool]:
        """Whether each replica had finite losses, in a checkpoint of this run. Raises UserError for one of other
        replicas.
        """
        flags = [bool(ok) for ok in tensors["alive"].flatten().tolist()] if "alive" in tensors else []
        if len(flags) != len(self.replicas):
            raise UserError(
                f"{self.dir}: its checkpoint has {len(flags)} replicas, and its run.json {len(self.replicas)}; "
                f"{RESTORE}"
            )
        return flags

    def policy(self, seed: int | None = None, **values: float) -> TrainedPolicy:
        """The policy of one seed, the first by default, and of one grid point: `policy(seed=0, temperature=3.0)`.

        A field may be left out where the grid has one value for it. Raises UserError for a seed or value that was not
        trained, where several grid points fit, or before training ended.
        """
        return self.load_policy(self.replica(self.seeds[0] if seed is None else seed, values))

    def replica(self, seed: int, values: dict[str, float]) -> Replica:
        """The replica with this seed and these values. Raises UserError."""
        if seed not in self.seeds:
            raise UserError(f"{self.dir} has no seed {seed}; it has {', '.join(map(str, self.seeds))}")
        for field, value in values.items():
            if field not in self.grid:
                has = f"its grid is over {', '.join(self.grid)}" if self.grid else "it has no grid"
                raise UserError(f"{self.dir} has no grid over '{field}'; {has}.{nearest(field, self.grid)}")
            if value not in self.grid[field]:
                raise UserError(f"{self.dir} has no {field}={value}; it has {', '.join(map(number, self.grid[field]))}")
        fitting = [r for r in self.replicas if r.seed == seed and values.items() <= dict(r.values).items()]
        if not fitting:
            raise UserError(
                f"{self.dir} has no policy of {cell_name(tuple(values.items()))}: its grid pairs values (paired=true)"
            )
        if len(fitting) > 1:
            open_ = {
                field: options for field, options in self.grid.items() if field not in values and len(set(options)) > 1
            }
            choices = "; ".join(
                f"{field}={' or '.join(map(number, dict.fromkeys(options)))}" for field, options in open_.items()
            )
            raise UserError(
                f"{self.dir} has several policies of seed {seed}; say which: policy(seed={seed}, ...) with {choices}"
            )
        return fitting[0]

    def load_policy(self, replica: Replica, device: str = "auto") -> TrainedPolicy:
        """The final policy of a replica. Raises UserError before training ended, and for a run that trains no
        policy.
        """
        if not self.acts:
            kind = self.record["identity"]["algo"]["name"]
            hint = (
                f": offrl model {self.dir} measures it, and mopo, morel, pets and others take it, "
                f"world_model={self.dir}"
            )
            raise UserError(
                f"{self.dir} is a run of {kind}, which trains a model and no policy: there is nothing that acts or "
                f"could be scored{hint if kind == 'dynamics' else ''}"
            )
        path = self.dir / "policies" / f"{replica.name}.safetensors"
        if not path.exists():
            raise UserError(f"{path} does not exist: training has not finished; `{self.resume_command}` continues it")
        policy, index = TrainedPolicy.load(path, device), self.replicas.index(replica)
        policy.find_critic = lambda policy: critic_of(self.dir, policy, index)
        return policy

    def task(self, env: Env = None, goals: bool | None = None) -> Task | None:
        """The task to score the policies in; None where there is no environment.

        env: a Gymnasium id, "auto" (the dataset's), a function that makes an environment, or None for the one that the
        run was scored in. goals: whether policies act towards goals, by default as they were trained. Raises UserError
        where it does not fit the data."""
        env = self.factory if env is None else env
        if isinstance(env, str):
            trust.typed(env)
        spec, trained_with = self.spec, self.record.get("env", "auto")
        name = env if isinstance(env, str) else "auto" if callable(env) or trained_with == "none" else trained_with
        task = with_factory(spec.task, env, spec.name) if callable(env) else spec.task
        task = resolve_task(task, EvalConfig(env=name), self.goal_conditioned if goals is None else goals)
        if task is not None:
            check_fit(spec, task)
        return task

    def results(self) -> list[Result]:
        """The last evaluation as rows of a table: one for each grid point, in the grid's order; none when nothing was
        scored.

        Seeds that diverged are left out, unless all of a grid point's did: they did not train to the end.
        """
        rows = self.final_scores
        if not rows:
            return []
        diverged, policies = self.diverged, []
        for values, where in by_cell(self.replicas).items():
            indices = [i for i in where if self.replicas[i] not in diverged] or where
            policies.append(summarise(self.algorithm, [rows[i] for i in indices], self.record, values))
        return policies

    def evaluate(
        self,
        episodes: int = 10,
        seed: int = 0,
        env: Env = None,
        parallel: int = 64,
        max_steps: int | None = None,
        acting: Mapping[str, Any] | None = None,
        device: str = "auto",
        cost_limit: float | None = None,
        shield: ShieldSettings | None = None,
    ) -> Evaluation:
        """Score the final policies of all replicas again, in the order of `replicas`, behind a shield if there is one.

        env: see `task`. acting: see `TrainedPolicy.with_settings`. device: where policies act whose actions take long,
        such as language models. cost_limit: of an episode, for `Evaluation.limits`; None: the algorithm's own. Raises
        UserError where there is no environment, or it does not fit the data.
        """
        config = EvalConfig(episodes=episodes, seed=seed, parallel=parallel, max_steps=max_steps, cost_limit=cost_limit)
        return self._score(self._policies(acting, shield, device), env, config)

    def evaluate_target_returns(
        self,
        target_returns: Sequence[float | Sequence[float]] | None = None,
        episodes: int = 10,
        seed: int = 0,
        env: Env = None,
        parallel: int = 64,
        max_steps: int | None = None,
        acting: Mapping[str, Any] | None = None,
    ) -> AchievedReturns:
        """Score return-conditioned policies with several target returns, in the units of the recorded rewards.

        target_returns: None spreads them over the data's; of CDT also pairs of a return and a limit of the costs. The
        other arguments as in `evaluate`. Raises UserError for policies that are not conditioned on them.
        """
        config = EvalConfig(episodes=episodes, seed=seed, parallel=parallel, max_steps=max_steps)
        policies = [self.load_policy(r) for r in self.replicas]
        low, high = data_range(policies[0].algorithm.config, self.record["data"])
        if acting:
            policies = [p.with_settings(acting) for p in policies]
        targets, limits = as_prompts(spread_targets(low, high) if target_returns is None else target_returns)
        prompted = [p.with_target_return(target) for target in targets for p in policies]
        if limits:
            each = [limit for limit in limits for _ in policies]
            prompted = [p.with_settings({"cost_limit": x}) for p, x in zip(prompted, each, strict=True)]
        evaluations = self._score(prompted, env, config).split(len(policies))
        ahead = getattr(policies[0].algorithm.config, "targets_ahead", False)
        return AchievedReturns(tuple(self.replicas), evaluations, targets, limits, ahead)

    def evaluate_frequency(
        self,
        frequency: Sequence[int] = (1, 2, 4, 8),
        episodes: int = 10,
        seed: int = 0,
        env: Env = None,
        parallel: int = 64,
        max_steps: int | None = None,
        acting: Mapping[str, Any] | None = None,
    ) -> FrequencyScores:
        """Score the policies where they may decide only once in D steps of the environment, for each D of `frequency`,
        ascending.

        Policies that draw several actions at a time play D of them; of the others, and where D is more than they draw,
        the last action is held. The start states are the same for all D. The other arguments as in `evaluate`. Raises
        UserError for policies of texts."""
        steps = _ascending(frequency)
        config = EvalConfig(episodes=episodes, seed=seed, parallel=parallel, max_steps=max_steps)
        policies = [self.load_policy(r) for r in self.replicas]
        if acting:
            if acting.get("action_steps") and policies[0].actor.actions_per_decision(2) > 1:
                raise UserError(
                    "frequency= decides how many actions are played of each decision: leave acting.action_steps out"
                )
            policies = [p.with_settings(acting) for p in policies]
        evaluation = self._score([HeldPolicy(p, d) for d in steps for p in policies], env, config)
        return FrequencyScores(tuple(self.replicas), evaluation.split(len(policies)), tuple(steps))

    def _policies(
        self, acting: Mapping[str, Any] | None, shield: ShieldSettings | None, device: str = "auto"
    ) -> list[TrainedPolicy]:
        policies = [self.load_policy(r, device) for r in self.replicas]
        policies = [p.with_settings(acting) for p in policies] if acting else policies
        return [shield.of(p) for p in policies] if shield else policies

    def _score(self, policies: Sequence[TrainedPolicy | HeldPolicy], env: Env, config: EvalConfig) -> Evaluation:
        # other processes would act on the CPU
        on_gpu = any(isinstance(p, TrainedPolicy) and p.device.type != "cpu" for p in policies)
        return evaluate_parallel(
            policies, [p.seed for p in policies], self._task(env), config, workers=0 if on_gpu else None
        )

    def _task(self, env: Env, goals: bool | None = None) -> Task:
        task = self.task(env, goals)
        if task is None:
            data_task = self.spec.task
            note = (
                data_task.note
                if data_task is not None and data_task.env_id is None and data_task.note
                else f"name one: offrl evaluate {self.dir} env=ID"
            )
            raise UserError(f"{self.dir}: there is no environment to score in; {note[0].lower()}{note[1:]}")
        return task


def _number(text: str) -> Any:
    if text == "":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _ascending(frequency: Sequence[int]) -> list[int]:
    """The numbers of steps between decisions. Raises UserError unless they are ascending whole numbers from 1 on."""
    steps = list(frequency) if isinstance(frequency, Sequence) and not isinstance(frequency, str) else []
    if not steps or not all(isinstance(d, int) and not isinstance(d, bool) and 1 <= d <= LONGEST for d in steps):
        raise UserError(
            f"frequency={frequency}: steps of the environment between decisions are whole numbers from 1 to "
            f"{LONGEST:,}: [1,2,4,8]"
        )
    if sorted(set(steps)) != steps:
        raise UserError(
            f"frequency={steps}: the numbers of steps between decisions ascend, each once: {sorted(set(steps))}"
        )
    return steps
