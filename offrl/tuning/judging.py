"""What the judges say of the settings of a rung: estimates of every policy, made on data that trained none of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data import load_dataset
from offrl.data.costs import refuse_costless
from offrl.data.dataset import Dataset
from offrl.data.fit import refuse_streams
from offrl.errors import UserError, warn
from offrl.ope.candidates import recorded, run_policies
from offrl.ope.config import OPEConfig, short_fit
from offrl.ope.judges.critics import gates
from offrl.ope.selection import Stage, evaluate_policies
from offrl.runs.run import SavedRun
from offrl.settings.train import TrainConfig
from offrl.system import files
from offrl.system.csv_text import text_of
from offrl.tuning.choice import ERROR95, places, pooled_sd
from offrl.tuning.config import FEW_EPISODES, TuneConfig
from offrl.tuning.search.training import RungRun

MOST_PAIRS = 16  # candidates whose targets are computed for each row of fitted Q evaluation, however many there are
FILE = "trials.csv"  # a row for each setting at each judgement
COST = "cost"  # the name of an estimate of costs, beside those of the methods
FINAL = "final"  # what the rung of the last judgement is called
Row = dict[str, Any]
Policies = dict[tuple[str, int], Any]  # (setting, seed): policy; those that diverged are missing


def policies_of(runs: Sequence[RungRun]) -> Policies:
    """The policies of trained runs, in the order of their settings and seeds."""
    policies: Policies = {}
    for run in runs:
        saved = SavedRun(run.directory)
        latest = {replica: policy for replica, _, policy in run_policies(saved)}
        count = len(run.replicas) // len(run.trials)
        for index, (replica, planned_replica) in enumerate(zip(saved.replicas, run.replicas, strict=True)):
            if replica in latest:
                policies[run.trials[index // count], planned_replica.seed] = latest[replica]
    return policies


def judge(
    policies: Policies,
    data: Dataset,
    methods: Sequence[str],
    settings: OPEConfig,
    device: str,
    stage: Stage | None = None,
    tell: Callable[[str], None] | None = None,
    costs: bool = False,
) -> dict[str, Any]:
    """The record of a judgement, of plain numbers: for each policy its estimates by method, with `costs` also that of
    an episode's cost, and the statistics that none decides by.

    Raises UserError where a method cannot judge these policies on these data.
    """
    policies_by_name = {f"{trial}/seed={seed}": policy for (trial, seed), policy in policies.items()}
    gate = gates(data, policies_by_name, settings.discount)
    reasons = gate.reasons()
    indices = [k for k, finite in enumerate(gate.finite) if finite]  # others act with NaN, and count as diverged
    if not indices:
        raise UserError(
            "no policy acts with finite numbers: lower learning rates, or look at the data with offrl data inspect"
        )
    candidates = {name: policy for k, (name, policy) in enumerate(policies_by_name.items()) if gate.finite[k]}
    keys = list(policies)
    result = evaluate_policies(
        data, candidates, list(methods), settings, device=device, stage=stage, tell=tell, costs=costs
    )
    estimates = {**result.estimates, **({} if result.costs is None else {COST: result.costs})}
    rows = []
    for k, index in enumerate(indices):
        trial, seed = keys[index]
        row: dict[str, Any] = {
            "setting": trial,
            "seed": seed,
            "distance": _number(result.distance[k]),
            "own_q": _number(result.own_q[k]),
        }
        for method, e in estimates.items():
            row[method] = _number(e.value[k])
            row[f"{method}_sd"] = _number((e.high[k] - e.low[k]) / (2.0 * ERROR95))
            if len(e.details.get("seeds", ())) > 1:
                row[f"{method}_draws"] = [_number(x[k]) for x in e.details["seeds"]]
        row |= {
            "td_error": _number(gate.td_error[index]),
            "q_ratio": _number(gate.ratio[index]),
            "exploded": reasons[index],
        }
        rows.append(row)
    return {
        "methods": list(methods),
        "discount": settings.discount,
        "episodes": data.num_episodes,
        "data": [_number(x) for x in result.behavior],
        "policies": rows,
    }


def _number(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class Summary:
    """A judgement by setting: float64 arrays [T] in the settings' order, NaN where all seeds of a setting diverged."""

    names: tuple[str, ...]
    values: np.ndarray  # [T, S] of the method that decides, NaN where a seed diverged
    draws: np.ndarray | None  # [T, S, Q] the same by each bootstrapped fit; None where there is one fit only
    value: np.ndarray  # of the method that decides, mean over the seeds
    error: np.ndarray  # its standard error
    worst: np.ndarray  # smallest of the seeds
    distance: np.ndarray  # mean distance of actions from the data's
    other_values: Mapping[str, np.ndarray]  # by the methods that are shown beside it
    alive: np.ndarray  # seeds that did not diverge
    # why a setting is dropped whatever its estimate: its own Q left what the rewards allow; "" for none
    exploded: tuple[str, ...]
    cost: np.ndarray  # of an episode, NaN where costs were not judged
    cost_error: np.ndarray

    def criteria(self, names: Sequence[str]) -> np.ndarray:
        """[T, C], larger is better in each."""
        columns = {"return": self.value, "worst": self.worst, "distance": -self.distance, COST: -self.cost}
        return np.stack([columns[n] for n in names], -1)

    def cost_interval(self, k: int) -> list[float]:
        """[cost, low, high] of setting k, 95%."""
        half = ERROR95 * self.cost_error[k]
        return [float(self.cost[k]), max(0.0, float(self.cost[k] - half)), float(self.cost[k] + half)]

    @property
    def most_cost(self) -> np.ndarray:
        """The upper ends of the 95% intervals of the costs."""
        return self.cost + ERROR95 * self.cost_error

    def standing(self, limit: float | None) -> np.ndarray:
        """By what settings are thinned out, larger is better: `value`; with a limit of the costs the place among all,
        from the last, 0: those that keep it come first, by `value`, the others by how little they exceed it."""
        return self.value if limit is None else places(self.value, self.most_cost, limit)


