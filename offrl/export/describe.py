"""The description of an exported file: inputs and outputs, by name, unit and range, and the policy's origin."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offrl.data.dataset import DataSpec
from offrl.data.store import StreamSpec
from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.shield import ShieldedPolicy
from offrl.export.dimensions import dimension_names, plain, range_of, tasks_of, units_of
from offrl.export.draws import GOALS, MEANING, MEMORY, PREVIOUS, Draw, input_names, later_names
from offrl.export.graph import chunked, memory_of
from offrl.settings.replicas import Replica, by_cell
from offrl.statistics.intervals import mean_interval, student_t
from offrl.tasks.entries import VECTOR

if TYPE_CHECKING:
    from offrl.runs.run import SavedRun

KIND, VERSION = "offrl policy", 1


def description(
    policy: TrainedPolicy, stochastic: bool, draws: Sequence[Draw], details: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole of the JSON file but its "files". `details`: what `of_run` gives."""
    from offrl.runs.record import PACKAGES, installed

    algorithm, spec = policy.algorithm, policy.spec
    names = dimension_names(spec)
    observations: list[dict[str, Any]] = [
        {"index": i, **names["observations"].get(i, {})} for i in range(spec.observation_dim)
    ]
    if policy.mean is not None and policy.std is not None:
        for entry, mean, std in zip(observations, policy.mean, policy.std, strict=True):
            entry |= {"mean": plain(mean), "std": plain(std)}
    inputs: list[dict[str, Any]] = [
        {
            "name": VECTOR if spec.streams else "observations",
            "shape": ["batch", *spec.observation_shape],
            "dtype": "float32",
            "meaning": units_of(spec, policy.mean is not None),
            "dimensions": observations,
        }
    ]
    if spec.windowed:
        inputs[0] |= _window(observations, names["actions"], spec)
    if spec.streams:
        inputs = inputs * (spec.observation_shape != (0,)) + [_stream(stream, spec.frames) for stream in spec.streams]
    for name, draw in zip(input_names(draws), draws, strict=True):
        shape = ["batch" if n is None else n for n in draw.shape]
        begin: dict[str, Any] = {}
        if draw.kind == MEMORY:
            start = memory_of(policy)[int(draw.stream)]
            begin = {"begin": start[0].tolist() if start.any() else "zeros"}
            meaning = f"the episode's memory: `begin` where one begins, then next_{name} of the step before"
        elif draw.stream:
            meaning = (
                f"where to go: {draw.stream} as an observation has it, of one moment; the same until the goal changes"
            )
        elif draw.kind == GOALS:
            like = "one of achieved_goals in the data" if spec.goal_dim else "an observation"
            meaning = f"where to go, raw, like {like}; the same one until the goal changes"
        elif draw.kind == PREVIOUS:
            meaning = "the actions that were played before, as this file gave them; NaN where an episode begins"
        else:
            meaning = f"random numbers, {MEANING[draw.kind]}; new ones each call"
        dtype = str(draw.dtype).removeprefix("torch.")
        inputs.append({"name": name, "shape": shape, "dtype": dtype, "meaning": meaning, **begin})
    output: dict[str, Any] = {"name": "actions", "shape": ["batch"], "dtype": "int64", "choices": spec.num_actions}
    if spec.discrete:
        first = spec.first_choice
        output |= {"first": first} if first else {}
        if spec.action_columns:
            output["column"] = spec.action_columns[0].name
        if spec.action_labels:
            output["labels"] = list(spec.action_labels)
        output["meaning"] = (
            f"the action's number, {first} to {first + spec.num_actions - 1}" + ", as the environment's" * bool(first)
        )
    else:
        output = {
            "name": "actions",
            "shape": ["batch", spec.action_dim],
            "dtype": "float32",
            "meaning": range_of(spec),
            "dimensions": [
                {
                    "index": i,
                    **names["actions"].get(i, {}),
                    "low": plain(spec.action_low[i]),
                    "high": plain(spec.action_high[i]),
                }
                for i in range(spec.action_dim)
            ],
        }
    if chunked(policy):
        length, action_steps = policy.actor.length, policy.actor.action_steps  # type: ignore[attr-defined]
        output["shape"] = ["batch", length, spec.action_dim]
        output["action_steps"] = action_steps
        output["meaning"] = (
            f"a chunk of {length} actions in the environment's range, clipped to it, the first one first: play the "
            f"first {action_steps}, one at each step, then give the observation of that moment for the next chunk; "
            "begin with a new one where an episode begins"
        )
        if (decay := getattr(policy.actor, "ensemble", None)) is not None:
            output["ensemble"] = decay
            output["meaning"] += (
                "; the policy itself plays the mean of what all chunks so far say of a step, weighted by exp(-ensemble "
                "i), i = 0 the oldest"
            )
    memory = [
        {"name": name, "meaning": f"the memory after these actions: {name.removeprefix('next_')} of the next step"}
        for name in later_names(draws)
    ]
    digest = hashlib.sha256()
    for name, params in sorted(policy.state.params.items()):
        for key, value in sorted(params.items()):
            digest.update(f"{name}.{key}".encode())
            digest.update(value.numpy().tobytes())
    export_packages = {name: v for name in (*PACKAGES[:3], "onnx", "onnxruntime") if (v := installed(name)) is not None}
    task = spec.task
    return {
        "kind": KIND,
        "version": VERSION + bool(spec.streams or spec.windowed or memory),
        "policy": {
            "algorithm": details.get("algorithm", algorithm.config.name),
            "acts": "a sample of its distribution" if stochastic else "its greedy action",
            **({"shield": policy.shield.name} if isinstance(policy, ShieldedPolicy) else {}),
            "settings": dataclasses.asdict(algorithm.config),
            "seed": policy.seed,
            "updates": int(policy.state.step),
            "weights_sha256": digest.hexdigest(),
            **details.get("policy", {}),
        },
        "inputs": inputs,
        "outputs": [output, *memory],
        **({"tasks": tasks} if (tasks := tasks_of(spec)) else {}),
        "dataset": details.get("dataset", {"name": spec.name, "source": spec.source}),
        "environment": {
            "id": task.env_id if task is not None else None,
            "note": task.note if task is not None else "",
            **({"steps_limit": task.max_episode_steps} if task is not None and task.max_episode_steps else {}),
            **names["environment"],
        },
        "scores": details.get("scores", []),
        "packages": {"training": details.get("packages", {}), "export": export_packages},
    }


