"""The picture of a latent model's open-loop predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offrl.errors import printable
from offrl.figures.style import COLOURS, GREY, INK, new_figure, own_settings, plain_axes, save
from offrl.system.files import replacing

PICTURE, FILM = "open_loop.png", "open_loop.gif"
SHOWN = (0, 1, 2, 5, 10, 15, 25, 35, 45)  # steps ahead whose images are drawn
AXIS = "steps ahead: median, and 80% of windows"
BARS = 20  # dimensions of a probe that are drawn
HEADINGS = {
    "rewards": "reward: error in its standard deviations",
    "numbers": "observation: error in its standard deviations",
}
EDGE, GAP, HEAD = 128, 6, 18  # pixels of a film: of an image's shorter side, between images, of the line above them
STEP_MS = 120
# stream -> windows of (what was recorded, what was predicted), [H + 1, height, width, channels] and [H, ...], in 0..1
Films = Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]]


@own_settings()
def draw(out: Path, result: Mapping[str, Any], films: Films) -> None:
    """A panel of errors by steps ahead for rewards, numbers and each stream of images, of all models, and one of what a
    probe explains, if there is one; below, for each stream of images, what was seen of some windows, what the first
    model predicts, and the difference.

    Raises UserError where the file cannot be written.
    """
    models = [model["errors"] for model in result["models"]]
    rows = [row for name in films for row in _rows(name, films[name])]
    height = 0.95 * len(rows)
    panels = len(models[0]) + bool(result["probe"])
    figure, axes = new_figure("", height=3.0 + height, width=max(3.7 * panels, 9.0 if rows else 0.0))
    axes.remove()
    parts = figure.subfigures(2, 1, height_ratios=[3.0, height]) if rows else [figure]
    panel = parts[0].subplots(1, panels, squeeze=False)[0]
    for axes, name in zip(panel, models[0], strict=False):
        heading = HEADINGS.get(name, f"{name}: error of a pixel, of its range")
        _errors(axes, heading, "their mean" if name == "rewards" else "nothing changes", [m[name] for m in models])
    panel[0].set_xlabel(
        f"{AXIS}\nof {printable(result['measured_on'])}{averaged(result)}", fontsize=9.5, color=INK, parse_math=False
    )
    if result["probe"]:
        r2 = np.mean([m["probe"] for m in result["models"]], 0)
        _bars(panel[-1], f"{result['probe']}: share that latent states explain", r2)
    if rows:
        strips(parts[1], rows, ["last seen" if k == 0 else f"+{k}" for k in SHOWN])
    save(figure, out)


def averaged(result: Mapping[str, Any]) -> str:
    """What to say of errors where they are a mean over models; "" of one model."""
    count = len(result["models"])
    return f", mean of {count} models" if count > 1 else ""


def film(out: Path, films: Films) -> None:
    """The same windows as an animation: what was recorded, what the first model predicts, and the difference, a row for
    each window. Raises UserError where the file cannot be written.
    """
    from PIL import Image, ImageDraw

    rows = [window for windows in films.values() for window in windows]
    frames = []
    for k in range(len(rows[0][0])):
        lines = []
        for recorded, predicted in rows:
            after = predicted[k - 1] if k else np.ones_like(recorded[0])
            difference = np.abs(after - recorded[k]) if k else after
            lines.append([_enlarged(x) for x in (recorded[k], after, difference)])
        height = HEAD + sum(line[0].shape[0] + GAP for line in lines)
        canvas = Image.new("RGB", (max(sum(x.shape[1] + GAP for x in line) for line in lines), height), "white")
        label = "last seen" if k == 0 else f"+{k}: recorded, predicted, difference"
        ImageDraw.Draw(canvas).text((2, 3), label, fill=INK)
        y = HEAD
        for line in lines:
            for i, image in enumerate(line):
                canvas.paste(Image.fromarray(image), (i * (image.shape[1] + GAP), y))
            y += line[0].shape[0] + GAP
        frames.append(canvas)
    with replacing(out) as file:
        frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=STEP_MS, loop=0)


def _enlarged(image: np.ndarray) -> np.ndarray:
    """An image [h, w, channels] in 0..1 as [H, W, 3] uint8, each pixel a square."""
    image = image if image.shape[-1] == 3 else image[..., :1].repeat(3, -1)
    times = max(1, EDGE // min(image.shape[:2]))
    return (255.0 * image).round().astype(np.uint8).repeat(times, 0).repeat(times, 1)


def _errors(axes: Any, heading: str, guess: str, models: Sequence[Mapping[str, Any]]) -> None:
    lines = (("guess", GREY, guess), ("model", COLOURS[0], "the model, without looking"))
    top = 0.0
    for kind, colour, label in lines:
        low, median, high = (np.mean([m[kind][k] for m in models], 0) for k in ("low", "median", "high"))
        steps = np.arange(1, len(median) + 1)
        if kind == "model":
            axes.fill_between(steps, low, high, color=colour, alpha=0.14, linewidth=0)
        style: dict[str, Any] = {"linestyle": (0, (5, 4)), "linewidth": 1.4} if kind == "guess" else {"linewidth": 2.2}
        axes.plot(steps, median, color=colour, label=label, marker="o" if len(steps) == 1 else None, **style)
        top = max(top, float(high.max()) if kind == "model" else 1.5 * float(median.max()))
    axes.set_ylim(0.0, 1.2 * top or 1.0)  # room for the legend
    axes.margins(x=0.01)
    plain_axes(axes, AXIS, heading)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left")


def _bars(axes: Any, heading: str, r2: np.ndarray) -> None:
    """R^2 of a column's first dimensions as bars, with the number beside each; below 0 there is none."""
    shown = r2[:BARS]
    lines = np.arange(len(shown))
    axes.barh(lines, np.nan_to_num(shown.clip(0.0, 1.0)), color=COLOURS[0], height=0.62)
    for line, value in zip(lines, shown, strict=True):
        text = "constant" if np.isnan(value) else f"{value.round(2) + 0.0:.2f}"
        axes.text(
            0.02 + float(np.nan_to_num(np.clip(value, 0.0, 1.0))), line, text, va="center", fontsize=8.5, color=INK
        )
    axes.set(xlim=(0.0, 1.15), xticks=np.linspace(0.0, 1.0, 6), ylim=(len(shown) - 0.4, -0.6), yticks=lines)
    plain_axes(axes, "R², in episodes that the regression has not seen", printable(heading), grid="x")


