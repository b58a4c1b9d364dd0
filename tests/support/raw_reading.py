"""Raw columns of files, and refusals of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offrl.data.loading.read import read_raw
from offrl.data.raw import RawData
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig


def read(path: Path, **settings: Any) -> RawData:
    return read_raw(str(path), DatasetConfig(name=str(path), **settings))


def refused(path: Path, **settings: Any) -> str:
    """The message, which must be one line with the name of the file or folder."""
    with pytest.raises(UserError) as caught:
        read(path, **settings)
    text = str(caught.value)
    assert str(path) in text and "\n" not in text
    return text
