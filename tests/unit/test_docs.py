"""The pages: links, the pages of the algorithms, the glossary."""

from __future__ import annotations

import re
from pathlib import Path

import algorithm_pages
import pytest

from offrl import registry

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")


def text_of(page: Path) -> str:
    """A page without its blocks of code and its code in lines."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    lines = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S).splitlines()
    titles = [
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("# ")) for line in lines if re.match(r"#{1,6} ", line)
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in LINK.findall(text_of(page)) if not link.startswith("http")]
    for source, link in links:
        name, _, anchor = link.partition("#")
        target = (source.parent / name).resolve() if name else source
        assert target.exists(), f"{source.relative_to(ROOT)}: {link}: no such file"
        assert not anchor or anchor in anchors(target), f"{source.relative_to(ROOT)}: {link}: no such heading"


@pytest.mark.slow
def test_the_pages_of_the_algorithms_are_up_to_date() -> None:
    """Otherwise: python scripts/algorithm_pages.py."""
    stale = [path.name for path, text in algorithm_pages.pages() if path.read_text() != text]
    assert not stale


def test_every_algorithm_and_preset_has_a_page() -> None:
    pages = {path.stem for path in (ROOT / "docs" / "algorithms").glob("*.md")}
    assert pages == set(registry.names("algo"))
    assert not algorithm_pages.missing_presets()


def test_settings_of_algorithms_name_files_that_are_there() -> None:
    for path in (ROOT / "configs" / "algo").glob("*.yaml"):
        for name in re.findall(r"\b(?:algorithms|docs|offrl|world_models)/[\w/]+\.(?:py|md)", path.read_text()):
            assert (ROOT / name).exists(), f"{path.name}: {name}"


def test_the_algorithms_that_take_images_are_listed() -> None:
    page, count = (ROOT / "docs" / "images.md").read_text(), -1  # `encoder` trains no policy
    for words, trait in (("with an encoder", "encoded"), ("with one inside the model", "streams")):
        row = re.search(rf"^\| {words} \| (.*) \|$", page, re.M)
        algorithms = [name for name, kind in registry.names("algo").items() if kind.traits.observations == trait]
        assert row is not None and row[1].split(", ") == sorted(algorithms)
        count += len(algorithms)
    readme = (ROOT / "README.md").read_text()
    assert f"[{count} methods](docs/images.md)" in readme and f"[{count} of the algorithms](docs/images.md)" in readme


def test_symbols_of_the_glossary_are_those_of_settings() -> None:
    for name, setting in algorithm_pages.symbols():
        assert hasattr(registry.get("algo", name).Config(), setting), f"{name} has no setting {setting}"
