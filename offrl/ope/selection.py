"""Ranks policies by estimated value on logged data alone; no environment is ever touched."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from offrl.data import load_dataset
from offrl.data.dataset import Dataset
from offrl.errors import UserError, nearest, some, warn
from offrl.ope.candidates import data_of, find_runs, join, load_policies, recorded, run_candidates
from offrl.ope.config import ALL_NAMES, METHOD_NAMES, OPEConfig, validate
from offrl.ope.costs import episode_costs
from offrl.ope.fqe import Fitted, fit, summarise
from offrl.ope.importance import behavior_log_prob, doubly_robust, wis
from offrl.ope.judges.critics import own_q, own_values, td
from offrl.ope.judges.fits import bvft, lstd, variants
from offrl.ope.metrics import absolute_error, precision, regret, spearman
from offrl.ope.model_based import model_values
from offrl.ope.problem import Estimates, Note, Problem, behavior_value, make_problem
from offrl.runs.run import SavedRun
from offrl.settings.dataset import DatasetConfig
from offrl.system import files as checkpoint
from offrl.system.csv_text import read, text_of
from offrl.training.fit import Progress

Interval = tuple[float, float, float]
Stage = Callable[[str, int], Progress]  # a long piece of work begins: its title and its number of updates


@dataclass
class Work:
    """A problem, and the quantities that several methods share, computed once on first use."""

    problem: Problem
    settings: OPEConfig
    device: str
    stage: Stage
    tell: Note | None = None

    @cached_property
    def fitted(self) -> Fitted:
        count, settings = len(self.problem.names), self.settings
        title = f"fitted Q evaluation of {count} candidates, {settings.seeds} seeds, {settings.networks} networks"
        return fit(self.problem, settings, self.device, self.stage(title, settings.updates))

    @cached_property
    def fits(self) -> dict[str, Fitted]:
        """Those between which lstd and bvft choose."""
        out = {}
        for name, settings in variants(self.settings).items():
            title = (
                f"fitted Q evaluation of {len(self.problem.names)} candidates, fit '{name}' of "
                f"{', '.join(self.settings.fits)}"
            )
            if name == "base":
                out[name] = self.fitted
            else:
                out[name] = fit(self.problem, settings, self.device, self.stage(title, settings.updates))
        return out

    @cached_property
    def costs(self) -> Estimates:
        progress = self.stage("fitted Q evaluation of the costs", self.settings.updates)
        return episode_costs(self.problem, self.settings, self.device, progress)

    @cached_property
    def behavior(self) -> Tensor:
        progress = self.stage("model of the policy that made the data", self.settings.behavior_updates)
        return behavior_log_prob(self.problem, self.settings, self.device, progress)


# every estimator by the name that `method=` takes; "all" runs ALL_NAMES in this order, "model" only where there is one
METHODS: dict[str, Callable[[Work], Estimates]] = {
    "fqe": lambda work: summarise(work.fitted),
    "wis": lambda work: wis(work.problem, work.behavior, work.settings),
    "dr": lambda work: doubly_robust(work.fitted, work.behavior, work.settings),
    "model": lambda work: model_values(work.problem, work.settings, work.device, work.tell),
    "td": lambda work: td(work.problem, work.settings),
    "q": lambda work: own_q(work.problem, work.settings),
    "lstd": lambda work: lstd(work.fits, work.settings),
    "bvft": lambda work: bvft(work.fits, work.settings),
}
assert tuple(METHODS) == METHOD_NAMES
# of an estimate, one for each candidate, that go into the file
DETAILS = ("effective_episodes", "clipped", "steps", "chosen")


@dataclass(frozen=True)
class Selection:
    """Estimated values of K candidates. Arrays are in the candidates' order; `order` ranks them by the first method."""

    names: tuple[str, ...]
    estimates: Mapping[str, Estimates]  # by method, the first one ranks
    behavior: Interval  # discounted return of the data's own episodes: mean and 95% interval
    own_q: np.ndarray  # [K] what a candidate's own critic says of it, in recorded rewards; NaN where it has none
    # [K] how far its actions lie from the data's: root mean square in [-1, 1], or the share that differs
    distance: np.ndarray
    discount: float
    data: str
    episodes: int
    # [K] true values, NaN where not given; empty: none were given
    truth: np.ndarray = field(default_factory=lambda: np.zeros(0))
    truth_kind: str = ""  # "discounted" or "return"
    costs: Estimates | None = None  # of an episode; None where they were not asked for

    @property
    def order(self) -> list[int]:
        """Candidates from best to worst."""
        return [int(k) for k in next(iter(self.estimates.values())).order()]

    @property
    def best(self) -> str:
        """The name of the candidate with the largest estimate."""
        return self.names[self.order[0]]

    def quality(self) -> dict[str, dict[str, float]]:
        """method -> {regret@1, regret@5, precision@5, rank correlation, absolute error (discounted)}, against the true
        values.
        """
        known = np.isfinite(self.truth)
        if known.sum() < 2:
            return {}
        rows = {name: (estimate.value, known) for name, estimate in self.estimates.items()}
        able = known & np.isfinite(self.own_q)
        if able.sum() > 1:
            rows["own Q" if able.sum() == known.sum() else f"own Q ({able.sum()} that have one)"] = (self.own_q, able)
        result = {}
        for name, (values, among) in rows.items():
            v, e = self.truth[among], values[among]
            result[name] = {
                "regret@1": regret(v, e, 1),
                "regret@5": regret(v, e, 5),
                "precision@5": precision(v, e, min(5, len(v))),
                "rank correlation": spearman(v, e),
                "absolute error": absolute_error(v, e)
                if self.truth_kind == "discounted" and name != "td"
                else math.nan,
            }
        return result

    def write(self, path: Path) -> None:
        """One CSV row for each candidate, the best first."""
        columns = [f"{m}{end}" for m in self.estimates for end in ("", "_low", "_high")]
        detail_columns = [(m, name) for m, e in self.estimates.items() for name in DETAILS if name in e.details]
        columns += [f"{m}_{name}" for m, name in detail_columns]
        lines: list[list[Any]] = [["rank", "candidate", *columns, "own_q", "distance", "discount", "truth"]]
        for rank, k in enumerate(self.order, 1):
            numbers = [x[k] for e in self.estimates.values() for x in (e.value, e.low, e.high)]
            numbers += [self.estimates[m].details[name][k] for m, name in detail_columns]
            numbers += [self.own_q[k], self.distance[k], self.discount, self.truth[k] if len(self.truth) else math.nan]
            cells = [x if isinstance(x, str) else "" if math.isnan(x) else repr(float(x)) for x in numbers]
            lines.append([rank, self.names[k], *cells])
        checkpoint.write_text(path, text_of(lines))


