"""The picture of a model's report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from offrl.figures.style import COLOURS, GREY, colour_bar, new_grid, own_settings, plain_axes, save

MOST_NAMES = 24  # dimensions whose names are written
FLOOR = -0.5  # of the axis of R2


@own_settings()
def draw(result: Mapping[str, Any], out: Path) -> None:
    """Four panels, of all models of `result` (see quality_report.measure): R2 of each dimension, coverage, errors many
    steps ahead, and those of each dimension. Raises UserError where the file cannot be written."""
    models = result["models"]
    title = f"model of {result['dataset']}" + (f", {len(models)} models" if len(models) > 1 else "")
    figure, grid = new_grid(title, 2, 2, height=7.2, width=10.4)
    _explained(grid[0, 0], result)
    _coverage(grid[0, 1], result)
    horizons = [m["many_steps"] for m in models]
    if all(horizons):
        _many_steps(grid[1, 0], horizons)
        _each_dimension(grid[1, 1], result["dimensions"][:-1], horizons)
    else:
        for axes in grid[1]:
            axes.remove()
    figure.supxlabel(
        f"measured on {models[0]['rows']:,} rows of {result['measured_on']}",
        x=0.01,
        ha="left",
        fontsize=8.5,
        color=GREY,
    )
    save(figure, out)


def _legend(axes: Any, **options: Any) -> None:
    axes.legend(frameon=False, fontsize=8.5, **options)


def _short_names(names: list[str]) -> list[str]:
    return ["r" if n == "reward" else n.removeprefix("obs[").removesuffix("]") for n in names]


def _explained(axes: Any, result: Mapping[str, Any]) -> None:
    """A point for each dimension and model; what lies below the axis is put on its edge."""
    names = result["dimensions"]
    wide = len(names) > 40
    bottom = 0.0
    for key, colour, label in (("r2", COLOURS[4], "of the next value"), ("r2_change", COLOURS[0], "of its change")):
        values = np.array([m["one_step"][key] for m in result["models"]], dtype=np.float64).clip(FLOOR, None)  # [N, D]
        bottom = min(bottom, float(np.nanmin(values, initial=0.0)))
        for i, row in enumerate(values):
            axes.plot(
                range(len(names)),
                row,
                "o",
                color=colour,
                markersize=2.5 if wide else 5.5,
                alpha=0.8,
                label="" if i else label,
            )
    if len(names) <= MOST_NAMES:
        axes.set_xticks(range(len(names)), _short_names(names))
    axes.set_ylim(bottom - 0.02, 1.03)
    axes.set_xlim(-0.6, len(names) - 0.4)
    plain_axes(
        axes,
        "dimension of the observation" + ("; r: the reward" if len(names) <= MOST_NAMES else "; the last: the reward"),
        "R2 one step ahead",
    )
    _legend(axes, loc="lower right", bbox_to_anchor=(1.02, 0.985), ncols=2, handletextpad=0.1, columnspacing=0.8)


def _coverage(axes: Any, result: Mapping[str, Any]) -> None:
    levels = 100.0 * np.array(result["levels"])
    axes.plot([0, 100], [0, 100], color=GREY, linestyle=(0, (5, 4)), linewidth=1.2)
    lines = (
        ("coverage", COLOURS[1], "as learnt"),
        ("coverage_calibrated", COLOURS[2], "scaled"),
        ("coverage_recalibrated", COLOURS[0], "recalibrated"),
    )
    for key, colour, label in lines if result["own_deviations"] else lines[1:]:
        values = 100.0 * np.array([m["one_step"][key] for m in result["models"]]).mean(0)  # [D, L]
        low, middle, high = np.quantile(values, 0.1, 0), values.mean(0), np.quantile(values, 0.9, 0)
        axes.fill_between(levels, low, high, color=colour, alpha=0.14, linewidth=0)
        axes.plot(levels, middle, color=colour, linewidth=2.2, marker="o", markersize=3.5, label=label)
    axes.set_xlim(0, 101)
    axes.set_ylim(0, 101)
    plain_axes(axes, "level of the central interval (%)", "rows inside (%): mean of dimensions, and 80% of them")
    _legend(axes, loc="upper left")


def _many_steps(axes: Any, models: list[dict[str, Any]]) -> None:
    steps = np.arange(1, models[0]["horizon"] + 1)
    top = 0.0
    for kind, colour, label in (
        ("unchanged", GREY, "nothing changes"),
        ("sampled", COLOURS[1], "sampled"),
        ("mean", COLOURS[0], "mean of elites"),
    ):
        low, median, high = (np.mean([m[kind][k] for m in models], 0) for k in ("low", "median", "high"))
        if kind == "mean":
            axes.fill_between(steps, low, high, color=colour, alpha=0.14, linewidth=0)
        style: dict[str, Any] = (
            {"linestyle": (0, (5, 4)), "linewidth": 1.4} if kind == "unchanged" else {"linewidth": 2.2}
        )
        axes.plot(steps, median, color=colour, label=label, marker="o" if len(steps) == 1 else None, **style)
        top = max(top, 1.5 * float(median.max()))
    axes.set_ylim(0.0, top or 1.0)
    axes.margins(x=0.01)
    plain_axes(axes, "steps ahead", "error in standard deviations: median, and 80% of starts")
    _legend(axes, loc="upper left")


def _each_dimension(axes: Any, names: list[str], models: list[dict[str, Any]]) -> None:
    """Dimensions (top to bottom) and steps (left to right)."""
    unit = np.array(models[0]["std"], dtype=np.float64)
    relative = np.mean([m["rmse"] for m in models], 0) / np.where(unit > 0.0, unit, np.nan)  # [H, O]
    horizon = len(relative)
    image = axes.imshow(
        relative.T,
        aspect="auto",
        cmap="viridis",
        interpolation="nearest",
        vmin=0.0,
        vmax=1.0,
        extent=(0.5, horizon + 0.5, len(names) - 0.5, -0.5),
    )
    plain_axes(axes, "steps ahead", "RMSE of each dimension, in its standard deviations", grid="")
    axes.spines["bottom"].set_visible(False)
    if len(names) <= MOST_NAMES:
        axes.set_yticks(range(len(names)), _short_names(names))
    colour_bar(axes, image, fraction=0.04, pad=0.02, extend="max")
