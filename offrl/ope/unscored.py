"""What can be said of a run that no environment scored: its policies' values by fitted Q evaluation on its own data,
how far their actions lie from the data's, and what to do next."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from offrl import registry
from offrl.data.dataset import Dataset
from offrl.data.transforms.episodes import subsample
from offrl.errors import UserError
from offrl.ope.linear import SCALES, LinearValues, interval, values
from offrl.ope.problem import make_problem
from offrl.ope.selection import distances
from offrl.runs.run import SavedRun
from offrl.settings.train import TrainConfig
from offrl.system import files, trust

FILE = "estimate.json"
TRIAL = 1_000  # updates of a run that is too short to be judged
ROWS, CANDIDATES = 20_000, 8  # of the data and the replicas, at most, so that it takes seconds
SHOWN, WORST = 4, 3  # policies that have a line each; of more, the worst
# episodes, below which an estimate has no interval; and horizons, of 1 / (1 - discount) rows, on which a fit that
# counts rests
FEW = 10
COUNTED = 6  # of linear.FITS: more than half
COMMON = ("steps", "discount", "episodes", "rows", "inputs", "gap", "spread", "discrete", "low", "high")
VALUES = (
    "value",
    "value_low",
    "value_high",
    "difference",
    "difference_low",
    "difference_high",
    "fits",
    "rows",
    "gap",
    "distance",
)
ENDS = VALUES[1:6]  # None where there is no interval


def judge(run: SavedRun, config: TrainConfig, dataset: Dataset) -> list[str]:
    """Lines about the final policies of a run that was not scored; [] where there is nothing to say. Writes
    RUN/estimate.json.

    dataset: what the run was trained on. A run that was judged at this length is not judged again.
    """
    traits = registry.get("algo", config.algo.name).traits
    cheap = not (traits.text or traits.goal_conditioned or traits.acts_on_device or dataset.mapped)
    if not (config.eval.estimate and run.acts and cheap) or config.steps < TRIAL or run.score_rows:
        return []
    path = run.dir / FILE
    names = [name for name, _ in _replicas(run)]
    numbers = _read(path, names)
    if numbers is None or numbers["steps"] != config.steps:
        try:
            numbers = estimate(run, config, dataset)
        except UserError as error:
            return [f"no environment scored this run, and its value cannot be estimated from the data: {error}"]
        files.write_text(path, json.dumps(numbers, indent=1) + "\n")
    return _sentences(run.dir, numbers, len(names))


def _read(path: Path, names: Sequence[str]) -> dict[str, Any] | None:
    """What `estimate` found earlier for the replicas `names`; None where the file is not that."""
    try:
        numbers = json.loads(trust.read_text(path))
        policies = [numbers["policies"][name] for name in names[:CANDIDATES]]
        entries = [
            *(numbers[k] for k in COMMON),
            *numbers["data"],
            *(p[k] for p in policies for k in VALUES if k not in ENDS),
        ]
        ends = [[p[k] for k in ENDS] for p in policies]
    except (OSError, ValueError, UserError, RecursionError, LookupError, TypeError):
        return None
    entries += [x for interval_ends in ends if interval_ends != [None] * len(ENDS) for x in interval_ends]
    complete = len(numbers["data"]) == 3 and len(numbers["policies"]) == len(policies)
    return numbers if complete and all(isinstance(x, int | float) for x in entries) else None


def estimate(run: SavedRun, config: TrainConfig, dataset: Dataset) -> dict[str, Any]:
    """The numbers of `FILE`. Raises UserError where there is no policy, or the data do not allow it."""
    policies = {name: run.load_policy(replica, "cpu") for name, replica in _replicas(run)[:CANDIDATES]}
    data = as_recorded(dataset)
    if len(data) > ROWS and data.num_episodes > FEW:
        data = subsample(data, max(ROWS / len(data), FEW / data.num_episodes), 0)
    discount = min(float(getattr(config.algo, "discount", 0.99)), 0.999)
    problem = make_problem(data, policies)
    fitted, out_of_distribution = values(problem, discount, FEW), distances(problem)
    result: dict[str, Any] = {
        "steps": config.steps,
        "discount": discount,
        "episodes": data.num_episodes,
        "rows": len(data),
        "inputs": data.spec.observation_dim + data.spec.encoded_action_dim,
        "gap": float(fitted.gaps[0]),
        "spread": _spread(data),
        "discrete": data.spec.discrete,
        "low": fitted.low,
        "high": fitted.high,
        "data": [float(x) for x in np.clip(interval(fitted.data), fitted.low, fitted.high)],
        "policies": {},
    }
    for k, name in enumerate(problem.names):
        numbers = [*summary(fitted, k, discount, data.num_episodes), float(out_of_distribution[k])]
        result["policies"][name] = dict(zip(VALUES, numbers, strict=True))
    return result


def summary(fitted: LinearValues, k: int, discount: float, episodes: int) -> list[float | None]:
    """All of VALUES but the last for policy k: value, interval and difference by the fits that count, None for the ENDS
    where there are too few of these, or of episodes, or the gap is wider than the features. See `doubt`."""
    counted, by_all = fitted.rows[:, k] * (1.0 - discount) >= FEW, fitted.policies[:, 0, k]
    possible = int((counted & (by_all >= fitted.low) & (by_all <= fitted.high)).sum())
    numbers: list[float | None] = [float(np.median(by_all.clip(fitted.low, fitted.high))), *[None] * len(ENDS)]
    if episodes >= FEW and possible >= COUNTED and fitted.gaps[1 + k] <= SCALES[0]:
        policy_value, behaviour_value = (
            np.clip(x[counted], fitted.low, fitted.high) for x in (fitted.policies[..., k], fitted.data)
        )
        value, low, high = interval(policy_value)
        numbers = [value, max(low, fitted.low), min(high, fitted.high), *interval(policy_value - behaviour_value)]
    return [*numbers, possible, float(np.median(fitted.rows[:, k])), float(fitted.gaps[1 + k])]


def _replicas(run: SavedRun) -> list[tuple[str, Any]]:
    """(name, replica) of the policies that did not diverge."""
    diverged = set(run.diverged)
    return [(replica.name, replica) for replica in run.replicas if replica not in diverged]


def as_recorded(dataset: Dataset) -> Dataset:
    """The dataset with its rewards in the units in which they were recorded."""
    spec = dataset.spec
    if spec.reward_scale == 1.0 and spec.reward_shift == 0.0:
        return dataset
    rewards = (dataset.columns["rewards"] - spec.reward_shift) / (spec.reward_scale or 1.0)
    return replace(
        dataset, columns={**dataset.columns, "rewards": rewards}, spec=replace(spec, reward_scale=1.0, reward_shift=0.0)
    )


def _spread(dataset: Dataset) -> float:
    """The spread of the data's own actions: how far they lie from their mean, or how many are not the most frequent
    choice.
    """
    actions = dataset.columns["actions"]
    if dataset.spec.discrete:
        return 1.0 - float(np.bincount(actions.numpy()).max() / len(actions))
    return float((actions - actions.mean(0)).double().square().mean().sqrt())


def doubt(n: dict[str, Any], policy: dict[str, Any]) -> str:
    """Why an estimate has no interval; "" where it has one.

    An interval is worth something where the data are. Where they hardly do what the policy does, or are where its
    actions lead, few rows count for everything, mostly by differences between them, and all feature maps may err alike.
    """
    if policy["value_low"] is not None:
        return ""
    if n["episodes"] < FEW:
        return f"{n['episodes']} episode{'s' * (n['episodes'] != 1)} only"
    if policy["gap"] > SCALES[0]:
        return (
            f"the nearest data of other episodes are {policy['gap']:.2g} standard deviations away in each of "
            f"{n['inputs']} inputs"
        )
    if policy["rows"] * (1.0 - n["discount"]) < FEW:
        return f"it rests on some {policy['rows']:,.0f} of {n['rows']:,} rows: the data are not where this policy goes"
    return "most fits are beyond what the rewards allow"


def _sentences(run_dir: Path, n: dict[str, Any], count: int) -> list[str]:
    """count: of the run's policies, of which some may not have been looked at."""
    doubts = {name: doubt(n, policy) for name, policy in n["policies"].items()}
    # unknown ones may be the worst
    order = sorted(n["policies"], key=lambda name: (not doubts[name], n["policies"][name]["value"]))
    shown = order if len(order) <= SHOWN else order[:WORST]
    where = "the data's first states" if n["episodes"] >= FEW else "the data's states"
    worst = ", the worst first" if len(order) > 1 else ""
    lines = [
        f"no environment scored this run; estimated from its data alone (linear fitted Q evaluation from {where}, "
        f"discount {n['discount']:g}, 95% intervals){worst}:",
        *(f"  {name}: {_estimated(n['policies'][name], doubts[name])}" for name in shown),
    ]
    if remaining := order[len(shown) :]:
        estimates = [n["policies"][name]["value"] for name in remaining]
        unsure = sum(bool(doubts[name]) for name in remaining)
        lines.append(
            f"  {len(remaining)} others: {min(estimates):.4g} to {max(estimates):.4g}"
            + f", {unsure} of them guesses" * bool(unsure)
        )
    if count > len(order):
        lines.append(f"  {count - len(order)} further policies were not looked at")
    lines.append(
        f"  what made the data: {_interval(n['data']) if n['episodes'] >= FEW else format(n['data'][0], '.4g')}"
    )
    out_of_distribution = [policy["distance"] for policy in n["policies"].values()]
    if n["discrete"]:
        lines.append(
            f"  actions: {_range(out_of_distribution, '.0%')} differ from the data's (a constant choice would in "
            f"{n['spread']:.0%})"
        )
    else:
        lines.append(
            f"  actions: {_range(out_of_distribution, '.2g')} from the data's, root mean square in [-1, 1] (which "
            f"spread by {n['spread']:.2g})"
        )
    return [
        *lines,
        f"  {_verdict(n, [name for name in order if doubts[name]])}. An estimate is no proof: try it with care",
        f"  next: `offrl select {run_dir}` (longer estimates of every checkpoint), `offrl export {run_dir}` (a file to "
        f"deploy), `offrl evaluate {run_dir} env=file.py:Name` (a simulator of yours); eval.estimate=false leaves this "
        "out",
    ]


