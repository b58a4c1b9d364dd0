"""Where a run lies. Imports nothing heavy: commands look first, and tell a mistyped name at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offrl import registry
from offrl.errors import UserError, nearest
from offrl.system import trust

RECORD = "run.json"
STOPPED = "stopped.json"  # where a callback ended the run


def check_run(run_dir: str | Path) -> None:
    """Raises UserError, with the nearest run beside it, where `run_dir` is no run directory."""
    if not (Path(run_dir) / RECORD).exists():
        raise no_run(Path(run_dir))


def check_exists(path: Path, kinds: str = "run directories, benchmark directories or files of results") -> None:
    """Raises UserError, with the nearest name beside it, where nothing is at `path`, which is to be one of `kinds`."""
    if not path.exists():
        siblings = [str(p) for p in path.parent.glob("*")] if path.parent.is_dir() else []
        raise UserError(f"{path} does not exist; give {kinds}.{nearest(str(path), siblings)}")


def no_run(run_dir: Path) -> UserError:
    """The error of a folder that holds no run."""
    names = sorted(p.parent.name for p in run_dir.parent.glob(f"*/{RECORD}"))
    return UserError(f"{run_dir} is not a run directory (it has no {RECORD}).{nearest(run_dir.name, names)}")


def stopped_at(run_dir: Path, steps: int) -> int | None:
    """The step at which a callback ended a run of this many steps; None where none did, or the run has got more steps
    since.
    """
    try:
        note = json.loads(trust.read_text(run_dir / STOPPED))
        step, of = note["step"], note["steps"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, UserError):
        return None
    return step if isinstance(step, int) and isinstance(of, int) and 0 < step < steps <= of else None


def ended_early(run_dir: Path, config: Mapping[str, Any]) -> int | None:
    """The step at which a stopping rule or a callback ended a run with these settings; None where neither did, or the
    rule is not installed any more."""
    if config.get("stop", "none") == "none":
        return stopped_at(run_dir, config["steps"])
    try:
        step: int | None = registry.get("stop", str(config["stop"])).ended(run_dir, config)
    except UserError:
        return None
    return step
