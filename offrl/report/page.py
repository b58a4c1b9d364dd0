"""One self-contained page of HTML: text, tables, pictures. No file or network address is needed to show it, and no
script.

Everything handed in is plain text and escaped. Pictures of matplotlib become inline SVG whose colours follow the
reader's light or dark theme; PNG files become data URIs. A content security policy in the page forbids the browser to
load anything.
"""

from __future__ import annotations

import base64
import contextlib
import html
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offrl.report.style import DARK, FONT, LIGHT, SCRIPT, STYLE, themed

BROAD = 7  # columns, above which a table is printed in smaller type
KINDS = ("note", "warning", "bad", "good")


@dataclass(frozen=True)
class Cell:
    """A table cell that is more than text. `value`: the number it is sorted by (it is then aligned as a number)."""

    text: str
    small: tuple[str, ...] = ()  # lines below it, in smaller type
    note: str = ""  # superscript: the number of a footnote
    kind: str = ""  # one of KINDS: how it is coloured
    strong: bool = False
    value: float | None = None
    hint: str = ""  # shown where the pointer rests; nothing that is said nowhere else


Content = Cell | str | int | float | None


def escape(text: Any) -> str:
    """Text safe anywhere in HTML. Characters that no HTML document may hold become U+FFFD."""
    return html.escape(
        re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", str(text)), quote=True
    )


