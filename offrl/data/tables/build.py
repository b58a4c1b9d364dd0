"""From chosen columns of a table to `RawData`: rows in the order of time, episodes, gaps, actions of their kind."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

import numpy as np

from offrl.data.containers import rlds
from offrl.data.memory import Memory
from offrl.data.raw import RawData, canonical, canonical_name, ends_from, lost
from offrl.data.tables import values as cells
from offrl.data.tables.actions import as_actions
from offrl.data.tables.mapping import DONE, VECTORS, Chosen, Term, choose, left_over, seen_actions, usual_columns
from offrl.data.tables.steps import describe
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig


class Tabular(Protocol):
    """Named columns of R rows each."""

    where: str
    names: list[str]

    def read(self, wanted: Collection[str], exact: Mapping[str, str] = MappingProxyType({})) -> dict[str, np.ndarray]:
        """Columns [R]: numbers, times (datetime64) or texts (object).

        exact: the columns whose whole numbers must stay integers. Of these a "name" (1.10, 007) is no number unless all are whole, and a
        "label" is none where one is written with zeros before it.
        """

    def kinds(self) -> dict[str, str]:
        """What the columns hold, by their first rows or their types: number, text or time."""


def build(
    table: Tabular,
    config: DatasetConfig,
    memory: Memory | None = None,
    optional: Collection[str] = (),
    name: str = "",
    source: str = "file",
    example: str = "",
) -> RawData:
    """The data of a table. optional: columns of ours that may be missing. example: see `choose`. Raises UserError."""
    where, memory = table.where, memory or Memory()
    fields = {canonical_name(column, "dataset.fields"): key for column, key in config.fields.items()}
    if (time := getattr(table, "time", "")) and not usual_columns("time", table.names):
        fields.setdefault("time", time)
    chosen = choose(table.names, fields, where, optional, example, table.kinds)
    wanted = dict.fromkeys(part.column for parts in chosen.values() for part in parts)
    columns = table.read(list(wanted), _exact(chosen, config))
    rows = len(next(iter(columns.values())))
    files = columns.get("\0file")  # of several files: which one a row is from
    raw = RawData({}, name=name, source=source, path="" if source == "arrays" else where)
    raw.named = {c: tuple(part.column for part in parts) for c, parts in chosen.items()}
    for text in getattr(table, "notes", ()):
        raw.note(text)
    if text := left_over(table.names, chosen, table.kinds(), [c for c in VECTORS if c not in fields]):
        raw.note(text)
    if text := seen_actions(chosen):
        raw.note(text)
    order, ends = _episodes(raw, chosen, columns, rows, files, config.max_gap)
    if order is not None:
        columns = {k: v[order] for k, v in columns.items()}
    for column, parts in chosen.items():
        if column in ("episode_ids", "time", "episode_ends", "actions"):
            continue
        raw.columns[column] = canonical(column, _values(column, parts, columns, raw, memory), where, notes=raw.notes)
    if "terminations" in chosen and chosen["terminations"][0].column.lower() in DONE:
        _settle_done(raw, chosen)
    if "actions" in chosen:
        parts = chosen["actions"]
        given = [columns[p.column] if p.plain else _scaled(p, columns, where) for p in parts]
        if len(given) == 1 and given[0].ndim == 2:  # a list in each row of Parquet
            parts, given = parts * given[0].shape[1], list(given[0].T)
        kind = "continuous" if config.action_kind == "auto" and config.action_low else config.action_kind
        actions, raw.num_actions, note = as_actions(given, [p.column for p in parts], kind, where)
        raw.discrete = actions.ndim == 1
        if config.action_kind == "discrete" and raw.discrete and not raw.num_actions and len(actions):
            raw.num_actions = max(0, int(actions.max())) + 1
        raw.columns["actions"] = canonical("actions", actions, where, raw.discrete, raw.notes)
        if note:
            raw.note(note)
    if "episode_ends" in chosen:
        marks = ends_from(cells.flags(columns[chosen["episode_ends"][0].column], "episode_ends", where), rows, where)
        ends = marks if ends is None else ends | marks
    raw.episode_ends = ends
    if config.missing == "forward":
        _fill(raw)
    flags = {column: chosen[column][0].column for column in rlds.ENDS if column in chosen}
    if rlds.is_steps(flags):
        last = raw.columns["truncations"] if flags.get("truncations") == rlds.LAST else marks
        assert last is not None
        rlds.without_last(raw, last)
    return raw


def _exact(chosen: Chosen, config: DatasetConfig) -> dict[str, str]:
    """See `Tabular.read`."""
    labels = len(chosen.get("actions", ())) == 1 and config.action_kind in ("auto", "discrete") and not config.action_low
    kinds = {"terminations": "whole", "truncations": "whole", "actions": "label" if labels else "whole", "episode_ids": "name"}
    times = {part.column for part in chosen.get("time", ())}
    parts = [(part, kind) for column, kind in kinds.items() for part in chosen.get(column, ()) if part.plain]
    return {part.column: kind for part, kind in parts if not (kind == "name" and part.column in times)}


def _values(column: str, parts: tuple[Term, ...], columns: Mapping[str, np.ndarray], raw: RawData, memory: Memory) -> np.ndarray:
    """The values of one column of ours, [R] or [R, parts]."""
    where = raw.where
    if column in ("terminations", "truncations"):
        return cells.flags(columns[parts[0].column], parts[0].column, where)
    if len(parts) == 1 and column not in ("observations", "next_observations"):
        return _scaled(parts[0], columns, where)
    if any(columns[part.column].ndim > 1 for part in parts):  # lists in Parquet
        blocks = [_scaled(part, columns, where) for part in parts]
        for part, block in zip(parts, blocks, strict=True):
            _say_lost(raw, column, part, block)
        return np.concatenate([b.reshape(len(b), -1).astype(np.float32, copy=False) for b in blocks], 1)
    out = memory.empty(column, (len(columns[parts[0].column]), len(parts)), np.float32)
    for i, part in enumerate(parts):
        values = _scaled(part, columns, where)
        _say_lost(raw, column, part, values)
        with np.errstate(over="ignore"):
            out[:, i] = values
    return out


def _say_lost(raw: RawData, column: str, part: Term, values: np.ndarray) -> None:
    if column != "next_observations" and (text := lost(part.column, values)):
        raw.note(text)


def _scaled(part: Term, columns: Mapping[str, np.ndarray], where: str) -> np.ndarray:
    values = cells.numbers(columns[part.column], part.column, where)
    return values if part.plain else values * part.scale + part.offset


def _settle_done(raw: RawData, chosen: Chosen) -> None:
    """`done` is Gym's word for both kinds of ends: rows that are time-outs as well are none of terminations."""
    word, done = chosen["terminations"][0].column, raw.columns["terminations"]
    if "truncations" not in raw.columns:
        raw.note(
            f"'{word}' is taken for terminations: no future follows there. Where it also marks mere time limits, say "
            f"dataset.fields.episode_ends={word} dataset.fields.terminations=COLUMN"
        )
    elif (both := done & raw.columns["truncations"]).any():
        raw.columns["terminations"] = done & ~both
        raw.note(f"'{word}' marks {int(both.sum()):,} time-outs as well: these count as time-outs")