def summarise(record: Mapping[str, Any], trials: Sequence[str], seeds: Sequence[int]) -> Summary:
    """See `Summary`. seeds: those of every setting, of which some may have diverged.

    The error adds the variance over seeds, pooled over the settings where seeds are few, divided by their number, to
    that of the bootstrapped fits of the mean over seeds: they are no independent draws (one fit judges all seeds).
    """
    method = record["methods"][0]
    rows = {(r["setting"], r["seed"]): r for r in record["policies"] if r[method] is not None}
    nothing: Mapping[str, Any] = {}

    def table(key: str, missing: Any = math.nan) -> np.ndarray:
        cells = ([rows.get((t, s), nothing).get(key) for s in seeds] for t in trials)
        return np.array([[missing if x is None else x for x in row] for row in cells], float)

    def column(key: str, how: Callable[[np.ndarray], Any] = np.mean) -> np.ndarray:
        values = (row[~np.isnan(row)] for row in table(key))
        return np.array([float(how(v)) if len(v) else math.nan for v in values])

    def judged(key: str) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        """(values [T, S], draws [T, S, Q] or None, standard errors [T])."""
        values = table(key)
        alive = ~np.isnan(values)
        counts = alive.sum(1)
        num_fits = max((len(r.get(f"{key}_draws") or ()) for r in rows.values()), default=0)
        draws = table(f"{key}_draws", [math.nan] * num_fits)
        fits = np.nan_to_num(column(f"{key}_sd")) ** 2
        for t, known in enumerate(alive):
            # of each fit the mean over the seeds, and the variance of these means
            if num_fits and known.any() and not np.isnan(draws[t, known]).any():
                fits[t] = draws[t, known].mean(0).var(ddof=1)
        pooled = pooled_sd(values) ** 2 if (counts > 1).any() else 0.0
        with np.errstate(divide="ignore", invalid="ignore"):
            error = np.sqrt(np.where(counts > 0, pooled / np.maximum(counts, 1), np.nan) + fits)
        return values, draws if num_fits else None, error

    values, draws, error = judged(method)
    reasons = ([r["exploded"] for s in seeds if (r := rows.get((t, s)))] for t in trials)
    return Summary(
        names=tuple(trials),
        values=values,
        draws=draws,
        value=column(method),
        error=error,
        worst=column(method, np.min),
        distance=column("distance"),
        other_values={m: column(m) for m in record["methods"][1:]},
        alive=(~np.isnan(values)).sum(1),
        exploded=tuple(next(filter(None, texts), "") for texts in reasons),
        cost=column(COST),
        cost_error=judged(COST)[2],
    )


