"""What a student is worth: measured beside its teacher, and written to RUN/student.json."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offrl.distilling import FILE
from offrl.errors import UserError, warn
from offrl.evaluation.evaluator import Evaluator
from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.result import Evaluation
from offrl.export import c_code
from offrl.export.dimensions import dimension_names
from offrl.export.write import Exported, export_run
from offrl.nn.students import Polynomial, agreement
from offrl.runs.run import SavedRun
from offrl.runs.tables import interval_text
from offrl.settings.evaluation import EvalConfig
from offrl.system import files

ROWS, REPEATS = 1_000, 5  # of the timing
SHOWN_TERMS = 12  # of a formula
SHOWN = 5  # states where student and teacher differ most
FAITHFUL, GOOD = 0.99, 0.9  # an R^2 above the first with less than this share of the teacher's score is drift


class ObservingPolicy:
    """A policy that keeps what it observes. Episodes that are over observe zeros, which are left out."""

    def __init__(self, policy: TrainedPolicy) -> None:
        self.policy = policy
        self._rows: list[np.ndarray] = []

    def start(self, episodes: int) -> Any:
        return self.policy.start(episodes)

    def step(self, carry: Any, observations: np.ndarray, t: int) -> tuple[np.ndarray, Any]:
        flat = observations.reshape(len(observations), -1)
        self._rows.append(flat[flat.any(1)].copy())
        return self.policy.step(carry, observations, t)

    @property
    def rows(self) -> np.ndarray:
        """[N, O]"""
        return np.concatenate(self._rows)


def measure(student: SavedRun, teacher: SavedRun, config: EvalConfig) -> dict[str, Any]:
    """Export the students as C and ONNX, play both runs' policies from the same starts, and write what came of it."""
    replicas = student.replicas
    policies = [student.load_policy(r) for r in replicas]
    teachers = [teacher.load_policy(next(t for t in teacher.replicas if t.seed == r.seed)) for r in replicas]
    entries = [
        {"seed": p.seed, "held_out": {k: float(v) for k, v in p.state.extra.items()}, **_size(p)} for p in policies
    ]
    for entry, policy in zip(entries, policies, strict=True):
        entry |= _exports(student, policy)
        if formulas := _formulas(policy):
            entry["formula"] = formulas
    result: dict[str, Any] = {"teacher": str(teacher.dir), "students": entries}
    if (task := student.task()) is not None:
        with Evaluator(task, config) as evaluator:
            observing = [ObservingPolicy(p) for p in policies]
            scores = {"student": evaluator(observing, [p.seed for p in policies])}
            scores["teacher"] = evaluator(teachers, [p.seed for p in policies])
        result["scores"] = {name: _score(evaluation) for name, evaluation in scores.items()}
        for entry, policy, other, played in zip(entries, policies, teachers, observing, strict=True):
            entry |= _visited(policy, other, played.rows)
    files.write_text(student.dir / FILE, json.dumps(result, indent=1) + "\n")
    return result


def _size(policy: TrainedPolicy) -> dict[str, Any]:
    count, noun, numbers = _network(policy).size
    return {noun: count, "bytes": 4 * numbers}


def _network(policy: TrainedPolicy) -> Any:
    return policy.actor.state.params["actor"].module.net  # type: ignore[attr-defined]


def _formulas(policy: TrainedPolicy) -> list[str]:
    """The lines of a formula, in the environment's units; [] for another student."""
    net, spec = _network(policy), policy.spec
    if not isinstance(net, Polynomial):
        return []
    names = dimension_names(spec)["observations"]
    labels = [str(names.get(i, {}).get("name", f"obs[{i}]")).replace(" ", "_") for i in range(spec.observation_dim)]
    if policy.mean is not None:
        labels = [f"z({label})" for label in labels]
    if spec.discrete:
        plain = np.ones(spec.num_actions)
        return [f"score[{k}] = {line}" for k, line in enumerate(net.formulas(labels, plain, 0.0 * plain))]
    low, high = policy.low.astype(float), policy.high.astype(float)
    lines = net.formulas(labels, (high - low) / 2.0, (high + low) / 2.0)
    return [f"act[{d}] = clip({line}, {low[d]:g}, {high[d]:g})" for d, line in enumerate(lines)]


def _exports(student: SavedRun, policy: TrainedPolicy) -> dict[str, Any]:
    """The errors and times of the C and ONNX files, and the Python policy's time."""
    rows = np.zeros((ROWS, policy.spec.observation_dim), np.float32)
    done = export_run(student, "c", policy.seed)
    code = c_code.compiled(policy, c_code.source(policy))
    result = {"c": _file(done, _microseconds(lambda: code(rows, ()), ROWS))}
    try:
        done = export_run(student, "onnx", policy.seed)
    except UserError as error:
        warn(f"no ONNX file: {error}")
    else:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(done.path), providers=["CPUExecutionProvider"])
        result["onnx"] = _file(
            done, _microseconds(lambda: [session.run(None, {"observations": rows[:1]}) for _ in rows], ROWS)
        )
    act = _microseconds(lambda: [policy.step(None, rows[:1], 0) for _ in range(100)], 100)
    return {**result, "python": {"microseconds": act}}


