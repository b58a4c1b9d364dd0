"""Rows of a dataset as text, and images, that a language model can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from offrl.data.dataset import Dataset, DataSpec
from offrl.errors import UserError
from offrl.labelling.pictures import Pictures
from offrl.system.user_code import guarded, python_object

WIDEST = 48  # observations of more numbers need names for those that matter
SKIP = "-"  # the name of an entry that is not shown

# What the entries of observations mean, by the beginning of the environment's id and their number (Gymnasium's
# documentation).
_LEGS = ["thigh", "leg", "foot"]
_ENTRIES: dict[tuple[str, int], list[str]] = {
    ("Hopper", 11): [
        "height",
        "torso angle",
        *(f"{p} angle" for p in _LEGS),
        "forward velocity",
        "vertical velocity",
        "torso spin",
        *(f"{p} spin" for p in _LEGS),
    ],
    ("Walker2d", 17): [
        "height",
        "torso angle",
        *(f"{p} angle" for p in _LEGS),
        *(f"left {p} angle" for p in _LEGS),
        "forward velocity",
        "vertical velocity",
        "torso spin",
        *(f"{p} spin" for p in _LEGS),
        *(f"left {p} spin" for p in _LEGS),
    ],
    ("HalfCheetah", 17): [
        "height",
        "torso angle",
        *(f"{side} {p} angle" for side in ("back", "front") for p in ("thigh", "shin", "foot")),
        "forward velocity",
        "vertical velocity",
        "torso spin",
        *(f"{side} {p} spin" for side in ("back", "front") for p in ("thigh", "shin", "foot")),
    ],
    ("PointMaze", 4): ["x", "y", "x velocity", "y velocity"],
    ("Pendulum", 3): ["cos angle", "sin angle", "angular velocity"],
    ("CartPole", 4): ["cart position", "cart velocity", "pole angle", "pole angular velocity"],
    ("MountainCar", 2): ["position", "velocity"],
}


def entry_names(spec: DataSpec, names: Sequence[str] = ()) -> list[str]:
    """A name for each number of an observation: the given ones, those of a known environment, or s0, s1, ... Raises
    UserError.
    """
    width = spec.observation_dim
    if names:
        if len(names) != width:
            raise UserError(
                f"names= has {len(names)} names and an observation of {spec.name} {width} numbers; '{SKIP}' leaves one "
                "out"
            )
        if all(name == SKIP for name in names):
            raise UserError("names= leaves every entry out")
        return [str(name) for name in names]
    task = spec.task
    stem = str(task.env_id if task and task.env_id else spec.name).rpartition("/")[2].rpartition(":")[2]
    for (start, size), known in _ENTRIES.items():
        if size == width and stem.lower().replace("_", "").startswith(start.lower()):
            return known
    if width > WIDEST:
        raise UserError(
            f"an observation of {spec.name} has {width} numbers, too many for a language model: name those that matter "
            f"with names=[...] ('{SKIP}' leaves one out), or write the text yourself with render=file.py:function"
        )
    return [f"s{i}" for i in range(width)]


@dataclass
class Renderer:
    """Text of a segment of rows: a line for each of at most `steps` of them, evenly spaced, the first and the last
    among them.
    """

    spec: DataSpec
    names: Sequence[str] = ()  # of the observation's entries; '-' leaves one out; empty: see `entry_names`
    actions: Sequence[str] = ()  # of discrete actions, or of the action's entries
    steps: int = 8
    digits: int = 3  # significant ones
    show_actions: bool = True
    show_rewards: bool = False
    function: Callable[[dict[str, np.ndarray]], str] | None = None  # of the columns of the rows, in place of all this
    where: str = "render"  # for messages
    pictures: Pictures | None = None  # takes the rows' images, which are shown then
    _names: list[str] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.function is None:
            self._names = entry_names(self.spec, self.names)
        count = self.spec.num_actions if self.spec.discrete else self.spec.action_dim
        if self.actions and len(self.actions) != count:
            kind = "actions" if self.spec.discrete else "entries in an action"
            raise UserError(f"action_names= has {len(self.actions)} names; {self.spec.name} has {count} {kind}")

    def __call__(self, columns: Mapping[str, np.ndarray]) -> str:
        """columns: of T rows, as `episode_columns` gives them. Raises UserError for what the user's function
        does."""
        if self.function is not None:
            text = guarded(self.where, self.function, {name: column.copy() for name, column in columns.items()})
            if not isinstance(text, str):
                raise UserError(f"{self.where} gave a {type(text).__name__}; a text is due")
            return text
        count = len(columns["observations"])
        rows = np.unique(np.linspace(0, count - 1, min(count, self.steps)).round().astype(int))
        return "\n".join(f"step {row}: {self._row(columns, row)}" for row in rows.tolist())

    def state(self, observation: np.ndarray) -> str:
        """One observation in words."""
        flat = np.asarray(observation, np.float64).reshape(-1)
        return ", ".join(f"{name} {self.number(x)}" for name, x in zip(self._names, flat, strict=True) if name != SKIP)

    def called(self, entry: int) -> str:
        """The name of a number of the observation, also of one that is not shown."""
        name = self._names[entry] if self._names else SKIP
        return f"s{entry}" if name == SKIP else name

    def number(self, value: float) -> str:
        """A number as short as `digits` allow."""
        return f"{float(value) + 0.0:.{self.digits}g}"

    def _row(self, columns: Mapping[str, np.ndarray], row: int) -> str:
        parts = [self.state(columns["observations"][row])] if self.spec.observation_dim else []
        if self.pictures is not None:
            images = [s.name for s in self.spec.streams if s.image]
            parts += [f"{name} {self.pictures.name(columns[name][row])}" for name in images]
        if self.show_actions:
            action = columns["actions"][row]
            if self.spec.discrete:
                parts.append(f"action {self.actions[int(action)] if self.actions else int(action)}")
            else:
                names = [f"{name} " for name in self.actions] or [""] * len(action)
                parts.append(
                    "action " + ", ".join(f"{name}{self.number(x)}" for name, x in zip(names, action, strict=True))
                )
        if self.show_rewards:
            parts.append(f"reward {self.number(columns['rewards'][row])}")
        return " | ".join(parts)


def named_function(text: str, setting: str) -> Callable[..., Any]:
    """The object that file.py:name or package.module:name names, for the setting `setting`. Raises UserError."""
    source, colon, name = text.rpartition(":")
    if not colon or not source or not name.replace(".", "").isidentifier():
        raise UserError(f"{setting}={text} names no function; it is file.py:function or package.module:function")
    function = python_object(source, name, text)[0]
    if not callable(function) or isinstance(function, type):
        raise UserError(f"{setting}={text} is a {type(function).__name__}, not a function")
    return function


def recorded(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """The rewards as they are. As `dataset.reward_labels` it lets data without rewards be read, as zeros."""
    return columns["rewards"]


def check_labelable(dataset: Dataset, pictures: bool = False) -> None:
    """Raises UserError for data whose rows are no numbers to read. pictures: images are shown."""
    if getattr(dataset.spec, "text", False):
        raise UserError(
            f"{dataset.spec.name} is a text dataset; offrl data label is for control data, whose observations are "
            "numbers"
        )
    if pictures and not any(s.image for s in dataset.spec.streams):
        raise UserError(
            f"show_images=true: {dataset.spec.name} is read without images; dataset.observation_keys=[...] names them"
        )
    if not pictures and not dataset.spec.observation_dim:
        raise UserError(
            f"{dataset.spec.name} has images alone: show_images=true shows them to a model that sees (kind=rewards, "
            "preferences)"
        )
    if dataset.spec.observation_mean is not None:
        raise UserError(f"{dataset.spec.name}: label before observations are normalised")