def _estimated(policy: dict[str, Any], doubt: str) -> str:
    value, difference = ([policy[k] for k in VALUES[first : first + 3]] for first in (0, 3))
    if doubt:
        return f"{value[0]:.4g}, a guess without an interval ({doubt})"
    return f"{_interval(value)}; difference to what made the data {_interval(difference, '+')}"


def _verdict(n: dict[str, Any], guesses: Sequence[str]) -> str:
    """What to do, for the run as a whole: as its worst policy is."""
    if n["episodes"] < FEW:
        return "too few episodes: divide the log into more of them, or collect more"
    if n["gap"] > SCALES[0]:
        return (
            f"{n['rows']:,} rows are too few for {n['inputs']} inputs: more episodes, fewer columns, or a simulator of "
            "yours say more"
        )
    if guesses:
        some = (
            f"{', '.join(guesses[:WORST])}{' and others' * (len(guesses) > WORST)} are"
            if len(guesses) < len(n["policies"])
            else "all are"
        )
        conclusion = "the estimate is a guess" if len(n["policies"]) == 1 else f"{some} guesses"
        return (
            f"{conclusion}: algo=td3_bc, or bc, stays closer to the data; or collect some with the policy, or play it "
            "in a simulator"
        )
    differences = [[policy[k] for k in VALUES[3:6]] for policy in n["policies"].values()]
    if all(low > 0.0 for _, low, _ in differences):
        return "probably better than what made the data"
    if all(high < 0.0 for _, _, high in differences):
        return "probably worse than what made the data: more steps, or another algorithm (compare with algo=bc)"
    return "not clearly different from what made the data: more steps, more data, or another algorithm"


def _interval(numbers: Sequence[float], sign: str = "") -> str:
    value, low, high = numbers
    return f"{value:{sign}.4g} [{low:{sign}.4g}, {high:{sign}.4g}]"


def _range(numbers: Sequence[float], form: str) -> str:
    low, high = (format(x, form) for x in (min(numbers), max(numbers)))
    return low if low == high else f"{low} to {high}"