def slug(text: str) -> str:
    """A plain word for an id or a file name: letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "part"


class Page:
    """A page that is filled from top to bottom, then saved."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self.title, self.subtitle = title, subtitle
        self._parts: list[str] = []
        self._contents: list[tuple[int, str, str]] = []
        self._ids: set[str] = set()
        self._pictures = 0
        self._listed = 0  # the place of the table of contents among the parts

    # ------------------------------------------------------------------------------------------------------------ text

    def heading(self, text: str, *, level: int = 2) -> str:
        """A heading, listed in the table of contents at levels 2 and 3. Returns its id, made unique."""
        name = base = slug(text)
        count = 1
        while name in self._ids:
            count += 1
            name = f"{base}-{count}"
        self._ids.add(name)
        if level <= 3:
            self._contents.append((level, name, text))
        self._parts.append(f'<h{level} id="{name}">{escape(text)}</h{level}>')
        return name

    def text(self, text: str, kind: str = "") -> None:
        """A paragraph. kind: "lead" for the sentences a hurried reader wants, "small" for remarks."""
        self._parts.append(f"<p{_class(kind)}>{escape(text)}</p>")

    def items(self, lines: Sequence[str]) -> None:
        """A list with a bullet before each line."""
        if lines:
            self._parts.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>")

    def box(self, title: str, lines: Sequence[str], kind: str = "warning") -> None:
        """A coloured box with a title and a list of lines. kind: one of KINDS."""
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
        body = "".join(f"<li>{escape(line)}</li>" for line in lines)
        self._parts.append(
            f'<div class="box {kind}"><strong>{escape(title)}</strong>{f"<ul>{body}</ul>" if body else ""}</div>'
        )

    def preformatted(self, text: str) -> None:
        """Text with its line breaks, in fixed-width type."""
        self._parts.append(f"<pre>{escape(text)}</pre>")

    def contents(self) -> None:
        """The table of contents belongs here, rather than on top."""
        self._listed = len(self._parts)

    def markup(self, text: str) -> None:
        """HTML as it stands: the caller has escaped what is not its own."""
        self._parts.append(text)

    # ---------------------------------------------------------------------------------------------------------- tables

    def table(
        self,
        headers: Sequence[str],
        rows: Sequence[Sequence[Content]],
        *,
        caption: str = "",
        notes: Sequence[str] = (),
        sortable: bool = False,
    ) -> None:
        """A table whose first column stays in sight while the rest scrolls. Columns of numbers are aligned to the
        right.

        `headers`: all empty, they are left out. `rows`: one content per header; None is an empty cell. `notes`:
        footnotes below it. `sortable`: a click on a header sorts (where the browser runs scripts). Raises ValueError
        for a row of another length.
        """
        for row in rows:
            if len(row) != len(headers):
                raise ValueError(f"a row of {len(row)} cells in a table of {len(headers)} columns")
        numeric = [
            bool(rows) and all(_numeric(row[i]) for row in rows) and any(_filled(row[i]) for row in rows)
            for i in range(len(headers))
        ]
        head = "".join(
            f'<th scope="col"{_class("n" if right else "")}>{escape(h)}</th>'
            for h, right in zip(headers, numeric, strict=True)
        )
        body = []
        for row in rows:
            cells = [_cell(c, "th" if i == 0 else "td", numeric[i]) for i, c in enumerate(row)]
            body.append(f"<tr>{''.join(cells)}</tr>")
        # no <caption>, which would be as wide as a wide table
        caption_html = f'<p class="small">{escape(caption)}</p>' if caption else ""
        top = f"<thead><tr>{head}</tr></thead>" if any(headers) else ""
        below = "".join(f"<li>{escape(note)}</li>" for note in notes)
        broad = " broad" if len(headers) > BROAD else ""
        region = f'class="scroll{broad}" tabindex="0" role="region" aria-label="{escape(caption or "table")}"'
        sorts = _class("sortable" if sortable and len(rows) > 1 else "")
        self._parts.append(
            f"{caption_html}<div {region}><table{sorts}>{top}<tbody>\n{chr(10).join(body)}\n</tbody></table></div>"
            + (f'<ol class="notes">{below}</ol>' if below else "")
        )

    # -------------------------------------------------------------------------------------------------------- pictures

    def figure(self, picture: bytes | Any, caption: str, *, alt: str = "") -> None:
        """A picture with a caption below: PNG bytes, or a matplotlib Figure (drawn as inline SVG)."""
        if isinstance(picture, bytes):
            image = (
                f'<img alt="{escape(alt or caption)}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
            )
        else:
            self._pictures += 1
            image = svg(picture, f"f{self._pictures}", alt or caption)
        caption_html = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        self._parts.append(f'<figure><div class="scroll">{image}</div>{caption_html}</figure>')

    def legend(self, colours: Sequence[tuple[str, str]]) -> None:
        """Names with their colours (name, one of style.COLOURS), for pictures that share them."""
        marks = "".join(
            f'<span><i style="background:{themed(escape(c))}"></i>{escape(name)}</span>' for name, c in colours
        )
        self._parts.append(f'<p class="legend">{marks}</p>')

    # --------------------------------------------------------------------------------------------------------- blocks

    @contextlib.contextmanager
    def details(self, summary: str) -> Iterator[None]:
        """A block that is folded until the reader opens it; its content is written inside the `with`."""
        self._parts.append(f"<details><summary>{escape(summary)}</summary>")
        yield
        self._parts.append("</details>")

    @contextlib.contextmanager
    def gallery(self, small: bool = False) -> Iterator[None]:
        """The figures filled in inside the `with` stand side by side, as many as the window has room for: two, or three
        if `small`.
        """
        self._parts.append(f'<div class="gallery{" small" if small else ""}">')
        yield
        self._parts.append("</div>")

    # ---------------------------------------------------------------------------------------------------------- output

    def html(self) -> str:
        """The whole page."""
        links = "".join(
            f'<li class="l{level}"><a href="#{name}">{escape(text)}</a></li>' for level, name, text in self._contents
        )
        contents = f'<nav aria-label="contents"><ul>{links}</ul></nav>' if len(self._contents) > 1 else ""
        above, below = self._parts[: self._listed], self._parts[self._listed :]
        inside = [*above, contents, *below] if self._listed else below
        subtitle = f'<p class="subtitle">{escape(self.subtitle)}</p>' if self.subtitle else ""
        policy = (
            "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
        )
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
            'content="light dark">\n'
            f"<title>{escape(self.title)}</title>\n"
            f"<style>:root{{{LIGHT}}}@media (prefers-color-scheme:dark){{:root{{{DARK}}}}}{STYLE}</style>\n"
            f"</head><body>\n{'' if self._listed else contents}<main>\n<header><h1>{escape(self.title)}</h1>{subtitle}</header>\n"  # noqa: E501
            + "\n".join(inside)
            + f"\n</main>\n<script>{SCRIPT}</script>\n</body></html>\n"
        )

    def save(self, path: str | Path) -> Path:
        """Write the page in one piece. Raises UserError when it cannot be written."""
        from offrl.system.files import write_text

        path = Path(path)
        write_text(path, self.html(), " Free some space, or give another out=.")
        return path


