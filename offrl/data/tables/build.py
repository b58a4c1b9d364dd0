"""From chosen columns of a table to `RawData`: rows in the order of time, episodes, gaps, actions of their kind."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from offrl.data.memory import Memory, chunks
from offrl.data.names import RLDS, VECTORS, column_of
from offrl.data.raw import RawData, canonical, ends_from, lost
from offrl.data.tables import values as cells
from offrl.data.tables.actions import as_actions, is_one_hot
from offrl.data.tables.mapping import Chosen, Term, choose, left_over, refuse_unread, usual_columns
from offrl.data.tables.steps import describe
from offrl.data.tables.table import Table
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig

MARKS = ("terminations", "truncations", "dones", "episode_ends")  # flags of ends
APART = (*MARKS, "episode_ids", "time", "actions", "observations", "final_observations")  # columns that `read_chosen` treats apart
FIRST = 64  # rows of actions that are looked at before all are


def build(
    table: Table,
    config: DatasetConfig,
    memory: Memory | None = None,
    optional: Collection[str] = (),
    name: str = "",
    source: str = "file",
    example: str = "",
) -> RawData:
    """The data of a table. optional: columns of ours that may be missing. example: see `choose`. Raises UserError."""
    fields = {column_of(column): key for column, key in config.fields.items()}
    if (time := getattr(table, "time", "")) and not usual_columns("time", table.names):
        fields.setdefault("time", time)
    chosen = choose(table.names, fields, table.where, optional, example, table.kinds)
    refuse_unread(table.names, chosen, fields, table.where)
    raw = read_chosen(table, chosen, config, memory, name, source)
    if text := left_over(table, chosen, [c for c in VECTORS if c not in fields]):
        raw.note(text)
    return raw


def read_chosen(
    table: Table, chosen: Chosen, config: DatasetConfig, memory: Memory | None = None, name: str = "", source: str = "file"
) -> RawData:
    """The data of the columns `chosen` of a table. Raises UserError."""
    where, memory = table.where, memory or Memory()
    raw = RawData({}, name=name, source=source, path="" if source == "arrays" else where)
    raw.named = {c: tuple(part.column for part in parts) for c, parts in chosen.items()}
    columns = _Columns(table, chosen, config, memory, raw)
    for text in getattr(table, "notes", ()):
        raw.note(text)
    raw.columns["observations"] = columns.ours("observations")
    rows = raw.rows
    marks = {c: columns.flags(c, rows) for c in MARKS if c in chosen}
    order, ends = _episodes(raw, chosen, columns, rows, marks, config.max_gap)
    if order is not None:
        if "final_observations" in chosen:
            raise UserError(f"{where}: final_observations stand in the order of the episodes, and the rows are not sorted: sort them first")
        marks = {c: flags[order] for c, flags in marks.items()}
        columns.order = order
        raw.columns["observations"] = columns.ordered("observations", raw.columns["observations"])
    if "episode_ends" in marks:
        ends = marks["episode_ends"] if ends is None else ends | marks["episode_ends"]
    raw.episode_ends = ends
    raw.columns |= {c: marks[c] for c in ("terminations", "truncations") if c in marks}
    if "dones" in marks:
        _settle_dones(raw, marks["dones"])
    for column in chosen:
        if column not in APART:
            raw.columns[column] = columns.ours(column)
    if "final_observations" in chosen:
        raw.final_observations = canonical("next_observations", columns.values("final_observations"), where)
    if "actions" in chosen:
        _set_actions(raw, chosen["actions"], columns, config)
    if set(RLDS[1:]) <= {p.column for c in MARKS for p in chosen.get(c, ())}:
        _drop_last_steps(raw, marks["episode_ends"])
    if config.missing == "forward":
        _fill(raw)
    return raw


class _Columns:
    """The chosen columns of a table, in the order of the rows; where it can be, each is read when it is needed."""

    def __init__(self, table: Table, chosen: Chosen, config: DatasetConfig, memory: Memory, raw: RawData) -> None:
        self.table, self.chosen, self.memory, self.raw = table, chosen, memory, raw
        self.exact = _exact(chosen, config)
        self.order: np.ndarray | None = None
        wanted = dict.fromkeys(part.column for parts in chosen.values() for part in parts)
        self.kept = {} if table.by_column else table.read(list(wanted), self.exact)

    @property
    def files(self) -> np.ndarray | None:
        """Of several files: which one a row is from."""
        return self.kept.get("\0file")

    def __getitem__(self, name: str) -> np.ndarray:
        values = self.kept[name] if self.kept else self.table.read([name], self.exact)[name]
        return values if self.order is None or len(values) != len(self.order) else values[self.order]

    def single(self, column: str) -> np.ndarray:
        """The values [R] of a column of ours that is one of the table's. Raises UserError for another shape."""
        name = self.chosen[column][0].column
        values = self[name]
        values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
        rows = self.raw.rows
        if values.shape != (rows,):
            raise UserError(
                f"{self.table.where}: column '{name}' ({column}) has shape {list(values.shape)}; one value for each of {rows} rows is due"
            )
        return values

    def flags(self, column: str, rows: int) -> np.ndarray:
        """The flags of a column of ours, bool [R]; of episode_ends also from row numbers (see `ends_from`)."""
        name, where = self.chosen[column][0].column, self.table.where
        if column == "episode_ends":
            values = self[name]
            marks = ends_from(cells.flags(values, name, where), rows, where)
            assert marks is not None
            return marks
        array = self.array(column)
        values = cells.flags(self[name] if array is None else array, name, where)
        return canonical("truncations" if column == "dones" else column, values, where)

    def ordered(self, column: str, values: np.ndarray) -> np.ndarray:
        """Values [R, ...] in the order of the rows, in memory of their kind."""
        if self.order is None or len(values) != len(self.order):
            return values
        out = self.memory.empty(column, values.shape, values.dtype)
        for part in chunks(len(out)):
            out[part] = values[self.order[part]]
        return out

    def ours(self, column: str) -> np.ndarray:
        """A column of ours in its dtype and rank."""
        return canonical(column, self.values(column), self.table.where, notes=self.raw.notes)

    def array(self, column: str) -> np.ndarray | None:
        """The array that a column of ours is in the table; None where it is made of others, or of texts."""
        parts = self.chosen[column]
        plain = len(parts) == 1 and parts[0].plain
        values = self.table.array(parts[0].column, column, self.memory, self.raw.notes) if plain else None
        return None if values is None else self.ordered(column, values)

    def values(self, column: str) -> np.ndarray:
        """The values of a column of ours, [R, ...] or, of several of the table's, [R, parts]."""
        parts = self.chosen[column]
        if (array := self.array(column)) is not None:
            return array
        blocks = [self.scaled(parts[0])]
        if len(parts) == 1 and (column not in ("observations", "next_observations") or blocks[0].ndim > 1):
            return blocks[0]
        out = self.memory.empty(column, (len(blocks[0]), len(parts)), np.float32)
        for i, part in enumerate(parts):
            values = self.scaled(part) if i else blocks[0]
            if len(values) != len(out):
                raise UserError(
                    f"{self.table.where}: column '{part.column}' has {len(values)} rows, and '{parts[0].column}' has {len(out)}"
                )
            if values.ndim > 1:  # lists, or an array beside columns
                return np.concatenate([self._flat(column, p) for p in parts], 1)
            self._say_lost(column, part, values)
            with np.errstate(over="ignore"):
                out[:, i] = values
        return out

    def _flat(self, column: str, part: Term) -> np.ndarray:
        """The numbers of a column of the table as float32 [R, width]."""
        values = self.scaled(part)
        self._say_lost(column, part, values)
        return values.reshape(len(values), -1).astype(np.float32, copy=False)

    def scaled(self, part: Term) -> np.ndarray:
        """The numbers of a column of the table, times the scale of `part` plus its offset."""
        values = cells.numbers(self[part.column], part.column, self.table.where)
        return values if part.plain else values * part.scale + part.offset

    def _say_lost(self, column: str, part: Term, values: np.ndarray) -> None:
        if column != "next_observations" and (text := lost(part.column, values)):
            self.raw.note(text)


