"""Images of a dataset side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from offrl.data.tools.streams import Shown
from offrl.figures.style import INK, new_grid
from offrl.system.files import file_name

FRAMES, COLUMNS = 16, 4  # of a contact sheet


def contact_sheets(shown: Shown) -> Iterator[tuple[Any, str, str]]:
    """(figure, file name, caption) of each stream of images: those of FRAMES rows, evenly apart."""
    for name, (values, entries) in shown.items():
        if values.ndim < 3 or not len(entries):
            continue
        rows = np.unique(np.linspace(0, len(entries) - 1, FRAMES).astype(int))
        height = math.ceil(len(rows) / COLUMNS)
        figure, grid = new_grid("", height, COLUMNS, 2.4 * height, 2.25 * COLUMNS)
        for axes in grid.ravel():
            axes.set_axis_off()
        for axes, row in zip(grid.ravel(), rows.tolist(), strict=False):
            image = np.asarray(values[entries[row]])
            image = image[..., 0] if image.ndim == 3 and image.shape[-1] not in (3, 4) else image
            axes.imshow(image, cmap="gray", vmin=0, vmax=255)
            axes.set_title(f"row {row:,}", loc="left", fontsize=8, color=INK)
        caption = f"{name}: what {len(rows)} of the {len(entries):,} rows show, evenly apart."
        yield figure, f"images-{file_name(name)}", caption
