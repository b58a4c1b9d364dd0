"""The results store: scores of many runs as one tidy table, what is missing from it, and what may be averaged.

    results = collect(["runs/d4rl-gym", "runs/iql-hopper-medium-v2-0c350f"])
    write(results, "runs/d4rl-gym")              # results.csv, and results.parquet where pyarrow is installed
    for cell in results.cells():                 # one dataset, one algorithm with its settings
        ...                                      # final scores by seed, and what is missing
    for group in groups(results)[0]:             # datasets whose scores mean the same
        ...                                      # matrices for offrl.statistics.aggregate

The headline is always the last evaluation of a run that reached its `steps`; a best evaluation is for showing beside it
only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from offrl.errors import UserError
from offrl.runs.comparable import unlike
from offrl.runs.exchange.merge import add
from offrl.runs.paths import check_exists
from offrl.runs.reader import Reader
from offrl.runs.score import COLUMNS, COSTS, RESULTS, Results, Score
from offrl.settings.diff import Variant, labels


def collect(paths: Sequence[str | Path], stride: int = 1) -> Results:
    """Read run directories, benchmark directories, folders above them, results.csv files, and results of others (.json,
    .jsonl, .csv).

    A folder is searched; its results.csv is read only where no runs lie in or below it. What is damaged or half-written
    is named in `Results.problems` and left out. Runs that agree in data, settings and seed are counted once and named.
    stride: see `Results`. Raises UserError for a path that does not exist, and where no run, benchmark or table is
    found.
    """
    reader = Reader(stride)
    for source in paths:
        path = Path(source)
        check_exists(path)
        if not reader.read(path):
            raise UserError(
                f"{path} holds no run (run.json), no benchmark (benchmark.json) and no {RESULTS}; give a folder that "
                "offrl wrote, a results.json, or a .csv with the columns algorithm, dataset, seed, step, return"
            )
    if not paths:
        raise UserError("nothing to read: give run directories, benchmark directories or files of results")
    documents = add(reader) if reader.files else []
    scores, duplicates = _without_duplicates(reader.scores)
    known = {v.key: v for v in reader.variants}
    variants = [*reader.variants, *(Variant(*key) for key in dict.fromkeys(s.key for s in scores) if key not in known)]
    finished = {(*s.key, s.seed) for s in scores if s.final}
    missing = [m for m in dict.fromkeys(reader.missing) if (m.dataset, m.algorithm, m.settings, m.seed) not in finished]
    results = Results(
        scores,
        reader.runs,
        [],
        missing,
        labels(variants),
        reader.references,
        reader.reference_source,
        documents,
        stride,
        {v.key: v.flat for v in variants},
    )
    results.problems.extend(dict.fromkeys([*reader.problems, *duplicates, *unlike(results)]))
    return results


def _without_duplicates(scores: list[Score]) -> tuple[list[Score], list[str]]:
    """(the scores of one run for each dataset, algorithm, settings and seed: the one that got furthest, lines that name
    the others).
    """
    by_seed: dict[tuple[Any, ...], dict[str, list[Score]]] = defaultdict(lambda: defaultdict(list))
    for s in scores:
        key = (*s.key, s.seed)
        by_seed[key][s.run].append(s)
    dropped: dict[tuple[str, str, str, str], list[tuple[int, bool]]] = defaultdict(list)
    duplicates: set[tuple[Any, ...]] = set()
    for (dataset, algorithm, settings, seed), by_run in by_seed.items():
        counted, *repeats = sorted(
            by_run, key=lambda run: (-any(s.final for s in by_run[run]), -max(s.step for s in by_run[run]))
        )
        raw_scores = {s.step: s.raw for s in by_run[counted]}
        for other in repeats:
            dropped[dataset, algorithm, counted, other].append(
                (seed, any(raw_scores.get(s.step, s.raw) != s.raw for s in by_run[other]))
            )
            duplicates.add((dataset, algorithm, settings, seed, other))
    lines = []
    for (dataset, algorithm, counted, other), copies in dropped.items():
        seeds = f"seed{'s' if len(copies) > 1 else ''} {', '.join(str(seed) for seed, _ in copies)}"
        unlike = (
            "; their scores at the same steps differ, so one was trained or scored otherwise"
            if any(u for _, u in copies)
            else ""
        )
        lines.append(
            f"{counted} and {other} are the same: {algorithm} on {dataset}, same settings, {seeds}; counted once, from "
            f"{counted}{unlike}"
        )
    return [s for s in scores if (*s.key, s.seed, s.run) not in duplicates], lines


# ---------------------------------------------------------------------------------------------------------------- files


def write(results: Results, path: str | Path) -> list[Path]:
    """Write the scores to a .csv file, or to results.csv in a folder, and beside it .parquet where pyarrow is
    installed; atomically.

    Returns the files. Raises UserError where they cannot be written.
    """
    from offrl.runs.log import write_error
    from offrl.system.csv_text import text_of
    from offrl.system.files import replacing, write_text

    target = Path(path) if Path(path).suffix == ".csv" else Path(path) / RESULTS
    names = (*COLUMNS, *(COSTS if any(s.cost is not None for s in results.scores) else ()))
    columns = [[getattr(s, name) for s in results.scores] for name in names]
    # JSON's words for yes and no
    texts = [["true" if v else "false" for v in c] if c and isinstance(c[0], bool) else c for c in columns]
    write_text(target, text_of([names, *zip(*texts, strict=True)]))
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError:
        if target.name == RESULTS:  # an older table beside the new one would mislead
            target.with_suffix(".parquet").unlink(missing_ok=True)
        return [target]
    kinds = {
        "int": pa.int64(),
        "float": pa.float64(),
        "float | None": pa.float64(),
        "bool": pa.bool_(),
        "str": pa.string(),
    }
    schema = pa.schema([(f.name, kinds[str(f.type)]) for f in fields(Score) if f.name in names])
    table = pa.table(dict(zip(names, columns, strict=True)), schema=schema)
    beside = target.with_suffix(".parquet")
    try:
        with replacing(beside) as file:
            parquet.write_table(table, file)
    except OSError as error:
        raise write_error(error, beside) from None
    return [target, beside]