def evaluate_policies(
    dataset: Dataset,
    candidates: Mapping[str, Any],
    method: str | Sequence[str] = "fqe",
    settings: OPEConfig | None = None,
    *,
    device: str = "cpu",
    stage: Stage | None = None,
    tell: Callable[[str], None] | None = None,
    costs: bool = False,
) -> Selection:
    """Estimated values of any number of policies (`offrl.evaluation.result.Policy`) on a dataset, by one of METHODS,
    several of them (the first ranks; lstd and bvft share their fits), or "all": fqe, wis, dr, and model only where
    settings.world_model names one.

    dataset: with rewards as they are to be valued; a part of the episodes will do
    (`data.transforms.episodes.keep_episodes`). costs: estimate what episodes cost, too. A policy may have
    `log_prob(observations, actions) -> [E]`, which wis and dr use with settings.explore. Raises UserError for
    candidates that do not fit the data, and for data that say too little for the method.
    """
    settings = settings or OPEConfig()
    validate(settings)
    names = [method] if isinstance(method, str) else list(dict.fromkeys(method))
    if names == ["all"]:
        names = [name for name in ALL_NAMES if name != "model" or settings.world_model]
    if not names:
        raise UserError(f"no method is named. Methods: {', '.join(METHODS)}, all")
    for name in names:
        if name not in METHODS:
            raise UserError(
                f"unknown method '{name}'.{nearest(name, [*METHODS, 'all'])} Methods: {', '.join(METHODS)}, all (alone)"
            )
    if {"lstd", "bvft"} & set(names):
        variants(settings)  # which refuses what is no tournament, before candidates act
    problem = make_problem(dataset, candidates, settings.explore, tell, by_state=names != ["model"])
    work = Work(problem, settings, device, stage or (lambda title, total: lambda step, rate: None), tell)
    return Selection(
        names=problem.names,
        estimates={name: METHODS[name](work) for name in names},
        behavior=behavior_value(problem.dataset, settings.discount),
        own_q=own_values(problem),
        distance=distances(problem),
        discount=settings.discount,
        data=dataset.spec.name,
        episodes=dataset.num_episodes,
        costs=work.costs if costs else None,
    )


