"""Comparable scores, which may be averaged: groups by what they measure, and matrices, which `offrl.runs.results`
re-exports; and in what settings the algorithms that are compared differ. Published settings belong to their algorithm,
so a score is of an algorithm with them."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offrl.errors import some
from offrl.settings.diff import meaning, value_text
from offrl.tasks.task import lookup

if TYPE_CHECKING:
    import numpy as np

    from offrl.runs.score import Cell, Results, Score

FEW_SEEDS = 5  # with fewer, bootstrap intervals are too narrow (docs/statistics.md)
_ADROIT = ("pen", "hammer", "door", "relocate")
_FAMILIES = {
    "hopper": "gym",
    "halfcheetah": "gym",
    "walker2d": "gym",
    "ant": "gym",
    "pointmaze": "maze2d",
    **dict.fromkeys(_ADROIT, "adroit"),
}
_ENVIRONMENTS = (  # the first pattern that an environment's id matches says which family its task is of
    (
        r"(HalfCheetah|Hopper|Walker2d|Ant|Humanoid|HumanoidStandup|Swimmer|Reacher|Pusher|Inverted(Double)?Pendulum)-v\d|D4RL-Ant-",
        "gym",
    ),
    (r"AntMaze", "antmaze"),
    (r"PointMaze|Maze2d", "maze2d"),
    (r"Adroit", "adroit"),
    (r"Kitchen", "kitchen"),
)

MOST = 4  # conditions that a sentence names
BY_DATASET = "other values on each dataset"
WORDS = {  # what moves scores most first; after them every other setting of `dataset.` under its own name
    "data.fingerprint": "data",
    "dataset.normalize_observations": "normalised observations",
    "dataset.reward_scale": "reward scale",
    "dataset.reward_shift": "reward shift",
    "dataset.normalize_rewards": "normalised rewards",
    "dataset.reward_by_return_range": "reward scale by the range of returns",
    "dataset.reward_labels": "labelled rewards",
    "dataset.top_fraction": "share of the best episodes",
    "algo.hidden": "hidden layers",  # this and the next mean the same in every algorithm that has them
    "algo.width": "width",
    "algo.layers": "layers",
    "algo.actor_network": "actor's network",
    "algo.critic_network": "critic's network",
    "algo.layer_norm": "LayerNorm",
    "algo.batch_size": "batch size",
    "updates": "updates",
    "episodes": "evaluation episodes",
    "algo.learning_rate": "learning rate",
    "algo.discount": "discount",
    "precision": "precision",
}


@dataclass(frozen=True)
class Group:
    """Datasets whose scores mean the same, as matrices for `offrl.statistics.aggregate`."""

    name: str  # "D4RL gym", ...
    datasets: tuple[str, ...]  # the columns: those that all of the algorithms below have final scores for
    scores: dict[str, np.ndarray]  # label -> [runs, tasks], scores / 100, NaN where a seed is missing
    notes: tuple[str, ...]  # what was left out and why, and when the numbers are weak; one line each

    @property
    def seeds(self) -> int:
        """The smallest number of runs of any algorithm on any dataset."""
        return min((int((x == x).sum(0).min()) for x in self.scores.values()), default=0)


def reference(score: Score) -> str:
    """The source of the reference scores 0 and 100: "D4RL", "Minari", ..., "given"; "" for a raw score."""
    return "" if score.normalised is None else score.reference or "given"


def group(score: Score) -> str:
    """The group of a score: the scores that it may be averaged with. "" for a raw return, which is averaged with no
    other task's.

    "D4RL gym", "D4RL antmaze", ... for D4RL's own names; "NeoRL-2"; "Minari mujoco", "Minari adroit", ...; any other
    data by its suite, reference scores and family of tasks: "own files (D4RL references, gym)". A file that is called
    like a D4RL dataset is own data."""
    source = reference(score)
    return _group(score.dataset, score.env_id, score.suite, source) if source else ""


@functools.lru_cache(4096)
def _group(dataset: str, env_id: str, suite: str, source: str) -> str:
    parts = re.split(r"[/-]", dataset)
    known = lookup(dataset)
    if known is not None and known.ref_label == source:  # a benchmark's own dataset, by its exact name
        return f"D4RL {_FAMILIES.get(parts[0], parts[0])}" if source == "D4RL" else source
    if source == "Minari":
        kind = parts[1] if parts[0] == "D4RL" and len(parts) > 1 else parts[0]
        return f"Minari {_FAMILIES.get(kind, kind)}"
    family = next((name for pattern, name in _ENVIRONMENTS if re.search(pattern, env_id)), env_id)
    return f"{suite if suite not in ('', 'own') else 'own files'} ({source} references, {family})"


def groups(results: Results) -> tuple[list[Group], list[str]]:
    """(matrices of final scores by group, lines that say why other datasets are in none).

    An algorithm that has fewer than half of a group's datasets is left out; of the datasets those stay that all other
    algorithms have."""
    import numpy as np

    tables: dict[str, dict[str, dict[str, Cell]]] = defaultdict(lambda: defaultdict(dict))  # group -> label -> dataset
    raw: dict[str, None] = {}
    reasons = []
    for cell in results.cells():
        names = {group(s) for s in cell.scores}
        if len(names) > 1:
            reasons.append(
                f"{cell.dataset}: the seeds of {cell.label} were scored against different references, so they are in "
                "no average"
            )
        elif names == {""}:
            raw[cell.dataset] = None
        elif names:
            tables[names.pop()][cell.label][cell.dataset] = cell
    if raw:
        reasons.append(
            f"{', '.join(raw)}: no reference scores, so only raw returns are reported; returns of different tasks have "
            "different scales, and their average means nothing"
        )
    result = []
    for name, table in tables.items():
        all_datasets = list(dict.fromkeys(d for row in table.values() for d in row))
        labels_ = [label for label, row in table.items() if 2 * len(row) >= len(all_datasets)]
        notes = [
            f"{label} left out: finished on {len(row)} of {len(all_datasets)} datasets"
            for label, row in table.items()
            if label not in labels_
        ]
        datasets = [d for d in all_datasets if all(d in table[label] for label in labels_)]
        for d in all_datasets:
            if lacking := [label for label in labels_ if d not in table[label]]:
                notes.append(f"{d} left out: no final scores of {', '.join(lacking)}")
        if not datasets:
            reasons.append(f"{name}: no dataset has final scores of all of {', '.join(labels_)}")
            continue
        matrices = {label: _matrix([table[label][d].scores for d in datasets]) for label in labels_}
        counts = sorted({int(n) for x in matrices.values() for n in np.isfinite(x).sum(0)})
        if counts[0] < FEW_SEEDS:
            notes.append(
                f"cells of {counts[0]} seed{'s' if counts[0] > 1 else ''}: bootstrap intervals of fewer than "
                f"{FEW_SEEDS} are too narrow"
            )
        if len(counts) > 1:
            notes.append("numbers of seeds differ between cells: each dataset weighs the same")
        result.append(Group(name, tuple(datasets), matrices, tuple(notes)))
    return result, reasons


def settings_matrix(results: Results, dataset: str, algorithm: str) -> tuple[list[str], np.ndarray]:
    """(labels, final scores [runs, settings] / 100, or returns where not all are normalised) of one algorithm's
    settings on a dataset.

    What a grid or a search tried, for `offrl.statistics.aggregate.expected_online_performance`; NaN where a seed is
    missing.
    """
    cells = [c for c in results.cells() if (c.dataset, c.algorithm) == (dataset, algorithm) and c.scores]
    normalised = all(c.normalised for c in cells)
    return [c.label for c in cells], _matrix([c.scores for c in cells], normalised)


def _matrix(columns: list[tuple[Score, ...]], normalised: bool = True) -> np.ndarray:
    """[seeds, columns] of scores / 100, or of returns; NaN where a seed is missing."""
    import numpy as np

    seeds = sorted({s.seed for column in columns for s in column})
    matrix = np.full((len(seeds), len(columns)), np.nan)
    for j, column in enumerate(columns):
        for s in column:
            matrix[seeds.index(s.seed), j] = s.raw if not normalised or s.normalised is None else s.normalised / 100.0
    return matrix


def unlike(results: Results) -> list[str]:
    """Lines about scores that stand side by side and should not: other environments or versions, other training
    lengths.
    """
    lines = []
    by_dataset: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    steps: dict[tuple[str, str], set[int]] = defaultdict(set)
    packages: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    visited: set[tuple[Any, ...]] = set()
    for s in results.scores:
        conditions = s.env_id, s.packages, s.reference, s.scored_by
        kind = (s.dataset, s.algorithm, s.settings, s.suite, *conditions, s.normalised is None, s.final and s.step)
        if kind in visited:  # thousands of rows say the same
            continue
        visited.add(kind)
        by_dataset[s.dataset][s.provenance.place].add(results.label(s))
        if s.final:
            steps[s.dataset, results.label(s)].add(s.step)
        for package, version in s.provenance.versions.items():
            if name := group(s):
                packages[name][package].add(version)
    reported = set()
    for dataset, labels_by_env in by_dataset.items():
        if len(labels_by_env) > 1:
            reported.add(dataset)
            each = "; ".join(
                f"{', '.join(sorted(labels))} in {env_name or 'an unnamed environment'}"
                for env_name, labels in labels_by_env.items()
            )
            lines.append(
                f"{dataset}: scores of different environments or versions stand side by side and do not compare: {each}"
            )
    if not reported:
        for name, versions in packages.items():
            for package, values in versions.items():
                if len(values) > 1:
                    lines.append(
                        f"{name}: scores of {package} {' and '.join(sorted(values))} together; physics differs between "
                        "versions"
                    )
    for (dataset, label), lengths in steps.items():
        if len(lengths) > 1:
            lines.append(
                f"{dataset}: seeds of {label} were trained for {' and '.join(f'{n:,}' for n in sorted(lengths))} "
                "updates"
            )
    return lines


def differences(results: Results, datasets: Collection[str], labels: Sequence[str]) -> dict[str, str]:
    """{condition: its values and whose they are, as `yes (td3_bc), no (bc)`}, what moves scores most first, of the
    algorithms `labels`.

    Only what at least two of them have is compared; of one algorithm with several settings only what no label shows. A
    condition whose values are not the same on all `datasets` is BY_DATASET.
    """
    texts: dict[str, set[str]] = {}
    for dataset in datasets:
        cells = [c for c in results.cells() if c.dataset == dataset and c.label in labels]
        stored = {c.label: results.settings.get((c.dataset, c.algorithm, c.settings), {}) for c in cells}
        sides = {c.label: _conditions(c, stored[c.label]) for c in cells}
        if len(cells) > 1 and (unknown := [label for label, values in stored.items() if not values]):
            texts.setdefault("settings", set()).add(f"not stored of {some(unknown, MOST)}, so that more may differ")
        if len({c.algorithm for c in cells}) == 1:
            sides = {
                label: {k: v for k, v in side.items() if k in ("updates", "episodes")} for label, side in sides.items()
            }
        for name in dict.fromkeys(name for side in sides.values() for name in side):
            whose: dict[str, list[str]] = {}
            for label, side in sides.items():
                if name in side:
                    whose.setdefault(meaning(side[name]), []).append(label)
            if len(whose) > 1:
                values = {meaning(side[name]): side[name] for side in sides.values() if name in side}
                texts.setdefault(name, set()).add(
                    ", ".join(f"{_text(values[k])} ({some(who, MOST)})" for k, who in whose.items())
                )
    display_names = {**WORDS, **{name: name for name in texts if name not in WORDS}}
    return {
        word: texts[name].pop() if len(texts[name]) == 1 else BY_DATASET
        for name, word in display_names.items()
        if name in texts
    }


def sentence(conditions: Mapping[str, str]) -> str:
    """Conditions and their values in one line; an empty string without any."""
    return "; ".join(f"{name}: {values}" for name, values in conditions.items())


def difference_lines(results: Results) -> list[str]:
    """For a screen: a line for each set of conditions in which the algorithms of a dataset differ, with the datasets if
    not all.
    """
    where: dict[str, list[str]] = {}
    for dataset in results.datasets:
        labels = [c.label for c in results.cells() if c.dataset == dataset]
        if conditions := differences(results, [dataset], labels):
            more = f" and {len(conditions) - MOST} more" if len(conditions) > MOST else ""
            text = sentence(dict(list(conditions.items())[:MOST])) + more
            where.setdefault(text, []).append(dataset)
    return [
        f"differing besides the algorithm{'' if len(names) == len(results.datasets) else f' on {some(names, MOST)}'}: "
        f"{text}"
        for text, names in where.items()
    ]


def _conditions(cell: Cell, settings: Mapping[str, Any]) -> dict[str, Any]:
    """{setting: value} of what stands in WORDS, and of `dataset.`, as far as it is known."""
    known = {k: v for k, v in settings.items() if k in WORDS or k.startswith("dataset.")}
    critics = settings.get("algo.critic_hidden")
    if critics and "algo.hidden" in known and critics != known["algo.hidden"]:
        known["algo.hidden"] = f"{value_text(known['algo.hidden'])} and {value_text(critics)} of critics"
    for name, values in (("updates", {s.step for s in cell.scores}), ("episodes", {s.episodes for s in cell.scores})):
        if values:
            known[name] = max(values)
    return known


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else value_text(value)