def _stream(stream: StreamSpec, frames: int) -> dict[str, Any]:
    """The entry of an image, or of a row of a table, among the inputs."""
    if not stream.image:
        return {"name": stream.name, "shape": ["batch", *stream.shape], "dtype": "float32", "meaning": "as in the data"}
    height, width, channels = stream.shape
    entry: dict[str, Any] = {
        "name": stream.name,
        "shape": ["batch", height, width, channels * frames],
        "dtype": "uint8",
        "layout": "HWC",
        "meaning": "an image like those of the data, 0 to 255",
    }
    if frames > 1:
        entry |= {"frames": frames, "order": "oldest first, along the channels", "at_start": "repeat the first"}
        entry["meaning"] = f"the last {frames} images like those of the data, 0 to 255"
    if stream.recorded:
        entry["resize"] = {"from": list(stream.recorded), "to": [height, width], "method": "area"}
    return entry


def _window(
    observations: Sequence[Mapping[str, Any]], actions: Mapping[int, Mapping[str, Any]], spec: DataSpec
) -> dict[str, Any]:
    """What an input says of its window: observations and actions of the steps before, one after another."""
    lags = [spec.history_stride * i for i in range(spec.history - 1, -1, -1)]
    dimensions = [{**entry, "steps_back": lag} for lag in lags for entry in observations]
    dimensions += [
        {**actions.get(i, {}), ("choice" if spec.discrete else "action"): i, "steps_back": lag}
        for lag in range(spec.history_actions, 0, -1)
        for i in range(spec.encoded_action_dim)
    ]
    window: dict[str, Any] = {
        "observations": spec.history,
        "stride": spec.history_stride,
        "actions": spec.history_actions,
        "order": "observations, oldest first, then actions, oldest first",
        "at_start": "repeat the first observation",
    }
    if spec.history_actions and spec.discrete:
        window["at_start"] += "; actions are 1 for the choice, else 0, and all 0 before the first"
    elif spec.history_actions:
        low, high = spec.action_bounds
        window["at_start"] += "; actions before the first are the middle of their range"
        window["action_at_start"] = [plain(x) for x in (low + high) / 2]
    return {
        "shape": ["batch", spec.window_dim],
        "window": window,
        "dimensions": [{**entry, "index": i} for i, entry in enumerate(dimensions)],
    }


def of_run(run: SavedRun, replica: Replica, acting: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The origin of one of a run's policies: its algorithm, data, settings, and scores where it acts as in training,
    without `acting`.
    """
    record = run.record
    data = record["data"]
    origin: dict[str, Any] = {"cell": dict(replica.values)} if replica.values else {}
    origin |= {"acting": dict(acting)} if acting else {}
    return {
        "algorithm": run.algorithm,
        "policy": {"run": run.dir.name, **origin},
        "dataset": {
            k: data.get(k)
            for k in ("name", "source", "version", "fingerprint", "transitions", "episodes", "return_mean")
        },
        "scores": [] if acting else _scores(run, replica),
        "packages": {
            **{k: v for k, v in record.get("packages", {}).items() if v is not None},
            "python": record.get("python"),
        },
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
        seeds: dict[str, Any] = {
            "what": "all seeds, of which this policy is one",
            "seeds": [run.replicas[k].seed for k in where],
        }
        for key in ("return_mean", "score"):
            values = [rows[k][key] for k in where]
            if None not in values:
                mean, low, high = mean_interval(values)
                seeds |= {key: mean, f"{key.removesuffix('_mean')}_95_percent": [low, high]}
        result.append(seeds)
    return result


def text(description: Mapping[str, Any]) -> str:
    """The JSON text: small lists and objects on one line each."""

    def join(match: re.Match[str]) -> str:
        line = re.sub(r"\n\s*", " ", match[0])
        line = re.sub(r"^([\[{]) | ([\]}])$", r"\1\2", line)
        return line if len(line) <= 120 else match[0]

    lines = json.dumps(description, indent=1, allow_nan=False)
    for brackets in (r"\[[^][{}]*\]", r"\{[^{}]*\}"):
        lines = re.sub(brackets, join, lines)
    return lines + "\n"
