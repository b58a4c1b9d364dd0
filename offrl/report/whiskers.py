"""An answer as part of a page: its sentences, and a table whose rows are drawn as dots with whiskers.

The picture is a table, and its drawings stretch with the window: it is read on a phone, on paper and by a screen
reader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offrl.report.page import Page, escape
from offrl.report.rows import Interval, Published, digits, span
from offrl.report.style import themed

MOST_ROWS = 15
HEIGHT = 34  # of a row, in pixels
ROOM = 0.6  # how far whiskers may reach beyond the dots, in widths of what the dots span
INK = "var(--ink)"


@dataclass(frozen=True)
class Row:
    """One algorithm in the picture."""

    label: str
    estimate: Interval | None  # (value, low, high), the ends NaN for one seed; None without a final score
    note: str = ""  # below the number
    published: Published | None = None


@dataclass(frozen=True)
class Answer:
    """A sentence that says who is ahead, one that says how sure that is, and what the picture shows."""

    verdict: str
    sure: str
    kind: str  # one of page.KINDS: how sure, as a colour
    unit: str  # of the numbers: the heading of their column
    caption: str  # what the picture shows
    rows: tuple[Row, ...] = ()  # the best first
    score: bool = True  # normalised, rather than returns
    behaviour: float | None = None  # the mean of the data's own episodes
    remarks: tuple[str, ...] = ()  # what was left out, chosen or published
    commands: tuple[str, ...] = ()  # that lead on


def show(page: Page, answer: Answer, colours: Mapping[str, str], *, first: bool) -> None:
    """Write an answer. colours: of each label. first: in large letters, as the first of a page."""
    page.markup(f'<section class="answer"><p class="verdict{" first" if first else ""}">{escape(answer.verdict)}</p>')
    page.markup(f'<p class="sure {answer.kind}">{escape(answer.sure)}</p>')
    if answer.commands:
        page.preformatted("\n".join(answer.commands))
    if answer.rows:
        page.markup(picture(answer, colours))
    page.items(answer.remarks)
    page.markup("</section>")


def picture(answer: Answer, colours: Mapping[str, str], column: str = "algorithm") -> str:
    """The table of an answer's rows as HTML. column: what its rows are."""
    rows = answer.rows[:MOST_ROWS]
    estimated = [row for row in rows if row.estimate is not None]
    marks = [answer.behaviour] if answer.behaviour is not None and estimated else []
    axis = _Axis(estimated, marks) if estimated else None
    body = [_row(row, axis, colours.get(row.label, INK), answer) for row in estimated]
    if marks and axis is not None:
        body.append(
            f'<tr class="soft"><th scope="row">data&#x27;s mean</th><td class="track">{axis.svg("")}</td>'
            f"<td>{digits(marks[0], answer.score)}</td></tr>"
        )
    if axis is not None:
        body.append(
            f'<tr class="axis" aria-hidden="true"><td></td><td class="track">{axis.labels()}</td><td></td></tr>'
        )
    body += [_row(row, axis, INK, answer) for row in rows if row.estimate is None]
    if len(answer.rows) > MOST_ROWS:
        body.append(
            f'<tr><th scope="row" class="soft" colspan="3">and {len(answer.rows) - MOST_ROWS} more, in the tables '
            "below</th></tr>"
        )
    head = f'<tr><th scope="col">{escape(column)}</th><td></td><th scope="col">{escape(answer.unit)}</th></tr>'
    return f'<table class="whiskers"><caption>{escape(answer.caption)}</caption><thead>{head}</thead><tbody>{"".join(body)}</tbody></table>'  # noqa: E501


