"""The pages: their commands, their code, README's figures, tables of settings, and what describes the package to
others.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from offrl import registry
from offrl.cli import NAMES
from offrl.errors import UserError
from offrl.settings.compose import compose, parse
from offrl.settings.dataset import DatasetConfig
from offrl.settings.evaluation import EvalConfig
from offrl.settings.groups import flat_name
from offrl.settings.train import CheckpointConfig, TrainConfig
from tests.support.documents import ROOT, blocks, commands, lines

DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
OPTIONAL = ("wandb",)  # packages that no test needs
GIVEN = {"FILE", "RUN", "NAME", "FOLDER"}  # what a reader puts in place of these


def test_bash_blocks_mean_the_same_in_zsh() -> None:
    """Where zsh finds a bracket or a star outside quotes it looks for files of that name, and stops with "no matches
    found".
    """
    for page in PAGES:
        for line in lines(page):
            bare = re.sub(r"\"[^\"]*\"|'[^']*'", "", line)
            assert line.startswith("for ") or not re.search(r"\w=[^\s]*[\[*?]", bare), f"{page.name}: {line}"


def settings(words: list[str]) -> list[str]:
    """The settings among the arguments of a command; `a|b` stands for one of several values."""
    return [word for word in words if "=" in word and not word.startswith("-") and "|" not in word]


def test_commands_of_the_pages_are_known() -> None:
    """Commands exist, and the settings of `offrl train`."""
    known = set(vars(TrainConfig())) | {"dataset", "world_model", "trust"}
    of_algorithms = {
        name for algorithm in registry.names("algo") for name in vars(registry.get("algo", algorithm).Config())
    }
    groups = {
        "algo": of_algorithms,
        "grid": of_algorithms,
        "eval": set(vars(EvalConfig())),
        "dataset": set(vars(DatasetConfig())),
    }
    for page in PAGES:
        for name, *words in commands(page):
            where = f"{page.relative_to(ROOT)}: offrl {name} {' '.join(words)}"
            assert name in NAMES or name.startswith("-") or name == "COMMAND", where
            for key in [flat_name(word.partition("=")[0]) for word in settings(words)] if name == "train" else []:
                group, _, rest = key.partition(".")
                assert group in known, f"{where}: {key}"
                field = rest.rpartition(".")[2] if group == "grid" else rest.partition(".")[0]
                assert not rest or group not in groups or field in groups[group] | of_algorithms, f"{where}: {key}"


@pytest.mark.slow
def test_training_commands_of_the_pages_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that is checked before data are read, as if the loggers' packages were installed. Commands with a
    reader's own code are run where the page is (test_tutorials, test_python_page, test_own_data_page)."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *more: find("torch" if name in OPTIONAL else name, *more)
    )
    for page in PAGES:
        for name, *words in commands(page):
            if name != "train" or any(word.startswith(("config=", "resume=")) or ".py" in word for word in words):
                continue
            if any(word.partition("=")[2] in GIVEN for word in words):
                continue
            try:
                compose(parse(settings(words)))
            except UserError as error:
                pytest.fail(f"{page.relative_to(ROOT)}: offrl {name} {' '.join(words)}\n{error}")


def test_python_of_the_pages_can_be_read() -> None:
    for page in PAGES:
        for language, text in blocks(page):
            if language == "python":
                ast.parse(text)


def test_settings_beside_those_of_other_libraries_exist() -> None:
    """Every `algo.NAME`, `dataset.NAME`, `eval.NAME`, `checkpoint.NAME` of the tables."""
    names = {name for algorithm in registry.names("algo") for name in vars(registry.get("algo", algorithm).Config())}
    groups = {
        "algo": names,
        "dataset": vars(DatasetConfig()),
        "eval": vars(EvalConfig()),
        "checkpoint": vars(CheckpointConfig()),
    }
    for page in (DOCS / "coming-from").glob("*.md"):
        for group, name in re.findall(r"`(algo|dataset|eval|checkpoint)\.(\w+)", page.read_text()):
            assert name in groups[group], f"{page.name}: {group}.{name}"


def test_figures_of_readme_are_on_the_pages_it_names() -> None:
    rows = re.findall(r"^\|.*\]\((docs/benchmarks/[\w-]+\.md)\) \|$", (ROOT / "README.md").read_text(), re.M)
    assert len(rows) > 5
    for line in re.findall(r"^\|.*docs/benchmarks/.*$", (ROOT / "README.md").read_text(), re.M):
        page = (ROOT / re.search(r"docs/benchmarks/[\w-]+\.md", line)[0]).read_text().replace("**", "")  # type: ignore[index]
        for figure in re.findall(r"-?\d+\.\d+ \[-?[\d.]+, -?[\d.]+\]", line):
            assert figure in page, f"{figure} is not in the page of\n{line}"


def test_parity_is_as_readme_counts_it() -> None:
    rows = [
        row
        for row in (DOCS / "benchmarks" / "parity.md").read_text().splitlines()
        if re.match(r"\| [a-z].*github\.com", row)
    ]
    counts = re.search(
        r"updates of (\d+) methods and variants \|.*\| (\d+) other repositories", (ROOT / "README.md").read_text()
    )
    assert (
        counts
        and int(counts[1]) == len(rows)
        and int(counts[2]) == len({re.search(r"\[([^]]+)\]", row)[1] for row in rows})
    )  # type: ignore[index]
    assert max(float(cell) for row in rows for cell in row.split(" | ")[2:4]) <= 1e-10


def test_pages_of_the_algorithms_state_losses_and_measurements() -> None:
    """Equations by hand or the losses' docstrings; what learns by likelihood alone or plans has none."""
    pages = {path.stem: path.read_text() for path in (DOCS / "algorithms").glob("*.md")}
    assert {n for n, text in pages.items() if not re.search("^## (Equations|Losses)$", text, re.M)} <= {
        "distill",
        "dynamics",
        "morel",
        "pets",
        "sindy",
    }
    assert "82.3 [65.4, 99.2]" in pages["hiql"] and "## Measured" in pages["cql"]
    for name, text in pages.items():
        assert text.count("\n$$\n") % 2 == 0, name


