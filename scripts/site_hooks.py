"""Hooks of mkdocs.yml: navigation of generated pages, the repository's own files as pages, MathJax without network.

    pip install -e ".[docs]" && mkdocs build --strict

Pages are written for the repository, so they link to files outside docs/: each file or folder that is linked becomes a
page of the site that shows its source.
"""

from __future__ import annotations

import posixpath
import re
import sys
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import algorithm_pages  # noqa: E402

LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^```.*?^```|`[^`\n]*`", re.M | re.S)
OWN = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
    "README.md": "index.md",
}
LINKS = re.compile(r"\[([^\]]*)\]\(([^)\s#]+\.md)(?:#[^)\s]*)?\)")
SHOWN = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash", ".cff": "yaml", "": "text"}
LONGEST = 100_000  # characters of a file that is shown
MATHJAX = """window.MathJax = {
  tex: {inlineMath: [["\\\\(", "\\\\)"]], displayMath: [["\\\\[", "\\\\]"]], processEscapes: true, processEnvironments: true},
  options: {ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex", enableMenu: false}
};
"""  # noqa: E501


def on_config(config: Any) -> Any:
    """Adds the pages of the algorithms, by family, to the navigation."""
    docs = Path(config.docs_dir)
    families: dict[str, list[dict[str, str]]] = {name: [] for name in algorithm_pages.FAMILIES}
    for path in sorted((docs / "algorithms").glob("*.md")):
        page = algorithm_pages.read_page(path)
        families[page.family].append({page.title: f"algorithms/{path.name}"})
    for entry in config.nav:
        if "Algorithms" in entry:
            entry["Algorithms"] += [{name[0].upper() + name[1:]: pages} for name, pages in families.items()]
    return config


def outside(text: str, source: str) -> set[str]:
    """Paths, from the repository's root, of what a page links to outside docs/; `source`: the page's own path from
    there.
    """
    links = {link for _, link, _ in LINK.findall(FENCE.sub("", text)) if "://" not in link}
    targets = {posixpath.normpath(posixpath.join(posixpath.dirname(source), link)) for link in links}
    return {target for target in targets if not target.startswith(("docs/", "..")) and target != "docs"}


def page_of(target: str) -> str:
    """The page, from docs/, that shows what lies at a path from the repository's root."""
    return OWN.get(target, f"source/{target}.md")


def source_page(target: str) -> str:
    """A page with the text of a file, or with those of the files of a folder and the names of what else is in it."""
    path = ROOT / target
    if path.is_file():
        return f"# {target}\n\n````{SHOWN.get(path.suffix, 'text')}\n{path.read_text()[:LONGEST]}\n````\n"
    inside = sorted(p for p in path.iterdir() if p.name != "__pycache__")
    shown = [p for p in inside if p.suffix in SHOWN and p.is_file()]
    other = ", ".join(f"`{p.name}{'/' if p.is_dir() else ''}`" for p in inside if p not in shown)
    blocks = [f"## {p.name}\n\n````{SHOWN[p.suffix]}\n{p.read_text()[:LONGEST]}\n````\n" for p in shown]
    return "\n".join([f"# {target}/\n", *([f"And: {other}.\n"] if other else []), *blocks])


def on_files(files: Files, *, config: Any) -> Files:
    """Adds pages for the repository's files that are linked, and MathJax."""
    docs = Path(config.docs_dir)
    linked = set().union(
        *(outside(path.read_text(), f"docs/{path.relative_to(docs).as_posix()}") for path in docs.rglob("*.md"))
    )
    linked |= set().union(*(outside((ROOT / name).read_text(), name) for name in OWN))
    for name, page in OWN.items():
        files.append(File.generated(config, page, content=relinked((ROOT / name).read_text(), name, page)))
    for target in sorted(linked - set(OWN)):
        if (ROOT / target).exists():
            files.append(File.generated(config, page_of(target), content=source_page(target)))
    library = resources("mathjax").joinpath("static", "mathjax", "es5", "tex-svg.js").read_bytes()
    files.append(File.generated(config, "mathjax/tex-svg.js", content=library))
    files.append(File.generated(config, "mathjax/configuration.js", content=MATHJAX))
    return files


def relinked(text: str, source: str, page: str) -> str:
    """A page whose links are right on the site. `source`: its path from the repository's root; `page`: its path from
    docs/ on the site.
    """

    def link(match: re.Match[str]) -> str:
        if "://" in match[2] or match[2].startswith("mailto:"):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        place = target[len("docs/") :] if target.startswith("docs/") else page_of(target)
        return match[1] + posixpath.relpath(place, posixpath.dirname(page) or ".") + match[3]

    parts = re.split(f"({FENCE.pattern})", text, flags=FENCE.flags)
    return "".join(part if i % 2 else LINK.sub(link, part) for i, part in enumerate(parts))


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Links out of docs/ lead to the pages that show those files; those to pages that are no part of the site (its
    `exclude_docs`) become their names.
    """
    source = page.file.src_uri
    if not source.startswith("source/") and source not in OWN.values():
        markdown = relinked(markdown, f"docs/{source}", source)

    def named(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        return f"{match[1]} (`docs/{target}` in the repository)" if config.exclude_docs.match_file(target) else match[0]

    return LINKS.sub(named, markdown)
