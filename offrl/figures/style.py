"""The look of every picture: figures, axes, colours, labels and files. matplotlib is imported when one is drawn."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offrl.errors import UserError, printable
from offrl.figures.rcparams import own_settings as own_settings
from offrl.system.files import replacing

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#444444")  # Okabe and Ito's
# and Tol's muted ones
MORE_COLOURS = (*COLOURS, "#882255", "#999933", "#332288", "#aa4499", "#661100", "#44aa99", "#808080")
GREY, INK = "#666666", "#333333"
LABEL_GAP = 0.055  # least distance between two labels, in heights of the axes


def new_figure(title: str, height: float = 4.4, width: float = 7.2, *, fitted: bool = True) -> tuple[Any, Any]:
    """An empty figure (`height` and `width` in inches of 125 pixels) and its axes, which make room for all that is
    written unless `fitted` is off (to make it takes as long as to draw)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from offrl.figures.shown import ShownFigure

    figure = ShownFigure(figsize=(width, height), dpi=125, layout="constrained" if fitted else None)
    FigureCanvasAgg(figure)
    if title:
        # a $ in a name is a $
        figure.suptitle(printable(title), x=0.01, ha="left", fontsize=12, fontweight="bold", parse_math=False)
    return figure, figure.add_subplot()


def new_grid(title: str, rows: int, columns: int, height: float, width: float, **settings: Any) -> tuple[Any, Any]:
    """`new_figure` with rows x columns axes."""
    figure, axes = new_figure(title, height, width)
    axes.remove()
    return figure, figure.subplots(rows, columns, squeeze=False, **settings)


def plain_axes(axes: Any, xlabel: str = "", heading: str = "", *, grid: str = "y", size: float = 9.5) -> None:
    """No frame, grid lines across `grid` ("x", "y" or ""), and labels of `size`; the heading, such as the unit, stands
    above the axis, where it is read without turning the head."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#aaaaaa")
    if grid:
        axes.grid(axis=grid, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, colors=INK)
    axes.set_xlabel(xlabel, fontsize=size, color=INK)
    axes.set_title(heading, loc="left", fontsize=size, color=INK)


def clip_height(axes: Any, values: Sequence[float]) -> None:
    """Let the lines decide the range of the axis, and wide intervals leave it."""
    room = 0.5 * (max(values) - min(values)) or 1.0
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(bottom, min(values) - room), min(top, max(values) + room))


def ordered_colours(count: int) -> list[str]:
    """Colours from dark to light in the order of the cells."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis"](0.9 * i / (count - 1))) for i in range(count)]


def with_colours(lines: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """{label: (line, colour)}."""
    colours = COLOURS if len(lines) <= len(COLOURS) else ordered_colours(len(lines))
    return {label: (line, colour) for (label, line), colour in zip(lines.items(), colours, strict=False)}


def save(figure: Any, out: Path) -> None:
    """Write a PNG in one piece. Raises UserError."""
    try:
        with replacing(out) as file, warnings.catch_warnings():
            # names in any script; a box stands for the letter
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            figure.savefig(file, format="png")
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None


def label_ends(axes: Any, ends: Sequence[tuple[float, str, str]], gap: float = LABEL_GAP) -> None:
    """Names beside the ends of the lines, moved apart by at least `gap` (in heights of the axes) where they would lie
    on one another.
    """
    low, high = axes.get_ylim()
    ordered = sorted(ends)
    placed: list[float] = []
    for value, _, _ in ordered:
        height = (value - low) / (high - low)
        placed.append(max(height, placed[-1] + gap) if placed else height)
    ceiling = 1.0
    for i in reversed(range(len(placed))):  # back down from the top edge
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    for (_, text, colour), height in zip(ordered, placed, strict=True):
        axes.annotate(
            text,
            (1.0, height),
            xycoords="axes fraction",
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=9.5,
            fontweight="bold" if colour != GREY else "normal",
            annotation_clip=False,
            parse_math=False,
        )


def count_ticks(axis: Any) -> None:
    """Write the ticks of an axis as `thousands`."""
    axis.set_major_formatter(lambda x, _: thousands(x))


def colour_bar(axes: Any, image: Any, size: float = 9, **options: Any) -> Any:
    """The scale of an image's colours beside its axes, without a frame; labels of `size`."""
    bar = axes.figure.colorbar(image, ax=axes, **options)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=size, colors=INK)
    return bar


def short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else "0.0" if abs(value) < 0.05 else f"{value:.1f}"  # not -0.0


def thousands(x: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:,.10g}{unit}"
    return f"{x:.10g}"
