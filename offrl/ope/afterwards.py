"""What can be said of a run that no environment scored: its policies' values by fitted Q evaluation on its own data, how far their actions
lie from the data's, and what to do next."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from offrl import registry
from offrl.data.dataset import Dataset
from offrl.data.transforms.episodes import subsample
from offrl.errors import UserError
from offrl.ope.linear import values
from offrl.ope.problem import make_problem
from offrl.ope.selection import distances
from offrl.runs.run import SavedRun
from offrl.settings.train import TrainConfig
from offrl.system import files, trust

FILE = "estimate.json"
TRIAL = 1_000  # updates of a run that is too short to be judged
ROWS, CANDIDATES = 20_000, 4  # of the data and the replicas, at most, so that it takes seconds
FAR = 1.25  # times the spread of the data's own actions: a distance that not even their mean has
NUMBERS = ("steps", "discount", "policies", "episodes", "sound", "distance", "spread", "discrete",
           *(f"{name}{end}" for name in ("value", "data", "difference") for end in ("", "_low", "_high")))  # fmt: skip
FEW = 10  # episodes, below which an interval says little


def judge(run: SavedRun, config: TrainConfig, dataset: Dataset) -> list[str]:
    """Lines about the final policies of a run that was not scored; [] where there is nothing to say. Writes RUN/estimate.json.

    dataset: what the run was trained on. A run that was judged at this length is not judged again.
    """
    traits = registry.get("algo", config.algo.name).traits
    cheap = not (traits.text or traits.goal_conditioned or traits.acts_on_device or dataset.mapped)
    if not (config.eval.estimate and run.acts and cheap) or config.steps < TRIAL or run.score_rows:
        return []
    path = run.dir / FILE
    numbers = _read(path)
    if numbers is None or numbers.get("steps") != config.steps:
        try:
            numbers = _estimate(run, config, dataset)
        except UserError as error:
            return [f"no environment scored this run, and its value cannot be estimated from the data: {error}"]
        files.write_text(path, json.dumps(numbers, indent=1) + "\n")
    return _words(run.dir, numbers)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        numbers = json.loads(trust.read_text(path))
    except (OSError, ValueError, UserError, RecursionError):
        return None
    sound = isinstance(numbers, dict) and all(isinstance(numbers.get(k), int | float) for k in NUMBERS)
    return numbers if sound else None


def _estimate(run: SavedRun, config: TrainConfig, dataset: Dataset) -> dict[str, Any]:
    """The numbers of `FILE`. Raises UserError where there is no policy, or the data do not allow it."""
    lost = set(run.diverged)
    replicas = [r for r in run.replicas if r not in lost]
    policies = {r.name: run.load_policy(r, "cpu") for r in replicas[:CANDIDATES]}
    data = as_recorded(dataset)
    if len(data) > ROWS and data.num_episodes > FEW:
        data = subsample(data, max(ROWS / len(data), FEW / data.num_episodes), 0)
    discount = min(float(getattr(config.algo, "discount", 0.99)), 0.999)
    problem = make_problem(data, policies)
    fitted = values(problem, discount, FEW)
    own, trained = fitted.data, fitted.policies.mean(1)
    result = {
        "steps": config.steps,
        "discount": discount,
        "policies": len(policies),
        "episodes": data.num_episodes,
        "sound": bool(fitted.low <= trained[0] <= fitted.high and fitted.low <= own[0] <= fitted.high),
        "distance": float(distances(problem).mean()),
        "spread": _spread(data),
        "discrete": data.spec.discrete,
    }
    for name, draws in (("value", trained), ("data", own), ("difference", trained - own)):
        low, high = np.percentile(draws[1:], [2.5, 97.5])
        result |= {name: float(draws[0]), f"{name}_low": float(low), f"{name}_high": float(high)}
    return result


def as_recorded(dataset: Dataset) -> Dataset:
    """The dataset with its rewards in the units in which they were recorded."""
    spec = dataset.spec
    if spec.reward_scale == 1.0 and spec.reward_shift == 0.0:
        return dataset
    rewards = (dataset.columns["rewards"] - spec.reward_shift) / (spec.reward_scale or 1.0)
    return replace(dataset, columns={**dataset.columns, "rewards": rewards}, spec=replace(spec, reward_scale=1.0, reward_shift=0.0))


def _spread(dataset: Dataset) -> float:
    """The spread of the data's own actions: how far they lie from their mean, or how many are not the most frequent choice."""
    actions = dataset.columns["actions"]
    if dataset.spec.discrete:
        return 1.0 - float(np.bincount(actions.numpy()).max() / len(actions))
    return float((actions - actions.mean(0)).double().square().mean().sqrt())


def _words(run_dir: Path, n: dict[str, Any]) -> list[str]:
    policies = f"mean of {n['policies']} policies" if n["policies"] > 1 else "the policy"
    far = not n["discrete"] and n["distance"] > max(0.1, FAR * n["spread"])
    where = "the data's first states" if n["episodes"] >= FEW else "the data's states"
    lines = [
        f"no environment scored this run; estimated from its data alone (linear fitted Q evaluation from {where}, discount "
        f"{n['discount']:g}):",
        f"  {policies}: {_interval(n, 'value')}; what made the data: {_interval(n, 'data')}; difference {_interval(n, 'difference')}",
    ]
    if n["discrete"]:
        lines.append(f"  actions: {n['distance']:.0%} differ from the data's (a constant choice would in {n['spread']:.0%})")
    else:
        lines.append(f"  actions: {n['distance']:.2g} from the data's, root mean square in [-1, 1] (which spread by {n['spread']:.2g})")
    if not n["sound"]:
        verdict = "the estimate is beyond what the rewards allow, and worthless: too few data, or actions far from them"
    elif far:
        verdict = "actions this far from the data are guesses, and so is the estimate: algo=td3_bc, or bc, stays closer"
    elif n["episodes"] < FEW:
        verdict = f"{n['episodes']} episodes only: the estimate says little; divide the log into more of them, or collect more"
    elif n["difference_low"] > 0.0:
        verdict = "probably better than what made the data"
    elif n["difference_high"] < 0.0:
        verdict = "probably worse than what made the data: more steps, or another algorithm (compare with algo=bc)"
    else:
        verdict = "not clearly different from what made the data: more steps, more data, or another algorithm"
    return [
        *lines,
        f"  {verdict}. An estimate is no proof: try it with care",
        f"  next: `offrl select {run_dir}` (longer estimates of every checkpoint), `offrl export {run_dir}` (a file to deploy), "
        f"`offrl evaluate {run_dir} env=file.py:Name` (a simulator of yours); eval.estimate=false leaves this out",
    ]


def _interval(n: dict[str, Any], name: str) -> str:
    return f"{n[name]:.4g} [{n[f'{name}_low']:.4g}, {n[f'{name}_high']:.4g}]"
