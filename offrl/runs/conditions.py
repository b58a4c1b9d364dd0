"""Conditions of a comparison: the settings of data, networks and length that algorithms which are compared do not share.

Published settings belong to their algorithms, so a score is of an algorithm with its settings; a comparison says where these differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offrl.settings.diff import meaning, value_text

if TYPE_CHECKING:
    from offrl.runs.results import Cell, Results

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


def differences(results: Results, datasets: Collection[str], labels: Sequence[str]) -> dict[str, str]:
    """{condition: its values and whose they are, as `yes (td3_bc), no (bc)`}, what moves scores most first, of the algorithms `labels`.

    Only what at least two of them have is compared; of one algorithm with several settings only what no label shows. A condition whose
    values are not the same on all `datasets` is BY_DATASET.
    """
    found: dict[str, set[str]] = {}
    for dataset in datasets:
        cells = [c for c in results.cells() if c.dataset == dataset and c.label in labels]
        sides = {c.label: _conditions(c, results.settings.get((c.dataset, c.algorithm, c.settings), {})) for c in cells}
        if len({c.algorithm for c in cells}) == 1:
            sides = {label: {k: v for k, v in side.items() if k in ("updates", "episodes")} for label, side in sides.items()}
        for name in dict.fromkeys(name for side in sides.values() for name in side):
            whose: dict[str, list[str]] = {}
            for label, side in sides.items():
                if name in side:
                    whose.setdefault(meaning(side[name]), []).append(label)
            if len(whose) > 1:
                values = {meaning(side[name]): side[name] for side in sides.values() if name in side}
                found.setdefault(name, set()).add(", ".join(f"{_text(values[k])} ({_several(who)})" for k, who in whose.items()))
    words = {**WORDS, **{name: name for name in found if name not in WORDS}}
    return {word: found[name].pop() if len(found[name]) == 1 else BY_DATASET for name, word in words.items() if name in found}


def sentence(conditions: Mapping[str, str]) -> str:
    """Conditions and their values in one line; an empty string without any."""
    return "; ".join(f"{name}: {values}" for name, values in conditions.items())


def lines(results: Results) -> list[str]:
    """For a screen: a line for each set of conditions in which the algorithms of a dataset differ, with the datasets if not all."""
    where: dict[str, list[str]] = {}
    for dataset in results.datasets:
        labels = [c.label for c in results.cells() if c.dataset == dataset]
        if found := differences(results, [dataset], labels):
            text = sentence(dict(list(found.items())[:MOST])) + (f" and {len(found) - MOST} more" if len(found) > MOST else "")
            where.setdefault(text, []).append(dataset)
    return [
        f"differing besides the algorithm{'' if len(places) == len(results.datasets) else f' on {_several(places)}'}: {text}"
        for text, places in where.items()
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


def _several(items: Sequence[str]) -> str:
    return ", ".join(items[:MOST]) + (f" and {len(items) - MOST} more" if len(items) > MOST else "")
