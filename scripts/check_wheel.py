"""Checks that a built wheel holds every file of the source tree and works where it is installed.

    python -m build && python scripts/check_wheel.py dist/*.whl

The packages algorithms, configs, envs and world_models reach the wheel through links inside `offrl/`; a wheel made
without them, or without the YAML files and the built-in dataset, still builds and still imports. Run it with an
interpreter that has offrl's dependencies."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("algorithms", "configs", "envs", "world_models")
SUFFIXES = {".py", ".yaml", ".json", ".hdf5", ".typed"}

# Runs beside nothing but the installed wheel and the interpreter's own packages.
PROBE = """
import sys
from importlib import import_module
from pathlib import Path
site = Path(sys.argv[1]).resolve()
sys.path.insert(0, str(site))
for name in ("offrl", "offrl.algorithms", "offrl.envs", "offrl.world_models", "offrl.cli.main"):
    where = Path(import_module(name).__file__).resolve()
    assert site in where.parents, f"{name} comes from {where}, not from the wheel"
from offrl import registry
from offrl.data import load_dataset
known = registry.names("algo")
assert "iql" in known, f"no algorithm iql among {sorted(known)}"
rows = len(load_dataset("builtin"))
assert rows > 1000, f"the built-in dataset has {rows} rows"
print(f"installed wheel: {len(known)} algorithms, built-in dataset of {rows:,} rows")
"""


def source_files() -> set[str]:
    """The place of each packaged file of the source tree in the wheel."""
    files = set()
    for top in ("offrl", *LINKED):
        for path in (ROOT / top).rglob("*"):
            inside = path.relative_to(ROOT).parts
            if inside[0] == "offrl" and len(inside) > 1 and inside[1] in LINKED:
                continue  # rglob of some Python versions follows the links
            if path.suffix in SUFFIXES and path.is_file() and "__pycache__" not in inside:
                files.add("/".join(inside if inside[0] == "offrl" else ("offrl", *inside)))
    return files


def faults(wheel: Path) -> list[str]:
    """The faults of the wheel's list of files."""
    with zipfile.ZipFile(wheel) as archive:
        members = {name for name in archive.namelist() if not name.endswith("/")}
        entry_points = next(
            (archive.read(n).decode() for n in members if n.endswith(".dist-info/entry_points.txt")), ""
        )
    problems = [f"missing: {name}" for name in sorted(source_files() - members)]
    problems += [
        f"does not belong: {n}" for n in sorted(members) if not n.startswith(("offrl/", "offrl-")) or "__pycache__" in n
    ]
    for folder in LINKED:
        if not any(name.startswith(f"offrl/{folder}/") for name in members):
            problems.append(f"nothing of {folder}/")
    for suffix in (".yaml", ".hdf5"):
        if not any(name.endswith(suffix) for name in members):
            problems.append(f"no {suffix} file")
    if "offrl = offrl.cli.main:main" not in entry_points:
        problems.append("no command 'offrl'")
    return problems


def main() -> int:
    if len(sys.argv) != 2:
        print(f"usage: {Path(__file__).name} WHEEL", file=sys.stderr)
        return 2
    wheel = Path(sys.argv[1]).resolve()
    problems = faults(wheel)
    for fault in problems:
        print(f"{wheel.name}: {fault}", file=sys.stderr)
    if problems:
        return 1
    with tempfile.TemporaryDirectory() as folder:
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            f"{folder}/site",
            str(wheel),
        ]
        subprocess.run(install, check=True)
        return subprocess.run([sys.executable, "-c", PROBE, f"{folder}/site"], cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main())