def _set_actions(raw: RawData, parts: tuple[Term, ...], columns: _Columns, config: DatasetConfig) -> None:
    """Actions of their kind, whether they are discrete, and the number of choices."""
    where = raw.where
    kind = "continuous" if config.action_kind == "auto" and config.action_low else config.action_kind
    array = columns.array("actions")
    given = [columns[p.column] if p.plain else columns.scaled(p) for p in parts] if array is None else [array]
    for part, values in zip(parts, given, strict=True):
        if len(values) != raw.rows and len(parts) > 1:
            raise UserError(f"{where}: column '{part.column}' has {len(values)} rows, and the observations have {raw.rows}")
    first = given[0]
    amounts = first.dtype.kind == "f" and (kind == "continuous" or (kind == "auto" and not is_one_hot(first[:FIRST])))
    if len(given) == 1 and (first.ndim > 2 or (first.ndim == 2 and amounts)):  # an array of amounts, or a fault that is told elsewhere
        actions, note = first, ""
    else:
        if len(given) == 1 and first.ndim == 2:
            parts, given = parts * first.shape[1], list(first.T)
        actions, raw.num_actions, note = as_actions(given, [p.column for p in parts], kind, where)
    raw.discrete = actions.ndim == 1
    if config.action_kind == "discrete" and raw.discrete and not raw.num_actions and len(actions):
        raw.num_actions = max(0, int(actions.max())) + 1
    raw.columns["actions"] = canonical("actions", actions, where, raw.discrete, raw.notes)
    if note:
        raw.note(note)


