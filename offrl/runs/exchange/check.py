"""Whether a document is one: a stranger may have written it. Everything is looked at before anything of it is used."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

from offrl.errors import UserError
from offrl.settings.kinds import misfit
from offrl.tasks.task import lookup

VERSION = 1


class DatasetEntry(TypedDict):
    """The data that were trained on."""

    name: str
    checksum: str  # of the data as they were read: of offrl's own documents `Dataset.fingerprint`
    rows: int | None
    episodes: int | None
    source: str | None  # what kind of data: d4rl, minari, file, ...
    transforms: list[str]


class ReferenceEntry(TypedDict):
    """What the scores 0 and 100 mean."""

    source: str  # whose: "D4RL"
    min: float | None  # the undiscounted return that scores 0
    max: float | None  # and 100


class OptionalTask(TypedDict, total=False):
    """Entries of a task that may be missing."""

    scored_by: str  # "return" (default), or "success": a score is 100 times the share of episodes that succeed


class TaskEntry(OptionalTask):
    """The environment of the scores."""

    name: str
    environment: str  # its Gymnasium id
    packages: dict[str, str]  # name: version, of those that change a score
    reference_scores: ReferenceEntry | None
    max_steps: int | None  # of an episode; null: the environment's own limit


class TunedEntry(TypedDict):
    """How the settings were chosen; null in the document where they were not."""

    by: str  # the program or the method
    candidates: int  # settings that were tried
    judge: str  # what chose: fqe, episodes, ...
    episodes_used: int  # played in the environment for the choice
    split: str  # the data or seeds that chose, and that they are not those reported here


class OptionalAlgorithm(TypedDict, total=False):
    """Entries of an algorithm that may be missing."""

    given: dict[str, Any]  # the part of the settings that a person set; the rest are defaults


class AlgorithmEntry(OptionalAlgorithm):
    """What was trained."""

    name: str
    settings: dict[str, Any]  # all that decide the result, defaults included: `algo.temperature`: 3.0
    settings_hash: str  # two documents with the same one and the same dataset.checksum are seeds of one experiment
    tuned: TunedEntry | None


class OptionalProtocol(TypedDict, total=False):
    """Entries of a protocol that may be missing."""

    eval_seed: int  # offrl's eval.seed: it, the seed of the run and the number of the episode decide a start


class ProtocolEntry(OptionalProtocol):
    """How it was scored."""

    steps: int  # planned gradient updates; a run that got less far is shown as unfinished
    evaluation: str  # which evaluation `runs` holds: "last"
    episodes: int  # of each seed
    deterministic: bool | None  # whether the policies acted without noise
    reset_seeds: list[int] | None  # [from, to] of `env.reset(seed=)`, both included; null where they are no range


class OptionalRun(TypedDict, total=False):
    """Entries of a run that may be missing."""

    return_mean: float  # undiscounted; where `returns` is null
    success: float | None  # share of episodes that succeed, 0 to 1


class RunEntry(OptionalRun):
    """The last evaluation of one seed."""

    seed: int
    step: int  # gradient updates
    returns: list[float] | None  # undiscounted, of each episode
    lengths: list[int] | None  # steps of each episode
    costs: list[float] | None  # undiscounted, of each episode
    score: float | None  # mean over episodes; 0 and 100 as `task.reference_scores` says
    diverged: bool


class OptionalCurve(TypedDict, total=False):
    """Entries of a point of a curve that may be missing."""

    return_mean: float


class CurveEntry(OptionalCurve):
    """One earlier evaluation of one seed."""

    seed: int
    step: int
    score: float | None


class HardwareEntry(TypedDict):
    """What it took."""

    kind: str  # cpu, cuda, "NVIDIA H100"
    wall_s: float | None  # seconds of training, all seeds that were trained together


class Document(TypedDict):
    """One algorithm with its settings on one dataset, over seeds."""

    schema: int
    library: str
    version: str
    commit: str | None
    created: str  # the date in UTC, YYYY-MM-DD
    license: str | None  # of these results: CC-BY-4.0, ...
    dataset: DatasetEntry
    task: TaskEntry
    algorithm: AlgorithmEntry
    protocol: ProtocolEntry
    runs: list[RunEntry]
    curve: list[CurveEntry]
    hardware: HardwareEntry | None
    notes: str | None


MOST_RUNS, MOST_POINTS = 10_000, 200_000  # seeds of a document, points of its curve
LARGEST = 1e30  # of a number; sums of larger ones overflow
LONGEST, DEEPEST = 10_000, 32  # characters of a text; layers
NEAR = 1e-4  # relative to the larger one, or to 1: numbers that should agree do so far, whatever rounded them
NAMES = (  # that are not empty
    "library",
    "dataset.name",
    "dataset.checksum",
    "algorithm.name",
    "algorithm.settings_hash",
    "task.environment",
)
COUNTS = (  # that are 0 or more
    "dataset.rows",
    "dataset.episodes",
    "task.max_steps",
    "protocol.steps",
    "protocol.episodes",
    "algorithm.tuned.candidates",
    "algorithm.tuned.episodes_used",
)
PAGE = "docs/results-exchange.md lists all keys"


def check(value: Any, where: str) -> dict[str, Any]:
    """`value`, which is a document of version 1. where: the file, and the line, for messages. Raises UserError that
    names the field.
    """
    try:
        wrong = _fault(value)
    except RecursionError:
        wrong = f"it is nested deeper than {DEEPEST} layers"
    if wrong:
        raise UserError(f"{where}: {wrong}")
    assert isinstance(value, dict)
    return value


def _fault(value: Any) -> str:
    """The first thing that is wrong, in words; "" where nothing is."""
    if not isinstance(value, Mapping):
        return (
            f"it is {_kind(value)}, and a results document is an object {{...}}; several stand one a line in a .jsonl "
            "file"
        )
    if "schema" not in value:
        return f"'schema' is missing, so this is no results document, or it needs \"schema\": {VERSION}; {PAGE}"
    if value["schema"] != VERSION or isinstance(value["schema"], bool):
        newer = isinstance(value["schema"], (int, float)) and value["schema"] > VERSION
        return (
            f"schema is {_short(value['schema'])}, and this offrl reads {VERSION}; "
            f"{'update offrl' if newer else 'write that version'}"
        )
    return (
        _counts(value)
        or next(_plain(value), "")
        or misfit(value, Document, "", complete=True)
        or _head(value)
        or next(_runs(value), "")
        or next(_curve(value), "")
    )


def _counts(value: Mapping[str, Any]) -> str:
    for name, most in (("runs", MOST_RUNS), ("curve", MOST_POINTS)):
        if isinstance(value.get(name), list) and len(value[name]) > most:
            return (
                f"{name} has {len(value[name]):,} entries, and a document {most:,} at most: give each experiment a "
                "document of its own"
            )
    return ""


def _plain(value: Any) -> Iterator[str]:
    """Numbers that are not finite or too large, texts that are too long, and too many layers, anywhere in the
    document.
    """
    pending: list[tuple[Any, tuple[Any, ...]]] = [(value, ())]
    while pending:
        item, path = pending.pop()
        if isinstance(item, (dict, list)):
            if len(path) >= DEEPEST:
                yield f"{_name(path[:4])} is nested deeper than {DEEPEST} layers: settings are flat, name: value"
                return
            entries: Any = item.items() if isinstance(item, dict) else enumerate(item)
            pending += [(v, (*path, k)) for k, v in entries if not isinstance(v, bool) and v is not None]
            if isinstance(item, dict) and any(len(str(k)) > LONGEST for k in item):
                yield f"{_name(path) or 'it'} has a key of more than {LONGEST:,} characters: shorten it"
        elif isinstance(item, str) and len(item) > LONGEST:
            yield f"{_name(path)} has {len(item):,} characters, and a text {LONGEST:,} at most: shorten it"
        elif isinstance(item, (int, float)) and not abs(item) <= LARGEST:
            finite = isinstance(item, int) or math.isfinite(item)
            cure = "null, or leave that seed out with diverged: true" if not finite else "a smaller unit"
            number = f"{item:g}" if isinstance(item, float) else "a whole number of many digits"
            yield f"{_name(path)} is {number}, where a finite number up to {LARGEST:g} is due: write {cure}"


def _head(value: Mapping[str, Any]) -> str:
    task = value["task"]
    try:
        if len(value["created"]) != 10:
            raise ValueError
        datetime.date.fromisoformat(value["created"])
    except ValueError:
        return f"created is {_short(value['created'])}, where a date in UTC is due, such as 2026-01-31"
    if empty := next((name for name in NAMES if not _entry(value, name).strip()), ""):
        return f"{empty} is empty: name it, for results are told apart by it"
    for name in COUNTS:
        if (number := _entry(value, name)) is not None and number < 0:
            return f"{name} is {number}, where a number of 0 or more is due"
    if (seeds := value["protocol"]["reset_seeds"]) is not None and (len(seeds) != 2 or seeds[0] > seeds[1]):
        return f"protocol.reset_seeds is {_short(seeds)}, where [from, to] is due, or null where they are no range"
    if task.get("scored_by", "return") not in ("return", "success"):
        return f'task.scored_by is {_short(task["scored_by"])}, where "return" or "success" is due'
    return _references(value["dataset"]["name"], task)


def _entry(value: Any, name: str) -> Any:
    """An entry by its dotted name; None where it, or what should hold it, is null."""
    for key in name.split("."):
        value = None if value is None else value[key]
    return value


def _references(dataset: str, task: Mapping[str, Any]) -> str:
    reference = task["reference_scores"]
    if reference is None:
        return ""
    low, high = reference["min"], reference["max"]
    if (low is None) != (high is None) or (low is not None and not low < high):
        return (
            f"task.reference_scores has min {low} and max {high}, where two returns are due, the second the larger, or "
            "null for both"
        )
    known = lookup(dataset)
    if (
        known is None
        or known.ref_label != reference["source"]
        or known.ref_min is None
        or known.ref_max is None
        or low is None
    ):
        return ""
    if near(low, known.ref_min) and near(high, known.ref_max):
        return ""
    return (
        f"task.reference_scores gives min {low:g} and max {high:g} as {known.ref_label}'s for {dataset}, which are "
        f"{known.ref_min:g} and {known.ref_max:g}: name another source, or score with those"
    )


def _runs(value: Mapping[str, Any]) -> Iterator[str]:
    if not value["runs"]:
        yield "runs is empty: a document holds one entry for each seed"
    reference = value["task"]["reference_scores"]
    by_return = value["task"].get("scored_by", "return") == "return"
    for i, run in enumerate(value["runs"]):
        name = f"runs[{i}]"
        if run["step"] < 0:
            yield f"{name}.step is {run['step']}, where a number of 0 or more is due"
        returns = run["returns"]
        if returns is not None and not returns:
            yield f"{name}.returns is empty: write null where single episodes are not known, with return_mean beside it"
        if returns is None and "return_mean" not in run and not run["diverged"]:
            yield (
                f"{name}.returns is null, and there is no return_mean: give the returns of the episodes, or their mean"
            )
        for key in ("lengths", "costs"):
            if run[key] is None:
                continue
            if low := next((n for n in run[key] if n < 0), None):
                yield f"{name}.{key} holds {low:g}, where numbers of 0 or more are due"
            if returns is not None and len(run[key]) != len(returns):
                yield (
                    f"{name}.{key} has {len(run[key])} entries and returns {len(returns)}: both have one for each "
                    "episode"
                )
        if run.get("success") is not None and not 0 <= run["success"] <= 1:
            yield f"{name}.success is {run['success']:g}, where a share of episodes between 0 and 1 is due"
        mean = mean_return(run)
        if returns is not None and mean is not None and not near(mean, math.fsum(returns) / len(returns)):
            yield (
                f"{name}.return_mean is {mean:g}, and the mean of its returns {math.fsum(returns) / len(returns):g}: "
                "leave it out"
            )
        if run["score"] is None or mean is None or not by_return or reference is None or reference["min"] is None:
            continue
        due = 100 * (mean - reference["min"]) / (reference["max"] - reference["min"])
        if not near(run["score"], due):
            yield (
                f"{name}.score is {run['score']:g}, and its returns between task.reference_scores are {due:g}: correct "
                "one of them"
            )


def _curve(value: Mapping[str, Any]) -> Iterator[str]:
    for i, point in enumerate(value["curve"]):
        if point["step"] < 0:
            yield f"curve[{i}].step is {point['step']}, where a number of 0 or more is due"


def mean_return(run: Mapping[str, Any]) -> float | None:
    """The mean undiscounted return of an entry of `runs`; None where it states none."""
    if "return_mean" in run:
        return float(run["return_mean"])
    return None if run["returns"] is None else math.fsum(run["returns"]) / len(run["returns"])


def near(a: float, b: float) -> bool:
    """Whether numbers that should agree do."""
    return math.isclose(a, b, rel_tol=NEAR, abs_tol=NEAR)


def _name(path: tuple[Any, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).strip(".")
    return text if len(text) <= 80 else f"{text[:77]}..."


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else "null" if value is None else f"the value {_short(value)}"
