"""Makes `linear_model`, which several of these tests share, importable by them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
