"""Steps of time inside episodes: gaps, and sampling rates that change."""

from __future__ import annotations

import numpy as np

from offrl.data.tables.values import shown_span

REGULAR = 0.9  # share of the steps that are like those around them, from which on the others are gaps or changes
ALIKE = 0.1  # difference up to which two steps are alike
WIDE, OUTAGE = 1.5, 10.0  # times the steps around, that a gap is longer than: where steps are regular, and where they are not
CHANGED, LEAPT = 1.25, 10.0  # ratio of a rate to the one before, likewise
AROUND = 15  # steps before and after that are looked at
PART = 1 << 16  # steps at once


def describe(word: str, step: np.ndarray, inside: np.ndarray, dates: bool) -> list[str]:
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
        kept = np.flatnonzero(near)
        ratio = np.maximum(steps[kept][1:] / steps[kept][:-1], steps[kept][:-1] / steps[kept][1:])
        changes = kept[1:][ratio > CHANGED]
        rates = steps[kept]
    else:
        wide = np.flatnonzero(steps > OUTAGE * most)
        leaps = np.maximum(before / after, after / before) > LEAPT
        leaps[:AROUND] = leaps[-AROUND:] = False
        changes = np.flatnonzero(leaps & ~np.append(False, leaps[:-1]))
        rates = np.concatenate([before[changes], after[changes]])
    notes = []
    if len(changes):
        first = int(changes[0])
        old, new = (steps[kept[kept < first][-1]], steps[first]) if regular else (before[first], after[first])
        spans = [shown_span(float(v), dates) for v in (old, new, rates.min(), rates.max())]
        notes.append(
            f"the step of {word} changes {len(changes):,} time{'s' if len(changes) > 1 else ''}, first from {spans[0]} to {spans[1]} at "
            f"row {int(rows[first])}; it is between {spans[2]} and {spans[3]}. All steps count alike: the discount reaches further in time "
            "where they are longer. Bring the rows to one step, or train on the parts apart"
        )
    if len(wide):
        limit = WIDE * max(usual, float(rates.max())) if regular else OUTAGE * usual
        spans = [shown_span(float(v), dates) for v in (min(limit, steps[wide].min()), steps[wide].max(), usual)]
        plural = f"{len(wide):,} gap{'s' if len(wide) > 1 else ''}"
        notes.append(
            f"{word} has {plural} longer than {spans[0]}, the longest of {spans[1]}, the first "
            f"after row {int(rows[wide[0]])}; the usual step is {spans[2]}. The next row counts as what followed: "
            f"dataset.max_gap={limit:g} begins an episode there instead"
        )
    return notes


def _like(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(a - b) < ALIKE * b)


def _around(steps: np.ndarray, usual: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The medians of the steps before and after each, and the longest of both, [n] each; near the ends those of one side."""
    count = len(steps)
    before, after = np.full(count, usual), np.full(count, usual)
    if count <= 2 * AROUND:
        others = np.sort(steps)
        return before, after, np.where(steps == others[-1], others[-2] if count > 1 else others[-1], others[-1])
    windows = np.lib.stride_tricks.sliding_window_view(steps, AROUND)
    starts = range(0, len(windows), PART)
    medians = np.concatenate([np.median(windows[i : i + PART], axis=1) for i in starts])
    longest = np.concatenate([windows[i : i + PART].max(1) for i in starts])
    before[AROUND:], after[:-AROUND] = medians[:-1], medians[1:]
    before[:AROUND], after[-AROUND:] = after[:AROUND], before[-AROUND:]
    left, right = np.zeros(count), np.zeros(count)
    left[AROUND:], right[:-AROUND] = longest[:-1], longest[1:]
    return before, after, np.maximum(left, right)