def judging_data(config: TrainConfig, tune: TuneConfig) -> Dataset:
    """The part of the data that judges, with rewards as recorded. Raises UserError where it is too small to."""
    part = "second" if tune.split < 1.0 else "first"
    settings = replace(recorded(config.dataset), split=tune.split, split_part=part, split_seed=tune.seed)
    data = load_dataset(settings, "cpu", tune.quiet)
    if tune.data_judges:
        if tune.cost_limit is not None:
            refuse_costless(data, "criteria=cost")
        refuse_streams(data, "a judge", "play instead, judge=[episodes] episodes=100 rungs=1")
        if data.num_episodes < 2:
            raise UserError(
                f"{data.spec.name}: {data.num_episodes} episode is left to judge by; take a larger split= or more data"
            )
        if data.num_episodes < FEW_EPISODES:
            warn(f"{data.num_episodes} episodes judge: they say little, and the table's intervals say how little")
    return data


def short_judge(settings: OPEConfig, judges: Sequence[str], thinned: bool) -> str:
    """What to say of a judge that is too short for its values; "" where it is not. thinned: rungs before the last are
    judged.
    """
    if advice := short_fit(settings, judges, "ope.updates"):
        return advice
    half = short_fit(rung_settings(settings, False, 1), judges, "half of ope.updates") if thinned else ""
    return half and f"{half}; it judges every rung but the last"


def rung_settings(settings: OPEConfig, last: bool, policies: int) -> OPEConfig:
    """Half the updates for the rungs that thin out, all of them for the judgement that chooses; targets of an eighth of
    the policies, or more, for each row."""
    updates = settings.updates if last else max(1, settings.updates // 2)
    return replace(settings, updates=updates, pairs=max(settings.pairs, min(MOST_PAIRS, -(-policies // 8))))


def judged_rows(
    trials: Mapping[str, tuple[str, Mapping[str, Any]]],
    summary: Summary,
    method: str,
    rung: str,
    updates: int,
    fates: Mapping[str, str],
    bracket: int | None,
) -> list[Row]:
    """A row for each setting of a judgement, of plain values. trials: {setting: (algorithm, values)}; method: the one
    that decides; fates: of the settings."""
    rows = []
    for k, name in enumerate(summary.names):
        algo, values = trials[name]
        row: Row = {"bracket": bracket, "rung": rung, "setting": name, "algo": algo}
        row |= {f"algo.{field}": value for field, value in values.items()}
        row |= {"updates": updates, "seeds": int(summary.alive[k])}
        row |= {method: summary.value[k], "error": summary.error[k], "worst": summary.worst[k]}
        row |= {other: column[k] for other, column in summary.other_values.items()}
        if not math.isnan(summary.cost[k]):
            row |= {COST: summary.cost[k], "cost_error": summary.cost_error[k]}
        row |= {"distance": summary.distance[k], "exploded": summary.exploded[k], "fate": fates.get(name, "")}
        rows.append({key: _plain(value) for key, value in row.items()})
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return None if value != value else float(value)
    return value


def write_trials(folder: Path, rows: Sequence[Row]) -> None:
    """With the columns of all rows, in the order in which they come first; the settings' beside each other."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    searched = [n for n in names if n.startswith("algo.")]
    front = ["bracket", "rung", "setting", "algo", *searched]
    columns = [*(c for c in front if c in names), *(n for n in names if n not in front)]
    cells = [columns, *([_text(row.get(c)) for c in columns] for row in rows)]
    files.write_text(folder / FILE, text_of(cells))


def _text(value: Any) -> Any:
    return str(value).replace(" ", "") if isinstance(value, (list, tuple)) else value
