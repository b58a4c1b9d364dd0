"""What the judges say of the settings of a rung: estimates of every policy, made on data that trained none of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.ope.candidates import run_policies
from offrl.ope.config import OPEConfig, short_fit
from offrl.ope.judges.critics import gates
from offrl.ope.selection import Stage, evaluate_policies
from offrl.runs.run import SavedRun
from offrl.tuning.choice import pooled_sd
from offrl.tuning.search.training import RungRun

MOST_PAIRS = 16  # candidates whose targets are computed for each row of fitted Q evaluation, however many there are
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
) -> dict[str, Any]:
    """The record of a judgement, of plain numbers: for each policy its estimates by method, and the statistics that
    none decides by.

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
    result = evaluate_policies(data, candidates, list(methods), settings, device=device, stage=stage, tell=tell)
    rows = []
    for k, index in enumerate(indices):
        trial, seed = keys[index]
        row: dict[str, Any] = {
            "setting": trial,
            "seed": seed,
            "distance": _number(result.distance[k]),
            "own_q": _number(result.own_q[k]),
        }
        for method, e in result.estimates.items():
            row[method] = _number(e.value[k])
            row[f"{method}_sd"] = _number((e.high[k] - e.low[k]) / (2.0 * 1.959964))
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
    value: np.ndarray  # of the method that decides, mean over the seeds
    error: np.ndarray  # its standard error
    worst: np.ndarray  # smallest of the seeds
    distance: np.ndarray  # mean distance of actions from the data's
    other_values: Mapping[str, np.ndarray]  # by the methods that are shown beside it
    alive: np.ndarray  # seeds that did not diverge
    # why a setting is dropped whatever its estimate: its own Q left what the rewards allow; "" for none
    exploded: tuple[str, ...]

    def criteria(self, names: Sequence[str]) -> np.ndarray:
        """[T, C], larger is better in each."""
        columns = {"return": self.value, "worst": self.worst, "distance": -self.distance}
        return np.stack([columns[n] for n in names], -1)


def summarise(record: Mapping[str, Any], trials: Sequence[str]) -> Summary:
    """See `Summary`.

    The error adds the variance over seeds, pooled over the settings where seeds are few, divided by their number, to
    that of the bootstrapped fits of the mean over seeds: they are no independent draws (one fit judges all seeds).
    """
    method = record["methods"][0]
    rows: dict[str, list[Mapping[str, Any]]] = {t: [] for t in trials}
    for row in record["policies"]:
        if row["setting"] in rows and row[method] is not None:
            rows[row["setting"]].append(row)

    def column(key: str, how: Callable[[np.ndarray], Any] = np.mean) -> np.ndarray:
        values = [
            np.array([r[key] for r in setting_rows if r.get(key) is not None], float) for setting_rows in rows.values()
        ]
        return np.array([float(how(v)) if len(v) else math.nan for v in values])

    counts = np.array([len(setting_rows) for setting_rows in rows.values()])
    seeds = np.full((len(rows), max(1, *counts)), np.nan)
    for estimates, setting_rows in zip(seeds, rows.values(), strict=True):
        estimates[: len(setting_rows)] = [r[method] for r in setting_rows]
    pooled = pooled_sd(seeds) ** 2 if (counts > 1).any() else 0.0
    fits = np.array([_fit_variance(setting_rows, method) for setting_rows in rows.values()])
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt(np.where(counts > 0, pooled / np.maximum(counts, 1), np.nan) + fits)
    return Summary(
        names=tuple(trials),
        value=column(method),
        error=error,
        worst=column(method, np.min),
        distance=column("distance"),
        other_values={m: column(m) for m in record["methods"][1:]},
        alive=counts,
        exploded=tuple(
            next((str(r["exploded"]) for r in setting_rows if r["exploded"]), "") for setting_rows in rows.values()
        ),
    )


def _fit_variance(rows: Sequence[Mapping[str, Any]], method: str) -> float:
    """Of the mean over seeds, by the fits: of each fit the mean over the seeds, and the variance of these means."""
    draws = [r[f"{method}_draws"] for r in rows if r.get(f"{method}_draws")]
    if draws and all(x is not None for row_draws in draws for x in row_draws):
        return float(np.var(np.mean(np.array(draws, float), 0), ddof=1))
    sds = [r[f"{method}_sd"] for r in rows if r.get(f"{method}_sd") is not None]
    return float(np.mean(sds)) ** 2 if sds else 0.0


def clone_distance(data: Dataset) -> float:
    """How far the actions of the best linear function of the observations lie from the data's: root mean square in [-1,
    1], or the share of actions that are not the most frequent one. What a policy that clones the data has, at least in
    size."""
    actions = data.columns["actions"]
    if data.spec.discrete:
        return 1.0 - float(np.bincount(actions.numpy()).max() / len(actions))
    x = data.columns["observations"].reshape(len(data), -1).double().numpy()
    x = np.hstack([(x - x.mean(0)) / (x.std(0) + 1e-6), np.ones((len(x), 1))])
    y = actions.reshape(len(data), -1).double().numpy()
    weights = np.linalg.solve(x.T @ x + 1e-3 * len(x) * np.eye(x.shape[1]), x.T @ y)
    return float(np.sqrt(np.mean((x @ weights - y) ** 2)))


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