def _rows(name: str, windows: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[tuple[str, Sequence[np.ndarray | None]]]:
    """(label, images of SHOWN steps; None: nothing is drawn)."""
    rows: list[tuple[str, Sequence[np.ndarray | None]]] = []
    for recorded, predicted in windows:
        steps = [k for k in SHOWN if k < len(recorded)]
        rows += [
            (name, [recorded[k] for k in steps]),
            ("predicted", [None if k == 0 else predicted[k - 1] for k in steps]),
            ("difference", [None if k == 0 else np.abs(predicted[k - 1] - recorded[k]) for k in steps]),
        ]
    return rows


def strips(figure: Any, rows: Sequence[tuple[str, Sequence[np.ndarray | None]]], headings: Sequence[str]) -> None:
    """Rows of images, each with its label; None: nothing is drawn. headings: of the columns."""
    grid = figure.subplots(len(rows), len(rows[0][1]), squeeze=False)
    for number, (line, (label, images)) in enumerate(zip(grid, rows, strict=True)):
        for heading, axes, image in zip(headings, line, images, strict=False):
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            if image is not None:
                axes.imshow(image[..., 0] if image.shape[-1] != 3 else image, cmap="gray", vmin=0.0, vmax=1.0)
            if number == 0:
                axes.set_title(heading, fontsize=9, color=INK)
        line[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9, color=INK)
