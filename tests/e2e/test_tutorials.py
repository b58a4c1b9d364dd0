"""The tutorials, as a reader would follow them: every block of a page in its order, in one folder. A block after "save
this as `FILE`" is saved; those that are no bash and no Python are to be read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents import ROOT, blocks

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
OFFRL = 'offrl() { "$PYTHON" -m offrl.cli "$@"; }\n'
PROGRAMS = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}


@pytest.mark.nightly  # they train for minutes
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tutorial_runs(page: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    saved = {
        text: name
        for name, text in re.findall(r"save this as `([\w.]+)`\.\n+```python\n(.*?)^```", page.read_text(), re.M | re.S)
    }
    for language, text in blocks(page):
        if text in saved:
            (tmp_path / saved[text]).write_text(text)
        if text in saved or language not in PROGRAMS:
            continue
        program = (OFFRL if language == "bash" else "") + text
        done = subprocess.run(
            [*PROGRAMS[language], program], cwd=tmp_path, capture_output=True, text=True, env=environment
        )
        print(done.stdout[-3000:])
        assert done.returncode == 0, f"{page.name}:\n{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
