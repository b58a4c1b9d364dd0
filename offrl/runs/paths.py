"""Where a run lies. Imports nothing heavy: commands look first, and tell a mistyped name at once."""

from __future__ import annotations

from pathlib import Path

from offrl.errors import UserError, nearest

RECORD = "run.json"


def check_run(run_dir: str | Path) -> None:
    """Raises UserError, with the nearest run beside it, where `run_dir` is no run directory."""
    if not (Path(run_dir) / RECORD).exists():
        raise no_run(Path(run_dir))


def no_run(run_dir: Path) -> UserError:
    """The error of a folder that holds no run."""
    names = sorted(p.parent.name for p in run_dir.parent.glob(f"*/{RECORD}"))
    return UserError(f"{run_dir} is not a run directory (it has no {RECORD}).{nearest(run_dir.name, names)}")
