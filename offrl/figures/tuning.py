"""Pictures of a search over settings: rungs, parallel coordinates, slices, regret, estimates against the truth, Pareto
fronts.

Each function returns a matplotlib Figure, and takes numbers and names as they are; nothing is computed here but places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from offrl.errors import one_line
from offrl.figures.style import clip_height, label_ends, new_figure, plain_axes

if TYPE_CHECKING:
    from offrl.statistics.bootstrap import Curve

INK = "#333333"
FATES = {
    "chosen": "#009e73",
    "wild card": "#e69f00",
    "kept": "#0072b2",
    "kept for another reason": "#56b4e9",
    "dropped": "#808080",
}
WORST, MIDDLE, BEST = (0xD5, 0x5E, 0x00), (0xA3, 0x9C, 0x93), (0x00, 0x72, 0xB2)  # readable on white and on black
LEVELS = 9
MOST_NAMES = 14  # settings that are named at the end of their line
LONGEST = 22  # letters of a name in a picture
TICKS = 5
Z95 = 1.959964


def number(x: float) -> str:
    """A number of a table or an axis: four digits, and never more than five letters of zeros before them."""
    if not math.isfinite(x):
        return "\u2013"
    if x and (abs(x) < 1e-3 or abs(x) >= 1e6):
        mantissa, exponent = f"{x:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{x:.4g}" if abs(x) < 1e4 else f"{x:,.0f}"


def clipped(name: str) -> str:
    """A name as short as a picture needs it."""
    name = one_line(name)
    return name if len(name) <= LONGEST else name[: LONGEST - 2] + "\u2026"


def level_colour(share: float) -> str:
    """From the worst (0) to the best (1), in LEVELS steps."""
    step = round(min(1.0, max(0.0, share)) * (LEVELS - 1)) / (LEVELS - 1)
    low, high, part = (WORST, MIDDLE, 2.0 * step) if step < 0.5 else (MIDDLE, BEST, 2.0 * step - 1.0)
    return "#" + "".join(f"{round(a + part * (b - a)):02x}" for a, b in zip(low, high, strict=True))


@dataclass(frozen=True)
class SettingAxis:
    """An axis for one setting: a range, a logarithmic one, or places for listed values."""

    name: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    values: tuple[str, ...] = ()  # not empty: these stand side by side

    def place(self, value: Any) -> float:
        """Where a value stands, in [0, 1]; NaN for one that has no place. Of listed values `value` is the text of
        one.
        """
        if self.values:
            return (self.values.index(value) + 0.5) / len(self.values) if value in self.values else math.nan
        if not isinstance(value, (int, float)) or not math.isfinite(value) or (self.log and value <= 0.0):
            return math.nan
        low, high, x = (math.log(v) if self.log else v for v in (self.low, self.high, float(value)))
        return min(1.0, max(0.0, (x - low) / (high - low))) if high > low else 0.5

    def ticks(self) -> list[tuple[float, str]]:
        """(place, text) of what is written beside it."""
        if self.values:
            step = -(-len(self.values) // 12)
            return [(self.place(v), clipped(v)) for v in self.values[::step]]
        if not self.high > self.low:
            return [(0.5, number(self.low))]
        from matplotlib.ticker import LogLocator, MaxNLocator

        if self.log:
            subs = (
                (1.0,)
                if self.high / self.low > 200.0
                else (1.0, 2.0, 5.0)
                if self.high / self.low > 4.0
                else tuple(range(1, 10))
            )
            marks = LogLocator(subs=subs, numticks=40).tick_values(self.low, self.high)
        else:
            marks = MaxNLocator(TICKS).tick_values(self.low, self.high)
        inside = [float(m) for m in marks if self.low * (1 - 1e-9) - 1e-12 <= m <= self.high * (1 + 1e-9) + 1e-12]
        inside = inside[:: -(-len(inside) // 8)] if inside else [self.low, self.high]
        return [(self.place(m), number(m)) for m in inside]


def rungs(columns: Sequence[str], lines: Sequence[tuple[str, str, Sequence[tuple[int, int]]]], title: str = "") -> Any:
    """Who survived: the rank of each setting in each rung, 1 on top.

    columns: what the rungs are called; lines: (name, fate: a key of FATES, [(column, rank)]) of each setting.
    """
    lowest = max((rank for _, _, places in lines for _, rank in places), default=1)
    figure, axes = new_figure(title, height=min(5.2, 1.5 + 0.17 * lowest), width=4.7)
    order = list(FATES)[::-1]
    size = 5.5 if lowest <= 40 else 3.2
    for _, fate, places in sorted(lines, key=lambda line: order.index(line[1])):
        x, y = [c for c, _ in places], [-r for _, r in places]
        dropped, colour = fate == "dropped", FATES[fate]
        axes.plot(
            x,
            y,
            color=colour,
            linewidth=2.8 if fate == "chosen" else 1.6,
            alpha=0.75 if dropped else 1.0,
            marker="o",
            markersize=size * (1.25 if fate == "chosen" else 0.75 if dropped else 1.0),
        )
    plain_axes(axes)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(-0.15, max(1, len(columns) - 1) + 0.08)
    axes.set_ylim(-lowest - 0.7, -0.3)
    axes.set_xticks(range(len(columns)), columns, parse_math=False)
    step = max(5, 5 * round(lowest / 25))
    marks = [1, *range(step, lowest - step // 2, step), *([lowest] if lowest > 1 else [])]
    axes.set_yticks([-m for m in marks], [str(m) for m in marks])
    axes.set_title("rank by estimate", loc="left", fontsize=9.5, color=INK)
    last = [line for line in lines if line[2] and line[2][-1][0] == len(columns) - 1]
    ends = [(float(-places[-1][1]), clipped(name), FATES[fate]) for name, fate, places in last]
    if len(columns) > 1 and len(ends) <= MOST_NAMES:
        label_ends(axes, ends, gap=min(0.07, 0.9 / max(1, len(ends))))
    return figure


def importance(shares: Mapping[str, float]) -> Any:
    """Shares of the variance of the estimate that settings explain, one bar each."""
    figure, axes = new_figure("", height=0.8 + 0.34 * len(shares), width=5.2)
    axes.barh(range(len(shares)), list(shares.values()), 0.6, color="#0072b2")
    for row, value in enumerate(shares.values()):
        axes.annotate(
            f"{value:.0%}", (value, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9, color=INK
        )
    plain_axes(axes)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0.0, 1.1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    axes.set_ylim(len(shares) - 0.5, -0.5)
    axes.set_yticks(range(len(shares)), [clipped(n) for n in shares], parse_math=False)
    return figure


def parallel(axes: Sequence[SettingAxis], lines: Sequence[tuple[Sequence[float], float, bool]]) -> Any:
    """Parallel coordinates. lines: (places in [0, 1] on the axes, NaN where there is none; share of settings that are
    worse, NaN for one without an estimate; whether it is the chosen one)."""
    figure, plot = new_figure("", height=3.9, width=min(9.4, 1.6 + 1.55 * len(axes)))
    plot.axis("off")
    thin = 1.2 if len(lines) <= 60 else 0.8
    for places, share, bold in sorted(lines, key=lambda e: (e[2], -1.0 if math.isnan(e[1]) else e[1])):
        colour = "#808080" if math.isnan(share) else level_colour(share)
        x = range(len(axes))
        if bold:
            plot.plot(x, places, color="#000000", linewidth=4.6, solid_capstyle="round", zorder=4)
        plot.plot(
            x,
            places,
            color="#009e73" if bold else colour,
            linewidth=2.6 if bold else thin,
            alpha=1.0 if bold else 0.8,
            linestyle=":" if math.isnan(share) else "-",
            zorder=5 if bold else 2,
        )
    for i, axis in enumerate(axes):
        plot.plot([i, i], [0.0, 1.0], color="#aaaaaa", linewidth=1.2, zorder=3)
        plot.annotate(
            clipped(axis.name),
            (i, 1.0),
            xytext=(0, 11),
            textcoords="offset points",
            ha="center",
            fontsize=9.5,
            color=INK,
            fontweight="bold",
            annotation_clip=False,
        )
        for place, text in axis.ticks():
            plot.annotate(
                text,
                (i, place),
                xytext=(-5, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=8.5,
                color=INK,
                zorder=6,
            )
    plot.set_xlim(-0.45, len(axes) - 0.75)
    plot.set_ylim(-0.04, 1.06)
    return figure


def slices(axis: SettingAxis, points: Sequence[tuple[float, float, float, str]], unit: str) -> Any:
    """Estimates over one setting. points: (place on the axis in [0, 1], estimate, its standard error, "chosen",
    "default" or ""), NaN where unknown."""
    figure, plot = new_figure("", height=2.7, width=4.4)
    points = [p for p in points if math.isfinite(p[0]) and math.isfinite(p[1])]
    x = np.array([p[0] for p in points])
    if axis.values:  # those of one value stand beside each other
        width = 0.6 / len(axis.values)
        seen: dict[float, list[int]] = {}
        for i, place in enumerate(x.tolist()):
            seen.setdefault(place, []).append(i)
        for own in seen.values():
            x[own] += width * (np.arange(len(own)) / max(1, len(own) - 1) - 0.5) if len(own) > 1 else 0.0
    dots(plot, x.tolist(), [p[1] for p in points], [Z95 * p[2] for p in points], [p[3] for p in points])
    plain_axes(plot)
    if points:
        clip_height(plot, [p[1] for p in points])
    plot.set_xlim(-0.05, 1.05)
    ticks = axis.ticks()
    slanted = 30 if sum(len(word) for _, word in ticks) > 42 else 0
    plot.set_xticks([t for t, _ in ticks], [word for _, word in ticks], parse_math=False, rotation=slanted)
    plot.set_xlabel(clipped(axis.name) + (" (log)" if axis.log else ""), fontsize=9.5, color=INK)
    plot.set_title(unit, loc="left", fontsize=9.5, color=INK)
    _numbers(plot.yaxis)
    return figure


def dots(
    plot: Any, x: Sequence[float], y: Sequence[float], half: Sequence[float], kinds: Sequence[str], across: bool = False
) -> None:
    """Points with their intervals, thinner where they are many; the chosen one and the default stand out. across:
    intervals along x.
    """
    many = len(x) > 60
    half = [h if math.isfinite(h) else 0.0 for h in half]
    places = {"chosen": "#009e73", "default": "#d55e00", "": "#0072b2"}
    for kind in ("", "default", "chosen"):
        rows = [i for i, k in enumerate(kinds) if k == kind]
        if not rows:
            continue
        a, b, h = ([v[i] for i in rows] for v in (x, y, half))
        faint = many and not kind
        along: Any = {"xerr" if across else "yerr": h}
        plot.errorbar(
            a,
            b,
            **along,
            fmt="D" if kind == "default" else "o",
            color=places[kind],
            alpha=0.55 if faint else 1.0,
            markersize=3.2 if faint else 7 if kind == "chosen" else 5,
            elinewidth=0.6 if faint else 1.1,
            zorder=2 if not kind else 4,
        )


def regret(curves: Mapping[str, tuple[Curve, str]], bands: Sequence[str]) -> Any:
    """Regret against the number of real episodes: {label: (curve, colour)}; 0 is the best setting, 1 what one at random
    has. bands: labels of those whose interval is drawn."""
    figure, axes = new_figure("", height=3.4, width=6.6)
    ns = [int(n) for n in next(iter(curves.values()))[0].x]
    for label in bands:
        curve, colour = curves[label]
        axes.fill_between(range(len(ns)), curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
    for curve, colour in curves.values():
        axes.plot(range(len(ns)), curve.value, color=colour, linewidth=2, marker="o", markersize=4.5)
    axes.axhline(1.0, color="#666666", linewidth=1.2, linestyle=(0, (5, 4)), zorder=1)
    plain_axes(axes)
    top = max(1.0, *(float(np.nanmax(c.value)) for c, _ in curves.values()))
    axes.set_ylim(-0.05, min(max(float(np.nanmax(c.high)) for c, _ in curves.values()), 1.3 * top) + 0.08)
    axes.set_xticks(range(len(ns)), map(str, ns))
    axes.set_xlabel("real episodes", fontsize=9.5, color=INK)
    axes.set_title("regret (dashed: a setting at random)", loc="left", fontsize=9.5, color=INK)
    return figure


def against_truth(
    points: Sequence[tuple[float, float, float, str]], seeds: Sequence[Sequence[float]], unit: str
) -> Any:
    """True mean returns over estimates. points: (estimate, its standard error, true mean, "chosen", "default" or "");
    seeds: the true means of each setting's seeds, drawn small. unit: of the estimates."""
    estimate = [p[0] for p in points]
    figure, axes = new_figure("", height=3.8, width=5.2)
    for x, own in zip(estimate, seeds, strict=True):
        axes.plot([x] * len(own), own, ".", color="#808080", markersize=4, alpha=0.7, zorder=1)
    dots(axes, estimate, [p[2] for p in points], [Z95 * p[1] for p in points], [p[3] for p in points], across=True)
    plain_axes(axes)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    room = 0.7 * (max(estimate) - min(estimate)) or 1.0
    low, high = axes.get_xlim()
    axes.set_xlim(max(low, min(estimate) - room), min(high, max(estimate) + room))
    axes.set_xlabel(unit, fontsize=9.5, color=INK)
    axes.set_title("true mean return", loc="left", fontsize=9.5, color=INK)
    for axis in (axes.xaxis, axes.yaxis):
        _numbers(axis)
    return figure