def _exact(chosen: Chosen, config: DatasetConfig) -> dict[str, str]:
    """See `Tabular.read`."""
    labels = len(chosen.get("actions", ())) == 1 and config.action_kind in ("auto", "discrete") and not config.action_low
    kinds = {
        "terminations": "whole",
        "truncations": "whole",
        "dones": "whole",
        "actions": "label" if labels else "whole",
        "episode_ids": "name",
    }
    times = {part.column for part in chosen.get("time", ())}
    parts = [(part, kind) for column, kind in kinds.items() for part in chosen.get(column, ()) if part.plain]
    return {part.column: kind for part, kind in parts if not (kind == "name" and part.column in times)}


def _settle_dones(raw: RawData, dones: np.ndarray) -> None:
    """Gym's `done` means either kind of end: which one it is where, by what else is marked. Raises UserError for contradictions."""
    word = raw.named["dones"][0]
    flags = {c: raw.columns[c] for c in ("terminations", "truncations") if c in raw.columns}
    known = np.logical_or.reduce(list(flags.values())) if flags else np.zeros(len(dones), bool)
    other = " and ".join(f"'{raw.named[c][0]}'" for c in flags)
    open_ends = np.flatnonzero(known & ~dones)
    if "terminations" in flags and len(open_ends):
        raise UserError(
            f"{raw.where}: row {int(open_ends[0])} is an end by {other}, and '{word}' does not mark it ({len(open_ends):,} such rows): "
            f"leave out the column that is wrong, or say dataset.fields.episode_ends={word}"
        )
    rest = dones & ~known
    if len(flags) == 2:
        if rest.any():
            raise UserError(
                f"{raw.where}: '{word}' marks row {int(np.argmax(rest))}, which neither {other.replace(' and ', ' nor ')} marks "
                f"({int(rest.sum()):,} such rows): leave one of the columns out, or say dataset.fields.episode_ends={word}"
            )
    elif "terminations" in flags:
        raw.columns["truncations"] = rest
        if rest.any():
            raw.note(f"'{word}' marks {int(rest.sum()):,} rows that {other} does not: these count as time-outs")
    elif "truncations" in flags:
        raw.columns["terminations"] = rest
        if both := int((dones & known).sum()):
            raw.note(f"'{word}' marks {both:,} time-outs as well: these count as time-outs")
    else:
        raw.columns["terminations"] = dones
        raw.note(
            f"'{word}' is taken for terminations: no future follows there. Where it also marks mere time limits, say "
            f"dataset.fields.episode_ends={word} dataset.fields.terminations=COLUMN"
        )


