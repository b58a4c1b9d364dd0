"""From a command to a tune: its spaces, the settings of its runs, and the identity by which the same command finds it
again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offrl import registry
from offrl.data import Dataset
from offrl.errors import UserError, nearest, warn
from offrl.ope.config import OPEConfig
from offrl.runs import record as runs
from offrl.settings import diff
from offrl.settings.compose import compose, fill, flatten
from offrl.settings.field import marked, without_places
from offrl.settings.groups import flat_name
from offrl.settings.presets import algorithm_group
from offrl.settings.train import MOST_SEEDS, TrainConfig
from offrl.settings.untrusted import COUNTS, PLACES, check_code, given_of
from offrl.system import trust
from offrl.system.devices import pick_device
from offrl.tuning.config import MOST_GROUPS, OPTUNA, TuneConfig
from offrl.tuning.judging import judging_data
from offrl.tuning.search.rungs import Rung, halving
from offrl.tuning.search.space import Space, space_of
from offrl.tuning.search.training import DataSets, RungRun, Values, origin_of, programs, settings_of
from offrl.tuning.search.tune_file import FILE, claim, read

# settings of `offrl train` that runs are given
PASSED = ("dataset", "encoder", "compile", "workers", "group", "precision", "experiment", "log_every", "logger")
TUNE_FIELDS = [f.name for f in dataclasses.fields(TuneConfig)]
# updates of a rung from which compiling pays on a CPU; a rule rather than a measurement, so that a resumed tune does
# the same
LONG = 5_000
MODELS = "ope.models_dir"  # a place among the settings of the judges
GROUP = 4  # replicas in one program on a CPU, whatever the number of processes: its size decides last bits
# reset seeds of the reported score; of the truth and of played episodes below, none of which another one uses
RETRAINED = 1_000_000
TRUTH, PLAYED = 2_000_000, 3_000_000


@dataclass
class Tune:
    """All that is decided before anything is trained."""

    config: TuneConfig
    folder: Path
    spaces: dict[str, Space]  # by algorithm, in the order of algos=
    # settings of `offrl train` of each algorithm's runs, less what differs between them
    base: dict[str, dict[str, Any]]
    judged_on: Dataset
    identity: str
    data: DataSets
    created: str  # UTC date of its beginning, YYYY-MM-DD

    @property
    def brackets(self) -> list[int]:
        """Settings of each algorithm that are asked for at a time."""
        configs, _ = self.config.configs_and_steps()
        size = self.config.bracket if self.config.proposer in OPTUNA else configs
        return [min(size, configs - first) for first in range(0, configs, size)]

    def rungs(self, settings: int) -> list[Rung]:
        """Of a bracket of that many settings, of all algorithms."""
        return halving(settings, self.config.configs_and_steps()[1], self.config.eta, self.config.rungs)

    @property
    def seeds(self) -> list[int]:
        """Of the search; those of the reported score come after them."""
        return list(range(self.config.seed, self.config.seed + self.config.seeds))

    @property
    def final_seeds(self) -> list[int]:
        """Training seeds that no search has seen."""
        first = self.config.seed + self.config.seeds
        return list(range(first, first + self.config.final_seeds))

    def rung_runs(
        self, bracket: int, number: int, rung: Rung, trials: Mapping[str, tuple[str, Values]], before: Sequence[RungRun]
    ) -> list[RungRun]:
        """The runs of a rung: of each algorithm one for each program. trials: {setting: (algorithm, values)}; before:
        the rung's before it.

        Raises UserError for more programs than one rung may have.
        """
        result = []
        for algo, space in self.spaces.items():
            algo_trials = {name: values for name, (kind, values) in trials.items() if kind == algo}
            groups = programs(space, algo_trials)
            if len(groups) > MOST_GROUPS and space.tensors:
                shapes = ", ".join(d.name for d in space.dimensions if not d.tensor)
                raise UserError(
                    f"the settings of {algo} are {len(groups)} programs, of which each is compiled and trained for "
                    f"itself ({shapes}): at most {MOST_GROUPS}; name fewer values, such as "
                    f"space.{shapes.split(', ')[0]}=[a,b]"
                )
            for index, names in enumerate(groups):
                directory = (
                    self.folder / "runs" / f"b{bracket}-r{number}-{algo}{f'-{index}' if len(groups) > 1 else ''}"
                )
                settings = {
                    **self.base[algo],
                    **settings_of(space, algo_trials, names),
                    "steps": rung.updates,
                    "seeds": self.seeds,
                    "dataset.split": self.config.split,
                    "dataset.split_seed": self.config.seed,
                    "eval.env": "none",
                    "eval.estimate": False,
                    "eval.every": 0,
                    "checkpoint.keep": 1,
                    "checkpoint.every": max(1, rung.updates // 4),
                }
                result.append(RungRun(directory, settings, tuple(names), *origin_of(names, before, len(self.seeds))))
        return result


# ------------------------------------------------------------------------------------------------------- from a command


def prepare(values: Mapping[str, Any]) -> Tune:
    """Check everything that can be checked before training, read the data, and claim the folder for this tune.

    values: {name: value} as on the command line; `resume` names the folder of a tune, whose settings are taken. Raises
    UserError."""
    if values.get("resume") is None:
        trust.typed(str(values["env"]) if values.get("env") not in (None, "auto", "none") else None)
    command_values = flatten_names({k: v for k, v in _resumed(values).items() if k != "resume"})
    values = {("algos" if k == "algo" else k): v for k, v in command_values.items()}
    for name in ("algos", "judge", "criteria"):
        if name in values and not isinstance(values[name], (list, tuple)):
            values[name] = [values[name]]
    values_here = {k: v for k, v in values.items() if k.partition(".")[0] in TUNE_FIELDS and not k.startswith("space.")}
    config = fill(TuneConfig(), values_here, "tune")
    config.algos = [algorithm_group(str(a)) for a in config.algos]
    config.validate()
    train_values = {k: v for k, v in values.items() if k not in values_here}
    spaces_given, per_algo, shared = _sorted(train_values, config.algos)
    if "dataset" not in shared:
        raise UserError("offrl tune needs the data: dataset=FILE or dataset=NAME; `offrl data list` shows names")
    base = {a: _base(a, config, per_algo[a], shared) for a in config.algos}
    composed = {a: compose(base[a] | {"steps": 1}) for a in config.algos}
    spaces = {a: _space(a, composed[a], config, spaces_given[a], base[a]) for a in config.algos}
    configs, _ = config.configs_and_steps()
    if configs * len(config.algos) * config.seeds > MOST_SEEDS:
        raise UserError(
            f"budget={config.budget} with {config.seeds} seeds is more than {MOST_SEEDS:,} policies; take fewer "
            "settings"
        )
    folder = Path(config.out)
    data = DataSets()
    judged_on = judging_data(composed[config.algos[0]], config)
    identity, settings = _identity(config, base, spaces, composed, judged_on)
    created = claim(folder, identity, settings, command_values)
    return Tune(config, folder, spaces, base, judged_on, identity, data, created)


def flatten_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The names of a command, those of `offrl train` in their usual spelling. What this command has of its own
    stays.
    """
    special = {
        flat_name(k): v
        for k, v in values.items()
        if k.partition(".")[0] in ("space", "ope") or k in ("algo", "algos", "env", "seed", "cost_limit")
    }
    return {**flatten({k: v for k, v in values.items() if flat_name(k) not in special}), **special}


