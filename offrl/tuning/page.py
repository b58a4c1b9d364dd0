"""tune/index.html."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_page(folder: Path, found: Mapping[str, Any]) -> Path:
    return folder / "index.html"
