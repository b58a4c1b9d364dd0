"""Nothing that a test loads or compiles is left in the user's cache."""

from __future__ import annotations

import os
import tempfile

os.environ["OFFRL_CACHE"] = tempfile.mkdtemp(prefix="offrl-tests-")
