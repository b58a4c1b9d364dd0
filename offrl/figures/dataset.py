"""The pictures of `offrl.report.dataset`. Each function returns a matplotlib Figure and its caption."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from offrl.data.raw import RawData
from offrl.data.tools.inspect import Report
from offrl.figures.style import COLOURS, GREY, INK, colour_bar, count_ticks, new_figure, new_grid, plain_axes

BINS = 40
MOST_POINTS = 2000  # of a scatter plot
MOST_ACTIONS = 32  # dimensions drawn
MOST_DIMENSIONS = 80  # of the observations drawn


def spread(values: np.ndarray) -> str:
    """`mean 2502, from 471.3 to 2983` of the finite ones."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return "not finite"
    left_out = f" ({len(values) - len(finite)} are not finite)" if len(finite) < len(values) else ""
    return f"mean {finite.mean():,.4g}, from {finite.min():,.4g} to {finite.max():,.4g}{left_out}"


def episodes(findings: Report) -> list[tuple[Any, str, str]]:
    """Histograms of returns and lengths, and returns in the order of the file: (figure, file name, caption) of each."""
    assert findings.returns is not None and findings.lengths is not None
    normalised = findings.scores is not None
    values = findings.scores if findings.scores is not None else findings.returns
    unit = f"normalised return ({findings.reference})" if normalised else "return of an episode"
    count = f"{len(values):,} episode{'s' if len(values) != 1 else ''}"
    pictures = [(_histogram(values, unit), "returns", f"Returns of {count}: {spread(values)}.")]
    pictures.append(
        (
            _histogram(findings.lengths.astype(np.float64), "steps of an episode"),
            "lengths",
            f"Lengths: {spread(findings.lengths)}.",
        )
    )
    if len(values) > 1:
        figure, axes = _small()
        keep = np.unique(np.linspace(0, len(values) - 1, min(len(values), MOST_POINTS)).astype(np.int64))
        axes.scatter(keep, values[keep], s=7 if len(keep) < 1000 else 3, color=COLOURS[0], alpha=0.5, linewidths=0)
        text = "Returns in the order of the file"
        window = len(values) // 20
        if window >= 5 and np.isfinite(values).all():
            means = np.convolve(values, np.full(window, 1 / window), "valid")
            axes.plot(np.arange(len(means)) + (window - 1) / 2, means, color=COLOURS[1], linewidth=2)
            text += f"; the line is the mean of {window} neighbours"
        count_ticks(axes.xaxis)
        plain_axes(axes, "number of the episode", unit, size=9)
        shown = f" {len(keep):,} of them are shown." if len(keep) < len(values) else ""
        pictures.append((figure, "order", f"{text}.{shown}"))
    return pictures


def rewards(values: np.ndarray, name: str = "reward of a step") -> tuple[Any, str]:
    """Histogram of rewards [n], or of their few distinct values as bars."""
    finite = values[np.isfinite(values)]
    levels, counts = np.unique(finite, return_counts=True)
    if 0 < len(levels) <= 8:
        figure = _bars([f"{v:.4g}" for v in levels], counts / len(finite), name)
        return figure, f"The {len(levels)} value{'s' if len(levels) > 1 else ''} of the {name}: {spread(values)}."
    return _histogram(finite, name), f"{name.capitalize()}: {spread(values)}."


def discrete(values: np.ndarray, num_actions: int) -> tuple[Any, str]:
    """Counts of the discrete actions [n]."""
    taken = values[np.isfinite(values)].astype(np.int64)
    levels, counts = np.unique(taken, return_counts=True)
    total = max(num_actions, int(levels.max(initial=-1)) + 1)
    if 0 < total <= 64 and levels.min(initial=0) >= 0:  # also those that nobody took
        counts = np.bincount(taken, minlength=total)
        levels = np.arange(total)
    missing = int((counts == 0).sum())
    never = f"; {missing} of {total} are never taken" if missing else ""
    return _bars(
        [str(v) for v in levels], counts / max(1, len(taken)), "action"
    ), f"Share of each discrete action{never}."


def edge_shares(raw: RawData, sample: Any, edge: float) -> list[tuple[float, int]]:
    """(share of rows on an end of the range, dimension) of continuous actions, the largest share first; none where no
    range is known.
    """
    actions = raw.columns.get("actions")
    if actions is None or raw.discrete or actions.ndim != 2 or raw.action_low is None or raw.action_high is None:
        return []
    low, high = _range(raw, actions.shape[1])
    values = sample.take(actions)
    shares = _on_end(values, low, high, edge).mean(0) if len(values) else np.zeros(len(low))
    return sorted(((float(s), d) for d, s in enumerate(shares)), key=lambda pair: -pair[0])


