"""The description of an exported file: inputs and outputs, by name, unit and range, and the policy's origin."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from offrl.evaluation.policy import TrainedPolicy
from offrl.export.graph import GOALS, MEANING, Draw, chunked, input_names
from offrl.settings.replicas import Replica, by_cell
from offrl.statistics.intervals import mean_interval, student_t
from offrl.tasks.entries import OWN_ORDER, entries, joined

if TYPE_CHECKING:
    from offrl.data.dataset import ColumnSpec, DataSpec
    from offrl.runs.run import SavedRun

KIND, VERSION = "offrl policy", 1
FREE, BALL, SLIDE, HINGE = range(4)  # MuJoCo's kinds of joints
STEPS = 5  # of an environment, to see which numbers its observation holds


def description(policy: TrainedPolicy, stochastic: bool, draws: Sequence[Draw], about: Mapping[str, Any]) -> dict[str, Any]:
    """The whole of the JSON file but its "files". `about`: what `of_run` gives."""
    algorithm, spec = policy.algorithm, policy.algorithm.spec
    names = _names(spec)
    for key, columns in (("observations", spec.observation_columns), ("actions", spec.action_columns)):
        if columns:  # of a table, whose policy the environment's names may not even fit
            names[key] = {i: {**names[key].get(i, {}), **_column(column)} for i, column in enumerate(columns)}
    observations: list[dict[str, Any]] = [{"index": i, **names["observations"].get(i, {})} for i in range(spec.observation_dim)]
    if policy.mean is not None and policy.std is not None:
        for entry, mean, std in zip(observations, policy.mean, policy.std, strict=True):
            entry |= {"mean": _plain(mean), "std": _plain(std)}
    inputs: list[dict[str, Any]] = [
        {
            "name": "observations",
            "shape": ["batch", *spec.observation_shape],
            "dtype": "float32",
            "meaning": _observed(spec, policy.mean is not None),
            "dimensions": observations,
        }
    ]
    for name, draw in zip(input_names(draws), draws, strict=True):
        shape = ["batch" if n is None else n for n in draw.shape]
        if draw.kind == GOALS:
            like = "one of achieved_goals in the data" if spec.goal_dim else "an observation"
            meaning = f"where to go, raw, like {like}; the same one until the goal changes"
        else:
            meaning = f"random numbers, {MEANING[draw.kind]}; new ones each call"
        inputs.append({"name": name, "shape": shape, "dtype": "float32", "meaning": meaning})
    output: dict[str, Any] = {"name": "actions", "shape": ["batch"], "dtype": "int64", "choices": spec.num_actions}
    if spec.discrete:
        first = spec.first_choice
        output["first"] = first
        if spec.action_columns:
            output["column"] = spec.action_columns[0].name
        if spec.action_labels:
            output["labels"] = list(spec.action_labels)
        output["meaning"] = f"the action's number, {first} to {first + spec.num_actions - 1}" + ", as the environment's" * bool(first)
    else:
        output = {
            "name": "actions",
            "shape": ["batch", spec.action_dim],
            "dtype": "float32",
            "meaning": "in the environment's range, clipped to it",
            "dimensions": [
                {"index": i, **names["actions"].get(i, {}), "low": _plain(spec.action_low[i]), "high": _plain(spec.action_high[i])}
                for i in range(spec.action_dim)
            ],
        }
    if chunked(policy):
        length, execute = policy.actor.length, policy.actor.execute  # type: ignore[attr-defined]
        output["shape"] = ["batch", length, spec.action_dim]
        output["execute"] = execute
        output["meaning"] = (
            f"a chunk of {length} actions in the environment's range, clipped to it, the first one first: play the first {execute}, one at "
            "each step, then give the observation of that moment for the next chunk; begin with a new one where an episode begins"
        )
        if (decay := getattr(policy.actor, "ensemble", None)) is not None:
            output["ensemble"] = decay
            output["meaning"] += (
                "; the policy itself plays the mean of what all chunks so far say of a step, weighted by exp(-ensemble i), i = 0 the oldest"
            )
    digest = hashlib.sha256()
    for name, params in sorted(policy.state.params.items()):
        for key, value in sorted(params.items()):
            digest.update(f"{name}.{key}".encode())
            digest.update(value.numpy().tobytes())
    task = spec.task
    return {
        "kind": KIND,
        "version": VERSION,
        "policy": {
            "algorithm": about.get("algorithm", algorithm.config.name),
            "acts": "a sample of its distribution" if stochastic else "its greedy action",
            "settings": dataclasses.asdict(algorithm.config),
            "seed": policy.seed,
            "updates": int(policy.state.step),
            "weights_sha256": digest.hexdigest(),
            **about.get("policy", {}),
        },
        "inputs": inputs,
        "outputs": [output],
        "dataset": about.get("dataset", {"name": spec.name, "source": spec.source}),
        "environment": {
            "id": task.env_id if task is not None else None,
            "note": task.note if task is not None else "",
            **({"steps_limit": task.max_episode_steps} if task is not None and task.max_episode_steps else {}),
            **names["environment"],
        },
        "scores": about.get("scores", []),
        "packages": {"training": about.get("packages", {}), "export": _packages()},
    }


def _packages() -> dict[str, str | None]:
    from offrl.runs.record import PACKAGES, installed

    return {name: v for name in (*PACKAGES[:3], "onnx", "onnxruntime") if (v := installed(name)) is not None}


def _plain(value: Any) -> float | None:
    """A number that JSON can say, with as few digits as give the same float32."""
    number = np.float32(value)
    return float(str(number)) if np.isfinite(number) else None


def of_run(run: SavedRun, replica: Replica) -> dict[str, Any]:
    """The origin of one of a run's policies: its algorithm, data, settings and scores."""
    record = run.record
    data = record["data"]
    return {
        "algorithm": run.algorithm,
        "policy": {"run": run.dir.name, **({"cell": dict(replica.values)} if replica.values else {})},
        "dataset": {k: data.get(k) for k in ("name", "source", "version", "fingerprint", "transitions", "episodes", "return_mean")},
        "scores": _scores(run, replica),
        "packages": {**{k: v for k, v in record.get("packages", {}).items() if v is not None}, "python": record.get("python")},
    }