def front(
    x: Sequence[float],
    y: Sequence[float],
    on: Sequence[bool],
    edge: Sequence[int],
    kinds: Sequence[str],
    names: tuple[str, str],
) -> Any:
    """Two criteria of settings, more is better in both. on: those that none beats in all criteria, drawn larger; edge:
    those that none beats in these two, joined by steps. names: of the axes."""
    figure, axes = new_figure("", height=3.4, width=4.8)
    steps = sorted((x[i], y[i]) for i in edge)
    axes.step([a for a, _ in steps], [b for _, b in steps], where="pre", color="#009e73", linewidth=1.6, zorder=1)
    for best in (False, True):
        rows = [i for i, o in enumerate(on) if o is best]
        look: Any = (
            {"color": "#0072b2", "markersize": 6} if best else {"color": "#808080", "markersize": 4.5, "alpha": 0.7}
        )
        axes.plot([x[i] for i in rows], [y[i] for i in rows], "o", **look)
    for i, kind in enumerate(kinds):
        if kind:
            axes.plot(
                x[i],
                y[i],
                "o" if kind == "chosen" else "D",
                color="#009e73" if kind == "chosen" else "#d55e00",
                markersize=8,
            )
    plain_axes(axes)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_xlabel(names[0], fontsize=9.5, color=INK)
    axes.set_title(names[1], loc="left", fontsize=9.5, color=INK)
    for axis in (axes.xaxis, axes.yaxis):
        _numbers(axis)
    return figure


def _numbers(axis: Any) -> None:
    """Ticks as `number` writes them: matplotlib's own have offsets and powers, which are small print."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(TICKS))
    axis.set_major_formatter(FuncFormatter(lambda v, _: number(v)))
