"""From chosen columns of a table to `RawData`: rows in the order of time, episodes, gaps, actions of their kind."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from offrl.data.containers import rlds
from offrl.data.dataset import ColumnSpec
from offrl.data.memory import IN_MEMORY, Memory
from offrl.data.raw import RawData, canonical
from offrl.data.tables.actions import as_actions, is_one_hot
from offrl.data.tables.columns import MARKS, Columns
from offrl.data.tables.episodes import fill_forward, mark_episodes, settle_dones
from offrl.data.tables.mapping import Chosen, Term, choose, left_over, refuse_unread, seen_actions, usual_columns
from offrl.data.tables.names import VECTORS, column_of
from offrl.data.tables.tabular import Tabular
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig

# columns that `read_chosen` treats apart
APART = (*MARKS, "episode_ids", "time", "actions", "observations", "final_observations")
FIRST = 64  # rows of actions that are looked at before all are


def build(
    table: Tabular,
    config: DatasetConfig,
    memory: Memory = IN_MEMORY,
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
    if text := seen_actions(chosen):
        raw.note(text)
    return raw


def read_chosen(
    table: Tabular,
    chosen: Chosen,
    config: DatasetConfig,
    memory: Memory,
    name: str,
    source: str,
) -> RawData:
    """The data of the columns `chosen` of a table. Raises UserError."""
    where = table.where
    raw = RawData({}, name=name, source=source, path="" if source == "arrays" else where)
    units = table.units
    raw.source_columns = {
        c: tuple(ColumnSpec(p.column, units.get(p.column, ""), p.scale, p.offset) for p in parts)
        for c, parts in chosen.items()
    }
    columns = Columns(table, chosen, config, memory, raw)
    for text in getattr(table, "notes", ()):
        raw.note(text)
    raw.columns["observations"] = columns.column("observations")
    raw.source_columns["observations"] = tuple(
        replace(spec, offset=columns.offsets[i], auto_offset=True) if i in columns.offsets else spec
        for i, spec in enumerate(raw.source_columns["observations"])
    )
    rows = raw.rows
    marks = {c: columns.flags(c, rows) for c in MARKS if c in chosen}
    order, ends = mark_episodes(raw, chosen, columns, rows, marks, config.max_gap)
    if order is not None:
        if "final_observations" in chosen:
            raise UserError(
                f"{where}: final_observations stand in the order of the episodes, and the rows are not sorted: sort "
                "them first"
            )
        marks = {c: flags[order] for c, flags in marks.items()}
        columns.order = order
        raw.columns["observations"] = columns.ordered("observations", raw.columns["observations"])
    if "episode_ends" in marks:
        ends = marks["episode_ends"] if ends is None else ends | marks["episode_ends"]
    raw.episode_ends = ends
    raw.columns |= {c: marks[c] for c in ("terminations", "truncations") if c in marks}
    if "dones" in marks:
        settle_dones(raw, marks["dones"])
    for column in chosen:
        if column not in APART:
            raw.columns[column] = columns.column(column)
    if "final_observations" in chosen:
        raw.final_observations = canonical("next_observations", columns.values("final_observations"), where)
    if "actions" in chosen:
        _set_actions(raw, chosen["actions"], columns, config)
    flags = {column: parts[0].column for column, parts in chosen.items() if column in rlds.ENDS}
    if rlds.is_steps(flags):
        rlds.without_last(raw, next(marks[column] for column, key in flags.items() if key == rlds.LAST))
    if config.missing == "forward":
        fill_forward(raw)
    return raw


def _set_actions(raw: RawData, parts: tuple[Term, ...], columns: Columns, config: DatasetConfig) -> None:
    """Actions of their kind, whether they are discrete, and the number of choices."""
    where = raw.where
    kind = "continuous" if config.action_kind == "auto" and config.action_low else config.action_kind
    array = columns.array("actions")
    recorded = [columns[p.column] if p.plain else columns.scaled(p) for p in parts] if array is None else [array]
    for part, values in zip(parts, recorded, strict=True):
        if len(values) != raw.rows and len(parts) > 1:
            raise UserError(
                f"{where}: column '{part.column}' has {len(values)} rows, and the observations have {raw.rows}"
            )
    first = recorded[0]
    amounts = first.dtype.kind == "f" and (kind == "continuous" or (kind == "auto" and not is_one_hot(first[:FIRST])))
    # an array of amounts, or a fault that is told elsewhere
    if len(recorded) == 1 and (first.ndim > 2 or (first.ndim == 2 and amounts)):
        actions, note = first, ""
    else:
        if len(recorded) == 1 and first.ndim == 2:
            names, recorded = [f"{parts[0].column}[{i}]" for i in range(first.shape[1])], list(first.T)
        else:
            names = [p.column for p in parts]
        actions, raw.num_actions, raw.labels, note = as_actions(recorded, names, kind, where)
    raw.discrete = actions.ndim == 1
    if config.action_kind == "discrete" and raw.discrete and not raw.num_actions and len(actions):
        raw.num_actions = max(0, int(actions.max())) + 1
    raw.columns["actions"] = canonical("actions", actions, where, raw.discrete, raw.notes)
    if note:
        raw.note(note)
