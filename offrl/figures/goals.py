"""The picture of the goals that a hierarchy asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from offrl.figures.open_loop import strips
from offrl.figures.style import COLOURS, INK, new_figure, own_settings, plain_axes, save

PICTURE = "goals.png"
DIMENSIONS = 4  # of vectors, at most
WINDOWS = 2


class Shown(NamedTuple):
    """Numbers or images of windows, each of S goals."""

    recorded: np.ndarray  # [K, B, ...], images in 0..1
    goals: np.ndarray  # [S, B, ...]
    imagined: np.ndarray  # [S, steps, B, ...], after 1, 2, ... steps of pursuing each


@own_settings()
def draw(out: Path, states: Sequence[int], numbers: Shown | None, images: Mapping[str, Shown]) -> None:
    """Two windows: of numbers the first dimensions as lines, with the goals and what is imagined from the states
    `states` on in which they are chosen; of images those states, the goals, and what comes of them, a row each.

    Raises UserError where the file cannot be written.
    """
    rows = [
        row for name, shown in images.items() for window in range(WINDOWS) for row in _rows(name, shown, window, states)
    ]
    lines = 0 if numbers is None else min(DIMENSIONS, numbers.goals.shape[-1])
    heights = [0.9 + 1.5 * lines] * bool(lines) + [0.95 * len(rows)] * bool(rows)
    figure, axes = new_figure("", height=sum(heights), width=9.5 if lines else 1.8 + 1.1 * len(states))
    axes.remove()
    parts = list(np.atleast_1d(figure.subfigures(len(heights), 1, height_ratios=heights)))
    if numbers is not None:
        _lines(parts.pop(0), numbers, states, lines)
    if rows:
        strips(parts[0], rows, [f"state {k}" for k in states])
    save(figure, out)


def _lines(figure: Any, shown: Shown, states: Sequence[int], count: int) -> None:
    windows = min(WINDOWS, shown.goals.shape[1])
    grid = figure.subplots(count, windows, squeeze=False, sharex=True, sharey="row")
    steps = shown.imagined.shape[1]
    for (dimension, window), axes in np.ndenumerate(grid):
        axes.plot(shown.recorded[:, window, dimension], color=INK, linewidth=1.4, label="recorded")
        for i, state in enumerate(states):
            first, goal = shown.recorded[state, window, dimension], shown.goals[i, window, dimension]
            label = (None, None) if i else ("goal", f"imagined: the worker's {steps} steps towards it")
            axes.hlines(goal, state, state + steps, color=COLOURS[1], linewidth=2.4, label=label[0])
            way = [first, *shown.imagined[i, :, window, dimension]]
            axes.plot(np.arange(state, state + steps + 1), way, color=COLOURS[0], linewidth=1.6, label=label[1])
            axes.plot(state, first, color=COLOURS[0], marker="o", markersize=4)
        last = dimension == count - 1
        plain_axes(axes, f"state of window {window + 1}" if last else "", "" if window else f"observation[{dimension}]")
    figure.legend(
        *grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False, fontsize=9
    )


def _rows(name: str, shown: Shown, window: int, states: Sequence[int]) -> list[tuple[str, list[np.ndarray | None]]]:
    """(label, an image for each of the states)."""
    steps = shown.imagined.shape[1]
    if window >= shown.goals.shape[1]:
        return []
    return [
        (name, [shown.recorded[k, window] for k in states]),
        ("goal", list(shown.goals[:, window])),
        (f"imagined, {steps} on", list(shown.imagined[:, -1, window])),
        (f"recorded, {steps} on", [shown.recorded[k + steps, window] for k in states]),
    ]
