"""The spaces of a dataset compared with those of the environment that a policy trained on it is to act in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from offrl.data.dataset import Dataset, DataSpec
from offrl.data.raw.infer import UNBOUNDED, listed, two_numberings, unscale
from offrl.data.raw.labels import listed_labels, other_columns
from offrl.errors import UserError, warn
from offrl.tasks.entries import OWN_ORDER, VECTOR, joined
from offrl.tasks.environments import action_kind, flattener, make_env
from offrl.tasks.task import Task, warn_of_references

if TYPE_CHECKING:
    import gymnasium as gym

CURE = "Give the environment the data come from (env=ID)."
TRAINING_CURE = "Give the environment the data come from (eval.env=ID), or train without one (eval.env=none)."


def check_fit(spec: DataSpec, task: Task, env: gym.Env | None = None, cure: str = CURE) -> None:
    """Raises UserError when the data's observations or actions disagree with the environment's. Warns when its action
    range is narrower, and where the data's reference scores are not those of that environment, so that scores are
    returns as they are.

    cure: what to do, by the setting that names the environment of the command at hand.
    """
    import gymnasium as gym

    probe = make_env(task) if env is None else env
    label = task.env_id or "the environment"
    try:
        texts = [isinstance(space, gym.spaces.Text) for space in (probe.observation_space, probe.action_space)]
        if spec.text or any(texts):
            kinds = "texts" if all(texts) else "texts and numbers" if any(texts) else "numbers"
            if not (spec.text and all(texts)):
                raise UserError(
                    f"dataset {spec.name} holds {'texts' if spec.text else 'numbers'}, {label} {kinds}. {cure}"
                )
            return
        shape, kind = flattener(probe, task.observation_keys)[1:]
        discrete, size = action_kind(probe)
        bounds = None if discrete else (probe.action_space.low.ravel(), probe.action_space.high.ravel())  # type: ignore[attr-defined]
    finally:
        if env is None:
            probe.close()
    note = f" {task.note}." if task.note else ""
    if np.dtype(kind).names or spec.streams:
        shape = _check_streams(spec, np.dtype(kind), label, f"{note} {cure}")
    if tuple(spec.observation_shape) != shape:
        cure = _flat(probe.observation_space, shape[0] if len(shape) == 1 else 0) or cure
        raise UserError(
            f"dataset {spec.name} has observations of shape {tuple(spec.observation_shape)}, {label} of "
            f"{shape}.{note} {cure}"
        )
    if discrete != spec.discrete:
        data_kind, kind = ("discrete", "continuous") if spec.discrete else ("continuous", "discrete")
        raise UserError(f"dataset {spec.name} has {data_kind} actions, {label} {kind} ones.{note} {cure}")
    count = spec.num_actions if discrete else spec.action_dim
    if count > size or (count != size and not discrete):  # data need not contain every choice
        word = "choices of action" if discrete else "action dimensions"
        if discrete and (start := int(probe.action_space.start)):  # type: ignore[attr-defined]
            cure = (
                f"{label} numbers its choices from {start}: where the data do, take actions - ({start}), for data "
                f"count from 0. {cure}"
            )
        raise UserError(f"dataset {spec.name} has {count} {word}, {label} has {size}.{note} {cure}")
    if bounds is not None and spec.action_low and spec.action_high:
        low, high = np.asarray(spec.action_low), np.asarray(spec.action_high)
        slack = 1e-3 * (high - low)
        unit = bool((low == -1.0).all() and (high == 1.0).all())
        if np.any(low < bounds[0] - slack) or np.any(high > bounds[1] + slack):
            warn(
                f"the actions of dataset {spec.name} reach beyond the range of {label}: evaluation clips them"
                + (f"; {unscale(bounds[0], bounds[1])}" if unit else "")
            )
        elif (
            unit
            and np.abs(bounds).max() < UNBOUNDED
            and (np.any(low > bounds[0] + slack) or np.any(high < bounds[1] - slack))
        ):
            warn(
                f"the actions of dataset {spec.name} are taken to lie in [-1, 1], and the range of {label} is wider: a "
                f"policy never goes beyond 1. If they are scaled, {unscale(bounds[0], bounds[1])}; if not, set "
                f"dataset.action_low={listed(bounds[0])} dataset.action_high={listed(bounds[1])}"
            )
    if spec.task is not None and spec.task.ref_min is not None and task.ref_min is None and task.scored_by == "return":
        warn_of_references(spec.task, label.rpartition(":")[2])


def _check_streams(spec: DataSpec, kind: np.dtype, label: str, cure: str) -> tuple[int, ...]:
    """The shape of the environment's vector. Raises UserError where its images are others than those of the data."""
    shapes = {name: kind[name].shape for name in kind.names or ()}
    vector = shapes.pop(VECTOR, (0,))
    if table := next((s.name for s in spec.streams if not s.image), None):
        raise UserError(
            f"dataset {spec.name} has the table '{table}', which {label} does not give: leave it out of "
            "dataset.observation_keys, or train without an environment (offrl train: eval.env=none)"
        )
    recorded = {s.name: {s.shape, (*(s.recorded or s.shape[:2]), s.shape[-1])} for s in spec.streams if s.image}
    if shapes.keys() != recorded.keys() or any(shapes[name] not in recorded[name] for name in shapes):
        shown = [f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes.items()]
        of_data = ", ".join(f"{s.name} {'x'.join(map(str, s.shape))}" for s in spec.streams) or "no images"
        of_environment = ", ".join(shown) or "no images"
        raise UserError(f"dataset {spec.name} has observations with {of_data}, {label} with {of_environment}.{cure}")
    return vector