def actions(values: np.ndarray, raw: RawData, edge: float) -> tuple[Any, str]:
    """Histogram of each dimension of continuous actions [n, A]; the range is shaded, and the share on its ends in
    words.
    """
    width = min(values.shape[1], MOST_ACTIONS)
    columns = min(4, width)
    figure, grid = _grid(width, columns, 1.75)
    low, high = _range(raw, values.shape[1])
    known = raw.action_low is not None and raw.action_high is not None
    for d, axes in enumerate(grid[:width]):
        finite = values[np.isfinite(values[:, d]), d]
        title = f"{d}"
        if len(finite):
            margin = 1e-4 * (high[d] - low[d])
            outside = bool(((finite < low[d] - margin) | (finite > high[d] + margin)).any())
            counts, edges = _counts(finite, (np.fmin(finite.min(), low[d]), np.fmax(finite.max(), high[d])))
            axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=COLOURS[1 if outside else 0], linewidth=0)
            if known:
                share = 100 * float(_on_end(finite, low[d], high[d], edge).mean())
                title += f":  {share:.0f}% on an end" if share >= 0.5 else ""
                title += ", some outside" if outside else ""
                for bound in (low[d], high[d]):
                    axes.axvline(bound, color=GREY, linewidth=1, linestyle=(0, (3, 2)))
            if finite.min() == finite.max():
                title += "  (constant)"
        plain_axes(axes, heading=title, size=9)
        axes.set_yticks([])
        axes.tick_params(labelsize=8)
    more = f" The first {width} of {values.shape[1]} dimensions." if width < values.shape[1] else ""
    lines = " The dashed lines are the ends of the range." if known else " The range of the actions is not known."
    return (
        figure,
        f"Each dimension of the actions as recorded; above it, the share of rows on an end of the range.{lines}{more}",
    )