def _resumed(values: Mapping[str, Any]) -> dict[str, Any]:
    """With resume=FOLDER the settings of that tune, and of `values` those that say where or how fast.

    A stranger may have written the folder: Raises UserError for code, environments and networks of Python files that
    only its file names."""
    where = values.get("resume")
    if where is None:
        return dict(values)
    path = Path(str(where)) / FILE
    record = read(path)
    place_fields = marked(TuneConfig, "place")
    saved = given_of(path, record["given"], values, (*place_fields, MODELS))
    for name, value in saved.items():
        if name.endswith(("actor_network", "critic_network")) and ".py" in str(value):
            trust.check_code(path, name, str(value), name in values)
    check_code(path, {"given": saved}, values)
    free = (*place_fields, *PLACES, *COUNTS, MODELS, "logger", "resume")
    if other := next((k for k in values if k not in free and saved.get(k) != values[k]), None):
        raise UserError(f"{other}= cannot change with resume=: that would be another tune; begin it with another out=")
    return {**saved, **{k: v for k, v in values.items() if k != "resume"}, "out": str(where)}


def _sorted(
    train_values: Mapping[str, Any], algos: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]], dict[str, Any]]:
    """({algo: {setting: space}}, {algo: {algo.NAME: value}}, {name: value of all runs}) of what is no setting of the
    command itself.
    """
    spaces: dict[str, dict[str, Any]] = {a: {} for a in algos}
    fixed: dict[str, dict[str, Any]] = {a: {} for a in algos}
    shared: dict[str, Any] = {}
    for name, value in train_values.items():
        head, _, tail = name.partition(".")
        if head == "space" and tail:
            algo, dot, field = tail.partition(".")
            for a in [algo] if dot and algo in algos else algos:
                spaces[a][field if dot and algo in algos else tail] = value
            if dot and algo not in algos:
                raise UserError(f"{name}: {algo} is none of the algorithms ({', '.join(algos)}).{nearest(algo, algos)}")
        elif head in algos and tail:
            fixed[head][f"algo.{tail}"] = value
        elif head == "algo" and tail:
            for a in algos:
                fixed[a].setdefault(name, value)
        elif head in PASSED:
            if name in ("dataset.split", "dataset.split_part", "dataset.split_seed"):
                raise UserError(f"{name}: offrl tune divides the data itself; split= is the share that trains")
            shared[name] = value
        else:
            raise UserError(
                f"offrl tune has no setting '{name}'.{nearest(name, [*TUNE_FIELDS, *PASSED])} All of them: "
                "offrl tune --help"
            )
    for a in algos:
        if twice := next((n for n in spaces[a] if f"algo.{n}" in fixed[a]), None):
            raise UserError(f"space.{twice} and algo.{twice} are both given for {a}; leave one of them out")
    return spaces, fixed, shared