def _episodes(
    raw: RawData, chosen: Chosen, columns: Mapping[str, np.ndarray], rows: int, files: np.ndarray | None, most: float
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(the order of the rows, or None where it stays; their episodes' ends [R], or None where only flags mark these)."""
    where = raw.where
    ids = times = None
    dates = False
    if "episode_ids" in chosen:
        word = chosen["episode_ids"][0].column
        ids = cells.codes(columns[word], word, where)
        if files is not None:
            ids = np.unique(np.stack([files, ids]), axis=1, return_inverse=True)[1].reshape(-1)
    elif files is not None:
        ids = files
    if "time" in chosen:
        word = chosen["time"][0].column
        times, dates = cells.seconds(columns[word], word, where)
    order = None
    if times is not None and ids is not None and rows:
        order = np.lexsort((times, ids)) if "episode_ids" in chosen else None
        if order is not None and (moved := int((order != np.arange(rows)).sum())):
            raw.note(f"rows are sorted by {raw.named['episode_ids'][0]} and {raw.named['time'][0]}: {moved:,} stood elsewhere")
            times, ids = times[order], ids[order]
        else:
            order = None
    ends = None
    if ids is not None:
        ends = np.append(ids[1:] != ids[:-1], True)[:rows]
        runs = int(ends.sum())
        if runs > (number := len(np.unique(ids))):
            raw.note(
                f"{raw.named['episode_ids'][0]}: {number:,} values stand in {runs:,} runs of rows, each of which is an episode of its own. "
                "Where equal ones are one episode, name the times (dataset.fields.time), by which rows are then sorted, or sort the rows"
            )
    if times is not None and rows > 1:
        ends = _in_time(raw, chosen, columns, times, dates, ends, order, most)
    elif most:
        raise UserError(f"{where}: dataset.max_gap needs times: dataset.fields.time=COLUMN")
    return order, ends


def _in_time(
    raw: RawData,
    chosen: Chosen,
    columns: Mapping[str, np.ndarray],
    times: np.ndarray,
    dates: bool,
    ends: np.ndarray | None,
    order: np.ndarray | None,
    most: float,
) -> np.ndarray | None:
    """The ends of episodes with what times say about them. Raises UserError where time stands still or goes back within an episode."""
    where, word = raw.where, raw.named["time"][0]
    known = np.zeros(len(times), bool) if ends is None else ends.copy()
    for column in ("terminations", "truncations", "episode_ends"):
        if column in chosen:
            flags = cells.flags(columns[chosen[column][0].column], column, where)
            flags = flags if order is None else flags[order]
            known |= np.nan_to_num(flags) > 0
    step = np.diff(times)
    inside = ~known[:-1]
    back = np.flatnonzero((step < 0) & inside)
    restart = len(back) and not dates and bool((times[back + 1] <= times[: back[0] + 1].min() + 1e-9).all())
    if restart:
        raw.note(f"{word} begins again {len(back):,} times, where nothing else marks an episode's end: each begins an episode")
        known[back] = True
        ends = known if ends is None else ends | known
        ends[-1] = True
        inside = ~known[:-1]
    bad = np.flatnonzero((step <= 0) & inside)
    if len(bad):
        row = int(bad[0])
        what = "is the same as" if step[row] == 0 else f"goes back from {cells.shown_time(times[row], dates)} to"
        raise UserError(
            f"{where}: '{word}' {what} {cells.shown_time(times[row + 1], dates)} in row {row + 1}, inside an episode ({len(bad):,} such "
            "rows): sort the rows by time, remove doubles, or name the column that tells episodes apart (dataset.fields.episode_ids=COLUMN)"
        )
    if not inside.any():
        return ends
    if most:
        wide = np.flatnonzero((step > most) & inside)
        inside[wide] = False
        ends = np.zeros(len(times), bool) if ends is None else ends
        ends[wide] = True
        ends[-1] = True
        raw.note(f"{len(wide):,} gaps in {word} longer than {cells.shown_span(most, dates)} (dataset.max_gap) each begin an episode")
    for text in describe(word, step, inside, dates):
        raw.note(text)
    if ends is None and not known.any():
        ends = np.zeros(len(times), bool)
        ends[-1] = True
        raw.note(
            "nothing but time marks episodes: all rows are one, which stops at the last row (dataset.max_gap or dataset.fields.episode_ids)"
        )
    return ends


def _fill(raw: RawData) -> None:
    """dataset.missing=forward: in observations the last value before, in the same episode, where there is none."""
    observations = raw.columns["observations"]
    gaps = ~np.isfinite(observations)
    if observations.ndim != 2 or not gaps.any():
        return
    from offrl.data.infer import find_ends

    ends = find_ends(replace(raw, columns={k: v for k, v in raw.columns.items() if k != "next_observations"}))
    start = np.concatenate([[0], np.flatnonzero(ends)[:-1] + 1])
    first = np.repeat(start, np.diff(np.append(start, len(ends))))[:, None]
    rows = np.where(gaps, -1, np.arange(len(ends))[:, None])
    last = np.maximum.accumulate(rows, 0)
    last = np.where(last >= first, last, np.arange(len(ends))[:, None])  # nothing came before: the gap stays, and is refused
    raw.columns["observations"] = np.take_along_axis(observations, last, 0)
    filled = int(gaps.sum() - (~np.isfinite(raw.columns["observations"])).sum())
    raw.note(f"{filled:,} missing values of observations are the last ones before them (dataset.missing=forward)")
