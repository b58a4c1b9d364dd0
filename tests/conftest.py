"""Nothing that a test loads or compiles is left in the user's cache; and a process takes one thread, for several of them run at a time."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; more would fight over the cores
os.environ["OFFRL_CACHE"] = tempfile.mkdtemp(prefix="offrl-tests-")