def _drop_last_steps(raw: RawData, last: np.ndarray) -> None:
    """Steps of RLDS: an episode's last one holds an observation alone, which becomes the successor of the row before it."""
    first = np.append(True, last[:-1])
    before = np.append(last[1:] & ~first[1:], False)  # rows that end an episode, for what follows holds an observation alone
    ends = before | (np.zeros(len(last), bool) if raw.episode_ends is None else raw.episode_ends & ~last)
    if len(left := np.flatnonzero(~last)):
        ends[left[-1]] = True
    rows = np.flatnonzero(ends)
    raw.final_known = before[rows]
    raw.final_observations = raw.columns["observations"][np.where(before, np.arange(len(last)) + 1, np.arange(len(last)))[rows]]
    terminations = np.append(raw.columns["terminations"][1:], False) & before
    raw.columns = {c: v[~last] for c, v in (raw.columns | {"terminations": terminations}).items()}
    raw.episode_ends = ends[~last]
    raw.note(
        f"'{RLDS[1]}' and '{RLDS[2]}' are RLDS's, whose last step of an episode holds an observation and no action: {int(last.sum()):,} "
        "such rows are left out. Where those are transitions of their own, give the columns other names"
    )


def _episodes(
    raw: RawData, chosen: Chosen, columns: _Columns, rows: int, marks: Mapping[str, np.ndarray], most: float
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(the order of the rows, or None where it stays; their episodes' ends [R], or None where only flags mark these)."""
    where, files = raw.where, columns.files
    ids = times = None
    dates = False
    if "episode_ids" in chosen:
        word = chosen["episode_ids"][0].column
        ids = cells.codes(columns.single("episode_ids"), word, where)
        if files is not None:
            ids = np.unique(np.stack([files, ids]), axis=1, return_inverse=True)[1].reshape(-1)
    elif files is not None:
        ids = files
    if "time" in chosen:
        word = chosen["time"][0].column
        times, dates = cells.seconds(columns.single("time"), word, where)
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
            last = ids[ends]
            later = np.ones(runs, bool)
            later[np.unique(last, return_index=True)[1]] = False
            row = int(np.flatnonzero(ends)[int(np.argmax(later)) - 1]) + 1
            raw.note(
                f"{raw.named['episode_ids'][0]}: {number:,} ids stand in {runs:,} runs of rows, each of which is an episode of its own; "
                f"the first that comes again does so at row {row}. Where equal ids are one episode, name the times (dataset.fields.time), "
                "by which rows are then sorted, or sort the rows"
            )
    if times is not None and rows > 1:
        ends = _in_time(raw, marks, times, dates, ends, order, most)
    elif most:
        raise UserError(f"{where}: dataset.max_gap needs times: dataset.fields.time=COLUMN")
    return order, ends


def _hour_twice(back: float, steps: np.ndarray) -> str:
    """What a step of `back` seconds, none or negative, may be besides rows out of order; steps: all of them."""
    if back < -3600.0 or (back == 0.0 and np.median(steps) < 1800.0):
        return ""
    return (
        ". Local times go back by an hour where summer time ends, and sorted rows would mix the two hours: then write the times in UTC, or "
        "with their offset (2024-10-27T02:10:00+01:00)"
    )


def _in_time(
    raw: RawData,
    marks: Mapping[str, np.ndarray],
    times: np.ndarray,
    dates: bool,
    ends: np.ndarray | None,
    order: np.ndarray | None,
    most: float,
) -> np.ndarray | None:
    """The ends of episodes with what times say about them. Raises UserError where time stands still or goes back within an episode."""
    where, word = raw.where, raw.named["time"][0]
    known = np.zeros(len(times), bool) if ends is None else ends.copy()
    for flags in marks.values():
        known |= flags if order is None else flags[order]
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
            + (_hour_twice(float(step[row]), step) if dates else "")
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