def check_columns(recorded: DataSpec, spec: DataSpec, where: str) -> None:
    """Raises UserError where the columns, or the choices of actions, that `where` was trained on are others than those
    of these data.
    """
    for key in ("observation_columns", "action_columns"):
        if text := other_columns(getattr(recorded, key), getattr(spec, key)):
            raise UserError(
                f"{where} was trained on the columns {text[0]}, and {spec.name} has {text[1]}: name them with "
                "dataset.fields in that order"
            )
    if recorded.action_labels and spec.action_labels and recorded.action_labels != spec.action_labels:
        raise UserError(
            f"{where}: its choices of actions are {listed_labels(recorded.action_labels)}, and those of {spec.name} "
            f"are {listed_labels(spec.action_labels)}: append the data that lack some of them to its own "
            "(dataset.concatenate)"
        )
    if bool(recorded.action_labels) != bool(spec.action_labels) and spec.discrete:
        with_names, with_numbers = (where, spec.name) if recorded.action_labels else (spec.name, where)
        warn(
            f"{with_numbers} has numbers for its choices of actions, {with_names} has names: they are taken to be "
            "numbered alike"
        )


def check_normalisation(recorded: DataSpec, spec: DataSpec, where: str) -> None:
    """Raises UserError where `where` was trained on observations that were normalised by other numbers than these data,
    beyond rounding, or one of them not at all.
    """
    x, y = (np.array([s.observation_mean or (), s.observation_std or ()], np.float64) for s in (recorded, spec))
    if x.shape != y.shape or bool((np.abs(x - y) > 1e-5 * (np.abs(y) + y[1:])).any()):
        raise UserError(
            f"{where}: its observations were normalised in another way than those of {spec.name}; train it with this "
            "version and the same dataset.normalize_observations"
        )


def without_streams(dataset: Dataset, keys: Sequence[str]) -> Dataset:
    """The data without the streams that `dataset.observation_keys` leaves out, where it names all else."""
    names = [s.name for s in dataset.spec.streams if s.name in keys]
    task = dataset.spec.task
    remaining = [k for k in task.observation_keys if k in names or k not in dataset.stores] if task is not None else []
    if task is None or len(names) == len(dataset.stores) or remaining != list(keys):
        return dataset
    streams = tuple(s for s in dataset.spec.streams if s.name in names)
    spec = replace(dataset.spec, streams=streams, task=replace(task, observation_keys=tuple(keys)))
    return replace(dataset, spec=spec, stores={name: dataset.stores[name] for name in names})


def with_entries(spec: DataSpec, keys: Sequence[str]) -> DataSpec:
    """The specification of data that are made of the entries `keys` of a Dict, as `dataset.observation_keys` says of
    flat ones.

    Raises UserError where the data themselves say otherwise.
    """
    task = spec.task or Task(name=spec.name)
    if task.observation_keys not in ((), OWN_ORDER, tuple(keys)):
        raise UserError(
            f"{spec.name}: the observations are joined of {','.join(task.observation_keys)}, and "
            f"dataset.observation_keys says {','.join(keys)}: leave it out"
        )
    return replace(spec, task=replace(task, observation_keys=tuple(keys)))


def settled(spec: DataSpec, env: gym.Env, data: Dataset | None = None) -> DataSpec:
    """The specification with what the environment, which `check_fit` passed, says of what the data leave open: the
    order of a Dict observation's entries, and the number of the first choice.

    data: where they are there. Raises UserError where their choices may be numbered from 0 or as the environment's.
    """
    task = spec.task or Task(name=spec.name)
    space, choices = env.observation_space, env.action_space
    keys = (
        joined(space, task.observation_keys)
        if isinstance(getattr(space, "spaces", None), dict)
        else task.observation_keys
    )
    start = int(getattr(choices, "start", 0)) or None
    if start is not None and task.action_start is None and data is not None:
        actions = data.columns["actions"]
        low, high, count = int(actions.min()), int(actions.max()), int(choices.n)  # type: ignore[attr-defined]
        stated = spec.num_actions == count > high + 1  # by who gave num_actions
        if not stated and start <= low and high < start + count:
            raise UserError(two_numberings(spec.name, low, high, start, count))
    if (keys, start) == (task.observation_keys, task.action_start):
        return spec
    return replace(spec, task=replace(task, observation_keys=keys, action_start=start))


def _flat(space: Any, width: int) -> str:
    """How to make data of numbers fit an environment whose observations become more than those; "" where they are
    numbers anyway.
    """
    import gymnasium as gym

    if isinstance(space, gym.spaces.Discrete):
        states = "states" if not space.start else f"states - ({space.start})"
        return (
            f"Its observations are numbers from {space.start} to {space.start + space.n - 1}, each of which becomes "
            f"{width} zeros and ones (one-hot): make the data's so, observations = numpy.eye({width})[{states}]"
        )
    if isinstance(space, gym.spaces.Box):
        return ""
    return (
        f"Its observations are a {type(space).__name__}, of which gymnasium.spaces.flatten makes {width} numbers "
        "(one-hot of choices): make the data's so, observations = "
        "numpy.stack([gymnasium.spaces.flatten(env.observation_space, o) for o in observations])"
    )


def refuse_streams(dataset: Dataset, reader: str, cure: str) -> None:
    """Raise UserError where observations are more than the numbers of a vector, which is all that `reader` reads."""
    if more := seen_besides(dataset.spec):
        raise UserError(f"{reader} reads the numbers of observations, and {dataset.spec.name} has {more}: {cure}")


def seen_besides(spec: DataSpec) -> str:
    """What networks see besides the numbers of single observations: the names of streams, or the window."""
    window = f"windows of {spec.history} observations and {spec.history_actions} actions"
    return ", ".join([*[window] * spec.windowed, *(stream.name for stream in spec.streams)])
