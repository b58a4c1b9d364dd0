"""A page of docs/benchmarks: one table of algorithms and datasets from benchmark and run directories.

    python scripts/bench/scores_page.py runs/goals --title "Reaching goals" --out docs/benchmarks/goals.md \\
        --keep docs/benchmarks/scores/goals.csv

Mean over seeds of the last evaluation with its 95% interval, the seeds and the updates; `offrl.runs.results` decides what is a result.
What is not finished, or stands side by side and should not, is said below the table. What a person wrote after the line `<!-- by hand
-->` stays."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if TYPE_CHECKING:
    from offrl.runs.results import Cell, Results

HEAD = """# {title}

    {command}

Mean over seeds of the last evaluation, [95% Student-t interval], (seeds). {scale} Bold: the best mean of a file. {updates}
"""
SUCCESS = "the share of episodes that succeed"
D4RL = """Scores are normalised with D4RL's reference returns unless
marked: 0 is a random policy, 100 the reference expert."""

BY_HAND = "\n<!-- by hand -->\n"


def order(label: str) -> tuple[int, str]:
    """Cloning first, then the others by name."""
    first = ("bc", "percent_bc", "td3_bc", "iql")
    return (first.index(label) if label in first else len(first), label)


def text_of(cell: Cell | None, best: bool) -> str:
    """The text of a cell of the table."""
    if cell is None:
        return "-"
    if not cell.scores:
        reason = cell.missing[0].reason if cell.missing else "unfinished"
        return f"({reason})"
    mean, low, high = cell.interval()
    interval = f" [{low:.1f}, {high:.1f}]" if len(cell.scores) > 1 else ""
    shown = f"**{mean:.1f}**" if best else f"{mean:.1f}"
    return f"{shown}{interval} ({len(cell.scores)})" + ("" if cell.normalised else " return")


def table(results: Results) -> list[str]:
    """Algorithms down, datasets across, and the mean over datasets, where there are several, of an algorithm that has all of them."""
    cells = {(c.label, c.dataset): c for c in results.cells()}
    labels = sorted({label for label, _ in cells}, key=order)
    datasets = results.datasets
    best = {d: max((c.interval()[0] for (_, where), c in cells.items() if where == d and c.scores), default=float("nan")) for d in datasets}
    several = len(datasets) > 1
    head = [*datasets, "mean"] if several else datasets
    lines = [f"| | {' | '.join(head)} |", "|" + "---|" * (len(head) + 1)]
    for label in labels:
        row = [cells.get((label, d)) for d in datasets]
        means = [c.interval()[0] for c in row if c is not None and c.scores and c.normalised]
        average = f"{sum(means) / len(means):.1f}" if len(means) == len(datasets) else "-"
        shown = [text_of(c, c is not None and bool(c.scores) and c.interval()[0] == best[d]) for d, c in zip(datasets, row, strict=True)]
        lines.append(f"| {' | '.join([label, *shown, *([average] if several else [])])} |")
    return lines


def lengths(results: Results) -> str:
    """The number of updates of the seeds, in a sentence."""
    steps: dict[int, set[str]] = {}
    for s in results.final:
        steps.setdefault(s.step, set()).add(f"{results.label(s)} on {s.dataset}")
    if len(steps) == 1:
        return f"{next(iter(steps)):,} updates of each seed."
    usual = max(steps, key=lambda n: len(steps[n]), default=0)
    labels: dict[str, set[int]] = {}
    for s in results.final:
        labels.setdefault(results.label(s), set()).add(s.step)
    # an algorithm whose files are all of one length is named once
    groups = {n: sorted({w if len(labels[w.split(" on ")[0]]) > 1 else w.split(" on ")[0] for w in who}) for n, who in steps.items()}
    others = [f"{', '.join(who)} {n:,}" for n, who in sorted(groups.items()) if n != usual]
    return f"{usual:,} updates of each seed; {'; '.join(others)}." if others else ""


def page(results: Results, command: str, title: str = "Model-free algorithms on the same files") -> str:
    """The whole page."""
    notes = [*results.problems]
    absent = sorted(
        {f"{results.label(m)} on {m.dataset}{'' if m.seed is None else f', seed {m.seed}'}: {m.reason}" for m in results.missing}
    )
    scale = f"A score is {SUCCESS}, in %." if all(s.scored_by == "success" for s in results.final) else D4RL
    lines = [HEAD.format(title=title, command=command, scale=scale, updates=lengths(results)), *table(results)]
    places = sorted({s.provenance.place for s in results.final})
    lines += ["", f"Scored in {'; '.join(places)}."] if places else []
    lines += ["", "Not in the table, or to be read with care:", "", *(f"- {note}" for note in (*absent, *notes))] if absent or notes else []
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    from offrl.errors import UserError
    from offrl.runs.results import collect, write
    from offrl.system import files as checkpoint

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", help="run directories, benchmark directories, results.csv files, or folders of them")
    parser.add_argument("--out", type=Path, help="the Markdown file; without it the page is printed")
    parser.add_argument("--title", default="Model-free algorithms on the same files")
    parser.add_argument("--command", default="", help="the command that trained the runs, for the page")
    parser.add_argument(
        "--keep", type=Path, help="a CSV file for the scores themselves; the page can be made from it when the runs are gone"
    )
    options = parser.parse_args(arguments)
    try:
        results = collect(options.paths)
        if options.keep:
            kept = [replace(s, run=Path(s.run).name) for s in results.scores]
            for path in write(replace(results, scores=kept), options.keep)[1:]:
                path.unlink()  # the same as Parquet
        text = page(results, options.command or f"python scripts/bench/scores_page.py {' '.join(options.paths)}", options.title)
        if options.out:
            old = options.out.read_text() if options.out.is_file() else ""
            checkpoint.write_text(options.out, text + "".join(old.partition(BY_HAND)[1:]))
        else:
            print(text, end="")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
