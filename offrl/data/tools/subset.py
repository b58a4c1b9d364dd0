"""A part of raw columns: some rows, or some episodes, as raw columns again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from offrl.data.memory import Memory
from offrl.data.raw import RawData, bounds_of, ends_of
from offrl.data.raw.infer import action_range, find_ends, starts_elsewhere
from offrl.data.raw.ranges import numbers_of, range_of
from offrl.data.raw.rows import not_finite_rows, outside_rows
from offrl.data.transforms.episodes import best_share, random_share
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig
from offrl.settings.field import setting


@dataclass
class Choice:
    """The part of a dataset that `subset` keeps: the settings are applied in this order, each to what the one before
    left.
    """

    rows: str = setting(
        "", "rows, such as 0:5000 (from 0; an end alone too: :5000); episodes are cut where the rows end"
    )
    episodes: Any = setting("", "episodes: 0:100, or a list [0,5,7]; negative numbers count from the end")
    drop_faulty: bool = setting(False, "leave out episodes with NaN, infinite values, or actions outside their range")
    min_return: float | None = setting(None, "episodes with at least this undiscounted return")
    max_return: float | None = setting(None, "episodes with at most this undiscounted return")
    top: float = setting(
        1.0, "this share of the episodes (at least one), the best by return; as dataset.top_fraction", high=1.0
    )
    fraction: float = setting(1.0, "this share of the episodes, drawn at random; as dataset.subsample", high=1.0)
    seed: int = setting(0, "decides which episodes fraction draws", low=0)


def settle(raw: RawData) -> np.ndarray:
    """Make what is inferred from the whole explicit, so that it holds for a part: ends, action range, number of
    actions.

    Returns the episodes' last rows, bool [R].
    """
    raw.settle_kind()
    ends = find_ends(raw)
    raw.episode_ends = ends.copy()
    raw.episode_ends[-1] = bool(raw.last_complete)
    if raw.discrete:
        raw.num_actions = raw.num_actions or int(raw.columns["actions"].max()) + 1
    else:
        action_range(raw)
    return ends


def take(raw: RawData, choice: Choice, memory: Memory, config: DatasetConfig | None = None) -> tuple[RawData, str]:
    """The part of `raw` (after `settle`) that `choice` names, and its description. Raises UserError where nothing is
    left.
    """
    ends = find_ends(raw)
    starts, stops = bounds_of(ends)
    steps: list[str] = []
    if choice.rows:
        first, last = range_of(choice.rows, raw.rows, "rows")
        starts, stops = np.maximum(starts, first), np.minimum(stops, last)
        mask = starts < stops
        starts, stops = starts[mask], stops[mask]
        steps.append(f"rows {first} to {last - 1}")
    faulty = None
    if choice.drop_faulty:
        bounds = np.stack([starts, stops], 1).reshape(-1)
        faulty = np.add.reduceat(np.append(_faulty_rows(raw, config), False), bounds)[::2] > 0
    returns = np.array([raw.columns["rewards"][a:b].sum(dtype=np.float64) for a, b in zip(starts, stops, strict=True)])
    numbers = select(choice, returns, steps, f"{raw.where}: no episode is left", int(ends.sum()), faulty)
    return _pieces(raw, ends, starts[numbers], stops[numbers], memory), ", ".join(steps)


def select(
    choice: Choice, returns: np.ndarray, steps: list[str], failure: str, total: int, faulty: np.ndarray | None = None
) -> np.ndarray:
    """The numbers of the episodes, with these returns [E], that `choice` keeps once `choice.rows` is applied; what is
    done is appended to `steps`.

    faulty: those to leave out, bool [E]. Raises UserError, which begins with `failure`, where none of `total` episodes
    is left.
    """
    numbers = np.arange(len(returns))
    if choice.episodes not in ("", None, []):
        numbers = numbers_of(choice.episodes, len(numbers))
        steps.append(f"episodes {choice.episodes}")
    if faulty is not None:
        steps.append(f"without {int(faulty[numbers].sum())} faulty episodes")
        numbers = numbers[~faulty[numbers]]
    if choice.min_return is not None or choice.max_return is not None:
        low = -np.inf if choice.min_return is None else choice.min_return
        high = np.inf if choice.max_return is None else choice.max_return
        numbers = numbers[(returns[numbers] >= low) & (returns[numbers] <= high)]
        steps.append(f"returns from {low:g} to {high:g}")
    for name in ("top", "fraction"):
        if not 0.0 < (share := getattr(choice, name)) <= 1.0:
            raise UserError(f"{name}={share:g} must be above 0 and at most 1")
    if choice.top < 1.0 and len(numbers):
        numbers = numbers[best_share(returns[numbers], choice.top)]
        steps.append(f"the best {choice.top:g}")
    if choice.fraction < 1.0 and len(numbers):
        numbers = numbers[random_share(len(numbers), choice.fraction, choice.seed)]
        steps.append(f"a share of {choice.fraction:g} (seed {choice.seed})")
    if not steps:
        raise UserError(
            "offrl data subset: say what to keep: rows, episodes, drop_faulty, min_return, max_return, top or fraction"
        )
    if not len(numbers):
        raise UserError(f"{failure} ({', '.join(steps)} of {total} episodes)")
    return numbers


def _faulty_rows(raw: RawData, config: DatasetConfig | None) -> np.ndarray:
    """Rows with values that are not finite, or with actions outside their range (unless these are clipped); bool
    [R].
    """
    bad = np.zeros(raw.rows, bool)
    for column in raw.columns.values():
        bad[not_finite_rows(column)] = True
    actions = raw.columns["actions"]
    if raw.discrete:
        return bad | (actions < 0) | (actions >= raw.num_actions)
    if config is None or not config.clip_actions:
        bad[outside_rows(actions, *action_range(raw))] = True
    return bad


def _pieces(raw: RawData, ends: np.ndarray, starts: np.ndarray, stops: np.ndarray, memory: Memory) -> RawData:
    """Rows starts[i] to stops[i] - 1, each inside one episode, as episodes of their own."""
    lengths = stops - starts
    after = np.cumsum(lengths)
    index = np.arange(int(after[-1])) + np.repeat(starts - (after - lengths), lengths)
    columns = {name: memory.taken(name, column, index) for name, column in raw.columns.items()}
    complete = ends[stops - 1]  # the piece goes to the end of its episode
    episode = np.cumsum(ends)[stops - 1] - complete
    following = np.minimum(stops, raw.rows - 1)

    def final(values: np.ndarray, column: np.ndarray) -> np.ndarray:
        return np.where(complete.reshape(-1, *(1,) * (values.ndim - 1)), values[episode], column[following])

    piece_ends = ends_of(lengths)
    piece_ends[-1] = bool(complete[-1]) and (stops[-1] < raw.rows or bool(raw.last_complete))
    part_of = replace(raw, columns=columns, episode_ends=piece_ends, jump_rows=None, warnings=[], notes=[])
    part_of.final_columns = {k: final(v, raw.columns[k]) for k, v in raw.final_columns.items()}
    if raw.final_observations is not None:
        part_of.final_observations = final(raw.final_observations, raw.columns["observations"])
    if raw.final_known is not None:
        part_of.final_known = raw.final_known[episode] | ~complete
    if "next_observations" in columns:
        unmarked = point_elsewhere(part_of, after - 1, starts_elsewhere(raw, np.flatnonzero(ends))[episode] & complete)
        if unmarked:
            part_of.warn(
                f"what {unmarked:,} terminals lead to is not known, and counts as known in so few episodes: the next "
                "one's start"
            )
    return part_of


def point_elsewhere(raw: RawData, last: np.ndarray, unknown: np.ndarray) -> int:
    """Mark successors that are unknown by making them the next episode's start; `last` rows and `unknown` are per
    episode.

    Returns how many that does not mark: terminals, where not all of them are unknown, or there is one only.
    """
    rows = last[unknown]
    raw.columns["next_observations"][rows] = raw.columns["observations"][(rows + 1) % raw.rows]
    return int((unknown & ~starts_elsewhere(raw, last)).sum())
