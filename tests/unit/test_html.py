"""The toolkit of pages: everything is escaped, nothing is loaded from anywhere, and what was filled in is there
once.
"""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from offrl.errors import UserError
from offrl.figures import style
from offrl.report.page import Cell, Page, escape, slug, svg

NASTY = "<script>alert(\"x\")</script> & 'q' \x00\x1b\ud800 </style></title>"
INSIDE = ("#", "data:image/png;base64,", "data:image/gif;base64,", "data:video/mp4;base64,")
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Reader(HTMLParser):
    """Elements, texts and mistakes in the nesting of a page."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.wrong: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def outside(page: str) -> list[str]:
    """Everything in a page that a browser would fetch, or that names another place."""
    found = re.findall(r"https?:", page) + re.findall(r"@import[^;]*", page)
    for tag, attributes in Reader(page).elements:
        for name in ("src", "href", "xlink:href", "data", "srcset", "action", "poster"):
            value = attributes.get(name)
            if value is not None and not value.startswith(INSIDE):
                found.append(f"{tag} {name}={value[:60]}")
        found += [f"{tag} url" for value in attributes.values() if value and re.search(r"url\((?!#)", value)]
        found += [f"<{tag}>" for _ in range(tag in ("link", "iframe", "object", "embed"))]
    return found


def picture(text: str = "a") -> Any:
    figure, axes = style.new_figure(text)
    axes.plot([0, 1], [0, 1], color=style.COLOURS[0], label="x")
    axes.imshow([[0.0, 1.0], [1.0, 0.0]])
    axes.set_title("$a$ < b & c", loc="left", parse_math=False)
    return figure


def full(text: str, png: Path) -> Page:
    """A page with `text` in every place that takes one."""
    page = Page(text, text)
    page.heading(text)
    page.heading(text, level=3)
    page.text(text, "lead")
    page.items([text, text])
    page.box(text, [text], "bad")
    page.preformatted(text)
    cell = Cell(text, small=(text,), note=text, kind="warning", strong=True, value=1.5, hint=text)
    page.table([text, text, text], [[text, cell, 3.0], [text, None, 4]], caption=text, notes=[text], sortable=True)
    page.legend([(text, style.COLOURS[0])])
    with page.details(text), page.gallery():
        page.figure(picture(text.replace("\x00", "").replace("\ud800", "").replace("\x1b", "")), text, alt=text)
        page.figure(png.read_bytes(), text)
    return page


@pytest.fixture
def png(tmp_path: Path) -> Path:
    style.save(picture(), tmp_path / "a.png")
    return tmp_path / "a.png"


def test_every_text_is_escaped(png: Path) -> None:
    page = full(NASTY, png).html()
    reader = Reader(page)
    assert not reader.wrong and not reader.open
    assert sum(tag == "script" for tag, _ in reader.elements) == 1  # the page's own
    assert sum(tag == "style" for tag, _ in reader.elements) == 2  # the page's and the drawing's
    assert not re.search("[\x00\x1b\ud800]", page)
    shown = NASTY.translate({0: "\ufffd", 0x1B: "\ufffd", 0xD800: "\ufffd"})
    # title, h1, subtitle, 2 x (heading, contents), p, 2 items, box and line, pre, table (3 headers, 2 + 1 cells, small,
    # note, caption, footnote), legend, summary, 2 captions: each once as text
    assert sum(t == shown for t in reader.texts) == 3 + 4 + 1 + 2 + 2 + 1 + (3 + 3 + 2 + 2) + 1 + 1 + 2
    assert escape("\x00<&\"'>") == "\ufffd&lt;&amp;&quot;&#x27;&gt;"


def test_nothing_comes_from_outside(png: Path, tmp_path: Path) -> None:
    page = full("plain", png)
    assert outside(page.html()) == []
    assert "default-src 'none'" in page.html()  # and the browser is told so
    assert outside('<img src="x.png"><a href="https://a.b">') != []  # the check itself sees
    saved = page.save(tmp_path / "new" / "index.html")
    assert saved.read_text(encoding="utf-8") == page.html()
    assert [p.name for p in saved.parent.iterdir()] == ["index.html"]


def test_png_is_there_bit_for_bit(png: Path) -> None:
    page = Page("x")
    page.figure(png.read_bytes(), "caption")
    (data,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page.html())
    assert base64.b64decode(data) == png.read_bytes()


def test_pictures_follow_the_theme_and_keep_apart() -> None:
    page = Page("x")
    page.figure(picture(), "one")
    page.figure(picture(), "two")
    text = page.html()
    ids = [a["id"] for _, a in Reader(text).elements if a.get("id")]
    assert len(ids) == len(set(ids)) and any(i.startswith("f1-") for i in ids) and any(i.startswith("f2-") for i in ids)
    used = set(re.findall(r"url\(#([^)]+)\)", text))
    assert used and used <= set(ids)
    assert "var(--c0)" in text and "#0072b2" not in text.split("</style>", 1)[1]
    assert "$a$ &lt; b &amp; c" in text  # text stays text, and no formula
    assert svg(picture(), "p") == svg(picture(), "p")  # the same bytes each time


def test_colours_of_the_pictures_are_known_to_the_style_sheet() -> None:
    from offrl.report.style import DARK, LIGHT, THEMED

    assert {*style.MORE_COLOURS, style.GREY} <= set(THEMED)
    for variable in THEMED.values():
        assert f"{variable}:" in LIGHT and f"{variable}:" in DARK


def test_columns_of_numbers_are_aligned() -> None:
    page = Page("x")
    page.table(
        ["name", "count", "mixed", "mean"], [["a", 1234, "1", Cell("1.5", value=1.5)], ["b", None, "two", "-3e-05"]]
    )
    cells = [(tag, a.get("class") or "") for tag, a in Reader(page.html()).elements if tag in ("th", "td")]
    assert (
        cells
        == [("th", ""), ("th", "n"), ("th", ""), ("th", "n")] + [("th", ""), ("td", "n"), ("td", ""), ("td", "n")] * 2
    )
    assert ">1,234<" in page.html() and 'data-v="1.5"' in page.html()
    with pytest.raises(ValueError, match="a row of 1 cells in a table of 2"):
        page.table(["a", "b"], [["only one"]])


def test_headings_have_ids_of_their_own() -> None:
    page = Page("x")
    assert [page.heading("Scores"), page.heading("Scores"), page.heading("\u6570\u636e"), page.heading("!")] == [
        "scores", "scores-2", "part", "part-2",
    ]  # fmt: skip
    ids = {a["id"] for tag, a in Reader(page.html()).elements if tag == "h2"}
    links = {(a["href"] or "")[1:] for tag, a in Reader(page.html()).elements if tag == "a"}
    assert links == ids
    assert slug("Hopper-medium v2 / \u00e9") == "hopper-medium-v2"


def test_an_empty_page_and_an_empty_table() -> None:
    page = Page("nothing")
    page.table(["a"], [])
    page.items([])
    page.box("title", [])
    reader = Reader(page.html())
    assert not reader.wrong and not reader.open and not any(tag == "nav" for tag, _ in reader.elements)


def test_bad_places(png: Path) -> None:
    page = Page("x")
    with pytest.raises(ValueError, match="kind"):
        page.box("x", [], "pink")
    with pytest.raises(UserError, match="could not write"):
        page.save(png / "index.html")
