"""A dataset on one page: its faults first, then what its episodes, rewards, actions and observations look like."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.costs import within_limits
from offrl.data.dataset import DataSpec
from offrl.data.loading.assemble import without_pixels
from offrl.data.raw import RawData
from offrl.data.raw.checks import Fault
from offrl.data.tools.inspect import Report, report
from offrl.data.tools.streams import shown_by
from offrl.data.transforms.columns import is_published, scales
from offrl.errors import UserError
from offrl.figures import dataset as draw
from offrl.figures.costs import episode_costs
from offrl.figures.frames import contact_sheets
from offrl.figures.sample import SAMPLE, Sample, sample_of
from offrl.figures.style import own_settings
from offrl.report.page import Cell, Page
from offrl.settings.dataset import DatasetConfig

EDGE = 1e-3  # of the range: how near its end an action counts as on it
UNLIKE = 100  # ratio of standard deviations above which observations should be normalised
WIDE = 512  # numbers in an observation above which it is not taken apart by dimension


def doctor(config: DatasetConfig, out: Path) -> Report:
    """Inspect a dataset and write `out`/index.html, one self-contained page, and its pictures as `out`/*.png.

    Data with faults are described as far as they can be. Columns above SAMPLE rows are drawn from a random sample of
    them, which the page says. Returns the report of `offrl data inspect`. Raises UserError when the data cannot be read
    or `out` cannot be written."""
    from offrl.data.loading.read import read_raw
    from offrl.data.loading.resolve import resolve

    source = resolve(config.name, config)
    if source.text:
        raise UserError(
            f"{config.name} holds texts, which offrl data doctor has no pictures of: use offrl data inspect"
        )
    raw = read_raw(config.name, config, source=source)
    findings = report(raw, config)
    write_page(raw, findings, Path(out))
    return findings


@own_settings()
def write_page(raw: RawData, findings: Report, out: Path) -> Path:
    """The page and pictures of `doctor` about columns that were already read."""
    shown = shown_by(raw)
    raw = without_pixels(raw) if shown else raw
    sample = sample_of(raw, findings)
    page = Page(
        findings.name,
        " · ".join(t for t in (findings.source, findings.path if findings.path != findings.name else "") if t),
    )
    _verdict(page, raw, findings, sample)
    _facts(page, raw, findings)
    if findings.returns is not None and findings.lengths is not None and len(findings.returns):
        page.heading("Episodes")
        with page.gallery(small=True):
            for figure, name, caption in (*draw.episodes(findings), *episode_costs(findings)):
                _add(page, figure, out / f"{name}.png", caption)
    _columns(page, raw, findings, sample, out)
    for figure, name, caption in contact_sheets(shown):
        _add(page, figure, out / f"{name}.png", caption)
    page.heading("Columns")
    page.table(
        ["column", "type", "shape", "lowest", "highest", "mean", "std"],
        _column_rows(findings),
        caption="over finite entries",
    )
    page.heading("As text")
    with page.details("the report of offrl data inspect"):
        page.preformatted(findings.render())
    return page.save(out / "index.html")


def _add(page: Page, figure: Any, path: Path, caption: str) -> None:
    from offrl.figures.style import save

    save(figure, path)
    page.figure(figure, caption)


def _verdict(page: Page, raw: RawData, findings: Report, sample: Sample) -> None:
    """Show the faults, each with its cure, then the notes to read before training."""
    bad = findings.corrupting
    mild = [f for f in findings.faults if f not in bad]
    if bad:
        title = "One fault would corrupt training" if len(bad) == 1 else f"{len(bad)} faults would corrupt training"
        page.box(f"{title}: offrl refuses this dataset as it is", [_fault(f) for f in bad], "bad")
    if mild:
        page.box("Warnings: training is possible", [_fault(f) for f in mild], "warning")
    if not findings.faults:
        page.box("No faults found", [], "good")
    remarks = [*findings.notes, *_remarks(raw, findings, sample)]
    if remarks:
        page.box("Worth knowing", remarks, "note")


def _fault(fault: Fault) -> str:
    return f"{fault.message}{fault.place}." + (f" Cure: {fault.cure}." if fault.cure else "")


def _remarks(raw: RawData, findings: Report, sample: Sample) -> list[str]:
    """Properties of sound data that decide how to train on them."""
    remarks: list[str] = []
    returns = findings.returns
    if returns is not None and len(returns):
        finite = returns[np.isfinite(returns)]
        if len(returns) == 1:
            remarks.append("There is one episode only: nothing here shows how returns vary.")
        elif len(finite) == len(returns) and np.ptp(finite) == 0:
            remarks.append(
                f"All {len(returns)} episodes have the same return, {finite[0]:.6g}: none is better than another."
            )
        elif len(finite) >= 20 and (trend := _rank_correlation(np.arange(len(finite)), finite)) > 0.5:
            text = f"Returns rise in the order of the file (rank correlation {trend:.2f}), as in a replay buffer"
            remarks.append(
                f"{text}: its first rows are unlike its last, so draw episodes at random (dataset.subsample) rather "
                "than cut it."
            )
        if findings.duplicates > 0.01 * findings.rows:
            share = 100 * findings.duplicates / findings.rows
            remarks.append(
                f"{findings.duplicates:,} rows ({share:.1f}%) repeat an earlier row's observation, action and reward."
            )
    rewards = raw.columns.get("rewards")
    if rewards is not None and rewards.ndim == 1 and len(rewards):
        values = sample.take(rewards)
        used = 100 * float((values != 0).mean())
        if used == 0:
            remarks.append("Every reward is zero: there is nothing to learn from but the actions.")
        elif used < 2:
            remarks.append(f"Rewards are sparse: {used:.2g}% of the rows have one other than zero.")
    for column in findings.columns:
        if column.name == "observations" and column.constant:
            total = int(np.prod(column.shape[1:], dtype=int))
            remarks.append(f"{len(column.constant)} of {total} dimensions of the observations never change.")
    observations = raw.columns.get("observations")
    if observations is not None and 1 < np.prod(observations.shape[1:]) <= WIDE and len(observations):
        remarks += _scales(sample.take(observations), raw)
    for share, d in draw.edge_shares(raw, sample, EDGE)[:3]:
        if share > 0.1:
            remarks.append(f"Action dimension {d} lies on an end of its range in {100 * share:.0f}% of the rows.")
    return remarks


def _scales(values: np.ndarray, raw: RawData) -> list[str]:
    """Dimensions of very unlike spread, of observations [n, O]."""
    finite = values[np.isfinite(values).all(1)]
    spreads = finite.std(0) if len(finite) else np.zeros(values.shape[1])
    spreads = np.where(spreads > 0, spreads, np.nan)
    if np.isnan(spreads).all() or not np.nanmax(spreads) > UNLIKE * np.nanmin(spreads):
        return []
    wide, narrow = int(np.nanargmax(spreads)), int(np.nanargmin(spreads))
    text = f"dimension {wide} varies {spreads[wide] / spreads[narrow]:,.3g} times as much as dimension {narrow}"
    spec = DataSpec((values.shape[1],), 1, name=raw.name, source=raw.source, task=raw.task)
    std = np.nan_to_num(spreads)
    scaled_spread = std / scales(std, np.abs(finite).max(0), is_published(spec))
    if (scaled_spread[[wide, narrow]] > 0.5).all():
        return [f"The scales of the observations differ: {text}; dataset.normalize_observations=true makes them alike."]
    return [
        f"The scales of the observations differ: {text}; dataset.normalize_observations=true divides dimension "
        f"{narrow} by {std[narrow] / scaled_spread[narrow]:.3g}, and leaves it a standard deviation of "
        f"{scaled_spread[narrow]:.2g}."
    ]


def _rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's, without correction for ties."""
    ranks = [np.argsort(np.argsort(v, kind="stable"), kind="stable") for v in (x, y)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _facts(page: Page, raw: RawData, findings: Report) -> None:
    rows: list[list[str]] = [["rows", f"{findings.rows:,}"]]
    if findings.returns is not None and findings.lengths is not None and len(findings.returns):
        total = len(findings.returns)
        rows.append(
            [
                "episodes",
                f"{total:,}: {findings.terminations:,} terminated, {total - findings.terminations:,} timed out or cut",
            ]
        )
        rows.append(["episode return", draw.spread(findings.returns)])
        if findings.scores is not None:
            rows.append([f"normalised ({findings.reference})", draw.spread(findings.scores)])
        if findings.costs is not None:
            rows += [["episode cost", draw.spread(findings.costs)], *within_limits(findings.costs, findings.returns)]
        rows.append(["episode length", draw.spread(findings.lengths)])
    observations = raw.columns.get("observations")
    if observations is not None and observations.size:
        rows.append(["observations", f"{' x '.join(map(str, observations.shape[1:])) or '1'} {observations.dtype}"])
    rows += [["stream", str(stream)] for stream in findings.streams]
    rows += [
        [name, text] for name, text in (("actions", findings.actions), ("environment", findings.environment)) if text
    ]
    page.table(["", ""], rows)


def _columns(page: Page, raw: RawData, findings: Report, sample: Sample, out: Path) -> None:
    """Pictures of the columns, as far as these can be drawn."""
    sampling = "" if sample.all_rows else f" Drawn from {len(sample.rows):,} of {raw.rows:,} rows, taken at random."

    def add(name: str, picture: tuple[Any, str]) -> None:
        figure, caption = picture
        _add(page, figure, out / f"{name}.png", caption + sampling)

    rewards, actions, observations = (raw.columns.get(k) for k in ("rewards", "actions", "observations"))
    if rewards is not None and len(rewards) and rewards.ndim == 1:
        page.heading("Rewards")
        add("rewards", draw.rewards(sample.take(rewards)[:, 0]))
    if actions is not None and len(actions):
        page.heading("Actions")
        values = sample.take(actions)
        picture = draw.discrete(values[:, 0], raw.num_actions) if raw.discrete else draw.actions(values, raw, EDGE)
        add("actions", picture)
    if observations is None or not observations.size:
        return
    page.heading("Observations")
    values = sample.take(observations)
    width = values.shape[1]
    if width > WIDE:
        page.text(
            f"An observation has {width:,} numbers; their spread is drawn together, and the coverage from {WIDE} of "
            "them, evenly apart."
        )
        values = values[:, :: -(-width // WIDE)]
        add("observations", draw.rewards(values.ravel()[:SAMPLE], "value of an entry"))
    else:
        add("observations", draw.observations(values))
        with page.details("each dimension in numbers"):
            headers = ["dimension", "lowest", "1%", "median", "99%", "highest", "std"]
            page.table(headers, _dimension_rows(values, raw.dimension_names("observations")), sortable=True)
    page.heading("Coverage")
    scores = findings.returns if findings.scores is None else findings.scores
    per_row = None
    if scores is not None and sample.episode is not None and len(values) == len(sample.rows):
        per_row = scores[sample.episode]
    figure, caption = draw.coverage(values, per_row, "return" if findings.scores is None else "score")
    if figure is None:
        page.text(caption)
    else:
        add("coverage", (figure, caption))


def _column_rows(findings: Report) -> list[list[Any]]:
    return [
        [
            c.name,
            c.dtype,
            "x".join(map(str, c.shape)),
            *(Cell(f"{v:.4g}", value=v) for v in (c.low, c.high, c.mean, c.std)),
        ]
        for c in findings.columns
    ]


def _dimension_rows(values: np.ndarray, names: Sequence[str]) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for d in range(values.shape[1]):
        finite = values[np.isfinite(values[:, d]), d]
        numbers = [*np.quantile(finite, (0, 0.01, 0.5, 0.99, 1)), finite.std()] if len(finite) else [np.nan] * 6
        name = names[d] if len(names) == values.shape[1] else str(d)
        rows.append([Cell(name, value=float(d)), *(Cell(f"{v:.4g}", value=float(v)) for v in numbers)])
    return rows