def select(
    runs: Sequence[str | Path | SavedRun] | str | Path | SavedRun = (),
    dataset: Dataset | DatasetConfig | str | Path | None = None,
    *,
    policies: Mapping[str, Any] | Sequence[str] = (),
    method: str | Sequence[str] = "fqe",
    returns: str | Path | Mapping[str, float] | None = None,
    settings: OPEConfig | None = None,
    device: str = "cpu",
    stage: Stage | None = None,
    tell: Callable[[str], None] | None = None,
) -> Selection:
    """Rank every checkpoint and final policy of runs, and other policies, by their estimated value on logged data.

    runs: run directories, or folders of them. dataset: the runs' own by default, with rewards as recorded. policies: by
    name, or texts that `offrl.interop.policies.load_agents` reads. returns: true values, {name: discounted return} or a
    CSV (see `read_returns`). Raises UserError for fewer than two candidates, data that differ or are gone, and
    candidates of other spaces.
    """
    sources = [runs] if isinstance(runs, (str, Path, SavedRun)) else list(runs)
    saved_runs = [run for item in sources for run in ([item] if isinstance(item, SavedRun) else find_runs([item]))]
    if not saved_runs and not policies:
        raise UserError("nothing to select from: name run directories, or policies with policy=")
    if dataset is None:
        if not saved_runs:
            raise UserError("policies alone do not say which data to evaluate them on: name a dataset with dataset=")
        data = data_of(saved_runs)
    elif isinstance(dataset, Dataset):
        data = dataset
    else:
        data = load_dataset(
            recorded(dataset if isinstance(dataset, DatasetConfig) else DatasetConfig(name=str(dataset)))
        )
    parts = [run_candidates(run) for run in saved_runs]
    parts.append(dict(policies) if isinstance(policies, Mapping) else load_policies(policies, data.spec))
    candidates = join(parts)
    if len(candidates) < 2:
        where = (
            f" ({next(iter(candidates))}); train with checkpoint.keep=0 to keep every checkpoint, or more seeds"
            if candidates
            else ""
        )
        raise UserError(f"there is only one candidate, so nothing to choose from{where}")
    truth, kind = true_values(returns, list(candidates)) if returns is not None else (np.zeros(0), "")
    result = evaluate_policies(data, candidates, method, settings, device=device, stage=stage, tell=tell)
    return replace(result, truth=truth, truth_kind=kind)


def distances(problem: Problem) -> np.ndarray:
    """The distance of each candidate's actions from the data's over all rows: root mean square, or the share that
    differs: [K].
    """
    data = problem.dataset.columns["actions"]
    if problem.dataset.spec.discrete:
        return np.array([float((a.current != data).double().mean()) for a in problem.actions])
    return np.array([float((a.current - data).double().square().mean().sqrt()) for a in problem.actions])


# ------------------------------------------------------------------------------------------------------------ true
# values


def read_returns(path: str | Path) -> dict[str, tuple[float, float]]:
    """{candidate: (return, discounted return)} of a CSV with the columns candidate, return and, if known, discounted;
    NaN where empty.

    Raises UserError for a file that is missing or damaged, or a line that cannot be read.
    """
    try:
        rows = read(Path(path))
    except FileNotFoundError:
        raise UserError(f"returns={path} does not exist") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"returns={path} cannot be read as CSV ({error})") from None
    columns = set(rows[0]) if rows else set()
    if "candidate" not in columns or not columns & {"return", "discounted"}:
        raise UserError(
            f"returns={path} needs a header line candidate,return or candidate,return,discounted, and lines below it"
        )
    entries = {}
    for number, row in enumerate(rows, 2):
        try:
            values = [float(row[c]) if row.get(c) else math.nan for c in ("return", "discounted")]
        except (TypeError, ValueError):
            raise UserError(f"returns={path}, line {number}: '{row.get('return')}' is not a number") from None
        if row["candidate"] in entries:
            raise UserError(f"returns={path}, line {number}: {row['candidate']} comes twice")
        entries[row["candidate"]] = (values[0], values[1])
    return entries


def true_values(returns: str | Path | Mapping[str, float], names: Sequence[str]) -> tuple[np.ndarray, str]:
    """([K] true values in the candidates' order, "discounted" or "return"). Discounted ones are taken where the file
    has them for all.

    Raises UserError where fewer than two candidates are in it; those that are not are named in a warning.
    """
    table: Mapping[str, tuple[float, float]]
    table = (
        {k: (math.nan, float(v)) for k, v in returns.items()} if isinstance(returns, Mapping) else read_returns(returns)
    )
    known = [name for name in names if name in table]
    if len(known) < 2:
        near = nearest(next(iter(table), ""), names)
        raise UserError(
            f"the true returns name {len(known)} of {len(names)} candidates; two are needed.{near} Candidates: "
            f"{some(names, 3)}"
        )
    if missing := [name for name in names if name not in table]:
        warn(f"no true return is given for {some(missing, 3)}")
    kind = "discounted" if all(math.isfinite(table[name][1]) for name in known) else "return"
    return np.array([table[name][kind == "discounted"] if name in table else math.nan for name in names]), kind
