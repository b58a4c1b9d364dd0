"""The entries of a results document, version 1, and their types. A key is there, and null where nothing is known,
unless it is optional.
"""

from __future__ import annotations

from typing import Any, TypedDict

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
