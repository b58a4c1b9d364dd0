"""Names, units and ranges of the dimensions of observations and actions, by the data's columns and by the
environment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from offrl.tasks.entries import OWN_ORDER, entries, joined

if TYPE_CHECKING:
    from offrl.data.dataset import ColumnSpec, DataSpec

FREE, BALL, SLIDE, HINGE = range(4)  # MuJoCo's kinds of joints
STEPS = 5  # of an environment, to see which numbers its observation holds


def plain(value: Any) -> float | None:
    """A number that JSON can say, with as few digits as give the same float32."""
    number = np.float32(value)
    return float(str(number)) if np.isfinite(number) else None


def units_of(spec: DataSpec, normalised: bool) -> str:
    """In which units observations go in."""
    raw = "raw, as the environment gives them"
    if spec.observation_columns:
        raw = "the columns of the data, times their scale plus their offset where they have some"
    if tasks_of(spec):
        width = spec.observation_dim - 1
        raw = f"raw, a task's own numbers as its environment gives them, zeros up to {width}, and last its number"
    return (
        f"{raw}: the file normalises by itself"
        if normalised
        else f"{raw}; the policy was trained without normalisation"
    )


def range_of(spec: DataSpec) -> str:
    """In which range actions come out."""
    if not tasks_of(spec):
        return "in the environment's range, clipped to it"
    return (
        "in [-1, 1], a task's own first, behind which none counts: its environment takes low + (action + 1) / 2 * "
        "(high - low), of `tasks`"
    )


def tasks_of(spec: DataSpec) -> list[dict[str, Any]]:
    """The tasks of multi-task data by their numbers; [] for one task."""
    return [
        {
            "number": number,
            "name": part.task.name,
            "environment": part.task.env_id,
            "observations": part.observation_dim,
            "low": [plain(x) for x in part.action_low],
            "high": [plain(x) for x in part.action_high],
        }
        for number, part in enumerate(spec.task.parts if spec.task is not None else ())
    ]


def _entry(column: ColumnSpec) -> dict[str, Any]:
    """The entry of a dimension that was a column of a table."""
    scaled = {"scale": column.scale, "offset": column.offset} if (column.scale, column.offset) != (1.0, 0.0) else {}
    return {"name": column.name, **({"unit": column.unit} if column.unit else {}), **scaled}


def _of_environment(spec: DataSpec) -> dict[str, dict[Any, Any]]:
    """The meaning of each dimension of observations and actions, as far as the environment gives it; empty where it
    cannot be made.
    """
    names: dict[str, dict[Any, Any]] = {"observations": {}, "actions": {}, "environment": {}}
    task = spec.task
    keys = () if task is None or task.observation_keys == OWN_ORDER else task.observation_keys
    if len(keys) == spec.observation_dim:  # entries of a Dict, of one number each
        names["observations"] = {i: {"name": key} for i, key in enumerate(keys)}
    numbers = () if task is None else task.observation_numbers
    if task is None or task.env_id is None:
        return names | {"observations": _chosen(names["observations"], numbers)}
    from offrl.data.fit import check_fit
    from offrl.tasks.environments import flattener, make_env, quiet, time_limit

    # names are a courtesy: without the environment's package there are none
    with contextlib.suppress(Exception), quiet():
        check_fit(spec, task)
        env = make_env(replace(task, observation_numbers=()))
        try:
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
    return names | {"observations": _chosen(names["observations"], numbers)}


def _chosen(dimensions: dict[Any, Any], numbers: Sequence[int]) -> dict[Any, Any]:
    """The dimensions at the positions that a policy sees, where those are not all."""
    if not numbers:
        return dimensions
    return {i: {"name": f"observation {k}", **dimensions.get(k, {})} for i, k in enumerate(numbers)}


def dimension_names(spec: DataSpec) -> dict[str, dict[Any, Any]]:
    """The meaning of each dimension of observations and actions, as far as the data's columns and the environment give
    it.
    """
    names = _of_environment(spec)
    for key, columns in (("observations", spec.observation_columns), ("actions", spec.action_columns)):
        if columns:
            names[key] = {i: {**names[key].get(i, {}), **_entry(column)} for i, column in enumerate(columns)}
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
            quantity = "force" if kind == SLIDE else "torque"
            result[i] |= {
                "meaning": f"{quantity} on {on or f'joint {target}'}",
                "unit": f"{strength:g} N{'' if kind == SLIDE else ' m'}",
            }
    return result


def _positions(env: Any, base: Any, flatten: Any) -> dict[int, dict[str, Any]]:
    """Names of the leading numbers of an observation where they are, seen to be, the model's positions (less the first
    few, which many environments leave out) and velocities (which some of them clip)."""
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
        quantity, per = ("velocity", "/s") if velocities else ("position", "")
        if kind in (SLIDE, HINGE):
            result.append({"name": f"{name} {quantity}", "unit": ("m" if kind == SLIDE else "rad") + per})
            continue
        if kind == FREE:
            result += [{"name": f"{name} {quantity} {axis}", "unit": f"m{per}"} for axis in "xyz"]
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
                    dimensions.setdefault(i, {})[key] = plain(bound)
