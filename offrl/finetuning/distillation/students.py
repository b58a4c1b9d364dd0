"""The start of students that learn in an environment from the policies of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from offrl.algorithms.bc import BC
from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.finetuning.config import BALANCE, STARTS, FinetuneConfig, StudentConfig, choose
from offrl.finetuning.distillation.teacher import Teacher, paths, teach
from offrl.finetuning.on_policy.parents import policies_of
from offrl.finetuning.start import Start, task_of
from offrl.runs.run import SavedRun
from offrl.settings.compose import compose
from offrl.settings.replicas import Replica
from offrl.tasks.task import Task
from offrl.training.engine import first_state
from offrl.training.setup import with_encoder

OTHERS = ("mixing", "replay", *BALANCE, "normalize", "success", "starts", *STARTS)  # settings of data, and of rewards


def begin(
    run: str | Path | None,
    config: FinetuneConfig,
    settings: Mapping[str, Any],
    other: Mapping[str, Any],
    env: Callable[[], Any] | None,
) -> Start:
    """From the settings of a command to what will run. settings: all that were given; other: those that are not of
    `config`.

    Raises UserError for what is wrong with them, and for policies that cannot teach.
    """
    if run is None:
        raise UserError("mode=distill learns from the policies of a run: offrl finetune RUN mode=distill env=ID")
    path = Path(run)
    if other.get("algo") not in (None, "bc"):
        raise UserError(f"algo={other['algo']}: students of mode=distill are policies of bc; leave it out")
    for name in settings:
        if name in OTHERS or (name in other and name.partition(".")[0] not in ("algo", "encoder")):
            raise UserError(
                f"{name}= has no place with mode=distill, which trains a student of each policy of the run, without "
                "data or rewards; leave it out"
            )
    parent = compose({**{k: v for k, v in other.items() if v is not None}, "algo": "bc", "experiment": "none"})
    config = choose(config, {"mixing": 0.0}, fresh=False)
    saved = SavedRun(path)
    if saved.grid:
        raise UserError(
            f"{path} has a grid over {', '.join(saved.grid)}: students are trained for each seed of a run without one"
        )
    policies, came = policies_of(saved)
    task = task_of(
        saved.spec, config, str(saved.record.get("env", "auto")), env, f"offrl finetune {path} mode=distill env=ID"
    )
    teacher, task = teach(policies, task, config.student.observation_keys, str(path))
    spec = with_encoder(parent, student_spec(teacher, task, config.student), BC.traits)
    algorithm = BC(parent.algo, spec)
    replicas = [Replica(replica.seed) for replica in saved.replicas]
    return Start(
        config,
        algorithm,
        replicas,
        {},
        spec,
        task,
        algorithm.config.name,
        None,
        saved.record["data"],
        None,
        first_state(algorithm, replicas),
        came,
        notes=_notes(saved),
        teacher=teacher,
    )


def student_spec(teacher: Teacher, task: Task, student: StudentConfig) -> DataSpec:
    """The specification of what students see and do in `task`: their teachers' statistics, of the numbers that those
    see too.
    """
    policy = teacher.policies[0].spec
    spec = replace(
        policy,
        observation_shape=(len(teacher.shown),),
        observation_columns=(),
        observation_mean=None,
        observation_std=None,
        reward_scale=1.0,
        reward_shift=0.0,
        task=replace(task, env_factory=None),
        history=student.history,
        history_stride=student.history_stride,
        history_actions=student.history_actions,
    )
    if policy.observation_mean is None or policy.observation_std is None:
        return spec
    mean = dict(zip(teacher.known.tolist(), policy.observation_mean, strict=True))
    std = dict(zip(teacher.known.tolist(), policy.observation_std, strict=True))
    shown = teacher.shown.tolist()
    return replace(
        spec,
        observation_mean=tuple(mean.get(i, 0.0) for i in shown),
        observation_std=tuple(std.get(i, 1.0) for i in shown),
    )


def back(start: Start, run_dir: Path) -> Teacher:
    """What taught the replicas of a run that goes on. Raises UserError where its files are damaged, or gone."""
    policies = [TrainedPolicy.load(path, "cpu") for path in paths(run_dir, [r.seed for r in start.replicas])]
    known = policies[0].spec.task or Task("")  # as the teachers see it
    task = replace(start.task, observation_keys=known.observation_keys, observation_numbers=known.observation_numbers)
    return teach(policies, task, start.config.student.observation_keys, str(run_dir))[0]


def _notes(saved: SavedRun) -> list[str]:
    """What the teachers returned when they were scored last."""
    rows = saved.final_scores
    if not rows:
        return []
    returns = ", ".join(f"{row['return_mean']:.1f}" for row in rows)
    return [f"the teachers' own returns when they were scored last: {returns} ({rows[0]['env_id']})"]
