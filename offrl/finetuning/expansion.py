"""The start of `offrl finetune mode=expansion` (PEX, arXiv 2302.00935): a run of IQL as a state of `pex`, in which the
run's policy stays as it is and a new one begins beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offrl.algorithm import Algorithm, TrainState
from offrl.algorithms.pex import PEXConfig
from offrl.errors import UserError
from offrl.runs.run import SavedRun
from offrl.settings.compose import fill
from offrl.settings.replicas import Replica
from offrl.training.engine import first_state

OWN = "algo.inverse_temperature"  # the setting that a run of IQL does not have


@dataclass
class _Settings:
    algo: PEXConfig = field(default_factory=PEXConfig)


def check(run: SavedRun, path: Path) -> None:
    """Raise UserError for a run that cannot be expanded."""
    algo, needs = run.record["identity"]["algo"], f"{path}: mode=expansion takes"
    if algo["name"] != "iql":
        raise UserError(f"{needs} runs of iql, whose Q chooses between its policy and a new one; not {algo['name']}")
    if algo.get("policy") == "deterministic":
        raise UserError(f"{needs} a stochastic policy, and algo.policy=deterministic is none")
    if algo.get("cost_limit") is not None or "cost_limit" in run.grid:
        raise UserError(f"{needs} runs without algo.cost_limit, which it would not keep; mode=transitions does")
    if algo.get("representation") == "mrq":
        raise UserError(f"{needs} runs without algo.representation, whose latents go on changing under the policy")
    if run.spec.encoder is not None:
        raise UserError(
            f"{needs} runs without an encoder, which goes on learning under the policy that is to stay; "
            "mode=transitions trains such a policy on"
        )


def settings(config: Any, typed: Mapping[str, Any]) -> PEXConfig:
    """A run's settings as those of `pex`. typed: settings of the command."""
    algo = fill(_Settings(), {k: v for k, v in typed.items() if k == OWN}, "finetune").algo
    names = {f.name for f in dataclasses.fields(algo)} & {f.name for f in dataclasses.fields(config)} - {"name"}
    return dataclasses.replace(algo, **{name: getattr(config, name) for name in names})


def state(algorithm: Algorithm, replicas: Sequence[Replica], run: TrainState) -> TrainState:
    """The first state of `algorithm`, with the values and the policies of a run's state; optimisers and new policies
    begin anew.
    """
    fresh = first_state(algorithm, replicas)
    return fresh._replace(
        params={**run.params, "actor": fresh.params["actor"]},
        target=run.target,
        extra={**run.extra, "old": run.params["actor"]},
        step=run.step,
        key=run.key,
    )
