"""Runs whose policies go on in another algorithm: of IQL in PEX (`offrl finetune mode=expansion`, arXiv 2302.00935), in
which the run's policy stays as it is and a new one begins beside it; of `skill_iql` in Skill-Critic (arXiv 2306.08388),
in which both levels learn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offrl import registry
from offrl.errors import UserError
from offrl.runs.run import SavedRun
from offrl.settings.compose import fill

# what learns from the policies of a run alone, and how
ON_A_RUN = {
    "residual": "the policies of a run: offrl finetune RUN mode=residual env=ID",
    "pex": "the policies of a run: offrl finetune RUN mode=expansion env=ID",
    "skill_iql": "a run of it alone, for skills come from data: offrl finetune RUN env=ID",
    "skill_critic": "the policies of a run of skill_iql: offrl finetune RUN env=ID",
}


def successor(run: SavedRun, path: Path, mode: str) -> str:
    """The algorithm in which the policies of a run go on. Raises UserError for a run that cannot go on."""
    if mode == "expansion":
        check_expanded(run, path)
        return "pex"
    name = str(run.record["identity"]["algo"]["name"])
    if name == "skill_iql":
        check_skills(run, path)
        return "skill_critic"
    return name


def check_expanded(run: SavedRun, path: Path) -> None:
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


def check_skills(run: SavedRun, path: Path) -> None:
    """Raise UserError for a run of skill_iql whose levels cannot learn on."""
    algo, needs = run.record["identity"]["algo"], f"{path}: skill_critic goes on with"
    if run.spec.discrete:
        raise UserError(f"{needs} skills of continuous actions alone, and {run.spec.name} has discrete ones")
    if algo["value_head"] != "scalar":
        raise UserError(f"{needs} critics of one number, and the run has algo.value_head={algo['value_head']}")
    settings = {field.name for field in dataclasses.fields(registry.get("algo", "skill_critic").Config)}
    if unknown := [name for name in run.grid if name not in settings]:
        raise UserError(f"{needs} what it has settings for, and grid.{unknown[0]} is none of them: take single runs")


def typed_for(name: str, run: str, typed: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a command that the algorithm `name` has, and that of the run, `run`, has not. Raises UserError
    for those that only the latter has."""
    new, old = ({f.name for f in dataclasses.fields(registry.get("algo", n).Config)} for n in (name, run))
    if alone := next((k for k in typed if k.removeprefix("algo.") in old - new and k.startswith("algo.")), None):
        raise UserError(f"{alone}= is a setting of {run}, and {name}, which goes on with it, has none: leave it out")
    return {k: v for k, v in typed.items() if k.startswith("algo.") and k.removeprefix("algo.") in new - old}


def settings(name: str, config: Any, typed: Mapping[str, Any]) -> Any:
    """A run's settings as those of the algorithm `name`, with what a command says of it alone, see `typed_for`."""
    kind = registry.get("algo", name).Config
    if isinstance(config, kind):
        return config
    parent = dataclasses.make_dataclass("Settings", [("algo", kind, dataclasses.field(default_factory=kind))])
    algo = fill(parent(), typed, "finetune").algo
    names = {f.name for f in dataclasses.fields(algo)} & {f.name for f in dataclasses.fields(config)} - {"name"}
    return dataclasses.replace(algo, **{name: getattr(config, name) for name in names})