def _row(row: Row, axis: _Axis | None, colour: str, answer: Answer) -> str:
    name = f'<th scope="row">{escape(row.label)}</th>'
    if row.estimate is None or axis is None:
        return f'<tr>{name}<td class="why" colspan="2">{escape(row.note)}</td></tr>'
    interval = span(row.estimate, answer.score)
    small = [f"[{interval.replace(' to ', ', ')}]"] if interval else []
    small += [row.note] if row.note else []
    small += [f"published {row.published.text()}"] if row.published is not None else []
    number = f"<strong>{digits(row.estimate[0], answer.score)}</strong>" + "".join(
        f" <small>{escape(s)}</small>" for s in small
    )
    return f'<tr>{name}<td class="track">{axis.svg(_dot(row, axis, colour))}</td><td>{number}</td></tr>'


def _dot(row: Row, axis: _Axis, colour: str) -> str:
    assert row.estimate is not None
    value, low, high = row.estimate
    shape = ""
    if row.published is not None:
        shape += (
            f'<svg x="{axis.position(row.published.mean)}" y="50%" overflow="visible"><path d="M0 -6L6 0 0 6-6 0z" '
            'class="diamond"/></svg>'
        )
    paint = themed(escape(colour))
    if math.isfinite(low) and math.isfinite(high):
        a, b = axis.position(low), axis.position(high)
        # a cut whisker has no end
        ends = [position for position, end in ((a, low), (b, high)) if axis.low <= end <= axis.high]
        caps = "".join(f'<line x1="{x}" x2="{x}" y1="34%" y2="66%"/>' for x in ends)
        shape += f'<g style="stroke:{paint}" class="whisker"><line x1="{a}" x2="{b}" y1="50%" y2="50%"/>{caps}</g>'
    return f'{shape}<circle cx="{axis.position(value)}" cy="50%" r="5.5" style="fill:{paint}"/>'


class _Axis:
    """The horizontal axis of all rows: scores and their places in percent of the width."""

    def __init__(self, rows: Sequence[Row], marks: Sequence[float]) -> None:
        from matplotlib.ticker import MaxNLocator

        estimates = [row.estimate for row in rows if row.estimate is not None]
        values = [
            *(e[0] for e in estimates),
            *marks,
            *(row.published.mean for row in rows if row.published is not None),
        ]
        ends = [x for e in estimates for x in e if math.isfinite(x)] + values
        size = max(values) - min(values) or max(ends) - min(ends) or abs(values[0]) or 1.0
        # Two seeds have an interval twelve times as wide as themselves: the dots decide the range, and a whisker may
        # leave it.
        low, high = max(min(ends), min(values) - ROOM * size), min(max(ends), max(values) + ROOM * size)
        room = 0.06 * ((high - low) or size)
        self.low, self.high, self.marks = low - room, high + room, marks
        self.ticks = [t for t in MaxNLocator(5).tick_values(self.low, self.high) if self.low <= t <= self.high]

    def position(self, value: float) -> str:
        return f"{100 * min(1.0, max(0.0, (value - self.low) / (self.high - self.low))):.2f}%"

    def svg(self, content: str) -> str:
        """A row's drawing: grid lines, the data's mean, and what is in front of them."""
        grid = "".join(
            f'<line x1="{(x := self.position(t))}" x2="{x}" y1="0" y2="100%" class="grid"/>' for t in self.ticks
        )
        mean = "".join(
            f'<line x1="{(x := self.position(m))}" x2="{x}" y1="0" y2="100%" class="mean"/>' for m in self.marks
        )
        return f'<svg width="100%" height="{HEIGHT}" aria-hidden="true">{grid}{mean}{content}</svg>'

    def labels(self) -> str:
        width = (self.ticks[-1] - self.ticks[0]) / (len(self.ticks) - 1) if len(self.ticks) > 1 else 1.0
        decimals = max(0, -math.floor(math.log10(width) + 1e-9))
        texts = "".join(
            f'<text x="{self.position(t)}" y="14" text-anchor="middle">{t:,.{decimals}f}</text>' for t in self.ticks
        )
        return f'<svg width="100%" height="20">{texts}</svg>'
