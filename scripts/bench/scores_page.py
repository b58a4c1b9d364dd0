"""A page of docs/benchmarks: one table of algorithms and datasets from benchmark and run directories.

    python scripts/bench/scores_page.py runs/goals --title "Reaching goals" --out docs/benchmarks/goals.md \\
        --keep docs/benchmarks/scores/goals.csv

Mean over seeds of the last evaluation with its 95% interval, the seeds and the updates; `offrl.runs.results` decides
what is a result. What is not finished, or stands side by side and should not, is said below the table. What a person
wrote after the line `<!-- by hand -->` stays."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if TYPE_CHECKING:
    from offrl.runs.score import Cell, Results

HEAD = """# {title}

    {command}

Mean over seeds of the last evaluation, [95% Student-t interval], (seeds).
{scale}
Bold: the best mean of a file.
{sizes}
"""
SUCCESS = "the share of episodes that succeed"
D4RL = (
    "Scores are normalised with D4RL's reference returns unless marked: 0 is a random policy, 100 the reference expert."
)

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
    """Algorithms down, datasets across, and the mean over datasets, where there are several, of an algorithm that has
    all of them.

    The first line says how long the runs were, so that no score is taken for that of a published run.
    """
    cells = {(c.label, c.dataset): c for c in results.cells()}
    labels = sorted({label for label, _ in cells}, key=order)
    datasets = results.datasets
    best = {
        d: max((c.interval()[0] for (_, where), c in cells.items() if where == d and c.scores), default=float("nan"))
        for d in datasets
    }
    several = len(datasets) > 1
    head = [*datasets, "mean"] if several else datasets
    lines = [f"| | {length_heading(results)} | {' | '.join(head)} |", "|" + "---|" * (len(head) + 2)]
    for label in labels:
        row = [cells.get((label, d)) for d in datasets]
        means = [c.interval()[0] for c in row if c is not None and c.scores and c.normalised]
        average = f"{sum(means) / len(means):.1f}" if len(means) == len(datasets) else "-"
        shown = [
            text_of(c, c is not None and bool(c.scores) and c.interval()[0] == best[d])
            for d, c in zip(datasets, row, strict=True)
        ]
        lines.append(f"| {' | '.join([label, lengths(results, label), *shown, *([average] if several else [])])} |")
    return lines


def published_updates(algorithm: str) -> int:
    """Updates of a run as its paper makes them, by configs/algo."""
    from offrl.settings.compose import compose

    return compose({"algo": algorithm, "dataset": "data", "experiment": "none"}).steps


def updates_of(results: Results) -> dict[str, dict[str, tuple[int, int]]]:
    """Label -> dataset -> updates of its runs, and of published ones."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for s in results.final:
        found.setdefault(results.label(s), {})[s.dataset] = (s.step, published_updates(s.algorithm))
    return found


def length_heading(results: Results) -> str:
    """The heading of the column of lengths: what share of published runs these are."""
    numbers = sorted((n for row in updates_of(results).values() for n in row.values()), key=lambda n: n[0] / n[1])
    shares = [share(*n) for n in numbers]
    if not shares or shares[0] == "all":
        return "updates"
    return f"updates: **{shares[0] if shares[0] == shares[-1] else f'{shares[0]} to {shares[-1]}'}** of the published"


def share(updates: int, published: int) -> str:
    """What part of the published updates these are: "1/20"."""
    return f"1/{round(published / updates)}" if updates < 0.95 * published else "all"


def lengths(results: Results, label: str) -> str:
    """The updates of an algorithm's runs, of those of published ones; by dataset where they differ."""
    row = updates_of(results).get(label, {})
    datasets: dict[tuple[int, int], list[str]] = {}
    for dataset, numbers in row.items():
        datasets.setdefault(numbers, []).append(dataset)
    parts = [
        f"{n:,} of {of:,}" + (f" on {', '.join(where)}" if len(datasets) > 1 else "")
        for (n, of), where in sorted(datasets.items())
    ]
    return "; ".join(parts) or "-"


def page(
    results: Results, command: str, title: str = "Model-free algorithms on the same files", sizes: str = ""
) -> str:
    """The whole page. sizes: of networks and batches, and whether they are the published ones."""
    notes = [*results.problems]
    absent = sorted(
        {
            f"{results.label(m)} on {m.dataset}{'' if m.seed is None else f', seed {m.seed}'}: {m.reason}"
            for m in results.missing
        }
    )
    scale = f"A score is {SUCCESS}, in %." if all(s.scored_by == "success" for s in results.final) else D4RL
    lines = [
        HEAD.format(title=title, command=command, scale=scale, sizes=sizes).replace("\n\n\n", "\n\n"),
        *table(results),
    ]
    places = sorted({s.provenance.place for s in results.final})
    lines += ["", f"Scored in {'; '.join(places)}."] if places else []
    lines += (
        ["", "Not in the table, or to be read with care:", "", *(f"- {note}" for note in (*absent, *notes))]
        if absent or notes
        else []
    )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    from offrl.errors import UserError
    from offrl.runs.results import collect, write
    from offrl.system import files as checkpoint

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "paths", nargs="+", help="run directories, benchmark directories, results.csv files, or folders of them"
    )
    parser.add_argument("--out", type=Path, help="the Markdown file; without it the page is printed")
    parser.add_argument("--title", default="Model-free algorithms on the same files")
    parser.add_argument(
        "--sizes", default="", help="sizes of networks and batches, and whether they are the published ones: a sentence"
    )
    parser.add_argument("--command", default="", help="the command that trained the runs, for the page")
    parser.add_argument(
        "--keep",
        type=Path,
        help="a CSV file for the scores themselves; the page can be made from it when the runs are gone",
    )
    options = parser.parse_args(arguments)
    try:
        results = collect(options.paths)
        if options.keep:
            kept = [replace(s, run=Path(s.run).name) for s in results.scores]
            for path in write(replace(results, scores=kept), options.keep)[1:]:
                path.unlink()  # the same as Parquet
        text = page(
            results,
            options.command or f"python scripts/bench/scores_page.py {' '.join(options.paths)}",
            options.title,
            options.sizes,
        )
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
