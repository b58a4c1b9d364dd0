"""tune/index.html: what a tune searched, what it chose, what that is worth, and what speaks against it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offrl.figures.style import own_settings
from offrl.tuning.page import importance, opening, rungs, tables, truth, values
from offrl.tuning.page.material import TunePage

FILE = "index.html"


@own_settings()
def write_page(folder: Path, result: Mapping[str, Any]) -> Path:
    """Write the page of a finished tune, and return its path.

    result: what is in result.json. Of the folder only `state/` is read, and looked for what can be linked to; what is
    missing or damaged there is left out with a sentence. The same result and files give the same bytes. Raises
    UserError where the page cannot be written."""
    made = TunePage(Path(folder), result)
    opening.show(made)
    made.page.contents()
    opening.searched(made)
    rungs.show(made)
    importance.show(made)
    values.show(made)
    tables.criteria(made)
    truth.show(made)
    tables.all_settings(made)
    tables.files(made)
    return made.page.save(made.folder / FILE)
