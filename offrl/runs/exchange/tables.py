"""Tables of other libraries: CSV files with the columns algorithm, dataset, seed, step and return, one line an
evaluation or an episode.
"""

from __future__ import annotations

import csv
import math
import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from offrl.errors import UserError, one_line
from offrl.runs.exchange.files import MOST_BYTES
from offrl.runs.score import Missing, Score
from offrl.settings.diff import Variant, digest
from offrl.system import csv_text
from offrl.tasks.task import lookup

if TYPE_CHECKING:
    from offrl.runs.reader import Reader

OPTIONAL = ("score", "environment")
MOST_NAME = 200  # characters
# (dataset, algorithm, environment) -> (seed, step) -> (return, score) of each episode
Evaluations = dict[tuple[str, str, str], dict[tuple[int, int], list[tuple[float, float | None]]]]
CLOSE = 0.1  # points between a stated score and the one that a benchmark's reference returns give


def add_table(path: Path, reader: Reader) -> None:
    """Add the scores of a table to what was read: of each algorithm, dataset and seed the lines of one step are the
    episodes of one evaluation.

    The last step of an algorithm on a dataset is its final evaluation; a seed that ends before it is unfinished. The
    score is the column `score`, or, of a dataset with a benchmark's exact name, made of its reference returns. Settings
    are not known, so the seeds of two tables are never averaged. Raises UserError that names the line.
    """
    try:
        if os.path.getsize(path) > MOST_BYTES:
            raise UserError(
                f"{path} has {os.path.getsize(path):,} bytes, and such a table {MOST_BYTES:,} at most: split it"
            )
        rows = csv_text.read(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); give a file that exists") from None
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path} is no CSV table in UTF-8 ({one_line(str(error))[:80]}); write it again") from None
    if not rows:
        raise UserError(f"{path} has a header and no line; give one line for each evaluation, or episode")
    values: Evaluations = defaultdict(lambda: defaultdict(list))
    for number, row in enumerate(rows, start=2):
        cells = {name.strip(): text.strip() for name, text in row.items()}
        where = f"{path}, line {number}"
        algorithm, dataset, environment = (
            _name(cells.get(column, ""), f"{where}: {column}", column == "environment")
            for column in ("algorithm", "dataset", "environment")
        )
        seed, step = (_whole(cells.get(column, ""), f"{where}: {column}") for column in ("seed", "step"))
        if step < 0:
            raise UserError(f"{where}: step is {step}, where a number of 0 or more is due")
        score = cells.get("score", "")
        numbers = _finite(cells["return"], f"{where}: return"), _finite(score, f"{where}: score") if score else None
        values[dataset, algorithm, environment][seed, step].append(numbers)
    _add(path, values, reader)


def _add(path: Path, values: Evaluations, reader: Reader) -> None:
    table = digest({"table": str(path.resolve())})
    for (dataset, algorithm, environment), evaluations in values.items():
        source, settings = {"file": path.name}, table
        if sum(cell[:2] == (dataset, algorithm) for cell in values) > 1:  # that stand there in several environments
            source["environment"] = environment
            settings = digest({"table": table, "environment": environment})
        reader.variants.append(Variant(dataset, algorithm, settings, source, source))
        end = max(step for _, step in evaluations)
        last: dict[int, int] = defaultdict(int)
        for (seed, step), episodes in evaluations.items():
            last[seed] = max(last[seed], step)
            raw = math.fsum(r for r, _ in episodes) / len(episodes)
            stated = [s for _, s in episodes if s is not None]
            score, reference = _score(
                dataset, raw, math.fsum(stated) / len(stated) if len(stated) == len(episodes) else None
            )
            reader.scores.append(
                Score(
                    suite="",
                    dataset=dataset,
                    env_id=environment,
                    packages="",
                    reference=reference,
                    scored_by="return",
                    algorithm=algorithm,
                    settings=settings,
                    seed=seed,
                    step=step,
                    episodes=len(episodes),
                    raw=raw,
                    normalised=score,
                    success=None,
                    cell="",
                    run=str(path),
                    final=step == end,
                )
            )
        for seed, step in last.items():
            if step < end:
                cause = f"unfinished: step {step:,} of {end:,}"
                reader.missing.append(Missing(dataset, algorithm, settings, seed, str(path), cause))


def _score(dataset: str, raw: float, stated: float | None) -> tuple[float | None, str]:
    """(the normalised score, whose reference returns are 0 and 100)."""
    task = lookup(dataset)
    due = None if task is None or task.scored_by != "return" else task.normalise(raw)
    if due is None or task is None:
        return stated, ""
    return (float(due), task.ref_label) if stated is None or abs(stated - due) <= CLOSE else (stated, "")


def _name(text: str, where: str, empty: bool) -> str:
    if not text and not empty:
        raise UserError(f"{where} is empty: name it")
    if len(text) > MOST_NAME:
        raise UserError(f"{where} has {len(text):,} characters, and a name {MOST_NAME} at most: shorten it")
    return one_line(text)


def _whole(text: str, where: str) -> int:
    try:
        number = float(text)
        if number != int(number) or abs(number) > 2**53:
            raise ValueError
    except (ValueError, OverflowError):
        raise UserError(f"{where} is {text[:40]!r}, where a whole number is due") from None
    return int(number)


def _finite(text: str, where: str) -> float:
    try:
        number = float(text)
        if not abs(number) <= 1e30:
            raise ValueError
    except ValueError:
        raise UserError(f"{where} is {text[:40]!r}, where a finite number is due") from None
    return number
