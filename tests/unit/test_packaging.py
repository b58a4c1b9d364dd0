"""The layout that everything rests on: linked folders, one-way dependencies, a light command line."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("algorithms", "configs", "envs", "world_models")
HEAVY = ("torch", "gymnasium", "mujoco", "minari", "h5py", "matplotlib", "numpy", "pyarrow", "tensorboard")


def sources(folder: str) -> list[Path]:
    found = []
    for directory, _, files in os.walk(ROOT / folder):  # does not follow links
        found += [Path(directory, name) for name in files if name.endswith(".py")]
    return sorted(found)


def imports(path: Path) -> Iterator[str]:
    """Every module that a file's statements import, by its full name, wherever in the file they stand."""
    parts = path.relative_to(ROOT).parts[:-1]
    package = parts if parts[:1] == ("offrl",) else ("offrl", *parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def inside(module: str, *packages: str) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


@pytest.mark.parametrize("folder", LINKED)
def test_folder_is_linked_into_the_package(folder: str) -> None:
    link = ROOT / "offrl" / folder
    assert link.is_symlink() and os.readlink(link) == f"../{folder}"
    assert link.resolve() == ROOT / folder and link.is_dir()


def test_links_are_committed_as_links() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-s", "offrl"], cwd=ROOT, capture_output=True, text=True)
    modes = {line.split("\t")[1]: line.split()[0] for line in listed.stdout.splitlines()}
    if not modes:
        pytest.skip("nothing is committed yet")
    assert {modes.get(f"offrl/{folder}") for folder in LINKED} == {"120000"}


# through pipes; no file is unpickled anywhere
TALKS_TO_OWN_PROCESSES = {"processes.py", "host.py", "protocol.py", "worker.py"}


def test_no_old_gym_no_d4rl_no_pickle() -> None:
    everything = [p for folder in ("offrl", *LINKED) for p in sources(folder)]
    wrong = [
        (p.name, m)
        for p in everything
        for m in imports(p)
        if inside(m, "gym", "d4rl", "mujoco_py", "pickle", "dill", "cloudpickle")
    ]
    assert {name for name, _ in wrong} <= TALKS_TO_OWN_PROCESSES, wrong


def test_every_package_is_there() -> None:
    for package in ("algorithms", "envs", "world_models"):
        assert ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))


def run(code: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_command_line_starts_without_heavy_imports(tmp_path: Path) -> None:
    out = run(
        f"import sys, offrl, offrl.cli.main, offrl.registry; print([m for m in {HEAVY} if m in sys.modules])", tmp_path
    )
    assert out.strip() == "[]"


def test_version_is_the_one_in_pyproject() -> None:
    import offrl

    stated = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert stated
    try:
        installed = version("offrl")
    except PackageNotFoundError:
        pytest.skip("offrl is not installed")
    assert installed == offrl.__version__ == stated[1]


def test_readme_has_the_two_commands_that_ci_runs() -> None:
    text = (ROOT / "README.md").read_text()
    blocks = dict(re.findall(r"<!-- (main|test) -->\n```\w*\n(.*?)\n```", text, re.S))
    torch = "pip install torch==2.13.0"  # first: what asks for any torch would bring the largest
    assert blocks["main"] == f"{torch} && pip install -e . && offrl train"
    assert blocks["test"] == f'{torch} && pip install -e ".[dev]" && pytest'


def test_plain_pytest_is_the_fast_tier() -> None:
    addopts = re.search(r"^addopts = '(.+)'$", (ROOT / "pyproject.toml").read_text(), re.M)
    fast = re.search(r'^FAST, LONG = "(.+)",', (ROOT / "tests" / "conftest.py").read_text(), re.M)
    assert (
        addopts
        and fast
        and addopts[1].endswith(f'-n 2 --dist worksteal -m "{fast[1]}"')
        and fast[1] == "not slow and not nightly"
    )


def test_built_in_data_set_is_small() -> None:
    assert sum(p.stat().st_size for p in (ROOT / "offrl" / "assets").iterdir()) <= 4 * 1024**2