def _scores(run: SavedRun, replica: Replica) -> list[dict[str, Any]]:
    """The last evaluation of this policy, and of all seeds of its cell."""
    rows = run.final_scores
    if not rows or len(rows) != len(run.replicas):
        return []
    i = run.replicas.index(replica)
    row, where = rows[i], by_cell(run.replicas)[replica.values]
    count = row["episodes"]
    spread = None
    if count > 1:  # scores.csv gives the spread of the episodes themselves (divided by their number)
        half = student_t(0.95, count - 1) * row["return_std"] / math.sqrt(count - 1)
        spread = [row["return_mean"] - half, row["return_mean"] + half]
    result = [
        {
            "what": "this policy",
            "environment": run.scored_in,
            "step": row["step"],
            "episodes": count,
            "return_mean": row["return_mean"],
            "return_95_percent": spread,
            "score": row["score"],
            "success": row["success"],
        }
    ]
    if len(where) > 1:
        seeds: dict[str, Any] = {"what": "all seeds, of which this policy is one", "seeds": [run.replicas[k].seed for k in where]}
        for key in ("return_mean", "score"):
            values = [rows[k][key] for k in where]
            if None not in values:
                mean, low, high = mean_interval(values)
                seeds |= {key: mean, f"{key.removesuffix('_mean')}_95_percent": [low, high]}
        result.append(seeds)
    return result


def text(about: Mapping[str, Any]) -> str:
    """The JSON text: small lists and objects on one line each."""

    def join(match: re.Match[str]) -> str:
        line = re.sub(r"\n\s*", " ", match[0])
        line = re.sub(r"^([\[{]) | ([\]}])$", r"\1\2", line)
        return line if len(line) <= 120 else match[0]

    lines = json.dumps(about, indent=1, allow_nan=False)
    for brackets in (r"\[[^][{}]*\]", r"\{[^{}]*\}"):
        lines = re.sub(brackets, join, lines)
    return lines + "\n"


# ---------------------------------------------------------------------------------------------------------------- names


def _observed(spec: DataSpec, normalised: bool) -> str:
    """In which units observations go in."""
    raw = "raw, as the environment gives them"
    if spec.observation_columns:
        raw = "the columns of the data, times their scale plus their offset where they have some"
    return f"{raw}: the file normalises by itself" if normalised else f"{raw}; the policy was trained without normalisation"


def _column(column: ColumnSpec) -> dict[str, Any]:
    """The entry of a dimension that was a column of a table."""
    scaled = {"scale": column.scale, "offset": column.offset} if (column.scale, column.offset) != (1.0, 0.0) else {}
    return {"name": column.name, **({"unit": column.unit} if column.unit else {}), **scaled}