def _file(done: Exported, microseconds: float) -> dict[str, Any]:
    return {"file": done.path.name, "largest_difference": done.check.largest, "microseconds": microseconds}


def _microseconds(call: Callable[[], Any], actions: int) -> float:
    """The time of an action: of the fastest of some calls, which others on the machine slowed least."""
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e6 * min(times) / actions


def _score(evaluation: Evaluation) -> dict[str, Any]:
    mean, low, high = evaluation.interval()
    score = {"mean": mean, "low": low, "high": high, "per_seed": evaluation.per_seed().tolist()}
    return score if evaluation.costs is None else {**score, "cost": float(evaluation.costs.mean())}


def _visited(policy: TrainedPolicy, teacher: TrainedPolicy, rows: np.ndarray) -> dict[str, Any]:
    """Fidelity on the states that the student came to, and those where the two differ most."""
    spec = policy.spec
    actions = [p.step(None, rows, 0)[0] for p in (teacher, policy)]
    if spec.discrete:
        labels, acted = (spec.encode(torch.from_numpy(a)) for a in actions)
    else:
        half = np.where(policy.high > policy.low, (policy.high - policy.low) / 2.0, 1.0)
        labels, acted = (torch.from_numpy((a - policy.low) / half - 1.0) for a in actions)
    r2, difference = agreement(labels, acted, spec.discrete)
    worst = (acted - labels).square().sum(-1).argsort(descending=True, stable=True)[:SHOWN].tolist()
    return {
        "visited": {"r2": float(r2), "difference": float(difference)},
        "largest_differences": [
            {"observation": rows[i].tolist(), "teacher": actions[0][i].tolist(), "student": actions[1][i].tolist()}
            for i in worst
        ],
    }


def lines(result: dict[str, Any], folder: Path) -> list[str]:
    """The result in words."""
    students = result["students"]

    def span(values: Sequence[float], form: str) -> str:
        low, high = (format(x, form) for x in (min(values), max(values)))
        return low if low == high else f"{low} to {high}"

    def fidelity(name: str) -> str:
        r2, difference = ([s[name][k] for s in students] for k in ("r2", "difference"))
        return f"R2 {span(r2, '.3f')}, difference {span([100 * d for d in difference], '.2f')}% of the range"

    noun = next(n for n in ("leaves", "terms", "weights") if n in students[0])
    report = [f"on held-out states: {fidelity('held_out')}"]
    if scores := result.get("scores"):
        report.append(f"where the student goes: {fidelity('visited')}")
        parts = []
        for who, score in scores.items():
            cost = f", cost {score['cost']:.1f}" if "cost" in score else ""
            parts.append(f"{who} {interval_text((score['mean'], score['low'], score['high']))}{cost}")
        report.append(f"score from the same starts: {', '.join(parts)}")
    counts, sizes = ([s[key] for s in students] for key in (noun, "bytes"))
    report.append(f"size: {span(counts, ',d')} {noun}, {span(sizes, ',d')} bytes of numbers")
    for name in ("c", "onnx", "python"):
        if name in students[0]:
            entries = [s[name] for s in students]
            error = (
                "" if name == "python" else f", differs by at most {max(e['largest_difference'] for e in entries):.1e}"
            )
            report.append(f"{name}: {span([e['microseconds'] for e in entries], '.2f')} microseconds an action{error}")
    formulas = students[0].get("formula", ())
    report += [
        f"of seed {students[0]['seed']}: {line}"
        for line in formulas
        if line.count(" + ") + line.count(" - ") < SHOWN_TERMS
    ]
    if formulas:
        report.append(f"all formulas: {folder / FILE}; a larger threshold= keeps fewer terms")
    if scores and drifted(result):
        report.append(
            "the student agrees with its teacher on the data and earns less: it comes to states that the data lack. "
            f"Record them (offrl collect env=ID policy={folder}) and distil again with dataset=[DATA,RECORDED]"
        )
    return report


def drifted(result: dict[str, Any]) -> bool:
    """Whether students agree with their teachers on held-out data and still earn clearly less."""
    student, teacher = (result["scores"][who]["mean"] for who in ("student", "teacher"))
    faithful = min(s["held_out"]["r2"] for s in result["students"]) > FAITHFUL
    return faithful and teacher - student > (1.0 - GOOD) * abs(teacher)