def test_readme_fits_one_screen_and_a_half() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90
    assert sum(p.stat().st_size for p in (DOCS / "pictures").iterdir()) <= 1.5e6


def test_recipe_asks_for_what_pyproject_asks_for() -> None:
    """With conda-forge's names of the packages."""
    text = (ROOT / "packaging" / "conda-forge" / "recipe.yaml").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    needed = re.findall(
        r'^    "([\w-]+)(?:\[[\w,]+\])?([^"]*)",', project.split("\ndependencies = [")[1].split("\n]")[0], re.M
    )
    names = {
        "torch": "pytorch",
        "gymnasium": "gymnasium-mujoco",
        "mujoco": "mujoco-python",
        "matplotlib": "matplotlib-base",
    }
    assert len(needed) > 9
    for name, bounds in needed:
        assert f"- {names.get(name, name)} {bounds}\n" in text, name
    version = re.search(r'^version = "(.+)"$', project, re.M)[1]  # type: ignore[index]
    assert f'version: "{version}"' in text and f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_dockerfile_installs_the_torch_of_readme() -> None:
    torch = re.search(r"pip install (torch==[\d.]+)", (ROOT / "README.md").read_text())[1]  # type: ignore[index]
    assert torch in (ROOT / "Dockerfile").read_text()


def test_site_has_every_page(tmp_path: Path) -> None:
    """The navigation names what there is, of benchmarks ten; algorithms are added by scripts/site_hooks.py."""
    settings, navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:")
    named = set(re.findall(r"[\w/-]+\.md", navigation))
    pages = {p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md") if p.parent.name != "algorithms"}
    results = {page for page in named if page.startswith("benchmarks/")}
    assert results <= pages and len(results) <= 10
    assert results == set(re.findall(r"!(benchmarks/[\w-]+\.md)", settings))  # of `exclude_docs`
    pages = {page for page in pages if not page.startswith("benchmarks/")}
    assert pages <= named, pages - named
    assert named - pages - results == {"contributing.md", "changelog.md", "reporting.md", "index.md"}


@pytest.mark.nightly
def test_site_is_built(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path)))
    page = (tmp_path / "algorithms" / "iql" / "index.html").read_text()
    assert "arithmatex" in page and "fonts.googleapis" not in page and (tmp_path / "mathjax" / "tex-svg.js").exists()
    foreign = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?)[^"]*)"', page)
    assert not foreign
