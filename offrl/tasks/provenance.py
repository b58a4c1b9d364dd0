"""The provenance of scores: the environment, the versions that change a score, and the meaning of 0 and 100."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import gymnasium as gym

from offrl.tasks.task import Task


@dataclass(frozen=True)
class Provenance:
    """Columns of scores.csv and results.csv. As text:
    `Hopper-v4, gymnasium 1.4.0, mujoco 3.11.0; 0 and 100 are D4RL reference returns`.
    """

    env_id: str = ""  # the Gymnasium id without its module, or the name of the function that makes the environment
    packages: str = ""  # those whose version changes a score: "gymnasium 1.4.0, mujoco 3.11.0"
    reference: str = ""  # whose returns are 0 and 100: "D4RL", ...; "given" where they have no name; "" without
    scored_by: str = "return"  # or "success": the score is the share of episodes that succeed, in %

    @property
    def versions(self) -> dict[str, str]:
        """package -> version, of `packages`."""
        names = (text.partition(" ") for text in self.packages.split(", ") if text)
        return {name: version for name, _, version in names}

    @property
    def place(self) -> str:
        """The environment and the packages: `Hopper-v4, gymnasium 1.4.0, mujoco 3.11.0`."""
        return ", ".join(filter(None, (self.env_id, self.packages)))

    def __str__(self) -> str:
        if self.scored_by == "success":
            return f"{self.place}; the score is the share of episodes that succeed, in %"
        return f"{self.place}; 0 and 100 are {self.reference} reference returns" if self.reference else self.place


def provenance(task: Task, env: gym.Env) -> Provenance:
    """The provenance of scores of `task` in `env`."""
    if task.parts:
        return _of_parts(task, env)
    base = env.unwrapped
    name = task.env_id or str(getattr(task.env_factory, "__qualname__", type(base).__name__))
    packages = ["gymnasium"]
    parts = [getattr(base, "model", None), *vars(base).values()]
    modules = {type(part).__module__.partition(".")[0] for part in parts}
    packages += [name for name in ("mujoco", "dm_control") if modules & {name, "dm_control"}]
    owners = {kind.__module__.partition(".")[0].replace("_", "-") for kind in type(base).__mro__}
    packages += sorted(owners - {"gymnasium", "offrl", "builtins", "abc", "typing", "main"})
    versions = []
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    reference = "" if task.ref_min is None or task.scored_by == "success" else task.ref_label or "given"
    return Provenance(name.rpartition(":")[2], ", ".join(versions), reference, task.scored_by)


def _of_parts(task: Task, env: Any) -> Provenance:
    """The provenance of scores in several tasks; env: a `MultiTaskEnv`."""
    numbers = [start["task"] for start in task.starts]
    each = [provenance(task.parts[number].task, env.env_of(number)) for number in numbers]
    columns = [dict.fromkeys(getattr(one, name) for one in each) for name in ("env_id", "packages", "reference")]
    packages = dict.fromkeys(package for text in columns[1] for package in text.split(", ") if package)
    reference = "" if "" in columns[2] else " and ".join(columns[2])
    return Provenance("+".join(columns[0]), ", ".join(packages), reference)
