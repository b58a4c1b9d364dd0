"""Episodes of a table: by ids, times and flags; what `done` means; steps of RLDS; observations that are missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from offrl.data.raw import RawData, bounds_of
from offrl.data.tables import values as cells
from offrl.data.tables.columns import Columns
from offrl.data.tables.mapping import Chosen
from offrl.errors import UserError

REGULAR = 0.9  # share of the steps that are like those around them, from which on the others are gaps or changes
ALIKE = 0.1  # difference up to which two steps are alike
# times the steps around, that a gap is longer than: where steps are regular, and where they are not
WIDE, OUTAGE = (1.5, 10.0)
CHANGED, LEAPT = 1.25, 10.0  # ratio of a rate to the one before, likewise
AROUND = 15  # steps before and after that are looked at
PART = 1 << 16  # steps at once


def settle_dones(raw: RawData, dones: np.ndarray) -> None:
    """Gym's `done` means either kind of end: which one it is where, by what else is marked. Raises UserError for
    contradictions.
    """
    word = raw.source_columns["dones"][0].name
    flags = {c: raw.columns[c] for c in ("terminations", "truncations") if c in raw.columns}
    known = np.logical_or.reduce(list(flags.values())) if flags else np.zeros(len(dones), bool)
    other = " and ".join(f"'{raw.source_columns[c][0].name}'" for c in flags)
    open_ends = np.flatnonzero(known & ~dones)
    if "terminations" in flags and len(open_ends):
        raise UserError(
            f"{raw.where}: row {int(open_ends[0])} is an end by {other}, and '{word}' does not mark it "
            f"({len(open_ends):,} such rows): leave out the column that is wrong, or say "
            f"dataset.fields.episode_ends={word}"
        )
    other_ends = dones & ~known
    if len(flags) == 2:
        if other_ends.any():
            raise UserError(
                f"{raw.where}: '{word}' marks row {int(np.argmax(other_ends))}, which neither "
                f"{other.replace(' and ', ' nor ')} marks ({int(other_ends.sum()):,} such rows): leave one of the "
                f"columns out, or say dataset.fields.episode_ends={word}"
            )
    elif "terminations" in flags:
        raw.columns["truncations"] = other_ends
        if other_ends.any():
            raw.note(f"'{word}' marks {int(other_ends.sum()):,} rows that {other} does not: these count as time-outs")
    elif "truncations" in flags:
        raw.columns["terminations"] = other_ends
        if both := int((dones & known).sum()):
            raw.note(f"'{word}' marks {both:,} time-outs as well: these count as time-outs")
    else:
        raw.columns["terminations"] = dones
        raw.note(
            f"'{word}' is taken for terminations: no future follows there. Where it also marks mere time limits, say "
            f"dataset.fields.episode_ends={word} dataset.fields.terminations=COLUMN"
        )


def mark_episodes(
    raw: RawData, chosen: Chosen, columns: Columns, rows: int, marks: Mapping[str, np.ndarray], most: float
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(the order of the rows, or None where it stays; their episodes' ends [R], or None where only flags mark
    these).
    """
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
    order: np.ndarray | None = None
    if times is not None and ids is not None and "episode_ids" in chosen:
        by_time = np.lexsort((times, ids))
        if moved := int((by_time != np.arange(rows)).sum()):
            order = by_time
            raw.note(
                f"rows are sorted by {raw.source_columns['episode_ids'][0].name} and "
                f"{raw.source_columns['time'][0].name}: {moved:,} stood elsewhere"
            )
            times, ids = times[order], ids[order]
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
                f"{raw.source_columns['episode_ids'][0].name}: {number:,} ids stand in {runs:,} runs of rows, each of "
                f"which is an episode; the first that comes again does so at row {row}. Where equal ids are one "
                "episode, name the times (dataset.fields.time), by which rows are then sorted, or sort the rows"
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
        ". Local times go back by an hour where summer time ends, and sorted rows would mix the two hours: then write "
        "the times in UTC, or with their offset (2024-10-27T02:10:00+01:00)"
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
    """The ends of episodes with what times say about them. Raises UserError where time stands still or goes back within
    an episode.
    """
    where, word = raw.where, raw.source_columns["time"][0].name
    known = np.zeros(len(times), bool) if ends is None else ends.copy()
    for flags in marks.values():
        known |= flags if order is None else flags[order]
    step = np.diff(times)
    inside = ~known[:-1]
    back = np.flatnonzero((step < 0) & inside)
    restart = len(back) and not dates and bool((times[back + 1] <= times[: back[0] + 1].min() + 1e-9).all())
    if restart:
        raw.note(
            f"{word} begins again {len(back):,} times, where nothing else marks an episode's end: each begins an "
            "episode"
        )
        known[back] = True
        ends = known if ends is None else ends | known
        ends[-1] = True
        inside = ~known[:-1]
    bad = np.flatnonzero((step <= 0) & inside)
    if len(bad):
        row = int(bad[0])
        relation = "is the same as" if step[row] == 0 else f"goes back from {cells.shown_time(times[row], dates)} to"
        raise UserError(
            f"{where}: '{word}' {relation} {cells.shown_time(times[row + 1], dates)} in row {row + 1}, inside an "
            f"episode ({len(bad):,} such rows): sort the rows by time, remove doubles, or name the column that tells "
            "episodes apart (dataset.fields.episode_ids=COLUMN)"
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
        raw.note(
            f"{len(wide):,} gaps in {word} longer than {cells.shown_span(most, dates)} (dataset.max_gap) each begin an "
            "episode"
        )
    for text in _describe_steps(word, step, inside, dates):
        raw.note(text)
    if ends is None and not known.any():
        ends = np.zeros(len(times), bool)
        ends[-1] = True
        raw.note(
            "nothing but time marks episodes: all rows are one, which stops at the last row (dataset.max_gap or "
            "dataset.fields.episode_ids)"
        )
    return ends


def fill_forward(raw: RawData) -> None:
    """dataset.missing=forward: in observations the last value before, in the same episode, where there is none."""
    observations = raw.columns["observations"]
    gaps = ~np.isfinite(observations)
    if observations.ndim != 2 or not gaps.any():
        return
    from offrl.data.raw.infer import find_ends

    ends = find_ends(replace(raw, columns={k: v for k, v in raw.columns.items() if k != "next_observations"}))
    start, stop = bounds_of(ends)
    first = np.repeat(start, stop - start)[:, None]
    rows = np.where(gaps, -1, np.arange(len(ends))[:, None])
    last = np.maximum.accumulate(rows, 0)
    # nothing came before: the gap stays, and is refused
    last = np.where(last >= first, last, np.arange(len(ends))[:, None])
    raw.columns["observations"] = np.take_along_axis(observations, last, 0)
    filled = int(gaps.sum() - (~np.isfinite(raw.columns["observations"])).sum())
    raw.note(f"{filled:,} missing values of observations are the last ones before them (dataset.missing=forward)")


def _describe_steps(word: str, step: np.ndarray, inside: np.ndarray, dates: bool) -> list[str]:
    """What to say of the steps [R - 1] of the column `word`, of which those `inside` episodes [R - 1] count."""
    rows = np.flatnonzero(inside)
    steps = step[inside]
    usual = float(np.median(steps)) if len(steps) else 0.0
    if not len(steps) or (np.abs(steps - usual) < ALIKE * usual).all():
        return []
    before, after, most = _around(steps, usual)
    near = _like(steps, before) | _like(steps, after)
    follows = np.diff(rows) == 1  # steps of one episode
    pairs = _like(steps[1:], steps[:-1]) & follows
    near[1:] |= pairs
    near[:-1] |= pairs
    regular = float(near.mean()) >= REGULAR
    if regular:
        wide = np.flatnonzero(~near & (steps > WIDE * np.maximum(before, after)))
        regular_rows = np.flatnonzero(near)
        ratio = np.maximum(
            steps[regular_rows][1:] / steps[regular_rows][:-1], steps[regular_rows][:-1] / steps[regular_rows][1:]
        )
        changes = regular_rows[1:][ratio > CHANGED]
        rates = steps[regular_rows]
    else:
        wide = np.flatnonzero(steps > OUTAGE * most)
        leaps = np.maximum(before / after, after / before) > LEAPT
        leaps[:AROUND] = leaps[-AROUND:] = False
        changes = np.flatnonzero(leaps & ~np.append(False, leaps[:-1]))
        rates = np.concatenate([before[changes], after[changes]])
    notes = []
    if len(changes):
        first = int(changes[0])
        old, new = (
            (steps[regular_rows[regular_rows < first][-1]], steps[first]) if regular else (before[first], after[first])
        )
        spans = [cells.shown_span(float(v), dates) for v in (old, new, rates.min(), rates.max())]
        notes.append(
            f"the step of {word} changes {len(changes):,} time{'s' if len(changes) > 1 else ''}, first from {spans[0]} "
            f"to {spans[1]} at row {int(rows[first])}; it is between {spans[2]} and {spans[3]}. All steps count alike: "
            "the discount reaches further in time where they are longer. Bring the rows to one step, or train on the "
            "parts apart"
        )
    if len(wide):
        limit = WIDE * max(usual, float(rates.max())) if regular else OUTAGE * usual
        spans = [cells.shown_span(float(v), dates) for v in (min(limit, steps[wide].min()), steps[wide].max(), usual)]
        plural = f"{len(wide):,} gap{'s' if len(wide) > 1 else ''}"
        notes.append(
            f"{word} has {plural} longer than {spans[0]}, the longest of {spans[1]}, the first after row "
            f"{int(rows[wide[0]])}; the usual step is {spans[2]}. The next row counts as what followed: "
            f"dataset.max_gap={limit:g} begins an episode there instead"
        )
    return notes


def _like(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(a - b) < ALIKE * b)


def _around(steps: np.ndarray, usual: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The medians of the steps before and after each, and the longest of both, [n] each; near the ends those of one
    side.
    """
    count = len(steps)
    before, after = np.full(count, usual), np.full(count, usual)
    if count <= 2 * AROUND:
        sorted_steps = np.sort(steps)
        return (
            before,
            after,
            np.where(steps == sorted_steps[-1], sorted_steps[-2] if count > 1 else sorted_steps[-1], sorted_steps[-1]),
        )
    windows = np.lib.stride_tricks.sliding_window_view(steps, AROUND)
    starts = range(0, len(windows), PART)
    medians = np.concatenate([np.median(windows[i : i + PART], axis=1) for i in starts])
    longest = np.concatenate([windows[i : i + PART].max(1) for i in starts])
    before[AROUND:], after[:-AROUND] = medians[:-1], medians[1:]
    before[:AROUND], after[-AROUND:] = after[:AROUND], before[-AROUND:]
    longest_before, longest_after = np.zeros(count), np.zeros(count)
    longest_before[AROUND:], longest_after[:-AROUND] = longest[:-1], longest[1:]
    return before, after, np.maximum(longest_before, longest_after)
