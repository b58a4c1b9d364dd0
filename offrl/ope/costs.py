"""What an episode of a policy costs, by fitted Q evaluation of the costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offrl.data.costs import refuse_costless
from offrl.data.dataset import Dataset
from offrl.data.raw.infer import step_limit
from offrl.families.critics.costs import even_cost
from offrl.ope.config import FQEConfig
from offrl.ope.fqe import fit, summarise
from offrl.ope.problem import Estimates, Problem
from offrl.training.fit import Progress


def episode_costs(
    problem: Problem, settings: FQEConfig, device: str = "cpu", progress: Progress | None = None
) -> Estimates:
    """Estimates of the cost of an episode of each candidate, in the units of a limit: the discounted cost J from the
    data's initial states, spread evenly over an episode of T steps, J T (1 - g) / (1 - g^T), as the threshold of
    algorithms with a limit is (`even_cost`).

    T is the task's, else the data's longest episode. Raises UserError for data without costs."""
    dataset = problem.dataset
    refuse_costless(dataset, "an estimate of costs")
    columns = {**dataset.columns, "rewards": dataset.columns["costs"]}
    estimates = summarise(fit(replace(problem, dataset=replace(dataset, columns=columns)), settings, device, progress))
    unit = even_cost(1.0, _horizon(dataset), settings.discount)
    ends = {"value": estimates.value / unit, "low": estimates.low / unit, "high": estimates.high / unit}
    draws = (np.asarray(estimates.details["seeds"]) / unit).tolist()
    return replace(estimates, method="cost", details={"seeds": draws}, **ends)


def _horizon(dataset: Dataset) -> int:
    return step_limit(dataset.spec.task) or int(dataset.episode_lengths().max())