def svg(figure: Any, prefix: str, alt: str = "") -> str:
    """A matplotlib Figure as an inline SVG element: `prefix` keeps its ids apart from another picture's, text stays
    text, and the colours of `offrl.figures.curves` follow the page's theme."""
    import warnings

    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "offrl"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph that matplotlib's own font lacks: the browser has it
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.S)
    opening, body = text.split(">", 1)
    size = re.search(r'viewBox="([\d. ]+)"', opening)
    box = size.group(1) if size else "0 0 1 1"
    body = re.sub(r'(\bid="|url\(#|href="#)', lambda m: f"{m.group(1)}{prefix}-", body)
    body = re.sub(r'style="[^"]*"', lambda m: themed(m.group()).replace("'DejaVu Sans'", FONT), body)
    body = re.sub(r"(\d\.\d\d)\d{3,}", r"\1", body)  # matplotlib writes six digits; a hundredth of a point is enough
    body = re.sub(r"\n\s*", "\n", body)
    width = float(box.split()[2])
    wide = ' class="wide"' if width > 500 else ""
    return (
        f'<svg viewBox="{box}"{wide} width="{width * 4 / 3:.0f}" role="img" aria-label="{escape(alt)}">{body.strip()}'
    )


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _filled(content: Content) -> bool:
    return content not in (None, "") and (not isinstance(content, Cell) or content.value is not None)


def _numeric(content: Content) -> bool:
    """Fit for a column of numbers; an empty cell, and one that says why there is no number, fit everywhere."""
    if content is None or isinstance(content, (int, float)):
        return True
    if isinstance(content, Cell):
        # what is marked stands for a number
        return content.value is not None or bool(content.kind) or content.text in ("", "-", "\u2013")
    return (
        content == ""
        or re.fullmatch(r"[-+\u2212]?[\d,]*\.?\d+(e[-+]?\d+)?( ?%| s)?|-|\u2013|nan|-?inf", content) is not None
    )


def _shown(content: Content) -> str:
    if content is None:
        return ""
    if isinstance(content, float):
        return f"{content:.4g}"
    return f"{content:,}" if isinstance(content, int) and not isinstance(content, bool) else str(content)


def _cell(content: Content, tag: str, right: bool) -> str:
    scope = ' scope="row"' if tag == "th" else ""
    plain = (
        content
        if isinstance(content, Cell)
        else Cell(_shown(content), value=float(content) if isinstance(content, (int, float)) else None)
    )
    names = " ".join(n for n in ("n" if right else "", plain.kind) if n)
    sort = f' data-v="{plain.value!r}"' if plain.value is not None and math.isfinite(plain.value) else ""
    hint = f' title="{escape(plain.hint)}"' if plain.hint else ""
    text = escape(plain.text)
    if plain.strong:
        text = f"<strong>{text}</strong>"
    if plain.note:
        text += f"<sup>{escape(plain.note)}</sup>"
    small = "".join(f"<small>{escape(line)}</small>" for line in plain.small)
    return f"<{tag}{scope}{_class(names)}{sort}{hint}>{text}{small}</{tag}>"
