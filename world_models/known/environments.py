"""Recognition of the environment that a dataset comes from, as far as a known termination or reward needs it:
`identify`.

A wrong function is worse than none, for a model can learn both. So every size and setting that is given must be the one
for which the function is known to hold; an unknown setting is taken for one that matters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from offrl import registry
from offrl.data.dataset import DataSpec
from offrl.tasks import task as tasks
from offrl.tasks.task import Task

T = TypeVar("T")
# offrl's names, which a dataset may carry by chance ("ant.hdf5")
OWN: dict[str, set[str]] = {"termination": set(), "reward": set()}

# Settings of Gymnasium's environments that change neither an end, nor a reward, nor the place of an observation's
# entry; and those that change rewards or what comes after the entries that the functions read
_NEUTRAL = """render_mode width height camera_id camera_name default_camera_config max_geom visual_options max_episode_steps
    reset_noise_scale disable_env_checker frame_skip g main_body"""  # noqa: E501
_PAY = """forward_reward_weight ctrl_cost_weight healthy_reward contact_cost_weight contact_force_range contact_cost_range
    use_contact_forces reward_dist_weight reward_control_weight reward_near_weight uph_cost_weight impact_cost_weight impact_cost_range
    sutton_barto_reward include_cfrc_ext_in_observation include_cinert_in_observation include_cvel_in_observation
    include_qfrc_actuator_in_observation"""  # noqa: E501
NEUTRAL, PAY = frozenset(_NEUTRAL.split()), frozenset(_PAY.split())


def known(kind: str, name: str) -> Callable[[T], T]:
    """Decorator: register one of offrl's own functions."""
    OWN[kind].add(name)
    return registry.register(kind, name)


@dataclass(frozen=True)
class Family:
    """Environments that end by one rule, and what must hold for it to be theirs. `termination`, `reward`: names of
    functions.
    """

    ids: str  # a regular expression: the environment's id without its version
    termination: str
    # sizes of the flat observation for which the rule's entries are in their places; (): any
    observations: tuple[int, ...] = ()
    actions: int = 0  # how many; 0: any
    choices: int = 0  # of a discrete action
    settings: Mapping[str, Any] = field(default_factory=dict)  # that must have these values where they are given
    any_setting: bool = False  # no other setting changes its end
    versioned: bool = True  # the id ends in -v and a number
    reward: str | None = None  # None: it is no exact function of what is observed


def _family(row: Mapping[str, Any]) -> Family:
    fixed = {k: tuple(v) if isinstance(v, list) else v for k, v in row.get("settings", {}).items()}
    return Family(**{**row, "observations": tuple(row.get("observations", ())), "settings": fixed})


# Ant and Humanoid with and without the forces: of the former 27 numbers, 84 more (v2, D4RL), 78 more (v5). NeoRL-2's
# are after its package's neorl2/envs. Not there: Simglucose ends by a blood value that it observes with noise;
# SafetyHalfCheetah's environment never ends while the function beside it does
FAMILIES = tuple(map(_family, json.loads((Path(__file__).parent / "families.json").read_text(encoding="utf-8"))))
CHANGED = ("inverted_pendulum", "reacher", "pusher")  # rewards that Gymnasium's v5 changed
NEWEST = 5  # version of Gymnasium's robots: a later one may end otherwise
# and offrl's own; another module's Hopper-v4 can be anything
_MODULES = ("", "gymnasium", "gymnasium_robotics", "neorl2")
_ID = re.compile(r"(?:(?P<module>[\w.]+):)?(?P<stem>[\w/-]+?)(?:-v(?P<version>\d+))?")
_MINARI = re.compile(r"mujoco/(\w+)/\w+-v\d+")  # their environments are Gymnasium's v5
# in a task's note: seen through one that may rescale
_WRAPPED = re.compile(r"wrappers.*\b(?!FlattenObs)\w*(Observation|VecNormalize)")
_PAID = re.compile(r"wrappers.*Reward")  # or whose rewards were changed


@dataclass(frozen=True)
class Environment:
    """A dataset's environment, recognised."""

    family: Family
    version: int  # -1: the id has none
    settings: Mapping[str, Any]  # what its maker was given

    @property
    def reward(self) -> str | None:
        """The name of its reward function: v5 of Gymnasium's robots are paid in other ways than those before."""
        name = self.family.reward
        return f"{name}_v4" if name in CHANGED and self.version < 5 else name