def observations(values: np.ndarray) -> tuple[Any, str]:
    """The spread of each dimension of observations [n, O]: lowest to highest, 1% to 99%, median."""
    width = min(values.shape[1], MOST_DIMENSIONS)
    figure, axes = new_figure("", height=max(2.2, 0.9 + 0.17 * width))
    positions, lows, highs = [], [], []
    for d in range(width):
        finite = values[np.isfinite(values[:, d]), d]
        if not len(finite):
            continue
        low, one, middle, most, high = np.quantile(finite, (0, 0.01, 0.5, 0.99, 1))
        constant = low == high
        axes.plot([low, high], [d, d], color="#aaaaaa", linewidth=1.4, solid_capstyle="butt", zorder=2)
        axes.plot([one, most], [d, d], color=COLOURS[0], linewidth=4.5, solid_capstyle="butt", alpha=0.75, zorder=3)
        axes.plot(
            [middle],
            [d],
            marker="D" if constant else "o",
            color=COLOURS[1] if constant else INK,
            markersize=4.5 if constant else 3.2,
            zorder=4,
        )
        positions.append(d)
        lows.append(low)
        highs.append(high)
    largest = max(map(abs, [*lows, *highs]), default=1.0)
    scale = ""
    if largest > 50:  # a few wide dimensions would hide the others
        axes.set_xscale("symlog", linthresh=1.0)
        from matplotlib.ticker import NullLocator

        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        scale = " Beyond -1 and 1 the axis is logarithmic."
    plain_axes(axes, grid="x")
    step = max(1, width // 40)
    axes.set_yticks(range(0, width, step))
    axes.set_ylim(width - 0.4, -0.6)
    axes.set_ylabel("dimension", fontsize=9.5, color=INK)
    more = f" The first {width} of {values.shape[1]} dimensions." if width < values.shape[1] else ""
    text = "Grey: lowest to highest; blue: 1% to 99% of the rows; dot: median; diamond: a dimension that never changes."
    return figure, text + scale + more


def coverage(values: np.ndarray, returns: np.ndarray | None, unit: str) -> tuple[Any, str]:
    """Density of observations [n, O] over their first two principal components, and the mean return of the episodes
    there.

    `returns`: [n], of the episode that each row belongs to. Dimensions are standardised first. No figure where there is
    no plane to draw."""
    from matplotlib.colors import LogNorm

    rows = np.isfinite(values).all(1)
    x, returns = values[rows], None if returns is None else returns[rows]
    if len(x) < 3:
        return None, "There are too few finite rows for principal components."
    deviation = x.std(0)
    x = (x - x.mean(0))[:, deviation > 1e-9 * np.maximum(1.0, np.abs(x).max(0))]
    if x.shape[1] < 2:
        return None, "Fewer than two dimensions of the observations change: there is no plane to draw."
    x /= x.std(0)
    variances, directions = np.linalg.eigh(x.T @ x / len(x))
    shares = variances[::-1] / variances.sum()
    plane = x @ directions[:, :-3:-1]
    several = returns is not None and np.isfinite(returns).all() and np.ptp(returns) > 0
    figure, grid = _grid(2 if several else 1, 2 if several else 1, 3.3)
    cells = 55
    counts, xs, ys = np.histogram2d(plane[:, 0], plane[:, 1], cells)
    pictures: list[tuple[np.ndarray, str, Any]] = [
        (np.where(counts > 0, counts, np.nan), "observations in a cell", LogNorm(1, max(2.0, counts.max())))
    ]
    if several:
        assert returns is not None
        sums = np.histogram2d(plane[:, 0], plane[:, 1], (xs, ys), weights=returns)[0]
        pictures.append(
            (np.where(counts > 0, sums / np.maximum(counts, 1), np.nan), f"mean {unit} of the episodes there", None)
        )
    for axes, (table, title, norm) in zip(grid, pictures, strict=False):
        image = axes.pcolormesh(xs, ys, table.T, cmap="viridis", norm=norm, rasterized=True)
        plain_axes(axes, f"component 1 ({100 * shares[0]:.0f}% of the variance)", title, grid="")
        axes.set_ylabel(f"component 2 ({100 * shares[1]:.0f}%)", fontsize=9.5, color=INK)
        bar = colour_bar(axes, image, 8, fraction=0.046, pad=0.03)
        bar.ax.minorticks_off()
        if norm is not None:
            count_ticks(bar.ax.yaxis)
    total = 100 * float(shares[:2].sum())
    needed = int(np.searchsorted(np.cumsum(shares), 0.9) + 1)
    text = (
        f"Observations on their first two principal components, each dimension standardised: {total:.0f}% of the "
        f"variance; 90% need {needed} of {len(shares)} components. Empty ground is where no policy can be judged from "
        "these data."
    )
    if omitted := int((~rows).sum()):
        text += f" {omitted:,} {'row that is' if omitted == 1 else 'rows that are'} not finite left out."
    return figure, text


def _on_end(values: np.ndarray, low: Any, high: Any, edge: float) -> np.ndarray:
    """Where values lie on an end of their range, or beyond it."""
    slack = edge * (high - low)
    return (values <= low + slack) | (values >= high - slack)


def _range(raw: RawData, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) of each dimension of the actions; NaN where they are not known."""
    low, high = (
        np.broadcast_to(np.asarray(v, np.float64).reshape(-1), (width,)) for v in (raw.action_low, raw.action_high)
    )
    return low, high


def _counts(values: np.ndarray, ends: tuple[float, float] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """A histogram over a range of positive width."""
    low, high = ends or (float(values.min()), float(values.max()))
    if not high - low > 1e-9 * max(1.0, abs(low), abs(high)):  # one value: a bar of its own
        low, high = low - 0.5 * max(1.0, abs(low)), high + 0.5 * max(1.0, abs(high))
    return np.histogram(values.astype(np.float64), BINS, (low, high))


def _histogram(values: np.ndarray, name: str) -> Any:
    figure, axes = _small()
    finite = values[np.isfinite(values)]
    if len(finite):
        counts, edges = _counts(finite)
        axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=COLOURS[0], linewidth=0)
        axes.axvline(float(finite.mean()), color=COLOURS[1], linewidth=1.6)
        if counts.max() > 50 * max(1, np.median(counts[counts > 0])):  # one tall bar would hide the rest
            axes.set_yscale("log")
            axes.tick_params(which="minor", length=0)
            name += "  (counts on a log scale)"
    count_ticks(axes.yaxis)
    plain_axes(axes, name, "", size=9)
    return figure


def _bars(names: list[str], shares: np.ndarray, label: str) -> Any:
    figure, axes = _small()
    axes.bar(range(len(names)), 100 * shares, 0.72, color=COLOURS[0], linewidth=0)
    step = math.ceil(len(names) / 16)
    axes.set_xticks(
        range(0, len(names), step), names[::step], rotation=0 if max(map(len, names), default=0) <= 6 else 30
    )
    plain_axes(axes, label, "% of the rows", size=9)
    return figure


def _small() -> tuple[Any, Any]:
    return new_figure("", height=2.7, width=4.4)


def _grid(count: int, columns: int, height: float) -> tuple[Any, list[Any]]:
    """A figure with `count` axes in rows of `columns`, each row `height` inches high."""
    rows, width = math.ceil(count / columns), 2.25 if columns > 2 else 4.4
    figure, axes_table = new_grid("", rows, columns, height * rows + 0.15, width * columns)
    grid = axes_table.ravel().tolist()
    for axes in grid[count:]:
        axes.remove()
    return figure, grid[:count]
