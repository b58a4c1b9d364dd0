"""The blocks of code of the pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of each fenced block that names its language, in order."""
    return BLOCK.findall(page.read_text())


def lines(page: Path) -> Iterator[str]:
    """The lines of a page's bash blocks, those that end with a backslash joined to the next, without comments."""
    for language, text in blocks(page):
        if language == "bash":
            for line in text.replace("\\\n", " ").splitlines():
                if command := re.sub(r"(^|\s)#.*", "", line).strip():
                    yield command


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of each `offrl ...` of a page's bash blocks, after the name itself."""
    for line in lines(page):
        for part in line.split("&&"):
            words = shlex.split(part)
            if words[:3] == ["uv", "run", "--no-sync"]:
                words = words[3:]
            if words[:1] == ["offrl"]:
                yield words[1:]