def _names(spec: DataSpec) -> dict[str, dict[Any, Any]]:
    """The meaning of each dimension of observations and actions, as far as the environment gives it; empty where it cannot be made."""
    names: dict[str, dict[Any, Any]] = {"observations": {}, "actions": {}, "environment": {}}
    task = spec.task
    keys = () if task is None or task.observation_keys == OWN_ORDER else task.observation_keys
    if len(keys) == spec.observation_dim:  # entries of a Dict, of one number each
        names["observations"] = {i: {"name": key} for i, key in enumerate(keys)}
    if task is None or task.env_id is None:
        return names
    from offrl.data.fit import check_fit
    from offrl.tasks.environments import flattener, make_env, quiet, time_limit

    with contextlib.suppress(Exception), quiet():  # names are a courtesy: without the environment's package there are none
        env = make_env(task)
        try:
            check_fit(spec, task, env)
            flatten, _, _ = flattener(env, task.observation_keys)
            names["environment"] = {"steps_limit": time_limit(env)}
            base: Any = env.unwrapped
            fps = env.metadata.get("render_fps")
            if fps:
                names["environment"]["actions_per_second"] = fps
            if type(getattr(base, "model", None)).__name__ == "MjModel":
                names["actions"] = _actuators(base.model)
                names["observations"] = _positions(env, base, flatten)
            _spaces(env, task.observation_keys, names["observations"])
        finally:
            env.close()
    return names


def _actuators(model: Any) -> dict[int, dict[str, Any]]:
    """Names of the actuators; of plain motors, what an action of 1 is."""
    result: dict[int, dict[str, Any]] = {}
    for i in range(model.nu):
        actuator = model.actuator(i)
        target, joint = int(actuator.trnid[0]), int(actuator.trntype[0]) == 0
        on = model.joint(target).name if joint else ""
        result[i] = {"name": actuator.name or on or f"actuator {i}"}
        # no dynamics, a fixed gain and no bias: force = gear * gain * action
        plain = joint and not (int(actuator.dyntype[0]) or int(actuator.gaintype[0]) or int(actuator.biastype[0]))
        kind = int(model.jnt_type[target]) if joint else -1
        if plain and kind in (SLIDE, HINGE):
            strength = float(actuator.gear[0] * actuator.gainprm[0])
            what = "force" if kind == SLIDE else "torque"
            result[i] |= {"meaning": f"{what} on {on or f'joint {target}'}", "unit": f"{strength:g} N{'' if kind == SLIDE else ' m'}"}
    return result


def _positions(env: Any, base: Any, flatten: Any) -> dict[int, dict[str, Any]]:
    """Names of the leading numbers of an observation where they are, seen to be, the model's positions (less the first few, which many
    environments leave out) and velocities (which some of them clip)."""
    model, data = base.model, base.data
    names = [*_coordinates(model, velocities=False), *_coordinates(model, velocities=True)]
    row = flatten(env.reset(seed=0)[0])
    env.action_space.seed(0)
    for skip in range(min(3, model.nq)):
        size = model.nq - skip + model.nv
        fits = len(row) >= size
        for _ in range(STEPS):
            if not fits:
                break
            row = flatten(env.step(env.action_space.sample())[0])
            state = np.concatenate([data.qpos[skip:], data.qvel])
            limited = np.concatenate([data.qpos[skip:], np.clip(data.qvel, -10.0, 10.0)])
            fits = any(np.allclose(row[:size], x, atol=1e-6) for x in (state, limited))
        if fits:
            return dict(enumerate(names[skip:]))
    return {}


def _coordinates(model: Any, velocities: bool) -> list[dict[str, Any]]:
    """One entry for each of the model's positions, or velocities, in their order."""
    result = []
    for i in range(model.njnt):
        joint = model.joint(i)
        name, kind = joint.name or f"joint {i}", int(joint.type[0])
        what, per = ("velocity", "/s") if velocities else ("position", "")
        if kind in (SLIDE, HINGE):
            result.append({"name": f"{name} {what}", "unit": ("m" if kind == SLIDE else "rad") + per})
            continue
        if kind == FREE:
            result += [{"name": f"{name} {what} {axis}", "unit": f"m{per}"} for axis in "xyz"]
        if velocities:
            result += [{"name": f"{name} angular velocity {axis}", "unit": "rad/s"} for axis in "xyz"]
        else:
            result += [{"name": f"{name} orientation {part}, of a unit quaternion", "unit": "1"} for part in "wxyz"]
    return result


def _spaces(env: Any, keys: Sequence[str], dimensions: dict[int, dict[str, Any]]) -> None:
    """Add ranges, and the names of the entries of a Dict observation, to `dimensions`."""
    from gymnasium import spaces

    space = env.observation_space
    if isinstance(space, spaces.Dict):
        parts = entries(space, joined(space, keys))
        labels = [f"{'/'.join(path)}[{i}]" for path, part in parts for i in range(spaces.flatdim(part))]
        for i, label in enumerate(labels):
            dimensions.setdefault(i, {}).setdefault("name", label)
    if isinstance(space, spaces.Box):
        for i, (low, high) in enumerate(zip(space.low.ravel(), space.high.ravel(), strict=True)):
            for key, bound in (("low", low), ("high", high)):
                if np.isfinite(bound) and abs(bound) < np.finfo(np.float32).max:
                    dimensions.setdefault(i, {})[key] = _plain(bound)
