"""Write the generated parts of docs/algorithms.md, docs/algorithms/NAME.md (actions, sources, settings, measurements)
and docs/choosing.md.

    python scripts/algorithm_pages.py              # rewrites what lies between the two marks of each page
    python scripts/algorithm_pages.py --check      # only lists the pages that are out of date, and exits with 1 if
    there are any

Title, idea, papers, family and deviations are written by hand, and so are the symbols of the papers, in
docs/glossary.md.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import measured

from offrl import registry
from offrl.settings.compose import compose
from offrl.settings.field import is_shown, own_first, shown_value
from offrl.settings.groups import CONTENT, by_group, grouped_name
from offrl.settings.presets import base_algorithm, config_names, dotted, read_yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BEGIN, END = "<!-- generated: python scripts/algorithm_pages.py -->", "<!-- end of what is generated -->"
SHARED_BY = 6  # a setting with one meaning in so many algorithms is explained once, in docs/algorithms.md
FAMILIES = (
    "imitation",
    "flow and diffusion policies",
    "TD3",
    "in-sample learning",
    "soft actor-critic",
    "on-policy",
    "conservative values",
    "limits of costs",
    "world models",
    "sequence models",
    "in-context and meta-learning",
    "goal-conditioned",
    "skills",
    "representations",
    "zero-shot RL",
    "language models",
)


class Setting(NamedTuple):
    """A setting of an algorithm as its page shows it."""

    name: str
    meaning: str
    default: str


class Page(NamedTuple):
    """The part of a page that is written by hand and that the overview needs."""

    title: str
    papers: str
    family: str
    presets: dict[str, tuple[str, str]]  # name -> (title, paper)
    equations: bool


def settings(name: str) -> list[Setting]:
    """The settings of an algorithm that a user may give, its own before those of its relatives, with the defaults of
    configs/algo.
    """
    config = compose({"algo": name, "experiment": "none", "dataset": "-"}).algo
    return [
        Setting(f.name, f.metadata["help"], f.metadata.get("shown") or shown_value(getattr(config, f.name)))
        for f in own_first(type(config))
        if is_shown(f)
    ]


def shared_settings(table: dict[str, list[Setting]]) -> dict[tuple[str, str], None]:
    """(name, meaning) of the settings that are explained once: those of no group, and group by group, ordered by how
    many algorithms have them.
    """
    counts = Counter((s.name, s.meaning) for rows in table.values() for s in rows)
    keys = [key for key, count in counts.most_common() if count >= SHARED_BY]
    groups = by_group(name for name, _ in keys)
    return {key: None for names in groups.values() for key in keys if key[0] in names}


def symbols() -> dict[tuple[str, str], str]:
    """{(algorithm, setting): symbol} from the table "Symbols of the papers" of docs/glossary.md."""
    text = (DOCS / "glossary.md").read_text().split("## Symbols of the papers")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", text, re.M)
    return {(name, setting): symbol for setting, symbol, names in rows for name in re.findall(r"`(\w+)`", names)}


def changed(name: str) -> dict[str, Any]:
    """The settings outside `algo` that a file of configs/algo has."""
    values = read_yaml(ROOT / "configs" / "algo" / f"{name}.yaml")
    return dotted({k: v for k, v in values.items() if k not in ("defaults", "label", "finetune")})


def read_page(path: Path) -> Page:
    """Raises ValueError for a page without papers or a family that is in FAMILIES."""
    text = path.read_text()
    head = re.match(r"# (.+)\n[\s\S]*?\n- Paper: (.+)\n- Family: (.+)\n", text)
    if head is None or head[3] not in FAMILIES:
        raise ValueError(
            f"{path}: a title, and the lines '- Paper: ...' and '- Family: ...' with a family of {', '.join(FAMILIES)}"
        )
    presets = {
        name: (title, paper) for name, title, paper in re.findall(r"^- Preset `(\w+)`: (.+?), (\[.+?\)): ", text, re.M)
    }
    return Page(head[1], re.sub(r", \*.+?\*", "", head[2]), head[3], presets, "\n## Equations\n" in text)


def pages() -> Iterator[tuple[Path, str]]:
    """(path, text as it should be) of docs/algorithms.md and of each algorithm's page. Raises ValueError for a page
    without its marks.
    """
    table = {name: settings(name) for name in registry.names("algo")}
    shared, symbol = shared_settings(table), symbols()
    written = {name: read_page(DOCS / "algorithms" / f"{name}.md") for name in table}
    yield DOCS / "algorithms.md", filled(DOCS / "algorithms.md", overview(written), shared_table(table, shared))
    for name, rows in table.items():
        path = DOCS / "algorithms" / f"{name}.md"
        yield path, filled(path, details(name, written[name], rows, shared, symbol))
    known = {label for name, page in written.items() for label in (name, *page.presets)}
    yield (
        DOCS / "choosing.md",
        filled(DOCS / "choosing.md", *("\n".join(measured.suite_table(suite, known)) for suite in measured.SUITES)),
    )


def filled(path: Path, *blocks: str) -> str:
    """The text of a page with `blocks` between its pairs of marks."""
    parts = re.split(f"({re.escape(BEGIN)}\n).*?({re.escape(END)})", path.read_text(), flags=re.S)
    if len(parts) != 1 + 3 * len(blocks):
        raise ValueError(f"{path} must have {len(blocks)} block(s) between '{BEGIN}' and '{END}'")
    return "".join(part + ("\n" + blocks[i // 3] + "\n\n" if i % 3 == 1 else "") for i, part in enumerate(parts))


def overview(written: dict[str, Page]) -> str:
    """The table of all algorithms and presets, by family."""
    lines = ["| `algo=` | Algorithm | Paper | Family | Actions |", "|---|---|---|---|---|"]
    for name, page in sorted(written.items(), key=lambda item: FAMILIES.index(item[1].family)):
        actions = ", ".join(registry.get("algo", name).traits.actions)
        for label, (title, papers) in {name: (page.title, page.papers), **page.presets}.items():
            lines.append(f"| [`{label}`](algorithms/{name}.md) | {title} | {papers} | {page.family} | {actions} |")
    return "\n".join(lines)


def shared_table(table: dict[str, list[Setting]], shared: dict[tuple[str, str], None]) -> str:
    lines = ["| Setting | Meaning | Algorithms |", "|---|---|---|"]
    for setting, meaning in shared:
        count = sum(any((s.name, s.meaning) == (setting, meaning) for s in rows) for rows in table.values())
        lines.append(f"| `{grouped_name(setting)}` | {cell(meaning)} | {count} |")
    return "\n".join(lines)


def details(
    name: str, page: Page, rows: list[Setting], shared: dict[tuple[str, str], None], symbol: dict[tuple[str, str], str]
) -> str:
    """Actions, sources, presets and settings of one algorithm."""
    algorithm = registry.get("algo", name)
    source = "algorithms/" + (name if (ROOT / f"algorithms/{name}.py").exists() else algorithm.__module__.split(".")[2])
    source += "" if (ROOT / source).is_dir() else ".py"
    lines = [
        f"- Actions: {', '.join(algorithm.traits.actions)}",
        f"- Source: [{source}](../../{source}), [configs/algo/{name}.yaml](../../configs/algo/{name}.yaml)",
    ]
    for preset in (name, *page.presets):
        values = " ".join(f"`{k}={shown_value(v)}`" for k, v in changed(preset).items())
        lines += [f"- `algo={preset}` sets {values}"] if values else []
    if not page.equations:
        lines += losses(algorithm)
    marks = {s.name: symbol.get((name, s.name), "") for s in rows}
    lines += ["", "## Settings", "", "| Setting | Symbol | Default | Meaning |", "|---|---|---|---|"]
    groups = {
        group: [s for n in names for s in rows if s.name == n]
        for group, names in by_group(s.name for s in rows).items()
    }
    for s in itertools.chain(*groups.values()):
        if (s.name, s.meaning) not in shared or marks[s.name]:
            lines.append(f"| `{grouped_name(s.name)}` | {marks[s.name]} | `{s.default}` | {cell(s.meaning)} |")
    common = {
        group: ", ".join(
            f"`{grouped_name(s.name)}={s.default}`"
            for s in members
            if (s.name, s.meaning) in shared and not marks[s.name]
        )
        for group, members in groups.items()
    }
    if any(common.values()):
        lines += ["", "[Shared settings](../algorithms.md#shared-settings):", ""]
        lines += [f"- {f'{CONTENT[g]}: ' if g else ''}{text}" for g, text in common.items() if text]
    lines += measured.section(name, [name, *page.presets])
    return "\n".join(lines)


def losses(algorithm: type) -> list[str]:
    """The lines of "Losses": what the docstrings of the paper's losses say, for pages without equations."""
    rows = []
    for loss in [name for name in vars(algorithm) if name.endswith("_loss")]:
        first = (getattr(algorithm, loss).__doc__ or "").strip().partition("\n\n")[0]
        rows += [f"- `{loss}`: `{' '.join(first.replace('`', '').split())}`"] if first else []
    return ["", "## Losses", "", "As the docstrings of the source state them.", "", *rows] if rows else []


def cell(text: str) -> str:
    """Plain text as a cell of a Markdown table."""
    return re.sub(r"([|<*\[\]])", r"\\\1", text)


def missing_presets() -> list[str]:
    """Presets (files of configs/algo that are no algorithm's own) that their algorithm's page does not name."""
    presets = {name: base_algorithm(name) for name in config_names("algo") if name not in registry.names("algo")}
    return [name for name, base in presets.items() if name not in read_page(DOCS / "algorithms" / f"{base}.md").presets]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; list the pages that are out of date")
    arguments = parser.parse_args()
    stale = [(path, text) for path, text in pages() if path.read_text() != text]
    for path, text in stale:
        print(path.relative_to(ROOT))
        if not arguments.check:
            path.write_text(text)
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
