"""Artifacts: files of a finished run besides its policies, such as world models and pictures, made at the end of
training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, ClassVar, Protocol

from offrl import registry
from offrl.algorithm import Algorithm, TrainState, select
from offrl.data.dataset import Dataset, DataSpec
from offrl.errors import UserError, warn
from offrl.figures import goal_map
from offrl.registry import register
from offrl.settings.replicas import Replica
from offrl.training.engine import policies_of
from offrl.world_models.model import ModelTrainer


@dataclass(frozen=True)
class FinishedRun:
    """A run whose training is over."""

    dir: Path
    algorithm: Any
    dataset: Dataset
    replicas: Sequence[Replica]  # those that did not diverge
    state: TrainState  # of `replicas`, on the CPU
    env: str  # eval.env
    quiet: bool


class Artifact(Protocol):
    """A class of `register("artifact", NAME)`."""

    after: ClassVar[tuple[str, ...]]  # names of the artifacts that it reads

    @staticmethod
    def applies(algorithm: Algorithm, spec: DataSpec) -> bool:
        """Return whether runs of this algorithm on such data have it."""

    @staticmethod
    def make(run: FinishedRun) -> None:
        """Write the files, unless they are there already."""


def make_artifacts(algorithm: Algorithm, spec: DataSpec, finished: Callable[[], FinishedRun]) -> None:
    """Make the artifacts that apply, each after those that it reads. `finished` is called only where there is one."""
    artifacts = registry.names("artifact")
    order = TopologicalSorter({name: artifact.after for name, artifact in artifacts.items()}).static_order()
    if applicable := [artifacts[name] for name in order if artifacts[name].applies(algorithm, spec)]:
        run = finished()
        for artifact in applicable:
            artifact.make(run)


@register("artifact", "world_model")
class WorldModelFiles:
    """models/REPLICA.safetensors."""

    after: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def applies(algorithm: Algorithm, spec: DataSpec) -> bool:
        return isinstance(algorithm, ModelTrainer) and algorithm.trains_model

    @staticmethod
    def make(run: FinishedRun) -> None:
        run.algorithm.save_models(run.dir, run.replicas, run.state, run.dataset.to("cpu"), run.quiet)


@register("artifact", "goal_map")
class GoalMap:
    """goal_map.png: the distances and subgoals of the first replica of a goal-conditioned run in a maze."""

    after: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def applies(algorithm: Algorithm, spec: DataSpec) -> bool:
        return hasattr(algorithm, "distances") and goal_map.is_maze(spec)

    @staticmethod
    def make(run: FinishedRun) -> None:
        if not run.replicas:
            return
        policy = policies_of(run.algorithm, run.state, run.replicas[:1])[0]
        try:
            picture = run.dir / goal_map.PICTURE
            goal_map.draw(
                picture, run.algorithm, select(run.state, 0), policy, run.dataset, str(run.replicas[0]), run.env
            )
        except (
            Exception
        ) as error:  # whatever the environment, the fonts or the disk do: the run is finished and stays so
            text = " ".join(str(error).split())
            warn(
                f"no {goal_map.PICTURE}: {text if isinstance(error, UserError) else f'{type(error).__name__}: {text}'}"
            )