def _base(algo: str, config: TuneConfig, fixed: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `offrl train` that all runs of an algorithm have; of algo.NAME=, those that it knows."""
    data_settings = {k: v for k, v in shared.items() if k.partition(".")[0] in ("dataset", "experiment")}
    kind = registry.get("algo", compose({"algo": algo, **data_settings}).algo.name)
    names = {f.name for f in dataclasses.fields(kind.Config)}
    fitting = {k: v for k, v in fixed.items() if k.removeprefix("algo.").partition(".")[0] in names}
    if unknown := [k for k in fixed if k not in fitting]:
        if len(config.algos) == 1 or all(k not in fitting for k in fixed):
            raise UserError(
                f"{unknown[0]}: {algo} has no such setting.{nearest(unknown[0].removeprefix('algo.'), names)}"
            )
        warn(f"{unknown[0]} is no setting of {algo}: it goes to the others")
    base: dict[str, Any] = {"logger": "none", "quiet": config.quiet, "device": config.device, "threads": config.threads}
    if pick_device(config.device).type == "cpu":
        base |= {"group": GROUP, "compile": "compiled" if config.configs_and_steps()[1] >= LONG else "eager"}
    return {**base, **shared, **fitting, "algo": algo}


def _space(
    algo: str, composed: TrainConfig, config: TuneConfig, ranges: Mapping[str, Any], base: Mapping[str, Any]
) -> Space:
    vectorized = registry.get("algo", composed.algo.name).traits.vectorized
    space = space_of(algo, composed.algo, config.space, ranges, vectorized)
    fixed = [d for d in space.dimensions if f"algo.{d.name}" in base and d.name not in ranges]
    searched = tuple(d for d in space.dimensions if d not in fixed)  # what a command sets is not searched
    if not searched:
        raise UserError(
            f"nothing of {algo} is left to search: {', '.join(f'algo.{d.name}' for d in fixed)} is given; leave it out"
        )
    return dataclasses.replace(space, dimensions=searched, default={d.name: space.default[d.name] for d in searched})


def _identity(
    config: TuneConfig,
    base: Mapping[str, Any],
    spaces: Mapping[str, Space],
    composed: Mapping[str, TrainConfig],
    data: Dataset,
) -> tuple[str, dict[str, Any]]:
    """(a hash of everything that decides what a tune finds, the same in words)."""
    config_values = without_places(config)
    config_values["ope"] = dataclasses.asdict(config.ope) | {"models_dir": OPEConfig.models_dir}  # a place
    description: dict[str, Any] = {**config_values, "data": data.fingerprint, "dataset": data.spec.name}
    for algo, train in composed.items():
        values = runs.identity(train)
        values["dataset"] = {
            k: v for k, v in values["dataset"].items() if k not in ("split", "split_part", "split_seed")
        }
        settings = {**values, "compile": base[algo].get("compile"), "group": base[algo].get("group")}
        description[algo] = {k: v for k, v in settings.items() if k != "seeds"} | {
            "space": {d.name: d.text() for d in spaces[algo].dimensions}
        }
    description = diff.flatten(description)
    return hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode()).hexdigest(), description