def identify(source: DataSpec | Task | str | None) -> Environment | None:
    """The environment that a dataset (its spec or its task), an environment's id or a dataset's name stands for, or
    None.

    None also where observations or actions have other sizes than the environment's, or were recorded through a wrapper
    that changes them."""
    spec = source if isinstance(source, DataSpec) else None
    task = task_of(source)
    if task is None or task.env_factory is not None or _WRAPPED.search(task.note):
        return None
    name = task.env_id or task.name
    minari = _MINARI.fullmatch(name)
    match = _ID.fullmatch(f"{minari[1]}-v5" if minari else name)
    if match is None or not ((match["module"] or "") in _MODULES or match["module"].startswith("offrl.envs.")):
        return None
    stem, version = match["stem"], int(match["version"] or -1)
    settings = dict(task.env_kwargs)
    if stem == "offrl/D4RL-Adroit":
        stem += f"-{settings.pop('hand', '')}"
    for family in FAMILIES:
        if not re.fullmatch(family.ids, stem, re.IGNORECASE if minari else 0) or not _fits(family, spec, task):
            continue
        if (0 <= version <= NEWEST and (task.env_id or minari)) if family.versioned else version < 0:
            return Environment(family, version, settings)
    return None


def find(source: DataSpec | Task | str | None, kind: str = "termination") -> str | None:
    """The name of the registered function of a dataset's environment, or None where none is known to hold. `kind`: or
    "reward".

    `source`: a dataset's spec (which also gives the sizes to check), a task, an environment's id or a dataset's name. A
    function that was registered under the environment's id or the dataset's name, by a user or plugin, comes first. A
    reward's function gives the environment's own reward, before any scale or shift of the data's.
    """
    registered = _registered(source, kind)
    if registered is not None:
        return registered
    environment, task = identify(source), task_of(source)
    if environment is None or task is None:
        return None
    family, settings = environment.family, dict(environment.settings)
    if kind == "reward":
        return None if _PAID.search(task.note) or not _agree(settings, family, NEUTRAL) else environment.reward
    if not settings.pop("terminate_when_unhealthy", True):
        return "never"
    free = frozenset(settings) if family.any_setting else NEUTRAL | PAY
    return family.termination if _agree(settings, family, free) else None


def _registered(source: DataSpec | Task | str | None, kind: str) -> str | None:
    """The name under which a function was registered for just this environment or dataset."""
    task = task_of(source)
    names = [] if task is None else [task.env_id, (task.env_id or "").rpartition(":")[2], task.name]
    if isinstance(source, DataSpec):
        names.append(source.name)
    known = registry.names(kind)
    return next((n for n in names if n and n in known and n not in OWN[kind]), None)


def _agree(values: Mapping[str, Any], family: Family, free: frozenset[str]) -> bool:
    """True where each setting has the value that the family requires, or is free to have any."""
    expected_settings = family.settings
    return all(_same(v, expected_settings[k]) if k in expected_settings else k in free for k, v in values.items())


def task_of(source: DataSpec | Task | str | None) -> Task | None:
    """The task of a dataset's spec, of an environment's id or of a dataset's name."""
    if isinstance(source, str):
        task = tasks.lookup(source)
        return task if task is not None else Task(name=source, env_id=source)
    return source.task if isinstance(source, DataSpec) else source


def _fits(family: Family, spec: DataSpec | None, task: Task) -> bool:
    observations = spec.observation_dim if spec else task.observation_dim
    if family.observations and observations is not None and observations not in family.observations:
        return False
    if spec is None:
        return not family.actions or task.action_dim in (None, family.actions)
    if family.choices:  # data need not contain every choice
        return spec.discrete and spec.num_actions <= family.choices
    return not family.actions or (not spec.discrete and spec.action_dim == family.actions)


def _same(value: Any, expected: Any) -> bool:
    """True where a setting has the expected value; texts: one of them; numbers: the same ones, in any kind of
    sequence.
    """
    if not isinstance(expected, tuple):
        return bool(value == expected)
    if isinstance(expected[0], str):
        return value in expected
    return isinstance(value, Sequence) and tuple(value) == expected
