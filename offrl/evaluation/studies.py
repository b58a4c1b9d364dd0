"""Studies of perturbations: which parameters of an environment are changed, and to what values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np

from offrl.errors import UserError, few, nearest
from offrl.settings.presets import read_yaml
from offrl.tasks.multitask import MultiTaskEnv
from offrl.tasks.perturbed import nominal_values

# RRLS's (code of SuReLI/RRLS, commit 0c43dc9): robot -> (parameter, lowest, highest), in the order in which its studies
# of one to three dimensions add them
RRLS: dict[str, tuple[tuple[str, float, float], ...]] = {
    "Ant": (("mass.torso", 0.1, 3.0), ("mass.front_left_leg", 0.01, 3.0), ("mass.front_right_leg", 0.01, 3.0)),
    "HalfCheetah": (("friction", 0.1, 4.0), ("mass.torso", 0.1, 7.0), ("mass.bthigh", 0.1, 3.0)),
    "Hopper": (("friction.floor", 0.1, 3.0), ("mass.torso", 0.1, 3.0), ("mass.thigh", 0.1, 4.0)),
    "HumanoidStandup": (("mass.torso", 0.1, 16.0), ("mass.right_foot", 0.1, 8.0), ("mass.left_thigh", 0.1, 5.0)),
    "InvertedPendulum": (("mass.pole", 1.0, 31.0), ("mass.cart", 1.0, 11.0)),
    "Walker2d": (("friction.floor", 0.1, 4.0), ("mass.torso", 0.1, 5.0), ("mass.thigh", 0.1, 6.0)),
}
ALONE = {"HalfCheetah": ("friction", 0.1, 3.0)}  # of RRLS's studies of one dimension
CONTACT = ("friction", 0.1, 3.0)
STEPS = {"grid": 10, "latin": 100, "axis": 20}  # values of a parameter; points
ALLOWED = {  # kind of parameter -> the lowest and the highest value that there is, and both in words
    "mass": (math.ulp(0.0), math.inf, "in kg, above 0"),
    "friction": (0.0, math.inf, "0 or more"),
    "damping": (0.0, math.inf, "a factor, 0 or more"),
    "noise": (0.0, math.inf, "in standard deviations of the data, 0 or more"),
    "dropout": (0.0, 1.0, "a probability, 0 to 1"),
    "delay": (0.0, 1000.0, "a whole number of steps, 0 to 1000"),
}


@dataclass(frozen=True)
class Study:
    """Parameters of an environment, and between which values they lie."""

    name: str
    ranges: Mapping[str, tuple[float, float]]
    nominal: Mapping[str, float]
    rrls: bool = False  # masses without inertia, grids without the largest values, as RRLS has them

    def points(self, text: str) -> list[dict[str, float]]:
        """The points that "grid", "grid:5" (values of each parameter), "latin:100" (points) or "axis" (each parameter
        alone, the nominal value among the others) names; a parameter that a point does not hold is nominal. Raises
        UserError."""
        kind, colon, count = text.partition(":")
        if kind not in STEPS or (colon and not (count.isdigit() and int(count) >= 2)):
            raise UserError(f"points={text}: points are grid, grid:5, latin:100 or axis.{nearest(kind, STEPS)}")
        number = int(count) if colon else STEPS[kind]
        if kind == "latin":
            random = np.random.default_rng(0)
            cells = np.stack([random.permutation(number) for _ in self.ranges], 1)
            shares = (cells + random.random(cells.shape)) / number
            return [
                {
                    name: self._rounded(name, low + (high - low) * share)
                    for share, (name, (low, high)) in zip(row, self.ranges.items(), strict=True)
                }
                for row in shares.tolist()
            ]
        levels = {name: self._levels(name, number, kind == "grid" and self.rrls) for name in self.ranges}
        if kind == "axis":
            return [{n: v} for n, values in levels.items() for v in sorted({*values, self.nominal[n]})]
        return [dict(zip(levels, values, strict=True)) for values in itertools.product(*levels.values())]

    def _levels(self, name: str, count: int, open_end: bool) -> list[float]:
        low, high = self.ranges[name]
        values = low + (high - low) * np.arange(count) / (count if open_end else count - 1)
        return sorted({self._rounded(name, value) for value in values.tolist()})

    @staticmethod
    def _rounded(name: str, value: float) -> float:
        return float(round(value)) if name == "delay" else float(f"{value:.12g}")


def study_of(text: str, env: gym.Env, label: str) -> Study:
    """The study that `robust=` names for this environment: rrls or contact, of two parameters, rrls:3, or a YAML file.

    Raises UserError for one that there is not for it, and for parameters that the environment has not, or of values
    that they cannot have.
    """
    if isinstance(env, MultiTaskEnv):
        raise UserError(f"robust={text} is not for policies of several tasks ({label}); leave it out")
    nominal = nominal_values(env)
    kind, colon, count = text.partition(":")
    if kind not in ("rrls", "contact"):
        return Study(text, _ranges(Path(text), nominal, label), nominal)
    if "gravity" not in nominal:
        raise UserError(
            f"robust={text}: {label} is no MuJoCo environment; of others {', '.join(nominal) or 'nothing'} can be "
            "changed, in a file: robust=my.yaml"
        )
    robot = type(env.unwrapped).__name__.removesuffix("Env")
    table = RRLS.get(robot, ())
    if kind == "contact":
        table = (CONTACT, *table[1:]) if table and table[0][0].startswith("friction") else ()
    if not table:
        known = [name for name, rows in RRLS.items() if kind == "rrls" or rows[0][0].startswith("friction")]
        raise UserError(f"robust={kind} is for {', '.join(known)}, not for {label}; write a file: robust=my.yaml")
    number = int(count) if count.isdigit() else 0 if colon else 2
    if not 1 <= number <= len(table):
        raise UserError(f"robust={text}: for {label} it has 1 to {len(table)} parameters, such as robust={kind}:1")
    rows = (ALONE.get(robot, table[0]),) if number == 1 else table[:number]
    return Study(text, {name: (low, high) for name, low, high in rows}, nominal, kind == "rrls")


def _ranges(path: Path, nominal: Mapping[str, float], label: str) -> dict[str, tuple[float, float]]:
    """The file's lines `name: [low, high]`. Raises UserError."""
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"robust={path} is none of rrls and contact, nor a YAML file: robust=my.yaml."
            f"{nearest(str(path), ('rrls', 'contact'))}"
        )
    ranges = {}
    for name, values in read_yaml(path).items():
        if name not in nominal:
            physics = (
                "" if "gravity" in nominal else f" {label} is no MuJoCo environment: its physics cannot be changed."
            )
            raise UserError(f"{path}: {label} has no parameter '{name}'.{physics}{few(str(name), nominal)}")
        numbers = isinstance(values, list) and len(values) == 2 and all(type(v) in (int, float) for v in values)
        if not numbers or not all(map(math.isfinite, values)):
            raise UserError(f"{path}: {name} is {values}; write its lowest and highest value, {name}: [0.5, 2]")
        low, high = map(float, values)
        if low > high:
            raise UserError(f"{path}: {name} goes from {low:g} down to {high:g}; write {name}: [{high:g}, {low:g}]")
        least, most, meaning = ALLOWED.get(name.partition(".")[0], (-math.inf, math.inf, ""))
        if low < least or high > most or (name == "delay" and (low % 1 or high % 1)):
            raise UserError(f"{path}: {name} from {low:g} to {high:g}; it is {meaning}")
        ranges[name] = (low, high)
    if not ranges:
        raise UserError(f"{path} names no parameter; a line is NAME: [LOW, HIGH], such as gravity: [8, 12]")
    return ranges
